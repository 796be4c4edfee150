//! Runs NVIDIA's assembler on a kernel: registers, spills, and every complaint with the Rust line that caused it.
//!
//! `ptxas` turns the printed text into machine code for one target. It needs no GPU and no driver. It reports dropped
//! or serialised instructions only in "info" lines; [`Report::verdict`] turns such lines into faults. Results depend on
//! the version of the tool. Nothing here reads the environment.
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

pub use report::{Fault, LatePublish, LineMap, Message, MovedWait, Report, RustLine, Severity};

use crate::kernel::Kernel;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};
use thiserror::Error;

/// Folders of the Python packages' tools in `site-packages`, newest first.
const IN_SITE_PACKAGES: [&str; 2] = ["nvidia/cu13/bin", "nvidia/cuda_nvcc/bin"];

/// Places to search for the tools. The first one that has `ptxas` wins.
#[derive(Debug, Clone, Default)]
pub struct Hints {
    /// Path of the assembler. If given, nothing else is searched.
    pub ptxas: Option<PathBuf>,
    /// A list of folders, in the format of the variable `PATH`.
    pub path: Option<OsString>,
    /// Folders of Python environments.
    pub environments: Vec<PathBuf>,
}

/// The reason why there is no report.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AssembleError {
    /// The path given for the assembler does not exist.
    #[error("`ptxas` is {}, and there is no such file; `pip install nvidia-cuda-nvcc==13.0.88` brings one", path.display())]
    NotThere {
        /// Path given in the hints.
        path: PathBuf,
    },
    /// No assembler was found.
    #[error(
        "`ptxas` was not found in {looked}; `pip install nvidia-cuda-nvcc==13.0.88` in a Python environment brings it, no GPU is needed"
    )]
    NotFound {
        /// Places that were searched, as text.
        looked: String,
    },
    /// No disassembler was found.
    #[error(
        "`nvdisasm` was not found beside {} or on the path; `pip install nvidia-cuda-nvdisasm==13.4.92` in the same environment brings it",
        ptxas.display()
    )]
    NoDisassembler {
        /// Path of the assembler that was found.
        ptxas: PathBuf,
    },
    /// A tool could not be started.
    #[error("{} could not be started; check that it is a program for this machine", tool.display())]
    Start {
        /// Path of the tool.
        tool: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A temporary file could not be written or read.
    #[error("{} could not be written or read; check the folder for temporary files", path.display())]
    Scratch {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The assembler rejected the text, which means a mistake in the instruction table or in the printer.
    #[error("kernel `{kernel}` was not assembled for {target}: {}", join(messages))]
    Refused {
        /// Name of the kernel.
        kernel: String,
        /// Target that the kernel was printed for.
        target: String,
        /// Messages of the assembler.
        messages: Vec<Message>,
    },
    /// A tool failed, or its output has an unknown format.
    #[error("{tool} on kernel `{kernel}`: {what}")]
    Unreadable {
        /// Name of the tool.
        tool: &'static str,
        /// Name of the kernel.
        kernel: String,
        /// The failure, as text.
        what: String,
    },
}

fn join(messages: &[Message]) -> String {
    messages.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// NVIDIA's assembler, and the disassembler if it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assembler {
    ptxas: PathBuf,
    nvdisasm: Option<PathBuf>,
}

impl Assembler {
    /// Searches the places in the hints. A path that was given is used or rejected, never replaced by another.
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

    /// Path of the assembler.
    pub fn ptxas(&self) -> &Path {
        &self.ptxas
    }

    /// Path of the disassembler, if it was found.
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

    /// Assembles a kernel for its target and reads the assembler's messages. A kernel that spills or draws complaints
    /// still gives a report; its [`verdict`](Report::verdict) tells.
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
            if order::is_at_stake(&text) || !kernel.publishes.is_empty() {
                let sass = self.disassemble(kernel, &output, Lines::Text)?;
                report.late_publishes = LatePublish::all(kernel, &text, &sass, &map);
                let allowed: Vec<RustLine> = kernel.loose_waits.iter().map(|&at| at.into()).collect();
                report.moved_waits = MovedWait::all(&order::moved(&text, &sass), &map);
                report.moved_waits.retain(|moved| moved.at.as_ref().is_none_or(|at| !allowed.contains(at)));
            }
        }
        Ok(report)
    }

    /// This assembler without the disassembler. It is faster, but finds neither moved waits, nor late signals, nor the lines of spills.
    pub fn without_disassembler(self) -> Assembler {
        Assembler { nvdisasm: None, ..self }
    }

    /// The kernel as machine code. A comment gives the Rust line of the instructions that follow it.
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

/// The line numbers that annotate machine code.
#[derive(Debug, Clone, Copy)]
enum Lines {
    /// Lines of the Rust source that built the kernel.
    Rust,
    /// Lines of the printed PTX text.
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

/// Path of a tool in the first folder that has it.
fn tool<'a>(name: &str, folders: impl Iterator<Item = &'a PathBuf>) -> Option<PathBuf> {
    let name = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    folders.map(|folder| folder.join(&name)).find(|path| path.is_file())
}

/// Package folders of a Python environment: one folder on Windows, one per Python version elsewhere.
fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let pythons = std::fs::read_dir(environment.join("lib")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = pythons.map(|python| python.path().join("site-packages")).collect();
    found.push(environment.join("Lib").join("site-packages"));
    found.retain(|folder| folder.is_dir());
    found.sort();
    found
}

/// A temporary folder that is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, AssembleError> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let name = format!("fulgurite-{}-{number}-{nanos}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        // `create_dir` fails if the folder exists, so no other program's files are touched.
        std::fs::create_dir(&folder).map_err(at(&folder))?;
        Ok(Scratch(folder))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Ignore errors: a leftover in the system's temporary folder is harmless.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
