//! The host's cost of a GPU call: `gpu_host [ROUNDS] [fake]`.
//!
//! Nanoseconds of the host from one call to the next for a known shape (one sequence of 128, 16 heads, head_dim 128, bf16): the
//! median over rounds of 100 calls, without waiting for the GPU. `launch` is a launch whose arguments are ready; `forward` is
//! a whole call of the library. With `fake` the driver is the one of the tests, which needs no GPU: its figures compare two
//! versions of this library on one machine.

use fulgurite::gpu::{DeviceTensor, Gpu, Options, Tables, Tensors, Wish};
use fulgurite::{DType, Problem};
use fulgurite_cuda::fake;
use fulgurite_kernels::attention::forward::plan::ForwardPlan;
use fulgurite_ptx::device::{DeviceError, Stream};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

const CALLS: u32 = 100;

fn median_ns(
    gpu: &Gpu,
    rounds: usize,
    mut call: impl FnMut() -> Result<(), Box<dyn Error>>,
) -> Result<f64, Box<dyn Error>> {
    let mut all = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        (0..CALLS).try_for_each(|_| call())?;
        all.push(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
        gpu.device().synchronize(Stream::default())?;
    }
    all.sort_by(f64::total_cmp);
    Ok(all[all.len() / 2])
}

fn run() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rounds = arguments.iter().find(|text| *text != "fake").map_or(Ok(101), |text| text.parse())?;
    let gpu = match arguments.iter().any(|text| text == "fake") {
        true => {
            fake::books(|books| (books.memory_bytes, books.forgetful) = (1 << 24, true));
            Gpu::new(fake::open(Options::default())?, Tables::default())
        }
        false => Gpu::open(0, Options::default())?,
    };
    let [batch, len, heads, dim] = [1u64, 128, 16, 128];
    let problem = Problem::builder().dense(1, len as usize, len as usize).heads(heads as usize, heads as usize);
    let problem = problem.head_dim(dim as usize).dtype(DType::Bf16).build()?;
    let attention = gpu.attention(&problem, &Wish { lse: false, ..Wish::default() })?;
    let bytes = batch * len * heads * dim * 2;
    let memory = (0..6).map(|_| gpu.device().allocate(bytes)).collect::<Result<Vec<_>, DeviceError>>()?;
    for buffer in &memory {
        gpu.device().upload(buffer.span(), &vec![0; bytes as usize])?;
    }
    let rows = [0, 1, 2, 3].map(|i| DeviceTensor::packed(memory[i].span(), [batch, len, heads, dim]));
    let tensors = Tensors::new(rows, memory[4].span(), memory[5].span());
    let plan = ForwardPlan::new(&problem, None)?;
    let module = gpu.device().load(Arc::new(plan.kernel(gpu.device().target())?))?;
    let launch = plan.launch(module.shared_kernel(), &tensors, gpu.device().multiprocessors())?;
    let launch = launch.ok_or("nothing to launch")?;
    let device = gpu.device();
    let bare = || Ok(device.launch(&module, launch.grid, &launch.args, Stream::default())?);
    let whole = || Ok(gpu.forward(&attention, &mut tensors.clone(), Stream::default())?);
    println!("{}, medians of {rounds} rounds of {CALLS} calls", gpu.name());
    // Twice each, in turn: the first round of all pays for what is made once.
    for _ in 0..2 {
        println!("launch {:.0} ns, forward {:.0} ns", median_ns(&gpu, rounds, bare)?, median_ns(&gpu, rounds, whole)?);
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
