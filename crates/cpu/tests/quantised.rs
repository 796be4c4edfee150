//! Quantised products against their definition in f64 on the same codes.

use fulgurite_core::compare::{Verdict, check_backward, check_forward};
use fulgurite_core::format::{Granularity, GroupFormat};
use fulgurite_core::oracle;
use fulgurite_core::random::Rng;
use fulgurite_core::{
    DType, Delta, Exp, Forward, Gradients, GroupAttention, Inputs, Int8Attention, Mask, Precision, Problem,
    ProblemBuilder, Tensor,
};
use fulgurite_cpu::{Isa, Options, backward, forward};

struct Call {
    problem: Problem,
    tensors: [Tensor; 4],
}

impl Call {
    fn new(builder: ProblemBuilder, seed: u64, sigma: f64) -> Call {
        let problem = builder.build().unwrap();
        let mut rng = Rng::new(seed);
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
        let tensors = shapes.map(|shape| {
            let n = shape.iter().product();
            Tensor::from_f64(problem.dtype(), &rng.normals(n, sigma), &shape).unwrap()
        });
        Call { problem, tensors }
    }
    fn inputs(&self) -> Inputs<'_> {
        let [q, k, v, _] = &self.tensors;
        Inputs::new(q.view(), k.view(), v.view())
    }
    fn forward(&self, options: &Options) -> Forward {
        let mut result = Forward::zeros(&self.problem).unwrap();
        forward(&self.inputs().bind(&self.problem).unwrap(), &mut result.outputs(), options);
        result
    }
    fn backward(&self, result: &Forward, options: &Options) -> Gradients {
        let mut gradients = Gradients::zeros(&self.problem).unwrap();
        let bound = self.inputs().bind(&self.problem).unwrap();
        backward(&bound, &result.saved(self.tensors[3].view()), &mut gradients.outputs(), options);
        gradients
    }
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

fn judge(what: &str, verdicts: Vec<(String, Verdict)>) {
    for (name, verdict) in verdicts {
        assert!(verdict.ok(), "{what} {name}: {verdict}");
    }
}

fn isas() -> Vec<Options> {
    Isa::available().into_iter().map(|isa| Options { isa: Some(isa), ..Options::default() }).collect()
}

/// Odd shapes of every kind.
fn shapes(rng: &mut Rng) -> ProblemBuilder {
    let (d, dv) = (rng.range(1..100), rng.range(1..80));
    let kv = rng.range(1..3);
    let builder = Problem::builder().dense(2, rng.range(1..150), rng.range(1..300)).heads(kv * rng.pick(&[1, 3]), kv);
    let mask = rng.pick(&[0, 1, 2]);
    let mask = [Mask::none(), Mask::causal(), Mask::window(Some(40), Some(7))].into_iter().nth(mask).unwrap();
    builder.head_dims(d, dv).mask(mask).dtype(rng.pick(&[DType::F32, DType::Bf16]))
}

#[test]
fn int8_is_its_definition_on_every_instruction_set() {
    let mut rng = Rng::new(11);
    for case in 0..8 {
        let spec = Int8Attention {
            q: rng.pick(&[Granularity::Block(64), Granularity::Token, Granularity::ThreadQuery]),
            k: rng.pick(&[Granularity::Block(64), Granularity::Block(5), Granularity::ThreadKey]),
            block: rng.pick(&[64, 128, 256]),
            smooth_k: rng.chance(0.7),
        };
        let mut builder = shapes(&mut rng).precision(Precision::Int8(spec));
        if case % 4 == 3 {
            builder = builder.exp(Exp::Sas { threshold: -10.0 });
        }
        if case % 5 == 2 {
            builder = builder.softcap(3.0);
        }
        let call = Call::new(builder, case, 1.5);
        let inputs = call.inputs();
        let bound = inputs.bind(&call.problem).unwrap();
        for options in isas() {
            let what = format!("case {case} {:?} {:?}", options.isa, spec);
            judge(&what, check_forward(&bound, &call.forward(&options), 1));
        }
    }
}

#[test]
fn int8_is_near_exact_attention() {
    let base = || Problem::builder().dense(1, 1024, 1024).heads(1, 1).head_dim(128);
    for exp in [Exp::Auto, Exp::Sas { threshold: -10.0 }] {
        let call = Call::new(base().precision(Precision::Int8(Int8Attention::default())).exp(exp), 3, 1.0);
        let exact = Call::new(base(), 3, 1.0).forward(&Options::default());
        let found = cosine(&call.forward(&Options::default()).o.view().to_f64(), &exact.o.view().to_f64());
        assert!(found > 0.999, "{exp}: cosine {found}");
    }
}

#[test]
fn minifloats_are_their_definition_on_every_instruction_set() {
    let mut rng = Rng::new(12);
    let formats = [Some(GroupFormat::NVFP4), Some(GroupFormat::Mxfp4), Some(GroupFormat::Mxfp8), None];
    for case in 0..6 {
        let precision = Precision::Groups(GroupAttention {
            qk: rng.pick(&formats),
            pv: rng.pick(&formats[..3]),
            delta: rng.pick(&[Delta::Exact, Delta::Rounded]),
        });
        let call = Call::new(shapes(&mut rng).precision(precision), case, 1.0);
        let inputs = call.inputs();
        let bound = inputs.bind(&call.problem).unwrap();
        for options in isas() {
            let what = format!("case {case} {:?} {precision}", options.isa);
            let got = call.forward(&options);
            judge(&what, check_forward(&bound, &got, 1));
            let saved = got.saved(call.tensors[3].view());
            judge(&what, check_backward(&bound, &saved, &call.backward(&got, &options), 1));
        }
    }
}

