//! The gradients of two tiles of 64 keys in a pair of CTAs, for rows so long that one warpgroup cannot hold both d_k and d_v.
//! Each CTA has d_k and d_v of its tile, and half of the columns of d_q over the keys of both.
//!
//! One warpgroup has d_v, the other d_k. The first computes p and passes it to the second, which computes d_z. Both p and d_z
//! leave the registers as left operands, and are multiplied for 64 queries at a time: half of the shared memory traffic that two
//! halves of the queries would cause. d_z also goes to the other CTA, which multiplies it by its half of the columns of these
//! keys, so each CTA adds half as much to the sums in global memory. Each warpgroup has half of its CTA's d_q.
//!
//! A step of the first warpgroup:
//! 1. Start d_v and the next s.
//! 2. Wait for d_v; add the previous step's d_q.
//! 3. Compute the next p and pass it on.
//! 4. Wait for the d_z of both CTAs; start d_q.
//!
//! A step of the second warpgroup, whose d_p is complete:
//! 1. Compute d_z, write it, and send it to the other CTA.
//! 2. Start d_k; add the previous step's d_q.
//! 3. Start half of the next d_p.
//! 4. Wait for the other CTA's d_z; start d_q and the other half of d_p.

use crate::attention::backward::schedules::{Schedule, run};
use crate::attention::backward::state::{CtaPair, Main, Stages};
use crate::attention::backward::tiles::{Of, Work};
use crate::attention::backward::walk::{StepWalk, clear, gradients_of, pack, probabilities, store_tiles, write_result};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{
    Acc, AccumulatorChannel, Fragment, Group, GroupBarrier, Half, Major, Pair, PeerTiles, Scope, Sum, Tile,
    TileOperand, Val, Var, Word,
};

/// State that the two warpgroups of a CTA share.
pub(crate) struct Between<'a, 'k> {
    main: &'a Main<'k>,
    pair: &'a CtaPair<'k>,
    /// p of a step, from the first warpgroup to the second.
    p: AccumulatorChannel<'k>,
    d_z: &'a PeerTiles<'k>,
}

/// A warpgroup's part of d_q.
struct Queries<'k> {
    /// Index of the warpgroup.
    own: Val<'k, u32>,
    d_q: Acc<'k>,
    /// Whether the d_q in the registers is already added.
    added: Var<'k, bool>,
}

impl<'k> Queries<'k> {
    fn new(w: &Scope<'k, Group>, main: &Main<'k>, own: u32) -> Self {
        let d_q = w.accumulators(main.config.cols(main.dims[0]));
        Queries { own: w.constant(own), d_q, added: w.var(true) }
    }

    /// Adds the d_q of the step before, if there is one, and moves on to the sums of this step.
    #[track_caller]
    fn add_before(&self, w: &Scope<'k, Group>, walk: &StepWalk<'_, 'k>) {
        w.when(!self.added.get(), |w| {
            self.add(w, walk);
            walk.forward_sums(w);
        });
        self.added.set(false);
    }

    /// Adds the d_q of the last step.
    #[track_caller]
    fn add_last(&self, w: &Scope<'k, Group>, walk: &StepWalk<'_, 'k>) {
        self.add(w, walk);
        self.added.set(true);
    }

    #[track_caller]
    fn add(&self, w: &Scope<'k, Group>, walk: &StepWalk<'_, 'k>) {
        walk.add(w, &self.d_q, 0..self.d_q.cols() / 8);
    }
}

impl<'a, 'k> Between<'a, 'k> {
    pub fn new(main: &'a Main<'k>, pair: &'a CtaPair<'k>) -> Self {
        let d_z = &pair.d_z;
        // The warpgroup that computes d_z from p multiplies it before the next p.
        Between { main, pair, p: main.k.accumulator_channel("p", main.config.rows).taken_with(d_z), d_z }
    }

    /// The first column of a part of d_o, and how many columns of it the products take.
    fn part(&self, part: u32) -> [u32; 2] {
        let main = self.main;
        let whole = main.dims[1] / main.config.share.d_o_parts();
        [part * whole, (main.widths[1] - part * whole).min(whole)]
    }

