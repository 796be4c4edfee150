//! Straightforward attention in the type of the inputs; its error against the oracle sets the tolerance.
//!
//! It is written as a careful user of 16-bit tensors would write it, without tiles: the scale is folded into K; scores,
//! probabilities and their gradients are rounded to the type; sums are f32; results are rounded. For f32 tensors
//! everything is f32. If the problem forces an exponential, this code uses it too. The visible keys are determined
//! elsewhere (`walk`).

use crate::codes;
use crate::exact::{Exact, sink_share};
use crate::exp::{self, Exp};
use crate::inputs::Bound;
use crate::oracle::{Answer, At, GradientAnswer, KeyGradient, RowAnswer};
use crate::outputs::{Forward, Gradients};
use crate::precision::{Delta, Precision};
use crate::problem::Problem;
use crate::tensor::{Tensor, TensorError, TensorView};
use crate::walk::{self, Arithmetic, Cotangent, Head};

/// Straightforward code for quantised products uses the oracle's codes, and f32 for everything else.
macro_rules! arithmetic {
    ($bound:expr, walk::$function:ident($($arg:expr),*)) => {
        match $bound.problem().precision() {
            Precision::Native => walk::$function::<Rounded>($($arg),*),
            _ => walk::$function::<Coded>($($arg),*),
        }
    };
}

/// The whole forward result, in values of the problem's type (LSE f32).
pub fn forward(bound: &Bound<'_>) -> Answer {
    let (o, lse) = arithmetic!(bound, walk::forward(bound));
    Answer { o, lse }
}

/// The forward result of chosen query rows.
pub fn forward_rows(bound: &Bound<'_>, rows: &[At]) -> Vec<RowAnswer> {
    arithmetic!(bound, walk::forward_rows(bound, rows)).into_iter().map(|(o, lse)| RowAnswer { o, lse }).collect()
}

/// All gradients, in values of the problem's type (f32 for those of sinks and auxiliary tensors).
pub fn backward(bound: &Bound<'_>, d_o: &TensorView<'_>, d_lse: Option<&TensorView<'_>>) -> GradientAnswer {
    GradientAnswer::new(bound.problem(), arithmetic!(bound, walk::backward(bound, d_o, d_lse)))
}

/// The standard deviation of rounding errors in the gradients of sinks (if the problem has them), then in those of each
/// auxiliary tensor that has one: the root of the sum over rows of the squared errors of each row's part.
pub fn noise(bound: &Bound<'_>, d_o: &TensorView<'_>, d_lse: Option<&TensorView<'_>>) -> Vec<Vec<f64>> {
    match bound.problem().precision() {
        Precision::Native => walk::noise::<Exact, Rounded>(bound, d_o, d_lse),
        _ => walk::noise::<Exact, Coded>(bound, d_o, d_lse),
    }
}

/// d_q of chosen query rows.
pub fn backward_rows(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    rows: &[At],
) -> Vec<Vec<f64>> {
    arithmetic!(bound, walk::backward_rows(bound, d_o, d_lse, rows))
}

/// d_k and d_v of chosen keys; `At::head` counts key/value heads.
pub fn backward_keys(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    keys: &[At],
) -> Vec<KeyGradient> {
    let found = arithmetic!(bound, walk::backward_keys(bound, d_o, d_lse, keys));
    found.into_iter().map(|(d_k, d_v)| KeyGradient { d_k, d_v }).collect()
}

impl Answer {
    /// The tensors that an engine would return, each value rounded to its type.
    pub fn to_forward(&self, problem: &Problem) -> Result<Forward, TensorError> {
        let mut forward = Forward::zeros(problem)?;
        forward.o.view_mut().write_f64(&self.o);
        forward.lse.view_mut().write_f64(&self.lse);
        Ok(forward)
    }
}

impl GradientAnswer {
    /// The tensors that an engine would return, each value rounded to its type.
    pub fn to_gradients(&self, problem: &Problem) -> Result<Gradients, TensorError> {
        let mut gradients = Gradients::zeros(problem)?;
        gradients.d_q.view_mut().write_f64(&self.d_q);
        gradients.d_k.view_mut().write_f64(&self.d_k);
        gradients.d_v.view_mut().write_f64(&self.d_v);
        let write = |tensor: &mut Option<Tensor>, values: &Option<Vec<f64>>| {
            if let (Some(tensor), Some(values)) = (tensor, values) {
                tensor.view_mut().write_f64(values);
            }
        };
        write(&mut gradients.d_sinks, &self.d_sinks);
        for (tensor, values) in gradients.d_aux.iter_mut().zip(&self.d_aux) {
            write(tensor, values);
        }
        Ok(gradients)
    }
}

