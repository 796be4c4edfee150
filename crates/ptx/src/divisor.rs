//! Division by a value that the host knows: a multiplication and a shift instead of about twenty instructions.

use crate::build::{Builder, Val};
use crate::device::Value;
use std::panic::Location;

/// A kernel parameter that serves as a divisor. Dividends must be below 2^31.
#[derive(Clone, Copy)]
pub struct Divisor<'k> {
    value: Val<'k, u32>,
    magic: Val<'k, u32>,
    shift: Val<'k, u32>,
}

impl Builder {
    /// Declares a divisor as three parameters; [`divisor_values`] gives their arguments.
    #[track_caller]
    pub fn divisor(&self, name: &str) -> Divisor<'_> {
        let param = |end| self.param::<u32>(&format!("{name}{end}"));
        let [value, magic, shift] = self.placed(Location::caller(), || ["", "_magic", "_shift"].map(param));
        Divisor { value, magic, shift }
    }
}

impl<'k> Divisor<'k> {
    /// The divisor itself.
    pub fn value(self) -> Val<'k, u32> {
        self.value
    }

    /// Quotient and remainder of a dividend below 2^31.
    #[track_caller]
    pub fn div_rem(self, x: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let quotient = self.magic.eq(0).select::<u32>(x, x.mul_high(self.magic) >> self.shift);
        [quotient, x - quotient * self.value]
    }

    /// `a` if `cond` holds, else `b`.
    #[track_caller]
    pub fn select(cond: Val<'k, bool>, a: Divisor<'k>, b: Divisor<'k>) -> Divisor<'k> {
        let pick = |a: Val<'k, u32>, b: Val<'k, u32>| cond.select::<u32>(a, b);
        let [value, magic, shift] = cond
            .k
            .placed(Location::caller(), || [pick(a.value, b.value), pick(a.magic, b.magic), pick(a.shift, b.shift)]);
        Divisor { value, magic, shift }
    }
}

/// The arguments for a [`Divisor`]: the number `d` (1 to 2^31), the multiplier and the shift.
///
/// With l = ceil(log2 d), the multiplier m = floor(2^(31 + l) / d) + 1 fits 32 bits, and floor(x m / 2^(31 + l)) equals
/// floor(x / d) for every x below 2^31 (Granlund and Montgomery, 1994, theorem 4.2 with N = 31).
pub fn divisor_values(d: u32) -> [Value; 3] {
    let d = d.clamp(1, 1 << 31);
    let l = 32 - (d - 1).leading_zeros();
    match l {
        // For d = 1, m would be 2^31 + 1 and the shift -1. A multiplier of 0 tells the kernel that the quotient is x
        // itself.
        0 => [Value::U32(1), Value::U32(0), Value::U32(0)],
        _ => [Value::U32(d), Value::U32(((1u64 << (31 + l)) / u64::from(d) + 1) as u32), Value::U32(l - 1)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotients_are_exact() {
        let value = |v: &Value| match v {
            Value::U32(x) => *x,
            other => panic!("{other:?}"),
        };
        for d in
            (1..200).chain([255, 256, 257, 1000, 65535, 65536, 65537, (1 << 30) - 1, 1 << 30, i32::MAX as u32, 1 << 31])
        {
            let [n, magic, shift] = divisor_values(d);
            assert_eq!(value(&n), d);
            let near = (0..40).map(|i| d.saturating_mul(i)).flat_map(|x| [x.wrapping_sub(1), x, x.wrapping_add(1)]);
            for x in near.chain([0, 1, 12345, 1 << 30, i32::MAX as u32 - 1, i32::MAX as u32]).filter(|x| *x < 1 << 31) {
                let high = ((u64::from(x) * u64::from(value(&magic))) >> 32) as u32;
                let quotient = if value(&magic) == 0 { x } else { high >> value(&shift) };
                assert_eq!(quotient, x / d, "{x} / {d}");
            }
        }
    }
}
