//! NaN and infinities in what some row does not see, through GPU kernels on the simulator: neither outputs nor gradients
//! meet them, those of biases and sinks included.

use fulgurite::gpu::Arch;
use fulgurite::{Choice, DType, Engine, Error, Run, engine};
use fulgurite_core::Saved;
use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::{Verdict, check_backward, check_forward};
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

/// The first problems keep the tolerance rule itself. Of two thousand, a few have a lucky sample of its measure.
const STRICT: u64 = 12;
/// Times the tolerance that the others may differ by; NaN and infinities are in place in all of them.
const MARGIN: f64 = 8.0;

/// Hopper's kernels, those of every GPU since Ampere, and Blackwell's, in turn.
const CHOICES: [Choice; 3] = [Choice::Sim, Choice::SimArch(Arch::SM_80), Choice::SimArch(Arch::SM_100A)];

/// What an engine makes of a case, gradients too where the engine has them; `Err` for a problem it refuses.
fn verdicts(engine: &dyn Engine, case: &Case) -> Result<Vec<(String, Verdict)>, Error> {
    let (inputs, run) = (case.inputs(), Run::default());
    let forward = engine.forward(case.problem(), &inputs, &run)?;
    let mut verdicts = check_forward(&case.bound(), &forward, 0);
    let saved = Saved { d_lse: case.d_lse(), ..forward.saved(case.d_o()) };
    match engine.backward(case.problem(), &inputs, &saved, &run) {
        Ok(gradients) => verdicts.extend(check_backward(&case.bound(), &saved, &gradients, 0)),
        Err(Error::Unsupported(_)) => {}
        Err(e) => return Err(e),
    }
    Ok(verdicts)
}

#[test]
fn random_problems_leak_nothing() {
    let seeds = seeds();
    let (next, end) = (AtomicU64::new(seeds.start), seeds.end);
    let [ran, planted, derived, aux, over] = [(); 5].map(|_| AtomicUsize::new(0));
    let failed = Mutex::new(Vec::new());
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
                    let wrong = match verdicts(engine.as_ref(), &case) {
                        Err(Error::Unsupported(_)) => continue,
                        Err(e) => vec![format!("{case}: {e}")],
                        Ok(verdicts) => {
                            derived.fetch_add(usize::from(verdicts.len() > 2), Ordering::Relaxed);
                            aux.fetch_add(usize::from(verdicts.len() > 5), Ordering::Relaxed);
                            over.fetch_add(verdicts.iter().filter(|(_, v)| !v.ok()).count(), Ordering::Relaxed);
                            let margin = if seed < STRICT { 1.0 } else { MARGIN };
                            let wrong = verdicts.into_iter().filter(|(_, v)| !v.is_within(margin, 0.0));
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
    let [ran, planted, derived, aux, over] = [ran, planted, derived, aux, over].map(AtomicUsize::into_inner);
    println!("{ran} problems ran, {derived} with gradients, {aux} with those of biases or sinks too");
    println!("{planted} with NaN or infinities; {over} tensors over the tolerance rule");
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
    assert!(5 * planted > 2 * ran && 3 * ran > 2 * (end - seeds.start) as usize, "{ran} ran, {planted} planted");
    assert!(2 * derived > ran && 8 * aux > ran, "{derived} of {ran} with gradients, {aux} of biases or sinks");
}
