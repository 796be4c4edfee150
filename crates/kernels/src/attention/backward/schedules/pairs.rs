//! The gradients of two tiles of 64 keys, whose rows are too long for one warpgroup to have both results of, in a pair of blocks:
//! each block has d_k and d_v of its tile, and half the columns of d_q over the keys of both.
//!
//! One warpgroup has d_v, the other d_k. The first computes p and gives it to the second, which computes d_z: either leaves the
//! registers as the left operand of the result, and is multiplied for 64 queries at a time, which is half of what halves of the
//! queries would read of shared memory. d_z also goes to the other block, which multiplies it with the half of these keys' columns
//! that it has a copy of: each block adds half as much to the sums in global memory. Each warpgroup has half of its d_q.
//!
//! A step of the first: start d_v and the next s | d_v is done, add the d_q before | next p, given | wait for both d_z, start d_q.
//! A step of the second, of which d_p is done: d_z, written and sent | start d_k | add the d_q before | start half of the next d_p |
//! wait for the other's d_z, start d_q and the other half of d_p.

use crate::attention::backward::state::{CtaPair, Main, Stages};
use crate::attention::backward::tiles::{Of, Work};
use crate::attention::backward::walk::{Walk, clear, gradients_of, pack, probabilities, store_tiles, write_result};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{
    Acc, AccumulatorChannel, Fragment, Group, GroupBarrier, Half, Major, Operand, Pair, PeerTiles, Scope, Sum, Tile,
    Val, Var, Word,
};

/// What the two warpgroups share.
pub(crate) struct Between<'a, 'k> {
    main: &'a Main<'k>,
    pair: &'a CtaPair<'k>,
    /// p of a part of a step, from the first to the second.
    p: AccumulatorChannel<'k>,
    d_z: &'a PeerTiles<'k>,
}

/// A warpgroup's part of d_q: its number, the product, and whether there is none of this tile in registers that is not added yet.
struct Queries<'k> {
    own: Val<'k, u32>,
    d_q: Acc<'k>,
    fresh: Var<'k, bool>,
}

impl<'k> Queries<'k> {
    fn new(w: &Scope<'k, Group>, main: &Main<'k>, own: u32) -> Self {
        let d_q = w.accumulators(main.config.cols(main.dims[0]));
        Queries { own: w.constant(own), d_q, fresh: w.var(true) }
    }

    /// Adds the d_q of the step before; the next is that of this one.
    #[track_caller]
    fn add_before(&self, w: &Scope<'k, Group>, walk: &Walk<'_, 'k>) {
        w.when(!self.fresh.get(), |w| {
            self.add(w, walk);
            walk.forward_sums(w);
        });
        self.fresh.set(false);
    }

    /// Adds that of the last step.
    #[track_caller]
    fn add_last(&self, w: &Scope<'k, Group>, walk: &Walk<'_, 'k>) {
        self.add(w, walk);
        self.fresh.set(true);
    }

    #[track_caller]
    fn add(&self, w: &Scope<'k, Group>, walk: &Walk<'_, 'k>) {
        walk.add(w, &self.d_q, 0..self.d_q.cols() / 8);
    }
}

impl<'a, 'k> Between<'a, 'k> {
    pub fn new(main: &'a Main<'k>) -> Self {
        let pair = main.pair.as_ref().expect("bug in fulgurite: a CTA without its peer");
        let d_z = &pair.d_z;
        // The warpgroup that computes d_z from p multiplies it before the next p.
        Between { main, pair, p: main.k.handover("p", main.config.rows).taken_with(d_z), d_z }
    }

    /// d_q of a step: two products, over the own keys and over those of the other block.
    fn query_sums(&self, w: &Scope<'k, Group>, of: &Queries<'k>) {
        let (main, quarter) = (self.main, of.d_q.cols());
        // That it has come also tells that the own is there.
        let (other, own) = (self.d_z.wait(w), self.d_z.own(w));
        let key = main.stages.keys.current(w)[0].cols(main.quarter(w, of.own), quarter).operand(Major::Outer);
        w.multiply(&of.d_q, own.operand(Major::Outer), key, Sum::Fresh);
        let key = self.pair.other_keys.current(w)[0].cols(of.own, quarter).operand(Major::Outer);
        w.multiply(&of.d_q, other.operand(Major::Outer), key, Sum::Onto);
    }

