//! Calls with arrays on a GPU: the arrays stay there, and the launches go on the caller's stream.
//!
//! This module describes arrays as device tensors and finds the session of their GPU. The session does everything else,
//! including checks: those of the CPU, except what would read device memory (offsets, lengths, indices).

use crate::array::{Array, refuse, refuse_forward, wrong};
use crate::description::{Description, Role};
use crate::foreign;
use fulgurite::gpu::{
    self, Backward, BackwardOptions, DeviceSpan, Forward, ForwardOptions, Gpu, Options, ProfileSource, ResultType,
    Stream, TensorOperator, TensorUnit,
};
use fulgurite::{BlockLists, Choice, DType, Error, Inputs, Problem, Saved, TensorView, TensorViewMut};
use fulgurite_core::tensor::MAX_RANK;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, PoisonError};

/// The session on the GPU with this index, opened on first use. The user's cache folder holds compiled kernels and
/// profiles.
fn session(number: i32) -> PyResult<Arc<Gpu>> {
    static OPEN: Mutex<Vec<(i32, Arc<Gpu>)>> = Mutex::new(Vec::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, session)) = open.iter().find(|(known, _)| *known == number) {
        return Ok(session.clone());
    }
    let variable = |name: &str| std::env::var_os(name);
    let options = Options {
        cache: gpu::default_cache_dir(&variable),
        ptxas: variable("PTXAS").map(Into::into),
        ..Options::default()
    };
    let opened = Gpu::open(number.max(0) as u32, options, &ProfileSource::usual(&variable)).map_err(refuse)?;
    let session = Arc::new(opened);
    open.push((number, session.clone()));
    Ok(session)
}

/// An array on a GPU, as a device tensor.
struct DeviceArray<'a> {
    memory: DeviceSpan,
    arg: &'a str,
    array: &'a Array,
    strides: [usize; MAX_RANK],
    dtype: DType,
}

impl<'a> DeviceArray<'a> {
    fn new(session: &Gpu, arg: &'a str, array: &'a Array) -> PyResult<DeviceArray<'a>> {
        let (strides, address, bytes) = array.memory(arg)?;
        let number = array.gpu().filter(|number| *number == session.id().number as i32);
        if number.is_none() {
            let (got, want) = (array.place(), session.id().number);
            return Err(wrong(format!("`{arg}` is on {got}, `q` on cuda:{want}, allowed: one device")));
        }
        // SAFETY: the array is on this GPU, as its library says, and the library does not reuse the memory before work that
        // it later enqueues on the same stream. A remembered call uses the span again only for an array that is alive and
        // has the same memory.
        let span = unsafe { session.device().memory(address as u64, bytes as u64) };
        let memory = DeviceSpan::new(&**session.device(), span);
        Ok(DeviceArray { memory, arg, array, strides, dtype: array.dtype(arg)? })
    }

    fn view(&self) -> PyResult<TensorView<'_>> {
        let shape = self.array.shape();
        TensorView::on_device(&self.memory, self.dtype, shape, Some(&self.strides[..shape.len()]))
            .map_err(|e| wrong(format!("`{}`: {e}", self.arg)))
    }

    fn view_mut(&self) -> PyResult<TensorViewMut<'_>> {
        self.array.check_writable(self.arg)?;
        let shape = self.array.shape();
        TensorViewMut::on_device(&self.memory, self.dtype, shape, Some(&self.strides[..shape.len()]))
            .map_err(|e| wrong(format!("`{}`: {e}", self.arg)))
    }
}

/// Who asks for work on a GPU, and thereby on which stream the work goes.
#[derive(Clone, Copy)]
pub enum Caller<'a, 'py> {
    /// Python code with an array; the library of the array gives its current stream.
    Object(&'a Bound<'py, PyAny>),
    /// A library that calls without Python and gives the stream.
    Stream(u64),
}

impl Caller<'_, '_> {
    /// Does work that may take long, without the GIL.
    fn detach<T: Send>(self, work: impl FnOnce() -> T + Send) -> T {
        match self {
            Caller::Object(object) => object.py().detach(work),
            Caller::Stream(_) => work(),
        }
    }

    /// The stream; `None` if the library does not reveal it.
    fn stream(self, number: i32) -> PyResult<Option<u64>> {
        match self {
            Caller::Object(object) => foreign::current_stream(object, number),
            Caller::Stream(handle) => Ok(Some(handle)),
        }
    }
}

