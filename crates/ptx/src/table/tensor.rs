//! Products on the tensor cores: `wgmma` of a warpgroup, `mma` of a warp.

use crate::inst::Class::{B32, B64, F32, Pred};
use crate::inst::{
    Arg, Class, Effect, Inst, Kind, Needs, Op, Operand, Together, Unit, arg, args, both, number, of, outs, word,
};
use crate::machine::{Machine, lanes, value};
use crate::product::{Left, Major, Number, Product, mma_sync};

const WGMMA: &str = "PTX ISA, asynchronous warpgroup-level matrix instructions";
const MMA: &str = "PTX ISA, warp-level matrix instructions, mma";

const fn wgmma(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (needs, unit, together) = (Needs::HOPPER_ONLY, Unit::Tensor, Together::Warpgroup);
    Inst { name, text, operands, needs, unit, together, effect: Effect::Start, meaning, source: WGMMA }
}

/// Operands that all forms share: D, A, B, whether D is added to, N.
const fn left(class: Class) -> Operand {
    of("a", Kind::ListOrTile(class))
}

fn operand_a(m: &mut dyn Machine, op: &Op, major: Major) -> Left {
    match &op.args[1] {
        Arg::List(regs) => Left::Regs(regs.clone()),
        _ => {
            let lane = m.active().trailing_zeros();
            Left::Tile(value(m, lane, op, 1), major)
        }
    }
}

fn start(m: &mut dyn Machine, op: &Op, numbers: [Number; 3], majors: [Major; 2], negate: [bool; 2], saturate: bool) {
    let lane = m.active().trailing_zeros();
    let a = operand_a(m, op, majors[0]);
    let b = (value(m, lane, op, 2), majors[1]);
    let onto = value(m, lane, op, 3) == 1;
    let what = Product { d: op.list(0).into(), a, b, n: op.number(4) as u32, numbers, onto, negate, saturate };
    m.product(what);
}

fn named(name: &str) -> Number {
    Number::named(name).expect("bug in fulgurite: an unknown element type")
}
fn major(bit: u64) -> Major {
    if bit == 1 { Major::Outer } else { Major::Inner }
}

const HALVES: &[&str] = &["f16", "bf16"];

/// D (+)= A B with 16-bit elements, both operands in shared memory.
pub static WGMMA_SS: Inst = wgmma(
    "wgmma.ss",
    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} {d}, {a}, {b}, {onto}, 1, 1, {ta}, {tb};",
    &[
        both("d", F32),
        arg("a", B64),
        arg("b", B64),
        arg("onto", Pred),
        number("n"),
        word("t", HALVES),
        number("ta"),
        number("tb"),
    ],
    |m, op| {
        let t = named(op.word(5));
        start(m, op, [Number::F32, t, t], [major(op.number(6)), major(op.number(7))], [false; 2], false);
    },
);

/// D (+)= A B with 16-bit elements, A in registers.
pub static WGMMA_RS: Inst = wgmma(
    "wgmma.rs",
    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} {d}, {a}, {b}, {onto}, 1, 1, {tb};",
    &[both("d", F32), args("a", B32), arg("b", B64), arg("onto", Pred), number("n"), word("t", HALVES), number("tb")],
    |m, op| {
        let t = named(op.word(5));
        start(m, op, [Number::F32, t, t], [Major::Inner, major(op.number(6))], [false; 2], false);
    },
);

/// D (+)= A B with tf32 elements; both operands contiguous along the summed dimension.
pub static WGMMA_TF32: Inst = wgmma(
    "wgmma.tf32",
    "wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 {d}, {a}, {b}, {onto}, 1, 1;",
    &[both("d", F32), left(B32), arg("b", B64), arg("onto", Pred), number("n")],
    |m, op| start(m, op, [Number::F32, Number::Tf32, Number::Tf32], [Major::Inner; 2], [false; 2], false),
);

/// D (+)= A B with 8-bit floats.
pub static WGMMA_FP8: Inst = wgmma(
    "wgmma.fp8",
    "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{t}.{u} {d}, {a}, {b}, {onto}, 1, 1;",
    &[
        both("d", F32),
        left(B32),
        arg("b", B64),
        arg("onto", Pred),
        number("n"),
        word("t", &["e4m3", "e5m2"]),
        word("u", &["e4m3", "e5m2"]),
    ],
    |m, op| {
        let numbers = [Number::F32, named(op.word(5)), named(op.word(6))];
        start(m, op, numbers, [Major::Inner; 2], [false; 2], false);
    },
);

/// D (+)= A B with bytes, summed in 32 bits.
pub static WGMMA_INT8: Inst = wgmma(
    "wgmma.int8",
    "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.{t}.{t}{sat} {d}, {a}, {b}, {onto};",
    &[
        both("d", B32),
        left(B32),
        arg("b", B64),
        arg("onto", Pred),
        number("n"),
        word("t", &["s8", "u8"]),
        word("sat", &["", ".satfinite"]),
    ],
    |m, op| {
        let t = named(op.word(5));
        start(m, op, [Number::S32, t, t], [Major::Inner; 2], [false; 2], op.word(6) == ".satfinite");
    },
);

/// D = A B + C of a warp, 16 x 8 x 16, with 16-bit elements.
pub static MMA_HALF: Inst = Inst {
    name: "mma.half",
    text: "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {d}, {a}, {b}, {c};",
    operands: &[outs("d", F32), args("a", B32), args("b", B32), args("c", F32), word("t", HALVES)],
    needs: Needs::AMPERE,
    unit: Unit::Tensor,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| mma(m, op, named(op.word(4))),
    source: MMA,
};

/// D = A B + C of a warp, 16 x 8 x 8, with tf32 elements.
pub static MMA_TF32: Inst = Inst {
    name: "mma.tf32",
    text: "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {d}, {a}, {b}, {c};",
    operands: &[outs("d", F32), args("a", B32), args("b", B32), args("c", F32)],
    needs: Needs::AMPERE,
    unit: Unit::Tensor,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| mma(m, op, Number::Tf32),
    source: MMA,
};

/// D = A B + C of a warp, 16 x 8 x 32, with bytes.
pub static MMA_INT8: Inst = Inst {
    name: "mma.int8",
    text: "mma.sync.aligned.m16n8k32.row.col.s32.{t}.{t}.s32 {d}, {a}, {b}, {c};",
    operands: &[outs("d", B32), args("a", B32), args("b", B32), args("c", B32), word("t", &["s8", "u8"])],
    needs: Needs::AMPERE,
    unit: Unit::Tensor,
    together: Together::Warp,
    effect: Effect::Pure,
    meaning: |m, op| mma(m, op, named(op.word(4))),
    source: MMA,
};

fn mma(m: &mut dyn Machine, op: &Op, number: Number) {
    let mut gather = |i: usize| -> Vec<Vec<u32>> {
        lanes(u32::MAX).map(|lane| op.list(i).iter().map(|&reg| m.get(lane, reg) as u32).collect()).collect()
    };
    let (a, b, c) = (gather(1), gather(2), gather(3));
    for (lane, d) in mma_sync(number, &a, &b, &c).into_iter().enumerate() {
        for (&reg, x) in op.list(0).iter().zip(d) {
            m.set(lane as u32, reg, u64::from(x));
        }
    }
}

/// The rows of this family.
pub static ROWS: &[&Inst] =
    &[&WGMMA_SS, &WGMMA_RS, &WGMMA_TF32, &WGMMA_FP8, &WGMMA_INT8, &MMA_HALF, &MMA_TF32, &MMA_INT8];
