//! The kernels, generic over the instruction set and inlined into its entry points.

use super::Simd;
use super::kernels::MAX_VECTORS;
use fulgurite_core::Data;
use fulgurite_core::exp::{EXP2_POLY, SAS_POLY};

/// Coefficients of 2^r on [0, 1), lowest first; relative error 5e-9, far below one f32 rounding.
const EXP2_NATIVE: [f32; 8] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_5,
    0.055_504_44,
    0.009_616_16,
    0.001_338_905_3,
    0.000_146_096_32,
    2.073_186_4e-5,
];

/// 2^t for one number, as [`Simd::exp2`] does it for a vector.
#[inline(always)]
pub(super) fn exp2_scalar<const N: usize>(t: f32, coefficients: &[f32; N]) -> f32 {
    let clamped = t.clamp(-127.0, 127.999); // NaN stays
    let floor = clamped.floor();
    let r = clamped - floor;
    let mut p = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        p = p * r + coefficients[i];
    }
    let scaled = f32::from_bits(((floor as i32) << 23).wrapping_add(p.to_bits() as i32) as u32);
    let scaled = if t < -126.0 { 0.0 } else { scaled };
    let scaled = if t >= 128.0 { f32::INFINITY } else { scaled };
    if t.is_nan() { t } else { scaled }
}

/// Which exponential a call uses, in powers of two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ExpKind {
    /// A polynomial of degree 3, 4 or 5.
    Poly(u8),
    /// The polynomial for this many of 16 keys in a row, the native exponential for the others.
    Mixed(u8, u8),
    Native,
    /// TurboAttention's function; the threshold is in natural units.
    Sas(f32),
}

/// One exponential, applied to t = log2(e) x.
trait Exponential<S: Simd> {
    /// # Safety
    /// As for the methods of [`Simd`].
    unsafe fn eval(&self, t: S::V, key: usize) -> S::V;
}

struct Poly<const N: usize>([f32; N]);

impl<S: Simd, const N: usize> Exponential<S> for Poly<N> {
    #[inline(always)]
    unsafe fn eval(&self, t: S::V, _: usize) -> S::V {
        // SAFETY: passed on.
        unsafe { S::exp2(t, &self.0) }
    }
}

struct Mixed<const N: usize>([f32; N], usize);

impl<S: Simd, const N: usize> Exponential<S> for Mixed<N> {
    #[inline(always)]
    unsafe fn eval(&self, t: S::V, key: usize) -> S::V {
        // SAFETY: passed on.
        unsafe { if key % 16 < self.1 { S::exp2(t, &self.0) } else { S::exp2(t, &EXP2_NATIVE) } }
    }
}

struct Sas(f32);

impl<S: Simd> Exponential<S> for Sas {
    #[inline(always)]
    unsafe fn eval(&self, t: S::V, _: usize) -> S::V {
        // SAFETY: passed on.
        unsafe {
            // The maximum itself may come out a rounding above 0, where the table has no entry.
            let x = S::max(S::splat(0.0), S::mul(t, S::splat(-std::f32::consts::LN_2)));
            let n = S::floor(x);
            let f = S::sub(x, n);
            let mut cubic = S::splat(SAS_POLY[3]);
            for c in SAS_POLY[..3].iter().rev() {
                cubic = S::fma(cubic, f, S::splat(*c));
            }
            let table = S::exp2(S::mul(n, S::splat(-std::f32::consts::LOG2_E)), &EXP2_NATIVE);
            // NaN is not below the threshold and stays.
            S::select(S::lt(S::splat(-self.0), x), S::splat(0.0), S::mul(table, cubic))
        }
    }
}

/// Runs `$body` with `$exp` bound to the exponential that `$kind` names.
macro_rules! with_exp {
    ($kind:expr, $exp:ident => $body:expr) => {
        match $kind {
            ExpKind::Poly(3) => {
                let $exp = Poly::<4>(EXP2_POLY[0][..4].try_into().unwrap());
                $body
            }
            ExpKind::Poly(4) => {
                let $exp = Poly::<5>(EXP2_POLY[1][..5].try_into().unwrap());
                $body
            }
            ExpKind::Poly(_) => {
                let $exp = Poly::<6>(EXP2_POLY[2]);
                $body
            }
            ExpKind::Native => {
                let $exp = Poly::<8>(EXP2_NATIVE);
                $body
            }
            ExpKind::Mixed(degree, share) => {
                // The unused upper coefficients are zero.
                let $exp = Mixed::<6>(EXP2_POLY[usize::from(degree) - 3], usize::from(share));
                $body
            }
            ExpKind::Sas(threshold) => {
                let $exp = Sas(threshold);
                $body
            }
        }
    };
}

