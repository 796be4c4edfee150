//! The main kernel under construction: parameters, shared memory and services, before its roles.

use crate::attention::backward::d_q::Services;
use crate::attention::backward::d_q::bulk_reduce::BulkReduce;
use crate::attention::backward::d_q::ordered::{self, Ordered};
use crate::attention::backward::d_q::round::{self, Round};
use crate::attention::backward::d_q::service::{Log, Ring};
use crate::attention::backward::d_q::split_tiles::{self, SplitTiles};
use crate::attention::backward::d_q::zero_fill::{self, ZeroFill};
use crate::attention::backward::finish::ResultArgs;
use crate::attention::backward::heads::HeadParts;
use crate::attention::backward::marks::{MarkArgs, Marks};
use crate::attention::backward::modifiers::{ModifierArgs, ModifierParams};
use crate::attention::backward::tensors::ThreadRows;
use crate::attention::backward::tiles::{Of, TileMap, TileMapArgs, Work};
use crate::attention::backward::{BackwardConfig, Features, KernelShape, Order, Spread};
use crate::params::Params;
use crate::parts::mask::Spans;
use fulgurite_core::Exp;
use fulgurite_ptx::device::{Span, TensorSpan};
use fulgurite_ptx::{
    Acc, Builder, ClusterBroadcast, Group, Half, Mailbox, Pair, PeerTiles, Pipe, Pointer, Scope, Tensor, TileShape,
    Val, Who, Word,
};
use std::rc::Rc;

/// Maximum number of tiles that are found but not loaded yet. In a fixed order there is only one, because other CTAs
/// wait for it.
const FOUND: u32 = 2;

/// A launch of the main kernel.
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
    /// f32 parts of d_k and d_v, if heads are spread over CTAs.
    pub head_parts: Span,
    /// Marks of d_k and d_v.
    pub marks: [MarkArgs; 2],
    /// f32 d_k and d_v, if the main kernel stores them or adds to them.
    pub key_rows: Option<[ResultArgs; 2]>,
    /// The first word counts tiles that are handed out, the next two belong to the zero fill.
    pub counters: Span,
    pub zero_fill: Option<zero_fill::Args>,
    pub round: Option<round::Args>,
    pub split: Option<split_tiles::Args>,
    pub ordered: Option<ordered::Args>,
    pub map: TileMapArgs,
    pub modifiers: ModifierArgs,
    /// The tensors as the threads of the `mma.sync` kernel address them.
    pub threads: Option<ThreadRows>,
    /// The factor of scores in powers of two. Modified scores already include the scale.
    pub scale_log2: f32,
    pub scale: f32,
}

/// Tensors that the load role reads.
pub(crate) struct Inputs<'k> {
    pub q: Tensor<'k>,
    pub d_o: Tensor<'k>,
    pub k: Tensor<'k>,
    pub v: Tensor<'k>,
    /// -LSE in powers of two, and delta, of padded rows.
    pub shift: Pointer<'k, f32>,
    pub delta: Pointer<'k, f32>,
}

/// Stages in shared memory that the load role fills.
pub(crate) struct Stages<'k> {
    /// q and -LSE.
    pub queries: Pipe<'k>,
    /// d_o and delta, in step with `queries`.
    pub outputs: Pipe<'k>,
    pub keys: Pipe<'k>,
    /// In step with `keys`.
    pub values: Pipe<'k>,
    /// Tiles for the compute role, in step with `keys`.
    pub tickets: Mailbox<'k>,
}

/// State that two CTAs share if they have a tile together.
pub(crate) struct CtaPair<'k> {
    /// k, loaded in half of the columns.
    pub other_k: Tensor<'k>,
    /// Columns of the other CTA's keys, in step with the own keys.
    pub other_keys: Pipe<'k>,
    /// Channel for the pair's next tile number.
    pub ticket: ClusterBroadcast<'k>,
    /// d_z of both CTAs. Rows are keys.
    pub d_z: PeerTiles<'k>,
    /// Tiles for the threads that load.
    pub found: Ring<'k>,
}

impl<'k> CtaPair<'k> {
    /// Index of a warpgroup's part of d_q among those of both CTAs.
    #[track_caller]
    fn quarter(&self, w: &Scope<'k, Group>, own: Val<'k, u32>) -> Val<'k, u32> {
        w.cluster_rank() * 2 + own
    }
}

/// The main kernel under construction.
pub(crate) struct Main<'k> {
    pub k: &'k Builder,
    pub config: BackwardConfig,
    /// Elements of a row of q and k, and of a row of v and o, as products see them.
    pub dims: [u32; 2],
    /// Elements of a row of d_k and of d_v that the products compute.
    pub widths: [u32; 2],
    /// A tile has one query head ([`KernelShape::single`]).
    pub single: bool,
    pub exp: Exp,
    pub inputs: Inputs<'k>,
    d_k: Option<Tensor<'k>>,
    d_v: Option<Tensor<'k>>,
    /// The marks of both, if they have tensors.
    marks: Option<[Marks<'k>; 2]>,
    /// The memory of f32 d_k and d_v or of their parts, which replaces both tensors if heads are spread over CTAs, or
    /// results are f32.
    pub parts: Option<HeadParts<'k>>,
    /// The first word counts the tiles that are handed out.
    pub counters: Pointer<'k, u32>,
    pub d_q: Services<'k>,
    pub map: TileMap<'k>,
    pub modifiers: Option<ModifierParams<'k>>,
    pub scale_log2: Val<'k, f32>,
    pub scale: Val<'k, f32>,
    pub stages: Stages<'k>,
    pub pair: Option<CtaPair<'k>>,
}

