//! `check`: every engine, every feature, every dtype against the f64 oracle.

use crate::args::CheckArgs;
use crate::variants::check as variants;
use crate::{Failure, json, progress, say};
use comfy_table::{CellAlignment, Table};
use fulgurite::{Choice, DType, Engine, Error, Forward, Gradients, Run, engine_with, engines};
use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::{self, Verdict};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

/// Failures that are printed one by one; the others are counted.
const SHOWN: usize = 20;

#[derive(Serialize)]
struct Results {
    version: &'static str,
    seed: u64,
    random_cases: usize,
    engines: Vec<String>,
    features: Vec<Row>,
    comparisons: usize,
    failures: Vec<Failed>,
    ok: bool,
}

#[derive(Serialize)]
struct Row {
    feature: &'static str,
    /// One for each engine and dtype.
    columns: Vec<Column>,
}

/// How close one engine came to its limits over all cases of one feature.
#[derive(Serialize, Clone)]
struct Column {
    engine: String,
    dtype: &'static str,
    cases: usize,
    refused: usize,
    failures: usize,
    /// The largest error, as a share of what is allowed.
    worst_share: f64,
}

#[derive(Serialize)]
struct Failed {
    engine: String,
    case: String,
    tensor: String,
    why: String,
}

/// Runs `check`.
pub fn main(args: &CheckArgs) -> Result<(), Failure> {
    let choices = match args.engine {
        Some(choice) => vec![choice],
        None => engines().into_iter().filter(|choice| *choice != Choice::Oracle).collect(),
    };
    let mut settings = fulgurite::Settings::default().order(args.order).profile(crate::args::profiles());
    settings.threads = args.threads;
    let engines: Result<Vec<_>, _> = choices.iter().map(|&choice| engine_with(choice, &settings)).collect();
    let engines = engines?;
    let seed = args.seed.unwrap_or_else(clock);
    let mut ledger = Ledger::default();
    for &dtype in &args.dtypes {
        let table = cases::cases(dtype);
        let (bar, known) = (progress((table.len() + args.long) * engines.len()), table.len());
        let random = (0..args.long as u64).map(|i| cases::random(seed.wrapping_add(i), dtype));
        for (i, case) in table.into_iter().chain(random).enumerate() {
            if !case.to_string().contains(&args.case) {
                bar.inc(engines.len() as u64);
                continue;
            }
            ledger.cases += 1;
            ledger.random += usize::from(i >= known);
            bar.set_message(case.to_string());
            for engine in &engines {
                compare_case(engine.as_ref(), &case, &mut ledger)?;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        // Each of them judges many tensors: a quarter as many say as much.
        let seeds = (0..variants::CASES).chain((0..args.long as u64 / 4).map(|i| seed.wrapping_add(i)));
        variants::compare(&choices, &settings, dtype, seeds, &args.case, &mut ledger)?;
    }
    if ledger.cases == 0 {
        let hint = "names are those of failures, or such as `random`, of which `--long N` adds some";
        return Err(Failure::input(format_args!("no case has `{}` in its name; {hint}", args.case)));
    }
    let results = ledger.results(args, seed, engines.iter().map(|e| e.name().to_string()).collect());
    if args.json {
        json::print(&results)?;
    } else {
        say(&text(&results, args))?;
    }
    if results.ok {
        return Ok(());
    }
    let (failed, all) = (results.failures.len(), results.comparisons);
    Err(Failure::work(format_args!("{failed} of {all} comparisons are outside the tolerance; they are listed above")))
}

fn clock() -> u64 {
    // Short enough to be typed again.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_millis() as u64 % 1_000_000_000)
}

#[derive(Default)]
pub(crate) struct Ledger {
    /// By feature, engine and dtype.
    columns: BTreeMap<(&'static str, String, &'static str), Column>,
    /// Cases that were run or refused, and how many of them were drawn.
    pub cases: usize,
    random: usize,
    comparisons: usize,
    failures: Vec<Failed>,
}

/// Runs one case on one engine, forward and (where it has one) backward, and enters what the oracle says.
fn compare_case(engine: &dyn Engine, case: &Case, ledger: &mut Ledger) -> Result<(), Failure> {
    let (problem, inputs, bound) = (case.problem(), case.inputs(), case.bound());
    if engine.supports(problem).is_err() {
        case.features.iter().for_each(|feature| ledger.refused(engine.name(), feature, case.dtype()));
        return Ok(());
    }
    let run = Run::default();
    let forward: Forward = engine.forward(problem, &inputs, &run)?;
    let mut verdicts = compare::check_forward(&bound, &forward, 0);
    let mut saved = forward.saved(case.d_o());
    let d_lse = case.d_lse();
    saved.d_lse = d_lse;
    let gradients: Result<Gradients, Error> = engine.backward(problem, &inputs, &saved, &run);
    match gradients {
        Ok(gradients) => verdicts.extend(compare::check_backward(&bound, &saved, &gradients, 0)),
        // An engine without a backward is judged by its forward.
        Err(Error::Unsupported(_)) => {}
        Err(other) => return Err(other.into()),
    }
    ledger.enter(engine.name(), &case.features, case.dtype(), &case.to_string(), &verdicts);
    Ok(())
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

    fn results(self, args: &CheckArgs, seed: u64, engines: Vec<String>) -> Results {
        let rows = cases::FEATURES.iter().chain(&variants::FEATURES).map(|&feature| {
            let all = engines.iter().flat_map(|engine| args.dtypes.iter().map(move |dtype| (engine, dtype.name())));
            let columns =
                all.filter_map(|(engine, dtype)| self.columns.get(&(feature, engine.clone(), dtype)).cloned());
            Row { feature, columns: columns.collect() }
        });
        Results {
            version: env!("CARGO_PKG_VERSION"),
            seed,
            random_cases: self.random / args.dtypes.len().max(1),
            features: rows.collect(),
            engines,
            comparisons: self.comparisons,
            ok: self.failures.is_empty(),
            failures: self.failures,
        }
    }
}

/// Error as a share of what is allowed.
pub(crate) fn share(verdict: &Verdict) -> f64 {
    match (verdict.ok(), verdict.worst == 0.0) {
        (true, true) => 0.0,
        (true, false) => verdict.worst / verdict.allowed,
        // JSON has no infinity; what is out of place is as bad as anything.
        (false, _) => (verdict.worst / verdict.allowed).clamp(1.0, f64::MAX),
    }
}

fn text(results: &Results, args: &CheckArgs) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_BORDERS_ONLY);
    let columns = results.engines.iter().flat_map(|engine| args.dtypes.iter().map(move |dtype| (engine, dtype.name())));
    let columns: Vec<(&String, &str)> = columns.collect();
    let titles = columns.iter().map(|(engine, dtype)| format!("{engine}\n{dtype}"));
    table.set_header(std::iter::once("feature".to_string()).chain(titles));
    for Row { feature, columns: found } in results.features.iter().filter(|row| !row.columns.is_empty()) {
        let cell = |(engine, dtype): &(&String, &str)| {
            let column = found.iter().find(|c| &c.engine == *engine && c.dtype == *dtype);
            match column {
                None => String::new(),
                Some(c) if c.failures > 0 => format!("WRONG {}", short(c.worst_share)),
                Some(c) if c.cases == 0 => "refused".into(),
                Some(c) => short(c.worst_share),
            }
        };
        table.add_row(std::iter::once(feature.to_string()).chain(columns.iter().map(cell)));
    }
    for column in 1..=columns.len() {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut lines = vec![
        "Largest error as a share of what the tolerance rule allows, over o, lse and all gradients:".to_string(),
        table.to_string(),
    ];
    if results.random_cases > 0 {
        let (n, seed) = (results.random_cases, results.seed);
        lines.push(format!("{n} random cases for each dtype, seed {seed}; repeat them with --seed {seed}"));
    }
    for Failed { engine, case, tensor, why } in results.failures.iter().take(SHOWN) {
        lines.push(format!("{engine} {case}: {tensor}: {why}"));
    }
    if let Some(more) = results.failures.len().checked_sub(SHOWN).filter(|&more| more > 0) {
        lines.push(format!("and {more} more; `--json` lists all"));
    }
    if results.ok {
        lines.push(match results.comparisons {
            0 => "nothing was compared: every case was refused".into(),
            all => format!("all {all} comparisons are within the tolerance"),
        });
    }
    lines.join("\n")
}

fn short(share: f64) -> String {
    match share {
        f64::MAX => "inf".into(),
        1000.0.. => format!("{share:.0e}"),
        _ => format!("{share:.2}"),
    }
}
