//! Tensors in a safetensors file.

use crate::io::stored::{Stored, Tensors, narrow, plain, reason};
use fulgurite::{DType, Tensor, bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// As many as the format's own reader takes.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Reads the bytes of a safetensors file. Bytes that are not such a file are an error.
///
/// ```
/// use fulgurite::Tensor;
/// use fulgurite_cli::io::{Stored, safetensors};
///
/// let q = Tensor::new(vec![1.0f32, 2.0], &[2])?;
/// let bytes = safetensors::encode(&[("q".into(), &q)])?;
/// assert_eq!(safetensors::decode(&bytes)?["q"], Stored::Tensor(q));
/// assert!(safetensors::decode(&bytes[..20]).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn decode(bytes: &[u8]) -> Result<Tensors, String> {
    let file = SafeTensors::deserialize(bytes).map_err(|e| {
        format!("not a whole safetensors file ({}); write it again, it may be cut off", plain(&e.to_string()))
    })?;
    let mut tensors = Tensors::new();
    for (name, view) in file.iter() {
        let name = plain(name);
        let stored = tensor(&view).map_err(|e| format!("`{name}`: {e}"))?;
        tensors.insert(name, stored);
    }
    Ok(tensors)
}

/// Where the f32 rows of a tensor lie in a file, by its header alone: bytes before the first, and the shape.
pub fn rows_in(path: &Path, name: &str) -> Result<(u64, [usize; 2]), String> {
    let cut = |_| String::from("not a whole safetensors file; write it again, it may be cut off");
    let mut file = File::open(path).map_err(|e| reason(&e))?;
    let mut length = [0u8; 8];
    file.read_exact(&mut length).map_err(cut)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(format!("its header has {length} bytes, allowed: {MAX_HEADER_BYTES}; write it again"));
    }
    if file.metadata().map_err(|e| reason(&e))?.len() < length {
        return Err("not a whole safetensors file; write it again, it may be cut off".into());
    }
    let mut header = vec![0u8; length as usize];
    file.read_exact(&mut header).map_err(cut)?;
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&header).map_err(|e| format!("its header is no JSON ({e}); write it again"))?;
    let Some(about) = header.get(name) else {
        let has = header.keys().filter(|k| *k != "__metadata__").map(String::as_str).collect::<Vec<_>>().join(", ");
        return Err(format!("has no tensor `{name}`, it has: {has}; choose one with --name"));
    };
    let list = |key: &str| -> Option<Vec<u64>> { about[key].as_array()?.iter().map(|x| x.as_u64()).collect() };
    let [rows, columns] = list("shape").unwrap_or_default()[..] else {
        return Err(format!("`{name}` does not have two axes; reshape it to rows"));
    };
    if about["dtype"] != "F32" {
        return Err(format!(
            "`{name}` is {}, allowed in parts: F32; convert it, or leave --memory out",
            about["dtype"]
        ));
    }
    let place = list("data_offsets").and_then(|places| match places[..] {
        [start, end] if Some(end) == rows.checked_mul(columns)?.checked_mul(4)?.checked_add(start) => Some(start),
        _ => None,
    });
    let start = place.and_then(|start| start.checked_add(8 + length));
    let start = start.ok_or_else(|| format!("`{name}` has a shape that its bytes do not fit; write it again"))?;
    Ok((start, [rows as usize, columns as usize]))
}

/// The numbers in little-endian bytes, by the function that reads one.
fn numbers<'a, const N: usize, T>(
    bytes: &'a [u8],
    read: impl Fn([u8; N]) -> T + 'a,
) -> impl ExactSizeIterator<Item = T> + 'a {
    bytes.chunks_exact(N).map(move |chunk| {
        let mut own = [0; N];
        own.copy_from_slice(chunk);
        read(own)
    })
}

fn tensor(view: &TensorView<'_>) -> Result<Stored, String> {
    let (bytes, shape) = (view.data(), view.shape());
    let tensor = match view.dtype() {
        Dtype::F32 => Tensor::new(numbers(bytes, f32::from_le_bytes).collect(), shape),
        Dtype::F16 => Tensor::new(numbers(bytes, f16::from_le_bytes).collect(), shape),
        Dtype::BF16 => Tensor::new(numbers(bytes, bf16::from_le_bytes).collect(), shape),
        Dtype::I32 => Tensor::new(numbers(bytes, i32::from_le_bytes).collect(), shape),
        Dtype::I64 => return narrow(numbers(bytes, i64::from_le_bytes), shape),
        other => return Ok(Stored::Other(format!("{other:?}").to_lowercase())),
    };
    tensor.map(Stored::Tensor).map_err(|e| e.to_string())
}

/// The bytes of a safetensors file.
pub fn encode(tensors: &[(String, &Tensor)]) -> Result<Vec<u8>, String> {
    let parts: Vec<(&str, Dtype, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, tensor)| {
            let (dtype, bytes) = bytes(tensor);
            (name.as_str(), dtype, tensor.shape().to_vec(), bytes)
        })
        .collect();
    let views: Result<Vec<_>, _> = parts
        .iter()
        .map(|(name, dtype, shape, bytes)| Ok((*name, TensorView::new(*dtype, shape.clone(), bytes)?)))
        .collect();
    let written = views.and_then(|views| safetensors::serialize(views, None));
    written.map_err(|e| format!("cannot write safetensors: {e}"))
}

fn bytes(tensor: &Tensor) -> (Dtype, Vec<u8>) {
    fn flat<T: Copy, const N: usize>(values: Option<&[T]>, write: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.unwrap_or_default().iter().flat_map(|&x| write(x)).collect()
    }
    match tensor.dtype() {
        DType::F16 => (Dtype::F16, flat(tensor.as_slice(), f16::to_le_bytes)),
        DType::Bf16 => (Dtype::BF16, flat(tensor.as_slice(), bf16::to_le_bytes)),
        DType::I32 => (Dtype::I32, flat(tensor.as_slice(), i32::to_le_bytes)),
        _ => (Dtype::F32, flat(tensor.as_slice(), f32::to_le_bytes)),
    }
}
