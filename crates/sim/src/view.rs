//! A warp as the meaning of an instruction sees it: registers, parameters and memory. Synchronisation is in
//! [`crate::meet`], asynchronous work in [`crate::issue`].

use crate::clock::Part;
use crate::finding::Fault;
use crate::meet;
use crate::multiply;
use crate::shadow::{Memo, Toucher};
use crate::world::{
    Cluster, FULL, PARAM_BASE, PARAM_STRIDE, SHARED_BASE, Status, WINDOW, Wait, Warp, World, access_of,
};
use fulgurite_ptx::Number;
use fulgurite_ptx::device::Value;
use fulgurite_ptx::inst::{Class, Op, Reg, Space};
use fulgurite_ptx::machine::{
    Fence, Group, Machine, Mbarrier, Meeting, MemoryAddress, MemoryOrder, Queue, Special, Transfer, lanes,
};
use fulgurite_ptx::product::{Lanes, Product, mma_sync};
use fulgurite_ptx::tcgen05::TensorAction;

/// A warp that executes an instruction.
pub(crate) struct View<'w, 'a> {
    pub world: &'w mut World<'a>,
    pub cluster: &'w mut Cluster,
    pub warp: &'w mut Warp,
    pub op: &'w Op,
    /// Cached results of this instruction's reads and writes.
    pub memo: [Memo; 2],
    /// Accesses of this instruction, for the counters.
    pub shared: Vec<(u32, u32)>,
    pub global: Vec<(u64, u32)>,
}

/// A position in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedAt {
    pub rank: usize,
    pub offset: u32,
}

/// Mask of the bits in the low half of a register.
fn mask(class: Class) -> u32 {
    match class {
        Class::Pred => 1,
        Class::B16 => 0xffff,
        Class::B32 | Class::F32 | Class::B64 => u32::MAX,
    }
}

impl View<'_, '_> {
    pub fn block_index(&self) -> u32 {
        self.cluster.blocks[self.warp.rank].index
    }

    pub fn fault(&mut self, fault: Fault, what: String, lane: Option<u32>, address: Option<u64>) {
        let here = self.world.side(self.block_index(), self.warp.index, lane, self.warp.pc);
        self.world.report(fault, what, address, here, None);
    }

    /// Whether this lane is the first active one, on whose behalf a warp acts once.
    pub fn first(&self, lane: u32) -> bool {
        self.warp.active.trailing_zeros() == lane
    }

    /// CTA and offset of bytes in shared memory, if they are in bounds.
    pub fn resolve(&mut self, lane: u32, at: MemoryAddress, bytes: u64) -> Option<SharedAt> {
        let rank = usize::try_from(at.address >> WINDOW).ok().filter(|&rank| match at.space {
            Space::Cluster => rank < self.cluster.blocks.len(),
            _ => rank == self.warp.rank,
        });
        let offset = (at.address & ((1 << WINDOW) - 1)).checked_sub(u64::from(SHARED_BASE));
        let size = u64::from(self.world.program.kernel.shared_bytes);
        match (rank, offset) {
            (Some(rank), Some(offset)) if offset + bytes <= size => Some(SharedAt { rank, offset: offset as u32 }),
            _ => {
                let what = format!("{bytes} bytes of shared memory, which has {size} from {SHARED_BASE:#x} on");
                self.fault(Fault::OutOfBounds, what, Some(lane), Some(at.address));
                None
            }
        }
    }

    fn aligned(&mut self, lane: u32, address: u64, bytes: u64) -> bool {
        if bytes > 0 && bytes.is_power_of_two() && !address.is_multiple_of(bytes) {
            self.fault(
                Fault::Misaligned,
                format!("{bytes} bytes at an address that is no multiple of that"),
                Some(lane),
                Some(address),
            );
            return false;
        }
        true
    }

    /// Reports threads that access the bytes of a live mbarrier.
    fn spares_barriers(&mut self, lane: u32, at: SharedAt, bytes: u32) {
        let bars = &self.cluster.blocks[at.rank].bars;
        if bars.is_empty() {
            return;
        }
        let near =
            bars.range(at.offset.saturating_sub(7)..at.offset + bytes).next().map(|(&offset, bar)| (offset, bar.made));
        if let Some((offset, made)) = near {
            let here = self.world.side(self.block_index(), self.warp.index, Some(lane), self.warp.pc);
            let other = Some(self.world.side_of(&made));
            let what = format!("mbarrier {} is touched as plain memory", self.world.shared_name(offset));
            self.world.report(Fault::NotABarrier, what, Some(u64::from(SHARED_BASE + at.offset)), here, other);
        }
    }

