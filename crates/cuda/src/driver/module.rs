//! Compiling, loading and launching.

use super::{Context, Entered};
use crate::map::MapArguments;
use cudarc::driver::sys;
use fulgurite_ptx::device::{DeviceError, Stream};
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

/// Bytes of each of the compiler's two logs; a verbose report of a large kernel has about 2 KiB.
const LOG_BYTES: usize = 64 * 1024;
/// Clusters of more blocks than this must be asked for.
const PORTABLE_CLUSTER: u32 = 8;
/// Dynamic shared memory that needs no asking, in bytes.
const PLAIN_SHARED_BYTES: u32 = 48 * 1024;

/// The buffers into which the driver's compiler writes, and the options that say so. All of it lies on the heap, where
/// it stays for as long as a linker that was given it lives.
struct Report {
    info: Vec<u8>,
    errors: Vec<u8>,
    options: Vec<sys::CUjit_option>,
    values: Vec<*mut c_void>,
}

impl Report {
    fn new() -> Report {
        use sys::CUjit_option_enum as Option;
        let (mut info, mut errors) = (vec![0u8; LOG_BYTES], vec![0u8; LOG_BYTES]);
        let number = |n: usize| ptr::without_provenance_mut::<c_void>(n);
        let (options, values) = [
            (Option::CU_JIT_INFO_LOG_BUFFER, info.as_mut_ptr().cast()),
            (Option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES)),
            (Option::CU_JIT_ERROR_LOG_BUFFER, errors.as_mut_ptr().cast()),
            (Option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES)),
            (Option::CU_JIT_LOG_VERBOSE, number(1)),
        ]
        .into_iter()
        .unzip();
        Report { info, errors, options, values }
    }

    /// How many options, which, and their values.
    fn options(&mut self) -> (c_uint, *mut sys::CUjit_option, *mut *mut c_void) {
        (self.options.len() as c_uint, self.options.as_mut_ptr(), self.values.as_mut_ptr())
    }

    /// What the compiler wrote, mistakes first.
    fn text(&self) -> String {
        let until_zero = |bytes: &[u8]| {
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).trim().to_string()
        };
        let parts = [until_zero(&self.errors[..]), until_zero(&self.info[..])];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
    }
}

/// A kernel's text, ended by a zero.
fn c_text(text: &str) -> CString {
    CString::new(text).expect("bug in fulgurite: a kernel's text has a zero byte in it")
}

/// A linker that is destroyed when dropped.
struct Linker<'a> {
    entered: &'a Entered<'a>,
    state: sys::CUlinkState,
    /// Written by the driver until the linker is gone.
    report: Report,
}

impl Drop for Linker<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created and is destroyed once; its report is dropped after this.
        unsafe { (self.entered.api.cuLinkDestroy)(self.state) };
    }
}

/// A loaded kernel, unloaded when dropped.
pub(crate) struct Code {
    context: Arc<Context>,
    module: sys::CUmodule,
    function: sys::CUfunction,
    /// How many arguments a launch gives.
    parameters: usize,
}

// SAFETY: the driver's handles may be used from any thread in which their context is current.
unsafe impl Send for Code {}
// SAFETY: the same.
unsafe impl Sync for Code {}

impl Code {
    /// Whether it is loaded in this context.
    pub fn belongs_to(&self, context: &Context) -> bool {
        self.context.handle == context.handle
    }
}

impl Drop for Code {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: loaded once and unloaded once.
            unsafe { (entered.api.cuModuleUnload)(self.module) };
        }
    }
}

/// An argument of a launch, where the driver copies it from: 128 bytes, as much as the largest kind of parameter has,
/// aligned as a tensor map must be.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct Argument([u64; 16]);

impl Argument {
    /// A number of at most 64 bits; the lower bytes come first, as in the GPU.
    pub fn number(bits: u64) -> Argument {
        let mut words = [0; 16];
        words[0] = bits;
        Argument(words)
    }
}

/// How many blocks of what a launch starts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub blocks: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// Whether it may start while the grid before it ends: only for kernels that wait for it themselves.
    pub overlaps: bool,
}

