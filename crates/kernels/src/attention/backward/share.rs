//! How warpgroups share a tile, and the unit that adds d_q. The kernels ask these two values for numbers and shapes.

use fulgurite_ptx::{Swizzle, TensorUnit, TileShape};
use serde::{Deserialize, Serialize};

/// How the two warpgroups of a CTA share a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// A tile has 128 keys. Each warpgroup has d_k and d_v of 64 of them, in whole rows.
    Keys,
    /// A tile has 64 keys, whose rows do not fit the registers of one warpgroup. Each has half of the columns of all results, and
    /// computes p and d_z of half of the queries, for both.
    Columns,
    /// A CTA pair shares one tile of 128 keys; each CTA has 64 of them. One warpgroup has d_v, the other d_k. Each CTA multiplies
    /// half of d_q's columns over all 128 keys. Only for rows of 256 elements.
    Pairs,
    /// By `mma.sync`, on GPUs without `wgmma`, or if asked for: a tile has 128 keys, and a warp computes p and d_z of 32 keys
    /// and half of the queries. Each warpgroup has half of the columns of d_k and d_v.
    Warps32,
    /// `mma.sync` with a tile of 64 keys, 16 for each warp: half the registers of [`Share::Warps32`], or rows twice as long.
    Warps16,
    /// By `tcgen05`: a tile has 128 keys. d_k, d_v and d_q are in tensor memory. Each warpgroup computes p and d_z of half of the
    /// queries, and a third one moves d_q to its sums.
    Tensor,
}

impl Share {
    /// Keys of a tile.
    pub fn keys(self) -> u32 {
        match self {
            Share::Keys | Share::Pairs | Share::Warps32 | Share::Tensor => 128,
            Share::Columns | Share::Warps16 => 64,
        }
    }

    /// The unit that multiplies.
    pub fn unit(self) -> TensorUnit {
        match self {
            Share::Keys | Share::Columns | Share::Pairs => TensorUnit::Wgmma,
            Share::Warps32 | Share::Warps16 => TensorUnit::MmaSync,
            Share::Tensor => TensorUnit::Tcgen05,
        }
    }

    /// CTAs that have a tile together.
    pub fn ctas(self) -> u32 {
        match self {
            Share::Pairs => 2,
            Share::Keys | Share::Columns | Share::Warps32 | Share::Warps16 | Share::Tensor => 1,
        }
    }

    /// Parts in which the columns of d_o arrive. Each has a stage of its own, and one more stage lets the parts of the next
    /// step arrive early.
    pub fn d_o_parts(self) -> u32 {
        self.ctas()
    }

    /// The tile of q, k, v or d_o. If warpgroups share columns, half a row must be whole chunks.
    pub(crate) fn operand(self, shape: TileShape) -> TileShape {
        match self {
            Share::Columns | Share::Pairs if !(shape.cols / 2).is_multiple_of(shape.chunk()) => {
                TileShape { swizzle: Swizzle::B64, ..shape }
            }
            _ => shape,
        }
    }

    /// The part of d_k or d_v that one warpgroup stores at a time, from the operand tile of its 64 keys.
    pub(crate) fn result(self, shape: TileShape) -> TileShape {
        match self {
            Share::Keys => shape,
            _ => TileShape { cols: shape.cols / 2, ..shape },
        }
    }

    /// Blocks of 16 keys for which a warp of the `mma.sync` kernel computes p and d_z.
    pub(crate) fn key_blocks_per_warp(self) -> u32 {
        match self {
            Share::Warps32 => 2,
            _ => 1,
        }
    }
}

/// The unit that adds d_q to its f32 sums in global memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Adds {
    /// The threads that hold it in registers.
    Threads,
    /// TMA, from shared memory. d_q is multiplied transposed: rows of the product are 64 elements of d_q, columns are
    /// queries, as many as registers allow. A warpgroup has 64 elements of longer rows, or all elements of shorter rows for half of
    /// the queries.
    #[serde(rename = "engine")]
    CopyEngine,
}
