//! Streams of our own, and launches recorded once and replayed.

use super::{Context, Entered, raw};
use cudarc::driver::sys;
use fulgurite_ptx::device::{DeviceError, Stream};
use std::ffi::c_uint;
use std::ptr;
use std::sync::Arc;

/// A stream that is destroyed when dropped. It does not wait for the default stream.
pub struct OwnStream {
    context: Arc<Context>,
    handle: sys::CUstream,
}

// SAFETY: a stream may be used from any thread in which its context is current.
unsafe impl Send for OwnStream {}
// SAFETY: the same.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    /// What launches take.
    pub fn stream(&self) -> Stream {
        Stream(self.handle.expose_provenance() as u64)
    }
}

impl Drop for OwnStream {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: created once and destroyed once; the driver finishes its work first.
            unsafe { (entered.api.cuStreamDestroy_v2)(self.handle) };
        }
    }
}

/// Launches that were recorded and can be replayed. Memory and modules that they use must outlive it.
pub struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
}

// SAFETY: replays are ordered by the driver's lock; the handle itself never changes.
unsafe impl Send for Graph {}
// SAFETY: the same.
unsafe impl Sync for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: made once and destroyed once; a replay that still runs is finished by the driver.
            unsafe { (entered.api.cuGraphExecDestroy)(self.handle) };
        }
    }
}

impl Entered<'_> {
    /// A new stream.
    pub fn own_stream(&self) -> Result<OwnStream, DeviceError> {
        let mut handle = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: `handle` is written.
        let code = unsafe { (self.api.cuStreamCreate)(&mut handle, flags) };
        self.api.check("cuStreamCreate", code)?;
        Ok(OwnStream { context: self.context.clone(), handle })
    }

    /// Records what `work` puts on a stream, without running it.
    pub fn capture(
        &self,
        stream: Stream,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        let api = self.api;
        // Calls of this thread that would wait become errors; other threads go on as they like.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint;
        // SAFETY: the stream as in `synchronize`.
        let code = unsafe { (api.cuStreamBeginCapture_v2)(raw(stream), mode) };
        api.check("cuStreamBeginCapture_v2", code)?;
        let worked = work();
        let mut graph = ptr::null_mut();
        // SAFETY: `graph` is written, with null where the recording was spoilt.
        let code = unsafe { (api.cuStreamEndCapture)(raw(stream), &mut graph) };
        let ended = worked.and_then(|()| api.check("cuStreamEndCapture", code));
        let mut handle = ptr::null_mut();
        let made = ended.and_then(|()| {
            // SAFETY: `handle` is written; the graph was just recorded; no flags.
            let code = unsafe { (api.cuGraphInstantiateWithFlags)(&mut handle, graph, 0) };
            api.check("cuGraphInstantiateWithFlags", code)
        });
        if !graph.is_null() {
            // SAFETY: recorded once and destroyed once; what was made of it stands on its own.
            unsafe { (api.cuGraphDestroy)(graph) };
        }
        made.map(|()| Graph { context: self.context.clone(), handle })
    }

    /// Whether what is put on a stream is recorded. A stream that cannot say is not recorded.
    pub fn is_capturing(&self, stream: Stream) -> bool {
        let mut status = 0;
        // SAFETY: `status` is written; the stream as in `synchronize`.
        let code = unsafe { (self.api.cuStreamIsCapturing)(raw(stream), &mut status) };
        code == 0 && status != 0
    }

    /// Puts a recording on a stream.
    pub fn replay(&self, graph: &Graph, stream: Stream) -> Result<(), DeviceError> {
        // SAFETY: the recording lives; the stream as in `synchronize`.
        let code = unsafe { (self.api.cuGraphLaunch)(graph.handle, raw(stream)) };
        self.api.check("cuGraphLaunch", code)
    }
}
