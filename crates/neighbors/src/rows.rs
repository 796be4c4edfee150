//! Rows that need not be in memory.
//!
//! A file is read by position, not mapped: a mapped file that is cut short while it is read ends the process with a
//! signal, a read by position ends with an error.

use crate::{Error, Points};
use std::fs::File;
use std::path::Path;
use std::time::SystemTime;

/// A source of rows of f32.
pub trait RowSource: Sync {
    /// Rows and columns.
    fn shape(&self) -> [usize; 2];
    /// Fills `out`, which holds whole rows, with the rows from `first` on.
    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), Error>;
    /// Whether the rows are still those that they were at first.
    fn unchanged(&self) -> Result<(), Error> {
        Ok(())
    }
}

impl RowSource for Points<'_> {
    fn shape(&self) -> [usize; 2] {
        [self.len(), self.dim()]
    }
    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), Error> {
        let at = first * self.dim();
        out.copy_from_slice(&self.data()[at..at + out.len()]);
        Ok(())
    }
}

/// The rows of a file of f32: a `.npy` file with two axes, or a part of another file.
#[derive(Debug)]
pub struct FileRows {
    file: File,
    path: String,
    /// Where the first row begins, in bytes.
    offset: u64,
    shape: [usize; 2],
    opened: (u64, Option<SystemTime>),
}

/// Longer headers than this are no arrays of two axes.
const MAX_HEADER: usize = 1 << 16;

impl FileRows {
    /// Opens a file and reads its header.
    pub fn open(path: &Path) -> Result<FileRows, Error> {
        let name = path.display().to_string();
        let fail = |reason: String| Error::File { path: name.clone(), reason };
        let file = File::open(path).map_err(|e| fail(format!("cannot be opened: {e}; check the path")))?;
        let opened = stamp(&file).map_err(|e| fail(format!("cannot be read: {e}")))?;
        let mut start = [0u8; 12];
        read_at(&file, 0, &mut start[..10])
            .map_err(|_| fail("is shorter than any .npy file; write it again".into()))?;
        if &start[..6] != b"\x93NUMPY" {
            return Err(fail("is no .npy file; write it with numpy.save".into()));
        }
        let (length, begins) = match start[6] {
            1 => (usize::from(u16::from_le_bytes([start[8], start[9]])), 10),
            2 | 3 => {
                read_at(&file, 0, &mut start).map_err(|_| fail("ends in its header; write it again".into()))?;
                (u32::from_le_bytes([start[8], start[9], start[10], start[11]]) as usize, 12)
            }
            other => return Err(fail(format!("has .npy version {other}, allowed: 1 to 3"))),
        };
        if length > MAX_HEADER {
            return Err(fail(format!("has a header of {length} bytes, allowed: {MAX_HEADER}; write it again")));
        }
        let mut header = vec![0u8; length];
        read_at(&file, begins, &mut header).map_err(|_| fail("ends in its header; write it again".into()))?;
        let header = String::from_utf8_lossy(&header);
        if !header.contains("'<f4'") {
            return Err(fail("does not hold little-endian f32; convert it with .astype('<f4')".into()));
        }
        if !header.contains("'fortran_order': False") {
            return Err(fail("is stored by columns; write it with numpy.ascontiguousarray".into()));
        }
        let shape = shape_in(&header).ok_or_else(|| fail("does not have two axes; reshape it to rows".into()))?;
        FileRows::checked(file, name, begins + length as u64, shape, opened)
    }

    /// The rows that begin `offset` bytes into a file, little-endian f32 one behind the other.
    pub fn at(path: &Path, offset: u64, shape: [usize; 2]) -> Result<FileRows, Error> {
        let name = path.display().to_string();
        let fail = |reason: String| Error::File { path: name.clone(), reason };
        let file = File::open(path).map_err(|e| fail(format!("cannot be opened: {e}; check the path")))?;
        let opened = stamp(&file).map_err(|e| fail(format!("cannot be read: {e}")))?;
        FileRows::checked(file, name, offset, shape, opened)
    }

    /// Refuses a file that ends before its last row.
    fn checked(
        file: File,
        path: String,
        offset: u64,
        shape: [usize; 2],
        opened: (u64, Option<SystemTime>),
    ) -> Result<FileRows, Error> {
        let bytes = shape[0].checked_mul(shape[1]).and_then(|n| n.checked_mul(4)).map(|n| n as u64);
        if bytes.and_then(|n| n.checked_add(offset)).is_none_or(|want| want > opened.0) {
            let reason = format!("is cut short: {} bytes, its header tells of {shape:?} f32; write it again", opened.0);
            return Err(Error::File { path, reason });
        }
        Ok(FileRows { file, path, offset, shape, opened })
    }

    fn changed(&self, what: String) -> Error {
        Error::Changed { path: self.path.clone(), what }
    }
}

impl RowSource for FileRows {
    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn read(&self, first: usize, out: &mut [f32]) -> Result<(), Error> {
        let at = self.offset + (first * self.shape[1] * 4) as u64;
        read_at(&self.file, at, bytemuck::cast_slice_mut(out))
            .map_err(|e| self.changed(format!("at byte {at}: {e}")))?;
        if cfg!(target_endian = "big") {
            out.iter_mut().for_each(|x| *x = f32::from_bits(x.to_bits().swap_bytes()));
        }
        Ok(())
    }

    fn unchanged(&self) -> Result<(), Error> {
        let now = stamp(&self.file).map_err(|e| self.changed(e.to_string()))?;
        match now == self.opened {
            true => Ok(()),
            false if now.0 != self.opened.0 => {
                Err(self.changed(format!("it had {} bytes and has {}", self.opened.0, now.0)))
            }
            false => Err(self.changed("it was written to".into())),
        }
    }
}

fn stamp(file: &File) -> std::io::Result<(u64, Option<SystemTime>)> {
    let data = file.metadata()?;
    Ok((data.len(), data.modified().ok()))
}

#[cfg(unix)]
fn read_at(file: &File, at: u64, out: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, at)
}

#[cfg(windows)]
fn read_at(file: &File, mut at: u64, mut out: &mut [u8]) -> std::io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, at)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => {
                out = &mut out[n..];
                at += n as u64;
            }
        }
    }
    Ok(())
}

/// The two sizes in `'shape': (n, d)`.
fn shape_in(header: &str) -> Option<[usize; 2]> {
    let rest = header.split_once("'shape':")?.1.trim_start().strip_prefix('(')?;
    let inside = rest.split_once(')')?.0;
    let sizes: Option<Vec<usize>> =
        inside.split(',').map(str::trim).filter(|s| !s.is_empty()).map(|s| s.parse().ok()).collect();
    <[usize; 2]>::try_from(sizes?).ok()
}