    fn check_shared(&mut self, lane: u32, at: SharedAt, bytes: u32, strong: bool, writes: bool) {
        let far = at.rank != self.warp.rank;
        if far && self.cluster.blocks[at.rank].running == 0 {
            self.fault(
                Fault::Exit,
                "shared memory of a block that has ended".into(),
                Some(lane),
                Some(u64::from(at.offset)),
            );
        }
        self.spares_barriers(lane, at, bytes);
        let access = access_of(self.warp, self.block_index(), self.warp.pc, strong);
        if far {
            self.cluster.reached(at.rank, access);
        }
        let clocks = [&self.warp.clock];
        let mut t = Toucher::new(&clocks, access, Part::AsyncShared);
        let memo = &mut self.memo[usize::from(writes)];
        t.memo = *memo;
        let shadow = &mut self.cluster.blocks[at.rank].shadow;
        let unwritten = if writes { None } else { shadow.unwritten(at.offset.into(), bytes.into()) };
        let ledger = &mut self.world.ledger;
        let conflict = if writes {
            shadow.write(ledger, &mut t, at.offset.into(), bytes.into())
        } else {
            shadow.read(ledger, &mut t, at.offset.into(), bytes.into())
        };
        *memo = t.memo;
        if let Some(conflict) = conflict {
            self.world.conflict(conflict, conflict.offset + u64::from(SHARED_BASE), &access, Some(lane), writes);
        }
        if let Some(offset) = unwritten {
            let what = "shared memory is read that nobody wrote".to_owned();
            self.fault(Fault::Uninitialised, what, Some(lane), Some(offset + u64::from(SHARED_BASE)));
        }
    }

    fn check_global(&mut self, lane: u32, address: u64, bytes: u32, strong: bool, writes: bool) {
        let access = access_of(self.warp, self.block_index(), self.warp.pc, strong);
        let clocks = [&self.warp.clock];
        let mut t = Toucher::new(&clocks, access, Part::AsyncGlobal);
        let memo = &mut self.memo[usize::from(writes)];
        t.memo = *memo;
        let Some((allocation, offset)) = self.world.memory.find(address, bytes.into()) else { return };
        let unwritten = if writes { None } else { allocation.shadow.unwritten(offset, bytes.into()) };
        let ledger = &mut self.world.ledger;
        let conflict = if writes {
            allocation.shadow.write(ledger, &mut t, offset, bytes.into())
        } else {
            allocation.shadow.read(ledger, &mut t, offset, bytes.into())
        };
        *memo = t.memo;
        let base = allocation.address;
        if let Some(conflict) = conflict {
            self.world.conflict(conflict, conflict.offset + base, &access, Some(lane), writes);
        }
        if let Some(offset) = unwritten {
            let what = "global memory is read that nobody wrote".to_owned();
            self.fault(Fault::Uninitialised, what, Some(lane), Some(offset + base));
        }
    }

    fn outside(&mut self, lane: u32, at: MemoryAddress, bytes: usize) {
        self.fault(Fault::OutOfBounds, format!("{bytes} bytes of {:?} memory", at.space), Some(lane), Some(at.address));
    }

    /// Acquires the knowledge released at an address, before a read.
    fn acquire(&mut self, address: u64, order: MemoryOrder) {
        if order == MemoryOrder::Weak {
            return;
        }
        let Some(released) = self.world.words.get(&address) else { return };
        match order {
            MemoryOrder::Acquire(_) | MemoryOrder::AcquireRelease(_) => self.warp.clock.join(released),
            MemoryOrder::Relaxed(_) | MemoryOrder::Release(_) => {
                let cluster = self.cluster.id;
                self.warp.seen.get_or_insert_with(|| crate::clock::Clock::new(cluster)).join(released);
            }
            MemoryOrder::Weak => unreachable!("bug in fulgurite: a weak access acquires nothing"),
        }
    }

    /// Releases knowledge at an address, after a write. An atomic update continues the earlier release sequence.
    fn release(&mut self, address: u64, order: MemoryOrder, goes_on: bool) {
        let released = match order {
            MemoryOrder::Weak => return,
            MemoryOrder::Release(_) | MemoryOrder::AcquireRelease(_) => Some(self.warp.clock.clone()),
            MemoryOrder::Relaxed(_) | MemoryOrder::Acquire(_) => self.warp.released.clone(),
        };
        match (released, goes_on) {
            (Some(released), true) => {
                self.world.words.entry(address).or_insert_with(|| released.clone()).join(&released)
            }
            (Some(released), false) => {
                self.world.words.insert(address, released);
            }
            (None, true) => {}
            (None, false) => {
                self.world.words.remove(&address);
            }
        }
        self.warp.tick();
    }

