//! The tolerance rule with planted errors, and the table of cases under the plain implementation.

use fulgurite_core::cases::{self, Case, FEATURES};
use fulgurite_core::compare::{self, Rule, Verdict, check_backward, check_forward, judge_lse};
use fulgurite_core::format::{Granularity, GroupFormat};
use fulgurite_core::random::Rng;
use fulgurite_core::{
    DType, Delta, Forward, Gradients, GroupAttention, Inputs, Int8Attention, Mask, Precision, Problem, Saved, Tensor,
    oracle, plain,
};

/// The plain implementation as if it were an engine.
fn honest(case: &Case) -> (Forward, Gradients) {
    let bound = case.bound();
    let forward = plain::forward(&bound).to_forward(case.problem()).unwrap();
    let gradients = plain::backward(&bound, &case.d_o(), case.d_lse().as_ref());
    (forward, gradients.to_gradients(case.problem()).unwrap())
}

fn verdicts(case: &Case, forward: &Forward, gradients: &Gradients) -> Vec<(String, Verdict)> {
    let bound = case.bound();
    let saved = Saved { d_lse: case.d_lse(), ..forward.saved(case.d_o()) };
    let mut all = check_forward(&bound, forward, 1);
    all.extend(check_backward(&bound, &saved, gradients, 1));
    all
}

fn everything_passes(case: &Case) {
    let (forward, gradients) = honest(case);
    for (name, verdict) in verdicts(case, &forward, &gradients) {
        // The plain LSE comes from rounded scores and is not bound by the LSE's own rule.
        let passes = if name == "lse" && case.dtype() != DType::F32 { verdict.misplaced == 0 } else { verdict.ok() };
        assert!(passes, "{case}: {name}: {verdict}");
    }
}

#[test]
fn plain_passes_the_table_in_f32() {
    cases::cases(DType::F32).iter().for_each(everything_passes);
}

#[test]
fn plain_passes_the_table_in_bf16() {
    cases::cases(DType::Bf16).iter().for_each(everything_passes);
}

#[test]
fn plain_passes_the_table_in_f16() {
    cases::cases(DType::F16).iter().for_each(everything_passes);
}

#[test]
fn plain_passes_random_cases() {
    for seed in 0..12 {
        everything_passes(&cases::random(seed, DType::FLOATS[seed as usize % 3]));
    }
}

#[test]
fn random_cases_can_all_be_built() {
    for seed in 100..160 {
        let case = cases::random(seed, DType::Bf16);
        case.bound();
        assert!(case.features.iter().all(|f| FEATURES.contains(f)), "{case}: {:?}", case.features);
    }
}

#[test]
fn the_table_covers_every_feature() {
    let table = cases::cases(DType::Bf16);
    for feature in FEATURES {
        assert!(table.iter().any(|case| case.features.contains(feature)), "no case for {feature}");
    }
    for (i, case) in table.iter().enumerate() {
        assert!(!case.features.is_empty() && case.features.iter().all(|f| FEATURES.contains(f)), "{case}");
        assert!(table[..i].iter().all(|other| other.name != case.name), "{case} occurs twice");
        case.bound();
    }
}

/// Moves one element of a tensor.
fn plant(tensor: &mut Tensor, at: usize, change: impl Fn(f64) -> f64) {
    let x = tensor.view().at(at);
    tensor.view_mut().set_at(at, change(x));
}

fn named<'a>(all: &'a [(String, Verdict)], name: &str) -> &'a Verdict {
    &all.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("{name} was not judged")).1
}

#[test]
fn planted_errors_are_found_where_they_are() {
    for dtype in DType::FLOATS {
        let table = cases::cases(dtype);
        let case = table.iter().find(|c| c.name == "documents, causal").unwrap();
        let (forward, gradients) = honest(case);
        let changes: [fn(f64) -> f64; 4] = [|x| x + 0.1, |_| f64::NAN, |_| f64::INFINITY, |x| -x - 0.1];
        for change in changes {
            let (mut f, mut g) = (forward.clone(), gradients.clone());
            plant(&mut f.o, 777, change);
            plant(&mut f.lse, 33, change);
            plant(&mut g.d_q, 5, change);
            plant(&mut g.d_k, 1234, change);
            plant(&mut g.d_v, 0, change);
            let all = verdicts(case, &f, &g);
            for (name, at) in [("o", 777), ("lse", 33), ("d_q", 5), ("d_k", 1234), ("d_v", 0)] {
                let verdict = named(&all, name);
                assert!(!verdict.ok() && (verdict.at == at || name == "lse"), "{dtype} {name}: {verdict}");
            }
        }
    }
}

