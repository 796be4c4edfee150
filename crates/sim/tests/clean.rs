//! Kernels that are right run clean, whatever the order.

use crate::common::{Gemm, INNER, SMALL, pipeline, seeds, sim};
use fulgurite_kernels::gemm::GemmConfig;
use fulgurite_ptx::bf16;

fn complain(sim: &fulgurite_sim::Sim) -> String {
    sim.findings().iter().map(|f| format!("{f}\n")).collect()
}

#[test]
fn gemm() {
    for cluster in [1, 2] {
        let config = GemmConfig { cluster, ..SMALL };
        let gemm = Gemm { m: 128 * cluster, n: 256, k: 320, batch: 1, layouts: INNER, config, compare: false };
        let mut first = None;
        for seed in seeds() {
            let gemm = Gemm { compare: first.is_none(), ..gemm };
            let sim = sim(seed);
            let (bits, worst) = gemm
                .run::<bf16>(&sim, gemm.kernel::<bf16>(), 1)
                .unwrap_or_else(|_| panic!("seed {seed}: {}", complain(&sim)));
            assert!(worst <= 1.0, "seed {seed}: {worst}");
            // Products do not depend on the order.
            assert_eq!(*first.get_or_insert_with(|| bits.clone()), bits, "seed {seed}");
        }
    }
}

#[test]
fn pipeline() {
    for seed in seeds() {
        let sim = sim(seed);
        let worst =
            pipeline::run(&sim, pipeline::kernel(), 1, 5).unwrap_or_else(|_| panic!("seed {seed}: {}", complain(&sim)));
        assert!(worst <= 1.0, "seed {seed}: {worst}");
    }
}
