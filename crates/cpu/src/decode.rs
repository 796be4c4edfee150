//! Few queries, many keys: bound by reading K and V, so they are read once, where they lie.
//!
//! Keys are split into fixed parts (their number depends on the sequence's own length alone), each part gives
//! a maximum, a sum and an unnormalised output for every row, and the parts are merged in order. All
//! key/value heads of a part are walked together, a few keys at a time, so that memory is read nearly in
//! sequence: only then the hardware fetches ahead.

use crate::forward::{Out, Plan, with_sink};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::simd::{
    ExpKind, Policy, RowsAt, SoftmaxArgs, SoftmaxStats, Strided, StripKernels, StripRows, StripSoftmax, Strips,
};
use crate::tiles::{Context, Lanes, MAX_LANES, Piece, Step, Tile};
use crate::{Counters, pool};
use fulgurite_core::merge::{Log, Natural, Weights};
use fulgurite_core::{DType, Precision, Rescale, Rows, Sequence, TensorView};
use std::ops::Range;
use std::sync::Mutex;

/// Rows of a group that still count as few: their scores fill one narrow tile.
const FEW: usize = 16;
/// Keys in a part.
const PART: usize = 512;
/// Keys in a block of scores.
const BLOCK: usize = 64;
/// Keys of which all heads are read before the next: as many pages as the hardware follows at once.
const STRIP: usize = 16;
/// The same on a matrix unit.
const UNIT_STRIP: usize = crate::simd::STRIP;

/// Whether a sequence is served better by this path.
pub(crate) fn suits(cx: &Context<'_>, s: &Sequence) -> bool {
    let rows = s.q_len * cx.problem.group();
    let one_pass = !matches!(cx.exp, ExpKind::Sas(_));
    let native = cx.problem.precision() == Precision::Native;
    (1..=FEW).contains(&rows) && cx.problem.blocks().is_none() && one_pass && native
}

/// A second row beside each query, for Parallax: u = r . k of every key joins the sums.
pub(crate) struct Probe<'a> {
    /// The context whose queries are the probes.
    pub cx: &'a Context<'a>,
    /// Where the mean of u goes, shaped like the LSE.
    pub mean: SharedRows<'a>,
    pub mean_strides: &'a [usize],
}

/// One part of one sequence.
struct Part {
    sequence: usize,
    /// Number of the part in its sequence, and where its results begin.
    number: usize,
    at: usize,
}

pub(crate) fn run(
    cx: &Context<'_>,
    sequences: &[usize],
    out: &Out<'_>,
    plan: &Plan,
    probe: Option<&Probe<'_>>,
) -> Counters {
    let mut parts = Vec::new();
    let mut starts = Vec::with_capacity(sequences.len());
    let mut room = 0;
    for &sequence in sequences {
        let s = &cx.bound.sequences()[sequence];
        starts.push(room);
        for number in 0..count(s) {
            parts.push(Part { sequence, number, at: room });
            room += cx.problem.kv_heads() * record(cx, s, probe);
        }
    }
    let mut partial = vec![0.0f32; room];
    let total = Mutex::new(Counters::default());
    {
        let shared = SharedRows::over(&mut partial);
        pool::run(plan.threads, parts.len(), &|i| {
            let len = cx.problem.kv_heads() * record(cx, &cx.bound.sequences()[parts[i].sequence], probe);
            // SAFETY: each part has its own room.
            let results = unsafe { shared.row(parts[i].at, len) };
            let counters = part(cx, &parts[i], results, plan.rescale, probe);
            total.lock().unwrap_or_else(|e| e.into_inner()).add(&counters);
        });
    }
    let heads = cx.problem.kv_heads();
    pool::run(plan.threads, sequences.len() * heads, &|i| {
        merge(cx, sequences[i / heads], i % heads, &partial[starts[i / heads]..], out, probe)
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

/// Elements a part writes for one key/value head: maximum and sum of each lane, then the rows of O; with probes also
/// the sum of u of each lane, and the rows of O weighted by u.
fn record(cx: &Context<'_>, s: &Sequence, probe: Option<&Probe<'_>>) -> usize {
    let rows = s.q_len * cx.pack * cx.dv;
    2 * FEW + rows + if probe.is_some() { FEW + rows } else { 0 }
}

struct Head<'w> {
    tile: Tile,
    lanes: Lanes,
    /// What this head sees of the current block, and its scores, `[key][lane]`.
    step: Option<Step>,
    s: &'w mut [f32],
    q: &'w mut [f32],
    on_unit: Option<OnUnit<'w>>,
    o: &'w mut [f32],
    m: [f32; MAX_LANES],
    l: [f32; MAX_LANES],
    second: Option<Second<'w>>,
}

/// What a matrix unit keeps for a head: its queries, scores and weights of a strip, and its part of O.
struct OnUnit<'w> {
    q: &'w mut [f32],
    s: &'w mut [f32],
    o: &'w mut [f32],
}

impl<'w> OnUnit<'w> {
    fn sizes(cx: &Context<'_>, rows: usize) -> [usize; 3] {
        [StripKernels::queries_room(rows, cx.d), StripKernels::room(rows), StripKernels::output_room(rows, cx.dv)]
    }

    fn new(cx: &Context<'_>, tile: &Tile, arena: &mut Arena<'w>) -> Option<Self> {
        let data = cx.bound.q().slice()?;
        let [q, s, o] = Self::sizes(cx, tile.rows).map(|n| arena.take(n));
        let starts = cx.row_starts(tile, cx.bound.q().strides());
        StripKernels::queries(RowsAt { data, starts: &starts[..tile.rows], n: cx.d }, q);
        o.fill(0.0);
        Some(OnUnit { q, s, o })
    }
}

/// The sums of a probe: r, u (then p u) of the current block, sum of p u, and O weighted by u.
struct Second<'w> {
    r: &'w mut [f32],
    u: &'w mut [f32],
    on_unit: Option<OnUnit<'w>>,
    o: &'w mut [f32],
    l: [f32; MAX_LANES],
}

