//! Backward of the chunked form, on vectors in f32.
//!
//! An item owns a key head of a sequence. It processes its value heads two at a time: forward once, to find the
//! state before every chunk (memory proportional to the sequence), then backward. Letters as in [`super::chunk`]; dS is
//! the gradient of the state after the chunk, Pg = scale G (Q K^T). X is kept in `scaled`, and scale e dO overwrites dW.
//!
//! ```text
//! dV' = t (K dS) + Pg^T dO      dW = Ag^T dV' = dV      X = -e dW      dAg = dV' W^T      dPg = dO V'^T
//! Y = t (V' dS^T)               dK = Y + X S^T          dQ = scale e (dO S^T)
//! dS <- e_last dS + K^T X + Q^T (scale e dO)            dP = scale G dPg: dQ += dP K, dK += dP^T Q
//! dAb = G dAg                   dL = -strictly lower(A^T (dAb diag(beta)) A^T)    B = diag(beta) dL: dK += (B + B^T) K
//! ```

use super::chunk::{CHUNK, ChunkData, Gates, Lower, Need, Shared, clear_above, product, product_transposed};
use super::partial::{self, Partial};
use super::{Context, PACE, ValueHead};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::pool;
use crate::simd::{Ahead, Matrix, MatrixMut, Stage, Sum};
use fulgurite_core::gated_delta::{DeltaGradientOutputs, DeltaSaved, Tokens};
use fulgurite_core::{stop, sums};
use std::ops::Range;
use std::sync::Mutex;

const SQUARE: usize = CHUNK * CHUNK;
/// Value heads that go through the chunks together: they share the products of keys and queries.
const TOGETHER: usize = 2;
/// Largest key dimension for which dS goes back token by token.
const FEW: usize = 8;

pub(super) fn run(cx: &Context<'_>, saved: &DeltaSaved<'_>, gradients: &mut DeltaGradientOutputs<'_>, threads: usize) {
    // f32 products only: gradients are small differences of large numbers.
    let cx = &Context { matrix: None, ..*cx };
    let d_o = if saved.d_o.strides().last() == Some(&1) { None } else { Some(saved.d_o.to_tensor()) };
    let d_o = d_o.as_ref().map_or(saved.d_o, |dense| dense.view());
    if !cx.bound.all_tokens_used() {
        gradients.d_q.fill(0.0);
        gradients.d_k.fill(0.0);
        gradients.d_v.fill(0.0);
        gradients.d_g.fill(0.0);
        gradients.d_beta.fill(0.0);
    }
    let strides = [*gradients.d_q.strides(), *gradients.d_k.strides(), *gradients.d_v.strides()];
    let gate_strides = [*gradients.d_g.strides(), *gradients.d_beta.strides()];
    let state_strides = *gradients.d_initial_state.strides();
    let out = Out {
        d_q: (SharedRows::new(&mut gradients.d_q), &strides[0]),
        d_k: (SharedRows::new(&mut gradients.d_k), &strides[1]),
        d_v: (SharedRows::new(&mut gradients.d_v), &strides[2]),
        d_g: (SharedRows::new(&mut gradients.d_g), &gate_strides[0]),
        d_beta: (SharedRows::new(&mut gradients.d_beta), &gate_strides[1]),
        d_state: (SharedRows::new(&mut gradients.d_initial_state), &state_strides),
    };
    let given = DeltaSaved { d_o, d_final_state: saved.d_final_state };
    let (sequences, heads) = (cx.bound.sequences(), cx.problem.heads());
    let mut items = Vec::new();
    for (sequence, key_head) in (0..sequences.len()).flat_map(|s| (0..heads).map(move |h| (s, h))) {
        let parts = partial::parts(cx, &sequences[sequence]);
        items.extend((0..parts).map(|part| (sequence, key_head, part, parts)));
    }
    let partials: Vec<Mutex<Option<Partial>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let slot = |i: usize| partials[i].lock().unwrap_or_else(|e| e.into_inner());
    pool::run(threads, items.len(), &|i| {
        let (sequence, key_head, part, parts) = items[i];
        let s = &sequences[sequence];
        let partial = item(&partial::part(cx, part, parts), s, key_head, &given, &out);
        match parts {
            1 => partial.store(cx, s, key_head, &out),
            _ => *slot(i) = Some(partial),
        }
        cx.kernels.fence();
    });
    let firsts: Vec<usize> = (0..items.len()).filter(|&i| items[i].2 == 0 && items[i].3 > 1).collect();
    pool::run(threads, firsts.len(), &|i| {
        let (sequence, key_head, _, parts) = items[firsts[i]];
        let mut all =
            (firsts[i]..firsts[i] + parts).map(|i| slot(i).take().expect("bug in fulgurite: a part is missing"));
        let mut sum = all.next().expect("bug in fulgurite: a key head without parts");
        all.for_each(|partial| sum.add(&partial));
        sum.store(cx, &sequences[sequence], key_head, &out);
        cx.kernels.fence();
    });
}

