//! 512-bit vectors: 16 lanes, 32 registers. A tile is 64 queries wide; 6 x 4 accumulators leave registers for the
//! operands and hide the latency of every fused multiply-add.

use super::Simd;
use super::instantiate::define_kernels;
use fulgurite_core::exp::SAS_ENTRIES;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY: the table of this type is handed out only after detection of the features it enables.
unsafe impl Simd for Avx512 {
    type V = __m512;
    type M = __mmask16;
    const LANES: usize = 16;
    const VECTORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: AVX-512 is present (trait contract); so for every block below.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: `p` is valid for 16 elements (trait contract).
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        // SAFETY: `p` is valid for 16 elements (trait contract).
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn stream(p: *mut f32, v: __m512) {
        // SAFETY: `p` is valid for 16 elements and aligned (trait contract); `fence` orders the store.
        unsafe { _mm512_stream_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: SSE is part of x86-64.
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn reciprocal(a: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe {
            // 14 bits, and twice as many after a step of Newton's: a third of the time of a division.
            let x = _mm512_rcp14_ps(a);
            _mm512_fmadd_ps(_mm512_fnmadd_ps(a, x, _mm512_set1_ps(1.0)), x, x)
        }
    }
    #[inline(always)]
    unsafe fn floor(a: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn lt(a: __m512, b: __m512) -> __mmask16 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: __mmask16, b: __mmask16) -> __mmask16 {
        a & b
    }
    #[inline(always)]
    unsafe fn count(m: __mmask16) -> u32 {
        m.count_ones()
    }
    #[inline(always)]
    unsafe fn bits(m: __mmask16) -> u32 {
        u32::from(m)
    }
    #[inline(always)]
    unsafe fn mask(bits: u32) -> __mmask16 {
        bits as __mmask16
    }
    #[inline(always)]
    unsafe fn select(m: __mmask16, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe { _mm512_mask_blend_ps(m, b, a) }
    }
    #[inline(always)]
    unsafe fn exp2_above<const N: usize>(t: __m512, coefficients: &[f32; N], least: f32) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe {
            // Subnormal results would take a microcode assist of some 240 cycles; they are zero instead.
            // "Not less or equal" keeps NaN.
            let normal = _mm512_cmp_ps_mask::<_CMP_NLE_UQ>(t, _mm512_set1_ps(least));
            let r = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(t); // t - floor(t)
            let mut p = _mm512_set1_ps(coefficients[N - 1]);
            for i in (0..N - 1).rev() {
                p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficients[i]));
            }
            _mm512_maskz_scalef_ps(normal, p, t) // p * 2^floor(t)
        }
    }
    #[inline(always)]
    unsafe fn table(x: __m512) -> (__m512, __m512) {
        /// Adding this number and rounding down leaves the floor of a small number in the low bits of the sum.
        const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
        // SAFETY: as in `splat`; the table has 32 elements, and a permute uses the low five bits of an index.
        unsafe {
            let magic = _mm512_set1_ps(MAGIC);
            // The second operand where one is NaN.
            let x = _mm512_min_ps(_mm512_set1_ps(31.0), x);
            let sum = _mm512_add_round_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(x, magic);
            let [low, high] = [0, Self::LANES].map(|first| _mm512_loadu_ps(SAS_ENTRIES.as_ptr().add(first)));
            let fraction = _mm512_sub_ps(x, _mm512_sub_ps(sum, magic));
            (fraction, _mm512_permutex2var_ps(low, _mm512_castps_si512(sum), high))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        // SAFETY: `p` is valid for 16 elements (trait contract).
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        // SAFETY: `p` is valid for 16 elements (trait contract).
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        // SAFETY: `p` is valid for 16 elements (trait contract).
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (__m512, __m512) {
        // SAFETY: `p` is valid for 32 elements (trait contract).
        unsafe {
            let both = _mm512_loadu_si512(p.cast());
            let second = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000u32 as i32));
            (_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)), _mm512_castsi512_ps(second))
        }
    }
    #[inline(always)]
    unsafe fn sums(v: &[__m512]) -> __m512 {
        // SAFETY: as in `splat`.
        unsafe {
            let pd = |v| _mm512_castps_pd(v);
            let ps = |v| _mm512_castpd_ps(v);
            // Two, then four vectors to a 128-bit block, then the four blocks.
            let mut t = [_mm512_setzero_ps(); 8];
            for i in 0..8 {
                let (a, b) = (v[2 * i], v[2 * i + 1]);
                t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            }
            let mut u = [_mm512_setzero_ps(); 4];
            for i in 0..4 {
                let (a, b) = (pd(t[2 * i]), pd(t[2 * i + 1]));
                u[i] = _mm512_add_ps(ps(_mm512_unpacklo_pd(a, b)), ps(_mm512_unpackhi_pd(a, b)));
            }
            let fold = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
            fold(fold(u[0], u[1]), fold(u[2], u[3]))
        }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        // SAFETY: 16 rows of 16 elements are valid on both sides (trait contract).
        unsafe {
            let row = |i: usize| _mm512_loadu_ps(src.add(i * src_stride));
            // Pairs of rows, then quadruples, then 128-bit blocks twice.
            let mut t = [_mm512_setzero_ps(); 16];
            for i in 0..8 {
                let (a, b) = (row(2 * i), row(2 * i + 1));
                t[2 * i] = _mm512_unpacklo_ps(a, b);
                t[2 * i + 1] = _mm512_unpackhi_ps(a, b);
            }
            let mut u = [_mm512_setzero_ps(); 16];
            for i in 0..4 {
                let pd = |v| _mm512_castps_pd(v);
                let ps = |v| _mm512_castpd_ps(v);
                let [a, b, c, d] = [t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]];
                u[4 * i] = ps(_mm512_unpacklo_pd(pd(a), pd(c)));
                u[4 * i + 1] = ps(_mm512_unpackhi_pd(pd(a), pd(c)));
                u[4 * i + 2] = ps(_mm512_unpacklo_pd(pd(b), pd(d)));
                u[4 * i + 3] = ps(_mm512_unpackhi_pd(pd(b), pd(d)));
            }
            // u[4 q + c], block s: column 4 s + c of rows 4 q .. 4 q + 3.
            for c in 0..4 {
                let lo = _mm512_shuffle_f32x4::<0x88>(u[c], u[4 + c]); // blocks 0, 2 of rows 0-3 and 4-7
                let hi = _mm512_shuffle_f32x4::<0xdd>(u[c], u[4 + c]); // blocks 1, 3
                let lo2 = _mm512_shuffle_f32x4::<0x88>(u[8 + c], u[12 + c]);
                let hi2 = _mm512_shuffle_f32x4::<0xdd>(u[8 + c], u[12 + c]);
                _mm512_storeu_ps(dst.add(c * dst_stride), _mm512_shuffle_f32x4::<0x88>(lo, lo2));
                _mm512_storeu_ps(dst.add((4 + c) * dst_stride), _mm512_shuffle_f32x4::<0x88>(hi, hi2));
                _mm512_storeu_ps(dst.add((8 + c) * dst_stride), _mm512_shuffle_f32x4::<0xdd>(lo, lo2));
                _mm512_storeu_ps(dst.add((12 + c) * dst_stride), _mm512_shuffle_f32x4::<0xdd>(hi, hi2));
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}

define_kernels!(
    Avx512,
    [target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")],
    [(1, 12), (2, 8), (3, 8), (4, 6)]
);
