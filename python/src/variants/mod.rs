//! Variants of attention: a description and arrays in, filled arrays out. Each variant implements [`Operator`]; the rest
//! is the same for all of them.
//!
//! The description is a text, complete as that of attention (`description`), so that it may be stored in a compiled
//! graph. Entries are separated by `;`, words by spaces; the first entry names the variant. `fulgurite/_variants.py`
//! writes it.

mod gated_delta;
mod lighthouse;
mod parallax;
mod skip;

pub use skip::SkipCounts;

use crate::array::{Array, Claims, Element, Fresh, fresh, refuse, wrong};
use crate::check::Judged;
use crate::dispatch::{on_host, one_place};
use crate::gil::detach;
use fulgurite::variants::cpu;
use fulgurite::{Choice, Settings, Tensor, TensorViewMut};
use fulgurite_core::compare::Verdict;
use fulgurite_core::{Data, DataMut};
use pyo3::prelude::*;

/// A result to be allocated.
pub struct Wanted {
    name: &'static str,
    shape: Vec<usize>,
    /// The type, if it is not that of the first tensor.
    element: Option<Element>,
}

impl Wanted {
    /// A result of the type of the first tensor.
    fn own(name: &'static str, shape: Vec<usize>) -> Wanted {
        Wanted { name, shape, element: None }
    }
    /// An f32 result.
    fn f32(name: &'static str, shape: Vec<usize>) -> Wanted {
        Wanted { name, shape, element: Some(Element::F32) }
    }
    /// A result of 32-bit integers.
    fn i32(name: &'static str, shape: Vec<usize>) -> Wanted {
        Wanted { name, shape, element: Some(Element::I32) }
    }
}

/// What a variant computes. Arrays come in the order of [`Operator::names`], results in that of `outputs` and
/// `gradients`.
pub trait Operator: Send + Sync {
    /// Names of the input tensors.
    fn names(&self) -> Vec<&str>;
    /// The results of forward.
    fn outputs(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>>;
    /// Computes forward into `outputs`.
    fn forward(&self, arrays: &[Array], outputs: &[Array]) -> PyResult<()>;
    /// The results of backward.
    fn gradients(&self, arrays: &[Array]) -> PyResult<Vec<Wanted>>;
    /// Computes backward into `gradients`. `outputs` are those of forward; each of their gradients may be missing.
    fn backward(
        &self,
        arrays: &[Array],
        outputs: &[Array],
        d_outputs: &[Option<Array>],
        gradients: &[Array],
    ) -> PyResult<()>;
    /// Computes forward into `outputs`, and counts tiles.
    fn counts(&self, _arrays: &[Array], _outputs: &[Array]) -> PyResult<SkipCounts> {
        Err(wrong("only block skipping counts tiles"))
    }
    /// Compares results with the f64 oracle, by the tolerance rule: outputs, or gradients where they are given.
    fn judge(
        &self,
        arrays: &[Array],
        outputs: &[Array],
        gradients: Option<(&[Option<Array>], &[Array])>,
    ) -> PyResult<Vec<(String, Verdict)>>;
}

/// The engine of a variant: the CPU with an instruction set and a number of threads, resolved once.
#[derive(Clone)]
pub struct Engine {
    choice: Choice,
    settings: Settings,
}

impl Engine {
    /// The engine for `feature`.
    pub fn new(choice: Choice, settings: &Settings, feature: &str) -> Result<Engine, String> {
        let found = cpu(choice, settings, feature).map_err(|e| e.to_string())?;
        let settings = settings.clone().threads(found.threads());
        Ok(Engine { choice: Choice::CpuIsa(found.isa()), settings })
    }

