//! Tensor memory of a CTA: its cells, who accessed them last, and the queues of products into it.
//!
//! A warp accesses all 32 lanes of its quarter at once, so the detector keeps one record for each quarter of a column.
//! Loads, stores and products are asynchronous: each has a completion, which becomes known to the threads that wait for
//! it. Products of one thread are numbered, and a commit tells the number of the last one before it.

use crate::clock::{Clock, Comp, Part};
use crate::finding::Fault;
use crate::mbarrier::{BarAt, User};
use crate::multiply::{Matrix, Rows};
use crate::options::{Interleaving, TensorOrder};
use crate::shadow::{Access, Conflict, Proxy, Shadow, Toucher, Who};
use crate::tensor_pair::{PairStep, Waiting};
use crate::tensor_scales::{ScaleBlock, ScaleCopy};
use crate::timeline::Multiply;
use crate::view::View;
use crate::warpgroup::Reader;
use crate::world::{Cluster, Cta, Event, SHARED_BASE, Snapshot, World, access_of};
use fulgurite_ptx::inst::Reg;
use fulgurite_ptx::machine::{Machine, MemoryAddress, lanes};
use fulgurite_ptx::product::Major;
use fulgurite_ptx::tcgen05::{
    COLUMNS, CtaGroup, FenceSide, LANES, ProductShape, TensorAction, TensorLeft, TensorProduct, WARP_LANES, descriptor,
    lane_and_column,
};
use fulgurite_ptx::{Number, model};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

/// Quarters of the lanes, one for each warp of a warpgroup.
const QUARTERS: u32 = LANES / WARP_LANES;

/// Work of a queue that is still to be done.
pub(crate) enum Work {
    Multiply { what: TensorProduct, start: Snapshot, completion: u32, issued: Access },
    CopyScales { what: ScaleCopy, start: Snapshot, completion: u32, issued: Access },
    Commit { bars: Vec<BarAt>, told: Snapshot, issued: Access, lane: u32 },
}

/// Products and commits of one thread, in order.
struct TensorQueue {
    warp: u32,
    lane: u32,
    /// Its clock counts the products that are complete.
    comp: Comp,
    pending: VecDeque<Work>,
    /// Number of products and copies started.
    started: u32,
    /// Copies of scales, which run before the products that start later: their count.
    copies: (Comp, u32),
    /// Products into one accumulator run in order: their count, by address and shape.
    chains: HashMap<(u32, u32), (Comp, u32)>,
    /// Cycle at which the last product ends.
    latest: u64,
}

/// Columns that the CTA holds.
struct Held {
    first: u32,
    columns: u32,
    by: Access,
}

/// Tensor memory of a CTA.
#[derive(Default)]
pub(crate) struct TensorMemory {
    /// Cells by lane and column; empty until columns are allocated.
    cells: Vec<u32>,
    shadow: Option<Shadow>,
    held: Vec<Held>,
    /// Size of the last allocation.
    last: Option<u32>,
    relinquished: Option<Access>,
    queues: Vec<TensorQueue>,
    /// Blocks of scales that were copied, by their first column.
    pub scales: BTreeMap<u32, ScaleBlock>,
    /// A warp that waits for the other CTA of the pair to do the same.
    pub waiting: Option<Waiting>,
    /// The CTA of the pair that starts products, with the first one; kept by the CTA with the even rank.
    pub issuer: Option<(usize, Access)>,
}

/// The record of a quarter of a column.
fn record(quarter: u32, column: u32) -> u64 {
    u64::from((quarter * COLUMNS + column) * 4)
}

impl TensorMemory {
    pub fn holds(&self, first: u32, columns: u32) -> bool {
        self.held.iter().any(|held| held.first <= first && first + columns <= held.first + held.columns)
    }

    fn hold(&mut self, held: Held) {
        let Held { first, columns, .. } = held;
        self.last = Some(columns);
        self.held.push(held);
        if self.cells.is_empty() {
            // A pattern that is a NaN in every type.
            self.cells = vec![u32::MAX; (LANES * COLUMNS) as usize];
        }
        let shadow = self.shadow.get_or_insert_with(|| Shadow::new(u64::from(QUARTERS * COLUMNS * 4)));
        for quarter in 0..QUARTERS {
            shadow.copy_written(record(quarter, first), &vec![false; 4 * columns as usize]);
        }
    }

