//! Accumulators with one row per thread, as a warpgroup holds them after it reads its lanes of tensor memory.

use crate::accumulators::Fragment;
use crate::build::{Builder, Group, Half, Pair, Scope, Val, WholeWarps, Word};
use crate::inst::{Arg, Base, Class, Reg};
use crate::row_view::RowView;
use crate::table::{convert, memory};
use crate::tile::Tile;
use std::panic::Location;

/// Elements of 16 bits that a thread writes to shared memory at a time: 16 bytes.
const RUN: u32 = 8;

/// 128 rows and `cols` columns of f32: thread t of the warpgroup holds row t.
pub struct RowAcc<'k> {
    k: &'k Builder,
    regs: Vec<Reg>,
}

impl<'k> Scope<'k, Group> {
    /// Allocates accumulators with one row per thread.
    #[track_caller]
    pub fn row_accumulators(&self, cols: u32) -> RowAcc<'k> {
        if cols == 0 || !cols.is_multiple_of(RUN) {
            self.k.refuse(format!("rows of {cols} columns, allowed: multiples of {RUN}, at least {RUN}"));
        }
        RowAcc { k: self.k, regs: (0..cols).map(|_| self.k.register(Class::F32)).collect() }
    }

    /// Allocates 16-bit elements with one row per thread.
    #[track_caller]
    pub fn row_fragment<T: Half>(&self, cols: u32) -> Fragment<'k, T>
    where
        Pair<T>: Word,
    {
        if !cols.is_multiple_of(2) {
            self.k.refuse(format!("a fragment of {cols} columns, allowed: even numbers"));
        }
        Fragment::new(self.k, cols as usize / 2, cols)
    }
}

impl<'k> Scope<'k, Group> {
    /// Writes the thread's row of a fragment to a tile with the warpgroup's rows, from column `first` on.
    #[track_caller]
    pub fn write_row_fragment<T: Half>(&self, tile: Tile<'k>, first: u32, fragment: &Fragment<'k, T>)
    where
        Pair<T>: Word,
    {
        let (shape, cols) = (tile.shape(), fragment.cols());
        let fits = first.is_multiple_of(RUN) && cols.is_multiple_of(RUN) && first + cols <= shape.cols;
        if tile.row_count() != RowAcc::GROUP_ROWS || !fits || shape.number != T::NUMBER {
            self.k.refuse(format!(
                "{}x{cols} {} written from column {first} on to {} rows of {shape:?}, allowed: as many rows, whole runs of {RUN} columns inside, the same type",
                RowAcc::GROUP_ROWS,
                T::NAME,
                tile.row_count()
            ));
            return;
        }
        let swizzle = shape.swizzle;
        let linear = self.thread_in_group() * swizzle.line();
        let base = tile.address() + (linear ^ ((linear >> 3) & swizzle.mask()));
        let units = swizzle.line() / 16;
        for (unit, run) in (first / RUN..).zip(fragment.regs().chunks(RUN as usize / 2)) {
            // Offsets of units inside a line use address bits that the row does not reach, so xor adds them under the
            // swizzle.
            let address = if unit % units == 0 { base } else { base ^ (unit % units * 16) };
            let place = Arg::Address(Base::Reg(address.in_register()), (unit / units * shape.chunk_bytes()) as i32);
            self.k.emit(&memory::ST_SHARED_32, [place, Arg::List(run.into()), Arg::Word(".v4")]);
        }
    }
}

impl RowAcc<'_> {
    /// The registers of the thread's row.
    pub(crate) fn regs(&self) -> &[Reg] {
        &self.regs
    }
}

impl<'k> RowView<'k> for RowAcc<'k> {
    const ROWS: usize = 1;
    const LANES: u32 = 1;
    const RUN: u32 = RUN;
    const GROUP_ROWS: u32 = 128;
    const TOGETHER: usize = 2;

    fn row_of(_: usize) -> usize {
        0
    }
    fn col_of(i: usize) -> u32 {
        i as u32
    }
    fn index(_: usize, period: usize, at: usize) -> usize {
        RUN as usize * period + at
    }
    fn row_offset(_: usize) -> u32 {
        0
    }

    #[track_caller]
    fn first_row(w: &Scope<'k, Group>) -> Val<'k, u32> {
        w.thread_in_group()
    }
    #[track_caller]
    fn first_col<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32> {
        w.constant(0u32)
    }
    #[track_caller]
    fn lane_in_row<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32> {
        w.constant(0u32)
    }

    fn cols(&self) -> u32 {
        self.regs.len() as u32
    }
    fn elements(&self) -> impl Iterator<Item = Val<'k, f32>> {
        let k = self.k;
        self.regs.iter().map(move |&reg| Val::reg(k, reg))
    }
    #[track_caller]
    fn set(&self, i: usize, x: Val<'k, f32>) {
        self.k.emit(&convert::MOV_F32, [Arg::Reg(self.regs[i]), x.arg()]);
    }
    #[track_caller]
    fn part(&self, index: u32, count: u32) -> Self {
        let [start, end] = [index * count, (index + 1) * count];
        if !count.is_multiple_of(RUN) || end > self.cols() {
            let cols = self.cols();
            self.k.refuse(format!("part {index} of {count} columns of {cols}, allowed: multiples of {RUN} inside"));
            return RowAcc { k: self.k, regs: self.regs.clone() };
        }
        RowAcc { k: self.k, regs: self.regs[start as usize..end as usize].to_vec() }
    }

    #[track_caller]
    fn write_with<T: Half>(&self, w: &Scope<'k, Group>, tile: Tile<'k>, f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>)
    where
        Pair<T>: Word,
    {
        let (shape, cols) = (tile.shape(), self.cols());
        if tile.row_count() != Self::GROUP_ROWS || cols > shape.cols || shape.number != T::NUMBER {
            self.k.refuse(format!(
                "{}x{cols} {} written to {} rows of {shape:?}, allowed: as many rows and columns, the same type",
                Self::GROUP_ROWS,
                T::NAME,
                tile.row_count()
            ));
            return;
        }
        let (at, elements) = (Location::caller(), self.elements().collect::<Vec<Val<'k, f32>>>());
        for (unit, run) in (0u32..).zip(elements.chunks(RUN as usize)) {
            let words = std::array::from_fn(|i| {
                let (low, high) = (f(0, run[2 * i]), f(0, run[2 * i + 1]));
                let pair = self.k.placed(at, || low.pair_with::<T>(high).in_register());
                Val::<u32>::reg(self.k, pair)
            });
            tile.write_unit(w, Self::first_row(w), w.constant(unit), words);
        }
    }

    /// Tensor memory is read after the products into it are complete.
    fn wait(_: &Scope<'k, Group>) {}
    fn wait_after(_: &Scope<'k, Group>, _: &[Val<'k, f32>]) {}
}
