//! mbarriers: barriers in shared memory that count arrivals and bytes.

use super::any;
use super::sync::scope;
use crate::inst::Class::{B32, Pred};
use crate::inst::{Effect, Inst, Needs, Op, Operand, Space, Together, Unit, arg, at, out, word};
use crate::machine::{Machine, Mbarrier, MemoryAddress, MemoryOrder, Scope, address, lanes, value};

const SOURCE: &str = "PTX ISA, parallel synchronization and communication instructions, mbarrier";

const fn signal(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (unit, together, effect) = (Unit::Barrier, Together::Thread, Effect::Signal);
    Inst { name, text, operands, allowed: any, needs, unit, together, effect, meaning, source: SOURCE }
}

/// Applies `f(operand)` to the mbarrier in each lane; `operand` is the one after the address.
fn each(m: &mut dyn Machine, op: &Op, space: Space, f: impl Fn(u32) -> Mbarrier) {
    for lane in lanes(m.active()) {
        let place = MemoryAddress { space, address: address(m, lane, op, 0) };
        let x = if op.args.len() > 1 { value(m, lane, op, 1) as u32 } else { 1 };
        m.mbarrier(lane, place, f(x));
    }
}

const BLOCK: MemoryOrder = MemoryOrder::Release(Scope::Cta);

