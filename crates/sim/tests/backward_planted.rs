//! Planted bugs in the kernels of the gradients: every one is found as what it is, with the lines of both sides.

use crate::common::backward::Case;
use crate::common::mutate::{change, drop, drop_at, drop_loops_at, drop_wait, drop_waits_at, line, replace};
use fulgurite_core::DType;
use fulgurite_kernels::attention::backward::plan::Kernels;
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_ptx::{Kernel, Target};
use fulgurite_sim::{Fault, Line, Options, Sim};
use std::sync::Arc;

/// Instructions after which a wrong kernel would count as endless; none must.
const BUDGET: u64 = 3_000_000;

struct Bug {
    name: &'static str,
    kernel: Kernel,
    fault: Fault,
    lines: Vec<Line>,
    /// What else may be found first.
    or: &'static [Fault],
}

fn case(blocks: u32) -> Case {
    Case { dims: [128, 128], q_len: 330, k_len: 300, heads: [1, 1], blocks, ..Case::base() }
}

/// The same, where threads add d_q themselves.
fn by_threads(blocks: u32) -> Case {
    Case { config: Some(BackwardConfig::hopper(128).of_threads(128)), ..case(blocks) }
}

fn check(bugs: Vec<Bug>, case: &Case, kernels: &Kernels, with: impl Fn(&Kernels, Arc<Kernel>) -> Kernels) {
    let mut missed = Vec::new();
    for bug in &bugs {
        for seed in 0..2 {
            let sim = Sim::new(Options { seed, budget: BUDGET, ..Options::default() });
            let _ = case.run(&sim, &with(kernels, Arc::new(bug.kernel.clone())));
            let found = sim.findings();
            let right = found.iter().any(|f| {
                f.fault == bug.fault && bug.lines.iter().all(|&line| f.names(line)) || bug.or.contains(&f.fault)
            });
            if !right {
                let all: String = found.iter().map(|f| format!("\n    {f}")).collect();
                missed.push(format!("{} (seed {seed}): wanted {:?} at {:?}, got{all}", bug.name, bug.fault, bug.lines));
            }
        }
    }
    assert!(missed.is_empty(), "{} of {} bugs:\n{}", missed.len(), bugs.len(), missed.join("\n"));
}

/// The lines of a file that use a row, in the order of the text.
fn lines_of(kernel: &Kernel, row: &str, file: &str) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    kernel.each_op(&mut |op| {
        let at = Line::from(op.at);
        if op.inst.name == row && at.to_string().contains(file) && !lines.contains(&at) {
            lines.push(at);
        }
    });
    lines
}

/// The one of them whose text has this in it.
fn line_with(kernel: &Kernel, row: &str, file: &str, text: &str) -> Line {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let has = |at: &Line| {
        let source = std::fs::read_to_string(root.join(at.file)).unwrap();
        source.lines().nth(at.line as usize - 1).unwrap().contains(text)
    };
    let found: Vec<Line> = lines_of(kernel, row, file).into_iter().filter(has).collect();
    let [line] = found[..] else { panic!("{row} of {file} with `{text}`: {found:?}") };
    line
}

