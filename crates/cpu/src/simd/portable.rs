//! Plain Rust that any compiler can vectorise.

use super::Simd;
use super::instantiate::define_kernels;
use fulgurite_core::exp::SAS_ENTRIES;
use half::f16;

const LANES: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct V([f32; LANES]);

#[inline(always)]
fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    V(std::array::from_fn(|i| f(a.0[i], b.0[i])))
}

// SAFETY: needs no instruction set.
unsafe impl Simd for Portable {
    type V = V;
    type M = [bool; LANES];
    const LANES: usize = LANES;
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        V([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        // SAFETY: `p` is valid for 8 elements (trait contract); an array of f32 has their alignment.
        V(unsafe { p.cast::<[f32; LANES]>().read() })
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe { p.cast::<[f32; LANES]>().write(v.0) }
    }
    #[inline(always)]
    unsafe fn stream(p: *mut f32, v: V) {
        // SAFETY: passed on.
        unsafe { Self::store(p, v) }
    }
    #[inline(always)]
    unsafe fn fence() {}
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        // Two roundings: without the instruction, a fused operation would be a library call.
        V(std::array::from_fn(|i| a.0[i] * b.0[i] + c.0[i]))
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn reciprocal(a: V) -> V {
        V(a.0.map(|a| 1.0 / a))
    }
    #[inline(always)]
    unsafe fn floor(a: V) -> V {
        V(a.0.map(f32::floor))
    }
    #[inline(always)]
    unsafe fn lt(a: V, b: V) -> [bool; LANES] {
        std::array::from_fn(|i| a.0[i] < b.0[i])
    }
    #[inline(always)]
    unsafe fn and(a: [bool; LANES], b: [bool; LANES]) -> [bool; LANES] {
        std::array::from_fn(|i| a[i] & b[i])
    }
    #[inline(always)]
    unsafe fn count(m: [bool; LANES]) -> u32 {
        m.iter().map(|&x| u32::from(x)).sum()
    }
    #[inline(always)]
    unsafe fn bits(m: [bool; LANES]) -> u32 {
        m.iter().rev().fold(0, |bits, &x| 2 * bits + u32::from(x))
    }
    #[inline(always)]
    unsafe fn mask(bits: u32) -> [bool; LANES] {
        std::array::from_fn(|i| bits >> i & 1 != 0)
    }
    #[inline(always)]
    unsafe fn select(m: [bool; LANES], a: V, b: V) -> V {
        V(std::array::from_fn(|i| if m[i] { a.0[i] } else { b.0[i] }))
    }
    #[inline(always)]
    unsafe fn exp2_above<const N: usize>(t: V, coefficients: &[f32; N], least: f32) -> V {
        V(t.0.map(|t| super::algorithms::exp2_scalar(t, coefficients, least)))
    }
    #[inline(always)]
    unsafe fn table(x: V) -> (V, V) {
        // A NaN stays, and takes the first entry.
        let x = x.0.map(|x| if x > 31.0 { 31.0 } else { x });
        (V(x.map(|x| x - x.floor())), V(x.map(|x| SAS_ENTRIES[x as usize])))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> V {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        V(unsafe { p.cast::<[u16; LANES]>().read() }.map(|bits| f16::from_bits(bits).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> V {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        V(unsafe { p.cast::<[u16; LANES]>().read() }.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: V) {
        // SAFETY: `p` is valid for 8 elements (trait contract).
        unsafe { p.cast::<[u16; LANES]>().write(v.0.map(|x| f16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const u16) -> (V, V) {
        // SAFETY: `p` is valid for 16 elements (trait contract).
        let both = unsafe { p.cast::<[u16; 2 * LANES]>().read() };
        let widen = |i: usize| f32::from_bits(u32::from(both[i]) << 16);
        (V(std::array::from_fn(|i| widen(2 * i))), V(std::array::from_fn(|i| widen(2 * i + 1))))
    }
    #[inline(always)]
    unsafe fn sums(v: &[V]) -> V {
        V(std::array::from_fn(|i| v[i].0.iter().sum()))
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        for r in 0..LANES {
            for c in 0..LANES {
                // SAFETY: 8 rows of 8 elements are valid on both sides (trait contract).
                unsafe { *dst.add(c * dst_stride + r) = *src.add(r * src_stride + c) };
            }
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

define_kernels!(Portable, [], [(1, 4), (2, 4)]);
