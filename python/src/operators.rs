//! Operators over whole tensors, called by name: on a GPU where the arrays lie there, else by definition or on the simulator.

use crate::array::{Array, Claims, Element, fresh, refuse, wrong};
use crate::cuda;
use crate::dispatch::one_place;
use crate::gil::detach;
use fulgurite::gpu::{Session, Tables, TensorOperator, TensorType, tensor_operators};
use fulgurite::sim::{Options, Sim};
use fulgurite::{DType, Tensor, TensorViewMut};
use pyo3::prelude::*;
use std::sync::Arc;

/// Name, summary and inputs of every operator.
pub fn list() -> Vec<(&'static str, &'static str, Vec<&'static str>)> {
    tensor_operators().map(|operator| (operator.name, operator.summary, operator.inputs.to_vec())).collect()
}

fn named(name: &str) -> PyResult<&'static TensorOperator> {
    tensor_operators().find(|operator| operator.name == name).ok_or_else(|| {
        let all = tensor_operators().map(|operator| operator.name).collect::<Vec<_>>().join(", ");
        wrong(format!("`name` is {name:?}, allowed: {all}"))
    })
}

/// Applies an operator to arrays of one library and device, and returns an array of the same kind.
pub fn apply(py: Python<'_>, name: &str, objects: &[Bound<'_, PyAny>], engine: &str) -> PyResult<Py<PyAny>> {
    let operator = named(name)?;
    // An input without a name is one too many, which the operator refuses below.
    let names = || operator.inputs.iter().copied().chain(std::iter::repeat("extra"));
    let arrays = names().zip(objects).map(|(arg, object)| Array::read(arg, object)).collect::<PyResult<Vec<_>>>()?;
    let of = |(arg, array): (&str, &Array)| Ok(TensorType { dtype: array.dtype(arg)?, shape: array.shape().to_vec() });
    let types = names().zip(&arrays).map(of).collect::<PyResult<Vec<_>>>()?;
    let want = operator.output(&types).map_err(|e| wrong(e.to_string()))?;
    let [first, ..] = &arrays[..] else {
        return Err(wrong(format!("`{name}` has no inputs")));
    };
    one_place((operator.inputs[0], first), names().zip(&arrays).skip(1))?;
    let on_gpu = first.gpu().is_some();
    let engines: &[&str] = if on_gpu { &["best", "cuda"] } else { &["best", "oracle", "sim"] };
    if !engines.contains(&engine) {
        let (place, allowed) = (first.place(), engines.join(", "));
        return Err(wrong(format!("`engine` is {engine:?}, allowed for tensors on {place}: {allowed}")));
    }
    let result = fresh(&objects[0], first, &want.shape, (want.dtype == DType::F32).then_some(Element::F32))?;
    let output = Array::read("output", result.object(py))?;
    if on_gpu {
        cuda::apply(operator, &objects[0], &arrays, &output)?;
    } else {
        let mut claims = Claims::default();
        let views =
            names().zip(&arrays).map(|(arg, array)| array.view(arg, &mut claims)).collect::<PyResult<Vec<_>>>()?;
        let mut to = output.view_mut("output", &mut claims)?;
        let computed = detach(py, || match engine {
            "sim" => Session::new(Arc::new(Sim::new(Options::default())), Tables::default())
                .apply_to_host(operator, &views)
                .map_err(refuse),
            _ => operator.exact(&views).map_err(|e| wrong(e.to_string())),
        })??;
        copy(&computed, &mut to);
    }
    result.finish(py)
}

fn copy(from: &Tensor, to: &mut TensorViewMut<'_>) {
    to.write_f64(&from.view().to_f64());
}
