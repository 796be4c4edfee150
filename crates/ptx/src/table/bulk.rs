//! Boxes of tensors that TMA moves.

use super::any;
use crate::inst::Class::{B16, B32, B64};
use crate::inst::{Effect, Inst, Needs, Op, Operand, Space, Together, Unit, arg, args, at, reg, word};
use crate::machine::{Done, Machine, MemoryAddress, Queue, Reduction, Transfer, address, lanes, value};
use crate::tcgen05::CtaGroup;

const SOURCE: &str = "PTX ISA, data movement and conversion instructions, asynchronous copy";
const RANKS: &[&str] = &["1d", "2d", "3d", "4d", "5d"];
const REDUCTIONS: &[&str] = &["add", "min", "max", "and", "or", "xor", "inc", "dec"];

/// A row that TMA runs.
pub(super) const fn start(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (unit, together, effect) = (Unit::Copy, Together::Thread, Effect::Start);
    Inst { name, text, operands, allowed: any, needs, unit, together, effect, meaning, source: SOURCE }
}

/// The reduction that a PTX word names.
pub(super) fn reduction(word: &str) -> Reduction {
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

/// The place in a space to which an address operand points.
pub(super) fn place(m: &mut dyn Machine, lane: u32, op: &Op, i: usize, space: Space) -> MemoryAddress {
    MemoryAddress { space, address: address(m, lane, op, i) }
}
fn coordinates(m: &mut dyn Machine, lane: u32, op: &Op, i: usize) -> Vec<i32> {
    op.list(i).iter().map(|&reg| m.get(lane, reg) as u32 as i32).collect()
}

fn load_box(m: &mut dyn Machine, op: &Op, mask: Option<usize>, group: CtaGroup) {
    for lane in lanes(m.active()) {
        let what = Transfer::Box {
            tile: place(m, lane, op, 0, Space::Cluster),
            map: value(m, lane, op, 1),
            coordinates: coordinates(m, lane, op, 2),
            inward: true,
            reduce: None,
            multicast: mask.map(|i| value(m, lane, op, i) as u16),
            group,
            done: Done::Mbarrier(place(m, lane, op, 3, Space::Cluster)),
        };
        m.transfer(lane, what);
    }
}

/// Copies a box of a tensor to shared memory; an mbarrier counts its bytes.
pub static LOAD_BOX: Inst = Inst {
    allowed: |op| op.counts(2, 4),
    ..start(
        "cp.async.bulk.tensor.load",
        "cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes {tile}, [{map}, {at}], {bar};",
        &[at("tile", Space::Cluster), reg("map", B64), args("at", B32), at("bar", Space::Cluster), word("rank", RANKS)],
        Needs::HOPPER,
        |m, op| load_box(m, op, None, CtaGroup::Single),
    )
};

/// Copies a box of a tensor to shared memory of a CTA; an mbarrier of that CTA or of the other one of its pair counts
/// its bytes.
pub static LOAD_BOX_PAIR: Inst = Inst {
    allowed: |op| op.counts(2, 4),
    ..start(
        "cp.async.bulk.tensor.load.pair",
        "cp.async.bulk.tensor.{rank}.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes {tile}, [{map}, {at}], {bar};",
        &[at("tile", Space::Cluster), reg("map", B64), args("at", B32), at("bar", Space::Cluster), word("rank", RANKS)],
        Needs::TCGEN05,
        |m, op| load_box(m, op, None, CtaGroup::Pair),
    )
};

/// Copies a box of a tensor to shared memory, with an L2 cache hint.
pub static LOAD_BOX_HINT: Inst = Inst {
    allowed: |op| op.counts(2, 4),
    ..start(
        "cp.async.bulk.tensor.load.hint",
        "cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint {tile}, [{map}, {at}], {bar}, {policy};",
        &[
            at("tile", Space::Cluster),
            reg("map", B64),
            args("at", B32),
            at("bar", Space::Cluster),
            word("rank", RANKS),
            arg("policy", B64),
        ],
        Needs::HOPPER,
        |m, op| load_box(m, op, None, CtaGroup::Single),
    )
};

/// Copies a box of a tensor to several CTAs of the cluster, to the same offset in each; an mbarrier in each counts its
/// bytes.
pub static LOAD_BOX_MULTICAST: Inst = Inst {
    allowed: |op| op.counts(2, 5),
    ..start(
        "cp.async.bulk.tensor.load.multicast",
        "cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster {tile}, [{map}, {at}], {bar}, {mask};",
        &[
            at("tile", Space::Cluster),
            reg("map", B64),
            args("at", B32),
            at("bar", Space::Cluster),
            arg("mask", B16),
            word("rank", RANKS),
        ],
        Needs::DATA_CENTER,
        |m, op| load_box(m, op, Some(4), CtaGroup::Single),
    )
};

/// Copies a box of a tensor to several CTAs of the cluster, with an L2 cache hint.
pub static LOAD_BOX_MULTICAST_HINT: Inst = Inst {
    allowed: |op| op.counts(2, 5),
    ..start(
        "cp.async.bulk.tensor.load.multicast.hint",
        "cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint {tile}, [{map}, {at}], {bar}, {mask}, {policy};",
        &[
            at("tile", Space::Cluster),
            reg("map", B64),
            args("at", B32),
            at("bar", Space::Cluster),
            arg("mask", B16),
            word("rank", RANKS),
            arg("policy", B64),
        ],
        Needs::DATA_CENTER,
        |m, op| load_box(m, op, Some(4), CtaGroup::Single),
    )
};

fn store_box(m: &mut dyn Machine, op: &Op, reduce: Option<Reduction>) {
    for lane in lanes(m.active()) {
        let what = Transfer::Box {
            map: value(m, lane, op, 0),
            coordinates: coordinates(m, lane, op, 1),
            tile: place(m, lane, op, 2, Space::Shared),
            inward: false,
            reduce,
            multicast: None,
            group: CtaGroup::Single,
            done: Done::Group(Queue::Bulk),
        };
        m.transfer(lane, what);
    }
}

/// Copies a tile of shared memory to a box of a tensor.
pub static STORE_BOX: Inst = Inst {
    allowed: |op| op.counts(1, 3),
    ..start(
        "cp.async.bulk.tensor.store",
        "cp.async.bulk.tensor.{rank}.global.shared::cta.tile.bulk_group [{map}, {at}], {tile};",
        &[reg("map", B64), args("at", B32), at("tile", Space::Shared), word("rank", RANKS)],
        Needs::HOPPER,
        |m, op| store_box(m, op, None),
    )
};

/// Copies a tile of shared memory to a box of a tensor, with an L2 cache hint.
pub static STORE_BOX_HINT: Inst = Inst {
    allowed: |op| op.counts(1, 3),
    ..start(
        "cp.async.bulk.tensor.store.hint",
        "cp.async.bulk.tensor.{rank}.global.shared::cta.tile.bulk_group.L2::cache_hint [{map}, {at}], {tile}, {policy};",
        &[reg("map", B64), args("at", B32), at("tile", Space::Shared), word("rank", RANKS), arg("policy", B64)],
        Needs::HOPPER,
        |m, op| store_box(m, op, None),
    )
};

/// Reduces a tile of shared memory into a box of a tensor.
pub static REDUCE_BOX: Inst = Inst {
    allowed: |op| op.counts(1, 3),
    ..start(
        "cp.reduce.async.bulk.tensor",
        "cp.reduce.async.bulk.tensor.{rank}.global.shared::cta.{o}.tile.bulk_group [{map}, {at}], {tile};",
        &[reg("map", B64), args("at", B32), at("tile", Space::Shared), word("rank", RANKS), word("o", REDUCTIONS)],
        Needs::HOPPER,
        |m, op| store_box(m, op, Some(reduction(op.word(4)))),
    )
};

/// Reduces a tile of shared memory into a box of a tensor, with an L2 cache hint.
pub static REDUCE_BOX_HINT: Inst = Inst {
    allowed: |op| op.counts(1, 3),
    ..start(
        "cp.reduce.async.bulk.tensor.hint",
        "cp.reduce.async.bulk.tensor.{rank}.global.shared::cta.{o}.tile.bulk_group.L2::cache_hint [{map}, {at}], {tile}, {policy};",
        &[
            reg("map", B64),
            args("at", B32),
            at("tile", Space::Shared),
            word("rank", RANKS),
            word("o", REDUCTIONS),
            arg("policy", B64),
        ],
        Needs::HOPPER,
        |m, op| store_box(m, op, Some(reduction(op.word(4)))),
    )
};

/// A prefetch hint, which has no visible effect.
pub(super) fn prefetch(m: &mut dyn Machine, _: &Op) {
    for lane in lanes(m.active()) {
        m.transfer(lane, Transfer::Prefetch);
    }
}

/// Prefetches a box into the L2 cache.
pub static PREFETCH_BOX: Inst = Inst {
    allowed: |op| op.counts(1, 2),
    ..start(
        "cp.async.bulk.prefetch.tensor",
        "cp.async.bulk.prefetch.tensor.{rank}.L2.global.tile [{map}, {at}];",
        &[reg("map", B64), args("at", B32), word("rank", RANKS)],
        Needs::HOPPER,
        prefetch,
    )
};

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &LOAD_BOX,
    &LOAD_BOX_PAIR,
    &LOAD_BOX_HINT,
    &LOAD_BOX_MULTICAST,
    &LOAD_BOX_MULTICAST_HINT,
    &STORE_BOX,
    &STORE_BOX_HINT,
    &REDUCE_BOX,
    &REDUCE_BOX_HINT,
    &PREFETCH_BOX,
];
