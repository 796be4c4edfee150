//! Tables of tile configurations: the configuration of a kernel for each kind of problem. Forward and backward have one
//! each.

pub(crate) mod text;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::str::FromStr;
pub use text::ConfigError;

/// A tile configuration of a kernel. Files hold it by serde, one line of text as `NAME=VALUE NAME=VALUE ..`.
pub trait TileConfig:
    Copy + PartialEq + fmt::Debug + fmt::Display + FromStr<Err = ConfigError> + Serialize + DeserializeOwned
{
    /// The fastest configurations measured on an H200, for every head dimension and number of keys.
    fn built_in() -> Vec<ConfigRow<Self>>;

    /// Configurations that differ from this one in one number, for a search. Some have no kernel.
    fn neighbours(self, head_dim: u32) -> Vec<Self>;
}

/// Maps problems to configurations. Only head dimensions and the number of keys of a sequence decide, so results are
/// bitwise the same alone and in a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigTable<T>(Vec<ConfigRow<T>>);

/// A configuration, and the problems that use it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(into = "RowText<T>", try_from = "RowText<T>")]
#[serde(bound(serialize = "T: Clone + Serialize", deserialize = "T: Deserialize<'de>"))]
pub struct ConfigRow<T> {
    /// The larger head dimension, padded.
    pub head_dims: RangeInclusive<u32>,
    /// Number of keys of the longest sequence. Forward takes the number that an average query sees: half of them under a
    /// causal mask, and in a window no more than it has.
    pub keys: Range<u64>,
    /// The configuration of these problems.
    pub config: T,
}

impl<T> ConfigRow<T> {
    fn is_for(&self, head_dim: u32, keys: u64) -> bool {
        self.head_dims.contains(&head_dim) && self.keys.contains(&keys)
    }
}

/// The fastest configurations measured on an H200.
impl<T: TileConfig> Default for ConfigTable<T> {
    fn default() -> Self {
        ConfigTable(T::built_in())
    }
}

impl<T: TileConfig> ConfigTable<T> {
    /// This table, with rows that take precedence over its own.
    pub fn with(self, rows: impl IntoIterator<Item = ConfigRow<T>>) -> ConfigTable<T> {
        ConfigTable(rows.into_iter().chain(self.0).collect())
    }

    /// One configuration for all problems.
    pub fn of(config: T) -> ConfigTable<T> {
        ConfigTable(vec![ConfigRow { head_dims: 0..=u32::MAX, keys: 0..u64::MAX, config }])
    }

    /// This table with its rows for `keys` keys used for any number of keys.
    pub fn as_for(self, keys: u64) -> ConfigTable<T> {
        let keys = keys.min(u64::MAX - 1);
        let rows = self.0.into_iter().filter(|row| row.keys.contains(&keys));
        ConfigTable(rows.map(|row| ConfigRow { keys: 0..u64::MAX, ..row }).collect())
    }

    /// The configuration for a head dimension and about `keys` keys.
    pub fn find(&self, head_dim: u32, keys: u64) -> T {
        // Ranges end before `u64::MAX`.
        let keys = keys.min(u64::MAX - 1);
        let found = self.0.iter().find(|row| row.is_for(head_dim, keys));
        found.expect("bug in fulgurite: a table that does not end with rows for everything").config
    }
}

/// The entries of a [`ConfigRow`] in a file. TOML has no ranges, and no integer as large as `u64::MAX`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowText<T> {
    /// Smallest head dimension.
    head_dim_from: u32,
    /// Largest head dimension.
    head_dim_to: u32,
    /// Smallest number of keys.
    keys_from: u64,
    /// Numbers of keys are smaller than this one; `None`: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    keys_below: Option<u64>,
    config: T,
}

impl<T> From<ConfigRow<T>> for RowText<T> {
    fn from(ConfigRow { head_dims, keys, config }: ConfigRow<T>) -> Self {
        let (head_dim_from, head_dim_to) = head_dims.into_inner();
        let keys_below = (keys.end < u64::MAX).then_some(keys.end);
        RowText { head_dim_from, head_dim_to, keys_from: keys.start, keys_below, config }
    }
}

impl<T> TryFrom<RowText<T>> for ConfigRow<T> {
    type Error = String;

    fn try_from(text: RowText<T>) -> Result<Self, String> {
        let RowText { head_dim_from, head_dim_to, keys_from, keys_below, config } = text;
        let head_dims = head_dim_from..=head_dim_to;
        let keys = keys_from..keys_below.unwrap_or(u64::MAX);
        if head_dims.is_empty() {
            return Err(format!("`head_dim_to` is {head_dim_to}, allowed: `head_dim_from` = {head_dim_from} or more"));
        }
        if keys.is_empty() {
            return Err(format!("`keys_below` is {}, allowed: more than `keys_from` = {keys_from}", keys.end));
        }
        Ok(ConfigRow { head_dims, keys, config })
    }
}
