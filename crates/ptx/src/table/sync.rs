//! Barriers, fences, waits and grid control.

use super::any;
use crate::inst::Class::B32;
use crate::inst::{Effect, Inst, Needs, Op, Operand, Space, Steps, Together, Unit, arg, number, steps, word};
use crate::machine::{Fence, Group, Machine, Meeting, MemoryOrder, Queue, Scope, lanes, value};

/// Thread counts of named barriers, and numbers of pending groups.
const THREADS: &[Steps] = &[steps(32, 1024, 32)];
const PENDING: &[Steps] = &[steps(0, 7, 1)];
const BARRIERS: &str = "PTX ISA, parallel synchronization and communication instructions";

const fn signal(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    let (unit, together, effect) = (Unit::Barrier, Together::Thread, Effect::Signal);
    Inst { name, text, operands, allowed: any, needs, unit, together, effect, meaning, source: BARRIERS }
}
const fn wait(
    name: &'static str,
    text: &'static str,
    operands: &'static [Operand],
    needs: Needs,
    meaning: fn(&mut dyn Machine, &Op),
) -> Inst {
    Inst { together: Together::Warp, effect: Effect::Wait, ..signal(name, text, operands, needs, meaning) }
}

fn fence(m: &mut dyn Machine, what: Fence) {
    for lane in lanes(m.active()) {
        m.fence(lane, what);
    }
}
fn group(m: &mut dyn Machine, queue: Queue, what: Group) {
    for lane in lanes(m.active()) {
        m.group(lane, queue, what);
    }
}
/// An operand whose value is equal in all lanes.
fn uniform(m: &mut dyn Machine, op: &Op, i: usize) -> u32 {
    let lane = m.active().trailing_zeros();
    value(m, lane, op, i) as u32
}

/// The scope that a PTX word names.
pub(super) fn scope(word: &str) -> Scope {
    match word {
        "cta" => Scope::Cta,
        "cluster" => Scope::Cluster,
        "gpu" => Scope::Device,
        _ => Scope::System,
    }
}

/// Synchronises all threads of the CTA.
pub static BAR_ALL: Inst = wait("bar.sync.all", "bar.sync 0;", &[], Needs::AMPERE, |m, _| {
    m.meet(Meeting::Sync { id: 0, threads: None });
});

/// Synchronises a given number of threads at a named barrier of the CTA.
pub static BAR: Inst = wait(
    "bar.sync",
    "bar.sync {id}, {threads};",
    &[arg("id", B32), number("threads", THREADS)],
    Needs::AMPERE,
    |m, op| {
        let id = uniform(m, op, 0);
        m.meet(Meeting::Sync { id, threads: Some(op.number(1) as u32) });
    },
);

/// Arrives at a named barrier of the CTA without waiting.
pub static BAR_ARRIVE: Inst = Inst {
    effect: Effect::Signal,
    ..wait(
        "bar.arrive",
        "bar.arrive {id}, {threads};",
        &[arg("id", B32), number("threads", THREADS)],
        Needs::AMPERE,
        |m, op| {
            let id = uniform(m, op, 0);
            m.meet(Meeting::Arrive { id, threads: op.number(1) as u32 });
        },
    )
};

/// Synchronises the lanes of a warp and their memory.
pub static BAR_WARP: Inst = wait("bar.warp.sync", "bar.warp.sync 0xffffffff;", &[], Needs::AMPERE, |m, _| {
    m.meet(Meeting::Warp(u32::MAX));
});

/// Arrives at the cluster's barrier.
pub static CLUSTER_ARRIVE: Inst = Inst {
    effect: Effect::Signal,
    ..wait(
        "barrier.cluster.arrive",
        "barrier.cluster.arrive.{o}.aligned;",
        &[word("o", &["release", "relaxed"])],
        Needs::HOPPER,
        |m, op| m.meet(Meeting::ClusterArrive(op.word(0) == "release")),
    )
};

/// Waits at the cluster's barrier.
pub static CLUSTER_WAIT: Inst =
    wait("barrier.cluster.wait", "barrier.cluster.wait.acquire.aligned;", &[], Needs::HOPPER, |m, _| {
        m.meet(Meeting::ClusterWait(true));
    });

