//! Checks a GPU, its driver and this crate against each other: `gpu_check [CASES [SEED]]`.
//!
//! Vector addition, recorded launches, the matrix product in every layout and type against sums in f64, what must be
//! refused, and how long kernels take to come. `PTXAS` may name an assembler to use instead of the driver's. The last line says whether everything held; so does the exit code.

use fulgurite_cuda::{Cuda, Losses, Options};
use fulgurite_kernels::gemm::plan::{Gemm, Matrix};
use fulgurite_kernels::gemm::{GemmConfig, Layouts};
use fulgurite_kernels::{add, gemm::plan::GemmError};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, LaunchError, Module, Span, Stream, Value};
use fulgurite_ptx::{Kernel, Major, Number, bf16, f16};
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Outcome = Result<String, Box<dyn Error>>;

/// A sequence of random numbers that a seed gives again: splitmix64.
struct Rng(u64);

impl Rng {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// From `low` to `high`, both included.
    fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.bits() % (high - low + 1)
    }
    /// From -1 to 1.
    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Checks that have run, and those that failed.
struct Checks {
    ran: u32,
    failed: Vec<String>,
}

impl Checks {
    /// Runs one check and prints its line.
    fn check(&mut self, name: &str, outcome: Outcome) {
        self.ran += 1;
        match outcome {
            Ok(note) => println!("ok      {name}{}{note}", if note.is_empty() { "" } else { ": " }),
            Err(why) => {
                println!("FAILED  {name}: {why}");
                self.failed.push(name.into());
            }
        }
    }
}

fn ms(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

fn bytes_of<T: Copy, const N: usize>(values: &[T], to_bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| to_bytes(x)).collect()
}

/// An error unless the text is the wanted one.
fn expect(got: Result<(), DeviceError>, want: &str) -> Outcome {
    match got {
        Err(e) if e.to_string() == want => Ok(String::new()),
        Err(e) => Err(format!("said `{e}`, wanted `{want}`").into()),
        Ok(()) => Err(format!("was accepted, wanted `{want}`").into()),
    }
}

/// Two arrays, their sum's place, and the launch that fills it.
struct Addition {
    module: Module,
    buffers: [Buffer; 3],
    n: u32,
    want: Vec<u8>,
}

impl Addition {
    fn new(gpu: &Cuda, n: u32, rng: &mut Rng) -> Result<Self, Box<dyn Error>> {
        let module = gpu.load(Arc::new(add::kernel(gpu.target())?))?;
        let [x, y]: [Vec<f32>; 2] = [0, 1].map(|_| (0..n).map(|_| rng.unit() as f32).collect());
        let sum: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        let bytes = u64::from(n) * 4;
        let buffers = [gpu.allocate(bytes)?, gpu.allocate(bytes)?, gpu.allocate(bytes)?];
        gpu.upload(buffers[0].span(), &bytes_of(&x, f32::to_le_bytes))?;
        gpu.upload(buffers[1].span(), &bytes_of(&y, f32::to_le_bytes))?;
        Ok(Addition { module, buffers, n, want: bytes_of(&sum, f32::to_le_bytes) })
    }
    fn args(&self) -> Vec<Value> {
        let spans = self.buffers.iter().map(|buffer| Value::Pointer(buffer.span()));
        spans.chain([Value::U32(self.n)]).collect()
    }
    fn clear(&self, gpu: &Cuda) -> Result<(), DeviceError> {
        gpu.upload(self.buffers[2].span(), &vec![0xff; self.want.len()])
    }
    fn launch(&self, gpu: &Cuda, stream: Stream) -> Result<(), DeviceError> {
        gpu.launch(&self.module, [self.n.div_ceil(add::THREADS), 1, 1], &self.args(), stream)
    }
    /// The sum is exact, so every bit must be right.
    fn compare(&self, gpu: &Cuda) -> Outcome {
        let mut got = vec![0; self.want.len()];
        gpu.download(self.buffers[2].span(), &mut got)?;
        match got.iter().zip(&self.want).position(|(got, want)| got != want) {
            Some(at) => Err(format!("element {} is wrong", at / 4).into()),
            None => Ok(format!("{} elements", self.n)),
        }
    }
}

