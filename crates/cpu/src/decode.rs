//! Decode: few queries, many keys. Reading K and V bounds the time, so they are read once, in place.
//!
//! Keys are split into fixed parts, whose number depends only on the sequence's own length. Each part gives a maximum,
//! a sum and an unnormalised output for every row, and the parts are merged in order. All key/value heads of a part are
//! processed together, a few keys at a time, so that memory is read nearly sequentially: only then does the hardware
//! prefetch.

use crate::forward::{Out, RunOptions, with_sink};
use crate::memory::{Arena, SharedRows, with_results, with_workspace};
use crate::modify::Modifier;
use crate::nonfinite::Visible;
use crate::simd::{ExpKind, LaneProbe, Policy, Prefetch, Share, SoftmaxArgs, SoftmaxStats, Strided};
use crate::step::Step;
use crate::tiles::{Context, Lanes, MAX_LANES, Piece, Tile};
use crate::{Counters, pool};
use fulgurite_core::merge::{Log, Natural, Weights};
use fulgurite_core::{Precision, Problem, Rescale, RowLayout, Sequence, TensorView, stop};
use std::ops::Range;
use std::sync::Mutex;

mod on_matrix_unit;

/// Largest number of rows of a group for this path: their scores fill one narrow tile.
const FEW: usize = 16;
/// Keys per part.
const PART: usize = 512;
/// Keys per block of scores.
pub(crate) const BLOCK: usize = 64;
/// Number of keys whose heads are all read before the next keys, which are prefetched in the meantime.
const STRIP: usize = 16;

/// Whether this path is faster for a sequence.
pub(crate) fn suits(cx: &Context<'_>, s: &Sequence) -> bool {
    suits_rows(cx.problem, cx.exp, s.q_len)
}

/// Whether this path is faster for sequences of `queries` queries.
pub(crate) fn suits_rows(problem: &Problem, exp: ExpKind, queries: usize) -> bool {
    let one_pass = !matches!(exp, ExpKind::Sas(_));
    let native = problem.precision() == Precision::Native;
    (1..=FEW).contains(&(queries * problem.group())) && problem.blocks().is_none() && one_pass && native
}

/// A second row for each query, for Parallax: u = r . k of every key is added to the sums.
pub(crate) struct Probe<'a> {
    /// The context whose queries are the probes.
    pub cx: &'a Context<'a>,
    /// Output for the mean of u, shaped like the LSE.
    pub mean: SharedRows<'a>,
    pub mean_strides: &'a [usize],
}

/// One part of one sequence.
struct Part {
    sequence: usize,
    /// Index of the part in its sequence; `at`: offset of its results.
    number: usize,
    at: usize,
}

impl Part {
    fn keys(&self, s: &Sequence) -> Range<usize> {
        self.number * PART..((self.number + 1) * PART).min(s.k_len)
    }
}

pub(crate) fn run(
    cx: &Context<'_>,
    sequences: &[usize],
    out: &Out<'_>,
    plan: &RunOptions,
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
    let total = Mutex::new(Counters::default());
    with_results(room, |partial| {
        let shared = SharedRows::over(partial);
        pool::run(plan.threads, parts.len(), &|i| {
            let len = cx.problem.kv_heads() * record(cx, &cx.bound.sequences()[parts[i].sequence], probe);
            // SAFETY: each part has its own room.
            let results = unsafe { shared.row(parts[i].at, len) };
            // Parts are handed out in order, so this thread's next one is about `threads` parts ahead.
            let next = parts.get(i + plan.threads);
            let counters = part(cx, &parts[i], next, results, plan.rescale, probe);
            total.lock().unwrap_or_else(|e| e.into_inner()).add(&counters);
        });
        let (heads, partial) = (cx.problem.kv_heads(), &*partial);
        pool::run(plan.threads, sequences.len() * heads, &|i| {
            merge(cx, sequences[i / heads], i % heads, &partial[starts[i / heads]..], out, probe)
        });
    });
    total.into_inner().unwrap_or_else(|e| e.into_inner())
}

fn count(s: &Sequence) -> usize {
    s.k_len.div_ceil(PART).max(1)
}

