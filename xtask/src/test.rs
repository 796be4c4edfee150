//! `cargo xtask test` and `cargo xtask ci`.

use crate::steps::{Report, Trouble, must, works};
use crate::{build_programs, cargo, fuzz, kernels, program, python, root, site};
use std::process::Command;

/// How much to test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// What every change must pass: minutes.
    Usual,
    /// Also what takes long or needs a large download.
    Long,
}

/// Type-checked in every run, executed under emulation in the long tests: the machines that run the tests are x86-64.
const ARM: &str = "aarch64-unknown-linux-gnu";

/// Fuzz targets in the long tests: that of the engines takes longest to come round.
const FUZZ: fuzz::Until = fuzz::Until::Seconds(60);
const FUZZ_ENGINE: fuzz::Until = fuzz::Until::Seconds(600);

/// Examples that the tests run, with arguments that keep them short.
const EXAMPLES: &[(&str, &[&str])] = &[
    ("attention", &[]),
    ("cluster_skip", &[]),
    ("kernel", &[]),
    ("key_selector", &[]),
    ("needle", &["--quick"]),
    ("score_modifier", &[]),
    ("train", &["--check-gradients"]),
    ("train", &["--steps", "60"]),
    ("train", &["--gated-delta", "40"]),
];

/// All tests.
pub fn run(report: &mut Report, extent: Extent) {
    let ptxas = kernels::assembler(report);
    report.step("unit and integration tests", || {
        let tests: &[&str] = if works(cargo(&["nextest", "--version"]).env_remove("CARGO_TERM_COLOR")) {
            &["nextest", "run", "--workspace"]
        } else {
            &["test", "--workspace", "--lib", "--bins", "--tests", "--no-fail-fast"]
        };
        must(&mut kernels::cargo_with(ptxas.as_ref(), tests))
    });
    report.step("documentation tests", || must(&mut cargo(&["test", "--workspace", "--doc", "--no-fail-fast"])));
    report.step("examples", || {
        build_programs()?;
        for (example, args) in EXAMPLES {
            must(program(&format!("examples/{example}")).args(*args))?;
        }
        Ok(())
    });
    report.step("dependencies: licences, bans, sources", || {
        if !works(&mut cargo(&["deny", "--version"])) {
            return Err(Trouble::skip("cargo-deny is not installed; `cargo install cargo-deny` takes a few minutes"));
        }
        must(&mut cargo(&["deny", "--all-features", "check", "bans", "licenses", "sources"]))
    });
    report.step("type check for AArch64", || {
        if !works(Command::new("rustup").current_dir(root()).args(["target", "add", ARM])) {
            return Err(Trouble::skip(format!("`rustup target add {ARM}` does not work here")));
        }
        must(&mut cargo(&["check", "--package", "fulgurite-cpu", "--target", ARM]))
    });
    report.step("Python tests", python::tests);
    if extent == Extent::Long {
        report.step("engines against the oracle on random problems", || {
            must(&mut cargo(&["run", "--release", "--package", "fulgurite-cli", "--", "check", "--long", "300"]))
        });
        report.step("random tests of engines and of kernels on the simulator: more seeds", || {
            let crates = ["fulgurite-sim", "fulgurite-cpu", "fulgurite-kernels", "fulgurite"];
            let mut command = kernels::cargo_with(ptxas.as_ref(), &["test", "--tests"]);
            must(command.args(crates.iter().flat_map(|name| ["--package", name])).env("FULGURITE_LONG", "1"))
        });
        report.step("NEON under emulation", neon);
        report.step("the wheel, installed where there is only NumPy", python::wheel_tests);
        report.step("the wheel against PyTorch and transformers", python::torch_tests);
        report.step("the site in a browser", site::build_and_browse);
        fuzz::run(report, None, FUZZ);
        fuzz::run(report, Some("engine"), FUZZ_ENGINE);
    }
}

/// Runs the CPU engine's tests for AArch64 under qemu: the only place where the NEON kernels execute.
fn neon() -> Result<(), Trouble> {
    let (linker, emulator) = ("aarch64-linux-gnu-gcc", "qemu-aarch64");
    for tool in [linker, emulator] {
        if !works(Command::new(tool).arg("--version")) {
            return Err(Trouble::skip(format!(
                "`{tool}` is not installed; on Debian: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
            )));
        }
    }
    for tests in [&["--lib"][..], &["--test", "all", "engine::"]] {
        must(
            cargo(&["test", "--package", "fulgurite-cpu", "--target", ARM])
                .args(tests)
                .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", linker)
                .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{emulator} -L /usr/aarch64-linux-gnu")),
        )?;
    }
    Ok(())
}

/// What CI runs: style first, because it is quick, then all tests.
pub fn ci(report: &mut Report) {
    report.step("format", || must(&mut cargo(&["fmt", "--all", "--check"])));
    report.step("clippy", || must(&mut cargo(&["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"])));
    report.step("docs", || must(cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "--deny warnings")));
    run(report, Extent::Usual);
}
