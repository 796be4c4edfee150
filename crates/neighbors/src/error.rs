//! The reason why a call was refused: the argument, its value, the allowed values, and a hint.

use fulgurite_core::TensorError;
use thiserror::Error;

/// Why a call was refused; the caller can repair it from the message alone.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// A slice whose length is not rows times columns, or sizes too large to exist.
    #[error("`{arg}` has {got} elements, allowed: {rows} rows of {columns}; check the shape")]
    Length {
        /// The argument.
        arg: &'static str,
        /// Elements given.
        got: usize,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
    },
    /// No rows or no columns.
    #[error("`{arg}` has shape [{rows}, {columns}], allowed: at least one row and one column; {hint}")]
    Empty {
        /// The argument.
        arg: &'static str,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// A way out.
        hint: &'static str,
    },
    /// More rows than indices can count.
    #[error("`{arg}` has {got} rows, allowed: below 2^31; split it")]
    TooMany {
        /// The argument.
        arg: &'static str,
        /// Rows.
        got: usize,
    },
    /// A number that is no number.
    #[error("`{arg}` row {row} column {column} is {value}, allowed: finite numbers; drop or fill such rows")]
    NotFinite {
        /// The argument.
        arg: &'static str,
        /// The row.
        row: usize,
        /// The column.
        column: usize,
        /// The element.
        value: f32,
    },
    /// Rows of another length than those a model was made from.
    #[error("`{arg}` has rows of {got}, allowed: {want}, as the rows before; check the columns")]
    Columns {
        /// The argument.
        arg: &'static str,
        /// Elements of a row.
        got: usize,
        /// Elements of the rows before.
        want: usize,
    },
    /// A count out of range.
    #[error("`{arg}` is {got}, allowed: {low} to {high}; {hint}")]
    Count {
        /// The argument.
        arg: &'static str,
        /// Its value.
        got: usize,
        /// The least allowed.
        low: usize,
        /// The most allowed.
        high: usize,
        /// A way out.
        hint: &'static str,
    },
    /// A number out of range.
    #[error("`{arg}` is {got}, allowed: {allowed}; {hint}")]
    Value {
        /// The argument.
        arg: &'static str,
        /// Its value.
        got: f64,
        /// The allowed values.
        allowed: &'static str,
        /// A way out.
        hint: &'static str,
    },
    /// A row of length 0 where an angle is asked for.
    #[error("`{arg}` row {row} is all zeros and has no angle; drop it, or use the euclidean metric")]
    NoAngle {
        /// The argument.
        arg: &'static str,
        /// The row.
        row: usize,
    },
    /// A metric that this method does not have.
    #[error("`metric` is {got}, allowed here: {allowed}; {hint}")]
    Metric {
        /// The metric given.
        got: &'static str,
        /// The allowed values.
        allowed: &'static str,
        /// A way out.
        hint: &'static str,
    },
    /// A file that cannot be read, or is no array of f32 rows.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// The fault.
        reason: String,
    },
    /// A file that is not the one it was.
    #[error("{path}: changed while it was read ({what}); nothing was written, start again")]
    Changed {
        /// The file.
        path: String,
        /// The sign of the change.
        what: String,
    },
    /// The process cannot have the memory for the result or for the work.
    #[error(transparent)]
    Memory(#[from] TensorError),
    /// The eigenvalue solver gave up.
    #[error("`points`: the eigenvalues of their products did not converge; scale the columns to similar size")]
    Eigen,
}
