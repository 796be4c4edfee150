//! Loads and stores, and the matrix accesses of shared memory.

use super::any;
use super::sync::scope;
use crate::inst::Class::{self, B16, B32, B64, F32};
use crate::inst::{
    Arg, Base, Effect, Inst, Needs, Op, Operand, Space, Together, Unit, arg, args, at, loaded, out, outs, reg, stored,
    word,
};
use crate::machine::{Machine, MemoryAddress, MemoryOrder, WARP, address, lanes, value};

const SOURCE: &str = "PTX ISA, data movement and conversion instructions";
/// One register, or two or four for adjacent memory.
pub(super) const VECTOR: &[&str] = &["", ".v2", ".v4"];
const PAIR: &[&str] = &["", ".v2"];
/// Memory scopes that every GPU has.
const SCOPES: &[&str] = &["cta", "gpu", "sys"];

const fn bytes(class: Class) -> u32 {
    match class {
        Class::Pred => 0,
        B16 => 2,
        B32 | F32 => 4,
        B64 => 8,
    }
}

/// Reads the registers of operand 0 from the address in operand 1.
pub(super) fn load(m: &mut dyn Machine, op: &Op, space: Space, order: MemoryOrder) {
    let size = bytes(op.list(0)[0].class) as usize;
    let mut data = vec![0; size * op.list(0).len()];
    for lane in lanes(m.active()) {
        let start = address(m, lane, op, 1);
        // A machine leaves what it cannot read as it is.
        data.fill(0);
        m.load(lane, MemoryAddress { space, address: start }, order, &mut data);
        for (&reg, part) in op.list(0).iter().zip(data.chunks_exact(size)) {
            let mut word = [0; 8];
            word[..size].copy_from_slice(part);
            m.set(lane, reg, u64::from_le_bytes(word));
        }
    }
}

/// Writes the registers of operand 1 to the address in operand 0.
pub(super) fn store(m: &mut dyn Machine, op: &Op, space: Space, order: MemoryOrder) {
    let size = bytes(op.list(1)[0].class) as usize;
    let mut data = Vec::with_capacity(size * op.list(1).len());
    for lane in lanes(m.active()) {
        let start = address(m, lane, op, 0);
        data.clear();
        for &reg in op.list(1) {
            data.extend_from_slice(&m.get(lane, reg).to_le_bytes()[..size]);
        }
        m.store(lane, MemoryAddress { space, address: start }, order, &data);
    }
}

const fn unit(space: Space) -> Unit {
    match space {
        Space::Shared => Unit::Shared,
        _ => Unit::Global,
    }
}
/// A row that reads memory.
pub(super) const fn reading(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    space: Space,
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (unit, together, effect) = (unit(space), Together::Thread, Effect::Read(space));
    Inst { name, text, operands, allowed: any, needs, unit, together, effect, meaning, source: SOURCE }
}
/// A row that writes memory.
pub(super) const fn writing(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    space: Space,
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    Inst { effect: Effect::Write(space), ..reading(name, text, operands, space, needs, meaning) }
}

/// A load and a store of one, two or four registers of a class.
macro_rules! access {
    ($($load:ident $store:ident $class:ident $vector:ident $space:ident $needs:expr, $ld:literal $st:literal $ld_text:literal $st_text:literal;)*) => {
        $(
            /// Reads one register, or two or four from adjacent memory.
            pub static $load: Inst = Inst { allowed: |op| op.counts(0, 2), ..reading($ld, $ld_text,
                &[loaded("d", $class), at("a", Space::$space), word("v", $vector)], Space::$space, $needs,
                |m, op| load(m, op, Space::$space, MemoryOrder::Weak)) };
            /// Writes one register, or two or four to adjacent memory.
            pub static $store: Inst = Inst { allowed: |op| op.counts(1, 2), ..writing($st, $st_text,
                &[at("a", Space::$space), stored("x", $class), word("v", $vector)], Space::$space, $needs,
                |m, op| store(m, op, Space::$space, MemoryOrder::Weak)) };
        )*
        /// Plain loads and stores.
        pub static ACCESS: &[&Inst] = &[$(&$load, &$store),*];
    };
}

