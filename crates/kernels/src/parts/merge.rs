//! Split-K results: each split writes a partial result to the workspace, and the last CTA to finish merges them.
//!
//! For each row, a split writes o = p v, m (the maximum, scaled) and l (the sum of p). Two results are merged by
//! o = 2^(M1 - M) o1 + 2^(M2 - M) o2 with M the larger of both maxima, and l likewise. The order of merging is that of
//! the splits, in two levels: [`RUN`] splits make a run, and the runs of a tile make its result.
//!
//! A CTA computes one split of a tile, one run, or all runs. It merges the splits of a run in registers ([`Merged`]). If the
//! tile has more than that, the CTA writes a partial result, and a counter per tile counts these. The CTA that counts the
//! last one merges them. Both levels have one order, so the result has the same bits however a tile is divided.

use crate::params::{Lens, Params};
use crate::parts::modifier::Sinks;
use crate::parts::nonfinite::PlainRows;
use crate::parts::softmax::Totals;
use fulgurite_core::DType;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Acc, Divisor, Group, GroupBarrier, Half, Pair, Pointer, RowView, Scope, Shared, Val, Var, Word};
use std::f32::consts::LN_2;

/// Elements of o that a merging thread computes: 16 bytes of the result.
const UNIT: u32 = 8;
/// Rows of an accumulator of a warpgroup.
const ROWS_OF_GROUP: u32 = 64;
/// Splits that are merged with each other before they are merged with others.
pub const RUN: u32 = 4;
/// The most splits of a tile.
pub const MOST_SPLITS: u32 = 16;
/// Partial results that a merging thread loads at a time, in one round trip to memory.
const TOGETHER: u32 = MOST_SPLITS;
/// Words before the tiles' counters.
pub const FIRST_COUNTER: u32 = 2;

/// Splits of a tile that a CTA computes, and their rows.
#[derive(Clone, Copy)]
pub struct Slot<'k> {
    pub tile: Val<'k, u32>,
    /// First and past-the-last split of this CTA: one split, one run, or all splits of the tile.
    pub ours: [Val<'k, u32>; 2],
    /// Number of splits of the tile.
    pub splits: Val<'k, u32>,
    /// Splits of a partial result: 1 or [`RUN`].
    pub each: Val<'k, u32>,
    pub batch: Val<'k, u32>,
    /// Head of k and v.
    pub head: Val<'k, u32>,
    /// First row among the rows of the head's group.
    pub row: Val<'k, u32>,
    pub rows: Val<'k, u32>,
    /// Queries of a ragged sequence.
    pub used: Option<UsedQueries<'k>>,
}

/// Queries of a ragged sequence.
#[derive(Clone, Copy)]
pub struct UsedQueries<'k> {
    /// First row in packed q and o.
    pub start: Val<'k, u32>,
    /// Queries in use.
    pub count: Val<'k, u32>,
}

/// Launch arguments of [`Partials`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartialArgs {
    pub o: PlainRows,
    pub results: ResultArgs,
    /// o of each row of each split, in the workspace.
    pub partial: Span,
    /// m and l of each row of each split, in the workspace.
    pub sums: Span,
    /// Heads of the LSE from one batch to the next.
    pub lse_heads: u64,
    /// Rows of all splits of a tile that the workspace has memory for.
    pub room: u64,
}

/// Launch arguments of the end of a tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResultArgs {
    pub lse: Span,
    /// Rows of a head's LSE.
    pub lse_rows: u64,
    /// `None` if the problem has no sinks.
    sinks: Option<Span>,
}

impl ResultArgs {
    pub fn new(lse: Span, lse_rows: u64, sinks: Option<Span>) -> ResultArgs {
        ResultArgs { lse, lse_rows, sinks }
    }

    /// Sinks of a problem that has them.
    pub fn sinks(&self) -> &Span {
        self.sinks.as_ref().expect("bug in fulgurite: sinks are not given")
    }
}

