//! Attention on the GPU.

pub mod backward;
mod careful;
mod cover;
pub mod cuts;
mod epilogue;
mod features;
pub mod few;
mod few_plan;
pub mod forward;
mod lists;
mod modifier;
mod partial;
mod placed;
pub mod plan;
pub mod repack;
mod softmax;
mod span;
pub mod tuning;
mod work;

pub use lists::Blocks;
pub use modifier::Modifiers;
pub use work::Ragged;
