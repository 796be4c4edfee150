//! bf16 into panels of a matrix unit and out of softmax and backward, without f32 in between: the safe interface.

use super::MAX_VECTORS;
use super::algorithms::{Ahead, ExpKind, GradArgs, LaneProbe, SoftmaxArgs, SoftmaxStats};
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

/// Lanes that the pipelined kernel takes at a time: half a tile.
pub(crate) const STRIP_LANES: usize = 2 * GROUP;

/// Blocks of keys for tiles of 64 lanes, which see all keys from a block on up to ends of their own, against maxima that are
/// trusted. The order: tile by tile, of each all blocks of the first strip, then those of the second.
pub(crate) struct Pipelined<'a, 't> {
    pub blocks: &'a [PipelinedBlock<'a>],
    /// The first key.
    pub origin: usize,
    pub tiles: &'a mut [PipelinedTile<'t>],
    /// The block to start with.
    pub first: BlockPosition,
    /// The factor that converts a score to a power of two.
    pub log2_e: f32,
    /// The largest sum of a block that still trusts its maximum.
    pub limit: f32,
    /// Scratch.
    pub s: &'a mut [f32],
    pub weights: &'a mut [f32],
    /// Changes scores before their exponentials are taken.
    pub modify: Option<&'t mut (dyn FnMut(Square<'_>) + 't)>,
}

/// The scores of one strip of a tile and 32 keys from `key` on, `[key][lane]` without gaps.
pub(crate) struct Square<'a> {
    pub tile: usize,
    pub strip: usize,
    pub key: usize,
    pub s: &'a mut [f32],
}

pub(super) type BlockMaxKernel = unsafe fn([*const f32; 2], *mut f32, &mut Seen<'_>) -> [bool; 2];

/// Scratch of [`MatrixKernels::block_max`], in f32.
pub(super) const BLOCK_MAX_ROOM: usize = 8 * SLOTS;

/// The maxima of 64 lanes, in units of scores.
pub(crate) struct Seen<'a> {
    /// The largest score so far, and the reference of the sums.
    pub top: &'a mut [f32],
    pub m: &'a [f32],
    /// How far a score may be below the largest (negative); `near`: above the reference.
    pub limit: f32,
    pub near: f32,
}

/// Panels of a block of keys and values, the values 0 past the last key.
#[derive(Clone, Copy)]
pub(crate) struct PipelinedBlock<'a> {
    pub k: &'a [f32],
    pub v: &'a [f32],
    /// Whether all values are finite: others are not for the pipelined kernel.
    pub finite: bool,
}

/// A tile and how far it came.
pub(crate) struct PipelinedTile<'a> {
    pub q: &'a [f32],
    /// `[column][lane]`.
    pub o: &'a mut [f32],
    /// Lanes without a maximum get that of the first keys.
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
    /// Past the last key that each lane sees.
    pub hi: &'a [i32],
    /// The first block for this tile.
    pub begin: usize,
    /// Whether it sees no key of each block; nothing is hidden past the end.
    pub hidden: &'a [bool],
}

/// A block of one strip of a tile; `None` means the strip's first block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct BlockPosition {
    pub tile: usize,
    pub strip: usize,
    pub block: Option<usize>,
}

pub(super) type PipelineKernel = unsafe fn(&mut Pipelined<'_, '_>, &mut [Ahead; 2]) -> Option<BlockPosition>;

impl MatrixKernels {
    /// The pipelined kernels for blocks of `block` keys, `d` tiles along the dimensions and `dv` groups of columns, if there
    /// are any.
    fn pipeline_kernels(&self, [block, d, dv]: [usize; 3]) -> Option<(PipelineKernel, BlockMaxKernel)> {
        let which = [[KEY_TILES, 2, 4], [KEY_TILES, 4, 8]].iter().position(|&own| own == [block, d, dv])?;
        self.pipeline.zip(self.block_max).map(|(pipeline, block_max)| (pipeline[which], block_max[which]))
    }

