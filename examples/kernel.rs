//! A GPU kernel of one's own on the simulator: written in ten lines, then broken by leaving out its barrier.
//!
//! `cargo run -p fulgurite --example kernel` runs the whole kernel, `... -- --without-barrier` the broken one. It ends with
//! exit code 1 if the simulator finds a fault.

use fulgurite_ptx::device::{Device, Stream, Value};
use fulgurite_ptx::{BuildError, Kernel, Target};
use fulgurite_sim::{Options, Sim};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

const THREADS: u32 = 64;

/// Reverses 64 numbers: every thread puts one into shared memory and takes the one at the other end.
fn reverse(with_barrier: bool) -> Result<Kernel, BuildError> {
    Kernel::build("reverse", Target::AMPERE, |k| {
        let (x, y) = (k.pointer::<f32>("x"), k.pointer::<f32>("y"));
        let shared = k.shared::<f32>("shared", THREADS);
        k.threads(THREADS, |w| {
            let i = w.thread();
            shared.store(w, i, x.load(w, i));
            if with_barrier {
                w.sync(); // the other end belongs to another warp
            }
            y.store(w, i, shared.load(w, w.constant(THREADS - 1) - i));
        });
    })
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let with_barrier = !std::env::args().any(|arg| arg == "--without-barrier");
    let kernel = Arc::new(reverse(with_barrier)?);
    println!("{} lines of PTX, {} threads", kernel.ptx().lines().count(), kernel.threads);

    let numbers: Vec<f32> = (0..THREADS).map(|i| i as f32).collect();
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let sim = Sim::new(Options { seed: 7, ..Options::default() });
    let (x, y) = (sim.allocate(bytes.len() as u64)?, sim.zeroed(bytes.len() as u64)?);
    sim.upload(x.span(), &bytes)?;
    let module = sim.load(kernel)?;
    let arguments = [Value::Pointer(x.span()), Value::Pointer(y.span())];
    // A launch with findings is an error, and the findings say more.
    let launched = sim.launch(&module, [1, 1, 1], &arguments, Stream::default());
    for finding in sim.findings().iter().take(1) {
        println!("{finding}");
    }
    if launched.is_err() {
        return Ok(ExitCode::FAILURE);
    }
    let mut results = vec![0; bytes.len()];
    sim.download(y.span(), &mut results)?;
    let results: Vec<f32> = results.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    assert!(results.iter().eq(numbers.iter().rev()), "{results:?}");
    println!("clean: y is x in reverse, {:?} ...", &results[..4]);
    Ok(ExitCode::SUCCESS)
}
