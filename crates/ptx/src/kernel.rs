//! A kernel as a value: structured statements over rows of the instruction table, plus everything that a launch needs.

pub use crate::arch::Target;

use crate::inst::{Class, Op, Reg};
use crate::product::{Number, Swizzle};
use std::panic::Location;

/// Shape of the box that TMA moves in one transfer of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BoxShape {
    /// Element type of the tensor.
    pub number: Number,
    /// Elements along each axis, innermost first.
    pub extent: Vec<u32>,
    /// Swizzle of the box in shared memory.
    pub swizzle: Swizzle,
}

/// Type of a kernel parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// A 32-bit unsigned integer.
    U32,
    /// A 32-bit float.
    F32,
    /// A 64-bit unsigned integer.
    U64,
    /// An address in global memory, aligned to this many bytes.
    Pointer(u32),
    /// A tensor that TMA reads or writes in boxes of this shape.
    Tensor(BoxShape),
}

/// A kernel parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Param {
    /// Name in the PTX text and in error messages.
    pub name: String,
    /// Type, with alignment or box shape.
    pub kind: ParamKind,
}

/// A statement of a kernel body.
#[derive(Debug, Clone)]
pub enum Stmt {
    /// One instruction.
    Op(Op),
    /// A branch. Lanes with `cond` true take `then`, the others take `otherwise`; afterwards all lanes reconverge.
    If {
        /// Predicate register.
        cond: Reg,
        /// Statements for lanes with `cond` true.
        then: Vec<Stmt>,
        /// Statements for lanes with `cond` false.
        otherwise: Vec<Stmt>,
        /// Whether the branch is rarely taken; the printer then moves `then` out of line.
        cold: bool,
        /// The Rust source line that built the statement.
        at: &'static Location<'static>,
    },
    /// A loop that runs until a lane takes a [`Stmt::Break`] of this loop.
    Loop {
        /// Statements of one iteration.
        body: Vec<Stmt>,
        /// The Rust source line that built the statement.
        at: &'static Location<'static>,
    },
    /// An exit from the innermost loop. Lanes with `cond == when` leave it and wait at its end for the others.
    Break {
        /// Predicate register.
        cond: Reg,
        /// Value of the predicate that leaves the loop.
        when: bool,
        /// The Rust source line that built the statement.
        at: &'static Location<'static>,
    },
}

/// A region of shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedUse {
    /// Purpose, for reports and error messages.
    pub name: String,
    /// Offset of the first byte from the start of the CTA's shared memory.
    pub offset: u32,
    /// Size in bytes.
    pub bytes: u32,
}

/// A role: consecutive warps that do one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleUse {
    /// Name of the job, for reports and error messages.
    pub name: String,
    /// Index of the role's first warp in the CTA.
    pub first_warp: u32,
    /// Number of warps.
    pub warps: u32,
    /// Registers per thread, if the kernel sets them with `setmaxnreg`.
    pub registers: Option<u32>,
}

/// A signal that publishes a part of a result while the role computes the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    /// Name of the role that signals.
    pub role: String,
    /// Rust line of the signal.
    pub at: &'static Location<'static>,
}

/// A complete kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Name of the entry point.
    pub name: String,
    /// Architecture and PTX version that the kernel is printed for.
    pub target: Target,
    /// Parameters, in order.
    pub params: Vec<Param>,
    /// Threads per CTA.
    pub threads: u32,
    /// CTAs per cluster.
    pub cluster: u32,
    /// The registers per thread that the assembler may use, if it is not left to prefer more CTAs per SM.
    pub most_registers: Option<u32>,
    /// Regions of shared memory.
    pub shared: Vec<SharedUse>,
    /// Shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
    /// Roles of the warps; empty if all threads run the same code.
    pub roles: Vec<RoleUse>,
    /// Named barriers in use, including barrier 0 of the whole CTA.
    pub barriers: u32,
    /// Number of virtual registers of each class.
    pub registers: [u32; Class::ALL.len()],
    /// Source locations of `wgmma` waits that the assembler may hoist above exponentials.
    pub loose_waits: Vec<&'static Location<'static>>,
    /// Signals that publish a part of a result. The assembler must not move later exponentials above them.
    pub publishes: Vec<Publish>,
    /// Statements in program order.
    pub body: Vec<Stmt>,
}

impl Kernel {
    /// Registers per thread at kernel entry, before roles change them: the assembler's choice for a CTA that has the SM
    /// to itself.
    pub fn entry_registers(target: Target, threads: u32) -> u32 {
        (target.arch.registers / threads.max(1) / 8 * 8).min(255)
    }

    /// Calls `f` with every instruction, in order.
    pub fn each_op<'a>(&'a self, f: &mut dyn FnMut(&'a Op)) {
        fn walk<'a>(block: &'a [Stmt], f: &mut dyn FnMut(&'a Op)) {
            for stmt in block {
                match stmt {
                    Stmt::Op(op) => f(op),
                    Stmt::If { then, otherwise, .. } => {
                        walk(then, f);
                        walk(otherwise, f);
                    }
                    Stmt::Loop { body, .. } => walk(body, f),
                    Stmt::Break { .. } => {}
                }
            }
        }
        walk(&self.body, f);
    }

    /// The oldest PTX version that supports every instruction of the kernel and its architecture.
    pub fn ptx_version(&self) -> (u8, u8) {
        let mut newest = self.target.arch.ptx_floor;
        self.each_op(&mut |op| newest = newest.max(op.inst.needs.ptx));
        newest
    }
}
