//! Rows whose result is no number, once more and with care.
//!
//! A key that a mask hides has a probability of 0, and 0 times what its value holds is 0 unless that is infinite or NaN.
//! Keys that no query of a sequence can see are never loaded, but which keys an expression hides is known element by
//! element only. So the end of a tile looks whether a sum is not finite, which costs nothing beside the tile, and then
//! adds up again, leaving out what is hidden. Slow, and reached by such data alone.

use crate::parts::block_lists::{Lists, Tag};
use crate::parts::exp::exp2;
use crate::parts::mask::Limits;
use crate::parts::modifier::Modify;
use crate::parts::schedule::{Of, Unequal, Work};
use crate::parts::softmax::Totals;
use fulgurite_core::Exp;
use fulgurite_ptx::{Acc, Builder, Group, Half, Pair, Pointer, RowView, Scope, Val, Word};

/// Elements of a vector that is loaded at once.
const VECTOR: u32 = 8;

/// A tensor of rows that threads read, in pairs of elements.
struct Plain<'k, T> {
    pointer: Pointer<'k, Pair<T>>,
    /// Pairs from one row, head and sequence to the next.
    row: Val<'k, u64>,
    head: Val<'k, u64>,
    batch: Val<'k, u64>,
}

/// Names of the parameters: q, k and v each with their strides, and vectors of a row of q and k.
pub const TENSORS: [&str; 3] = ["plain_q", "plain_k", "plain_v"];
pub const STRIDES: [&str; 3] = ["_row", "_head", "_batch"];
pub const DIMS: [&str; 2] = ["plain_vectors", "plain_value_dim"];

/// What the second sum needs of the parameters.
pub struct Careful<'k, T> {
    tensors: [Plain<'k, T>; 3],
    vectors: Val<'k, u32>,
    value_dim: Val<'k, u32>,
}

/// What it needs of the tile and of the role.
pub struct Redo<'a, 'k> {
    pub work: &'a Work<'k>,
    pub unequal: Option<&'a Unequal<'k>>,
    pub lists: Option<&'a Lists<'k>>,
    /// Keys of a block, and all there are of the sequence that some query sees.
    pub cols: u32,
    pub keys: Val<'k, u32>,
    /// Number of the first of them in the sequence.
    pub first: Val<'k, u32>,
    pub limits: &'a Limits<'k>,
    pub modify: &'a Modify<'a, 'k>,
    /// The thread's two rows, found when they are needed. Rows past the last are any of the sequence: nobody keeps what
    /// comes of them.
    pub rows: &'a dyn Fn(&Scope<'k, Group>) -> Rows<'k>,
    /// The first column of v, where it is not 0.
    pub first_column: Option<Val<'k, u32>>,
    /// How p is computed.
    pub exp: Exp,
    /// From scores to powers of two.
    pub scale: Val<'k, f32>,
}

/// Sets what masks and modifiers keep.
type Turn<'a, 'k> = &'a dyn Fn(&Scope<'k, Group>);

/// What the thread's two rows are.
#[derive(Clone, Copy)]
pub struct Rows<'k> {
    pub queries: [Val<'k, u32>; 2],
    pub heads: [Val<'k, u32>; 2],
    /// Their head of k and v.
    pub kv_head: Val<'k, u32>,
}

impl<'k, T: Half> Plain<'k, T>
where
    Pair<T>: Word,
{
    fn new(k: &'k Builder, name: &str) -> Self {
        let pointer = k.array(name);
        let [row, head, batch] = STRIDES.map(|end| k.param::<u64>(&format!("{name}{end}")));
        Plain { pointer, row, head, batch }
    }

    /// A row of the tile's sequence.
    fn at(&self, redo: &Redo<'_, 'k>, of: Of, row: Val<'k, u32>, head: Val<'k, u32>) -> Pointer<'k, Pair<T>> {
        let (row, batch) = match redo.unequal {
            Some(unequal) => (unequal.slice(redo.work, of).start + row, row.literal(0)),
            None => (row, redo.work.batch),
        };
        let part = |n: Val<'k, u32>, stride: Val<'k, u64>| n.to_u64().mul_wide_64(stride);
        self.pointer.at_wide(part(row, self.row) + part(head, self.head) + part(batch, self.batch))
    }
}

