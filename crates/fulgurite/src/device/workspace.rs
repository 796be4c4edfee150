//! Memory that launches need besides their tensors: counters, scratch memory, copies of tensors.
//!
//! Launches that follow each other share a workspace: those on one stream, and those of one graph capture that came
//! from one stream. A graph may be replayed concurrently with any other launch, so each capture has its own workspaces,
//! which live as long as the graph. Two graphs instantiated from one capture share them and must not be replayed at the
//! same time.
//!
//! The workspace of a stream lives as long as the session: nothing tells when a stream is destroyed, and launches that are
//! still running own its counters. Libraries take streams from small pools (torch has 32 of each priority), so there are few.

use super::modules::is_of;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Module, Span, Stream};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The workspaces of a device.
#[derive(Default)]
pub(super) struct Workspaces {
    counters: Arc<Mutex<Option<Counters>>>,
    /// Workspaces by the handle of the stream.
    of_streams: Mutex<HashMap<u64, Arc<Workspace>>>,
    /// Workspaces by the id of the capture and the handle of the stream; the graph owns the workspace.
    of_captures: Mutex<HashMap<(u64, u64), Weak<Workspace>>>,
}

impl Workspaces {
    /// The workspace for a launch on this stream.
    pub fn of(&self, device: &(impl Device + ?Sized), stream: Stream<'_>) -> Result<Arc<Workspace>, DeviceError> {
        let handle = stream.handle();
        let fresh = |captured| Arc::new(Workspace { captured, memory: Mutex::default(), pool: self.counters.clone() });
        let Some(capture) = device.capture_id(stream)? else {
            return Ok(locked(&self.of_streams).entry(handle).or_insert_with(|| fresh(false)).clone());
        };
        let mut captures = locked(&self.of_captures);
        if let Some(known) = captures.get(&(capture, handle)).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let workspace = fresh(true);
        device.keep_for_replays(stream, Box::new(workspace.clone()))?;
        captures.retain(|_, workspace| workspace.strong_count() > 0);
        captures.insert((capture, handle), Arc::downgrade(&workspace));
        Ok(workspace)
    }
}

/// Memory shared by launches that follow each other.
pub(super) struct Workspace {
    /// Whether the launches are captured. Replays use every buffer again, so no buffer is freed before the graph.
    captured: bool,
    memory: Mutex<Buffers>,
    /// The pool of counters, created on first use.
    pool: Arc<Mutex<Option<Counters>>>,
}

/// Buffers by purpose; the last one of each list is the largest.
#[derive(Default)]
struct Buffers {
    scratch: Vec<Buffer>,
    copies: Vec<Buffer>,
    counters: Vec<Span>,
    /// Kernels of captured launches.
    modules: Vec<Module>,
}

impl Workspace {
    /// Locks the workspace for one call. Other threads wait until the guard is dropped, so launches of two calls never
    /// interleave.
    pub fn lock(&self) -> WorkspaceGuard<'_> {
        WorkspaceGuard { workspace: self, memory: locked(&self.memory) }
    }

    /// The newest of these buffers if it is large enough, or a larger one.
    fn enough(
        &self,
        device: &(impl Device + ?Sized),
        buffers: &mut Vec<Buffer>,
        bytes: u64,
    ) -> Result<Span, DeviceError> {
        match buffers.last() {
            Some(known) if known.span().bytes() >= bytes => Ok(known.span()),
            _ => {
                if !self.captured {
                    // The device frees the old buffers after the launches that use them.
                    buffers.clear();
                }
                // Round up by at most an eighth, so that growing lengths do not allocate every time.
                let fresh = device.allocate(bytes.next_multiple_of(bytes.next_power_of_two() / 16 + 1))?;
                let span = fresh.span();
                buffers.push(fresh);
                Ok(span)
            }
        }
    }
}

/// A workspace that is locked for the launches of a call.
pub(super) struct WorkspaceGuard<'a> {
    workspace: &'a Workspace,
    memory: MutexGuard<'a, Buffers>,
}

