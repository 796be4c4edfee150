//! A driver for tests: it records calls, moves bytes between host arrays, and runs no kernels.
//!
//! Its records are per thread, so tests do not see each other. Other crates use it through the feature `fake`.

use super::Api;
use crate::{Cuda, Options};
use cudarc::driver::sys;
use fulgurite_ptx::device::{DeviceError, Span, Stream};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

/// A launch as the driver saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// CTAs along each axis.
    pub blocks: [u32; 3],
    /// Threads per CTA.
    pub threads: u32,
    /// Dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
    /// CTAs per cluster, if the launch sets it.
    pub cluster: Option<u32>,
    /// Whether it may start before the previous launch ends.
    pub overlaps: bool,
    /// The first words of each argument; [`Books::parameters`] gives their number.
    pub args: Vec<[u64; 9]>,
    /// Handle of the stream.
    pub stream: u64,
    /// Whether it was captured instead of run.
    pub captured: bool,
}

/// The driver's records and the settings of its behaviour.
pub struct Books {
    /// Contexts retained but not released.
    pub contexts: i32,
    /// Depth of the context stack: pushes minus pops.
    pub current: i32,
    /// Allocations by address.
    pub memory: BTreeMap<u64, Vec<u8>>,
    /// Size of the largest allocation that succeeds.
    pub memory_bytes: usize,
    /// Number of successful allocations so far.
    pub allocated: u32,
    next_address: u64,
    /// Modules loaded but not unloaded.
    pub modules: i32,
    /// Number of compiled texts.
    pub compiled: u32,
    /// Number of encoded tensors.
    pub encoded: u32,
    /// Launches so far.
    pub seen: Vec<Seen>,
    /// Whether launches are left out of `seen`, for timing.
    pub forgetful: bool,
    /// Attributes of functions that were set: attribute and value.
    pub attributes: Vec<(u32, i32)>,
    capturing: bool,
    /// Whether an error invalidated the capture.
    pub spoilt: bool,
    /// Whether graphs refuse to keep values.
    pub no_retention: bool,
    recordings: u64,
    /// Values that the capture keeps: destructor and argument.
    kept: Vec<(unsafe extern "C" fn(*mut c_void), *mut c_void)>,
    /// Whether memory may be allocated during the capture.
    relaxed: bool,
    /// Text of the compiler's log.
    pub log: &'static CStr,
    /// Whether the linker fails.
    pub no_linker: bool,
    /// Whether the compiler rejects everything.
    pub no_compiler: bool,
    /// Number of arguments of the kernel under test.
    pub parameters: usize,
    log_at: Option<*mut u8>,
}

impl Default for Books {
    fn default() -> Self {
        Books {
            contexts: 0,
            current: 0,
            memory: BTreeMap::new(),
            memory_bytes: MEMORY_BYTES,
            allocated: 0,
            next_address: 0,
            modules: 0,
            compiled: 0,
            encoded: 0,
            seen: Vec::new(),
            forgetful: false,
            attributes: Vec::new(),
            capturing: false,
            spoilt: false,
            no_retention: false,
            recordings: 0,
            kept: Vec::new(),
            relaxed: false,
            log: c"",
            no_linker: false,
            no_compiler: false,
            parameters: 0,
            log_at: None,
        }
    }
}

/// Opens the GPU of this driver, which describes itself as an H200.
pub fn open(options: Options) -> Result<Cuda, DeviceError> {
    Cuda::open_by(&FAKE, 0, options)
}

/// Memory at an address that the test chooses.
pub fn memory(gpu: &Cuda, address: u64, bytes: u64) -> Span {
    // SAFETY: this driver only accesses memory in its own records, and runs nothing.
    unsafe { gpu.memory(address, bytes) }
}

/// A stream with a handle that the test chooses.
pub fn stream(gpu: &Cuda, handle: u64) -> Stream<'static> {
    // SAFETY: this driver never dereferences a handle.
    unsafe { gpu.stream(handle) }
}

thread_local! {
    static BOOKS: RefCell<Books> = RefCell::default();
}

/// Accesses the records of this thread.
pub fn books<T>(f: impl FnOnce(&mut Books) -> T) -> T {
    BOOKS.with_borrow_mut(f)
}

/// Default size of the largest allocation that succeeds; see [`Books::memory_bytes`].
pub const MEMORY_BYTES: usize = 1 << 20;
/// The code that the compiler returns for every text.
const CUBIN: &[u8] = b"\x7fELF code\0";
const HANDLE: usize = 0x40;

fn put<T>(at: *mut T, value: T) -> u32 {
    // SAFETY: the caller of the driver gave this address for a result.
    unsafe { at.write(value) };
    0
}

fn handle<T>() -> *mut T {
    ptr::without_provenance_mut(HANDLE)
}

