//! The table of instructions.
//!
//! Each module holds the rows of one family. [`INSTS`] lists them all. Tests keep the list complete, give every use
//! that a row allows to the assembler at the version and target the row names, check that what a row forbids is
//! refused there too, and execute the meanings.
//!
//! # Left out
//!
//! Tensor maps are parameters, so there is no `tensormap.replace` and no fence for its proxy. Addresses of shared memory
//! have 32 bits, so `mapa.u64` and generic addresses are not needed; a block knows its rank, so `getctarank` is not
//! either. Phases of mbarriers are named by their parity, not by state. `membar` is `fence.sc`. Parameters are single
//! numbers, so they are read one by one. Signs of `wgmma`'s operands are always positive.
//!
//! # What Blackwell will bring
//!
//! Nothing of it is here yet, and nothing has to change for it:
//!
//! - `f32x2` arithmetic, three-input `max`, 256-bit loads: rows like any other, with registers of class
//!   [`B64`](crate::inst::Class::B64) for pairs of floats, words `.v8` for vectors, and `needs` of sm_100. The rows of
//!   Hopper stay: a kernel picks by its target, and the verifier refuses what a target lacks.
//! - `tcgen05.mma`, `ld`, `st`, `cp`: tensor memory is one more [`Space`](crate::inst::Space) with 32-bit addresses
//!   (lane above column). A product is handed to the machine as a value, as `wgmma`'s is; its accumulator is a place
//!   instead of registers, and its end is an mbarrier arrival ([`Done`](crate::machine::Done)) that `commit` names, not
//!   a group. One thread starts it ([`Together::Thread`]); `ld`, `st`, `alloc` and `dealloc` belong to a warp.
//! - `tcgen05` fences and waits: a [`Fence`](crate::machine::Fence) and a [`Queue`](crate::machine::Queue) more.
//! - `clusterlaunchcontrol`: a transfer of 16 bytes that ends on an mbarrier.
//! - Instructions of `a` targets: [`Archs::Only`](crate::inst::Archs::Only) lists the architectures that have a row.

pub mod atomic;
pub mod bulk;
pub mod bytes;
pub mod cache;
pub mod convert;
pub mod float;
pub mod integer;
pub mod logic;
pub mod mbarrier;
pub mod memory;
pub mod sync;
pub mod tensor;
pub mod warp;

use crate::inst::{Effect, Inst, Needs, Op, Operand, Together, Unit};
use crate::machine::Machine;

/// Every row.
pub static INSTS: &[&[&Inst]] = &[
    float::ROWS,
    integer::ROWS,
    logic::ROWS,
    convert::ROWS,
    warp::ROWS,
    sync::ROWS,
    memory::ACCESS,
    memory::OTHERS,
    cache::ROWS,
    atomic::ROWS,
    mbarrier::ROWS,
    bulk::ROWS,
    bytes::ROWS,
    tensor::ROWS,
];

/// Every row, in one list.
pub fn rows() -> impl Iterator<Item = &'static Inst> {
    INSTS.iter().flat_map(|family| family.iter().copied())
}

/// What a meaning is.
type Meaning = fn(&mut dyn Machine, &Op);

/// Every combination of words and constants exists.
fn any(_: &Op) -> bool {
    true
}

/// A row that only computes registers, in each thread, on every GPU since Ampere.
const fn pure(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    unit: Unit,
    meaning: Meaning,
    source: &'static str,
) -> Inst {
    let (together, effect) = (Together::Thread, Effect::Pure);
    Inst { name, text, operands, allowed: any, needs: Needs::AMPERE, unit, together, effect, meaning, source }
}
