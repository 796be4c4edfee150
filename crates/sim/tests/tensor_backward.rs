//! Gradients by `tcgen05`: right against f64, clean in every order, with the same bits of d_k and d_v, and wrong in every way
//! that its roles can be.

use crate::common::backward::Case;
use crate::common::mutate::{change, drop, drop_at, drop_waits_at};
use crate::common::seeds;
use fulgurite_core::{DType, Mask};
use fulgurite_kernels::attention::backward::Order;
use fulgurite_kernels::attention::backward::plan::Kernels;
use fulgurite_kernels::attention::forward::plan::ResultType;
use fulgurite_kernels::operator::{Backward, BackwardOptions, Operator, Tables};
use fulgurite_ptx::device::Device;
use fulgurite_ptx::{Kernel, Target, TensorUnit};
use fulgurite_sim::{Fault, Finding, Line, Options, Sim};
use std::sync::Arc;

fn on(target: &str, seed: u64) -> Sim {
    Sim::on(Target::named(target).unwrap(), Options { seed, budget: 40_000_000, ..Options::default() })
}

fn kernels(case: &Case, target: &str) -> Kernels {
    let target = Target::named(target).unwrap();
    case.plan_for(target).kernels(target).unwrap_or_else(|e| panic!("{case:?}: {e}"))
}

/// The bits of d_k and d_v, which must be right.
fn check(case: &Case, sim: &Sim) -> [Vec<u8>; 2] {
    let kernels = kernels(case, &sim.target().name());
    let (gradients, wrong) = case.run(sim, &kernels).unwrap_or_else(|e| {
        panic!("{case:?}: {e}\n{}", sim.findings().iter().map(|f| format!("{f}\n")).collect::<String>())
    });
    assert!(wrong.is_empty(), "{case:?}: {wrong:#?}");
    assert!(sim.findings().is_empty(), "{case:?}: {:?}", sim.findings());
    [gradients.d_k, gradients.d_v].map(|tensor| tensor.view().to_f64().iter().flat_map(|x| x.to_le_bytes()).collect())
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
        Case { q_len: 260, k_len: 290, mask: window, ..base.clone() },
        Case { q_len: 65, k_len: 129, dims: [96, 72], ..base.clone() },
        Case { q_len: 300, k_len: 64, dims: [128, 128], ..base.clone() },
        Case { q_len: 300, k_len: 140, dims: [128, 128], mask: Mask::causal(), ..base.clone() },
        Case { q_len: 40, k_len: 65, heads: [1, 1], dims: [16, 128], ..base.clone() },
        Case { q_len: 140, k_len: 65, heads: [1, 1], dims: [80, 40], ..base.clone() },
    ];
    for (case, seed) in cases.iter().zip(1..) {
        check(case, &on("sm_100a", seed));
    }
    check(&Case { q_len: 66, k_len: 66, heads: [1, 1], dims: [128, 128], ..base }, &on("sm_103a", 9));
}

/// d_k and d_v are bitwise identical in every order of execution.
#[test]
fn clean_and_deterministic_in_every_order() {
    // d_q beside d_p in tensor memory, and over it.
    for dims in [[64, 64], [128, 128]] {
        let case = Case { q_len: 290, k_len: 140, heads: [2, 1], dims, mask: Mask::causal(), ..Case::base() };
        let mut bits = seeds().step_by(8).map(|seed| check(&case, &on("sm_100a", seed)));
        let first = bits.next().unwrap();
        assert!(bits.all(|other| other == first));
    }
}

/// Work of four steps of a tile of keys, in the units of the published table: 128 x 128 scores, head dim 128.
#[test]
fn what_it_costs() {
    let case = Case { q_len: 512, k_len: 128, heads: [1, 1], dims: [128, 128], ..Case::base() };
    let (sim, kernels) = (on("sm_100a", 0), kernels(&case, "sm_100a"));
    let (_, wrong) = case.run(&sim, &kernels).unwrap();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let counts = sim.counts_of(&kernels.main.name);
    let tiles = 512 / 128;
    // 8192 operations, 128 bytes and 16 exponentials in a cycle: 2560, 2048 and 1024 cycles a tile.
    assert_eq!(counts.tensor_flops["bf16"], tiles * 2560 * 8192);
    assert_eq!(counts.shared_operand_bytes, tiles * 2048 * 128);
    assert_eq!(counts.exps, tiles * 1024 * 16);
    // The published 3328 cycles of shared memory have 256 more for d_z, written, and 1024 for d_q, written and read. Besides,
    // each thread reads LSE and delta of its 64 queries, the same as all threads of its warp.
    let (d_z, d_q, numbers, results) = (256 * 128, 512 * 128, 2 * 64 * 4 * 256, 2 * 128 * 128 * 2);
    let threads = tiles * (d_z + d_q + numbers) + results;
    assert!((threads..threads + 4096).contains(&counts.shared_thread_bytes), "{}", counts.shared_thread_bytes);
    let loads = 2 * 128 * 128 * 2;
    assert_eq!(counts.shared_copy_bytes, tiles * (loads + 2 * 128 * 4 + d_q) + loads + results);
    assert_eq!(counts.bank_conflicts, 0);
}

