//! The compute role of the forward kernel: warpgroups that turn tiles of queries into rows of O and the LSE.
//!
//! Two drivers use the same operations: [`ComputeRole::joined`] overlaps the start of the next tile with the end of
//! this one, [`ComputeRole::separate`] ends a tile before it starts the next.

use crate::attention::compute::{Compute, Cursor, Held, InTurn, Setup};
use crate::attention::forward::construction::ForwardKernel;
use crate::attention::forward::f32_output::F32Output;
use crate::attention::forward::params::OutputMemory;
use crate::attention::forward::tiling::WarpgroupPart;
use crate::attention::source::KeySource;
use crate::parts::epilogue::{CopyEngineOutput, Epilogue, Output};
use crate::parts::nonfinite::{NonfinitePath, Redo, SpoiledGroup, ThreadRows};
use crate::parts::results::ResultType;
use crate::parts::schedule::{Work, WorkVars};
use crate::parts::softmax::Totals;
use fulgurite_ptx::{Acc, Group, Half, Pair, Scope, Tile, Val, Word};

/// Rows of an accumulator of `wgmma` that a thread holds, counted from its first one.
const THREAD_ROWS: [u32; 2] = [0, 8];
/// Rows of an accumulator of `wgmma`.
const GROUP_ROWS: u32 = 64;
/// Columns of ones behind v, whose products are the sums of p: the fewest columns that `wgmma` has.
const SUM_COLUMNS: u32 = 8;

/// A compute warpgroup.
pub(super) struct ComputeRole<'a, 'k, T>
where
    T: Half,
    Pair<T>: Word,
{
    kernel: &'a ForwardKernel<'a, 'k, T>,
    core: Compute<'a, 'k, T>,
    /// The tile whose key blocks are being processed.
    now: WorkVars<'k>,
    cursor: Cursor<'k>,
    epilogue: &'a Epilogue<'a, 'k>,
    /// The tiles to compute again after the last one, if they are not computed again at once.
    spoiled: Option<SpoiledGroup<'a, 'k>>,
    /// Index of the warpgroup's block of rows in the tile.
    own: Val<'k, u32>,
    /// The warpgroup's first column of v and o, if warpgroups share columns.
    first_column: Option<Val<'k, u32>>,
}

