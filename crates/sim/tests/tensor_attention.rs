//! Forward attention by `tcgen05`: right against f64, clean in every order, and wrong in every way that its roles can be.

use crate::common::attention::{BASE, Case};
use crate::common::mutate::{change, drop, drop_all, drop_wait, drop_waits_at, line};
use crate::common::seeds;
use fulgurite_core::Rescale;
use fulgurite_ptx::{Kernel, Target, TensorUnit};
use fulgurite_sim::{Fault, Finding, Line, Options, Sim};

const TENSOR: Case = Case { unit: TensorUnit::Tcgen05, ..BASE };

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
    // A limit that many blocks exceed: their scores are loaded again, and o is rescaled in tensor memory.
    let suspicious = Rescale::Optimistic(1.0);
    let cases = [
        Case { rescale: optimistic, ..TENSOR },
        Case { q_len: 1, k_len: 1, heads: [1, 1], ..TENSOR },
        Case { dim: 128, k_len: 333, causal: true, rescale: suspicious, ..TENSOR },
        Case { causal: true, q_len: 200, k_len: 77, batch: 2, rescale: Rescale::Lazy(8.0), ..TENSOR },
        Case { q_len: 300, k_len: 300, heads: [1, 1], rescale: suspicious, ..TENSOR },
        Case { dim: 96, q_len: 65, k_len: 129, causal: true, ..TENSOR },
        Case { dim: 40, k_len: 200, config: Some("groups=1 cols=64"), rescale: optimistic, ..TENSOR },
        // p in parts of other widths, and whole.
        Case { dim: 64, k_len: 200, causal: true, config: Some("cols=64 tail=16"), rescale: suspicious, ..TENSOR },
        Case { dim: 64, k_len: 300, config: Some("cols=96"), rescale: Rescale::Lazy(8.0), ..TENSOR },
        Case { dim: 64, k_len: 300, config: Some("tail=0"), rescale: suspicious, ..TENSOR },
    ];
    for (case, seed) in cases.iter().zip(1..) {
        check(case, &on("sm_100a", seed));
    }
}

#[test]
fn clean_in_every_order() {
    for seed in seeds().step_by(5) {
        let dim = [64, 128][seed as usize % 2];
        let rescale = [Rescale::Optimistic(1.0), Rescale::Always][seed as usize / 2 % 2];
        let case = Case { q_len: 300, k_len: 200 + seed as u32, heads: [1, 1], dim, rescale, ..TENSOR };
        check(&case, &on("sm_100a", seed));
    }
}

/// Work of a tile of 256 queries and 512 keys, in the units of the published table: 128 x 128 scores, head dim 128.
#[test]
fn what_it_costs() {
    let optimistic = Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT);
    let case = Case { q_len: 256, k_len: 512, heads: [1, 1], dim: 128, rescale: optimistic, ..TENSOR };
    let sim = on("sm_100a", 0);
    check(&case, &sim);
    let counts = sim.report().total();
    let tiles = 2 * 512 / 128;
    // 8192 operations, 128 bytes and 16 exponentials in a cycle: 1024, 768 and 1024 cycles a tile.
    assert_eq!(counts.tensor_flops["bf16"], tiles * 1024 * 8192);
    assert_eq!(counts.shared_operand_bytes, tiles * 768 * 128);
    assert_eq!(counts.exps, tiles * 1024 * 16);
}

/// A bug: what it is, the kernel that has it, what may be found, and lines of which a finding must name one.
struct Bug {
    name: String,
    kernel: Kernel,
    faults: &'static [Fault],
    lines: Vec<Line>,
}

