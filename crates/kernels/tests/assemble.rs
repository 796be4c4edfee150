//! Kernels that are not registered go through the assembler without a loss: attention at odd head dimensions, and the
//! probe of the tensor cores.

use fulgurite_core::expr::{batch, k, q};
use fulgurite_core::{BlockSpec, DType, Mask, Problem, ProblemBuilder, Rescale, expr};
use fulgurite_kernels::attention::backward::plan::BackwardPlan;
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_kernels::attention::forward::plan::{Added, ConfigTable, ForwardPlan, ResultType};
use fulgurite_kernels::{probe, registry};
use fulgurite_ptx::assemble::{Assembler, Fault, Hints};
use fulgurite_ptx::kernel::Stmt;
use fulgurite_ptx::{Arch, BuildError, Kernel, Target, bf16, f16};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

fn assembler() -> Option<Assembler> {
    let Some(ptxas) = std::env::var_os("PTXAS") else {
        println!("skipped: `PTXAS` names no assembler");
        return None;
    };
    Some(Assembler::find(&Hints { ptxas: Some(ptxas.into()), ..Hints::default() }).unwrap())
}

#[test]
fn the_probe_assembles() {
    let Some(assembler) = assembler() else { return };
    for kernel in [probe::kernel::<f16>(Target::HOPPER), probe::kernel::<bf16>(Target::HOPPER)] {
        let report = assembler.assemble(&kernel.unwrap()).unwrap();
        assert!(report.verdict().is_ok(), "{:?}", report.verdict());
    }
}

/// Whether all kernels are assembled. The usual run takes a share of each test's kernels: the assembler's time would be a
/// fifth of it.
fn long() -> bool {
    std::env::var_os("FULGURITE_LONG").is_some()
}

