//! Configurations of the main kernel of backward: tiles, stages, registers and services, chosen by measurement.

use crate::attention::backward::{Adds, RegisterPressure, Share};
use crate::configs::{ConfigError, ConfigRow, ConfigTable, TileConfig, text};
use serde::{Deserialize, Deserializer, Serialize, de};
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// From this many keys on, converting d_q in a kernel of its own is as fast or faster.
const MANY_KEYS: u64 = 2049;

/// Allowed steps of a turn.
const TURNS: [u32; 3] = [1, 2, 4];

/// Assumed cost of joining a piece of a split tile, in steps.
const JOIN: u32 = 2;

/// When p is converted to the 16-bit operand of d_v.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pack {
    /// With the exponentials.
    Early,
    /// With d_z: takes fewer registers during the wait for d_p.
    Late,
}

/// A configuration of the main kernel.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackwardConfig {
    /// How the warpgroups share a tile.
    pub share: Share,
    /// Queries of a step. If threads add: 64 (warpgroups share the columns of d_q) or 128 (they share its rows). If TMA
    /// adds: any multiple of 16 from 64 to 128.
    #[serde(deserialize_with = "text::sixteens::<_, 64, 128>")]
    pub rows: u32,
    /// The unit that adds d_q to its sums.
    pub adds: Adds,
    /// Stages of q and d_o, and tiles of d_z.
    #[serde(deserialize_with = "text::number::<_, 2, 4>")]
    pub depth: u32,
    /// Stages of k and v. A plan lowers it to 1 if the load thread lacks the registers for 2 (`plan::schedule`).
    #[serde(deserialize_with = "text::number::<_, 1, 2>")]
    pub key_depth: u32,
    /// Registers of a thread of the compute role, and of the load role.
    #[serde(deserialize_with = "text::registers")]
    pub registers: [u32; 2],
    /// If threads add: eighths of d_q that are added before the scores of the next step are started.
    #[serde(deserialize_with = "text::number::<_, 0, 8>")]
    pub early: u32,
    /// If threads add: whether to wait for all products before the scores of the next step are started.
    pub drain: bool,
    /// If threads add: when p is converted.
    pub pack: Pack,
    /// If TMA adds in a fixed order: steps that a tile adds in one turn, 1, 2 or 4.
    #[serde(deserialize_with = "turn")]
    pub turn: u32,
    /// If TMA adds: whether the main kernel converts d_q while other tiles still run. Its sums then stay in the L2 cache.
    pub rounds: bool,
    /// (head, sequence) pairs of a band: tiles of a band run together. `None`: derived.
    #[serde(default, with = "text::or_rule")]
    pub pairs: Option<u32>,
    /// (head, sequence) pairs of the last band, at most. `None`: derived.
    #[serde(default, with = "text::or_rule")]
    pub last: Option<u32>,
    /// With `rounds`: how many (head, sequence) pairs own an f32 d_q accumulator at once; at least twice `pairs`. `None`: derived.
    #[serde(default, with = "text::or_rule")]
    pub sums: Option<u32>,
    /// If TMA adds: (head, sequence) pairs whose sums the prepare kernel zeroes. The main kernel zeroes the others while
    /// its first tiles run. `None`: derived.
    #[serde(default, with = "text::or_rule")]
    pub zeroed: Option<u32>,
    /// Parts into which the query heads of a key/value head are divided; each part has CTAs of its own. A key/value head has no more
    /// parts than query heads, and with CTA pairs one. `None`: derived.
    #[serde(default, with = "text::or_rule")]
    pub head_splits: Option<u32>,
    /// If TMA adds: assumed cost of joining the pieces of a split tile, in steps for each piece. The last tiles are split
    /// if that takes less time. `None`: never.
    #[serde(default, with = "text::or_never")]
    pub join: Option<u32>,
}

/// What the built-in configurations have in common.
const BASE: BackwardConfig = BackwardConfig {
    share: Share::Keys,
    rows: 64,
    adds: Adds::Threads,
    depth: 2,
    key_depth: 1,
    registers: [240, 24],
    early: 4,
    drain: false,
    pack: Pack::Early,
    turn: 2,
    pairs: None,
    last: None,
    rounds: false,
    sums: None,
    zeroed: None,
    join: None,
    head_splits: None,
};

