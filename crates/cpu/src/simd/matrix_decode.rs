//! Few queries against a strip of bf16 keys on a matrix unit: the safe interface.
//!
//! Keys are the rows of A and values the rows of B, both read in place: only the queries are packed, once. A row of B
//! has pairs of neighbouring columns, but the unit needs pairs of neighbouring keys. So weights come in two rows, one
//! with zeros for the second of each pair and one with zeros for the first, which give even and odd columns. Weights
//! are rounded to bf16, as with many queries.

use super::algorithms::SoftmaxStats;
use super::kernels::{Strided, extent};
use super::matrix::{DEPTH, GROUP, Hold};
use super::matrix_bf16::RowsAt;
use super::prefetch::Prefetch;
use half::bf16;

/// Keys of a strip: two tiles of keys or values.
pub(crate) const STRIP: usize = DEPTH;
/// The most rows of queries: two rows of weights of each fill a tile.
const ROWS: usize = GROUP / 2;

/// Rows of `n` elements, `row` apart, from `offset` on: one for each key of a strip.
#[derive(Clone, Copy)]
pub(crate) struct StripRows<'a> {
    pub data: &'a [bf16],
    pub offset: usize,
    pub row: usize,
    pub n: usize,
}

impl StripRows<'_> {
    fn start(&self) -> *const bf16 {
        self.data[self.offset..self.offset + extent(STRIP, self.row, self.n)].as_ptr()
    }
}

impl<'a> From<StripRows<'a>> for Strided<'a> {
    fn from(rows: StripRows<'a>) -> Self {
        Strided { data: rows.data.into(), offset: rows.offset, row: rows.row }
    }
}

/// The running softmax of the rows of a strip. Lanes have the layout of a key's scores: [`columns`] lanes per key,
/// repeated.
pub(crate) struct StripSoftmax<'a> {
    pub s: &'a [f32],
    pub weights: &'a mut [f32],
    pub m: &'a mut [f32; GROUP],
    /// Sums in as many parts as there are adjacent keys: [`StripKernels::total`] adds them up.
    pub l: &'a mut [f32; GROUP],
    /// The factor of earlier rows of O, if any was rescaled.
    pub alpha: &'a mut [f32; GROUP],
    /// The factor that converts a score to natural units; m is in natural units.
    pub scale: f32,
    /// How far, in powers of two, a score may exceed the maximum without raising it.
    pub tau: f32,
    /// Memory to prefetch in the meantime.
    pub prefetch: Prefetch,
}

/// The probes of the rows of a strip.
pub(crate) struct StripProbe<'a> {
    /// Weights P of [`Strips::softmax`] if the probes have their own tile; else they come first in `weights`.
    pub p: Option<&'a [f32]>,
    /// Scores U of the probes, without the scale; if probes share the queries' tile, U is in the columns after theirs.
    pub u: &'a [f32],
    /// Weights P U.
    pub weights: &'a mut [f32],
    /// Sums of P U of each row.
    pub l: &'a mut [f32; GROUP],
    /// Factor of a score.
    pub scale: f32,
}