#[test]
fn planted_errors_in_sums_are_found() {
    let table = cases::cases(DType::Bf16);
    let case = table.iter().find(|c| c.name == "packed, window, alibi, sinks").unwrap();
    let (forward, mut gradients) = honest(case);
    plant(gradients.d_sinks.as_mut().unwrap(), 1, |x| x * 1.5 + 0.5);
    assert!(!named(&verdicts(case, &forward, &gradients), "d_sinks").ok());
    let case = table.iter().find(|c| c.name == "relative position").unwrap();
    let (forward, mut gradients) = honest(case);
    plant(gradients.d_aux[0].as_mut().unwrap(), 4, |x| x + 1.0);
    assert!(!named(&verdicts(case, &forward, &gradients), "d_relative").ok());
}

/// The allowance of a sum over rows follows the roundings of its rows: honest errors are of the size that it says, and a
/// clear mistake is still found, whatever the sample did.
#[test]
fn the_noise_of_sums_is_that_of_their_rows() {
    for dtype in [DType::F16, DType::Bf16] {
        let mut ratios = Vec::new();
        for case in cases::cases(dtype) {
            let bound = case.bound();
            let d_lse = case.d_lse();
            if !case.problem().has_sinks() || d_lse.is_some() {
                continue;
            }
            let (want, plain) =
                (oracle::backward(&bound, &case.d_o(), None), plain::backward(&bound, &case.d_o(), None));
            let noise = &plain::noise(&bound, &case.d_o(), None)[0];
            let pairs = want.d_sinks.iter().flatten().zip(plain.d_sinks.iter().flatten()).zip(noise);
            ratios.extend(pairs.filter(|(_, noise)| **noise > 0.0).map(|((w, p), noise)| ((p - w) / noise).powi(2)));
            // What is wrong by a few times the noise is found, whatever the sample did.
            let (forward, gradients) = honest(&case);
            for (head, &noise) in noise.iter().enumerate().filter(|(_, noise)| **noise > 0.0).take(1) {
                let mut wrong = gradients.clone();
                let largest = want.d_sinks.iter().flatten().fold(0.0f64, |m, x| m.max(x.abs()));
                plant(wrong.d_sinks.as_mut().unwrap(), head, |x| x + 20.0 * noise + 0.02 * largest + 0.02);
                assert!(!named(&verdicts(&case, &forward, &wrong), "d_sinks").ok(), "{}", case.name);
            }
        }
        assert!(ratios.len() >= 4, "{} sums", ratios.len());
        let mean = (ratios.iter().sum::<f64>() / ratios.len() as f64).sqrt();
        assert!((0.3..3.0).contains(&mean), "{dtype}: errors are {mean} standard deviations");
    }
}

#[test]
fn an_empty_row_must_have_its_infinity() {
    let table = cases::cases(DType::F32);
    let case = table.iter().find(|c| c.name == "causal, more queries").unwrap();
    let (mut forward, gradients) = honest(case);
    plant(&mut forward.lse, 0, |_| -1e30);
    let verdict = *named(&verdicts(case, &forward, &gradients), "lse");
    assert!(!verdict.ok() && verdict.at == 0 && verdict.misplaced == 1, "{verdict}");
    plant(&mut forward.lse, 0, |_| f64::INFINITY); // the wrong infinity
    assert!(!named(&verdicts(case, &forward, &gradients), "lse").ok());
}

