//! Products of chunk-sized matrices: by the vectors, or on the matrix unit with operands rounded to bf16.

use super::Context;
use crate::simd::{Ahead, DEPTH, GROUP, Matrix, MatrixKernels, MatrixMut, Panels, Source, Sum};
use half::bf16;

/// Rows that are taken at once where a triangle is left out.
const STEP: usize = 32;

/// What of a product is wanted or known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// All of it.
    Whole,
    /// The lower triangle of the result, more or less: what lies above may be anything that was there.
    LowerResult,
    /// The left operand is a lower triangle.
    LowerLeft,
}

/// A row-major matrix, and the same packed for the matrix unit (empty for the vectors).
pub(super) struct Operand<'w> {
    pub rows: &'w mut [f32],
    pub stride: usize,
    /// Columns in use.
    pub n: usize,
    pub panels: &'w mut [f32],
    /// Parts of bf16 that a right operand is packed in.
    pub parts: usize,
}

/// Parts of a right operand from which states come: they are sums over the whole sequence, and roundings add up.
pub(super) const EXACT: usize = 2;

impl Operand<'_> {
    /// Elements for panels of a left operand of `rows` x `k`, or a right one of `k` x `rows`.
    pub fn room(cx: &Context<'_>, rows: usize, k: usize, parts: usize) -> usize {
        if cx.matrix.is_some() { Panels::room(rows.div_ceil(GROUP), k.div_ceil(DEPTH), parts) } else { 0 }
    }

    /// Packs rows as rows of a left operand, `k` elements each.
    pub fn pack_left(&mut self, cx: &Context<'_>, k: usize, narrow: &mut Narrow) {
        let Some(matrix) = cx.matrix else { return };
        narrow.rows.resize(self.rows.len(), bf16::ZERO);
        cx.kernels.narrow_bf16(self.rows, &mut narrow.rows);
        // Rows of bf16 are packed as they lie, in pairs of neighbours; the right operand has pairs half a tile apart.
        const HALF: usize = DEPTH / 2;
        let (rows, row) = (self.rows.len() / self.stride, k.next_multiple_of(DEPTH));
        narrow.ordered.resize(rows * row, bf16::ZERO);
        for (to, from) in narrow.ordered.chunks_exact_mut(row).zip(narrow.rows.chunks_exact(self.stride)) {
            for (to, from) in to.as_chunks_mut::<DEPTH>().0.iter_mut().zip(from[..k].chunks(DEPTH)) {
                let mut own = [bf16::ZERO; DEPTH];
                own[..from.len()].copy_from_slice(from);
                for i in 0..HALF {
                    to[2 * i] = own[i];
                    to[2 * i + 1] = own[HALF + i];
                }
            }
        }
        let from = Source { data: (&narrow.ordered).into(), offset: 0, row, rows, n: row };
        matrix.pack_rows(&from, self.panels, k.div_ceil(DEPTH));
    }

    /// Packs rows as the summed axis of a left operand, into other panels. `narrow` holds what
    /// [`pack_left`](Self::pack_left) has made of the same rows.
    pub fn pack_turned(&self, cx: &Context<'_>, n: usize, narrow: &Narrow, to: &mut [f32]) {
        let Some(matrix) = cx.matrix else { return };
        let rows = self.rows.len() / self.stride;
        let from = Source { data: (&narrow.rows).into(), offset: 0, row: self.stride, rows, n };
        matrix.pack_turned(&from, to, rows.div_ceil(DEPTH));
    }

    /// Packs as a right operand: `k` rows of the summed axis.
    pub fn pack_right(&mut self, cx: &Context<'_>, k: usize) {
        let Some(matrix) = cx.matrix else { return };
        let room = Panels::room(1, k.div_ceil(DEPTH), self.parts);
        for (z, to) in self.panels.chunks_exact_mut(room).take(self.n / GROUP).enumerate() {
            matrix.pack_lanes(&self.rows[z * GROUP..], self.stride, [0, k], to, self.parts);
        }
    }
}