#[test]
fn in_the_gradients() {
    let case = by_threads(1);
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let k = || Kernel::clone(&kernels.main);
    let at = |row: &str, n: usize| line(&k(), row, n);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let (load_d_o, load_q, load_k) =
        (at("cp.async.bulk.tensor.load", 0), at("cp.async.bulk.tensor.load", 2), at("cp.async.bulk.tensor.load", 6));
    let (scores, products) = (at("wgmma.ss", 0), at("wgmma.ss", 8));
    let (query_sums, onto) = (at("wgmma.ss", 16), at("wgmma.rs", 0));
    let (write, add) = (at("stmatrix", 0), at("red.add.f32", 0));
    let (write_d_v, store_d_v) = (at("stmatrix", 4), at("cp.async.bulk.tensor.store", 0));
    let bugs = vec![
        bug("d_z not published", drop(k(), "fence.proxy.async", 0), Fault::ProxyRace, &[write, query_sums]),
        bug("d_z read before both warpgroups wrote it", drop(k(), "bar.sync", 0), Fault::Race, &[write, query_sums]),
        bug("s read too soon", change(k(), "wgmma.wait_group", 0, 0, |_| 2), Fault::FragmentInFlight, &[scores]),
        bug("d_p read too soon", drop(k(), "wgmma.wait_group", 1), Fault::FragmentInFlight, &[products]),
        bug("d_q added too soon", drop(k(), "wgmma.wait_group", 2), Fault::FragmentInFlight, &[add, query_sums]),
        Bug {
            or: &[Fault::FragmentInFlight],
            ..bug(
                "d_o given back before its product is done",
                change(k(), "wgmma.wait_group", 3, 0, |_| 2),
                Fault::Race,
                &[load_d_o, onto],
            )
        },
        bug("q not waited for", drop_wait(k(), 9), Fault::Race, &[load_q, scores]),
        bug("d_o not waited for", drop_wait(k(), 10), Fault::Race, &[load_d_o, products]),
        bug("keys not waited for", drop_wait(k(), 8), Fault::Race, &[load_k, scores]),
        Bug {
            or: &[Fault::TooManyArrivals, Fault::PhaseMissed],
            ..bug("q filled before it is empty", drop_wait(k(), 1), Fault::Race, &[load_q])
        },
        bug("q never given back", drop(k(), "mbarrier.arrive", 2), Fault::Deadlock, &[at("mbarrier.try_wait", 1)]),
        bug("d_k written over K that is read", drop(k(), "bar.sync", 1), Fault::Race, &[]),
        bug("d_v not published", drop(k(), "fence.proxy.async", 1), Fault::ProxyRace, &[write_d_v, store_d_v]),
        bug("K loaded over d_k that leaves", drop(k(), "cp.async.bulk.wait_group.read", 0), Fault::Race, &[load_k]),
        bug("sums beyond the end", change(k(), "red.add.f32", 0, 0, |n| n + (1 << 24)), Fault::OutOfBounds, &[add]),
    ];
    assert!(bugs.len() >= 15);
    check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });
}

#[test]
fn in_what_comes_before() {
    let case = by_threads(1);
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let k = || Kernel::clone(&kernels.prepare);
    let add = line(&kernels.main, "red.add.f32", 0);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let bugs = vec![
        bug("sums not zeroed", drop(k(), "st.global.f32", 0), Fault::Uninitialised, &[add]),
        bug("no LSE of a row", drop(k(), "st.global.f32", 2), Fault::Uninitialised, &[]),
        bug("no delta of a row", drop(k(), "st.global.f32", 3), Fault::Uninitialised, &[]),
        bug("counter not zeroed", drop(k(), "st.global.b32", 0), Fault::Uninitialised, &[]),
    ];
    check(bugs, &case, &kernels, |kernels, prepare| Kernels { prepare, ..kernels.clone() });
}

/// Blocks that add to the same sums: one that writes instead takes what others have added.
#[test]
fn in_the_sums_of_two_blocks() {
    let case = by_threads(2);
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let k = || Kernel::clone(&kernels.main);
    let add = line(&k(), "red.add.f32", 0);
    let bugs = vec![Bug {
        name: "sums written instead of added to",
        kernel: replace(k(), "red.add.f32", 0, "st.global.f32", 3),
        fault: Fault::Race,
        lines: vec![add],
        or: &[],
    }];
    check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });
}

/// What TMA adds, and results that leave through the same places.
#[test]
fn in_what_the_copy_engine_adds() {
    let case = case(1);
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let k = || Kernel::clone(&kernels.main);
    let lines = |row: &str, file: &str| lines_of(&k(), row, file);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let waits = lines("mbarrier.try_wait", "schedules/bulk.rs");
    let [.., open, previous, send, _last, place_of_d_k, _end] = waits[..] else { panic!("{waits:?}") };
    let keep = line(&k(), "cp.reduce.async.bulk", 0);
    let reads = lines("cp.async.bulk.wait_group.read", "schedules/bulk.rs");
    let [have_left] = reads[..] else { panic!("{reads:?}") };
    let (write, store) = (line(&k(), "stmatrix", 0), line(&k(), "cp.async.bulk.tensor.store", 0));
    let [_s, _d_p, query_sums] = lines("wgmma.ss", "schedules/bulk.rs")[..] else { panic!("three products") };
    let [publish, ..] = lines("fence.proxy.async", "schedules/bulk.rs")[..] else { panic!("nothing is published") };
    let given_back = lines("mbarrier.arrive", "schedules/bulk.rs");
    let done = given_back[given_back.iter().position(|&at| at == send).unwrap() - 1];
    let bugs = vec![
        bug("d_q written over one that is not read", drop_waits_at(k(), send), Fault::Race, &[send, keep]),
        bug("d_q not published", drop_at(k(), "fence.proxy.async", send), Fault::ProxyRace, &[send, keep]),
        bug("d_k written over d_q", drop_waits_at(k(), place_of_d_k), Fault::Race, &[keep]),
        bug(
            "d_v written over d_k that leaves",
            drop_at(k(), "cp.async.bulk.wait_group.read", have_left),
            Fault::Race,
            &[store],
        ),
        bug("nobody is told that d_q is there", drop_at(k(), "mbarrier.arrive", send), Fault::Deadlock, &[keep]),
        bug(
            "d_z read before both warpgroups wrote it",
            drop_waits_at(k(), previous),
            Fault::Race,
            &[write, query_sums],
        ),
        bug("d_z written over one that is read", drop_waits_at(k(), open), Fault::Race, &[write, query_sums]),
        bug("d_z not published", drop_at(k(), "fence.proxy.async", publish), Fault::ProxyRace, &[write, query_sums]),
        bug("nobody is told that d_z is there", drop_at(k(), "mbarrier.arrive", publish), Fault::Deadlock, &[previous]),
        bug("d_z never given back", drop_at(k(), "mbarrier.arrive", done), Fault::Deadlock, &[open]),
        bug("a turn not passed on", drop(k(), "bar.arrive", 1), Fault::Deadlock, &[]),
    ];
    check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });
}

