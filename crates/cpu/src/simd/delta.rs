//! The gated delta rule between products on a matrix unit: operands leave one product as f32 and enter the next as
//! tiles, with the element-wise work done on the way.
//!
//! Chunks have [`TOKENS`] tokens in two halves, and values are processed [`SLICE`] columns at a time, so that a slice's
//! data stay in the L1 cache. f32 results are stored as `[row][SLICE]`.

use super::kernels::extent;
use super::matrix::{DEPTH, GROUP, Panels, SLOTS, Source};
use fulgurite_core::{DType, Data};
use std::ops::Range;

/// Tokens of a chunk.
pub(crate) const TOKENS: usize = 64;
/// Tokens of half a chunk: a tile's extent along the summed axis.
pub(crate) const HALF: usize = TOKENS / 2;
/// Columns of values that are computed together.
pub(crate) const SLICE: usize = 2 * GROUP;

/// Number of bf16 parts of each operand, so that the lost digits are below the rounding of the type. Rounding errors in
/// the operands of states add up over the whole sequence, so those have more parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeltaParts {
    /// K and Q, on either side.
    pub keys: usize,
    /// S, W and t V', and V' as a correction of later tokens.
    pub state: usize,
    /// The triangles between W and V': their roundings reach the states through every later token of the chunk.
    pub inverse: usize,
    /// The weights of outputs, and V' and S as operands with them and with Q.
    pub weights: usize,
}

/// Decays and products of keys of a chunk, and the matrices computed from them.
pub(crate) struct DeltaGates<'a> {
    /// Log decays and steps; 0 past the last token.
    pub g: &'a [f32; TOKENS],
    pub beta: &'a [f32; TOKENS],
    /// K K^T and Q K^T, lower triangles.
    pub kk: &'a [f32],
    pub qk: &'a [f32],
    pub scale: f32,
    /// L = strictly lower (beta K K^T G) in the halves on the diagonal; scratch.
    pub l: &'a mut [f32],
    /// Panels of (1 + L)^-1 diag(beta) of either half, one after the other, and of K K^T G below them.
    pub inverse: &'a mut [f32],
    pub between: &'a mut [f32],
    /// Panels of scale Q K^T G.
    pub weights: &'a mut [f32],
    /// Decay from before the chunk to each token, and from each to the end.
    pub head: &'a mut [f32; TOKENS],
    pub tail: &'a mut [f32; TOKENS],
}

/// V' of a half, and its destinations.
pub(crate) struct DeltaValues<'a> {
    pub values: &'a [f32],
    /// Decay of each token to the end of the chunk.
    pub tail: &'a [f32],
    /// Index of the half.
    pub half: usize,
    pub groups: usize,
    /// Panels of V' with the states' number of parts; those of the second half have only the weights' number of parts.
    pub whole: &'a mut [f32],
    /// Panels of t V'.
    pub faded: &'a mut [f32],
}

