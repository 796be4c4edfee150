//! Forward attention on Hopper for few queries and many keys: keys are split over CTAs, and partial results merged.
//!
//! The kernel has the inner loop of the forward kernel (`Compute`) with another schedule and another epilogue. A
//! key/value head is read once for all query heads of its group: row r of a tile is query r / group, head r % group. One
//! thread loads keys and values as far ahead as shared memory allows. One warpgroup gathers the rows of Q, which TMA
//! cannot load as one box for most group sizes. One warpgroup computes. A tile's keys are divided into splits by a rule of
//! the sequence's own length ([`SplitRule`]); the last CTA to finish a tile merges the results of its splits.
//!
//! Memory bounds this kernel: the tensor cores multiply 64 rows however few are in use, which takes about half as long as
//! loading their keys.

pub(crate) mod call;
mod config;
pub(crate) mod plan;
mod schedule;

pub use config::{DecodeConfig, ROWS, padded};
pub use schedule::SplitRule;

use crate::attention::compute::{Compute, Cursor, Held, Rings, Setup};
use crate::attention::decode::call::DecodeCall;
use crate::attention::decode::schedule::{Item, Schedule};
use crate::attention::forward::features::Features;
use crate::attention::source::{Interval, KeySource};
use crate::params::{Bindings, Params, Program};
use crate::parts::mask::Spans;
use crate::parts::merge::{Merged, Partials, RUN, Slot};
use crate::parts::modifier::{Parameters, TilePosition};
use crate::parts::nonfinite::{NonfinitePath, Redo, ThreadRows};
use crate::parts::row_sums::Added;
use crate::parts::schedule::{Of, Work};
use crate::parts::sequences::{Counts, QueryTile, Sequences};
use crate::parts::softmax::Totals;
use fulgurite_ptx::{
    Acc, BuildError, Group, GroupBarrier, Half, Kernel, Pair, Pointer, Scope, Shared, Target, Tensor, Thread, Tile,
    TileShape, Val, Warpgroups, Word, bf16,
};

/// Elements in 16 bytes.
const UNIT: u32 = 8;
/// Units that a gathering thread loads at a time.
const GATHERED: u32 = 8;

/// The decode kernel. Head dimensions of the features are those of the tensors, multiples of 8.
pub fn kernel<T: Half>(target: Target, features: &Features, config: DecodeConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let build = |p: &Params<'_, DecodeCall>| DecodeKernel::<T>::new(p, features, config).build(p);
    Ok(Program::build("attention_decode", target, build)?.into_kernel())
}

/// The launch arguments of the decode kernel. They do not depend on the element type.
fn bindings(features: &Features, config: DecodeConfig) -> Bindings<DecodeCall> {
    Bindings::declared(|p| {
        DecodeParams::<bf16>::declare(p, features, &config);
    })
}

/// The kernel's parameters.
struct DecodeParams<'k, T> {
    keys: Tensor<'k>,
    values: Tensor<'k>,
    q: Pointer<'k, u32>,
    /// Strides of batch, query and head, in words.
    q_strides: [Val<'k, u64>; 3],
    counters: Pointer<'k, u32>,
    schedule: Schedule<'k>,
    scale: Val<'k, f32>,
    modifiers: Parameters<'k>,
    nonfinite: Option<NonfinitePath<'k, T>>,
    partials: Partials<'k, T>,
}

