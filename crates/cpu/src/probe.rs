//! Rates of the machine, measured with our own kernels: what the others are shares of.

use crate::memory::{Arena, with_workspace};
use crate::simd::{Matrix, Sum};
use crate::{Options, pool};
use std::time::Instant;

/// GFLOP/s of a large f32 matrix product by the micro-kernel, all threads together, in about `seconds`.
///
/// Each thread multiplies blocks as large products do: B in the first-level cache, A and C in the second.
pub fn gemm_gflops(options: &Options, seconds: f64) -> f64 {
    let kernels = options.kernels();
    let threads = options.threads();
    let (m, n, k) = (384, kernels.tile, 256);
    let flops_per_call = (2 * m * n * k) as f64;
    let rates: Vec<std::sync::Mutex<f64>> = (0..threads).map(|_| std::sync::Mutex::new(0.0)).collect();
    pool::run(threads, threads, &|thread| {
        let sizes = [m * k, k * n, m * n];
        with_workspace(sizes.iter().map(|&s| Arena::room(s)).sum(), |workspace| {
            let mut arena = Arena::new(workspace);
            let [a, b, c] = sizes.map(|s| arena.take(s));
            a.fill(1e-3);
            b.fill(1e-3);
            let (start, mut calls, mut best) = (Instant::now(), 0u32, 0.0f64);
            while start.elapsed().as_secs_f64() < seconds {
                let lap = Instant::now();
                for _ in 0..64 {
                    kernels.gemm(c, n, Matrix::new(a, k), Matrix::new(b, n), [m, n, k], Sum::Fresh);
                }
                calls += 64;
                best = best.max(64.0 * flops_per_call / lap.elapsed().as_secs_f64());
            }
            std::hint::black_box(&c);
            let mean = f64::from(calls) * flops_per_call / start.elapsed().as_secs_f64();
            *rates[thread].lock().unwrap_or_else(|e| e.into_inner()) = mean.max(0.0);
            let _ = best;
        });
    });
    rates.iter().map(|r| *r.lock().unwrap_or_else(|e| e.into_inner())).sum::<f64>() / 1e9
}
