//! Moves and conversions.

use super::any;
use super::pure;
use crate::inst::Class::{B16, B32, B64, F32, Pred};
use crate::inst::{Arg, Effect, Inst, Kind, Needs, Op, Together, Unit, arg, args, of, out, outs, reg, word};
use crate::machine::{Machine, Special, each, lanes, value};
use half::{bf16, f16};

const MOVE: &str = "PTX ISA, data movement and conversion instructions, mov";
const CVT: &str = "PTX ISA, data movement and conversion instructions, cvt";
const HALVES: &[&str] = &["f16", "bf16"];
const PAIRS: &[&str] = &["f16x2", "bf16x2"];
const INT: &[&str] = &["u32", "s32"];

fn half_bits(kind: &str, x: f32) -> u64 {
    u64::from(if kind.starts_with("bf16") { bf16::from_f32(x).to_bits() } else { f16::from_f32(x).to_bits() })
}

/// Rounds to a 16-bit float, toward zero.
fn cut_bits(kind: &str, x: f32) -> u64 {
    let bits = half_bits(kind, x);
    let back = if kind.starts_with("bf16") {
        bf16::from_bits(bits as u16).to_f32()
    } else {
        f16::from_bits(bits as u16).to_f32()
    };
    // One unit less of magnitude is one less in the bits; this also holds from infinity to the largest number.
    if back.abs() > x.abs() { bits - 1 } else { bits }
}

fn split(m: &mut dyn Machine, op: &Op, bits: u32) {
    for lane in lanes(m.active()) {
        let x = value(m, lane, op, 1);
        for (i, &reg) in op.list(0).iter().enumerate() {
            m.set(lane, reg, x >> (bits * i as u32) & ((1 << bits) - 1));
        }
    }
}
fn join(m: &mut dyn Machine, op: &Op, bits: u32) {
    for lane in lanes(m.active()) {
        let parts: Vec<u64> = op.list(1).iter().map(|&reg| m.get(lane, reg)).collect();
        let whole =
            parts.iter().enumerate().fold(0, |x, (i, part)| x | (part & ((1 << bits) - 1)) << (bits * i as u32));
        m.set(lane, op.reg(0), whole);
    }
}

/// Whether a list operand, if any, has two registers.
fn two(op: &Op) -> bool {
    op.args.iter().all(|arg| !matches!(arg, Arg::List(regs) if regs.len() != 2))
}

