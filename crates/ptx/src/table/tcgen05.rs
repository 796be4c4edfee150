//! Tensor memory and the products of one thread into it: `tcgen05`, on data-centre Blackwell.

use super::any;
use crate::inst::Class::{B16, B32, B64, F32, Pred};
use crate::inst::{
    Archs, Effect, Inst, Kind, Needs, Op, Operand, Space, Steps, Together, Unit, arg, args, at, number, of, outs, reg,
    steps, word,
};
use crate::machine::{Machine, MemoryAddress, WARP, address, lanes, value};
use crate::tcgen05::{CtaGroup, FenceSide, ProductKind, TensorAction, TensorLeft, TensorProduct};

const SOURCE: &str = "PTX ISA, tensor core generation 5 instructions, tcgen05";

/// Sizes of an allocation.
const ALLOCATED: &[Steps] =
    &[steps(32, 32, 1), steps(64, 64, 1), steps(128, 128, 1), steps(256, 256, 1), steps(512, 512, 1)];
/// Columns of a load or a store.
const MOVED: &[Steps] = &[
    steps(1, 1, 1),
    steps(2, 2, 1),
    steps(4, 4, 1),
    steps(8, 8, 1),
    steps(16, 16, 1),
    steps(32, 32, 1),
    steps(64, 64, 1),
    steps(128, 128, 1),
];

const fn row(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    together: Together,
    effect: Effect,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (needs, unit) = (Needs::TCGEN05, Unit::Tensor);
    Inst { name, text, operands, allowed: any, needs, unit, together, effect, meaning, source: SOURCE }
}

/// An address in tensor memory.
const fn tensor(name: &'static str) -> Operand {
    of(name, Kind::TensorAddress)
}

/// The CTAs to which an instruction belongs. ptxas refuses a kernel with both.
const GROUP: Operand = word("group", CtaGroup::WORDS);

/// The CTAs of a use whose operand `i` is [`GROUP`].
fn group(op: &Op, i: usize) -> CtaGroup {
    CtaGroup::named(op.word(i))
}

/// Performs an action once for the warp.
fn once(m: &mut dyn Machine, f: impl FnOnce(&mut dyn Machine, u32) -> TensorAction) {
    let lane = m.active().trailing_zeros();
    let action = f(m, lane);
    m.tensor(lane, action);
}

/// Allocates `n` columns and writes their address to shared memory.
pub static ALLOC: Inst = row(
    "tcgen05.alloc",
    "tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 {to}, {n};",
    &[at("to", Space::Shared), number("n", ALLOCATED), GROUP],
    Together::Warp,
    Effect::Start,
    |m, op| {
        once(m, |m, lane| {
            let to = MemoryAddress { space: Space::Shared, address: address(m, lane, op, 0) };
            TensorAction::Allocate { to, columns: op.number(1) as u32, group: group(op, 2) }
        });
    },
);

/// The CTA allocates no more.
pub static RELINQUISH: Inst = row(
    "tcgen05.relinquish",
    "tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;",
    &[GROUP],
    Together::Warp,
    Effect::Signal,
    |m, op| once(m, |_, _| TensorAction::Relinquish(group(op, 0))),
);

/// Frees `n` columns.
pub static DEALLOC: Inst = row(
    "tcgen05.dealloc",
    "tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 {from}, {n};",
    &[reg("from", B32), number("n", ALLOCATED), GROUP],
    Together::Warp,
    Effect::Signal,
    |m, op| {
        once(m, |m, lane| {
            let (address, columns) = (value(m, lane, op, 0) as u32, op.number(1) as u32);
            TensorAction::Free { address, columns, group: group(op, 2) }
        });
    },
);

/// The address that each lane gives.
fn addresses(m: &mut dyn Machine, op: &Op, i: usize) -> [u32; WARP as usize] {
    let mut all = [0; WARP as usize];
    lanes(m.active()).for_each(|lane| all[lane as usize] = address(m, lane, op, i) as u32);
    all
}

const fn load(name: &'static str, operands: &'static [Operand]) -> Inst {
    let meaning = |m: &mut dyn Machine, op: &Op| {
        let from = addresses(m, op, 1);
        m.tensor_load(&from, op.list(0));
    };
    Inst {
        allowed: |op| op.list(0).len() as u64 == op.number(2),
        ..row(
            name,
            "tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {d}, {from};",
            operands,
            Together::Warp,
            Effect::Start,
            meaning,
        )
    }
}

/// d = `n` columns of the warp's lanes, one lane to a thread.
pub static LD: Inst = load("tcgen05.ld", &[outs("d", F32), tensor("from"), number("n", MOVED)]);

/// d = `n` columns of the warp's lanes, one lane to a thread, for integers.
pub static LD_B32: Inst = load("tcgen05.ld.b32", &[outs("d", B32), tensor("from"), number("n", MOVED)]);

