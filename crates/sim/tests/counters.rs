//! Counters equal what can be counted by hand.

use crate::common::{Gemm, INNER, SMALL, pipeline, sim};
use fulgurite_kernels::gemm::GemmConfig;
use fulgurite_ptx::bf16;
use fulgurite_ptx::inst::Unit;
use fulgurite_sim::{Architecture, Counts, Interleaving, Options, Sim, Track};

#[test]
fn gemm_counts_have_closed_forms() {
    for (cluster, m, n, k) in [(1, 256, 256, 320), (2, 512, 128, 192)] {
        let config = GemmConfig { cluster, ..SMALL };
        let gemm = Gemm { m, n, k, batch: 1, layouts: INNER, config, compare: false };
        let sim = sim(1);
        gemm.run::<bf16>(&sim, gemm.kernel::<bf16>(), 1).unwrap();
        let report = sim.report();
        let total = report.total();
        let (m, n, k) = (u64::from(m), u64::from(n), u64::from(k));
        assert_eq!(total.tensor_flops["bf16"], 2 * m * n * k);
        // Each tile of C needs a row of tiles of A and a column of tiles of B; blocks of a cluster share those of B.
        let tiles = m / 128 * n / 128;
        let operands = tiles * (k / 64) * (16384 + 16384);
        let brought = tiles * (k / 64) * (16384 + 16384 / u64::from(cluster));
        assert_eq!(total.global_bytes, brought + 2 * m * n);
        assert_eq!(total.global_sectors, total.global_bytes / 32);
        // What comes in, and the tiles of C that go out.
        assert_eq!(total.shared_copy_bytes, operands + 2 * m * n);
        // Each instruction reads 64 rows of A and 128 columns of B, 32 bytes each.
        assert_eq!(total.shared_operand_bytes, 2 * m * n * k / (2 * 64 * 128 * 16) * (64 + 128) * 32);
        assert_eq!(total.shared_thread_bytes, 2 * m * n);
        assert_eq!(total.bank_conflicts, 0);
        let [load, multiply] = [&report.roles[0], &report.roles[1]];
        assert_eq!((load.0.as_str(), multiply.0.as_str()), ("load", "multiply"));
        assert_eq!(load.1.tensor_flops.len(), 0);
        assert_eq!(load.1.global_bytes, brought);
        assert_eq!(multiply.1.global_bytes, 2 * m * n);
        assert_eq!(multiply.1.lanes[&Unit::Convert], m * n / 2);
        let cycles = Architecture::H200.cycles(&total);
        assert_eq!(cycles[0], ("tensor", (2 * m * n * k) as f64 / 4096.0));
    }
}

#[test]
fn exponentials_are_counted() {
    let sim = sim(1);
    pipeline::run(&sim, pipeline::kernel(), 2, 3).unwrap();
    let total = sim.report().total();
    assert_eq!(total.exps, 2 * 128 * 3 * 64);
    assert_eq!(total.tensor_flops["bf16"], 2 * 2 * (2 * 128) * (3 * 64) * 64);
    assert!(total.waits > total.waits_blocked && total.waits_blocked > 0);
}