impl<'k, T: Half> DecodeParams<'k, T>
where
    Pair<T>: Word,
{
    fn declare(p: &Params<'k, DecodeCall>, features: &Features, config: &DecodeConfig) -> Self {
        let (ragged, [d, dv]) = (features.ragged, padded(features.dims));
        let tile = |d| TileShape::new(T::NUMBER, config.cols, d);
        let rank = Sequences::rank(ragged);
        let keys = p.tensor("k", tile(d), rank, |call| call.k.span());
        let values = p.tensor("v", tile(dv), rank, |call| call.v.span());
        let q = p.pointer("q", |call| call.q.span);
        let q_strides = [
            p.u64("q_batch", |call| call.q.batch),
            p.u64("q_row", |call| call.q.row),
            p.u64("q_head", |call| call.q.head),
        ];
        let counters = p.pointer("counters", |call| call.common.counters);
        let items = p.u32("items", |call| call.items as u32);
        let whole = config.whole.then(|| p.u32("whole", |call| call.whole as u32));
        let parts = p.divisor("parts", |call| call.parts as u32);
        let each = config.whole.then(|| p.u32("each", |call| call.each as u32));
        let tiles = p.divisor("tiles", |call| call.tiles as u32);
        let kv_heads = p.divisor("kv_heads", |call| call.kv_heads as u32);
        let group = p.divisor("group", |call| call.common.group as u32);
        let scale = p.f32("scale", |call| call.common.scale);
        let sequences = Sequences::declare(p, ragged, |call| call.common.dense(), |call| call.common.ragged());
        let most_blocks = ragged.any().then(|| p.u32("most_blocks", |call| call.most_blocks as u32));
        let sequences = match features.modifiers.is_empty() {
            true => sequences,
            false => sequences.counting(p, |call| call.common.dense()),
        };
        let modifiers = Parameters::declare(p, &features.modifiers, |call| &call.common.aux);
        let nonfinite = features.hides_keys().then(|| NonfinitePath::declare(p, |call| call.common.plain()));
        let partials = Partials::declare(p, features.dims[1], features.sinks, group, counters, |call| &call.partials);
        let (spans, cols) = (Spans::of(&features.mask), config.cols);
        let schedule =
            Schedule { items, whole, parts, each, tiles, kv_heads, group, sequences, most_blocks, spans, cols };
        DecodeParams { keys, values, q, q_strides, counters, schedule, scale, modifiers, nonfinite, partials }
    }
}

/// The kernel under construction: parameters and shared memory.
struct DecodeKernel<'a, 'k, T> {
    features: &'a Features,
    config: DecodeConfig,
    padded: [u32; 2],
    params: DecodeParams<'k, T>,
    rings: Rings<'k>,
    /// One word: whether the CTA finished the last split of its tile.
    last: Shared<'k, u32>,
    /// Merged runs of splits, if a CTA may compute several.
    earlier: Option<Shared<'k, f32>>,
}

