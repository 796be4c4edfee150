//! The scheduler of the simulation: warps and events take turns until the grid is done or nothing can continue.

use crate::clock::Part;
use crate::counters::warp_product;
use crate::finding::Fault;
use crate::meet::settle_cluster;
use crate::options::Interleaving;
use crate::program::Step;
use crate::shadow::{Memo, Who};
use crate::view::View;
use crate::world::{Cluster, Event, FULL, Frame, SHARED_BASE, Status, Wait, Warp, World};
use fulgurite_ptx::inst::{Effect, Together};
use fulgurite_ptx::machine::Machine;
use std::cmp::Reverse;

/// Steps without a finished cluster after which one more is admitted, because the running ones may wait for it.
const PATIENCE: u64 = 1 << 20;
/// Steps of a warp before another one is chosen, if a clock decides.
const TIMED_STEPS: u64 = 8;

/// Accesses of a warp to an 8 x 8 matrix of 16-bit elements: two per lane.
const MATRIX: usize = 64;

impl World<'_> {
    /// Runs the whole grid. `poll` is called each time that another warp or event has its turn.
    pub fn run(&mut self, poll: fn()) {
        let mut ready: Vec<(usize, usize)> = Vec::new();
        let mut finished_at = self.budget;
        while !self.fatal {
            poll();
            let room = self.options.resident.max(1) as usize;
            while self.clusters.len() < room && self.admit() {}
            if self.clusters.is_empty() {
                return;
            }
            if finished_at - self.budget > PATIENCE {
                finished_at = self.budget;
                self.admit();
            }
            ready.clear();
            for (c, cluster) in self.clusters.iter().enumerate() {
                let able = |(_, w): &(usize, &Warp)| w.status == Status::Ready;
                ready.extend(cluster.warps.iter().enumerate().filter(able).map(|(w, _)| (c, w)));
            }
            let event = self.events.peek().map(|Reverse((time, ..))| *time);
            let pick = match self.options.order {
                Interleaving::Random => {
                    self.now += 1;
                    let n = self.random.below(ready.len() as u64) as usize;
                    ready.get(n).copied()
                }
                Interleaving::Timed => ready.iter().copied().min_by_key(|&(c, w)| self.clusters[c].warps[w].now),
            };
            let now = match (self.options.order, pick) {
                (Interleaving::Timed, Some((c, w))) => self.clusters[c].warps[w].now,
                _ => self.now,
            };
            match (pick, event) {
                (_, Some(time)) if time <= now => {
                    self.now = self.now.max(time);
                    self.fire();
                }
                (Some((c, w)), _) => {
                    let steps = match self.options.order {
                        Interleaving::Random => match self.random.below(4) {
                            0 => 1 + self.random.below(4),
                            1 => 1 + self.random.below(32),
                            _ => 1 + self.random.below(256),
                        },
                        Interleaving::Timed => {
                            self.now = self.now.max(now);
                            TIMED_STEPS
                        }
                    };
                    self.run_warp(c, w, steps);
                }
                (None, Some(time)) => {
                    // No warp can continue, so the next late event happens now.
                    self.now = self.now.max(time);
                    self.fire();
                }
                (None, None) => {
                    if !self.retry() && !self.admit_more() {
                        self.deadlock();
                        return;
                    }
                }
            }
            if self.retire() {
                finished_at = self.budget;
            }
        }
    }

    /// Admits the next cluster.
    fn admit(&mut self) -> bool {
        if self.next_cluster >= self.cluster_count() {
            return false;
        }
        let cluster = self.new_cluster(self.next_cluster);
        self.next_cluster += 1;
        self.clusters.push(cluster);
        true
    }

    /// Admits the next cluster, if the GPU would have room for it.
    fn admit_more(&mut self) -> bool {
        let room = self.architecture.arch.sms / self.program.kernel.cluster;
        self.clusters.len() < room as usize && self.admit()
    }

    /// Removes a cluster that is done.
    fn retire(&mut self) -> bool {
        let done = |c: &Cluster| c.pending == 0 && c.warps.iter().all(|w| w.status == Status::Done);
        let Some(i) = self.clusters.iter().position(done) else { return false };
        let cluster = self.clusters.swap_remove(i);
        self.copies.retain(|_, copy| copy.cluster != cluster.id);
        true
    }

    /// Lets polling warps look again, once for each change of the state.
    fn retry(&mut self) -> bool {
        let mut any = false;
        for warp in self.clusters.iter_mut().flat_map(|c| &mut c.warps) {
            let polite = matches!(warp.status, Status::Blocked(Wait::Phase { .. } | Wait::Sleep));
            if polite && warp.tried != self.progress {
                warp.tried = self.progress;
                warp.status = Status::Ready;
                any = true;
            }
        }
        any
    }

    /// Executes the next event.
    fn fire(&mut self) {
        let Some(Reverse((_, _, event))) = self.events.pop() else { return };
        let id = match event {
            Event::Read(copy) | Event::Write(copy) | Event::Complete(copy) => self.copies.get(&copy).map(|c| c.cluster),
            Event::Product(cluster, ..) | Event::Tensor(cluster, ..) => Some(cluster),
        };
        let Some(i) = id.and_then(|id| self.clusters.iter().position(|c| c.id == id)) else { return };
        let mut cluster = std::mem::take(&mut self.clusters[i]);
        match event {
            Event::Read(copy) => self.copy_reads(&mut cluster, copy),
            Event::Write(copy) => self.copy_writes(&mut cluster, copy),
            Event::Complete(copy) => self.copy_completes(&mut cluster, copy),
            Event::Product(_, rank, group) => self.run_product(&mut cluster, rank as usize, group as usize),
            Event::Tensor(_, rank, queue) => self.run_tensor(&mut cluster, rank as usize, queue as usize),
        }
        self.clusters[i] = cluster;
    }

    fn run_warp(&mut self, c: usize, w: usize, steps: u64) {
        let mut cluster = std::mem::take(&mut self.clusters[c]);
        let mut warp = std::mem::take(&mut cluster.warps[w]);
        for _ in 0..steps {
            if warp.status != Status::Ready || self.fatal {
                break;
            }
            if self.budget == 0 {
                let here = self.side(cluster.blocks[warp.rank].index, warp.index, None, warp.pc);
                let what = format!("the kernel has not ended after {} instructions of warps", self.options.budget);
                self.report(Fault::Endless, what, None, here, None);
                break;
            }
            self.budget -= 1;
            self.step(&mut cluster, &mut warp);
        }
        if warp.status == Status::Done {
            self.end(&mut cluster, &warp);
        }
        cluster.warps[w] = warp;
        // A warp that ended may be the last one for which the cluster's barrier waits.
        settle_cluster(self, &mut cluster);
        self.clusters[c] = cluster;
    }

    /// Executes one step of a warp.
    fn step(&mut self, cluster: &mut Cluster, warp: &mut Warp) {
        let holds = |warp: &Warp, cond: usize| {
            let values = &warp.regs[cond].values;
            (0..32).fold(0u32, |bits, lane| bits | ((values[lane] & 1) << lane))
        };
        let program = self.program;
        match program.steps[warp.pc as usize] {
            Step::Op(i) => self.execute(cluster, warp, i),
            Step::If { cond, otherwise } => {
                self.condition(cluster, warp, cond);
                let taken = warp.active & holds(warp, cond);
                warp.frames.push(Frame::If { restore: warp.active, other: warp.active & !taken });
                warp.active = taken;
                warp.pc = if taken == 0 { otherwise } else { warp.pc + 1 };
            }
            Step::Else { end } => {
                let Some(Frame::If { other, .. }) = warp.frames.last().copied() else { unreachable_step() };
                warp.active = other;
                warp.pc = if other == 0 { end } else { warp.pc + 1 };
            }
            Step::EndIf { skip } => {
                let Some(Frame::If { restore, .. }) = warp.frames.pop() else { unreachable_step() };
                warp.active = restore;
                warp.pc = if restore == 0 { skip } else { warp.pc + 1 };
            }
            Step::Loop => {
                warp.frames.push(Frame::Loop { restore: warp.active });
                warp.pc += 1;
            }
            Step::EndLoop { start, skip } => {
                if warp.active != 0 {
                    warp.pc = start;
                    return;
                }
                let Some(Frame::Loop { restore }) = warp.frames.pop() else { unreachable_step() };
                warp.active = restore;
                warp.pc = if restore == 0 { skip } else { warp.pc + 1 };
            }
            Step::Break { cond, when, skip } => {
                self.condition(cluster, warp, cond);
                let bits = holds(warp, cond);
                let leave = warp.active & if when { bits } else { !bits };
                warp.active &= !leave;
                for frame in warp.frames.iter_mut().rev() {
                    match frame {
                        Frame::If { restore, other } => {
                            *restore &= !leave;
                            *other &= !leave;
                        }
                        Frame::Loop { .. } => break,
                    }
                }
                warp.pc = if warp.active == 0 { skip } else { warp.pc + 1 };
            }
            Step::Exit => warp.status = Status::Done,
        }
    }

    /// Checks the predicate of a branch like an operand of an instruction.
    fn condition(&mut self, cluster: &Cluster, warp: &mut Warp, cond: usize) {
        self.branch(cluster, warp, cond);
        let missing = warp.active & !warp.regs[cond].defined;
        if missing != 0 && self.options.checks {
            warp.regs[cond].defined |= missing;
            let lane = Some(missing.trailing_zeros());
            let here = self.side(cluster.blocks[warp.rank].index, warp.index, lane, warp.pc);
            let what = "a branch on a truth value that nobody wrote".to_owned();
            self.report(Fault::UninitialisedRegister, what, None, here, None);
        }
    }

    fn execute(&mut self, cluster: &mut Cluster, warp: &mut Warp, i: u32) {
        let program = self.program;
        let op = &program.ops[i as usize];
        warp.last_pc = warp.pc;
        if op.inst.together != Together::Thread && warp.active != FULL {
            let here = self.side(cluster.blocks[warp.rank].index, warp.index, None, warp.pc);
            let what = format!("all lanes execute it together, and only {:#010x} came", warp.active);
            self.report(Fault::Collective, what, None, here, None);
        }
        self.counts[warp.role].executed(op, warp.active);
        if matches!(op.inst.effect, Effect::Write(_) | Effect::Update(_) | Effect::Start | Effect::Signal) {
            self.progress += 1;
        }
        if self.timeline.is_some() {
            self.issue(cluster, warp, op);
        }
        let role = warp.role;
        let (shared, global) = (std::mem::take(&mut self.touches.0), std::mem::take(&mut self.touches.1));
        let mut view = View { world: self, cluster, warp, op, memo: [Memo::default(); 2], shared, global };
        if view.world.options.arithmetic || warp_product(op).is_none() {
            (op.inst.meaning)(&mut view, op);
        } else {
            op.list(0).iter().for_each(|&d| view.set_all(d, &[0; 32]));
        }
        let (mut shared, mut global) = (view.shared, view.global);
        // `ldmatrix` and `stmatrix` access the banks one matrix of eight rows at a time.
        if matches!(op.inst.name, "ldmatrix" | "stmatrix") {
            while shared.len() > MATRIX {
                let rest = shared.split_off(MATRIX);
                self.counts[role].shared(&mut shared);
                shared = rest;
            }
        }
        if !shared.is_empty() {
            self.counts[role].shared(&mut shared);
        }
        if !global.is_empty() {
            self.counts[role].global(&mut global);
        }
        self.touches = (shared, global);
        if op.inst.effect == Effect::Wait {
            self.counts[role].waits += 1;
            if warp.status != Status::Ready {
                self.counts[role].waits_blocked += 1;
                warp.blocked = Some((warp.now, warp.pc));
            }
        }
        warp.pc += 1;
    }

    /// Ends a warp, and its CTA if it was the last.
    fn end(&mut self, cluster: &mut Cluster, warp: &Warp) {
        self.progress += 1;
        let block = cluster.blocks[warp.rank].index;
        let here = self.side(block, warp.index, None, warp.last_pc);
        if warp.retired < warp.products && self.options.checks {
            let issued =
                cluster.blocks[warp.rank].warpgroups[(warp.index / 4) as usize].issued.get(warp.retired as usize);
            let other = issued.map(|access| self.side_of(access));
            let what = "a warp ends and has not waited for its products".to_owned();
            self.report(Fault::Exit, what, None, here.clone(), other);
        }
        if warp.at_cluster != Some(cluster.phase) {
            cluster.absent += 1;
        }
        let state = &mut cluster.blocks[warp.rank];
        state.last.join(&warp.clock);
        state.running -= 1;
        if state.running > 0 || !self.options.checks {
            return;
        }
        let unknown = |access: &&crate::shadow::Access| match access.who {
            Who::Warp { comp, time } => state.last.get(Part::Done, comp) < time,
            Who::Async(completion) => !self.ledger.known(completion, &state.last, Part::Done),
        };
        let unfreed = state.tensor.unfreed();
        let between = state
            .bars
            .iter()
            .find(|(_, bar)| bar.pending < bar.count)
            .map(|(&at, bar)| (at, bar.count, bar.pending, bar.arrived));
        let late = state.peers.iter().chain(&state.reaches).find(unknown).copied();
        if let Some(access) = late {
            let what = "a block ends, and nothing says that this no longer reaches its shared memory".to_owned();
            let other = Some(self.side_of(&access));
            self.report(Fault::Exit, what, None, here.clone(), other);
        }
        if let Some(allocated) = unfreed {
            let other = Some(self.side_of(&allocated));
            let what = "a block ends and has not freed its tensor memory".to_owned();
            self.report(Fault::TensorMemory, what, None, here.clone(), other);
        }
        if let Some((at, count, pending, arrived)) = between {
            let name = self.shared_name(at);
            let what = format!(
                "a block ends in the middle of a phase of mbarrier {name}: {} of {count} arrivals",
                count - pending
            );
            let other = arrived.map(|access| self.side_of(&access));
            self.report(Fault::BarrierCount, what, Some(u64::from(SHARED_BASE + at)), here, other);
        }
    }
}

/// `Program::new` makes steps in matching pairs.
fn unreachable_step() -> ! {
    panic!("bug in fulgurite: steps of a program are not nested")
}
