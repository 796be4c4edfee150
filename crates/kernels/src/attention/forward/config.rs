//! The tile configuration of the forward kernel, chosen by measurement.

use crate::attention::forward::features::Features;
use crate::configs::{ConfigError, ConfigRow, ConfigTable, TileConfig, text};
pub use crate::parts::row_sums::Added;
use fulgurite_core::{BlockSpec, Rescale};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The tile configuration of the forward kernel.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForwardConfig {
    /// Compute warpgroups, 64 queries each.
    #[serde(deserialize_with = "text::number::<_, 1, 4>")]
    pub groups: u32,
    /// Keys per key block.
    #[serde(deserialize_with = "text::sixteens::<_, 32, 256>")]
    pub cols: u32,
    /// Stages of the rings of K and of V.
    #[serde(deserialize_with = "text::number::<_, 1, 8>")]
    pub depth: u32,
    /// How a tile ends.
    pub end: End,
    /// Registers of a compute thread and of a load thread.
    #[serde(deserialize_with = "text::registers")]
    pub registers: [u32; 2],
    /// Number of p v steps still to start when a warpgroup passes its turn at the tensor cores.
    #[serde(deserialize_with = "text::number::<_, 0, 2>")]
    pub early: u32,
    /// The unit that sums the rows of p.
    pub added: Added,
    /// Rescale policy of the running maximum. Its callers choose it, so text leaves it out.
    #[serde(skip, default = "usual_rescale")]
    pub rescale: Rescale,
}

/// The rescale policy of the built-in configurations.
fn usual_rescale() -> Rescale {
    Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT)
}

/// How a tile ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum End {
    /// The last p v overlaps with the first scores of the next tile. Q has two buffers, O has one for all columns.
    Joined,
    /// A tile ends before the next one starts. Q has one buffer; O is stored in parts through two small buffers.
    Parts,
}

impl TileConfig for ForwardConfig {
    fn built_in() -> Vec<ConfigRow<ForwardConfig>> {
        let base = ForwardConfig {
            groups: 2,
            cols: 128,
            depth: 2,
            end: End::Joined,
            registers: [232, 40],
            early: 0,
            added: Added::ByThreads,
            rescale: usual_rescale(),
        };
        let small = ForwardConfig { depth: 3, ..base };
        let three = ForwardConfig { groups: 3, cols: 96, registers: [160, 32], ..small };
        let large = ForwardConfig { cols: 64, end: End::Parts, registers: [240, 24], ..base };
        let rows = [
            (0..=64, 2048..u64::MAX, three),
            (0..=64, 0..2048, small),
            (65..=128, 0..u64::MAX, ForwardConfig { early: 2, ..base }),
            (129..=256, 0..u64::MAX, large),
            // Larger key blocks spill.
            (257..=u32::MAX, 0..u64::MAX, ForwardConfig { cols: 32, registers: [232, 40], ..large }),
        ];
        rows.map(|(head_dims, keys, config)| ConfigRow { head_dims, keys, config }).to_vec()
    }

    fn neighbours(self, head_dim: u32) -> Vec<ForwardConfig> {
        let near = [self.cols.saturating_sub(32), self.cols.saturating_sub(16), self.cols + 16, self.cols + 32];
        let cols = near.into_iter().filter(|cols| (32..=256).contains(cols)).map(|cols| ForwardConfig { cols, ..self });
        let depth = [2, 3, 4].into_iter().map(|depth| ForwardConfig { depth, ..self });
        let early = [0, 1, 2].into_iter().map(|early| ForwardConfig { early, ..self });
        let end = [End::Joined, End::Parts].into_iter().map(|end| ForwardConfig { end, ..self });
        // The load thread gets the registers that the compute warpgroups leave over.
        let registers = match self.groups {
            3 => vec![[160, 24], [160, 32]],
            _ => vec![[240, 24], [232, 40]],
        };
        let registers = registers.into_iter().map(|registers| ForwardConfig { registers, ..self });
        let groups = match (self.groups, head_dim) {
            (2, ..=64) => Some(ForwardConfig { groups: 3, cols: self.cols.min(96), registers: [160, 32], ..self }),
            (3, _) => Some(ForwardConfig { groups: 2, registers: [232, 40], ..self }),
            _ => None,
        };
        let all = cols.chain(depth).chain(early).chain(end).chain(registers).chain(groups);
        all.filter(|config| *config != self).collect()
    }
}

impl ForwardConfig {
    /// The fastest configuration measured on an H200 for a head dimension and about `k_len` keys.
    pub fn hopper(head_dim: u32, k_len: usize) -> ForwardConfig {
        ConfigTable::default().find(head_dim, k_len as u64)
    }

