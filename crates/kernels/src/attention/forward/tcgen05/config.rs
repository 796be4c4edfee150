//! The tile configuration of the `tcgen05` kernel.

use crate::attention::forward::facts::ForwardTile;
use crate::attention::forward::features::Features;
use crate::attention::forward::order::TileOrder;
use crate::attention::forward::tiling::Tiling;
use crate::configs::{ConfigError, ConfigRow, ConfigTable, TileConfig, text};
use fulgurite_core::{BlockSpec, Rescale};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// The tile configuration of the `tcgen05` kernel. No Blackwell GPU has measured it: it follows from the memory that a
/// tile takes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorConfig {
    /// Softmax warpgroups, 128 queries each.
    #[serde(deserialize_with = "text::number::<_, 1, 2>")]
    pub groups: u32,
    /// Keys per key block.
    #[serde(deserialize_with = "text::sixteens::<_, 16, 128>")]
    pub cols: u32,
    /// Columns of p that a warpgroup publishes after the others, so that o += p v starts before they are computed. With
    /// 0, or if fewer than twice as many columns precede them, it publishes p as a whole.
    #[serde(deserialize_with = "text::sixteens::<_, 0, 64>")]
    pub tail: u32,
    /// Stages of the rings of K and of V.
    #[serde(deserialize_with = "text::number::<_, 1, 8>")]
    pub depth: u32,
    /// Registers of a softmax thread and of the other threads.
    #[serde(deserialize_with = "text::registers")]
    pub registers: [u32; 2],
    /// Rescale policy of the running maximum. Its callers choose it, so text leaves it out.
    #[serde(skip, default = "usual_rescale")]
    pub rescale: Rescale,
}

/// The rescale policy of the built-in configurations.
fn usual_rescale() -> Rescale {
    Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT)
}

/// Rows of a tile of accumulators in tensor memory.
const ROWS: u32 = 128;

/// Largest head dimensions of q and k, and of v. A tile of 256 queries and two stages of 64 keys fill shared memory; the
/// scores and the outputs of two warpgroups fill tensor memory.
pub(crate) const LARGEST: [u32; 2] = [192, 128];

impl TensorConfig {
    /// Queries per tile.
    pub fn rows(&self) -> u32 {
        ROWS * self.groups
    }

    /// Columns per staging buffer of O.
    pub(crate) fn part(&self, value_dim: u32) -> u32 {
        [64, 48, 32].into_iter().find(|n| value_dim.is_multiple_of(*n)).unwrap_or(16)
    }

    /// Columns of p at which a part begins that is published after the one before it.
    pub(super) fn cuts(&self) -> Vec<u32> {
        let head = self.cols.saturating_sub(self.tail);
        if self.tail > 0 && head >= 2 * self.tail { vec![head] } else { Vec::new() }
    }

    /// The columns of the parts of p.
    pub(super) fn parts(&self) -> Vec<Range<u32>> {
        let ends = self.cuts().into_iter().chain([self.cols]);
        std::iter::once(0).chain(self.cuts()).zip(ends).map(|(start, end)| start..end).collect()
    }

    pub(super) fn tiling(&self, features: &Features) -> Tiling {
        Tiling::by_rows(features, [ROWS, self.groups], TileOrder::Separate)
    }
}

impl TileConfig for TensorConfig {
    fn built_in() -> Vec<ConfigRow<TensorConfig>> {
        let base =
            TensorConfig { groups: 2, cols: 128, tail: 32, depth: 2, registers: [224, 56], rescale: usual_rescale() };
        let rows = [
            (0..=64, 0..u64::MAX, TensorConfig { depth: 3, ..base }),
            (65..=128, 0..u64::MAX, base),
            (129..=u32::MAX, 0..u64::MAX, TensorConfig { cols: 64, tail: 16, ..base }),
        ];
        rows.map(|(head_dims, keys, config)| ConfigRow { head_dims, keys, config }).to_vec()
    }

    fn neighbours(self, _: u32) -> Vec<TensorConfig> {
        let cols = [64, 96, 128].map(|cols| TensorConfig { cols, ..self });
        let depth = [2, 3, 4].map(|depth| TensorConfig { depth, ..self });
        let groups = [1, 2].map(|groups| TensorConfig { groups, ..self });
        let tail = [0, 16, 32].map(|tail| TensorConfig { tail, ..self });
        cols.into_iter().chain(depth).chain(groups).chain(tail).filter(|config| *config != self).collect()
    }
}

impl ForwardTile for TensorConfig {
    fn value_unit(&self, _: bool) -> u32 {
        16
    }

    fn with_room(self, _: u32, features: &Features) -> Self {
        // Modifiers that load per element keep addresses and values of many elements in registers.
        match features.modifiers.loads_move() {
            true => TensorConfig { cols: self.cols.min(48), tail: 0, ..self },
            false => self,
        }
    }

    fn dividing(self, spec: &BlockSpec, _: bool) -> Option<Self> {
        let groups = (1..=self.groups).rev().find(|n| spec.rows.is_multiple_of((ROWS * n) as usize))?;
        let cols = (1..=self.cols / 16).rev().map(|n| 16 * n).find(|cols| spec.cols.is_multiple_of(*cols as usize))?;
        Some(TensorConfig { groups, cols, ..self })
    }

    fn rescale(&self) -> Rescale {
        self.rescale
    }

    fn with_rescale(self, rescale: Rescale) -> Self {
        TensorConfig { rescale, ..self }
    }
}

/// Prints `groups=2 cols=128 tail=32 depth=2 registers=224:56`, without the rescale policy.
impl fmt::Display for TensorConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}

/// Missing entries take the values for head dimension 128.
impl FromStr for TensorConfig {
    type Err = ConfigError;

    fn from_str(line: &str) -> Result<Self, ConfigError> {
        text::changed(&ConfigTable::<TensorConfig>::default().find(128, 8192), line)
    }
}
