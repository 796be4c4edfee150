//! Weights in codes (quantised weights): their values, and which of them may round either way.
//!
//! A weight is a real number before it is rounded to a code, and f32 arithmetic has limited accuracy. If the weight is
//! near the border between two codes, correct engines may differ by a whole step. [`Borders`] finds these weights. It
//! assumes scores accurate to four f32 units in the sum of the magnitudes of their terms, and exponentials accurate to
//! a relative error of [`exp_error`]. A weight whose codes differ at the two ends of that interval may have either
//! code, and every element that it contributes to may be off by its step times the other factor. The tolerance rule
//! adds this allowance there, and nowhere else.

use crate::exp::{self, Exp};
use crate::format::GroupFormat;
use crate::precision::{CACHE_PART, GroupAttention, INT8_LARGEST, Int8Attention, Precision};
use crate::problem::Problem;
use crate::walk::{self, Arithmetic, Cotangent, Head};

/// e^x, or the function that the problem uses instead.
pub(crate) fn exponential(problem: &Problem, x: f64) -> f64 {
    match problem.exp() {
        Exp::Sas { threshold } => exp::sas(x, threshold),
        Exp::SasOnline => exp::sas(x, f32::NEG_INFINITY),
        Exp::Auto | Exp::Native | Exp::Poly { .. } => x.exp(),
    }
}

/// Maps the scores of a row, as distances from a maximum, to weights relative to the [`origin`] of its final one. INT8 processes
/// blocks of keys and uses the maximum so far in each; all other precisions use the final maximum. `weigh` gets all
/// scores that share a scale or a maximum. Parts of a cache do not know each other's maxima.
pub(crate) fn by_groups<T: Copy>(
    head: &Head<'_, T>,
    keys: &[usize],
    scores: &[f64],
    weigh: impl Fn(&[f64]) -> Vec<f64>,
) -> Vec<f64> {
    let (precision, mut part) = (head.problem().precision(), 0);
    let size = match precision {
        Precision::Int8(spec) => spec.block,
        Precision::Groups(GroupAttention { pv: Some(format), .. }) => format.group(),
        _ => usize::MAX,
    };
    let mut max = f64::NEG_INFINITY;
    let last = origin(head.problem(), highest(scores, max));
    let (mut out, mut first) = (Vec::with_capacity(keys.len()), 0);
    while first < keys.len() {
        let number = keys[first] / size;
        let end = first + keys[first..].iter().take_while(|&&k| k / size == number).count();
        if keys[first] / head.part != part {
            (part, max) = (keys[first] / head.part, f64::NEG_INFINITY);
        }
        max = if matches!(precision, Precision::Int8(_)) { highest(&scores[first..end], max) } else { last };
        let distances: Vec<f64> = scores[first..end].iter().map(|s| s - max).collect();
        let factor = if max == last { 1.0 } else { (max - last).exp() };
        out.extend(weigh(&distances).into_iter().map(|w| w * factor));
        first = end;
    }
    out
}

/// The number relative to which the weights of a row with this maximum are computed.
pub(crate) fn origin(problem: &Problem, max: f64) -> f64 {
    if problem.exp() == Exp::SasOnline { exp::sas_top(max) } else { max }
}

/// The maximum of scores; a NaN becomes the maximum and stays it.
pub(crate) fn highest(scores: &[f64], from: f64) -> f64 {
    scores.iter().fold(from, |m, &s| if s.is_nan() || s > m { s } else { m })
}

/// How a precision quantises the weights that share a scale.
#[derive(Clone, Copy)]
pub(crate) enum Codes {
    Int8,
    Group(GroupFormat),
}

impl Codes {
    pub(crate) fn of(problem: &Problem) -> Option<Codes> {
        match problem.precision() {
            Precision::Int8(_) => Some(Codes::Int8),
            Precision::Groups(GroupAttention { pv: Some(format), .. }) => Some(Codes::Group(format)),
            _ => None,
        }
    }

    fn meaning(self, p: &[f64]) -> Vec<f64> {
        match self {
            Codes::Int8 => {
                let one = |&p: &f64| f64::from(Int8Attention::weight(p as f32)) / f64::from(INT8_LARGEST);
                p.iter().map(one).collect()
            }
            Codes::Group(format) => {
                let mut group: Vec<f32> = p.iter().map(|&x| x as f32).collect();
                format.fake_group(&mut group);
                group.into_iter().map(f64::from).collect()
            }
        }
    }