struct Rounded;

/// f32 arithmetic on the oracle's codes.
pub(crate) struct Coded;

impl Arithmetic for Coded {
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
        let exact = Exact::row_forward(head, q);
        let coded = codes::weights(head, &exact.keys, &codes::scores(head, q, &exact));
        let (query, taken_out) = (narrow(&head.query(q)), head.taken_out(q) as f32);
        let score = |&k: &usize| (dot(&query, &narrow(head.key(k))) + taken_out) * problem.scale();
        let scaled: Vec<f64> = exact.keys.iter().map(score).map(f64::from).collect();
        let modified = |(&k, &s): (&usize, &f64)| f64::from(head.modified(s, q, k) as f32);
        let scores: Vec<f64> = exact.keys.iter().zip(&scaled).map(modified).collect();
        let max = codes::highest(&scores, f64::NEG_INFINITY) as f32;
        let exp = |x: &[f64]| x.iter().map(|&x| f64::from(exponential(problem, x as f32))).collect();
        let p = narrow(&codes::by_groups(head, &exact.keys, &scores, exp));
        let sink = head.bound.sink(head.head).map_or(f32::NEG_INFINITY, |s| s as f32);
        let (share, lse) = normaliser(max, p.iter().sum(), sink);
        // Weights that are not quantised are numbers of the problem's type.
        let own = |p: &f32| round(problem, p * share);
        let p: Vec<f32> = p.iter().map(own).collect();
        let weighted = |p: &[f32], factor: f32| -> Vec<f64> {
            let mut o = vec![0.0f32; problem.value_dim()];
            for (p, &k) in p.iter().zip(&exact.keys) {
                o.iter_mut().zip(head.value(k)).for_each(|(o, &v)| *o += p * v as f32);
            }
            o.into_iter().map(|o| f64::from(round(problem, o * factor))).collect()
        };
        let wide = |p: &[f32], factor: f32| p.iter().map(|&p| f64::from(p * factor)).collect::<Vec<f64>>();
        let (keys, lse) = (exact.keys.clone(), f64::from(lse));
        let Some(coded) = coded else {
            return walk::RowForward { keys, scaled, o: weighted(&p, 1.0), p: wide(&p, 1.0), lse, exact: None };
        };
        let coded = narrow(&coded);
        let o = weighted(&coded, share);
        let delta = match problem.precision() {
            Precision::Groups(spec) if spec.delta == Delta::Exact => weighted(&p, 1.0),
            _ => o.clone(),
        };
        walk::RowForward { keys, scaled, p: wide(&coded, share), o, lse, exact: Some((wide(&p, 1.0), delta)) }
    }
    fn row_gradient(head: &Head<'_, f64>, q: usize, row: &walk::RowForward, given: &Cotangent) -> walk::RowGradient {
        row_gradient(head, q, row, given, head.problem().scale())
    }
    fn add(sum: f64, x: f64, y: f64) -> f64 {
        Rounded::add(sum, x, y)
    }
    fn store(problem: &Problem, x: f64) -> f64 {
        Rounded::store(problem, x)
    }
}

/// The factor of weights relative to `max` with this sum, and the LSE. The sink may exceed every score, so the larger
/// of both is factored out of the sum.
fn normaliser(max: f32, sum: f32, sink: f32) -> (f32, f32) {
    let top = if sink > max { sink } else { max };
    if top == f32::NEG_INFINITY || sink == f32::INFINITY {
        return (0.0, top);
    }
    let total = sum * (max - top).exp() + (sink - top).exp();
    ((max - top).exp() / total, top + total.ln())
}

