//! The online softmax of a warpgroup's rows: two rows a thread, shared by four lanes.
//!
//! m = running maximum of the scores, p = 2^(scale (s - m)), l = running sum of p. The running maximum is kept by the
//! rescale policy; all three give the same result up to rounding.

use crate::exp::exp2;
use fulgurite_core::{Exp, Rescale};
use fulgurite_ptx::{Acc, Fragment, Group, Half, Pair, Pointer, Scope, Val, Var, Word};

/// Below every score, and finite: a row that has seen no key subtracts it, not -inf from -inf.
const FLOOR: f32 = -1e30;

/// The scores of a block on their way into the softmax.
pub trait Scores<'k> {
    /// The power of two of the `i`-th element, from what the product gave and from what its row is shifted by.
    fn exponent(&mut self, i: usize, raw: Val<'k, f32>, shift: Val<'k, f32>) -> Val<'k, f32>;

    /// Whether the powers asked for so far may be wrong, and the block must be done again.
    fn doubt(&self) -> Option<Val<'k, bool>> {
        None
    }

    /// Makes the accumulators hold the scores themselves, masked and modified.
    fn settle(&self, _: &Scope<'k, Group>) {}
}

/// Accumulators that hold the scores themselves, and what they are multiplied by.
pub struct Settled<'k>(pub Val<'k, f32>);

impl<'k> Scores<'k> for Settled<'k> {
    fn exponent(&mut self, _: usize, raw: Val<'k, f32>, shift: Val<'k, f32>) -> Val<'k, f32> {
        raw.mul_add(self.0, shift)
    }
}

