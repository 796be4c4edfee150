//! Checks and times the gradients of attention on a GPU: `gpu_backward [DIMS[:LENGTHS] [ROUNDS [TUNING..]]]`.
//!
//! bf16, 16384 tokens, heads x dim 2048, sequences of 1k, 4k and 16k, full and causal. `DIMS` and `LENGTHS` are lists like `64,128`.
//! Each `TUNING` is a variant beside the usual one, such as `rows=64,adds=threads,key_depth=2,early=2,drain=yes,pack=late,order=fixed`; variants alternate in
//! each round, and times are medians. Before it is timed, each variant is compared with sums in f64 for a few rows
//! and keys, and d_k and d_v (in a fixed order also d_q) must come out the same twice. The last line says whether everything held; so does the exit code.

use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Mask, Problem};
use fulgurite_cuda::{Cuda, Losses, Options};
use fulgurite_kernels::attention::backward::Order;
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Tensors};
use fulgurite_kernels::attention::forward::plan::{DeviceTensor, ForwardPlan, Tensors as Inputs};
use fulgurite_ptx::bf16;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Launch, Module, Stream};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const TOKENS: usize = 16384;
const WIDTH: usize = 2048;
/// Launches that one time is the mean of.
const REPEATS: usize = 4;
/// Relative error of a row of a gradient, in the norm, that bf16 stays far below.
const ALLOWED: f64 = 2e-2;

fn variant(problem: &Problem, text: &str) -> Result<(BackwardPlan, Order), Box<dyn Error>> {
    let order = if text.contains("order=fixed") { Order::Fixed } else { Order::Any };
    let plan = BackwardPlan::new(problem, false, order)?;
    let entries = text.split(',').filter(|part| !["order=any", "order=fixed"].contains(part));
    let config = plan.config().changed(&entries.collect::<Vec<_>>().join(" "))?;
    Ok((plan.with_config(config), order))
}

/// One problem with its tensors on the GPU and on the host.
struct Cell {
    problem: Problem,
    dim: usize,
    length: usize,
    causal: bool,
    heads: usize,
    batch: usize,
    host: Vec<Vec<bf16>>,
    lse: Vec<f32>,
    /// q, k, v, d_o, o, d_q, d_k, d_v.
    buffers: Vec<Buffer>,
    lse_buffer: Buffer,
}

impl Cell {
    fn new(gpu: &Cuda, dim: usize, length: usize, causal: bool, rng: &mut Rng) -> Result<Cell, Box<dyn Error>> {
        let (heads, batch) = (WIDTH / dim, TOKENS / length);
        let mask = if causal { Mask::causal() } else { Mask::none() };
        let problem =
            Problem::builder().dense(batch, length, length).heads(heads, heads).head_dim(dim).dtype(DType::Bf16);
        let problem = problem.mask(mask).build()?;
        let count = TOKENS * WIDTH;
        // A large random part over and over would give rows that repeat; a whole tensor takes seconds.
        let mut host: Vec<Vec<bf16>> =
            (0..4).map(|_| rng.normals(count, 1.0).into_iter().map(bf16::from_f64).collect()).collect();
        let buffers: Vec<Buffer> = (0..8).map(|_| gpu.allocate(2 * count as u64)).collect::<Result<_, _>>()?;
        for (values, buffer) in host.iter().zip(&buffers) {
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
            gpu.upload(buffer.span(), &bytes)?;
        }
        let lse_buffer = gpu.allocate(4 * (TOKENS * heads) as u64)?;
        let plan = ForwardPlan::new(&problem, None)?;
        let module = gpu.load(Arc::new(plan.kernel(gpu.target())?))?;
        let counters = gpu.allocate(8)?;
        gpu.upload(counters.span(), &[0; 8])?;
        let shape = [batch, length, heads, dim].map(|n| n as u64);
        let at = |i: usize| DeviceTensor::packed(buffers[i].span(), shape);
        let tensors = Inputs::new([at(0), at(1), at(2), at(4)], lse_buffer.span(), counters.span());
        let launch = plan.launch(module.shared_kernel(), &tensors, gpu.multiprocessors())?;
        let launch = launch.ok_or("nothing to compute")?;
        gpu.launch(&module, launch.grid, &launch.args, Stream::default())?;
        gpu.synchronize(Stream::default())?;
        host.push(download(gpu, &buffers[4])?);
        let mut bytes = vec![0; 4 * TOKENS * heads];
        gpu.download(lse_buffer.span(), &mut bytes)?;
        let lse = bytes.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
        Ok(Cell { problem, dim, length, causal, heads, batch, host, lse, buffers, lse_buffer })
    }

