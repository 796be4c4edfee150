//! Results in f32, for calls that see a part of the keys or of the queries: rows of O that threads store or merge
//! themselves, without rounding them to 16 bits.

use crate::no_kernel::NoKernel;
use crate::parts::arguments::DeviceTensor;
use fulgurite_ptx::{GlobalRows, Group, Pointer, RowView, Scope, Val};
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
/// Pairs of columns that a thread loads before it stores the first of them.
const PAIRS: usize = 8;

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
    /// Stores `f(row, x)` of each element x of a tile, merged with what is there by the shares of its row.
    pub(crate) fn store<A: RowView<'k>>(
        &self,
        w: &Scope<'k, Group>,
        o: &A,
        shares: &[Shares<'k>],
        f: impl Fn(usize, Val<'k, f32>) -> Val<'k, f32>,
    ) {
        let elements: Vec<Val<'k, f32>> = o.elements().collect();
        let columns = o.cols();
        // Pairs of neighbouring columns that a thread has of a row: their place among the registers, and the first column.
        let pairs: Vec<(usize, usize, u32)> = (0..(columns / A::PERIOD) as usize)
            .flat_map(|period| (0..A::RUN as usize).step_by(2).map(move |at| (period, at)))
            .map(|(period, at)| (period, at, period as u32 * A::PERIOD + at as u32))
            .collect();
        let own_col = A::first_col(w);
        for row in 0..A::ROWS {
            let own_row = A::first_row(w) + A::row_offset(row);
            let to = self.rows.address + own_row.to_u64().mul_wide_64(self.rows.stride) + (own_col * 4).to_u64();
            let to = Pointer::<f32>::at_address(to);
            w.when(own_row.lt(self.rows.rows), |w| {
                let inside = |w: &Scope<'k, Group>, column: u32, body: &dyn Fn(&Scope<'k, Group>)| {
                    // A thread's pairs begin at most one period after the column.
                    match column + A::PERIOD + PADDED_TO <= columns {
                        true => body(w),
                        false => w.when(((own_col + column) * 4).lt(self.rows.bytes), body),
                    }
                };
                for pairs in pairs.chunks(PAIRS) {
                    let given = pairs.iter().map(|_| [(); 2].map(|()| w.var(0.0f32))).collect::<Vec<_>>();
                    if self.merges {
                        for (&(_, _, column), given) in pairs.iter().zip(&given) {
                            inside(w, column, &|w| {
                                let [a, b] = to.load_some::<_, 2>(w, column);
                                given[0].set(a);
                                given[1].set(b);
                            });
                        }
                    }
                    for (&(period, at, column), given) in pairs.iter().zip(&given) {
                        let one = |i: usize| {
                            let x = f(row, elements[A::index(row, period, at + i)]);
                            match shares.get(row) {
                                // What has no share may hold anything.
                                Some(Shares { old, new, .. }) => {
                                    let given = old.eq(0.0).select::<f32>(0.0, given[i].get());
                                    given.mul_add(*old, x * *new)
                                }
                                None => x,
                            }
                        };
                        let pair = [one(0), one(1)];
                        inside(w, column, &|w| to.store_some(w, column, pair));
                    }
                }
            });
        }
    }
}
