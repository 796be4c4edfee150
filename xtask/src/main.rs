//! What people and CI run: `cargo xtask test | ci | bench | fuzz | fingerprints | site | wheel`.
//!
//! Everything that a task needs beyond a Rust toolchain is installed under the target folder. A step whose
//! tool cannot be had is skipped with the reason; a step that runs and fails fails the task.

#![forbid(unsafe_code)]

mod bench;
mod fuzz;
mod kernels;
mod python;
mod site;
mod steps;
mod test;
mod wheels;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "\
usage: cargo xtask <task>

  test [--long]                       all tests; --long adds random grids, fuzzing, the wheel and PyTorch
  ci                                  format, clippy and docs with warnings denied, then test
  bench [-- ARGS]                     the comparison with peers; rewrites docs/lab/results and the numbers in README
  fuzz [TARGET] [--seconds N | --runs N]
                                      a fuzz target, or all of them, for N seconds each (default 60) or N inputs
  fingerprints [--update] [--texts DIR]
                                      names the GPU kernels that a change altered; --update accepts them
  site [--test [FOLDER]]              all documentation and the live pages, in target/site; needs no network.
                                      --test opens every page in Chromium, or those of a built FOLDER
  wheel                               the Python wheel, in target/wheels, tested where it is installed
  wheel --all [TEXT]                  wheels for Linux, macOS and Windows in target/wheels, checked as far as possible here;
                                      with TEXT only those whose target contains it
";

/// The root of the repository.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("xtask lies in the repository")
}

/// Where cargo builds, and where tools are installed.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The cargo that runs this, in the root of the repository.
fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(args);
    command
}

/// The workspace's programs as the tests have them, built together: one package alone would be built with other features
/// of its dependencies, and these with it.
fn build_programs() -> Result<(), steps::Trouble> {
    steps::must(&mut cargo(&["build", "--workspace", "--bins", "--examples"]))
}

/// A program that [`build_programs`] has built, by its place under the folder of the profile.
fn program(place: &str) -> Command {
    let mut command = Command::new(target().join("debug").join(format!("{place}{}", std::env::consts::EXE_SUFFIX)));
    command.current_dir(root());
    command
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut report = steps::Report::default();
    match args[..] {
        ["test"] => test::run(&mut report, test::Extent::Usual),
        ["test", "--long"] => test::run(&mut report, test::Extent::Long),
        ["ci"] => test::ci(&mut report),
        ["bench"] => bench::run(&mut report, &[]),
        ["bench", "--", ref rest @ ..] => bench::run(&mut report, rest),
        ["fuzz", ref rest @ ..] => match fuzz::parse(rest) {
            Ok((target, until)) => fuzz::run(&mut report, target, until),
            Err(why) => return usage(&why),
        },
        ["fingerprints", ref rest @ ..] => match kernels::parse(rest) {
            Ok(options) => report.step("kernels that changed", || kernels::fingerprints(&options)),
            Err(why) => return usage(&why),
        },
        ["site"] => report.step("the site", site::build),
        ["site", "--test"] => report.step("the site in a browser", site::build_and_browse),
        ["site", "--test", folder] => report.step("the site in a browser", || site::browse(Path::new(folder))),
        ["wheel"] => report.step("the wheel, installed where there is only NumPy", python::wheel_tests),
        ["wheel", "--all"] => wheels::run(&mut report, None),
        ["wheel", "--all", only] => wheels::run(&mut report, Some(only)),
        ["help" | "--help" | "-h"] => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        [] => return usage("no task was given"),
        _ => return usage(&format!("`{}` is no task", args.join(" "))),
    }
    report.finish()
}

fn usage(why: &str) -> ExitCode {
    eprintln!("xtask: {why}\n\n{USAGE}");
    ExitCode::from(2)
}