fn part(cx: &Context<'_>, part: &Part, results: &mut [f32], rescale: Rescale, probe: Option<&Probe<'_>>) -> Counters {
    let rows = cx.bound.sequences()[part.sequence].q_len * cx.pack;
    let strips = strips(cx, rows);
    let found = try_part(cx, part, results, rescale, probe, strips);
    let again = || try_part(cx, part, results, rescale, probe, None);
    found.or_else(again).expect("bug in fulgurite: vectors refuse nothing")
}

/// `None` if a matrix unit met what it cannot do.
fn try_part(
    cx: &Context<'_>,
    part: &Part,
    results: &mut [f32],
    rescale: Rescale,
    probe: Option<&Probe<'_>>,
    strips: Option<&'static StripKernels>,
) -> Option<Counters> {
    let sequence = &cx.bound.sequences()[part.sequence];
    let rows = sequence.q_len * cx.pack;
    let heads = cx.problem.kv_heads();
    let sizes = [BLOCK * FEW, rows * cx.d_pad, rows * cx.dv_pad];
    let room = |sizes: &[usize]| sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    let head_room = room(&sizes) + strips.map_or(0, |_| room(&OnUnit::sizes(cx, rows)));
    let copy_room = 2 * Arena::room(BLOCK * cx.dv_pad);
    let heads_room = heads * head_room * if probe.is_some() { 2 } else { 1 };
    with_workspace(heads_room + copy_room, |workspace| {
        let mut arena = Arena::new(workspace);
        let q_rows = cx.query_rows(cx.bound.q().strides(), sequence);
        let dtype = cx.problem.dtype();
        let (q_order, o_order) = (cx.kernels.pair_order(dtype, cx.d), cx.kernels.pair_order(dtype, cx.dv));
        let mut walk: Vec<Head<'_>> = (0..heads)
            .map(|h| {
                let tile = tile(cx, part.sequence, h);
                let [s, q, o] = sizes.map(|n| arena.take(n));
                let load = |cx: &Context<'_>, rows: &Rows, q: &mut [f32]| {
                    cx.gather(&tile, &cx.bound.q().data(), rows, cx.d, q, cx.d_pad);
                    for row in q.chunks_exact_mut(cx.d_pad) {
                        let natural = row.to_vec();
                        for (x, &i) in row.iter_mut().zip(&q_order) {
                            *x = natural[i] * cx.problem.scale();
                        }
                    }
                };
                load(cx, &q_rows, q);
                o.fill(0.0);
                let on_unit = strips.and_then(|_| OnUnit::new(cx, &tile, &mut arena));
                let second = probe.map(|probe| {
                    let [u, r, o] = sizes.map(|n| arena.take(n));
                    load(probe.cx, &cx.query_rows(probe.cx.bound.q().strides(), sequence), r);
                    o.fill(0.0);
                    let on_unit = strips.and_then(|_| OnUnit::new(probe.cx, &tile, &mut arena));
                    Second { r, u, on_unit, o, l: [0.0; MAX_LANES] }
                });
                let (m, l) = ([f32::NEG_INFINITY; MAX_LANES], [0.0; MAX_LANES]);
                Head { tile, lanes: cx.lanes(&tile), step: None, s, q, on_unit, o, m, l, second }
            })
            .collect();
        let mut copies = [0; 2].map(|_| arena.take(BLOCK * cx.dv_pad));
        let mut counters = Counters::default();
        let strips = strips.map(|strips| strips.hold(rows));
        let end = ((part.number + 1) * PART).min(sequence.k_len);
        for start in (part.number * PART..end).step_by(BLOCK) {
            let piece = Piece { keys: start..(start + BLOCK).min(end), masked: true };
            for head in &mut walk {
                head.step = cx.step(&head.tile, &head.lanes, &piece, start);
            }
            if let Some(strips) = strips.as_ref().filter(|_| walk.iter().all(Head::sees_all)) {
                for first in (start..start + BLOCK).step_by(UNIT_STRIP) {
                    strip_on_unit(cx, strips, &mut walk, sequence, first, rescale, &mut counters);
                }
                continue;
            }
            for strip in (0..BLOCK).step_by(STRIP) {
                walk.iter_mut().enumerate().for_each(|(h, head)| head.scores(cx, sequence, h, start, strip));
            }
            for head in &mut walk {
                head.softmax(cx, start, rescale, &mut counters);
            }
            for strip in (0..BLOCK).step_by(STRIP) {
                walk.iter_mut()
                    .enumerate()
                    .for_each(|(h, head)| head.output(cx, sequence, h, start, strip, &mut copies));
            }
        }
        for head in &mut walk {
            if let Some(own) = &head.on_unit {
                StripKernels::add_to(own.o, rows, head.o, cx.dv_pad);
            }
            if let Some(Second { on_unit: Some(own), o, .. }) = &mut head.second {
                StripKernels::add_to(own.o, rows, o, cx.dv_pad);
            }
        }
        // A value that is not finite has spoiled its neighbour in the unit's pairs: once more, without.
        let spoiled = |o: &[f32]| o.iter().any(|x| !x.is_finite());
        let any = |head: &Head<'_>| spoiled(head.o) || head.second.as_ref().is_some_and(|own| spoiled(own.o));
        if strips.is_some() && walk.iter().any(any) {
            return None;
        }
        for (head, record) in walk.iter().zip(results.chunks_exact_mut(record(cx, sequence, probe))) {
            let (first, second) = record.split_at_mut(2 * FEW + rows * cx.dv);
            first[..FEW].copy_from_slice(&head.m[..FEW]);
            first[FEW..2 * FEW].copy_from_slice(&head.l[..FEW]);
            let write = |to: &mut [f32], from: &[f32]| {
                for (to, from) in to.chunks_exact_mut(cx.dv).zip(from.chunks_exact(cx.dv_pad)) {
                    o_order.iter().zip(from).for_each(|(&i, &x)| to[i] = x);
                }
            };
            write(&mut first[2 * FEW..], head.o);
            if let Some(own) = &head.second {
                second[..FEW].copy_from_slice(&own.l[..FEW]);
                write(&mut second[FEW..], own.o);
            }
        }
        Some(counters)
    })
}