pub(super) type Keys = unsafe fn(*const u8, usize, [usize; 2], Option<f32>, *mut f32, usize);
pub(super) type Transpose = unsafe fn(*const f32, usize, usize, *mut f32, *mut f32);
pub(super) type Gates = unsafe fn(&mut DeltaGates<'_>);
pub(super) type Fade = unsafe fn(*mut f32, usize, usize, usize, Range<usize>, f32, *mut f32);
pub(super) type Residual = unsafe fn(*const u8, usize, [usize; 2], [*const f32; 2], *const f32, usize, *mut f32);
pub(super) type Corrected = unsafe fn(&mut DeltaValues<'_>);
pub(super) type Outputs = unsafe fn([*const f32; 2], *const f32, *mut u8, usize, [usize; 2], bool);

/// Entry points for tensors of one type.
pub(crate) struct DeltaKernels {
    pub dtype: DType,
    pub parts: DeltaParts,
    pub(super) keys: Keys,
    pub(super) transpose: Transpose,
    pub(super) gates: Gates,
    pub(super) fade: Fade,
    pub(super) residual: Residual,
    pub(super) corrected: Corrected,
    pub(super) outputs: Outputs,
}

impl DeltaKernels {
    /// The address of rows, which are inside their tensor.
    fn address(&self, from: &Source<'_>) -> *const u8 {
        assert!(from.data.dtype() == self.dtype, "bug in fulgurite: rows of another type");
        let range = from.offset..from.offset + extent(from.rows, from.row, from.n);
        match from.data {
            Data::F32(x) => x[range].as_ptr().cast(),
            Data::F16(x) => x[range].as_ptr().cast(),
            Data::Bf16(x) => x[range].as_ptr().cast(),
            _ => unreachable!("bug in fulgurite: rows of a type that GatedDelta refuses"),
        }
    }

    /// At most [`TOKENS`] rows as rows of A, each divided by `sqrt(eps + its squares)` if there is an `eps`; zeros past
    /// the last.
    pub fn pack_keys(&self, from: &Source<'_>, eps: Option<f32>, to: &mut [f32]) {
        let depth = from.n.div_ceil(DEPTH);
        assert!(from.rows <= TOKENS, "too many rows");
        assert!(to.len() >= Panels::room(TOKENS / GROUP, depth, self.parts.keys), "panels too small");
        let size = [from.rows, from.n];
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.keys)(self.address(from), from.row, size, eps, to.as_mut_ptr(), depth) };
    }

    /// Packed keys of dimension `d` as columns of B (summed over it), and as rows of A (summed over the tokens).
    pub fn transpose_keys(&self, from: &[f32], d: usize, columns: &mut [f32], rows: &mut [f32]) {
        let (depth, groups) = (d.div_ceil(DEPTH), d.div_ceil(GROUP));
        let room = Panels::room(TOKENS / GROUP, depth, self.parts.keys);
        assert!(from.len() >= room && columns.len() >= room, "panels too small");
        assert!(rows.len() >= Panels::room(groups, TOKENS / DEPTH, self.parts.keys), "panels too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.transpose)(from.as_ptr(), depth, groups, columns.as_mut_ptr(), rows.as_mut_ptr()) };
    }

    /// Everything that decays and products of keys make before values are seen.
    pub fn weigh(&self, mut gates: DeltaGates<'_>) {
        let square = TOKENS * TOKENS;
        assert!([gates.kk, gates.qk, gates.l].iter().all(|x| x.len() >= square), "triangles too small");
        let (half, parts) = (HALF / GROUP, &self.parts);
        assert!(gates.inverse.len() >= 2 * Panels::room(half, 1, parts.inverse), "panels too small");
        assert!(gates.between.len() >= Panels::room(half, 1, parts.inverse), "panels too small");
        assert!(gates.weights.len() >= Panels::room(2 * half, 2, parts.weights), "panels too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.gates)(&mut gates) };
    }

    /// `groups` groups of columns of `rows` rows of a state as columns of B: the tiles `tiles` along the rows. These rows
    /// fade by `factor` afterwards; tiny numbers become zero.
    pub fn pack_faded(
        &self,
        s: &mut [f32],
        [stride, rows, groups]: [usize; 3],
        tiles: Range<usize>,
        factor: f32,
        to: &mut [f32],
    ) {
        let depth = rows.div_ceil(DEPTH);
        assert!(groups * GROUP <= SLICE && s.len() >= extent(rows, stride, groups * GROUP), "state too small");
        assert!(tiles.end <= depth && to.len() >= Panels::room(groups, depth, self.parts.state), "panels too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.fade)(s.as_mut_ptr(), stride, rows, groups, tiles, factor, to.as_mut_ptr()) };
    }

    /// v - factor u - less as columns of B, for the tokens of a half; v is zero where `from` has no rows or columns.
    pub fn residual(
        &self,
        from: &Source<'_>,
        u: &[f32],
        less: Option<&[f32]>,
        factor: &[f32],
        groups: usize,
        to: &mut [f32],
    ) {
        let room = HALF * SLICE;
        assert!(from.rows <= HALF && from.n <= SLICE && groups * GROUP <= SLICE, "too many rows or columns");
        assert!(u.len() >= room && less.is_none_or(|x| x.len() >= room) && factor.len() >= HALF, "rows too short");
        assert!(to.len() >= Panels::room(groups, 1, self.parts.state), "panels too small");
        let less = less.map_or(std::ptr::null(), <[f32]>::as_ptr);
        let (v, size) = (self.address(from), [from.rows, from.n]);
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.residual)(v, from.row, size, [u.as_ptr(), less], factor.as_ptr(), groups, to.as_mut_ptr()) };
    }

    /// V' of a half as columns of B.
    pub fn pack_values(&self, mut v: DeltaValues<'_>) {
        assert!(v.groups * GROUP <= SLICE && v.half < 2, "too many columns");
        assert!(v.values.len() >= HALF * SLICE && v.tail.len() >= HALF, "rows too short");
        let room = Panels::room(v.groups, 2, self.parts.state);
        assert!(v.whole.len() >= room && v.faded.len() >= room, "panels too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.corrected)(&mut v) };
    }

    /// `rows` rows of `n` elements, `row` apart: factor x + y, rounded; past the caches where `stream` says so.
    ///
    /// # Safety
    /// The rows at `to` are valid, of this type, and nothing else accesses them.
    pub unsafe fn outputs(
        &self,
        x: &[f32],
        y: &[f32],
        factor: &[f32],
        to: *mut u8,
        [row, rows, n]: [usize; 3],
        stream: bool,
    ) {
        assert!(n <= SLICE && factor.len() >= rows, "too many rows or columns");
        assert!([x, y].iter().all(|x| x.len() >= rows * SLICE), "rows too short");
        // SAFETY: the machine has the unit, the extents were just checked, and the rest is the caller's.
        unsafe { (self.outputs)([x.as_ptr(), y.as_ptr()], factor.as_ptr(), to, row, [rows, n], stream) };
    }
}

/// Slots of a tile in this many parts.
pub(super) const fn tile(parts: usize) -> usize {
    parts * SLOTS
}
