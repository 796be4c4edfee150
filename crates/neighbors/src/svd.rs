//! PCA and truncated SVD: the Gram matrix of the smaller side, its eigenvectors, and one more pass that takes the singular
//! values from the data itself.
//!
//! Squaring the data squares the ratio of its singular values, and small ones drown in the rounding of large ones. So the
//! eigenvectors only span a subspace, a little larger than asked for; the data times that subspace has columns of
//! its own size, and their Gram matrix (Rayleigh and Ritz) gives each singular value its own digits.

use crate::points::Moments;
use crate::{Error, Options, Points};
use faer::{Mat, Side};
use fulgurite_core::random::Rng;
use fulgurite_core::stop;
use fulgurite_core::tensor::ask_memory;
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{Digits, Scanner};
use std::time::Duration;

/// Rows that one sum in f64 takes in; threads share these parts.
const PART: usize = 8192;
/// Vectors beyond those asked for.
const MORE: usize = 16;
/// The larger the smaller side may be: its Gram matrix is this squared, in f64.
const MAX_SIDE: usize = 8192;
/// Multiplications of the randomised form: at least and at most.
const PASSES: [usize; 2] = [3, 40];
/// The randomised form reads the data several times and multiplies with a few columns; the Gram matrix is less work
/// where the smaller side is not this many times as wide.
const LESS_WORK: usize = 16;

/// Eigenvalue problems from this size on take longer than a caller who wants an end should wait.
const APART: usize = 512;
/// How often a caller who waits for one may ask for an end.
const LOOK: Duration = Duration::from_millis(1);

/// How the subspace was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Method {
    /// Eigenvectors of the products of all columns (or rows, where there are fewer).
    Gram,
    /// A random subspace, multiplied with the data a few times.
    Randomised,
}

/// Principal components: the truncated SVD of the rows less their mean.
#[derive(Debug, Clone)]
pub struct Pca(TruncatedSvd);

impl Pca {
    /// Settings for this number of components.
    pub fn new(components: usize) -> Pca {
        let mut svd = TruncatedSvd::new(components);
        svd.centred = true;
        Pca(svd)
    }

    /// As [`TruncatedSvd::tolerance`].
    pub fn tolerance(self, tolerance: Option<f64>) -> Pca {
        Pca(self.0.tolerance(tolerance))
    }

    /// Seed of the random draws.
    pub fn seed(self, seed: u64) -> Pca {
        Pca(self.0.seed(seed))
    }

    /// Instruction set and threads.
    pub fn options(self, options: Options) -> Pca {
        Pca(self.0.options(options))
    }

    /// Finds the components.
    ///
    /// ```
    /// use fulgurite_neighbors::{Error, Pca, Points};
    /// let line: Vec<f32> = (0..50).flat_map(|i| [i as f32 + 7.0, 2.0 * i as f32]).collect();
    /// let found = Pca::new(1).fit(Points::new(&line, [50, 2])?)?;
    /// assert!((found.explained_variance_ratio()[0] - 1.0).abs() < 1e-6);
    /// assert!((found.components()[1] / found.components()[0] - 2.0).abs() < 1e-5);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn fit(&self, points: Points<'_>) -> Result<Decomposition, Error> {
        self.0.fit(points)
    }
}

/// Singular values and right singular vectors, the largest first.
#[derive(Debug, Clone)]
pub struct TruncatedSvd {
    k: usize,
    tolerance: Option<f64>,
    seed: u64,
    centred: bool,
    options: Options,
}

impl TruncatedSvd {
    /// Settings for this number of singular values.
    pub fn new(components: usize) -> TruncatedSvd {
        TruncatedSvd { k: components, tolerance: None, seed: 0, centred: false, options: Options::default() }
    }

