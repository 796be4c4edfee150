//! Few queries over many keys on the simulated GPU, with every feature that goes with them: against the oracle, by the
//! tolerance rule. Lengths make several splits, so that partial results are merged.

use crate::common::More;
use fulgurite_core::expr::{head, k, k_len, q, q_len, score, select};
use fulgurite_core::{DType, Mask, Packed, Problem, ProblemBuilder};

fn check(name: &str, builder: ProblemBuilder, more: &More) {
    crate::common::check(name, DType::Bf16, builder, more);
}

fn dense(batch: usize, q_len: usize, k_len: usize) -> ProblemBuilder {
    Problem::builder().dense(batch, q_len, k_len).heads(6, 2).head_dim(32)
}

#[test]
fn modifiers_tell_the_heads_of_a_tile_apart() {
    let distance = (q() + k_len() - q_len() - k()).to_float() * 0.01;
    let by_head = score() - distance * (head() + 1).to_float();
    check("by head", dense(2, 3, 600).score_mod(by_head), &More::default());
    let holes = select(((q() * 7 + k() * 3 + head()) % 5).equals(0), f32::NEG_INFINITY, score() * 1.5);
    check("holes", dense(1, 5, 700).score_mod(holes).mask(Mask::causal()), &More::default());
    let comb = Mask::custom(((k() + q() * 2 + head()) % 3).differs(0));
    check("comb", dense(1, 4, 530).mask(comb).mask(Mask::window(400, 2)), &More::default());
}

#[test]
fn sinks_join_once_however_many_splits_there_are() {
    let sinks = Some(vec![0.5, -1.0, 3.0, f64::NEG_INFINITY, 60.0, -60.0]);
    let more = More { sinks, ..More::default() };
    check("several splits", dense(1, 2, 900).sinks(), &more);
    check("one split", dense(2, 2, 100).sinks().mask(Mask::causal()), &more);
    check("no keys", dense(1, 9, 4).sinks().mask(Mask::causal()), &more);
}

#[test]
fn sequences_have_lengths_of_their_own() {
    let used_k = Some(vec![700.0, 3.0, 0.0, 512.0]);
    let used_q = Some(vec![2.0, 4.0, 1.0, 0.0]);
    let builder = |q: bool| dense(4, 4, 800).used_lengths(q, true).mask(Mask::causal());
    check("used keys", builder(false), &More { used: [None, used_k.clone()], ..More::default() });
    check("used both", builder(true), &More { used: [used_q, used_k], ..More::default() });
}

#[test]
fn packed_sequences_and_rows_of_none() {
    // Five rows of q and two of k belong to no sequence.
    let packed = Packed { batch: 4, total_q: 16, total_k: 1202, max_q: 5, max_k: 700 };
    let offsets = Some([vec![0.0, 3.0, 3.0, 8.0, 11.0], vec![0.0, 700.0, 1000.0, 1000.0, 1200.0]]);
    let builder = Problem::builder().packed_sizes(packed).heads(6, 2).head_dim(32).mask(Mask::causal());
    check("packed", builder, &More { offsets, ..More::default() });
}
