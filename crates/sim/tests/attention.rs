//! The forward kernel on the simulator: clean, and right by the oracle.

use crate::common::attention::{BASE, Case};
use fulgurite_core::Rescale;

fn check(case: Case, seed: u64) {
    let sim = crate::common::sim(seed);
    let verdicts = case.run(&sim, case.kernel()).unwrap_or_else(|e| {
        panic!("{case:?}: {e}\n{}", sim.findings().iter().map(|f| format!("{f}\n")).collect::<String>())
    });
    // Rows of p that are added up as they are rounded are off by at most 2^-8: only calls that read no LSE have them.
    let reads_lse = !case.config.is_some_and(|text| text.contains("column"));
    for (name, verdict) in verdicts.iter().filter(|(name, _)| reads_lse || name != "lse") {
        assert!(verdict.ok(), "{case:?}: {name}: {verdict}");
    }
}

#[test]
fn forward_agrees_with_the_oracle() {
    let optimistic = Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT);
    check(BASE, 1);
    check(Case { q_len: 64, k_len: 140, dim: 256, ..BASE }, 2);
    check(Case { causal: true, q_len: 200, k_len: 230, batch: 2, blocks: 2, ..BASE }, 3);
    check(Case { causal: true, q_len: 130, k_len: 77, rescale: optimistic, ..BASE }, 4);
    check(Case { dim: 128, blocks: 2, rescale: Rescale::Lazy(8.0), ..BASE }, 5);
    // Another cut than the library's.
    let config = Some("cols=64 depth=3 end=parts registers=232:40 early=1");
    check(Case { q_len: 150, k_len: 230, causal: true, dim: 128, rescale: optimistic, config, ..BASE }, 6);
}

/// Sums as one more column of p v: with and without blocks that are done again, and under the other policies.
#[test]
fn tensor_cores_add_up_rows() {
    let config = Some("groups=3 cols=96 depth=3 registers=160:32 added=column");
    let base = Case { q_len: 70, k_len: 330, heads: [1, 1], config, ..BASE };
    let always = Rescale::Always;
    for (seed, rescale) in (11..).zip([Rescale::Optimistic(1e9), Rescale::Optimistic(4.0), Rescale::Lazy(8.0), always])
    {
        check(Case { rescale, causal: seed % 2 == 0, ..base.clone() }, seed);
    }
    let joined = Case { q_len: 300, k_len: 200, causal: true, blocks: 2, rescale: Rescale::Optimistic(1e9), ..base };
    check(joined, 15);
}

/// Warpgroups that take turns, joined tiles, a mailbox and an accumulator in flight across blocks: in any order.
#[test]
fn forward_is_clean_whatever_the_order() {
    for seed in crate::common::seeds() {
        let dim = [64, 128, 256][seed as usize % 3];
        check(Case { q_len: 140, k_len: 70 + 10 * (seed % 9) as u32, heads: [1, 1], dim, ..BASE }, seed);
    }
}
