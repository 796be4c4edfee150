//! Coverage-guided fuzzing on the stable toolchain: libFuzzer with plain code generation flags.

use crate::steps::{Report, Trouble, must};
use crate::{cargo, root, target};
use std::fmt;
use std::path::PathBuf;
use std::process::Command;

/// The binaries of the `fuzz` package.
const TARGETS: &[&str] = &["engine", "memory", "problem", "safetensors", "npy", "cache"];

/// libFuzzer is a part of the LLVM runtime that is only wired up here.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// What `cargo fuzz` passes as unstable sanitizer options, spelled as stable ones.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";

/// Targets that need only an engine, not the command with all of its crates.
const OF_ENGINES: &[&str] = &["engine", "problem"];

/// When a target has run long enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// This many seconds have passed.
    Seconds(u64),
    /// This many inputs have been tried.
    Runs(u64),
}

impl Until {
    fn argument(self) -> String {
        match self {
            Until::Seconds(n) => format!("-max_total_time={n}"),
            Until::Runs(n) => format!("-runs={n}"),
        }
    }
}

impl fmt::Display for Until {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Until::Seconds(n) => write!(f, "{n} s"),
            Until::Runs(n) => write!(f, "{n} runs"),
        }
    }
}

/// Reads `[TARGET] [--seconds N | --runs N]`.
pub fn parse<'a>(args: &[&'a str]) -> Result<(Option<&'a str>, Until), String> {
    let (mut only, mut until) = (None, Until::Seconds(60));
    let mut args = args.iter();
    while let Some(&arg) = args.next() {
        match arg {
            "--seconds" | "--runs" => {
                let given = args.next().ok_or_else(|| format!("`{arg}` wants a number"))?;
                let n = given.parse().map_err(|_| format!("`{arg}` is {given}, allowed: a whole number"))?;
                until = if arg == "--runs" { Until::Runs(n) } else { Until::Seconds(n) };
            }
            name if TARGETS.contains(&name) && only.is_none() => only = Some(name),
            other => return Err(format!("`{other}` is no fuzz target, allowed: {}", TARGETS.join(", "))),
        }
    }
    Ok((only, until))
}

/// Builds and runs one target, or each of them. What was found stays under the target folder.
pub fn run(report: &mut Report, only: Option<&str>, until: Until) {
    for name in TARGETS.iter().filter(|name| only.is_none_or(|only| only == **name)) {
        report.step(&format!("fuzz {name}, {until}"), || fuzz(name, until));
    }
}

/// The largest inputs: the names of a cache's arrays alone take a kilobyte, and a modifier takes some hundred bytes.
fn longest(name: &str) -> usize {
    if name == "cache" { 4096 } else { 512 }
}

fn fuzz(name: &str, until: Until) -> Result<(), Trouble> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err(Trouble::skip("libFuzzer is set up for x86-64 Linux only"));
    }
    let home = target().join("fuzz");
    let features: &[&str] = if OF_ENGINES.contains(&name) { &[] } else { &["--features", "command"] };
    let build = ["build", "--release", "--locked", "--manifest-path", "fuzz/Cargo.toml", "--target", TRIPLE, "--bin"];
    must(cargo(&build).arg(name).args(features).env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", &home))?;
    let corpus = folder(home.join("corpus").join(name))?;
    let findings = folder(home.join("findings").join(name))?;
    let seeds = root().join("fuzz").join("seeds").join(name);
    let mut command = Command::new(home.join(TRIPLE).join("release").join(name));
    command.current_dir(root()).arg(&corpus);
    if seeds.is_dir() {
        command.arg(seeds);
    }
    command.arg(until.argument()).arg(format!("-artifact_prefix={}/", findings.display()));
    command.arg(format!("-max_len={}", longest(name)));
    // From the start inputs may be as long as a whole problem; else they would be four bytes long for an hour.
    command.arg("-len_control=0");
    must(command.args(["-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0"]))
}

fn folder(path: PathBuf) -> Result<PathBuf, Trouble> {
    std::fs::create_dir_all(&path).map_err(|e| Trouble::fail(format!("{}: {e}", path.display())))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::{Until, parse};

    #[test]
    fn arguments() {
        assert_eq!(parse(&[]), Ok((None, Until::Seconds(60))));
        assert_eq!(parse(&["problem", "--seconds", "5"]), Ok((Some("problem"), Until::Seconds(5))));
        assert_eq!(parse(&["--runs", "7"]), Ok((None, Until::Runs(7))));
        assert_eq!(
            parse(&["nothing"]).unwrap_err(),
            "`nothing` is no fuzz target, allowed: engine, memory, problem, safetensors, npy, cache"
        );
        assert_eq!(parse(&["--seconds", "x"]).unwrap_err(), "`--seconds` is x, allowed: a whole number");
    }
}
