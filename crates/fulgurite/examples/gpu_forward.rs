//! Checks and times cuts of forward attention on a GPU: `gpu_forward [DIMS [LENGTHS [ROUNDS [TUNING..]]]]`.
//!
//! bf16, 16384 tokens, heads x dim 2048, full and causal. `DIMS` and `LENGTHS` are lists like `64,128`. Each `TUNING` is a
//! variant beside the usual one, such as `cols=96,depth=3`: what it leaves out is as usual. Variants alternate in
//! each round, and times are medians. Before it is timed, each variant is compared with sums in f64 for a few rows, and
//! must give the same bits twice. The last line says whether everything held; so does the exit code.

use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Mask, Problem};
use fulgurite_cuda::{Cuda, Losses, Options};
use fulgurite_kernels::attention::forward::config::ForwardConfig;
use fulgurite_kernels::attention::forward::plan::{DeviceTensor, ForwardPlan, Tensors};
use fulgurite_ptx::bf16;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Launch, Module, Stream};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const TOKENS: usize = 16384;
const WIDTH: usize = 2048;
/// Launches that one time is the mean of.
const REPEATS: usize = 8;
/// Relative error of a row of o, in the norm, that bf16 stays far below.
const ALLOWED: f64 = 1e-2;
/// Random numbers that the tensors repeat: no multiple of a row, so that rows differ.
const DRAWN: usize = (1 << 21) + 37;

/// One problem with q, k, v and o on the GPU.
struct Cell<'a> {
    gpu: &'a Cuda,
    dim: usize,
    length: usize,
    causal: bool,
    host: Vec<Vec<bf16>>,
    buffers: Vec<Buffer>,
    lse: Buffer,
    counters: Buffer,
}

impl<'a> Cell<'a> {
    fn new(gpu: &'a Cuda, drawn: &[bf16], dim: usize, length: usize, causal: bool) -> Result<Self, Box<dyn Error>> {
        let count = TOKENS * WIDTH;
        let tensor = |i: usize| drawn.iter().cycle().skip(i * DRAWN / 3).take(count).copied().collect::<Vec<bf16>>();
        let host: Vec<Vec<bf16>> = (0..3).map(tensor).collect();
        let buffers: Vec<Buffer> = (0..4).map(|_| gpu.allocate(2 * count as u64)).collect::<Result<_, _>>()?;
        for (values, buffer) in host.iter().zip(&buffers) {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            gpu.upload(buffer.span(), &bytes)?;
        }
        let (lse, counters) = (gpu.allocate(4 * (count / dim) as u64)?, gpu.allocate(8)?);
        gpu.upload(counters.span(), &[0; 8])?;
        Ok(Cell { gpu, dim, length, causal, host, buffers, lse, counters })
    }

    fn heads(&self) -> usize {
        WIDTH / self.dim
    }

    fn ready(&self, config: &str) -> Result<(Module, Launch), Box<dyn Error>> {
        let (batch, heads) = (TOKENS / self.length, self.heads());
        let mask = if self.causal { Mask::causal() } else { Mask::none() };
        let problem = Problem::builder().dense(batch, self.length, self.length).heads(heads, heads);
        let problem = problem.head_dim(self.dim).dtype(DType::Bf16).mask(mask).build()?;
        let plan = ForwardPlan::new(&problem, None)?;
        let usual = plan.config().ok_or("a plan for wgmma")?;
        let whole = format!("{usual} {}", config.replace(',', " "));
        let rescale = usual.rescale;
        let config = ForwardConfig { rescale, ..whole.parse()? };
        let plan = plan.with_config(|_| config);
        let module = self.gpu.load(Arc::new(plan.kernel(self.gpu.target())?))?;
        if let Some(log) = self.gpu.log(&module).filter(|log| !log.losses.is_empty()) {
            println!("the assembler: {}", log.losses.join("; "));
        }
        let shape = [batch, self.length, heads, self.dim].map(|n| n as u64);
        let at = |i: usize| DeviceTensor::packed(self.buffers[i].span(), shape);
        let tensors = Tensors::new([at(0), at(1), at(2), at(3)], self.lse.span(), self.counters.span());
        let launch = plan.launch(module.shared_kernel(), &tensors, self.gpu.multiprocessors())?;
        Ok((module, launch.ok_or("nothing to compute")?))
    }

    fn result(&self) -> Result<Vec<bf16>, DeviceError> {
        let mut bytes = vec![0; self.buffers[3].span().bytes() as usize];
        self.gpu.download(self.buffers[3].span(), &mut bytes)?;
        Ok(bytes.chunks_exact(2).map(|w| bf16::from_le_bytes([w[0], w[1]])).collect())
    }

