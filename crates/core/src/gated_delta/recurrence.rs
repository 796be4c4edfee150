//! One value head, token by token: shared by the oracle and the straightforward implementation.
//!
//! Everything is computed in f64. The straightforward implementation rounds each result to f32. Values that a careful
//! user of a 16-bit type would store in it (normalised rows, corrections of the state and their gradients) are rounded
//! to that type.

use super::{DeltaBound, L2_EPS, QkNorm, Tokens};
use crate::dtype::DType;
use crate::tensor::TensorView;

/// Rounding of numbers.
#[derive(Clone, Copy)]
pub(crate) struct Arithmetic {
    /// Type to which stored operands are rounded; `None` means exact.
    pub rounded: Option<DType>,
}

impl Arithmetic {
    /// Rounds a number that stays in a register or a sum.
    fn sum(self, x: f64) -> f64 {
        if self.rounded.is_some() { f64::from(x as f32) } else { x }
    }
    /// Rounds a number that is stored as an operand of a product.
    fn operand(self, x: f64) -> f64 {
        self.rounded.map_or(x, |dtype| dtype.round(x))
    }
    fn dot(self, a: impl Iterator<Item = f64>, b: impl Iterator<Item = f64>) -> f64 {
        a.zip(b).fold(0.0, |sum, (x, y)| self.sum(sum + self.sum(x * y)))
    }
}

/// q, k, v and gates of one value head of one sequence.
pub(crate) struct Head {
    arithmetic: Arithmetic,
    len: usize,
    kd: usize,
    vd: usize,
    scale: f64,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    /// 1 / length of each row, if rows are normalised here.
    lengths: Option<[Vec<f64>; 2]>,
    decay: Vec<f64>,
    beta: Vec<f64>,
    initial: Vec<f64>,
}

/// Results of one head.
pub(crate) struct HeadForward {
    pub o: Vec<f64>,
    pub state: Vec<f64>,
    /// The state before each token, after its decay; saved for backward.
    decayed: Vec<Vec<f64>>,
    /// v - S~^T k of each token.
    errors: Vec<f64>,
    /// The state after each token.
    after: Vec<Vec<f64>>,
}

/// The gradients of one head.
pub(crate) struct HeadGradient {
    pub d_q: Vec<f64>,
    pub d_k: Vec<f64>,
    pub d_v: Vec<f64>,
    pub d_g: Vec<f64>,
    pub d_beta: Vec<f64>,
    pub d_initial: Vec<f64>,
}

/// `dim` elements of every token of a head, `[tokens][dim]`.
pub(crate) fn read_rows(
    bound: &DeltaBound<'_>,
    view: &TensorView<'_>,
    s: &Tokens,
    head: usize,
    dim: usize,
) -> Vec<f64> {
    let rows = bound.row_layout(view.strides(), s);
    let step = view.strides()[view.strides().len() - 1];
    (0..s.len).flat_map(|t| (0..dim).map(move |i| (t, i))).map(|(t, i)| view.at(rows.at(t, head) + i * step)).collect()
}

/// The state of one sequence and value head.
pub(crate) fn read_state(view: &TensorView<'_>, sequence: usize, head: usize) -> Vec<f64> {
    let (shape, strides) = (view.shape(), view.strides());
    let at = |i: usize, j: usize| sequence * strides[0] + head * strides[1] + i * strides[2] + j * strides[3];
    (0..shape[2]).flat_map(|i| (0..shape[3]).map(move |j| (i, j))).map(|(i, j)| view.at(at(i, j))).collect()
}

impl Head {
    pub fn new(bound: &DeltaBound<'_>, s: &Tokens, value_head: usize, arithmetic: Arithmetic) -> Head {
        let problem = bound.problem();
        let (kd, vd) = (problem.key_dim(), problem.value_dim());
        let key_head = value_head / problem.group();
        let mut q = read_rows(bound, bound.q(), s, key_head, kd);
        let mut k = read_rows(bound, bound.k(), s, key_head, kd);
        let lengths = (problem.qk_norm() == QkNorm::Inside).then(|| {
            [&mut q, &mut k].map(|rows| {
                let of = |row: &mut [f64]| {
                    let squares = arithmetic.dot(row.iter().copied(), row.iter().copied());
                    let inverse = arithmetic.sum(1.0 / (squares + L2_EPS).sqrt());
                    row.iter_mut().for_each(|x| *x = arithmetic.operand(*x * inverse));
                    inverse
                };
                rows.chunks_exact_mut(kd).map(of).collect::<Vec<f64>>()
            })
        });
        let gate = |values: &[f32], t: usize| f64::from(values[bound.gate(s, t, value_head)]);
        let initial = bound.initial_state().map(|state| read_state(state, s.number, value_head));
        Head {
            arithmetic,
            len: s.len,
            kd,
            vd,
            scale: f64::from(problem.scale()),
            q,
            k,
            v: read_rows(bound, bound.v(), s, value_head, vd),
            lengths,
            decay: (0..s.len).map(|t| arithmetic.sum(gate(bound.g(), t).exp())).collect(),
            beta: (0..s.len).map(|t| gate(bound.beta(), t)).collect(),
            initial: initial.unwrap_or_else(|| vec![0.0; kd * vd]),
        }
    }

