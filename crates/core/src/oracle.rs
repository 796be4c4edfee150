//! The definition of attention: f64, plain loops, no tiles, no tricks.
//!
//! For each row, in this order: scale; score modifiers; mask; the sink joins the denominator; softmax; times V.
//! A masked key takes no part in any arithmetic, so nothing that it holds can leak. A row without visible
//! keys has o = 0 and LSE = -inf, or the value of its sink. NaN propagates.

use crate::exp::{self, Exp};
use crate::format::{Granularity, GroupFormat};
use crate::inputs::Bound;
use crate::precision::{Delta, GroupAttention, INT8_LARGEST, Int8Attention, Precision};
use crate::problem::Problem;
use crate::tensor::TensorView;
pub use crate::walk::At;
use crate::walk::{self, Arithmetic, Cotangent, Head};

/// What forward means.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Row-major in the shape of o.
    pub o: Vec<f64>,
    /// Row-major in the shape of the LSE.
    pub lse: Vec<f64>,
}

/// What backward means.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientAnswer {
    /// Row-major in the shape of q.
    pub d_q: Vec<f64>,
    /// Row-major in the shape of k.
    pub d_k: Vec<f64>,
    /// Row-major in the shape of v.
    pub d_v: Vec<f64>,
    /// `[q_heads]`, where the problem has sinks.
    pub d_sinks: Option<Vec<f64>>,
    /// One entry for each auxiliary tensor of the problem, where a gradient was asked for.
    pub d_aux: Vec<Option<Vec<f64>>>,
}

/// The answer for one query row.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// `[value_dim]`.
    pub o: Vec<f64>,
    /// Natural logarithm of the softmax denominator.
    pub lse: f64,
}

/// The gradients of one key.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyGradient {
    /// `[head_dim]`.
    pub d_k: Vec<f64>,
    /// `[value_dim]`.
    pub d_v: Vec<f64>,
}

/// The whole forward result.
///
/// ```
/// use fulgurite_core::{Inputs, Problem, Tensor, oracle};
///
/// let problem = Problem::builder().dense(1, 1, 2).heads(1, 1).head_dim(1).build()?;
/// let q = Tensor::new(vec![0.0f32], &[1, 1, 1, 1])?;
/// let (k, v) = (Tensor::new(vec![1.0f32, 2.0], &[1, 2, 1, 1])?, Tensor::new(vec![3.0f32, 5.0], &[1, 2, 1, 1])?);
/// let bound = Inputs::new(q.view(), k.view(), v.view()).bind(&problem)?;
/// let answer = oracle::forward(&bound);
/// assert_eq!((answer.o[0], answer.lse[0]), (4.0, 2f64.ln())); // equal scores: the mean of v
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn forward(bound: &Bound<'_>) -> Answer {
    let (o, lse) = walk::forward::<Exact>(bound);
    Answer { o, lse }
}

/// The forward result of chosen query rows.
pub fn forward_rows(bound: &Bound<'_>, rows: &[At]) -> Vec<Row> {
    walk::forward_rows::<Exact>(bound, rows).into_iter().map(|(o, lse)| Row { o, lse }).collect()
}

/// All gradients, from a forward of its own.
pub fn backward(bound: &Bound<'_>, d_o: &TensorView<'_>, d_lse: Option<&TensorView<'_>>) -> GradientAnswer {
    GradientAnswer::new(bound.problem(), walk::backward::<Exact>(bound, d_o, d_lse))
}

/// d_q of chosen query rows.
pub fn backward_rows(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    rows: &[At],
) -> Vec<Vec<f64>> {
    walk::backward_rows::<Exact>(bound, d_o, d_lse, rows)
}

/// d_k and d_v of chosen keys; `At::head` counts key/value heads. Costs a whole backward of each head chosen,
/// because every row that sees a key needs its LSE.
pub fn backward_keys(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    keys: &[At],
) -> Vec<KeyGradient> {
    let found = walk::backward_keys::<Exact>(bound, d_o, d_lse, keys);
    found.into_iter().map(|(d_k, d_v)| KeyGradient { d_k, d_v }).collect()
}

impl GradientAnswer {
    pub(crate) fn new(problem: &Problem, sums: walk::Sums) -> GradientAnswer {
        GradientAnswer {
            d_q: sums.d_q,
            d_k: sums.d_k,
            d_v: sums.d_v,
            d_sinks: problem.has_sinks().then_some(sums.d_sinks),
            d_aux: sums.d_aux,
        }
    }
}

