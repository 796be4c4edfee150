//! The exponentials of [`core`](fulgurite_core::Exp) as instructions.
//!
//! Arguments are in powers of two: callers fold log2(e) into the scale they multiply by anyway.

use fulgurite_core::Exp;
use fulgurite_core::exp::{EXP2_POLY, SAS_POLY};
use fulgurite_ptx::Val;
use std::f32::consts::{LN_2, LOG2_E};

/// Elements in a row of which a share uses the polynomial: FlashAttention-4 interleaves at this distance.
const PERIOD: u32 = 16;

/// 2^x for the `index`-th element of a row: which elements use the polynomial depends on it alone.
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

/// 2^x by Cody-Waite range reduction on the multiply-add units: 0 at and below -127, infinite above 127, NaN for NaN.
#[track_caller]
fn polynomial(degree: u8, x: Val<'_, f32>) -> Val<'_, f32> {
    /// Adding it leaves the floor of a small number in the low bits of the sum, rounded down.
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
    let c = EXP2_POLY[usize::from(degree) - 3];
    let clamped = x.max(-127.0);
    let shifted = clamped.add_down(MAGIC);
    let r = clamped - (shifted - MAGIC);
    let mut p = r.mul_add(c[usize::from(degree)], c[usize::from(degree) - 1]);
    for &c in c[..usize::from(degree) - 1].iter().rev() {
        p = p.mul_add(r, c);
    }
    // p is in [1, 2): its exponent takes the whole part as an integer; at -127 the result is 0.
    let y = (p.to_bits() + (shifted.to_bits() << 23)).to_f32_bits();
    (!x.le(127.0)).select(x * f32::INFINITY, y)
}

/// TurboAttention's function of e^(x ln 2), for x <= 0: a table of e^-n times a cubic, 0 below the threshold, NaN for NaN.
#[track_caller]
fn sas(threshold: f32, x: Val<'_, f32>) -> Val<'_, f32> {
    // The maximum itself may come out a rounding above 0, where the table has no entry.
    let y = x * -LN_2;
    let n = y.max(0.0).floor();
    let f = y - n;
    let mut cubic = f.mul_add(SAS_POLY[3], SAS_POLY[2]);
    for &c in SAS_POLY[..2].iter().rev() {
        cubic = cubic.mul_add(f, c);
    }
    let table = (n * -LOG2_E).exp2();
    y.gt(-threshold).select(0.0, table * cubic)
}
