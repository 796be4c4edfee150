//! The gradients of a tile of 128 keys, 64 a warpgroup, whose d_q the copy engine adds.
//!
//! As in `by_keys`, p^T and d_z^T leave the registers as left operands of d_v and d_k, and d_z of both warpgroups go through
//! shared memory. d_q is multiplied transposed: then queries are columns of four of the five products, and more of them in a
//! step, 80 instead of 64, read less of shared memory for each product. There are registers for that because nothing of the
//! next step is under way before this one is done.
//!
//! A step: start s and d_p | p, d_z, written | start d_v | barrier | start d_q and d_k | wait for d_q, send it | wait for d_k.
//!
//! d_k and d_v leave through the places of d_z and d_q: the keys of the next tile arrive meanwhile.
//!
//! Modified scores wait for d_p before anything is done with them, and go from the raw score to d_z in parts: the derivative is
//! then used where it is computed, and takes no registers of the loop.

use super::main::{Main, tile};
use super::modified::clean;
use super::tiles::Work;
use super::walk::{Walk, clear, pack, pack_part, probabilities, score_gradients, store_results};
use crate::attention::span::{Block, Limits};
use fulgurite_ptx::{Acc, Fragment, Group, Half, Major, Pair, Scope, Sum, Thread, Tile, Word};

/// Queries of a step that are modified together.
const PART: u32 = 8;

/// What the warpgroups do.
pub(super) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let (tuning, [d, dv]) = (main.tuning, main.dims);
    let rows = tuning.rows;
    let Main { queries, outputs, keys, values, tickets, .. } = main;
    let outbox = main.outbox.as_ref().expect("bug in fulgurite: nobody adds d_q");
    // Rows are queries. One for each stage of q, one after the other.
    let exchange: Vec<_> =
        (0..tuning.depth).map(|_| main.k.tile("d_z", tile::<T>(tuning, rows, tuning.keys()))).collect();
    let (s, d_p) = (w.accumulators(rows), w.accumulators(rows));
    let d_q = d_p.part(0, rows);
    let (d_k, d_v) = (w.accumulators(d), w.accumulators(dv));
    let (p, d_z) = (w.fragment::<T>(rows), w.fragment::<T>(rows));
    let limits = Limits::of_keys(w, &main.spans);
    let (all, barrier) = (w.role_barrier(), w.group_barrier());
    let own = w.group();
    let walk = Walk::new(w, main);

    let onto = |w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: Tile<'k>| {
        w.multiply_fragment(acc, left, right.operand(Major::Outer), Sum::Onto, |_| {});
    };
    let set_limits = |w: &Scope<'k, Group>, work: &Work<'k>| {
        let first_key = (work.tile * tuning.keys() + own * 64).to_i32();
        limits.set_keys(w, first_key, main.k_len(work.sequence).to_i32(), main.lengths(work.sequence));
    };

    let modifying = main.modified.as_ref().map(|modified| modified.in_role(w, main.scale));
    let set_head = |w: &Scope<'k, Group>| {
        if let Some(modifying) = &modifying {
            let work = main.read(&tickets.again(w));
            modifying.set(w, main, &work, walk.head(), work.tile * tuning.keys() + own * 64);
        }
    };

    w.repeat(|w, leave| {
        let work = main.read(&tickets.wait(w));
        leave.when(work.steps[1].eq(0));
        set_limits(w, &work);
        walk.start(w, &work);
        set_head(w);
        clear(&d_k);
        clear(&d_v);
        // The results of the tile before have left the places of d_z and d_q.
        w.one_thread_of_group(|t| t.wait_stores_read(0));
        w.sync_role(&all);
        values.wait(w);
        keys.wait(w);
        if main.modified.as_ref().is_some_and(|modified| modified.hides()) {
            clean::<T>(w, &[keys.current(w)[0], values.current(w)[0]]);
            w.sync_role(&all);
        }
        w.repeat(|w, leave| {
            let (q, key) = (queries.wait(w)[0], keys.current(w)[0].rows(own, 64));
            w.multiply(&s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
            let (d_o, value) = (outputs.wait(w)[0], values.current(w)[0].rows(own, 64));
            w.multiply(&d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
            let set_again = |w: &Scope<'k, Group>| set_limits(w, &main.read(&tickets.again(w)));
            match &modifying {
                None => {
                    w.wait_products(1); // s
                    limits.apply_set(w, &s, &Block { first: walk.first_query(), full: None }, set_again);
                    probabilities(w, main, &s, queries.numbers(w), |_| {});
                    // d_p. The assembler takes it before the exponentials; holding it back gains nothing.
                    w.wait_products_anywhere(0);
                    score_gradients(w, [&s, &d_p], outputs.numbers(w), |eight| {
                        pack(&p, eight, &s);
                        pack(&d_z, eight, &d_p);
                    });
                }
                Some(modifying) => {
                    w.wait_products(0); // s and d_p
                    for part in 0..rows / PART {
                        let [s, d_p] = [&s, &d_p].map(|all| all.part(part, PART));
                        let [shift, delta] =
                            [queries, outputs].map(|ring| ring.numbers(w).part(w.constant(part), PART));
                        let first = walk.first_query() + (part * PART) as i32;
                        let slopes = modifying.apply(w, &s, first);
                        probabilities(w, main, &s, shift, |_| {});
                        modifying.gradients(w, [&s, &d_p], delta, &slopes, |eight| {
                            let whole = part * PART / 8 + eight;
                            pack_part(&p, whole, &s, eight);
                            pack_part(&d_z, whole, &d_p, eight);
                        });
                    }
                    // Last, when the fewest registers are taken; whatever a key that nobody sees has made of it is gone then.
                    let block = Block { first: walk.first_query(), full: None };
                    limits.hide(w, ([&p, &d_z], rows), &block, set_again);
                }
            }
            w.write_fragment_turned(queries.beside(w, exchange[0]).cols(own, 64), &d_z);
            onto(w, &d_v, &p, d_o);
            w.publish_shared();
            // One barrier is enough for two tiles of d_z: whoever passes it has waited for the d_q before.
            w.sync_role(&all);
            let (d_z_tile, key) = (queries.beside(w, exchange[0]), keys.current(w)[0].cols(own, 64));
            w.multiply(&d_q, key.operand(Major::Outer), d_z_tile.operand(Major::Inner), Sum::Fresh);
            onto(w, &d_k, &d_z, queries.current(w)[0]);
            w.wait_products(1); // d_v and d_q
            walk.send(w, outbox, &d_q);
            w.wait_products(0); // d_k
            outputs.done(w);
            queries.done(w);
            leave.when(walk.last());
            walk.forward(w, set_head);
        });
        // Read again: kept over the loop it would take registers of it.
        let work = main.read(&tickets.again(w));
        tickets.done(w);
        values.done(w);
        keys.done(w);
        let part = main.read_part(w);
        // Both are done with d_z.
        w.sync_role(&all);
        let to_v = Tile::at(main.d_v.tile(), exchange[0].nth(own).address());
        let to_k = outbox.as_tile(w, main.d_k.tile());
        let at = |w: &Scope<'k, Thread>, _| [w.constant(0), work.tile * tuning.keys() + own * 64];
        store_results::<T>(w, main, &work, &barrier, [(&d_k, to_k), (&d_v, to_v)], at);
        main.round::<T>(w, &all, part);
    });
    outbox.end(w);
    main.round_rest::<T>(w, &all);
    w.one_thread_of_group(|t| t.wait_stores_read(0));
}
