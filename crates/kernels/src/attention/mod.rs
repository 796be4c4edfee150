//! Attention on the GPU.

pub mod few;
mod few_plan;
pub mod forward;
mod partial;
pub mod plan;
mod softmax;
mod span;
