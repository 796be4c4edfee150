//! Backward of the chunked form, on vectors in f32.
//!
//! An item owns a key head of a sequence. It processes its value heads one after the other: forward once, to find the
//! state before every chunk (memory proportional to the sequence), then backward. Letters as in [`super::chunk`]; dS is
//! the gradient of the state after the chunk, Pg = scale G (Q K^T). X is kept in `scaled`, and scale e dO overwrites dW.
//!
//! ```text
//! dV' = t (K dS) + Pg^T dO      dW = Ag^T dV' = dV      X = -e dW      dAg = dV' W^T      dPg = dO V'^T
//! Y = t (V' dS^T)               dK = Y + X S^T          dQ = scale e (dO S^T)
//! dS <- e_last dS + K^T X + Q^T (scale e dO)            dP = scale G dPg: dQ += dP K, dK += dP^T Q
//! dAb = G dAg                   dL = -strictly lower(A^T (dAb diag(beta)) A^T)    B = diag(beta) dL: dK += (B + B^T) K
//! ```

use super::chunk::{CHUNK, ChunkData, Gates, Need, Shared};
use super::{Context, PACE, ValueHead};
use crate::memory::{Arena, SharedRows, with_workspace};
use crate::pool;
use crate::simd::{Ahead, Matrix, MatrixMut, Stage, Sum};
use fulgurite_core::gated_delta::{DeltaGradientOutputs, DeltaSaved, QkNorm, Tokens};
use fulgurite_core::stop;

const SQUARE: usize = CHUNK * CHUNK;
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
    let heads = cx.problem.heads();
    pool::run(threads, cx.bound.sequences().len() * heads, &|i| {
        item(cx, &cx.bound.sequences()[i / heads], i % heads, &given, &out);
        cx.kernels.fence();
    });
}

type To<'a> = (SharedRows<'a>, &'a [usize]);

struct Out<'a> {
    d_q: To<'a>,
    d_k: To<'a>,
    d_v: To<'a>,
    d_g: To<'a>,
    d_beta: To<'a>,
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

