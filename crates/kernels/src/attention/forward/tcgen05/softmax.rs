//! The softmax role: warpgroups that turn scores in tensor memory into p, and rows of o into rows of O.

use crate::attention::compute::Held;
use crate::attention::fold::Fold;
use crate::attention::forward::tcgen05::construction::TensorKernel;
use crate::attention::scoring::{Scoring, ScoringInputs, Section};
use crate::attention::source::{KeyBlock, KeyBlocks};
use crate::parts::epilogue::{CopyEngineOutput, Epilogue};
use crate::parts::mask::Block;
use crate::parts::modifier::Tanh;
use crate::parts::nonfinite::{Redo, ThreadRows};
use crate::parts::row_sums::Added;
use crate::parts::schedule::Work;
use crate::parts::softmax::{Numerators, Rescaled, Totals};
use fulgurite_core::Rescale;
use fulgurite_ptx::{
    Fragment, Group, GroupBarrier, Half, Pair, RowAcc, RowView, Scope, TensorTile, Val, Var, Which, Word,
};

/// Columns of o that a thread rescales at a time.
const RESCALED: u32 = 16;

/// A softmax warpgroup.
pub(super) struct SoftmaxRole<'a, 'k, T>
where
    T: Half,
    Pair<T>: Word,
{
    kernel: &'a TensorKernel<'a, 'k, T>,
    source: &'a dyn KeyBlocks<'k, Group>,
    /// Index of the warpgroup, and of its rows in the tile.
    own: Val<'k, u32>,
    s: RowAcc<'k>,
    p: Fragment<'k, T>,
    fold: Box<dyn Fold<'k, T, RowAcc<'k>> + 'k>,
    scoring: Scoring<'a, 'k, RowAcc<'k>>,
    barrier: GroupBarrier,
}

/// A warpgroup's rows of o in tensor memory, while no product into them runs.
struct OutputRows<'k>(TensorTile<'k>);

impl<'k> Rescaled<'k> for OutputRows<'k> {
    fn rescale_rows(&self, w: &Scope<'k, Group>, factor: &[Val<'k, f32>]) {
        let part = w.row_accumulators(RESCALED);
        for i in 0..self.0.cols() / RESCALED {
            let tile = self.0.part(i, RESCALED);
            w.load_tensor(&part, tile);
            w.wait_tensor_loads();
            part.rescale_rows(w, factor);
            w.store_tensor(tile, &part);
        }
        w.wait_tensor_stores();
    }
}

/// A tile on the way through the warpgroup.
struct TileState<'k> {
    work: Work<'k>,
    /// Index of the current key block.
    n: Var<'k, u32>,
    /// Index of the first visible key, if it can be nonzero. Expressions count keys from there.
    key_offset: Option<Held<'k, u32>>,
}

