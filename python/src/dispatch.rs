//! The single path of every call: a description and arrays in, filled arrays out.
//!
//! Arrays in host memory go to the engine that the description names. A call with arrays on a GPU branches off to
//! `cuda`, with the same description and the same arrays.

use crate::array::{Array, Claims, Element, Place, fresh, refuse, refuse_forward, wrong};
use crate::blocks;
use crate::cuda::{self, Caller};
use crate::description::{Description, GradientFields, Role, in_32_bits};
use crate::gil::detach;
use fulgurite::gpu::ResultType;
use fulgurite::{
    BlockMask, Choice, DType, Forward, Gradients, Inputs, Outputs, Problem, Run, Saved, Tally, Tensor, TensorViewMut,
};
use fulgurite_core::compare::{self, Verdict};
use fulgurite_core::stop;
use pyo3::prelude::*;
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

thread_local! {
    /// Scratch space for an LSE that the caller does not want.
    static LSE: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// The arrays of a call.
pub struct Call<'a> {
    description: &'a Description,
    q: Array,
    k: Array,
    v: Array,
    extras: Vec<Array>,
    problem: Arc<Problem>,
    blocks: Option<BlockMask>,
}

impl<'a> Call<'a> {
    /// Reads the arrays and finds the problem that they define.
    pub fn new(
        description: &'a Description,
        [q, k, v]: [&Bound<'_, PyAny>; 3],
        extras: &[Bound<'_, PyAny>],
    ) -> PyResult<Call<'a>> {
        let (q, k, v) = (Array::read("q", q)?, Array::read("k", k)?, Array::read("v", v)?);
        if extras.len() != description.roles.len() {
            let (got, want) = (extras.len(), description.roles.len());
            return Err(wrong(format!("{got} tensors come with a description of {want}")));
        }
        let pairs = description.roles.iter().zip(extras);
        let extras = pairs.map(|(role, object)| Array::read(role.name(), object)).collect::<PyResult<Vec<_>>>()?;
        Call::of_arrays(description, [q, k, v], extras)
    }

    /// Finds the problem that the arrays define; `extras` has one for each role of the description. Needs no Python.
    pub fn of_arrays(description: &'a Description, [q, k, v]: [Array; 3], extras: Vec<Array>) -> PyResult<Call<'a>> {
        one_place(("q", &q), [("k", &k), ("v", &v)].into_iter().chain(names(description).zip(&extras)))?;
        let reaches = matches!(description.choice, Choice::Best | Choice::Cuda | Choice::CudaUnit(_));
        if q.gpu().is_some() && !reaches {
            let (place, choice) = (q.place(), description.choice);
            return Err(wrong(format!(
                "`engine` is {choice}, which does not reach {place}, allowed: best, cuda, cuda:wgmma, cuda:mma.sync"
            )));
        }
        let problem = description.problem([&q, &k, &v], &extras)?;
        let blocks = match q.place() {
            Place::Host => blocks::from_lists(description, &problem, &extras)?,
            _ => None,
        };
        Ok(Call { description, q, k, v, extras, problem, blocks })
    }

    fn inputs<'b>(&'b self, claims: &mut Claims<'b>) -> PyResult<Inputs<'b>> {
        inputs_of(self.description, [&self.q, &self.k, &self.v], &self.extras, self.blocks.as_ref(), claims)
    }

    /// Fills o, and lse if it is given.
    pub fn forward(&self, py: Python<'_>, o: &Array, lse: Option<&Array>) -> PyResult<()> {
        detach(py, || self.forward_on_host(o, lse))?
    }

    /// Like [`forward`](Self::forward), on a thread that need not know Python.
    pub fn forward_on_host(&self, o: &Array, lse: Option<&Array>) -> PyResult<()> {
        on_host([("out", o)].into_iter().chain(lse.map(|lse| ("lse", lse))))?;
        self.with_outputs(o, lse, |inputs, outputs| self.engine_forward(inputs, outputs, &Run::default()))
    }

    fn engine_forward(&self, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>, run: &Run<'_>) -> PyResult<()> {
        self.check_32_bits(inputs)?;
        self.description.engine.forward_into(&self.problem, inputs, outputs, run).map_err(refuse_forward)
    }

    /// Refuses integers that an expression loads and computes with, if the results could leave 32 bits.
    fn check_32_bits(&self, inputs: &Inputs<'_>) -> PyResult<()> {
        if !self.problem.computes_with_loads() {
            return Ok(());
        }
        in_32_bits(inputs.bind(&self.problem).map_err(|e| refuse_forward(e.into()))?.past_32_bits())
    }

    /// The problem that the arrays and the description define.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Seconds that the engine takes for `times` calls; the work around it is done once.
    pub fn time(&self, o: &Array, times: usize) -> PyResult<f64> {
        self.with_outputs(o, None, |inputs, outputs| {
            let start = Instant::now();
            (0..times).try_for_each(|_| self.engine_forward(inputs, outputs, &Run::default()))?;
            Ok(start.elapsed().as_secs_f64())
        })
    }

    fn with_outputs<T>(
        &self,
        o: &Array,
        lse: Option<&Array>,
        run: impl FnOnce(&Inputs<'_>, &mut Outputs<'_>) -> PyResult<T>,
    ) -> PyResult<T> {
        let mut claims = Claims::default();
        let inputs = self.inputs(&mut claims)?;
        let o = o.view_mut("out", &mut claims)?;
        match lse {
            Some(lse) => run(&inputs, &mut Outputs { o, lse: lse.view_mut("lse", &mut claims)? }),
            None => {
                // Taken out, because a signal handler may make a call during this one.
                let mut room = LSE.take();
                let shape = self.problem.lse_shape();
                let need = shape.iter().product();
                if room.len() < need {
                    room = stop::zeros("the LSE", need);
                }
                let lse = TensorViewMut::new(&mut room[..need], &shape).map_err(|e| refuse(e.into()))?;
                let done = run(&inputs, &mut Outputs { o, lse });
                LSE.set(room);
                done
            }
        }
    }

    /// This call for arrays on a GPU.
    pub fn on_gpu<'b, 'py>(&'b self, caller: Caller<'b, 'py>) -> cuda::Call<'b, 'py> {
        let Call { description, q, k, v, extras, problem, .. } = self;
        cuda::Call { description, problem, caller, rows: [q, k, v], extras }
    }

    /// For each result of backward: its name, its shape, and whether it is f32 regardless of q.
    pub fn gradients(&self) -> Vec<(String, Vec<usize>, bool)> {
        let problem = &self.problem;
        let rows = [("d_q", problem.q_shape()), ("d_k", problem.k_shape()), ("d_v", problem.v_shape())];
        let mut all: Vec<_> = rows.into_iter().map(|(name, shape)| (name.to_string(), shape, false)).collect();
        for (role, array) in self.description.roles.iter().zip(&self.extras) {
            if matches!(role, Role::Sinks | Role::Aux { grad: true, .. }) {
                all.push((format!("d_{}", role.name()), array.shape().to_vec(), true));
            }
        }
        all
    }

    /// Compares o, and the LSE if it is given, with the oracle, by the tolerance rule.
    pub fn judge_forward(&self, o: &Array, lse: Option<&Array>) -> PyResult<Vec<(String, Verdict)>> {
        let (problem, mut claims) = (&self.problem, Claims::default());
        let inputs = self.inputs(&mut claims)?;
        let bound = inputs.bind(problem).map_err(|e| refuse(e.into()))?;
        let o = tensor("o", o, problem.dtype(), &problem.o_shape(), &mut claims)?;
        let given = lse.map(|lse| tensor("lse", lse, DType::F32, &problem.lse_shape(), &mut claims)).transpose()?;
        let is_asked = |name: &str| name != "lse" || lse.is_some();
        let lse = match given {
            Some(lse) => lse,
            None => Tensor::zeros(DType::F32, &problem.lse_shape()).map_err(|e| refuse(e.into()))?,
        };
        let verdicts = compare::check_forward(&bound, &Forward { o, lse }, 0);
        Ok(verdicts.into_iter().filter(|(name, _)| is_asked(name)).collect())
    }

    /// Compares gradients, in the order of [`Call::gradients`], with the oracle, by the tolerance rule.
    pub fn judge_backward(
        &self,
        saved: [&Array; 3],
        d_lse: Option<&Array>,
        gradients: &[Array],
    ) -> PyResult<Vec<(String, Verdict)>> {
        let want = self.gradients();
        count(&want, gradients)?;
        let (problem, mut claims) = (&self.problem, Claims::default());
        let inputs = self.inputs(&mut claims)?;
        let bound = inputs.bind(problem).map_err(|e| refuse(e.into()))?;
        let [o, lse, d_o] = saved;
        let saved = Saved {
            o: o.view("o", &mut claims)?,
            lse: lse.view("lse", &mut claims)?,
            d_o: d_o.view("d_o", &mut claims)?,
            d_lse: d_lse.map(|array| array.view("d_lse", &mut claims)).transpose()?,
        };
        saved.check(problem).map_err(|e| refuse(e.into()))?;
        let tensors = want.iter().zip(gradients).map(|((name, shape, f32), array)| {
            tensor(name, array, if *f32 { DType::F32 } else { problem.dtype() }, shape, &mut claims)
        });
        let GradientFields { rows: [d_q, d_k, d_v], d_sinks, d_aux } =
            self.description.gradient_fields(problem, tensors)?;
        Ok(compare::check_backward(&bound, &saved, &Gradients { d_q, d_k, d_v, d_sinks, d_aux }, 0))
    }

    /// Fills `gradients`, in the order of [`Call::gradients`].
    pub fn backward(
        &self,
        q: &Bound<'_, PyAny>,
        saved: [Option<&Array>; 4],
        gradients: &[Array],
        results: ResultType,
    ) -> PyResult<()> {
        match self.q.gpu() {
            Some(_) => self.backward_on_gpu(Caller::Object(q), saved, gradients, results),
            None if results.is_f32() => Err(only_on_gpu(&self.q)),
            None => detach(q.py(), || self.backward_on_host(saved, gradients))?,
        }
    }

    /// Like [`backward`](Self::backward), for arrays on a GPU.
    pub fn backward_on_gpu(
        &self,
        caller: Caller<'_, '_>,
        saved: [Option<&Array>; 4],
        gradients: &[Array],
        results: ResultType,
    ) -> PyResult<()> {
        let want = self.gradients();
        count(&want, gradients)?;
        let names: Vec<&str> = want.iter().map(|(name, ..)| name.as_str()).collect();
        let ([o, lse, d_o], d_lse) = there(saved)?;
        cuda::backward(&self.on_gpu(caller), [o, lse, d_o], d_lse, (&names, gradients), results)
    }

    /// Like [`backward`](Self::backward), for arrays in host memory, on a thread that need not know Python.
    pub fn backward_on_host(&self, saved: [Option<&Array>; 4], gradients: &[Array]) -> PyResult<()> {
        let want = self.gradients();
        count(&want, gradients)?;
        let names = || want.iter().map(|(name, ..)| name.as_str());
        let ([o, lse, d_o], d_lse) = there(saved)?;
        let given = [("o", o), ("lse", lse), ("d_o", d_o)].into_iter().chain(d_lse.map(|array| ("d_lse", array)));
        on_host(given.chain(names().zip(gradients)))?;
        let mut claims = Claims::default();
        let inputs = self.inputs(&mut claims)?;
        let saved = Saved {
            o: o.view("o", &mut claims)?,
            lse: lse.view("lse", &mut claims)?,
            d_o: d_o.view("d_o", &mut claims)?,
            d_lse: d_lse.map(|array| array.view("d_lse", &mut claims)).transpose()?,
        };
        let views = names().zip(gradients).map(|(name, array)| array.view_mut(name, &mut claims));
        let mut results = self.description.gradient_outputs(&self.problem, views)?;
        self.check_32_bits(&inputs)?;
        let engine = &self.description.engine;
        engine.backward_into(&self.problem, &inputs, &saved, &mut results, &Run::default()).map_err(refuse)
    }
}

/// The results and gradients of forward that backward needs: o, lse and d_o, and d_lse if it was given.
fn there(saved: [Option<&Array>; 4]) -> PyResult<([&Array; 3], Option<&Array>)> {
    match saved {
        [Some(o), Some(lse), Some(d_o), d_lse] => Ok(([o, lse, d_o], d_lse)),
        _ => Err(wrong("`o`, `lse` or `d_o` is missing")),
    }
}

/// The tensors in host memory of a call that a description defines.
pub fn inputs_of<'b>(
    description: &'b Description,
    [q, k, v]: [&'b Array; 3],
    extras: &'b [Array],
    blocks: Option<&'b BlockMask>,
    claims: &mut Claims<'b>,
) -> PyResult<Inputs<'b>> {
    let rows = [q.view("q", claims)?, k.view("k", claims)?, v.view("v", claims)?];
    let roles = description.roles.iter().zip(extras);
    let (mut inputs, _) = description.inputs(rows, roles.map(|(role, array)| array.view(role.name(), claims)))?;
    inputs.block_mask = blocks;
    Ok(inputs)
}

/// The error for results in f32 of arrays in host memory, where f32 inputs have f32 results.
fn only_on_gpu(q: &Array) -> PyErr {
    let place = q.place();
    wrong(format!("f32 results of `q` on {place}, allowed: a GPU; in host memory pass q, k and v in float32"))
}

/// Rejects a wrong number of gradients.
fn count(want: &[(String, Vec<usize>, bool)], gradients: &[Array]) -> PyResult<()> {
    if gradients.len() == want.len() {
        return Ok(());
    }
    let names: Vec<&str> = want.iter().map(|(name, ..)| name.as_str()).collect();
    Err(wrong(format!("`out` has {} arrays, allowed: {}", gradients.len(), names.join(", "))))
}

/// A copy of an array that must have this type and shape.
fn tensor<'a>(
    name: &'a str,
    array: &'a Array,
    dtype: DType,
    shape: &[usize],
    claims: &mut Claims<'a>,
) -> PyResult<Tensor> {
    let (got, at) = (array.dtype(name)?, array.shape());
    if got != dtype || at != shape {
        return Err(wrong(format!("`{name}` is {got} {at:?}, allowed: {dtype} {shape:?}")));
    }
    Ok(array.view(name, claims)?.to_tensor())
}