#[test]
fn nothing_infinite_passes() {
    let rule = Rule { dtype: DType::F32, softcap: false, gradient: false, terms: None };
    // A plain implementation that broke down must not allow everything.
    for broken in [f64::NAN, f64::INFINITY] {
        assert!(!rule.judge(&[5.0, 0.0], &[1.0, 0.0], &[broken, 0.0]).ok());
        assert!(rule.judge(&[1.0, 0.0], &[1.0, 0.0], &[broken, 0.0]).ok());
    }
    let verdict = Verdict { worst: 1.0, allowed: f64::INFINITY, ..rule.judge(&[1.0], &[1.0], &[1.0]) };
    assert!(!verdict.ok());
    assert!(
        !Verdict { allowed: f64::NAN, ..verdict }.ok() && !Verdict { worst: f64::NAN, allowed: 1.0, ..verdict }.ok()
    );
    assert!(!rule.judge(&[f64::NAN], &[1.0], &[1.0]).ok() && !rule.judge(&[1.0], &[f64::NAN], &[1.0]).ok());
    assert!(rule.judge(&[f64::NAN], &[f64::NAN], &[1.0]).ok());
    assert!(!rule.judge(&[f64::INFINITY], &[f64::NEG_INFINITY], &[1.0]).ok());
    assert!(!judge_lse(&[f64::NAN], &[0.0], DType::F32, 0.0).ok());
    assert!(rule.judge(&[], &[], &[]).ok());
}

#[test]
fn the_rule_is_as_published() {
    let rule = |dtype, softcap, gradient| Rule { dtype, softcap, gradient, terms: None };
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-12;
    // f32: 2 x 1e-3 + 1e-6 x 4
    assert!(close(rule(DType::F32, false, false).allowed(&[4.0, 0.0], &[4.0, 1e-3]), 2e-3 + 4e-6));
    // Enough elements that one step more is not due.
    let many = |x: f64| vec![x; compare::FEW];
    let (want, honest) = ([vec![4.0, 0.0], many(0.0)].concat(), [vec![4.0, 1e-3], many(0.0)].concat());
    assert!(close(rule(DType::F32, true, true).allowed(&want, &honest), 3e-3 + 4e-6));
    // bf16 at 1/1024: 0.30098 rounds to 0.30078, minus 0.3 is 0.00078 (rounded), off by 0.0002.
    let step = {
        let r = 1.0 / 1024.0;
        (DType::Bf16.round(DType::Bf16.round(r + 0.3) - 0.3) - r).abs()
    };
    assert!(step > 1e-4);
    assert!(close(rule(DType::Bf16, false, false).allowed(&[1.0 / 1024.0], &[1.0 / 1024.0]), 2.0 * step));
    let small = many(1.0 / 1024.0);
    assert!(close(rule(DType::Bf16, true, true).allowed(&small, &small), 2.0 * step + 3e-4));
    assert!(
        judge_lse(&[0.99e-3], &[0.0], DType::Bf16, 0.0).ok() && !judge_lse(&[1.01e-3], &[0.0], DType::Bf16, 0.0).ok()
    );
    assert!(judge_lse(&[0.99e-5], &[0.0], DType::F32, 0.0).ok() && !judge_lse(&[1.1e-5], &[0.0], DType::F32, 0.0).ok());
    // A sum of bf16 terms: both allowances.
    let sum = Rule { terms: Some(DType::Bf16), ..rule(DType::F32, false, true) };
    assert!(close(sum.allowed(&small, &small), 2.0 * step + 1e-6 / 1024.0));
    // Of fewer elements one step more.
    assert!(close(sum.allowed(&small[1..], &small[1..]), 3.0 * step + 1e-6 / 1024.0));
    assert!(judge_lse(&[1000.0004], &[1000.0], DType::F32, 0.0).ok());
}

