//! Tensors in files: one safetensors file, or a folder of npy files.

pub mod npy;
pub mod safetensors;

use crate::Failure;
use fulgurite::{DType, Tensor};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tensor as a file holds it.
#[derive(Debug, Clone, PartialEq)]
pub enum Stored {
    /// One of the types we compute with; 64-bit integers that fit arrive as 32-bit ones.
    Tensor(Tensor),
    /// Of another type, which is kept for the message.
    Other(String),
}

/// The tensors of a file by name.
pub type Tensors = BTreeMap<String, Stored>;

/// Reads a safetensors file or a folder of npy files.
pub fn read(path: &Path) -> Result<Tensors, Failure> {
    let name = path.display();
    if path.is_dir() {
        return npy::read_folder(path);
    }
    let bytes = std::fs::read(path).map_err(|e| Failure::input(format_args!("cannot read {name}: {}", reason(&e))))?;
    safetensors::decode(&bytes).map_err(|e| Failure::input(format_args!("{name}: {e}")))
}

/// How results are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// One file.
    Safetensors,
    /// A folder of npy files.
    Npy,
}

impl Format {
    /// What the path asks for: a name ending in `.safetensors`, or a folder.
    pub fn of(path: &Path) -> Result<Format, Failure> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("safetensors") if !path.is_dir() => Ok(Format::Safetensors),
            None => Ok(Format::Npy),
            _ if path.is_dir() => Ok(Format::Npy),
            Some(_) => Err(Failure::input(format_args!(
                "`--output` is {}, allowed: a name ending in .safetensors, or a folder for .npy files",
                path.display()
            ))),
        }
    }

    /// Refuses a type that the format cannot hold, before any work.
    pub fn holds(self, dtype: DType) -> Result<(), Failure> {
        match (self, dtype) {
            (Format::Npy, DType::Bf16) => Err(Failure::input(
                "results are bf16, which .npy does not have; write to a name ending in .safetensors",
            )),
            _ => Ok(()),
        }
    }
}

/// Writes tensors in the given format.
pub fn write(path: &Path, format: Format, tensors: &[(String, &Tensor)]) -> Result<(), Failure> {
    write_files(&encoded(path, format, tensors)?)
}

/// The files that tensors are written to, and their bytes.
pub fn encoded(path: &Path, format: Format, tensors: &[(String, &Tensor)]) -> Result<Vec<(PathBuf, Vec<u8>)>, Failure> {
    match format {
        Format::Safetensors => Ok(vec![(path.into(), safetensors::encode(tensors).map_err(Failure::work)?)]),
        Format::Npy => {
            let file = |name: &str| path.join(format!("{name}.npy"));
            let one =
                |(name, tensor): &(String, &Tensor)| Ok((file(name), npy::encode(tensor).map_err(Failure::work)?));
            tensors.iter().map(one).collect()
        }
    }
}

/// Writes a file, creating the folders above it.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    place(&[(path, bytes)])
}

/// Writes files, creating the folders above them. Each gets its name when all of them are written: where one cannot be,
/// what was there before stays.
pub fn write_files(files: &[(PathBuf, Vec<u8>)]) -> Result<(), Failure> {
    place(&files.iter().map(|(path, bytes)| (path.as_path(), &bytes[..])).collect::<Vec<_>>())
}

fn place(files: &[(&Path, &[u8])]) -> Result<(), Failure> {
    let failed = |path: &Path, e| Failure::work(format_args!("cannot write {}: {}", path.display(), reason(&e)));
    let mut parts = Parts(Vec::new());
    for &(path, bytes) in files {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|e| failed(path, e))?;
        }
        // A link stays one; a terminal or a pipe has no name to take over.
        let to = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
        if to.metadata().is_ok_and(|data| !data.is_file()) {
            std::fs::write(&to, bytes).map_err(|e| failed(path, e))?;
            continue;
        }
        let mut part = to.clone().into_os_string();
        part.push(format!(".{}.part", std::process::id()));
        parts.0.push((PathBuf::from(part), to));
        let (part, _) = &parts.0[parts.0.len() - 1];
        std::fs::write(part, bytes).map_err(|e| failed(path, e))?;
    }
    for (part, to) in &parts.0 {
        std::fs::rename(part, to).map_err(|e| failed(to, e))?;
    }
    Ok(())
}

/// Files under other names, and their own; what is left of them at the end is removed.
struct Parts(Vec<(PathBuf, PathBuf)>);

impl Drop for Parts {
    fn drop(&mut self) {
        self.0.iter().for_each(|(part, _)| _ = std::fs::remove_file(part));
    }
}

/// What went wrong, with a way out for the usual cases.
pub(crate) fn reason(e: &std::io::Error) -> String {
    use std::io::ErrorKind;
    match e.kind() {
        ErrorKind::NotFound => "no such file or folder; check the path".into(),
        ErrorKind::PermissionDenied => "permission denied; check who owns it".into(),
        _ => e.to_string(),
    }
}

/// 64-bit integers as a tensor of 32-bit ones, if they fit.
pub(crate) fn narrow(values: impl ExactSizeIterator<Item = i64>, shape: &[usize]) -> Result<Stored, String> {
    let narrowed: Result<Vec<i32>, _> = values.map(i32::try_from).collect();
    match narrowed {
        Ok(values) => Ok(Stored::Tensor(Tensor::new(values, shape).map_err(|e| e.to_string())?)),
        Err(_) => Ok(Stored::Other("i64 with values beyond 32 bits".into())),
    }
}
