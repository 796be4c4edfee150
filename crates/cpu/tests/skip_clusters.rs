//! Block skipping where clusters of keys choose the tiles: the engine keeps what the definition keeps, and computes attention with it.

use fulgurite_core::compare::check_forward;
use fulgurite_core::random::Rng;
use fulgurite_core::skip::{HeadClass, Lambda, Proxy, Skip, SkipProblem};
use fulgurite_core::{DType, Forward, Inputs, Mask, Problem, Tensor};
use fulgurite_cpu::{Isa, Options, skip_forward};

#[test]
fn random_clusters_agree_with_the_oracle() {
    for seed in 0..24u64 {
        let mut rng = Rng::new(seed);
        let (dtype, kv, batch) = (DType::FLOATS[seed as usize % 3], rng.range(1..3), rng.range(1..3));
        let heads = kv * rng.range(1..3);
        let (q_len, d) = (rng.pick(&[5, 64, 130, 257]), rng.pick(&[8, 40]));
        let k_len = q_len + rng.pick(&[0, 33]);
        let proxy = match seed % 2 {
            0 => Proxy::Mass { mass: 0.8, similarity: 0.9 },
            _ => Proxy::Top { share: 0.3, similarity: 0.9 },
        };
        let skip = Skip {
            classes: vec![rng.pick(&[HeadClass::Dense, HeadClass::Log])],
            proxy: Some(proxy),
            lambda: rng.pick(&[None, Some(Lambda::Fixed(1e-3))]),
            tile: [rng.pick(&[16, 64]), rng.pick(&[16, 64])],
            first_tile: rng.chance(0.5),
        };
        let builder = Problem::builder().dense(batch, q_len, k_len).heads(heads, kv).head_dim(d).dtype(dtype);
        let problem = SkipProblem::new(builder.mask(Mask::causal()), skip).unwrap();
        let mut tensor = |shape: Vec<usize>, sigma: f64| {
            Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), sigma), &shape).unwrap()
        };
        let base = problem.base();
        let [q, k, v] =
            [(base.q_shape(), 3.0), (base.k_shape(), 1.0), (base.v_shape(), 1.0)].map(|(s, x)| tensor(s, x));
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let clusters = rng.range(1..9) as u64;
        let labels: Vec<u32> = (0..batch * k_len * kv).map(|_| (rng.bits() % clusters) as u32).collect();
        let bound = problem.bind(&inputs).unwrap().with_clusters(&labels).unwrap();
        for isa in Isa::available() {
            let options = Options { isa: Some(isa), ..Options::default() };
            let mut out = Forward::zeros(base).unwrap();
            let kept = skip_forward(&bound, &mut out.outputs(), &options);
            let (mut row, defined) = (0, bound.decide());
            let close = if dtype == DType::F32 { 1e-3 } else { 0.1 };
            bound.each(|s, head, tile| {
                let list = kept.kept.lists(s.batch, head, tile).0;
                for &(t, margin) in defined[row].iter().filter(|x| x.1.abs() > close) {
                    assert_eq!(list.contains(&(t as i32)), margin >= 0.0, "{seed} {isa:?} head {head} keys {t}");
                }
                assert!(list.iter().all(|&t| defined[row].iter().any(|x| x.0 == t as usize)), "{seed} {isa:?}");
                row += 1;
            });
            let inputs = inputs.clone().block_mask(&kept.kept);
            let meaning = inputs.bind(problem.meaning()).unwrap();
            for (what, verdict) in check_forward(&meaning, &out, 1) {
                assert!(verdict.ok(), "{seed} {isa:?} {dtype} {what}: {verdict}");
            }
        }
    }
}