access! {
    LD_GLOBAL_16 ST_GLOBAL_16 B16 VECTOR Global Needs::AMPERE,
        "ld.global.b16" "st.global.b16" "ld.global{v}.b16 {d}, {a};" "st.global{v}.b16 {a}, {x};";
    LD_GLOBAL_32 ST_GLOBAL_32 B32 VECTOR Global Needs::AMPERE,
        "ld.global.b32" "st.global.b32" "ld.global{v}.b32 {d}, {a};" "st.global{v}.b32 {a}, {x};";
    LD_GLOBAL_F32 ST_GLOBAL_F32 F32 VECTOR Global Needs::AMPERE,
        "ld.global.f32" "st.global.f32" "ld.global{v}.f32 {d}, {a};" "st.global{v}.f32 {a}, {x};";
    LD_SHARED_16 ST_SHARED_16 B16 VECTOR Shared Needs::AMPERE,
        "ld.shared.b16" "st.shared.b16" "ld.shared{v}.b16 {d}, {a};" "st.shared{v}.b16 {a}, {x};";
    LD_SHARED_32 ST_SHARED_32 B32 VECTOR Shared Needs::AMPERE,
        "ld.shared.b32" "st.shared.b32" "ld.shared{v}.b32 {d}, {a};" "st.shared{v}.b32 {a}, {x};";
    LD_SHARED_F32 ST_SHARED_F32 F32 VECTOR Shared Needs::AMPERE,
        "ld.shared.f32" "st.shared.f32" "ld.shared{v}.f32 {d}, {a};" "st.shared{v}.f32 {a}, {x};";
    LD_GLOBAL_64 ST_GLOBAL_64 B64 PAIR Global Needs::AMPERE,
        "ld.global.b64" "st.global.b64" "ld.global{v}.b64 {d}, {a};" "st.global{v}.b64 {a}, {x};";
    LD_SHARED_64 ST_SHARED_64 B64 PAIR Shared Needs::AMPERE,
        "ld.shared.b64" "st.shared.b64" "ld.shared{v}.b64 {d}, {a};" "st.shared{v}.b64 {a}, {x};";
    LD_CLUSTER_32 ST_CLUSTER_32 B32 VECTOR Cluster Needs::HOPPER,
        "ld.cluster.b32" "st.cluster.b32" "ld.shared::cluster{v}.b32 {d}, {a};" "st.shared::cluster{v}.b32 {a}, {x};";
    LD_CLUSTER_F32 ST_CLUSTER_F32 F32 VECTOR Cluster Needs::HOPPER,
        "ld.cluster.f32" "st.cluster.f32" "ld.shared::cluster{v}.f32 {d}, {a};" "st.shared::cluster{v}.f32 {a}, {x};";
}

/// Reads a byte, zero-extended or sign-extended.
pub static LD_GLOBAL_8: Inst = reading(
    "ld.global.b8",
    "ld.global.{t} {d}, {a};",
    &[out("d", B32), at("a", Space::Global), word("t", &["u8", "s8"])],
    Space::Global,
    Needs::AMPERE,
    |m, op| {
        for lane in lanes(m.active()) {
            let place = MemoryAddress { space: Space::Global, address: address(m, lane, op, 1) };
            let mut byte = [0];
            m.load(lane, place, MemoryOrder::Weak, &mut byte);
            let wide = if op.word(2) == "s8" { byte[0] as i8 as u32 } else { byte[0].into() };
            m.set(lane, op.reg(0), wide.into());
        }
    },
);
/// Writes the low byte of a register.
pub static ST_GLOBAL_8: Inst = writing(
    "st.global.b8",
    "st.global.b8 {a}, {x};",
    &[at("a", Space::Global), arg("x", B32)],
    Space::Global,
    Needs::AMPERE,
    |m, op| {
        for lane in lanes(m.active()) {
            let place = MemoryAddress { space: Space::Global, address: address(m, lane, op, 0) };
            let x = value(m, lane, op, 1);
            m.store(lane, place, MemoryOrder::Weak, &[x as u8]);
        }
    },
);