impl Entered<'_> {
    /// Compiles a kernel's text: its code, and what the compiler said. An error has the compiler's words where
    /// there are any.
    pub fn compile(&self, text: &str) -> Result<(Vec<u8>, String), (DeviceError, String)> {
        let api = self.api;
        let mut report = Report::new();
        let mut state = ptr::null_mut();
        let (count, options, values) = report.options();
        // SAFETY: as many options as values, which live until the linker is destroyed.
        let code = unsafe { (api.cuLinkCreate_v2)(count, options, values, &mut state) };
        api.check("cuLinkCreate_v2", code).map_err(|e| (e, report.text()))?;
        let linker = Linker { entered: self, state, report };
        let source = c_text(text);
        let bytes = source.as_bytes_with_nul();
        let kind = sys::CUjitInputType::CU_JIT_INPUT_PTX as c_uint;
        let (none, no_values) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the text is read, not written, and copied; its length counts the final zero.
        let code = unsafe {
            let (data, len) = (bytes.as_ptr().cast_mut().cast(), bytes.len());
            (api.cuLinkAddData_v2)(linker.state, kind, data, len, c"kernel".as_ptr(), 0, none, no_values)
        };
        api.check("cuLinkAddData_v2", code).map_err(|e| (e, linker.report.text()))?;
        let (mut image, mut len) = (ptr::null_mut(), 0);
        // SAFETY: both are written.
        let code = unsafe { (api.cuLinkComplete)(linker.state, &mut image, &mut len) };
        api.check("cuLinkComplete", code).map_err(|e| (e, linker.report.text()))?;
        // SAFETY: the image has that many bytes and lives as long as the linker.
        let cubin = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), len) }.to_vec();
        Ok((cubin, linker.report.text()))
    }

    /// Loads code that was compiled for this GPU.
    pub fn load_code(&self, cubin: &[u8], name: &str, parameters: usize) -> Result<Code, DeviceError> {
        self.load_image(cubin, name, parameters, &mut Report::new())
    }

    /// Compiles and loads a kernel's text in one step, without its code.
    pub fn load_text(
        &self,
        text: &str,
        name: &str,
        parameters: usize,
    ) -> Result<(Code, String), (DeviceError, String)> {
        let mut report = Report::new();
        match self.load_image(c_text(text).as_bytes_with_nul(), name, parameters, &mut report) {
            Ok(code) => Ok((code, report.text())),
            Err(e) => Err((e, report.text())),
        }
    }

    fn load_image(
        &self,
        image: &[u8],
        name: &str,
        parameters: usize,
        report: &mut Report,
    ) -> Result<Code, DeviceError> {
        let api = self.api;
        let mut module = ptr::null_mut();
        let (count, options, values) = report.options();
        // SAFETY: text with its final zero or a cubin, whose own header has its size; the report outlives the call.
        let code = unsafe { (api.cuModuleLoadDataEx)(&mut module, image.as_ptr().cast(), count, options, values) };
        api.check("cuModuleLoadDataEx", code)?;
        let mut code = Code { context: self.context.clone(), module, function: ptr::null_mut(), parameters };
        let name: &CStr = &c_text(name);
        // SAFETY: `function` is written; the name ends with a zero.
        let found = unsafe { (api.cuModuleGetFunction)(&mut code.function, module, name.as_ptr()) };
        api.check("cuModuleGetFunction", found)?;
        Ok(code)
    }

    /// Tells the driver what launches of the code will want, and makes it load everything now: no later launch then
    /// allocates or waits, which a stream that is being captured would not allow.
    pub fn prepare(&self, code: &Code, shared_bytes: u32, cluster: u32) -> Result<(), DeviceError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let set = |which: Attribute, value: u32| {
            // SAFETY: the function lives; the driver refuses values out of range.
            let code = unsafe { (self.api.cuFuncSetAttribute)(code.function, which as c_uint, value as c_int) };
            self.api.check("cuFuncSetAttribute", code)
        };
        if shared_bytes > PLAIN_SHARED_BYTES {
            set(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)?;
        }
        if cluster > PORTABLE_CLUSTER {
            set(Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
        }
        let mut registers = 0;
        // SAFETY: `registers` is written. Asking makes a driver that loads lazily load.
        let asked = unsafe {
            let which = Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS as c_uint;
            (self.api.cuFuncGetAttribute)(&mut registers, which, code.function)
        };
        self.api.check("cuFuncGetAttribute", asked)
    }

    /// The argument for a tensor.
    pub fn tensor(&self, map: &MapArguments) -> Result<Argument, DeviceError> {
        let mut argument = Argument::number(0);
        let address = ptr::with_exposed_provenance_mut(map.address as usize);
        let step = [1u32; 5];
        let interleave = sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as c_uint;
        let promotion = sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B as c_uint;
        let fill = sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as c_uint; // zeros
        // SAFETY: a map has 128 bytes, aligned to 64 or 128, and so has the argument. The arrays have five entries,
        // of which the driver reads `rank`; the address is not followed.
        let code = unsafe {
            (self.api.cuTensorMapEncodeTiled)(
                (&raw mut argument).cast(),
                map.type_code,
                map.rank,
                address,
                map.extent.as_ptr(),
                map.stride_bytes.as_ptr(),
                map.box_extent.as_ptr(),
                step.as_ptr(),
                interleave,
                map.swizzle_code,
                promotion,
                fill,
            )
        };
        self.api.check("cuTensorMapEncodeTiled", code)?;
        Ok(argument)
    }

    /// Puts a launch on a stream. Nothing is allocated and nothing waits.
    pub fn launch(&self, code: &Code, grid: Grid, args: &[Argument], stream: Stream<'_>) -> Result<(), DeviceError> {
        assert_eq!(args.len(), code.parameters, "bug in fulgurite: arguments were not checked");
        let stream = self.handle(stream)?;
        let mut pointers: Vec<*mut c_void> = args.iter().map(|a| ptr::from_ref(a).cast_mut().cast()).collect();
        // SAFETY: numbers and null pointers, for which zeros are values.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { MaybeUninit::zeroed().assume_init() };
        let mut count = 0;
        if grid.cluster > 1 {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: grid.cluster, y: 1, z: 1 };
            count += 1;
        }
        if grid.overlaps {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as c_uint,
        };
        // SAFETY: as many pointers as the kernel has parameters, each to 128 bytes, which no parameter exceeds; all of
        // it is copied before the call returns. The stream is this context's and lives.
        let code =
            unsafe { (self.api.cuLaunchKernelEx)(&config, code.function, pointers.as_mut_ptr(), ptr::null_mut()) };
        self.api.check("cuLaunchKernelEx", code)
    }
}