pub(crate) struct Exact;

/// Replaces keys and values by what their codes mean; the mean taken out of the keys.
fn quantise(problem: &Problem, k: &mut [f64], v: &mut [f64]) -> Option<Vec<f32>> {
    let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
    let narrow = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<f32>>();
    let put = |to: &mut [f64], from: &[f32]| to.iter_mut().zip(from).for_each(|(to, &x)| *to = f64::from(x));
    match problem.precision() {
        Precision::Native => None,
        Precision::Int8(spec) => {
            let rows = narrow(k);
            let mean = spec.mean(&rows, dim);
            let (keys, values) = (spec.keys(&rows, dim, &mean), spec.values(&narrow(v), value_dim));
            for (to, codes, granularity) in [(k, keys, spec.k), (v, values, Granularity::Block(spec.block))] {
                let cols = codes.shape()[1];
                for (i, (to, &code)) in to.iter_mut().zip(codes.codes()).enumerate() {
                    *to = f64::from(code) * f64::from(codes.scales()[granularity.scale_of(i / cols)]);
                }
            }
            Some(mean)
        }
        Precision::Groups(spec) => {
            if let Some(format) = spec.qk {
                let mut rows = narrow(k);
                format.fake_rows(&mut rows, dim);
                put(k, &rows);
            }
            if let Some(format) = spec.pv {
                let mut rows = narrow(v);
                format.fake_columns(&mut rows, value_dim);
                put(v, &rows);
            }
            None
        }
    }
}

/// Weights of visible keys, rounded in groups that count hidden ones as 0.
fn rounded_weights(keys: &[usize], p: &[f64], format: GroupFormat) -> Vec<f64> {
    let (size, mut out) = (format.group(), Vec::with_capacity(p.len()));
    let mut first = 0;
    while first < keys.len() {
        let number = keys[first] / size;
        let end = first + keys[first..].iter().take_while(|&&k| k / size == number).count();
        let mut group: Vec<f32> = p[first..end].iter().map(|&x| x as f32).collect();
        format.fake_group(&mut group);
        out.extend(group.into_iter().map(f64::from));
        first = end;
    }
    out
}

