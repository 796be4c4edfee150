//! Elements of four and eight bits, and scales that are powers of two.

/// Rounds x to `bits` of mantissa (without the leading one) with exponents from `least` up, ties to even.
fn round(x: f32, bits: i32, least: i32) -> f64 {
    let x = f64::from(x);
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    // The exponent of an f64 that was an f32 is exact in its bits.
    let exponent = (((x.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(least);
    let step = f64::powi(2.0, exponent - bits);
    (x / step).round_ties_even() * step
}

/// The code of a value that the format has: sign, exponent field, mantissa.
fn code(value: f64, bits: i32, bias: i32) -> u8 {
    let (sign, size) = (u8::from(value.is_sign_negative()), value.abs());
    if size == 0.0 {
        return sign << 7;
    }
    let exponent = (((size.to_bits() >> 52) & 0x7ff) as i32 - 1023).max(1 - bias);
    // With the leading one, or below it for subnormals.
    let mantissa = (size / f64::powi(2.0, exponent - bits)) as i32;
    let field = if mantissa >> bits == 0 { 0 } else { exponent + bias };
    sign << 7 | (field << bits) as u8 | (mantissa & ((1 << bits) - 1)) as u8
}

fn value(code: u8, bits: i32, bias: i32) -> f32 {
    let (field, mantissa) = (i32::from(code & 0x7f) >> bits, i32::from(code) & ((1 << bits) - 1));
    let (lead, exponent) = if field == 0 { (0, 1 - bias) } else { (1 << bits, field - bias) };
    let size = f64::from(lead + mantissa) * f64::powi(2.0, exponent - bits);
    (if code >> 7 == 1 { -size } else { size }) as f32
}

/// The value of the nearest code, ties to even. Gives the same result as conversion through the code, but in f32
/// without branches. Values beyond `most` become `most`; NaN stays.
#[inline(always)]
fn nearest(x: f32, bits: u32, least: u32, most: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 steps rounds to a whole number of steps; a step is 2^-bits of the power of two
    // below x.
    let power = (x.to_bits() & 0x7f80_0000).max(least << 23).min(200 << 23);
    let steps = f32::from_bits((power + ((23 - bits) << 23)) | 0x40_0000);
    let size = (x.abs() + steps) - steps;
    (if size > most { most } else { size }).copysign(x)
}

/// FP4: sign, two bits of exponent, one of mantissa. 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
///
/// ```
/// use fulgurite_core::format::E2m1;
/// assert_eq!(E2m1::from_f32(2.5).to_f32(), 2.0); // a tie goes to the even code
/// assert_eq!(E2m1::from_f32(-100.0).to_f32(), -6.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct E2m1(pub u8);

impl E2m1 {
    /// The largest value.
    pub const MAX: f32 = 6.0;

    /// The nearest value, ties to the even code; values beyond 6 become 6. NaN becomes 6: reject it before.
    pub fn from_f32(x: f32) -> E2m1 {
        if x.is_nan() {
            return E2m1(7);
        }
        let size = x.abs();
        // Ties go to even codes, so every other border is inclusive.
        let above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0];
        E2m1(above.into_iter().map(u8::from).sum::<u8>() | if x.is_sign_negative() { 8 } else { 0 })
    }

    /// The value of the code that [`from_f32`](Self::from_f32) finds, except that NaN stays NaN.
    #[inline(always)]
    pub fn nearest(x: f32) -> f32 {
        nearest(x, 1, 127, Self::MAX)
    }

    /// The value of the code's four bits.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        let code = u32::from(self.0);
        // Move the bits to the exponent and mantissa of an f32; the factor converts the bias, subnormals included.
        f32::from_bits((code & 7) << 22 | (code & 8) << 28) * f32::from_bits(253 << 23)
    }
}

/// FP8 with four bits of exponent: no infinity, one NaN per sign, at most 448.
///
/// ```
/// use fulgurite_core::format::E4m3;
/// assert_eq!(E4m3::from_f32(1e9).to_f32(), 448.0);
/// assert_eq!(E4m3::from_f32(0.0009765625).to_f32(), 0.0); // half of the smallest, a tie
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct E4m3(pub u8);

impl E4m3 {
    /// The largest value.
    pub const MAX: f32 = 448.0;

    /// The nearest value, ties to even; values beyond 448 become 448. NaN stays NaN.
    pub fn from_f32(x: f32) -> E4m3 {
        if x.is_nan() {
            return E4m3(0x7f);
        }
        E4m3(code(round(x, 3, -6).clamp(-448.0, 448.0), 3, 7))
    }

    /// The value of the code that [`from_f32`](Self::from_f32) finds.
    #[inline(always)]
    pub fn nearest(x: f32) -> f32 {
        nearest(x, 3, 121, Self::MAX)
    }

    /// Converts to f32, exactly.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        let code = u32::from(self.0);
        // Move the bits to the exponent and mantissa of an f32; the factor converts the bias, subnormals included.
        let value = f32::from_bits((code & 0x7f) << 20 | (code & 0x80) << 24) * f32::from_bits(247 << 23);
        if code & 0x7f == 0x7f { f32::NAN } else { value }
    }
}

/// FP8 with five bits of exponent: the upper half of an f16.
///
/// ```
/// use fulgurite_core::format::E5m2;
/// assert_eq!(E5m2::from_f32(1e9).to_f32(), 57344.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct E5m2(pub u8);

impl E5m2 {
    /// The largest finite value.
    pub const MAX: f32 = 57344.0;