    /// The access that allocated columns which were not freed.
    pub fn unfreed(&self) -> Option<Access> {
        self.held.first().map(|held| held.by)
    }

    pub fn row(&mut self, lane: u32, column: u32, count: u32) -> &mut [u32] {
        let start = (lane * COLUMNS + column) as usize;
        &mut self.cells[start..start + count as usize]
    }
}

/// The address in tensor memory of a record.
fn address_of(conflict: &Conflict) -> u64 {
    let index = conflict.offset as u32 / 4;
    u64::from(((index / COLUMNS * WARP_LANES) << 16) | (index % COLUMNS))
}

impl View<'_, '_> {
    fn tensor_fault(&mut self, what: String, address: Option<u32>) {
        self.fault(Fault::TensorMemory, what, None, address.map(u64::from));
    }

    fn memory(&mut self) -> &mut TensorMemory {
        &mut self.cluster.blocks[self.warp.rank].tensor
    }

    /// What the warp knows about accesses to tensor memory. In the strict order, it knows only accesses before its last fence.
    fn tensor_clock(&self) -> Clock {
        match self.world.options.tensor {
            TensorOrder::Queue => self.warp.clock.clone(),
            TensorOrder::Strict => {
                let mut clock = self.warp.tensor.known.clone().unwrap_or_else(|| Clock::new(self.cluster.id));
                clock.raise(&[Part::Memory, Part::Done], self.warp.comp, self.warp.time);
                clock
            }
        }
    }

    /// Performs an action on tensor memory.
    pub fn act_on_tensor(&mut self, lane: u32, what: TensorAction) {
        match what {
            TensorAction::Allocate { to, columns, group } => self.allocate_columns(lane, to, columns, group),
            TensorAction::Relinquish(group) => self.relinquish(group),
            TensorAction::Free { address, columns, group } => self.free_columns(address, columns, group),
            TensorAction::Multiply(product) => self.start_tensor_product(lane, product),
            TensorAction::CopyScales { to, from, group } => self.start_scale_copy(lane, ScaleCopy { to, from, group }),
            TensorAction::Commit { bar, multicast, group: _ } => self.commit_products(lane, bar, multicast),
            TensorAction::WaitLoads | TensorAction::WaitStores => {
                let of = usize::from(what == TensorAction::WaitStores);
                self.warp.tick();
                let (comp, time) = (self.warp.comp, self.warp.time);
                for completion in std::mem::take(&mut self.warp.tensor.moving[of]) {
                    self.world.ledger.completed(completion, comp, time);
                }
            }
            TensorAction::Fence(FenceSide::Before) => {}
            TensorAction::Fence(FenceSide::After) => self.warp.tensor.known = Some(self.warp.clock.clone()),
        }
    }

    fn relinquish(&mut self, group: CtaGroup) {
        let access = access_of(self.warp, self.block_index(), self.warp.pc, false);
        self.memory().relinquished = Some(access);
        if group == CtaGroup::Pair && self.group_ranks(group).is_some() {
            self.step_with_peer(PairStep::Relinquish, 0);
        }
    }

