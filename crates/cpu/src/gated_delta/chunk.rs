//! One chunk of 64 tokens: what depends on keys and queries alone, then what a value head makes of it.
//!
//! Letters: G_ij = decay from token j to i, L = strictly lower (beta K K^T), A = (1 + L)^-1, Ag = G (A diag(beta)),
//! e = decay from before the chunk, t = decay to its end.
//!
//! ```text
//! W = V - e (K S)       V' = Ag W       O = scale (e (Q S) + (G (Q K^T)) V')       S' = e_last S + K^T (t V')
//! ```

use super::products::{Operand, Part, product, product_turned};
use super::{Context, Place};
use crate::memory::Arena;
use crate::simd::{Ahead, DEPTH, INVERT, Matrix, MatrixMut, Stage, Sum};
use fulgurite_core::gated_delta::Tokens;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = 64;

/// What a pass over a chunk is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// The state after it.
    State,
    /// Outputs and state.
    Outputs,
}

/// Decays and steps of a chunk of one value head; tokens past the end have decay 1 and step 0.
pub(super) struct Gates {
    pub decay: [f32; CHUNK],
    pub beta: [f32; CHUNK],
    /// Decay from before the chunk to each token.
    pub head: [f32; CHUNK],
}

impl Gates {
    pub fn new(cx: &Context<'_>, at: &Place<'_>, first: usize) -> Self {
        let mut gates = Gates { decay: [1.0; CHUNK], beta: [0.0; CHUNK], head: [1.0; CHUNK] };
        let mut product = 1.0f32;
        for i in 0..CHUNK {
            if first + i < at.sequence.len {
                let gate = cx.bound.gate(at.sequence, first + i, at.head);
                gates.decay[i] = cx.bound.g()[gate].exp();
                gates.beta[i] = cx.bound.beta()[gate];
            }
            product *= gates.decay[i];
            gates.head[i] = if product < 1e-30 { 0.0 } else { product };
        }
        gates
    }
}

/// What the value heads of a key head share.
pub(super) struct Shared<'w> {
    pub k: Operand<'w>,
    pub q: Operand<'w>,
    /// K^T, `[key_dim][token]`.
    pub kt: Operand<'w>,
    /// K K^T and Q K^T, lower triangles.
    pub kk: &'w mut [f32],
    pub qk: &'w mut [f32],
    /// K^T as a left operand, where the matrix unit works.
    k_turned: Operand<'w>,
    /// 1 / length of each row of q and k.
    pub lengths: [Vec<f32>; 2],
}

impl<'w> Shared<'w> {
    fn sizes(cx: &Context<'_>) -> [usize; 9] {
        let rows = CHUNK * cx.kp;
        let left = Operand::room(cx, CHUNK, cx.kd, cx.parts.keys);
        let turned = Operand::room(cx, cx.kp, CHUNK, cx.parts.keys);
        // The vectors take K^T as it is, the matrix unit turns packed tiles.
        let kt = if cx.matrix.is_some() { 0 } else { rows };
        [rows, rows, kt, CHUNK * CHUNK, CHUNK * CHUNK, left, left, left, turned]
    }
    pub fn room(cx: &Context<'_>) -> usize {
        Self::sizes(cx).into_iter().map(Arena::room).sum()
    }
    pub fn new(cx: &Context<'_>, arena: &mut Arena<'w>) -> Self {
        let [k, q, kt, kk, qk, k_left, q_left, kt_right, k_turned] = Self::sizes(cx).map(|n| arena.take(n));
        [&mut *kk, &mut *qk].into_iter().for_each(|x| x.fill(0.0));
        Shared {
            k: Operand::new(k, cx.kp, cx.kp, k_left),
            q: Operand::new(q, cx.kp, cx.kp, q_left),
            kt: Operand::new(kt, CHUNK, CHUNK, kt_right),
            kk,
            qk,
            k_turned: Operand::new(&mut [], CHUNK, CHUNK, k_turned),
            lengths: [Vec::new(), Vec::new()],
        }
    }

    /// Loads the tokens from `first` on of a key head.
    pub fn load(&mut self, cx: &Context<'_>, s: &Tokens, key_head: usize, first: usize, need: Need, ahead: &mut Ahead) {
        self.lengths[1] = cx.load_keys(cx.bound.k(), s, key_head, first, self.k.rows);
        if cx.matrix.is_some() {
            self.k.pack_left(cx, cx.kd, cx.parts.keys);
            self.k_turned.pack_turned(cx, &self.k, cx.parts.keys);
            self.kt.turn_panels(cx, &self.k);
        } else {
            cx.kernels.transpose(self.k.rows, cx.kp, self.kt.rows, CHUNK, CHUNK, cx.kp);
        }
        let size = [CHUNK, CHUNK, cx.kd];
        product(cx, self.kk, &self.k, &self.kt, size, Part::LowerResult, Sum::Fresh, ahead);
        if need == Need::Outputs {
            self.lengths[0] = cx.load_keys(cx.bound.q(), s, key_head, first, self.q.rows);
            self.q.pack_left(cx, cx.kd, cx.parts.keys);
            product(cx, self.qk, &self.q, &self.kt, size, Part::LowerResult, Sum::Fresh, ahead);
        }
    }
}

