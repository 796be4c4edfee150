//! The text of kernels, kept in files: a change that should leave them alone is held to it, and one that does not shows
//! how in its diff.
//!
//! Rust lines (`.file`, `.loc`) are left out, so that moving code changes nothing. `UPDATE=1 cargo test -p
//! fulgurite-kernels --test all golden::` writes the files anew.

use fulgurite_kernels::registry;
use fulgurite_ptx::{Arch, Target};
use std::path::Path;

const GOLDEN: &[(&str, Target)] = &[("vector_add", Target::HOPPER), ("vector_add", Target::AMPERE)];

#[test]
fn text_is_as_it_was() {
    for &(name, target) in GOLDEN {
        let entry = registry::all().iter().find(|entry| entry.name == name).unwrap();
        let text = (entry.build)(target).unwrap().ptx();
        let places = |line: &&str| line.starts_with(".file ") || line.trim_start().starts_with(".loc ");
        let text: String = text.lines().filter(|line| !places(line)).map(|line| format!("{line}\n")).collect();
        let file = format!("{name}.{}.ptx", target.name());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(&file);
        if std::env::var_os("UPDATE").is_some_and(|update| update == "1") {
            std::fs::write(&path, &text).unwrap();
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        let differs = (1..).zip(kept.lines().zip(text.lines())).find(|(_, (kept, now))| kept != now);
        assert!(kept == text, "{file} differs, first at {differs:?}; if that is meant, run again with UPDATE=1");
    }
}

#[test]
fn instructions_lead_to_the_source_of_their_kernel() {
    for entry in registry::all() {
        let targets = [Target::HOPPER, Target::new(Arch::SM_100A)];
        let kernel = targets.into_iter().find_map(|target| (entry.build)(target).ok());
        let text = kernel.unwrap_or_else(|| panic!("{} has no target", entry.name)).ptx();
        let files: Vec<&str> = text.lines().filter(|line| line.starts_with(".file ")).collect();
        assert!(!files.is_empty(), "{}", entry.name);
        // A line of the language itself helps nobody who reads the assembler's messages or a profile.
        assert!(files.iter().all(|file| file.contains("crates/kernels/src")), "{}: {files:?}", entry.name);
    }
}
