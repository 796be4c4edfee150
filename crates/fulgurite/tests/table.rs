//! The table of cases through the simulated GPU, forward and backward: every feature, judged by the tolerance rule.

use fulgurite::gpu::Arch;
use fulgurite::gpu::Order;
use fulgurite::{Choice, DType, Engine, Error, Inputs, Problem, Run, Settings, Tensor, engine, engine_with};
use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::{Precision, Saved, oracle};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What is wrong with a case; `None` where the engine refuses it.
type Verdict = Option<Vec<String>>;

fn judge_forward(sim: &dyn Engine, case: &Case) -> Verdict {
    let forward = match sim.forward(case.problem(), &case.inputs(), &Run::default()) {
        Ok(forward) => forward,
        Err(Error::Unsupported(_)) => return None,
        Err(e) => return Some(vec![format!("{case}: {e}")]),
    };
    let verdicts = check_forward(&case.bound(), &forward, 0);
    let wrong = verdicts.into_iter().filter(|(_, verdict)| !verdict.ok());
    Some(wrong.map(|(name, verdict)| format!("{case} {:?}: {name}: {verdict}", case.features)).collect())
}

fn judge_gradients(sim: &dyn Engine, case: &Case) -> Verdict {
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

/// Judges all cases, one thread a core; the number that the engine did not refuse, and what is wrong with them.
fn run(cases: &[Case], judge: impl Fn(&dyn Engine, &Case) -> Verdict + Sync) -> (usize, Vec<String>) {
    run_on(Choice::Sim, cases, judge)
}

fn run_on(
    choice: Choice,
    cases: &[Case],
    judge: impl Fn(&dyn Engine, &Case) -> Verdict + Sync,
) -> (usize, Vec<String>) {
    let judged = Mutex::new((0, Vec::new()));
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let sim = engine(choice).unwrap();
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
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

/// The table in bf16, and in f16 the cases with large logits: there keys of 1000 are exact, so sums that cancel must be too.
fn table() -> Vec<Case> {
    let mut table = cases::cases(DType::Bf16);
    table.extend(cases::cases(DType::F16).into_iter().filter(|case| case.features.contains(&"large_logits")));
    // No kernel has another precision yet.
    table.retain(|case| case.problem().precision() == Precision::Native);
    table
}

/// The table for gradients. A simulator takes long for rows that are computed again, because the threads of one CTA multiply
/// them: without `FULGURITE_LONG`, a few cases with rows that are not finite are judged.
fn gradient_table() -> Vec<Case> {
    const EVERY: usize = 34;
    let step = if std::env::var_os("FULGURITE_LONG").is_some() { 1 } else { EVERY };
    let is_finite = |case: &Case| !case.features.iter().any(|feature| cases::NONFINITE.contains(feature));
    let (mut finite, spoiled): (Vec<Case>, Vec<Case>) = table().into_iter().partition(is_finite);
    finite.extend(spoiled.into_iter().step_by(step));
    finite
}

/// Judges a table on a GPU other than Hopper, of which `refused` cases at most are refused: all of it with
/// `FULGURITE_LONG`, else every sixth case from `first` on. The units share masks, modifiers, softmax and epilogue, which the
/// whole table judges on Hopper.
fn run_elsewhere(
    arch: Arch,
    table: Vec<Case>,
    (first, refused): (usize, usize),
    judge: impl Fn(&dyn Engine, &Case) -> Verdict + Sync,
) {
    let long = std::env::var_os("FULGURITE_LONG").is_some();
    let (first, step) = if long { (0, 1) } else { (first, 6) };
    let table: Vec<Case> = table.into_iter().skip(first).step_by(step).collect();
    let (ran, wrong) = run_on(Choice::SimArch(arch), &table, judge);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(ran + refused >= table.len() && (!long || ran + refused == table.len()), "{ran} of {}", table.len());
}

/// Cases that every kernel refuses: the online table exponential.
const REFUSED: usize = 2;

#[test]
fn outputs_of_the_table_are_right() {
    let table = table();
    let (ran, wrong) = run(&table, judge_forward);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(ran, table.len() - REFUSED);
}

/// Cases that `mma.sync` refuses: head dimensions above 256, and the table exponential in both forms.
const REFUSED_BY_MMA_SYNC: usize = REFUSED + 3;

/// The kernels of every GPU since Ampere.
#[test]
fn outputs_of_the_table_are_right_by_mma_sync() {
    run_elsewhere(Arch::SM_80, table(), (0, REFUSED_BY_MMA_SYNC), judge_forward);
}

/// The kernels of data-centre Blackwell; what they refuse runs by `mma.sync`.
#[test]
fn outputs_of_the_table_are_right_by_tcgen05() {
    run_elsewhere(Arch::SM_100A, table(), (1, REFUSED_BY_MMA_SYNC), judge_forward);
}

/// Cases that backward refuses: head dimensions above 256, and the table exponential in both forms.
const REFUSED_BACKWARD: usize = REFUSED + 3;

#[test]
fn gradients_of_the_table_are_right() {
    let table = gradient_table();
    let (ran, wrong) = run(&table, judge_gradients);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(ran, table.len() - REFUSED_BACKWARD);
}

/// The gradients of every GPU since Ampere.
#[test]
fn gradients_of_the_table_are_right_by_mma_sync() {
    run_elsewhere(Arch::SM_80, gradient_table(), (2, REFUSED_BACKWARD), judge_gradients);
}

/// The gradients of data-centre Blackwell; what `tcgen05` refuses runs by `mma.sync`.
#[test]
fn gradients_of_the_table_are_right_by_tcgen05() {
    run_elsewhere(Arch::SM_100A, gradient_table(), (1, REFUSED_BACKWARD), judge_gradients);
}

/// Random mixtures of shapes and features, most of which kernels have: more of them with `FULGURITE_LONG`.
fn random_problems(choice: Choice, judge: impl Fn(&dyn Engine, &Case) -> Verdict + Sync) {
    let drawn = (0..).map(|seed| cases::random(seed, if seed % 2 == 0 { DType::Bf16 } else { DType::F16 }));
    let [all, most] = if std::env::var_os("FULGURITE_LONG").is_some() { [140, 100] } else { [8, 4] };
    let cases: Vec<Case> = drawn.take(all).collect();
    let (ran, wrong) = run_on(choice, &cases, judge);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(ran >= most, "{ran} of {all} ran");
}

#[test]
fn outputs_of_random_problems_are_right() {
    random_problems(Choice::Sim, judge_forward);
}

#[test]
fn gradients_of_random_problems_are_right() {
    random_problems(Choice::Sim, judge_gradients);
}

#[test]
fn gradients_of_random_problems_are_right_by_mma_sync() {
    random_problems(Choice::SimArch(Arch::SM_86), judge_gradients);
}

#[test]
fn gradients_of_random_problems_are_right_by_tcgen05() {
    random_problems(Choice::SimArch(Arch::SM_103A), judge_gradients);
}

/// Random problems with rows that are not finite, on one GPU of each tensor unit; with `FULGURITE_LONG` only.
#[test]
fn gradients_beside_rows_that_are_not_finite_are_right() {
    if std::env::var_os("FULGURITE_LONG").is_none() {
        return;
    }
    let drawn = |seed| cases::random_nonfinite(seed, if seed % 2 == 0 { DType::Bf16 } else { DType::F16 });
    let cases: Vec<Case> = (0..90).map(drawn).collect();
    for (arch, cases) in [Arch::SM_90A, Arch::SM_80, Arch::SM_100A].into_iter().zip(cases.chunks(30)) {
        let (ran, wrong) = run_on(Choice::SimArch(arch), cases, judge_gradients);
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(ran >= 20, "{ran} of {}", cases.len());
    }
}

/// What gradients by `mma.sync` lack is refused by name before anything runs.
#[test]
fn missing_gradients_of_mma_sync_are_refused_by_name() {
    let refused = |arch: Arch, head_dim: usize, order: Order| {
        let problem = Problem::builder().dense(1, 8, 8).heads(1, 1).head_dim(head_dim).dtype(DType::Bf16).build();
        let problem = problem.unwrap();
        let settings = Settings::default().order(order);
        let sim = engine_with(Choice::SimArch(arch), &settings).unwrap();
        let zeros = |shape: &[usize]| Tensor::zeros(DType::Bf16, shape).unwrap();
        let (q, lse) = (zeros(&problem.q_shape()), Tensor::zeros(DType::F32, &problem.lse_shape()).unwrap());
        let inputs = Inputs::new(q.view(), q.view(), q.view());
        let saved = Saved { o: q.view(), lse: lse.view(), d_o: q.view(), d_lse: None };
        sim.backward(&problem, &inputs, &saved, &Run::default()).unwrap_err().to_string()
    };
    let fixed = refused(Arch::SM_80, 64, Order::Fixed);
    assert!(fixed.contains("gradients in a fixed order by mma.sync"), "{fixed}");
    let room = refused(Arch::SM_86, 256, Order::Any);
    assert!(room.contains("backward of head dims 256 and 256 in 99 KB of shared memory by mma.sync"), "{room}");
}
