//! The results of a run of `bench`.

use crate::bench::beside::Beside;
use crate::bench::cell::Cell;
use crate::machine::Machine;
use crate::variants::bench as variants;
use serde::Serialize;

/// Everything that a run of `bench` found.
#[derive(Debug, Clone, Serialize)]
pub struct Results {
    /// Version of this program.
    pub version: &'static str,
    /// When.
    pub date: String,
    /// The command that was given.
    pub command: String,
    /// The machine.
    pub machine: Machine,
    /// The engine.
    pub engine: String,
    /// Seed of the random tensors.
    pub seed: u64,
    /// Timed runs of each cell.
    pub repeats: usize,
    /// The grid.
    pub cells: Vec<Cell>,
    /// The systems around attention.
    pub around: Vec<variants::Measurement>,
    /// The cells beside those of an earlier run, and beside another program.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub beside: Vec<Beside>,
}