const fn store(name: &'static str, operands: &'static [Operand]) -> Inst {
    let meaning = |m: &mut dyn Machine, op: &Op| {
        let to = addresses(m, op, 0);
        m.tensor_store(&to, op.list(1));
    };
    Inst {
        allowed: |op| op.list(1).len() as u64 == op.number(2),
        ..row(
            name,
            "tcgen05.st.sync.aligned.32x32b.x{n}.b32 {to}, {x};",
            operands,
            Together::Warp,
            Effect::Start,
            meaning,
        )
    }
}

/// `n` columns of the warp's lanes = x, one lane from a thread.
pub static ST: Inst = store("tcgen05.st", &[tensor("to"), args("x", B32), number("n", MOVED)]);

/// `n` columns of the warp's lanes = x, one lane from a thread, for floats.
pub static ST_F32: Inst = store("tcgen05.st.f32", &[tensor("to"), args("x", F32), number("n", MOVED)]);

/// Waits until the thread's loads of tensor memory are complete.
pub static WAIT_LD: Inst =
    row("tcgen05.wait.ld", "tcgen05.wait::ld.sync.aligned;", &[], Together::Warp, Effect::Wait, |m, _| {
        once(m, |_, _| TensorAction::WaitLoads)
    });

/// Waits until the thread's stores to tensor memory are complete.
pub static WAIT_ST: Inst =
    row("tcgen05.wait.st", "tcgen05.wait::st.sync.aligned;", &[], Together::Warp, Effect::Wait, |m, _| {
        once(m, |_, _| TensorAction::WaitStores)
    });

/// Orders accesses to tensor memory with a synchronisation of threads that precedes or follows.
pub static FENCE: Inst = row(
    "tcgen05.fence",
    "tcgen05.fence::{side}_thread_sync;",
    &[word("side", &["before", "after"])],
    Together::Thread,
    Effect::Signal,
    |m, op| {
        let side = if op.word(0) == "before" { FenceSide::Before } else { FenceSide::After };
        once(m, |_, _| TensorAction::Fence(side));
    },
);

/// A product that one thread starts.
const fn multiply(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    row(name, text, operands, Together::Thread, Effect::Start, meaning)
}

/// The first operand of a use, by the place where it is.
type Left = fn(&mut dyn Machine, u32, &Op) -> TensorLeft;
/// A tile in shared memory.
const TILE: Left = |m, lane, op| TensorLeft::Tile(value(m, lane, op, 1));
/// Rows in tensor memory.
const MEMORY: Left = |m, lane, op| TensorLeft::Memory(address(m, lane, op, 1) as u32);

/// Kinds of products without scales that all targets have.
const KINDS: &[&str] = &[ProductKind::F16.word(), ProductKind::Tf32.word(), ProductKind::F8f6f4.word()];
/// Kinds of products with scales.
const SCALED: &[&str] = &[ProductKind::Mxf8f6f4.word(), ProductKind::Nvf4.word()];

/// The kind of product that a use names in operand `i`.
fn kind(op: &Op, i: usize) -> ProductKind {
    let known = ProductKind::ALL.into_iter().find(|kind| kind.word() == op.word(i));
    known.expect("bug in fulgurite: a row names a kind of product that is none")
}

/// Starts the product of each active lane; `left` reads the first operand.
fn start(m: &mut dyn Machine, op: &Op, left: Left, kind: ProductKind, scaled: bool) {
    for lane in lanes(m.active()) {
        let d = address(m, lane, op, 0) as u32;
        let (a, b) = (left(m, lane, op), value(m, lane, op, 2));
        let shape = value(m, lane, op, 3) as u32;
        let scales = scaled.then(|| [4, 5].map(|i| address(m, lane, op, i) as u32));
        let rest = if scaled { 6 } else { 4 };
        let (onto, group) = (value(m, lane, op, rest) == 1, group(op, rest + 1));
        m.tensor(lane, TensorAction::Multiply(TensorProduct { d, a, b, shape, kind, scales, onto, group }));
    }
}

/// D (+)= A B, both operands in shared memory.
pub static MMA_SS: Inst = multiply(
    "tcgen05.mma.ss",
    "tcgen05.mma.cta_group::{group}.kind::{kind} {d}, {a}, {b}, {shape}, {onto};",
    &[tensor("d"), reg("a", B64), reg("b", B64), reg("shape", B32), arg("onto", Pred), GROUP, word("kind", KINDS)],
    |m, op| start(m, op, TILE, kind(op, 6), false),
);

/// D (+)= A B, A in tensor memory.
pub static MMA_TS: Inst = multiply(
    "tcgen05.mma.ts",
    "tcgen05.mma.cta_group::{group}.kind::{kind} {d}, {a}, {b}, {shape}, {onto};",
    &[tensor("d"), tensor("a"), reg("b", B64), reg("shape", B32), arg("onto", Pred), GROUP, word("kind", KINDS)],
    |m, op| start(m, op, MEMORY, kind(op, 6), false),
);

/// Products of bytes exist on B200 and not on B300.
const BYTES: Needs = Needs { ptx: Needs::TCGEN05.ptx, archs: Archs::Only(&[100]) };

