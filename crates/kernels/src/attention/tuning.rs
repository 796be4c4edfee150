//! How the forward kernel is cut: measured choices, in one place.

use super::cuts::{self, Cut, Row, Table, TuningError};
use super::forward::Features;
use fulgurite_core::{BlockSpec, Rescale};
use std::fmt;
use std::str::FromStr;

/// How the kernel is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Warpgroups that compute, 64 rows of queries each.
    pub groups: u32,
    /// Keys of a block.
    pub cols: u32,
    /// Stages of K and of V.
    pub depth: u32,
    /// What comes after the last block of a tile.
    pub end: End,
    /// Registers of a thread that computes, and of one that loads.
    pub registers: [u32; 2],
    /// A warpgroup passes its turn this many steps before its p v is all started.
    pub early: u32,
    /// Who adds up the rows of p.
    pub added: Added,
    /// How the running maximum is kept.
    pub rescale: Rescale,
}

/// How a tile ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its last p v runs beside the first scores of the next tile: two buffers of Q, and one for the whole of O.
    Joined,
    /// One buffer of Q; O leaves in parts, through two small buffers.
    Parts,
}

impl End {
    const NAMES: [(&str, End); 2] = [("joined", End::Joined), ("parts", End::Parts)];
}

/// Who adds up the rows of p.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Added {
    /// Each thread the elements it has: p before it is rounded, an instruction an element.
    ByThreads,
    /// The tensor cores, as one more column of p v, where v is 1: p as it is rounded.
    ByColumn,
}

impl Added {
    const NAMES: [(&str, Added); 2] = [("threads", Added::ByThreads), ("column", Added::ByColumn)];

    /// Partial sums of a row that a thread keeps.
    pub(super) fn chains(self) -> usize {
        match self {
            Added::ByThreads => 2,
            Added::ByColumn => 0,
        }
    }
}

impl Cut for Tuning {
    fn built_in() -> Vec<Row> {
        let base = Tuning {
            groups: 2,
            cols: 128,
            depth: 2,
            end: End::Joined,
            registers: [232, 40],
            early: 0,
            added: Added::ByThreads,
            rescale: Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT),
        };
        let small = Tuning { depth: 3, ..base };
        let three = Tuning { groups: 3, cols: 96, registers: [160, 32], ..small };
        let large = Tuning { cols: 64, end: End::Parts, registers: [240, 24], ..base };
        let rows = [
            (0..=64, 2048..u64::MAX, three),
            (0..=64, 0..2048, small),
            (65..=128, 0..u64::MAX, Tuning { early: 2, ..base }),
            (129..=256, 0..u64::MAX, large),
            // More keys of a block spill.
            (257..=u32::MAX, 0..u64::MAX, Tuning { cols: 32, registers: [232, 40], ..large }),
        ];
        rows.map(|(head_dims, keys, tuning)| Row { head_dims, keys, tuning }).to_vec()
    }

    fn neighbours(self, head_dim: u32) -> Vec<Tuning> {
        let near = [self.cols.saturating_sub(32), self.cols.saturating_sub(16), self.cols + 16, self.cols + 32];
        let cols = near.into_iter().filter(|cols| (32..=256).contains(cols)).map(|cols| Tuning { cols, ..self });
        let depth = [2, 3, 4].into_iter().map(|depth| Tuning { depth, ..self });
        let early = [0, 1, 2].into_iter().map(|early| Tuning { early, ..self });
        let end = [End::Joined, End::Parts].into_iter().map(|end| Tuning { end, ..self });
        // What is left of a multiprocessor's registers goes to the thread that loads.
        let registers = match self.groups {
            3 => vec![[160, 24], [160, 32]],
            _ => vec![[240, 24], [232, 40]],
        };
        let registers = registers.into_iter().map(|registers| Tuning { registers, ..self });
        let groups = match (self.groups, head_dim) {
            (2, ..=64) => Some(Tuning { groups: 3, cols: self.cols.min(96), registers: [160, 32], ..self }),
            (3, _) => Some(Tuning { groups: 2, registers: [232, 40], ..self }),
            _ => None,
        };
        let all = cols.chain(depth).chain(early).chain(end).chain(registers).chain(groups);
        all.filter(|tuning| *tuning != self).collect()
    }
}

impl Tuning {
    /// What measured best on an H200 for a head dimension and about so many keys.
    pub fn hopper(head_dim: u32, k_len: usize) -> Tuning {
        Table::default().find(head_dim, k_len as u64)
    }