    /// The next tile; whether there is none.
    fn start(&self, w: &Scope<'k, Group>, walk: &Walk<'_, 'k>, work: &Work<'k>, result: &Acc<'k>) {
        let Stages { keys, values, .. } = &self.main.stages;
        walk.start(w, work);
        clear(result);
        values.wait(w);
        keys.wait(w);
        self.pair.other_keys.wait(w);
    }

    /// A result leaves through a tile that nobody reads any more, in halves of its columns.
    fn leave<T: Half>(&self, w: &Scope<'k, Group>, barrier: &GroupBarrier, (of, result, to): (Of, &Acc<'k>, Tile<'k>))
    where
        Pair<T>: Word,
    {
        let (main, half) = (self.main, result.cols() / 2);
        write_result::<T>(w, main, of, result, to);
        // Read again: kept over the loop it would take registers of it.
        let work = &main.map.read(&main.stages.tickets.again(w));
        main.stages.tickets.done(w);
        w.publish_shared();
        w.sync_group(barrier);
        // Elected here: a number that is kept for it takes a register of the whole role.
        w.one_thread(|t| {
            let key = main.first_key(t, work);
            store_tiles(t, main, work, (0..2).map(|i| (of, to.cols(i, half), [t.constant(i * half), key])));
            t.wait_stores_read(0);
        });
    }

    /// What the warpgroup of p and d_v does.
    pub fn of_values<T: Half>(&self, w: &Scope<'k, Group>)
    where
        Pair<T>: Word,
    {
        let (main, dv) = (self.main, self.main.dims[1]);
        let (rows, parts) = (main.config.rows, main.config.d_o_parts());
        let Stages { queries, outputs, keys, values, tickets } = &main.stages;
        let of = Queries::new(w, main, 0);
        let (s, d_v, p) = (w.accumulators(rows), w.accumulators(dv), w.fragment::<T>(rows));
        let limits = Limits::of_keys(w, &main.map.spans);
        let barrier = w.group_barrier();
        let walk = Walk::of(w, main, of.own);

        let scores = |w: &Scope<'k, Group>| {
            let (q, key) = (queries.wait(w)[0], keys.current(w)[0]);
            w.multiply(&s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
        };
        let weights = |w: &Scope<'k, Group>| {
            limits.apply(w, &s, &Block { first: walk.first_query(), full: None });
            probabilities(w, main, &s, queries.numbers(w), |eight| pack(&p, eight, &s));
            queries.done(w);
            self.p.give(w, &s);
        };
        // As many products as d_o comes in parts.
        let value_sums = |w: &Scope<'k, Group>| {
            for part in 0..parts {
                let d_o = outputs.take(w)[0].operand(Major::Outer);
                onto(w, &d_v.part(part, dv / parts), &p, d_o);
            }
        };

        w.repeat(|w, leave| {
            let work = main.map.read(&tickets.wait(w));
            leave.when(work.steps[1].eq(0));
            let (first_key, k_len) = (main.first_key(w, &work).to_i32(), main.map.k_len(work.sequence).to_i32());
            limits.set_keys(w, first_key, k_len, main.map.lengths(work.sequence));
            self.start(w, &walk, &work, &d_v);
            scores(w);
            w.wait_products(0);
            weights(w);
            w.repeat(|w, leave| {
                // Before the products whose results are read in the loop: the assembler serialises them otherwise (C7514).
                leave.when(walk.last());
                value_sums(w);
                scores(w);
                for part in 0..parts {
                    w.wait_products(parts - part); // this part of d_v
                    outputs.release(w);
                }
                // Not before: the other warpgroup writes d_z meanwhile, which must not wait for additions.
                of.add_before(w, &walk);
                walk.forward_step(w, |_, _| {});
                w.wait_products(0); // s
                weights(w);
                self.query_sums(w, &of);
                w.wait_products(0); // d_q
                self.d_z.done(w);
            });
            value_sums(w);
            of.add_before(w, &walk);
            self.query_sums(w, &of);
            w.wait_products(0);
            self.d_z.done(w);
            (0..parts).for_each(|_| outputs.release(w));
            of.add_last(w, &walk);
            self.pair.other_keys.done(w);
            // The other warpgroup has multiplied with all values: its last d_z is there.
            self.leave::<T>(w, &barrier, (Of::DV, &d_v, values.current(w)[0]));
            values.done(w);
            keys.done(w);
        });
        // No block ends while the other may still reach into it.
        w.sync_cluster();
    }