    /// Allow relative errors of the singular values: the randomised form, where it is less work. `None`, the default, is
    /// exact to the rounding of f32.
    pub fn tolerance(mut self, tolerance: Option<f64>) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Seed of the random draws.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Instruction set and threads.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Decomposes rows.
    pub fn fit(&self, points: Points<'_>) -> Result<Decomposition, Error> {
        let (n, d) = (points.len(), points.dim());
        let most = n.min(d);
        if self.k == 0 || self.k > most {
            let hint = "not more components than rows or columns";
            return Err(Error::Count { arg: "components", got: self.k, low: 1, high: most, hint });
        }
        if let Some(got) = self.tolerance.filter(|t| t.is_nan() || *t <= 0.0) {
            return Err(Error::Value { arg: "tolerance", got, allowed: "above 0", hint: "leave it out to be exact" });
        }
        let randomised = self.tolerance.is_some() && LESS_WORK * (self.k + MORE).min(most) < most;
        if !randomised && most > MAX_SIDE {
            let hint = "rows or columns; give a tolerance for the randomised form";
            return Err(Error::Count { arg: "points", got: most, low: 1, high: MAX_SIDE, hint });
        }
        stop::catch_memory(|| self.decomposed(points, randomised))?
    }

    /// Asks for the memory of sums, subspaces and components.
    fn ask(&self, [n, d]: [usize; 2], randomised: bool, scanner: &Scanner) {
        const WIDE: usize = size_of::<f64>();
        let most = n.min(d);
        let wide = scanner.padded((self.k + MORE).min(most));
        // Sums of parts and their total, and an eigenvalue problem with its vectors and what it needs besides.
        let sums = |elems: usize| elems.saturating_mul(WIDE * (1 + parts_at_once(n, scanner)));
        let square = |n: usize| n.saturating_mul(n);
        let subspace = match randomised {
            true => sums(d.saturating_mul(wide)),
            false => sums(square(scanner.padded(most))).saturating_add(square(most).saturating_mul(4 * WIDE)),
        };
        let rows = if randomised || d <= n { 0 } else { n.saturating_mul(d * size_of::<f32>()) };
        let bases = d.saturating_mul(4 * wide * WIDE);
        stop::ask("sums of products and their eigenvectors", subspace.saturating_add(rows).saturating_add(bases));
    }

    fn decomposed(&self, points: Points<'_>, randomised: bool) -> Result<Decomposition, Error> {
        let (n, d) = (points.len(), points.dim());
        let most = n.min(d);
        let scanner = Scanner::new(&self.options, Digits::All);
        self.ask([n, d], randomised, &scanner);
        let mut moments = Moments::new(d);
        moments.add(points, scanner.threads());
        let mean = |sum: &f64| (sum / n as f64) as f32;
        let shift: Vec<f32> = if self.centred { moments.sums.iter().map(mean).collect() } else { Vec::new() };
        let data = Data { points, shift: &shift, scanner, scale: scale_of(&moments) };
        let wide = (self.k + MORE).min(most);
        let (method, basis) = match randomised {
            true => (Method::Randomised, data.sketch([wide, self.k], self.seed, self.tolerance.unwrap_or(1e-4))?),
            false if d <= n => (Method::Gram, data.by_columns(wide)?),
            false => (Method::Gram, data.by_rows(wide)?),
        };
        let (values, components) = data.refine(&basis, wide, self.k)?;
        let total: f64 = moments.variances().iter().sum();
        Ok(Decomposition {
            d,
            singular_values: values,
            components,
            mean: self.centred.then(|| shift.clone()),
            method,
            rows: n,
            total_variance: total,
            scanner,
        })
    }
}

/// Rows about a mean, times a power of two that keeps squares in the range of f32.
struct Data<'a> {
    points: Points<'a>,
    shift: &'a [f32],
    scanner: Scanner,
    scale: f32,
}

/// Parts of the rows whose sums are held at a time, so that memory does not grow with the rows.
fn parts_at_once(n: usize, scanner: &Scanner) -> usize {
    (2 * scanner.threads()).min(n.div_ceil(PART))
}

