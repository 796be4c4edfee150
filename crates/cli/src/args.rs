//! The arguments of the command.

use crate::bench::Contender;
use crate::points::args::{ClusterArgs, NeighborsArgs, SvdArgs};
use crate::variants::args::{Op, System, VariantArgs};
use clap::{CommandFactory, Parser, Subcommand};
use fulgurite::gpu::{Arch, Link, Order, ProfileSource, Target};
use fulgurite::variants::Skip;
use fulgurite::{Choice, DType, Exp, Precision, Rescale, Settings};
use std::path::PathBuf;

/// Attention at the speed of the machine.
#[derive(Debug, Parser)]
#[command(name = "fulgurite", version, max_term_width = 100)]
pub struct Args {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure attention over a grid, check every result, write a report
    Bench(BenchArgs),
    /// Compare every engine with the f64 oracle: each feature, each dtype
    Check(CheckArgs),
    /// Compute attention of the tensors in a file
    Run(RunArgs),
    /// Print the contents of a saved cache of keys and values: bits, sizes, and each head
    Cache(CacheArgs),
    /// Print the CPU and GPUs of this machine, and the engine that is chosen
    Doctor(DoctorArgs),
    /// Print which engine would run a problem and why, and the bound on a GPU; needs no GPU
    Explain(ExplainArgs),
    /// Search for faster tile configurations on the GPU that is present, and keep them in a profile
    Tune(TuneArgs),
    /// List, print and assemble the GPU kernels; needs no GPU
    Kernel(KernelArgs),
    /// Run a GPU kernel on a simulator: races, misuse, counters, a timeline
    Sim(SimArgs),
    /// Compare the simulator with a GPU, kernel by kernel, over random sizes
    SimVsGpu(SimVsGpuArgs),
    /// Cluster the rows of a file: k-means, HDBSCAN, DBSCAN
    Cluster(ClusterArgs),
    /// Find the nearest rows of a file, exactly or in inverted lists
    Neighbors(NeighborsArgs),
    /// Singular values and components of the rows of a file
    Svd(SvdArgs),
    /// Print a script that completes commands and options in a shell
    Completions(CompletionsArgs),
    /// Write a manual page for each command
    Man(ManArgs),
}

/// The engine.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    /// best, cpu, cpu:amx, cpu:avx512, cpu:avx512bf16, cpu:avx2, cpu:neon, cpu:portable, cuda, cuda:wgmma, cuda:mma.sync,
    /// cuda:tcgen05, sim, sim:ARCH (as sm_80) or oracle
    #[arg(long, default_value = "best", value_name = "NAME")]
    pub engine: Choice,
    /// Threads; one per core if not given
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// The profiles of GPUs, where the environment says they are.
pub fn profiles() -> ProfileSource {
    ProfileSource::usual(&|name| std::env::var_os(name))
}

