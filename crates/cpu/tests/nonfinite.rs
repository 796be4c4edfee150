//! NaN and infinities: a row says so where it sees them, and nothing else knows of them.

use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::{Verdict, check_backward, check_forward};
use fulgurite_core::expr::{Expr, score, select};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Gradients, Inputs, Problem, Saved, Tensor};
use fulgurite_cpu::{Isa, Options, backward, forward};

/// What is wrong with a case on an instruction set. `margin` is 1 for the tolerance rule itself.
fn failures(case: &Case, isa: Isa, margin: f64) -> Vec<String> {
    let bound = case.bound();
    let options = Options { isa: Some(isa), ..Options::default() };
    let mut result = Forward::zeros(case.problem()).unwrap();
    forward(&bound, &mut result.outputs(), &options);
    let saved = Saved { d_lse: case.d_lse(), ..result.saved(case.d_o()) };
    let mut gradients = Gradients::zeros(case.problem()).unwrap();
    backward(&bound, &saved, &mut gradients.outputs(), &options);
    let mut verdicts = check_forward(&bound, &result, 1);
    verdicts.extend(check_backward(&bound, &saved, &gradients, 1));
    // What is left of terms around 1 that cancel, in f32; and the error of a polynomial of degree 3, which straightforward
    // code gives to other elements.
    let rest = if case.features.contains(&"exp") { 2e-3 } else { 4e-6 };
    let is_right = |v: &Verdict| v.ok() || margin > 1.0 && v.is_within(margin, rest);
    let failed = verdicts.into_iter().filter(|(_, v)| !is_right(v));
    failed.map(|(name, v)| format!("{case} {isa:?} {:?}: {name}: {v}", case.features)).collect()
}

/// How many seeds, from which on: more of them in long tests (`FULGURITE_SEEDS=0:5000`).
fn seeds() -> std::ops::Range<u64> {
    let text = std::env::var("FULGURITE_SEEDS").unwrap_or_else(|_| "0:60".into());
    let parse = |x: &str| x.parse::<u64>().expect("FULGURITE_SEEDS is FROM:TO");
    text.split_once(':').map(|(from, to)| parse(from)..parse(to)).expect("FULGURITE_SEEDS is FROM:TO")
}

