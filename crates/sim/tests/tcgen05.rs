//! Products into tensor memory: right against f64, clean in every order, and wrong in every way that tensor memory can be.

use crate::common::mutate::{
    change, drop, drop_all, drop_wait, drop_waits_at, find, line, only_one_lane, replace, unguarded,
};
use crate::common::{Gemm, INNER, seeds};
use fulgurite_kernels::gemm::tcgen05::{claiming_kernel, kernel};
use fulgurite_kernels::gemm::{GemmConfig, Layouts};
use fulgurite_ptx::device::{Device, Stream};
use fulgurite_ptx::inst::Arg;
use fulgurite_ptx::{Kernel, Major, Target, bf16, f16};
use fulgurite_sim::{Fault, Finding, Line, Options, Sim, TensorOrder};

const LAYOUTS: [Layouts; 4] = [
    INNER,
    Layouts { a: Major::Inner, b: Major::Outer },
    Layouts { a: Major::Outer, b: Major::Inner },
    Layouts { a: Major::Outer, b: Major::Outer },
];
const SMALL: GemmConfig = GemmConfig { rows: 128, cols: 128, depth: 2, cluster: 1, band: 4 };
/// Two CTAs that share products.
const PAIR: GemmConfig = GemmConfig { cluster: 2, ..SMALL };

fn target(name: &str) -> Target {
    Target::named(name).unwrap()
}

fn gemm([m, n, k]: [u32; 3], layouts: Layouts) -> Gemm {
    Gemm { m, n, k, batch: 1, layouts, config: SMALL, compare: true }
}

fn on(name: &str, seed: u64, tensor: TensorOrder) -> Sim {
    Sim::on(target(name), Options { seed, tensor, ..Options::default() })
}

fn complain(sim: &Sim) -> String {
    sim.findings().iter().map(|f| format!("{f}\n")).collect()
}

#[test]
fn products_are_those_of_f64() {
    for layouts in LAYOUTS {
        let more: &[[u32; 3]] = if layouts == INNER { &[[300, 136, 200], [1, 1, 1], [130, 8, 300]] } else { &[] };
        for &sizes in [[128, 128, 64], [100, 77, 129]].iter().chain(more) {
            let gemm = gemm(sizes, layouts);
            let sim = on("sm_100a", 1, TensorOrder::Strict);
            let (_, worst) = gemm
                .run::<bf16>(&sim, kernel::<bf16>(target("sm_100a"), layouts, SMALL).unwrap(), 2)
                .unwrap_or_else(|_| panic!("{gemm:?}: {}", complain(&sim)));
            assert!(worst <= 1.0, "{gemm:?}: {worst}");
        }
    }
    let usual = GemmConfig::default();
    let gemm = Gemm { batch: 3, config: usual, ..gemm([70, 300, 100], LAYOUTS[1]) };
    let sim = on("sm_103a", 2, TensorOrder::Strict);
    let kernel = kernel::<f16>(target("sm_103a"), LAYOUTS[1], usual).unwrap();
    let (_, worst) = gemm.run::<f16>(&sim, kernel, 2).unwrap_or_else(|_| panic!("{gemm:?}: {}", complain(&sim)));
    assert!(worst <= 1.0, "{gemm:?}: {worst}");
}

/// Two CTAs that share products: odd sizes, every layout, both types, tiles of both widths.
#[test]
fn pairs_are_right() {
    for (i, layouts) in LAYOUTS.into_iter().enumerate() {
        let more: &[[u32; 3]] = if layouts == INNER { &[[300, 136, 200], [1, 1, 1], [257, 8, 300]] } else { &[] };
        for &sizes in [[256, 128, 64], [200, 77, 129]].iter().chain(more) {
            let gemm = Gemm { config: PAIR, ..gemm(sizes, layouts) };
            let sim = on("sm_100a", i as u64, TensorOrder::Strict);
            let (_, worst) = gemm
                .run::<bf16>(&sim, kernel::<bf16>(target("sm_100a"), layouts, PAIR).unwrap(), 2)
                .unwrap_or_else(|_| panic!("{gemm:?}: {}", complain(&sim)));
            assert!(worst <= 1.0, "{gemm:?}: {worst}");
        }
    }
    let usual = GemmConfig { cluster: 2, ..GemmConfig::default() };
    let gemm = Gemm { batch: 3, config: usual, ..gemm([70, 300, 100], LAYOUTS[1]) };
    let sim = on("sm_103a", 2, TensorOrder::Queue);
    let kernel = kernel::<f16>(target("sm_103a"), LAYOUTS[1], usual).unwrap();
    let (_, worst) = gemm.run::<f16>(&sim, kernel, 2).unwrap_or_else(|_| panic!("{gemm:?}: {}", complain(&sim)));
    assert!(worst <= 1.0, "{gemm:?}: {worst}");
}