fn vector_add(gpu: &Cuda, n: u32, rng: &mut Rng) -> Outcome {
    let addition = Addition::new(gpu, n, rng)?;
    addition.clear(gpu)?;
    addition.launch(gpu, Stream::default())?;
    gpu.synchronize(Stream::default())?;
    addition.compare(gpu)
}

/// A launch that is recorded does nothing; replayed, it does it.
fn recorded(gpu: &Cuda, rng: &mut Rng) -> Outcome {
    let addition = Addition::new(gpu, 100_000, rng)?;
    let stream = gpu.own_stream()?;
    addition.clear(gpu)?;
    let graph = gpu.capture(stream.stream(), || addition.launch(gpu, stream.stream()))?;
    gpu.synchronize(stream.stream())?;
    if addition.compare(gpu).is_ok() {
        return Err("recording already ran the launch".into());
    }
    gpu.replay(&graph, stream.stream())?;
    gpu.synchronize(stream.stream())?;
    addition.compare(gpu)
}

/// Many threads launch at once, each with its own memory.
fn threads(gpu: &Cuda, seed: u64) -> Outcome {
    let failed: Vec<String> = std::thread::scope(|scope| {
        let run = |thread: u64| {
            scope.spawn(move || {
                let mut rng = Rng(seed ^ thread);
                (0..20).find_map(|_| vector_add(gpu, 5000, &mut rng).err().map(|e| e.to_string()))
            })
        };
        let running: Vec<_> = (0..8).map(run).collect();
        running.into_iter().filter_map(|thread| thread.join().unwrap_or(Some("a thread panicked".into()))).collect()
    });
    if failed.is_empty() { Ok("8 threads".into()) } else { Err(failed.join("; ").into()) }
}

/// A 16-bit type of the product.
#[derive(Clone, Copy)]
struct Numbers {
    number: Number,
    encode: fn(f64) -> u16,
    decode: fn(u16) -> f64,
    /// Half the distance between neighbours, relative; and the same where numbers are subnormal, absolute.
    rounding: (f64, f64),
}

const F16: Numbers = Numbers {
    number: Number::F16,
    encode: |x| f16::from_f64(x).to_bits(),
    decode: |bits| f16::from_bits(bits).to_f64(),
    rounding: (1.0 / 2048.0, 1.0 / 33_554_432.0),
};
const BF16: Numbers = Numbers {
    number: Number::Bf16,
    encode: |x| bf16::from_f64(x).to_bits(),
    decode: |bits| bf16::from_bits(bits).to_f64(),
    rounding: (1.0 / 256.0, 0.0),
};

/// What a result's place holds before the launch: a number that no product gives here.
const UNTOUCHED: u16 = 0x7bcd;
/// What lies between the lines of A and B: not a number, so that reading it shows.
const POISON: u16 = 0x7fff;

/// Matrices on the host, with the memory they are to have.
struct Host {
    words: Vec<u16>,
    rows: usize,
    cols: usize,
    row_stride: usize,
    batch: usize,
    batch_stride: usize,
}

impl Host {
    fn new(rng: &mut Rng, [rows, cols, batch]: [usize; 3], fill: u16) -> Host {
        let row_stride = cols.next_multiple_of(8) + 8 * rng.range(0, 3) as usize;
        let batch_stride = rows * row_stride + 8 * rng.range(0, 3) as usize;
        let words = vec![fill; batch * batch_stride + 64];
        Host { words, rows, cols, row_stride, batch, batch_stride }
    }
    fn random(mut self, rng: &mut Rng, encode: fn(f64) -> u16) -> Host {
        self.places().for_each(|at| self.words[at] = encode(rng.unit()));
        self
    }
    fn at(&self, batch: usize, row: usize, col: usize) -> usize {
        batch * self.batch_stride + row * self.row_stride + col
    }
    /// Where elements lie.
    fn places(&self) -> impl Iterator<Item = usize> + use<> {
        let (rows, cols, row_stride, batch, batch_stride) =
            (self.rows, self.cols, self.row_stride, self.batch, self.batch_stride);
        let lines = (0..batch).flat_map(move |b| (0..rows).map(move |r| b * batch_stride + r * row_stride));
        lines.flat_map(move |line| line..line + cols)
    }
    fn matrix(&self, span: Span) -> Matrix {
        let [rows, cols, row_stride, batch, batch_stride] =
            [self.rows, self.cols, self.row_stride, self.batch, self.batch_stride].map(|n| n as u64);
        Matrix { span, rows, cols, row_stride, batch, batch_stride }
    }
    fn bytes(&self) -> Vec<u8> {
        bytes_of(&self.words, u16::to_le_bytes)
    }
    fn upload(&self, gpu: &Cuda) -> Result<Buffer, DeviceError> {
        let buffer = gpu.allocate(self.words.len() as u64 * 2)?;
        gpu.upload(buffer.span(), &self.bytes())?;
        Ok(buffer)
    }
}

