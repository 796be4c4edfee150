//! Parallax: attention minus a learned covariance correction.
//!
//! Each query has a probe r. With p the softmax of q over the keys, u_j = r . k_j (unscaled) and t = sum p u,
//!
//! ```text
//! o = sum_j w_j v_j      w_j = p_j (1 + t - u_j)      sum w = 1, weights may be negative
//! ```
//!
//! which is mean(v) - Cov(v, k) r under p. r = 0 gives attention. Masks, head groups and layouts are those of the
//! attention problem; score modifiers, sinks, block masks and TurboAttention's exponential are rejected.

use crate::compare::{Rule, Verdict, judge_lse};
use crate::dtype::DType;
use crate::error::{InputError, ProblemError};
use crate::inputs::{Bound, Inputs, Sequence};
use crate::outputs::{Forward, Outputs};
use crate::precision::Precision;
use crate::problem::{Problem, Side};
use crate::tensor::{Dims, Tensor, TensorError, TensorView, TensorViewMut};
use crate::walk::visible;

/// A validated Parallax problem.
///
/// ```
/// use fulgurite_core::{Problem, parallax::Parallax};
/// let builder = Problem::builder().dense(1, 8, 8).heads(2, 1).head_dim(4);
/// assert!(Parallax::new(builder.clone().build()?).is_ok());
/// let refused = Parallax::new(builder.softcap(3.0).build()?).unwrap_err();
/// assert_eq!(refused.to_string(), "parallax has no score modifiers; leave softcap, alibi, bias and score_mod out");
/// # Ok::<(), fulgurite_core::ProblemError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Parallax {
    problem: Problem,
    /// The problem with probes in place of queries: its scores are u.
    probe: Problem,
}

impl Parallax {
    /// Parallax over the keys that an attention problem lets each query see.
    pub fn new(problem: Problem) -> Result<Parallax, ProblemError> {
        let refuse = |what, hint| Err(ProblemError::Around { system: "parallax", what, hint });
        if problem.score_mod().is_some() {
            return refuse("score modifiers", "leave softcap, alibi, bias and score_mod out");
        }
        if problem.has_sinks() {
            return refuse("sinks", "leave them out");
        }
        if problem.blocks().is_some() {
            return refuse("block masks", "use a mask");
        }
        if problem.exp().is_sas() {
            return refuse("exp sas", "use auto");
        }
        if problem.precision() != Precision::Native {
            return refuse("quantised products", "use precision native");
        }
        let probe = problem.with_scale(1.0);
        Ok(Parallax { problem, probe })
    }

    /// Attention with the same structure.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Checks that tensors fit, and binds them; `r` is shaped like q.
    pub fn bind<'a>(&'a self, inputs: &Inputs<'a>, r: TensorView<'a>) -> Result<ParallaxBound<'a>, InputError> {
        let own = inputs.bind(&self.problem)?;
        let probe = Inputs { q: r, ..inputs.clone() }.bind(&self.probe).map_err(|e| match e {
            InputError::Shape { got, want, .. } => InputError::Shape { arg: "r".into(), got, want },
            InputError::DType { got, want, .. } => InputError::DType { arg: "r".into(), got, want },
            InputError::LastStride { got, .. } => InputError::LastStride { arg: "r", got },
            other => other,
        })?;
        Ok(ParallaxBound { own, probe })
    }
}

/// Tensors that fit the problem.
#[derive(Debug, Clone)]
pub struct ParallaxBound<'a> {
    own: Bound<'a>,
    probe: Bound<'a>,
}

impl<'a> ParallaxBound<'a> {
    /// q, k and v as attention sees them.
    pub fn attention(&self) -> &Bound<'a> {
        &self.own
    }
    /// r, k and v, with a scale of 1.
    pub fn probe(&self) -> &Bound<'a> {
        &self.probe
    }
}

/// The output tensors of forward.
#[derive(Debug)]
pub struct ParallaxOutputs<'a> {
    /// o and LSE.
    pub own: Outputs<'a>,
    /// t of each row, f32, shaped like the LSE; backward needs it.
    pub mean: TensorViewMut<'a>,
}

impl ParallaxOutputs<'_> {
    /// Checks that these tensors fit.
    pub fn check(&self, parallax: &Parallax) -> Result<(), InputError> {
        self.own.check(&parallax.problem)?;
        crate::fit::shape_is("mean", self.mean.shape(), &parallax.problem.lse_shape())?;
        crate::fit::dtype_is("mean", self.mean.dtype(), DType::F32)
    }
}

/// The result of forward.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallaxForward {
    /// o and LSE.
    pub own: Forward,
    /// t of each row, f32, shaped like the LSE.
    pub mean: Tensor,
}

