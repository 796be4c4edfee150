//! Forward attention by `mma.sync`: right against f64, clean in every order, and wrong in every way that its ring can be.

use crate::common::attention::{BASE, Case};
use crate::common::mutate::{change, drop, drop_at, line};
use crate::common::seeds;
use fulgurite_core::Rescale;
use fulgurite_ptx::{Kernel, Target, TensorUnit};
use fulgurite_sim::{Fault, Finding, Options, Sim};

const SYNC: Case = Case { unit: TensorUnit::MmaSync, ..BASE };

fn on(target: &str, seed: u64) -> Sim {
    Sim::on(Target::named(target).unwrap(), Options { seed, budget: 20_000_000, ..Options::default() })
}

fn check(case: &Case, sim: &Sim) {
    let verdicts = case.run(sim, case.kernel()).unwrap_or_else(|e| {
        panic!("{case:?}: {e}\n{}", sim.findings().iter().map(|f| format!("{f}\n")).collect::<String>())
    });
    for (name, verdict) in verdicts {
        assert!(verdict.ok(), "{case:?}: {name}: {verdict}");
    }
}

#[test]
fn rows_are_those_of_f64() {
    let optimistic = Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT);
    // A limit that many blocks exceed: their scores are computed again.
    let suspicious = Rescale::Optimistic(1.0);
    let cases = [
        SYNC,
        Case { q_len: 1, k_len: 1, heads: [1, 1], ..SYNC },
        Case { dim: 128, rescale: optimistic, ..SYNC },
        Case { dim: 128, k_len: 333, causal: true, rescale: suspicious, ..SYNC },
        Case { causal: true, q_len: 200, k_len: 77, batch: 2, rescale: Rescale::Lazy(8.0), ..SYNC },
        Case { dim: 256, q_len: 70, k_len: 130, heads: [1, 1], ..SYNC },
        Case { dim: 96, q_len: 65, k_len: 129, causal: true, rescale: optimistic, ..SYNC },
        Case { dim: 128, config: Some("blocks=1 cols=48 depth=3"), rescale: suspicious, ..SYNC },
        Case { dim: 64, config: Some("blocks=2 cols=32 depth=4"), ..SYNC },
    ];
    for (case, seed) in cases.iter().zip(1..) {
        check(case, &on("sm_80", seed));
    }
    check(&Case { causal: true, rescale: optimistic, ..SYNC }, &on("sm_120a", 9));
}

#[test]
fn clean_in_every_order() {
    for seed in seeds().step_by(4) {
        let (dim, depth) = ([64, 128][seed as usize % 2], ["depth=2", "depth=3"][seed as usize / 2 % 2]);
        let case = Case { q_len: 100, k_len: 200 + seed as u32, heads: [1, 1], dim, config: Some(depth), ..SYNC };
        check(&case, &on("sm_80", seed));
    }
}

/// `ldmatrix` and the copies pass over the banks once, and every row of q, k and v is read from memory once for each tile.
#[test]
fn what_it_costs() {
    let case =
        Case { q_len: 128, k_len: 512, heads: [1, 1], dim: 128, config: Some("blocks=2 cols=64 depth=2"), ..SYNC };
    let sim = on("sm_80", 0);
    check(&case, &sim);
    let counts = sim.report().total();
    assert_eq!(counts.tensor_flops["bf16"], 4 * 128 * 512 * 128);
    let (rows, lse) = (2 * 128 * (128 + 512 + 512 + 128), 4 * 128);
    assert_eq!(counts.global_bytes, rows + lse);
    assert_eq!(counts.bank_conflicts, 0);
}

/// Planted bugs of the ring and of the staging of O: each is found, with the line of a side.
#[test]
fn planted_bugs() {
    let case = Case { q_len: 64, k_len: 420, heads: [1, 1], config: Some("blocks=1 cols=64 depth=2"), ..SYNC };
    let good = || case.kernel();
    let count = |row: &str| {
        let mut n = 0;
        good().each_op(&mut |op| n += usize::from(op.inst.name == row));
        n
    };
    let (bars, waits) = (count("bar.sync"), count("cp.async.wait_group"));
    assert_eq!(waits, 4, "K and V of the first block and of the loop");
    let bar = |n: usize| line(&good(), "bar.sync", n);
    let races = &[Fault::Race, Fault::Uninitialised][..];
    let mut bugs: Vec<(String, Kernel, &[Fault])> = Vec::new();
    for n in 0..waits {
        bugs.push((format!("no wait for the group ({n})"), drop(good(), "cp.async.wait_group", n), races));
        let more = change(good(), "cp.async.wait_group", n, 0, |n| n + 1);
        bugs.push((format!("one group too many may be pending ({n})"), more, races));
        bugs.push((format!("no barrier after the wait ({n})"), drop_at(good(), "bar.sync", bar(n)), races));
    }
    bugs.push(("no group is made of Q and the first K".into(), drop(good(), "cp.async.commit_group", 0), races));
    bugs.push(("no group is made of the first V".into(), drop(good(), "cp.async.commit_group", 1), races));
    bugs.push(("O stored before all warps wrote it".into(), drop_at(good(), "bar.sync", bar(bars - 1)), races));
    assert!(bugs.len() >= 15, "{}", bugs.len());
    for (name, kernel, faults) in bugs {
        let found = findings(&case, kernel);
        let all: String = found.iter().map(|f| format!("\n    {f}")).collect();
        assert!(found.iter().any(|f| faults.contains(&f.fault)), "{name}: got{all}");
        println!("{name}: {}", found[0]);
    }
    assert!(findings(&case, good()).is_empty());
}

fn findings(case: &Case, kernel: Kernel) -> Vec<Finding> {
    let sim = on("sm_80", 1);
    let ran = case.run(&sim, kernel);
    let found = sim.findings();
    // A launch may fail because of a finding, and for no other reason.
    assert!(ran.is_ok() || !found.is_empty(), "nothing ran: {:?}", ran.err());
    found
}