impl<'k, T: Half> Careful<'k, T>
where
    Pair<T>: Word,
{
    /// Declares the parameters.
    pub fn new(k: &'k Builder) -> Self {
        let tensors = TENSORS.map(|name| Plain::new(k, name));
        let [vectors, value_dim] = DIMS.map(|name| k.param(name));
        Careful { tensors, vectors, value_dim }
    }

    /// Adds up again where a sum is not finite. What masks and modifiers keep may be the next tile's already: `turn` sets
    /// it to this tile, and back.
    pub fn run(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k>,
        o: &Acc<'k>,
        totals: &Totals<'k>,
        turn: [Turn<'_, 'k>; 2],
    ) {
        // 0 as long as everything is finite.
        let zero = w.constant(0.0f32);
        let sum = o.elements().fold(zero, |sum, x| x.mul_add(0.0, sum));
        w.when_rarely(w.any(!sum.eq(0.0)), |w| {
            turn[0](w);
            self.again(w, redo, o, totals);
            turn[1](w);
        });
    }

    fn again(&self, w: &Scope<'k, Group>, redo: &Redo<'_, 'k>, o: &Acc<'k>, totals: &Totals<'k>) {
        (0..o.elements().count()).for_each(|i| o.set(i, 0.0));
        let rows = (redo.rows)(w);
        let [first, end] = redo.work.blocks;
        w.each(first, end, 1u32, |w, n| {
            let tag = redo.lists.map(|lists| lists.block(w, redo.work, n, redo.keys));
            let start = tag.map_or(n * redo.cols, |tag| tag.key());
            // As many keys at a time as lanes share rows: each lane computes the scores of one.
            w.each(0u32, redo.cols, Acc::LANES, |w, part| self.four(w, redo, &rows, (start + part, tag), o, totals));
        });
    }

    fn four(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k>,
        rows: &Rows<'k>,
        (first, tag): (Val<'k, u32>, Option<Tag<'k>>),
        o: &Acc<'k>,
        totals: &Totals<'k>,
    ) {
        let own = Acc::lane_in_row(w);
        let key = first + own;
        let inside = |key: Val<'k, u32>| key.min(redo.keys.max(1) - 1);
        let p: Vec<Val<'k, f32>> = (0..Acc::ROWS)
            .map(|i| {
                let raw = self.dot(w, redo, rows, i, inside(key));
                let full = tag.map(|tag| tag.full());
                let number = (key + redo.first).to_i32();
                let score = redo.modify.one(w, raw, i, number, full);
                let seen = redo.limits.sees(w, i, key.to_i32(), full) & key.lt(redo.keys);
                let power = score.mul_add(redo.scale, -(totals.max[i] * redo.scale));
                let p = match redo.exp {
                    Exp::Sas { .. } => exp2(redo.exp, 0, power),
                    _ => power.exp2(),
                };
                seen.select::<f32>(p, 0.0)
            })
            .collect();
        for other in 0..Acc::LANES {
            let p: Vec<_> = p.iter().map(|&p| if other == 0 { p } else { w.exchange(p, other) }).collect();
            let key = inside(first + (own ^ other));
            let value = self.tensors[2].at(redo, Of::V, key, rows.kv_head);
            let some: Vec<_> = p.iter().map(|p| p.gt(0.0)).collect();
            let some = some.into_iter().reduce(|a, b| a | b).expect("bug in fulgurite: a thread without rows");
            w.when(some, |w| {
                for period in 0..o.cols() / Acc::PERIOD {
                    let col = Acc::first_col(w) + Acc::PERIOD * period;
                    let col = redo.first_column.map_or(col, |first| first + col);
                    // Past the end of a row there is nothing to read, and nothing that anyone keeps.
                    let col = col.min(self.value_dim - 2);
                    let halves = value.load(w, col / 2).split();
                    for (i, &p) in p.iter().enumerate() {
                        for (half, value) in halves.into_iter().enumerate() {
                            let at = Acc::index(i, period as usize, half);
                            let x = o.elements().nth(at).expect("bug in fulgurite: counted above");
                            o.set(at, p.gt(0.0).select::<f32>(p.mul_add(value.widen(), x), x));
                        }
                    }
                }
            });
        }
    }

    /// The product of the thread's `i`-th query and a key.
    fn dot(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k>,
        rows: &Rows<'k>,
        i: usize,
        key: Val<'k, u32>,
    ) -> Val<'k, f32> {
        let query = self.tensors[0].at(redo, Of::Q, rows.queries[i], rows.heads[i]);
        let key = self.tensors[1].at(redo, Of::K, key, rows.kv_head);
        let sum = w.var(0.0f32);
        w.each(0u32, self.vectors, 1u32, |w, i| {
            for part in 0..VECTOR / 2 {
                let at = i * (VECTOR / 2) + part;
                let (a, b) = (query.load(w, at).split(), key.load(w, at).split());
                for (a, b) in a.into_iter().zip(b) {
                    sum.set(a.widen().mul_add(b.widen(), sum.get()));
                }
            }
        });
        sum.get()
    }
}
