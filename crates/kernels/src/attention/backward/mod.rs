//! Gradients of attention on Hopper: two or three kernels.
//!
//! With z = scale s, p = e^(z - LSE) and delta = sum of d_o o over a row, less the gradient of its LSE:
//! d_p = d_o v^T, d_z = p (d_p - delta), d_v = p^T d_o, d_k = scale d_z^T q, d_q = scale d_z k.
//!
//! 1. [`prepare`] computes delta and the LSE in powers of two. It zeroes the f32 sums of d_q that the first tiles need.
//! 2. [`main`] computes d_k, d_v and the sums of d_q. With the [rounding service](d_q) it also converts d_q to 16 bits.
//! 3. [`finish`] converts d_q otherwise.
//!
//! A row without keys has a gradient of zeros.
//!
//! Three types say what is computed and how. [`Features`] holds facts of the problem. [`BackwardConfig`] is a measured
//! choice of tiles, stages and registers. [`KernelShape`] is derived from both, in one place
//! ([`plan`]), and decides which services the main kernel has.

pub mod config;
pub mod d_q;
pub mod finish;
mod load;
pub mod main;
mod modifiers;
pub mod plan;
pub mod prepare;
mod schedules;
mod shape;
pub mod sinks;
mod state;
mod tensors;
mod tiles;
mod walk;
pub mod zero;

pub use config::{Adds, BackwardConfig, Pack, Share};
pub use modifiers::{ModifierGradients, RegisterPressure};
pub use shape::KernelShape;

use crate::parts::schedule::Ragged;
use fulgurite_core::{Exp, Mask};

/// The order in which CTAs add to d_q.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// CTAs add as soon as they can. The last bits of d_q differ from run to run.
    #[default]
    Any,
    /// CTAs take turns (deterministic mode). d_q has the same bits in every run, whatever else runs on the GPU.
    Fixed,
}

/// Facts of a problem that shape the kernels' texts: everything but lengths and head counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of a row of v and o: multiples of 8.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// How p is computed.
    pub exp: Exp,
    /// Whether the LSE has a gradient.
    pub d_lse: bool,
    /// The order in which CTAs add to d_q.
    pub order: Order,
    /// Which lengths differ from sequence to sequence.
    pub ragged: Ragged,
    /// Score and mask modifiers, with derivatives.
    pub modifiers: ModifierGradients,
}

impl Features {
    /// Sequences of equal length under a mask of spans, with no other feature.
    pub fn plain(dims: [u32; 2], mask: Mask) -> Features {
        let (ragged, modifiers) = (Ragged::default(), ModifierGradients::default());
        Features { dims, mask, exp: Exp::Auto, d_lse: false, order: Order::Any, ragged, modifiers }
    }
}