fn scale_of(moments: &Moments) -> f32 {
    let mean = moments.squares.iter().sum::<f64>() / (moments.rows as f64 * moments.squares.len() as f64);
    if mean > 0.0 { (-mean.sqrt().log2().round()).clamp(-120.0, 120.0).exp2() as f32 } else { 1.0 }
}

impl Data<'_> {
    /// Rows `first..` with `width` columns, the last of them zero.
    fn rows(&self, first: usize, count: usize, width: usize) -> Vec<f32> {
        let d = self.points.dim();
        let mut out: Vec<f32> = stop::zeros("rows about their mean", count * width);
        for (i, row) in out.chunks_exact_mut(width).enumerate() {
            let x = self.points.row(first + i);
            match self.shift.is_empty() {
                true => row[..d].iter_mut().zip(x).for_each(|(to, &x)| *to = x * self.scale),
                false => {
                    let from = x.iter().zip(self.shift);
                    row[..d].iter_mut().zip(from).for_each(|(to, (&x, &shift))| *to = (x - shift) * self.scale);
                }
            }
        }
        out
    }

    /// Sums over parts of the rows, in the order of the parts, whatever the threads.
    fn sum(&self, len: usize, part: impl Fn(usize, usize, &mut [f64]) + Sync) -> Vec<f64> {
        let n = self.points.len();
        let mut total: Vec<f64> = stop::zeros("sums of products", len);
        let (parts, at_once) = (n.div_ceil(PART), parts_at_once(n, &self.scanner));
        for first in (0..parts).step_by(at_once) {
            let mut sums: Vec<Vec<f64>> = vec![Vec::new(); at_once.min(parts - first)];
            pool::each(self.scanner.threads(), &mut sums, |i, own| {
                let at = (first + i) * PART;
                *own = stop::zeros("sums of products", len);
                part(at, PART.min(n - at), own);
            });
            for own in sums {
                total.iter_mut().zip(own).for_each(|(all, x)| *all += x);
            }
        }
        total
    }

    /// Eigenvectors of X^T X, `[d][wide]`.
    fn by_columns(&self, wide: usize) -> Result<Vec<f64>, Error> {
        let d = self.points.dim();
        let width = self.scanner.padded(d);
        let gram = self.sum(width * width, |first, count, sums| {
            for at in (0..count).step_by(512) {
                let rows = self.rows(first + at, 512.min(count - at), width);
                self.scanner.add_gram(&rows, width, sums);
            }
        });
        let (_, vectors) = eigen(&gram, width, d)?;
        Ok(turned(&vectors[..wide * d], wide, d))
    }

    /// Right vectors from eigenvectors of X X^T.
    fn by_rows(&self, wide: usize) -> Result<Vec<f64>, Error> {
        let (n, d) = (self.points.len(), self.points.dim());
        let width = self.scanner.padded(n);
        let x = self.rows(0, n, d);
        let mut gram: Vec<f64> = stop::zeros("sums of products", width * width);
        for first in (0..d).step_by(512) {
            let count = 512.min(d - first);
            let mut columns: Vec<f32> = stop::zeros("columns about their mean", count * width);
            for (j, column) in columns.chunks_exact_mut(width).enumerate() {
                column[..n].iter_mut().enumerate().for_each(|(i, to)| *to = x[i * d + first + j]);
            }
            self.scanner.add_gram(&columns, width, &mut gram);
        }
        let (_, vectors) = eigen(&gram, width, n)?;
        // V = X^T U, each column at length 1.
        let mut basis: Vec<f64> = stop::zeros("a subspace", d * wide);
        for (c, u) in vectors.chunks_exact(n).take(wide).enumerate() {
            for (row, &weight) in x.chunks_exact(d).zip(u) {
                stop::poll();
                row.iter().enumerate().for_each(|(j, &x)| basis[j * wide + c] += weight * f64::from(x));
            }
        }
        orthonormal(&mut basis, d, wide);
        Ok(basis)
    }

    /// A random subspace, drawn towards the largest singular vectors by multiplying with X^T X, until the singular
    /// values that it shows move by less than an eighth of the tolerance: the remaining error shrinks by a factor each
    /// time.
    fn sketch(&self, [wide, k]: [usize; 2], seed: u64, tolerance: f64) -> Result<Vec<f64>, Error> {
        let d = self.points.dim();
        let width = self.scanner.padded(wide);
        stop::ask("a subspace", d * wide * size_of::<f64>());
        let mut basis = Rng::new(seed).normals(d * wide, 1.0);
        orthonormal(&mut basis, d, wide);
        let mut before = vec![0.0; k];
        for pass in 1..=PASSES[1] {
            let b = packed(&basis, d, wide, width);
            let sums = self.sum(d * width, |first, count, sums| {
                for at in (0..count).step_by(512) {
                    let rows = self.rows(first + at, 512.min(count - at), d);
                    self.scanner.add_squared_times(&rows, d, &b, width, sums);
                }
            });
            // Q^T X^T X Q, whose eigenvalues are the squares of the singular values in this subspace.
            let mut shown: Vec<f64> = stop::zeros("sums of products", wide * wide);
            for (q, z) in basis.chunks_exact(wide).zip(sums.chunks_exact(width)) {
                stop::poll();
                for (i, row) in shown.chunks_exact_mut(wide).enumerate() {
                    row.iter_mut().zip(z).for_each(|(s, z)| *s += q[i] * z);
                }
            }
            let values: Vec<f64> = eigen(&shown, wide, wide)?.0.iter().take(k).map(|x| x.max(0.0).sqrt()).collect();
            for (to, from) in basis.chunks_exact_mut(wide).zip(sums.chunks_exact(width)) {
                to.copy_from_slice(&from[..wide]);
            }
            orthonormal(&mut basis, d, wide);
            let settled = values.iter().zip(&before).all(|(new, old)| (new - old).abs() <= tolerance / 8.0 * new);
            if settled && pass >= PASSES[0] {
                break;
            }
            before = values;
        }
        Ok(basis)
    }

    /// Singular values and components, from the data times a basis.
    fn refine(&self, basis: &[f64], wide: usize, k: usize) -> Result<(Vec<f64>, Vec<f32>), Error> {
        let d = self.points.dim();
        let width = self.scanner.padded(wide);
        let b = packed(basis, d, wide, width);
        let gram = self.sum(width * width, |first, count, sums| {
            let mut y = vec![0.0f32; 512 * width];
            for at in (0..count).step_by(512) {
                let count = 512.min(count - at);
                let rows = self.rows(first + at, count, d);
                self.scanner.times(&rows, d, &b, width, &mut y);
                self.scanner.add_gram(&y[..count * width], width, sums);
            }
        });
        let (values, vectors) = eigen(&gram, width, wide)?;
        let scale = f64::from(self.scale);
        let singular: Vec<f64> = values.iter().take(k).map(|x| x.max(0.0).sqrt() / scale).collect();
        let mut components = Vec::with_capacity(k * d);
        for w in vectors.chunks_exact(wide).take(k) {
            stop::poll();
            let v: Vec<f64> = basis.chunks_exact(wide).map(|row| row.iter().zip(w).map(|(a, b)| a * b).sum()).collect();
            // The largest element is positive: signs are free, and so they are fixed.
            let largest = v.iter().fold(0.0f64, |a, &b| if b.abs() > a.abs() { b } else { a });
            let sign = if largest < 0.0 { -1.0 } else { 1.0 };
            components.extend(v.iter().map(|x| (x * sign) as f32));
        }
        Ok((singular, components))
    }
}