    /// The distance between the lowest and the highest code that each weight may have, for weights between `low` and
    /// `high`.
    pub(crate) fn widths(self, low: &[f64], high: &[f64]) -> Vec<f64> {
        // The largest weight of a group decides its scale, and is no more accurate than the others.
        let top = (0..high.len()).max_by(|&a, &b| high[a].total_cmp(&high[b])).unwrap_or(0);
        let with = |p: &[f64], other: &[f64]| {
            let mut p = p.to_vec();
            p[top] = other[top];
            self.meaning(&p)
        };
        let all = [with(low, low), with(high, high), with(low, high), with(high, low)];
        let ends =
            |j: usize| all.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), p| (a.min(p[j]), b.max(p[j])));
        (0..low.len()).map(ends).map(|(low, high)| high - low).collect()
    }
}

/// The weights of a row as the product with V takes them, relative to its final maximum; `None` if they are not
/// quantised.
pub(crate) fn weights<T: Copy>(head: &Head<'_, T>, keys: &[usize], scores: &[f64]) -> Option<Vec<f64>> {
    let problem = head.problem();
    let codes = Codes::of(problem)?;
    let weigh = |x: &[f64]| codes.meaning(&x.iter().map(|&x| exponential(problem, x)).collect::<Vec<f64>>());
    Some(by_groups(head, keys, scores, weigh))
}

/// The scores of a row that softmax sees.
pub(crate) fn scores(head: &Head<'_, f64>, q: usize, row: &walk::RowForward) -> Vec<f64> {
    row.keys.iter().zip(&row.scaled).map(|(&k, &s)| head.modified(s, q, k)).collect()
}

/// Another arithmetic over keys and values that are stored exactly in a packed cache: only queries and weights are
/// quantised.
pub(crate) struct Held<A>(std::marker::PhantomData<A>);

impl<A: Arithmetic> Arithmetic for Held<A> {
    type Number = A::Number;
    const PART: usize = CACHE_PART;

    fn key(problem: &Problem, x: f64) -> A::Number {
        A::key(problem, x)
    }

    fn value(x: f64) -> A::Number {
        A::value(x)
    }

    fn row_forward(head: &Head<'_, A::Number>, q: usize) -> walk::RowForward {
        A::row_forward(head, q)
    }

    fn row_gradient(
        head: &Head<'_, A::Number>,
        q: usize,
        row: &walk::RowForward,
        given: &Cotangent,
    ) -> walk::RowGradient {
        A::row_gradient(head, q, row, given)
    }

    fn add(sum: f64, x: f64, y: f64) -> f64 {
        A::add(sum, x, y)
    }

    fn store(problem: &Problem, x: f64) -> f64 {
        A::store(problem, x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_one_step_on_a_border_and_nothing_beside_it() {
        // 63.5 / 127 is the border of 63 and 64; 64 / 127 is none.
        let p = [63.5 / 127.0, 64.0 / 127.0];
        let [low, high] = [-1.0, 1.0].map(|s: f64| p.map(|p| p * (1.0 + s * 1e-6)));
        let found = Codes::Int8.widths(&low, &high);
        assert!((found[0] * 127.0 - 1.0).abs() < 1e-12 && found[1] == 0.0, "{found:?}");
        // A largest of 1 has the scale E4M3(1/6) = 0.171875: 0.75 of it lies between the codes of 0.5 and 1.
        let codes = Codes::Group(GroupFormat::NVFP4);
        let p = [1.0, 0.75 * 0.171_875, 0.5 * 0.171_875];
        let [low, high] = [-1.0, 1.0].map(|s: f64| p.map(|p| p * (1.0 + s * 1e-6)));
        assert_eq!(codes.widths(&low, &high), [0.0, 0.5 * 0.171_875, 0.0]);
        // A scale on the border of two: the whole group may move.
        let border = 6.0 * 0.179_687_5;
        let [low, high] = [-1.0, 1.0].map(|s: f64| [border * (1.0 + s * 1e-6), 0.3]);
        let found = codes.widths(&low, &high);
        assert!(found.iter().all(|&w| w > 0.0), "{found:?}");
    }
}
