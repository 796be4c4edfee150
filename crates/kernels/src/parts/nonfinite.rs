//! The non-finite path: recomputes rows whose result is infinite or NaN, without their hidden keys.
//!
//! A hidden key has a probability of 0, but 0 times an infinite or NaN value is NaN. Kernels never load keys that no query
//! of a sequence can see. Other keys are loaded and multiplied for all rows of a tile, also for rows that do not see them.
//! At the end of a tile, this part checks whether a sum is not finite, which costs next to nothing. If so, it accumulates
//! the tile again and skips hidden keys. That is slow, and only such data pays for it.
//!
//! A kernel accumulates such a tile again either at once ([`NonfinitePath::run`]), or after its last tile
//! ([`SpoiledTiles`]). The first way keeps all that the second computation needs in registers while the first one runs, so
//! a kernel without registers to spare takes the second way.
//!
//! Scores of hidden keys are replaced by -inf before they are used, so the sum of a row's probabilities depends on visible
//! keys alone. If that sum is NaN, the row is NaN, and nothing needs to be computed again for it.

use crate::params::{Lens, Params};
use crate::parts::arguments::DeviceTensor;
use crate::parts::block_lists::{Lists, Tag};
use crate::parts::epilogue::Epilogue;
use crate::parts::exp::{Element, exp2};
use crate::parts::mask::Limits;
use crate::parts::modifier::Modify;
use crate::parts::schedule::{Of, Unequal, Work};
use crate::parts::softmax::{FLOOR, Totals};
use fulgurite_core::Exp;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{
    Acc, Builder, Group, GroupBarrier, Half, Number, Pair, Pointer, RowView, Scope, Shared, Val, Var, Word,
};

/// Stands for the probability of a hidden key. Those of visible keys are at least 0, or NaN.
const HIDDEN: f32 = -1.0;

/// Elements that a thread loads at a time.
const VECTOR: u32 = 8;

/// A tensor of rows that threads read and write by address. Strides are in pairs of elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlainRows {
    pub span: Span,
    pub row: u64,
    pub head: u64,
    pub batch: u64,
}

impl PlainRows {
    pub fn new(tensor: &DeviceTensor) -> PlainRows {
        let [batch, row, head] = tensor.strides.map(|stride| stride / 2);
        PlainRows { span: tensor.span, row, head, batch }
    }
}

/// Launch arguments of [`NonfinitePath`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlainArgs {
    pub q: PlainRows,
    pub k: PlainRows,
    pub v: PlainRows,
    /// Vectors per row of q and k.
    pub vectors: u32,
    /// Elements per row of v.
    pub value_dim: u32,
}

impl PlainArgs {
    /// Arguments for tensors whose keys start with the first visible one.
    pub fn new([q, k, v]: [DeviceTensor; 3]) -> PlainArgs {
        PlainArgs {
            q: PlainRows::new(&q),
            k: PlainRows::new(&k),
            v: PlainRows::new(&v),
            vectors: (q.shape[3] / u64::from(VECTOR)) as u32,
            value_dim: v.shape[3] as u32,
        }
    }
}

/// [`PlainRows`] among a kernel's parameters.
struct Plain<'k, T> {
    pointer: Pointer<'k, Pair<T>>,
    row: Val<'k, u64>,
    head: Val<'k, u64>,
    batch: Val<'k, u64>,
}

/// The parameters of the non-finite path.
pub struct NonfinitePath<'k, T> {
    /// q, k and v.
    tensors: [Plain<'k, T>; 3],
    vectors: Val<'k, u32>,
    value_dim: Val<'k, u32>,
}

/// The tile to accumulate again, and the state of the compute role.
pub struct Redo<'a, 'k, A = Acc<'k>> {
    pub work: &'a Work<'k>,
    pub unequal: Option<&'a Unequal<'k>>,
    pub lists: Option<&'a Lists<'k>>,
    /// Keys per key block.
    pub cols: u32,
    /// Visible keys of the sequence.
    pub keys: Val<'k, u32>,
    /// Index of the first visible key in the sequence.
    pub first: Val<'k, u32>,
    pub limits: &'a Limits<'k, A>,
    pub modify: &'a Modify<'a, 'k, A>,
    /// Finds the thread's rows when they are needed. A row past the last one may be any row of the sequence,
    /// because its result is not stored.
    pub rows: &'a dyn Fn(&Scope<'k, Group>) -> ThreadRows<'k>,
    /// First column of v, if it is not 0.
    pub first_column: Option<Val<'k, u32>>,
    /// The exponential that computes p.
    pub exp: Exp,
    /// Factor from scores to powers of two.
    pub scale: Val<'k, f32>,
}

