//! Bits, shifts, comparison and selection.

use super::pure;
use crate::inst::Class::{B16, B32, B64, F32, Pred};
use crate::inst::{Inst, Unit, arg, number, out, steps, word};
use crate::machine::each;

const LOGIC: &str = "PTX ISA, logic and shift instructions";
const COMPARE: &str = "PTX ISA, comparison and selection instructions";
const BITS: &[&str] = &["and", "or", "xor"];
const INT: &[&str] = &["u32", "s32"];
const ORDER: &[&str] = &["eq", "ne", "lt", "le", "gt", "ge"];
/// Comparisons of floats. With a NaN operand, ordered comparisons are false and the `u` forms are true.
const FLOAT_ORDER: &[&str] =
    &["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"];

fn bits(which: &str, a: u64, b: u64) -> u64 {
    match which {
        "and" => a & b,
        "or" => a | b,
        _ => a ^ b,
    }
}

fn ordered<T: PartialOrd>(which: &str, a: T, b: T) -> bool {
    match which {
        "eq" => a == b,
        "ne" => a != b,
        "lt" => a < b,
        "le" => a <= b,
        "gt" => a > b,
        _ => a >= b,
    }
}

fn float_ordered(which: &str, a: f32, b: f32) -> bool {
    let unordered = a.is_nan() || b.is_nan();
    match which {
        "num" => !unordered,
        "nan" => unordered,
        "eq" | "ne" | "lt" | "le" | "gt" | "ge" => !unordered && ordered(which, a, b),
        other => unordered || ordered(&other[..2], a, b),
    }
}

/// Any function of three bits, by its truth table: bit `4a + 2b + c` of `lut`.
fn lop3(a: u32, b: u32, c: u32, lut: u32) -> u32 {
    (0..8).filter(|i| lut >> i & 1 == 1).fold(0, |d, i| {
        let pick = |x: u32, bit: u32| if i >> bit & 1 == 1 { x } else { !x };
        d | (pick(a, 2) & pick(b, 1) & pick(c, 0))
    })
}

/// Four bytes selected from eight; bit 3 of a selector replicates the byte's sign.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    u32::from_le_bytes(std::array::from_fn(|i| {
        let pick = selector >> (4 * i) & 0xf;
        let byte = bytes[pick as usize & 7];
        if pick & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
    }))
}

