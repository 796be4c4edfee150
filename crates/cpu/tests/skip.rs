//! Block-skip attention: results against the oracle with the kept tiles, decisions against the definition, the bound.

use fulgurite_core::cases::variants::SkipCase;
use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::random::Rng;
use fulgurite_core::skip::{HeadClass, Lambda, Skip, SkipProblem};
use fulgurite_core::{DType, Forward, Gradients, Mask, Problem, Saved, Tensor};
use fulgurite_cpu::{Isa, Options, backward, forward, skip_forward};

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    let long = std::env::var_os("FULGURITE_LONG").is_some();
    for seed in 0..if long { 1000 } else { 200 } {
        let dtype = DType::FLOATS[seed as usize % 3];
        let case = SkipCase::random(seed, dtype);
        let (problem, d_o, inputs) = (&case.problem, &case.d_o, case.inputs());
        let bound = problem.bind(&inputs).unwrap();
        let isa = Isa::available()[(seed / 3) as usize % Isa::available().len()];
        let options = Options { isa: Some(isa), ..Options::default() };
        let mut out = Forward::zeros(problem.base()).unwrap();
        out.outputs().o.fill(f64::NAN);
        let kept = skip_forward(&bound, &mut out.outputs(), &options);
        // The decisions: as defined, but where a weight is as close to lambda as rounding is.
        let mut row = 0;
        let defined = bound.decide();
        let close = if dtype == DType::F32 { 1e-3 } else { 0.1 };
        bound.each(|s, head, tile| {
            let list = kept.kept.lists(s.batch, head, tile).0;
            for &(t, margin) in &defined[row] {
                let engine = list.contains(&(t as i32));
                if engine != (margin >= 0.0) && margin.abs() > close {
                    failed.push(format!(
                        "{seed} {isa:?} head {head} rows {tile} keys {t}: kept {engine}, margin {margin}"
                    ));
                }
            }
            row += 1;
        });
        // The results, with what was kept.
        let inputs = inputs.block_mask(&kept.kept);
        let meaning = inputs.bind(problem.meaning()).unwrap();
        let mut verdicts = check_forward(&meaning, &out, 1);
        let mut gradients = Gradients::zeros(problem.meaning()).unwrap();
        let saved = Saved { d_lse: None, ..out.saved(d_o.view()) };
        backward(&meaning, &saved, &mut gradients.outputs(), &options);
        verdicts.extend(check_backward(&meaning, &saved, &gradients, 1));
        let bad = verdicts.into_iter().filter(|(_, v)| !v.ok());
        failed.extend(bad.map(|(t, v)| format!("{seed} {isa:?} {dtype} {t}: {v}")));
        let counts = kept.counts;
        assert!(
            counts.visible >= counts.by_class && counts.by_class >= counts.by_proxy && counts.by_proxy >= counts.kept
        );
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

fn run(problem: &SkipProblem, tensors: &SkipCase) -> (Forward, fulgurite_cpu::SkipOutcome) {
    let inputs = tensors.inputs();
    let mut out = Forward::zeros(problem.base()).unwrap();
    let outcome = skip_forward(&problem.bind(&inputs).unwrap(), &mut out.outputs(), &Options::default());
    (out, outcome)
}

#[test]
fn larger_lambda_keeps_fewer_and_the_bound_holds() {
    for seed in 0..10 {
        let builder = || Problem::builder().dense(1, 512, 512).heads(2, 1).head_dim(32).mask(Mask::causal());
        let with = |lambda| SkipProblem::new(builder(), Skip { lambda, tile: [64, 64], ..Skip::default() }).unwrap();
        let exact = with(None);
        let mut tensors = SkipCase::new(&mut Rng::new(seed), exact.clone());
        // Keys of most tiles are small, so that no row gives them weight.
        let keys: Vec<f64> = tensors
            .k
            .view()
            .to_f64()
            .into_iter()
            .enumerate()
            .map(|(i, x)| {
                let tile = i / 32 / 64;
                if tile % 4 == 1 { x } else { 0.05 * x * (tile + 1) as f64 }
            })
            .collect();
        tensors.k = Tensor::from_f64(DType::F32, &keys, tensors.k.shape()).unwrap();
        let (all, _) = run(&exact, &tensors);
        let mut last = u64::MAX;
        for lambda in [0.0, 1e-6, 1e-4, 1e-3, 1e-2, 0.1] {
            let (out, outcome) = run(&with(Some(Lambda::Fixed(lambda))), &tensors);
            assert!(outcome.counts.kept <= last);
            last = outcome.counts.kept;
            let pairs = out.o.view().to_f64().into_iter().zip(all.o.view().to_f64());
            let error = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            // Dropped tiles, and the rounding of another order of sums.
            assert!(error <= outcome.error_bound + 1e-5, "lambda {lambda}: {error} of {}", outcome.error_bound);
        }
        assert!(last < outcome_all(&exact, &tensors), "something is dropped");
    }
}

fn outcome_all(problem: &SkipProblem, tensors: &SkipCase) -> u64 {
    run(problem, tensors).1.counts.kept
}

/// Nothing skipped is attention, to the rounding of another order of keys; and bits do not depend on threads.
#[test]
fn nothing_skipped_is_attention() {
    let builder = Problem::builder().dense(1, 300, 300).heads(2, 2).head_dim(16).mask(Mask::causal());
    let skip = Skip { classes: vec![HeadClass::Window { keys: 40, sinks: 4 }, HeadClass::Dense], ..Skip::default() };
    let dense = SkipProblem::new(builder.clone(), Skip::default()).unwrap();
    let tensors = SkipCase::new(&mut Rng::new(5), dense.clone());
    let (out, outcome) = run(&dense, &tensors);
    assert_eq!(outcome.counts.visible, outcome.counts.kept);
    let inputs = tensors.inputs();
    let mut plain = Forward::zeros(dense.base()).unwrap();
    forward(&inputs.bind(dense.base()).unwrap(), &mut plain.outputs(), &Options::default());
    let pairs = out.o.view().to_f64().into_iter().zip(plain.o.view().to_f64());
    assert!(pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max) < 1e-5);
    let problem = SkipProblem::new(builder, skip).unwrap();
    let bits = |threads| {
        let mut out = Forward::zeros(problem.base()).unwrap();
        let options = Options { threads: Some(threads), ..Options::default() };
        skip_forward(&problem.bind(&inputs).unwrap(), &mut out.outputs(), &options);
        out.o
    };
    assert!(bits(1) == bits(2) && bits(1) == bits(5));
}

