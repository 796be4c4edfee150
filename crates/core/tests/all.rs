//! Tests of the oracle and of the tolerance rule, one program: a program for each file would link every crate below once more.

mod compare;
mod oracle;
