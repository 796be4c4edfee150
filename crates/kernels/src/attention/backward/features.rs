//! Facts of a problem that kernels' texts depend on.

use crate::attention::backward::{ModifierGradients, Order};
use crate::parts::schedule::Ragged;
use fulgurite_core::{Exp, Mask};

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
    /// Whether a query and a key of the same tiles may be hidden from each other.
    pub fn hides_elements(&self) -> bool {
        !self.mask.spans().is_empty() || !self.modifiers.is_empty()
    }

    /// Sequences of equal length under a mask of spans, with no other feature.
    pub fn plain(dims: [u32; 2], mask: Mask) -> Features {
        let (ragged, modifiers) = (Ragged::default(), ModifierGradients::default());
        Features { dims, mask, exp: Exp::Auto, d_lse: false, order: Order::Any, ragged, modifiers }
    }
}
