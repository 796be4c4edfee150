//! Results of instructions that PTX leaves implementation-defined: one documented choice for each.
//!
//! Approximate functions are computed in f64 and rounded once, which is inside the bound that PTX gives.

use crate::machine::Reduction;
use crate::product::Number;
use half::{bf16, f16};

/// Flushes subnormals to zero, keeping the sign.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// The larger of two numbers. A NaN operand is ignored, and +0 beats -0.
pub fn max(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                b
            } else {
                a
            }
        }
        _ => {
            if a > b {
                a
            } else {
                b
            }
        }
    }
}

/// The smaller of two numbers. A NaN operand is ignored, and -0 beats +0.
pub fn min(a: f32, b: f32) -> f32 {
    -max(-a, -b)
}

/// a + b, rounded toward minus infinity.
pub fn add_down(a: f32, b: f32) -> f32 {
    // The sum of two f32 may need more than 53 bits, so the exact remainder (two-sum) decides the direction.
    let (x, y) = (f64::from(a), f64::from(b));
    let sum = x + y;
    let part = sum - x;
    let rest = (x - (sum - part)) + (y - part);
    let nearest = sum as f32;
    if sum == 0.0 && (a.is_sign_negative() || b.is_sign_negative()) {
        return -0.0; // what cancels is a negative zero in this direction
    }
    if !nearest.is_finite() || sum.is_infinite() || sum.is_nan() {
        // On overflow, rounding down gives the largest finite number, not infinity.
        return if nearest == f32::INFINITY && a.is_finite() && b.is_finite() { f32::MAX } else { nearest };
    }
    let above = f64::from(nearest) > sum || (f64::from(nearest) == sum && rest < 0.0);
    if above { nearest.next_down() } else { nearest }
}

/// a + b as reductions in memory compute it: subnormals flush to zero.
pub fn add_flush(a: f32, b: f32) -> f32 {
    flush(flush(a) + flush(b))
}

/// 2^x.
pub fn ex2(x: f32) -> f32 {
    flush(f64::from(flush(x)).exp2() as f32)
}
/// log2(x).
pub fn lg2(x: f32) -> f32 {
    flush(f64::from(flush(x)).log2() as f32)
}
/// 1 / x.
pub fn rcp(x: f32) -> f32 {
    flush((1.0 / f64::from(flush(x))) as f32)
}
/// 1 / sqrt(x).
pub fn rsqrt(x: f32) -> f32 {
    flush((1.0 / f64::from(flush(x)).sqrt()) as f32)
}
/// sqrt(x).
pub fn sqrt(x: f32) -> f32 {
    flush(f64::from(flush(x)).sqrt() as f32)
}

/// An operation on 16-bit floats, computed in f64 and rounded once.
pub(crate) fn on_half(brain: bool, bits: &[u16], f: &dyn Fn(&[f64]) -> f64) -> u16 {
    let wide = |&x: &u16| if brain { bf16::from_bits(x).to_f64() } else { f16::from_bits(x).to_f64() };
    let y = f(&bits.iter().map(wide).collect::<Vec<_>>());
    if brain { bf16::from_f64(y).to_bits() } else { f16::from_f64(y).to_bits() }
}

/// The value in memory after a reduction combines `x` with the old value, as elements of the PTX type `number`.
pub fn combine(way: Reduction, number: &str, old: u64, x: u64) -> u64 {
    let halves = |brain: bool, shift: u32| {
        let bits = [(old >> shift) as u16, (x >> shift) as u16];
        let sum = on_half(brain, &bits, &|v| match way {
            Reduction::Add => v[0] + v[1],
            Reduction::Min => v[0].min(v[1]),
            _ => v[0].max(v[1]),
        });
        u64::from(sum) << shift
    };
    match number {
        "f32" => u64::from(add_flush(f32::from_bits(old as u32), f32::from_bits(x as u32)).to_bits()),
        "f16" | "bf16" => halves(number == "bf16", 0),
        "f16x2" | "bf16x2" => halves(number == "bf16x2", 16) | halves(number == "bf16x2", 0),
        _ => {
            let signed = number.starts_with('s');
            let wide = number.ends_with("64");
            let cut = |x: u64| if wide { x } else { x & 0xffff_ffff };
            let (old, x) = (cut(old), cut(x));
            let less = match (signed, wide) {
                (false, _) => old < x,
                (true, false) => (old as i32) < x as i32,
                (true, true) => (old as i64) < x as i64,
            };
            cut(match way {
                Reduction::Add => old.wrapping_add(x),
                Reduction::Min => {
                    if less {
                        old
                    } else {
                        x
                    }
                }
                Reduction::Max => {
                    if less {
                        x
                    } else {
                        old
                    }
                }
                Reduction::And => old & x,
                Reduction::Or => old | x,
                Reduction::Xor => old ^ x,
                Reduction::Inc => {
                    if old >= x {
                        0
                    } else {
                        old + 1
                    }
                }
                Reduction::Dec => {
                    if old == 0 || old > x {
                        x
                    } else {
                        old - 1
                    }
                }
            })
        }
    }
}