/// The outputs and the workspace of splits among a kernel's parameters.
pub struct Partials<'k, T> {
    /// Elements per row of o.
    dv: u32,
    group: Divisor<'k>,
    counters: Pointer<'k, u32>,
    sinks: Option<Sinks<'k>>,
    o: Pointer<'k, Pair<T>>,
    /// Strides of batch, query and head, in pairs of elements.
    strides: [Val<'k, u64>; 3],
    lse: Pointer<'k, f32>,
    /// Rows of a head's LSE.
    lse_rows: Val<'k, u32>,
    /// Heads of the LSE from one batch to the next.
    lse_heads: Val<'k, u32>,
    /// o of each row of each split.
    partial: Pointer<'k, f32>,
    /// m and l of each row of each split.
    sums: Pointer<'k, f32>,
    /// Rows of all splits of a tile that the workspace has memory for.
    room: Val<'k, u32>,
}

/// Addresses of a row's results.
struct RowOutput<'k, T> {
    o: Pointer<'k, Pair<T>>,
    lse: Pointer<'k, f32>,
    /// Query head of the row.
    head: Val<'k, u32>,
    /// Whether the row is past the queries in use; `None` if that cannot happen.
    unused: Option<Val<'k, bool>>,
}

impl<'k, T: Half> Partials<'k, T>
where
    Pair<T>: Word,
{
    /// Declares the parameters with their arguments. Rows of o have `dv` elements.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        dv: u32,
        sinks: Option<DType>,
        group: Divisor<'k>,
        counters: Pointer<'k, u32>,
        at: impl Lens<C, PartialArgs>,
    ) -> Self {
        let o = p.pointer("o", move |call| at(call).o.span);
        let strides = [
            p.u64("o_batch", move |call| at(call).o.batch),
            p.u64("o_row", move |call| at(call).o.row),
            p.u64("o_head", move |call| at(call).o.head),
        ];
        let lse = p.pointer("lse", move |call| at(call).results.lse);
        let partial = p.pointer("partial", move |call| at(call).partial);
        let sums = p.pointer("sums", move |call| at(call).sums);
        let lse_rows = p.u32("lse_rows", move |call| at(call).results.lse_rows as u32);
        let lse_heads = p.u32("lse_heads", move |call| at(call).lse_heads as u32);
        let room = p.u32("room", move |call| at(call).room as u32);
        let sinks = sinks.map(|dtype| Sinks::declare(p, dtype, move |call| at(call).results.sinks()));
        Partials { dv, group, counters, sinks, o, strides, lse, lse_rows, lse_heads, partial, sums, room }
    }

    /// Ends the CTA's splits of a tile. If they are all of the tile, writes the results; otherwise writes a partial result,
    /// which the tile's last CTA merges.
    pub fn finish<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        slot: &Slot<'k>,
        o: &A,
        totals: Totals<'k>,
        barrier: &GroupBarrier,
        last: Shared<'k, u32>,
    ) {
        w.choose(
            (slot.ours[1] - slot.ours[0]).eq(slot.splits),
            |w| self.write(w, slot, o, &totals),
            |w| {
                self.leave(w, slot, o, &totals);
                w.sync_group(barrier);
                w.one_thread_of_group(|t| {
                    let counter = slot.tile + FIRST_COUNTER;
                    let before = self.counters.fetch_add_in_order(t, counter, 1);
                    let all = before.eq(slot.parts() - 1);
                    // Counters are zero at the start of every launch.
                    t.when(all, |t| self.counters.store(t, counter, 0));
                    last.store(t, 0, all.select::<u32>(1, 0));
                });
                w.sync_group(barrier);
                w.when(last.load(w, 0).eq(1), |w| self.merge(w, slot));
            },
        );
    }

    /// Offsets of a row in o, in pairs, and in the LSE.
    fn offsets(&self, batch: Val<'k, u32>, query: Val<'k, u32>, head: Val<'k, u32>) -> [Val<'k, u64>; 2] {
        let parts = [batch, query, head].into_iter().zip(self.strides);
        let parts = parts.map(|(i, stride)| i.to_u64().mul_wide_64(stride));
        let o = parts.reduce(|a, b| a + b).expect("bug in fulgurite: three axes");
        [o, batch.mul_add(self.lse_heads, head).mul_wide(self.lse_rows) + query.to_u64()]
    }

    /// Addresses of the results of a tile's row.
    fn place(&self, slot: &Slot<'k>, row: Val<'k, u32>) -> RowOutput<'k, T> {
        let [query, own] = self.group.div_rem(slot.row + row);
        let head = slot.head * self.group.value() + own;
        let unused = slot.used.map(|used| query.ge(used.count));
        let query = slot.used.map_or(query, |used| used.start + query);
        let [o, lse] = self.offsets(slot.batch, query, head);
        RowOutput { o: self.o.at_wide(o), lse: self.lse.at_wide(lse), head, unused }
    }

    /// Writes a row's LSE where `first` holds. Returns the function that normalises the row's elements of o.
    fn end(
        &self,
        w: &Scope<'k, Group>,
        place: &RowOutput<'k, T>,
        [max, sum]: [Val<'k, f32>; 2],
        first: Val<'k, bool>,
    ) -> impl Fn(Val<'k, f32>) -> Val<'k, f32> {
        // A sink is one more term of the sum: bring both to the larger exponent.
        let (max, sum, factor) = match self.sinks {
            Some(sinks) => {
                let sink = sinks.of_head(w, place.head);
                let both = max.max(sink);
                let factor = (max - both).exp2();
                (both, sum.mul_add(factor, (sink - both).exp2()), Some(factor))
            }
            None => (max, sum, None),
        };
        let unused = place.unused;
        // A sum of NaN is no empty row: a visible score is NaN, and so are o and the LSE.
        let seen = !sum.eq(0.0);
        let some = unused.map_or(seen, |unused| seen & !unused);
        let lse = some.select::<f32>((max + sum.log2()) * LN_2, f32::NEG_INFINITY);
        w.when(first, |w| place.lse.store(w, 0, lse));
        let inverse = factor.map_or(sum.recip(), |factor| sum.recip() * factor);
        let inverse = seen.select::<f32>(inverse, 0.0);
        move |x| {
            let x = x * inverse;
            unused.map_or(x, |unused| unused.select::<f32>(0.0, x))
        }
    }

    /// Writes o and LSE of a tile whose splits are all in registers.
    fn write<A: RowView<'k>>(&self, w: &Scope<'k, Group>, slot: &Slot<'k>, o: &A, totals: &Totals<'k>) {
        let elements: Vec<Val<'k, f32>> = o.elements().collect();
        for i in 0..A::ROWS {
            let row = A::first_row(w) + A::row_offset(i);
            w.when(row.lt(slot.rows), |w| {
                let place = self.place(slot, row);
                let result = self.end(w, &place, [totals.max[i], totals.sum[i]], A::is_first_of_row(w));
                let to = place.o.at(A::first_col(w) / 2);
                for (col, pair) in pairs::<A>(i, self.dv) {
                    let [a, b] = pair.map(|at| result(elements[at]));
                    to.store(w, col / 2, a.pair_with::<T>(b));
                }
            });
        }
    }

    /// First row of a split in the workspace.
    fn first_row(&self, slot: &Slot<'k>, split: Val<'k, u32>) -> Val<'k, u64> {
        slot.tile.mul_wide(self.room) + (split * slot.rows).to_u64()
    }

    /// Writes a split's partial result to the workspace.
    fn leave<A: RowView<'k>>(&self, w: &Scope<'k, Group>, slot: &Slot<'k>, o: &A, totals: &Totals<'k>) {
        let elements: Vec<Val<'k, f32>> = o.elements().collect();
        let first = self.first_row(slot, slot.ours[0]);
        for i in 0..A::ROWS {
            let row = A::first_row(w) + A::row_offset(i);
            w.when(row.lt(slot.rows), |w| {
                let row = first + row.to_u64();
                w.when(A::is_first_of_row(w), |w| {
                    let sums = [totals.max[i], totals.sum[i]];
                    self.sums.at_wide(row.mul_wide_64(2)).store_some(w, 0, sums);
                });
                let to = self.partial.at_wide(row.mul_wide_64(u64::from(self.dv))).at(A::first_col(w));
                pairs::<A>(i, self.dv).for_each(|(col, at)| to.store_some(w, col, at.map(|at| elements[at])));
            });
        }
    }

    /// Merges the partial results of a tile from the workspace.
    fn merge(&self, w: &Scope<'k, Group>, slot: &Slot<'k>) {
        let parts = slot.parts();
        w.choose(
            parts.le(RUN),
            |w| self.merge_up_to(w, slot, RUN),
            |w| {
                w.choose(
                    parts.le(2 * RUN),
                    |w| self.merge_up_to(w, slot, 2 * RUN),
                    |w| self.merge_up_to(w, slot, MOST_SPLITS),
                );
            },
        );
    }

    /// Merges up to `most` partial results. Many rows take several units for each thread at a time.
    fn merge_up_to(&self, w: &Scope<'k, Group>, slot: &Slot<'k>, most: u32) {
        let units = slot.rows * (self.dv / UNIT);
        match TOGETHER / most {
            1 => self.merge_units(w, slot, most, 1),
            at_once => w.choose(
                units.le(128),
                |w| self.merge_units(w, slot, most, 1),
                |w| self.merge_units(w, slot, most, at_once),
            ),
        }
    }

    /// Merges up to `most` partial results of a tile. A thread computes `at_once` units at a time.
    fn merge_units(&self, w: &Scope<'k, Group>, slot: &Slot<'k>, most: u32, at_once: u32) {
        let (across, parts) = (self.dv / UNIT, slot.parts());
        let units = slot.rows * across;
        w.each(w.thread_in_group(), units, 128 * at_once, |w, first| {
            // All loads come before their uses: one round trip to memory for all of them.
            let loaded: Vec<_> = (0..at_once)
                .map(|at| {
                    let unit = first + at * 128;
                    let inside = if at == 0 { unit } else { unit.min(units - 1) };
                    let (row, col) = (inside / across, (inside % across) * UNIT);
                    let partials: Vec<_> =
                        (0..most).map(|i| self.partial_result(w, slot, i, parts, row, col)).collect();
                    (unit, row, col, partials)
                })
                .collect();
            for (unit, row, col, partials) in loaded {
                let run = |some: &[PartialResult<'k>]| {
                    some.iter().fold(PartialResult::empty(w), |merged, next| merged.with(next))
                };
                // Up to so many partial results are the splits of one run, or runs.
                let merged = match most {
                    RUN => run(&partials),
                    _ => run(&partials.chunks(RUN as usize).map(run).collect::<Vec<_>>()),
                };
                w.when(unit.lt(units), |w| {
                    let place = self.place(slot, row);
                    let result = self.end(w, &place, [merged.max, merged.sum], col.eq(0));
                    let pairs = [0, 1, 2, 3].map(|i: usize| {
                        let [a, b] = [0, 1].map(|j| result(merged.o[2 * i + j]));
                        a.pair_with::<T>(b)
                    });
                    place.o.store_some(w, col / 2, pairs);
                });
            }
        });
    }

    /// Loads a unit of the `i`-th partial result of a tile with `parts` of them. Past the last one, it is the last one with
    /// sums of 0, which does not change what it is merged with.
    fn partial_result(
        &self,
        w: &Scope<'k, Group>,
        slot: &Slot<'k>,
        i: u32,
        parts: Val<'k, u32>,
        row: Val<'k, u32>,
        col: Val<'k, u32>,
    ) -> PartialResult<'k> {
        let own = parts.literal(i);
        let row = self.first_row(slot, own.min(parts - 1) * slot.each) + row.to_u64();
        let [max, sum] = self.sums.at_wide(row.mul_wide_64(2)).load_some::<_, 2>(w, 0);
        let from = self.partial.at_wide(row.mul_wide_64(u64::from(self.dv))).at(col);
        let o = [0, 4].map(|i| from.load_some::<_, 4>(w, i));
        let there = own.lt(parts);
        let kept = |x: &Val<'k, f32>| there.select::<f32>(*x, 0.0);
        PartialResult { max, sum: kept(&sum), o: o.as_flattened().iter().map(kept).collect() }
    }

    /// Writes zeros and an LSE of -inf to rows that belong to no sequence, in all heads.
    pub fn clear(&self, w: &Scope<'k, Group>, [first, end]: [Val<'k, u32>; 2], heads: Val<'k, u32>) {
        let zero = w.constant(0u32);
        let nothing = w.constant(0.0f32).pair_with::<T>(0.0);
        let own = w.cta().mul_add(128, w.thread_in_group());
        w.each(own, (end - first) * heads, w.ctas() * 128, |w, i| {
            let [o, lse] = self.offsets(zero, first + i / heads, i % heads);
            self.lse.at_wide(lse).store(w, 0, f32::NEG_INFINITY);
            let to = self.o.at_wide(o);
            (0..self.dv / UNIT).for_each(|unit| to.store_some(w, unit * 4, [nothing; 4]));
        });
    }
}

