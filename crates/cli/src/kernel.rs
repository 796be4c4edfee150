//! `kernel`: the GPU kernels as text and as machine code, with the assembler's report.

use crate::args::{KernelAssembleArgs, KernelCommand, KernelListArgs, KernelPtxArgs, KernelSassArgs, ToolArgs};
use crate::{Failure, json, progress, say, terminal};
use comfy_table::CellAlignment;
use fulgurite::gpu::{AssembleError, Assembler, BuildError, Entry, Hints, Kernel, Report, Target, kernels};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;

/// Runs `kernel`.
pub fn main(command: &KernelCommand) -> Result<(), Failure> {
    match command {
        KernelCommand::List(args) => list(args),
        KernelCommand::Ptx(args) => ptx(args),
        KernelCommand::Assemble(args) => assemble(args),
        KernelCommand::Sass(args) => sass(args),
    }
}

#[derive(Serialize)]
struct Listing {
    version: &'static str,
    arch: String,
    kernels: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    name: &'static str,
    summary: &'static str,
    /// Why the architecture cannot run it.
    refused: Option<String>,
}

fn list(args: &KernelListArgs) -> Result<(), Failure> {
    let listed = |entry: &Entry| {
        let refused = (entry.build)(args.arch).err().map(|e| e.to_string());
        Listed { name: entry.name, summary: entry.summary, refused }
    };
    let kernels = kernels().iter().map(listed).collect();
    let listing = Listing { version: env!("CARGO_PKG_VERSION"), arch: args.arch.name(), kernels };
    if args.json {
        return json::print(&listing);
    }
    let mut table = terminal::table(["kernel", "computes", &listing.arch]);
    for kernel in &listing.kernels {
        let here = if kernel.refused.is_some() { "no" } else { "yes" };
        table.add_row([kernel.name, kernel.summary, here]);
    }
    say(&table.to_string())
}

fn ptx(args: &KernelPtxArgs) -> Result<(), Failure> {
    say(&built(&args.name, args.arch)?.ptx())
}

fn sass(args: &KernelSassArgs) -> Result<(), Failure> {
    let kernel = built(&args.name, args.arch)?;
    say(&assembler(&args.tools)?.sass(&kernel).map_err(failure)?)
}

/// The kernel of this name; one that the architecture cannot run is a wrong call.
fn built(name: &str, arch: Target) -> Result<Kernel, Failure> {
    (find(name)?.build)(arch).map_err(|e| match e {
        BuildError::Needs { .. } => Failure::Input(e.into()),
        _ => Failure::Work(e.into()),
    })
}

fn find(name: &str) -> Result<&'static Entry, Failure> {
    let found = kernels().iter().find(|entry| entry.name == name);
    found.ok_or_else(|| {
        let near = near(name, kernels().iter().map(|entry| entry.name));
        let near = if near.is_empty() { String::new() } else { format!(", near: {}", near.join(", ")) };
        Failure::input(format_args!("`NAME` is {name}, there is no such kernel{near}; try `fulgurite kernel list`"))
    })
}

/// Names that begin as `name` does or can be made from it by few changes, the nearest first.
fn near<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    const SHOWN: usize = 4;
    let changes = |other: &str| if other.starts_with(name) { 0 } else { distance(name, other) };
    let mut near: Vec<(usize, &str)> = names.map(|other| (changes(other), other)).collect();
    near.retain(|&(changes, other)| changes <= other.len() / 3);
    near.sort_by_key(|&(changes, _)| changes);
    near.into_iter().take(SHOWN).map(|(_, other)| other).collect()
}

/// Number of characters that must be inserted, removed or replaced (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let replaced = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

/// The assembler that was asked for. The environment is read here and nowhere below.
pub(crate) fn assembler(args: &ToolArgs) -> Result<Assembler, Failure> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let hints = Hints {
        ptxas: args.ptxas.clone().or_else(|| variable("PTXAS").map(PathBuf::from)),
        path: variable("PATH"),
        environments: ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(variable).map(PathBuf::from).collect(),
    };
    Assembler::find(&hints).map_err(failure)
}

/// A tool that was named and is not there is a wrong call; all else is work that this machine cannot do, or that failed.
fn failure(e: AssembleError) -> Failure {
    match e {
        AssembleError::NotThere { .. } => Failure::Input(e.into()),
        _ => Failure::Work(e.into()),
    }
}

#[derive(Serialize)]
struct Results {
    version: &'static str,
    arch: String,
    ptxas: String,
    ptxas_version: String,
    kernels: Vec<Assembled>,
    ok: bool,
}

#[derive(Serialize)]
struct Assembled {
    name: &'static str,
    /// Why the architecture cannot run it.
    refused: Option<String>,
    /// The assembler's result; absent where the kernel is refused or was not assembled.
    report: Option<Numbers>,
    messages: Vec<Remark>,
    faults: Vec<String>,
}

#[derive(Serialize)]
struct Numbers {
    registers: u32,
    spill_stores_bytes: u32,
    spill_loads_bytes: u32,
    stack_bytes: u32,
    shared_bytes: u32,
    barriers: u32,
    ptxas_ms: f64,
    cubin_bytes: usize,
}

#[derive(Serialize)]
struct Remark {
    severity: &'static str,
    code: Option<String>,
    text: String,
    file: Option<String>,
    line: Option<u32>,
}

