//! Rate of the micro-kernel.
fn main() {
    for t in [1, 2] {
        let o = fulgurite_cpu::Options { threads: Some(t), ..Default::default() };
        println!(
            "{t} threads: {:.0} {:.0} GFLOP/s",
            fulgurite_cpu::probe::gemm_gflops(&o, 0.5),
            fulgurite_cpu::probe::gemm_gflops(&o, 0.5)
        );
    }
}
