//! Splits long sequences with few heads into segments that threads compute in parallel.
//!
//! The state after a segment is `h + M S`, where S is the state before it, h the result of a zero start, and M the
//! product of its chunks' maps. If gates decay enough, M is practically zero and h comes from the segment's last chunks
//! alone (its warm-up). Otherwise M is computed along with h, exactly: M is the state of a sequence without values that
//! starts with the identity. The splits depend on the sequence alone.

use super::chunk::{CHUNK, Need};
use super::pass::Pass;
use super::{Context, DeltaCounters, DeltaSegments, PACE, ValueHead};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::pool;
use crate::simd::{Ahead, Matrix, MatrixKernels, MatrixMut, Sum};
use fulgurite_core::DType;
use fulgurite_core::gated_delta::Tokens;
use fulgurite_core::stop;
use std::ops::Range;

/// With more value heads there is work for every thread without splitting.
pub(super) const FEW_HEADS: usize = 8;
/// Replaces a GPU's SM count in FlashQLA's rule for the length of a segment; fixed, so that bits do not depend on the
/// machine.
const UNITS: f64 = 8.0;
/// Number of chunks below which a sequence is not split.
pub(super) const LEAST: usize = 16;

/// A run of chunks.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    pub number: usize,
    pub chunks: Range<usize>,
}

/// How the state after a segment is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From this many last chunks.
    WarmUp(usize),
    /// From all chunks, with the true start (the first segment).
    Whole,
    /// From all chunks, with the map.
    Exact,
}

/// The splits of one sequence.
pub(super) struct Segmentation {
    pub segments: Vec<Segment>,
    /// The way for each segment but the last, and each value head.
    ways: Vec<Way>,
}

impl Segmentation {
    pub fn new(cx: &Context<'_>, s: &Tokens, how: DeltaSegments) -> Segmentation {
        let (chunks, heads) = (s.len.div_ceil(CHUNK), cx.problem.value_heads());
        let whole = || Segmentation { segments: vec![Segment { number: 0, chunks: 0..chunks }], ways: vec![] };
        if how == DeltaSegments::Whole || heads > FEW_HEADS || chunks < LEAST {
            return whole();
        }
        let wanted = 3.0 * ((heads * chunks) as f64 / UNITS).sqrt();
        let len = (wanted.log2().round().exp2() as usize).max(4);
        let starts = (0..chunks).step_by(len).enumerate();
        let segments: Vec<Segment> =
            starts.map(|(number, start)| Segment { number, chunks: start..(start + len).min(chunks) }).collect();
        let inner = &segments[..segments.len() - 1];
        let ways = inner.iter().flat_map(|seg| (0..heads).map(|h| way(cx, s, seg, h, how))).collect();
        Segmentation { segments, ways }
    }

    /// Offset of a segment's start among the starts of its sequence; `None` for the first.
    pub fn start_at(&self, cx: &Context<'_>, segment: &Segment, head: usize) -> Option<usize> {
        let before = segment.number.checked_sub(1)?;
        Some((before * cx.problem.value_heads() + head) * cx.state_len())
    }

    pub fn count(&self, cx: &Context<'_>, counters: &mut DeltaCounters) {
        counters.segments += (self.segments.len() * cx.problem.value_heads()) as u64;
        for (i, way) in self.ways.iter().enumerate() {
            let len = self.segments[i / cx.problem.value_heads()].chunks.len() as u64;
            match way {
                Way::WarmUp(n) => {
                    counters.warmed_up += 1;
                    counters.extra_chunks += *n as u64;
                }
                Way::Whole => counters.extra_chunks += len,
                Way::Exact => counters.extra_chunks += 2 * len,
            }
        }
    }
}

/// Goes back from the end of a segment until the gates have forgotten everything before.
fn way(cx: &Context<'_>, s: &Tokens, segment: &Segment, head: usize, how: DeltaSegments) -> Way {
    let enough = if cx.problem.dtype() == DType::F32 { -17.0 } else { -10.0 };
    let mut sum = 0.0f64;
    if how != DeltaSegments::Exact {
        for (n, chunk) in segment.chunks.clone().rev().enumerate() {
            let tokens = chunk * CHUNK..((chunk + 1) * CHUNK).min(s.len);
            sum += tokens.map(|t| f64::from(cx.bound.g()[cx.bound.gate(s, t, head)])).sum::<f64>();
            if sum < enough {
                return Way::WarmUp(n + 1);
            }
        }
    }
    if segment.number == 0 { Way::Whole } else { Way::Exact }
}

