//! The interface on which the meaning of an instruction acts.
//!
//! A meaning is written for one warp. It reads and writes registers of the active lanes, and calls the machine for
//! everything that other warps can see. It hands asynchronous work (copies, products) to the machine as a value; the
//! machine decides when that work happens and whether it was in time.

use crate::inst::{Arg, Base, Op, Reg, Space};
use crate::product::{Lanes, Number, Product, mma_sync};
use crate::tcgen05::{CtaGroup, TensorAction};

/// Threads of a warp.
pub const WARP: u32 = 32;

/// Special registers that every thread can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    /// Index of the thread in its CTA.
    Thread,
    /// Index of the thread in its warp.
    Lane,
    /// Index of the CTA in the grid.
    Cta,
    /// Number of CTAs in the grid.
    Blocks,
    /// Second axis of the CTA's index.
    BlockY,
    /// Third axis of the CTA's index.
    BlockZ,
    /// Index of the CTA in its cluster.
    ClusterRank,
    /// Number of CTAs in a cluster.
    ClusterSize,
    /// Index of the cluster in the grid.
    Cluster,
    /// Number of clusters in the grid.
    Clusters,
    /// Index of the SM that runs the thread.
    Multiprocessor,
    /// Low 32 bits of the SM's clock, in cycles.
    Clock,
    /// The SM's clock in 64 bits, in cycles.
    WideClock,
    /// Global clock of the machine, in nanoseconds.
    Time,
    /// Mask of the lanes below this one.
    LanesBelow,
}

impl Special {
    /// Every special register with its name in PTX.
    pub const NAMES: &'static [(&'static str, Special)] = &[
        ("%tid.x", Special::Thread),
        ("%laneid", Special::Lane),
        ("%ctaid.x", Special::Cta),
        ("%nctaid.x", Special::Blocks),
        ("%ctaid.y", Special::BlockY),
        ("%ctaid.z", Special::BlockZ),
        ("%cluster_ctarank", Special::ClusterRank),
        ("%cluster_nctarank", Special::ClusterSize),
        ("%clusterid.x", Special::Cluster),
        ("%nclusterid.x", Special::Clusters),
        ("%smid", Special::Multiprocessor),
        ("%clock", Special::Clock),
        ("%clock64", Special::WideClock),
        ("%globaltimer", Special::Time),
        ("%lanemask_lt", Special::LanesBelow),
    ];
}

/// An address in a memory space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryAddress {
    /// Memory space.
    pub space: Space,
    /// Byte address in the space.
    pub address: u64,
}

/// The threads among which an access or a fence orders memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Threads of the CTA.
    Cta,
    /// Threads of the cluster.
    Cluster,
    /// Threads of the device.
    Device,
    /// Threads of the device, the host and other devices.
    System,
}

/// Memory order of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryOrder {
    /// No order: something else must order two such accesses of different threads.
    Weak,
    /// Atomic, but orders no other access.
    Relaxed(Scope),
    /// Later accesses of the thread stay after it.
    Acquire(Scope),
    /// Earlier accesses of the thread stay before it.
    Release(Scope),
    /// Acquire and release together.
    AcquireRelease(Scope),
}

/// An operation on an mbarrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mbarrier {
    /// Initialises the mbarrier with this many expected arrivals per phase.
    Init(u32),
    /// Ends the mbarrier's lifetime.
    Invalidate,
    /// Counts this many arrivals.
    Arrive(u32, MemoryOrder),
    /// Adds bytes to the expected count, then arrives once.
    ArriveExpect(u32, MemoryOrder),
    /// Adds bytes to the expected count.
    Expect(u32),
    /// Reports delivered bytes.
    Complete(u32),
    /// Arrives this many times, in this and every later phase.
    ArriveDrop(u32),
    /// Arrives once when all earlier cp.async of the thread are done. With `true`, that arrival is one of the expected
    /// ones.
    ArriveAfterCopies(bool),
}

/// Queues of asynchronous work, each with its own groups and waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queue {
    /// `cp.async`, one queue per thread.
    Copy,
    /// Bulk and tensor copies out of shared memory, one queue per thread.
    Bulk,
    /// Tensor products, one queue per warpgroup.
    Product,
}

/// An operation on a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Closes a group: all work started since the last commit.
    Commit,
    /// Waits until at most this many groups are pending.
    Wait(u32),
    /// Waits until at most this many groups have yet to read their sources.
    WaitRead(u32),
    /// Waits for all work, committed or not.
    WaitAll,
}

/// A fence: it orders accesses to memory through different paths (proxies) or threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence {
    /// Orders the thread's own accesses, within a scope.
    Thread(MemoryOrder),
    /// Orders the thread's accesses with those of TMA and the tensor cores, in this space or (`None`) in
    /// all.
    Proxy(Option<Space>),
    /// Makes initialised mbarriers visible to the cluster.
    MbarrierInit,
    /// Precedes the first product of a group: the product may then read registers written so far.
    Product,
}