/// Prepares masks and modifiers for a tile.
type Prepare<'a, 'k> = &'a dyn Fn(&Scope<'k, Group>);

/// The queries of a thread's rows.
#[derive(Clone)]
pub struct ThreadRows<'k> {
    pub queries: Vec<Val<'k, u32>>,
    pub heads: Vec<Val<'k, u32>>,
    /// Key/value head of all rows.
    pub kv_head: Val<'k, u32>,
}

impl<'k, T: Half> Plain<'k, T>
where
    Pair<T>: Word,
{
    fn declare<C: 'static>(p: &Params<'k, C>, name: &str, at: impl Lens<C, PlainRows>) -> Self {
        Plain {
            pointer: p.array(name, move |call| at(call).span),
            row: p.u64(&format!("{name}_row"), move |call| at(call).row),
            head: p.u64(&format!("{name}_head"), move |call| at(call).head),
            batch: p.u64(&format!("{name}_batch"), move |call| at(call).batch),
        }
    }

    /// Address of a row of the tile's sequence.
    fn at<A>(&self, redo: &Redo<'_, 'k, A>, of: Of, row: Val<'k, u32>, head: Val<'k, u32>) -> Pointer<'k, Pair<T>> {
        let (row, batch) = match redo.unequal {
            Some(unequal) => (unequal.slice(redo.work, of).start + row, row.literal(0)),
            None => (row, redo.work.batch),
        };
        let part = |n: Val<'k, u32>, stride: Val<'k, u64>| n.to_u64().mul_wide_64(stride);
        self.pointer.at_wide(part(row, self.row) + part(head, self.head) + part(batch, self.batch))
    }
}

/// Whether an element of the thread's `row`-th row is infinite or NaN. Products of two elements beyond the largest f32
/// also count.
fn not_finite<'k, A: RowView<'k>>(o: &A, row: usize) -> Val<'k, bool> {
    let own: Vec<_> = o.elements().enumerate().filter(|(i, _)| A::row_of(*i) == row).map(|(_, x)| x).collect();
    some_not_finite(&own)
}

/// Whether one of the elements is infinite or NaN. Products of two elements beyond the largest f32 also count.
pub(crate) fn some_not_finite<'k>(elements: &[Val<'k, f32>]) -> Val<'k, bool> {
    /// Chains of additions, which do not wait for each other.
    const CHAINS: usize = 4;
    // One instruction for each pair of elements: a sum of products of pairs.
    let zero = elements[0].literal(0.0);
    let chain = |first: usize| {
        let pairs = elements.chunks(2).skip(first).step_by(CHAINS);
        pairs
            .map(|pair| (pair[0], pair[pair.len() - 1]))
            .fold(None, |sum, (a, b)| Some(sum.map_or_else(|| a * b, |sum| a.mul_add(b, sum))))
    };
    let sum = (0..CHAINS).filter_map(chain).reduce(|a, b| a + b).unwrap_or(zero);
    !(sum * 0.0).eq(0.0)
}

/// Whether one of the 16-bit elements in some words is infinite or NaN.
pub(crate) fn some_half_not_finite<'k, T: Half>(words: &[Val<'k, u32>]) -> Val<'k, bool> {
    let (exponents, one): (u32, u32) = match T::NUMBER {
        Number::Bf16 => (0x7f80_7f80, 0x0080_0080),
        _ => (0x7c00_7c00, 0x0400_0400),
    };
    // The largest exponent carries into the sign.
    let carries = words.iter().map(|&word| ((word & exponents) + one) & 0x8000_8000u32);
    carries.reduce(|a, b| a | b).expect("bug in fulgurite: there are words").ne(0)
}

/// The rows' maxima, and where sums of p go if they are not known.
struct Sums<'a, 'k> {
    max: &'a [Val<'k, f32>],
    p: Option<&'a [Var<'k, f32>]>,
}

