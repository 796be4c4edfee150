//! Block-skip attention: goes through the keys in the order of the problem, tile by tile, and drops tiles without
//! weight.
//!
//! A window with sinks is two intervals of keys per row. Each is processed by the closed form of spans, so no
//! expression is evaluated and a vector of rows computes little more than it sees.

use crate::forward::{Out, QueryTile, State, finish, items_of, pipeline_whole, scores, softmax};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::modify::Modifier;
use crate::simd::{Ahead, Policy, Seen, SoftmaxArgs};
use crate::step::{Step, in_pairs};
use crate::tiles::{Context, KeyRows, Lanes, MAX_LANES, Piece, Tile};
use crate::unit::{Keys, Products, Scratch};
use crate::{Counters, Options, pool, window};
use fulgurite_core::skip::{HeadClass, SkipBound, TileCounts};
use fulgurite_core::{BlockMask, Data, Outputs, Rescale, TensorView, bf16, f16, stop};
use std::cell::LazyCell;
use std::ops::Range;
use std::sync::Mutex;

/// Tiles whose means a thread computes at once.
const MEANS: usize = 16;

/// The tiles that a call kept.
#[derive(Debug, Clone)]
pub struct SkipOutcome {
    /// Number of tiles left at each level.
    pub counts: TileCounts,
    /// The kept tiles; with this mask, results and gradients are those of the problem's definition.
    pub kept: BlockMask,
    /// Bound of the difference between o and its value with every admitted tile.
    pub error_bound: f64,
}

/// The tiles that one row of tiles kept.
#[derive(Default, Clone)]
pub(crate) struct Found {
    pub kept: Vec<i32>,
    pub counts: TileCounts,
    /// lambda times the number of dropped keys.
    dropped: f64,
}

/// Tiles of rows of one sequence and query head.
pub(crate) struct Item {
    pub sequence: usize,
    pub head: usize,
    pub tiles: std::ops::Range<usize>,
}

