//! Reports deadlocks: which warps wait, and for what.

use crate::finding::Fault;
use crate::shadow::Access;
use crate::world::{Cluster, SHARED_BASE, Status, Wait, Warp, World, access_of};
use std::collections::BTreeSet;

impl World<'_> {
    /// What a warp waits for, as text.
    fn waits_for(&self, cluster: &Cluster, warp: &Warp, wait: &Wait) -> String {
        let block = &cluster.blocks[warp.rank];
        match wait {
            Wait::Named(id) => {
                let barrier = &block.named[*id as usize];
                let expected = barrier.expected.map_or(0, |(n, _)| n);
                format!("named barrier {id}, where {} of {expected} threads have come", barrier.arrived)
            }
            Wait::Cluster => {
                let all = cluster.warps.len() as u32;
                format!(
                    "the cluster's barrier, where {} of {all} warps have come and {} have ended",
                    cluster.arrived, cluster.absent
                )
            }
            Wait::Phase { address, phase } => {
                let name = self.shared_name(*address);
                match block.bars.get(address) {
                    Some(bar) => {
                        let last = bar.arrived.map_or("nobody has arrived yet".to_owned(), |a| {
                            format!("the last to arrive was {}", self.side_of(&a))
                        });
                        let (missing, bytes) = (bar.pending, bar.bytes);
                        format!(
                            "phase {phase} of mbarrier {name}, which misses {missing} arrivals and {bytes} bytes; {last}"
                        )
                    }
                    None => format!("mbarrier {name}, which does not exist"),
                }
            }
            Wait::Groups(_) => "its groups of copies".to_owned(),
            Wait::Products(_) => "its products".to_owned(),
            Wait::Registers(count) => format!("{count} registers a thread, and {} are free in the block", block.pool),
            Wait::Peer => "the other CTA of its pair, to do the same with tensor memory".to_owned(),
            Wait::Sleep => "what another thread writes".to_owned(),
        }
    }

    /// Reports why no warp can continue.
    pub fn deadlock(&mut self) {
        let clusters = std::mem::take(&mut self.clusters);
        let mut lines = Vec::new();
        let mut seen = BTreeSet::new();
        let mut specific = false;
        for cluster in &clusters {
            for warp in &cluster.warps {
                let Status::Blocked(wait) = &warp.status else { continue };
                let at = access_of(warp, cluster.blocks[warp.rank].index, warp.last_pc, false);
                specific |= self.cause(cluster, warp, wait, &at);
                if seen.insert((warp.rank, warp.last_pc, warp.role)) {
                    lines.push((at, self.waits_for(cluster, warp, wait)));
                }
            }
        }
        let circle: Vec<String> =
            lines.iter().map(|(at, what)| format!("{} waits for {what}", self.side_of(at))).collect();
        let all = circle.join("; ");
        for (i, (at, _)) in lines.iter().enumerate() {
            let other = lines.get((i + 1) % lines.len()).filter(|_| lines.len() > 1);
            let other = other.map(|(at, _)| self.side_of(at));
            let here = self.side_of(at);
            self.report(Fault::Deadlock, format!("nobody can go on: {all}"), None, here, other);
        }
        if lines.is_empty() && !specific {
            // Every warp has ended, but an asynchronous operation could never complete.
            let here = self.side(0, 0, None, 0);
            self.report(
                Fault::Deadlock,
                "every warp has ended, and a copy or a product has not".into(),
                None,
                here,
                None,
            );
        }
        self.clusters = clusters;
    }

    /// Reports certain causes: bytes that never arrive, registers that no warp returns, a product that only part of a
    /// warpgroup started.
    fn cause(&mut self, cluster: &Cluster, warp: &Warp, wait: &Wait, at: &Access) -> bool {
        let block = &cluster.blocks[warp.rank];
        match wait {
            Wait::Phase { address, .. } => {
                let Some(bar) = block.bars.get(address) else { return false };
                let (Some(expected), 0, true) = (bar.expected, bar.pending, bar.bytes > 0) else { return false };
                let what = format!(
                    "phase {} of mbarrier {} expects {} bytes more than come",
                    bar.phase,
                    self.shared_name(*address),
                    bar.bytes
                );
                let (here, other) = (self.side_of(&expected), Some(self.side_of(at)));
                self.report(Fault::ByteCount, what, Some(u64::from(SHARED_BASE + address)), here, other);
                true
            }
            Wait::Registers(count) => {
                let what = format!("{count} registers a thread, and {} are free in the block", block.pool);
                let here = self.side_of(at);
                self.report(Fault::Registers, what, None, here, None);
                true
            }
            Wait::Products(_) => {
                let Some(pending) = block.warpgroups[(warp.index / 4) as usize].pending.front() else { return false };
                if pending.joined == 0xf {
                    return false;
                }
                let here = self.side_of(&pending.issued);
                let what = format!("a product that only warps {:#06b} of a warpgroup started", pending.joined);
                self.report(Fault::Collective, what, None, here, Some(self.side_of(at)));
                true
            }
            _ => false,
        }
    }
}
