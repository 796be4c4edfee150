//! Copies that happen later: the copy engine's boxes and runs of bytes, and `cp.async`.

use crate::inst::Class::{B16, B32, B64};
use crate::inst::{Effect, Inst, Needs, Op, Operand, Space, Together, Unit, arg, args, at, number, word};
use crate::machine::{Done, Machine, Place, Queue, Reduction, Transfer, address, lanes, value};

const SOURCE: &str = "PTX ISA, data movement and conversion instructions, asynchronous copy";
const RANKS: &[&str] = &["1d", "2d", "3d", "4d", "5d"];

const fn start(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (unit, together, effect) = (Unit::Copy, Together::Thread, Effect::Start);
    Inst { name, text, operands, needs, unit, together, effect, meaning, source: SOURCE }
}

fn reduction(word: &str) -> Reduction {
    match word {
        "add" => Reduction::Add,
        "min" => Reduction::Min,
        "max" => Reduction::Max,
        "and" => Reduction::And,
        "or" => Reduction::Or,
        "xor" => Reduction::Xor,
        "inc" => Reduction::Inc,
        _ => Reduction::Dec,
    }
}

fn coordinates(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> Vec<i32> {
    op.list(i).iter().map(|&reg| m.get(lane, reg) as u32 as i32).collect()
}
fn shared(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> Place {
    Place { space: Space::Shared, address: address(m, lane, op, i) }
}
fn cluster(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> Place {
    Place { space: Space::Cluster, address: address(m, lane, op, i) }
}
fn global(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> Place {
    Place { space: Space::Global, address: address(m, lane, op, i) }
}

fn load_box(m: &mut dyn Machine, op: &Op, mask: Option<usize>) {
    for lane in lanes(m.active()) {
        let what = Transfer::Box {
            tile: cluster(m, lane, op, 0),
            map: value(m, lane, op, 1),
            coordinates: coordinates(m, lane, op, 2),
            inward: true,
            reduce: None,
            multicast: mask.map(|i| value(m, lane, op, i) as u16),
            done: Done::Mbarrier(cluster(m, lane, op, 3)),
        };
        m.transfer(lane, what);
    }
}

/// A box of a tensor into shared memory; its bytes are counted on a barrier.
pub static LOAD_BOX: Inst = start(
    "cp.async.bulk.tensor.load",
    "cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes {tile}, [{map}, {at}], {bar};",
    &[at("tile", Space::Cluster), arg("map", B64), args("at", B32), at("bar", Space::Cluster), word("rank", RANKS)],
    Needs::HOPPER,
    |m, op| load_box(m, op, None),
);

/// The same, with a hint to the second-level cache.
pub static LOAD_BOX_HINT: Inst = start(
    "cp.async.bulk.tensor.load.hint",
    "cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint {tile}, [{map}, {at}], {bar}, {policy};",
    &[
        at("tile", Space::Cluster),
        arg("map", B64),
        args("at", B32),
        at("bar", Space::Cluster),
        word("rank", RANKS),
        arg("policy", B64),
    ],
    Needs::HOPPER,
    |m, op| load_box(m, op, None),
);

/// A box of a tensor into several blocks of the cluster, at the same place in each, counted on each one's barrier.
pub static LOAD_BOX_MULTICAST: Inst = start(
    "cp.async.bulk.tensor.load.multicast",
    "cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster {tile}, [{map}, {at}], {bar}, {mask};",
    &[
        at("tile", Space::Cluster),
        arg("map", B64),
        args("at", B32),
        at("bar", Space::Cluster),
        arg("mask", B16),
        word("rank", RANKS),
    ],
    Needs::HOPPER_ONLY,
    |m, op| load_box(m, op, Some(4)),
);

fn store_box(m: &mut dyn Machine, op: &Op, reduce: Option<Reduction>) {
    for lane in lanes(m.active()) {
        let what = Transfer::Box {
            map: value(m, lane, op, 0),
            coordinates: coordinates(m, lane, op, 1),
            tile: shared(m, lane, op, 2),
            inward: false,
            reduce,
            multicast: None,
            done: Done::Group(Queue::Bulk),
        };
        m.transfer(lane, what);
    }
}

/// A tile of shared memory to a box of a tensor.
pub static STORE_BOX: Inst = start(
    "cp.async.bulk.tensor.store",
    "cp.async.bulk.tensor.{rank}.global.shared::cta.tile.bulk_group [{map}, {at}], {tile};",
    &[arg("map", B64), args("at", B32), at("tile", Space::Shared), word("rank", RANKS)],
    Needs::HOPPER,
    |m, op| store_box(m, op, None),
);

/// A tile of shared memory combined with a box of a tensor.
pub static REDUCE_BOX: Inst = start(
    "cp.reduce.async.bulk.tensor",
    "cp.reduce.async.bulk.tensor.{rank}.global.shared::cta.{o}.tile.bulk_group [{map}, {at}], {tile};",
    &[
        arg("map", B64),
        args("at", B32),
        at("tile", Space::Shared),
        word("rank", RANKS),
        word("o", &["add", "min", "max", "and", "or", "xor", "inc", "dec"]),
    ],
    Needs::HOPPER,
    |m, op| store_box(m, op, Some(reduction(op.word(4)))),
);

/// A hint to bring a box into the second-level cache.
pub static PREFETCH_BOX: Inst = start(
    "cp.async.bulk.prefetch.tensor",
    "cp.async.bulk.prefetch.tensor.{rank}.L2.global.tile [{map}, {at}];",
    &[arg("map", B64), args("at", B32), word("rank", RANKS)],
    Needs::HOPPER,
    |m, _| {
        for lane in lanes(m.active()) {
            m.transfer(lane, Transfer::Prefetch);
        }
    },
);

fn bytes(to: Place, from: Place, bytes: u32, done: Done) -> Transfer {
    Transfer::Bytes { to, from, bytes, padded: bytes, reduce: None, multicast: None, done }
}

/// A run of bytes from global into shared memory, counted on a barrier; sizes and addresses are multiples of 16.
pub static LOAD_BYTES: Inst = start(
    "cp.async.bulk.load",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {to}, {from}, {bytes}, {bar};",
    &[at("to", Space::Cluster), at("from", Space::Global), arg("bytes", B32), at("bar", Space::Cluster)],
    Needs::HOPPER,
    |m, op| {
        for lane in lanes(m.active()) {
            let (to, from, bar) = (cluster(m, lane, op, 0), global(m, lane, op, 1), cluster(m, lane, op, 3));
            let n = value(m, lane, op, 2) as u32;
            m.transfer(lane, bytes(to, from, n, Done::Mbarrier(bar)));
        }
    },
);

/// The same into several blocks of the cluster.
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
    Needs::HOPPER_ONLY,
    |m, op| {
        for lane in lanes(m.active()) {
            let (to, from, bar) = (cluster(m, lane, op, 0), global(m, lane, op, 1), cluster(m, lane, op, 3));
            let (n, mask) = (value(m, lane, op, 2) as u32, value(m, lane, op, 4) as u16);
            let done = Done::Mbarrier(bar);
            m.transfer(
                lane,
                Transfer::Bytes { to, from, bytes: n, padded: n, reduce: None, multicast: Some(mask), done },
            );
        }
    },
);

/// A run of bytes from shared memory to another block of the cluster, counted on a barrier there.
pub static COPY_TO_PEER: Inst = start(
    "cp.async.bulk.peer",
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes {to}, {from}, {bytes}, {bar};",
    &[at("to", Space::Cluster), at("from", Space::Shared), arg("bytes", B32), at("bar", Space::Cluster)],
    Needs::HOPPER,
    |m, op| {
        for lane in lanes(m.active()) {
            let (to, from, bar) = (cluster(m, lane, op, 0), shared(m, lane, op, 1), cluster(m, lane, op, 3));
            let n = value(m, lane, op, 2) as u32;
            m.transfer(lane, bytes(to, from, n, Done::Mbarrier(bar)));
        }
    },
);

/// A run of bytes from shared to global memory.
pub static STORE_BYTES: Inst = start(
    "cp.async.bulk.store",
    "cp.async.bulk.global.shared::cta.bulk_group {to}, {from}, {bytes};",
    &[at("to", Space::Global), at("from", Space::Shared), arg("bytes", B32)],
    Needs::HOPPER,
    |m, op| {
        for lane in lanes(m.active()) {
            let (to, from) = (global(m, lane, op, 0), shared(m, lane, op, 1));
            let n = value(m, lane, op, 2) as u32;
            m.transfer(lane, bytes(to, from, n, Done::Group(Queue::Bulk)));
        }
    },
);

/// A run of elements of shared memory combined with global memory, each in one step.
pub static REDUCE_BYTES: Inst = start(
    "cp.reduce.async.bulk",
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.{o} {to}, {from}, {bytes};",
    &[
        at("to", Space::Global),
        at("from", Space::Shared),
        arg("bytes", B32),
        word("o", &["add.f32", "add.u32", "add.noftz.f16", "add.noftz.bf16", "max.u32", "min.u32"]),
    ],
    Needs::HOPPER,
    |m, op| {
        let (way, number) = op.word(3).split_once('.').expect("bug in fulgurite: a reduction without a type");
        let number = number.rsplit('.').next().unwrap_or(number);
        for lane in lanes(m.active()) {
            let (to, from) = (global(m, lane, op, 0), shared(m, lane, op, 1));
            let n = value(m, lane, op, 2) as u32;
            let reduce = Some((reduction(way), number));
            let done = Done::Group(Queue::Bulk);
            m.transfer(lane, Transfer::Bytes { to, from, bytes: n, padded: n, reduce, multicast: None, done });
        }
    },
);

/// `size` bytes from global to shared memory, of which `used` are read and the rest is zero.
pub static COPY: Inst = Inst {
    unit: Unit::Global,
    ..start(
        "cp.async",
        "cp.async.{cache}.shared.global {to}, {from}, {size}, {used};",
        &[
            at("to", Space::Shared),
            at("from", Space::Global),
            arg("used", B32),
            number("size"),
            word("cache", &["ca", "cg"]),
        ],
        Needs::AMPERE,
        |m, op| {
            for lane in lanes(m.active()) {
                let (to, from) = (shared(m, lane, op, 0), global(m, lane, op, 1));
                let (used, padded) = (value(m, lane, op, 2) as u32, op.number(3) as u32);
                let done = Done::Group(Queue::Copy);
                m.transfer(
                    lane,
                    Transfer::Bytes { to, from, bytes: used, padded, reduce: None, multicast: None, done },
                );
            }
        },
    )
};

/// The rows of this family.
pub static ROWS: &[&Inst] = &[
    &LOAD_BOX,
    &LOAD_BOX_HINT,
    &LOAD_BOX_MULTICAST,
    &STORE_BOX,
    &REDUCE_BOX,
    &PREFETCH_BOX,
    &LOAD_BYTES,
    &LOAD_BYTES_MULTICAST,
    &COPY_TO_PEER,
    &STORE_BYTES,
    &REDUCE_BYTES,
    &COPY,
];
