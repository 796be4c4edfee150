//! The CPU engine's tests, one program: a program for each file would link every crate below once more.

mod cache;
mod engine;
mod exponential;
mod gated_delta;
mod lighthouse;
mod modified;
mod nonfinite;
mod parallax;
mod quantised;
mod skip;
mod skip_clusters;
mod way;
