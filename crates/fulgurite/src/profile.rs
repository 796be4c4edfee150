//! Profiles: files with tile configurations that were measured on a GPU and are faster there than the built-in ones.
//!
//! ```text
//! fulgurite profile 1
//! gpu NVIDIA H200
//! use head_dims 65..128 keys 0..1024: groups=2 cols=128 depth=2 end=joined registers=232:40 early=2
//! tried head_dim 128 length 512 1.0132: groups=2 cols=128 depth=2 end=joined registers=232:40 early=2
//! use backward head_dims 65..128 keys 0..1024: share=keys rows=64 adds=engine depth=2 key_depth=1 registers=240:24 ..
//! ```
//!
//! `use` lines hold the configurations to use; `tried` lines hold the measurements of a search, so that it can resume.
//! Lines of the gradients contain the word `backward`. Key ranges exclude their end, head-dimension ranges include it.

use fulgurite_cuda::default_cache_dir;
use fulgurite_kernels::attention::backward::BackwardConfig;
use fulgurite_kernels::attention::forward::plan::{ConfigRow, ConfigTable, ForwardConfig, TileConfig};
pub use fulgurite_kernels::operator::Tables;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::{fs, io};
use thiserror::Error;

/// The fastest tile configurations measured on a GPU.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Profile {
    /// Name of the GPU.
    pub gpu: String,
    /// Measurements of forward attention.
    pub forward: Measured<ForwardConfig>,
    /// Measurements of the gradients.
    pub backward: Measured<BackwardConfig>,
}

/// The measurements of a pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured<T> {
    /// Configurations to use.
    pub rows: Vec<ConfigRow<T>>,
    /// Configurations that a search has measured.
    pub tried: Vec<Tried<T>>,
}

impl<T> Default for Measured<T> {
    fn default() -> Self {
        Measured { rows: Vec::new(), tried: Vec::new() }
    }
}

/// One measurement of a search.
#[derive(Debug, Clone, PartialEq)]
pub struct Tried<T> {
    /// Head dimension of the measured problem.
    pub head_dim: u32,
    /// Queries and keys per sequence of the measured problem.
    pub len: u64,
    /// The measured tile configuration.
    pub config: T,
    /// Speed relative to the built-in configuration; 0 if it has no kernel or gives wrong results.
    pub gain: f64,
}

/// A pass with a table of tile configurations: forward or backward.
pub trait Pass: TileConfig {
    /// The word for the pass in a profile's lines.
    const WORD: &'static str;
    /// The measurements of the pass in a profile.
    fn of(profile: &mut Profile) -> &mut Measured<Self>;
}

impl Pass for ForwardConfig {
    const WORD: &'static str = "";
    fn of(profile: &mut Profile) -> &mut Measured<Self> {
        &mut profile.forward
    }
}

impl Pass for BackwardConfig {
    const WORD: &'static str = "backward ";
    fn of(profile: &mut Profile) -> &mut Measured<Self> {
        &mut profile.backward
    }
}

/// The reason why a profile cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A line of the file is invalid.
    #[error("profile {file}, line {line}: {what}; `fulgurite tune` writes it anew if it is deleted")]
    Line {
        /// Path of the file.
        file: String,
        /// Line number, from 1.
        line: usize,
        /// The fault, as text.
        what: String,
    },
    /// The file cannot be read or written.
    #[error("profile {file}: {what}; FULGURITE_PROFILE names another, or none if it is empty")]
    File {
        /// Path of the file.
        file: String,
        /// The error, as text.
        what: String,
    },
}

/// The source of a session's profiles. This crate reads no environment variables: the caller says where profiles are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ProfileSource {
    /// No profiles: the built-in tile configurations are used.
    #[default]
    None,
    /// One file for any GPU.
    File(PathBuf),
    /// A folder with one file per GPU.
    Folder(PathBuf),
}

impl ProfileSource {
    /// The usual source: the file that FULGURITE_PROFILE names (no profile if it is empty), else the folder of compiled
    /// kernels. `variable` looks up an environment variable.
    ///
    /// ```
    /// use fulgurite::gpu::ProfileSource;
    /// let named = |name: &str| (name == "FULGURITE_PROFILE").then(|| "my.profile".into());
    /// assert_eq!(ProfileSource::usual(&named), ProfileSource::File("my.profile".into()));
    /// ```
    pub fn usual(variable: &dyn Fn(&str) -> Option<OsString>) -> ProfileSource {
        match variable("FULGURITE_PROFILE") {
            Some(path) if path.is_empty() => ProfileSource::None,
            Some(path) => ProfileSource::File(path.into()),
            None => default_cache_dir(variable).map_or(ProfileSource::None, ProfileSource::Folder),
        }
    }