/// Reads a word that other threads may write concurrently, with relaxed order.
pub static LD_RELAXED: Inst = Inst {
    allowed: |op| op.list(0).len() == 1,
    ..reading(
        "ld.relaxed",
        "ld.relaxed.{scope}.global.b32 {d}, {a};",
        &[loaded("d", B32), at("a", Space::Global), word("scope", SCOPES)],
        Space::Global,
        Needs::AMPERE,
        |m, op| load(m, op, Space::Global, MemoryOrder::Relaxed(scope(op.word(2)))),
    )
};
/// Writes a word that other threads may read concurrently, with relaxed order.
pub static ST_RELAXED: Inst = Inst {
    allowed: |op| op.list(1).len() == 1,
    ..writing(
        "st.relaxed",
        "st.relaxed.{scope}.global.b32 {a}, {x};",
        &[at("a", Space::Global), stored("x", B32), word("scope", SCOPES)],
        Space::Global,
        Needs::AMPERE,
        |m, op| store(m, op, Space::Global, MemoryOrder::Relaxed(scope(op.word(2)))),
    )
};

/// Reads a word that other CTAs write, with acquire order: later accesses see their earlier writes.
pub static LD_ACQUIRE: Inst = Inst {
    allowed: |op| op.list(0).len() == 1,
    ..reading(
        "ld.acquire",
        "ld.acquire.{scope}.global.b32 {d}, {a};",
        &[loaded("d", B32), at("a", Space::Global), word("scope", SCOPES)],
        Space::Global,
        Needs::AMPERE,
        |m, op| load(m, op, Space::Global, MemoryOrder::Acquire(scope(op.word(2)))),
    )
};
/// Writes a word that other CTAs read, with release order: they see earlier writes.
pub static ST_RELEASE: Inst = Inst {
    allowed: |op| op.list(1).len() == 1,
    ..writing(
        "st.release",
        "st.release.{scope}.global.b32 {a}, {x};",
        &[at("a", Space::Global), stored("x", B32), word("scope", SCOPES)],
        Space::Global,
        Needs::AMPERE,
        |m, op| store(m, op, Space::Global, MemoryOrder::Release(scope(op.word(2)))),
    )
};

fn parameter(m: &mut dyn Machine, op: &Op) {
    let Arg::Address(Base::Param(number), offset) = op.args[1] else {
        panic!("bug in fulgurite: {} reads no parameter", op.inst.name)
    };
    let size = bytes(op.reg(0).class) as usize;
    let mut word = [0; 8];
    m.parameter(number, offset, &mut word[..size]);
    for lane in lanes(m.active()) {
        m.set(lane, op.reg(0), u64::from_le_bytes(word));
    }
}

/// d = a 32-bit parameter.
pub static LD_PARAM_32: Inst = Inst {
    effect: Effect::Pure,
    ..reading(
        "ld.param.b32",
        "ld.param.b32 {d}, {a};",
        &[out("d", B32), at("a", Space::Param)],
        Space::Param,
        Needs::AMPERE,
        parameter,
    )
};
/// d = a float parameter.
pub static LD_PARAM_F32: Inst = Inst {
    effect: Effect::Pure,
    ..reading(
        "ld.param.f32",
        "ld.param.f32 {d}, {a};",
        &[out("d", F32), at("a", Space::Param)],
        Space::Param,
        Needs::AMPERE,
        parameter,
    )
};
/// d = a 64-bit parameter.
pub static LD_PARAM_64: Inst = Inst {
    effect: Effect::Pure,
    ..reading(
        "ld.param.b64",
        "ld.param.b64 {d}, {a};",
        &[out("d", B64), at("a", Space::Param)],
        Space::Param,
        Needs::AMPERE,
        parameter,
    )
};

/// d = the corresponding shared-memory address in the CTA of this rank.
pub static MAPA: Inst = Inst {
    effect: Effect::Pure,
    unit: Unit::Alu,
    ..reading(
        "mapa",
        "mapa.shared::cluster.u32 {d}, {a}, {rank};",
        &[out("d", B32), arg("a", B32), arg("rank", B32)],
        Space::Cluster,
        Needs::HOPPER,
        |m, op| {
            for lane in lanes(m.active()) {
                let (a, rank) = (value(m, lane, op, 1) as u32, value(m, lane, op, 2) as u32);
                let there = u64::from(m.peer(a, rank));
                m.set(lane, op.reg(0), there);
            }
        },
    )
};

