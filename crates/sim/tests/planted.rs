//! Every planted bug is found, as what it is and with the lines of both sides; none by a limit on steps.

use crate::common::attention::{self, Case};
use crate::common::mutate::{
    change, change_at, drop, drop_at, drop_wait, drop_waits_at, find, flip_parity, freeze_parity, line, only_one_lane,
    replace,
};
use crate::common::{Gemm, INNER, SMALL, pipeline};
use fulgurite_kernels::gemm::GemmConfig;
use fulgurite_ptx::inst::Arg;
use fulgurite_ptx::{Kernel, bf16};
use fulgurite_sim::{Fault, Finding, Line, Options, Sim};

/// A bug: what it is, the kernel that has it, what must be found, and lines that the finding must name.
struct Bug {
    name: &'static str,
    kernel: Kernel,
    fault: Fault,
    lines: Vec<Line>,
    /// What else may be found instead: which of several consequences comes first is up to the order.
    or: &'static [Fault],
}

/// Instructions after which a wrong kernel would count as endless; none must.
const BUDGET: u64 = 3_000_000;

fn findings(run: impl Fn(&Sim), seed: u64) -> Vec<Finding> {
    let sim = Sim::new(Options { seed, budget: BUDGET, ..Options::default() });
    run(&sim);
    sim.findings()
}

fn check(bugs: Vec<Bug>, run: impl Fn(&Sim, Kernel)) {
    let mut missed = Vec::new();
    for bug in &bugs {
        // The detector does not depend on luck with the order.
        for seed in 0..3 {
            let found = findings(|sim| run(sim, bug.kernel.clone()), seed);
            let right = found.iter().find(|f| {
                f.fault == bug.fault && bug.lines.iter().all(|&line| f.names(line)) || bug.or.contains(&f.fault)
            });
            let all: String = found.iter().map(|f| format!("\n    {f}")).collect();
            match right {
                Some(f) if seed == 0 => println!("{}: {f}", bug.name),
                Some(_) => {}
                None => missed
                    .push(format!("{} (seed {seed}): wanted {:?} at {:?}, got{all}", bug.name, bug.fault, bug.lines)),
            }
        }
    }
    assert!(missed.is_empty(), "{} of {} bugs:\n{}", missed.len(), bugs.len(), missed.join("\n"));
}

fn gemm(cluster: u32) -> Gemm {
    let config = GemmConfig { cluster, ..SMALL };
    Gemm { m: 128 * cluster, n: 256, k: 320, batch: 1, layouts: INNER, config, compare: false }
}

fn run_gemm(cluster: u32) -> impl Fn(&Sim, Kernel) {
    move |sim, kernel| {
        let _ = gemm(cluster).run::<bf16>(sim, kernel, 1);
    }
}

