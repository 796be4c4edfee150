//! `check`: every engine, every feature, every dtype against the f64 oracle.

use crate::args::CheckArgs;
use crate::ledger::{Column, Failed, Ledger};
use crate::variants::check as variants;
use crate::{Failure, json, progress, say, terminal};
use comfy_table::CellAlignment;
use fulgurite::{Choice, Engine, Error, Forward, Gradients, Run, engine_with, engines};
use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare;
use serde::Serialize;

/// Failures that are printed one by one; the others are counted.
const SHOWN: usize = 20;

#[derive(Serialize)]
struct Results {
    version: &'static str,
    seed: u64,
    random_cases: usize,
    engines: Vec<String>,
    features: Vec<FeatureResult>,
    comparisons: usize,
    failures: Vec<Failed>,
    ok: bool,
}

#[derive(Serialize)]
struct FeatureResult {
    feature: &'static str,
    /// One for each engine and dtype.
    columns: Vec<Column>,
}

/// The first seed of random cases: the same in every run, so that a failure is one for everybody.
const FIRST_SEED: u64 = 1;

/// The names of the cases that `--case` selects from, by type.
fn list(args: &CheckArgs) -> Result<(), Failure> {
    let names = |dtype| cases::cases(dtype).iter().map(ToString::to_string).collect::<Vec<String>>();
    let mut known: Vec<String> = args.dtypes.iter().flat_map(|&dtype| names(dtype)).collect();
    for &dtype in &args.dtypes {
        known.extend(
            (0..variants::CASES).flat_map(|seed| variants::FEATURES.map(|name| variants::name(name, seed, dtype))),
        );
    }
    known.retain(|name| name.contains(&args.case));
    if args.json { json::print(&known) } else { say(&known.join("\n")) }
}

/// Runs `check`.
pub fn main(args: &CheckArgs) -> Result<(), Failure> {
    if args.list {
        return list(args);
    }
    let choices = match args.engine {
        Some(choice) => vec![choice],
        None => engines().into_iter().filter(|choice| *choice != Choice::Oracle).collect(),
    };
    let mut settings = fulgurite::Settings::default().order(args.order).profile(crate::args::profiles());
    settings.threads = args.threads;
    let engines: Result<Vec<_>, _> = choices.iter().map(|&choice| engine_with(choice, &settings)).collect();
    let engines = engines?;
    let seed = args.seed.unwrap_or(FIRST_SEED);
    let mut ledger = Ledger::default();
    for &dtype in &args.dtypes {
        let table = cases::cases(dtype);
        let long = args.long as u64;
        let again = cases::SEEDS.iter().copied().take(args.long);
        let random = again.chain((0..long).map(|i| seed.wrapping_add(i))).map(|seed| cases::random(seed, dtype));
        let nonfinite = (0..long.div_ceil(4)).map(|i| cases::random_nonfinite(seed.wrapping_add(i), dtype));
        let drawn: usize = args.long + args.long.div_ceil(4) + cases::SEEDS.len().min(args.long);
        let (bar, known) = (progress((table.len() + drawn) * engines.len()), table.len());
        for (i, case) in table.into_iter().chain(random).chain(nonfinite).enumerate() {
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
        let hint = "see `fulgurite check --list`; cases called `random` exist only with `--long N`";
        return Err(Failure::input(format_args!("no case has `{}` in its name; {hint}", args.case)));
    }
    let results = results(ledger, args, seed, engines.iter().map(|e| e.name().to_string()).collect());
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

/// Runs one case on one engine, forward and (where it has one) backward, and enters the oracle's verdicts.
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
    // An engine without a backward is judged by its forward.
    let gradients: Result<Gradients, Error> = engine.backward(problem, &inputs, &saved, &run);
    match gradients {
        Ok(gradients) => verdicts.extend(compare::check_backward(&bound, &saved, &gradients, 0)),
        Err(Error::Unsupported(_)) => {}
        Err(other) => return Err(other.into()),
    }
    ledger.enter(engine.name(), &case.features, case.dtype(), &case.to_string(), &verdicts);
    Ok(())
}

/// The ledger as it is printed.
fn results(ledger: Ledger, args: &CheckArgs, seed: u64, engines: Vec<String>) -> Results {
    let rows = cases::FEATURES.iter().chain(&variants::FEATURES).map(|&feature| {
        let all = engines.iter().flat_map(|engine| args.dtypes.iter().map(move |dtype| (engine, dtype.name())));
        let columns = all.filter_map(|(engine, dtype)| ledger.columns.get(&(feature, engine.clone(), dtype)).cloned());
        FeatureResult { feature, columns: columns.collect() }
    });
    Results {
        version: env!("CARGO_PKG_VERSION"),
        seed,
        random_cases: ledger.random / args.dtypes.len().max(1),
        features: rows.collect(),
        engines,
        comparisons: ledger.comparisons,
        ok: ledger.failures.is_empty(),
        failures: ledger.failures,
    }
}

fn text(results: &Results, args: &CheckArgs) -> String {
    let columns = results.engines.iter().flat_map(|engine| args.dtypes.iter().map(move |dtype| (engine, dtype.name())));
    let columns: Vec<(&String, &str)> = columns.collect();
    let titles = columns.iter().map(|(engine, dtype)| format!("{engine}\n{dtype}"));
    let mut table = terminal::table(std::iter::once("feature".to_string()).chain(titles));
    for FeatureResult { feature, columns: found } in results.features.iter().filter(|row| !row.columns.is_empty()) {
        let cell = |(engine, dtype): &(&String, &str)| {
            let column = found.iter().find(|c| &c.engine == *engine && c.dtype == *dtype);
            match column {
                None => comfy_table::Cell::new(""),
                Some(c) if c.failures > 0 => terminal::verdict(format!("WRONG {}", short(c.worst_share)), false),
                Some(c) if c.cases == 0 => comfy_table::Cell::new("refused"),
                Some(c) => terminal::verdict(short(c.worst_share), true),
            }
        };
        table.add_row(std::iter::once(comfy_table::Cell::new(feature)).chain(columns.iter().map(cell)));
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