/// Registered kernels on every architecture that can run them, without spills and warnings.
#[test]
fn registered_kernels_assemble() {
    let Some(assembler) = assembler() else { return };
    let pairs = Arch::ALL.into_iter().flat_map(|arch| registry::all().iter().map(move |entry| (arch, entry)));
    // The number of entries is no multiple of the step, so that each architecture has others.
    let step = if long() { 1 } else { 7 };
    assert!(step == 1 || !registry::all().len().is_multiple_of(step));
    let (mut wrong, mut assembled) = (Vec::new(), 0);
    for (arch, entry) in pairs.step_by(step) {
        let kernel = match (entry.build)(Target::new(arch)) {
            Ok(kernel) => kernel,
            Err(BuildError::Needs { .. }) => continue,
            Err(e) => panic!("{arch} {}: {e}", entry.name),
        };
        assembled += 1;
        wrong.extend(faults(&assembler, &kernel).map(|faults| format!("{arch}, {faults}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(assembled * step > 400, "{assembled}");
}

/// What is wrong with a kernel. Problems share many of their kernels, and the assembler is what these tests wait for: it
/// sees each text once.
fn faults(assembler: &Assembler, kernel: &Kernel) -> Option<String> {
    static KNOWN: Mutex<BTreeMap<String, Option<String>>> = Mutex::new(BTreeMap::new());
    let text = kernel.ptx();
    if let Some(faults) = KNOWN.lock().unwrap().get(&text) {
        return faults.clone();
    }
    let report = assembler.assemble(kernel).unwrap();
    println!("{}: {} registers, {:.2} s", kernel.name, report.registers, report.time.as_secs_f64());
    let faults = report.verdict().err();
    let faults = faults.map(|faults| format!("{}: {faults:.200?}", kernel.name));
    KNOWN.lock().unwrap().insert(text, faults.clone());
    faults
}

/// Assembles the kernels of a problem's gradients; what is wrong with them.
fn gradients(assembler: &Assembler, problem: ProblemBuilder, order: Order) -> Vec<String> {
    let problem = problem.dtype(DType::Bf16).build().unwrap();
    let kernels = BackwardPlan::new(&problem, true, order).unwrap().kernels(Target::HOPPER).unwrap();
    let what = |faults| format!("{:?}, {:?}, {order:?}: {faults}", problem.layout(), problem.mask());
    kernels.all().filter_map(|kernel: &Arc<Kernel>| faults(assembler, kernel)).map(what).collect()
}

/// The same of its forward pass.
fn forward(assembler: &Assembler, problem: ProblemBuilder) -> Option<String> {
    let problem = problem.dtype(DType::Bf16).build().unwrap();
    let kernel = ForwardPlan::new(&problem, None).unwrap().kernel(Target::HOPPER).unwrap();
    let faults = faults(assembler, &kernel)?;
    let (d, layout, mask) = (problem.head_dim(), problem.layout(), problem.mask());
    Some(format!("{d}, {layout:?}, {mask:?}: {faults}"))
}

/// A kernel without its walls: without the branches that lead to a trap.
fn without_walls(mut kernel: Kernel) -> Kernel {
    fn walk(block: &mut Vec<Stmt>) {
        block.retain_mut(|stmt| match stmt {
            Stmt::If { then, .. } if matches!(&then[..], [Stmt::Op(op)] if op.inst.name == "trap") => false,
            Stmt::If { then, otherwise, .. } => {
                walk(then);
                walk(otherwise);
                true
            }
            Stmt::Loop { body, .. } => {
                walk(body);
                true
            }
            _ => true,
        });
    }
    walk(&mut kernel.body);
    kernel
}

/// Forward attention by `tcgen05` publishes p in parts. Without its walls the assembler computes all of p before it
/// publishes the first part, under every rescale policy, and the build names the role and the line.
#[test]
fn a_publish_that_loses_its_wall_fails_the_build() {
    let Some(assembler) = assembler() else { return };
    if assembler.nvdisasm().is_none() {
        println!("skipped: there is no disassembler");
        return;
    }
    let policies = [Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT), Rescale::Lazy(8.0), Rescale::Always];
    for (arch, rescale) in [Arch::SM_100A, Arch::SM_103A].into_iter().flat_map(|arch| policies.map(|r| (arch, r))) {
        let problem = Problem::builder().dense(1, 700, 700).heads(2, 1).head_dim(128).dtype(DType::Bf16);
        let problem = problem.mask(Mask::causal()).build().unwrap();
        let plan = ForwardPlan::tcgen05(&problem, Some(rescale), &ConfigTable::default()).unwrap();
        let kernel = plan.kernel(Target::new(arch)).unwrap();
        let [publish] = &kernel.publishes[..] else { panic!("{:?}", kernel.publishes) };
        assert_eq!(publish.role, "softmax");
        assert_eq!(assembler.assemble(&kernel).unwrap().verdict(), Ok(()), "{arch}, {rescale:?}");
        let line = format!("{}:{}: role `softmax` publishes", publish.at.file(), publish.at.line());
        let faults = assembler.assemble(&without_walls(kernel)).unwrap().verdict().unwrap_err();
        // The publish of a tile's first block, and that of the others.
        assert!((1..=2).contains(&faults.len()), "{faults:?}");
        for fault in faults {
            let Fault::LatePublish(late) = &fault else { panic!("{fault:?}") };
            println!("{arch}, {rescale:?}: {} of {}", late.early, late.exponentials);
            assert!(late.exponentials == 32 && late.early > 8, "{late:?}");
            assert!(fault.to_string().contains(&line), "{fault}");
        }
    }
}

/// Queries and keys that are longer than values, by `tcgen05`.
#[test]
fn long_keys_by_tcgen05_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    for (arch, mask) in
        [(Arch::SM_100A, Mask::none()), (Arch::SM_100A, Mask::causal()), (Arch::SM_103A, Mask::causal())]
    {
        let base = || Problem::builder().heads(4, 2).head_dims(192, 128).dtype(DType::Bf16).mask(mask.clone());
        for problem in [base().dense(1, 700, 700), base().packed(&[0, 200, 500], &[0, 300, 700])] {
            let problem = problem.build().unwrap();
            let plan = ForwardPlan::tcgen05(&problem, None, &ConfigTable::default()).unwrap();
            let fault = faults(&assembler, &plan.kernel(Target::new(arch)).unwrap());
            wrong.extend(fault.map(|fault| format!("{arch}, {:?}, {:?}: {fault}", problem.layout(), problem.mask())));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// f32 results that are merged with others, or added to them: of `wgmma` and `mma.sync`, of equal and of packed sequences.
#[test]
fn f32_results_assemble() {
    let Some(assembler) = assembler() else { return };
    let (dims, kinds) = match long() {
        true => (&[64, 128, 256][..], &[ResultType::F32, ResultType::Added][..]),
        false => (&[128][..], &[ResultType::Added][..]),
    };
    let mut wrong = Vec::new();
    for (dim, mask) in dims.iter().flat_map(|&d| [(d, Mask::none()), (d, Mask::causal())]) {
        let base = Problem::builder().heads(8, 2).head_dim(dim).dtype(DType::Bf16).mask(mask);
        for problem in [base.clone().dense(1, 4096, 4096), base.packed(&[0, 100, 4096], &[0, 100, 4096])] {
            let problem = problem.build().unwrap();
            let plans = [
                (ForwardPlan::new(&problem, None), Target::HOPPER),
                (ForwardPlan::mma_sync(&problem, None, &ConfigTable::default()), Target::AMPERE),
            ];
            let gradients = BackwardPlan::new(&problem, false, Order::Any).unwrap();
            for &results in kinds {
                let mut kernels: Vec<Arc<Kernel>> = Vec::new();
                for (plan, target) in &plans {
                    let plan = plan.clone().unwrap().with_results(results).unwrap();
                    kernels.push(Arc::new(plan.kernel(*target).unwrap()));
                }
                let gradients = gradients.clone().with_results(&problem, &ConfigTable::default(), results).unwrap();
                kernels.extend(gradients.kernels(Target::HOPPER).unwrap().all().cloned());
                for kernel in kernels {
                    if let Some(fault) = faults(&assembler, &kernel) {
                        wrong.push(format!(
                            "{dim}, {:?}, {:?}, {results:?}: {fault}",
                            problem.mask(),
                            problem.layout()
                        ));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn gradients_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    // Of each cut one that is whole and one that is not; the others take a minute more.
    let dims = [[72, 40], [192, 128], [192, 256], [256, 256], [64, 64], [128, 128]];
    let more = if long() { &[[8, 8], [136, 136], [192, 192], [64, 256]][..] } else { &[] };
    for (i, dims) in dims.iter().chain(more).enumerate() {
        for (turn, (mask, order)) in [
            (Mask::none(), Order::Any),
            (Mask::causal(), Order::Any),
            (Mask::window(Some(128), Some(0)), Order::Any),
            (Mask::none(), Order::Fixed),
            (Mask::causal(), Order::Fixed),
            (Mask::window(Some(70), None), Order::Fixed),
        ]
        .into_iter()
        .enumerate()
        {
            // A window in any order, and no mask in a fixed one, have the parts of the other four.
            if !long() && (turn == 2 || turn == 3) {
                continue;
            }
            // With one head of queries for each of keys, TMA's kernels are others: in turn, or all.
            let heads: &[_] = if dims[0] > 128 {
                &[1]
            } else if long() {
                &[1, 2]
            } else {
                &[[1, 2][(i + turn) % 2]]
            };
            for kv_heads in heads {
                let problem = Problem::builder().dense(1, 64, 700).heads(2, *kv_heads).head_dims(dims[0], dims[1]);
                wrong.extend(gradients(&assembler, problem.sinks().mask(mask.clone()), order));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Gradients by `mma.sync`, for every class of shared memory: plain, ragged, modified, and with gradients of a bias.
#[test]
fn gradients_by_single_warps_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    let archs: &[Arch] = match long() {
        true => &[Arch::SM_80, Arch::SM_86, Arch::SM_89, Arch::SM_90A, Arch::SM_100A, Arch::SM_120A],
        false => &[Arch::SM_80, Arch::SM_120A],
    };
    let dims: &[[usize; 2]] = if long() {
        &[[64, 64], [72, 40], [96, 96], [128, 128], [160, 160], [256, 256]]
    } else {
        &[[64, 64], [128, 128]]
    };
    for (&arch, &[d, dv]) in archs.iter().flat_map(|arch| dims.iter().map(move |dims| (arch, dims))) {
        let base = |mask: Mask| Problem::builder().heads(4, 2).head_dims(d, dv).dtype(DType::Bf16).mask(mask);
        let window = Mask::window(Some(128), Some(0));
        let problems = [
            base(Mask::none()).dense(1, 640, 700),
            base(Mask::causal()).dense(1, 640, 700).sinks(),
            base(window.clone()).dense(1, 640, 700),
            base(window).packed(&[0, 400, 900], &[0, 500, 3000]),
            base(Mask::causal()).dense(2, 640, 700).used_lengths(true, true),
            base(Mask::causal()).dense(1, 640, 700).softcap(30.0),
            base(Mask::none()).dense(1, 640, 700).bias([1, 4, 640, 700], DType::Bf16, true),
            base(Mask::causal()).dense(1, 640, 700).block_mask(BlockSpec::default()),
        ];
        // The architectures, and then the head dims, take turns.
        let turn = usize::from(arch == Arch::SM_80) + usize::from(d == 64);
        let problems = problems.into_iter().enumerate().filter(|(i, _)| long() || i % 2 == turn % 2);
        for (i, problem) in problems {
            let problem = problem.build().unwrap();
            let Ok(plan) = BackwardPlan::mma_sync(&problem, (true, Order::Any), arch) else {
                // Only GPUs with 99 KB of shared memory lack room, and only for long rows.
                assert!(d > 160 && arch.shared_per_cta < 163 * 1024, "{arch} {d}");
                continue;
            };
            // With query heads of a key/value head in CTAs of their own, and in one.
            let parts: &[u32] = if long() { &[1, 2] } else { &[[1, 2][i / 2 % 2]] };
            for &parts in parts {
                let config = BackwardConfig { head_splits: Some(parts), ..plan.config() };
                let kernels = plan.clone().with_config(config).kernels(Target::new(arch)).unwrap();
                let (layout, mask) = (problem.layout(), problem.mask());
                let what = |faults| format!("{arch}, {d}, {layout:?}, {mask:?}, {parts} parts: {faults}");
                wrong.extend(kernels.all().filter_map(|kernel| faults(&assembler, kernel)).map(what));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Gradients by `tcgen05` that are not registered: ragged, modified, with gradients of biases, and at odd head dimensions.
#[test]
fn more_gradients_by_tensor_memory_assemble() {
    let Some(assembler) = assembler() else { return };
    let target = Target::new(Arch::SM_100A);
    let dims = if long() { &[[128, 128], [64, 64], [16, 112], [80, 40]][..] } else { &[[128, 128], [80, 40]][..] };
    let mut wrong = Vec::new();
    for (turn, &[d, dv]) in dims.iter().enumerate() {
        let base = |mask: Mask| Problem::builder().heads(4, 2).head_dims(d, dv).dtype(DType::Bf16).mask(mask);
        let dense = |mask: Mask| base(mask).dense(2, 640, 700);
        let window = || Mask::window(Some(128), Some(0));
        let problems = [
            dense(window()).sinks(),
            base(window()).packed(&[0, 400, 900], &[0, 500, 3000]),
            dense(Mask::causal()).used_lengths(true, true),
            dense(window()).softcap(30.0).used_lengths(true, true),
            dense(Mask::none()).bias([1, 4, 640, 700], DType::Bf16, true),
            dense(Mask::none()).bias([2, 1, 1, 700], DType::F32, true).softcap(20.0),
            dense(Mask::none()).bias([1, 4, 640, 1], DType::F32, true),
            dense(Mask::causal()).block_mask(BlockSpec::default()),
            dense(Mask::none()).block_mask(BlockSpec { rows: 64, cols: 64, ..BlockSpec::default() }),
        ];
        for (_, problem) in problems.into_iter().enumerate().filter(|(i, _)| long() || i % 2 == turn % 2) {
            let problem = problem.build().unwrap();
            let plan = BackwardPlan::tcgen05(&problem, (true, Order::Any), target.arch).unwrap();
            let kernels = plan.kernels(target).unwrap();
            let what = |faults| format!("{d}, {:?}, {:?}: {faults}", problem.layout(), problem.mask());
            wrong.extend(kernels.all().filter_map(|kernel| faults(&assembler, kernel)).map(what));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// With and without sums that are used again.
#[test]
fn gradients_of_tiles_in_pieces_assemble() {
    let assembler = assembler();
    let mut wrong = Vec::new();
    for dims in [[64, 64], [128, 128], [96, 80]] {
        for (len, kv_heads) in [(2000, 1), (2000, 2), (5000, 1), (5000, 2)] {
            let problem =
                Problem::builder().dense(1, len, len).heads(2, kv_heads).head_dims(dims[0], dims[1]).dtype(DType::Bf16);
            let plan = BackwardPlan::new(&problem.clone().build().unwrap(), false, Order::Any).unwrap();
            assert!(plan.cuts_tiles(), "{dims:?} {len}");
            wrong.extend(assembler.iter().flat_map(|assembler| gradients(assembler, problem.clone(), Order::Any)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Query heads spread over CTAs, in parts of one head and of several: every schedule, service and kind of sequences.
#[test]
fn gradients_of_spread_heads_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    // All head dims, masks and numbers of parts: five minutes more.
    let dims: &[usize] = if long() { &[64, 96, 128, 192, 256] } else { &[64, 128, 192] };
    for &d in dims {
        let base = || Problem::builder().heads(12, 2).head_dim(d).dtype(DType::Bf16);
        let masked = |mask: Mask| base().mask(mask);
        let packed = |mask: Mask| masked(mask).packed(&[0, 400, 900], &[0, 500, 3000]);
        let window = || Mask::window(Some(128), Some(0));
        let problems = [
            base().dense(2, 640, 700),
            masked(Mask::causal()).dense(2, 640, 700).sinks(),
            packed(Mask::causal()),
            masked(Mask::causal()).dense(2, 640, 700).softcap(30.0),
        ];
        let more = [
            base().dense(2, 640, 5000),
            masked(Mask::causal()).dense(2, 640, 5000),
            masked(window()).dense(2, 640, 700),
            packed(window()),
            masked(Mask::causal()).dense(2, 640, 700).used_lengths(true, true),
        ];
        let orders = |(i, problem)| [(i, problem, Order::Any), (i + 2, problem, Order::Fixed)];
        let problems = problems.iter().chain(more.iter().filter(|_| long()));
        for (i, problem, order) in problems.enumerate().flat_map(orders) {
            // Parts of six heads: three each, one or two, one each.
            let parts: &[u32] = if long() { &[2, 4, 6] } else { &[[2, 4, 6][i % 3]] };
            for parts in parts {
                wrong.extend(spread_gradients(&assembler, problem, order, *parts));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Assembles the gradient kernels of a problem with `parts` parts of heads; returns the assembler's complaints.
fn spread_gradients(assembler: &Assembler, problem: &ProblemBuilder, order: Order, parts: u32) -> Vec<String> {
    let problem = problem.clone().build().unwrap();
    let plan = BackwardPlan::new(&problem, false, order).unwrap();
    let config = BackwardConfig { head_splits: Some(parts), ..plan.config() };
    let plan = plan.with_config(config);
    assert_eq!(plan.head_splits(), if plan.can_split_heads() { u64::from(parts) } else { 1 });
    let kernels = plan.kernels(Target::HOPPER).unwrap();
    let (d, layout, mask) = (problem.head_dim(), problem.layout(), problem.mask());
    let what = |faults| format!("{d}, {layout:?}, {mask:?}, {order:?}, {parts} parts, {faults}");
    kernels.all().filter_map(|kernel: &Arc<Kernel>| faults(assembler, kernel)).map(what).collect()
}

/// TMA adds in either order, and in a fixed one waits for its turn.
#[test]
fn the_copy_engine_adds_in_turn() {
    for packed in [false, true] {
        // How often others are looked at: in any order for zeros at most.
        let [any, fixed] = [Order::Any, Order::Fixed].map(|order| {
            let problem = Problem::builder().heads(2, 1).head_dim(128).dtype(DType::Bf16);
            let problem =
                if packed { problem.packed(&[0, 40, 90], &[0, 50, 4000]) } else { problem.dense(1, 90, 4000) };
            let plan = BackwardPlan::new(&problem.build().unwrap(), false, order).unwrap();
            let text = plan.kernels(Target::HOPPER).unwrap().main.ptx();
            assert!(text.contains("cp.reduce.async.bulk"), "packed {packed}, {order:?}");
            text.matches("ld.acquire").count()
        });
        // Each warpgroup's part has turns of its own.
        assert_eq!(fixed, any + 2, "packed {packed}");
        assert_eq!(any, usize::from(!packed), "packed {packed}");
    }
}

#[test]
fn gradients_of_sequences_with_lengths_of_their_own_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    for d in [64, 128, 256] {
        for (mask, order) in [
            (Mask::causal(), Order::Any),
            (Mask::window(Some(128), Some(0)), Order::Any),
            (Mask::causal(), Order::Fixed),
        ] {
            let base = || Problem::builder().heads(2, 1).head_dim(d).mask(mask.clone());
            wrong.extend(gradients(&assembler, base().packed(&[0, 40, 90], &[0, 50, 300]), order));
            wrong.extend(gradients(&assembler, base().dense(2, 64, 700).used_lengths(true, true), order));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn gradients_of_modified_scores_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    for d in [64, 128, 256] {
        let base = || Problem::builder().dense(2, 64, 700).heads(2, 1).head_dim(d);
        let blocks = BlockSpec { rows: 128, cols: 128, ..BlockSpec::default() };
        for problem in [
            base().softcap(30.0).mask(Mask::causal()),
            base().softcap(30.0).alibi().mask(Mask::window(Some(90), Some(3))),
            base().mask(Mask::documents().and(Mask::causal())),
            base().alibi().mask(Mask::documents()),
            base().bias([2, 2, 64, 700], DType::F32, true),
            base().bias([2, 1, 1, 700], DType::F32, true).mask(Mask::causal()),
            base().block_mask(blocks),
            base().packed(&[0, 40, 90], &[0, 50, 300]).softcap(20.0).alibi().mask(Mask::window(Some(90), Some(0))),
        ] {
            wrong.extend(gradients(&assembler, problem, Order::Any));
        }
        // Exact sums beside turns.
        for shape in [[1, 1, 64, 700], [2, 1, 1, 700], [2, 2, 64, 1]] {
            wrong.extend(gradients(
                &assembler,
                base().bias(shape, DType::F32, true).mask(Mask::causal()),
                Order::Fixed,
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Block masks whose blocks are whole steps, with masks in partial blocks from none to four conditions.
#[test]
fn gradients_of_block_masks_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    for (d, own) in [(64, false), (96, true), (128, false), (128, true), (256, true)] {
        let blocks = BlockSpec { rows: 128, cols: 128, batch: 1 + usize::from(own), heads: if own { 4 } else { 1 } };
        let base = || Problem::builder().dense(2, 640, 700).heads(4, 2).head_dim(d).block_mask(blocks);
        let near = (expr::q() - expr::k()).less(100) | expr::k().less(expr::batch() * 7 + 5);
        for problem in [
            base(),
            base().mask(Mask::causal()),
            base().mask(Mask::documents().and(Mask::causal())),
            base().mask(Mask::documents().and(Mask::causal()).and(Mask::custom(near))),
            base().mask(Mask::documents().and(Mask::causal())).softcap(30.0),
        ] {
            wrong.extend(gradients(&assembler, problem, Order::Any));
        }
        wrong.extend(gradients(&assembler, base().mask(Mask::documents().and(Mask::causal())), Order::Fixed));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The kernels that find blocks from the expression of a mask, and the attention kernels that read these blocks.
#[test]
fn blocks_of_expressions_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    let near = (expr::q() - expr::k()).less(100) | expr::k().less(expr::batch() * 7 + 5);
    let by_head = (expr::load("slopes", [expr::head()]) * (expr::q() - expr::k()).abs().to_float()).less(60.0);
    for (d, masks) in [(64, 1), (128, 3), (256, 1)] {
        let base = || Problem::builder().dense(2, 2000, 2048).heads(4, 2).head_dim(d).dtype(DType::Bf16);
        let all = [
            base().mask(Mask::documents().and(Mask::causal())),
            base().mask(Mask::documents().and(Mask::custom(near.clone()))).used_lengths(true, true),
            base().aux("slopes", DType::Bf16, &[4]).mask(Mask::custom(by_head.clone())),
        ];
        for builder in all.into_iter().take(masks) {
            let problem = builder.build().unwrap();
            let (forward, backward) =
                (ForwardPlan::new(&problem, None).unwrap(), BackwardPlan::new(&problem, false, Order::Any).unwrap());
            assert_eq!([forward.expression_blocks(), backward.expression_blocks()], [Some([128, 128]); 2]);
            let mut all = vec![Arc::new(forward.kernel(Target::HOPPER).unwrap())];
            all.extend(forward.expression_kernels(Target::HOPPER).unwrap().unwrap().all().cloned());
            all.extend(backward.kernels(Target::HOPPER).unwrap().all().cloned());
            for kernel in all {
                let report = assembler.assemble(&kernel).unwrap();
                let mask = problem.mask();
                wrong.extend(report.verdict().err().map(|e| format!("{}, dim {d}, {mask:?}: {e:?}", kernel.name)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn odd_head_dimensions_assemble() {
    let Some(assembler) = assembler() else { return };
    for (d, dv, mask) in [
        (8, 8, Mask::none()),
        (72, 72, Mask::causal()),
        (96, 96, Mask::window(Some(128), Some(0))),
        (136, 136, Mask::none()),
        (192, 128, Mask::causal()),
        (256, 64, Mask::none()),
        (64, 256, Mask::causal()),
        (512, 512, Mask::none()),
        (264, 264, Mask::window(Some(128), Some(0))),
        (320, 136, Mask::causal()),
        (8, 512, Mask::causal()),
    ] {
        // Many queries, and few: two kernels, unless rows are wide.
        let wide = d.max(dv) > 256;
        for q_len in [64, 3].into_iter().take(if wide { 1 } else { 2 }) {
            let problem = Problem::builder().dense(1, q_len, 700).heads(2, 1).head_dims(d, dv).dtype(DType::Bf16);
            let plan = ForwardPlan::new(&problem.mask(mask.clone()).build().unwrap(), None).unwrap();
            let report = assembler.assemble(&plan.kernel(Target::HOPPER).unwrap()).unwrap();
            assert!(report.verdict().is_ok(), "{d}, {dv}, {q_len} queries: {:?}", report.verdict());
        }
    }
}

/// A bias that is read for each score, of two types, with and without a head of its own.
#[test]
fn biases_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    for dim in [64, 128, 256] {
        for mask in [Mask::none(), Mask::causal()] {
            for (shape, dtype) in [([1, 1, 700, 700], DType::F32), ([2, 4, 700, 700], DType::Bf16)] {
                let base = Problem::builder().dense(2, 700, 700).heads(4, 4).head_dim(dim);
                wrong.extend(forward(&assembler, base.mask(mask.clone()).bias(shape, dtype, true)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Blocks that no tile divides are looked up for each score, beside masks that are expressions.
#[test]
fn blocks_that_are_looked_up_assemble() {
    let Some(assembler) = assembler() else { return };
    let documents = (q() / 100).equals(k() / 100);
    let either = (batch().equals(0) & documents) | (batch().equals(1) & (q() - k()).less(50) & q().at_least(k()));
    let spec = BlockSpec { rows: 32, cols: 40, batch: 2, heads: 4 };
    let either = Mask::custom(either);
    let mut wrong = Vec::new();
    for (dim, mask) in [(64, either.clone()), (128, either.clone()), (256, either), (64, Mask::none())] {
        let base = Problem::builder().dense(2, 300, 300).heads(4, 4).head_dim(dim);
        wrong.extend(forward(&assembler, base.mask(mask).block_mask(spec)));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn table_exponentials_assemble() {
    let Some(assembler) = assembler() else { return };
    let mut wrong = Vec::new();
    for dim in [64, 96, 128, 192, 256, 512] {
        let base = || Problem::builder().heads(4, 2).head_dim(dim).exp("sas".parse().unwrap());
        for problem in [
            base().dense(1, 700, 8192),
            base().dense(1, 3, 700).mask(Mask::causal()).sinks(),
            base().dense(1, 700, 700).mask(Mask::window(Some(128), Some(0))),
            base().packed(&[0, 200, 500], &[0, 300, 700]).mask(Mask::causal()),
            base().dense(1, 700, 700).softcap(30.0),
            base().dense(2, 200, 700).block_mask(BlockSpec::default()).mask(Mask::causal()),
        ] {
            wrong.extend(forward(&assembler, problem));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Where nobody reads the LSE, the tensor cores add up rows: for masks, lengths of their own and sinks.
#[test]
fn rows_added_by_products_assemble() {
    let Some(assembler) = assembler() else { return };
    let base = || Problem::builder().heads(4, 2).head_dim(64).dtype(DType::Bf16);
    let problems = [
        base().dense(1, 700, 700),
        base().dense(1, 700, 8192),
        base().dense(1, 700, 700).mask(Mask::causal()),
        base().dense(1, 700, 8192).mask(Mask::causal()).sinks(),
        base().dense(1, 700, 8192).mask(Mask::window(Some(128), Some(0))),
        base().dense(1, 700, 8192).used_lengths(false, true),
        base().packed(&[0, 200, 500], &[0, 300, 700]).mask(Mask::causal()),
        base().packed(&[0, 200, 4500], &[0, 300, 4700]),
    ];
    for problem in problems {
        let problem = problem.build().unwrap();
        let plan = ForwardPlan::new(&problem, None).unwrap().without_lse();
        assert_eq!(plan.config().map(|config| config.added), Some(Added::ByColumn));
        let report = assembler.assemble(&plan.kernel(Target::HOPPER).unwrap()).unwrap();
        assert!(report.verdict().is_ok(), "{:?}, {:?}: {:?}", problem.layout(), problem.mask(), report.verdict());
    }
}

#[test]
fn wide_rows_assemble_with_features() {
    let Some(assembler) = assembler() else { return };
    for feature in ["packed", "bias", "comb", "blocks"] {
        let base = Problem::builder().heads(4, 2).head_dim(512).dtype(DType::Bf16);
        let problem = match feature {
            "packed" => base.packed(&[0, 200, 500], &[0, 300, 700]).mask(Mask::causal()),
            "bias" => base.dense(2, 200, 700).bias([1, 4, 200, 700], DType::Bf16, false),
            "comb" => base.dense(2, 200, 700).mask(Mask::custom((expr::k() % 10).differs(7))),
            _ => base.dense(2, 200, 700).block_mask(BlockSpec::default()).mask(Mask::causal()),
        };
        let plan = ForwardPlan::new(&problem.build().unwrap(), None).unwrap();
        let report = assembler.assemble(&plan.kernel(Target::HOPPER).unwrap()).unwrap();
        assert!(report.verdict().is_ok(), "{feature}: {:?}", report.verdict());
    }
}