/// The instruction sets in turn; in long tests each problem goes through all of them.
#[test]
fn random_problems_leak_nothing() {
    let (all, long) = (Isa::available(), std::env::var_os("FULGURITE_LONG").is_some());
    let (mut failed, mut planted) = (Vec::new(), 0);
    for seed in seeds() {
        let dtype = DType::FLOATS[seed as usize % 3];
        // Wide heads and long sequences first; of those that follow there may be tens of thousands.
        let (case, margin) = match seed {
            0..60 => (cases::random_nonfinite(seed, dtype), 1.0),
            _ => (cases::random_nonfinite_short(seed, dtype), 8.0),
        };
        planted += usize::from(case.is_nonfinite());
        let turn = (seed / 3) as usize % all.len();
        for &isa in if long { &all[..] } else { &all[turn..=turn] } {
            failed.extend(failures(&case, isa, margin));
        }
    }
    println!("{planted} problems hold NaN or infinities; {:?}", if long { &all[..] } else { &[] });
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

/// A modifier without a value at score 0, and lengths that do not fill the tiles: lanes that fill them have score 0.
#[test]
fn lanes_that_fill_a_tile_take_no_part() {
    let s = score;
    let modifiers = [Expr::from(1.0) / s(), s() + s() / s().abs(), s() / (s() * s()).sqrt()];
    let mut failed = Vec::new();
    for (n, modifier) in modifiers.into_iter().enumerate() {
        for dtype in DType::FLOATS {
            for q_len in (1..=33).chain([63, 64, 65, 100]) {
                let problem = Problem::builder()
                    .dense(1, q_len, 40)
                    .heads(1, 1)
                    .head_dim(16)
                    .dtype(dtype)
                    .score_mod(modifier.clone())
                    .build()
                    .unwrap();
                let mut rng = Rng::new(q_len as u64);
                let mut draw = |n: usize| {
                    let values: Vec<f64> = (0..n * 16).map(|_| 0.5 + rng.uniform()).collect();
                    Tensor::from_f64(dtype, &values, &[1, n, 1, 16]).unwrap()
                };
                let (q, k, v, d_o) = (draw(q_len), draw(40), draw(40), draw(q_len));
                let inputs = Inputs::new(q.view(), k.view(), v.view());
                let bound = inputs.bind(&problem).unwrap();
                for isa in Isa::available() {
                    let options = Options { isa: Some(isa), ..Options::default() };
                    let mut result = Forward::zeros(&problem).unwrap();
                    forward(&bound, &mut result.outputs(), &options);
                    let saved = result.saved(d_o.view());
                    let mut gradients = Gradients::zeros(&problem).unwrap();
                    backward(&bound, &saved, &mut gradients.outputs(), &options);
                    let verdicts = check_backward(&bound, &saved, &gradients, 1);
                    let wrong = verdicts.into_iter().filter(|(_, v)| v.misplaced > 0);
                    failed.extend(wrong.map(|(name, v)| format!("{n} {dtype} {q_len} {isa:?} {name}: {v}")));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

/// A modifier that gives NaN, and one that hides everything: the first is NaN in o and LSE, the second a row without keys.
#[test]
fn nan_scores_are_told_from_no_keys() {
    for dtype in DType::FLOATS {
        for (q_len, k_len) in [(1, 1), (1, 700), (3, 90), (40, 130), (64, 128), (130, 1300)] {
            let nan = select(fulgurite_core::expr::q().equals(0), f32::NAN, f32::NEG_INFINITY);
            let problem = Problem::builder()
                .dense(1, q_len, k_len)
                .heads(2, 1)
                .head_dim(32)
                .dtype(dtype)
                .score_mod(score() * 0.0 + nan)
                .build()
                .unwrap();
            let tensor = |n: usize, heads: usize| {
                Tensor::from_f64(dtype, &vec![0.5; n * heads * 32], &[1, n, heads, 32]).unwrap()
            };
            let (q, k, v) = (tensor(q_len, 2), tensor(k_len, 1), tensor(k_len, 1));
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let bound = inputs.bind(&problem).unwrap();
            for isa in Isa::available() {
                let mut result = Forward::zeros(&problem).unwrap();
                forward(&bound, &mut result.outputs(), &Options { isa: Some(isa), ..Options::default() });
                let (o, lse) = (result.o.view().to_f64(), result.lse.view().to_f64());
                let told = format!("{dtype} {q_len} {k_len} {isa:?}");
                assert!(o[..64].iter().all(|x| x.is_nan()) && o[64..].iter().all(|&x| x == 0.0), "{told}");
                for (i, x) in lse.iter().enumerate() {
                    assert!(if i % q_len == 0 { x.is_nan() } else { *x == f64::NEG_INFINITY }, "{told}: {i}: {x}");
                }
            }
        }
    }
}

/// Rows whose scores are all very low, as additive masks make them: weights still add up to 1, so that what dV gets is dO.
#[test]
fn very_low_rows_are_normalised() {
    for dtype in DType::FLOATS {
        for (low, sinks) in [(-1e9, false), (f64::from(f32::MIN) / 2.0, false), (-1e9, true)] {
            let (q_len, k_len, d) = (37, 150, 16);
            let mut builder = Problem::builder().dense(1, q_len, k_len).heads(1, 1).head_dim(d).dtype(dtype);
            builder = builder.bias([1, 1, q_len, 1], DType::F32, false);
            if sinks {
                builder = builder.sinks();
            }
            let problem = builder.build().unwrap();
            let mut rng = Rng::new(3);
            let mut draw = |n: usize| Tensor::from_f64(dtype, &rng.normals(n * d, 1.0), &[1, n, 1, d]).unwrap();
            let (q, k, v, d_o) = (draw(q_len), draw(k_len), draw(k_len), draw(q_len));
            let bias: Vec<f64> = (0..q_len).map(|i| if i % 3 == 1 { low } else { 0.0 }).collect();
            let bias = Tensor::from_f64(DType::F32, &bias, &[1, 1, q_len, 1]).unwrap();
            let sink = Tensor::from_f64(DType::F32, &[-40.0], &[1]).unwrap();
            let mut inputs = Inputs::new(q.view(), k.view(), v.view()).aux("bias", bias.view());
            if sinks {
                inputs = inputs.sinks(sink.view());
            }
            let bound = inputs.bind(&problem).unwrap();
            for isa in Isa::available() {
                let options = Options { isa: Some(isa), ..Options::default() };
                let mut result = Forward::zeros(&problem).unwrap();
                forward(&bound, &mut result.outputs(), &options);
                let mut gradients = Gradients::zeros(&problem).unwrap();
                backward(&bound, &result.saved(d_o.view()), &mut gradients.outputs(), &options);
                let column = |x: &Tensor, keep: &dyn Fn(usize) -> bool| -> f64 {
                    let all = x.view().to_f64();
                    all.chunks_exact(d).enumerate().filter(|(i, _)| keep(*i)).map(|(_, row)| row[0]).sum()
                };
                // With a sink, low rows give it all their weight.
                let want = column(&d_o, &|i| !(sinks && i % 3 == 1));
                let got = column(&gradients.d_v, &|_| true);
                let allowed = if dtype == DType::F32 { 1e-3 } else { 0.15 };
                assert!((got - want).abs() < allowed, "{dtype} {low} {isa:?}: {got} for {want}");
            }
        }
    }
}
