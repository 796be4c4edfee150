//! Low-precision number formats, bit by bit: elements, scales and groups of elements.
//!
//! [`minifloat`] has the elements, [`group`] floating-point groups with a shared scale (NVFP4, MXFP4, MXFP8),
//! [`integer`] INT8 and its packed forms (INT4, INT2), [`layout`] the scale layouts of the hardware. Codes and scales
//! are row-major here; groups run along a row, the axis that a product sums over.

pub mod group;
pub mod integer;
pub mod layout;
pub mod minifloat;

pub use group::{GroupFormat, Grouped};
pub use integer::{Bits, Granularity, Int8, Stage2};
pub use layout::ScaleLayout;
pub use minifloat::{E2m1, E4m3, E5m2, Ue8m0};

use thiserror::Error;

/// The reason why data were not quantised or not read back.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum FormatError {
    /// A NaN or an infinity, for which there is no scale.
    #[error("element {at} is {value}, allowed: finite numbers; look for an overflow where the tensor was made")]
    NotFinite {
        /// Index of the element in the row-major tensor.
        at: usize,
        /// Value of the element.
        value: f32,
    },
    /// The number of elements does not match the shape.
    #[error("{got} elements for {rows} rows of {cols}, allowed: {want}; check the shape", want = rows * cols)]
    Shape {
        /// Number of rows.
        rows: usize,
        /// Elements per row.
        cols: usize,
        /// Number of elements given.
        got: usize,
    },
    /// A block has no rows.
    #[error("a block of {got} rows, allowed: at least 1")]
    Block {
        /// The number given.
        got: usize,
    },
    /// An unknown format.
    #[error("format {got:?} is unknown, allowed: {allowed}")]
    Name {
        /// The text given.
        got: String,
        /// Names of the known formats.
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