impl EngineArgs {
    /// The settings these arguments ask for.
    pub fn settings(&self) -> Settings {
        let mut settings = Settings::default().profile(profiles());
        settings.threads = self.threads;
        settings
    }
}

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub struct BenchArgs {
    /// Head dimensions; default 64,128, on a GPU 64,128,256
    #[arg(long, value_delimiter = ',', value_name = "D,..")]
    pub dims: Option<Vec<usize>>,
    /// Sequence lengths; default 512,1024,2048,4096, on a GPU up to 16384
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub lens: Option<Vec<usize>>,
    /// Types: f32, f16, bf16; default f32,bf16, on a GPU bf16
    #[arg(long, value_delimiter = ',', value_name = "T,..", value_parser = dtype)]
    pub dtypes: Option<Vec<DType>>,
    /// Tokens in all sequences together; default 4096, on a GPU 16384
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    /// Heads times head dimension; default 1024, on a GPU 2048
    #[arg(long, value_name = "N")]
    pub width: Option<usize>,
    /// Timed runs of each cell; the median counts
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub repeats: usize,
    /// Leave the backward pass out
    #[arg(long)]
    pub forward_only: bool,
    /// A small grid that takes a second or two
    #[arg(long)]
    pub quick: bool,
    /// Systems around attention and other precisions, each in turn with our own attention; only the CPU has them.
    /// Default all: skip, parallax, lighthouse, gated-delta, int8, nvfp4, mxfp4, mxfp8, cache
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAME,..",
        hide_default_value = true,
        default_value = "skip,parallax,lighthouse,gated-delta,int8,nvfp4,mxfp4,mxfp8,cache"
    )]
    pub around: Vec<System>,
    /// Leave the systems around attention out
    #[arg(long)]
    pub attention_only: bool,
    /// Also show these cells beside those of an earlier run
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
    /// Also time another program on the same cells, on the CPU: torch, of the `python3` found first
    #[arg(long, value_name = "NAME", hide_possible_values = true)]
    pub against: Option<Contender>,
    /// Seed of the random tensors
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Folder for bench.html, bench.svg and bench.json
    #[arg(long, default_value = "out", value_name = "DIR")]
    pub out: PathBuf,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Add N random cases for each dtype
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub long: usize,
    /// Seed of the first random case [default: 1]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print the names of the cases and end
    #[arg(long)]
    pub list: bool,
    /// Only cases whose name contains this; `--list` prints the names, and `--long` adds cases called `random`
    #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT")]
    pub case: String,
    /// Only this engine; every one this machine can run if not given
    #[arg(long, value_name = "NAME")]
    pub engine: Option<Choice>,
    /// Threads; one per core if not given
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Types: f32, f16, bf16
    #[arg(long, value_delimiter = ',', value_name = "T,..", value_parser = dtype, default_value = "f32,f16,bf16")]
    pub dtypes: Vec<DType>,
    /// In which order a GPU adds up gradients: any, fixed
    #[arg(long, value_name = "ORDER", value_parser = order, default_value = "any")]
    pub order: Order,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `cache`.