/// Returns an error unless a context is current.
fn current() -> u32 {
    if books(|b| b.current > 0) { 0 } else { sys::CUresult::CUDA_ERROR_INVALID_CONTEXT as u32 }
}

const REFUSED: u32 = sys::CUresult::CUDA_ERROR_INVALID_VALUE as u32;

/// The allocation that contains an address.
fn find(memory: &BTreeMap<u64, Vec<u8>>, address: u64) -> Option<(u64, usize)> {
    let (&base, bytes) = memory.range(..=address).next_back()?;
    (address < base + bytes.len() as u64).then_some((base, bytes.len()))
}

/// Destroys all values that graphs keep.
fn end_of_kept() {
    for (destroy, data) in books(|b| std::mem::take(&mut b.kept)) {
        // SAFETY: the pair is as it was given, and is called once.
        unsafe { destroy(data) };
    }
}

fn say(log_at: *mut u8) {
    let log = books(|b| b.log).to_bytes_with_nul();
    // SAFETY: the log's buffer has 64 KiB.
    unsafe { ptr::copy_nonoverlapping(log.as_ptr(), log_at, log.len()) };
}

macro_rules! fakes {
    ($($name:ident($($arg:ident: $of:ty),*) $body:block)*) => {
        $(#[allow(non_snake_case, unused_variables)]
        unsafe extern "C" fn $name($($arg: $of),*) -> u32 $body)*

        /// The function table of the fake driver.
        pub(crate) static FAKE: Api = Api { $($name,)* };
    };
}