/// A product that is ready to launch.
struct Ready {
    gemm: Gemm,
    numbers: Numbers,
    kernel: Arc<Kernel>,
    module: Module,
}

fn stored(major: Major, outer: usize, inner: usize) -> [usize; 2] {
    match major {
        Major::Inner => [outer, inner],
        Major::Outer => [inner, outer],
    }
}

/// One product against sums in f64, twice, with everything around C left alone.
fn product(gpu: &Cuda, ready: &Ready, [m, n, k, batch]: [usize; 4], rng: &mut Rng) -> Outcome {
    let Ready { gemm, numbers, kernel, module } = ready;
    let Layouts { a: a_major, b: b_major } = gemm.layouts;
    let shape = |[rows, cols]: [usize; 2]| [rows, cols, batch];
    let a = Host::new(rng, shape(stored(a_major, m, k)), POISON).random(rng, numbers.encode);
    let b = Host::new(rng, shape(stored(b_major, n, k)), POISON).random(rng, numbers.encode);
    let mut c = Host::new(rng, [m, n, batch], UNTOUCHED);
    let (a_buffer, b_buffer, c_buffer) = (a.upload(gpu)?, b.upload(gpu)?, c.upload(gpu)?);
    let matrices = [a.matrix(a_buffer.span()), b.matrix(b_buffer.span()), c.matrix(c_buffer.span())];
    let launch = gemm.launch(kernel.clone(), matrices, gpu.multiprocessors())?;
    let run = || -> Result<Vec<u8>, DeviceError> {
        gpu.upload(c_buffer.span(), &c.bytes())?;
        gpu.launch(module, launch.grid, &launch.args, Stream::default())?;
        gpu.synchronize(Stream::default())?;
        let mut got = vec![0; c.words.len() * 2];
        gpu.download(c_buffer.span(), &mut got)?;
        Ok(got)
    };
    let got = run()?;
    if run()? != got {
        return Err("two runs gave different bits".into());
    }
    c.words = got.chunks_exact(2).map(|word| u16::from_le_bytes([word[0], word[1]])).collect();

    let line = |host: &Host, major: Major, batch: usize, outer: usize| -> Vec<f64> {
        let places = (0..k).map(|inner| stored(major, outer, inner));
        places.map(|[row, col]| (numbers.decode)(host.words[host.at(batch, row, col)])).collect()
    };
    let mut worst = (0.0, String::from("no element"));
    for z in 0..batch {
        let columns: Vec<Vec<f64>> = (0..n).map(|col| line(&b, b_major, z, col)).collect();
        for row in 0..m {
            let left = line(&a, a_major, z, row);
            for (col, right) in columns.iter().enumerate() {
                let terms = left.iter().zip(right).map(|(x, y)| x * y);
                let (want, size) = terms.fold((0.0, 0.0), |(sum, size): (f64, f64), t| (sum + t, size + t.abs()));
                let got = (numbers.decode)(c.words[c.at(z, row, col)]);
                // The result's rounding; and for each term an error of one f32 step of the sum's size.
                let (relative, least) = numbers.rounding;
                let bound = want.abs() * relative + least + k as f64 * size / f64::from(1 << 23);
                let share = (got - want).abs() / bound;
                if share.is_nan() || share > worst.0 {
                    let place = format!("batch {z}, row {row}, column {col}");
                    worst = (share, format!("{place}: {got}, wanted {want} within {bound:.2e}"));
                }
                if share.is_nan() {
                    return Err(worst.1.into());
                }
            }
        }
    }
    if worst.0 > 1.0 {
        return Err(worst.1.into());
    }
    let mut around = vec![true; c.words.len()];
    c.places().for_each(|at| around[at] = false);
    if let Some(at) = (0..c.words.len()).find(|&at| around[at] && c.words[at] != UNTOUCHED) {
        return Err(format!("element {at} of C's memory, which is not C, was written").into());
    }
    Ok(format!("worst error {:.2} of the bound", worst.0))
}

