//! Memory on a GPU that launches need for themselves: scratch, copies of tensors, counters.
//!
//! Launches that follow each other share it: those on one stream, and those of one recording that came from one stream.
//! A recording may be replayed beside any other, so each has its own, which lives as long as it. (Who makes two graphs of one
//! recording must not replay them at the same time.)

use crate::compiled::is_of;
use fulgurite_cuda::Cuda;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Module, Span, Stream};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rooms of a GPU.
#[derive(Default)]
pub(crate) struct Rooms {
    counters: Arc<Mutex<Option<Counters>>>,
    of_streams: Mutex<HashMap<u64, Arc<Room>>>,
    /// By the recording's number; the recording itself holds the room.
    of_recordings: Mutex<HashMap<(u64, u64), Weak<Room>>>,
}

impl Rooms {
    /// The room of a launch on this stream.
    pub fn of(&self, cuda: &Cuda, stream: Stream<'_>) -> Result<Arc<Room>, DeviceError> {
        let fresh = |recorded| Arc::new(Room { recorded, memory: Mutex::default(), pool: self.counters.clone() });
        let Some(recording) = cuda.capture_id(stream)? else {
            return Ok(locked(&self.of_streams).entry(stream.handle()).or_insert_with(|| fresh(false)).clone());
        };
        let mut rooms = locked(&self.of_recordings);
        if let Some(known) = rooms.get(&(recording, stream.handle())).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let room = fresh(true);
        cuda.keep_for_replays(stream, Box::new(room.clone()))?;
        rooms.retain(|_, room| room.strong_count() > 0);
        rooms.insert((recording, stream.handle()), Arc::downgrade(&room));
        Ok(room)
    }
}

/// What launches that follow each other share.
pub(crate) struct Room {
    /// Whether they may run again later: then what they were given stays theirs.
    recorded: bool,
    memory: Mutex<Memory>,
    /// Where counters come from; made with the first that are taken.
    pool: Arc<Mutex<Option<Counters>>>,
}

/// The last span of each is the largest.
#[derive(Default)]
struct Memory {
    scratch: Vec<Buffer>,
    copies: Vec<Buffer>,
    counters: Vec<Span>,
    /// Kernels of recorded launches.
    modules: Vec<Module>,
}

impl Room {
    /// The room for one call. Until it is dropped other threads wait: launches of a call have none of another between them.
    pub fn turn(&self) -> Turn<'_> {
        Turn { room: self, memory: locked(&self.memory) }
    }

    /// The last of these buffers, or a larger one.
    fn enough(&self, cuda: &Cuda, buffers: &mut Vec<Buffer>, bytes: u64) -> Result<Span, DeviceError> {
        match buffers.last() {
            Some(known) if known.span().bytes() >= bytes => Ok(known.span()),
            _ => {
                if !self.recorded {
                    // The driver waits for launches that use what is given back.
                    buffers.clear();
                }
                // A little more than asked for, so that lengths that grow do not take new memory every time.
                let fresh = cuda.allocate(bytes.next_multiple_of(bytes.next_power_of_two() / 16 + 1))?;
                let span = fresh.span();
                buffers.push(fresh);
                Ok(span)
            }
        }
    }
}

/// A room while a call makes its launches.
pub(crate) struct Turn<'a> {
    room: &'a Room,
    memory: MutexGuard<'a, Memory>,
}

