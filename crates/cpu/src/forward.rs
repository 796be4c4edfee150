//! Forward: goes through the keys once, for a few tiles of queries at a time.
//!
//! Letters: S = scale Q K^T as `[key][lane]`, m = running maximum, P = e^(S - m), l = running sum
//! of P, O = running P V as `[column][lane]`.

use crate::memory::{Arena, SharedRows, with_workspace};
use crate::modify::Modifier;
use crate::simd::{
    Ahead, BlockPosition, ExpKind, PipelinedTile, Policy, STRIP_LANES, SoftmaxArgs, SoftmaxStats, Square, TurnedRows,
};
use crate::step::Step;
use crate::tiles::{Context, KeyRows, Lanes, MAX_LANES, Piece, Tile};
use crate::unit::{Keys, Operands, Products, Run, Scratch};
use crate::{Counters, decode, pool};
use fulgurite_core::{Outputs, Precision, Rescale, stop};
use std::cell::LazyCell;
use std::ops::Range;
use std::sync::Mutex;

/// Largest number of elements of Q in the tiles of one item: the tiles share each block of keys, and stay in the L2
/// cache with their O.
const ITEM_ELEMENTS: usize = 128 * 1024;

/// Largest number of queries of an item whose modifier reads an element for each key and query.
const FAR_ROWS: usize = 1024;

/// Rows of a product that are computed together, about: after them it asks for memory.
pub(crate) const PRODUCT_ROWS: usize = 6;

pub(crate) struct RunOptions {
    pub rescale: Rescale,
    pub threads: usize,
}

/// Fills `outputs`.
pub(crate) fn run(cx: &Context<'_>, outputs: &mut Outputs<'_>, plan: &RunOptions) -> Counters {
    if !cx.bound.all_queries_used() {
        outputs.o.fill(0.0);
        outputs.lse.fill(f64::NEG_INFINITY);
    }
    let (o_strides, lse_strides) = (*outputs.o.strides(), *outputs.lse.strides());
    let out = Out {
        o: SharedRows::new(&mut outputs.o),
        o_strides: &o_strides,
        lse: SharedRows::new(&mut outputs.lse),
        lse_strides: &lse_strides,
    };
    cx.prepare_mask(plan.threads);
    let (few, many): (Vec<usize>, Vec<usize>) =
        (0..cx.bound.sequences().len()).partition(|&s| decode::suits(cx, &cx.bound.sequences()[s]));
    let total = Mutex::new(Counters::default());
    let add = |counters: Counters| total.lock().unwrap_or_else(|e| e.into_inner()).add(&counters);
    if !few.is_empty() {
        add(decode::run(cx, &few, &out, plan, None));
    }
    let items = items(cx, &many, plan.threads);
    pool::run(plan.threads, items.len(), &|i| {
        // Items are handed out in order, so this thread's next one is about `threads` items ahead.
        add(item(cx, &items[i], items.get(i + plan.threads), &out, plan.rescale));
        cx.kernels.fence();
    });
    total.into_inner().unwrap_or_else(|e| e.into_inner())
}

/// The outputs of a call.
pub(crate) struct Out<'a> {
    pub o: SharedRows<'a>,
    pub o_strides: &'a [usize],
    pub lse: SharedRows<'a>,
    pub lse_strides: &'a [usize],
}

/// Tiles of one sequence and key/value head that share each block of keys.
pub(crate) struct Item {
    pub kv_head: usize,
    pub tiles: Vec<Tile>,
}

/// Largest number of tiles per item.
pub(crate) fn items_of(cx: &Context<'_>) -> usize {
    // Every row of a bias is a page of its own, or more. A thousand pages stay in the translation buffers.
    let most = if cx.reads_far_rows() { (FAR_ROWS / cx.kernels.tile).clamp(1, 32) } else { 32 };
    (ITEM_ELEMENTS / (cx.kernels.tile * cx.d.max(cx.dv))).clamp(1, most)
}