#[test]
fn in_the_gemm() {
    let k = || gemm(1).kernel::<bf16>();
    let at = |row: &str, n: usize| line(&k(), row, n);
    let (store, write) = (at("cp.async.bulk.tensor.store", 0), at("stmatrix", 0));
    let (load, product) = (at("cp.async.bulk.tensor.load", 0), at("wgmma.ss", 0));
    let (put, take, onto) = (at("mbarrier.try_wait", 0), at("mbarrier.try_wait", 1), at("wgmma.ss", 4));
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let expect = at("mbarrier.arrive.expect_tx", 0);
    let bugs = vec![
        bug("no proxy fence before the store", drop(k(), "fence.proxy.async", 0), Fault::ProxyRace, &[store, write]),
        bug("no barrier before the staging is written", drop(k(), "bar.sync", 0), Fault::Race, &[store, write]),
        bug("no barrier before the staging is stored", drop(k(), "bar.sync", 1), Fault::Race, &[store, write]),
        bug("staging not waited for", drop(k(), "cp.async.bulk.wait_group.read", 1), Fault::Race, &[store, write]),
        bug(
            "staging waited for too weakly",
            change(k(), "cp.async.bulk.wait_group.read", 0, 0, |n| n + 1),
            Fault::Race,
            &[store, write],
        ),
        bug("stores not waited for at the end", drop(k(), "cp.async.bulk.wait_group", 0), Fault::Exit, &[store]),
        bug("stores not committed", drop(k(), "cp.async.bulk.commit_group", 1), Fault::Exit, &[store]),
        bug("accumulators read too soon", drop(k(), "wgmma.wait_group", 1), Fault::FragmentInFlight, &[write, onto]),
        bug(
            "stage given back before its product is done",
            change(k(), "wgmma.wait_group", 0, 0, |n| n + 1),
            Fault::Race,
            &[load, product],
        ),
        bug("stage given back with no wait", drop(k(), "wgmma.wait_group", 0), Fault::Race, &[load, product]),
        bug("no wgmma.fence", drop(k(), "wgmma.fence", 0), Fault::MissingProductFence, &[product]),
        bug("products not committed", drop(k(), "wgmma.commit_group", 1), Fault::FragmentInFlight, &[write, onto]),
        bug(
            "too many bytes expected",
            change(k(), "mbarrier.arrive.expect_tx", 0, 1, |n| n + 16),
            Fault::ByteCount,
            &[expect, take],
        ),
        bug(
            "too few bytes expected",
            change(k(), "mbarrier.arrive.expect_tx", 0, 1, |n| n - 16),
            Fault::ByteCount,
            &[expect],
        ),
        bug(
            "half of the bytes expected",
            change(k(), "mbarrier.arrive.expect_tx", 0, 1, |n| n / 2),
            Fault::ByteCount,
            &[expect, load],
        ),
        bug(
            "no bytes expected",
            replace(k(), "mbarrier.arrive.expect_tx", 0, "mbarrier.arrive", 1),
            Fault::ByteCount,
            &[load],
        ),
        bug("full barrier counts two", change(k(), "mbarrier.init", 0, 1, |n| n + 1), Fault::Deadlock, &[take, put]),
        Bug {
            or: &[Fault::PhaseMissed],
            ..bug(
                "empty barrier counts half",
                change(k(), "mbarrier.init", 2, 1, |n| n / 2),
                Fault::Race,
                &[load, product],
            )
        },
        bug("empty barrier counts one more", change(k(), "mbarrier.init", 2, 1, |n| n + 1), Fault::Deadlock, &[put]),
        bug(
            "empty barrier counts one less",
            change(k(), "mbarrier.init", 2, 1, |n| n - 1),
            Fault::BarrierCount,
            &[at("mbarrier.arrive", 0)],
        ),
        bug("filler begins with the wrong parity", flip_parity(k(), 0), Fault::Deadlock, &[put, take]),
        bug("taker begins with the wrong parity", flip_parity(k(), 1), Fault::Race, &[load, product]),
        bug("parity not flipped on the wrap", freeze_parity(k(), 1), Fault::Race, &[load, onto]),
        bug("filler does not wait", drop_wait(k(), 0), Fault::Race, &[load]),
        bug("taker does not wait", drop_wait(k(), 1), Fault::Race, &[load, product]),
        bug("stage never given back", drop(k(), "mbarrier.arrive", 0), Fault::Deadlock, &[put]),
        bug("barriers not fenced", drop(k(), "fence.mbarrier_init", 0), Fault::BarrierNotReady, &[load]),
        bug("nobody waits for the barriers", drop(k(), "bar.sync.all", 0), Fault::BarrierNotReady, &[take]),
        bug(
            "registers beyond the pool",
            change(k(), "setmaxnreg", 1, 1, |n| n + 16),
            Fault::Registers,
            &[at("setmaxnreg", 1)],
        ),
        bug(
            "barrier for too many threads",
            change(k(), "bar.sync", 1, 1, |n| 2 * n),
            Fault::Deadlock,
            &[at("bar.sync", 1)],
        ),
        bug("barrier reached by one lane", only_one_lane(k(), "bar.sync", 0), Fault::Collective, &[at("bar.sync", 0)]),
        bug("product reached by one lane", only_one_lane(k(), "wgmma.ss", 0), Fault::Collective, &[product]),
        bug(
            "a store beyond shared memory",
            change(k(), "stmatrix", 0, 0, |n| n + (1 << 20)),
            Fault::OutOfBounds,
            &[write],
        ),
        bug("sum onto nothing", change(k(), "wgmma.ss", 0, 3, |_| 1), Fault::UninitialisedRegister, &[product]),
        bug("swizzle of the tensor differs", other_swizzle(k()), Fault::Layout, &[load, product]),
    ];
    assert!(bugs.len() >= 24);
    check(bugs, run_gemm(1));
}

/// The tensor map of A leaves its tile as it is, and the products expect it swizzled.
fn other_swizzle(mut kernel: Kernel) -> Kernel {
    if let fulgurite_ptx::kernel::ParamKind::Tensor(shape) = &mut kernel.params[0].kind {
        shape.swizzle = fulgurite_ptx::Swizzle::None;
    }
    kernel
}

