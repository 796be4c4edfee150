//! The table of instructions.
//!
//! Each module holds the rows of one family. [`INSTS`] lists them all; a test keeps the list complete.

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
