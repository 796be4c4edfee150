//! Attention on the GPU.

pub mod forward;
mod softmax;
mod span;