    /// This configuration, adjusted so that the problem's features have enough registers.
    pub fn with_room(self, head_dim: u32, features: &Features) -> ForwardConfig {
        let loads = features.modifiers.loads_move();
        match head_dim {
            257.. if loads => ForwardConfig { cols: 16.min(self.cols), ..self },
            129.. if loads => ForwardConfig { cols: 32.min(self.cols), registers: [232, 40], ..self },
            129.. if features.ragged.any() || !features.modifiers.is_empty() => {
                ForwardConfig { cols: 48.min(self.cols), registers: [232, 40], ..self }
            }
            129.. if features.blocks.is_some() => ForwardConfig { cols: 32, ..self },
            ..=64 if loads => {
                let cols = if features.modifiers.mask.is_some() { 64 } else { 96 };
                ForwardConfig { groups: 2, cols, registers: [232, 40], ..self }
            }
            65..=128 if loads => ForwardConfig { cols: 80.min(self.cols), ..self },
            65..=128 if features.blocks.is_some() && features.modifiers.mask.is_some() => {
                ForwardConfig { cols: 64.min(self.cols), ..self }
            }
            _ => self,
        }
    }

    /// This configuration with tiles that divide the blocks of a block mask; `None` if no such tiles exist.
    pub fn dividing(self, spec: &BlockSpec) -> Option<ForwardConfig> {
        let groups = [self.groups, 2, 1].into_iter().find(|g| spec.rows.is_multiple_of(64 * *g as usize))?;
        let narrower = (1..=self.cols / 16).rev().map(|n| 16 * n);
        let cols = narrower.into_iter().find(|cols| spec.cols.is_multiple_of(*cols as usize))?;
        let registers = if groups == 2 { [232, 40] } else { self.registers };
        Some(ForwardConfig { groups, cols, registers, early: self.early.min(cols / 16), ..self })
    }

    /// Queries per tile, if warpgroups do not share rows.
    pub(crate) fn rows(&self) -> u32 {
        64 * self.groups
    }

    /// Columns per staging buffer of O, and the number of buffers.
    pub(crate) fn parts(&self, value_dim: u32) -> [u32; 2] {
        match self.end {
            End::Joined => [value_dim, 1],
            End::Parts => [[64, 48, 32].into_iter().find(|n| value_dim.is_multiple_of(*n)).unwrap_or(16), 2],
        }
    }
}

/// Prints `groups=2 cols=128 depth=2 end=joined registers=232:40 early=0 added=threads`, without the rescale policy.
impl fmt::Display for ForwardConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}

/// Missing entries take the values for head dimension 128.
impl FromStr for ForwardConfig {
    type Err = ConfigError;

    fn from_str(line: &str) -> Result<Self, ConfigError> {
        text::changed(&ForwardConfig::hopper(128, 8192), line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_read_as_it_is_written() {
        for (head_dim, k_len) in [(64, 512), (64, 4096), (128, 512), (256, 512), (256, 16384)] {
            let config = ForwardConfig::hopper(head_dim, k_len);
            assert_eq!(config.to_string().parse(), Ok(config));
        }
        let written = "groups=2 cols=128 depth=2 end=joined registers=232:40 early=2 added=threads";
        assert_eq!(ForwardConfig::hopper(128, 512).to_string(), written);
    }

    /// A refusal names the entry, and what is allowed instead.
    #[test]
    fn an_invalid_entry_is_refused() {
        let cases = [
            ("groups=2 cols=x", r#""cols=x": invalid value: string "x", expected a multiple of 16 from 32 to 256"#),
            ("cols=40", r#""cols=40": invalid value: integer `40`, expected a multiple of 16 from 32 to 256"#),
            ("end=abrupt", r#""end=abrupt": unknown variant `abrupt`, expected `joined` or `parts`"#),
            ("early=3", r#""early=3": invalid value: integer `3`, expected a number from 0 to 2"#),
            ("registers=232:41", "expected a multiple of 8 from 24 to 256"),
            ("registers=232", "expected an array of length 2"),
            ("cols", r#""cols": an entry is NAME=VALUE"#),
            ("colz=64", r#""colz=64": unknown field `colz`, expected one of `groups`, `cols`, `depth`, `end`"#),
        ];
        for (text, expected) in cases {
            let refused = text.parse::<ForwardConfig>().unwrap_err().to_string();
            assert!(refused.starts_with("`tuning` has ") && refused.contains(expected), "{refused}");
        }
    }
}
