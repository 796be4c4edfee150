//! Forward attention on Hopper for few queries and many keys: the keys are split over blocks, the partial results merged.
//!
//! A key/value head is read once for all query heads of its group: row r of a tile is query r / group, head r % group.
//! One thread loads keys and values as far ahead as shared memory allows, a warpgroup gathers the rows of Q, which lie
//! where no box of the copy engine finds them for every group, and one warpgroup computes. A tile's keys are cut into
//! splits by a rule of its own length ([`Cut`]); splits of a tile run on neighbouring blocks, and the last one to be
//! done merges what the others left ([`partial`](super::partial)).
//!
//! Bound by memory: 64 rows are multiplied however few there are, which takes about half the time that their keys take
//! to come.

use super::partial::{Partials, Slot};
use super::softmax::Softmax;
use super::span::{Lengths, Limits, Spans};
use fulgurite_core::{Exp, Mask, Rescale};
use fulgurite_ptx::{
    BuildError, Builder, Divisor, Fragment, Group, Half, Kernel, Major, Pair, Pointer, Scope, Sum, Target, Tensor,
    Thread, Tile, TileShape, Val, Warpgroups, Word,
};

/// Packed rows of a tile: what a warpgroup multiplies.
pub const ROWS: u32 = 64;
/// Elements of 16 bytes.
const UNIT: u32 = 8;
/// Units that a gathering thread has under way.
const GATHERED: u32 = 8;

/// How the kernel is cut: measured choices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Keys of a block.
    pub cols: u32,
    /// Stages of K and of V.
    pub depth: u32,
    /// Tiles of Q that there is room for: two let the next be gathered while one is in use.
    pub queries: u32,
    /// Registers of a thread that computes, loads, gathers.
    pub registers: [u32; 3],
    /// How the running maximum is kept.
    pub rescale: Rescale,
}

impl Tuning {
    /// As many keys under way as shared memory holds, in blocks of 64, for padded head dimensions.
    pub fn hopper([d, dv]: [u32; 2]) -> Tuning {
        /// What is left of shared memory beside barriers.
        const BYTES: u32 = 225 << 10;
        let cols = 64;
        // A second tile of Q may cost a third of what large heads could have under way.
        let queries = if d > 128 { 1 } else { 2 };
        let [queries_bytes, stage_bytes] = [ROWS * d * 2 * queries, cols * (d + dv) * 2];
        let depth = ((BYTES - queries_bytes) / stage_bytes).clamp(2, 8);
        let rescale = Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT);
        Tuning { cols, depth, queries, registers: [240, 40, 96], rescale }
    }
}

/// What of a problem shapes the kernel's text: neither lengths nor numbers of heads.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of v and o: multiples of 8.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// How p is computed.
    pub exp: Exp,
}

impl Features {
    /// Head dimensions as tiles have them: whole steps of a product.
    pub fn padded(&self) -> [u32; 2] {
        self.dims.map(|d| d.next_multiple_of(16))
    }
}

/// How a tile's blocks of keys are cut into splits, by the tile's own lengths alone.
///
/// About 16 splits of 256 to 512 keys: so many fill a GPU with eight key/value heads, and a shorter one costs more to
/// merge than it saves. Long sequences have longer splits, at most `2^most_log2`: the last block reads them all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Keys of a block.
    pub cols: u32,
    /// Splits that a tile has at most, as a power of two.
    pub most_log2: u32,
}

impl Cut {
    const WANTED_LOG2: u32 = 4;
    const KEYS: [u32; 2] = [256, 512];

    /// For tiles of so many packed rows: merging is to read half a megabyte or so.
    pub fn of(cols: u32, rows: u64) -> Cut {
        let most_log2 = match rows {
            ..=16 => 6,
            17..=32 => 5,
            _ => 4,
        };
        Cut { cols, most_log2 }
    }

    /// Shortest and longest split among 16, in blocks.
    fn range(cols: u32) -> [u32; 2] {
        Self::KEYS.map(|keys| keys.div_ceil(cols))
    }

    /// How many splits so many blocks of keys have. The kernel computes the same in [`Cut::of_blocks`].
    pub fn splits(self, blocks: u64) -> u64 {
        let [least, middle] = Self::range(self.cols).map(u64::from);
        let sixteenth = blocks.div_ceil(1 << Self::WANTED_LOG2);
        let each = sixteenth.clamp(least, middle).max(blocks.div_ceil(1 << self.most_log2));
        blocks.div_ceil(each)
    }