    /// What the warpgroup of d_z and d_k does.
    pub fn of_keys<T: Half>(&self, w: &Scope<'k, Group>)
    where
        Pair<T>: Word,
    {
        let (main, [d, dv]) = (self.main, self.main.dims);
        let (rows, parts) = (main.config.rows, main.config.d_o_parts());
        let Stages { queries, outputs, keys, values, tickets } = &main.stages;
        let of = Queries::new(w, main, 1);
        let (d_p, d_k, d_z) = (w.accumulators(rows), w.accumulators(d), w.fragment::<T>(rows));
        let barrier = w.group_barrier();
        let walk = Walk::of(w, main, of.own);

        // Over a part of the columns, as d_o comes in parts.
        let product = |w: &Scope<'k, Group>, part: u32| {
            let (d_o, value) = (outputs.take(w)[0], values.current(w)[0].cols(part, dv / parts));
            let sum = if part == 0 { Sum::Fresh } else { Sum::Onto };
            w.multiply(&d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), sum);
        };
        let key_sums = |w: &Scope<'k, Group>| onto(w, &d_k, &d_z, queries.wait(w)[0].operand(Major::Outer));
        // d_z of a step whose d_p is done.
        let gradients = |w: &Scope<'k, Group>| {
            self.p.wait(w);
            let p = |eight| self.p.four(w, eight);
            gradients_of(w, p, &d_p, outputs.held_numbers(w), |eight| pack(&d_z, eight, &d_p));
            self.p.done(w);
            (0..parts).for_each(|_| outputs.release(w));
            w.write_fragment(self.d_z.open(w), &d_z);
            w.publish_shared();
            w.sync_group(&barrier);
            self.d_z.send(w);
        };

        w.repeat(|w, leave| {
            let work = main.map.read(&tickets.wait(w));
            leave.when(work.steps[1].eq(0));
            self.start(w, &walk, &work, &d_k);
            (0..parts).for_each(|part| product(w, part));
            w.wait_products(0);
            w.repeat(|w, leave| {
                gradients(w);
                leave.when(walk.last());
                key_sums(w);
                of.add_before(w, &walk);
                walk.forward_step(w, |_, _| {});
                (0..parts / 2).for_each(|part| product(w, part));
                self.query_sums(w, &of);
                w.wait_products(2 + parts / 2); // d_k
                queries.done(w);
                (parts / 2..parts).for_each(|part| product(w, part));
                w.wait_products(parts - parts / 2); // d_q
                self.d_z.done(w);
                w.wait_products(0); // d_p
            });
            key_sums(w);
            of.add_before(w, &walk);
            self.query_sums(w, &of);
            w.wait_products(0);
            self.d_z.done(w);
            queries.done(w);
            of.add_last(w, &walk);
            values.done(w);
            self.pair.other_keys.done(w);
            // The other warpgroup is done with the keys when it is done with the last d_z.
            self.d_z.open(w);
            self.leave::<T>(w, &barrier, (Of::DK, &d_k, keys.current(w)[0]));
            keys.done(w);
        });
        w.sync_cluster();
    }
}

/// Adds a product whose left operand is in registers.
fn onto<'k, T: Half>(w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: Operand<'k>)
where
    Pair<T>: Word,
{
    w.multiply_fragment(acc, left, right, Sum::Onto, |_| {});
}
