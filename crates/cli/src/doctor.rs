//! `doctor`: the CPU and GPUs of this machine, the tools and folders that are used, the engine that is chosen, and the reason.

use crate::args::{DoctorArgs, ToolArgs, profiles};
use crate::machine::{Machine, gibibytes};
use crate::{Failure, json, kernel, say};
use fulgurite::gpu::{Cuda, Options, default_cache_dir};
use fulgurite::sim::Device;
use fulgurite::{Choice, DType, Mask, Problem, engine_with, engines, explain};
use serde::Serialize;
use std::path::Path;

#[derive(Serialize)]
struct Findings {
    version: &'static str,
    machine: Machine,
    gpus: Vec<GpuFinding>,
    /// Why there is no GPU, or why the next one cannot be used.
    no_gpu: Option<String>,
    assembler: Assembler,
    /// Folder of compiled kernels, unless nothing is kept.
    kernel_cache: Option<Folder>,
    engine: Engine,
    engines: Vec<String>,
    why: Vec<String>,
    also: Vec<String>,
}

#[derive(Serialize)]
struct GpuFinding {
    name: String,
    compute_capability: (u32, u32),
    /// The newest CUDA version that the driver supports.
    driver_cuda: (u32, u32),
    /// What computes attention on it.
    used: String,
    /// Where `tune` keeps its tile configurations.
    profile: Option<String>,
    profile_exists: bool,
}

/// NVIDIA's assembler: its place and version, or why there is none.
#[derive(Serialize)]
struct Assembler {
    ptxas: Option<String>,
    version: Option<String>,
    missing: Option<String>,
}

#[derive(Serialize)]
struct Folder {
    path: String,
    files: usize,
    bytes: u64,
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
    let (gpus, no_gpu) = gpus();
    let engines: Vec<String> = engines().iter().map(ToString::to_string).collect();
    let verdicts: Vec<String> = explain(&usual, args.engine.engine).lines().map(String::from).collect();
    let (also, why) = verdicts.into_iter().partition(|line| line.ends_with("not used, slower"));
    let findings = Findings {
        version: env!("CARGO_PKG_VERSION"),
        machine: Machine::look(),
        gpus,
        no_gpu,
        assembler: assembler(),
        kernel_cache: default_cache_dir(&|name| std::env::var_os(name)).map(|path| Folder::look(&path)),
        engine: Engine { asked: args.engine.engine.to_string(), description: chosen.describe() },
        engines,
        why,
        also: also.into_iter().map(|line| line.replace(": not used, slower", "")).collect(),
    };
    if args.json { json::print(&findings) } else { say(&text(&findings)) }
}

/// The GPUs that can be opened, and why there are no more; nothing to say where at least one works.
fn gpus() -> (Vec<GpuFinding>, Option<String>) {
    let mut found = Vec::new();
    loop {
        let gpu = match Cuda::open(found.len() as u32, Options::default()) {
            Ok(gpu) => gpu,
            Err(why) => {
                let why = found.is_empty().then(|| why.to_string());
                return (found, why);
            }
        };
        let profile = profiles().path(&gpu.name());
        let used = match engine_with(Choice::Cuda, &fulgurite::Settings::default()) {
            Ok(engine) => format!("tensors on it, and `--engine cuda` for host tensors: {}", engine.describe()),
            Err(why) => format!("not used: {why}"),
        };
        found.push(GpuFinding {
            name: gpu.name(),
            compute_capability: gpu.capability(),
            driver_cuda: gpu.cuda_version(),
            used,
            profile_exists: profile.as_deref().is_some_and(Path::exists),
            profile: profile.map(|path| path.display().to_string()),
        });
    }
}

fn assembler() -> Assembler {
    match kernel::assembler(&ToolArgs { ptxas: None }) {
        Ok(found) => {
            Assembler { ptxas: Some(found.ptxas().display().to_string()), version: found.version().ok(), missing: None }
        }
        Err(why) => Assembler { ptxas: None, version: None, missing: Some(why.to_string()) },
    }
}

impl Folder {
    fn look(path: &Path) -> Folder {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let sizes: Vec<u64> = entries.filter_map(|entry| entry.metadata().ok()).map(|data| data.len()).collect();
        Folder { path: path.display().to_string(), files: sizes.len(), bytes: sizes.iter().sum() }
    }
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
    ];
    for gpu in &findings.gpus {
        let ((major, minor), (cuda, point)) = (gpu.compute_capability, gpu.driver_cuda);
        lines.push(format!(
            "gpu               {}, compute capability {major}.{minor}, driver for CUDA {cuda}.{point}",
            gpu.name
        ));
        lines.push(format!("  used for        {}", gpu.used));
        let tuned = if gpu.profile_exists { "" } else { " (none yet; `fulgurite tune` makes one)" };
        lines.extend(gpu.profile.iter().map(|path| format!("  profile         {path}{tuned}")));
    }
    lines.extend(
        findings.no_gpu.iter().map(|why| format!("gpu               none: {}", why.trim_start_matches("no device: "))),
    );
    lines.push(match (&findings.assembler.ptxas, &findings.assembler.missing) {
        (Some(path), _) => {
            format!("assembler         {path}, {}", findings.assembler.version.as_deref().unwrap_or("version unknown"))
        }
        (None, why) => format!(
            "assembler         none (only `kernel assemble` and `kernel sass` need it): {}",
            why.as_deref().unwrap_or("")
        ),
    });
    lines.push(match &findings.kernel_cache {
        Some(Folder { path, files, bytes }) => {
            format!("kernel cache      {path}, {files} files, {:.1} MiB", *bytes as f64 / f64::from(1 << 20))
        }
        None => "kernel cache      none; compiled kernels are not kept".into(),
    });
    lines.push(String::new());
    lines.push(format!("engine            {}", findings.engine.description));
    lines.extend(findings.why.iter().map(|why| format!("  {why}")));
    if !findings.also.is_empty() {
        lines.push(format!("  also here, slower: {}", findings.also.join(", ")));
    }
    lines.push("  also here on request: sim (the GPU kernels on a simulator), oracle (the float64 definition)".into());
    lines.join("\n")
}