#[test]
fn in_the_gemm_of_clusters() {
    let k = || gemm(2).kernel::<bf16>();
    let at = |row: &str, n: usize| line(&k(), row, n);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let multicast = at("cp.async.bulk.tensor.load.multicast", 0);
    let without_last_meeting = || {
        let mut kernel = k();
        for n in [2, 1] {
            kernel = drop(drop(kernel, "barrier.cluster.arrive", n), "barrier.cluster.wait", n);
        }
        kernel
    };
    let Arg::Reg(mask) = find(&k(), "cp.async.bulk.tensor.load.multicast", 0).args[4] else { panic!("no mask") };
    let mask_at = (0..).find(|&n| find(&k(), "mov.b16", n).args[0] == Arg::Reg(mask)).unwrap();
    let bugs = vec![
        bug("blocks end without meeting", without_last_meeting(), Fault::Exit, &[]),
        bug(
            "blocks begin without meeting",
            drop(drop(k(), "barrier.cluster.arrive", 0), "barrier.cluster.wait", 0),
            Fault::BarrierNotReady,
            &[multicast],
        ),
        bug("relaxed meeting at the beginning", relaxed(k()), Fault::BarrierNotReady, &[at("mbarrier.init", 0)]),
        bug(
            "one block is left out of the multicast",
            change(k(), "mov.b16", mask_at, 1, |_| 1),
            Fault::ByteCount,
            &[at("mbarrier.arrive.expect_tx", 0)],
        ),
        bug(
            "a wait with no arrival",
            drop(k(), "barrier.cluster.arrive", 1),
            Fault::Collective,
            &[at("barrier.cluster.wait", 1)],
        ),
        bug(
            "stage given back to nobody",
            drop(k(), "mbarrier.arrive.cluster.relaxed", 0),
            Fault::Deadlock,
            &[at("mbarrier.try_wait", 0)],
        ),
        bug(
            "stage given back before its product is done",
            drop(k(), "wgmma.wait_group", 0),
            Fault::Race,
            &[at("wgmma.ss", 0)],
        ),
    ];
    check(bugs, run_gemm(2));
}

/// The cluster meets at the beginning, and passes nothing on.
fn relaxed(mut kernel: Kernel) -> Kernel {
    let mut first = true;
    for stmt in &mut kernel.body {
        if let fulgurite_ptx::kernel::Stmt::Op(op) = stmt
            && op.inst.name == "barrier.cluster.arrive"
            && std::mem::take(&mut first)
        {
            op.args[0] = Arg::Word("relaxed");
        }
    }
    kernel
}

#[test]
fn in_the_pipeline() {
    let k = pipeline::kernel;
    let at = |row: &str, n: usize| line(&k(), row, n);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let (write_p, write_o) = (at("stmatrix", 0), at("stmatrix", 4));
    let (scores, output) = (at("wgmma.ss", 0), at("wgmma.ss", 4));
    let (load_q, load_k, load_v) =
        (at("cp.async.bulk.tensor.load", 0), at("cp.async.bulk.tensor.load", 1), at("cp.async.bulk.tensor.load", 2));
    let store = at("cp.async.bulk.tensor.store", 0);
    let exp = at("ex2.f32", 0);
    let bugs = vec![
        bug("P not published", drop(k(), "fence.proxy.async", 0), Fault::ProxyRace, &[write_p, output]),
        bug("P read before all warps wrote it", drop(k(), "bar.sync", 0), Fault::Race, &[write_p, output]),
        bug(
            "P overwritten while it is read",
            drop(drop(k(), "wgmma.wait_group", 1), "wgmma.wait_group", 0),
            Fault::Race,
            &[write_p, output],
        ),
        bug("S read too soon", drop(k(), "wgmma.wait_group", 0), Fault::FragmentInFlight, &[exp, scores]),
        bug("V given back too soon", drop(k(), "wgmma.wait_group", 1), Fault::Race, &[load_v, output]),
        bug("O read too soon", drop(k(), "wgmma.wait_group", 1), Fault::FragmentInFlight, &[write_o, output]),
        bug("Q not waited for", drop_wait(k(), 3), Fault::Race, &[load_q, scores]),
        bug("K not waited for", drop_wait(k(), 4), Fault::Race, &[load_k, scores]),
        bug("V not waited for", drop_wait(k(), 5), Fault::Race, &[load_v, output]),
        Bug {
            or: &[Fault::TooManyArrivals],
            ..bug("K filled before it is empty", drop_wait(k(), 1), Fault::Race, &[load_k, scores])
        },
        bug("O not published", drop(k(), "fence.proxy.async", 1), Fault::ProxyRace, &[write_o, store]),
        bug("O stored before all warps wrote it", drop(k(), "bar.sync", 1), Fault::Race, &[write_o, store]),
        bug("O not waited for", drop(k(), "cp.async.bulk.wait_group", 0), Fault::Exit, &[store]),
        bug("V released by nobody", drop(k(), "mbarrier.arrive", 1), Fault::Deadlock, &[at("mbarrier.try_wait", 2)]),
        bug("no fence before the scores", drop(k(), "wgmma.fence", 0), Fault::MissingProductFence, &[scores]),
        bug(
            "sums stored beyond the array",
            change(k(), "st.global.f32", 1, 0, |n| n + 4096),
            Fault::OutOfBounds,
            &[at("st.global.f32", 1)],
        ),
    ];
    check(bugs, |sim, kernel| {
        let _ = pipeline::run(sim, kernel, 1, 5);
    });
}