/// Eigenvalues of the leading `n` of a symmetric matrix (its lower half is read), the largest first, and their
/// vectors one behind the other.
fn eigen(gram: &[f64], stride: usize, n: usize) -> Result<(Vec<f64>, Vec<f64>), Error> {
    stop::ask("eigenvectors", n * n * 3 * size_of::<f64>());
    let matrix = Mat::<f64>::from_fn(n, n, |i, j| {
        if i == 0 {
            stop::poll();
        }
        gram[i.max(j) * stride + i.min(j)]
    });
    let solve = move || matrix.self_adjoint_eigen(Side::Lower);
    let found = if n < APART { solve() } else { apart(solve) }.map_err(|_| Error::Eigen)?;
    let (s, u) = (found.S(), found.U());
    let values = (0..n).rev().map(|i| s[i]).collect();
    let vectors = (0..n).rev().flat_map(|c| (0..n).map(move |r| u[(r, c)])).collect();
    Ok((values, vectors))
}

/// Runs work that never polls on a thread of its own, so that its caller can end early. The thread then goes on until the work is
/// done, and nobody takes the result.
fn apart<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let worker = std::thread::spawn(work);
    while !worker.is_finished() {
        stop::poll();
        std::thread::sleep(LOOK);
    }
    worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// `[wide][d]` to `[d][wide]`.
