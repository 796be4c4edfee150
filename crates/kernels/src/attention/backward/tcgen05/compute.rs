//! The compute role: two warpgroups that turn s into p and d_p into d_z, each for half of the queries of a step, and that
//! store d_k and d_v.
//!
//! A thread has the row of a key. p goes to tensor memory, over the part of s that its warpgroup has loaded; d_z goes there,
//! over d_p, and to shared memory.
//!
//! Modified scores wait for d_p first, and are turned from the raw score to d_z part by part: derivatives then take few
//! registers.

use crate::attention::backward::cursor::Cursor;
use crate::attention::backward::modifiers::ModifierRole;
use crate::attention::backward::tcgen05::config::ROWS;
use crate::attention::backward::tcgen05::construction::{HALF, Stages, TensorBackward, halved, only};
use crate::attention::backward::tiles::{Of, Work};
use crate::attention::backward::walk::{HiddenElements, gradients_of, probabilities_of};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{
    Fragment, Group, Half, Numbers, Pair, RowAcc, RowView, Scope, TensorRing, TensorTile, Tile, Val, Word,
};

/// Queries whose d_p a thread has in registers at a time.
const PART: u32 = 32;
/// Queries that are modified together.
const MODIFIED: u32 = 16;

/// A warpgroup and its tile.
pub(super) struct ComputeRole<'a, 'k, T>
where
    T: Half,
    Pair<T>: Word,
{
    kernel: &'a TensorBackward<'k, T>,
    work: Work<'k>,
    /// Index of the warpgroup.
    own: Val<'k, u32>,
    limits: Limits<'k, RowAcc<'k>>,
    modifiers: Option<ModifierRole<'a, 'k, RowAcc<'k>>>,
    here: Cursor<'k>,
}

