//! `cargo xtask bench`: the comparison with peers, and the numbers that documents quote from it.

use crate::steps::{Report, Trouble, must};
use crate::{markers, python, root};
use std::path::Path;
use std::time::SystemTime;

/// The comparison writes its rows here, and beside it the same as tables for people.
const RESULTS: &str = "docs/lab/results/cpu.json";
const TABLES: &str = "docs/lab/results/cpu.md";

/// Documents with a part called `cpu-results`.
const QUOTING: &[&str] = &["README.md"];

/// Runs the comparison and rewrites what quotes it. A bar that is missed fails the step, and its number is quoted
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
        let part = quoted(&read(&root().join(TABLES))?);
        QUOTING.iter().try_for_each(|document| quote(&root().join(document), &part))
    });
}

/// The paragraph that says where and how it was measured, the summary, and where the rest is.
fn quoted(tables: &str) -> String {
    let setting = tables.split("\n\n").find(|part| !part.starts_with('#')).unwrap_or_default();
    let summary = tables.split("\n## ").find_map(|part| part.strip_prefix("Summary\n")).unwrap_or_default();
    format!("{}\n\n{}\n\nAll cells: [{TABLES}]({TABLES}).", setting.trim(), summary.trim())
}

fn quote(document: &Path, part: &str) -> Result<(), Trouble> {
    let name = document.display();
    let text = markers::replace(&read(document)?, "cpu-results", part)
        .ok_or_else(|| Trouble::fail(format!("{name} has no part between `cpu-results` markers")))?;
    std::fs::write(document, text).map_err(|e| Trouble::fail(format!("{name}: {e}")))
}

fn read(path: &Path) -> Result<String, Trouble> {
    std::fs::read_to_string(path).map_err(|e| Trouble::fail(format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn documents_quote_setting_and_summary() {
        let tables = "# CPU, today\n\nA machine.\n\nMedians.\n\n## Forward\n\n| a |\n\n## Summary\n\n| b |\n\nMore.\n";
        let want = "A machine.\n\n| b |\n\nMore.\n\nAll cells: [docs/lab/results/cpu.md](docs/lab/results/cpu.md).";
        assert_eq!(quoted(tables), want);
    }
}
