//! Atomic operations: memory that is read, changed and written in one step.

use super::any;
use super::memory::{VECTOR, reading};
use super::sync::scope;
use crate::inst::Class::{B32, B64, F32};
use crate::inst::{Effect, Inst, Needs, Op, Operand, Space, arg, at, loaded, out, stored, word};
use crate::machine::{Machine, MemoryAddress, MemoryOrder, Scope, address, lanes, value};
use crate::model;

const RELAXED: MemoryOrder = MemoryOrder::Relaxed(Scope::Device);
/// Operations on 32-bit and 64-bit words.
const OPERATIONS: &[&str] = &[
    "add.u32", "exch.b32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32", "inc.u32",
    "dec.u32",
];
const REDUCTIONS: &[&str] =
    &["add.u32", "min.u32", "max.u32", "min.s32", "max.s32", "and.b32", "or.b32", "xor.b32", "inc.u32", "dec.u32"];
const WIDE: &[&str] =
    &["add.u64", "exch.b64", "min.u64", "max.u64", "min.s64", "max.s64", "and.b64", "or.b64", "xor.b64"];
const ORDERS: &[&str] = &["relaxed", "acquire", "release", "acq_rel"];
const SCOPES: &[&str] = &["cta", "gpu", "sys"];
const PAIRS: &[&str] = &["f16x2", "bf16x2"];

/// A row that updates memory atomically.
const fn updating(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    space: Space,
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    Inst { effect: Effect::Update(space), allowed: any, ..reading(name, text, operands, space, needs, meaning) }
}

fn order(word: &str, scope: Scope) -> MemoryOrder {
    match word {
        "acquire" => MemoryOrder::Acquire(scope),
        "release" => MemoryOrder::Release(scope),
        "acq_rel" => MemoryOrder::AcquireRelease(scope),
        _ => MemoryOrder::Relaxed(scope),
    }
}

/// The new value in memory after an operation such as "add.u32".
fn change(operation: &str, old: u64, x: u64) -> u64 {
    match operation.split_once('.') {
        Some(("exch", _)) => x,
        Some((way, number)) => model::combine(super::bulk::reduction(way), number, old, x),
        None => panic!("bug in fulgurite: an operation without a type"),
    }
}

/// Updates one element per lane. Operand `at` is the address and the next operand the value; `to`, if any, receives the
/// old value.
fn one(m: &mut dyn Machine, op: &Op, [to, at]: [Option<usize>; 2], space: Space, order: MemoryOrder, operation: &str) {
    let at = at.unwrap_or(0);
    let bytes = if operation.ends_with("64") { 8 } else { 4 };
    for lane in lanes(m.active()) {
        let (place, x) = (MemoryAddress { space, address: address(m, lane, op, at) }, value(m, lane, op, at + 1));
        let old = m.update(lane, place, order, bytes, &mut |old| change(operation, old, x));
        if let Some(to) = to {
            m.set(lane, op.reg(to), old);
        }
    }
}

/// Updates adjacent elements, each one atomically; `to` receives the old values.
fn several(m: &mut dyn Machine, op: &Op, to: Option<usize>, at: usize, operation: &str) {
    for lane in lanes(m.active()) {
        let start = address(m, lane, op, at);
        for (i, &reg) in op.list(at + 1).iter().enumerate() {
            let x = m.get(lane, reg);
            let place = MemoryAddress { space: Space::Global, address: start.wrapping_add(4 * i as u64) };
            let old = m.update(lane, place, RELAXED, 4, &mut |old| change(operation, old, x));
            if let Some(to) = to {
                m.set(lane, op.list(to)[i], old);
            }
        }
    }
}

/// The operation's name for an addition of pairs.
fn pair_addition(word: &str) -> &'static str {
    if word == "f16x2" { "add.f16x2" } else { "add.bf16x2" }
}

const TO: [Option<usize>; 2] = [Some(0), Some(1)];
const AWAY: [Option<usize>; 2] = [None, Some(0)];

