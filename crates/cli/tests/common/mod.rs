//! The built command, folders to work in, tensors to work with.

#![allow(dead_code)] // each test file uses its own part

use fulgurite::{DType, Tensor};
use fulgurite_cli::io::{self, Format, Stored};
use fulgurite_core::random::Rng;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What a run of the command left behind.
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// Runs the command in a folder.
pub fn fulgurite(folder: &Path, args: &[&str]) -> Done {
    let output = Command::new(env!("CARGO_BIN_EXE_fulgurite")).args(args).current_dir(folder).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Done { code: output.status.code().expect("no signal"), out: text(output.stdout), err: text(output.stderr) }
}

/// Runs the command, which must succeed.
pub fn succeeds(folder: &Path, args: &[&str]) -> String {
    let done = fulgurite(folder, args);
    assert_eq!((done.code, done.err.as_str()), (0, ""), "{args:?}: {}", done.out);
    done.out
}

/// Runs the command, which must refuse its input with exactly this line.
pub fn refuses(folder: &Path, args: &[&str], line: &str) {
    let done = fulgurite(folder, args);
    assert_eq!((done.code, done.err.as_str()), (2, format!("error: {line}\n").as_str()), "{args:?}");
    assert_eq!(done.out, "", "{args:?}");
}

/// A fresh folder.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Normal numbers.
pub fn normal(rng: &mut Rng, dtype: DType, shape: &[usize]) -> Tensor {
    let values = rng.normals(shape.iter().product(), 1.0);
    Tensor::from_f64(dtype, &values, shape).unwrap()
}

/// Writes tensors to `folder/name`.
pub fn write(folder: &Path, name: &str, tensors: &[(&str, &Tensor)]) {
    let path = folder.join(name);
    let format = Format::of(&path).unwrap();
    let named: Vec<(String, &Tensor)> = tensors.iter().map(|(name, tensor)| (name.to_string(), *tensor)).collect();
    io::write(&path, format, &named).unwrap();
}

/// Reads one tensor of `folder/name`.
pub fn read(folder: &Path, name: &str, tensor: &str) -> Tensor {
    let mut all = io::read(&folder.join(name)).unwrap();
    match all.remove(tensor) {
        Some(Stored::Tensor(tensor)) => tensor,
        other => panic!("{name} has {other:?} for {tensor}, and {:?}", all.keys()),
    }
}