pub(super) type To<'a> = (SharedRows<'a>, &'a [usize]);

pub(super) struct Out<'a> {
    pub d_q: To<'a>,
    pub d_k: To<'a>,
    d_v: To<'a>,
    pub d_g: To<'a>,
    pub d_beta: To<'a>,
    d_state: To<'a>,
}

/// Scratch of one chunk, in whole matrices.
struct Workspace<'w> {
    d_o: &'w mut [f32],
    d_vn: &'w mut [f32],
    d_w: &'w mut [f32],
    /// Rows of values times their factors, and matrices turned to `[width][token]` or `[width][key_dim]`.
    scaled: &'w mut [f32],
    turned: &'w mut [f32],
    state_turned: &'w mut [f32],
    d_q: &'w mut [f32],
    d_k: &'w mut [f32],
    rows: &'w mut [f32],
    pg: &'w mut [f32],
    d_ag: &'w mut [f32],
    square: &'w mut [f32],
    other: &'w mut [f32],
}

impl<'w> Workspace<'w> {
    fn sizes(cx: &Context<'_>) -> [usize; 13] {
        let (values, keys) = (CHUNK * cx.vs, CHUNK * cx.kp);
        let state = cx.kp * cx.vs;
        [values, values, values, values, values, state, keys, keys, keys, SQUARE, SQUARE, SQUARE, SQUARE]
    }
    fn new(cx: &Context<'_>, arena: &mut Arena<'w>) -> Self {
        let [d_o, d_vn, d_w, scaled, turned, state_turned, d_q, d_k, rows, pg, d_ag, square, other] =
            Self::sizes(cx).map(|n| arena.take(n));
        [&mut *d_o, &mut *d_vn, &mut *d_w, &mut *scaled].into_iter().for_each(|x| x.fill(0.0));
        Workspace { d_o, d_vn, d_w, scaled, turned, state_turned, d_q, d_k, rows, pg, d_ag, square, other }
    }
}

/// A key head of a sequence, on the way through its value heads.
struct KeyHead<'a, 'w> {
    cx: &'a Context<'a>,
    sequence: &'a Tokens,
    key_head: usize,
    shared: Shared<'w>,
    work: ChunkData<'w>,
    workspace: Workspace<'w>,
    /// For each of the value heads that go together, a state, or its gradient.
    states: Vec<&'w mut [f32]>,
}

