//! Accumulators as rows: which elements of a matrix a thread holds, independent of the tensor unit.
//!
//! Masks, softmax, score modifiers and epilogues process accumulators element by element. They need to know the row and
//! the column of an element, and the lanes that hold the rest of its row. [`RowView`] answers these questions, so such
//! code is written once for every tensor unit.

use crate::accumulators::Acc;
use crate::build::{Group, Half, Pair, Scope, Val, WholeWarps, Word};
use crate::tile::Tile;

/// f32 accumulators, seen as rows that lanes share.
///
/// A warpgroup holds [`GROUP_ROWS`](Self::GROUP_ROWS) rows. Each thread holds elements of [`ROWS`](Self::ROWS) of them,
/// and [`LANES`](Self::LANES) neighbouring lanes share a row. Within a row, a thread holds [`RUN`](Self::RUN)
/// neighbouring columns out of every [`PERIOD`](Self::PERIOD).
pub trait RowView<'k>: Sized {
    /// Number of rows of which a thread holds elements.
    const ROWS: usize;
    /// Number of neighbouring lanes that share a row, a power of two.
    const LANES: u32;
    /// Number of neighbouring columns that a thread holds in each period.
    const RUN: u32;
    /// Number of rows that a warpgroup holds.
    const GROUP_ROWS: u32;
    /// Number of neighbouring elements of a row on which one instruction may operate, on architectures that have such
    /// instructions: 1 or 2.
    const TOGETHER: usize = 1;
    /// Number of columns after which the pattern repeats.
    const PERIOD: u32 = Self::RUN * Self::LANES;

    /// Index of the `i`-th element's row among the thread's rows.
    fn row_of(i: usize) -> usize;
    /// Column of the `i`-th element, relative to the thread's first column ([`first_col`](Self::first_col)).
    fn col_of(i: usize) -> u32;
    /// Index of the thread's `at`-th element in the `period`-th period of columns of its `row`-th row.
    fn index(row: usize, period: usize, at: usize) -> usize;
    /// Distance in rows from the thread's first row to its `row`-th.
    fn row_offset(row: usize) -> u32;

    /// The thread's first row, among the rows of its warpgroup.
    fn first_row(w: &Scope<'k, Group>) -> Val<'k, u32>;
    /// The thread's first column.
    fn first_col<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32>;
    /// Index of the lane among those that hold the same rows.
    fn lane_in_row<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, u32>;

    /// Number of columns.
    fn cols(&self) -> u32;
    /// The thread's elements, in register order. The values are the accumulator registers themselves, so read them only
    /// while no product is pending.
    fn elements(&self) -> impl Iterator<Item = Val<'k, f32>>;
    /// Replaces the `i`-th element.
    fn set(&self, i: usize, x: Val<'k, f32>);
    /// The `index`-th range of `count` columns, in the same registers.
    fn part(&self, index: u32, count: u32) -> Self;

    /// Writes `f(row, x)` of each element `x`, rounded to 16 bits, to a tile with the warpgroup's rows. `row` is the
    /// index of the element's row in the thread.
    fn write_with<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        tile: Tile<'k>,
        f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>,
    ) where
        Pair<T>: Word;

    /// Waits for all products into these accumulators.
    fn wait(w: &Scope<'k, Group>);
    /// Waits for all products, but not before `results` are computed. No result may be negative.
    fn wait_after(w: &Scope<'k, Group>, results: &[Val<'k, f32>]);

    /// Reduces a row with `f`, starting from each thread's own partial result; every lane of the row gets the total.
    #[track_caller]
    fn reduce_row<W: WholeWarps>(
        w: &Scope<'k, W>,
        x: Val<'k, f32>,
        f: impl Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>,
    ) -> Val<'k, f32> {
        w.reduce(x, Self::LANES, f)
    }

    /// Whether this thread stores the values that exist once per row.
    #[track_caller]
    fn is_first_of_row<W: WholeWarps>(w: &Scope<'k, W>) -> Val<'k, bool> {
        Self::first_col(w).eq(0)
    }
}

/// The accumulators of `wgmma`. A warp holds 16 of the 64 rows; a thread holds one of the upper eight rows, the row
/// eight below it, and two of each eight columns.
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

    /// The view agrees with the tensor unit about the position of each element.
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