    #[cold]
    fn odd_read(&mut self, lane: u32, reg: Reg, slot: usize) {
        let register = &mut self.warp.regs[slot];
        let in_flight = register.written_by > self.warp.retired;
        if register.defined >> lane & 1 == 0 {
            register.defined |= 1 << lane;
            if !in_flight {
                let what = format!("register {} of class {:?} is read before it is written", reg.index, reg.class);
                return self.fault(Fault::UninitialisedRegister, what, Some(lane), None);
            }
        }
        if in_flight {
            let product = self.warp.regs[slot].written_by - 1;
            self.in_flight(lane, product, "an accumulator is read before its product was waited for");
        }
    }

    #[cold]
    fn odd_write(&mut self, lane: u32, slot: usize) {
        let register = &self.warp.regs[slot];
        let product = register.written_by.max(register.read_by) - 1;
        self.in_flight(lane, product, "a register of a product is written before the product was waited for");
    }

    fn in_flight(&mut self, lane: u32, product: u32, what: &str) {
        let here = self.world.side(self.block_index(), self.warp.index, Some(lane), self.warp.pc);
        let group = &self.cluster.blocks[self.warp.rank].warpgroups[(self.warp.index / 4) as usize];
        let other = group.issued.get(product as usize).map(|access| self.world.side_of(access));
        self.world.report(Fault::FragmentInFlight, what.to_owned(), None, here, other);
    }
}

impl Machine for View<'_, '_> {
    fn active(&self) -> u32 {
        self.warp.active
    }

    fn get(&mut self, lane: u32, reg: Reg) -> u64 {
        let slot = self.world.program.slot(reg);
        let register = &mut self.warp.regs[slot];
        register.touched = self.warp.fences;
        if register.defined >> lane & 1 == 0 || register.written_by > self.warp.retired {
            self.odd_read(lane, reg, slot);
        }
        let low = u64::from(self.warp.regs[slot].values[lane as usize & 31]);
        match reg.class {
            Class::B64 => low | u64::from(self.warp.high[reg.index as usize][lane as usize & 31]) << 32,
            _ => low,
        }
    }

    fn set(&mut self, lane: u32, reg: Reg, bits: u64) {
        let slot = self.world.program.slot(reg);
        let register = &mut self.warp.regs[slot];
        register.touched = self.warp.fences;
        if register.written_by.max(register.read_by) > self.warp.retired {
            self.odd_write(lane, slot);
        }
        let register = &mut self.warp.regs[slot];
        register.defined |= 1 << lane;
        register.values[lane as usize & 31] = bits as u32 & mask(reg.class);
        if reg.class == Class::B64 {
            self.warp.high[reg.index as usize][lane as usize & 31] = (bits >> 32) as u32;
        }
    }

    fn get_all(&mut self, reg: Reg, bits: &mut [u64; 32]) {
        let slot = self.world.program.slot(reg);
        let register = &mut self.warp.regs[slot];
        if self.warp.active & !register.defined != 0 || register.written_by > self.warp.retired {
            return lanes(self.warp.active).for_each(|lane| bits[lane as usize] = self.get(lane, reg));
        }
        register.touched = self.warp.fences;
        bits.iter_mut().zip(&register.values).for_each(|(x, low)| *x = u64::from(*low));
        if reg.class == Class::B64 {
            let high = &self.warp.high[reg.index as usize];
            bits.iter_mut().zip(high).for_each(|(x, high)| *x |= u64::from(*high) << 32);
        }
    }

    fn set_all(&mut self, reg: Reg, bits: &[u64; 32]) {
        let slot = self.world.program.slot(reg);
        let register = &mut self.warp.regs[slot];
        let in_flight = register.written_by.max(register.read_by) > self.warp.retired;
        if self.warp.active != FULL || in_flight || reg.class == Class::B64 {
            return lanes(self.warp.active).for_each(|lane| self.set(lane, reg, bits[lane as usize]));
        }
        register.touched = self.warp.fences;
        register.defined = FULL;
        let mask = mask(reg.class);
        register.values.iter_mut().zip(bits).for_each(|(low, bits)| *low = *bits as u32 & mask);
    }

