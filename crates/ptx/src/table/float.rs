//! Arithmetic of 32-bit floats and of pairs of 16-bit floats.

use super::pure;
use crate::inst::Class::{B32, B64, F32};
use crate::inst::{Inst, Needs, Op, Operand, Unit, arg, out, reg, word};
use crate::machine::{Machine, each};
use crate::model;

const SOURCE: &str = "PTX ISA, floating-point instructions";
const HALF: &str = "PTX ISA, half-precision floating-point instructions";

fn unary(m: &mut dyn Machine, op: &Op, f: impl Fn(f32) -> f32) {
    each(m, op, |x| u64::from(f(f32::from_bits(x[0] as u32)).to_bits()));
}
fn binary(m: &mut dyn Machine, op: &Op, f: impl Fn(f32, f32) -> f32) {
    each(m, op, |x| u64::from(f(f32::from_bits(x[0] as u32), f32::from_bits(x[1] as u32)).to_bits()));
}

/// d = a + b, rounded to nearest.
pub static ADD: Inst = pure(
    "add.f32",
    "add.rn.f32 {d}, {a}, {b};",
    &[out("d", F32), arg("a", F32), arg("b", F32)],
    Unit::Fma,
    |m, op| binary(m, op, |a, b| a + b),
    SOURCE,
);

/// d = a + b, rounded down: the floor of a number appears in the low bits of a + 1.5 * 2^23.
pub static ADD_DOWN: Inst = pure(
    "add.rm.f32",
    "add.rm.f32 {d}, {a}, {b};",
    &[out("d", F32), arg("a", F32), arg("b", F32)],
    Unit::Fma,
    |m, op| binary(m, op, model::add_down),
    SOURCE,
);

/// d = a - b, rounded to nearest.
pub static SUB: Inst = pure(
    "sub.f32",
    "sub.rn.f32 {d}, {a}, {b};",
    &[out("d", F32), arg("a", F32), arg("b", F32)],
    Unit::Fma,
    |m, op| binary(m, op, |a, b| a - b),
    SOURCE,
);

/// d = a * b, rounded to nearest. With `.rn`, the assembler does not fuse it with a following addition.
pub static MUL: Inst = pure(
    "mul.f32",
    "mul.rn.f32 {d}, {a}, {b};",
    &[out("d", F32), arg("a", F32), arg("b", F32)],
    Unit::Fma,
    |m, op| binary(m, op, |a, b| a * b),
    SOURCE,
);

/// d = a * b + c, rounded once.
pub static FMA: Inst = pure(
    "fma.f32",
    "fma.rn.f32 {d}, {a}, {b}, {c};",
    &[out("d", F32), arg("a", F32), arg("b", F32), arg("c", F32)],
    Unit::Fma,
    |m, op| {
        each(m, op, |x| {
            let [a, b, c] = [x[0], x[1], x[2]].map(|bits| f32::from_bits(bits as u32));
            u64::from(a.mul_add(b, c).to_bits())
        });
    },
    SOURCE,
);

/// d = a / b, within two units in the last place.
pub static DIV: Inst = pure(
    "div.full.f32",
    "div.full.f32 {d}, {a}, {b};",
    &[out("d", F32), arg("a", F32), arg("b", F32)],
    Unit::Special,
    |m, op| binary(m, op, |a, b| a / b),
    SOURCE,
);

/// d = the larger of both; a NaN operand is ignored.
pub static MAX: Inst = pure(
    "max.f32",
    "max.f32 {d}, {a}, {b};",
    &[out("d", F32), arg("a", F32), arg("b", F32)],
    Unit::Alu,
    |m, op| binary(m, op, model::max),
    SOURCE,
);

/// d = the largest of three; a NaN operand is ignored.
pub static MAX3: Inst = Inst {
    needs: Needs { ptx: (8, 8), ..Needs::BLACKWELL },
    ..pure(
        "max3.f32",
        "max.f32 {d}, {a}, {b}, {c};",
        &[out("d", F32), arg("a", F32), arg("b", F32), arg("c", F32)],
        Unit::Alu,
        |m, op| {
            each(m, op, |x| {
                let [a, b, c] = [x[0], x[1], x[2]].map(|bits| f32::from_bits(bits as u32));
                u64::from(model::max(model::max(a, b), c).to_bits())
            });
        },
        SOURCE,
    )
};

