//! mbarriers: they count arrivals and bytes, and the rules that PTX leaves to the program are checked here.

use crate::clock::{Clock, Comp, Part};
use crate::finding::Fault;
use crate::shadow::{Access, Who};
use crate::world::{Cluster, SHARED_BASE, Status, Wait, World};
use std::rc::Rc;

/// Largest number of bytes or arrivals that an mbarrier can count.
const MOST: i64 = (1 << 20) - 1;

/// State of an mbarrier.
pub(crate) struct Bar {
    /// Arrivals per phase; `pending`: arrivals still missing in this one.
    pub count: u32,
    pub pending: u32,
    /// Bytes still missing in this phase.
    pub bytes: i64,
    pub phase: u32,
    pub comp: Comp,
    /// Its initialisation; `published`: whether a fence made it visible to the cluster and to TMA.
    pub made: Access,
    pub published: bool,
    /// Knowledge released in this phase; `past`: in the phases before.
    current: Clock,
    past: Rc<Clock>,
    /// The last access that set the expected bytes; `arrived`: the last arrival.
    pub expected: Option<Access>,
    pub arrived: Option<Access>,
    /// Warps whose wait failed, and the phase that they asked for.
    waiters: Vec<(u32, u32)>,
    /// Cycle of the latest arrival.
    latest: u64,
    /// Cycle at which the last phase was over.
    over: u64,
}

/// The agent that operates on an mbarrier.
pub(crate) struct User<'a> {
    pub clock: &'a Clock,
    pub access: Access,
    pub lane: Option<u32>,
    /// Whether it is in another CTA, or is TMA.
    pub far: bool,
    /// Whether it releases all its knowledge, or only the knowledge of finished work.
    pub releases: bool,
    pub now: u64,
}

/// Position of an mbarrier: rank of the CTA in the cluster, and offset in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BarAt {
    pub rank: usize,
    pub offset: u32,
}

