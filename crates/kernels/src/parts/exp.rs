//! The exponentials of [`core`](fulgurite_core::Exp) as instructions.
//!
//! Arguments are powers of two: callers fold log2(e) into a scale that they apply anyway.

use fulgurite_core::Exp;
use fulgurite_core::exp::{EXP2_POLY, SAS_POLY};
use fulgurite_ptx::Val;
use std::f32::consts::{LN_2, LOG2_E};

/// Pairs of elements that a thread holds of 16 columns, which is the fragment of one product.
const FRAGMENT_PAIRS: usize = 4;

/// An element by its number among those of which a thread computes 2^x in one go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Element {
    /// Number of the element in the thread, from 0.
    pub number: usize,
    /// Number of elements.
    pub count: usize,
}

impl Element {
    /// An element that a thread computes alone.
    pub const ALONE: Element = Element { number: 0, count: 1 };

    /// Whether the polynomial computes this element if it computes a share of them all.
    ///
    /// Elements of a pair go the same way, because they are packed together. The chosen pairs are spread evenly, so that the
    /// special-function unit and the multiply-add units work side by side. The last fragment has none: the next product
    /// waits for it, and a polynomial takes longer than `ex2`.
    fn by_polynomial(self, share: f32) -> bool {
        if share >= 1.0 {
            return true;
        }
        let (pair, pairs) = (self.number / 2, self.count.div_ceil(2));
        let free = if pairs > FRAGMENT_PAIRS { pairs - FRAGMENT_PAIRS } else { pairs };
        let chosen = ((share * pairs as f32).round() as usize).min(free);
        pair < free && (pair + 1) * chosen / free > pair * chosen / free
    }
}

/// 2^x. The position of the element decides whether the polynomial computes it.
#[track_caller]
pub fn exp2<'k>(exp: Exp, element: Element, x: Val<'k, f32>) -> Val<'k, f32> {
    match exp {
        Exp::Poly { degree, share } if element.by_polynomial(share) => polynomial(degree, x),
        Exp::Auto | Exp::Native | Exp::Poly { .. } => x.exp2(),
        Exp::Sas { threshold } => sas(threshold, x),
        Exp::SasOnline => panic!("bug in fulgurite: plans refuse exp {exp}"),
    }
}

/// 2^x by Cody-Waite range reduction on the multiply-add units: 0 at and below -127, infinite above 127, NaN for NaN.
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
    (!x.le(127.0)).select(x * f32::INFINITY, y)
}

/// TurboAttention's approximation of e^(x ln 2) for x <= 0: a table of e^-n times a cubic, 0 below the threshold, NaN for NaN.
#[track_caller]
fn sas(threshold: f32, x: Val<'_, f32>) -> Val<'_, f32> {
    // Rounding may put the row's maximum slightly above 0, where the table has no entry.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(share: f32, count: usize) -> Vec<usize> {
        (0..count).filter(|&number| Element { number, count }.by_polynomial(share)).collect()
    }

    #[test]
    fn the_share_is_the_share_asked_for() {
        // A thread holds 64 elements of 128 columns, in 32 pairs; the last four pairs are the last fragment.
        for (share, pairs) in [(0.0, 0), (1.0 / 16.0, 2), (0.125, 4), (0.25, 8), (0.5, 16), (0.9, 28)] {
            let all = chosen(share, 64);
            assert_eq!(all.len(), 2 * pairs, "{share}");
            assert!(all.iter().all(|number| *number < 56 && all.contains(&(number ^ 1))), "{share}: {all:?}");
        }
        assert_eq!(chosen(1.0, 64).len(), 64);
        assert_eq!(chosen(0.5, 8), [2, 3, 6, 7], "one fragment alone has its share");
        assert_eq!((chosen(0.4, 1).len(), chosen(0.5, 1).len()), (0, 1));
    }

    #[test]
    fn chosen_pairs_are_spread() {
        assert_eq!(chosen(0.125, 64), [12, 13, 26, 27, 40, 41, 54, 55]);
    }
}