    /// Starts d_q of a step: two products, over the own keys and over those of the other CTA.
    fn query_sums(&self, w: &Scope<'k, Group>, of: &Queries<'k>) {
        let (main, quarter) = (self.main, of.d_q.cols());
        // The own d_z is complete by the time the other CTA's d_z has arrived.
        let (other, own) = (self.d_z.wait(w), self.d_z.own(w));
        let key = main.stages.keys.current(w)[0].cols(main.quarter(w, of.own), quarter).operand(Major::Outer);
        w.multiply(&of.d_q, own.operand(Major::Outer), key, Sum::Fresh);
        let key = self.pair.other_keys.current(w)[0].cols(of.own, quarter).operand(Major::Outer);
        w.multiply(&of.d_q, other.operand(Major::Outer), key, Sum::Onto);
    }

    /// Starts a tile: waits for its keys and values.
    fn start(&self, w: &Scope<'k, Group>, walk: &StepWalk<'_, 'k>, work: &Work<'k>, result: &Acc<'k>) {
        let Stages { keys, values, .. } = &self.main.stages;
        walk.start(w, work);
        clear(result);
        values.wait(w);
        keys.wait(w);
        self.pair.other_keys.wait(w);
    }

    /// A result leaves through a stage that no warpgroup reads any more, in halves of its columns.
    fn leave<T: Half>(&self, w: &Scope<'k, Group>, barrier: &GroupBarrier, (of, result, to): (Of, &Acc<'k>, Tile<'k>))
    where
        Pair<T>: Word,
    {
        // Halves of the padded row: columns beyond the result are outside the tensor.
        let main = self.main;
        let half = main.dims[usize::from(of == Of::DV)] / 2;
        write_result::<T>(w, main, of, result, to);
        // Read the tile again: keeping it over the loop would take registers.
        let work = &main.map.read(&main.stages.tickets.again(w));
        main.stages.tickets.done(w);
        main.check(w, work, (of, result), [w.constant(0u32), main.first_key(w, work)]);
        w.publish_shared();
        w.sync_group(barrier);
        // Elect the thread here: a kept thread index would take a register in the whole role.
        w.one_thread(|t| {
            let key = main.first_key(t, work);
            store_tiles(t, main, work, (0..2).map(|i| (of, to.cols(i, half), [t.constant(i * half), key])));
            t.wait_stores_read(0);
        });
    }
}

/// The warpgroup of p and d_v.
struct ValuesRole<'b, 'a, 'k, T> {
    between: &'b Between<'a, 'k>,
    of: Queries<'k>,
    s: Acc<'k>,
    d_v: Acc<'k>,
    p: Fragment<'k, T>,
    limits: Limits<'k>,
    barrier: GroupBarrier,
    walk: StepWalk<'a, 'k>,
}

/// The role of p and d_v.
pub(crate) fn compute_values<'k, T: Half>(w: &Scope<'k, Group>, between: &Between<'_, 'k>)
where
    Pair<T>: Word,
{
    run(w, &ValuesRole::<T>::new(w, between));
    // No CTA may end while the other can still access its shared memory.
    w.sync_cluster();
}