impl TileConfig for BackwardConfig {
    fn built_in() -> Vec<ConfigRow<BackwardConfig>> {
        let base = BASE;
        let pairs = BackwardConfig { share: Share::Pairs, registers: [240, 24], ..BackwardConfig::columns() };
        let engine = BackwardConfig { adds: Adds::CopyEngine, join: Some(JOIN), ..base };
        let narrow = BackwardConfig { rows: 128, key_depth: 2, ..engine };
        let usual = BackwardConfig { rows: 80, ..engine };
        let row = |head_dims, keys, config| ConfigRow { head_dims, keys, config };
        // With few keys, the kernels around the main kernel take a fifth of the time.
        let rounded = |head_dims: RangeInclusive<u32>, config| {
            let short = row(head_dims.clone(), 0..MANY_KEYS, BackwardConfig { rounds: true, ..config });
            [short, row(head_dims, MANY_KEYS..u64::MAX, config)]
        };
        let wide = vec![row(129..=u32::MAX, 0..u64::MAX, pairs)];
        [rounded(0..=64, narrow).to_vec(), rounded(65..=128, usual).to_vec(), wide].concat()
    }

    fn neighbours(self, head_dim: u32) -> Vec<BackwardConfig> {
        let rows = [self.rows.saturating_sub(16), self.rows + 16, 64, 128].map(|rows| BackwardConfig { rows, ..self });
        if self.is_tensor() {
            return self.tensor_neighbours(head_dim);
        }
        if self.is_sync() {
            let mut choices = BackwardConfig::sync_choices(head_dim);
            choices.retain(|config| *config != self);
            return choices;
        }
        let adds = match self.adds {
            Adds::Threads => BackwardConfig { adds: Adds::CopyEngine, ..self },
            Adds::CopyEngine => self.of_threads(head_dim),
        };
        let depth = [2, 3].map(|depth| BackwardConfig { depth, ..self });
        let key_depth = [1, 2].map(|key_depth| BackwardConfig { key_depth, ..self });
        let registers = [[240, 24], [232, 40]].map(|registers| BackwardConfig { registers, ..self });
        let pairs = [None, Some(1), Some(8), Some(32)].map(|pairs| BackwardConfig { pairs, ..self });
        let of_engine = [BackwardConfig { rounds: !self.rounds, ..self }, BackwardConfig { join: None, ..self }];
        let of_engine = of_engine.into_iter().filter(|_| self.adds == Adds::CopyEngine);
        // Only the schedule `keys` reads these.
        let of_threads = [
            BackwardConfig { early: self.early.saturating_sub(2), ..self },
            BackwardConfig { early: self.early + 2, ..self },
            BackwardConfig { drain: !self.drain, ..self },
            BackwardConfig { pack: if self.pack == Pack::Late { Pack::Early } else { Pack::Late }, ..self },
        ];
        let asked = self.adds == Adds::Threads && self.share == Share::Keys;
        let of_threads = of_threads.into_iter().filter(|_| asked);
        let share = [BackwardConfig::columns(), BackwardConfig::hopper(256)];
        let all = rows
            .into_iter()
            .chain([adds])
            .chain(share)
            .chain(depth)
            .chain(key_depth)
            .chain(registers)
            .chain(pairs)
            .chain(of_engine);
        let mut found: Vec<BackwardConfig> = Vec::new();
        for config in all.chain(of_threads).filter(|config| *config != self && config.has_kernel(head_dim)) {
            if !found.contains(&config) {
                found.push(config);
            }
        }
        found
    }
}

impl BackwardConfig {
    /// The configuration that measured best on an H200 for a head dimension, with few keys.
    pub fn hopper(head_dim: u32) -> BackwardConfig {
        ConfigTable::default().find(head_dim, 0)
    }

    /// The configuration with the most free registers: it takes every feature.
    pub const fn columns() -> BackwardConfig {
        BackwardConfig { share: Share::Columns, early: 8, drain: true, registers: [232, 40], ..BASE }
    }

    /// The configuration that measured best, or fits at all, for sequences of different lengths or modified scores: both keep more
    /// in registers.
    pub fn with_room(head_dim: u32, ragged: bool, modifiers: RegisterPressure) -> BackwardConfig {
        let usual = BackwardConfig { rounds: false, ..BackwardConfig::hopper(head_dim) };
        match (head_dim, ragged, modifiers) {
            (..=64, true, RegisterPressure::None) => {
                BackwardConfig { registers: [232, 40], ..usual.of_threads(head_dim) }
            }
            (65..=128, true, RegisterPressure::None) => BackwardConfig { rows: 64, registers: [232, 40], ..usual },
            (65..=128, false, RegisterPressure::Low) => BackwardConfig { rows: 64, ..usual },
            (_, false, RegisterPressure::None) => usual,
            _ => BackwardConfig::columns(),
        }
    }

