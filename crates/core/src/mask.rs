//! Masks: the keys that a query may see.
//!
//! A mask is a conjunction of *spans* (one interval of keys per query: causal, windows) and one condition for the rest.
//! Spans have a closed form, with which engines skip keys and mask edges without evaluating anything. [`Mask::expr`]
//! gives the whole mask as one expression, and a test proves the two equal.

use crate::expr::{Expr, batch, k, k_len, load, q, q_len};
use std::ops::Range;

/// Auxiliary tensor of [`Mask::prefix`]: i32, `[batch]`, the length of each bidirectional prefix.
pub const PREFIX_LENGTHS: &str = "prefix_lengths";
/// Auxiliary tensor of [`Mask::documents`]: i32, `[batch, q_len]`, the document of each query.
pub const DOCUMENTS_Q: &str = "documents_q";
/// Auxiliary tensor of [`Mask::documents`]: i32, `[batch, k_len]`, the document of each key.
pub const DOCUMENTS_K: &str = "documents_k";

/// Offsets beyond this count as unbounded: lengths stay below it, and sums fit an i32.
pub(crate) const FAR: i64 = 1 << 30;

/// The alignment of the diagonal of a rectangular score matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Align {
    /// The last query sees up to the last key.
    BottomRight,
    /// The first query sees up to the first key.
    TopLeft,
}

/// For query i with diagonal d(i): keys from d(i) - left to d(i) + right, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// Number of keys to the left of the diagonal; `None` is unbounded, a negative number starts right of it.
    pub left: Option<i64>,
    /// Number of keys to the right of the diagonal; `None` is unbounded, a negative number ends left of it.
    pub right: Option<i64>,
    /// Alignment of the diagonal.
    pub align: Align,
}

impl Span {
    fn diagonal(&self, q: usize, q_len: usize, k_len: usize) -> i64 {
        match self.align {
            Align::BottomRight => q as i64 + k_len as i64 - q_len as i64,
            Align::TopLeft => q as i64,
        }
    }

    /// The transposed span: the queries that see a key.
    pub fn transposed(&self) -> Span {
        Span { left: self.right, right: self.left, align: self.align }
    }

    /// The keys that this span lets query `q` see.
    pub fn keys(&self, q: usize, q_len: usize, k_len: usize) -> Range<usize> {
        let diagonal = self.diagonal(q, q_len, k_len);
        let clamp = |x: i64| x.clamp(0, k_len as i64) as usize;
        let start = self.left.map_or(0, |left| clamp(diagonal - left));
        let end = self.right.map_or(k_len, |right| clamp(diagonal + right + 1));
        start..end.max(start)
    }

    fn expr(&self) -> Option<Expr> {
        let diagonal = || match self.align {
            Align::BottomRight => q() + k_len() - q_len(),
            Align::TopLeft => q(),
        };
        let after_left = self.left.map(|left| k().at_least(diagonal() - left as i32));
        let before_right = self.right.map(|right| k().at_most(diagonal() + right as i32));
        match (after_left, before_right) {
            (Some(a), Some(b)) => Some(a & b),
            (a, b) => a.or(b),
        }
    }
}

/// A mask: true keeps the key.
///
/// ```
/// use fulgurite_core::Mask;
/// let mask = Mask::causal().and(Mask::window(Some(2), None));
/// assert_eq!(mask.keys(5, 8, 8), 3..6);
/// ```
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Mask {
    spans: Vec<Span>,
    rest: Option<Expr>,
}

impl Mask {
    /// Every key is visible.
    pub fn none() -> Mask {
        Mask::default()
    }

    /// Query i sees keys up to i + k_len - q_len, so the last query sees all.
    pub fn causal() -> Mask {
        Mask::window(None, Some(0))
    }

    /// Query i sees keys up to i, whatever the lengths (PyTorch's `is_causal`).
    pub fn causal_top_left() -> Mask {
        Mask { spans: vec![Span { left: None, right: Some(0), align: Align::TopLeft }], rest: None }
    }

    /// Keeps keys within `left` before and `right` after the bottom-right diagonal, inclusive; `None` is unbounded.
    pub fn window(left: impl Into<Option<i64>>, right: impl Into<Option<i64>>) -> Mask {
        let near = |x: Option<i64>| x.map(|x| x.clamp(-FAR, FAR));
        let span = Span { left: near(left.into()), right: near(right.into()), align: Align::BottomRight };
        let bounded = span.left.is_some() || span.right.is_some();
        Mask { spans: bounded.then_some(span).into_iter().collect(), rest: None }
    }

    /// Prefix-LM: the first `prefix_lengths[batch]` keys are visible to all, the others causally.
    pub fn prefix() -> Mask {
        Mask::custom(k().less(load(PREFIX_LENGTHS, [batch()]))).or(Mask::causal())
    }

    /// Queries see keys of their own document: `documents_q[batch, q] == documents_k[batch, k]`.
    pub fn documents() -> Mask {
        Mask::custom(load(DOCUMENTS_Q, [batch(), q()]).equals(load(DOCUMENTS_K, [batch(), k()])))
    }

    /// Any condition over indices, lengths and auxiliary tensors.
    pub fn custom(keep: Expr) -> Mask {
        Mask { spans: Vec::new(), rest: Some(keep) }
    }

    /// Keeps keys that both masks keep.
    pub fn and(mut self, other: Mask) -> Mask {
        self.spans.extend(other.spans);
        self.rest = match (self.rest, other.rest) {
            (Some(a), Some(b)) => Some(a & b),
            (a, b) => a.or(b),
        };
        self
    }

