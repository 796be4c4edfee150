//! Forward attention on Hopper: a persistent kernel of one thread that loads and warpgroups that compute.
//!
//! s = q k^T, m = running row maximum of s, p = 2^(scale (s - m)), l = running row sum of p, o = p v. Each warpgroup
//! has 64 rows of a tile of queries and walks the keys from the last block to the first, so that masked blocks come
//! first. While the softmax of a block runs, the tensor cores work on p v of the block before it; the scores of the
//! next tile's first block are started together with the last p v of this one ("joined" tiles). A row without keys
//! yields zeros and an LSE of -inf.

use super::softmax::{Softmax, Totals};
use super::span::{Lengths, Limits, Spans};
use fulgurite_core::{Exp, Mask, Rescale};
use fulgurite_ptx::{
    Acc, BuildError, Builder, Divisor, Fragment, Group, GroupBarrier, Half, Kernel, Leave, Major, Pair, Scope, Sum,
    Target, Tensor, Thread, Tile, TileShape, Val, Var, Warpgroups, Word,
};
use std::f32::consts::LN_2;

/// How the kernel is cut: measured choices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Warpgroups that compute, 64 rows of queries each.
    pub groups: u32,
    /// Keys of a block.
    pub cols: u32,
    /// Stages of K and of V.
    pub depth: u32,
    /// Whether tiles are joined: needs two buffers of Q, and one of its own for O. Otherwise O leaves through that of
    /// Q, whose rows must be as long at least.
    pub join: bool,
    /// Registers of a thread that computes, and of one that loads.
    pub registers: [u32; 2],
    /// A warpgroup passes its turn this many steps before its p v is all started.
    pub early: u32,
    /// How the running maximum is kept.
    pub rescale: Rescale,
}

impl Tuning {
    /// What measured best on an H200 for a head dimension and about so many keys.
    pub fn hopper(head_dim: u32, k_len: usize, causal: bool) -> Tuning {
        let base = Tuning {
            groups: 2,
            cols: 128,
            depth: 2,
            join: true,
            registers: [232, 40],
            early: 0,
            rescale: Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT),
        };
        match head_dim {
            ..=64 if k_len >= 4096 => Tuning { groups: 3, cols: 96, registers: [160, 32], ..base },
            ..=64 if k_len >= 2048 && !causal => Tuning { cols: 160, ..base },
            ..=64 => base,
            65..=128 => Tuning { early: 2, ..base },
            _ => Tuning { cols: 64, join: false, registers: [240, 24], ..base },
        }
    }

    fn rows(&self) -> u32 {
        64 * self.groups
    }
}

/// What of a problem shapes the kernel's text: everything but lengths.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    /// Elements of a row of q and k, and of v and o: multiples of 16.
    pub dims: [u32; 2],
    /// Which keys a query sees.
    pub mask: Mask,
    /// How p is computed.
    pub exp: Exp,
}

/// A tile of queries, as the loading thread hands it out.
#[derive(Clone, Copy)]
struct Work<'k> {
    /// First row.
    row: Val<'k, u32>,
    head: Val<'k, u32>,
    batch: Val<'k, u32>,
    /// Blocks of keys, from the first to past the last: none means that there are no more tiles.
    blocks: [Val<'k, u32>; 2],
}

impl<'k> Work<'k> {
    fn message(self) -> [Val<'k, u32>; 8] {
        let zero = self.row.literal(0);
        [self.row, self.head, self.batch, self.blocks[1], self.blocks[0], zero, zero, zero]
    }
    /// From a message; without a mask that is bounded on the left, the first block is known.
    fn read([row, head, batch, end, first, ..]: [Val<'k, u32>; 8], spans: &Spans) -> Self {
        let first = if spans.bounded_left() { first } else { row.literal(0) };
        Work { row, head, batch, blocks: [first, end] }
    }
}

/// The forward kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, tuning: Tuning) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_forward", target, |k| Forward::<T>::new(k, features, tuning).build())
}

/// The kernel under construction: its parameters and its storage.
struct Forward<'k, T> {
    k: &'k Builder,
    tuning: Tuning,
    spans: Spans,
    exp: Exp,
    dims: [u32; 2],
    q: Tensor<'k>,
    keys: Tensor<'k>,
    values: Tensor<'k>,
    o: Tensor<'k>,
    number: std::marker::PhantomData<T>,
}