/// Around the length at which another walk takes over, which items of one thread or of many must agree on.
#[test]
fn long_windows_have_the_same_bits_on_any_threads() {
    for keys in [2900, 3300, 3900] {
        let builder = Problem::builder().dense(1, 4400, 4400).heads(2, 1).head_dim(8).mask(Mask::causal());
        let skip = Skip { classes: vec![HeadClass::Window { keys, sinks: 5 }], tile: [16, 32], ..Skip::default() };
        let problem = SkipProblem::new(builder, skip).unwrap();
        let case = SkipCase::new(&mut Rng::new(3), problem.clone());
        let inputs = case.inputs();
        let bound = problem.bind(&inputs).unwrap();
        let run = |threads: usize| {
            let mut out = Forward::zeros(problem.base()).unwrap();
            skip_forward(&bound, &mut out.outputs(), &Options { threads: Some(threads), ..Options::default() });
            out.o.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>()
        };
        assert!(run(1) == run(9), "window {keys}: bits depend on threads");
    }
}

/// Windows of all lengths, aligned and not, beside each other in memory and not: results, and bits whatever the threads.
#[test]
fn windows_agree_with_the_oracle() {
    let shapes = [
        (128, 16, 64, 600, 600),
        (40, 0, 24, 333, 333),
        (5, 3, 16, 90, 200),
        (300, 70, 32, 420, 410),
        (1, 1, 8, 50, 50),
    ];
    for (seed, (keys, sinks, d, q_len, k_len)) in shapes.into_iter().enumerate() {
        for dtype in DType::FLOATS {
            let class = HeadClass::Window { keys, sinks };
            let builder =
                Problem::builder().dense(1, q_len, k_len).heads(2, 1).head_dim(d).dtype(dtype).mask(Mask::causal());
            let skip = Skip { classes: vec![class], tile: [48, 32], ..Skip::default() };
            let problem = SkipProblem::new(builder, skip).unwrap();
            let case = SkipCase::new(&mut Rng::new(seed as u64), problem.clone());
            let inputs = case.inputs();
            let bound = problem.bind(&inputs).unwrap();
            for isa in Isa::available() {
                let run = |threads: usize| {
                    let mut out = Forward::zeros(problem.base()).unwrap();
                    out.outputs().o.fill(f64::NAN);
                    let options = Options { isa: Some(isa), threads: Some(threads), ..Options::default() };
                    let kept = skip_forward(&bound, &mut out.outputs(), &options).kept;
                    (out, kept)
                };
                let (out, kept) = run(1);
                let bits = |out: &Forward| out.o.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>();
                assert!(bits(&out) == bits(&run(3).0), "{isa:?} {dtype} {keys}: bits depend on threads");
                let meaning = case.inputs().block_mask(&kept);
                let meaning = meaning.bind(problem.meaning()).unwrap();
                for (what, verdict) in check_forward(&meaning, &out, 1) {
                    assert!(verdict.ok(), "{isa:?} {dtype}, window {keys} + {sinks}, {what}: {verdict}");
                }
            }
        }
    }
}

