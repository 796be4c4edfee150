//! A kernel as a value: structured statements over rows of the table, with everything a launch must know.

pub use crate::arch::Target;

use crate::inst::{Class, Op, Reg};
use crate::product::{Number, Swizzle};
use std::panic::Location;

/// A box of a tensor that the copy engine moves at once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BoxShape {
    /// Element type of the tensor.
    pub number: Number,
    /// Elements along each axis, innermost first.
    pub extent: Vec<u32>,
    /// How the box lies in shared memory.
    pub swizzle: Swizzle,
}

/// What a parameter is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// An integer of 32 bits.
    U32,
    /// A float.
    F32,
    /// An integer of 64 bits.
    U64,
    /// An address of global memory that is a multiple of this many bytes.
    Pointer(u32),
    /// A tensor that the copy engine reads or writes in such boxes.
    Tensor(BoxShape),
}

/// A parameter.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Param {
    /// Name.
    pub name: String,
    /// What it is.
    pub kind: ParamKind,
}

/// A statement.
#[derive(Debug, Clone)]
pub enum Stmt {
    /// An instruction.
    Op(Op),
    /// Lanes where `cond` holds take one way, the others the other; afterwards they are together again.
    If {
        /// The truth value.
        cond: Reg,
        /// Where it holds.
        then: Vec<Stmt>,
        /// Where it does not.
        otherwise: Vec<Stmt>,
        /// Rarely taken: printed out of the way.
        cold: bool,
        /// The Rust line.
        at: &'static Location<'static>,
    },
    /// Again and again, until a [`Stmt::Break`] of this loop is taken.
    Loop {
        /// What is repeated.
        body: Vec<Stmt>,
        /// The Rust line.
        at: &'static Location<'static>,
    },
    /// Lanes where the truth value is `when` leave the innermost loop, and wait at its end for the others.
    Break {
        /// The truth value.
        cond: Reg,
        /// Which value leaves.
        when: bool,
        /// The Rust line.
        at: &'static Location<'static>,
    },
}

/// A part of shared memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedUse {
    /// What it is for.
    pub name: String,
    /// Where it begins.
    pub offset: u32,
    /// Bytes.
    pub bytes: u32,
}

/// Warps that do one job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleUse {
    /// What it does.
    pub name: String,
    /// Its first warp.
    pub first_warp: u32,
    /// How many.
    pub warps: u32,
    /// Registers a thread, where the kernel hands them out itself.
    pub registers: Option<u32>,
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Name of the entry.
    pub name: String,
    /// What it is for.
    pub target: Target,
    /// Parameters, in order.
    pub params: Vec<Param>,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// Parts of shared memory.
    pub shared: Vec<SharedUse>,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Who does what; empty where all threads do the same.
    pub roles: Vec<RoleUse>,
    /// Named barriers in use, the block's own included.
    pub barriers: u32,
    /// Registers of each class.
    pub registers: [u32; Class::ALL.len()],
    /// Waits for products that the assembler may move up over exponentials, by their Rust lines.
    pub loose_waits: Vec<&'static Location<'static>>,
    /// What it does.
    pub body: Vec<Stmt>,
}

impl Kernel {
    /// Registers of a thread at entry, where roles then change them: what the assembler gives a block that has the
    /// multiprocessor for itself.
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

    /// The oldest PTX version that has everything in it.
    pub fn ptx_version(&self) -> (u8, u8) {
        let mut newest = self.target.arch.ptx_floor;
        self.each_op(&mut |op| newest = newest.max(op.inst.needs.ptx));
        newest
    }
}
