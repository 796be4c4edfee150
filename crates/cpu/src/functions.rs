//! Elementary functions on single numbers.
//!
//! The code is plain Rust without branches. It is compiled into the entry points of each instruction set, and the
//! compiler vectorises it for that set.

/// e^x: range reduction with a split ln 2, then a polynomial (coefficients of Cephes). Error about 1 ulp.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let clamped = x.clamp(-103.0, 89.0); // NaN stays
    let n = (clamped * std::f32::consts::LOG2_E + 0.5).floor();
    let r = clamped - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + c;
    }
    let y = p * r * r + r + 1.0;
    // Two factors, so that results near the ends of the range neither overflow nor underflow early.
    let half = (n * 0.5).floor();
    let power = |e: f32| f32::from_bits(((e as i32 + 127) << 23) as u32);
    let y = y * power(half) * power(n - half);
    let y = if x < -103.9 { 0.0 } else { y };
    if x > 88.8 { f32::INFINITY } else { y }
}

/// Natural logarithm (coefficients of Cephes); -inf at 0, NaN below. Error about 1 ulp.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    // Subnormal numbers are scaled into range first.
    let small = x < f32::MIN_POSITIVE;
    let scaled = if small { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits();
    let mut e = ((bits >> 23) & 0xff) as i32 - 126;
    let mut f = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000); // [0.5, 1)
    let low = f < std::f32::consts::FRAC_1_SQRT_2;
    f = if low { f + f - 1.0 } else { f - 1.0 };
    e -= i32::from(low) + if small { 23 } else { 0 };
    let mut p = 7.037_683_6e-2f32;
    for c in [
        -1.151_461e-1,
        1.167_699_9e-1,
        -1.242_014_1e-1,
        1.424_932_3e-1,
        -1.666_805_8e-1,
        2.000_071_5e-1,
        -2.499_999_4e-1,
        3.333_333e-1,
    ] {
        p = p * f + c;
    }
    let e = e as f32;
    let square = f * f;
    let y = p * f * square - 2.121_944_4e-4 * e - 0.5 * square + f + 0.693_359_4 * e;
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    let y = if x == f32::INFINITY { f32::INFINITY } else { y };
    if x < 0.0 || x.is_nan() { f32::NAN } else { y }
}

/// Hyperbolic tangent (polynomial of Cephes near 0). Error about 1 ulp.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut p = -5.704_988_7e-3f32;
    for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328_4e-1] {
        p = p * z + c;
    }
    let near = p * z * x + x;
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

/// From running maximum and sum: 1 / sum (0 if there was no key) and the natural LSE. NaN stays NaN.
#[inline(always)]
pub(crate) fn finish(m: &[f32], l: &[f32], inverse: &mut [f32], lse: &mut [f32]) {
    for (((&m, &l), inverse), lse) in m.iter().zip(l).zip(inverse).zip(lse) {
        let empty = m == f32::NEG_INFINITY;
        *inverse = if empty { 0.0 } else { 1.0 / l };
        *lse = if empty { f32::NEG_INFINITY } else { m + ln(l) };
    }
}

/// Integer division rounding down; 0 if the divisor is 0.
#[inline(always)]
pub(crate) fn div_floor(a: i32, b: i32) -> i32 {
    if b == 0 {
        return 0;
    }
    let quotient = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
}

/// The remainder of [`div_floor`]; 0 if the divisor is 0.
#[inline(always)]
pub(crate) fn rem_floor(a: i32, b: i32) -> i32 {
    if b == 0 { 0 } else { a.wrapping_sub(b.wrapping_mul(div_floor(a, b))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integer_division_rounds_down_and_gives_0_over_0() {
        assert_eq!((div_floor(-7, 2), rem_floor(-7, 2)), (-4, 1));
        assert_eq!((div_floor(7, -2), rem_floor(7, -2)), (-4, -1));
        assert_eq!((div_floor(7, 0), rem_floor(7, 0)), (0, 0));
        assert_eq!((div_floor(i32::MIN, -1), rem_floor(i32::MIN, -1)), (i32::MIN, 0));
    }

    #[test]
    fn elementary_functions_are_within_two_ulps() {
        let close = |got: f32, want: f64| {
            let want32 = want as f32;
            got == want32 || (f64::from(got) - want).abs() <= 2.5 * f64::from(f32::EPSILON) * want.abs()
        };
        for i in -40_000i32..40_000 {
            let x = i as f32 * 0.002;
            assert!(close(exp(x), f64::from(x).exp()), "exp {x}: {}", exp(x));
            assert!(close(tanh(x), f64::from(x).tanh()), "tanh {x}: {}", tanh(x));
            let y = f32::from_bits(i.unsigned_abs() * 50_000);
            // Near 1 the logarithm vanishes, so compare absolute errors there.
            let error = (f64::from(ln(y)) - f64::from(y).ln()).abs();
            assert!(
                y == 0.0 || !y.is_finite() || error <= 2e-7 * f64::from(y).ln().abs().max(1.0),
                "ln {y}: {}",
                ln(y)
            );
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(200.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan() && tanh(f32::NAN).is_nan() && ln(-1.0).is_nan());
        assert_eq!((ln(0.0), ln(f32::INFINITY)), (f32::NEG_INFINITY, f32::INFINITY));
        assert_eq!((tanh(f32::INFINITY), tanh(-100.0)), (1.0, -1.0));
    }
}