/// Three tiles of C, so that both accumulators are used and one of them again.
#[test]
fn clean_in_every_order() {
    for (config, layouts, few) in [(SMALL, INNER, 2), (SMALL, LAYOUTS[1], 10), (PAIR, INNER, 2), (PAIR, LAYOUTS[1], 10)]
    {
        let mut first = None;
        for seed in seeds().step_by(few) {
            let order = if seed % 4 == 0 { TensorOrder::Strict } else { TensorOrder::Queue };
            let gemm = Gemm { compare: false, config, ..gemm([config.cluster * 384, 128, 250], layouts) };
            let sim = on("sm_100a", seed, order);
            let (bits, _) = gemm
                .run::<bf16>(&sim, kernel::<bf16>(target("sm_100a"), layouts, config).unwrap(), 1)
                .unwrap_or_else(|_| panic!("seed {seed}: {}", complain(&sim)));
            assert_eq!(*first.get_or_insert_with(|| bits.clone()), bits, "seed {seed}");
        }
    }
}

/// Operands are read once from memory, and each step of a product reads its part of A and of B once.
#[test]
fn what_it_costs() {
    let [m, n, k] = [256, 256, 256];
    let gemm = Gemm { compare: false, ..gemm([m, n, k], INNER) };
    let sim = on("sm_100a", 0, TensorOrder::Queue);
    gemm.run::<bf16>(&sim, kernel::<bf16>(target("sm_100a"), INNER, SMALL).unwrap(), 4).unwrap();
    let counts = sim.report().total();
    assert_eq!(counts.tensor_flops["bf16"], 2 * u64::from(m * n * k));
    assert_eq!(counts.shared_operand_bytes, 4 * 2 * 128 * u64::from(k) * 2);
    assert_eq!(counts.tensor_memory_bytes, 4 * u64::from(m * n));
    assert_eq!(counts.global_bytes, 4 * 2 * 128 * u64::from(k) * 2 + 2 * u64::from(m * n));
}

/// A pair reads its first operands as often as single CTAs do, and its second operands half as often.
#[test]
fn what_pairs_save() {
    let sizes @ [m, n, k] = [512, 256, 256];
    let counts = [SMALL, PAIR].map(|config| {
        let gemm = Gemm { compare: false, config, ..gemm(sizes, INNER) };
        let sim = on("sm_100a", 0, TensorOrder::Queue);
        gemm.run::<bf16>(&sim, kernel::<bf16>(target("sm_100a"), INNER, config).unwrap(), 4 / config.cluster).unwrap();
        sim.report().total()
    });
    let left = counts.clone().map(|counts| counts.shared_operand_bytes - counts.shared_right_bytes);
    let right = counts.clone().map(|counts| counts.shared_right_bytes);
    let tiles = u64::from(m / 128 * (n / 128));
    assert_eq!(left, [tiles * 2 * 128 * u64::from(k); 2]);
    assert_eq!(right, [tiles * 2 * 128 * u64::from(k), tiles * 2 * 64 * u64::from(k)]);
    // B is also loaded once for both CTAs.
    let loaded = counts.clone().map(|counts| counts.global_bytes - 2 * u64::from(m * n));
    assert_eq!(loaded, [left[0] + right[0], left[1] + right[1]]);
    assert!(counts.iter().all(|counts| counts.tensor_flops["bf16"] == 2 * u64::from(m * n * k)));
}

