//! What of a problem shapes the text of forward kernels.

use crate::attention::forward::config::ForwardConfig;
use crate::parts::block_lists::Blocks;
use crate::parts::modifier::Modifiers;
use crate::parts::schedule::Ragged;
use fulgurite_core::{DType, Exp, Mask};

/// What of a problem shapes the kernel's text: everything but lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of v and o: multiples of 16, and of [`Features::value_unit`].
    pub dims: [u32; 2],
    /// Which keys a query sees, as far as that is an interval.
    pub mask: Mask,
    /// Expressions over scores and indices.
    pub modifiers: Modifiers,
    /// Type of a logit for each head that joins the denominator.
    pub sinks: Option<DType>,
    /// Lengths that differ from sequence to sequence.
    pub ragged: Ragged,
    /// Lists of the blocks that are seen.
    pub blocks: Option<Blocks>,
    /// How p is computed.
    pub exp: Exp,
}

/// Columns of o that the registers of a warpgroup have room for.
const COLUMNS: u32 = 256;

impl Features {
    /// Whether a row is too wide for one warpgroup: then all compute the same scores of 64 queries, and share the columns of
    /// v and o instead of rows. Scores are computed twice, which is the price of a plain way up to twice the columns.
    pub fn wide(&self) -> bool {
        self.dims.iter().any(|d| *d > COLUMNS)
    }

    /// Rows of queries of a tile.
    pub fn tile_rows(&self, config: &ForwardConfig) -> u32 {
        if self.wide() { 64 } else { config.rows() }
    }

    /// What the columns of v must be a multiple of.
    pub fn value_unit(&self, config: &ForwardConfig) -> u32 {
        if self.wide() { 16 * config.groups } else { 16 }
    }

    /// Columns of v and o of a warpgroup.
    pub(crate) fn own_columns(&self, config: &ForwardConfig) -> u32 {
        if self.wide() { self.dims[1] / config.groups } else { self.dims[1] }
    }

    /// Whether some keys are hidden element by element, beside spans.
    pub fn hides_elements(&self) -> bool {
        self.modifiers.mask.is_some() || self.blocks.is_some()
    }

    /// Those of equal sequences under a mask of spans, without anything else.
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