/// One block of MR rows and NV vectors of C (+)= A B. A is read element by element and broadcast:
/// `a[i * lda + p]`, or `a[p * lda + i]` where it is transposed.
///
/// # Safety
/// All extents must be valid, and as for [`Simd`].
#[inline(always)]
unsafe fn micro<S: Simd, const MR: usize, const NV: usize, const TRANSPOSED: bool>(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    lda: usize,
    b: *const f32,
    ldb: usize,
    k: usize,
    add: bool,
) {
    // SAFETY: the caller's extents cover MR rows and NV vectors.
    unsafe {
        let mut sums = [[S::splat(0.0); NV]; MR];
        let mut b = b;
        let mut a = a;
        let step = if TRANSPOSED { lda } else { 1 };
        for _ in 0..k {
            let mut columns = [S::splat(0.0); NV];
            for (z, column) in columns.iter_mut().enumerate() {
                *column = S::load(b.add(z * S::LANES));
            }
            for (i, row) in sums.iter_mut().enumerate() {
                let x = S::splat(*a.add(if TRANSPOSED { i } else { i * lda }));
                for z in 0..NV {
                    row[z] = S::fma(x, columns[z], row[z]);
                }
            }
            b = b.add(ldb);
            a = a.add(step);
        }
        for (i, row) in sums.iter().enumerate() {
            for (z, &sum) in row.iter().enumerate() {
                let at = c.add(i * ldc + z * S::LANES);
                S::store(at, if add { S::add(S::load(at), sum) } else { sum });
            }
        }
    }
}

/// Rows that will be read soon: a product asks for a few after each of its blocks, so that memory works while the
/// multipliers do, and no burst of requests stops them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ahead {
    streams: [Stream; 3],
}

#[derive(Debug, Clone, Copy)]
struct Stream {
    start: *const u8,
    row_bytes: usize,
    bytes: usize,
    rows: usize,
}

impl Default for Stream {
    fn default() -> Self {
        Stream { start: std::ptr::null(), row_bytes: 0, bytes: 0, rows: 0 }
    }
}

impl Ahead {
    /// Rows asked for after each block.
    const ROWS: usize = 3;

    /// Adds `rows` rows of `n` elements, `row` apart, from `offset` on. Nothing is read: any address will do.
    pub fn push_rows(&mut self, data: &Data<'_>, offset: usize, row: usize, n: usize, rows: usize) {
        let (start, size) = match data {
            Data::F32(s) => (s.as_ptr().cast::<u8>(), 4),
            Data::F16(s) => (s.as_ptr().cast(), 2),
            Data::Bf16(s) => (s.as_ptr().cast(), 2),
            _ => return,
        };
        if let Some(free) = self.streams.iter_mut().find(|s| s.rows == 0) {
            *free = Stream { start: start.wrapping_add(offset * size), row_bytes: row * size, bytes: n * size, rows };
        }
    }

    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn ask<S: Simd>(&mut self) {
        for stream in &mut self.streams {
            if stream.rows == 0 {
                continue;
            }
            for _ in 0..Self::ROWS.min(stream.rows) {
                for line in (0..stream.bytes).step_by(64) {
                    // SAFETY: passed on; a prefetch may name any address.
                    unsafe { S::prefetch(stream.start.wrapping_add(line)) };
                }
                stream.start = stream.start.wrapping_add(stream.row_bytes);
            }
            stream.rows = stream.rows.saturating_sub(Self::ROWS);
            return;
        }
    }
}

