//! Windows with sinks, if nothing else is skipped: every tile of rows folds its window in one step and its sinks in
//! another, whatever the length of the sequence.
//!
//! An item's keys are packed once, as one block that starts with its first row's window, so no block boundary falls
//! inside a tile's window.

use crate::forward::{Out, QueryTile, State, finish, fold};
use crate::memory::{Arena, with_workspace};
use crate::simd::{Ahead, DEPTH, Policy};
use crate::skip::{Found, Item};
use crate::step::in_pairs;
use crate::tiles::{Context, MAX_LANES, Piece, Tile};
use crate::unit::{Keys, Scratch};
use crate::{Counters, band};
use fulgurite_core::Rescale;
use fulgurite_core::skip::{HeadClass, SkipBound};
use std::ops::Range;

/// Rows per item. On a matrix unit its keys and values, in parts, stay in the L2 cache; the vectors pack keys as rows
/// need them, and more rows share the cost of those before the first row.
pub(crate) fn item_rows(cx: &Context<'_>) -> usize {
    if cx.kernels.matrix_for(cx.problem.dtype()).is_some() { 512 } else { 1024 }
}
/// Number of keys that the rows of the longest item see, or of sinks, beyond which blocks are processed one by one
/// instead.
const MOST: usize = 4096;

/// Rows prefetched after a block of products: a tile of 64 rows has about 20 blocks, which covers its rows of keys,
/// values, queries and outputs.
const PACE: usize = 12;

/// The keys that an item's rows see: at the start, and in their windows.
pub(crate) struct Spans {
    pub sinks: Range<usize>,
    pub window: Range<usize>,
}

/// The spans of an item, if this path handles it: windows alone, and not too long ones.
pub(crate) fn spans(cx: &Context<'_>, skip: &SkipBound<'_>, item: &Item) -> Option<Spans> {
    let own = skip.problem().skip();
    let class = own.class(item.head);
    let HeadClass::Window { keys, sinks } = class else { return None };
    // The decision must not depend on the item, whose length depends on the threads: the two paths give different bits.
    if own.proxy.is_some() || own.lambda.is_some() || sinks > MOST || keys.saturating_add(item_rows(cx)) > MOST {
        return None;
    }
    let s = &cx.bound.sequences()[item.sequence];
    let rows = skip.tile_rows(s, item.tiles.start).start..skip.tile_rows(s, item.tiles.end - 1).end;
    if rows.is_empty() {
        return None;
    }
    let part = |q: usize, i: usize| {
        let (span, own) = (cx.problem.mask().keys(q, s.q_len, s.k_len), class.keys(q, s.q_len, s.k_len));
        own[i].start.max(span.start)..own[i].end.min(span.end)
    };
    // Spans move with the rows, so the first and the last row have the ends.
    let hull = |i: usize| {
        let (a, b) = (part(rows.start, i), part(rows.end - 1, i));
        let ends = [a, b].into_iter().filter(|p| p.start < p.end);
        ends.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    };
    let (sinks, window) = (hull(0), hull(1));
    let window = window.start / DEPTH * DEPTH..window.end;
    Some(Spans { sinks: 0..sinks.end, window })
}

