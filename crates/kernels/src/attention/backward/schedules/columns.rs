//! The gradients of a tile of 64 keys whose rows are too long for one warpgroup: each has half the columns of d_k, d_v
//! and d_q.
//!
//! All of them need p and d_z of all queries of a step. Each warpgroup computes them for half the queries, and both
//! read them as tiles from shared memory.
//!
//! A step, of which s and d_p are already in flight: p, d_z, written | barrier | start d_q, d_v, d_k | wait for d_q, add
//! it | start the next s and d_p, whose registers it had | wait for the rest.

use crate::attention::backward::modifiers::clean;
use crate::attention::backward::state::{Main, Stages, tile};
use crate::attention::backward::walk::{Walk, clear, pack, probabilities, score_gradients, store_results};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{Group, Half, Major, Pair, Scope, Sum, Swizzle, Thread, Tile, TileShape, Word};

/// What the warpgroups do.
pub(crate) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let (config, [d, dv]) = (main.config, main.dims);
    let (rows, cols) = (config.rows, [d / 2, dv / 2]);
    let half = rows / 2;
    let Stages { queries, outputs, keys, values, tickets } = &main.stages;
    // Rows are keys. Chunks of half the columns: each warpgroup writes one.
    let shape = TileShape { swizzle: Swizzle::B64, ..tile::<T>(config, config.keys(), rows) };
    let tiles = |name| -> Vec<Tile<'k>> { (0..config.depth).map(|_| main.k.tile(name, shape)).collect() };
    let (p_tiles, d_z_tiles) = (tiles("p"), tiles("d_z"));
    let (s, d_p) = (w.accumulators(half), w.accumulators(half));
    let d_q = w.accumulators(cols[0]);
    let (d_k, d_v) = (w.accumulators(cols[0]), w.accumulators(cols[1]));
    let (p, d_z) = (w.fragment::<T>(half), w.fragment::<T>(half));
    let limits = Limits::of_keys(w, &main.map.spans);
    let (all, barrier) = (w.role_barrier(), w.group_barrier());
    let own = w.group();
    let walk = Walk::new(w, main);
    let fours = cols[0] / 8;

    let scores = |w: &Scope<'k, Group>| {
        let (q, key) = (queries.wait(w)[0].rows(own, half), keys.current(w)[0]);
        w.multiply(&s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
    };
    let products = |w: &Scope<'k, Group>| {
        let (d_o, value) = (outputs.wait(w)[0].rows(own, half), values.current(w)[0]);
        w.multiply(&d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
    };
    let tile_of = |w: &Scope<'k, Group>, tiles: &[Tile<'k>]| queries.beside(w, tiles[0]);
    let query_sums = |w: &Scope<'k, Group>| {
        let key = keys.current(w)[0].cols(own, cols[0]).operand(Major::Outer);
        w.multiply(&d_q, tile_of(w, &d_z_tiles).operand(Major::Outer), key, Sum::Fresh);
    };
    let value_sums = |w: &Scope<'k, Group>| {
        let d_o = outputs.current(w)[0].cols(own, cols[1]).operand(Major::Outer);
        w.multiply(&d_v, tile_of(w, &p_tiles).operand(Major::Inner), d_o, Sum::Onto);
    };
    let key_sums = |w: &Scope<'k, Group>| {
        let q = queries.current(w)[0].cols(own, cols[0]).operand(Major::Outer);
        w.multiply(&d_k, tile_of(w, &d_z_tiles).operand(Major::Inner), q, Sum::Onto);
    };

    let modifying = main.modifiers.as_ref().map(|modified| modified.in_role(w, main.scale));
    let set_head = |w: &Scope<'k, Group>| {
        if let Some(modifying) = &modifying {
            let work = main.map.read(&tickets.again(w));
            modifying.set(w, &main.map, &work, walk.head(), work.tile * config.keys());
        }
    };

    w.repeat(|w, leave| {
        let work = main.map.read(&tickets.wait(w));
        leave.when(work.steps[1].eq(0));
        limits.set_keys(
            w,
            (work.tile * config.keys()).to_i32(),
            main.map.k_len(work.sequence).to_i32(),
            main.map.lengths(work.sequence),
        );
        walk.start(w, &work);
        clear(&d_k);
        clear(&d_v);
        set_head(w);
        values.wait(w);
        keys.wait(w);
        if main.modifiers.as_ref().is_some_and(|modified| modified.hides()) {
            clean::<T>(w, &[keys.current(w)[0], values.current(w)[0]]);
            w.sync_role(&all);
        }
        scores(w);
        products(w);
        w.repeat(|w, leave| {
            w.wait_products(1); // s
            let first = walk.first_query() + (own * half).to_i32();
            let slopes = modifying.as_ref().map(|modifying| modifying.apply(w, &s, first));
            limits.apply(w, &s, &Block { first, full: None });
            probabilities(w, main, &s, queries.numbers(w).part(own, half), |eight| pack(&p, eight, &s));
            w.write_fragment(tile_of(w, &p_tiles).cols(own, half), &p);
            w.wait_products(0); // d_p
            let delta = outputs.numbers(w).part(own, half);
            match (&modifying, &slopes) {
                (Some(modifying), Some(slopes)) => {
                    modifying.gradients(w, [&s, &d_p], delta, slopes, |eight| pack(&d_z, eight, &d_p));
                }
                _ => score_gradients(w, [&s, &d_p], delta, |eight| pack(&d_z, eight, &d_p)),
            }
            w.write_fragment(tile_of(w, &d_z_tiles).cols(own, half), &d_z);
            w.publish_shared();
            // One barrier is enough for two tiles of each: whoever passes it has waited for all products of the step before.
            w.sync_role(&all);
            // Before the products whose results are read in the loop: the assembler serialises them otherwise (C7514).
            leave.when(walk.last());
            query_sums(w);
            value_sums(w);
            key_sums(w);
            w.wait_products(2); // d_q
            walk.add(w, &d_q, 0..fours);
            w.wait_products(0);
            outputs.done(w);
            queries.keep(w);
            queries.release_previous(w);
            scores(w);
            walk.forward(w, set_head);
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
        let [to_k, to_v] = [(keys, cols[0]), (values, cols[1])].map(|(ring, cols)| ring.current(w)[0].cols(own, cols));
        let at = |_: &Scope<'k, Thread>, i: usize| [own * cols[i], work.tile * config.keys()];
        store_results::<T>(w, main, &work, &barrier, [(&d_k, to_k), (&d_v, to_v)], at);
        w.one_thread_of_group(|t| t.wait_stores_read(0));
        values.done(w);
        keys.done(w);
    });
    walk.end(w);
    // No wait for the stores: they have read shared memory, and the grid does not end before they are written.
}
