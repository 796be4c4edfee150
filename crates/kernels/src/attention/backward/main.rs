//! The main kernel of the gradients: persistent, one thread that loads and two warpgroups that compute.
//!
//! A block has a tile of keys of one head and walks over all queries that see them, a step of some rows at a time, of
//! all heads that share the keys: d_k and d_v stay in registers to the end and have one order of additions. Keys are
//! the rows of the scores. d_q is added to sums in global memory. What the warpgroups do is in `by_keys`, `sent`,
//! `by_columns` and `by_pairs`; of the last, a pair of blocks has a tile together.

use crate::attention::backward::d_q::ordered::{self, Turns};
use crate::attention::backward::d_q::round::{self, Rounding};
use crate::attention::backward::d_q::split_tiles::{self, Pieces};
use crate::attention::backward::d_q::zero_fill::{self, Clearing};
use crate::attention::backward::modifiers::{AuxGradientArgs, ModifierParams};
use crate::attention::backward::schedules::{bulk, columns, keys, pairs};
use crate::attention::backward::tiles::{Of, TileArgs, Tiles, Work};
use crate::attention::backward::{Adds, BackwardConfig, Features, KernelShape, Order, Share};
use crate::params::{Params, Program};
use crate::parts::mask::Spans;
use crate::parts::modifier::AuxArgs;
use fulgurite_core::Exp;
use fulgurite_ptx::device::{Span, TensorSpan};
use fulgurite_ptx::{
    BuildError, Builder, BulkReducer, ClusterBroadcast, Divisor, Group, Half, Kernel, Mailbox, Pair, PeerTiles, Pipe,
    Pointer, Scope, Swizzle, Target, Tensor, Thread, TileShape, TokenRing, Val, Warpgroups, Who, Word,
};

/// A launch.
pub(crate) struct Call {
    pub q: TensorSpan,
    pub k: TensorSpan,
    pub v: TensorSpan,
    pub d_o: TensorSpan,
    pub d_k: TensorSpan,
    pub d_v: TensorSpan,
    /// -LSE in powers of two, and delta, of padded rows.
    pub shift: Span,
    pub delta: Span,
    /// f32 sums of d_q.
    pub sums: Span,
    /// The first word counts tiles that are handed out, the next two belong to the zero fill.
    pub counters: Span,
    pub zero_fill: Option<zero_fill::Args>,
    pub round: Option<round::Args>,
    pub split: Option<split_tiles::Args>,
    pub ordered: Option<ordered::Args>,
    /// Steps from one query head to the next.
    pub steps: u32,
    /// Query heads of each key/value head.
    pub group: u32,
    /// Key/value heads.
    pub heads: u32,
    pub tiles: TileArgs,
    /// Auxiliary tensors, and the gradients of those that want one.
    pub aux: Vec<AuxArgs>,
    pub d_aux: Vec<AuxGradientArgs>,
    /// Queries of a sequence, if all have the same.
    pub q_len: u32,
    /// The factor of scores in powers of two. Modified scores already include the scale.
    pub scale_log2: f32,
    pub scale: f32,
}

/// The main kernel, without the arguments of its launches, for a problem whose sizes are not known.
pub fn kernel<T: Half>(target: Target, features: &Features, config: BackwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(program::<T>(target, features, &KernelShape::plain(features, config))?.into_kernel())
}

/// The main kernel.
pub(crate) fn program<T: Half>(
    target: Target,
    features: &Features,
    shape: &KernelShape,
) -> Result<Program<Call>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("attention_backward", target, |p| {
        let (k, config) = (p.builder(), shape.config);
        let main = Main::new::<T>(p, features, shape);
        main.load();
        let warpgroups = |count| Warpgroups(count).registers(config.registers[0]);
        if config.share == Share::Pairs {
            let between = pairs::Between::new(&main);
            k.role("values", warpgroups(1), |w| between.of_values::<T>(w));
            return k.role("keys", warpgroups(1), |w| between.of_keys::<T>(w));
        }
        k.role("compute", warpgroups(2), |w| match config.share {
            Share::Keys if main.outbox.is_some() => bulk::compute::<T>(w, &main),
            Share::Keys => keys::compute::<T>(w, &main),
            Share::Columns | Share::Pairs => columns::compute::<T>(w, &main),
        });
    })
}