/// Exponent bits, fraction bits and largest finite value of an 8-bit float.
fn fp8_shape(number: Number) -> (i32, i32, f32) {
    match number {
        Number::E4m3 => (4, 3, 448.0),
        _ => (5, 2, 57344.0),
    }
}

/// The value of an 8-bit float.
pub fn from_fp8(bits: u8, number: Number) -> f32 {
    let (e_bits, f_bits, _) = fp8_shape(number);
    let bias = (1 << (e_bits - 1)) - 1;
    let exponent = i32::from(bits >> f_bits & ((1 << e_bits) - 1));
    let fraction = f32::from(bits & ((1 << f_bits) - 1)) / (1 << f_bits) as f32;
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let top = exponent == (1 << e_bits) - 1;
    match number {
        Number::E4m3 if bits & 0x7f == 0x7f => f32::NAN,
        Number::E5m2 if top && fraction == 0.0 => sign * f32::INFINITY,
        Number::E5m2 if top => f32::NAN,
        _ if exponent == 0 => sign * fraction * (2f32).powi(1 - bias),
        _ => sign * (1.0 + fraction) * (2f32).powi(exponent - bias),
    }
}

/// The value of a 4-bit float in the low bits: sign, 2 bits of exponent, 1 of fraction.
pub fn from_fp4(bits: u8) -> f32 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(bits & 7)];
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// The value of a scale factor that is a power of two; 255 is NaN.
pub fn from_ue8m0(bits: u8) -> f32 {
    match bits {
        255 => f32::NAN,
        0 => f32::from_bits(1 << 22), // 2^-127 is subnormal
        _ => f32::from_bits(u32::from(bits) << 23),
    }
}

/// The value of a scale factor that is an 8-bit float without sign.
pub fn from_ue4m3(bits: u8) -> f32 {
    from_fp8(bits & 0x7f, Number::E4m3)
}

/// Rounds an f32 to an 8-bit float: nearest, ties to even, saturating. NaN stays NaN.
pub fn to_fp8(x: f32, number: Number) -> u8 {
    let (_, _, largest) = fp8_shape(number);
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return 0x7f;
    }
    let magnitude = f64::from(x.abs().min(largest));
    // The 128 candidates are in ascending order: take the nearest, and the even one on a tie.
    let finite = (0..0x80u8).take_while(|&b| from_fp8(b, number) <= largest && from_fp8(b, number).is_finite());
    let nearest = finite.min_by(|&a, &b| {
        let distance = |c: u8| (f64::from(from_fp8(c, number)) - magnitude).abs();
        distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
    });
    sign | nearest.unwrap_or(0)
}

/// The value of an element that a tensor core reads from the low bits of `bits`.
pub fn decode(bits: u32, number: Number) -> f64 {
    match number {
        Number::F16 => f16::from_bits(bits as u16).to_f64(),
        Number::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        Number::Tf32 => f64::from(f32::from_bits(bits & !0x1fff)),
        Number::E4m3 | Number::E5m2 => f64::from(from_fp8(bits as u8, number)),
        Number::E2m1x2 => f64::from(from_fp4(bits as u8)),
        Number::S8 => f64::from(bits as u8 as i8),
        Number::U8 => f64::from(bits as u8),
        Number::F32 => f64::from(f32::from_bits(bits)),
        Number::S32 => f64::from(bits as i32),
    }
}

/// The exponent of a nonzero number.
fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

/// The exponent of a number in its type; subnormals have that of the smallest normal number.
fn exponent_in(x: f64, number: Number) -> i32 {
    let smallest = match number {
        Number::F16 | Number::E5m2 => -14,
        Number::E4m3 => -6,
        _ => SMALLEST,
    };
    exponent(x).max(smallest)
}

/// The exponent of the smallest normal f32.
const SMALLEST: i32 = -126;

/// Truncates a number toward zero to this many bits after the leading one.
fn cut(x: f64, bits: i32) -> f64 {
    if x == 0.0 {
        return 0.0;
    }
    let unit = f64::from((exponent(x) - bits).max(-149)).exp2();
    (x / unit).trunc() * unit
}

/// The exponent by which a product is aligned before addition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exponent {
    /// The sum of the factors' exponents: 1.5 * 1.5 has exponent 0.
    Factors,
    /// The product's own exponent: 1.5 * 1.5 has exponent 1.
    Product,
}

/// Rounding of an f32 sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Truncate toward zero.
    Cut,
    /// Round to nearest, ties to even.
    Nearest,
}

