//! Products on the tensor cores: `wgmma` of a warpgroup, `mma` of a warp.

use crate::inst::Class::{B32, B64, F32, Pred};
use crate::inst::{
    Arg, Class, Effect, Inst, Kind, Needs, Op, Operand, Reg, Steps, Together, Unit, arg, args, both, number, of, outs,
    reg, steps, word,
};
use crate::machine::{Machine, WARP, value};
use crate::product::{Lanes, Left, Major, Number, Product};

const WGMMA: &str = "PTX ISA, asynchronous warpgroup-level matrix instructions";
const MMA: &str = "PTX ISA, warp-level matrix instructions, mma";

const HALVES: &[&str] = &["f16", "bf16"];
const BYTES: &[&str] = &["s8", "u8"];
const FLOATS_8: &[&str] = &["e4m3", "e5m2"];
/// Column counts of products of floats, and of bytes.
const COLUMNS: &[Steps] = &[steps(8, 256, 8)];
const INT_COLUMNS: &[Steps] = &[steps(8, 24, 8), steps(32, 256, 16)];
const BIT: &[Steps] = &[steps(0, 1, 1)];

/// A product of a warpgroup with 32-bit accumulators.
const fn wgmma(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (needs, unit, together, effect) = (Needs::HOPPER_ONLY, Unit::Tensor, Together::Warpgroup, Effect::Start);
    let allowed = |op: &Op| registers(op, 2);
    Inst { name, text, operands, allowed, needs, unit, together, effect, meaning, source: WGMMA }
}

/// Whether there is one accumulator register for each `per` columns, and four registers of A if A is in registers.
fn registers(op: &Op, per: usize) -> bool {
    let a = match &op.args[1] {
        Arg::List(regs) => regs.len() == 4,
        _ => true,
    };
    a && op.list(0).len() == op.number(4) as usize / per
}

/// Operand A: registers, or a tile in shared memory.
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

/// Starts a product. All forms begin with D, A, B, the flag to add to D, and the number of columns.
fn start(m: &mut dyn Machine, op: &Op, numbers: [Number; 3], majors: [Major; 2], saturate: bool) {
    let lane = m.active().trailing_zeros();
    let a = operand_a(m, op, majors[0]);
    let b = (value(m, lane, op, 2), majors[1]);
    let onto = value(m, lane, op, 3) == 1;
    let (n, negate) = (op.number(4) as u32, [false; 2]);
    m.product(Product { d: op.list(0).into(), a, b, n, numbers, onto, negate, saturate });
}

fn named(name: &str) -> Number {
    Number::named(name).expect("bug in fulgurite: an unknown element type")
}
fn major(bit: u64) -> Major {
    if bit == 1 { Major::Outer } else { Major::Inner }
}

/// D (+)= A B with 16-bit elements, both operands in shared memory.
pub static WGMMA_SS: Inst = wgmma(
    "wgmma.ss",
    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} {d}, {a}, {b}, {onto}, 1, 1, {ta}, {tb};",
    &[
        both("d", F32),
        reg("a", B64),
        reg("b", B64),
        arg("onto", Pred),
        number("n", COLUMNS),
        word("t", HALVES),
        number("ta", BIT),
        number("tb", BIT),
    ],
    |m, op| {
        let t = named(op.word(5));
        start(m, op, [Number::F32, t, t], [major(op.number(6)), major(op.number(7))], false);
    },
);

/// D (+)= A B with 16-bit elements, A in registers.
pub static WGMMA_RS: Inst = wgmma(
    "wgmma.rs",
    "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{t}.{t} {d}, {a}, {b}, {onto}, 1, 1, {tb};",
    &[
        both("d", F32),
        args("a", B32),
        reg("b", B64),
        arg("onto", Pred),
        number("n", COLUMNS),
        word("t", HALVES),
        number("tb", BIT),
    ],
    |m, op| {
        let t = named(op.word(5));
        start(m, op, [Number::F32, t, t], [Major::Inner, major(op.number(6))], false);
    },
);

/// D (+)= A B with f16 elements and f16 accumulators, two to a register, both operands in shared memory.
pub static WGMMA_F16_SS: Inst = Inst {
    allowed: |op| registers(op, 4),
    ..wgmma(
        "wgmma.f16.ss",
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f16.f16.f16 {d}, {a}, {b}, {onto}, 1, 1, {ta}, {tb};",
        &[
            both("d", B32),
            reg("a", B64),
            reg("b", B64),
            arg("onto", Pred),
            number("n", COLUMNS),
            number("ta", BIT),
            number("tb", BIT),
        ],
        |m, op| start(m, op, [Number::F16; 3], [major(op.number(5)), major(op.number(6))], false),
    )
};