/// Computes block-skip attention into `outputs`, which must fit the base problem ([`Outputs::check`]).
pub fn skip_forward(skip: &SkipBound<'_>, outputs: &mut Outputs<'_>, options: &Options) -> SkipOutcome {
    let bound = skip.bound();
    // Heads may see different tiles, so rows of different heads do not share one.
    let cx = Context::with_pack(bound, options.kernels(), 1);
    if !bound.all_queries_used() {
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
    // Rows of tiles would wait for each other's means: all need those of the first keys first.
    let means = skip.mean_tiles();
    pool::run(options.threads(), means.len().div_ceil(MEANS), &|i| {
        stop::poll();
        means.iter().skip(i * MEANS).take(MEANS).for_each(|&tile| skip.mean(tile));
    });
    let rows = skip.problem().skip().tile[0];
    let (heads, tiles) = (cx.problem.q_heads(), cx.problem.max_q_len().div_ceil(rows));
    let threads = options.threads();
    // The number of tiles per item changes no bits.
    let most = items_of(&cx) * cx.kernels.tile / rows;
    let share = (tiles * heads * bound.sequences().len() / (8 * threads)).clamp(1, most.max(1));
    let mut items = Vec::new();
    for sequence in 0..bound.sequences().len() {
        for head in 0..heads {
            let window = matches!(skip.problem().skip().class(head), HeadClass::Window { .. });
            let share = if window { share.min(window::item_rows(&cx).div_ceil(rows)) } else { share };
            // Long rows first, so that no long item is left to the end.
            let starts: Vec<usize> = (0..tiles).step_by(share).collect();
            items.extend(starts.into_iter().rev().map(|t| Item { sequence, head, tiles: t..(t + share).min(tiles) }));
        }
    }
    let all: Vec<Mutex<Found>> =
        vec![Found::default(); bound.sequences().len() * heads * tiles].into_iter().map(Mutex::new).collect();
    pool::run(threads, items.len(), &|i| {
        let item = &items[i];
        let keep = |tile: usize, found: Found| {
            let at = (item.sequence * heads + item.head) * tiles + tile;
            *all[at].lock().unwrap_or_else(|e| e.into_inner()) = found;
        };
        if let Some(spans) = window::spans(&cx, skip, item) {
            // Items are handed out in order, so this thread's next one is about `threads` items ahead.
            let next = items.get(i + threads).and_then(|item| Some((item, window::spans(&cx, skip, item)?)));
            window::walk(&cx, skip, item, &spans, next.as_ref(), &out, &keep);
            return cx.kernels.fence();
        }
        let window = matches!(skip.problem().skip().class(item.head), HeadClass::Window { .. });
        // A window is too narrow to pay for packing its keys.
        let cx = if window { &cx.on_vectors() } else { &cx };
        walk(cx, skip, item, &out, &keep);
        cx.kernels.fence();
    });
    let all: Vec<Found> = all.into_iter().map(|f| f.into_inner().unwrap_or_else(|e| e.into_inner())).collect();
    let mut counts = TileCounts::default();
    for found in &all {
        counts.visible += found.counts.visible;
        counts.by_class += found.counts.by_class;
        counts.by_proxy += found.counts.by_proxy;
        counts.kept += found.kept.len() as u64;
    }
    let dropped = all.iter().map(|f| f.dropped).fold(0.0, f64::max);
    let largest = if dropped > 0.0 { largest(bound.v(), threads) } else { 0.0 };
    let kept = skip.block_mask(all.into_iter().map(|f| f.kept).collect());
    SkipOutcome { counts, kept, error_bound: 2.0 * dropped * largest }
}

/// The largest |x| of a tensor with a contiguous last axis; NaN is ignored.
fn largest(view: &TensorView<'_>, threads: usize) -> f64 {
    let (Some((&width, outer)), strides) = (view.shape().split_last(), view.strides()) else { return 0.0 };
    let rows: usize = outer.iter().product();
    let found = Mutex::new(0.0f64);
    // Without its sign, a number's bits are an integer that grows with it, up to infinity; NaN is above that. The
    // integers are signed, because every instruction set has that maximum for short integers.
    fn top<T: Copy, I: Copy + Ord + Default>(row: &[T], bits: impl Fn(T) -> I, infinity: I) -> I {
        let all = row.iter().fold(I::default(), |top, &x| bits(x).max(top));
        if all <= infinity {
            all
        } else {
            row.iter().map(|&x| bits(x)).filter(|&x| x <= infinity).max().unwrap_or_default()
        }
    }
    pool::run(threads, rows.div_ceil(SHARE), &|i| {
        let mut own = 0;
        for row in i * SHARE..((i + 1) * SHARE).min(rows) {
            let (mut at, mut rest) = (0, row);
            for (&extent, &stride) in outer.iter().zip(strides.iter()).rev() {
                at += rest % extent * stride;
                rest /= extent;
            }
            own = own.max(match view.data() {
                Data::F32(x) => top(&x[at..at + width], |x| (x.to_bits() & 0x7fff_ffff) as i32, 0x7f80_0000),
                Data::F16(x) => top(&x[at..at + width], |x| (x.to_bits() & 0x7fff) as i16, 0x7c00).into(),
                Data::Bf16(x) => top(&x[at..at + width], |x| (x.to_bits() & 0x7fff) as i16, 0x7f80).into(),
                _ => unreachable!("bug in fulgurite: values of a type that Problem refuses"),
            });
        }
        let own = match view.data() {
            Data::F16(_) => f16::from_bits(own as u16).to_f64(),
            Data::Bf16(_) => bf16::from_bits(own as u16).to_f64(),
            _ => f64::from(f32::from_bits(own as u32)),
        };
        let mut found = found.lock().unwrap_or_else(|e| e.into_inner());
        *found = found.max(own);
    });
    found.into_inner().unwrap_or_else(|e| e.into_inner())
}

/// Rows of the value tensor that are searched at once.
const SHARE: usize = 4096;

/// A tile of rows, as block skipping divides them, with its tiles of lanes on their way through the keys.
struct SkipTile<'w> {
    number: usize,
    /// Key tiles that levels 1 and 2 keep, ascending.
    admitted: Vec<usize>,
    lambda: f64,
    /// The logarithm of lambda in units of scores, if the kernel drops tiles.
    limit: Option<f32>,
    walkers: Vec<Walker<'w>>,
    found: Found,
}

/// Keys and values that are packed together.
struct PackedBlock<'b, F> {
    /// Index of the first key.
    start: usize,
    k: KeyRows<'b>,
    /// Whether all keys are finite, if that is checked.
    finite: bool,
    v: LazyCell<KeyRows<'b>, F>,
}

