//! Libraries read no environment variable: their callers, the command and the Python package, say what they need.

use std::fs;
use std::path::{Path, PathBuf};

/// Crates that may read the environment: the two front ends and this tool.
const MAY_READ: [&str; 3] = ["crates/cli", "python", "xtask"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace holds xtask")
}

/// Rust files under a folder.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
}

/// Lines of a source that read an environment variable at run time.
fn reads(text: &str) -> Vec<usize> {
    let reads = |line: &str| ["env::var(", "env::var_os(", "env::vars("].iter().any(|call| line.contains(call));
    text.lines().enumerate().filter(|(_, line)| reads(line)).map(|(i, _)| i + 1).collect()
}

#[test]
fn only_front_ends_read_the_environment() {
    let mut libraries = Vec::new();
    for entry in fs::read_dir(root().join("crates")).expect("there are crates").flatten() {
        let allowed = MAY_READ.iter().any(|folder| root().join(folder) == entry.path());
        if !allowed {
            sources(&entry.path().join("src"), &mut libraries);
        }
    }
    assert!(libraries.len() > 100, "{} sources were found", libraries.len());
    for path in libraries {
        let lines = reads(&fs::read_to_string(&path).expect("a source can be read"));
        assert!(
            lines.is_empty(),
            "{} reads the environment in lines {lines:?}; take it as an argument",
            path.display()
        );
    }
}

/// The test finds what it looks for.
#[test]
fn reading_is_found() {
    let text = "let a = std::env::temp_dir();\nlet b = std::env::var_os(\"HOME\");\nlet c = env::var(name);";
    assert_eq!(reads(text), [2, 3]);
}
