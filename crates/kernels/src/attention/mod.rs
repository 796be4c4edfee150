//! Attention on the GPU.

pub mod forward;
pub mod plan;
mod softmax;
mod span;