pub(crate) fn items(cx: &Context<'_>, sequences: &[usize], threads: usize) -> Vec<Item> {
    let pairs = sequences.iter().flat_map(|&s| (0..cx.problem.kv_heads()).map(move |h| (s, h)));
    let rows: usize = sequences.iter().map(|&s| cx.bound.sequences()[s].q_len * cx.problem.q_heads()).sum();
    // Each tile is listed twice.
    stop::ask("the list of tiles", rows.div_ceil(cx.kernels.tile) * 2 * size_of::<Tile>());
    let mut all: Vec<(usize, Vec<Tile>)> = pairs.map(|(s, h)| (h, cx.tiles(s, h).collect())).collect();
    let share = share(cx, &all, threads);
    let mut items = Vec::new();
    for (kv_head, tiles) in &mut all {
        let parts = tiles.len().div_ceil(share).max(1);
        // Long rows (under a causal mask, the last ones) go first, so that no long item is left to the end.
        for group in tiles.chunks(tiles.len().div_ceil(parts).max(1)).rev() {
            items.push(Item { kv_head: *kv_head, tiles: group.to_vec() });
        }
    }
    items
}

/// Number of tiles per item. It changes no bits.
fn share(cx: &Context<'_>, pairs: &[(usize, Vec<Tile>)], threads: usize) -> usize {
    let most = items_of(cx);
    let tiles: usize = pairs.iter().map(|(_, tiles)| tiles.len()).sum();
    let longest = pairs.iter().map(|(_, tiles)| tiles.len()).max().unwrap_or(0).min(most);
    // With eight items for each thread, the threads finish together.
    let plenty = tiles / (8 * threads);
    if plenty >= longest {
        return plenty.clamp(1, most);
    }
    // Each item packs its keys again, and the threads wait for the last item. Count in 32nds of a tile's products.
    let packing = if cx.kernels.matrix_for(cx.problem.dtype()).is_some() { 32 } else { 4 };
    let time = |share: usize| {
        let items: usize = pairs.iter().map(|(_, tiles)| tiles.len().div_ceil(share)).sum();
        let item = (32 * tiles).div_ceil(items.max(1)) + packing;
        // A quarter of an item for what the threads cannot foresee.
        4 * items.div_ceil(threads) * item + item
    };
    (1..=longest.max(1)).rev().min_by_key(|&share| time(share)).unwrap_or(1)
}

/// A tile of queries on its way through the keys, with its softmax and output so far.
pub(crate) struct QueryTile<'w> {
    pub tile: Tile,
    pub lanes: Lanes,
    /// Q^T in the unit's layout.
    pub q: &'w mut [f32],
    /// O^T, `[dv][lanes]`, with whole vectors of columns.
    pub o: &'w mut [f32],
    pub m: [f32; MAX_LANES],
    pub l: [f32; MAX_LANES],
}

fn item(cx: &Context<'_>, item: &Item, next: Option<&Item>, out: &Out<'_>, rescale: Rescale) -> Counters {
    // TurboAttention's function is relative to the final maximum: find that first.
    let passes: &[Policy] = match (cx.exp, rescale) {
        // Codes are relative to the maximum so far, block by block.
        _ if matches!(cx.problem.precision(), Precision::Int8(_)) => &[Policy::Raise(0.0)],
        (ExpKind::Sas(_), _) => &[Policy::MaxOnly, Policy::Final],
        // The table begins at the running maximum.
        (ExpKind::SasOnline, _) => &[Policy::Raise(0.0)],
        // Rounded weights also need the final maximum first.
        _ if cx.rounding.is_some() => &[Policy::MaxOnly, Policy::Final],
        (_, Rescale::Always) => &[Policy::Raise(0.0)],
        (_, Rescale::Lazy(tau)) => &[Policy::Raise(tau)],
        (_, Rescale::Optimistic(limit)) => &[Policy::Trust(limit)],
    };
    walk(cx, item, Coming { next, out: Some(out) }, passes, |queries, rows| finish(cx, queries, rows, out))
}