#[test]
fn a_nan_is_wrong_wherever_it_is_not_seen() {
    let problem = Problem::builder().dense(2, 3, 3).heads(2, 2).head_dim(2).mask(Mask::causal()).build().unwrap();
    let mut rng = Rng::new(5);
    let mut draw = || Tensor::from_f64(DType::F32, &rng.normals(24, 1.0), &[2, 3, 2, 2]).unwrap();
    let (q, k, mut v) = (draw(), draw(), draw());
    v.view_mut().set_at(2 * 4, f64::NAN); // key 2 of sequence 0, head 0: only query 2 sees it
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let bound = inputs.bind(&problem).unwrap();
    let honest = plain::forward(&bound).to_forward(&problem).unwrap();
    assert!(check_forward(&bound, &honest, 0).iter().all(|(_, v)| v.ok()));
    // Query 0 of head 0, which shares the sequence and the head, then query 0 of head 1.
    for leak in [0, 2] {
        let mut forward = honest.clone();
        forward.o.view_mut().set_at(leak, f64::NAN);
        assert!(!check_forward(&bound, &forward, 0)[0].1.ok(), "{leak}");
    }
}

#[test]
fn a_short_gradient_gets_one_step_more() {
    let rule = Rule { dtype: DType::F32, softcap: false, gradient: true, terms: None };
    let allowed = |n: usize| rule.allowed(&vec![1.0; n], &vec![1.0; n]);
    assert_eq!(allowed(64), 1e-6);
    assert_eq!(allowed(63), 1e-6 + f64::from(f32::EPSILON));
    let output = Rule { gradient: false, ..rule };
    assert_eq!(output.allowed(&[1.0], &[1.0]), 1e-6);
}

#[test]
fn large_problems_are_sampled() {
    let problem = Problem::builder().dense(1, 2100, 2100).heads(1, 1).head_dim(4).mask(Mask::causal()).build().unwrap();
    assert!(compare::is_sampled(&problem));
    let mut rng = Rng::new(6);
    let mut draw = || Tensor::from_f64(DType::F32, &rng.normals(8400, 1.0), &[1, 2100, 1, 4]).unwrap();
    let (q, k, v, d_o) = (draw(), draw(), draw(), draw());
    let bound = Inputs::new(q.view(), k.view(), v.view()).bind(&problem).unwrap();
    let mut forward = plain::forward(&bound).to_forward(&problem).unwrap();
    let mut gradients = plain::backward(&bound, &d_o.view(), None).to_gradients(&problem).unwrap();
    let judged = |f: &Forward, g: &Gradients| {
        let mut all = check_forward(&bound, f, 3);
        all.extend(check_backward(&bound, &f.saved(d_o.view()), g, 3));
        all
    };
    let all = judged(&forward, &gradients);
    assert!(all.iter().all(|(_, v)| v.ok()) && all.len() == 5 && all[0].1.count == 4 * compare::SAMPLE, "{all:?}");
    for tensor in [&mut forward.o, &mut gradients.d_q, &mut gradients.d_k, &mut gradients.d_v] {
        (0..8400).for_each(|i| plant(tensor, i, |x| x * 1.01 + 0.01));
    }
    let all = judged(&forward, &gradients);
    assert!(["o", "d_q", "d_k", "d_v"].iter().all(|name| !named(&all, name).ok()), "{all:?}");
}

#[test]
fn a_verdict_is_one_readable_line() {
    let rule = Rule { dtype: DType::F32, softcap: false, gradient: false, terms: None };
    let text = rule.judge(&[1.0, 2.5], &[1.0, 2.0], &[1.0, 2.0]).to_string();
    assert_eq!(text, "WRONG: worst 5.000e-1 of 2.000e-6 allowed, rms 3.5e-1, at 1 of 2: 2.5e0, want 2e0");
    let text = rule.judge(&[f64::NAN, 2.0], &[1.0, 2.0], &[1.0, 2.0]).to_string();
    assert!(text.ends_with("at 0 of 2: NaN, want 1e0; 1 NaN or inf out of place"), "{text}");
}

