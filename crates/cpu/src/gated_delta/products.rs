//! Products of chunk-sized matrices: by the vectors, or on the matrix unit with operands in parts of bf16.

use super::Context;
use super::chunk::CHUNK;
use crate::simd::{Ahead, DEPTH, GROUP, Matrix, MatrixMut, Panels, SLOTS, Sum};
use fulgurite_core::DType;

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

/// In how many bf16 the operands are packed, so that what they lose is below the rounding of the type. Roundings of what
/// states come from add up over the whole sequence, so those have more.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// K and Q, on either side.
    pub keys: usize,
    /// S, W and t V'.
    pub state: usize,
    /// A: its roundings reach the states through every later token of the chunk.
    pub inverse: usize,
    /// The weights of outputs, and V' beside them.
    pub weights: usize,
}

impl Parts {
    pub fn new(dtype: DType) -> Self {
        match dtype {
            DType::Bf16 => Parts { keys: 1, state: 2, inverse: 2, weights: 1 },
            DType::F16 => Parts { keys: 2, state: 2, inverse: 2, weights: 2 },
            _ => Parts { keys: 3, state: 3, inverse: 3, weights: 3 },
        }
    }
}

/// A row-major matrix, and the same packed for the matrix unit (empty for the vectors).
pub(super) struct Operand<'w> {
    pub rows: &'w mut [f32],
    pub stride: usize,
    /// Columns in use.
    pub n: usize,
    pub panels: &'w mut [f32],
    /// How the panels were packed last: parts, and tiles along the summed axis.
    pub packed: [usize; 2],
}

impl<'w> Operand<'w> {
    pub fn new(rows: &'w mut [f32], stride: usize, n: usize, panels: &'w mut [f32]) -> Self {
        Operand { rows, stride, n, panels, packed: [1, 1] }
    }

    /// Elements for panels of a left operand of `rows` x `k`, or a right one of `k` x `rows`.
    pub fn room(cx: &Context<'_>, rows: usize, k: usize, parts: usize) -> usize {
        if cx.matrix.is_some() { Panels::room(rows.div_ceil(GROUP), k.div_ceil(DEPTH), parts) } else { 0 }
    }