impl<'k, A> Redo<'_, 'k, A> {
    /// The index of a key that exists: reads past the last key read the last one.
    fn inside(&self, key: Val<'k, u32>) -> Val<'k, u32> {
        key.min(self.keys.max(1) - 1)
    }
}

impl<'k, T: Half> NonfinitePath<'k, T>
where
    Pair<T>: Word,
{
    /// Declares the parameters with their arguments.
    pub fn declare<C: 'static>(p: &Params<'k, C>, at: impl Lens<C, PlainArgs>) -> Self {
        NonfinitePath {
            tensors: [
                Plain::declare(p, "plain_q", move |call| &at(call).q),
                Plain::declare(p, "plain_k", move |call| &at(call).k),
                Plain::declare(p, "plain_v", move |call| &at(call).v),
            ],
            vectors: p.u32("plain_vectors", move |call| at(call).vectors),
            value_dim: p.u32("plain_value_dim", move |call| at(call).value_dim),
        }
    }

    /// Recomputes the tile if a sum is not finite. Masks and modifiers may already be prepared for the next tile:
    /// `prepare` sets them up for this tile and then for the next one again.
    pub fn run<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k, A>,
        o: &A,
        totals: &Totals<'k>,
        prepare: [Prepare<'_, 'k>; 2],
    ) {
        // A value that is not finite spoils its column in all rows that are multiplied with it, so one row of each thread is
        // enough to find it.
        w.when_rarely(w.any(not_finite(o, 0)), |w| {
            let rows = totals.sum.iter().enumerate();
            let spoiled: Vec<_> = rows.map(|(i, sum)| not_finite(o, i) & sum.eq(*sum)).collect();
            let some = spoiled.into_iter().reduce(|a, b| a | b).expect("bug in fulgurite: a thread without rows");
            w.when(w.any(some), |w| {
                prepare[0](w);
                let rows = (redo.rows)(w);
                self.accumulate(w, redo, &rows, o, &Sums { max: &totals.max, p: None });
                prepare[1](w);
            });
        });
    }

    /// Computes the tile again from its visible keys: p v in `o`, and the rows' maxima and sums.
    pub fn recompute<A: RowView<'k>>(&self, w: &Scope<'k, Group>, redo: &Redo<'_, 'k, A>, o: &A) -> Totals<'k> {
        let rows = (redo.rows)(w);
        let largest: Vec<_> = (0..A::ROWS).map(|_| w.var(FLOOR)).collect();
        self.each_part(w, redo, |w, part| {
            for (i, largest) in largest.iter().enumerate() {
                let (score, seen) = self.score(w, redo, &rows, i, part);
                let max = largest.get();
                largest.set(seen.select::<f32>(score.max(max), max));
            }
        });
        let max: Vec<_> = largest.iter().map(|max| A::reduce_row(w, max.get(), |a, b| a.max(b))).collect();
        let sums: Vec<_> = (0..A::ROWS).map(|_| w.var(0.0f32)).collect();
        self.accumulate(w, redo, &rows, o, &Sums { max: &max, p: Some(&sums) });
        let sum = sums.iter().map(|sum| A::reduce_row(w, sum.get(), |a, b| a + b)).collect();
        Totals { max, sum }
    }

    /// Computes p v from visible keys.
    fn accumulate<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k, A>,
        rows: &ThreadRows<'k>,
        o: &A,
        sums: &Sums<'_, 'k>,
    ) {
        o.elements().enumerate().for_each(|(i, x)| o.set(i, x.literal(0.0)));
        self.each_part(w, redo, |w, part| self.add_keys(w, redo, rows, part, o, sums));
    }

    /// Calls `f` for each part of the tile's key blocks, with its first key and its block's tag. A part has as many keys as
    /// lanes share a row: each lane computes the score of one key.
    fn each_part<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k, A>,
        f: impl FnOnce(&Scope<'k, Group>, (Val<'k, u32>, Option<Tag<'k>>)),
    ) {
        let [first, end] = redo.work.blocks;
        w.each(first, end, 1u32, |w, n| {
            let tag = redo.lists.map(|lists| lists.block(w, redo.work, n, redo.keys));
            let start = tag.map_or(n * redo.cols, |tag| tag.key());
            w.each(0u32, redo.cols, A::LANES, |w, part| f(w, (start + part, tag)));
        });
    }

    /// The score of the lane's key of a part in the thread's `i`-th row, and whether the row sees the key.
    fn score<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k, A>,
        rows: &ThreadRows<'k>,
        i: usize,
        (first, tag): (Val<'k, u32>, Option<Tag<'k>>),
    ) -> (Val<'k, f32>, Val<'k, bool>) {
        let key = first + A::lane_in_row(w);
        let raw = self.dot(w, redo, rows, i, redo.inside(key));
        let full = tag.map(|tag| tag.full());
        let number = (key + redo.first).to_i32();
        let score = redo.modify.one(w, raw, i, number, full);
        let seen = redo.limits.sees(w, i, key.to_i32(), full) & key.lt(redo.keys);
        // A score of -inf hides its key.
        (score, seen & !score.eq(f32::NEG_INFINITY))
    }

    fn add_keys<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k, A>,
        rows: &ThreadRows<'k>,
        (first, tag): (Val<'k, u32>, Option<Tag<'k>>),
        o: &A,
        sums: &Sums<'_, 'k>,
    ) {
        let own = A::lane_in_row(w);
        let p: Vec<Val<'k, f32>> = (0..A::ROWS)
            .map(|i| {
                let (score, seen) = self.score(w, redo, rows, i, (first, tag));
                let power = score.mul_add(redo.scale, -(sums.max[i] * redo.scale));
                let p = match redo.exp {
                    Exp::Sas { .. } => exp2(redo.exp, Element::ALONE, power),
                    _ => power.exp2(),
                };
                if let Some(sums) = sums.p {
                    sums[i].set(seen.select::<f32>(sums[i].get() + p, sums[i].get()));
                }
                seen.select::<f32>(p, HIDDEN)
            })
            .collect();
        for other in 0..A::LANES {
            let p: Vec<_> = p.iter().map(|&p| if other == 0 { p } else { w.exchange(p, other) }).collect();
            let key = redo.inside(first + (own ^ other));
            let value = self.tensors[2].at(redo, Of::V, key, rows.kv_head);
            let some: Vec<_> = p.iter().map(|p| !p.eq(HIDDEN)).collect();
            let some = some.into_iter().reduce(|a, b| a | b).expect("bug in fulgurite: a thread without rows");
            w.when(some, |w| {
                let starts = (0..o.cols() / A::PERIOD).flat_map(|n| (0..A::RUN).step_by(2).map(move |at| (n, at)));
                for (period, first) in starts {
                    let col = A::first_col(w) + (A::PERIOD * period + first);
                    let col = redo.first_column.map_or(col, |first| first + col);
                    // Columns past the end of a row are not stored: read the last ones instead.
                    let col = col.min(self.value_dim - 2);
                    let halves = value.load(w, col / 2).split();
                    for (i, &p) in p.iter().enumerate() {
                        for (half, value) in halves.into_iter().enumerate() {
                            let at = A::index(i, period as usize, first as usize + half);
                            let x = o.elements().nth(at).expect("bug in fulgurite: counted above");
                            o.set(at, p.eq(HIDDEN).select::<f32>(x, p.mul_add(value.widen(), x)));
                        }
                    }
                }
            });
        }
    }

    /// Dot product of the thread's `i`-th query and a key.
    fn dot<A>(
        &self,
        w: &Scope<'k, Group>,
        redo: &Redo<'_, 'k, A>,
        rows: &ThreadRows<'k>,
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

/// Words of shared memory that a warpgroup's warps use to agree.
const WARPS: u32 = 4;

/// The tiles of a CTA to compute again after its last tile: one list for each warpgroup.
///
/// A list takes one word of shared memory, the index of its last tile plus 1; 0 means that it is empty. The link to the
/// tile before it is stored in place of the LSE of the tile's first row, until the tile is computed again: twice that
/// index plus 1, and 1 more if the LSE is NaN.
pub struct SpoiledTiles<'k> {
    last: Shared<'k, u32>,
    /// For each warp, whether one of its rows needs the second computation.
    wanted: Shared<'k, u32>,
}

