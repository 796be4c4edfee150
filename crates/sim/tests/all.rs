//! The simulator's tests, one program: a program for each file would link every crate below once more.

mod agree;
mod attention;
mod backward;
mod backward_heads;
mod backward_planted;
mod backward_widths;
mod clean;
mod common;
mod counters;
mod cycles;
mod decode;
mod f32_results;
mod mma_sync;
mod odd;
mod planted;
mod products;
mod roles;
mod small;
mod sync_attention;
mod sync_backward;
mod tcgen05;
mod tensor_attention;
mod tensor_backward;
mod tensor_kinds;
mod tensor_pairs;
mod tensor_sums;
