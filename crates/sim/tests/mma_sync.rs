//! The product of single warps: right against f64, clean in every order, and wrong in every way that `cp.async` can be.

use crate::common::mutate::{change, drop, line};
use crate::common::{Gemm, INNER, SMALL, seeds};
use fulgurite_kernels::gemm::mma_sync::{SyncGemm, kernel};
use fulgurite_kernels::gemm::{GemmConfig, Layouts};
use fulgurite_ptx::{Kernel, Major, Number, Target, bf16, f16};
use fulgurite_sim::{Fault, Finding, Options, Sim};

const LAYOUTS: [Layouts; 4] = [
    INNER,
    Layouts { a: Major::Inner, b: Major::Outer },
    Layouts { a: Major::Outer, b: Major::Inner },
    Layouts { a: Major::Outer, b: Major::Outer },
];

fn gemm(m: u32, n: u32, k: u32, layouts: Layouts) -> Gemm {
    Gemm { m, n, k, batch: 1, layouts, config: GemmConfig { ..SMALL }, compare: true }
}

fn on(target: &str, seed: u64) -> Sim {
    Sim::on(Target::named(target).unwrap(), Options { seed, ..Options::default() })
}

fn complain(sim: &Sim) -> String {
    sim.findings().iter().map(|f| format!("{f}\n")).collect()
}

#[test]
fn products_are_those_of_f64() {
    for layouts in LAYOUTS {
        let more: &[(u32, u32, u32)] =
            if layouts == INNER { &[(256, 128, 200), (1, 1, 1), (130, 8, 300)] } else { &[] };
        for &(m, n, k) in [(128, 128, 64), (100, 77, 129)].iter().chain(more) {
            let gemm = gemm(m, n, k, layouts);
            let sim = on("sm_80", 1);
            let (_, worst) = gemm
                .run_sync::<bf16>(&sim, kernel::<bf16>(Target::AMPERE, layouts).unwrap())
                .unwrap_or_else(|_| panic!("{gemm:?}: {}", complain(&sim)));
            assert!(worst <= 1.0, "{gemm:?}: {worst}");
        }
    }
    let gemm = Gemm { batch: 3, ..gemm(70, 90, 100, INNER) };
    let sim = on("sm_120a", 2);
    let kernel = SyncGemm { number: Number::F16, layouts: INNER }.kernel(Target::named("sm_120a").unwrap()).unwrap();
    let (_, worst) = gemm.run_sync::<f16>(&sim, kernel).unwrap_or_else(|_| panic!("{gemm:?}: {}", complain(&sim)));
    assert!(worst <= 1.0, "{gemm:?}: {worst}");
}

#[test]
fn clean_in_every_order() {
    for (layouts, few) in [(INNER, 2), (LAYOUTS[1], 10)] {
        let mut first = None;
        for seed in seeds().step_by(few) {
            let gemm = Gemm { compare: false, ..gemm(128, 128, 250, layouts) };
            let sim = on("sm_80", seed);
            let (bits, _) = gemm
                .run_sync::<bf16>(&sim, kernel::<bf16>(Target::AMPERE, layouts).unwrap())
                .unwrap_or_else(|_| panic!("seed {seed}: {}", complain(&sim)));
            assert_eq!(*first.get_or_insert_with(|| bits.clone()), bits, "seed {seed}");
        }
    }
}

/// Neither copies nor `ldmatrix` pass over the banks more often than they must, and operands are read once from memory.
#[test]
fn what_it_costs() {
    let (m, n, k) = (256, 256, 256);
    let gemm = Gemm { compare: false, ..gemm(m, n, k, INNER) };
    let sim = on("sm_80", 0);
    gemm.run_sync::<bf16>(&sim, kernel::<bf16>(Target::AMPERE, INNER).unwrap()).unwrap();
    let counts = sim.report().total();
    assert_eq!(counts.bank_conflicts, 0);
    assert_eq!(counts.tensor_flops["bf16"], 2 * u64::from(m * n * k));
    // Each of four tiles reads 128 rows of A and of B, and writes its part of C.
    let operands = 4 * 2 * 128 * u64::from(k) * 2;
    assert_eq!(counts.global_bytes, operands + 2 * u64::from(m * n));
    // Eight warps read 64 rows of A and 32 of B for each.
    assert_eq!(counts.shared_thread_bytes, 4 * 8 * (64 + 32) * u64::from(k) * 2);
}

