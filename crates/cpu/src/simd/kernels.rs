//! The table of entry points of an instruction set, and its safe face.

use super::MatrixKernels;
use super::algorithms::{Ahead, FewRows, GradArgs, SoftmaxArgs, SoftmaxStats, Stage, paired};
use super::coming::Coming;
use crate::Isa;
use crate::evaluate::Evaluator;
use fulgurite_core::format::{GroupFormat, Grouped};
use fulgurite_core::{DType, Data};
use half::{bf16, f16};

/// No instruction set has wider tiles, in vectors.
pub(crate) const MAX_VECTORS: usize = 4;

/// Whether a product replaces or adds to what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    Fresh,
    Onto,
}

type Gemm = unsafe fn(*mut f32, usize, *const f32, usize, *const f32, usize, [usize; 3], bool, &mut Ahead);
type Finish = unsafe fn(&[f32], &[f32], &mut [f32], &mut [f32]);
type Widen<T> = unsafe fn(*const T, *mut f32, usize) -> bool;
type Few<T> = unsafe fn(FewRows, [usize; 2], *const T, usize, [usize; 3], Coming);

/// Entry points compiled for one instruction set. Holding a reference to one tells you that this machine has
/// that instruction set: [`kernels`] checks before it hands one out.
pub(crate) struct Kernels {
    /// Lanes of a vector.
    pub lanes: usize,
    /// Lanes of a tile.
    pub tile: usize,
    pub(super) gemm: Gemm,
    pub(super) gemm_transposed: Gemm,
    pub(super) softmax: unsafe fn(&mut SoftmaxArgs<'_>) -> SoftmaxStats,
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
    pub(super) dots_f32: Few<f32>,
    pub(super) dots_f16: Few<f16>,
    pub(super) dots_bf16: Few<bf16>,
    pub(super) combine_f32: Few<f32>,
    pub(super) combine_f16: Few<f16>,
    pub(super) combine_bf16: Few<bf16>,
    pub(super) evaluate: unsafe fn(&mut Evaluator<'_>, i32, &[f32]),
    pub(super) finish: Finish,
    pub(super) lane_dots: unsafe fn(*const f32, *const f32, usize, usize, *mut f32),
    pub(super) folds: super::folds::Folds,
    pub(super) stage: unsafe fn(&mut Stage<'_>),
    pub(super) round_weights: unsafe fn(&mut [f32], usize, usize, (usize, usize), GroupFormat),
    pub(super) round_rows: unsafe fn(&mut [f32], usize, GroupFormat),
    pub(super) expand: unsafe fn(&Grouped, usize, usize, &mut [f32]),
    /// A matrix unit beside the vectors, for the products of forward.
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
    /// Who multiplies tensors of this type from panels, if anybody does.
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

    /// One step of the online softmax.
    pub fn softmax(&self, args: &mut SoftmaxArgs<'_>) -> SoftmaxStats {
        self.check_tile(args.s.len(), args.stride, &args.ranges);
        let lanes = [args.m.len(), args.l.len(), args.alpha.len(), args.lo.len(), args.hi.len()];
        assert!(lanes.iter().all(|&n| n >= args.stride), "lane arrays too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.softmax)(args) }
    }

    /// The element-wise part of backward.
    pub fn grad(&self, args: &mut GradArgs<'_>) {
        self.check_tile(args.s.len().min(args.dp.len()), args.stride, &args.ranges);
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

    /// Copies past the caches where the target is aligned; [`fence`](Self::fence) must follow before others read it.
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

    /// `s[j * stride + r] = q[r] . k[j]` for few rows: `[rows, keys, d]`; `rows` has s and q, which is `ldq` from row to row,
    /// and maybe a second pair beside it: its bits are those of a call of its own. What comes is asked for.
    pub fn dots(
        &self,
        rows: &mut [(&mut [f32], &[f32])],
        [stride, ldq]: [usize; 2],
        k: &Strided<'_>,
        size: [usize; 3],
        coming: Coming,
    ) {
        let [n, keys, d] = size;
        for (s, q) in &*rows {
            assert!(n <= stride && s.len() >= extent(keys, stride, n), "scores too small");
            assert!(q.len() >= extent(n, ldq, d), "queries too small");
        }
        let (range, row, rows) = (k.range(keys, d), k.row, FewRows::new(rows));
        // SAFETY: the machine has the instruction set, and the extents were just checked (keys by slicing).
        unsafe {
            match k.data {
                Data::F32(k) => (self.dots_f32)(rows, [stride, ldq], k[range].as_ptr(), row, size, coming),
                Data::F16(k) => (self.dots_f16)(rows, [stride, ldq], k[range].as_ptr(), row, size, coming),
                Data::Bf16(k) => (self.dots_bf16)(rows, [stride, ldq], k[range].as_ptr(), row, size, coming),
                _ => unreachable!("bug in fulgurite: rows of a type that Problem refuses"),
            }
        }
    }

    /// `o[r] += sum_j p[j * stride + r] v[j]` for few rows: `[rows, keys, d]`; `rows` has o, which is `ldo` from row to row, and
    /// p, as for [`dots`](Self::dots). What comes is asked for.
    pub fn combine(
        &self,
        rows: &mut [(&mut [f32], &[f32])],
        [stride, ldo]: [usize; 2],
        v: &Strided<'_>,
        size: [usize; 3],
        coming: Coming,
    ) {
        let [n, keys, d] = size;
        for (o, p) in &*rows {
            assert!(n <= stride && p.len() >= extent(keys, stride, n), "probabilities too small");
            assert!(o.len() >= extent(n, ldo, d), "output too small");
        }
        let (range, row, rows) = (v.range(keys, d), v.row, FewRows::new(rows));
        // SAFETY: the machine has the instruction set, and the extents were just checked (values by slicing).
        unsafe {
            match v.data {
                Data::F32(v) => (self.combine_f32)(rows, [stride, ldo], v[range].as_ptr(), row, size, coming),
                Data::F16(v) => (self.combine_f16)(rows, [stride, ldo], v[range].as_ptr(), row, size, coming),
                Data::Bf16(v) => (self.combine_bf16)(rows, [stride, ldo], v[range].as_ptr(), row, size, coming),
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

    /// Evaluates an expression on one row of lanes; the result is in the evaluator.
    pub fn evaluate(&self, evaluator: &mut Evaluator<'_>, key: i32, scores: &[f32]) {
        // SAFETY: the machine has the instruction set.
        unsafe { (self.evaluate)(evaluator, key, scores) }
    }

    /// From running maximum and sum: 1 / sum (0 where there was no key) and the natural LSE.
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

    /// What the codes of one row mean, from column `first` on, which begins a group.
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

/// Compiles the generic kernels for one instruction set. The list gives, for each width of a block in
/// vectors, the rows whose accumulators fill the register file.
macro_rules! define_kernels {
    ($simd:ident, [$($feature:meta)?], [$(($vectors:literal, $rows:literal)),*]) => {
        pub(super) static KERNELS: super::Kernels = TABLE;
        pub(super) const TABLE: super::Kernels = {
            use crate::simd::algorithms as alg;
            use crate::simd::Coming;
            use crate::simd::algorithms::{FewRows, Row};
            use half::{bf16, f16};

            #[inline(always)]
            unsafe fn product<const TRANSPOSED: bool>(
                c: *mut f32, ldc: usize, a: *const f32, lda: usize, b: *const f32, ldb: usize, [m, n, k]: [usize; 3], add: bool, ahead: &mut alg::Ahead,
            ) {
                let mut at = 0;
                while at < n {
                    let vectors = ((n - at) / $simd::LANES).min($simd::VECTORS);
                    // SAFETY: the caller's extents cover columns at .. at + vectors.
                    unsafe {
                        let (c, b) = (c.add(at), b.add(at));
                        match vectors {
                            $($vectors => alg::block::<$simd, $rows, $vectors, TRANSPOSED>(c, ldc, a, lda, b, ldb, m, k, add, ahead),)*
                            _ => unreachable!("bug in fulgurite: a block of no width"),
                        }
                    }
                    at += vectors * $simd::LANES;
                }
            }

            $(#[$feature])?
            unsafe fn gemm(
                c: *mut f32, ldc: usize, a: *const f32, lda: usize, b: *const f32, ldb: usize, size: [usize; 3], add: bool, ahead: &mut alg::Ahead,
            ) {
                // SAFETY: passed on.
                unsafe { product::<false>(c, ldc, a, lda, b, ldb, size, add, ahead) }
            }
            $(#[$feature])?
            unsafe fn gemm_transposed(
                c: *mut f32, ldc: usize, a: *const f32, lda: usize, b: *const f32, ldb: usize, size: [usize; 3], add: bool, ahead: &mut alg::Ahead,
            ) {
                // SAFETY: passed on.
                unsafe { product::<true>(c, ldc, a, lda, b, ldb, size, add, ahead) }
            }
            $(#[$feature])?
            unsafe fn softmax(args: &mut alg::SoftmaxArgs<'_>) -> alg::SoftmaxStats {
                // SAFETY: passed on.
                unsafe { alg::softmax::<$simd>(args) }
            }
            $(#[$feature])?
            unsafe fn grad(args: &mut alg::GradArgs<'_>) {
                // SAFETY: passed on.
                unsafe { alg::grad::<$simd>(args) }
            }
            $(#[$feature])?
            unsafe fn scale_lanes(x: *mut f32, rows: usize, stride: usize, factor: *const f32) {
                // SAFETY: passed on.
                unsafe { alg::scale_lanes::<$simd>(x, rows, stride, factor) }
            }
            $(#[$feature])?
            unsafe fn transpose(src: *const f32, ss: usize, dst: *mut f32, ds: usize, rows: usize, cols: usize) {
                // SAFETY: passed on.
                unsafe { alg::transpose::<$simd>(src, ss, dst, ds, rows, cols) }
            }
            $(#[$feature])?
            unsafe fn widen<T: Row>(src: *const T, dst: *mut f32, n: usize) -> bool {
                // SAFETY: passed on.
                unsafe { alg::widen::<$simd, T>(src, dst, n) }
            }
            $(#[$feature])?
            unsafe fn narrow_f16(src: *const f32, dst: *mut f16, n: usize) {
                // SAFETY: passed on.
                unsafe { alg::narrow_f16::<$simd>(src, dst, n) }
            }
            $(#[$feature])?
            unsafe fn narrow_bf16(src: &[f32], dst: &mut [bf16]) {
                alg::narrow_bf16(src, dst)
            }
            $(#[$feature])?
            unsafe fn stream(src: *const f32, dst: *mut f32, n: usize) {
                // SAFETY: passed on.
                unsafe { alg::stream::<$simd>(src, dst, n) }
            }
            $(#[$feature])?
            unsafe fn fence() {
                // SAFETY: passed on.
                unsafe { $simd::fence() }
            }
            /// Rows four at a time (else one by one, or one of each pair), keys as many as one transpose can take.
            $(#[$feature])?
            unsafe fn dots<T: Row>(
                rows: FewRows, [stride, ldq]: [usize; 2], k: *const T, row: usize, [n, keys, d]: [usize; 3], mut coming: Coming,
            ) {
                const BY_FOUR: usize = $simd::LANES / 4;
                const BY_ONE: usize = $simd::LANES;
                const BY_TWO: usize = $simd::LANES / 2;
                let mut r = 0;
                while r < n {
                    let four = n - r >= 4;
                    let most = if four { BY_FOUR } else { BY_ONE };
                    let mut j = 0;
                    while j < keys {
                        let many = keys - j >= most;
                        // SAFETY: rows r .. r + 4 or r + 1 and keys j .. j + most or j + 1 are inside.
                        unsafe {
                            let (s, q) = (rows.out.map(|s| s.wrapping_add(j * stride + r)), rows.by.map(|q| q.wrapping_add(r * ldq)));
                            let k = k.add(j * row);
                            if !four && many && rows.both {
                                // The keys that one row alone takes at once, so that sums are the same.
                                for half in 0..2 {
                                    let s = s.map(|s| s.add(half * BY_TWO * stride));
                                    alg::dots::<$simd, T, 2, BY_TWO>(s, stride, q, k.add(half * BY_TWO * row), row, d, &mut coming);
                                }
                            } else {
                                for i in 0..if rows.both { 2 } else { 1 } {
                                    let fours = |p: *mut f32| [0, 1, 2, 3].map(|r| p.wrapping_add(r));
                                    let (s, s4, q) = (s[i], fours(s[i]), q[i]);
                                    let q4 = [0, 1, 2, 3].map(|r| q.wrapping_add(r * ldq));
                                    // The second of a pair reads what the first has read.
                                    let mut nothing = Coming::NOTHING;
                                    let coming = if i == 0 { &mut coming } else { &mut nothing };
                                    match (four, many) {
                                        (true, true) => alg::dots::<$simd, T, 4, BY_FOUR>(s4, stride, q4, k, row, d, coming),
                                        (true, false) => alg::dots::<$simd, T, 4, 1>(s4, stride, q4, k, row, d, coming),
                                        (false, true) => alg::dots::<$simd, T, 1, BY_ONE>([s], stride, [q], k, row, d, coming),
                                        (false, false) => alg::dots::<$simd, T, 1, 1>([s], stride, [q], k, row, d, coming),
                                    }
                                }
                            }
                        }
                        j += if many { most } else { 1 };
                    }
                    r += if four { 4 } else { 1 };
                }
            }
            /// Rows four at a time, columns four vectors at a time, the last columns one by one.
            $(#[$feature])?
            unsafe fn combine<T: Row>(
                rows: FewRows, [stride, ldo]: [usize; 2], v: *const T, row: usize, [n, keys, d]: [usize; 3], mut coming: Coming,
            ) {
                let both = if rows.both { 2 } else { 1 };
                let mut r = 0;
                while r < n {
                    let four = n - r >= 4;
                    let mut c = 0;
                    while c < d {
                        let wide = d - c >= 4 * $simd::LANES;
                        // SAFETY: rows r .. r + 4 or r + 1 and the columns of each arm are inside.
                        unsafe {
                            let (o, p) = (rows.out.map(|o| o.wrapping_add(r * ldo + c)), rows.by.map(|p| p.wrapping_add(r)));
                            let v = v.add(c);
                            if d - c < $simd::LANES {
                                for (x, i, which) in (0..d - c).flat_map(|x| (0..if four { 4 } else { 1 }).flat_map(move |i| (0..both).map(move |w| (x, i, w)))) {
                                    let to = o[which].add(i * ldo + x);
                                    for j in 0..keys {
                                        *to += *p[which].add(j * stride + i) * (*v.add(j * row + x)).one();
                                    }
                                }
                                break;
                            }
                            if rows.both && !four {
                                if wide {
                                    alg::combine::<$simd, T, 2, 4>(o, p, stride, v, row, keys, &mut coming);
                                } else {
                                    alg::combine::<$simd, T, 2, 1>(o, p, stride, v, row, keys, &mut coming);
                                }
                            } else {
                                for i in 0..both {
                                    let (o, o4) = (o[i], [0, 1, 2, 3].map(|r| o[i].wrapping_add(r * ldo)));
                                    let (p, p4) = (p[i], [0, 1, 2, 3].map(|r| p[i].wrapping_add(r)));
                                    let mut nothing = Coming::NOTHING;
                                    let coming = if i == 0 { &mut coming } else { &mut nothing };
                                    match (four, wide) {
                                        (true, true) => alg::combine::<$simd, T, 4, 4>(o4, p4, stride, v, row, keys, coming),
                                        (true, false) => alg::combine::<$simd, T, 4, 1>(o4, p4, stride, v, row, keys, coming),
                                        (false, true) => alg::combine::<$simd, T, 1, 4>([o], [p], stride, v, row, keys, coming),
                                        (false, false) => alg::combine::<$simd, T, 1, 1>([o], [p], stride, v, row, keys, coming),
                                    }
                                }
                            }
                        }
                        c += if wide { 4 * $simd::LANES } else { $simd::LANES };
                    }
                    r += if four { 4 } else { 1 };
                }
            }
            $(#[$feature])?
            unsafe fn evaluate(evaluator: &mut crate::evaluate::Evaluator<'_>, key: i32, scores: &[f32]) {
                evaluator.row(key, scores)
            }
            $(#[$feature])?
            unsafe fn finish(m: &[f32], l: &[f32], inverse: &mut [f32], lse: &mut [f32]) {
                crate::evaluate::finish(m, l, inverse, lse)
            }
            $(#[$feature])?
            unsafe fn lane_dots(a: *const f32, b: *const f32, rows: usize, stride: usize, out: *mut f32) {
                // SAFETY: passed on.
                unsafe { alg::lane_dots::<$simd>(a, b, rows, stride, out) }
            }
            $(#[$feature])?
            unsafe fn stage(stage: &mut alg::Stage<'_>) {
                // SAFETY: passed on.
                unsafe { alg::stage::<$simd>(stage) }
            }

            $(#[$feature])?
            unsafe fn round_weights(
                p: &mut [f32], stride: usize, lane: usize, range: (usize, usize), format: fulgurite_core::format::GroupFormat,
            ) {
                alg::round_weights::<{ $simd::LANES }>(p, stride, lane, range, format)
            }

            $(#[$feature])?
            unsafe fn round_rows(x: &mut [f32], cols: usize, format: fulgurite_core::format::GroupFormat) {
                alg::round_rows(x, cols, format)
            }
            $(#[$feature])?
            unsafe fn expand(from: &fulgurite_core::format::Grouped, row: usize, first: usize, out: &mut [f32]) {
                alg::expand(from, row, first, out)
            }

            super::Kernels {
                lanes: $simd::LANES,
                tile: $simd::LANES * $simd::VECTORS,
                gemm,
                gemm_transposed,
                softmax,
                grad,
                scale_lanes,
                transpose,
                widen_f32: widen::<f32>,
                widen_f16: widen::<f16>,
                widen_bf16: widen::<bf16>,
                narrow_f16,
                narrow_bf16,
                stream,
                fence,
                dots_f32: dots::<f32>,
                dots_f16: dots::<f16>,
                dots_bf16: dots::<bf16>,
                combine_f32: combine::<f32>,
                combine_f16: combine::<f16>,
                combine_bf16: combine::<bf16>,
                evaluate,
                finish,
                lane_dots,
                folds: super::folds::define_folds!($simd, [$($feature)?]),
                stage,
                round_weights,
                round_rows,
                expand,
                matrix: None,
                pairs: None,
            }
        };
    };
}
pub(super) use define_kernels;