/// Makes every kernel ready twice: compiled, and from the folder that the first left its code in.
fn kernels(gpu: &Cuda, again: &Cuda) -> Result<Vec<Ready>, Box<dyn Error>> {
    let mut ready = Vec::new();
    for numbers in [F16, BF16] {
        for (a, b) in [Major::Inner, Major::Outer].into_iter().flat_map(|a| [(a, Major::Inner), (a, Major::Outer)]) {
            let gemm = Gemm { number: numbers.number, layouts: Layouts { a, b }, config: GemmConfig::default() };
            let start = Instant::now();
            let kernel = Arc::new(gemm.kernel(gpu.target())?);
            let built = start.elapsed();
            let text = kernel.ptx();
            let printed = start.elapsed() - built;
            let start = Instant::now();
            let module = gpu.load(kernel.clone())?;
            let compiled = start.elapsed();
            let start = Instant::now();
            again.load(kernel.clone())?;
            let kept = start.elapsed();
            let log = gpu.log(&module).ok_or("the module has no log")?;
            println!(
                "        gemm {} a {a:?} b {b:?}: built {}, printed {} ({} characters), compiled {}, from the folder {}, \
                 {:?} registers, {} + {} bytes spilt",
                numbers.number.name(),
                ms(built),
                ms(printed),
                text.len(),
                ms(compiled),
                ms(kept),
                log.registers,
                log.spill_store_bytes,
                log.spill_load_bytes
            );
            if let Some(line) = log.text.lines().find(|line| line.starts_with("not kept")) {
                println!("        {line}");
            }
            ready.push(Ready { gemm, numbers, kernel, module });
        }
    }
    if let Some(first) = ready.first().and_then(|ready| gpu.log(&ready.module)) {
        first.text.lines().for_each(|line| println!("        | {line}"));
    }
    Ok(ready)
}

