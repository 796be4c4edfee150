//! Accumulators as rows: which elements of a matrix a thread holds, whatever unit multiplied it.
//!
//! Masks, softmax, score modifiers and epilogues go through accumulators element by element and need to know three things:
//! in which of the thread's rows an element is, in which column, and which lanes hold the rest of the row. [`RowView`]
//! answers them, so that such code is written once for every tensor unit.

use crate::build::{Group, Half, Pair, Scope, Val, WholeWarps, Word};
use crate::tile::{Acc, Tile};

/// Accumulators of f32, seen as rows that threads share.
///
/// A warpgroup holds [`GROUP_ROWS`](Self::GROUP_ROWS) rows. Each thread holds elements of [`ROWS`](Self::ROWS) of them, and
/// [`LANES`](Self::LANES) neighbouring lanes hold a row together. In a row, a thread holds [`RUN`](Self::RUN) neighbouring
/// columns, then skips those of the other lanes, and so on.
pub trait RowView<'k>: Sized {
    /// Rows that a thread holds elements of.
    const ROWS: usize;
    /// Neighbouring lanes that hold a row together: a power of two.
    const LANES: u32;
    /// Neighbouring columns of a row that a thread holds at a time.
    const RUN: u32;
    /// Rows that a warpgroup holds.
    const GROUP_ROWS: u32;
    /// Columns after which the pattern repeats.
    const PERIOD: u32 = Self::RUN * Self::LANES;

    /// Which of the thread's rows its `i`-th element is in.
    fn row_of(i: usize) -> usize;
    /// Column of the `i`-th element, to which the thread's first column ([`first_col`](Self::first_col)) is added.
    fn col_of(i: usize) -> u32;
    /// Number of the element in the thread's `row`-th row that is `at`-th in the `period`-th period of columns.
    fn index(row: usize, period: usize, at: usize) -> usize;
    /// Rows from the thread's first row to its `row`-th.
    fn row_offset(row: usize) -> u32;

    /// The thread's first row, among those of its warpgroup.
    fn first_row(w: &Scope<'k, Group>) -> Val<'k, u32>;
    /// The thread's first column.
    fn first_col<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32>;
    /// The lane's number among those that hold the same rows.
    fn lane_in_row<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32>;

    /// Columns.
    fn cols(&self) -> u32;
    /// The thread's elements, in order. They are the registers themselves: read them only where no product is pending.
    fn elements(&self) -> impl Iterator<Item = Val<'k, f32>>;
    /// Replaces the `i`-th element.
    fn set(&self, i: usize, x: Val<'k, f32>);
    /// The `index`-th part of `count` columns, in the same registers.
    fn part(&self, index: u32, count: u32) -> Self;

    /// Writes what `f` makes of each element (given the number of its row in the thread), rounded to 16 bits, to a tile with
    /// the warpgroup's rows.
    fn write_with<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        tile: Tile<'k>,
        f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>,
    ) where
        Pair<T>: Word;

    /// Waits for all products into such accumulators.
    fn wait(w: &Scope<'k, Group>);
    /// The same, and not before `results` are computed, none of which is ever negative.
    fn wait_after(w: &Scope<'k, Group>, results: &[Val<'k, f32>]);

    /// `f` over all elements of a row, given what it makes of the thread's own; the result in each lane of the row.
    #[track_caller]
    fn reduce_row<W: WholeWarps>(
        w: &Scope<'k, W>,
        x: Val<'k, f32>,
        f: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>,
    ) -> Val<'k, f32> {
        w.reduce(x, Self::LANES, f)
    }

    /// Whether the thread is the one that stores what there is once for each row.
    #[track_caller]
    fn is_first_of_row<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, bool> {
        Self::first_col(w).eq(0)
    }
}

/// The accumulators of `wgmma`: a warp has 16 of the 64 rows, a thread one of the upper eight and the one eight below, and
/// two of each eight columns.
impl<'k> RowView<'k> for Acc<'k> {
    const ROWS: usize = 2;
    const LANES: u32 = 4;
    const RUN: u32 = 2;
    const GROUP_ROWS: u32 = 64;

    fn row_of(i: usize) -> usize {
        Acc::row_of(i)
    }
    fn col_of(i: usize) -> u32 {
        Acc::col_of(i)
    }
    fn index(row: usize, period: usize, at: usize) -> usize {
        4 * period + 2 * row + at
    }
    fn row_offset(row: usize) -> u32 {
        8 * row as u32
    }

    #[track_caller]
    fn first_row(w: &Scope<'k, Group>) -> Val<'k, u32> {
        w.first_row()
    }
    #[track_caller]
    fn first_col<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32> {
        (w.lane() & 3) * 2
    }
    #[track_caller]
    fn lane_in_row<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32> {
        w.lane() & 3
    }

    fn cols(&self) -> u32 {
        Acc::cols(self)
    }
    fn elements(&self) -> impl Iterator<Item = Val<'k, f32>> {
        Acc::elements(self)
    }
    #[track_caller]
    fn set(&self, i: usize, x: Val<'k, f32>) {
        Acc::set(self, i, x);
    }
    #[track_caller]
    fn part(&self, index: u32, count: u32) -> Self {
        Acc::part(self, index, count)
    }

    #[track_caller]
    fn write_with<T: Half>(&self, w: &Scope<'k, Group>, tile: Tile<'k>, f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>)
    where
        Pair<T>: Word,
    {
        w.write_with::<T>(tile, self, f);
    }

    #[track_caller]
    fn wait(w: &Scope<'k, Group>) {
        w.wait_products(0);
    }
    #[track_caller]
    fn wait_after(w: &Scope<'k, Group>, results: &[Val<'k, f32>]) {
        w.wait_products_after(0, results);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::accumulator_element;

    /// What the view says of each element is where the tensor unit puts it.
    #[test]
    fn the_view_of_wgmma_accumulators() {
        type View<'k> = Acc<'k>;
        for (thread, i) in (0..128u32).flat_map(|t| (0..32u32).map(move |i| (t, i))) {
            let (row, col) = accumulator_element(thread, i);
            let first_row = 16 * (thread / 32) + thread % 32 / 4;
            let first_col = 2 * (thread % View::LANES);
            assert_eq!(row, first_row + View::row_offset(View::row_of(i as usize)));
            assert_eq!(col, first_col + View::col_of(i as usize));
            let (period, at) = (View::col_of(i as usize) / View::PERIOD, View::col_of(i as usize) % View::PERIOD);
            assert_eq!(View::index(View::row_of(i as usize), period as usize, at as usize), i as usize);
            assert!(row < View::GROUP_ROWS && View::row_of(i as usize) < View::ROWS && at < View::RUN);
        }
    }
}
