//! `doctor`: the CPU and GPUs of this machine, the engine that is chosen, and the reason.

use crate::args::DoctorArgs;
use crate::machine::{Machine, gibibytes};
use crate::{Failure, json, say};
use fulgurite::{DType, Mask, Problem, engine_with, engines, explain};
use serde::Serialize;

#[derive(Serialize)]
struct Findings {
    version: &'static str,
    machine: Machine,
    engine: Engine,
    engines: Vec<String>,
    why: Vec<String>,
}

#[derive(Serialize)]
struct Engine {
    asked: String,
    description: String,
}

/// Runs `doctor`.
pub fn main(args: &DoctorArgs) -> Result<(), Failure> {
    let chosen = engine_with(args.engine.engine, &args.engine.settings())?;
    // A problem that every engine runs, so that only speed decides.
    let usual = Problem::builder().dense(1, 1024, 1024).heads(16, 16).head_dim(64).dtype(DType::F32);
    let usual = usual.mask(Mask::causal()).build().map_err(fulgurite::Error::from)?;
    let findings = Findings {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::look(),
        engine: Engine { asked: args.engine.engine.to_string(), description: chosen.describe() },
        engines: engines().iter().map(ToString::to_string).collect(),
        why: explain(&usual, args.engine.engine).lines().map(String::from).collect(),
    };
    if args.json { json::print(&findings) } else { say(&text(&findings)) }
}

fn text(findings: &Findings) -> String {
    let machine = &findings.machine;
    let known = |text: String| if text.is_empty() { "unknown".into() } else { text };
    let mut lines = vec![
        format!("fulgurite {}", findings.version),
        String::new(),
        format!("cpu               {}", machine.cpu),
        format!("cores             {}", machine.cores),
        format!("caches            {}", known(machine.caches.join(", "))),
        format!("memory            {}", known(machine.memory_bytes.map(gibibytes).unwrap_or_default())),
        format!("system            {} {}", machine.os, machine.arch),
        format!("instruction sets  {}", machine.instruction_sets.join(", ")),
        String::new(),
        format!("engine            {}", findings.engine.description),
    ];
    lines.extend(findings.why.iter().map(|why| format!("  {why}")));
    lines.join("\n")
}