    fn plan(&self, gpu: &Cuda, config: &str) -> Result<Ready, Box<dyn Error>> {
        let (plan, order) = variant(&self.problem, config)?;
        let kernels = plan.kernels(gpu.target())?;
        let scratch = gpu.allocate(plan.scratch_bytes())?;
        let shape = [self.batch, self.length, self.heads, self.dim].map(|n| n as u64);
        let at = |i: usize| DeviceTensor::packed(self.buffers[i].span(), shape);
        let [q, k, v, o] = [at(0), at(1), at(2), at(4)];
        let tensors = Tensors::new([q, k, v, o], self.lse_buffer.span(), at(3), [at(5), at(6), at(7)]);
        let launches = plan.plan(&kernels, &tensors, scratch.span(), gpu.multiprocessors())?.launches;
        let load = |launch: Launch| -> Result<(Module, Launch), DeviceError> {
            Ok((gpu.load(launch.kernel.clone())?, launch))
        };
        let launches: Vec<_> = launches.into_iter().map(load).collect::<Result<_, _>>()?;
        let losses: Vec<String> =
            launches.iter().filter_map(|(module, _)| gpu.log(module)).flat_map(|log| log.losses.clone()).collect();
        if !losses.is_empty() {
            println!("the assembler: {}", losses.join("; "));
        }
        Ok(Ready { launches, order, _scratch: scratch })
    }

    /// A row of a tensor, in f64.
    fn row(&self, tensor: &[bf16], batch: usize, row: usize, head: usize) -> Vec<f64> {
        let at = ((batch * self.length + row) * self.heads + head) * self.dim;
        tensor[at..at + self.dim].iter().map(|x| x.to_f64()).collect()
    }

    /// The worst relative error of a few rows of d_q, d_k and d_v.
    fn errors(&self, gpu: &Cuda, rng: &mut Rng) -> Result<[f64; 3], Box<dyn Error>> {
        let got = [5, 6, 7].map(|i| download(gpu, &self.buffers[i]));
        let [d_q, d_k, d_v] = got;
        let (d_q, d_k, d_v) = (d_q?, d_k?, d_v?);
        let scale = f64::from(self.problem.scale());
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let mut worst = [0.0f64; 3];
        for sample in 0..4 {
            let (b, h) = (rng.bits() as usize % self.batch, rng.bits() as usize % self.heads);
            let pick = match sample {
                0 => 0,
                1 => self.length - 1,
                _ => rng.bits() as usize % self.length,
            };
            let of = |tensor: usize, row: usize| self.row(&self.host[tensor], b, row, h);
            // p and d_z of query i and key j.
            let pair = |i: usize, j: usize| {
                let lse = f64::from(self.lse[(b * self.heads + h) * self.length + i]);
                let p = (dot(&of(0, i), &of(1, j)) * scale - lse).exp();
                let d_o = of(3, i);
                (p, p * (dot(&d_o, &of(2, j)) - dot(&d_o, &of(4, i))))
            };
            let add = |to: &mut [f64], x: f64, row: &[f64]| to.iter_mut().zip(row).for_each(|(to, y)| *to += x * y);
            let mut want = [vec![0.0; self.dim], vec![0.0; self.dim], vec![0.0; self.dim]];
            let keys = if self.causal { 0..pick + 1 } else { 0..self.length };
            for j in keys {
                add(&mut want[0], pair(pick, j).1 * scale, &of(1, j));
            }
            let queries = if self.causal { pick..self.length } else { 0..self.length };
            for i in queries {
                let (p, d_z) = pair(i, pick);
                add(&mut want[1], d_z * scale, &of(0, i));
                add(&mut want[2], p, &of(3, i));
            }
            for (i, (want, got)) in want.iter().zip([&d_q, &d_k, &d_v]).enumerate() {
                let got = self.row(got, b, pick, h);
                let error: f64 = want.iter().zip(&got).map(|(a, b)| (a - b) * (a - b)).sum();
                let relative = (error / dot(want, want).max(1e-12)).sqrt();
                // The first query of a causal mask sees one key: its d_q is 0 in exact arithmetic.
                if dot(want, want).sqrt() > 1e-3 {
                    worst[i] = if relative.is_nan() { f64::INFINITY } else { worst[i].max(relative) };
                }
            }
        }
        Ok(worst)
    }

    fn flop(&self) -> f64 {
        let all = 10.0 * (self.batch * self.heads * self.dim) as f64 * (self.length as f64).powi(2);
        if self.causal { all / 2.0 } else { all }
    }
}

/// Launches with what they need.
struct Ready {
    launches: Vec<(Module, Launch)>,
    order: Order,
    _scratch: Buffer,
}