/// A bug: what it is, the kernel that has it, what must be found, and lines that the finding must name.
pub struct Bug {
    pub name: &'static str,
    pub kernel: Kernel,
    pub fault: Fault,
    pub lines: Vec<Line>,
    /// What may be found instead, where the schedule decides.
    pub or: Option<(Fault, Line)>,
}

/// Four tiles of C for one CTA or one pair.
fn findings(kernel: Kernel, seed: u64, tensor: TensorOrder) -> Vec<Finding> {
    let sim = Sim::on(target("sm_100a"), Options { seed, tensor, budget: 3_000_000, ..Options::default() });
    let config = if kernel.cluster == 1 { SMALL } else { PAIR };
    let gemm = Gemm { compare: false, config, ..gemm([512 * config.cluster, 128, 320], LAYOUTS[1]) };
    let ran = gemm.run::<bf16>(&sim, kernel, 1);
    let found = sim.findings();
    // A launch may fail because of a finding, and for no other reason.
    assert!(ran.is_ok() || !found.is_empty(), "nothing ran: {:?}", ran.err());
    found
}

/// Runs each bug with three seeds; `findings` runs a kernel.
pub fn check(bugs: &[Bug], findings: impl Fn(Kernel, u64) -> Vec<Finding>) {
    check_seeds(bugs, 3, findings);
}

/// Runs each bug with some seeds.
pub fn check_seeds(bugs: &[Bug], seeds: u64, findings: impl Fn(Kernel, u64) -> Vec<Finding>) {
    let mut missed = Vec::new();
    for bug in bugs {
        for seed in 0..seeds {
            let found = findings(bug.kernel.clone(), seed);
            let instead = |f: &Finding| bug.or.is_some_and(|(fault, line)| f.fault == fault && f.names(line));
            let right = found
                .iter()
                .find(|f| f.fault == bug.fault && bug.lines.iter().all(|&line| f.names(line)) || instead(f));
            let all: String = found.iter().map(|f| format!("\n    {f}")).collect();
            match right {
                Some(f) if seed == 0 => println!("{}: {f}", bug.name),
                Some(_) => {}
                None => missed
                    .push(format!("{} (seed {seed}): wanted {:?} at {:?}, got{all}", bug.name, bug.fault, bug.lines)),
            }
        }
    }
    assert!(missed.is_empty(), "{} of {} bugs:\n{}", missed.len(), seeds as usize * bugs.len(), missed.join("\n"));
}

/// With other bits in the `n`-th constant that a product's operands are made of: the upper half of a descriptor.
fn other_descriptor(mut kernel: Kernel, f: fn(u64) -> u64) -> Kernel {
    fn walk(
        block: &mut [fulgurite_ptx::kernel::Stmt],
        f: fn(u64) -> u64,
        reg: Option<fulgurite_ptx::inst::Reg>,
    ) -> bool {
        use fulgurite_ptx::kernel::Stmt;
        block.iter_mut().any(|stmt| match stmt {
            Stmt::Op(op) if reg.is_some() && op.inst.name == "mov.b32" && op.args[0] == Arg::Reg(reg.unwrap()) => {
                let Arg::Imm(x) = &mut op.args[1] else { return false };
                *x = f(*x);
                true
            }
            Stmt::If { then, otherwise, .. } => walk(then, f, reg) || walk(otherwise, f, reg),
            Stmt::Loop { body, .. } => walk(body, f, reg),
            _ => false,
        })
    }
    let mut high = None;
    kernel.each_op(&mut |op| {
        if op.inst.name == "mov.join.b64" && high.is_none() {
            high = Some(op.list(1)[1]);
        }
    });
    assert!(walk(&mut kernel.body, f, high), "no constant of a descriptor");
    kernel
}

