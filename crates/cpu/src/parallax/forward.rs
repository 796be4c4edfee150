//! Parallax forward, a tile of queries at a time, in two passes over its keys. The first computes the scores S = Q K^T, the
//! probes' scores U = R K^T, P = e^(S - m) (not yet divided by its sum l), and t, the mean of U under P. The second corrects the
//! weights, W = P (1 + t - U), and adds W V to O. S and U of all keys are kept in between, so a tile takes memory for its
//! queries times all keys.

use crate::decode::Probe;
use crate::forward::{Out, QueryTile, RunOptions, finish, items, scores, softmax};
use crate::memory::{Arena, with_workspace};
use crate::modify::Modifier;
use crate::nonfinite::Visible;
use crate::pool;
use crate::simd::{Ahead, DEPTH, GROUP, LaneProbe, MatrixKernels, Panels, Policy, Stage, parts};
use crate::step::{Step, in_pairs};
use crate::tiles::{Context, KeyRows, MAX_LANES, Tile};
use crate::unit::{Keys, Products, Scratch};
use fulgurite_core::{DType, Rescale, stop};

pub(super) fn run(cx: &Context<'_>, sequences: &[usize], out: &Out<'_>, plan: &RunOptions, probe: &Probe<'_>) {
    let items = items(cx, sequences, plan.threads);
    let policy = match plan.rescale {
        Rescale::Always => Policy::Raise(0.0),
        Rescale::Lazy(tau) => Policy::Raise(tau),
        Rescale::Optimistic(limit) => Policy::Trust(limit),
    };
    pool::run(plan.threads, items.len(), &|i| {
        item(cx, items[i].kv_head, &items[i].tiles, policy, out, probe);
        cx.kernels.fence();
    });
}

/// What the first pass leaves of one block of keys for the second.
struct Done {
    start: usize,
    step: Step,
    /// The factor of O before this block.
    alpha: Option<[f32; MAX_LANES]>,
    /// Whether its weights are already packed.
    packed: bool,
    /// The packed weights and U of a block's later pieces.
    own: [Vec<f32>; 2],
    /// For each pair of vectors: which lanes see non-finite values, if not all lanes do.
    nonfinite: Vec<Option<Visible>>,
}

/// The packed weights and U of a piece: its own, or those of all blocks from offset `at`.
fn piece_buffers<'a>(own: &'a mut [Vec<f32>; 2], all: [&'a mut [f32]; 2], at: usize, n: usize) -> [&'a mut [f32]; 2] {
    let [weights, probes] = own;
    if !weights.is_empty() {
        return [weights, probes];
    }
    // U is absent if it is not packed.
    all.map(|all| if all.is_empty() { all } else { &mut all[at..at + n] })
}

/// Sets the maximum of lanes that have none yet to that of the block's first keys. Attention does the same before it takes
/// several blocks at once; with zero probes, results are bitwise those of attention.
fn settle(
    cx: &Context<'_>,
    queries: &mut QueryTile<'_>,
    step: &Step,
    s: &mut [f32],
    kv: [KeyRows<'_>; 2],
    scratch: &mut Scratch<'_>,
) {
    let before = queries.m;
    let lanes = |z: usize| z * cx.kernels.lanes..(z + 1) * cx.kernels.lanes;
    let fresh = |(z, &(a, b)): (usize, &(usize, usize))| a < b && before[lanes(z)].contains(&f32::NEG_INFINITY);
    if !step.ranges.iter().enumerate().any(fresh) {
        return;
    }
    softmax(cx, queries, &step.part(&(0..DEPTH)), s, kv, scratch, Policy::MaxOnly);
    for (m, before) in queries.m.iter_mut().zip(before).filter(|(_, before)| *before != f32::NEG_INFINITY) {
        *m = before;
    }
}

/// The sizes of an item, and how its blocks are computed.
struct Walk<'a> {
    cx: &'a Context<'a>,
    /// The probes as queries.
    rx: &'a Context<'a>,
    policy: Policy,
    unit: Option<&'static MatrixKernels>,
    /// Keys per block.
    block: usize,
    blocks: usize,
    /// Elements of the packed weights of a block.
    weights: usize,
    /// Blocks with packed weights of their own. Softmax packs the weights of bf16 blocks, which are kept for the second pass;
    /// others are packed in the second pass, one block after the other in one buffer.
    kept: usize,
    /// Whether softmax packs finite data: all of its blocks do the same.
    packs: bool,
}