fn turned(rows: &[f64], wide: usize, d: usize) -> Vec<f64> {
    (0..d).flat_map(|j| (0..wide).map(move |c| rows[c * d + j])).collect()
}

/// A basis in f32 with padded rows.
fn packed(basis: &[f64], d: usize, wide: usize, width: usize) -> Vec<f32> {
    let mut out: Vec<f32> = stop::zeros("a subspace", d * width);
    for (to, from) in out.chunks_exact_mut(width).zip(basis.chunks_exact(wide)) {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = x as f32);
    }
    out
}

/// Gram-Schmidt, twice, over columns of `[d][wide]`. A column that is a sum of those before it becomes zero.
fn orthonormal(basis: &mut [f64], d: usize, wide: usize) {
    stop::ask("a subspace", d * wide * size_of::<f64>());
    let mut columns: Vec<Vec<f64>> = (0..wide).map(|c| (0..d).map(|j| basis[j * wide + c]).collect()).collect();
    for c in 0..wide {
        stop::poll();
        let (before, rest) = columns.split_at_mut(c);
        let own = &mut rest[0];
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let start = norm(own);
        for _ in 0..2 {
            for other in &*before {
                let dot: f64 = other.iter().zip(&*own).map(|(a, b)| a * b).sum();
                own.iter_mut().zip(other).for_each(|(x, o)| *x -= dot * o);
            }
        }
        let length = norm(own);
        let inverse = if length > 1e-12 * start && length > 0.0 { 1.0 / length } else { 0.0 };
        own.iter_mut().for_each(|x| *x *= inverse);
    }
    for (c, column) in columns.iter().enumerate() {
        column.iter().enumerate().for_each(|(j, &x)| basis[j * wide + c] = x);
    }
}

/// Singular values, their vectors, and the variance that they explain.
#[derive(Clone)]
pub struct Decomposition {
    d: usize,
    singular_values: Vec<f64>,
    components: Vec<f32>,
    mean: Option<Vec<f32>>,
    method: Method,
    rows: usize,
    total_variance: f64,
    scanner: Scanner,
}

impl std::fmt::Debug for Decomposition {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Decomposition");
        out.field("singular_values", &self.singular_values).field("method", &self.method).finish_non_exhaustive()
    }
}

impl Decomposition {
    /// Components that were found before: it transforms, and knows no singular values (they are 0).
    pub fn of(components: Points<'_>, mean: Option<&[f32]>, options: Options) -> Result<Decomposition, Error> {
        let d = components.dim();
        if let Some(mean) = mean {
            Points::named("mean", mean, [1, mean.len()])?.of_dim("mean", d)?;
        }
        ask_memory("a copy of the components", size_of_val(components.data()))?;
        Ok(Decomposition {
            d,
            singular_values: vec![0.0; components.len()],
            components: components.data().to_vec(),
            mean: mean.map(<[f32]>::to_vec),
            method: Method::Gram,
            rows: 0,
            total_variance: 0.0,
            scanner: Scanner::new(&options, Digits::All),
        })
    }