#[test]
fn planted_bugs_of_tensor_memory() {
    let k = || kernel::<bf16>(target("sm_100a"), LAYOUTS[1], SMALL).unwrap();
    let at = |row: &str, n: usize| line(&k(), row, n);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: None };
    let (load, product) = (at("tcgen05.ld", 0), at("tcgen05.mma.ss", 0));
    let fetch = at("cp.async.bulk.tensor.load", 0);
    let wait = |n: usize| at("mbarrier.try_wait", n);
    let address = |n| at("ld.shared.b32", n);
    let bugs = [
        // Lifetime.
        bug("never freed", drop(k(), "tcgen05.dealloc", 0), Fault::TensorMemory, &[at("tcgen05.alloc", 0)]),
        bug(
            "freed with another size",
            change(k(), "tcgen05.dealloc", 0, 1, |n| n / 2),
            Fault::TensorMemory,
            &[at("tcgen05.dealloc", 0)],
        ),
        bug(
            "allocated after the right was given up",
            swap_alloc(k()),
            Fault::TensorMemory,
            &[at("tcgen05.relinquish", 0)],
        ),
        bug(
            "the address is read too early",
            drop(k(), "bar.sync.all", 0),
            Fault::Race,
            &[address(0), at("tcgen05.alloc", 0)],
        ),
        bug("too few columns", change(k(), "tcgen05.alloc", 0, 1, |n| n / 2), Fault::OutOfBounds, &[product]),
        // Loads.
        bug("another warp's lanes", change(k(), "shl", shift(&k()), 2, |n| n + 1), Fault::TensorMemory, &[load]),
        bug("loaded by one lane", only_one_lane(k(), "tcgen05.ld", 0), Fault::Collective, &[load]),
        bug("loads not waited for", drop_all(k(), "tcgen05.wait.ld"), Fault::Race, &[load, product]),
        bug("loaded before the products are complete", drop_wait(k(), 0), Fault::Race, &[load, product]),
        bug("past the columns", change(k(), "tcgen05.ld", 0, 1, |n| n + 512), Fault::OutOfBounds, &[load]),
        // Products.
        bug("accumulators overwritten too early", drop_waits_at(k(), wait(2)), Fault::Race, &[load, product]),
        bug("operands not waited for", drop_waits_at(k(), wait(3)), Fault::Race, &[fetch, product]),
        bug(
            "operands given back before the products are complete",
            replace(k(), "tcgen05.commit", 0, "mbarrier.arrive", 1),
            Fault::Race,
            &[fetch, product],
        ),
        bug("operands never given back", drop(k(), "tcgen05.commit", 0), Fault::Deadlock, &[]),
        bug("products never committed", drop(k(), "tcgen05.commit", 1), Fault::Deadlock, &[]),
        // Descriptors.
        bug("no version in a descriptor", other_descriptor(k(), |x| x & !(1 << 14)), Fault::Operand, &[product]),
        bug("a swizzle that is none", other_descriptor(k(), |x| x | 1 << 29), Fault::Operand, &[product]),
    ];
    assert!(bugs.len() >= 15);
    check(&bugs, |kernel, seed| findings(kernel, seed, TensorOrder::Queue));
    check_seeds(&bugs, 1, |kernel, seed| findings(kernel, seed, TensorOrder::Strict));
    assert!(findings(k(), 0, TensorOrder::Strict).is_empty());
}