/// Calls `take` with the maximum of every row of every tile.
pub(crate) fn maxima(cx: &Context<'_>, threads: usize, take: &(dyn Fn(&Tile, usize, f32) + Sync)) {
    let sequences: Vec<usize> = (0..cx.bound.sequences().len()).collect();
    let items = items(cx, &sequences, threads);
    pool::run(threads, items.len(), &|i| {
        walk(cx, &items[i], Coming::default(), &[Policy::MaxOnly], |queries, _| {
            (0..queries.tile.rows).for_each(|lane| take(&queries.tile, lane, queries.m[lane]));
        });
    });
}

/// Calls `take` with the maximum, and the sum of weights relative to it, of every row of every tile.
pub(crate) fn sums(cx: &Context<'_>, threads: usize, take: &(dyn Fn(&Tile, usize, [f32; 2]) + Sync)) {
    let sequences: Vec<usize> = (0..cx.bound.sequences().len()).collect();
    let items = items(cx, &sequences, threads);
    pool::run(threads, items.len(), &|i| {
        walk(cx, &items[i], Coming::default(), &[Policy::Raise(0.0)], |queries, _| {
            (0..queries.tile.rows).for_each(|lane| take(&queries.tile, lane, [queries.m[lane], queries.l[lane]]));
        });
    });
}

/// What a thread touches after an item's products, so that memory can be asked for it: its next item, and the rows of the
/// outputs that this one writes.
#[derive(Clone, Copy, Default)]
struct Coming<'a, 'o> {
    next: Option<&'a Item>,
    out: Option<&'a Out<'o>>,
}

