//! How fast a GPU reads keys for few queries: `decode_rate [ROUNDS [COLSxDEPTH[@BLOCKS]]...]`.
//!
//! For 1 to 16 queries over 8192 and 65536 keys (32 query heads, 8 of keys, head_dim 128, bf16), one sequence and 32: the
//! median time of a launch alone, of launches in a row that find their keys where the last left them, and of launches
//! in a row on keys that were not read for long; bytes of K and V a second, and the share of what a copy kernel moves
//! (half read, half written) in the same run. Other cuts of the kernel may be named, as keys of a block x stages, and for how many multiprocessors the launch is made. Every
//! result is compared with the first one's bits. `PTXAS` may name an assembler to use instead of the driver's.

use fulgurite_core::{DType, Problem};
use fulgurite_cuda::{Cuda, Losses, Options};
use fulgurite_kernels::attention::decode::DecodeConfig;
use fulgurite_kernels::attention::forward::plan::{DeviceTensor, ForwardPlan, Tensors};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Launch, Module, Stream, Value};
use fulgurite_ptx::{BuildError, Kernel, Target, bf16};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const HEADS: u64 = 32;
const KV_HEADS: u64 = 8;
const DIM: u64 = 128;
/// Launches between two looks at the clock.
const ROW: usize = 20;
const GIGA: f64 = 1e9;

/// Words that a thread of the copy moves at a time, and threads of a block.
const PARTS: u32 = 4;
const THREADS: u32 = 512;

/// `to` = `from`, in units of 16 bytes, a multiple of what a block moves at a time.
fn copy_kernel(target: Target) -> Result<Kernel, BuildError> {
    Kernel::build("copy", target, |k| {
        let (from, to) = (k.pointer::<u32>("from"), k.pointer::<u32>("to"));
        let units = k.param::<u32>("units");
        k.threads(THREADS, |w| {
            let start = w.cta().mul_add(THREADS * PARTS, w.thread());
            w.each(start, units, w.ctas() * (THREADS * PARTS), |w, i| {
                let parts: Vec<_> = (0..PARTS).map(|j| from.load_some::<_, 4>(w, (i + j * THREADS) * 4)).collect();
                parts.into_iter().enumerate().for_each(|(j, x)| to.store_some(w, (i + j as u32 * THREADS) * 4, x));
            });
        });
    })
}

/// Numbers that look random, as bf16 between -1 and 1, over a whole buffer.
fn fill(gpu: &Cuda, buffer: &Buffer) -> Result<(), DeviceError> {
    let mut state = 1u64;
    let words = (0..1 << 22).map(|_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        bf16::from_f32(((state >> 40) as f32 / (1 << 23) as f32) - 1.0)
    });
    let chunk: Vec<u8> = words.flat_map(|x| x.to_le_bytes()).collect();
    let bytes = buffer.span().bytes() as usize;
    let each = |at: usize| {
        let part = chunk.len().min(bytes - at);
        gpu.upload(buffer.span().from(at as u64), &chunk[..part])
    };
    (0..bytes).step_by(chunk.len()).try_for_each(each)
}

fn median(mut times: Vec<f32>) -> f64 {
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2])
}

/// The medians of a launch alone and of launches in a row, in milliseconds: the `i`-th launch takes the `i`-th of these.
fn medians(gpu: &Cuda, module: &Module, launches: &[Launch], rounds: usize) -> Result<[f64; 2], DeviceError> {
    let stream = gpu.own_stream()?;
    let one = |i: usize| {
        let launch = &launches[i % launches.len()];
        gpu.launch(module, launch.grid, &launch.args, stream.stream())
    };
    (0..5).try_for_each(one)?;
    let mut alone = Vec::new();
    for i in 0..rounds {
        alone.push(gpu.time(stream.stream(), || one(i))?);
    }
    // Recorded, so that the host is not what is timed.
    let graph = gpu.capture(stream.stream(), || (0..ROW).try_for_each(one))?;
    let mut row = Vec::new();
    for _ in 0..rounds.div_ceil(ROW).max(5) {
        row.push(gpu.time(stream.stream(), || gpu.replay(&graph, stream.stream()))? / ROW as f32);
    }
    Ok([median(alone), median(row)])
}