/// Barriers at which threads meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// Waits for `threads` threads (`None`: all of the CTA) at a named barrier.
    Sync {
        /// Number of the named barrier.
        id: u32,
        /// Number of threads that meet there.
        threads: Option<u32>,
    },
    /// Arrives at a named barrier without waiting.
    Arrive {
        /// Number of the named barrier.
        id: u32,
        /// Number of threads that meet there.
        threads: u32,
    },
    /// The lanes of the mask wait for each other.
    Warp(u32),
    /// Arrives at the cluster's barrier; `true` releases memory.
    ClusterArrive(bool),
    /// Waits at the cluster's barrier; `true` acquires memory.
    ClusterWait(bool),
}

/// The operation of a reduction in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Sum of both.
    Add,
    /// The smaller of both.
    Min,
    /// The larger of both.
    Max,
    /// Bitwise and.
    And,
    /// Bitwise or.
    Or,
    /// Bitwise exclusive or.
    Xor,
    /// Increments up to a limit, then wraps to 0.
    Inc,
    /// Decrements; wraps to the limit at 0.
    Dec,
}

/// How a transfer signals its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// Counts its bytes on an mbarrier, in each destination CTA.
    Mbarrier(MemoryAddress),
    /// Belongs to the open group of the thread's queue.
    Group(Queue),
    /// Gives no signal.
    Nothing,
}

/// An asynchronous copy.
#[derive(Debug, Clone, PartialEq)]
pub enum Transfer {
    /// A contiguous run of bytes.
    Bytes {
        /// Destination address.
        to: MemoryAddress,
        /// Source address.
        from: MemoryAddress,
        /// Bytes that are copied; the rest of `padded` is filled with zeros.
        bytes: u32,
        /// Bytes that are written.
        padded: u32,
        /// Operation and element type that combine the data with the destination's, instead of replacing them.
        reduce: Option<(Reduction, &'static str)>,
        /// Mask of the CTAs of the cluster that receive the copy; `None`: the CTA that `to` is in.
        multicast: Option<u16>,
        /// How the copy signals its completion.
        done: Done,
    },
    /// Words from registers, stored asynchronously.
    Words {
        /// Destination address.
        to: MemoryAddress,
        /// The words, in memory order.
        data: Vec<u8>,
        /// Operation and element type that combine the data with the destination's, instead of replacing them.
        reduce: Option<(Reduction, &'static str)>,
        /// How the copy signals its completion.
        done: Done,
    },
    /// A box of a tensor.
    Box {
        /// Address of the tensor map.
        map: u64,
        /// Coordinates of the box, innermost first.
        coordinates: Vec<i32>,
        /// The tile in shared memory.
        tile: MemoryAddress,
        /// `true`: tensor to shared memory; `false`: shared memory to tensor.
        inward: bool,
        /// Operation that combines the data with the tensor's instead of replacing them (outward only).
        reduce: Option<Reduction>,
        /// Mask of the CTAs of the cluster that receive the box.
        multicast: Option<u16>,
        /// CTAs that may hold the mbarrier: the one that receives the box, or either of its pair.
        group: CtaGroup,
        /// How the copy signals its completion.
        done: Done,
    },
    /// A prefetch hint, with no visible effect.
    Prefetch,
}

/// A warp of a running kernel, as the meaning of an instruction sees it.
///
/// An operation that has to wait marks the warp as waiting. No such operation returns a result that is read after the
/// wait, so the warp simply continues after the instruction when the wait is over.
pub trait Machine {
    /// Mask of the lanes that execute the instruction.
    fn active(&self) -> u32;
    /// Reads a register of a lane. 32-bit classes use the low half, predicates are 0 or 1.
    fn get(&mut self, lane: u32, reg: Reg) -> u64;
    /// Writes a register of a lane.
    fn set(&mut self, lane: u32, reg: Reg, bits: u64);
    /// Reads a register of every active lane. Entries of inactive lanes are undefined.
    fn get_all(&mut self, reg: Reg, bits: &mut [u64; WARP as usize]) {
        lanes(self.active()).for_each(|lane| bits[lane as usize] = self.get(lane, reg));
    }
    /// Writes a register of every active lane.
    fn set_all(&mut self, reg: Reg, bits: &[u64; WARP as usize]) {
        lanes(self.active()).for_each(|lane| self.set(lane, reg, bits[lane as usize]));
    }
    /// Reads a special register.
    fn special(&mut self, lane: u32, which: Special) -> u64;
    /// Reads bytes of a kernel parameter.
    fn parameter(&mut self, number: u32, offset: i32, bytes: &mut [u8]);
    /// Address of a kernel parameter; tensor maps are read from there.
    fn parameter_address(&mut self, number: u32) -> u64;
    /// Address at which dynamic shared memory begins.
    fn shared_base(&mut self) -> u32;
    /// Maps a shared-memory address to the corresponding address in another CTA of the cluster.
    fn peer(&mut self, shared: u32, rank: u32) -> u32;
    /// Reads memory for one lane.
    fn load(&mut self, lane: u32, at: MemoryAddress, order: MemoryOrder, bytes: &mut [u8]);
    /// Writes memory for one lane.
    fn store(&mut self, lane: u32, at: MemoryAddress, order: MemoryOrder, bytes: &[u8]);
    /// Reads, changes and writes an element of up to 8 bytes atomically, and returns the old value.
    fn update(
        &mut self,
        lane: u32,
        at: MemoryAddress,
        order: MemoryOrder,
        bytes: u32,
        change: &mut dyn FnMut(u64) -> u64,
    ) -> u64;
    /// Performs an operation on an mbarrier.
    fn mbarrier(&mut self, lane: u32, at: MemoryAddress, what: Mbarrier);
    /// Whether the phase with this parity is complete. A machine may answer no for a while after completion.
    fn mbarrier_done(&mut self, lane: u32, at: MemoryAddress, parity: u32, order: MemoryOrder) -> bool;
    /// Starts an asynchronous copy.
    fn transfer(&mut self, lane: u32, what: Transfer);
    /// Starts a product of the warpgroup.
    fn product(&mut self, what: Product);
    /// The result of a warp's product, indexed as in [`mma_sync`], which defines it. A machine may have a faster way to the
    /// same bits.
    fn warp_product(&mut self, numbers: [Number; 3], [a, b, c]: [&[Lanes]; 3]) -> Vec<Lanes> {
        mma_sync(numbers, a, b, c)
    }
    /// Operates on tensor memory, or on the queue of its products.
    fn tensor(&mut self, lane: u32, what: TensorAction);
    /// Reads consecutive columns of tensor memory, from the address that each lane gives, one register to a column.
    fn tensor_load(&mut self, from: &[u32; WARP as usize], to: &[Reg]);
    /// Writes consecutive columns of tensor memory, from the address that each lane gives, one register to a column.
    fn tensor_store(&mut self, to: &[u32; WARP as usize], from: &[Reg]);
    /// Commits or waits for groups of a queue.
    fn group(&mut self, lane: u32, queue: Queue, what: Group);
    /// Executes a fence.
    fn fence(&mut self, lane: u32, what: Fence);
    /// Meets other threads at a barrier.
    fn meet(&mut self, what: Meeting);
    /// Sets the register count per thread of the warpgroup (`setmaxnreg`); `more` tells whether it grows.
    fn registers(&mut self, count: u32, more: bool);
    /// Waits for the previous grid (`true`), or lets the next grid start (programmatic dependent launch).
    fn grid(&mut self, wait: bool);
    /// Stops the program with an error.
    fn trap(&mut self, lane: u32);
    /// Cancels a cluster that has not started, writes an [`answer`] to shared memory, and counts its bytes on an mbarrier.
    fn cancel(&mut self, _lane: u32, _to: MemoryAddress, _bar: MemoryAddress) {}
    /// A thread reads an answer without a cluster.
    fn refused(&mut self, _lane: u32) {}
    /// Yields until other warps have run: the warp polls memory that they write.
    fn sleep(&mut self) {}
}

/// The answer to a request to cancel a cluster, by the first coordinate of its first CTA. The hardware's is opaque.
pub fn answer(first: Option<u32>) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&first.unwrap_or(u32::MAX).to_le_bytes());
    bytes[15] = u8::from(first.is_some());
    bytes
}