/// What two blocks give each other.
#[test]
fn in_pairs_of_blocks() {
    // Nine tiles for two pairs: tickets are told in the place of others that were heard.
    let case = Case { dims: [256, 256], q_len: 100, k_len: 1100, blocks: 4, ..case(4) };
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let k = || Kernel::clone(&kernels.main);
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let wait = |text| line_with(&k(), "mbarrier.try_wait", "schedules/pairs.rs", text);
    let (d_o, open, both) =
        (wait("let d_o = outputs.take(w)[0]"), wait("write_fragment(peer.open"), wait("self.d_z.wait(w)"));
    let (given, keys) = (wait("channel.wait(w)"), wait("between.d_z.open(w);"));
    let give = wait("self.between.p.give(w, s)");
    // After that of the results, which the first role has too.
    let publish = *lines_of(&k(), "fence.proxy.async", "schedules/pairs.rs").last().expect("d_z is published");
    let told = line_with(&k(), "mbarrier.try_wait", "load.rs", "pair.ticket.share(t, ticket)");
    let found = line_with(&k(), "mbarrier.try_wait", "load.rs", "pair.found.post(t, [");
    let send = line(&k(), "cp.async.bulk.peer", 0);
    let bugs = vec![
        bug("d_z of the other block read before it is there", drop_waits_at(k(), both), Fault::Race, &[send]),
        bug("d_z written over one that is still read", drop_waits_at(k(), open), Fault::Race, &[]),
        bug("d_z not published", drop_at(k(), "fence.proxy.async", publish), Fault::ProxyRace, &[send]),
        bug("d_z not sent", drop(k(), "cp.async.bulk.peer", 0), Fault::Deadlock, &[both]),
        bug("d_o not waited for", drop_waits_at(k(), d_o), Fault::Race, &[]),
        Bug {
            or: &[Fault::Uninitialised],
            ..bug("p read before it is given", drop_waits_at(k(), given), Fault::Race, &[give])
        },
        bug("p given over one that is not read", drop_waits_at(k(), give), Fault::Race, &[give]),
        bug("p never given", drop_at(k(), "mbarrier.arrive", give), Fault::Deadlock, &[given]),
        bug("d_k written over keys that are read", drop_waits_at(k(), keys), Fault::Race, &[]),
        bug("a tile found over one that is not loaded", drop_waits_at(k(), found), Fault::Race, &[found]),
        Bug {
            or: &[Fault::Uninitialised],
            ..bug("a ticket neither waited for nor heard", drop_waits_at(k(), told), Fault::Race, &[told])
        },
    ];
    check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });
}

