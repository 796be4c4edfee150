//! Query heads of a key/value head spread over CTAs: gradients on the simulator, and planted bugs where parts are added.

use crate::common::backward::Case;
use crate::common::mutate::{change, drop, drop_at};
use crate::common::{Random, sim};
use fulgurite_core::{DType, Mask};
use fulgurite_kernels::attention::backward::plan::Kernels;
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_ptx::{Arch, Kernel, Target};
use fulgurite_sim::{Fault, Line, Options, Sim};
use std::sync::Arc;

/// The case with its heads in parts, and its configuration changed.
fn spread(case: Case, parts: u32, change: impl FnOnce(BackwardConfig) -> BackwardConfig) -> Case {
    let plan = Case { config: None, ..case.clone() }.plan();
    // Not in pairs of CTAs, which have one part.
    let usual = if plan.can_split_heads() { plan.config() } else { BackwardConfig::columns() };
    let config = BackwardConfig { head_splits: Some(parts), ..change(case.config.unwrap_or(usual)) };
    let spread = Case { config: Some(config), ..case };
    assert!(spread.plan().head_splits() == u64::from(parts), "{spread:?}");
    spread
}

/// Every schedule of the main kernel, in both orders, with parts that are even, uneven, and single heads.
#[test]
fn every_schedule_leaves_parts() {
    let base = Case { batch: 2, blocks: 4, mask: Mask::causal(), q_len: 150, k_len: 200, ..Case::base() };
    let by_threads = |d: u32| BackwardConfig::hopper(d).of_threads(d);
    let mut seed = 0;
    for order in [Order::Any, Order::Fixed] {
        for (case, parts) in [
            (Case { dims: [128, 128], heads: [6, 2], ..base.clone() }, 2),
            (Case { dims: [64, 64], heads: [8, 1], ..base.clone() }, 4),
            (Case { dims: [128, 96], heads: [4, 2], dtype: DType::F16, ..base.clone() }, 2),
            (Case { dims: [128, 128], heads: [3, 1], config: Some(by_threads(128)), ..base.clone() }, 2),
            (Case { dims: [64, 48], heads: [3, 1], config: Some(by_threads(64)), batch: 1, ..base.clone() }, 3),
            (Case { dims: [192, 128], heads: [3, 1], batch: 1, ..base.clone() }, 2),
            // Not in pairs of CTAs, which have one part.
            (
                Case {
                    dims: [256, 256],
                    heads: [4, 1],
                    batch: 1,
                    config: Some(BackwardConfig::columns()),
                    ..base.clone()
                },
                2,
            ),
        ] {
            seed += 1;
            spread(Case { order, ..case }, parts, |config| config).check(&sim(seed));
        }
    }
}

/// Parts by `mma.sync`: of 128 and of 64 keys, with halves of columns that are whole chunks and that are not.
#[test]
fn single_warps_leave_parts() {
    let base = Case { mask: Mask::causal(), q_len: 90, k_len: 200, ..Case::base() };
    let window = Mask::window(Some(60), Some(20));
    for (seed, (case, arch, parts)) in (1..).zip([
        (Case { dims: [64, 64], heads: [6, 2], batch: 2, ..base.clone() }, Arch::SM_80, 3),
        (Case { dims: [64, 48], heads: [7, 1], mask: Mask::none(), ..base.clone() }, Arch::SM_89, 4),
        (Case { dims: [128, 128], heads: [4, 2], dtype: DType::F16, ..base.clone() }, Arch::SM_80, 2),
        (Case { dims: [128, 96], heads: [3, 1], mask: window, ..base.clone() }, Arch::SM_120A, 2),
        (Case { dims: [192, 128], heads: [3, 1], d_lse: true, ..base }, Arch::SM_80, 3),
    ]) {
        let target = Target::new(arch);
        let config = BackwardConfig { head_splits: Some(parts), ..case.plan_for(target).config() };
        let case = Case { config: Some(config), ..case };
        assert_eq!(case.plan_for(target).head_splits(), u64::from(parts), "{case:?}");
        case.check(&Sim::on(target, Options { seed, resident: 4, ..Options::default() }));
    }
}

/// Sums of d_q whose places are used again, where parts have different numbers of heads; sums that are zeroed meanwhile.
#[test]
fn parts_of_different_lengths_share_sums() {
    for (i, dims) in [[64, 64], [128, 128]].into_iter().enumerate() {
        let base = Case { dims, batch: 2, heads: [7, 1], blocks: 4, q_len: 150, k_len: 130, ..Case::base() };
        for (case, parts, seed) in [
            (base.clone(), 3, 1),
            (Case { mask: Mask::causal(), k_len: 300, ..base.clone() }, 2, 2),
            (Case { heads: [6, 2], q_len: 90, order: Order::Fixed, ..base.clone() }, 2, 3),
        ] {
            let case = spread(case, parts, |config| BackwardConfig { rounds: true, sums: Some(2), ..config });
            case.check(&sim(60 + 4 * i as u64 + seed));
            let zeroed = |config| BackwardConfig { rounds: false, zeroed: Some(1), ..config };
            spread(case, parts, zeroed).check(&sim(80 + 4 * i as u64 + seed));
        }
    }
}

/// Tiles in pieces, whose last piece has the part.
#[test]
fn pieces_of_tiles_are_joined_to_parts() {
    for (dims, seed) in [([64, 64], 1), ([128, 128], 2)] {
        let case = Case { dims, heads: [3, 1], q_len: 500, k_len: 300, blocks: 5, ..Case::base() };
        let case = spread(case, 2, |config| BackwardConfig { rounds: seed == 1, join: Some(0), ..config });
        assert!(case.plan().cuts_tiles(), "{case:?}");
        case.check(&sim(seed));
    }
}

