//! The table of entry points of an instruction set, and its safe interface.

use super::MatrixKernels;
use super::algorithms::{Ahead, GradArgs, LaneProbe, Plane, RowSets, SoftmaxArgs, SoftmaxStats, Stage, paired};
use super::prefetch::Prefetch;
use crate::Isa;
use crate::evaluate::{Cells, Evaluator};
use fulgurite_core::format::{GroupFormat, Grouped};
use fulgurite_core::{DType, Data};
use half::{bf16, f16};

/// No instruction set has wider tiles, in vectors.
pub(crate) const MAX_VECTORS: usize = 4;

/// Whether a product replaces its destination or adds to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    Fresh,
    Onto,
}

type Gemm = unsafe fn(*mut f32, usize, *const f32, usize, *const f32, usize, [usize; 3], bool, &mut Ahead);
type Finish = unsafe fn(&[f32], &[f32], &mut [f32], &mut [f32]);
type Widen<T> = unsafe fn(*const T, *mut f32, usize) -> bool;
type RowKernel<T> = unsafe fn(RowSets, [usize; 2], *const T, usize, [usize; 3], Prefetch);

/// Entry points compiled for one instruction set. Holding a reference to one tells you that this machine has
/// that instruction set: [`kernels`] checks before it hands one out.
pub(crate) struct Kernels {
    /// Lanes of a vector.
    pub lanes: usize,
    /// Lanes of a tile.
    pub tile: usize,
    pub(super) gemm: Gemm,
    pub(super) gemm_transposed: Gemm,
    pub(super) softmax: unsafe fn(&mut SoftmaxArgs<'_>, Option<&mut LaneProbe<'_>>) -> SoftmaxStats,
    pub(super) grad: unsafe fn(&mut GradArgs<'_>),
    pub(super) scale_lanes: unsafe fn(*mut f32, usize, usize, *const f32),
    pub(super) transpose: unsafe fn(*const f32, usize, *mut f32, usize, usize, usize),
    pub(super) widen_f32: Widen<f32>,
    pub(super) widen_f16: Widen<f16>,
    pub(super) widen_bf16: Widen<bf16>,
    pub(super) narrow_f16: unsafe fn(*const f32, *mut f16, usize),
    pub(super) narrow_bf16: unsafe fn(&[f32], &mut [bf16]),
    pub(super) stream: unsafe fn(*const f32, *mut f32, usize),
    pub(super) fence: unsafe fn(),
    pub(super) dots_f32: RowKernel<f32>,
    pub(super) dots_f16: RowKernel<f16>,
    pub(super) dots_bf16: RowKernel<bf16>,
    pub(super) combine_f32: RowKernel<f32>,
    pub(super) combine_f16: RowKernel<f16>,
    pub(super) combine_bf16: RowKernel<bf16>,
    pub(super) evaluate: unsafe fn(&mut Evaluator<'_>, &Cells),
    pub(super) words: unsafe fn(&Evaluator<'_>, &Cells, &mut [u64]),
    pub(super) hide: unsafe fn(Plane<*mut f32>, &[u64], usize, usize),
    pub(super) finish: Finish,
    pub(super) lane_dots: unsafe fn(*const f32, *const f32, usize, usize, *mut f32),
    pub(super) best_keys: super::best_keys::BestKeys,
    pub(super) bands: super::band::Bands,
    pub(super) stage: unsafe fn(&mut Stage<'_>),
    pub(super) round_weights: unsafe fn(&mut [f32], usize, usize, (usize, usize), GroupFormat),
    pub(super) round_rows: unsafe fn(&mut [f32], usize, GroupFormat),
    pub(super) expand: unsafe fn(&Grouped, usize, usize, &mut [f32]),
    /// A matrix unit for the products of forward, if there is one.
    pub matrix: Option<&'static MatrixKernels>,
    /// Vectors that multiply bf16 as a matrix unit does, from its panels; they would be slow for every other type.
    pub(super) pairs: Option<&'static MatrixKernels>,
}

/// The kernels of an instruction set, if this machine has it.
pub(crate) fn kernels(isa: Isa) -> Option<&'static Kernels> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => (kernels(Isa::Avx512).is_some() && super::amx::available()).then_some(&super::amx::KERNELS),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            let has = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            has.then_some(&super::avx512::KERNELS)
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => {
            (kernels(Isa::Avx512).is_some() && super::dots::has_pairs()).then_some(&super::dots::KERNELS)
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            let has =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            has.then_some(&super::avx2::KERNELS)
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => Some(&super::neon::KERNELS),
        Isa::Portable => Some(&super::portable::KERNELS),
        _ => None,
    }
}

/// Elements from the first to the last of `rows` rows of `cols`, `stride` apart.
pub(super) fn extent(rows: usize, stride: usize, cols: usize) -> usize {
    if rows == 0 || cols == 0 { 0 } else { (rows - 1) * stride + cols }
}

/// A row-major operand of a product: rows `stride` apart.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub data: &'a [f32],
    pub stride: usize,
}

impl<'a> Matrix<'a> {
    pub fn new(data: &'a [f32], stride: usize) -> Self {
        Matrix { data, stride }
    }
    /// The part from a row and a column on.
    pub fn at(self, row: usize, column: usize) -> Self {
        Matrix { data: &self.data[row * self.stride + column..], stride: self.stride }
    }
}

/// The result of a product: rows `stride` apart.
pub(crate) struct MatrixMut<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
}

impl<'a> MatrixMut<'a> {
    /// The part of a matrix from a row and a column on.
    pub fn at(data: &'a mut [f32], stride: usize, row: usize, column: usize) -> Self {
        MatrixMut { data: &mut data[row * stride + column..], stride }
    }
}

/// Rows inside a tensor: the first begins at `offset`, they are `row` apart.
pub(crate) struct Strided<'a> {
    pub data: Data<'a>,
    pub offset: usize,
    pub row: usize,
}

