//! Forward attention on Hopper: a persistent kernel of one thread that loads and warpgroups that compute.
//!
//! s = q k^T, m = running row maximum of s, p = 2^(scale (s - m)), l = running row sum of p, o = p v. Each warpgroup
//! has 64 rows of a tile of queries and walks the keys from the last block to the first, so that masked blocks come
//! first. While the softmax of a block runs, the tensor cores work on p v of the block before it; the scores of the
//! next tile's first block are started together with the last p v of this one ("joined" tiles). A row without keys
//! yields zeros and an LSE of -inf.

pub mod config;
pub mod features;
pub mod plan;

use crate::attention::forward::config::{Added, End, ForwardConfig};
pub use crate::attention::forward::features::Features;
use crate::parts::block_lists::{Lists, Tag};
use crate::parts::epilogue::Epilogue;
use crate::parts::mask::{Block, Lengths, Limits, Spans};
use crate::parts::modifier::{Modify, Parameters, Place, Sinks, Tanh};
use crate::parts::nonfinite::{Careful, Redo, Rows};
use crate::parts::schedule::{Equal, Of, Shape, Unequal, Work, WorkVars};
use crate::parts::softmax::{Settled, Softmax, Totals};
use fulgurite_core::Exp;
use fulgurite_ptx::{
    BuildError, Builder, Fragment, Group, Half, Kernel, Leave, Major, Pair, Scope, Sum, Target, Tensor, Thread, Tile,
    TileShape, Val, Warpgroups, Word,
};
use std::f32::consts::LOG2_E;

/// The forward kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, config: ForwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Kernel::build("attention_forward", target, |k| ForwardKernel::<T>::new(k, features, config).build())
}

/// The kernel under construction: its parameters and its storage.
struct ForwardKernel<'a, 'k, T> {
    k: &'k Builder,
    features: &'a Features,
    config: ForwardConfig,
    spans: Spans,
    q: Tensor<'k>,
    keys: Tensor<'k>,
    values: Tensor<'k>,
    o: Tensor<'k>,
    number: std::marker::PhantomData<T>,
}

/// How tiles are found.
enum Tiles<'k> {
    Equal(Equal<'k>, Lengths<'k>),
    Unequal(Unequal<'k>),
}