    /// Path of a GPU's profile, whether it exists or not.
    pub fn path(&self, gpu: &str) -> Option<PathBuf> {
        match self {
            ProfileSource::None => None,
            ProfileSource::File(path) => Some(path.clone()),
            ProfileSource::Folder(folder) => {
                let name: String = gpu.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
                Some(folder.join(format!("{name}.profile")))
            }
        }
    }

    /// The tile configurations for a GPU, including those of its profile if it has one.
    pub fn tables(&self, gpu: &str) -> Result<Tables, ProfileError> {
        match self.path(gpu) {
            Some(path) => Ok(Profile::load(&path, gpu)?.tables()),
            None => Ok(Tables::default()),
        }
    }
}

const FIRST: &str = "fulgurite profile 1";

impl Profile {
    /// Loads a profile. A missing file, or the profile of another GPU, gives an empty one.
    pub fn load(path: &Path, gpu: &str) -> Result<Profile, ProfileError> {
        let empty = Profile { gpu: gpu.into(), ..Profile::default() };
        let file = path.display().to_string();
        match fs::read_to_string(path) {
            Ok(text) => {
                let wrong = |(line, what)| ProfileError::Line { file, line, what };
                let profile = Profile::parse(&text).map_err(wrong)?;
                Ok(if profile.gpu == gpu { profile } else { empty })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(empty),
            Err(e) => Err(ProfileError::File { file, what: e.to_string() }),
        }
    }

    /// Writes the profile atomically.
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        let failed = |e: io::Error| ProfileError::File { file: path.display().to_string(), what: e.to_string() };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(failed)?;
        }
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}", std::process::id()));
        fs::write(&beside, self.to_string()).and_then(|()| fs::rename(&beside, path)).map_err(failed)
    }

    /// The built-in tables, overridden by this profile.
    pub fn tables(&self) -> Tables {
        Tables {
            forward: ConfigTable::default().with(self.forward.rows.iter().cloned()),
            backward: ConfigTable::default().with(self.backward.rows.iter().cloned()),
        }
    }

    /// Parses the text of a profile. An error has the line number and the fault.
    fn parse(text: &str) -> Result<Profile, (usize, String)> {
        let mut profile = Profile::default();
        for (i, line) in text.lines().enumerate() {
            let wrong = |what: &str| (i + 1, format!("{line:?} {what}"));
            match line.split_once(' ') {
                _ if i == 0 && line == FIRST => {}
                _ if i == 0 => return Err(wrong(&format!("is not {FIRST:?}"))),
                Some(("gpu", name)) => profile.gpu = name.into(),
                Some((kind @ ("use" | "tried"), rest)) => {
                    let read = match rest.strip_prefix(BackwardConfig::WORD) {
                        Some(rest) => profile.backward.read(kind, rest),
                        None => profile.forward.read(kind, rest),
                    };
                    read.map_err(|what| wrong(&what))?;
                }
                _ if line.is_empty() => {}
                _ => return Err(wrong("begins with none of gpu, use, tried")),
            }
        }
        match profile.gpu.is_empty() {
            true => Err((1, "names no gpu".into())),
            false => Ok(profile),
        }
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("has {text:?} where a number belongs"))
}

impl<T: Pass> Measured<T> {
    /// Reads the rest of a line, after its first word and the word of the pass.
    fn read(&mut self, kind: &str, text: &str) -> Result<(), String> {
        match kind {
            "use" => self.rows.push(row(text)?),
            _ => self.tried.push(tried(text)?),
        }
        Ok(())
    }

    fn write(&self, text: &mut String) -> fmt::Result {
        for ConfigRow { head_dims, keys, config } in &self.rows {
            let (d0, d1) = head_dims.clone().into_inner();
            writeln!(text, "use {}head_dims {d0}..{d1} keys {}..{}: {config}", T::WORD, keys.start, keys.end)?;
        }
        for Tried { head_dim, len, config, gain } in &self.tried {
            writeln!(text, "tried {}head_dim {head_dim} length {len} {gain:.4}: {config}", T::WORD)?;
        }
        Ok(())
    }
}

