//! Starts asynchronous work: copies, products, and their groups.

use crate::copy::{AfterCopies, Copy, End, Tells, box_runs, key};
use crate::finding::Fault;
use crate::mbarrier::BarAt;
use crate::options::Interleaving;
use crate::shadow::{Access, Proxy, Who};
use crate::timeline::Multiply;
use crate::view::View;
use crate::warpgroup::Pending;
use crate::world::{Event, Status, Wait, access_of};
use fulgurite_ptx::Swizzle;
use fulgurite_ptx::inst::Space;
use fulgurite_ptx::machine::{Done, Group, MemoryAddress, Queue, Transfer};
use fulgurite_ptx::product::{Left, Product};
use fulgurite_ptx::tcgen05::CtaGroup;
use std::rc::Rc;

/// Parts of a copy that is about to start.
struct Ends {
    from: End,
    to: End,
    bytes: u32,
    proxy: Proxy,
    boxed: bool,
}

impl View<'_, '_> {
    fn refuse(&mut self, lane: u32, what: String, address: u64) {
        self.fault(Fault::Operand, what, Some(lane), Some(address));
    }

    /// Ranks of the CTAs that a copy reaches.
    pub fn ranks(&mut self, lane: u32, own: usize, multicast: Option<u16>) -> Vec<usize> {
        let size = self.cluster.blocks.len();
        match multicast {
            None => vec![own],
            Some(mask) => {
                if u32::from(mask) >> size != 0 || mask == 0 {
                    self.refuse(lane, format!("CTAs {mask:#b} of a cluster of {size}"), 0);
                }
                (0..size).filter(|rank| mask >> rank & 1 == 1).collect()
            }
        }
    }

    /// Shared memory as one end of a copy; all lines that the swizzle may reach must be in bounds.
    fn shared_end(
        &mut self,
        lane: u32,
        at: MemoryAddress,
        bytes: u32,
        swizzle: Swizzle,
        multicast: Option<u16>,
    ) -> Option<End> {
        let there = self.resolve(lane, at, bytes.into())?;
        let end = (there.offset + bytes).next_multiple_of(swizzle.line());
        if swizzle != Swizzle::None && end > self.world.program.kernel.shared_bytes {
            let what = format!("{bytes} bytes of shared memory in lines of {}", swizzle.line());
            self.fault(Fault::OutOfBounds, what, Some(lane), Some(at.address));
            return None;
        }
        let ranks = self.ranks(lane, there.rank, multicast);
        Some(End::Shared { ranks, offset: there.offset, swizzle })
    }

    fn place(&mut self, lane: u32, at: MemoryAddress, bytes: u32, multicast: Option<u16>) -> Option<End> {
        match at.space {
            Space::Global | Space::Param => Some(End::Global(vec![(0, bytes, at.address)])),
            Space::Shared | Space::Cluster => self.shared_end(lane, at, bytes, Swizzle::None, multicast),
        }
    }