/// Sums whose places are used again, and who may read, zero and add to them when.
#[test]
fn in_what_is_rounded() {
    // Eight pairs of a tile each, in the places of two, by three blocks; parts of more than is read at once.
    let case = |dims: [usize; 2]| {
        let case = Case { dims, q_len: 400, k_len: 100, heads: [8, 8], blocks: 3, ..Case::base() };
        let config = BackwardConfig { sums: Some(2), ..case.plan().config() };
        Case { config: Some(config), ..case }
    };
    for case in [case([128, 128]), case([64, 64])] {
        let kernels = case.plan().kernels(Target::HOPPER).unwrap();
        let k = || Kernel::clone(&kernels.main);
        let lines = |row: &str, file: &str| lines_of(&k(), row, file);
        let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
        let adds = line(&k(), "cp.reduce.async.bulk", 0);
        let (reads, zeros) = (lines("ld.global.f32", "finish.rs"), lines("st.global.f32", "d_q/round.rs"));
        // The part that comes with a tile, and the place of the tile's pair; the rest waits at the end.
        let look = |text| line_with(&k(), "ld.acquire", "d_q/round.rs", text);
        let (part, place) = (look("self.added(part.pair).wait_for"), look("self.rounded.wait_for"));
        let barriers = lines("bar.sync", "d_q/round.rs");
        let [before_zeros, _rest] = barriers[..] else { panic!("{barriers:?}") };
        let tell = "atom.global.ordered";
        let [[added], [rounded]] =
            ["bulk_reduce.rs", "d_q/round.rs"].map(|file| lines(tell, file)[..].try_into().unwrap());
        let arrived = line_with(&k(), "cp.async.bulk.wait_group", "bulk_reduce.rs", "self.reducer.keep(");
        let publish = *lines("fence.proxy.async", "d_q/round.rs").first().expect("zeros are published");
        let bugs = vec![
            bug("a part read before all is added", drop_loops_at(k(), "ld.acquire", part), Fault::Race, &[adds]),
            bug("added to a place that is still read", drop_loops_at(k(), "ld.acquire", place), Fault::Race, &[adds]),
            bug(
                "zeros before all have read",
                drop_at(k(), "bar.sync", before_zeros),
                Fault::Race,
                &[reads[0], zeros[0]],
            ),
            bug("nobody is told what is added", drop_at(k(), tell, added), Fault::Deadlock, &[part]),
            bug("nobody is told what is rounded", drop_at(k(), tell, rounded), Fault::Deadlock, &[place]),
            bug("told before it is added", drop_at(k(), "cp.async.bulk.wait_group", arrived), Fault::Race, &[adds]),
            bug("zeros not published", drop_at(k(), "fence.proxy.async", publish), Fault::ProxyRace, &[adds]),
        ];
        check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });
    }
}

/// Sums that are zeroed while tiles run.
#[test]
fn in_what_is_zeroed() {
    // Of four pairs, the sums of the first are zero before.
    let case = Case { q_len: 200, k_len: 100, heads: [4, 4], ..case(2) };
    let config = BackwardConfig { rounds: false, zeroed: Some(1), join: None, ..case.plan().config() };
    let case = Case { config: Some(config), ..case };
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let k = || Kernel::clone(&kernels.main);
    let one = |row: &str, file: &str| match lines_of(&k(), row, file)[..] {
        [line] => line,
        ref lines => panic!("{row} of {file}: {lines:?}"),
    };
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let [look, tell, arrived] =
        ["ld.acquire", "atom.global.ordered", "cp.async.bulk.wait_group"].map(|row| one(row, "zero_fill.rs"));
    let (adds, zeros) = (line(&k(), "cp.reduce.async.bulk", 0), one("cp.async.bulk.store", "zero_fill.rs"));
    let publish = line_with(&k(), "fence.proxy.async", "zero_fill.rs", "zeros.write");
    let bugs = vec![
        Bug {
            or: &[Fault::Uninitialised],
            ..bug("added before it is zero", drop_loops_at(k(), "ld.acquire", look), Fault::Race, &[adds, zeros])
        },
        bug("told before it is zero", drop_at(k(), "cp.async.bulk.wait_group", arrived), Fault::Race, &[adds, zeros]),
        bug("nobody is told what is zero", drop_at(k(), "atom.global.ordered", tell), Fault::Deadlock, &[look]),
        bug("zeros not written", drop(k(), "cp.async.bulk.store", 0), Fault::Uninitialised, &[adds]),
        bug("zeros not published", drop_at(k(), "fence.proxy.async", publish), Fault::ProxyRace, &[zeros]),
    ];
    check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });
}