    /// No fewer than the splits of any number of blocks up to this one: longer splits may be fewer.
    pub fn most(self, blocks: u64) -> u64 {
        let [least, _] = Self::range(self.cols).map(u64::from);
        blocks.div_ceil(least).min(1 << self.most_log2)
    }

    /// Blocks of a split, and how many splits there are.
    fn of_blocks<'k>(cols: u32, most_log2: Val<'k, u32>, blocks: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let [least, middle] = Self::range(cols);
        let sixteenth = (blocks + ((1 << Self::WANTED_LOG2) - 1)) >> Self::WANTED_LOG2;
        let most = blocks.literal(1) << most_log2;
        let each = sixteenth.max(least).min(middle).max((blocks + most - 1) >> most_log2);
        [each, (blocks + each - 1) / each]
    }
}

/// A split of a tile.
#[derive(Clone, Copy)]
struct Work<'k> {
    slot: Slot<'k>,
    /// Queries of the first and the last row.
    queries: [Val<'k, u32>; 2],
    /// Blocks of keys, from the first to past the last.
    blocks: [Val<'k, u32>; 2],
}

/// The kernel for few queries.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_few", target, |k| Few::<T>::new(k, features, tuning).build())
}

/// The kernel under construction: its parameters.
struct Few<'k, T> {
    k: &'k Builder,
    tuning: Tuning,
    spans: Spans,
    exp: Exp,
    dims: [u32; 2],
    padded: [u32; 2],
    keys: Tensor<'k>,
    values: Tensor<'k>,
    q: Pointer<'k, u32>,
    /// Words from one batch, query and head to the next.
    q_strides: [Val<'k, u64>; 3],
    items: Val<'k, u32>,
    /// Packed rows of all queries.
    rows: Val<'k, u32>,
    most_log2: Val<'k, u32>,
    /// Splits of a tile that items count, tiles of a key/value head, key/value heads, query heads of each.
    divisors: [Divisor<'k>; 4],
    lengths: Lengths<'k>,
    scale: Val<'k, f32>,
    counters: Pointer<'k, u32>,
    partials: Partials<'k, T>,
}

impl<'k, T: Half> Few<'k, T>
where
    Pair<T>: Word,
{
    fn new(k: &'k Builder, features: &Features, tuning: Tuning) -> Self {
        let padded = features.padded();
        // Axes: element, row, head, batch.
        let tensor = |name, d| k.tensor(name, TileShape::new(T::NUMBER, tuning.cols, d), 4);
        let (keys, values) = (tensor("k", padded[0]), tensor("v", padded[1]));
        let q = k.pointer::<u32>("q");
        let q_strides = ["q_batch", "q_row", "q_head"].map(|name| k.param::<u64>(name));
        // Two words that no launch changes for good, the second of them counted up; then one for each tile, all 0.
        let counters = k.pointer::<u32>("counters");
        let [items, rows, most_log2, k_len] = ["items", "rows", "most_log2", "k_len"].map(|name| k.param::<u32>(name));
        let divisors = ["splits", "tiles", "kv_heads", "group"].map(|name| k.divisor(name));
        let scale = k.param::<f32>("scale_log2");
        let [bottom_right, top_left] = ["bottom_right", "top_left"].map(|name| k.param::<i32>(name));
        let partials = Partials::new(k, features.dims[1], divisors[3], divisors[2], counters, scale);
        Few {
            k,
            tuning,
            spans: Spans::of(&features.mask),
            exp: features.exp,
            dims: features.dims,
            padded,
            keys,
            values,
            q,
            q_strides,
            items,
            rows,
            most_log2,
            divisors,
            lengths: Lengths { k: k_len.to_i32(), bottom_right, top_left },
            scale,
            counters,
            partials,
        }
    }

    /// Items in the order in which blocks take them: splits of a tile, tiles of a head, heads, batches.
    fn find(&self, item: Val<'k, u32>) -> Work<'k> {
        let [splits, tiles, kv_heads, group] = self.divisors;
        let [tile, split] = splits.div_rem(item);
        let [pair, up] = tiles.div_rem(tile);
        let [batch, head] = kv_heads.div_rem(pair);
        let row = up * ROWS;
        let rows = (self.rows - row).min(ROWS);
        let queries = [row, row + rows - 1].map(|row| group.div_rem(row)[0]);
        let [first, last] = queries.map(|query| query.to_i32());
        let [start, end] = self.spans.blocks(first, last, self.tuning.cols, self.lengths);
        let [each, count] = Cut::of_blocks(self.tuning.cols, self.most_log2, end - start);
        let first = start + split * each;
        let slot = Slot { item, tile, split, splits: count, batch, head, row, rows };
        Work { slot, queries, blocks: [first, (first + each).min(end)] }
    }

    /// Each item of this block that has keys. Others count splits of a longer tile.
    #[track_caller]
    fn each<W: fulgurite_ptx::Who>(&self, w: &Scope<'k, W>, f: impl FnOnce(&Scope<'k, W>, Work<'k>)) {
        w.each(w.block(), self.items, w.blocks(), |w, item| {
            let work = self.find(item);
            // Not by the number of splits, a division that only who merges needs.
            w.when(work.blocks[0].lt(work.blocks[1]), |w| f(w, work));
        });
    }

    fn build(self) {
        let (k, tuning) = (self.k, self.tuning);
        let [d, dv] = self.padded;
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        let queries = k.pipe("q", tuning.queries, &[shape(ROWS, d)]);
        let keys = k.pipe("k", tuning.depth, &[shape(tuning.cols, d)]);
        let values = k.pipe("v", tuning.depth, &[shape(tuning.cols, dv)]);
        let last = k.shared::<u32>("last", 1);
        let [compute, load, gather] = tuning.registers;

        k.role("load", Warpgroups(1).registers(load), |w| {
            w.one_thread(|t| {
                self.each(t, |t, work| {
                    let zero = t.constant(0u32);
                    let at = |n: Val<'k, u32>| [zero, n * tuning.cols, work.slot.head, work.slot.batch];
                    let load_k = |t: &Scope<'k, Thread>, n| {
                        keys.put(t, |t, stage| stage.load(t, stage.tile(0), &self.keys, &at(n)));
                    };
                    let load_v = |t: &Scope<'k, Thread>, n| {
                        values.put(t, |t, stage| stage.load(t, stage.tile(0), &self.values, &at(n)));
                    };
                    // In the order of use: scores run a block ahead of p v, from the last block to the first.
                    let n = t.var(work.blocks[1] - 1);
                    load_k(t, n.get());
                    t.repeat(|t, leave| {
                        let this = n.get();
                        leave.when(this.eq(work.blocks[0]));
                        load_k(t, this - 1);
                        load_v(t, this);
                        n.set(this - 1);
                    });
                    load_v(t, work.blocks[0]);
                });
            });
        });

        k.role("gather", Warpgroups(1).registers(gather), |w| {
            let barrier = w.group_barrier();
            self.each(w, |w, work| queries.fill(w, &barrier, |w, tiles| self.gather(w, &work, tiles[0])));
        });

        k.role("compute", Warpgroups(1).registers(compute), |w| {
            let s = w.accumulators(tuning.cols);
            let o = w.accumulators(dv);
            // Two, so that one is packed while the product of the other runs.
            let p = [w.fragment::<T>(tuning.cols), w.fragment::<T>(tuning.cols)];
            let softmax = Softmax::new(w, self.scale, tuning.rescale, self.exp, self.counters);
            let limits = Limits::new(w, &self.spans);
            let barrier = w.group_barrier();

            let scores = |w: &Scope<'k, Group>, q: Tile<'k>| {
                let key = keys.wait(w)[0];
                w.multiply(&s, q.operand(Major::Inner), key.operand(Major::Inner), Sum::Fresh);
            };
            let output = |w: &Scope<'k, Group>, p: &Fragment<'k, T>| {
                let value = values.wait(w)[0];
                w.multiply_fragment(&o, p, value.operand(Major::Outer), Sum::Onto, |_| {});
            };
            let mask = |w: &Scope<'k, Group>, n: Val<'k, u32>| limits.apply(w, &s, (n * tuning.cols).to_i32());
            let q = |w: &Scope<'k, Group>| queries.current(w)[0];

            self.each(w, |w, work| {
                let [first, end] = work.blocks;
                let n = w.var(end - 1);
                self.limit(w, &limits, &work);
                (0..o.elements().count()).for_each(|i| o.set(i, 0.0));
                queries.wait(w);
                scores(w, q(w));
                w.wait_products(0);
                keys.done(w);
                mask(w, n.get());
                softmax.first(w, &s, &p[0]);
                // One block: its scores beside p v of the block before.
                let step = |w: &Scope<'k, Group>, old: &Fragment<'k, T>, new: &Fragment<'k, T>| {
                    n.set(n.get() - 1);
                    scores(w, q(w));
                    output(w, old);
                    w.wait_products(1);
                    keys.done(w);
                    mask(w, n.get());
                    softmax.next(w, &s, new, &o);
                    values.done(w);
                };
                w.repeat(|w, leave| {
                    leave.when(n.get().eq(first));
                    step(w, &p[0], &p[1]);
                    let done = n.get().eq(first);
                    w.when(done, |_| p[0].copy(&p[1]));
                    leave.when(done);
                    step(w, &p[1], &p[0]);
                });
                queries.done(w);
                output(w, &p[0]);
                let totals = softmax.totals(w);
                w.wait_products(0);
                values.done(w);
                self.partials.finish(w, &work.slot, &o, totals, &barrier, last);
            });
        });
    }

    /// Where the thread's rows begin and end to see keys. Rows past the tile's last repeat it.
    fn limit(&self, w: &Scope<'k, Group>, limits: &Limits<'k>, work: &Work<'k>) {
        let [_, _, _, group] = self.divisors;
        let Slot { row, rows, .. } = work.slot;
        let queries = [0, 8].map(|below| {
            let row = row + (w.first_row() + below).min(rows - 1);
            group.div_rem(row)[0].to_i32()
        });
        limits.set_queries(w, queries, work.queries.map(|query| query.to_i32()), self.lengths);
    }

    /// Writes the tile's rows of Q, each unit of 16 bytes by a thread. Rows past the last repeat it: any finite data
    /// would do, and so no row is the reason to do a block again that has none of the call's rows.
    fn gather(&self, w: &Scope<'k, Group>, work: &Work<'k>, tile: Tile<'k>) {
        let [_, _, _, group] = self.divisors;
        let Slot { batch, head, row, rows, .. } = work.slot;
        let (units, threads) = (self.padded[0] / UNIT, 128);
        let real = self.dims[0] / UNIT;
        let [batch_stride, row_stride, head_stride] = self.q_strides;
        let start = self.q.at_wide(batch.to_u64().mul_wide_64(batch_stride));
        let thread = w.thread_in_group();
        let all: Vec<u32> = (0..ROWS * units / threads).collect();
        // Many loads, then their stores: one round trip to memory for all.
        for some in all.chunks(GATHERED as usize) {
            let loaded: Vec<_> = some
                .iter()
                .map(|i| {
                    let index = thread + i * threads;
                    let (line, unit) = (index / units, index % units);
                    let [query, own] = group.div_rem(row + line.min(rows - 1));
                    let own = head * group.value() + own;
                    let at = query.to_u64().mul_wide_64(row_stride) + own.to_u64().mul_wide_64(head_stride);
                    // A unit past the last is read as the last, and written as zeros.
                    let from = start.at_wide(at).load_some::<_, 4>(w, unit.min(real - 1) * 4);
                    let words = match real == units {
                        true => from,
                        false => from.map(|word| unit.lt(real).select::<u32>(word, 0)),
                    };
                    (line, unit, words)
                })
                .collect();
            loaded.into_iter().for_each(|(line, unit, words)| tile.write_unit(w, line, unit, words));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_follow_from_the_length() {
        let splits = |rows: u64, keys: u64| Cut::of(64, rows).splits(keys.div_ceil(64));
        assert_eq!([1, 256, 257, 4096, 8192].map(|keys| splits(4, keys)), [1, 1, 2, 16, 16]);
        // Merging many rows is dear: fewer splits.
        assert_eq!([4, 32, 64].map(|rows| splits(rows, 65536)), [64, 32, 16]);
    }

    #[test]
    fn no_length_has_more_splits_than_its_bound() {
        for cut in [Cut::of(64, 1), Cut::of(64, 64), Cut::of(128, 20)] {
            let mut most = 0;
            for blocks in 1..5000 {
                most = most.max(cut.splits(blocks));
                assert!(most <= cut.most(blocks), "{cut:?}, {blocks} blocks");
            }
        }
    }
}
