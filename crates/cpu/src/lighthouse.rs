//! Lighthouse attention on the CPU: select, gather, attention over the picked nodes, scatter.
//!
//! Means and results of nodes are f32, whatever the type of the tensors. Memory is proportional to the sequence length.

use crate::memory::SharedRows;
use crate::{Options, backward, forward, pool};
use fulgurite_core::lighthouse::{Entry, Lighthouse};
use fulgurite_core::{
    Forward, Gradients, InputError, Inputs, Mask, Problem, ProblemError, Saved, Tensor, TensorError, TensorView, stop,
};

/// The result of forward, including the inputs of backward.
#[derive(Debug, Clone)]
pub struct LighthouseForward {
    /// The output, shaped like q with the value dimension, in the type of the tensors.
    pub o: Tensor,
    /// The picked nodes of each sequence and head, `[batch * heads]`: constants for the gradients.
    pub entries: Vec<Vec<Entry>>,
    problem: Problem,
    gathered: [Tensor; 3],
    attended: Forward,
}

/// Gradients of the tensors, in their type.
#[derive(Debug, Clone, PartialEq)]
pub struct LighthouseGradients {
    /// The gradient of q.
    pub d_q: Tensor,
    /// The gradient of k.
    pub d_k: Tensor,
    /// The gradient of v.
    pub d_v: Tensor,
}

/// The reason why a call was rejected.
#[derive(Debug, Clone, PartialEq)]
pub enum LighthouseError {
    /// The tensors do not fit.
    Input(InputError),
    /// The picked sequence is not a valid attention problem.
    Problem(ProblemError),
    /// There is not enough memory.
    Tensor(TensorError),
}

impl std::fmt::Display for LighthouseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LighthouseError::Input(e) => e.fmt(f),
            LighthouseError::Problem(e) => e.fmt(f),
            LighthouseError::Tensor(e) => e.fmt(f),
        }
    }
}

impl std::error::Error for LighthouseError {}

impl From<InputError> for LighthouseError {
    fn from(e: InputError) -> Self {
        LighthouseError::Input(e)
    }
}
impl From<ProblemError> for LighthouseError {
    fn from(e: ProblemError) -> Self {
        LighthouseError::Problem(e)
    }
}
impl From<TensorError> for LighthouseError {
    fn from(e: TensorError) -> Self {
        LighthouseError::Tensor(e)
    }
}

/// All tokens of a head as f32, `[token][dim]`.
fn head_rows(view: &TensorView<'_>, options: &Options, batch: usize, head: usize, dim: usize) -> Vec<f32> {
    let strides = view.strides();
    let mut all: Vec<f32> = stop::zeros("rows of a head", view.shape()[1] * dim);
    for (t, row) in all.chunks_exact_mut(dim).enumerate() {
        options.kernels().widen(&view.data(), batch * strides[0] + t * strides[1] + head * strides[2], row);
    }
    all
}

fn norms(rows: &[f32], dim: usize) -> Vec<f32> {
    let norm = |row: &[f32]| row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt() as f32;
    rows.chunks_exact(dim).map(norm).collect()
}

/// Writes the means of the picked nodes to rows of `[batch, picked, heads, dim]`.
fn gather(light: &Lighthouse, entries: &[Entry], from: &[f32], dim: usize, at: usize, to: &SharedRows<'_>) {
    let heads = light.sizes()[2];
    let picked = light.picked();
    for (i, e) in entries.iter().enumerate() {
        // SAFETY: each sequence and head has its own rows.
        let row = unsafe { to.row(((at / heads * picked + i) * heads + at % heads) * dim, dim) };
        row.fill(0.0);
        let span = light.span(e);
        let share = 1.0 / span.len() as f32;
        for t in span {
            row.iter_mut().zip(&from[t * dim..(t + 1) * dim]).for_each(|(sum, x)| *sum += x);
        }
        row.iter_mut().for_each(|x| *x *= share);
    }
}