impl<'b, 'a, 'k, T: Half> ValuesRole<'b, 'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, between: &'b Between<'a, 'k>) -> Self {
        let (main, rows) = (between.main, between.main.config.rows);
        let of = Queries::new(w, main, 0);
        let (s, d_v, p) = (w.accumulators(rows), w.accumulators(main.widths[1]), w.fragment::<T>(rows));
        let limits = Limits::of_keys(w, &main.map.spans);
        let barrier = w.group_barrier();
        let walk = StepWalk::of(w, main, of.own);
        ValuesRole { between, of, s, d_v, p, limits, barrier, walk }
    }

    /// Parts in which d_o comes.
    fn parts(&self) -> u32 {
        self.between.main.config.share.d_o_parts()
    }

    /// Starts s of a step.
    fn scores(&self, w: &Scope<'k, Group>) {
        let Stages { queries, keys, .. } = &self.between.main.stages;
        let [q, key] =
            [queries.wait(w)[0], keys.current(w)[0]].map(|tile| tile.first_cols(self.between.main.widths[0]));
        w.multiply(&self.s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
    }

    /// p of a step whose s is done.
    fn weights(&self, w: &Scope<'k, Group>) {
        let (main, ValuesRole { s, p, .. }) = (self.between.main, self);
        let queries = &main.stages.queries;
        self.limits.apply(w, s, &Block { first: self.walk.first_query(), full: None });
        probabilities(w, main, s, queries.numbers(w), |eight| pack(p, eight, s));
        queries.done(w);
        self.between.p.give(w, s);
    }

    /// Starts d_v: a product for each part of d_o.
    fn value_sums(&self, w: &Scope<'k, Group>) {
        for part in 0..self.parts() {
            let [first, width] = self.between.part(part);
            let d_o = self.between.main.stages.outputs.take(w)[0].first_cols(width).operand(Major::Outer);
            onto(w, &self.d_v.columns(first, width), &self.p, d_o);
        }
    }
}

impl<'k, T: Half> Schedule<'k> for ValuesRole<'_, '_, 'k, T>
where
    Pair<T>: Word,
{
    fn main(&self) -> &Main<'k> {
        self.between.main
    }

    fn walk(&self) -> &StepWalk<'_, 'k> {
        &self.walk
    }

    fn start(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let main = self.between.main;
        let (first_key, k_len) = (main.first_key(w, work).to_i32(), main.map.k_len(work.sequence).to_i32());
        self.limits.set_keys(w, first_key, k_len, main.map.lengths(work.sequence));
        self.between.start(w, &self.walk, work, &self.d_v);
        self.scores(w);
        w.wait_products(0);
        self.weights(w);
    }

    fn advance(&self, w: &Scope<'k, Group>) {
        let (between, parts) = (self.between, self.parts());
        self.value_sums(w);
        self.scores(w);
        for part in 0..parts {
            w.wait_products(parts - part); // this part of d_v
            between.main.stages.outputs.release(w);
        }
        // Not earlier: the other warpgroup writes d_z at this time, which must not wait for additions.
        self.of.add_before(w, &self.walk);
        self.walk.forward_step(w, |_, _| {});
        w.wait_products(0); // s
        self.weights(w);
        between.query_sums(w, &self.of);
        w.wait_products(0); // d_q
        between.d_z.done(w);
    }

    fn finish(&self, w: &Scope<'k, Group>) {
        let (between, Stages { outputs, keys, values, .. }) = (self.between, &self.between.main.stages);
        self.value_sums(w);
        self.of.add_before(w, &self.walk);
        between.query_sums(w, &self.of);
        w.wait_products(0);
        between.d_z.done(w);
        (0..self.parts()).for_each(|_| outputs.release(w));
        self.of.add_last(w, &self.walk);
        between.pair.other_keys.done(w);
        // The other warpgroup is done with the values, because its last d_z has arrived.
        between.leave::<T>(w, &self.barrier, (Of::DV, &self.d_v, values.current(w)[0]));
        values.done(w);
        keys.done(w);
    }
}

/// The warpgroup of d_z and d_k.
struct KeysRole<'b, 'a, 'k, T> {
    between: &'b Between<'a, 'k>,
    of: Queries<'k>,
    d_p: Acc<'k>,
    d_k: Acc<'k>,
    d_z: Fragment<'k, T>,
    barrier: GroupBarrier,
    walk: StepWalk<'a, 'k>,
}

/// The role of d_z and d_k.
pub(crate) fn compute_keys<'k, T: Half>(w: &Scope<'k, Group>, between: &Between<'_, 'k>)
where
    Pair<T>: Word,
{
    run(w, &KeysRole::<T>::new(w, between));
    w.sync_cluster();
}