impl<'a, 'k, T: Half> ComputeRole<'a, 'k, T>
where
    Pair<T>: Word,
{
    pub fn new(w: &Scope<'k, Group>, kernel: &'a TensorBackward<'k, T>, work: Work<'k>) -> Self {
        let params = &kernel.params;
        ComputeRole {
            own: w.group(),
            limits: Limits::of_keys(w, &params.map.spans),
            modifiers: params.modifiers.as_ref().map(|modifiers| modifiers.in_role(w, params.scale)),
            here: Cursor::new(w, &params.map, &work),
            kernel,
            work,
        }
    }

    /// Computes the tile.
    pub fn run(&self, w: &Scope<'k, Group>) {
        self.set_limits(w);
        self.set_head(w);
        w.repeat(|w, leave| {
            self.step(w);
            leave.when(self.here.left.get().eq(1));
            self.here.forward(w, |w| self.set_head(w));
        });
        self.finish(w);
    }

    /// The first key of the tile.
    fn first_key(&self) -> Val<'k, u32> {
        self.work.tile * ROWS
    }

    /// Sets the limits of the tile's keys.
    fn set_limits(&self, w: &Scope<'k, Group>) {
        let (map, first) = (&self.kernel.params.map, self.first_key().to_i32());
        let (k_len, lengths) = (map.k_len(self.work.sequence), map.lengths(self.work.sequence));
        self.limits.set_keys(w, first, k_len.to_i32(), lengths);
    }

    /// Sets the modifiers for the current query head.
    fn set_head(&self, w: &Scope<'k, Group>) {
        if let Some(modifiers) = &self.modifiers {
            modifiers.set(w, &self.kernel.params.map, &self.work, self.here.head.get(), self.first_key());
        }
    }

    /// The warpgroup's columns of s or d_p.
    fn own_part(&self, tile: TensorTile<'k>) -> TensorTile<'k> {
        tile.part(0, HALF).nth(self.own)
    }

    /// The warpgroup's numbers of a row of one for each query.
    fn own_numbers(&self, numbers: Numbers<'k>) -> Numbers<'k> {
        numbers.part(self.own, HALF)
    }

    /// The first query of the warpgroup's part of a step.
    fn first_query(&self) -> Val<'k, i32> {
        (self.here.step.get() * ROWS + self.own * HALF).to_i32()
    }

    fn step(&self, w: &Scope<'k, Group>) {
        let first = self.first_query();
        let masked = |mask: &dyn Fn(&RowAcc<'k>)| {
            let p = self.probabilities(w, mask);
            self.score_gradients(w, &p);
        };
        let Some(modifiers) = &self.modifiers else { return masked(&|_| {}) };
        let kind = modifiers.block_kind(w, first);
        match kind.filter(|_| modifiers.only_masks()) {
            Some(kind) => masked(&|s| modifiers.mask(w, s, first, kind)),
            None => self.modified(w, modifiers),
        }
    }

    /// Turns s into p, in tensor memory and as the accumulators that are returned.
    fn probabilities(&self, w: &Scope<'k, Group>, mask: &dyn Fn(&RowAcc<'k>)) -> RowAcc<'k> {
        let TensorBackward { params, stages, scores, exp, .. } = self.kernel;
        let tile = self.own_part(scores.await_full(w, only()));
        let (s, p) = (w.row_accumulators(HALF), w.row_fragment::<T>(HALF));
        w.load_tensor(&s, tile);
        w.wait_tensor_loads();
        mask(&s);
        let block = Block { first: self.first_query(), full: None };
        self.limits.apply_set(w, &s, &block, |w| self.set_limits(w));
        stages.shift.wait(w);
        let shift = self.own_numbers(stages.shift.row_numbers(w));
        let exp = (*exp, HiddenElements::Any);
        probabilities_of(exp, params.scale_log2, &s, |eight| shift.eight(w, eight), |eight| pack(&p, &s, eight));
        stages.shift.done(w);
        w.store_tensor_fragment(halved::<T>(tile), &p);
        scores.publish(w, only(), 0);
        s
    }

    /// Turns d_p into d_z.
    fn score_gradients(&self, w: &Scope<'k, Group>, p: &RowAcc<'k>) {
        let TensorBackward { stages, products, .. } = self.kernel;
        let tile = self.own_part(products.await_full(w, only()));
        stages.delta.wait(w);
        let delta = self.own_numbers(stages.delta.row_numbers(w));
        for part in 0..HALF / PART {
            let (d_p, d_z) = (w.row_accumulators(PART), w.row_fragment::<T>(PART));
            w.load_tensor(&d_p, tile.part(part, PART));
            w.wait_tensor_loads();
            let (p, delta) = (p.part(part, PART), delta.part(w.constant(part), PART));
            let p = |eight: u32| p.elements().skip(8 * eight as usize).take(8).collect();
            gradients_of(p, &d_p, |eight| delta.eight(w, eight), |eight| pack(&d_z, &d_p, eight));
            self.write(w, (halved::<T>(tile).part(part, PART), part * PART), &d_z);
        }
        stages.delta.done(w);
        self.publish(w);
    }

    /// Turns s and d_p into p and d_z, with modified scores.
    fn modified(&self, w: &Scope<'k, Group>, modifiers: &ModifierRole<'a, 'k, RowAcc<'k>>) {
        let TensorBackward { params, stages, scores, products, exp, .. } = self.kernel;
        let [s_tile, d_p_tile] = [scores, products].map(|ring| self.own_part(ring.await_full(w, only())));
        stages.shift.wait(w);
        stages.delta.wait(w);
        let [shift, delta] = [&stages.shift, &stages.delta].map(|of| self.own_numbers(of.row_numbers(w)));
        let exp = (*exp, HiddenElements::of(params.modifiers.as_ref()));
        // Not unrolled: the assembler would compute the addresses of all parts first, and keep them.
        w.each(0u32, HALF / MODIFIED, 1u32, |w, part| {
            let (s, d_p) = (w.row_accumulators(MODIFIED), w.row_accumulators(MODIFIED));
            w.load_tensor(&s, s_tile.part(0, MODIFIED).nth(part));
            w.load_tensor(&d_p, d_p_tile.part(0, MODIFIED).nth(part));
            w.wait_tensor_loads();
            let [shift, delta] = [shift, delta].map(|numbers| numbers.part(part, MODIFIED));
            let first = self.first_query() + (part * MODIFIED).to_i32();
            let slopes = modifiers.apply(w, &s, first, modifiers.block_kind(w, first));
            self.limits.apply_set(w, &s, &Block { first, full: None }, |w| self.set_limits(w));
            let (p, d_z) = (w.row_fragment::<T>(MODIFIED), w.row_fragment::<T>(MODIFIED));
            probabilities_of(exp, params.scale_log2, &s, |eight| shift.eight(w, eight), |eight| pack(&p, &s, eight));
            let [p_tile, d_z_tile] = [s_tile, d_p_tile].map(|tile| halved::<T>(tile).part(0, MODIFIED).nth(part));
            w.store_tensor_fragment(p_tile, &p);
            let delta = |eight| delta.eight(w, eight);
            modifiers.gradients(w, [&s, &d_p], delta, &slopes, |eight| pack(&d_z, &d_p, eight));
            w.store_tensor_fragment(d_z_tile, &d_z);
            let (own, units) = (self.kernel.d_z.cols(self.own, HALF), MODIFIED / 8);
            for unit in 0..units {
                let words = std::array::from_fn(|i| d_z.pair(4 * unit as usize + i));
                own.write_unit(w, RowAcc::first_row(w), part * units + unit, words);
            }
        });
        stages.shift.done(w);
        stages.delta.done(w);
        scores.publish(w, only(), 0);
        self.publish(w);
    }

    /// Writes columns of d_z to tensor memory, and from column `first` on to the warpgroup's columns in shared memory. The d_q
    /// that read the d_z before is complete, because d_p is.
    fn write(&self, w: &Scope<'k, Group>, (to, first): (TensorTile<'k>, u32), d_z: &Fragment<'k, T>) {
        w.store_tensor_fragment(to, d_z);
        w.write_row_fragment(self.kernel.d_z.cols(self.own, HALF), first, d_z);
    }

    /// Tells the thread that multiplies that d_z is written.
    fn publish(&self, w: &Scope<'k, Group>) {
        w.publish_shared();
        self.kernel.products.publish(w, only(), 0);
    }

    /// Stores d_v, by the first warpgroup, and d_k, by the second, through the memory of v and k.
    fn finish(&self, w: &Scope<'k, Group>) {
        let (kernel, barrier) = (self.kernel, w.group_barrier());
        let Stages { keys, values, .. } = &kernel.stages;
        let scale = kernel.params.scale;
        let send = |w: &Scope<'k, Group>, of: Of, staging: Tile<'k>| {
            w.publish_shared();
            w.sync_group(&barrier);
            let tensor = if of == Of::DK { &kernel.params.d_k } else { &kernel.params.d_v };
            w.one_thread_of_group(|t| {
                let at = [t.constant(0u32), self.first_key(), self.work.head];
                t.store_tile(tensor, &kernel.params.map.at(of, &self.work, at), staging);
                t.commit_stores();
                t.wait_stores_read(0);
            });
        };
        w.choose(
            self.own.eq(0),
            |w| {
                let staging = values.current(w)[0];
                self.round(w, (Of::DV, &kernel.d_v), staging, |x| x);
                send(w, Of::DV, staging);
            },
            |w| {
                let staging = keys.current(w)[0];
                self.round(w, (Of::DK, &kernel.d_k), staging, |x| x * scale);
                send(w, Of::DK, staging);
            },
        );
    }

    /// Waits for a result and writes `f` of it to shared memory, rounded to 16 bits. What is not finite is marked.
    fn round(
        &self,
        w: &Scope<'k, Group>,
        (of, ring): (Of, &TensorRing<'k>),
        to: Tile<'k>,
        f: impl Fn(Val<'k, f32>) -> Val<'k, f32>,
    ) {
        let (params, result) = (&self.kernel.params, ring.await_full(w, only()));
        let marks = &params.marks[usize::from(of == Of::DV)];
        let cols = if result.cols().is_multiple_of(PART) { PART } else { PART / 2 };
        for part in 0..result.cols() / cols {
            let (acc, rounded) = (w.row_accumulators(cols), w.row_fragment::<T>(cols));
            w.load_tensor(&acc, result.part(part, cols));
            w.wait_tensor_loads();
            let at = || [w.constant(part * cols), self.first_key()];
            marks.check(w, &acc, |_| params.map.marked(&self.work, at()));
            acc.elements().enumerate().for_each(|(i, x)| acc.set(i, f(x)));
            (0..cols / 8).for_each(|eight| pack(&rounded, &acc, eight));
            w.write_row_fragment(to, part * cols, &rounded);
        }
        ring.give_back(w, only());
    }
}

/// Rounds eight columns of a row to 16 bits.
fn pack<'k, T: Half>(to: &Fragment<'k, T>, from: &RowAcc<'k>, eight: u32)
where
    Pair<T>: Word,
{
    let from: Vec<_> = from.elements().skip(8 * eight as usize).take(8).collect();
    for pair in 0..4 {
        to.set_pair(4 * eight as usize + pair, from[2 * pair], from[2 * pair + 1]);
    }
}
