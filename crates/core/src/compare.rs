//! The tolerance rule, used by every test, `check` and `tune`.
//!
//! With `want` from the f64 oracle and `plain` from straightforward code of the same type: `max|got - want| <= rtol *
//! max|plain - want| + atol`. rtol is 2, or 3 with softcap. For 16-bit results atol is twice the largest |(r + 0.3 -
//! 0.3) - r|, where r is `want` rounded to the type and every operation rounds to it, plus 3e-4 for gradients with
//! softcap; for f32 it is 1e-6 * max|want|. The f32 gradients of sinks and auxiliary tensors are sums over terms in the
//! inputs' type and get both. Such a tensor has only a few elements, where the single sample `plain` may be close to
//! `want` by luck. So its error counts as at least two standard deviations of the random walk that the roundings of its
//! rows make ([`plain::noise`]). With quantised weights, a weight that f32 cannot distinguish from the border of two
//! codes may have either, and each element gets the resulting difference as an extra allowance. A gradient of fewer
//! than [`FEW`] elements gets one more rounding step of its type, because one sample of the error says little there.
//! NaN and infinities must be in the same places.

use crate::borders::Borders;
use crate::codes::Held;
use crate::dtype::DType;
use crate::exact::Exact;
use crate::exp::Exp;
use crate::inputs::{Bound, Sequence};
use crate::oracle::{self, At};
use crate::outputs::{Forward, Gradients, Saved};
use crate::plain::{self, Coded};
use crate::precision::{GroupAttention, Precision};
use crate::problem::{Problem, Side};
use crate::random::Rng;
use crate::tensor::{Tensor, TensorView};
use crate::walk;
use std::fmt;

/// With more scores per head than this, checks look at [`SAMPLE`] rows and keys instead of all.
pub const MAX_SCORES: usize = 1 << 22;
/// Gradients with fewer elements get one more rounding step of their type.
pub const FEW: usize = 64;
/// Number of rows and keys in a sampled check.
pub const SAMPLE: usize = 64;

/// The outcome of one comparison, described by its worst element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// |got - want| at the worst element; infinite if a NaN or infinity is misplaced.
    pub worst: f64,
    /// Allowed difference there.
    pub allowed: f64,
    /// Flat index of the worst element in the row-major tensor.
    pub at: usize,
    /// The engine's value there.
    pub got: f64,
    /// The oracle's value there.
    pub want: f64,
    /// Root mean square of the finite differences.
    pub rms: f64,
    /// Number of elements where only one side is NaN or infinite, or the infinities differ in sign.
    pub misplaced: usize,
    /// Number of compared elements.
    pub count: usize,
}

impl Verdict {
    /// Whether the result is within the tolerance. An allowance that is not finite allows nothing.
    pub fn ok(&self) -> bool {
        self.is_within(1.0, 0.0)
    }

    /// Whether NaN and infinities are in place and the worst difference is at most `margin` times the tolerance and `rest`
    /// more. The rule takes the error of straightforward code as its measure, which is one sample of it. Of tens of thousands of
    /// small random problems, some two in a thousand have a lucky sample, so tests of that many allow a margin.
    pub fn is_within(&self, margin: f64, rest: f64) -> bool {
        self.misplaced == 0 && self.allowed.is_finite() && self.worst <= margin * self.allowed + rest
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { worst, allowed, at, got, want, rms, misplaced, count } = self;
        let word = if self.ok() { "ok" } else { "WRONG" };
        write!(f, "{word}: worst {worst:.3e} of {allowed:.3e} allowed, rms {rms:.1e}, at {at} of {count}: {got:e}")?;
        write!(f, ", want {want:e}")?;
        if *misplaced > 0 { write!(f, "; {misplaced} NaN or inf out of place") } else { Ok(()) }
    }
}