    /// The options of the functions that take bound tensors.
    pub fn options(&self) -> PyResult<fulgurite::variants::Options> {
        Ok(cpu(self.choice, &self.settings, "this variant").map_err(refuse)?.options())
    }
}

/// The entries of a description: a key and words.
fn entries(text: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    text.split(';').filter(|entry| !entry.is_empty()).map(|entry| {
        let (key, rest) = entry.split_once(' ').unwrap_or((entry, ""));
        (key, rest.split_ascii_whitespace().collect())
    })
}

fn unknown(key: &str, words: &[&str]) -> String {
    format!("description has the unknown entry \"{key} {}\"", words.join(" "))
}

/// A copy of an array as a tensor.
fn tensor(name: &str, array: &Array) -> PyResult<Tensor> {
    Ok(array.view(name, &mut Claims::default())?.to_tensor())
}

/// Copies a tensor into an array of the same type and size.
pub fn copy_into(from: &Tensor, to: &mut TensorViewMut<'_>) -> PyResult<()> {
    let view = from.view();
    let size = from.shape().iter().product::<usize>();
    match (view.data(), to.data_mut()) {
        (Data::F32(from), DataMut::F32(to)) if to.len() == size => to.copy_from_slice(from),
        (Data::F16(from), DataMut::F16(to)) if to.len() == size => to.copy_from_slice(from),
        (Data::Bf16(from), DataMut::Bf16(to)) if to.len() == size => to.copy_from_slice(from),
        _ => to.write_f64(&view.to_f64()),
    }
    Ok(())
}

/// A variant and its options, prepared for many calls.
#[pyclass(frozen)]
pub struct Variant(Box<dyn Operator>);

type Objects<'py> = Vec<Bound<'py, PyAny>>;

impl Variant {
    fn read(&self, tensors: &[Bound<'_, PyAny>]) -> PyResult<Vec<Array>> {
        let names = self.0.names();
        if tensors.len() != names.len() {
            let (got, want) = (tensors.len(), names.len());
            return Err(wrong(format!("{got} tensors come with a description of {want}")));
        }
        let pairs = names.iter().zip(tensors);
        let arrays = pairs.map(|(name, object)| Array::read(name, object)).collect::<PyResult<Vec<_>>>()?;
        one_place((names[0], &arrays[0]), names.iter().copied().zip(&arrays).skip(1))?;
        on_host([(names[0], &arrays[0])])?;
        Ok(arrays)
    }
}

fn allocate(like: &Bound<'_, PyAny>, array: &Array, wanted: &[Wanted]) -> PyResult<(Vec<Fresh>, Vec<Array>)> {
    let made = wanted.iter().map(|one| fresh(like, array, &one.shape, one.element)).collect::<PyResult<Vec<_>>>()?;
    let pairs = wanted.iter().zip(&made);
    let arrays =
        pairs.map(|(one, made)| Array::of_result(one.name, made.object(like.py()))).collect::<PyResult<_>>()?;
    Ok((made, arrays))
}

fn finish(py: Python<'_>, made: Vec<Fresh>) -> PyResult<Vec<Py<PyAny>>> {
    made.into_iter().map(|made| made.finish(py)).collect()
}

fn optional(objects: &[Option<Bound<'_, PyAny>>]) -> PyResult<Vec<Option<Array>>> {
    let read = |object: &Option<Bound<'_, PyAny>>| object.as_ref().map(|x| Array::read("d_output", x)).transpose();
    objects.iter().map(read).collect()
}

fn all(name: &str, objects: &[Bound<'_, PyAny>]) -> PyResult<Vec<Array>> {
    objects.iter().map(|object| Array::read(name, object)).collect()
}

#[pymethods]
impl Variant {
    /// Parses a description.
    #[new]
    fn new(text: &str) -> PyResult<Variant> {
        let operator: Box<dyn Operator> = match (entries(text).next(), text.split_once(';')) {
            (Some(("gated_delta", _)), _) => Box::new(gated_delta::GatedDelta::parse(text).map_err(wrong)?),
            (Some(("lighthouse", _)), _) => Box::new(lighthouse::Lighthouse::parse(text).map_err(wrong)?),
            (Some(("parallax", _)), Some((_, rest))) => Box::new(parallax::Parallax::parse(rest).map_err(wrong)?),
            (Some(("skip", words)), Some((_, rest))) => {
                Box::new(skip::Skip::parse(&words.join(","), rest).map_err(wrong)?)
            }
            (other, _) => {
                let allowed = "gated_delta, lighthouse, parallax, skip";
                return Err(wrong(format!("description begins with {other:?}, allowed: {allowed}")));
            }
        };
        Ok(Variant(operator))
    }

    /// Computes the outputs into new arrays of the same kind as the first tensor.
    fn forward(&self, py: Python<'_>, tensors: Objects<'_>) -> PyResult<Vec<Py<PyAny>>> {
        let arrays = self.read(&tensors)?;
        let (made, outputs) = allocate(&tensors[0], &arrays[0], &self.0.outputs(&arrays)?)?;
        detach(py, || self.0.forward(&arrays, &outputs))??;
        finish(py, made)
    }

    /// Computes the outputs, and how many tiles were kept.
    fn counted(&self, py: Python<'_>, tensors: Objects<'_>) -> PyResult<(Vec<Py<PyAny>>, SkipCounts)> {
        let arrays = self.read(&tensors)?;
        let (made, outputs) = allocate(&tensors[0], &arrays[0], &self.0.outputs(&arrays)?)?;
        let counts = detach(py, || self.0.counts(&arrays, &outputs))??;
        Ok((finish(py, made)?, counts))
    }

    /// Computes the gradients of the tensors that have one. `outputs` are those of forward; each of their gradients may
    /// be `None`.
    fn backward(
        &self,
        py: Python<'_>,
        tensors: Objects<'_>,
        outputs: Objects<'_>,
        d_outputs: Vec<Option<Bound<'_, PyAny>>>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let arrays = self.read(&tensors)?;
        let (outputs, d_outputs) = (all("output", &outputs)?, optional(&d_outputs)?);
        let (made, gradients) = allocate(&tensors[0], &arrays[0], &self.0.gradients(&arrays)?)?;
        detach(py, || self.0.backward(&arrays, &outputs, &d_outputs, &gradients))??;
        finish(py, made)
    }

    /// Compares outputs, or gradients where they are given, with the f64 oracle, by the tolerance rule.
    #[pyo3(signature = (tensors, outputs, d_outputs=None, gradients=None))]
    fn judge(
        &self,
        py: Python<'_>,
        tensors: Objects<'_>,
        outputs: Objects<'_>,
        d_outputs: Option<Vec<Option<Bound<'_, PyAny>>>>,
        gradients: Option<Objects<'_>>,
    ) -> PyResult<Vec<Judged>> {
        let (arrays, outputs) = (self.read(&tensors)?, all("output", &outputs)?);
        let given = match (&d_outputs, &gradients) {
            (Some(d_outputs), Some(gradients)) => Some((optional(d_outputs)?, all("gradient", gradients)?)),
            _ => None,
        };
        let given = given.as_ref().map(|(d_outputs, gradients)| (&d_outputs[..], &gradients[..]));
        let verdicts = detach(py, || self.0.judge(&arrays, &outputs, given))??;
        Ok(verdicts.into_iter().map(Judged::from).collect())
    }

    /// Seconds that the engine takes for `times` forward calls into the same outputs.
    fn time(&self, py: Python<'_>, tensors: Objects<'_>, times: usize) -> PyResult<f64> {
        let arrays = self.read(&tensors)?;
        let (_made, outputs) = allocate(&tensors[0], &arrays[0], &self.0.outputs(&arrays)?)?;
        detach(py, || {
            let start = std::time::Instant::now();
            (0..times).try_for_each(|_| self.0.forward(&arrays, &outputs))?;
            Ok(start.elapsed().as_secs_f64())
        })?
    }
}
