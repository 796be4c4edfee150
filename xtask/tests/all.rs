//! Tests of the workspace itself, one program: a program for each file would link every crate below once more.

mod circles;
mod crates;
mod documents;
mod environment;
mod machines;
mod sizes;