impl WorkspaceGuard<'_> {
    /// Scratch memory of at least `bytes` bytes.
    pub fn scratch(&mut self, device: &(impl Device + ?Sized), bytes: u64) -> Result<Span, DeviceError> {
        self.workspace.enough(device, &mut self.memory.scratch, bytes)
    }

    /// Memory for copies of tensors.
    pub fn copies(&mut self, device: &(impl Device + ?Sized), bytes: u64) -> Result<Span, DeviceError> {
        self.workspace.enough(device, &mut self.memory.copies, bytes)
    }

    /// Counters that are ready for a launch: zero at first, then as the previous launch left them.
    pub fn counters(&mut self, device: &(impl Device + ?Sized), bytes: u64) -> Result<Span, DeviceError> {
        let counters = &mut self.memory.counters;
        match counters.last() {
            Some(&known) if known.bytes() >= bytes => Ok(known),
            // Counters that are too small stay allocated, because launches in flight use them.
            _ => {
                let mut pool = locked(&self.workspace.pool);
                let pool = match &mut *pool {
                    Some(pool) => pool,
                    none => none.insert(Counters::new(device)?),
                };
                let span = pool.take(bytes)?;
                counters.push(span);
                Ok(span)
            }
        }
    }

    /// Keeps the kernels of captured launches alive as long as their graph.
    pub fn hold<'m>(&mut self, modules: impl IntoIterator<Item = &'m Module>) {
        if !self.workspace.captured {
            return;
        }
        for module in modules {
            if !self.memory.modules.iter().any(|held| is_of(held, &module.shared_kernel())) {
                self.memory.modules.push(module.clone());
            }
        }
    }
}

/// Returns the counters to the pool: no launch of this workspace will run again.
impl Drop for Workspace {
    fn drop(&mut self) {
        let memory = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = locked(&self.pool).as_mut() {
            memory.counters.drain(..).for_each(|span| pool.give_back(span));
        }
    }
}

/// Counters for launches that may run at the same time. A launch leaves them ready for the next one.
struct Counters {
    memory: Buffer,
    taken_bytes: u64,
    /// Returned counters, by their size in bytes.
    given_back: HashMap<u64, Vec<Span>>,
}

impl Counters {
    /// Alignment, which is also the smallest allocation, and the size of the pool, in bytes.
    const ALIGN: u64 = 16;
    const BYTES: u64 = 4 << 20;

    fn new(device: &(impl Device + ?Sized)) -> Result<Counters, DeviceError> {
        Ok(Counters::of(device.zeroed(Self::BYTES)?))
    }

    fn of(memory: Buffer) -> Counters {
        Counters { memory, taken_bytes: 0, given_back: HashMap::new() }
    }

