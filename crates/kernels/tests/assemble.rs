//! Kernels that are not registered go through the assembler without a loss: attention at odd head dimensions, and the
//! probe of the tensor cores.

use fulgurite_core::{BlockSpec, DType, Mask, Problem, expr};
use fulgurite_kernels::attention::backward::Order;
use fulgurite_kernels::attention::backward::plan::Backward;
use fulgurite_kernels::attention::plan::Forward;
use fulgurite_kernels::{probe, registry};
use fulgurite_ptx::assemble::{Assembler, Hints};
use fulgurite_ptx::{Target, bf16, f16};

fn assembler() -> Option<Assembler> {
    let Some(ptxas) = std::env::var_os("PTXAS") else {
        println!("skipped: `PTXAS` names no assembler");
        return None;
    };
    Some(Assembler::find(&Hints { ptxas: Some(ptxas.into()), ..Hints::default() }).unwrap())
}

#[test]
fn the_probe_assembles() {
    let Some(assembler) = assembler() else { return };
    for kernel in [probe::kernel::<f16>(Target::HOPPER), probe::kernel::<bf16>(Target::HOPPER)] {
        let report = assembler.assemble(&kernel.unwrap()).unwrap();
        assert!(report.verdict().is_ok(), "{:?}", report.verdict());
    }
}

#[test]
fn gradients_assemble() {
    let Some(assembler) = assembler() else { return };
    for dims in
        [[8, 8], [72, 40], [136, 136], [192, 128], [192, 192], [192, 256], [256, 256], [64, 256], [64, 64], [128, 128]]
    {
        for (mask, order) in [
            (Mask::none(), Order::Any),
            (Mask::causal(), Order::Any),
            (Mask::window(Some(128), Some(0)), Order::Any),
            (Mask::none(), Order::Fixed),
            (Mask::window(Some(70), None), Order::Fixed),
        ] {
            let problem = Problem::builder().dense(1, 64, 700).heads(2, 1).head_dims(dims[0], dims[1]).sinks();
            let plan =
                Backward::new(&problem.dtype(DType::Bf16).mask(mask.clone()).build().unwrap(), true, order).unwrap();
            let kernels = plan.kernels(Target::HOPPER).unwrap();
            for kernel in kernels.all() {
                let report = assembler.assemble(kernel).unwrap();
                assert!(report.verdict().is_ok(), "{dims:?}, {mask:?}: {:?}", report.verdict());
            }
        }
    }
}

#[test]
fn odd_head_dimensions_assemble() {
    let Some(assembler) = assembler() else { return };
    for (d, dv, mask) in [
        (8, 8, Mask::none()),
        (72, 72, Mask::causal()),
        (96, 96, Mask::window(Some(128), Some(0))),
        (136, 136, Mask::none()),
        (192, 128, Mask::causal()),
        (256, 64, Mask::none()),
        (64, 256, Mask::causal()),
        (512, 512, Mask::none()),
        (264, 264, Mask::window(Some(128), Some(0))),
        (320, 136, Mask::causal()),
        (8, 512, Mask::causal()),
    ] {
        // Many queries, and few: two kernels, unless rows are wide.
        let wide = d.max(dv) > 256;
        for q_len in [64, 3].into_iter().take(if wide { 1 } else { 2 }) {
            let problem = Problem::builder().dense(1, q_len, 700).heads(2, 1).head_dims(d, dv).dtype(DType::Bf16);
            let plan = Forward::new(&problem.mask(mask.clone()).build().unwrap(), None).unwrap();
            let report = assembler.assemble(&plan.kernel(Target::HOPPER).unwrap()).unwrap();
            assert!(report.verdict().is_ok(), "{d}, {dv}, {q_len} queries: {:?}", report.verdict());
        }
    }
}

#[test]
fn wide_rows_assemble_with_features() {
    let Some(assembler) = assembler() else { return };
    for entry in registry::all().iter().filter(|entry| entry.name.contains("-d512-")) {
        let report = assembler.assemble(&(entry.build)(Target::HOPPER).unwrap()).unwrap();
        assert!(report.verdict().is_ok(), "{}: {:?}", entry.name, report.verdict());
    }
    for feature in ["packed", "bias", "comb", "blocks"] {
        let base = Problem::builder().heads(4, 2).head_dim(512).dtype(DType::Bf16);
        let problem = match feature {
            "packed" => base.packed(&[0, 200, 500], &[0, 300, 700]).mask(Mask::causal()),
            "bias" => base.dense(2, 200, 700).bias([1, 4, 200, 700], DType::Bf16, false),
            "comb" => base.dense(2, 200, 700).mask(Mask::custom((expr::k() % 10).differs(7))),
            _ => base.dense(2, 200, 700).block_mask(BlockSpec::default()).mask(Mask::causal()),
        };
        let plan = Forward::new(&problem.build().unwrap(), None).unwrap();
        let report = assembler.assemble(&plan.kernel(Target::HOPPER).unwrap()).unwrap();
        assert!(report.verdict().is_ok(), "{feature}: {:?}", report.verdict());
    }
}
