//! Rates of the machine, measured with fulgurite's own kernels, as a reference for the speed of attention.

use crate::memory::{Arena, SharedRows, with_workspace};
use crate::simd::{Ahead, Matrix, MatrixMut, Sum};
use crate::{Options, pool};
use std::time::Instant;

/// Rows and columns of the product.
const SIZE: usize = 2048;
/// Rows of A, and depth, that are packed at a time: they stay in the L2 cache.
const ROWS: usize = 192;
const DEPTH: usize = 256;

/// GFLOP/s of one large f32 matrix product (2048 x 2048 x 2048) by the micro-kernel, with operands packed as in large
/// products.
///
/// ```
/// let rate = fulgurite_cpu::probe::gemm_gflops(&fulgurite_cpu::Options::default());
/// assert!(rate > 0.0);
/// ```
pub fn gemm_gflops(options: &Options) -> f64 {
    let kernels = options.kernels();
    let (threads, panel) = (options.threads(), kernels.tile);
    let a: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 13) as f32 * 0.1).collect();
    let b: Vec<f32> = (0..SIZE * SIZE).map(|i| (i % 17) as f32 * 0.1).collect();
    // Written once before the clock starts, because the first touch of a page is the system's time.
    let mut c = vec![1.0f32; SIZE * SIZE];
    let out = SharedRows::over(&mut c);
    let columns = SIZE / threads.next_power_of_two().min(SIZE / panel);
    let start = Instant::now();
    pool::run(threads, SIZE / columns, &|part| {
        // SAFETY: each part has its own block of columns, stored one after the other.
        let c = unsafe { out.row(part * SIZE * columns, SIZE * columns) };
        let sizes = [ROWS * DEPTH, DEPTH * columns];
        with_workspace(sizes.iter().map(|&n| Arena::room(n)).sum(), |workspace| {
            let mut arena = Arena::new(workspace);
            let [a_packed, b_packed] = sizes.map(|n| arena.take(n));
            for depth in (0..SIZE).step_by(DEPTH) {
                // B as panels of a tile's width, one after the other.
                for (p, to) in b_packed.chunks_exact_mut(DEPTH * panel).enumerate() {
                    for (k, row) in to.chunks_exact_mut(panel).enumerate() {
                        let at = (depth + k) * SIZE + part * columns + p * panel;
                        row.copy_from_slice(&b[at..at + panel]);
                    }
                }
                for first in (0..SIZE).step_by(ROWS) {
                    let rows = ROWS.min(SIZE - first);
                    for (i, row) in a_packed.chunks_exact_mut(DEPTH).take(rows).enumerate() {
                        let at = (first + i) * SIZE + depth;
                        row.copy_from_slice(&a[at..at + DEPTH]);
                    }
                    for p in 0..columns / panel {
                        let own = Matrix::new(&b_packed[p * DEPTH * panel..(p + 1) * DEPTH * panel], panel);
                        let size = [rows, panel, DEPTH];
                        let sum = if depth == 0 { Sum::Fresh } else { Sum::Onto };
                        let to = MatrixMut::at(c, columns, first, p * panel);
                        kernels.gemm(to, Matrix::new(a_packed, DEPTH), own, size, sum, &mut Ahead::default());
                    }
                }
            }
        });
    });
    let seconds = start.elapsed().as_secs_f64();
    std::hint::black_box(&c);
    2.0 * (SIZE as f64).powi(3) / seconds / 1e9
}