impl<'a, 'k, T: Half> SoftmaxRole<'a, 'k, T>
where
    Pair<T>: Word,
{
    /// Computes all tiles of the CTA.
    pub fn run(w: &Scope<'k, Group>, kernel: &'a TensorKernel<'a, 'k, T>) {
        let (params, features, config) = (&kernel.params, kernel.features, &kernel.config);
        let source = kernel.key_blocks().blocks();
        let inputs = ScoringInputs {
            modifiers: &features.modifiers,
            parameters: &params.modifiers,
            spans: &kernel.spans,
            scale: params.scale,
            tanh: Tanh::of(T::NUMBER),
        };
        let fold = (config.rescale, features.exp, Added::ByThreads);
        let (softmax, mut scoring) = inputs.rows::<RowAcc<'k>>(w, fold, params.counters);
        scoring.fuses = scoring.modifies && !features.modifiers.loads_move();
        let role = SoftmaxRole {
            kernel,
            source: &*source,
            own: w.group(),
            s: w.row_accumulators(config.cols),
            p: w.row_fragment(config.cols),
            fold: Box::new(softmax),
            scoring,
            barrier: w.group_barrier(),
        };
        w.repeat(|w, leave| {
            let work = Work::read(&kernel.announced.take(w), kernel.work_shape);
            leave.when(work.blocks[1].eq(0));
            role.tile(w, work);
        });
        w.one_thread_of_group(|t| t.wait_stores(0));
    }

    fn which(&self) -> Which<'k> {
        Which::Own(self.own)
    }

    /// Computes a tile.
    fn tile(&self, w: &Scope<'k, Group>, work: Work<'k>) {
        let tile = TileState { work, n: w.var(work.blocks[1] - 1), key_offset: self.prepared(w, &work) };
        let (block, s) = self.scores(w, &tile);
        self.scoring.settle(w, &self.s, first_key(&tile, &block), &block);
        let cuts = self.kernel.config.cuts();
        let publish = |w: &Scope<'k, Group>, part: u32| self.publish(w, s, part);
        self.fold.first(w, &self.s, &Numerators { fragment: &self.p, cuts: &cuts, publish: &publish });
        // The rows of o move with the warpgroup; that they are complete is known where they are used.
        let rows = self.kernel.outputs.own(w, self.which());
        // Other rescale policies need the scores of every block, so they keep them.
        let rarely = matches!(self.kernel.config.rescale, Rescale::Optimistic(_));
        w.repeat(|w, leave| {
            leave.when(tile.n.get().eq(work.blocks[0]));
            tile.n.set(tile.n.get() - 1);
            let (block, s) = self.scores(w, &tile);
            // Rarely, scores are needed a second time: they are still in tensor memory.
            let again = |w: &Scope<'k, Group>| self.load(w, s);
            let again: Option<Section<'_, 'k>> = if rarely { Some(&again) } else { None };
            // Products run in order, so the scores are complete only after the previous p v, and o is at rest.
            let output = OutputRows(rows);
            let first_key = || first_key(&tile, &block);
            let publish = |w: &Scope<'k, Group>, part: u32| self.publish(w, s, part);
            let p = Numerators { fragment: &self.p, cuts: &cuts, publish: &publish };
            self.scoring.fold(w, &*self.fold, (&self.s, &p, &output), (&block, &first_key), again);
        });
        self.finish(w, &work);
    }

    /// Prepares masks and modifiers. Returns the index of the first visible key, if expressions need it.
    fn prepared(&self, w: &Scope<'k, Group>, work: &Work<'k>) -> Option<Held<'k, u32>> {
        let sequences = &self.kernel.params.sequences;
        let first = (work.row + self.own * RowAcc::GROUP_ROWS).to_i32();
        self.scoring.limits.set(w, first, sequences.lengths(work.sequence));
        let starts_late = self.kernel.spans.bounded_left() && !self.source.tagged();
        let mut offset = None;
        let rows = || vec![first + RowAcc::first_row(w).to_i32()];
        self.scoring.prepare_modifiers(w, (sequences, work), rows, |first_key| {
            offset = starts_late.then_some(Held::Known(first_key));
        });
        offset
    }

    fn load(&self, w: &Scope<'k, Group>, s: TensorTile<'k>) {
        w.load_tensor(&self.s, s);
        w.wait_tensor_loads();
    }

    /// Waits for the scores of the current block and loads them.
    fn scores(&self, w: &Scope<'k, Group>, tile: &TileState<'k>) -> (Block<'k>, TensorTile<'k>) {
        let s = self.kernel.scores.await_full(w, self.which());
        self.load(w, s);
        let (n, work) = (tile.n.get(), &tile.work);
        let block = KeyBlock { n, tag: self.source.tag(w, work, n) };
        let keys = self.kernel.params.sequences.visible(work.sequence).count;
        (block.block(self.kernel.config.cols, &|| keys.to_i32()), s)
    }

    /// Writes a part of p over the scores, and tells the thread that multiplies.
    fn publish(&self, w: &Scope<'k, Group>, s: TensorTile<'k>, part: u32) {
        let config = &self.kernel.config;
        let cols = config.parts()[part as usize].clone();
        w.store_tensor_fragment(s.overlay::<T>(config.cols).range(cols.clone()), &self.p.range(cols));
        self.kernel.scores.publish(w, self.which(), part);
    }

    /// Writes the rows of a tile.
    fn finish(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let (kernel, params) = (self.kernel, &self.kernel.params);
        let totals = self.fold.totals(w, &self.s);
        let o = w.row_accumulators(kernel.features.dims[1]);
        w.load_tensor(&o, kernel.outputs.await_full(w, self.which()));
        kernel.outputs.give_back(w, self.which());
        self.redo_nonfinite(w, work, &o, &totals);
        let staging = [kernel.staging.rows(self.own, RowAcc::GROUP_ROWS)];
        let output =
            CopyEngineOutput { o: params.o.copied(), unequal: params.sequences.ragged(), barrier: &self.barrier };
        let epilogue = Epilogue {
            staging: &staging,
            part: kernel.config.part(kernel.features.dims[1]),
            lse: params.lse,
            lse_rows: params.lse_rows,
            heads: params.heads.value(),
            q_len: params.sequences.q_len(),
            packed: kernel.features.ragged.packed,
            sinks: params.sinks,
            own: self.own,
            first_column: None,
            scale: self.scoring.scale,
            output: &output,
        };
        epilogue.run::<T>(w, work, &o, totals);
    }

    /// Recomputes a tile without its hidden keys, if they contain infinities or NaN.
    fn redo_nonfinite(&self, w: &Scope<'k, Group>, work: &Work<'k>, o: &RowAcc<'k>, totals: &Totals<'k>) {
        let params = &self.kernel.params;
        let Some(nonfinite) = &params.nonfinite else { return };
        let rows = |w: &Scope<'k, Group>| {
            // Rows past the last one repeat the last one.
            let last = params.sequences.q_rows(work.sequence).max(1) - 1;
            let row = work.row + self.own * RowAcc::GROUP_ROWS + RowAcc::first_row(w);
            let kv_head = params.group.div_rem(work.head)[0];
            ThreadRows { queries: vec![row.min(last)], heads: vec![work.head], kv_head }
        };
        let keys = params.sequences.visible(work.sequence);
        let redo = Redo {
            work,
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
        nonfinite.run(w, &redo, o, totals, [&|_| {}, &|_| {}]);
    }
}

/// Index of a block's first key in its sequence.
fn first_key<'k>(tile: &TileState<'k>, block: &Block<'k>) -> Val<'k, i32> {
    tile.key_offset.map_or(block.first, |offset| block.first + offset.get().to_i32())
}
