//! `sim`: runs a GPU kernel on the simulator, and reports its errors, work and timeline. `sim-vs-gpu`: compares the
//! simulator with a GPU.

use crate::args::{SimArgs, SimVsGpuArgs};
use crate::report::page;
use crate::{Failure, io, json, progress, say, terminal};
use comfy_table::{CellAlignment, Table};
use fulgurite::gpu::{self, Gpu, kernels};
use fulgurite::sim::{
    Adder, Architecture, Counts, Device, Interleaving, Number, Options, Report, Sim, SimError, Sizes, Timeline,
    compare, fit_adders, simulate, takes,
};
use fulgurite_core::random::Rng;
use maud::html;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

/// The results of `sim`.
#[derive(Serialize)]
struct Results {
    version: &'static str,
    kernel: String,
    problem: String,
    ctas: u64,
    seed: u64,
    findings: Vec<String>,
    /// The work of each role.
    roles: BTreeMap<String, BTreeMap<&'static str, u64>>,
    /// Cycles by the approximate clock, if a timeline was asked for.
    cycles: Option<u64>,
}

impl Results {
    fn new(args: &SimArgs, problem: &str, report: &Report, cycles: Option<u64>) -> Results {
        let role = |(name, counts): &(String, Counts)| (name.clone(), numbers(counts).into_iter().collect());
        Results {
            version: env!("CARGO_PKG_VERSION"),
            kernel: args.name.clone(),
            problem: problem.to_owned(),
            ctas: report.blocks,
            seed: args.seed,
            findings: report.findings.iter().map(ToString::to_string).collect(),
            roles: report.roles.iter().map(role).collect(),
            cycles,
        }
    }
}