impl ParallaxForward {
    /// Zeros of the right shapes.
    pub fn zeros(parallax: &Parallax) -> Result<Self, TensorError> {
        let mean = Tensor::zeros(DType::F32, &parallax.problem.lse_shape())?;
        Ok(ParallaxForward { own: Forward::zeros(&parallax.problem)?, mean })
    }
    /// A writable view.
    pub fn outputs(&mut self) -> ParallaxOutputs<'_> {
        ParallaxOutputs { own: self.own.outputs(), mean: self.mean.view_mut() }
    }
}

/// The result of backward.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallaxGradients {
    /// Shaped like q.
    pub d_q: Tensor,
    /// Shaped like q.
    pub d_r: Tensor,
    /// Shaped like k.
    pub d_k: Tensor,
    /// Shaped like v.
    pub d_v: Tensor,
}

impl ParallaxGradients {
    /// Zeros of the right shapes.
    pub fn zeros(parallax: &Parallax) -> Result<Self, TensorError> {
        let p = &parallax.problem;
        let like = |shape: Vec<usize>| Tensor::zeros(p.dtype(), &shape);
        let (d_q, d_r) = (like(p.q_shape())?, like(p.q_shape())?);
        Ok(ParallaxGradients { d_q, d_r, d_k: like(p.k_shape())?, d_v: like(p.v_shape())? })
    }
}

/// The exact results of forward and backward, row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallaxAnswer {
    /// The result.
    pub o: Vec<f64>,
    /// The log of each row's softmax denominator.
    pub lse: Vec<f64>,
    /// The gradient of q.
    pub d_q: Vec<f64>,
    /// The gradient of the probes r.
    pub d_r: Vec<f64>,
    /// The gradient of k.
    pub d_k: Vec<f64>,
    /// The gradient of v.
    pub d_v: Vec<f64>,
}

/// Rounding of numbers: exact, or as in straightforward code of the type.
#[derive(Clone, Copy)]
pub(crate) struct Arithmetic(pub Option<DType>);

impl Arithmetic {
    pub fn sum(self, x: f64) -> f64 {
        if self.0.is_some() { f64::from(x as f32) } else { x }
    }
    pub fn operand(self, x: f64) -> f64 {
        self.0.map_or(x, |dtype| dtype.round(x))
    }
    pub fn dot(self, a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).fold(0.0, |sum, (x, y)| self.sum(sum + self.sum(x * y)))
    }
}

/// One row: its keys with their weights, and the gradient of the row if requested.
struct ParallaxRow {
    lse: f64,
    p: Vec<f64>,
    u: Vec<f64>,
    mean: f64,
    o: Vec<f64>,
}

fn parallax_row(
    a: Arithmetic,
    scale: f64,
    q: &[f64],
    r: &[f64],
    keys: &[&[f64]],
    values: &[&[f64]],
    vd: usize,
) -> ParallaxRow {
    let s: Vec<f64> = keys.iter().map(|k| a.operand(scale * a.dot(q, k))).collect();
    let u: Vec<f64> = keys.iter().map(|k| a.operand(a.dot(r, k))).collect();
    let max = s.iter().fold(f64::NEG_INFINITY, |m, &s| if s.is_nan() || s > m { s } else { m });
    let e: Vec<f64> = s.iter().map(|s| a.sum((s - max).exp())).collect();
    let total = e.iter().fold(0.0, |sum, e| a.sum(sum + e));
    let p: Vec<f64> = e.iter().map(|e| a.sum(e / total)).collect();
    let mean = a.dot(&p, &u);
    let mut o = vec![0.0; vd];
    for ((p, u), v) in p.iter().zip(&u).zip(values) {
        let w = a.operand(p * (1.0 + mean - u));
        o.iter_mut().zip(*v).for_each(|(o, v)| *o = a.sum(*o + a.sum(w * v)));
    }
    let lse = if keys.is_empty() { f64::NEG_INFINITY } else { a.sum(max + total.ln()) };
    // Backward has only the f32 LSE, so its P has the LSE's rounding error.
    let p = if a.0.is_some() { s.iter().map(|s| a.sum(a.sum(s - lse).exp())).collect() } else { p };
    ParallaxRow { lse, p, u, mean, o }
}

/// The definition, in f64; computes gradients if `d_o` is given.
pub fn oracle(bound: &ParallaxBound<'_>, d_o: Option<&TensorView<'_>>) -> ParallaxAnswer {
    walk(bound, d_o, Arithmetic(None))
}

fn rows_of(
    bound: &Bound<'_>,
    view: &TensorView<'_>,
    s: &Sequence,
    side: Side,
    head: usize,
    n: usize,
    dim: usize,
) -> Vec<f64> {
    let rows = bound.row_layout(view.strides(), s, side);
    let step = view.strides()[view.strides().len() - 1];
    (0..n).flat_map(|i| (0..dim).map(move |c| (i, c))).map(|(i, c)| view.at(rows.at(i, head) + c * step)).collect()
}

