//! NVIDIA's assembler for the tests that want it, and the fingerprints of kernels.

use crate::cargo;
use crate::python;
use crate::steps::{Report, Trouble, must, works};
use std::path::PathBuf;
use std::process::Command;

/// The variable by which tests and the command are told where the assembler is.
const VARIABLE: &str = "PTXAS";

/// Where the assembler is: what the variable names, or what the package index gives. `None` where a step was
/// skipped or failed for want of it.
pub fn assembler(report: &mut Report) -> Option<PathBuf> {
    let mut found = None;
    report.step("the assembler of GPU kernels", || {
        let path = match std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) if works(Command::new(&path).arg("--version")) => PathBuf::from(path),
            Some(path) => return Err(Trouble::fail(format!("{VARIABLE} is {}, which does not run", path.display()))),
            // CI installs the assembler: without it whole suites would pass by skipping everything.
            None => python::assembler().map_err(|trouble| match trouble {
                Trouble::Skip(why) if is_ci(std::env::var("CI").ok().as_deref()) => Trouble::Fail(why),
                trouble => trouble,
            })?,
        };
        println!("{VARIABLE}={}", path.display());
        found = Some(path);
        Ok(())
    });
    found
}

/// Whether the variable `CI` says that this is a CI service.
fn is_ci(variable: Option<&str>) -> bool {
    !matches!(variable, None | Some("" | "0" | "false"))
}

/// A command of cargo whose tests know where the assembler is.
pub fn cargo_with(ptxas: Option<&PathBuf>, args: &[&str]) -> Command {
    let mut command = cargo(args);
    command.envs(ptxas.map(|path| (VARIABLE, path)));
    command
}

/// What `cargo xtask fingerprints` was asked for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Fingerprints<'a> {
    /// Accept the kernels as they are now.
    update: bool,
    /// Write all texts and launches into this folder.
    texts: Option<&'a str>,
}

/// Reads `[--update] [--texts DIR]`.
pub fn parse<'a>(args: &[&'a str]) -> Result<Fingerprints<'a>, String> {
    let mut options = Fingerprints::default();
    let mut args = args.iter();
    while let Some(&arg) = args.next() {
        match arg {
            "--update" => options.update = true,
            "--texts" => options.texts = Some(args.next().ok_or("`--texts` wants a folder")?),
            other => return Err(format!("`{other}` is no option, allowed: --update, --texts DIR")),
        }
    }
    Ok(options)
}

/// Compares every kernel's text and launch arguments with the accepted ones, and names those that differ.
pub fn fingerprints(options: &Fingerprints<'_>) -> Result<(), Trouble> {
    let mut command = cargo(&["test", "--quiet", "-p", "fulgurite-kernels", "--test", "all", "fingerprints::"]);
    if options.update {
        command.env("UPDATE", "1");
    }
    if let Some(folder) = options.texts {
        command.env("FULGURITE_TEXTS", std::env::current_dir().map_err(Trouble::fail)?.join(folder));
    }
    must(&mut command)
}

#[cfg(test)]
mod tests {
    use super::{Fingerprints, is_ci, parse};

    #[test]
    fn a_ci_service_is_known_by_its_variable() {
        assert!(is_ci(Some("true")) && is_ci(Some("1")));
        assert!(!is_ci(None) && !is_ci(Some("")) && !is_ci(Some("false")) && !is_ci(Some("0")));
    }

    /// The script that CI runs is CI on every machine.
    #[test]
    fn the_script_of_ci_says_that_it_is_ci() {
        let script = std::fs::read_to_string(crate::root().join(".ci/run")).unwrap();
        assert!(script.contains("export CI=\"${CI:-true}\""));
    }

    #[test]
    fn arguments() {
        assert_eq!(parse(&[]), Ok(Fingerprints::default()));
        assert_eq!(parse(&["--update", "--texts", "a"]), Ok(Fingerprints { update: true, texts: Some("a") }));
        assert_eq!(parse(&["--texts"]).unwrap_err(), "`--texts` wants a folder");
        assert_eq!(parse(&["x"]).unwrap_err(), "`x` is no option, allowed: --update, --texts DIR");
    }
}
