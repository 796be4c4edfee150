//! Vectorised exponentials: one polynomial evaluator, several functions.

use crate::simd::Simd;
use fulgurite_core::exp::SAS_POLY;

/// Coefficients of 2^r on [0, 1), lowest first; relative error 5e-9, far below one f32 rounding.
pub(in crate::simd) const EXP2_NATIVE: [f32; 8] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_5,
    0.055_504_44,
    0.009_616_16,
    0.001_338_905_3,
    0.000_146_096_32,
    2.073_186_4e-5,
];

/// The least power of two that is a normal number.
pub(crate) const LEAST: f32 = -126.0;

/// 2^t for one number, as [`Simd::exp2_above`] does it for a vector.
#[inline(always)]
pub(in crate::simd) fn exp2_scalar<const N: usize>(t: f32, coefficients: &[f32; N], least: f32) -> f32 {
    let clamped = t.clamp(-127.0, 127.999); // NaN stays
    let floor = clamped.floor();
    let r = clamped - floor;
    let mut p = coefficients[N - 1];
    for i in (0..N - 1).rev() {
        p = p * r + coefficients[i];
    }
    let scaled = f32::from_bits(((floor as i32) << 23).wrapping_add(p.to_bits() as i32) as u32);
    let scaled = if t < least { 0.0 } else { scaled };
    let scaled = if t >= 128.0 { f32::INFINITY } else { scaled };
    if t.is_nan() { t } else { scaled }
}

/// The exponential of a call, in powers of two.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ExpKind {
    /// A polynomial of degree 3, 4 or 5.
    Poly(u8),
    /// The polynomial for this many of 16 consecutive keys, the native exponential for the others.
    Mixed(u8, u8),
    Native,
    /// TurboAttention's function; the threshold is in natural units.
    Sas(f32),
    /// TurboAttention's function relative to the running maximum, rounded up to a whole number.
    SasOnline,
}

impl ExpKind {
    /// Turns maxima in natural units into the numbers relative to which weights and their sums are computed.
    pub fn origins(self, maxima: &mut [f32]) {
        if self == ExpKind::SasOnline {
            maxima.iter_mut().for_each(|m| *m = m.ceil());
        }
    }

    /// The factor that converts an origin to natural units, for scores in units of `scale`.
    pub(super) fn unit(self, scale: f32) -> f32 {
        if self == ExpKind::SasOnline { 1.0 } else { scale }
    }

    /// What [`Exponential::weight`] takes as origin for maxima that scores times `scale` have.
    ///
    /// # Safety
    /// As for the methods of [`Simd`].
    #[inline(always)]
    pub(super) unsafe fn origin<S: Simd>(self, max: S::V, scale: f32) -> S::V {
        // SAFETY: passed on.
        unsafe { if self == ExpKind::SasOnline { ceil::<S>(S::mul(max, S::splat(scale))) } else { max } }
    }
}

/// # Safety
/// As for the methods of [`Simd`].
#[inline(always)]
pub(super) unsafe fn ceil<S: Simd>(x: S::V) -> S::V {
    // SAFETY: passed on.
    unsafe {
        let zero = S::splat(0.0);
        S::sub(zero, S::floor(S::sub(zero, x)))
    }
}

/// One exponential, applied to t = log2(e) x.
pub(super) trait Exponential<S: Simd> {
    /// # Safety
    /// As for the methods of [`Simd`].
    unsafe fn eval(&self, t: S::V, key: usize) -> S::V;

    /// The factor that [`weight`](Self::weight) takes for scores in units of `scale`.
    fn factor(&self, scale: f32) -> f32 {
        std::f32::consts::LOG2_E * scale
    }

    /// The weight of a score relative to the [`origin`](ExpKind::origin) of its lane.
    ///
    /// # Safety
    /// As for the methods of [`Simd`].
    #[inline(always)]
    unsafe fn weight(&self, score: S::V, origin: S::V, factor: S::V, key: usize) -> S::V {
        // SAFETY: passed on. Not one fused operation: the maximum must give exactly 1, however large it is.
        unsafe { self.eval(S::mul(S::sub(score, origin), factor), key) }
    }
}

/// The polynomial, and the least power of two that is not 0.
pub(super) struct Poly<const N: usize>(pub [f32; N], pub f32);