    fn allocate_columns(&mut self, lane: u32, to: MemoryAddress, columns: u32, group: CtaGroup) {
        let access = access_of(self.warp, self.block_index(), self.warp.pc, false);
        if let Some(other) = self.memory().relinquished {
            let (here, other) = (self.world.side_of(&access), Some(self.world.side_of(&other)));
            let what = "columns are allocated after the CTA gave up the right to".to_owned();
            self.world.report(Fault::TensorMemory, what, None, here, other);
            return;
        }
        if self.memory().last.is_some_and(|last| last < columns) {
            return self.tensor_fault(format!("{columns} columns after a smaller allocation"), None);
        }
        let (Some(ranks), Some(there)) = (self.group_ranks(group), self.resolve(lane, to, 4)) else { return };
        let other = match group {
            CtaGroup::Single => None,
            CtaGroup::Pair => match self.step_with_peer(PairStep::Allocate { columns }, there.offset) {
                Some(other) => Some(other),
                None => return,
            },
        };
        // Any range will do that is free in all CTAs of the group; which one is up to the machine.
        let starts: Vec<u32> = (0..COLUMNS / columns)
            .map(|i| i * columns)
            .filter(|&first| {
                let apart = |held: &Held| first + columns <= held.first || held.first + held.columns <= first;
                self.cluster.blocks[ranks.clone()].iter().flat_map(|block| &block.tensor.held).all(apart)
            })
            .collect();
        let Some(&first) = starts.get(self.world.random.below(starts.len().max(1) as u64) as usize) else {
            return self.tensor_fault(format!("{columns} columns, and no such range is free: waits for ever"), None);
        };
        self.memory().hold(Held { first, columns, by: access });
        self.store(lane, to, fulgurite_ptx::machine::MemoryOrder::Weak, &first.to_le_bytes());
        if let Some(other) = other {
            self.cluster.blocks[self.warp.rank ^ 1].tensor.hold(Held { first, columns, by: other.by });
            self.store_for_peer(&other, there.offset, first);
        }
    }

    fn free_columns(&mut self, address: u32, columns: u32, group: CtaGroup) {
        let Some(ranks) = self.group_ranks(group) else { return };
        let [_, first] = lane_and_column(address);
        let at = self.memory().held.iter().position(|held| (held.first, held.columns) == (first, columns));
        let Some(at) = at else {
            let held: Vec<String> =
                self.memory().held.iter().map(|held| format!("{} from {}", held.columns, held.first)).collect();
            let what = format!("{columns} columns from {first} are freed, held are: {}", held.join(", "));
            return self.tensor_fault(what, Some(address));
        };
        let (access, clock) = (self.freeing(group), self.tensor_clock());
        for rank in ranks {
            let quarters = (0..QUARTERS).map(|quarter| (quarter, first, columns));
            let found = self.touch(rank, quarters, access, &clock, true);
            self.report_conflict(found, &access, true);
        }
        self.world.unread_scales(self.cluster, self.warp.rank, (first, columns));
        self.warp.tick();
        match group {
            CtaGroup::Single => {
                self.memory().held.swap_remove(at);
            }
            CtaGroup::Pair => {
                let Some(other) = self.step_with_peer(PairStep::Free { columns }, first) else { return };
                self.memory().held.swap_remove(at);
                let held = &mut self.cluster.blocks[self.warp.rank ^ 1].tensor.held;
                held.retain(|held| held.first != other.at);
            }
        }
    }

    /// Records an access to quarters of columns, and returns the first conflict.
    fn touch(
        &mut self,
        rank: usize,
        parts: impl Iterator<Item = (u32, u32, u32)>,
        access: Access,
        clock: &Clock,
        writes: bool,
    ) -> Option<Conflict> {
        let clocks = [clock];
        let mut t = Toucher { finished: true, ..Toucher::new(&clocks, access, Part::AsyncShared) };
        let shadow = self.cluster.blocks[rank].tensor.shadow.as_mut()?;
        let ledger = &mut self.world.ledger;
        let mut found = None;
        for (quarter, column, count) in parts {
            let (start, bytes) = (record(quarter, column), u64::from(4 * count));
            let conflict = match writes {
                true => shadow.write(ledger, &mut t, start, bytes),
                false => shadow.read(ledger, &mut t, start, bytes),
            };
            found = found.or(conflict);
        }
        found
    }

    fn report_conflict(&mut self, conflict: Option<Conflict>, access: &Access, writes: bool) {
        if let Some(conflict) = conflict {
            self.world.conflict(conflict, address_of(&conflict), access, None, writes);
        }
    }