    /// The same with room for what a problem's features keep in registers.
    pub fn with_room(self, head_dim: u32, features: &Features) -> Tuning {
        let loads = features.modifiers.loads_move();
        match head_dim {
            257.. if loads => Tuning { cols: 16.min(self.cols), ..self },
            129.. if loads => Tuning { cols: 32.min(self.cols), registers: [232, 40], ..self },
            129.. if features.ragged.any() || !features.modifiers.is_empty() => {
                Tuning { cols: 48.min(self.cols), registers: [232, 40], ..self }
            }
            129.. if features.blocks.is_some() => Tuning { cols: 32, ..self },
            ..=64 if loads => {
                let cols = if features.modifiers.mask.is_some() { 64 } else { 112 };
                Tuning { groups: 2, cols, registers: [232, 40], ..self }
            }
            65..=128 if loads => Tuning { cols: 80.min(self.cols), ..self },
            _ => self,
        }
    }

    /// The same with tiles that divide the blocks of a block mask; `None` where there are none such.
    pub fn dividing(self, spec: &BlockSpec) -> Option<Tuning> {
        let groups = [self.groups, 2, 1].into_iter().find(|g| spec.rows.is_multiple_of(64 * *g as usize))?;
        let narrower = (1..=self.cols / 16).rev().map(|n| 16 * n);
        let cols = narrower.into_iter().find(|cols| spec.cols.is_multiple_of(*cols as usize))?;
        let registers = if groups == 2 { [232, 40] } else { self.registers };
        Some(Tuning { groups, cols, registers, early: self.early.min(cols / 16), ..self })
    }

    /// Whether the next tile begins beside the end of this one.
    pub(super) fn joined(&self) -> bool {
        self.end == End::Joined
    }

    /// Rows of queries of a tile.
    pub(super) fn rows(&self) -> u32 {
        64 * self.groups
    }

    /// Columns of O that leave through shared memory together, and in how many buffers.
    pub(super) fn parts(&self, value_dim: u32) -> [u32; 2] {
        match self.end {
            End::Joined => [value_dim, 1],
            End::Parts => [[64, 48, 32].into_iter().find(|n| value_dim.is_multiple_of(*n)).unwrap_or(16), 2],
        }
    }
}

/// As `groups=2 cols=128 depth=2 end=joined registers=232:40 early=0 added=threads`; the rescale policy is not part of it.
impl fmt::Display for Tuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tuning { groups, cols, depth, end, registers: [compute, load], early, .. } = self;
        let (end, added) = (cuts::name_of(&End::NAMES, *end), cuts::name_of(&Added::NAMES, self.added));
        write!(f, "groups={groups} cols={cols} depth={depth} end={end} registers={compute}:{load} ")?;
        write!(f, "early={early} added={added}")
    }
}

/// What a cut is written as.
const ALLOWED: &str = "groups=1|2|3|4 cols=N (32 to 256, a multiple of 16) depth=N (1 to 8) end=joined|parts \
                       registers=N:N (24 to 256, multiples of 8) early=0|1|2 added=threads|column";

/// Entries that are left out are as at head dimension 128.
impl FromStr for Tuning {
    type Err = TuningError;

    fn from_str(text: &str) -> Result<Self, TuningError> {
        let mut tuning = Tuning::hopper(128, 8192);
        cuts::read(text, ALLOWED, |name, value| {
            match name {
                "groups" => tuning.groups = cuts::number(value, |n| (1..=4).contains(&n))?,
                "cols" => tuning.cols = cuts::number(value, |n| (32..=256).contains(&n) && n.is_multiple_of(16))?,
                "depth" => tuning.depth = cuts::number(value, |n| (1..=8).contains(&n))?,
                "early" => tuning.early = cuts::number(value, |n| n <= 2)?,
                "end" => tuning.end = cuts::named(&End::NAMES, value)?,
                "added" => tuning.added = cuts::named(&Added::NAMES, value)?,
                "registers" => tuning.registers = cuts::registers(value)?,
                _ => return None,
            }
            Some(())
        })?;
        Ok(tuning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_is_read_as_it_is_written() {
        for (head_dim, k_len) in [(64, 512), (64, 4096), (128, 512), (256, 512), (256, 16384)] {
            let tuning = Tuning::hopper(head_dim, k_len);
            assert_eq!(tuning.to_string().parse(), Ok(tuning));
        }
        let refused = "groups=2 cols=x".parse::<Tuning>().unwrap_err().to_string();
        assert!(refused.contains("cols=x") && refused.contains("end=joined|parts"), "{refused}");
        assert!("end=abrupt".parse::<Tuning>().is_err() && "cols".parse::<Tuning>().is_err());
    }
}