    /// Whether [`pipeline`](Self::pipeline) serves blocks of these sizes, all in tiles or groups of 16 columns.
    pub fn has_pipeline(&self, sizes: [usize; 3]) -> bool {
        self.pipeline_kernels(sizes).is_some()
    }

    /// Softmax and both products of all blocks, up to one that is not for it, which is returned.
    pub fn pipeline(
        &self,
        args: &mut Pipelined<'_, '_>,
        sizes: [usize; 3],
        ahead: &mut [Ahead; 2],
    ) -> Option<BlockPosition> {
        let (kernel, _) = self.pipeline_kernels(sizes).expect("bug in fulgurite: no such pipelined kernel");
        let ([block, d, dv], groups) = (sizes, 2 * STRIP_LANES / GROUP);
        let [k, v] = [Panels::room(block * DEPTH / GROUP, d, 1), Panels::room(dv, block, 1)];
        assert!(args.blocks.iter().all(|own| own.k.len() >= k && own.v.len() >= v), "panels of a block");
        for tile in &*args.tiles {
            assert!(tile.q.len() >= Panels::room(groups, d, 1), "panels of queries");
            assert!(tile.o.len() >= dv * GROUP * 2 * STRIP_LANES, "columns of O");
            let lanes = tile.m.len().min(tile.l.len()).min(tile.hi.len());
            assert!(lanes >= 2 * STRIP_LANES, "lane arrays too small");
        }
        assert!(
            args.s.len() >= 2 * DEPTH * STRIP_LANES && args.weights.len() >= Panels::room(groups, block, 1),
            "scratch"
        );
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { kernel(args, ahead) }
    }

    /// Looks at the scores of a block of keys of such sizes, from its panels and those of 64 queries; `s` is scratch. Whether
    /// some lane has one within its limit, and whether all are near the references. Scores that are NaN count for nothing.
    pub fn block_max(&self, [k, q]: [&[f32]; 2], sizes: [usize; 3], s: &mut [f32], seen: &mut Seen<'_>) -> [bool; 2] {
        let (_, kernel) = self.pipeline_kernels(sizes).expect("bug in fulgurite: no such pipelined kernel");
        let [block, d, _] = sizes;
        assert!(k.len() >= Panels::room(block * DEPTH / GROUP, d, 1), "panels of a block");
        assert!(
            q.len() >= Panels::room(2 * STRIP_LANES / GROUP, d, 1) && s.len() >= BLOCK_MAX_ROOM,
            "panels of queries"
        );
        assert!(seen.top.len().min(seen.m.len()) >= 2 * STRIP_LANES, "lane arrays too small");
        // SAFETY: the machine has the unit, and the extents were just checked.
        unsafe { kernel([k.as_ptr(), q.as_ptr()], s.as_mut_ptr(), seen) }
    }
}

type At = unsafe fn(*const bf16, &[usize], usize, *mut f32, usize);

/// Entry points, as in [`MatrixKernels`](super::MatrixKernels).
pub(crate) struct Bf16Kernels {
    pub(super) copy_at: At,
    pub(super) turn_at: At,
    pub(super) pair_at: At,
    pub(super) softmax: unsafe fn(&mut SoftmaxArgs<'_>, *mut f32, usize, Option<&mut LaneProbe<'_>>) -> SoftmaxStats,
    pub(super) reweigh: unsafe fn(*mut f32, *const f32, usize, &Ranges, &[f32]),
    pub(super) grad: unsafe fn(&GradArgs<'_>, f32, &mut GradPanels<'_>),
    pub(super) pack_grad: unsafe fn(&GradArgs<'_>, &mut GradPanels<'_>),
    pub(super) store: unsafe fn(&TurnedRows<'_>, *mut bf16),
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

/// O^T `[column][lane]` on its way out as rows of `n` elements.
pub(crate) struct TurnedRows<'a> {
    pub o: &'a [f32],
    pub stride: usize,
    pub n: usize,
    /// Factor and maximum of each lane: a maximum of -inf means that there was no key, and the row is 0.
    pub factors: &'a [f32],
    pub m: &'a [f32],
    /// Offset of each row.
    pub starts: &'a [usize],
    /// Whether rows are written past the caches.
    pub past: bool,
}

impl Bf16Kernels {
    /// Rounds rows to bf16 and writes them; where `past` asks for it, before other threads read them,
    /// [`Kernels::fence`](super::Kernels::fence).
    ///
    /// # Safety
    /// Room for `n` elements at each start behind `to`, and no other thread may touch them at the same time.
    pub unsafe fn store(&self, rows: &TurnedRows<'_>, to: *mut bf16) {
        let lanes = rows.starts.len().next_multiple_of(GROUP);
        assert!(lanes <= rows.stride && rows.factors.len().min(rows.m.len()) >= lanes, "lane arrays too small");
        assert!(rows.o.len() >= rows.n * rows.stride, "columns of O");
        // SAFETY: the machine has the unit, the extents were just checked, and those behind `to` are the caller's.
        unsafe { (self.store)(rows, to) }
    }

