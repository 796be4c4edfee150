//! bf16 on tiles without a detour over f32: rows are copied, transposed and paired as they are. Results of softmax and
//! backward are rounded on the way into the operands of the next product.
//!
//! There are two orders of the summed axis. Rows in memory order have neighbours in a slot (elements 2j and 2j + 1). If
//! the summed axis is computed here, a slot holds elements j and j + 16 of a tile, which needs no shuffle.

use super::Simd;
use super::algorithms::{GradArgs, LaneProbe, SoftmaxArgs, SoftmaxStats, begin, end};
use super::amx::{join, rounded};
use super::amx_store_output::store;
use super::avx512::Avx512;
use super::matrix::SLOTS;
use super::matrix_bf16::{Bf16Kernels, GradPanels, KEY_TILES, LANE_TILES};
use crate::step::Ranges;
use fulgurite_core::exp::EXP2_POLY;
use half::bf16;
use std::arch::x86_64::*;

pub(super) static BF16: Bf16Kernels =
    Bf16Kernels { copy_at, turn_at, pair_at, softmax, reweigh, grad, pack_grad, store };

/// Coefficients of 2^r: the error of degree 3 stays below the rounding to bf16.
pub(super) const CUBIC: [f32; 4] = [EXP2_POLY[0][0], EXP2_POLY[0][1], EXP2_POLY[0][2], EXP2_POLY[0][3]];
/// Above this many powers of two, a fused subtraction would round by more than bf16 does: 2^12 2^-24 ln 2.
pub(super) const FUSED_LIMIT: f32 = 4096.0;

/// The next 32 elements of a row, zero past its end.
///
/// # Safety
/// AVX-512 is present; `left` elements are valid at `p`.
#[inline(always)]
unsafe fn line(p: *const bf16, left: usize) -> __m512i {
    // SAFETY: the mask keeps the load inside the row.
    unsafe {
        if left >= 32 {
            _mm512_loadu_si512(p.cast())
        } else {
            _mm512_maskz_loadu_epi16((1u32 << left).wrapping_sub(1), p.cast())
        }
    }
}

/// A square of 16 by 16 dwords, turned.
///
/// # Safety
/// AVX-512 is present.
#[inline(always)]
pub(super) unsafe fn turned(r: &[__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: AVX-512 is present (contract).
    unsafe {
        let zero = _mm512_setzero_si512();
        // Pairs of rows, then quadruples, then 128-bit blocks twice.
        let (mut t, mut u, mut out) = ([zero; 16], [zero; 16], [zero; 16]);
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        for i in 0..4 {
            let [a, b, c, d] = [t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]];
            u[4 * i] = _mm512_unpacklo_epi64(a, c);
            u[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
            u[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
            u[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        // u[4 q + c], block s: column 4 s + c of rows 4 q .. 4 q + 3.
        for c in 0..4 {
            let (lo, hi) = (_mm512_shuffle_i32x4::<0x88>(u[c], u[4 + c]), _mm512_shuffle_i32x4::<0xdd>(u[c], u[4 + c]));
            let lo2 = _mm512_shuffle_i32x4::<0x88>(u[8 + c], u[12 + c]);
            let hi2 = _mm512_shuffle_i32x4::<0xdd>(u[8 + c], u[12 + c]);
            out[c] = _mm512_shuffle_i32x4::<0x88>(lo, lo2);
            out[4 + c] = _mm512_shuffle_i32x4::<0x88>(hi, hi2);
            out[8 + c] = _mm512_shuffle_i32x4::<0xdd>(lo, lo2);
            out[12 + c] = _mm512_shuffle_i32x4::<0xdd>(hi, hi2);
        }
        out
    }
}

/// Rows of A in memory order: like the other packers of rows, but neighbours share a slot.
///
/// # Safety
/// As for [`Simd`]: `rows` rows of `n` elements, `row` apart, and room for their panels of `depth` tiles.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn copy_rows(
    src: *const bf16,
    row: usize,
    [rows, n]: [usize; 2],
    dst: *mut f32,
    depth: usize,
) -> bool {
    // SAFETY: inside the extents; rows past the last are not read.
    unsafe { copy(|r| src.wrapping_add(r * row), [rows, n], dst, depth) }
}

/// Packs rows that start at `starts`.
///
/// # Safety
/// As for [`copy_rows`].
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn copy_at(src: *const bf16, starts: &[usize], n: usize, dst: *mut f32, depth: usize) {
    // SAFETY: passed on; only rows below the number of starts are asked for.
    unsafe { copy(|r| src.add(starts[r]), [starts.len(), n], dst, depth) };
}

/// True if all elements are finite.
#[inline(always)]
unsafe fn copy(at: impl Fn(usize) -> *const bf16, [rows, n]: [usize; 2], dst: *mut f32, depth: usize) -> bool {
    // SAFETY: inside the extents (caller).
    unsafe {
        let mut largest = _mm512_setzero_si512();
        for r in 0..rows.next_multiple_of(16) {
            for tile in 0..depth {
                let left = if r < rows { n.saturating_sub(tile * 32) } else { 0 };
                let x = if left == 0 { _mm512_setzero_si512() } else { line(at(r).add(tile * 32), left) };
                largest = _mm512_max_epu16(largest, _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)));
                _mm512_storeu_si512(dst.add((r / 16 * depth + tile) * SLOTS + r % 16 * 16).cast(), x);
            }
        }
        _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0
    }
}

/// Rows as columns of B, neighbours of a row in a slot: the other operand of [`copy_rows`].
///
/// # Safety
/// As for [`Simd`]: rows of `n` elements at `starts`, and room for their panels of `depth` tiles.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn turn_at(src: *const bf16, starts: &[usize], n: usize, dst: *mut f32, depth: usize) {
    for (group, starts) in starts.chunks(16).enumerate() {
        for tile in 0..depth {
            // SAFETY: inside the extents (caller).
            unsafe {
                let left = n.saturating_sub(tile * 32);
                let mut rows = [_mm512_setzero_si512(); 16];
                if left > 0 {
                    for (row, &start) in rows.iter_mut().zip(starts) {
                        *row = line(src.add(start + tile * 32), left);
                    }
                }
                let to = dst.add((group * depth + tile) * SLOTS);
                for (j, x) in turned(&rows).into_iter().enumerate() {
                    _mm512_storeu_si512(to.add(j * 16).cast(), x);
                }
            }
        }
    }
}

