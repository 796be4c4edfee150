//! One chunk of 64 tokens on vectors: first the part that depends on keys and queries alone, then that of each value
//! head.
//!
//! Letters: G_ij = decay from token j to i, L = strictly lower (beta K K^T), A = (1 + L)^-1, Ag = G (A diag(beta)),
//! e = decay from before the chunk, t = decay to its end.
//!
//! ```text
//! W = V - e (K S)       V' = Ag W       O = scale (e (Q S) + (G (Q K^T)) V')       S' = e_last S + K^T (t V')
//! ```

use super::{Context, ValueHead};
use crate::memory::Arena;
use crate::simd::{Ahead, INVERT, Matrix, MatrixMut, Stage, Sum, TOKENS};
use fulgurite_core::gated_delta::Tokens;

/// Tokens of a chunk.
pub(super) const CHUNK: usize = TOKENS;
/// Rows processed at once if a triangle is skipped.
const STEP: usize = 32;

/// The purpose of a pass over a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Computes the state after it.
    State,
    /// Computes outputs and state.
    Outputs,
}

impl Need {
    pub fn of(outputs: bool) -> Self {
        if outputs { Need::Outputs } else { Need::State }
    }
}

/// Decays and step sizes of a chunk of one value head; tokens past the end have decay 1 and step 0.
pub(super) struct Gates {
    pub decay: [f32; CHUNK],
    pub beta: [f32; CHUNK],
    /// Decay from before the chunk to each token.
    pub head: [f32; CHUNK],
}