fn config<T: TileConfig>(text: &str) -> Result<T, String> {
    text.parse::<T>().map_err(|e| format!("is no cut: {e}"))
}

fn row<T: TileConfig>(text: &str) -> Result<ConfigRow<T>, String> {
    let (range, cut) = text.split_once(": ").ok_or("has no cut")?;
    let ["head_dims", dims, "keys", keys] = range.split_whitespace().collect::<Vec<_>>()[..] else {
        return Err("has no `head_dims A..B keys A..B`".into());
    };
    let pair = |text: &str| text.split_once("..").map(|(a, b)| (a.to_string(), b.to_string()));
    let ((d0, d1), (k0, k1)) = pair(dims).zip(pair(keys)).ok_or("has no ranges A..B")?;
    Ok(ConfigRow { head_dims: number(&d0)?..=number(&d1)?, keys: number(&k0)?..number(&k1)?, config: config(cut)? })
}

fn tried<T: TileConfig>(text: &str) -> Result<Tried<T>, String> {
    let (place, cut) = text.split_once(": ").ok_or("has no cut")?;
    let ["head_dim", head_dim, "length", len, gain] = place.split_whitespace().collect::<Vec<_>>()[..] else {
        return Err("has no `head_dim N length N GAIN`".into());
    };
    let gain: f64 = number(gain)?;
    match gain.is_finite() && gain >= 0.0 {
        true => Ok(Tried { head_dim: number(head_dim)?, len: number(len)?, config: config(cut)?, gain }),
        false => Err(format!("has the gain {gain}")),
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = format!("{FIRST}\ngpu {}\n", self.gpu);
        self.forward.write(&mut text)?;
        self.backward.write(&mut text)?;
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured<T: Pass>(config: T) -> Measured<T> {
        Measured {
            rows: vec![ConfigRow { head_dims: 65..=128, keys: 0..1024, config }],
            tried: vec![Tried { head_dim: 128, len: 512, config, gain: 1.25 }],
        }
    }

    fn profile() -> Profile {
        Profile {
            gpu: "Some GPU".into(),
            forward: measured(ForwardConfig { cols: 112, ..ForwardConfig::hopper(128, 512) }),
            backward: measured(BackwardConfig { rows: 96, ..BackwardConfig::hopper(128) }),
        }
    }

    #[test]
    fn it_is_read_as_it_is_written() {
        assert_eq!(Profile::parse(&profile().to_string()), Ok(profile()));
        let Tables { forward, backward } = profile().tables();
        assert_eq!(forward.find(128, 512).cols, 112);
        assert_eq!(forward.find(128, 1024).cols, 128);
        assert_eq!(forward.find(64, 512), ForwardConfig::hopper(64, 512));
        assert_eq!(backward.find(128, 512).rows, 96);
        assert_eq!(backward.find(128, 1024), BackwardConfig::hopper(128));
    }

    #[test]
    fn a_damaged_file_is_refused_with_its_line() {
        let text = profile().to_string();
        let damage = [
            (text.replace("profile 1", "profile 2"), 1),
            (text.replace("cols=112", "cols=many"), 3),
            (text.replace("keys 0..1024", "keys all"), 3),
            (text.replace("1.2500", "NaN"), 4),
            (text.replace("gpu Some GPU\n", ""), 1),
            (text.replace("tried", "tied"), 4),
            (text.replace("rows=96", "rows=97"), 5),
            (text.replace("backward", "sideward"), 5),
            (String::new(), 1),
        ];
        for (text, line) in damage {
            assert_eq!(Profile::parse(&text).map_err(|(line, _)| line), Err(line), "{text}");
        }
    }

    #[test]
    fn another_gpus_profile_says_nothing() {
        let folder = std::env::temp_dir().join(format!("fulgurite-profile-{}", std::process::id()));
        let path = folder.join("x.profile");
        profile().save(&path).unwrap();
        assert_eq!(Profile::load(&path, "Some GPU"), Ok(profile()));
        assert!(Profile::load(&path, "Another GPU").unwrap().forward.rows.is_empty());
        assert!(Profile::load(&folder.join("none"), "Some GPU").unwrap().forward.rows.is_empty());
        fs::write(&path, "nonsense").unwrap();
        let refused = Profile::load(&path, "Some GPU").unwrap_err().to_string();
        assert!(refused.contains("line 1") && refused.contains("x.profile"), "{refused}");
        fs::remove_dir_all(folder).unwrap();
    }
}