macro_rules! rows {
    ($($(#[$doc:meta])* $id:ident: $name:literal, $text:literal, [$($operand:expr),*], $unit:ident, $source:ident, $meaning:expr;)*) => {
        $($(#[$doc])* pub static $id: Inst = Inst {
            allowed: two,
            ..pure($name, $text, &[$($operand),*], Unit::$unit, $meaning, $source)
        };)*
        /// All rows of this family.
        pub static ROWS: &[&Inst] = &[$(&$id,)* &SPECIAL, &SPECIAL_CLUSTER, &SPECIAL_64, &CVT_WIDEN,
            &CVT_E4M3, &CVT_PAIR_E4M3, &CVT_E4M3_PAIR, &CVT_TF32, &CVT_TF32_EVEN, &PARAM_ADDRESS];
    };
}

rows! {
    /// d = a.
    MOV_16: "mov.b16", "mov.b16 {d}, {a};", [out("d", B16), arg("a", B16)], Alu, MOVE, |m, op| each(m, op, |x| x[0]);
    /// d = a.
    MOV_32: "mov.b32", "mov.b32 {d}, {a};", [out("d", B32), arg("a", B32)], Alu, MOVE, |m, op| each(m, op, |x| x[0]);
    /// d = a.
    MOV_64: "mov.b64", "mov.b64 {d}, {a};", [out("d", B64), arg("a", B64)], Alu, MOVE, |m, op| each(m, op, |x| x[0]);
    /// d = a.
    MOV_F32: "mov.f32", "mov.f32 {d}, {a};", [out("d", F32), arg("a", F32)], Alu, MOVE, |m, op| each(m, op, |x| x[0]);
    /// d = a, a predicate or the constant 0 or 1.
    MOV_PRED: "mov.pred", "mov.pred {d}, {a};", [out("d", Pred), arg("a", Pred)], Alu, MOVE,
        |m, op| each(m, op, |x| x[0]);
    /// d = the bits of a float.
    BITS_OF_F32: "mov.b32.f32", "mov.b32 {d}, {a};", [out("d", B32), arg("a", F32)], Alu, MOVE,
        |m, op| each(m, op, |x| x[0]);
    /// d = the float with these bits.
    F32_OF_BITS: "mov.f32.b32", "mov.b32 {d}, {a};", [out("d", F32), arg("a", B32)], Alu, MOVE,
        |m, op| each(m, op, |x| x[0]);
    /// The two halves of 64 bits, low first.
    SPLIT_64: "mov.split.b64", "mov.b64 {d}, {a};", [outs("d", B32), arg("a", B64)], Alu, MOVE, |m, op| split(m, op, 32);
    /// 64 bits from two halves, low first.
    JOIN_64: "mov.join.b64", "mov.b64 {d}, {a};", [out("d", B64), args("a", B32)], Alu, MOVE, |m, op| join(m, op, 32);
    /// Two floats in one register, the first in the low half.
    SPLIT_F32: "mov.split.f32", "mov.b64 {d}, {a};", [outs("d", F32), reg("a", B64)], Alu, MOVE, |m, op| split(m, op, 32);
    /// The register of two floats, the first in the low half.
    JOIN_F32: "mov.join.f32", "mov.b64 {d}, {a};", [out("d", B64), args("a", F32)], Alu, MOVE, |m, op| join(m, op, 32);
    /// The two halves of 32 bits, low first.
    SPLIT_32: "mov.split.b32", "mov.b32 {d}, {a};", [outs("d", B16), arg("a", B32)], Alu, MOVE, |m, op| split(m, op, 16);
    /// 32 bits from two halves, low first.
    JOIN_32: "mov.join.b32", "mov.b32 {d}, {a};", [out("d", B32), args("a", B16)], Alu, MOVE, |m, op| join(m, op, 16);
    /// d = address at which dynamic shared memory begins.
    SHARED_BASE: "mov.smem", "mov.u32 {d}, smem;", [out("d", B32)], Alu, MOVE,
        |m, op| { let base = u64::from(m.shared_base()); each(m, op, |_| base) };
    /// Two floats rounded to a pair; `high` goes to the upper half.
    CVT_PAIR: "cvt.pair.f32", "cvt.rn.{t}.f32 {d}, {high}, {low};",
        [out("d", B32), arg("high", F32), arg("low", F32), word("t", PAIRS)], Convert, CVT,
        |m, op| {
            let t = op.word(3);
            each(m, op, |x| half_bits(t, f32::from_bits(x[0] as u32)) << 16 | half_bits(t, f32::from_bits(x[1] as u32)))
        };
    /// A float rounded to 16 bits.
    CVT_HALF: "cvt.half.f32", "cvt.rn.{t}.f32 {d}, {a};", [out("d", B16), arg("a", F32), word("t", HALVES)], Convert, CVT,
        |m, op| { let t = op.word(2); each(m, op, |x| half_bits(t, f32::from_bits(x[0] as u32))) };
    /// Two floats truncated to a pair; `high` goes to the upper half.
    CVT_PAIR_CUT: "cvt.rz.pair.f32", "cvt.rz.{t}.f32 {d}, {high}, {low};",
        [out("d", B32), arg("high", F32), arg("low", F32), word("t", PAIRS)], Convert, CVT,
        |m, op| {
            let t = op.word(3);
            each(m, op, |x| cut_bits(t, f32::from_bits(x[0] as u32)) << 16 | cut_bits(t, f32::from_bits(x[1] as u32)))
        };
    /// A float converted to an integer, rounded as the word says (nearest, down, up, toward zero). NaN gives 0;
    /// out-of-range values saturate.
    CVT_INT_F32: "cvt.int.f32", "cvt.{r}.{t}.f32 {d}, {a};",
        [out("d", B32), arg("a", F32), word("r", &["rni", "rmi", "rpi", "rzi"]), word("t", INT)], Convert, CVT,
        |m, op| {
            let (r, is_signed) = (op.word(2), op.word(3) == "s32");
            each(m, op, |x| {
                let a = f32::from_bits(x[0] as u32);
                let whole = match r {
                    "rni" => a.round_ties_even(),
                    "rmi" => a.floor(),
                    "rpi" => a.ceil(),
                    _ => a,
                };
                u64::from(if is_signed { whole as i32 as u32 } else { whole as u32 })
            })
        };
    /// An integer converted to a float, rounded to nearest.
    CVT_F32_INT: "cvt.f32.int", "cvt.rn.f32.{t} {d}, {a};", [out("d", F32), arg("a", B32), word("t", INT)], Convert, CVT,
        |m, op| {
            let is_signed = op.word(2) == "s32";
            each(m, op, |x| {
                let f = if is_signed { x[0] as u32 as i32 as f32 } else { x[0] as u32 as f32 };
                u64::from(f.to_bits())
            })
        };
    /// A float truncated to an integer. NaN gives 0; out-of-range values saturate.
    CVT_S32_F32: "cvt.s32.f32", "cvt.rzi.s32.f32 {d}, {a};", [out("d", B32), arg("a", F32)], Convert, CVT,
        |m, op| each(m, op, |x| u64::from(f32::from_bits(x[0] as u32) as i32 as u32));
    /// The largest integer not above a, as a float.
    FLOOR: "cvt.rmi.f32", "cvt.rmi.f32.f32 {d}, {a};", [out("d", F32), arg("a", F32)], Convert, CVT,
        |m, op| each(m, op, |x| u64::from(f32::from_bits(x[0] as u32).floor().to_bits()));
    /// 32 bits extended to 64, with zeros or the sign.
    CVT_64: "cvt.64", "cvt.{w}.{t} {d}, {a};", [out("d", B64), arg("a", B32), word("w", &["u64", "s64"]), word("t", INT)],
        Alu, CVT,
        |m, op| {
            let is_signed = op.word(3) == "s32";
            each(m, op, |x| if is_signed { x[0] as u32 as i32 as i64 as u64 } else { x[0] & 0xffff_ffff })
        };
    /// The low 32 bits.
    CVT_32: "cvt.u32.u64", "cvt.u32.u64 {d}, {a};", [out("d", B32), arg("a", B64)], Alu, CVT,
        |m, op| each(m, op, |x| x[0] & 0xffff_ffff);
}

const SPECIALS: &[&str] =
    &["%tid.x", "%laneid", "%ctaid.x", "%nctaid.x", "%ctaid.y", "%ctaid.z", "%smid", "%clock", "%lanemask_lt"];

fn special(m: &mut dyn Machine, op: &Op) {
    let name = op.word(1);
    let which =
        Special::NAMES.iter().find(|(n, _)| *n == name).expect("bug in fulgurite: an unknown special register").1;
    for lane in lanes(m.active()) {
        let bits = m.special(lane, which);
        m.set(lane, op.reg(0), bits);
    }
}

/// d = a special register.
pub static SPECIAL: Inst = Inst {
    name: "mov.special",
    text: "mov.u32 {d}, {s};",
    operands: &[out("d", B32), word("s", SPECIALS)],
    allowed: any,
    needs: Needs::AMPERE,
    unit: Unit::Alu,
    together: Together::Thread,
    effect: Effect::Volatile,
    meaning: special,
    source: "PTX ISA, special registers",
};

/// d = a special register that gives the CTA's position in its cluster.
pub static SPECIAL_CLUSTER: Inst = Inst {
    name: "mov.special.cluster",
    text: "mov.u32 {d}, {s};",
    operands: &[out("d", B32), word("s", &["%cluster_ctarank", "%cluster_nctarank", "%clusterid.x", "%nclusterid.x"])],
    allowed: any,
    needs: Needs::HOPPER,
    unit: Unit::Alu,
    together: Together::Thread,
    effect: Effect::Volatile,
    meaning: special,
    source: "PTX ISA, special registers",
};

/// d = a special register of 64 bits.
pub static SPECIAL_64: Inst = Inst {
    name: "mov.special.64",
    text: "mov.u64 {d}, {s};",
    operands: &[out("d", B64), word("s", &["%globaltimer", "%clock64"])],
    allowed: any,
    needs: Needs::AMPERE,
    unit: Unit::Alu,
    together: Together::Thread,
    effect: Effect::Volatile,
    meaning: special,
    source: "PTX ISA, special registers",
};

/// Two floats rounded to a pair of 8-bit floats, saturating; `high` goes to the upper byte.
pub static CVT_E4M3: Inst = Inst {
    needs: Needs::from((8, 1), 89),
    ..pure(
        "cvt.fp8.f32",
        "cvt.rn.satfinite.{t}.f32 {d}, {high}, {low};",
        &[out("d", B16), arg("high", F32), arg("low", F32), word("t", &["e4m3x2", "e5m2x2"])],
        Unit::Convert,
        |m, op| {
            let number = if op.word(3) == "e4m3x2" { crate::Number::E4m3 } else { crate::Number::E5m2 };
            each(m, op, |x| {
                let byte = |bits: u64| u64::from(crate::model::to_fp8(f32::from_bits(bits as u32), number));
                byte(x[0]) << 8 | byte(x[1])
            });
        },
        CVT,
    )
};

/// A pair of f16 rounded to a pair of 8-bit floats, saturating.
pub static CVT_PAIR_E4M3: Inst = Inst {
    needs: Needs::from((8, 1), 89),
    ..pure(
        "cvt.fp8.pair",
        "cvt.rn.satfinite.{t}.f16x2 {d}, {a};",
        &[out("d", B16), reg("a", B32), word("t", &["e4m3x2", "e5m2x2"])],
        Unit::Convert,
        |m, op| {
            let number = if op.word(2) == "e4m3x2" { crate::Number::E4m3 } else { crate::Number::E5m2 };
            each(m, op, |x| {
                let byte = |bits: u64| u64::from(crate::model::to_fp8(f16::from_bits(bits as u16).to_f32(), number));
                byte(x[0] >> 16) << 8 | byte(x[0])
            });
        },
        CVT,
    )
};

/// A pair of 8-bit floats converted to a pair of f16, exactly.
pub static CVT_E4M3_PAIR: Inst = Inst {
    needs: Needs::from((8, 1), 89),
    ..pure(
        "cvt.pair.fp8",
        "cvt.rn.f16x2.{t} {d}, {a};",
        &[out("d", B32), reg("a", B16), word("t", &["e4m3x2", "e5m2x2"])],
        Unit::Convert,
        |m, op| {
            let number = if op.word(2) == "e4m3x2" { crate::Number::E4m3 } else { crate::Number::E5m2 };
            each(m, op, |x| {
                let half = |bits: u64| half_bits("f16", crate::model::from_fp8(bits as u8, number));
                half(x[0] >> 8) << 16 | half(x[0])
            });
        },
        CVT,
    )
};

/// A float rounded to the 19 bits that tensor cores read (tf32); ties go away from zero, or to even.
fn tf32(m: &mut dyn Machine, op: &Op, even: bool) {
    each(m, op, |x| {
        let bits = x[0] as u32;
        if f32::from_bits(bits).is_nan() {
            return 0x7fff_ffff;
        }
        let half = if even { 0xfff + (bits >> 13 & 1) } else { 0x1000 };
        u64::from((bits + half) & !0x1fff)
    });
}

/// A float rounded to tf32, ties away from zero.
pub static CVT_TF32: Inst = pure(
    "cvt.rna.tf32",
    "cvt.rna.tf32.f32 {d}, {a};",
    &[out("d", B32), arg("a", F32)],
    Unit::Convert,
    |m, op| tf32(m, op, false),
    CVT,
);

/// A float rounded to tf32, ties to even.
pub static CVT_TF32_EVEN: Inst = Inst {
    needs: Needs::HOPPER,
    ..pure(
        "cvt.rn.tf32",
        "cvt.rn.tf32.f32 {d}, {a};",
        &[out("d", B32), arg("a", F32)],
        Unit::Convert,
        |m, op| tf32(m, op, true),
        CVT,
    )
};

/// A 16-bit float converted to f32, exactly.
pub static CVT_WIDEN: Inst = Inst {
    needs: Needs::from((7, 1), 80),
    ..pure(
        "cvt.f32.half",
        "cvt.f32.{t} {d}, {a};",
        &[out("d", F32), reg("a", B16), word("t", HALVES)],
        Unit::Convert,
        |m, op| {
            let brain = op.word(2) == "bf16";
            each(m, op, |x| {
                let bits = x[0] as u16;
                let wide = if brain { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() };
                u64::from(wide.to_bits())
            });
        },
        CVT,
    )
};

/// d = the generic address of a parameter; used for tensor maps.
pub static PARAM_ADDRESS: Inst = Inst {
    needs: Needs::from((7, 7), 80),
    ..pure(
        "cvta.param",
        "{ .reg .b64 %generic; mov.b64 %generic, {p}; cvta.param.u64 {d}, %generic; }",
        &[out("d", B64), of("p", Kind::Param)],
        Unit::Alu,
        |m, op| {
            let Arg::Param(number) = op.args[1] else { panic!("bug in fulgurite: no parameter") };
            let address = m.parameter_address(number);
            each(m, op, |_| address);
        },
        "PTX ISA, data movement and conversion instructions, cvta",
    )
};