/// Buffers of an item that its tiles use one after the other.
struct Workspace<'w, 'm> {
    /// S and U of all blocks.
    s: &'w mut [f32],
    u: &'w mut [f32],
    /// The packed probes of the tile.
    r: &'w mut [f32],
    values: &'w mut [f32],
    /// Packed weights, and packed U.
    weights: &'w mut [f32],
    probes: &'w mut [f32],
    ahead: Ahead,
    modifier: Modifier<'m>,
}

impl<'a> Walk<'a> {
    fn new(cx: &'a Context<'a>, rx: &'a Context<'a>, policy: Policy, last_key: usize) -> Self {
        let (room, block) = (cx.unit.buffer_sizes(cx), cx.unit.block(cx));
        let (blocks, bf16) = (last_key.div_ceil(block), cx.problem.dtype() == DType::Bf16);
        let unit = cx.kernels.matrix_for(cx.problem.dtype());
        let packs = bf16 && cx.rounding.is_none() && unit.is_some_and(|unit| unit.bf16.suits(cx.exp));
        let kept = if packs { blocks } else { blocks.min(1) };
        Walk { cx, rx, policy, unit, block, blocks, weights: room.weights, kept, packs }
    }

    /// Sizes of: packed keys and values, S, U, queries, probes, O, rows, scratch of values, packed weights, packed U.
    fn sizes(&self) -> [usize; 11] {
        let (cx, tile, room) = (self.cx, self.cx.kernels.tile, self.cx.unit.buffer_sizes(self.cx));
        let scores = self.blocks * self.block * tile;
        let rows = Arena::room(tile * cx.d_pad) + tile * cx.d_pad.max(cx.dv_pad);
        let weights = self.kept * self.weights;
        [
            self.blocks * self.block * room.key,
            self.blocks * room.values,
            scores,
            scores,
            room.queries,
            room.queries,
            cx.dv_pad * tile,
            rows,
            room.values,
            weights,
            if self.packs { weights } else { 0 },
        ]
    }

    /// Offset of the packed weights of the block that starts at a key.
    fn weights_at(&self, start: usize) -> usize {
        (start / self.block).min(self.kept - 1) * self.weights
    }

