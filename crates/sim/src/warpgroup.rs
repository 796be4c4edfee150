//! Products of a warpgroup: they run asynchronously, in order, and read registers and shared memory when they run.

use crate::clock::{Clock, Part};
use crate::finding::Fault;
use crate::multiply::{Four, Matrix, units};
use crate::shadow::{Access, Proxy, Toucher, Who};
use crate::world::{Cluster, Cta, SHARED_BASE, Snapshot, Status, Wait, Warp, World};
use fulgurite_ptx::Number;
use fulgurite_ptx::model;
use fulgurite_ptx::product::{Descriptor, Left, Major, Product, left_element};
use std::collections::VecDeque;

/// Rows per product.
const ROWS: usize = 64;

/// A product that has not run yet.
pub(crate) struct Pending {
    pub what: Product,
    pub pc: u32,
    /// Mask of the warps that have started it.
    pub joined: u8,
    pub starts: [Option<Snapshot>; 4],
    pub issued: Access,
    pub read_done: u32,
}

/// Products of four warps.
#[derive(Default)]
pub(crate) struct Warpgroup {
    /// Products that have not run yet; `done`: number of those that have.
    pub pending: VecDeque<Pending>,
    pub done: u32,
    /// Completion of each product's reads of shared memory.
    pub completions: Vec<u32>,
    /// The access that started each product.
    pub issued: Vec<Access>,
    /// Cycle at which the last product ended.
    pub latest: u64,
}

/// The agent that reads an operand of a product.
pub(crate) struct Reader<'a> {
    /// Its access, which completes when the product does.
    pub issued: Access,
    /// What the threads that started the product knew.
    pub clocks: &'a [&'a Clock],
}