/// How a tensor core adds products of floats to an accumulator. PTX leaves this open; this model aligns terms to the
/// largest exponent, truncates them below `kept_bits`, and adds them exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adder {
    /// Bits kept below the largest exponent.
    pub kept_bits: i32,
    /// Number of products that are added in one step.
    pub group: usize,
    /// The exponent by which products are aligned.
    pub exponent: Exponent,
    /// Bits of an f32 sum that are kept after its leading one, if the sum is truncated.
    pub result_bits: i32,
    /// Rounding of the remaining bits.
    pub rounding: Rounding,
    /// Whether the accumulator is one of the aligned terms. If not, it is added to their sum in a second step.
    pub fused: bool,
}

impl Adder {
    /// Hopper's adder for elements of a type, as published in MMA-Sim (arXiv 2511.10909), which matches the hardware
    /// bit by bit.
    pub fn hopper(from: Number) -> Adder {
        let bits = if from.bytes() == 1 { 13 } else { 25 };
        let group = from.depth() as usize;
        let (exponent, rounding) = (Exponent::Factors, Rounding::Cut);
        Adder { kept_bits: bits, group, exponent, result_bits: bits.min(23), rounding, fused: true }
    }

    /// The adder of data-centre Blackwell. It keeps as many bits of 8-bit and 4-bit floats as of 16-bit ones, which Hopper
    /// does not; no hardware has confirmed that. With scales, a factor is an element times its scale.
    pub fn blackwell(depth: usize, scaled: bool) -> Adder {
        let exponent = if scaled { Exponent::Product } else { Exponent::Factors };
        Adder { kept_bits: 25, group: depth, exponent, result_bits: 23, rounding: Rounding::Cut, fused: true }
    }

    /// The accumulator `old` plus products of factors of types `from`, as bits of type `to`. f16 sums are rounded to
    /// nearest.
    pub fn add(&self, old: u32, factors: &[[f64; 2]], to: Number, from: [Number; 2]) -> u32 {
        factors.chunks(self.group).fold(old, |old, factors| {
            let product = |&[x, y]: &[f64; 2]| {
                let exponent = match self.exponent {
                    Exponent::Factors => exponent_in(x, from[0]) + exponent_in(y, from[1]),
                    Exponent::Product => exponent(x * y),
                };
                (x * y, exponent)
            };
            let mut terms: Vec<(f64, i32)> = factors.iter().map(product).collect();
            let old = decode(old, to);
            let old = (old, exponent_in(old, to));
            let sum = if self.fused {
                terms.push(old);
                self.aligned(&terms)
            } else {
                let sum = self.aligned(&terms);
                self.aligned(&[(sum, exponent(sum)), old])
            };
            self.result(sum, to)
        })
    }

    fn aligned(&self, terms: &[(f64, i32)]) -> f64 {
        let values = || terms.iter().map(|&(x, _)| x);
        if values().any(|x| !x.is_finite()) {
            return values().sum();
        }
        let top = terms.iter().filter(|(x, _)| *x != 0.0).fold(SMALLEST, |top, &(_, exponent)| top.max(exponent));
        let unit = f64::from(top - self.kept_bits).exp2();
        values().map(|x| (x / unit).trunc()).sum::<f64>() * unit
    }

    fn result(&self, sum: f64, to: Number) -> u32 {
        match to {
            Number::F16 => f16::from_f64(sum).to_bits().into(),
            _ if self.rounding == Rounding::Nearest || !sum.is_finite() => (sum as f32).to_bits(),
            _ => {
                // Truncation past the largest finite number stops at that number.
                let kept = cut(sum, self.result_bits).clamp(f64::from(f32::MIN), f64::from(f32::MAX));
                (kept as f32).to_bits()
            }
        }
    }
}

