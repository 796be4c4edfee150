//! The gradients of a tile of 128 keys, 64 for each warpgroup, whose d_q TMA adds.
//!
//! As in `keys`, p^T and d_z^T leave the registers as left operands of d_v and d_k, and d_z of both warpgroups goes through
//! shared memory. d_q is multiplied transposed. Queries are then columns of four of the five products, and with more of them in
//! a step, 80 instead of 64, each product reads less of shared memory.
//!
//! d_q of a step is multiplied in the next step, so the warpgroups need not meet: one computes p and d_z while the products of
//! the other run. They take turns on the tensor cores. Without turns they would start products at the same time, and wait at the
//! same time.
//!
//! A step: start s and d_p | p, d_z, written | start d_v and the d_q before, publish d_z, start d_k | send the d_q before.
//!
//! d_z is published to the other warpgroup when products already run: publishing waits for the writes, which takes as long as a
//! product, and d_z is not needed before the next step.
//!
//! d_v is stored through the stage of the warpgroup's own values while the last d_q is multiplied. Then d_k is stored
//! through the memory of d_q, while the keys of the next tile arrive.
//!
//! Modified scores wait for d_p first, and are converted from the raw score to d_z part by part. A derivative is then
//! used right after it is computed, and takes no registers in the loop.

use crate::attention::backward::d_q::bulk_reduce::BulkReduce;
use crate::attention::backward::modifiers::ModifierRole;
use crate::attention::backward::schedules::{Schedule, run};
use crate::attention::backward::state::{Main, Stages, tile};
use crate::attention::backward::tiles::{Of, Work};
use crate::attention::backward::walk::{
    StepWalk, pack, pack_part, probabilities, score_gradients, send_results, write_result,
};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{
    Acc, DoubleTile, Fragment, Group, GroupBarrier, Half, Major, Pair, Scope, Sum, Tile, Turns, Val, Word,
};

/// Queries of a step that are modified together.
const PART: u32 = 8;

/// A warpgroup's registers and tiles.
struct Bulk<'a, 'k, T> {
    main: &'a Main<'k>,
    reduce: &'a BulkReduce<'k>,
    /// d_z of both warpgroups. Rows are queries.
    exchange: DoubleTile<'k>,
    s: Acc<'k>,
    d_p: Acc<'k>,
    d_q: Acc<'k>,
    d_k: Acc<'k>,
    d_v: Acc<'k>,
    p: Fragment<'k, T>,
    d_z: Fragment<'k, T>,
    limits: Limits<'k>,
    barrier: GroupBarrier,
    turns: Turns,
    /// Index of the warpgroup.
    own: Val<'k, u32>,
    walk: StepWalk<'a, 'k>,
    modifiers: Option<ModifierRole<'a, 'k>>,
}

/// The compute role.
pub(crate) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let schedule = Bulk::<T>::new(w, main);
    run(w, &schedule);
    schedule.reduce.end(w);
    if let Some(round) = &main.d_q.round {
        round.round_rest::<T>(w, &main.map, (&schedule.barrier, main.scale));
    }
}

