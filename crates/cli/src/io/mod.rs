//! Tensors in files: one safetensors file, or a folder of npy files.

pub mod npy;
pub mod safetensors;
mod stored;

pub(crate) use stored::reason;
pub use stored::{Stored, Tensors};

use crate::Failure;
use fulgurite::{DType, Tensor};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

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
    /// The format of a path: a name ending in `.safetensors`, or a folder.
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
    replace_files(&[(path, bytes)])
}

/// Writes files, creating the folders above them. Each gets its name when all of them are written: where one cannot be,
/// what was there before stays.
pub fn write_files(files: &[(PathBuf, Vec<u8>)]) -> Result<(), Failure> {
    replace_files(&files.iter().map(|(path, bytes)| (path.as_path(), &bytes[..])).collect::<Vec<_>>())
}

/// Refuses an output that cannot be written, before any work.
pub fn can_write(path: &Path, format: Format) -> Result<(), Failure> {
    let file = match format {
        Format::Safetensors => path.to_path_buf(),
        Format::Npy => path.join("o.npy"),
    };
    Parts(Vec::new()).begin(&file).map(|_| ())
}

fn failed(path: &Path, e: &std::io::Error) -> Failure {
    Failure::work(format_args!("cannot write {}: {}", path.display(), reason(e)))
}

fn replace_files(files: &[(&Path, &[u8])]) -> Result<(), Failure> {
    let mut names: Vec<PathBuf> = files.iter().map(|(path, _)| target(path)).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let text = format_args!("{} would be written twice, allowed: a name for each output", twice[0].display());
        return Err(Failure::input(text));
    }
    let mut parts = Parts(Vec::new());
    for &(path, bytes) in files {
        let Some(mut file) = parts.begin(path)? else {
            // A terminal or a pipe has no name to take over.
            std::fs::write(target(path), bytes).map_err(|e| failed(path, &e))?;
            continue;
        };
        // On the disk before it gets its name: else a power cut leaves an empty file under it.
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|e| failed(path, &e))?;
    }
    for (part, to) in &parts.0 {
        std::fs::rename(part, to).map_err(|e| failed(to, &e))?;
    }
    Ok(())
}

/// Where a path leads: a link stays a link, also one to a file that does not exist yet.
fn target(path: &Path) -> PathBuf {
    let mut path = path.to_path_buf();
    for _ in 0..40 {
        let Ok(next) = std::fs::read_link(&path) else { break };
        path = path.parent().map_or_else(|| next.clone(), |folder| folder.join(&next));
    }
    std::fs::canonicalize(&path).unwrap_or(path)
}

/// Temporary files and their final names; those that still exist at the end are removed.
struct Parts(Vec<(PathBuf, PathBuf)>);

impl Parts {
    /// Creates a file beside the one that it is to replace, with the same mode; `None` where that is no file. What a process
    /// that was ended left there is removed.
    fn begin(&mut self, path: &Path) -> Result<Option<File>, Failure> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|e| failed(path, &e))?;
        }
        let to = target(path);
        let before = to.metadata().ok();
        if before.as_ref().is_some_and(|data| data.is_dir()) {
            return Err(Failure::input(format_args!("cannot write {}: it is a folder", path.display())));
        }
        if before.as_ref().is_some_and(|data| !data.is_file()) {
            return Ok(None);
        }
        remove_left(&to);
        let mut part = to.clone().into_os_string();
        part.push(format!(".{}.part", std::process::id()));
        self.0.push((PathBuf::from(part), to));
        let (part, _) = &self.0[self.0.len() - 1];
        let file = File::create(part).map_err(|e| failed(path, &e))?;
        if let Some(data) = before {
            file.set_permissions(data.permissions()).map_err(|e| failed(path, &e))?;
        }
        Ok(Some(file))
    }
}

/// Removes temporary files beside a file that earlier processes left when they ended early.
fn remove_left(to: &Path) {
    let (Some(folder), Some(name)) = (to.parent(), to.file_name().and_then(|name| name.to_str())) else { return };
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let processes = Path::new("/proc/self").exists();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let own = entry.file_name();
        let number = own.to_str().and_then(|own| own.strip_prefix(name)?.strip_prefix('.')?.strip_suffix(".part"));
        if let Some(number) = number.and_then(|n| n.parse::<u32>().ok())
            && processes
            && !Path::new("/proc").join(number.to_string()).exists()
        {
            _ = std::fs::remove_file(entry.path());
        }
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.0.iter().for_each(|(part, _)| _ = std::fs::remove_file(part));
    }
}