/// One step of a tensor core: the accumulator plus the products of one instruction, given as pairs of factors of types
/// `from`. Floats follow [`Adder::hopper`]; integers are exact.
pub fn accumulate(old: u32, factors: &[[f64; 2]], to: Number, from: [Number; 2], saturate: bool) -> u32 {
    if to == Number::S32 {
        let sum = i64::from(old as i32) + factors.iter().map(|&[x, y]| (x * y) as i64).sum::<i64>();
        let kept = if saturate { sum.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) } else { sum };
        return kept as i32 as u32;
    }
    Adder::hopper(from[0]).add(old, factors, to, from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_down_is_below_and_next() {
        // Sums that f64 holds exactly.
        for (a, b) in [(1.0f32, 1e-9f32), (1.0, -1e-9), (12582912.0, 3.7), (12582912.0, -3.2), (0.5, 0.25)] {
            let d = add_down(a, b);
            let exact = f64::from(a) + f64::from(b);
            assert!(f64::from(d) <= exact && f64::from(d.next_up()) > exact, "{a} + {b} = {d}");
        }
        // Floor by the magic number 1.5 * 2^23.
        assert_eq!(add_down(3.7, 12582912.0) - 12582912.0, 3.0);
        assert_eq!(add_down(-3.2, 12582912.0) - 12582912.0, -4.0);
        assert_eq!(add_down(f32::MAX, f32::MAX), f32::MAX);
        assert_eq!(add_down(-1.0, -1e-30), (-1.0f32).next_down());
    }

    #[test]
    fn nan_loses() {
        assert_eq!(max(f32::NAN, 1.0), 1.0);
        assert_eq!(min(1.0, f32::NAN), 1.0);
        assert!(max(-0.0, 0.0).is_sign_positive() && min(0.0, -0.0).is_sign_negative());
    }

    #[test]
    fn subnormals_flush() {
        assert_eq!(ex2(-127.5), 0.0);
        assert_eq!(ex2(f32::NEG_INFINITY), 0.0);
        assert_eq!(ex2(3.0), 8.0);
        assert_eq!(rcp(1e-40), f32::INFINITY);
    }

    #[test]
    fn sums_are_cut_toward_zero() {
        let ones = |terms: &[f64]| -> Vec<[f64; 2]> { terms.iter().map(|&x| [x, 1.0]).collect() };
        let sum = |old: f32, terms: &[f64]| {
            f32::from_bits(accumulate(old.to_bits(), &ones(terms), Number::F32, [Number::Bf16; 2], false))
        };
        assert_eq!(sum(1.0, &[2.0, 3.0]), 6.0);
        assert_eq!(sum(0.0, &[]), 0.0);
        // Half a unit and more is still cut.
        assert_eq!(sum(1.0, &[(-24f64).exp2() * 1.5]), 1.0);
        assert_eq!(sum(-1.0, &[(-24f64).exp2() * -1.5]), -1.0);
        // A term 26 bits below the largest one is lost, even if the large terms cancel.
        assert_eq!(sum(1.0, &[-1.0, (-26f64).exp2()]), 0.0);
        assert!(sum(f32::INFINITY, &[1.0]).is_infinite() && sum(f32::INFINITY, &[f64::NEG_INFINITY]).is_nan());
        let bytes = |old: i32, terms: &[f64], saturate| {
            accumulate(old as u32, &ones(terms), Number::S32, [Number::S8; 2], saturate) as i32
        };
        assert_eq!(bytes(i32::MAX, &[1.0], true), i32::MAX);
        assert_eq!(bytes(i32::MAX, &[1.0], false), i32::MIN);
    }

    /// A product is aligned by the exponents of its factors, before it carries into the next one.
    #[test]
    fn products_are_not_normalised() {
        let sum = |factors: &[[f64; 2]]| f32::from_bits(accumulate(0, factors, Number::F32, [Number::F16; 2], false));
        let small = [(-12f64).exp2(), (-13f64).exp2()];
        // 2.25 has exponent 1, its factors have 0: 2^-25 is kept.
        assert_eq!(sum(&[[1.5, 1.5], [-1.5, 1.5], small]), (-25f64).exp2() as f32);
        assert_eq!(sum(&[[2.0, 1.0], [-2.0, 1.0], small]), 0.0);
        // A subnormal factor has the exponent of the smallest normal one; zeros have none.
        let least = (-24f64).exp2();
        assert_eq!(sum(&[[least, 2.0], [-least, 2.0], [least, least]]), 0.0);
        assert_eq!(sum(&[[0.0, 65504.0], [least, least]]), (-48f64).exp2() as f32);
    }

    #[test]
    fn four_bit_floats_and_scales() {
        let all: Vec<f32> = (0..16).map(from_fp4).collect();
        assert_eq!(all[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert!((0..8).all(|i| all[i + 8] == -all[i]));
        assert_eq!([0u8, 1, 127, 254].map(|b| f64::from(from_ue8m0(b)).log2()), [-127.0, -126.0, 0.0, 127.0]);
        assert!(from_ue8m0(255).is_nan() && from_ue4m3(0x7f).is_nan());
        assert_eq!([0x38, 0x7e, 0xb8].map(from_ue4m3), [1.0, 448.0, 1.0]);
    }

    #[test]
    fn eight_bit_floats() {
        for number in [Number::E4m3, Number::E5m2] {
            for bits in 0..=255u8 {
                let x = from_fp8(bits, number);
                if x.is_finite() {
                    assert_eq!(to_fp8(x, number), bits, "{number:?} {bits:#x} = {x}");
                }
            }
        }
        assert_eq!(from_fp8(0x7e, Number::E4m3), 448.0);
        assert_eq!(to_fp8(1e9, Number::E4m3), 0x7e);
        assert_eq!(from_fp8(to_fp8(1.3, Number::E4m3), Number::E4m3), 1.25);
        assert_eq!(to_fp8(-1e9, Number::E5m2), 0xfb);
    }
}
