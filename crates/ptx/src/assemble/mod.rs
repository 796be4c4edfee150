//! What NVIDIA's assembler says of a kernel: registers, spills, and every complaint with the Rust line it is about.
//!
//! `ptxas` turns the printed text into machine code for one target. It runs without a GPU or a driver, and drops
//! or serialises instructions with no more than an "info" line; [`Report::verdict`] turns such lines into faults.
//! The answers depend on the version of the tool; nothing here reads the environment.
//!
//! ```
//! use fulgurite_ptx::assemble::{AssembleError, Assembler, Hints};
//!
//! let nowhere = Hints { ptxas: Some("no/such/ptxas".into()), ..Hints::default() };
//! let refused = Assembler::find(&nowhere).unwrap_err();
//! assert!(matches!(refused, AssembleError::NotThere { .. }));
//! ```

mod order;
mod report;

pub use report::{Fault, LineMap, Message, MovedWait, Report, RustLine, Severity};

use crate::kernel::Kernel;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// Where tools of the Python packages lie in `site-packages`, newest first.
const IN_SITE_PACKAGES: [&str; 2] = ["nvidia/cu13/bin", "nvidia/cuda_nvcc/bin"];

/// Where to look for the tools. The first of these that has `ptxas` is taken.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    /// The assembler itself; if it is given, nothing else is looked at.
    pub ptxas: Option<PathBuf>,
    /// Folders, as the variable `PATH` lists them.
    pub path: Option<OsString>,
    /// Folders of Python environments.
    pub environments: Vec<PathBuf>,
}

