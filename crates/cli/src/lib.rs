//! The command `fulgurite`, as a library so that tests and fuzzers can call its parts.
//!
//! The command parses, reads, prints and writes; it knows no arithmetic. Every subcommand returns a
//! [`Failure`] instead of printing one, and [`main`] turns it into one line on stderr and an exit code.

#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
pub mod cache;
pub mod check;
pub mod doctor;
pub mod explain;
mod failure;
mod given;
pub mod io;
pub mod json;
pub mod kernel;
mod ledger;
pub mod machine;
mod manual;
pub mod points;
mod ranks;
pub mod report;
pub mod run;
pub mod sim;
mod terminal;
pub mod tune;
pub mod variants;

pub use failure::Failure;
pub(crate) use terminal::{progress, say};

use args::{Args, Command};
use clap::Parser;
use std::ffi::OsString;
use std::process::ExitCode;

/// Runs the command with the given arguments, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let named: Vec<&str> = args.iter().skip(1).map_while(|arg| arg.to_str()).collect();
    let done = match Args::try_parse_from(&args) {
        Ok(args) => match &args.command {
            Command::Bench(args) => bench::main(args),
            Command::Check(args) => check::main(args),
            Command::Run(args) => run::main(args),
            Command::Cache(args) => cache::main(args),
            Command::Doctor(args) => doctor::main(args),
            Command::Explain(args) => explain::main(args),
            Command::Tune(args) => tune::main(args),
            Command::Kernel(args) => kernel::main(&args.command),
            Command::Cluster(args) => points::cluster(&args.command),
            Command::Neighbors(args) => points::neighbors(args),
            Command::Svd(args) => points::svd(args),
            Command::Completions(args) => manual::completions(args),
            Command::Man(args) => manual::pages(args),
            Command::Sim(args) => sim::main(args),
            Command::SimVsGpu(args) => sim::against_gpu(args),
        },
        Err(e) if e.use_stderr() => Err(Failure::input(args::one_line(&e, &named))),
        Err(help) if terminal::colour(&std::io::stdout()) => say(&help.render().ansi().to_string()),
        Err(help) => say(&help.render().to_string()),
    };
    match done {
        Ok(()) | Err(Failure::Closed) => ExitCode::SUCCESS,
        Err(failure) => {
            let error = if terminal::colour(&std::io::stderr()) { "\x1b[1;31merror:\x1b[0m" } else { "error:" };
            // Nowhere to report that stderr is closed.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{error} {failure}\n").as_bytes());
            ExitCode::from(if matches!(failure, Failure::Work(_)) { 1 } else { 2 })
        }
    }
}
