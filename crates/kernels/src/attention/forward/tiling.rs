//! Properties that follow from a problem's features together with a tile configuration.

use crate::attention::forward::config::ForwardConfig;
use crate::attention::forward::features::Features;
use crate::attention::forward::order::TileOrder;
use fulgurite_ptx::{Group, Scope, Val};

/// How the warpgroups of a CTA share a tile.
///
/// Warpgroups share a row by columns if it is too wide for one of them: all warpgroups compute the same scores of 64
/// queries, and each has some columns of v and o. Computing the scores more than once is the price of head dimensions
/// up to 512. Otherwise each warpgroup has its own 64 rows and all columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Whether warpgroups share the columns of a row.
    by_columns: bool,
    /// Queries per tile.
    pub rows: u32,
    /// Columns of v and o per warpgroup.
    pub columns: u32,
    /// Tiles of q per stage.
    pub q_tiles: u32,
    /// Tiles of v per stage.
    pub v_tiles: u32,
    /// Rows per tile of q in shared memory.
    pub q_rows: u32,
    pub order: TileOrder,
}

/// The part of a tile that a warpgroup has.
pub(crate) struct WarpgroupPart<'k> {
    /// Index of the warpgroup's rows in the tile.
    pub rows: Val<'k, u32>,
    /// The warpgroup's first column of v and o, if warpgroups share columns.
    pub first_column: Option<Val<'k, u32>>,
    /// Index of the warpgroup's tile in a stage of queries, if a stage has several.
    pub q_tile: Option<Val<'k, u32>>,
    /// Index of the warpgroup's tile in a stage of values, if a stage has several.
    pub v_tile: Option<Val<'k, u32>>,
}

impl Tiling {
    pub fn new(features: &Features, config: &ForwardConfig) -> Tiling {
        let (groups, order) = (config.groups, TileOrder::new(features, config));
        let by_rows = Tiling::by_rows(features, [64, groups], order);
        match features.wide() {
            true => Tiling {
                by_columns: true,
                rows: 64,
                columns: features.dims[1] / groups,
                q_tiles: 1,
                v_tiles: groups,
                ..by_rows
            },
            false => by_rows,
        }
    }

    /// Each of the `groups` warpgroups has rows of its own, `q_rows` of them.
    pub fn by_rows(features: &Features, [q_rows, groups]: [u32; 2], order: TileOrder) -> Tiling {
        let (rows, columns) = (q_rows * groups, features.dims[1]);
        Tiling { by_columns: false, rows, columns, q_tiles: groups, v_tiles: 1, q_rows, order }
    }

    /// The part of the warpgroup with index `group`.
    pub fn part<'k>(&self, w: &Scope<'k, Group>, group: Val<'k, u32>) -> WarpgroupPart<'k> {
        match self.by_columns {
            false => WarpgroupPart { rows: group, first_column: None, q_tile: Some(group), v_tile: None },
            true => WarpgroupPart {
                rows: w.constant(0u32),
                first_column: Some(group * self.columns),
                q_tile: None,
                v_tile: Some(group),
            },
        }
    }

    /// The unit of which the columns of v must be a multiple.
    pub fn value_unit(wide: bool, config: &ForwardConfig) -> u32 {
        if wide { 16 * config.groups } else { 16 }
    }
}
