//! How fast kernels are simulated: instructions of lanes a second, on one core.
//!
//! `cargo run --release -p fulgurite-sim --example speed [KEYS]` runs 128 queries of head dimension 128 against so
//! many keys (4096), with checks and without.

use fulgurite_core::{DType, Problem};
use fulgurite_kernels::attention::forward::plan::{DeviceTensor, ForwardPlan, Tensors};
use fulgurite_ptx::device::{Device, DeviceError, Stream};
use fulgurite_ptx::{Target, bf16};
use fulgurite_sim::{Options, Sim};
use std::sync::Arc;
use std::time::Instant;

const ROWS: u32 = 128;
const DIM: u32 = 128;

fn main() -> Result<(), DeviceError> {
    let keys: u32 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(4096);
    let failed = |what: String| DeviceError::Failed { call: "plan", what };
    let problem = Problem::builder()
        .dense(1, ROWS as usize, keys as usize)
        .heads(1, 1)
        .head_dim(DIM as usize)
        .dtype(DType::Bf16)
        .build()
        .map_err(|e| failed(e.to_string()))?;
    let plan = ForwardPlan::new(&problem, None).map_err(|e| failed(e.to_string()))?;
    let built = Arc::new(plan.kernel(Target::HOPPER).map_err(|e| failed(e.to_string()))?);
    for checks in [true, false] {
        let sim = Sim::new(Options { checks, ..Options::default() });
        let buffer = |rows: u32| {
            let bytes: Vec<u8> = (0..rows * DIM)
                .flat_map(|i| bf16::from_f32((i % 1009 * 7919 % 1009) as f32 / 1009.0 - 0.5).to_le_bytes())
                .collect();
            let buffer = sim.allocate(bytes.len() as u64)?;
            sim.upload(buffer.span(), &bytes).map(|()| buffer)
        };
        let (q, k, v, o) = (buffer(ROWS)?, buffer(keys)?, buffer(keys)?, buffer(ROWS)?);
        let (lse, counters) = (sim.allocate(4 * u64::from(ROWS))?, sim.allocate(8)?);
        sim.upload(counters.span(), &[0; 8])?;
        let tensors = [(&q, ROWS), (&k, keys), (&v, keys), (&o, ROWS)]
            .map(|(b, rows)| DeviceTensor::packed(b.span(), [1, rows.into(), 1, DIM.into()]));
        let tensors = Tensors::new(tensors, lse.span(), counters.span());
        let launch = plan.launch(built.clone(), &tensors, 1).map_err(|e| failed(e.to_string()))?;
        let launch = launch.ok_or_else(|| failed("there is nothing to do".into()))?;
        let module = sim.load(launch.kernel.clone())?;
        let start = Instant::now();
        sim.launch(&module, launch.grid, &launch.args, Stream::default())?;
        let seconds = start.elapsed().as_secs_f64();
        let total = sim.report().total();
        let lanes: u64 = total.lanes.values().sum();
        let flops: u64 = total.tensor_flops.values().sum();
        println!(
            "{keys} keys, checks {checks}: {seconds:.2} s, {:.1} million lane instructions a second, {:.2} GFLOP/s of products",
            lanes as f64 / seconds / 1e6,
            flops as f64 / seconds / 1e9
        );
    }
    Ok(())
}