    fn token_row<'a>(&self, rows: &'a [f64], t: usize, dim: usize) -> &'a [f64] {
        &rows[t * dim..(t + 1) * dim]
    }

    /// The row x^T S, for a row x of length `key_dim`.
    fn read(&self, state: &[f64], x: &[f64]) -> Vec<f64> {
        let a = self.arithmetic;
        (0..self.vd).map(|j| a.dot(x.iter().copied(), state[j..].iter().step_by(self.vd).copied())).collect()
    }

    /// Processes all tokens; with `keep`, also saves the inputs of backward.
    pub fn forward(&self, keep: bool) -> HeadForward {
        let a = self.arithmetic;
        let mut state = self.initial.clone();
        let mut out = HeadForward { o: vec![], state: vec![], decayed: vec![], errors: vec![], after: vec![] };
        for t in 0..self.len {
            let (q, k, v) = (
                self.token_row(&self.q, t, self.kd),
                self.token_row(&self.k, t, self.kd),
                self.token_row(&self.v, t, self.vd),
            );
            state.iter_mut().for_each(|s| *s = a.sum(*s * self.decay[t]));
            let seen = self.read(&state, k);
            let error: Vec<f64> = v.iter().zip(&seen).map(|(v, r)| a.sum(v - r)).collect();
            if keep {
                out.decayed.push(state.clone());
            }
            let step: Vec<f64> = error.iter().map(|e| a.operand(self.beta[t] * e)).collect();
            for (row, k) in state.chunks_exact_mut(self.vd).zip(k) {
                row.iter_mut().zip(&step).for_each(|(s, u)| *s = a.sum(*s + a.sum(k * u)));
            }
            out.o.extend(self.read(&state, q).into_iter().map(|x| a.sum(self.scale * x)));
            if keep {
                out.errors.extend(error);
                out.after.push(state.clone());
            }
        }
        out.state = state;
        out
    }

    /// Computes all gradients, by the chain rule from the last token back.
    pub fn backward(&self, d_o: &[f64], d_final: Option<&[f64]>) -> HeadGradient {
        let (a, kd, vd) = (self.arithmetic, self.kd, self.vd);
        let kept = self.forward(true);
        let mut d_state = d_final.map_or_else(|| vec![0.0; kd * vd], <[f64]>::to_vec);
        let mut g = HeadGradient {
            d_q: vec![0.0; self.len * kd],
            d_k: vec![0.0; self.len * kd],
            d_v: vec![0.0; self.len * vd],
            d_g: vec![0.0; self.len],
            d_beta: vec![0.0; self.len],
            d_initial: vec![],
        };
        for t in (0..self.len).rev() {
            let (q, k) = (self.token_row(&self.q, t, kd), self.token_row(&self.k, t, kd));
            let (d_o, error) = (self.token_row(d_o, t, vd), self.token_row(&kept.errors, t, vd));
            let (decayed, after) = (&kept.decayed[t], &kept.after[t]);
            for (i, row) in d_state.chunks_exact_mut(vd).enumerate() {
                g.d_q[t * kd + i] =
                    a.sum(self.scale * a.dot(after[i * vd..(i + 1) * vd].iter().copied(), d_o.iter().copied()));
                row.iter_mut().zip(d_o).for_each(|(d, x)| *d = a.sum(*d + a.sum(self.scale * q[i] * x)));
            }
            // dS (v - r): the gradient of beta k, and its product with k that of beta.
            let pull: Vec<f64> =
                d_state.chunks_exact(vd).map(|row| a.dot(row.iter().copied(), error.iter().copied())).collect();
            g.d_beta[t] = a.dot(pull.iter().copied(), k.iter().copied());
            let d_error: Vec<f64> = self.read(&d_state, k).into_iter().map(|x| a.operand(self.beta[t] * x)).collect();
            g.d_v[t * vd..(t + 1) * vd].copy_from_slice(&d_error);
            for i in 0..kd {
                let back = a.dot(decayed[i * vd..(i + 1) * vd].iter().copied(), d_error.iter().copied());
                g.d_k[t * kd + i] = a.sum(self.beta[t] * pull[i] - back);
            }
            for (row, k) in d_state.chunks_exact_mut(vd).zip(k) {
                row.iter_mut().zip(&d_error).for_each(|(d, e)| *d = a.sum(*d - a.sum(k * e)));
            }
            g.d_g[t] = a.dot(d_state.iter().copied(), decayed.iter().copied());
            d_state.iter_mut().for_each(|d| *d = a.sum(*d * self.decay[t]));
        }
        g.d_initial = d_state;
        if let Some([q_lengths, k_lengths]) = &self.lengths {
            for (rows, d_rows, lengths) in [(&self.q, &mut g.d_q, q_lengths), (&self.k, &mut g.d_k, k_lengths)] {
                for ((y, d), inverse) in rows.chunks_exact(kd).zip(d_rows.chunks_exact_mut(kd)).zip(lengths) {
                    let along = a.dot(y.iter().copied(), d.iter().copied());
                    d.iter_mut().zip(y).for_each(|(d, y)| *d = a.sum(inverse * (*d - y * along)));
                }
            }
        }
        g
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    /// Central differences of a random linear function of o and the final state, in every argument.
    #[test]
    fn gradients_are_those_of_central_differences() {
        let (len, kd, vd) = (7, 4, 3);
        for normalised in [false, true] {
            let mut rng = Rng::new(11);
            let mut normals = |n: usize, by: f64| rng.normals(n, by);
            // g, q, k, v, beta, initial state, and the weights of o and of the final state.
            let raw = [
                normals(len, 0.3).iter().map(|x| -x.abs()).collect::<Vec<_>>(),
                normals(len * kd, 0.6),
                normals(len * kd, 0.6),
                normals(len * vd, 1.0),
                normals(len, 0.5),
                normals(kd * vd, 1.0),
            ];
            let (d_o, d_final) = (normals(len * vd, 1.0), normals(kd * vd, 1.0));
            let head = |raw: &[Vec<f64>; 6]| {
                let [g, q, k, v, beta, initial] = raw.clone();
                let normal = |rows: Vec<f64>| -> (Vec<f64>, Vec<f64>) {
                    let inverse = |row: &[f64]| 1.0 / (row.iter().map(|x| x * x).sum::<f64>() + L2_EPS).sqrt();
                    let lengths: Vec<f64> = rows.chunks_exact(kd).map(inverse).collect();
                    (rows.iter().enumerate().map(|(i, x)| x * lengths[i / kd]).collect(), lengths)
                };
                let ((q, a), (k, b)) = if normalised { (normal(q), normal(k)) } else { ((q, vec![]), (k, vec![])) };
                Head {
                    arithmetic: Arithmetic { rounded: None },
                    len,
                    kd,
                    vd,
                    scale: 0.5,
                    q,
                    k,
                    v,
                    lengths: normalised.then_some([a, b]),
                    decay: g.iter().map(|g| g.exp()).collect(),
                    beta,
                    initial,
                }
            };
            let value = |raw: &[Vec<f64>; 6]| {
                let out = head(raw).forward(false);
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
                dot(&out.o, &d_o) + dot(&out.state, &d_final)
            };
            let g = head(&raw).backward(&d_o, Some(&d_final));
            for (which, found) in [g.d_g, g.d_q, g.d_k, g.d_v, g.d_beta, g.d_initial].iter().enumerate() {
                for (i, &found) in found.iter().enumerate() {
                    let step = 1e-5;
                    let at = |x: f64| {
                        let mut raw = raw.clone();
                        raw[which][i] += x;
                        value(&raw)
                    };
                    let want = (at(step) - at(-step)) / (2.0 * step);
                    let error = (found - want).abs();
                    assert!(error <= 1e-7 * want.abs().max(1.0), "argument {which}, element {i}: {found}, {want}");
                }
            }
        }
    }
}
