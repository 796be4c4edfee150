//! Merges partial results of attention over disjoint sets of keys: shared by split keys, probes, cascades, rings and
//! trees.
//!
//! A part states its weight as a logarithm: the LSE of its keys if its rows are normalised, or the maximum that was
//! subtracted if they are not. The base of the logarithm is part of its type, so that a part in powers of two cannot be
//! merged with one in powers of e by mistake.

use std::marker::PhantomData;

/// The base of a logarithm.
pub trait Base: Copy {
    /// The natural logarithm of the base.
    const LN: f64;
    /// The base to the power of `x`.
    fn exp(x: f32) -> f32;
}

/// Powers of e: the LSE of every public function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Natural;
/// Powers of two, used inside kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binary;

impl Base for Natural {
    const LN: f64 = 1.0;
    fn exp(x: f32) -> f32 {
        x.exp()
    }
}

impl Base for Binary {
    const LN: f64 = std::f64::consts::LN_2;
    fn exp(x: f32) -> f32 {
        x.exp2()
    }
}

/// A logarithm with its base. -inf means a part without keys.
///
/// ```
/// use fulgurite_core::merge::{Binary, Log, Natural};
/// let two = Log::<Binary>::new(1.0);
/// assert!((two.to::<Natural>().get() - 2f32.ln()).abs() < 1e-7);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Log<B>(f32, PhantomData<B>);

impl<B: Base> Log<B> {
    /// A logarithm in this base.
    pub fn new(x: f32) -> Self {
        Log(x, PhantomData)
    }
    /// The number.
    pub fn get(self) -> f32 {
        self.0
    }
    /// This logarithm in another base.
    pub fn to<C: Base>(self) -> Log<C> {
        Log::new((f64::from(self.0) * B::LN / C::LN) as f32)
    }
}

/// The weights of the parts.
#[derive(Debug, Clone)]
pub struct Weights<B> {
    top: Log<B>,
    /// Weight of each part; `None` for a part without keys.
    weights: Vec<Option<f32>>,
}

impl<B: Base> Weights<B> {
    /// Weights relative to the heaviest part, whose weight is exactly 1. A part without keys is ignored, whatever its
    /// rows hold.
    pub fn new(logs: impl Iterator<Item = Log<B>> + Clone) -> Self {
        let top = logs.clone().map(Log::get).fold(f32::NEG_INFINITY, f32::max);
        let weight = |log: Log<B>| (log.get() != f32::NEG_INFINITY).then(|| B::exp(log.get() - top));
        Weights { top: Log::new(top), weights: logs.map(weight).collect() }
    }

    /// The logarithm to which the merged sums are relative; -inf if no part has keys.
    pub fn top(&self) -> Log<B> {
        self.top
    }

    /// The weighted sum of one number per part, in order.
    pub fn sum(&self, values: impl Iterator<Item = f32>) -> f32 {
        self.used(values).fold(0.0, |sum, (weight, x)| sum + weight * x)
    }

    /// Writes the weighted sum of one row per part, in order, to `out`.
    pub fn sum_rows<'a>(&self, rows: impl Iterator<Item = &'a [f32]>, out: &mut [f32]) {
        out.fill(0.0);
        for (weight, row) in self.used(rows) {
            out.iter_mut().zip(row).for_each(|(o, &x)| *o += weight * x);
        }
    }

    fn used<T>(&self, values: impl Iterator<Item = T>) -> impl Iterator<Item = (f32, T)> {
        self.weights.iter().zip(values).filter_map(|(weight, x)| weight.map(|weight| (weight, x)))
    }
}

/// Merges normalised rows by their LSE, and returns the LSE of all keys together.
///
/// ```
/// use fulgurite_core::merge::{Log, Natural, merge};
/// // Two parts that weigh the same: the mean, and twice the sum.
/// let parts = [(Log::<Natural>::new(0.0), &[1.0f32][..]), (Log::new(0.0), &[3.0])];
/// let mut o = [0.0];
/// let lse = merge(&parts, &mut o);
/// assert_eq!((o[0], lse.get()), (2.0, 2f32.ln()));
/// ```
pub fn merge<B: Base>(parts: &[(Log<B>, &[f32])], out: &mut [f32]) -> Log<B> {
    let weights = Weights::new(parts.iter().map(|part| part.0));
    weights.sum_rows(parts.iter().map(|part| part.1), out);
    let total = weights.sum(parts.iter().map(|_| 1.0));
    if total == 0.0 {
        return weights.top();
    }
    out.iter_mut().for_each(|o| *o /= total);
    Log::new(weights.top().get() + (f64::from(total).ln() / B::LN) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Rng;

    /// Softmax over all keys equals the merge of softmax over any parts, in either base, in any grouping.
    #[test]
    fn parts_merge_to_the_whole() {
        let mut rng = Rng::new(3);
        for _ in 0..50 {
            let n = rng.range(1..30);
            let (scores, values) = (rng.normals(n, 4.0), rng.normals(n, 1.0));
            let part = |range: std::ops::Range<usize>| -> (f64, f64) {
                let sum: f64 = range.clone().map(|i| scores[i].exp()).sum();
                (sum.ln(), range.map(|i| scores[i].exp() * values[i]).sum::<f64>() / sum)
            };
            let (lse, want) = part(0..n);
            let mut cuts = [0, n, rng.range(0..n + 1), rng.range(0..n + 1)];
            cuts.sort_unstable();
            let rows: Vec<(f64, [f32; 1])> = cuts
                .windows(2)
                .map(|c| {
                    if c[0] == c[1] {
                        (f64::NEG_INFINITY, [f32::NAN])
                    } else {
                        (part(c[0]..c[1]).0, [part(c[0]..c[1]).1 as f32])
                    }
                })
                .collect();
            let natural: Vec<(Log<Natural>, &[f32])> =
                rows.iter().map(|(l, o)| (Log::new(*l as f32), &o[..])).collect();
            let binary: Vec<(Log<Binary>, &[f32])> = natural.iter().map(|(l, o)| (l.to::<Binary>(), *o)).collect();
            let (mut a, mut b, mut c) = ([0.0], [0.0], [0.0]);
            let found = merge(&natural, &mut a);
            assert!((f64::from(a[0]) - want).abs() < 1e-5 && (f64::from(found.get()) - lse).abs() < 1e-5);
            let found = merge(&binary, &mut b).to::<Natural>();
            assert!((f64::from(b[0]) - want).abs() < 1e-5 && (f64::from(found.get()) - lse).abs() < 1e-5);
            // A tree: the first two, then the third.
            let first = merge(&natural[..2], &mut c);
            let inner = c;
            let tree = merge(&[(first, &inner[..]), natural[2]], &mut c);
            assert!((f64::from(c[0]) - want).abs() < 1e-5 && (f64::from(tree.get()) - lse).abs() < 1e-5);
        }
        let mut none = [5.0];
        assert_eq!(
            merge(&[(Log::<Natural>::new(f32::NEG_INFINITY), &[f32::NAN][..])], &mut none).get(),
            f32::NEG_INFINITY
        );
        assert_eq!(none, [0.0]);
    }
}