/// Whether every row of every head sees every key of a part.
fn sees_all(cx: &Context<'_>, part: &Part) -> bool {
    let keys = part.keys(&cx.bound.sequences()[part.sequence]);
    let seen = |head: usize| {
        let (tile, piece) = (tile(cx, part.sequence, head), Piece { keys: keys.clone(), masked: true });
        let lanes = cx.lanes(&tile);
        let step = cx.step(&tile, &lanes, &piece, keys.start);
        let vectors = lanes.stride / cx.kernels.lanes;
        step.is_some_and(|step| !step.rest && step.inner[..vectors].iter().all(|&inner| inner == (0, keys.len())))
    };
    // Without an expression, all heads see the same keys.
    let heads = if cx.problem.mask_rest().is_some() { cx.problem.kv_heads() } else { 1 };
    !keys.is_empty() && (0..heads).all(seen)
}

fn tile(cx: &Context<'_>, sequence: usize, kv_head: usize) -> Tile {
    let s = &cx.bound.sequences()[sequence];
    Tile { sequence, head: kv_head * cx.pack, first: 0, rows: s.q_len * cx.pack }
}

/// Number of elements that a part writes for one key/value head: maximum and sum of each lane, then the rows of O. With
/// probes, also the sum of u of each lane, and the rows of O weighted by u. Rows are in the kernels' pair order.
fn record(cx: &Context<'_>, s: &Sequence, probe: Option<&Probe<'_>>) -> usize {
    let rows = s.q_len * cx.pack * cx.dv;
    2 * FEW + rows + if probe.is_some() { FEW + rows } else { 0 }
}

struct Head<'w> {
    tile: Tile,
    lanes: Lanes,
    /// The part of the current block that this head sees, and its scores, `[key][lane]`.
    step: Option<Step>,
    /// What its lanes see of the current block, if not all of it.
    seen: Option<Visible>,
    s: &'w mut [f32],
    q: &'w mut [f32],
    o: &'w mut [f32],
    m: [f32; MAX_LANES],
    l: [f32; MAX_LANES],
    second: Option<Second<'w>>,
}

/// A strip of a block of keys that starts at `start`, and the memory to prefetch while it is read.
#[derive(Clone, Copy)]
struct Strip {
    start: usize,
    strip: usize,
    prefetch: Prefetch,
}

/// The sums of a probe: r, u (then p u) of the current block, the sum of p u, and O weighted by u.
struct Second<'w> {
    r: &'w mut [f32],
    u: &'w mut [f32],
    o: &'w mut [f32],
    l: [f32; MAX_LANES],
}

fn part(
    cx: &Context<'_>,
    part: &Part,
    next: Option<&Part>,
    results: &mut [f32],
    rescale: Rescale,
    probe: Option<&Probe<'_>>,
) -> Counters {
    let on_unit = on_matrix_unit::part(cx, part, next, results, rescale, probe);
    on_unit.unwrap_or_else(|| on_vectors(cx, part, results, rescale, probe))
}

