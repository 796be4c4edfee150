//! Tables of tile configurations: the configuration of a kernel for each kind of problem. Forward and backward have one
//! each.

use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::str::FromStr;
use thiserror::Error;

/// A tile configuration of a kernel, written as `NAME=VALUE NAME=VALUE ..`.
pub trait TileConfig: Copy + PartialEq + fmt::Debug + fmt::Display + FromStr<Err = ConfigError> {
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
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigRow<T> {
    /// The larger head dimension, padded.
    pub head_dims: RangeInclusive<u32>,
    /// Number of keys of the longest sequence. Forward halves it under a causal mask, which is about what an average
    /// query sees.
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

/// A text that is not a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`tuning` has {entry:?}, allowed: {allowed}")]
pub struct ConfigError {
    entry: String,
    allowed: &'static str,
}

/// Reads the entries of a configuration. `set` takes a name and a value, and returns `None` if there is no such entry.
pub(crate) fn read(
    text: &str,
    allowed: &'static str,
    mut set: impl FnMut(&str, &str) -> Option<()>,
) -> Result<(), ConfigError> {
    text.split_whitespace().try_for_each(|entry| {
        let known = entry.split_once('=').and_then(|(name, value)| set(name, value));
        known.ok_or_else(|| ConfigError { entry: entry.into(), allowed })
    })
}

/// A number that `allowed` accepts.
pub(crate) fn number(text: &str, allowed: impl FnOnce(u32) -> bool) -> Option<u32> {
    text.parse().ok().filter(|&n| allowed(n))
}

/// Registers of a compute thread and of a load thread, as `232:40`.
pub(crate) fn registers(text: &str) -> Option<[u32; 2]> {
    let (compute, load) = text.split_once(':')?;
    let fits = |n: u32| (24..=256).contains(&n) && n.is_multiple_of(8);
    Some([number(compute, fits)?, number(load, fits)?])
}

/// The value that a word stands for.
pub(crate) fn named<V: Copy>(names: &[(&str, V)], word: &str) -> Option<V> {
    names.iter().find(|(name, _)| *name == word).map(|(_, value)| *value)
}

/// The word for a value.
pub(crate) fn name_of<V: PartialEq>(names: &[(&'static str, V)], value: V) -> &'static str {
    names.iter().find(|(_, known)| *known == value).map_or("", |(name, _)| name)
}