    /// This configuration with threads that add, for masks that leave few registers.
    pub fn of_threads(self, head_dim: u32) -> BackwardConfig {
        let base = BackwardConfig { adds: Adds::Threads, key_depth: 2, rounds: false, join: None, ..self };
        match head_dim {
            ..=64 => BackwardConfig { rows: 128, drain: true, pack: Pack::Late, ..base },
            _ => BackwardConfig { rows: 64, ..base },
        }
    }

    /// Whether there is a kernel with this configuration for rows of `head_dim` elements. It may still need too many registers or
    /// too much shared memory.
    pub fn has_kernel(&self, head_dim: u32) -> bool {
        let rows = match (self.share, self.adds) {
            (Share::Columns, Adds::Threads) => self.rows == 64,
            (Share::Pairs, Adds::Threads) => {
                self.rows == 64 && self.depth == 2 && self.key_depth == 1 && (129..=256).contains(&head_dim)
            }
            (Share::Tensor, Adds::CopyEngine) => self.has_tensor_kernel(head_dim),
            (Share::Tensor, Adds::Threads) => false,
            (Share::Columns | Share::Pairs | Share::Warps32 | Share::Warps16, Adds::CopyEngine) => false,
            // A warp has half of the columns of d_k and d_v of its keys in registers, next to p and d_p of half a step.
            (Share::Warps32, Adds::Threads) => match self.rows {
                64 => head_dim <= 128,
                rows => rows == 128 && head_dim <= 64,
            },
            (Share::Warps16, Adds::Threads) => self.rows == 64 && head_dim <= 256,
            // Warpgroups share the columns of d_q, whose halves must be whole chunks of a tile, or its rows, of which 128 fit the
            // registers if they are short.
            (Share::Keys, Adds::Threads) => match head_dim {
                ..=64 => self.rows == 128,
                65..=128 => self.rows == 64,
                _ => false,
            },
            // d_k and d_v leave through memory that is large enough from 64 rows on; d_z and d_q are in step with two stages.
            (Share::Keys, Adds::CopyEngine) => {
                (64..=128).contains(&self.rows) && self.rows.is_multiple_of(16) && self.depth == 2 && head_dim <= 128
            }
        };
        let numbers = [(2..=4).contains(&self.depth), (1..=2).contains(&self.key_depth), self.early <= 8];
        rows && numbers == [true; 3] && TURNS.contains(&self.turn)
    }

    /// Keys of a tile.
    pub fn keys(&self) -> u32 {
        self.share.keys()
    }

    /// Keys of a CTA's part of a tile.
    pub fn cta_keys(&self) -> u32 {
        self.share.keys() / self.share.ctas()
    }

    /// Queries of a step that a CTA loads.
    pub fn cta_rows(&self) -> u32 {
        self.rows / self.share.ctas()
    }

    /// Whether TMA adds d_q that warpgroups multiply transposed, with the services around it.
    pub fn has_bulk_reduce(&self) -> bool {
        self.adds == Adds::CopyEngine && self.share == Share::Keys
    }

    /// Elements of rows as the products see them. Missing elements are read as zeros. If warpgroups share columns, halves are whole
    /// chunks of a tile.
    pub fn padded(&self, dims: [u32; 2]) -> [u32; 2] {
        let [d, dv] = dims.map(|d| d.next_multiple_of(16));
        match (self.share, self.adds) {
            (Share::Columns, _) => dims.map(|d| d.next_multiple_of(64)),
            (Share::Pairs, _) => [256, dv.next_multiple_of(128)],
            // Halves are multiples of 16 columns.
            (Share::Warps32 | Share::Warps16, _) => dims.map(|d| d.next_multiple_of(32)),
            (Share::Tensor, _) => [d, dv],
            (Share::Keys, _) if d.max(dv) > 64 => [128, dv],
            (Share::Keys, Adds::CopyEngine) => [64, dv],
            (Share::Keys, Adds::Threads) => [d, dv],
        }
    }

    /// Elements of a row of d_k and of d_v that the products compute, which need not fill the tiles of [`padded`](Self::padded)
    /// rows. The products that sum over rows of q and k, or of d_o and v, take as many elements.
    pub fn widths(&self, dims: [u32; 2]) -> [u32; 2] {
        let whole = dims.map(|d| d.next_multiple_of(16));
        match (self.share, self.adds) {
            (Share::Keys, Adds::CopyEngine) if whole[0].max(whole[1]) > 64 => whole,
            // Both parts of d_o have columns.
            (Share::Pairs, _) => [whole[0], whole[1].max(self.padded(dims)[1] / 2 + 16)],
            _ => self.padded(dims),
        }
    }

