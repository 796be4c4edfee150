//! The engine against the oracle: one table of cases, every instruction set this machine has.

use fulgurite_core::cases::{self, Case};
use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Gradients, Inputs, Mask, Precision, Problem, Rescale, Saved, Tensor, TensorView};
use fulgurite_cpu::{Isa, Options, backward, forward};

fn saved<'a>(case: &'a Case, result: &'a Forward) -> Saved<'a> {
    Saved { d_lse: case.d_lse(), ..result.saved(case.d_o()) }
}

fn run(case: &Case, options: &Options) -> (Forward, Gradients) {
    let bound = case.bound();
    let mut result = Forward::zeros(case.problem()).unwrap();
    // What was there before must not matter.
    result.outputs().o.fill(f64::NAN);
    result.outputs().lse.fill(f64::NAN);
    forward(&bound, &mut result.outputs(), options);
    let mut gradients = Gradients::zeros(case.problem()).unwrap();
    gradients.outputs().d_q.fill(f64::NAN);
    gradients.outputs().d_k.fill(f64::NAN);
    gradients.outputs().d_v.fill(f64::NAN);
    if has_gradients(case) {
        backward(&bound, &saved(case, &result), &mut gradients.outputs(), options);
    }
    (result, gradients)
}

/// INT8 products have none.
fn has_gradients(case: &Case) -> bool {
    !matches!(case.problem().precision(), Precision::Int8(_))
}

fn failures(case: &Case, options: &Options) -> Vec<String> {
    let (result, gradients) = run(case, options);
    let bound = case.bound();
    let mut verdicts = check_forward(&bound, &result, 1);
    if has_gradients(case) {
        verdicts.extend(check_backward(&bound, &saved(case, &result), &gradients, 1));
    }
    let failed = verdicts.into_iter().filter(|(_, v)| !v.ok());
    failed.map(|(name, v)| format!("{} {:?}: {name}: {v}", case.name, options.isa)).collect()
}