/// A bug: what it is, the kernel that has it, what may be found, and lines of which a finding must name one.
struct Bug {
    name: String,
    kernel: Kernel,
    faults: &'static [Fault],
    lines: Vec<Line>,
}

fn findings(case: &Case, good: &Kernels, kernel: Kernel, seed: u64) -> Vec<Finding> {
    let sim = on("sm_100a", seed);
    let ran = case.run(&sim, &Kernels { main: Arc::new(kernel), ..good.clone() });
    let found = sim.findings();
    // A launch may fail because of a finding, and for no other reason.
    assert!(ran.is_ok() || !found.is_empty(), "nothing ran: {:?}", ran.err());
    found
}

/// The lines that make a row, each once.
fn lines(kernel: &Kernel, row: &str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    kernel.each_op(&mut |op| {
        if op.inst.name == row && !lines.contains(&op.at.into()) {
            lines.push(op.at.into());
        }
    });
    lines
}

/// The `n`-th line that makes a row.
fn nth(kernel: &Kernel, row: &str, n: usize) -> Line {
    lines(kernel, row)[n]
}

/// Lines without which nothing is wrong: `(row, line)`. Tiles of keys and values are loaded once, so their stages are empty and
/// nobody waits until they are again; the same is true of d_k and d_v in tensor memory. The assembler knows when a register
/// is loaded. The simulator keeps the shared memory of a CTA that has ended.
fn needless(main: &Kernel, d_o_stages: usize) -> Vec<(&'static str, Line)> {
    let tiles = |n| nth(main, "cp.async.bulk.tensor.load", n);
    let (arrive, commit, load, read) =
        ("mbarrier.arrive", "tcgen05.commit", "tcgen05.wait.ld", "cp.async.bulk.wait_group.read");
    let last = |row: &str| *lines(main, row).last().unwrap();
    // In the order of the text: keys, queries, values, d_o; -LSE, delta.
    let waits = match d_o_stages {
        // A stage of q is empty after d_k of its step, which is after d_v.
        2 => vec![tiles(0), tiles(2), tiles(3)],
        // A stage of -LSE is empty before the stage of d_o whose wait comes before it.
        _ => vec![tiles(0), tiles(2), nth(main, "cp.async.bulk.load", 0)],
    };
    let results = last("tcgen05.ld");
    let given_back: Vec<Line> = lines(main, arrive).into_iter().filter(|at| at.line > results.line).collect();
    let mut all: Vec<(&'static str, Line)> = waits.into_iter().map(|at| ("mbarrier.try_wait", at)).collect();
    let compute = given_back.into_iter().filter(|at| at.file == results.file);
    all.extend(compute.flat_map(|at| [(arrive, at), (load, at)]));
    let of_results = lines(main, load).into_iter().filter(|at| at.file == results.file && at.line > results.line);
    all.extend(of_results.map(|at| (load, at)));
    all.extend(lines(main, read).into_iter().filter(|at| at.file == results.file).map(|at| (read, at)));
    // Commits in the order of the text: s, d_p, stage of d_o, stage of q, d_q, keys or values, d_v or d_k.
    let once = ["values.done_with_products", "keys.done_with_products"];
    let text = include_str!("../../kernels/src/attention/backward/tcgen05/multiply.rs");
    let made =
        |at: &Line| once.iter().any(|call| text.lines().nth(at.line as usize - 1).is_some_and(|l| l.contains(call)));
    all.extend(lines(main, commit).into_iter().filter(made).map(|at| (commit, at)));
    all
}

/// Every wait, arrival, commit and fence of the main kernel dropped, one at a time, and bugs of tensor memory.
fn planted(dims: [usize; 2], d_o_stages: usize) {
    let case = Case { q_len: 520, k_len: 128, heads: [1, 1], dims, ..Case::base() };
    let good = kernels(&case, "sm_100a");
    let main = || good.main.as_ref().clone();
    let races = &[Fault::Race, Fault::ProxyRace, Fault::Uninitialised][..];
    let needless = needless(&main(), d_o_stages);
    let lines = |row: &'static str| {
        let all = lines(&main(), row).into_iter();
        all.filter(|at| !needless.contains(&(row, *at))).collect::<Vec<Line>>()
    };
    let mut bugs = Vec::new();
    let mut bug = |name: String, kernel: Kernel, faults: &'static [Fault], lines: &[Line]| {
        bugs.push(Bug { name, kernel, faults, lines: lines.to_vec() });
    };
    for wait in lines("mbarrier.try_wait") {
        bug(format!("no wait at {wait}"), drop_waits_at(main(), wait), &[], &[]);
    }
    for row in ["mbarrier.arrive", "tcgen05.commit"] {
        for at in lines(row) {
            bug(format!("no {row} at {at}"), drop_at(main(), row, at), &[], &[]);
        }
    }
    for row in ["fence.proxy.async", "tcgen05.wait.ld", "tcgen05.wait.st", "bar.sync", "cp.async.bulk.wait_group.read"]
    {
        for at in lines(row) {
            bug(format!("no {row} at {at}"), drop_at(main(), row, at), races, &[]);
        }
    }
    let bars = count(&main(), "bar.sync.all");
    bug("freed while others read".into(), drop(main(), "bar.sync.all", bars - 1), races, &[]);
    bug("tensor memory is kept".into(), drop(main(), "tcgen05.dealloc", 0), &[Fault::TensorMemory], &[]);
    bug("fewer columns".into(), change(main(), "tcgen05.alloc", 0, 1, |n| n / 2), &[Fault::OutOfBounds], &[]);
    assert!(bugs.len() >= 40, "{}", bugs.len());
    let mut missed = Vec::new();
    for bug in bugs {
        let found = (1..4).map(|seed| findings(&case, &good, bug.kernel.clone(), seed)).find(|found| {
            found.iter().any(|f| {
                (bug.faults.is_empty() || bug.faults.contains(&f.fault))
                    && (bug.lines.is_empty() || bug.lines.iter().any(|&line| f.names(line)))
            })
        });
        match found {
            Some(found) => println!("{}: {}", bug.name, found[0]),
            None => missed.push(format!("{}: wanted {:?} at {:?}", bug.name, bug.faults, bug.lines)),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    assert!(findings(&case, &good, main(), 1).is_empty());
}

fn count(kernel: &Kernel, row: &str) -> usize {
    let mut n = 0;
    kernel.each_op(&mut |op| n += usize::from(op.inst.name == row));
    n
}

#[test]
fn planted_bugs_with_d_q_over_d_p() {
    planted([128, 128], 1);
}

#[test]
fn planted_bugs_with_d_q_beside_d_p() {
    planted([64, 64], 2);
}

/// A caller who names `tcgen05` learns what it lacks; others get `mma.sync`.
#[test]
fn what_is_missing_is_refused_by_name() {
    let target = Target::named("sm_100a").unwrap();
    let plan = |case: &Case, unit: Option<TensorUnit>, results: ResultType| {
        let options = BackwardOptions { unit, order: case.order, results, ..BackwardOptions::default() };
        Backward::plan(&case.problem(), &options, target, &Tables::default())
    };
    let long = Case { dims: [136, 128], ..Case::base() };
    let fixed = Case { order: Order::Fixed, ..Case::base() };
    let named = Some(TensorUnit::Tcgen05);
    for (case, results, what) in [
        (&long, ResultType::Input, "backward of head dims 136 and 128 (up to 128 are supported) by tcgen05"),
        (&fixed, ResultType::Input, "gradients in a fixed order by tcgen05"),
        (&Case::base(), ResultType::F32, "f32 gradients by tcgen05"),
    ] {
        let refused = plan(case, named, results).unwrap_err().to_string();
        assert!(refused.contains(what), "{refused}");
    }
    assert!(plan(&long, None, ResultType::Input).unwrap().config().is_sync());
    let refused = plan(&fixed, None, ResultType::Input).unwrap_err().to_string();
    assert!(refused.contains("gradients in a fixed order by mma.sync"), "{refused}");
    for unit in [None, named] {
        assert!(plan(&Case::base(), unit, ResultType::Input).unwrap().config().is_tensor());
    }
}
