//! Sizes that bound every problem.

/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 512;