/// The matrix unit's way with few queries, where it has one: bf16 in whole tiles, and scores that nobody modifies.
fn strips(cx: &Context<'_>, rows: usize) -> Option<&'static StripKernels> {
    let unit = cx.kernels.matrix?;
    let plain = cx.problem.dtype() == DType::Bf16 && cx.problem.score_program().is_none() && cx.rounding.is_none();
    (plain && unit.narrow.suits(cx.exp) && StripKernels::suits(rows, cx.d, cx.dv)).then_some(unit.strips)
}

/// A strip of keys that all rows of all heads see: scores of all heads, then their softmax, then their outputs, so that
/// keys and values are read nearly in sequence.
fn strip_on_unit(
    cx: &Context<'_>,
    strips: &Strips,
    walk: &mut [Head<'_>],
    sequence: &Sequence,
    first: usize,
    rescale: Rescale,
    counters: &mut Counters,
) {
    let (k, v) = (cx.bound.k(), cx.bound.v());
    let heads = walk.len();
    for (h, head) in walk.iter_mut().enumerate() {
        let Some(own) = &mut head.on_unit else { continue };
        strips.scores(own.q, strip(cx, k, sequence, [first, h, cx.d]), own.s);
        if let Some(Second { on_unit: Some(own), .. }) = &mut head.second {
            strips.scores(own.q, strip(cx, k, sequence, [first, h, cx.d]), own.s);
        }
        touch(cx, strips, v, sequence, [first, h, heads, cx.dv]);
    }
    for head in walk.iter_mut() {
        let Some(own) = &mut head.on_unit else { continue };
        let mut alpha = [1.0; FEW];
        let (m, l) = (&mut head.m[..FEW], &mut head.l[..FEW]);
        let (scale, tau) = (cx.problem.scale(), tau(rescale));
        let stats = strips.softmax(&mut StripSoftmax { s: own.s, m, l, alpha: &mut alpha, scale, tau });
        head.rescale(cx, &stats, &alpha, counters);
        if let (Some(own), Some(Second { on_unit: Some(probe), l, .. })) = (&head.on_unit, &mut head.second) {
            strips.probe(own.s, probe.s, l);
        }
    }
    for (h, head) in walk.iter_mut().enumerate() {
        let Some(own) = &mut head.on_unit else { continue };
        strips.output(own.s, strip(cx, v, sequence, [first, h, cx.dv]), own.o);
        if let Some(Second { on_unit: Some(own), .. }) = &mut head.second {
            strips.output(own.s, strip(cx, v, sequence, [first, h, cx.dv]), own.o);
        }
        touch(cx, strips, k, sequence, [first + UNIT_STRIP, h, heads, cx.d]);
    }
}

/// Asks for a head's share of the strip from a key on, where all heads of a key lie together.
fn touch(
    cx: &Context<'_>,
    strips: &Strips,
    view: &TensorView<'_>,
    sequence: &Sequence,
    [first, head, heads, n]: [usize; 4],
) {
    let rows = cx.key_rows(view.strides(), sequence);
    if let (Some(data), true) = (view.slice(), rows.row == heads * n) {
        let (start, share) = (rows.at(first, 0), UNIT_STRIP * rows.row / heads);
        strips.touch(data, start + head * share..start + (head + 1) * share);
    }
}

/// The rows of a strip from a key on, of one head and `n` elements each.
fn strip<'b>(
    cx: &Context<'b>,
    view: &TensorView<'b>,
    sequence: &Sequence,
    [first, kv_head, n]: [usize; 3],
) -> StripRows<'b> {
    let rows = cx.key_rows(view.strides(), sequence);
    let data = view.slice().expect("bug in fulgurite: strips are bf16");
    StripRows { data, offset: rows.at(first, kv_head), row: rows.row, n }
}

