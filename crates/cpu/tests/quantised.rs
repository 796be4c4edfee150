//! Quantised products against their definition in f64 on the same codes.

use fulgurite_core::compare::{Verdict, check_backward, check_forward};
use fulgurite_core::format::{Granularity, GroupFormat};
use fulgurite_core::oracle;
use fulgurite_core::random::Rng;
use fulgurite_core::{
    DType, Delta, Exp, Forward, Gradients, GroupAttention, Inputs, Int8Attention, Mask, Precision, Problem,
    ProblemBuilder, Tensor,
};
use fulgurite_cpu::{Isa, Options, PackedQkv, backward, forward, forward_inputs, packed_forward};

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

/// Numbers whose distance from the mean is none: they take the largest code, and are not mistaken for what is not finite.
#[test]
fn differences_that_overflow_are_not_refused() {
    let mut call = Call::new(
        Problem::builder().dense(1, 2, 3).heads(1, 1).head_dim(1).precision("int8".parse().unwrap()),
        1,
        1e-38,
    );
    let k = [f64::from(f32::MAX), f64::from(f32::MAX), f64::from(f32::MIN)];
    call.tensors[1] = Tensor::from_f64(DType::F32, &k, &call.problem.k_shape()).unwrap();
    let mut out = Forward::zeros(&call.problem).unwrap();
    forward_inputs(&call.problem, &call.inputs(), &mut out.outputs(), &Options::default()).unwrap();
    // Scores overflow too: NaN, where it belongs.
    assert_eq!(format!("{out:?}"), format!("{:?}", call.forward(&Options::default())));
    for place in 0..3 {
        for bad in [f64::NAN, f64::INFINITY] {
            let mut x = call.tensors[place].view().to_f64();
            let good = call.tensors[place].clone();
            x[1] = bad;
            call.tensors[place] = Tensor::from_f64(DType::F32, &x, good.shape()).unwrap();
            let found = forward_inputs(&call.problem, &call.inputs(), &mut out.outputs(), &Options::default());
            assert!(found.unwrap_err().to_string().contains("element 1 is"), "tensor {place}");
            call.tensors[place] = good;
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
        let mut out = Forward::zeros(&call.problem).unwrap();
        let late = forward_inputs(&call.problem, &call.inputs(), &mut out.outputs(), &Options::default()).unwrap_err();
        assert_eq!(late.to_string(), found);
    }
}

/// Codes that are expanded block by block give what tensors give that are rounded as they are read, to the bit.
#[test]
fn packed_operands_have_the_bits_of_rounded_tensors() {
    let mut rng = Rng::new(41);
    for (case, text) in ["nvfp4", "mxfp4", "mxfp8", "nvfp4/mxfp8", "mxfp8/nvfp4", "nvfp4"].into_iter().enumerate() {
        let builder = shapes(&mut rng).precision(text.parse().unwrap());
        let dtype = DType::FLOATS[case % 3];
        let call = Call::new(builder.dtype(dtype), case as u64, 1.3);
        let [q, k, v, _] = call.tensors.each_ref().map(|t| t.view());
        let packed = PackedQkv::new(&call.problem, &q, &k, &v).unwrap();
        for options in isas() {
            let want = call.forward(&options);
            let mut got = Forward::zeros(&call.problem).unwrap();
            packed_forward(&call.problem, &packed, &mut got.outputs(), &options).unwrap();
            assert_eq!(got, want, "{text} {dtype} {:?}", options.isa);
        }
        let [q, k, v] = packed.codes().map(Clone::clone);
        assert_eq!(PackedQkv::from_codes(&call.problem, q.clone(), k.clone(), v.clone()).unwrap(), packed);
        let found = PackedQkv::from_codes(&call.problem, q.clone(), k.clone(), q.clone()).unwrap_err().to_string();
        assert!(found.starts_with("`v` "), "{found}");
    }
}

#[test]
fn packed_operands_say_what_they_cannot_have() {
    let base = || Problem::builder().dense(1, 3, 5).heads(1, 1).head_dim(4);
    let refused = |builder: ProblemBuilder| {
        let call = Call::new(builder, 1, 1.0);
        let [q, k, v, _] = call.tensors.each_ref().map(|t| t.view());
        PackedQkv::new(&call.problem, &q, &k, &v).unwrap_err().to_string()
    };
    let nvfp4 = || base().precision(Precision::NVFP4);
    assert_eq!(
        refused(base().precision("int8".parse().unwrap())),
        "packed operands with precision int8:64, allowed: nvfp4, mxfp4, mxfp8 or two of them; use nvfp4"
    );
    assert!(refused(base().precision("nvfp4/native".parse().unwrap())).contains("a format for QK and one for PV"));
    assert!(refused(nvfp4().sinks()).contains("with sinks, allowed: q, k and v alone"));
    assert!(refused(nvfp4().alibi()).contains("auxiliary tensors"));
    let call = Call::new(nvfp4(), 1, 1.0);
    let [q, k, v, _] = call.tensors.each_ref().map(|t| t.view());
    let packed = PackedQkv::new(&call.problem, &q, &k, &v).unwrap();
    let other = Call::new(base().precision("mxfp4".parse().unwrap()), 1, 1.0).problem;
    let mut out = Forward::zeros(&other).unwrap();
    let found = packed_forward(&other, &packed, &mut out.outputs(), &Options::default()).unwrap_err();
    assert!(found.to_string().starts_with("`q` is in nvfp4, allowed: mxfp4"), "{found}");
    let longer = Call::new(base().dense(1, 4, 5).precision(Precision::NVFP4), 1, 1.0).problem;
    let mut out = Forward::zeros(&longer).unwrap();
    let found = packed_forward(&longer, &packed, &mut out.outputs(), &Options::default()).unwrap_err();
    assert!(found.to_string().starts_with("`q` has [3, 4] rows and columns, allowed: [4, 4]"), "{found}");
    let mut bad = v.to_f64();
    bad[2] = f64::INFINITY;
    let bad = Tensor::from_f64(DType::F32, &bad, &call.problem.v_shape()).unwrap();
    let found = PackedQkv::new(&call.problem, &q, &k, &bad.view()).unwrap_err().to_string();
    assert!(found.starts_with("`v`: element 2 is inf"), "{found}");
}
