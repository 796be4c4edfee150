//! The kernel language's tests, one program: a program for each file would link every crate below once more.

mod assemble;
mod errors;
mod table;
mod ui;
