//! The main kernel of the gradients: persistent, one thread that loads and two warpgroups that compute.
//!
//! A block has a tile of 128 keys of one head, 64 a warpgroup, and walks over all queries that see them, of all heads
//! that share the keys: d_k and d_v stay in registers to the end and have one order of additions. Keys are the rows of
//! the scores, so p^T and d_z^T leave the registers as left operands of d_v and d_k; only d_q needs d_z of both
//! warpgroups, which go through shared memory. d_q is added to sums in global memory from registers.
//!
//! A step, of which s and d_p are already in flight: p | d_z, written | barrier | start d_q, d_v, d_k | wait for d_q,
//! add a part of it | wait for d_v | start the next s | add the rest | start the next d_p. d_q goes first because
//! additions are slow to leave, and the products behind it keep the tensor cores busy meanwhile.

use super::{Features, KEYS, Pack, Tuning};
use crate::attention::span::{Lengths, Limits, Spans};
use crate::exp::exp2;
use fulgurite_ptx::{
    Acc, BuildError, Builder, Divisor, Fragment, Group, Half, Kernel, Major, Pair, Pointer, Scope, Sum, Target, Thread,
    TileShape, Val, Warpgroups, Word,
};

/// A tile of keys, as the loading thread hands it out.
#[derive(Clone, Copy)]
struct Work<'k> {
    /// Its number in its head.
    tile: Val<'k, u32>,
    /// Head of keys.
    head: Val<'k, u32>,
    batch: Val<'k, u32>,
    /// Steps of queries that see it, from the first to past the last: none means that there are no more tiles.
    steps: [Val<'k, u32>; 2],
}

impl<'k> Work<'k> {
    fn message(self) -> [Val<'k, u32>; 8] {
        let zero = self.tile.literal(0);
        [self.tile, self.head, self.batch, self.steps[0], self.steps[1], zero, zero, zero]
    }
    fn read([tile, head, batch, first, end, ..]: [Val<'k, u32>; 8]) -> Self {
        Work { tile, head, batch, steps: [first, end] }
    }
}

/// The main kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_backward", target, |k| build::<T>(k, features, tuning))
}