/// Orders the thread's earlier accesses before its later ones, within a scope.
pub static FENCE: Inst =
    signal("fence.acq_rel", "fence.acq_rel.{scope};", &[word("scope", SCOPES)], Needs::AMPERE, |m, op| {
        fence(m, Fence::Thread(MemoryOrder::AcquireRelease(scope(op.word(0)))));
    });

/// Orders the thread's earlier accesses before its later ones; all threads see such fences in one order. Also spelled
/// `membar`.
pub static FENCE_SC: Inst =
    signal("fence.sc", "fence.sc.{scope};", &[word("scope", SCOPES)], Needs::AMPERE, |m, op| {
        fence(m, Fence::Thread(MemoryOrder::AcquireRelease(scope(op.word(0)))));
    });

/// Both fences in cluster scope, which costs as much as device scope.
pub static FENCE_CLUSTER: Inst =
    signal("fence.cluster", "fence.{kind}.cluster;", &[word("kind", &["acq_rel", "sc"])], Needs::HOPPER, |m, _| {
        fence(m, Fence::Thread(MemoryOrder::AcquireRelease(Scope::Cluster)));
    });

/// Memory scopes that every GPU has.
const SCOPES: &[&str] = &["cta", "gpu", "sys"];

/// One-way fences: acquire orders later accesses after earlier reads; release orders earlier writes before later
/// accesses.
pub static FENCE_ONE_WAY: Inst = signal(
    "fence.one_way",
    "fence.{way}.{scope};",
    &[word("way", &["acquire", "release"]), word("scope", &["cta", "cluster", "gpu", "sys"])],
    Needs::from((8, 6), 90),
    |m, op| {
        let scope = scope(op.word(1));
        let order = if op.word(0) == "acquire" { MemoryOrder::Acquire(scope) } else { MemoryOrder::Release(scope) };
        fence(m, Fence::Thread(order));
    },
);

/// Orders the thread's accesses with those of TMA and the tensor cores.
pub static FENCE_PROXY: Inst = signal(
    "fence.proxy.async",
    "fence.proxy.async{space};",
    &[word("space", &["", ".shared::cta", ".shared::cluster", ".global"])],
    Needs::HOPPER,
    |m, op| {
        fence(
            m,
            Fence::Proxy(match op.word(0) {
                ".shared::cta" => Some(Space::Shared),
                ".shared::cluster" => Some(Space::Cluster),
                ".global" => Some(Space::Global),
                _ => None,
            }),
        );
    },
);

/// Makes initialised mbarriers visible to the cluster. A barrier must follow.
pub static FENCE_INIT: Inst =
    signal("fence.mbarrier_init", "fence.mbarrier_init.release.cluster;", &[], Needs::HOPPER, |m, _| {
        fence(m, Fence::MbarrierInit);
    });

/// Precedes the first product of a group: the product then sees earlier writes to its registers.
pub static WGMMA_FENCE: Inst = Inst {
    together: Together::Warpgroup,
    ..signal("wgmma.fence", "wgmma.fence.sync.aligned;", &[], Needs::HOPPER_ONLY, |m, _| fence(m, Fence::Product))
};

/// Closes a group: all products since the last commit.
pub static WGMMA_COMMIT: Inst = Inst {
    together: Together::Warpgroup,
    ..signal("wgmma.commit_group", "wgmma.commit_group.sync.aligned;", &[], Needs::HOPPER_ONLY, |m, _| {
        group(m, Queue::Product, Group::Commit);
    })
};

/// Waits until at most `n` groups of products are pending.
pub static WGMMA_WAIT: Inst = Inst {
    together: Together::Warpgroup,
    ..wait(
        "wgmma.wait_group",
        "wgmma.wait_group.sync.aligned {n};",
        &[number("n", PENDING)],
        Needs::HOPPER_ONLY,
        |m, op| {
            group(m, Queue::Product, Group::Wait(op.number(0) as u32));
        },
    )
};

/// Closes a group: all copies out of shared memory since the last commit.
pub static BULK_COMMIT: Inst =
    signal("cp.async.bulk.commit_group", "cp.async.bulk.commit_group;", &[], Needs::HOPPER, |m, _| {
        group(m, Queue::Bulk, Group::Commit);
    });

