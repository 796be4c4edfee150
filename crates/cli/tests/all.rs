//! Tests of the command, one program: a program for each file would link every crate below once more.

mod common;
mod explain;
mod kernel;
mod manners;
mod points;
mod readers;
mod refuse;
mod reliable;
mod reports;
mod run;
mod sim;
mod variants;
