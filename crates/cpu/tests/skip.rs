//! Block-skip attention: results against the oracle with the kept tiles, decisions against the definition, the bound.

use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::random::Rng;
use fulgurite_core::skip::{HeadClass, Lambda, Proxy, Skip, SkipProblem};
use fulgurite_core::{DType, Forward, Gradients, Inputs, Mask, Problem, ProblemBuilder, Saved, Tensor};
use fulgurite_cpu::{Isa, Options, backward, forward, skip_forward};

fn random(rng: &mut Rng, problem: &Problem) -> [Tensor; 4] {
    let mut tensor = |shape: Vec<usize>, sigma: f64| {
        Tensor::from_f64(problem.dtype(), &rng.normals(shape.iter().product(), sigma), &shape).unwrap()
    };
    // Large queries: attention is peaked, and tiles can be dropped.
    [
        tensor(problem.q_shape(), 3.0),
        tensor(problem.k_shape(), 1.0),
        tensor(problem.v_shape(), 1.0),
        tensor(problem.o_shape(), 1.0),
    ]
}

fn pick(seed: u64) -> (ProblemBuilder, Skip, DType) {
    let mut rng = Rng::new(seed);
    let (dtype, kv) = (DType::FLOATS[seed as usize % 3], rng.range(1..3));
    let heads = kv * rng.range(1..3);
    let n = rng.pick(&[5, 64, 100, 257, 300]);
    let k_len = n + rng.pick(&[0, 0, 33]);
    let class = |rng: &mut Rng| match rng.range(0..3) {
        0 => HeadClass::Dense,
        1 => HeadClass::Window { keys: rng.pick(&[1, 20, 128, 1000]), sinks: rng.pick(&[0, 4, 100]) },
        _ => HeadClass::Log,
    };
    let classes = if rng.chance(0.5) { vec![class(&mut rng)] } else { (0..heads).map(|_| class(&mut rng)).collect() };
    let proxy = match rng.range(0..3) {
        0 => Some(Proxy::Mass { mass: 0.8, similarity: -0.5 }),
        1 => Some(Proxy::Top { share: 0.4, similarity: 0.0 }),
        _ => None,
    };
    let lambda = match rng.range(0..3) {
        0 => None,
        1 => Some(Lambda::Fixed(rng.pick(&[0.0, 1e-3, 0.1]))),
        _ => Some(Lambda::PerKey(5.0)),
    };
    let tile = [rng.pick(&[16, 64, 128, 100]), rng.pick(&[16, 32, 64, 128])];
    let builder = Problem::builder().dense(rng.range(1..3), n, k_len).heads(heads, kv).head_dim(rng.pick(&[8, 16, 40]));
    (
        builder.dtype(dtype).mask(Mask::causal()),
        Skip { classes, proxy, lambda, tile, first_tile: rng.chance(0.7) },
        dtype,
    )
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    let long = std::env::var_os("FULGURITE_LONG").is_some();
    for seed in 0..if long { 1000 } else { 200 } {
        let (builder, skip, dtype) = pick(seed);
        let problem = SkipProblem::new(builder, skip).unwrap();
        let [q, k, v, d_o] = random(&mut Rng::new(seed + 7), problem.base());
        let inputs = Inputs::new(q.view(), k.view(), v.view());
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

fn run(problem: &SkipProblem, tensors: &[Tensor; 4]) -> (Forward, fulgurite_cpu::SkipOutcome) {
    let [q, k, v, _] = tensors;
    let inputs = Inputs::new(q.view(), k.view(), v.view());
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
        let mut tensors = random(&mut Rng::new(seed), exact.base());
        // Keys of most tiles are small, so that no row gives them weight.
        let keys: Vec<f64> = tensors[1]
            .view()
            .to_f64()
            .into_iter()
            .enumerate()
            .map(|(i, x)| {
                let tile = i / 32 / 64;
                if tile % 4 == 1 { x } else { 0.05 * x * (tile + 1) as f64 }
            })
            .collect();
        tensors[1] = Tensor::from_f64(DType::F32, &keys, tensors[1].shape()).unwrap();
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

fn outcome_all(problem: &SkipProblem, tensors: &[Tensor; 4]) -> u64 {
    run(problem, tensors).1.counts.kept
}

/// Nothing skipped is attention, to the rounding of another order of keys; and bits do not depend on threads.
#[test]
fn nothing_skipped_is_attention() {
    let builder = Problem::builder().dense(1, 300, 300).heads(2, 2).head_dim(16).mask(Mask::causal());
    let skip = Skip { classes: vec![HeadClass::Window { keys: 40, sinks: 4 }, HeadClass::Dense], ..Skip::default() };
    let dense = SkipProblem::new(builder.clone(), Skip::default()).unwrap();
    let tensors = random(&mut Rng::new(5), dense.base());
    let (out, outcome) = run(&dense, &tensors);
    assert_eq!(outcome.counts.visible, outcome.counts.kept);
    let [q, k, v, _] = &tensors;
    let inputs = Inputs::new(q.view(), k.view(), v.view());
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
