//! Few queries over many keys on the simulated GPU, with every feature that goes with them: against the oracle, by the
//! tolerance rule. Lengths make several splits, so that partial results are merged.

use fulgurite::{Choice, engine};
use fulgurite_core::expr::{head, k, k_len, q, q_len, score, select};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Inputs, Mask, Outputs, Packed, Problem, ProblemBuilder, Tensor, compare};

/// What a call has beside q, k and v.
#[derive(Default)]
struct More {
    sinks: Option<Vec<f64>>,
    used: [Option<Vec<f64>>; 2],
    offsets: Option<[Vec<f64>; 2]>,
}

fn ints(values: &[f64]) -> Tensor {
    Tensor::from_f64(DType::I32, values, &[values.len()]).unwrap()
}

fn check(name: &str, builder: ProblemBuilder, more: &More) {
    let problem = builder.dtype(DType::Bf16).build().unwrap();
    let mut rng = Rng::new(3);
    let mut draw =
        |shape: &[usize]| Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
    let [q, k, v] = [draw(&problem.q_shape()), draw(&problem.k_shape()), draw(&problem.v_shape())];
    let sinks = more.sinks.as_ref().map(|s| Tensor::from_f64(DType::F32, s, &[s.len()]).unwrap());
    let used = [0, 1].map(|side| more.used[side].as_deref().map(ints));
    let offsets = more.offsets.as_ref().map(|both| [0, 1].map(|side| ints(&both[side])));
    let mut inputs = Inputs::new(q.view(), k.view(), v.view())
        .used_lengths(used[0].as_ref().map(Tensor::view), used[1].as_ref().map(Tensor::view));
    if let Some(sinks) = &sinks {
        inputs = inputs.sinks(sinks.view());
    }
    if let Some([q, k]) = &offsets {
        inputs = inputs.cu_seqlens(q.view(), k.view());
    }
    let mut got = Forward::zeros(&problem).unwrap();
    let mut outputs = Outputs { o: got.o.view_mut(), lse: got.lse.view_mut() };
    engine(Choice::Sim).unwrap().forward_into(&problem, &inputs, &mut outputs, &Default::default()).unwrap();
    let bound = inputs.bind(&problem).unwrap();
    for (tensor, verdict) in compare::check_forward(&bound, &got, 0) {
        assert!(verdict.ok(), "{name}: {tensor}: {verdict}");
    }
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
