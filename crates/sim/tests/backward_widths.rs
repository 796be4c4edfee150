//! Gradients where rows of q, k and v do not fill the tiles: products take the elements that a row has.

use crate::common::backward::Case;
use crate::common::sim;
use fulgurite_core::{DType, Mask};
use fulgurite_kernels::attention::backward::{BackwardConfig, Order, Share};

/// A problem of the schedules that multiply fewer columns than their tiles have.
fn case(dims: [usize; 2], seed: u64) -> Case {
    let [causal, f16, fixed] = [0, 1, 2].map(|bit| seed >> bit & 1 == 1);
    Case {
        dims,
        heads: if seed.is_multiple_of(3) { [4, 2] } else { [2, 2] },
        batch: 1 + seed as usize % 2,
        q_len: 100 + 7 * seed as usize,
        k_len: 150 + 11 * seed as usize,
        mask: if causal { Mask::causal() } else { Mask::none() },
        dtype: if f16 { DType::F16 } else { DType::Bf16 },
        order: if fixed { Order::Fixed } else { Order::Any },
        blocks: 4,
        ..Case::base()
    }
}

/// Head dims 65 to 128, whose d_q TMA adds.
#[test]
fn odd_rows_by_the_copy_engine() {
    for (seed, dims) in (1..).zip([[96, 96], [80, 80], [112, 112], [72, 128], [128, 40], [96, 64], [64, 96]]) {
        let case = case(dims, seed);
        let own = dims.map(|d| d as u32);
        assert_eq!(case.plan().config().widths(own), own.map(|d| d.next_multiple_of(16)), "{case:?}");
        case.check(&sim(seed));
    }
}

/// Head dims 129 to 256 in pairs of CTAs. The last warpgroup has no column of d_q up to 192.
#[test]
fn odd_rows_in_pairs_of_ctas() {
    for (seed, dims) in (1..).zip([[192, 192], [192, 128], [160, 160], [136, 64], [144, 200], [208, 176], [256, 32]]) {
        let case = case(dims, seed);
        assert_eq!(case.plan().config().share, Share::Pairs, "{case:?}");
        case.check(&sim(seed));
    }
}

/// Head dims above 128 without pairs of CTAs.
#[test]
fn odd_rows_by_columns() {
    for (seed, dims) in (1..).zip([[192, 192], [192, 128], [160, 160]]) {
        Case { config: Some(BackwardConfig::columns()), ..case(dims, seed) }.check(&sim(seed));
    }
}

/// Tiles in pieces and rounded meanwhile, with columns that no product computes.
#[test]
fn odd_rows_of_split_tiles() {
    for (dims, rounds) in [([96, 96], true), ([80, 112], false)] {
        let case = Case { dims, heads: [2, 2], q_len: 500, k_len: 300, blocks: 5, ..Case::base() };
        let config = BackwardConfig { rounds, join: Some(0), ..BackwardConfig::hopper(128) };
        let case = Case { config: Some(config), ..case };
        assert!(case.plan().cuts_tiles(), "{case:?}");
        case.check(&sim(3));
    }
}
