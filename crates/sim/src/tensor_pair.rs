//! What the two CTAs of a pair do together with tensor memory: each allocates, gives up the right to allocate, and frees
//! when the other one does the same. And which of them starts products.

use crate::clock::Part;
use crate::finding::Fault;
use crate::shadow::{Access, Proxy, Toucher};
use crate::view::View;
use crate::world::{Status, Wait, access_of};
use fulgurite_ptx::tcgen05::CtaGroup;
use std::ops::Range;

/// A step that both CTAs of a pair take together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PairStep {
    Allocate { columns: u32 },
    Relinquish,
    Free { columns: u32 },
}

impl PairStep {
    fn text(self) -> String {
        match self {
            PairStep::Allocate { columns } => format!("allocates {columns} columns"),
            PairStep::Relinquish => "gives up the right to allocate".to_owned(),
            PairStep::Free { columns } => format!("frees {columns} columns"),
        }
    }
}

/// A warp that waits for the other CTA of its pair.
pub(crate) struct Waiting {
    step: PairStep,
    /// Offset in shared memory where the address of an allocation goes; for a step that frees, the first column.
    pub at: u32,
    pub by: Access,
}

impl View<'_, '_> {
    /// Ranks of the CTAs of a group, if the cluster has them all.
    pub fn group_ranks(&mut self, group: CtaGroup) -> Option<Range<usize>> {
        let (ranks, size) = (group.ranks(self.warp.rank), self.cluster.blocks.len());
        if ranks.end > size {
            self.fault(Fault::Operand, format!("a pair of CTAs in a cluster of {size}"), None, None);
            return None;
        }
        Some(ranks)
    }

    /// Takes a step together with the other CTA of the pair. The first warp waits; the second one gets what the first one
    /// gave.
    pub fn step_with_peer(&mut self, step: PairStep, at: u32) -> Option<Waiting> {
        let by = access_of(self.warp, self.block_index(), self.warp.pc, false);
        let peer = self.warp.rank ^ 1;
        let block = &mut self.cluster.blocks[peer];
        if block.running == 0 {
            let what = format!("one CTA of a pair {} after the other one has ended", step.text());
            self.fault(Fault::Exit, what, None, None);
            return None;
        }
        let Some(other) = block.tensor.waiting.take() else {
            self.cluster.blocks[self.warp.rank].tensor.waiting = Some(Waiting { step, at, by });
            self.warp.status = Status::Blocked(Wait::Peer);
            return None;
        };
        self.world.progress += 1;
        let now = self.warp.now;
        let waiter = self.peer_warp(&other);
        waiter.status = Status::Ready;
        waiter.now = waiter.now.max(now);
        if other.step != step {
            let what = format!("one CTA of a pair {}, and the other one {}", step.text(), other.step.text());
            let (here, other) = (self.world.side_of(&by), Some(self.world.side_of(&other.by)));
            self.world.report(Fault::TensorMemory, what, None, here, other);
            return None;
        }
        Some(other)
    }

    fn peer_warp(&mut self, other: &Waiting) -> &mut crate::world::Warp {
        let slot = self.cluster.warp_at(self.warp.rank ^ 1, other.by.warp);
        &mut self.cluster.warps[slot]
    }

    /// Writes the address of an allocation to the other CTA's shared memory, on behalf of its waiting warp. The hardware
    /// writes both addresses to the offset that one of the CTAs gave.
    pub fn store_for_peer(&mut self, other: &Waiting, at: u32, first: u32) {
        if other.at != at {
            let what = format!(
                "the address of an allocation goes to offset {at} of shared memory, and to offset {} in the other CTA of the pair; allowed: the same",
                other.at
            );
            let here = self.world.side(self.block_index(), self.warp.index, None, self.warp.pc);
            let there = Some(self.world.side_of(&other.by));
            self.world.report(Fault::TensorMemory, what, None, here, there);
        }
        let (peer, at) = (self.warp.rank ^ 1, other.at as usize);
        let slot = self.cluster.warp_at(peer, other.by.warp);
        let clocks = [&self.cluster.warps[slot].clock];
        let mut t = Toucher::new(&clocks, other.by, Part::AsyncShared);
        let block = &mut self.cluster.blocks[peer];
        block.shared[at..at + 4].copy_from_slice(&first.to_le_bytes());
        if let Some(conflict) = block.shadow.write(&mut self.world.ledger, &mut t, at as u64, 4) {
            self.world.conflict(conflict, at as u64, &other.by, None, true);
        }
    }

    /// The access that frees the columns of both CTAs of a pair: nothing of either may still access them. The two that
    /// free do not conflict with each other.
    pub fn freeing(&self, group: CtaGroup) -> Access {
        let access = access_of(self.warp, self.block_index(), self.warp.pc, group == CtaGroup::Pair);
        Access { proxy: Proxy::Async, ..access }
    }

    /// Reports the second CTA of a pair that starts products.
    pub fn one_issuer(&mut self, ranks: &Range<usize>, issued: Access) {
        let rank = self.warp.rank;
        let (first, access) = *self.cluster.blocks[ranks.start].tensor.issuer.get_or_insert((rank, issued));
        if first != rank {
            let (here, other) = (self.world.side_of(&issued), Some(self.world.side_of(&access)));
            let what = "both CTAs of a pair start products, allowed: one of them".to_owned();
            self.world.report(Fault::TensorMemory, what, None, here, other);
        }
    }
}
