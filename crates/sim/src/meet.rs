//! Synchronisation of warps: fences, named barriers, the cluster's barrier, mbarriers, and the pool of registers.

use crate::clock::{Clock, Part};
use crate::finding::Fault;
use crate::mbarrier::{BarAt, User};
use crate::view::View;
use crate::world::{Cluster, Named, Status, Wait, World, access_of};
use fulgurite_ptx::inst::Space;
use fulgurite_ptx::machine::{Fence, Mbarrier, Meeting, MemoryAddress, MemoryOrder, Scope};

/// Executes a fence for the warp.
pub(crate) fn fence(v: &mut View<'_, '_>, what: Fence) {
    let warp = &mut *v.warp;
    match what {
        Fence::Thread(_) => {
            if let Some(seen) = warp.seen.take() {
                warp.clock.join(&seen);
            }
            warp.released = Some(warp.clock.clone());
            warp.tick();
        }
        Fence::Proxy(space) => {
            let (comp, time) = (warp.comp, warp.time);
            if matches!(space, None | Some(Space::Shared | Space::Cluster)) {
                warp.clock.raise(&[Part::AsyncShared], comp, time);
                v.world.bars_published(v.cluster, warp.rank, comp);
            }
            if matches!(space, None | Some(Space::Global)) {
                warp.clock.raise(&[Part::AsyncGlobal], comp, time);
            }
            warp.tick();
        }
        Fence::MbarrierInit => v.world.bars_published(v.cluster, warp.rank, warp.comp),
        Fence::Product => warp.fences += 1,
    }
}

/// Meets other threads at a barrier.
pub(crate) fn meet(v: &mut View<'_, '_>, what: Meeting) {
    match what {
        Meeting::Sync { id, threads } => {
            let threads = threads.unwrap_or(v.world.program.kernel.threads);
            named(v, id, threads, true);
        }
        Meeting::Arrive { id, threads } => named(v, id, threads, false),
        // Lanes run in lockstep, so each knows what the others did.
        Meeting::Warp(_) => v.warp.tick(),
        Meeting::ClusterArrive(release) => {
            if v.warp.at_cluster.is_some() {
                v.fault(
                    Fault::Collective,
                    "a second arrival at the cluster's barrier with no wait between".into(),
                    None,
                    None,
                );
                return;
            }
            v.warp.at_cluster = Some(v.cluster.phase);
            if release {
                v.cluster.clock.join(&v.warp.clock)
            } else {
                v.cluster.clock.join_done(&v.warp.clock)
            }
            v.warp.tick();
            v.cluster.arrived += 1;
            v.cluster.latest = v.cluster.latest.max(v.warp.now);
            settle_cluster(v.world, v.cluster);
        }
        Meeting::ClusterWait(_) => match v.warp.at_cluster {
            None => {
                v.fault(Fault::Collective, "a wait at the cluster's barrier with no arrival before".into(), None, None)
            }
            Some(phase) if v.cluster.phase > phase => {
                v.warp.at_cluster = None;
                v.warp.clock.join(&v.cluster.past);
                v.warp.now = v.warp.now.max(v.cluster.latest);
            }
            Some(_) => v.warp.status = Status::Blocked(Wait::Cluster),
        },
    }
}

/// Ends the phase of the cluster's barrier if all warps that have not ended have arrived.
pub(crate) fn settle_cluster(world: &mut World<'_>, cluster: &mut Cluster) {
    if cluster.arrived == 0 || cluster.arrived + cluster.absent < cluster.warps.len() as u32 {
        return;
    }
    world.progress += 1;
    cluster.phase += 1;
    cluster.arrived = 0;
    let told = std::mem::replace(&mut cluster.clock, Clock::new(cluster.id));
    cluster.past.join(&told);
    cluster.absent = cluster.warps.iter().filter(|w| w.status == Status::Done).count() as u32;
    for warp in &mut cluster.warps {
        if warp.status == Status::Blocked(Wait::Cluster) {
            warp.status = Status::Ready;
            warp.at_cluster = None;
            warp.clock.join(&cluster.past);
            warp.now = warp.now.max(cluster.latest);
        }
    }
}

fn named(v: &mut View<'_, '_>, id: u32, threads: u32, waits: bool) {
    let block = v.block_index();
    let access = access_of(v.warp, block, v.warp.pc, false);
    let rank = v.warp.rank;
    let allowed = v.world.program.kernel.threads;
    if id as usize >= v.cluster.blocks[rank].named.len()
        || threads == 0
        || !threads.is_multiple_of(32)
        || threads > allowed
    {
        let what = format!("barrier {id} for {threads} threads, allowed: 0 to 15, multiples of 32 up to {allowed}");
        v.fault(Fault::Operand, what, None, None);
        return;
    }
    let barrier = &mut v.cluster.blocks[rank].named[id as usize];
    let (expected, first) = *barrier.expected.get_or_insert((threads, access));
    if expected != threads {
        let here = v.world.side_of(&access);
        let other = Some(v.world.side_of(&first));
        let what = format!("barrier {id} for {threads} threads, and for {expected} where it was reached first");
        v.world.report(Fault::BarrierCount, what, None, here, other);
    }
    barrier.arrived += 32;
    barrier.clock.join(&v.warp.clock);
    barrier.latest = barrier.latest.max(v.warp.now);
    v.warp.tick();
    if barrier.arrived < expected {
        if waits {
            v.warp.status = Status::Blocked(Wait::Named(id));
        }
        return;
    }
    v.world.progress += 1;
    let done = std::mem::take(barrier);
    *barrier = Named { clock: Clock::new(v.cluster.id), ..Named::default() };
    if waits {
        v.warp.clock.join(&done.clock);
        v.warp.now = v.warp.now.max(done.latest + v.world.architecture.barrier_latency);
    }
    for warp in &mut v.cluster.warps {
        if warp.rank == rank && warp.status == Status::Blocked(Wait::Named(id)) && !warp.regs.is_empty() {
            warp.status = Status::Ready;
            warp.clock.join(&done.clock);
            warp.now = warp.now.max(done.latest + v.world.architecture.barrier_latency);
        }
    }
}

