//! Runs every case of the table on one engine and compares with the oracle, for `python -m fulgurite check`.

use crate::array::wrong;
use fulgurite::{Choice, DType, Engine, Error, Run};
use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::{self, Verdict};
use pyo3::prelude::*;

/// The outcome of one case.
#[pyclass(frozen, get_all)]
pub struct Outcome {
    /// Features that the case tests.
    features: Vec<String>,
    /// Name of the case.
    case: String,
    /// Whether the engine does not support it.
    refused: bool,
    /// The largest error as a fraction of the tolerance, over o, lse and all gradients.
    share: f64,
    /// Results outside the tolerance, and by how much.
    failures: Vec<String>,
}

/// Runs all cases of a type on an engine.
pub fn check(py: Python<'_>, engine: &str, dtype: &str) -> PyResult<Vec<Outcome>> {
    let choice: Choice = engine.parse().map_err(|e: fulgurite::ChoiceError| wrong(e.to_string()))?;
    let found = DType::FLOATS.into_iter().find(|known| known.name() == dtype);
    let dtype = found.ok_or_else(|| wrong(format!("`dtype` is {dtype:?}, allowed: f32, f16, bf16")))?;
    let run = || -> Result<Vec<Outcome>, Error> {
        let engine = fulgurite::engine(choice)?;
        cases::cases(dtype).iter().map(|case| outcome(engine.as_ref(), case)).collect()
    };
    py.detach(run).map_err(|e| wrong(e.to_string()))
}

fn outcome(engine: &dyn Engine, case: &Case) -> Result<Outcome, Error> {
    let (problem, inputs, bound, run) = (case.problem(), case.inputs(), case.bound(), Run::default());
    let refused = engine.supports(problem).is_err();
    let mut verdicts: Vec<(String, Verdict)> = Vec::new();
    if !refused {
        let forward = engine.forward(problem, &inputs, &run)?;
        verdicts = compare::check_forward(&bound, &forward, 0);
        let mut saved = forward.saved(case.d_o());
        saved.d_lse = case.d_lse();
        match engine.backward(problem, &inputs, &saved, &run) {
            Ok(gradients) => verdicts.extend(compare::check_backward(&bound, &saved, &gradients, 0)),
            // An engine without backward is judged by its forward results.
            Err(Error::Unsupported(_)) => {}
            Err(other) => return Err(other),
        }
    }
    let share = |verdict: &Verdict| if verdict.worst == 0.0 { 0.0 } else { verdict.worst / verdict.allowed };
    let failed = verdicts.iter().filter(|(_, verdict)| !verdict.ok());
    Ok(Outcome {
        features: case.features.iter().map(ToString::to_string).collect(),
        case: case.to_string(),
        refused,
        share: verdicts.iter().map(|(_, verdict)| share(verdict)).fold(0.0, f64::max),
        failures: failed.map(|(tensor, verdict)| format!("{tensor}: {verdict}")).collect(),
    })
}
