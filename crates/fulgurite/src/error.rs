//! Errors of calls.

use crate::choice::ChoiceError;
use crate::engine::Unsupported;
use crate::view::ViewError;
use fulgurite_core::{BlockError, InputError, ProblemError, TensorError};
use thiserror::Error;

/// The reason why a call failed. The text names the argument, its value, the allowed values, and a remedy.
///
/// ```
/// use fulgurite::{Error, Tensor, attention};
///
/// let q = Tensor::new(vec![0.0f32; 24], &[1, 2, 3, 4])?;
/// let k = Tensor::new(vec![0.0f32; 16], &[1, 2, 2, 4])?;
/// let refused = attention(&q, &k, &k).forward().unwrap_err();
/// assert!(matches!(refused, Error::Problem(_)));
/// assert!(refused.to_string().starts_with("`heads`: 3 query heads over 2 key/value heads"));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum Error {
    /// The problem is invalid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The tensors do not fit the problem.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A tensor is invalid.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A value cannot be read as a tensor.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A block mask is invalid.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The engine does not support this problem.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// The engine does not exist, or cannot run here.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// The device rejected the call, or failed.
    #[error(transparent)]
    Device(#[from] fulgurite_ptx::device::DeviceError),
    /// The matrices of a product do not fit each other or the kernel.
    #[error(transparent)]
    Gemm(#[from] fulgurite_kernels::gemm::plan::GemmError),
    /// The tensors do not fit an operator over whole tensors.
    #[error(transparent)]
    TensorOperator(#[from] fulgurite_kernels::tensor_type::TensorRefusal),
    /// The GPU's profile cannot be used.
    #[error(transparent)]
    Profile(#[from] crate::profile::ProfileError),
    /// The key/value cache rejected the call.
    #[error(transparent)]
    Cache(#[from] crate::cache::CacheError),
    /// A tensor with the wrong number of axes.
    #[error("`{arg}` has shape {got:?}, allowed: {allowed}; {hint}")]
    Rank {
        /// Name of the tensor.
        arg: &'static str,
        /// Shape of the tensor.
        got: Vec<usize>,
        /// The axes that it should have.
        allowed: &'static str,
        /// How to fix the call.
        hint: &'static str,
    },
}

impl From<fulgurite_cpu::LighthouseError> for Error {
    fn from(e: fulgurite_cpu::LighthouseError) -> Error {
        use fulgurite_cpu::LighthouseError;
        match e {
            LighthouseError::Input(e) => e.into(),
            LighthouseError::Problem(e) => e.into(),
            LighthouseError::Tensor(e) => e.into(),
        }
    }
}
