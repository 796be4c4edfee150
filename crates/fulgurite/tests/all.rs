//! Tests of the library's interface, one program: a program for each file would link every crate below once more.

mod common;
mod cycles;
mod decode;
mod explain;
mod interrupts;
mod modified;
mod nonfinite;
mod refusals;
mod repack;
mod session;
mod sim;
mod table;
mod tensor_operators;
mod wide;
