//! Faults of a kernel: one value per fault, with both sides of it.

use std::fmt;
use std::panic::Location;

/// A line of Rust source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Line {
    /// Name of the file.
    pub file: &'static str,
    /// Line number.
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

/// A participant of a fault, and its position in the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Party {
    /// Index of the CTA in the grid.
    pub block: u32,
    /// Role of the warp; empty if all threads run the same code.
    pub role: String,
    /// Index of the warp in its CTA.
    pub warp: u32,
    /// Lane in the warp, if a single lane is involved.
    pub lane: Option<u32>,
    /// Name of the instruction.
    pub inst: &'static str,
    /// The Rust line that built the instruction.
    pub line: Line,
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` at {} (CTA {}", self.inst, self.line, self.block)?;
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
    /// A write and an access of TMA or the tensor cores, ordered, but with no proxy fence between them.
    ProxyRace,
    /// Memory is read that was never written.
    Uninitialised,
    /// A register is read that was never written.
    UninitialisedRegister,
    /// An access outside the memory that the kernel was given.
    OutOfBounds,
    /// An address without the alignment that the instruction needs.
    Misaligned,
    /// A tile was written in one layout and is read in another.
    Layout,
    /// Accumulators or operands of a product are accessed before the product was waited for.
    FragmentInFlight,
    /// Registers of a product were accessed without a `wgmma.fence` before the product.
    MissingProductFence,
    /// An operation on bytes that are not an mbarrier, or a second initialisation of a live one.
    NotABarrier,
    /// An mbarrier is used without being ordered after its initialisation.
    BarrierNotReady,
    /// An mbarrier receives more arrivals than it expects.
    TooManyArrivals,
    /// The bytes expected on an mbarrier differ from the bytes delivered.
    ByteCount,
    /// More bytes than an mbarrier can count.
    ByteOverflow,
    /// A phase ended, and the next one too, before a waiter looked.
    PhaseMissed,
    /// Only part of a warp or warpgroup reached an instruction that all of it must execute.
    Collective,
    /// A named barrier is used with different counts, or a CTA ends while a barrier has only some of its arrivals.
    BarrierCount,
    /// More registers are requested than the CTA's pool has.
    Registers,
    /// Tensor memory is allocated, accessed or freed against its rules.
    TensorMemory,
    /// A CTA ends while something may still access its shared memory.
    Exit,
    /// An operand that the instruction does not accept.
    Operand,
    /// No warp can continue.
    Deadlock,
    /// The kernel executed a trap.
    Trap,
    /// The kernel exceeded its budget of steps.
    Endless,
}

/// A fault with all known details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Kind of fault.
    pub fault: Fault,
    /// Name of the kernel.
    pub kernel: String,
    /// Description of the fault, as text.
    pub what: String,
    /// Byte address, if there is one: in global memory, or in the CTA's shared memory.
    pub address: Option<u64>,
    /// The access at which the fault was noticed.
    pub here: Party,
    /// The other access of the fault.
    pub other: Option<Party>,
}

impl Finding {
    /// Whether a line is one of the fault's sides.
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
