//! What a problem's features and a tile configuration decide together.

use crate::attention::forward::config::ForwardConfig;
use crate::attention::forward::features::Features;
use fulgurite_core::Exp;

/// How the warpgroups of a CTA share a tile.
///
/// A row that is too wide for one warpgroup is shared by columns: all warpgroups compute the same scores of 64 queries, and
/// each has some columns of v and o. Computing scores twice is the price for head dimensions up to 512. Otherwise each
/// warpgroup has 64 rows of its own and all columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Warpgroups share columns.
    pub wide: bool,
    /// Queries of a tile.
    pub rows: u32,
    /// Columns of v and o of a warpgroup.
    pub columns: u32,
    /// Tiles of q in a stage.
    pub q_tiles: u32,
    /// Tiles of v in a stage.
    pub v_tiles: u32,
    /// The next tile begins beside the end of this one.
    pub joined: bool,
    /// All scores of a tile are seen before its first p.
    pub scans: bool,
}

impl Tiling {
    pub fn new(features: &Features, config: &ForwardConfig) -> Tiling {
        let (wide, groups) = (features.wide(), config.groups);
        let scans = matches!(features.exp, Exp::Sas { .. });
        Tiling {
            wide,
            rows: if wide { 64 } else { config.rows() },
            columns: if wide { features.dims[1] / groups } else { features.dims[1] },
            q_tiles: if wide { 1 } else { groups },
            v_tiles: if wide { groups } else { 1 },
            joined: config.joined(),
            scans,
        }
    }

    /// What the columns of v must be a multiple of.
    pub fn value_unit(wide: bool, config: &ForwardConfig) -> u32 {
        if wide { 16 * config.groups } else { 16 }
    }
}
