//! The gradients of a tile of 128 keys, 64 a warpgroup, whose d_q the copy engine adds.
//!
//! As in `by_keys`, p^T and d_z^T leave the registers as left operands of d_v and d_k, and d_z of both warpgroups go through
//! shared memory. d_q is multiplied transposed: then queries are columns of four of the five products, and more of them in a
//! step, 80 instead of 64, read less of shared memory for each product.
//!
//! d_q of a step is multiplied in the next one. So the warpgroups need not meet: one computes p and d_z while the products of
//! the other run, which they take turns for. Left alone they would start them at the same time, and wait at the same time.
//!
//! A step: start s and d_p | p, d_z, written | start d_v and the d_q before, give d_z, start d_k | send the d_q before.
//!
//! d_z is given to the other warpgroup when products run already: before it can be, what was written must have arrived, which
//! takes as long as a product, and nobody needs it before the next step.
//!
//! d_v leaves through the place of the warpgroup's own values, while the last d_q is multiplied, d_k after it through that of
//! d_q: the keys of the next tile arrive meanwhile.
//!
//! Modified scores wait for d_p before anything is done with them, and go from the raw score to d_z in parts: the derivative is
//! then used where it is computed, and takes no registers of the loop.

use crate::attention::backward::modifiers::clean;
use crate::attention::backward::state::{Main, Stages, tile};
use crate::attention::backward::tiles::{Of, Work};
use crate::attention::backward::walk::{
    Walk, pack, pack_part, probabilities, score_gradients, send_results, write_result,
};
use crate::parts::mask::{Block, Limits};
use fulgurite_ptx::{Acc, Fragment, Group, Half, Major, Pair, Scope, Sum, Thread, Tile, Word};

/// Queries of a step that are modified together.
const PART: u32 = 8;

