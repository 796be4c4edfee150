//! Three products per block of keys: S and U of one tile of queries are held over all keys, W is formed when t is
//! known, and V is multiplied once. Memory is a tile times the number of keys.

use crate::decode::Probe;
use crate::forward::{Out, Plan, QueryTile, finish, items, scores, softmax};
use crate::memory::{Arena, with_workspace};
use crate::nonfinite::Visible;
use crate::pool;
use crate::simd::{Ahead, DEPTH, GROUP, LaneProbe, Panels, Policy, Stage, parts};
use crate::step::{Step, in_pairs};
use crate::tiles::{Context, KeyRows, MAX_LANES, Tile};
use crate::unit::{Keys, Products, Scratch};
use fulgurite_core::{DType, Rescale};

pub(super) fn run(cx: &Context<'_>, sequences: &[usize], out: &Out<'_>, plan: &Plan, probe: &Probe<'_>) {
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

/// The results of a tile for one block of keys.
struct Done {
    start: usize,
    step: Step,
    /// The factor of O before this block.
    alpha: Option<[f32; MAX_LANES]>,
    /// Whether its weights are already packed.
    packed: bool,
    /// The packed weights and U of a block's later pieces.
    own: [Vec<f32>; 2],
    /// For each pair of vectors: which lanes see non-finite values, if they do not see all.
    seen: Vec<Option<Visible>>,
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

/// Gives lanes without a maximum that of a block's first keys, as attention does before it takes several blocks at
/// once: all later bits depend on it.
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

fn item(cx: &Context<'_>, kv_head: usize, tiles: &[Tile], policy: Policy, out: &Out<'_>, probe: &Probe<'_>) {
    let rx = probe.cx;
    let sequence = &cx.bound.sequences()[tiles[0].sequence];
    let last = tiles.iter().map(|t| cx.lanes(t).reach().1).max().unwrap_or(0);
    let (room, block, tile) = (cx.unit.room(cx), cx.unit.block(cx), cx.kernels.tile);
    let blocks = last.div_ceil(block);
    // Weights that softmax packs are kept for all blocks; others are packed one block after the other, in one buffer.
    let bf16 = cx.problem.dtype() == DType::Bf16;
    let kept = if bf16 { blocks } else { blocks.min(1) };
    // Whether softmax packs finite data: all of its blocks do the same.
    let unit = cx.kernels.matrix_for(cx.problem.dtype());
    let packs = bf16 && cx.rounding.is_none() && unit.is_some_and(|unit| unit.bf16.suits(cx.exp));
    let scratch = Arena::room(tile * cx.d_pad) + tile * cx.d_pad.max(cx.dv_pad);
    let sizes = [
        blocks * block * room.key,
        blocks * room.values,
        blocks * block * tile,
        blocks * block * tile,
        room.queries,
        room.queries,
        cx.dv_pad * tile,
        scratch,
        room.values,
        kept * room.weights,
        if packs { kept * room.weights } else { 0 },
    ];
    with_workspace(sizes.iter().map(|&n| Arena::room(n)).sum(), |workspace| {
        let mut arena = Arena::new(workspace);
        let [k, v, s_all, u_all, q, r, o, rows, values, weights, probes] = sizes.map(|n| arena.take(n));
        let buffers = k.chunks_exact_mut((block * room.key).max(1)).zip(v.chunks_exact_mut(room.values.max(1)));
        let packed: Vec<[KeyRows<'_>; 2]> = buffers
            .enumerate()
            .map(|(i, (k, v))| {
                let range = i * block..((i + 1) * block).min(sequence.k_len);
                let keys = Keys { sequence, head: kv_head, range };
                [cx.packer.keys(cx, &keys, k), cx.packer.values(cx, &keys, v)]
            })
            .collect();
        let _held = cx.unit.hold();
        let ahead = &mut Ahead::default();
        let mut modifier = cx.modifier(cx.unit.score_scale(cx));
        for &tile in tiles {
            let lanes = cx.lanes(&tile);
            let stride = lanes.stride;
            cx.unit.queries(cx, &tile, stride, rows, q);
            rx.unit.queries(rx, &tile, stride, rows, r);
            let o = &mut o[..cx.dv_pad * stride];
            o.fill(0.0);
            let mut queries = QueryTile { tile, lanes, q, o, m: [f32::NEG_INFINITY; MAX_LANES], l: [0.0; MAX_LANES] };
            // From here on attention takes several blocks at once, if it does at all.
            let seen_from = queries.lanes.lo[..stride].iter().max().map_or(0, |&lo| lo as usize);
            let pipelined = matches!(policy, Policy::Trust(_)) && cx.unit.span(cx) > 1 && !cx.has_expressions();
            let pipelined = pipelined && stride == cx.kernels.tile;
            let (mut sums, mut done) = ([0.0; MAX_LANES], Vec::with_capacity(blocks));
            for (i, [k, v]) in packed.iter().enumerate() {
                let start = i * block;
                let keys = start..(start + block).min(sequence.k_len);
                for (n, piece) in cx.pieces(&queries.tile, keys).enumerate() {
                    let Some(mut step) = cx.step(&queries.tile, &queries.lanes, &piece, start) else { continue };
                    // Packed weights are whole tiles: a second piece of a block may share one with the first.
                    let mut own = [(); 2].map(|_| vec![0.0; if n == 0 { 0 } else { room.weights }]);
                    let at = i.min(kept - 1) * room.weights;
                    let packed = packs && v.finite;
                    let [to, packed_u] = piece_buffers(&mut own, [weights, probes], at, room.weights);
                    // Packed blocks need no memory for S and U.
                    let place = if packed { 0 } else { start * stride };
                    let s = &mut s_all[place..][..block * stride];
                    let u = &mut u_all[place..][..block * stride];
                    let mut factors = [1.0; MAX_LANES];
                    let mut rescaled = false;
                    let (seen, mut visible) = (std::mem::take(&mut step.ranges), Vec::new());
                    for ranges in in_pairs(seen, cx.whole_products()) {
                        step.ranges = ranges;
                        scores(cx, &queries, (&step, start), *k, s, ahead, &mut modifier);
                        rx.unit.scores(rx, Products { step: &step, stride, ahead }, *k, r, u);
                        visible.push(cx.hidden_values((&queries.tile, stride), (&step, start), *v, s, values));
                        if pipelined && start >= seen_from && v.finite {
                            settle(cx, &mut queries, &step, s, [*k, *v], &mut Scratch::new(values, to));
                        }
                        let before = (queries.m, queries.l, sums);
                        let mut fold = |queries: &mut QueryTile<'_>,
                                        s: &mut [f32],
                                        u: &mut [f32],
                                        sums: &mut [f32],
                                        policy: Policy| {
                            let mut scratch = Scratch::new(values, to);
                            scratch.probe = Some(LaneProbe { u, packed: packed_u, sums });
                            let did = softmax(cx, queries, &step, s, [*k, *v], &mut scratch, policy);
                            assert!(scratch.packed == packed, "bug in fulgurite: weights were to be packed");
                            did
                        };
                        let (mut stats, mut alpha) = fold(&mut queries, s, u, &mut sums[..stride], policy);
                        if stats.distrusted > 0 {
                            (queries.m, queries.l, sums) = before;
                            scores(cx, &queries, (&step, start), *k, s, ahead, &mut modifier);
                            rx.unit.scores(rx, Products { step: &step, stride, ahead }, *k, r, u);
                            (stats, alpha) = fold(&mut queries, s, u, &mut sums[..stride], Policy::Raise(0.0));
                        }
                        rescaled |= stats.rescaled > 0;
                        factors.iter_mut().zip(alpha).for_each(|(factor, own)| *factor *= own);
                    }
                    step.ranges = seen;
                    let alpha = rescaled.then_some(factors);
                    done.push(Done { start, step, alpha, packed, own, seen: visible });
                }
            }
            let mut mean = [0.0; MAX_LANES];
            for lane in 0..stride {
                mean[lane] = if queries.l[lane] == 0.0 { 0.0 } else { sums[lane] / queries.l[lane] };
            }
            // The last blocks are still in the cache, so go back. But with zero probes this is attention, whose sums
            // start with the first block.
            let back = unit.is_none() && r[..rx.d_pad * stride].iter().any(|&x| x != 0.0);
            // Going back: the product of the factors of the blocks after this one.
            let mut later: Option<[f32; MAX_LANES]> = None;
            for i in 0..done.len() {
                let i = if back { done.len() - 1 - i } else { i };
                let Done { start, step, alpha, packed: weighed, own, seen: visible } = &mut done[i];
                if let (Some(alpha), false) = (&*alpha, back) {
                    cx.kernels.scale_lanes(queries.o, &alpha[..stride]);
                }
                let at = (*start / block).min(kept - 1) * room.weights;
                let [to, packed_u] = piece_buffers(own, [weights, probes], at, room.weights);
                let (s, pu) = (&mut s_all[*start * stride..], &mut u_all[*start * stride..]);
                let (s, pu) = (&mut s[..block * stride], &mut pu[..block * stride]);
                if let Some(later) = &later {
                    [&mut *s, &mut *pu].into_iter().for_each(|x| cx.kernels.scale_lanes(x, &later[..stride]));
                }
                let mut scratch = Scratch::new(values, to);
                scratch.packed = *weighed;
                let seen = std::mem::take(&mut step.ranges);
                // On vectors, sums are split where neighbours start or end, as in attention.
                for (ranges, visible) in in_pairs(seen, cx.whole_products()).zip(visible) {
                    step.ranges = ranges;
                    let mean = &mean[..stride];
                    let v = packed[*start / block][1];
                    match unit {
                        Some(unit) if *weighed => {
                            unit.bf16.reweigh(scratch.weights, packed_u, block / DEPTH, &ranges, mean);
                        }
                        // Correct the weights on the way into the panels. Non-finite values need the weights
                        // themselves.
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
                    if let Some(seen) = visible {
                        cx.add_visible(&queries.tile, *start, seen, s, queries.o, scratch.values);
                        continue;
                    }
                    let products = Products { step, stride, ahead };
                    cx.unit.output(cx, products, v, s, queries.o, &mut scratch);
                }
                if let (Some(alpha), true) = (&*alpha, back) {
                    let before = later.unwrap_or([1.0; MAX_LANES]);
                    later = Some(std::array::from_fn(|lane| before[lane] * alpha[lane]));
                }
            }
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
