//! Points, proven finite once, and the frame they are moved into for products.

use crate::Error;
use fulgurite_core::tensor::ask_memory;
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{Digits, Frame, Worth};
use std::borrow::Cow;

/// How near two points are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Metric {
    /// The straight line. Distances that are returned are lengths, not squares.
    #[default]
    Euclidean,
    /// 1 less the cosine of the angle. Rows of zeros have none and are refused.
    Cosine,
    /// The dot product, negated: the largest product is the nearest.
    Dot,
}

impl Metric {
    /// All of them.
    pub const ALL: [Metric; 3] = [Metric::Euclidean, Metric::Cosine, Metric::Dot];

    /// The lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Metric::Euclidean => "euclidean",
            Metric::Cosine => "cosine",
            Metric::Dot => "dot",
        }
    }

    pub(crate) fn worth(self) -> Worth {
        match self {
            Metric::Euclidean => Worth::Near,
            Metric::Cosine => Worth::Cosine,
            Metric::Dot => Worth::Dot,
        }
    }
}

/// Rows of f32, one behind the other. Holding one tells you that there is at least one row and one column, that there
/// are fewer than 2^31 rows, and that every number is finite.
///
/// ```
/// use fulgurite_neighbors::{Error, Points};
/// assert_eq!(Points::new(&[1.0, 2.0, 3.0, 4.0], [2, 2])?.row(1), [3.0, 4.0]);
/// let refused = Points::new(&[1.0, f32::NAN], [2, 1]).unwrap_err();
/// assert_eq!(refused.to_string(), "`points` row 1 column 0 is NaN, allowed: finite numbers; drop or fill such rows");
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Points<'a> {
    data: &'a [f32],
    n: usize,
    d: usize,
}

/// Rows that one thread looks at.
const PART: usize = 4096;

/// Whether all are numbers. In whole numbers, and without an early end inside a chunk, so that the compiler makes it many wide;
/// a sum of floats has one order and would be slow.
pub(crate) fn all_finite(values: &[f32]) -> bool {
    let odd = |x: &f32| (x.to_bits() & 0x7fff_ffff) as i32 > 0x7f7f_ffff;
    values.chunks(4096).all(|chunk| !chunk.iter().fold(false, |any, x| any | odd(x)))
}

impl<'a> Points<'a> {
    /// `shape` is rows and columns.
    pub fn new(data: &'a [f32], shape: [usize; 2]) -> Result<Points<'a>, Error> {
        Points::named("points", data, shape)
    }

    /// As [`new`](Points::new), for an argument of another name.
    pub fn named(arg: &'static str, data: &'a [f32], [n, d]: [usize; 2]) -> Result<Points<'a>, Error> {
        if n.checked_mul(d) != Some(data.len()) {
            return Err(Error::Length { arg, got: data.len(), rows: n, columns: d });
        }
        if n == 0 || d == 0 {
            let hint = if n == 0 { "give it rows" } else { "give its rows elements" };
            return Err(Error::Empty { arg, rows: n, columns: d, hint });
        }
        if n >= 1 << 31 {
            return Err(Error::TooMany { arg, got: n });
        }
        let points = Points { data, n, d };
        points.check(arg, 0)?;
        Ok(points)
    }

    fn check(&self, arg: &'static str, first: usize) -> Result<(), Error> {
        let bad = |x: &f32| !x.is_finite();
        let mut wrong = vec![false; self.n.div_ceil(PART)];
        pool::each(pool::default_threads(), self.data.chunks(PART * self.d).zip(&mut wrong), |_, (part, wrong)| {
            *wrong = !all_finite(part);
        });
        if !wrong.contains(&true) {
            return Ok(());
        }
        match self.data.iter().position(bad) {
            None => Ok(()),
            Some(at) => {
                Err(Error::NotFinite { arg, row: first + at / self.d, column: at % self.d, value: self.data[at] })
            }
        }
    }

    /// Number of points.
    pub fn len(&self) -> usize {
        self.n
    }

    /// Never: a `Points` has at least one row.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Elements of a row.
    pub fn dim(&self) -> usize {
        self.d
    }

    /// All elements.
    pub fn data(&self) -> &'a [f32] {
        self.data
    }

    /// One row.
    pub fn row(&self, i: usize) -> &'a [f32] {
        &self.data[i * self.d..(i + 1) * self.d]
    }

    /// The rows from `first` on.
    pub fn part(&self, first: usize, rows: usize) -> Points<'a> {
        Points { data: &self.data[first * self.d..(first + rows) * self.d], n: rows, d: self.d }
    }

    /// Rows that were proven before.
    pub(crate) fn proven(data: &'a [f32], [n, d]: [usize; 2]) -> Points<'a> {
        Points { data, n, d }
    }

    /// Refuses rows of another length.
    pub(crate) fn of_dim(self, arg: &'static str, want: usize) -> Result<Points<'a>, Error> {
        if self.d == want { Ok(self) } else { Err(Error::Columns { arg, got: self.d, want }) }
    }

    /// Refuses rows of zeros, where the metric asks for angles.
    pub(crate) fn with_angles(self, arg: &'static str, metric: Metric) -> Result<Points<'a>, Error> {
        if metric == Metric::Cosine
            && let Some(row) = self.data.chunks_exact(self.d).position(|row| row.iter().all(|&x| x == 0.0))
        {
            return Err(Error::NoAngle { arg, row });
        }
        Ok(self)
    }
}

/// Points that an index searches: borrowed, or its own.
#[derive(Debug, Clone)]
pub(crate) struct Kept<'a> {
    data: Cow<'a, [f32]>,
    n: usize,
    d: usize,
}

impl<'a> Kept<'a> {
    pub fn borrowed(points: Points<'a>) -> Kept<'a> {
        Kept { data: Cow::Borrowed(points.data), n: points.n, d: points.d }
    }

    pub fn points(&self) -> Points<'_> {
        Points { data: &self.data, n: self.n, d: self.d }
    }

    pub fn into_owned(self) -> Result<Kept<'static>, Error> {
        if let Cow::Borrowed(data) = self.data {
            ask_memory("a copy of the rows", size_of_val(data))?;
        }
        Ok(Kept { data: Cow::Owned(self.data.into_owned()), n: self.n, d: self.d })
    }
}