/// The running summary of a thread's two rows.
pub struct Softmax<'k> {
    pub scale: Val<'k, f32>,
    pub rescale: Rescale,
    pub exp: Exp,
    /// The second counts blocks that were done again.
    pub counters: Pointer<'k, u32>,
    max: [Var<'k, f32>; 2],
    /// -m scale, added to the scaled scores.
    shift: [Var<'k, f32>; 2],
    /// Two partial sums a row: two chains of additions instead of one.
    sums: [[Var<'k, f32>; 2]; 2],
}

/// What a tile needs to know of its rows at the end.
pub struct Totals<'k> {
    pub max: [Val<'k, f32>; 2],
    pub sum: [Val<'k, f32>; 2],
}

impl<'k> Softmax<'k> {
    pub fn new(
        w: &Scope<'k, Group>,
        scale: Val<'k, f32>,
        rescale: Rescale,
        exp: Exp,
        counters: Pointer<'k, u32>,
    ) -> Self {
        let pair = || [w.var(0.0f32), w.var(0.0f32)];
        Softmax { scale, rescale, exp, counters, max: pair(), shift: pair(), sums: [pair(), pair()] }
    }

    /// The largest score of each row, over the four lanes that share it.
    fn row_max(&self, w: &Scope<'k, Group>, s: &Acc<'k>) -> [Val<'k, f32>; 2] {
        [0, 1].map(|row| {
            let own: Vec<Val<'k, f32>> =
                s.elements().enumerate().filter(|(i, _)| Acc::row_of(*i) == row).map(|(_, x)| x).collect();
            // Two chains.
            let chain = |odd: usize| own.iter().skip(odd).step_by(2).copied().reduce(|a, b| a.max(b));
            let (a, b) = (chain(0), chain(1));
            let most = a.zip(b).map(|(a, b)| a.max(b)).expect("bug in fulgurite: a tile without columns");
            w.reduce(most, 4, |a, b| a.max(b))
        })
    }

    fn set_max(&self, new: [Val<'k, f32>; 2]) {
        for (i, new) in new.into_iter().enumerate() {
            self.max[i].set(new);
            self.shift[i].set(-(new * self.scale));
        }
    }

    fn settled(&self) -> Settled<'k> {
        Settled(self.scale)
    }

    /// p of every score, packed into `p`; the partial sums of each row.
    fn numerators<T: Half>(
        &self,
        s: &Acc<'k>,
        p: &Fragment<'k, T>,
        scores: &mut dyn Scores<'k>,
    ) -> [[Val<'k, f32>; 2]; 2]
    where
        Pair<T>: Word,
    {
        let shift = self.shift.map(|shift| shift.get());
        let mut sums: [[Option<Val<'k, f32>>; 2]; 2] = [[None; 2]; 2];
        let mut low = None;
        for (i, x) in s.elements().enumerate() {
            let row = Acc::row_of(i);
            let e = exp2(self.exp, Acc::col_of(i), scores.exponent(i, x, shift[row]));
            let sum = &mut sums[row][i % 2];
            *sum = Some(sum.map_or(e, |sum| sum + e));
            match low.take() {
                None => low = Some(e),
                Some(low) => p.set_pair(i / 2, low, e),
            }
        }
        sums.map(|row| row.map(|sum| sum.expect("bug in fulgurite: a tile without columns")))
    }

    /// The first block of a tile: its own maximum, fresh sums. What was summed, for a wait that must come after.
    pub fn first<T: Half>(&self, w: &Scope<'k, Group>, s: &Acc<'k>, p: &Fragment<'k, T>) -> Vec<Val<'k, f32>>
    where
        Pair<T>: Word,
    {
        self.set_max(self.row_max(w, s).map(|m| m.max(FLOOR)));
        let sums = self.numerators(s, p, &mut self.settled());
        self.sums.iter().flatten().zip(sums.iter().flatten()).for_each(|(var, &sum)| var.set(sum));
        sums.into_iter().flatten().collect()
    }

    /// A later block: the sums grow. Products into `o` may still run; they are waited for before this returns, and `o`
    /// has the new scale.
    pub fn next<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        s: &Acc<'k>,
        p: &Fragment<'k, T>,
        o: &Acc<'k>,
        scores: &mut dyn Scores<'k>,
    ) where
        Pair<T>: Word,
    {
        let tau = match self.rescale {
            Rescale::Optimistic(limit) => return self.trust(w, s, p, o, limit, scores),
            Rescale::Lazy(tau) => Some(tau),
            Rescale::Always => None,
        };
        scores.settle(w);
        self.raise(w, s, p, o, tau);
    }

    /// Uses the old maximum unseen; where a sum shows that it was too low, does the block again with the true one.
    fn trust<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        s: &Acc<'k>,
        p: &Fragment<'k, T>,
        o: &Acc<'k>,
        limit: f32,
        scores: &mut dyn Scores<'k>,
    ) where
        Pair<T>: Word,
    {
        let parts = self.numerators(s, p, scores).map(|row| row.map(|sum| w.var(sum)));
        let most = parts.as_flattened().iter().map(|part| part.get()).reduce(|a, b| a.max(b));
        let most = most.expect("bug in fulgurite: a tile without columns");
        let again = scores.doubt().map_or(most.gt(limit), |doubt| most.gt(limit) | doubt);
        // The branch needs every exponential, so the wait below stays behind them.
        w.when_rarely(w.any(again), |w| {
            w.when(w.lane().eq(0), |w| {
                self.counters.fetch_add(w, 1, 1);
            });
            scores.settle(w);
            let alpha = self.raise_to(self.row_max(w, s));
            let again = self.numerators(s, p, &mut self.settled());
            parts.as_flattened().iter().zip(again.as_flattened()).for_each(|(part, &sum)| part.set(sum));
            w.wait_products(0);
            scale_rows(o, alpha);
        });
        self.sums
            .as_flattened()
            .iter()
            .zip(parts.as_flattened())
            .for_each(|(sum, part)| sum.set(sum.get() + part.get()));
        w.wait_products(0);
    }

    /// Raises the maximum where the block's is larger (by more than `tau` powers of two), and rescales.
    fn raise<T: Half>(&self, w: &Scope<'k, Group>, s: &Acc<'k>, p: &Fragment<'k, T>, o: &Acc<'k>, tau: Option<f32>)
    where
        Pair<T>: Word,
    {
        let new = self.row_max(w, s);
        let grown = [0, 1].map(|i| (new[i] - self.max[i].get()) * self.scale);
        let moved = tau.map(|tau| w.any(grown[0].gt(tau) | grown[1].gt(tau)));
        let raised = match moved {
            Some(moved) => [0, 1].map(|i| moved.select::<f32>(new[i], FLOOR)),
            None => new,
        };
        let alpha = self.raise_to(raised);
        let parts = self.numerators(s, p, &mut self.settled());
        self.sums.as_flattened().iter().zip(parts.as_flattened()).for_each(|(sum, &part)| sum.set(sum.get() + part));
        w.wait_products_after(0, parts.as_flattened());
        match moved {
            Some(moved) => w.when(moved, |_| scale_rows(o, alpha)),
            None => scale_rows(o, alpha),
        }
    }

    /// Takes the larger of the old and these maxima, rescales the sums, and says by how much.
    fn raise_to(&self, new: [Val<'k, f32>; 2]) -> [Val<'k, f32>; 2] {
        let old = self.max.map(|max| max.get());
        let new = [0, 1].map(|i| new[i].max(old[i]));
        let alpha = [0, 1].map(|i| ((old[i] - new[i]) * self.scale).exp2());
        for (row, alpha) in self.sums.iter().zip(alpha) {
            row.iter().for_each(|sum| sum.set(sum.get() * alpha));
        }
        self.set_max(new);
        alpha
    }

    /// Maximum and sum of each row.
    pub fn totals(&self, w: &Scope<'k, Group>) -> Totals<'k> {
        let sum = self.sums.map(|[a, b]| w.reduce(a.get() + b.get(), 4, |a, b| a + b));
        Totals { max: self.max.map(|max| max.get()), sum }
    }
}

/// Multiplies each row by its factor.
fn scale_rows<'k>(o: &Acc<'k>, factor: [Val<'k, f32>; 2]) {
    for (i, x) in o.elements().enumerate() {
        o.set(i, x * factor[Acc::row_of(i)]);
    }
}
