//! Attention on the GPU.

pub mod forward;
mod span;
mod softmax;