/// A problem in codes, judged with what the oracle says of another one, as an engine with a mistake would give it.
fn judged_as(own: Precision, mistaken: Precision, dtype: DType) -> Vec<(String, Verdict)> {
    let problem = |precision: Precision| {
        let builder = Problem::builder().dense(1, 70, 300).heads(1, 1).head_dim(32).dtype(dtype);
        builder.precision(precision).build().unwrap()
    };
    let (own, mistaken) = (problem(own), problem(mistaken));
    let mut rng = Rng::new(8);
    let mut normal =
        |shape: Vec<usize>| Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), 1.0), &shape).unwrap();
    let tensors = [own.q_shape(), own.k_shape(), own.v_shape(), own.o_shape()].map(&mut normal);
    let [q, k, v, d_o] = tensors.each_ref().map(|t| t.view());
    let inputs = Inputs::new(q, k, v);
    let wrong = inputs.bind(&mistaken).unwrap();
    let forward = oracle::forward(&wrong).to_forward(&own).unwrap();
    let gradients = oracle::backward(&wrong, &d_o, None).to_gradients(&own).unwrap();
    let bound = inputs.bind(&own).unwrap();
    let mut all = check_forward(&bound, &forward, 1);
    if !matches!(own.precision(), Precision::Int8(_)) {
        all.extend(check_backward(&bound, &forward.saved(d_o), &gradients, 1));
    }
    all
}

#[test]
fn mistakes_in_codes_are_found_beside_what_borders_allow() {
    let nvfp4 = GroupAttention { qk: None, pv: Some(GroupFormat::NVFP4), delta: Delta::Exact };
    let named_as = |text: &str| text.parse::<Precision>().unwrap();
    let smooth = Precision::Int8(Int8Attention { smooth_k: false, ..Int8Attention::default() });
    let by_token = Precision::Int8(Int8Attention { q: Granularity::Token, ..Int8Attention::default() });
    let native = named_as("native/nvfp4");
    let cases = [
        // Blocks of another size, K not smoothed, scales for other rows, another format, D from the wrong output.
        (named_as("int8"), named_as("int8:128"), vec!["o"]),
        (named_as("int8"), smooth, vec!["o"]),
        (named_as("int8"), by_token, vec!["o"]),
        (named_as("nvfp4"), named_as("mxfp4"), vec!["o", "d_q", "d_k", "d_v"]),
        (native, Precision::Native, vec!["o", "d_v"]),
        (native, Precision::Groups(GroupAttention { delta: Delta::Rounded, ..nvfp4 }), vec!["d_q", "d_k"]),
    ];
    for dtype in [DType::F32, DType::Bf16] {
        for (own, mistaken, wrong) in &cases {
            for (name, verdict) in judged_as(*own, *own, dtype) {
                assert!(verdict.ok(), "{own} {dtype}: {name}: {verdict}");
            }
            // Only another format is more than the rounding of bf16.
            for name in wrong.iter().filter(|_| dtype == DType::F32 || wrong.len() == 4) {
                let all = judged_as(*own, *mistaken, dtype);
                assert!(!named(&all, name).ok(), "{own} {dtype} as {mistaken}: {name}: {}", named(&all, name));
            }
        }
    }
}

/// One weight of each row off by one code: by chance a border allows it, in most rows nothing does.
#[test]
fn a_code_off_by_one_is_found() {
    let (rows, keys, dim) = (40, 60, 16);
    let builder = Problem::builder().dense(1, rows, keys).heads(1, 1).head_dim(dim);
    let problem = builder.precision("int8".parse().unwrap()).build().unwrap();
    let mut rng = Rng::new(9);
    let mut normal = |n: usize| Tensor::from_f64(DType::F32, &rng.normals(n * dim, 1.0), &[1, n, 1, dim]).unwrap();
    let (q, k, v) = (normal(rows), normal(keys), normal(keys));
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let bound = inputs.bind(&problem).unwrap();
    let answer = oracle::forward(&bound);
    let found = (0..rows).filter(|&row| {
        let mut moved = answer.clone();
        // The largest weight of a row is at least an even share, and a code is a 127th of it.
        let step = 1.0 / (127 * keys) as f64;
        let value = v.view().to_f64()[row * dim..(row + 1) * dim].to_vec();
        moved.o[row * dim..].iter_mut().zip(value).for_each(|(o, v)| *o += step * v);
        !named(&check_forward(&bound, &moved.to_forward(&problem).unwrap(), 1), "o").ok()
    });
    let found = found.count();
    assert!(found * 10 >= rows * 9, "{found} of {rows}");
}