impl KeyHead<'_, '_> {
    /// Goes forward through the chunks with some value heads, and keeps the state before each: `[chunk][head]`.
    fn forward(&mut self, heads: &Range<usize>, kept: &mut [f32]) {
        let KeyHead { cx, sequence: s, key_head, shared, work, states, .. } = self;
        for (state, head) in states.iter_mut().zip(heads.clone()) {
            cx.load_state(s.number, head, cx.bound.initial_state(), state, cx.vs);
        }
        let size = cx.state_len();
        let last = s.len.div_ceil(CHUNK).saturating_sub(1);
        for (chunk, kept) in kept.chunks_exact_mut(heads.len() * size).enumerate() {
            stop::poll();
            for (i, head) in heads.clone().enumerate() {
                kept[i * size..(i + 1) * size].copy_from_slice(states[i]);
                if chunk == last {
                    continue;
                }
                let at = ValueHead { sequence: s, head };
                work.ahead = Ahead::paced(PACE);
                let next = if i + 1 < heads.len() { (head + 1, chunk) } else { (heads.start, chunk + 1) };
                let new = next.1 > chunk;
                cx.prefetch(&mut work.ahead, &ValueHead { head: next.0, ..at }, next.1 * CHUNK, Need::State, new);
                if i == 0 {
                    shared.load(cx, s, *key_head, chunk * CHUNK, Need::State, &mut work.ahead);
                }
                work.chunk(cx, shared, &at, chunk * CHUNK, states[i], Need::State);
            }
        }
    }

    /// Goes back through the chunks with the states of [`forward`](Self::forward), and adds to the gradients of q, k and the gates.
    fn backward(
        &mut self,
        heads: &Range<usize>,
        kept: &mut [f32],
        sums: &mut Partial,
        saved: &DeltaSaved<'_>,
        out: &Out<'_>,
    ) {
        let KeyHead { cx, sequence: s, key_head, shared, work, workspace, states } = self;
        for (state, head) in states.iter_mut().zip(heads.clone()) {
            cx.load_state(s.number, head, saved.d_final_state.as_ref(), state, cx.vs);
        }
        let size = cx.state_len();
        for (chunk, kept) in kept.chunks_exact_mut(heads.len() * size).enumerate().rev() {
            stop::poll();
            let first = chunk * CHUNK;
            for (i, head) in heads.clone().enumerate() {
                let at = ValueHead { sequence: s, head };
                work.ahead = Ahead::paced(PACE);
                let last = i + 1 == heads.len();
                let next = if last { (heads.start, chunk.checked_sub(1)) } else { (head + 1, Some(chunk)) };
                ask(cx, saved, out, &at, first, next, &mut work.ahead);
                if i == 0 {
                    shared.load(cx, s, *key_head, first, Need::Outputs, &mut work.ahead);
                }
                let states = States { before: &mut kept[i * size..(i + 1) * size], gradient: states[i] };
                let gates = HeadPass { cx, at: &at, saved, out }.back(shared, work, first, states, workspace);
                let own = first * cx.kp..(first + CHUNK) * cx.kp;
                sums.d_q[own.clone()].iter_mut().zip(&*workspace.d_q).for_each(|(sum, x)| *sum += x);
                sums.d_k[own].iter_mut().zip(&*workspace.d_k).for_each(|(sum, x)| *sum += x);
                let tokens = (head - *key_head * cx.problem.group()) * s.len.next_multiple_of(CHUNK) + first;
                sums.d_g[tokens..tokens + CHUNK].copy_from_slice(&gates.0);
                sums.d_beta[tokens..tokens + CHUNK].copy_from_slice(&gates.1);
            }
        }
        for (state, head) in states.iter().zip(heads.clone()) {
            for i in 0..cx.kd {
                let (to, strides) = &out.d_state;
                let offset = s.number * strides[0] + head * strides[1] + i * strides[2] + cx.column;
                // SAFETY: each column of a state belongs to one item.
                unsafe { to.store(cx.kernels, offset, &state[i * cx.vs..i * cx.vs + cx.vd]) };
            }
        }
    }
}