/// NV vectors wide, any number of rows: blocks of MR, then of 4, 2 and 1.
///
/// # Safety
/// As for [`micro`].
#[inline(always)]
pub(super) unsafe fn block<S: Simd, const MR: usize, const NV: usize, const TRANSPOSED: bool>(
    c: *mut f32,
    ldc: usize,
    a: *const f32,
    lda: usize,
    b: *const f32,
    ldb: usize,
    m: usize,
    k: usize,
    add: bool,
    ahead: &mut Ahead,
) {
    // A remainder of 2 after sixes is better taken as 4 + 4: both keep the multipliers busy.
    let blocks = if MR == 6 && m % MR == 2 && m > MR { m / MR - 1 } else { m / MR };
    // SAFETY: rows 0..m are valid, and each block stays inside.
    unsafe {
        let row = |i: usize| if TRANSPOSED { a.add(i) } else { a.add(i * lda) };
        let mut i = 0;
        for _ in 0..blocks {
            ahead.ask::<S>();
            micro::<S, MR, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
            i += MR;
        }
        while i + 4 <= m {
            micro::<S, 4, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
            i += 4;
        }
        while i + 2 <= m {
            micro::<S, 2, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
            i += 2;
        }
        if i < m {
            micro::<S, 1, NV, TRANSPOSED>(c.add(i * ldc), ldc, row(i), lda, b, ldb, k, add);
        }
    }
}

/// What a softmax step does with the running maximum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Policy {
    /// Raise it where a score exceeds it by more than this many powers of two, and rescale.
    Raise(f32),
    /// Use it as it is where it is finite, and say so where the sum exceeds the limit.
    Trust(f32),
    /// Raise it and compute nothing else.
    MaxOnly,
    /// Use it as it is: it is final.
    Final,
}

/// One step of the online softmax over a tile of scores `[keys][lanes]`.
pub(crate) struct SoftmaxArgs<'a> {
    /// Scores in, probabilities out.
    pub s: &'a mut [f32],
    /// Lanes of the tile: distance between keys.
    pub stride: usize,
    /// For each vector of lanes the keys it sees; others are not touched.
    pub ranges: [(usize, usize); MAX_VECTORS],
    /// Of these, keys that every lane of the vector sees.
    pub inner: [(usize, usize); MAX_VECTORS],
    /// First key of each lane, and the one after the last, where its vector's `inner` is less than its range.
    pub lo: &'a [f32],
    pub hi: &'a [f32],
    /// Running maximum and sum of each lane, and the factor for what was accumulated before.
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
    pub alpha: &'a mut [f32],
    pub exp: ExpKind,
    pub policy: Policy,
}

/// What a softmax step did, in lanes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SoftmaxStats {
    /// Lanes whose maximum could have been raised after their first key.
    pub possible: u32,
    /// Lanes that were rescaled.
    pub rescaled: u32,
    /// Lanes whose trusted maximum was too low: the scores must be computed again.
    pub distrusted: u32,
}

/// # Safety
/// As for [`Simd`]; the extents of `args` are checked by the table.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(args: &mut SoftmaxArgs<'_>) -> SoftmaxStats {
    // SAFETY: passed on.
    unsafe { with_exp!(args.exp, exp => softmax_with::<S, _>(args, &exp)) }
}

