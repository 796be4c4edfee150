//! Rows of tensors: conversion to f32 and rounding back.

use crate::simd::Simd;

/// The bits of a row's element type.
pub(crate) trait SimdElement: Copy {
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

impl SimdElement for f32 {
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

impl SimdElement for half::f16 {
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

impl SimdElement for half::bf16 {
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
pub(in crate::simd) unsafe fn widen<S: Simd, T: SimdElement>(src: *const T, dst: *mut f32, n: usize) -> bool {
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
pub(in crate::simd) unsafe fn narrow_f16<S: Simd>(src: *const f32, dst: *mut half::f16, n: usize) {
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
pub(in crate::simd) fn narrow_bf16(src: &[f32], dst: &mut [half::bf16]) {
    for (x, y) in src.iter().zip(dst) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40; // a NaN must not round to infinity
        let nan = bits & 0x7fff_ffff > 0x7f80_0000;
        *y = half::bf16::from_bits(if nan { quiet } else { rounded } as u16);
    }
}
