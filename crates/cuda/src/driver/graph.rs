//! Streams of our own, and launches recorded once and replayed.

use super::{Context, Entered};
use cudarc::driver::sys;
use fulgurite_ptx::device::{DeviceError, Module, Span, Stream};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

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
    /// The stream, as launches take it.
    pub fn stream(&self) -> Stream<'_> {
        self.context.token.stream(self.handle.expose_provenance() as u64)
    }

    /// The driver's handle.
    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
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

/// What recordings kept and need no more. The driver's callback must not call the driver, so it is dropped by whoever comes
/// next.
#[derive(Default)]
pub(crate) struct Ended(Mutex<Vec<Kept>>);

type Kept = Box<dyn Any + Send>;

/// Something that a recording keeps, and where it goes then.
struct Keepsake {
    what: Kept,
    ended: Weak<Ended>,
}

impl Ended {
    /// Drops what is there.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(all);
    }
}

/// The driver calls this when the last recording that keeps something is gone.
unsafe extern "C" fn over(keepsake: *mut c_void) {
    // SAFETY: `Entered::keep` made it of a box, and the driver calls once, on a thread of its own: it is `Send`.
    let Keepsake { what, ended } = *unsafe { Box::from_raw(keepsake.cast::<Keepsake>()) };
    let Some(ended) = ended.upgrade() else {
        // Nobody is left who could drop it outside of this call.
        return std::mem::forget(what);
    };
    ended.0.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    // The same where the device was dropped meanwhile.
    std::mem::forget(Arc::into_inner(ended));
}

/// What the launches of a graph use.
#[derive(Default)]
pub(crate) struct Uses {
    /// Owners of their memory; a replay is refused when one was freed.
    owners: Vec<u64>,
    /// Their kernels, which live as long as the graph.
    modules: Vec<Module>,
}

thread_local! {
    /// What the launches of the capture use that this thread is making, if it is making one.
    static CAPTURED: RefCell<Option<Uses>> = const { RefCell::new(None) };
}

/// Notes a launch for the graph that this thread is capturing.
pub(crate) fn note_launch(module: &Module, memory: impl Iterator<Item = Span>) {
    CAPTURED.with_borrow_mut(|captured| {
        let Some(uses) = captured else { return };
        uses.owners.extend(memory.map(Span::owner));
        uses.modules.push(module.clone());
    });
}

/// Launches that were captured and can be replayed. A replay after memory of theirs was freed is refused.
pub struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
    uses: Uses,
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

    /// Captures the launches that `work` puts on a stream, without running them.
    pub fn capture(
        &self,
        stream: Stream<'_>,
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Graph, DeviceError> {
        let api = self.api;
        // Calls of this thread that would wait become errors; other threads go on as they like.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint;
        let stream = self.handle(stream)?;
        // SAFETY: a stream of this context that lives.
        let code = unsafe { (api.cuStreamBeginCapture_v2)(stream, mode) };
        api.check("cuStreamBeginCapture_v2", code)?;
        let outer = CAPTURED.replace(Some(Uses::default()));
        let worked = work();
        let uses = CAPTURED.replace(outer).unwrap_or_default();
        let mut graph = ptr::null_mut();
        // SAFETY: `graph` is written, with null where the recording was spoilt.
        let code = unsafe { (api.cuStreamEndCapture)(stream, &mut graph) };
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
        made.map(|()| Graph { context: self.context.clone(), handle, uses })
    }

    /// The number and the graph of the recording that what is put on a stream goes into, if it does. A stream that cannot say
    /// is not recorded.
    fn recorded_into(&self, stream: Stream<'_>) -> Result<Option<(u64, sys::CUgraph)>, DeviceError> {
        use sys::CUstreamCaptureStatus::{CU_STREAM_CAPTURE_STATUS_ACTIVE, CU_STREAM_CAPTURE_STATUS_NONE};
        const NONE: c_uint = CU_STREAM_CAPTURE_STATUS_NONE as c_uint;
        const ACTIVE: c_uint = CU_STREAM_CAPTURE_STATUS_ACTIVE as c_uint;
        let (mut status, stream) = (NONE, self.handle(stream)?);
        // SAFETY: `status` is written; the stream is this context's and lives.
        let code = unsafe { (self.api.cuStreamIsCapturing)(stream, &mut status) };
        if code != 0 || status == NONE {
            return Ok(None);
        }
        let (mut id, mut graph) = (0, ptr::null_mut());
        // SAFETY: status, number and graph are written; nothing else is asked for.
        let code = unsafe {
            let (none, no_count) = (ptr::null_mut(), ptr::null_mut());
            (self.api.cuStreamGetCaptureInfo_v2)(stream, &mut status, &mut id, &mut graph, none, no_count)
        };
        self.api.check("cuStreamGetCaptureInfo_v2", code)?;
        match status {
            NONE => Ok(None),
            ACTIVE => Ok(Some((id, graph))),
            _ => {
                let what = "an earlier error spoilt the recording of this stream; end it and record again".into();
                Err(DeviceError::Failed { call: "recording", what })
            }
        }
    }

    /// The number of the recording that what is put on a stream goes into, if it does; no other of the process has it.
    pub fn capture_id(&self, stream: Stream<'_>) -> Result<Option<u64>, DeviceError> {
        Ok(self.recorded_into(stream)?.map(|(id, _)| id))
    }

    /// Keeps something until the recording of a stream, and all that is made of it, is gone; then it is in `ended`.
    pub fn keep(&self, stream: Stream<'_>, what: Kept, ended: &Arc<Ended>) -> Result<(), DeviceError> {
        let Some((_, graph)) = self.recorded_into(stream)? else {
            let what = "the stream is not being recorded".into();
            return Err(DeviceError::Failed { call: "keep", what });
        };
        let mut object = ptr::null_mut();
        let keepsake = Box::into_raw(Box::new(Keepsake { what, ended: Arc::downgrade(ended) })).cast::<c_void>();
        let unsynchronised = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        // SAFETY: `object` is written; the one reference that it begins with is given to the graph.
        let code = unsafe { (self.api.cuUserObjectCreate)(&mut object, keepsake, over, 1, unsynchronised) };
        if code != 0 {
            // SAFETY: no object was made, so that nobody else has it.
            drop(unsafe { Box::from_raw(keepsake.cast::<Keepsake>()) });
        }
        self.api.check("cuUserObjectCreate", code)?;
        let given = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        // SAFETY: the graph is being recorded; while it is, everything but its end and the removal of nodes is allowed.
        let code = unsafe { (self.api.cuGraphRetainUserObject)(graph, object, 1, given) };
        if code != 0 {
            // SAFETY: the one reference was not taken. The driver hands back what it stands for.
            unsafe { (self.api.cuUserObjectRelease)(object, 1) };
        }
        self.api.check("cuGraphRetainUserObject", code)
    }

    /// Puts a recording on a stream.
    pub fn replay(&self, graph: &Graph, stream: Stream<'_>) -> Result<(), DeviceError> {
        let stream = self.handle(stream)?;
        // Nothing is freed until the replay is on its stream; then the driver waits for it.
        let live = graph.context.live().read();
        if !graph.uses.owners.iter().all(|&owner| live.has(owner)) {
            let what = "memory that the graph's launches use was freed; capture the launches again".into();
            return Err(DeviceError::Failed { call: "replay", what });
        }
        // SAFETY: the graph and its modules live, and so do its memory and the stream.
        let code = unsafe { (self.api.cuGraphLaunch)(graph.handle, stream) };
        self.api.check("cuGraphLaunch", code)
    }
}