/// What one value head computes in a chunk. The values are `width` wide: more than those of v where the map of a
/// segment is computed beside its state.
pub(super) struct Work<'w> {
    width: usize,
    stride: usize,
    /// G, A and Ag (then the weights of the outputs), `[token][token]`.
    pub g: &'w mut [f32],
    pub a: &'w mut [f32],
    pub ag: Operand<'w>,
    pub v: &'w mut [f32],
    /// K S.
    pub u: &'w mut [f32],
    pub w: Operand<'w>,
    pub vn: Operand<'w>,
    /// O, or t V' before it joins the state.
    pub o: &'w mut [f32],
    s_panels: &'w mut [f32],
    scratch: &'w mut [f32],
    /// Rows that will be read and written next, asked for while products run: tokens lie far apart.
    pub ahead: Ahead,
}

impl<'w> Work<'w> {
    fn sizes(cx: &Context<'_>, width: usize) -> [usize; 12] {
        let (square, values) = (CHUNK * CHUNK, CHUNK * cx.stride(width));
        let parts = &cx.parts;
        let left = Operand::room(cx, CHUNK, CHUNK, parts.inverse.max(parts.weights));
        let [right, exact] = [parts.weights, parts.state].map(|parts| Operand::room(cx, width, CHUNK, parts));
        let state = Operand::room(cx, width, cx.kd, parts.state);
        [square, square, square, left, values, values, values, exact, values, right, values, state]
    }
    pub fn room(cx: &Context<'_>, width: usize) -> usize {
        let scratch = Arena::room(INVERT * (CHUNK + INVERT));
        Self::sizes(cx, width).into_iter().map(Arena::room).sum::<usize>() + scratch
    }
    pub fn new(cx: &Context<'_>, arena: &mut Arena<'w>, width: usize) -> Self {
        let [g, a, ag, ag_left, v, u, w, w_right, vn, vn_right, o, s_panels] =
            Self::sizes(cx, width).map(|n| arena.take(n));
        // What is never written (above the diagonal, past the columns) must be finite.
        [&mut *a, &mut *v, &mut *u, &mut *w, &mut *vn, &mut *o].into_iter().for_each(|x| x.fill(0.0));
        let stride = cx.stride(width);
        Work {
            width,
            stride,
            g,
            a,
            ag: Operand::new(ag, CHUNK, CHUNK, ag_left),
            v,
            u,
            w: Operand::new(w, stride, width, w_right),
            vn: Operand::new(vn, stride, width, vn_right),
            o,
            s_panels,
            scratch: arena.take(INVERT * (CHUNK + INVERT)),
            ahead: Ahead::default(),
        }
    }

    /// Asks for rows between products, where those do not ask themselves.
    fn ask(&mut self, cx: &Context<'_>, rows: usize) {
        if cx.matrix.is_some() {
            self.ahead.take(rows);
        }
    }

    /// A chunk from `first` on: `state` becomes the state after it, and `o` the outputs.
    pub fn chunk(
        &mut self,
        cx: &Context<'_>,
        keys: &Shared<'_>,
        at: &Place<'_>,
        first: usize,
        state: &mut [f32],
        need: Need,
    ) {
        self.ask(cx, 32);
        let gates = Gates::new(cx, at, first);
        self.corrections(cx, keys, at, &gates, first, state);
        let size = [CHUNK, self.width, CHUNK];
        let tail: [f32; CHUNK] = std::array::from_fn(|j| self.g[(CHUNK - 1) * CHUNK + j]);
        if need == Need::Outputs {
            // O = scale e (Q S) + Pg V'; S is still packed.
            let mut s = Operand::new(state, self.stride, self.width, self.s_panels);
            s.packed = [cx.parts.state, cx.kd.div_ceil(DEPTH)];
            product(cx, self.o, &keys.q, &s, [CHUNK, self.width, cx.kd], Part::Whole, Sum::Fresh, &mut self.ahead);
            let scale = cx.problem.scale();
            let factor = gates.head.map(|e| scale * e);
            cx.kernels.stage(Stage::ScaleRows { out: self.u, x: self.o, factor: &factor, width: self.stride });
            let scales = [scale; CHUNK];
            cx.kernels.stage(Stage::Weigh { out: self.ag.rows, x: keys.qk, g: self.g, factor: &scales });
            self.ag.pack_left(cx, CHUNK, cx.parts.weights);
            self.vn.pack_right(cx, CHUNK, cx.parts.weights);
            product(cx, self.u, &self.ag, &self.vn, size, Part::LowerLeft, Sum::Onto, &mut self.ahead);
            std::mem::swap(&mut self.o, &mut self.u);
        }
        self.ask(cx, 4 * CHUNK);
        // S' = e_last S + K^T (t V')
        if cx.matrix.is_some() {
            self.vn.pack_scaled(cx, &tail, cx.parts.state, &mut self.w);
        } else {
            cx.kernels.stage(Stage::Fade { x: state, factor: gates.head[CHUNK - 1] });
            cx.kernels.stage(Stage::ScaleRows { out: self.w.rows, x: self.vn.rows, factor: &tail, width: self.stride });
        }
        let size = [cx.kd, self.width, CHUNK];
        product_turned(cx, state, &keys.k, &keys.k_turned, &self.w, size, &mut self.ahead);
    }

