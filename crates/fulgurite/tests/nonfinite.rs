//! NaN and infinities in what some row does not see, through GPU kernels on the simulator: outputs do not meet them.

use fulgurite::gpu::Arch;
use fulgurite::{Choice, DType, Error, Run, engine};
use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::check_forward;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// How many seeds, from which on: `FULGURITE_SEEDS=0:2000` for more.
fn seeds() -> std::ops::Range<u64> {
    let usual = if std::env::var_os("FULGURITE_LONG").is_some() { "0:200" } else { "0:12" };
    let text = std::env::var("FULGURITE_SEEDS").unwrap_or_else(|_| usual.into());
    let parse = |x: &str| x.parse::<u64>().expect("FULGURITE_SEEDS is FROM:TO");
    text.split_once(':').map(|(from, to)| parse(from)..parse(to)).expect("FULGURITE_SEEDS is FROM:TO")
}

/// Whether forward reads a NaN or an infinity.
fn is_planted(case: &Case) -> bool {
    let inputs = case.inputs();
    [inputs.q, inputs.k, inputs.v].iter().any(|view| view.to_f64().iter().any(|x| !x.is_finite()))
}

/// Hopper's kernels, those of every GPU since Ampere, and Blackwell's, in turn.
const CHOICES: [Choice; 3] = [Choice::Sim, Choice::SimArch(Arch::SM_80), Choice::SimArch(Arch::SM_100A)];

#[test]
fn outputs_do_not_meet_what_rows_do_not_see() {
    let seeds = seeds();
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let (ran, planted, failed) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let engines = CHOICES.map(|choice| engine(choice).unwrap());
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end {
                        return;
                    }
                    let dtype = if seed % 2 == 0 { DType::Bf16 } else { DType::F16 };
                    let case = cases::random_nonfinite_short(seed, dtype);
                    let engine = &engines[seed as usize % 3];
                    let wrong = match engine.forward(case.problem(), &case.inputs(), &Run::default()) {
                        Err(Error::Unsupported(_)) => continue,
                        Err(e) => vec![format!("{case}: {e}")],
                        Ok(forward) => {
                            let verdicts = check_forward(&case.bound(), &forward, 0).into_iter();
                            let wrong = verdicts.filter(|(_, verdict)| !verdict.ok());
                            wrong.map(|(name, v)| format!("{case} on {}: {name}: {v}", engine.name())).collect()
                        }
                    };
                    ran.fetch_add(1, Ordering::Relaxed);
                    planted.fetch_add(usize::from(is_planted(&case)), Ordering::Relaxed);
                    failed.lock().unwrap().extend(wrong);
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    let (ran, planted) = (ran.into_inner(), planted.into_inner());
    println!("{ran} problems ran, {planted} of them with NaN or infinities");
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
    assert!(2 * planted > ran && 3 * ran > 2 * (end - seeds.start) as usize, "{ran} ran, {planted} planted");
}