/// d = old value of a word of global memory, which is combined with x.
pub static ATOM: Inst = updating(
    "atom.global",
    "atom.global.{o} {d}, {a}, {x};",
    &[out("d", B32), at("a", Space::Global), arg("x", B32), word("o", OPERATIONS)],
    Space::Global,
    Needs::AMPERE,
    |m, op| one(m, op, TO, Space::Global, RELAXED, op.word(3)),
);

/// d = old value of a word of global memory, which is combined with x; orders other memory accesses.
pub static ATOM_ORDERED: Inst = updating(
    "atom.global.ordered",
    "atom.{order}.{scope}.global.{o} {d}, {a}, {x};",
    &[
        out("d", B32),
        at("a", Space::Global),
        arg("x", B32),
        word("o", OPERATIONS),
        word("order", ORDERS),
        word("scope", SCOPES),
    ],
    Space::Global,
    Needs::AMPERE,
    |m, op| one(m, op, TO, Space::Global, order(op.word(4), scope(op.word(5))), op.word(3)),
);

/// d = old value of 64 bits of global memory, which are combined with x.
pub static ATOM_64: Inst = updating(
    "atom.global.64",
    "atom.global.{o} {d}, {a}, {x};",
    &[out("d", B64), at("a", Space::Global), arg("x", B64), word("o", WIDE)],
    Space::Global,
    Needs::AMPERE,
    |m, op| one(m, op, TO, Space::Global, RELAXED, op.word(3)),
);

/// d = old value of a word of shared memory, which is combined with x.
pub static ATOM_SHARED: Inst = updating(
    "atom.shared",
    "atom.shared.{o} {d}, {a}, {x};",
    &[out("d", B32), at("a", Space::Shared), arg("x", B32), word("o", OPERATIONS)],
    Space::Shared,
    Needs::AMPERE,
    |m, op| one(m, op, TO, Space::Shared, MemoryOrder::Relaxed(Scope::Cta), op.word(3)),
);

/// d = old value of a word, which becomes `new` if it was `old` (compare and swap).
pub static ATOM_CAS: Inst = updating(
    "atom.cas",
    "atom.{order}.gpu.global.cas.b32 {d}, {a}, {old}, {new};",
    &[out("d", B32), at("a", Space::Global), arg("old", B32), arg("new", B32), word("order", ORDERS)],
    Space::Global,
    Needs::AMPERE,
    |m, op| {
        for lane in lanes(m.active()) {
            let place = MemoryAddress { space: Space::Global, address: address(m, lane, op, 1) };
            let (want, new) = (value(m, lane, op, 2), value(m, lane, op, 3));
            let swap = &mut |old| if old == want & 0xffff_ffff { new & 0xffff_ffff } else { old };
            let old = m.update(lane, place, order(op.word(4), Scope::Device), 4, swap);
            m.set(lane, op.reg(0), old);
        }
    },
);

/// d = old float in global memory, to which x is added.
pub static ATOM_F32: Inst = updating(
    "atom.add.f32",
    "atom.global.add.f32 {d}, {a}, {x};",
    &[out("d", F32), at("a", Space::Global), arg("x", F32)],
    Space::Global,
    Needs::AMPERE,
    |m, op| one(m, op, TO, Space::Global, RELAXED, "add.f32"),
);

/// d = old floats in global memory, to which x are added, each one atomically.
pub static ATOM_F32_VECTOR: Inst = Inst {
    allowed: |op| op.counts(0, 3) && op.counts(2, 3),
    ..updating(
        "atom.add.f32.vector",
        "atom.global.add{v}.f32 {d}, {a}, {x};",
        &[loaded("d", F32), at("a", Space::Global), stored("x", F32), word("v", &[".v2", ".v4"])],
        Space::Global,
        Needs::from((8, 1), 90),
        |m, op| several(m, op, Some(0), 1, "add.f32"),
    )
};

