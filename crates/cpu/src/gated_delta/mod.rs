//! The gated delta rule on the CPU: recurrent (token by token) and chunked (matrix products).
//!
//! Both keep the state in f32. The chunked form is FlashQLA's: with D = diag(e^g) the gated system of a chunk is D (1 +
//! L) D^-1, so its inverse is that of the ungated system times the decays between rows, and gates need only one
//! exponential per token.

mod backward;
mod chunk;
mod partial;
mod pass;
mod recurrent;
mod segments;
mod tiled;

use crate::memory::{Arena, SharedRows, with_workspace};
use crate::simd::{Ahead, Kernels, MatrixKernels, Stage};
use crate::{Options, pool};
use chunk::CHUNK;
use fulgurite_core::gated_delta::{
    DeltaBound, DeltaGradientOutputs, DeltaOutputs, DeltaSaved, GatedDelta, L2_EPS, QkNorm, Tokens,
};
use fulgurite_core::{RowLayout, TensorView, stop};
use pass::Pass;
use segments::{Segment, Segmentation};

/// The form of the computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeltaForm {
    /// Chunks of 64 tokens with matrix products, for prefill and training.
    #[default]
    Chunked,
    /// Token by token, for decoding.
    Recurrent,
}

/// How long sequences with few heads are split, to be computed by several threads. The choice depends only on the
/// sequence and the problem, so results do not depend on the number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeltaSegments {
    /// Split by length and number of heads.
    #[default]
    Auto,
    /// Do not split.
    Whole,
    /// Like [`Auto`](Self::Auto), but states between segments are computed exactly, however strong the decay is.
    Exact,
}

/// Counters of a forward call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeltaCounters {
    /// Segments of sequences and heads that were computed separately.
    pub segments: u64,
    /// Segments whose start was found from a few chunks before them, because the gates had forgotten the rest.
    pub warmed_up: u64,
    /// Extra chunks computed to find starts.
    pub extra_chunks: u64,
}

/// Elements of states that an item keeps in the L2 cache.
const ITEM_ELEMENTS: usize = 256 * 1024;

/// Rows prefetched during each block of a product: those of k, q, v and o of a chunk of few tiles.
const PACE: usize = 6;

pub(crate) struct Context<'a> {
    pub bound: &'a DeltaBound<'a>,
    pub problem: &'a GatedDelta,
    pub kernels: &'static Kernels,
    /// The matrix unit, if there is one.
    pub matrix: Option<&'static MatrixKernels>,
    pub kd: usize,
    /// First column of values, and their number: all of them but where gradients are split by columns.
    pub column: usize,
    pub vd: usize,
    /// Key dimension rounded up to whole vectors.
    pub kp: usize,
    pub vp: usize,
    /// Distance between rows of values.
    pub vs: usize,
}

/// Distance between rows: rows a power of two apart would share a few sets of the L1 cache.
fn stride(width: usize, lanes: usize) -> usize {
    if width.is_multiple_of(64) { width + lanes } else { width }
}

impl<'a> Context<'a> {
    fn new(bound: &'a DeltaBound<'a>, options: &Options) -> Self {
        let (problem, kernels) = (bound.problem(), options.kernels());
        let (kd, vd) = (problem.key_dim(), problem.value_dim());
        Context {
            bound,
            problem,
            kernels,
            matrix: kernels.matrix,
            kd,
            column: 0,
            vd,
            kp: kd.next_multiple_of(kernels.lanes),
            vp: vd.next_multiple_of(kernels.lanes),
            vs: stride(vd.next_multiple_of(kernels.lanes), kernels.lanes),
        }
    }

    /// Distance between rows of `width` columns.
    fn stride(&self, width: usize) -> usize {
        stride(width, self.kernels.lanes)
    }

    /// Elements of a state, `[key_dim][vs]`.
    fn state_len(&self) -> usize {
        self.kp * self.vs
    }

    /// Loads the initial state of a sequence and value head.
    fn load_state(&self, sequence: usize, head: usize, view: Option<&TensorView<'_>>, to: &mut [f32], width: usize) {
        to.fill(0.0);
        if let Some(view) = view {
            let strides = view.strides();
            for i in 0..self.kd {
                let at = sequence * strides[0] + head * strides[1] + i * strides[2];
                for j in 0..self.vd {
                    to[i * width + j] = view.at(at + (self.column + j) * strides[3]) as f32;
                }
            }
        }
    }

