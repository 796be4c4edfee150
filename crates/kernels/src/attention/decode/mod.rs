//! Forward attention on Hopper for few queries and many keys: the keys are split over blocks, the partial results merged.
//!
//! A key/value head is read once for all query heads of its group: row r of a tile is query r / group, head r % group.
//! One thread loads keys and values as far ahead as shared memory allows, a warpgroup gathers the rows of Q, which lie
//! where no box of the copy engine finds them for every group, and one warpgroup computes. A tile's keys are cut into
//! splits by a rule of its own length ([`Cut`]); splits of a tile run on neighbouring blocks, and the last one to be
//! done merges what the others left (`partial`).
//!
//! Bound by memory: 64 rows are multiplied however few there are, which takes about half the time that their keys take
//! to come.

pub(crate) mod plan;

use crate::attention::forward::Features;
use crate::attention::forward::config::Added;
use crate::parts::mask::{Block, Lengths, Limits, Spans};
use crate::parts::merge::{Merged, Partials, Slot};
use crate::parts::modifier::{Modify, Parameters, Place, Tanh};
use crate::parts::nonfinite::{Careful, Redo, Rows};
use crate::parts::schedule::{Of, Sequence, Unequal, Work as Tiled};
use crate::parts::softmax::{Settled, Softmax, Totals};
use fulgurite_core::Rescale;
use fulgurite_ptx::{
    Acc, BuildError, Builder, Divisor, Fragment, Group, Half, Kernel, Major, Pair, Pointer, Scope, Sum, Target, Tensor,
    Thread, Tile, TileShape, Val, Warpgroups, Who, Word,
};
use std::f32::consts::LOG2_E;

/// Packed rows of a tile: what a warpgroup multiplies.
pub const ROWS: u32 = 64;
/// Elements of 16 bytes.
const UNIT: u32 = 8;
/// Units that a gathering thread has under way.
const GATHERED: u32 = 8;

/// How the kernel is cut: measured choices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeConfig {
    /// Keys of a block.
    pub cols: u32,
    /// Stages of K and of V.
    pub depth: u32,
    /// Tiles of Q that there is room for: two let the next be gathered while one is in use.
    pub queries: u32,
    /// Registers of a thread that computes, loads, gathers.
    pub registers: [u32; 3],
    /// Whether a block may take all splits of a tile, one after the other, and merge them in registers.
    pub whole: bool,
    /// How the running maximum is kept.
    pub rescale: Rescale,
}

impl DecodeConfig {
    /// As many keys under way as shared memory holds, in blocks of 64, for padded head dimensions.
    pub fn hopper([d, dv]: [u32; 2]) -> DecodeConfig {
        /// What is left of shared memory beside barriers.
        const BYTES: u32 = 225 << 10;
        /// What memory needs to have under way; more only makes blocks run apart.
        const UNDER_WAY: u32 = 96 << 10;
        let cols = 64;
        // A second tile of Q may cost a third of what large heads could have under way.
        let queries = if d > 128 { 1 } else { 2 };
        let [queries_bytes, stage_bytes] = [ROWS * d * 2 * queries, cols * (d + dv) * 2];
        let wanted = (UNDER_WAY / stage_bytes).clamp(3, 8);
        let depth = wanted.min((BYTES - queries_bytes) / stage_bytes).max(2);
        let rescale = Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT);
        // A second o in registers: larger ones have no room for it.
        DecodeConfig { cols, depth, queries, registers: [240, 40, 152], whole: dv <= 128, rescale }
    }
}

impl DecodeConfig {
    /// The same with room for what a problem's features keep in registers.
    pub fn with_room(self, features: &Features) -> DecodeConfig {
        let kept = features.ragged.any() || !features.modifiers.is_empty();
        match features.dims[1] {
            129.. if kept => DecodeConfig { cols: 32, depth: 2 * self.depth, ..self },
            _ => self,
        }
    }
}

/// Head dimensions as tiles have them: whole steps of a product.
pub fn padded(dims: [u32; 2]) -> [u32; 2] {
    dims.map(|d| d.next_multiple_of(16))
}

/// How a tile's blocks of keys are cut into splits, by the sequence's own lengths alone.
///
/// About 8 splits of 512 to 1024 keys: a multiprocessor takes a tenth of a terabyte a second, so that half of them read as
/// fast as memory can give, and a shorter split costs more to merge than it saves. Long sequences have up to 16 longer
/// ones: the last block reads what all others left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Keys of a block.
    pub cols: u32,
    /// Splits that a tile has at most, as a power of two.
    most_log2: u32,
}