    fn panels(&self) -> Panels<'_> {
        Panels::new(self.panels, self.packed[1], self.packed[0])
    }

    /// Packs rows as rows of a left operand, `k` elements each.
    pub fn pack_left(&mut self, cx: &Context<'_>, k: usize, parts: usize) {
        let Some(matrix) = cx.matrix else { return };
        self.packed = [parts, k.div_ceil(DEPTH)];
        let size = [self.stride, self.rows.len() / self.stride, k];
        matrix.pack_rows_in(self.rows, size, self.panels, self.packed[1], parts);
    }

    /// Packs as a right operand: `k` rows of the summed axis.
    pub fn pack_right(&mut self, cx: &Context<'_>, k: usize, parts: usize) {
        let Some(matrix) = cx.matrix else { return };
        self.packed = [parts, k.div_ceil(DEPTH)];
        let room = Panels::room(1, self.packed[1], parts);
        for (z, to) in self.panels.chunks_exact_mut(room).take(self.n / GROUP).enumerate() {
            matrix.pack_lanes(&self.rows[z * GROUP..], self.stride, [0, k], to, parts);
        }
    }

    /// Packs as a right operand, each row times its factor, where the matrix unit works.
    pub fn pack_scaled(&self, cx: &Context<'_>, factors: &[f32], parts: usize, to: &mut Operand<'_>) {
        let Some(matrix) = cx.matrix else { return };
        to.packed = [parts, factors.len().div_ceil(DEPTH)];
        let room = Panels::room(1, to.packed[1], parts);
        for (z, to) in to.panels.chunks_exact_mut(room).take(self.n / GROUP).enumerate() {
            matrix.pack_scaled(&self.rows[z * GROUP..], self.stride, factors, to, parts);
        }
    }

    /// Packs as a right operand of `k` rows, which fade by `factor` afterwards, where the matrix unit works.
    pub fn pack_faded(&mut self, cx: &Context<'_>, k: usize, factor: f32, parts: usize) {
        let Some(matrix) = cx.matrix else { return };
        self.packed = [parts, k.div_ceil(DEPTH)];
        let room = Panels::room(1, self.packed[1], parts);
        for (z, to) in self.panels.chunks_exact_mut(room).take(self.n / GROUP).enumerate() {
            matrix.pack_faded(&mut self.rows[z * GROUP..], [self.stride, k], factor, to, parts);
        }
    }

    /// The transpose of a packed left operand as a right one: tiles lie where they lay, each turned.
    pub fn turn_panels(&mut self, cx: &Context<'_>, from: &Operand<'_>) {
        self.packed = from.packed;
        for (to, from) in self.panels.chunks_exact_mut(SLOTS).zip(from.panels.chunks_exact(SLOTS)) {
            cx.kernels.transpose(from, GROUP, to, GROUP, GROUP, GROUP);
        }
    }

    /// The transpose of rows as a left operand: the rows are the summed axis, as for a right operand, and tiles are
    /// turned afterwards.
    pub fn pack_turned(&mut self, cx: &Context<'_>, from: &Operand<'_>, parts: usize) {
        let Some(matrix) = cx.matrix else { return };
        let rows = from.rows.len() / from.stride;
        self.packed = [parts, rows.div_ceil(DEPTH)];
        let room = Panels::room(1, self.packed[1], parts);
        let mut group = [0.0; Panels::room(1, CHUNK / DEPTH, 3)];
        for (z, to) in self.panels.chunks_exact_mut(room).take(from.n / GROUP).enumerate() {
            matrix.pack_lanes(&from.rows[z * GROUP..], from.stride, [0, rows], &mut group, parts);
            for (to, from) in to.chunks_exact_mut(SLOTS).zip(group.chunks_exact(SLOTS)) {
                cx.kernels.transpose(from, GROUP, to, GROUP, GROUP, GROUP);
            }
        }
    }
}

/// C (+)= A B, A m x k and B k x n, both packed where the matrix unit works. The vectors ask for the rows `ahead` on the
/// way; tiles do not, since they come through the same few buffers that wait for memory (lab 009).
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
    let stride = b.stride;
    let step = if part == Part::Whole { m } else { STEP };
    for row in (0..m).step_by(step) {
        let rows = step.min(m - row);
        let n = if part == Part::LowerResult { (row + rows).min(n) } else { n };
        let k = if part == Part::LowerLeft { (row + rows).min(k) } else { k };
        let to = MatrixMut::at(c, stride, row, 0);
        if let Some(matrix) = cx.matrix {
            let (pa, pb) = (a.panels().at(row / GROUP, 0), b.panels());
            let size = [rows.div_ceil(GROUP), n / GROUP, k.div_ceil(DEPTH)];
            matrix.multiply(to, pa, pb, size, sum, &mut Ahead::default());
        } else {
            let left = Matrix::new(a.rows, a.stride).at(row, 0);
            cx.kernels.gemm(to, left, Matrix::new(b.rows, b.stride), [rows, n, k], sum, ahead);
        }
    }
}

/// C += A^T B, A k x m in rows (and `turned` for the matrix unit), B k x n.
pub(super) fn product_turned(
    cx: &Context<'_>,
    c: &mut [f32],
    a: &Operand<'_>,
    turned: &Operand<'_>,
    b: &Operand<'_>,
    [m, n, k]: [usize; 3],
    ahead: &mut Ahead,
) {
    let to = MatrixMut::at(c, b.stride, 0, 0);
    if let Some(matrix) = cx.matrix {
        let size = [m.div_ceil(GROUP), n / GROUP, k.div_ceil(DEPTH)];
        matrix.multiply(to, turned.panels(), b.panels(), size, Sum::Onto, &mut Ahead::default());
    } else {
        let (a, b) = (Matrix::new(a.rows, a.stride), Matrix::new(b.rows, b.stride));
        cx.kernels.gemm_transposed(to, a, b, [m, n, k], Sum::Onto, ahead);
    }
}
