//! The only role of the `mma.sync` kernel: four warps that load, multiply and store one tile of queries.

use crate::attention::compute::Held;
use crate::attention::fold::Fold;
use crate::attention::forward::call::ForwardCall;
use crate::attention::forward::features::Features;
use crate::attention::forward::mma_sync::config::SyncConfig;
use crate::attention::forward::mma_sync::output::ThreadOutput;
use crate::attention::forward::mma_sync::params::SyncParams;
use crate::attention::forward::tiles::TileParams;
use crate::attention::scoring::{Scoring, ScoringInputs, Section};
use crate::attention::source::{KeyBlock, KeyBlockParams, KeyBlocks};
use crate::params::Params;
use crate::parts::epilogue::Epilogue;
use crate::parts::mask::{Block, Spans};
use crate::parts::modifier::Tanh;
use crate::parts::nonfinite::{Redo, ThreadRows};
use crate::parts::row_sums::Added;
use crate::parts::schedule::Work;
use crate::parts::softmax::{Numerators, Totals};
use fulgurite_core::Rescale;
use fulgurite_ptx::{
    CopyRing, Fragment, Group, Half, Major, Pair, RowView, Scope, Tile, TileShape, Val, WarpAcc, Word,
};
use std::marker::PhantomData;

/// The kernel under construction: parameters and shared memory.
pub(super) struct SyncKernel<'a, 'k, const M: usize, T> {
    features: &'a Features,
    config: SyncConfig,
    spans: Spans,
    params: SyncParams<'k, T>,
    /// The tile's queries, and in the same memory its rows of O.
    q: Tile<'k>,
    o: Tile<'k>,
    /// K and V of the key blocks in turn.
    ring: CopyRing<'k>,
    number: PhantomData<T>,
}

impl<'a, 'k, const M: usize, T: Half> SyncKernel<'a, 'k, M, T>
where
    Pair<T>: Word,
{
    pub fn new(p: &Params<'k, ForwardCall>, features: &'a Features, config: SyncConfig) -> Self {
        let (builder, [d, dv]) = (p.builder(), features.dims);
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        let [q, o] = [shape(config.rows(), d), shape(config.rows(), dv)];
        // O reuses the memory of the queries: the last read of q precedes the first write of O. If neither tile can hold
        // the other, allocate one whose rows are whole lines of the widest swizzle; it holds both.
        let holds = |one: &TileShape, other: TileShape| {
            other.bytes() <= one.bytes() && other.swizzle.period() <= one.swizzle.period()
        };
        let both = [q, o].into_iter().find(|tile| holds(tile, q) && holds(tile, o));
        let both = both.unwrap_or_else(|| shape(config.rows(), d.max(dv).next_multiple_of(64)));
        let memory = builder.tile("q", both);
        SyncKernel {
            features,
            config,
            spans: Spans::of(&features.mask),
            params: SyncParams::declare(p, features, &config),
            q: memory.overlay(q),
            o: memory.overlay(o),
            ring: builder.copy_ring_of_either("kv", config.depth, &[shape(config.cols, d), shape(config.cols, dv)]),
            number: PhantomData,
        }
    }

    /// The source of the kernel's key blocks.
    fn source(&self) -> Box<dyn KeyBlocks<'k, Group> + '_> {
        let (sequences, lists) = (&self.params.sequences, self.params.lists.as_ref());
        KeyBlockParams { spans: &self.spans, sequences, lists, cols: self.config.cols }.blocks()
    }

    /// Computes the CTA's tile, if it has one.
    pub fn run(&self, w: &Scope<'k, Group>) {
        let params = &self.params;
        let source = self.source();
        let spans = (!source.tagged()).then_some(&self.spans);
        let tiles = TileParams { sequences: &params.sequences, bands: params.bands.as_ref(), heads: params.heads };
        let tiles = tiles.tiles(w, self.config.rows(), spans);
        let some = tiles.seek(w, w.cta());
        w.when(some, |w| {
            let work = tiles.find(w, w.cta()).work(w, self.config.rows(), &*source);
            SyncTile::new(w, self, &*source, work).run(w);
        });
    }
}

/// A tile of queries, its accumulators and its softmax.
struct SyncTile<'a, 'k, const M: usize, T>
where
    T: Half,
    Pair<T>: Word,
{
    kernel: &'a SyncKernel<'a, 'k, M, T>,
    source: &'a dyn KeyBlocks<'k, Group>,
    work: Work<'k>,
    kv_head: Val<'k, u32>,
    /// Visible keys of the sequence.
    keys: Val<'k, u32>,
    /// First of the warp's rows in the tile.
    own_row: Val<'k, u32>,
    s: WarpAcc<'k, M>,
    o: WarpAcc<'k, M>,
    p: Fragment<'k, T>,
    fold: Box<dyn Fold<'k, T, WarpAcc<'k, M>> + 'k>,
    scoring: Scoring<'a, 'k, WarpAcc<'k, M>>,
    /// Index of the first visible key, if it can be nonzero. Expressions count keys from there.
    key_offset: Option<Held<'k, u32>>,
}

