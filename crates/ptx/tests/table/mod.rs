//! The table of instructions against what is known of them elsewhere: the assembler, Rust's own arithmetic, and
//! expectations written down by hand.

mod arithmetic;
mod assemble;
mod document;
mod exchange;
mod language;
mod machine;
mod memory;
mod products;
mod ptxas;
mod starts;
mod uses;
