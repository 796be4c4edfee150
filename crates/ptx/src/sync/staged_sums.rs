//! Adds rows of f32 to sums in global memory with bulk reductions: a warpgroup with one row per thread writes some columns
//! to a buffer in shared memory, and one of its threads has TMA add them (`cp.reduce.async.bulk`).

use crate::build::{Builder, Group, GroupBarrier, IntoVal, Pointer, Scope, Val};
use crate::inst::{Arg, Base};
use crate::row_acc::RowAcc;
use crate::row_view::RowView;
use crate::table::{bytes, memory};
use std::panic::Location;

/// Rows of a warpgroup.
const ROWS: u32 = 128;
/// Elements of a row that a thread writes at a time.
const FOUR: u32 = 4;

/// Two buffers in shared memory, each for some columns of 128 rows. TMA adds one while the warpgroup writes the
/// other.
pub struct StagedSums<'k> {
    k: &'k Builder,
    /// Shared-memory offset of the first buffer.
    first: u32,
    /// Columns of a buffer.
    cols: u32,
}

impl Builder {
    /// Buffers of `cols` columns, a multiple of eight, for a role of one warpgroup.
    #[track_caller]
    pub fn staged_sums(&self, name: &str, cols: u32) -> StagedSums<'_> {
        if cols == 0 || !cols.is_multiple_of(8) {
            self.refuse(format!("staged sums `{name}` of {cols} columns, allowed: multiples of 8, at least 8"));
        }
        StagedSums { k: self, first: self.take_shared(name, 2 * ROWS * cols * 4, 128), cols }
    }
}

impl<'k> StagedSums<'k> {
    /// Adds all columns of `rows`, some at a time, to sums that lie as `[four columns][row][4]`. TMA may still
    /// be reading the buffers afterwards, and adds later.
    #[track_caller]
    pub fn add(&self, w: &Scope<'k, Group>, barrier: &GroupBarrier, rows: &RowAcc<'k>, to: Pointer<'k, f32>) {
        let (k, at, count) = (self.k, Location::caller(), rows.cols() / self.cols);
        if !rows.cols().is_multiple_of(self.cols) {
            k.refuse(format!("{} columns in parts of {}, allowed: whole parts", rows.cols(), self.cols));
            return;
        }
        let bytes = ROWS * self.cols * 4;
        for i in 0..count {
            // With an odd number of parts, the first part uses the buffer of the last one before it.
            let pending = u32::from(count.is_multiple_of(2));
            let buffer = self.first + i % 2 * bytes;
            w.one_thread_of_group(|t| k.placed(at, || t.wait_stores_read(pending)));
            w.sync_group(barrier);
            k.placed(at, || self.write(w, &rows.part(i, self.cols), buffer));
            w.publish_shared();
            w.sync_group(barrier);
            w.one_thread_of_group(|t| {
                k.placed(at, || {
                    let to = to.at((i * ROWS * self.cols).into_val(k)).address().in_register();
                    let from = k.shared_address(buffer).in_register();
                    let [to, from] = [to, from].map(|reg| Arg::Address(Base::Reg(reg), 0));
                    k.emit(&bytes::REDUCE_BYTES, [to, from, t.constant(bytes).arg(), Arg::Word("add.f32")]);
                    t.commit_stores();
                });
            });
        }
    }

    /// Writes the thread's row as `[four columns][row][4]`.
    fn write(&self, w: &Scope<'k, Group>, part: &RowAcc<'k>, buffer: u32) {
        let own: Val<'k, u32> = w.thread_in_group().mul_add(4 * FOUR, self.k.shared_address(buffer));
        let own = own.in_register();
        for (i, four) in part.regs().chunks_exact(FOUR as usize).enumerate() {
            let place = Arg::Address(Base::Reg(own), (i as u32 * ROWS * 4 * FOUR) as i32);
            self.k.emit(&memory::ST_SHARED_F32, [place, Arg::List(four.into()), Arg::Word(".v4")]);
        }
    }

    /// Waits until TMA has added everything, before the role ends.
    #[track_caller]
    pub fn end(&self, w: &Scope<'k, Group>) {
        let at = Location::caller();
        w.one_thread_of_group(|t| self.k.placed(at, || t.wait_stores(0)));
    }
}
