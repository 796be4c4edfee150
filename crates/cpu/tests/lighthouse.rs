//! Lighthouse against its definition with the same selection.

use fulgurite_core::cases::variants::LighthouseCase;
use fulgurite_core::lighthouse::{Lighthouse, check};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Tensor};
use fulgurite_cpu::{Isa, Options, lighthouse_backward, lighthouse_forward};

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    let long = std::env::var_os("FULGURITE_LONG").is_some();
    for seed in 0..if long { 1000 } else { 200 } {
        let dtype = DType::FLOATS[seed as usize % 3];
        let LighthouseCase { light, q, k, v, d_o } = LighthouseCase::random(seed, dtype);
        let isa = Isa::available()[(seed / 3) as usize % Isa::available().len()];
        let options = Options { isa: Some(isa), ..Options::default() };
        let out = lighthouse_forward(&light, &q.view(), &k.view(), &v.view(), &options).unwrap();
        let g = lighthouse_backward(&light, &out, &d_o.view(), &options).unwrap();
        let verdicts = check(&light, &out.entries, [&q, &k, &v], &out.o, Some((&d_o, [&g.d_q, &g.d_k, &g.d_v])));
        assert_eq!(verdicts.len(), 4);
        let bad = verdicts.into_iter().filter(|(_, v)| !v.ok());
        failed.extend(bad.map(|(t, v)| format!("{seed} {dtype} {isa:?} {t}: {v}")));
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn bits_do_not_depend_on_threads_and_tensors_must_fit() {
    let light = Lighthouse::new([1, 256, 2, 1], [16, 16], 2, 4, 16, 8).unwrap();
    let mut rng = Rng::new(1);
    let mut random =
        |shape: &[usize]| Tensor::from_f64(DType::F32, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
    let (q, k) = (random(&light.q_shape()), random(&light.k_shape()));
    let run = |threads| {
        let options = Options { threads: Some(threads), ..Options::default() };
        let out = lighthouse_forward(&light, &q.view(), &k.view(), &k.view(), &options).unwrap();
        let g = lighthouse_backward(&light, &out, &q.view(), &options).unwrap();
        (out.o, g)
    };
    assert!(run(1) == run(2) && run(1) == run(5));
    let refused = lighthouse_forward(&light, &k.view(), &k.view(), &k.view(), &Options::default()).unwrap_err();
    assert!(refused.to_string().starts_with("`q` has shape [1, 256, 1, 16]"), "{refused}");
}