/// Computes forward Lighthouse attention.
pub fn lighthouse_forward(
    light: &Lighthouse,
    q: &TensorView<'_>,
    k: &TensorView<'_>,
    v: &TensorView<'_>,
    options: &Options,
) -> Result<LighthouseForward, LighthouseError> {
    light.check(q, k, v)?;
    let [batch, len, heads, kv_heads] = light.sizes();
    let ([dim, value_dim], picked, group) = (light.dims(), light.picked(), heads / kv_heads);
    let builder = Problem::builder().dense(batch, picked, picked).heads(heads, heads).head_dims(dim, value_dim);
    let problem = builder.mask(Mask::causal()).scale(light.scale()).build()?;
    let mut gathered = [problem.q_shape(), problem.k_shape(), problem.v_shape()]
        .map(|shape| -> Vec<f32> { stop::zeros("means", shape.iter().product()) });
    let mut entries: Vec<Vec<Entry>> = vec![Vec::new(); batch * heads];
    {
        let to = gathered.each_mut().map(|x| SharedRows::over(x));
        let slots: Vec<std::sync::Mutex<&mut Vec<Entry>>> = entries.iter_mut().map(std::sync::Mutex::new).collect();
        pool::run(options.threads(), batch * heads, &|i| {
            let (b, h) = (i / heads, i % heads);
            let own_q = head_rows(q, options, b, h, dim);
            let own_k = head_rows(k, options, b, h / group, dim);
            let picked = light.select(&norms(&own_q, dim), &norms(&own_k, dim));
            gather(light, &picked, &own_q, dim, i, &to[0]);
            gather(light, &picked, &own_k, dim, i, &to[1]);
            drop((own_q, own_k));
            gather(light, &picked, &head_rows(v, options, b, h / group, value_dim), value_dim, i, &to[2]);
            **slots[i].lock().unwrap_or_else(|e| e.into_inner()) = picked;
        });
    }
    let [q, k, v] = gathered;
    let gathered =
        [Tensor::new(q, &problem.q_shape())?, Tensor::new(k, &problem.k_shape())?, Tensor::new(v, &problem.v_shape())?];
    let mut attended = Forward::zeros(&problem)?;
    let inputs = Inputs::new(gathered[0].view(), gathered[1].view(), gathered[2].view());
    forward(&inputs.bind(&problem)?, &mut attended.outputs(), options);
    let mut o = Tensor::zeros(light.element(), &light.o_shape())?;
    let from = attended.o.as_slice::<f32>().expect("f32 attention");
    let mut view = o.view_mut();
    let to = SharedRows::new(&mut view);
    pool::run(options.threads(), batch * heads, &|i| {
        let (b, h) = (i / heads, i % heads);
        let mut sums: Vec<f32> = stop::zeros("sums of a head", len * value_dim);
        for (n, e) in entries[i].iter().enumerate() {
            let row = &from[((b * picked + n) * heads + h) * value_dim..][..value_dim];
            for t in light.reach(e) {
                sums[t * value_dim..(t + 1) * value_dim].iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
        }
        for (t, row) in sums.chunks_exact(value_dim).enumerate() {
            // SAFETY: each sequence and head has its own rows.
            unsafe { to.store(options.kernels(), ((b * len + t) * heads + h) * value_dim, row) };
        }
        options.kernels().fence();
    });
    Ok(LighthouseForward { o, entries, problem, gathered, attended })
}

/// Computes gradients with the selection of forward, which itself has no gradient.
pub fn lighthouse_backward(
    light: &Lighthouse,
    saved: &LighthouseForward,
    d_o: &TensorView<'_>,
    options: &Options,
) -> Result<LighthouseGradients, LighthouseError> {
    fulgurite_core::inputs::check_like("d_o", d_o, &light.o_shape(), light.element())?;
    fulgurite_core::inputs::check_like("o", &saved.o.view(), &light.o_shape(), light.element())?;
    let own = [saved.problem.max_q_len(), saved.problem.head_dim(), saved.problem.value_dim()];
    let want = [light.picked(), light.dims()[0], light.dims()[1]];
    if own != want {
        // A selection from another problem cannot be scattered by this one.
        return Err(InputError::Shape { arg: "picked".into(), got: own.to_vec(), want: want.to_vec() }.into());
    }
    let [batch, len, heads, kv_heads] = light.sizes();
    let ([dim, value_dim], picked, group) = (light.dims(), light.picked(), heads / kv_heads);
    let dense = d_o.to_tensor();
    let given = dense.view();
    let mut d_attended: Vec<f32> = stop::zeros("gradients of means", saved.problem.o_shape().iter().product());
    {
        let to = SharedRows::over(&mut d_attended);
        pool::run(options.threads(), batch * heads, &|i| {
            let (b, h) = (i / heads, i % heads);
            let own = head_rows(&given, options, b, h, value_dim);
            for (n, e) in saved.entries[i].iter().enumerate() {
                // SAFETY: each sequence and head has its own rows.
                let row = unsafe { to.row(((b * picked + n) * heads + h) * value_dim, value_dim) };
                for t in light.reach(e) {
                    row.iter_mut().zip(&own[t * value_dim..(t + 1) * value_dim]).for_each(|(sum, x)| *sum += x);
                }
            }
        });
    }
    let d_attended = Tensor::new(d_attended, &saved.problem.o_shape())?;
    let mut inner = Gradients::zeros(&saved.problem)?;
    let [q, k, v] = saved.gathered.each_ref().map(Tensor::view);
    let inputs = Inputs::new(q, k, v);
    let kept = Saved { d_lse: None, ..saved.attended.saved(d_attended.view()) };
    backward(&inputs.bind(&saved.problem)?, &kept, &mut inner.outputs(), options);
    let spread = |from: &Tensor, dim: usize, own: usize, share: usize| -> Result<Tensor, TensorError> {
        let mut out = Tensor::zeros(light.element(), &[batch, len, own, dim])?;
        let from = from.as_slice::<f32>().expect("f32 gradients");
        let mut view = out.view_mut();
        let to = SharedRows::new(&mut view);
        pool::run(options.threads(), batch * own, &|i| {
            let (b, kv) = (i / own, i % own);
            let mut sums: Vec<f32> = stop::zeros("sums of a head", len * dim);
            for h in kv * share..(kv + 1) * share {
                for (n, e) in saved.entries[b * heads + h].iter().enumerate() {
                    let row = &from[((b * picked + n) * heads + h) * dim..][..dim];
                    let span = light.span(e);
                    let part = 1.0 / span.len() as f32;
                    for t in span {
                        sums[t * dim..(t + 1) * dim].iter_mut().zip(row).for_each(|(sum, x)| *sum += part * x);
                    }
                }
            }
            for (t, row) in sums.chunks_exact(dim).enumerate() {
                // SAFETY: each sequence and head has its own rows.
                unsafe { to.store(options.kernels(), ((b * len + t) * own + kv) * dim, row) };
            }
            options.kernels().fence();
        });
        Ok(out)
    };
    Ok(LighthouseGradients {
        d_q: spread(&inner.d_q, dim, heads, 1)?,
        d_k: spread(&inner.d_k, dim, kv_heads, group)?,
        d_v: spread(&inner.d_v, value_dim, kv_heads, group)?,
    })
}
