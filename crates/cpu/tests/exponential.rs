//! The table exponential in one walk: against the oracle, and against its formula.

use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::random::Rng;
use fulgurite_core::{Bound, DType, Exp, Forward, Gradients, Inputs, Mask, Problem, ProblemBuilder, Rescale, Tensor};
use fulgurite_cpu::{Isa, Options, backward, forward};

/// The values of the function at a score: e^-n of a whole number, times the cubic of TurboAttention.
fn formula(score: f64) -> f64 {
    let fraction = score.ceil() - score;
    let cubic = ((-0.1025 * fraction + 0.4626) * fraction - 0.9922) * fraction + 0.9996;
    score.ceil().exp() * cubic
}

fn tensor(rng: &mut Rng, dtype: DType, shape: &[usize], sigma: f64) -> Tensor {
    Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), sigma), shape).unwrap()
}

fn run(bound: &Bound<'_>, options: &Options) -> Forward {
    let mut result = Forward::zeros(bound.problem()).unwrap();
    forward(bound, &mut result.outputs(), options);
    result
}

/// Odd shapes, decode among them.
fn drawn(rng: &mut Rng) -> ProblemBuilder {
    let kv = rng.range(1..3);
    let q_len = if rng.chance(0.3) { rng.range(1..5) } else { rng.range(1..200) };
    let masks = [Mask::none(), Mask::causal(), Mask::window(Some(40), Some(7)), Mask::window(None, -9)];
    let mask = masks.into_iter().nth(rng.range(0..4)).unwrap();
    let builder = Problem::builder().dense(rng.range(1..3), q_len, rng.range(1..700)).heads(kv * rng.pick(&[1, 3]), kv);
    let builder = builder.head_dims(rng.range(1..90), rng.range(1..80)).mask(mask);
    let builder = if rng.chance(0.2) { builder.softcap(6.0) } else { builder };
    let builder = if rng.chance(0.2) { builder.scale(0.37) } else { builder };
    builder.dtype(rng.pick(&[DType::F32, DType::Bf16, DType::F16])).exp(Exp::SasOnline)
}

#[test]
fn random_problems_agree_with_the_oracle_on_every_instruction_set() {
    let mut rng = Rng::new(57);
    for case in 0..16 {
        let problem = drawn(&mut rng).build().unwrap();
        let sigma = rng.pick(&[1.0, 3.0]);
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
        let [q, k, v, d_o] =
            [0, 1, 2, 3].map(|i| tensor(&mut rng, problem.dtype(), &shapes[i], if i == 0 { sigma } else { 1.0 }));
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let bound = inputs.bind(&problem).unwrap();
        for isa in Isa::available() {
            let options = Options { isa: Some(isa), ..Options::default() };
            let result = run(&bound, &options);
            let saved = result.saved(d_o.view());
            let mut gradients = Gradients::zeros(&problem).unwrap();
            backward(&bound, &saved, &mut gradients.outputs(), &options);
            let verdicts = check_forward(&bound, &result, case);
            for (name, verdict) in verdicts.into_iter().chain(check_backward(&bound, &saved, &gradients, case)) {
                assert!(verdict.ok(), "case {case} {isa:?} {problem:?} {name}: {verdict}");
            }
            let one = Options { threads: Some(1), rescale: Some(Rescale::Lazy(8.0)), ..options };
            assert_eq!(run(&bound, &one).o.view().to_f64(), result.o.view().to_f64(), "case {case} {isa:?}");
        }
    }
}