/// Rows in bf16 on their way to panels: as they are, and in the order of tiles.
#[derive(Default)]
pub(super) struct Narrow {
    rows: Vec<bf16>,
    ordered: Vec<bf16>,
}

/// C (+)= A B, A m x k and B k x n, both packed where the matrix unit works.
#[allow(clippy::too_many_arguments)] // as for every product
pub(super) fn product(
    cx: &Context<'_>,
    c: &mut [f32],
    a: &Operand<'_>,
    b: &Operand<'_>,
    [m, n, k]: [usize; 3],
    part: Part,
    sum: Sum,
    ahead: &mut Ahead,
) {
    multiply(cx, cx.matrix, c, a, b, [m, n, k], part, sum, ahead);
}

/// The same by the vectors, in f32: nothing is rounded, and nothing has to be packed.
pub(super) fn product_exact(
    cx: &Context<'_>,
    c: &mut [f32],
    a: &Operand<'_>,
    b: &Operand<'_>,
    size: [usize; 3],
    part: Part,
    ahead: &mut Ahead,
) {
    multiply(cx, None, c, a, b, size, part, Sum::Fresh, ahead);
}

#[allow(clippy::too_many_arguments)] // as for every product
fn multiply(
    cx: &Context<'_>,
    matrix: Option<&MatrixKernels>,
    c: &mut [f32],
    a: &Operand<'_>,
    b: &Operand<'_>,
    [m, n, k]: [usize; 3],
    part: Part,
    sum: Sum,
    ahead: &mut Ahead,
) {
    let stride = b.stride;
    let step = if part == Part::Whole { m } else { STEP };
    for row in (0..m).step_by(step) {
        let rows = step.min(m - row);
        let n = if part == Part::LowerResult { (row + rows).min(n) } else { n };
        let k = if part == Part::LowerLeft { (row + rows).min(k) } else { k };
        let to = MatrixMut::at(c, stride, row, 0);
        if let Some(matrix) = matrix {
            let pa = Panels::new(a.panels, a_depth(a), 1).at(row / GROUP, 0);
            let pb = Panels::new(b.panels, b_depth(b), b.parts);
            let size = [rows.div_ceil(GROUP), n / GROUP, k.div_ceil(DEPTH)];
            matrix.multiply(to, pa, pb, size, sum, ahead);
        } else {
            let left = Matrix::new(a.rows, a.stride).at(row, 0);
            cx.kernels.gemm(to, left, Matrix::new(b.rows, b.stride), [rows, n, k], sum, ahead);
        }
    }
}

/// Tiles along the summed axis of packed operands: panels are sized exactly.
fn a_depth(a: &Operand<'_>) -> usize {
    a.panels.len() / Panels::room((a.rows.len() / a.stride).div_ceil(GROUP), 1, 1)
}
fn b_depth(b: &Operand<'_>) -> usize {
    b.panels.len() / Panels::room(b.n / GROUP, 1, b.parts)
}

/// C += A^T B, A k x m in rows (and `turned` for the matrix unit), B k x n.
pub(super) fn product_turned(
    cx: &Context<'_>,
    c: &mut [f32],
    a: &Operand<'_>,
    turned: &[f32],
    b: &Operand<'_>,
    [m, n, k]: [usize; 3],
    ahead: &mut Ahead,
) {
    let to = MatrixMut::at(c, b.stride, 0, 0);
    if let Some(matrix) = cx.matrix {
        let pa = Panels::new(turned, k.div_ceil(DEPTH), 1);
        let pb = Panels::new(b.panels, b_depth(b), b.parts);
        matrix.multiply(to, pa, pb, [m.div_ceil(GROUP), n / GROUP, k.div_ceil(DEPTH)], Sum::Onto, ahead);
    } else {
        let (a, b) = (Matrix::new(a.rows, a.stride), Matrix::new(b.rows, b.stride));
        cx.kernels.gemm_transposed(to, a, b, [m, n, k], Sum::Onto, ahead);
    }
}
