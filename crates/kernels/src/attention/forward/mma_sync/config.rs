//! The tile configuration of the `mma.sync` kernel.

use crate::attention::forward::facts::ForwardTile;
use crate::attention::forward::features::Features;
use crate::configs::{ConfigError, ConfigRow, ConfigTable, TileConfig, text};
use fulgurite_core::{BlockSpec, Rescale};
use fulgurite_ptx::{Arch, TensorUnit};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The tile configuration of the `mma.sync` kernel. A CTA has four warps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SyncConfig {
    /// Blocks of 16 query rows per warp.
    #[serde(deserialize_with = "text::number::<_, 1, 2>")]
    pub blocks: u32,
    /// Keys per key block.
    #[serde(deserialize_with = "text::sixteens::<_, 16, 128>")]
    pub cols: u32,
    /// Stages of the ring, each of which holds K or V of one key block.
    #[serde(deserialize_with = "text::number::<_, 2, 8>")]
    pub depth: u32,
    /// Rescale policy of the running maximum. Not part of the text form, because callers choose it per call.
    #[serde(skip, default = "usual_rescale")]
    pub rescale: Rescale,
}

/// The rescale policy of the built-in configurations.
fn usual_rescale() -> Rescale {
    Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT)
}

/// The most registers of a thread that may hold accumulators on data-centre Blackwell, where the assembler keeps more
/// addresses than elsewhere: with 192, attention at head dimension 128 spills 60 bytes.
const ACCUMULATORS: u32 = 184;

impl SyncConfig {
    /// Registers of a thread that hold rows of o and of the scores.
    fn accumulators(&self, value_dim: u32) -> u32 {
        self.blocks * (value_dim + self.cols) / 2
    }

    /// This configuration with fewer keys per block, if its accumulators would not leave room on an architecture. A block
    /// mask has decided the number of keys before.
    pub(crate) fn fitting(self, arch: Arch, features: &Features) -> SyncConfig {
        let most = if arch.tensor == TensorUnit::Tcgen05 { ACCUMULATORS } else { u32::MAX };
        let fits = |config: &SyncConfig| config.accumulators(features.dims[1]) <= most;
        let narrower = (1..=self.cols / 16).rev().map(|n| SyncConfig { cols: 16 * n, ..self });
        match features.blocks {
            None => narrower.into_iter().find(fits).unwrap_or(self),
            Some(_) => self,
        }
    }

    /// Queries per tile.
    pub fn rows(&self) -> u32 {
        64 * self.blocks
    }
}

impl TileConfig for SyncConfig {
    fn built_in() -> Vec<ConfigRow<SyncConfig>> {
        let base = SyncConfig { blocks: 2, cols: 64, depth: 2, rescale: usual_rescale() };
        let rows = [
            (0..=64, 1024..u64::MAX, SyncConfig { cols: 80, ..base }),
            (0..=64, 0..1024, SyncConfig { depth: 3, ..base }),
            (65..=128, 0..u64::MAX, base),
            (129..=u32::MAX, 0..u64::MAX, SyncConfig { blocks: 1, ..base }),
        ];
        rows.map(|(head_dims, keys, config)| ConfigRow { head_dims, keys, config }).to_vec()
    }

    fn neighbours(self, _: u32) -> Vec<SyncConfig> {
        let cols = [16, 32, 48, 64, 80, 96, 112, 128].map(|cols| SyncConfig { cols, ..self });
        let depth = [2, 3, 4].map(|depth| SyncConfig { depth, ..self });
        let blocks = [1, 2].map(|blocks| SyncConfig { blocks, ..self });
        cols.into_iter().chain(depth).chain(blocks).filter(|config| *config != self).collect()
    }
}

impl ForwardTile for SyncConfig {
    fn value_unit(&self, _: bool) -> u32 {
        16
    }

    fn with_room(self, head_dim: u32, features: &Features) -> Self {
        // Modifiers that load per element keep addresses and values of many elements in registers.
        // Ragged sequences keep their offsets there.
        let (loads, modifies) = (features.modifiers.loads_move(), !features.modifiers.is_empty());
        let masks = features.blocks.is_some() || !features.mask.spans().is_empty();
        match head_dim {
            _ if loads => SyncConfig { blocks: 1, cols: self.cols.min(32), ..self },
            65.. if modifies => SyncConfig { blocks: 1, cols: self.cols.min(64), ..self },
            ..=64 if modifies || features.ragged.any() => SyncConfig { cols: self.cols.min(64), ..self },
            97..=128 if features.ragged.any() => SyncConfig { cols: self.cols.min(32), ..self },
            // With 48 keys and the second computation of a tile, sinks spill 64 bytes at head dimension 128.
            97..=128 if features.sinks.is_some() && features.hides_keys() => {
                SyncConfig { cols: self.cols.min(32), ..self }
            }
            // With a mask, 64 keys spill one or two registers at head dimension 128.
            97..=128 if masks => SyncConfig { cols: self.cols.min(48), ..self },
            _ => self,
        }
    }

    fn dividing(self, spec: &BlockSpec, _: bool) -> Option<Self> {
        let blocks = (1..=self.blocks).rev().find(|n| spec.rows.is_multiple_of(64 * *n as usize))?;
        let cols = (1..=self.cols / 16).rev().map(|n| 16 * n).find(|cols| spec.cols.is_multiple_of(*cols as usize))?;
        Some(SyncConfig { blocks, cols, ..self })
    }

    fn rescale(&self) -> Rescale {
        self.rescale
    }

    fn with_rescale(self, rescale: Rescale) -> Self {
        SyncConfig { rescale, ..self }
    }
}

/// Prints `blocks=2 cols=64 depth=2`, without the rescale policy.
impl fmt::Display for SyncConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}

/// Missing entries take the values for head dimension 128.
impl FromStr for SyncConfig {
    type Err = ConfigError;

    fn from_str(line: &str) -> Result<Self, ConfigError> {
        text::changed(&ConfigTable::<SyncConfig>::default().find(128, 8192), line)
    }
}
