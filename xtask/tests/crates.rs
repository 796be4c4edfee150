//! The rules of the workspace, read from its manifests: which crate may use which, which crates from outside, and where
//! `unsafe` is forbidden. A new arrow is a decision, and this is the place to write it down.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The dependencies that a crate may have.
struct CrateRule {
    /// The package.
    name: &'static str,
    /// Its folder.
    folder: &'static str,
    /// Crates it may use, in code and in tests.
    uses: &'static [&'static str],
    /// Crates that only its tests may use.
    in_tests: &'static [&'static str],
    /// Whether `unsafe` is forbidden in it.
    forbids_unsafe: bool,
}

const CRATES: &[CrateRule] = &[
    CrateRule { name: "fulgurite-core", folder: "crates/core", uses: &[], in_tests: &[], forbids_unsafe: true },
    CrateRule { name: "fulgurite-ptx", folder: "crates/ptx", uses: &[], in_tests: &[], forbids_unsafe: true },
    CrateRule {
        name: "fulgurite-cpu",
        folder: "crates/cpu",
        uses: &["fulgurite-core"],
        in_tests: &[],
        forbids_unsafe: false,
    },
    CrateRule {
        name: "fulgurite-neighbors",
        folder: "crates/neighbors",
        uses: &["fulgurite-core", "fulgurite-cpu"],
        in_tests: &[],
        forbids_unsafe: true,
    },
    CrateRule {
        name: "fulgurite-sim",
        folder: "crates/sim",
        uses: &["fulgurite-ptx"],
        in_tests: &["fulgurite-core", "fulgurite-kernels"],
        // One leaf, `sums`: a function compiled for wider vectors can be called no other way.
        forbids_unsafe: false,
    },
    CrateRule {
        name: "fulgurite-cuda",
        folder: "crates/cuda",
        uses: &["fulgurite-ptx"],
        in_tests: &["fulgurite-kernels"],
        forbids_unsafe: false,
    },
    CrateRule {
        name: "fulgurite-kernels",
        folder: "crates/kernels",
        uses: &["fulgurite-core", "fulgurite-ptx"],
        in_tests: &["fulgurite-sim"],
        forbids_unsafe: true,
    },
    CrateRule {
        name: "fulgurite",
        folder: "crates/fulgurite",
        uses: &[
            "fulgurite-core",
            "fulgurite-ptx",
            "fulgurite-cpu",
            "fulgurite-sim",
            "fulgurite-cuda",
            "fulgurite-kernels",
            "fulgurite-neighbors",
        ],
        in_tests: &[],
        forbids_unsafe: true,
    },
    CrateRule {
        name: "fulgurite-cli",
        folder: "crates/cli",
        uses: &["fulgurite", "fulgurite-core"],
        in_tests: &[],
        forbids_unsafe: true,
    },
    CrateRule {
        name: "fulgurite-python",
        folder: "python",
        uses: &["fulgurite", "fulgurite-core"],
        in_tests: &[],
        forbids_unsafe: false,
    },
    CrateRule {
        name: "fulgurite-guide",
        folder: "docs",
        uses: &["fulgurite", "fulgurite-ptx"],
        in_tests: &[],
        forbids_unsafe: true,
    },
    CrateRule { name: "fulgurite-site", folder: "site", uses: &["fulgurite"], in_tests: &[], forbids_unsafe: true },
    CrateRule { name: "xtask", folder: "xtask", uses: &[], in_tests: &[], forbids_unsafe: true },
];

/// The crates at the bottom, and the crates from outside that they may use besides the standard library.
const BASE_CRATES: [&str; 2] = ["fulgurite-core", "fulgurite-ptx"];
const BASE_CRATES_USE: [&str; 2] = ["half", "thiserror"];

#[derive(Debug, Clone, PartialEq, Eq)]
struct Dependency {
    name: String,
    only_in_tests: bool,
}