/// Scratch memory of a pass over the keys.
struct Workspace<'w, 'a, 'm> {
    modifier: Modifier<'m>,
    /// Scores, for each tile of lanes of a tile of rows.
    scored: Vec<&'w mut [f32]>,
    scratch: Scratch<'a>,
    ahead: [Ahead; 2],
    counters: Counters,
}

impl<'a, 'm> Workspace<'_, 'a, 'm> {
    fn state(&mut self, walker: usize) -> State<'_, 'a, 'm> {
        let Workspace { scored, scratch, ahead, counters, modifier } = self;
        State { s: &mut *scored[walker], scratch, ahead, counters, modifier }
    }
}

impl SkipTile<'_> {
    /// Processes key tile `t`, which is in block `i` of the current ones: drops it, or leaves it to
    /// [`Walker::fold_kept`].
    fn meet<'b, F: FnOnce() -> KeyRows<'b>>(
        &mut self,
        cx: &Context<'_>,
        (t, keys): (usize, Range<usize>),
        (i, block): (usize, &PackedBlock<'b, F>),
        workspace: &mut Workspace<'_, '_, '_>,
    ) {
        let whole = block.finite
            && keys.len() == cx.unit.block(cx)
            && self.walkers.iter().all(|walker| walker.kept.is_some() && walker.queries.lanes.see(&keys));
        let piece = Piece { keys: keys.clone(), masked: true };
        let mut seen = whole;
        for walker in self.walkers.iter_mut().filter(|_| !whole) {
            seen |= walker.look(cx, &piece, block.start);
        }
        if !seen {
            return;
        }
        if let Some(limit) = self.limit {
            // Every walker looks, because all must agree to drop a tile.
            let mut drop = block.finite;
            for (walker, s) in self.walkers.iter_mut().zip(&mut workspace.scored) {
                drop &= if whole {
                    walker.is_below_whole(cx, block.k, limit, s)
                } else {
                    walker.is_below(
                        cx,
                        (block.k, block.start),
                        limit,
                        s,
                        &mut workspace.ahead[0],
                        &mut workspace.modifier,
                    )
                };
            }
            if drop {
                self.found.dropped += self.lambda * keys.len() as f64;
                return;
            }
        }
        self.found.kept.push(t as i32);
        let looked = self.limit.is_some();
        for (n, walker) in self.walkers.iter_mut().enumerate() {
            match &mut walker.kept {
                // A tile that exceeds the reference by much raises it at once.
                Some(kept) if whole && (walker.near || !looked) => kept.push(i),
                _ => {
                    if whole {
                        walker.look(cx, &piece, block.start);
                    }
                    walker.fold(cx, [block.k, *block.v], block.start, looked && !whole, workspace.state(n));
                }
            }
        }
    }
}