    /// Rows of A, neighbours in a slot, `depth` tiles a group; missing elements are zero.
    pub fn copy(&self, rows: RowsAt<'_>, to: &mut [f32], depth: usize) {
        self.pack(self.copy_at, rows, to, [rows.starts.len().div_ceil(GROUP), depth], rows.n <= depth * DEPTH);
    }
    /// Columns of B, neighbours in a slot, `depth` tiles a group; missing elements are zero.
    pub fn turn(&self, rows: RowsAt<'_>, to: &mut [f32], depth: usize) {
        self.pack(self.turn_at, rows, to, [rows.starts.len().div_ceil(GROUP), depth], rows.n <= depth * DEPTH);
    }
    /// The summed axis of B, `depth` tiles of rows for each group of columns; missing elements are zero.
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
        probe: Option<&mut LaneProbe<'_>>,
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
        let vectors = check_tile(args.len(), args.stride, &args.ranges);
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
    use crate::simd::{LEAST, MatrixMut, Policy, Sum};
    use fulgurite_core::DType;
    use fulgurite_core::random::Rng;

    /// Pipelined or one after the other: the same bits, also from the middle on, up to a block that is not for the pipelined
    /// kernel, and where lanes end inside a block.
    #[test]
    fn woven_blocks_have_the_bits_of_single_steps() {
        let unit = crate::simd::kernels(Isa::Amx).and_then(|kernels| kernels.matrix_for(DType::Bf16));
        let Some(unit) = unit else {
            return eprintln!("skipped: this machine has no tiles, or the process may not use them");
        };
        let (lanes, keys, origin) = (2 * STRIP_LANES, KEY_TILES * DEPTH, 256);
        let mut rng = Rng::new(3);
        for (d, dv) in [(2, 4), (4, 8)] {
            let mut panels = |n: usize, scale: f64| -> Vec<f32> {
                let halves: Vec<u32> =
                    rng.normals(2 * n, scale).iter().map(|&x| u32::from(bf16::from_f64(x).to_bits())).collect();
                halves.chunks_exact(2).map(|x| f32::from_bits(x[0] | x[1] << 16)).collect()
            };
            let q = [0, 1].map(|_| panels(Panels::room(lanes / GROUP, d, 1), 0.3));
            let sizes = [Panels::room(keys / GROUP, d, 1), Panels::room(dv, KEY_TILES, 1)];
            let blocks: Vec<[Vec<f32>; 2]> = (0..3).map(|_| sizes.map(|n| panels(n, 1.0))).collect();
            let log2_e = 1.2f32;
            let scale = log2_e / std::f32::consts::LOG2_E;
            let mut weights = vec![f32::NAN; Panels::room(lanes / GROUP, KEY_TILES, 1)];
            let (mut s, none) = (vec![f32::NAN; keys * lanes], &mut Ahead::default());
            // The first tile begins with the second block; its lanes end one after the other, three see nothing of the third.
            let ends: [[usize; 64]; 2] = [std::array::from_fn(|i| 2 * keys - 3 + i), [3 * keys - 40; 64]];
            let begins = [1, 0];
            let fresh = || (vec![0.5f32; dv * GROUP * lanes], [1.0f32; 64], [0.25f32; 64]);
            let mut want = [fresh(), fresh()];
            for tile in 0..2 {
                let (o, m, l) = &mut want[tile];
                for (b, [k, v]) in blocks.iter().enumerate().skip(begins[tile]) {
                    let (k, own) = (Panels::new(k, d, 1), Panels::new(&q[tile], d, 1));
                    let to = MatrixMut::at(&mut s, lanes, 0, 0);
                    unit.multiply(to, k, own, [keys / GROUP, lanes / GROUP, d], Sum::Fresh, none);
                    // The result of `block_max`: every lane's largest score, beside ones of before that are larger but in one lane.
                    let largest: [f32; 64] =
                        std::array::from_fn(|lane| s.iter().skip(lane).step_by(lanes).fold(f32::MIN, |a, &b| a.max(b)));
                    for (lane, by, above, found) in [
                        (0, -1.0, 0.0, [true, true]),
                        (17, 1.5, 2.0, [true, false]),
                        (40, 2.5, 0.5, [false, true]),
                        (63, 2.5, f32::INFINITY, [false, false]),
                    ] {
                        let (mut top, mut m) = (largest.map(|x| x + 3.0), largest);
                        (top[lane], m[lane]) = (largest[lane] + by, largest[lane] - above);
                        let seen = &mut Seen { top: &mut top, m: &m, limit: -2.0, near: 1.0 };
                        let (panels, mut room) = ([&blocks[b][0][..], &q[tile]], vec![f32::NAN; BLOCK_MAX_ROOM]);
                        assert_eq!(unit.block_max(panels, [KEY_TILES, d, dv], &mut room, seen), found, "lane {lane}");
                        assert!(top[lane] == largest[lane].max(largest[lane] + by), "lane {lane} at {d} tiles");
                    }
                    let own: [usize; 64] = ends[tile].map(|end| end.saturating_sub(b * keys).min(keys));
                    let of = |z: usize| own[z * GROUP..(z + 1) * GROUP].iter().copied();
                    let range = |z: usize| if z < lanes / GROUP { (0, of(z).max().unwrap_or(0)) } else { (0, 0) };
                    let inner = |z: usize| if z < lanes / GROUP { (0, of(z).min().unwrap_or(0)) } else { (0, 0) };
                    let mut args = SoftmaxArgs {
                        s: &mut s,
                        stride: lanes,
                        ranges: std::array::from_fn(range),
                        inner: std::array::from_fn(inner),
                        lo: &[0.0; 64],
                        hi: &own.map(|end| end as f32),
                        m,
                        l,
                        alpha: &mut [0.0; 64],
                        exp: ExpKind::Poly(3),
                        least: LEAST,
                        policy: Policy::Trust(f32::MAX),
                        scale,
                    };
                    weights.fill(0.0);
                    unit.bf16.softmax(&mut args, &mut weights, KEY_TILES, None);
                    let (v, p) = (Panels::new(v, KEY_TILES, 1), Panels::new(&weights, KEY_TILES, 1));
                    let (to, size) = (MatrixMut::at(o, lanes, 0, 0), [dv, lanes / GROUP, KEY_TILES]);
                    unit.multiply(to, v, p, size, Sum::Onto, none);
                }
            }
            let mut got = [fresh(), fresh()];
            weights.fill(f32::NAN);
            let mut pipeline = |first: BlockPosition, limit: f32, odd: f32, finite: [bool; 3]| {
                let hi = ends.map(|ends| ends.map(|end| (origin + end) as i32));
                let mut tiles = Vec::new();
                for (((o, m, l), begin), (q, hi)) in got.iter_mut().zip(begins).zip(q.iter().zip(&hi)) {
                    m[40] = odd;
                    tiles.push(PipelinedTile { q, o, m, l, hi, begin, hidden: &[] });
                }
                let own = blocks.iter().zip(finite).map(|([k, v], finite)| PipelinedBlock { k, v, finite });
                let blocks: Vec<PipelinedBlock<'_>> = own.collect();
                let log2_e = std::f32::consts::LOG2_E * scale;
                let (s, weights) = (&mut s[..], &mut weights[..]);
                let tiles = &mut tiles[..];
                let mut args =
                    Pipelined { blocks: &blocks, origin, tiles, first, log2_e, limit, s, weights, modify: None };
                unit.pipeline(&mut args, [KEY_TILES, d, dv], &mut [Ahead::default(); 2])
            };
            let place = |tile, strip, block| BlockPosition { tile, strip, block: Some(block) };
            let all = [true; 3];
            // Sums of a strip beyond any limit stop it before they are added; so do maxima too large, and values.
            assert_eq!(pipeline(BlockPosition::default(), 0.0, 1.0, all), Some(place(0, 0, 1)));
            assert_eq!(pipeline(BlockPosition::default(), f32::MAX, 1e4, all), Some(place(0, 1, 1)));
            assert_eq!(pipeline(place(0, 1, 1), f32::MAX, 1.0, [true, true, false]), Some(place(0, 1, 2)));
            assert_eq!(pipeline(place(0, 1, 2), f32::MAX, 1.0, all), None);
            for (tile, (want, got)) in want.iter().zip(&got).enumerate() {
                assert!(want.2 == got.2, "sums of tile {tile} at {d} tiles");
                assert!(want.0 == got.0, "outputs of tile {tile} at {d} tiles");
            }
        }
    }

