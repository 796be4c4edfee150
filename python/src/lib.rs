//! The compiled half of the Python package `fulgurite`: attention on arrays of other libraries, without copies.
//!
//! A call consists of a description (`description::Description`, a text with everything but the tensors) and arrays,
//! which are read in place (`foreign`). All calls go through `dispatch`. Every mistake of a caller becomes a
//! `ValueError` with the message that Rust callers see. The GIL is released while computing.

#![deny(missing_docs)]

mod array;
mod blocks;
mod cache;
mod check;
mod cuda;
mod description;
mod dispatch;
mod expression;
mod foreign;
mod gil;
mod gpu;
mod jax;
mod memory;
mod neighbors;
mod operators;
mod read;
mod recent;
mod variants;
mod xla;

use pyo3::prelude::*;

/// Attention on arrays of other libraries. Use the package `fulgurite`.
#[pymodule]
mod _fulgurite {
    use crate::array::{Array, wrong};
    use crate::blocks;
    use crate::check::SavedObjects;
    use crate::dispatch::{self, Call};
    use crate::gil::detach;
    use crate::read;
    use fulgurite::gpu::ResultType;
    use fulgurite::{Choice, DType, Mask, Problem};
    use pyo3::prelude::*;

    #[pymodule_export]
    use crate::cache::{Cache, head_bits};
    #[pymodule_export]
    use crate::check::{Judged, Outcome};
    #[pymodule_export]
    use crate::description::Description;
    #[pymodule_export]
    use crate::gpu::Gpu;
    #[pymodule_export]
    use crate::neighbors::{Clusters, Index, assign, assign_and_sum, dbscan, hdbscan, project, svd};
    #[pymodule_export]
    use crate::variants::{SkipCounts, Variant};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::gil::only_in_the_main_interpreter()?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }

    /// f32 results that are added to given ones, or replace them.
    fn in_f32(add: bool) -> ResultType {
        if add { ResultType::Added } else { ResultType::F32 }
    }

    #[pymethods]
    impl Description {
        /// Parses a description.
        #[new]
        fn new(text: &str) -> PyResult<Description> {
            Description::parse(text).map_err(wrong)
        }

        /// Computes attention. `extras` are the tensors that the description names, in its order. Returns o, or (o,
        /// lse).
        #[pyo3(signature = (q, k, v, extras, out, want_lse))]
        fn forward(
            &self,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            extras: &Bound<'_, PyAny>,
            out: Option<Bound<'_, PyAny>>,
            want_lse: bool,
        ) -> PyResult<Py<PyAny>> {
            let extras: Vec<Bound<'_, PyAny>> = if extras.is_truthy()? { extras.extract()? } else { Vec::new() };
            let (o, lse) = dispatch::forward(self, [q, k, v], &extras, out.as_ref(), want_lse)?;
            match lse {
                None => Ok(o),
                Some(lse) => Ok((o, lse).into_pyobject(q.py())?.into_any().unbind()),
            }
        }

        /// Computes gradients in the order q, k, v, then of each tensor of `extras` that has one. `saved` is (o, lse,
        /// d_o, d_lse or None).
        #[pyo3(signature = (q, k, v, extras, saved, out))]
        fn backward(
            &self,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            extras: Vec<Bound<'_, PyAny>>,
            saved: SavedObjects<'_>,
            out: Option<Vec<Bound<'_, PyAny>>>,
        ) -> PyResult<Vec<Py<PyAny>>> {
            let (o, lse, d_o, d_lse) = &saved;
            let saved = [Some(o), Some(lse), Some(d_o), d_lse.as_ref()];
            dispatch::backward(self, [q, k, v], &extras, saved, out, ResultType::Input)
        }

        /// Computes attention of 16-bit arrays on a GPU into f32 `results`, o and lse: merges with what they hold if `add`,
        /// else replaces it.
        fn forward_into(
            &self,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            extras: Vec<Bound<'_, PyAny>>,
            results: (Bound<'_, PyAny>, Bound<'_, PyAny>),
            add: bool,
        ) -> PyResult<()> {
            let (o, lse) = &results;
            dispatch::forward_into(self, [q, k, v], &extras, [o, lse], in_f32(add))
        }

        /// Computes gradients of 16-bit arrays on a GPU into f32 arrays `results`, in the order of `backward`: adds to what
        /// they hold if `add`, else replaces it. `saved` is as for `backward`.
        #[allow(clippy::too_many_arguments)] // a call from Python, by name
        fn backward_into(
            &self,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            extras: Vec<Bound<'_, PyAny>>,
            saved: SavedObjects<'_>,
            results: Vec<Bound<'_, PyAny>>,
            add: bool,
        ) -> PyResult<()> {
            let (o, lse, d_o, d_lse) = &saved;
            let saved = [Some(o), Some(lse), Some(d_o), d_lse.as_ref()];
            dispatch::backward(self, [q, k, v], &extras, saved, Some(results), in_f32(add)).map(|_| ())
        }

        /// Compares the results of a call in host memory with the f64 oracle, by the tolerance rule. `results` are o, or o
        /// and lse; with `saved`, as for `backward`, they are the gradients.
        #[pyo3(signature = (q, k, v, extras, results, saved=None))]
        fn judge(
            &self,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            extras: Vec<Bound<'_, PyAny>>,
            results: Vec<Bound<'_, PyAny>>,
            saved: Option<SavedObjects<'_>>,
        ) -> PyResult<Vec<Judged>> {
            crate::check::judge(self, [q, k, v], &extras, &results, saved.as_ref())
        }

        /// Computes attention of host arrays. Returns o, lse and the counters: rescales that were possible and that were
        /// done, and blocks that were computed again.
        fn counted(
            &self,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            extras: Vec<Bound<'_, PyAny>>,
        ) -> PyResult<(Py<PyAny>, Py<PyAny>, [u64; 3])> {
            dispatch::counted(self, [q, k, v], &extras)
        }

        /// Which engine computes this call and why, in one line each.
        fn explain(
            &self,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            extras: Vec<Bound<'_, PyAny>>,
        ) -> PyResult<Vec<String>> {
            let call = Call::new(self, [q, k, v], &extras)?;
            Ok(fulgurite::explain(call.problem(), self.choice).lines().map(String::from).collect())
        }

        /// Checks the types and shapes of a call before its arrays exist: (type, shape) of q, k, v and of each tensor that the
        /// description names.
        fn check(&self, arrays: Vec<(String, Vec<usize>)>) -> PyResult<()> {
            crate::jax::check(self, &arrays)
        }

        /// Seconds that the engine takes for `times` forward calls, with everything prepared. The rest of a call's time
        /// from Python is overhead.
        fn time(
            &self,
            py: Python<'_>,
            q: &Bound<'_, PyAny>,
            k: &Bound<'_, PyAny>,
            v: &Bound<'_, PyAny>,
            out: &Bound<'_, PyAny>,
            times: usize,
        ) -> PyResult<f64> {
            let call = Call::new(self, [q, k, v], &[])?;
            let out = Array::read("out", out)?;
            detach(py, || call.time(&out, times))?
        }
    }

    /// The blocks that a mask can reach: for each (batch, head, query block) the partial and the full key blocks.
    /// `sizes` is (batch, heads, q_len, k_len), `block` is (rows, cols); `tensors` are the tensors that the mask reads,
    /// by `names`.
    #[pyfunction]
    fn block_lists(
        py: Python<'_>,
        mask: &str,
        sizes: [usize; 4],
        block: [usize; 2],
        names: Vec<String>,
        tensors: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<(blocks::Lists, blocks::Lists)> {
        blocks::reached(py, mask, sizes, block, &names, &tensors)
    }

    /// Sets how many SMs of a GPU persistent kernels leave to communication.
    #[pyfunction]
    fn set_sm_margin(device: i32, count: u32) -> PyResult<()> {
        crate::cuda::set_sm_margin(device, count)
    }

    /// The functions that JAX registers with XLA: `{platform: {name: capsule}}`.
    #[pyfunction]
    fn xla_targets(py: Python<'_>) -> PyResult<Bound<'_, pyo3::types::PyDict>> {
        crate::jax::targets(py)
    }

    /// The engines this machine can run, fastest first; the last is the f64 oracle.
    #[pyfunction]
    fn engines() -> Vec<String> {
        fulgurite::engines().iter().map(ToString::to_string).collect()
    }

    /// Name, summary and inputs of every operator over whole tensors.
    #[pyfunction]
    fn tensor_operators() -> Vec<(&'static str, &'static str, Vec<&'static str>)> {
        crate::operators::list()
    }

    /// Applies an operator over whole tensors, by name, to arrays of one library and device.
    #[pyfunction]
    fn apply(py: Python<'_>, name: &str, arrays: Vec<Bound<'_, PyAny>>, engine: &str) -> PyResult<Py<PyAny>> {
        crate::operators::apply(py, name, &arrays, engine)
    }

    /// Explains which engine runs an ordinary problem and why, in one line each; the first line describes the engine.
    #[pyfunction]
    fn explain(engine: &str) -> PyResult<Vec<String>> {
        let choice: Choice = engine.parse().map_err(|e: fulgurite::ChoiceError| wrong(e.to_string()))?;
        let chosen = fulgurite::engine(choice).map_err(|e| wrong(e.to_string()))?;
        let usual = Problem::builder().dense(1, 1024, 1024).heads(16, 16).head_dim(64).dtype(DType::F32);
        let usual = usual.mask(Mask::causal()).build().map_err(|e| wrong(e.to_string()))?;
        let why = fulgurite::explain(&usual, choice);
        Ok(std::iter::once(chosen.describe()).chain(why.lines().map(String::from)).collect())
    }

    /// Runs every case of the table on one engine in f32, f16 or bf16, and compares with the f64 oracle.
    #[pyfunction]
    fn check(py: Python<'_>, engine: &str, dtype: &str) -> PyResult<Vec<Outcome>> {
        crate::check::check(py, engine, dtype)
    }

    /// Reads the memory of the given host arrays once with `threads` threads and returns (sum of the 8-byte words,
    /// seconds). The clock starts when all threads are ready, so this measures the speed of memory.
    #[pyfunction]
    fn read_sum(py: Python<'_>, arrays: Vec<Bound<'_, PyAny>>, threads: usize) -> PyResult<(u64, f64)> {
        let arrays = arrays.iter().map(|array| Array::read("arrays", array)).collect::<PyResult<Vec<_>>>()?;
        let words = arrays.iter().map(|array| array.words("arrays")).collect::<PyResult<Vec<_>>>()?;
        detach(py, || read::read_sum(&words, threads.max(1)))
    }

    /// GFLOP/s of a large f32 matrix product by fulgurite's own micro-kernel.
    #[pyfunction]
    fn gemm_rate(py: Python<'_>, threads: usize) -> PyResult<f64> {
        detach(py, || fulgurite::matrix_product_gflops(threads.max(1)))
    }
}