/// The forward kernel itself: two tiles of queries in one block, and more blocks of keys than a ring has slots.
#[test]
fn in_forward_attention() {
    let two_stages = Some("groups=2 cols=128 depth=2 end=joined registers=232:40 early=0");
    let case = Case { k_len: 420, config: two_stages, ..attention::BASE };
    let k = || case.kernel();
    let at = |row: &str, n: usize| line(&k(), row, n);
    // The first use of a row after the first wait that leaves a product running: what a step does once it has its scores.
    let in_step = |row: &str| {
        let (mut waited, mut found) = (false, None);
        k().each_op(&mut |op| {
            let waits = op.inst.name == "wgmma.wait_group" && op.args[0] == Arg::Imm(1);
            waited |= waits;
            if waited && op.inst.name == row && found.is_none() {
                found = Some(Line::from(op.at));
            }
        });
        found.unwrap_or_else(|| panic!("no {row} in a step"))
    };
    let load = |n: usize| at("cp.async.bulk.tensor.load", n);
    let (load_k, load_q, load_v) = (load(0), load(1), load(4));
    let expects = |n: usize| at("mbarrier.arrive.expect_tx", n);
    let (scores, output) = (at("wgmma.ss", 0), at("wgmma.rs", 0));
    let (write, store) = (at("stmatrix", 0), at("cp.async.bulk.tensor.store", 0));
    let (wait, release) = (in_step("wgmma.wait_group"), in_step("mbarrier.arrive"));
    // Waits in `compute`, in its order: for the ticket, Q, K.
    let takes = |n: usize| {
        let first = (0..).position(|n| at("mbarrier.try_wait", n) == at("ld.shared.b32", 0)).unwrap_or(0);
        at("mbarrier.try_wait", first + n)
    };
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let last_bar = at("bar.sync", count(&k(), "bar.sync") - 1);
    let bugs = vec![
        bug(
            "O not published",
            drop_at(k(), "fence.proxy.async", at("fence.proxy.async", 0)),
            Fault::ProxyRace,
            &[write, store],
        ),
        bug("O stored before all warps wrote it", drop_at(k(), "bar.sync", last_bar), Fault::Race, &[write, store]),
        bug(
            "O's staging not waited for",
            drop_at(k(), "cp.async.bulk.wait_group.read", at("cp.async.bulk.wait_group.read", 0)),
            Fault::Race,
            &[write, store],
        ),
        bug("O not waited for at the end", drop(k(), "cp.async.bulk.wait_group", 0), Fault::Exit, &[store]),
        bug("no fence before the scores", drop_at(k(), "wgmma.fence", scores), Fault::MissingProductFence, &[scores]),
        bug("no fence before P V", drop_at(k(), "wgmma.fence", output), Fault::MissingProductFence, &[output]),
        bug(
            "scores read too soon",
            change_at(k(), "wgmma.wait_group", wait, 0, |n| n + 1),
            Fault::FragmentInFlight,
            &[scores],
        ),
        bug("K given back before it is read", drop_at(k(), "wgmma.wait_group", wait), Fault::Race, &[load_k, scores]),
        bug("K never given back", drop_at(k(), "mbarrier.arrive", release), Fault::Deadlock, &[expects(0)]),
        bug("K filled before it is empty", drop_waits_at(k(), expects(0)), Fault::Race, &[load_k]),
        bug("V filled before it is empty", drop_waits_at(k(), expects(3)), Fault::Race, &[load_v, output]),
        bug("Q not waited for", drop_waits_at(k(), takes(1)), Fault::Race, &[load_q, scores]),
        bug("K not waited for", drop_waits_at(k(), takes(2)), Fault::Race, &[load_k, scores]),
        bug(
            "K's bytes off",
            change_at(k(), "mbarrier.arrive.expect_tx", expects(0), 1, |n| n + 16),
            Fault::ByteCount,
            &[expects(0)],
        ),
        bug(
            "K's empty barrier counts half",
            change(k(), "mbarrier.init", 6, 1, |n| n / 2),
            Fault::Race,
            &[load_k, scores],
        ),
    ];
    check(bugs, |sim, kernel| {
        let _ = case.run(sim, kernel);
    });
}

/// Uses of a row.
fn count(kernel: &Kernel, row: &str) -> usize {
    let mut uses = 0;
    kernel.each_op(&mut |op| uses += usize::from(op.inst.name == row));
    uses
}
