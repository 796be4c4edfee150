//! Facts of a problem on which the kernels' texts depend.

use crate::attention::backward::{ModifierGradients, Order};
use crate::parts::schedule::Ragged;
use fulgurite_core::{Exp, Mask};

/// Facts of a problem that determine the kernels' texts: everything except lengths and head counts.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of a row of v and o: multiples of 8.
    pub dims: [u32; 2],
    /// The keys that each query sees.
    pub mask: Mask,
    /// The exponential that computes p.
    pub exp: Exp,
    /// Whether the LSE has a gradient.
    pub d_lse: bool,
    /// The order in which CTAs add to d_q.
    pub order: Order,
    /// The lengths that differ between sequences.
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
