//! O in f32, which the threads that computed it store.

use crate::attention::forward::mma_sync::params::Rows;
use crate::parts::epilogue::{Corner, Output};
use crate::parts::results::{F32Rows, ResultType};
use crate::parts::schedule::Work;
use crate::parts::sequences::Sequences;
use fulgurite_ptx::{Group, Scope, Tile, Val};

/// Stores f32 rows, or merges them with the rows that are there. Nothing is staged in shared memory.
pub(super) struct F32Output<'a, 'k> {
    pub o: &'a Rows<'k>,
    pub sequences: &'a Sequences<'k>,
    pub results: ResultType,
}

impl<'k> Output<'k> for F32Output<'_, 'k> {
    fn reserve(&self, _: &Scope<'k, Group>, _: u32) {
        unreachable!("bug in fulgurite: f32 results are not staged");
    }

    fn store(&self, _: &Scope<'k, Group>, _: &Work<'k>, _: Tile<'k>, _: Corner<'k>) {
        unreachable!("bug in fulgurite: f32 results are not staged");
    }

    fn f32_rows(&self, work: &Work<'k>, first: Val<'k, u32>) -> Option<F32Rows<'k>> {
        if !self.results.is_f32() {
            return None;
        }
        let count = self.sequences.q_rows(work.sequence);
        let rows = self.o.rows(self.sequences, work, work.head, [first, count]);
        Some(F32Rows { rows, merges: self.results == ResultType::Added })
    }
}
