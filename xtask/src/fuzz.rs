//! Coverage-guided fuzzing on the stable toolchain: libFuzzer with plain code generation flags.

use crate::steps::{Report, Trouble, must};
use crate::{cargo, root, target};
use std::path::PathBuf;
use std::process::Command;

/// The binaries of the `fuzz` package.
const TARGETS: &[&str] = &["engine", "problem", "safetensors", "npy", "cache"];

/// libFuzzer is a part of the LLVM runtime that is only wired up here.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// What `cargo fuzz` passes as unstable sanitizer options, spelled as stable ones.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=1";

/// Reads `[TARGET] [--seconds N]`.
pub fn parse<'a>(args: &[&'a str]) -> Result<(Option<&'a str>, u64), String> {
    let (mut only, mut seconds) = (None, 60);
    let mut args = args.iter();
    while let Some(&arg) = args.next() {
        match arg {
            "--seconds" => {
                let given = args.next().ok_or("`--seconds` wants a number")?;
                seconds = given.parse().map_err(|_| format!("`--seconds` is {given}, allowed: a whole number"))?;
            }
            name if TARGETS.contains(&name) && only.is_none() => only = Some(name),
            other => return Err(format!("`{other}` is no fuzz target, allowed: {}", TARGETS.join(", "))),
        }
    }
    Ok((only, seconds))
}

/// Builds and runs one target, or each of them. What was found stays under the target folder.
pub fn run(report: &mut Report, only: Option<&str>, seconds: u64) {
    for name in TARGETS.iter().filter(|name| only.is_none_or(|only| only == **name)) {
        report.step(&format!("fuzz {name}, {seconds} s"), || fuzz(name, seconds));
    }
}

fn fuzz(name: &str, seconds: u64) -> Result<(), Trouble> {
    if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        return Err(Trouble::skip("libFuzzer is set up for x86-64 Linux only"));
    }
    let home = target().join("fuzz");
    let build = ["build", "--release", "--manifest-path", "fuzz/Cargo.toml", "--target", TRIPLE, "--bin", name];
    must(cargo(&build).env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", &home))?;
    let corpus = folder(home.join("corpus").join(name))?;
    let findings = folder(home.join("findings").join(name))?;
    let seeds = root().join("fuzz").join("seeds").join(name);
    let mut command = Command::new(home.join(TRIPLE).join("release").join(name));
    command.current_dir(root()).arg(&corpus);
    if seeds.is_dir() {
        command.arg(seeds);
    }
    command.arg(format!("-max_total_time={seconds}")).arg(format!("-artifact_prefix={}/", findings.display()));
    // The names of a cache's arrays alone take a kilobyte.
    command.arg(if name == "cache" { "-max_len=4096" } else { "-max_len=512" });
    must(command.args(["-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0"]))
}

fn folder(path: PathBuf) -> Result<PathBuf, Trouble> {
    std::fs::create_dir_all(&path).map_err(|e| Trouble::fail(format!("{}: {e}", path.display())))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn arguments() {
        assert_eq!(parse(&[]), Ok((None, 60)));
        assert_eq!(parse(&["problem", "--seconds", "5"]), Ok((Some("problem"), 5)));
        assert_eq!(
            parse(&["nothing"]).unwrap_err(),
            "`nothing` is no fuzz target, allowed: engine, problem, safetensors, npy, cache"
        );
        assert_eq!(parse(&["--seconds", "x"]).unwrap_err(), "`--seconds` is x, allowed: a whole number");
    }
}
