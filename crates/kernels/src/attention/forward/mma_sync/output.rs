//! O is stored by the threads that computed it.

use crate::attention::forward::f32_output::F32Output;
use crate::attention::forward::mma_sync::params::RowMemory;
use crate::parts::epilogue::{Corner, Output};
use crate::parts::results::{F32Rows, ResultType};
use crate::parts::schedule::Work;
use crate::parts::sequences::Sequences;
use fulgurite_ptx::{Group, GroupBarrier, Pointer, Scope, Tile, Val};

/// Threads of a warpgroup.
const THREADS: u32 = 128;
/// Bytes that a thread stores at a time.
const UNIT: u32 = 16;

/// Stores O with the threads of the warpgroup, for GPUs without a copy engine.
pub(super) struct ThreadOutput<'a, 'k> {
    pub o: &'a RowMemory<'k>,
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
        let own = w.thread_in_group();
        let units = self.rows * self.units;
        for step in 0..units.div_ceil(THREADS) {
            let index = own + step * THREADS;
            let (row, unit) = (index / self.units, index % self.units);
            let column = unit * UNIT;
            let inside = row.lt(to.rows.min(self.rows)) & column.lt(to.bytes);
            w.when(inside, |w| {
                let words = staging.read_unit(w, row, unit);
                let address = to.address + row.to_u64().mul_wide_64(to.stride) + column.to_u64();
                Pointer::<u32>::at_address(address).store_some(w, 0, words);
            });
        }
    }

    fn f32_rows(&self, work: &Work<'k>, first: Val<'k, u32>) -> Option<F32Rows<'k>> {
        F32Output { o: self.o, sequences: self.sequences, results: self.results }.f32_rows(work, first)
    }
}