/// How far a score may exceed the maximum.
fn tau(rescale: Rescale) -> f32 {
    match rescale {
        Rescale::Lazy(tau) => tau,
        // There is no work to save by trusting a maximum here: the time goes into reading.
        Rescale::Always | Rescale::Optimistic(_) => 0.0,
    }
}

impl Head<'_> {
    /// Whether all rows see the whole block, and no expression hides a part of it.
    fn sees_all(&self) -> bool {
        let whole = |step: &Step| step.ranges[0] == (0, BLOCK) && step.inner[0] == (0, BLOCK) && !step.rest;
        self.step.as_ref().is_some_and(whole)
    }

    /// Multiplies what was summed before a raised maximum.
    fn rescale(&mut self, cx: &Context<'_>, stats: &SoftmaxStats, alpha: &[f32], counters: &mut Counters) {
        counters.rescales_possible += u64::from(stats.possible);
        counters.rescales_done += u64::from(stats.rescaled);
        if stats.rescaled > 0 {
            let rows = self.tile.rows;
            let scale = |o: &mut [f32], on_unit: &mut Option<OnUnit<'_>>| {
                for (row, &factor) in o.chunks_exact_mut(cx.dv_pad).zip(alpha) {
                    row.iter_mut().for_each(|x| *x *= factor);
                }
                if let Some(own) = on_unit {
                    StripKernels::scale(own.o, rows, alpha);
                }
            };
            scale(self.o, &mut self.on_unit);
            if let Some(Second { o, on_unit, l, .. }) = &mut self.second {
                scale(o, on_unit);
                l.iter_mut().zip(alpha).for_each(|(l, factor)| *l *= factor);
            }
        }
    }

    /// The keys of a strip that this head sees.
    fn seen(&self, strip: usize) -> Range<usize> {
        let hull = self.step.as_ref().map_or(0..0, Step::hull);
        let (start, end) = (hull.start.max(strip), hull.end.min(strip + STRIP));
        start..end.max(start)
    }

    fn scores(&mut self, cx: &Context<'_>, sequence: &Sequence, kv_head: usize, start: usize, strip: usize) {
        let seen = self.seen(strip);
        let k = cx.bound.k();
        let rows = cx.key_rows(k.strides(), sequence);
        if seen.is_empty() {
            return;
        }
        let (stride, size) = (self.lanes.stride, [self.tile.rows, seen.len(), cx.d]);
        let keys = Strided { data: k.data(), offset: rows.at(start + seen.start, kv_head), row: rows.row };
        let s = &mut self.s[seen.start * stride..seen.end * stride];
        // Lanes past the last row hold what the last block left: make it harmless.
        s.fill(0.0);
        cx.kernels.dots(s, stride, self.q, cx.d_pad, &keys, size, STRIP);
        if let Some(second) = &mut self.second {
            let u = &mut second.u[seen.start * stride..seen.end * stride];
            u.fill(0.0);
            // The keys are near by now: nothing to ask for.
            cx.kernels.dots(u, stride, second.r, cx.d_pad, &keys, size, 0);
        }
    }

    fn softmax(&mut self, cx: &Context<'_>, start: usize, rescale: Rescale, counters: &mut Counters) {
        let Some(step) = &self.step else { return };
        let stride = self.lanes.stride;
        if step.rest || cx.problem.score_program().is_some() {
            cx.modify(&self.tile, &self.lanes, step, start, self.s, None);
        }
        let mut alpha = [1.0; MAX_LANES];
        let stats = cx.kernels.softmax(&mut SoftmaxArgs {
            s: self.s,
            stride,
            ranges: step.ranges,
            inner: step.inner,
            lo: &step.lo,
            hi: &step.hi,
            m: &mut self.m,
            l: &mut self.l,
            alpha: &mut alpha,
            exp: cx.exp,
            policy: Policy::Raise(tau(rescale)),
            scale: 1.0,
        });
        self.rescale(cx, &stats, &alpha, counters);
        let Some(step) = &self.step else { return };
        // Where vectors see different keys, what was not computed is not a probability.
        let width = cx.kernels.lanes;
        for (z, &(a, b)) in step.ranges[..stride / width].iter().enumerate() {
            for key in step.hull().filter(|key| !(a..b).contains(key)) {
                self.s[key * stride + z * width..key * stride + (z + 1) * width].fill(0.0);
            }
        }
        if let Some(second) = &mut self.second {
            for key in step.hull() {
                let p = &self.s[key * stride..(key + 1) * stride];
                let u = &mut second.u[key * stride..(key + 1) * stride];
                for ((u, &p), l) in u.iter_mut().zip(p).zip(&mut second.l) {
                    // A key that this row does not see may hold anything.
                    *u = if p == 0.0 { 0.0 } else { p * *u };
                    *l += *u;
                }
            }
        }
    }

    fn output(
        &mut self,
        cx: &Context<'_>,
        sequence: &Sequence,
        kv_head: usize,
        start: usize,
        strip: usize,
        copies: &mut [&mut [f32]; 2],
    ) {
        let seen = self.seen(strip);
        let (Some(step), false) = (&self.step, seen.is_empty()) else { return };
        let v = cx.bound.v();
        let rows = cx.key_rows(v.strides(), sequence);
        let (stride, size) = (self.lanes.stride, [self.tile.rows, seen.len(), cx.dv]);
        let p = &self.s[seen.start * stride..];
        let mut values = Strided { data: v.data(), offset: rows.at(start + seen.start, kv_head), row: rows.row };
        if step.rest {
            // A key that nobody sees may hold NaN, and NaN times 0 would show.
            let [buffer, copy] = copies;
            let keys = start + seen.start..start + seen.end;
            let found = cx.keys(v, sequence, kv_head, keys, [cx.dv, cx.dv_pad], buffer);
            if !found.finite {
                let clean = cx.only_seen(found, cx.dv, p, &step.part(&seen), stride, copy).rows;
                let order = cx.kernels.pair_order(cx.problem.dtype(), cx.dv);
                let rows = (0..seen.len()).flat_map(|key| order.iter().map(move |&i| clean.at(key, i).data[0]));
                let rows: Vec<f32> = rows.collect();
                values = Strided { data: (&rows).into(), offset: 0, row: cx.dv };
                cx.kernels.combine(self.o, cx.dv_pad, p, stride, &values, size, 0);
                if let Some(second) = &mut self.second {
                    let u = &second.u[seen.start * stride..];
                    cx.kernels.combine(second.o, cx.dv_pad, u, stride, &values, size, 0);
                }
                return;
            }
        }
        cx.kernels.combine(self.o, cx.dv_pad, p, stride, &values, size, STRIP);
        if let Some(second) = &mut self.second {
            cx.kernels.combine(second.o, cx.dv_pad, &second.u[seen.start * stride..], stride, &values, size, 0);
        }
    }
}

