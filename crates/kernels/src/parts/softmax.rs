//! The online softmax of a warpgroup's rows, for accumulators of any tensor unit ([`RowView`]).
//!
//! m = running maximum of the scores, p = 2^(scale (s - m)), l = running sum of p. The rescale policy decides when m is
//! updated; all three policies give the same result up to rounding.

use crate::parts::exp::{Element, exp2};
use crate::parts::row_sums::Added;
use fulgurite_core::{Exp, Rescale};
use fulgurite_ptx::{Acc, F32x2, Fragment, Group, Half, Pair, Pointer, RowView, Scope, Val, Var, Word};
use std::marker::PhantomData;
use std::ops::Range;

/// A finite bound below every score. A row that has seen no key subtracts it, which avoids -inf minus -inf.
pub(crate) const FLOOR: f32 = -1e30;

/// The scores of a block on their way into the softmax.
pub trait Scores<'k> {
    /// The exponent (a power of two) of an element, from its raw product and the shift of its row. `row` is one of the
    /// thread's rows, `col` the column relative to the thread's first.
    fn exponent(&mut self, row: usize, col: u32, raw: Val<'k, f32>, shift: Val<'k, f32>) -> Val<'k, f32>;

    /// The exponents of neighbouring elements of a row, of which the first has column `col`.
    fn exponents(&mut self, row: usize, col: u32, raw: &[Val<'k, f32>], shift: Val<'k, f32>) -> Vec<Val<'k, f32>> {
        raw.iter().zip(col..).map(|(&raw, col)| self.exponent(row, col, raw, shift)).collect()
    }

    /// Whether the exponents requested so far may be wrong, so that the block must be recomputed.
    fn doubt(&self) -> Option<Val<'k, bool>> {
        None
    }

    /// Stores the exact scores, masked and modified, in the accumulators.
    fn settle(&self, _: &Scope<'k, Group>) {}
}

/// Rows that a softmax rescales when it raises a maximum: those of the sums of p v.
pub trait Rescaled<'k> {
    /// Multiplies each of the thread's rows by its factor.
    fn rescale_rows(&self, w: &Scope<'k, Group>, factor: &[Val<'k, f32>]);
}

impl<'k, A: RowView<'k>> Rescaled<'k> for A {
    fn rescale_rows(&self, w: &Scope<'k, Group>, factor: &[Val<'k, f32>]) {
        let elements: Vec<Val<'k, f32>> = self.elements().collect();
        for unit in units(width::<A>(w), 0..elements.len()) {
            let factor = factor[A::row_of(unit.start)];
            let scaled = match elements[unit.clone()] {
                [x, y] => (x.beside(y) * factor.beside(factor)).numbers().to_vec(),
                ref one => one.iter().map(|&x| x * factor).collect(),
            };
            unit.zip(scaled).for_each(|(i, x)| self.set(i, x));
        }
    }
}

/// Number of neighbouring elements on which one instruction operates.
fn width<'k, A: RowView<'k>>(w: &Scope<'k, Group>) -> usize {
    A::TOGETHER.min(w.float_width())
}

/// Ranges of `width` elements.
fn units(width: usize, elements: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = elements.end;
    elements.step_by(width).map(move |start| start..end.min(start + width))
}

/// Raw products times a factor, plus a shift.
pub fn scaled<'k>(raw: &[Val<'k, f32>], scale: Val<'k, f32>, shift: Val<'k, f32>) -> Vec<Val<'k, f32>> {
    match *raw {
        [x, y] => x.beside(y).mul_add(scale.beside(scale), shift.beside(shift)).numbers().to_vec(),
        _ => raw.iter().map(|raw| raw.mul_add(scale, shift)).collect(),
    }
}

/// The numerators p of a block: the registers that get them, and what happens when columns of them are complete.
pub struct Numerators<'a, 'k, T>
where
    T: Half,
    Pair<T>: Word,
{
    pub fragment: &'a Fragment<'k, T>,
    /// Columns at which a new part begins, ascending. The kernel uses a part while the thread computes the next.
    pub cuts: &'a [u32],
    /// Called after each part with its number: its numerators are complete, and the rows that it will be added to have
    /// been rescaled.
    pub publish: &'a dyn Fn(&Scope<'k, Group>, u32),
}

