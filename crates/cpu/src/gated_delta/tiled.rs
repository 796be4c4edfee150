//! A chunk of 64 tokens on the matrix unit. Letters as in [`super::chunk`], in two halves of 32 tokens, 0 and 1:
//!
//! ```text
//! W = V - e (K S)    T = (1 + strictly lower (beta K K^T G))^-1 diag(beta), of either half    M = K K^T G below them
//! V'_0 = T_0 W_0     V'_1 = T_1 (W_1 - M V'_0)     O = scale e (Q S) + (scale G Q K^T) V'     S' = e_last S + K^T (t V')
//! ```
//!
//! Columns of values are independent, so they are processed a slice at a time: the data that a slice passes from
//! product to product stay in the L1 cache. Steps of two slices alternate, so that tiles are multiplied while vectors
//! work on something else.

use super::{Context, Out, ValueHead};
use crate::memory::Arena;
use crate::simd::{
    Ahead, DEPTH, DeltaGates, DeltaKernels, DeltaValues, GROUP, HALF, MatrixKernels, MatrixMut, Panels, SLICE, Source,
    Sum, TOKENS,
};
use fulgurite_core::TensorView;
use fulgurite_core::gated_delta::{L2_EPS, QkNorm, Tokens};
use std::ops::Range;

/// Row groups per half.
const GROUPS: usize = HALF / GROUP;
/// Elements of an f32 result of a slice.
const RESULT: usize = TOKENS * SLICE;
/// Rows prefetched between two steps of a slice: for bf16 and d = 128, as many lines as a core can wait for at a time.
/// With more it would stall.
const ASK: usize = 4;

