//! Results in f32, for calls that see a part of the keys or of the queries: rows of O that threads store or merge
//! themselves, without rounding them to 16 bits.

use crate::no_kernel::NoKernel;
use crate::parts::arguments::DeviceTensor;
use fulgurite_ptx::{GlobalRows, Group, Pointer, RowView, Scope, Val, Var};
use std::f32::consts::{LN_2, LOG2_E};

/// The element type of results (O, or the gradients of q, k and v), and whether they are added to what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResultType {
    /// That of q, k and v.
    #[default]
    Input,
    /// f32.
    F32,
    /// f32, merged with results over other keys: forward merges o and the LSE with those that are given, backward adds to
    /// the gradients that are given.
    Added,
}

impl ResultType {
    /// Whether results are f32.
    pub fn is_f32(self) -> bool {
        self != ResultType::Input
    }
}

/// Refuses an f32 tensor that threads cannot address by `unit` elements.
pub(crate) fn check_f32(name: &str, tensor: &DeviceTensor, unit: u64) -> Result<(), NoKernel> {
    let ([.., dim], span) = (tensor.shape, tensor.span);
    let fits = span.address().is_multiple_of(4 * unit)
        && dim.is_multiple_of(unit)
        && tensor.strides.iter().all(|stride| stride.is_multiple_of(unit));
    match fits || tensor.shape.contains(&0) {
        true => Ok(()),
        false => Err(NoKernel {
            feature: format!(
                "`{name}` in f32 with {dim} elements a row and strides {:?} (it has multiples of {unit})",
                tensor.strides
            ),
        }),
    }
}

/// Columns that a head dimension is padded to: only the last ones may lie past the end of a row.
const PADDED_TO: u32 = 16;
/// Pairs of columns that a thread loads before it stores the first of them: with head dimensions up to 128, all that a
/// thread of `wgmma` has, so that merging waits for memory once.
const PAIRS: usize = 32;

/// Two neighbouring columns that a thread has of one of its rows.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    /// The place of the first column among the registers of the row.
    period: usize,
    at: usize,
    /// The first column, from the thread's first one on.
    column: u32,
}

/// Elements of a thread that were loaded from O, by pair of columns.
pub(crate) struct Loaded<'k>(Vec<[Var<'k, f32>; 2]>);

/// Rows of O in f32, from a tile's first row on.
pub struct F32Rows<'k> {
    /// The rows; pairs of elements are aligned to 8 bytes.
    pub rows: GlobalRows<'k>,
    /// Whether the tile's results are merged with those in memory; otherwise they replace them.
    pub merges: bool,
}

/// The shares of a row's old and new result in the merged one.
pub(crate) struct Shares<'k> {
    pub old: Val<'k, f32>,
    pub new: Val<'k, f32>,
    /// The merged LSE.
    pub lse: Val<'k, f32>,
}

impl<'k> Shares<'k> {
    /// Merges the LSE of a part with the LSE that is given. Either may be -inf: no key was seen.
    pub fn of(given: Val<'k, f32>, part: Val<'k, f32>) -> Shares<'k> {
        let most = given.max(part);
        let most = most.eq(f32::NEG_INFINITY).select::<f32>(0.0, most);
        let [old, new] = [given, part].map(|lse| ((lse - most) * LOG2_E).exp2());
        let sum = old + new;
        let inverse = sum.eq(0.0).select::<f32>(0.0, sum.recip());
        Shares { old: old * inverse, new: new * inverse, lse: sum.log2().mul_add(LN_2, most) }
    }
}

impl<'k> F32Rows<'k> {
    /// Starts to bring the first `count` rows into the L2 cache; only a hint. One thread of the warpgroup asks for each row.
    pub(crate) fn prefetch(&self, w: &Scope<'k, Group>, count: u32) {
        let row = w.thread_in_group();
        let wanted = row.lt(count) & row.lt(self.rows.rows) & self.rows.bytes.ge(16);
        w.when(wanted, |w| {
            // Rows begin at a multiple of 8 bytes, and what is asked for at a multiple of 16.
            let from = self.rows.address + row.to_u64().mul_wide_64(self.rows.stride);
            let from = Pointer::<f32>::at_address(from & !15u64);
            from.prefetch(w, self.rows.bytes & !15u32);
        });
    }

