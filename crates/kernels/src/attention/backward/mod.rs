//! Gradients of attention on Hopper: two or three kernels.
//!
//! With z = scale s, p = e^(z - LSE) and delta = sum of d_o o over a row, less the gradient of its LSE:
//! d_p = d_o v^T, d_z = p (d_p - delta), d_v = p^T d_o, d_k = scale d_z^T q, d_q = scale d_z k.
//! [`prepare`] computes delta and the LSE in powers of two and zeroes the sums of d_q, or those that are needed first, [`main`]
//! does everything else; where it does not round d_q as well, [`finish`] does. A row without keys has a gradient of zeros.

pub mod config;
pub mod d_q;
pub mod finish;
pub mod main;
mod modified;
pub mod plan;
pub mod prepare;
mod schedules;
pub mod sinks;
mod tensors;
mod tiles;
mod walk;
pub mod zero;

pub use config::{Adds, BackwardConfig, Pack, Share};
pub use modified::{Derived, Room};

use crate::parts::schedule::Ragged;
use fulgurite_core::{Exp, Mask};

/// In which order blocks add to d_q.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// As they come: the last bits of d_q differ from run to run.
    #[default]
    Any,
    /// In one order: the same bits every time, whatever else runs. Blocks wait for each other.
    Fixed,
}

/// What of a problem shapes the kernels' text: everything but lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of v and o, as the products see them: multiples of 16, of 64 where
    /// warpgroups share columns; the first of 128 where they share keys and the columns of d_q, of 64 where the copy engine
    /// adds to shorter rows. Rows of tensors may be shorter.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// How p is computed.
    pub exp: Exp,
    /// Whether the LSE has a gradient.
    pub d_lse: bool,
    /// In which order blocks add to d_q.
    pub order: Order,
    /// Whether the blocks that add to d_q round it too, and there is no kernel for that: where the copy engine adds, of equal
    /// sequences that have keys.
    pub rounds: bool,
    /// Whether the last tiles are cut into pieces, where that takes less time: where the copy engine adds, of equal sequences
    /// whose queries see all keys, in any order.
    pub pieces: bool,
    /// Whether each head of keys has one head of queries, where the copy engine adds: then no step is the first of another head.
    pub single: bool,
    /// Lengths that differ from sequence to sequence.
    pub ragged: Ragged,
    /// Expressions over scores and indices.
    pub modified: Derived,
}

impl Features {
    /// Whether the main kernel zeroes what of the sums of d_q is not needed at once: where the copy engine adds, of equal sequences.
    pub fn clears(&self, config: &BackwardConfig) -> bool {
        config.adds == Adds::Engine && !self.ragged.any()
    }

    /// Those of equal sequences under a mask of spans, without anything else.
    pub fn plain(dims: [u32; 2], mask: Mask) -> Features {
        let (ragged, modified) = (Ragged::default(), Derived::default());
        let (order, rounds, pieces, single) = (Order::Any, false, false, false);
        Features { dims, mask, exp: Exp::Auto, d_lse: false, order, rounds, pieces, single, ragged, modified }
    }
}
