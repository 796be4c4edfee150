//! Cluster launch control: a CTA cancels a cluster that has not started, and does its work.

use crate::finding::Fault;
use crate::view::View;
use crate::world::access_of;
use fulgurite_ptx::machine::{Done, MemoryAddress, Transfer, answer};

impl View<'_, '_> {
    /// Cancels the next cluster, if one has not started. The answer goes to shared memory.
    pub fn cancel_cluster(&mut self, lane: u32, to: MemoryAddress, bar: MemoryAddress) {
        let access = access_of(self.warp, self.block_index(), self.warp.pc, false);
        if let Some(refused) = self.cluster.blocks[self.warp.rank].refused {
            let (here, other) = (self.world.side_of(&access), Some(self.world.side_of(&refused)));
            let what = "a CTA asks for work after an answer that there is none".to_owned();
            self.world.report(Fault::Operand, what, None, here, other);
        }
        if !to.address.is_multiple_of(16) {
            let what = "an answer of 16 bytes, allowed: at multiples of that".to_owned();
            return self.fault(Fault::Misaligned, what, Some(lane), Some(to.address));
        }
        let found = (self.world.next_cluster < self.world.cluster_count()).then(|| {
            self.world.next_cluster += 1;
            (self.world.next_cluster - 1) * self.world.program.kernel.cluster
        });
        let data = answer(found).to_vec();
        self.issue_copy(lane, Transfer::Words { to, data, reduce: None, done: Done::Mbarrier(bar) });
    }

    /// Records that the CTA saw an answer without work.
    pub fn saw_no_work(&mut self) {
        let access = access_of(self.warp, self.block_index(), self.warp.pc, false);
        self.cluster.blocks[self.warp.rank].refused.get_or_insert(access);
    }
}