/// The initial states of segments, except the first of each sequence: `[segment - 1][head][state]`.
pub(super) fn starts(cx: &Context<'_>, plans: &[Segmentation], threads: usize) -> Vec<Vec<f32>> {
    let (heads, size) = (cx.problem.value_heads(), cx.state_len());
    let mut all = Vec::with_capacity(plans.len());
    for (plan, s) in plans.iter().zip(cx.bound.sequences()) {
        let mut states: Vec<f32> = stop::zeros("states of segments", plan.ways.len() * size);
        // Maps, for the segments that need one.
        let mut places = Vec::with_capacity(plan.ways.len());
        let mut room = 0;
        for way in &plan.ways {
            places.push(room);
            room += if *way == Way::Exact { cx.kp * cx.kp } else { 0 };
        }
        let mut maps: Vec<f32> = stop::zeros("maps of segments", room);
        {
            let (states, maps) = (SharedRows::over(&mut states), SharedRows::over(&mut maps));
            pool::run(threads, plan.ways.len(), &|i| {
                let at = ValueHead { sequence: s, head: i % heads };
                let map = if plan.ways[i] == Way::Exact { cx.kp * cx.kp } else { 0 };
                // SAFETY: each segment and head has its own room.
                let (state, map) = unsafe { (states.row(i * size, size), maps.row(places[i], map)) };
                end_of(cx, &at, &plan.segments[i / heads], plan.ways[i], state, map);
            });
        }
        // S of the next segment = h + M S, one after the other.
        for i in heads..plan.ways.len() {
            if plan.ways[i] == Way::Exact {
                let (before, own) = states.split_at_mut(i * size);
                let start = Matrix::new(&before[(i - heads) * size..], cx.vs);
                let map = Matrix::new(&maps[places[i]..], cx.kp);
                let to = MatrixMut::at(own, cx.vs, 0, 0);
                cx.kernels.gemm(to, map, start, [cx.kd, cx.vp, cx.kd], Sum::Onto, &mut Ahead::default());
            }
        }
        all.push(states);
    }
    all
}

/// Computes the state after a segment, and its map if needed.
fn end_of(cx: &Context<'_>, at: &ValueHead<'_>, segment: &Segment, way: Way, state: &mut [f32], map: &mut [f32]) {
    let width = if way == Way::Exact { cx.vp + cx.kp } else { cx.vp };
    let stride = cx.stride(width);
    let room = Pass::room(cx, width) + Arena::room(cx.kp * stride);
    with_workspace(room, |workspace| {
        let mut arena = Arena::new(workspace);
        let mut pass = Pass::new(cx, &mut arena, width);
        let both = arena.take(cx.kp * stride);
        let _held = cx.matrix.map(MatrixKernels::hold);
        let begin = if way == Way::Whole { cx.bound.initial_state() } else { None };
        cx.load_state(at.sequence.number, at.head, begin, both, stride);
        if way == Way::Exact {
            (0..cx.kd).for_each(|i| both[i * stride + cx.vp + i] = 1.0);
        }
        let chunks = match way {
            Way::WarmUp(n) => segment.chunks.end - n..segment.chunks.end,
            Way::Whole | Way::Exact => segment.chunks.clone(),
        };
        for chunk in chunks {
            stop::poll();
            *pass.ahead() = Ahead::paced(PACE);
            cx.prefetch(pass.ahead(), at, (chunk + 1) * CHUNK, Need::State, true);
            pass.load(cx, at.sequence, at.head / cx.problem.group(), chunk * CHUNK, false);
            pass.chunk(cx, at, chunk * CHUNK, both, None);
        }
        for (i, row) in both.chunks_exact(stride).enumerate() {
            state[i * cx.vs..i * cx.vs + cx.vp].copy_from_slice(&row[..cx.vp]);
            if way == Way::Exact {
                map[i * cx.kp..(i + 1) * cx.kp].copy_from_slice(&row[cx.vp..width]);
            }
        }
    });
}