#[inline(always)]
unsafe fn softmax_with<S: Simd, E: Exponential<S>>(args: &mut SoftmaxArgs<'_>, exp: &E) -> SoftmaxStats {
    let mut stats = SoftmaxStats::default();
    let stride = args.stride;
    // SAFETY: the table checked that ranges lie inside `s` and that lane arrays have `stride` elements.
    unsafe {
        let hidden = S::splat(f32::NEG_INFINITY);
        let log2_e = S::splat(std::f32::consts::LOG2_E);
        for z in 0..S::VECTORS {
            let lane = z * S::LANES;
            if lane >= stride {
                break;
            }
            let alpha_at = args.alpha.as_mut_ptr().add(lane);
            let (start, end) = args.ranges[z];
            if start >= end {
                S::store(alpha_at, S::splat(1.0));
                continue;
            }
            let s = args.s.as_mut_ptr().add(lane);
            let m_at = args.m.as_mut_ptr().add(lane);
            let l_at = args.l.as_mut_ptr().add(lane);
            let (first, last) = args.inner[z];
            if (first, last) != (start, end) {
                let (lo, hi) = (S::load(args.lo.as_ptr().add(lane)), S::load(args.hi.as_ptr().add(lane)));
                for key in (start..first).chain(last..end) {
                    let at = s.add(key * stride);
                    let j = S::splat(key as f32);
                    // lo <= j as lo < j + 1: both are small integers
                    let seen = S::and(S::lt(lo, S::splat(key as f32 + 1.0)), S::lt(j, hi));
                    S::store(at, S::select(seen, S::load(at), hidden));
                }
            }
            let old = S::load(m_at);
            let finite = S::lt(hidden, old);
            let all_finite = S::count(finite) as usize == S::LANES;
            let trust = match args.policy {
                Policy::Final => true,
                Policy::Trust(_) => all_finite,
                _ => false,
            };
            let mut m = old;
            let mut alpha = S::splat(1.0);
            if !trust {
                // Eight chains cover the latency of the maximum. NaN scores do not raise it.
                let mut highest = [hidden; 8];
                let mut key = start;
                while key + 8 <= end {
                    for (i, high) in highest.iter_mut().enumerate() {
                        *high = S::max(S::load(s.add((key + i) * stride)), *high);
                    }
                    key += 8;
                }
                while key < end {
                    highest[0] = S::max(S::load(s.add(key * stride)), highest[0]);
                    key += 1;
                }
                let mut top = highest[0];
                for &high in &highest[1..] {
                    top = S::max(high, top);
                }
                let new = top;
                let tau = match args.policy {
                    Policy::Raise(tau) => tau * std::f32::consts::LN_2,
                    _ => 0.0,
                };
                let higher = S::lt(old, new);
                // Lanes that have seen nothing take any maximum.
                let raise = S::lt(S::add(old, S::splat(tau)), new);
                m = S::select(raise, new, old);
                S::store(m_at, m);
                if args.policy == Policy::MaxOnly {
                    continue;
                }
                stats.possible += S::count(S::and(higher, finite));
                let rescaled = S::and(raise, finite);
                stats.rescaled += S::count(rescaled);
                alpha = S::select(rescaled, S::exp2(S::mul(S::sub(old, m), log2_e), &EXP2_NATIVE), S::splat(1.0));
            }
            // m is -inf in a lane that has seen no key: subtract 0 there, not inf - inf.
            let shift = S::select(S::lt(hidden, m), m, S::splat(0.0));
            let mut sum = S::splat(0.0);
            for key in start..end {
                let at = s.add(key * stride);
                // Not one fused operation: the maximum must give exactly 1, however large it is.
                let p = exp.eval(S::mul(S::sub(S::load(at), shift), log2_e), key);
                S::store(at, p);
                sum = S::add(sum, p);
            }
            if let Policy::Trust(limit) = args.policy {
                // NaN counts as within: it would come out of a repetition as well.
                stats.distrusted += if trust { S::count(S::lt(S::splat(limit), sum)) } else { 0 };
            }
            S::store(l_at, S::fma(S::load(l_at), alpha, sum));
            S::store(alpha_at, alpha);
        }
    }
    stats
}

/// The element-wise part of backward over a tile `[keys][lanes]`:
/// P = e^(s - lse), dS = P (scale dP - scale D).
pub(crate) struct GradArgs<'a> {
    /// Scores in, probabilities out.
    pub s: &'a mut [f32],
    /// dP in, dS out.
    pub dp: &'a mut [f32],
    /// Lanes of the tile: distance between keys.
    pub stride: usize,
    /// For each vector of lanes the keys it sees; others are not touched.
    pub ranges: [(usize, usize); MAX_VECTORS],
    /// Of these, keys that every lane of the vector sees.
    pub inner: [(usize, usize); MAX_VECTORS],
    pub lo: &'a [f32],
    pub hi: &'a [f32],
    /// Whether scores of hidden keys were set to -inf.
    pub hidden: bool,
    /// LSE of each lane; +inf for a row without keys.
    pub lse: &'a [f32],
    /// Maximum of each lane, for [`ExpKind::Sas`].
    pub max: &'a [f32],
    /// `scale` times D of each lane.
    pub delta: &'a [f32],
    /// The problem's scale, where no modifier stands between score and dS; else 1.
    pub scale: f32,
    pub exp: ExpKind,
}

/// # Safety
/// As for [`Simd`]; the extents of `args` are checked by the table.
#[inline(always)]
pub(super) unsafe fn grad<S: Simd>(args: &mut GradArgs<'_>) {
    // SAFETY: passed on.
    unsafe { with_exp!(args.exp, exp => grad_with::<S, _>(args, &exp)) }
}