/// The digits that products keep if scores may be off by this share of their rows' norms, and whether results within
/// the error of products are computed again in f64.
pub(crate) fn precision(score_tolerance: Option<f64>) -> (Digits, bool) {
    match score_tolerance {
        // One bf16 leaves 2^-7 of a product, two leave 2^-14.
        Some(allowed) if allowed >= 2f64.powi(-6) => (Digits::Eight, false),
        Some(allowed) if allowed >= 2f64.powi(-12) => (Digits::Sixteen, false),
        _ => (Digits::Sixteen, true),
    }
}

/// Refuses numbers that are no tolerance.
pub(crate) fn checked_tolerance(score_tolerance: Option<f64>) -> Result<(), Error> {
    match score_tolerance.filter(|x| x.is_nan() || *x < 0.0) {
        None => Ok(()),
        Some(got) => {
            let (allowed, hint) = ("0 or more", "leave it out to be exact");
            Err(Error::Value { arg: "score_tolerance", got, allowed, hint })
        }
    }
}

/// Sums from which the frame follows, of any run of rows; added in the order of the rows.
#[derive(Debug, Clone)]
pub(crate) struct Moments {
    pub rows: u64,
    pub sums: Vec<f64>,
    pub squares: Vec<f64>,
}

impl Moments {
    pub fn new(d: usize) -> Moments {
        Moments { rows: 0, sums: vec![0.0; d], squares: vec![0.0; d] }
    }

    /// Adds rows; their order and the cuts between calls at multiples of [`PART`] decide the bits.
    pub fn add(&mut self, points: Points<'_>, threads: usize) {
        let mut parts: Vec<(Vec<f64>, Vec<f64>)> = vec![Default::default(); points.n.div_ceil(PART)];
        pool::each(threads, points.data.chunks(PART * points.d).zip(&mut parts), |_, (rows, part)| {
            let (mut sums, mut squares) = (vec![0.0f64; points.d], vec![0.0f64; points.d]);
            for row in rows.chunks_exact(points.d) {
                for ((sum, square), &x) in sums.iter_mut().zip(&mut squares).zip(row) {
                    *sum += f64::from(x);
                    *square += f64::from(x) * f64::from(x);
                }
            }
            *part = (sums, squares);
        });
        for (sums, squares) in parts {
            self.sums.iter_mut().zip(sums).for_each(|(all, x)| *all += x);
            self.squares.iter_mut().zip(squares).for_each(|(all, x)| *all += x);
        }
        self.rows += points.n as u64;
    }

    fn mean(&self) -> Vec<f64> {
        self.sums.iter().map(|s| s / self.rows as f64).collect()
    }

    /// Variance of each column.
    pub fn variances(&self) -> Vec<f64> {
        let n = self.rows as f64;
        self.mean().iter().zip(&self.squares).map(|(m, s)| (s / n - m * m).max(0.0)).collect()
    }

    /// About the mean where distances count, about 0 where products do; lengths about 1.
    pub fn frame(&self, metric: Metric) -> Frame {
        let near = metric == Metric::Euclidean;
        let shift: Vec<f32> = self.mean().iter().map(|&m| if near { m as f32 } else { 0.0 }).collect();
        let spread: f64 =
            if near { self.variances().iter().sum() } else { self.squares.iter().sum::<f64>() / self.rows as f64 };
        // The scale is a power of two, so nothing is rounded, and neither huge nor tiny data leave the range of f32.
        let exponent = if spread > 0.0 { -(spread.sqrt().log2().round()) } else { 0.0 };
        Frame { shift, scale: exponent.clamp(-120.0, 120.0).exp2() as f32 }
    }
}

pub(crate) fn frame_of(points: Points<'_>, metric: Metric, threads: usize) -> Frame {
    let mut moments = Moments::new(points.d);
    moments.add(points, threads);
    moments.frame(metric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_number_is_found_wherever_it_is() {
        for odd in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)] {
            for at in [0, 1, 4095, 4096, 9999] {
                let mut values = vec![f32::MAX; 10_000];
                values[at] = odd;
                assert!(!all_finite(&values), "{odd} at {at}");
            }
        }
        assert!(all_finite(&[f32::MAX, f32::MIN, 0.0, -0.0, f32::MIN_POSITIVE, 1e-45]) && all_finite(&[]));
    }
}
