//! Asynchronous copies. Each reads its source at one moment, writes its destination at another, and signals its
//! completion at a third.

use crate::clock::Part;
use crate::counters::Traffic;
use crate::finding::Fault;
use crate::mbarrier::{BarAt, User};
use crate::options::Interleaving;
use crate::reduce::combine;
use crate::shadow::{Access, Proxy, Toucher, Who};
use crate::world::{Cluster, Event, SHARED_BASE, Snapshot, Status, Wait, World};
use fulgurite_ptx::Swizzle;
use fulgurite_ptx::device::{TensorSpan, Value};
use fulgurite_ptx::kernel::{BoxShape, ParamKind};
use fulgurite_ptx::machine::{Queue, Reduction};

/// One end of a copy.
#[derive(Debug, Clone)]
pub(crate) enum End {
    /// Global memory, as runs of bytes: offset in the copy, length and address of each.
    Global(Vec<(u32, u32, u64)>),
    /// Registers, which were read when the copy was started.
    Words,
    /// An offset in shared memory that several CTAs of the cluster share.
    Shared { ranks: Vec<usize>, offset: u32, swizzle: Swizzle },
}

/// How a copy signals its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tells {
    /// Counts its bytes on the mbarrier at this offset in each destination.
    Bar {
        rank: usize,
        offset: u32,
        each: bool,
    },
    /// Completes its group in a queue of the lane.
    Group(Queue),
    Nobody,
}

/// An asynchronous copy.
pub(crate) struct Copy {
    pub from: End,
    pub to: End,
    pub bytes: u32,
    pub reduce: Option<(Reduction, &'static str)>,
    pub tells: Tells,
    /// Whether it moves a box of a tensor.
    pub boxed: bool,
    /// Proxy through which it accesses memory.
    pub proxy: Proxy,
    pub cluster: u32,
    /// The lane that issued it.
    pub lane: u32,
    pub issued: Access,
    pub start: Snapshot,
    /// Completion of reading; `write_done`: of writing, for each destination.
    pub read_done: u32,
    pub write_done: Vec<u32>,
    /// Phase of each destination's mbarrier when the copy was issued.
    pub phases: Vec<Option<u32>>,
    pub data: Vec<u8>,
    /// One flag per byte: whether the source was initialised. Empty means that all bytes were.
    pub marks: Vec<bool>,
    pub read: bool,
    pub done: bool,
}

fn queue_key(queue: Queue) -> u8 {
    match queue {
        Queue::Copy => 0,
        Queue::Bulk => 1,
        Queue::Product => 2,
    }
}

/// The key of a lane's queue.
pub(crate) fn key(lane: u32, queue: Queue) -> (u32, u8) {
    (lane, queue_key(queue))
}

/// The runs of global memory of a box, row by row; parts outside the tensor belong to none. Outward, TMA
/// writes whole units of 16 bytes, even past the end of a row (observed on an H200).
pub(crate) fn box_runs(shape: &BoxShape, tensor: &TensorSpan, at: &[i32], inward: bool) -> Vec<(u32, u32, u64)> {
    let element = u64::from(shape.number.bytes());
    let row = shape.extent[0] * shape.number.bytes();
    let rows: u32 = shape.extent[1..].iter().product();
    let (first, size) = (i64::from(at[0]), tensor.extent[0] as i64);
    let low = (-first).clamp(0, i64::from(shape.extent[0]));
    let unit = if inward { 1 } else { 16 / element as i64 };
    let size = (size + unit - 1) / unit * unit;
    let high = (size - first).clamp(low, i64::from(shape.extent[0]));
    let mut runs = Vec::new();
    if low == high {
        return runs;
    }
    'rows: for r in 0..rows {
        let (mut rest, mut address) = (r, tensor.span.address());
        for ((&size, &start), (&whole, &stride)) in
            shape.extent.iter().zip(at).skip(1).zip(tensor.extent.iter().skip(1).zip(&tensor.strides))
        {
            let n = i64::from(start) + i64::from(rest % size);
            rest /= size;
            if n < 0 || n >= whole as i64 {
                continue 'rows;
            }
            // The steps of a ragged tensor's axes cancel modulo 2^64.
            address = address.wrapping_add((n as u64).wrapping_mul(stride));
        }
        address = address.wrapping_add_signed((first + low) * element as i64);
        runs.push((r * row + (low as u64 * element) as u32, ((high - low) as u64 * element) as u32, address));
    }
    runs
}