struct Cell {
    q_len: u64,
    k_len: u64,
    batch: u64,
}

/// Memory that all cells share.
struct Memory {
    k: Buffer,
    v: Buffer,
    small: Buffer,
    counters: Buffer,
    scratch: Buffer,
}

/// The most that keys or values take.
const KEYS_BYTES: u64 = 32 * 65536 * KV_HEADS * DIM * 2;
/// Room for q, o and LSE, each.
const SMALL_BYTES: u64 = 32 * 16 * HEADS * DIM * 2;

/// Another cut of the kernel.
#[derive(Clone, Copy)]
struct TileConfig {
    cols: u32,
    depth: u32,
    /// Multiprocessors that the launch is made for.
    blocks: Option<u32>,
}

impl Cell {
    fn plan(&self, cut: Option<TileConfig>) -> Result<ForwardPlan, Box<dyn Error>> {
        let [batch, q_len, k_len] = [self.batch, self.q_len, self.k_len].map(|n| n as usize);
        let problem = Problem::builder()
            .dense(batch, q_len, k_len)
            .heads(HEADS as usize, KV_HEADS as usize)
            .head_dim(DIM as usize)
            .dtype(DType::Bf16)
            .build()?;
        let plan = ForwardPlan::new(&problem, None)?;
        Ok(match cut {
            Some(TileConfig { cols, depth, .. }) => {
                plan.with_decode_config(|config| DecodeConfig { cols, depth, ..config })
            }
            None => plan,
        })
    }

    /// Bytes of K, and of V.
    fn bytes(&self) -> u64 {
        self.batch * self.k_len * KV_HEADS * DIM * 2
    }

    /// A launch that reads the `part`-th piece of the keys.
    fn launch(&self, plan: &ForwardPlan, kernel: &Arc<Kernel>, memory: &Memory, part: u64, processors: u32) -> Launch {
        let at = part * self.bytes();
        let small = |i: u64| memory.small.span().from(i * SMALL_BYTES).first(SMALL_BYTES);
        let rows = |span, len, heads| DeviceTensor::packed(span, [self.batch, len, heads, DIM]);
        let tensors = [
            rows(small(0), self.q_len, HEADS),
            rows(memory.k.span().from(at), self.k_len, KV_HEADS),
            rows(memory.v.span().from(at), self.k_len, KV_HEADS),
            rows(small(1), self.q_len, HEADS),
        ];
        let tensors = Tensors::new(tensors, small(2), memory.counters.span());
        let tensors = Tensors { scratch: Some(memory.scratch.span()), ..tensors };
        let launch = plan.launch(kernel.clone(), &tensors, processors);
        launch.ok().flatten().expect("bug in fulgurite: a cell without rows")
    }

    fn run(
        &self,
        gpu: &Cuda,
        memory: &Memory,
        rounds: usize,
        cut: Option<TileConfig>,
    ) -> Result<String, Box<dyn Error>> {
        let plan = self.plan(cut)?;
        let wanted = [plan.counter_bytes(), plan.scratch_bytes()];
        if wanted[0] > memory.counters.span().bytes() || wanted[1] > memory.scratch.span().bytes() {
            return Err(format!("the launch wants {wanted:?} bytes of counters and scratch").into());
        }
        gpu.upload(memory.counters.span(), &vec![0; memory.counters.span().bytes() as usize])?;
        let kernel = Arc::new(plan.kernel(gpu.target())?);
        let module = gpu.load(kernel.clone())?;
        let processors = cut.and_then(|cut| cut.blocks).unwrap_or(gpu.multiprocessors());
        let launch = |part| self.launch(&plan, &kernel, memory, part, processors);
        let result = || -> Result<Vec<u8>, DeviceError> {
            let first = launch(0);
            gpu.launch(&module, first.grid, &first.args, Stream::default())?;
            gpu.synchronize(Stream::default())?;
            let mut bytes = vec![0; 2 * SMALL_BYTES as usize];
            gpu.download(memory.small.span().from(SMALL_BYTES), &mut bytes)?;
            Ok(bytes)
        };
        let before = result()?;
        let [alone, row] = medians(gpu, &module, &[launch(0)], rounds)?;
        // As many pieces as make a gigabyte or more: none is in the second-level cache when its turn comes.
        let pieces = (KEYS_BYTES / self.bytes()).min(64);
        let cold: Vec<Launch> = (0..pieces).map(launch).collect();
        let cold = match pieces {
            1 => row,
            _ => medians(gpu, &module, &cold, rounds)?[1],
        };
        let same = if result()? == before { "" } else { "  BITS DIFFER" };
        let rate = |ms: f64| 2.0 * self.bytes() as f64 / (ms / 1e3) / GIGA;
        let copy = copy_rate(gpu, memory, 2 * self.bytes(), rounds)?;
        Ok(format!(
            "{:>8.1} {:>8.1} {:>8.1} us   {:>5.0} {:>5.0} GB/s   copy {copy:>5.0} GB/s   {:>4.0}% {:>4.0}%{same}",
            alone * 1e3,
            row * 1e3,
            cold * 1e3,
            rate(row),
            rate(cold),
            100.0 * rate(row) / copy,
            100.0 * rate(cold) / copy
        ))
    }
}

