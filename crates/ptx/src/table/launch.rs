//! Cluster launch control: a running CTA takes the place of one that has not started.

use super::any;
use crate::inst::Class::{B32, Pred};
use crate::inst::{Archs, Effect, Inst, Needs, Space, Together, Unit, at, out};
use crate::machine::{MemoryAddress, MemoryOrder, address, answered, lanes};

const SOURCE: &str = "PTX ISA, parallel synchronization and communication instructions, clusterlaunchcontrol";

/// Every Blackwell.
const BLACKWELL: Needs = Needs { ptx: (8, 6), archs: Archs::Only(&[100, 103, 120, 121]) };

/// Asks that a cluster which has not started never starts. An answer of 16 bytes goes to shared memory, and an mbarrier
/// counts them.
pub static TRY_CANCEL: Inst = Inst {
    name: "clusterlaunchcontrol.try_cancel",
    text: "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 {to}, {bar};",
    operands: &[at("to", Space::Shared), at("bar", Space::Shared)],
    allowed: any,
    needs: BLACKWELL,
    unit: Unit::Copy,
    together: Together::Thread,
    effect: Effect::Start,
    meaning: |m, op| {
        for lane in lanes(m.active()) {
            let [to, bar] = [0, 1].map(|i| MemoryAddress { space: Space::Shared, address: address(m, lane, op, i) });
            m.cancel(lane, to, bar);
        }
    },
    source: SOURCE,
};

/// p = whether a cluster was cancelled; x = the first coordinate of its first CTA, if it was.
pub static QUERY_CANCEL: Inst = Inst {
    name: "clusterlaunchcontrol.query_cancel",
    text: "{ .reg .b128 answer; ld.shared.b128 answer, {from}; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 {p}, answer; mov.b32 {x}, 0; @{p} clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 {x}, answer; }",
    operands: &[out("p", Pred), out("x", B32), at("from", Space::Shared)],
    allowed: any,
    needs: BLACKWELL,
    unit: Unit::Shared,
    together: Together::Thread,
    effect: Effect::Read(Space::Shared),
    meaning: |m, op| {
        for lane in lanes(m.active()) {
            let from = MemoryAddress { space: Space::Shared, address: address(m, lane, op, 2) };
            let mut bytes = [0; 16];
            m.load(lane, from, MemoryOrder::Weak, &mut bytes);
            let first = answered(&bytes);
            if first.is_none() {
                m.refused(lane);
            }
            m.set(lane, op.reg(0), first.is_some().into());
            m.set(lane, op.reg(1), first.unwrap_or(0).into());
        }
    },
    source: SOURCE,
};

/// All rows of this family.
pub static ROWS: &[&Inst] = &[&TRY_CANCEL, &QUERY_CANCEL];