impl Gates {
    pub fn new(cx: &Context<'_>, at: &ValueHead<'_>, first: usize) -> Self {
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

/// What of a product is a lower triangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lower {
    /// Only the lower triangle of the result is needed; elements above it are arbitrary.
    Result,
    /// The left operand is a lower triangle.
    Left,
    /// Both.
    Both,
}

/// C (+)= A B of a lower triangle, A m x k and B k x n; rows of C and B are as far apart.
pub(super) fn product(
    cx: &Context<'_>,
    c: &mut [f32],
    [a, b]: [Matrix<'_>; 2],
    [m, n, k]: [usize; 3],
    lower: Lower,
    sum: Sum,
    ahead: &mut Ahead,
) {
    for row in (0..m).step_by(STEP) {
        let rows = STEP.min(m - row);
        let n = if lower == Lower::Left { n } else { (row + rows).min(n) };
        let k = if lower == Lower::Result { k } else { (row + rows).min(k) };
        cx.kernels.gemm(MatrixMut::at(c, b.stride, row, 0), a.at(row, 0), b, [rows, n, k], sum, ahead);
    }
}

/// C (+)= A^T B of a lower triangle A, k x k, and B k x n; rows of C and B are as far apart.
pub(super) fn product_transposed(
    cx: &Context<'_>,
    c: &mut [f32],
    [a, b]: [Matrix<'_>; 2],
    [n, k]: [usize; 2],
    lower: Lower,
    sum: Sum,
    ahead: &mut Ahead,
) {
    for row in (0..k).step_by(STEP) {
        let rows = STEP.min(k - row);
        let n = if lower == Lower::Left { n } else { (row + rows).min(n) };
        let to = MatrixMut::at(c, b.stride, row, 0);
        cx.kernels.gemm_transposed(to, a.at(row, row), b.at(row, 0), [rows, n, k - row], sum, ahead);
    }
}

/// Clears what [`Lower::Result`] leaves of a square.
pub(super) fn clear_above(square: &mut [f32]) {
    for (i, row) in square.chunks_exact_mut(CHUNK).enumerate() {
        row[((i / STEP + 1) * STEP).min(CHUNK)..].fill(0.0);
    }
}

/// Data that the value heads of a key head share.
pub(super) struct Shared<'w> {
    pub k: &'w mut [f32],
    pub q: &'w mut [f32],
    /// K^T, `[key_dim][token]`.
    pub kt: &'w mut [f32],
    /// K K^T and Q K^T, lower triangles.
    pub kk: &'w mut [f32],
    pub qk: &'w mut [f32],
    /// 1 / length of each row of q and k.
    pub inverse_norms: [Vec<f32>; 2],
}

impl<'w> Shared<'w> {
    fn sizes(cx: &Context<'_>) -> [usize; 5] {
        let (rows, square) = (CHUNK * cx.kp, CHUNK * CHUNK);
        [rows, rows, rows, square, square]
    }
    pub fn room(cx: &Context<'_>) -> usize {
        Self::sizes(cx).into_iter().map(Arena::room).sum()
    }
    pub fn new(cx: &Context<'_>, arena: &mut Arena<'w>) -> Self {
        let [k, q, kt, kk, qk] = Self::sizes(cx).map(|n| arena.take(n));
        [&mut *kk, &mut *qk].into_iter().for_each(|x| x.fill(0.0));
        Shared { k, q, kt, kk, qk, inverse_norms: [Vec::new(), Vec::new()] }
    }

    /// Loads the tokens of a key head, starting at `first`.
    pub fn load(&mut self, cx: &Context<'_>, s: &Tokens, key_head: usize, first: usize, need: Need, ahead: &mut Ahead) {
        self.inverse_norms[1] = cx.load_keys(cx.bound.k(), s, key_head, first, self.k);
        cx.kernels.transpose(self.k, cx.kp, self.kt, CHUNK, CHUNK, cx.kp);
        let size = [CHUNK, CHUNK, cx.kd];
        let operands = |left| [Matrix::new(left, cx.kp), Matrix::new(self.kt, CHUNK)];
        product(cx, self.kk, operands(self.k), size, Lower::Result, Sum::Fresh, ahead);
        if need == Need::Outputs {
            self.inverse_norms[0] = cx.load_keys(cx.bound.q(), s, key_head, first, self.q);
            product(cx, self.qk, operands(self.q), size, Lower::Result, Sum::Fresh, ahead);
        }
    }
}

/// Data of one value head in a chunk. The values have `width` columns: more than v if the map of a segment is computed
/// along with its state.
pub(super) struct ChunkData<'w> {
    width: usize,
    stride: usize,
    /// G, A and Ag (then the weights of the outputs), `[token][token]`.
    pub g: &'w mut [f32],
    pub a: &'w mut [f32],
    pub ag: &'w mut [f32],
    pub v: &'w mut [f32],
    /// K S.
    pub u: &'w mut [f32],
    pub w: &'w mut [f32],
    pub vn: &'w mut [f32],
    /// O, or t V' before it joins the state.
    pub o: &'w mut [f32],
    scratch: &'w mut [f32],
    /// Rows that will be read and written next, prefetched during products because tokens are far apart.
    pub ahead: Ahead,
}

impl<'w> ChunkData<'w> {
    fn sizes(cx: &Context<'_>, width: usize) -> [usize; 9] {
        let (square, values) = (CHUNK * CHUNK, CHUNK * cx.stride(width));
        [square, square, square, values, values, values, values, values, INVERT * (CHUNK + INVERT)]
    }
    pub fn room(cx: &Context<'_>, width: usize) -> usize {
        Self::sizes(cx, width).into_iter().map(Arena::room).sum::<usize>()
    }
    pub fn new(cx: &Context<'_>, arena: &mut Arena<'w>, width: usize) -> Self {
        let [g, a, ag, v, u, w, vn, o, scratch] = Self::sizes(cx, width).map(|n| arena.take(n));
        // Elements that are never written (above the diagonal, past the columns) must be finite.
        [&mut *a, &mut *v, &mut *u, &mut *w, &mut *vn, &mut *o].into_iter().for_each(|x| x.fill(0.0));
        ChunkData { width, stride: cx.stride(width), g, a, ag, v, u, w, vn, o, scratch, ahead: Ahead::default() }
    }

