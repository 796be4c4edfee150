//! Lighthouse against its definition with the same selection.

use fulgurite_core::compare::Rule;
use fulgurite_core::lighthouse::{Lighthouse, oracle};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Tensor};
use fulgurite_cpu::{Isa, Options, lighthouse_backward, lighthouse_forward};

fn head(t: &Tensor, batch: usize, head: usize) -> Vec<f64> {
    let (view, shape) = (t.view(), t.shape());
    (0..shape[1])
        .flat_map(|i| (0..shape[3]).map(move |c| (i, c)))
        .map(|(i, c)| view.get(&[batch, i, head, c]))
        .collect()
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    let long = std::env::var_os("FULGURITE_LONG").is_some();
    for seed in 0..if long { 1000 } else { 200 } {
        let mut rng = Rng::new(seed);
        let dtype = DType::FLOATS[seed as usize % 3];
        let (levels, pool, tile) = (rng.range(1..4), rng.pick(&[2, 4]), rng.pick(&[2, 4]));
        let coarsest = pool * tile * rng.range(1..3);
        let budget = tile * rng.range(1..coarsest / tile + 1);
        let len = coarsest * pool.pow(levels as u32 - 1);
        let (batch, kv, group) = (rng.range(1..3), rng.range(1..3), rng.range(1..3));
        let dims = [rng.pick(&[3, 8, 17]), rng.pick(&[2, 16])];
        let light = Lighthouse::new([batch, len, kv * group, kv], dims, levels, pool, budget, tile).unwrap();
        let light = light.dtype(dtype).unwrap();
        let mut random =
            |shape: &[usize]| Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
        let (q, k, v) = (random(&light.q_shape()), random(&light.k_shape()), random(&light.v_shape()));
        let d_o = random(&light.o_shape());
        let isa = Isa::available()[(seed / 3) as usize % Isa::available().len()];
        let options = Options { isa: Some(isa), ..Options::default() };
        let out = lighthouse_forward(&light, &q.view(), &k.view(), &v.view(), &options).unwrap();
        let g = lighthouse_backward(&light, &out, &d_o.view(), &options).unwrap();
        let rule = Rule { dtype, softcap: false, gradient: false, terms: None };
        for b in 0..batch {
            for key_head in 0..kv {
                let mut sums = [vec![], vec![], vec![], vec![]];
                for h in key_head * group..(key_head + 1) * group {
                    let own = [head(&q, b, h), head(&k, b, key_head), head(&v, b, key_head)];
                    let given = head(&d_o, b, h);
                    let entries = &out.entries[b * kv * group + h];
                    let run = |rounded| oracle(&light, entries, [&own[0], &own[1], &own[2]], Some(&given), rounded);
                    let (want, plain) = (run(None), run(Some(dtype)));
                    for (name, got, i) in [("o", &out.o, 0), ("d_q", &g.d_q, 1)] {
                        let verdict = rule.judge(&head(got, b, h), &want[i], &plain[i]);
                        if !verdict.ok() {
                            failed.push(format!("{seed} {dtype} {isa:?} {name}: {verdict}"));
                        }
                    }
                    for (i, from) in [(0, &want[2]), (1, &plain[2]), (2, &want[3]), (3, &plain[3])] {
                        sums[i].resize(from.len(), 0.0);
                        sums[i].iter_mut().zip(from).for_each(|(s, x)| *s += x);
                    }
                }
                for (name, got, i) in [("d_k", &g.d_k, 0), ("d_v", &g.d_v, 2)] {
                    let verdict = rule.judge(&head(got, b, key_head), &sums[i], &sums[i + 1]);
                    if !verdict.ok() {
                        failed.push(format!("{seed} {dtype} {isa:?} {name}: {verdict}"));
                    }
                }
            }
        }
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