fn walk(bound: &ParallaxBound<'_>, d_o: Option<&TensorView<'_>>, a: Arithmetic) -> ParallaxAnswer {
    let own = &bound.own;
    let p = own.problem();
    let (d, vd, scale) = (p.head_dim(), p.value_dim(), f64::from(p.scale()));
    let zeros = |shape: Vec<usize>| vec![0.0; shape.iter().product()];
    let mut out = ParallaxAnswer {
        o: zeros(p.o_shape()),
        lse: vec![f64::NEG_INFINITY; p.lse_shape().iter().product()],
        d_q: zeros(p.q_shape()),
        d_r: zeros(p.q_shape()),
        d_k: zeros(p.k_shape()),
        d_v: zeros(p.v_shape()),
    };
    let strides = |shape: Vec<usize>| Dims::new(&shape).and_then(|d| d.contiguous_strides()).expect("a shape");
    for s in own.sequences() {
        let [q_rows, o_rows] = [p.q_shape(), p.o_shape()].map(|shape| own.row_layout(&strides(shape), s, Side::Query));
        let [k_rows, v_rows] = [p.k_shape(), p.v_shape()].map(|shape| own.row_layout(&strides(shape), s, Side::Key));
        let lse_rows = own.lse_layout(&strides(p.lse_shape()), s);
        for h in 0..p.q_heads() {
            let kv = h / p.group();
            let q = rows_of(own, own.q(), s, Side::Query, h, s.q_len, d);
            let r = rows_of(own, bound.probe.q(), s, Side::Query, h, s.q_len, d);
            let k = rows_of(own, own.k(), s, Side::Key, kv, s.k_len, d);
            let v = rows_of(own, own.v(), s, Side::Key, kv, s.k_len, vd);
            let given = d_o.map(|d_o| rows_of(own, d_o, s, Side::Query, h, s.q_len, vd));
            for i in 0..s.q_len {
                let seen = visible(own, s, h, i);
                let keys: Vec<&[f64]> = seen.iter().map(|&j| &k[j * d..(j + 1) * d]).collect();
                let values: Vec<&[f64]> = seen.iter().map(|&j| &v[j * vd..(j + 1) * vd]).collect();
                let (q, r) = (&q[i * d..(i + 1) * d], &r[i * d..(i + 1) * d]);
                let row = parallax_row(a, scale, q, r, &keys, &values, vd);
                out.lse[lse_rows.at(i, h)] = row.lse;
                out.o[o_rows.at(i, h)..][..vd]
                    .copy_from_slice(&row.o.iter().map(|&x| a.operand(x)).collect::<Vec<_>>());
                let Some(given) = &given else { continue };
                let g = &given[i * vd..(i + 1) * vd];
                // t = do . o, b = do . mean of v, a_j = do . v_j
                let pull: Vec<f64> = values.iter().map(|v| a.dot(g, v)).collect();
                let (t, b) = (a.dot(g, &row.o), a.dot(&row.p, &pull));
                for (n, &j) in seen.iter().enumerate() {
                    let (p, u, delta) = (row.p[n], row.u[n], pull[n] - b);
                    let gl = a.operand(scale * p * (pull[n] - t + (row.mean - u) * delta));
                    let gu = a.operand(-p * delta);
                    let w = a.operand(p * (1.0 + row.mean - u));
                    let add = |sum: &mut f64, x: f64, y: f64| *sum = a.sum(*sum + a.sum(x * y));
                    for c in 0..d {
                        add(&mut out.d_q[q_rows.at(i, h) + c], gl, keys[n][c]);
                        add(&mut out.d_r[q_rows.at(i, h) + c], gu, keys[n][c]);
                        add(&mut out.d_k[k_rows.at(j, kv) + c], gl, q[c]);
                        add(&mut out.d_k[k_rows.at(j, kv) + c], gu, r[c]);
                    }
                    (0..vd).for_each(|c| add(&mut out.d_v[v_rows.at(j, kv) + c], w, g[c]));
                }
            }
        }
    }
    for tensor in [&mut out.d_q, &mut out.d_r, &mut out.d_k, &mut out.d_v] {
        tensor.iter_mut().for_each(|x| *x = a.operand(*x));
    }
    out
}

