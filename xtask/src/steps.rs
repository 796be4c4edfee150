//! Steps of a task: run, skipped with a reason, or failed; counted at the end.

use std::fmt::Display;
use std::process::{Command, ExitCode};
use std::time::Instant;

/// What happened so far.
#[derive(Debug, Default)]
pub struct Report {
    passed: Vec<String>,
    failed: Vec<String>,
    skipped: Vec<String>,
}

/// Why a step did not pass.
#[derive(Debug)]
pub enum Trouble {
    /// What it needs cannot be had here.
    Skip(String),
    /// It ran and found something wrong, or could not run although it should.
    Fail(String),
}

impl Trouble {
    /// A skip, with its reason.
    pub fn skip(why: impl Display) -> Trouble {
        Trouble::Skip(why.to_string())
    }
    /// A failure, with its cause.
    pub fn fail(why: impl Display) -> Trouble {
        Trouble::Fail(why.to_string())
    }
}

impl Report {
    /// Runs a step and notes how it went; later steps run whatever it says.
    pub fn step(&mut self, name: &str, run: impl FnOnce() -> Result<(), Trouble>) {
        println!("\n== {name}");
        let start = Instant::now();
        let outcome = run();
        let seconds = start.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                println!("-- passed: {name} ({seconds:.1} s)");
                self.passed.push(name.into());
            }
            Err(Trouble::Skip(why)) => {
                println!("-- skipped: {name}: {why}");
                self.skipped.push(format!("{name}: {why}"));
            }
            Err(Trouble::Fail(why)) => {
                println!("-- FAILED: {name}: {why} ({seconds:.1} s)");
                self.failed.push(format!("{name}: {why}"));
            }
        }
    }

    /// Prints the count as the last line. A task that skipped everything has shown nothing and fails.
    pub fn finish(self) -> ExitCode {
        println!();
        for skipped in &self.skipped {
            println!("skipped  {skipped}");
        }
        for failed in &self.failed {
            println!("FAILED   {failed}");
        }
        println!("{} passed, {} failed", self.passed.len(), self.failed.len());
        if self.failed.is_empty() && !self.passed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Runs a command to its end; anything but success is a failure.
pub fn must(command: &mut Command) -> Result<(), Trouble> {
    let shown = show(command);
    println!("$ {shown}");
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Trouble::fail(format!("`{shown}` ended with {status}"))),
        Err(e) => Err(Trouble::fail(format!("`{shown}` could not be started: {e}"))),
    }
}

/// Whether a command runs and succeeds; its output is thrown away.
pub fn works(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

fn show(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let args = command.get_args().map(|a| a.to_string_lossy().into_owned());
    std::iter::once(name).chain(args).collect::<Vec<_>>().join(" ")
}