/// What an [`answer`] says.
pub fn answered(bytes: &[u8; 16]) -> Option<u32> {
    (bytes[15] == 1).then(|| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// The lanes whose bits are set in a mask.
pub fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = (rest != 0).then(|| rest.trailing_zeros())?;
        rest &= rest - 1;
        Some(lane)
    })
}

/// The value of an operand in a lane.
///
/// # Panics
/// If the operand is neither a register nor an immediate.
pub fn value(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> u64 {
    match &op.args[i] {
        Arg::Reg(reg) => m.get(lane, *reg),
        Arg::Imm(bits) => *bits,
        other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a value", op.inst.name),
    }
}

/// The address that an operand gives in a lane.
///
/// # Panics
/// If the operand is not an address.
pub fn address(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> u64 {
    match &op.args[i] {
        Arg::Address(Base::Reg(reg), offset) => m.get(lane, *reg).wrapping_add_signed(i64::from(*offset)),
        other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not an address", op.inst.name),
    }
}

/// Largest number of inputs of a row that [`each`] evaluates.
const MOST_INPUTS: usize = 4;

/// Computes the first operand from the others in each active lane.
pub(crate) fn each(m: &mut dyn Machine, op: &Op, f: impl Fn(&[u64]) -> u64) {
    let mut inputs = [const { [0; WARP as usize] }; MOST_INPUTS];
    let mut count = 0;
    for arg in op.args.iter().skip(1) {
        match arg {
            Arg::Reg(reg) => m.get_all(*reg, &mut inputs[count]),
            Arg::Imm(bits) => inputs[count].fill(*bits),
            _ => continue,
        }
        count += 1;
    }
    let mut results = [0; WARP as usize];
    for lane in lanes(m.active()) {
        let own: [u64; MOST_INPUTS] = std::array::from_fn(|i| inputs[i][lane as usize]);
        results[lane as usize] = f(&own[..count]);
    }
    m.set_all(op.reg(0), &results);
}