impl World<'_> {
    /// Name of a place in shared memory: the name from the kernel, with an index if it has several elements.
    pub fn shared_name(&self, offset: u32) -> String {
        let uses = &self.program.kernel.shared;
        match uses.iter().find(|u| (u.offset..u.offset + u.bytes).contains(&offset)) {
            Some(u) if u.bytes > 8 => format!("`{}`[{}]", u.name, (offset - u.offset) / 8),
            Some(u) => format!("`{}`", u.name),
            None => format!("the one at offset {offset}"),
        }
    }

    fn bar_fault(&mut self, fault: Fault, what: String, at: BarAt, user: &User<'_>, other: Option<Access>) {
        let here = self.side(user.access.block, user.access.warp, user.lane, user.access.pc);
        let other = other.map(|access| self.side_of(&access));
        self.report(fault, what, Some(u64::from(SHARED_BASE + at.offset)), here, other);
    }

    /// Initialises an mbarrier.
    pub fn bar_init(&mut self, cluster: &mut Cluster, at: BarAt, count: u32, user: &User<'_>) {
        let name = self.shared_name(at.offset);
        if let Some(bar) = cluster.blocks[at.rank].bars.get(&at.offset) {
            let made = bar.made;
            self.bar_fault(
                Fault::NotABarrier,
                format!("mbarrier {name} is initialised while it lives"),
                at,
                user,
                Some(made),
            );
        }
        if i64::from(count) > MOST || count == 0 || !at.offset.is_multiple_of(8) {
            let what = format!("mbarrier {name} for {count} arrivals, allowed: 1 to {MOST}, at multiples of 8 bytes");
            self.bar_fault(Fault::Operand, what, at, user, None);
        }
        let comp = cluster.component();
        let id = cluster.id;
        let bar = Bar {
            count: count.max(1),
            pending: count.max(1),
            bytes: 0,
            phase: 0,
            comp,
            made: user.access,
            published: false,
            current: Clock::new(id),
            past: Rc::new(Clock::new(id)),
            expected: None,
            arrived: None,
            waiters: Vec::new(),
            latest: 0,
            over: 0,
        };
        cluster.blocks[at.rank].bars.insert(at.offset, bar);
    }

    /// Ends the lifetime of an mbarrier.
    pub fn bar_end(&mut self, cluster: &mut Cluster, at: BarAt, user: &User<'_>) {
        if self.bar_ready(cluster, at, user) {
            cluster.blocks[at.rank].bars.remove(&at.offset);
        }
    }

    /// Whether there is an mbarrier. Reports any misuse.
    pub fn bar_ready(&mut self, cluster: &mut Cluster, at: BarAt, user: &User<'_>) -> bool {
        let name = self.shared_name(at.offset);
        let block = &mut cluster.blocks[at.rank];
        if user.far && block.running == 0 {
            self.bar_fault(Fault::Exit, format!("mbarrier {name} of a block that has ended"), at, user, None);
            return false;
        }
        let Some(bar) = block.bars.get(&at.offset) else {
            self.bar_fault(
                Fault::NotABarrier,
                format!("there is no mbarrier at offset {} ({name})", at.offset),
                at,
                user,
                None,
            );
            return false;
        };
        let made = bar.made;
        let Who::Warp { comp, time } = made.who else { return true };
        if user.clock.get(Part::Memory, comp) < time && made.who != user.access.who {
            let what = format!("mbarrier {name} is used, and nothing orders that after its initialisation");
            self.bar_fault(Fault::BarrierNotReady, what, at, user, Some(made));
        } else if user.far && !bar.published {
            let what = format!(
                "mbarrier {name} is used from outside the block's threads with no fence after its initialisation"
            );
            self.bar_fault(Fault::BarrierNotReady, what, at, user, Some(made));
            // Report only once.
            if let Some(bar) = cluster.blocks[at.rank].bars.get_mut(&at.offset) {
                bar.published = true;
            }
        }
        true
    }

    /// Publishes the mbarriers that a warp initialised, when it executes a fence.
    pub fn bars_published(&mut self, cluster: &mut Cluster, rank: usize, by: Comp) {
        for bar in cluster.blocks[rank].bars.values_mut() {
            bar.published |= matches!(bar.made.who, Who::Warp { comp, .. } if comp == by);
        }
    }

    /// Adds to the expected bytes, then arrives.
    pub fn bar_arrive(&mut self, cluster: &mut Cluster, at: BarAt, count: u32, bytes: u32, user: &User<'_>) {
        if !self.bar_ready(cluster, at, user) {
            return;
        }
        if bytes > 0 {
            self.bar_expect(cluster, at, bytes, user);
        }
        if user.far && !matches!(user.access.who, Who::Async(_)) {
            cluster.reached(at.rank, user.access);
        }
        let name = self.shared_name(at.offset);
        let Some(bar) = cluster.blocks[at.rank].bars.get_mut(&at.offset) else { return };
        if count > bar.pending {
            let (pending, expected, before) = (bar.pending, bar.count, bar.arrived);
            let what = format!(
                "{count} arrivals at mbarrier {name} in phase {}, which expects {expected} and misses {pending}",
                bar.phase
            );
            self.bar_fault(Fault::TooManyArrivals, what, at, user, before);
            return;
        }
        bar.pending -= count;
        bar.arrived = Some(user.access);
        if user.releases {
            bar.current.join(user.clock)
        } else {
            bar.current.join_done(user.clock)
        }
        bar.latest = bar.latest.max(user.now);
        self.settle(cluster, at, user);
    }

    /// Removes arrivals from this and all later phases.
    pub fn bar_drop(&mut self, cluster: &mut Cluster, at: BarAt, count: u32, user: &User<'_>) {
        if let Some(bar) = cluster.blocks[at.rank].bars.get_mut(&at.offset) {
            bar.count = bar.count.saturating_sub(count).max(1);
        }
        self.bar_arrive(cluster, at, count, 0, user);
    }

    /// Adds to the expected bytes.
    pub fn bar_expect(&mut self, cluster: &mut Cluster, at: BarAt, bytes: u32, user: &User<'_>) {
        if !self.bar_ready(cluster, at, user) {
            return;
        }
        let name = self.shared_name(at.offset);
        let Some(bar) = cluster.blocks[at.rank].bars.get_mut(&at.offset) else { return };
        bar.bytes = bar.bytes.saturating_add(i64::from(bytes));
        bar.expected = Some(user.access);
        if bar.bytes > MOST {
            let what = format!("mbarrier {name} expects {} bytes, allowed: {MOST}; spread them over two", bar.bytes);
            bar.bytes = MOST;
            self.bar_fault(Fault::ByteOverflow, what, at, user, None);
        }
    }

    /// Delivers bytes, and returns the phase in which they count.
    pub fn bar_complete(
        &mut self,
        cluster: &mut Cluster,
        at: BarAt,
        bytes: u32,
        user: &User<'_>,
    ) -> Option<(Comp, u32)> {
        if !self.bar_ready(cluster, at, user) {
            return None;
        }
        let bar = cluster.blocks[at.rank].bars.get_mut(&at.offset)?;
        let completed = (bar.comp, bar.phase + 1);
        bar.bytes = bar.bytes.saturating_sub(i64::from(bytes)).max(-MOST);
        bar.latest = bar.latest.max(user.now);
        self.settle(cluster, at, user);
        Some(completed)
    }

    /// The current phase of an mbarrier.
    pub fn bar_phase(&self, cluster: &Cluster, at: BarAt) -> Option<u32> {
        cluster.blocks[at.rank].bars.get(&at.offset).map(|bar| bar.phase)
    }

    /// Ends the phase if nothing is missing.
    fn settle(&mut self, cluster: &mut Cluster, at: BarAt, user: &User<'_>) {
        self.progress += 1;
        let name = self.shared_name(at.offset);
        let id = cluster.id;
        let Some(bar) = cluster.blocks[at.rank].bars.get_mut(&at.offset) else { return };
        if bar.pending > 0 {
            return;
        }
        if bar.bytes < 0 {
            let (more, expected, phase) = (-bar.bytes, bar.expected, bar.phase);
            let what = format!("phase {phase} of mbarrier {name} got {more} bytes more than it expects");
            bar.bytes = 0;
            self.bar_fault(Fault::ByteCount, what, at, user, expected);
        }
        let Some(bar) = cluster.blocks[at.rank].bars.get_mut(&at.offset) else { return };
        if bar.bytes > 0 {
            return;
        }
        bar.phase += 1;
        bar.pending = bar.count;
        let completed = std::mem::replace(&mut bar.current, Clock::new(id));
        Rc::make_mut(&mut bar.past).join(&completed);
        let latest = bar.latest + self.architecture.barrier_latency;
        bar.over = latest;
        let phase = bar.phase;
        let missed =
            bar.waiters.iter().position(|&(_, wanted)| wanted + 2 <= phase).map(|i| bar.waiters.swap_remove(i));
        for warp in cluster.warps.iter_mut().filter(|w| w.rank == at.rank) {
            let waits = matches!(warp.status, Status::Blocked(Wait::Phase { address, phase: p }) if address == at.offset && p < phase);
            if waits {
                warp.status = Status::Ready;
                warp.now = warp.now.max(latest);
            }
        }
        if let Some((warp, wanted)) = missed {
            let slot = cluster.warp_at(at.rank, warp);
            let (pc, block) = (cluster.warps[slot].pc, cluster.blocks[at.rank].index);
            let waiter = Access { warp, block, pc, ..user.access };
            let what = format!("phase {wanted} of mbarrier {name} and the next are over before a waiter looked");
            self.bar_fault(Fault::PhaseMissed, what, at, user, Some(waiter));
        }
    }

    /// Whether the phase with this parity is over; if so, the knowledge that a waiter gains, the component to
    /// remember, and the cycle at which it was over.
    pub fn bar_over(
        &mut self,
        cluster: &mut Cluster,
        at: BarAt,
        parity: u32,
        patient: bool,
        user: &User<'_>,
    ) -> Result<(Rc<Clock>, Comp, u32, u64), Option<u32>> {
        if !self.bar_ready(cluster, at, user) {
            return Err(None);
        }
        let Some(bar) = cluster.blocks[at.rank].bars.get_mut(&at.offset) else { return Err(None) };
        let warp = user.access.warp;
        bar.waiters.retain(|&(w, _)| w != warp);
        if bar.phase & 1 == parity & 1 {
            if patient {
                bar.waiters.push((warp, bar.phase));
            }
            return Err(Some(bar.phase));
        }
        Ok((bar.past.clone(), bar.comp, bar.phase, bar.over))
    }
}

impl Cluster {
    /// Records that a warp of another CTA accesses this CTA's memory; only its last access is kept.
    pub fn reached(&mut self, rank: usize, who: Access) {
        let peers = &mut self.blocks[rank].peers;
        let same = |peer: &&mut Access| match (peer.who, who.who) {
            (Who::Warp { comp: a, .. }, Who::Warp { comp: b, .. }) => a == b,
            _ => false,
        };
        match peers.iter_mut().find(same) {
            Some(peer) => *peer = who,
            None => peers.push(who),
        }
    }
}