#[test]
fn planted_bugs_of_pairs() {
    let k = || kernel::<bf16>(target("sm_100a"), LAYOUTS[1], PAIR).unwrap();
    let at = |row: &str, n: usize| line(&k(), row, n);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: None };
    let (load, product) = (at("tcgen05.ld", 0), at("tcgen05.mma.ss", 0));
    let fetch = at("cp.async.bulk.tensor.load.pair", 0);
    let (expect, commit, free) =
        (at("mbarrier.arrive.expect_tx", 0), at("tcgen05.commit.multicast", 0), at("tcgen05.dealloc", 0));
    // In the order of the roles: full accumulators, empty stages, empty accumulators, full stages, the handshake.
    let wait = |n: usize| at("mbarrier.try_wait", n);
    let inits = {
        let mut n = 0;
        k().each_op(&mut |op| n += usize::from(op.inst.name == "mbarrier.init"));
        n
    };
    let halved = |k, row, n, i| change(k, row, n, i, |n| n / 2);
    let bugs = [
        // The leader sees the first of two phases that the answers complete, or misses both.
        Bug {
            or: Some((Fault::Deadlock, wait(2))),
            ..bug("arrivals not doubled", halved(k(), "mbarrier.init", inits - 1, 1), Fault::Race, &[load, product])
        },
        bug("bytes of one CTA expected", halved(k(), "mbarrier.arrive.expect_tx", 0, 1), Fault::ByteCount, &[expect]),
        bug(
            "bytes expected in both CTAs",
            unguarded(k(), "mbarrier.arrive.expect_tx"),
            Fault::TooManyArrivals,
            &[expect],
        ),
        bug("bytes counted in the wrong CTA", change(k(), "mapa", 1, 2, |_| 1), Fault::ByteCount, &[expect, wait(3)]),
        bug("answers to the wrong CTA", change(k(), "mapa", 0, 2, |_| 1), Fault::Deadlock, &[wait(2)]),
        bug(
            "a copy that counts in the other CTA without being of a pair",
            replace(k(), "cp.async.bulk.tensor.load.pair", 0, "cp.async.bulk.tensor.load", 5),
            Fault::Operand,
            &[fetch],
        ),
        bug("stages given back to the peer alone", change(k(), "mov.b16", 0, 1, |_| 2), Fault::Deadlock, &[wait(1)]),
        bug("stages given back to the leader alone", change(k(), "mov.b16", 0, 1, |_| 1), Fault::Deadlock, &[wait(1)]),
        bug("accumulators of the leader never full", change(k(), "mov.b16", 1, 1, |_| 2), Fault::Deadlock, &[wait(0)]),
        bug("a commit to a third CTA", change(k(), "mov.b16", 0, 1, |_| 7), Fault::Operand, &[commit]),
        bug("freed before the handshake", drop_wait(k(), 4), Fault::Race, &[load, free]),
        bug(
            "a CTA that ends while the other one still answers",
            drop(drop_wait(k(), 4), "tcgen05.dealloc", 0),
            Fault::Exit,
            &[at("mbarrier.arrive.peer", 0)],
        ),
        bug(
            "both CTAs start products",
            drop_waits_at(unguarded(k(), "tcgen05.mma.ss"), wait(3)),
            Fault::TensorMemory,
            &[product],
        ),
        bug(
            "a product of half of the rows",
            change(k(), "mov.b32", shape(&k()), 1, |x| x - (8 << 24)),
            Fault::Operand,
            &[product],
        ),
        bug("the right to allocate is given up first", swap_alloc(k()), Fault::TensorMemory, &[at("tcgen05.alloc", 0)]),
        bug("accumulators overwritten too early", drop_waits_at(k(), wait(2)), Fault::Race, &[load, product]),
        bug("operands not waited for", drop_waits_at(k(), wait(3)), Fault::Race, &[fetch, product]),
        bug("loads not waited for", drop_all(k(), "tcgen05.wait.ld"), Fault::Race, &[load, product]),
        bug(
            "a swizzle that the copies did not use",
            other_descriptor(k(), |x| x ^ 6 << 29),
            Fault::Layout,
            &[at("cp.async.bulk.tensor.load.pair", 1), product],
        ),
    ];
    check(&bugs, |kernel, seed| findings(kernel, seed, TensorOrder::Queue));
    check_seeds(&bugs, 1, |kernel, seed| findings(kernel, seed, TensorOrder::Strict));
    for tensor in [TensorOrder::Queue, TensorOrder::Strict] {
        assert!(findings(k(), 0, tensor).is_empty());
    }
}

/// Index of the constant that is the shape of a product.
fn shape(kernel: &Kernel) -> usize {
    let Arg::Reg(reg) = find(kernel, "tcgen05.mma.ss", 0).args[3] else { panic!("a shape that is no register") };
    let (mut n, mut found) = (0, None);
    kernel.each_op(&mut |op| {
        if op.inst.name == "mov.b32" {
            if op.args[0] == Arg::Reg(reg) {
                found.get_or_insert(n);
            }
            n += 1;
        }
    });
    found.expect("a shape")
}

