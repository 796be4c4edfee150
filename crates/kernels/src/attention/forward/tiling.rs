//! Properties that follow from a problem's features together with a tile configuration.

use crate::attention::forward::config::ForwardConfig;
use crate::attention::forward::features::Features;
use fulgurite_core::Exp;

/// How the warpgroups of a CTA share a tile.
///
/// Warpgroups share a row by columns if it is too wide for one of them: all warpgroups compute the same scores of 64
/// queries, and each has some columns of v and o. Computing the scores more than once is the price of head dimensions
/// up to 512. Otherwise each warpgroup has its own 64 rows and all columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Whether warpgroups share columns.
    pub wide: bool,
    /// Queries per tile.
    pub rows: u32,
    /// Columns of v and o per warpgroup.
    pub columns: u32,
    /// Tiles of q per stage.
    pub q_tiles: u32,
    /// Tiles of v per stage.
    pub v_tiles: u32,
    /// Whether the next tile starts while this one ends.
    pub joined: bool,
    /// Whether all scores of a tile are seen before its first p.
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

    /// The unit of which the columns of v must be a multiple.
    pub fn value_unit(wide: bool, config: &ForwardConfig) -> u32 {
        if wide { 16 * config.groups } else { 16 }
    }
}
