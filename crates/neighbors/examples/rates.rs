//! How fast the folds are, beside a large matrix product by the same micro-kernels in the same run.
//!
//! `cargo run --release -p fulgurite-neighbors --example rates [kmeans|knn] [isa]`

use fulgurite_core::random::Rng;
use fulgurite_neighbors::{Init, Isa, KMeans, Metric, NeighborIndex, Options, Points};
use std::time::Instant;

fn random(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    // Sums of four uniforms, centred: close to normal and quick to draw.
    (0..n).map(|_| ((0..4).map(|_| rng.uniform()).sum::<f64>() - 2.0) as f32).collect()
}

fn main() -> Result<(), fulgurite_neighbors::Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| args.is_empty() || args.iter().any(|a| a == name);
    let isa = Isa::ALL.into_iter().find(|isa| args.iter().any(|a| a == isa.name()));
    let options = Options { isa, threads: None, rescale: None };
    let rate = || (0..5).map(|_| fulgurite_cpu::probe::gemm_gflops(&options)).fold(0.0, f64::max);
    println!("matrix product on vectors, f32: {:.0} GFLOP/s", rate());
    if has("kmeans") {
        let (n, d, k, steps) = (200_000, 128, 1024, 10);
        let data = random(1, n * d);
        let points = Points::new(&data, [n, d])?;
        let kmeans = KMeans::new(k).init(Init::Given(points.part(0, k))).tolerance(0.0).options(options);
        for _ in 0..3 {
            let start = Instant::now();
            let model = kmeans.clone().max_steps(steps).fit(points)?;
            let seconds = start.elapsed().as_secs_f64();
            let flops = 2.0 * (n * d * k) as f64 * (steps + 1) as f64;
            println!("k-means {seconds:.3} s, {:.0} GFLOP/s, inertia {}", flops / seconds / 1e9, model.inertia());
        }
    }
    if has("knn") {
        let (n, m, d, k) = (100_000, 20_000, 128, 10);
        let (base, asks) = (random(2, n * d), random(3, m * d));
        let start = Instant::now();
        let index = NeighborIndex::new(Points::new(&base, [n, d])?, Metric::Euclidean, options)?;
        println!("k-NN index {:.3} s", start.elapsed().as_secs_f64());
        for _ in 0..3 {
            let start = Instant::now();
            let found = index.search(Points::new(&asks, [m, d])?, k)?;
            let seconds = start.elapsed().as_secs_f64();
            println!("k-NN {seconds:.3} s, {:.0} GFLOP/s, {}", 2.0 * (n * m * d) as f64 / seconds / 1e9, found.rows[0]);
        }
    }
    Ok(())
}