/// Initialises an mbarrier with `n` expected arrivals per phase.
pub static INIT: Inst = signal(
    "mbarrier.init",
    "mbarrier.init.shared::cta.b64 {bar}, {n};",
    &[at("bar", Space::Shared), arg("n", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Shared, Mbarrier::Init),
);

/// Ends an mbarrier's lifetime, so that its bytes can be reused.
pub static INVAL: Inst = signal(
    "mbarrier.inval",
    "mbarrier.inval.shared::cta.b64 {bar};",
    &[at("bar", Space::Shared)],
    Needs::HOPPER,
    |m, op| {
        each(m, op, Space::Shared, |_| Mbarrier::Invalidate);
    },
);

/// Arrives once.
pub static ARRIVE: Inst = signal(
    "mbarrier.arrive",
    "mbarrier.arrive.shared::cta.b64 _, {bar};",
    &[at("bar", Space::Shared)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Shared, |_| Mbarrier::Arrive(1, BLOCK)),
);

/// Arrives `n` times.
pub static ARRIVE_COUNT: Inst = signal(
    "mbarrier.arrive.count",
    "mbarrier.arrive.shared::cta.b64 _, {bar}, {n};",
    &[at("bar", Space::Shared), arg("n", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Shared, |n| Mbarrier::Arrive(n, BLOCK)),
);

/// Arrives once at an mbarrier of any CTA of the cluster.
pub static ARRIVE_CLUSTER: Inst = signal(
    "mbarrier.arrive.cluster",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, {bar};",
    &[at("bar", Space::Cluster)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Cluster, |_| Mbarrier::Arrive(1, MemoryOrder::Release(Scope::Cluster))),
);

/// Arrives once at an mbarrier of any CTA of the cluster, and releases memory to threads of the own CTA alone. For an
/// arrival that orders accesses to tensor memory, which no thread of the other CTA makes: a release for the cluster would
/// wait for all stores of the thread.
pub static ARRIVE_PEER: Inst = signal(
    "mbarrier.arrive.peer",
    "mbarrier.arrive.shared::cluster.b64 _, {bar};",
    &[at("bar", Space::Cluster)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Cluster, |_| Mbarrier::Arrive(1, BLOCK)),
);

/// Arrives once at an mbarrier of any CTA of the cluster, with relaxed order. For a stage that only products read,
/// after a wait for those products.
pub static ARRIVE_CLUSTER_RELAXED: Inst = signal(
    "mbarrier.arrive.cluster.relaxed",
    "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, {bar};",
    &[at("bar", Space::Cluster)],
    Needs::from((8, 6), 90),
    |m, op| each(m, op, Space::Cluster, |_| Mbarrier::Arrive(1, MemoryOrder::Relaxed(Scope::Cluster))),
);

/// Arrives once, with relaxed order.
pub static ARRIVE_RELAXED: Inst = signal(
    "mbarrier.arrive.relaxed",
    "mbarrier.arrive.relaxed.{scope}.shared::cta.b64 _, {bar};",
    &[at("bar", Space::Shared), word("scope", SCOPES)],
    Needs::from((8, 6), 90),
    |m, op| {
        let order = MemoryOrder::Relaxed(scope(op.word(1)));
        for lane in lanes(m.active()) {
            let place = MemoryAddress { space: Space::Shared, address: address(m, lane, op, 0) };
            m.mbarrier(lane, place, Mbarrier::Arrive(1, order));
        }
    },
);

const SCOPES: &[&str] = &["cta", "cluster"];

/// Arrives `n` times at an mbarrier of any CTA of the cluster.
pub static ARRIVE_CLUSTER_COUNT: Inst = signal(
    "mbarrier.arrive.cluster.count",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, {bar}, {n};",
    &[at("bar", Space::Cluster), arg("n", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Cluster, |n| Mbarrier::Arrive(n, MemoryOrder::Release(Scope::Cluster))),
);

/// Adds `bytes` to the expected count of an mbarrier of any CTA of the cluster, and arrives there once.
pub static ARRIVE_EXPECT_CLUSTER: Inst = signal(
    "mbarrier.arrive.expect_tx.cluster",
    "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, {bar}, {bytes};",
    &[at("bar", Space::Cluster), arg("bytes", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Cluster, |bytes| Mbarrier::ArriveExpect(bytes, MemoryOrder::Release(Scope::Cluster))),
);

/// Adds `bytes` to the expected count of an mbarrier of any CTA of the cluster.
pub static EXPECT_CLUSTER: Inst = signal(
    "mbarrier.expect_tx.cluster",
    "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 {bar}, {bytes};",
    &[at("bar", Space::Cluster), arg("bytes", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Cluster, Mbarrier::Expect),
);

/// Adds `bytes` to the expected count of the phase, and arrives once.
pub static ARRIVE_EXPECT: Inst = signal(
    "mbarrier.arrive.expect_tx",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, {bar}, {bytes};",
    &[at("bar", Space::Shared), arg("bytes", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Shared, |bytes| Mbarrier::ArriveExpect(bytes, BLOCK)),
);

/// Adds `bytes` to the expected count of the phase.
pub static EXPECT: Inst = signal(
    "mbarrier.expect_tx",
    "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 {bar}, {bytes};",
    &[at("bar", Space::Shared), arg("bytes", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Shared, Mbarrier::Expect),
);

/// Reports `bytes` as delivered.
pub static COMPLETE: Inst = signal(
    "mbarrier.complete_tx",
    "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 {bar}, {bytes};",
    &[at("bar", Space::Shared), arg("bytes", B32)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Shared, Mbarrier::Complete),
);

/// Arrives once, for this and all later phases.
pub static ARRIVE_DROP: Inst = signal(
    "mbarrier.arrive_drop",
    "mbarrier.arrive_drop.shared::cta.b64 _, {bar};",
    &[at("bar", Space::Shared)],
    Needs::HOPPER,
    |m, op| each(m, op, Space::Shared, |_| Mbarrier::ArriveDrop(1)),
);

/// Arrives once when all earlier cp.async of the thread are done; with `.noinc`, that arrival is one of the expected
/// ones.
pub static ARRIVE_COPIES: Inst = signal(
    "cp.async.mbarrier.arrive",
    "cp.async.mbarrier.arrive{noinc}.shared::cta.b64 {bar};",
    &[at("bar", Space::Shared), word("noinc", &["", ".noinc"])],
    Needs::HOPPER,
    |m, op| {
        let expected = op.word(1) == ".noinc";
        for lane in lanes(m.active()) {
            let place = MemoryAddress { space: Space::Shared, address: address(m, lane, op, 0) };
            m.mbarrier(lane, place, Mbarrier::ArriveAfterCopies(expected));
        }
    },
);

fn test(m: &mut dyn Machine, op: &Op, order: MemoryOrder) {
    for lane in lanes(m.active()) {
        let place = MemoryAddress { space: Space::Shared, address: address(m, lane, op, 1) };
        let parity = value(m, lane, op, 2) as u32;
        let done = m.mbarrier_done(lane, place, parity, order);
        m.set(lane, op.reg(0), u64::from(done));
    }
}

/// p = whether the phase with this parity is complete; may wait a while before it says no.
pub static TRY_WAIT: Inst = Inst {
    effect: Effect::Wait,
    ..signal(
        "mbarrier.try_wait",
        "mbarrier.try_wait.parity.shared::cta.b64 {p}, {bar}, {parity};",
        &[out("p", Pred), at("bar", Space::Shared), arg("parity", B32)],
        Needs::HOPPER,
        |m, op| test(m, op, MemoryOrder::Acquire(Scope::Cta)),
    )
};

/// p = whether the phase with this parity is complete, also for arrivals from other CTAs of the cluster.
pub static TRY_WAIT_CLUSTER: Inst = Inst {
    effect: Effect::Wait,
    ..signal(
        "mbarrier.try_wait.cluster",
        "mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 {p}, {bar}, {parity};",
        &[out("p", Pred), at("bar", Space::Shared), arg("parity", B32), word("scope", &["cluster"])],
        Needs::HOPPER,
        |m, op| test(m, op, MemoryOrder::Acquire(scope(op.word(3)))),
    )
};

/// p = whether the phase with this parity is complete, with relaxed order.
pub static TRY_WAIT_RELAXED: Inst = Inst {
    effect: Effect::Wait,
    ..signal(
        "mbarrier.try_wait.relaxed",
        "mbarrier.try_wait.parity.relaxed.{scope}.shared::cta.b64 {p}, {bar}, {parity};",
        &[out("p", Pred), at("bar", Space::Shared), arg("parity", B32), word("scope", SCOPES)],
        Needs::from((8, 6), 90),
        |m, op| test(m, op, MemoryOrder::Relaxed(scope(op.word(3)))),
    )
};

/// p = whether the phase with this parity is complete; waits about `ns` nanoseconds before it says no.
pub static TRY_WAIT_FOR: Inst = Inst {
    effect: Effect::Wait,
    ..signal(
        "mbarrier.try_wait.for",
        "mbarrier.try_wait.parity.shared::cta.b64 {p}, {bar}, {parity}, {ns};",
        &[out("p", Pred), at("bar", Space::Shared), arg("parity", B32), arg("ns", B32)],
        Needs::HOPPER,
        |m, op| test(m, op, MemoryOrder::Acquire(Scope::Cta)),
    )
};

/// p = whether the phase with this parity is complete; never waits.
pub static TEST_WAIT: Inst = Inst {
    effect: Effect::Wait,
    ..signal(
        "mbarrier.test_wait",
        "mbarrier.test_wait.parity.shared::cta.b64 {p}, {bar}, {parity};",
        &[out("p", Pred), at("bar", Space::Shared), arg("parity", B32)],
        Needs::HOPPER,
        |m, op| test(m, op, MemoryOrder::Acquire(Scope::Cta)),
    )
};

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &INIT,
    &INVAL,
    &ARRIVE,
    &ARRIVE_COUNT,
    &ARRIVE_CLUSTER,
    &ARRIVE_PEER,
    &ARRIVE_CLUSTER_RELAXED,
    &ARRIVE_RELAXED,
    &ARRIVE_CLUSTER_COUNT,
    &ARRIVE_EXPECT_CLUSTER,
    &EXPECT_CLUSTER,
    &ARRIVE_EXPECT,
    &EXPECT,
    &COMPLETE,
    &ARRIVE_DROP,
    &ARRIVE_COPIES,
    &TRY_WAIT,
    &TRY_WAIT_CLUSTER,
    &TRY_WAIT_RELAXED,
    &TRY_WAIT_FOR,
    &TEST_WAIT,
];
