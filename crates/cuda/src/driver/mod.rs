//! The CUDA driver. All `unsafe` code of this crate is here.
//!
//! The functions of libcuda are looked up once, in [`api`]. A [`Context`] is a GPU's primary context. An [`Entered`]
//! proves that it is current in this thread, which nearly every function of the driver requires. Allocations, modules,
//! streams and graphs own their context and are released on drop.
//!
//! Memory and streams carry the identity of their owner ([`fulgurite_ptx::device::Token`]). A call accepts live memory
//! of this context ([`live`]), streams of this context, and values that an `unsafe` block vouched for ([`raw`]); it
//! rejects everything else. Freed memory cannot be used in a launch, and the driver frees memory after the launches
//! that use it.
//!
//! Kernels are trusted code: the GPU's own protection stops one that computes a wrong address, and the context reports
//! it at the next call.

mod api;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod graph;
mod live;
mod module;
mod raw;

use crate::error::Unusable;
use cudarc::driver::sys;
use fulgurite_ptx::device::{DeviceError, Span, Stream, Token};
use std::ffi::{c_char, c_int, c_uint};
use std::marker::PhantomData;
use std::ptr;
use std::sync::Arc;

pub(crate) use api::{Api, api};
pub(crate) use graph::{Ended, note_launch};
pub use graph::{Graph, OwnStream};
pub(crate) use live::{Allocations, Live};
pub(crate) use module::{Argument, Code, Grid};

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// The newest CUDA version that the driver supports.
    pub cuda: (u32, u32),
    pub multiprocessors: u32,
}

/// A GPU's primary context, held until dropped.
pub(crate) struct Context {
    api: &'static Api,
    handle: sys::CUcontext,
    device: sys::CUdevice,
    /// Identity of this context's streams, and of the memory that `raw` vouches for.
    token: Token,
    live: Live,
}

// SAFETY: a context may be current in several threads at once, and the driver does the locking.
unsafe impl Send for Context {}
// SAFETY: a context may be current in several threads at once, and the driver does the locking.
unsafe impl Sync for Context {}

impl Context {
    /// The properties of a GPU, without creating a context, which costs memory and time.
    pub fn facts(api: &'static Api, ordinal: u32) -> Result<Facts, DeviceError> {
        let device = find(api, ordinal)?;
        let mut name = [0u8; 256];
        // SAFETY: the length is that of the buffer, and the driver zero-terminates the name.
        let code = unsafe { (api.cuDeviceGetName)(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, device) };
        api.check("cuDeviceGetName", code)?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        let attribute = |which: sys::CUdevice_attribute| {
            let mut value = 0;
            // SAFETY: `value` is written; `which` is one of the driver's attributes.
            let code = unsafe { (api.cuDeviceGetAttribute)(&mut value, which as c_uint, device) };
            api.check("cuDeviceGetAttribute", code).map(|()| value as u32)
        };
        use sys::CUdevice_attribute_enum as Attribute;
        Ok(Facts {
            name: String::from_utf8_lossy(&name[..end]).into_owned(),
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            cuda: api.version()?,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        })
    }

    /// The primary context, which the whole process shares.
    pub fn retain(api: &'static Api, ordinal: u32) -> Result<Arc<Context>, DeviceError> {
        let device = find(api, ordinal)?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is written; the device exists.
        let code = unsafe { (api.cuDevicePrimaryCtxRetain)(&mut handle, device) };
        api.check("cuDevicePrimaryCtxRetain", code)?;
        let token = Token::new();
        let live = Live::new(&token);
        Ok(Arc::new(Context { api, handle, device, token, live }))
    }

    /// The token with which this context vouches for memory and streams.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// The memory that launches may use.
    pub fn live(&self) -> &Live {
        &self.live
    }

