//! The race detector: the last accesses to each word of memory, and whether they are ordered with the current one.
//!
//! The method is that of FastTrack (Flanagan and Freund, 2009): for each word it keeps the last write and the reads
//! since then, each with the time of its warp, and compares them with vector clocks. There are three differences. A
//! warp is one agent, because its lanes run in lockstep. A copy or product is ordered by its completion, which becomes
//! known to the agents that wait for it. And besides the order of memory, an access through the async proxy requires a
//! fence after a write through the generic proxy.
//!
//! **Promise.** A race between warps, CTAs, copies and products on the executed path is found whatever the schedule
//! was, down to single bytes, as long as no third access to the same four bytes came in between. Reported accesses are
//! unordered by PTX's rules, with three deviations that follow public kernels. A relaxed arrival may signal a completed
//! asynchronous read. An asynchronous read of a warpgroup counts as finished when one of its warps has waited. A read needs
//! no proxy fence before the copy that overwrites it. In one point the detector is stricter than PTX: a proxy fence counts
//! only for the accesses of the warp that executes it. Not found: races between lanes of one warp, and
//! synchronisation whose scope is too narrow.

use crate::clock::{Clock, Comp, Part};
use fulgurite_ptx::Swizzle;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// The path by which an access reaches memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Proxy {
    Generic,
    Async,
}

/// The agent of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// A warp, at a time.
    Warp { comp: Comp, time: u32 },
    /// An asynchronous operation, by the index of its completion.
    Async(u32),
}

/// A recorded access.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    pub who: Who,
    /// Step of the program.
    pub pc: u32,
    /// Index of the CTA in the grid; `warp`: index in the CTA.
    pub block: u32,
    pub warp: u32,
    pub proxy: Proxy,
    /// Whether it is a strong (atomic) access; two strong accesses never race.
    pub strong: bool,
    /// Mask of the bytes in the word.
    pub mask: u8,
    /// The layout in which a box was written.
    pub swizzle: Option<Swizzle>,
}

/// Tables to which cells refer by index.
pub(crate) struct Ledger {
    accesses: Vec<Access>,
    /// For each completion: components that know of it, from which value on.
    completions: Vec<Vec<(Comp, u32)>>,
    /// Sets of reads, and the set that results when an access joins one.
    sets: Vec<Vec<u32>>,
    joined: HashMap<(u32, u32), u32, BuildHasherDefault<PairHasher>>,
}

/// A hash of two indices. They come from the simulator itself, so nobody can choose them to collide.
#[derive(Default)]
pub(crate) struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u32(byte.into()));
    }

    fn write_u32(&mut self, index: u32) {
        // 2^64 divided by the golden ratio: neighbouring indices are spread over all bits.
        self.0 = (self.0.rotate_left(32) ^ u64::from(index)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Bytes per cell.
pub(crate) const CELL: usize = 4;
const PAGE: usize = 1024;

/// Last write and the reads since, by index; 0 means none.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    write: u32,
    reads: u32,
}

/// The shadow of a region of memory.
pub(crate) struct Shadow {
    pages: Vec<Option<Box<[Cell; PAGE]>>>,
    /// For each cell, a mask of the bytes that were written.
    written: Vec<u8>,
}

/// The reason why two accesses conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Unordered,
    NoProxyFence,
}

/// Two conflicting accesses: the first byte, and the earlier access.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conflict {
    pub offset: u64,
    pub why: Why,
    pub other: Access,
}

/// An access in progress, to any number of cells.
pub(crate) struct Toucher<'a> {
    /// Clocks of the agent; a product of a warpgroup has four, and each must know of the earlier access.
    pub clocks: &'a [&'a Clock],
    pub access: Access,
    /// The clock of proxy fences, for shared or for global memory.
    pub fences: Part,
    /// Whether a read, too, needs to know only that an earlier write is finished: in tensor memory, where no write is
    /// visible to some and not to others.
    pub finished: bool,
    /// Results so far.
    pub memo: Memo,
}

/// Cached results of an access: its cells tend to have the same history.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Memo {
    /// Indices of the access, by the bytes of a cell that it covers.
    ids: [u32; 16],
    /// A write and a set of reads that were found to be ordered, and the set that a read makes of another.
    good_write: u32,
    good_reads: u32,
    last_join: (u32, u32),
}

impl<'a> Toucher<'a> {
    pub fn new(clocks: &'a [&'a Clock], access: Access, fences: Part) -> Self {
        Toucher { clocks, access, fences, finished: false, memo: Memo::default() }
    }

    fn id(&mut self, ledger: &mut Ledger, mask: u8) -> u32 {
        let id = &mut self.memo.ids[usize::from(mask)];
        if *id == 0 {
            *id = ledger.accesses.len() as u32;
            ledger.accesses.push(Access { mask, ..self.access });
        }
        *id
    }
}

