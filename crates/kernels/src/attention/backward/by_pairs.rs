//! The gradients of two tiles of 64 keys, whose rows are too long for one warpgroup, in a pair of blocks: each block has d_k
//! and d_v of its tile, and half the columns of d_q over the keys of both.
//!
//! As in `by_columns`, a warpgroup has half the columns of d_k and d_v, and computes p and d_z of half the queries for both.
//! d_z also goes to the other block, which multiplies it with the half of these keys' columns that it has a copy of: each
//! block adds half as much to the sums in global memory, which is what `by_columns` waits for.
//!
//! A step, of which p is there and d_p is done: d_z, written | barrier | d_z sent | start d_v, d_k and the next s | add the
//! rest of the d_q before | wait for the other's d_z, start d_q | next p | start the next d_p | add a part of d_q.

use super::main::{Main, tile};
use super::walk::{Walk, add_fours, clear, pack, probabilities, score_gradients, store_results};
use crate::attention::span::{Block, Limits};
use fulgurite_ptx::{Group, Half, Major, Pair, Scope, Sum, Swizzle, Thread, TileShape, Word};

/// What the warpgroups do.
pub(super) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let (tuning, [d, dv]) = (main.tuning, main.dims);
    let (rows, cols) = (tuning.rows, [d / 2, dv / 2]);
    let (half, quarter) = (rows / 2, tuning.cols(d));
    let Main { queries, outputs, keys, values, tickets, .. } = main;
    let others = main.others.as_ref().expect("bug in fulgurite: no keys of the other block");
    // Rows are keys. Chunks of half the columns: each warpgroup writes one.
    let shape = TileShape { swizzle: Swizzle::B64, ..tile::<T>(tuning, tuning.block_keys(), rows) };
    let (p_tile, exchange) = (main.k.tile("p", shape), main.k.exchange("d_z", 1, shape));
    let (s, d_p) = (w.accumulators(half), w.accumulators(half));
    let d_q = w.accumulators(quarter);
    let (d_k, d_v) = (w.accumulators(cols[0]), w.accumulators(cols[1]));
    let (p, d_z) = (w.fragment::<T>(half), w.fragment::<T>(half));
    let limits = Limits::of_keys(w, &main.spans);
    let (all, barrier) = (w.role_barrier(), w.group_barrier());
    let own = w.group();
    let walk = Walk::new(w, main);
    // Where the d_q is added that is in registers; 0 where there is none.
    let late = w.var(0u64);
    let (early, whole) = (tuning.early.min(quarter / 8), quarter / 8);

    let scores = |w: &Scope<'k, Group>| {
        let (q, key) = (queries.wait(w)[0].rows(own, half), keys.current(w)[0]);
        w.multiply(&s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
    };
    // Two products, as d_o comes in halves.
    let products = |w: &Scope<'k, Group>| {
        for part in 0..2 {
            let (d_o, value) = (outputs.take(w)[0].rows(own, half), values.current(w)[0].cols(part, cols[1]));
            let sum = if part == 0 { Sum::Fresh } else { Sum::Onto };
            w.multiply(&d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), sum);
        }
    };
    let outputs_done = |w: &Scope<'k, Group>| (0..2).for_each(|_| outputs.release(w));
    let weights = |w: &Scope<'k, Group>| {
        let first = walk.first_query() + (own * half).to_i32();
        limits.apply(w, &s, &Block { first, full: None });
        probabilities(w, main, &s, queries.numbers(w).part(own, half), |_| {});
    };
    let value_sums = |w: &Scope<'k, Group>| {
        let d_o = outputs.held(w, own)[0].operand(Major::Outer);
        w.multiply(&d_v, p_tile.operand(Major::Inner), d_o, Sum::Onto);
    };
    let key_sums = |w: &Scope<'k, Group>| {
        let q = queries.current(w)[0].cols(own, cols[0]).operand(Major::Outer);
        w.multiply(&d_k, exchange.own(w).operand(Major::Inner), q, Sum::Onto);
    };
    // Two products: over the own keys and over those of the other block.
    let query_sums = |w: &Scope<'k, Group>| {
        let key = keys.current(w)[0].cols(main.quarter(w), quarter).operand(Major::Outer);
        w.multiply(&d_q, exchange.own(w).operand(Major::Outer), key, Sum::Fresh);
        let key = others.current(w)[0].cols(own, quarter).operand(Major::Outer);
        w.multiply(&d_q, exchange.wait(w).operand(Major::Outer), key, Sum::Onto);
    };
    let add_rest = |w: &Scope<'k, Group>| {
        w.when(late.get().ne(0), |w| add_fours(w, late.get(), &d_q, early..whole));
    };

    w.repeat(|w, leave| {
        let work = main.read(&tickets.wait(w));
        leave.when(work.steps[1].eq(0));
        limits.set_keys(
            w,
            main.first_key(w, &work).to_i32(),
            main.k_len(work.sequence).to_i32(),
            main.lengths(work.sequence),
        );
        walk.start(w, &work);
        clear(&d_k);
        clear(&d_v);
        values.wait(w);
        keys.wait(w);
        others.wait(w);
        scores(w);
        products(w);
        w.wait_products(2); // s
        weights(w);
        w.wait_products_anywhere(0); // d_p
        w.repeat(|w, leave| {
            // By now nobody reads the p and d_z before any more.
            let to = exchange.open(w);
            score_gradients(w, [&s, &d_p], outputs.held_numbers(w).part(own, half), |eight| {
                pack(&p, eight, &s);
                pack(&d_z, eight, &d_p);
            });
            w.write_fragment(p_tile.cols(own, half), &p);
            w.write_fragment(to.cols(own, half), &d_z);
            w.publish_shared();
            w.sync_role(&all);
            exchange.send(w);
            // Before the products whose results are read in the loop: the assembler serialises them otherwise (C7514).
            leave.when(walk.last());
            value_sums(w);
            key_sums(w);
            queries.keep(w);
            scores(w);
            w.wait_products(2); // d_v
            outputs_done(w);
            add_rest(w);
            late.set(walk.place());
            walk.forward(w, |_| {});
            query_sums(w);
            w.wait_products(2); // d_k and s
            queries.release_previous(w);
            weights(w);
            products(w);
            w.wait_products(2); // d_q
            exchange.done(w);
            add_fours(w, late.get(), &d_q, 0..early);
            w.wait_products(0); // d_p
        });
        value_sums(w);
        key_sums(w);
        add_rest(w);
        query_sums(w);
        w.wait_products(0);
        exchange.done(w);
        outputs_done(w);
        queries.keep(w);
        queries.release_previous(w);
        others.done(w);
        add_fours(w, walk.place(), &d_q, 0..whole);
        late.set(0u64);
        // Read again: kept over the loop it would take registers of it.
        let work = main.read(&tickets.again(w));
        tickets.done(w);
        // d_k and d_v leave through K and V, which both warpgroups are done with.
        w.sync_role(&all);
        let [to_k, to_v] = [(keys, cols[0]), (values, cols[1])].map(|(ring, cols)| ring.current(w)[0].cols(own, cols));
        let at = |t: &Scope<'k, Thread>, i: usize| [own * cols[i], main.first_key(t, &work)];
        store_results::<T>(w, main, &work, &barrier, [(&d_k, to_k), (&d_v, to_v)], at);
        w.one_thread_of_group(|t| t.wait_stores_read(0));
        values.done(w);
        keys.done(w);
    });
    // No block ends while the other may still reach into it.
    w.sync_cluster();
}