    /// Loads rows of q or k of a key head as f32 `[row][kp]`, normalised if the problem says so; rows past the tokens
    /// are zero. Returns 1 / length of each row.
    fn load_keys(&self, view: &TensorView<'_>, s: &Tokens, head: usize, first: usize, to: &mut [f32]) -> Vec<f32> {
        let rows = self.bound.row_layout(view.strides(), s);
        let used = (s.len - first).min(to.len() / self.kp);
        for (i, row) in to.chunks_exact_mut(self.kp).enumerate() {
            let n = if i < used { self.kd } else { 0 };
            if n > 0 {
                self.kernels.widen(&view.data(), rows.at(first + i, head), &mut row[..n]);
            }
            row[n..].fill(0.0);
        }
        if self.problem.qk_norm() != QkNorm::Inside {
            return Vec::new();
        }
        let mut inverse = vec![0.0; used];
        let stage = Stage::Normalise { x: to, inverse: &mut inverse, eps: L2_EPS as f32, width: self.kp };
        self.kernels.stage(stage);
        inverse
    }

    /// Prefetches the rows of v of a chunk, and those of k (and q for outputs) if `keys` says that they are new.
    fn prefetch(&self, ahead: &mut Ahead, at: &ValueHead<'_>, first: usize, need: chunk::Need, keys: bool) {
        if first >= at.sequence.len {
            return;
        }
        let n = CHUNK.min(at.sequence.len - first);
        let mut prefetch = |view: &TensorView<'_>, head: usize, column: usize, width: usize| {
            let rows = self.bound.row_layout(view.strides(), at.sequence);
            ahead.push_rows(&view.data(), rows.at(first, head) + column, rows.row, width, n);
        };
        let key_head = at.head / self.problem.group();
        if keys {
            prefetch(self.bound.k(), key_head, 0, self.kd);
        }
        if keys && need == chunk::Need::Outputs {
            prefetch(self.bound.q(), key_head, 0, self.kd);
        }
        prefetch(self.bound.v(), at.head, self.column, self.vd);
    }

    /// Loads rows of v or d_o of a value head as f32 `[row][width]`; rows past the tokens are zero. Columns past the
    /// values stay as they are.
    fn load_values(
        &self,
        data: &TensorView<'_>,
        rows: &RowLayout,
        at: &ValueHead<'_>,
        first: usize,
        to: &mut [f32],
        width: usize,
    ) {
        for (i, row) in to.chunks_exact_mut(width).enumerate() {
            if first + i < at.sequence.len {
                self.kernels.widen(&data.data(), rows.at(first + i, at.head) + self.column, &mut row[..self.vd]);
            } else {
                row.fill(0.0);
            }
        }
    }
}

/// A value head of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct ValueHead<'a> {
    pub sequence: &'a Tokens,
    pub head: usize,
}

/// The outputs of forward.
pub(crate) struct Out<'a> {
    o: SharedRows<'a>,
    o_strides: &'a [usize],
    state: Option<(SharedRows<'a>, &'a [usize])>,
}

impl Out<'_> {
    /// Writes the rows of a chunk.
    fn store_rows(&self, cx: &Context<'_>, at: &ValueHead<'_>, first: usize, from: &[f32], width: usize) {
        let rows = cx.bound.row_layout(self.o_strides, at.sequence);
        let n = (at.sequence.len - first).min(CHUNK);
        for (i, row) in from.chunks_exact(width).take(n).enumerate() {
            // SAFETY: every token of a value head is written by one item.
            unsafe { self.o.store(cx.kernels, rows.at(first + i, at.head), &row[..cx.vd]) };
        }
    }

    /// Writes a final state.
    fn state(&self, cx: &Context<'_>, at: &ValueHead<'_>, from: &[f32], width: usize) {
        if let Some((to, strides)) = &self.state {
            for i in 0..cx.kd {
                let offset = at.sequence.number * strides[0] + at.head * strides[1] + i * strides[2];
                // SAFETY: every state is written by the item that holds its sequence's last token.
                unsafe { to.store(cx.kernels, offset, &from[i * width..i * width + cx.vd]) };
            }
        }
    }
}

/// Computes the gated delta rule into `outputs`, which must fit the problem ([`DeltaOutputs::check`]).
pub fn gated_delta_forward(
    bound: &DeltaBound<'_>,
    outputs: &mut DeltaOutputs<'_>,
    form: DeltaForm,
    segments: DeltaSegments,
    options: &Options,
) -> DeltaCounters {
    let cx = Context::new(bound, options);
    if !bound.all_tokens_used() {
        outputs.o.fill(0.0);
    }
    let o_strides = *outputs.o.strides();
    let state_strides = outputs.final_state.as_ref().map(|s| *s.strides());
    let state = outputs.final_state.as_mut().zip(state_strides.as_ref());
    let out = Out {
        o: SharedRows::new(&mut outputs.o),
        o_strides: &o_strides,
        state: state.map(|(view, strides)| (SharedRows::new(view), &**strides)),
    };
    match form {
        DeltaForm::Recurrent => {
            recurrent::run(&cx, &out, options.threads());
            DeltaCounters::default()
        }
        DeltaForm::Chunked => chunked(&cx, &out, segments, options.threads()),
    }
}