impl<'a, 'k, T: Half> Bulk<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(w: &Scope<'k, Group>, main: &'a Main<'k>) -> Self {
        let (config, d) = (main.config, main.dims[0]);
        let rows = config.rows;
        let reduce = main.d_q.bulk.as_ref().expect("bug in fulgurite: TMA does not add");
        let exchange = main.k.double_tile("d_z", tile::<T>(config, rows, config.keys()), &main.stages.queries);
        let (s, d_p) = (w.accumulators(rows), w.accumulators(rows));
        // For short rows the assembler finds no registers for the products unless d_q has its own (C7511).
        let d_q = if config.cols(d) == rows { d_p.part(0, rows) } else { w.accumulators(config.cols(d)) };
        let [d_k, d_v] = main.widths.map(|width| w.accumulators(width));
        let (p, d_z) = (w.fragment::<T>(rows), w.fragment::<T>(rows));
        let limits = Limits::of_keys(w, &main.map.spans);
        let (barrier, turns) = (w.group_barrier(), w.turns());
        let own = w.group();
        let walk = StepWalk::new(w, main);
        let modifiers = main.modifiers.as_ref().map(|modifiers| modifiers.in_role(w, main.scale));
        Bulk { main, reduce, exchange, s, d_p, d_q, d_k, d_v, p, d_z, limits, barrier, turns, own, walk, modifiers }
    }

    /// Reads the tile again: keeping it over the loop, or while pieces are joined, would take registers.
    #[track_caller]
    fn work(&self, w: &Scope<'k, Group>) -> Work<'k> {
        self.main.map.read(&self.main.stages.tickets.again(w))
    }

    fn set_limits(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let map = &self.main.map;
        let first_key = (work.tile * self.main.config.keys() + self.own * 64).to_i32();
        self.limits.set_keys(w, first_key, map.k_len(work.sequence).to_i32(), map.lengths(work.sequence));
    }

    /// Sets the modifiers for the current query head.
    fn set_head(&self, w: &Scope<'k, Group>) {
        if let Some(modifiers) = &self.modifiers {
            let work = self.work(w);
            let head = self.walk.head();
            let first_key = work.tile * self.main.config.keys() + self.own * 64;
            modifiers.set(w, &self.main.map, &work, head, first_key);
        }
    }

    /// p and d_z of a step whose s and d_p are in flight.
    fn weights(&self, w: &Scope<'k, Group>) {
        let (main, Stages { queries, outputs, .. }) = (self.main, &self.main.stages);
        let Bulk { s, d_p, p, d_z, limits, turns, .. } = self;
        let set_again = |w: &Scope<'k, Group>| self.set_limits(w, &self.work(w));
        let block = Block { first: self.walk.first_query(), full: None };
        let masked = |mask: &dyn Fn(&Acc<'k>)| {
            w.wait_products(1); // s
            mask(s);
            limits.apply_set(w, s, &block, set_again);
            probabilities(w, main, s, queries.numbers(w), |_| {});
            // d_p. The assembler waits before the exponentials; holding it back gains nothing.
            w.wait_products_anywhere(0);
            w.pass_turn(turns);
            score_gradients(w, [s, d_p], outputs.numbers(w), |eight| {
                pack(p, eight, s);
                pack(d_z, eight, d_p);
            });
        };
        let Some(modifiers) = &self.modifiers else { return masked(&|_| {}) };
        let kind = modifiers.block_kind(w, self.walk.first_query());
        if let Some(kind) = kind.filter(|_| modifiers.only_masks()) {
            return masked(&|s| modifiers.mask(w, s, self.walk.first_query(), kind));
        }
        w.wait_products(0); // s and d_p
        w.pass_turn(turns);
        let rows = main.config.rows;
        for part in 0..rows / PART {
            let [s, d_p] = [s, d_p].map(|all| all.part(part, PART));
            let [shift, delta] = [queries, outputs].map(|ring| ring.numbers(w).part(w.constant(part), PART));
            let first = self.walk.first_query() + (part * PART) as i32;
            let slopes = modifiers.apply(w, &s, first, kind);
            probabilities(w, main, &s, shift, |_| {});
            modifiers.gradients(
                w,
                [&s, &d_p],
                |eight| delta.pair(w, eight),
                &slopes,
                |eight| {
                    let whole = part * PART / 8 + eight;
                    pack_part(p, whole, &s, eight);
                    pack_part(d_z, whole, &d_p, eight);
                },
            );
        }
        // Mask last, when the fewest registers are in use. This also clears the effect of a hidden key that is not
        // finite.
        limits.hide(w, ([p, d_z], rows), &block, set_again);
    }

    fn add(&self, w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: Tile<'k>, first: bool) {
        let sum = if first { Sum::Fresh } else { Sum::Onto };
        w.multiply_fragment(acc, left, right.operand(Major::Outer), sum, |_| {});
    }

    /// Starts d_q of the step before. Warpgroups share the columns of long rows, and the queries of short ones.
    fn query_sums(&self, w: &Scope<'k, Group>) {
        let (rows, own) = (self.main.config.rows, self.own);
        let (d_z, key) = (self.exchange.wait_previous(w), self.main.stages.keys.current(w)[0]);
        let shares_columns = self.d_q.cols() == rows;
        let (d_z, key) = if shares_columns { (d_z, key.cols(own, 64)) } else { (d_z.rows(own, rows / 2), key) };
        w.multiply(&self.d_q, key.operand(Major::Outer), d_z.operand(Major::Inner), Sum::Fresh);
    }

    /// A whole step.
    fn whole_step(&self, w: &Scope<'k, Group>, first: bool) {
        let Stages { queries, outputs, keys, values, .. } = &self.main.stages;
        let (Bulk { exchange, turns, .. }, own) = (self, self.own);
        w.await_turn(turns);
        let [width, value_width] = self.main.widths;
        let (q, key) = (queries.wait(w)[0].first_cols(width), keys.current(w)[0].rows(own, 64).first_cols(width));
        w.multiply(&self.s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
        let d_o = outputs.wait(w)[0].first_cols(value_width);
        let value = values.current(w)[0].rows(own, 64).first_cols(value_width);
        w.multiply(&self.d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
        self.weights(w);
        w.write_fragment_turned(exchange.open(w).cols(own, 64), &self.d_z);
        w.await_turn(turns);
        self.add(w, &self.d_v, &self.p, d_o, first);
        if !first {
            self.query_sums(w);
        }
        exchange.publish(w);
        self.add(w, &self.d_k, &self.d_z, queries.current(w)[0].first_cols(width), first);
        w.pass_turn(turns);
        if !first {
            w.wait_products(1); // d_v and d_q
            exchange.done_previous(w);
            self.walk.send(w, self.reduce, &self.d_q, None);
        }
        w.wait_products(0); // d_k
        outputs.done(w);
        queries.done(w);
    }

    /// A result leaves through a tile of shared memory. A part of one leaves from registers.
    fn leave_through(
        &self,
        w: &Scope<'k, Group>,
        work: &Work<'k>,
        (of, result): (Of, &Acc<'k>),
        to: impl FnOnce(&Scope<'k, Group>) -> Tile<'k>,
    ) {
        let keys = self.main.config.keys();
        let at = || [self.own.literal(0), work.tile * keys + self.own * 64];
        if let Some(parts) = &self.main.parts {
            return parts.store(w, &self.main.map, work, (of, result), at());
        }
        self.main.check(w, work, (of, result), at());
        let to = to(w);
        write_result::<T>(w, self.main, of, result, to);
        send_results(w, self.main, work, &self.barrier, |_| vec![(of, to, at())]);
    }

    /// Waits until TMA has read the stored result.
    fn have_left(&self, w: &Scope<'k, Group>) {
        if self.main.parts.is_some() {
            return;
        }
        w.one_thread_of_group(|t| t.wait_stores_read(0));
        w.sync_group(&self.barrier);
    }
}

impl<'k, T: Half> Schedule<'k> for Bulk<'_, 'k, T>
where
    Pair<T>: Word,
{
    fn main(&self) -> &Main<'k> {
        self.main
    }

    fn walk(&self) -> &StepWalk<'_, 'k> {
        &self.walk
    }

    fn start(&self, w: &Scope<'k, Group>, work: &Work<'k>) {
        let Stages { keys, values, .. } = &self.main.stages;
        self.set_limits(w, work);
        self.walk.start(w, work);
        self.set_head(w);
        values.wait(w);
        keys.wait(w);
        self.whole_step(w, true);
    }

    fn advance(&self, w: &Scope<'k, Group>) {
        self.walk.forward_step(w, |w, _| self.set_head(w));
        self.whole_step(w, false);
    }

    fn finish(&self, w: &Scope<'k, Group>) {
        let (main, Stages { keys, values, tickets, .. }) = (self.main, &self.main.stages);
        let Bulk { d_q, d_k, d_v, barrier, own, .. } = self;
        let split = main.d_q.split.as_ref();
        let last = split.map(|split| split.join(w, &self.work(w), [d_k, d_v], barrier));
        let work = self.work(w);
        // Results of a split tile leave with its last piece.
        let where_last = |w: &Scope<'k, Group>, f: &dyn Fn(&Scope<'k, Group>)| match last {
            Some(last) => w.when(last, |w| f(w)),
            None => f(w),
        };
        let value_stage = |w: &Scope<'k, Group>| values.current(w)[0].rows(*own, 64);
        where_last(w, &|w| self.leave_through(w, &work, (Of::DV, d_v), value_stage));
        self.query_sums(w);
        w.wait_products(0);
        self.exchange.done_previous(w);
        self.walk.send(w, self.reduce, d_q, Some(&work));
        tickets.done(w);
        where_last(w, &|w| self.have_left(w));
        values.done(w);
        keys.done(w);
        let part = main.d_q.round.as_ref().map(|round| (round, round.read_part(w, &main.map)));
        let key_stage = |w: &Scope<'k, Group>| self.reduce.as_tile(w, main.result(Of::DK).tile());
        where_last(w, &|w| self.leave_through(w, &work, (Of::DK, d_k), key_stage));
        if let Some((round, sums)) = &part {
            round.round::<T>(w, &main.map, (barrier, main.scale), sums);
        }
        where_last(w, &|w| self.have_left(w));
    }
}