fn on_vectors(
    cx: &Context<'_>,
    part: &Part,
    results: &mut [f32],
    rescale: Rescale,
    probe: Option<&Probe<'_>>,
) -> Counters {
    let sequence = &cx.bound.sequences()[part.sequence];
    let rows = sequence.q_len * cx.pack;
    let heads = cx.problem.kv_heads();
    let sizes = [BLOCK * FEW, rows * cx.d_pad, rows * cx.dv_pad];
    let room = |sizes: &[usize]| sizes.iter().map(|&n| Arena::room(n)).sum::<usize>();
    let head_room = room(&sizes);
    let value_room = Arena::room(cx.dv_pad);
    let heads_room = heads * head_room * if probe.is_some() { 2 } else { 1 };
    with_workspace(heads_room + value_room, |workspace| {
        let mut arena = Arena::new(workspace);
        let q_rows = cx.query_layout(cx.bound.q().strides(), sequence);
        let dtype = cx.problem.dtype();
        let order = cx.kernels.pair_order(dtype, cx.d);
        let mut walk: Vec<Head<'_>> = (0..heads)
            .map(|h| {
                let tile = tile(cx, part.sequence, h);
                let [s, q, o] = sizes.map(|n| arena.take(n));
                let load = |cx: &Context<'_>, rows: &RowLayout, q: &mut [f32]| {
                    cx.gather(&tile, &cx.bound.q().data(), rows, cx.d, q, cx.d_pad);
                    for row in q.chunks_exact_mut(cx.d_pad) {
                        let natural = row.to_vec();
                        for (x, &i) in row.iter_mut().zip(&order) {
                            *x = natural[i] * cx.problem.scale();
                        }
                    }
                };
                load(cx, &q_rows, q);
                o.fill(0.0);
                let second = probe.map(|probe| {
                    let [u, r, o] = sizes.map(|n| arena.take(n));
                    load(probe.cx, &cx.query_layout(probe.cx.bound.q().strides(), sequence), r);
                    o.fill(0.0);
                    Second { r, u, o, l: [0.0; MAX_LANES] }
                });
                let (m, l) = ([f32::NEG_INFINITY; MAX_LANES], [0.0; MAX_LANES]);
                Head { tile, lanes: cx.lanes(&tile), step: None, seen: None, s, q, o, m, l, second }
            })
            .collect();
        let value = arena.take(cx.dv_pad);
        // Queries contain the scale here.
        let mut modifier = cx.modifier(1.0);
        let mut counters = Counters::default();
        let Range { start: first, end } = part.keys(sequence);
        let whole = sees_all(cx, part);
        for start in (first..end).step_by(BLOCK) {
            stop::poll();
            let piece = Piece { keys: start..(start + BLOCK).min(end), masked: true };
            // If every row sees every key, whole blocks need no new step.
            if !whole || start == first || piece.keys.len() < BLOCK {
                for head in &mut walk {
                    head.step = cx.step(&head.tile, &head.lanes, &piece, start);
                }
            }
            // The memory read after a strip: the next strip, and after the last keys the first values.
            let at = |strip: usize, h: usize, [first, second]: [(&TensorView<'_>, usize); 2], then: usize| {
                let ((view, n), key) =
                    if strip + STRIP < BLOCK { (first, start + strip + STRIP) } else { (second, then) };
                Strip { start, strip, prefetch: prefetch(cx, view, sequence, key, n, [h, heads]) }
            };
            let (k, v) = ((cx.bound.k(), cx.d), (cx.bound.v(), cx.dv));
            for strip in (0..BLOCK).step_by(STRIP) {
                for (h, head) in walk.iter_mut().enumerate() {
                    head.scores(cx, sequence, h, at(strip, h, [k, v], start));
                }
            }
            for head in &mut walk {
                head.softmax(cx, start, rescale, &mut counters, &mut modifier);
            }
            for strip in (0..BLOCK).step_by(STRIP) {
                for (h, head) in walk.iter_mut().enumerate() {
                    head.output(cx, sequence, h, at(strip, h, [v, k], start + BLOCK), value);
                }
            }
        }
        for (head, record) in walk.iter().zip(results.chunks_exact_mut(record(cx, sequence, probe))) {
            let (first, second) = record.split_at_mut(2 * FEW + rows * cx.dv);
            first[..FEW].copy_from_slice(&head.m[..FEW]);
            cx.exp.origins(&mut first[..FEW]);
            first[FEW..2 * FEW].copy_from_slice(&head.l[..FEW]);
            let write = |to: &mut [f32], from: &[f32]| {
                for (to, from) in to.chunks_exact_mut(cx.dv).zip(from.chunks_exact(cx.dv_pad)) {
                    to.copy_from_slice(&from[..cx.dv]);
                }
            };
            write(&mut first[2 * FEW..], head.o);
            if let Some(own) = &head.second {
                second[..FEW].copy_from_slice(&own.l[..FEW]);
                write(&mut second[FEW..], own.o);
            }
        }
        counters
    })
}

/// A head's share of the strip that starts at a key.
fn prefetch(
    cx: &Context<'_>,
    view: &TensorView<'_>,
    sequence: &Sequence,
    first: usize,
    n: usize,
    [head, heads]: [usize; 2],
) -> Prefetch {
    if first + STRIP > sequence.k_len {
        return Prefetch::NOTHING;
    }
    let rows = cx.key_layout(view.strides(), sequence);
    let strip = Strided { data: view.data(), offset: rows.at(first, head), row: rows.row };
    Share::ALL.of(&strip, [STRIP, n], [head, heads])
}

/// How far a score may exceed the maximum.
fn tau(exp: ExpKind, rescale: Rescale) -> f32 {
    match rescale {
        // The table begins at the running maximum.
        Rescale::Lazy(tau) if exp != ExpKind::SasOnline => tau,
        // Trusting a maximum saves nothing here: the time goes into reading.
        Rescale::Always | Rescale::Lazy(_) | Rescale::Optimistic(_) => 0.0,
    }
}

