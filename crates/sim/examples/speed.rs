//! How fast kernels are simulated: instructions of lanes a second, on one core.
//!
//! `cargo run --release -p fulgurite-sim --example speed [KEYS]` runs 128 queries of head dimension 128 against so
//! many keys (4096), with checks and without.

use fulgurite_core::{Exp, Mask};
use fulgurite_kernels::attention::forward::{Features, Tuning, kernel};
use fulgurite_ptx::device::{Device, DeviceError, Stream, TensorSpan, Value};
use fulgurite_ptx::{Number, Target, bf16, divisor_values};
use fulgurite_sim::{Options, Sim};
use std::sync::Arc;
use std::time::Instant;

const ROWS: u32 = 128;
const DIM: u32 = 128;

fn main() -> Result<(), DeviceError> {
    let keys: u32 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(4096);
    let features = Features { dims: [DIM; 2], mask: Mask::none(), exp: Exp::Native };
    let built = kernel::<bf16>(Target::HOPPER, &features, Tuning::hopper(DIM, keys as usize, false));
    let built = built.map_err(|e| DeviceError::Failed { call: "build", what: e.to_string() })?;
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
        let tensor = |b: &fulgurite_ptx::device::Buffer, rows: u32| {
            let (extent, strides) = (vec![DIM.into(), rows.into(), 1, 1], vec![u64::from(2 * DIM); 3]);
            Value::Tensor(TensorSpan { span: b.span(), number: Number::Bf16, extent, strides })
        };
        let mut args = vec![tensor(&q, ROWS), tensor(&k, keys), tensor(&v, keys), tensor(&o, ROWS)];
        args.extend([Value::Pointer(lse.span()), Value::Pointer(counters.span())]);
        args.extend([ROWS, keys, 1, 1, 1].map(Value::U32));
        (0..5).for_each(|_| args.extend(divisor_values(1)));
        args.push(Value::F32(0.1));
        let module = sim.load(Arc::new(built.clone()))?;
        let start = Instant::now();
        sim.launch(&module, [1, 1, 1], &args, Stream::default())?;
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