    /// Keeps keys that either mask keeps.
    pub fn or(self, other: Mask) -> Mask {
        match (self.expr(), other.expr()) {
            (Some(a), Some(b)) => Mask::custom(a | b),
            _ => Mask::none(),
        }
    }

    /// Whether every key is visible.
    pub fn is_none(&self) -> bool {
        self.spans.is_empty() && self.rest.is_none()
    }

    /// The part that is one interval of keys per query.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// The part that is not an interval; a key must pass both.
    pub fn rest(&self) -> Option<&Expr> {
        self.rest.as_ref()
    }

    /// The mask of the spans alone.
    pub fn spans_only(&self) -> Mask {
        Mask { spans: self.spans.clone(), rest: None }
    }

    /// This mask with its bounded left sides at least `keys` long. Sizes of a schedule are measured with it, where the mask's own
    /// window is too narrow.
    ///
    /// ```
    /// use fulgurite_core::Mask;
    ///
    /// assert_eq!(Mask::window(8, 0).reaching(100), Mask::window(100, 0));
    /// assert_eq!(Mask::window(200, 0).reaching(100), Mask::window(200, 0));
    /// assert_eq!(Mask::causal().reaching(100), Mask::causal());
    /// ```
    pub fn reaching(&self, keys: i64) -> Mask {
        let spans = self.spans.iter().map(|span| Span { left: span.left.map(|left| left.max(keys)), ..*span });
        Mask { spans: spans.collect(), rest: self.rest.clone() }
    }

    /// The keys that the spans let query `q` see; the whole row if there are no spans.
    pub fn keys(&self, q: usize, q_len: usize, k_len: usize) -> Range<usize> {
        let mut keys = 0..k_len;
        for span in &self.spans {
            let own = span.keys(q, q_len, k_len);
            keys = keys.start.max(own.start)..keys.end.min(own.end);
        }
        keys.start..keys.end.max(keys.start)
    }

    /// The whole mask as one expression; `None` when everything is visible.
    pub fn expr(&self) -> Option<Expr> {
        let spans = self.spans.iter().filter_map(Span::expr);
        spans.chain(self.rest.clone()).reduce(|a, b| a & b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::{Coverage, Domain, Env, Program, Type};
    use proptest::prelude::*;

    fn arbitrary_span_mask() -> impl Strategy<Value = Mask> {
        let side = || proptest::option::of(-12i64..12);
        prop_oneof![
            Just(Mask::causal()),
            Just(Mask::causal_top_left()),
            (side(), side()).prop_map(|(l, r)| Mask::window(l, r)),
            (side(), side()).prop_map(|(l, r)| Mask::window(l, r).and(Mask::causal_top_left())),
        ]
    }

    proptest! {
        /// The closed form, the expression and the block coverage agree.
        #[test]
        fn three_readings_agree(mask in arbitrary_span_mask(), q_len in 1usize..20, k_len in 1usize..20, rows in 1usize..6, cols in 1usize..6) {
            let program = mask.expr().map(|e| Program::compile(&e, &[], Type::Bool).unwrap());
            let sees = |q: usize, k: usize| program.as_ref().is_none_or(|p| {
                p.eval(&Env { score: 0.0, batch: 0, head: 0, q, k, q_len, k_len, aux: &[] }).bool()
            });
            for q in 0..q_len {
                let keys = mask.keys(q, q_len, k_len);
                for k in 0..k_len {
                    prop_assert_eq!(keys.contains(&k), sees(q, k), "q {} k {}", q, k);
                }
            }
            for q0 in (0..q_len).step_by(rows) {
                for k0 in (0..k_len).step_by(cols) {
                    let (q, k) = (q0..(q0 + rows).min(q_len), k0..(k0 + cols).min(k_len));
                    let seen = q.clone().flat_map(|i| k.clone().map(move |j| (i, j))).filter(|&(i, j)| sees(i, j)).count();
                    let Some(p) = &program else { continue };
                    let domain = Domain { batch: 0..1, heads: 0..1, q: q.clone(), k: k.clone(), q_len: (q_len, q_len), k_len: (k_len, k_len), aux: &[] };
                    let coverage = p.coverage(&domain);
                    // Full is exact. Empty is exact for one span; two spans may each touch a block they do not share.
                    prop_assert_eq!(coverage == Coverage::Full, seen == q.len() * k.len());
                    if coverage == Coverage::Empty { prop_assert_eq!(seen, 0); }
                    if mask.spans().len() == 1 && mask.spans()[0].left.is_none() { prop_assert_eq!(coverage == Coverage::Empty, seen == 0); }
                }
            }
        }
    }

    #[test]
    fn published_conventions() {
        assert_eq!(Mask::causal().keys(0, 2, 5), 0..4); // bottom-right
        assert_eq!(Mask::causal_top_left().keys(0, 2, 5), 0..1);
        assert_eq!(Mask::causal().keys(0, 5, 2), 0..0); // a row without keys
        assert_eq!(Mask::window(1, 1).keys(3, 6, 6), 2..5);
        assert_eq!(Mask::window(-1, 2).keys(3, 6, 6), 4..6);
        assert_eq!(Mask::window(i64::MAX, i64::MIN).keys(3, 6, 6), 0..0);
        assert!(Mask::window(None, None).is_none());
        assert!(Mask::causal().or(Mask::none()).is_none());
    }
}