/// Planted bugs of scores, p and o in tensor memory: each is found, with the lines of both sides.
#[test]
fn planted_bugs() {
    // Four tiles of queries for one CTA, so that every barrier has several phases.
    let case = Case { q_len: 130, k_len: 420, heads: [4, 1], rescale: Rescale::Always, ..TENSOR };
    let k = || case.kernel();
    let at = |row: &str, n: usize| line(&k(), row, n);
    let all = |row: &str| {
        let mut lines: Vec<Line> = Vec::new();
        k().each_op(&mut |op| {
            if op.inst.name == row && !lines.contains(&op.at.into()) {
                lines.push(op.at.into());
            }
        });
        lines
    };
    let output = at("tcgen05.mma.ts", 0);
    let (load, store) = (at("tcgen05.ld", 0), at("tcgen05.st", 0));
    let races = &[Fault::Race, Fault::Uninitialised][..];
    let bug =
        |name: &str, kernel, faults, lines: &[Line]| Bug { name: name.into(), kernel, faults, lines: lines.to_vec() };
    let waits = all("mbarrier.try_wait");
    let mut bugs = vec![
        bug("p not waited for", drop_all(k(), "tcgen05.wait.st"), races, &[store, output]),
        bug("scores loaded by halves", drop_all(k(), "tcgen05.wait.ld"), races, &[load]),
        bug("p beside the scores", change(k(), "tcgen05.st", 0, 0, |n| n + 512), &[Fault::OutOfBounds], &[store]),
        bug(
            "o never complete",
            drop(k(), "tcgen05.commit", count(&k(), "tcgen05.commit") - 2),
            &[Fault::Deadlock],
            &[],
        ),
        bug("freed while another warpgroup reads o", drop(k(), "bar.sync.all", 1), races, &[at("tcgen05.dealloc", 0)]),
        bug("tensor memory is kept", drop(k(), "tcgen05.dealloc", 0), &[Fault::TensorMemory], &[]),
        bug("fewer columns", change(k(), "tcgen05.alloc", 0, 1, |n| n / 2), &[Fault::OutOfBounds], &[]),
    ];
    let (signals, between) = (publishes(&k()), wait_between_parts(&k()));
    assert_eq!(signals.len(), 4, "two parts of a tile's first block, and of the others");
    for (n, signal) in signals.into_iter().enumerate() {
        let name = format!("part {} of p is never published", n % 2);
        bugs.push(bug(&name, drop(k(), "mbarrier.arrive", signal), &[Fault::Deadlock], &[]));
    }
    bugs.extend([
        bug("the second part of p not waited for", drop_wait(k(), between), races, &[store, output]),
        bug(
            "a product beyond the part that is published",
            change(k(), "tcgen05.mma.ts", 5, 1, |n| n + 8),
            races,
            &[store, output],
        ),
    ]);
    // Any wait but one: o of a tile is read before p of the next one is written, and that is waited for.
    let after_o = |wait: &Line| *wait == empty_outputs(&k());
    for &wait in waits.iter().filter(|wait| !after_o(wait)) {
        let name = format!("no wait at {wait}");
        bugs.push(Bug { name, kernel: drop_waits_at(k(), wait), faults: &[], lines: Vec::new() });
    }
    let mut missed = Vec::new();
    for bug in bugs {
        let found = findings(&case, bug.kernel);
        let text: String = found.iter().map(|f| format!("\n    {f}")).collect();
        let right = found.iter().any(|f| {
            (bug.faults.is_empty() || bug.faults.contains(&f.fault))
                && (bug.lines.is_empty() || bug.lines.iter().any(|&line| f.names(line)))
        });
        match right {
            true => println!("{}: {}", bug.name, found[0]),
            false => missed.push(format!("{}: wanted {:?} at {:?}, got{text}", bug.name, bug.faults, bug.lines)),
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
    assert!(findings(&case, k()).is_empty());
}

fn count(kernel: &Kernel, row: &str) -> usize {
    let mut n = 0;
    kernel.each_op(&mut |op| n += usize::from(op.inst.name == row));
    n
}

/// The signals that follow stores to tensor memory, among all arrivals.
fn publishes(kernel: &Kernel) -> Vec<usize> {
    let (mut arrivals, mut stored, mut found) = (0, false, Vec::new());
    kernel.each_op(&mut |op| match op.inst.name {
        "tcgen05.st" => stored = true,
        "mbarrier.arrive" => {
            if std::mem::take(&mut stored) {
                found.push(arrivals);
            }
            arrivals += 1;
        }
        _ => {}
    });
    found
}

/// The first wait between two products with p, among all waits: the one for the second part of p.
fn wait_between_parts(kernel: &Kernel) -> usize {
    const WAIT: &str = "mbarrier.try_wait";
    const PRODUCT: &str = "tcgen05.mma.ts";
    let (mut waits, mut rows) = (0, Vec::new());
    kernel.each_op(&mut |op| {
        if [WAIT, PRODUCT, "tcgen05.mma.ss", "tcgen05.commit"].contains(&op.inst.name) {
            rows.push((op.inst.name, waits));
            waits += usize::from(op.inst.name == WAIT);
        }
    });
    let between = rows.windows(3).find(|rows| [0, 1, 2].map(|i| rows[i].0) == [PRODUCT, WAIT, PRODUCT]);
    between.expect("a wait between products with p")[1].1
}

/// The wait for an empty tile of o: the first one after the products of a tile's first scores.
fn empty_outputs(kernel: &Kernel) -> Line {
    let (mut product, mut found) = (false, None);
    kernel.each_op(&mut |op| {
        product |= op.inst.name == "tcgen05.mma.ss";
        if product && op.inst.name == "mbarrier.try_wait" && found.is_none() {
            found = Some(Line::from(op.at));
        }
    });
    found.expect("a wait after the first scores")
}

fn findings(case: &Case, kernel: Kernel) -> Vec<Finding> {
    let sim = on("sm_100a", 1);
    let ran = case.run(&sim, kernel);
    let found = sim.findings();
    // A launch may fail because of a finding, and for no other reason.
    assert!(ran.is_ok() || !found.is_empty(), "nothing ran: {:?}", ran.err());
    found
}
