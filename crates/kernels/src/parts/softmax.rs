//! The online softmax of a warpgroup's rows: two rows a thread, shared by four lanes.
//!
//! m = running maximum of the scores, p = 2^(scale (s - m)), l = running sum of p. The running maximum is kept by the
//! rescale policy; all three give the same result up to rounding.

use crate::parts::exp::exp2;
use crate::parts::row_sums::Added;
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
    added: Added,
    /// Partial sums of both rows, where threads add: two chains of additions instead of one.
    sums: Vec<[Var<'k, f32>; 2]>,
}

/// What the numerators of a block leave beside p.
struct Made<'k> {
    /// Partial sums of both rows, where threads add.
    sums: Vec<[Val<'k, f32>; 2]>,
    /// All bits of p, where they do not.
    bits: Option<Val<'k, u32>>,
}

/// What a tile needs to know of its rows at the end.
pub struct Totals<'k> {
    pub max: [Val<'k, f32>; 2],
    pub sum: [Val<'k, f32>; 2],
}

impl<'k> Totals<'k> {
    /// The same with maxima in powers of two.
    pub fn scaled(self, scale: Val<'k, f32>) -> Totals<'k> {
        Totals { max: self.max.map(|max| max * scale), ..self }
    }
}

impl<'k> Softmax<'k> {
    pub fn new(
        w: &Scope<'k, Group>,
        scale: Val<'k, f32>,
        rescale: Rescale,
        exp: Exp,
        added: Added,
        counters: Pointer<'k, u32>,
    ) -> Self {
        let pair = || [w.var(0.0f32), w.var(0.0f32)];
        let sums = (0..added.chains()).map(|_| pair()).collect();
        Softmax { scale, rescale, exp, counters, max: pair(), shift: pair(), added, sums }
    }

    /// How many powers of two p is smaller than what it stands for: where nobody adds up what is in registers, a p of 2 or
    /// more, which a bit of it shows, says that the maximum is too low.
    fn margin(&self) -> Option<f32> {
        match (self.added, self.rescale) {
            (Added::ByColumn, Rescale::Optimistic(limit)) => Some(limit.log2() - 1.0),
            _ => None,
        }
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
            let shift = -(new * self.scale);
            self.shift[i].set(self.margin().map_or(shift, |margin| shift - margin));
        }
    }

    fn settled(&self) -> Settled<'k> {
        Settled(self.scale)
    }

    /// p of every score, packed into `p`.
    fn numerators<T: Half>(&self, s: &Acc<'k>, p: &Fragment<'k, T>, scores: &mut dyn Scores<'k>) -> Made<'k>
    where
        Pair<T>: Word,
    {
        let shift = self.shift.map(|shift| shift.get());
        let mut sums = vec![[None; 2]; self.added.chains()];
        let mut bits: Option<Val<'k, u32>> = None;
        let mut low = None;
        for (i, x) in s.elements().enumerate() {
            let row = Acc::row_of(i);
            let e = exp2(self.exp, Acc::col_of(i), scores.exponent(i, x, shift[row]));
            if let Some(rows) = sums.get_mut(i % 2) {
                let sum: &mut Option<Val<'k, f32>> = &mut rows[row];
                *sum = Some(sum.map_or(e, |sum| sum + e));
            }
            match low.take() {
                None => low = Some(e),
                Some(low) => {
                    p.set_pair(i / 2, low, e);
                    if self.added == Added::ByColumn {
                        let pair = p.pair(i / 2);
                        bits = Some(bits.map_or(pair, |bits| bits | pair));
                    }
                }
            }
        }
        let sums = sums.into_iter().map(|rows| rows.map(|sum| sum.expect("bug in fulgurite: a tile without columns")));
        Made { sums: sums.collect(), bits }
    }

    /// Whether p is no function of the difference to any maximum but the row's last: all scores are seen before the first p.
    pub fn scans(&self) -> bool {
        matches!(self.exp, Exp::Sas { .. })
    }

    /// Before the first block of a tile.
    pub fn forget(&self) {
        self.max.iter().for_each(|max| max.set(FLOOR));
    }

    /// Raises the maxima to those of a block.
    pub fn see(&self, w: &Scope<'k, Group>, s: &Acc<'k>) {
        let new = self.row_max(w, s);
        self.set_max([0, 1].map(|i| new[i].max(self.max[i].get())));
    }

    /// The first block of a tile: its own maximum, unless all were seen, and fresh sums.
    pub fn first<T: Half>(&self, w: &Scope<'k, Group>, s: &Acc<'k>, p: &Fragment<'k, T>)
    where
        Pair<T>: Word,
    {
        if !self.scans() {
            self.forget();
            self.see(w, s);
        }
        let made = self.numerators(s, p, &mut self.settled());
        self.sums.as_flattened().iter().zip(made.sums.as_flattened()).for_each(|(var, &sum)| var.set(sum));
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
        /// Of either half, set if it is 2 or more, or no number.
        const TWO: u32 = 0x4000_4000;
        let made = self.numerators(s, p, scores);
        let parts: Vec<_> = made.sums.into_iter().map(|rows| rows.map(|sum| w.var(sum))).collect();
        let most = parts.as_flattened().iter().map(|part| part.get()).reduce(|a, b| a.max(b));
        let low = match (most, made.bits) {
            (Some(most), _) => most.gt(limit),
            (None, Some(bits)) => (bits & TWO).ne(0),
            (None, None) => unreachable!("bug in fulgurite: a tile without columns"),
        };
        let again = scores.doubt().map_or(low, |doubt| low | doubt);
        // The branch needs every exponential, so the wait below stays behind them.
        w.when_rarely(w.any(again), |w| {
            w.when(w.lane().eq(0), |w| {
                self.counters.fetch_add(w, 1, 1);
            });
            scores.settle(w);
            let alpha = self.raise_to(self.row_max(w, s));
            let again = self.numerators(s, p, &mut self.settled()).sums;
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
        let made = self.numerators(s, p, &mut self.settled());
        let sums = self.sums.as_flattened().iter().zip(made.sums.as_flattened());
        sums.for_each(|(sum, &part)| sum.set(sum.get() + part));
        let bits = made.bits.map(|bits| bits.to_f32_bits());
        w.wait_products_after(0, &made.sums.as_flattened().iter().copied().chain(bits).collect::<Vec<_>>());
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
        for rows in &self.sums {
            rows.iter().zip(alpha).for_each(|(sum, alpha)| sum.set(sum.get() * alpha));
        }
        self.set_max(new);
        alpha
    }

    /// Maximum and sum of each row. Sums in a column of `o` are the accumulators themselves: products into it must be done
    /// when they are read.
    pub fn totals(&self, w: &Scope<'k, Group>, o: &Acc<'k>) -> Totals<'k> {
        let margin = self.margin().map(|margin| self.scale.recip() * margin);
        let max = self.max.map(|max| margin.map_or(max.get(), |margin| max.get() + margin));
        let sum = [0, 1].map(|row| match self.added {
            Added::ByThreads => {
                let own = self.sums.iter().map(|rows| rows[row].get()).reduce(|a, b| a + b);
                w.reduce(own.expect("bug in fulgurite: a row has sums"), 4, |a, b| a + b)
            }
            Added::ByColumn => {
                let last = (0..).zip(o.elements()).filter(|(i, _)| Acc::row_of(*i) == row).last();
                last.expect("bug in fulgurite: a tile without columns").1
            }
        });
        Totals { max, sum }
    }
}

/// Multiplies each row by its factor.
fn scale_rows<'k>(o: &Acc<'k>, factor: [Val<'k, f32>; 2]) {
    for (i, x) in o.elements().enumerate() {
        o.set(i, x * factor[Acc::row_of(i)]);
    }
}
