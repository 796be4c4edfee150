//! `sim`: a GPU kernel on a simulator: what is wrong with it, what it did, and when.

use crate::args::SimArgs;
use crate::{Failure, say};
use comfy_table::{CellAlignment, Table};
use fulgurite::sim::{Architecture, Options, Order, Report, SimError, Sizes, simulate};
use std::path::Path;

/// Runs `sim`.
pub fn main(args: &SimArgs) -> Result<(), Failure> {
    let options = Options { seed: args.seed, ..Options::default() };
    let done = simulate(&args.name, &args.sizes(), &options).map_err(failure)?;
    let findings = &done.report.findings;
    let verdict = match findings.len() {
        0 => "clean".to_owned(),
        1 => "1 finding".to_owned(),
        n => format!("{n} findings"),
    };
    say(&format!("{}: {}, {} blocks, seed {}: {verdict}", args.name, done.problem, done.report.blocks, args.seed))?;
    for finding in findings {
        say(&format!("  {finding}"))?;
    }
    if args.counters {
        say(&counters(&done.report).to_string())?;
    }
    if let Some(path) = &args.trace {
        trace(args, path)?;
    }
    match findings.first() {
        None => Ok(()),
        Some(_) => Err(Failure::work(format_args!("`{}` has {verdict}", args.name))),
    }
}

impl SimArgs {
    fn sizes(&self) -> Sizes {
        let usual = Sizes::default();
        Sizes {
            m: self.m.unwrap_or(usual.m),
            n: self.n.unwrap_or(usual.n),
            k: self.k.unwrap_or(usual.k),
            batch: self.batch.unwrap_or(usual.batch),
            q_len: self.q_len.unwrap_or(usual.q_len),
            k_len: self.k_len.unwrap_or(usual.k_len),
            heads: self.heads.unwrap_or(usual.heads),
            kv_heads: self.kv_heads.or(self.heads).unwrap_or(usual.kv_heads),
            blocks: self.blocks.unwrap_or(usual.blocks),
        }
    }
}

fn failure(e: SimError) -> Failure {
    match e {
        SimError::Build(_) => Failure::Work(e.into()),
        _ => Failure::Input(e.into()),
    }
}

/// A column for each role and one for all, then the cycles that each unit needs.
fn counters(report: &Report) -> Table {
    let total = report.total();
    let mut columns: Vec<(&str, _)> = report.roles.iter().map(|(name, counts)| (name.as_str(), counts)).collect();
    if columns.len() > 1 {
        columns.push(("total", &total));
    } else {
        columns = vec![("total", &total)];
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_BORDERS_ONLY);
    table.set_header(std::iter::once("").chain(columns.iter().map(|(name, _)| *name)));
    let mut row = |name: &str, f: &dyn Fn(&fulgurite::sim::Counts) -> u64| {
        table.add_row(std::iter::once(name.to_owned()).chain(columns.iter().map(|(_, c)| f(c).to_string())));
    };
    row("instructions of warps", &|c| c.instructions);
    row("instructions of lanes", &|c| c.lanes.values().sum());
    row("tensor FLOP", &|c| c.tensor_flops.values().sum());
    row("exponentials", &|c| c.exps);
    row("f32 operations", &|c| c.fmas);
    row("shared bytes, threads", &|c| c.shared_thread_bytes);
    row("shared bytes, operands", &|c| c.shared_operand_bytes);
    row("shared bytes, copies", &|c| c.shared_copy_bytes);
    row("bank conflicts", &|c| c.bank_conflicts);
    row("global bytes", &|c| c.global_bytes);
    row("global sectors", &|c| c.global_sectors);
    row("waits", &|c| c.waits);
    row("waits that blocked", &|c| c.waits_blocked);
    let architecture = Architecture::H200;
    let cycles: Vec<Vec<(&str, f64)>> = columns.iter().map(|(_, c)| architecture.cycles(c)).collect();
    for (i, (unit, _)) in cycles[0].iter().enumerate() {
        let name = format!("cycles of one SM: {unit}");
        table.add_row(std::iter::once(name).chain(cycles.iter().map(|c| format!("{:.0}", c[i].1))));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Runs again by the clock, and writes what happened when.
fn trace(args: &SimArgs, path: &Path) -> Result<(), Failure> {
    let options = Options { seed: args.seed, order: Order::Timed, ..Options::default() };
    let done = simulate(&args.name, &args.sizes(), &options).map_err(failure)?;
    let timeline = done.report.timeline.unwrap_or_default();
    let text = match path.extension().and_then(|e| e.to_str()) {
        Some("svg") => timeline.svg(0),
        _ => timeline.chrome(),
    };
    std::fs::write(path, text).map_err(|e| Failure::input(format_args!("cannot write to {}: {e}", path.display())))?;
    say(&format!("{}: about {} cycles", path.display(), timeline.cycles()))
}