impl Cut {
    const WANTED_LOG2: u32 = 3;
    const KEYS: [u32; 2] = [512, 1024];
    /// Tiles of up to so many rows have 2^most_log2 splits at most; all others [`WANTED_LOG2`](Self::WANTED_LOG2).
    const MOST: [(u32, u32); 1] = [(ROWS, 4)];

    /// For a sequence of so many packed rows.
    pub fn of(cols: u32, rows: u64) -> Cut {
        let few = Self::MOST.into_iter().find(|(most, _)| rows <= u64::from(*most));
        Cut { cols, most_log2: few.map_or(Self::WANTED_LOG2, |(_, log2)| log2) }
    }

    /// Shortest and longest split among those wanted, in blocks.
    fn range(cols: u32) -> [u32; 2] {
        Self::KEYS.map(|keys| keys.div_ceil(cols))
    }

    /// How many splits so many blocks of keys have. The kernel computes the same in `in_kernel`.
    pub fn splits(self, blocks: u64) -> u64 {
        let [least, middle] = Self::range(self.cols).map(u64::from);
        let eighth = blocks.div_ceil(1 << Self::WANTED_LOG2);
        let each = eighth.clamp(least, middle).max(blocks.div_ceil(1 << self.most_log2));
        blocks.div_ceil(each)
    }

    /// No fewer than the splits of any number of blocks up to this one: longer splits may be fewer.
    pub fn most(self, blocks: u64) -> u64 {
        let [least, _] = Self::range(self.cols).map(u64::from);
        blocks.div_ceil(least).min(1 << self.most_log2)
    }

    /// Blocks of a split, and how many splits there are.
    fn in_kernel<'k>(cols: u32, rows: Val<'k, u32>, blocks: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let wanted = rows.literal(Self::WANTED_LOG2);
        let most_log2 = Self::MOST.iter().rev().fold(wanted, |rest, &(most, log2)| rows.le(most).select(log2, rest));
        let [least, middle] = Self::range(cols);
        let eighth = (blocks + ((1 << Self::WANTED_LOG2) - 1)) >> Self::WANTED_LOG2;
        let most = blocks.literal(1) << most_log2;
        let each = eighth.max(least).min(middle).max((blocks + most - 1) >> most_log2);
        [each, (blocks + each - 1) / each]
    }
}

/// Splits of a tile that a block takes: one of them, or all.
#[derive(Clone, Copy)]
struct Work<'k> {
    slot: Slot<'k>,
    /// Queries of the first and the last row.
    queries: [Val<'k, u32>; 2],
    /// The tile's blocks of keys, from the first to past the last, and how many of them a split has.
    tile_blocks: [Val<'k, u32>; 2],
    each: Val<'k, u32>,
    lengths: Lengths<'k>,
    /// Where sequences have lengths of their own.
    sequence: Option<Sequence<'k>>,
}

impl<'k> Work<'k> {
    /// Blocks of keys of a split, from the first to past the last.
    fn blocks(&self, split: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let first = self.tile_blocks[0] + split * self.each;
        [first, (first + self.each).min(self.tile_blocks[1])]
    }

    /// As the other kernel has it: with the blocks of these splits.
    fn tiled(&self) -> Tiled<'k> {
        let Slot { row, head, batch, ours: [first, end], .. } = self.slot;
        let blocks = [self.blocks(first)[0], self.blocks(end - 1)[1]];
        Tiled { row, head, batch, blocks, sequence: self.sequence }
    }
}

/// The kernel for few queries. Head dimensions of the features are those of the tensors, multiples of 8.
pub fn kernel<T: Half>(target: Target, features: &Features, config: DecodeConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_decode", target, |k| DecodeKernel::<T>::new(k, features, config).build())
}

/// Where sequences begin and end.
enum Sequences<'k> {
    Equal {
        q_len: Val<'k, u32>,
        lengths: Lengths<'k>,
        counted: Option<[Val<'k, u32>; 2]>,
    },
    /// With lengths of their own; and the most blocks of keys that splits are counted for.
    Unequal {
        unequal: Unequal<'k>,
        most: Val<'k, u32>,
    },
}