/// Prefetches the rows that the next chunk reads, of a value head at a chunk if there is one, then those that this one
/// writes: there is room for four kinds of rows.
fn ask(
    cx: &Context<'_>,
    saved: &DeltaSaved<'_>,
    out: &Out<'_>,
    at: &ValueHead<'_>,
    first: usize,
    (head, chunk): (usize, Option<usize>),
    ahead: &mut Ahead,
) {
    let s = at.sequence;
    if let Some(chunk) = chunk {
        let next = chunk * CHUNK;
        let rows = cx.bound.row_layout(saved.d_o.strides(), s);
        let start = rows.at(next, head) + cx.column;
        ahead.push_rows(&saved.d_o.data(), start, rows.row, cx.vd, CHUNK.min(s.len - next));
        cx.prefetch(ahead, &ValueHead { head, ..*at }, next, Need::Outputs, next < first);
    }
    let (d_v, strides) = &out.d_v;
    if !d_v.is_large() {
        let rows = cx.bound.row_layout(strides, s);
        d_v.prefetch(ahead, rows.at(first, at.head) + cx.column, rows.row, cx.vd, CHUNK.min(s.len - first));
    }
}

/// Goes through a key head, or its columns of values. What belongs to these columns is stored, the rest returned.
fn item(cx: &Context<'_>, s: &Tokens, key_head: usize, saved: &DeltaSaved<'_>, out: &Out<'_>) -> Partial {
    let (chunks, group) = (s.len.div_ceil(CHUNK), cx.problem.group());
    let (size, together) = (cx.state_len(), group.min(TOGETHER));
    let mut kept: Vec<f32> = stop::zeros("states of chunks", chunks * size * together);
    let mut sums = Partial::new(cx, s);
    let workspace_elems: usize = Workspace::sizes(cx).into_iter().map(Arena::room).sum();
    let states = together * Arena::room(size);
    let room = Shared::room(cx) + ChunkData::room(cx, cx.vp) + states + workspace_elems;
    with_workspace(room, |workspace| {
        let mut arena = Arena::new(workspace);
        let mut own = KeyHead {
            cx,
            sequence: s,
            key_head,
            shared: Shared::new(cx, &mut arena),
            work: ChunkData::new(cx, &mut arena, cx.vp),
            workspace: Workspace::new(cx, &mut arena),
            states: (0..together).map(|_| arena.take(size)).collect(),
        };
        let end = (key_head + 1) * group;
        for first in (key_head * group..end).step_by(together) {
            let heads = first..(first + together).min(end);
            let kept = &mut kept[..chunks * heads.len() * size];
            own.forward(&heads, kept);
            own.backward(&heads, kept, &mut sums, saved, out);
        }
    });
    sums
}

/// A chunk of a value head, with the matrices of its forward pass.
struct Chunk<'a> {
    cx: &'a Context<'a>,
    keys: &'a Shared<'a>,
    work: &'a ChunkData<'a>,
    gates: &'a Gates,
    at: &'a ValueHead<'a>,
    first: usize,
}

/// Sums of the gates' gradients.
struct GateSums {
    /// In f64: terms that are added to one gate are subtracted from another, and must cancel.
    d_g: [f64; CHUNK],
    d_beta: [f32; CHUNK],
    /// The part of the decay of the whole chunk.
    d_last: f64,
}

/// A value head on the way back through its chunks.
struct HeadPass<'a> {
    cx: &'a Context<'a>,
    at: &'a ValueHead<'a>,
    saved: &'a DeltaSaved<'a>,
    out: &'a Out<'a>,
}

/// The state before a chunk, and the gradient of the state after it.
struct States<'a> {
    before: &'a mut [f32],
    gradient: &'a mut [f32],
}

impl HeadPass<'_> {
    /// Processes one chunk backward: writes the gradients of its values, returns those of g and beta, leaves those of
    /// keys and queries in `workspace`, and turns the gradient of the state after it into that of the state before it.
    fn back(
        &self,
        keys: &Shared<'_>,
        work: &mut ChunkData<'_>,
        first: usize,
        states: States<'_>,
        workspace: &mut Workspace<'_>,
    ) -> ([f64; CHUNK], [f64; CHUNK]) {
        let HeadPass { cx, at, saved, out } = *self;
        let States { before: state, gradient: d_state } = states;
        let gates = Gates::new(cx, at, first);
        work.corrections(cx, keys, at, &gates, first, state);
        let do_rows = cx.bound.row_layout(saved.d_o.strides(), at.sequence);
        cx.load_values(&saved.d_o, &do_rows, at, first, workspace.d_o, cx.vs);
        let mut ahead = std::mem::take(&mut work.ahead);
        let chunk = Chunk { cx, keys, work, gates: &gates, at, first };
        let mut sums = GateSums { d_g: [0.0; CHUNK], d_beta: [0.0; CHUNK], d_last: 0.0 };
        let ahead = &mut ahead;
        // The order matters: `state` overwrites dW, which the steps before it read, and `inverse` overwrites dAg.
        chunk.values(d_state, workspace, ahead);
        chunk.store_values(workspace, out);
        chunk.keys_and_queries(state, d_state, workspace, &mut sums, ahead);
        chunk.state(state, d_state, workspace, &mut sums, ahead);
        chunk.weights(workspace, &mut sums, ahead);
        chunk.inverse(workspace, &mut sums, ahead);
        sums.of_gates()
    }
}

