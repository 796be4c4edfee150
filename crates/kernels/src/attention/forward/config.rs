//! The tile configuration of the forward kernel: measured choices.

use crate::attention::forward::features::Features;
use crate::configs::{self, ConfigError, ConfigRow, ConfigTable, TileConfig};
pub use crate::parts::row_sums::Added;
use fulgurite_core::{BlockSpec, Rescale};
use std::fmt;
use std::str::FromStr;

/// The tile configuration of the forward kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardConfig {
    /// Compute warpgroups, 64 queries each.
    pub groups: u32,
    /// Keys of a key block.
    pub cols: u32,
    /// Stages of K and of V.
    pub depth: u32,
    /// What follows the last key block of a tile.
    pub end: End,
    /// Registers of a compute thread and of a load thread.
    pub registers: [u32; 2],
    /// A warpgroup passes its turn at the tensor cores when this many steps of its p v are left to start.
    pub early: u32,
    /// Which unit sums the rows of p.
    pub added: Added,
    /// How the running maximum is kept.
    pub rescale: Rescale,
}

/// How a tile ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The last p v runs beside the first scores of the next tile. Q has two buffers, O has one for all columns.
    Joined,
    /// A tile ends before the next one starts. Q has one buffer; O is stored in parts through two small ones.
    Parts,
}

impl End {
    const NAMES: [(&str, End); 2] = [("joined", End::Joined), ("parts", End::Parts)];
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
            rescale: Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT),
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
        // The load thread gets the registers that the compute warpgroups leave.
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

    /// This configuration with registers left for a problem's features.
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
            _ => self,
        }
    }

    /// This configuration with tiles that divide the blocks of a block mask, if there are any.
    pub fn dividing(self, spec: &BlockSpec) -> Option<ForwardConfig> {
        let groups = [self.groups, 2, 1].into_iter().find(|g| spec.rows.is_multiple_of(64 * *g as usize))?;
        let narrower = (1..=self.cols / 16).rev().map(|n| 16 * n);
        let cols = narrower.into_iter().find(|cols| spec.cols.is_multiple_of(*cols as usize))?;
        let registers = if groups == 2 { [232, 40] } else { self.registers };
        Some(ForwardConfig { groups, cols, registers, early: self.early.min(cols / 16), ..self })
    }

    /// Whether the next tile starts beside the end of this one.
    pub(crate) fn joined(&self) -> bool {
        self.end == End::Joined
    }

    /// Queries of a tile, if warpgroups do not share them.
    pub(crate) fn rows(&self) -> u32 {
        64 * self.groups
    }

    /// Columns of a staging buffer of O, and the number of buffers.
    pub(crate) fn parts(&self, value_dim: u32) -> [u32; 2] {
        match self.end {
            End::Joined => [value_dim, 1],
            End::Parts => [[64, 48, 32].into_iter().find(|n| value_dim.is_multiple_of(*n)).unwrap_or(16), 2],
        }
    }
}

/// Written as `groups=2 cols=128 depth=2 end=joined registers=232:40 early=0 added=threads`, without the rescale policy.
impl fmt::Display for ForwardConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ForwardConfig { groups, cols, depth, end, registers: [compute, load], early, .. } = self;
        let (end, added) = (configs::name_of(&End::NAMES, *end), configs::name_of(&Added::NAMES, self.added));
        write!(f, "groups={groups} cols={cols} depth={depth} end={end} registers={compute}:{load} ")?;
        write!(f, "early={early} added={added}")
    }
}

/// The entries of a configuration's text.
const ALLOWED: &str = "groups=1|2|3|4 cols=N (32 to 256, a multiple of 16) depth=N (1 to 8) end=joined|parts \
                       registers=N:N (24 to 256, multiples of 8) early=0|1|2 added=threads|column";

/// Missing entries have the values for head dimension 128.
impl FromStr for ForwardConfig {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let mut config = ForwardConfig::hopper(128, 8192);
        configs::read(text, ALLOWED, |name, value| {
            match name {
                "groups" => config.groups = configs::number(value, |n| (1..=4).contains(&n))?,
                "cols" => config.cols = configs::number(value, |n| (32..=256).contains(&n) && n.is_multiple_of(16))?,
                "depth" => config.depth = configs::number(value, |n| (1..=8).contains(&n))?,
                "early" => config.early = configs::number(value, |n| n <= 2)?,
                "end" => config.end = configs::named(&End::NAMES, value)?,
                "added" => config.added = configs::named(&Added::NAMES, value)?,
                "registers" => config.registers = configs::registers(value)?,
                _ => return None,
            }
            Some(())
        })?;
        Ok(config)
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
        let refused = "groups=2 cols=x".parse::<ForwardConfig>().unwrap_err().to_string();
        assert!(refused.contains("cols=x") && refused.contains("end=joined|parts"), "{refused}");
        assert!("end=abrupt".parse::<ForwardConfig>().is_err() && "cols".parse::<ForwardConfig>().is_err());
    }
}