    /// The largest first.
    pub fn singular_values(&self) -> &[f64] {
        &self.singular_values
    }

    /// Right singular vectors, `[components, columns]`; the largest element of each is positive.
    pub fn components(&self) -> &[f32] {
        &self.components
    }

    /// The mean that was taken off, for PCA.
    pub fn mean(&self) -> Option<&[f32]> {
        self.mean.as_deref()
    }

    /// How the subspace was found.
    pub fn method(&self) -> Method {
        self.method
    }

    /// The squared singular values over the rows less one: for PCA, the variance along each component.
    pub fn explained_variance(&self) -> Vec<f64> {
        let n = self.rows.saturating_sub(1).max(1) as f64;
        self.singular_values.iter().map(|s| s * s / n).collect()
    }

    /// The same as shares of the variance of all columns together.
    pub fn explained_variance_ratio(&self) -> Vec<f64> {
        let total = self.total_variance * self.rows as f64;
        self.singular_values.iter().map(|s| if total > 0.0 { s * s / total } else { 0.0 }).collect()
    }

    /// Coordinates of rows along the components, `[rows, components]`.
    pub fn transform(&self, points: Points<'_>) -> Result<Vec<f32>, Error> {
        let points = points.of_dim("points", self.d)?;
        Ok(stop::catch_memory(|| self.coordinates(points))?)
    }

    fn coordinates(&self, points: Points<'_>) -> Vec<f32> {
        let (k, width) = (self.singular_values.len(), self.scanner.padded(self.singular_values.len()));
        let mut out: Vec<f32> = stop::zeros("coordinates", points.len().saturating_mul(k));
        let mut b: Vec<f32> = stop::zeros("components", self.d * width);
        for (c, component) in self.components.chunks_exact(self.d).enumerate() {
            component.iter().enumerate().for_each(|(j, &x)| b[j * width + c] = x);
        }
        let shift = self.mean.as_deref().unwrap_or_default();
        let data = Data { points, shift, scanner: self.scanner, scale: 1.0 };
        pool::each(self.scanner.threads(), out.chunks_mut(512 * k), |part, out| {
            let rows = data.rows(part * 512, out.len() / k, self.d);
            let mut y = vec![0.0f32; 512 * width];
            self.scanner.times(&rows, self.d, &b, width, &mut y);
            out.chunks_exact_mut(k).zip(y.chunks_exact(width)).for_each(|(to, from)| to.copy_from_slice(&from[..k]));
        });
        out
    }

    /// Rows from coordinates, `[rows, columns]`.
    pub fn inverse_transform(&self, coordinates: Points<'_>) -> Result<Vec<f32>, Error> {
        let coordinates = coordinates.of_dim("coordinates", self.singular_values.len())?;
        let elems = coordinates.len().saturating_mul(self.d);
        ask_memory("rows of these coordinates", elems.saturating_mul(size_of::<f32>()))?;
        let mut out = Vec::with_capacity(elems);
        for row in coordinates.data().chunks_exact(coordinates.dim()) {
            stop::poll();
            let mut x: Vec<f64> = match &self.mean {
                Some(mean) => mean.iter().map(|&m| f64::from(m)).collect(),
                None => vec![0.0; self.d],
            };
            for (&weight, component) in row.iter().zip(self.components.chunks_exact(self.d)) {
                x.iter_mut().zip(component).for_each(|(x, &c)| *x += f64::from(weight) * f64::from(c));
            }
            out.extend(x.iter().map(|&x| x as f32));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A problem that is solved on a thread of its own is the one that is solved here.
    #[test]
    fn eigenvalues_do_not_depend_on_the_thread() {
        let n = APART;
        let gram: Vec<f64> = (0..n * n).map(|i| if i / n == i % n { (i / n) as f64 } else { 0.0 }).collect();
        let want: Vec<f64> = (0..n).rev().map(|x| x as f64).collect();
        let got = eigen(&gram, n, n).unwrap().0;
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 1e-10 * n as f64), "{got:?}");
    }
}