// Rows of values are `vs` apart, of which products compute `vp`.
impl Chunk<'_> {
    fn tokens(&self) -> usize {
        (self.at.sequence.len - self.first).min(CHUNK)
    }

    /// Decay from each token to the end of the chunk.
    fn tail(&self) -> [f32; CHUNK] {
        std::array::from_fn(|j| self.work.g[(CHUNK - 1) * CHUNK + j])
    }

    /// dV', dAg, and dW = dV.
    fn values(&self, d_state: &[f32], workspace: &mut Workspace<'_>, ahead: &mut Ahead) {
        let Chunk { cx, keys, work, .. } = *self;
        let (vp, vs) = (cx.vp, cx.vs);
        let scales = [cx.problem.scale(); CHUNK];
        cx.kernels.stage(Stage::Weigh { out: workspace.pg, x: keys.qk, g: work.g, factor: &scales });

        // dV' = t (K dS) + Pg^T dO
        let (k, ds) = (Matrix::new(keys.k, cx.kp), Matrix::new(d_state, vs));
        cx.kernels.gemm(MatrixMut::at(workspace.scaled, vs, 0, 0), k, ds, [CHUNK, vp, cx.kd], Sum::Fresh, ahead);
        cx.kernels.stage(Stage::ScaleRows {
            out: workspace.d_vn,
            x: workspace.scaled,
            factor: &self.tail(),
            width: vs,
        });
        let d_o = Matrix::new(workspace.d_o, vs);
        let values = [vp, CHUNK];
        let pg = Matrix::new(workspace.pg, CHUNK);
        product_transposed(cx, workspace.d_vn, [pg, d_o], values, Lower::Left, Sum::Onto, ahead);
        let d_vn = Matrix::new(workspace.d_vn, vs);

        // dAg = dV' W^T, dW = Ag^T dV' = dV
        cx.kernels.transpose(work.w, vs, workspace.turned, CHUNK, CHUNK, vp);
        let turned = Matrix::new(workspace.turned, CHUNK);
        let squares = [CHUNK, CHUNK, cx.vd];
        product(cx, workspace.d_ag, [d_vn, turned], squares, Lower::Result, Sum::Fresh, ahead);
        clear_above(workspace.d_ag);
        let ag = Matrix::new(work.ag, CHUNK);
        product_transposed(cx, workspace.d_w, [ag, d_vn], values, Lower::Left, Sum::Fresh, ahead);
    }

    fn store_values(&self, workspace: &Workspace<'_>, out: &Out<'_>) {
        let (to, strides) = &out.d_v;
        let rows = self.cx.bound.row_layout(strides, self.at.sequence);
        for (i, row) in workspace.d_w.chunks_exact(self.cx.vs).take(self.tokens()).enumerate() {
            // SAFETY: each token and column of a value head belongs to one item.
            unsafe {
                to.store(self.cx.kernels, rows.at(self.first + i, self.at.head) + self.cx.column, &row[..self.cx.vd])
            };
        }
    }

    /// X = -e dW (in `workspace.scaled`), and the parts of dK and dQ that come from states.
    fn keys_and_queries(
        &self,
        state: &[f32],
        d_state: &[f32],
        workspace: &mut Workspace<'_>,
        sums: &mut GateSums,
        ahead: &mut Ahead,
    ) {
        let Chunk { cx, keys, work, gates, .. } = *self;
        let (kp, vp, vs, scale) = (cx.kp, cx.vp, cx.vs, cx.problem.scale());
        let minus = gates.head.map(|e| -e);
        cx.kernels.stage(Stage::ScaleRows { out: workspace.scaled, x: workspace.d_w, factor: &minus, width: vs });
        add_dots(&mut sums.d_g, workspace.scaled, work.u, vs);

        // Y = t (V' dS^T); dK = Y + X S^T
        let by_keys = [CHUNK, kp, cx.vd];
        cx.kernels.transpose(d_state, vs, workspace.state_turned, kp, kp, vp);
        let ds_turned = Matrix::new(workspace.state_turned, kp);
        let vn = Matrix::new(work.vn, vs);
        cx.kernels.gemm(MatrixMut::at(workspace.rows, kp, 0, 0), vn, ds_turned, by_keys, Sum::Fresh, ahead);
        cx.kernels.stage(Stage::ScaleRows { out: workspace.d_k, x: workspace.rows, factor: &self.tail(), width: kp });
        let mut y = [0.0f32; CHUNK];
        cx.kernels.stage(Stage::RowDots { out: &mut y, x: keys.k, y: workspace.d_k, width: kp });
        sums.d_last = y.iter().map(|&y| f64::from(y)).sum::<f64>();
        sums.d_g.iter_mut().zip(y).for_each(|(d, y)| *d -= f64::from(y));
        cx.kernels.transpose(state, vs, workspace.state_turned, kp, kp, vp);
        let s_turned = Matrix::new(workspace.state_turned, kp);
        let x = Matrix::new(workspace.scaled, vs);
        cx.kernels.gemm(MatrixMut::at(workspace.d_k, kp, 0, 0), x, s_turned, by_keys, Sum::Onto, ahead);

        // dQ = scale e (dO S^T)
        let factor = gates.head.map(|e| scale * e);
        let d_o = Matrix::new(workspace.d_o, vs);
        cx.kernels.gemm(MatrixMut::at(workspace.rows, kp, 0, 0), d_o, s_turned, by_keys, Sum::Fresh, ahead);
        cx.kernels.stage(Stage::ScaleRows { out: workspace.d_q, x: workspace.rows, factor: &factor, width: kp });
        add_dots(&mut sums.d_g, keys.q, workspace.d_q, kp);
    }

    /// dS <- e_last dS + K^T X + Q^T (scale e dO), with X in `workspace.scaled`.
    fn state(
        &self,
        state: &[f32],
        d_state: &mut [f32],
        workspace: &mut Workspace<'_>,
        sums: &mut GateSums,
        ahead: &mut Ahead,
    ) {
        let Chunk { cx, keys, gates, .. } = *self;
        let (kp, vs, scale) = (cx.kp, cx.vs, cx.problem.scale());
        let (k, q, x) = (Matrix::new(keys.k, kp), Matrix::new(keys.q, kp), Matrix::new(workspace.scaled, vs));
        let before = (cx.kd <= FEW).then(|| state_before(cx, keys, self.at, self.first, workspace.d_o, d_state));
        cx.kernels.stage(Stage::Fade { x: d_state, factor: gates.head[CHUNK - 1] });
        let mut dots = [0.0f32; 512];
        cx.kernels.stage(Stage::RowDots { out: &mut dots[..kp], x: d_state, y: state, width: vs });
        sums.d_last += dots[..kp].iter().map(|&x| f64::from(x)).sum::<f64>();
        let to_state = [cx.kd, cx.vp, CHUNK];
        cx.kernels.gemm_transposed(MatrixMut::at(d_state, vs, 0, 0), k, x, to_state, Sum::Onto, ahead);
        let factor = gates.head.map(|e| scale * e);
        cx.kernels.stage(Stage::ScaleRows { out: workspace.d_w, x: workspace.d_o, factor: &factor, width: vs });
        let scaled = Matrix::new(workspace.d_w, vs);
        cx.kernels.gemm_transposed(MatrixMut::at(d_state, vs, 0, 0), q, scaled, to_state, Sum::Onto, ahead);
        if let Some(before) = before {
            for (row, before) in d_state.chunks_exact_mut(vs).zip(before.chunks_exact(cx.vd)) {
                row.iter_mut().zip(before).for_each(|(x, &exact)| *x = exact as f32);
            }
        }
    }

    /// dPg = dO V'^T; dP = scale G dPg, and its parts of dQ and dK.
    fn weights(&self, workspace: &mut Workspace<'_>, sums: &mut GateSums, ahead: &mut Ahead) {
        let Chunk { cx, keys, work, .. } = *self;
        let (kp, scales) = (cx.kp, [cx.problem.scale(); CHUNK]);
        cx.kernels.transpose(work.vn, cx.vs, workspace.turned, CHUNK, CHUNK, cx.vp);
        let (d_o, turned) = (Matrix::new(workspace.d_o, cx.vs), Matrix::new(workspace.turned, CHUNK));
        let squares = [CHUNK, CHUNK, cx.vd];
        product(cx, workspace.square, [d_o, turned], squares, Lower::Result, Sum::Fresh, ahead);
        clear_above(workspace.square);
        gate_sums(workspace.square, workspace.pg, &mut sums.d_g);
        cx.kernels.stage(Stage::Weigh { out: workspace.other, x: workspace.square, g: work.g, factor: &scales });
        let (k, q, d_p) = (Matrix::new(keys.k, kp), Matrix::new(keys.q, kp), Matrix::new(workspace.other, CHUNK));
        let by_tokens = [CHUNK, kp, CHUNK];
        product(cx, workspace.d_q, [d_p, k], by_tokens, Lower::Left, Sum::Onto, ahead);
        product_transposed(cx, workspace.d_k, [d_p, q], [kp, CHUNK], Lower::Left, Sum::Onto, ahead);
    }

    /// dAb = G dAg; its part of the gates, of beta, and of L.
    fn inverse(&self, workspace: &mut Workspace<'_>, sums: &mut GateSums, ahead: &mut Ahead) {
        let Chunk { cx, keys, work, gates, .. } = *self;
        let GateSums { d_g, d_beta, .. } = sums;
        gate_sums(workspace.d_ag, work.ag, d_g);
        let ones = [1.0; CHUNK];
        cx.kernels.stage(Stage::Weigh { out: workspace.square, x: workspace.d_ag, g: work.g, factor: &ones });
        for (row, a) in workspace.square.chunks_exact(CHUNK).zip(work.a.chunks_exact(CHUNK)) {
            d_beta.iter_mut().zip(row.iter().zip(a)).for_each(|(sum, (d, a))| *sum += d * a);
        }
        cx.kernels.stage(Stage::Weigh { out: workspace.other, x: workspace.d_ag, g: work.g, factor: &gates.beta });
        cx.kernels.transpose(work.a, CHUNK, workspace.square, CHUNK, CHUNK, CHUNK);
        let (other, a_turned) = (Matrix::new(workspace.other, CHUNK), Matrix::new(workspace.square, CHUNK));
        product(cx, workspace.d_ag, [other, a_turned], [CHUNK; 3], Lower::Left, Sum::Fresh, ahead);
        let (a, inner) = (Matrix::new(work.a, CHUNK), Matrix::new(workspace.d_ag, CHUNK));
        product_transposed(cx, workspace.other, [a, inner], [CHUNK; 2], Lower::Both, Sum::Fresh, ahead);
        for (i, row) in workspace.other.chunks_exact_mut(CHUNK).enumerate() {
            row[i..].fill(0.0);
            let kk = &keys.kk[i * CHUNK..i * CHUNK + i];
            d_beta[i] -= row.iter().zip(kk).map(|(d, kk)| d * kk).sum::<f32>();
            row.iter_mut().for_each(|d| *d *= -gates.beta[i]);
        }
        let (k, b) = (Matrix::new(keys.k, cx.kp), Matrix::new(workspace.other, CHUNK));
        let by_tokens = [CHUNK, cx.kp, CHUNK];
        product(cx, workspace.d_k, [b, k], by_tokens, Lower::Left, Sum::Onto, ahead);
        product_transposed(cx, workspace.d_k, [b, k], [cx.kp, CHUNK], Lower::Left, Sum::Onto, ahead);
    }
}

