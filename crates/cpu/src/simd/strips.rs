//! Few queries against a strip of bf16 keys on a matrix unit: the safe face.
//!
//! Keys are the rows of A and values the rows of B, both read where they lie: nothing is packed but the queries, once.
//! A row of B is pairs of neighbouring columns where the unit wants pairs of neighbouring keys; so weights come in
//! two rows, one with zeros for the second of each pair and one with zeros for the first, and give even and odd
//! columns. P has two parts, so that it loses nothing that shows.

use super::algorithms::SoftmaxStats;
use super::kernels::extent;
use super::matrix::{DEPTH, GROUP, Hold};
use super::narrow::RowsAt;
use half::bf16;

/// Keys of a strip: the summed axis of one tile product.
pub(crate) const STRIP: usize = DEPTH;
/// The most rows of queries: two rows of weights of each fill a tile.
const ROWS: usize = GROUP / 2;
/// Slots that the scores of a strip take; its weights lie behind them.
pub(super) const SCORES: usize = STRIP * ROWS;

/// Slots of weights for each row: two halves of a strip, two parts, even and odd columns.
const WEIGHTS: usize = 2 * 2 * 2 * GROUP;

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

/// The running softmax of the rows of a strip.
pub(crate) struct StripSoftmax<'a> {
    /// Scores, and room for weights.
    pub s: &'a mut [f32],
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
    /// What rows of O that were summed before must be multiplied with.
    pub alpha: &'a mut [f32],
    /// What a score must be multiplied with to be in natural units; m is in those.
    pub scale: f32,
    /// How far, in powers of two, a score may exceed the maximum without raising it.
    pub tau: f32,
}

/// Entry points, as in [`MatrixKernels`](super::MatrixKernels).
pub(crate) struct StripKernels {
    /// By rows of queries and their columns.
    pub(super) hold: fn([usize; 2]) -> Hold,
    /// Queries, their columns, first key, elements from key to key, d, scores.
    pub(super) scores: unsafe fn(*const f32, usize, *const bf16, usize, usize, *mut f32),
    /// Rows and columns.
    pub(super) softmax: unsafe fn(&mut StripSoftmax<'_>, [usize; 2]) -> SoftmaxStats,
    /// Scores and weights, scores and room for weights of the probes, their sums, rows and columns.
    pub(super) probe: unsafe fn(*const f32, *mut f32, &mut [f32], [usize; 2]),
    /// Weights, rows, first value, elements from value to value, columns of O, O.
    pub(super) output: unsafe fn(*const f32, usize, *const bf16, usize, usize, *mut f32),
    /// Asks for the first lines of each page of a span of elements.
    pub(super) touch: unsafe fn(*const bf16, usize),
}

/// The unit of one thread, shaped for strips of so many rows.
pub(crate) struct Strips {
    kernels: &'static StripKernels,
    rows: usize,
    _hold: Hold,
}

impl StripKernels {
    /// Whether keys and values of these dimensions are whole tiles, and so many rows fit.
    pub fn suits(rows: usize, d: usize, dv: usize) -> bool {
        rows <= ROWS && d.is_multiple_of(DEPTH) && dv.is_multiple_of(2 * DEPTH)
    }

    /// Slots of scores and weights of a strip.
    pub fn room(rows: usize) -> usize {
        SCORES + WEIGHTS * rows
    }

    /// Slots of O as the unit sums it.
    pub fn output_room(rows: usize, dv: usize) -> usize {
        rows * dv
    }

    /// Slots that packed queries take.
    pub fn queries_room(rows: usize, d: usize) -> usize {
        columns(rows) * d / 2
    }

    /// Queries as columns of B, neighbours in a slot; columns past the last are zero.
    pub fn queries(rows: RowsAt<'_>, to: &mut [f32]) {
        let columns = columns(rows.starts.len());
        let to = &mut to[..columns * rows.n / 2];
        to.fill(0.0);
        for (column, &start) in rows.starts.iter().enumerate() {
            let pairs = rows.data[start..start + rows.n].chunks_exact(2);
            for (slot, pair) in to[column..].iter_mut().step_by(columns).zip(pairs) {
                *slot = f32::from_bits(u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16);
            }
        }
    }