fn assemble(args: &KernelAssembleArgs) -> Result<(), Failure> {
    let entries: Vec<&Entry> = match &args.name {
        Some(name) => {
            built(name, args.arch)?;
            vec![find(name)?]
        }
        None => kernels().iter().collect(),
    };
    let assembler = assembler(&args.tools)?;
    let bar = progress(entries.len());
    // The assembler is another process: as many at a time as there are cores.
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).min(entries.len());
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<(usize, Assembled)>, Failure> {
        let mut done = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(entry) = entries.get(i) else { return Ok(done) };
            bar.set_message(entry.name);
            done.push((i, assemble_one(&assembler, entry, args.arch)?));
            bar.inc(1);
        }
    };
    let parts = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let join = |worker: ScopedJoinHandle<'_, _>| worker.join().unwrap_or_else(|e| std::panic::resume_unwind(e));
        workers.into_iter().map(join).collect::<Result<Vec<_>, Failure>>()
    })?;
    bar.finish_and_clear();
    let mut kernels: Vec<_> = parts.into_iter().flatten().collect();
    kernels.sort_by_key(|(i, _)| *i);
    let kernels: Vec<Assembled> = kernels.into_iter().map(|(_, kernel)| kernel).collect();
    let results = Results {
        version: env!("CARGO_PKG_VERSION"),
        arch: args.arch.name(),
        ptxas: assembler.ptxas().display().to_string(),
        ptxas_version: assembler.version().map_err(failure)?,
        ok: kernels.iter().all(|kernel| kernel.faults.is_empty()),
        kernels,
    };
    if args.json {
        json::print(&results)?
    } else {
        say(&text(&results))?
    }
    if results.ok {
        return Ok(());
    }
    let faulty: Vec<&str> = results.kernels.iter().filter(|k| !k.faults.is_empty()).map(|k| k.name).collect();
    let (n, all) = (faulty.len(), results.kernels.len());
    Err(Failure::work(format_args!(
        "{n} of {all} kernels are faulty: {}; what is wrong is listed above",
        faulty.join(", ")
    )))
}

fn assemble_one(assembler: &Assembler, entry: &Entry, arch: Target) -> Result<Assembled, Failure> {
    let none = Assembled { name: entry.name, refused: None, report: None, messages: Vec::new(), faults: Vec::new() };
    let kernel = match (entry.build)(arch) {
        Ok(kernel) => kernel,
        Err(e @ BuildError::Needs { .. }) => return Ok(Assembled { refused: Some(e.to_string()), ..none }),
        Err(e) => return Ok(Assembled { faults: vec![e.to_string()], ..none }),
    };
    let report = match assembler.assemble(&kernel) {
        Ok(report) => report,
        Err(e @ AssembleError::Refused { .. }) => return Ok(Assembled { faults: vec![e.to_string()], ..none }),
        Err(e) => return Err(failure(e)),
    };
    let faults = report.verdict().err().unwrap_or_default().iter().map(ToString::to_string).collect();
    let messages = report.messages.iter().map(|m| Remark {
        severity: m.severity.name(),
        code: m.code.clone(),
        text: m.text.clone(),
        file: m.at.as_ref().map(|at| at.file.clone()),
        line: m.at.as_ref().map(|at| at.line),
    });
    Ok(Assembled { report: Some(numbers(&report)), messages: messages.collect(), faults, ..none })
}

fn numbers(report: &Report) -> Numbers {
    Numbers {
        registers: report.registers,
        spill_stores_bytes: report.spill_stores_bytes,
        spill_loads_bytes: report.spill_loads_bytes,
        stack_bytes: report.stack_bytes,
        shared_bytes: report.shared_bytes,
        barriers: report.barriers,
        ptxas_ms: report.time.as_secs_f64() * 1e3,
        cubin_bytes: report.cubin.len(),
    }
}

fn text(results: &Results) -> String {
    let titles =
        ["kernel", "registers", "spills, bytes", "stack, bytes", "shared, bytes", "barriers", "ptxas, ms", "verdict"];
    let mut table = terminal::table(titles);
    for kernel in &results.kernels {
        let verdict = match (&kernel.refused, kernel.faults.is_empty()) {
            (Some(_), _) => "refused",
            (None, true) => "ok",
            (None, false) => "FAULTY",
        };
        let numbers = kernel.report.as_ref().map_or([const { String::new() }; 6], |n| {
            [
                n.registers.to_string(),
                format!("{} / {}", n.spill_stores_bytes, n.spill_loads_bytes),
                n.stack_bytes.to_string(),
                n.shared_bytes.to_string(),
                n.barriers.to_string(),
                format!("{:.0}", n.ptxas_ms),
            ]
        });
        table.add_row([kernel.name.to_string()].into_iter().chain(numbers).chain([verdict.to_string()]));
    }
    for column in 1..titles.len() - 1 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut lines = vec![table.to_string()];
    for kernel in &results.kernels {
        lines.extend(kernel.refused.iter().map(|why| format!("{}: {why}", kernel.name)));
        lines.extend(kernel.faults.iter().map(|fault| format!("{}: {fault}", kernel.name)));
        for m in kernel.messages.iter().filter(|m| m.severity == "warning") {
            lines.push(format!("{}: warning {}", kernel.name, m.text));
        }
    }
    lines.push(format!("for {}, by ptxas {}", results.arch, results.ptxas_version));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, want) in [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("add", "add", 0), ("ad", "dad", 1)]
        {
            assert_eq!(distance(a, b), want, "{a} {b}");
            assert_eq!(distance(b, a), want, "{b} {a}");
        }
    }

    #[test]
    fn near_names() {
        let names = ["vector_add", "gemm-f16-nn", "gemm-f16-nt"];
        let of = |name: &str| near(name, names.into_iter());
        assert_eq!(of("gemm"), ["gemm-f16-nn", "gemm-f16-nt"]);
        assert_eq!(of("gemm-f16-nt2"), ["gemm-f16-nt", "gemm-f16-nn"]);
        assert_eq!(of("vectoradd"), ["vector_add"]);
        assert!(of("softmax").is_empty());
    }
}
