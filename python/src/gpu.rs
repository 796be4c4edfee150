//! GPU kernels on raw pointers and the caller's stream, for measurements and for other parts of the package.

use fulgurite::gpu::{self, Gemm, GemmConfig, Layouts, Losses, Major, Matrix, Number, Options, ProfileSource};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::path::PathBuf;

/// `(pointer, bytes, rows, cols, row_stride, batch, batch_stride)`; sizes and strides are in elements.
type RawMatrix = (u64, u64, u64, u64, u64, u64, u64);

fn matrix(gpu: &gpu::Gpu, (address, bytes, rows, cols, row_stride, batch, batch_stride): RawMatrix) -> Matrix {
    // SAFETY: the contract of this class: pointers are memory of this GPU that lives until the stream has finished the
    // call.
    let span = unsafe { gpu.device().memory(address, bytes) };
    Matrix { span, rows, cols, row_stride, batch, batch_stride }
}

/// A GPU of this machine. Kernels are compiled on first use.
#[pyclass]
pub struct Gpu(gpu::Gpu);

/// Maps mistakes of the caller to `ValueError`, and all other errors to `RuntimeError`.
fn refuse(e: fulgurite::Error) -> PyErr {
    match e {
        fulgurite::Error::Device(_) | fulgurite::Error::Profile(_) => PyRuntimeError::new_err(e.to_string()),
        _ => PyValueError::new_err(e.to_string()),
    }
}
fn wrong(what: String) -> PyErr {
    PyValueError::new_err(what)
}

#[pymethods]
impl Gpu {
    /// Opens the GPU with this index. `cache` is a folder for compiled kernels, `ptxas` an assembler.
    #[new]
    #[pyo3(signature = (ordinal = 0, cache = None, ptxas = None))]
    fn new(ordinal: u32, cache: Option<PathBuf>, ptxas: Option<PathBuf>) -> PyResult<Self> {
        let options = Options { cache, losses: Losses::Refuse, ptxas };
        Ok(
            Gpu(gpu::Gpu::open(ordinal, options, &ProfileSource::usual(&|name| std::env::var_os(name)))
                .map_err(refuse)?),
        )
    }

    /// Name of the GPU.
    #[getter]
    fn name(&self) -> String {
        self.0.name()
    }

    /// Enqueues c = a b on a stream, without waiting. `layout` has one letter for a and one for b: `k` if the summed
    /// dimension is contiguous, else `m` for a and `n` for b. `config` is (rows, cols, depth, cluster, band).
    #[pyo3(signature = (dtype, layout, a, b, c, stream, config = None))]
    #[allow(clippy::too_many_arguments)] // a call from Python, by name
    fn gemm(
        &self,
        dtype: &str,
        layout: &str,
        a: RawMatrix,
        b: RawMatrix,
        c: RawMatrix,
        stream: u64,
        config: Option<(u32, u32, u32, u32, u32)>,
    ) -> PyResult<()> {
        let number = Number::named(dtype).ok_or_else(|| wrong(format!("`dtype` is {dtype:?}, allowed: bf16, f16")))?;
        let layouts = match layout {
            "kk" => Layouts { a: Major::Inner, b: Major::Inner },
            "kn" => Layouts { a: Major::Inner, b: Major::Outer },
            "mk" => Layouts { a: Major::Outer, b: Major::Inner },
            "mn" => Layouts { a: Major::Outer, b: Major::Outer },
            _ => return Err(wrong(format!("`layout` is {layout:?}, allowed: kk, kn, mk, mn"))),
        };
        let config = config.map_or_else(GemmConfig::default, |(rows, cols, depth, cluster, band)| GemmConfig {
            rows,
            cols,
            depth,
            cluster,
            band,
        });
        let gemm = Gemm { number, layouts, config };
        // SAFETY: the contract of this class: the handle is a live stream of this GPU.
        let stream = unsafe { self.0.device().stream(stream) };
        self.0.product(&gemm, [a, b, c].map(|raw| matrix(&self.0, raw)), stream).map_err(refuse)
    }
}