/// The tolerance rule for one tensor.
///
/// ```
/// use fulgurite_core::compare::Rule;
/// use fulgurite_core::DType;
///
/// let rule = Rule { dtype: DType::F32, softcap: false, gradient: false, terms: None };
/// let (want, plain) = ([1.0, 2.0], [1.0, 2.000001]);
/// assert!(rule.judge(&[1.0, 2.000002], &want, &plain).ok());
/// assert!(!rule.judge(&[1.0, 2.1], &want, &plain).ok());
/// assert!(!rule.judge(&[f64::NAN, 2.0], &want, &plain).ok());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Type of the tensor.
    pub dtype: DType,
    /// Whether scores have a softcap.
    pub softcap: bool,
    /// Whether the tensor is a gradient.
    pub gradient: bool,
    /// For an f32 sum of many terms, the type in which the terms were computed.
    pub terms: Option<DType>,
}

/// The largest relative error of rounding to nearest in a 16-bit type.
fn half_unit(dtype: DType) -> f64 {
    if dtype == DType::F16 { 2f64.powi(-11) } else { 2f64.powi(-8) }
}

impl Rule {
    /// The rule for `o`.
    pub fn output(problem: &Problem) -> Rule {
        Rule { dtype: problem.dtype(), softcap: problem.has_softcap(), gradient: false, terms: None }
    }
    /// The rule for `d_q`, `d_k` and `d_v`.
    pub fn gradient(problem: &Problem) -> Rule {
        Rule { gradient: true, ..Rule::output(problem) }
    }
    /// The rule for the f32 gradients of sinks and auxiliary tensors.
    pub fn sums(problem: &Problem) -> Rule {
        Rule { dtype: DType::F32, terms: Some(problem.dtype()), ..Rule::gradient(problem) }
    }

    /// The largest allowed difference.
    pub fn allowed(&self, want: &[f64], plain: &[f64]) -> f64 {
        self.allowed_beside(want, largest(want.iter().zip(plain).map(|(w, p)| p - w)))
    }

    /// The largest allowed difference, given the largest error of straightforward code.
    fn allowed_beside(&self, want: &[f64], error: f64) -> f64 {
        let rtol = if self.softcap { 3.0 } else { 2.0 };
        let steps = |dtype: DType| {
            let step = |&x: &f64| {
                let r = dtype.round(x);
                dtype.round(dtype.round(r + 0.3) - 0.3) - r
            };
            2.0 * largest(want.iter().map(step))
        };
        let atol = match self.dtype {
            DType::F32 => 1e-6 * largest(want.iter().copied()) + self.terms.map_or(0.0, steps),
            dtype => steps(dtype) + if self.softcap && self.gradient { 3e-4 } else { 0.0 },
        };
        let few = match self.terms.unwrap_or(self.dtype) {
            _ if !self.gradient || want.len() >= FEW => 0.0,
            DType::F32 => f64::from(f32::EPSILON) * largest(want.iter().copied()),
            // A step as in atol, or half a unit in the last place of the largest value, whichever is larger.
            dtype => (steps(dtype) / 2.0).max(half_unit(dtype) * largest(want.iter().copied())),
        };
        rtol * error + atol + few
    }

    /// Compares `got` with the oracle's `want`; `plain` sets the allowance. Panics if the lengths differ.
    pub fn judge(&self, got: &[f64], want: &[f64], plain: &[f64]) -> Verdict {
        self.judge_codes(got, want, plain, &[])
    }

    /// Like [`judge`](Self::judge), for quantised weights. `borders` is the change that weights near a border may cause
    /// at each element, or empty.
    ///
    /// ```
    /// use fulgurite_core::compare::Rule;
    /// use fulgurite_core::DType;
    ///
    /// let rule = Rule { dtype: DType::F32, softcap: false, gradient: false, terms: None };
    /// let (want, borders) = ([1.0, 2.0], [0.01, 0.0]);
    /// assert!(rule.judge_codes(&[1.01, 2.0], &want, &want, &borders).ok());
    /// assert!(!rule.judge_codes(&[1.0, 2.01], &want, &want, &borders).ok());
    /// ```
    pub fn judge_codes(&self, got: &[f64], want: &[f64], plain: &[f64], borders: &[f64]) -> Verdict {
        assert_eq!(want.len(), plain.len(), "elements of `plain`");
        assert!(borders.is_empty() || borders.len() == want.len(), "elements of `borders`");
        let allowed = self.allowed(want, plain);
        compare(got, want, self.dtype, |at, _| allowed + borders.get(at).unwrap_or(&0.0))
    }

