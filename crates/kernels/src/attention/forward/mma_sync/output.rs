//! O is stored by the threads that computed it.

use crate::attention::forward::f32_output::F32Output;
use crate::attention::forward::mma_sync::params::Rows;
use crate::parts::epilogue::{Corner, Output};
use crate::parts::results::{F32Rows, ResultType};
use crate::parts::row_memory::Storers;
use crate::parts::schedule::Work;
use crate::parts::sequences::Sequences;
use fulgurite_ptx::{Group, GroupBarrier, Scope, Tile, Val};

/// Threads of a warpgroup.
const THREADS: u32 = 128;

/// Stores O with the threads of the warpgroup, for GPUs without TMA.
pub(super) struct ThreadOutput<'a, 'k> {
    pub o: &'a Rows<'k>,
    pub sequences: &'a Sequences<'k>,
    pub barrier: &'a GroupBarrier,
    /// Rows and 16-byte units per row of the staging buffer.
    pub rows: u32,
    pub units: u32,
    pub results: ResultType,
}

impl<'k> Output<'k> for ThreadOutput<'_, 'k> {
    /// Waits until all warps have read the queries, whose memory the staging buffer reuses.
    fn reserve(&self, w: &Scope<'k, Group>, _: u32) {
        w.sync_group(self.barrier);
    }

    fn store(&self, w: &Scope<'k, Group>, work: &Work<'k>, staging: Tile<'k>, corner: Corner<'k>) {
        w.sync_group(self.barrier);
        let count = self.sequences.q_rows(work.sequence);
        let to = self.o.rows(self.sequences, work, work.head, [corner.row, count]);
        Storers { own: w.thread_in_group(), count: THREADS }.store(w, staging, [self.rows, self.units], to);
    }

    fn f32_rows(&self, work: &Work<'k>, first: Val<'k, u32>) -> Option<F32Rows<'k>> {
        F32Output { o: self.o, sequences: self.sequences, results: self.results }.f32_rows(work, first)
    }
}
