//! Owned streams, and graphs: launches captured once and replayed.

use super::{Context, Entered};
use cudarc::driver::sys;
use fulgurite_ptx::device::{DeviceError, Module, Span, Stream};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A stream that is destroyed on drop. It does not synchronise with the default stream.
pub struct OwnStream {
    context: Arc<Context>,
    handle: sys::CUstream,
}

// SAFETY: a stream may be used from any thread in which its context is current.
unsafe impl Send for OwnStream {}
// SAFETY: a stream may be used from any thread in which its context is current.
unsafe impl Sync for OwnStream {}

impl OwnStream {
    /// The stream as a launch argument.
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

/// Values that graphs kept and no longer need. The driver's callback must not call the driver, so the next call drops
/// them.
#[derive(Default)]
pub(crate) struct Ended(Mutex<Vec<Kept>>);

type Kept = Box<dyn Any + Send>;

/// A value that a graph keeps, and the list that receives it afterwards.
struct Keepsake {
    what: Kept,
    ended: Weak<Ended>,
}

impl Ended {
    /// Drops all values in the list.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(all);
    }
}

/// The driver calls this when the last graph that keeps the value is destroyed.
unsafe extern "C" fn over(keepsake: *mut c_void) {
    // SAFETY: `Entered::keep` made the pointer from a box, and the driver calls once, on its own thread; the box is
    // `Send`.
    let Keepsake { what, ended } = *unsafe { Box::from_raw(keepsake.cast::<Keepsake>()) };
    let Some(ended) = ended.upgrade() else {
        // The device is gone, so no later call could drop the value outside this callback.
        return std::mem::forget(what);
    };
    ended.0.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    // If this was the last reference, the device is gone too: leak the list instead of dropping it in this callback.
    std::mem::forget(Arc::into_inner(ended));
}

/// Resources that the launches of a graph use.
#[derive(Default)]
pub(crate) struct Uses {
    /// Owners of their memory; a replay is rejected if one was freed.
    owners: Vec<u64>,
    /// Their kernels, which live as long as the graph.
    modules: Vec<Module>,
}

thread_local! {
    /// Resources of the capture that this thread is making, if any.
    static CAPTURED: RefCell<Option<Uses>> = const { RefCell::new(None) };
}

/// Records a launch for the graph that this thread is capturing.
pub(crate) fn note_launch(module: &Module, memory: impl Iterator<Item = Span>) {
    CAPTURED.with_borrow_mut(|captured| {
        let Some(uses) = captured else { return };
        uses.owners.extend(memory.map(Span::owner));
        uses.modules.push(module.clone());
    });
}

/// Captured launches that can be replayed. A replay is rejected if their memory was freed.
pub struct Graph {
    context: Arc<Context>,
    handle: sys::CUgraphExec,
    uses: Uses,
}

// SAFETY: replays are ordered by the driver's lock; the handle itself never changes.
unsafe impl Send for Graph {}
// SAFETY: the driver's lock orders replays; the handle itself never changes.
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
        // Calls of this thread that would wait become errors; other threads are not affected.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL as c_uint;
        let stream = self.handle(stream)?;
        // SAFETY: a stream of this context that lives.
        let code = unsafe { (api.cuStreamBeginCapture_v2)(stream, mode) };
        api.check("cuStreamBeginCapture_v2", code)?;
        let outer = CAPTURED.replace(Some(Uses::default()));
        let worked = work();
        let uses = CAPTURED.replace(outer).unwrap_or_default();
        let mut graph = ptr::null_mut();
        // SAFETY: `graph` is written; it is null if the capture was invalidated.
        let code = unsafe { (api.cuStreamEndCapture)(stream, &mut graph) };
        let ended = worked.and_then(|()| api.check("cuStreamEndCapture", code));
        let mut handle = ptr::null_mut();
        let made = ended.and_then(|()| {
            // SAFETY: `handle` is written; the graph was just captured; there are no flags.
            let code = unsafe { (api.cuGraphInstantiateWithFlags)(&mut handle, graph, 0) };
            api.check("cuGraphInstantiateWithFlags", code)
        });
        if !graph.is_null() {
            // SAFETY: captured once and destroyed once; the instantiated graph does not depend on it.
            unsafe { (api.cuGraphDestroy)(graph) };
        }
        made.map(|()| Graph { context: self.context.clone(), handle, uses })
    }

    /// The id and the graph of the capture that records a stream, if there is one. A stream whose status query fails is
    /// not being captured.
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

    /// The id of the capture that records a stream, if there is one; unique within the process.
    pub fn capture_id(&self, stream: Stream<'_>) -> Result<Option<u64>, DeviceError> {
        Ok(self.recorded_into(stream)?.map(|(id, _)| id))
    }

    /// Keeps a value until the stream's capture and all graphs made from it are destroyed; then moves it to `ended`.
    pub fn keep(&self, stream: Stream<'_>, what: Kept, ended: &Arc<Ended>) -> Result<(), DeviceError> {
        let Some((_, graph)) = self.recorded_into(stream)? else {
            let what = "the stream is not being recorded".into();
            return Err(DeviceError::Failed { call: "keep", what });
        };
        let mut object = ptr::null_mut();
        let keepsake = Box::into_raw(Box::new(Keepsake { what, ended: Arc::downgrade(ended) })).cast::<c_void>();
        let unsynchronised = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
        // SAFETY: `object` is written; its initial reference is given to the graph.
        let code = unsafe { (self.api.cuUserObjectCreate)(&mut object, keepsake, over, 1, unsynchronised) };
        if code != 0 {
            // SAFETY: no object was made, so the box has no other owner.
            drop(unsafe { Box::from_raw(keepsake.cast::<Keepsake>()) });
        }
        self.api.check("cuUserObjectCreate", code)?;
        let given = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;
        // SAFETY: the graph is being captured; until the capture ends, everything except destroying it and removing
        // nodes is allowed.
        let code = unsafe { (self.api.cuGraphRetainUserObject)(graph, object, 1, given) };
        if code != 0 {
            // SAFETY: the graph did not take the reference. The driver then calls `over`, which returns the value.
            unsafe { (self.api.cuUserObjectRelease)(object, 1) };
        }
        self.api.check("cuGraphRetainUserObject", code)
    }

    /// Enqueues a graph on a stream.
    pub fn replay(&self, graph: &Graph, stream: Stream<'_>) -> Result<(), DeviceError> {
        let stream = self.handle(stream)?;
        // Nothing is freed until the replay is enqueued; after that the driver waits for it before freeing.
        let live = graph.context.live().read();
        if !graph.uses.owners.iter().all(|&owner| live.has(owner)) {
            let what = "memory that the graph's launches use was freed; capture the launches again".into();
            return Err(DeviceError::Failed { call: "replay", what });
        }
        // SAFETY: the graph and its modules are alive, and so are its memory and the stream.
        let code = unsafe { (self.api.cuGraphLaunch)(graph.handle, stream) };
        self.api.check("cuGraphLaunch", code)
    }
}
