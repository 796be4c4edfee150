//! The results of a run of `check`, by feature, engine and dtype.

use fulgurite::DType;
use fulgurite_core::compare::Verdict;
use serde::Serialize;
use std::collections::BTreeMap;

/// How close one engine came to its limits over all cases of one feature.
#[derive(Serialize, Clone)]
pub(crate) struct Column {
    pub engine: String,
    pub dtype: &'static str,
    pub cases: usize,
    pub refused: usize,
    pub failures: usize,
    /// The largest error, as a share of the allowed one.
    pub worst_share: f64,
}

/// A comparison outside the tolerance.
#[derive(Serialize)]
pub(crate) struct Failed {
    pub engine: String,
    pub case: String,
    pub tensor: String,
    pub why: String,
}

/// All comparisons of a run.
#[derive(Default)]
pub(crate) struct Ledger {
    /// By feature, engine and dtype.
    pub columns: BTreeMap<(&'static str, String, &'static str), Column>,
    /// Cases that were run or refused, and how many of them were drawn.
    pub cases: usize,
    pub random: usize,
    pub comparisons: usize,
    pub failures: Vec<Failed>,
}

impl Ledger {
    fn column(&mut self, feature: &'static str, engine: &str, dtype: &'static str) -> &mut Column {
        let fresh =
            || Column { engine: engine.to_string(), dtype, cases: 0, refused: 0, failures: 0, worst_share: 0.0 };
        self.columns.entry((feature, engine.to_string(), dtype)).or_insert_with(fresh)
    }

    pub fn refused(&mut self, engine: &str, feature: &'static str, dtype: DType) {
        self.column(feature, engine, dtype.name()).refused += 1;
    }

    pub fn enter(
        &mut self,
        engine: &str,
        features: &[&'static str],
        dtype: DType,
        case: &str,
        verdicts: &[(String, Verdict)],
    ) {
        let failures = verdicts.iter().filter(|(_, verdict)| !verdict.ok()).count();
        let share = verdicts.iter().map(|(_, verdict)| share(verdict)).fold(0.0, f64::max);
        for feature in features {
            let column = self.column(feature, engine, dtype.name());
            column.cases += 1;
            column.failures += failures;
            column.worst_share = column.worst_share.max(share);
        }
        self.comparisons += verdicts.len();
        for (tensor, verdict) in verdicts.iter().filter(|(_, verdict)| !verdict.ok()) {
            self.failures.push(Failed {
                engine: engine.to_string(),
                case: case.to_string(),
                tensor: tensor.clone(),
                why: verdict.to_string(),
            });
        }
    }
}

/// Error as a share of the allowed one.
pub(crate) fn share(verdict: &Verdict) -> f64 {
    match (verdict.ok(), verdict.worst == 0.0) {
        (true, true) => 0.0,
        (true, false) => verdict.worst / verdict.allowed,
        // JSON has no infinity, so the largest number stands for it.
        (false, _) => (verdict.worst / verdict.allowed).clamp(1.0, f64::MAX),
    }
}