    /// Like [`judge`](Self::judge), for a sum over rows. `noise` is the standard deviation of straightforward code's
    /// error at each element.
    ///
    /// ```
    /// use fulgurite_core::compare::Rule;
    /// use fulgurite_core::DType;
    ///
    /// let rule = Rule { dtype: DType::F32, softcap: false, gradient: true, terms: Some(DType::F32) };
    /// let lucky = [10.0]; // exactly what is wanted, but rows were off by some 0.1 in all
    /// assert!(rule.judge_sum(&[10.39], &[10.0], &lucky, &[0.1]).ok());
    /// assert!(!rule.judge_sum(&[10.41], &[10.0], &lucky, &[0.1]).ok());
    /// ```
    pub fn judge_sum(&self, got: &[f64], want: &[f64], plain: &[f64], noise: &[f64]) -> Verdict {
        let error = largest(want.iter().zip(plain).map(|(w, p)| p - w));
        let allowed = self.allowed_beside(want, error.max(DEVIATIONS * largest(noise.iter().copied())));
        compare(got, want, self.dtype, |_, _| allowed)
    }
}

/// Minimum error of straightforward code in standard deviations: an error exceeds them once in twenty times.
const DEVIATIONS: f64 = 2.0;

/// The rule for the LSE: 1e-3 (1e-5 if q, k and v are f32) plus 4 * 2^-23 * max(1, |want|) at each element. `extra` is
/// the additional error of a forced polynomial.
pub fn judge_lse(got: &[f64], want: &[f64], dtype: DType, extra: f64) -> Verdict {
    let base = if dtype == DType::F32 { 1e-5 } else { 1e-3 };
    compare(got, want, DType::F32, |_, want| base + extra + 4.0 * f64::from(f32::EPSILON) * want.abs().max(1.0))
}

/// The largest finite magnitude. Non-finite values are ignored: they would allow everything.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.map(f64::abs).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

/// Finds the element that exceeds its allowance most. `dtype` decides where `want` overflows to infinity.
fn compare(got: &[f64], want: &[f64], dtype: DType, allowed: impl Fn(usize, f64) -> f64) -> Verdict {
    assert_eq!(got.len(), want.len(), "elements of `got`");
    let none = Verdict {
        worst: 0.0,
        allowed: allowed(0, 0.0),
        at: 0,
        got: 0.0,
        want: 0.0,
        rms: 0.0,
        misplaced: 0,
        count: got.len(),
    };
    let (mut verdict, mut squares, mut excess) = (none, 0.0, f64::NEG_INFINITY);
    for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
        let rounded = dtype.round(want);
        let same = got.is_nan() && rounded.is_nan() || got == rounded;
        let finite = got.is_finite() && rounded.is_finite();
        let worst = if finite {
            (got - want).abs()
        } else if same {
            0.0
        } else {
            f64::INFINITY
        };
        if finite {
            squares += worst * worst;
        }
        verdict.misplaced += usize::from(!finite && !same);
        let limit = allowed(at, if finite { want } else { 0.0 });
        // A NaN excess (infinite allowance) must be reported, not ignored.
        let over = worst - limit;
        if over > excess || over.is_nan() {
            excess = over;
            verdict = Verdict { worst, allowed: limit, at, got, want, ..verdict };
        }
    }
    verdict.rms = (squares / got.len().max(1) as f64).sqrt();
    verdict
}

