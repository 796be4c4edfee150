//! Parallax against its oracle, and against attention where the probes are zero.

use fulgurite_core::cases::variants::ParallaxCase;
use fulgurite_core::parallax::{Parallax, ParallaxForward, ParallaxGradients, check};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Inputs, Mask, Problem, Tensor};
use fulgurite_cpu::{Isa, Options, forward, parallax_backward, parallax_forward};

fn run(case: &ParallaxCase, r: &Tensor, options: &Options) -> ParallaxForward {
    let mut out = ParallaxForward::zeros(&case.parallax).unwrap();
    out.own.outputs().o.fill(f64::NAN);
    let inputs = case.inputs();
    parallax_forward(&case.parallax.bind(&inputs, r.view()).unwrap(), &mut out.outputs(), options);
    out
}

fn options(seed: u64) -> Options {
    let all = Isa::available();
    Options { isa: Some(all[(seed / 3) as usize % all.len()]), ..Options::default() }
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    let long = std::env::var_os("FULGURITE_LONG").is_some();
    for seed in 0..if long { 1000 } else { 200 } {
        let case = ParallaxCase::random(seed, DType::FLOATS[seed as usize % 3]);
        let options = options(seed);
        let out = run(&case, &case.r, &options);
        let inputs = case.inputs();
        let bound = case.parallax.bind(&inputs, case.r.view()).unwrap();
        let mut gradients = ParallaxGradients::zeros(&case.parallax).unwrap();
        parallax_backward(&bound, &out, &case.d_o.view(), &mut gradients, &options);
        let verdicts = check(&bound, &out, Some((&case.d_o.view(), &gradients)));
        let bad = verdicts.into_iter().filter(|(_, v)| !v.ok());
        failed
            .extend(bad.map(|(t, v)| format!("{seed} {:?} {} {t}: {v}", options.isa, case.parallax.problem().dtype())));
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

/// Bit for bit, on tiles and with few queries.
#[test]
fn probes_of_zero_are_attention() {
    for seed in 0..60 {
        let case = ParallaxCase::random(seed, DType::FLOATS[seed as usize % 3]);
        let options = options(seed);
        let zero = Tensor::zeros(case.q.dtype(), case.q.shape()).unwrap();
        let found = run(&case, &zero, &options);
        let mut plain = Forward::zeros(case.parallax.problem()).unwrap();
        let inputs = case.inputs();
        forward(&inputs.bind(case.parallax.problem()).unwrap(), &mut plain.outputs(), &options);
        let bits = |t: &Tensor| t.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert!(bits(&found.own.o) == bits(&plain.o), "{seed} {:?}", options.isa);
        assert!(bits(&found.own.lse) == bits(&plain.lse), "{seed} {:?}", options.isa);
    }
}

/// Bit for bit where attention takes several blocks of keys at once: it settles the maximum by fewer keys.
#[test]
fn probes_of_zero_are_attention_over_many_keys() {
    let masks = [Some(Mask::causal()), None, Some(Mask::causal().and(Mask::window(200, 0)))];
    for (i, mask) in masks.into_iter().enumerate() {
        let problem = Problem::builder().dense(1, 150, 420).heads(1, 1).head_dim(64).dtype(DType::Bf16);
        let problem = match mask {
            Some(mask) => problem.mask(mask),
            None => problem,
        };
        let parallax = Parallax::new(problem.build().unwrap()).unwrap();
        let rng = &mut Rng::new(9);
        let mut of = |shape: &[usize], by: f64| {
            Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), by), shape).unwrap()
        };
        let (q, k) = (of(&parallax.problem().q_shape(), 3.0), of(&parallax.problem().k_shape(), 1.0));
        let (v, zero) = (of(&parallax.problem().v_shape(), 1.0), Tensor::zeros(DType::Bf16, q.shape()).unwrap());
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let mut found = ParallaxForward::zeros(&parallax).unwrap();
        let options = Options::default();
        parallax_forward(&parallax.bind(&inputs, zero.view()).unwrap(), &mut found.outputs(), &options);
        let mut plain = Forward::zeros(parallax.problem()).unwrap();
        forward(&inputs.bind(parallax.problem()).unwrap(), &mut plain.outputs(), &options);
        let bits = |t: &Tensor| t.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert!(bits(&found.own.lse) == bits(&plain.lse), "LSE of mask {i}");
        assert!(bits(&found.own.o) == bits(&plain.o), "O of mask {i}");
    }
}

/// Few queries of whole tiles, which go in strips where there is a matrix unit: against the oracle, and bit for bit.
#[test]
fn few_queries_in_strips() {
    for (rows, heads) in [(1, [2, 2]), (1, [2, 1]), (3, [2, 1]), (1, [8, 1])] {
        let problem = Problem::builder().dense(1, rows, 700).heads(heads[0], heads[1]).head_dim(64).dtype(DType::Bf16);
        let parallax = Parallax::new(problem.mask(Mask::causal()).build().unwrap()).unwrap();
        let rng = &mut Rng::new(7);
        let mut of = |shape: &[usize], by: f64| {
            Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), by), shape).unwrap()
        };
        let (q, r) = (of(&parallax.problem().q_shape(), 1.0), of(&parallax.problem().q_shape(), 0.1));
        let (k, v) = (of(&parallax.problem().k_shape(), 1.0), of(&parallax.problem().v_shape(), 1.0));
        let zero = Tensor::zeros(DType::Bf16, q.shape()).unwrap();
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        for isa in Isa::available() {
            let options = Options { isa: Some(isa), ..Options::default() };
            let run = |r: &Tensor| {
                let mut out = ParallaxForward::zeros(&parallax).unwrap();
                parallax_forward(&parallax.bind(&inputs, r.view()).unwrap(), &mut out.outputs(), &options);
                out
            };
            let bound = parallax.bind(&inputs, r.view()).unwrap();
            for (what, verdict) in check(&bound, &run(&r), None) {
                assert!(verdict.ok(), "{isa:?} {rows} {heads:?} {what}: {verdict}");
            }
            let mut plain = Forward::zeros(parallax.problem()).unwrap();
            forward(&inputs.bind(parallax.problem()).unwrap(), &mut plain.outputs(), &options);
            let found = run(&zero);
            let bits = |t: &Tensor| t.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>();
            assert!(bits(&found.own.o) == bits(&plain.o) && bits(&found.own.lse) == bits(&plain.lse), "{isa:?}");
        }
    }
}

#[test]
fn probes_that_do_not_fit_are_refused() {
    let case = ParallaxCase::random(1, DType::F32);
    let inputs = case.inputs();
    let short = Tensor::zeros(DType::F32, &[1, 1, 1, 1]).unwrap();
    assert!(
        case.parallax.bind(&inputs, short.view()).unwrap_err().to_string().starts_with("`r` has shape [1, 1, 1, 1]")
    );
    let narrow = Tensor::zeros(DType::F16, case.q.shape()).unwrap();
    assert!(
        case.parallax.bind(&inputs, narrow.view()).unwrap_err().to_string().starts_with("`r` is f16, allowed: f32")
    );
}
