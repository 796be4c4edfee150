//! The CPU engines against the oracle, on every instruction set this machine has: mixtures of shapes and features, half of
//! them with NaN and infinities planted in what some row is denied. Results are within the tolerance, NaN and infinities
//! where the oracle has them, and nothing panics.

#![no_main]

use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::{DType, Forward, Gradients, Saved, cases};
use fulgurite_cpu::{Isa, Options, backward, forward};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|drawn: (u64, u8, bool)| {
    let (seed, dtype, nonfinite) = drawn;
    let dtype = DType::FLOATS[usize::from(dtype) % DType::FLOATS.len()];
    let case = if nonfinite { cases::random_nonfinite(seed, dtype) } else { cases::random(seed, dtype) };
    let bound = case.bound();
    for isa in Isa::available() {
        let options = Options { isa: Some(isa), threads: Some(1), ..Options::default() };
        let mut result = Forward::zeros(case.problem()).expect("cases are small");
        forward(&bound, &mut result.outputs(), &options);
        let saved = Saved { d_lse: case.d_lse(), ..result.saved(case.d_o()) };
        let mut gradients = Gradients::zeros(case.problem()).expect("cases are small");
        backward(&bound, &saved, &mut gradients.outputs(), &options);
        let verdicts = check_forward(&bound, &result, 1).into_iter().chain(check_backward(&bound, &saved, &gradients, 1));
        for (name, verdict) in verdicts {
            assert!(verdict.ok(), "{case} on {isa:?}: {name}: {verdict}");
        }
    }
});