impl<'k> Main<'k> {
    /// Declares parameters, then shared memory.
    pub fn new<T: Half>(p: &Params<'k, Call>, features: &Features, shape: &KernelShape) -> Self
    where
        Pair<T>: Word,
    {
        let (k, config, [d, dv]) = (p.builder(), shape.config, shape.dims);
        let paired = config.share.ctas() > 1;
        if paired {
            k.cluster(config.share.ctas());
        }
        let log = Log::new();
        let tile = |rows, cols| tile::<T>(config, rows, cols);
        // Axes: element, row, head, batch. Ragged tensors have one more.
        let rank = if features.ragged.any() { 5 } else { 4 };
        let result = |cols| config.share.result(tile(64, cols));
        // Each CTA of a pair loads its part of the rows, for both.
        let (rows, keys) = (config.cta_rows(), config.cta_keys());
        let q = p.tensor("q", tile(rows, d), rank, |call| call.q.clone());
        let d_o = p.tensor("d_o", tile(rows, dv / config.share.d_o_parts()), rank, |call| call.d_o.clone());
        let key = p.tensor("k", tile(keys, d), rank, |call| call.k.clone());
        let value = p.tensor("v", tile(keys, dv), rank, |call| call.v.clone());
        let other_k = paired.then(|| p.tensor("k_other", tile(keys, d / 2), rank, |call| call.k.clone()));
        let spreads = shape.spread != Spread::No;
        let parts = spreads.then(|| HeadParts::declare(p, |call: &Call| &call.head_parts, shape.widths));
        let in_f32 = shape.results.is_f32();
        let d_k = (!spreads && !in_f32).then(|| p.tensor("d_k", result(d), rank, |call| call.d_k.clone()));
        let d_v = (!spreads && !in_f32).then(|| p.tensor("d_v", result(dv), rank, |call| call.d_v.clone()));
        let marks = (!spreads && !in_f32).then(|| declare_marks(p, features));
        let shift = p.pointer::<f32>("shift", |call| call.shift);
        let delta = p.pointer::<f32>("delta", |call| call.delta);
        let inputs = Inputs { q, d_o, k: key, v: value, shift, delta };
        let sums = p.pointer::<f32>("sums", |call| call.sums);
        let counters = p.pointer::<u32>("counters", |call| call.counters);
        let (mut d_q, map, ordered) = services::<T>(p, features, shape, (sums, counters), &log);
        let modifiers = (&features.modifiers, features.ragged.any());
        let modifiers = ModifierParams::declare(p, |call: &Call| &call.modifiers, modifiers, &log);
        let scale_log2 = p.f32("scale_log2", |call| call.scale_log2);
        let scale = p.f32("scale", |call| call.scale);
        let rows = || HeadParts::declare_rows::<T, Call>(p, |call| &call.key_rows, shape, scale);
        let parts = parts.or_else(|| in_f32.then(rows));

        let (queries, outputs) = query_stages::<T>(k, shape);
        let [keys, values] =
            [("k", d), ("v", dv)].map(|(name, cols)| k.pipe(name, config.key_depth, &[tile(keys, cols)]));
        let values = values.in_step(&keys);
        let other = other_k.map(|other_k| {
            let other = tile(config.cta_keys(), d / 2);
            let other_keys = k.pipe("k_other", config.key_depth, &[other]).in_step(&keys);
            (other_k, other_keys, k.cluster_broadcast("ticket"))
        });
        let tickets = k.mailbox("tiles", config.key_depth, map.words()).in_step(&keys);
        let reducer = config.has_bulk_reduce().then(|| k.bulk_reducer("d_q", 2, 64 * config.cols(d)).in_step(&queries));
        let pair = other.map(|(other_k, other_keys, ticket)| {
            let d_z = k.peer_tiles("d_z", 1, TileShape::new(T::NUMBER, config.cta_keys(), config.rows));
            (other_k, other_keys, ticket, d_z)
        });
        let ordered = match &pair {
            Some((.., d_z)) => ordered.map(|ordered| ordered.behind(d_z)),
            None => ordered,
        };
        d_q.ordered = ordered.map(Rc::new);
        let pair = pair.map(|(other_k, other_keys, ticket, d_z)| {
            let found = match d_q.ordered {
                None => k.token_ring("works", FOUND, &[1, 2]),
                Some(_) => k.token_ring("works", 1, &[1, 3]),
            };
            let found = Ring::new(found, "load", &["tile found", "tile loaded"], &log);
            CtaPair { other_k, other_keys, ticket, d_z, found }
        });
        let (round, split, ordered) = (d_q.round.clone(), d_q.split.clone(), d_q.ordered.clone());
        d_q.bulk = reducer.map(|reducer| BulkReduce { reducer, round, split, ordered, log });
        Main {
            k,
            config,
            dims: shape.dims,
            widths: shape.widths,
            single: shape.single,
            exp: features.exp,
            inputs,
            d_k,
            d_v,
            marks,
            parts,
            counters,
            d_q,
            map,
            modifiers,
            scale_log2,
            scale,
            stages: Stages { queries, outputs, keys, values, tickets },
            pair,
        }
    }

    /// The tensor of a result, unless heads are spread over CTAs.
    pub fn result(&self, of: Of) -> &Tensor<'k> {
        let result = if of == Of::DK { &self.d_k } else { &self.d_v };
        result.as_ref().expect("bug in fulgurite: d_k and d_v have no tensor when threads store them")
    }