fn judge(dtype: DType) {
    let mut failed = Vec::new();
    // Products in pairs are for bf16: all else is `avx512`.
    for isa in Isa::available().into_iter().filter(|&isa| isa != Isa::Avx512Bf16 || dtype == DType::Bf16) {
        let options = Options { isa: Some(isa), ..Options::default() };
        for case in cases::cases(dtype) {
            failed.extend(failures(&case, &options));
        }
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn f32_agrees_with_the_oracle() {
    judge(DType::F32);
}

#[test]
fn f16_agrees_with_the_oracle() {
    judge(DType::F16);
}

#[test]
fn bf16_agrees_with_the_oracle() {
    judge(DType::Bf16);
}

#[test]
fn random_problems_agree_with_the_oracle() {
    let mut failed = Vec::new();
    for seed in 0..40 {
        let dtype = DType::FLOATS[seed as usize % 3];
        failed.extend(failures(&cases::random(seed, dtype), &Options::default()));
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn bits_do_not_depend_on_threads() {
    for case in cases::cases(DType::F32) {
        let one = run(&case, &Options { threads: Some(1), ..Options::default() });
        for threads in [2, 3, 7] {
            let other = run(&case, &Options { threads: Some(threads), ..Options::default() });
            let bits = |(f, g): &(Forward, Gradients)| {
                let views = [f.o.view(), f.lse.view(), g.d_q.view(), g.d_k.view(), g.d_v.view()];
                views.iter().flat_map(|v| v.to_f64()).map(f64::to_bits).collect::<Vec<_>>()
            };
            assert!(bits(&one) == bits(&other), "{} with {threads} threads", case.name);
        }
    }
}

/// Each policy on every third case, each case by two policies; in long tests all by all.
#[test]
fn every_rescale_policy_agrees_with_the_oracle() {
    let limit = Rescale::OPTIMISTIC_LIMIT;
    let lazy = [Rescale::Always, Rescale::Lazy(0.0), Rescale::Lazy(8.0), Rescale::Lazy(30.0)];
    let stride = if std::env::var_os("FULGURITE_LONG").is_some() { 1 } else { 3 };
    let mut table = cases::cases(DType::F32);
    // Codes of weights belong to one maximum: no policy moves it.
    table.retain(|case| case.problem().precision() == Precision::Native);
    let mut failed = Vec::new();
    let policies = lazy.into_iter().chain([Rescale::Optimistic(1.0), Rescale::Optimistic(limit)]);
    for (turn, rescale) in policies.enumerate() {
        for case in table.iter().skip(turn % stride).step_by(stride) {
            let options = Options { rescale: Some(rescale), ..Options::default() };
            failed.extend(failures(case, &options).into_iter().map(|f| format!("{rescale}: {f}")));
        }
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

/// Sizes at which a matrix unit takes several blocks of keys together: scores that fit, that rise too far in some lanes
/// only, that are too large for a fused subtraction, and values that are not finite. Of the window's lanes one sees its first
/// key with a block, when the others have a maximum.
#[test]
fn blocks_taken_together_agree_with_the_oracle() {
    let (q_len, k_len) = (133, 1180);
    let (all, causal, window) = (Mask::none(), Mask::causal(), Mask::window(Some(566), Some(90)));
    for (d, mask) in [(64, &all), (64, &causal), (128, &causal), (50, &all), (64, &window)] {
        let builder =
            Problem::builder().dense(1, q_len, k_len).heads(2, 1).head_dim(d).dtype(DType::Bf16).mask(mask.clone());
        let problem = builder.build().unwrap();
        for what in ["normal", "rising", "large", "a value", "a low limit"] {
            let mut rng = Rng::new(11);
            let mut random = |n: usize| rng.normals(n * d, 1.0);
            let (mut q, mut k, mut v) = (random(q_len * 2), random(k_len), random(k_len));
            match what {
                // Queries 20 to 29 meet two keys whose scores are some 90 and 180 above the others.
                "rising" => {
                    q[40 * d..60 * d].iter_mut().for_each(|x| *x = 1.5);
                    k[600 * d..601 * d].iter_mut().for_each(|x| *x = 8.0);
                    k[1100 * d..1101 * d].iter_mut().for_each(|x| *x = 16.0);
                }
                // Multiples of 16: sums of products are exact in any order, and what is left is the subtraction.
                "large" => {
                    q.iter_mut().for_each(|x| *x = 64.0 * (31.0 * *x).round());
                    k.iter_mut().for_each(|x| *x = (4.0 * *x).round() / 4.0);
                }
                "a value" => v[700 * d] = f64::INFINITY,
                _ => {}
            }
            let tensors = [(q, q_len, 2), (k, k_len, 1), (v, k_len, 1)]
                .map(|(x, n, heads)| Tensor::from_f64(DType::Bf16, &x, &[1, n, heads, d]).unwrap());
            let inputs = Inputs::new(tensors[0].view(), tensors[1].view(), tensors[2].view());
            let bound = inputs.bind(&problem).unwrap();
            let call = |threads| {
                let mut result = Forward::zeros(&problem).unwrap();
                let rescale = (what == "a low limit").then_some(Rescale::Optimistic(1.0));
                let options = Options { threads: Some(threads), rescale, ..Options::default() };
                let counters = forward(&bound, &mut result.outputs(), &options);
                (result, counters.blocks_redone)
            };
            let (result, redone) = call(1);
            for (name, verdict) in check_forward(&bound, &result, 1) {
                assert!(verdict.ok(), "d {d}, {mask:?}, {what}: {name}: {verdict}");
            }
            assert!(!["rising", "a low limit"].contains(&what) || redone > 0, "d {d}, {what}: no block was done again");
            let bits = |x: &Forward| -> Vec<u64> {
                [x.o.view(), x.lse.view()].iter().flat_map(|v| v.to_f64()).map(f64::to_bits).collect()
            };
            assert!(bits(&call(3).0) == bits(&result), "d {d}, {mask:?}, {what}: with 3 threads");
        }
    }
}

/// A row of one problem, alone and in company, with rising or falling scores along the keys.
fn trend(rising: f64) -> [Tensor; 3] {
    let mut rng = Rng::new(7);
    let (n, d) = (700, 16);
    let mut random = || rng.normals(n * d, 1.0);
    let (q, mut k, v) = (random(), random(), random());
    let q: Vec<f64> = q.iter().enumerate().map(|(i, x)| if i % d == 0 { 1.0 } else { 0.1 * x }).collect();
    for (i, row) in k.chunks_exact_mut(d).enumerate() {
        row[0] = rising * i as f64;
    }
    [q, k, v].map(|x| Tensor::from_f64(DType::F32, &x, &[1, n, 1, d]).unwrap())
}

#[test]
fn rescales_are_skipped_and_counted() {
    let problem = Problem::builder().dense(1, 700, 700).heads(1, 1).head_dim(16).scale(1.0).build().unwrap();
    let count = |tensors: &[Tensor; 3], rescale| {
        let [q, k, v] = tensors;
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let bound = inputs.bind(&problem).unwrap();
        let mut result = Forward::zeros(&problem).unwrap();
        let counters =
            forward(&bound, &mut result.outputs(), &Options { rescale: Some(rescale), ..Options::default() });
        assert!(check_forward(&bound, &result, 1).iter().all(|(_, v)| v.ok()), "{rescale}");
        counters
    };
    // Scores that hardly rise: the maximum grows in most blocks, but never by a factor of 2^8.
    let slow = trend(0.0005);
    let always = count(&slow, Rescale::Always);
    let lazy = count(&slow, Rescale::Lazy(8.0));
    assert!(always.rescales_done > 0 && always.rescales_done == always.rescales_possible);
    assert!(lazy.rescales_possible > 0 && lazy.rescales_done == 0, "{lazy:?}");
    assert_eq!(count(&slow, Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT)).blocks_redone, 0);
    // Scores that rise by e^25 from block to block: every block but the first takes the cold path.
    let steep = trend(0.2);
    assert!(count(&steep, Rescale::Lazy(8.0)).rescales_done > 0);
    assert!(count(&steep, Rescale::Optimistic(Rescale::OPTIMISTIC_LIMIT)).blocks_redone >= 5);
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    let (lengths, d) = ([5usize, 130, 64, 300], 24);
    let offsets: Vec<i32> = lengths.iter().scan(0, |sum, n| Some(std::mem::replace(sum, *sum + *n as i32))).collect();
    let offsets: Vec<i32> = offsets.into_iter().chain([lengths.iter().sum::<usize>() as i32]).collect();
    let total = offsets[4] as usize;
    let mut rng = Rng::new(3);
    let mut random =
        |heads: usize| rng.normals(total * heads * d, 1.0).into_iter().map(|x| x as f32).collect::<Vec<_>>();
    let (q, k, v) = (random(4), random(2), random(2));
    let attend = |from: usize, to: usize, offsets: &[i32]| {
        let problem = Problem::builder().packed(offsets, offsets).heads(4, 2).head_dim(d).mask(Mask::causal()).build();
        let problem = problem.unwrap();
        let view = |x: &'_ [f32], heads: usize| -> Tensor {
            Tensor::new(x[from * heads * d..to * heads * d].to_vec(), &[to - from, heads, d]).unwrap()
        };
        let (q, k, v) = (view(&q, 4), view(&k, 2), view(&v, 2));
        let cu = TensorView::new(offsets, &[offsets.len()]).unwrap();
        let inputs = Inputs::new(q.view(), k.view(), v.view()).cu_seqlens(cu, cu);
        let bound = inputs.bind(&problem).unwrap();
        let mut result = Forward::zeros(&problem).unwrap();
        forward(&bound, &mut result.outputs(), &Options::default());
        result.o.as_slice::<f32>().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let together = attend(0, total, &offsets);
    for (i, &n) in lengths.iter().enumerate() {
        let (from, to) = (offsets[i] as usize, offsets[i + 1] as usize);
        let alone = attend(from, to, &[0, n as i32]);
        assert!(alone == together[from * 4 * d..to * 4 * d], "sequence {i} of length {n}");
    }
}

/// Few bf16 queries over keys that fill whole strips of a matrix unit, and some that do not: lengths, group sizes,
/// masks that cut blocks, values wider than keys, large and rising scores.
#[test]
fn few_queries_agree_with_the_oracle_and_keep_their_bits() {
    let mut failed = Vec::new();
    let masks = [Mask::none(), Mask::causal(), Mask::window(Some(100), Some(0))];
    let shapes = [[1, 700, 4, 2, 64, 64], [1, 192, 3, 3, 32, 128], [2, 640, 6, 2, 128, 64], [3, 130, 10, 2, 96, 64]];
    for (seed, ([q_len, k_len, heads, kv_heads, d, dv], mask)) in
        shapes.into_iter().flat_map(|shape| masks.iter().map(move |mask| (shape, mask))).enumerate()
    {
        let builder = Problem::builder().dense(2, q_len, k_len).heads(heads, kv_heads).head_dims(d, dv);
        let problem = builder.dtype(DType::Bf16).mask(mask.clone()).build().unwrap();
        let mut rng = Rng::new(seed as u64);
        let mut random = |shape: &[usize], sigma: f64| rng.normals(shape.iter().product(), sigma);
        let q = random(&problem.q_shape(), if seed % 2 == 0 { 1.0 } else { 8.0 });
        let mut k = random(&problem.k_shape(), 1.0);
        let v = random(&problem.v_shape(), 1.0);
        if seed % 3 == 0 {
            // The maximum rises from strip to strip.
            k.iter_mut().enumerate().for_each(|(i, x)| *x *= 1.0 + i as f64 / (kv_heads * d * 100) as f64);
        }
        let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape()];
        let tensors: Vec<Tensor> =
            [q, k, v].iter().zip(&shapes).map(|(x, s)| Tensor::from_f64(DType::Bf16, x, s).unwrap()).collect();
        let inputs = Inputs::new(tensors[0].view(), tensors[1].view(), tensors[2].view());
        let bound = inputs.bind(&problem).unwrap();
        for isa in Isa::available() {
            for rescale in [Rescale::Always, Rescale::Lazy(8.0)] {
                let attend = |threads| {
                    let mut result = Forward::zeros(&problem).unwrap();
                    let options = Options { isa: Some(isa), threads: Some(threads), rescale: Some(rescale) };
                    forward(&bound, &mut result.outputs(), &options);
                    result
                };
                let (one, three) = (attend(1), attend(3));
                assert_eq!(one.o.view().to_f64(), three.o.view().to_f64(), "{seed} {isa:?}: threads");
                let verdicts = check_forward(&bound, &one, 1).into_iter().filter(|(_, v)| !v.ok());
                failed.extend(verdicts.map(|(name, v)| format!("{seed} {isa:?} {rescale}: {name}: {v}")));
            }
        }
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}

/// A key that holds infinity or NaN, read by a matrix unit, shows where it must and nowhere else.
#[test]
fn few_queries_keep_what_is_not_finite_to_those_who_see_it() {
    let problem = Problem::builder().dense(2, 1, 256).heads(4, 2).head_dim(64).dtype(DType::Bf16).build().unwrap();
    for isa in Isa::available() {
        for poison in [f64::NAN, f64::INFINITY] {
            let mut rng = Rng::new(5);
            let mut random = |shape: Vec<usize>| rng.normals(shape.iter().product(), 1.0);
            let (q, k, mut v) = (random(problem.q_shape()), random(problem.k_shape()), random(problem.v_shape()));
            v[(70 * 2 + 1) * 64 + 3] = poison; // batch 0, key 70, head 1, column 3
            let tensor = |x: &[f64], shape: Vec<usize>| Tensor::from_f64(DType::Bf16, x, &shape).unwrap();
            let (q, k, v) =
                (tensor(&q, problem.q_shape()), tensor(&k, problem.k_shape()), tensor(&v, problem.v_shape()));
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let bound = inputs.bind(&problem).unwrap();
            let mut result = Forward::zeros(&problem).unwrap();
            forward(&bound, &mut result.outputs(), &Options { isa: Some(isa), ..Options::default() });
            let o = result.o.view().to_f64();
            for (i, x) in o.iter().enumerate() {
                let (batch, head, column) = (i / 256, i / 64 % 4, i % 64);
                let touched = batch == 0 && head >= 2 && column == 3;
                assert_eq!(x.is_finite(), !touched, "{isa:?} {poison} at {batch}, {head}, {column}: {x}");
            }
        }
    }
}

/// A process whose stack for signals is too small for tiles is refused them by the system: it goes on with vectors.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn a_system_that_refuses_tiles_is_taken_at_its_word() {
    const CHILD: &str = "FULGURITE_TEST_REFUSED";
    // The child must not have asked before.
    if std::env::var_os(CHILD).is_none() {
        if !Isa::available().contains(&Isa::Amx) {
            eprintln!("skipped: this machine has no tiles, or the process may not use them");
            return;
        }
        let name = "engine::a_system_that_refuses_tiles_is_taken_at_its_word";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let out = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && text.contains("refused, and right"), "{text}");
        return;
    }
    #[repr(C)]
    struct Stack {
        base: *mut u8,
        flags: i32,
        size: usize,
    }
    unsafe extern "C" {
        fn sigaltstack(new: *const Stack, old: *mut Stack) -> i32;
    }
    // Room for the vectors of a signal's frame, not for 8 KiB of tiles; leaked, as the thread keeps it.
    let small = Vec::leak(vec![0u8; 6 << 10]);
    let stack = Stack { base: small.as_mut_ptr(), flags: 0, size: small.len() };
    // SAFETY: the memory is ours for ever, and no signal of this thread will use it.
    assert_eq!(unsafe { sigaltstack(&stack, std::ptr::null_mut()) }, 0, "a stack of six KiB");
    assert!(!Isa::available().contains(&Isa::Amx), "tiles without permission");
    let table = cases::cases(DType::Bf16);
    for name in ["square", "int8, 2 over 1"] {
        let case = table.iter().find(|case| case.name == name).unwrap();
        let failed = failures(case, &Options { isa: Some(Isa::Amx), ..Options::default() });
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }
    println!("refused, and right");
}