impl<'a, 'k, T: Half> Numerators<'a, 'k, T>
where
    Pair<T>: Word,
{
    /// Numerators that the kernel uses together, after the softmax has returned.
    pub fn whole(fragment: &'a Fragment<'k, T>) -> Self {
        Numerators { fragment, cuts: &[], publish: &|_, _| {} }
    }

    /// The elements of each part, in register order, if a thread holds `count` elements of `cols` columns.
    fn parts(&self, count: usize, cols: u32) -> Vec<Range<usize>> {
        let ends = self.cuts.iter().map(|&col| count * col as usize / cols as usize).chain([count]);
        let starts = std::iter::once(0).chain(ends.clone());
        starts.zip(ends).map(|(start, end)| start..end).collect()
    }
}

/// Elements that hold the exponents themselves.
struct Exponents;

impl<'k> Scores<'k> for Exponents {
    fn exponent(&mut self, _: usize, _: u32, raw: Val<'k, f32>, _: Val<'k, f32>) -> Val<'k, f32> {
        raw
    }
}

/// Accumulators that hold the exact scores, and the factor that scales them.
pub struct Settled<'k>(pub Val<'k, f32>);

impl<'k> Scores<'k> for Settled<'k> {
    fn exponent(&mut self, _: usize, _: u32, raw: Val<'k, f32>, shift: Val<'k, f32>) -> Val<'k, f32> {
        raw.mul_add(self.0, shift)
    }

    fn exponents(&mut self, _: usize, _: u32, raw: &[Val<'k, f32>], shift: Val<'k, f32>) -> Vec<Val<'k, f32>> {
        scaled(raw, self.0, shift)
    }
}

/// The running summary of a thread's rows.
pub struct Softmax<'k, A = Acc<'k>> {
    pub scale: Val<'k, f32>,
    pub rescale: Rescale,
    pub exp: Exp,
    /// The second counter counts blocks that were recomputed.
    pub counters: Pointer<'k, u32>,
    /// m of each row.
    max: Vec<Var<'k, f32>>,
    /// -m scale of each row, added to the scaled scores.
    shift: Vec<Var<'k, f32>>,
    added: Added,
    /// Number of elements on which one instruction operates.
    width: usize,
    /// Partial sums of each row, if threads sum: two independent chains of additions instead of one.
    sums: Vec<Vec<Var<'k, f32>>>,
    view: PhantomData<A>,
}

/// Results of a block's numerators besides p.
struct Made<'k> {
    /// Partial sums of each row, if threads sum.
    sums: Vec<Vec<Val<'k, f32>>>,
    /// The bitwise or of all p, if the tensor cores sum.
    bits: Option<Val<'k, u32>>,
}

/// Sums of numerators while a thread computes them: two chains of additions for each row, which one register holds where
/// the target adds two floats at once. Both ways add in the same order.
struct PartialSums<'k> {
    /// By chain and row; empty if the tensor cores sum.
    chains: Vec<Vec<Option<Val<'k, f32>>>>,
    /// Both chains of each row.
    both: Vec<Option<Val<'k, F32x2>>>,
}

impl<'k> PartialSums<'k> {
    fn new(rows: usize, added: Added) -> Self {
        PartialSums { chains: vec![vec![None; rows]; added.chains()], both: vec![None; rows] }
    }

    /// Adds neighbouring elements of a row, of which the first is number `first` of the thread's.
    fn add(&mut self, row: usize, first: usize, terms: &[Val<'k, f32>]) {
        match (&mut self.chains[..], terms) {
            ([], _) => {}
            (_, &[even, odd]) => {
                let terms = even.beside(odd);
                self.both[row] = Some(self.both[row].map_or(terms, |sum| sum + terms));
            }
            (chains, terms) => {
                for (i, &term) in (first..).zip(terms) {
                    let sum = &mut chains[i % 2][row];
                    *sum = Some(sum.map_or(term, |sum| sum + term));
                }
            }
        }
    }

    /// The sums, by chain and row.
    fn numbers(mut self) -> Vec<Vec<Val<'k, f32>>> {
        for (row, both) in self.both.iter().enumerate() {
            let numbers = both.iter().flat_map(|both| both.numbers());
            self.chains.iter_mut().zip(numbers).for_each(|(chain, sum)| chain[row] = Some(sum));
        }
        let found = |sum: Option<Val<'k, f32>>| sum.expect("bug in fulgurite: a tile without columns");
        self.chains.into_iter().map(|rows| rows.into_iter().map(found).collect()).collect()
    }
}

/// Maximum and sum of each of the thread's rows, which the end of a tile needs.
pub struct Totals<'k> {
    pub max: Vec<Val<'k, f32>>,
    pub sum: Vec<Val<'k, f32>>,
}

