//! The table of cases through the gradients of the simulated GPU: every feature, judged by the tolerance rule.

use fulgurite::{Choice, DType, Engine, Error, Run, engine};
use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::check_backward;
use fulgurite_core::{Precision, Saved, oracle};

/// What is wrong with the gradients of a case; `None` where the engine refuses it.
fn judge(sim: &dyn Engine, case: &Case) -> Option<Vec<String>> {
    let forward = oracle::forward(&case.bound()).to_forward(case.problem()).unwrap();
    let saved = Saved { d_lse: case.d_lse(), ..forward.saved(case.d_o()) };
    let gradients = match sim.backward(case.problem(), &case.inputs(), &saved, &Run::default()) {
        Ok(gradients) => gradients,
        Err(Error::Unsupported(_)) => return None,
        Err(e) => return Some(vec![format!("{case}: {e}")]),
    };
    let verdicts = check_backward(&case.bound(), &saved, &gradients, 0);
    let wrong = verdicts.into_iter().filter(|(_, verdict)| !verdict.ok());
    Some(wrong.map(|(name, verdict)| format!("{case} {:?}: {name}: {verdict}", case.features)).collect())
}

/// Runs all of these cases on as many threads as there are; how many ran, and what is wrong.
fn run(cases: &[Case]) -> (usize, Vec<String>) {
    let judged = std::sync::Mutex::new((0, Vec::new()));
    let next = std::sync::atomic::AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let sim = engine(Choice::Sim).unwrap();
                while let Some(case) = cases.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    if let Some(wrong) = judge(sim.as_ref(), case) {
                        let mut all = judged.lock().unwrap();
                        all.0 += 1;
                        all.1.extend(wrong);
                    }
                }
            });
        }
    });
    judged.into_inner().unwrap()
}

/// Cases of the table that no kernel has: head dimensions beyond it, and another exponential. Nor has one another precision.
const REFUSED: usize = 3;

#[test]
fn gradients_of_the_table_are_right() {
    let mut table = cases::cases(DType::Bf16);
    // In f16 keys of 1000 are exact, and so must be what cancels before it is multiplied with them.
    table.extend(cases::cases(DType::F16).into_iter().filter(|case| case.features.contains(&"large_logits")));
    table.retain(|case| case.problem().precision() == Precision::Native);
    table.retain(|case| !case.features.iter().any(|feature| cases::NOT_ON_GPU.contains(feature)));
    let (ran, wrong) = run(&table);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(ran, table.len() - REFUSED);
}

/// Random mixtures of shapes and features, of which kernels have most: a hundred with `FULGURITE_LONG`.
#[test]
fn gradients_of_random_problems_are_right() {
    let drawn = (0..).map(|seed| cases::random(seed, if seed % 2 == 0 { DType::Bf16 } else { DType::F16 }));
    let [all, most] = if std::env::var_os("FULGURITE_LONG").is_some() { [140, 100] } else { [8, 4] };
    let cases: Vec<Case> = drawn.take(all).collect();
    let (ran, wrong) = run(&cases);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(ran >= most, "{ran} of {all} ran");
}