    /// The first pass: P and U of all blocks, and t.
    fn softmax(
        &self,
        queries: &mut QueryTile<'_>,
        keys: &[[KeyRows<'_>; 2]],
        workspace: &mut Workspace<'_, '_>,
    ) -> (Vec<Done>, [f32; MAX_LANES]) {
        let (cx, stride) = (self.cx, queries.lanes.stride);
        let k_len = cx.bound.sequences()[queries.tile.sequence].k_len;
        // Attention takes several blocks at once from this key on (`forward::begin`), if it does at all.
        let seen_from = queries.lanes.lo[..stride].iter().max().map_or(0, |&lo| lo as usize);
        let pipelined = matches!(self.policy, Policy::Trust(_)) && cx.unit.span(cx) > 1 && !cx.has_expressions();
        let pipelined = pipelined && stride == cx.kernels.tile;
        let (mut sums, mut done) = ([0.0; MAX_LANES], Vec::with_capacity(self.blocks));
        for (i, &[k, v]) in keys.iter().enumerate() {
            stop::poll();
            let start = i * self.block;
            let settles = pipelined && start >= seen_from && v.finite;
            for (n, piece) in cx.pieces(&queries.tile, start..(start + self.block).min(k_len)).enumerate() {
                let Some(step) = cx.step(&queries.tile, &queries.lanes, &piece, start) else { continue };
                // Packed weights are whole tiles: a second piece of a block may share one with the first.
                let own = [(); 2].map(|_| vec![0.0; if n == 0 { 0 } else { self.weights }]);
                done.push(self.softmax_of((step, start), [k, v], (queries, &mut sums), (own, settles), workspace));
            }
        }
        let mut mean = [0.0; MAX_LANES];
        for lane in 0..stride {
            mean[lane] = if queries.l[lane] == 0.0 { 0.0 } else { sums[lane] / queries.l[lane] };
        }
        (done, mean)
    }

    /// P and U of one piece of a block; adds P U to `sums`.
    fn softmax_of(
        &self,
        (mut step, start): (Step, usize),
        [k, v]: [KeyRows<'_>; 2],
        (queries, sums): (&mut QueryTile<'_>, &mut [f32; MAX_LANES]),
        (mut own, settles): ([Vec<f32>; 2], bool),
        workspace: &mut Workspace<'_, '_>,
    ) -> Done {
        let (cx, rx, stride) = (self.cx, self.rx, queries.lanes.stride);
        let packed = self.packs && v.finite;
        let Workspace { s, u, r, values, weights, probes, ahead, modifier } = workspace;
        let [to, packed_u] = piece_buffers(&mut own, [weights, probes], self.weights_at(start), self.weights);
        // Packed blocks need no memory for S and U.
        let offset = if packed { 0 } else { start * stride };
        let [s, u] = [s, u].map(|x| &mut x[offset..][..self.block * stride]);
        let mut factors = [1.0; MAX_LANES];
        let mut rescaled = false;
        let (all_ranges, mut nonfinite) = (std::mem::take(&mut step.ranges), Vec::new());
        for ranges in in_pairs(all_ranges, cx.whole_products()) {
            step.ranges = ranges;
            scores(cx, queries, (&step, start), k, s, ahead, modifier);
            rx.unit.scores(rx, Products { step: &step, stride, ahead }, k, r, u);
            nonfinite.push(cx.hidden_values((&queries.tile, stride), (&step, start), v, s, values));
            if settles {
                settle(cx, queries, &step, s, [k, v], &mut Scratch::new(values, to));
            }
            let before = (queries.m, queries.l, *sums);
            let mut fold =
                |queries: &mut QueryTile<'_>, s: &mut [f32], u: &mut [f32], sums: &mut [f32], policy: Policy| {
                    let mut scratch = Scratch::new(values, to);
                    scratch.probe = Some(LaneProbe { u, packed: packed_u, sums });
                    let did = softmax(cx, queries, &step, s, [k, v], &mut scratch, policy);
                    assert!(scratch.packed == packed, "bug in fulgurite: weights were to be packed");
                    did
                };
            let (mut stats, mut alpha) = fold(queries, s, u, &mut sums[..stride], self.policy);
            if stats.distrusted > 0 {
                (queries.m, queries.l, *sums) = before;
                scores(cx, queries, (&step, start), k, s, ahead, modifier);
                rx.unit.scores(rx, Products { step: &step, stride, ahead }, k, r, u);
                (stats, alpha) = fold(queries, s, u, &mut sums[..stride], Policy::Raise(0.0));
            }
            rescaled |= stats.rescaled > 0;
            factors.iter_mut().zip(alpha).for_each(|(factor, own)| *factor *= own);
        }
        step.ranges = all_ranges;
        let alpha = rescaled.then_some(factors);
        Done { start, step, alpha, packed, own, nonfinite }
    }

    /// The second pass: O, with weights that t corrects.
    fn output(
        &self,
        queries: &mut QueryTile<'_>,
        mut done: Vec<Done>,
        keys: &[[KeyRows<'_>; 2]],
        mean: &[f32],
        workspace: &mut Workspace<'_, '_>,
    ) {
        let (cx, stride) = (self.cx, queries.lanes.stride);
        // Go backwards: the last blocks are still in the cache. With zero probes go forwards, because the result must be
        // bitwise that of attention.
        let back = self.unit.is_none() && workspace.r[..self.rx.d_pad * stride].iter().any(|&x| x != 0.0);
        // Going back: the product of the factors of the blocks after this one.
        let mut later: Option<[f32; MAX_LANES]> = None;
        for i in 0..done.len() {
            let i = if back { done.len() - 1 - i } else { i };
            let done = &mut done[i];
            if let (Some(alpha), false) = (&done.alpha, back) {
                cx.kernels.scale_lanes(queries.o, &alpha[..stride]);
            }
            let v = keys[done.start / self.block][1];
            self.output_of(queries, done, v, (mean, later.as_ref()), workspace);
            if let (Some(alpha), true) = (&done.alpha, back) {
                let before = later.unwrap_or([1.0; MAX_LANES]);
                later = Some(std::array::from_fn(|lane| before[lane] * alpha[lane]));
            }
        }
    }

    /// Adds one piece of a block to O; `later` are the factors of the blocks after it, if those came first.
    fn output_of(
        &self,
        queries: &mut QueryTile<'_>,
        done: &mut Done,
        v: KeyRows<'_>,
        (mean, later): (&[f32], Option<&[f32; MAX_LANES]>),
        workspace: &mut Workspace<'_, '_>,
    ) {
        let (cx, block, stride) = (self.cx, self.block, queries.lanes.stride);
        let Done { start, step, packed, own, nonfinite, .. } = done;
        let Workspace { s, u, values, weights, probes, ahead, .. } = workspace;
        let [to, packed_u] = piece_buffers(own, [weights, probes], self.weights_at(*start), self.weights);
        let [s, pu] = [s, u].map(|x| &mut x[*start * stride..][..block * stride]);
        if let Some(later) = later {
            [&mut *s, &mut *pu].into_iter().for_each(|x| cx.kernels.scale_lanes(x, &later[..stride]));
        }
        let mut scratch = Scratch::new(values, to);
        scratch.packed = *packed;
        let all_ranges = std::mem::take(&mut step.ranges);
        // On vectors, sums are split where neighbours start or end, as in attention.
        for (ranges, nonfinite) in in_pairs(all_ranges, cx.whole_products()).zip(nonfinite) {
            step.ranges = ranges;
            match self.unit {
                Some(unit) if *packed => {
                    unit.bf16.reweigh(scratch.weights, packed_u, block / DEPTH, &ranges, mean);
                }
                // Correct the weights on the way into the panels. Non-finite values need the weights themselves.
                Some(unit) if v.finite && cx.rounding.is_none() => {
                    let parts = parts(cx.problem.dtype());
                    let panels = scratch.weights.chunks_exact_mut(Panels::room(1, block / DEPTH, parts));
                    for ((z, mean), to) in mean.chunks_exact(GROUP).enumerate().zip(panels) {
                        let (start, end) = ranges[z];
                        let own = [&s[z * GROUP..], &pu[z * GROUP..]];
                        unit.pack_reweighed(own, stride, [start, end.max(start)], mean, to, parts);
                    }
                    scratch.packed = true;
                }
                _ => cx.kernels.stage(Stage::Reweigh { p: s, pu, mean, ranges }),
            }
            if let Some(lanes) = nonfinite {
                cx.add_visible(&queries.tile, *start, lanes, s, queries.o, scratch.values);
                continue;
            }
            let products = Products { step, stride, ahead };
            cx.unit.output(cx, products, v, s, queries.o, &mut scratch);
        }
    }
}

fn item(cx: &Context<'_>, kv_head: usize, tiles: &[Tile], policy: Policy, out: &Out<'_>, probe: &Probe<'_>) {
    let rx = probe.cx;
    let sequence = &cx.bound.sequences()[tiles[0].sequence];
    let last = tiles.iter().map(|t| cx.lanes(t).reach().1).max().unwrap_or(0);
    let walk = Walk::new(cx, rx, policy, last);
    let (room, block, sizes) = (cx.unit.buffer_sizes(cx), walk.block, walk.sizes());
    with_workspace(sizes.iter().map(|&n| Arena::room(n)).sum(), |workspace| {
        let mut arena = Arena::new(workspace);
        let [k, v, s, u, q, r, o, rows, values, weights, probes] = sizes.map(|n| arena.take(n));
        let buffers = k.chunks_exact_mut((block * room.key).max(1)).zip(v.chunks_exact_mut(room.values.max(1)));
        let keys: Vec<[KeyRows<'_>; 2]> = buffers
            .enumerate()
            .map(|(i, (k, v))| {
                let range = i * block..((i + 1) * block).min(sequence.k_len);
                let keys = Keys { sequence, head: kv_head, range };
                [cx.packer.keys(cx, &keys, k), cx.packer.values(cx, &keys, v)]
            })
            .collect();
        let _held = cx.unit.hold();
        let modifier = cx.modifier(cx.unit.score_scale(cx));
        let mut workspace = Workspace { s, u, r, values, weights, probes, ahead: Ahead::default(), modifier };
        for &tile in tiles {
            let lanes = cx.lanes(&tile);
            let stride = lanes.stride;
            cx.unit.queries(cx, &tile, stride, rows, q);
            rx.unit.queries(rx, &tile, stride, rows, workspace.r);
            let o = &mut o[..cx.dv_pad * stride];
            o.fill(0.0);
            let mut queries = QueryTile { tile, lanes, q, o, m: [f32::NEG_INFINITY; MAX_LANES], l: [0.0; MAX_LANES] };
            let (done, mean) = walk.softmax(&mut queries, &keys, &mut workspace);
            walk.output(&mut queries, done, &keys, &mean[..stride], &mut workspace);
            let scale = cx.score_scale();
            queries.m.iter_mut().for_each(|m| *m *= scale);
            finish(cx, &mut queries, rows, out);
            let mean_rows = cx.bound.lse_layout(probe.mean_strides, sequence);
            for lane in 0..queries.tile.rows {
                let (q, head) = cx.query_and_head(&queries.tile, lane);
                // SAFETY: every (sequence, head, query) belongs to exactly one tile, and each tile to one item.
                unsafe { probe.mean.store(cx.kernels, mean_rows.at(q, head), &mean[lane..lane + 1]) };
            }
        }
    });
}