/// Entry points, as in [`MatrixKernels`](super::MatrixKernels).
pub(crate) struct StripKernels {
    /// By rows of queries and their columns.
    pub(super) hold: fn([usize; 2]) -> Hold,
    /// Queries, their columns, first key, stride between keys, d, scores, memory to prefetch.
    pub(super) scores: unsafe fn(*const f32, usize, *const bf16, usize, usize, *mut f32, Prefetch),
    /// Rows of queries, all rows of the tile, and columns.
    pub(super) softmax: unsafe fn(&mut StripSoftmax<'_>, [usize; 3]) -> SoftmaxStats,
    /// Rows of queries, all rows of the tile, and columns.
    pub(super) probe: unsafe fn(&mut StripProbe<'_>, [usize; 3]),
    /// Weights, rows, first value, stride between values, columns of O, O, memory to prefetch.
    pub(super) output: unsafe fn(*const f32, usize, *const bf16, usize, usize, *mut f32, Prefetch),
}

/// The unit of one thread, configured for strips of this many rows.
pub(crate) struct Strips {
    kernels: &'static StripKernels,
    /// Rows of the tile; the first are queries.
    rows: usize,
    queries: usize,
    _hold: Hold,
}

impl StripKernels {
    /// Whether keys and values of these dimensions are whole tiles, and this many rows fit.
    pub fn suits(rows: usize, d: usize, dv: usize) -> bool {
        rows <= ROWS && d.is_multiple_of(DEPTH) && dv.is_multiple_of(2 * DEPTH)
    }

    /// Slots of the scores of a strip.
    pub fn scores_room(rows: usize) -> usize {
        STRIP * columns(rows)
    }

    /// Slots of the weights of a strip: even and odd columns.
    pub fn weights_room(rows: usize) -> usize {
        2 * STRIP * rows
    }

    /// Slots of O as the unit sums it.
    pub fn output_room(rows: usize, dv: usize) -> usize {
        rows * dv
    }

    /// Slots that packed queries take.
    pub fn queries_room(rows: usize, d: usize) -> usize {
        columns(rows) * d / 2
    }

    /// Writes queries as columns of B starting at `first`, of a tile of `all` rows, with neighbours in a slot. Other
    /// columns are not written.
    pub fn queries(rows: RowsAt<'_>, [first, all]: [usize; 2], to: &mut [f32]) {
        let columns = columns(all);
        let to = &mut to[..columns * rows.n / 2];
        for (column, &start) in (first..all).zip(rows.starts) {
            let pairs = rows.data[start..start + rows.n].as_chunks::<2>().0;
            for (slots, [a, b]) in to.chunks_exact_mut(columns).zip(pairs) {
                slots[column] = f32::from_bits(u32::from(a.to_bits()) | u32::from(b.to_bits()) << 16);
            }
        }
    }

    /// Multiplies the rows of O that [`Strips::output`] has summed.
    pub fn scale(o: &mut [f32], rows: usize, factors: &[f32]) {
        for (i, slots) in o.chunks_exact_mut(GROUP).enumerate() {
            slots.iter_mut().for_each(|x| *x *= factors[i % rows]);
        }
    }

    /// The sum of a row's weights from the parts that [`Strips::softmax`] keeps.
    pub fn total(l: &[f32; GROUP], rows: usize, row: usize) -> f32 {
        l[row..].iter().step_by(columns(rows)).sum()
    }

    /// Writes the sums of [`Strips::output`] as rows of `dv` elements, in the pair order of 16 lanes.
    pub fn rows_of(o: &[f32], rows: usize, dv: usize, to: &mut [f32]) {
        for (i, slots) in o.chunks_exact(GROUP).enumerate() {
            // In each 32 columns, first the even ones of all rows, then the odd ones.
            to[i % rows * dv + i / rows * GROUP..][..GROUP].copy_from_slice(slots);
        }
    }

    /// Whether probes of this many queries fit next to them, in columns that exist anyway: more columns would change
    /// the order of sums.
    pub fn joins(queries: usize) -> bool {
        2 * queries <= columns(queries)
    }

    /// Configures the unit of this thread for this many rows, of which the first are queries. No other product may run
    /// on it before the result is dropped.
    pub fn hold(&'static self, queries: usize, rows: usize) -> Strips {
        assert!((1..=rows).contains(&queries) && rows <= ROWS, "rows of a tile");
        Strips { kernels: self, rows, queries, _hold: (self.hold)([rows, columns(rows)]) }
    }
}

/// Rows, rounded up to whole groups of four.
fn columns(rows: usize) -> usize {
    rows.next_multiple_of(4)
}

impl Strips {
    /// The scores of a strip, without the scale.
    pub fn scores(&self, q: &[f32], keys: StripRows<'_>, s: &mut [f32], prefetch: Prefetch) {
        assert!(keys.n.is_multiple_of(DEPTH) && keys.n > 0, "whole tiles");
        assert!(q.len() >= StripKernels::queries_room(self.rows, keys.n), "too small");
        assert!(s.len() >= StripKernels::scores_room(self.rows), "too small");
        let (q, columns, s) = (q.as_ptr(), columns(self.rows), s.as_mut_ptr());
        // SAFETY: the machine has the unit, shaped for these rows, and the extents were just checked.
        unsafe { (self.kernels.scores)(q, columns, keys.start(), keys.row, keys.n, s, prefetch) }
    }

    /// Scores to weights.
    pub fn softmax(&self, args: &mut StripSoftmax<'_>) -> SoftmaxStats {
        assert!(args.s.len() >= StripKernels::scores_room(self.rows), "too small");
        assert!(args.weights.len() >= StripKernels::weights_room(self.rows), "too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.kernels.softmax)(args, [self.queries, self.rows, columns(self.rows)]) }
    }

    /// Scores of probes to weights P U; adds their sums. Where all rows are queries, the probes have tiles of their own.
    pub fn probe(&self, args: &mut StripProbe<'_>) {
        assert!(args.p.is_some() == (self.rows == self.queries), "probes beside queries, or apart");
        assert!(self.rows.is_multiple_of(self.queries) && self.rows / self.queries <= 2, "a probe for each query");
        assert!(args.u.len() >= StripKernels::scores_room(self.rows), "too small");
        let room = StripKernels::weights_room(self.rows);
        assert!(args.p.is_none_or(|p| p.len() >= room) && args.weights.len() >= room, "too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.kernels.probe)(args, [self.queries, self.rows, columns(self.rows)]) }
    }

    /// O += P V with the weights of [`softmax`](Self::softmax).
    pub fn output(&self, weights: &[f32], values: StripRows<'_>, o: &mut [f32], prefetch: Prefetch) {
        assert!(values.n.is_multiple_of(DEPTH) && values.n > 0, "whole tiles");
        assert!(weights.len() >= StripKernels::weights_room(self.rows), "too small");
        assert!(o.len() >= StripKernels::output_room(self.rows, values.n), "too small");
        let (p, o) = (weights.as_ptr(), o.as_mut_ptr());
        // SAFETY: the machine has the unit, shaped for these rows, and the extents were just checked.
        unsafe { (self.kernels.output)(p, self.rows, values.start(), values.row, values.n, o, prefetch) }
    }
}
