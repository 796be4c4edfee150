//! Asynchronous copies of contiguous bytes, by TMA and by `cp.async`, and words that arrive with a signal.

use super::bulk::{place, prefetch, reduction, start};
use crate::inst::Class::{B16, B32, B64};
use crate::inst::{Inst, Needs, Op, Space, Steps, Unit, arg, args, at, number, steps, word};
use crate::machine::{Done, Machine, Queue, Reduction, Transfer, lanes, value};

/// Parameters of a copy of contiguous bytes: destination and source space, reduction, and the operands that give its
/// size, its mbarrier and the receiving CTAs.
struct Run {
    to: Space,
    from: Space,
    reduce: Option<(Reduction, &'static str)>,
    barrier: Option<usize>,
    multicast: Option<usize>,
}

const LOAD: Run = Run { to: Space::Cluster, from: Space::Global, reduce: None, barrier: Some(3), multicast: None };
const STORE: Run = Run { to: Space::Global, from: Space::Shared, reduce: None, barrier: None, multicast: None };
const PEER: Run = Run { to: Space::Cluster, from: Space::Shared, reduce: None, barrier: Some(3), multicast: None };

/// Starts a copy of contiguous bytes. Operands 0 to 2 are destination, source and size in bytes.
fn run(m: &mut dyn Machine, op: &Op, run: Run) {
    for lane in lanes(m.active()) {
        let (to, from) = (place(m, lane, op, 0, run.to), place(m, lane, op, 1, run.from));
        let bytes = value(m, lane, op, 2) as u32;
        let done = match run.barrier {
            Some(i) => Done::Mbarrier(place(m, lane, op, i, Space::Cluster)),
            None => Done::Group(Queue::Bulk),
        };
        let multicast = run.multicast.map(|i| value(m, lane, op, i) as u16);
        m.transfer(lane, Transfer::Bytes { to, from, bytes, padded: bytes, reduce: run.reduce, multicast, done });
    }
}

/// The operation and element type of a word such as "add.noftz.f16".
fn reducing(word: &'static str) -> Option<(Reduction, &'static str)> {
    let (way, number) = word.split_once('.').expect("bug in fulgurite: a reduction without a type");
    Some((reduction(way), number.rsplit('.').next().unwrap_or(number)))
}

/// Copies bytes from global to shared memory; an mbarrier counts them. Sizes and addresses are multiples of 16.
pub static LOAD_BYTES: Inst = start(
    "cp.async.bulk.load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {to}, {from}, {bytes}, {bar};",
    &[at("to", Space::Cluster), at("from", Space::Global), arg("bytes", B32), at("bar", Space::Cluster)],
    Needs::HOPPER,
    |m, op| run(m, op, LOAD),
);

/// Copies bytes from global to shared memory, with an L2 cache hint.
pub static LOAD_BYTES_HINT: Inst = start(
    "cp.async.bulk.load.hint",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint {to}, {from}, {bytes}, {bar}, {policy};",
    &[
        at("to", Space::Cluster),
        at("from", Space::Global),
        arg("bytes", B32),
        at("bar", Space::Cluster),
        arg("policy", B64),
    ],
    Needs::HOPPER,
    |m, op| run(m, op, LOAD),
);

/// Copies bytes from global to shared memory of several CTAs of the cluster.
pub static LOAD_BYTES_MULTICAST: Inst = start(
    "cp.async.bulk.load.multicast",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster {to}, {from}, {bytes}, {bar}, {mask};",
    &[
        at("to", Space::Cluster),
        at("from", Space::Global),
        arg("bytes", B32),
        at("bar", Space::Cluster),
        arg("mask", B16),
    ],
    Needs::DATA_CENTER,
    |m, op| run(m, op, Run { multicast: Some(4), ..LOAD }),
);

/// Copies bytes from global to shared memory of several CTAs of the cluster, with an L2 cache hint.
pub static LOAD_BYTES_MULTICAST_HINT: Inst = start(
    "cp.async.bulk.load.multicast.hint",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint {to}, {from}, {bytes}, {bar}, {mask}, {policy};",
    &[
        at("to", Space::Cluster),
        at("from", Space::Global),
        arg("bytes", B32),
        at("bar", Space::Cluster),
        arg("mask", B16),
        arg("policy", B64),
    ],
    Needs::DATA_CENTER,
    |m, op| run(m, op, Run { multicast: Some(4), ..LOAD }),
);

/// Copies bytes from shared memory to another CTA of the cluster; an mbarrier there counts them.
pub static COPY_TO_PEER: Inst = start(
    "cp.async.bulk.peer",
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes {to}, {from}, {bytes}, {bar};",
    &[at("to", Space::Cluster), at("from", Space::Shared), arg("bytes", B32), at("bar", Space::Cluster)],
    Needs::HOPPER,
    |m, op| run(m, op, PEER),
);

/// Reduces integers into shared memory of another CTA of the cluster; an mbarrier there counts the bytes.
pub static REDUCE_TO_PEER: Inst = start(
    "cp.reduce.async.bulk.peer",
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{o} {to}, {from}, {bytes}, {bar};",
    &[
        at("to", Space::Cluster),
        at("from", Space::Shared),
        arg("bytes", B32),
        at("bar", Space::Cluster),
        word("o", PEER_REDUCTIONS),
    ],
    Needs::HOPPER,
    |m, op| run(m, op, Run { reduce: reducing(op.word(4)), ..PEER }),
);

const PEER_REDUCTIONS: &[&str] = &[
    "add.u32", "add.s32", "add.u64", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32",
    "inc.u32", "dec.u32",
];

/// Copies bytes from shared to global memory.
pub static STORE_BYTES: Inst = start(
    "cp.async.bulk.store",
    "cp.async.bulk.global.shared::cta.bulk_group {to}, {from}, {bytes};",
    &[at("to", Space::Global), at("from", Space::Shared), arg("bytes", B32)],
    Needs::HOPPER,
    |m, op| run(m, op, STORE),
);

/// Copies bytes from shared to global memory, with an L2 cache hint.
pub static STORE_BYTES_HINT: Inst = start(
    "cp.async.bulk.store.hint",
    "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint {to}, {from}, {bytes}, {policy};",
    &[at("to", Space::Global), at("from", Space::Shared), arg("bytes", B32), arg("policy", B64)],
    Needs::HOPPER,
    |m, op| run(m, op, STORE),
);

const REDUCTIONS: &[&str] = &[
    "add.f32",
    "add.u32",
    "add.s32",
    "add.u64",
    "add.noftz.f16",
    "add.noftz.bf16",
    "max.u32",
    "min.u32",
    "max.s32",
    "min.s32",
    "max.u64",
    "min.u64",
    "max.s64",
    "min.s64",
    "max.f16",
    "min.f16",
    "max.bf16",
    "min.bf16",
    "and.b32",
    "or.b32",
    "xor.b32",
    "and.b64",
    "or.b64",
    "xor.b64",
    "inc.u32",
    "dec.u32",
];

/// Reduces elements of shared memory into global memory, each one atomically.
pub static REDUCE_BYTES: Inst = start(
    "cp.reduce.async.bulk",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.{o} {to}, {from}, {bytes};",
    &[at("to", Space::Global), at("from", Space::Shared), arg("bytes", B32), word("o", REDUCTIONS)],
    Needs::HOPPER,
    |m, op| run(m, op, Run { reduce: reducing(op.word(3)), ..STORE }),
);

/// Reduces elements of shared memory into global memory, with an L2 cache hint.
pub static REDUCE_BYTES_HINT: Inst = start(
    "cp.reduce.async.bulk.hint",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.{o} {to}, {from}, {bytes}, {policy};",
    &[at("to", Space::Global), at("from", Space::Shared), arg("bytes", B32), word("o", REDUCTIONS), arg("policy", B64)],
    Needs::HOPPER,
    |m, op| run(m, op, Run { reduce: reducing(op.word(3)), ..STORE }),
);

/// Prefetches a run of bytes into the L2 cache.
pub static PREFETCH_BYTES: Inst = start(
    "cp.async.bulk.prefetch",
    "cp.async.bulk.prefetch.L2.global {from}, {bytes};",
    &[at("from", Space::Global), arg("bytes", B32)],
    Needs::HOPPER,
    prefetch,
);

fn copy(m: &mut dyn Machine, op: &Op) {
    for lane in lanes(m.active()) {
        let (to, from) = (place(m, lane, op, 0, Space::Shared), place(m, lane, op, 1, Space::Global));
        let (used, padded) = (value(m, lane, op, 2) as u32, op.number(3) as u32);
        let done = Done::Group(Queue::Copy);
        m.transfer(lane, Transfer::Bytes { to, from, bytes: used, padded, reduce: None, multicast: None, done });
    }
}

/// Sizes of one `cp.async`, in bytes.
const SIZES: &[Steps] = &[steps(4, 4, 1), steps(8, 16, 8)];
const CACHES: &[&str] = &["ca", "cg"];
/// Copies that bypass the L1 cache must have 16 bytes.
fn sized(op: &Op) -> bool {
    op.word(4) == "ca" || op.number(3) == 16
}

/// Copies `size` bytes from global to shared memory; `used` bytes are read, the rest is zero.
pub static COPY: Inst = Inst {
    unit: Unit::Global,
    allowed: sized,
    ..start(
        "cp.async",
        "cp.async.{cache}.shared.global {to}, {from}, {size}, {used};",
        &[
            at("to", Space::Shared),
            at("from", Space::Global),
            arg("used", B32),
            number("size", SIZES),
            word("cache", CACHES),
        ],
        Needs::AMPERE,
        copy,
    )
};

/// Copies `size` bytes from global to shared memory with an L2 cache hint; `used` bytes are read, the rest is zero.
pub static COPY_HINT: Inst = Inst {
    unit: Unit::Global,
    allowed: sized,
    ..start(
        "cp.async.hint",
        "cp.async.{cache}.shared.global.L2::cache_hint {to}, {from}, {size}, {used}, {policy};",
        &[
            at("to", Space::Shared),
            at("from", Space::Global),
            arg("used", B32),
            number("size", SIZES),
            word("cache", CACHES),
            arg("policy", B64),
        ],
        Needs::from((7, 4), 80),
        copy,
    )
};

/// Stores words to shared memory of another CTA of the cluster; an mbarrier there counts the bytes.
pub static STORE_WORDS: Inst = Inst {
    unit: Unit::Shared,
    allowed: |op| op.counts(1, 3),
    ..start(
        "st.async",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes{v}.b32 {to}, {x}, {bar};",
        &[at("to", Space::Cluster), args("x", B32), at("bar", Space::Cluster), word("v", &["", ".v2", ".v4"])],
        Needs::from((8, 1), 90),
        |m, op| {
            for lane in lanes(m.active()) {
                let mut data = Vec::new();
                for &reg in op.list(1) {
                    data.extend_from_slice(&(m.get(lane, reg) as u32).to_le_bytes());
                }
                let to = place(m, lane, op, 0, Space::Cluster);
                let done = Done::Mbarrier(place(m, lane, op, 2, Space::Cluster));
                m.transfer(lane, Transfer::Words { to, data, reduce: None, done });
            }
        },
    )
};

/// Reduces a word into shared memory of another CTA of the cluster; an mbarrier there counts the bytes.
pub static REDUCE_WORD: Inst = Inst {
    unit: Unit::Shared,
    ..start(
        "red.async",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{o} {to}, {x}, {bar};",
        &[
            at("to", Space::Cluster),
            arg("x", B32),
            at("bar", Space::Cluster),
            word(
                "o",
                &[
                    "add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32",
                    "inc.u32", "dec.u32",
                ],
            ),
        ],
        Needs::from((8, 1), 90),
        |m, op| {
            for lane in lanes(m.active()) {
                let data = (value(m, lane, op, 1) as u32).to_le_bytes().to_vec();
                let to = place(m, lane, op, 0, Space::Cluster);
                let done = Done::Mbarrier(place(m, lane, op, 2, Space::Cluster));
                m.transfer(lane, Transfer::Words { to, data, reduce: reducing(op.word(3)), done });
            }
        },
    )
};

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &LOAD_BYTES,
    &LOAD_BYTES_HINT,
    &LOAD_BYTES_MULTICAST,
    &LOAD_BYTES_MULTICAST_HINT,
    &COPY_TO_PEER,
    &REDUCE_TO_PEER,
    &STORE_BYTES,
    &STORE_BYTES_HINT,
    &REDUCE_BYTES,
    &REDUCE_BYTES_HINT,
    &PREFETCH_BYTES,
    &COPY,
    &COPY_HINT,
    &STORE_WORDS,
    &REDUCE_WORD,
];