/// A call with arrays on a GPU.
pub struct Call<'a, 'py> {
    pub description: &'a Description,
    pub problem: &'a Problem,
    pub caller: Caller<'a, 'py>,
    /// q, k and v.
    pub rows: [&'a Array; 3],
    pub extras: &'a [Array],
}

impl<'a> Call<'a, '_> {
    /// The arrays of a forward call on the GPU: q, k and v, then the extra tensors.
    fn arrays(&self, session: &Gpu) -> PyResult<Vec<DeviceArray<'a>>> {
        let rows = ["q", "k", "v"].into_iter().zip(self.rows);
        let extras = self.description.roles.iter().map(Role::name).zip(self.extras);
        rows.chain(extras).map(|(arg, array)| DeviceArray::new(session, arg, array)).collect()
    }

    fn inputs<'b>(&'b self, arrays: &'b [DeviceArray<'b>]) -> PyResult<Inputs<'b>> {
        inputs_of(self.description, arrays.iter().map(DeviceArray::view))
    }

    /// q, k, v and the extra tensors.
    fn given(&self) -> impl Iterator<Item = &'a Array> + Clone {
        self.rows.into_iter().chain(self.extras)
    }

    fn number(&self) -> i32 {
        self.rows[0].gpu().expect("bug in fulgurite: q lies on a GPU")
    }

    fn sinks(&self) -> PyResult<Option<DType>> {
        let mut roles = self.description.roles.iter().zip(self.extras);
        roles.find(|(role, _)| **role == Role::Sinks).map(|(_, array)| array.dtype("sinks")).transpose()
    }
}

/// The tensors of a call on a device: q, k and v, then one for each role of the description.
pub fn inputs_of<'a>(
    description: &'a Description,
    mut views: impl Iterator<Item = PyResult<TensorView<'a>>>,
) -> PyResult<Inputs<'a>> {
    let mut next = || views.next().unwrap_or_else(|| Err(wrong("a tensor of the description is missing")));
    let rows = [next()?, next()?, next()?];
    let (mut inputs, lists) = description.inputs(rows, views)?;
    match lists {
        [Some(counts), Some(blocks), Some(full_counts), Some(full_blocks)] => {
            let (counts, blocks) = ([counts, full_counts], [blocks, full_blocks]);
            inputs.block_lists = Some(Box::new(BlockLists { counts, blocks }));
        }
        [None, None, None, None] => {}
        some => {
            let missing = some.iter().position(Option::is_none).unwrap_or_default();
            let name = BlockLists::NAMES[missing];
            return Err(wrong(format!("`{name}` is missing, a block mask on a GPU has all four lists")));
        }
    }
    Ok(inputs)
}