/// Each kind of work by its name.
fn numbers(c: &Counts) -> [(&'static str, u64); 13] {
    [
        ("instructions of warps", c.instructions),
        ("instructions of lanes", c.lanes.values().sum()),
        ("tensor FLOP", c.tensor_flops.values().sum()),
        ("exponentials", c.exps),
        ("f32 operations", c.fmas),
        ("shared bytes, threads", c.shared_thread_bytes),
        ("shared bytes, operands", c.shared_operand_bytes),
        ("shared bytes, copies", c.shared_copy_bytes),
        ("bank conflicts", c.bank_conflicts),
        ("global bytes", c.global_bytes),
        ("global sectors", c.global_sectors),
        ("waits", c.waits),
        ("waits that blocked", c.waits_blocked),
    ]
}

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
    let timeline = if args.trace.is_some() || args.open { Some(timeline(args)?) } else { None };
    if let (Some(path), Some(timeline)) = (&args.trace, &timeline) {
        write(path, timeline)?;
    }
    let cycles = timeline.as_ref().map(Timeline::cycles);
    if args.json {
        json::print(&Results::new(args, &done.problem, &done.report, cycles))?;
    } else {
        say(&format!("{}: {}, {} CTAs, seed {}: {verdict}", args.name, done.problem, done.report.blocks, args.seed))?;
        for finding in findings {
            say(&format!("  {finding}"))?;
        }
        if args.counters {
            say(&counters(&done.report, &done.architecture).to_string())?;
        }
        if let (Some(path), Some(cycles)) = (&args.trace, cycles) {
            say(&format!("{}: about {cycles} cycles", path.display()))?;
        }
    }
    if let (true, Some(timeline)) = (args.open, &timeline) {
        let title = format!("fulgurite sim {}", args.name);
        let body = html! {
            p { (done.problem) ", " (done.report.blocks) " CTAs, seed " (args.seed) ": " (verdict) }
            @for finding in findings { pre { (finding) } }
            h2 { "Timeline of one CTA, about " (timeline.cycles()) " cycles" }
            (page::timeline(&timeline.svg(0)))
            h2 { "Counters" }
            pre { (counters(&done.report, &done.architecture)) }
        };
        page::open("sim", &page::page(&title, &body), args.json)?;
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
            ..usual
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
fn counters(report: &Report, architecture: &Architecture) -> Table {
    let total = report.total();
    let mut columns: Vec<(&str, _)> = report.roles.iter().map(|(name, counts)| (name.as_str(), counts)).collect();
    if columns.len() > 1 {
        columns.push(("total", &total));
    } else {
        columns = vec![("total", &total)];
    }
    let mut table = terminal::table(std::iter::once("").chain(columns.iter().map(|(name, _)| *name)));
    let all: Vec<_> = columns.iter().map(|(_, counts)| numbers(counts)).collect();
    for (i, (name, _)) in all[0].iter().enumerate() {
        let cells = all.iter().map(|column| column[i].1.to_string());
        table.add_row(std::iter::once((*name).to_owned()).chain(cells));
    }
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

/// Runs again with the clock.
fn timeline(args: &SimArgs) -> Result<Timeline, Failure> {
    let options = Options { seed: args.seed, order: Interleaving::Timed, ..Options::default() };
    let done = simulate(&args.name, &args.sizes(), &options).map_err(failure)?;
    Ok(done.report.timeline.unwrap_or_default())
}

/// Writes a timeline, in the format that the name asks for.
fn write(path: &Path, timeline: &Timeline) -> Result<(), Failure> {
    let text = match path.extension().and_then(|e| e.to_str()) {
        Some("svg") => timeline.svg(0),
        _ => timeline.chrome(),
    };
    io::write_file(path, text.as_bytes())
}

/// Runs `sim-vs-gpu`: a line for each kernel, as soon as it is done.
pub fn against_gpu(args: &SimVsGpuArgs) -> Result<(), Failure> {
    let chosen = |name: &str| args.names.is_empty() || args.names.iter().any(|begin| name.starts_with(begin.as_str()));
    let names: Vec<&str> = kernels().iter().map(|entry| entry.name).filter(|name| chosen(name)).collect();
    if names.is_empty() {
        return Err(Failure::input(format_args!(
            "no kernel begins so: {}; try `fulgurite kernel list`",
            args.names.join(", ")
        )));
    }
    let gpu = Gpu::open(args.gpu, gpu::Options::default(), &crate::args::profiles())?;
    let target = gpu.device().target();
    let names: Vec<&str> = names.into_iter().filter(|name| takes(name, target)).collect();
    if args.adder {
        say(&format!("{} and the simulator, seed {}", gpu.name(), args.seed))?;
        return adders(gpu.device().as_ref(), args.seed);
    }
    if !args.json {
        say(&format!("{} and the simulator, seed {}", gpu.name(), args.seed))?;
    }
    let line = |cells: [&str; 6], worst: &str| {
        let [name, cases, elements, unequal, steps, seconds] = cells;
        say(&format!("{name:<27}{cases:>6}{elements:>12}{unequal:>13}{steps:>18}{seconds:>9}  {worst}"))
    };
    if !args.json {
        line(["kernel", "cases", "elements", "bits differ", "steps, at most", "seconds"], "worst case")?;
    }
    let mut compared = Vec::new();
    let bar = progress(names.len() * args.cases as usize);
    for name in names {
        let (start, mut rng) = (Instant::now(), Rng::new(args.seed));
        let (mut cases, mut elements, mut unequal, mut worst) = (0, 0, 0, (0, String::new()));
        for _ in 0..args.cases {
            let sizes = random_sizes(&mut rng);
            let sim = Sim::on(target, Options { seed: args.seed, ..Options::default() });
            let seed = rng.bits();
            bar.inc(1);
            let one = match compare(name, &sizes, seed, &sim, gpu.device().as_ref()) {
                // Sizes are drawn for all kernels alike, and some take only few queries, or no clusters.
                Err(SimError::Size { .. }) => continue,
                one => one.map_err(failure)?,
            };
            cases += 1;
            elements += one.elements;
            unequal += one.unequal;
            if one.steps > worst.0 {
                worst = (one.steps, one.problem);
            }
        }
        if args.json {
            compared.push(Compared { kernel: name, cases, elements, unequal, steps: worst.0, worst: worst.1 });
            continue;
        }
        let [cases, elements, unequal, steps] = [cases.into(), elements, unequal, worst.0].map(|n| n.to_string());
        let seconds = format!("{:.1}", start.elapsed().as_secs_f64());
        bar.suspend(|| line([name, &cases, &elements, &unequal, &steps, &seconds], &worst.1))?;
    }
    bar.finish_and_clear();
    if args.json { json::print(&compared) } else { Ok(()) }
}

/// A kernel on the simulator and on a GPU.
#[derive(Serialize)]
struct Compared {
    kernel: &'static str,
    /// Cases that ran: sizes that the kernel does not take are left out.
    cases: u32,
    elements: u64,
    /// Elements whose bits differ.
    unequal: u64,
    /// Largest difference, in steps of the element type.
    steps: u64,
    /// The problem with that difference.
    worst: String,
}

/// Which models explain what a GPU's tensor cores compute.
fn adders(device: &dyn Device, seed: u64) -> Result<(), Failure> {
    for number in [Number::F16, Number::Bf16] {
        let fits = fit_adders(device, number, seed).map_err(failure)?;
        let used = Adder::hopper(number);
        say(&format!("{}: sums that differ, of {}, for the best models", number.name(), fits[0].elements))?;
        for fit in fits.iter().take(5).chain(fits.iter().skip(5).filter(|fit| fit.adder == used)) {
            let Adder { kept_bits, group, exponent, rounding, fused, .. } = fit.adder;
            let together = if fused { "with the accumulator" } else { "before the accumulator" };
            let here = if fit.adder == used { " (the simulator's)" } else { "" };
            say(&format!(
                "{:>8}  {kept_bits} bits, groups of {group} {together}, exponents of {exponent:?}, {rounding:?}{here}",
                fit.unequal
            ))?;
        }
    }
    Ok(())
}

/// Sizes that a simulator runs in a moment: tails and several tiles along every axis, but not along all at once.
fn random_sizes(rng: &mut Rng) -> Sizes {
    let long = rng.bits() % 4;
    let mut below = |n: u64| 1 + (rng.bits() % n) as u32;
    let kv_heads = below(2);
    Sizes {
        m: below(if long == 0 { 520 } else { 140 }),
        n: below(if long == 1 { 700 } else { 270 }),
        k: below(if long == 2 { 600 } else { 140 }),
        batch: below(2),
        q_len: below(300),
        k_len: below(400),
        heads: kv_heads * below(2),
        kv_heads,
        blocks: below(8),
        padding: below(3) - 1,
        cluster: below(2),
    }
}