/// One tensor under comparison: the engine's result, the oracle's, and that of straightforward code.
struct Sides {
    rule: Option<Rule>,
    name: String,
    got: Vec<f64>,
    want: Vec<f64>,
    plain: Vec<f64>,
    /// Flat index of each compared element in the tensor.
    index: Vec<usize>,
    /// The change that weights near a border may cause at each element; empty if weights are not quantised.
    borders: Vec<f64>,
}

impl Sides {
    fn whole(name: &str, rule: Option<Rule>, got: &Tensor, want: Vec<f64>, plain: Vec<f64>) -> Sides {
        let index = (0..want.len()).collect();
        Sides { rule, name: name.into(), got: got.view().to_f64(), want, plain, index, borders: Vec::new() }
    }

    /// Some rows of a tensor; `starts` gives their first elements.
    fn sampled(
        name: &str,
        rule: Option<Rule>,
        got: &Tensor,
        starts: &[usize],
        want: Vec<Vec<f64>>,
        plain: Vec<Vec<f64>>,
    ) -> Sides {
        let index: Vec<usize> = starts.iter().zip(&want).flat_map(|(&start, row)| start..start + row.len()).collect();
        let view = got.view();
        let got = index.iter().map(|&i| view.at(i)).collect();
        Sides { rule, name: name.into(), got, want: want.concat(), plain: plain.concat(), index, borders: Vec::new() }
    }

    fn judge(&self, problem: &Problem) -> (String, Verdict) {
        let verdict = match self.rule {
            Some(rule) => rule.judge_codes(&self.got, &self.want, &self.plain, &self.borders),
            None => {
                // Only a forced polynomial differs from the oracle's exponential.
                let forced = matches!(problem.exp(), Exp::Poly { .. });
                let extra = 2.0 * largest(self.want.iter().zip(&self.plain).map(|(w, p)| p - w));
                judge_lse(&self.got, &self.want, problem.dtype(), if forced { extra } else { 0.0 })
            }
        };
        let at = self.index.get(verdict.at).copied().unwrap_or(0);
        (self.name.clone(), Verdict { at, ..verdict })
    }
}

/// Whether the weights of a problem are quantised.
fn in_codes(problem: &Problem) -> bool {
    !matches!(problem.precision(), Precision::Native | Precision::Groups(GroupAttention { pv: None, .. }))
}

/// Whether checks of this problem use a sample.
pub fn is_sampled(problem: &Problem) -> bool {
    problem.max_q_len().saturating_mul(problem.max_k_len()) > MAX_SCORES
}

/// Random query rows, of any head and of any sequence that has rows.
fn sample_rows(bound: &Bound<'_>, rng: &mut Rng) -> Vec<At> {
    let problem = bound.problem();
    let filled: Vec<&Sequence> = bound.sequences().iter().filter(|s| s.q_len > 0).collect();
    if filled.is_empty() {
        return Vec::new();
    }
    let mut rows: Vec<At> = (0..SAMPLE)
        .map(|_| {
            let sequence = rng.pick(&filled);
            At { batch: sequence.batch, head: rng.range(0..problem.q_heads()), row: rng.range(0..sequence.q_len) }
        })
        .collect();
    rows.sort_unstable_by_key(|at| (at.batch, at.head, at.row)); // rows of one head share its keys
    rows
}

/// Random keys of one random head, because each head costs a whole backward pass.
fn sample_keys(bound: &Bound<'_>, rng: &mut Rng) -> Vec<At> {
    let filled: Vec<&Sequence> = bound.sequences().iter().filter(|s| s.k_len > 0).collect();
    if filled.is_empty() {
        return Vec::new();
    }
    let sequence = rng.pick(&filled);
    let head = rng.range(0..bound.problem().kv_heads());
    (0..SAMPLE).map(|_| At { batch: sequence.batch, head, row: rng.range(0..sequence.k_len) }).collect()
}