/// Performs an operation on an mbarrier.
pub(crate) fn mbarrier(v: &mut View<'_, '_>, lane: u32, at: MemoryAddress, what: Mbarrier) {
    let Some(there) = v.resolve(lane, at, 8) else { return };
    let at = BarAt { rank: there.rank, offset: there.offset };
    let far = at.rank != v.warp.rank;
    let access = access_of(v.warp, v.block_index(), v.warp.pc, true);
    // A release among the threads of the CTA tells another CTA what is finished, and no more.
    let releases = |order: MemoryOrder| match order {
        MemoryOrder::Release(scope) | MemoryOrder::AcquireRelease(scope) => !far || scope != Scope::Cta,
        _ => false,
    };
    let now = v.warp.now;
    let now = if far { now + v.world.architecture.peer_latency } else { now };
    let user = |releases: bool| User { clock: &v.warp.clock, access, lane: Some(lane), far, releases, now };
    match what {
        Mbarrier::Init(count) => v.world.bar_init(v.cluster, at, count, &user(true)),
        Mbarrier::Invalidate => v.world.bar_end(v.cluster, at, &user(true)),
        Mbarrier::Arrive(count, order) => v.world.bar_arrive(v.cluster, at, count, 0, &user(releases(order))),
        Mbarrier::ArriveExpect(bytes, order) => {
            v.world.bar_arrive(v.cluster, at, 1, bytes, &user(releases(order)));
        }
        Mbarrier::Expect(bytes) => v.world.bar_expect(v.cluster, at, bytes, &user(false)),
        Mbarrier::Complete(bytes) => {
            v.world.bar_complete(v.cluster, at, bytes, &user(false));
        }
        Mbarrier::ArriveDrop(count) => v.world.bar_drop(v.cluster, at, count, &user(true)),
        Mbarrier::ArriveAfterCopies(expected) => v.arrive_after(lane, at, expected),
    }
    v.warp.tick();
}

/// Whether a phase is over. If not, the warp waits until asking again can succeed.
pub(crate) fn mbarrier_done(
    v: &mut View<'_, '_>,
    lane: u32,
    at: MemoryAddress,
    parity: u32,
    order: MemoryOrder,
) -> bool {
    let Some(there) = v.resolve(lane, at, 8) else { return true };
    let at = BarAt { rank: there.rank, offset: there.offset };
    let access = access_of(v.warp, v.block_index(), v.warp.pc, true);
    let user = User { clock: &v.warp.clock, access, lane: Some(lane), far: false, releases: false, now: v.warp.now };
    let patient = v.op.inst.name != "mbarrier.test_wait";
    match v.world.bar_over(v.cluster, at, parity, patient, &user) {
        Ok((told, comp, phase, over)) => {
            v.warp.now = v.warp.now.max(over);
            if matches!(order, MemoryOrder::Acquire(_) | MemoryOrder::AcquireRelease(_)) {
                v.warp.clock.join(&told);
                v.warp.clock.raise(&[Part::Memory, Part::Done], comp, phase);
            } else {
                v.warp.clock.join_done(&told);
                v.warp.clock.raise(&[Part::Done], comp, phase);
            }
            true
        }
        // There is no such barrier: continuing reveals more than stopping.
        Err(None) => true,
        Err(Some(phase)) => {
            if patient {
                v.warp.status = Status::Blocked(Wait::Phase { address: at.offset, phase });
            }
            false
        }
    }
}

/// Returns registers to the CTA's pool, or takes some from it.
pub(crate) fn registers(v: &mut View<'_, '_>, count: u32, more: bool) {
    let has = v.warp.registers;
    if !(24..=256).contains(&count) || !count.is_multiple_of(8) || more && count < has || !more && count > has {
        let way = if more { "up" } else { "down" };
        let what =
            format!("{has} registers changed {way} to {count}, allowed: multiples of 8 from 24 to 256, the right way");
        v.fault(Fault::Registers, what, None, None);
        return;
    }
    let rank = v.warp.rank;
    if more {
        let need = (count - has) * 32;
        let pool = &mut v.cluster.blocks[rank].pool;
        if *pool >= need {
            *pool -= need;
            v.warp.registers = count;
        } else {
            v.warp.status = Status::Blocked(Wait::Registers(count));
        }
        return;
    }
    v.world.progress += 1;
    v.warp.registers = count;
    let pool = &mut v.cluster.blocks[rank].pool;
    *pool += (has - count) * 32;
    for warp in v.cluster.warps.iter_mut().filter(|w| w.rank == rank) {
        if let Status::Blocked(Wait::Registers(count)) = warp.status {
            let need = (count - warp.registers) * 32;
            if *pool >= need {
                *pool -= need;
                warp.registers = count;
                warp.status = Status::Ready;
                warp.now = warp.now.max(v.warp.now);
            }
        }
    }
}