    /// The worst relative error of a few rows of o.
    fn error(&self, got: &[bf16], rng: &mut Rng) -> f64 {
        let (batch, heads, dim) = (TOKENS / self.length, self.heads(), self.dim);
        let scale = 1.0 / (dim as f64).sqrt();
        let mut worst = 0.0f64;
        for sample in 0..6 {
            let (b, h) = (rng.bits() as usize % batch, rng.bits() as usize % heads);
            let i = match sample {
                0 => 0,
                1 => self.length - 1,
                _ => rng.bits() as usize % self.length,
            };
            let row = |tensor: &[bf16], row: usize| -> Vec<f64> {
                let at = ((b * self.length + row) * heads + h) * dim;
                tensor[at..at + dim].iter().map(|x| x.to_f64()).collect()
            };
            let q = row(&self.host[0], i);
            let keys = if self.causal { i + 1 } else { self.length };
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let s: Vec<f64> = (0..keys).map(|j| scale * dot(&q, &row(&self.host[1], j))).collect();
            let most = s.iter().copied().fold(f64::MIN, f64::max);
            let mut want = vec![0.0; dim];
            let mut sum = 0.0;
            for (j, s) in s.iter().enumerate() {
                let p = (s - most).exp();
                sum += p;
                want.iter_mut().zip(row(&self.host[2], j)).for_each(|(o, v)| *o += p * v);
            }
            let error = want.iter().zip(row(got, i)).map(|(o, got)| (o / sum - got).powi(2)).sum::<f64>();
            let relative = (error / want.iter().map(|o| (o / sum).powi(2)).sum::<f64>().max(1e-12)).sqrt();
            worst = if relative.is_nan() { f64::INFINITY } else { worst.max(relative) };
        }
        worst
    }
}

fn median(mut times: Vec<f32>) -> f64 {
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2])
}

fn run(dims: &[usize], lengths: &[usize], rounds: usize, tunings: &[String]) -> Result<bool, Box<dyn Error>> {
    let ptxas = std::env::var_os("PTXAS").map(Into::into);
    let gpu = Cuda::open(0, Options { cache: None, losses: Losses::Allow, ptxas })?;
    println!("{}, medians of {rounds} rounds, TFLOP/s, and of the first (worst error)", gpu.name());
    let mut rng = Rng::new(1);
    let drawn: Vec<bf16> = rng.normals(DRAWN, 1.0).into_iter().map(bf16::from_f64).collect();
    let mut held = true;
    for &dim in dims {
        for (&length, causal) in lengths.iter().flat_map(|n| [(n, false), (n, true)]) {
            let cell = Cell::new(&gpu, &drawn, dim, length, causal)?;
            let mut ready = Vec::new();
            for config in tunings {
                let (module, launch) = match cell.ready(config) {
                    Ok(ready) => ready,
                    Err(e) => {
                        println!("d {dim} {length} {config}: {e}");
                        continue;
                    }
                };
                let once = || gpu.launch(&module, launch.grid, &launch.args, Stream::default());
                once()?;
                let first = cell.result()?;
                once()?;
                let same = cell.result()? == first;
                let error = cell.error(&first, &mut rng);
                let good = same && error <= ALLOWED;
                held &= good;
                ready.push((config, module, launch, error, good, Vec::new()));
            }
            for _ in 0..rounds {
                for (_, module, launch, _, _, times) in &mut ready {
                    let all = || {
                        (0..REPEATS).try_for_each(|_| gpu.launch(module, launch.grid, &launch.args, Stream::default()))
                    };
                    times.push(gpu.time(Stream::default(), all)? / REPEATS as f32);
                }
            }
            let flop = 4.0 * (TOKENS * WIDTH * length) as f64 * if causal { 0.5 } else { 1.0 };
            let mask = if causal { "causal" } else { "full" };
            let mut line = format!("d {dim} {mask} {length}:");
            let mut usual = None;
            for (config, _, _, error, good, times) in ready {
                let rate = flop / median(times) / 1e9;
                let of = rate / *usual.get_or_insert(rate);
                let name = if config.is_empty() { "usual" } else { config };
                line += &format!("  {name} {rate:.0} {of:.3} ({error:.1e}{})", if good { "" } else { " WRONG" });
            }
            println!("{line}");
        }
    }
    Ok(held)
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let mut list = |usual: &str| -> Result<Vec<usize>, _> {
        args.next().unwrap_or(usual.into()).split(',').map(str::parse).collect()
    };
    let (dims, lengths, rounds) = (list("64,128,256"), list("512,2048,16384"), list("8"));
    let tunings: Vec<String> = std::iter::once(String::new()).chain(args).collect();
    let (Ok(dims), Ok(lengths), Ok(&[rounds @ 1..=usize::MAX])) = (dims, lengths, rounds.as_deref()) else {
        eprintln!("usage: gpu_forward [DIMS [LENGTHS [ROUNDS [TUNING..]]]]");
        return ExitCode::FAILURE;
    };
    match run(&dims, &lengths, rounds, &tunings) {
        Ok(held) => {
            println!("{}", if held { "all right" } else { "SOMETHING IS WRONG" });
            if held { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