impl<'a, 'k, T: Half> ComputeRole<'a, 'k, T>
where
    Pair<T>: Word,
{
    /// Computes all tiles of the CTA.
    pub fn run(w: &Scope<'k, Group>, kernel: &'a ForwardKernel<'a, 'k, T>, source: &'a dyn KeySource<'k>) {
        let (params, tiling, config) = (&kernel.params, &kernel.tiling, &kernel.config);
        let sum_columns = if kernel.ones.is_some() { SUM_COLUMNS } else { 0 };
        let setup = Setup {
            cols: config.cols,
            columns: tiling.columns + sum_columns,
            features: kernel.features,
            spans: &kernel.spans,
            parameters: &params.modifiers,
            scale: params.scale,
            counters: params.counters,
            rescale: config.rescale,
            added: config.added,
        };
        let mut core = Compute::new(w, &kernel.rings, source, &setup);
        core.in_turn = Some(InTurn { turns: w.turns(), early: config.early });
        let barrier = w.group_barrier();
        let group = w.group();
        let WarpgroupPart { rows: own, first_column, q_tile, v_tile } = tiling.part(w, group);
        (core.q_tile, core.v_tile) = (q_tile, v_tile);
        core.ones = kernel.ones;
        core.scoring.fuses = core.scoring.modifies && !kernel.features.modifiers.loads_move();
        let key_offset = (core.scoring.modifies && kernel.work_shape.first).then(|| Held::Carried(w.var(0u32)));
        let all_keys = source.tagged().then(|| match params.sequences.q_len() {
            Some(_) => Held::Known(params.sequences.lengths(None).k),
            None => Held::Carried(w.var(0i32)),
        });
        if let Some(ones) = core.ones {
            w.fill(ones, T::ONE);
            w.publish_shared();
            w.sync_role(&w.role_barrier());
        }
        let now = WorkVars::new(w, kernel.work_shape);
        let cursor = Cursor { n: w.var(0u32), key_offset, all_keys };
        let staging: Vec<Tile<'k>> = kernel.staging.iter().map(|tile| tile.rows(group, GROUP_ROWS)).collect();
        let (copied, in_f32);
        let output: &dyn Output<'k> = match &params.o {
            OutputMemory::Copied(o) => {
                copied = CopyEngineOutput { o, unequal: params.sequences.ragged(), barrier: &barrier };
                &copied
            }
            OutputMemory::F32(o) => {
                in_f32 = F32Output { o, sequences: &params.sequences, results: kernel.features.results };
                &in_f32
            }
        };
        let epilogue = Epilogue {
            staging: &staging,
            part: config.parts(tiling.columns)[0],
            lse: params.lse,
            lse_rows: params.lse_rows,
            heads: params.heads.value(),
            q_len: params.sequences.q_len(),
            packed: kernel.features.ragged.packed,
            sinks: params.sinks,
            own,
            first_column,
            scale: core.scoring.scale,
            output,
        };
        let spoiled = kernel.spoiled.as_ref();
        let spoiled = spoiled.map(|tiles| SpoiledGroup { tiles, epilogue: &epilogue, barrier: &barrier, group });
        ComputeRole { kernel, core, now, cursor, epilogue: &epilogue, spoiled, own, first_column }.all_tiles(w);
    }

    fn all_tiles(&self, w: &Scope<'k, Group>) {
        let drive = |w: &Scope<'k, Group>| self.kernel.tiling.order.compute(|| self.joined(w), || self.separate(w));
        self.spoiled.iter().for_each(|spoiled| spoiled.start(w));
        let first = self.next_tile(w);
        self.begin(first);
        match self.kernel.work_shape.ragged {
            // A CTA may have no tile.
            true => w.when(first.blocks[1].ne(0), drive),
            false => drive(w),
        }
        w.one_thread_of_group(|t| t.wait_stores(0));
        self.compute_spoiled_again(w);
    }

    /// Overlaps each tile's last p v with the scores of the next tile's first block.
    fn joined(&self, w: &Scope<'k, Group>) {
        let (core, rings) = (&self.core, &self.kernel.rings);
        let [p, next_p] = &core.p;
        self.first_block(w);
        w.repeat(|w, leave| {
            core.blocks(w, &self.cursor, self.now.get().blocks[0]);
            // The tile's last products hide the latency of this prefetch.
            self.prefetch(w);
            rings.queries.done(w);
            let next = self.next_tile(w);
            leave.when(next.blocks[1].eq(0));
            let done = self.now.get();
            rings.queries.wait(w);
            core.scores(w, true);
            core.output(w, p, true);
            let totals = core.fold.totals(w, &core.o);
            self.begin(next);
            self.set_tile(w, &next);
            w.wait_products(1);
            core.settle(w, &self.cursor, &core.take_block(w, &self.cursor, self.cursor.n.get()));
            // In `Compute::step` p v runs under the exponentials. Here the exponentials wait for p v, because `finish` needs
            // o; only the store of the previous tile overlaps with them.
            w.wait_products(0);
            rings.values.done(w);
            core.first(w, next_p);
            self.finish(w, &done, Some(&next), totals);
            p.copy(next_p);
            core.zero();
        });
        let totals = core.last(w);
        self.finish(w, &self.now.get(), None, totals);
    }

    /// Each tile ends before the next one starts.
    fn separate(&self, w: &Scope<'k, Group>) {
        let core = &self.core;
        w.repeat(|w, leave| {
            self.first_block(w);
            core.blocks(w, &self.cursor, self.now.get().blocks[0]);
            self.prefetch(w);
            // The next tile's queries load while this one ends.
            self.kernel.rings.queries.done(w);
            let totals = core.last(w);
            self.finish(w, &self.now.get(), None, totals);
            let next = self.next_tile(w);
            leave.when(next.blocks[1].eq(0));
            self.begin(next);
        });
    }

    /// The next tile that the loading thread announces. A tile without key blocks means that there are no more.
    fn next_tile(&self, w: &Scope<'k, Group>) -> Work<'k> {
        Work::read(&self.kernel.announced.take(w), self.kernel.work_shape)
    }

    fn begin(&self, tile: Work<'k>) {
        self.now.set(tile);
        self.cursor.n.set(tile.blocks[1] - 1);
    }

    /// p of a tile's first block, without overlap.
    fn first_block(&self, w: &Scope<'k, Group>) {
        let core = &self.core;
        self.set_tile(w, &self.now.get());
        core.zero();
        self.kernel.rings.queries.wait(w);
        self.kernel.tiling.order.before_first_block(|| core.scan(w, &self.cursor, || self.now.get().blocks[0]));
        core.see(w, &self.cursor, self.cursor.n.get());
        core.first(w, &core.p[0]);
    }

    /// The warpgroup's first query of a tile.
    fn first_query(&self, work: &Work<'k>) -> Val<'k, u32> {
        work.row + self.own * GROUP_ROWS
    }

    /// Prepares masks and modifiers for a tile.
    fn set_tile(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let sequences = &self.kernel.params.sequences;
        let lengths = sequences.lengths(work.sequence);
        self.core.scoring.limits.set(w, self.first_query(work).to_i32(), lengths);
        if let Some(all_keys) = self.cursor.all_keys {
            all_keys.set(lengths.k);
        }
        self.core.scoring.prepare_modifiers(
            w,
            (sequences, work),
            || THREAD_ROWS.map(|row| self.first_query(work).to_i32() + w.first_row().to_i32() + row as i32).to_vec(),
            |first_key| self.cursor.key_offset.iter().for_each(|offset| offset.set(first_key)),
        );
    }

    /// Starts to bring the rows with which this tile will be merged into the L2 cache, if it will be.
    fn prefetch(&self, w: &Scope<'k, Group>) {
        if self.kernel.features.results == ResultType::Added {
            self.epilogue.prefetch(w, &self.now.get(), GROUP_ROWS);
        }
    }

    /// Writes the rows of a tile. Masks and modifiers may already be prepared for the `next` one.
    fn finish(&self, w: &Scope<'k, Group>, work: &Work<'k>, next: Option<&Work<'k>>, totals: Totals<'k>) {
        let o = self.core.o.part(0, self.kernel.tiling.columns);
        let nonfinite = self.kernel.params.nonfinite.as_ref();
        if let (Some(nonfinite), None) = (nonfinite, &self.spoiled) {
            let back = |w: &Scope<'k, Group>| next.iter().for_each(|next| self.set_tile(w, next));
            self.with_redo(work, |redo| {
                nonfinite.run(w, redo, &o, &totals, [&|w| self.set_tile(w, work), &back]);
            });
        }
        self.epilogue.run::<T>(w, work, &o, totals);
        if let Some(spoiled) = &self.spoiled {
            spoiled.watch(w, work, &o, || self.kernel.index_of(work));
        }
    }

    /// Computes the tiles again to whose sums hidden keys brought infinities or NaN.
    fn compute_spoiled_again(&self, w: &Scope<'k, Group>) {
        let (Some(nonfinite), Some(spoiled)) = (&self.kernel.params.nonfinite, &self.spoiled) else { return };
        spoiled.each::<Acc<'k>>(
            w,
            |w, index| self.kernel.find_tile(w, index),
            |w, work| self.compute_again(w, nonfinite, work),
        );
    }

    /// Computes a tile again from its visible keys, and writes its rows.
    fn compute_again(&self, w: &Scope<'k, Group>, nonfinite: &NonfinitePath<'k, T>, work: &Work<'k>) {
        let o = self.core.o.part(0, self.kernel.tiling.columns);
        self.set_tile(w, work);
        self.with_redo(work, |redo| {
            let totals = nonfinite.recompute(w, redo, &o);
            self.epilogue.run::<T>(w, work, &o, totals);
        });
        w.one_thread_of_group(|t| t.wait_stores(0));
    }

    /// Calls `f` with what a second computation of the tile needs.
    fn with_redo(&self, work: &Work<'k>, f: impl FnOnce(&Redo<'_, 'k>)) {
        let params = &self.kernel.params;
        let rows = |w: &Scope<'k, Group>| {
            // Rows past the last one repeat the last one.
            let all = params.sequences.q_rows(work.sequence);
            let row = self.first_query(work) + w.first_row();
            ThreadRows {
                queries: THREAD_ROWS.map(|offset| (row + offset).min(all.max(1) - 1)).to_vec(),
                heads: vec![work.head; 2],
                kv_head: params.group.div_rem(work.head)[0],
            }
        };
        let keys = params.sequences.visible(work.sequence);
        let redo = Redo {
            work,
            unequal: params.sequences.ragged(),
            lists: params.lists.as_ref(),
            cols: self.kernel.config.cols,
            keys: keys.count,
            first: keys.first,
            limits: &self.core.scoring.limits,
            modify: &self.core.scoring.modify,
            rows: &rows,
            first_column: self.first_column,
            exp: self.kernel.features.exp,
            scale: self.core.scoring.scale,
        };
        f(&redo);
    }
}