/// Tiles that are found and not loaded yet; in a fixed order, where others wait for them, none is kept.
const WORKS: u32 = 2;

/// A tile whose numbers are read again wherever they are used, where registers are short.
type Again<'a, 'k> = &'a dyn Fn(&Scope<'k, Thread>) -> Work<'k>;

/// A step of a tile, as it is loaded.
struct Step<'k> {
    /// Head of queries.
    head: Val<'k, u32>,
    /// Its number in its sequence.
    step: Val<'k, u32>,
    /// Whether it is the first of its tile.
    first: Val<'k, bool>,
}

/// The kernel under construction: its parameters and its storage.
pub(crate) struct Main<'k> {
    pub k: &'k Builder,
    pub config: BackwardConfig,
    pub dims: [u32; 2],
    pub exp: Exp,
    /// Of the mask with queries and keys exchanged.
    pub spans: Spans,
    q: Tensor<'k>,
    d_o: Tensor<'k>,
    key: Tensor<'k>,
    value: Tensor<'k>,
    pub d_k: Tensor<'k>,
    pub d_v: Tensor<'k>,
    /// -LSE in powers of two, and delta.
    numbers: [Pointer<'k, f32>; 2],
    /// Where d_q is summed.
    pub sums: Pointer<'k, f32>,
    /// The first counts the tiles that are handed out, the next are of `clearing`.
    pub counters: Pointer<'k, u32>,
    /// What of the sums is zeroed meanwhile.
    clearing: Option<Clearing<'k>>,
    /// Who rounds what of d_q, where there is no kernel for it.
    pub rounding: Option<Rounding<'k>>,
    /// How the last tiles are cut.
    pub pieces: Option<Pieces<'k>>,
    /// In a fixed order: who may add when.
    pub turns: Option<Turns<'k>>,
    /// Steps from one head of queries to the next.
    pub steps: Val<'k, u32>,
    /// Heads of queries for each head of keys, and whether that is known to be one.
    pub group: Val<'k, u32>,
    pub single: bool,
    /// Heads of keys.
    pub heads: Divisor<'k>,
    pub tiles: Tiles<'k>,
    pub modified: Option<ModifierParams<'k>>,
    pub scale_log2: Val<'k, f32>,
    pub scale: Val<'k, f32>,
    pub queries: Pipe<'k>,
    /// Stages of d_o, in step with those of q.
    pub outputs: Pipe<'k>,
    pub keys: Pipe<'k>,
    /// Where blocks work in pairs: columns of the other's keys, in step with the own.
    other: Option<Tensor<'k>>,
    pub others: Option<Pipe<'k>>,
    /// Which tile the pair has next.
    told: Option<ClusterBroadcast<'k>>,
    /// Stages of v, in step with those of k.
    pub values: Pipe<'k>,
    pub tickets: Mailbox<'k>,
    /// Where the copy engine adds: what it is to add.
    pub outbox: Option<BulkReducer<'k>>,
    /// Where blocks work in pairs: d_z, whose rows are keys, of both.
    pub d_z: Option<PeerTiles<'k>>,
    /// Tiles for the threads that load them.
    works: Option<TokenRing<'k>>,
}