/// Rows as the summed axis of B: slot j of a tile holds rows j and j + 16, for each group of 16 columns.
///
/// # Safety
/// As for [`Simd`]: rows of `n` elements at `starts`, and room for panels of all columns, `depth` tiles deep.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn pair_at(src: *const bf16, starts: &[usize], n: usize, dst: *mut f32, depth: usize) {
    // SAFETY: inside the extents (caller); rows past the last are zero and not read.
    unsafe {
        let word = |i: i32| (i / 2 + i % 2 * 32) as i16;
        let order: [i16; 32] = std::array::from_fn(|i| word(i as i32));
        let low = _mm512_loadu_si512(order.as_ptr().cast());
        let high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for tile in 0..depth {
            for j in 0..16 {
                for column in (0..n).step_by(32) {
                    let row = |r: usize| match starts.get(r) {
                        Some(&start) => line(src.add(start + column), n - column),
                        None => _mm512_setzero_si512(),
                    };
                    let (a, b) = (row(tile * 32 + j), row(tile * 32 + 16 + j));
                    let to = dst.add((column / 16 * depth + tile) * SLOTS + j * 16);
                    _mm512_storeu_si512(to.cast(), _mm512_permutex2var_epi16(a, low, b));
                    if n - column > 16 {
                        _mm512_storeu_si512(to.add(depth * SLOTS).cast(), _mm512_permutex2var_epi16(a, high, b));
                    }
                }
            }
        }
    }
}