    fn special(&mut self, lane: u32, which: Special) -> u64 {
        let block = &self.cluster.blocks[self.warp.rank];
        let kernel = &self.world.program.kernel;
        u64::from(match which {
            Special::Thread => self.warp.index * 32 + lane,
            Special::Lane => lane,
            Special::Cta => block.at[0],
            Special::BlockY => block.at[1],
            Special::BlockZ => block.at[2],
            Special::Blocks => self.world.grid[0],
            Special::ClusterRank => self.warp.rank as u32,
            Special::ClusterSize => kernel.cluster,
            Special::Cluster => block.at[0] / kernel.cluster,
            Special::Clusters => self.world.grid[0] / kernel.cluster,
            Special::Multiprocessor => block.index % self.world.architecture.arch.sms,
            Special::Clock => self.world.now as u32,
            Special::Time | Special::WideClock => return self.world.now,
            Special::LanesBelow => (1u32 << (lane & 31)) - 1,
        })
    }

    fn parameter(&mut self, number: u32, offset: i32, bytes: &mut [u8]) {
        let whole = match self.world.args.get(number as usize) {
            Some(Value::U32(x)) => x.to_le_bytes().to_vec(),
            Some(Value::F32(x)) => x.to_le_bytes().to_vec(),
            Some(Value::U64(x)) => x.to_le_bytes().to_vec(),
            Some(Value::Pointer(span)) => span.address().to_le_bytes().to_vec(),
            _ => Vec::new(),
        };
        let start = offset.max(0) as usize;
        match whole.get(start..start + bytes.len()) {
            Some(part) => bytes.copy_from_slice(part),
            None => {
                let what = format!(
                    "{} bytes at offset {offset} of parameter {number}, which has {}",
                    bytes.len(),
                    whole.len()
                );
                self.fault(Fault::OutOfBounds, what, None, None);
            }
        }
    }

    fn parameter_address(&mut self, number: u32) -> u64 {
        PARAM_BASE + u64::from(number) * PARAM_STRIDE
    }

    fn shared_base(&mut self) -> u32 {
        SHARED_BASE | (self.warp.rank as u32) << WINDOW
    }

    fn peer(&mut self, shared: u32, rank: u32) -> u32 {
        if rank as usize >= self.cluster.blocks.len() {
            let what = format!("CTA {rank} of a cluster of {}", self.cluster.blocks.len());
            self.fault(Fault::Operand, what, None, Some(shared.into()));
            return shared;
        }
        (shared & ((1 << WINDOW) - 1)) | rank << WINDOW
    }

    fn load(&mut self, lane: u32, at: MemoryAddress, order: MemoryOrder, bytes: &mut [u8]) {
        let n = bytes.len() as u32;
        if !self.aligned(lane, at.address, n.into()) {
            return;
        }
        let strong = order != MemoryOrder::Weak;
        match at.space {
            Space::Global | Space::Param => {
                self.acquire(at.address, order);
                match self.world.memory.find(at.address, n.into()) {
                    Some((allocation, offset)) => {
                        bytes.copy_from_slice(&allocation.bytes[offset as usize..offset as usize + bytes.len()]);
                    }
                    None => return self.outside(lane, at, bytes.len()),
                }
                self.global.push((at.address, n));
                if self.world.options.checks {
                    self.check_global(lane, at.address, n, strong, false);
                }
            }
            Space::Shared | Space::Cluster => {
                let Some(there) = self.resolve(lane, at, n.into()) else { return };
                let start = there.offset as usize;
                bytes.copy_from_slice(&self.cluster.blocks[there.rank].shared[start..start + bytes.len()]);
                self.shared.push((there.offset, n));
                if self.world.options.checks {
                    self.check_shared(lane, there, n, strong, false);
                }
            }
        }
    }

    fn store(&mut self, lane: u32, at: MemoryAddress, order: MemoryOrder, bytes: &[u8]) {
        let n = bytes.len() as u32;
        if !self.aligned(lane, at.address, n.into()) {
            return;
        }
        let strong = order != MemoryOrder::Weak;
        match at.space {
            Space::Global | Space::Param => {
                match self.world.memory.find(at.address, n.into()) {
                    Some((allocation, offset)) => {
                        allocation.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
                        allocation.shadow.set_written(offset, n.into());
                    }
                    None => return self.outside(lane, at, bytes.len()),
                }
                self.global.push((at.address, n));
                if self.world.options.checks {
                    self.check_global(lane, at.address, n, strong, true);
                }
                self.release(at.address, order, false);
            }
            Space::Shared | Space::Cluster => {
                let Some(there) = self.resolve(lane, at, n.into()) else { return };
                let start = there.offset as usize;
                self.cluster.blocks[there.rank].shared[start..start + bytes.len()].copy_from_slice(bytes);
                self.shared.push((there.offset, n));
                if self.world.options.checks {
                    self.check_shared(lane, there, n, strong, true);
                }
            }
        }
    }