    /// Starts a copy.
    pub fn issue_copy(&mut self, lane: u32, what: Transfer) {
        match what {
            Transfer::Prefetch => {}
            Transfer::Bytes { to, from, bytes, padded, reduce, multicast, done } => {
                let bulk = !matches!(done, Done::Group(Queue::Copy));
                let unit = if bulk { 16 } else { padded.max(1) };
                let wrong =
                    [to.address, from.address, padded.into()].into_iter().find(|x| !x.is_multiple_of(unit.into()));
                if let Some(wrong) = wrong {
                    let text = format!("a copy of {padded} bytes from {:#x} to {:#x}", from.address, to.address);
                    self.fault(
                        Fault::Misaligned,
                        format!("{text}, allowed: multiples of {unit}"),
                        Some(lane),
                        Some(wrong),
                    );
                    return;
                }
                if bytes > padded {
                    return self.refuse(lane, format!("{bytes} bytes of {padded} are read"), from.address);
                }
                let (Some(source), Some(to)) =
                    (self.place(lane, from, bytes, None), self.place(lane, to, padded, multicast))
                else {
                    return;
                };
                let proxy = if bulk { Proxy::Async } else { Proxy::Generic };
                self.start(
                    lane,
                    Ends { from: source, to, bytes: padded, proxy, boxed: false },
                    Vec::new(),
                    reduce,
                    (done, CtaGroup::Single),
                );
            }
            Transfer::Words { to, data, reduce, done } => {
                let bytes = data.len() as u32;
                let Some(to) = self.place(lane, to, bytes, None) else { return };
                let ends = Ends { from: End::Words, to, bytes, proxy: Proxy::Async, boxed: false };
                self.start(lane, ends, data, reduce, (done, CtaGroup::Single));
            }
            Transfer::Box { map, coordinates, tile, inward, reduce, multicast, group, done } => {
                let Some((shape, tensor)) = self.world.tensor_map(map) else {
                    return self.refuse(lane, "no tensor map".into(), map);
                };
                if coordinates.len() != shape.extent.len() {
                    let text = format!("{} coordinates for {} axes", coordinates.len(), shape.extent.len());
                    return self.refuse(lane, text, map);
                }
                let runs = box_runs(shape, tensor, &coordinates, inward);
                let bytes = shape.extent.iter().product::<u32>() * shape.number.bytes();
                let (swizzle, number) = (shape.swizzle, shape.number.name());
                let inner = shape.extent[0] * shape.number.bytes();
                if swizzle != Swizzle::None && inner > swizzle.line() {
                    let text = format!("rows of {inner} bytes in lines of {}", swizzle.line());
                    return self.refuse(lane, text, map);
                }
                if !tile.address.is_multiple_of(128) {
                    let text = "a tile whose address is no multiple of 128".to_owned();
                    self.fault(Fault::Misaligned, text, Some(lane), Some(tile.address));
                    return;
                }
                let Some(shared) = self.shared_end(lane, tile, bytes, swizzle, multicast) else { return };
                let global = End::Global(runs);
                let (from, to) = if inward { (global, shared) } else { (shared, global) };
                let ends = Ends { from, to, bytes, proxy: Proxy::Async, boxed: true };
                self.start(lane, ends, Vec::new(), reduce.map(|way| (way, number)), (done, group));
            }
        }
    }