#[test]
fn without_formats_it_is_plain_attention_bit_for_bit() {
    let base = || Problem::builder().dense(1, 100, 130).heads(2, 1).head_dim(40).mask(Mask::causal());
    let (plain, other) =
        (Call::new(base(), 5, 1.0), Call::new(base().precision(Precision::groups(None, None)), 5, 1.0));
    let (a, b) = (plain.forward(&Options::default()), other.forward(&Options::default()));
    assert_eq!(a, b);
    assert_eq!(plain.backward(&a, &Options::default()), other.backward(&b, &Options::default()));
}

#[test]
fn fp4_is_as_near_to_exact_attention_as_the_formats_allow() {
    let base = || Problem::builder().dense(1, 64, 4096).heads(1, 1).head_dim(128);
    let exact = Call::new(base(), 9, 1.0).forward(&Options::default()).o.view().to_f64();
    for (text, want) in [("nvfp4/native", 0.9905), ("nvfp4", 0.9817)] {
        let call = Call::new(base().precision(text.parse().unwrap()), 9, 1.0);
        let found = cosine(&call.forward(&Options::default()).o.view().to_f64(), &exact);
        assert!((found - want).abs() < 0.003, "{text}: cosine {found}, want {want}");
    }
}

/// Rows of dS sum to 0 where D comes from exact weights: then a shift of all keys by one vector moves nothing.
#[test]
fn rows_of_ds_sum_to_zero_with_the_second_output() {
    let sums = |delta| {
        let spec = GroupAttention { qk: None, pv: Some(GroupFormat::NVFP4), delta };
        let builder = Problem::builder().dense(1, 64, 96).heads(1, 1).head_dim(8).precision(Precision::Groups(spec));
        let mut call = Call::new(builder, 21, 2.0);
        // All keys alike in the last channel: d_q there is the sum of dS times that value.
        let mut k = call.tensors[1].view().to_f64();
        k.chunks_exact_mut(8).for_each(|row| row[7] = 1.0);
        call.tensors[1] = Tensor::from_f64(DType::F32, &k, &call.problem.k_shape()).unwrap();
        let result = call.forward(&Options::default());
        let d_q = call.backward(&result, &Options::default()).d_q.view().to_f64();
        let scale = f64::from(call.problem.scale());
        d_q.chunks_exact(8).map(|row| (row[7] / scale).abs()).fold(0.0, f64::max)
    };
    let (exact, rounded) = (sums(Delta::Exact), sums(Delta::Rounded));
    assert!(exact < 2e-5, "with the second output {exact}");
    assert!(rounded > 0.05, "without it {rounded}");
}

/// Straight through: gradients are those of exact attention where the rounded operands are, and there the oracle can be
/// stepped. d_v with rounded weights is left out: no function of exact weights has it as its derivative.
#[test]
fn gradients_are_finite_differences_at_the_rounded_operands() {
    let (rows, keys, dim) = (6, 21, 20);
    let base = || Problem::builder().dense(1, rows, keys).heads(1, 1).head_dim(dim);
    for (qk, pv) in [(true, false), (false, true), (true, true)] {
        let format = |on: bool| on.then_some(GroupFormat::NVFP4);
        let call = Call::new(base().precision(Precision::groups(format(qk), format(pv))), 31, 1.5);
        let result = call.forward(&Options::default());
        let own = call.backward(&result, &Options::default());
        let mut plain = Call::new(base(), 31, 1.5);
        for (i, tensor) in plain.tensors[..3].iter_mut().enumerate() {
            let mut x: Vec<f32> = tensor.view().to_f64().iter().map(|&x| x as f32).collect();
            match (i, qk, pv) {
                (0 | 1, true, _) => GroupFormat::NVFP4.fake_rows(&mut x, dim),
                (2, _, true) => GroupFormat::NVFP4.fake_columns(&mut x, dim),
                _ => (),
            }
            *tensor = Tensor::new(x, tensor.shape()).unwrap();
        }
        let d_o = plain.tensors[3].view().to_f64();
        let loss = |plain: &Call| -> f64 {
            let inputs = plain.inputs();
            let o = oracle::forward(&inputs.bind(&plain.problem).unwrap()).o;
            o.iter().zip(&d_o).map(|(o, d)| o * d).sum()
        };
        let got = [own.d_q, own.d_k, own.d_v].map(|t| t.view().to_f64());
        for (i, got) in got.iter().enumerate().filter(|(i, _)| *i < 2 || !pv) {
            let largest = got.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            let x = plain.tensors[i].view().to_f64();
            for at in (0..x.len()).step_by(7) {
                let mut moved = |h: f64| {
                    let mut y = x.clone();
                    y[at] += h;
                    plain.tensors[i] = Tensor::from_f64(DType::F32, &y, plain.tensors[i].shape()).unwrap();
                    (loss(&plain), plain.tensors[i].view().to_f64()[at])
                };
                let ((above, right), (below, left)) = (moved(1e-3), moved(-1e-3));
                moved(0.0);
                let want = (above - below) / (right - left);
                let off = (got[at] - want).abs();
                assert!(off <= 1e-4 * largest, "tensor {i} at {at}, {qk} {pv}: {} for {want}", got[at]);
            }
        }
    }
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    for text in ["int8", "nvfp4"] {
        let mut call = Call::new(
            Problem::builder().dense(1, 3, 5).heads(1, 1).head_dim(4).precision(text.parse().unwrap()),
            1,
            1.0,
        );
        let mut v = call.tensors[2].view().to_f64();
        v[6] = f64::NAN;
        call.tensors[2] = Tensor::from_f64(DType::F32, &v, &call.problem.v_shape()).unwrap();
        let found = call.inputs().bind(&call.problem).map(|_| ()).unwrap_err().to_string();
        assert!(found.starts_with("`v`: element 6 is NaN, allowed: finite numbers"), "{found}");
    }
}
