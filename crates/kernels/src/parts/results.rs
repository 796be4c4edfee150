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
/// Fours of columns that a thread loads before it stores the first of them: with head dimensions up to 128, all that a
/// thread of `wgmma` has, so that merging waits for memory once.
const FOURS: usize = 16;
/// Columns that the lanes of a row have together in two periods.
const BOTH: u32 = 16;

/// Four neighbouring columns of a row, which a thread loads or stores at once.
///
/// A thread has two columns of each period of eight. Neighbouring lanes swap pairs of two periods: the even one then has
/// four columns of the first period, the odd one of the second.
#[derive(Clone, Copy)]
struct Place {
    row: usize,
    /// The first of the two periods.
    period: usize,
    /// The first column, from the thread's first one on.
    column: u32,
}

/// Elements of a thread that were loaded from O, by place.
pub(crate) struct Loaded<'k>(Vec<[Var<'k, f32>; 4]>);

/// Rows of O in f32, from a tile's first row on.
pub struct F32Rows<'k> {
    /// The rows; fours of elements are aligned to 16 bytes.
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
            let from = self.rows.address + row.to_u64().mul_wide_64(self.rows.stride);
            Pointer::<f32>::at_address(from).prefetch(w, self.rows.bytes);
        });
    }

    /// The fours of columns that a thread has, row by row.
    fn places<A: RowView<'k>>(o: &A) -> Vec<Place> {
        let fits = (A::LANES, A::RUN) == (4, 2) && o.cols().is_multiple_of(BOTH);
        assert!(fits, "bug in fulgurite: f32 results of accumulators of another form");
        let of_row = |row| (0..o.cols() / BOTH).map(move |n| Place { row, period: 2 * n as usize, column: n * BOTH });
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
        let lane = A::lane_in_row(w);
        let own_col = (lane & 2) * 2 + (lane & 1) * A::PERIOD;
        let mut number = 0;
        for of_row in places.chunk_by(|a, b| a.row == b.row) {
            let own_row = A::first_row(w) + A::row_offset(of_row[0].row);
            let to = self.rows.address + own_row.to_u64().mul_wide_64(self.rows.stride) + (own_col * 4).to_u64();
            let to = Pointer::<f32>::at_address(to);
            w.when(own_row.lt(self.rows.rows), |w| {
                for (i, place) in (number..).zip(of_row) {
                    match place.column + BOTH + PADDED_TO <= o.cols() {
                        true => body(w, i, *place, to),
                        false => {
                            w.when(((own_col + place.column) * 4).lt(self.rows.bytes), |w| body(w, i, *place, to));
                        }
                    }
                }
            });
            number += of_row.len();
        }
    }

    fn load_places<A: RowView<'k>>(&self, w: &Scope<'k, Group>, o: &A, places: &[Place]) -> Loaded<'k> {
        let loaded: Vec<_> = places.iter().map(|_| [(); 4].map(|()| w.var(0.0f32))).collect();
        self.each_place(w, o, places, |w, i, place, from| {
            let four = from.load_some::<_, 4>(w, place.column);
            loaded[i].iter().zip(four).for_each(|(to, x)| to.set(x));
        });
        Loaded(loaded)
    }

    /// Loads the first of the elements with which a tile is merged. Nothing waits for them until [`store`](Self::store).
    pub(crate) fn load<A: RowView<'k>>(&self, w: &Scope<'k, Group>, o: &A) -> Loaded<'k> {
        let places = Self::places(o);
        self.load_places(w, o, &places[..places.len().min(FOURS)])
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
        let odd = (A::lane_in_row(w) & 1).ne(0);
        let (shares, mut first) = match merged {
            Some((shares, first)) => (Some(shares), Some(first)),
            None => (None, None),
        };
        // The thread's four elements of a place, scaled by the share of the new result.
        let four = |Place { row, period, .. }: Place| {
            let share = shares.map(|shares| shares[row].new);
            let [a, b] = [0, 1].map(|of| {
                [0, 1].map(|at| {
                    let x = f(row, elements[A::index(row, period + of, at)]);
                    share.map_or(x, |share| x * share)
                })
            });
            let [x, y] = [0, 1].map(|at| w.exchange(odd.select::<f32>(a[at], b[at]), 1));
            let pick = |own_of_odd, own_of_even| odd.select::<f32>(own_of_odd, own_of_even);
            [pick(x, a[0]), pick(y, a[1]), pick(b[0], x), pick(b[1], y)]
        };
        for places in places.chunks(FOURS) {
            let loaded = shares.map(|_| first.take().unwrap_or_else(|| self.load_places(w, o, places)));
            let fours: Vec<_> = places.iter().map(|place| four(*place)).collect();
            self.each_place(w, o, places, |w, i, place, to| {
                let all = match (shares, &loaded) {
                    (Some(shares), Some(loaded)) => std::array::from_fn(|at| {
                        // What has no share may hold anything.
                        let old = shares[place.row].old;
                        let given = old.eq(0.0).select::<f32>(0.0, loaded.0[i][at].get());
                        given.mul_add(old, fours[i][at])
                    }),
                    _ => fours[i],
                };
                to.store_some(w, place.column, all);
            });
        }
    }
}
