//! Gradients by `mma.sync`: right against f64, clean in every order, with the same bits of d_k and d_v, and wrong in every
//! way that their ring and their barriers can be.

use crate::common::backward::Case;
use crate::common::mutate::{change, drop, drop_at, line};
use crate::common::seeds;
use fulgurite_core::{DType, Mask};
use fulgurite_kernels::attention::backward::plan::Kernels;
use fulgurite_ptx::{Kernel, Target};
use fulgurite_sim::{Fault, Finding, Options, Sim};
use std::sync::Arc;

fn on(target: &str, seed: u64) -> Sim {
    Sim::on(Target::named(target).unwrap(), Options { seed, budget: 40_000_000, ..Options::default() })
}

fn kernels(case: &Case, target: &str) -> Kernels {
    let target = Target::named(target).unwrap();
    case.plan_for(target).kernels(target).unwrap()
}

/// The bits of d_k and d_v, which must be right.
fn check(case: &Case, target: &str, seed: u64) -> [Vec<u8>; 2] {
    let sim = on(target, seed);
    let (gradients, wrong) = case.run(&sim, &kernels(case, target)).unwrap_or_else(|e| {
        panic!("{case:?}: {e}\n{}", sim.findings().iter().map(|f| format!("{f}\n")).collect::<String>())
    });
    assert!(wrong.is_empty(), "{case:?}: {wrong:#?}");
    assert!(sim.findings().is_empty(), "{case:?}: {:?}", sim.findings());
    [gradients.d_k, gradients.d_v].map(|tensor| tensor.view().to_f64().iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// A case with some entries of its configuration changed.
fn with(case: Case, text: &str) -> Case {
    let usual = case.plan_for(Target::AMPERE).config();
    Case { config: Some(usual.changed(text).unwrap()), ..case }
}

#[test]
fn gradients_are_those_of_f64() {
    let base = Case::base();
    let window = Mask::window(Some(40), Some(3));
    let cases = [
        Case { q_len: 1, k_len: 1, heads: [1, 1], ..base.clone() },
        Case { q_len: 70, k_len: 200, mask: Mask::causal(), batch: 2, dtype: DType::F16, d_lse: true, ..base.clone() },
        // Queries that see no key, and steps that end at a head.
        Case { q_len: 200, k_len: 77, heads: [4, 2], mask: Mask::causal(), ..base.clone() },
        with(Case { q_len: 130, k_len: 90, mask: window, ..base.clone() }, "share=warps16 rows=64 depth=3"),
        with(Case { q_len: 65, k_len: 129, dims: [96, 72], ..base.clone() }, "depth=2"),
        Case { q_len: 64, k_len: 64, dims: [128, 128], ..base.clone() },
        Case { q_len: 40, k_len: 65, heads: [1, 1], dims: [160, 256], ..base.clone() },
    ];
    for (case, seed) in cases.iter().zip(1..) {
        check(case, "sm_80", seed);
    }
    // 99 KB of shared memory.
    check(&Case { q_len: 66, k_len: 66, heads: [1, 1], dims: [128, 128], ..base }, "sm_120a", 9);
}

/// d_k and d_v have the same bits in every order of execution.
#[test]
fn clean_and_deterministic_in_every_order() {
    let case = Case { q_len: 150, k_len: 140, heads: [2, 1], ..Case::base() };
    let mut bits = seeds().step_by(8).map(|seed| check(&case, "sm_86", seed));
    let first = bits.next().unwrap();
    assert!(bits.all(|other| other == first));
}

/// Planted bugs of the ring, of p and d_z, and of the way out: each is found.
#[test]
fn planted_bugs() {
    for (config, least) in [("share=warps32 rows=64 depth=4", 7), ("share=warps32 rows=64 depth=3", 10)] {
        let case = with(Case { q_len: 330, k_len: 100, heads: [1, 1], ..Case::base() }, config);
        let good = kernels(&case, "sm_80");
        let main = || good.main.as_ref().clone();
        let count = |row: &str| {
            let mut n = 0;
            main().each_op(&mut |op| n += usize::from(op.inst.name == row));
            n
        };
        let (bars, waits, commits) = (count("bar.sync"), count("cp.async.wait_group"), count("cp.async.commit_group"));
        let races = &[Fault::Race, Fault::Uninitialised][..];
        let mut bugs: Vec<(String, Kernel)> = Vec::new();
        for n in 0..waits {
            bugs.push((format!("no wait for the group ({n})"), drop(main(), "cp.async.wait_group", n)));
            let more = change(main(), "cp.async.wait_group", n, 0, |n| n + 1);
            bugs.push((format!("one group too many may be pending ({n})"), more));
        }
        for n in 0..bars {
            let at = line(&main(), "bar.sync", n);
            bugs.push((format!("no barrier ({n})"), drop_at(main(), "bar.sync", at)));
        }
        bugs.push(("no group is made of the first copies".into(), drop(main(), "cp.async.commit_group", commits - 1)));
        assert!(bugs.len() >= least, "{}", bugs.len());
        for (name, kernel) in bugs {
            let found = findings(&case, &good, kernel);
            let all: String = found.iter().map(|f| format!("\n    {f}")).collect();
            assert!(found.iter().any(|f| races.contains(&f.fault)), "{config}: {name}: got{all}");
            println!("{config}: {name}: {}", found[0]);
        }
        assert!(findings(&case, &good, main()).is_empty());
    }
}

fn findings(case: &Case, good: &Kernels, kernel: Kernel) -> Vec<Finding> {
    let sim = on("sm_80", 1);
    let ran = case.run(&sim, &Kernels { main: Arc::new(kernel), ..good.clone() });
    let found = sim.findings();
    // A launch may fail because of a finding, and for no other reason.
    assert!(ran.is_ok() || !found.is_empty(), "nothing ran: {:?}", ran.err());
    found
}