    fn start(
        &mut self,
        lane: u32,
        ends: Ends,
        data: Vec<u8>,
        reduce: Option<(fulgurite_ptx::machine::Reduction, &'static str)>,
        (done, group): (Done, CtaGroup),
    ) {
        let issued = access_of(self.warp, self.block_index(), self.warp.pc, false);
        let start = Rc::new(self.warp.clock.clone());
        let read_done = self.world.ledger.completion();
        let count = match &ends.to {
            End::Shared { ranks, .. } => ranks.len(),
            End::Global(_) | End::Words => 1,
        };
        let write_done: Vec<u32> = (0..count).map(|_| self.world.ledger.completion()).collect();
        let tells = match done {
            Done::Mbarrier(bar) => {
                let Some(there) = self.resolve(lane, bar, 8) else { return };
                let each = group == CtaGroup::Single && matches!(ends.to, End::Shared { .. });
                // A multicast with an empty mask goes nowhere.
                if let End::Shared { ranks, .. } = &ends.to
                    && let Some(first) = ranks.first()
                    && !ranks.iter().any(|&rank| group.ranks(rank).contains(&there.rank))
                {
                    let allowed = if each { "that CTA" } else { "that CTA or the other one of its pair" };
                    let what = format!(
                        "a copy to CTA {first} of the cluster, with an mbarrier in CTA {}, allowed: {allowed}",
                        there.rank
                    );
                    return self.refuse(lane, what, bar.address);
                }
                Tells::Bar { rank: there.rank, offset: there.offset, each }
            }
            Done::Group(queue) => Tells::Group(queue),
            Done::Nothing => Tells::Nobody,
        };
        let mut phases = Vec::new();
        if let Tells::Bar { offset, rank, each } = tells {
            let to: Vec<usize> = match &ends.to {
                End::Shared { ranks, .. } if each => ranks.clone(),
                _ => vec![rank],
            };
            if let (false, Some(&written)) = (each, write_done.first()) {
                // The mbarrier must outlive the copy.
                let access = Access { who: Who::Async(written), ..issued };
                self.cluster.blocks[rank].reaches.push(access);
            }
            phases = to.iter().map(|&rank| self.world.bar_phase(self.cluster, BarAt { rank, offset })).collect();
        }
        // Shared memory must outlive all copies that read or write it.
        for (end, completions) in [(&ends.from, std::slice::from_ref(&read_done)), (&ends.to, &write_done[..])] {
            if let End::Shared { ranks, .. } = end {
                for (&rank, &completion) in ranks.iter().zip(completions) {
                    self.cluster.blocks[rank].reaches.push(Access { who: Who::Async(completion), ..issued });
                }
            }
        }
        let copy = Copy {
            from: ends.from,
            to: ends.to,
            bytes: ends.bytes,
            reduce,
            tells,
            boxed: ends.boxed,
            proxy: ends.proxy,
            cluster: self.cluster.id,
            lane,
            issued,
            start,
            read_done,
            write_done,
            phases,
            data,
            marks: Vec::new(),
            read: false,
            done: false,
        };
        self.world.count_copy(self.warp.role, &copy);
        self.cluster.pending += 1;
        let (tells, now) = (copy.tells, self.warp.now);
        let id = self.world.start_copy(copy, now);
        if let Tells::Group(queue) = tells {
            self.warp.queues.entry(key(lane, queue)).or_default().open.push(id);
        }
        self.world.progress += 1;
        self.warp.tick();
    }

    /// Arrives once when all earlier `cp.async` of the lane are complete.
    pub fn arrive_after(&mut self, lane: u32, at: BarAt, expected: bool) {
        let copies: Vec<u32> = match self.warp.queues.get(&key(lane, Queue::Copy)) {
            Some(queue) => queue.groups.iter().flatten().chain(&queue.open).copied().collect(),
            None => Vec::new(),
        };
        if !expected && let Some(bar) = self.cluster.blocks[at.rank].bars.get_mut(&at.offset) {
            bar.pending += 1;
        }
        let access = access_of(self.warp, self.block_index(), self.warp.pc, true);
        let start = Rc::new(self.warp.clock.clone());
        self.world.after_copies.push(AfterCopies { cluster: self.cluster.id, at, copies, access, lane, start });
        self.world.arrive_after_copies(self.cluster);
    }

    /// Starts a product, or joins the one that another warp of the warpgroup started.
    pub fn issue_product(&mut self, what: Product) {
        let (rank, index) = (self.warp.rank, self.warp.index);
        let group = (index / 4) as usize;
        let number = self.warp.products;
        self.warp.products += 1;
        let block = self.block_index();
        let pc = self.warp.pc;
        let issued = access_of(self.warp, block, pc, false);
        let left: &[fulgurite_ptx::inst::Reg] = match &what.a {
            Left::Regs(regs) => regs,
            Left::Tile(..) => &[],
        };
        let mut touched = self.warp.fences == 0;
        for (&reg, writes) in what.d.iter().map(|r| (r, true)).chain(left.iter().map(|r| (r, false))) {
            let register = &mut self.warp.regs[self.world.program.slot(reg)];
            // Accumulators may pass from one product to the next without a fence; registers that a thread accessed may
            // not.
            touched |= register.touched == self.warp.fences;
            if writes {
                register.written_by = number + 1;
            } else {
                register.read_by = number + 1;
            }
        }
        if touched {
            let text = "registers of a product were touched, and no wgmma.fence follows".to_owned();
            self.fault(Fault::MissingProductFence, text, None, None);
        }
        if (index / 4 + 1) * 128 > self.world.program.kernel.threads {
            self.fault(Fault::Collective, "a product of a warpgroup that has fewer than four warps".into(), None, None);
        }
        let start = Rc::new(self.warp.clock.clone());
        let state = &mut self.cluster.blocks[rank].warpgroups[group];
        let place = number.saturating_sub(state.done) as usize;
        if place >= state.pending.len() {
            let read_done = self.world.ledger.completion();
            let starts = [const { None }; 4];
            state.pending.push_back(Pending { what, pc, joined: 0, starts, issued, read_done });
            state.completions.push(read_done);
            state.issued.push(issued);
        } else if state.pending[place].pc != pc {
            let other = state.pending[place].issued;
            let here = self.world.side_of(&issued);
            let other = Some(self.world.side_of(&other));
            let text = "warps of a warpgroup start different products".to_owned();
            self.world.report(Fault::Collective, text, None, here, other);
        }
        let state = &mut self.cluster.blocks[rank].warpgroups[group];
        let Some(pending) = state.pending.get_mut(place) else { return };
        pending.joined |= 1 << (index % 4);
        pending.starts[(index % 4) as usize] = Some(start);
        let (whole, n, number) = (pending.joined == 0xf, pending.what.n, pending.what.numbers[1]);
        let in_memory = matches!(pending.what.a, Left::Tile(..));
        let reads = Access { who: Who::Async(pending.read_done), ..issued };
        self.warp.tick();
        self.world.progress += 1;
        if whole {
            self.cluster.blocks[rank].reaches.push(reads);
            self.cluster.pending += 1;
            let event = Event::Product(self.cluster.id, rank as u32, group as u32);
            match self.world.options.order {
                Interleaving::Random => self.world.later(event),
                Interleaving::Timed => {
                    let flops = 2 * 64 * u64::from(n) * u64::from(number.depth());
                    let operand_bytes = u64::from(n) * 32 + if in_memory { 2048 } else { 0 };
                    let what = Multiply { number, flops, operand_bytes };
                    let time = self.world.product_time(block, what, self.warp.now, pc);
                    self.world.at(time, event);
                }
            }
        }
    }

    /// Commits or waits for groups of a queue.
    pub fn issue_group(&mut self, lane: u32, queue: Queue, what: Group) {
        if queue == Queue::Product {
            if self.first(lane) {
                self.product_group(what);
            }
            return;
        }
        let lanes = self.warp.queues.entry(key(lane, queue)).or_default();
        let wait = match what {
            Group::Commit => {
                let open = std::mem::take(&mut lanes.open);
                lanes.groups.push_back(open);
                return;
            }
            Group::WaitAll => {
                let open = std::mem::take(&mut lanes.open);
                lanes.groups.push_back(open);
                (lane, queue, 0, false)
            }
            Group::Wait(left) => (lane, queue, left, false),
            Group::WaitRead(left) => (lane, queue, left, true),
        };
        if let Status::Blocked(Wait::Groups(list)) = &mut self.warp.status {
            list.push(wait);
        } else if self.world.groups_done(self.warp, &[wait]) {
            self.world.retire_groups(self.warp, &[wait]);
        } else {
            self.warp.status = Status::Blocked(Wait::Groups(vec![wait]));
        }
    }

    fn product_group(&mut self, what: Group) {
        let block = &self.cluster.blocks[self.warp.rank];
        let left = match what {
            Group::Commit => {
                self.warp.product_groups.push_back(self.warp.products);
                return;
            }
            Group::Wait(left) | Group::WaitRead(left) => left as usize,
            Group::WaitAll => 0,
        };
        let groups = &self.warp.product_groups;
        let Some(&target) = groups.len().checked_sub(left + 1).and_then(|i| groups.get(i)) else { return };
        if block.warpgroups[(self.warp.index / 4) as usize].done >= target {
            self.world.retire_products(block, self.warp, target);
        } else {
            self.warp.status = Status::Blocked(Wait::Products(target));
        }
    }
}
