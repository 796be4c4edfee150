//! What the types of the kernel language forbid, with the messages that a reader gets.
//!
//! The wording is the compiler's and changes with it: the messages are compared with the compiler that wrote them.
//! `TRYBUILD=overwrite cargo test -p fulgurite-ptx --test all ui::` writes them anew.

use std::process::Command;

const WRITTEN_BY: &str = "rustc 1.95.";

#[test]
fn wrong_kernels_do_not_compile() {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    let version = String::from_utf8_lossy(&version);
    if !version.starts_with(WRITTEN_BY) {
        println!("skipped: the messages were written by {WRITTEN_BY}x, this is {}", version.trim());
        return;
    }
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
