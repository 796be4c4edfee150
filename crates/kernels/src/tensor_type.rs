//! Types and shapes of whole tensors, and refusals of those that do not fit an operator.

use fulgurite_core::{DType, TensorError, TensorView};
use std::fmt;
use thiserror::Error;

/// Elements of the largest tensor: kernels count elements in 32 bits.
pub const MAX_ELEMENTS: usize = 1 << 31;

/// Element type and shape of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Size of each axis.
    pub shape: Vec<usize>,
}

impl TensorType {
    /// An f32 tensor.
    pub fn f32(shape: &[usize]) -> TensorType {
        TensorType { dtype: DType::F32, shape: shape.to_vec() }
    }

    /// Type and shape of a tensor.
    pub fn of(view: &TensorView<'_>) -> TensorType {
        TensorType { dtype: view.dtype(), shape: view.shape().to_vec() }
    }

    /// Elements; `None` where a `usize` cannot count them.
    pub fn count(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size))
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// Inputs that an operator refuses.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum TensorRefusal {
    /// The wrong number of inputs.
    #[error("`{operator}` got {got} tensors, allowed: {}, which are {}", names.len(), names.join(", "))]
    Count {
        /// The operator.
        operator: &'static str,
        /// Tensors given.
        got: usize,
        /// Names of its inputs.
        names: &'static [&'static str],
    },
    /// An input of the wrong type or shape.
    #[error("`{arg}` is {got}, allowed: {allowed}; {hint}")]
    Type {
        /// The input.
        arg: &'static str,
        /// Its type and shape.
        got: TensorType,
        /// Types and shapes that the operator takes.
        allowed: String,
        /// A way out.
        hint: &'static str,
    },
    /// A tensor that a kernel cannot count.
    #[error("`{arg}` is {got}, allowed: fewer than 2^31 elements; split it")]
    Large {
        /// The tensor.
        arg: &'static str,
        /// Its type and shape.
        got: TensorType,
    },
    /// The output cannot be allocated.
    #[error(transparent)]
    Output(#[from] TensorError),
}

/// An f32 matrix as its rows and columns, or the refusal of anything else.
pub fn f32_matrix(arg: &'static str, got: &TensorType) -> Result<[usize; 2], TensorRefusal> {
    match (got.dtype, &got.shape[..]) {
        (DType::F32, &[rows, cols]) => Ok([rows, cols]),
        _ => {
            let (allowed, hint) = ("f32 [rows, cols]".into(), "convert or reshape it");
            Err(TensorRefusal::Type { arg, got: got.clone(), allowed, hint })
        }
    }
}