impl Turn<'_> {
    /// Scratch memory of at least so many bytes.
    pub fn scratch(&mut self, cuda: &Cuda, bytes: u64) -> Result<Span, DeviceError> {
        self.room.enough(cuda, &mut self.memory.scratch, bytes)
    }

    /// Memory for copies of tensors.
    pub fn copies(&mut self, cuda: &Cuda, bytes: u64) -> Result<Span, DeviceError> {
        self.room.enough(cuda, &mut self.memory.copies, bytes)
    }

    /// Counters that are 0, or as an earlier launch left them.
    pub fn counters(&mut self, cuda: &Cuda, bytes: u64) -> Result<Span, DeviceError> {
        self.counters_of(bytes, || Counters::new(cuda))
    }

    /// Has recorded launches keep their kernels.
    pub fn hold<'m>(&mut self, modules: impl IntoIterator<Item = &'m Module>) {
        if !self.room.recorded {
            return;
        }
        for module in modules {
            if !self.memory.modules.iter().any(|held| is_of(held, &module.shared_kernel())) {
                self.memory.modules.push(module.clone());
            }
        }
    }

    fn counters_of(
        &mut self,
        bytes: u64,
        fresh: impl FnOnce() -> Result<Counters, DeviceError>,
    ) -> Result<Span, DeviceError> {
        let counters = &mut self.memory.counters;
        match counters.last() {
            Some(&known) if known.bytes() >= bytes => Ok(known),
            // What was too few is not given back yet: launches that are under way have it.
            _ => {
                let mut pool = locked(&self.room.pool);
                let pool = match &mut *pool {
                    Some(pool) => pool,
                    none => none.insert(fresh()?),
                };
                let span = pool.take(bytes)?;
                counters.push(span);
                Ok(span)
            }
        }
    }
}

/// No launch of the room will run again.
impl Drop for Room {
    fn drop(&mut self) {
        let memory = self.memory.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = locked(&self.pool).as_mut() {
            memory.counters.drain(..).for_each(|span| pool.give_back(span));
        }
    }
}

/// Counters of launches that may run at the same time. A launch leaves them so that the next can begin.
struct Counters {
    memory: Buffer,
    taken_bytes: u64,
    /// By their bytes.
    given_back: HashMap<u64, Vec<Span>>,
}

impl Counters {
    /// What a pointer is aligned to, and the fewest bytes that are handed out.
    const ALIGN: u64 = 16;
    const BYTES: u64 = 4 << 20;

    fn new(cuda: &Cuda) -> Result<Counters, DeviceError> {
        Ok(Counters::of(cuda.zeroed(Self::BYTES)?))
    }

    fn of(memory: Buffer) -> Counters {
        Counters { memory, taken_bytes: 0, given_back: HashMap::new() }
    }

    /// At least so many bytes: a power of two, so that a batch that grows does not take new ones every time, and those given
    /// back fit others.
    fn take(&mut self, bytes: u64) -> Result<Span, DeviceError> {
        let bytes = bytes.next_power_of_two().max(Self::ALIGN);
        if let Some(span) = self.given_back.get_mut(&bytes).and_then(Vec::pop) {
            return Ok(span);
        }
        if self.taken_bytes + bytes > Self::BYTES {
            let what = format!(
                "recordings and streams have taken {} of {} bytes of counters, and {bytes} more are needed; \
                 drop recordings that are not replayed any more",
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

    fn counters() -> Counters {
        Counters::of(Buffer::new(Span::new(0x1000, Counters::BYTES), Box::new(())))
    }

    #[test]
    fn counters_are_handed_out_once_and_again_when_they_came_back() {
        let mut counters = counters();
        let [a, b, c] = [1, 17, 4000].map(|bytes| counters.take(bytes).unwrap());
        assert_eq!([a, b, c].map(|span| (span.address(), span.bytes())), [(0x1000, 16), (0x1010, 32), (0x1030, 4096)]);
        counters.give_back(b);
        assert_eq!(counters.take(4).unwrap().address(), 0x1030 + 4096);
        assert_eq!(counters.take(20), Ok(b));
        assert_eq!(
            counters.take(Counters::BYTES).unwrap_err().to_string(),
            "launch: recordings and streams have taken 4160 of 4194304 bytes of counters, and 4194304 more are needed; \
             drop recordings that are not replayed any more"
        );
    }

    #[test]
    fn a_room_that_is_gone_gives_its_counters_back() {
        let rooms = Rooms::default();
        let room = || Room { recorded: true, memory: Mutex::default(), pool: rooms.counters.clone() };
        let take = |room: &Room, bytes| room.turn().counters_of(bytes, || Ok(counters())).unwrap();
        let (first, second) = (room(), room());
        let few = take(&first, 100);
        assert_eq!(take(&first, 128), few);
        let many = take(&first, 129);
        assert_eq!(take(&first, 1), many);
        assert_ne!(take(&second, 100), few);
        drop(first);
        let third = room();
        assert_eq!((take(&third, 100), take(&third, 200)), (few, many));
    }
}