impl Head<'_> {
    /// Rescales earlier sums after the maximum was raised.
    fn rescale(&mut self, cx: &Context<'_>, stats: &SoftmaxStats, alpha: &[f32], counters: &mut Counters) {
        counters.rescales_possible += u64::from(stats.possible);
        counters.rescales_done += u64::from(stats.rescaled);
        if stats.rescaled > 0 {
            for o in [Some(&mut *self.o), self.second.as_mut().map(|own| &mut *own.o)].into_iter().flatten() {
                for (row, &factor) in o.chunks_exact_mut(cx.dv_pad).zip(alpha) {
                    row.iter_mut().for_each(|x| *x *= factor);
                }
            }
        }
    }

    /// The keys of a strip that this head sees.
    fn seen(&self, strip: usize) -> Range<usize> {
        let hull = self.step.as_ref().map_or(0..0, Step::hull);
        let (start, end) = (hull.start.max(strip), hull.end.min(strip + STRIP));
        start..end.max(start)
    }

    fn scores(
        &mut self,
        cx: &Context<'_>,
        sequence: &Sequence,
        kv_head: usize,
        Strip { start, strip, prefetch }: Strip,
    ) {
        let seen = self.seen(strip);
        let k = cx.bound.k();
        let rows = cx.key_layout(k.strides(), sequence);
        if seen.is_empty() {
            return;
        }
        let (stride, size) = (self.lanes.stride, [self.tile.rows, seen.len(), cx.d]);
        let keys = Strided { data: k.data(), offset: rows.at(start + seen.start, kv_head), row: rows.row };
        let s = &mut self.s[seen.start * stride..seen.end * stride];
        // Lanes past the last row hold values of the last block: clear them.
        s.fill(0.0);
        let (steps, own) = ([stride, cx.d_pad], (s, &*self.q));
        match &mut self.second {
            None => cx.kernels.dots(&mut [own], steps, &keys, size, prefetch),
            Some(second) => {
                let u = &mut second.u[seen.start * stride..seen.end * stride];
                u.fill(0.0);
                cx.kernels.dots(&mut [own, (u, &*second.r)], steps, &keys, size, prefetch);
            }
        }
    }

    fn softmax(
        &mut self,
        cx: &Context<'_>,
        start: usize,
        rescale: Rescale,
        counters: &mut Counters,
        modifier: &mut Modifier<'_>,
    ) {
        let Some(step) = &self.step else { return };
        let stride = self.lanes.stride;
        if step.rest || cx.problem.score_program().is_some() {
            cx.modify(modifier, (&self.tile, &self.lanes), (step, start), self.s, None);
        }
        let decided = !step.rest && cx.problem.score_program().is_none();
        let whole = decided && step.inner_of_all() == step.hull();
        let sizes = [stride, cx.kernels.lanes, self.tile.rows];
        self.seen = (!whole).then(|| Visible::new(step, sizes, self.s));
        let mut alpha = [1.0; MAX_LANES];
        let mut probe = self.second.as_mut().map(|own| LaneProbe { u: own.u, packed: &mut [], sums: &mut own.l });
        let stats = cx.kernels.softmax(
            &mut SoftmaxArgs {
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
                least: cx.least(),
                policy: Policy::Raise(tau(cx.exp, rescale)),
                scale: 1.0,
            },
            probe.as_mut(),
        );
        self.rescale(cx, &stats, &alpha, counters);
        let Some(step) = &self.step else { return };
        // If vectors see different keys, clear scores that were not computed.
        let width = cx.kernels.lanes;
        for (z, &(a, b)) in step.ranges[..stride / width].iter().enumerate() {
            for key in step.hull().filter(|key| !(a..b).contains(key)) {
                let lanes = key * stride + z * width..key * stride + (z + 1) * width;
                self.s[lanes.clone()].fill(0.0);
                if let Some(second) = &mut self.second {
                    second.u[lanes].fill(0.0);
                }
            }
        }
    }

    fn output(
        &mut self,
        cx: &Context<'_>,
        sequence: &Sequence,
        kv_head: usize,
        Strip { start, strip, prefetch }: Strip,
        value: &mut [f32],
    ) {
        let seen = self.seen(strip);
        if seen.is_empty() || self.add_visible(cx, start, &seen, value) {
            return;
        }
        let v = cx.bound.v();
        let rows = cx.key_layout(v.strides(), sequence);
        let (stride, size) = (self.lanes.stride, [self.tile.rows, seen.len(), cx.dv]);
        let p = &self.s[seen.start * stride..];
        let values = Strided { data: v.data(), offset: rows.at(start + seen.start, kv_head), row: rows.row };
        let (steps, own) = ([stride, cx.dv_pad], (&mut *self.o, p));
        match &mut self.second {
            None => cx.kernels.combine(&mut [own], steps, &values, size, prefetch),
            Some(second) => {
                let u = &second.u[seen.start * stride..];
                cx.kernels.combine(&mut [own, (&mut *second.o, u)], steps, &values, size, prefetch);
            }
        }
    }
}