fn build<'k, T: Half>(k: &'k Builder, features: &Features, tuning: Tuning)
where
    Pair<T>: Word,
{
    let ([d, dv], rows, depth) = (features.dims, tuning.rows, tuning.depth);
    let spans = Spans::of(&features.mask).transposed();
    let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
    // Axes: element, row, head, batch.
    let tensor = |name, rows, cols| k.tensor(name, shape(rows, cols), 4);
    let (q_tensor, d_o_tensor) = (tensor("q", rows, d), tensor("d_o", rows, dv));
    let (k_tensor, v_tensor) = (tensor("k", KEYS, d), tensor("v", KEYS, dv));
    let (d_k_tensor, d_v_tensor) = (tensor("d_k", 64, d), tensor("d_v", 64, dv));
    let [shift, delta, sums] = ["shift", "delta", "sums"].map(|name| k.pointer::<f32>(name));
    let counters = k.pointer::<u32>("counters");
    // Steps of a head, keys, tiles of a head and of all, pairs of head and sequence.
    let [steps, k_len, tiles, pairs] = ["steps", "k_len", "tiles", "pairs"].map(|name| k.param::<u32>(name));
    // The first key, and the first query, that the copy engine is told of: others are read as zeros.
    let [first_key, first_query] = ["first_key", "first_query"].map(|name| k.param::<u32>(name));
    let group = k.param::<u32>("group");
    let [heads, band, order, rest] = ["heads", "band", "order", "rest"].map(|name| k.divisor(name));
    let [scale_log2, scale] = ["scale_log2", "scale"].map(|name| k.param::<f32>(name));
    let [bottom_right, top_left] = ["bottom_right", "top_left"].map(|name| k.param::<i32>(name));
    let lengths = || Lengths { k: k_len.to_i32(), bottom_right, top_left }.transposed((steps * rows).to_i32());

    let queries = k.pipe_with_numbers("q", depth, &[shape(rows, d)], rows);
    // One stage for each of q: it is filled before, and given back before the role goes on.
    let outputs = k.pipe_with_numbers("d_o", depth, &[shape(rows, dv)], rows).in_step(&queries);
    let keys = k.pipe("kv", tuning.key_depth, &[shape(KEYS, d), shape(KEYS, dv)]);
    // One for each stage of q, one after the other.
    let exchange: Vec<_> = (0..depth).map(|_| k.tile("d_z", shape(KEYS, rows))).collect();
    let tickets = k.mailbox::<8>("tiles", tuning.key_depth).in_step(&keys);

    // Tiles in bands of `order` (head, batch) pairs (`rest` in the last band); in a band the first keys, which under a
    // causal mask most queries see, go first. `band` is the number of tiles of a band.
    let find = |tile: Val<'k, u32>| {
        let [number, tile] = band.div_rem(tile);
        let first = number * order.value();
        let count = Divisor::select((first + order.value()).le(pairs), order, rest);
        let [tile, across] = count.div_rem(tile);
        let [batch, head] = heads.div_rem(first + across);
        let start = tile * KEYS;
        let last = (start + (KEYS - 1)).min(k_len - 1);
        let steps = spans.blocks(start.to_i32(), last.to_i32(), rows, lengths());
        Work { tile, head, batch, steps }
    };

    k.role("load", Warpgroups(1).registers(tuning.registers[1]), |w| {
        w.one_thread(|t| {
            let zero = t.constant(0u32);
            let tile = t.var(t.block());
            t.repeat(|t, leave| {
                let more = tile.get().lt(tiles);
                leave.when(!more);
                let work = find(tile.get());
                // Asked for early: the answer is used after this tile's loads.
                let ticket = counters.fetch_add(t, 0, 1);
                let [first, end] = work.steps;
                let step = t.var(first);
                let left = t.var((end - first) * group);
                let head = t.var(work.head * group);
                // Where the rows of this head begin in the LSE and delta.
                let row = t.var(((work.batch * heads.value() + work.head) * group) * (steps * rows));
                let started = t.var(false);
                t.repeat(|t, leave| {
                    let first_row = step.get() * rows;
                    let at = [zero, first_row - first_query, head.get(), work.batch];
                    let number = row.get() + first_row;
                    outputs.put(t, |t, stage| {
                        stage.load(t, stage.tile(0), &d_o_tensor, &at);
                        stage.load_numbers(t, delta.at(number));
                    });
                    queries.put(t, |t, stage| {
                        stage.load(t, stage.tile(0), &q_tensor, &at);
                        stage.load_numbers(t, shift.at(number));
                    });
                    // After the first queries, which need not wait until the tile before has left.
                    t.when(!started.get(), |t| {
                        tickets.put(t, work.message());
                        keys.put(t, |t, stage| {
                            let at = [zero, work.tile * KEYS - first_key, work.head, work.batch];
                            stage.load(t, stage.tile(0), &k_tensor, &at);
                            stage.load(t, stage.tile(1), &v_tensor, &at);
                        });
                    });
                    started.set(true);
                    left.set(left.get() - 1);
                    step.set(step.get() + 1);
                    t.when(step.get().eq(end), |_| {
                        step.set(first);
                        head.set(head.get() + 1);
                        row.set(row.get() + steps * rows);
                    });
                    leave.when(left.get().eq(0));
                });
                // As many tickets as tiles are drawn (each block's first tile is its number): the last resets the counter.
                t.when(ticket.eq(tiles - 1), |t| counters.store(t, 0, 0));
                tile.set(ticket + t.blocks());
            });
            tickets.put(t, [zero; 8]);
        });
    });

    k.role("compute", Warpgroups(2).registers(tuning.registers[0]), |w| {
        let s = w.accumulators(rows);
        // d_p, then d_q in the same registers.
        let d_p = w.accumulators(rows);
        let cols = tuning.cols(d);
        let d_q = d_p.part(0, cols);
        let (d_k, d_v) = (w.accumulators(d), w.accumulators(dv));
        let (p, d_z) = (w.fragment::<T>(rows), w.fragment::<T>(rows));
        let limits = Limits::of_keys(w, &spans);
        let (all, barrier) = (w.role_barrier(), w.group_barrier());
        let own = w.group();

        let scores = |w: &Scope<'k, Group>| {
            let (q, key) = (queries.wait(w)[0], keys.current(w)[0].rows(own, 64));
            w.multiply(&s, key.operand(Major::Inner), q.operand(Major::Inner), Sum::Fresh);
        };
        let products = |w: &Scope<'k, Group>| {
            let (d_o, value) = (outputs.wait(w)[0], keys.current(w)[1].rows(own, 64));
            w.multiply(&d_p, value.operand(Major::Inner), d_o.operand(Major::Inner), Sum::Fresh);
        };
        let onto = |w: &Scope<'k, Group>, acc: &Acc<'k>, left: &Fragment<'k, T>, right: fulgurite_ptx::Tile<'k>| {
            w.multiply_fragment(acc, left, right.operand(Major::Outer), Sum::Onto, |_| {});
        };
        let values = |w: &Scope<'k, Group>| onto(w, &d_v, &p, outputs.current(w)[0]);
        let key_sums = |w: &Scope<'k, Group>| onto(w, &d_k, &d_z, queries.current(w)[0]);
        let query_sums = |w: &Scope<'k, Group>| {
            let (d_z, key) = (queries.beside(w, exchange[0]), keys.current(w)[0]);
            // Warpgroups share the columns of d_q, or its rows.
            let (d_z, key) = if cols == d { (d_z.cols(own, 64), key) } else { (d_z, key.cols(own, cols)) };
            w.multiply(&d_q, d_z.operand(Major::Outer), key.operand(Major::Outer), Sum::Fresh);
        };

        // Where this thread's part of d_q is summed.
        let place = w.var(0u64);
        let quads = cols / 8;
        let add = |w: &Scope<'k, Group>, part: std::ops::Range<u32>| {
            let elements: Vec<_> = d_q.elements().collect();
            let to = Pointer::<f32>::at_address(place.get());
            for quad in part {
                let at = 4 * quad as usize;
                to.add_four(w, quad * 512, std::array::from_fn(|i| elements[at + i]));
            }
        };
        let tile_bytes = rows * d * 4;

        let step = w.var(0u32);
        let left = w.var(0u32);
        let fresh = w.var(true);
        let forward = |w: &Scope<'k, Group>| {
            step.set(step.get() + 1);
            place.set(place.get() + u64::from(tile_bytes));
            let end = if spans.bounded_right() { Work::read(tickets.again(w)).steps[1] } else { steps };
            w.when(step.get().eq(end), |w| {
                // The next head: over the steps that see no key of this tile.
                let [first, _] = Work::read(tickets.again(w)).steps;
                step.set(first);
                place.set(place.get() + (steps - end + first).mul_wide(tile_bytes));
            });
        };
        // p, where s was.
        let probabilities = |w: &Scope<'k, Group>| {
            let shift = queries.numbers(w);
            let elements: Vec<_> = s.elements().collect();
            for eight in 0..rows / 8 {
                let shift = shift.pair(w, eight);
                for i in 0..4 {
                    let at = 4 * eight as usize + i;
                    s.set(at, exp2(features.exp, Acc::col_of(at), elements[at].mul_add(scale_log2, shift[i % 2])));
                }
                if tuning.pack == Pack::Early {
                    pack(&p, eight, &elements);
                }
            }
        };
        // d_z = p (d_p - delta), as the operand of d_k and for d_q.
        let score_gradients = |w: &Scope<'k, Group>| {
            let delta = outputs.numbers(w);
            let (own_p, elements): (Vec<_>, Vec<_>) = (s.elements().collect(), d_p.elements().collect());
            for eight in 0..rows / 8 {
                let delta = delta.pair(w, eight);
                for i in 0..4 {
                    let at = 4 * eight as usize + i;
                    d_p.set(at, (elements[at] - delta[i % 2]) * own_p[at]);
                }
                if tuning.pack == Pack::Late {
                    pack(&p, eight, &own_p);
                }
                pack(&d_z, eight, &elements);
            }
            w.write_fragment(queries.beside(w, exchange[0]).rows(own, 64), &d_z);
        };

        w.repeat(|w, leave| {
            let work = Work::read(tickets.wait(w));
            leave.when(work.steps[1].eq(0));
            let [first, end] = work.steps;
            let first_of_group = (work.tile * KEYS + own * 64).to_i32();
            limits.set_keys(w, first_of_group, k_len.to_i32(), lengths());
            left.set((end - first) * group);
            step.set(first);
            let row = ((work.batch * heads.value() + work.head) * group) * steps + first;
            let thread = own * (64 * cols) + w.thread_in_group() * 4;
            place.set(sums.at_wide(row.mul_wide(rows * d)).at(thread).address());
            for acc in [&d_k, &d_v] {
                (0..acc.elements().count()).for_each(|i| acc.set(i, 0.0));
            }
            fresh.set(true);
            keys.wait(w);
            scores(w);
            products(w);
            w.repeat(|w, leave| {
                w.wait_products(1); // s of this step and d_k of the one before
                w.when(!fresh.get(), |w| queries.release_previous(w));
                fresh.set(false);
                limits.apply(w, &s, (step.get() * rows).to_i32());
                probabilities(w);
                w.wait_products(0); // d_p
                score_gradients(w);
                w.publish_shared();
                // One barrier is enough for two tiles of d_z: whoever passes it has waited for the d_q before.
                w.sync_role(&all);
                left.set(left.get() - 1);
                // Before the products whose results are read in the loop: the assembler serialises them otherwise (C7514).
                leave.when(left.get().eq(0));
                query_sums(w);
                values(w);
                key_sums(w);
                w.wait_products(2); // d_q
                let early = quads * tuning.early / 8;
                add(w, 0..early);
                w.wait_products(if tuning.drain { 0 } else { 1 }); // d_v
                outputs.done(w);
                queries.keep(w);
                scores(w);
                add(w, early..quads);
                forward(w);
                products(w);
            });
            values(w);
            query_sums(w);
            key_sums(w);
            w.wait_products(0);
            outputs.done(w);
            queries.keep(w);
            queries.release_previous(w);
            add(w, 0..quads);
            // Read again: kept over the loop it would take registers of it.
            let work = Work::read(tickets.again(w));
            tickets.done(w);
            // d_k and d_v leave through K and V, which both warpgroups are done with.
            w.sync_role(&all);
            let [to_k, to_v] = [0, 1].map(|i| keys.current(w)[i].rows(own, 64));
            w.write::<T>(to_v, &d_v);
            w.write_with::<T>(to_k, &d_k, |_, x| x * scale);
            w.publish_shared();
            w.sync_group(&barrier);
            w.one_thread_of_group(|t: &Scope<'k, Thread>| {
                let at = [t.constant(0), work.tile * KEYS + own * 64, work.head, work.batch];
                t.store_tile(&d_v_tensor, &at, to_v);
                t.store_tile(&d_k_tensor, &at, to_k);
                t.commit_stores();
                t.wait_stores_read(0);
            });
            keys.done(w);
        });
        // No wait for the stores: they have read shared memory, and the grid does not end before they are written.
    });
}

/// Rounds the four elements of the `eight`-th eight columns.
fn pack<'k, T: Half>(to: &Fragment<'k, T>, eight: u32, from: &[Val<'k, f32>])
where
    Pair<T>: Word,
{
    for i in [0, 1] {
        let pair = 2 * eight as usize + i;
        to.set_pair(pair, from[2 * pair], from[2 * pair + 1]);
    }
}
