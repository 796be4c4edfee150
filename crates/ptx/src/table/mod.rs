//! The instruction table.
//!
//! Each module holds the rows of one family, and [`INSTS`] lists them all. Tests keep the list complete, assemble every
//! use that a row allows at the PTX version and target the row names, check that the assembler rejects uses that a row
//! forbids, and execute the meanings.
//!
//! # Left out
//!
//! Tensor maps are parameters, so there is no `tensormap.replace` and no fence for its proxy. Addresses of shared
//! memory have 32 bits, so `mapa.u64` and generic addresses are not needed. A CTA knows its rank, so `getctarank` is
//! not needed. mbarrier phases are identified by their parity, not by state. `membar` is `fence.sc`. Parameters are
//! scalars, so each is loaded separately. The sign operands of `wgmma` are always positive.
//!
//! # What Blackwell will bring
//!
//! Still to come, within the same design:
//!
//! - `f32x2` arithmetic, three-input `max`, 256-bit loads: ordinary rows, with registers of class
//!   [`B64`](crate::inst::Class::B64) for pairs of floats, words `.v8` for vectors, and `needs` of sm_100. The rows of
//!   Hopper stay: a kernel chooses by its target, and the verifier rejects instructions that a target lacks.
//! - Of [`tcgen05`]: sparse products, `shift`, copies other than those of scales, 4-bit floats without scales or with powers of two.
//! - `clusterlaunchcontrol` with an answer for every CTA of a cluster.

pub mod atomic;
pub mod bulk;
pub mod bytes;
pub mod cache;
pub mod convert;
pub mod float;
pub mod integer;
pub mod launch;
pub mod logic;
pub mod mbarrier;
pub mod memory;
pub mod sync;
pub mod tcgen05;
pub mod tensor;
pub mod warp;

use crate::inst::{Effect, Inst, Needs, Op, Operand, Together, Unit};
use crate::machine::Machine;

/// All rows, by family.
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
    tcgen05::ROWS,
    launch::ROWS,
];

/// All rows in one list.
pub fn rows() -> impl Iterator<Item = &'static Inst> {
    INSTS.iter().flat_map(|family| family.iter().copied())
}

/// The meaning of an instruction: its effect on a machine.
type Meaning = fn(&mut dyn Machine, &Op);

/// Allows every combination of words and constants.
fn any(_: &Op) -> bool {
    true
}

/// A row without side effects: each thread computes registers only. Available on every GPU since Ampere.
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
