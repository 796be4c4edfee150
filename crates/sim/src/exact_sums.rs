//! Sums of products that no adder can cut: a quick path for products of few bits, such as those of small whole numbers.

/// Bits that the adder keeps below the largest exponent, and after the leading bit of a sum.
const KEPT: i32 = 25;
/// Bits of an f64 below the last one of an f32.
const BELOW: u32 = 29;
/// The exponent of the smallest normal f32.
const SMALLEST: i32 = -126;

/// The exponents of the lowest and of the highest bit that factors have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bits {
    low: i32,
    high: i32,
}

fn exponent(x: f64) -> i32 {
    (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
}

impl Bits {
    /// Of some factors; `None` if one is not finite, or too small for a sum in f64.
    pub fn of(factors: &[f64]) -> Option<Bits> {
        let none = Bits { low: i32::MAX / 4, high: i32::MIN / 4 };
        factors.iter().try_fold(none, |bits, &x| match x {
            0.0 => Some(bits),
            _ if !x.is_normal() => None,
            _ => {
                let low = exponent(x) - 52 + (x.to_bits() | 1 << 52).trailing_zeros().min(52) as i32;
                Some(Bits { low: bits.low.min(low), high: bits.high.max(exponent(x)) })
            }
        })
    }
}

/// The bits of f32 `old` plus the products, if every adder that keeps [`KEPT`] bits gives the same.
pub(crate) fn sum(old: u32, [a, b]: [&[f64]; 2], [bits_a, bits_b]: [Bits; 2]) -> Option<u32> {
    let old = f64::from(f32::from_bits(old));
    let own = Bits::of(&[old])?;
    let low = own.low.min(bits_a.low + bits_b.low);
    let high = own.high.max(bits_a.high + bits_b.high + 1).max(SMALLEST);
    if low < high - KEPT {
        return None;
    }
    let sum = a.iter().zip(b).fold(old, |sum, (x, y)| sum + x * y);
    match sum {
        0.0 => Some(0),
        _ if !(SMALLEST..127).contains(&exponent(sum)) => None,
        _ => Some((f64::from_bits(sum.to_bits() >> BELOW << BELOW) as f32).to_bits()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;
    use fulgurite_ptx::Number;
    use fulgurite_ptx::model::Adder;

    #[test]
    fn what_is_summed_quickly_is_what_the_adder_gives() {
        let mut random = Random::new(5);
        let mut quick = 0;
        for round in 0..4000 {
            let spread = [1, 4, 12, 60][round % 4];
            let mut draw = || {
                let bits = random.next();
                let x = (bits % 15) as f64 - 7.0;
                x * f64::from((bits >> 8) as u32 % spread).exp2()
            };
            let [a, b]: [Vec<f64>; 2] = [0; 2].map(|_| (0..32).map(|_| draw()).collect());
            let old = ((draw() * draw()) as f32).to_bits();
            let factors: Vec<[f64; 2]> = a.iter().zip(&b).map(|(&x, &y)| [x, y]).collect();
            let bits = [Bits::of(&a).unwrap(), Bits::of(&b).unwrap()];
            for scaled in [false, true] {
                let want = Adder::blackwell(32, scaled).add(old, &factors, Number::F32, [Number::F32; 2]);
                if let Some(got) = sum(old, [&a, &b], bits) {
                    assert_eq!(got, want, "round {round}");
                    quick += 1;
                }
            }
        }
        assert!((2000..7000).contains(&quick), "{quick} of 8000 are quick");
        assert!(Bits::of(&[1.0, f64::NAN]).is_none() && Bits::of(&[f64::INFINITY]).is_none());
    }
}
