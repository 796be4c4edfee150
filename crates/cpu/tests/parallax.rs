//! Parallax against its oracle, and against attention where the probes are zero.

use fulgurite_core::cases::around::ParallaxCase;
use fulgurite_core::parallax::{ParallaxForward, ParallaxGradients, check};
use fulgurite_core::{DType, Forward, Tensor};
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

/// Bit for bit, on tiles and with few queries; but for bf16 on matrix units, where attention packs its weights on the way
/// out of the exponential and Parallax reweighs them first.
#[test]
fn probes_of_zero_are_attention() {
    for seed in 0..60 {
        let case = ParallaxCase::random(seed, DType::FLOATS[seed as usize % 3]);
        let options = options(seed);
        if matches!(options.isa, Some(Isa::Amx | Isa::Avx512Bf16)) && case.q.dtype() == DType::Bf16 {
            continue;
        }
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