/// Computes gradients of the gated delta rule into `gradients`. `saved` and `gradients` must fit the problem.
pub fn gated_delta_backward(
    bound: &DeltaBound<'_>,
    saved: &DeltaSaved<'_>,
    gradients: &mut DeltaGradientOutputs<'_>,
    options: &Options,
) {
    backward::run(&Context::new(bound, options), saved, gradients, options.threads());
}

/// Value heads over one segment.
struct Item<'p> {
    sequence: usize,
    heads: std::ops::Range<usize>,
    segment: &'p Segment,
}

fn chunked(cx: &Context<'_>, out: &Out<'_>, how: DeltaSegments, threads: usize) -> DeltaCounters {
    let plans: Vec<Segmentation> = cx.bound.sequences().iter().map(|s| Segmentation::new(cx, s, how)).collect();
    let starts: Vec<Vec<f32>> = segments::starts(cx, &plans, threads);
    // The number of value heads per item changes no bits. Neighbouring heads are adjacent in memory, and their states
    // share the L2 cache and page-table entries, but there must be enough items that the threads finish together.
    let heads = cx.problem.value_heads();
    let segments: usize = plans.iter().map(|plan| plan.segments.len()).sum();
    let most = (ITEM_ELEMENTS / cx.state_len()).max(1);
    let run = (heads * segments / (2 * threads)).clamp(1, most.min(heads));
    let mut items = Vec::new();
    for (sequence, plan) in plans.iter().enumerate() {
        for segment in &plan.segments {
            for head in (0..heads).step_by(run) {
                items.push(Item { sequence, heads: head..(head + run).min(heads), segment });
            }
        }
    }
    pool::run(threads, items.len(), &|i| {
        item(cx, &items[i], &plans[items[i].sequence], &starts[items[i].sequence], out);
        cx.kernels.fence();
    });
    let mut counters = DeltaCounters::default();
    plans.iter().for_each(|plan| plan.count(cx, &mut counters));
    counters
}

fn item(cx: &Context<'_>, item: &Item<'_>, plan: &Segmentation, starts: &[f32], out: &Out<'_>) {
    let s = &cx.bound.sequences()[item.sequence];
    let size = cx.state_len();
    let n = item.heads.len();
    let room = Pass::room(cx, cx.vp) + n * Arena::room(size);
    with_workspace(room, |workspace| {
        let mut arena = Arena::new(workspace);
        let mut pass = Pass::new(cx, &mut arena, cx.vp);
        let _held = cx.matrix.map(MatrixKernels::hold);
        let mut states: Vec<&mut [f32]> = (0..n).map(|_| arena.take(size)).collect();
        for (state, head) in states.iter_mut().zip(item.heads.clone()) {
            match plan.start_at(cx, item.segment, head) {
                Some(at) => state.copy_from_slice(&starts[at..at + size]),
                None => cx.load_state(s.number, head, cx.bound.initial_state(), state, cx.vs),
            }
        }
        for chunk in item.segment.chunks.clone() {
            stop::poll();
            let first = chunk * CHUNK;
            let mut loaded = None;
            for (state, head) in states.iter_mut().zip(item.heads.clone()) {
                let key_head = head / cx.problem.group();
                let at = ValueHead { sequence: s, head };
                // Prefetch the outputs of this chunk, unless they bypass the caches, then the inputs of the next one.
                let ahead = pass.ahead();
                *ahead = Ahead::paced(PACE);
                if !out.o.is_large() {
                    let rows = cx.bound.row_layout(out.o_strides, s);
                    out.o.prefetch(ahead, rows.at(first, head), rows.row, cx.vd, CHUNK.min(s.len - first));
                }
                if head + 1 < item.heads.end {
                    let new = (head + 1) / cx.problem.group() != key_head;
                    cx.prefetch(ahead, &ValueHead { head: head + 1, ..at }, first, chunk::Need::Outputs, new);
                } else {
                    let next = ValueHead { head: item.heads.start, ..at };
                    cx.prefetch(ahead, &next, first + CHUNK, chunk::Need::Outputs, true);
                }
                if loaded.replace(key_head) != Some(key_head) {
                    pass.load(cx, s, key_head, first, true);
                }
                pass.chunk(cx, &at, first, state, Some(out));
            }
        }
        if item.segment.chunks.end == s.len.div_ceil(CHUNK) {
            for (state, head) in states.iter().zip(item.heads.clone()) {
                out.state(cx, &ValueHead { sequence: s, head }, state, cx.vs);
            }
        }
    });
}
