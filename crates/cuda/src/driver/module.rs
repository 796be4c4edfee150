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
/// Clusters of more CTAs than this must be enabled explicitly.
const PORTABLE_CLUSTER: u32 = 8;
/// Dynamic shared memory that needs no explicit opt-in, in bytes.
const PLAIN_SHARED_BYTES: u32 = 48 * 1024;

/// Buffers for the compiler's logs, and the options that name them. All of it is on the heap, so that it does not move
/// while a linker uses it.
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

    /// The number of options, the options, and their values.
    fn options(&mut self) -> (c_uint, *mut sys::CUjit_option, *mut *mut c_void) {
        (self.options.len() as c_uint, self.options.as_mut_ptr(), self.values.as_mut_ptr())
    }

    /// The compiler's logs, errors first.
    fn text(&self) -> String {
        let until_zero = |bytes: &[u8]| {
            let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).trim().to_string()
        };
        let parts = [until_zero(&self.errors[..]), until_zero(&self.info[..])];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n")
    }
}

/// A kernel's text, zero-terminated.
fn c_text(text: &str) -> CString {
    CString::new(text).expect("bug in fulgurite: a kernel's text has a zero byte in it")
}

/// A linker that is destroyed when dropped.
struct Linker<'a> {
    entered: &'a Entered<'a>,
    state: sys::CUlinkState,
    /// The driver writes to it until the linker is destroyed.
    report: Report,
}

impl Drop for Linker<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created once and is destroyed once; its report is dropped after this.
        unsafe { (self.entered.api.cuLinkDestroy)(self.state) };
    }
}

/// A loaded kernel, unloaded when dropped.
pub(crate) struct Code {
    context: Arc<Context>,
    module: sys::CUmodule,
    function: sys::CUfunction,
    /// Number of arguments of a launch.
    parameters: usize,
}

// SAFETY: the driver's handles may be used from any thread in which their context is current.
unsafe impl Send for Code {}
// SAFETY: the driver's handles may be used from any thread in which their context is current.
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

/// An argument of a launch, from which the driver copies: 128 bytes, the size of the largest kind of parameter, aligned
/// as a tensor map must be.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub(crate) struct Argument([u64; 16]);

impl Argument {
    /// A number of at most 64 bits, little-endian as on the GPU.
    pub fn number(bits: u64) -> Argument {
        let mut words = [0; 16];
        words[0] = bits;
        Argument(words)
    }
}

/// The dimensions of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub blocks: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    /// CTAs per cluster.
    pub cluster: u32,
    /// Whether it may start while the previous grid ends: only for kernels that wait for it themselves.
    pub overlaps: bool,
}

impl Entered<'_> {
    /// Compiles a kernel's text to code, and returns the compiler's log. An error also carries the log, if there is
    /// one.
    pub fn compile(&self, text: &str) -> Result<(Vec<u8>, String), (DeviceError, String)> {
        let api = self.api;
        let mut report = Report::new();
        let mut state = ptr::null_mut();
        let (count, options, values) = report.options();
        // SAFETY: there are as many options as values, and both live until the linker is destroyed.
        let code = unsafe { (api.cuLinkCreate_v2)(count, options, values, &mut state) };
        api.check("cuLinkCreate_v2", code).map_err(|e| (e, report.text()))?;
        let linker = Linker { entered: self, state, report };
        let source = c_text(text);
        let bytes = source.as_bytes_with_nul();
        let kind = sys::CUjitInputType::CU_JIT_INPUT_PTX as c_uint;
        let (none, no_values) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the text is copied, not written; its length includes the final zero.
        let code = unsafe {
            let (data, len) = (bytes.as_ptr().cast_mut().cast(), bytes.len());
            (api.cuLinkAddData_v2)(linker.state, kind, data, len, c"kernel".as_ptr(), 0, none, no_values)
        };
        api.check("cuLinkAddData_v2", code).map_err(|e| (e, linker.report.text()))?;
        let (mut image, mut len) = (ptr::null_mut(), 0);
        // SAFETY: both are written.
        let code = unsafe { (api.cuLinkComplete)(linker.state, &mut image, &mut len) };
        api.check("cuLinkComplete", code).map_err(|e| (e, linker.report.text()))?;
        // SAFETY: the image has this many bytes and lives as long as the linker.
        let cubin = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), len) }.to_vec();
        Ok((cubin, linker.report.text()))
    }

    /// Loads code that was compiled for this GPU.
    pub fn load_code(&self, cubin: &[u8], name: &str, parameters: usize) -> Result<Code, DeviceError> {
        self.load_image(cubin, name, parameters, &mut Report::new())
    }

    /// Compiles and loads a kernel's text in one step, without access to its code.
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
        // SAFETY: the image is zero-terminated text, or a cubin whose header has its size; the report outlives the
        // call.
        let code = unsafe { (api.cuModuleLoadDataEx)(&mut module, image.as_ptr().cast(), count, options, values) };
        api.check("cuModuleLoadDataEx", code)?;
        let mut code = Code { context: self.context.clone(), module, function: ptr::null_mut(), parameters };
        let name: &CStr = &c_text(name);
        // SAFETY: `function` is written; the name is zero-terminated.
        let found = unsafe { (api.cuModuleGetFunction)(&mut code.function, module, name.as_ptr()) };
        api.check("cuModuleGetFunction", found)?;
        Ok(code)
    }

    /// Sets the attributes that launches of the code need, and makes the driver load everything now. No later launch
    /// then allocates or waits, which a captured stream would not allow.
    pub fn prepare(&self, code: &Code, shared_bytes: u32, cluster: u32) -> Result<(), DeviceError> {
        use sys::CUfunction_attribute_enum as Attribute;
        let set = |which: Attribute, value: u32| {
            // SAFETY: the function is alive; the driver rejects values out of range.
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
        // SAFETY: `registers` is written. The query makes a lazily loading driver load.
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
        // SAFETY: a map has 128 bytes, aligned to 64 or 128, and so has the argument. The arrays have five entries, of
        // which the driver reads `rank`; it does not dereference the address.
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

    /// Enqueues a launch on a stream. Nothing is allocated and nothing waits.
    pub fn launch(&self, code: &Code, grid: Grid, args: &[Argument], stream: Stream<'_>) -> Result<(), DeviceError> {
        assert_eq!(args.len(), code.parameters, "bug in fulgurite: arguments were not checked");
        let stream = self.handle(stream)?;
        let mut pointers: Vec<*mut c_void> = args.iter().map(|a| ptr::from_ref(a).cast_mut().cast()).collect();
        // SAFETY: the type consists of numbers and pointers, for which zeros are valid.
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
        // SAFETY: there are as many pointers as the kernel has parameters, each to 128 bytes, which no parameter
        // exceeds; all of it is copied before the call returns. The stream belongs to this context and is alive.
        let code =
            unsafe { (self.api.cuLaunchKernelEx)(&config, code.function, pointers.as_mut_ptr(), ptr::null_mut()) };
        self.api.check("cuLaunchKernelEx", code)
    }
}