/// The kernel under construction: its parameters.
struct DecodeKernel<'a, 'k, T> {
    k: &'k Builder,
    features: &'a Features,
    config: DecodeConfig,
    spans: Spans,
    padded: [u32; 2],
    keys: Tensor<'k>,
    values: Tensor<'k>,
    q: Pointer<'k, u32>,
    /// Words from one batch, query and head to the next.
    q_strides: [Val<'k, u64>; 3],
    items: Val<'k, u32>,
    /// Items, the first ones, that are all splits of a tile.
    whole: Option<Val<'k, u32>>,
    /// Splits of a tile that items count, tiles of a key/value head, key/value heads, query heads of each.
    divisors: [Divisor<'k>; 4],
    sequences: Sequences<'k>,
    scale: Val<'k, f32>,
    counters: Pointer<'k, u32>,
    parameters: Parameters<'k>,
    careful: Option<Careful<'k, T>>,
    partials: Partials<'k, T>,
}

impl<'a, 'k, T: Half> DecodeKernel<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(k: &'k Builder, features: &'a Features, config: DecodeConfig) -> Self {
        let padded = padded(features.dims);
        let tensor = |name, d| {
            let tile = TileShape::new(T::NUMBER, config.cols, d);
            // Axes: element, row, head, batch.
            if features.ragged.any() { k.ragged_tensor(name, tile) } else { k.tensor(name, tile, 4) }
        };
        let (keys, values) = (tensor("k", padded[0]), tensor("v", padded[1]));
        let q = k.pointer::<u32>("q");
        let q_strides = ["q_batch", "q_row", "q_head"].map(|name| k.param::<u64>(name));
        let counters = k.pointer::<u32>("counters");
        let items = k.param::<u32>("items");
        let whole = config.whole.then(|| k.param::<u32>("whole"));
        let divisors = ["splits", "tiles", "kv_heads", "group"].map(|name| k.divisor(name));
        let scale = k.param::<f32>("scale");
        let sequences = match features.ragged.any() {
            true => Sequences::Unequal { unequal: Unequal::new(k, features.ragged), most: k.param("most_blocks") },
            false => {
                let [q_len, k_len] = ["q_len", "k_len"].map(|name| k.param::<u32>(name));
                let [bottom_right, top_left] = ["bottom_right", "top_left"].map(|name| k.param::<i32>(name));
                let counted = (!features.modifiers.is_empty())
                    .then(|| ["first_key", "all_keys"].map(|name| k.param::<u32>(name)));
                Sequences::Equal { q_len, lengths: Lengths { k: k_len.to_i32(), bottom_right, top_left }, counted }
            }
        };
        let parameters = Parameters::new(k, &features.modifiers);
        let careful = features.hides_elements().then(|| Careful::new(k));
        DecodeKernel {
            k,
            features,
            config,
            spans: Spans::of(&features.mask),
            padded,
            keys,
            values,
            q,
            q_strides,
            items,
            whole,
            divisors,
            sequences,
            scale,
            counters,
            parameters,
            careful,
            partials: Partials::new(k, features, divisors[3], counters),
        }
    }

    /// Items in the order in which blocks take them: whole tiles, then splits of a tile; tiles of a head, heads, batches.
    fn find<W: Who>(&self, w: &Scope<'k, W>, item: Val<'k, u32>) -> Work<'k> {
        let [splits, tiles, kv_heads, group] = self.divisors;
        let (tile, split, takes_all) = match self.whole {
            Some(whole) => {
                let all = item.lt(whole);
                let [tile, split] = splits.div_rem(item - whole);
                (all.select::<u32>(item, whole + tile), all.select::<u32>(0, split), Some(all))
            }
            None => {
                let [tile, split] = splits.div_rem(item);
                (tile, split, None)
            }
        };
        let [pair, up] = tiles.div_rem(tile);
        let [batch, head] = kv_heads.div_rem(pair);
        let row = up * ROWS;
        let (sequence, room, q_len, lengths) = match &self.sequences {
            Sequences::Equal { q_len, lengths, .. } => (None, *q_len, *q_len, *lengths),
            Sequences::Unequal { unequal, .. } => {
                let sequence = unequal.sequence(w, batch, &self.spans);
                // Rows that are not in use are as good as the last that is.
                (Some(sequence), sequence.q_room, sequence.q_len.max(1), sequence.lengths())
            }
        };
        let all = room * group.value();
        let rows = match sequence {
            Some(_) => (all.max(row) - row).min(ROWS),
            None => (all - row).min(ROWS),
        };
        let queries = [row, row + rows - 1].map(|row| {
            let query = group.div_rem(row)[0];
            if sequence.is_some() { query.min(q_len - 1) } else { query }
        });
        let [first, last] = queries.map(|query| query.to_i32());
        let [start, mut end] = self.spans.blocks(first, last, self.config.cols, lengths);
        if let Sequences::Unequal { most, .. } = &self.sequences {
            // A longer sequence than the call was told of: no block would count its last splits.
            end = end.min(start + *most);
        }
        let [each, count] = Cut::in_kernel(self.config.cols, q_len * group.value(), end - start);
        let used = sequence.map(|s| (s.q_start, s.q_len));
        let ours = [split, takes_all.map_or(split + 1, |all| all.select::<u32>(count, split + 1))];
        let slot = Slot { tile, ours, splits: count, batch, head, row, rows, used };
        Work { slot, queries, tile_blocks: [start, end], each, lengths, sequence }
    }

