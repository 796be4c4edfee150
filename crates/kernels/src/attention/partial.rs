//! Results of a part of the keys: written where other blocks find them, and merged by the last block to be done.
//!
//! A split leaves for each row its o = p v, m (the maximum, scaled) and l (the sum of p). A tile's splits count
//! themselves; who finds that all others are there reads them in their order, whoever it is, so that the bits of a
//! result do not depend on who came last: with M = max m, o = sum 2^(m - M) o / sum 2^(m - M) l.

use super::softmax::Totals;
use fulgurite_ptx::{Acc, Builder, Divisor, Group, GroupBarrier, Half, Pair, Pointer, Scope, Shared, Val, Word};
use std::f32::consts::LN_2;

/// Elements of o that a merging thread has: 16 bytes of the result.
const UNIT: u32 = 8;
/// Splits that a merging thread reads at a time: one round trip to memory.
const TOGETHER: u32 = 16;
/// Words before a tile's counters.
pub const FIRST_COUNTER: u32 = 2;

/// A split of a tile: which, and what its rows are.
#[derive(Clone, Copy)]
pub struct Slot<'k> {
    /// Its number among all.
    pub item: Val<'k, u32>,
    pub tile: Val<'k, u32>,
    pub split: Val<'k, u32>,
    /// Splits of the tile.
    pub splits: Val<'k, u32>,
    pub batch: Val<'k, u32>,
    /// Of keys and values.
    pub head: Val<'k, u32>,
    /// First packed row, and how many there are.
    pub row: Val<'k, u32>,
    pub rows: Val<'k, u32>,
}

/// Where results go.
pub struct Partials<'k, T> {
    /// Elements of a row of o.
    dv: u32,
    group: Divisor<'k>,
    kv_heads: Divisor<'k>,
    counters: Pointer<'k, u32>,
    scale: Val<'k, f32>,
    o: Pointer<'k, Pair<T>>,
    /// Pairs from one batch, query and head to the next.
    strides: [Val<'k, u64>; 3],
    lse: Pointer<'k, f32>,
    q_len: Val<'k, u32>,
    /// o of each split, `[item][row][dv]`, and m and l, `[item][row][2]`.
    partial: Pointer<'k, f32>,
    sums: Pointer<'k, f32>,
    /// Rows that an item has room for.
    room: Val<'k, u32>,
}