impl Ledger {
    pub fn new() -> Self {
        let nobody = Access {
            who: Who::Async(0),
            pc: 0,
            block: 0,
            warp: 0,
            proxy: Proxy::Generic,
            strong: false,
            mask: 0,
            swizzle: None,
        };
        Ledger { accesses: vec![nobody], completions: Vec::new(), sets: vec![Vec::new()], joined: HashMap::default() }
    }

    /// A new completion that no agent knows of yet.
    pub fn completion(&mut self) -> u32 {
        self.completions.push(Vec::new());
        self.completions.len() as u32 - 1
    }
    /// Records that an agent which knows `value` of a component knows of the completion.
    pub fn completed(&mut self, completion: u32, comp: Comp, value: u32) {
        self.completions[completion as usize].push((comp, value));
    }
    /// Whether a clock knows of a completion.
    pub fn known(&self, completion: u32, clock: &Clock, part: Part) -> bool {
        self.completions[completion as usize].iter().any(|&(comp, value)| clock.get(part, comp) >= value)
    }

    fn ordered(&self, earlier: &Access, clock: &Clock, finished_is_enough: bool) -> bool {
        match earlier.who {
            Who::Warp { comp, time } => clock.get(Part::Memory, comp) >= time,
            Who::Async(completion) => {
                self.known(completion, clock, if finished_is_enough { Part::Done } else { Part::Memory })
            }
        }
    }

    /// The conflict between an earlier write and the current access, ignoring the bytes that they cover.
    fn after_write(&self, t: &Toucher<'_>, earlier: &Access, writes: bool) -> Option<Why> {
        if earlier.who == t.access.who || (earlier.strong && t.access.strong) {
            return None;
        }
        let unordered = |clock: &&Clock| !self.ordered(earlier, clock, writes || t.finished);
        if t.clocks.iter().any(unordered) {
            return Some(Why::Unordered);
        }
        match (earlier.proxy, t.access.proxy, earlier.who) {
            (Proxy::Generic, Proxy::Async, Who::Warp { comp, time }) => {
                let fenced = |clock: &&Clock| clock.get(t.fences, comp) >= time;
                (!t.clocks.iter().any(fenced)).then_some(Why::NoProxyFence)
            }
            // `cp.async` writes through the generic proxy, so an agent that waited for it must also have fenced.
            (Proxy::Generic, Proxy::Async, Who::Async(completion)) => {
                let fenced = |clock: &&Clock| self.known(completion, clock, t.fences);
                (!t.clocks.iter().any(fenced)).then_some(Why::NoProxyFence)
            }
            _ => None,
        }
    }

    fn after_read(&self, t: &Toucher<'_>, earlier: &Access) -> Option<Why> {
        if earlier.who == t.access.who || (earlier.strong && t.access.strong) {
            return None;
        }
        let ordered = t.clocks.iter().all(|clock| self.ordered(earlier, clock, true));
        (!ordered).then_some(Why::Unordered)
    }

    /// The set of reads with one more; reads that are ordered before it are dropped.
    fn join(&mut self, t: &Toucher<'_>, set: u32, id: u32) -> u32 {
        if let Some(&joined) = self.joined.get(&(set, id)) {
            return joined;
        }
        let new = self.accesses[id as usize];
        let stays = |&old: &u32| {
            let access = &self.accesses[old as usize];
            access.mask & !new.mask != 0 || !t.clocks.iter().all(|clock| self.ordered(access, clock, false))
        };
        let mut kept: Vec<u32> = self.sets[set as usize].iter().copied().filter(stays).collect();
        kept.push(id);
        self.sets.push(kept);
        let joined = self.sets.len() as u32 - 1;
        self.joined.insert((set, id), joined);
        joined
    }
}

/// The cells of a run of bytes, each with a mask of the bytes in the run.
fn cells(start: u64, bytes: u64) -> impl Iterator<Item = (usize, u8)> {
    let cell = CELL as u64;
    let end = start + bytes;
    (start / cell..end.div_ceil(cell)).map(move |i| {
        let low = start.saturating_sub(i * cell).min(cell);
        let high = (end - i * cell).min(cell);
        (i as usize, ((1u8 << high) - 1) & !((1u8 << low) - 1))
    })
}

impl Shadow {
    pub fn new(bytes: u64) -> Self {
        Shadow::try_new(bytes).expect("memory of a CTA, of which there is little")
    }

    /// `None` if the process cannot have the memory for it.
    pub fn try_new(bytes: u64) -> Option<Self> {
        let [cells, count] = Shadow::counts(bytes);
        let (mut pages, mut written) = (Vec::new(), Vec::new());
        pages.try_reserve_exact(count).ok()?;
        written.try_reserve_exact(cells).ok()?;
        pages.resize_with(count, || None);
        written.resize(cells, 0);
        Some(Shadow { pages, written })
    }

