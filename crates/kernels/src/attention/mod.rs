//! Attention: forward, decode (few queries) and backward.

pub mod backward;
pub mod decode;
pub mod forward;
