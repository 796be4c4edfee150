//! Gradients of attention on Hopper: three kernels.
//!
//! With z = scale s, p = e^(z - LSE) and delta = sum of d_o o over a row, less the gradient of its LSE:
//! d_p = d_o v^T, d_z = p (d_p - delta), d_v = p^T d_o, d_k = scale d_z^T q, d_q = scale d_z k.
//! [`prepare`] computes delta and the LSE in powers of two and zeroes the sum of d_q, [`main`] everything else, and
//! [`finish`] rounds d_q. A row without keys has a gradient of zeros.

mod by_columns;
mod by_keys;
pub mod cover;
pub mod finish;
pub mod main;
mod modified;
pub mod plan;
pub mod prepare;
mod sent;
pub mod sinks;
mod tiles;
mod turns;
mod walk;
pub mod zero;

pub use modified::{Derived, is_one};

use super::work::Ragged;
use fulgurite_core::{Exp, Mask};

/// What the two warpgroups of a block share out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// The keys of a tile of 128: each has d_k and d_v of its 64, whole rows.
    Keys,
    /// The columns of all results for a tile of 64 keys, whose rows do not fit the registers of one: each computes p and
    /// d_z of half the queries, for both.
    Columns,
}

/// When p is rounded to the operand of d_v.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pack {
    /// With the exponentials.
    Early,
    /// With d_z: fewer registers while d_p is waited for.
    Late,
}

/// Who adds d_q to its sums in global memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adds {
    /// The threads that have it in registers.
    Threads,
    /// The copy engine, from shared memory. d_q is multiplied transposed, for rows of 128 elements: each warpgroup has 64 of
    /// them as rows of its product, and queries are columns, of which there can be as many as registers allow.
    Engine,
}

/// In which order blocks add to d_q.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// As they come: the last bits of d_q differ from run to run.
    #[default]
    Any,
    /// In one order: the same bits every time, whatever else runs. Blocks wait for each other.
    Fixed,
}

/// How the main kernel is cut: measured choices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// What the warpgroups share out.
    pub share: Share,
    /// Queries of a step: 64, and the warpgroups share the columns of d_q, or 128, and they share its rows. Where
    /// the copy engine adds, any multiple of 16.
    pub rows: u32,
    /// Who adds d_q to its sums.
    pub adds: Adds,
    /// Stages of Q and of d_o, and tiles of d_z.
    pub depth: u32,
    /// Stages of K and V.
    pub key_depth: u32,
    /// Registers of a thread that computes, and of one that loads.
    pub registers: [u32; 2],
    /// In eighths: how much of d_q is added before the scores of the next step are started.
    pub early: u32,
    /// Whether nothing is in flight when the scores of the next step are started.
    pub drain: bool,
    /// When p is rounded.
    pub pack: Pack,
    /// Pairs of head and sequence whose tiles run together; by a rule where none is given.
    pub pairs: Option<u32>,
}

impl Tuning {
    /// What measured best on an H200 for a head dimension.
    pub fn hopper(head_dim: u32) -> Tuning {
        let base = Tuning {
            share: Share::Keys,
            rows: 64,
            adds: Adds::Threads,
            depth: 2,
            key_depth: 1,
            registers: [240, 24],
            early: 4,
            drain: false,
            pack: Pack::Early,
            pairs: None,
        };
        match head_dim {
            ..=64 => Tuning { rows: 128, key_depth: 2, drain: true, pack: Pack::Late, ..base },
            65..=128 => Tuning { rows: 80, adds: Adds::Engine, ..base },
            _ => Tuning { share: Share::Columns, early: 8, drain: true, registers: [232, 40], ..base },
        }
    }

    /// The same where threads add in turns, sequences have lengths of their own, or scores are modified: the last two keep
    /// more in registers.
    pub fn with_room(head_dim: u32, order: Order, ragged: bool, modified: bool) -> Tuning {
        let usual = Tuning::hopper(head_dim);
        match head_dim {
            ..=64 if ragged && !modified => Tuning { registers: [232, 40], ..usual },
            65..=128 if ragged && !modified && order == Order::Any => {
                Tuning { rows: 64, registers: [232, 40], ..usual }
            }
            _ if ragged || modified => Tuning::hopper(u32::MAX),
            65..=128 if order == Order::Fixed => Tuning { rows: 64, adds: Adds::Threads, key_depth: 2, ..usual },
            _ => usual,
        }
    }

    /// Keys of a tile.
    pub fn keys(&self) -> u32 {
        match self.share {
            Share::Keys => 128,
            Share::Columns => 64,
        }
    }

    /// Columns of the product that is a warpgroup's part of d_q, for rows of `dim` elements.
    pub fn cols(&self, dim: u32) -> u32 {
        match (self.adds, self.rows) {
            (Adds::Engine, rows) => rows,
            (Adds::Threads, 64) => dim / 2,
            (Adds::Threads, _) => dim,
        }
    }
}

/// What of a problem shapes the kernels' text: everything but lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of v and o, as the products see them: multiples of 16, of 64 where
    /// warpgroups share columns; the first of 128 where they share keys and the columns of d_q. Rows of tensors may be
    /// shorter.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// How p is computed.
    pub exp: Exp,
    /// Whether the LSE has a gradient.
    pub d_lse: bool,
    /// In which order blocks add to d_q.
    pub order: Order,
    /// Lengths that differ from sequence to sequence.
    pub ragged: Ragged,
    /// Expressions over scores and indices.
    pub modified: Derived,
}

impl Features {
    /// Those of equal sequences under a mask of spans, without anything else.
    pub fn plain(dims: [u32; 2], mask: Mask) -> Features {
        let (ragged, modified) = (Ragged::default(), Derived::default());
        Features { dims, mask, exp: Exp::Auto, d_lse: false, order: Order::Any, ragged, modified }
    }
}
