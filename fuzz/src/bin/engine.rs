//! The CPU engines against the oracle, on an instruction set of this machine: shapes, masks and expressions out of the
//! bytes, or the mixtures of the table by seed; NaN and infinities in what some row does not see. Results are within the
//! tolerance, NaN and infinities where the oracle has them, and nothing panics.

#![no_main]

use arbitrary::{Result, Unstructured};
use fulgurite_core::cases::Case;
use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::{Bound, DType, Exp, Forward, Gradients, Saved, TensorView, cases};
use fulgurite_cpu::{Isa, Options, backward, forward};
use fulgurite_fuzz::tame;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // Running out of bytes is the only way to fail.
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let isa = *u.choose(&Isa::available())?;
    if u.ratio(31, 32)? {
        let Some(call) = tame::call(u)? else { return Ok(()) };
        let inputs = call.inputs();
        let bound = inputs.bind(&call.problem).expect("the tensors of the problem");
        compare(isa, &bound, call.d_o().view(), None, &format!("{:?}", call.problem));
        return Ok(());
    }
    let (seed, dtype): (u32, _) = (u.arbitrary()?, *u.choose(&DType::FLOATS)?);
    let drawn: fn(u64, DType) -> Case =
        if u.arbitrary()? { cases::random_nonfinite_short } else { cases::random_short };
    let case = drawn(u64::from(seed), dtype);
    compare(isa, &case.bound(), case.d_o(), case.d_lse(), &case.to_string());
    Ok(())
}

fn compare(isa: Isa, bound: &Bound<'_>, d_o: TensorView<'_>, d_lse: Option<TensorView<'_>>, name: &str) {
    let options = Options { isa: Some(isa), threads: Some(1), ..Options::default() };
    let mut result = Forward::zeros(bound.problem()).expect("cases are small");
    forward(bound, &mut result.outputs(), &options);
    let saved = Saved { d_lse, ..result.saved(d_o) };
    let mut gradients = Gradients::zeros(bound.problem()).expect("cases are small");
    backward(bound, &saved, &mut gradients.outputs(), &options);
    let verdicts = check_forward(bound, &result, 1).into_iter().chain(check_backward(bound, &saved, &gradients, 1));
    // What some ten roundings of terms around 1 leave where they cancel: o is rounded to its type before D is computed from it.
    let left = match bound.problem().dtype() {
        // Polynomials of degree 3 are off by 1e-4.
        DType::F32 if bound.problem().exp() != Exp::default() => 2e-3,
        DType::F32 => 4e-6,
        DType::F16 => 1e-2,
        _ => 8e-2,
    };
    for (tensor, verdict) in verdicts {
        // As in the long test of NaN in hidden rows: the rule's measure is one sample of straightforward code.
        assert!(verdict.is_within(8.0, left), "{name} on {isa:?}: {tensor}: {verdict}");
    }
}