/// Checks o, LSE and, if given with `d_o`, the gradients, with the tolerance rule.
///
/// Panics if the tensors do not have the shapes of the problem.
pub fn check(
    bound: &ParallaxBound<'_>,
    got: &ParallaxForward,
    gradients: Option<(&TensorView<'_>, &ParallaxGradients)>,
) -> Vec<(String, Verdict)> {
    let problem = bound.own.problem();
    let d_o = gradients.map(|(d_o, _)| d_o);
    let (want, plain) = (oracle(bound, d_o), walk(bound, d_o, Arithmetic(Some(problem.dtype()))));
    let rule = Rule::output(problem);
    let mut all = vec![
        ("o".to_string(), rule.judge(&got.own.o.view().to_f64(), &want.o, &plain.o)),
        ("lse".to_string(), judge_lse(&got.own.lse.view().to_f64(), &want.lse, problem.dtype(), 0.0)),
    ];
    if let Some((_, g)) = gradients {
        let rule = Rule::gradient(problem);
        for (name, got, want, plain) in [
            ("d_q", &g.d_q, &want.d_q, &plain.d_q),
            ("d_r", &g.d_r, &want.d_r, &plain.d_r),
            ("d_k", &g.d_k, &want.d_k, &plain.d_k),
            ("d_v", &g.d_v, &want.d_v, &plain.d_v),
        ] {
            all.push((name.to_string(), rule.judge(&got.view().to_f64(), want, plain)));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    /// The checked formulas: weights sum to 1; the covariance form; probes of 0; shifting all keys; gradients.
    #[test]
    fn formulas() {
        let (n, d, vd, scale) = (6, 3, 2, 0.7);
        let a = Arithmetic(None);
        let mut rng = Rng::new(2);
        let mut normals = |n: usize| rng.normals(n, 1.0);
        let (q, r, k, v, g) = (normals(d), normals(d), normals(n * d), normals(n * vd), normals(vd));
        let run = |q: &[f64], r: &[f64], k: &[f64], v: &[f64]| {
            let keys: Vec<&[f64]> = k.chunks_exact(d).collect();
            let values: Vec<&[f64]> = v.chunks_exact(vd).collect();
            parallax_row(a, scale, q, r, &keys, &values, vd)
        };
        let found = run(&q, &r, &k, &v);
        let weights: Vec<f64> = found.p.iter().zip(&found.u).map(|(p, u)| p * (1.0 + found.mean - u)).collect();
        assert!((weights.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let mean = |rows: &[f64], dim: usize, c: usize| -> f64 { (0..n).map(|j| found.p[j] * rows[j * dim + c]).sum() };
        for c in 0..vd {
            let covariance = |i: usize| -> f64 {
                (0..n).map(|j| found.p[j] * (v[j * vd + c] - mean(&v, vd, c)) * (k[j * d + i] - mean(&k, d, i))).sum()
            };
            let want = mean(&v, vd, c) - (0..d).map(|i| covariance(i) * r[i]).sum::<f64>();
            assert!((found.o[c] - want).abs() < 1e-12);
        }
        let plain = run(&q, &[0.0; 3], &k, &v);
        assert!((0..vd).all(|c| (plain.o[c] - mean(&v, vd, c)).abs() < 1e-12));
        let shifted: Vec<f64> = k.iter().enumerate().map(|(i, x)| x + [0.3, -1.0, 2.0][i % d]).collect();
        assert!(run(&q, &r, &shifted, &v).o.iter().zip(&found.o).all(|(x, y)| (x - y).abs() < 1e-12));

        let value = |raw: &[Vec<f64>; 4]| a.dot(&g, &run(&raw[0], &raw[1], &raw[2], &raw[3]).o);
        let raw = [q.clone(), r.clone(), k.clone(), v.clone()];
        let pull: Vec<f64> = v.chunks_exact(vd).map(|v| a.dot(&g, v)).collect();
        let (t, b) = (a.dot(&g, &found.o), a.dot(&found.p, &pull));
        let mut want = [vec![0.0; d], vec![0.0; d], vec![0.0; n * d], vec![0.0; n * vd]];
        for j in 0..n {
            let delta = pull[j] - b;
            let gl = scale * found.p[j] * (pull[j] - t + (found.mean - found.u[j]) * delta);
            let gu = -found.p[j] * delta;
            for c in 0..d {
                want[0][c] += gl * k[j * d + c];
                want[1][c] += gu * k[j * d + c];
                want[2][j * d + c] = gl * q[c] + gu * r[c];
            }
            (0..vd).for_each(|c| want[3][j * vd + c] = weights[j] * g[c]);
        }
        for (which, want) in want.iter().enumerate() {
            for (i, &want) in want.iter().enumerate() {
                let at = |x: f64| {
                    let mut raw = raw.clone();
                    raw[which][i] += x;
                    value(&raw)
                };
                let difference = (at(1e-5) - at(-1e-5)) / 2e-5;
                assert!((difference - want).abs() <= 1e-7, "argument {which}, element {i}: {want}, {difference}");
            }
        }
    }
}
