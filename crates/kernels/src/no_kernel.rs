//! The error of a plan: a problem for which there is no kernel.

use thiserror::Error;

/// A feature that no kernel has.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{feature}")]
pub struct NoKernel {
    /// The feature, in words that follow "does not have".
    pub feature: String,
}