pub(super) struct Tiled<'w> {
    matrix: &'static MatrixKernels,
    delta: &'static DeltaKernels,
    /// Columns of the states; more than those of v if the map of a segment is computed along with its state.
    width: usize,
    stride: usize,
    /// Panels of K and Q, of K^T as right operand, and of K^T as left operand.
    k: &'w mut [f32],
    q: &'w mut [f32],
    k_columns: &'w mut [f32],
    k_rows: &'w mut [f32],
    /// K K^T and Q K^T, lower triangles.
    kk: &'w mut [f32],
    qk: &'w mut [f32],
    /// L, and panels of T, M and the weights of outputs.
    l: &'w mut [f32],
    inverse: &'w mut [f32],
    between: &'w mut [f32],
    weights: &'w mut [f32],
    head: [f32; TOKENS],
    tail: [f32; TOKENS],
    /// Data of a slice: panels of S (of two slices) and W; K S, Q S, M V'_0, V', and the weights times V'.
    s: [&'w mut [f32]; 2],
    w: &'w mut [f32],
    u: &'w mut [f32],
    qs: &'w mut [f32],
    less: &'w mut [f32],
    values: &'w mut [f32],
    o: &'w mut [f32],
    /// Panels of V', and of t V' for two slices.
    whole: &'w mut [f32],
    faded: [&'w mut [f32]; 2],
    /// Rows that will be read and written next.
    pub ahead: Ahead,
}

/// The outputs of a chunk, and its number of tokens.
struct To<'a, 'b> {
    out: Option<&'a Out<'b>>,
    at: ValueHead<'a>,
    first: usize,
    tokens: usize,
}

/// The left operand of a product with the state.
#[derive(Clone, Copy)]
enum Left {
    Keys,
    Queries,
}

impl<'w> Tiled<'w> {
    fn sizes(cx: &Context<'_>, delta: &DeltaKernels) -> [usize; 19] {
        let (parts, depth) = (&delta.parts, cx.kd.div_ceil(DEPTH));
        let keys = Panels::room(TOKENS / GROUP, depth, parts.keys);
        let turned = Panels::room(cx.kd.div_ceil(GROUP), TOKENS / DEPTH, parts.keys);
        let square = TOKENS * TOKENS;
        let triangle = Panels::room(GROUPS, 1, parts.inverse);
        let weights = Panels::room(TOKENS / GROUP, 2, parts.weights);
        let [state, w, values] = [depth, 1, 2].map(|depth| Panels::room(SLICE / GROUP, depth, parts.state));
        [
            keys,
            keys,
            keys,
            turned,
            square,
            square,
            square,
            2 * triangle,
            triangle,
            weights,
            2 * state,
            w,
            RESULT,
            RESULT,
            RESULT / 2,
            RESULT / 2,
            RESULT,
            values,
            2 * values,
        ]
    }

    pub fn room(cx: &Context<'_>, matrix: &MatrixKernels) -> usize {
        Self::sizes(cx, matrix.delta(cx.problem.dtype())).into_iter().map(Arena::room).sum()
    }

    pub fn new(cx: &Context<'_>, matrix: &'static MatrixKernels, arena: &mut Arena<'w>, width: usize) -> Self {
        let delta = matrix.delta(cx.problem.dtype());
        let rooms = Self::sizes(cx, delta).map(|n| arena.take(n));
        let [k, q, k_columns, k_rows, kk, qk, l, inverse, between, weights, s, w, u, qs, less, values, o, whole, faded] =
            rooms;
        // Elements that are never written (above the diagonal) must be finite.
        [&mut *kk, &mut *qk].into_iter().for_each(|x| x.fill(0.0));
        let [s, faded] = [s, faded].map(|x| {
            let (even, odd) = x.split_at_mut(x.len() / 2);
            [even, odd]
        });
        Tiled {
            matrix,
            delta,
            width,
            stride: cx.stride(width),
            k,
            q,
            k_columns,
            k_rows,
            kk,
            qk,
            l,
            inverse,
            between,
            weights,
            head: [0.0; TOKENS],
            tail: [0.0; TOKENS],
            s,
            w,
            u,
            qs,
            less,
            values,
            o,
            whole,
            faded,
            ahead: Ahead::default(),
        }
    }

    /// Loads the tokens of a key head, starting at `first`; also queries if there will be outputs.
    pub fn load(&mut self, cx: &Context<'_>, s: &Tokens, key_head: usize, first: usize, outputs: bool) {
        let eps = (cx.problem.qk_norm() == QkNorm::Inside).then_some(L2_EPS as f32);
        let (parts, depth) = (self.delta.parts.keys, cx.kd.div_ceil(DEPTH));
        let source = |view: &TensorView<'_>| {
            let rows = cx.bound.row_layout(view.strides(), s);
            (rows.at(first, key_head), rows.row)
        };
        let pack = |view: &TensorView<'_>, to: &mut [f32]| {
            let (offset, row) = source(view);
            let from = Source { data: view.data(), offset, row, rows: TOKENS.min(s.len - first), n: cx.kd };
            self.delta.pack_keys(&from, eps, to);
        };
        pack(cx.bound.k(), self.k);
        self.delta.transpose_keys(self.k, cx.kd, self.k_columns, self.k_rows);
        if outputs {
            pack(cx.bound.q(), self.q);
        }
        let columns = Panels::new(self.k_columns, depth, parts);
        for (to, left) in
            [(&mut *self.kk, &*self.k), (&mut *self.qk, &*self.q)].into_iter().take(1 + usize::from(outputs))
        {
            let left = Panels::new(left, depth, parts);
            for half in 0..2 {
                let c = MatrixMut::at(to, TOKENS, half * HALF, 0);
                let size = [GROUPS, (half + 1) * GROUPS, depth];
                self.matrix.multiply(c, left.at(half * GROUPS, 0), columns, size, Sum::Fresh, &mut Ahead::default());
            }
        }
    }

    /// Processes a chunk starting at `first`: `state` becomes the state after it, and `out` gets its outputs.
    pub fn chunk(
        &mut self,
        cx: &Context<'_>,
        at: &ValueHead<'_>,
        first: usize,
        state: &mut [f32],
        out: Option<&Out<'_>>,
    ) {
        let to = To { out, at: *at, first, tokens: TOKENS.min(at.sequence.len - first) };
        let (mut g, mut beta) = ([0.0f32; TOKENS], [0.0f32; TOKENS]);
        for i in 0..to.tokens {
            let gate = cx.bound.gate(at.sequence, first + i, at.head);
            (g[i], beta[i]) = (cx.bound.g()[gate], cx.bound.beta()[gate]);
        }
        self.ahead.take(ASK);
        self.delta.weigh(DeltaGates {
            g: &g,
            beta: &beta,
            kk: self.kk,
            qk: self.qk,
            scale: cx.problem.scale(),
            l: self.l,
            inverse: self.inverse,
            between: self.between,
            weights: self.weights,
            head: &mut self.head,
            tail: &mut self.tail,
        });
        let slices = self.width.div_ceil(SLICE);
        self.fade(cx, state, 0, 0..4);
        for slice in 0..slices {
            self.slice(cx, &to, state, slice);
        }
        for half in 0..2 {
            self.update(cx, state, slices - 1, half);
            self.write(cx, &to, slices - 1, half);
        }
    }

    fn groups(&self, slice: usize) -> usize {
        ((self.width - slice * SLICE) / GROUP).min(SLICE / GROUP)
    }

    /// Processes a slice up to its outputs, which are not written yet, and also the end of the previous slice and the
    /// start of the next. Tiles and vectors alternate, each on different data: both are busy most of the time, and the
    /// unit does not power down, which it does in less than a microsecond (lab 009).
    fn slice(&mut self, cx: &Context<'_>, to: &To<'_, '_>, state: &mut [f32], slice: usize) {
        let (parts, depth, groups) = (self.delta.parts, cx.kd.div_ceil(DEPTH), self.groups(slice));
        let (outputs, matrix, before) = (to.out.is_some(), self.matrix, slice.checked_sub(1));
        for half in 0..2 {
            self.of_state(Left::Keys, slice, half, [GROUPS, groups, depth]);
            if let Some(before) = before {
                self.write(cx, to, before, half);
            }
            self.ahead.take(ASK);
        }
        for half in 0..2 {
            if outputs {
                self.of_state(Left::Queries, slice, half, [GROUPS, groups, depth]);
            }
            self.ahead.take(ASK);
            self.residual(cx, to, slice, half);
            self.ahead.take(ASK);
            let inverse = &self.inverse[half * Panels::room(GROUPS, 1, parts.inverse)..];
            let (inverse, w) = (Panels::new(inverse, 1, parts.inverse), Panels::new(self.w, 1, parts.state));
            multiply(matrix, self.values, inverse, w, [GROUPS, groups, 1]);
            self.ahead.take(ASK);
            self.fade(cx, state, slice + 1, 2 * half..2 * half + 1);
            if let Some(before) = before {
                self.update(cx, state, before, half);
            }
            self.ahead.take(ASK);
            self.delta.pack_values(DeltaValues {
                values: self.values,
                tail: &self.tail[half * HALF..],
                half,
                groups,
                whole: self.whole,
                faded: self.faded[slice % 2],
            });
            if half == 0 {
                let between = Panels::new(self.between, 1, parts.inverse);
                let whole = Panels::new(self.whole, 2, parts.state);
                multiply(matrix, self.less, between, whole, [GROUPS, groups, 1]);
            }
            self.ahead.take(ASK);
            self.fade(cx, state, slice + 1, 2 * half + 1..2 * half + 2);
            self.ahead.take(ASK);
        }
        for half in (0..2).filter(|_| outputs) {
            let weights = Panels::new(self.weights, 2, parts.weights).at(half * GROUPS, 0);
            let values = Panels::new(self.whole, 2, parts.state).first(parts.weights);
            let c = &mut self.o[half * HALF * SLICE..];
            multiply(matrix, c, weights, values, [GROUPS, groups, half + 1]);
        }
    }

    /// Packs quarters of a slice's state, if there is one, and decays them.
    fn fade(&mut self, cx: &Context<'_>, state: &mut [f32], slice: usize, quarters: Range<usize>) {
        let (column, depth) = (slice * SLICE, cx.kd.div_ceil(DEPTH));
        if column < self.width {
            let tiles = (quarters.start * depth).div_ceil(4)..(quarters.end * depth).div_ceil(4);
            let size = [self.stride, cx.kd, self.groups(slice)];
            let factor = self.head[TOKENS - 1];
            self.delta.pack_faded(&mut state[column..], size, tiles, factor, self.s[slice % 2]);
        }
    }

    /// K S or Q S of half the tokens.
    fn of_state(&mut self, left: Left, slice: usize, half: usize, size: [usize; 3]) {
        let parts = self.delta.parts;
        let (left, c, used) = match left {
            Left::Keys => (&*self.k, &mut *self.u, parts.state),
            Left::Queries => (&*self.q, &mut *self.qs, parts.weights),
        };
        let left = Panels::new(left, size[2], parts.keys).at(half * GROUPS, 0);
        let state = Panels::new(self.s[slice % 2], size[2], parts.state).first(used);
        multiply(self.matrix, &mut c[half * HALF * SLICE..], left, state, size);
    }

    /// W of a half; later tokens are corrected by earlier ones.
    fn residual(&mut self, cx: &Context<'_>, to: &To<'_, '_>, slice: usize, half: usize) {
        let v = cx.bound.v();
        let rows = cx.bound.row_layout(v.strides(), to.at.sequence);
        let (first, column) = (half * HALF, slice * SLICE);
        let (count, n) = (to.tokens.saturating_sub(first).min(HALF), cx.vd.saturating_sub(column).min(SLICE));
        // Read nothing if the range is empty.
        let offset = if count == 0 || n == 0 { 0 } else { rows.at(to.first + first, to.at.head) + column };
        let from = Source { data: v.data(), offset, row: rows.row, rows: count, n };
        let less = (half == 1).then_some(&*self.less);
        let u = &self.u[first * SLICE..];
        self.delta.residual(&from, u, less, &self.head[first..], self.groups(slice), self.w);
    }

    /// S' of half the rows of a slice.
    fn update(&mut self, cx: &Context<'_>, state: &mut [f32], slice: usize, half: usize) {
        let parts = self.delta.parts;
        let all = cx.kd.div_ceil(GROUP);
        let cut = (all / 2).next_multiple_of(2).min(all);
        let rows = if half == 0 { 0..cut } else { cut..all };
        if rows.is_empty() {
            return;
        }
        let c = MatrixMut::at(state, self.stride, rows.start * GROUP, slice * SLICE);
        let keys = Panels::new(self.k_rows, 2, parts.keys).at(rows.start, 0);
        let faded = Panels::new(self.faded[slice % 2], 2, parts.state);
        let size = [rows.len(), self.groups(slice), 2];
        self.matrix.multiply(c, keys, faded, size, Sum::Onto, &mut Ahead::default());
    }

    /// Writes the outputs of half the tokens of a slice.
    fn write(&self, cx: &Context<'_>, to: &To<'_, '_>, slice: usize, half: usize) {
        let Some(out) = to.out else { return };
        let (first, column, scale) = (half * HALF, slice * SLICE, cx.problem.scale());
        let (count, n) = (to.tokens.saturating_sub(first).min(HALF), cx.vd.saturating_sub(column).min(SLICE));
        if count == 0 || n == 0 {
            return;
        }
        let rows = cx.bound.row_layout(out.o_strides, to.at.sequence);
        let factor: [f32; HALF] = std::array::from_fn(|i| scale * self.head[first + i]);
        let offset = rows.at(to.first + first, to.at.head) + column;
        let to = out.o.rows_mut_ptr(offset, [rows.row, count, n]);
        let (x, y) = (&self.qs[first * SLICE..], &self.o[first * SLICE..]);
        // SAFETY: every token of a value head is written by one item, and the rows lie in the tensor.
        unsafe { self.delta.outputs(x, y, &factor, to, [rows.row, count, n], out.o.is_large()) };
    }
}

/// C = A B of a slice.
fn multiply(matrix: &MatrixKernels, c: &mut [f32], a: Panels<'_>, b: Panels<'_>, size: [usize; 3]) {
    matrix.multiply(MatrixMut::at(c, SLICE, 0, 0), a, b, size, Sum::Fresh, &mut Ahead::default());
}
