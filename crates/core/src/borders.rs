//! Allowances for weights that lie on the border between two codes.

use crate::codes::{Codes, by_groups, exponential, highest, scores};
use crate::dtype::DType;
use crate::exact::Exact;
use crate::exp::Exp;
use crate::precision::{Delta, GroupAttention, Precision};
use crate::problem::Problem;
use crate::walk::{self, Arithmetic, Cotangent, Head};

/// Relative error bound of an exponential: a cubic is enough for 16-bit results, or may be forced.
fn exp_error(problem: &Problem) -> f64 {
    let cubic = problem.dtype() != DType::F32 || matches!(problem.exp(), Exp::Poly { degree: 3 | 4, .. });
    if cubic { 2f64.powi(-13) } else { 2f64.powi(-21) }
}

/// How far results may be off because weights are near borders: an allowance in place of each value of another
/// arithmetic. `row.p` holds the widths of weights, and all factors are magnitudes.
pub(crate) struct Borders;

impl Arithmetic for Borders {
    type Number = f64;

    fn key(problem: &Problem, x: f64) -> f64 {
        Exact::key(problem, x)
    }

    fn value(x: f64) -> f64 {
        Exact::value(x)
    }

    fn quantise(problem: &Problem, k: &mut [f64], v: &mut [f64]) -> Option<Vec<f32>> {
        Exact::quantise(problem, k, v)
    }

    fn row_forward(head: &Head<'_, f64>, q: usize) -> walk::RowForward {
        let problem = head.problem();
        let row = Exact::row_forward(head, q);
        let (query, taken_out, scale) = (head.query(q), head.taken_out(q), f64::from(problem.scale()));
        let scores = scores(head, q, &row);
        let size = |((&k, scaled), score): ((&usize, &f64), &f64)| {
            let products: f64 = query.iter().zip(head.key(k)).map(|(x, y)| (x * y).abs()).sum();
            scale * (products + taken_out.abs()) + scaled.abs() + score.abs()
        };
        let size = row.keys.iter().zip(&row.scaled).zip(&scores).map(size).fold(0.0, f64::max);
        // Errors of a score, and of the maximum that is subtracted from it.
        let (near, error) = (2.0 * 4.0 * 2f64.powi(-24) * size, exp_error(problem));
        let ends = |x: f64| {
            let all = [x - near, x, x + near].map(|x| exponential(problem, x));
            let (low, high) = all.iter().fold((f64::INFINITY, 0.0f64), |(a, b), &p| (a.min(p), b.max(p)));
            (low * (1.0 - error), high * (1.0 + error))
        };
        let widths = |x: &[f64]| {
            let (low, high): (Vec<f64>, Vec<f64>) = x.iter().map(|&x| ends(x)).unzip();
            Codes::of(problem).map_or_else(|| vec![0.0; x.len()], |codes| codes.widths(&low, &high))
        };
        let max = highest(&scores, f64::NEG_INFINITY);
        let share = if row.lse == f64::NEG_INFINITY { 0.0 } else { (max - row.lse).exp() };
        let widths = by_groups(head, &row.keys, &scores, widths);
        let widths: Vec<f64> = widths.into_iter().map(|w| w * share).collect();
        let mut o = vec![0.0; problem.value_dim()];
        for (w, &k) in widths.iter().zip(&row.keys) {
            o.iter_mut().zip(head.value(k)).for_each(|(o, v)| *o += w * v.abs());
        }
        let exact = row.exact.map(|(p, _)| (p, o.clone()));
        walk::RowForward { keys: row.keys, scaled: row.scaled, p: widths, o, lse: row.lse, exact }
    }

    /// dS uses exact weights; codes enter only through the output in D.
    fn row_gradient(head: &Head<'_, f64>, q: usize, row: &walk::RowForward, given: &Cotangent) -> walk::RowGradient {
        let problem = head.problem();
        let rounded = matches!(problem.precision(), Precision::Groups(GroupAttention { delta: Delta::Rounded, .. }));
        let delta: f64 = given.d_o.iter().zip(&row.o).map(|(d, o)| (d * o).abs()).sum();
        let p = row.exact.as_ref().filter(|_| rounded).map(|(p, _)| p);
        let (mut d_q, scale) = (vec![0.0; problem.head_dim()], f64::from(problem.scale()));
        let (mut d_modified, mut d_scaled) = (Vec::new(), Vec::new());
        for (j, &k) in row.keys.iter().enumerate() {
            let d_s = p.map_or(0.0, |p| p[j] * delta);
            let d_x = (d_s * head.derivative(row.scaled[j], q, k)).abs();
            d_q.iter_mut().zip(head.key(k)).for_each(|(d, k)| *d += scale * d_x * k.abs());
            d_modified.push(d_s);
            d_scaled.push(d_x);
        }
        let sink = head.bound.visible_sink(head.head).filter(|_| rounded && row.lse != f64::NEG_INFINITY);
        walk::RowGradient { d_q, d_modified, d_scaled, d_sink: sink.map_or(0.0, |s| (s - row.lse).exp() * delta) }
    }

    fn add(sum: f64, x: f64, y: f64) -> f64 {
        sum + (x * y).abs()
    }

    fn store(_: &Problem, x: f64) -> f64 {
        x
    }
}