    /// Each item of this block that has something to do. Others count splits of a longer tile.
    #[track_caller]
    fn each<W: Who>(&self, w: &Scope<'k, W>, f: impl FnOnce(&Scope<'k, W>, Work<'k>)) {
        w.each(w.block(), self.items, w.blocks(), |w, item| {
            let work = self.find(w, item);
            // Not by the number of splits, a division that only who merges needs.
            let [first, end] = work.blocks(work.slot.ours[0]);
            let mut some = first.lt(end);
            if work.sequence.is_some() {
                some = some & work.slot.rows.gt(0);
            }
            w.when(some, |w| f(w, work));
        });
    }

    /// Each split of an item, by its blocks of keys.
    #[track_caller]
    fn each_split<W: Who>(&self, w: &Scope<'k, W>, work: &Work<'k>, f: impl FnOnce(&Scope<'k, W>, [Val<'k, u32>; 2])) {
        let [first, end] = work.slot.ours;
        match self.whole {
            Some(_) => w.each(first, end, 1, |w, split| f(w, work.blocks(split))),
            None => f(w, work.blocks(first)),
        }
    }

    fn build(self) {
        let (k, config, features) = (self.k, self.config, self.features);
        let [d, dv] = self.padded;
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        let queries = k.pipe("q", config.queries, &[shape(ROWS, d)]);
        let keys = k.pipe("k", config.depth, &[shape(config.cols, d)]);
        let values = k.pipe("v", config.depth, &[shape(config.cols, dv)]);
        let last = k.shared::<u32>("last", 1);
        let [compute, load, gather] = config.registers;

        k.role("load", Warpgroups(1).registers(load), |w| {
            w.one_thread(|t| {
                self.each(t, |t, work| {
                    let load_k = |t: &Scope<'k, Thread>, n| {
                        let at = self.key_place(&work, Of::K, n);
                        keys.put(t, |t, stage| stage.load(t, stage.tile(0), &self.keys, &at));
                    };
                    let load_v = |t: &Scope<'k, Thread>, n| {
                        let at = self.key_place(&work, Of::V, n);
                        values.put(t, |t, stage| stage.load(t, stage.tile(0), &self.values, &at));
                    };
                    self.each_split(t, &work, |t, [first, end]| {
                        // In the order of use: scores run a block ahead of p v, from the last block to the first.
                        let n = t.var(end - 1);
                        load_k(t, n.get());
                        t.repeat(|t, leave| {
                            let this = n.get();
                            leave.when(this.eq(first));
                            load_k(t, this - 1);
                            load_v(t, this);
                            n.set(this - 1);
                        });
                        load_v(t, first);
                    });
                });
            });
        });

        k.role("gather", Warpgroups(1).registers(gather), |w| {
            let barrier = w.group_barrier();
            self.each(w, |w, work| queries.fill(w, &barrier, |w, tiles| self.gather(w, &work, tiles[0])));
            if let Sequences::Unequal { unequal, .. } = &self.sequences
                && let Some(rows) = unequal.rest(w)
            {
                let heads = self.divisors[2].value() * self.divisors[3].value();
                self.partials.clear(w, rows, heads);
            }
        });

        k.role("compute", Warpgroups(1).registers(compute), |w| {
            let s = w.accumulators(config.cols);
            let o = w.accumulators(dv);
            // Two, so that one is packed while the product of the other runs.
            let p = [w.fragment::<T>(config.cols), w.fragment::<T>(config.cols)];
            // What the scores are multiplied by in the exponent: modified ones come with the scale in them.
            let scale_log2 = match features.modifiers.score {
                Some(_) => w.constant(LOG2_E * features.modifiers.factors()[1]),
                None => self.scale,
            };
            let softmax = Softmax::new(w, scale_log2, config.rescale, features.exp, Added::ByThreads, self.counters);
            let limits = Limits::new(w, &self.spans);
            let modify = Modify::new(w, &features.modifiers, &self.parameters, self.scale, Tanh::of(T::NUMBER));
            let barrier = w.group_barrier();

            let scores = |w: &Scope<'k, Group>, q: Tile<'k>| {
                let key = keys.wait(w)[0];
                w.multiply(&s, q.operand(Major::Inner), key.operand(Major::Inner), Sum::Fresh);
            };
            let output = |w: &Scope<'k, Group>, p: &Fragment<'k, T>| {
                let value = values.wait(w)[0];
                w.multiply_fragment(&o, p, value.operand(Major::Outer), Sum::Onto, |_| {});
            };
            let q = |w: &Scope<'k, Group>| queries.current(w)[0];

            let merged = self.whole.map(|_| Merged::new(w, dv));

            self.each(w, |w, work| {
                let n = w.var(0u32);
                let counted_from = self.set_tile(w, &limits, &modify, &work);
                // The block's keys may be overwritten from here on.
                let take_scores = |w: &Scope<'k, Group>, n: Val<'k, u32>| {
                    keys.done(w);
                    let first = (n * config.cols).to_i32();
                    if let Some(from) = counted_from {
                        modify.apply(w, &s, first + from.to_i32(), None);
                    }
                    limits.apply(w, &s, &Block { first, full: None });
                };
                // One block: its scores beside p v of the block before.
                let step = |w: &Scope<'k, Group>, old: &Fragment<'k, T>, new: &Fragment<'k, T>| {
                    n.set(n.get() - 1);
                    scores(w, q(w));
                    output(w, old);
                    w.wait_products(1);
                    take_scores(w, n.get());
                    softmax.next(w, &s, new, &o, &mut Settled(softmax.scale));
                    values.done(w);
                };
                // p v of a split's keys in `o`; maxima and sums of its rows.
                let run = |w: &Scope<'k, Group>, [first, end]: [Val<'k, u32>; 2]| {
                    n.set(end - 1);
                    (0..o.elements().count()).for_each(|i| o.set(i, 0.0));
                    scores(w, q(w));
                    w.wait_products(0);
                    take_scores(w, n.get());
                    softmax.first(w, &s, &p[0]);
                    w.repeat(|w, leave| {
                        leave.when(n.get().eq(first));
                        step(w, &p[0], &p[1]);
                        let done = n.get().eq(first);
                        w.when(done, |_| p[0].copy(&p[1]));
                        leave.when(done);
                        step(w, &p[1], &p[0]);
                    });
                    output(w, &p[0]);
                    let totals = softmax.totals(w, &o);
                    w.wait_products(0);
                    values.done(w);
                    totals
                };
                let finish = |w: &Scope<'k, Group>, o: &Acc<'k>, totals: Totals<'k>| {
                    self.partials.finish(w, &work.slot, o, totals, &barrier, last);
                };
                queries.wait(w);
                match &merged {
                    Some(merged) => {
                        merged.clear();
                        self.each_split(w, &work, |w, blocks| {
                            let totals = run(w, blocks);
                            self.redo(w, &work, blocks, &o, &totals, (&limits, &modify, scale_log2));
                            merged.add(&o, totals.scaled(scale_log2));
                        });
                        queries.done(w);
                        finish(w, &merged.o, merged.totals());
                    }
                    None => {
                        let blocks = work.blocks(work.slot.ours[0]);
                        let totals = run(w, blocks);
                        queries.done(w);
                        self.redo(w, &work, blocks, &o, &totals, (&limits, &modify, scale_log2));
                        finish(w, &o, totals.scaled(scale_log2));
                    }
                }
            });
        });
    }

    /// Where the `n`-th block of keys lies in a tensor.
    fn key_place(&self, work: &Work<'k>, of: Of, n: Val<'k, u32>) -> Vec<Val<'k, u32>> {
        let Slot { batch, head, .. } = work.slot;
        let (zero, first) = (n.literal(0), n * self.config.cols);
        match &self.sequences {
            Sequences::Equal { .. } => vec![zero, first, head, batch],
            Sequences::Unequal { unequal, .. } => unequal.slice(&work.tiled(), of).at(zero, first, head).to_vec(),
        }
    }

    /// Query and head of each of the thread's rows. Rows past the tile's last repeat it.
    fn own_rows(&self, w: &Scope<'k, Group>, slot: &Slot<'k>) -> [[Val<'k, u32>; 2]; 2] {
        let [_, _, _, group] = self.divisors;
        [0, 8].map(|below| {
            let [query, own] = group.div_rem(slot.row + (w.first_row() + below).min(slot.rows - 1));
            [query, slot.head * group.value() + own]
        })
    }

    /// Adds up again where a hidden key holds what is no number.
    fn redo(
        &self,
        w: &Scope<'k, Group>,
        work: &Work<'k>,
        blocks: [Val<'k, u32>; 2],
        o: &Acc<'k>,
        totals: &Totals<'k>,
        (limits, modify, scale): (&Limits<'k>, &Modify<'_, 'k>, Val<'k, f32>),
    ) {
        let Some(careful) = &self.careful else { return };
        let rows = |w: &Scope<'k, Group>| {
            let [a, b] = self.own_rows(w, &work.slot);
            Rows { queries: [a[0], b[0]], heads: [a[1], b[1]], kv_head: work.slot.head }
        };
        let (unequal, keys, first) = match (&self.sequences, work.sequence) {
            (Sequences::Unequal { unequal, .. }, Some(s)) => (Some(unequal), s.seen, s.first),
            (Sequences::Equal { counted: Some([first, _]), lengths, .. }, _) => (None, lengths.k.to_u32(), *first),
            _ => unreachable!("bug in fulgurite: a mask that counts no keys"),
        };
        let redo = Redo {
            work: &Tiled { blocks, ..work.tiled() },
            unequal,
            lists: None,
            cols: self.config.cols,
            keys,
            first,
            limits,
            modify,
            rows: &rows,
            first_column: None,
            exp: self.features.exp,
            scale,
        };
        careful.run(w, &redo, o, totals, [&|_| {}, &|_| {}]);
    }

    /// Which keys the thread's rows see, and what modifiers read of them; where these count keys from.
    fn set_tile(
        &self,
        w: &Scope<'k, Group>,
        limits: &Limits<'k>,
        modify: &Modify<'_, 'k>,
        work: &Work<'k>,
    ) -> Option<Val<'k, u32>> {
        let own = self.own_rows(w, &work.slot);
        let queries = own.map(|[query, _]| query.to_i32());
        limits.set_queries(w, queries, work.queries.map(|query| query.to_i32()), work.lengths);
        let [q_len, k_len, first] = match (&self.sequences, work.sequence) {
            (_, Some(s)) => [s.q_len, s.k_len, s.first],
            (Sequences::Equal { q_len, counted: Some([first, all]), .. }, None) => [*q_len, *all, *first],
            _ => return None,
        };
        if self.features.modifiers.is_empty() {
            return None;
        }
        let (batch, heads) = (work.slot.batch, own.map(|[_, head]| head));
        let (q_len, k_len) = (q_len.to_i32(), k_len.to_i32());
        modify.set(w, Place { batch, heads, rows: queries, q_len, k_len });
        Some(first)
    }

    /// Writes the tile's rows of Q, each unit of 16 bytes by a thread. Rows past the last repeat it: any finite data
    /// would do, and so no row is the reason to do a block again that has none of the call's rows.
    fn gather(&self, w: &Scope<'k, Group>, work: &Work<'k>, tile: Tile<'k>) {
        let [_, _, _, group] = self.divisors;
        let Slot { batch, head, row, rows, used, .. } = work.slot;
        let (units, threads) = (self.padded[0] / UNIT, 128);
        let real = self.features.dims[0] / UNIT;
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
                    let query = used.map_or(query, |(q_start, _)| q_start + query);
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
        assert_eq!([1, 512, 513, 4096, 8192].map(|keys| splits(4, keys)), [1, 1, 2, 8, 8]);
        // Merging is dear: no more than so many.
        assert_eq!([4, 32, 64].map(|rows| splits(rows, 65536)), [16, 16, 16]);
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
