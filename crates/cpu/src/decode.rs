//! Few queries, many keys: bound by reading K and V, so they are read once, where they lie.
//!
//! Keys are split into fixed parts (their number depends on the sequence's own length alone), each part gives
//! a maximum, a sum and an unnormalised output for every row, and the parts are merged in order. All
//! key/value heads of a part are walked together, block by block, so that memory is read nearly in sequence.

use crate::forward::{Out, Plan, with_sink};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::simd::{ExpKind, Policy, SoftmaxArgs, Strided};
use crate::tiles::{Context, Lanes, MAX_LANES, Tile};
use crate::{Counters, pool};
use fulgurite_core::{Rescale, Sequence};
use std::sync::Mutex;

/// Rows of a group that still count as few: their scores fill one narrow tile.
const FEW: usize = 16;
/// Keys in a part.
const PART: usize = 512;
/// Keys in a block: those of all heads stay in the second-level cache, one block ahead is prefetched.
const BLOCK: usize = 64;

/// Whether a sequence is served better by this path.
pub(crate) fn suits(cx: &Context<'_>, s: &Sequence) -> bool {
    let rows = s.q_len * cx.problem.group();
    let one_row_of_blocks = cx.problem.blocks().is_none_or(|spec| s.q_len <= spec.rows);
    let one_pass = !matches!(cx.exp, ExpKind::Sas(_));
    (1..=FEW).contains(&rows) && cx.pack == cx.problem.group() && one_row_of_blocks && one_pass
}

/// One part of one sequence.
struct Part {
    sequence: usize,
    /// Number of the part in its sequence, and where its results begin.
    number: usize,
    at: usize,
}

pub(crate) fn run(cx: &Context<'_>, sequences: &[usize], out: &Out<'_>, plan: &Plan) -> Counters {
    let mut parts = Vec::new();
    let mut starts = Vec::with_capacity(sequences.len());
    let mut room = 0;
    for &sequence in sequences {
        let s = &cx.bound.sequences()[sequence];
        starts.push(room);
        for number in 0..count(s) {
            parts.push(Part { sequence, number, at: room });
            room += cx.problem.kv_heads() * record(cx, s);
        }
    }
    let mut partial = vec![0.0f32; room];
    let total = Mutex::new(Counters::default());
    {
        let shared = SharedRows::over(&mut partial);
        pool::run(plan.threads, parts.len(), &|i| {
            let len = cx.problem.kv_heads() * record(cx, &cx.bound.sequences()[parts[i].sequence]);
            // SAFETY: each part has its own room.
            let results = unsafe { shared.row(parts[i].at, len) };
            let counters = part(cx, &parts[i], results, plan.rescale);
            total.lock().unwrap_or_else(|e| e.into_inner()).add(&counters);
        });
    }
    let heads = cx.problem.kv_heads();
    pool::run(plan.threads, sequences.len() * heads, &|i| {
        merge(cx, sequences[i / heads], i % heads, &partial[starts[i / heads]..], out)
    });
    total.into_inner().unwrap_or_else(|e| e.into_inner())
}

fn count(s: &Sequence) -> usize {
    s.k_len.div_ceil(PART).max(1)
}

fn tile(cx: &Context<'_>, sequence: usize, kv_head: usize) -> Tile {
    let s = &cx.bound.sequences()[sequence];
    Tile { sequence, head: kv_head * cx.pack, first: 0, rows: s.q_len * cx.pack }
}

/// Elements a part writes for one key/value head: maximum and sum of each lane, then the rows of O.
fn record(cx: &Context<'_>, s: &Sequence) -> usize {
    2 * FEW + s.q_len * cx.pack * cx.dv
}

struct Head<'w> {
    tile: Tile,
    lanes: Lanes,
    q: &'w mut [f32],
    o: &'w mut [f32],
    m: [f32; MAX_LANES],
    l: [f32; MAX_LANES],
}