/// Waits until at most `n` groups of copies have yet to read their sources.
pub static BULK_WAIT_READ: Inst = Inst {
    effect: Effect::Wait,
    ..signal(
        "cp.async.bulk.wait_group.read",
        "cp.async.bulk.wait_group.read {n};",
        &[number("n", PENDING)],
        Needs::HOPPER,
        |m, op| group(m, Queue::Bulk, Group::WaitRead(op.number(0) as u32)),
    )
};

/// Waits until at most `n` groups of copies are pending.
pub static BULK_WAIT: Inst = Inst {
    effect: Effect::Wait,
    ..signal(
        "cp.async.bulk.wait_group",
        "cp.async.bulk.wait_group {n};",
        &[number("n", PENDING)],
        Needs::HOPPER,
        |m, op| {
            group(m, Queue::Bulk, Group::Wait(op.number(0) as u32));
        },
    )
};

/// Closes a group: all cp.async of the thread since the last commit.
pub static COPY_COMMIT: Inst = signal("cp.async.commit_group", "cp.async.commit_group;", &[], Needs::AMPERE, |m, _| {
    group(m, Queue::Copy, Group::Commit);
});

/// Waits until at most `n` groups of the thread's cp.async are pending.
pub static COPY_WAIT: Inst = Inst {
    effect: Effect::Wait,
    ..signal("cp.async.wait_group", "cp.async.wait_group {n};", &[number("n", PENDING)], Needs::AMPERE, |m, op| {
        group(m, Queue::Copy, Group::Wait(op.number(0) as u32));
    })
};

/// Waits for all of the thread's cp.async.
pub static COPY_WAIT_ALL: Inst = Inst {
    effect: Effect::Wait,
    ..signal("cp.async.wait_all", "cp.async.wait_all;", &[], Needs::AMPERE, |m, _| {
        group(m, Queue::Copy, Group::WaitAll);
    })
};

/// Sets the registers per thread to `n`: returns registers to the CTA's pool, or takes some from it.
pub static SETMAXNREG: Inst = Inst {
    together: Together::Warpgroup,
    effect: Effect::Wait,
    ..signal(
        "setmaxnreg",
        "setmaxnreg.{way}.sync.aligned.u32 {n};",
        &[word("way", &["dec", "inc"]), number("n", &[steps(24, 256, 8)])],
        Needs::HOPPER_AND_BLACKWELL,
        |m, op| m.registers(op.number(1) as u32, op.word(0) == "inc"),
    )
};

/// Waits until the previous grid is complete and its writes are visible.
pub static GRID_WAIT: Inst =
    wait("griddepcontrol.wait", "griddepcontrol.wait;", &[], Needs::HOPPER, |m, _| m.grid(true));

/// Lets the next grid start.
pub static GRID_LAUNCH: Inst = Inst {
    effect: Effect::Signal,
    ..wait("griddepcontrol.launch_dependents", "griddepcontrol.launch_dependents;", &[], Needs::HOPPER, |m, _| {
        m.grid(false);
    })
};

/// Sleeps for about this many nanoseconds.
pub static SLEEP: Inst = Inst {
    effect: Effect::Volatile,
    ..signal("nanosleep", "nanosleep.u32 {n};", &[number("n", &[steps(0, 1_000_000, 1)])], Needs::AMPERE, |m, _| {
        m.sleep();
    })
};

/// Aborts: the launch fails.
pub static TRAP: Inst = signal("trap", "trap;", &[], Needs::AMPERE, |m, _| {
    for lane in lanes(m.active()) {
        m.trap(lane);
    }
});

/// All rows of this family.
pub static ROWS: &[&Inst] = &[
    &BAR_ALL,
    &BAR,
    &BAR_ARRIVE,
    &BAR_WARP,
    &CLUSTER_ARRIVE,
    &CLUSTER_WAIT,
    &FENCE,
    &FENCE_SC,
    &FENCE_CLUSTER,
    &FENCE_ONE_WAY,
    &FENCE_PROXY,
    &FENCE_INIT,
    &WGMMA_FENCE,
    &WGMMA_COMMIT,
    &WGMMA_WAIT,
    &BULK_COMMIT,
    &BULK_WAIT_READ,
    &BULK_WAIT,
    &COPY_COMMIT,
    &COPY_WAIT,
    &COPY_WAIT_ALL,
    &SETMAXNREG,
    &GRID_WAIT,
    &GRID_LAUNCH,
    &SLEEP,
    &TRAP,
];