/// The row of an INT8 problem: `row.p` holds scores; blocks of keys in order, weights in codes against the maximum so far.
fn by_blocks(head: &Head<'_, f64>, spec: &Int8Attention, mut row: walk::Row, exp: impl Fn(f64) -> f64) -> walk::Row {
    let scores = std::mem::take(&mut row.p);
    let (mut max, mut sum, mut o) = (f64::NEG_INFINITY, 0.0, vec![0.0; head.problem().value_dim()]);
    let mut first = 0;
    while first < row.keys.len() {
        let number = row.keys[first] / spec.block;
        let end = first + row.keys[first..].iter().take_while(|&&k| k / spec.block == number).count();
        let old = max;
        max = scores[first..end].iter().fold(max, |m, &s| if s.is_nan() || s > m { s } else { m });
        let alpha = if old == f64::NEG_INFINITY { 0.0 } else { (old - max).exp() };
        sum *= alpha;
        o.iter_mut().for_each(|o| *o *= alpha);
        for (&k, &s) in row.keys[first..end].iter().zip(&scores[first..end]) {
            let p = exp(s - max);
            sum += p;
            let code = f64::from(Int8Attention::weight(p as f32)) / f64::from(INT8_LARGEST);
            o.iter_mut().zip(head.value(k)).for_each(|(o, v)| *o += code * v);
        }
        first = end;
    }
    row.lse = log_add(max + sum.ln(), head.bound.sink(head.head).unwrap_or(f64::NEG_INFINITY));
    let share = if row.lse == f64::NEG_INFINITY { 0.0 } else { (max - row.lse).exp() };
    row.p = scores.iter().map(|&s| exp(s - max) * share).collect();
    row.o = o.into_iter().map(|o| o * share).collect();
    row
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// ln(e^a + e^b).
fn log_add(a: f64, b: f64) -> f64 {
    let (low, high) = if a < b { (a, b) } else { (b, a) };
    if low == f64::NEG_INFINITY { high } else { high + (low - high).exp().ln_1p() }
}

impl Arithmetic for Exact {
    type Number = f64;

    fn key(_: &Problem, x: f64) -> f64 {
        x
    }

    fn value(x: f64) -> f64 {
        x
    }

    fn quantise(problem: &Problem, k: &mut [f64], v: &mut [f64]) -> Option<Vec<f32>> {
        quantise(problem, k, v)
    }

    fn row(head: &Head<'_, f64>, q: usize) -> walk::Row {
        let problem = head.problem();
        let (query, taken_out) = (head.query(q), head.taken_out(q));
        let (mut keys, mut scaled, mut scores) = (Vec::new(), Vec::new(), Vec::new());
        for k in head.visible(q) {
            let s = f64::from(problem.scale()) * (dot(&query, head.key(k)) + taken_out);
            let modified = head.modified(s, q, k);
            if modified != f64::NEG_INFINITY {
                keys.push(k);
                scaled.push(s);
                scores.push(modified);
            }
        }
        // A NaN becomes the maximum and stays it.
        let max = scores.iter().fold(f64::NEG_INFINITY, |m, &s| if s.is_nan() || s > m { s } else { m });
        let exp = |x: f64| match problem.exp() {
            Exp::Sas { threshold } => exp::sas(x, threshold),
            Exp::Auto | Exp::Native | Exp::Poly { .. } => x.exp(),
        };
        if let Precision::Int8(spec) = problem.precision() {
            return by_blocks(
                head,
                &spec,
                walk::Row { keys, scaled, p: scores, o: Vec::new(), lse: 0.0, exact: None },
                exp,
            );
        }
        let mut p: Vec<f64> = scores.iter().map(|s| exp(s - max)).collect();
        let lse = log_add(max + p.iter().sum::<f64>().ln(), head.bound.sink(head.head).unwrap_or(f64::NEG_INFINITY));
        let share = if lse == f64::NEG_INFINITY { 0.0 } else { (max - lse).exp() };
        let weighted = |p: &[f64]| {
            let mut o = vec![0.0; problem.value_dim()];
            for (p, &k) in p.iter().zip(&keys) {
                o.iter_mut().zip(head.value(k)).for_each(|(o, v)| *o += p * v);
            }
            o
        };
        let rounded = match problem.precision() {
            Precision::Groups(GroupAttention { pv: Some(format), delta, .. }) => {
                let rounded: Vec<f64> = rounded_weights(&keys, &p, format).into_iter().map(|p| p * share).collect();
                Some((rounded, delta))
            }
            _ => None,
        };
        p.iter_mut().for_each(|p| *p *= share);
        let o = weighted(&p);
        match rounded {
            None => walk::Row { keys, scaled, p, o, lse, exact: None },
            Some((rounded, delta)) => {
                let own = weighted(&rounded);
                let exact = Some((p, if delta == Delta::Exact { o } else { own.clone() }));
                walk::Row { keys, scaled, p: rounded, o: own, lse, exact }
            }
        }
    }

    fn row_gradient(head: &Head<'_, f64>, q: usize, row: &walk::Row, given: &Cotangent) -> walk::RowGradient {
        let scale = f64::from(head.problem().scale());
        let (p, o) = row.exact.as_ref().map_or((&row.p, &row.o), |(p, o)| (p, o));
        let delta = dot(&given.d_o, o) - given.d_lse;
        let mut d_q = vec![0.0; head.problem().head_dim()];
        let (mut d_modified, mut d_scaled) = (Vec::new(), Vec::new());
        for (j, &k) in row.keys.iter().enumerate() {
            let d_p = dot(&given.d_o, head.value(k));
            let d_s = p[j] * (d_p - delta);
            let d_x = d_s * head.derivative(row.scaled[j], q, k);
            for (d, k) in d_q.iter_mut().zip(head.key(k)) {
                *d += scale * d_x * k;
            }
            d_modified.push(d_s);
            d_scaled.push(d_x);
        }
        let d_sink = match head.bound.sink(head.head) {
            Some(sink) if row.lse != f64::NEG_INFINITY => -(sink - row.lse).exp() * delta,
            _ => 0.0,
        };
        walk::RowGradient { d_q, d_modified, d_scaled, d_sink }
    }

    fn add(sum: f64, x: f64, y: f64) -> f64 {
        sum + x * y
    }

    fn store(_: &Problem, x: f64) -> f64 {
        x
    }
}