impl<'b, 'a, 'k, T: Half> KeysRole<'b, 'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, between: &'b Between<'a, 'k>) -> Self {
        let (main, rows) = (between.main, between.main.config.rows);
        let of = Queries::new(w, main, 1);
        let (d_p, d_k, d_z) = (w.accumulators(rows), w.accumulators(main.widths[0]), w.fragment::<T>(rows));
        let barrier = w.group_barrier();
        let walk = StepWalk::of(w, main, of.own);
        KeysRole { between, of, d_p, d_k, d_z, barrier, walk }
    }

    /// Parts in which d_o comes.
    fn parts(&self) -> u32 {
        self.between.main.config.share.d_o_parts()
    }

    /// Starts a part of d_p, over a part of the columns of d_o.
    fn product(&self, w: &Scope<'k, Group>, part: u32) {
        let (Stages { outputs, values, .. }, dv) = (&self.between.main.stages, self.between.main.dims[1]);
        let [_, width] = self.between.part(part);
        let d_o = outputs.take(w)[0].first_cols(width);
        let value = values.current(w)[0].cols(part, dv / self.parts()).first_cols(width);
        let sum = if part == 0 { Sum::Fresh } else { Sum::Onto };
        w.multiply(&self.d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), sum);
    }

    fn key_sums(&self, w: &Scope<'k, Group>) {
        let queries = &self.between.main.stages.queries;
        let q = queries.wait(w)[0].first_cols(self.between.main.widths[0]);
        onto(w, &self.d_k, &self.d_z, q.operand(Major::Outer));
    }
}

impl<'k, T: Half> Schedule<'k> for KeysRole<'_, '_, 'k, T>
where
    Pair<T>: Word,
{
    fn main(&self) -> &Main<'k> {
        self.between.main
    }

    fn walk(&self) -> &StepWalk<'_, 'k> {
        &self.walk
    }

    fn start(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        self.between.start(w, &self.walk, work, &self.d_k);
        (0..self.parts()).for_each(|part| self.product(w, part));
        w.wait_products(0);
    }

    /// d_z of a step whose d_p is done.
    fn step(&self, w: &Scope<'k, Group>) {
        let (Between { p: channel, d_z: peer, .. }, outputs) = (self.between, &self.between.main.stages.outputs);
        let KeysRole { d_p, d_z, .. } = self;
        channel.wait(w);
        let (p, delta) = (|eight| channel.four(w, eight).to_vec(), outputs.held_numbers(w));
        gradients_of(p, d_p, |eight| delta.pair(w, eight), |eight| pack(d_z, eight, d_p));
        channel.done(w);
        (0..self.parts()).for_each(|_| outputs.release(w));
        w.write_fragment(peer.open(w), d_z);
        w.publish_shared();
        w.sync_group(&self.barrier);
        peer.send(w);
    }

    fn advance(&self, w: &Scope<'k, Group>) {
        let (between, parts) = (self.between, self.parts());
        self.key_sums(w);
        self.of.add_before(w, &self.walk);
        self.walk.forward_step(w, |_, _| {});
        (0..parts / 2).for_each(|part| self.product(w, part));
        between.query_sums(w, &self.of);
        w.wait_products(2 + parts / 2); // d_k
        between.main.stages.queries.done(w);
        (parts / 2..parts).for_each(|part| self.product(w, part));
        w.wait_products(parts - parts / 2); // d_q
        between.d_z.done(w);
        w.wait_products(0); // d_p
    }

    fn finish(&self, w: &Scope<'k, Group>) {
        let (between, Stages { queries, keys, values, .. }) = (self.between, &self.between.main.stages);
        self.key_sums(w);
        self.of.add_before(w, &self.walk);
        between.query_sums(w, &self.of);
        w.wait_products(0);
        between.d_z.done(w);
        queries.done(w);
        self.of.add_last(w, &self.walk);
        values.done(w);
        between.pair.other_keys.done(w);
        // The other warpgroup is done with the keys when it is done with the last d_z.
        between.d_z.open(w);
        between.leave::<T>(w, &self.barrier, (Of::DK, &self.d_k, keys.current(w)[0]));
        keys.done(w);
    }
}

/// Adds a product whose left operand is in registers.
fn onto<'k, T: Half>(w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: TileOperand<'k>)
where
    Pair<T>: Word,
{
    w.multiply_fragment(acc, left, right, Sum::Onto, |_| {});
}