/// Computes both floats of registers that hold two.
fn both(m: &mut dyn Machine, op: &Op, f: fn(&[f32]) -> f32) {
    each(m, op, |x| {
        let number = |shift: u32| {
            let numbers: Vec<f32> = x.iter().map(|&bits| f32::from_bits((bits >> shift) as u32)).collect();
            u64::from(f(&numbers).to_bits())
        };
        number(32) << 32 | number(0)
    });
}

/// An operation on registers that hold two floats.
const fn two_floats(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    Inst { needs: Needs::BLACKWELL, ..pure(name, text, operands, Unit::Fma, meaning, SOURCE) }
}

/// d = a + b for both floats.
pub static ADD_F32X2: Inst =
    two_floats("add.f32x2", "add.rn.f32x2 {d}, {a}, {b};", &[out("d", B64), reg("a", B64), reg("b", B64)], |m, op| {
        both(m, op, |x| x[0] + x[1])
    });

/// d = a * b for both floats. The assembler may fuse it with an addition that alone uses the result.
pub static MUL_F32X2: Inst =
    two_floats("mul.f32x2", "mul.rn.f32x2 {d}, {a}, {b};", &[out("d", B64), reg("a", B64), reg("b", B64)], |m, op| {
        both(m, op, |x| x[0] * x[1])
    });

/// d = a * b + c for both floats, each rounded once.
pub static FMA_F32X2: Inst = two_floats(
    "fma.f32x2",
    "fma.rn.f32x2 {d}, {a}, {b}, {c};",
    &[out("d", B64), reg("a", B64), reg("b", B64), reg("c", B64)],
    |m, op| both(m, op, |x| x[0].mul_add(x[1], x[2])),
);

/// d = the smaller of both; a NaN operand is ignored.
pub static MIN: Inst = pure(
    "min.f32",
    "min.f32 {d}, {a}, {b};",
    &[out("d", F32), arg("a", F32), arg("b", F32)],
    Unit::Alu,
    |m, op| binary(m, op, model::min),
    SOURCE,
);

/// d = -a.
pub static NEG: Inst = pure(
    "neg.f32",
    "neg.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Alu,
    |m, op| unary(m, op, |a| -a),
    SOURCE,
);

/// d = |a|.
pub static ABS: Inst = pure(
    "abs.f32",
    "abs.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Alu,
    |m, op| unary(m, op, f32::abs),
    SOURCE,
);

/// d = 2^a, within two units in the last place; subnormals flush to zero on the way in and out.
pub static EX2: Inst = pure(
    "ex2.f32",
    "ex2.approx.ftz.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Special,
    |m, op| unary(m, op, model::ex2),
    SOURCE,
);

/// d = log2(a), with an absolute error of 2^-22 near 1 and a relative one elsewhere; subnormals flush to zero.
pub static LG2: Inst = pure(
    "lg2.f32",
    "lg2.approx.ftz.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Special,
    |m, op| unary(m, op, model::lg2),
    SOURCE,
);

/// d = 1 / a, within one unit in the last place; subnormals flush to zero.
pub static RCP: Inst = pure(
    "rcp.f32",
    "rcp.approx.ftz.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Special,
    |m, op| unary(m, op, model::rcp),
    SOURCE,
);

/// d = 1 / sqrt(a), relative error 2^-22.9; subnormals flush to zero.
pub static RSQRT: Inst = pure(
    "rsqrt.f32",
    "rsqrt.approx.ftz.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Special,
    |m, op| unary(m, op, model::rsqrt),
    SOURCE,
);

/// d = sqrt(a), relative error 2^-23; subnormals flush to zero.
pub static SQRT: Inst = pure(
    "sqrt.f32",
    "sqrt.approx.ftz.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Special,
    |m, op| unary(m, op, model::sqrt),
    SOURCE,
);

/// d = tanh(a), relative error 2^-11.
pub static TANH: Inst = pure(
    "tanh.f32",
    "tanh.approx.f32 {d}, {a};",
    &[out("d", F32), arg("a", F32)],
    Unit::Special,
    |m, op| unary(m, op, f32::tanh),
    SOURCE,
);

const PAIRS: &[&str] = &["f16x2", "bf16x2"];

/// Computes both halves of a pair in f64 and rounds once.
fn pairs(m: &mut dyn Machine, op: &Op, t: usize, f: fn(&[f64]) -> f64) {
    let brain = op.word(t).ends_with("bf16x2");
    each(m, op, |x| {
        let half = |shift: u32| {
            let bits: Vec<u16> = x.iter().map(|&bits| (bits >> shift) as u16).collect();
            u64::from(model::on_half(brain, &bits, &f))
        };
        half(16) << 16 | half(0)
    });
}

