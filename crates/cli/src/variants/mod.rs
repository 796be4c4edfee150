//! The systems around attention in the command: `run --op`, `--skip`, and their rows of `check`, `bench` and `explain`.

pub mod args;
pub mod bench;
pub mod check;
pub mod explain;
pub mod picture;
pub mod run;
