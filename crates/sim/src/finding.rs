//! What is wrong with a kernel: one value for each fault, with both sides of it.

use std::fmt;
use std::panic::Location;

/// A line of Rust.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Line {
    /// Its file.
    pub file: &'static str,
    /// Its number.
    pub line: u32,
}

impl From<&'static Location<'static>> for Line {
    fn from(at: &'static Location<'static>) -> Self {
        Line { file: at.file(), line: at.line() }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file, self.line)
    }
}

/// Who took part in a fault, and where in the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    /// Number of the block in the grid.
    pub block: u32,
    /// The role of the warp; empty where all threads do the same.
    pub role: String,
    /// Number of the warp in its block.
    pub warp: u32,
    /// Lane in the warp, where it is one.
    pub lane: Option<u32>,
    /// Name of the instruction.
    pub inst: &'static str,
    /// The Rust line that built it.
    pub line: Line,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` at {} (block {}", self.inst, self.line, self.block)?;
        if !self.role.is_empty() {
            write!(f, ", role `{}`", self.role)?;
        }
        write!(f, ", warp {}", self.warp)?;
        match self.lane {
            Some(lane) => write!(f, ", lane {lane})"),
            None => write!(f, ")"),
        }
    }
}

/// Kinds of faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fault {
    /// Two accesses that nothing orders, one of them a write.
    Race,
    /// A write and an access of the copy engine or the tensor cores, ordered, but with no proxy fence between them.
    ProxyRace,
    /// Memory that nobody wrote is read.
    Uninitialised,
    /// A register that nobody wrote is read.
    UninitialisedRegister,
    /// An access outside what the kernel was given.
    OutOfBounds,
    /// An address that is not a multiple of what the instruction needs.
    Misaligned,
    /// A tile was brought in one layout, and is read in another.
    Layout,
    /// Accumulators or operands of a product are touched before it was waited for.
    FragmentInFlight,
    /// Registers of a product were touched with no `wgmma.fence` before it.
    MissingProductFence,
    /// An operation on bytes that are no mbarrier, or a second life of a live one.
    NotABarrier,
    /// An mbarrier is used and nothing orders that after its initialisation.
    BarrierNotReady,
    /// More arrivals than an mbarrier expects.
    TooManyArrivals,
    /// Bytes expected on an mbarrier and bytes delivered differ.
    ByteCount,
    /// More bytes than an mbarrier can count.
    ByteOverflow,
    /// A phase was over and gone before a waiter looked.
    PhaseMissed,
    /// An instruction that a whole warp or warpgroup executes was reached by a part of it.
    Collective,
    /// A named barrier is used with different counts, or a block ends while a barrier has some of its arrivals.
    BarrierCount,
    /// Registers that the pool of the block does not have.
    Registers,
    /// A block ends while something may still reach into its shared memory.
    Exit,
    /// An operand that the instruction does not take.
    Operand,
    /// Nobody can go on.
    Deadlock,
    /// The kernel gave up.
    Trap,
    /// The kernel took more steps than it was allowed.
    Endless,
}

/// A fault with everything that is known about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is.
    pub fault: Fault,
    /// The kernel.
    pub kernel: String,
    /// What happened, in words.
    pub what: String,
    /// Byte address, where there is one: in global memory, or in the block's shared memory.
    pub address: Option<u64>,
    /// Who noticed.
    pub here: Side,
    /// The other side.
    pub other: Option<Side>,
}

impl Finding {
    /// Whether a line is one of its sides.
    pub fn names(&self, line: Line) -> bool {
        self.here.line == line || self.other.as_ref().is_some_and(|side| side.line == line)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel `{}`: {:?}: {}", self.kernel, self.fault, self.what)?;
        if let Some(address) = self.address {
            write!(f, " at {address:#x}")?;
        }
        write!(f, ": {}", self.here)?;
        match &self.other {
            Some(side) => write!(f, ", against {side}"),
            None => Ok(()),
        }
    }
}