/// d = a * b + c for both halves, each rounded once.
pub static FMA_PAIR: Inst = pure(
    "fma.pair",
    "fma.rn.{t} {d}, {a}, {b}, {c};",
    &[out("d", B32), reg("a", B32), reg("b", B32), reg("c", B32), word("t", PAIRS)],
    Unit::Fma,
    |m, op| pairs(m, op, 4, |x| x[0] * x[1] + x[2]),
    HALF,
);

/// d = a + b for both halves.
pub static ADD_PAIR: Inst = Inst {
    needs: Needs::HOPPER,
    ..pure(
        "add.pair",
        "add.rn.{t} {d}, {a}, {b};",
        &[out("d", B32), reg("a", B32), reg("b", B32), word("t", PAIRS)],
        Unit::Fma,
        |m, op| pairs(m, op, 3, |x| x[0] + x[1]),
        HALF,
    )
};

/// d = a * b for both halves.
pub static MUL_PAIR: Inst = Inst {
    needs: Needs::HOPPER,
    ..pure(
        "mul.pair",
        "mul.rn.{t} {d}, {a}, {b};",
        &[out("d", B32), reg("a", B32), reg("b", B32), word("t", PAIRS)],
        Unit::Fma,
        |m, op| pairs(m, op, 3, |x| x[0] * x[1]),
        HALF,
    )
};

/// d = a - b for both halves.
pub static SUB_PAIR: Inst = Inst {
    needs: Needs::HOPPER,
    ..pure(
        "sub.pair",
        "sub.rn.{t} {d}, {a}, {b};",
        &[out("d", B32), reg("a", B32), reg("b", B32), word("t", PAIRS)],
        Unit::Fma,
        |m, op| pairs(m, op, 3, |x| x[0] - x[1]),
        HALF,
    )
};

/// d = the larger of both, for each half; a NaN operand is ignored.
pub static MAX_PAIR: Inst = pure(
    "max.pair",
    "max.{t} {d}, {a}, {b};",
    &[out("d", B32), reg("a", B32), reg("b", B32), word("t", PAIRS)],
    Unit::Alu,
    |m, op| pairs(m, op, 3, |x| f64::from(model::max(x[0] as f32, x[1] as f32))),
    HALF,
);

/// d = the smaller of both, for each half; a NaN operand is ignored.
pub static MIN_PAIR: Inst = pure(
    "min.pair",
    "min.{t} {d}, {a}, {b};",
    &[out("d", B32), reg("a", B32), reg("b", B32), word("t", PAIRS)],
    Unit::Alu,
    |m, op| pairs(m, op, 3, |x| f64::from(model::min(x[0] as f32, x[1] as f32))),
    HALF,
);

/// d = 2^a for both halves: relative error 2^-9.9 for f16, 2^-7 for bf16. Subnormals of bf16 flush to zero.
pub static EX2_PAIR: Inst = Inst {
    needs: Needs::HOPPER,
    ..pure(
        "ex2.pair",
        "ex2.approx.{t} {d}, {a};",
        &[out("d", B32), reg("a", B32), word("t", &["f16x2", "ftz.bf16x2"])],
        Unit::Special,
        |m, op| match op.word(2) {
            "f16x2" => pairs(m, op, 2, |x| x[0].exp2()),
            _ => pairs(m, op, 2, |x| f64::from(model::ex2(x[0] as f32))),
        },
        HALF,
    )
};

/// d = tanh(a) for both halves: absolute error 2^-10.987 for f16, 2^-8 for bf16.
pub static TANH_PAIR: Inst = Inst {
    needs: Needs::HOPPER,
    ..pure(
        "tanh.pair",
        "tanh.approx.{t} {d}, {a};",
        &[out("d", B32), reg("a", B32), word("t", PAIRS)],
        Unit::Special,
        |m, op| pairs(m, op, 2, |x| x[0].tanh()),
        HALF,
    )
};

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &ADD, &ADD_DOWN, &SUB, &MUL, &FMA, &DIV, &MAX, &MAX3, &ADD_F32X2, &MUL_F32X2, &FMA_F32X2, &MIN, &NEG, &ABS, &EX2,
    &LG2, &RCP, &RSQRT, &SQRT, &TANH, &FMA_PAIR, &ADD_PAIR, &MUL_PAIR, &SUB_PAIR, &MAX_PAIR, &MIN_PAIR, &EX2_PAIR,
    &TANH_PAIR,
];
