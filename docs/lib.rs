//! The pages with code in them, so that documentation tests run it.

#![forbid(unsafe_code)]

/// `README.md`.
#[doc = include_str!("../README.md")]
pub mod readme {}

/// `docs/guide/first-steps.md`.
#[doc = include_str!("guide/first-steps.md")]
pub mod first_steps {}

/// `docs/guide/debugging-without-a-gpu.md`.
#[doc = include_str!("guide/debugging-without-a-gpu.md")]
pub mod debugging_without_a_gpu {}

/// `docs/guide/neighbors.md`.
#[doc = include_str!("guide/neighbors.md")]
pub mod neighbors {}

/// `docs/guide/writing-a-kernel.md`.
#[doc = include_str!("guide/writing-a-kernel.md")]
pub mod writing_a_kernel {}
