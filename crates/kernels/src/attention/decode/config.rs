//! The tile configuration of the decode kernel.

use crate::attention::forward::features::Features;
use crate::parts::merge::Merged;
use fulgurite_core::Rescale;
use fulgurite_ptx::Acc;

/// Rows per tile: the rows that a warpgroup multiplies.
pub const ROWS: u32 = 64;

/// The tile configuration, chosen by measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeConfig {
    /// Keys per key block.
    pub cols: u32,
    /// Stages of K and of V.
    pub depth: u32,
    /// Stages of Q: with two, the next tile is gathered while one is in use.
    pub queries: u32,
    /// Registers per thread of the compute, load and gather roles.
    pub registers: [u32; 3],
    /// Whether a CTA may compute all splits of a tile one after the other and merge them in registers.
    pub whole: bool,
    /// Rescale policy of the running maximum.
    pub rescale: Rescale,
}

impl DecodeConfig {
    /// The configuration for an H200: blocks of 64 keys, and the most stages that shared memory holds. Head dimensions
    /// are padded.
    pub fn hopper([d, dv]: [u32; 2]) -> DecodeConfig {
        /// Shared memory that barriers leave free.
        const BYTES: u32 = 225 << 10;
        /// Bytes in flight that saturate memory. With more, CTAs only drift apart.
        const IN_FLIGHT: u32 = 96 << 10;
        let cols = 64;
        // For large heads, a second tile of Q would cost a third of the keys in flight.
        let queries = if d > 128 { 1 } else { 2 };
        // Merging in registers needs a second o, which fits up to 128 columns.
        let whole = dv <= 128;
        let earlier_bytes = if whole { 4 * Merged::<Acc<'_>>::shared_elements(dv) } else { 0 };
        let [queries_bytes, stage_bytes] = [ROWS * d * 2 * queries, cols * (d + dv) * 2];
        let wanted = (IN_FLIGHT / stage_bytes).clamp(3, 8);
        let depth = wanted.min((BYTES - queries_bytes - earlier_bytes) / stage_bytes).max(2);
        let rescale = Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT);
        DecodeConfig { cols, depth, queries, registers: [240, 40, 152], whole, rescale }
    }

    /// This configuration, adjusted so that the problem's features have enough registers.
    pub fn with_room(self, features: &Features) -> DecodeConfig {
        let kept = features.ragged.any() || !features.modifiers.is_empty();
        match features.dims[1] {
            129.. if kept => DecodeConfig { cols: 32, depth: 2 * self.depth, ..self },
            _ => self,
        }
    }
}

/// Head dimensions padded to whole steps of a product.
pub fn padded(dims: [u32; 2]) -> [u32; 2] {
    dims.map(|d| d.next_multiple_of(16))
}
