//! bf16 into panels of a matrix unit and out of softmax and backward, without f32 between: the safe face.

use super::MAX_VECTORS;
use super::algorithms::{ExpKind, GradArgs, SoftmaxArgs, SoftmaxStats};
use super::matrix::{DEPTH, GROUP, Panels, SLOTS};
use crate::step::Ranges;
use half::bf16;

/// Keys in a block of scores, in tiles: the most that panels of a block have room for.
pub(crate) const KEY_TILES: usize = 4;
/// Lanes of a tile of scores, in tiles of the summed axis.
pub(crate) const LANE_TILES: usize = 2;

/// P and dS of a block as operands: rows are keys and lanes the summed axis (`rows`), or lanes are columns and
/// keys the summed axis (`lanes`).
pub(crate) struct GradPanels<'a> {
    pub p_rows: &'a mut [f32],
    pub ds_rows: &'a mut [f32],
    pub ds_lanes: &'a mut [f32],
}

impl GradPanels<'_> {
    /// Slots of each of the three.
    pub const ROOM: usize = 2 * KEY_TILES * LANE_TILES * SLOTS;
}

/// Probes beside the weights that softmax packs.
pub(crate) struct PackedProbe<'a> {
    /// U of the tile, `[key][lane]`.
    pub u: &'a [f32],
    /// Where U goes, packed as the weights are; what weighs nothing is 0.
    pub packed: &'a mut [f32],
    /// Of each lane, sums of P U; multiplied with alpha before.
    pub sums: &'a mut [f32],
}

type At = unsafe fn(*const bf16, &[usize], usize, *mut f32, usize);

/// Entry points, as in [`MatrixKernels`](super::MatrixKernels).
pub(crate) struct NarrowKernels {
    pub(super) copy_at: At,
    pub(super) turn_at: At,
    pub(super) pair_at: At,
    pub(super) softmax: unsafe fn(&mut SoftmaxArgs<'_>, *mut f32, usize, Option<&mut PackedProbe<'_>>) -> SoftmaxStats,
    pub(super) reweigh: unsafe fn(*mut f32, *const f32, usize, &Ranges, &[f32]),
    pub(super) grad: unsafe fn(&GradArgs<'_>, f32, &mut GradPanels<'_>),
    pub(super) pack_grad: unsafe fn(&GradArgs<'_>, &mut GradPanels<'_>),
}

/// Rows of `n` elements that begin at `starts`.
#[derive(Clone, Copy)]
pub(crate) struct RowsAt<'a> {
    pub data: &'a [bf16],
    pub starts: &'a [usize],
    pub n: usize,
}

impl RowsAt<'_> {
    fn check(&self) {
        assert!(self.starts.iter().all(|&at| at + self.n <= self.data.len()), "rows outside the tensor");
    }
}

