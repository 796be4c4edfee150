//! Parallax against its oracle, and against attention where the probes are zero.

use fulgurite_core::parallax::{Parallax, ParallaxForward, ParallaxGradients, check};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Inputs, Mask, Problem, Tensor};
use fulgurite_cpu::{Isa, Options, forward, parallax_backward, parallax_forward};

struct Case {
    parallax: Parallax,
    q: Tensor,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    documents: [Tensor; 2],
    masked: bool,
}

impl Case {
    fn random(seed: u64, dtype: DType) -> Case {
        let mut rng = Rng::new(seed);
        // Where every row sees one key, all gradients but d_v are exactly 0 and the rule would allow no rounding.
        let (q_len, k_len) = (rng.pick(&[1, 2, 5, 17, 64, 70, 130]), rng.pick(&[5, 16, 65, 128, 140, 700]));
        let kv_heads = rng.range(1..3);
        let batch = rng.range(1..3);
        let masked = rng.chance(0.3);
        let mask = match rng.range(0..3) {
            0 => Mask::none(),
            1 => Mask::causal(),
            _ => Mask::window(Some(30), Some(3)),
        };
        let mask = if masked { mask.and(Mask::documents()) } else { mask };
        let builder = Problem::builder().dense(batch, q_len, k_len).heads(kv_heads * rng.range(1..4), kv_heads);
        let (d, dv) = (rng.pick(&[4, 16, 33, 64]), rng.pick(&[4, 16, 40]));
        let problem = builder.head_dims(d, dv).dtype(dtype).mask(mask).build().unwrap();
        let mut random = |shape: &[usize], sigma: f64| {
            Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), sigma), shape).unwrap()
        };
        let (q, r) = (random(&problem.q_shape(), 1.0), random(&problem.q_shape(), 0.3));
        let (k, v) = (random(&problem.k_shape(), 1.0), random(&problem.v_shape(), 1.0));
        let d_o = random(&problem.o_shape(), 1.0);
        let documents = [q_len, k_len].map(|n| {
            let ids: Vec<i32> = (0..batch * n).map(|i| (i % n * 2 / n) as i32).collect();
            Tensor::new(ids, &[batch, n]).unwrap()
        });
        Case { parallax: Parallax::new(problem).unwrap(), q, r, k, v, d_o, documents, masked }
    }

    fn inputs(&self) -> Inputs<'_> {
        let inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view());
        if !self.masked {
            return inputs;
        }
        inputs.aux("documents_q", self.documents[0].view()).aux("documents_k", self.documents[1].view())
    }

    fn forward(&self, r: &Tensor, options: &Options) -> ParallaxForward {
        let mut out = ParallaxForward::zeros(&self.parallax).unwrap();
        out.own.outputs().o.fill(f64::NAN);
        let inputs = self.inputs();
        parallax_forward(&self.parallax.bind(&inputs, r.view()).unwrap(), &mut out.outputs(), options);
        out
    }
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
        let case = Case::random(seed, DType::FLOATS[seed as usize % 3]);
        let options = options(seed);
        let out = case.forward(&case.r, &options);
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
        let case = Case::random(seed, DType::FLOATS[seed as usize % 3]);
        let options = options(seed);
        if options.isa == Some(Isa::Amx) && case.q.dtype() == DType::Bf16 {
            continue;
        }
        let zero = Tensor::zeros(case.q.dtype(), case.q.shape()).unwrap();
        let found = case.forward(&zero, &options);
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
    let case = Case::random(1, DType::F32);
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