/// Takes an item's tiles through their keys, once per policy, and passes each to `end` with scratch memory.
fn walk(
    cx: &Context<'_>,
    item: &Item,
    coming: Coming<'_, '_>,
    passes: &[Policy],
    mut end: impl FnMut(&mut QueryTile<'_>, &mut [f32]),
) -> Counters {
    let tile = cx.kernels.tile;
    let (room, block_keys) = (cx.unit.buffer_sizes(cx), cx.unit.block(cx));
    // Scratch for one tile: rows and columns of Q, later rows of O.
    let scratch = Arena::room(tile * cx.d_pad) + tile * cx.d_pad.max(cx.dv_pad);
    let sizes = [room.values, room.weights, block_keys * tile, scratch];
    let (span, block_sizes) = (cx.unit.span(cx), [block_keys * room.key, room.values]);
    let per_row = Arena::room(room.queries) + Arena::room(cx.dv_pad * tile);
    let all = sizes.iter().map(|&n| Arena::room(n)).sum::<usize>() + item.tiles.len() * per_row;
    let all = all + span * block_sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    with_workspace(all, |workspace| {
        let mut arena = Arena::new(workspace);
        let [values, weights, s, rows] = sizes.map(|n| arena.take(n));
        let mut buffers: Vec<[&mut [f32]; 2]> = (0..span).map(|_| block_sizes.map(|n| arena.take(n))).collect();
        let mut scratch = Scratch::new(values, weights);
        let sequence = &cx.bound.sequences()[item.tiles[0].sequence];
        let mut walk: Vec<QueryTile<'_>> = item
            .tiles
            .iter()
            .map(|&t| {
                let lanes = cx.lanes(&t);
                let stride = lanes.stride;
                let q = arena.take(room.queries);
                cx.unit.queries(cx, &t, stride, rows, q);
                let o = arena.take(cx.dv_pad * stride);
                o.fill(0.0);
                QueryTile { tile: t, lanes, q, o, m: [f32::NEG_INFINITY; MAX_LANES], l: [0.0; MAX_LANES] }
            })
            .collect();
        let mut counters = Counters::default();
        let mut modifier = cx.modifier(cx.unit.score_scale(cx));
        // Stop after the last key that some lane sees.
        let last = if cx.problem.blocks().is_some() {
            sequence.k_len
        } else {
            walk.iter().map(|r| r.lanes.reach().1).max().unwrap_or(0)
        };
        let mut ahead = [Ahead::default(); 2];
        let _held = cx.unit.hold();
        if cx.slopes() && matches!(passes, [Policy::Trust(_)]) {
            let (scratch, ahead, counters) = (&mut scratch, &mut ahead, &mut counters);
            let state = &mut State { s: &mut *s, scratch, ahead, counters, modifier: &mut modifier };
            look_near(cx, item.kv_head, &mut walk, &mut *buffers[0][0], state);
        }
        for &policy in passes {
            for start in (0..last).step_by(span * block_keys) {
                stop::poll();
                let starts = (start..last.min(start + span * block_keys)).step_by(block_keys);
                let blocks: Vec<PackedBlock<'_, _>> = starts
                    .zip(&mut buffers)
                    .map(|(start, [k, v])| {
                        let range = start..(start + block_keys).min(sequence.k_len);
                        let own = Keys { sequence, head: item.kv_head, range: range.clone() };
                        // Pack when the first tile needs it.
                        PackedBlock { keys: range, rows: LazyCell::new(move || cx.unit.block_of(cx, &own, [k, v])) }
                    })
                    .collect();
                let end = blocks.last().map_or(last, |block| block.keys.end);
                if end < last {
                    let next_keys = end..(end + span * block_keys).min(sequence.k_len);
                    cx.prefetch_keys(sequence, item.kv_head, next_keys, &mut ahead);
                }
                if start == 0 {
                    prefetch_coming(cx, item, coming, span * block_keys, &mut ahead);
                }
                if span == 1 {
                    // Scores have a row for each key, outputs one for each column.
                    ahead[0].within(walk.len() * (end - start) / PRODUCT_ROWS);
                    ahead[1].within(walk.len() * cx.dv / PRODUCT_ROWS);
                }
                let mut state = State {
                    s: &mut *s,
                    scratch: &mut scratch,
                    ahead: &mut ahead,
                    counters: &mut counters,
                    modifier: &mut modifier,
                };
                // If the unit takes several blocks at once, the other blocks come first.
                let pipelined = matches!(policy, Policy::Trust(_)) && span > 1;
                let begins: Vec<usize> = walk
                    .iter()
                    .map(|queries| if pipelined { begin(cx, queries, &blocks) } else { blocks.len() })
                    .collect();
                for (queries, &begin) in walk.iter_mut().zip(&begins) {
                    for block in &blocks[..begin] {
                        let origin = block.keys.start;
                        for piece in cx.pieces(&queries.tile, block.keys.clone()) {
                            let Some(step) = cx.step(&queries.tile, &queries.lanes, &piece, origin) else { continue };
                            fold(cx, queries, &step, origin, *block.rows, policy, &mut state);
                        }
                    }
                }
                pipeline(cx, &mut walk, &begins, &blocks, policy, &mut state);
            }
        }
        let scale = cx.score_scale();
        for queries in &mut walk {
            queries.m.iter_mut().for_each(|m| *m *= scale);
            cx.exp.origins(&mut queries.m);
            end(queries, rows);
        }
        counters
    })
}

/// Gives lanes the maximum of the keys at their own place. With distances in the scores the largest are there, and the
/// first keys of a sequence would be trusted in vain: every block towards the query would be computed again.
fn look_near(
    cx: &Context<'_>,
    kv_head: usize,
    walk: &mut [QueryTile<'_>],
    buffer: &mut [f32],
    state: &mut State<'_, '_, '_>,
) {
    let block = cx.unit.block(cx);
    for queries in walk {
        let sequence = &cx.bound.sequences()[queries.tile.sequence];
        let range = cx.queries(&queries.tile);
        let place = |q: usize| (q + sequence.k_len).saturating_sub(sequence.q_len);
        let (first, last) = queries.lanes.reach();
        let middle = place((range.start + range.end) / 2);
        if !(first..last).contains(&middle) || cx.problem.blocks().is_some() {
            continue;
        }
        let own = middle / block * block..(middle / block * block + block).min(sequence.k_len);
        let keys = place(range.start).clamp(own.start, own.end)..place(range.end).clamp(own.start, own.end);
        // Units pack keys in groups of up to 64.
        let start = keys.start / 64 * 64;
        let piece = Piece { keys, masked: true };
        if let Some(step) = cx.step(&queries.tile, &queries.lanes, &piece, start) {
            let own = Keys { sequence, head: kv_head, range: start..piece.keys.end };
            let k = cx.unit.keys_of(cx, &own, &mut *buffer);
            // Nothing reads the values.
            fold(cx, queries, &step, start, [k, k], Policy::MaxOnly, state);
        }
    }
}

/// Keys and values that are packed together.
struct PackedBlock<'b, F> {
    keys: Range<usize>,
    rows: LazyCell<[KeyRows<'b>; 2], F>,
}

/// Scratch state of a pass over the keys.
pub(crate) struct State<'w, 'a, 'm> {
    pub s: &'w mut [f32],
    pub scratch: &'w mut Scratch<'a>,
    pub ahead: &'w mut [Ahead; 2],
    pub counters: &'w mut Counters,
    pub modifier: &'w mut Modifier<'m>,
}

/// The first block from which on all lanes of a tile see every key up to their ends, if they see any; else one past the
/// last.
fn begin<F>(cx: &Context<'_>, queries: &QueryTile<'_>, blocks: &[PackedBlock<'_, F>]) -> usize {
    let (lanes, n) = (&queries.lanes, blocks.len());
    let lo = lanes.lo[..lanes.stride].iter().max().map_or(0, |&lo| lo as usize);
    let first = blocks.iter().position(|block| block.keys.start >= lo).unwrap_or(n);
    let seen = blocks.get(first).is_some_and(|block| block.keys.start < lanes.reach().1);
    if seen && lanes.stride == cx.kernels.tile { first } else { n }
}

/// Takes each tile through the blocks, starting at its own first block, all together.
fn pipeline<'b, F: FnOnce() -> [KeyRows<'b>; 2]>(
    cx: &Context<'_>,
    walk: &mut [QueryTile<'_>],
    begins: &[usize],
    blocks: &[PackedBlock<'b, F>],
    policy: Policy,
    state: &mut State<'_, '_, '_>,
) {
    let earliest = begins.iter().copied().min().unwrap_or(blocks.len());
    let (Policy::Trust(limit), Some(first)) = (policy, blocks.get(earliest)) else { return };
    let blocks = &blocks[earliest..];
    let mut own: Vec<PipelinedQueries<'_, '_>> = Vec::with_capacity(walk.len());
    for (queries, &begin) in walk.iter_mut().zip(begins).filter(|(_, begin)| **begin < earliest + blocks.len()) {
        let sees_none = |block: &PackedBlock<'b, F>| cx.sees_none(&queries.tile, &queries.lanes, &block.keys);
        let hidden = if cx.problem.mask_rest().is_some() { blocks.iter().map(sees_none).collect() } else { Vec::new() };
        own.push(PipelinedQueries { queries, begin: begin - earliest, hidden });
    }
    let seen =
        |block: usize| own.iter().any(|own| own.begin <= block && !own.hidden.get(block).is_some_and(|&hidden| hidden));
    let Some(some) = (0..blocks.len()).find(|&block| seen(block)) else { return };
    // Blocks that no tile sees are not packed: nothing reads what stands in their place.
    let rows: Vec<[KeyRows<'_>; 2]> =
        (0..blocks.len()).map(|block| *blocks[if seen(block) { block } else { some }].rows).collect();
    pipeline_rows(cx, &mut own, first.keys.start, (&rows, false), limit, state);
}

/// Processes blocks that a tile sees whole, relative to a trusted maximum.
pub(crate) fn pipeline_whole(
    cx: &Context<'_>,
    queries: &mut QueryTile<'_>,
    blocks: &[[KeyRows<'_>; 2]],
    limit: f32,
    state: &mut State<'_, '_, '_>,
) {
    // Treat them as the first keys, and as the last that it sees.
    let seen = Lanes::whole(queries.lanes.stride, blocks.len() * cx.unit.block(cx));
    let own = std::mem::replace(&mut queries.lanes, seen);
    pipeline_rows(
        cx,
        &mut [PipelinedQueries { queries, begin: 0, hidden: Vec::new() }],
        0,
        (blocks, true),
        limit,
        state,
    );
    queries.lanes = own;
}

/// A tile among those that go through blocks together, its first block, and the blocks of which it sees nothing.
struct PipelinedQueries<'r, 'w> {
    queries: &'r mut QueryTile<'w>,
    begin: usize,
    hidden: Vec<bool>,
}

/// Takes each tile through the blocks, whose keys start at `origin`, from its own first block. With `whole`, every tile
/// sees all of them.
fn pipeline_rows(
    cx: &Context<'_>,
    walk: &mut [PipelinedQueries<'_, '_>],
    origin: usize,
    (rows, whole): (&[[KeyRows<'_>; 2]], bool),
    limit: f32,
    state: &mut State<'_, '_, '_>,
) {
    let block_keys = cx.unit.block(cx);
    let mut position = BlockPosition::default();
    loop {
        let (mut tiles, mut places) = (Vec::with_capacity(walk.len()), Vec::with_capacity(walk.len()));
        for PipelinedQueries { queries, begin, hidden } in walk.iter_mut() {
            let QueryTile { tile, q, o, m, l, lanes } = &mut **queries;
            let lanes = &*lanes;
            tiles.push(PipelinedTile { q, o, m, l, hi: &lanes.hi, begin: *begin, hidden });
            places.push((*tile, lanes));
        }
        let modifier = &mut *state.modifier;
        let asked = cx.is_modified() || places.iter().any(|(_, lanes)| !lanes.decided);
        let modifies = asked && !whole;
        let mut modify = |square: Square<'_>| {
            let (tile, lanes) = &places[square.tile];
            cx.modify_square(modifier, (tile, lanes), square);
        };
        let run = Run {
            blocks: rows,
            origin,
            tiles: &mut tiles,
            first: position,
            limit,
            s: state.s,
            weights: state.scratch.weights,
            ahead: state.ahead,
            modify: if modifies { Some(&mut modify) } else { None },
        };
        let Some(stop) = cx.unit.pipeline(cx, run) else { return };
        // One block of one strip that the fast path cannot handle.
        let (own, block) = (&mut *walk[stop.tile].queries, stop.block.unwrap_or(0));
        let start = origin + block * block_keys;
        let k_len = cx.bound.sequences()[own.tile.sequence].k_len;
        let piece = Piece { keys: start..(start + block_keys).min(k_len), masked: true };
        if let Some(mut step) = cx.step(&own.tile, &own.lanes, &piece, start) {
            let vectors = STRIP_LANES / cx.kernels.lanes;
            step.only(stop.strip * vectors..(stop.strip + 1) * vectors);
            // If all lanes see the block whole, visibility need not be checked, and its keys are not at `start`.
            let [k, v] = rows[block];
            let v = KeyRows { finite: v.finite || whole, ..v };
            fold(cx, own, &step, start, [k, v], Policy::Trust(limit), state);
        }
        position = BlockPosition { block: Some(block + 1), ..stop };
    }
}

/// Prefetches the rows of O that an item writes, then the first blocks of keys of a later item, and its queries.
fn prefetch_coming(cx: &Context<'_>, item: &Item, coming: Coming<'_, '_>, keys: usize, ahead: &mut [Ahead; 2]) {
    let ends = |item: &Item| {
        let (first, last) = (&item.tiles[0], &item.tiles[item.tiles.len() - 1]);
        // The range is empty if the last tile belongs to another head and is earlier.
        let queries = cx.queries(first).start..cx.queries(last).end;
        (&cx.bound.sequences()[first.sequence], first.head, queries)
    };
    let one_head = cx.pack == 1;
    // A matrix unit writes O past its products in another way.
    if let (Some(out), true, None) = (coming.out, one_head, cx.kernels.matrix_for(cx.problem.dtype()))
        && !out.o.is_large()
    {
        let (sequence, head, queries) = ends(item);
        let at = cx.query_layout(out.o_strides, sequence);
        out.o.prefetch(&mut ahead[1], at.at(queries.start, head), at.row, cx.dv, queries.len());
    }
    if let Some(next) = coming.next {
        let (sequence, head, queries) = ends(next);
        cx.prefetch_keys(sequence, next.kv_head, 0..keys.min(sequence.k_len), ahead);
        if one_head {
            cx.prefetch_queries(sequence, head, queries, &mut ahead[0]);
        }
    }
}

/// Computes S, then P, then O: folds one block of keys into a tile's running summary.
pub(crate) fn fold(
    cx: &Context<'_>,
    queries: &mut QueryTile<'_>,
    step: &Step,
    start: usize,
    [k, v]: [KeyRows<'_>; 2],
    policy: Policy,
    State { s, scratch, ahead, counters, modifier }: &mut State<'_, '_, '_>,
) {
    scores(cx, queries, (step, start), k, s, &mut ahead[0], modifier);
    let stride = queries.lanes.stride;
    let seen = match policy {
        Policy::MaxOnly => None,
        _ => cx.hidden_values((&queries.tile, stride), (step, start), v, s, scratch.values),
    };
    let before = (queries.m, queries.l);
    let (mut stats, mut alpha) = softmax(cx, queries, step, s, [k, v], scratch, policy);
    if stats.distrusted > 0 {
        // The cold path: the trusted maximum was too low. Recompute with the true one.
        counters.blocks_redone += 1;
        (queries.m, queries.l) = before;
        scores(cx, queries, (step, start), k, s, &mut ahead[0], modifier);
        (stats, alpha) = softmax(cx, queries, step, s, [k, v], scratch, Policy::Raise(0.0));
    }
    if policy == Policy::MaxOnly {
        return;
    }
    counters.rescales_possible += u64::from(stats.possible);
    counters.rescales_done += u64::from(stats.rescaled);
    if stats.rescaled > 0 && !cx.unit.rescales() {
        cx.kernels.scale_lanes(queries.o, &alpha[..stride]);
    }
    // Distances leave most blocks without weight; finite values times zero add nothing.
    if cx.is_modified() && v.finite && stats.idle as usize == stride && stats.rescaled == 0 {
        return;
    }
    cx.round_weights(step, stride, s);
    if let Some(seen) = seen {
        // The cold path: some values are not finite, and some lanes do not see them.
        return cx.add_visible(&queries.tile, start, &seen, s, queries.o, scratch.values);
    }
    let products = Products { step, stride, ahead: &mut ahead[1] };
    cx.unit.output(cx, products, v, s, queries.o, scratch);
}

pub(crate) fn scores(
    cx: &Context<'_>,
    queries: &QueryTile<'_>,
    (step, start): (&Step, usize),
    k: KeyRows<'_>,
    s: &mut [f32],
    ahead: &mut Ahead,
    modifier: &mut Modifier<'_>,
) {
    let stride = queries.lanes.stride;
    if cx.is_modified() {
        cx.prefetch_modifier(modifier, (&queries.tile, &queries.lanes), (step, start), ahead);
    }
    cx.unit.scores(cx, Products { step, stride, ahead }, k, queries.q, s);
    if step.rest || cx.is_modified() {
        cx.modify(modifier, (&queries.tile, &queries.lanes), (step, start), s, None);
    }
}

/// Computes P of a step from its scores. Returns what it did, and the factor of O before the step is added.
pub(crate) fn softmax(
    cx: &Context<'_>,
    queries: &mut QueryTile<'_>,
    step: &Step,
    s: &mut [f32],
    [k, v]: [KeyRows<'_>; 2],
    scratch: &mut Scratch<'_>,
    policy: Policy,
) -> (SoftmaxStats, [f32; MAX_LANES]) {
    let mut alpha = [1.0; MAX_LANES];
    let mut args = SoftmaxArgs {
        s,
        stride: queries.lanes.stride,
        ranges: step.ranges,
        inner: step.inner,
        lo: &step.lo,
        hi: &step.hi,
        m: &mut queries.m,
        l: &mut queries.l,
        alpha: &mut alpha,
        exp: cx.exp,
        least: cx.least(),
        policy,
        scale: cx.score_scale(),
    };
    let stats = cx.unit.softmax(cx, &mut args, Operands { q: queries.q, k, v }, scratch);
    (stats, alpha)
}

/// Writes O / l and the LSE to the outputs.
pub(crate) fn finish(cx: &Context<'_>, queries: &mut QueryTile<'_>, rows: &mut [f32], out: &Out<'_>) {
    let stride = queries.lanes.stride;
    let (mut inverse, mut lse) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
    mark_nan(&mut queries.m, &queries.l);
    cx.kernels.finish(&queries.m, &queries.l, &mut inverse, &mut lse);
    let rows_with_sinks = if cx.bound.sinks().is_some() { queries.tile.rows } else { 0 };
    for lane in 0..rows_with_sinks {
        if let Some(sink) = cx.bound.sink(queries.lanes.head[lane] as usize) {
            (inverse[lane], lse[lane]) = with_sink(inverse[lane], lse[lane], sink);
        }
    }
    let sequence = &cx.bound.sequences()[queries.tile.sequence];
    let o_rows = cx.query_layout(out.o_strides, sequence);
    let lse_rows = cx.bound.lse_layout(out.lse_strides, sequence);
    let starts = cx.row_starts(&queries.tile, out.o_strides);
    let (starts, m) = (&starts[..queries.tile.rows], &queries.m[..]);
    let turned = TurnedRows { o: queries.o, stride, n: cx.dv, factors: &inverse, m, starts, past: false };
    // SAFETY: every (sequence, head, query) belongs to exactly one tile, and each tile to one item.
    let mut stored = unsafe { out.o.store_turned(cx.kernels, turned) };
    if !stored {
        cx.kernels.scale_lanes(queries.o, &inverse[..stride]);
        let whole = cx.pack == 1 && queries.tile.rows == stride && cx.dv == cx.dv_pad;
        // A row without keys is cleared below.
        if whole && !queries.m[..stride].contains(&f32::NEG_INFINITY) {
            // SAFETY: as above.
            stored = unsafe { out.o.store_transposed(cx.kernels, starts[0], o_rows.row, (&queries.o[..], stride)) };
        }
    }
    if !stored {
        cx.kernels.transpose(queries.o, stride, rows, cx.dv_pad, cx.dv_pad, stride);
    }
    for lane in 0..queries.tile.rows {
        let (q, head) = cx.query_and_head(&queries.tile, lane);
        // SAFETY: as above.
        unsafe { out.lse.store(cx.kernels, lse_rows.at(q, head), &lse[lane..lane + 1]) };
        if stored {
            continue;
        }
        // A row without keys: 0 / 0 left a zero in O, whatever l was.
        let o = &mut rows[lane * cx.dv_pad..lane * cx.dv_pad + cx.dv];
        if queries.m[lane] == f32::NEG_INFINITY {
            o.fill(0.0);
        }
        // SAFETY: every (sequence, head, query) belongs to exactly one tile, and each tile to one item.
        unsafe { out.o.store(cx.kernels, o_rows.at(q, head), o) };
    }
}

/// A NaN score is not a maximum, but its sum is NaN. Gives such lanes a maximum that distinguishes them from lanes
/// without keys.
pub(crate) fn mark_nan(m: &mut [f32], l: &[f32]) {
    for (m, &l) in m.iter_mut().zip(l) {
        *m = if l.is_nan() { f32::NAN } else { *m };
    }
}

/// Adds the sink to the denominator: returns the new factor of O and the new LSE.
pub(crate) fn with_sink(inverse: f32, lse: f32, sink: f64) -> (f32, f32) {
    let old = f64::from(lse);
    let top = old.max(sink);
    if top == f64::NEG_INFINITY {
        return (inverse, lse);
    }
    if sink == f64::INFINITY {
        return (0.0, f32::INFINITY);
    }
    let new = top + ((old - top).exp() + (sink - top).exp()).ln();
    ((f64::from(inverse) * (old - new).exp()) as f32, new as f32)
}
