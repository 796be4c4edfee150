//! Results as JSON.

use crate::{Failure, say};
use serde::Serialize;

/// The text of a value, indented.
pub fn text(value: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(value).map_err(|e| Failure::work(format_args!("cannot write JSON: {e}")))
}

/// Prints a value to stdout.
pub fn print(value: &impl Serialize) -> Result<(), Failure> {
    say(&text(value)?)
}
