//! What the meaning of an instruction acts on.
//!
//! A meaning is written for one warp: it reads and writes registers of the active lanes, and asks the machine
//! for everything that other warps can see. What runs later (copies, products) is handed over as a value; when
//! it happens, and whether that was in time, is the machine's business.

use crate::inst::{Arg, Base, Op, Reg, Space};
use crate::product::Product;

/// Threads of a warp.
pub const WARP: u32 = 32;

/// Values that every thread can ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Special {
    /// Number of the thread in its block.
    Thread,
    /// Number of the thread in its warp.
    Lane,
    /// Number of the block in the grid.
    Block,
    /// Blocks in the grid.
    Blocks,
    /// Second axis of the block's number.
    BlockY,
    /// Third axis of the block's number.
    BlockZ,
    /// Number of the block in its cluster.
    ClusterRank,
    /// Blocks of a cluster.
    ClusterSize,
    /// Number of the cluster in the grid.
    Cluster,
    /// Clusters in the grid.
    Clusters,
    /// The multiprocessor.
    Multiprocessor,
    /// A clock of the multiprocessor, in cycles.
    Clock,
    /// The same clock, in 64 bits.
    WideClock,
    /// A clock of the machine, in nanoseconds.
    Time,
    /// Lanes below this one, as bits.
    LanesBelow,
}

impl Special {
    /// Every one, with its name in PTX.
    pub const NAMES: &'static [(&'static str, Special)] = &[
        ("%tid.x", Special::Thread),
        ("%laneid", Special::Lane),
        ("%ctaid.x", Special::Block),
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

/// An address in a space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which memory.
    pub space: Space,
    /// Byte address in it.
    pub address: u64,
}

/// Threads among which an access or fence orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// The block.
    Block,
    /// The cluster.
    Cluster,
    /// The device.
    Device,
    /// The device, the host and other devices.
    System,
}

/// How an access takes part in the order of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Not at all: two such accesses of different threads must be ordered by something else.
    Weak,
    /// As one step, ordering nothing else.
    Relaxed(Scope),
    /// What follows is after it.
    Acquire(Scope),
    /// What came before is before it.
    Release(Scope),
    /// Both.
    AcquireRelease(Scope),
}

/// What is done to an mbarrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mbarrier {
    /// Makes one that expects so many arrivals a phase.
    Init(u32),
    /// Ends its life.
    Invalidate,
    /// So many arrivals.
    Arrive(u32, Order),
    /// More bytes to be delivered, then one arrival.
    ArriveExpect(u32, Order),
    /// More bytes to be delivered.
    Expect(u32),
    /// Bytes were delivered.
    Complete(u32),
    /// An arrival for this and every later phase.
    ArriveDrop(u32),
    /// One arrival when the thread's cp.async so far are done. With `true`, that arrival is one of those expected.
    ArriveAfterCopies(bool),
}

/// The queues of things that end later, each with groups and waits of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Queue {
    /// `cp.async`, by thread.
    Copy,
    /// Bulk and tensor copies out of shared memory, by thread.
    Bulk,
    /// Tensor products, by warpgroup.
    Product,
}

/// What is done to a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// What was started since the last group becomes one.
    Commit,
    /// Waits until at most so many groups are pending.
    Wait(u32),
    /// Waits until at most so many groups have still to read their sources.
    WaitRead(u32),
    /// Waits for everything, grouped or not.
    WaitAll,
}

/// How memory seen one way is ordered with memory seen another way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fence {
    /// Between the thread's own accesses, in a scope.
    Thread(Order),
    /// Between the thread's accesses and those of the copy engine and the tensor cores; in this space, or everywhere.
    Proxy(Option<Space>),
    /// Makes initialised mbarriers visible to the cluster.
    MbarrierInit,
    /// Before the first product of a group: registers written so far may be read by it.
    Product,
}

/// Barriers that threads meet at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// Waits for `threads` at a barrier of the block (all, if none are given).
    Sync {
        /// Number of the barrier.
        id: u32,
        /// How many threads meet there.
        threads: Option<u32>,
    },
    /// Counts as having come, and goes on.
    Arrive {
        /// Number of the barrier.
        id: u32,
        /// How many threads meet there.
        threads: u32,
    },
    /// The lanes of the mask meet.
    Warp(u32),
    /// Counts as having come to the cluster's barrier. Whether memory is released.
    ClusterArrive(bool),
    /// Waits for the cluster. Whether memory is acquired.
    ClusterWait(bool),
}

/// Which direction a reduction in memory takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Add,
    /// Smaller.
    Min,
    /// Larger.
    Max,
    /// Bits of both.
    And,
    /// Bits of either.
    Or,
    /// Bits of one.
    Xor,
    /// Up to a limit, then 0.
    Inc,
    /// Down, from a limit.
    Dec,
}

/// How a transfer tells that it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// Bytes are counted on an mbarrier, in each destination.
    Mbarrier(Place),
    /// It belongs to the thread's open group.
    Group(Queue),
    /// It does not.
    Nothing,
}