impl GateSums {
    /// The gradients of g and beta.
    fn of_gates(self) -> ([f64; CHUNK], [f64; CHUNK]) {
        let GateSums { mut d_g, d_beta, d_last } = self;
        // Gates were summed from the start of the chunk, so their gradients are summed from its end.
        d_g[CHUNK - 1] += d_last;
        let mut sum = 0.0;
        for d in d_g.iter_mut().rev() {
            sum += *d;
            *d = sum;
        }
        (d_g, d_beta.map(f64::from))
    }
}

/// Adds x . y of each token. d_g is a sum of large terms that nearly cancel, so f32 dot products are too inaccurate.
fn add_dots(d_g: &mut [f64; CHUNK], x: &[f32], y: &[f32], width: usize) {
    for ((d, x), y) in d_g.iter_mut().zip(x.chunks_exact(width)).zip(y.chunks_exact(width)) {
        *d += sums::dot(x, y);
    }
}

/// The contribution of weights x = G y to the sums of gates: row sums of d x minus column sums.
fn gate_sums(d: &[f32], x: &[f32], d_g: &mut [f64; CHUNK]) {
    for (i, (d, x)) in d.chunks_exact(CHUNK).zip(x.chunks_exact(CHUNK)).enumerate() {
        let (d, x) = (&d[..=i], &x[..=i]);
        d_g.iter_mut().zip(d).zip(x).for_each(|((sum, d), x)| *sum -= f64::from(*d) * f64::from(*x));
        d_g[i] += sums::dot(d, x);
    }
}