/// What must be refused, with the words it is refused with; the GPU works on afterwards.
fn refusals(checks: &mut Checks, gpu: &Cuda, ready: Option<&Ready>, rng: &mut Rng) {
    let addition = match Addition::new(gpu, 1000, rng) {
        Ok(addition) => addition,
        Err(why) => return checks.check("refusals", Err(why)),
    };
    let launch = |args: &[Value]| gpu.launch(&addition.module, [4, 1, 1], args, Stream::default());
    let mut args = addition.args();
    args[3] = Value::F32(1000.0);
    let want = "kernel `vector_add`: `n` is an integer of 32 bits, a float was given";
    checks.check("an argument of the wrong kind", expect(launch(&args), want));
    checks.check(
        "an argument too few",
        expect(launch(&args[..3]), "kernel `vector_add` takes 4 arguments, 3 were given"),
    );
    let span = addition.buffers[0].span();
    let bounds = |offset: u64, bytes: usize| gpu.upload(span.from(offset), &vec![0; bytes]);
    checks.check("bytes past a buffer", expect(bounds(3996, 8), "8 bytes at offset 0 of a buffer of 4"));
    let beyond = span.from(3996);
    let beyond = gpu.upload(beyond, &[0; 1 << 22]);
    let refused = matches!(beyond, Err(DeviceError::Bounds { .. }));
    checks.check("a span past its memory", if refused { Ok(String::new()) } else { Err(format!("{beyond:?}").into()) });

    // More than any GPU has, and less than its address space.
    let asked_bytes = 1 << 42;
    match gpu.allocate(asked_bytes) {
        Err(DeviceError::Memory { asked, free }) if asked == asked_bytes && free > 0 => {
            checks.check("more memory than there is", Ok(format!("{} MiB are free", free >> 20)));
        }
        other => checks.check("more memory than there is", Err(format!("{:?}", other.map(|b| b.span())).into())),
    }
    checks.check("the GPU works on", vector_add(gpu, 12_345, rng));

    let Some(Ready { gemm, kernel, module, .. }) = ready else { return };
    let buffer = match gpu.allocate(3 << 16) {
        Ok(buffer) => buffer,
        Err(why) => return checks.check("memory for refusals", Err(why.into())),
    };
    let matrix = |row_stride: u64, from: u64| Matrix {
        row_stride,
        batch_stride: 64 * row_stride,
        ..Matrix::packed(buffer.span().from(from), 64, 64, 1)
    };
    let plan = |matrices| gemm.launch(kernel.clone(), matrices, gpu.multiprocessors());
    let good = plan([matrix(64, 0), matrix(64, 1 << 16), matrix(64, 2 << 16)]);
    let refused = |got: Result<_, GemmError>, want: fn(&GemmError) -> bool| match got {
        Err(e) if want(&e) => Ok(e.to_string()),
        Err(e) => Err(format!("said `{e}`").into()),
        Ok(_) => Err("was accepted".into()),
    };
    let matrices = [matrix(66, 0), matrix(64, 1 << 16), matrix(64, 2 << 16)];
    checks.check("a stride of 132 bytes", refused(plan(matrices), |e| matches!(e, GemmError::Stride { .. })));
    let matrices = [matrix(64, 8), matrix(64, 1 << 16), matrix(64, 2 << 16)];
    checks.check("a misaligned matrix", refused(plan(matrices), |e| matches!(e, GemmError::Address { .. })));
    let good = match good {
        Ok(good) => good,
        Err(why) => return checks.check("a good plan", Err(why.into())),
    };
    // The device's own check, behind the plan's.
    let mut spoil = |name: &str, change: fn(&mut fulgurite_ptx::device::TensorSpan), want: fn(&LaunchError) -> bool| {
        let mut args = good.args.clone();
        if let Value::Tensor(tensor) = &mut args[0] {
            change(tensor);
        }
        let outcome = match gpu.launch(module, good.grid, &args, Stream::default()) {
            Err(DeviceError::Launch(e)) if want(&e) => Ok(e.to_string()),
            other => Err(format!("{other:?}").into()),
        };
        checks.check(name, outcome);
    };
    spoil("a misaligned tensor", |t| t.span = t.span.from(8), |e| matches!(e, LaunchError::Alignment { .. }));
    spoil("a tensor's stride of 132 bytes", |t| t.strides[0] = 132, |e| matches!(e, LaunchError::Tensor { .. }));
    let last = gpu.launch(module, good.grid, &good.args, Stream::default());
    let last = last.and_then(|()| gpu.synchronize(Stream::default()));
    checks.check("the good one still runs", last.map(|()| String::new()).map_err(Into::into));
}

/// The rate of a large product: a first number, not a measurement to quote.
fn rate(gpu: &Cuda, ready: &Ready) -> Outcome {
    let n = 8192u64;
    let bytes = n * n * 2;
    let buffers = [gpu.allocate(bytes)?, gpu.allocate(bytes)?, gpu.allocate(bytes)?];
    let mut rng = Rng(1);
    // A few random lines over and over: as good as any, and quickly made.
    let words: Vec<u16> = (0..64 * n).map(|_| (ready.numbers.encode)(rng.unit())).collect();
    let chunk = bytes_of(&words, u16::to_le_bytes);
    for buffer in &buffers[..2] {
        (0..bytes).step_by(chunk.len()).try_for_each(|at| gpu.upload(buffer.span().from(at), &chunk))?;
    }
    let matrices = [0, 1, 2].map(|i| Matrix::packed(buffers[i].span(), n, n, 1));
    let launch = ready.gemm.launch(ready.kernel.clone(), matrices, gpu.multiprocessors())?;
    let run = || gpu.launch(&ready.module, launch.grid, &launch.args, Stream::default());
    let mut times = Vec::new();
    for _ in 0..3 {
        gpu.time(Stream::default(), run)?;
    }
    for _ in 0..10 {
        times.push(gpu.time(Stream::default(), run)?);
    }
    times.sort_by(f32::total_cmp);
    let median_ms = f64::from(times[times.len() / 2]);
    let start = Instant::now();
    // Few enough for the driver's queue, so that none waits for the GPU.
    (0..100).try_for_each(|_| run())?;
    let submitted = start.elapsed() / 100;
    gpu.synchronize(Stream::default())?;
    let tflops = 2.0 * (n as f64).powi(3) / median_ms / 1e9;
    Ok(format!("{median_ms:.3} ms, {tflops:.0} TFLOP/s, {:.1} us a launch for the host", submitted.as_secs_f64() * 1e6))
}