/// D (+)= A B with bytes, both operands in shared memory.
pub static MMA_I8_SS: Inst = Inst {
    needs: BYTES,
    ..multiply(
        "tcgen05.mma.i8.ss",
        "tcgen05.mma.cta_group::{group}.kind::i8 {d}, {a}, {b}, {shape}, {onto};",
        &[tensor("d"), reg("a", B64), reg("b", B64), reg("shape", B32), arg("onto", Pred), GROUP],
        |m, op| start(m, op, TILE, ProductKind::I8, false),
    )
};

/// D (+)= A B with bytes, A in tensor memory.
pub static MMA_I8_TS: Inst = Inst {
    needs: BYTES,
    ..multiply(
        "tcgen05.mma.i8.ts",
        "tcgen05.mma.cta_group::{group}.kind::i8 {d}, {a}, {b}, {shape}, {onto};",
        &[tensor("d"), tensor("a"), reg("b", B64), reg("shape", B32), arg("onto", Pred), GROUP],
        |m, op| start(m, op, MEMORY, ProductKind::I8, false),
    )
};

/// Names of block sizes are newer than the instruction.
const BLOCKS: Needs = Needs { ptx: (8, 8), ..Needs::TCGEN05 };

/// D (+)= A B with scales in tensor memory, both operands in shared memory.
pub static MMA_SCALED_SS: Inst = Inst {
    needs: BLOCKS,
    ..multiply(
        "tcgen05.mma.scaled.ss",
        "tcgen05.mma.cta_group::{group}.kind::{kind} {d}, {a}, {b}, {shape}, {sa}, {sb}, {onto};",
        &[
            tensor("d"),
            reg("a", B64),
            reg("b", B64),
            reg("shape", B32),
            tensor("sa"),
            tensor("sb"),
            arg("onto", Pred),
            GROUP,
            word("kind", SCALED),
        ],
        |m, op| start(m, op, TILE, kind(op, 8), true),
    )
};

/// D (+)= A B with scales in tensor memory, A in tensor memory.
pub static MMA_SCALED_TS: Inst = Inst {
    needs: BLOCKS,
    ..multiply(
        "tcgen05.mma.scaled.ts",
        "tcgen05.mma.cta_group::{group}.kind::{kind} {d}, {a}, {b}, {shape}, {sa}, {sb}, {onto};",
        &[
            tensor("d"),
            tensor("a"),
            reg("b", B64),
            reg("shape", B32),
            tensor("sa"),
            tensor("sb"),
            arg("onto", Pred),
            GROUP,
            word("kind", SCALED),
        ],
        |m, op| start(m, op, MEMORY, kind(op, 8), true),
    )
};

/// Copies a block of scales from shared memory into every quarter of the lanes.
pub static COPY_SCALES: Inst = row(
    "tcgen05.cp.scales",
    "tcgen05.cp.cta_group::{group}.32x128b.warpx4 {to}, {from};",
    &[tensor("to"), reg("from", B64), GROUP],
    Together::Thread,
    Effect::Start,
    |m, op| {
        for lane in lanes(m.active()) {
            let (to, from) = (address(m, lane, op, 0) as u32, value(m, lane, op, 1));
            m.tensor(lane, TensorAction::CopyScales { to, from, group: group(op, 2) });
        }
    },
);

fn commit(m: &mut dyn Machine, op: &Op, mask: Option<usize>, group: CtaGroup) {
    for lane in lanes(m.active()) {
        let bar = MemoryAddress { space: Space::Cluster, address: address(m, lane, op, 0) };
        let multicast = mask.map(|i| value(m, lane, op, i) as u16);
        m.tensor(lane, TensorAction::Commit { bar, multicast, group });
    }
}

/// Arrives at an mbarrier when all earlier products of the thread are complete.
pub static COMMIT: Inst = row(
    "tcgen05.commit",
    "tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 {bar};",
    &[at("bar", Space::Cluster), GROUP],
    Together::Thread,
    Effect::Signal,
    |m, op| commit(m, op, None, group(op, 1)),
);

/// Arrives at an mbarrier in several CTAs, at the same offset in each, when all earlier products of the thread are
/// complete.
pub static COMMIT_MULTICAST: Inst = row(
    "tcgen05.commit.multicast",
    "tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 {bar}, {mask};",
    &[at("bar", Space::Cluster), reg("mask", B16), GROUP],
    Together::Thread,
    Effect::Signal,
    |m, op| commit(m, op, Some(1), group(op, 2)),
);

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &ALLOC,
    &RELINQUISH,
    &DEALLOC,
    &LD,
    &LD_B32,
    &ST,
    &ST_F32,
    &WAIT_LD,
    &WAIT_ST,
    &FENCE,
    &MMA_SS,
    &MMA_TS,
    &MMA_I8_SS,
    &MMA_I8_TS,
    &MMA_SCALED_SS,
    &MMA_SCALED_TS,
    &COPY_SCALES,
    &COMMIT,
    &COMMIT_MULTICAST,
];