#[inline(always)]
unsafe fn grad_with<S: Simd, E: Exponential<S>>(args: &mut GradArgs<'_>, exp: &E) {
    let stride = args.stride;
    let sas = matches!(args.exp, ExpKind::Sas(_));
    // SAFETY: the table checked that ranges lie inside the tiles and that lane arrays have `stride` elements.
    unsafe {
        let zero = S::splat(0.0);
        let (log2_e, scale) = (S::splat(std::f32::consts::LOG2_E), S::splat(args.scale));
        for z in 0..S::VECTORS {
            let lane = z * S::LANES;
            if lane >= stride {
                break;
            }
            let (start, end) = args.ranges[z];
            let s = args.s.as_mut_ptr().add(lane);
            let dp = args.dp.as_mut_ptr().add(lane);
            let lse = S::load(args.lse.as_ptr().add(lane));
            let delta = S::sub(zero, S::load(args.delta.as_ptr().add(lane)));
            // The function of TurboAttention is taken against the maximum; the sum divides afterwards.
            let top = if sas { S::load(args.max.as_ptr().add(lane)) } else { lse };
            let factor = if sas { S::exp2(S::mul(S::sub(top, lse), log2_e), &EXP2_NATIVE) } else { S::splat(1.0) };
            let (first, last) = args.inner[z];
            let (lo, hi) = (S::load(args.lo.as_ptr().add(lane)), S::load(args.hi.as_ptr().add(lane)));
            for key in start..end {
                let (s_at, dp_at) = (s.add(key * stride), dp.add(key * stride));
                let score = S::load(s_at);
                let mut p = exp.eval(S::mul(S::sub(score, top), log2_e), key);
                if sas {
                    p = S::mul(p, factor);
                }
                let mut ds = S::mul(p, S::fma(S::load(dp_at), scale, delta));
                // A hidden key may hold anything: its dP is not multiplied away but replaced.
                if key < first || key >= last {
                    let seen = S::and(S::lt(lo, S::splat(key as f32 + 1.0)), S::lt(S::splat(key as f32), hi));
                    p = S::select(seen, p, zero);
                    ds = S::select(seen, ds, zero);
                }
                if args.hidden {
                    let gone = S::lt(score, S::splat(f32::MIN));
                    p = S::select(gone, zero, p);
                    ds = S::select(gone, zero, ds);
                }
                S::store(s_at, p);
                S::store(dp_at, ds);
            }
        }
    }
}

/// Copies past the caches.
///
/// # Safety
/// As for [`Simd`], with `n` elements on both sides, a multiple of the lanes, and `dst` aligned to a vector.
#[inline(always)]
pub(super) unsafe fn stream<S: Simd>(src: *const f32, dst: *mut f32, n: usize) {
    for i in (0..n).step_by(S::LANES) {
        // SAFETY: inside the extents.
        unsafe { S::stream(dst.add(i), S::load(src.add(i))) };
    }
}

/// `rows[i][lane] *= factor[lane]`.
///
/// # Safety
/// As for [`Simd`], with `rows * stride` elements at `x` and `stride` at `factor`.
#[inline(always)]
pub(super) unsafe fn scale_lanes<S: Simd>(x: *mut f32, rows: usize, stride: usize, factor: *const f32) {
    for i in 0..rows {
        for lane in (0..stride).step_by(S::LANES) {
            // SAFETY: inside the extents.
            unsafe {
                let at = x.add(i * stride + lane);
                S::store(at, S::mul(S::load(at), S::load(factor.add(lane))));
            }
        }
    }
}

/// `out[lane] = sum_i a[i][lane] b[i][lane]`, in the order in which [`micro`] sums a product: where O is a row of
/// V, D equals dP to the bit.
///
/// # Safety
/// As for [`Simd`], with `rows * stride` elements at `a` and `b` and `stride` at `out`.
#[inline(always)]
pub(super) unsafe fn lane_dots<S: Simd>(a: *const f32, b: *const f32, rows: usize, stride: usize, out: *mut f32) {
    for lane in (0..stride).step_by(S::LANES) {
        // SAFETY: inside the extents.
        unsafe {
            let mut sum = S::splat(0.0);
            for i in 0..rows {
                let at = i * stride + lane;
                sum = S::fma(S::load(a.add(at)), S::load(b.add(at)), sum);
            }
            S::store(out.add(lane), sum);
        }
    }
}

/// `dst[c][r] = src[r][c]`; both sizes are multiples of the lanes.
///
/// # Safety
/// As for [`Simd`], with valid extents.
#[inline(always)]
pub(super) unsafe fn transpose<S: Simd>(
    src: *const f32,
    src_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
    rows: usize,
    cols: usize,
) {
    for r in (0..rows).step_by(S::LANES) {
        for c in (0..cols).step_by(S::LANES) {
            // SAFETY: inside the extents.
            unsafe {
                S::transpose(src.add(r * src_stride + c), src_stride, dst.add(c * dst_stride + r), dst_stride);
            }
        }
    }
}