impl<'k, T: Half> Forward<'k, T>
where
    Pair<T>: Word,
{
    fn new(k: &'k Builder, features: &Features, tuning: Tuning) -> Self {
        let [d, dv] = features.dims;
        let part = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        // Axes: element, row, head, batch.
        let tensor = |name, rows, cols| k.tensor(name, part(rows, cols), 4);
        Forward {
            k,
            tuning,
            spans: Spans::of(&features.mask),
            exp: features.exp,
            dims: features.dims,
            q: tensor("q", 64, d),
            keys: tensor("k", tuning.cols, d),
            values: tensor("v", tuning.cols, dv),
            o: tensor("o", 64, dv),
            number: std::marker::PhantomData,
        }
    }

    fn build(self) {
        let (k, tuning) = (self.k, self.tuning);
        let [d, dv] = self.dims;
        let lse = k.pointer::<f32>("lse");
        // Two words: tiles handed out, and blocks done again.
        let counters = k.pointer::<u32>("counters");
        let [q_len, k_len, m_tiles, tiles, pairs] =
            ["q_len", "k_len", "m_tiles", "tiles", "pairs"].map(|name| k.param::<u32>(name));
        let [heads, group, band, order, rest] = ["heads", "group", "band", "order", "rest"].map(|name| k.divisor(name));
        let scale = k.param::<f32>("scale_log2");
        let [bottom_right, top_left] = ["bottom_right", "top_left"].map(|name| k.param::<i32>(name));
        let lengths = Lengths { k: k_len.to_i32(), bottom_right, top_left };
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);

        let queries = k.pipe("q", if tuning.join { 2 } else { 1 }, &vec![shape(64, d); tuning.groups as usize]);
        let keys = k.pipe("k", tuning.depth, &[shape(tuning.cols, d)]);
        let values = k.pipe("v", tuning.depth, &[shape(tuning.cols, dv)]);
        let staging = tuning.join.then(|| k.tile("o", shape(tuning.rows(), dv)));
        let tickets = k.mailbox::<8>("tiles", 2);

        // Tiles in bands of `order` (head, batch) pairs whose keys fit the second-level cache (`rest` in the last band); in
        // a band the rows with the most keys, the last, go first. `band` is the number of tiles of a band.
        let find = |tile: Val<'k, u32>| {
            let [number, tile] = band.div_rem(tile);
            let first = number * order.value();
            let count = Divisor::select((first + order.value()).le(pairs), order, rest);
            let [up, across] = count.div_rem(tile);
            let [batch, head] = heads.div_rem(first + across);
            let row = (m_tiles - 1 - up) * tuning.rows();
            let last = (row + (tuning.rows() - 1)).min(q_len - 1);
            let blocks = self.spans.blocks(row.to_i32(), last.to_i32(), tuning.cols, lengths);
            Work { row, head, batch, blocks }
        };

        k.role("load", Warpgroups(1).registers(tuning.registers[1]), |w| {
            w.one_thread(|t| {
                let zero = t.constant(0u32);
                // The head of K and V of the tile whose keys are loaded: a division that is not worth repeating.
                let kv_head = t.var(0u32);
                let at = |n: Val<'k, u32>, head, work: &Work<'k>| [zero, n * tuning.cols, head, work.batch];
                let load_k = |t: &Scope<'k, Thread>, n, head, work: &Work<'k>| {
                    keys.put(t, |t, stage| stage.load(t, stage.tile(0), &self.keys, &at(n, head, work)));
                };
                let load_v = |t: &Scope<'k, Thread>, n, head, work: &Work<'k>| {
                    values.put(t, |t, stage| stage.load(t, stage.tile(0), &self.values, &at(n, head, work)));
                };
                let load_q = |t: &Scope<'k, Thread>, work: &Work<'k>| {
                    queries.put(t, |t, stage| {
                        for g in 0..tuning.groups {
                            let at = [zero, work.row + 64 * g, work.head, work.batch];
                            stage.load(t, stage.tile(g as usize), &self.q, &at);
                        }
                    });
                };
                let now = WorkVars::new(t, &self.spans);
                now.set(find(t.block()));
                kv_head.set(group.div_rem(now.get().head)[0]);
                tickets.put(t, now.get().message());
                let n = t.var(now.get().blocks[1] - 1);
                load_k(t, n.get(), kv_head.get(), &now.get());
                load_q(t, &now.get());
                t.repeat(|t, leave| {
                    // Asked for early: the answer is used after this tile's loads.
                    let ticket = counters.fetch_add(t, 0, 1);
                    let (work, head) = (now.get(), kv_head.get());
                    t.repeat(|t, leave| {
                        leave.when(n.get().eq(work.blocks[0]));
                        let this = n.get();
                        load_k(t, this - 1, head, &work);
                        load_v(t, this, head, &work);
                        n.set(this - 1);
                    });
                    // As many tickets as tiles are drawn (each block's first tile is its number): the last resets the counter.
                    t.when(ticket.eq(tiles - 1), |t| counters.store(t, 0, 0));
                    let next = ticket + t.blocks();
                    let more = next.lt(tiles);
                    if !tuning.join {
                        load_v(t, work.blocks[0], head, &work);
                    }
                    t.choose(
                        more,
                        |t| {
                            let next = find(next);
                            now.set(next);
                            kv_head.set(group.div_rem(next.head)[0]);
                            tickets.put(t, next.message());
                            n.set(next.blocks[1] - 1);
                            if tuning.join {
                                load_q(t, &next);
                            }
                            load_k(t, n.get(), kv_head.get(), &next);
                            if !tuning.join {
                                load_q(t, &next);
                            }
                        },
                        |t| tickets.put(t, [zero; 8]),
                    );
                    if tuning.join {
                        load_v(t, work.blocks[0], head, &work);
                    }
                    leave.when(!more);
                });
            });
        });

        k.role("compute", Warpgroups(tuning.groups).registers(tuning.registers[0]), |w| {
            let s = w.accumulators(tuning.cols);
            let o = w.accumulators(dv);
            // Two, so that one is packed while the product of the other runs.
            let p = [w.fragment::<T>(tuning.cols), w.fragment::<T>(tuning.cols)];
            let softmax = Softmax::new(w, scale, tuning.rescale, self.exp, counters);
            let limits = Limits::new(w, &self.spans);
            let turns = w.turns();
            let barrier = w.group_barrier();
            let own = w.group();
            let first_row = |work: &Work<'k>| (work.row + own * 64).to_i32();

            let scores = |w: &Scope<'k, Group>, q: Tile<'k>, turn: bool| {
                let key = keys.wait(w)[0];
                if turn {
                    w.await_turn(&turns);
                }
                w.multiply(&s, q.operand(Major::Inner), key.operand(Major::Inner), Sum::Fresh);
            };
            let output = |w: &Scope<'k, Group>, p: &Fragment<'k, T>, pass: bool| {
                let value = values.wait(w)[0];
                w.multiply_fragment(&o, p, value.operand(Major::Outer), Sum::Onto, |left| {
                    if pass && left == tuning.early {
                        w.pass_turn(&turns);
                    }
                });
                if pass && tuning.early == 0 {
                    w.pass_turn(&turns);
                }
            };
            let mask = |w: &Scope<'k, Group>, n: Val<'k, u32>| limits.apply(w, &s, (n * tuning.cols).to_i32());
            // Each warpgroup has a tile of its own, one after the other.
            let q = |w: &Scope<'k, Group>| queries.current(w)[0].nth(own);
            let zero = || (0..o.elements().count()).for_each(|i| o.set(i, 0.0));

            let now = WorkVars::new(w, &self.spans);
            now.set(Work::read(tickets.take(w), &self.spans));
            let n = w.var(now.get().blocks[1] - 1);
            let start = |w: &Scope<'k, Group>| {
                limits.set(w, first_row(&now.get()), lengths);
                zero();
                queries.wait(w);
                scores(w, q(w), false);
                w.wait_products(0);
                keys.done(w);
                mask(w, n.get());
                softmax.first(w, &s, &p[0]);
            };
            // One block: its scores beside p v of the block before.
            let step = |w: &Scope<'k, Group>, old: &Fragment<'k, T>, new: &Fragment<'k, T>| {
                n.set(n.get() - 1);
                scores(w, q(w), true);
                output(w, old, true);
                w.wait_products(1);
                keys.done(w);
                mask(w, n.get());
                softmax.next(w, &s, new, &o);
                values.done(w);
            };
            let blocks = |w: &Scope<'k, Group>| {
                let first = now.get().blocks[0];
                w.repeat(|w, leave| {
                    leave.when(n.get().eq(first));
                    step(w, &p[0], &p[1]);
                    let done = n.get().eq(first);
                    w.when(done, |_| p[0].copy(&p[1]));
                    leave.when(done);
                    step(w, &p[1], &p[0]);
                });
            };
            let end = Epilogue { lse, heads: heads.value(), q_len, barrier: &barrier, own, scale, o: &self.o };

            if tuning.join {
                let staging =
                    staging.map(|tile| tile.rows(own, 64)).expect("bug in fulgurite: joined tiles have staging");
                start(w);
                w.repeat(|w, leave| {
                    blocks(w);
                    queries.done(w);
                    let next = Work::read(tickets.take(w), &self.spans);
                    leave.when(next.blocks[1].eq(0));
                    let done = now.get();
                    queries.wait(w);
                    scores(w, q(w), true);
                    output(w, &p[0], true);
                    let totals = softmax.totals(w);
                    now.set(next);
                    n.set(next.blocks[1] - 1);
                    limits.set(w, first_row(&next), lengths);
                    w.wait_products(1);
                    keys.done(w);
                    mask(w, n.get());
                    let sums = softmax.first(w, &s, &p[1]);
                    w.wait_products_after(0, &sums);
                    values.done(w);
                    end.run::<T>(w, &done, &o, totals, staging);
                    p[0].copy(&p[1]);
                    zero();
                });
                output(w, &p[0], false);
                let totals = softmax.totals(w);
                w.wait_products(0);
                values.done(w);
                end.run::<T>(w, &now.get(), &o, totals, staging);
            } else {
                w.repeat(|w, leave: &Leave<'k>| {
                    start(w);
                    blocks(w);
                    output(w, &p[0], false);
                    let totals = softmax.totals(w);
                    w.wait_products(0);
                    values.done(w);
                    // O leaves through the buffer of Q, which is free now.
                    let staging = Tile::at(shape(64, dv), q(w).address());
                    end.run::<T>(w, &now.get(), &o, totals, staging);
                    w.one_thread_of_group(|t| t.wait_stores_read(0));
                    w.sync_group(&barrier);
                    queries.done(w);
                    let next = Work::read(tickets.take(w), &self.spans);
                    leave.when(next.blocks[1].eq(0));
                    now.set(next);
                    n.set(next.blocks[1] - 1);
                });
            }
            w.one_thread_of_group(|t| t.wait_stores(0));
        });
    }
}