/// Computes an item.
pub(crate) fn walk(
    cx: &Context<'_>,
    skip: &SkipBound<'_>,
    item: &Item,
    spans: &Spans,
    next: Option<&(&Item, Spans)>,
    out: &Out<'_>,
    done: &dyn Fn(usize, Found),
) {
    let sequence = &cx.bound.sequences()[item.sequence];
    let class = skip.problem().skip().class(item.head);
    if band::suits(cx, class) {
        return band::walk(cx, skip, item, spans, out, done);
    }
    let with = |keys: &Range<usize>| {
        let block = Some(keys.len().next_multiple_of(2 * DEPTH).max(2 * DEPTH));
        Context { block, expressions: cx.expressions.clone(), ..*cx }
    };
    let (near, far) = (with(&spans.window), with(&spans.sinks));
    let (rooms, blocks) =
        ([near.unit.buffer_sizes(&near), far.unit.buffer_sizes(&far)], [&near, &far].map(|cx| cx.unit.block(cx)));
    let tile = cx.kernels.tile;
    let longest = blocks[0].max(blocks[1]);
    let scratch = Arena::room(tile * cx.d_pad) + tile * cx.d_pad.max(cx.dv_pad);
    let most = |of: fn(&crate::unit::BufferSizes) -> usize| of(&rooms[0]).max(of(&rooms[1]));
    let sizes = [
        blocks[0] * rooms[0].key,
        rooms[0].values,
        blocks[1] * rooms[1].key,
        rooms[1].values,
        most(|r| r.values),
        most(|r| r.weights),
        longest * tile,
        scratch,
        most(|r| r.queries),
        cx.dv_pad * tile,
    ];
    let all = sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    with_workspace(all, |workspace| {
        let mut arena = Arena::new(workspace);
        let [near_k, near_v, far_k, far_v, values, weights, s, rows, q, o] = sizes.map(|n| arena.take(n));
        let mut scratch = Scratch::new(values, weights);
        let mut modifier = cx.modifier(cx.unit.score_scale(cx));
        let _held = cx.unit.hold();
        let head = item.head / cx.problem.group();
        let keys = |range: &Range<usize>| Keys { sequence, head, range: range.clone() };
        let window = near.unit.block_of(&near, &keys(&spans.window), [near_k, near_v]);
        let sinks = far.unit.block_of(&far, &keys(&spans.sinks), [far_k, far_v]);
        let mut next_keys = next.map(|(item, spans)| (*item, spans.window.clone()));
        let mut counters = Counters::default();
        for (i, number) in item.tiles.clone().enumerate() {
            let own = skip.tile_rows(sequence, number);
            let mut ahead = [Ahead::paced(PACE); 2];
            let o_rows = cx.query_layout(out.o_strides, sequence);
            out.o.prefetch(&mut ahead[1], o_rows.at(own.start, item.head), o_rows.row, cx.dv, own.len());
            // Pack equally many of the next keys with each tile.
            if let Some((next, keys)) = &mut next_keys {
                let rows = keys.len().div_ceil(item.tiles.len() - i);
                let (sequence, head) = (&cx.bound.sequences()[next.sequence], next.head / cx.problem.group());
                cx.prefetch_keys(sequence, head, keys.start..keys.start + rows, &mut ahead);
                keys.start += rows;
            }
            if number + 1 < item.tiles.end {
                cx.prefetch_queries(sequence, item.head, skip.tile_rows(sequence, number + 1), &mut ahead[0]);
            } else if let Some((next, _)) = next {
                let sequence = &cx.bound.sequences()[next.sequence];
                cx.prefetch_queries(sequence, next.head, skip.tile_rows(sequence, next.tiles.start), &mut ahead[0]);
            }
            let mut found = Found::default();
            let admitted = skip.admitted(sequence, item.head, number, &mut found.counts);
            found.kept = admitted.into_iter().map(|t| t as i32).collect();
            for first in own.clone().step_by(tile) {
                let tile = Tile { sequence: item.sequence, head: item.head, first, rows: tile.min(own.end - first) };
                let lanes =
                    |i: usize| near.lanes_within(&tile, |q| class.keys(q, sequence.q_len, sequence.k_len)[i].clone());
                let lanes = [lanes(1), lanes(0)];
                let stride = lanes[0].stride;
                cx.unit.queries(cx, &tile, stride, rows, q);
                let o = &mut o[..cx.dv_pad * stride];
                o.fill(0.0);
                let [own, beginning] = lanes;
                let mut queries =
                    QueryTile { tile, lanes: own, q, o, m: [f32::NEG_INFINITY; MAX_LANES], l: [0.0; MAX_LANES] };
                // The window first: its maximum usually exceeds the sinks', so nothing must be rescaled.
                let (from, to) = queries.lanes.reach();
                let keys = from.max(spans.window.start)..to.min(spans.window.end);
                let mut parts = vec![(&near, window, spans.window.start, keys, Policy::Raise(0.0), None)];
                if !spans.sinks.is_empty() {
                    let policy = Policy::Trust(Rescale::OPTIMISTIC_LIMIT);
                    parts.push((&far, sinks, 0, spans.sinks.clone(), policy, Some(&beginning)));
                }
                for (cx, block, origin, keys, policy, lanes) in parts {
                    let piece = Piece { keys, masked: true };
                    let step = cx.step(&queries.tile, lanes.unwrap_or(&queries.lanes), &piece, origin);
                    let Some(mut step) = step else { continue };
                    let all = std::mem::take(&mut step.ranges);
                    for ranges in in_pairs(all, cx.whole_tiles()) {
                        step.ranges = ranges;
                        let state = &mut State {
                            s,
                            scratch: &mut scratch,
                            ahead: &mut ahead,
                            counters: &mut counters,
                            modifier: &mut modifier,
                        };
                        fold(cx, &mut queries, &step, origin, block, policy, state);
                    }
                }
                let scale = cx.score_scale();
                queries.m.iter_mut().for_each(|m| *m *= scale);
                ahead.iter_mut().for_each(|ahead| ahead.take(usize::MAX));
                finish(cx, &mut queries, rows, out);
            }
            done(number, found);
        }
    });
}