    fn update(
        &mut self,
        lane: u32,
        at: MemoryAddress,
        order: MemoryOrder,
        bytes: u32,
        change: &mut dyn FnMut(u64) -> u64,
    ) -> u64 {
        let n = bytes.min(8) as usize;
        let mut word = [0; 8];
        if !self.aligned(lane, at.address, n as u64) {
            return 0;
        }
        let bytes = match at.space {
            Space::Global | Space::Param => match self.world.memory.find(at.address, n as u64) {
                Some((allocation, offset)) => &mut allocation.bytes[offset as usize..offset as usize + n],
                None => {
                    self.outside(lane, at, n);
                    return 0;
                }
            },
            Space::Shared | Space::Cluster => {
                let Some(there) = self.resolve(lane, at, n as u64) else { return 0 };
                let start = there.offset as usize;
                &mut self.cluster.blocks[there.rank].shared[start..start + n]
            }
        };
        word[..n].copy_from_slice(bytes);
        let old = u64::from_le_bytes(word);
        bytes.copy_from_slice(&change(old).to_le_bytes()[..n]);
        let is_global = matches!(at.space, Space::Global | Space::Param);
        if is_global {
            self.acquire(at.address, order);
            self.global.push((at.address, n as u32));
            if self.world.options.checks {
                if let Some((allocation, offset)) = self.world.memory.find(at.address, n as u64)
                    && allocation.shadow.unwritten(offset, n as u64).is_some()
                {
                    let what = "global memory is read that nobody wrote".to_owned();
                    self.fault(Fault::Uninitialised, what, Some(lane), Some(at.address));
                }
                self.check_global(lane, at.address, n as u32, true, true);
            }
            self.release(at.address, order, true);
        } else if let Some(there) = self.resolve(lane, at, n as u64) {
            self.shared.push((there.offset, n as u32));
            if self.world.options.checks {
                self.check_shared(lane, there, n as u32, true, true);
            }
        }
        old
    }

    fn mbarrier(&mut self, lane: u32, at: MemoryAddress, what: Mbarrier) {
        meet::mbarrier(self, lane, at, what);
    }
    fn mbarrier_done(&mut self, lane: u32, at: MemoryAddress, parity: u32, order: MemoryOrder) -> bool {
        meet::mbarrier_done(self, lane, at, parity, order)
    }
    fn transfer(&mut self, lane: u32, what: Transfer) {
        self.issue_copy(lane, what);
    }
    fn product(&mut self, what: Product) {
        self.issue_product(what);
    }
    fn warp_product(&mut self, numbers: [Number; 3], [a, b, c]: [&[Lanes]; 3]) -> Vec<Lanes> {
        multiply::of_warp(numbers, [a, b, c]).unwrap_or_else(|| mma_sync(numbers, a, b, c))
    }
    fn tensor(&mut self, lane: u32, what: TensorAction) {
        self.act_on_tensor(lane, what);
    }
    fn tensor_load(&mut self, from: &[u32; 32], to: &[Reg]) {
        self.load_columns(from, to);
    }
    fn tensor_store(&mut self, to: &[u32; 32], from: &[Reg]) {
        self.store_columns(to, from);
    }
    fn group(&mut self, lane: u32, queue: Queue, what: Group) {
        self.issue_group(lane, queue, what);
    }
    fn fence(&mut self, lane: u32, what: Fence) {
        if self.first(lane) {
            meet::fence(self, what);
        }
    }
    fn meet(&mut self, what: Meeting) {
        meet::meet(self, what);
    }
    fn registers(&mut self, count: u32, more: bool) {
        meet::registers(self, count, more);
    }
    fn grid(&mut self, _wait: bool) {
        // Launches run one after another, so the previous grid is done. The guide lists the errors that this hides.
    }
    fn cancel(&mut self, lane: u32, to: MemoryAddress, bar: MemoryAddress) {
        self.cancel_cluster(lane, to, bar);
    }
    fn refused(&mut self, _lane: u32) {
        self.saw_no_work();
    }
    fn sleep(&mut self) {
        self.warp.status = Status::Blocked(Wait::Sleep);
    }
    fn trap(&mut self, lane: u32) {
        self.fault(Fault::Trap, "the kernel gives up".into(), Some(lane), None);
    }
}