impl<'k> Main<'k> {
    fn new<T: Half>(p: &Params<'k, Call>, features: &Features, shape_of: &KernelShape) -> Self
    where
        Pair<T>: Word,
    {
        let (k, config) = (p.builder(), shape_of.config);
        let ([d, dv], rows, keys) = (shape_of.dims, config.rows, config.block_keys());
        let pairs = config.share == Share::Pairs;
        if pairs {
            k.cluster(2);
        }
        let part = |cols| match config.share {
            Share::Keys => cols,
            Share::Columns | Share::Pairs => cols / 2,
        };
        let shape = |rows, cols| tile::<T>(config, rows, cols);
        // Axes: element, row, head, batch. Ragged tensors have one more.
        let rank = if features.ragged.any() { 5 } else { 4 };
        let result = |cols| TileShape { cols: part(cols), ..shape(64, cols) };
        // Each block of a pair brings its part of the rows, for both.
        let brought = rows / config.blocks();
        let of_d_o = dv / config.d_o_parts();
        let q = p.tensor("q", shape(brought, d), rank, |call| call.q.clone());
        let d_o = p.tensor("d_o", shape(brought, of_d_o), rank, |call| call.d_o.clone());
        let key = p.tensor("k", shape(keys, d), rank, |call| call.k.clone());
        let value = p.tensor("v", shape(keys, dv), rank, |call| call.v.clone());
        let other = pairs.then(|| p.tensor("k_other", shape(keys, d / 2), rank, |call| call.k.clone()));
        let d_k = p.tensor("d_k", result(d), rank, |call| call.d_k.clone());
        let d_v = p.tensor("d_v", result(dv), rank, |call| call.d_v.clone());
        let shift = p.pointer::<f32>("shift", |call| call.shift);
        let delta = p.pointer::<f32>("delta", |call| call.delta);
        let numbers = [shift, delta];
        let sums = p.pointer::<f32>("sums", |call| call.sums);
        let counters = p.pointer::<u32>("counters", |call| call.counters);
        let clearing = shape_of.zero_fills.then(|| Clearing::declare(p));
        let rounding = shape_of.rounds.then(|| Rounding::declare::<T>(p, shape_of));
        let pieces = shape_of.splits.then(|| Pieces::declare(p, shape_of.dims));
        let turns = (features.order == Order::Fixed).then(|| Turns::declare(p, &config));
        let steps = p.u32("steps", |call| call.steps);
        let group = p.u32("group", |call| call.group);
        let heads = p.divisor("heads", |call| call.heads);
        let tiles = Tiles::declare(p, features.ragged);
        let modified = ModifierParams::declare(p, &features.modifiers, features.ragged.any());
        let scale_log2 = p.f32("scale_log2", |call| call.scale_log2);
        let scale = p.f32("scale", |call| call.scale);

        let (queries, outputs) = match pairs {
            // There is room for one part more than all of d_o: the others come while d_k and the next s are multiplied.
            true => {
                let ring = |name, depth, cols| k.pipe_for_all(name, depth, &[shape(rows, cols)], rows);
                (ring("q", config.depth, d), ring("d_o", config.d_o_parts() + 1, of_d_o))
            }
            false => {
                let ring = |name, cols| k.pipe_with_numbers(name, config.depth, &[shape(rows, cols)], rows);
                let queries = ring("q", d);
                // A stage is filled before that of q, and given back before the role goes on.
                let outputs = ring("d_o", dv).in_step(&queries);
                (queries, outputs)
            }
        };
        let [keys, values] =
            [("k", d), ("v", dv)].map(|(name, cols)| k.pipe(name, config.key_depth, &[shape(keys, cols)]));
        let values = values.in_step(&keys);
        let others =
            pairs.then(|| k.pipe("k_other", config.key_depth, &[shape(config.block_keys(), d / 2)]).in_step(&keys));
        let told = pairs.then(|| k.told("ticket"));
        let tickets = k.mailbox("tiles", config.key_depth, tiles.words()).in_step(&keys);
        let outbox = (config.adds == Adds::Engine).then(|| k.outbox("d_q", 2, 64 * config.cols(d)).in_step(&queries));
        let d_z = pairs.then(|| k.exchange("d_z", 1, TileShape::new(T::NUMBER, config.block_keys(), rows)));
        let turns = match &d_z {
            Some(d_z) => turns.map(|turns| turns.behind(d_z)),
            None => turns,
        };
        let works = pairs.then(|| match turns {
            None => k.relay("works", WORKS, &[1, 2]),
            Some(_) => k.relay("works", 1, &[1, 3]),
        });
        Main {
            k,
            config,
            dims: shape_of.dims,
            exp: features.exp,
            spans: Spans::of(&features.mask).transposed(),
            q,
            d_o,
            key,
            value,
            d_k,
            d_v,
            numbers,
            sums,
            counters,
            clearing,
            rounding,
            pieces,
            turns,
            steps,
            group,
            single: shape_of.single,
            heads,
            tiles,
            modified,
            scale_log2,
            scale,
            queries,
            outputs,
            keys,
            other,
            others,
            told,
            values,
            tickets,
            outbox,
            d_z,
            works,
        }
    }

    /// Where a gradient goes.
    pub(crate) fn result(&self, of: Of) -> &Tensor<'k> {
        if of == Of::DK { &self.d_k } else { &self.d_v }
    }