    /// The pairs of columns that a thread has, row by row.
    fn places<A: RowView<'k>>(o: &A) -> Vec<Place> {
        let periods = (0..(o.cols() / A::PERIOD) as usize).collect::<Vec<_>>();
        let of_row = |row| {
            let of_period = move |period| {
                let at = (0..A::RUN as usize).step_by(2);
                at.map(move |at| Place { row, period, at, column: period as u32 * A::PERIOD + at as u32 })
            };
            periods.iter().copied().flat_map(of_period).collect::<Vec<_>>()
        };
        (0..A::ROWS).flat_map(of_row).collect()
    }

    /// Calls `body` for each place inside O, with the number of the place and the thread's first element of its row.
    fn each_place<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        o: &A,
        places: &[Place],
        body: impl Fn(&Scope<'k, Group>, usize, Place, Pointer<'k, f32>),
    ) {
        let own_col = A::first_col(w);
        let mut number = 0;
        for of_row in places.chunk_by(|a, b| a.row == b.row) {
            let own_row = A::first_row(w) + A::row_offset(of_row[0].row);
            let to = self.rows.address + own_row.to_u64().mul_wide_64(self.rows.stride) + (own_col * 4).to_u64();
            let to = Pointer::<f32>::at_address(to);
            w.when(own_row.lt(self.rows.rows), |w| {
                for (i, place) in (number..).zip(of_row) {
                    // A thread's pairs begin at most one period after the column.
                    match place.column + A::PERIOD + PADDED_TO <= o.cols() {
                        true => body(w, i, *place, to),
                        false => w.when(((own_col + place.column) * 4).lt(self.rows.bytes), |w| body(w, i, *place, to)),
                    }
                }
            });
            number += of_row.len();
        }
    }

    fn load_places<A: RowView<'k>>(&self, w: &Scope<'k, Group>, o: &A, places: &[Place]) -> Loaded<'k> {
        let loaded: Vec<_> = places.iter().map(|_| [(); 2].map(|()| w.var(0.0f32))).collect();
        self.each_place(w, o, places, |w, i, place, from| {
            let [a, b] = from.load_some::<_, 2>(w, place.column);
            loaded[i][0].set(a);
            loaded[i][1].set(b);
        });
        Loaded(loaded)
    }

    /// Loads the first of the elements with which a tile is merged. Nothing waits for them until [`store`](Self::store).
    pub(crate) fn load<A: RowView<'k>>(&self, w: &Scope<'k, Group>, o: &A) -> Loaded<'k> {
        let places = Self::places(o);
        self.load_places(w, o, &places[..places.len().min(PAIRS)])
    }

    /// Stores `f(row, x)` of each element x of a tile. `merged`: merged with what is there by the shares of its row; the
    /// first elements are [`load`](Self::load)ed already.
    pub(crate) fn store<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        o: &A,
        merged: Option<(&[Shares<'k>], Loaded<'k>)>,
        f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>,
    ) {
        let elements: Vec<Val<'k, f32>> = o.elements().collect();
        let places = Self::places(o);
        let (shares, mut first) = match merged {
            Some((shares, first)) => (Some(shares), Some(first)),
            None => (None, None),
        };
        for places in places.chunks(PAIRS) {
            let loaded = shares.map(|_| first.take().unwrap_or_else(|| self.load_places(w, o, places)));
            self.each_place(w, o, places, |w, i, Place { row, period, at, column }, to| {
                let pair = [0, 1].map(|half| {
                    let x = f(row, elements[A::index(row, period, at + half)]);
                    let (Some(shares), Some(loaded)) = (shares, &loaded) else { return x };
                    // What has no share may hold anything.
                    let Shares { old, new, .. } = &shares[row];
                    let given = old.eq(0.0).select::<f32>(0.0, loaded.0[i][half].get());
                    given.mul_add(*old, x * *new)
                });
                to.store_some(w, column, pair);
            });
        }
    }
}