/// CTAs that run take the tiles of those that have not started.
#[test]
fn tiles_that_are_claimed() {
    let k = |layouts| claiming_kernel::<bf16>(target("sm_100a"), layouts, SMALL).unwrap();
    for seed in 0..6 {
        let order = if seed % 2 == 0 { TensorOrder::Strict } else { TensorOrder::Queue };
        let (sim, gemm) = (on("sm_100a", seed, order), gemm([500, 200, 130], LAYOUTS[seed as usize % 4]));
        // A CTA for each tile.
        let (_, worst) =
            gemm.run::<bf16>(&sim, k(gemm.layouts), 1 << 16).unwrap_or_else(|_| panic!("{seed}: {}", complain(&sim)));
        assert!(worst <= 1.0, "{seed}: {worst}");
    }
    let k = || k(LAYOUTS[1]);
    let at = |row: &str, n: usize| line(&k(), row, n);
    let (ask, read) = (at("clusterlaunchcontrol.try_cancel", 0), at("clusterlaunchcontrol.query_cancel", 0));
    let wait = |n: usize| at("mbarrier.try_wait", n);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: None };
    let bugs = [
        bug("answers not waited for", drop_waits_at(k(), wait(1)), Fault::Race, &[ask, read]),
        bug("asked before all have read", drop_waits_at(k(), wait(2)), Fault::Race, &[ask, read]),
    ];
    let findings = |kernel: Kernel, seed| {
        let sim = on("sm_100a", seed, TensorOrder::Queue);
        let gemm = Gemm { compare: false, ..gemm([512, 256, 64], LAYOUTS[1]) };
        let _ = gemm.run::<bf16>(&sim, kernel, 1 << 16);
        sim.findings()
    };
    check(&bugs, findings);
    // A thread that asks once more after it saw that there is no work.
    let greedy = Kernel::build("greedy", target("sm_100a"), |k| {
        let claims = k.claims("tiles");
        k.role("all", fulgurite_ptx::Warps(1), |w| {
            for _ in 0..2 {
                w.elected(|t| claims.ask(t));
                claims.take(w);
            }
        });
    })
    .unwrap();
    let [ask, read] =
        ["try_cancel", "query_cancel"].map(|row| line(&greedy, &format!("clusterlaunchcontrol.{row}"), 0));
    let sim = on("sm_100a", 0, TensorOrder::Queue);
    let module = sim.load(std::sync::Arc::new(greedy)).unwrap();
    let _ = sim.launch(&module, [1, 1, 1], &[], Stream::default());
    let _ = sim.synchronize(Stream::default());
    let found = sim.findings();
    assert!(found.iter().any(|f| f.fault == Fault::Operand && f.names(ask) && f.names(read)), "{found:?}");
}

/// Which shift puts the warp's number into the lane field.
fn shift(kernel: &Kernel) -> usize {
    let (mut n, mut found) = (0, None);
    kernel.each_op(&mut |op| {
        if op.inst.name == "shl" {
            if op.args[2] == Arg::Imm(21) {
                found.get_or_insert(n);
            }
            n += 1;
        }
    });
    found.expect("a lane field")
}

/// The kernel with its first two operations on tensor memory exchanged.
fn swap_alloc(mut kernel: Kernel) -> Kernel {
    use fulgurite_ptx::kernel::Stmt;
    fn walk(block: &mut [Stmt]) -> bool {
        let is = |stmt: &Stmt, row: &str| matches!(stmt, Stmt::Op(op) if op.inst.name == row);
        if let Some(i) = block.iter().position(|stmt| is(stmt, "tcgen05.alloc")) {
            block.swap(i, i + 1);
            return true;
        }
        block.iter_mut().any(|stmt| match stmt {
            Stmt::If { then, .. } => walk(then),
            _ => false,
        })
    }
    assert!(walk(&mut kernel.body));
    kernel
}