/// Takes the tiles of an item through the keys together: each block of keys is packed once for all of them, and stays
/// in the cache while they use it. Every tile meets its keys in the order of the problem.
fn walk(cx: &Context<'_>, skip: &SkipBound<'_>, item: &Item, out: &Out<'_>, done: &dyn Fn(usize, Found)) {
    let sequence = &cx.bound.sequences()[item.sequence];
    let (room, block, lanes) = (cx.unit.buffer_sizes(cx), cx.unit.block(cx), cx.kernels.tile);
    let [rows, cols] = skip.problem().skip().tile;
    let subs = rows.div_ceil(lanes);
    let scratch = Arena::room(lanes * cx.d_pad) + lanes * cx.d_pad.max(cx.dv_pad);
    // Few of many blocks are kept, so their shared cost is paid less often.
    let span = 2 * cx.unit.span(cx) - 1;
    let (sizes, block_sizes) = ([scratch, room.values, room.weights], [block * room.key, room.values]);
    let per_row = [room.queries, cx.dv_pad * lanes];
    let of = |sizes: &[usize]| sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    let all = of(&sizes) + subs * Arena::room(block * lanes) + item.tiles.len() * subs * of(&per_row);
    let all = all + span * of(&block_sizes);
    with_workspace(all, |workspace| {
        let mut arena = Arena::new(workspace);
        let [rows, values, weights] = sizes.map(|n| arena.take(n));
        let mut buffers: Vec<[&mut [f32]; 2]> = (0..span).map(|_| block_sizes.map(|n| arena.take(n))).collect();
        let mut workspace = Workspace {
            modifier: cx.modifier(cx.unit.score_scale(cx)),
            scored: (0..subs).map(|_| arena.take(block * lanes)).collect(),
            scratch: Scratch::new(values, weights),
            ahead: [Ahead::default(); 2],
            counters: Counters::default(),
        };
        let mut tiles: Vec<SkipTile<'_>> = Vec::with_capacity(item.tiles.len());
        for number in item.tiles.clone() {
            let own = skip.tile_rows(sequence, number);
            let mut found = Found::default();
            let admitted = skip.admitted(sequence, item.head, number, &mut found.counts);
            let mut walkers = Vec::with_capacity(subs);
            for first in own.clone().step_by(lanes) {
                let tile = Tile { sequence: item.sequence, head: item.head, first, rows: lanes.min(own.end - first) };
                walkers.push(Walker::new(cx, skip, tile, per_row.map(|n| arena.take(n)), rows));
            }
            let lambda = skip.lambda(sequence, item.head, own);
            let limit = lambda.map(|lambda| (lambda.ln() / f64::from(cx.score_scale())) as f32);
            tiles.push(SkipTile { number, admitted, lambda: lambda.unwrap_or(0.0), limit, walkers, found });
        }
        let seen: Vec<usize> = {
            let mut all: Vec<usize> = tiles.iter().flat_map(|t| t.admitted.iter().copied()).collect();
            all.sort_unstable();
            all.dedup();
            all
        };
        let looks = tiles.iter().any(|t| t.limit.is_some());
        let visits = skip.order(&seen);
        let _held = cx.unit.hold();
        // Positions alone decide which blocks are packed together. Tile 0 may come first, and is then packed by itself.
        let at = |t: &usize| t * cols / block;
        let mut spans = visits.chunk_by(|a, b| a > b && at(a) / span == at(b) / span).peekable();
        while let Some(visits) = spans.next() {
            stop::poll();
            let head = item.head / cx.problem.group();
            if let Some([last, .., first] | [last @ first]) = spans.peek() {
                let next_keys = at(first) * block..((at(last) + 1) * block).min(sequence.k_len);
                cx.prefetch_keys(sequence, head, next_keys, &mut workspace.ahead);
            }
            let groups = || visits.chunk_by(|a, b| at(a) == at(b));
            let blocks: Vec<PackedBlock<'_, _>> = groups()
                .zip(&mut buffers)
                .map(|(group, [k, v])| {
                    let start = at(&group[0]) * block;
                    let keys = Keys { sequence, head, range: start..(start + block).min(sequence.k_len) };
                    let k = cx.packer.keys(cx, &keys, k);
                    let finite = !looks || k.finite || all_finite(cx, &keys, rows);
                    PackedBlock { start, k, finite, v: LazyCell::new(move || cx.packer.values(cx, &keys, v)) }
                })
                .collect();
            for tile in &mut tiles {
                for (i, &t) in groups().enumerate().flat_map(|(i, group)| group.iter().map(move |t| (i, t))) {
                    if tile.admitted.binary_search(&t).is_ok() {
                        let keys = t * cols..((t + 1) * cols).min(sequence.k_len);
                        tile.meet(cx, (t, keys), (i, &blocks[i]), &mut workspace);
                    }
                }
                for (n, walker) in tile.walkers.iter_mut().enumerate() {
                    walker.fold_kept(cx, &blocks, workspace.state(n));
                }
            }
        }
        let scale = cx.score_scale();
        for mut tile in tiles {
            for walker in &mut tile.walkers {
                walker.queries.m.iter_mut().for_each(|m| *m *= scale);
                finish(cx, &mut walker.queries, rows, out);
            }
            tile.found.kept.sort_unstable();
            done(tile.number, tile.found);
        }
    });
}

/// Whether a block of keys is finite; `row` is scratch. A NaN score is not a maximum, so a tile of them would be
/// dropped unnoticed.
fn all_finite(cx: &Context<'_>, keys: &Keys<'_>, row: &mut [f32]) -> bool {
    let view = cx.bound.k();
    let at = cx.key_layout(view.strides(), keys.sequence);
    keys.range.clone().all(|key| cx.kernels.widen(&view.data(), at.at(key, keys.head), &mut row[..cx.d]))
}