/// Planted bugs of a ring of copies: each is found, with the lines of both sides.
#[test]
fn planted_bugs_of_copies() {
    let good = || kernel::<bf16>(Target::AMPERE, INNER).unwrap();
    let (copy, read) = (line(&good(), "cp.async", 0), line(&good(), "ldmatrix", 0));
    let bugs: Vec<(&str, Kernel)> = vec![
        ("no wait for the group", drop(good(), "cp.async.wait_group", 0)),
        ("one group too many may be pending", change(good(), "cp.async.wait_group", 0, 0, |n| n + 1)),
        ("no barrier after the wait", drop(good(), "bar.sync", 0)),
        ("no group is made of the first stage", drop(good(), "cp.async.commit_group", 0)),
        ("a stage is filled again too early", early()),
    ];
    for (name, kernel) in bugs {
        for seed in 0..3 {
            let found = findings(kernel.clone(), seed);
            let right = |f: &&Finding| matches!(f.fault, Fault::Race | Fault::Uninitialised) && f.names(read);
            let all: String = found.iter().map(|f| format!("\n    {f}")).collect();
            let Some(f) = found.iter().find(right) else { panic!("{name} (seed {seed}): got{all}") };
            assert!(f.fault == Fault::Uninitialised || f.names(copy), "{name} (seed {seed}): got{all}");
            if seed == 0 {
                println!("{name}: {f}");
            }
        }
    }
    assert!(findings(good(), 0).is_empty());
}

fn findings(kernel: Kernel, seed: u64) -> Vec<Finding> {
    let sim = Sim::on(Target::AMPERE, Options { seed, budget: 3_000_000, ..Options::default() });
    let gemm = Gemm { compare: false, ..gemm(128, 128, 512, INNER) };
    let ran = gemm.run_sync::<bf16>(&sim, kernel);
    let found = sim.findings();
    // A launch may fail because of a finding, and for no other reason.
    assert!(ran.is_ok() || !found.is_empty(), "nothing ran: {:?}", ran.err());
    found
}

/// The kernel with the copies of a step before the wait of that step instead of after it: into the stage that other warps
/// still read.
fn early() -> Kernel {
    use fulgurite_ptx::kernel::Stmt;
    fn is(stmt: &Stmt, row: &str) -> bool {
        matches!(stmt, Stmt::Op(op) if op.inst.name == row)
    }
    fn swap(block: &mut [Stmt]) -> bool {
        let wait = block.iter().position(|s| is(s, "cp.async.wait_group"));
        let commit = wait.and_then(|at| Some(at + block[at..].iter().position(|s| is(s, "cp.async.commit_group"))?));
        if let (Some(wait), Some(commit)) = (wait, commit) {
            let Some(barrier) = block.iter().position(|s| is(s, "bar.sync")) else { return false };
            // The barrier goes behind the copies: then it no longer keeps them from what is read before it.
            block[barrier..=commit].rotate_left(1);
            assert!(barrier > wait);
            return true;
        }
        block.iter_mut().any(|stmt| match stmt {
            Stmt::If { then, otherwise, .. } => swap(then) || swap(otherwise),
            Stmt::Loop { body, .. } => swap(body),
            _ => false,
        })
    }
    let mut kernel = kernel::<bf16>(Target::AMPERE, INNER).unwrap();
    assert!(swap(&mut kernel.body));
    kernel
}
