//! Tensors in a folder of npy files, each named after its tensor.

use crate::io::stored::{Stored, Tensors, narrow, reason};
use crate::{Failure, terminal};
use fulgurite::{DType, Tensor, TensorView, f16};
use npyz::{NpyFile, Order, WriterBuilder};
use std::path::Path;

/// Longest header that is read; numpy writes 118 bytes.
const MAX_HEADER_BYTES: usize = 4096;

/// Reads every `NAME.npy` in a folder.
pub fn read_folder(folder: &Path) -> Result<Tensors, Failure> {
    let unreadable =
        |path: &Path, e: &std::io::Error| Failure::input(format_args!("cannot read {}: {}", path.display(), reason(e)));
    let mut tensors = Tensors::new();
    for entry in std::fs::read_dir(folder).map_err(|e| unreadable(folder, &e))? {
        let path = entry.map_err(|e| unreadable(folder, &e))?.path();
        let (Some(name), Some("npy")) =
            (path.file_stem().and_then(|s| s.to_str()), path.extension().and_then(|e| e.to_str()))
        else {
            continue;
        };
        let bytes = std::fs::read(&path).map_err(|e| unreadable(&path, &e))?;
        let stored = decode(&bytes).map_err(|e| Failure::input(format_args!("{}: {e}", path.display())))?;
        note_f64(&path, &bytes);
        tensors.insert(name.to_string(), stored);
    }
    if tensors.is_empty() {
        return Err(Failure::input(format_args!(
            "{} has no .npy files; give q.npy, k.npy and v.npy",
            folder.display()
        )));
    }
    Ok(tensors)
}

/// Says on stderr that a file loses digits: NumPy makes f64 unless it is told otherwise.
pub(crate) fn note_f64(path: &Path, bytes: &[u8]) {
    let header = &bytes[..bytes.len().min(128)];
    if [b"'<f8'", b"'>f8'"].iter().any(|kind| header.windows(kind.len()).any(|part| part == *kind)) {
        terminal::note(&format!("{} is f64 and is read as f32", path.display()));
    }
}

/// Reads the bytes of an npy file; f64 becomes f32. Bytes that are not such a file are an error.
///
/// ```
/// use fulgurite::Tensor;
/// use fulgurite_cli::io::{Stored, npy};
///
/// let q = Tensor::new(vec![1.0f32, 2.0], &[2])?;
/// let bytes = npy::encode(&q)?;
/// assert_eq!(npy::decode(&bytes)?, Stored::Tensor(q));
/// assert!(npy::decode(&bytes[..bytes.len() - 1]).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn decode(bytes: &[u8]) -> Result<Stored, String> {
    header_is_plain(bytes)?;
    let cut = |e: std::io::Error| format!("not a whole npy file ({e}); save it again, it may be cut off");
    let file = NpyFile::new(bytes).map_err(cut)?;
    let npyz::DType::Plain(kind) = file.dtype() else { return Ok(Stored::Other("a record".into())) };
    let kind = kind.to_string();
    let dtype = &kind[1..];
    let size: usize = match dtype {
        "f4" | "i4" => 4,
        "f2" => 2,
        "i8" | "f8" => 8,
        other => return Ok(Stored::Other(format!("npy type {other} (sizes in bytes)"))),
    };
    let shape: Result<Vec<usize>, _> = file.shape().iter().map(|&n| usize::try_from(n)).collect();
    let shape = shape.map_err(|_| format!("shape {:?} overflows the address space; check the sizes", file.shape()))?;
    let needed = shape.iter().try_fold(size, |n, &m| n.checked_mul(m));
    let order = file.order();
    let rest = file.header().clone();
    let data = file.into_inner();
    if needed != Some(data.len()) {
        let has = data.len();
        return Err(format!(
            "shape {shape:?} of {kind} does not fit {has} bytes of data; save it again, it may be cut off"
        ));
    }
    let file = NpyFile::with_header(rest, data);
    let tensor = match dtype {
        "f4" => Tensor::new(file.into_vec::<f32>().map_err(cut)?, &shape),
        "f2" => Tensor::new(file.into_vec::<f16>().map_err(cut)?, &shape),
        "i4" => Tensor::new(file.into_vec::<i32>().map_err(cut)?, &shape),
        // NumPy's default type. Attention computes in f32 at most.
        "f8" => Tensor::new(
            file.into_vec::<f64>().map_err(cut)?.into_iter().map(|x| x as f32).collect::<Vec<f32>>(),
            &shape,
        ),
        _ => match narrow(file.into_vec::<i64>().map_err(cut)?.into_iter(), &shape)? {
            Stored::Tensor(tensor) => Ok(tensor),
            other => return Ok(other),
        },
    };
    let tensor = tensor.map_err(|e| e.to_string())?;
    let tensor = if order == Order::Fortran { turned(&tensor)? } else { tensor };
    Ok(Stored::Tensor(tensor))
}