    /// Quarter and first column of an access of the warp to `count` columns, if it may make it.
    fn own_columns(&mut self, at: &[u32; 32], count: u32) -> Option<[u32; 2]> {
        let address = at[self.warp.active.trailing_zeros() as usize & 31];
        if lanes(self.warp.active).any(|lane| at[lane as usize] != address) {
            self.tensor_fault("lanes give different addresses".into(), Some(address));
            return None;
        }
        let ([lane, column], quarter) = (lane_and_column(address), self.warp.index % 4);
        if lane != quarter * WARP_LANES {
            let own = quarter * WARP_LANES;
            self.tensor_fault(format!("lane {lane}, allowed in warp {}: {own}", self.warp.index), Some(address));
            return None;
        }
        if !self.memory().holds(column, count) {
            let what = format!("{count} columns of tensor memory from {column}, which were not allocated");
            self.fault(Fault::OutOfBounds, what, None, Some(address.into()));
            return None;
        }
        Some([quarter, column])
    }

    fn move_columns(&mut self, at: &[u32; 32], count: u32, writes: bool) -> Option<[u32; 2]> {
        let [quarter, column] = self.own_columns(at, count)?;
        self.world.counts[self.warp.role].tensor_memory_bytes += u64::from(4 * WARP_LANES * count);
        if !self.world.options.checks {
            return Some([quarter, column]);
        }
        let completion = self.world.ledger.completion();
        let issued = access_of(self.warp, self.block_index(), self.warp.pc, false);
        let access = Access { who: Who::Async(completion), proxy: Proxy::Async, ..issued };
        let shadow = self.cluster.blocks[self.warp.rank].tensor.shadow.as_ref();
        let unwritten = match writes {
            false => shadow.and_then(|shadow| shadow.unwritten(record(quarter, column), u64::from(4 * count))),
            true => None,
        };
        let clock = self.tensor_clock();
        let found = self.touch(self.warp.rank, std::iter::once((quarter, column, count)), access, &clock, writes);
        self.report_conflict(found, &access, writes);
        if unwritten.is_some() {
            let address = Some(u64::from(at[self.warp.active.trailing_zeros() as usize & 31]));
            self.fault(Fault::Uninitialised, "tensor memory is read that nobody wrote".into(), None, address);
        }
        self.warp.tensor.moving[usize::from(writes)].push(completion);
        self.warp.tick();
        Some([quarter, column])
    }

    /// Loads consecutive columns of the warp's lanes.
    pub fn load_columns(&mut self, from: &[u32; 32], to: &[Reg]) {
        let count = to.len() as u32;
        let Some([quarter, column]) = self.move_columns(from, count, false) else { return };
        for (i, &reg) in (0..).zip(to) {
            let memory = self.memory();
            let values = std::array::from_fn(|lane| {
                let lane = quarter * WARP_LANES + lane as u32;
                u64::from(memory.row(lane, column + i, 1)[0])
            });
            self.set_all(reg, &values);
        }
    }

    /// Stores consecutive columns of the warp's lanes.
    pub fn store_columns(&mut self, to: &[u32; 32], from: &[Reg]) {
        let count = from.len() as u32;
        let mut values = vec![[0; 32]; from.len()];
        from.iter().zip(&mut values).for_each(|(&reg, values)| self.get_all(reg, values));
        let Some([quarter, column]) = self.move_columns(to, count, true) else { return };
        let memory = self.memory();
        for (i, values) in (0..).zip(&values) {
            for (lane, &bits) in (0..).zip(values) {
                memory.row(quarter * WARP_LANES + lane, column + i, 1)[0] = bits as u32;
            }
        }
    }

    /// The queue of the warp's thread.
    pub fn queue(&mut self, lane: u32) -> usize {
        let warp = self.warp.index;
        let known = self.memory().queues.iter().position(|queue| (queue.warp, queue.lane) == (warp, lane));
        known.unwrap_or_else(|| {
            let (comp, copies) = (self.cluster.component(), (self.cluster.component(), 0));
            let (pending, chains) = (VecDeque::new(), HashMap::new());
            let queues = &mut self.memory().queues;
            queues.push(TensorQueue { warp, lane, comp, pending, started: 0, copies, chains, latest: 0 });
            queues.len() - 1
        })
    }

