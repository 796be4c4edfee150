//! The epilogue of a tile: writes o / l to O, and the LSE.

use crate::parts::modifier::Sinks;
use crate::parts::results::{F32Rows, Shares};
use crate::parts::schedule::{Of, Unequal, Work};
use crate::parts::softmax::Totals;
use fulgurite_ptx::{Group, GroupBarrier, Half, Pair, Pointer, RowView, Scope, Tensor, Tile, Val, Word};
use std::f32::consts::LN_2;

/// Inputs of a tile's epilogue other than its rows.
pub struct Epilogue<'a, 'k> {
    pub lse: Pointer<'k, f32>,
    /// Rows of one head's LSE.
    pub lse_rows: Val<'k, u32>,
    pub heads: Val<'k, u32>,
    /// Queries per sequence, in a batch of equal sequences.
    pub q_len: Option<Val<'k, u32>>,
    /// Whether the LSE has the shape `[heads, total]`; otherwise it has `[batch, heads, room]`.
    pub packed: bool,
    pub sinks: Option<Sinks<'k>>,
    pub own: Val<'k, u32>,
    /// The warpgroup's first column of O, if several warpgroups share the columns of a row.
    pub first_column: Option<Val<'k, u32>>,
    /// Factor from scores to powers of two.
    pub scale: Val<'k, f32>,
    /// The way from a staging buffer to O.
    pub output: &'a dyn Output<'k>,
    /// Shared-memory buffers of the warpgroup for O, used in rotation. Each holds all rows of `part` columns.
    pub staging: &'a [Tile<'k>],
    /// Columns per staging buffer.
    pub part: u32,
}

impl<'k> Epilogue<'_, 'k> {
    /// Writes o / l to O through shared memory, and m + ln l to the LSE.
    pub fn run<T: Half>(&self, w: &Scope<'k, Group>, work: &Work<'k>, o: &impl RowView<'k>, totals: Totals<'k>)
    where
        Pair<T>: Word,
    {
        self.run_rows::<T, _>(w, work, o, totals);
    }

    /// Starts to bring the rows with which a tile of `count` rows will be merged into the L2 cache, if it will be.
    pub fn prefetch(&self, w: &Scope<'k, Group>, work: &Work<'k>, count: u32) {
        let rows = self.output.f32_rows(work, work.row + self.own * count);
        if let Some(rows) = rows.filter(|rows| rows.merges) {
            rows.prefetch(w, count);
        }
    }

    /// The warpgroup's first row of a tile, in the sequence.
    pub(crate) fn first_row<A: RowView<'k>>(&self, work: &Work<'k>) -> Val<'k, u32> {
        work.row + self.own * A::GROUP_ROWS
    }

    /// The rows of the LSE of a tile's head and sequence.
    pub(crate) fn lse_rows_of(&self, work: &Work<'k>) -> LseRows<'k> {
        let (before, room) = match (work.sequence, self.q_len) {
            (Some(s), _) => (if self.packed { s.q_start } else { s.q_start.literal(0) }, s.q_room),
            (None, Some(q_len)) => (q_len.literal(0), q_len),
            (None, None) => unreachable!("bug in fulgurite: a tile without its sequence"),
        };
        let head = if self.packed { work.head } else { work.batch * self.heads + work.head };
        LseRows { start: head.mul_wide(self.lse_rows), before, room }
    }

    /// Whether the thread writes the LSE of its rows.
    fn writes_lse<A: RowView<'k>>(&self, w: &Scope<'k, Group>) -> Val<'k, bool> {
        let once = A::is_first_of_row(w);
        self.first_column.map_or(once, |first| once & first.eq(0))
    }

    fn run_rows<T: Half, A: RowView<'k>>(&self, w: &Scope<'k, Group>, work: &Work<'k>, o: &A, totals: Totals<'k>)
    where
        Pair<T>: Word,
    {
        let first = self.first_row::<A>(work);
        let row = |i: usize| first + A::first_row(w) + A::row_offset(i);
        let LseRows { start, before, room } = self.lse_rows_of(work);
        let sink = self.sinks.map(|sinks| sinks.of_head(w, work.head));
        // Rows past those in use get zeros and -inf, whatever was computed for them.
        let unused = work.sequence.map(|s| (0..A::ROWS).map(|i| row(i).ge(s.q_len)).collect::<Vec<_>>());

        let in_f32 = self.output.f32_rows(work, first);
        // The given LSE and o are loaded together, ahead of everything that waits for one of them.
        let given = in_f32.as_ref().filter(|rows| rows.merges).map(|rows| {
            let place = self.lse.at_wide(start);
            let lse = (0..A::ROWS).map(|i| {
                let given = w.var(0.0f32);
                let once = self.writes_lse::<A>(w);
                w.when(row(i).lt(room) & once, |w| given.set(place.load(w, before + row(i))));
                given
            });
            (lse.collect::<Vec<_>>(), rows.load(w, o))
        });
        let mut shares = Vec::new();
        let mut factors = Vec::new();
        for (i, (max, sum)) in totals.max.into_iter().zip(totals.sum).enumerate() {
            let largest = max * self.scale;
            // A sink is one more term of the sum: bring both to the larger exponent.
            let (largest, sum, factor) = match sink {
                Some(sink) => {
                    let both = largest.max(sink);
                    let factor = (largest - both).exp2();
                    (both, sum.mul_add(factor, (sink - both).exp2()), Some(factor))
                }
                None => (largest, sum, None),
            };
            let lse = match sink {
                Some(_) => (largest + sum.log2()) * LN_2,
                None => max.mul_add(self.scale, sum.log2()) * LN_2,
            };
            // A sum of NaN is no empty row: a visible score is NaN, and so are O and the LSE.
            let any = !sum.eq(0.0);
            let mut some = any;
            if let Some(unused) = &unused {
                some = some & !unused[i];
            }
            let mut lse = some.select::<f32>(lse, f32::NEG_INFINITY);
            let place = self.lse.at_wide(start);
            let once = self.writes_lse::<A>(w);
            if let Some((given, _)) = &given {
                // The lane that writes the LSE read it, so that no other lane reads the merged one. All others have zeros.
                let merged = Shares::of(A::reduce_row(w, given[i].get(), |a, b| a + b), lse);
                lse = merged.lse;
                shares.push(merged);
            }
            w.when(row(i).lt(room) & once, |w| place.store(w, before + row(i), lse));
            let inverse = sum.recip();
            let inverse = factor.map_or(inverse, |factor| inverse * factor);
            factors.push(any.select::<f32>(inverse, 0.0));
        }
        if let Some(rows) = in_f32 {
            rows.store(w, o, given.map(|(_, o)| (&shares[..], o)), |row, x| {
                let x = x * factors[row];
                unused.as_ref().map_or(x, |unused| unused[row].select::<f32>(0.0, x))
            });
            return;
        }
        for i in 0..o.cols() / self.part {
            let staging = self.staging[i as usize % self.staging.len()];
            self.output.reserve(w, self.staging.len() as u32);
            o.part(i, self.part).write_with::<T>(w, staging, |row, x| {
                let x = x * factors[row];
                unused.as_ref().map_or(x, |unused| unused[row].select::<f32>(0.0, x))
            });
            let corner = Corner { row: first, first_column: self.first_column, col: i * self.part };
            self.output.store(w, work, staging, corner);
        }
    }
}