/// Rows of one query and of many, whose maximum grows in every block, each against the sums of the formula.
#[test]
fn results_are_those_of_the_formula_whatever_the_walk() {
    let (keys, dim) = (1400, 8);
    let mut rng = Rng::new(3);
    for q_len in [1, 90] {
        let problem = Problem::builder().dense(1, q_len, keys).heads(1, 1).head_dim(dim).scale(1.0).exp(Exp::SasOnline);
        let problem = problem.build().unwrap();
        // Scores rise by 0.05 a key: to 70, so that most keys are below the table in the end.
        let q: Vec<f64> = (0..q_len * dim).map(|i| f64::from(i % dim == 0)).collect();
        let k: Vec<f64> = (0..keys * dim).map(|i| if i % dim == 0 { (i / dim) as f64 * 0.05 } else { 0.0 }).collect();
        let [q, k] = [(q, q_len), (k, keys)].map(|(x, n)| Tensor::from_f64(DType::F32, &x, &[1, n, 1, dim]).unwrap());
        let v = tensor(&mut rng, DType::F32, &[1, keys, 1, dim], 1.0);
        let (scores, values) = (k.view().to_f64(), v.view().to_f64());
        let weights: Vec<f64> = (0..keys).map(|key| formula(scores[key * dim])).collect();
        let total: f64 = weights.iter().sum();
        let bound_inputs = Inputs::new(q.view(), k.view(), v.view());
        let bound = bound_inputs.bind(&problem).unwrap();
        for isa in Isa::available() {
            let result = run(&bound, &Options { isa: Some(isa), ..Options::default() });
            let (o, lse) = (result.o.view().to_f64(), result.lse.view().to_f64());
            for column in 0..dim {
                let want: f64 = (0..keys).map(|key| weights[key] * values[key * dim + column]).sum::<f64>() / total;
                assert!((o[column] - want).abs() <= 2e-6, "{isa:?} {q_len} {column}: {} for {want}", o[column]);
            }
            assert!((lse[0] - total.ln()).abs() <= 1e-5, "{isa:?} {q_len}: {} for {}", lse[0], total.ln());
            // The exact exponential differs by more than any rounding.
            let exact: f64 = scores.iter().step_by(dim).map(|s| s.exp()).sum::<f64>().ln();
            assert!((lse[0] - exact).abs() > 1e-5, "{isa:?}: {exact}");
        }
    }
}

/// Each value at and around the borders of the table: keys alone, and beside a key that sets the maximum.
#[test]
fn borders_of_the_table() {
    let scores = [0.0, -0.0, 1.0, -1.0, 0.999_999_9, -0.999_999_9, 1.000_000_1, 30.0, -30.5, 1e9, -1e9, 1e-30, -3e38];
    let problem = |keys| Problem::builder().dense(1, 1, keys).heads(1, 1).head_dim(1).scale(1.0).exp(Exp::SasOnline);
    let pair = |isa: Isa, scores: &[f64]| {
        let problem = problem(scores.len()).build().unwrap();
        let [q, k] = [&[1.0][..], scores].map(|x| Tensor::from_f64(DType::F32, x, &[1, x.len(), 1, 1]).unwrap());
        let values: Vec<f64> = (0..scores.len()).map(|i| (i == 0) as u8 as f64).collect();
        let v = Tensor::from_f64(DType::F32, &values, &[1, scores.len(), 1, 1]).unwrap();
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        run(&inputs.bind(&problem).unwrap(), &Options { isa: Some(isa), ..Options::default() }).o.view().to_f64()[0]
    };
    for isa in Isa::available() {
        for &a in &scores {
            let a = f64::from(a as f32);
            assert_eq!(pair(isa, &[a]), 1.0, "{isa:?} {a}");
            for other in [a - 1.0, a - 7.25, a - 31.0, a - 32.5, a - 70.0] {
                let other = f64::from(other as f32);
                let top = a.ceil().max(other.ceil());
                let want = formula(a - top) / (formula(a - top) + formula(other - top));
                let got = pair(isa, &[a, other]);
                assert!((got - want).abs() <= 3e-7, "{isa:?} {a} {other}: {got} for {want}");
            }
        }
        assert!(pair(isa, &[f64::NAN, 1.0]).is_nan() && pair(isa, &[f64::INFINITY, 1.0]).is_nan(), "{isa:?}");
        assert_eq!(pair(isa, &[f64::NEG_INFINITY, 1.0]), 0.0, "{isa:?}");
        assert_eq!(pair(isa, &[f64::NEG_INFINITY]), 0.0, "{isa:?}");
    }
}
