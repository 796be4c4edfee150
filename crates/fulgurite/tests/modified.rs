//! Modified scores over several blocks of keys on the simulated GPU, where most blocks go the quick way and some must be
//! done again: against the oracle, by the tolerance rule.

use fulgurite::Choice;
use fulgurite_core::expr::{k, k_len, q, q_len, score, select};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Inputs, Mask, Outputs, Problem, ProblemBuilder, Rescale, Tensor, compare};

/// Queries of this standard deviation, both types of probabilities, with and without trust in the running maximum.
fn check(name: &str, builder: &ProblemBuilder, sigma: f64) {
    for (dtype, rescale) in [(DType::Bf16, None), (DType::F16, None), (DType::Bf16, Some(Rescale::Lazy(8.0)))] {
        let problem = builder.clone().dtype(dtype).build().unwrap();
        let mut rng = Rng::new(5);
        let mut draw = |shape: &[usize], sigma: f64| {
            Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), sigma), shape).unwrap()
        };
        let [q, k, v] = [draw(&problem.q_shape(), sigma), draw(&problem.k_shape(), 1.0), draw(&problem.v_shape(), 1.0)];
        let slopes = Tensor::from_f64(DType::F32, &[0.05], &[1]).unwrap();
        let mut inputs = Inputs::new(q.view(), k.view(), v.view());
        if problem.aux().iter().any(|spec| *spec.name == *"alibi_slopes") {
            inputs = inputs.aux("alibi_slopes", slopes.view());
        }
        let mut got = Forward::zeros(&problem).unwrap();
        let mut outputs = Outputs { o: got.o.view_mut(), lse: got.lse.view_mut() };
        let settings = rescale.map_or(fulgurite::Settings::default(), |r| fulgurite::Settings::default().rescale(r));
        let engine = fulgurite::engine_with(Choice::Sim, &settings).unwrap();
        engine.forward_into(&problem, &inputs, &mut outputs, &Default::default()).unwrap();
        let bound = inputs.bind(&problem).unwrap();
        for (tensor, verdict) in compare::check_forward(&bound, &got, 0) {
            assert!(verdict.ok(), "{name} ({dtype}, {rescale:?}): {tensor}: {verdict}");
        }
    }
}

fn dense(q_len: usize, k_len: usize) -> ProblemBuilder {
    Problem::builder().dense(1, q_len, k_len).heads(1, 1).head_dim(64)
}

#[test]
fn distances_with_one_sign_and_with_both() {
    check("alibi", &dense(150, 500).alibi(), 1.0);
    check("alibi, causal", &dense(500, 500).alibi().mask(Mask::causal()), 1.0);
    let ahead = (k() - q() - k_len() + q_len()).to_float() * 0.01;
    check("a slope without a magnitude", &dense(130, 450).score_mod(score() + ahead.clone()), 1.0);
    let comb = Mask::custom((k() % 7).differs(3));
    check("a slope and holes", &dense(130, 450).score_mod(ahead + score()).mask(comb), 1.0);
}

#[test]
fn scores_inside_and_outside_of_a_cap() {
    check("far below the cap", &dense(140, 420).softcap(30.0), 1.0);
    check("at the cap", &dense(140, 420).softcap(4.0).mask(Mask::window(200, 10)), 3.0);
    check("a cap before distances", &dense(140, 420).softcap(10.0).alibi(), 2.0);
    let bent = (score() * 0.5).tanh() * 2.0 + select(k().less(100), 0.5, 0.0);
    check("a tangent of one's own", &dense(140, 420).score_mod(bent), 2.0);
}