impl World<'_> {
    /// The tensor and box of a tensor map's address.
    pub fn tensor_map(&self, map: u64) -> Option<(&BoxShape, &TensorSpan)> {
        let number = map.checked_sub(crate::world::PARAM_BASE)? / crate::world::PARAM_STRIDE;
        let aligned = map.is_multiple_of(crate::world::PARAM_STRIDE);
        match (self.program.kernel.params.get(number as usize)?, self.args.get(number as usize)?) {
            (param, Value::Tensor(tensor)) if aligned => match &param.kind {
                ParamKind::Tensor(shape) => Some((shape, tensor)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Starts a copy and returns its id.
    pub fn start_copy(&mut self, copy: Copy, now: u64) -> u32 {
        let id = self.next_copy;
        self.next_copy += 1;
        match self.options.order {
            Interleaving::Random => self.later(Event::Read(id)),
            Interleaving::Timed => self.at(now, Event::Read(id)),
        }
        self.copies.insert(id, copy);
        id
    }

    fn copy_fault(&mut self, copy: &Copy, fault: Fault, what: String, address: u64) {
        let here = self.side(copy.issued.block, copy.issued.warp, Some(copy.lane), copy.issued.pc);
        self.report(fault, what, Some(address), here, None);
    }

    /// The read of the copy's source.
    pub fn copy_reads(&mut self, cluster: &mut Cluster, id: u32) {
        let Some(mut copy) = self.copies.remove(&id) else { return };
        let access = Access { who: Who::Async(copy.read_done), proxy: copy.proxy, ..copy.issued };
        let start = copy.start.clone();
        let clocks = [&*start];
        copy.data.resize(copy.bytes as usize, 0);
        match &copy.from {
            End::Words => {}
            End::Global(runs) => {
                let mut t = Toucher::new(&clocks, access, Part::AsyncGlobal);
                let runs = runs.clone();
                // A copy that only fills with zeros does not access its source.
                for (at, bytes, address) in runs.into_iter().filter(|(_, bytes, _)| *bytes > 0) {
                    let checks = self.options.checks;
                    let Some((allocation, offset)) = self.memory.find(address, bytes.into()) else {
                        self.copy_fault(&copy, Fault::OutOfBounds, format!("a copy reads {bytes} bytes"), address);
                        continue;
                    };
                    let from = offset as usize..offset as usize + bytes as usize;
                    copy.data[at as usize..(at + bytes) as usize].copy_from_slice(&allocation.bytes[from]);
                    if !checks {
                        continue;
                    }
                    if allocation.shadow.unwritten(offset, bytes.into()).is_some() {
                        copy.marks.resize(copy.bytes as usize, true);
                        for i in 0..bytes {
                            let unwritten = allocation.shadow.unwritten(offset + u64::from(i), 1).is_some();
                            copy.marks[(at + i) as usize] = !unwritten;
                        }
                    }
                    if let Some(conflict) = allocation.shadow.read(&mut self.ledger, &mut t, offset, bytes.into()) {
                        let at = allocation.address + conflict.offset;
                        self.conflict(conflict, at, &access, Some(copy.lane), false);
                    }
                }
            }
            End::Shared { ranks, offset, swizzle } => {
                let (rank, offset, swizzle) = (ranks[0], *offset, *swizzle);
                let block = &mut cluster.blocks[rank];
                gather(&block.shared, offset, swizzle, &mut copy.data);
                if self.options.checks {
                    let mut t = Toucher::new(&clocks, access, Part::AsyncShared);
                    let mut found = None;
                    let mut unwritten = None;
                    touched(offset, copy.bytes, swizzle, |at, bytes| {
                        unwritten = unwritten.or(block.shadow.unwritten(at, bytes));
                        let conflict = block.shadow.read(&mut self.ledger, &mut t, at, bytes);
                        found = found.or(conflict);
                    });
                    if let Some(conflict) = found {
                        let at = conflict.offset + u64::from(SHARED_BASE);
                        self.conflict(conflict, at, &access, Some(copy.lane), false);
                    }
                    if let Some(at) = unwritten {
                        let what = "a copy reads shared memory that nobody wrote".to_owned();
                        self.copy_fault(&copy, Fault::Uninitialised, what, at + u64::from(SHARED_BASE));
                    }
                }
            }
        }
        copy.read = true;
        let time = match self.options.order {
            Interleaving::Random => None,
            Interleaving::Timed => Some(self.copy_time(&copy)),
        };
        self.copies.insert(id, copy);
        match time {
            None => self.later(Event::Write(id)),
            Some(time) => self.at(time, Event::Write(id)),
        }
        self.wake_groups(cluster);
    }

    /// The write of the copy's destination.
    pub fn copy_writes(&mut self, cluster: &mut Cluster, id: u32) {
        let Some(mut copy) = self.copies.remove(&id) else { return };
        let start = copy.start.clone();
        let clocks = [&*start];
        let data = std::mem::take(&mut copy.data);
        let marks = std::mem::take(&mut copy.marks);
        match copy.to.clone() {
            End::Words => {}
            End::Global(runs) => {
                let strong = copy.reduce.is_some();
                let who = Who::Async(copy.write_done[0]);
                let access = Access { who, proxy: copy.proxy, strong, ..copy.issued };
                let mut t = Toucher::new(&clocks, access, Part::AsyncGlobal);
                for (at, bytes, address) in runs {
                    let Some((allocation, offset)) = self.memory.find(address, bytes.into()) else {
                        self.copy_fault(&copy, Fault::OutOfBounds, format!("a copy writes {bytes} bytes"), address);
                        continue;
                    };
                    let new = &data[at as usize..(at + bytes) as usize];
                    let old = &mut allocation.bytes[offset as usize..(offset + u64::from(bytes)) as usize];
                    match copy.reduce {
                        None => old.copy_from_slice(new),
                        Some((way, number)) => combine(way, number, old, new),
                    }
                    if self.options.checks {
                        let combined = copy.reduce.and_then(|_| allocation.shadow.unwritten(offset, bytes.into()));
                        let unwritten = combined.map(|at| allocation.address + at);
                        let conflict = allocation.shadow.write(&mut self.ledger, &mut t, offset, bytes.into());
                        if let Some(conflict) = conflict {
                            let at = allocation.address + conflict.offset;
                            self.conflict(conflict, at, &access, Some(copy.lane), true);
                        }
                        if let Some(at) = unwritten {
                            let what = "a copy combines with global memory that nobody wrote".to_owned();
                            self.copy_fault(&copy, Fault::Uninitialised, what, at);
                        }
                    } else {
                        allocation.shadow.set_written(offset, bytes.into());
                    }
                }
            }
            End::Shared { ranks, offset, swizzle } => {
                for (i, &rank) in ranks.iter().enumerate() {
                    let swizzle = copy.boxed.then_some(swizzle);
                    let who = Who::Async(copy.write_done[i]);
                    let strong = copy.reduce.is_some();
                    let access = Access { who, proxy: copy.proxy, swizzle, strong, ..copy.issued };
                    let swizzle = swizzle.unwrap_or(Swizzle::None);
                    let mut t = Toucher::new(&clocks, access, Part::AsyncShared);
                    let block = &mut cluster.blocks[rank];
                    if block.running == 0 {
                        let what = "a copy writes to the shared memory of a block that has ended".to_owned();
                        self.copy_fault(&copy, Fault::Exit, what, u64::from(SHARED_BASE + offset));
                        continue;
                    }
                    match copy.reduce {
                        None => scatter(&mut block.shared, offset, swizzle, &data),
                        Some((way, number)) => {
                            let old = &mut block.shared[offset as usize..offset as usize + data.len()];
                            combine(way, number, old, &data);
                        }
                    }
                    if !self.options.checks {
                        continue;
                    }
                    let (mut found, mut unwritten) = (None, None);
                    touched(offset, copy.bytes, swizzle, |at, bytes| {
                        unwritten = unwritten.or(copy.reduce.and_then(|_| block.shadow.unwritten(at, bytes)));
                        let conflict = block.shadow.write(&mut self.ledger, &mut t, at, bytes);
                        found = found.or(conflict);
                    });
                    if !marks.is_empty() {
                        let mut spread = [false; 16];
                        units(offset, swizzle, copy.bytes, |from, to, n| {
                            spread[..n].copy_from_slice(&marks[from..from + n]);
                            block.shadow.copy_written(to as u64, &spread[..n]);
                        });
                    }
                    if let Some(conflict) = found {
                        let at = conflict.offset + u64::from(SHARED_BASE);
                        self.conflict(conflict, at, &access, Some(copy.lane), true);
                    }
                    if let Some(at) = unwritten {
                        let what = "a copy combines with shared memory that nobody wrote".to_owned();
                        self.copy_fault(&copy, Fault::Uninitialised, what, at + u64::from(SHARED_BASE));
                    }
                }
            }
        }
        self.copies.insert(id, copy);
        match self.options.order {
            Interleaving::Random => self.later(Event::Complete(id)),
            Interleaving::Timed => {
                let time = self.now;
                self.at(time, Event::Complete(id));
            }
        }
    }

    /// The completion of the copy.
    pub fn copy_completes(&mut self, cluster: &mut Cluster, id: u32) {
        let Some(mut copy) = self.copies.remove(&id) else { return };
        copy.done = true;
        self.progress += 1;
        if let Tells::Bar { rank, offset, each } = copy.tells {
            let start = copy.start.clone();
            let ranks = match &copy.to {
                End::Shared { ranks, .. } if each => ranks.clone(),
                _ => vec![rank],
            };
            for (i, rank) in ranks.into_iter().enumerate() {
                let access = Access { who: Who::Async(copy.write_done[i]), ..copy.issued };
                let now = self.now;
                let user = User { clock: &start, access, lane: Some(copy.lane), far: true, releases: false, now };
                let at = BarAt { rank, offset };
                let phase = self.bar_phase(cluster, at);
                if let (Some(then), Some(now)) = (copy.phases.get(i).copied().flatten(), phase)
                    && then != now
                {
                    let name = self.shared_name(offset);
                    let expected = cluster.blocks[rank].bars.get(&offset).and_then(|bar| bar.expected);
                    let here = self.side(copy.issued.block, copy.issued.warp, Some(copy.lane), copy.issued.pc);
                    let other = expected.map(|access| self.side_of(&access));
                    let what = format!(
                        "{} bytes for phase {then} of mbarrier {name} come in phase {now}: fewer were expected than copied",
                        copy.bytes
                    );
                    self.report(Fault::ByteCount, what, Some(u64::from(SHARED_BASE + offset)), here, other);
                }
                if let Some((comp, value)) = self.bar_complete(cluster, at, copy.bytes, &user) {
                    self.ledger.completed(copy.write_done[i], comp, value);
                    // An agent that knows of the write also knows of the read.
                    if i == 0 {
                        self.ledger.completed(copy.read_done, comp, value);
                    }
                }
            }
        }
        let kept = matches!(copy.tells, Tells::Group(_));
        if kept {
            self.copies.insert(id, copy);
        }
        cluster.pending = cluster.pending.saturating_sub(1);
        self.wake_groups(cluster);
        self.arrive_after_copies(cluster);
    }

    /// Performs arrivals that wait for copies of their thread.
    pub fn arrive_after_copies(&mut self, cluster: &mut Cluster) {
        let mut i = 0;
        while i < self.after_copies.len() {
            let after = &self.after_copies[i];
            let over = after.cluster == cluster.id
                && after.copies.iter().all(|id| self.copies.get(id).is_none_or(|copy| copy.done));
            if !over {
                i += 1;
                continue;
            }
            let after = self.after_copies.swap_remove(i);
            let user = User {
                clock: &after.start,
                access: after.access,
                lane: Some(after.lane),
                far: false,
                releases: false,
                now: self.now,
            };
            if let Some(bar) = cluster.blocks[after.at.rank].bars.get(&after.at.offset) {
                let (comp, value) = (bar.comp, bar.phase + 1);
                for id in &after.copies {
                    if let Some(copy) = self.copies.get(id) {
                        self.ledger.completed(copy.read_done, comp, value);
                        self.ledger.completed(copy.write_done[0], comp, value);
                    }
                }
            }
            self.bar_arrive(cluster, after.at, 1, 0, &user);
        }
    }

    /// Wakes warps whose groups are complete.
    pub fn wake_groups(&mut self, cluster: &mut Cluster) {
        for slot in 0..cluster.warps.len() {
            if !matches!(cluster.warps[slot].status, Status::Blocked(Wait::Groups(_))) {
                continue;
            }
            let mut warp = std::mem::take(&mut cluster.warps[slot]);
            if let Status::Blocked(Wait::Groups(list)) = &warp.status {
                let list = list.clone();
                if self.groups_done(&warp, &list) {
                    warp.status = Status::Ready;
                    warp.now = warp.now.max(self.now);
                    self.retire_groups(&mut warp, &list);
                }
            }
            cluster.warps[slot] = warp;
        }
    }

    /// Whether a warp's wait for groups is over.
    pub fn groups_done(&self, warp: &crate::world::Warp, list: &[(u32, Queue, u32, bool)]) -> bool {
        list.iter().all(|&(lane, queue, left, reading)| {
            let Some(lanes) = warp.queues.get(&key(lane, queue)) else { return true };
            let waited = lanes.groups.len().saturating_sub(left as usize);
            lanes
                .groups
                .iter()
                .take(waited)
                .flatten()
                .all(|id| self.copies.get(id).is_none_or(|copy| if reading { copy.read } else { copy.done }))
        })
    }

    /// Records that the warp knows its groups to be complete.
    pub fn retire_groups(&mut self, warp: &mut crate::world::Warp, list: &[(u32, Queue, u32, bool)]) {
        warp.tick();
        for &(lane, queue, left, reading) in list {
            let Some(lanes) = warp.queues.get_mut(&key(lane, queue)) else { continue };
            let waited = lanes.groups.len().saturating_sub(left as usize);
            for id in lanes.groups.iter().take(waited).flatten() {
                let Some(copy) = self.copies.get(id) else { continue };
                self.ledger.completed(copy.read_done, warp.comp, warp.time);
                if !reading {
                    for &done in &copy.write_done {
                        self.ledger.completed(done, warp.comp, warp.time);
                    }
                }
            }
            if !reading {
                for id in lanes.groups.drain(..waited).flatten() {
                    self.copies.remove(&id);
                }
            }
        }
    }

    /// Counts the bytes that a copy moves.
    pub fn count_copy(&mut self, role: usize, copy: &Copy) {
        let mut traffic = Traffic::default();
        for end in [&copy.from, &copy.to] {
            if let End::Global(runs) = end {
                for &(_, bytes, address) in runs {
                    traffic.global_bytes += u64::from(bytes);
                    traffic.sectors += (address + u64::from(bytes)).div_ceil(32) - address / 32;
                }
            }
            if let End::Shared { ranks, .. } = end {
                traffic.shared_bytes += u64::from(copy.bytes) * ranks.len() as u64;
            }
        }
        self.counts[role].copied(&traffic);
    }
}

/// An arrival that waits for copies.
pub(crate) struct AfterCopies {
    pub cluster: u32,
    pub at: BarAt,
    pub copies: Vec<u32>,
    pub access: Access,
    pub lane: u32,
    pub start: Snapshot,
}

/// Calls `f` with pieces of at most 16 bytes: their position in the copy, and in shared memory.
fn units(offset: u32, swizzle: Swizzle, bytes: u32, mut f: impl FnMut(usize, usize, usize)) {
    if swizzle == Swizzle::None {
        for from in (0..bytes).step_by(16) {
            f(from as usize, (offset + from) as usize, (bytes - from).min(16) as usize);
        }
        return;
    }
    for from in (0..bytes).step_by(16) {
        let to = swizzle.apply(SHARED_BASE + offset + from) - SHARED_BASE;
        f(from as usize, to as usize, (bytes - from).min(16) as usize);
    }
}

fn gather(shared: &[u8], offset: u32, swizzle: Swizzle, data: &mut [u8]) {
    units(offset, swizzle, data.len() as u32, |from, to, n| {
        data[from..from + n].copy_from_slice(&shared[to..to + n]);
    });
}
fn scatter(shared: &mut [u8], offset: u32, swizzle: Swizzle, data: &[u8]) {
    units(offset, swizzle, data.len() as u32, |from, to, n| {
        shared[to..to + n].copy_from_slice(&data[from..from + n]);
    });
}

/// Calls `f` with the runs of shared memory that a tile covers; there is a single run if its lines are whole.
fn touched(offset: u32, bytes: u32, swizzle: Swizzle, mut f: impl FnMut(u64, u64)) {
    if offset.is_multiple_of(swizzle.line()) && bytes.is_multiple_of(swizzle.line()) || swizzle == Swizzle::None {
        f(offset.into(), bytes.into());
    } else {
        units(offset, swizzle, bytes, |_, to, n| f(to as u64, n as u64));
    }
}