    fn start_tensor_product(&mut self, lane: u32, what: TensorProduct) {
        let issued = access_of(self.warp, self.block_index(), self.warp.pc, false);
        let Some(ranks) = self.group_ranks(what.group) else { return };
        self.one_issuer(&ranks, issued);
        let (at, completion) = (self.queue(lane), self.world.ledger.completion());
        // Instructions that differ in the scales that they read have one accumulator and one shape.
        let shape = match ProductShape::decode(what.shape, what.kind, what.group) {
            Ok(shape) => ProductShape { scale_bytes: [0; 2], ..shape }.encode(),
            Err(_) => what.shape,
        };
        let start = self.queue_start(at, completion, Some((what.d, shape)));
        self.queue_work(at, &ranks, Work::Multiply { what, start, completion, issued }, completion, issued);
        self.enqueue(at, Some(what));
    }

    /// What is ordered before the next work of a queue: a product into an accumulator of a shape, or a copy of scales.
    pub fn queue_start(&mut self, at: usize, completion: u32, product: Option<(u32, u32)>) -> Snapshot {
        let mut start = self.warp.clock.clone();
        let (tensor, rank, order) = (self.tensor_clock(), self.warp.rank, self.world.options.tensor);
        let (cluster, world) = (&mut *self.cluster, &mut *self.world);
        let chain = product.map(|key| match cluster.blocks[rank].tensor.queues[at].chains.get(&key) {
            Some(&chain) => chain,
            None => (cluster.component(), 0),
        });
        let queue = &mut cluster.blocks[rank].tensor.queues[at];
        queue.started += 1;
        world.ledger.completed(completion, queue.comp, queue.started);
        let mut before = vec![queue.copies];
        match (product, chain) {
            (Some(key), Some((comp, count))) => {
                queue.chains.insert(key, (comp, count + 1));
                world.ledger.completed(completion, comp, count + 1);
                before.push((comp, count));
            }
            _ => {
                before.clear();
                queue.copies.1 += 1;
                world.ledger.completed(completion, queue.copies.0, queue.copies.1);
            }
        }
        // The work of a thread runs in order; the manual promises it only for products into one accumulator, and for copies
        // before products.
        match order {
            TensorOrder::Queue => start.raise(&[Part::Memory, Part::Done], queue.comp, queue.started - 1),
            TensorOrder::Strict => {
                start = tensor;
                before.iter().for_each(|&(comp, count)| start.raise(&[Part::Memory, Part::Done], comp, count));
                // Shared memory is ordered by the barriers of its rings, with no fence of tensor memory.
                start.join(&self.warp.clock);
            }
        }
        Rc::new(start)
    }

    /// Appends work to a queue. The memory of its CTAs must outlive it.
    pub fn queue_work(&mut self, at: usize, ranks: &Range<usize>, work: Work, completion: u32, issued: Access) {
        self.memory().queues[at].pending.push_back(work);
        let reaches = Access { who: Who::Async(completion), ..issued };
        for block in &mut self.cluster.blocks[ranks.clone()] {
            block.reaches.push(reaches);
        }
    }

    fn commit_products(&mut self, lane: u32, bar: MemoryAddress, multicast: Option<u16>) {
        let Some(there) = self.resolve(lane, bar, 8) else { return };
        let issued = access_of(self.warp, self.block_index(), self.warp.pc, true);
        let (at, rank) = (self.queue(lane), self.warp.rank);
        // What the products waited for is over when they are; what they wrote is visible to those who wait.
        let mut told = Clock::new(self.cluster.id);
        told.join_done(&self.warp.clock);
        let bars: Vec<BarAt> = self
            .ranks(lane, there.rank, multicast)
            .into_iter()
            .map(|rank| BarAt { rank, offset: there.offset })
            .collect();
        for bar in &bars {
            // The thread knows of the mbarrier's initialisation when it commits, if ever.
            let made = self.cluster.blocks[bar.rank].bars.get(&bar.offset).map(|bar| bar.made.who);
            if let Some(Who::Warp { comp, time }) = made
                && self.warp.clock.get(Part::Memory, comp) >= time
            {
                told.raise(&[Part::Memory], comp, time);
            }
        }
        let queue = &mut self.cluster.blocks[rank].tensor.queues[at];
        told.raise(&[Part::Memory, Part::Done], queue.comp, queue.started);
        queue.pending.push_back(Work::Commit { bars, told: Rc::new(told), issued, lane });
        self.enqueue(at, None);
    }