/// Register `j` of lane `l` holds the pair (row l / 4, columns 2 (l % 4) and the next) of matrix `j`. The rows of
/// matrix `j` are at the addresses of lanes 8j to 8j + 7. Transposed, rows and columns are swapped.
fn matrix_halves(lane: u32, matrix: u32, transposed: bool) -> [(u32, u64); 2] {
    [0, 1].map(|half| {
        let (row, col) = (lane / 4, 2 * (lane % 4) + half);
        let (row, col) = if transposed { (col, row) } else { (row, col) };
        (8 * matrix + row, u64::from(2 * col))
    })
}

/// Reads 8 x 8 matrices of 16-bit elements; each lane supplies the address of a row.
pub static LDMATRIX: Inst = Inst {
    together: Together::Warp,
    allowed: |op| op.counts(0, 2),
    ..reading(
        "ldmatrix",
        "ldmatrix.sync.aligned.m8n8.{x}{trans}.shared.b16 {d}, {a};",
        &[outs("d", B32), at("a", Space::Shared), word("x", &["x1", "x2", "x4"]), word("trans", &["", ".trans"])],
        Space::Shared,
        Needs::AMPERE,
        |m, op| {
            let transposed = op.word(3) == ".trans";
            let rows: Vec<u64> = (0..WARP).map(|lane| address(m, lane, op, 1)).collect();
            for (matrix, &reg) in op.list(0).iter().enumerate() {
                for lane in 0..WARP {
                    let mut pair = 0;
                    for (i, (row, offset)) in matrix_halves(lane, matrix as u32, transposed).into_iter().enumerate() {
                        let mut half = [0; 2];
                        let place =
                            MemoryAddress { space: Space::Shared, address: rows[row as usize].wrapping_add(offset) };
                        m.load(row, place, MemoryOrder::Weak, &mut half);
                        pair |= u64::from(u16::from_le_bytes(half)) << (16 * i);
                    }
                    m.set(lane, reg, pair);
                }
            }
        },
    )
};

/// Writes 8 x 8 matrices of 16-bit elements; each lane supplies the address of a row.
pub static STMATRIX: Inst = Inst {
    together: Together::Warp,
    allowed: |op| op.counts(1, 2),
    ..writing(
        "stmatrix",
        "stmatrix.sync.aligned.m8n8.{x}{trans}.shared.b16 {a}, {s};",
        &[at("a", Space::Shared), args("s", B32), word("x", &["x1", "x2", "x4"]), word("trans", &["", ".trans"])],
        Space::Shared,
        Needs::HOPPER,
        |m, op| {
            let transposed = op.word(3) == ".trans";
            let rows: Vec<u64> = (0..WARP).map(|lane| address(m, lane, op, 0)).collect();
            for (matrix, &reg) in op.list(1).iter().enumerate() {
                for lane in 0..WARP {
                    let pair = m.get(lane, reg);
                    for (i, (row, offset)) in matrix_halves(lane, matrix as u32, transposed).into_iter().enumerate() {
                        let place =
                            MemoryAddress { space: Space::Shared, address: rows[row as usize].wrapping_add(offset) };
                        m.store(row, place, MemoryOrder::Weak, &((pair >> (16 * i)) as u16).to_le_bytes());
                    }
                }
            }
        },
    )
};

/// Prefetches a tensor map.
pub static PREFETCH_MAP: Inst = Inst {
    effect: Effect::Pure,
    ..reading(
        "prefetch.tensormap",
        "prefetch.tensormap [{a}];",
        &[reg("a", B64)],
        Space::Global,
        Needs::HOPPER,
        |_, _| {},
    )
};

/// The rows of this family other than [`ACCESS`].
pub static OTHERS: &[&Inst] = &[
    &LD_ACQUIRE,
    &ST_RELEASE,
    &LD_PARAM_32,
    &LD_PARAM_F32,
    &LD_PARAM_64,
    &MAPA,
    &LD_GLOBAL_8,
    &ST_GLOBAL_8,
    &LD_RELAXED,
    &ST_RELAXED,
    &LDMATRIX,
    &STMATRIX,
    &PREFETCH_MAP,
];
