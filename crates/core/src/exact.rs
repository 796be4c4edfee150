//! Attention in f64: the arithmetic of the oracle.

use crate::codes;
use crate::format::Granularity;
use crate::precision::{Delta, Precision};
use crate::problem::Problem;
use crate::walk::{self, Arithmetic, Cotangent, Head};

/// Exact arithmetic: no rounding but that of f64.
pub(crate) struct Exact;

/// Replaces keys and values by the values of their codes. Returns the mean that was subtracted from the keys.
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

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// A sink's share of a row's softmax. A sink of -inf has no share, whatever the row holds; one of +inf takes
/// everything.
pub fn sink_share(sink: f64, lse: f64) -> f64 {
    match sink {
        f64::NEG_INFINITY => 0.0,
        _ if lse == f64::NEG_INFINITY => 0.0,
        f64::INFINITY if lse == f64::INFINITY => 1.0,
        _ => (sink - lse).exp(),
    }
}

/// The factor of weights relative to `max` with this sum, and the LSE. The larger of maximum and sink is factored out
/// of the sum, so that the shares add up to 1 however large it is.
fn normaliser(max: f64, sum: f64, sink: f64) -> (f64, f64) {
    let top = if sink > max { sink } else { max };
    if top == f64::NEG_INFINITY || sink == f64::INFINITY {
        return (0.0, top);
    }
    let total = sum * (max - top).exp() + (sink - top).exp();
    ((max - top).exp() / total, top + total.ln())
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

    fn row_forward(head: &Head<'_, f64>, q: usize) -> walk::RowForward {
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
        let max = codes::origin(problem, codes::highest(&scores, f64::NEG_INFINITY));
        let exp = |x: &[f64]| x.iter().map(|&x| codes::exponential(problem, x)).collect();
        let mut p = codes::by_groups(head, &keys, &scores, exp);
        let sink = head.bound.sink(head.head).unwrap_or(f64::NEG_INFINITY);
        let (share, lse) = normaliser(max, p.iter().sum(), sink);
        let weighted = |p: &[f64]| {
            let mut o = vec![0.0; problem.value_dim()];
            for (p, &k) in p.iter().zip(&keys) {
                o.iter_mut().zip(head.value(k)).for_each(|(o, v)| *o += p * v);
            }
            o
        };
        p.iter_mut().for_each(|p| *p *= share);
        let Some(mut coded) = codes::weights(head, &keys, &scores) else {
            let o = weighted(&p);
            return walk::RowForward { keys, scaled, p, o, lse, exact: None };
        };
        coded.iter_mut().for_each(|p| *p *= share);
        let own = weighted(&coded);
        let delta = match problem.precision() {
            Precision::Groups(spec) if spec.delta == Delta::Exact => weighted(&p),
            _ => own.clone(),
        };
        walk::RowForward { keys, scaled, p: coded, o: own, lse, exact: Some((p, delta)) }
    }

    fn row_gradient(head: &Head<'_, f64>, q: usize, row: &walk::RowForward, given: &Cotangent) -> walk::RowGradient {
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
        let d_sink = head.bound.visible_sink(head.head).map_or(0.0, |sink| -sink_share(sink, row.lse) * delta);
        walk::RowGradient { d_q, d_modified, d_scaled, d_sink }
    }

    fn add(sum: f64, x: f64, y: f64) -> f64 {
        sum + x * y
    }

    fn store(_: &Problem, x: f64) -> f64 {
        x
    }
}