impl World<'_> {
    fn product_fault(&mut self, issued: &Access, fault: Fault, what: String, address: Option<u64>) {
        let here = self.side_of(issued);
        self.report(fault, what, address, here, None);
    }

    /// Reads an operand from shared memory: descriptor, type, contiguous dimension, and its rows or columns.
    pub fn operand(
        &mut self,
        block: &mut Cta,
        reader: &Reader<'_>,
        (bits, number, major, outer): (u64, Number, Major, u32),
    ) -> Matrix {
        let depth = (number.depth() * number.packed()) as usize;
        let mut matrix = Matrix::new(outer.next_multiple_of(16) as usize, depth);
        let access = reader.issued;
        let mut t = Toucher::new(reader.clocks, access, Part::AsyncShared);
        let (mut found, mut outside, mut unwritten) = (None, None, None);
        let swizzle = Descriptor::decode(bits).swizzle;
        let mut other_layout = None;
        for (at, o, i) in units(bits, number, major, outer) {
            let (Ok(start), true) = (usize::try_from(at), at + 16 <= block.shared.len() as i64) else {
                outside = outside.or(Some(at));
                continue;
            };
            if self.options.checks {
                let conflict = block.shadow.read(&mut self.ledger, &mut t, start as u64, 16);
                found = found.or(conflict);
                let brought = block.shadow.writer(&self.ledger, start as u64);
                other_layout = other_layout.or_else(|| {
                    brought.filter(|w| w.swizzle.is_some_and(|s| s != swizzle)).map(|w| (start as u64, *w))
                });
                unwritten = unwritten.or_else(|| block.shadow.unwritten(start as u64, 16));
            }
            matrix.set_unit(&block.shared[start..start + 16], number, major, o, i);
        }
        let base = u64::from(SHARED_BASE);
        if let Some(at) = outside {
            let what = "a product reads outside the block's shared memory".to_owned();
            self.product_fault(&access, Fault::OutOfBounds, what, Some((at + i64::from(SHARED_BASE)) as u64));
        }
        if let Some((at, brought)) = other_layout {
            let (here, other) = (self.side_of(&access), self.side_of(&brought));
            let was = brought.swizzle.unwrap_or_default();
            let what = format!("a product reads a tile as {swizzle:?} that was brought as {was:?} (swizzles)");
            self.report(Fault::Layout, what, Some(at + base), here, Some(other));
        }
        if let Some(conflict) = found {
            self.conflict(conflict, conflict.offset + base, &access, None, false);
        }
        if let Some(at) = unwritten {
            let what = "a product reads shared memory that nobody wrote".to_owned();
            self.product_fault(&access, Fault::Uninitialised, what, Some(at + base));
        }
        matrix
    }

    /// Multiplies the operands of a product whose first warp is `first` of the cluster's.
    fn compute_product(
        &mut self,
        cluster: &mut Cluster,
        (rank, first): (usize, usize),
        pending: &Pending,
        reader: &Reader<'_>,
    ) {
        let what = &pending.what;
        let [_, number_a, number_b] = what.numbers;
        let b = self.operand(&mut cluster.blocks[rank], reader, (what.b.0, number_b, what.b.1, what.n));
        let program = self.program;
        let a = match &what.a {
            Left::Tile(bits, major) => {
                let block = &mut cluster.blocks[rank];
                self.operand(block, reader, (*bits, number_a, *major, ROWS as u32))
            }
            Left::Regs(regs) => {
                let four = Four { warps: &mut cluster.warps[first..first + 4], program };
                let bytes = number_a.bytes();
                let mut a = Matrix::new(ROWS, number_a.depth() as usize);
                for thread in 0..128 {
                    for (i, &reg) in regs.iter().enumerate() {
                        let word = four.bits(thread, reg);
                        for e in 0..4 / bytes {
                            let (row, inner) = left_element(thread, i as u32, e, bytes);
                            a.set(row as usize, inner as usize, model::decode(word >> (8 * bytes * e), number_a));
                        }
                    }
                }
                a
            }
        };
        let read: Vec<usize> = match &what.a {
            Left::Regs(regs) => regs.iter().map(|&r| program.slot(r)).collect(),
            Left::Tile(..) => Vec::new(),
        };
        let added = what.d.iter().filter(|_| what.onto).map(|&r| program.slot(r));
        let undefined = read
            .into_iter()
            .chain(added)
            .any(|slot| cluster.warps[first..first + 4].iter().any(|w| w.regs[slot].defined != u32::MAX));
        if undefined && self.options.checks {
            let text = "a product reads registers that nobody wrote".to_owned();
            self.product_fault(&pending.issued, Fault::UninitialisedRegister, text, None);
        }
        Four { warps: &mut cluster.warps[first..first + 4], program }.multiply(what, &a, &b);
    }

    /// Runs the oldest product of a warpgroup.
    pub fn run_product(&mut self, cluster: &mut Cluster, rank: usize, group: usize) {
        let block = &mut cluster.blocks[rank];
        let ready = block.warpgroups[group].pending.front().is_some_and(|p| p.joined == 0xf);
        let Some(pending) = ready.then(|| block.warpgroups[group].pending.pop_front()).flatten() else { return };
        cluster.pending = cluster.pending.saturating_sub(1);
        self.progress += 1;
        let what = &pending.what;
        let number_a = what.numbers[1];
        let clocks: Vec<&Clock> = pending.starts.iter().flatten().map(|c| &**c).collect();
        let issued = Access { who: Who::Async(pending.read_done), proxy: Proxy::Async, ..pending.issued };
        let reader = Reader { issued, clocks: &clocks };
        let first = rank * (cluster.warps.len() / cluster.blocks.len()) + 4 * group;
        if self.options.arithmetic {
            self.compute_product(cluster, (rank, first), &pending, &reader);
        } else {
            let program = self.program;
            for warp in &mut cluster.warps[first..first + 4] {
                what.d.iter().for_each(|&d| warp.regs[program.slot(d)].defined = u32::MAX);
            }
        }
        let flops = 2 * ROWS as u64 * u64::from(what.n) * u64::from(number_a.depth());
        let left_bytes = if matches!(what.a, Left::Tile(..)) { 32 * ROWS as u64 } else { 0 };
        let role = cluster.warps[first].role;
        self.counts[role].multiplied(number_a, flops, [left_bytes, 32 * u64::from(what.n)]);
        let group = &mut cluster.blocks[rank].warpgroups[group];
        group.done += 1;
        group.latest = self.now;
        let (done, now) = (group.done, self.now);
        for slot in first..first + 4 {
            let Status::Blocked(Wait::Products(target)) = cluster.warps[slot].status else { continue };
            if target <= done {
                let mut warp = std::mem::take(&mut cluster.warps[slot]);
                warp.status = Status::Ready;
                warp.now = warp.now.max(now);
                self.retire_products(&cluster.blocks[rank], &mut warp, target);
                cluster.warps[slot] = warp;
            }
        }
    }

    /// Records that the warp knows its products up to `target` to be complete.
    pub fn retire_products(&mut self, block: &Cta, warp: &mut Warp, target: u32) {
        warp.tick();
        let completions = &block.warpgroups[(warp.index / 4) as usize].completions;
        for product in warp.retired..target {
            if let Some(&completion) = completions.get(product as usize) {
                self.ledger.completed(completion, warp.comp, warp.time);
            }
        }
        warp.retired = warp.retired.max(target);
        while warp.product_groups.front().is_some_and(|&end| end <= target) {
            warp.product_groups.pop_front();
        }
    }
}