/// Rows as columns of A, the rows being the summed axis (slot j: rows j and j + 16). True if all are finite.
///
/// # Safety
/// As for [`Simd`]: `rows` rows of `n` elements, `row` apart, and room for panels of `n` rows and `depth` tiles.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn turn_columns(
    src: *const bf16,
    row: usize,
    [rows, n]: [usize; 2],
    dst: *mut f32,
    depth: usize,
) -> bool {
    // SAFETY: inside the extents; rows and columns past the last are not read.
    unsafe {
        let (zero, size) = (_mm512_setzero_si512(), _mm512_set1_epi16(0x7fff));
        let mut largest = zero;
        for tile in 0..rows.div_ceil(32) {
            for column in (0..n).step_by(32) {
                let (mut low, mut high) = ([zero; 16], [zero; 16]);
                for j in 0..16 {
                    let load = |r: usize| {
                        if r < rows { line(src.add(r * row + column), n - column) } else { zero }
                    };
                    let (a, b) = (load(tile * 32 + j), load(tile * 32 + 16 + j));
                    let sizes = _mm512_max_epu16(_mm512_and_si512(a, size), _mm512_and_si512(b, size));
                    largest = _mm512_max_epu16(largest, sizes);
                    low[j] = _mm512_unpacklo_epi16(a, b);
                    high[j] = _mm512_unpackhi_epi16(a, b);
                }
                // Unpacking took columns 0-3 and 4-7 of every eight.
                for (block, offset) in [(low, 0), (high, 4)] {
                    for (i, x) in turned(&block).into_iter().enumerate() {
                        let c = column + i / 4 * 8 + i % 4 + offset;
                        if c < n.next_multiple_of(16) {
                            _mm512_storeu_si512(dst.add((c / 16 * depth + tile) * SLOTS + c % 16 * 16).cast(), x);
                        }
                    }
                }
            }
        }
        _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7f80)) == 0
    }
}

/// t for the exponential: (x - shift) log2 e, fused if that is exact enough.
#[derive(Clone, Copy)]
struct Argument {
    shift: __m512,
    log2_e: __m512,
    product: __m512,
}

impl Argument {
    /// The second result: whether fusing is exact enough.
    #[inline(always)]
    unsafe fn new(shift: __m512, log2_e: f32) -> (Self, bool) {
        // SAFETY: AVX-512 is present (contract of the callers, as below).
        unsafe {
            let log2_e = _mm512_set1_ps(log2_e);
            let product = _mm512_mul_ps(shift, log2_e);
            let within = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(_mm512_abs_ps(product), _mm512_set1_ps(FUSED_LIMIT));
            // An infinite shift (a row without keys) is fine either way.
            let none = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(shift, _mm512_set1_ps(f32::INFINITY));
            (Argument { shift, log2_e, product }, within | none == 0xffff)
        }
    }
    #[inline(always)]
    unsafe fn exp<const FUSED: bool>(self, x: __m512) -> __m512 {
        // SAFETY: AVX-512 is present (contract of the callers).
        unsafe {
            let t = if FUSED {
                _mm512_fmsub_ps(x, self.log2_e, self.product)
            } else {
                _mm512_mul_ps(_mm512_sub_ps(x, self.shift), self.log2_e)
            };
            Avx512::exp2(t, &CUBIC)
        }
    }
}

/// One step of the online softmax, with P rounded and packed as the columns of the second product: for each vector
/// of lanes `pitch` slots apart.
///
/// # Safety
/// As for [`Simd`]; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn softmax(
    args: &mut SoftmaxArgs<'_>,
    out: *mut f32,
    pitch: usize,
    mut probe: Option<&mut LaneProbe<'_>>,
) -> SoftmaxStats {
    let mut stats = SoftmaxStats::default();
    // SAFETY: as for `Simd`.
    unsafe {
        for z in 0..args.stride / 16 {
            let Some(begun) = begin::<Avx512>(args, z, &mut stats) else { continue };
            let (argument, fused) = Argument::new(begun.shift, std::f32::consts::LOG2_E * args.scale);
            let (s, to) = (args.s.as_ptr().add(z * 16), out.add(z * pitch));
            let (stride, range) = (args.stride, args.ranges[z]);
            let Some(probe) = &mut probe else {
                let [sum, _] = if fused {
                    weigh::<true, false>(s, stride, range, argument, to, (s, to))
                } else {
                    weigh::<false, false>(s, stride, range, argument, to, (s, to))
                };
                end::<Avx512>(args, z, begun, sum, &mut stats);
                continue;
            };
            let u = (probe.u.as_ptr().add(z * 16), probe.packed.as_mut_ptr().add(z * pitch));
            let [sum, own] = if fused {
                weigh::<true, true>(s, stride, range, argument, to, u)
            } else {
                weigh::<false, true>(s, stride, range, argument, to, u)
            };
            end::<Avx512>(args, z, begun, sum, &mut stats);
            let (at, alpha) = (probe.sums.as_mut_ptr().add(z * 16), args.alpha.as_ptr().add(z * 16));
            Avx512::store(at, Avx512::fma(Avx512::load(at), Avx512::load(alpha), own));
        }
    }
    stats
}