    /// U, W, V' and everything before them; leaves G, A and Ag behind. Where the matrix unit works, S has faded afterwards,
    /// and what it was lies in its panels.
    pub fn corrections(
        &mut self,
        cx: &Context<'_>,
        keys: &Shared<'_>,
        at: &Place<'_>,
        gates: &Gates,
        first: usize,
        state: &mut [f32],
    ) {
        self.ask(cx, 32);
        cx.kernels.stage(Stage::Decays { decay: &gates.decay, g: self.g });
        self.solve(cx, keys, gates);
        cx.kernels.stage(Stage::Weigh { out: self.ag.rows, x: self.a, g: self.g, factor: &gates.beta });
        let v_rows = cx.bound.rows(cx.bound.v().strides(), at.sequence);
        cx.load_values(cx.bound.v(), &v_rows, at, first, self.v, self.stride);
        let mut s = Operand::new(state, self.stride, self.width, self.s_panels);
        s.pack_faded(cx, cx.kd, gates.head[CHUNK - 1], cx.parts.state);
        product(cx, self.u, &keys.k, &s, [CHUNK, self.width, cx.kd], Part::Whole, Sum::Fresh, &mut self.ahead);
        let (out, factor) = (&mut *self.w.rows, &gates.head);
        cx.kernels.stage(Stage::Residual { out, x: self.v, y: self.u, factor, width: self.stride });
        self.ag.pack_left(cx, CHUNK, cx.parts.inverse);
        self.w.pack_right(cx, CHUNK, cx.parts.state);
        let size = [CHUNK, self.width, CHUNK];
        product(cx, self.vn.rows, &self.ag, &self.w, size, Part::LowerLeft, Sum::Fresh, &mut self.ahead);
    }

    /// A = (1 + strictly lower (beta K K^T))^-1: squares on the diagonal by substitution, then row by row of squares
    /// `A_ij = -A_ii (L A)_ij`. Always by the vectors, in f32.
    fn solve(&mut self, cx: &Context<'_>, keys: &Shared<'_>, gates: &Gates) {
        let l = &mut *self.ag.rows;
        cx.kernels.stage(Stage::ScaleRows { out: l, x: keys.kk, factor: &gates.beta, width: CHUNK });
        let (product, negative) = self.scratch.split_at_mut(INVERT * CHUNK);
        let mut ahead = Ahead::default();
        for block in (0..CHUNK).step_by(INVERT) {
            let at = block * CHUNK + block;
            if cx.matrix.is_some() {
                self.ahead.take(24);
            }
            cx.kernels.stage(Stage::Invert { l: &l[at..], a: &mut self.a[at..], stride: CHUNK });
            if block == 0 {
                continue;
            }
            let (above, own) = self.a.split_at_mut(block * CHUNK);
            let left = Matrix::new(l, CHUNK).at(block, 0);
            let size = [INVERT, block, block];
            let to = MatrixMut::at(product, CHUNK, 0, 0);
            cx.kernels.gemm(to, left, Matrix::new(above, CHUNK), size, Sum::Fresh, &mut ahead);
            for i in 0..INVERT {
                for j in 0..INVERT {
                    negative[i * INVERT + j] = -own[i * CHUNK + block + j];
                }
            }
            let to = MatrixMut::at(own, CHUNK, 0, 0);
            let (left, right) = (Matrix::new(negative, INVERT), Matrix::new(product, CHUNK));
            cx.kernels.gemm(to, left, right, [INVERT, block, INVERT], Sum::Fresh, &mut ahead);
        }
    }
}