    /// Schedules the next work of a queue.
    pub fn enqueue(&mut self, at: usize, product: Option<TensorProduct>) {
        let (rank, now, pc, block) = (self.warp.rank, self.warp.now, self.warp.pc, self.block_index());
        self.cluster.pending += 1;
        self.world.progress += 1;
        self.warp.tick();
        let event = Event::Tensor(self.cluster.id, rank as u32, at as u32);
        if self.world.options.order == Interleaving::Random {
            return self.world.later(event);
        }
        let queue = &mut self.cluster.blocks[rank].tensor.queues[at];
        let shape = product.and_then(|what| ProductShape::decode(what.shape, what.kind, what.group).ok());
        if let Some((shape, what)) = shape.zip(product) {
            // Each CTA of a pair multiplies half of the rows, and reads its own operands.
            let ctas = what.group.ctas();
            let left = if matches!(what.a, TensorLeft::Tile(_)) { shape.rows } else { 0 };
            let (number, flops) = (shape.numbers[1], flops(&shape) / u64::from(ctas));
            let operand_bytes = u64::from(32 * (shape.cols + left) / ctas);
            queue.latest = self.world.product_time(block, Multiply { number, flops, operand_bytes }, now, pc);
        }
        let time = queue.latest.max(now);
        self.world.at(time, event);
    }
}

/// The parts of a product that were found to be valid.
struct Operands {
    /// Rows of A, one matrix for each CTA.
    a: Vec<Matrix>,
    b: Matrix,
    /// Scales of A and of B, for each CTA.
    scales: Option<Vec<[Matrix; 2]>>,
    shape: ProductShape,
    /// First column of D.
    column: u32,
}

