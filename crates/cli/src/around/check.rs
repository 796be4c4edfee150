//! Rows of `check` for the systems around attention: random problems against their oracles.

use crate::Failure;
use crate::check::Ledger;
use fulgurite::around::{
    self, DeltaForm, DeltaForward, DeltaGradients, DeltaSegments, ParallaxForward, ParallaxGradients,
};
use fulgurite::{Choice, Cpu, DType, Engine, Error, Forward, Gradients, Saved, Settings};
use fulgurite_core::cases::around::{DeltaCase, LighthouseCase, ParallaxCase, SkipCase};
use fulgurite_core::compare::{self, Verdict};
use fulgurite_core::{gated_delta, lighthouse, parallax};

/// The rows.
pub const FEATURES: [&str; 4] = ["block skipping", "parallax", "lighthouse", "gated delta rule"];

/// Problems of each system in every run.
pub const CASES: u64 = 6;

type Judge = fn(&Cpu, u64, DType) -> Result<Vec<(String, Verdict)>, Error>;

const JUDGES: [Judge; 4] = [skip, parallax, light, delta];

/// Enters what the oracles say of every system on every engine.
pub(crate) fn compare(
    choices: &[Choice],
    settings: &Settings,
    dtype: DType,
    seeds: impl Iterator<Item = u64>,
    ledger: &mut Ledger,
) -> Result<(), Failure> {
    let seeds: Vec<u64> = seeds.collect();
    for &choice in choices {
        for (feature, judge) in FEATURES.into_iter().zip(JUDGES) {
            let Ok(engine) = around::cpu(choice, settings, feature) else {
                ledger.refused(&choice.to_string(), feature, dtype);
                continue;
            };
            for &seed in &seeds {
                let verdicts = judge(&engine, seed, dtype)?;
                ledger.enter(engine.name(), &[feature], dtype, &format!("{feature}, seed {seed}, {dtype}"), &verdicts);
            }
        }
    }
    Ok(())
}

fn skip(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let case = SkipCase::random(seed, dtype);
    let (problem, inputs) = (&case.problem, case.inputs());
    let mut out = Forward::zeros(problem.base())?;
    let outcome = around::skip_forward(&problem.bind(&inputs)?, &mut out.outputs(), &engine.options());
    let inputs = inputs.block_mask(&outcome.kept);
    let meaning = inputs.bind(problem.meaning())?;
    let mut verdicts = compare::check_forward(&meaning, &out, 0);
    let saved = Saved { d_lse: None, ..out.saved(case.d_o.view()) };
    let gradients: Gradients = engine.backward(problem.meaning(), &inputs, &saved, &Default::default())?;
    verdicts.extend(compare::check_backward(&meaning, &saved, &gradients, 0));
    Ok(verdicts)
}

fn parallax(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let case = ParallaxCase::random(seed, dtype);
    let inputs = case.inputs();
    let bound = case.parallax.bind(&inputs, case.r.view())?;
    let mut out = ParallaxForward::zeros(&case.parallax)?;
    around::parallax_forward(&bound, &mut out.outputs(), &engine.options());
    let mut gradients = ParallaxGradients::zeros(&case.parallax)?;
    around::parallax_backward(&bound, &out, &case.d_o.view(), &mut gradients, &engine.options());
    Ok(parallax::check(&bound, &out, Some((&case.d_o.view(), &gradients))))
}

fn light(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let LighthouseCase { light, q, k, v, d_o } = LighthouseCase::random(seed, dtype);
    let out = around::lighthouse_forward(&light, &q.view(), &k.view(), &v.view(), &engine.options())?;
    let g = around::lighthouse_backward(&light, &out, &d_o.view(), &engine.options())?;
    Ok(lighthouse::check(&light, &out.entries, [&q, &k, &v], &out.o, Some((&d_o, [&g.d_q, &g.d_k, &g.d_v]))))
}

fn delta(engine: &Cpu, seed: u64, dtype: DType) -> Result<Vec<(String, Verdict)>, Error> {
    let case = DeltaCase::random(seed, dtype);
    let inputs = case.inputs();
    let bound = inputs.bind(&case.problem)?;
    let mut verdicts = Vec::new();
    for form in [DeltaForm::Chunked, DeltaForm::Recurrent] {
        let mut out = DeltaForward::zeros(&case.problem)?;
        around::gated_delta_forward(&bound, &mut out.outputs(), form, DeltaSegments::Auto, &engine.options());
        verdicts.extend(gated_delta::check_forward(&bound, &out, 0));
    }
    let mut gradients = DeltaGradients::zeros(&case.problem)?;
    around::gated_delta_backward(&bound, &case.saved(), &mut gradients.outputs(), &engine.options());
    verdicts.extend(gated_delta::check_backward(&bound, &case.saved(), &gradients, 0));
    Ok(verdicts)
}
