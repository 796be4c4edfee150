//! The engine against the oracle: one table of cases, every instruction set this machine has.

use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::{DType, Forward, Gradients, Rescale, Saved};
use fulgurite_cpu::{Isa, Options, backward, forward};

fn saved<'a>(case: &'a Case, result: &'a Forward) -> Saved<'a> {
    Saved { d_lse: case.d_lse(), ..result.saved(case.d_o()) }
}

fn run(case: &Case, options: &Options) -> (Forward, Gradients) {
    let bound = case.bound();
    let mut result = Forward::zeros(case.problem()).unwrap();
    // What was there before must not matter.
    result.outputs().o.fill(f64::NAN);
    result.outputs().lse.fill(f64::NAN);
    forward(&bound, &mut result.outputs(), options);
    let mut gradients = Gradients::zeros(case.problem()).unwrap();
    gradients.outputs().d_q.fill(f64::NAN);
    gradients.outputs().d_k.fill(f64::NAN);
    gradients.outputs().d_v.fill(f64::NAN);
    backward(&bound, &saved(case, &result), &mut gradients.outputs(), options);
    (result, gradients)
}

fn failures(case: &Case, options: &Options) -> Vec<String> {
    let (result, gradients) = run(case, options);
    let bound = case.bound();
    let mut verdicts = check_forward(&bound, &result, 1);
    verdicts.extend(check_backward(&bound, &saved(case, &result), &gradients, 1));
    let failed = verdicts.into_iter().filter(|(_, v)| !v.ok());
    failed.map(|(name, v)| format!("{} {:?}: {name}: {v}", case.name, options.isa)).collect()
}

fn judge(dtype: DType) {
    let mut failed = Vec::new();
    for isa in Isa::available() {
        let options = Options { isa: Some(isa), ..Options::default() };
        for case in cases::cases(dtype) {
            failed.extend(failures(&case, &options));
        }
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn f32_agrees_with_the_oracle() {
    judge(DType::F32);
}

#[test]
fn f16_agrees_with_the_oracle() {
    judge(DType::F16);
}

#[test]
fn bf16_agrees_with_the_oracle() {
    judge(DType::Bf16);
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    for seed in 0..40 {
        let dtype = DType::FLOATS[seed as usize % 3];
        failed.extend(failures(&cases::random(seed, dtype), &Options::default()));
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn bits_do_not_depend_on_threads() {
    for case in cases::cases(DType::F32) {
        let one = run(&case, &Options { threads: Some(1), ..Options::default() });
        for threads in [2, 3, 7] {
            let other = run(&case, &Options { threads: Some(threads), ..Options::default() });
            let bits = |(f, g): &(Forward, Gradients)| {
                let views = [f.o.view(), f.lse.view(), g.d_q.view(), g.d_k.view(), g.d_v.view()];
                views.iter().flat_map(|v| v.to_f64()).map(f64::to_bits).collect::<Vec<_>>()
            };
            assert!(bits(&one) == bits(&other), "{} with {threads} threads", case.name);
        }
    }
}

#[test]
fn every_rescale_policy_agrees_with_the_oracle() {
    let limit = Rescale::OPTIMISTIC_LIMIT;
    let lazy = [Rescale::Always, Rescale::Lazy(0.0), Rescale::Lazy(8.0), Rescale::Lazy(30.0)];
    let mut failed = Vec::new();
    for rescale in lazy.into_iter().chain([Rescale::Optimistic(1.0), Rescale::Optimistic(limit)]) {
        for case in cases::cases(DType::F32) {
            let options = Options { rescale: Some(rescale), ..Options::default() };
            failed.extend(failures(&case, &options).into_iter().map(|f| format!("{rescale}: {f}")));
        }
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}
