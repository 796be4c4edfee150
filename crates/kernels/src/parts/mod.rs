//! Parts that kernels are made of: masks, softmax, modifiers, epilogues, schedules, and the arguments that bind them.
//!
//! No part knows which operator uses it.

pub(crate) mod arguments;
pub(crate) mod block_lists;
pub(crate) mod block_table;
pub(crate) mod epilogue;
pub mod exp;
pub(crate) mod expression_blocks;
pub(crate) mod mask;
pub(crate) mod merge;
pub(crate) mod modifier;
pub(crate) mod nonfinite;
pub mod repack;
pub mod results;
pub(crate) mod row_memory;
pub mod row_sums;
pub(crate) mod schedule;
pub(crate) mod sequences;
pub(crate) mod softmax;

pub use block_lists::Blocks;
pub use modifier::Modifiers;
pub use schedule::Ragged;