fn item(cx: &Context<'_>, s: &Tokens, key_head: usize, saved: &DeltaSaved<'_>, out: &Out<'_>) {
    let chunks = s.len.div_ceil(CHUNK);
    let (size, rows) = (cx.state_len(), chunks * CHUNK * cx.kp);
    let mut states: Vec<f32> = stop::zeros("states of chunks", chunks * size);
    // Sums over the value heads that share the key head.
    let [mut d_q, mut d_k] = [(); 2].map(|_| -> Vec<f32> { stop::zeros("gradients in f32", rows) });
    let workspace_elems: usize = Workspace::sizes(cx).into_iter().map(Arena::room).sum();
    let room = Shared::room(cx) + ChunkData::room(cx, cx.vp) + 2 * Arena::room(size) + workspace_elems;
    let mut inverse_norms: [Vec<f32>; 2] = [Vec::new(), Vec::new()];
    let mut normal: [Vec<f32>; 2] = [Vec::new(), Vec::new()];
    with_workspace(room, |workspace| {
        let mut arena = Arena::new(workspace);
        let mut shared = Shared::new(cx, &mut arena);
        let mut work = ChunkData::new(cx, &mut arena, cx.vp);
        let mut workspace = Workspace::new(cx, &mut arena);
        let [state, d_state] = [size; 2].map(|n| arena.take(n));
        let group = cx.problem.group();
        for head in key_head * group..(key_head + 1) * group {
            let at = ValueHead { sequence: s, head };
            cx.load_state(s.number, head, cx.bound.initial_state(), state, cx.vs);
            for (chunk, kept) in states.chunks_exact_mut(size).enumerate() {
                stop::poll();
                kept.copy_from_slice(state);
                work.ahead = Ahead::paced(PACE);
                cx.prefetch(&mut work.ahead, &at, (chunk + 1) * CHUNK, Need::State, true);
                shared.load(cx, s, key_head, chunk * CHUNK, Need::State, &mut work.ahead);
                work.chunk(cx, &shared, &at, chunk * CHUNK, state, Need::State);
            }
            cx.load_state(s.number, head, saved.d_final_state.as_ref(), d_state, cx.vs);
            for chunk in (0..chunks).rev() {
                stop::poll();
                let first = chunk * CHUNK;
                shared.load(cx, s, key_head, first, Need::Outputs, &mut work.ahead);
                let kept = &mut states[chunk * size..(chunk + 1) * size];
                let states = States { before: kept, gradient: d_state };
                HeadPass { cx, at: &at, saved, out }.back(&shared, &mut work, first, states, &mut workspace);
                let own = first * cx.kp..(first + CHUNK) * cx.kp;
                d_q[own.clone()].iter_mut().zip(&*workspace.d_q).for_each(|(sum, x)| *sum += x);
                d_k[own].iter_mut().zip(&*workspace.d_k).for_each(|(sum, x)| *sum += x);
            }
            for i in 0..cx.kd {
                let (to, strides) = &out.d_state;
                let offset = s.number * strides[0] + head * strides[1] + i * strides[2];
                // SAFETY: each state belongs to one value head, and that to this item.
                unsafe { to.store(cx.kernels, offset, &d_state[i * cx.vs..i * cx.vs + cx.vd]) };
            }
        }
        if cx.problem.qk_norm() == QkNorm::Inside {
            for chunk in 0..chunks {
                shared.load(cx, s, key_head, chunk * CHUNK, Need::Outputs, &mut work.ahead);
                for (i, rows) in [&*shared.q, &*shared.k].into_iter().enumerate() {
                    normal[i].extend_from_slice(rows);
                    inverse_norms[i].extend(&shared.inverse_norms[i]);
                }
            }
        }
    });
    for (i, (d, (to, strides))) in [(&mut d_q, &out.d_q), (&mut d_k, &out.d_k)].into_iter().enumerate() {
        let rows = cx.bound.row_layout(strides, s);
        for (t, d) in d.chunks_exact_mut(cx.kp).take(s.len).enumerate() {
            if let Some(&inverse) = inverse_norms[i].get(t) {
                // y = x / |x|: dx = (dy - y (y . dy)) / |x|
                let y = &normal[i][t * cx.kp..(t + 1) * cx.kp];
                let mut along = [0.0];
                cx.kernels.stage(Stage::RowDots { out: &mut along, x: y, y: d, width: cx.kp });
                d.iter_mut().zip(y).for_each(|(d, y)| *d = inverse * (*d - y * along[0]));
            }
            // SAFETY: each token of a key head belongs to this item.
            unsafe { to.store(cx.kernels, rows.at(t, key_head), &d[..cx.kd]) };
        }
    }
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
    /// Processes one chunk backward: writes the gradients of its values and gates, leaves those of keys and queries in
    /// `workspace`, and turns the gradient of the state after it into that of the state before it.
    fn back(
        &self,
        keys: &Shared<'_>,
        work: &mut ChunkData<'_>,
        first: usize,
        states: States<'_>,
        workspace: &mut Workspace<'_>,
    ) {
        let HeadPass { cx, at, saved, out } = *self;
        let States { before: state, gradient: d_state } = states;
        let gates = Gates::new(cx, at, first);
        work.corrections(cx, keys, at, &gates, first, state);
        let do_rows = cx.bound.row_layout(saved.d_o.strides(), at.sequence);
        cx.load_values(&saved.d_o, &do_rows, at, first, workspace.d_o, cx.vs);
        let chunk = Chunk { cx, keys, work, gates: &gates, at, first };
        let mut sums = GateSums { d_g: [0.0; CHUNK], d_beta: [0.0; CHUNK], d_last: 0.0 };
        let ahead = &mut Ahead::default();
        // The order matters: `state` overwrites dW, which the steps before it read, and `inverse` overwrites dAg.
        chunk.values(d_state, workspace, ahead);
        chunk.store_values(workspace, out);
        chunk.keys_and_queries(state, d_state, workspace, &mut sums, ahead);
        chunk.state(state, d_state, workspace, &mut sums, ahead);
        chunk.weights(workspace, &mut sums, ahead);
        chunk.inverse(workspace, &mut sums, ahead);
        chunk.store_gates(sums, out);
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
        let values = [CHUNK, vp, CHUNK];
        let to = MatrixMut::at(workspace.d_vn, vs, 0, 0);
        cx.kernels.gemm_transposed(to, Matrix::new(workspace.pg, CHUNK), d_o, values, Sum::Onto, ahead);
        let d_vn = Matrix::new(workspace.d_vn, vs);

        // dAg = dV' W^T, dW = Ag^T dV' = dV
        cx.kernels.transpose(work.w, vs, workspace.turned, CHUNK, CHUNK, vp);
        let turned = Matrix::new(workspace.turned, CHUNK);
        let squares = [CHUNK, CHUNK, cx.vd];
        cx.kernels.gemm(MatrixMut::at(workspace.d_ag, CHUNK, 0, 0), d_vn, turned, squares, Sum::Fresh, ahead);
        let ag = Matrix::new(work.ag, CHUNK);
        cx.kernels.gemm_transposed(MatrixMut::at(workspace.d_w, vs, 0, 0), ag, d_vn, values, Sum::Fresh, ahead);
    }

    fn store_values(&self, workspace: &Workspace<'_>, out: &Out<'_>) {
        let (to, strides) = &out.d_v;
        let rows = self.cx.bound.row_layout(strides, self.at.sequence);
        for (i, row) in workspace.d_w.chunks_exact(self.cx.vs).take(self.tokens()).enumerate() {
            // SAFETY: each token of a value head belongs to one item.
            unsafe { to.store(self.cx.kernels, rows.at(self.first + i, self.at.head), &row[..self.cx.vd]) };
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
        cx.kernels.gemm(MatrixMut::at(workspace.square, CHUNK, 0, 0), d_o, turned, squares, Sum::Fresh, ahead);
        gate_sums(workspace.square, workspace.pg, &mut sums.d_g);
        cx.kernels.stage(Stage::Weigh { out: workspace.other, x: workspace.square, g: work.g, factor: &scales });
        let (k, q, d_p) = (Matrix::new(keys.k, kp), Matrix::new(keys.q, kp), Matrix::new(workspace.other, CHUNK));
        let by_tokens = [CHUNK, kp, CHUNK];
        cx.kernels.gemm(MatrixMut::at(workspace.d_q, kp, 0, 0), d_p, k, by_tokens, Sum::Onto, ahead);
        cx.kernels.gemm_transposed(MatrixMut::at(workspace.d_k, kp, 0, 0), d_p, q, by_tokens, Sum::Onto, ahead);
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
        let all = [CHUNK; 3];
        cx.kernels.gemm(MatrixMut::at(workspace.d_ag, CHUNK, 0, 0), other, a_turned, all, Sum::Fresh, ahead);
        let (a, inner) = (Matrix::new(work.a, CHUNK), Matrix::new(workspace.d_ag, CHUNK));
        cx.kernels.gemm_transposed(MatrixMut::at(workspace.other, CHUNK, 0, 0), a, inner, all, Sum::Fresh, ahead);
        for (i, row) in workspace.other.chunks_exact_mut(CHUNK).enumerate() {
            row[i..].fill(0.0);
            let kk = &keys.kk[i * CHUNK..i * CHUNK + i];
            d_beta[i] -= row.iter().zip(kk).map(|(d, kk)| d * kk).sum::<f32>();
            row.iter_mut().for_each(|d| *d *= -gates.beta[i]);
        }
        let (k, b) = (Matrix::new(keys.k, cx.kp), Matrix::new(workspace.other, CHUNK));
        let by_tokens = [CHUNK, cx.kp, CHUNK];
        cx.kernels.gemm(MatrixMut::at(workspace.d_k, cx.kp, 0, 0), b, k, by_tokens, Sum::Onto, ahead);
        cx.kernels.gemm_transposed(MatrixMut::at(workspace.d_k, cx.kp, 0, 0), b, k, by_tokens, Sum::Onto, ahead);
    }

    fn store_gates(&self, sums: GateSums, out: &Out<'_>) {
        let GateSums { mut d_g, d_beta, d_last } = sums;
        // Gates were summed from the start of the chunk, so their gradients are summed from its end.
        d_g[CHUNK - 1] += d_last;
        let mut sum = 0.0;
        for d in d_g.iter_mut().rev() {
            sum += *d;
            *d = sum;
        }
        let d_g = d_g.map(|d| d as f32);
        for (values, (to, strides)) in [(&d_g, &out.d_g), (&d_beta, &out.d_beta)] {
            let rows = self.cx.bound.row_layout(&[strides, &[0][..]].concat(), self.at.sequence);
            for (i, value) in values.iter().take(self.tokens()).enumerate() {
                // SAFETY: each gate belongs to one value head, and that to this item.
                unsafe { to.store(self.cx.kernels, rows.at(self.first + i, self.at.head), &[*value]) };
            }
        }
    }
}

/// Adds x . y of each token. d_g is a sum of large terms that nearly cancel, so f32 dot products are too inaccurate.
fn add_dots(d_g: &mut [f64; CHUNK], x: &[f32], y: &[f32], width: usize) {
    for ((d, x), y) in d_g.iter_mut().zip(x.chunks_exact(width)).zip(y.chunks_exact(width)) {
        *d += x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    }
}

/// The contribution of weights x = G y to the sums of gates: row sums of d x minus column sums.
fn gate_sums(d: &[f32], x: &[f32], d_g: &mut [f64; CHUNK]) {
    for (i, (d, x)) in d.chunks_exact(CHUNK).zip(x.chunks_exact(CHUNK)).enumerate() {
        let mut row = 0.0;
        for (j, (d, x)) in d.iter().zip(x).enumerate().take(i + 1) {
            let product = f64::from(*d) * f64::from(*x);
            row += product;
            d_g[j] -= product;
        }
        d_g[i] += row;
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
