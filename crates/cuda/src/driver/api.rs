//! The functions of libcuda that this crate calls, looked up once.
//!
//! Result codes are plain numbers: a newer driver may return one that today's enumeration lacks.

use crate::error::{OLDEST_CUDA, Unusable};
use cudarc::driver::sys;
use fulgurite_ptx::device::DeviceError;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;

/// Declares the table: one field per function, loaded from the library by name.
macro_rules! entries {
    ($($name:ident($($of:ty),*);)*) => {
        /// The driver's functions; a value of this type proves that all of them exist.
        #[allow(non_snake_case)]
        pub(crate) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($of),*) -> u32,)*
        }

        impl Api {
            fn load() -> Result<Api, Unusable> {
                // SAFETY: opening the driver's library runs its initialisers, which is their purpose.
                if !unsafe { sys::is_culib_present() } {
                    return Err(Unusable::NoDriver);
                }
                // SAFETY: opening the library runs its initialisers; the library is present, so this does not panic.
                let library = unsafe { sys::culib() };
                Ok(Api {
                    $($name: {
                        let name = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the type is that of the function's declaration in cuda.h, with results as numbers.
                        let entry = unsafe { library.get::<unsafe extern "C" fn($($of),*) -> u32>(name) };
                        *entry.map_err(|_| Unusable::NoEntry { entry: stringify!($name) })?
                    },)*
                })
            }
        }
    };
}

entries! {
    cuInit(c_uint);
    cuDriverGetVersion(*mut c_int);
    cuGetErrorName(u32, *mut *const c_char);
    cuGetErrorString(u32, *mut *const c_char);
    cuDeviceGetCount(*mut c_int);
    cuDeviceGet(*mut sys::CUdevice, c_int);
    cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
    cuDeviceGetAttribute(*mut c_int, c_uint, sys::CUdevice);
    cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
    cuDevicePrimaryCtxRelease_v2(sys::CUdevice);
    cuCtxGetCurrent(*mut sys::CUcontext);
    cuCtxPushCurrent_v2(sys::CUcontext);
    cuCtxPopCurrent_v2(*mut sys::CUcontext);
    cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
    cuMemFree_v2(sys::CUdeviceptr);
    cuMemGetInfo_v2(*mut usize, *mut usize);
    cuMemGetAddressRange_v2(*mut sys::CUdeviceptr, *mut usize, sys::CUdeviceptr);
    cuMemsetD8Async(sys::CUdeviceptr, u8, usize, sys::CUstream);
    cuMemcpyHtoD_v2(sys::CUdeviceptr, *const c_void, usize);
    cuMemcpyDtoH_v2(*mut c_void, sys::CUdeviceptr, usize);
    cuLinkCreate_v2(c_uint, *mut sys::CUjit_option, *mut *mut c_void, *mut sys::CUlinkState);
    cuLinkAddData_v2(sys::CUlinkState, c_uint, *mut c_void, usize, *const c_char, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
    cuLinkComplete(sys::CUlinkState, *mut *mut c_void, *mut usize);
    cuLinkDestroy(sys::CUlinkState);
    cuModuleLoadDataEx(*mut sys::CUmodule, *const c_void, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
    cuModuleUnload(sys::CUmodule);
    cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
    cuFuncSetAttribute(sys::CUfunction, c_uint, c_int);
    cuFuncGetAttribute(*mut c_int, c_uint, sys::CUfunction);
    cuTensorMapEncodeTiled(*mut sys::CUtensorMap, c_uint, u32, *mut c_void, *const u64, *const u64, *const u32, *const u32, c_uint, c_uint, c_uint, c_uint);
    cuLaunchKernelEx(*const sys::CUlaunchConfig, sys::CUfunction, *mut *mut c_void, *mut *mut c_void);
    cuStreamCreate(*mut sys::CUstream, c_uint);
    cuStreamDestroy_v2(sys::CUstream);
    cuStreamSynchronize(sys::CUstream);
    cuStreamBeginCapture_v2(sys::CUstream, c_uint);
    cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph);
    cuStreamIsCapturing(sys::CUstream, *mut c_uint);
    cuStreamGetCaptureInfo_v2(sys::CUstream, *mut c_uint, *mut u64, *mut sys::CUgraph, *mut *const sys::CUgraphNode, *mut usize);
    cuUserObjectCreate(*mut sys::CUuserObject, *mut c_void, unsafe extern "C" fn(*mut c_void), c_uint, c_uint);
    cuUserObjectRelease(sys::CUuserObject, c_uint);
    cuGraphRetainUserObject(sys::CUgraph, sys::CUuserObject, c_uint, c_uint);
    cuThreadExchangeStreamCaptureMode(*mut c_uint);
    cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong);
    cuGraphDestroy(sys::CUgraph);
    cuGraphExecDestroy(sys::CUgraphExec);
    cuGraphLaunch(sys::CUgraphExec, sys::CUstream);
    cuEventCreate(*mut sys::CUevent, c_uint);
    cuEventRecord(sys::CUevent, sys::CUstream);
    cuEventSynchronize(sys::CUevent);
    cuEventElapsedTime(*mut f32, sys::CUevent, sys::CUevent);
    cuEventDestroy_v2(sys::CUevent);
}

/// The initialised driver. If it is missing, the next call looks for it again.
pub(crate) fn api() -> Result<&'static Api, DeviceError> {
    static API: OnceLock<Api> = OnceLock::new();
    if let Some(api) = API.get() {
        return Ok(api);
    }
    let api = Api::load()?;
    // The version is available before initialisation, and an old driver is a clearer reason than its initialisation
    // error.
    let version = api.version()?;
    if version < OLDEST_CUDA {
        return Err(Unusable::OldDriver { got: version }.into());
    }
    // SAFETY: 0 is the only value of the flags.
    let code = unsafe { (api.cuInit)(0) };
    if code != 0 {
        return Err(Unusable::NoStart { what: api.text(code) }.into());
    }
    Ok(API.get_or_init(|| api))
}

impl Api {
    /// The newest CUDA version that the driver supports.
    pub fn version(&self) -> Result<(u32, u32), DeviceError> {
        let mut version = 0;
        // SAFETY: `version` is written.
        let code = unsafe { (self.cuDriverGetVersion)(&mut version) };
        self.check("cuDriverGetVersion", code)?;
        Ok((version as u32 / 1000, version as u32 % 1000 / 10))
    }

    /// Turns a result code into an error.
    pub fn check(&self, call: &'static str, code: u32) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        Err(DeviceError::Failed { call, what: self.text(code) })
    }

    /// The driver's name for a result code, and its description.
    pub fn text(&self, code: u32) -> String {
        let say = |ask: unsafe extern "C" fn(u32, *mut *const c_char) -> u32| {
            let mut text = ptr::null();
            // SAFETY: `text` is written; it is null for a code that the driver does not know.
            unsafe { ask(code, &mut text) };
            if text.is_null() {
                return None;
            }
            // SAFETY: the text is a zero-terminated constant of the driver.
            Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        match (say(self.cuGetErrorName), say(self.cuGetErrorString)) {
            (Some(name), Some(sentence)) => format!("{name}: {sentence}"),
            _ => format!("error {code}"),
        }
    }
}