/// Refuses headers that the parser is not made for: it recurses into brackets, and trusts the length.
fn header_is_plain(bytes: &[u8]) -> Result<(), String> {
    let word = |range: std::ops::Range<usize>| {
        bytes.get(range).map(|b| b.iter().rev().fold(0usize, |n, &byte| n << 8 | usize::from(byte)))
    };
    if !bytes.starts_with(b"\x93NUMPY") {
        return Err("not an npy file; save it with numpy.save".into());
    }
    let (start, length) = match bytes.get(6) {
        Some(1) => (10, word(8..10)),
        _ => (12, word(8..12)),
    };
    let header = length.filter(|&n| n <= MAX_HEADER_BYTES).and_then(|n| bytes.get(start..start + n));
    let header = header.ok_or("not a whole npy file (its header is cut off or too long); save it again")?;
    let brackets = header.iter().filter(|b| b"([{".contains(b)).count();
    if brackets > 16 {
        return Err(format!("the header has {brackets} brackets, allowed: 16; save a plain array"));
    }
    // The time the parser takes is exponential in the depth: twelve levels took 23 seconds.
    let (mut depth, mut quote) = (0i32, None);
    for &byte in header {
        match (byte, quote) {
            (b'\\', _) => return Err("the header has a backslash, allowed: none; save a plain array".into()),
            (b'\'' | b'"', None) => quote = Some(byte),
            (end, Some(begin)) if end == begin => quote = None,
            (b'(' | b'[' | b'{', None) => depth += 1,
            (b')' | b']' | b'}', None) => depth -= 1,
            _ => {}
        }
        if !(0..=4).contains(&depth) {
            return Err("the header's brackets do not pair, or nest more than 4 deep; save a plain array".into());
        }
    }
    Ok(())
}

/// The same elements in row-major order: the file lists the first axis fastest.
fn turned(tensor: &Tensor) -> Result<Tensor, String> {
    let shape = tensor.shape();
    let mut strides = shape.to_vec();
    let mut step = 1usize;
    for (stride, &size) in strides.iter_mut().zip(shape.iter()) {
        *stride = step;
        step = step.saturating_mul(size.max(1));
    }
    let view = TensorView::strided(tensor.view().data(), shape, &strides);
    Ok(view.map_err(|e| e.to_string())?.to_tensor())
}

/// The bytes of an npy file.
pub fn encode(tensor: &Tensor) -> Result<Vec<u8>, String> {
    fn plain<T: npyz::AutoSerialize + Copy>(values: Option<&[T]>, shape: &[u64]) -> std::io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut writer = npyz::WriteOptions::new().default_dtype().shape(shape).writer(&mut bytes).begin_nd()?;
        writer.extend(values.unwrap_or_default().iter().copied())?;
        writer.finish()?;
        Ok(bytes)
    }
    let shape: Vec<u64> = tensor.shape().iter().map(|&n| n as u64).collect();
    let written = match tensor.dtype() {
        DType::F32 => plain::<f32>(tensor.as_slice(), &shape),
        DType::F16 => plain::<f16>(tensor.as_slice(), &shape),
        DType::I32 => plain::<i32>(tensor.as_slice(), &shape),
        other => return Err(format!("{other} is not in the npy format; write to a name ending in .safetensors")),
    };
    written.map_err(|e| format!("cannot write npy: {e}"))
}
