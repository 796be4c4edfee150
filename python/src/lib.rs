//! The compiled half of the Python package `fulgurite`: attention on raw pointers.
//!
//! Tensors arrive as `(pointer, dtype, shape, strides)`, strides in elements, and options as a dict; see
//! `tensor::Raw` and `call::Call`. The Python half (`fulgurite/__init__.py`) takes them from arrays and
//! keeps those alive. Everything a caller can get wrong is a `ValueError` with the message of the error that
//! Rust callers see. The GIL is released while computing.
//!
//! What this cannot check is whether a pointer points to what was said: these functions are for the Python
//! half and for measurements, not for users.

#![deny(missing_docs)]

mod call;
mod gpu;
mod memory;
mod read;
mod tensor;

use pyo3::prelude::*;

/// Attention on raw pointers. Use the package `fulgurite`.
#[pymodule]
mod _fulgurite {
    use crate::call::{Call, refuse};
    use crate::memory::Buffer;
    use crate::read;
    use crate::tensor::{Claims, Raw};
    use fulgurite::{GradientOutputs, Outputs, Run, Saved, Tally};
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::gpu::Gpu;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// Fills o and lse. Returns how many rescales were possible, how many were done, and how many blocks were
    /// done again.
    #[pyfunction]
    fn forward(py: Python<'_>, q: Raw, k: Raw, v: Raw, outputs: (Raw, Raw), call: Call) -> PyResult<(u64, u64, u64)> {
        let (o, lse) = outputs;
        py.detach(|| {
            let mut claims = Claims::default();
            let problem = call.problem(&q, &k, &v)?;
            let engine = call.engine()?;
            let inputs = call.inputs(&mut claims, &q, &k, &v)?;
            let mut outputs = Outputs { o: o.view_mut("o", &mut claims)?, lse: lse.view_mut("lse", &mut claims)? };
            let tally = Tally::default();
            engine.forward_into(&problem, &inputs, &mut outputs, &Run::default().tally(&tally)).map_err(refuse)?;
            let counters = tally.counters();
            Ok((counters.rescales_possible, counters.rescales_done, counters.blocks_redone))
        })
    }

    /// Fills d_q, d_k, d_v and, where there are sinks, d_sinks. `saved` is (o, lse, d_o, d_lse or None).
    #[pyfunction]
    fn backward(
        py: Python<'_>,
        q: Raw,
        k: Raw,
        v: Raw,
        saved: (Raw, Raw, Raw, Option<Raw>),
        gradients: (Raw, Raw, Raw, Option<Raw>),
        call: Call,
    ) -> PyResult<()> {
        let (o, lse, d_o, d_lse) = saved;
        let (d_q, d_k, d_v, d_sinks) = gradients;
        py.detach(|| {
            let mut claims = Claims::default();
            let problem = call.problem(&q, &k, &v)?;
            let engine = call.engine()?;
            let inputs = call.inputs(&mut claims, &q, &k, &v)?;
            let saved = Saved {
                o: o.view("o", &mut claims)?,
                lse: lse.view("lse", &mut claims)?,
                d_o: d_o.view("d_o", &mut claims)?,
                d_lse: d_lse.as_ref().map(|raw| raw.view("d_lse", &mut claims)).transpose()?,
            };
            let mut gradients = GradientOutputs {
                d_q: d_q.view_mut("d_q", &mut claims)?,
                d_k: d_k.view_mut("d_k", &mut claims)?,
                d_v: d_v.view_mut("d_v", &mut claims)?,
                d_sinks: d_sinks.as_ref().map(|raw| raw.view_mut("d_sinks", &mut claims)).transpose()?,
                d_aux: problem.aux().iter().map(|_| None).collect(),
            };
            engine.backward_into(&problem, &inputs, &saved, &mut gradients, &Run::default()).map_err(refuse)
        })
    }

    /// The engines this machine can run, fastest first; the last is the f64 oracle.
    #[pyfunction]
    fn engines() -> Vec<String> {
        fulgurite::engines().iter().map(ToString::to_string).collect()
    }

    /// Reads every byte of the given `(pointer, bytes)` buffers once with `threads` threads and returns (sum of
    /// the 8-byte words, seconds). The clock starts when all threads are ready: this is the speed of memory.
    #[pyfunction]
    fn read_sum(py: Python<'_>, buffers: Vec<(usize, usize)>, threads: usize) -> PyResult<(u64, f64)> {
        py.detach(|| {
            let buffers: Vec<_> = buffers.iter().map(|&(pointer, bytes)| Buffer::new(pointer, bytes)).collect();
            let buffers = buffers.into_iter().collect::<Result<Vec<_>, _>>().map_err(refuse)?;
            let slices: Vec<&[u64]> = buffers.iter().map(Buffer::words).collect();
            Ok(read::read_sum(&slices, threads.max(1)))
        })
    }

    /// GFLOP/s of a large f32 matrix product by our own micro-kernel.
    #[pyfunction]
    fn gemm_rate(py: Python<'_>, threads: usize) -> f64 {
        py.detach(|| fulgurite::matrix_product_gflops(threads.max(1)))
    }
}