    /// Makes the context current in this thread until the result is dropped.
    pub fn enter(self: &Arc<Self>) -> Result<Entered<'_>, DeviceError> {
        let mut current = ptr::null_mut();
        // SAFETY: `current` is written.
        let code = unsafe { (self.api.cuCtxGetCurrent)(&mut current) };
        self.api.check("cuCtxGetCurrent", code)?;
        // The context is usually current if a library that shares it calls: asking is cheaper than pushing and popping.
        let pushed = current != self.handle;
        if pushed {
            // SAFETY: the handle is retained until `self` is dropped.
            let code = unsafe { (self.api.cuCtxPushCurrent_v2)(self.handle) };
            self.api.check("cuCtxPushCurrent_v2", code)?;
        }
        Ok(Entered { context: self, api: self.api, pushed, here: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once. Errors are ignored: at the end of a process the driver may be gone.
        unsafe { (self.api.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

/// The device with this index.
fn find(api: &Api, ordinal: u32) -> Result<sys::CUdevice, DeviceError> {
    let mut count = 0;
    // SAFETY: `count` is written.
    let code = unsafe { (api.cuDeviceGetCount)(&mut count) };
    api.check("cuDeviceGetCount", code)?;
    if i64::from(ordinal) >= i64::from(count) {
        return Err(Unusable::Ordinal { ordinal, count: count as u32 }.into());
    }
    let mut device = 0;
    // SAFETY: `device` is written; the index is below the count.
    let code = unsafe { (api.cuDeviceGet)(&mut device, ordinal as c_int) };
    api.check("cuDeviceGet", code)?;
    Ok(device)
}

/// Proof that a context is current in this thread. It cannot leave the thread, and nested ones are dropped first.
pub(crate) struct Entered<'a> {
    context: &'a Arc<Context>,
    api: &'static Api,
    /// Whether this value made the context current.
    pushed: bool,
    here: PhantomData<*const ()>,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: `popped` is written; this thread pushed the context.
            unsafe { (self.api.cuCtxPopCurrent_v2)(&mut popped) };
        }
    }
}

/// Memory that is freed on drop.
pub(crate) struct Allocation {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    token: Token,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.context.live.remove(&self.token);
        if let Ok(entered) = self.context.enter() {
            // SAFETY: the address belongs to an allocation that nothing else frees. No launch can use it from now on,
            // and the driver waits for those that do. Errors are ignored.
            let _ = entered.relaxed(|| unsafe { (entered.api.cuMemFree_v2)(self.address) });
        }
    }
}

impl Entered<'_> {
    /// Runs calls that are not part of this thread's graph capture as if there were no capture.
    pub fn relaxed<T>(&self, work: impl FnOnce() -> T) -> Result<T, DeviceError> {
        /// Restores the thread's capture mode on drop.
        struct Mode<'a>(&'a Api, c_uint);
        impl Drop for Mode<'_> {
            fn drop(&mut self) {
                // SAFETY: the driver gave this mode.
                unsafe { (self.0.cuThreadExchangeStreamCaptureMode)(&mut self.1) };
            }
        }
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;
        // SAFETY: the call swaps `mode` with the thread's mode.
        let exchanged = unsafe { (self.api.cuThreadExchangeStreamCaptureMode)(&mut mode) };
        self.api.check("cuThreadExchangeStreamCaptureMode", exchanged)?;
        let _own = Mode(self.api, mode);
        Ok(work())
    }

    /// Allocates memory and fills it with zeros, even during a graph capture of this thread.
    pub fn zeroed(&self, bytes: u64) -> Result<(Span, Allocation), DeviceError> {
        let (span, memory) = self.allocate(bytes)?;
        // A separate stream that is not captured and waits for no captured one.
        let own = self.own_stream()?;
        let filled = self.relaxed(|| {
            // SAFETY: the memory has this many bytes and no other user yet; the stream is alive.
            let code = unsafe { (self.api.cuMemsetD8Async)(span.address(), 0, bytes as usize, own.handle()) };
            self.api.check("cuMemsetD8Async", code).and_then(|()| self.synchronize(own.stream()))
        });
        filled??;
        Ok((span, memory))
    }

    /// Allocates memory, even during a graph capture of this thread: the memory is not part of the capture.
    pub fn allocate(&self, bytes: u64) -> Result<(Span, Allocation), DeviceError> {
        let mut address = 0;
        // The driver cannot allocate 0 bytes, but an empty buffer is valid.
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: `address` is written.
        let code = self.relaxed(|| unsafe { (self.api.cuMemAlloc_v2)(&mut address, size) })?;
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32 {
            return Err(DeviceError::Memory { asked: bytes, free: self.free_bytes()? });
        }
        self.api.check("cuMemAlloc_v2", code)?;
        let token = Token::new();
        self.context.live.insert(&token);
        Ok((token.span(address, bytes), Allocation { context: self.context.clone(), address, token }))
    }

    /// Free memory of the device, in bytes.
    fn free_bytes(&self) -> Result<u64, DeviceError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are written.
        let code = unsafe { (self.api.cuMemGetInfo_v2)(&mut free, &mut total) };
        self.api.check("cuMemGetInfo_v2", code)?;
        Ok(free as u64)
    }

    /// Copies to device memory. The bytes have arrived when it returns.
    pub fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.inside(to, bytes.len() as u64)?;
        // SAFETY: the source is a slice; the destination is inside one allocation that the driver knows.
        let code = unsafe { (self.api.cuMemcpyHtoD_v2)(to.address(), bytes.as_ptr().cast(), bytes.len()) };
        self.api.check("cuMemcpyHtoD_v2", code)?;
        // Small copies from pageable memory return before they arrive, and other streams do not wait for them.
        self.synchronize(Stream::default())
    }

    /// Copies from device memory.
    pub fn download(&self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.inside(from, bytes.len() as u64)?;
        // SAFETY: the destination is a slice; the source is inside one allocation that the driver knows; the call
        // returns when the copy is complete.
        let code = unsafe { (self.api.cuMemcpyDtoH_v2)(bytes.as_mut_ptr().cast(), from.address(), bytes.len()) };
        self.api.check("cuMemcpyDtoH_v2", code)
    }

    /// Rejects a copy of `bytes` bytes that leaves the span or its allocation, and memory of another context.
    fn inside(&self, span: Span, bytes: u64) -> Result<(), DeviceError> {
        self.context.live.read().check(span)?;
        if bytes > span.bytes() {
            return Err(DeviceError::Bounds { offset: 0, bytes, len: span.bytes() });
        }
        let (mut base, mut len) = (0, 0);
        // SAFETY: both are written; any address may be queried.
        let code = unsafe { (self.api.cuMemGetAddressRange_v2)(&mut base, &mut len, span.address()) };
        self.api.check("cuMemGetAddressRange_v2", code)?;
        let (offset, len) = (span.address() - base, len as u64);
        match offset.checked_add(bytes) {
            Some(end) if end <= len => Ok(()),
            _ => Err(DeviceError::Bounds { offset, bytes, len }),
        }
    }

    /// The driver's handle of a stream of this context; it is valid as long as the borrowed [`Stream`].
    fn handle(&self, stream: Stream<'_>) -> Result<sys::CUstream, DeviceError> {
        let default = (stream.handle(), stream.owner()) == (0, 0);
        match default || stream.owner() == self.context.token.id() {
            true => Ok(ptr::with_exposed_provenance_mut(stream.handle() as usize)),
            false => Err(DeviceError::Stream),
        }
    }

    /// Waits for a stream.
    pub fn synchronize(&self, stream: Stream<'_>) -> Result<(), DeviceError> {
        let handle = self.handle(stream)?;
        // SAFETY: the handle is a live stream of this context, which its owner and lifetime prove.
        let code = unsafe { (self.api.cuStreamSynchronize)(handle) };
        self.api.check("cuStreamSynchronize", code)
    }

    /// Milliseconds of GPU time for the work that `work` enqueues on a stream.
    pub fn time(&self, stream: Stream<'_>, work: impl FnOnce() -> Result<(), DeviceError>) -> Result<f32, DeviceError> {
        let (start, end) = (Event::new(self)?, Event::new(self)?);
        start.record(stream)?;
        work()?;
        end.record(stream)?;
        // SAFETY: the event is alive.
        let code = unsafe { (self.api.cuEventSynchronize)(end.handle) };
        self.api.check("cuEventSynchronize", code)?;
        let mut ms = 0.0;
        // SAFETY: `ms` is written; both events were recorded and have completed.
        let code = unsafe { (self.api.cuEventElapsedTime)(&mut ms, start.handle, end.handle) };
        self.api.check("cuEventElapsedTime", code)?;
        Ok(ms)
    }
}

/// A point in a stream.
struct Event<'a> {
    entered: &'a Entered<'a>,
    handle: sys::CUevent,
}

impl<'a> Event<'a> {
    fn new(entered: &'a Entered<'a>) -> Result<Self, DeviceError> {
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is written; 0 are the default flags, with timing.
        let code = unsafe { (entered.api.cuEventCreate)(&mut handle, 0) };
        entered.api.check("cuEventCreate", code)?;
        Ok(Event { entered, handle })
    }

    fn record(&self, stream: Stream<'_>) -> Result<(), DeviceError> {
        let stream = self.entered.handle(stream)?;
        // SAFETY: the event and the stream are alive.
        let code = unsafe { (self.entered.api.cuEventRecord)(self.handle, stream) };
        self.entered.api.check("cuEventRecord", code)
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: nothing else destroys it; the driver keeps it until work that uses it is done.
        unsafe { (self.entered.api.cuEventDestroy_v2)(self.handle) };
    }
}