/// A tile of queries that a loop carries.
struct WorkVars<'k> {
    vars: [Var<'k, u32>; 4],
    /// Where the mask can begin after the first block.
    first: Option<Var<'k, u32>>,
}

impl<'k> WorkVars<'k> {
    fn new<W: fulgurite_ptx::Who>(w: &Scope<'k, W>, spans: &Spans) -> Self {
        WorkVars { vars: [0; 4].map(|_| w.var(0u32)), first: spans.bounded_left().then(|| w.var(0u32)) }
    }
    fn set(&self, work: Work<'k>) {
        let [first, end] = work.blocks;
        self.vars.iter().zip([work.row, work.head, work.batch, end]).for_each(|(var, x)| var.set(x));
        self.first.iter().for_each(|var| var.set(first));
    }
    fn get(&self) -> Work<'k> {
        let [row, head, batch, end] = self.vars.map(|var| var.get());
        Work { row, head, batch, blocks: [self.first.map_or(row.literal(0), |var| var.get()), end] }
    }
}

/// What happens to a tile's rows at the end.
struct Epilogue<'a, 'k> {
    lse: fulgurite_ptx::Pointer<'k, f32>,
    heads: Val<'k, u32>,
    q_len: Val<'k, u32>,
    barrier: &'a GroupBarrier,
    own: Val<'k, u32>,
    scale: Val<'k, f32>,
    o: &'a Tensor<'k>,
}