    /// Number of cells and of pages.
    fn counts(bytes: u64) -> [usize; 2] {
        let cells = bytes.div_ceil(CELL as u64) as usize;
        [cells, cells.div_ceil(PAGE)]
    }

    /// Bytes that the shadow of an allocation takes before anything is accessed.
    pub fn bytes_of(bytes: u64) -> u64 {
        let [cells, pages] = Shadow::counts(bytes);
        (cells + pages * size_of::<Option<Box<[Cell; PAGE]>>>()) as u64
    }

    /// Forgets all accesses, but keeps which bytes were written.
    pub fn forget(&mut self) {
        self.pages.fill_with(|| None);
    }

    pub fn set_written(&mut self, start: u64, bytes: u64) {
        for (i, mask) in cells(start, bytes) {
            self.written[i] |= mask;
        }
    }
    /// Marks a run by the marks of its source: bytes copied from uninitialised memory stay uninitialised.
    pub fn copy_written(&mut self, start: u64, marks: &[bool]) {
        for (offset, &mark) in marks.iter().enumerate() {
            let at = start as usize + offset;
            let bit = 1 << (at % CELL);
            if mark {
                self.written[at / CELL] |= bit;
            } else {
                self.written[at / CELL] &= !bit;
            }
        }
    }
    /// The first byte of a run that was never written.
    pub fn unwritten(&self, start: u64, bytes: u64) -> Option<u64> {
        cells(start, bytes).find(|&(i, mask)| self.written[i] & mask != mask).map(|(i, mask)| {
            let missing = mask & !self.written[i];
            (i * CELL) as u64 + u64::from(missing.trailing_zeros())
        })
    }

    fn cell(&mut self, i: usize) -> &mut Cell {
        &mut self.pages[i / PAGE].get_or_insert_with(|| Box::new([Cell::default(); PAGE]))[i % PAGE]
    }