/// Enqueues work on the stream of a caller. A library that does not reveal its stream cannot wait for ours, so its results
/// are complete before it gets them.
fn on_stream(
    session: &Gpu,
    caller: Caller<'_, '_>,
    number: i32,
    work: impl FnOnce(Stream<'_>) -> Result<(), Error>,
) -> PyResult<()> {
    use fulgurite::sim::Device as _;
    let stream = caller.stream(number)?;
    // SAFETY: the handle is the current stream of the caller on this GPU, and it is alive during the call.
    let current = stream.map_or(Stream::default(), |handle| unsafe { session.device().stream(handle) });
    work(current).map_err(refuse)?;
    match stream {
        Some(_) => Ok(()),
        None => session.device().synchronize(Stream::default()).map_err(|e| refuse(e.into())),
    }
}

/// Sets how many SMs of a GPU persistent kernels leave to communication.
pub fn set_sm_margin(number: i32, count: u32) -> PyResult<()> {
    session(number)?.set_sm_margin(count);
    Ok(())
}

/// Applies an operator over whole tensors on the stream that the library of `object` works on.
pub fn apply(
    operator: &'static TensorOperator,
    object: &Bound<'_, PyAny>,
    arrays: &[Array],
    output: &Array,
) -> PyResult<()> {
    let number = output.gpu().ok_or_else(|| wrong("the output does not lie on a GPU"))?;
    let session = object.py().detach(|| session(number))?;
    let arrays = operator.inputs.iter().zip(arrays).map(|(arg, array)| DeviceArray::new(&session, arg, array));
    let arrays = arrays.collect::<PyResult<Vec<_>>>()?;
    let views = arrays.iter().map(DeviceArray::view).collect::<PyResult<Vec<_>>>()?;
    let output = DeviceArray::new(&session, "output", output)?;
    let mut output = output.view_mut()?;
    on_stream(&session, Caller::Object(object), number, |stream| session.apply(operator, &views, &mut output, stream))
}

/// The tensor unit that a choice asks for.
fn unit(choice: Choice) -> Option<TensorUnit> {
    match choice {
        Choice::CudaUnit(unit) => Some(unit),
        _ => None,
    }
}

/// Computes o, and the LSE if requested, on the current stream of q's library.
pub fn forward(call: &Call<'_, '_>, o: &Array, lse: Option<&Array>, results: ResultType) -> PyResult<()> {
    let &Call { description, problem, caller, .. } = call;
    let all = call.given().chain([o]).chain(lse);
    let recent = description.recent_calls.forward(results);
    if let Some((session, checked)) = recent.find(all.clone()) {
        return on_stream(&session, caller, call.number(), |stream| session.run_call(&checked, stream));
    }
    let (number, sinks) = (call.number(), call.sinks()?);
    let options = ForwardOptions {
        sinks,
        rescale: description.rescale,
        config: description.tuning,
        sync_config: description.sync_tuning,
        lse: lse.is_some(),
        unit: unit(description.choice),
        results,
    };
    let (session, prepared) = caller.detach(|| -> PyResult<_> {
        let session = session(number)?;
        let prepared = session.prepare::<Forward>(problem, &options).map_err(refuse)?;
        Ok((session, prepared))
    })?;
    let arrays = call.arrays(&session)?;
    let inputs = call.inputs(&arrays)?;
    let o = DeviceArray::new(&session, "out", o)?;
    let lse = lse.map(|lse| DeviceArray::new(&session, "lse", lse)).transpose()?;
    let (mut o, mut lse) = (o.view_mut()?, lse.as_ref().map(DeviceArray::view_mut).transpose()?);
    let checked =
        session.checked_forward(&prepared, &inputs, &mut o, lse.as_mut()).map(Arc::new).map_err(refuse_forward)?;
    on_stream(&session, caller, number, |stream| session.run_call(&checked, stream))?;
    recent.insert(all, session.clone(), checked);
    Ok(())
}

/// Options with a changed configuration, for measurements. Entries that the text leaves out are those of the problem's plan.
fn changed(
    session: &Gpu,
    problem: &Problem,
    options: BackwardOptions,
    text: Option<&str>,
) -> PyResult<BackwardOptions> {
    let Some(text) = text else { return Ok(options) };
    let usual = session.plan::<Backward>(problem, &options).map_err(refuse)?.config();
    let config = usual.changed(text).map_err(|e| wrong(e.to_string()))?;
    let head_dim = problem.head_dim().max(problem.value_dim());
    match config.has_kernel(head_dim.next_multiple_of(8) as u32) {
        true => Ok(BackwardOptions { config: Some(config), ..options }),
        false => Err(wrong(format!("`backward` is {text:?}: head_dim {head_dim} has no kernel with `{config}`"))),
    }
}

/// Fills the gradients of q, k, v, sinks and auxiliary tensors on the stream that the library of q works on. `names` are those
/// of the gradients.
pub fn backward(
    call: &Call<'_, '_>,
    [o, lse, d_o]: [&Array; 3],
    d_lse: Option<&Array>,
    (names, gradients): (&[&str], &[Array]),
    results: ResultType,
) -> PyResult<()> {
    let &Call { description, problem, caller, .. } = call;
    let all = call.given().chain([o, lse, d_o]).chain(d_lse).chain(gradients);
    let recent = description.recent_calls.backward(results);
    if let Some((session, checked)) = recent.find(all.clone()) {
        return on_stream(&session, caller, call.number(), |stream| session.run_call(&checked, stream));
    }
    let number = call.number();
    let unit = unit(description.choice);
    let options = BackwardOptions { d_lse: d_lse.is_some(), order: description.order, config: None, unit, results };
    let (session, prepared) = caller.detach(|| -> PyResult<_> {
        let session = session(number)?;
        let options = changed(&session, problem, options, description.backward.as_deref())?;
        let prepared = session.prepare::<Backward>(problem, &options).map_err(refuse)?;
        Ok((session, prepared))
    })?;
    let arrays = call.arrays(&session)?;
    let inputs = call.inputs(&arrays)?;
    let array = |arg, array| DeviceArray::new(&session, arg, array);
    let (o, lse, d_o) = (array("o", o)?, array("lse", lse)?, array("d_o", d_o)?);
    let d_lse = d_lse.map(|d_lse| array("d_lse", d_lse)).transpose()?;
    let d_lse = d_lse.as_ref().map(DeviceArray::view).transpose()?;
    let saved = Saved { o: o.view()?, lse: lse.view()?, d_o: d_o.view()?, d_lse };
    let arrays_of_results = names
        .iter()
        .zip(gradients)
        .map(|(name, gradient)| DeviceArray::new(&session, name, gradient))
        .collect::<PyResult<Vec<_>>>()?;
    let mut outputs = description.gradient_outputs(problem, arrays_of_results.iter().map(DeviceArray::view_mut))?;
    let checked = session.checked_backward(&prepared, &inputs, &saved, &mut outputs).map(Arc::new).map_err(refuse)?;
    on_stream(&session, caller, number, |stream| session.run_call(&checked, stream))?;
    recent.insert(all, session.clone(), checked);
    Ok(())
}