impl<'k> Epilogue<'_, 'k> {
    /// O / l through shared memory to O, and m + ln l to the LSE.
    fn run<T: Half>(&self, w: &Scope<'k, Group>, work: &Work<'k>, o: &Acc<'k>, totals: Totals<'k>, staging: Tile<'k>)
    where
        Pair<T>: Word,
    {
        let first = work.row + self.own * 64;
        let start = (work.batch * self.heads + work.head).mul_wide(self.q_len);
        for (i, (max, sum)) in totals.max.into_iter().zip(totals.sum).enumerate() {
            let row = first + w.first_row() + 8 * i as u32;
            let lse = max.mul_add(self.scale, sum.log2()) * LN_2;
            let lse = sum.gt(0.0).select::<f32>(lse, f32::NEG_INFINITY);
            w.when(row.lt(self.q_len) & w.first_col().eq(0), |w| self.lse.at_wide(start).store(w, row, lse));
        }
        let inverse = totals.sum.map(|sum| sum.gt(0.0).select::<f32>(sum.recip(), 0.0));
        // The store of the tile before must have read the staging.
        w.one_thread_of_group(|t| t.wait_stores_read(0));
        w.sync_group(self.barrier);
        w.write_with::<T>(staging, o, |row, x| x * inverse[row]);
        w.publish_shared();
        w.sync_group(self.barrier);
        w.one_thread_of_group(|t| {
            let zero = t.constant(0u32);
            t.store_tile(self.o, &[zero, first, work.head, work.batch], staging);
            t.commit_stores();
        });
    }
}