/// The rows of the LSE of one head and sequence.
pub(crate) struct LseRows<'k> {
    /// Index of the head's first element.
    pub start: Val<'k, u64>,
    /// Rows of the head before the sequence's first.
    pub before: Val<'k, u32>,
    /// Rows of the sequence.
    pub room: Val<'k, u32>,
}

/// Position of a staging buffer's first element in a tile's rows of O.
#[derive(Clone, Copy)]
pub struct Corner<'k> {
    /// Row in the sequence.
    pub row: Val<'k, u32>,
    /// The warpgroup's first column of O, if it is not 0.
    pub first_column: Option<Val<'k, u32>>,
    /// Column among the warpgroup's.
    pub col: u32,
}

/// The way from staging buffers in shared memory to O in global memory.
pub trait Output<'k> {
    /// Waits until the next of `buffers` staging buffers may be overwritten by all threads of the warpgroup.
    fn reserve(&self, w: &Scope<'k, Group>, buffers: u32);

    /// Stores a buffer that the warpgroup has written. The buffer must not change before it is reserved again.
    fn store(&self, w: &Scope<'k, Group>, work: &Work<'k>, staging: Tile<'k>, corner: Corner<'k>);

    /// The rows of O from row `first` of the tile's sequence on, if O is f32. Threads then store it without staging.
    fn f32_rows(&self, _work: &Work<'k>, _first: Val<'k, u32>) -> Option<F32Rows<'k>> {
        None
    }
}

/// O is stored by TMA.
pub struct CopyEngineOutput<'a, 'k> {
    pub o: &'a Tensor<'k>,
    /// The sequences of a ragged batch.
    pub unequal: Option<&'a Unequal<'k>>,
    pub barrier: &'a GroupBarrier,
}

impl<'k> Output<'k> for CopyEngineOutput<'_, 'k> {
    fn reserve(&self, w: &Scope<'k, Group>, buffers: u32) {
        // TMA must have read this buffer's previous contents.
        w.one_thread_of_group(|t| t.wait_stores_read(buffers - 1));
        w.sync_group(self.barrier);
    }

    fn store(&self, w: &Scope<'k, Group>, work: &Work<'k>, staging: Tile<'k>, corner: Corner<'k>) {
        w.publish_shared();
        w.sync_group(self.barrier);
        w.one_thread_of_group(|t| {
            let col = t.constant(corner.col);
            let (col, row) = (corner.first_column.map_or(col, |first| first + col), corner.row);
            match self.unequal {
                Some(unequal) => t.store_tile(self.o, &unequal.slice(work, Of::O).at(col, row, work.head), staging),
                None => t.store_tile(self.o, &[col, row, work.head, work.batch], staging),
            }
            t.commit_stores();
        });
    }
}
