//! Facts of a problem that shape the text of the forward kernels.

use crate::parts::block_lists::Blocks;
use crate::parts::modifier::Modifiers;
use crate::parts::schedule::Ragged;
use fulgurite_core::{DType, Exp, Mask};

/// Facts of a problem that shape a kernel's text: everything but lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Padded elements of a row of q and k, and of v and o: multiples of 16. Where warpgroups share columns, those of v and
    /// o are a multiple of 16 for each warpgroup.
    pub dims: [u32; 2],
    /// The part of the mask that is one interval of keys per query.
    pub mask: Mask,
    /// Expressions over scores and indices.
    pub modifiers: Modifiers,
    /// Element type of the sinks, if there are any.
    pub sinks: Option<DType>,
    /// Lengths that differ from sequence to sequence.
    pub ragged: Ragged,
    /// Block size of the lists of visible blocks.
    pub blocks: Option<Blocks>,
    /// The exponential that computes p.
    pub exp: Exp,
}

/// Columns of o that the registers of a warpgroup can hold.
const COLUMNS: u32 = 256;

impl Features {
    /// Whether a row is too wide for the registers of one warpgroup.
    pub fn wide(&self) -> bool {
        self.dims.iter().any(|d| *d > COLUMNS)
    }

    /// Whether a key that some query of a tile sees may be hidden from another: by intervals, by a mask, by block lists, or by
    /// a modified score of -inf.
    pub fn hides_elements(&self) -> bool {
        !self.mask.spans().is_empty() || !self.modifiers.is_empty() || self.blocks.is_some()
    }

    /// Equal sequences under a mask of intervals, and nothing else.
    pub fn plain(dims: [u32; 2], mask: Mask) -> Features {
        Features {
            dims,
            mask,
            modifiers: Modifiers::default(),
            sinks: None,
            ragged: Ragged::default(),
            blocks: None,
            exp: Exp::Auto,
        }
    }
}
