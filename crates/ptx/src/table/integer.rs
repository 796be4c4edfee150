//! Arithmetic of integers.

use super::pure;
use crate::inst::Class::{B32, B64};
use crate::inst::{Inst, Needs, Op, Unit, arg, out, word};
use crate::machine::{Machine, each};

const SOURCE: &str = "PTX ISA, integer arithmetic instructions";
const TYPES: &[&str] = &["u32", "s32"];
const WIDE: &[&str] = &["u64", "s64"];

/// Applies the unsigned or the signed form, as the word at operand `t` says.
fn signed(m: &mut dyn Machine, op: &Op, t: usize, unsigned: fn(&[u32]) -> u32, signed: fn(&[i32]) -> i32) {
    if op.word(t).starts_with('s') {
        each(m, op, |x| u64::from(signed(&[0, 1].map(|i| x[i] as i32)) as u32));
    } else {
        each(m, op, |x| u64::from(unsigned(&[0, 1].map(|i| x[i] as u32))));
    }
}
fn wrapping(m: &mut dyn Machine, op: &Op, f: impl Fn(&[u64]) -> u64) {
    each(m, op, |x| u64::from(f(x) as u32));
}

macro_rules! rows {
    ($($(#[$doc:meta])* $id:ident: $name:literal, $text:literal, [$($operand:expr),*], $meaning:expr;)*) => {
        $($(#[$doc])* pub static $id: Inst = pure($name, $text, &[$($operand),*], Unit::Alu, $meaning, SOURCE);)*
        /// All rows of this family.
        pub static ROWS: &[&Inst] = &[$(&$id,)* &BMSK];
    };
}

rows! {
    /// d = a + b.
    ADD: "add", "add.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| wrapping(m, op, |x| x[0].wrapping_add(x[1]));
    /// d = a - b.
    SUB: "sub", "sub.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| wrapping(m, op, |x| x[0].wrapping_sub(x[1]));
    /// d = low 32 bits of a * b.
    MUL: "mul.lo", "mul.lo.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| wrapping(m, op, |x| x[0].wrapping_mul(x[1]));
    /// d = high 32 bits of a * b.
    MUL_HIGH: "mul.hi", "mul.hi.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| signed(m, op, 3,
            |x| ((u64::from(x[0]) * u64::from(x[1])) >> 32) as u32,
            |x| ((i64::from(x[0]) * i64::from(x[1])) >> 32) as i32);
    /// d = low 32 bits of a * b + c.
    MAD: "mad.lo", "mad.lo.{t} {d}, {a}, {b}, {c};",
        [out("d", B32), arg("a", B32), arg("b", B32), arg("c", B32), word("t", TYPES)],
        |m, op| wrapping(m, op, |x| x[0].wrapping_mul(x[1]).wrapping_add(x[2]));
    /// d = a / b; about twenty instructions. Division by zero gives all ones.
    DIV: "div", "div.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| signed(m, op, 3,
            |x| x[0].checked_div(x[1]).unwrap_or(u32::MAX),
            |x| if x[1] == 0 { -1 } else { x[0].wrapping_div(x[1]) });
    /// d = remainder of a / b; about twenty instructions.
    REM: "rem", "rem.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| signed(m, op, 3,
            |x| x[0].checked_rem(x[1]).unwrap_or(x[0]),
            |x| if x[1] == 0 { x[0] } else { x[0].wrapping_rem(x[1]) });
    /// d = the smaller of both.
    MIN: "min", "min.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| signed(m, op, 3, |x| x[0].min(x[1]), |x| x[0].min(x[1]));
    /// d = the larger of both.
    MAX: "max", "max.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| signed(m, op, 3, |x| x[0].max(x[1]), |x| x[0].max(x[1]));
    /// d = |a|.
    ABS: "abs.s32", "abs.s32 {d}, {a};", [out("d", B32), arg("a", B32)],
        |m, op| each(m, op, |x| u64::from((x[0] as u32 as i32).unsigned_abs()));
    /// d = -a.
    NEG: "neg.s32", "neg.s32 {d}, {a};", [out("d", B32), arg("a", B32)],
        |m, op| wrapping(m, op, |x| x[0].wrapping_neg());
    /// d = a + b, in 64 bits.
    ADD_WIDE: "add.64", "add.{t} {d}, {a}, {b};", [out("d", B64), arg("a", B64), arg("b", B64), word("t", WIDE)],
        |m, op| each(m, op, |x| x[0].wrapping_add(x[1]));
    /// d = a - b, in 64 bits.
    SUB_WIDE: "sub.64", "sub.{t} {d}, {a}, {b};", [out("d", B64), arg("a", B64), arg("b", B64), word("t", WIDE)],
        |m, op| each(m, op, |x| x[0].wrapping_sub(x[1]));
    /// d = low 64 bits of a * b.
    MUL_64: "mul.lo.64", "mul.lo.{t} {d}, {a}, {b};", [out("d", B64), arg("a", B64), arg("b", B64), word("t", WIDE)],
        |m, op| each(m, op, |x| x[0].wrapping_mul(x[1]));
    /// d = the 64-bit product of 32-bit factors a and b.
    MUL_WIDE: "mul.wide", "mul.wide.{t} {d}, {a}, {b};",
        [out("d", B64), arg("a", B32), arg("b", B32), word("t", TYPES)],
        |m, op| {
            let is_signed = op.word(3) == "s32";
            each(m, op, |x| if is_signed {
                (i64::from(x[0] as i32) * i64::from(x[1] as i32)) as u64
            } else {
                (x[0] & 0xffff_ffff) * (x[1] & 0xffff_ffff)
            });
        };
    /// d = a * b + c in 64 bits, with 32-bit factors a and b.
    MAD_WIDE: "mad.wide", "mad.wide.u32 {d}, {a}, {b}, {c};",
        [out("d", B64), arg("a", B32), arg("b", B32), arg("c", B64)],
        |m, op| each(m, op, |x| ((x[0] & 0xffff_ffff) * (x[1] & 0xffff_ffff)).wrapping_add(x[2]));
    /// d = number of bits set in a.
    POPC: "popc", "popc.b32 {d}, {a};", [out("d", B32), arg("a", B32)],
        |m, op| each(m, op, |x| u64::from((x[0] as u32).count_ones()));
    /// d = number of leading zeros of a.
    CLZ: "clz", "clz.b32 {d}, {a};", [out("d", B32), arg("a", B32)],
        |m, op| each(m, op, |x| u64::from((x[0] as u32).leading_zeros()));
    /// d = `count` bits of a starting at bit `first`, zero-extended or sign-extended.
    BFE: "bfe", "bfe.{t} {d}, {a}, {first}, {count};",
        [out("d", B32), arg("a", B32), arg("first", B32), arg("count", B32), word("t", TYPES)],
        |m, op| {
            let is_signed = op.word(4) == "s32";
            each(m, op, |x| {
                let a = if is_signed { i64::from(x[0] as i32) } else { i64::from(x[0] as u32) };
                let (first, count) = (x[1] & 0xff, x[2] & 0xff);
                if count == 0 {
                    return 0;
                }
                // Above bit 31, a signed number has copies of its sign, an unsigned one zeros.
                let kept = (a >> first.min(63)) as u64;
                let last = (first + count - 1).min(31);
                let sign = is_signed && x[0] >> last & 1 == 1;
                let mask = if count >= 32 { 0xffff_ffff } else { (1u64 << count) - 1 };
                (kept & mask | if sign { !mask } else { 0 }) & 0xffff_ffff
            })
        };
    /// d = b with `count` bits starting at bit `first` replaced by the low bits of a.
    BFI: "bfi", "bfi.b32 {d}, {a}, {b}, {first}, {count};",
        [out("d", B32), arg("a", B32), arg("b", B32), arg("first", B32), arg("count", B32)],
        |m, op| each(m, op, |x| {
            let (first, count) = ((x[2] & 0xff).min(32), (x[3] & 0xff).min(32));
            let mask = ((1u64 << count) - 1) << first & 0xffff_ffff;
            x[1] & 0xffff_ffff & !mask | (x[0] & 0xffff_ffff) << first & mask
        });
    /// d = the bits of a in reverse order.
    BREV: "brev", "brev.b32 {d}, {a};", [out("d", B32), arg("a", B32)],
        |m, op| each(m, op, |x| u64::from((x[0] as u32).reverse_bits()));
}

/// d = `count` ones starting at bit `first`.
pub static BMSK: Inst = Inst {
    needs: Needs::from((7, 6), 80),
    ..pure(
        "bmsk",
        "bmsk.clamp.b32 {d}, {first}, {count};",
        &[out("d", B32), arg("first", B32), arg("count", B32)],
        Unit::Alu,
        |m, op| {
            each(m, op, |x| {
                let (first, count) = ((x[0] & 0xffff_ffff).min(32), (x[1] & 0xffff_ffff).min(32));
                ((1u64 << count) - 1) << first & 0xffff_ffff
            });
        },
        SOURCE,
    )
};
