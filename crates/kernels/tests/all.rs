//! The kernels' tests, one program: a program for each file would link every crate below once more.

mod assemble;
mod expressions;
mod fingerprints;
mod golden;