/// D (+)= A B with f16 elements and f16 accumulators, two to a register, A in registers.
pub static WGMMA_F16_RS: Inst = Inst {
    allowed: |op| registers(op, 4),
    ..wgmma(
        "wgmma.f16.rs",
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f16.f16.f16 {d}, {a}, {b}, {onto}, 1, 1, {tb};",
        &[both("d", B32), args("a", B32), reg("b", B64), arg("onto", Pred), number("n", COLUMNS), number("tb", BIT)],
        |m, op| start(m, op, [Number::F16; 3], [Major::Inner, major(op.number(5))], false),
    )
};

/// D (+)= A B with tf32 elements; both operands contiguous along the summed dimension.
pub static WGMMA_TF32: Inst = wgmma(
    "wgmma.tf32",
    "wgmma.mma_async.sync.aligned.m64n{n}k8.f32.tf32.tf32 {d}, {a}, {b}, {onto}, 1, 1;",
    &[both("d", F32), left(B32), reg("b", B64), arg("onto", Pred), number("n", COLUMNS)],
    |m, op| start(m, op, [Number::F32, Number::Tf32, Number::Tf32], [Major::Inner; 2], false),
);

/// D (+)= A B with 8-bit floats.
pub static WGMMA_FP8: Inst = wgmma(
    "wgmma.fp8",
    "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{t}.{u} {d}, {a}, {b}, {onto}, 1, 1;",
    &[
        both("d", F32),
        left(B32),
        reg("b", B64),
        arg("onto", Pred),
        number("n", COLUMNS),
        word("t", FLOATS_8),
        word("u", FLOATS_8),
    ],
    |m, op| start(m, op, [Number::F32, named(op.word(5)), named(op.word(6))], [Major::Inner; 2], false),
);

/// D (+)= A B with 8-bit floats and f16 accumulators, two to a register.
pub static WGMMA_FP8_F16: Inst = Inst {
    allowed: |op| registers(op, 4),
    ..wgmma(
        "wgmma.fp8.f16",
        "wgmma.mma_async.sync.aligned.m64n{n}k32.f16.{t}.{u} {d}, {a}, {b}, {onto}, 1, 1;",
        &[
            both("d", B32),
            left(B32),
            reg("b", B64),
            arg("onto", Pred),
            number("n", COLUMNS),
            word("t", FLOATS_8),
            word("u", FLOATS_8),
        ],
        |m, op| start(m, op, [Number::F16, named(op.word(5)), named(op.word(6))], [Major::Inner; 2], false),
    )
};

/// D (+)= A B with bytes and 32-bit accumulators.
pub static WGMMA_INT8: Inst = wgmma(
    "wgmma.int8",
    "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.{t}.{t}{sat} {d}, {a}, {b}, {onto};",
    &[
        both("d", B32),
        left(B32),
        reg("b", B64),
        arg("onto", Pred),
        number("n", INT_COLUMNS),
        word("t", BYTES),
        word("sat", &["", ".satfinite"]),
    ],
    |m, op| {
        let t = named(op.word(5));
        start(m, op, [Number::S32, t, t], [Major::Inner; 2], op.word(6) == ".satfinite");
    },
);

/// D (+)= A B with one signed and one unsigned byte operand, such as weights from 0 to 255 times signed values.
pub static WGMMA_INT8_MIXED: Inst = Inst {
    needs: Needs { ptx: (8, 4), ..Needs::HOPPER_ONLY },
    ..wgmma(
        "wgmma.int8.mixed",
        "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.{t}{sat} {d}, {a}, {b}, {onto};",
        &[
            both("d", B32),
            left(B32),
            reg("b", B64),
            arg("onto", Pred),
            number("n", INT_COLUMNS),
            word("t", MIXED),
            word("sat", &["", ".satfinite"]),
        ],
        |m, op| {
            let [a, b] = mixed(op.word(5));
            start(m, op, [Number::S32, a, b], [Major::Inner; 2], op.word(6) == ".satfinite");
        },
    )
};

const MIXED: &[&str] = &["u8.s8", "s8.u8"];
fn mixed(word: &str) -> [Number; 2] {
    let (a, b) = word.split_once('.').expect("bug in fulgurite: two types are named");
    [named(a), named(b)]
}

/// A product of a warp, 16 x 8, with D, A, B and C in registers.
const fn mma(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let allowed = |op: &Op| [0, 1, 2, 3].map(|i| op.list(i).len()) == [4, 4, 2, 4];
    let (unit, together, effect) = (Unit::Tensor, Together::Warp, Effect::Pure);
    Inst { name, text, operands, allowed, needs, unit, together, effect, meaning, source: MMA }
}

