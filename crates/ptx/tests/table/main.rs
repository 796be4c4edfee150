//! The table of instructions against what is known of them elsewhere: the assembler, Rust's own arithmetic, and
//! expectations written down by hand.

mod assemble;
mod ptxas;
mod uses;
