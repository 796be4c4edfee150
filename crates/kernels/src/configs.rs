//! Tables of cuts: which way to cut a kernel is for which problems. Forward and backward have one each.

use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::str::FromStr;
use thiserror::Error;

/// A way to cut a kernel, written as `NAME=VALUE NAME=VALUE ..`: a table has some, a search finds others.
pub trait TileConfig: Copy + PartialEq + fmt::Debug + fmt::Display + FromStr<Err = ConfigError> {
    /// What measured best on an H200; rows for every head dimension and any number of keys.
    fn built_in() -> Vec<ConfigRow<Self>>;

    /// Cuts that differ from this one in one number, for a head dimension: some have no kernel.
    fn neighbours(self, head_dim: u32) -> Vec<Self>;
}

/// Which cut is for which problems. Only head dimensions and the keys of a sequence choose, so that a row's bits are the
/// same alone and in a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigTable<T = crate::attention::forward::config::ForwardConfig>(Vec<ConfigRow<T>>);

/// A cut, and what it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigRow<T = crate::attention::forward::config::ForwardConfig> {
    /// The larger of both head dimensions, padded.
    pub head_dims: RangeInclusive<u32>,
    /// Keys, as the pass counts them: forward those that a query of the longest sequence sees, about (half of them under a
    /// causal mask), backward those of the longest sequence.
    pub keys: Range<u64>,
    /// The cut.
    pub config: T,
}

impl<T> ConfigRow<T> {
    fn is_for(&self, head_dim: u32, keys: u64) -> bool {
        self.head_dims.contains(&head_dim) && self.keys.contains(&keys)
    }
}

/// What measured best on an H200.
impl<T: TileConfig> Default for ConfigTable<T> {
    fn default() -> Self {
        ConfigTable(T::built_in())
    }
}

impl<T: TileConfig> ConfigTable<T> {
    /// The same where these do not say otherwise.
    pub fn with(self, rows: impl IntoIterator<Item = ConfigRow<T>>) -> ConfigTable<T> {
        ConfigTable(rows.into_iter().chain(self.0).collect())
    }

    /// This cut for everything.
    pub fn of(config: T) -> ConfigTable<T> {
        ConfigTable(vec![ConfigRow { head_dims: 0..=u32::MAX, keys: 0..u64::MAX, config }])
    }

    /// The same for any number of keys as it is for so many.
    pub fn as_for(self, keys: u64) -> ConfigTable<T> {
        let keys = keys.min(u64::MAX - 1);
        let rows = self.0.into_iter().filter(|row| row.keys.contains(&keys));
        ConfigTable(rows.map(|row| ConfigRow { keys: 0..u64::MAX, ..row }).collect())
    }

    /// The cut for a head dimension and about so many keys.
    pub fn find(&self, head_dim: u32, keys: u64) -> T {
        // `u64::MAX` keys are in no range.
        let keys = keys.min(u64::MAX - 1);
        let found = self.0.iter().find(|row| row.is_for(head_dim, keys));
        found.expect("bug in fulgurite: a table that does not end with rows for everything").config
    }
}

/// A cut that is not one.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`tuning` has {entry:?}, allowed: {allowed}")]
pub struct ConfigError {
    entry: String,
    allowed: &'static str,
}

/// Reads the entries of a cut: `set` takes a name and a value, and tells whether there is such an entry.
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

/// A number among these.
pub(crate) fn number(text: &str, allowed: impl FnOnce(u32) -> bool) -> Option<u32> {
    text.parse().ok().filter(|&n| allowed(n))
}

/// Registers of a thread that computes and of one that loads, as `232:40`.
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