/// A timeline shows all roles and units, products do not overlap, and the trace is JSON.
#[test]
fn timelines_show_the_pipeline() {
    let sim = Sim::new(Options { order: Interleaving::Timed, ..Options::default() });
    let worst = pipeline::run(&sim, pipeline::kernel(), 1, 6).unwrap();
    assert!(worst <= 1.0);
    let timeline = sim.report().timeline.unwrap();
    let products: Vec<_> = timeline.spans.iter().filter(|s| s.track == Track::Tensor).collect();
    // Two warpgroups, six blocks of keys, two products of four instructions each.
    assert_eq!(products.len(), 2 * 6 * 2 * 4);
    assert!(products.windows(2).all(|w| w[0].end <= w[1].start));
    assert_eq!(products[0].end - products[0].start, 2 * 64 * 64 * 16 / 4096);
    assert!(timeline.spans.iter().any(|s| s.track == Track::Role("compute".into(), 1) && s.waits));
    assert!(timeline.spans.iter().all(|s| s.start <= s.end));
    let trace = timeline.chrome();
    assert_eq!(trace.matches('{').count(), trace.matches('}').count());
    assert!(trace.contains("\"name\":\"CTA 0\""));
    // Spans of a row are apart, as viewers want them: in each row, starts and ends ascend together.
    let number = |line: &str, name: &str| -> Option<f64> {
        line.split(&format!("\"{name}\":")).nth(1)?.split([',', '}']).next()?.parse().ok()
    };
    let mut ends = std::collections::BTreeMap::new();
    for line in trace.lines().filter(|line| line.contains("\"ph\":\"X\"")) {
        let [tid, start, length] = ["tid", "ts", "dur"].map(|name| number(line, name).unwrap());
        let end = ends.insert(tid as u64, start + length).unwrap_or(0.0);
        assert!(start >= end - 1e-9, "{line} begins before {end}");
    }
    assert!(trace.contains("\"name\":\"TMA\"") && timeline.svg(0).contains("tensor cores"));
    // The same again is the same.
    let again = Sim::new(Options { order: Interleaving::Timed, ..Options::default() });
    pipeline::run(&again, pipeline::kernel(), 1, 6).unwrap();
    assert_eq!(again.report().timeline.unwrap().spans, timeline.spans);
}

/// What one block of 128 keys more takes of a tile of forward attention.
fn one_more_block(builder: impl Fn(fulgurite_core::ProblemBuilder) -> fulgurite_core::ProblemBuilder) -> [Counts; 2] {
    use fulgurite_core::{DType, Problem, Rescale};
    use fulgurite_kernels::attention::forward::plan::{DeviceTensor, ForwardPlan, Tensors};
    use fulgurite_ptx::Target;
    use fulgurite_ptx::device::{Device, Stream};
    let sim = sim(1);
    // No exponentials but those of the scores.
    let rescale = Some(Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT));
    [256, 384].map(|keys: u64| {
        let buffer = |rows: u64| crate::common::upload(&sim, &vec![bf16::from_f32(0.25); rows as usize * 128]);
        let shape = Problem::builder().dense(1, 128, keys as usize).heads(1, 1).head_dim(128).dtype(DType::Bf16);
        let plan = ForwardPlan::new(&builder(shape).build().unwrap(), rescale).unwrap();
        let buffers = [128, keys, keys, 128].map(buffer);
        let tensors = std::array::from_fn(|i| {
            let rows = buffers[i].span().bytes() / 256;
            DeviceTensor::packed(buffers[i].span(), [1, rows, 1, 128])
        });
        let (lse, counters) = (sim.allocate(512).unwrap(), crate::common::upload(&sim, &[0u32; 2]));
        let kernel = std::sync::Arc::new(plan.kernel(Target::HOPPER).unwrap());
        let tensors = Tensors::new(tensors, lse.span(), counters.span());
        let launch = plan.launch(kernel, &tensors, 1).unwrap().unwrap();
        let module = sim.load(launch.kernel.clone()).unwrap();
        sim.launch(&module, launch.grid, &launch.args, Stream::default()).unwrap();
        sim.report().total()
    })
}

/// The roofline of the tile that published analyses use: 2048 cycles of tensor cores against 1024 of exponentials.
#[test]
fn a_tile_of_attention_is_bound_by_its_products() {
    let [two, three] = one_more_block(|builder| builder);
    let cycles = |counts| Architecture::H200.cycles(counts);
    assert_eq!(cycles(&three)[0].1 - cycles(&two)[0].1, 2048.0);
    assert_eq!((three.exps - two.exps) as f64 / Architecture::H200.specials, 1024.0);
    // Operands of the products, as the analyses derive: 160 KB.
    assert_eq!(three.shared_operand_bytes - two.shared_operand_bytes, 160 * 1024);
}

/// The special-function unit computes an exponential for each score of a softcap, and three of four tanh.
#[test]
fn a_quarter_of_the_tanh_of_a_softcap_are_polynomials() {
    let [two, three] = one_more_block(|builder| builder.softcap(50.0));
    assert_eq!(three.exps - two.exps, 128 * 128);
    let specials = |counts: &Counts| counts.lanes[&Unit::Special];
    assert_eq!(specials(&three) - specials(&two), 128 * 128 * 7 / 4);
}