/// Rejects arrays on a different device than the first one, and devices that no engine supports.
pub fn one_place<'a>(
    (first, array): (&'a str, &'a Array),
    others: impl IntoIterator<Item = (&'a str, &'a Array)>,
) -> PyResult<()> {
    let place = array.place();
    if let Place::Other(_) = place {
        return on_host([(first, array)]);
    }
    for (name, other) in others {
        if other.place() != place {
            return Err(wrong(format!(
                "`{name}` is on {}, `{first}` on {place}, allowed: one device; move it with .to({first}.device)",
                other.place(),
            )));
        }
    }
    Ok(())
}

fn names(description: &Description) -> impl Iterator<Item = &str> {
    description.roles.iter().map(Role::name)
}

/// Rejects arrays that are not in host memory.
pub fn on_host<'a>(arrays: impl IntoIterator<Item = (&'a str, &'a Array)>) -> PyResult<()> {
    for (name, array) in arrays {
        if array.place() != Place::Host {
            return Err(wrong(format!("`{name}` is on {}, allowed here: cpu; move it with .cpu()", array.place())));
        }
    }
    Ok(())
}

/// Computes attention into new arrays of the same kind as q, or into `out`.
pub fn forward(
    description: &Description,
    qkv: [&Bound<'_, PyAny>; 3],
    extras: &[Bound<'_, PyAny>],
    out: Option<&Bound<'_, PyAny>>,
    want_lse: bool,
) -> PyResult<(Py<PyAny>, Option<Py<PyAny>>)> {
    let py = qkv[0].py();
    let call = Call::new(description, qkv, extras)?;
    let made = if out.is_none() { Some(fresh(qkv[0], &call.q, &call.problem.o_shape(), None)?) } else { None };
    let made_lse =
        if want_lse { Some(fresh(qkv[0], &call.q, &call.problem.lse_shape(), Some(Element::F32))?) } else { None };
    let o = match (out, &made) {
        (Some(out), _) => Array::read("out", out)?,
        (None, Some(made)) => Array::of_result("out", made.object(py))?,
        (None, None) => unreachable!("bug in fulgurite: one of the two is there"),
    };
    let lse = made_lse.as_ref().map(|made| Array::of_result("lse", made.object(py))).transpose()?;
    match call.q.place() {
        Place::Host => call.forward(py, &o, lse.as_ref())?,
        _ => {
            one_place(("q", &call.q), [("out", &o)])?;
            cuda::forward(&call.on_gpu(Caller::Object(qkv[0])), &o, lse.as_ref(), ResultType::Input)?;
        }
    }
    let result = match made {
        Some(made) => made.finish(py)?,
        None => out.map(|out| out.clone().unbind()).expect("bug in fulgurite: one of the two is there"),
    };
    Ok((result, made_lse.map(|made| made.finish(py)).transpose()?))
}

/// Computes attention of 16-bit arrays on a GPU into a given f32 o and LSE: replaces them, or merges with them.
pub fn forward_into(
    description: &Description,
    qkv: [&Bound<'_, PyAny>; 3],
    extras: &[Bound<'_, PyAny>],
    [o, lse]: [&Bound<'_, PyAny>; 2],
    results: ResultType,
) -> PyResult<()> {
    let call = Call::new(description, qkv, extras)?;
    let (o, lse) = (Array::read("o", o)?, Array::read("lse", lse)?);
    if call.q.gpu().is_none() {
        return Err(only_on_gpu(&call.q));
    }
    one_place(("q", &call.q), [("o", &o), ("lse", &lse)])?;
    cuda::forward(&call.on_gpu(Caller::Object(qkv[0])), &o, Some(&lse), results)
}

/// Computes attention of host arrays into new arrays, and counts: rescales that were possible and that were done, and
/// blocks that were computed again.
pub fn counted(
    description: &Description,
    qkv: [&Bound<'_, PyAny>; 3],
    extras: &[Bound<'_, PyAny>],
) -> PyResult<(Py<PyAny>, Py<PyAny>, [u64; 3])> {
    let py = qkv[0].py();
    let call = Call::new(description, qkv, extras)?;
    on_host([("q", &call.q)])?;
    let o = fresh(qkv[0], &call.q, &call.problem.o_shape(), None)?;
    let lse = fresh(qkv[0], &call.q, &call.problem.lse_shape(), Some(Element::F32))?;
    let (to, to_lse) = (Array::of_result("o", o.object(py))?, Array::of_result("lse", lse.object(py))?);
    let tally = Tally::default();
    detach(py, || {
        call.with_outputs(&to, Some(&to_lse), |inputs, outputs| {
            call.engine_forward(inputs, outputs, &Run::default().tally(&tally))
        })
    })??;
    let counters = tally.counters();
    let counts = [counters.rescales_possible, counters.rescales_done, counters.blocks_redone];
    Ok((o.finish(py)?, lse.finish(py)?, counts))
}

/// Computes the gradients of attention into new arrays, or into `out`.
pub fn backward(
    description: &Description,
    qkv: [&Bound<'_, PyAny>; 3],
    extras: &[Bound<'_, PyAny>],
    saved: [Option<&Bound<'_, PyAny>>; 4],
    out: Option<Vec<Bound<'_, PyAny>>>,
    results: ResultType,
) -> PyResult<Vec<Py<PyAny>>> {
    let py = qkv[0].py();
    let call = Call::new(description, qkv, extras)?;
    let mut read = Vec::with_capacity(4);
    for (name, object) in ["o", "lse", "d_o", "d_lse"].into_iter().zip(saved) {
        read.push(object.map(|object| Array::read(name, object)).transpose()?);
    }
    let saved = [read[0].as_ref(), read[1].as_ref(), read[2].as_ref(), read[3].as_ref()];
    let want = call.gradients();
    match out {
        Some(objects) => {
            let pairs = objects.iter().map(|object| Array::read("out", object));
            call.backward(qkv[0], saved, &pairs.collect::<PyResult<Vec<_>>>()?, results)?;
            Ok(objects.into_iter().map(Bound::unbind).collect())
        }
        None => {
            let made = want
                .iter()
                .map(|(_, shape, f32)| fresh(qkv[0], &call.q, shape, f32.then_some(Element::F32)))
                .collect::<PyResult<Vec<_>>>()?;
            let arrays = want.iter().zip(&made).map(|((name, ..), made)| Array::of_result(name, made.object(py)));
            call.backward(qkv[0], saved, &arrays.collect::<PyResult<Vec<_>>>()?, results)?;
            made.into_iter().map(|made| made.finish(py)).collect()
        }
    }
}