    /// Counters of at least `bytes` bytes. Sizes are powers of two, so that a growing batch does not take new ones
    /// every time and returned counters fit other calls.
    fn take(&mut self, bytes: u64) -> Result<Span, DeviceError> {
        let bytes = bytes.next_power_of_two().max(Self::ALIGN);
        if let Some(span) = self.given_back.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(span);
        }
        if self.taken_bytes + bytes > Self::BYTES {
            let what = format!(
                "graph captures and streams have taken {} of {} bytes of counters, and {bytes} more are needed; \
                 drop graphs that are not replayed any more",
                self.taken_bytes,
                Self::BYTES
            );
            return Err(DeviceError::Failed { call: "launch", what });
        }
        let span = self.memory.span().from(self.taken_bytes).first(bytes);
        self.taken_bytes += bytes;
        Ok(span)
    }

    fn give_back(&mut self, span: Span) {
        self.given_back.entry(span.bytes()).or_default().push(span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_cuda::{Cuda, Options, fake};

    fn device() -> Cuda {
        fake::books(|books| books.memory_bytes = 1 << 24);
        fake::open(Options::default()).unwrap()
    }

    #[test]
    fn counters_are_handed_out_once_and_again_when_they_came_back() {
        let mut counters = Counters::of(Buffer::new(Span::new(0x1000, Counters::BYTES), Box::new(())));
        let [a, b, c] = [1, 17, 4000].map(|bytes| counters.take(bytes).unwrap());
        assert_eq!([a, b, c].map(|span| (span.address(), span.bytes())), [(0x1000, 16), (0x1010, 32), (0x1030, 4096)]);
        counters.give_back(b);
        assert_eq!(counters.take(4).unwrap().address(), 0x1030 + 4096);
        assert_eq!(counters.take(20), Ok(b));
        assert_eq!(
            counters.take(Counters::BYTES).unwrap_err().to_string(),
            "launch: graph captures and streams have taken 4160 of 4194304 bytes of counters, and 4194304 more are needed; \
             drop graphs that are not replayed any more"
        );
    }

    /// Launches on one stream share memory, launches on two streams do not; memory grows with the calls.
    #[test]
    fn a_stream_has_one_workspace() {
        let (gpu, workspaces) = (device(), Workspaces::default());
        let (one, other) = (gpu.own_stream().unwrap(), Stream::default());
        let scratch =
            |stream, bytes| workspaces.of(&gpu, stream).unwrap().lock().scratch(&gpu, bytes).unwrap().address();
        let first = scratch(one.stream(), 1000);
        assert_eq!(scratch(one.stream(), 900), first);
        assert_ne!(scratch(other, 900), first);
        let larger = scratch(one.stream(), 5000);
        assert_ne!(larger, first);
        assert_eq!(scratch(one.stream(), 1000), larger);
        assert_eq!(fake::books(|books| books.memory.len()), 2, "what was too small is given back");
        let counters = |stream| workspaces.of(&gpu, stream).unwrap().lock().counters(&gpu, 8).unwrap();
        assert_ne!(counters(one.stream()), counters(other));
    }

    /// A capture has its own memory, which it keeps until its graph is destroyed.
    #[test]
    fn a_capture_keeps_its_workspace() {
        let (gpu, workspaces) = (device(), Workspaces::default());
        let stream = gpu.own_stream().unwrap();
        let take = |bytes| -> Result<(Span, Span), DeviceError> {
            let workspace = workspaces.of(&gpu, stream.stream())?;
            let mut guard = workspace.lock();
            Ok((guard.scratch(&gpu, bytes)?, guard.counters(&gpu, bytes)?))
        };
        let plain = take(100).unwrap();
        let mut captured = Vec::new();
        let mut capture = || {
            gpu.capture(stream.stream(), || {
                captured.extend([take(100)?, take(200)?]);
                Ok(())
            })
        };
        let graphs = [capture().unwrap(), capture().unwrap()];
        let all: Vec<u64> = captured.iter().chain([&plain]).map(|(scratch, _)| scratch.address()).collect();
        let mut apart = all.clone();
        apart.sort_unstable();
        apart.dedup();
        assert_eq!(apart.len(), all.len(), "nothing is shared, and nothing was given back: {all:?}");
        assert_eq!(take(100).unwrap(), plain);
        drop(graphs);
        assert_eq!(take(100).unwrap(), plain, "asking clears what graphs have kept");
        // Two buffers remain: one of the stream, and the pool of counters.
        assert_eq!(fake::books(|books| books.memory.len()), 2);
    }

    #[test]
    fn a_workspace_that_is_gone_gives_its_counters_back() {
        let (gpu, workspaces) = (device(), Workspaces::default());
        let workspace = || Workspace { captured: true, memory: Mutex::default(), pool: workspaces.counters.clone() };
        let take = |workspace: &Workspace, bytes| workspace.lock().counters(&gpu, bytes).unwrap();
        let (first, second) = (workspace(), workspace());
        let few = take(&first, 100);
        assert_eq!(take(&first, 128), few);
        let many = take(&first, 129);
        assert_eq!(take(&first, 1), many);
        assert_ne!(take(&second, 100), few);
        drop(first);
        let third = workspace();
        assert_eq!((take(&third, 100), take(&third, 200)), (few, many));
    }
}
