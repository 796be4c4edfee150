//! The layout of one stage of a ring.

use crate::product::{Swizzle, TileShape};

/// Each tile with its offset in a stage, and the bytes of a stage: whole periods of the widest swizzle, so that every stage
/// starts on a period.
pub(super) fn stage_layout(shapes: &[TileShape]) -> (Vec<(TileShape, u32)>, u32) {
    let (mut tiles, mut bytes) = (Vec::new(), 0);
    for shape in shapes {
        tiles.push((*shape, bytes));
        bytes += shape.bytes().next_multiple_of(shape.swizzle.period());
    }
    (tiles, bytes.next_multiple_of(Swizzle::B128.period()))
}