impl<'k, T: Half> Partials<'k, T>
where
    Pair<T>: Word,
{
    /// With parameters of its own.
    pub fn new(
        k: &'k Builder,
        dv: u32,
        group: Divisor<'k>,
        kv_heads: Divisor<'k>,
        counters: Pointer<'k, u32>,
        scale: Val<'k, f32>,
    ) -> Self {
        let o = k.pointer::<Pair<T>>("o");
        let strides = ["o_batch", "o_row", "o_head"].map(|name| k.param::<u64>(name));
        let [lse, partial, sums] = ["lse", "partial", "sums"].map(|name| k.pointer::<f32>(name));
        let [q_len, room] = ["q_len", "room"].map(|name| k.param::<u32>(name));
        Partials { dv, group, kv_heads, counters, scale, o, strides, lse, q_len, partial, sums, room }
    }

    /// A split is done: its rows are written, or left for the last split of the tile, which merges all.
    pub fn finish(
        &self,
        w: &Scope<'k, Group>,
        slot: &Slot<'k>,
        o: &Acc<'k>,
        totals: Totals<'k>,
        barrier: &GroupBarrier,
        last: Shared<'k, u32>,
    ) {
        w.choose(
            slot.splits.eq(1),
            |w| self.write(w, slot, o, &totals),
            |w| {
                self.leave(w, slot, o, &totals);
                w.sync_group(barrier);
                w.one_thread_of_group(|t| {
                    let counter = slot.tile + FIRST_COUNTER;
                    let before = self.counters.fetch_add_in_order(t, counter, 1);
                    let all = before.eq(slot.splits - 1);
                    // As every launch finds it.
                    t.when(all, |t| self.counters.store(t, counter, 0));
                    last.store(t, 0, all.select::<u32>(1, 0));
                });
                w.sync_group(barrier);
                w.when(last.load(w, 0).eq(1), |w| self.merge(w, slot));
            },
        );
    }

    /// Where a packed row's o and LSE lie.
    fn place(&self, slot: &Slot<'k>, row: Val<'k, u32>) -> (Pointer<'k, Pair<T>>, Pointer<'k, f32>) {
        let [query, own] = self.group.div_rem(slot.row + row);
        let head = slot.head * self.group.value() + own;
        let at = [slot.batch, query, head].into_iter().zip(self.strides);
        let at = at.map(|(i, stride)| i.to_u64().mul_wide_64(stride)).reduce(|a, b| a + b);
        let at = at.expect("bug in fulgurite: three axes");
        let heads = self.kv_heads.value() * self.group.value();
        let lse = (slot.batch * heads + head).mul_wide(self.q_len) + query.to_u64();
        (self.o.at_wide(at), self.lse.at_wide(lse))
    }

    /// o and LSE of a tile without other splits.
    fn write(&self, w: &Scope<'k, Group>, slot: &Slot<'k>, o: &Acc<'k>, totals: &Totals<'k>) {
        let elements: Vec<Val<'k, f32>> = o.elements().collect();
        for i in 0..2 {
            let row = w.first_row() + 8 * i as u32;
            w.when(row.lt(slot.rows), |w| {
                let (to, lse) = self.place(slot, row);
                let (inverse, log) = ends(totals.max[i] * self.scale, totals.sum[i]);
                w.when(w.first_col().eq(0), |w| lse.store(w, 0, log));
                let to = to.at(w.first_col() / 2);
                for j in 0..self.dv / 8 {
                    let [a, b] = pair(&elements, i, j).map(|x| x * inverse);
                    to.store(w, j * 4, a.pair_with::<T>(b));
                }
            });
        }
    }

    /// Leaves a split's rows for whoever merges.
    fn leave(&self, w: &Scope<'k, Group>, slot: &Slot<'k>, o: &Acc<'k>, totals: &Totals<'k>) {
        let elements: Vec<Val<'k, f32>> = o.elements().collect();
        let first = slot.item.mul_wide(self.room);
        for i in 0..2 {
            let row = w.first_row() + 8 * i as u32;
            w.when(row.lt(slot.rows), |w| {
                let row = first + row.to_u64();
                w.when(w.first_col().eq(0), |w| {
                    let sums = [totals.max[i] * self.scale, totals.sum[i]];
                    self.sums.at_wide(row.mul_wide_64(2)).store_some(w, 0, sums);
                });
                let to = self.partial.at_wide(row.mul_wide_64(u64::from(self.dv))).at(w.first_col());
                for j in 0..self.dv / 8 {
                    to.store_some(w, j * 8, pair(&elements, i, j));
                }
            });
        }
    }

    /// Merges the splits of a tile: a thread has a few elements of a row.
    fn merge(&self, w: &Scope<'k, Group>, slot: &Slot<'k>) {
        let across = self.dv / UNIT;
        let first = slot.item - slot.split;
        let zero = w.constant(0u32);
        w.each(w.thread_in_group(), slot.rows * across, 128, |w, unit| {
            let (row, col) = (unit / across, (unit % across) * UNIT);
            let max = w.var(f32::MIN);
            let sum = w.var(0.0f32);
            let acc: Vec<_> = (0..UNIT).map(|_| w.var(0.0f32)).collect();
            w.each(0, slot.splits, TOGETHER, |w, start| {
                let parts: Vec<_> = (0..TOGETHER)
                    .map(|i| {
                        // Past the last: the last again, with a weight of 0.
                        let item = first + (start + i).min(slot.splits - 1);
                        let row = item.mul_wide(self.room) + row.to_u64();
                        let sums = self.sums.at_wide(row.mul_wide_64(2)).load_some::<_, 2>(w, 0);
                        let from = self.partial.at_wide(row.mul_wide_64(u64::from(self.dv))).at(col);
                        (sums, [0, 4].map(|i| from.load_some::<_, 4>(w, i)))
                    })
                    .collect();
                let old = max.get();
                let new = parts.iter().fold(old, |most, ([m, _], _)| most.max(*m));
                max.set(new);
                let alpha = (old - new).exp2();
                sum.set(sum.get() * alpha);
                acc.iter().for_each(|x| x.set(x.get() * alpha));
                for (i, ([m, l], from)) in parts.into_iter().enumerate() {
                    let weight = (m - new).exp2();
                    let weight = (start + i as u32).lt(slot.splits).select::<f32>(weight, 0.0);
                    sum.set(l.mul_add(weight, sum.get()));
                    acc.iter().zip(from.as_flattened()).for_each(|(x, from)| x.set(from.mul_add(weight, x.get())));
                }
            });
            let (inverse, log) = ends(max.get(), sum.get());
            let (to, lse) = self.place(slot, row);
            w.when(col.eq(zero), |w| lse.store(w, 0, log));
            let pairs = [0, 1, 2, 3].map(|i: usize| {
                let [a, b] = [0, 1].map(|j| acc[2 * i + j].get() * inverse);
                a.pair_with::<T>(b)
            });
            to.store_some(w, col / 2, pairs);
        });
    }
}

/// The two neighbours of the `j`-th eight columns that a thread has of its upper or lower row.
fn pair<'k>(elements: &[Val<'k, f32>], row: usize, j: u32) -> [Val<'k, f32>; 2] {
    let at = 4 * j as usize + 2 * row;
    [elements[at], elements[at + 1]]
}

/// What a row is multiplied by, and its LSE: 0 and -inf where it has no key.
fn ends<'k>(max: Val<'k, f32>, sum: Val<'k, f32>) -> (Val<'k, f32>, Val<'k, f32>) {
    let seen = sum.gt(0.0);
    let lse = (max + sum.log2()) * LN_2;
    (seen.select::<f32>(sum.recip(), 0.0), seen.select::<f32>(lse, f32::NEG_INFINITY))
}