    /// The nearest finite value, ties to even; larger values become the largest. NaN stays NaN.
    pub fn from_f32(x: f32) -> E5m2 {
        if x.is_nan() {
            return E5m2(0x7f);
        }
        E5m2(code(round(x, 2, -14).clamp(-57344.0, 57344.0), 2, 15))
    }

    /// Converts to f32, exactly. Infinities exist, although no finite number is rounded to them.
    pub fn to_f32(self) -> f32 {
        match (self.0 & 0x7f, self.0 >> 7) {
            (0x7c, 0) => f32::INFINITY,
            (0x7c, _) => f32::NEG_INFINITY,
            (0x7d.., _) => f32::NAN,
            _ => value(self.0, 2, 15),
        }
    }
}

/// A scale: 2^(code - 127); code 255 is NaN.
///
/// ```
/// use fulgurite_core::format::Ue8m0;
/// assert_eq!(Ue8m0::at_least(1.1).to_f32(), 2.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ue8m0(pub u8);

impl Ue8m0 {
    /// The smallest power of two that is not below x, within the format.
    #[inline(always)]
    pub fn at_least(x: f32) -> Ue8m0 {
        let bits = x.max(0.0).to_bits();
        // A number with digits after its leading one needs the next power. The first code serves all numbers up to
        // 2^-127, the subnormal 0x40_0000.
        let exponent = if bits <= 0x40_0000 { 0 } else { (bits >> 23) + u32::from(bits & 0x7f_ffff != 0) };
        Ue8m0(exponent.min(254) as u8)
    }

    /// Converts to f32, exactly.
    #[inline(always)]
    pub fn to_f32(self) -> f32 {
        match self.0 {
            0 => f32::from_bits(0x0040_0000), // 2^-127 is subnormal in f32
            255 => f32::NAN,
            code => f32::from_bits(u32::from(code) << 23),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest code by search over all codes, ties to the even one.
    fn nearest(x: f32, all: impl Fn(u8) -> f32, codes: std::ops::RangeInclusive<u8>) -> u8 {
        let distance = |c: u8| (f64::from(all(c)) - f64::from(x.abs())).abs();
        let best = codes.clone().map(distance).fold(f64::MAX, f64::min);
        let mut found: Vec<u8> = codes.filter(|&c| distance(c) == best).collect();
        found.sort_by_key(|c| c & 1);
        found[0]
    }

    #[test]
    fn every_code_survives_and_everything_goes_to_the_nearest() {
        let mut rng = crate::random::Rng::new(1);
        for code in 0..=255u8 {
            if code & 0x7f < 0x7f {
                assert_eq!(E4m3::from_f32(E4m3(code).to_f32()).0, code);
            }
            if code & 0x7f < 0x7c {
                assert_eq!(E5m2::from_f32(E5m2(code).to_f32()).0, code);
            }
            if code < 16 {
                assert_eq!(E2m1::from_f32(E2m1(code).to_f32()).0, code);
            }
            if code < 255 {
                assert_eq!(Ue8m0::at_least(Ue8m0(code).to_f32()).0, code, "2^{}", i32::from(code) - 127);
            }
        }
        for _ in 0..20_000 {
            let x = (rng.normal() * f64::powf(2.0, rng.uniform() * 30.0 - 15.0)) as f32;
            assert_eq!(E4m3::from_f32(x).0 & 0x7f, nearest(x, |c| E4m3(c).to_f32(), 0..=0x7e), "{x}");
            assert_eq!(E5m2::from_f32(x).0 & 0x7f, nearest(x, |c| E5m2(c).to_f32(), 0..=0x7b), "{x}");
            assert_eq!(E2m1::from_f32(x).0 & 7, nearest(x, |c| E2m1(c).to_f32(), 0..=7), "{x}");
            for x in [x, x * 1e-20, x * 1e20, x * 1e-38, f32::from_bits(x.to_bits() & 0xfff0_0000)] {
                assert_eq!(E2m1::nearest(x).to_bits(), E2m1::from_f32(x).to_f32().to_bits(), "{x}");
                assert_eq!(E4m3::nearest(x).to_bits(), E4m3::from_f32(x).to_f32().to_bits(), "{x}");
            }
            let power = Ue8m0::at_least(x.abs()).to_f32();
            assert!(power >= x.abs() && power * 0.5 < x.abs(), "{x}");
        }
    }

    #[test]
    fn ties_and_ends_are_those_of_the_formats() {
        let ties = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)];
        for (x, want) in ties {
            assert_eq!(E2m1::from_f32(x).to_f32(), want, "{x}");
            assert_eq!(E2m1::from_f32(-x).to_f32(), -want, "-{x}");
            assert_eq!(E2m1::nearest(x), want, "{x}");
        }
        assert_eq!([E2m1::from_f32(f32::INFINITY).to_f32(), E2m1::nearest(f32::INFINITY)], [6.0; 2]);
        let sizes: Vec<f32> = (0..16).map(|code| E2m1(code).to_f32()).collect();
        assert_eq!(sizes, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]);
        let ends = [(464.0, 448.0), (463.9, 448.0), (1e30, 448.0), (f32::INFINITY, 448.0), (0.000_976_562_5, 0.0)];
        for (x, want) in ends {
            assert_eq!([E4m3::from_f32(x).to_f32(), E4m3::nearest(x)], [want; 2], "{x}");
        }
        assert_eq!(E4m3::from_f32(0.000_976_563).to_f32(), 0.001_953_125);
        assert!(E4m3::from_f32(f32::NAN).to_f32().is_nan() && E5m2::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(E5m2(0x7c).to_f32(), f32::INFINITY);
        assert_eq!(Ue8m0::at_least(f32::MAX).0, 254);
        assert_eq!(Ue8m0::at_least(0.0).0, 0);
    }
}
