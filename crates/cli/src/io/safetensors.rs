//! Tensors in a safetensors file.

use super::{Stored, Tensors, narrow};
use fulgurite::{DType, Tensor, bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};

/// Reads the bytes of a safetensors file. Any bytes: what is not such a file is an error.
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
    let file = SafeTensors::deserialize(bytes)
        .map_err(|e| format!("not a whole safetensors file ({e}); write it again, it may be cut off"))?;
    let mut tensors = Tensors::new();
    for (name, view) in file.iter() {
        let stored = tensor(&view).map_err(|e| format!("`{name}`: {e}"))?;
        tensors.insert(name.to_string(), stored);
    }
    Ok(tensors)
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