impl<'a, 'k, T: Half> DecodeKernel<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(p: &Params<'k, DecodeCall>, features: &'a Features, config: DecodeConfig) -> Self {
        let (k, padded) = (p.builder(), padded(features.dims));
        let params = DecodeParams::declare(p, features, &config);
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        let queries = k.pipe("q", config.queries, &[shape(ROWS, padded[0])]);
        let keys = k.pipe("k", config.depth, &[shape(config.cols, padded[0])]);
        let values = k.pipe("v", config.depth, &[shape(config.cols, padded[1])]);
        let last = k.shared::<u32>("last", 1);
        let earlier = config.whole.then(|| k.shared("earlier", Merged::<Acc<'k>>::shared_elements(padded[1])));
        DecodeKernel { features, config, padded, params, rings: Rings { queries, keys, values }, last, earlier }
    }

    fn build(self, p: &Params<'k, DecodeCall>) {
        let Schedule { spans, sequences, cols, .. } = &self.params.schedule;
        let source = Interval { spans, sequences, cols: *cols };
        let [compute, load, gather] = self.config.registers;
        p.builder().role("load", Warpgroups(1).registers(load), |w| w.one_thread(|t| self.load(t, &source)));
        p.builder().role("gather", Warpgroups(1).registers(gather), |w| self.gather(w));
        p.builder().role("compute", Warpgroups(1).registers(compute), |w| {
            ComputeRole::new(w, &self, &source).run(w);
        });
    }

    /// The load role: one thread that fetches keys and values.
    fn load(&self, t: &Scope<'k, Thread>, source: &dyn KeySource<'k>) {
        let (params, rings) = (&self.params, &self.rings);
        params.schedule.each(t, |t, item| {
            let coordinates = |of, n: Val<'k, u32>| {
                let (zero, first) = (n.literal(0), n * self.config.cols);
                source.coordinates(&item, of, zero, first, item.slot.head)
            };
            let load_k = |t: &Scope<'k, Thread>, n| {
                let at = coordinates(Of::K, n);
                rings.keys.put(t, |t, stage| stage.load(t, stage.tile(0), &params.keys, &at));
            };
            let load_v = |t: &Scope<'k, Thread>, n| {
                let at = coordinates(Of::V, n);
                rings.values.put(t, |t, stage| stage.load(t, stage.tile(0), &params.values, &at));
            };
            params.schedule.each_split(t, &item, |t, split| {
                let [first, end] = item.blocks(split);
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
    }

    /// The gather role: a warpgroup that copies rows of Q, and clears rows of O that belong to no sequence.
    fn gather(&self, w: &Scope<'k, Group>) {
        let Schedule { sequences, kv_heads, group, .. } = &self.params.schedule;
        let barrier = w.group_barrier();
        self.params.schedule.each(w, |w, item| {
            self.rings.queries.fill(w, &barrier, |w, tiles| self.gather_tile(w, &item, tiles[0]));
        });
        if let Some(rows) = sequences.ragged().and_then(|unequal| unequal.rest(w)) {
            self.params.partials.clear(w, rows, kv_heads.value() * group.value());
        }
    }

    /// Copies the rows of a tile of Q; each thread copies units of 16 bytes. Padding rows repeat the last real row, so they
    /// can never trigger a recompute by themselves.
    fn gather_tile(&self, w: &Scope<'k, Group>, item: &Item<'k>, tile: Tile<'k>) {
        let group = self.params.schedule.group;
        let Slot { batch, head, row, rows, used, .. } = item.slot;
        let (units, threads) = (self.padded[0] / UNIT, 128);
        let real = self.features.dims[0] / UNIT;
        let [batch_stride, row_stride, head_stride] = self.params.q_strides;
        let start = self.params.q.at_wide(batch.to_u64().mul_wide_64(batch_stride));
        let thread = w.thread_in_group();
        let all: Vec<u32> = (0..ROWS * units / threads).collect();
        // Several loads before their stores: one round trip to memory for all of them.
        for some in all.chunks(GATHERED as usize) {
            let load = |i: &u32| {
                let index = thread + i * threads;
                let (line, unit) = (index / units, index % units);
                let [query, own] = group.div_rem(row + line.min(rows - 1));
                let query = used.map_or(query, |used| used.start + query);
                let own = head * group.value() + own;
                let at = query.to_u64().mul_wide_64(row_stride) + own.to_u64().mul_wide_64(head_stride);
                // A unit past the end of a row is loaded as the row's last unit, and replaced by zeros.
                let from = start.at_wide(at).load_some::<_, 4>(w, unit.min(real - 1) * 4);
                let words = match real == units {
                    true => from,
                    false => from.map(|word| unit.lt(real).select::<u32>(word, 0)),
                };
                GatheredUnit { line, unit, words }
            };
            let loaded: Vec<_> = some.iter().map(load).collect();
            loaded.into_iter().for_each(|unit| tile.write_unit(w, unit.line, unit.unit, unit.words));
        }
    }
}

/// A unit of Q between its load and its store.
struct GatheredUnit<'k> {
    line: Val<'k, u32>,
    unit: Val<'k, u32>,
    words: [Val<'k, u32>; 4],
}

/// The compute warpgroup.
struct ComputeRole<'a, 'k, T>
where
    T: Half,
    Pair<T>: Word,
{
    kernel: &'a DecodeKernel<'a, 'k, T>,
    core: Compute<'a, 'k, T>,
    barrier: GroupBarrier,
    /// Splits merged in registers, if a CTA may compute all splits of a tile.
    merged: Option<Merged<'k>>,
}

impl<'a, 'k, T: Half> ComputeRole<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, kernel: &'a DecodeKernel<'a, 'k, T>, source: &'a dyn KeySource<'k>) -> Self {
        let (params, dv) = (&kernel.params, kernel.padded[1]);
        let setup = Setup {
            cols: kernel.config.cols,
            columns: dv,
            features: kernel.features,
            spans: &params.schedule.spans,
            parameters: &params.modifiers,
            scale: params.scale,
            counters: params.counters,
            rescale: kernel.config.rescale,
            added: Added::ByThreads,
        };
        let core = Compute::new(w, &kernel.rings, source, &setup);
        let barrier = w.group_barrier();
        let merged = kernel.earlier.map(|earlier| Merged::new(w, w.accumulators(dv), earlier));
        ComputeRole { kernel, core, barrier, merged }
    }

