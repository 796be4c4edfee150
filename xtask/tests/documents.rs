//! Documents: links lead somewhere, and what is generated from result files is what those files say.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace holds xtask")
}

/// Markdown files of the repository.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "out", "shared", "node_modules"].contains(&&*name) {
                pages(&path, found);
            }
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// The text without fenced blocks and without code in lines: what looks like a link there is none.
fn prose(text: &str) -> String {
    let (mut kept, mut fenced) = (String::new(), false);
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            for (i, part) in line.split('`').enumerate() {
                kept.push_str(if i % 2 == 0 { part } else { "`" });
            }
        }
        kept.push('\n');
    }
    kept
}

/// (line, target) of each inline link or picture.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (i, line) in prose(text).lines().enumerate() {
        for (at, _) in line.match_indices("](") {
            if let Some(end) = line[at + 2..].find(')') {
                found.push((i + 1, line[at + 2..at + 2 + end].to_string()));
            }
        }
    }
    found
}

/// The names that headings can be linked by, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut found, mut fenced) = (BTreeSet::new(), false);
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        let title = line.trim_start_matches('#');
        if fenced || title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let name: String = title
            .trim()
            .to_lowercase()
            .chars()
            .filter_map(|c| match c {
                ' ' => Some('-'),
                c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
                _ => None,
            })
            .collect();
        found.insert(name);
    }
    found
}

/// What is wrong with the links of a page, given the texts of all pages by path.
fn broken(page: &Path, text: &str, texts: &BTreeMap<PathBuf, String>) -> Vec<String> {
    let mut faults = Vec::new();
    for (line, target) in links(text) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (file, anchor) = target.split_once('#').map_or((&*target, None), |(file, anchor)| (file, Some(anchor)));
        let path = if file.is_empty() { page.to_path_buf() } else { page.parent().unwrap_or(page).join(file) };
        let Ok(path) = path.canonicalize() else {
            faults.push(format!("{}:{line}: `{target}` does not exist", page.display()));
            continue;
        };
        let missing = |text: &String| anchor.is_some_and(|anchor| !anchors(text).contains(anchor));
        if texts.get(&path).is_some_and(missing) {
            faults.push(format!("{}:{line}: `{target}` names no heading of that page", page.display()));
        }
    }
    faults
}

#[test]
fn links_lead_somewhere() {
    let mut found = Vec::new();
    pages(&root().canonicalize().expect("the workspace exists"), &mut found);
    let read = |path: PathBuf| (path.clone(), std::fs::read_to_string(path).expect("a page is text"));
    let texts: BTreeMap<PathBuf, String> = found.into_iter().map(read).collect();
    assert!(texts.len() > 60, "{} pages were found", texts.len());
    let faults: Vec<String> = texts.iter().flat_map(|(page, text)| broken(page, text, &texts)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn broken_links_are_found() {
    let page = root().join("README.md").canonicalize().expect("there is a README");
    let text = "# A B\n[1](nowhere.md) [2](#a-b) [3](#c) `[4](x.md)`\n```\n[5](y.md)\n```\n[6](docs/lab/README.md)\n";
    let faults = broken(&page, text, &BTreeMap::from([(page.clone(), text.to_string())]));
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults[0].contains("nowhere.md") && faults[1].contains("`#c`"), "{faults:?}");
}

#[test]
fn charts_and_tables_are_those_of_the_result_files() {
    let Ok(done) = Command::new("python3").current_dir(root()).args(["-B", "bench/report.py", "--check"]).output()
    else {
        println!("skipped: there is no python3");
        return;
    };
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
}

/// The wheel carries copies: its manifest cannot name files above its folder.
#[test]
fn the_wheel_has_the_licences() {
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        let [ours, copy] = [root().join(name), root().join("python").join(name)].map(std::fs::read);
        assert_eq!(ours.expect("a licence"), copy.expect("a copy of it"), "python/{name} differs");
    }
}

/// The rows of ARCHITECTURE's walks of a call: the file, and the items that the call passes there.
fn walks(text: &str) -> Vec<Vec<(&str, Vec<&str>)>> {
    let sections = text.split("\n## ").filter(|section| section.starts_with("The walk of q"));
    let blocks = sections.filter_map(|section| section.split("```text\n").nth(1)?.split("```").next());
    blocks
        .map(|block| {
            let rows = block.lines().filter_map(|line| {
                let mut cells = line.split("  ").map(str::trim).filter(|cell| !cell.is_empty());
                Some((cells.next()?, cells.next()?.split(", ").collect()))
            });
            rows.collect()
        })
        .collect()
}

/// What is wrong with a walk: a file that does not exist or comes twice, an item that its file does not define.
fn missteps(walk: &[(&str, Vec<&str>)]) -> Vec<String> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    for (file, items) in walk {
        if !seen.insert(file) {
            found.push(format!("{file} comes twice"));
        }
        let Ok(source) = std::fs::read_to_string(root().join(file)) else {
            found.push(format!("there is no {file}"));
            continue;
        };
        for item in items {
            let name = item.rsplit("::").next().unwrap_or(item);
            let defines = ["fn ", "struct ", "trait ", "def ", "class "].iter().any(|kind| {
                source.match_indices(&format!("{kind}{name}")).any(|(at, found)| {
                    !source[at + found.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_')
                })
            });
            if !defines {
                found.push(format!("{file} does not define {item}"));
            }
        }
    }
    found
}

#[test]
fn the_walks_of_a_call_are_true_and_the_map_is_short() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let walks = walks(&text);
    assert_eq!(walks.len(), 2);
    for walk in &walks {
        assert!(walk.len() > 10, "{walk:?}");
        assert_eq!(missteps(walk), Vec::<String>::new());
    }
    assert!(text.lines().count() <= 200, "ARCHITECTURE.md has {} lines, allowed: 200", text.lines().count());
}

#[test]
fn missteps_are_found() {
    let here = "xtask/tests/documents.rs";
    let walk = [(here, vec!["missteps", "Nothing::of_the_kind"]), (here, vec!["roo"]), ("nowhere.rs", vec![])];
    let expected =
        ["does not define Nothing::of_the_kind", "comes twice", "does not define roo", "there is no nowhere.rs"];
    let found = missteps(&walk);
    assert_eq!(found.len(), expected.len(), "{found:?}");
    assert!(expected.iter().all(|text| found.iter().any(|line| line.contains(text))), "{found:?}");
}
