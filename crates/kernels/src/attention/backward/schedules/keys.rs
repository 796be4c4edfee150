//! The gradients of a tile of 128 keys, 64 a warpgroup.
//!
//! p^T and d_z^T leave the registers as left operands of d_v and d_k; only d_q needs d_z of both warpgroups, which go
//! through shared memory.
//!
//! A step, of which s and d_p are already in flight: p | d_z, written | barrier | start d_q, d_v, d_k | wait for d_q,
//! add a part of it | wait for d_v | start the next s | add the rest | start the next d_p. d_q goes first because
//! additions are slow to leave, and the products behind it keep the tensor cores busy meanwhile.

use crate::attention::backward::Pack;
use crate::attention::backward::state::{Main, Stages, tile};
use crate::attention::backward::walk::{Walk, clear, pack, probabilities, score_gradients, store_results};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{Acc, Fragment, Group, Half, Major, Pair, Scope, Sum, Thread, Tile, Word};

/// What the warpgroups do.
pub(crate) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let (config, [d, dv]) = (main.config, main.dims);
    let (rows, cols) = (config.rows, config.cols(d));
    let Stages { queries, outputs, keys, values, tickets } = &main.stages;
    // One for each stage of q, one after the other.
    let exchange: Vec<_> =
        (0..config.depth).map(|_| main.k.tile("d_z", tile::<T>(config, config.keys(), rows))).collect();
    let s = w.accumulators(rows);
    let d_p = w.accumulators(rows);
    // In the registers of d_p where it has as many. A part of them would do as well, but the assembler then finds
    // no registers for the products at some masks and head dimensions (C7511).
    let d_q = if cols == rows { d_p.part(0, cols) } else { w.accumulators(cols) };
    let (d_k, d_v) = (w.accumulators(d), w.accumulators(dv));
    let (p, d_z) = (w.fragment::<T>(rows), w.fragment::<T>(rows));
    let limits = Limits::of_keys(w, &main.map.spans);
    let (all, barrier) = (w.role_barrier(), w.group_barrier());
    let own = w.group();
    let walk = Walk::new(w, main);
    let fresh = w.var(true);

    let scores = |w: &Scope<'k, Group>| {
        let (q, key) = (queries.wait(w)[0], keys.current(w)[0].rows(own, 64));
        w.multiply(&s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
    };
    let products = |w: &Scope<'k, Group>| {
        let (d_o, value) = (outputs.wait(w)[0], values.current(w)[0].rows(own, 64));
        w.multiply(&d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
    };
    let onto = |w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: Tile<'k>| {
        w.multiply_fragment(acc, left, right.operand(Major::Outer), Sum::Onto, |_| {});
    };
    let value_sums = |w: &Scope<'k, Group>| onto(w, &d_v, &p, outputs.current(w)[0]);
    let key_sums = |w: &Scope<'k, Group>| onto(w, &d_k, &d_z, queries.current(w)[0]);
    let query_sums = |w: &Scope<'k, Group>| {
        let (d_z, key) = (queries.beside(w, exchange[0]), keys.current(w)[0]);
        // Warpgroups share the columns of d_q, or its rows.
        let (d_z, key) = if cols == d { (d_z.cols(own, 64), key) } else { (d_z, key.cols(own, cols)) };
        w.multiply(&d_q, d_z.operand(Major::Outer), key.operand(Major::Outer), Sum::Fresh);
    };
    let fours = cols / 8;

    w.repeat(|w, leave| {
        let work = main.map.read(&tickets.wait(w));
        leave.when(work.steps[1].eq(0));
        let first_key = (work.tile * config.keys() + own * 64).to_i32();
        limits.set_keys(w, first_key, main.map.k_len(work.sequence).to_i32(), main.map.lengths(work.sequence));
        walk.start(w, &work);
        clear(&d_k);
        clear(&d_v);
        fresh.set(true);
        values.wait(w);
        keys.wait(w);
        scores(w);
        products(w);
        w.repeat(|w, leave| {
            w.wait_products(1); // s of this step and d_k of the one before
            w.when(!fresh.get(), |w| queries.release_previous(w));
            fresh.set(false);
            limits.apply(w, &s, &Block { first: walk.first_query(), full: None });
            probabilities(w, main, &s, queries.numbers(w), |eight| {
                if config.pack == Pack::Early {
                    pack(&p, eight, &s);
                }
            });
            // d_p. The assembler takes it before most exponentials at d 64 and 128; holding it back is not measured.
            w.wait_products_anywhere(0);
            score_gradients(w, [&s, &d_p], outputs.numbers(w), |eight| {
                if config.pack == Pack::Late {
                    pack(&p, eight, &s);
                }
                pack(&d_z, eight, &d_p);
            });
            w.write_fragment(queries.beside(w, exchange[0]).rows(own, 64), &d_z);
            w.publish_shared();
            // One barrier is enough for two tiles of d_z: whoever passes it has waited for the d_q before.
            w.sync_role(&all);
            // Before the products whose results are read in the loop: the assembler serialises them otherwise (C7514).
            leave.when(walk.last());
            query_sums(w);
            value_sums(w);
            key_sums(w);
            w.wait_products(2); // d_q
            let early = fours * config.early / 8;
            walk.add(w, &d_q, 0..early);
            w.wait_products(if config.drain { 0 } else { 1 }); // d_v
            outputs.done(w);
            queries.keep(w);
            scores(w);
            walk.add(w, &d_q, early..fours);
            walk.forward(w, |_| {});
            products(w);
        });
        value_sums(w);
        query_sums(w);
        key_sums(w);
        w.wait_products(0);
        outputs.done(w);
        queries.keep(w);
        queries.release_previous(w);
        walk.add(w, &d_q, 0..fours);
        // Read again: kept over the loop it would take registers of it.
        let work = main.map.read(&tickets.again(w));
        tickets.done(w);
        // d_k and d_v leave through K and V, which both warpgroups are done with.
        w.sync_role(&all);
        let [to_k, to_v] = [keys, values].map(|ring| ring.current(w)[0].rows(own, 64));
        let at = |w: &Scope<'k, Thread>, _| [w.constant(0), work.tile * config.keys() + own * 64];
        store_results::<T>(w, main, &work, &barrier, [(&d_k, to_k), (&d_v, to_v)], at);
        w.one_thread_of_group(|t| t.wait_stores_read(0));
        values.done(w);
        keys.done(w);
    });
    walk.end(w);
    // No wait for the stores: they have read shared memory, and the grid does not end before they are written.
}