impl<'k> Slot<'k> {
    /// Partial results of the tile, if this CTA does not compute all of it.
    fn parts(&self) -> Val<'k, u32> {
        (self.splits + self.each - 1) / self.each
    }
}

/// Weights of both sides of a merge.
struct Weights<'k> {
    /// The larger maximum.
    max: Val<'k, f32>,
    old: Val<'k, f32>,
    new: Val<'k, f32>,
}

impl<'k> Weights<'k> {
    fn of(old: Val<'k, f32>, new: Val<'k, f32>) -> Self {
        let max = old.max(new);
        Weights { max, old: (old - max).exp2(), new: (new - max).exp2() }
    }

    /// The sum of both sides.
    fn add(&self, old: Val<'k, f32>, new: Val<'k, f32>) -> Val<'k, f32> {
        new.mul_add(self.new, old * self.old)
    }
}

/// [`UNIT`] elements of a row's partial result.
struct PartialResult<'k> {
    max: Val<'k, f32>,
    sum: Val<'k, f32>,
    o: Vec<Val<'k, f32>>,
}

impl<'k> PartialResult<'k> {
    /// The result of no keys.
    fn empty(w: &Scope<'k, Group>) -> Self {
        let zero = w.constant(0.0f32);
        PartialResult { max: w.constant(f32::MIN), sum: zero, o: vec![zero; UNIT as usize] }
    }

