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

/// `docs/guide/block-skipping.md`.
#[doc = include_str!("guide/block-skipping.md")]
pub mod block_skipping {}

/// `docs/guide/lighthouse.md`.
#[doc = include_str!("guide/lighthouse.md")]
pub mod lighthouse {}

/// `docs/guide/parallax.md`.
#[doc = include_str!("guide/parallax.md")]
pub mod parallax {}

/// `docs/guide/gated-delta-rule.md`.
#[doc = include_str!("guide/gated-delta-rule.md")]
pub mod gated_delta_rule {}