    /// Marks a warpgroup's part of a result, which begins at a column and a key, where it is not finite.
    #[track_caller]
    pub fn check(&self, w: &Scope<'k, Group>, work: &Work<'k>, (of, result): (Of, &Acc<'k>), at: [Val<'k, u32>; 2]) {
        let marks = self.marks.as_ref().expect("bug in fulgurite: results in parts are checked when they are added");
        marks[usize::from(of == Of::DV)].check(w, result, |_| self.map.marked(work, at));
    }

    /// Index of a warpgroup's part of d_q, from the warpgroup's index in its CTA.
    #[track_caller]
    pub fn quarter(&self, w: &Scope<'k, Group>, own: Val<'k, u32>) -> Val<'k, u32> {
        self.pair.as_ref().map_or(own, |pair| pair.quarter(w, own))
    }

    /// The first key of the CTA's part of a tile.
    #[track_caller]
    pub fn first_key<W: Who>(&self, w: &Scope<'k, W>, work: &Work<'k>) -> Val<'k, u32> {
        let first = work.tile * self.config.keys();
        self.pair.as_ref().map_or(first, |_| w.cluster_rank().mul_add(self.config.cta_keys(), first))
    }
}

/// Declares the marks of d_k and d_v.
pub(crate) fn declare_marks<'k>(p: &Params<'k, Call>, features: &Features) -> [Marks<'k>; 2] {
    let packed = features.ragged.packed;
    [
        Marks::declare(p, "d_k", packed, |call: &Call| &call.marks[0]),
        Marks::declare(p, "d_v", packed, |call: &Call| &call.marks[1]),
    ]
}

/// Declares the services of a kernel and its tiles. `ordered` is finished later, because CTA pairs add shared memory to it.
fn services<'k, T: Half>(
    p: &Params<'k, Call>,
    features: &Features,
    shape: &KernelShape,
    (sums, counters): (Pointer<'k, f32>, Pointer<'k, u32>),
    log: &Rc<Log>,
) -> (Services<'k>, TileMap<'k>, Option<Ordered<'k>>)
where
    Pair<T>: Word,
{
    let zero_fill =
        shape.zero_fills.then(|| ZeroFill::declare(p, |call: &Call| &call.zero_fill, (sums, counters), log));
    let round = shape.rounds.then(|| Round::declare::<T, Call>(p, |call| &call.round, (shape, sums), log));
    let split = shape.splits.then(|| SplitTiles::declare(p, |call: &Call| &call.split, shape.widths, log)).map(Rc::new);
    let ordered =
        (features.order == Order::Fixed).then(|| Ordered::declare(p, |call: &Call| &call.ordered, &shape.config, log));
    let spans = Spans::of(&features.mask).transposed();
    let map = TileMap::declare(p, |call: &Call| &call.map, (shape, ordered.is_some(), features.ragged), spans);
    let round = round.zip(map.bands()).map(|(round, bands)| Rc::new(round(bands, split.clone())));
    (Services { sums, zero_fill, round, split, ordered: None, bulk: None, log: log.clone() }, map, ordered)
}

/// Stages of q and d_o.
fn query_stages<'k, T: Half>(k: &'k Builder, shape: &KernelShape) -> (Pipe<'k>, Pipe<'k>) {
    let (config, [d, dv]) = (shape.config, shape.dims);
    let tile = |cols| tile::<T>(config, config.rows, cols);
    if config.share.ctas() > 1 {
        // One stage more than d_o has parts: the remaining parts arrive while d_k and the next s are multiplied.
        let ring = |name, depth, cols| k.pipe_for_all(name, depth, &[tile(cols)], config.rows);
        let parts = config.share.d_o_parts();
        return (ring("q", config.depth, d), ring("d_o", parts + 1, dv / parts));
    }
    let ring = |name, cols| k.pipe_with_numbers(name, config.depth, &[tile(cols)], config.rows);
    let queries = ring("q", d);
    // A stage of d_o is filled before that of q, and released before the role goes on.
    let outputs = ring("d_o", dv).in_step(&queries);
    (queries, outputs)
}

/// A tile of q, k, v or d_o.
pub(crate) fn tile<T: Half>(config: BackwardConfig, rows: u32, cols: u32) -> TileShape {
    config.share.operand(TileShape::new(T::NUMBER, rows, cols))
}
