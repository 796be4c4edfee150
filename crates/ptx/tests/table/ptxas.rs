//! The assembler, where there is one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// `$PTXAS`, one on the path, or one that was installed into a virtual environment of the workspace.
pub fn find() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("PTXAS") {
        return Some(named.into());
    }
    let on_path = std::env::var_os("PATH").and_then(|path| {
        std::env::split_paths(&path).map(|folder| folder.join("ptxas")).find(|candidate| candidate.is_file())
    });
    on_path.or_else(|| {
        let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
        let environments = entries(&target).into_iter().filter(|path| named(path, "venv"));
        let libraries = environments.flat_map(|path| entries(&path.join("lib"))).filter(|path| named(path, "python"));
        libraries.map(|path| path.join("site-packages/nvidia/cu13/bin/ptxas")).find(|path| path.is_file())
    })
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let Ok(found) = std::fs::read_dir(folder) else { return Vec::new() };
    found.flatten().map(|entry| entry.path()).collect()
}
fn named(path: &Path, start: &str) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
}

/// What it has against a text, warnings and broken pipelines of products (C75xx) included: line, if it names one, and
/// message.
pub fn complaints(ptxas: &Path, target: &str, text: &str) -> Vec<(usize, String)> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let stem = format!("{target}-{}", COUNT.fetch_add(1, Ordering::Relaxed));
    let (source, object) = (folder.join(format!("{stem}.ptx")), folder.join(format!("{stem}.cubin")));
    std::fs::write(&source, text).expect("the folder for temporary files can be written");
    let output = Command::new(ptxas)
        .args(["-arch", target, "-o"])
        .args([&object, &source])
        .output()
        .expect("ptxas can be started");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let complaints: Vec<(usize, String)> = said
        .lines()
        .filter(|line| ["error ", "warning ", "fatal ", "(C75"].iter().any(|sign| line.contains(sign)))
        .map(|line| {
            let digits = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>();
            let number = line.split("line ").nth(1).and_then(|rest| digits(rest).parse().ok());
            (number.unwrap_or(0), line.split("; ").nth(1).unwrap_or(line).to_owned())
        })
        .collect();
    assert!(output.status.success() || !complaints.is_empty(), "{}: {said}", source.display());
    complaints
}