    fn run(&self, w: &Scope<'k, Group>) {
        let (schedule, queries) = (&self.kernel.params.schedule, &self.kernel.rings.queries);
        let scale = self.core.scoring.scale;
        schedule.each(w, |w, item| {
            let n = w.var(0u32);
            let cursor = Cursor { n, key_offset: self.set_tile(w, &item).map(Held::Known), all_keys: None };
            queries.wait(w);
            match &self.merged {
                Some(merged) => {
                    let [first, end] = item.slot.ours;
                    schedule.each_split(w, &item, |w, split| {
                        w.when((split % RUN).eq(0) | split.eq(first), |_| merged.clear());
                        let blocks = item.blocks(split);
                        let totals = self.split(w, &cursor, blocks);
                        self.redo_nonfinite(w, &item, blocks, &totals);
                        merged.add(&self.core.o, totals.scaled(scale));
                        let (done, last) = (split + 1, (split + 1).eq(end));
                        w.when((done % RUN).eq(0) | last, |w| {
                            let is_first = (done - first).le(RUN);
                            merged.end_run(w, [is_first, last]);
                        });
                    });
                    queries.done(w);
                    self.finish(w, &item, &merged.o, merged.totals());
                }
                None => {
                    let blocks = item.blocks(item.slot.ours[0]);
                    let totals = self.split(w, &cursor, blocks);
                    queries.done(w);
                    self.redo_nonfinite(w, &item, blocks, &totals);
                    self.finish(w, &item, &self.core.o, totals.scaled(scale));
                }
            }
        });
    }

    /// p v of a split's keys in `o`. Returns the maximum and sum of each row.
    fn split(&self, w: &Scope<'k, Group>, cursor: &Cursor<'k>, [first, end]: [Val<'k, u32>; 2]) -> Totals<'k> {
        let core = &self.core;
        cursor.n.set(end - 1);
        core.zero();
        core.scores(w, false);
        w.wait_products(0);
        core.settle(w, cursor, &core.take_block(w, cursor, cursor.n.get()));
        core.first(w, &core.p[0]);
        core.blocks(w, cursor, first);
        core.last(w)
    }

    /// The epilogue: writes the item's rows, or a partial result for the tile's last CTA.
    fn finish(&self, w: &Scope<'k, Group>, item: &Item<'k>, o: &Acc<'k>, totals: Totals<'k>) {
        self.kernel.params.partials.finish(w, &item.slot, o, totals, &self.barrier, self.kernel.last);
    }

    /// Prepares masks and modifiers for an item. Returns the key that modifiers count from.
    fn set_tile(&self, w: &Scope<'k, Group>, item: &Item<'k>) -> Option<Val<'k, u32>> {
        let schedule = &self.kernel.params.schedule;
        let own = schedule.own_rows(w, &item.slot);
        let queries = own.map(|row| row.query.to_i32());
        self.core.scoring.limits.set_queries(w, queries, item.queries.map(|query| query.to_i32()), item.lengths);
        if !self.core.scoring.modifies {
            return None;
        }
        let Counts { q_len, k_len, first_key } = schedule.sequences.counts(item.sequence)?;
        let (batch, heads) = (item.slot.batch, own.map(|row| row.head));
        let (q_len, k_len) = (q_len.to_i32(), k_len.to_i32());
        self.core
            .scoring
            .modify
            .set(w, &TilePosition { batch, heads: heads.to_vec(), rows: queries.to_vec(), q_len, k_len });
        Some(first_key)
    }

    /// Computes a split again without its hidden keys, if they hold infinities or NaN.
    fn redo_nonfinite(&self, w: &Scope<'k, Group>, item: &Item<'k>, blocks: [Val<'k, u32>; 2], totals: &Totals<'k>) {
        let DecodeParams { nonfinite, schedule, .. } = &self.kernel.params;
        let Some(nonfinite) = nonfinite else { return };
        let rows = |w: &Scope<'k, Group>| {
            let own = schedule.own_rows(w, &item.slot);
            ThreadRows {
                queries: own.map(|row| row.query).to_vec(),
                heads: own.map(|row| row.head).to_vec(),
                kv_head: item.slot.head,
            }
        };
        let keys = schedule.sequences.visible(item.sequence);
        let redo = Redo {
            work: &Work { blocks, ..item.work() },
            unequal: schedule.sequences.ragged(),
            lists: None,
            cols: self.kernel.config.cols,
            keys: keys.count,
            first: keys.first,
            limits: &self.core.scoring.limits,
            modify: &self.core.scoring.modify,
            rows: &rows,
            first_column: None,
            exp: self.kernel.features.exp,
            scale: self.core.scoring.scale,
        };
        nonfinite.run(w, &redo, &self.core.o, totals, [&|_| {}, &|_| {}]);
    }
}
