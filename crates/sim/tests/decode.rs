//! Attention of few queries: clean in any order, right by the tolerance rule, the same bits whoever merges.

use crate::common::decode::Case;
use crate::common::mutate::{drop, line, replace};
use fulgurite_core::{Mask, Rescale};
use fulgurite_ptx::Kernel;
use fulgurite_sim::{Fault, Options, Sim};

fn run(case: &Case, seed: u64) -> crate::common::decode::Left {
    let (sim, tensors) = (crate::common::sim(seed), case.tensors());
    let left = case.run(&sim, case.kernel(), &tensors).unwrap_or_else(|e| {
        panic!("{case:?}: {e}\n{}", sim.findings().iter().map(|f| format!("{f}\n")).collect::<String>())
    });
    case.check(&tensors, &left);
    left
}

#[test]
fn it_agrees_with_the_oracle() {
    let base = Case::base();
    run(&base, 1);
    run(&Case { q_len: 16, heads: [4, 1], dims: [128, 128], mask: Mask::causal(), blocks: 2, ..base.clone() }, 2);
    run(&Case { q_len: 9, heads: [7, 1], k_len: 130, mask: Mask::causal(), ..base.clone() }, 3);
    // Rows without keys, and no keys at all.
    run(&Case { q_len: 12, k_len: 5, mask: Mask::causal(), ..base.clone() }, 4);
    run(&Case { q_len: 3, k_len: 0, ..base.clone() }, 5);
    // Every block is done again.
    run(&Case { rescale: Some(Rescale::Optimistic(1.0)), sigma: 6.0, ..base.clone() }, 6);
    run(&Case { dims: [256, 256], k_len: 520, heads: [2, 1], ..base.clone() }, 7);
    run(&Case { dims: [72, 200], k_len: 300, heads: [3, 1], q_len: 2, ..base }, 8);
}

#[test]
fn random_calls_are_clean_and_right() {
    for seed in crate::common::seeds() {
        run(&Case::random(seed), seed);
    }
}

/// Which block comes last differs with the seed and the number of blocks; the result must not.
#[test]
fn the_bits_do_not_depend_on_who_merges() {
    let base = Case { q_len: 3, k_len: 1100, heads: [4, 1], ..Case::base() };
    let want = run(&base, 0);
    for (seed, blocks) in [(1, 1), (2, 2), (3, 3), (4, 5), (5, 7)] {
        assert_eq!(run(&Case { blocks, ..base.clone() }, seed), want, "{blocks} blocks, seed {seed}");
    }
    // Some tiles whole, the last by splits; all whole; all by splits.
    let many = Case { batch: 5, ..base };
    let want = run(&Case { blocks: 2, ..many.clone() }, 6);
    for (seed, blocks) in [(7, 5), (8, 1), (9, 9)] {
        assert_eq!(run(&Case { blocks, ..many.clone() }, seed), want, "{blocks} blocks, seed {seed}");
    }
}

/// Tiles of more than one run of splits: whole tiles, runs, single splits and mixtures of them.
#[test]
fn the_bits_do_not_depend_on_the_division() {
    // Eight splits of 576 keys.
    let case = Case { q_len: 2, k_len: 4600, heads: [4, 2], batch: 2, ..Case::base() };
    let want = run(&case, 1);
    let mut divisions = std::collections::BTreeSet::new();
    for blocks in [1, 2, 3, 4, 5, 8, 24, 64] {
        let case = Case { blocks, ..case.clone() };
        divisions.insert(case.launch_words(["whole", "each"]));
        assert_eq!(run(&case, u64::from(blocks)), want, "{blocks} blocks");
    }
    let [whole, runs, splits] = [[4, 1], [0, 4], [0, 1]].map(|division| divisions.contains(&division));
    assert!(whole && runs && splits, "{divisions:?}");
}

/// A row's bits are the same alone and in a batch.
#[test]
fn the_bits_do_not_depend_on_the_batch() {
    let pair = Case { batch: 2, ..Case::base() };
    let tensors = pair.tensors();
    let both = pair.run(&crate::common::sim(1), pair.kernel(), &tensors).unwrap();
    let one = Case::base();
    let second = [0, 1, 2].map(|i| {
        let all = tensors[i].view();
        let values = all.to_f64();
        let mut shape = all.shape().to_vec();
        shape[0] = 1;
        fulgurite_core::Tensor::from_f64(one.dtype, &values[values.len() / 2..], &shape).unwrap()
    });
    let alone = one.run(&crate::common::sim(2), one.kernel(), &second).unwrap();
    assert_eq!(both.o[both.o.len() / 2..], alone.o);
    assert_eq!(both.lse[both.lse.len() / 2..], alone.lse);
}

/// What makes merging safe is needed: without it the simulator finds the race.
#[test]
fn bugs_in_merging_are_found() {
    // Rows in every warp, and keys that are worth dividing.
    let case = Case { q_len: 16, k_len: 6200, heads: [4, 1], blocks: 8, ..Case::base() };
    let (k, tensors) = (|| case.kernel(), case.tensors());
    let merge = line(&k(), "ld.global.f32", behind_count(&k(), "ld.global.f32"));
    let mut barriers = 0;
    k().each_op(&mut |op| barriers += usize::from(op.inst.name == "bar.sync"));
    // The gathering role has one, the computing one two around the count.
    assert_eq!(barriers, 3);
    let relaxed = |kernel| replace(kernel, "atom.global.ordered", 0, "atom.global", 4);
    let bugs = [
        ("the count orders nothing", relaxed(k())),
        ("partial results are counted before all warps wrote them", drop(k(), "bar.sync", 1)),
        ("who merges does not wait for the count", drop(k(), "bar.sync", 2)),
    ];
    for (name, kernel) in bugs {
        for seed in 0..3 {
            let sim = Sim::new(Options { seed, budget: 30_000_000, ..Options::default() });
            let _ = case.run(&sim, kernel.clone(), &tensors);
            let found = sim.findings();
            let right = found.iter().any(|f| f.fault == Fault::Race);
            let all: String = found.iter().map(|f| format!("\n    {f}")).collect();
            assert!(right, "{name} (seed {seed}): {all}");
            if name == "the count orders nothing" {
                assert!(found.iter().any(|f| f.names(merge)), "{name} (seed {seed}): {all}");
            }
        }
    }
}

/// A counter that is not set back breaks the next launch: who checks it sees it.
#[test]
fn a_counter_that_is_left_is_seen() {
    let case = Case { k_len: 4600, heads: [1, 1], ..Case::base() };
    // The only word that the kernel stores to global memory as it is: results go in pairs and floats.
    let kernel = case.kernel();
    let store = behind_count(&kernel, "st.global.b32");
    let kernel = drop(kernel, "st.global.b32", store);
    let left = case.run(&crate::common::sim(1), kernel, &case.tensors()).unwrap();
    assert_eq!(left.counters[2], 2, "runs of 4600 keys");
}

/// The first use of an instruction behind the ordered count.
fn behind_count(kernel: &Kernel, row: &str) -> usize {
    let (mut uses, mut found, mut counted) = (0, None, false);
    kernel.each_op(&mut |op| {
        counted |= op.inst.name == "atom.global.ordered";
        if op.inst.name == row {
            found = found.or(counted.then_some(uses));
            uses += 1;
        }
    });
    found.expect("an instruction behind the count")
}
