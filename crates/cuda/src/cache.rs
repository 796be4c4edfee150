//! A cache of compiled kernels on disk.
//!
//! Each kernel has one file, named by a hash of everything that determines its contents. Any number of processes may
//! read and write at once: a file is written under a unique name and then renamed, so a reader sees all of it or
//! nothing. The header reveals a file that is truncated, changed or foreign, and such a file is ignored. If the folder
//! cannot be written, nothing is cached; no function here fails.

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The first bytes of a file; the digit is the version of the format.
const MAGIC: [u8; 8] = *b"FULGCUB1";
/// Magic, key, length of the log, length of the code, checksum.
const HEADER_BYTES: usize = 8 + 16 + 8 + 8 + 16;

/// FNV-1a with 128 bits: a hash that is equal on every machine and for every compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Hash128(u128);

impl Hash128 {
    /// The hash of no bytes: the published starting value.
    pub const EMPTY: Hash128 = Hash128(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;

    /// The hash with these bytes appended.
    pub fn bytes(self, bytes: &[u8]) -> Self {
        Hash128(bytes.iter().fold(self.0, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(Self::PRIME)))
    }

    /// The hash with a delimited part appended: `("ab", "c")` differs from `("a", "bc")`.
    pub fn part(self, bytes: &[u8]) -> Self {
        self.bytes(&(bytes.len() as u64).to_le_bytes()).bytes(bytes)
    }
}

/// A compiled kernel with the compiler's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub log: String,
    pub cubin: Vec<u8>,
}

/// A folder of compiled kernels.
#[derive(Debug, Clone)]
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub fn new(folder: PathBuf) -> Self {
        Cache { folder }
    }

    fn path(&self, key: Hash128) -> PathBuf {
        self.folder.join(format!("{:032x}.cubin", key.0))
    }

    /// The entry of a key, if its file is intact.
    pub fn read(&self, key: Hash128) -> Option<Entry> {
        let path = self.path(key);
        // A pipe under the name would be waited for without end.
        fs::metadata(&path).is_ok_and(|about| about.is_file()).then(|| decode(key, &fs::read(&path).ok()?))?
    }

    /// Stores an entry, if the folder can be written.
    pub fn write(&self, key: Hash128, entry: &Entry) {
        // Ignore errors: the only consequence is that the next process compiles again.
        let _ = self.try_write(key, entry);
    }

    fn try_write(&self, key: Hash128, entry: &Entry) -> std::io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let temporary = self.folder.join(unique_name());
        let written = write_new(&temporary, &encode(key, entry)).and_then(|()| fs::rename(&temporary, self.path(key)));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

