//! bf16 into panels of a matrix unit and out of softmax and backward, without f32 between: the safe face.

use super::MAX_VECTORS;
use super::algorithms::{Ahead, ExpKind, GradArgs, SoftmaxArgs, SoftmaxStats};
use super::matrix::{DEPTH, GROUP, MatrixKernels, Panels, SLOTS};
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

/// Lanes that the woven kernel takes at a time: half a tile.
pub(crate) const STRIP_LANES: usize = 2 * GROUP;

/// Blocks of keys that 64 lanes see whole, against maxima that are trusted. Work is counted in strips and blocks: all
/// blocks of the first strip, then those of the second.
pub(crate) struct Woven<'a> {
    /// Panels of K and V, each block's own.
    pub blocks: &'a [[&'a [f32]; 2]],
    /// Where to begin.
    pub first: usize,
    pub q: &'a [f32],
    /// `[column][lane]`.
    pub o: &'a mut [f32],
    pub m: &'a [f32],
    pub l: &'a mut [f32],
    /// What a score is multiplied with to be a power of two.
    pub log2_e: f32,
    /// The largest sum of a block that still trusts its maximum.
    pub limit: f32,
    /// Scratch.
    pub s: &'a mut [f32],
    pub weights: &'a mut [f32],
}

pub(super) type Weave = unsafe fn(&mut Woven<'_>, &mut [Ahead; 2]) -> usize;
pub(super) type Look = unsafe fn([*const f32; 2], *mut f32, &mut Seen<'_>) -> [bool; 2];

/// Scratch of [`MatrixKernels::look`], in f32.
pub(super) const LOOK_ROOM: usize = 8 * SLOTS;

/// What 64 lanes have seen, all in units of scores.
pub(crate) struct Seen<'a> {
    /// The largest score so far, and what sums are relative to.
    pub top: &'a mut [f32],
    pub m: &'a [f32],
    /// What a score may be below the largest, negative; and above the reference.
    pub limit: f32,
    pub near: f32,
}

impl MatrixKernels {
    /// The woven kernels for blocks of `block` keys, `d` tiles along the dimensions and `dv` groups of columns, if there
    /// are any.
    fn weaver(&self, [block, d, dv]: [usize; 3]) -> Option<(Weave, Look)> {
        let which = [[KEY_TILES, 2, 4], [KEY_TILES, 4, 8]].iter().position(|&own| own == [block, d, dv])?;
        self.weave.zip(self.look).map(|(weave, look)| (weave[which], look[which]))
    }

    /// Whether [`weave`](Self::weave) serves blocks of these sizes, all in tiles or groups of 16 columns.
    pub fn weaves(&self, sizes: [usize; 3]) -> bool {
        self.weaver(sizes).is_some()
    }

    /// Softmax and both products of all blocks, up to one whose maximum cannot be trusted; how far it came.
    pub fn weave(&self, args: &mut Woven<'_>, sizes: [usize; 3], ahead: &mut [Ahead; 2]) -> usize {
        let (kernel, _) = self.weaver(sizes).expect("bug in fulgurite: no such woven kernel");
        let ([block, d, dv], groups) = (sizes, 2 * STRIP_LANES / GROUP);
        assert!(args.q.len() >= Panels::room(groups, d, 1), "panels of queries");
        let [k, v] = [Panels::room(block * DEPTH / GROUP, d, 1), Panels::room(dv, block, 1)];
        assert!(args.blocks.iter().all(|own| own[0].len() >= k && own[1].len() >= v), "panels of a block");
        assert!(args.o.len() >= dv * GROUP * 2 * STRIP_LANES, "columns of O");
        assert!(args.m.len().min(args.l.len()) >= 2 * STRIP_LANES, "lane arrays too small");
        assert!(
            args.s.len() >= 2 * DEPTH * STRIP_LANES && args.weights.len() >= Panels::room(groups, block, 1),
            "scratch"
        );
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { kernel(args, ahead) }
    }

    /// Looks at the scores of a block of keys of such sizes, from its panels and those of 64 queries; `s` is scratch. Whether
    /// some lane has one within its limit, and whether all are near the references. Scores that are NaN count for nothing.
    pub fn look(&self, [k, q]: [&[f32]; 2], sizes: [usize; 3], s: &mut [f32], seen: &mut Seen<'_>) -> [bool; 2] {
        let (_, kernel) = self.weaver(sizes).expect("bug in fulgurite: no such woven kernel");
        let [block, d, _] = sizes;
        assert!(k.len() >= Panels::room(block * DEPTH / GROUP, d, 1), "panels of a block");
        assert!(q.len() >= Panels::room(2 * STRIP_LANES / GROUP, d, 1) && s.len() >= LOOK_ROOM, "panels of queries");
        assert!(seen.top.len().min(seen.m.len()) >= 2 * STRIP_LANES, "lane arrays too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { kernel([k.as_ptr(), q.as_ptr()], s.as_mut_ptr(), seen) }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::simd::{MatrixMut, Policy, Sum};
    use fulgurite_core::DType;
    use fulgurite_core::random::Rng;

    /// Woven or one after the other: the same bits, also from the middle on and up to a block that asks for a maximum.
    #[test]
    fn woven_blocks_have_the_bits_of_single_steps() {
        let unit = crate::simd::kernels(Isa::Amx).and_then(|kernels| kernels.matrix_for(DType::Bf16));
        let Some(unit) = unit else {
            return eprintln!("skipped: this machine has no tiles, or the process may not use them");
        };
        let (lanes, keys) = (2 * STRIP_LANES, KEY_TILES * DEPTH);
        let mut rng = Rng::new(3);
        for (d, dv) in [(2, 4), (4, 8)] {
            let mut panels = |n: usize, scale: f64| -> Vec<f32> {
                let halves: Vec<u32> =
                    rng.normals(2 * n, scale).iter().map(|&x| u32::from(bf16::from_f64(x).to_bits())).collect();
                halves.chunks_exact(2).map(|x| f32::from_bits(x[0] | x[1] << 16)).collect()
            };
            let q = panels(Panels::room(lanes / GROUP, d, 1), 0.3);
            let sizes = [Panels::room(keys / GROUP, d, 1), Panels::room(dv, KEY_TILES, 1)];
            let blocks: Vec<[Vec<f32>; 2]> = (0..3).map(|_| sizes.map(|n| panels(n, 1.0))).collect();
            let blocks: Vec<[&[f32]; 2]> = blocks.iter().map(|own| [&own[0][..], &own[1][..]]).collect();
            let (mut m, log2_e) = ([1.0f32; 64], 1.2f32);
            let mut weights = vec![f32::NAN; Panels::room(lanes / GROUP, KEY_TILES, 1)];
            let (mut s, none) = (vec![f32::NAN; keys * lanes], &mut Ahead::default());
            let (mut o, mut l) = (vec![0.5f32; dv * GROUP * lanes], [0.25f32; 64]);
            let (mut woven_o, mut woven_l) = (o.clone(), l);
            for [panels_k, v] in &blocks {
                unit.multiply(
                    MatrixMut::at(&mut s, lanes, 0, 0),
                    Panels::new(panels_k, d, 1),
                    Panels::new(&q, d, 1),
                    [keys / GROUP, lanes / GROUP, d],
                    Sum::Fresh,
                    none,
                );
                // What a look finds: every lane's largest score, beside ones of before that are larger but in one lane.
                let largest: [f32; 64] =
                    std::array::from_fn(|lane| s.iter().skip(lane).step_by(lanes).fold(f32::MIN, |a, &b| a.max(b)));
                let look = |lane: usize, by: f32, above: f32| {
                    let (mut top, mut m) = (largest.map(|x| x + 3.0), largest);
                    (top[lane], m[lane]) = (largest[lane] + by, largest[lane] - above);
                    let mut room = vec![f32::NAN; LOOK_ROOM];
                    let seen = &mut Seen { top: &mut top, m: &m, limit: -2.0, near: 1.0 };
                    let found = unit.look([panels_k, &q], [KEY_TILES, d, dv], &mut room, seen);
                    assert!(top[lane] == largest[lane].max(largest[lane] + by), "lane {lane} at {d} tiles");
                    found
                };
                for lane in [0, 17, 40, 63] {
                    assert_eq!(look(lane, -1.0, 0.0), [true, true]);
                    assert_eq!(look(lane, 1.5, 2.0), [true, false]);
                    assert_eq!(look(lane, 2.5, 0.5), [false, true]);
                    assert_eq!(look(lane, 2.5, f32::INFINITY), [false, false]);
                }
                let (ranges, mut alpha) = ([(0, keys); MAX_VECTORS], [0.0; 64]);
                let (lo, hi) = ([0.0; 64], [keys as f32; 64]);
                let mut args = SoftmaxArgs {
                    s: &mut s,
                    stride: lanes,
                    ranges,
                    inner: ranges,
                    lo: &lo,
                    hi: &hi,
                    m: &mut m,
                    l: &mut l,
                    alpha: &mut alpha,
                    exp: ExpKind::Poly(3),
                    policy: Policy::Trust(f32::MAX),
                    scale: log2_e / std::f32::consts::LOG2_E,
                };
                unit.narrow.softmax(&mut args, &mut weights, KEY_TILES, None);
                let (v, p) = (Panels::new(v, KEY_TILES, 1), Panels::new(&weights, KEY_TILES, 1));
                unit.multiply(
                    MatrixMut::at(&mut o, lanes, 0, 0),
                    v,
                    p,
                    [dv, lanes / GROUP, KEY_TILES],
                    Sum::Onto,
                    none,
                );
            }
            let mut weave = |first: usize, n: usize, limit: f32, m: &[f32; 64]| {
                let (o, l, s) = (&mut woven_o[..], &mut woven_l[..], &mut s[..]);
                let blocks = &blocks[..n];
                let log2_e = std::f32::consts::LOG2_E * (log2_e / std::f32::consts::LOG2_E);
                let mut args = Woven { blocks, first, q: &q, o, m, l, log2_e, limit, s, weights: &mut weights };
                unit.weave(&mut args, [KEY_TILES, d, dv], &mut [Ahead::default(); 2])
            };
            // Sums of a strip beyond any limit stop it before they are added.
            assert_eq!(weave(1, 1, 0.0, &m), 1);
            assert_eq!(weave(0, 3, f32::MAX, &std::array::from_fn(|i| if i == 40 { 1e4 } else { m[i] })), 3);
            assert_eq!(weave(3, 3, f32::MAX, &m), 6);
            assert!(woven_l == l, "sums at {d} tiles");
            assert!(woven_o == o, "outputs at {d} tiles");
        }
    }
}