/// D = A B + C of a warp, 16 x 8 x 16, with 16-bit elements.
pub static MMA_HALF: Inst = mma(
    "mma.half",
    "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {d}, {a}, {b}, {c};",
    &[outs("d", F32), args("a", B32), args("b", B32), args("c", F32), word("t", HALVES)],
    Needs::AMPERE,
    |m, op| {
        let t = named(op.word(4));
        multiply(m, op, [Number::F32, t, t]);
    },
);

/// D = A B + C of a warp, 16 x 8 x 16, with f16 elements and f16 accumulators, two to a register.
pub static MMA_F16: Inst = Inst {
    allowed: |op| [0, 1, 2, 3].map(|i| op.list(i).len()) == [2, 4, 2, 2],
    ..mma(
        "mma.f16",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {d}, {a}, {b}, {c};",
        &[outs("d", B32), args("a", B32), args("b", B32), args("c", B32)],
        Needs::AMPERE,
        |m, op| multiply(m, op, [Number::F16; 3]),
    )
};

/// D = A B + C of a warp, 16 x 8 x 8, with tf32 elements.
pub static MMA_TF32: Inst = mma(
    "mma.tf32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {d}, {a}, {b}, {c};",
    &[outs("d", F32), args("a", B32), args("b", B32), args("c", F32)],
    Needs::AMPERE,
    |m, op| multiply(m, op, [Number::F32, Number::Tf32, Number::Tf32]),
);

/// D = A B + C of a warp, 16 x 8 x 32, with 8-bit floats. Hopper converts them to f16 first.
pub static MMA_FP8: Inst = mma(
    "mma.fp8",
    "mma.sync.aligned.m16n8k32.row.col.f32.{t}.{u}.f32 {d}, {a}, {b}, {c};",
    &[outs("d", F32), args("a", B32), args("b", B32), args("c", F32), word("t", FLOATS_8), word("u", FLOATS_8)],
    Needs::from((8, 4), 89),
    |m, op| multiply(m, op, [Number::F32, named(op.word(4)), named(op.word(5))]),
);

/// D = A B + C of a warp, 16 x 8 x 32, with bytes.
pub static MMA_INT8: Inst = mma(
    "mma.int8",
    "mma.sync.aligned.m16n8k32.row.col.s32.{t}.{t}.s32 {d}, {a}, {b}, {c};",
    &[outs("d", B32), args("a", B32), args("b", B32), args("c", B32), word("t", BYTES)],
    Needs::AMPERE,
    |m, op| {
        let t = named(op.word(4));
        multiply(m, op, [Number::S32, t, t]);
    },
);

/// D = A B + C of a warp, 16 x 8 x 32, with one signed and one unsigned byte operand.
pub static MMA_INT8_MIXED: Inst = mma(
    "mma.int8.mixed",
    "mma.sync.aligned.m16n8k32.row.col.s32.{t}.s32 {d}, {a}, {b}, {c};",
    &[outs("d", B32), args("a", B32), args("b", B32), args("c", B32), word("t", MIXED)],
    Needs::AMPERE,
    |m, op| {
        let [a, b] = mixed(op.word(4));
        multiply(m, op, [Number::S32, a, b]);
    },
);

fn multiply(m: &mut dyn Machine, op: &Op, numbers: [Number; 3]) {
    let mut gather = |i: usize| -> Vec<Lanes> {
        let mut words = |reg: Reg| {
            let mut bits = [0; WARP as usize];
            m.get_all(reg, &mut bits);
            bits.map(|word| word as u32)
        };
        op.list(i).iter().map(|&reg| words(reg)).collect()
    };
    let (a, b, c) = (gather(1), gather(2), gather(3));
    let d = m.warp_product(numbers, [&a, &b, &c]);
    for (&reg, words) in op.list(0).iter().zip(d) {
        m.set_all(reg, &words.map(u64::from));
    }
}

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &WGMMA_SS,
    &WGMMA_RS,
    &WGMMA_F16_SS,
    &WGMMA_F16_RS,
    &WGMMA_TF32,
    &WGMMA_FP8,
    &WGMMA_FP8_F16,
    &WGMMA_INT8,
    &WGMMA_INT8_MIXED,
    &MMA_HALF,
    &MMA_F16,
    &MMA_TF32,
    &MMA_FP8,
    &MMA_INT8,
    &MMA_INT8_MIXED,
];