    /// This result merged with that of later keys.
    fn with(&self, new: &Self) -> Self {
        let weights = Weights::of(self.max, new.max);
        let o = self.o.iter().zip(&new.o).map(|(&old, &new)| weights.add(old, new)).collect();
        PartialResult { max: weights.max, sum: weights.add(self.sum, new.sum), o }
    }
}

/// The merged splits of a run in registers. If the CTA computes several runs, its earlier ones wait in shared memory: there
/// are not enough registers for both.
pub struct Merged<'k, A = Acc<'k>> {
    pub o: A,
    max: Vec<Var<'k, f32>>,
    sum: Vec<Var<'k, f32>>,
    /// o of the earlier runs, then their maxima and sums: number i of thread t is at 128 i + t.
    earlier: Shared<'k, f32>,
}

impl<'k, A: RowView<'k>> Merged<'k, A> {
    /// Elements of shared memory for results with this number of columns.
    pub fn shared_elements(cols: u32) -> u32 {
        ROWS_OF_GROUP * cols + 2 * 128 * A::ROWS as u32
    }

    /// Merged splits in the accumulators `o`.
    pub fn new(w: &Scope<'k, Group>, o: A, earlier: Shared<'k, f32>) -> Self {
        let rows = || (0..A::ROWS).map(|_| w.var(0.0f32)).collect();
        Merged { max: rows(), sum: rows(), o, earlier }
    }

    /// Prepares for the first split of a run.
    pub fn clear(&self) {
        self.max.iter().for_each(|max| max.set(f32::MIN));
        self.sum.iter().for_each(|sum| sum.set(0.0));
        self.o.elements().enumerate().for_each(|(i, x)| self.o.set(i, x.literal(0.0)));
    }

    /// Merges the next split.
    pub fn add(&self, o: &A, totals: Totals<'k>) {
        let weights = |i: usize| {
            let weights = Weights::of(self.max[i].get(), totals.max[i]);
            self.max[i].set(weights.max);
            self.sum[i].set(weights.add(self.sum[i].get(), totals.sum[i]));
            weights
        };
        let weights: Vec<Weights<'k>> = (0..A::ROWS).map(weights).collect();
        let pairs: Vec<_> = self.o.elements().zip(o.elements()).collect();
        for (i, (sum, x)) in pairs.into_iter().enumerate() {
            self.o.set(i, weights[A::row_of(i)].add(sum, x));
        }
    }

    /// Maximum and sum of each row.
    pub fn totals(&self) -> Totals<'k> {
        let now = |vars: &[Var<'k, f32>]| vars.iter().map(|var| var.get()).collect();
        Totals { max: now(&self.max), sum: now(&self.sum) }
    }

    /// Ends a run of a tile: merges it with the earlier runs of this CTA unless it is the `first`, and puts the result aside
    /// if it is not the `last`.
    pub fn end_run(&self, w: &Scope<'k, Group>, [first, last]: [Val<'k, bool>; 2]) {
        let elements = || self.o.elements().enumerate();
        let at = |i: usize| w.thread_in_group() + 128 * i as u32;
        let count = self.o.elements().count();
        let (of_max, of_sum) = (|row: usize| count + row, |row: usize| count + A::ROWS + row);
        w.choose(
            first,
            // Merging begins with the result of no keys, which makes -0 to 0.
            |_| elements().for_each(|(i, x)| self.o.set(i, x + 0.0)),
            |w| {
                let weights = |i: usize| {
                    let [max, sum] = [of_max(i), of_sum(i)].map(|i| self.earlier.load(w, at(i)));
                    let weights = Weights::of(max, self.max[i].get());
                    self.max[i].set(weights.max);
                    self.sum[i].set(weights.add(sum, self.sum[i].get()));
                    weights
                };
                let weights: Vec<Weights<'k>> = (0..A::ROWS).map(weights).collect();
                elements().for_each(|(i, x)| self.o.set(i, weights[A::row_of(i)].add(self.earlier.load(w, at(i)), x)));
            },
        );
        w.when(!last, |w| {
            for i in 0..A::ROWS {
                self.earlier.store(w, at(of_max(i)), self.max[i].get());
                self.earlier.store(w, at(of_sum(i)), self.sum[i].get());
            }
            elements().for_each(|(i, x)| self.earlier.store(w, at(i), x));
        });
    }
}

/// Pairs of neighbouring elements of the thread's `row`-th row: the column relative to the thread's first, and their indices.
fn pairs<'k, A: RowView<'k>>(row: usize, cols: u32) -> impl Iterator<Item = (u32, [usize; 2])> {
    let starts = (0..cols / A::PERIOD).flat_map(|period| (0..A::RUN).step_by(2).map(move |at| (period, at)));
    starts.map(move |(period, at)| {
        let index = |side: u32| A::index(row, period as usize, (at + side) as usize);
        (period * A::PERIOD + at, [0, 1].map(index))
    })
}