/// Rounds to the problem's type.
fn round(problem: &Problem, x: f32) -> f32 {
    problem.dtype().round(f64::from(x)) as f32
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// e^x, by the exponential of the problem.
fn exponential(problem: &Problem, x: f32) -> f32 {
    match problem.exp() {
        Exp::Sas { threshold } => exp::sas(f64::from(x), threshold) as f32,
        Exp::SasOnline => exp::sas(f64::from(x), f32::NEG_INFINITY) as f32,
        // The engine chooses the elements that use the polynomial, so any element may have its error.
        Exp::Poly { degree, share } if share > 0.0 => exp::exp2_poly(degree, x * std::f32::consts::LOG2_E),
        Exp::Auto | Exp::Native | Exp::Poly { .. } => x.exp(),
    }
}

impl Arithmetic for Rounded {
    type Number = f32;

    fn key(problem: &Problem, x: f64) -> f32 {
        round(problem, x as f32 * problem.scale())
    }

    fn value(x: f64) -> f32 {
        x as f32
    }

    fn row_forward(head: &Head<'_, f32>, q: usize) -> walk::RowForward {
        let problem = head.problem();
        let query = narrow(&head.query(q));
        let (mut keys, mut scaled, mut scores) = (Vec::new(), Vec::new(), Vec::new());
        for k in head.visible(q) {
            let s = f64::from(round(problem, dot(&query, head.key(k))));
            let modified = round(problem, head.modified(s, q, k) as f32);
            if modified != f32::NEG_INFINITY {
                keys.push(k);
                scaled.push(s);
                scores.push(modified);
            }
        }
        // A NaN becomes the maximum and stays it.
        let max = scores.iter().fold(f32::NEG_INFINITY, |m, &s| if s.is_nan() || s > m { s } else { m });
        let max = codes::origin(problem, f64::from(max)) as f32;
        let mut p: Vec<f32> = scores.iter().map(|s| exponential(problem, s - max)).collect();
        let sum: f32 = p.iter().sum();
        let sink = head.bound.sink(head.head).map_or(f32::NEG_INFINITY, |s| s as f32);
        let (share, lse) = normaliser(max, sum, sink);
        let mut o = vec![0.0f32; problem.value_dim()];
        for (p, &k) in p.iter_mut().zip(&keys) {
            *p = round(problem, *p * share);
            for (o, v) in o.iter_mut().zip(head.value(k)) {
                *o += *p * v;
            }
        }
        // Backward has only the f32 LSE, so its P has the LSE's rounding error. Sas needs the maximum itself.
        if !matches!(problem.exp(), Exp::Sas { .. }) {
            let top = codes::origin(problem, f64::from(lse)) as f32;
            let factor = if top == lse { 1.0 } else { (top - lse).exp() };
            let again = |s: &f32| round(problem, exponential(problem, s - top) * factor);
            p = scores.iter().map(again).collect();
        }
        let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect();
        let o = o.into_iter().map(|x| round(problem, x)).collect();
        walk::RowForward { keys, scaled, p: wide(p), o: wide(o), lse: f64::from(lse), exact: None }
    }

    fn row_gradient(head: &Head<'_, f32>, q: usize, row: &walk::RowForward, given: &Cotangent) -> walk::RowGradient {
        // K contains the scale.
        row_gradient(head, q, row, given, 1.0)
    }

    fn add(sum: f64, x: f64, y: f64) -> f64 {
        f64::from(sum as f32 + x as f32 * y as f32)
    }

    fn store(problem: &Problem, x: f64) -> f64 {
        problem.dtype().round(x)
    }
}

/// The gradient of a row; `scale` is the factor of the keys.
fn row_gradient<T: Copy + Into<f64>>(
    head: &Head<'_, T>,
    q: usize,
    row: &walk::RowForward,
    given: &Cotangent,
    scale: f32,
) -> walk::RowGradient {
    let problem = head.problem();
    let d_o = narrow(&given.d_o);
    let (p, o) = row.exact.as_ref().map_or((&row.p, &row.o), |(p, o)| (p, o));
    let delta = dot(&d_o, &narrow(o)) - given.d_lse as f32;
    let mut d_q = vec![0.0f32; problem.head_dim()];
    let (mut d_modified, mut d_scaled) = (Vec::new(), Vec::new());
    let as_f32 = |x: &T| -> f32 { (*x).into() as f32 };
    for (j, &k) in row.keys.iter().enumerate() {
        let d_p: f32 = d_o.iter().zip(head.value(k)).map(|(d, v)| d * as_f32(v)).sum();
        let d_s = p[j] as f32 * (d_p - delta);
        let d_x = round(problem, d_s * head.derivative(row.scaled[j], q, k) as f32);
        for (d, k) in d_q.iter_mut().zip(head.key(k)) {
            *d += d_x * as_f32(k);
        }
        d_modified.push(f64::from(round(problem, d_s)));
        d_scaled.push(f64::from(d_x));
    }
    let sink = head.bound.visible_sink(head.head);
    let d_sink = sink.map_or(0.0, |sink| -(sink_share(sink, row.lse) as f32) * delta);
    let d_q = d_q.into_iter().map(|d| f64::from(d * scale)).collect();
    walk::RowGradient { d_q, d_modified, d_scaled, d_sink: f64::from(d_sink) }
}