/// Merges the parts of one sequence and key/value head, in order, and writes the rows.
fn merge(cx: &Context<'_>, sequence: usize, kv_head: usize, partial: &[f32], out: &Out<'_>, probe: Option<&Probe<'_>>) {
    let s = &cx.bound.sequences()[sequence];
    let tile = tile(cx, sequence, kv_head);
    let size = record(cx, s, probe);
    let all: Vec<&[f32]> = (0..count(s))
        .map(|part| {
            let at = (part * cx.problem.kv_heads() + kv_head) * size;
            &partial[at..at + size]
        })
        .collect();
    let (o_rows, lse_rows) = (cx.query_rows(out.o_strides, s), cx.bound.lse_rows(out.lse_strides, s));
    let (mut o, mut weighted) = (vec![0.0f32; cx.dv], vec![0.0f32; cx.dv]);
    for lane in 0..tile.rows {
        let weights = Weights::new(all.iter().map(|part| Log::<Natural>::new(part[lane])));
        let row = |first: usize| all.iter().map(move |part| &part[first + lane * cx.dv..first + (lane + 1) * cx.dv]);
        let sum = weights.sum(all.iter().map(|part| part[FEW + lane]));
        weights.rows(row(2 * FEW), &mut o);
        let top = weights.top().get();
        let (mut inverse, mut lse) = ([0.0], [0.0]);
        crate::evaluate::finish(&[top], &[sum], &mut inverse, &mut lse);
        let (q, head) = cx.row(&tile, lane);
        let (mut factor, mut lse) = (inverse[0], lse[0]);
        if let Some(sink) = cx.bound.sink(head) {
            (factor, lse) = with_sink(factor, lse, sink);
        }
        o.iter_mut().for_each(|x| *x = if top == f32::NEG_INFINITY { 0.0 } else { *x * factor });
        if let Some(probe) = probe {
            let second = 2 * FEW + tile.rows * cx.dv;
            let mean = weights.sum(all.iter().map(|part| part[second + lane])) * factor;
            weights.rows(row(second + FEW), &mut weighted);
            o.iter_mut().zip(&weighted).for_each(|(o, w)| *o = *o * (1.0 + mean) - w * factor);
            let rows = cx.bound.lse_rows(probe.mean_strides, s);
            // SAFETY: every (sequence, head, query) is merged once.
            unsafe { probe.mean.store(cx.kernels, rows.at(q, head), &[mean]) };
        }
        // SAFETY: every (sequence, head, query) is merged once.
        unsafe {
            out.o.store(cx.kernels, o_rows.at(q, head), &o);
            out.lse.store(cx.kernels, lse_rows.at(q, head), &[lse]);
        }
    }
}