/// P of one vector of lanes, packed; the sum. With PROBE also U, packed, and the sum of P U.
#[inline(always)]
unsafe fn weigh<const FUSED: bool, const PROBE: bool>(
    s: *const f32,
    stride: usize,
    (start, end): (usize, usize),
    argument: Argument,
    out: *mut f32,
    (u, u_out): (*const f32, *mut f32),
) -> [__m512; 2] {
    // SAFETY: keys of the range are valid (caller).
    unsafe {
        let mut sums = [_mm512_setzero_ps(); 2];
        let mut probed = [_mm512_setzero_ps(); 2];
        for tile in start / 32..end.div_ceil(32) {
            let first = tile * 32;
            let whole = start <= first && first + 32 <= end;
            for j in 0..16 {
                let keys = [first + j, first + 16 + j];
                let mut p = [_mm512_setzero_ps(); 2];
                let mut own = [_mm512_setzero_ps(); 2];
                for i in 0..2 {
                    if whole || (start <= keys[i] && keys[i] < end) {
                        p[i] = argument.exp::<FUSED>(_mm512_loadu_ps(s.add(keys[i] * stride)));
                        sums[i] = _mm512_add_ps(sums[i], p[i]);
                        if PROBE {
                            // A key that weighs nothing may hold anything.
                            let bits = _mm512_castps_si512(p[i]);
                            let seen = _mm512_test_epi32_mask(bits, bits);
                            own[i] = _mm512_maskz_loadu_ps(seen, u.add(keys[i] * stride));
                            probed[i] = _mm512_fmadd_ps(p[i], own[i], probed[i]);
                        }
                    }
                }
                let at = tile * SLOTS + j * 16;
                _mm512_storeu_si512(out.add(at).cast(), join(rounded(p[0]), rounded(p[1])));
                if PROBE {
                    _mm512_storeu_si512(u_out.add(at).cast(), join(rounded(own[0]), rounded(own[1])));
                }
            }
        }
        [sums, probed].map(|[a, b]| _mm512_add_ps(a, b))
    }
}

/// P and dS of one key and one vector of lanes. Methods instead of closures: these are inlined into functions that
/// enable the instruction set.
trait Gradient {
    /// Whether [`inner`](Self::inner) serves 32 keys from `first` on.
    unsafe fn whole(&self, first: usize, z: usize) -> bool;
    unsafe fn inner(&self, key: usize, z: usize) -> (__m512, __m512);
    unsafe fn edge(&self, key: usize, z: usize) -> (__m512, __m512);
}

struct Fresh<'a, 'b> {
    args: &'a GradArgs<'b>,
    lanes: [(Argument, __m512); 4],
    scale: __m512,
    fused: bool,
}

impl Fresh<'_, '_> {
    #[inline(always)]
    unsafe fn score(&self, key: usize, z: usize) -> __m512 {
        // SAFETY: inside the tile (callers).
        unsafe { _mm512_loadu_ps(self.args.s.as_ptr().add(key * self.args.stride + z * 16)) }
    }
    #[inline(always)]
    unsafe fn ds(&self, key: usize, z: usize, p: __m512) -> __m512 {
        // SAFETY: inside the tile (callers).
        unsafe {
            let at = key * self.args.stride + z * 16;
            let dp = _mm512_loadu_ps(self.args.dp.as_ptr().add(at));
            let ds = _mm512_mul_ps(p, _mm512_fmsub_ps(dp, self.scale, self.lanes[z].1));
            let Some(derivative) = self.args.derivative else { return ds };
            // Where dS is 0, the derivative may be anything.
            let some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(ds, _mm512_setzero_ps());
            _mm512_mask_mul_ps(ds, some, ds, _mm512_loadu_ps(derivative.as_ptr().add(at)))
        }
    }
    /// The lanes whose score is not hidden.
    #[inline(always)]
    unsafe fn shown(&self, x: __m512) -> __mmask16 {
        // SAFETY: AVX-512 is present (callers).
        unsafe { !_mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(f32::MIN)) }
    }
}

