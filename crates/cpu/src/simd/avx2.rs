//! 256-bit vectors with fused multiply-add: 8 lanes, 16 registers. A tile is 16 queries wide.

use super::Simd;
use super::instantiate::define_kernels;
use fulgurite_core::exp::SAS_ENTRIES;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

// SAFETY: the table of this type is handed out only after detection of the features it enables.
unsafe impl Simd for Avx2 {
    type V = __m256;
    type M = __m256;
    const LANES: usize = 8;
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: AVX2 is present (trait contract); so for every block below.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn stream(p: *mut f32, v: __m256) {
        // SAFETY: `p` is valid for 8 elements and aligned (trait contract); `fence` orders the store.
        unsafe { _mm256_stream_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn reciprocal(a: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_div_ps(_mm256_set1_ps(1.0), a) }
    }
    #[inline(always)]
    unsafe fn floor(a: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_floor_ps(a) }
    }
    #[inline(always)]
    unsafe fn lt(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_cmp_ps::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_and_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn count(m: __m256) -> u32 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_movemask_ps(m).count_ones() }
    }
    #[inline(always)]
    unsafe fn bits(m: __m256) -> u32 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_movemask_ps(m) as u32 }
    }
    #[inline(always)]
    unsafe fn mask(bits: u32) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe {
            let own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), own);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, own))
        }
    }
    #[inline(always)]
    unsafe fn select(m: __m256, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe { _mm256_blendv_ps(b, a, m) }
    }
    #[inline(always)]
    unsafe fn exp2_above<const N: usize>(t: __m256, coefficients: &[f32; N], least: f32) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe {
            let low = _mm256_set1_ps(-127.0);
            let overflow = _mm256_cmp_ps::<_CMP_GE_OQ>(t, _mm256_set1_ps(128.0));
            // NaN stays: max and min give their second operand.
            let t = _mm256_max_ps(low, _mm256_min_ps(_mm256_set1_ps(127.999), t));
            let floor = _mm256_floor_ps(t);
            let r = _mm256_sub_ps(t, floor);
            let mut p = _mm256_set1_ps(coefficients[N - 1]);
            for i in (0..N - 1).rev() {
                p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(coefficients[i]));
            }
            // p is in [1, 2): adding to the exponent multiplies; below `least` the result is zero.
            let shifted = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(floor));
            let result = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), shifted));
            let normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(t, _mm256_set1_ps(least));
            let result = _mm256_and_ps(result, normal);
            let result = _mm256_blendv_ps(result, _mm256_set1_ps(f32::INFINITY), overflow);
            let unordered = _mm256_cmp_ps::<_CMP_UNORD_Q>(t, t);
            _mm256_blendv_ps(result, t, unordered)
        }
    }
    #[inline(always)]
    unsafe fn table(x: __m256) -> (__m256, __m256) {
        // A permute has eight entries: one takes n mod 8, one n / 8, as far as the table goes.
        const EIGHTS: [f32; 8] = [SAS_ENTRIES[0], SAS_ENTRIES[8], SAS_ENTRIES[16], SAS_ENTRIES[24], 0.0, 0.0, 0.0, 0.0];
        // SAFETY: as in `splat`; the tables have eight elements, and a permute uses the low three bits of an index.
        unsafe {
            // The second operand where one is NaN.
            let x = _mm256_min_ps(_mm256_set1_ps(32.0), x);
            let floor = _mm256_floor_ps(x);
            let n = _mm256_cvttps_epi32(floor);
            let ones = _mm256_permutevar8x32_ps(_mm256_loadu_ps(SAS_ENTRIES.as_ptr()), n);
            let eights = _mm256_permutevar8x32_ps(_mm256_loadu_ps(EIGHTS.as_ptr()), _mm256_srli_epi32::<3>(n));
            (_mm256_sub_ps(x, floor), _mm256_mul_ps(ones, eights))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m256) {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (__m256, __m256) {
        // SAFETY: `p` is valid for 16 elements (trait contract).
        unsafe {
            let both = _mm256_loadu_si256(p.cast());
            let second = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000u32 as i32));
            (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)), _mm256_castsi256_ps(second))
        }
    }
    #[inline(always)]
    unsafe fn sums(v: &[__m256]) -> __m256 {
        // SAFETY: as in `splat`.
        unsafe {
            let pairs = |i: usize| _mm256_hadd_ps(v[2 * i], v[2 * i + 1]);
            let (low, high) = (_mm256_hadd_ps(pairs(0), pairs(1)), _mm256_hadd_ps(pairs(2), pairs(3)));
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
        }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        // SAFETY: 8 rows of 8 elements are valid on both sides (trait contract).
        unsafe {
            let row = |i: usize| _mm256_loadu_ps(src.add(i * src_stride));
            let mut t = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                let (a, b) = (row(2 * i), row(2 * i + 1));
                t[2 * i] = _mm256_unpacklo_ps(a, b);
                t[2 * i + 1] = _mm256_unpackhi_ps(a, b);
            }
            let mut u = [_mm256_setzero_ps(); 8];
            for i in 0..2 {
                let [a, b, c, d] = [t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]];
                u[4 * i] = _mm256_shuffle_ps::<0x44>(a, c);
                u[4 * i + 1] = _mm256_shuffle_ps::<0xee>(a, c);
                u[4 * i + 2] = _mm256_shuffle_ps::<0x44>(b, d);
                u[4 * i + 3] = _mm256_shuffle_ps::<0xee>(b, d);
            }
            for c in 0..4 {
                _mm256_storeu_ps(dst.add(c * dst_stride), _mm256_permute2f128_ps::<0x20>(u[c], u[4 + c]));
                _mm256_storeu_ps(dst.add((4 + c) * dst_stride), _mm256_permute2f128_ps::<0x31>(u[c], u[4 + c]));
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

define_kernels!(Avx2, [target_feature(enable = "avx2,fma,f16c")], [(1, 8), (2, 6)]);