/// A copy that happens later.
#[derive(Debug, Clone, PartialEq)]
pub enum Transfer {
    /// A run of bytes.
    Bytes {
        /// Where to.
        to: Place,
        /// Where from.
        from: Place,
        /// How many; the rest of `padded` is zero.
        bytes: u32,
        /// How many are written.
        padded: u32,
        /// Combined with what is there instead of replacing it: how, and as which type.
        reduce: Option<(Reduction, &'static str)>,
        /// Blocks of the cluster that receive it, as bits; none: the one that `to` is in.
        multicast: Option<u16>,
        /// How it ends.
        done: Done,
    },
    /// Words from registers.
    Words {
        /// Where to.
        to: Place,
        /// The words, in the order of memory.
        data: Vec<u8>,
        /// Combined with what is there instead of replacing it: how, and as which type.
        reduce: Option<(Reduction, &'static str)>,
        /// How it ends.
        done: Done,
    },
    /// A box of a tensor.
    Box {
        /// Address of the tensor map.
        map: u64,
        /// Coordinates of the box, innermost first.
        coordinates: Vec<i32>,
        /// The tile in shared memory.
        tile: Place,
        /// From the tensor to the tile, or back.
        inward: bool,
        /// Combined with what is there instead of replacing it (outward only).
        reduce: Option<Reduction>,
        /// Blocks of the cluster that receive it, as bits.
        multicast: Option<u16>,
        /// How it ends.
        done: Done,
    },
    /// A hint to bring something near; it changes nothing that can be seen.
    Prefetch,
}

/// A warp of a running kernel, as a meaning sees it.
///
/// An operation that has to wait marks the warp as waiting; none of these has a result that is read after the
/// wait, so the warp goes on after the instruction once what it waits for has come.
pub trait Machine {
    /// Lanes that execute the instruction, as bits.
    fn active(&self) -> u32;
    /// A register of a lane; 32-bit classes in the low half, truth values as 0 or 1.
    fn get(&mut self, lane: u32, reg: Reg) -> u64;
    /// Writes a register of a lane.
    fn set(&mut self, lane: u32, reg: Reg, bits: u64);
    /// A register of every active lane at once; what is given for the other lanes means nothing.
    fn get_all(&mut self, reg: Reg, bits: &mut [u64; WARP as usize]) {
        lanes(self.active()).for_each(|lane| bits[lane as usize] = self.get(lane, reg));
    }
    /// Writes a register of every active lane.
    fn set_all(&mut self, reg: Reg, bits: &[u64; WARP as usize]) {
        lanes(self.active()).for_each(|lane| self.set(lane, reg, bits[lane as usize]));
    }
    /// A special register.
    fn special(&mut self, lane: u32, which: Special) -> u64;
    /// Reads from a parameter.
    fn parameter(&mut self, number: u32, offset: i32, bytes: &mut [u8]);
    /// Where a parameter lies, for the tensor maps among them.
    fn parameter_address(&mut self, number: u32) -> u64;
    /// Where dynamic shared memory begins.
    fn shared_base(&mut self) -> u32;
    /// The address of the same byte in another block of the cluster.
    fn peer(&mut self, shared: u32, rank: u32) -> u32;
    /// Reads memory.
    fn load(&mut self, lane: u32, at: Place, order: Order, bytes: &mut [u8]);
    /// Writes memory.
    fn store(&mut self, lane: u32, at: Place, order: Order, bytes: &[u8]);
    /// Reads, changes and writes memory in one step, for elements of up to 8 bytes; the old value.
    fn update(&mut self, lane: u32, at: Place, order: Order, bytes: u32, change: &mut dyn FnMut(u64) -> u64) -> u64;
    /// Changes an mbarrier.
    fn mbarrier(&mut self, lane: u32, at: Place, what: Mbarrier);
    /// Whether the phase of this parity has completed. A machine may say no for a while.
    fn mbarrier_done(&mut self, lane: u32, at: Place, parity: u32, order: Order) -> bool;
    /// Starts a copy.
    fn transfer(&mut self, lane: u32, what: Transfer);
    /// Starts a product of the warpgroup.
    fn product(&mut self, what: Product);
    /// Commits to or waits for a queue.
    fn group(&mut self, lane: u32, queue: Queue, what: Group);
    /// Orders memory.
    fn fence(&mut self, lane: u32, what: Fence);
    /// Meets other threads.
    fn meet(&mut self, what: Meeting);
    /// Changes the registers of the warpgroup's threads to this many.
    fn registers(&mut self, count: u32, more: bool);
    /// Waits for the grid before this one, or lets the next one start.
    fn grid(&mut self, wait: bool);
    /// The program gives up.
    fn trap(&mut self, lane: u32);
    /// The warp steps back until others have done something: it looks at memory that they write.
    fn sleep(&mut self) {}
}

/// The lanes whose bits are set.
pub fn lanes(mask: u32) -> impl Iterator<Item = u32> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = (rest != 0).then(|| rest.trailing_zeros())?;
        rest &= rest - 1;
        Some(lane)
    })
}

/// What an operand is worth in a lane.
///
/// # Panics
/// If the operand has no value.
pub fn value(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> u64 {
    match &op.args[i] {
        Arg::Reg(reg) => m.get(lane, *reg),
        Arg::Imm(bits) => *bits,
        other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not a value", op.inst.name),
    }
}

/// The address an operand gives in a lane.
///
/// # Panics
/// If the operand is no address.
pub fn address(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> u64 {
    match &op.args[i] {
        Arg::Address(Base::Reg(reg), offset) => m.get(lane, *reg).wrapping_add_signed(i64::from(*offset)),
        other => panic!("bug in fulgurite: operand {i} of {} is {other:?}, not an address", op.inst.name),
    }
}

/// Operands of the widest row that [`each`] serves.
const MOST_INPUTS: usize = 4;

/// Computes the first operand from the others, in each active lane.
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
