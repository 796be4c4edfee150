//! `cargo xtask bench`: the comparison with peers, and the numbers that documents quote from it.

use crate::steps::{Report, Trouble, must};
use crate::{markers, python, root};
use std::path::Path;

/// The comparison writes its rows here, and beside it the same as a Markdown table.
const RESULTS: &str = "docs/lab/results/cpu.json";
const TABLE: &str = "docs/lab/results/cpu.md";

/// Documents with a part called `cpu-results`.
const QUOTING: &[&str] = &["README.md"];

/// Runs the comparison and rewrites what quotes it.
pub fn run(report: &mut Report, args: &[&str]) {
    let mut measured = false;
    report.step("comparison with peers on the CPU", || {
        let python = python::with_peers()?;
        let script = root().join("bench").join("cpu.py");
        must(python::command(&python).arg(script).args(["--json", RESULTS, "--markdown", TABLE]).args(args))?;
        measured = true;
        Ok(())
    });
    report.step("numbers in documents", || {
        if !measured {
            return Err(Trouble::skip("there is no new measurement"));
        }
        let table = std::fs::read_to_string(root().join(TABLE)).map_err(|e| Trouble::fail(format!("{TABLE}: {e}")))?;
        QUOTING.iter().try_for_each(|document| quote(&root().join(document), &table))
    });
}

fn quote(document: &Path, table: &str) -> Result<(), Trouble> {
    let name = document.display();
    let text = std::fs::read_to_string(document).map_err(|e| Trouble::fail(format!("{name}: {e}")))?;
    let text = markers::replace(&text, "cpu-results", table)
        .ok_or_else(|| Trouble::fail(format!("{name} has no part between `cpu-results` markers")))?;
    std::fs::write(document, text).map_err(|e| Trouble::fail(format!("{name}: {e}")))
}