impl Gradient for Fresh<'_, '_> {
    #[inline(always)]
    unsafe fn whole(&self, first: usize, z: usize) -> bool {
        let inner = self.args.inner[z];
        self.fused && inner.0 <= first && first + 32 <= inner.1
    }
    #[inline(always)]
    unsafe fn inner(&self, key: usize, z: usize) -> (__m512, __m512) {
        // SAFETY: passed on.
        unsafe {
            let x = self.score(key, z);
            let p = self.lanes[z].0.exp::<true>(x);
            let ds = self.ds(key, z, p);
            if self.args.hidden {
                // A hidden key may hold anything: its dP is not multiplied away but replaced.
                let seen = self.shown(x);
                return (_mm512_maskz_mov_ps(seen, p), _mm512_maskz_mov_ps(seen, ds));
            }
            (p, ds)
        }
    }
    #[inline(always)]
    unsafe fn edge(&self, key: usize, z: usize) -> (__m512, __m512) {
        let args = self.args;
        // SAFETY: passed on; lane arrays have as many elements as the tile has lanes.
        unsafe {
            if key < args.ranges[z].0 || key >= args.ranges[z].1 {
                return (_mm512_setzero_ps(), _mm512_setzero_ps());
            }
            let x = self.score(key, z);
            let argument = &self.lanes[z].0;
            let p = if self.fused { argument.exp::<true>(x) } else { argument.exp::<false>(x) };
            let ds = self.ds(key, z, p);
            // A hidden key may hold anything: its dP is not multiplied away but replaced.
            let mut seen = 0xffff;
            if key < args.inner[z].0 || key >= args.inner[z].1 {
                let lo = _mm512_loadu_ps(args.lo.as_ptr().add(z * 16));
                let hi = _mm512_loadu_ps(args.hi.as_ptr().add(z * 16));
                seen = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(lo, _mm512_set1_ps(key as f32 + 1.0))
                    & _mm512_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_set1_ps(key as f32), hi);
            }
            if args.hidden {
                seen &= self.shown(x);
            }
            (_mm512_maskz_mov_ps(seen, p), _mm512_maskz_mov_ps(seen, ds))
        }
    }
}

/// P and dS that were made before.
struct Made<'a, 'b>(&'a GradArgs<'b>);

impl Gradient for Made<'_, '_> {
    #[inline(always)]
    unsafe fn whole(&self, first: usize, z: usize) -> bool {
        self.0.ranges[z].0 <= first && first + 32 <= self.0.ranges[z].1
    }
    #[inline(always)]
    unsafe fn inner(&self, key: usize, z: usize) -> (__m512, __m512) {
        let at = key * self.0.stride + z * 16;
        // SAFETY: inside the tile (callers).
        unsafe { (_mm512_loadu_ps(self.0.s.as_ptr().add(at)), _mm512_loadu_ps(self.0.dp.as_ptr().add(at))) }
    }
    #[inline(always)]
    unsafe fn edge(&self, key: usize, z: usize) -> (__m512, __m512) {
        // SAFETY: passed on.
        unsafe {
            if key < self.0.ranges[z].0 || key >= self.0.ranges[z].1 {
                return (_mm512_setzero_ps(), _mm512_setzero_ps());
            }
            self.inner(key, z)
        }
    }
}

/// P = e^(s - lse) and dS = P (scale dP - scale D), rounded and packed for the three products of backward.
///
/// # Safety
/// As for [`Simd`]; the extents are checked by the table.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn grad(args: &GradArgs<'_>, score_scale: f32, out: &mut GradPanels<'_>) {
    // SAFETY: as for `Simd`.
    unsafe {
        let zero = _mm512_setzero_ps();
        let nothing = (Argument { shift: zero, log2_e: zero, product: zero }, zero);
        let mut fresh = Fresh { args, lanes: [nothing; 4], scale: _mm512_set1_ps(args.scale), fused: true };
        for z in 0..args.stride / 16 {
            // Scores are in units of `score_scale`, the LSE is not.
            let lse = _mm512_div_ps(_mm512_loadu_ps(args.lse.as_ptr().add(z * 16)), _mm512_set1_ps(score_scale));
            let (argument, near) = Argument::new(lse, std::f32::consts::LOG2_E * score_scale);
            fresh.fused &= near;
            fresh.lanes[z] = (argument, _mm512_loadu_ps(args.delta.as_ptr().add(z * 16)));
        }
        pack(args, &fresh, out);
    }
}

