//! Attention: forward, decode (few queries, split over keys) and backward.

pub mod backward;
pub(crate) mod compute;
pub mod decode;
pub(crate) mod fold;
pub mod forward;
#[cfg(test)]
mod one_row_tests;
pub(crate) mod scoring;
mod source;