/// What the warpgroups do.
pub(crate) fn compute<'k, T: Half>(w: &Scope<'k, Group>, main: &Main<'k>)
where
    Pair<T>: Word,
{
    let (config, [d, dv]) = (main.config, main.dims);
    let rows = config.rows;
    let Stages { queries, outputs, keys, values, tickets } = &main.stages;
    let bulk = main.d_q.bulk.as_ref().expect("bug in fulgurite: the copy engine does not add");
    // Rows are queries.
    let exchange = main.k.swap("d_z", tile::<T>(config, rows, config.keys()), queries);
    let (s, d_p) = (w.accumulators(rows), w.accumulators(rows));
    // Of short rows the assembler finds no registers for the products unless d_q has its own (C7511).
    let shares_columns = config.cols(d) == rows;
    let d_q = if shares_columns { d_p.part(0, rows) } else { w.accumulators(config.cols(d)) };
    let (d_k, d_v) = (w.accumulators(d), w.accumulators(dv));
    let (p, d_z) = (w.fragment::<T>(rows), w.fragment::<T>(rows));
    let limits = Limits::of_keys(w, &main.map.spans);
    let (barrier, turns) = (w.group_barrier(), w.turns());
    let all = main.modifiers.as_ref().filter(|modified| modified.hides()).map(|_| w.role_barrier());
    let own = w.group();
    let walk = Walk::new(w, main);

    let add = |w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: Tile<'k>, first: bool| {
        let sum = if first { Sum::Fresh } else { Sum::Onto };
        w.multiply_fragment(acc, left, right.operand(Major::Outer), sum, |_| {});
    };
    let set_limits = |w: &Scope<'k, Group>, work: &Work<'k>| {
        let first_key = (work.tile * config.keys() + own * 64).to_i32();
        limits.set_keys(w, first_key, main.map.k_len(work.sequence).to_i32(), main.map.lengths(work.sequence));
    };
    let modifying = main.modifiers.as_ref().map(|modified| modified.in_role(w, main.scale));
    let set_head = |w: &Scope<'k, Group>| {
        if let Some(modifying) = &modifying {
            let work = main.map.read(&tickets.again(w));
            modifying.set(w, &main.map, &work, walk.head(), work.tile * config.keys() + own * 64);
        }
    };
    // p and d_z of a step whose s and d_p are under way.
    let weights = |w: &Scope<'k, Group>| {
        let set_again = |w: &Scope<'k, Group>| set_limits(w, &main.map.read(&tickets.again(w)));
        let block = Block { first: walk.first_query(), full: None };
        let Some(modifying) = &modifying else {
            w.wait_products(1); // s
            limits.apply_set(w, &s, &block, set_again);
            probabilities(w, main, &s, queries.numbers(w), |_| {});
            // d_p. The assembler takes it before the exponentials; holding it back gains nothing.
            w.wait_products_anywhere(0);
            w.pass_turn(&turns);
            return score_gradients(w, [&s, &d_p], outputs.numbers(w), |eight| {
                pack(&p, eight, &s);
                pack(&d_z, eight, &d_p);
            });
        };
        w.wait_products(0); // s and d_p
        w.pass_turn(&turns);
        for part in 0..rows / PART {
            let [s, d_p] = [&s, &d_p].map(|all| all.part(part, PART));
            let [shift, delta] = [queries, outputs].map(|ring| ring.numbers(w).part(w.constant(part), PART));
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
        limits.hide(w, ([&p, &d_z], rows), &block, set_again);
    };
    // d_q of the step before. Warpgroups share the columns of long rows, and the queries of short ones.
    let query_sums = |w: &Scope<'k, Group>| {
        let (d_z, key) = (exchange.wait_previous(w), keys.current(w)[0]);
        let (d_z, key) = if shares_columns { (d_z, key.cols(own, 64)) } else { (d_z.rows(own, rows / 2), key) };
        w.multiply(&d_q, key.operand(Major::Outer), d_z.operand(Major::Inner), Sum::Fresh);
    };
    let step = |w: &Scope<'k, Group>, first: bool| {
        w.await_turn(&turns);
        let (q, key) = (queries.wait(w)[0], keys.current(w)[0].rows(own, 64));
        w.multiply(&s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
        let (d_o, value) = (outputs.wait(w)[0], values.current(w)[0].rows(own, 64));
        w.multiply(&d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
        weights(w);
        w.write_fragment_turned(exchange.open(w).cols(own, 64), &d_z);
        w.await_turn(&turns);
        add(w, &d_v, &p, d_o, first);
        if !first {
            query_sums(w);
        }
        exchange.publish(w);
        add(w, &d_k, &d_z, queries.current(w)[0], first);
        w.pass_turn(&turns);
        if !first {
            w.wait_products(1); // d_v and d_q
            exchange.done_previous(w);
            walk.send(w, bulk, &d_q, None);
        }
        w.wait_products(0); // d_k
        outputs.done(w);
        queries.done(w);
    };

    w.repeat(|w, leave| {
        let work = main.map.read(&tickets.wait(w));
        leave.when(work.steps[1].eq(0));
        set_limits(w, &work);
        walk.start(w, &work);
        set_head(w);
        values.wait(w);
        keys.wait(w);
        if let Some(all) = &all {
            clean::<T>(w, &[keys.current(w)[0], values.current(w)[0]]);
            w.sync_role(all);
        }
        step(w, true);
        w.repeat(|w, leave| {
            leave.when(walk.last());
            walk.forward_step(w, |w, _| set_head(w));
            step(w, false);
        });
        // Read again: kept over the loop, or while pieces are joined, it would take registers.
        let again = |w: &Scope<'k, Group>| main.map.read(&tickets.again(w));
        let last = main.d_q.split.as_ref().map(|split| split.join(w, &again(w), [&d_k, &d_v], &barrier));
        let work = again(w);
        let where_last = |w: &Scope<'k, Group>, f: &dyn Fn(&Scope<'k, Group>)| match last {
            Some(last) => w.when(last, |w| f(w)),
            None => f(w),
        };
        let leave_through = |w: &Scope<'k, Group>, of: Of, result: &Acc<'k>, to: Tile<'k>| {
            write_result::<T>(w, main, of, result, to);
            let at = |t: &Scope<'k, Thread>| [t.constant(0), work.tile * config.keys() + own * 64];
            send_results(w, main, &work, &barrier, |t| vec![(of, to, at(t))]);
        };
        let have_left = |w: &Scope<'k, Group>| {
            w.one_thread_of_group(|t| t.wait_stores_read(0));
            w.sync_group(&barrier);
        };
        where_last(w, &|w| leave_through(w, Of::DV, &d_v, values.current(w)[0].rows(own, 64)));
        query_sums(w);
        w.wait_products(0);
        exchange.done_previous(w);
        walk.send(w, bulk, &d_q, Some(&work));
        tickets.done(w);
        where_last(w, &have_left);
        values.done(w);
        keys.done(w);
        let part = main.d_q.round.as_ref().map(|round| (round, round.read_part(w, &main.map)));
        where_last(w, &|w| leave_through(w, Of::DK, &d_k, bulk.as_tile(w, main.result(Of::DK).tile())));
        if let Some((round, sums)) = &part {
            round.round::<T>(w, &main.map, (&barrier, main.scale), sums);
        }
        where_last(w, &have_left);
    });
    bulk.end(w);
    if let Some(round) = &main.d_q.round {
        round.round_rest::<T>(w, &main.map, (&barrier, main.scale));
    }
}