impl<'k> SpoiledTiles<'k> {
    /// Allocates the lists of a CTA with `groups` compute warpgroups.
    pub fn allocate(k: &'k Builder, groups: u32) -> SpoiledTiles<'k> {
        SpoiledTiles { last: k.shared("spoiled", groups), wanted: k.shared("wanted", WARPS * groups) }
    }
}

/// The list of one warpgroup.
pub struct SpoiledGroup<'a, 'k> {
    pub tiles: &'a SpoiledTiles<'k>,
    pub epilogue: &'a Epilogue<'a, 'k>,
    pub barrier: &'a GroupBarrier,
    /// Index of the warpgroup.
    pub group: Val<'k, u32>,
}

impl<'k> SpoiledGroup<'_, 'k> {
    /// Empties the list.
    pub fn start(&self, w: &Scope<'k, Group>) {
        w.when(w.thread_in_group().eq(0), |w| self.tiles.last.store(w, self.group, 0u32));
    }

    /// Adds a tile to the list if one of its sums is not finite. The epilogue has written its rows. `index` computes the
    /// tile's index.
    pub fn watch<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        work: &Work<'k>,
        o: &A,
        index: impl FnOnce() -> Val<'k, u32>,
    ) {
        // A value that is not finite spoils its column in all rows that are multiplied with it, so the first row of the
        // warpgroup is enough to find it.
        w.when_rarely(w.any(not_finite(o, 0)), |w| {
            let first = self.epilogue.first_row::<A>(work);
            let lse = self.epilogue.lse_rows_of(work);
            // Rows past the last one are not stored, and need nothing.
            let writes = w.thread_in_group().eq(0) & first.lt(lse.room);
            w.when(writes, |w| {
                let (at, row) = (self.epilogue.lse.at_wide(lse.start), lse.before + first);
                let own = at.load(w, row);
                let link = self.tiles.last.load(w, self.group) * 2 + own.ne(own).select::<u32>(1, 0);
                at.store(w, row, link.to_f32_bits());
                self.tiles.last.store(w, self.group, index() + 1);
            });
        });
    }

    /// Takes each tile from the list: finds it by its index, and calls `again` if a row is not NaN. TMA has
    /// stored the rows of all tiles.
    pub fn each<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        find: impl FnOnce(&Scope<'k, Group>, Val<'k, u32>) -> Work<'k>,
        again: impl FnOnce(&Scope<'k, Group>, &Work<'k>),
    ) {
        w.sync_group(self.barrier);
        let last = w.var(self.tiles.last.load(w, self.group));
        w.repeat(|w, leave| {
            leave.when(last.get().eq(0));
            let work = find(w, last.get() - 1);
            let first = self.epilogue.first_row::<A>(&work);
            let lse = self.epilogue.lse_rows_of(&work);
            let at = self.epilogue.lse.at_wide(lse.start);
            let link = at.load(w, lse.before + first).to_bits();
            // The first row's LSE is replaced by the link, which tells whether it was NaN.
            let own = w.var(0u32);
            w.when(A::is_first_of_row(w), |w| {
                for row in (0..A::ROWS).map(|i| A::first_row(w) + A::row_offset(i)) {
                    w.when((first + row).lt(lse.room), |w| {
                        let x = at.load(w, lse.before + first + row);
                        let number = row.eq(0).select::<u32>((link & 1) ^ 1, x.eq(x).select::<u32>(1, 0));
                        own.set(own.get() | number);
                    });
                }
            });
            let some = w.any(own.get().ne(0)).select::<u32>(1, 0);
            let words = self.group * WARPS;
            w.when(w.lane().eq(0), |w| self.tiles.wanted.store(w, words + w.thread_in_group() / 32, some));
            w.sync_group(self.barrier);
            let wanted = (0..WARPS).map(|i| self.tiles.wanted.load(w, words + i)).reduce(|a, b| a | b);
            let wanted = wanted.expect("bug in fulgurite: a warpgroup without warps");
            w.choose(
                wanted.ne(0),
                |w| again(w, &work),
                |w| {
                    let writes = w.thread_in_group().eq(0);
                    w.when(writes, |w| at.store(w, lse.before + first, f32::NAN));
                },
            );
            last.set(link >> 1);
            // The next turn overwrites the words of the warps.
            w.sync_group(self.barrier);
        });
    }
}