/// The bits of a row's element type.
pub(crate) trait Row: Copy {
    /// # Safety
    /// As for [`Simd`], with LANES elements at `p`.
    unsafe fn vector<S: Simd>(p: *const Self) -> S::V;
    /// The next two vectors, in pair order.
    ///
    /// # Safety
    /// As for [`Simd`], with 2 LANES elements at `p`.
    #[inline(always)]
    unsafe fn pair<S: Simd>(p: *const Self) -> (S::V, S::V) {
        // SAFETY: passed on.
        unsafe { (Self::vector::<S>(p), Self::vector::<S>(p.add(S::LANES))) }
    }
    fn one(self) -> f32;
}

/// Elements that [`dots`] and [`combine`] read in pair order: whole groups of four vectors.
pub(super) const fn paired(d: usize, lanes: usize) -> usize {
    d / (4 * lanes) * (4 * lanes)
}

impl Row for f32 {
    #[inline(always)]
    unsafe fn vector<S: Simd>(p: *const f32) -> S::V {
        // SAFETY: passed on.
        unsafe { S::load(p) }
    }
    #[inline(always)]
    fn one(self) -> f32 {
        self
    }
}

impl Row for half::f16 {
    #[inline(always)]
    unsafe fn vector<S: Simd>(p: *const half::f16) -> S::V {
        // SAFETY: passed on; f16 is a transparent u16.
        unsafe { S::load_f16(p.cast()) }
    }
    #[inline(always)]
    fn one(self) -> f32 {
        self.to_f32()
    }
}

impl Row for half::bf16 {
    #[inline(always)]
    unsafe fn vector<S: Simd>(p: *const half::bf16) -> S::V {
        // SAFETY: passed on; bf16 is a transparent u16.
        unsafe { S::load_bf16(p.cast()) }
    }
    #[inline(always)]
    unsafe fn pair<S: Simd>(p: *const half::bf16) -> (S::V, S::V) {
        // SAFETY: passed on; bf16 is a transparent u16.
        unsafe { S::load_bf16_pairs(p.cast()) }
    }
    #[inline(always)]
    fn one(self) -> f32 {
        self.to_f32()
    }
}

/// Converts `n` elements to f32; true if all are finite.
///
/// # Safety
/// As for [`Simd`], with `n` elements on both sides.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, T: Row>(src: *const T, dst: *mut f32, n: usize) -> bool {
    // SAFETY: inside the extents.
    unsafe {
        // x * 0 is 0 for finite x and NaN for the others.
        let mut odd = S::splat(0.0);
        let mut i = 0;
        while i + S::LANES <= n {
            let x = T::vector::<S>(src.add(i));
            odd = S::fma(x, S::splat(0.0), odd);
            S::store(dst.add(i), x);
            i += S::LANES;
        }
        let mut finite = S::count(S::lt(odd, S::splat(1.0))) as usize == S::LANES;
        while i < n {
            let x = (*src.add(i)).one();
            finite &= x.is_finite();
            *dst.add(i) = x;
            i += 1;
        }
        finite
    }
}

/// Rounds `n` elements to f16.
///
/// # Safety
/// As for [`Simd`], with `n` elements on both sides.
#[inline(always)]
pub(super) unsafe fn narrow_f16<S: Simd>(src: *const f32, dst: *mut half::f16, n: usize) {
    // SAFETY: inside the extents.
    unsafe {
        let mut i = 0;
        while i + S::LANES <= n {
            S::store_f16(dst.add(i).cast(), S::load(src.add(i)));
            i += S::LANES;
        }
        while i < n {
            *dst.add(i) = half::f16::from_f32(*src.add(i));
            i += 1;
        }
    }
}

/// Rounds `n` elements to bf16, to nearest even. Plain integer code that every compiler vectorises.
#[inline(always)]
pub(super) fn narrow_bf16(src: &[f32], dst: &mut [half::bf16]) {
    for (x, y) in src.iter().zip(dst) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40; // a NaN must not round to infinity
        let nan = bits & 0x7fff_ffff > 0x7f80_0000;
        *y = half::bf16::from_bits(if nan { quiet } else { rounded } as u16);
    }
}