/// Bytes a second, in giga, that a copy moves, half of these bytes read and half written.
fn copy_rate(gpu: &Cuda, memory: &Memory, bytes: u64, rounds: usize) -> Result<f64, Box<dyn Error>> {
    let module = gpu.load(Arc::new(copy_kernel(gpu.target())?))?;
    // From K to V: its contents do not matter.
    let units = bytes / 2 / 16;
    let args = vec![Value::Pointer(memory.k.span()), Value::Pointer(memory.v.span()), Value::U32(units as u32)];
    let grid = [gpu.multiprocessors() * 4, 1, 1];
    let launch = Launch { kernel: module.shared_kernel(), grid, args };
    let [_, row] = medians(gpu, &module, &[launch], rounds)?;
    Ok(bytes as f64 / (row / 1e3) / GIGA)
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let rounds: usize = args.next().map_or(Ok(100), |n| n.parse())?;
    let cut = |word: String| -> Result<Option<TileConfig>, Box<dyn Error>> {
        let (cols, rest) = word.split_once('x').ok_or("a cut is keys of a block x stages, as in 128x3")?;
        let (depth, blocks) = rest.split_once('@').map_or((rest, None), |(depth, blocks)| (depth, Some(blocks)));
        let blocks = blocks.map(str::parse).transpose()?;
        Ok(Some(TileConfig { cols: cols.parse()?, depth: depth.parse()?, blocks }))
    };
    let mut cuts = vec![None];
    cuts.extend(args.map(cut).collect::<Result<Vec<_>, _>>()?);
    let ptxas = std::env::var_os("PTXAS").map(Into::into);
    let gpu = Cuda::open(0, Options { cache: None, losses: Losses::Refuse, ptxas })?;
    println!(
        "{}, {} multiprocessors, bf16, {HEADS}/{KV_HEADS} heads, head_dim {DIM}",
        gpu.name(),
        gpu.multiprocessors()
    );
    let memory = Memory {
        k: gpu.allocate(KEYS_BYTES)?,
        v: gpu.allocate(KEYS_BYTES)?,
        small: gpu.allocate(3 * SMALL_BYTES)?,
        counters: gpu.allocate(1 << 16)?,
        scratch: gpu.allocate(1 << 30)?,
    };
    [&memory.k, &memory.v, &memory.small].into_iter().try_for_each(|buffer| fill(&gpu, buffer))?;
    println!(
        "batch keys   queries cut        alone   in a row    cold       in a row, cold        and a copy         shares"
    );
    for (batch, k_len) in [(1, 8192), (1, 65536), (32, 8192), (32, 65536)] {
        for q_len in [1, 2, 4, 8, 16] {
            for cut in &cuts {
                let name = cut.map_or("default".into(), |TileConfig { cols, depth, blocks }| {
                    format!("{cols}x{depth}{}", blocks.map_or(String::new(), |n| format!("@{n}")))
                });
                let line = Cell { q_len, k_len, batch }.run(&gpu, &memory, rounds, *cut);
                let line = line.unwrap_or_else(|e| format!("FAILED: {e}"));
                println!("{batch:>5} {k_len:>6} {q_len:>7} {name:<8} {line}");
            }
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("decode_rate: {e}");
            ExitCode::FAILURE
        }
    }
}
