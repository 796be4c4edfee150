//! Profiles: TOML files with tile configurations that were measured on a GPU and are faster there than the built-in
//! ones.
//!
//! ```toml
//! format = 2
//! gpu = "NVIDIA H200"
//!
//! [[forward.use]]
//! head_dim_from = 65
//! head_dim_to = 128
//! keys_from = 0
//! keys_below = 1024
//!
//! [forward.use.config]
//! groups = 2
//! cols = 128
//! depth = 2
//! end = "joined"
//! registers = [232, 40]
//! early = 2
//! added = "threads"
//! ```
//!
//! `use` holds the configurations to use; `tried` holds the measurements of a search, so that it can resume. The
//! gradients have the same tables under `backward`. Without `keys_below`, there is no limit.

use fulgurite_cuda::default_cache_dir;
use fulgurite_kernels::attention::backward::BackwardConfig;
use fulgurite_kernels::attention::forward::plan::{ConfigRow, ConfigTable, ForwardConfig, TileConfig};
pub use fulgurite_kernels::operator::Tables;
use serde::de::{Deserializer, Error as _, Unexpected};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::{fs, io};
use thiserror::Error;

/// The format of the files that this release reads and writes. Format 1 was no TOML.
const FORMAT: i64 = 2;

/// The first word of files in format 1.
const FIRST_FORMAT: &str = "fulgurite profile";

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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound(deserialize = "T: TileConfig"))]
pub struct Measured<T> {
    /// Configurations to use.
    #[serde(rename = "use", default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    #[serde(bound(serialize = "T: TileConfig"))]
    pub rows: Vec<ConfigRow<T>>,
    /// Configurations that a search has measured.
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub tried: Vec<Tried<T>>,
}

impl<T> Default for Measured<T> {
    fn default() -> Self {
        Measured { rows: Vec::new(), tried: Vec::new() }
    }
}

/// One measurement of a search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tried<T> {
    /// Head dimension of the measured problem.
    pub head_dim: u32,
    /// Queries and keys per sequence of the measured problem.
    #[serde(rename = "length")]
    pub len: u64,
    /// Speed relative to the built-in configuration; 0 if it has no kernel or gives wrong results.
    #[serde(deserialize_with = "gain")]
    pub gain: f64,
    /// The measured tile configuration.
    pub config: T,
}

/// Reads a gain.
fn gain<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let gain = f64::deserialize(from)?;
    match gain.is_finite() && gain >= 0.0 {
        true => Ok(gain),
        false => Err(D::Error::invalid_value(Unexpected::Float(gain), &"a finite number, 0 or more")),
    }
}

/// A pass with a table of tile configurations: forward or backward.
pub trait Pass: TileConfig {
    /// The measurements of the pass in a profile.
    fn of(profile: &mut Profile) -> &mut Measured<Self>;
}

impl Pass for ForwardConfig {
    fn of(profile: &mut Profile) -> &mut Measured<Self> {
        &mut profile.forward
    }
}

impl Pass for BackwardConfig {
    fn of(profile: &mut Profile) -> &mut Measured<Self> {
        &mut profile.backward
    }
}

/// The reason why a profile cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// An entry of the file is invalid.
    #[error("profile {file}, line {line}: {entry:?}: {what}; if the file is deleted, `fulgurite tune` writes it anew")]
    Entry {
        /// Path of the file.
        file: String,
        /// Line number, from 1.
        line: usize,
        /// Text of the line.
        entry: String,
        /// The fault, and the allowed names or values.
        what: String,
    },
    /// The file is in the format of an older release.
    #[error("profile {file} is in the format of an older fulgurite; delete it and run `fulgurite tune` again")]
    Outdated {
        /// Path of the file.
        file: String,
    },
    /// The file is in the format of a newer release.
    #[error(
        "profile {file}: `format` is {format}, allowed: {FORMAT}; a newer fulgurite wrote it: update this one, or delete \
         the file and run `fulgurite tune` again"
    )]
    Newer {
        /// Path of the file.
        file: String,
        /// Format of the file.
        format: i64,
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
    /// One file. A GPU with another name than the file's gets the built-in configurations.
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

/// The entries of a profile's file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    format: i64,
    #[serde(deserialize_with = "gpu")]
    gpu: String,
    #[serde(default)]
    forward: Measured<ForwardConfig>,
    #[serde(default)]
    backward: Measured<BackwardConfig>,
}

/// Reads the name of a GPU.
fn gpu<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let name = String::deserialize(from)?;
    match name.is_empty() {
        true => Err(D::Error::invalid_value(Unexpected::Str(""), &"the name of a GPU")),
        false => Ok(name),
    }
}

/// The one entry that files of every format have.
#[derive(Deserialize)]
struct Format {
    format: i64,
}

impl Profile {
    /// Loads a profile. A missing file, or the profile of another GPU, gives an empty one.
    pub fn load(path: &Path, gpu: &str) -> Result<Profile, ProfileError> {
        let empty = Profile { gpu: gpu.into(), ..Profile::default() };
        match fs::read_to_string(path) {
            Ok(text) => {
                let profile = Profile::parse(&text, path)?;
                Ok(if profile.gpu == gpu { profile } else { empty })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(empty),
            Err(e) => Err(ProfileError::File { file: path.display().to_string(), what: e.to_string() }),
        }
    }

    /// Writes the profile atomically.
    pub fn save(&self, path: &Path) -> Result<(), ProfileError> {
        let failed = |what: String| ProfileError::File { file: path.display().to_string(), what };
        let text = self.text().map_err(|e| failed(e.to_string()))?;
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|e| failed(e.to_string()))?;
        }
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}", std::process::id()));
        fs::write(&beside, text).and_then(|()| fs::rename(&beside, path)).map_err(|e| failed(e.to_string()))
    }

    /// The built-in tables, overridden by this profile.
    pub fn tables(&self) -> Tables {
        Tables {
            forward: ConfigTable::default().with(self.forward.rows.iter().cloned()),
            backward: ConfigTable::default().with(self.backward.rows.iter().cloned()),
            ..Tables::default()
        }
    }

    /// Parses the text of a file. Errors name `path`.
    fn parse(text: &str, path: &Path) -> Result<Profile, ProfileError> {
        let file = || path.display().to_string();
        if text.starts_with(FIRST_FORMAT) {
            return Err(ProfileError::Outdated { file: file() });
        }
        let invalid = |e: toml::de::Error| {
            let start = e.span().map_or(0, |span| span.start.min(text.len()));
            let line = text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count();
            let entry = text.lines().nth(line).unwrap_or_default().trim().to_string();
            ProfileError::Entry { file: file(), line: line + 1, entry, what: e.message().to_string() }
        };
        // The format decides first: another one may have other entries.
        let Format { format } = toml::from_str(text).map_err(invalid)?;
        match format {
            FORMAT => {}
            ..FORMAT => return Err(ProfileError::Outdated { file: file() }),
            _ => return Err(ProfileError::Newer { file: file(), format }),
        }
        let Entries { gpu, forward, backward, .. } = toml::from_str(text).map_err(invalid)?;
        Ok(Profile { gpu, forward, backward })
    }

    /// The text of the profile's file: the same for equal profiles.
    fn text(&self) -> Result<String, toml::ser::Error> {
        let Profile { gpu, forward, backward } = self.clone();
        toml::to_string(&Entries { format: FORMAT, gpu, forward, backward })
    }
}

/// Prints the text of the profile's file.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text().map_err(|_| fmt::Error)?)
    }
}

#[cfg(test)]
mod tests;
