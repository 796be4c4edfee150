//! Why a call was refused.

use crate::choice::ChoiceError;
use crate::engine::Unsupported;
use crate::view::ViewError;
use fulgurite_core::{BlockError, InputError, ProblemError, TensorError};
use thiserror::Error;

/// Why a call was refused. The text names the argument, its value, what is allowed, and a way out.
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
    /// The problem cannot be.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The tensors do not fit the problem.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A tensor cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Something that was given cannot be read as a tensor.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A block mask cannot be made.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// The engine does not run this problem.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// There is no such engine, or it cannot run here.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// The device refused, or failed.
    #[error(transparent)]
    Device(#[from] fulgurite_ptx::device::DeviceError),
    /// The matrices of a product do not fit each other or the kernel.
    #[error(transparent)]
    Gemm(#[from] fulgurite_kernels::gemm::plan::GemmError),
    /// The profile of the GPU cannot be used.
    #[error(transparent)]
    Profile(#[from] crate::profile::ProfileError),
    /// A cache of keys and values refused.
    #[error(transparent)]
    Cache(#[from] crate::cache::CacheError),
    /// A tensor with the wrong number of axes.
    #[error("`{arg}` has shape {got:?}, allowed: {allowed}; {hint}")]
    Rank {
        /// The tensor.
        arg: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// Which axes it should have.
        allowed: &'static str,
        /// What to do.
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
