//! Kernels on the simulator give what references in f64 give.

use crate::common::{Float, Gemm, INNER, SMALL, download, sim, upload};
use fulgurite_kernels::gemm::{GemmConfig, Layouts};
use fulgurite_ptx::device::{Device, Stream, Value};
use fulgurite_ptx::{Major, Pair, Target, Word, bf16, f16};
use std::sync::Arc;

#[test]
fn vector_add() {
    for (n, seed) in [(1u32, 0), (255, 1), (256, 2), (1000, 3)] {
        let sim = sim(seed);
        let x: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let y: Vec<f32> = (0..n).map(|i| 0.5 * i as f32).collect();
        let (x, y, z) = (upload(&sim, &x), upload(&sim, &y), sim.allocate(u64::from(4 * n)).unwrap());
        let module = sim.load(Arc::new(fulgurite_kernels::add::kernel(Target::HOPPER).unwrap())).unwrap();
        let pointer = |b: &fulgurite_ptx::device::Buffer| Value::Pointer(b.span());
        let args = [pointer(&x), pointer(&y), pointer(&z), Value::U32(n)];
        sim.launch(&module, [n.div_ceil(256), 1, 1], &args, Stream::default()).unwrap();
        let z = download(&sim, &z);
        for (i, z) in z.chunks_exact(4).enumerate() {
            assert_eq!(f32::from_le_bytes(z.try_into().unwrap()), 1.5 * i as f32);
        }
    }
}

fn agrees<T: Float>(gemm: Gemm, blocks: u32, seed: u64)
where
    Pair<T>: Word,
{
    let sim = sim(seed);
    let (bits, worst) = gemm.run::<T>(&sim, gemm.kernel::<T>(), blocks).unwrap_or_else(|e| {
        panic!("{gemm:?}: {e}\n{}", sim.findings().iter().map(|f| format!("{f}\n")).collect::<String>())
    });
    assert!(worst <= 1.0, "{gemm:?}: error {worst} of the bound");
    // The same seed and another one give the same bits: products do not depend on the order.
    let other = crate::common::sim(seed + 1000);
    assert_eq!(gemm.run::<T>(&other, gemm.kernel::<T>(), blocks).unwrap().0, bits);
}

#[test]
fn gemm_in_all_layouts() {
    let majors = [Major::Inner, Major::Outer];
    for (i, (a, b)) in majors.into_iter().flat_map(|a| majors.map(|b| (a, b))).enumerate() {
        let layouts = Layouts { a, b };
        agrees::<bf16>(Gemm { m: 128, n: 64, k: 128, batch: 1, layouts, config: SMALL, compare: true }, 1, i as u64);
        agrees::<f16>(Gemm { m: 200, n: 72, k: 200, batch: 1, layouts, config: SMALL, compare: true }, 2, i as u64);
    }
}

#[test]
fn gemm_in_batches_and_clusters() {
    let config = GemmConfig { cluster: 2, ..SMALL };
    agrees::<bf16>(Gemm { m: 256, n: 64, k: 192, batch: 1, layouts: INNER, config, compare: true }, 1, 3);
    agrees::<bf16>(Gemm { m: 300, n: 130, k: 72, batch: 2, layouts: INNER, config, compare: true }, 2, 4);
    let outer = Layouts { a: Major::Outer, b: Major::Outer };
    agrees::<f16>(
        Gemm {
            m: 300,
            n: 136,
            k: 72,
            batch: 1,
            layouts: outer,
            config: GemmConfig { cols: 128, ..config },
            compare: true,
        },
        1,
        5,
    );
    agrees::<bf16>(Gemm { m: 100, n: 40, k: 64, batch: 3, layouts: INNER, config: SMALL, compare: true }, 2, 5);
}