/// Offsets of chosen rows in a row-major tensor.
fn starts(bound: &Bound<'_>, shape: &[usize], side: Side, rows: &[At]) -> Vec<usize> {
    let start = |at: &At| walk::packed_layout(bound, shape, &bound.sequences()[at.batch], side).at(at.row, at.head);
    rows.iter().map(start).collect()
}

/// Checks a forward result: `o`, then `lse`. With more than [`MAX_SCORES`] scores per head, `seed` picks the rows.
///
/// Panics if the tensors do not have the shapes of the problem.
pub fn check_forward(bound: &Bound<'_>, got: &Forward, seed: u64) -> Vec<(String, Verdict)> {
    let problem = bound.problem();
    let rule = Some(Rule::output(problem));
    let rows = is_sampled(problem).then(|| sample_rows(bound, &mut Rng::new(seed)));
    let mut sides = if let Some(rows) = &rows {
        let (want, plain) = (oracle::forward_rows(bound, rows), plain::forward_rows(bound, rows));
        let lse = |rows: &[oracle::RowAnswer]| rows.iter().map(|r| vec![r.lse]).collect();
        let lse_starts: Vec<usize> = rows
            .iter()
            .map(|at| walk::packed_lse_layout(bound, &bound.sequences()[at.batch]).at(at.row, at.head))
            .collect();
        let lse = Sides::sampled("lse", None, &got.lse, &lse_starts, lse(&want), lse(&plain));
        let o = |rows: Vec<oracle::RowAnswer>| rows.into_iter().map(|r| r.o).collect();
        let o_starts = starts(bound, &problem.o_shape(), Side::Query, rows);
        [Sides::sampled("o", rule, &got.o, &o_starts, o(want), o(plain)), lse]
    } else {
        let (want, plain) = (oracle::forward(bound), plain::forward(bound));
        [Sides::whole("o", rule, &got.o, want.o, plain.o), Sides::whole("lse", None, &got.lse, want.lse, plain.lse)]
    };
    if in_codes(problem) {
        sides[0].borders = match &rows {
            Some(rows) => walk::forward_rows::<Borders>(bound, rows).into_iter().flat_map(|(o, _)| o).collect(),
            None => walk::forward::<Borders>(bound).0,
        };
    }
    sides.iter().map(|s| s.judge(problem)).collect()
}

/// Checks attention over a packed cache: `o` of type `dtype`, and `lse`. `bound` holds the queries, and the keys and
/// values as the cache returns them, under [`Int8Attention::CACHE`](crate::Int8Attention::CACHE) in f32.
///
/// Panics if the tensors do not have the shapes of the problem.
pub fn check_held(bound: &Bound<'_>, got: &Forward, dtype: DType) -> Vec<(String, Verdict)> {
    let problem = bound.problem();
    let (want, plain) = (walk::forward::<Held<Exact>>(bound), walk::forward::<Held<Coded>>(bound));
    let rule = Rule { dtype, ..Rule::output(problem) };
    let mut o = Sides::whole("o", Some(rule), &got.o, want.0, plain.0);
    o.borders = walk::forward::<Held<Borders>>(bound).0;
    [o, Sides::whole("lse", None, &got.lse, want.1, plain.1)].iter().map(|s| s.judge(problem)).collect()
}