/// A tile of lanes while it goes through the keys.
struct Walker<'w> {
    queries: QueryTile<'w>,
    /// Current blocks that it sees whole, has kept and not yet folded; `None` if it takes them one by one.
    kept: Option<Vec<usize>>,
    /// The intervals of keys that its lanes see: the start and the rest, or the rest alone.
    parts: Vec<Lanes>,
    /// What it sees of the current key tile, by part.
    steps: Vec<Option<Step>>,
    /// The true maximum of each lane so far; the row's maximum is the reference of its sums.
    top: [f32; MAX_LANES],
    /// Whether the current scores exceed the row's reference by little, so that no sum must be rescaled.
    near: bool,
    /// Whether all queries are finite.
    finite: bool,
}

/// Powers of e by which scores may exceed the reference before sums are rescaled: 128 such weights stay below
/// [`Rescale::OPTIMISTIC_LIMIT`].
const NEAR: f32 = 14.0;

impl<'w> Walker<'w> {
    fn new(cx: &Context<'_>, skip: &SkipBound<'_>, tile: Tile, [q, o]: [&'w mut [f32]; 2], rows: &mut [f32]) -> Self {
        let sequence = &cx.bound.sequences()[tile.sequence];
        let class = skip.problem().skip().class(tile.head);
        let part = |i: usize| cx.lanes_within(&tile, |q| class.keys(q, sequence.q_len, sequence.k_len)[i].clone());
        let window = matches!(class, HeadClass::Window { .. });
        let parts = if window { vec![part(0), part(1)] } else { vec![part(1)] };
        let lanes = part(1);
        let stride = lanes.stride;
        let view = cx.bound.q();
        let at = cx.query_layout(view.strides(), sequence);
        let mut finite = true;
        // Checked only if tiles may be dropped.
        let rows_of = if skip.problem().skip().lambda.is_some() { tile.first..tile.first + tile.rows } else { 0..0 };
        for i in rows_of {
            finite &= cx.kernels.widen(&view.data(), at.at(i, tile.head), &mut rows[..cx.d]);
        }
        cx.unit.queries(cx, &tile, stride, rows, q);
        let o = &mut o[..cx.dv_pad * stride];
        o.fill(0.0);
        let queries = QueryTile { tile, lanes, q, o, m: [f32::NEG_INFINITY; MAX_LANES], l: [0.0; MAX_LANES] };
        let steps = parts.iter().map(|_| None).collect();
        let whole = !window && tile.rows == cx.kernels.tile && cx.unit.span(cx) > 1 && !cx.has_expressions() && finite;
        let top = [f32::NEG_INFINITY; MAX_LANES];
        Walker { queries, kept: whole.then(Vec::new), parts, steps, top, near: false, finite }
    }

    /// Finds the part of a key tile that it sees; false if there is none.
    fn look(&mut self, cx: &Context<'_>, piece: &Piece, origin: usize) -> bool {
        for (lanes, own) in self.parts.iter().zip(&mut self.steps) {
            let (first, last) = lanes.reach();
            // Most tiles are seen whole, like the one before.
            let again = own.as_mut().is_some_and(|own| cx.step_again(lanes, piece, origin, own));
            if !again {
                let meets = first < piece.keys.end && piece.keys.start < last;
                *own = meets.then(|| cx.step(&self.queries.tile, lanes, piece, origin)).flatten();
            }
        }
        self.steps.iter().any(Option::is_some)
    }

    /// Whether all scores of a block that it sees whole are below the running maximum by more than `limit`.
    fn is_below_whole(&mut self, cx: &Context<'_>, k: KeyRows<'_>, limit: f32, s: &mut [f32]) -> bool {
        let seen = &mut Seen { top: &mut self.top, m: &self.queries.m, limit, near: NEAR / cx.score_scale() };
        let [high, near] = cx.unit.block_max(cx, k, self.queries.q, s, seen);
        self.near = near;
        !high
    }

    /// Whether all scores of the visible keys are below the running maximum by more than `limit`; `s` holds the scores
    /// afterwards.
    fn is_below(
        &mut self,
        cx: &Context<'_>,
        (k, origin): (KeyRows<'_>, usize),
        limit: f32,
        s: &mut [f32],
        ahead: &mut Ahead,
        modifier: &mut Modifier<'_>,
    ) -> bool {
        let mut top = [f32::NEG_INFINITY; MAX_LANES];
        for step in self.steps.iter_mut().flatten() {
            let seen = step.ranges;
            for ranges in in_pairs(seen, cx.whole_products()) {
                step.ranges = ranges;
                scores(cx, &self.queries, (step, origin), k, s, ahead, modifier);
                let (mut l, mut alpha) = ([0.0; MAX_LANES], [1.0; MAX_LANES]);
                cx.kernels.softmax(
                    &mut SoftmaxArgs {
                        s,
                        stride: self.queries.lanes.stride,
                        ranges,
                        inner: step.inner,
                        lo: &step.lo,
                        hi: &step.hi,
                        m: &mut top,
                        l: &mut l,
                        alpha: &mut alpha,
                        exp: cx.exp,
                        least: cx.least(),
                        policy: Policy::MaxOnly,
                        scale: cx.score_scale(),
                    },
                    None,
                );
            }
            step.ranges = seen;
        }
        let (scale, stride) = (cx.score_scale(), self.queries.lanes.stride);
        // Without branches, a lane takes less than a cycle. Lanes past the last row have queries of zero and are
        // ignored.
        let mut high = false;
        for (before, &own) in self.top[..self.queries.tile.rows].iter_mut().zip(&top) {
            let next = if own > *before { own } else { *before };
            // This also ignores lanes that saw no key: -inf - -inf is NaN.
            high |= own - next >= limit;
            *before = next;
        }
        let excess = |(m, own): (&f32, &f32)| (own - m) * scale;
        let far =
            self.queries.m[..stride].iter().zip(&top).map(excess).fold(false, |far, x| far | !matches!(x, ..NEAR));
        self.near = !far;
        self.finite && !high
    }

    /// Folds the blocks that were kept.
    fn fold_kept<'b, F: FnOnce() -> KeyRows<'b>>(
        &mut self,
        cx: &Context<'_>,
        blocks: &[PackedBlock<'b, F>],
        mut state: State<'_, '_, '_>,
    ) {
        let Some(kept) = self.kept.as_mut().filter(|kept| !kept.is_empty()) else { return };
        let rows: Vec<[KeyRows<'_>; 2]> = kept.drain(..).map(|i| [blocks[i].k, *blocks[i].v]).collect();
        pipeline_whole(cx, &mut self.queries, &rows, Rescale::OPTIMISTIC_LIMIT, &mut state);
    }

    /// Folds the tile into the running summary. With `scored`, the scores of a single part are already in `s`.
    fn fold(
        &mut self,
        cx: &Context<'_>,
        [k, v]: [KeyRows<'_>; 2],
        origin: usize,
        scored: bool,
        state: State<'_, '_, '_>,
    ) {
        let State { s, scratch, ahead, modifier, .. } = state;
        // Rows whose reference is near need no maximum.
        let policy = if scored && self.near { Policy::Trust(f32::INFINITY) } else { Policy::Raise(0.0) };
        let alone = self.steps.iter().flatten().count() == 1;
        let stride = self.queries.lanes.stride;
        for step in self.steps.iter().flatten() {
            if !(scored && alone) {
                scores(cx, &self.queries, (step, origin), k, s, &mut ahead[0], modifier);
            }
            let seen = cx.hidden_values((&self.queries.tile, stride), (step, origin), v, s, scratch.values);
            let (stats, alpha) = softmax(cx, &mut self.queries, step, s, [k, v], scratch, policy);
            if stats.rescaled > 0 {
                cx.kernels.scale_lanes(self.queries.o, &alpha[..stride]);
            }
            match seen {
                // Some values are not finite, and some lanes do not see them.
                Some(seen) => cx.add_visible(&self.queries.tile, origin, &seen, s, self.queries.o, scratch.values),
                None => {
                    let products = Products { step, stride, ahead: &mut ahead[1] };
                    cx.unit.output(cx, products, v, s, self.queries.o, scratch);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::{DType, Tensor};

    #[test]
    fn the_largest_value_is_found_beside_nan_in_every_type() {
        for dtype in DType::FLOATS {
            let mut values = vec![0.5; 2 * 3 * 5];
            (values[7], values[22], values[29]) = (f64::NAN, -7.0, 3.0);
            let tensor = Tensor::from_f64(dtype, &values, &[2, 3, 1, 5]).unwrap();
            assert_eq!(largest(&tensor.view(), 2), 7.0, "{dtype}");
            // Without the row of -7: what a view leaves out is not seen.
            let view = TensorView::strided(tensor.view().data(), &[1, 3, 1, 5], &[15, 5, 5, 1]).unwrap();
            assert_eq!(largest(&view, 1), 0.5, "{dtype}");
        }
    }
}
