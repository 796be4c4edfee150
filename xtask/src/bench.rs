//! `cargo xtask bench`: the comparison with peers, and the charts and tables that `bench/report.py` makes from it.

use crate::steps::{Report, Trouble, must};
use crate::{python, root};
use std::process::Command;
use std::time::SystemTime;

/// The comparison writes its rows here, and beside it the same as tables for people.
const RESULTS: &str = "docs/lab/results/cpu.json";
const TABLES: &str = "docs/lab/results/cpu.md";

/// Runs the comparison and rewrites what quotes it. A target that is missed fails the step, and its number is quoted
/// all the same.
pub fn run(report: &mut Report, args: &[&str]) {
    let start = SystemTime::now();
    report.step("comparison with peers on the CPU", || {
        let python = python::with_peers()?;
        must(python::command(&python).args(["bench/cpu.py", "--json", RESULTS, "--md", TABLES]).args(args))
    });
    report.step("numbers in documents", || {
        let written = std::fs::metadata(root().join(TABLES)).and_then(|file| file.modified());
        if written.is_err() || written.is_ok_and(|written| written < start) {
            return Err(Trouble::skip("there is no new measurement"));
        }
        must(Command::new("python3").current_dir(root()).arg("bench/report.py"))
    });
}