fn part(cx: &Context<'_>, part: &Part, results: &mut [f32], rescale: Rescale) -> Counters {
    let sequence = &cx.bound.sequences()[part.sequence];
    let rows = sequence.q_len * cx.pack;
    let heads = cx.problem.kv_heads();
    let block_room = Arena::room(BLOCK * FEW);
    let clean_room = 2 * Arena::room(BLOCK * cx.dv_pad);
    let head_room = Arena::room(rows * cx.d_pad) + Arena::room(rows * cx.dv_pad);
    with_workspace(block_room + clean_room + heads * head_room, |workspace| {
        let mut arena = Arena::new(workspace);
        let s = arena.take(BLOCK * FEW);
        let [clean, copy] = [0; 2].map(|_| arena.take(BLOCK * cx.dv_pad));
        let q_rows = cx.query_rows(cx.bound.q().strides(), sequence);
        let mut walk: Vec<Head<'_>> = (0..heads)
            .map(|h| {
                let tile = tile(cx, part.sequence, h);
                let (q, o) = (arena.take(rows * cx.d_pad), arena.take(rows * cx.dv_pad));
                cx.gather(&tile, &cx.bound.q().data(), &q_rows, cx.d, q, cx.d_pad);
                q.iter_mut().for_each(|x| *x *= cx.problem.scale());
                o.fill(0.0);
                Head { tile, lanes: cx.lanes(&tile), q, o, m: [f32::NEG_INFINITY; MAX_LANES], l: [0.0; MAX_LANES] }
            })
            .collect();
        let mut counters = Counters::default();
        let end = ((part.number + 1) * PART).min(sequence.k_len);
        for start in (part.number * PART..end).step_by(BLOCK) {
            for (h, head) in walk.iter_mut().enumerate() {
                fold(cx, sequence, h, head, start..(start + BLOCK).min(end), s, clean, copy, rescale, &mut counters);
            }
        }
        for (head, record) in walk.iter().zip(results.chunks_exact_mut(record(cx, sequence))) {
            record[..FEW].copy_from_slice(&head.m[..FEW]);
            record[FEW..2 * FEW].copy_from_slice(&head.l[..FEW]);
            for (to, from) in record[2 * FEW..].chunks_exact_mut(cx.dv).zip(head.o.chunks_exact(cx.dv_pad)) {
                to.copy_from_slice(&from[..cx.dv]);
            }
        }
        counters
    })
}

