//! Tile configurations as text: which values an entry may have, and the one-line form `NAME=VALUE NAME=VALUE ..`.
//!
//! serde names the entries of a configuration. TOML files (profiles) and the one-line form both read and write through
//! it, so a new field of a configuration needs no parser.

use serde::de::{DeserializeOwned, Deserializer, Error as _, Unexpected, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use thiserror::Error;
use toml::{Table, Value};

/// A one-line text that is not a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`tuning` has {entry:?}: {reason}")]
pub struct ConfigError {
    /// The invalid entry.
    entry: String,
    /// The reason, with the allowed names or values.
    reason: String,
}

/// Writes a configuration on one line: `cols=128 end=joined registers=232:40 ..`, in the order of its fields.
pub(crate) fn write(config: &impl Serialize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let table = Table::try_from(config).map_err(|_| fmt::Error)?;
    for (i, (name, value)) in table.iter().enumerate() {
        let space = if i == 0 { "" } else { " " };
        write!(f, "{space}{name}={}", word(value))?;
    }
    Ok(())
}

/// The configuration `base` with the entries of a one-line text replaced.
pub(crate) fn changed<T: Serialize + DeserializeOwned>(base: &T, text: &str) -> Result<T, ConfigError> {
    let refused = |entry: &str, reason: &str| ConfigError { entry: entry.into(), reason: reason.into() };
    let mut table = Table::try_from(base).map_err(|e| refused(text, &e.to_string()))?;
    for entry in text.split_whitespace() {
        let (name, value) = entry.split_once('=').ok_or_else(|| refused(entry, "an entry is NAME=VALUE"))?;
        table.insert(name.into(), value_of(value));
        table.clone().try_into::<T>().map_err(|e| refused(entry, e.message()))?;
    }
    table.try_into().map_err(|e| refused(text, e.message()))
}

/// A value on one line: `yes` and `no` for booleans, `A:B` for arrays.
fn word(value: &Value) -> String {
    match value {
        Value::Boolean(true) => "yes".into(),
        Value::Boolean(false) => "no".into(),
        Value::Array(values) => values.iter().map(word).collect::<Vec<_>>().join(":"),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The inverse of [`word`].
fn value_of(word: &str) -> Value {
    match word {
        "yes" => Value::Boolean(true),
        "no" => Value::Boolean(false),
        _ if word.contains(':') => Value::Array(word.split(':').map(value_of).collect()),
        _ => word.parse().map_or_else(|_| Value::String(word.into()), Value::Integer),
    }
}

/// The allowed numbers of an entry, or a word instead of a number.
struct Allowed {
    min: u32,
    max: u32,
    /// Allowed numbers are multiples of this one.
    step: u32,
    /// The word that stands for `None`.
    word: Option<&'static str>,
}

impl Visitor<'_> for Allowed {
    type Value = Option<u32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            1 => write!(f, "a number from {} to {}", self.min, self.max)?,
            step => write!(f, "a multiple of {step} from {} to {}", self.min, self.max)?,
        }
        self.word.map_or(Ok(()), |word| write!(f, ", or \"{word}\""))
    }

    fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<Option<u32>, E> {
        let fits = |n: &u32| (self.min..=self.max).contains(n) && n.is_multiple_of(self.step);
        let number = u32::try_from(n).ok().filter(fits);
        number.map(Some).ok_or_else(|| E::invalid_value(Unexpected::Signed(n), &self))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Option<u32>, E> {
        match self.word {
            Some(word) if word == text => Ok(None),
            _ => Err(E::invalid_value(Unexpected::Str(text), &self)),
        }
    }
}

impl Allowed {
    fn number<'de, D: Deserializer<'de>>(self, from: D) -> Result<u32, D::Error> {
        from.deserialize_any(self)?.ok_or_else(|| D::Error::custom("bug in fulgurite: a number without a value"))
    }
}

/// A number from `MIN` to `MAX`.
pub(crate) fn number<'de, D, const MIN: u32, const MAX: u32>(from: D) -> Result<u32, D::Error>
where
    D: Deserializer<'de>,
{
    Allowed { min: MIN, max: MAX, step: 1, word: None }.number(from)
}

/// A multiple of 16 from `MIN` to `MAX`.
pub(crate) fn sixteens<'de, D, const MIN: u32, const MAX: u32>(from: D) -> Result<u32, D::Error>
where
    D: Deserializer<'de>,
{
    Allowed { min: MIN, max: MAX, step: 16, word: None }.number(from)
}

/// Registers of a compute thread and of a load thread.
pub(crate) fn registers<'de, D: Deserializer<'de>>(from: D) -> Result<[u32; 2], D::Error> {
    #[derive(Deserialize)]
    struct Registers(#[serde(deserialize_with = "of_thread")] u32);

    fn of_thread<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
        Allowed { min: 24, max: 256, step: 8, word: None }.number(from)
    }

    let [compute, load] = <[Registers; 2]>::deserialize(from)?;
    Ok([compute.0, load.0])
}

/// `None` for a number that the plan derives, written as `rule`.
pub(crate) mod or_rule {
    use super::{Allowed, MOST, write_or};
    use serde::{Deserializer, Serializer};

    const RULE: &str = "rule";

    pub(crate) fn serialize<S: Serializer>(number: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
        write_or(RULE, *number, to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
        from.deserialize_any(Allowed { min: 1, max: MOST, step: 1, word: Some(RULE) })
    }
}

/// `None` for a number without which a mechanism is off, written as `never`.
pub(crate) mod or_never {
    use super::{Allowed, MOST, write_or};
    use serde::{Deserializer, Serializer};

    const NEVER: &str = "never";

    pub(crate) fn serialize<S: Serializer>(number: &Option<u32>, to: S) -> Result<S::Ok, S::Error> {
        write_or(NEVER, *number, to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
        from.deserialize_any(Allowed { min: 0, max: MOST, step: 1, word: Some(NEVER) })
    }
}

/// The largest number beside a word.
const MOST: u32 = 1 << 16;

fn write_or<S: serde::Serializer>(word: &str, number: Option<u32>, to: S) -> Result<S::Ok, S::Error> {
    match number {
        Some(number) => to.serialize_u32(number),
        None => to.serialize_str(word),
    }
}
