//! The call from which the decode kernel takes its launch arguments.

use crate::attention::forward::call::{CommonArgs, RowTensor};
use crate::parts::merge::PartialArgs;
use crate::parts::nonfinite::PlainRows;

/// Arguments of the decode kernel.
pub(crate) struct DecodeCall {
    pub k: RowTensor,
    pub v: RowTensor,
    pub q: PlainRows,
    pub common: CommonArgs,
    /// Number of items of the schedule.
    pub items: u64,
    /// Number of items that cover all splits of a tile.
    pub whole: u64,
    /// Number of items of every other tile.
    pub parts: u64,
    /// Splits of such an item.
    pub each: u64,
    /// Tiles per key/value head.
    pub tiles: u64,
    pub kv_heads: u64,
    /// In a ragged batch: the largest number of key blocks for which splits are counted.
    pub most_blocks: u64,
    pub partials: PartialArgs,
}

/// A decode launch before its arguments are laid out.
pub(crate) struct DecodeLaunch {
    pub grid: [u32; 3],
    pub call: DecodeCall,
}