impl<S: Simd, const N: usize> Exponential<S> for Poly<N> {
    #[inline(always)]
    unsafe fn eval(&self, t: S::V, _: usize) -> S::V {
        // SAFETY: passed on.
        unsafe { S::exp2_above(t, &self.0, self.1) }
    }
}

/// The polynomial, its share of 16 keys, and the least power of two that is not 0.
pub(super) struct Mixed<const N: usize>(pub [f32; N], pub usize, pub f32);

impl<S: Simd, const N: usize> Exponential<S> for Mixed<N> {
    #[inline(always)]
    unsafe fn eval(&self, t: S::V, key: usize) -> S::V {
        // SAFETY: passed on.
        unsafe {
            if key % 16 < self.1 { S::exp2_above(t, &self.0, self.2) } else { S::exp2_above(t, &EXP2_NATIVE, self.2) }
        }
    }
}

pub(super) struct Sas(pub f32);

impl<S: Simd> Exponential<S> for Sas {
    #[inline(always)]
    unsafe fn eval(&self, t: S::V, _: usize) -> S::V {
        // SAFETY: passed on.
        unsafe {
            // Rounding may put the maximum slightly above 0, where the table has no entry.
            let x = S::max(S::splat(0.0), S::mul(t, S::splat(-std::f32::consts::LN_2)));
            let n = S::floor(x);
            let f = S::sub(x, n);
            let mut cubic = S::splat(SAS_POLY[3]);
            for c in SAS_POLY[..3].iter().rev() {
                cubic = S::fma(cubic, f, S::splat(*c));
            }
            let table = S::exp2(S::mul(n, S::splat(-std::f32::consts::LOG2_E)), &EXP2_NATIVE);
            // NaN is not below the threshold, and stays.
            S::select(S::lt(S::splat(-self.0), x), S::splat(0.0), S::mul(table, cubic))
        }
    }
}

pub(super) struct SasOnline;

impl<S: Simd> Exponential<S> for SasOnline {
    /// Takes the distance x >= 0 below the origin.
    #[inline(always)]
    unsafe fn eval(&self, x: S::V, _: usize) -> S::V {
        // SAFETY: passed on.
        unsafe {
            let (f, entry) = S::table(x);
            let mut cubic = S::splat(SAS_POLY[3]);
            for c in SAS_POLY[..3].iter().rev() {
                cubic = S::fma(cubic, f, S::splat(*c));
            }
            S::mul(entry, cubic)
        }
    }

    fn factor(&self, scale: f32) -> f32 {
        scale
    }

    #[inline(always)]
    unsafe fn weight(&self, score: S::V, origin: S::V, factor: S::V, key: usize) -> S::V {
        // SAFETY: passed on. Not one fused operation: rounded like the maximum, no score comes out above the origin.
        unsafe { Exponential::<S>::eval(self, S::sub(origin, S::mul(score, factor)), key) }
    }
}

/// Runs `$body` with `$exp` bound to the exponential of `$kind`. Powers of two below `$least` are 0; the function of
/// TurboAttention has its own threshold.
macro_rules! with_exp {
    ($kind:expr, $least:expr, $exp:ident => $body:expr) => {
        match $kind {
            ExpKind::Poly(3) => {
                let $exp = Poly::<4>(EXP2_POLY[0][..4].try_into().unwrap(), $least);
                $body
            }
            ExpKind::Poly(4) => {
                let $exp = Poly::<5>(EXP2_POLY[1][..5].try_into().unwrap(), $least);
                $body
            }
            ExpKind::Poly(_) => {
                let $exp = Poly::<6>(EXP2_POLY[2], $least);
                $body
            }
            ExpKind::Native => {
                let $exp = Poly::<8>(EXP2_NATIVE, $least);
                $body
            }
            ExpKind::Mixed(degree, share) => {
                // The unused upper coefficients are zero.
                let $exp = Mixed::<6>(EXP2_POLY[usize::from(degree) - 3], usize::from(share), $least);
                $body
            }
            ExpKind::Sas(threshold) => {
                let $exp = Sas(threshold);
                $body
            }
            ExpKind::SasOnline => {
                let $exp = SasOnline;
                $body
            }
        }
    };
}
pub(super) use with_exp;
