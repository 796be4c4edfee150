//! The exponentials of [`core`](fulgurite_core::Exp) as instructions.
//!
//! Arguments are powers of two: callers fold log2(e) into a scale that they apply anyway.

use fulgurite_core::Exp;
use fulgurite_core::exp::{EXP2_POLY, SAS_POLY};
use fulgurite_ptx::Val;
use std::f32::consts::{LN_2, LOG2_E};

/// Period, in elements of a row, of the pattern that chooses the polynomial. FlashAttention-4 interleaves with this
/// period.
const PERIOD: u32 = 16;

/// 2^x for the `index`-th element of a row. The index alone decides whether the element uses the polynomial.
#[track_caller]
pub fn exp2<'k>(exp: Exp, index: u32, x: Val<'k, f32>) -> Val<'k, f32> {
    match exp {
        Exp::Auto | Exp::Native => x.exp2(),
        Exp::Poly { degree, share } => {
            if ((index % PERIOD) as f32) < share * PERIOD as f32 {
                polynomial(degree, x)
            } else {
                x.exp2()
            }
        }
        Exp::Sas { threshold } => sas(threshold, x),
    }
}

/// 2^x by Cody-Waite range reduction on the multiply-add units: 0 at and below -127, infinite above 127.
#[track_caller]
fn polynomial(degree: u8, x: Val<'_, f32>) -> Val<'_, f32> {
    /// Adding this number and rounding down leaves the floor of a small number in the low bits of the sum.
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
    let c = EXP2_POLY[usize::from(degree) - 3];
    let clamped = x.max(-127.0);
    let shifted = clamped.add_down(MAGIC);
    let r = clamped - (shifted - MAGIC);
    let mut p = r.mul_add(c[usize::from(degree)], c[usize::from(degree) - 1]);
    for &c in c[..usize::from(degree) - 1].iter().rev() {
        p = p.mul_add(r, c);
    }
    // p is in [1, 2), so adding the integer part to its exponent bits multiplies by the power of two; at -127 the
    // result is 0.
    let y = (p.to_bits() + (shifted.to_bits() << 23)).to_f32_bits();
    x.gt(127.0).select(f32::INFINITY, y)
}

/// TurboAttention's approximation of e^(x ln 2) for x <= 0: a table of e^-n times a cubic, and 0 below the threshold.
#[track_caller]
fn sas(threshold: f32, x: Val<'_, f32>) -> Val<'_, f32> {
    // Rounding may put the row's maximum slightly above 0, where the table has no entry.
    let y = (x * -LN_2).max(0.0);
    let n = y.floor();
    let f = y - n;
    let mut cubic = f.mul_add(SAS_POLY[3], SAS_POLY[2]);
    for &c in SAS_POLY[..2].iter().rev() {
        cubic = cubic.mul_add(f, c);
    }
    let table = (n * -LOG2_E).exp2();
    y.gt(-threshold).select(0.0, table * cubic)
}
