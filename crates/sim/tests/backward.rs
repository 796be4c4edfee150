//! The kernels of the gradients on the simulator: clean, and right by the tolerance rule.

mod common;

use common::backward::Case;
use common::{Random, sim};
use fulgurite_core::{DType, Mask};
use fulgurite_kernels::attention::backward::{Order, Tuning};
use fulgurite_sim::{Options, Sim};

#[test]
fn gradients_are_right() {
    let base = Case::base;
    base().check(&sim(1));
    Case { dims: [128, 128], ..base() }.check(&sim(2));
    Case { dims: [128, 128], mask: Mask::causal(), q_len: 200, k_len: 260, blocks: 2, ..base() }.check(&sim(3));
    Case { mask: Mask::causal(), q_len: 300, k_len: 200, d_lse: true, ..base() }.check(&sim(4));
    // Keys after the last diagonal, and queries after it, see nothing and are seen by nobody.
    Case { mask: Mask::causal_top_left(), q_len: 70, k_len: 300, ..base() }.check(&sim(5));
    Case { mask: Mask::window(Some(40), Some(-8)), q_len: 333, k_len: 290, dims: [128, 64], ..base() }.check(&sim(6));
    Case { mask: Mask::window(Some(20), Some(3)), heads: [6, 2], batch: 2, blocks: 3, ..base() }.check(&sim(7));
    Case { dtype: DType::F16, dims: [96, 40], heads: [3, 3], q_len: 1, k_len: 7, ..base() }.check(&sim(8));
    Case { dims: [8, 16], q_len: 129, k_len: 1, ..base() }.check(&sim(9));
    Case { dims: [48, 64], heads: [1, 1], q_len: 130, ..base() }.check(&sim(10));
    // Nobody sees anything.
    Case { mask: Mask::window(Some(-400), None), ..base() }.check(&sim(15));
    Case { dims: [256, 256], q_len: 150, k_len: 140, ..base() }.check(&sim(11));
    Case { dims: [192, 128], mask: Mask::causal(), q_len: 100, k_len: 200, d_lse: true, ..base() }.check(&sim(12));
    Case { dims: [136, 72], mask: Mask::window(Some(30), Some(9)), blocks: 2, ..base() }.check(&sim(13));
    Case { dims: [64, 256], mask: Mask::causal(), dtype: DType::F16, k_len: 65, ..base() }.check(&sim(14));
}

/// A ring of queries, one of keys, tiles of d_z in step with the first, and sums from many blocks: in any order.
#[test]
fn gradients_are_clean_whatever_the_order() {
    let mut random = Random(11);
    for seed in common::seeds() {
        let mut below = |n: u64| random.below(n) as usize;
        let mask = match below(4) {
            0 => Mask::none(),
            1 => Mask::causal(),
            2 => Mask::causal_top_left(),
            _ => Mask::window(Some(below(90) as i64), Some(below(30) as i64 - 10)),
        };
        let kv_heads = 1 + below(2);
        let case = Case {
            q_len: 1 + below(290),
            k_len: 1 + below(290),
            heads: [kv_heads * (1 + below(2)), kv_heads],
            batch: 1,
            dims: [[64, 64], [128, 128], [192, 128], [256, 256]][seed as usize % 4],
            mask,
            dtype: if below(2) == 0 { DType::Bf16 } else { DType::F16 },
            d_lse: below(3) == 0,
            order: if below(3) == 0 { Order::Fixed } else { Order::Any },
            blocks: 1 + below(3) as u32,
            tuning: None,
        };
        case.check(&sim(seed));
    }
}

/// Steps of 80 queries under masks, which short sequences take 64 for.
#[test]
fn long_steps_under_masks_are_right() {
    let base = Case { dims: [128, 128], tuning: Some(Tuning::hopper(128)), ..Case::base() };
    for (case, seed) in [
        Case { mask: Mask::causal(), q_len: 350, k_len: 300, blocks: 2, ..base.clone() },
        Case { mask: Mask::window(Some(50), Some(7)), q_len: 170, k_len: 260, dtype: DType::F16, ..base.clone() },
        Case { mask: Mask::causal_top_left(), q_len: 90, k_len: 400, d_lse: true, dims: [128, 80], ..base },
    ]
    .into_iter()
    .zip(20..)
    {
        case.check(&sim(seed));
    }
}

/// d_k and d_v have one order of additions; d_q only where one block adds.
#[test]
fn gradients_of_keys_do_not_depend_on_the_order() {
    let case = Case { q_len: 260, k_len: 300, mask: Mask::causal(), heads: [4, 2], blocks: 4, ..Case::base() };
    let [one, other] = [1, 2].map(|seed| case.check(&sim(seed)));
    assert_eq!((one.d_k, one.d_v), (other.d_k, other.d_v));
}

/// In a fixed order all gradients have the same bits, whoever comes first.
#[test]
fn a_fixed_order_gives_the_same_bits() {
    let base = Case { heads: [2, 1], blocks: 5, order: Order::Fixed, ..Case::base() };
    for case in [
        Case { q_len: 200, k_len: 520, ..base.clone() },
        Case { q_len: 400, k_len: 520, dims: [128, 128], mask: Mask::causal(), ..base.clone() },
        Case { q_len: 500, k_len: 560, mask: Mask::causal(), ..base.clone() },
        Case { q_len: 300, k_len: 300, dims: [192, 128], mask: Mask::window(Some(70), Some(4)), ..base },
    ] {
        // All blocks at once: of two, it does not matter who comes first.
        let run = |seed| case.check(&Sim::new(Options { seed, resident: 5, ..Options::default() }));
        let first = run(1);
        assert!((2..5).all(|seed| run(seed) == first), "{case:?}");
    }
}