    /// The last write to the cell of a byte.
    pub fn writer<'l>(&self, ledger: &'l Ledger, offset: u64) -> Option<&'l Access> {
        let i = offset as usize / CELL;
        let cell = self.pages.get(i / PAGE)?.as_ref()?[i % PAGE];
        (cell.write != 0).then(|| &ledger.accesses[cell.write as usize])
    }

    /// Records a read, and returns the first conflict.
    pub fn read(&mut self, ledger: &mut Ledger, t: &mut Toucher<'_>, start: u64, bytes: u64) -> Option<Conflict> {
        let mut found = None;
        for (i, mask) in cells(start, bytes) {
            let id = t.id(ledger, mask);
            let cell = self.cell(i);
            if cell.write != 0 && cell.write != t.memo.good_write {
                let earlier = &ledger.accesses[cell.write as usize];
                match ledger.after_write(t, earlier, false) {
                    None => t.memo.good_write = cell.write,
                    Some(why) if found.is_none() && earlier.mask & mask != 0 => {
                        found = Some(Conflict { offset: (i * CELL) as u64, why, other: *earlier });
                    }
                    Some(_) => {}
                }
            }
            if mask == 0xf && t.memo.last_join.0 == cell.reads && t.memo.last_join.1 != 0 {
                cell.reads = t.memo.last_join.1;
            } else {
                let joined = ledger.join(t, cell.reads, id);
                if mask == 0xf {
                    t.memo.last_join = (cell.reads, joined);
                }
                cell.reads = joined;
            }
        }
        found
    }

    /// Records a write, and returns the first conflict.
    pub fn write(&mut self, ledger: &mut Ledger, t: &mut Toucher<'_>, start: u64, bytes: u64) -> Option<Conflict> {
        let mut found = None;
        for (i, mask) in cells(start, bytes) {
            self.written[i] |= mask;
            let id = t.id(ledger, mask);
            let cell = self.cell(i);
            let mut kept = id;
            if cell.write != 0 && cell.write != t.memo.good_write {
                let earlier = &ledger.accesses[cell.write as usize];
                match ledger.after_write(t, earlier, true) {
                    None => t.memo.good_write = cell.write,
                    Some(why) if found.is_none() && earlier.mask & mask != 0 => {
                        found = Some(Conflict { offset: (i * CELL) as u64, why, other: *earlier });
                    }
                    Some(_) => {}
                }
                let merged = earlier.mask | mask;
                if earlier.who == t.access.who && earlier.pc == t.access.pc && merged != mask {
                    kept = t.id(ledger, merged);
                }
            }
            if cell.reads != 0 && cell.reads != t.memo.good_reads {
                let set = &ledger.sets[cell.reads as usize];
                let mut good = true;
                for &id in set {
                    let earlier = &ledger.accesses[id as usize];
                    if let Some(why) = ledger.after_read(t, earlier) {
                        good = false;
                        if found.is_none() && earlier.mask & mask != 0 {
                            found = Some(Conflict { offset: (i * CELL) as u64, why, other: *earlier });
                        }
                    }
                }
                if good {
                    t.memo.good_reads = cell.reads;
                }
            }
            *cell = Cell { write: kept, reads: 0 };
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Comp = Comp { cluster: 0, index: 0 };
    const B: Comp = Comp { cluster: 0, index: 1 };

    fn by(comp: Comp, time: u32, proxy: Proxy) -> Access {
        Access {
            who: Who::Warp { comp, time },
            pc: 1,
            block: 0,
            warp: comp.index,
            proxy,
            strong: false,
            mask: 0,
            swizzle: None,
        }
    }
    fn knows(parts: &[(Part, Comp, u32)]) -> Clock {
        let mut clock = Clock::new(0);
        parts.iter().for_each(|&(part, comp, value)| clock.raise(&[part], comp, value));
        clock
    }
    fn touch(clock: &Clock, access: Access, f: impl FnOnce(&mut Toucher<'_>) -> Option<Conflict>) -> Option<Why> {
        f(&mut Toucher::new(&[clock], access, Part::AsyncShared)).map(|c| c.why)
    }

    #[test]
    fn bytes_of_cells() {
        let all: Vec<_> = cells(3, 6).collect();
        assert_eq!(all, [(0, 0b1000), (1, 0b1111), (2, 0b0001)]);
        assert_eq!(cells(4, 2).collect::<Vec<_>>(), [(1, 0b0011)]);
    }

    #[test]
    fn a_write_and_a_read_must_be_ordered() {
        let (mut ledger, mut shadow) = (Ledger::new(), Shadow::new(64));
        let nothing = Clock::new(0);
        assert_eq!(touch(&nothing, by(A, 1, Proxy::Generic), |t| shadow.write(&mut ledger, t, 0, 8)), None);
        let reads = |ledger: &mut Ledger, shadow: &mut Shadow, clock: &Clock, proxy| {
            touch(clock, by(B, 1, proxy), |t| shadow.read(ledger, t, 4, 4))
        };
        assert_eq!(reads(&mut ledger, &mut shadow, &nothing, Proxy::Generic), Some(Why::Unordered));
        let told = knows(&[(Part::Memory, A, 1)]);
        assert_eq!(reads(&mut ledger, &mut shadow, &told, Proxy::Generic), None);
        assert_eq!(reads(&mut ledger, &mut shadow, &told, Proxy::Async), Some(Why::NoProxyFence));
        let fenced = knows(&[(Part::Memory, A, 1), (Part::AsyncShared, A, 1)]);
        assert_eq!(reads(&mut ledger, &mut shadow, &fenced, Proxy::Async), None);
        // The reads were recorded, so a write that does not know of them is caught.
        assert_eq!(
            touch(&told, by(A, 2, Proxy::Generic), |t| shadow.write(&mut ledger, t, 4, 1)),
            Some(Why::Unordered)
        );
    }

    #[test]
    fn a_completed_read_may_be_told_by_a_relaxed_arrival() {
        let (mut ledger, mut shadow) = (Ledger::new(), Shadow::new(64));
        let done = ledger.completion();
        let copy = Access { who: Who::Async(done), ..by(A, 1, Proxy::Async) };
        assert_eq!(touch(&Clock::new(0), copy, |t| shadow.read(&mut ledger, t, 0, 16)), None);
        let over = |ledger: &mut Ledger, shadow: &mut Shadow, clock: &Clock| {
            touch(clock, by(B, 1, Proxy::Generic), |t| shadow.write(ledger, t, 0, 16))
        };
        let relaxed = knows(&[(Part::Done, A, 3)]);
        assert_eq!(over(&mut ledger, &mut shadow, &relaxed), Some(Why::Unordered), "nobody waited yet");
        assert_eq!(touch(&Clock::new(0), copy, |t| shadow.read(&mut ledger, t, 0, 16)), Some(Why::Unordered));
        ledger.completed(done, A, 3);
        assert_eq!(over(&mut ledger, &mut shadow, &relaxed), None);
    }

    #[test]
    fn neighbours_in_a_word_do_not_race() {
        let (mut ledger, mut shadow) = (Ledger::new(), Shadow::new(64));
        let nothing = Clock::new(0);
        assert_eq!(touch(&nothing, by(A, 1, Proxy::Generic), |t| shadow.write(&mut ledger, t, 0, 2)), None);
        assert_eq!(touch(&nothing, by(B, 1, Proxy::Generic), |t| shadow.write(&mut ledger, t, 2, 2)), None);
        assert_eq!(shadow.unwritten(0, 4), None);
        assert_eq!(shadow.unwritten(2, 4), Some(4));
    }
}