impl<'a, 'k, T: Half> ForwardKernel<'a, 'k, T>
where
    Pair<T>: Word,
{
    fn new(k: &'k Builder, features: &'a Features, config: ForwardConfig) -> Self {
        let config = match features.exp {
            // All scores of a tile are seen before its first p: there is nothing to join.
            Exp::Sas { .. } => ForwardConfig { end: End::Parts, ..config },
            _ => config,
        };
        let (d, dv) = (features.dims[0], features.own_columns(&config));
        let part = |rows, cols| TileShape::new(T::NUMBER, rows, cols);
        let tensor = |name, rows, cols| match features.ragged.any() {
            true => k.ragged_tensor(name, part(rows, cols)),
            // Axes: element, row, head, batch.
            false => k.tensor(name, part(rows, cols), 4),
        };
        ForwardKernel {
            k,
            features,
            config,
            spans: Spans::of(&features.mask),
            q: tensor("q", 64, d),
            keys: tensor("k", config.cols, d),
            values: tensor("v", config.cols, dv),
            o: tensor("o", 64, config.parts(dv)[0]),
            number: std::marker::PhantomData,
        }
    }

    fn build(self) {
        let (k, config, features) = (self.k, self.config, self.features);
        let (d, dv, wide) = (features.dims[0], features.own_columns(&config), features.wide());
        // Tiles of q and of v in a stage: each warpgroup has its own of one of them, and the other is everyone's.
        let [q_tiles, v_tiles] = if wide { [1, config.groups] } else { [config.groups, 1] };
        let tile_rows = features.tile_rows(&config);
        let scans = matches!(features.exp, Exp::Sas { .. });
        let lse = k.pointer::<f32>("lse");
        // Two words: tiles handed out, and blocks done again.
        let counters = k.pointer::<u32>("counters");
        // Rows of the LSE of a head.
        let lse_rows = k.param::<u32>("lse_rows");
        let [heads, group] = ["heads", "group"].map(|name| k.divisor(name));
        let scale = k.param::<f32>("scale");
        let (tiles, q_len) = match features.ragged.any() {
            true => (Tiles::Unequal(Unequal::new(k, features.ragged)), None),
            false => {
                let [q_len, k_len] = ["q_len", "k_len"].map(|name| k.param::<u32>(name));
                let [bottom_right, top_left] = ["bottom_right", "top_left"].map(|name| k.param::<i32>(name));
                let lengths = Lengths { k: k_len.to_i32(), bottom_right, top_left };
                (Tiles::Equal(Equal::new(k), lengths), Some(q_len))
            }
        };
        let lists = features.blocks.map(|blocks| Lists::new(k, blocks, config.cols));
        let parameters = Parameters::new(k, &features.modifiers);
        let sinks = features.sinks.map(|dtype| Sinks::new(k, dtype));
        let careful = features.hides_elements().then(|| Careful::<T>::new(k));
        // Keys before the first that some query sees, which expressions count and nothing else does; and all there are.
        let counted = (!features.modifiers.is_empty() && q_len.is_some())
            .then(|| ["first_key", "all_keys"].map(|name| k.param::<u32>(name)));
        let shape = |rows, cols| TileShape::new(T::NUMBER, rows, cols);

        let queries = k.pipe("q", if config.joined() { 2 } else { 1 }, &vec![shape(64, d); q_tiles as usize]);
        let keys = match lists {
            Some(_) => k.tagged_pipe("k", config.depth, &[shape(config.cols, d)]),
            None => k.pipe("k", config.depth, &[shape(config.cols, d)]),
        };
        let values = k.pipe("v", config.depth, &vec![shape(config.cols, dv); v_tiles as usize]);
        let [part, buffers] = config.parts(dv);
        let staging: Vec<Tile<'k>> = (0..buffers).map(|_| k.tile("o", shape(config.rows(), part))).collect();
        let work_shape = Shape { first: self.spans.bounded_left() && lists.is_none(), ragged: features.ragged.any() };
        // Its columns beside those of v: what rows of p add up to.
        let ones = (config.added == Added::ByColumn).then(|| k.tile("ones", shape(config.cols, dv)));
        let tickets = k.mailbox("tiles", 2, work_shape.words());
        let spans = lists.is_none().then_some(&self.spans);

        // The tile of that number among those of a head, from its first row on.
        let tile_of = |t: &Scope<'k, Thread>,
                       [batch, head, number]: [Val<'k, u32>; 3],
                       sequence,
                       lengths,
                       q_len: Val<'k, u32>| {
            let row = number * tile_rows;
            let zero = row.literal(0);
            let mut work = Work { row, head, batch, blocks: [zero, zero], sequence };
            work.blocks = match &lists {
                Some(lists) => [zero, lists.count(t, &work)],
                None => {
                    let last = (row + (tile_rows - 1)).min(q_len - 1);
                    self.spans.blocks(row.to_i32(), last.to_i32(), config.cols, lengths)
                }
            };
            work
        };

        k.role("load", Warpgroups(1).registers(config.registers[1]), |w| {
            w.one_thread(|t| {
                let zero = t.constant(0u32);
                // The head of K and V of the tile whose keys are loaded: a division that is not worth repeating.
                let kv_head = t.var(0u32);
                let from =
                    |col: Val<'k, u32>, of: Of, row: Val<'k, u32>, head: Val<'k, u32>, work: &Work<'k>| match &tiles {
                        Tiles::Unequal(unequal) => unequal.slice(work, of).at(col, row, head).to_vec(),
                        Tiles::Equal(..) => vec![col, row, head, work.batch],
                    };
                let at =
                    |of: Of, row: Val<'k, u32>, head: Val<'k, u32>, work: &Work<'k>| from(zero, of, row, head, work);
                // What goes with the n-th block of a tile, where it is listed.
                let tag = |t: &Scope<'k, Thread>, n: Val<'k, u32>, work: &Work<'k>| {
                    lists.as_ref().map(|lists| {
                        let k_len = match (&tiles, work.sequence) {
                            (_, Some(sequence)) => sequence.seen,
                            (Tiles::Equal(_, lengths), _) => lengths.k.to_u32(),
                            (Tiles::Unequal(_), None) => unreachable!("bug in fulgurite: a tile without its sequence"),
                        };
                        lists.block(t, work, n, k_len)
                    })
                };
                let first_key = |n: Val<'k, u32>, tag: Option<Tag<'k>>| tag.map_or(n * config.cols, |tag| tag.key());
                let load_k = |t: &Scope<'k, Thread>, n, tag: Option<Tag<'k>>, head, work: &Work<'k>| {
                    let at = at(Of::K, first_key(n, tag), head, work);
                    match tag {
                        Some(tag) => {
                            keys.put_tagged(t, tag.0, |t, stage| stage.load(t, stage.tile(0), &self.keys, &at));
                        }
                        None => keys.put(t, |t, stage| stage.load(t, stage.tile(0), &self.keys, &at)),
                    }
                };
                let load_v = |t: &Scope<'k, Thread>, n, tag: Option<Tag<'k>>, head, work: &Work<'k>| {
                    let key = first_key(n, tag);
                    values.put(t, |t, stage| {
                        for g in 0..v_tiles {
                            let at = from(t.constant(dv * g), Of::V, key, head, work);
                            stage.load(t, stage.tile(g as usize), &self.values, &at);
                        }
                    });
                };
                let load_q = |t: &Scope<'k, Thread>, work: &Work<'k>| {
                    queries.put(t, |t, stage| {
                        for g in 0..q_tiles {
                            let at = at(Of::Q, work.row + 64 * g, work.head, work);
                            stage.load(t, stage.tile(g as usize), &self.q, &at);
                        }
                    });
                };
                let now = WorkVars::new(t, work_shape);
                let walk = match &tiles {
                    Tiles::Unequal(unequal) => Some((unequal, unequal.start(t, tile_rows, heads.value()))),
                    Tiles::Equal(..) => None,
                };
                let seek = |t: &Scope<'k, Thread>, tile: Val<'k, u32>| match (&tiles, &walk) {
                    (Tiles::Equal(equal, _), _) => tile.lt(equal.tiles),
                    (_, Some((unequal, walk))) => unequal.seek(t, walk, tile, tile_rows, heads.value()),
                    (_, None) => unreachable!("bug in fulgurite: a walk was just made"),
                };
                let find = |t: &Scope<'k, Thread>, tile: Val<'k, u32>| match (&tiles, &walk) {
                    (Tiles::Equal(equal, lengths), _) => {
                        let q_len = q_len.expect("bug in fulgurite: equal sequences have a length");
                        tile_of(t, equal.find(heads, tile), None, *lengths, q_len)
                    }
                    (_, Some((unequal, walk))) => {
                        let (place, sequence) = unequal.find(t, walk, tile, heads, spans);
                        // Rows of the last tile that are not in use are as good as the last that is.
                        tile_of(t, place, Some(sequence), sequence.lengths(), sequence.q_len.max(1))
                    }
                    (_, None) => unreachable!("bug in fulgurite: a walk was just made"),
                };
                // The last ticket resets the counter: as many as tiles are drawn, for each block's first tile is its number.
                let reset = |t: &Scope<'k, Thread>, ticket: Val<'k, u32>, total: Val<'k, u32>| {
                    t.when(ticket.eq(total - 1), |t| counters.store(t, 0, 0));
                };
                let n = t.var(0u32);
                let listed = lists.as_ref().map(|_| t.var(0u32));
                let set_tag = |tag: Option<Tag<'k>>| {
                    if let (Some(var), Some(tag)) = (listed, tag) {
                        var.set(tag.0);
                    }
                };
                let get_tag = || listed.map(|var| Tag(var.get()));
                let begin = |t: &Scope<'k, Thread>, work: Work<'k>| {
                    now.set(work);
                    kv_head.set(group.div_rem(work.head)[0]);
                    tickets.put(t, &work.message());
                    n.set(work.blocks[1] - 1);
                };
                // All keys once more than others have them, where all scores are seen first.
                let scan = |t: &Scope<'k, Thread>, work: &Work<'k>| {
                    load_q(t, work);
                    let n = t.var(n.get());
                    t.repeat(|t, leave| {
                        load_k(t, n.get(), tag(t, n.get(), work), kv_head.get(), work);
                        leave.when(n.get().eq(work.blocks[0]));
                        n.set(n.get() - 1);
                    });
                };
                let run = |t: &Scope<'k, Thread>| {
                    begin(t, find(t, t.block()));
                    if scans {
                        scan(t, &now.get());
                    }
                    let first = tag(t, n.get(), &now.get());
                    set_tag(first);
                    load_k(t, n.get(), first, kv_head.get(), &now.get());
                    if !scans {
                        load_q(t, &now.get());
                    }
                    t.repeat(|t, leave| {
                        // Asked for early: the answer is used after this tile's loads.
                        let ticket = counters.fetch_add(t, 0, 1);
                        let (work, head) = (now.get(), kv_head.get());
                        t.repeat(|t, leave| {
                            leave.when(n.get().eq(work.blocks[0]));
                            let this = n.get();
                            let (this_tag, next_tag) = (get_tag(), tag(t, this - 1, &work));
                            load_k(t, this - 1, next_tag, head, &work);
                            load_v(t, this, this_tag, head, &work);
                            n.set(this - 1);
                            set_tag(next_tag);
                        });
                        let last_tag = get_tag();
                        if let Tiles::Equal(equal, _) = &tiles {
                            reset(t, ticket, equal.tiles);
                        }
                        let next = ticket + t.blocks();
                        let more = seek(t, next);
                        if !config.joined() {
                            load_v(t, work.blocks[0], last_tag, head, &work);
                        }
                        t.choose(
                            more,
                            |t| {
                                let next = find(t, next);
                                begin(t, next);
                                let next_tag = tag(t, n.get(), &next);
                                set_tag(next_tag);
                                if config.joined() {
                                    load_q(t, &next);
                                } else if scans {
                                    scan(t, &next);
                                }
                                load_k(t, n.get(), next_tag, kv_head.get(), &next);
                                if !config.joined() && !scans {
                                    load_q(t, &next);
                                }
                            },
                            |t| {
                                if let Some((_, walk)) = &walk {
                                    reset(t, ticket, Unequal::total(walk));
                                }
                                tickets.put(t, &[]);
                            },
                        );
                        if config.joined() {
                            load_v(t, work.blocks[0], last_tag, head, &work);
                        }
                        leave.when(!more);
                    });
                };
                match &walk {
                    // Only the sequences tell how many tiles there are: a block may find none.
                    Some(_) => t.choose(seek(t, t.block()), run, |t| tickets.put(t, &[])),
                    None => run(t),
                }
            });
        });

        k.role("compute", Warpgroups(config.groups).registers(config.registers[0]), |w| {
            let s = w.accumulators(config.cols);
            let o = w.accumulators(dv + if ones.is_some() { 8 } else { 0 });
            // Two, so that one is packed while the product of the other runs.
            let p = [w.fragment::<T>(config.cols), w.fragment::<T>(config.cols)];
            // What the scores are multiplied by in the exponent: modified ones come with the scale in them.
            let scale_log2 = match features.modifiers.score {
                Some(_) => w.constant(LOG2_E * features.modifiers.factors()[1]),
                None => scale,
            };
            let softmax = Softmax::new(w, scale_log2, config.rescale, features.exp, config.added, counters);
            let limits = Limits::new(w, &self.spans);
            let modify = Modify::new(w, &features.modifiers, &parameters, scale, Tanh::of(T::NUMBER));
            let turns = w.turns();
            let barrier = w.group_barrier();
            // Which rows of the tile are the warpgroup's, and which columns where they are shared.
            let group_number = w.group();
            let own = if wide { w.constant(0u32) } else { group_number };
            let first_column = wide.then(|| group_number * dv);
            let first_row = |work: &Work<'k>| (work.row + own * 64).to_i32();
            let modifies = !features.modifiers.is_empty();
            // Where keys are counted from by expressions, where that is not 0.
            let counted_from = (modifies && work_shape.first).then(|| w.var(0u32));
            let key_of = |block: &Block<'k>| match counted_from {
                Some(from) => block.first + from.get().to_i32(),
                None => block.first,
            };

            let scores = |w: &Scope<'k, Group>, q: Tile<'k>, turn: bool| {
                let key = keys.wait(w)[0];
                if turn {
                    w.await_turn(&turns);
                }
                w.multiply(&s, q.operand(Major::Inner), key.operand(Major::Inner), Sum::Fresh);
            };
            let output = |w: &Scope<'k, Group>, p: &Fragment<'k, T>, pass: bool| {
                let value = values.wait(w)[0];
                let value = if wide { value.nth(group_number) } else { value };
                let value = value.operand(Major::Outer);
                let value = ones.map_or(value, |ones| value.beside(ones, 8));
                w.multiply_fragment(&o, p, value, Sum::Onto, |left| {
                    if pass && left == config.early {
                        w.pass_turn(&turns);
                    }
                });
                if pass && config.early == 0 {
                    w.pass_turn(&turns);
                }
            };
            // Keys there are, where some blocks are seen whole whatever the spans say.
            let all_vars = (lists.is_some() && features.ragged.any()).then(|| w.var(0i32));
            let all_keys = || match (&tiles, all_vars) {
                (_, Some(var)) => var.get(),
                (Tiles::Equal(_, lengths), None) => lengths.k,
                (Tiles::Unequal(_), None) => unreachable!("bug in fulgurite: keys of a tile were not kept"),
            };
            // The block whose scores there are; its keys may be overwritten from here on.
            let take_block = |w: &Scope<'k, Group>, n: Val<'k, u32>| {
                let tag = lists.as_ref().map(|_| Tag(keys.tag(w)));
                keys.done(w);
                let first = tag.map_or(n * config.cols, |tag| tag.key()).to_i32();
                Block { first, full: tag.map(|tag| (tag.full(), all_keys())) }
            };
            let settle = |w: &Scope<'k, Group>, block: &Block<'k>| {
                if modifies {
                    modify.apply(w, &s, key_of(block), block.is_full());
                }
                limits.apply(w, &s, block);
            };
            let set_tile = |w: &Scope<'k, Group>, work: &Work<'k>| {
                let lengths = match (&tiles, work.sequence) {
                    (_, Some(sequence)) => sequence.lengths(),
                    (Tiles::Equal(_, lengths), None) => *lengths,
                    (Tiles::Unequal(_), None) => unreachable!("bug in fulgurite: a tile without its sequence"),
                };
                limits.set(w, first_row(work), lengths);
                if let Some(var) = all_vars {
                    var.set(lengths.k);
                }
                if modifies {
                    let [q_len, k_len, first] = match (work.sequence, q_len, counted) {
                        (Some(s), ..) => [s.q_len, s.k_len, s.first],
                        (None, Some(q_len), Some([first, all])) => [q_len, all, first],
                        _ => unreachable!("bug in fulgurite: equal sequences have lengths"),
                    };
                    counted_from.iter().for_each(|from| from.set(first));
                    let (q_len, k_len) = (q_len.to_i32(), k_len.to_i32());
                    let rows = [0, 8].map(|below| first_row(work) + w.first_row().to_i32() + below);
                    modify.set(w, Place { batch: work.batch, heads: [work.head; 2], rows, q_len, k_len });
                }
            };
            // Each warpgroup has a tile of its own, one after the other, unless all have the same.
            let q = |w: &Scope<'k, Group>| match wide {
                true => queries.current(w)[0],
                false => queries.current(w)[0].nth(own),
            };
            if let Some(ones) = ones {
                w.fill(ones, T::ONE);
                w.publish_shared();
                w.sync_role(&w.role_barrier());
            }
            let zero = || (0..o.elements().count()).for_each(|i| o.set(i, 0.0));

            let now = WorkVars::new(w, work_shape);
            let n = w.var(0u32);
            let take = |w: &Scope<'k, Group>| Work::read(&tickets.take(w), work_shape);
            let start = |w: &Scope<'k, Group>| {
                set_tile(w, &now.get());
                zero();
                queries.wait(w);
                let see = |w: &Scope<'k, Group>, n: Val<'k, u32>| {
                    scores(w, q(w), false);
                    w.wait_products(0);
                    settle(w, &take_block(w, n));
                };
                if scans {
                    softmax.forget();
                    let n = w.var(n.get());
                    w.repeat(|w, leave| {
                        see(w, n.get());
                        softmax.see(w, &s);
                        leave.when(n.get().eq(now.get().blocks[0]));
                        n.set(n.get() - 1);
                    });
                }
                see(w, n.get());
                softmax.first(w, &s, &p[0]);
            };
            // One block: its scores beside p v of the block before.
            let step = |w: &Scope<'k, Group>, old: &Fragment<'k, T>, new: &Fragment<'k, T>| {
                n.set(n.get() - 1);
                scores(w, q(w), true);
                output(w, old, true);
                w.wait_products(1);
                let block = take_block(w, n.get());
                if modifies && !features.modifiers.loads_move() {
                    // Modified on the way into the exponentials, beside which that costs little. Not so loads: the assembler
                    // would start all of them at once, and has no registers for what they bring.
                    let settle = |w: &Scope<'k, Group>| settle(w, &block);
                    let cut = limits.cuts(&block, config.cols);
                    let cut = (cut, config.cols);
                    let mut quick = modify.quick(w, key_of(&block), block.is_full(), scale_log2, cut, &settle);
                    softmax.next(w, &s, new, &o, &mut quick);
                } else {
                    settle(w, &block);
                    softmax.next(w, &s, new, &o, &mut Settled(scale_log2));
                }
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
            let staging: Vec<Tile<'k>> = staging.iter().map(|tile| tile.rows(group_number, 64)).collect();
            let end = Epilogue {
                staging: &staging,
                part,
                lse,
                lse_rows,
                heads: heads.value(),
                q_len,
                unequal: match &tiles {
                    Tiles::Unequal(unequal) => Some(unequal),
                    Tiles::Equal(..) => None,
                },
                packed: features.ragged.packed,
                sinks,
                barrier: &barrier,
                own,
                first_column,
                scale: scale_log2,
                o: &self.o,
            };
            // Keys that some query sees, and which the first of them is.
            let keys_of = |work: &Work<'k>| match (&tiles, work.sequence, counted) {
                (_, Some(sequence), _) => [sequence.seen, sequence.first],
                (Tiles::Equal(_, lengths), None, Some([first, _])) => [lengths.k.to_u32(), first],
                (Tiles::Equal(_, lengths), None, None) => [lengths.k.to_u32(), w.constant(0u32)],
                (Tiles::Unequal(_), None, _) => unreachable!("bug in fulgurite: a tile without its sequence"),
            };
            let finish = |w: &Scope<'k, Group>, work: &Work<'k>, next: Option<&Work<'k>>, totals: Totals<'k>| {
                if let Some(careful) = &careful {
                    let [keys, first] = keys_of(work);
                    let rows = |w: &Scope<'k, Group>| {
                        // Rows past the last are read as the last.
                        let all = work.sequence.map(|s| s.q_room).or(q_len).unwrap_or(keys);
                        let row = work.row + own * 64 + w.first_row();
                        Rows {
                            queries: [0, 8].map(|below| (row + below).min(all.max(1) - 1)),
                            heads: [work.head; 2],
                            kv_head: group.div_rem(work.head)[0],
                        }
                    };
                    let redo = Redo {
                        work,
                        unequal: end.unequal,
                        lists: lists.as_ref(),
                        cols: config.cols,
                        keys,
                        first,
                        limits: &limits,
                        modify: &modify,
                        rows: &rows,
                        first_column,
                        exp: features.exp,
                        scale: scale_log2,
                    };
                    let back = |w: &Scope<'k, Group>| next.iter().for_each(|next| set_tile(w, next));
                    careful.run(w, &redo, &o.part(0, dv), &totals, [&|w| set_tile(w, work), &back]);
                }
                end.run::<T>(w, work, &o.part(0, dv), totals);
            };
            let run = |w: &Scope<'k, Group>| {
                if config.joined() {
                    start(w);
                    w.repeat(|w, leave| {
                        blocks(w);
                        queries.done(w);
                        let next = take(w);
                        leave.when(next.blocks[1].eq(0));
                        let done = now.get();
                        queries.wait(w);
                        scores(w, q(w), true);
                        output(w, &p[0], true);
                        let totals = softmax.totals(w, &o);
                        now.set(next);
                        n.set(next.blocks[1] - 1);
                        set_tile(w, &next);
                        w.wait_products(1);
                        settle(w, &take_block(w, n.get()));
                        // Not after the exponentials, as in a step: beside them runs what ends the tile before.
                        w.wait_products(0);
                        values.done(w);
                        softmax.first(w, &s, &p[1]);
                        finish(w, &done, Some(&next), totals);
                        p[0].copy(&p[1]);
                        zero();
                    });
                    output(w, &p[0], false);
                    let totals = softmax.totals(w, &o);
                    w.wait_products(0);
                    values.done(w);
                    finish(w, &now.get(), None, totals);
                } else {
                    w.repeat(|w, leave: &Leave<'k>| {
                        start(w);
                        blocks(w);
                        // The next tile's queries come beside the end of this one.
                        queries.done(w);
                        output(w, &p[0], false);
                        let totals = softmax.totals(w, &o);
                        w.wait_products(0);
                        values.done(w);
                        finish(w, &now.get(), None, totals);
                        let next = take(w);
                        leave.when(next.blocks[1].eq(0));
                        now.set(next);
                        n.set(next.blocks[1] - 1);
                    });
                }
            };
            let first = take(w);
            now.set(first);
            n.set(first.blocks[1] - 1);
            match &tiles {
                Tiles::Equal(..) => run(w),
                Tiles::Unequal(_) => w.when(first.blocks[1].ne(0), run),
            }
            w.one_thread_of_group(|t| t.wait_stores(0));
        });
    }
}