impl NarrowKernels {
    /// Rows of A, neighbours in a slot, `depth` tiles a group; what is missing is zero.
    pub fn copy(&self, rows: RowsAt<'_>, to: &mut [f32], depth: usize) {
        self.pack(self.copy_at, rows, to, [rows.starts.len().div_ceil(GROUP), depth], rows.n <= depth * DEPTH);
    }
    /// Columns of B, neighbours in a slot, `depth` tiles a group; what is missing is zero.
    pub fn turn(&self, rows: RowsAt<'_>, to: &mut [f32], depth: usize) {
        self.pack(self.turn_at, rows, to, [rows.starts.len().div_ceil(GROUP), depth], rows.n <= depth * DEPTH);
    }
    /// The summed axis of B, `depth` tiles of rows for each group of columns; what is missing is zero.
    pub fn pair(&self, rows: RowsAt<'_>, to: &mut [f32], depth: usize) {
        self.pack(self.pair_at, rows, to, [rows.n.div_ceil(GROUP), depth], rows.starts.len() <= depth * DEPTH);
    }
    fn pack(&self, kernel: At, rows: RowsAt<'_>, to: &mut [f32], [groups, depth]: [usize; 2], fits: bool) {
        rows.check();
        assert!(fits && to.len() >= Panels::room(groups, depth, 1), "panels too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { kernel(rows.data.as_ptr(), rows.starts, rows.n, to.as_mut_ptr(), depth) }
    }

    /// Whether [`softmax`](Self::softmax) and [`grad`](Self::grad) compute this exponential.
    pub fn suits(&self, exp: ExpKind) -> bool {
        exp == ExpKind::Poly(3)
    }

    /// One step of the online softmax; P goes to `weights`, groups of lanes `depth` tiles apart. Scores are left as
    /// they are, but for hidden ones.
    pub fn softmax(
        &self,
        args: &mut SoftmaxArgs<'_>,
        weights: &mut [f32],
        depth: usize,
        probe: Option<&mut PackedProbe<'_>>,
    ) -> SoftmaxStats {
        let vectors = check_tile(args.s.len(), args.stride, &args.ranges);
        let lanes = [args.m.len(), args.l.len(), args.alpha.len(), args.lo.len(), args.hi.len()];
        assert!(lanes.iter().all(|&n| n >= args.stride), "lane arrays too small");
        assert!(args.ranges[..vectors].iter().all(|r| r.1 <= depth * DEPTH), "keys of the block");
        assert!(weights.len() >= Panels::room(vectors, depth, 1), "panels too small");
        if let Some(probe) = &probe {
            check_tile(probe.u.len(), args.stride, &args.ranges);
            let fits = probe.sums.len() >= args.stride && probe.packed.len() >= Panels::room(vectors, depth, 1);
            assert!(fits, "probes too small");
        }
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.softmax)(args, weights.as_mut_ptr(), depth * SLOTS, probe) }
    }

    /// P becomes P (1 + mean - U), both packed, for each vector of lanes in a range of keys. With a mean and U of 0 no bit
    /// changes.
    pub fn reweigh(&self, weights: &mut [f32], u: &[f32], depth: usize, ranges: &Ranges, mean: &[f32]) {
        let vectors = mean.len() / GROUP;
        assert!(mean.len().is_multiple_of(GROUP) && vectors <= MAX_VECTORS, "lanes of the tile");
        assert!(weights.len().min(u.len()) >= Panels::room(vectors, depth, 1), "panels too small");
        assert!(ranges[..vectors].iter().all(|r| r.1 <= depth * DEPTH), "keys of the block");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.reweigh)(weights.as_mut_ptr(), u.as_ptr(), depth * SLOTS, ranges, mean) }
    }

    /// The element-wise part of backward, from scores in units of `score_scale`; P and dS go to panels.
    pub fn grad(&self, args: &GradArgs<'_>, score_scale: f32, out: &mut GradPanels<'_>) {
        self.check_grad(args, out);
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.grad)(args, score_scale, out) }
    }

    /// P and dS as [`Kernels::grad`](super::Kernels::grad) left them, into panels.
    pub fn pack_grad(&self, args: &GradArgs<'_>, out: &mut GradPanels<'_>) {
        self.check_grad(args, out);
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { (self.pack_grad)(args, out) }
    }

    fn check_grad(&self, args: &GradArgs<'_>, out: &GradPanels<'_>) {
        let vectors = check_tile(args.s.len().min(args.dp.len()), args.stride, &args.ranges);
        assert!(args.stride > 0, "lanes of the tile");
        assert!(args.ranges[..vectors].iter().all(|r| r.1 <= KEY_TILES * DEPTH), "keys of the block");
        let lanes = [args.lse.len(), args.delta.len(), args.lo.len(), args.hi.len()];
        assert!(lanes.iter().all(|&n| n >= args.stride), "lane arrays too small");
        let panels = [&out.p_rows, &out.ds_rows, &out.ds_lanes];
        assert!(panels.iter().all(|x| x.len() >= GradPanels::ROOM), "panels too small");
    }
}

/// Vectors of a tile of scores, after its extents were checked.
fn check_tile(len: usize, stride: usize, ranges: &[(usize, usize)]) -> usize {
    let vectors = stride / GROUP;
    assert!(stride.is_multiple_of(GROUP) && stride <= LANE_TILES * DEPTH, "lanes of the tile");
    assert!(ranges[..vectors].iter().all(|&(start, end)| start >= end || end * stride <= len), "keys of the tile");
    vectors
}
