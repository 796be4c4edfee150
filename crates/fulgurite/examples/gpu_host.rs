//! The host's cost of a GPU call: `gpu_host [ROUNDS] [fake]`.
//!
//! Nanoseconds of the host from one call to the next for a known shape (one sequence of 128, 16 heads, head_dim 128, bf16): the
//! median over rounds of 100 calls, without waiting for the GPU. `launch` is a launch whose arguments are ready; `run`
//! adds the workspace and the prepared call; `forward` also builds the tensor views and checks them against the problem. With `fake` the driver is the one of the tests, which needs no GPU: its figures compare two
//! versions of this library on one machine.

use fulgurite::gpu::{DeviceSpan, Forward, ForwardOptions, Gpu, Options, ProfileSource, Session, Stream, Tables};
use fulgurite::{DType, Inputs, Problem, TensorView, TensorViewMut};
use fulgurite_cuda::fake;
use fulgurite_kernels::attention::forward::plan::{DeviceTensor, ForwardPlan, Tensors};
use fulgurite_ptx::device::{Device as _, DeviceError};
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
            Session::new(Arc::new(fake::open(Options::default())?), Tables::default())
        }
        false => Gpu::open(0, Options::default(), &ProfileSource::None)?,
    };
    let [batch, len, heads, dim] = [1u64, 128, 16, 128];
    let problem = Problem::builder().dense(1, len as usize, len as usize).heads(heads as usize, heads as usize);
    let problem = problem.head_dim(dim as usize).dtype(DType::Bf16).build()?;
    let prepared = gpu.prepare::<Forward>(&problem, &ForwardOptions { lse: false, ..ForwardOptions::default() })?;
    let bytes = batch * len * heads * dim * 2;
    let device = gpu.device();
    let memory = (0..6).map(|_| device.zeroed(bytes)).collect::<Result<Vec<_>, DeviceError>>()?;
    let rows = [0, 1, 2, 3].map(|i| DeviceTensor::packed(memory[i].span(), [batch, len, heads, dim]));
    let tensors = Tensors::new(rows, memory[4].span(), memory[5].span());
    let plan = ForwardPlan::new(&problem, None)?;
    let module = device.load(Arc::new(plan.kernel(device.target())?))?;
    let launch = plan.launch(module.shared_kernel(), &tensors, device.multiprocessors())?;
    let launch = launch.ok_or("nothing to launch")?;
    let bare = || Ok(device.launch(&module, launch.grid, &launch.args, Stream::default())?);
    let shape = [batch, len, heads, dim].map(|n| n as usize);
    let spans: Vec<DeviceSpan> = memory.iter().map(|buffer| DeviceSpan::of(&**device, buffer)).collect();
    let check = || -> Result<_, Box<dyn Error>> {
        let view = |i: usize| TensorView::on_device(&spans[i], DType::Bf16, &shape, None);
        let inputs = Inputs::new(view(0)?, view(1)?, view(2)?);
        let mut o = TensorViewMut::on_device(&spans[3], DType::Bf16, &shape, None)?;
        Ok(gpu.checked_forward(&prepared, &inputs, &mut o, None)?)
    };
    let checked = check()?;
    let whole = || Ok(gpu.run_call(&check()?, Stream::default())?);
    let ready = || Ok(gpu.run_call(&checked, Stream::default())?);
    println!("{}, medians of {rounds} rounds of {CALLS} calls", gpu.name());
    // Twice each, in turn: the first round of all pays for what is made once.
    for _ in 0..2 {
        let [launch, ready, whole] =
            [median_ns(&gpu, rounds, bare)?, median_ns(&gpu, rounds, ready)?, median_ns(&gpu, rounds, whole)?];
        println!("launch {launch:.0} ns, run {ready:.0} ns, forward {whole:.0} ns");
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