/// Sums that go from piece to piece of a tile.
#[test]
fn in_pieces_of_tiles() {
    // Three tiles in five runs.
    let case = case(5);
    let case = Case { config: Some(BackwardConfig { join: Some(0), ..case.plan().config() }), ..case };
    let kernels = case.plan().kernels(Target::HOPPER).unwrap();
    let k = || Kernel::clone(&kernels.main);
    let one = |row: &str| match lines_of(&k(), row, "split_tiles.rs")[..] {
        [line] => line,
        ref lines => panic!("{row}: {lines:?}"),
    };
    let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
    let [look, tell, read, write] = ["ld.acquire", "atom.global.ordered", "ld.global.f32", "st.global.f32"].map(one);
    let barriers = lines_of(&k(), "bar.sync", "split_tiles.rs");
    let [before_reading, before_telling] = barriers[..] else { panic!("{barriers:?}") };
    let bugs = vec![
        Bug {
            or: &[Fault::Uninitialised],
            ..bug(
                "sums read before they are there",
                drop_loops_at(k(), "ld.acquire", look),
                Fault::Race,
                &[read, write],
            )
        },
        Bug {
            or: &[Fault::Uninitialised],
            ..bug("not all wait for them", drop_at(k(), "bar.sync", before_reading), Fault::Race, &[read, write])
        },
        bug("told before all are written", drop_at(k(), "bar.sync", before_telling), Fault::Race, &[read, write]),
        bug("nobody is told", drop_at(k(), "atom.global.ordered", tell), Fault::Deadlock, &[look]),
    ];
    check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });
}

/// A fixed order: whoever is not told waits for ever, and without waiting the bits depend on who comes first.
#[test]
fn in_the_order_of_sums() {
    // Five tiles, more steps than messages, and f16: of bf16 too few bits are left to show the order.
    let long = |by| Case { q_len: 900, k_len: 600, ..by };
    let pairs = Case { dims: [256, 256], q_len: 300, k_len: 640, ..case(6) };
    for by in [long(case(5)), long(by_threads(5)), pairs] {
        let case = Case { order: Order::Fixed, dtype: DType::F16, ..by };
        let by_pairs = case.plan().config().share.ctas() == 2;
        let by_threads = case.config.is_some();
        let kernels = case.plan().kernels(Target::HOPPER).unwrap();
        let k = || Kernel::clone(&kernels.main);
        let bug = |name, kernel, fault, lines: &[Line]| Bug { name, kernel, fault, lines: lines.to_vec(), or: &[] };
        let [wait] = lines_of(&k(), "ld.acquire", "ordered.rs")[..] else { panic!("nobody looks") };
        let [told] = lines_of(&k(), "st.release", "ordered.rs")[..] else { panic!("nobody tells") };
        let mut bugs = vec![bug("nobody is told", drop_at(k(), "st.release", told), Fault::Deadlock, &[wait])];
        let mut unordered = vec![("no look", drop_loops_at(k(), "ld.acquire", wait))];
        let wait = |text| line_with(&k(), "mbarrier.try_wait", "ordered.rs", text);
        if by_threads || by_pairs {
            let add = wait("self.messages.wait(w, compute");
            unordered.push(("added before the turn", drop_waits_at(k(), add)));
        }
        if by_threads {
            let tell = drop_waits_at(k(), wait("self.messages.wait(t, SIGNAL"));
            let told = bug("told before anything was added", tell, Fault::Race, &[]);
            bugs.push(Bug { or: &[Fault::Uninitialised], ..told });
            let post = wait("self.messages.post(t, [number");
            let over = drop_waits_at(k(), post);
            bugs.push(bug("a message written over one that is in hand", over, Fault::Race, &[post]));
        }
        if by_pairs {
            unordered.push(("told before anything was added", drop_waits_at(k(), wait("self.messages.wait_free(t)"))));
        }
        // By TMA, what is sent waits longer than there is room for messages, so that nobody writes over one; and here
        // additions arrive when they are started, so that telling too soon does not show.
        check(bugs, &case, &kernels, |kernels, main| Kernels { main, ..kernels.clone() });

        // All blocks at once: of two, it does not matter who comes first.
        let sim = |seed| Sim::new(Options { seed, resident: case.blocks, ..Options::default() });
        let run = |kernels: &Kernels, seed: u64| case.run(&sim(seed), kernels).unwrap().0;
        let right = run(&kernels, 0);
        assert!((1..4).all(|seed| run(&kernels, seed) == right));
        for (name, kernel) in unordered {
            let wrong = Kernels { main: Arc::new(kernel), ..kernels.clone() };
            let first = case.run(&sim(0), &wrong).map(|(gradients, _)| gradients).ok();
            // Messages that come too late for those who add end in a barrier that is told twice.
            let differs = |seed| case.run(&sim(seed), &wrong).map(|(gradients, _)| gradients).ok() != first;
            assert!(first.is_none() || (1..16).any(differs), "{name}: sums in any order came out the same");
        }
    }
}
