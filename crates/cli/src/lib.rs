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
pub mod io;
pub mod json;
pub mod kernel;
pub mod machine;
pub mod points;
pub mod report;
pub mod run;
pub mod sim;
pub mod tune;
pub mod variants;

use args::{Args, Command};
use clap::Parser;
use std::ffi::OsString;
use std::fmt;
use std::process::ExitCode;

/// Why the command ends without success.
#[derive(Debug)]
pub enum Failure {
    /// The call or its input is wrong: exit code 2.
    Input(anyhow::Error),
    /// The work failed: exit code 1.
    Work(anyhow::Error),
    /// The reader of our output went away; nobody is left to be told.
    Closed,
}

impl Failure {
    /// A wrong call or wrong input.
    pub fn input(text: impl fmt::Display) -> Failure {
        Failure::Input(anyhow::anyhow!("{text}"))
    }

    /// Work that failed.
    pub fn work(text: impl fmt::Display) -> Failure {
        Failure::Work(anyhow::anyhow!("{text}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // One line, whatever the cause wrote.
            Failure::Input(e) | Failure::Work(e) => {
                f.write_str(&format!("{e:#}").split_whitespace().collect::<Vec<_>>().join(" "))
            }
            Failure::Closed => f.write_str("output closed"),
        }
    }
}

impl From<fulgurite::Error> for Failure {
    fn from(e: fulgurite::Error) -> Failure {
        Failure::Input(e.into())
    }
}

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
            Command::Sim(args) => sim::main(args),
            Command::SimVsGpu(args) => sim::against_gpu(args),
        },
        Err(e) if e.use_stderr() => Err(Failure::input(args::one_line(&e, &named))),
        Err(help) => say(&help.render().to_string()),
    };
    match done {
        Ok(()) | Err(Failure::Closed) => ExitCode::SUCCESS,
        Err(failure) => {
            // Nowhere to report that stderr is closed.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("error: {failure}\n").as_bytes());
            ExitCode::from(if matches!(failure, Failure::Work(_)) { 1 } else { 2 })
        }
    }
}

/// Writes a line or several to stdout.
pub(crate) fn say(text: &str) -> Result<(), Failure> {
    use std::io::{ErrorKind, Write};
    let mut out = std::io::stdout().lock();
    let written = writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush());
    written.map_err(|e| match e.kind() {
        ErrorKind::BrokenPipe => Failure::Closed,
        _ => Failure::work(format_args!("cannot write to stdout: {e}")),
    })
}

/// A progress bar on stderr; hidden where stderr is not a terminal.
pub(crate) fn progress(steps: usize) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(steps as u64);
    let style = indicatif::ProgressStyle::with_template("{bar:32} {pos}/{len} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar
}