/// Scores of R rows against K keys, read where they lie: `s[j * stride + r] = q[r] . k[j]`. Vectors run along
/// the head dimension, q in pair order; R * K is the number of lanes, or K is 1.
///
/// # Safety
/// As for [`Simd`]: K rows of `d` elements, `row` apart, at `k`; R rows of `d`, `ldq` apart, at `q`.
#[inline(always)]
pub(super) unsafe fn dots<S: Simd, T: Row, const R: usize, const K: usize>(
    s: *mut f32,
    stride: usize,
    q: *const f32,
    ldq: usize,
    k: *const T,
    row: usize,
    d: usize,
    ahead: usize,
) {
    // SAFETY: inside the extents.
    unsafe {
        let mut sums = [[S::splat(0.0); R]; K];
        let mut i = 0;
        while i < paired(d, S::LANES) {
            let mut rows = [(S::splat(0.0), S::splat(0.0)); R];
            for (r, x) in rows.iter_mut().enumerate() {
                let at = q.add(r * ldq + i);
                *x = (S::load(at), S::load(at.add(S::LANES)));
            }
            for (j, sum) in sums.iter_mut().enumerate() {
                let at = k.add(j * row + i);
                S::prefetch(at.wrapping_add(ahead).cast());
                let (a, b) = T::pair::<S>(at);
                for r in 0..R {
                    sum[r] = S::fma(b, rows[r].1, S::fma(a, rows[r].0, sum[r]));
                }
            }
            i += 2 * S::LANES;
        }
        while i + S::LANES <= d {
            for (j, sum) in sums.iter_mut().enumerate() {
                let key = T::vector::<S>(k.add(j * row + i));
                for (r, sum) in sum.iter_mut().enumerate() {
                    *sum = S::fma(key, S::load(q.add(r * ldq + i)), *sum);
                }
            }
            i += S::LANES;
        }
        let mut totals = [0.0f32; 16];
        if R * K == S::LANES {
            S::store(totals.as_mut_ptr(), S::sums(sums.as_flattened()));
        } else {
            let mut lanes = [0.0f32; 16];
            for (total, &vector) in totals.iter_mut().zip(sums.as_flattened()) {
                S::store(lanes.as_mut_ptr(), vector);
                *total = lanes[..S::LANES].iter().sum();
            }
        }
        for j in 0..K {
            for r in 0..R {
                let mut score = totals[j * R + r];
                for x in i..d {
                    score += *q.add(r * ldq + x) * (*k.add(j * row + x)).one();
                }
                *s.add(j * stride + r) = score;
            }
        }
    }
}

/// `o[r][..] += sum_j p[j * stride + r] v[j][..]` for R rows and V vectors of columns: one, or an even number
/// in pair order.
///
/// # Safety
/// As for [`Simd`]: `keys` rows of at least `V * LANES` elements, `row` apart, at `v`.
#[inline(always)]
pub(super) unsafe fn combine<S: Simd, T: Row, const R: usize, const V: usize>(
    o: *mut f32,
    ldo: usize,
    p: *const f32,
    stride: usize,
    v: *const T,
    row: usize,
    keys: usize,
    ahead: usize,
) {
    // SAFETY: inside the extents.
    unsafe {
        let mut sums = [[S::splat(0.0); V]; R];
        for (r, sum) in sums.iter_mut().enumerate() {
            for (z, x) in sum.iter_mut().enumerate() {
                *x = S::load(o.add(r * ldo + z * S::LANES));
            }
        }
        for j in 0..keys {
            let mut values = [S::splat(0.0); V];
            if V == 1 {
                values[0] = T::vector::<S>(v.add(j * row));
            } else {
                for z in 0..V / 2 {
                    let at = v.add(j * row + 2 * z * S::LANES);
                    S::prefetch(at.wrapping_add(ahead).cast());
                    (values[2 * z], values[2 * z + 1]) = T::pair::<S>(at);
                }
            }
            for (r, sum) in sums.iter_mut().enumerate() {
                let weight = S::splat(*p.add(j * stride + r));
                for z in 0..V {
                    sum[z] = S::fma(weight, values[z], sum[z]);
                }
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            for (z, &x) in sum.iter().enumerate() {
                S::store(o.add(r * ldo + z * S::LANES), x);
            }
        }
    }
}