/// A name that no other writer uses: no other process, no other thread, and no process with the same id in another
/// container, because `create_new` fails if the file exists.
fn unique_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now_ns = std::time::UNIX_EPOCH.elapsed().map_or(0, |t| t.as_nanos());
    format!(".{}.{}.{now_ns}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

fn write_new(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    // No sync to disk: a reader detects a file that a crash left truncated.
    OpenOptions::new().write(true).create_new(true).open(path)?.write_all(bytes)
}

fn checksum(key: Hash128, log: &[u8], cubin: &[u8]) -> Hash128 {
    key.part(log).part(cubin)
}

fn encode(key: Hash128, entry: &Entry) -> Vec<u8> {
    let (log, cubin) = (entry.log.as_bytes(), &entry.cubin);
    let mut file = Vec::with_capacity(HEADER_BYTES + log.len() + cubin.len());
    file.extend(MAGIC);
    file.extend(key.0.to_le_bytes());
    file.extend((log.len() as u64).to_le_bytes());
    file.extend((cubin.len() as u64).to_le_bytes());
    file.extend(checksum(key, log, cubin).0.to_le_bytes());
    file.extend(log);
    file.extend(cubin);
    file
}

fn decode(key: Hash128, file: &[u8]) -> Option<Entry> {
    let (header, body) = file.split_at_checked(HEADER_BYTES)?;
    let number = |at: usize| usize::try_from(u64::from_le_bytes(header[at..at + 8].try_into().ok()?)).ok();
    let hash = |at: usize| Some(Hash128(u128::from_le_bytes(header[at..at + 16].try_into().ok()?)));
    if header[..8] != MAGIC || hash(8)? != key {
        return None;
    }
    let (log, cubin) = body.split_at_checked(number(24)?)?;
    let whole = cubin.len() == number(32)? && hash(40)? == checksum(key, log, cubin);
    whole.then(|| Some(Entry { log: String::from_utf8(log.into()).ok()?, cubin: cubin.into() }))?
}

/// The default folder for compiled kernels, given the environment: `FULGURITE_CACHE_DIR`, or `fulgurite` in the
/// system's cache folder. An empty `FULGURITE_CACHE_DIR` means no cache.
///
/// The environment is passed in, because only programs read it:
///
/// ```
/// use std::path::PathBuf;
///
/// let home = |name: &str| (name == "HOME").then(|| "/home/ada".into());
/// assert_eq!(fulgurite_cuda::default_cache_dir(&home), Some(PathBuf::from("/home/ada/.cache/fulgurite")));
/// ```
pub fn default_cache_dir(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if variable("FULGURITE_CACHE_DIR").is_some() {
        return folder("FULGURITE_CACHE_DIR");
    }
    let caches = folder("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let caches = caches.or_else(|| folder("HOME").map(|home| home.join(".cache")));
    caches.or_else(|| folder("LOCALAPPDATA")).map(|caches| caches.join("fulgurite"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed at the end of the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Self {
            let folder = std::env::temp_dir().join(format!("fulgurite{}", unique_name()));
            fs::create_dir_all(&folder).unwrap();
            Folder(folder)
        }
        fn files(&self) -> usize {
            fs::read_dir(&self.0).unwrap().count()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn entry(byte: u8, bytes: usize) -> Entry {
        Entry { log: "ptxas info : used 168 registers\n".into(), cubin: vec![byte; bytes] }
    }

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(Hash128::EMPTY.bytes(b"a").0, 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(Hash128::EMPTY.bytes(b"foobar").0, 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
        assert_ne!(Hash128::EMPTY.part(b"ab").part(b"c"), Hash128::EMPTY.part(b"a").part(b"bc"));
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = Folder::new();
        // The folder below does not exist yet.
        let cache = Cache::new(folder.0.join("kernels"));
        let (one, two) = (Hash128::EMPTY.part(b"one"), Hash128::EMPTY.part(b"two"));
        assert_eq!(cache.read(one), None);
        for written in [entry(7, 1000), entry(8, 0), Entry { log: String::new(), cubin: vec![1] }] {
            cache.write(one, &written);
            assert_eq!(cache.read(one), Some(written));
        }
        assert_eq!(cache.read(two), None);
    }

    #[test]
    fn files_cut_short_or_changed_are_ignored() {
        let folder = Folder::new();
        let cache = Cache::new(folder.0.clone());
        let key = Hash128::EMPTY.part(b"kernel");
        cache.write(key, &entry(3, 200));
        let whole = fs::read(cache.path(key)).unwrap();
        for bytes in 0..whole.len() {
            fs::write(cache.path(key), &whole[..bytes]).unwrap();
            assert_eq!(cache.read(key), None, "cut to {bytes} bytes");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            fs::write(cache.path(key), &changed).unwrap();
            assert_eq!(cache.read(key), None, "byte {at} changed");
        }
        fs::write(cache.path(key), [&whole[..], b"more"].concat()).unwrap();
        assert_eq!(cache.read(key), None, "with bytes after its end");
        cache.write(key, &entry(4, 10));
        assert_eq!(cache.read(key), Some(entry(4, 10)), "a bad file is replaced");
    }

    #[test]
    fn a_file_under_another_name_is_ignored() {
        let folder = Folder::new();
        let cache = Cache::new(folder.0.clone());
        let (one, two) = (Hash128::EMPTY.part(b"one"), Hash128::EMPTY.part(b"two"));
        cache.write(one, &entry(1, 50));
        fs::rename(cache.path(one), cache.path(two)).unwrap();
        assert_eq!(cache.read(two), None);
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_no_entry() {
        let folder = Folder::new();
        let cache = Cache::new(folder.0.clone());
        fs::create_dir_all(&folder.0).unwrap();
        let key = Hash128::EMPTY;
        assert!(std::process::Command::new("mkfifo").arg(cache.path(key)).status().unwrap().success());
        assert_eq!(cache.read(key), None);
    }

    #[test]
    fn many_writers_and_readers_at_once() {
        let folder = Folder::new();
        let cache = Cache::new(folder.0.clone());
        let key = Hash128::EMPTY.part(b"kernel");
        cache.write(key, &entry(0, 40_000));
        std::thread::scope(|scope| {
            for thread in 0..4u8 {
                let cache = &cache;
                scope.spawn(move || {
                    for round in 0..50 {
                        cache.write(key, &entry(thread, 40_000));
                        let read = cache.read(key).unwrap_or_else(|| panic!("round {round}: no whole file"));
                        assert!(read.cubin.iter().all(|&byte| byte == read.cubin[0]), "a mixture");
                    }
                });
            }
        });
        assert_eq!(folder.files(), 1, "temporary files are left");
    }

    #[test]
    fn a_folder_that_cannot_be_written_keeps_nothing() {
        let folder = Folder::new();
        let file = folder.0.join("file");
        fs::write(&file, b"not a folder").unwrap();
        let key = Hash128::EMPTY.part(b"kernel");
        for cache in [Cache::new(file.clone()), Cache::new(file.join("below"))] {
            cache.write(key, &entry(1, 10));
            assert_eq!(cache.read(key), None);
        }
        // A folder occupies the path of the entry, so the rename fails and leaves nothing behind.
        let cache = Cache::new(folder.0.clone());
        fs::create_dir_all(cache.path(key).join("in the way")).unwrap();
        cache.write(key, &entry(1, 10));
        assert_eq!(cache.read(key), None);
        assert_eq!(folder.files(), 2);
    }

    #[test]
    fn the_default_folder() {
        let of = |pairs: &'static [(&str, &str)]| {
            let find = move |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            default_cache_dir(&find)
        };
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(of(&[("FULGURITE_CACHE_DIR", "/c"), ("HOME", "/home/ada")]), path("/c"));
        assert_eq!(of(&[("FULGURITE_CACHE_DIR", ""), ("HOME", "/home/ada")]), None);
        assert_eq!(of(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/home/ada")]), path("/x/fulgurite"));
        assert_eq!(of(&[("XDG_CACHE_HOME", "x"), ("HOME", "/home/ada")]), path("/home/ada/.cache/fulgurite"));
        assert_eq!(of(&[("LOCALAPPDATA", "/l")]), path("/l/fulgurite"));
        assert_eq!(of(&[]), None);
    }
}