/// Long rows, of which a unit takes many blocks at once: decisions and results, and bits whatever the threads.
#[test]
fn long_rows_agree_with_the_oracle() {
    let (n, heads, d) = (2300, 1, 64);
    let base =
        || Problem::builder().dense(1, n, n).heads(heads, heads).head_dim(d).dtype(DType::Bf16).mask(Mask::causal());
    for (lambda, first_tile, rows) in [(Some(1e-3), false, 64), (Some(1e-3), true, 128), (None, true, 64)] {
        let skip = Skip { lambda: lambda.map(Lambda::Fixed), tile: [rows, 128], first_tile, ..Skip::default() };
        let problem = SkipProblem::new(base(), skip).unwrap();
        let mut rng = Rng::new(3);
        let shape = problem.base().q_shape();
        let mut of = |by: &dyn Fn(usize) -> f64| {
            let values = rng.normals(n * heads * d, 1.0);
            let values: Vec<f64> = values.into_iter().enumerate().map(|(i, x)| by(i / d / 128) * x).collect();
            Tensor::from_f64(DType::Bf16, &values, &shape).unwrap()
        };
        // Some blocks of keys are much longer than others; one rises far above all before it.
        let (q, v) = (of(&|_| 4.0), of(&|_| 1.0));
        let k = of(&|block| [1.0, 0.05, 0.05, 1.5, 0.05, 8.0][if block == 5 { 5 } else { block % 5 }]);
        let inputs = fulgurite_core::Inputs::new(q.view(), k.view(), v.view());
        let bound = problem.bind(&inputs).unwrap();
        let run = |threads: usize| {
            let mut out = Forward::zeros(problem.base()).unwrap();
            let options = Options { threads: Some(threads), ..Options::default() };
            let outcome = skip_forward(&bound, &mut out.outputs(), &options);
            (out, outcome)
        };
        let (out, outcome) = run(2);
        assert!(lambda.is_none() || outcome.counts.kept < outcome.counts.by_proxy, "something is dropped");
        let meaning = inputs.block_mask(&outcome.kept);
        let meaning = meaning.bind(problem.meaning()).unwrap();
        for (what, verdict) in check_forward(&meaning, &out, 1) {
            assert!(verdict.ok(), "{lambda:?} {what}: {verdict}");
        }
        let bits = |out: &Forward| out.o.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert!(bits(&run(1).0) == bits(&out) && bits(&run(5).0) == bits(&out));
    }
}

#[test]
fn bad_descriptions_say_what_is_allowed() {
    let builder = || Problem::builder().dense(1, 64, 64).heads(2, 1).head_dim(8).mask(Mask::causal());
    let refused = |skip| SkipProblem::new(builder(), skip).unwrap_err().to_string();
    assert_eq!(
        refused(Skip { tile: [64, 48], ..Skip::default() }),
        "`tile keys` is 48, allowed: 16, 32, 64 or 128; 64 is usual"
    );
    assert!(refused(Skip { tile: [4, 64], ..Skip::default() }).starts_with("`tile rows` is 4, allowed: 16 to 1024"));
    assert!(refused(Skip { classes: vec![HeadClass::Log; 3], ..Skip::default() }).starts_with("`classes` is 3"));
    assert_eq!(
        refused(Skip { lambda: Some(Lambda::Fixed(f32::NAN)), ..Skip::default() }),
        "`lambda` is NaN, allowed: 0 to 0.999"
    );
    let window = HeadClass::Window { keys: 0, sinks: 1 };
    assert!(refused(Skip { classes: vec![window], ..Skip::default() }).starts_with("`window` is 0"));
    let sinks = SkipProblem::new(builder().sinks(), Skip::default()).unwrap_err().to_string();
    assert_eq!(sinks, "block skipping has no sink logits and exp sas; leave them out");
}