/// Checks gradients: `d_q`, `d_k`, `d_v`, then `d_sinks` and `d_` with the name of each auxiliary tensor that has one.
/// With more than [`MAX_SCORES`] scores per head, `seed` picks rows and keys, and the sums over all rows are not
/// checked.
///
/// Panics if the tensors do not have the shapes of the problem.
pub fn check_backward(bound: &Bound<'_>, saved: &Saved<'_>, got: &Gradients, seed: u64) -> Vec<(String, Verdict)> {
    let problem = bound.problem();
    let (d_o, d_lse): (&TensorView<'_>, _) = (&saved.d_o, saved.d_lse.as_ref());
    let (rule, sums) = (Some(Rule::gradient(problem)), Some(Rule::sums(problem)));
    let sides = if is_sampled(problem) {
        let mut rng = Rng::new(seed);
        let (rows, keys) = (sample_rows(bound, &mut rng), sample_keys(bound, &mut rng));
        let want = oracle::backward_rows(bound, d_o, d_lse, &rows);
        let plain = plain::backward_rows(bound, d_o, d_lse, &rows);
        let q_starts = starts(bound, &problem.q_shape(), Side::Query, &rows);
        let d_q = Sides::sampled("d_q", rule, &got.d_q, &q_starts, want, plain);
        let split = |keys: Vec<oracle::KeyGradient>| -> (Vec<_>, Vec<_>) {
            keys.into_iter().map(|key| (key.d_k, key.d_v)).unzip()
        };
        let (want_k, want_v) = split(oracle::backward_keys(bound, d_o, d_lse, &keys));
        let (plain_k, plain_v) = split(plain::backward_keys(bound, d_o, d_lse, &keys));
        let (k_starts, v_starts) =
            (starts(bound, &problem.k_shape(), Side::Key, &keys), starts(bound, &problem.v_shape(), Side::Key, &keys));
        let d_k = Sides::sampled("d_k", rule, &got.d_k, &k_starts, want_k, plain_k);
        let mut all = vec![d_q, d_k, Sides::sampled("d_v", rule, &got.d_v, &v_starts, want_v, plain_v)];
        if in_codes(problem) {
            all[0].borders = walk::backward_rows::<Borders>(bound, d_o, d_lse, &rows).concat();
            for (d_k, d_v) in walk::backward_keys::<Borders>(bound, d_o, d_lse, &keys) {
                all[1].borders.extend(d_k);
                all[2].borders.extend(d_v);
            }
        }
        all
    } else {
        let (want, plain) = (oracle::backward(bound, d_o, d_lse), plain::backward(bound, d_o, d_lse));
        let mut all = vec![
            Sides::whole("d_q", rule, &got.d_q, want.d_q, plain.d_q),
            Sides::whole("d_k", rule, &got.d_k, want.d_k, plain.d_k),
            Sides::whole("d_v", rule, &got.d_v, want.d_v, plain.d_v),
        ];
        if let (Some(got), Some(want), Some(plain)) = (&got.d_sinks, want.d_sinks, plain.d_sinks) {
            all.push(Sides::whole("d_sinks", sums, got, want, plain));
        }
        let wanted = want.d_aux.into_iter().zip(plain.d_aux);
        for ((spec, got), (want, plain)) in problem.aux().iter().zip(&got.d_aux).zip(wanted) {
            if let (Some(got), Some(want), Some(plain)) = (got, want, plain) {
                all.push(Sides::whole(&format!("d_{}", spec.name), sums, got, want, plain));
            }
        }
        if in_codes(problem) {
            let found = walk::backward::<Borders>(bound, d_o, d_lse);
            let sinks = problem.has_sinks().then_some(found.d_sinks);
            let sums = sinks.into_iter().chain(found.d_aux.into_iter().flatten());
            let borders = [found.d_q, found.d_k, found.d_v].into_iter().chain(sums);
            all.iter_mut().zip(borders).for_each(|(side, borders)| side.borders = borders);
        }
        all
    };
    let mut verdicts: Vec<(String, Verdict)> = sides.iter().map(|s| s.judge(problem)).collect();
    // The computation of the noise costs as much as all the rest, so do it only if it decides.
    if verdicts[3..].iter().any(|(_, verdict)| !verdict.ok()) {
        let noise = plain::noise(bound, d_o, d_lse);
        for (i, (side, noise)) in sides[3..].iter().zip(noise).enumerate() {
            let sum = Rule::sums(problem).judge_sum(&side.got, &side.want, &side.plain, &noise);
            verdicts[3 + i].1 = sum;
        }
    }
    verdicts
}