impl<'a, 'k, const M: usize, T: Half> SyncTile<'a, 'k, M, T>
where
    Pair<T>: Word,
{
    fn new(
        w: &Scope<'k, Group>,
        kernel: &'a SyncKernel<'a, 'k, M, T>,
        source: &'a dyn KeyBlocks<'k, Group>,
        work: Work<'k>,
    ) -> Self {
        let (params, features, config) = (&kernel.params, kernel.features, &kernel.config);
        let inputs = ScoringInputs {
            modifiers: &features.modifiers,
            parameters: &params.modifiers,
            spans: &kernel.spans,
            scale: params.scale,
            tanh: Tanh::of(T::NUMBER),
        };
        let fold = (config.rescale, features.exp, Added::ByThreads);
        let (softmax, mut scoring) = inputs.rows::<WarpAcc<'k, M>>(w, fold, params.counters);
        scoring.fuses = scoring.modifies && !features.modifiers.loads_move();
        let tile = SyncTile {
            kernel,
            source,
            kv_head: params.group.div_rem(work.head)[0],
            keys: params.sequences.visible(work.sequence).count,
            own_row: (w.thread_in_group() / 32) * (16 * M as u32),
            s: w.warp_accumulators(config.cols),
            o: w.warp_accumulators(features.dims[1]),
            p: w.warp_fragment::<M, T>(config.cols),
            fold: Box::new(softmax),
            scoring,
            key_offset: None,
            work,
        };
        tile.prepared(w)
    }

    /// Prepares masks and modifiers.
    fn prepared(mut self, w: &Scope<'k, Group>) -> Self {
        let sequences = &self.kernel.params.sequences;
        let lengths = sequences.lengths(self.work.sequence);
        let first = self.work.row.to_i32();
        self.scoring.limits.set(w, first, lengths);
        let starts_late = self.kernel.spans.bounded_left() && !self.source.tagged();
        type View<'k, const M: usize> = WarpAcc<'k, M>;
        let rows = || {
            let row = first + View::<M>::first_row(w).to_i32();
            (0..View::<M>::ROWS).map(|i| row + View::<M>::row_offset(i) as i32).collect()
        };
        let mut offset = None;
        self.scoring.prepare_modifiers(w, (sequences, &self.work), rows, |first_key| {
            offset = starts_late.then_some(Held::Known(first_key));
        });
        self.key_offset = offset;
        self
    }

    /// The tile's `j`-th key block, counted from the last.
    fn key_block(&self, w: &Scope<'k, Group>, j: Val<'k, u32>) -> KeyBlock<'k> {
        let n = self.work.blocks[1] - 1 - j;
        KeyBlock { n, tag: self.source.tag(w, &self.work, n) }
    }

    /// Starts copying K (`side` 0) or V (`side` 1) of the `j`-th key block to the next stage of the ring. Past the last
    /// block, the stage stays empty.
    fn put(&self, w: &Scope<'k, Group>, side: usize, j: Val<'k, u32>) {
        let (params, ring) = (&self.kernel.params, &self.kernel.ring);
        let [first, end] = self.work.blocks;
        let memory = [&params.k, &params.v][side];
        ring.put(w, |w, tiles| {
            w.when(j.lt(end - first), |w| {
                let key = self.key_block(w, j).first_key(self.kernel.config.cols);
                let rows = memory.rows(&params.sequences, &self.work, self.kv_head, [key, self.keys]);
                ring.copy(w, tiles[side], rows);
            });
        });
    }

    /// Items are K0, V0, K1, V1, and so on. Starts copying the item `depth - 1` places after this one.
    fn put_ahead(&self, w: &Scope<'k, Group>, side: usize, j: Val<'k, u32>) {
        let ahead = side as u32 + self.kernel.config.depth - 1;
        self.put(w, (ahead % 2) as usize, j + ahead / 2);
    }

    /// Starts the copies of the queries and of the first stages.
    fn start(&self, w: &Scope<'k, Group>) {
        let (params, ring) = (&self.kernel.params, &self.kernel.ring);
        let count = params.sequences.q_rows(self.work.sequence);
        let queries = params.q.rows(&params.sequences, &self.work, self.work.head, [self.work.row, count]);
        // The copies belong to the group of the first stage.
        ring.copy(w, self.kernel.q, queries);
        for item in 0..self.kernel.config.depth - 1 {
            self.put(w, (item % 2) as usize, w.constant(item / 2));
        }
    }

    /// Computes the raw scores of a block whose keys are in a stage of the ring.
    fn scores(&self, w: &Scope<'k, Group>, keys: Tile<'k>) {
        self.s.clear();
        let q = (self.kernel.q.operand(Major::Inner), self.own_row);
        w.multiply_warp(&self.s, q, (keys.operand(Major::Inner), w.constant(0u32)));
    }

    /// Computes the raw scores of the `j`-th block. Its keys stay in their stage until the ring is waited for again.
    fn next_scores(&self, w: &Scope<'k, Group>, j: Val<'k, u32>) -> (Block<'k>, Tile<'k>) {
        let keys = self.kernel.ring.wait(w)[0];
        self.put_ahead(w, 0, j);
        self.scores(w, keys);
        self.kernel.ring.done(w);
        (self.key_block(w, j).block(self.kernel.config.cols, &|| self.keys.to_i32()), keys)
    }

    /// Adds p v of the `j`-th block to o.
    fn output(&self, w: &Scope<'k, Group>, j: Val<'k, u32>) {
        let tiles = self.kernel.ring.wait(w);
        self.put_ahead(w, 1, j);
        w.multiply_warp_fragment(&self.o, &self.p, (tiles[1].operand(Major::Outer), w.constant(0u32)));
        self.kernel.ring.done(w);
    }

    /// Index of a block's first key in its sequence.
    fn first_key(&self, block: &Block<'k>) -> Val<'k, i32> {
        self.key_offset.map_or(block.first, |offset| block.first + offset.get().to_i32())
    }

    /// If hidden keys made a sum infinite or NaN, recomputes the tile from visible keys only.
    fn redo_nonfinite(&self, w: &Scope<'k, Group>, totals: &Totals<'k>) {
        let params = &self.kernel.params;
        let Some(nonfinite) = &params.nonfinite else { return };
        type View<'k, const M: usize> = WarpAcc<'k, M>;
        let rows = |w: &Scope<'k, Group>| {
            // Rows past the last one repeat the last one.
            let last = params.sequences.q_rows(self.work.sequence).max(1) - 1;
            let row = self.work.row + View::<M>::first_row(w);
            let queries = (0..View::<M>::ROWS).map(|i| (row + View::<M>::row_offset(i)).min(last));
            ThreadRows {
                queries: queries.collect(),
                heads: vec![self.work.head; View::<M>::ROWS],
                kv_head: self.kv_head,
            }
        };
        let keys = params.sequences.visible(self.work.sequence);
        let redo = Redo {
            work: &self.work,
            unequal: params.sequences.ragged(),
            lists: params.lists.as_ref(),
            cols: self.kernel.config.cols,
            keys: keys.count,
            first: keys.first,
            limits: &self.scoring.limits,
            modify: &self.scoring.modify,
            rows: &rows,
            first_column: None,
            exp: self.kernel.features.exp,
            scale: self.scoring.scale,
        };
        nonfinite.run(w, &redo, &self.o, totals, [&|_| {}, &|_| {}]);
    }

    fn run(&self, w: &Scope<'k, Group>) {
        let [first, end] = self.work.blocks;
        let barrier = w.group_barrier();
        // Other rescale policies need the scores of every block, so they keep them.
        let rarely = matches!(self.kernel.config.rescale, Rescale::Optimistic(_));
        self.start(w);
        self.o.clear();
        let zero = w.constant(0u32);
        let (block, _) = self.next_scores(w, zero);
        self.scoring.settle(w, &self.s, self.first_key(&block), &block);
        self.fold.first(w, &self.s, &Numerators::whole(&self.p));
        self.output(w, zero);
        w.each(1u32, end - first, 1u32, |w, j| {
            let (block, keys) = self.next_scores(w, j);
            let first_key = || self.first_key(&block);
            // Rarely, scores are needed a second time. Recomputing them takes fewer registers than keeping them.
            let again = |w: &Scope<'k, Group>| self.scores(w, keys);
            let again: Option<Section<'_, 'k>> = if rarely { Some(&again) } else { None };
            self.scoring.fold(
                w,
                &*self.fold,
                (&self.s, &Numerators::whole(&self.p), &self.o),
                (&block, &first_key),
                again,
            );
            self.output(w, j);
        });
        let totals = self.fold.totals(w, &self.o);
        self.redo_nonfinite(w, &totals);
        let (params, features) = (&self.kernel.params, self.kernel.features);
        let output = ThreadOutput {
            o: &params.o,
            sequences: &params.sequences,
            barrier: &barrier,
            rows: self.kernel.config.rows(),
            units: features.dims[1] * 2 / 16,
            results: features.results,
        };
        let epilogue = Epilogue {
            lse: params.lse,
            lse_rows: params.lse_rows,
            heads: params.heads.value(),
            q_len: params.sequences.q_len(),
            packed: features.ragged.packed,
            sinks: params.sinks,
            own: zero,
            first_column: None,
            scale: self.scoring.scale,
            output: &output,
            staging: &[self.kernel.o],
            part: features.dims[1],
        };
        epilogue.run::<T>(w, &self.work, &self.o, totals);
    }
}