    /// Columns of a warpgroup's part of d_q, as a product, for rows of `dim` elements.
    pub fn cols(&self, dim: u32) -> u32 {
        match (self.adds, self.rows) {
            _ if self.is_tensor() => dim,
            (Adds::CopyEngine, rows) if dim > 64 => rows,
            (Adds::CopyEngine, rows) => rows / 2,
            (Adds::Threads, 64) => dim / (2 * self.share.ctas()),
            (Adds::Threads, _) => dim,
        }
    }
}

/// Reads the steps of a turn.
fn turn<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    let steps = text::number::<D, 1, 4>(from)?;
    let refused = || de::Error::invalid_value(de::Unexpected::Unsigned(steps.into()), &"1, 2 or 4");
    TURNS.contains(&steps).then_some(steps).ok_or_else(refused)
}

/// Prints `share=keys rows=80 adds=engine depth=2 key_depth=1 registers=240:24 early=4 drain=no pack=early turn=2
/// rounds=yes pairs=rule last=rule sums=rule zeroed=rule head_splits=rule join=2`.
impl fmt::Display for BackwardConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write(self, f)
    }
}

impl BackwardConfig {
    /// This configuration with some entries replaced from text.
    pub fn changed(self, line: &str) -> Result<BackwardConfig, ConfigError> {
        text::changed(&self, line)
    }
}

/// Entries that are left out are those of head dimension 128.
impl FromStr for BackwardConfig {
    type Err = ConfigError;

    fn from_str(line: &str) -> Result<Self, ConfigError> {
        BackwardConfig::hopper(128).changed(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_is_read_as_it_is_written() {
        for head_dim in [64, 128, 256] {
            let usual = BackwardConfig::hopper(head_dim);
            let near = usual.neighbours(head_dim);
            assert!(near.len() > 4 && !near.contains(&usual), "{near:?}");
            for config in near.into_iter().chain([usual]) {
                assert!(config.has_kernel(head_dim), "{config}");
                assert_eq!(config.to_string().parse(), Ok(config));
            }
        }
        let written = "share=keys rows=80 adds=engine depth=2 key_depth=1 registers=240:24 early=4 drain=no pack=early \
                       turn=2 rounds=yes pairs=rule last=rule sums=rule zeroed=rule head_splits=rule join=2";
        assert_eq!(BackwardConfig::hopper(128).to_string(), written);
    }

    /// A refusal names the entry, and what is allowed instead.
    #[test]
    fn an_invalid_entry_is_refused() {
        let cases = [
            ("rows=72", "integer `72`, expected a multiple of 16 from 64 to 128"),
            ("rows=256", "integer `256`, expected a multiple of 16 from 64 to 128"),
            ("adds=nobody", "unknown variant `nobody`, expected `threads` or `engine`"),
            ("registers=240", "expected an array of length 2"),
            ("early=9", "integer `9`, expected a number from 0 to 8"),
            ("turn=3", "integer `3`, expected 1, 2 or 4"),
            ("drain=maybe", "expected a boolean"),
            ("pairs=0", "integer `0`, expected a number from 1 to 65536, or \"rule\""),
            ("pairs=never", "string \"never\", expected a number from 1 to 65536, or \"rule\""),
            ("join=rule", "string \"rule\", expected a number from 0 to 65536, or \"never\""),
            ("depth", "an entry is NAME=VALUE"),
            ("cols=64", "unknown field `cols`, expected one of `share`, `rows`"),
        ];
        for (wrong, expected) in cases {
            let refused = wrong.parse::<BackwardConfig>().unwrap_err().to_string();
            assert!(refused.contains(&format!("{wrong:?}: ")) && refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn what_has_no_kernel_is_known() {
        let usual = BackwardConfig::hopper(128);
        assert!(usual.has_kernel(64) && !usual.has_kernel(256) && !usual.of_threads(128).has_kernel(64));
        assert!(
            !BackwardConfig { rows: 48, ..usual }.has_kernel(128)
                && !BackwardConfig { turn: 3, ..usual }.has_kernel(128)
        );
        assert!(
            !BackwardConfig::hopper(64).has_kernel(192) && !BackwardConfig::hopper(64).of_threads(64).has_kernel(128)
        );
        assert!(!BackwardConfig { adds: Adds::CopyEngine, ..BackwardConfig::hopper(256) }.has_kernel(256));
        assert!(!BackwardConfig::hopper(256).has_kernel(128) && BackwardConfig::columns().has_kernel(256));
    }
}