impl Strided<'_> {
    fn range(&self, rows: usize, cols: usize) -> std::ops::Range<usize> {
        self.offset..self.offset + extent(rows, self.row, cols)
    }
}

impl Kernels {
    /// The unit that multiplies tensors of this type from panels, if there is one.
    pub fn matrix_for(&self, dtype: DType) -> Option<&'static MatrixKernels> {
        self.matrix.or(self.pairs.filter(|_| dtype == DType::Bf16))
    }

    /// C (+)= A B for `[m, n, k]`: C is m x n, A m x k, B k x n; n is a multiple of the lanes.
    pub fn gemm(
        &self,
        c: MatrixMut<'_>,
        a: Matrix<'_>,
        b: Matrix<'_>,
        [m, n, k]: [usize; 3],
        sum: Sum,
        ahead: &mut Ahead,
    ) {
        assert!(a.data.len() >= extent(m, a.stride, k), "A too small");
        self.product(self.gemm, c, a, b, [m, n, k], sum, ahead);
    }

    /// C (+)= A^T B for `[m, n, k]`: C is m x n, A k x m, B k x n; n is a multiple of the lanes.
    pub fn gemm_transposed(
        &self,
        c: MatrixMut<'_>,
        a: Matrix<'_>,
        b: Matrix<'_>,
        [m, n, k]: [usize; 3],
        sum: Sum,
        ahead: &mut Ahead,
    ) {
        assert!(a.data.len() >= extent(k, a.stride, m), "A too small");
        self.product(self.gemm_transposed, c, a, b, [m, n, k], sum, ahead);
    }

    fn product(
        &self,
        gemm: Gemm,
        c: MatrixMut<'_>,
        a: Matrix<'_>,
        b: Matrix<'_>,
        [m, n, k]: [usize; 3],
        sum: Sum,
        ahead: &mut Ahead,
    ) {
        assert!(n % self.lanes == 0 && c.data.len() >= extent(m, c.stride, n), "C too small");
        assert!(b.data.len() >= extent(k, b.stride, n), "B too small");
        let (to, a_at, b_at) = (c.data.as_mut_ptr(), a.data.as_ptr(), b.data.as_ptr());
        // SAFETY: the machine has the instruction set, and the extents were just checked (A by the caller).
        unsafe { gemm(to, c.stride, a_at, a.stride, b_at, b.stride, [m, n, k], sum == Sum::Onto, ahead) }
    }

    fn check_tile(&self, len: usize, stride: usize, ranges: &[(usize, usize)]) {
        let vectors = stride / self.lanes;
        assert!(stride.is_multiple_of(self.lanes) && stride <= self.tile, "lanes of the tile");
        assert!(ranges[..vectors].iter().all(|&(start, end)| start >= end || end * stride <= len), "keys of the tile");
    }

    /// One step of the online softmax, with the sums of a probe.
    pub fn softmax(&self, args: &mut SoftmaxArgs<'_>, probe: Option<&mut LaneProbe<'_>>) -> SoftmaxStats {
        self.check_tile(args.s.len(), args.stride, &args.ranges);
        if let Some(probe) = &probe {
            self.check_tile(probe.u.len(), args.stride, &args.ranges);
            assert!(probe.sums.len() >= args.stride, "lane arrays too small");
        }
        let lanes = [args.m.len(), args.l.len(), args.alpha.len(), args.lo.len(), args.hi.len()];
        assert!(lanes.iter().all(|&n| n >= args.stride), "lane arrays too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.softmax)(args, probe) }
    }

    /// The element-wise part of backward.
    pub fn grad(&self, args: &mut GradArgs<'_>) {
        self.check_tile(args.len(), args.stride, &args.ranges);
        let lanes = [args.lse.len(), args.max.len(), args.delta.len(), args.lo.len(), args.hi.len()];
        assert!(lanes.iter().all(|&n| n >= args.stride), "lane arrays too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.grad)(args) }
    }

    /// Multiplies every row of `x` lane by lane with `factor`.
    pub fn scale_lanes(&self, x: &mut [f32], factor: &[f32]) {
        let stride = factor.len();
        assert!(stride.is_multiple_of(self.lanes) && x.len().is_multiple_of(stride), "rows of lanes");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.scale_lanes)(x.as_mut_ptr(), x.len() / stride, stride, factor.as_ptr()) }
    }

    /// `dst[c][r] = src[r][c]`; `rows` and `cols` are multiples of the lanes.
    pub fn transpose(
        &self,
        src: &[f32],
        src_stride: usize,
        dst: &mut [f32],
        dst_stride: usize,
        rows: usize,
        cols: usize,
    ) {
        assert!(rows.is_multiple_of(self.lanes) && cols.is_multiple_of(self.lanes), "multiples of the lanes");
        assert!(
            src.len() >= extent(rows, src_stride, cols) && dst.len() >= extent(cols, dst_stride, rows),
            "too small"
        );
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.transpose)(src.as_ptr(), src_stride, dst.as_mut_ptr(), dst_stride, rows, cols) }
    }

    /// Like [`transpose`](Self::transpose), into rows of memory that others may write between them.
    ///
    /// # Safety
    /// `dst` has `size[1]` rows of `size[0]` elements, `dst_stride` apart, and nobody else touches these elements.
    pub unsafe fn transpose_to(
        &self,
        src: &[f32],
        src_stride: usize,
        dst: *mut f32,
        dst_stride: usize,
        [rows, cols]: [usize; 2],
    ) {
        assert!(rows.is_multiple_of(self.lanes) && cols.is_multiple_of(self.lanes), "multiples of the lanes");
        assert!(src.len() >= extent(rows, src_stride, cols), "too small");
        // SAFETY: the machine has the instruction set, `src` was just checked, `dst` is the caller's promise.
        unsafe { (self.transpose)(src.as_ptr(), src_stride, dst, dst_stride, rows, cols) }
    }

    /// Converts the elements of `src` from `offset` on; true if all are finite.
    pub fn widen(&self, src: &Data<'_>, offset: usize, dst: &mut [f32]) -> bool {
        let n = dst.len();
        // SAFETY: the machine has the instruction set, and slicing checks the extents.
        unsafe {
            match src {
                Data::F32(s) => (self.widen_f32)(s[offset..offset + n].as_ptr(), dst.as_mut_ptr(), n),
                Data::F16(s) => (self.widen_f16)(s[offset..offset + n].as_ptr(), dst.as_mut_ptr(), n),
                Data::Bf16(s) => (self.widen_bf16)(s[offset..offset + n].as_ptr(), dst.as_mut_ptr(), n),
                _ => unreachable!("bug in fulgurite: rows of a type that Problem refuses"),
            }
        }
    }

    /// Rounds to f16.
    pub fn narrow_f16(&self, src: &[f32], dst: &mut [f16]) {
        assert_eq!(src.len(), dst.len());
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.narrow_f16)(src.as_ptr(), dst.as_mut_ptr(), src.len()) }
    }

    /// Copies past the caches if the target is aligned; call [`fence`](Self::fence) before other threads read it.
    pub fn stream(&self, src: &[f32], dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len());
        let aligned = dst.as_ptr().addr().is_multiple_of(4 * self.lanes) && dst.len().is_multiple_of(self.lanes);
        if !aligned {
            return dst.copy_from_slice(src);
        }
        // SAFETY: the machine has the instruction set; extents and alignment were just checked.
        unsafe { (self.stream)(src.as_ptr(), dst.as_mut_ptr(), src.len()) }
    }

    /// Orders streamed stores before whatever follows.
    pub fn fence(&self) {
        // SAFETY: the machine has the instruction set.
        unsafe { (self.fence)() }
    }

    /// Rounds to bf16.
    pub fn narrow_bf16(&self, src: &[f32], dst: &mut [bf16]) {
        // SAFETY: the machine has the instruction set.
        unsafe { (self.narrow_bf16)(src, dst) }
    }

    /// `s[j * stride + r] = q[r] . k[j]` for few rows: `[rows, keys, d]`. `rows` has s and q, whose rows are `ldq`
    /// apart, and optionally a second pair, bitwise equal to a separate call. Prefetches the memory of
    /// `prefetch`.
    pub fn dots(
        &self,
        rows: &mut [(&mut [f32], &[f32])],
        [stride, ldq]: [usize; 2],
        k: &Strided<'_>,
        size: [usize; 3],
        prefetch: Prefetch,
    ) {
        let [n, keys, d] = size;
        for (s, q) in &*rows {
            assert!(n <= stride && s.len() >= extent(keys, stride, n), "scores too small");
            assert!(q.len() >= extent(n, ldq, d), "queries too small");
        }
        let (range, row, rows) = (k.range(keys, d), k.row, RowSets::new(rows));
        // SAFETY: the machine has the instruction set, and the extents were just checked (keys by slicing).
        unsafe {
            match k.data {
                Data::F32(k) => (self.dots_f32)(rows, [stride, ldq], k[range].as_ptr(), row, size, prefetch),
                Data::F16(k) => (self.dots_f16)(rows, [stride, ldq], k[range].as_ptr(), row, size, prefetch),
                Data::Bf16(k) => (self.dots_bf16)(rows, [stride, ldq], k[range].as_ptr(), row, size, prefetch),
                _ => unreachable!("bug in fulgurite: rows of a type that Problem refuses"),
            }
        }
    }

    /// `o[r] += sum_j p[j * stride + r] v[j]` for few rows: `[rows, keys, d]`. `rows` has o, whose rows are `ldo`
    /// apart, and p, as for [`dots`](Self::dots). Prefetches the memory of `prefetch`.
    pub fn combine(
        &self,
        rows: &mut [(&mut [f32], &[f32])],
        [stride, ldo]: [usize; 2],
        v: &Strided<'_>,
        size: [usize; 3],
        prefetch: Prefetch,
    ) {
        let [n, keys, d] = size;
        for (o, p) in &*rows {
            assert!(n <= stride && p.len() >= extent(keys, stride, n), "probabilities too small");
            assert!(o.len() >= extent(n, ldo, d), "output too small");
        }
        let (range, row, rows) = (v.range(keys, d), v.row, RowSets::new(rows));
        // SAFETY: the machine has the instruction set, and the extents were just checked (values by slicing).
        unsafe {
            match v.data {
                Data::F32(v) => (self.combine_f32)(rows, [stride, ldo], v[range].as_ptr(), row, size, prefetch),
                Data::F16(v) => (self.combine_f16)(rows, [stride, ldo], v[range].as_ptr(), row, size, prefetch),
                Data::Bf16(v) => (self.combine_bf16)(rows, [stride, ldo], v[range].as_ptr(), row, size, prefetch),
                _ => unreachable!("bug in fulgurite: rows of a type that Problem refuses"),
            }
        }
    }

    /// The elements of a row of q or o as [`dots`](Self::dots) and [`combine`](Self::combine) want it: `order[i]` is the
    /// element at place i. Vectors of bf16 come apart into firsts and seconds of pairs, which is cheaper than to widen.
    pub fn pair_order(&self, dtype: DType, d: usize) -> Vec<usize> {
        let lanes = self.lanes;
        let whole = if dtype == DType::Bf16 { paired(d, lanes) } else { 0 };
        let element = |i: usize| i / (2 * lanes) * (2 * lanes) + 2 * (i % lanes) + i / lanes % 2;
        (0..d).map(|i| if i < whole { element(i) } else { i }).collect()
    }

    /// Evaluates an expression on `n` keys, whose scores are `[key][lane]` with the given stride; the bits of the result
    /// go to `out`, laid out alike.
    pub fn evaluate(
        &self,
        evaluator: &mut Evaluator<'_>,
        first: i32,
        n: usize,
        (s, stride): (&[f32], usize),
        out: &mut [f32],
    ) {
        assert!(s.len().min(out.len()) >= extent(n, stride, evaluator.lanes()), "scores too small");
        let out = Plane { data: out.as_mut_ptr(), stride };
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe {
            let at = Cells::new(first, n, Plane { data: s.as_ptr(), stride }, Some(out));
            (self.evaluate)(evaluator, &at);
        }
    }

    /// Like [`evaluate`](Self::evaluate), in the place of the scores.
    pub fn modify(&self, evaluator: &mut Evaluator<'_>, first: i32, n: usize, (s, stride): (&mut [f32], usize)) {
        assert!(s.len() >= extent(n, stride, evaluator.lanes()), "scores too small");
        let data = s.as_mut_ptr();
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe {
            let at = Cells::new(first, n, Plane { data, stride }, Some(Plane { data, stride }));
            (self.evaluate)(evaluator, &at);
        }
    }

    /// Evaluates a condition that does not read scores, for one key per word: a bit for each lane that sees it.
    pub fn conditions(&self, evaluator: &mut Evaluator<'_>, first: i32, words: &mut [u64]) {
        assert!(!evaluator.reads_scores(), "a condition of indices");
        // SAFETY: the machine has the instruction set, and the program does not read scores.
        unsafe {
            let at = Cells::new(first, words.len(), Plane { data: std::ptr::null(), stride: 0 }, None);
            (self.evaluate)(evaluator, &at);
            (self.words)(evaluator, &at, words);
        }
    }

    /// Writes -inf over scores `[key][lane]` whose bit is not set; lane 0 has bit `first` of a key's word.
    pub fn hide(&self, (s, stride): (&mut [f32], usize), words: &[u64], first: usize) {
        assert!(stride.is_multiple_of(self.lanes) && first + stride <= 64, "lanes of the tile");
        assert!(s.len() >= words.len() * stride, "scores too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.hide)(Plane { data: s.as_mut_ptr(), stride }, words, first, stride) }
    }

    /// From running maximum and sum: 1 / sum (0 if there was no key) and the natural LSE.
    pub fn finish(&self, m: &[f32], l: &[f32], inverse: &mut [f32], lse: &mut [f32]) {
        // SAFETY: the machine has the instruction set.
        unsafe { (self.finish)(m, l, inverse, lse) }
    }

    /// Rounds weights of one vector of lanes from `lane` on, keys `range`, in the groups of a format.
    pub fn round_weights(&self, p: &mut [f32], stride: usize, lane: usize, range: (usize, usize), format: GroupFormat) {
        assert!(lane + self.lanes <= stride && p.len() >= range.1 * stride, "lanes of the tile");
        // SAFETY: the machine has the instruction set.
        unsafe { (self.round_weights)(p, stride, lane, range, format) }
    }

    /// Rounds rows of `cols` elements in groups along each row.
    pub fn round_rows(&self, x: &mut [f32], cols: usize, format: GroupFormat) {
        // SAFETY: the machine has the instruction set.
        unsafe { (self.round_rows)(x, cols, format) }
    }

    /// The values of one row's codes, starting at column `first`, which must start a group.
    pub fn expand(&self, from: &Grouped, row: usize, first: usize, out: &mut [f32]) {
        // SAFETY: the machine has the instruction set.
        unsafe { (self.expand)(from, row, first, out) }
    }

    /// `out[lane] = sum_i a[i][lane] b[i][lane]`, summed as [`gemm`](Self::gemm) sums.
    pub fn lane_dots(&self, a: &[f32], b: &[f32], out: &mut [f32]) {
        let stride = out.len();
        assert!(
            stride.is_multiple_of(self.lanes) && a.len() == b.len() && a.len().is_multiple_of(stride),
            "rows of lanes"
        );
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.lane_dots)(a.as_ptr(), b.as_ptr(), a.len() / stride, stride, out.as_mut_ptr()) }
    }

    /// One of the operations of the gated delta rule.
    pub fn stage(&self, mut stage: Stage<'_>) {
        assert!(stage.fits(self.lanes), "rows too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.stage)(&mut stage) }
    }
}
