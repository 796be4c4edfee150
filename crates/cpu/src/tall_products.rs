//! Products of tall matrices, in parts: f32 within a part, f64 across parts. For other crates of this workspace.

use crate::memory::{Arena, with_workspace};
use crate::scan::Scanner;
use crate::simd::{Ahead, Matrix, MatrixMut, Sum};
use fulgurite_core::stop;

/// Number of rows whose products are summed in f32.
const DEPTH: usize = 256;

impl Scanner {
    /// Number of columns, rounded up to the products' requirement.
    pub fn padded(&self, columns: usize) -> usize {
        columns.next_multiple_of(self.kernels.lanes)
    }

    /// Computes `sums += X^T X` for rows of X, with the number of columns from [`padded`](Self::padded). Elements above
    /// the diagonal are skipped, except in tiles that it crosses.
    pub fn add_gram(&self, rows: &[f32], columns: usize, sums: &mut [f64]) {
        let tile = self.kernels.tile;
        assert!(columns == self.padded(columns) && sums.len() == columns * columns, "columns of a Gram matrix");
        with_workspace(columns * tile, |c| {
            for rows in rows.chunks(DEPTH * columns) {
                for first in (0..columns).step_by(tile) {
                    stop::poll();
                    let width = tile.min(columns - first);
                    let x = Matrix::new(rows, columns).at(0, first);
                    let size = [columns - first, width, rows.len() / columns];
                    let to = MatrixMut::at(c, width, 0, 0);
                    self.kernels.gemm_transposed(to, x, x, size, Sum::Fresh, &mut Ahead::default());
                    for (row, x) in c.chunks_exact(width).take(size[0]).enumerate() {
                        let at = (first + row) * columns + first;
                        self.kernels.add_wide(x, &mut sums[at..at + width]);
                    }
                }
            }
        });
    }

    /// Computes `out = X B`. Rows of X have `d` elements, those of B and `out` have `width`, which must be padded.
    pub fn times(&self, rows: &[f32], d: usize, b: &[f32], width: usize, out: &mut [f32]) {
        let size = [rows.len() / d, width, d];
        let to = MatrixMut::at(out, width, 0, 0);
        self.kernels.gemm(to, Matrix::new(rows, d), Matrix::new(b, width), size, Sum::Fresh, &mut Ahead::default());
    }

    /// Computes `sums += X^T (X B)`, with the sizes of [`times`](Self::times).
    pub fn add_squared_times(&self, rows: &[f32], d: usize, b: &[f32], width: usize, sums: &mut [f64]) {
        let sizes = [DEPTH * width, d * width];
        with_workspace(sizes.iter().map(|&n| Arena::room(n)).sum(), |workspace| {
            let mut arena = Arena::new(workspace);
            let [y, z] = sizes.map(|n| arena.take(n));
            for rows in rows.chunks(DEPTH * d) {
                stop::poll();
                self.times(rows, d, b, width, y);
                let (x, y) = (Matrix::new(rows, d), Matrix::new(y, width));
                let to = MatrixMut::at(z, width, 0, 0);
                let size = [d, width, rows.len() / d];
                self.kernels.gemm_transposed(to, x, y, size, Sum::Fresh, &mut Ahead::default());
                self.kernels.add_wide(z, sums);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use crate::scan::{Digits, Scanner};
    use crate::{Isa, Options};
    use fulgurite_core::random::Rng;

    #[test]
    fn products_of_parts_are_those_of_f64() {
        let mut rng = Rng::new(1);
        for isa in Isa::available() {
            let scanner = Scanner::new(&Options { isa: Some(isa), threads: Some(1), rescale: None }, Digits::All);
            for (n, d) in [(1, 1), (600, 70), (300, 130)] {
                let columns = scanner.padded(d);
                let x: Vec<f32> = rng.normals(n * columns, 1.0).iter().map(|&x| x as f32).collect();
                let mut sums = vec![1.0; columns * columns];
                scanner.add_gram(&x, columns, &mut sums);
                let width = scanner.padded(5);
                let b: Vec<f32> = rng.normals(columns * width, 1.0).iter().map(|&x| x as f32).collect();
                let mut squared = vec![0.0; columns * width];
                scanner.add_squared_times(&x, columns, &b, width, &mut squared);
                let at = |i: usize, j: usize| f64::from(x[i * columns + j]);
                let gram = |i: usize, j: usize| (0..n).map(|r| at(r, i) * at(r, j)).sum::<f64>();
                for i in (0..columns).step_by(7) {
                    for j in 0..=i {
                        assert!((sums[i * columns + j] - 1.0 - gram(i, j)).abs() <= 1e-3, "{isa:?} {n} {d} {i} {j}");
                    }
                    let want: f64 = (0..columns).map(|j| gram(i, j) * f64::from(b[j * width])).sum();
                    let got = squared[i * width];
                    assert!((got - want).abs() <= 1e-4 * (n * columns) as f64, "{got} for {want}");
                }
            }
        }
    }
}
