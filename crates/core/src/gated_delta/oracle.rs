//! The definition in f64, token by token, and the straightforward implementation that sets the tolerance.

use super::recurrence::{Arithmetic, Head, HeadForward, HeadGradient, read_rows, read_state};
use super::{DeltaBound, Tokens};
use crate::tensor::{Dims, TensorView};

/// The exact result of forward.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaAnswer {
    /// Row-major in the shape of v.
    pub o: Vec<f64>,
    /// Row-major in the shape of the states.
    pub final_state: Vec<f64>,
}

/// The exact gradients; each is row-major in the shape of its tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaGradientAnswer {
    /// The gradient of q.
    pub d_q: Vec<f64>,
    /// The gradient of k.
    pub d_k: Vec<f64>,
    /// The gradient of v.
    pub d_v: Vec<f64>,
    /// The gradient of the decay g.
    pub d_g: Vec<f64>,
    /// The gradient of beta.
    pub d_beta: Vec<f64>,
    /// The gradient of the initial states.
    pub d_initial_state: Vec<f64>,
}

/// A sequence and a key head with all value heads that share it.
pub(crate) type Pair = (usize, usize);

pub(crate) fn all_pairs(bound: &DeltaBound<'_>) -> Vec<Pair> {
    let heads = bound.problem().heads();
    (0..bound.sequences().len()).flat_map(|s| (0..heads).map(move |h| (s, h))).collect()
}

/// The whole forward result.
///
/// ```
/// use fulgurite_core::gated_delta::{DeltaInputs, GatedDelta, oracle};
/// use fulgurite_core::Tensor;
/// // One token: the state becomes beta k v^T, and o reads it with q.
/// let problem = GatedDelta::builder().dense(1, 1).heads(1, 1).head_dim(1).build()?;
/// let x = |x: f32| Tensor::new(vec![x], &[1, 1, 1, 1]);
/// let gate = |x: f32| Tensor::new(vec![x], &[1, 1, 1]);
/// let (q, k, v, g, beta) = (x(3.0)?, x(2.0)?, x(5.0)?, gate(-1.0)?, gate(0.5)?);
/// let bound = DeltaInputs::new(q.view(), k.view(), v.view(), g.view(), beta.view()).bind(&problem)?;
/// let answer = oracle::forward(&bound);
/// assert_eq!((answer.o[0], answer.final_state[0]), (15.0, 5.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn forward(bound: &DeltaBound<'_>) -> DeltaAnswer {
    forward_of(bound, Arithmetic { rounded: None }, &all_pairs(bound))
}

/// Computes all gradients.
pub fn backward(
    bound: &DeltaBound<'_>,
    d_o: &TensorView<'_>,
    d_final_state: Option<&TensorView<'_>>,
) -> DeltaGradientAnswer {
    backward_of(bound, Arithmetic { rounded: None }, d_o, d_final_state, &all_pairs(bound))
}

/// The straightforward arithmetic of a problem: f32, with 16-bit storage where a 16-bit user would have it.
pub(crate) fn honest(bound: &DeltaBound<'_>) -> Arithmetic {
    Arithmetic { rounded: Some(bound.problem().dtype()) }
}

fn strides(shape: &[usize]) -> Dims {
    Dims::new(shape).and_then(|dims| dims.contiguous_strides()).expect("a shape of the problem")
}

/// Adds rows `[tokens][dim]` of a head to a row-major tensor.
fn add_rows(bound: &DeltaBound<'_>, s: &Tokens, head: usize, shape: &[usize], from: &[f64], to: &mut [f64]) {
    let rows = bound.row_layout(&strides(shape), s);
    let dim = shape[shape.len() - 1];
    for (t, row) in from.chunks_exact(dim).enumerate() {
        let at = rows.at(t, head);
        to[at..at + dim].iter_mut().zip(row).for_each(|(to, x)| *to += x);
    }
}

/// Offset of the state of a sequence and value head in a row-major tensor of states.
pub(crate) fn state_at(bound: &DeltaBound<'_>, sequence: usize, value_head: usize) -> usize {
    let problem = bound.problem();
    (sequence * problem.value_heads() + value_head) * problem.key_dim() * problem.value_dim()
}

/// The forward result of some heads; zeros elsewhere.
pub(crate) fn forward_of(bound: &DeltaBound<'_>, arithmetic: Arithmetic, pairs: &[Pair]) -> DeltaAnswer {
    let problem = bound.problem();
    let (v_shape, dtype) = (problem.v_shape(), arithmetic.rounded);
    let mut answer = DeltaAnswer {
        o: vec![0.0; v_shape.iter().product()],
        final_state: vec![0.0; problem.state_shape().iter().product()],
    };
    for &(sequence, key_head) in pairs {
        let s = &bound.sequences()[sequence];
        for h in key_head * problem.group()..(key_head + 1) * problem.group() {
            let HeadForward { mut o, state, .. } = Head::new(bound, s, h, arithmetic).forward(false);
            o.iter_mut().for_each(|x| *x = dtype.map_or(*x, |dtype| dtype.round(*x)));
            add_rows(bound, s, h, &v_shape, &o, &mut answer.o);
            let at = state_at(bound, sequence, h);
            answer.final_state[at..at + state.len()].copy_from_slice(&state);
        }
    }
    answer
}

/// The gradients of some heads; zeros elsewhere.
pub(crate) fn backward_of(
    bound: &DeltaBound<'_>,
    arithmetic: Arithmetic,
    d_o: &TensorView<'_>,
    d_final_state: Option<&TensorView<'_>>,
    pairs: &[Pair],
) -> DeltaGradientAnswer {
    let problem = bound.problem();
    let (q_shape, v_shape) = (problem.q_shape(), problem.v_shape());
    let zeros = |shape: &[usize]| vec![0.0; shape.iter().product()];
    let mut sums = DeltaGradientAnswer {
        d_q: zeros(&q_shape),
        d_k: zeros(&q_shape),
        d_v: zeros(&v_shape),
        d_g: zeros(&problem.gate_shape()),
        d_beta: zeros(&problem.gate_shape()),
        d_initial_state: zeros(&problem.state_shape()),
    };
    for &(sequence, key_head) in pairs {
        let s = &bound.sequences()[sequence];
        for h in key_head * problem.group()..(key_head + 1) * problem.group() {
            let given = read_rows(bound, d_o, s, h, problem.value_dim());
            let d_final = d_final_state.map(|d| read_state(d, sequence, h));
            let found: HeadGradient = Head::new(bound, s, h, arithmetic).backward(&given, d_final.as_deref());
            add_rows(bound, s, key_head, &q_shape, &found.d_q, &mut sums.d_q);
            add_rows(bound, s, key_head, &q_shape, &found.d_k, &mut sums.d_k);
            add_rows(bound, s, h, &v_shape, &found.d_v, &mut sums.d_v);
            for t in 0..s.len {
                sums.d_g[bound.gate(s, t, h)] = found.d_g[t];
                sums.d_beta[bound.gate(s, t, h)] = found.d_beta[t];
            }
            let at = state_at(bound, sequence, h);
            sums.d_initial_state[at..at + found.d_initial.len()].copy_from_slice(&found.d_initial);
        }
    }
    if let Some(dtype) = arithmetic.rounded {
        for tensor in [&mut sums.d_q, &mut sums.d_k, &mut sums.d_v] {
            tensor.iter_mut().for_each(|x| *x = dtype.round(*x));
        }
    }
    sums
}