/// Why there is no report.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AssembleError {
    /// The tool that was named does not exist.
    #[error("`ptxas` is {}, and there is no such file; `pip install nvidia-cuda-nvcc==13.0.88` brings one", path.display())]
    NotThere {
        /// Where it should be.
        path: PathBuf,
    },
    /// No assembler was found.
    #[error(
        "`ptxas` was not found in {looked}; `pip install nvidia-cuda-nvcc==13.0.88` in a Python environment brings it, no GPU is needed"
    )]
    NotFound {
        /// Where it was looked for.
        looked: String,
    },
    /// No disassembler was found.
    #[error(
        "`nvdisasm` was not found beside {} or on the path; `pip install nvidia-cuda-nvdisasm==13.4.92` in the same environment brings it",
        ptxas.display()
    )]
    NoDisassembler {
        /// The assembler.
        ptxas: PathBuf,
    },
    /// A tool could not be started.
    #[error("{} could not be started; check that it is a program for this machine", tool.display())]
    Start {
        /// The tool.
        tool: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A temporary file could not be written or read.
    #[error("{} could not be written or read; check the folder for temporary files", path.display())]
    Scratch {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The assembler did not take the text: a mistake in the table or in the printer.
    #[error("kernel `{kernel}` was not assembled for {target}: {}", join(messages))]
    Refused {
        /// The kernel.
        kernel: String,
        /// What it is for.
        target: String,
        /// What the assembler said.
        messages: Vec<Message>,
    },
    /// A tool failed, or said something else than it used to.
    #[error("{tool} on kernel `{kernel}`: {what}")]
    Unreadable {
        /// The tool.
        tool: &'static str,
        /// The kernel.
        kernel: String,
        /// What is wrong.
        what: String,
    },
}

fn join(messages: &[Message]) -> String {
    messages.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// NVIDIA's assembler, and the disassembler if there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assembler {
    ptxas: PathBuf,
    nvdisasm: Option<PathBuf>,
}

impl Assembler {
    /// Looks where the hints say. A path that was given is taken or refused, never replaced by another.
    pub fn find(hints: &Hints) -> Result<Assembler, AssembleError> {
        let on_path: Vec<PathBuf> = hints.path.iter().flat_map(std::env::split_paths).collect();
        let packages = hints.environments.iter().flat_map(|environment| site_packages(environment));
        let packages: Vec<PathBuf> = packages.flat_map(|site| IN_SITE_PACKAGES.map(|bin| site.join(bin))).collect();
        let ptxas = match &hints.ptxas {
            Some(path) if path.is_file() => path.clone(),
            Some(path) => return Err(AssembleError::NotThere { path: path.clone() }),
            None => tool("ptxas", on_path.iter().chain(&packages)).ok_or_else(|| {
                let environments = hints.environments.iter().map(|e| format!(", {}", e.display()));
                AssembleError::NotFound { looked: std::iter::once("PATH".into()).chain(environments).collect() }
            })?,
        };
        let beside = ptxas.parent().map(Path::to_path_buf);
        let nvdisasm = tool("nvdisasm", beside.iter().chain(&packages).chain(&on_path));
        Ok(Assembler { ptxas, nvdisasm })
    }

    /// Where the assembler lies.
    pub fn ptxas(&self) -> &Path {
        &self.ptxas
    }

    /// Where the disassembler lies, if there is one.
    pub fn nvdisasm(&self) -> Option<&Path> {
        self.nvdisasm.as_deref()
    }

    /// The assembler's version, such as `13.0.88`.
    pub fn version(&self) -> Result<String, AssembleError> {
        let said = run(&self.ptxas, Command::new(&self.ptxas).arg("--version"))?;
        let text = String::from_utf8_lossy(&said.stdout);
        let version = text.split_whitespace().find_map(|word| word.strip_prefix('V')).map(String::from);
        version.ok_or_else(|| AssembleError::Unreadable {
            tool: "ptxas",
            kernel: "none".into(),
            what: format!("no version in `{}`", text.trim()),
        })
    }

    /// Assembles a kernel for its target and reads what the assembler says. A kernel that spills, or that the
    /// assembler complains about, is still a report: ask for its [`verdict`](Report::verdict).
    pub fn assemble(&self, kernel: &Kernel) -> Result<Report, AssembleError> {
        let text = kernel.ptx();
        let map = LineMap::of(&text);
        let scratch = Scratch::new()?;
        let (input, output) = (scratch.file("kernel.ptx"), scratch.file("kernel.cubin"));
        std::fs::write(&input, &text).map_err(at(&input))?;
        let mut command = Command::new(&self.ptxas);
        command.args(["--verbose", "--generate-line-info", "--gpu-name"]).arg(kernel.target.name());
        let said = run(&self.ptxas, command.arg(&input).arg("--output-file").arg(&output))?;
        let log = [said.stdout, said.stderr].concat();
        let log = String::from_utf8_lossy(&log);
        if !said.status.success() {
            let messages = Message::all(&log, &map);
            let (kernel, target) = (kernel.name.clone(), kernel.target.name());
            return Err(match messages.is_empty() {
                false => AssembleError::Refused { kernel, target, messages },
                true => AssembleError::Unreadable { tool: "ptxas", kernel, what: ended(&said.status, &log) },
            });
        }
        let cubin = std::fs::read(&output).map_err(at(&output))?;
        let mut report = Report::read(kernel, &log, &map, cubin)?;
        if self.nvdisasm.is_some() {
            if report.stack_bytes > 0
                && let Ok(sass) = self.disassemble(kernel, &output, Lines::Rust)
            {
                report.local_lines = report::local_lines(&sass);
            }
            if order::is_at_stake(&text) {
                let sass = self.disassemble(kernel, &output, Lines::Text)?;
                let allowed: Vec<RustLine> = kernel.loose_waits.iter().map(|&at| at.into()).collect();
                report.moved_waits = MovedWait::all(&order::moved(&text, &sass), &map);
                report.moved_waits.retain(|moved| moved.at.as_ref().is_none_or(|at| !allowed.contains(at)));
            }
        }
        Ok(report)
    }

    /// The same that asks no disassembler: quicker, and it does not find waits that were moved, nor lines of spills.
    pub fn without_disassembler(self) -> Assembler {
        Assembler { nvdisasm: None, ..self }
    }

    /// The kernel as machine code, a comment with the Rust line before the instructions that came from it.
    pub fn sass(&self, kernel: &Kernel) -> Result<String, AssembleError> {
        if self.nvdisasm.is_none() {
            return Err(AssembleError::NoDisassembler { ptxas: self.ptxas.clone() });
        }
        let report = self.assemble(kernel)?;
        let scratch = Scratch::new()?;
        let input = scratch.file("kernel.cubin");
        std::fs::write(&input, &report.cubin).map_err(at(&input))?;
        Ok(report::with_rust_lines(&self.disassemble(kernel, &input, Lines::Rust)?))
    }

    fn disassemble(&self, kernel: &Kernel, cubin: &Path, lines: Lines) -> Result<String, AssembleError> {
        let Some(nvdisasm) = &self.nvdisasm else {
            return Err(AssembleError::NoDisassembler { ptxas: self.ptxas.clone() });
        };
        let lines = match lines {
            Lines::Rust => "--print-line-info",
            Lines::Text => "--print-line-info-ptx",
        };
        let said = run(nvdisasm, Command::new(nvdisasm).args(["--print-code", "--no-dataflow", lines]).arg(cubin))?;
        if !said.status.success() {
            let what = ended(&said.status, &String::from_utf8_lossy(&said.stderr));
            return Err(AssembleError::Unreadable { tool: "nvdisasm", kernel: kernel.name.clone(), what });
        }
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    }
}

/// Which lines stand beside machine code.
#[derive(Debug, Clone, Copy)]
enum Lines {
    /// Those of the source that built the kernel.
    Rust,
    /// Those of the printed text.
    Text,
}

fn ended(status: &std::process::ExitStatus, log: &str) -> String {
    format!("it ended with {status} and said `{}`", log.trim())
}

fn run(tool: &Path, command: &mut Command) -> Result<Output, AssembleError> {
    command.output().map_err(|source| AssembleError::Start { tool: tool.into(), source })
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> AssembleError {
    let path = path.to_path_buf();
    |source| AssembleError::Scratch { path, source }
}

/// The first of the folders that has a tool.
fn tool<'a>(name: &str, folders: impl Iterator<Item = &'a PathBuf>) -> Option<PathBuf> {
    let name = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    folders.map(|folder| folder.join(&name)).find(|path| path.is_file())
}

/// Where a Python environment keeps its packages: one folder on Windows, one for each Python elsewhere.
fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let pythons = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = pythons.map(|python| python.path().join("site-packages")).collect();
    found.push(environment.join("Lib").join("site-packages"));
    found.retain(|folder| folder.is_dir());
    found.sort();
    found
}

/// A folder for temporary files that goes when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, AssembleError> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let name = format!("fulgurite-{}-{number}-{nanos}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        // Refuses a folder that is there already: nobody else's files are touched.
        std::fs::create_dir(&folder).map_err(at(&folder))?;
        Ok(Scratch(folder))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed stays in the folder for temporary files, which is what that folder is for.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
