//! The tolerance rule: every case of the table on one engine, for `python -m fulgurite check`, and single calls.

use crate::array::{Array, wrong};
use crate::description::Description;
use crate::dispatch::Call;
use crate::gil::detach;
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

/// One tensor of a call beside the oracle's.
#[pyclass(frozen, get_all)]
pub struct Judged {
    /// Name of the tensor.
    name: String,
    /// Whether it is within the tolerance.
    ok: bool,
    /// The difference that the rule allows at the worst element.
    allowed: f64,
    /// The worst element, as text.
    text: String,
}

impl From<(String, Verdict)> for Judged {
    fn from((name, verdict): (String, Verdict)) -> Judged {
        Judged { name, ok: verdict.ok(), allowed: verdict.allowed, text: verdict.to_string() }
    }
}

/// o, lse, d_o and d_lse of a backward call.
pub type SavedObjects<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>, Option<Bound<'py, PyAny>>);

/// Compares the results of a call with the oracle: o and perhaps the LSE, or with `saved` the gradients.
pub fn judge(
    description: &Description,
    qkv: [&Bound<'_, PyAny>; 3],
    extras: &[Bound<'_, PyAny>],
    results: &[Bound<'_, PyAny>],
    saved: Option<&SavedObjects<'_>>,
) -> PyResult<Vec<Judged>> {
    let (py, call) = (qkv[0].py(), Call::new(description, qkv, extras)?);
    let arrays = results.iter().map(|object| Array::read("results", object)).collect::<PyResult<Vec<_>>>()?;
    let verdicts = match (saved, &arrays[..]) {
        (None, [o]) => detach(py, || call.judge_forward(o, None))??,
        (None, [o, lse]) => detach(py, || call.judge_forward(o, Some(lse)))??,
        (None, _) => return Err(wrong(format!("`results` has {} arrays, allowed: o, or o and lse", arrays.len()))),
        (Some((o, lse, d_o, d_lse)), gradients) => {
            let (o, lse, d_o) = (Array::read("o", o)?, Array::read("lse", lse)?, Array::read("d_o", d_o)?);
            let d_lse = d_lse.as_ref().map(|object| Array::read("d_lse", object)).transpose()?;
            detach(py, || call.judge_backward([&o, &lse, &d_o], d_lse.as_ref(), gradients))??
        }
    };
    Ok(verdicts.into_iter().map(Judged::from).collect())
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
    detach(py, run)?.map_err(|e| wrong(e.to_string()))
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