impl Head<'_> {
    /// The cold path: if some value is not finite and some row does not see it, adds the keys of a strip row by row,
    /// and returns true.
    fn add_visible(&mut self, cx: &Context<'_>, start: usize, keys: &Range<usize>, value: &mut [f32]) -> bool {
        let Some(seen) = &self.seen else { return false };
        let (v, value, mut finite) = (cx.bound.v(), &mut value[..cx.dv], true);
        let own = || keys.clone().map(|key| start + key);
        cx.each_key(v, &self.tile, own(), value, |_, _, known| finite &= known);
        if finite {
            return false;
        }
        let order = cx.kernels.pair_order(cx.problem.dtype(), cx.dv);
        let (stride, rows, width) = (self.lanes.stride, self.tile.rows, cx.dv_pad);
        let mut sums = vec![(&mut *self.o, &*self.s)];
        sums.extend(self.second.as_mut().map(|second| (&mut *second.o, &*second.u)));
        cx.each_key(v, &self.tile, own(), value, |key, value, _| {
            let key = key - start;
            for (lane, _) in seen.lanes(key)[..rows].iter().enumerate().filter(|(_, seen)| **seen) {
                for (o, weights) in &mut sums {
                    let (o, weight) = (&mut o[lane * width..], weights[key * stride + lane]);
                    o.iter_mut().zip(&order).for_each(|(o, &i)| *o += weight * value[i]);
                }
            }
        });
        true
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
    let (o_rows, lse_rows) = (cx.query_layout(out.o_strides, s), cx.bound.lse_layout(out.lse_strides, s));
    let order = cx.kernels.pair_order(cx.problem.dtype(), cx.dv);
    let (mut o, mut weighted, mut natural) = (vec![0.0f32; cx.dv], vec![0.0f32; cx.dv], vec![0.0f32; cx.dv]);
    for lane in 0..tile.rows {
        let weights = Weights::new(all.iter().map(|part| Log::<Natural>::new(part[lane])));
        let row = |first: usize| all.iter().map(move |part| &part[first + lane * cx.dv..first + (lane + 1) * cx.dv]);
        let mut sum = weights.sum(all.iter().map(|part| part[FEW + lane]));
        weights.sum_rows(row(2 * FEW), &mut o);
        let top = weights.top().get();
        let (mut inverse, mut lse) = ([0.0], [0.0]);
        // A part with NaN scores has no maximum, and would be ignored.
        let nan = all.iter().any(|part| part[FEW + lane].is_nan());
        let top = if nan { f32::NAN } else { top };
        sum = if nan { f32::NAN } else { sum };
        crate::functions::finish(&[top], &[sum], &mut inverse, &mut lse);
        let (q, head) = cx.query_and_head(&tile, lane);
        let (mut factor, mut lse) = (inverse[0], lse[0]);
        if let Some(sink) = cx.bound.sink(head) {
            (factor, lse) = with_sink(factor, lse, sink);
        }
        o.iter_mut().for_each(|x| *x = if top == f32::NEG_INFINITY { 0.0 } else { *x * factor });
        if let Some(probe) = probe {
            let second = 2 * FEW + tile.rows * cx.dv;
            let mean = weights.sum(all.iter().map(|part| part[second + lane])) * factor;
            weights.sum_rows(row(second + FEW), &mut weighted);
            o.iter_mut().zip(&weighted).for_each(|(o, w)| *o = *o * (1.0 + mean) - w * factor);
            let rows = cx.bound.lse_layout(probe.mean_strides, s);
            // SAFETY: every (sequence, head, query) is merged once.
            unsafe { probe.mean.store(cx.kernels, rows.at(q, head), &[mean]) };
        }
        order.iter().zip(&o).for_each(|(&i, &x)| natural[i] = x);
        // SAFETY: every (sequence, head, query) is merged once.
        unsafe {
            out.o.store(cx.kernels, o_rows.at(q, head), &natural);
            out.lse.store(cx.kernels, lse_rows.at(q, head), &[lse]);
        }
    }
}