    /// A lane that has no maximum gets that of its first keys, and only such a lane.
    #[test]
    fn woven_lanes_settle_their_maxima() {
        let unit = crate::simd::kernels(Isa::Amx).and_then(|kernels| kernels.matrix_for(DType::Bf16));
        let Some(unit) = unit else {
            return eprintln!("skipped: this machine has no tiles, or the process may not use them");
        };
        let (d, dv) = (2, 4);
        // Slots hold two numbers: all of K, V and Q are 1, but for key 3, whose numbers are 2.
        let one = f32::from_bits(0x3f80_3f80);
        let mut k = vec![one; Panels::room(KEY_TILES * DEPTH / GROUP, d, 1)];
        for tile in 0..d {
            k[tile * SLOTS + 3 * GROUP..][..GROUP].fill(f32::from_bits(0x4000_4000));
        }
        let v = vec![one; Panels::room(dv, KEY_TILES, 1)];
        let q = vec![one; Panels::room(4, d, 1)];
        let (mut o, mut m, mut l) = (vec![0.0f32; dv * GROUP * 64], [f32::NEG_INFINITY; 64], [0.0f32; 64]);
        m[5] = 70.0;
        let hi: [i32; 64] = std::array::from_fn(|lane| if lane == 0 { 3 } else { 128 });
        let tile = PipelinedTile { q: &q, o: &mut o, m: &mut m, l: &mut l, hi: &hi, begin: 0, hidden: &[] };
        let (mut s, mut weights) = (vec![f32::NAN; 2 * DEPTH * STRIP_LANES], vec![f32::NAN; Panels::room(4, 4, 1)]);
        let mut args = Pipelined {
            blocks: &[PipelinedBlock { k: &k, v: &v, finite: true }],
            origin: 0,
            tiles: &mut [tile],
            first: BlockPosition::default(),
            log2_e: 0.01,
            limit: f32::MAX,
            s: &mut s,
            weights: &mut weights,
            modify: None,
        };
        assert_eq!(unit.pipeline(&mut args, [KEY_TILES, d, dv], &mut [Ahead::default(); 2]), None);
        assert_eq!([m[0], m[1], m[5], m[63]], [64.0, 128.0, 70.0, 128.0]);
        assert_eq!(l[0], 3.0);
        assert!(o.iter().zip((0..64).cycle()).all(|(x, lane)| lane != 0 || *x == 3.0));
    }
}
