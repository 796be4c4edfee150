//! Steps and columns that a mask leaves to a tile.

use crate::attention::backward::BackwardConfig;
use fulgurite_core::Mask;
use fulgurite_core::mask::Span as MaskSpan;
use std::ops::Range;

/// Steps of queries of each key tile of a head: those in which some query sees a key of the tile, or one.
pub(super) fn tile_steps(mask: &Mask, [q_len, k_len]: [usize; 2], config: BackwardConfig) -> impl Iterator<Item = u64> {
    let (keys, rows) = (config.keys() as usize, config.rows as usize);
    let spans: Vec<MaskSpan> = mask.spans().iter().map(MaskSpan::transposed).collect();
    (0..k_len).step_by(keys).map(move |first| {
        let last = (first + keys).min(k_len) - 1;
        let start = columns(&spans, first, [k_len, q_len]).start;
        let end = columns(&spans, last, [k_len, q_len]).end;
        (end.max(start).div_ceil(rows) - start / rows).max(1) as u64
    })
}

/// The columns that a row of a mask sees.
pub(super) fn columns(spans: &[MaskSpan], row: usize, [rows, cols]: [usize; 2]) -> Range<usize> {
    spans.iter().map(|span| span.keys(row, rows, cols)).fold(0..cols, |a, b| a.start.max(b.start)..a.end.min(b.end))
}
