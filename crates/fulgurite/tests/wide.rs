//! Ways of forward on the simulated GPU that are not the quickest: head dimensions above 256, where warpgroups share the
//! columns of a row, and the table exponential, for which all keys are walked twice. Against the oracle, by the tolerance
//! rule, with every feature that goes with them.

use crate::common::{More, check};
use fulgurite_core::expr::{k, k_len, load, q, q_len, score};
use fulgurite_core::{DType, Mask, Packed, Problem, ProblemBuilder};

fn dense(q_len: usize, k_len: usize, dims: [usize; 2]) -> ProblemBuilder {
    Problem::builder().dense(1, q_len, k_len).heads(2, 1).head_dims(dims[0], dims[1])
}

#[test]
fn dims_and_masks() {
    let plain = More::default();
    check("512", DType::Bf16, dense(70, 150, [512, 512]), &plain);
    check("512, causal", DType::F16, dense(130, 150, [512, 512]).mask(Mask::causal()), &plain);
    check("264, window", DType::Bf16, dense(66, 130, [264, 264]).mask(Mask::window(70, 3)), &plain);
    check("512 and 8", DType::Bf16, dense(65, 70, [512, 8]), &plain);
    check("8 and 512", DType::F16, dense(65, 70, [8, 512]), &plain);
    check("320 and 136", DType::Bf16, dense(65, 70, [320, 136]).mask(Mask::causal()), &plain);
    check("no multiple of 8", DType::Bf16, dense(65, 70, [300, 259]).mask(Mask::causal()), &plain);
    check("few queries, keys of none", DType::Bf16, dense(9, 5, [288, 288]).mask(Mask::causal()), &plain);
}

#[test]
fn modifiers_and_sinks() {
    let plain = More::default();
    let distance = (q() + k_len() - q_len() - k()).to_float() * 0.01;
    check("a slope", DType::Bf16, dense(70, 120, [272, 512]).score_mod(score() - distance), &plain);
    check("softcap", DType::Bf16, dense(66, 120, [512, 272]).softcap(4.0), &plain);
    let more = More { aux: vec![("alibi_slopes", vec![0.05, 0.2])], ..More::default() };
    check("alibi", DType::F16, dense(66, 120, [320, 320]).alibi().mask(Mask::causal()), &more);
    let by_key = load("weights", [k()]) * score();
    let builder = dense(20, 40, [512, 272]).aux("weights", DType::F32, &[40]).score_mod(by_key);
    let weights = (0..40).map(|i| f64::from(i % 5) * 0.25).collect();
    check("a table", DType::Bf16, builder, &More { aux: vec![("weights", weights)], ..More::default() });
    let more = More { sinks: Some(vec![0.5, 3.0]), ..More::default() };
    check("sinks", DType::Bf16, dense(66, 120, [320, 320]).sinks().mask(Mask::window(64, 0)), &more);
    // A key that nobody sees and that would show: the sum without it is taken once more, by each its columns.
    let more = More { poison: Some((7, f64::NAN)), ..More::default() };
    check("a comb", DType::Bf16, dense(20, 40, [264, 272]).mask(Mask::custom((k() % 10).differs(7))), &more);
}

#[test]
fn lengths_of_their_own() {
    let used = [Some(vec![70.0, 3.0]), Some(vec![100.0, 33.0])];
    let builder = Problem::builder().dense(2, 80, 100).heads(2, 1).head_dim(384).used_lengths(true, true);
    check("used", DType::Bf16, builder.mask(Mask::causal()), &More { used, ..More::default() });
    let packed = Packed { batch: 2, total_q: 80, total_k: 150, max_q: 70, max_k: 100 };
    let offsets = Some([vec![0.0, 70.0, 80.0], vec![0.0, 100.0, 150.0]]);
    let builder = Problem::builder().packed_sizes(packed).heads(2, 1).head_dim(512).mask(Mask::causal());
    check("packed", DType::Bf16, builder, &More { offsets, ..More::default() });
}

/// Not a function of the difference to a running maximum: a larger one that comes late must not change what came before.
#[test]
fn table_exponential() {
    let plain = More::default();
    let sas = |q_len, k_len, dim| dense(q_len, k_len, [dim, dim]).exp("sas".parse().unwrap());
    check("64", DType::Bf16, sas(140, 330, 64), &plain);
    check("64, f16, causal", DType::F16, sas(200, 230, 64).mask(Mask::causal()), &plain);
    check("128, window", DType::Bf16, sas(130, 300, 128).mask(Mask::window(70, 3)), &plain);
    check("256, causal", DType::Bf16, sas(70, 150, 256).mask(Mask::causal()), &plain);
    check("512", DType::Bf16, sas(66, 70, 512), &plain);
    check("few queries", DType::Bf16, sas(3, 300, 64).mask(Mask::causal()), &plain);
    check("softcap", DType::Bf16, sas(66, 300, 64).softcap(4.0), &plain);
    let more = More { poison: Some((7, f64::NAN)), ..More::default() };
    check("a comb", DType::Bf16, sas(20, 140, 64).mask(Mask::custom((k() % 10).differs(7))), &more);
    let more = More { sinks: Some(vec![0.5, 3.0]), ..More::default() };
    check("sinks", DType::Bf16, sas(66, 120, 64).sinks().mask(Mask::causal()), &more);
    let used = [Some(vec![70.0, 3.0]), Some(vec![100.0, 33.0])];
    let builder = Problem::builder().dense(2, 80, 100).heads(2, 1).head_dim(64).used_lengths(true, true);
    let builder = builder.exp("sas".parse().unwrap()).mask(Mask::causal());
    check("used", DType::Bf16, builder, &More { used, ..More::default() });
}