    /// Multiplies the rows of O that [`Strips::output`] has summed.
    pub fn scale(o: &mut [f32], rows: usize, factors: &[f32]) {
        for (i, slots) in o.chunks_exact_mut(GROUP).enumerate() {
            slots.iter_mut().for_each(|x| *x *= factors[i % rows]);
        }
    }

    /// Adds what [`Strips::output`] has summed to rows in pair order, `ldo` apart.
    pub fn add_to(o: &[f32], rows: usize, to: &mut [f32], ldo: usize) {
        for (i, slots) in o.chunks_exact(GROUP).enumerate() {
            // Of each 32 columns first the even ones of all rows, then the odd ones.
            let to = &mut to[i % rows * ldo + i / rows * GROUP..][..GROUP];
            to.iter_mut().zip(slots).for_each(|(to, x)| *to += x);
        }
    }

    /// Shapes the unit of this thread. No other product may run on it before the result is dropped.
    pub fn hold(&'static self, rows: usize) -> Strips {
        assert!((1..=ROWS).contains(&rows), "rows of a tile");
        Strips { kernels: self, rows, _hold: (self.hold)([rows, columns(rows)]) }
    }
}

/// Rows, rounded up to whole groups of four.
fn columns(rows: usize) -> usize {
    rows.next_multiple_of(4)
}

impl Strips {
    /// The scores of a strip, without the scale.
    pub fn scores(&self, q: &[f32], keys: StripRows<'_>, s: &mut [f32]) {
        assert!(keys.n.is_multiple_of(DEPTH) && keys.n > 0, "whole tiles");
        assert!(q.len() >= StripKernels::queries_room(self.rows, keys.n) && s.len() >= SCORES, "too small");
        // SAFETY: the machine has the unit, shaped for these rows, and the extents were just checked.
        unsafe { (self.kernels.scores)(q.as_ptr(), columns(self.rows), keys.start(), keys.row, keys.n, s.as_mut_ptr()) }
    }

    /// Scores to weights, which replace nothing: they lie behind the scores.
    pub fn softmax(&self, args: &mut StripSoftmax<'_>) -> SoftmaxStats {
        assert!(args.s.len() >= StripKernels::room(self.rows), "too small");
        assert!([args.m.len(), args.l.len(), args.alpha.len()].iter().all(|&n| n >= self.rows), "rows of the strip");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.kernels.softmax)(args, [self.rows, columns(self.rows)]) }
    }

    /// The scores U of probes to weights P U, with the P that [`softmax`](Self::softmax) has left behind `s`; adds their
    /// sums to `l`.
    pub fn probe(&self, s: &[f32], u: &mut [f32], l: &mut [f32]) {
        let room = StripKernels::room(self.rows);
        assert!(s.len() >= room && u.len() >= room && l.len() >= self.rows, "too small");
        // SAFETY: the machine has the instruction set, and the extents were just checked.
        unsafe { (self.kernels.probe)(s.as_ptr(), u.as_mut_ptr(), l, [self.rows, columns(self.rows)]) }
    }

    /// O += P V with the weights of [`softmax`](Self::softmax).
    pub fn output(&self, s: &[f32], values: StripRows<'_>, o: &mut [f32]) {
        assert!(values.n.is_multiple_of(DEPTH) && values.n > 0, "whole tiles");
        assert!(s.len() >= StripKernels::room(self.rows), "too small");
        assert!(o.len() >= StripKernels::output_room(self.rows, values.n), "too small");
        let (p, o) = (s[SCORES..].as_ptr(), o.as_mut_ptr());
        // SAFETY: the machine has the unit, shaped for these rows, and the extents were just checked.
        unsafe { (self.kernels.output)(p, self.rows, values.start(), values.row, values.n, o) }
    }

    /// Asks for the beginning of each page of a span, so that the hardware follows it when it is read.
    pub fn touch(&self, data: &[bf16], span: std::ops::Range<usize>) {
        if let Some(span) = data.get(span) {
            // SAFETY: the machine has the instruction set; asking reads nothing.
            unsafe { (self.kernels.touch)(span.as_ptr(), span.len()) }
        }
    }
}