impl<'k> Totals<'k> {
    /// These totals with maxima scaled to powers of two.
    pub fn scaled(self, scale: Val<'k, f32>) -> Totals<'k> {
        Totals { max: self.max.into_iter().map(|max| max * scale).collect(), ..self }
    }
}

impl<'k, A: RowView<'k>> Softmax<'k, A> {
    /// The softmax for the accumulators of any tensor unit.
    pub fn of_view(
        w: &Scope<'k, Group>,
        scale: Val<'k, f32>,
        rescale: Rescale,
        exp: Exp,
        added: Added,
        counters: Pointer<'k, u32>,
    ) -> Self {
        let rows = || (0..A::ROWS).map(|_| w.var(0.0f32)).collect();
        let sums = (0..added.chains()).map(|_| rows()).collect();
        // Other policies rescale beside the exponentials of every block: with pairs, a few registers would spill.
        let width = if matches!(rescale, Rescale::Optimistic(_)) { width::<A>(w) } else { 1 };
        let view = PhantomData;
        Softmax { scale, rescale, exp, counters, max: rows(), shift: rows(), added, width, sums, view }
    }

    /// The number of powers of two by which p is stored smaller than its true value. If no thread sums p, the kernel
    /// detects a maximum that is too low by p >= 2, which a single bit of p shows.
    fn margin(&self) -> Option<f32> {
        match (self.added, self.rescale) {
            (Added::ByColumn, Rescale::Optimistic(limit)) => Some(limit.log2() - 1.0),
            _ => None,
        }
    }

    /// The largest score of each row, reduced over the lanes that share it.
    fn row_max(&self, w: &Scope<'k, Group>, s: &A) -> Vec<Val<'k, f32>> {
        let row_max = |row: usize| {
            let own: Vec<Val<'k, f32>> =
                s.elements().enumerate().filter(|(i, _)| A::row_of(*i) == row).map(|(_, x)| x).collect();
            // Two independent chains of comparisons instead of one.
            let chain = |odd: usize| own.iter().skip(odd).step_by(2).copied().reduce(|a, b| a.max(b));
            let (a, b) = (chain(0), chain(1));
            let most = a.zip(b).map(|(a, b)| a.max(b)).expect("bug in fulgurite: a tile without columns");
            A::reduce_row(w, most, |a, b| a.max(b))
        };
        (0..A::ROWS).map(row_max).collect()
    }

    fn set_max(&self, new: Vec<Val<'k, f32>>) {
        for (i, new) in new.into_iter().enumerate() {
            self.max[i].set(new);
            let shift = -(new * self.scale);
            self.shift[i].set(self.margin().map_or(shift, |margin| shift - margin));
        }
    }

    fn settled(&self) -> Settled<'k> {
        Settled(self.scale)
    }

    /// Computes p of a range of the elements, `width` at a time, and packs it into `p`.
    fn numerators<T: Half>(
        &self,
        width: usize,
        s: &A,
        p: &Fragment<'k, T>,
        scores: &mut dyn Scores<'k>,
        elements: Range<usize>,
    ) -> Made<'k>
    where
        Pair<T>: Word,
    {
        let shift: Vec<Val<'k, f32>> = self.shift.iter().map(|shift| shift.get()).collect();
        let mut sums = PartialSums::new(A::ROWS, self.added);
        let mut bits: Option<Val<'k, u32>> = None;
        let mut low = None;
        let all: Vec<Val<'k, f32>> = s.elements().collect();
        for unit in units(width, elements) {
            let (row, col) = (A::row_of(unit.start), A::col_of(unit.start));
            let exponents = scores.exponents(row, col, &all[unit.clone()], shift[row]);
            let numbered = unit.clone().zip(exponents);
            let count = all.len();
            let numerators: Vec<Val<'k, f32>> =
                numbered.map(|(number, x)| exp2(self.exp, Element { number, count }, x)).collect();
            sums.add(row, unit.start, &numerators);
            for (i, e) in unit.zip(numerators) {
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
        }
        Made { sums: sums.numbers(), bits }
    }

    /// Computes the parts of p after the first, each once the part before it is published, and publishes the last.
    fn rest<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        s: &A,
        p: &Numerators<'_, 'k, T>,
        scores: &mut dyn Scores<'k>,
        rest: &[Range<usize>],
    ) where
        Pair<T>: Word,
    {
        for (part, elements) in (0..).zip(rest) {
            (p.publish)(w, part);
            let made = self.numerators(self.width, s, p.fragment, scores, elements.clone());
            self.add(&made);
        }
        (p.publish)(w, rest.len() as u32);
    }

