//! 128-bit vectors of AArch64: 4 lanes, 32 registers. A tile is 16 queries wide.

use super::Simd;
use super::instantiate::define_kernels;
use fulgurite_core::exp::SAS_ENTRIES;
use half::f16;
use std::arch::aarch64::*;

const LANES: usize = 4;

#[derive(Clone, Copy)]
pub(crate) struct Neon;

// SAFETY: every AArch64 target this crate builds for has NEON.
unsafe impl Simd for Neon {
    type V = float32x4_t;
    type M = uint32x4_t;
    const LANES: usize = LANES;
    const VECTORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: NEON is present (trait contract); so for every block below.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        // SAFETY: `p` is valid for 4 elements (trait contract).
        unsafe { vld1q_f32(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: float32x4_t) {
        // SAFETY: `p` is valid for 4 elements (trait contract).
        unsafe { vst1q_f32(p, v) }
    }
    #[inline(always)]
    unsafe fn stream(p: *mut f32, v: float32x4_t) {
        // SAFETY: passed on.
        unsafe { Self::store(p, v) }
    }
    #[inline(always)]
    unsafe fn fence() {}
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`. The contract wants b where a is NaN: compare and select.
        unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`. The contract wants b where a is NaN: compare and select.
        unsafe { vbslq_f32(vcltq_f32(a, b), a, b) }
    }
    #[inline(always)]
    unsafe fn reciprocal(a: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vdivq_f32(vdupq_n_f32(1.0), a) }
    }
    #[inline(always)]
    unsafe fn floor(a: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vrndmq_f32(a) }
    }
    #[inline(always)]
    unsafe fn lt(a: float32x4_t, b: float32x4_t) -> uint32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vcltq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn and(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vandq_u32(a, b) }
    }
    #[inline(always)]
    unsafe fn count(m: uint32x4_t) -> u32 {
        // SAFETY: as in `splat`.
        unsafe { vaddvq_u32(vshrq_n_u32::<31>(m)) }
    }
    #[inline(always)]
    unsafe fn bits(m: uint32x4_t) -> u32 {
        let own = [1u32, 2, 4, 8];
        // SAFETY: as in `splat`; four elements.
        unsafe { vaddvq_u32(vandq_u32(m, vld1q_u32(own.as_ptr()))) }
    }
    #[inline(always)]
    unsafe fn mask(bits: u32) -> uint32x4_t {
        let own = [1u32, 2, 4, 8];
        // SAFETY: as in `splat`; four elements.
        unsafe { vtstq_u32(vdupq_n_u32(bits), vld1q_u32(own.as_ptr())) }
    }
    #[inline(always)]
    unsafe fn select(m: uint32x4_t, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vbslq_f32(m, a, b) }
    }
    #[inline(always)]
    unsafe fn exp2_above<const N: usize>(t: float32x4_t, coefficients: &[f32; N], least: f32) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe {
            let overflow = vcgeq_f32(t, vdupq_n_f32(128.0));
            let ordered = vceqq_f32(t, t);
            let x = vmaxq_f32(vdupq_n_f32(-127.0), vminq_f32(vdupq_n_f32(127.999), t));
            let floor = vrndmq_f32(x);
            let r = vsubq_f32(x, floor);
            let mut p = vdupq_n_f32(coefficients[N - 1]);
            for i in (0..N - 1).rev() {
                p = vfmaq_f32(vdupq_n_f32(coefficients[i]), p, r);
            }
            // p is in [1, 2): adding to the exponent multiplies; below `least` the result is zero.
            let shifted = vshlq_n_s32::<23>(vcvtq_s32_f32(floor));
            let result = vreinterpretq_u32_s32(vaddq_s32(vreinterpretq_s32_f32(p), shifted));
            let normal = vcgeq_f32(x, vdupq_n_f32(least));
            let result = vreinterpretq_f32_u32(vandq_u32(result, normal));
            let result = vbslq_f32(overflow, vdupq_n_f32(f32::INFINITY), result);
            vbslq_f32(ordered, result, t)
        }
    }
    #[inline(always)]
    unsafe fn table(x: float32x4_t) -> (float32x4_t, float32x4_t) {
        // SAFETY: as in `splat`; the table has 128 bytes. A lookup outside its 64 bytes gives 0 or keeps what was there.
        unsafe {
            // A minimum of NaN is NaN.
            let x = vminq_f32(vdupq_n_f32(31.0), x);
            let floor = vrndmq_f32(x);
            // The index of each of an entry's four bytes: four times n, and 0 to 3.
            let n = vandq_u32(vcvtq_u32_f32(floor), vdupq_n_u32(31));
            let bytes = vreinterpretq_u8_u32(vmlaq_u32(vdupq_n_u32(0x0302_0100), n, vdupq_n_u32(0x0404_0404)));
            let entries = SAS_ENTRIES.as_ptr().cast::<u8>();
            let low = vqtbl4q_u8(vld1q_u8_x4(entries), bytes);
            let all = vqtbx4q_u8(low, vld1q_u8_x4(entries.add(64)), vsubq_u8(bytes, vdupq_n_u8(64)));
            (vsubq_f32(x, floor), vreinterpretq_f32_u8(all))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> float32x4_t {
        // SAFETY: `p` is valid for 4 elements (trait contract).
        let lanes = unsafe { p.cast::<[u16; LANES]>().read() }.map(|bits| f16::from_bits(bits).to_f32());
        // SAFETY: as in `splat`; the array has 4 elements.
        unsafe { vld1q_f32(lanes.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> float32x4_t {
        // SAFETY: `p` is valid for 4 elements (trait contract).
        unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(vld1_u16(p)))) }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: float32x4_t) {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the array has 4 elements; `p` is valid for 4 (trait contract).
        unsafe {
            vst1q_f32(lanes.as_mut_ptr(), v);
            p.cast::<[u16; LANES]>().write(lanes.map(|x| f16::from_f32(x).to_bits()));
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (float32x4_t, float32x4_t) {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe {
            let both = vreinterpretq_u32_u16(vld1q_u16(p));
            let second = vandq_u32(both, vdupq_n_u32(0xffff_0000));
            (vreinterpretq_f32_u32(vshlq_n_u32::<16>(both)), vreinterpretq_f32_u32(second))
        }
    }
    #[inline(always)]
    unsafe fn sums(v: &[float32x4_t]) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])) }
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        // SAFETY: 4 rows of 4 elements are valid on both sides (trait contract).
        unsafe {
            let row = |i: usize| vld1q_f32(src.add(i * src_stride));
            let [a, b, c, d] = [row(0), row(1), row(2), row(3)];
            let (ab, cd) = (vtrnq_f32(a, b), vtrnq_f32(c, d));
            let low = |x, y| vcombine_f32(vget_low_f32(x), vget_low_f32(y));
            let high = |x, y| vcombine_f32(vget_high_f32(x), vget_high_f32(y));
            vst1q_f32(dst, low(ab.0, cd.0));
            vst1q_f32(dst.add(dst_stride), low(ab.1, cd.1));
            vst1q_f32(dst.add(2 * dst_stride), high(ab.0, cd.0));
            vst1q_f32(dst.add(3 * dst_stride), high(ab.1, cd.1));
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

define_kernels!(Neon, [target_feature(enable = "neon")], [(1, 8), (2, 8), (3, 8), (4, 6)]);