    /// Which part of d_q the `own`-th warpgroup has.
    #[track_caller]
    pub(crate) fn quarter(&self, w: &Scope<'k, Group>, own: Val<'k, u32>) -> Val<'k, u32> {
        match self.config.share {
            Share::Pairs => w.cluster_rank() * 2 + own,
            Share::Keys | Share::Columns => own,
        }
    }

    /// The first key of a block's part of a tile.
    #[track_caller]
    pub(crate) fn first_key<W: Who>(&self, w: &Scope<'k, W>, work: &Work<'k>) -> Val<'k, u32> {
        let first = work.tile * self.config.keys();
        match self.config.share {
            Share::Pairs => w.cluster_rank().mul_add(self.config.block_keys(), first),
            Share::Keys | Share::Columns => first,
        }
    }

    /// Draws a number that nobody has. In a pair of blocks the first draws.
    fn draw(&self, t: &Scope<'k, Thread>) -> Val<'k, u32> {
        let Some(_) = self.told else { return self.counters.fetch_add(t, 0, 1) };
        let ticket = t.var(0u32);
        t.when(t.cluster_rank().eq(0), |t| ticket.set(self.counters.fetch_add(t, 0, 1)));
        ticket.get()
    }

    /// What the first of a pair of blocks drew, in both.
    fn share(&self, t: &Scope<'k, Thread>, ticket: Val<'k, u32>) -> Val<'k, u32> {
        self.told.as_ref().map_or(ticket, |told| told.share(t, ticket))
    }

    /// The role that loads.
    fn load(&self) {
        self.k.role("load", Warpgroups(1).registers(self.config.registers[1]), |w| {
            w.one_thread(|t| {
                match &self.works {
                    None => self.find_tiles(t, |t, work| self.load_tile(t, work)),
                    Some(works) => self.each_work(t, works, |t, again| self.load_tile(t, &again(t))),
                }
                self.tickets.put(t, &[]);
                self.turns.iter().filter(|_| self.works.is_none()).for_each(|turns| turns.post_end(t));
                self.rounding.iter().for_each(|rounding| rounding.post_end(t));
            });
            // One thread finds tiles for two that load them: d_o waits for others than q does, and registers are few.
            if let Some(works) = &self.works {
                w.one_thread_of_warp(1, |t| {
                    self.each_work(t, works, |t, again| {
                        self.each_step(t, again, |t, work, step| self.put_outputs(t, work, &step));
                    });
                });
                w.one_thread_of_warp(2, |t| {
                    self.find_tiles(t, |t, work| {
                        works.post(t, [work.tile, self.pair(work), work.steps[0], work.steps[1]]);
                    });
                    works.post_end(t);
                });
                self.turns.iter().for_each(|turns| w.one_thread_of_warp(3, |t| self.take_turns(t, works, turns)));
            }
            self.clearing.iter().for_each(|clearing| clearing.keep(w, self));
            self.rounding.iter().for_each(|rounding| rounding.keep(w, self));
            match (&self.turns, &self.outbox) {
                (Some(turns), Some(outbox)) => (0..2).for_each(|group| {
                    w.one_thread_of_warp(2 + group, |t| {
                        let until = turns.none(t);
                        let look = |t: &Scope<'k, Thread>| turns.look_once(t, self, group, until);
                        outbox.keep(t, group, look, |t| turns.tell(t, group, until));
                    });
                }),
                (None, Some(outbox)) => (0..2).for_each(|group| {
                    w.one_thread_of_warp(2 + group, |t| outbox.keep(t, group, |_| {}, |_| {}));
                }),
                (Some(turns), None) if self.works.is_none() => turns.keep(w, self),
                (_, None) => {}
            }
            w.sync_cluster();
        });
    }

    /// Finds one tile after the other.
    fn find_tiles(&self, t: &Scope<'k, Thread>, found: impl FnOnce(&Scope<'k, Thread>, &Work<'k>)) {
        // Where a tile waits for those before it, none belongs to a block that may not have begun.
        let waits = self.turns.is_some() || self.rounding.is_some() || self.pieces.is_some();
        let tile = t.var(if waits { self.share(t, self.draw(t)) } else { t.cluster() });
        let before = self.pieces.as_ref().map(|pieces| (pieces, t.var(false)));
        let walk = self.start_walk(t);
        t.repeat(|t, leave| {
            let more = self.seek(t, walk.as_ref(), tile.get());
            leave.when(!more);
            let find = |number| self.find(t, walk.as_ref(), number);
            let work = match &before {
                Some((pieces, before)) => pieces.find(tile.get(), before.get(), find),
                None => find(tile.get()),
            };
            self.rounding.iter().for_each(|r| r.post(t, self, tile.get(), self.pair(&work)));
            self.clearing.iter().for_each(|clearing| clearing.wait(t, self, self.pair(&work)));
            // Asked for early: the answer is used after this tile's loads.
            let ticket = (!waits).then(|| self.draw(t));
            found(t, &work);
            let next = |t: &Scope<'k, Thread>| {
                tile.set(match ticket {
                    Some(ticket) => self.share(t, ticket) + t.clusters(),
                    // Late: whoever comes first goes on first, and nobody waits for a tile that somebody keeps.
                    None => {
                        self.works.iter().for_each(|works| works.wait_free(t));
                        self.share(t, self.draw(t))
                    }
                });
            };
            match &before {
                Some((pieces, before)) => {
                    before.set(!before.get() & pieces.has_before(tile.get()));
                    t.when(!before.get(), next);
                }
                None => next(t),
            }
        });
    }

    /// The thread that keeps the order where blocks work in pairs.
    fn take_turns(&self, t: &Scope<'k, Thread>, works: &TokenRing<'k>, turns: &Turns<'k>) {
        t.repeat(|t, leave| {
            works.wait(t, 1);
            let work = self.posted(t, works);
            leave.when(work.steps[1].eq(0));
            // At once: the next tile is found when the loads of this one are done, its additions are later.
            works.pass(t, 1);
            self.each_step(t, &|_| work, |t, work, step| {
                turns.take(t, self, work.tile, [self.number(work, &step), step.step]);
            });
        });
    }

    /// The tile that was found.
    fn posted(&self, t: &Scope<'k, Thread>, works: &TokenRing<'k>) -> Work<'k> {
        let [tile, pair, first, end] = works.read(t, 1);
        let [batch, head] = self.heads.div_rem(pair);
        Work { tile, head, batch, steps: [first, end], piece: None, sequence: None }
    }

    /// Tiles that another thread has found.
    fn each_work(
        &self,
        t: &Scope<'k, Thread>,
        works: &TokenRing<'k>,
        load: impl FnOnce(&Scope<'k, Thread>, Again<'_, 'k>),
    ) {
        let again = |t: &Scope<'k, Thread>| self.posted(t, works);
        t.repeat(|t, leave| {
            works.wait(t, 1);
            leave.when(again(t).steps[1].eq(0));
            load(t, &again);
            works.pass(t, 1);
        });
    }

    /// Loads a tile and the steps that go with it.
    fn load_tile(&self, t: &Scope<'k, Thread>, work: &Work<'k>) {
        let (config, rows, zero) = (self.config, self.config.rows, t.constant(0u32));
        self.each_step(t, &|_| *work, |t, work, step| {
            // A ring that moves with another is filled before it.
            if self.works.is_none() {
                self.put_outputs(t, work, &step);
            }
            self.queries.put(t, |t, stage| {
                let (to, at) = (stage.tile(0), self.at(Of::Q, work, [zero, self.brought(t, &step), step.head]));
                stage.load_for_all(t, to.rows(t.cluster_rank(), rows / config.blocks()), &self.q, &at);
                stage.load_numbers(t, self.numbers[0].at(self.number(work, &step) * rows));
            });
            // After the first queries, which need not wait until the tile before has left.
            t.when(step.first, |t| {
                self.tickets.put(t, &work.message());
                let first_key = self.first_key(t, work);
                let at = |of| self.at(of, work, [zero, first_key, work.head]);
                self.values.put(t, |t, stage| stage.load(t, stage.tile(0), &self.value, &at(Of::V)));
                if let (Some(others), Some(other)) = (&self.others, &self.other) {
                    let (keys, half) = (config.block_keys(), self.dims[0] / 2);
                    let first_other = (t.cluster_rank() ^ 1).mul_add(keys, work.tile * config.keys());
                    let at = self.at(Of::K, work, [t.cluster_rank() * half, first_other, work.head]);
                    others.put(t, |t, stage| stage.load(t, stage.tile(0), other, &at));
                }
                self.keys.put(t, |t, stage| stage.load(t, stage.tile(0), &self.key, &at(Of::K)));
            });
            // Where there is a thread for all of it, it knows by itself.
            if let (Some(turns), None) = (&self.turns, &self.works) {
                turns.post(t, work, self.number(work, &step), step.step);
            }
        });
    }

    /// Loads d_o of a step, in parts.
    fn put_outputs(&self, t: &Scope<'k, Thread>, work: &Work<'k>, step: &Step<'k>) {
        let (config, dv) = (self.config, self.dims[1]);
        let parts = config.d_o_parts();
        for part in 0..parts {
            self.outputs.put(t, |t, stage| {
                let col = t.constant(part * (dv / parts));
                let (to, at) = (stage.tile(0), self.at(Of::DO, work, [col, self.brought(t, step), step.head]));
                stage.load_for_all(t, to.rows(t.cluster_rank(), config.rows / config.blocks()), &self.d_o, &at);
                stage.load_numbers(t, self.numbers[1].at(self.number(work, step) * config.rows));
            });
        }
    }

    /// The first row of a step that this block brings.
    fn brought(&self, t: &Scope<'k, Thread>, step: &Step<'k>) -> Val<'k, u32> {
        t.cluster_rank().mul_add(self.config.rows / self.config.blocks(), step.step * self.config.rows)
    }

    /// The number of a step among those of all heads.
    fn number(&self, work: &Work<'k>, step: &Step<'k>) -> Val<'k, u32> {
        self.steps_before_head(work, step.head) + step.step
    }

    /// Loads each step of a tile.
    fn each_step(
        &self,
        t: &Scope<'k, Thread>,
        again: Again<'_, 'k>,
        load: impl FnOnce(&Scope<'k, Thread>, &Work<'k>, Step<'k>),
    ) {
        let work = again(t);
        let (step, head) = (t.var(work.steps[0]), t.var(work.head * self.group));
        let started = t.var(false);
        t.repeat(|t, leave| {
            load(t, &again(t), Step { head: head.get(), step: step.get(), first: !started.get() });
            started.set(true);
            step.set(step.get() + 1);
            let work = again(t);
            t.when(step.get().eq(work.steps[1]), |_| {
                step.set(work.steps[0]);
                head.set(head.get() + 1);
            });
            // Computed again, not kept: registers are short.
            leave.when(head.get().eq((work.head + 1) * self.group));
        });
    }
}

/// A tile of q, k, v or d_o: where warpgroups share columns, half a row must be whole chunks.
pub(crate) fn tile<T: Half>(config: BackwardConfig, rows: u32, cols: u32) -> TileShape {
    let shape = TileShape::new(T::NUMBER, rows, cols);
    match config.share {
        Share::Columns | Share::Pairs if !(cols / 2).is_multiple_of(shape.chunk()) => {
            TileShape { swizzle: Swizzle::B64, ..shape }
        }
        _ => shape,
    }
}