    /// Processes a chunk starting at `first`: `state` becomes the state after it, and `o` the outputs.
    pub fn chunk(
        &mut self,
        cx: &Context<'_>,
        keys: &Shared<'_>,
        at: &ValueHead<'_>,
        first: usize,
        state: &mut [f32],
        need: Need,
    ) {
        let gates = Gates::new(cx, at, first);
        self.corrections(cx, keys, at, &gates, first, state);
        let (size, stride) = ([CHUNK, self.width, CHUNK], self.stride);
        let tail: [f32; CHUNK] = std::array::from_fn(|j| self.g[(CHUNK - 1) * CHUNK + j]);
        if need == Need::Outputs {
            // O = scale e (Q S) + Pg V'
            let (q, s) = (Matrix::new(keys.q, cx.kp), Matrix::new(state, stride));
            let to = MatrixMut::at(self.o, stride, 0, 0);
            cx.kernels.gemm(to, q, s, [CHUNK, self.width, cx.kd], Sum::Fresh, &mut self.ahead);
            let scale = cx.problem.scale();
            let factor = gates.head.map(|e| scale * e);
            cx.kernels.stage(Stage::ScaleRows { out: self.u, x: self.o, factor: &factor, width: stride });
            let scales = [scale; CHUNK];
            cx.kernels.stage(Stage::Weigh { out: self.ag, x: keys.qk, g: self.g, factor: &scales });
            let operands = [Matrix::new(self.ag, CHUNK), Matrix::new(self.vn, stride)];
            product(cx, self.u, operands, size, Lower::Left, Sum::Onto, &mut self.ahead);
            std::mem::swap(&mut self.o, &mut self.u);
        }
        // S' = e_last S + K^T (t V')
        cx.kernels.stage(Stage::Fade { x: state, factor: gates.head[CHUNK - 1] });
        cx.kernels.stage(Stage::ScaleRows { out: self.w, x: self.vn, factor: &tail, width: stride });
        let (k, faded) = (Matrix::new(keys.k, cx.kp), Matrix::new(self.w, stride));
        let size = [cx.kd, self.width, CHUNK];
        let to = MatrixMut::at(state, stride, 0, 0);
        cx.kernels.gemm_transposed(to, k, faded, size, Sum::Onto, &mut self.ahead);
    }

    /// Computes U, W, V' and everything before them; leaves G, A and Ag.
    pub fn corrections(
        &mut self,
        cx: &Context<'_>,
        keys: &Shared<'_>,
        at: &ValueHead<'_>,
        gates: &Gates,
        first: usize,
        state: &[f32],
    ) {
        cx.kernels.stage(Stage::Decays { decay: &gates.decay, g: self.g });
        self.solve(cx, keys, gates);
        cx.kernels.stage(Stage::Weigh { out: self.ag, x: self.a, g: self.g, factor: &gates.beta });
        let v_rows = cx.bound.row_layout(cx.bound.v().strides(), at.sequence);
        cx.load_values(cx.bound.v(), &v_rows, at, first, self.v, self.stride);
        let (k, s) = (Matrix::new(keys.k, cx.kp), Matrix::new(state, self.stride));
        let to = MatrixMut::at(self.u, self.stride, 0, 0);
        cx.kernels.gemm(to, k, s, [CHUNK, self.width, cx.kd], Sum::Fresh, &mut self.ahead);
        let factor = &gates.head;
        cx.kernels.stage(Stage::Residual { out: self.w, x: self.v, y: self.u, factor, width: self.stride });
        let operands = [Matrix::new(self.ag, CHUNK), Matrix::new(self.w, self.stride)];
        let size = [CHUNK, self.width, CHUNK];
        product(cx, self.vn, operands, size, Lower::Left, Sum::Fresh, &mut self.ahead);
    }

    /// A = (1 + strictly lower (beta K K^T))^-1: squares on the diagonal by substitution, then row by row of squares
    /// `A_ij = -A_ii (L A)_ij`.
    fn solve(&mut self, cx: &Context<'_>, keys: &Shared<'_>, gates: &Gates) {
        let l = &mut *self.ag;
        cx.kernels.stage(Stage::ScaleRows { out: l, x: keys.kk, factor: &gates.beta, width: CHUNK });
        let (product, negative) = self.scratch.split_at_mut(INVERT * CHUNK);
        let mut ahead = Ahead::default();
        for block in (0..CHUNK).step_by(INVERT) {
            let at = block * CHUNK + block;
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
