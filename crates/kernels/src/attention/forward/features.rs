//! Facts of a problem that determine the text of the forward kernels.

use crate::parts::block_lists::Blocks;
use crate::parts::modifier::Modifiers;
use crate::parts::results::ResultType;
use crate::parts::schedule::Ragged;
use fulgurite_core::{DType, Exp, Mask};

/// Facts of a problem that determine a kernel's text: everything except lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Padded head dimensions of q and k, and of v and o: multiples of 16. If warpgroups share columns, that of v and o
    /// is a multiple of 16 per warpgroup.
    pub dims: [u32; 2],
    /// The part of the mask that is one interval of keys per query.
    pub mask: Mask,
    /// Expressions over scores and indices.
    pub modifiers: Modifiers,
    /// Element type of the sinks, if there are any.
    pub sinks: Option<DType>,
    /// The lengths that differ between sequences.
    pub ragged: Ragged,
    /// Block size of the block lists.
    pub blocks: Option<Blocks>,
    /// The exponential that computes p.
    pub exp: Exp,
    /// The element type of o, and whether it is merged with a given one.
    pub results: ResultType,
    /// Whether no sequence has more than one query.
    pub one_query: bool,
}

/// Columns of o that the registers of a warpgroup can hold.
const COLUMNS: u32 = 256;

impl Features {
    /// Whether a row is too wide for the registers of one warpgroup.
    pub fn wide(&self) -> bool {
        self.dims.iter().any(|d| *d > COLUMNS)
    }

    /// Whether a tile may contain keys that some of its queries do not see. The interval of a single query is all that
    /// its tile loads.
    pub fn hides_keys(&self) -> bool {
        let intervals = !self.mask.spans().is_empty() && !self.one_query;
        intervals || self.modifiers.mask.is_some() || self.modifiers.hides_by_score() || self.blocks.is_some()
    }

    /// Features of equal sequences under a mask of intervals, and nothing else.
    pub fn plain(dims: [u32; 2], mask: Mask) -> Features {
        Features {
            dims,
            mask,
            modifiers: Modifiers::default(),
            sinks: None,
            ragged: Ragged::default(),
            blocks: None,
            exp: Exp::Auto,
            results: ResultType::Input,
            one_query: false,
        }
    }
}