    /// Adds the sums of a part to those of the rows.
    fn add(&self, made: &Made<'k>) {
        let sums = self.sums.iter().flatten().zip(made.sums.iter().flatten());
        sums.for_each(|(sum, &part)| sum.set(sum.get() + part));
    }

    /// Replaces a range of the elements by their exponents, computed `width` at a time, and returns the largest.
    fn exponents(
        &self,
        width: usize,
        s: &A,
        scores: &mut dyn Scores<'k>,
        elements: Range<usize>,
    ) -> Option<Val<'k, f32>> {
        if elements.is_empty() {
            return None;
        }
        let shift: Vec<Val<'k, f32>> = self.shift.iter().map(|shift| shift.get()).collect();
        let mut most = [None::<Val<'k, f32>>; 2];
        let all: Vec<Val<'k, f32>> = s.elements().collect();
        for unit in units(width, elements) {
            let (row, col) = (A::row_of(unit.start), A::col_of(unit.start));
            let exponents = scores.exponents(row, col, &all[unit.clone()], shift[row]);
            for (i, exponent) in unit.zip(exponents) {
                s.set(i, exponent);
                // Two independent chains of comparisons instead of one.
                let most = &mut most[i % 2];
                *most = Some(most.map_or(exponent, |most| most.max(exponent)));
            }
        }
        most.into_iter().flatten().reduce(|a, b| a.max(b))
    }

    /// Whether p depends on the final maximum of its row, so that all scores must be seen before the first p.
    fn scans(&self) -> bool {
        matches!(self.exp, Exp::Sas { .. })
    }

    /// Resets the maxima before the first block of a tile.
    pub fn forget(&self) {
        self.max.iter().for_each(|max| max.set(FLOOR));
    }

    /// Raises the maxima to include those of a block.
    pub fn see(&self, w: &Scope<'k, Group>, s: &A) {
        let new = self.row_max(w, s);
        self.set_max(new.into_iter().zip(&self.max).map(|(new, max)| new.max(max.get())).collect());
    }

    /// Processes the first block of a tile: sets the maximum from the block, unless a scan has already found it, and
    /// starts the sums.
    pub fn first<T: Half>(&self, w: &Scope<'k, Group>, s: &A, p: &Numerators<'_, 'k, T>)
    where
        Pair<T>: Word,
    {
        if !self.scans() {
            self.forget();
            self.see(w, s);
        }
        let parts = p.parts(s.elements().count(), s.cols());
        let made = self.numerators(self.width, s, p.fragment, &mut self.settled(), parts[0].clone());
        self.sums.iter().flatten().zip(made.sums.iter().flatten()).for_each(|(var, &sum)| var.set(sum));
        self.rest(w, s, p, &mut self.settled(), &parts[1..]);
    }

    /// Processes a later block and adds to the sums. Products into `o` may still run: this function waits for them, and
    /// returns with `o` in the new scale.
    pub fn next<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        s: &A,
        p: &Numerators<'_, 'k, T>,
        o: &dyn Rescaled<'k>,
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

    /// Uses the old maximum without looking at the scores. If a sum shows that it was too low, recomputes the block
    /// with the true maximum. Once a part of p is published, products may use it, so the exponents of the other parts
    /// are tested before.
    fn trust<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        s: &A,
        p: &Numerators<'_, 'k, T>,
        o: &dyn Rescaled<'k>,
        limit: f32,
        scores: &mut dyn Scores<'k>,
    ) where
        Pair<T>: Word,
    {
        /// The bit of each half that is set if the half is at least 2, infinite or NaN.
        const TWO: u32 = 0x4000_4000;
        let parts = p.parts(s.elements().count(), s.cols());
        let (head, tail) = (parts[0].clone(), parts[0].end..s.elements().count());
        let made = self.numerators(self.width, s, p.fragment, scores, head.clone());
        let largest = self.exponents(self.width, s, scores, tail.clone());
        let sums: Vec<Var<'k, f32>> = made.sums.iter().flatten().map(|&sum| w.var(sum)).collect();
        let most = sums.iter().map(|part| part.get()).reduce(|a, b| a.max(b));
        let low = match (most, made.bits) {
            (Some(most), _) => most.gt(limit),
            (None, Some(bits)) => (bits & TWO).ne(0),
            (None, None) => unreachable!("bug in fulgurite: a tile without columns"),
        };
        // If every exponent is at most this, the sum of the tail is within the limit.
        let each = limit.log2() - self.margin().unwrap_or(0.0) - (tail.len().max(1) as f32).log2();
        let low = largest.map_or(low, |largest| low | largest.gt(each));
        let again = scores.doubt().map_or(low, |doubt| low | doubt);
        // The branch depends on every exponential, so the assembler cannot hoist the wait below above them.
        w.when_rarely(w.any(again), |w| {
            w.when(w.lane().eq(0), |w| {
                self.counters.fetch_add(w, 1, 1);
            });
            scores.settle(w);
            let alpha = self.raise_to(self.row_max(w, s));
            // One element at a time: pairs in this copy of the code cost registers, and a few would spill.
            let again = self.numerators(1, s, p.fragment, &mut self.settled(), head).sums;
            self.exponents(1, s, &mut self.settled(), tail);
            sums.iter().zip(again.iter().flatten()).for_each(|(part, &sum)| part.set(sum));
            A::wait(w);
            o.rescale_rows(w, &alpha);
        });
        self.sums.iter().flatten().zip(&sums).for_each(|(sum, part)| sum.set(sum.get() + part.get()));
        A::wait(w);
        self.rest(w, s, p, &mut Exponents, &parts[1..]);
    }