/// 71 query heads share one key/value head (Falcon), in parts of eight and nine heads.
#[test]
fn seventy_one_heads_are_right() {
    let case = Case { heads: [71, 1], q_len: 33, k_len: 140, mask: Mask::causal(), blocks: 8, ..Case::base() };
    let plan = spread(case.clone(), 8, |config| config);
    assert_eq!(plan.plan().part_heads(), 9);
    plan.check(&sim(5));
}

/// Random groups, lengths, masks and parts, whatever the order in which CTAs run.
#[test]
fn random_groups_are_right() {
    let mut random = Random(23);
    for seed in crate::common::seeds() {
        let mut below = |n: u64| random.below(n) as usize;
        let mask = match below(4) {
            0 => Mask::none(),
            1 => Mask::causal(),
            2 => Mask::causal_top_left(),
            _ => Mask::window(Some(below(90) as i64), Some(below(30) as i64 - 10)),
        };
        let group = [2, 3, 7, 8][below(4)];
        let case = Case {
            q_len: 1 + below(150),
            k_len: 1 + below(290),
            heads: [group, 1],
            batch: 1 + below(2),
            dims: [[64, 64], [128, 128], [192, 128], [96, 40]][seed as usize % 4],
            mask,
            dtype: if below(2) == 0 { DType::Bf16 } else { DType::F16 },
            d_lse: below(3) == 0,
            order: if below(3) == 0 { Order::Fixed } else { Order::Any },
            blocks: 2 + below(4) as u32,
            config: None,
        };
        spread(case, 2 + below(group as u64 - 1) as u32, |config| config).check(&sim(seed));
    }
}

/// d_k and d_v have one order of additions, and in a fixed order d_q too, whoever comes first.
#[test]
fn parts_are_added_in_a_fixed_order() {
    let base = Case { heads: [7, 1], q_len: 100, k_len: 300, mask: Mask::causal(), blocks: 6, ..Case::base() };
    for order in [Order::Any, Order::Fixed] {
        for dims in [[64, 64], [128, 128]] {
            let case = spread(Case { order, dims, dtype: DType::F16, ..base.clone() }, 3, |config| config);
            let run = |seed| case.check(&Sim::new(Options { seed, resident: case.blocks, ..Options::default() }));
            let [one, other] = [1, 2].map(run);
            assert_eq!((&one.d_k, &one.d_v), (&other.d_k, &other.d_v), "{case:?}");
            assert!(order == Order::Any || one == other, "{case:?}");
        }
    }
}

/// Bugs where parts are stored and added: found as faults, or as wrong gradients.
#[test]
fn planted_bugs_are_found() {
    let case = Case { heads: [4, 1], q_len: 100, k_len: 130, blocks: 3, ..Case::base() };
    let case = spread(case, 4, |config| config);
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let run = |kernels: Kernels| {
        let sim = sim(1);
        let run = case.run(&sim, &kernels);
        let faults: Vec<Fault> = sim.findings().iter().map(|finding| finding.fault).collect();
        (faults, run.map(|(_, wrong)| wrong).unwrap_or_default())
    };
    let main = |main: Kernel| Kernels { main: Arc::new(main), ..kernels.clone() };
    let heads = |kernel: Kernel| Kernels { heads: Some(Arc::new(kernel)), ..kernels.clone() };
    let (of_main, of_heads) = (|| Kernel::clone(&kernels.main), || Kernel::clone(kernels.heads.as_ref().unwrap()));
    assert_eq!(run(kernels.clone()), (vec![], vec![]));

    // A part that is read before it is written.
    let mut stores: Vec<Line> = Vec::new();
    kernels.main.each_op(&mut |op| {
        let at = Line::from(op.at);
        if op.inst.name == "st.global.f32" && at.to_string().contains("schedules/bulk.rs") && !stores.contains(&at) {
            stores.push(at);
        }
    });
    let [store] = stores[..] else { panic!("{stores:?}") };
    let (faults, _) = run(main(drop_at(of_main(), "st.global.f32", store)));
    assert!(faults.contains(&Fault::Uninitialised), "{faults:?}");
    // Parts of d_k and d_v in each other's place, or in that of the next keys.
    let (faults, wrong) = run(main(change(of_main(), "st.global.f32", 0, 0, |at| at + 2048)));
    assert!(!faults.is_empty() || wrong.iter().any(|what| what.contains("d_")), "{faults:?}");
    // The last part is skipped: the loop begins to count with the one after.
    let (faults, wrong) = run(heads(change(of_heads(), "mov.b32", 0, 1, |first| first + 1)));
    assert!(faults.is_empty() && wrong.iter().any(|what| what.contains("d_k")), "{faults:?} {wrong:?}");
    // The first part is added again and again: the address is not moved on.
    let (faults, wrong) = run(heads(drop(of_heads(), "mov.b64", 3)));
    assert!(faults.is_empty() && wrong.iter().any(|what| what.contains("d_k")), "{faults:?} {wrong:?}");
    // Every other part, and beyond the last.
    let (faults, _) = run(heads(change(of_heads(), "mul.wide", 1, 2, |bytes| 2 * bytes)));
    assert!(faults.contains(&Fault::Uninitialised) || faults.contains(&Fault::OutOfBounds), "{faults:?}");
}