/// One block of keys folded into the rows of one key/value head.
#[allow(clippy::too_many_arguments)] // the state of the walk; a struct would only rename it
fn fold(
    cx: &Context<'_>,
    sequence: &Sequence,
    kv_head: usize,
    head: &mut Head<'_>,
    keys: std::ops::Range<usize>,
    s: &mut [f32],
    clean: &mut [f32],
    copy: &mut [f32],
    rescale: Rescale,
    counters: &mut Counters,
) {
    let (k, v) = (cx.bound.k(), cx.bound.v());
    let (k_rows, v_rows) = (cx.key_rows(k.strides(), sequence), cx.key_rows(v.strides(), sequence));
    let stride = head.lanes.stride;
    for piece in cx.pieces(&head.tile, keys.clone()) {
        let Some(step) = cx.step(&head.tile, &head.lanes, &piece, keys.start) else { continue };
        let seen = step.hull();
        let (first, n) = (keys.start + seen.start, seen.len());
        let scores = &mut s[seen.start * stride..];
        let rows = head.tile.rows;
        let view = Strided { data: k.data(), offset: k_rows.at(first, kv_head), row: k_rows.row };
        cx.kernels.dots(scores, stride, head.q, cx.d_pad, &view, [rows, n, cx.d], BLOCK);
        // Lanes past the last row hold what the last block left: make it harmless.
        for row in scores[..n * stride].chunks_exact_mut(stride) {
            row[rows..].fill(0.0);
        }
        if step.rest || cx.problem.score_program().is_some() {
            cx.modify(&head.tile, &head.lanes, &step, keys.start, s, None);
        }
        let mut alpha = [1.0; MAX_LANES];
        let tau = match rescale {
            Rescale::Lazy(tau) => tau,
            // There is no work to save by trusting a maximum here: the time goes into reading.
            Rescale::Always | Rescale::Optimistic(_) => 0.0,
        };
        let stats = cx.kernels.softmax(&mut SoftmaxArgs {
            s,
            stride,
            ranges: step.ranges,
            edges: step.edges,
            lo: &step.lo,
            hi: &step.hi,
            m: &mut head.m,
            l: &mut head.l,
            alpha: &mut alpha,
            exp: cx.exp,
            policy: Policy::Raise(tau),
        });
        counters.rescales_possible += u64::from(stats.possible);
        counters.rescales_done += u64::from(stats.rescaled);
        if stats.rescaled > 0 {
            for (row, &factor) in head.o.chunks_exact_mut(cx.dv_pad).zip(&alpha) {
                row.iter_mut().for_each(|x| *x *= factor);
            }
        }
        // Where vectors see different keys, what none computed is not a probability.
        for (z, &(a, b)) in step.ranges[..stride / cx.kernels.lanes].iter().enumerate() {
            let of = z * cx.kernels.lanes..(z + 1) * cx.kernels.lanes;
            for key in seen.clone().filter(|key| !(a..b).contains(key)) {
                s[key * stride + of.start..key * stride + of.end].fill(0.0);
            }
        }
        let p = &s[seen.start * stride..];
        let mut view = Strided { data: v.data(), offset: v_rows.at(first, kv_head), row: v_rows.row };
        if step.hides() {
            // A key that nobody sees may hold NaN, and NaN times 0 would show.
            let found =
                cx.keys(v, sequence, kv_head, first..first + n, [cx.dv, cx.dv_pad], &mut clean[..n * cx.dv_pad]);
            if !found.finite {
                let own = step.shifted(seen.start);
                let rows = cx.only_seen(found, cx.dv, p, &own, stride, copy);
                view = Strided { data: rows.rows.data.into(), offset: 0, row: rows.rows.stride };
            }
        }
        cx.kernels.combine(head.o, cx.dv_pad, p, stride, &view, [head.tile.rows, n, cx.dv], BLOCK);
    }
}

/// Merges the parts of one sequence and key/value head, in order, and writes the rows.
fn merge(cx: &Context<'_>, sequence: usize, kv_head: usize, partial: &[f32], out: &Out<'_>) {
    let s = &cx.bound.sequences()[sequence];
    let tile = tile(cx, sequence, kv_head);
    let size = record(cx, s);
    let all: Vec<&[f32]> = (0..count(s))
        .map(|part| {
            let at = (part * cx.problem.kv_heads() + kv_head) * size;
            &partial[at..at + size]
        })
        .collect();
    let (o_rows, lse_rows) = (cx.query_rows(out.o_strides, s), cx.bound.lse_rows(out.lse_strides, s));
    let mut o = vec![0.0f32; cx.dv];
    for lane in 0..tile.rows {
        let top = all.iter().map(|part| part[lane]).fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0f32;
        o.fill(0.0);
        for part in all.iter().filter(|part| part[lane] != f32::NEG_INFINITY) {
            let weight = (part[lane] - top).exp();
            sum += weight * part[FEW + lane];
            let row = &part[2 * FEW + lane * cx.dv..2 * FEW + (lane + 1) * cx.dv];
            o.iter_mut().zip(row).for_each(|(o, &x)| *o += weight * x);
        }
        let (mut inverse, mut lse) = ([0.0], [0.0]);
        crate::evaluate::finish(&[top], &[sum], &mut inverse, &mut lse);
        let (q, head) = cx.row(&tile, lane);
        let (mut factor, mut lse) = (inverse[0], lse[0]);
        if let Some(sink) = cx.bound.sink(head) {
            (factor, lse) = with_sink(factor, lse, sink);
        }
        o.iter_mut().for_each(|x| *x = if top == f32::NEG_INFINITY { 0.0 } else { *x * factor });
        // SAFETY: every (sequence, head, query) is merged once.
        unsafe {
            out.o.store(cx.kernels, o_rows.at(q, head), &o);
            out.lse.store(cx.kernels, lse_rows.at(q, head), &[lse]);
        }
    }
}