/// dS before a chunk, `[key_dim][value_dim]`, from the one after it: token by token in f64. A chunk of 64 keys with few
/// elements overwrites the state many times, and the gradient through it would be a small difference of products.
fn state_before(
    cx: &Context<'_>,
    keys: &Shared<'_>,
    at: &ValueHead<'_>,
    first: usize,
    d_o: &[f32],
    d_state: &[f32],
) -> Vec<f64> {
    let scale = f64::from(cx.problem.scale());
    let own = d_state.chunks_exact(cx.vs).take(cx.kd);
    let mut d_s: Vec<f64> = own.flat_map(|row| row[..cx.vd].iter().map(|&x| f64::from(x))).collect();
    let mut seen = vec![0.0f64; cx.vd];
    for i in (0..CHUNK.min(at.sequence.len - first)).rev() {
        let gate = cx.bound.gate(at.sequence, first + i, at.head);
        let (decay, beta) = (f64::from(cx.bound.g()[gate]).exp(), f64::from(cx.bound.beta()[gate]));
        let (k, q) = (&keys.k[i * cx.kp..][..cx.kd], &keys.q[i * cx.kp..][..cx.kd]);
        // O = scale S^T q of the state after the token: dS += scale q dO, then dS = decay (dS - beta k (k^T dS)).
        seen.fill(0.0);
        for ((row, &q), &k) in d_s.chunks_exact_mut(cx.vd).zip(q).zip(k) {
            for ((x, seen), &d_o) in row.iter_mut().zip(&mut seen).zip(&d_o[i * cx.vs..]) {
                *x += scale * f64::from(q) * f64::from(d_o);
                *seen += f64::from(k) * *x;
            }
        }
        for (row, &k) in d_s.chunks_exact_mut(cx.vd).zip(k) {
            row.iter_mut().zip(&seen).for_each(|(x, seen)| *x = decay * (*x - beta * f64::from(k) * seen));
        }
    }
    d_s
}