    /// Raises the maximum if the block's is larger (by more than `tau` powers of two), and rescales.
    fn raise<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        s: &A,
        p: &Numerators<'_, 'k, T>,
        o: &dyn Rescaled<'k>,
        tau: Option<f32>,
    ) where
        Pair<T>: Word,
    {
        let new = self.row_max(w, s);
        let grown = new.iter().zip(&self.max).map(|(&new, max)| (new - max.get()) * self.scale);
        let grown: Vec<Val<'k, f32>> = grown.collect();
        let any =
            |tau: f32| grown.iter().map(|grown| grown.gt(tau)).collect::<Vec<_>>().into_iter().reduce(|a, b| a | b);
        let moved = tau.and_then(any).map(|moved| w.any(moved));
        let raised = match moved {
            Some(moved) => new.into_iter().map(|new| moved.select::<f32>(new, FLOOR)).collect(),
            None => new,
        };
        let alpha = self.raise_to(raised);
        let parts = p.parts(s.elements().count(), s.cols());
        let made = self.numerators(self.width, s, p.fragment, &mut self.settled(), parts[0].clone());
        self.add(&made);
        let bits = made.bits.map(|bits| bits.to_f32_bits());
        A::wait_after(w, &made.sums.iter().flatten().copied().chain(bits).collect::<Vec<_>>());
        match moved {
            Some(moved) => w.when(moved, |w| o.rescale_rows(w, &alpha)),
            None => o.rescale_rows(w, &alpha),
        }
        self.rest(w, s, p, &mut self.settled(), &parts[1..]);
    }

    /// Raises the maxima to at least `new`, rescales the sums, and returns the scale factors.
    fn raise_to(&self, new: Vec<Val<'k, f32>>) -> Vec<Val<'k, f32>> {
        let old: Vec<Val<'k, f32>> = self.max.iter().map(|max| max.get()).collect();
        let new: Vec<Val<'k, f32>> = new.into_iter().zip(&old).map(|(new, &old)| new.max(old)).collect();
        let alpha = old.iter().zip(&new).map(|(&old, &new)| ((old - new) * self.scale).exp2());
        let alpha: Vec<Val<'k, f32>> = alpha.collect();
        for rows in &self.sums {
            rows.iter().zip(&alpha).for_each(|(sum, &alpha)| sum.set(sum.get() * alpha));
        }
        self.set_max(new);
        alpha
    }

    /// Maximum and sum of each row. Sums in a column of `o` are the accumulators themselves, so products into it must
    /// be complete.
    pub fn totals(&self, w: &Scope<'k, Group>, o: &A) -> Totals<'k> {
        let margin = self.margin().map(|margin| self.scale.recip() * margin);
        let max = self.max.iter().map(|max| margin.map_or(max.get(), |margin| max.get() + margin)).collect();
        let sum = |row: usize| match self.added {
            Added::ByThreads => {
                let own = self.sums.iter().map(|rows| rows[row].get()).reduce(|a, b| a + b);
                A::reduce_row(w, own.expect("bug in fulgurite: a row has sums"), |a, b| a + b)
            }
            Added::ByColumn => {
                let last = (0..).zip(o.elements()).filter(|(i, _)| A::row_of(*i) == row).last();
                last.expect("bug in fulgurite: a tile without columns").1
            }
        };
        Totals { max, sum: (0..A::ROWS).map(sum).collect() }
    }
}