/// The dependencies a manifest names. Reads the two forms this workspace uses: `name = ...` lines in a
/// dependency table and `[dependencies.name]` tables; a rename counts under the package's own name.
fn dependencies(manifest: &str) -> Vec<Dependency> {
    let mut found: Vec<Dependency> = Vec::new();
    let mut table: Option<bool> = None;
    for line in manifest.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(header) = line.strip_prefix('[') {
            let header = header.trim_matches(['[', ']']);
            let parts: Vec<&str> = header.split('.').collect();
            let kind = parts.iter().position(|part| part.ends_with("dependencies"));
            table = kind.map(|at| parts[at].starts_with("dev"));
            if let (Some(at), Some(only_in_tests)) = (kind, table)
                && let Some(name) = parts.get(at + 1)
            {
                found.push(Dependency { name: name.to_string(), only_in_tests });
                table = None;
            }
        } else if let (Some(only_in_tests), Some((key, value))) = (table, line.split_once('=')) {
            let renamed = value.split_once("package = \"").and_then(|(_, rest)| rest.split('"').next());
            let key = key.trim().split('.').next().unwrap_or_default().trim_matches('"');
            found.push(Dependency { name: renamed.unwrap_or(key).to_string(), only_in_tests });
        }
    }
    found
}

/// Everything that is wrong with the arrows of one manifest.
fn faults(rule: &CrateRule, manifest: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for dependency in dependencies(manifest) {
        let name = dependency.name.as_str();
        let known = CRATES.iter().any(|other| other.name == name);
        let allowed = rule.uses.contains(&name)
            || dependency.only_in_tests && (rule.in_tests.contains(&name) || name == rule.name);
        if (known || name.starts_with("fulgurite")) && !allowed {
            faults.push(format!("{} uses {name}, allowed: {:?}", rule.name, rule.uses));
        }
        let ground = BASE_CRATES.contains(&rule.name) && !dependency.only_in_tests;
        if ground && !known && !BASE_CRATES_USE.contains(&name) {
            faults.push(format!("{} uses {name}, allowed from outside: {BASE_CRATES_USE:?}", rule.name));
        }
    }
    faults
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The crates that exist so far.
fn built() -> impl Iterator<Item = (&'static CrateRule, PathBuf)> {
    CRATES.iter().map(|rule| (rule, root().join(rule.folder))).filter(|(_, folder)| folder.join("Cargo.toml").exists())
}

#[test]
fn arrows_point_one_way() {
    let faults: Vec<String> =
        built().flat_map(|(rule, folder)| faults(rule, &read(&folder.join("Cargo.toml")))).collect();
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn every_crate_is_a_room() {
    for entry in std::fs::read_dir(root().join("crates")).unwrap() {
        let manifest = entry.unwrap().path().join("Cargo.toml");
        if manifest.exists() {
            let text = read(&manifest);
            let known = CRATES.iter().any(|rule| text.contains(&format!("name = \"{}\"", rule.name)));
            assert!(known, "{} is no rule of the house; add it to CRATES", manifest.display());
        }
    }
}

#[test]
fn unsafe_is_forbidden_outside_the_leaves() {
    for (rule, folder) in built().filter(|(rule, _)| rule.forbids_unsafe) {
        for source in
            ["src/lib.rs", "src/main.rs", "lib.rs"].map(|file| folder.join(file)).iter().filter(|file| file.exists())
        {
            let forbids = read(source).contains("#![forbid(unsafe_code)]");
            assert!(forbids, "{} of {} does not forbid unsafe code", source.display(), rule.name);
        }
    }
}

/// A file that its crate's one test program does not name would never run.
#[test]
fn every_test_file_is_in_its_program() {
    for (rule, folder) in built() {
        let Ok(files) = std::fs::read_dir(folder.join("tests")) else { continue };
        let program = std::fs::read_to_string(folder.join("tests/all.rs")).unwrap_or_default();
        let is_module = |file: &PathBuf| file.extension() == Some("rs".as_ref()) || file.join("mod.rs").exists();
        for file in files.map(|file| file.unwrap().path()).filter(is_module) {
            let name = file.file_stem().unwrap().to_string_lossy().into_owned();
            let named = name == "all" || program.lines().any(|line| line == format!("mod {name};"));
            assert!(named, "{}: `mod {name};` is missing in tests/all.rs of {}", file.display(), rule.name);
        }
    }
}

#[test]
fn every_dependency_is_named_with_its_reason() {
    let architecture = read(&root().join("ARCHITECTURE.md"));
    let outside: BTreeSet<String> = built()
        .flat_map(|(_, folder)| dependencies(&read(&folder.join("Cargo.toml"))))
        .map(|dependency| dependency.name)
        .filter(|name| !CRATES.iter().any(|rule| rule.name == name))
        .collect();
    // The first cell of each row that names crates.
    let table = architecture.lines().filter(|line| line.starts_with("| `")).filter_map(|line| line.split('|').nth(1));
    let unnamed: Vec<&String> =
        outside.iter().filter(|name| !table.clone().any(|line| line.contains(&format!("`{name}`")))).collect();
    assert!(unnamed.is_empty(), "not in the table of ARCHITECTURE.md: {unnamed:?}");
}

#[test]
fn planted_arrows_are_caught() {
    let rule = |name: &str| CRATES.iter().find(|rule| rule.name == name).unwrap();
    let cases = [
        ("fulgurite-core", "[dependencies]\nhalf.workspace = true\n", 0),
        ("fulgurite-core", "[dependencies]\nfulgurite-cpu.workspace = true\n", 1),
        ("fulgurite-core", "[dependencies]\nrayon = \"1\"\n", 1),
        ("fulgurite-core", "[dev-dependencies]\nproptest.workspace = true\n", 0),
        ("fulgurite-core", "[dev-dependencies]\nfulgurite-cpu.workspace = true\n", 1),
        ("fulgurite-cpu", "[dependencies.fulgurite-ptx]\nworkspace = true\n", 1),
        ("fulgurite-cpu", "[target.'cfg(unix)'.dependencies]\nx = { package = \"fulgurite-sim\", path = \"\" }\n", 1),
        ("fulgurite-cpu", "[features]\nfulgurite-sim = []\n", 0),
        ("fulgurite-kernels", "[dev-dependencies]\nfulgurite-sim.workspace = true\n", 0),
        ("fulgurite-kernels", "[dependencies]\nfulgurite-sim.workspace = true\n", 1),
        ("fulgurite-cli", "[dependencies]\nfulgurite.workspace = true\nclap.workspace = true\n", 0),
        ("fulgurite-cli", "[dependencies]\nfulgurite-core.workspace = true\n", 0),
        ("fulgurite-cli", "[dependencies]\nfulgurite-cpu.workspace = true\n", 1),
        ("xtask", "[build-dependencies]\nfulgurite-unheard-of = \"1\"\n", 1),
    ];
    for (name, manifest, wrong) in cases {
        let found = faults(rule(name), manifest);
        assert_eq!(found.len(), wrong, "{name}: {manifest}{found:?}");
    }
}

#[test]
fn the_readme_shows_the_example() {
    let example = read(&root().join("examples/attention.rs"));
    let (_, code) = example.split_once("\n\n").expect("a header, then code");
    assert!(read(&root().join("README.md")).contains(code.trim_end()), "README differs from examples/attention.rs");
}

/// The dependencies that a lock file lists for a package of this workspace.
fn locked(lock: &str, package: &str) -> BTreeSet<String> {
    let block = lock.split("[[package]]").find(|block| block.contains(&format!("\nname = \"{package}\"\n")));
    let list = block.and_then(|block| block.split_once("dependencies = [")).map_or("", |(_, rest)| rest);
    let names = list.split(']').next().unwrap_or_default().split('"').skip(1).step_by(2);
    names.map(|name| name.split(' ').next().unwrap_or_default().to_string()).collect()
}

/// Packages outside the workspace have locks of their own, which nothing rewrites when a crate that they use changes.
#[test]
fn locks_of_other_packages_are_fresh() {
    for folder in ["fuzz", "bench/candle"] {
        let path = root().join(folder).join("Cargo.lock");
        let lock = read(&path);
        for rule in CRATES.iter().filter(|rule| lock.contains(&format!("\nname = \"{}\"\n", rule.name))) {
            let manifest = read(&root().join(rule.folder).join("Cargo.toml"));
            let is_optional =
                |name: &str| manifest.lines().any(|line| line.starts_with(name) && line.contains("optional = true"));
            let all = dependencies(&manifest).into_iter().filter(|one| !one.only_in_tests && !is_optional(&one.name));
            let want: BTreeSet<String> = all.map(|one| one.name).collect();
            let hint = format!("`cargo metadata --manifest-path {folder}/Cargo.toml` writes it again");
            assert_eq!(locked(&lock, rule.name), want, "{} in {}; {hint}", rule.name, path.display());
        }
    }
}