macro_rules! rows {
    ($($(#[$doc:meta])* $id:ident: $name:literal, $text:literal, [$($operand:expr),*], $source:ident, $meaning:expr;)*) => {
        $($(#[$doc])* pub static $id: Inst = pure($name, $text, &[$($operand),*], Unit::Alu, $meaning, $source);)*
        /// All rows of this family.
        pub static ROWS: &[&Inst] = &[$(&$id),*];
    };
}

rows! {
    /// d = a op b, bitwise.
    BITS_32: "bits.b32", "{o}.b32 {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("o", BITS)], LOGIC,
        |m, op| { let o = op.word(3); each(m, op, |x| bits(o, x[0], x[1])) };
    /// d = a op b, bitwise, in 64 bits.
    BITS_64: "bits.b64", "{o}.b64 {d}, {a}, {b};", [out("d", B64), arg("a", B64), arg("b", B64), word("o", BITS)], LOGIC,
        |m, op| { let o = op.word(3); each(m, op, |x| bits(o, x[0], x[1])) };
    /// d = a op b, for predicates.
    BITS_PRED: "bits.pred", "{o}.pred {d}, {a}, {b};",
        [out("d", Pred), arg("a", Pred), arg("b", Pred), word("o", BITS)], LOGIC,
        |m, op| { let o = op.word(3); each(m, op, |x| bits(o, x[0], x[1])) };
    /// d = not a.
    NOT: "not.b32", "not.b32 {d}, {a};", [out("d", B32), arg("a", B32)], LOGIC,
        |m, op| each(m, op, |x| u64::from(!(x[0] as u32)));
    /// d = not a, for predicates.
    NOT_PRED: "not.pred", "not.pred {d}, {a};", [out("d", Pred), arg("a", Pred)], LOGIC,
        |m, op| each(m, op, |x| x[0] ^ 1);
    /// d = any bitwise function of a, b and c; `lut` is its truth table.
    LOP3: "lop3", "lop3.b32 {d}, {a}, {b}, {c}, {lut};",
        [out("d", B32), arg("a", B32), arg("b", B32), arg("c", B32), number("lut", &[steps(0, 255, 1)])], LOGIC,
        |m, op| each(m, op, |x| u64::from(lop3(x[0] as u32, x[1] as u32, x[2] as u32, x[3] as u32)));
    /// d = bytes of a and b, selected by the nibbles of s.
    PRMT: "prmt", "prmt.b32 {d}, {a}, {b}, {s};", [out("d", B32), arg("a", B32), arg("b", B32), arg("s", B32)], LOGIC,
        |m, op| each(m, op, |x| u64::from(permute(x[0] as u32, x[1] as u32, x[2] as u32)));
    /// d = a shifted left; shifts of 32 and more give 0.
    SHL: "shl", "shl.b32 {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32)], LOGIC,
        |m, op| each(m, op, |x| u64::from((x[0] as u32).checked_shl(x[1] as u32).unwrap_or(0)));
    /// d = a shifted right; signed numbers keep their sign.
    SHR: "shr", "shr.{t} {d}, {a}, {b};", [out("d", B32), arg("a", B32), arg("b", B32), word("t", INT)], LOGIC,
        |m, op| {
            let is_signed = op.word(3) == "s32";
            each(m, op, |x| {
                let (a, n) = (x[0] as u32, x[1] as u32);
                u64::from(if is_signed { ((a as i32) >> n.min(31)) as u32 } else { a.checked_shr(n).unwrap_or(0) })
            })
        };
    /// d = a shifted left, in 64 bits.
    SHL_64: "shl.b64", "shl.b64 {d}, {a}, {b};", [out("d", B64), arg("a", B64), arg("b", B32)], LOGIC,
        |m, op| each(m, op, |x| x[0].checked_shl(x[1] as u32).unwrap_or(0));
    /// d = a shifted right, in 64 bits.
    SHR_64: "shr.u64", "shr.u64 {d}, {a}, {b};", [out("d", B64), arg("a", B64), arg("b", B32)], LOGIC,
        |m, op| each(m, op, |x| x[0].checked_shr(x[1] as u32).unwrap_or(0));
    /// d = the upper half of (hi, lo) shifted left by n modulo 32.
    FUNNEL: "shf.l", "shf.l.wrap.b32 {d}, {lo}, {hi}, {n};",
        [out("d", B32), arg("lo", B32), arg("hi", B32), arg("n", B32)], LOGIC,
        |m, op| each(m, op, |x| (((x[1] << 32 | x[0] & 0xffff_ffff) << (x[2] & 31)) >> 32) & 0xffff_ffff);
    /// d = the lower half of (hi, lo) shifted right by n, modulo 32 or clamped to 32.
    FUNNEL_DOWN: "shf.r", "shf.r.{mode}.b32 {d}, {lo}, {hi}, {n};",
        [out("d", B32), arg("lo", B32), arg("hi", B32), arg("n", B32), word("mode", &["wrap", "clamp"])], LOGIC,
        |m, op| {
            let wraps = op.word(4) == "wrap";
            each(m, op, |x| {
                let n = x[2] as u32;
                let n = if wraps { n & 31 } else { n.min(32) };
                (x[1] << 32 | x[0] & 0xffff_ffff) >> n & 0xffff_ffff
            })
        };
    /// p = a compared with b.
    SETP: "setp", "setp.{o}.{t} {p}, {a}, {b};",
        [out("p", Pred), arg("a", B32), arg("b", B32), word("o", ORDER), word("t", INT)], COMPARE,
        |m, op| {
            let (o, is_signed) = (op.word(3), op.word(4) == "s32");
            each(m, op, |x| u64::from(if is_signed {
                ordered(o, x[0] as i32, x[1] as i32)
            } else {
                ordered(o, x[0] as u32, x[1] as u32)
            }))
        };
    /// p = a compared with b, in 64 bits.
    SETP_64: "setp.u64", "setp.{o}.u64 {p}, {a}, {b};",
        [out("p", Pred), arg("a", B64), arg("b", B64), word("o", ORDER)], COMPARE,
        |m, op| { let o = op.word(3); each(m, op, |x| u64::from(ordered(o, x[0], x[1]))) };
    /// p = a compared with b.
    SETP_F32: "setp.f32", "setp.{o}.f32 {p}, {a}, {b};",
        [out("p", Pred), arg("a", F32), arg("b", F32), word("o", FLOAT_ORDER)], COMPARE,
        |m, op| {
            let o = op.word(3);
            each(m, op, |x| u64::from(float_ordered(o, f32::from_bits(x[0] as u32), f32::from_bits(x[1] as u32))))
        };
    /// d = a where p holds, else b, in 16 bits.
    SELP_16: "selp.b16", "selp.b16 {d}, {a}, {b}, {p};", [out("d", B16), arg("a", B16), arg("b", B16), arg("p", Pred)],
        COMPARE, |m, op| each(m, op, |x| if x[2] == 1 { x[0] } else { x[1] });
    /// d = a where p holds, else b.
    SELP_32: "selp.b32", "selp.b32 {d}, {a}, {b}, {p};", [out("d", B32), arg("a", B32), arg("b", B32), arg("p", Pred)],
        COMPARE, |m, op| each(m, op, |x| if x[2] == 1 { x[0] } else { x[1] });
    /// d = a where p holds, else b, in 64 bits.
    SELP_64: "selp.b64", "selp.b64 {d}, {a}, {b}, {p};", [out("d", B64), arg("a", B64), arg("b", B64), arg("p", Pred)],
        COMPARE, |m, op| each(m, op, |x| if x[2] == 1 { x[0] } else { x[1] });
    /// d = a where p holds, else b.
    SELP_F32: "selp.f32", "selp.f32 {d}, {a}, {b}, {p};", [out("d", F32), arg("a", F32), arg("b", F32), arg("p", Pred)],
        COMPARE, |m, op| each(m, op, |x| if x[2] == 1 { x[0] } else { x[1] });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_input_logic() {
        let (a, b, c) = (0xf0f0_1234, 0xcccc_5678, 0xaaaa_9abc);
        assert_eq!(lop3(a, b, c, 0x96), a ^ b ^ c);
        assert_eq!(lop3(a, b, c, 0xe8), a & b | a & c | b & c);
        assert_eq!(lop3(a, b, c, 0xca), a & b | !a & c);
        assert_eq!(lop3(a, b, c, 0xfe), a | b | c);
    }

    #[test]
    fn bytes_are_picked() {
        assert_eq!(permute(0x4433_2211, 0x8877_6655, 0x5410), 0x6655_2211);
        assert_eq!(permute(0x4433_2211, 0x8877_6655, 0x7632), 0x8877_4433);
        assert_eq!(permute(0x0000_0080, 0, 0x0008), 0x0000_00ff | 0x8080_8000);
    }

    #[test]
    fn comparisons_with_nan() {
        assert!(!float_ordered("lt", f32::NAN, 1.0) && float_ordered("ltu", f32::NAN, 1.0));
        assert!(!float_ordered("ne", f32::NAN, 1.0) && float_ordered("neu", f32::NAN, 1.0));
        assert!(float_ordered("nan", 0.0, f32::NAN) && float_ordered("ge", 2.0, 2.0));
    }
}