fn run(checks: &mut Checks, cases: u64, seed: u64, folder: PathBuf) -> Result<(), Box<dyn Error>> {
    // With an assembler, the code of every kernel can be kept.
    let ptxas = std::env::var_os("PTXAS").map(PathBuf::from);
    let options = Options { cache: Some(folder.clone()), losses: Losses::Allow, ptxas };
    let start = Instant::now();
    let gpu = Cuda::open(0, options.clone())?;
    let ((major, minor), (cuda_major, cuda_minor)) = (gpu.capability(), gpu.cuda_version());
    println!(
        "{}: capability {major}.{minor}, CUDA {cuda_major}.{cuda_minor}, {} multiprocessors, opened in {}; seed {seed}",
        gpu.name(),
        gpu.multiprocessors(),
        ms(start.elapsed())
    );
    let again = Cuda::open(0, options.clone())?;
    let mut rng = Rng(seed);
    for n in [1, 255, 256, 257, 1_000_003] {
        checks.check("vector addition", vector_add(&gpu, n, &mut rng));
    }
    checks.check("a recorded launch", recorded(&gpu, &mut rng));
    checks.check("threads", threads(&gpu, seed));

    let ready = match kernels(&gpu, &again) {
        Ok(ready) => ready,
        Err(why) => {
            checks.check("kernels of the product", Err(why));
            Vec::new()
        }
    };
    let kept = std::fs::read_dir(&folder).map_or(0, Iterator::count);
    // Vector addition, and with an assembler also the products, which hand out registers.
    let all_kept = kept == 1 + if options.ptxas.is_some() { ready.len() } else { 0 };
    checks.check("code in the folder", if all_kept { Ok(kept.to_string()) } else { Err(kept.to_string().into()) });
    for ready in &ready {
        let Gemm { number, layouts: Layouts { a, b }, .. } = ready.gemm;
        let losses = gpu.log(&ready.module).map_or_else(Vec::new, |log| log.losses.clone());
        let fast = if losses.is_empty() { Ok(String::new()) } else { Err(losses.join("; ").into()) };
        checks.check(&format!("gemm {} a {a:?} b {b:?} compiles to fast code", number.name()), fast);
        let mut sizes = vec![[128, 256, 64, 1], [1, 1, 1, 1], [129, 257, 65, 2]];
        sizes.extend((0..cases).map(|_| {
            let [m, n, k] = [0; 3].map(|_| rng.range(1, 400) as usize);
            [m, n, k, rng.range(1, 3) as usize]
        }));
        for size @ [m, n, k, batch] in sizes {
            let name = format!("gemm {} a {a:?} b {b:?}, {m} x {n} x {k}, batch {batch}", number.name());
            checks.check(&name, product(&gpu, ready, size, &mut rng));
        }
    }
    refusals(checks, &gpu, ready.first(), &mut rng);
    // B as [n][k] and A as [m][k], bf16.
    if let Some(ready) = ready.get(4) {
        checks.check("gemm bf16 8192 x 8192 x 8192", rate(&gpu, ready));
    }
    Ok(())
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse::<u64>());
    let (Ok(cases), Ok(seed)) = (args.next().unwrap_or(Ok(10)), args.next().unwrap_or(Ok(1))) else {
        eprintln!("usage: gpu_check [CASES [SEED]]");
        return ExitCode::FAILURE;
    };
    let folder = std::env::temp_dir().join(format!("fulgurite-gpu-check-{}", std::process::id()));
    let mut checks = Checks { ran: 0, failed: Vec::new() };
    let start = Instant::now();
    if let Err(why) = run(&mut checks, cases, seed, folder.clone()) {
        checks.check("the GPU", Err(why));
    }
    let _ = std::fs::remove_dir_all(folder);
    for name in &checks.failed {
        println!("failed: {name}");
    }
    println!(
        "gpu_check: {} of {} checks failed, seed {seed}, {:.1} s",
        checks.failed.len(),
        checks.ran,
        start.elapsed().as_secs_f64()
    );
    if checks.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
