//! Attention on the GPU.

pub mod backward;
pub mod forward;
pub mod plan;
mod softmax;
mod span;