fakes! {
    cuInit(flags: c_uint) { 0 }
    cuDriverGetVersion(version: *mut c_int) { put(version, 13000) }
    cuGetErrorName(code: u32, text: *mut *const c_char) {
        put(text, if code == REFUSED { c"CUDA_ERROR_INVALID_VALUE".as_ptr() } else { ptr::null() })
    }
    cuGetErrorString(code: u32, text: *mut *const c_char) { put(text, c"invalid argument".as_ptr()) }
    cuDeviceGetCount(count: *mut c_int) { put(count, 1) }
    cuDeviceGet(device: *mut sys::CUdevice, ordinal: c_int) { put(device, ordinal) }
    cuDeviceGetName(name: *mut c_char, bytes: c_int, device: sys::CUdevice) {
        let text = c"Fake GPU".to_bytes_with_nul();
        (0..).zip(text).for_each(|(i, &byte)| { put(name.wrapping_add(i), byte as c_char); });
        0
    }
    cuDeviceGetAttribute(value: *mut c_int, which: c_uint, device: sys::CUdevice) {
        use sys::CUdevice_attribute_enum as Attribute;
        const MAJOR: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as c_uint;
        const COUNT: c_uint = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as c_uint;
        put(value, match which { MAJOR => 9, COUNT => 132, _ => 0 })
    }
    cuDevicePrimaryCtxRetain(context: *mut sys::CUcontext, device: sys::CUdevice) {
        books(|b| b.contexts += 1);
        put(context, handle())
    }
    cuDevicePrimaryCtxRelease_v2(device: sys::CUdevice) { books(|b| b.contexts -= 1); 0 }
    cuCtxGetCurrent(context: *mut sys::CUcontext) {
        put(context, if books(|b| b.current > 0) { handle() } else { ptr::null_mut() })
    }
    cuCtxPushCurrent_v2(context: sys::CUcontext) { books(|b| b.current += 1); 0 }
    cuCtxPopCurrent_v2(context: *mut sys::CUcontext) { books(|b| b.current -= 1); put(context, handle()) }
    cuMemAlloc_v2(address: *mut sys::CUdeviceptr, bytes: usize) {
        if books(|b| b.capturing && !b.relaxed) {
            return REFUSED;
        }
        if bytes > books(|b| b.memory_bytes) {
            return sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
        }
        let at = books(|b| {
            b.next_address += (2 * b.memory_bytes) as u64;
            b.allocated += 1;
            b.memory.insert(b.next_address, vec![0xa5; bytes]);
            b.next_address
        });
        put(address, at);
        current()
    }
    cuMemFree_v2(address: sys::CUdeviceptr) {
        let allowed = books(|b| !b.capturing || b.relaxed);
        if !allowed || books(|b| b.memory.remove(&address)).is_none() { REFUSED } else { current() }
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        put(free, books(|b| b.memory_bytes));
        put(total, books(|b| b.memory_bytes));
        current()
    }
    cuMemGetAddressRange_v2(base: *mut sys::CUdeviceptr, bytes: *mut usize, address: sys::CUdeviceptr) {
        let Some((at, len)) = books(|b| find(&b.memory, address)) else { return REFUSED };
        put(base, at);
        put(bytes, len);
        current()
    }
    cuMemsetD8Async(to: sys::CUdeviceptr, byte: u8, bytes: usize, stream: sys::CUstream) {
        books(|b| b.memory.get_mut(&to).unwrap()[..bytes].fill(byte));
        current()
    }
    cuMemcpyHtoD_v2(to: sys::CUdeviceptr, from: *const c_void, bytes: usize) {
        // SAFETY: the source is a slice of the caller's.
        let from = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) };
        books(|b| {
            let (base, _) = find(&b.memory, to).unwrap();
            let at = (to - base) as usize;
            b.memory.get_mut(&base).unwrap()[at..at + bytes].copy_from_slice(from);
        });
        current()
    }
    cuMemcpyDtoH_v2(to: *mut c_void, from: sys::CUdeviceptr, bytes: usize) {
        // SAFETY: the destination is a slice of the caller's.
        let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), bytes) };
        books(|b| {
            let (base, _) = find(&b.memory, from).unwrap();
            let at = (from - base) as usize;
            to.copy_from_slice(&b.memory[&base][at..at + bytes]);
        });
        current()
    }
    cuLinkCreate_v2(count: c_uint, options: *mut sys::CUjit_option, values: *mut *mut c_void, state: *mut sys::CUlinkState) {
        // SAFETY: the first value is the buffer of the log.
        books(|b| b.log_at = Some(unsafe { values.read() }.cast()));
        put(state, handle());
        if books(|b| b.no_linker) { REFUSED } else { current() }
    }
    cuLinkAddData_v2(
        state: sys::CUlinkState, kind: c_uint, data: *mut c_void, bytes: usize, name: *const c_char, count: c_uint,
        options: *mut sys::CUjit_option, values: *mut *mut c_void
    ) {
        books(|b| b.compiled += 1);
        if let Some(log_at) = books(|b| b.log_at) {
            say(log_at);
        }
        if books(|b| b.no_compiler) { REFUSED } else { current() }
    }
    cuLinkComplete(state: sys::CUlinkState, image: *mut *mut c_void, bytes: *mut usize) {
        put(image, CUBIN.as_ptr().cast_mut().cast());
        put(bytes, CUBIN.len());
        current()
    }
    cuLinkDestroy(state: sys::CUlinkState) { books(|b| b.log_at = None); current() }
    cuModuleLoadDataEx(
        module: *mut sys::CUmodule, image: *const c_void, count: c_uint, options: *mut sys::CUjit_option,
        values: *mut *mut c_void
    ) {
        if books(|b| b.capturing && !b.relaxed) {
            return REFUSED;
        }
        // SAFETY: the image is text or the code from above, both zero-terminated.
        let image = unsafe { CStr::from_ptr(image.cast()) };
        if image.to_bytes_with_nul() != CUBIN {
            // SAFETY: the first value is the buffer of the log.
            say(unsafe { values.read() }.cast());
            if books(|b| b.no_compiler) || !image.to_bytes().starts_with(b".version") {
                return REFUSED;
            }
        }
        books(|b| b.modules += 1);
        put(module, handle());
        current()
    }
    cuModuleUnload(module: sys::CUmodule) { books(|b| b.modules -= 1); current() }
    cuModuleGetFunction(function: *mut sys::CUfunction, module: sys::CUmodule, name: *const c_char) {
        put(function, handle());
        current()
    }
    cuFuncSetAttribute(function: sys::CUfunction, which: c_uint, value: c_int) {
        books(|b| b.attributes.push((which, value)));
        current()
    }
    cuFuncGetAttribute(value: *mut c_int, which: c_uint, function: sys::CUfunction) { put(value, 168); current() }
    cuTensorMapEncodeTiled(
        map: *mut sys::CUtensorMap, kind: c_uint, rank: u32, address: *mut c_void, extent: *const u64,
        strides: *const u64, box_extent: *const u32, steps: *const u32, interleave: c_uint, swizzle: c_uint,
        promotion: c_uint, fill: c_uint
    ) {
        if !map.addr().is_multiple_of(128) || !(3..=5).contains(&rank) {
            return REFUSED;
        }
        // SAFETY: the arrays have one entry per axis, the strides one fewer.
        let words = unsafe {
            [u64::from(kind), address.addr() as u64, extent.read(), extent.add(1).read(), extent.add(2).read(),
             strides.read(), strides.add(1).read(), u64::from(box_extent.read()), u64::from(swizzle)]
        };
        books(|b| b.encoded += 1);
        put(map.cast(), words);
        current()
    }
    cuLaunchKernelEx(config: *const sys::CUlaunchConfig, function: sys::CUfunction, args: *mut *mut c_void, extra: *mut *mut c_void) {
        if books(|b| b.forgetful) {
            return current();
        }
        // SAFETY: the description of a launch, with the number of attributes that it states.
        let (config, attributes) =
            unsafe { (&*config, std::slice::from_raw_parts((*config).attrs, (*config).numAttrs as usize)) };
        use sys::CUlaunchAttributeID as Id;
        // SAFETY: an attribute with this id has this member of the union.
        let cluster = attributes.iter().find(|a| a.id == Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            .map(|a| unsafe { a.value.clusterDim.x });
        let overlaps = attributes.iter().any(|a| a.id == Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
        // SAFETY: each argument has 128 bytes and is aligned to 128.
        let argument = |i: usize| unsafe { args.add(i).read().cast::<[u64; 9]>().read() };
        let seen = Seen {
            blocks: [config.gridDimX, config.gridDimY, config.gridDimZ],
            threads: config.blockDimX,
            shared_bytes: config.sharedMemBytes,
            cluster,
            overlaps,
            args: (0..books(|b| b.parameters)).map(argument).collect(),
            stream: config.hStream.addr() as u64,
            captured: books(|b| b.capturing),
        };
        books(|b| b.seen.push(seen));
        current()
    }
    cuStreamCreate(stream: *mut sys::CUstream, flags: c_uint) { put(stream, handle()); current() }
    cuStreamDestroy_v2(stream: sys::CUstream) { current() }
    // Waiting for a stream that is being captured invalidates the capture.
    cuStreamSynchronize(stream: sys::CUstream) {
        if books(|b| b.capturing && !b.relaxed) { REFUSED } else { current() }
    }
    cuStreamBeginCapture_v2(stream: sys::CUstream, mode: c_uint) {
        books(|b| (b.capturing, b.spoilt, b.recordings) = (true, false, b.recordings + 1));
        current()
    }
    cuStreamGetCaptureInfo_v2(
        stream: sys::CUstream, status: *mut c_uint, id: *mut u64, graph: *mut sys::CUgraph,
        dependencies: *mut *const sys::CUgraphNode, count: *mut usize
    ) {
        put(status, books(|b| if b.spoilt { 2 } else { c_uint::from(b.capturing) }));
        put(id, books(|b| b.recordings));
        put(graph, handle());
        current()
    }
    cuUserObjectCreate(
        object: *mut sys::CUuserObject, data: *mut c_void, destroy: unsafe extern "C" fn(*mut c_void), count: c_uint,
        flags: c_uint
    ) {
        books(|b| b.kept.push((destroy, data)));
        put(object, handle());
        current()
    }
    cuUserObjectRelease(object: sys::CUuserObject, count: c_uint) { end_of_kept(); current() }
    cuGraphRetainUserObject(graph: sys::CUgraph, object: sys::CUuserObject, count: c_uint, flags: c_uint) {
        if books(|b| b.no_retention) { REFUSED } else { current() }
    }
    cuStreamIsCapturing(stream: sys::CUstream, status: *mut c_uint) {
        put(status, books(|b| if b.spoilt { 2 } else { c_uint::from(b.capturing) }));
        current()
    }
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
        let named = |relaxed| {
            use sys::CUstreamCaptureMode::{CU_STREAM_CAPTURE_MODE_RELAXED as RELAXED, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as LOCAL};
            if relaxed { RELAXED as c_uint } else { LOCAL as c_uint }
        };
        // SAFETY: the caller of the driver gave this address for the mode.
        let asked = unsafe { mode.read() } == named(true);
        put(mode, named(books(|b| std::mem::replace(&mut b.relaxed, asked))));
        current()
    }
    cuStreamEndCapture(stream: sys::CUstream, graph: *mut sys::CUgraph) {
        books(|b| b.capturing = false);
        put(graph, handle());
        current()
    }
    cuGraphInstantiateWithFlags(made: *mut sys::CUgraphExec, graph: sys::CUgraph, flags: c_ulonglong) {
        put(made, handle());
        current()
    }
    cuGraphDestroy(graph: sys::CUgraph) { current() }
    // There is only one graph, so all kept values end with it.
    cuGraphExecDestroy(graph: sys::CUgraphExec) {
        end_of_kept();
        current()
    }
    cuGraphLaunch(graph: sys::CUgraphExec, stream: sys::CUstream) { current() }
    cuEventCreate(event: *mut sys::CUevent, flags: c_uint) { put(event, handle()); current() }
    cuEventRecord(event: sys::CUevent, stream: sys::CUstream) { current() }
    cuEventSynchronize(event: sys::CUevent) { current() }
    cuEventElapsedTime(ms: *mut f32, start: sys::CUevent, end: sys::CUevent) { put(ms, 1.5); current() }
    cuEventDestroy_v2(event: sys::CUevent) { current() }
}