impl Ready {
    fn run(&self, gpu: &Cuda) -> Result<(), DeviceError> {
        self.launches.iter().try_for_each(|one| launch(gpu, one))
    }
}

fn launch(gpu: &Cuda, (module, launch): &(Module, Launch)) -> Result<(), DeviceError> {
    gpu.launch(module, launch.grid, &launch.args, Stream::default())
}

fn download(gpu: &Cuda, buffer: &Buffer) -> Result<Vec<bf16>, DeviceError> {
    let mut bytes = vec![0; buffer.span().bytes() as usize];
    gpu.download(buffer.span(), &mut bytes)?;
    Ok(bytes.chunks_exact(2).map(|w| bf16::from_le_bytes([w[0], w[1]])).collect())
}

fn median(mut times: Vec<f32>) -> f64 {
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2])
}

fn run(dims: &[usize], lengths: &[usize], rounds: usize, tunings: &[String]) -> Result<bool, Box<dyn Error>> {
    let ptxas = std::env::var_os("PTXAS").map(Into::into);
    let gpu = Cuda::open(0, Options { cache: None, losses: Losses::Allow, ptxas })?;
    println!(
        "{}, medians of {rounds} rounds, TFLOP/s (ms of prepare, main, and finish where there is one)",
        gpu.name()
    );
    let mut rng = Rng::new(1);
    let mut held = true;
    for &dim in dims {
        for &length in lengths {
            for causal in [false, true] {
                let cell = Cell::new(&gpu, dim, length, causal, &mut rng)?;
                let ready: Vec<Ready> = tunings.iter().map(|t| cell.plan(&gpu, t)).collect::<Result<_, _>>()?;
                let mut notes = Vec::new();
                for ready in &ready {
                    ready.run(&gpu)?;
                    gpu.synchronize(Stream::default())?;
                    let errors = cell.errors(&gpu, &mut rng)?;
                    let fixed = if ready.order == Order::Fixed { 5..8 } else { 6..8 };
                    let results = || -> Result<Vec<_>, DeviceError> {
                        cell.buffers[fixed.clone()].iter().map(|buffer| download(&gpu, buffer)).collect()
                    };
                    let first = results()?;
                    ready.run(&gpu)?;
                    let same = results()? == first;
                    let good = same && errors.iter().all(|error| *error <= ALLOWED);
                    held &= good;
                    let [q, k, v] = errors;
                    notes.push(format!("{q:.1e} {k:.1e} {v:.1e}{}", if good { "" } else { " WRONG" }));
                }
                let mut times = vec![Vec::new(); ready.len()];
                for _ in 0..rounds {
                    for (ready, times) in ready.iter().zip(&mut times) {
                        ready.run(&gpu)?;
                        let all = || (0..REPEATS).try_for_each(|_| ready.run(&gpu));
                        times.push(gpu.time(Stream::default(), all)? / REPEATS as f32);
                    }
                }
                let mask = if causal { "causal" } else { "full" };
                for (i, (ready, times)) in ready.iter().zip(times).enumerate() {
                    let mut parts = Vec::new();
                    for last in 0..ready.launches.len() {
                        // Each needs what those before it leave.
                        let time = |_| {
                            ready.launches[..last].iter().try_for_each(|one| launch(&gpu, one))?;
                            gpu.time(Stream::default(), || launch(&gpu, &ready.launches[last]))
                        };
                        parts.push(format!("{:.3}", median((0..rounds).map(time).collect::<Result<_, _>>()?)));
                    }
                    let rate = cell.flop() / median(times) / 1e9;
                    let name = if tunings[i].is_empty() { "usual" } else { &tunings[i] };
                    println!("d {dim} {mask} {length} {name}: {rate:.0} ({}); errors {}", parts.join(", "), notes[i]);
                }
            }
        }
    }
    Ok(held)
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let cells = args.next().unwrap_or("64,128".into());
    let (dims, lengths) = cells.split_once(':').unwrap_or((&cells, "1024,4096,16384"));
    let [dims, lengths] =
        [dims, lengths].map(|list| list.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>());
    let rounds = args.next().unwrap_or("12".into()).parse::<usize>();
    let (Ok(dims), Ok(lengths), Ok(rounds @ 1..)) = (dims, lengths, rounds) else {
        eprintln!("usage: gpu_backward [DIMS[:LENGTHS] [ROUNDS [TUNING..]]]");
        return ExitCode::FAILURE;
    };
    let tunings: Vec<String> = std::iter::once(String::new()).chain(args).collect();
    match run(&dims, &lengths, rounds, &tunings) {
        Ok(true) => {
            println!("all right");
            ExitCode::SUCCESS
        }
        Ok(false) => {
            println!("SOMETHING IS WRONG");
            ExitCode::FAILURE
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