#[derive(Debug, clap::Args)]
pub struct CacheArgs {
    /// A cache as `fulgurite_cli::cache::encode` writes it, or FILE.safetensors with k and v, `[tokens, heads, dim]`
    #[arg(value_name = "FILE")]
    pub input: PathBuf,
    /// Pack k and v of the file into a cache and write it here
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,
    /// Heads that get two bits instead of four when packing
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub two_bit_heads: usize,
    /// Draw bits and error of each head (their largest elements, where k and v are not known) as FILE.svg
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
#[command(after_help = RUN_HELP)]
pub struct RunArgs {
    /// FILE.safetensors, or a folder of .npy files
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// FILE.safetensors, or a folder for .npy files
    #[arg(short, long, value_name = "OUT")]
    pub output: PathBuf,
    /// attention, parallax, lighthouse or gated-delta
    #[arg(long, default_value = "attention", value_name = "NAME")]
    pub op: Op,
    /// Arguments of single operators.
    #[command(flatten)]
    pub variants: VariantArgs,
    /// A query sees keys up to its own position, counted from the end
    #[arg(long)]
    pub causal: bool,
    /// A query sees L keys before and R keys after its own position; an empty side is unbounded
    #[arg(long, value_name = "L,R", value_parser = window, allow_hyphen_values = true)]
    pub window: Option<Window>,
    /// Factor of q . k; default 1/sqrt(head_dim)
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub scale: Option<f32>,
    /// X * tanh(score / X)
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub softcap: Option<f32>,
    /// ALiBi; slopes 2^(-8(h+1)/heads) unless IN has alibi_slopes
    #[arg(long)]
    pub alibi: bool,
    /// auto, native, poly:DEGREE, poly:DEGREE:SHARE, sas, sas:THRESHOLD or sas:online
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub exp: Exp,
    /// native, int8, int8:BLOCK, nvfp4, mxfp4, mxfp8, or QK/PV such as nvfp4/native
    #[arg(long, default_value = "native", value_name = "NAME")]
    pub precision: Precision,
    /// Rescale lazily with this threshold, in powers of two; the same as --rescale lazy:T
    #[arg(long, value_name = "T", conflicts_with = "rescale", allow_hyphen_values = true)]
    pub tau: Option<f32>,
    /// always, lazy, lazy:TAU, optimistic or optimistic:LIMIT
    #[arg(long, value_name = "POLICY")]
    pub rescale: Option<Rescale>,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

const RUN_HELP: &str = "\
Tensors read from IN:
  q, k, v          [batch, sequence, heads, head_dim] (packed: [total, heads, head_dim]); f32, f16, bf16
  d_o, d_lse       gradients of o and lse: the backward pass runs too
  sink             [heads]: a logit for each head that joins the denominator
  cu_seqlens       [batch + 1]: offsets of packed sequences; or cu_seqlens_q and cu_seqlens_k
  used_q, used_k   [batch]: queries and keys in use
  alibi_slopes     [heads]: ALiBi, with or without --alibi
  bias             [batch, heads, q_len, k_len], each full or 1: added to the scores
  documents_q, documents_k   [batch, len]: queries see keys of their own document
  prefix_lengths   [batch]: keys before it are visible to all queries, the others causally
  r                --op parallax: probes, shaped like q
  g, beta          --op gated-delta: [batch, tokens, value_heads], log decays and steps
  initial_state    --op gated-delta: f32, [batch, value_heads, key_dim, value_dim]; d_final_state likewise
Tensors written to OUT:
  o, lse (f32, [batch, heads, sequence]) and, with d_o: d_q, d_k, d_v, d_sink, d_bias
  --op parallax also d_r; --op gated-delta o, final_state and, with d_o: d_q, d_k, d_v, d_g, d_beta, d_initial_state";

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorArgs {
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `explain`.
#[derive(Debug, clap::Args)]
pub struct ExplainArgs {
    /// Sequences
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub batch: usize,
    /// Queries of a sequence
    #[arg(long, default_value_t = 4096, value_name = "N")]
    pub q_len: usize,
    /// Keys of a sequence; default as many as queries
    #[arg(long, value_name = "N")]
    pub k_len: Option<usize>,
    /// Heads of queries
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub heads: usize,
    /// Heads of keys; default as many as of queries
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,
    /// Dimension of q and k
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub head_dim: usize,
    /// Dimension of v; default that of q and k
    #[arg(long, value_name = "N")]
    pub value_dim: Option<usize>,
    /// Type: f32, f16, bf16
    #[arg(long, default_value = "bf16", value_name = "T", value_parser = dtype)]
    pub dtype: DType,
    /// A query sees keys up to its own position, counted from the end
    #[arg(long)]
    pub causal: bool,
    /// A query sees L keys before and R keys after its own position; an empty side is unbounded
    #[arg(long, value_name = "L,R", value_parser = window, allow_hyphen_values = true)]
    pub window: Option<Window>,
    /// X * tanh(score / X)
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub softcap: Option<f32>,
    /// ALiBi
    #[arg(long)]
    pub alibi: bool,
    /// native, int8, int8:BLOCK, nvfp4, mxfp4, mxfp8, or QK/PV such as nvfp4/native
    #[arg(long, default_value = "native", value_name = "NAME")]
    pub precision: Precision,
    /// Predict the time on N GPUs, in a ring and with an exchange of heads
    #[arg(long, value_name = "N", conflicts_with = "skip")]
    pub ranks: Option<usize>,
    /// With --ranks: the link between GPUs, nvlink (450 GB/s each way), ib (50 GB/s), or a rate in GB/s
    #[arg(long, default_value = "nvlink", value_name = "LINK", value_parser = link, requires = "ranks")]
    pub link: Link,
    /// With --ranks: microseconds of a message of no bytes; default: that of the link
    #[arg(long, value_name = "US", value_parser = positive, requires = "ranks")]
    pub latency: Option<f64>,
    /// With --ranks: measured milliseconds of a rank's step over its own keys and of one over another rank's, not bounds
    #[arg(long, value_name = "FIRST,LATER", value_parser = step_ms, requires = "ranks")]
    pub step_ms: Option<[f64; 2]>,
    /// Explain the gradients
    #[arg(long, conflicts_with = "skip")]
    pub backward: bool,
    /// Instead, say which tiles block skipping leaves out and why; parts as of `run --skip`
    #[arg(long, value_name = "PARTS")]
    pub skip: Option<Skip>,
    /// With --skip: q, k and v are read from here instead of drawn
    #[arg(long, value_name = "IN", requires = "skip")]
    pub tensors: Option<PathBuf>,
    /// With --skip: draw the tiles as an SVG picture
    #[arg(long, value_name = "FILE", requires = "skip")]
    pub picture: Option<PathBuf>,
    /// With --skip: tensors that are drawn: topics (runs of tokens that look for each other) or normal (independent numbers)
    #[arg(long, value_name = "NAME", default_value = "topics", value_parser = ["topics", "normal"], requires = "skip", conflicts_with = "tensors")]
    pub data: String,
    /// With --skip: seed of tensors that are drawn
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Write the answer as out/explain.html, and open it in the browser
    #[arg(long, conflicts_with_all = ["skip", "ranks"])]
    pub open: bool,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// The tools of NVIDIA.
    #[command(flatten)]
    pub tools: ToolArgs,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `tune`.
#[derive(Debug, clap::Args)]
pub struct TuneArgs {
    /// Search tile configurations of the gradients, not of forward
    #[arg(long)]
    pub backward: bool,
    /// Head dimensions
    #[arg(long, value_delimiter = ',', value_name = "D,..", default_value = "64,128,256")]
    pub dims: Vec<u32>,
    /// Lengths that are measured, of those that are usual: 512,1024,2048,8192; all if not given
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub lens: Option<Vec<u64>>,
    /// The profile; default where later runs look for it
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Stop after this many seconds; the same call goes on from there
    #[arg(long, value_name = "N")]
    pub seconds: Option<u64>,
    /// Print the profile as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `kernel`.
#[derive(Debug, clap::Args)]
pub struct KernelArgs {
    /// The command on kernels.
    #[command(subcommand)]
    pub command: KernelCommand,
}

/// The command on kernels.
#[derive(Debug, Subcommand)]
pub enum KernelCommand {
    /// List every kernel
    List(KernelListArgs),
    /// Print a kernel as PTX
    Ptx(KernelPtxArgs),
    /// Assemble kernels: registers, spills, and every complaint with its Rust line
    Assemble(KernelAssembleArgs),
    /// Print a kernel's machine code with the Rust lines it came from
    Sass(KernelSassArgs),
}

/// Arguments of `kernel list`.
#[derive(Debug, clap::Args)]
pub struct KernelListArgs {
    /// Architecture of the kernels: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a or sm_121a
    #[arg(long, default_value = "sm_90a", value_name = "ARCH", value_parser = arch)]
    pub arch: Target,
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `kernel ptx`.
#[derive(Debug, clap::Args)]
pub struct KernelPtxArgs {
    /// The kernel; `fulgurite kernel list` has them all
    pub name: String,
    /// Architecture of the kernel: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a or sm_121a
    #[arg(long, default_value = "sm_90a", value_name = "ARCH", value_parser = arch)]
    pub arch: Target,
}

/// Arguments of `kernel assemble`.
#[derive(Debug, clap::Args)]
pub struct KernelAssembleArgs {
    /// The kernel; `fulgurite kernel list` has them all
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub name: Option<String>,
    /// Every kernel that the architecture can run
    #[arg(long)]
    pub all: bool,
    /// Architecture of the kernels: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a or sm_121a
    #[arg(long, default_value = "sm_90a", value_name = "ARCH", value_parser = arch)]
    pub arch: Target,
    /// The tools of NVIDIA.
    #[command(flatten)]
    pub tools: ToolArgs,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `kernel sass`.
#[derive(Debug, clap::Args)]
pub struct KernelSassArgs {
    /// The kernel; `fulgurite kernel list` has them all
    pub name: String,
    /// Architecture of the kernel: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a, sm_120a or sm_121a
    #[arg(long, default_value = "sm_90a", value_name = "ARCH", value_parser = arch)]
    pub arch: Target,
    /// The tools of NVIDIA.
    #[command(flatten)]
    pub tools: ToolArgs,
}

/// The tools of NVIDIA to use.
#[derive(Debug, Clone, clap::Args)]
pub struct ToolArgs {
    /// The assembler; default the variable PTXAS, then the path, then the active Python environment
    #[arg(long, value_name = "FILE")]
    pub ptxas: Option<PathBuf>,
}

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// Arguments of `man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Folder for the pages, such as ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// The two sides of a window; `None` is unbounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Keys before the query's position.
    pub left: Option<i64>,
    /// Keys after it.
    pub right: Option<i64>,
}

impl std::fmt::Display for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [left, right] = [self.left, self.right].map(|side| side.map_or(String::new(), |keys| keys.to_string()));
        write!(f, "{left},{right}")
    }
}

fn window(text: &str) -> Result<Window, String> {
    let side = |text: &str| match text.trim() {
        "" => Ok(None),
        number => number.parse().map(Some).map_err(|_| ()),
    };
    let sides = text.split_once(',').ok_or(()).and_then(|(l, r)| Ok(Window { left: side(l)?, right: side(r)? }));
    sides.map_err(|()| "allowed: L,R in whole numbers, such as 128,0; an empty side is unbounded".into())
}

fn link(text: &str) -> Result<Link, String> {
    match text {
        "nvlink" => Ok(Link::NVLINK),
        "ib" => Ok(Link::INFINIBAND),
        rate => match rate.parse::<f64>() {
            Ok(rate) if rate > 0.0 && rate.is_finite() => Ok(Link { bytes_per_second: rate * 1e9, ..Link::NVLINK }),
            _ => Err("allowed: nvlink, ib, or GB/s above 0".into()),
        },
    }
}

/// A finite number above 0.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.trim().parse::<f64>().ok().filter(|x| *x > 0.0 && x.is_finite());
    number.ok_or_else(|| "allowed: a number above 0".into())
}

fn step_ms(text: &str) -> Result<[f64; 2], String> {
    let both = text.split_once(',').and_then(|(first, later)| Some([positive(first).ok()?, positive(later).ok()?]));
    both.ok_or_else(|| "allowed: FIRST,LATER in ms above 0, such as 3.5,1.8".into())
}

fn arch(text: &str) -> Result<Target, String> {
    Target::named(text).ok_or_else(|| format!("allowed: {}", Arch::names()))
}

fn dtype(text: &str) -> Result<DType, String> {
    let found = DType::FLOATS.into_iter().find(|dtype| dtype.name() == text);
    found.ok_or_else(|| "allowed: f32, f16, bf16".into())
}

fn order(text: &str) -> Result<Order, String> {
    match text {
        "any" => Ok(Order::Any),
        "fixed" => Ok(Order::Fixed),
        _ => Err("allowed: any, fixed".into()),
    }
}

/// A message of the argument parser in one line, with the way to help for the commands that were named first.
pub fn one_line(error: &clap::Error, named: &[&str]) -> String {
    use clap::error::ErrorKind;
    let (mut command, mut path) = (Args::command(), String::new());
    for name in named {
        let Some(next) = command.find_subcommand(name).cloned() else { break };
        path = format!("{path} {name}");
        command = next;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let names: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
        return format!("no command given; allowed: {}; try `fulgurite{path} --help`", names.join(", "));
    }
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let message: Vec<&str> =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more")).collect();
    let message = message.join(" ");
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    // clap puts its suggestions on lines of their own.
    let message = message.replace(" tip: ", "; ");
    let message = ["argument", "value", "subcommand"].iter().fold(message, |message, kind| {
        let begin = format!("; a similar {kind} exists: ");
        match message.split_once(&begin) {
            Some((before, name)) => format!("{before}; did you mean {name}?"),
            None => message,
        }
    });
    format!("{message}; try `fulgurite{path} --help`")
}

/// Arguments of `sim-vs-gpu`.
#[derive(Debug, clap::Args)]
pub struct SimVsGpuArgs {
    /// Kernels whose names begin so; all if none is given
    pub names: Vec<String>,
    /// Random sizes for each kernel
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub cases: u32,
    /// Seed of the sizes and of the inputs
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// Instead, say how the tensor cores add: which model explains one product of 16 terms
    #[arg(long, conflicts_with_all = ["names", "cases"])]
    pub adder: bool,
    /// Number of the GPU
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub gpu: u32,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `sim`.
#[derive(Debug, clap::Args)]
pub struct SimArgs {
    /// The kernel; `fulgurite kernel list` has them all
    pub name: String,
    /// Rows of C, or of a matrix; default 256
    #[arg(short, value_name = "N")]
    pub m: Option<u32>,
    /// Columns of C or of a matrix, or elements of a vector; default 256
    #[arg(short, value_name = "N")]
    pub n: Option<u32>,
    /// The summed dimension of a product; default 256
    #[arg(short, value_name = "N")]
    pub k: Option<u32>,
    /// Products or sequences; default 1
    #[arg(long, value_name = "N")]
    pub batch: Option<u32>,
    /// Queries of a sequence; default 256
    #[arg(long, value_name = "N")]
    pub q_len: Option<u32>,
    /// Keys of a sequence; default 256
    #[arg(long, value_name = "N")]
    pub k_len: Option<u32>,
    /// Heads of queries; default 1
    #[arg(long, value_name = "N")]
    pub heads: Option<u32>,
    /// Heads of keys; default as many as of queries
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<u32>,
    /// The most CTAs of a persistent kernel; default as many as an H200 has multiprocessors
    #[arg(long, value_name = "N")]
    pub blocks: Option<u32>,
    /// Seed of the order of warps and of asynchronous work: the same seed gives the same run
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// Print the work of each role, and the cycles that each unit needs
    #[arg(long)]
    pub counters: bool,
    /// Write a timeline by an approximate clock: a Chrome trace, or a picture if the name ends in .svg
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Write findings, counters and timeline as out/sim.html, and open it in the browser
    #[arg(long)]
    pub open: bool,
    /// Print the results as JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn links() {
        assert_eq!(link("ib"), Ok(Link::INFINIBAND));
        assert_eq!(link("12.5").map(|link| link.bytes_per_second), Ok(12.5e9));
        for wrong in ["0", "-1", "inf", "nan", "wire"] {
            assert!(link(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_of_steps() {
        assert_eq!(step_ms("3.5, 2"), Ok([3.5, 2.0]));
        for wrong in ["3.5", "3.5,0", "inf,1", "1,2,3", ","] {
            assert!(step_ms(wrong).is_err(), "{wrong}");
        }
        assert!(positive("-1").is_err() && positive("nan").is_err());
    }

    #[test]
    fn windows() {
        assert_eq!(window("128,0"), Ok(Window { left: Some(128), right: Some(0) }));
        assert_eq!(window(",-1"), Ok(Window { left: None, right: Some(-1) }));
        assert_eq!(window(","), Ok(Window { left: None, right: None }));
        assert!(window("128").is_err());
        assert!(window("a,b").is_err());
        assert!(window("99999999999999999999,0").is_err());
    }
}
