//! A function that is longer than a screen or two is cut into parts that have names.

use std::fs;
use std::path::{Path, PathBuf};

/// Longest function of the libraries, in lines.
const MAX_LINES: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace holds xtask").to_path_buf()
}

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

/// First line and number of lines of each function. In formatted code a body ends at the first closing brace that is
/// indented like its `fn`.
fn functions(text: &str) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let is_fn = |line: &str| {
        let before = line.split_once("fn ").map(|(before, _)| before.trim());
        let word = |word: &str| ["const", "async", "unsafe", "extern", "\"C\"", "in"].contains(&word);
        let visibility = |word: &str| word.starts_with("pub") || word.ends_with(')');
        before.is_some_and(|before| before.split_whitespace().all(|w| word(w) || visibility(w)))
    };
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate().filter(|(_, line)| is_fn(line)) {
        let indent = &line[..line.len() - line.trim_start().len()];
        // The signature ends with the brace of the body, with a whole body, or in a trait without one.
        let signature = lines[start..].iter().position(|line| line.ends_with(['{', '}', ';'])).unwrap_or_default();
        let body = start + signature;
        let lines = match lines[body].ends_with('{') {
            true => lines[body..].iter().position(|line| line.strip_prefix(indent) == Some("}")).unwrap_or_default(),
            false => 0,
        };
        let lines = signature + lines + 1;
        found.push((start + 1, lines));
    }
    found
}

#[test]
fn no_function_is_too_long() {
    let mut files = Vec::new();
    for entry in fs::read_dir(root().join("crates")).expect("there are crates").flatten() {
        sources(&entry.path().join("src"), &mut files);
    }
    sources(&root().join("python/src"), &mut files);
    let (mut seen, mut long) = (0, Vec::new());
    for path in files {
        let text = fs::read_to_string(&path).expect("a source can be read");
        for (line, lines) in functions(&text) {
            seen += 1;
            if lines > MAX_LINES {
                long.push(format!("{}:{line} has {lines} lines", path.display()));
            }
        }
    }
    assert!(seen > 4000, "{seen} functions were found");
    assert!(long.is_empty(), "allowed: {MAX_LINES} lines\n{}", long.join("\n"));
}

/// The test sees functions of every form, and their ends.
#[test]
fn lengths_are_counted() {
    let text = "fn a() {\n    b();\n}\ntrait T {\n    fn c(\n        &self,\n    ) -> [u32; 3];\n    pub(crate) const unsafe fn d() -> u32 {\n        \
                if x {\n            1\n        }\n    }\n}\nfn e() {}\n// fn f\npub(in a) fn g(\n    x: u32,\n) {\n}\n";
    assert_eq!(functions(text), [(1, 3), (5, 3), (8, 5), (14, 1), (16, 4)]);
}