/// d = old pairs in global memory, to which x are added, each one atomically.
pub static ATOM_PAIR: Inst = Inst {
    allowed: |op| op.counts(0, 3) && op.counts(2, 3),
    ..updating(
        "atom.add.pair",
        "atom.global.add.noftz{v}.{t} {d}, {a}, {x};",
        &[loaded("d", B32), at("a", Space::Global), stored("x", B32), word("v", VECTOR), word("t", PAIRS)],
        Space::Global,
        Needs::from((8, 1), 90),
        |m, op| several(m, op, Some(0), 1, pair_addition(op.word(4))),
    )
};

/// Combines a word of global memory with x.
pub static RED: Inst = updating(
    "red.global",
    "red.global.{o} {a}, {x};",
    &[at("a", Space::Global), arg("x", B32), word("o", REDUCTIONS)],
    Space::Global,
    Needs::AMPERE,
    |m, op| one(m, op, AWAY, Space::Global, RELAXED, op.word(2)),
);

/// Combines a word of shared memory with x.
pub static RED_SHARED: Inst = updating(
    "red.shared",
    "red.shared.{o} {a}, {x};",
    &[at("a", Space::Shared), arg("x", B32), word("o", REDUCTIONS)],
    Space::Shared,
    Needs::AMPERE,
    |m, op| one(m, op, AWAY, Space::Shared, MemoryOrder::Relaxed(Scope::Cta), op.word(2)),
);

/// Combines a word of shared memory of any CTA of the cluster with x.
pub static RED_CLUSTER: Inst = updating(
    "red.cluster",
    "red.relaxed.cluster.shared::cluster.{o} {a}, {x};",
    &[at("a", Space::Cluster), arg("x", B32), word("o", REDUCTIONS)],
    Space::Cluster,
    Needs::HOPPER,
    |m, op| one(m, op, AWAY, Space::Cluster, MemoryOrder::Relaxed(Scope::Cluster), op.word(2)),
);

/// Adds a float to global memory. Each addition rounds and flushes subnormals; the order of additions is undefined.
pub static RED_F32_ONE: Inst = updating(
    "red.add.f32.one",
    "red.global.add.f32 {a}, {x};",
    &[at("a", Space::Global), arg("x", F32)],
    Space::Global,
    Needs::AMPERE,
    |m, op| one(m, op, AWAY, Space::Global, RELAXED, "add.f32"),
);

/// Adds one, two or four adjacent floats to global memory. Each addition rounds and flushes subnormals.
pub static RED_F32: Inst = Inst {
    allowed: |op| op.counts(1, 2),
    ..updating(
        "red.add.f32",
        "red.global.add{v}.f32 {a}, {x};",
        &[at("a", Space::Global), stored("x", F32), word("v", VECTOR)],
        Space::Global,
        Needs::from((8, 1), 90),
        |m, op| several(m, op, None, 0, "add.f32"),
    )
};

/// Adds pairs of 16-bit floats to global memory; subnormals are kept.
pub static RED_PAIR: Inst = Inst {
    allowed: |op| op.counts(1, 2),
    ..updating(
        "red.add.pair",
        "red.global.add.noftz{v}.{t} {a}, {x};",
        &[at("a", Space::Global), stored("x", B32), word("v", VECTOR), word("t", PAIRS)],
        Space::Global,
        Needs::from((8, 1), 90),
        |m, op| several(m, op, None, 0, pair_addition(op.word(3))),
    )
};

/// Adds to a word of global memory with release order: earlier writes become visible first.
pub static RED_RELEASE: Inst = updating(
    "red.release.add",
    "red.release.gpu.global.add.u32 {a}, {x};",
    &[at("a", Space::Global), arg("x", B32)],
    Space::Global,
    Needs::AMPERE,
    |m, op| one(m, op, AWAY, Space::Global, MemoryOrder::Release(Scope::Device), "add.u32"),
);

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &ATOM,
    &ATOM_ORDERED,
    &ATOM_64,
    &ATOM_SHARED,
    &ATOM_CAS,
    &ATOM_F32,
    &ATOM_F32_VECTOR,
    &ATOM_PAIR,
    &RED,
    &RED_SHARED,
    &RED_CLUSTER,
    &RED_F32_ONE,
    &RED_F32,
    &RED_PAIR,
    &RED_RELEASE,
];