impl World<'_> {
    /// Does the oldest work of a queue.
    pub fn run_tensor(&mut self, cluster: &mut Cluster, rank: usize, at: usize) {
        let Some(work) = cluster.blocks[rank].tensor.queues[at].pending.pop_front() else { return };
        cluster.pending = cluster.pending.saturating_sub(1);
        self.progress += 1;
        match work {
            Work::Multiply { what, start, completion, issued } => {
                let access = Access { who: Who::Async(completion), proxy: Proxy::Async, ..issued };
                let role = self.role_of(issued.warp);
                let shape = if self.options.arithmetic {
                    let operands = self.tensor_operands(cluster, rank, &what, &access, &start);
                    operands.map(|operands| {
                        self.multiply_into(cluster, rank, &what, &operands, (&access, &start));
                        operands.shape
                    })
                } else {
                    ProductShape::decode(what.shape, what.kind, what.group).ok()
                };
                if let Some(shape) = shape {
                    let ProductShape { rows, cols, numbers, .. } = shape;
                    let flops = flops(&shape);
                    let left = if matches!(what.a, TensorLeft::Tile(_)) { rows } else { 0 };
                    self.counts[role].multiplied(numbers[1], flops, [left, cols].map(|n| u64::from(32 * n)));
                }
            }
            Work::CopyScales { what, start, completion, issued } => {
                let access = Access { who: Who::Async(completion), proxy: Proxy::Async, ..issued };
                self.copy_scales(cluster, rank, &what, (&access, &start));
            }
            Work::Commit { bars, told, issued, lane } => {
                let now = self.now;
                let user = User { clock: &told, access: issued, lane: Some(lane), far: true, releases: true, now };
                for bar in bars {
                    self.bar_arrive(cluster, bar, 1, 0, &user);
                }
            }
        }
    }

    fn role_of(&self, warp: u32) -> usize {
        let roles = &self.program.kernel.roles;
        roles.iter().position(|r| (r.first_warp..r.first_warp + r.warps).contains(&warp)).unwrap_or(0)
    }

    pub fn wrong_product(&mut self, access: &Access, fault: Fault, what: String, address: Option<u64>) {
        let here = self.side_of(access);
        self.report(fault, what, address, here, None);
    }

    /// Reads the operands of a product, if its descriptors are valid.
    fn tensor_operands(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        what: &TensorProduct,
        access: &Access,
        start: &Clock,
    ) -> Option<Operands> {
        let shape = match ProductShape::decode(what.shape, what.kind, what.group) {
            Ok(shape) => shape,
            Err(why) => {
                self.wrong_product(access, Fault::Operand, format!("a product of {why}"), None);
                return None;
            }
        };
        let ([lane, column], ranks) = (lane_and_column(what.d), what.group.ranks(rank));
        if cluster.blocks[ranks.clone()].iter().any(|block| block.running == 0) {
            self.wrong_product(access, Fault::Exit, "a product reaches a CTA that has ended".to_owned(), None);
            return None;
        }
        let held = |block: &Cta| block.tensor.holds(column, shape.cols);
        if lane != 0 || !cluster.blocks[ranks.clone()].iter().all(held) {
            let text = format!("D of {} columns from {column}, lane {lane}, which were not allocated", shape.cols);
            self.wrong_product(access, Fault::OutOfBounds, text, Some(what.d.into()));
            return None;
        }
        let tile = |bits: u64| match what.a {
            TensorLeft::Tile(a) if a == bits => ("A", descriptor(bits)),
            _ => ("B", descriptor(bits)),
        };
        let tiles = [Some(what.b), if let TensorLeft::Tile(a) = what.a { Some(a) } else { None }];
        for (name, read) in tiles.into_iter().flatten().map(tile) {
            if let Err(why) = read {
                self.wrong_product(access, Fault::Operand, format!("operand {name} has {why}"), None);
                return None;
            }
        }
        let [_, number_a, number_b] = shape.numbers;
        let clocks = [start];
        let reader = Reader { issued: *access, clocks: &clocks };
        // Each CTA has its part of the columns of B and of the rows of A.
        let [cols, rows] = [shape.cols, shape.rows].map(|n| n / what.group.ctas());
        let mut parts = Vec::new();
        for rank in ranks.clone() {
            parts.push(self.tensor_tile(cluster, rank, &reader, (what.b, number_b, shape.majors[1], cols))?);
        }
        let b = match parts.len() {
            1 => parts.pop()?,
            _ => Matrix::join(&parts, cols as usize),
        };
        let mut a = Vec::new();
        for rank in ranks {
            a.push(match what.a {
                TensorLeft::Tile(bits) => {
                    self.tensor_tile(cluster, rank, &reader, (bits, number_a, shape.majors[0], rows))?
                }
                TensorLeft::Memory(from) => self.tensor_rows(cluster, rank, (from, shape, rows), access, start)?,
            });
        }
        let scales = match what.scales {
            Some(at) => Some(self.operand_scales(cluster, rank, (at, &shape, what.group), (access, start))?),
            None => None,
        };
        Some(Operands { a, b, scales, shape, column })
    }

    /// Reads an operand in shared memory, all of which is one allocation.
    fn tensor_tile(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        reader: &Reader<'_>,
        (bits, number, major, outer): (u64, Number, Major, u32),
    ) -> Option<Matrix> {
        let offsets = crate::multiply::units(bits, number, major, outer);
        let [low, high] = [offsets.iter().map(|u| u.0).min()?, offsets.iter().map(|u| u.0).max()?];
        let inside = |use_: &&fulgurite_ptx::kernel::SharedUse| {
            (i64::from(use_.offset)..i64::from(use_.offset + use_.bytes)).contains(&low)
        };
        let uses = &self.program.kernel.shared;
        if let Some(use_) = uses.iter().find(inside)
            && high >= i64::from(use_.offset + use_.bytes)
        {
            let what =
                format!("an operand begins in `{}` and reaches beyond it: the distances in its descriptor", use_.name);
            let at = Some((high + i64::from(SHARED_BASE)) as u64);
            self.wrong_product(&reader.issued, Fault::Layout, what, at);
            return None;
        }
        Some(self.operand(&mut cluster.blocks[rank], reader, (bits, number, major, outer)))
    }

    /// Reads the rows of A in tensor memory, two elements to a cell.
    fn tensor_rows(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        (from, shape, rows): (u32, ProductShape, u32),
        access: &Access,
        start: &Clock,
    ) -> Option<Matrix> {
        let ([lane, column], number) = (lane_and_column(from), shape.numbers[1]);
        let columns = number.depth() * number.bytes() / 4;
        let memory = &cluster.blocks[rank].tensor;
        if lane != 0 || !memory.holds(column, columns) || shape.majors[0] != Major::Inner {
            let text = format!("A of {columns} columns from {column}, lane {lane}, which were not allocated");
            self.wrong_product(access, Fault::OutOfBounds, text, Some(from.into()));
            return None;
        }
        self.touch_columns(cluster, rank, (column, columns), (access, start), false);
        let memory = &mut cluster.blocks[rank].tensor;
        let mut a = Matrix::new(rows as usize, (number.depth() * number.packed()) as usize);
        let per = 4 / number.bytes() * number.packed();
        for row in 0..rows {
            for (i, &mut word) in (0..).zip(memory.row(shape.lane(row), column, columns)) {
                for e in 0..per {
                    a.set(row as usize, (per * i + e) as usize, model::decode(word >> (32 / per * e), number));
                }
            }
        }
        Some(a)
    }

    /// Records an access of a product to all lanes of some columns.
    pub fn touch_columns(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        (column, columns): (u32, u32),
        (access, start): (&Access, &Clock),
        writes: bool,
    ) {
        if !self.options.checks {
            return;
        }
        let clocks = [start];
        let mut t = Toucher { finished: true, ..Toucher::new(&clocks, *access, Part::AsyncShared) };
        let Some(shadow) = cluster.blocks[rank].tensor.shadow.as_mut() else { return };
        let (mut found, mut unwritten) = (None, None);
        for quarter in 0..QUARTERS {
            let (at, bytes) = (record(quarter, column), u64::from(4 * columns));
            let conflict = match writes {
                true => shadow.write(&mut self.ledger, &mut t, at, bytes),
                false => {
                    unwritten = unwritten.or(shadow.unwritten(at, bytes));
                    shadow.read(&mut self.ledger, &mut t, at, bytes)
                }
            };
            found = found.or(conflict);
        }
        if let Some(conflict) = found {
            self.conflict(conflict, address_of(&conflict), access, None, writes);
        }
        if unwritten.is_some() {
            let what = "a product reads tensor memory that nobody wrote".to_owned();
            self.wrong_product(access, Fault::Uninitialised, what, Some(column.into()));
        }
    }

    fn multiply_into(
        &mut self,
        cluster: &mut Cluster,
        rank: usize,
        what: &TensorProduct,
        operands: &Operands,
        by: (&Access, &Clock),
    ) {
        let Operands { a, b, scales, shape, column } = operands;
        let rows = shape.rows / what.group.ctas();
        for (i, (rank, a)) in what.group.ranks(rank).zip(a).enumerate() {
            if what.onto {
                self.touch_columns(cluster, rank, (*column, shape.cols), by, false);
            }
            self.touch_columns(cluster, rank, (*column, shape.cols), by, true);
            let memory = &mut cluster.blocks[rank].tensor;
            let scales = scales.as_ref().map(|all| (&all[i], shape.kind));
            let mut product = Rows::new([a, b], shape.numbers, shape.cols as usize, scales);
            for row in 0..rows {
                let cells = memory.row(shape.lane(row), *column, shape.cols);
                product.multiply(row as usize, what.onto, cells);
            }
        }
    }
}

/// Floating-point operations of a product.
fn flops(shape: &ProductShape) -> u64 {
    let number = shape.numbers[1];
    2 * u64::from(shape.rows * shape.cols * number.depth() * number.packed())
}

/// What a warp has to do with tensor memory.
#[derive(Default)]
pub(crate) struct WarpTensor {
    /// Completions of loads and of stores that it has not waited for.
    pub moving: [Vec<u32>; 2],
    /// What it knew at its last fence after a synchronisation.
    pub known: Option<Clock>,
}
