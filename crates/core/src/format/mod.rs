//! Number formats of low precision, bit by bit: what an element, a scale and a group of elements are.
//!
//! [`minifloat`] has the elements, [`group`] floating-point groups with a shared scale (NVFP4, MXFP4, MXFP8),
//! [`integer`] INT8 and what it is packed into (INT4, INT2), [`layout`] the orders in which hardware wants scales.
//! Codes and scales are row-major here; groups run along a row, the axis that a product sums over.

pub mod group;
pub mod integer;
pub mod layout;
pub mod minifloat;

pub use group::{GroupFormat, Grouped};
pub use integer::{Bits, Granularity, Int8, Stage2};
pub use layout::ScaleLayout;
pub use minifloat::{E2m1, E4m3, E5m2, Ue8m0};

use thiserror::Error;

/// Why something was not quantised or not read back.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A NaN or an infinity: no scale fits it.
    #[error("element {at} is {value}, allowed: finite numbers; look for an overflow where the tensor was made")]
    NotFinite {
        /// Its place in the row-major tensor.
        at: usize,
        /// Its value.
        value: f32,
    },
    /// A number of elements that the shape does not have.
    #[error("{got} elements for {rows} rows of {cols}, allowed: {want}; check the shape", want = rows * cols)]
    Shape {
        /// Rows.
        rows: usize,
        /// Elements of a row.
        cols: usize,
        /// Elements given.
        got: usize,
    },
    /// Rows in a group that make no group.
    #[error("a block of {got} rows, allowed: at least 1")]
    Block {
        /// The number given.
        got: usize,
    },
    /// A format that nobody knows.
    #[error("format {got:?} is unknown, allowed: {allowed}")]
    Name {
        /// The text given.
        got: String,
        /// What would do.
        allowed: &'static str,
    },
}

/// Checks the number of elements and that all are finite.
pub(crate) fn check(data: &[f32], rows: usize, cols: usize) -> Result<(), FormatError> {
    if rows.checked_mul(cols) != Some(data.len()) {
        return Err(FormatError::Shape { rows, cols, got: data.len() });
    }
    match data.iter().position(|x| !x.is_finite()) {
        Some(at) => Err(FormatError::NotFinite { at, value: data[at] }),
        None => Ok(()),
    }
}