/// Packs P and dS that were computed before, in the same layout.
///
/// # Safety
/// As for [`grad`].
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn pack_grad(args: &GradArgs<'_>, out: &mut GradPanels<'_>) {
    // SAFETY: as for `Simd`.
    unsafe { pack(args, &Made(args), out) }
}

/// Rounds and packs a block's P and dS.
#[inline(always)]
unsafe fn pack<G: Gradient>(args: &GradArgs<'_>, from: &G, out: &mut GradPanels<'_>) {
    // SAFETY: the table checked the extents.
    unsafe {
        let vectors = args.stride / 16;
        let (mut first, mut last) = (usize::MAX, 0);
        for &(a, b) in &args.ranges[..vectors] {
            if a < b {
                (first, last) = (first.min(a), last.max(b));
            }
        }
        let (p_rows, ds_rows) = (out.p_rows.as_mut_ptr(), out.ds_rows.as_mut_ptr());
        let ds_lanes = out.ds_lanes.as_mut_ptr();
        for tile in first / 32..last.div_ceil(32) {
            for pair in 0..vectors.div_ceil(2) {
                let z = 2 * pair;
                let both = z + 1 < vectors;
                let whole = both && from.whole(tile * 32, z) && from.whole(tile * 32, z + 1);
                // Rows of keys j and j + 16 of the tile, and their slots by lanes.
                let rows = (tile * 2 * LANE_TILES + pair) * SLOTS;
                let lanes = (z * KEY_TILES + tile) * SLOTS;
                for j in 0..16 {
                    // [key][vector]
                    let (mut p, mut ds) = ([[_mm512_setzero_si512(); 2]; 2], [[_mm512_setzero_si512(); 2]; 2]);
                    for i in 0..2 {
                        let key = tile * 32 + 16 * i + j;
                        for x in 0..2 {
                            if whole || x == 0 || both {
                                let made = if whole { from.inner(key, z + x) } else { from.edge(key, z + x) };
                                (p[i][x], ds[i][x]) = (rounded(made.0), rounded(made.1));
                            }
                        }
                    }
                    for i in 0..2 {
                        let at = rows + i * LANE_TILES * SLOTS + j * 16;
                        _mm512_storeu_si512(p_rows.add(at).cast(), join(p[i][0], p[i][1]));
                        _mm512_storeu_si512(ds_rows.add(at).cast(), join(ds[i][0], ds[i][1]));
                    }
                    #[allow(clippy::needless_range_loop)] // rows of both keys
                    for x in 0..2 {
                        let at = lanes + x * KEY_TILES * SLOTS + j * 16;
                        _mm512_storeu_si512(ds_lanes.add(at).cast(), join(ds[0][x], ds[1][x]));
                    }
                }
            }
        }
    }
}

/// The two weights of each slot.
///
/// # Safety
/// AVX-512 is present; a slot of each lane at `p`.
#[inline(always)]
unsafe fn weights(p: *const f32) -> [__m512; 2] {
    // SAFETY: as above.
    unsafe {
        let both = _mm512_loadu_si512(p.cast());
        let upper = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000u32 as i32));
        [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(upper)]
    }
}

/// # Safety
/// AVX-512 is present; groups of lanes are `pitch` slots apart in the weights and U, and all whole tiles of the ranges are
/// inside them.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn reweigh(panels: *mut f32, u: *const f32, pitch: usize, ranges: &Ranges, mean: &[f32]) {
    for (z, mean) in mean.as_chunks::<16>().0.iter().enumerate() {
        let (start, end) = ranges[z];
        if start >= end {
            continue;
        }
        // SAFETY: inside the extents (caller).
        unsafe {
            let one = _mm512_add_ps(_mm512_set1_ps(1.0), Avx512::load(mean.as_ptr()));
            for at in (start / 32 * SLOTS..end.div_ceil(32) * SLOTS).step_by(16) {
                let to = panels.add(z * pitch + at);
                let (p, u) = (weights(to), weights(u.add(z * pitch + at)));
                let own = |half: usize| rounded(_mm512_mul_ps(p[half], _mm512_sub_ps(one, u[half])));
                _mm512_storeu_si512(to.cast(), join(own(0), own(1)));
            }
        }
    }
}
