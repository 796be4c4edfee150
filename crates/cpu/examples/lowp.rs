//! INT8 and minifloats beside bf16, and a packed cache beside a bf16 one: contenders take turns, medians and bests.
//!
//! `lowp [threads] [seconds] [int8|minifloat|f32|vectors|decode]`; `f32` is bf16 beside f32, and `vectors` what a machine without
//! tiles would do.

use fulgurite_core::format::Bits;
use fulgurite_core::random::Rng;
use fulgurite_core::*;
use fulgurite_cpu::cache::{CacheSpec, KvCache, Storage};
use fulgurite_cpu::{Isa, Options, backward, forward_inputs};
use std::time::Instant;

type Contender<'a> = (String, Box<dyn FnMut() + 'a>);

fn race(seconds: f64, contenders: &mut [Contender<'_>]) -> Vec<(String, f64, f64)> {
    let mut times = vec![Vec::new(); contenders.len()];
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < seconds || times[0].len() < 3 {
        for ((_, run), times) in contenders.iter_mut().zip(&mut times) {
            let start = Instant::now();
            run();
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let summary = times.into_iter().map(|mut t| {
        t.sort_by(f64::total_cmp);
        (t[t.len() / 2], t[0])
    });
    contenders.iter().map(|c| c.0.clone()).zip(summary).map(|(name, (median, best))| (name, median, best)).collect()
}

/// Tiles left alone: every type and product beside f32 on vectors, forward and backward.
fn vectors(rng: &mut Rng, options: Options, seconds: f64) {
    let rows = [
        ("f32", DType::F32, "native", Isa::Avx512),
        ("bf16", DType::Bf16, "native", Isa::Avx512),
        ("bf16, pairs", DType::Bf16, "native", Isa::Avx512Bf16),
        ("int8:256", DType::Bf16, "int8:256", Isa::Avx512),
    ];
    for (d, s, backwards) in [(64, 2048, false), (128, 2048, false), (64, 2048, true), (128, 2048, true)] {
        let (h, shape) = (1024 / d, [1, s, 1024 / d, d]);
        let values: Vec<Vec<f64>> = (0..4).map(|_| rng.normals(s * h * d, 1.0)).collect();
        let has =
            |row: &&(&str, DType, &str, Isa)| Isa::available().contains(&row.3) && !(backwards && row.2 != "native");
        let calls: Vec<(String, Problem, Vec<Tensor>, Isa)> = rows
            .iter()
            .filter(has)
            .map(|&(name, dtype, precision, isa)| {
                let builder = Problem::builder().dense(1, s, s).heads(h, h).head_dim(d).dtype(dtype);
                let problem = builder.precision(precision.parse().expect("precision")).build().expect("problem");
                let tensors = values.iter().map(|x| Tensor::from_f64(dtype, x, &shape).expect("tensor"));
                (name.into(), problem, tensors.collect(), isa)
            })
            .collect();
        let mut contenders: Vec<Contender<'_>> = Vec::new();
        for (name, problem, tensors, isa) in &calls {
            let options = Options { isa: Some(*isa), ..options };
            let inputs = Inputs::new(tensors[0].view(), tensors[1].view(), tensors[2].view());
            let mut result = Forward::zeros(problem).expect("outputs");
            let mut gradients = Gradients::zeros(problem).expect("outputs");
            forward_inputs(problem, &inputs, &mut result.outputs(), &options).expect("fits");
            contenders.push((
                name.clone(),
                Box::new(move || {
                    if backwards {
                        let bound = inputs.bind(problem).expect("fits");
                        backward(&bound, &result.saved(tensors[3].view()), &mut gradients.outputs(), &options);
                    } else {
                        forward_inputs(problem, &inputs, &mut result.outputs(), &options).expect("fits");
                    }
                }),
            ));
        }
        let pass = if backwards { "backward" } else { "forward" };
        let found = race(seconds, &mut contenders);
        for (name, median, best) in &found {
            let (ratio, by_best) = (found[0].1 / median, found[0].2 / best);
            println!("vectors, {pass} d{d} s{s} {name:11} {:7.2} ms  x{ratio:.2} ({by_best:.2}) of f32", median * 1e3);
        }
    }
}

/// bf16 beside f32 on the grid of bench/lowp.py at head dim 128.
fn beside_f32(rng: &mut Rng, options: Options, seconds: f64) {
    let (d, h) = (128, 8);
    for (s, causal) in [2048, 4096, 8192].into_iter().flat_map(|s| [(s, false), (s, true)]) {
        let shape = [8192 / s, s, h, d];
        let values: Vec<Vec<f64>> = (0..3).map(|_| rng.normals(shape.iter().product(), 1.0)).collect();
        let calls = [DType::Bf16, DType::F32].map(|dtype| {
            let mask = if causal { Mask::causal() } else { Mask::none() };
            let builder = Problem::builder().dense(shape[0], s, s).heads(h, h).head_dim(d).dtype(dtype).mask(mask);
            let tensors = values.iter().map(|x| Tensor::from_f64(dtype, x, &shape).expect("tensor"));
            (dtype, builder.build().expect("problem"), tensors.collect::<Vec<_>>())
        });
        let mut contenders: Vec<Contender<'_>> = Vec::new();
        for (dtype, problem, tensors) in &calls {
            let inputs = Inputs::new(tensors[0].view(), tensors[1].view(), tensors[2].view());
            let mut result = Forward::zeros(problem).expect("outputs");
            let call = move || {
                forward_inputs(problem, &inputs, &mut result.outputs(), &options).expect("fits");
            };
            contenders.push((dtype.name().into(), Box::new(call)));
        }
        let found = race(seconds, &mut contenders);
        let (median, best) = (found[1].1 / found[0].1, found[1].2 / found[0].2);
        let flops = 4.0 * (8192 * s * h * d) as f64 / if causal { 2.0 } else { 1.0 };
        let (rate, mask) = (flops / found[0].1 / 1e9, if causal { "causal" } else { "full" });
        println!("d{d} s{s} {mask:6} bf16 {rate:5.0} GFLOP/s  x{median:.2} ({best:.2}) of f32");
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: f64| args.get(i).map_or(default, |x| x.parse().expect("a number"));
    let (threads, seconds) = (number(0, 2.0) as usize, number(1, 2.0));
    let options = Options { threads: Some(threads), ..Options::default() };
    let mut rng = Rng::new(1);
    let wanted = std::env::args().nth(3);
    let asked = |what: &str| wanted.as_deref().is_none_or(|w| w == what);
    let int8: &[&str] = &["native", "int8:64", "int8:256", "int8:512"];
    let minifloat: &[&str] = &["native", "nvfp4", "mxfp4", "mxfp8"];
    let cells = [(64, 2048), (128, 2048), (256, 2048), (256, 4096)];
    let cells = cells.map(|(d, s)| ("int8", int8, d, s)).into_iter().chain([("minifloat", minifloat, 128, 2048)]);
    for (_, precisions, d, s) in cells.filter(|cell| asked(cell.0)) {
        let h = 1024 / d;
        let shape = [1, s, h, d];
        let mut random = || Tensor::from_f64(DType::Bf16, &rng.normals(s * h * d, 1.0), &shape).expect("tensor");
        let [q, k, v] = [random(), random(), random()];
        let problems: Vec<(String, Problem)> = precisions
            .iter()
            .map(|text| {
                let builder = Problem::builder().dense(1, s, s).heads(h, h).head_dim(d).dtype(DType::Bf16);
                (text.to_string(), builder.precision(text.parse().expect("precision")).build().expect("problem"))
            })
            .collect();
        let mut contenders: Vec<Contender<'_>> = Vec::new();
        for (name, problem) in &problems {
            let inputs = Inputs::new(q.view(), k.view(), v.view());
            let (mut result, options) = (Forward::zeros(problem).expect("outputs"), options);
            contenders.push((
                name.clone(),
                Box::new(move || {
                    forward_inputs(problem, &inputs, &mut result.outputs(), &options).expect("fits");
                }),
            ));
        }
        let flops = 4.0 * (h * s * s * d) as f64;
        let found = race(seconds, &mut contenders);
        for (name, median, best) in &found {
            let (rate, top) = (flops / median / 1e9, flops / best / 1e9);
            let (ratio, by_best) = (found[0].1 / median, found[0].2 / best);
            println!("d{d} s{s} {name:9} {rate:6.0} GOP/s (best {top:6.0})  x{ratio:.2} ({by_best:.2}) of bf16");
        }
    }
    if asked("f32") {
        beside_f32(&mut rng, options, seconds);
    }
    if asked("vectors") {
        vectors(&mut rng, options, seconds);
    }
    if !asked("decode") {
        return;
    }
    let (heads, q_heads, d, tokens) = (8, 32, 128, 32768);
    let storages = [
        ("bf16", Storage::Float(DType::Bf16)),
        ("int4", Storage::Packed { k: vec![Bits::Four; heads], v: vec![Bits::Four; heads] }),
    ];
    let chunk = Tensor::from_f64(DType::F32, &rng.normals(1024 * heads * d, 1.0), &[1024, heads, d]).expect("tensor");
    let q = Tensor::from_f64(DType::Bf16, &rng.normals(q_heads * d, 1.0), &[1, q_heads, d]).expect("tensor");
    let caches: Vec<(String, KvCache)> = storages
        .into_iter()
        .map(|(name, storage)| {
            let spec = CacheSpec { heads, head_dim: d, value_dim: d, capacity: tokens, storage };
            let mut cache = KvCache::new(spec).expect("cache");
            (0..tokens / 1024).for_each(|_| cache.append(&chunk.view(), &chunk.view()).expect("room"));
            (name.to_string(), cache)
        })
        .collect();
    let mut contenders: Vec<Contender<'_>> = Vec::new();
    for (name, cache) in &caches {
        let view = q.view();
        contenders.push((name.clone(), Box::new(move || drop(cache.attend(&view, 0.088, &options).expect("attends")))));
    }
    let found = race(seconds, &mut contenders);
    for ((name, median, best), (_, cache)) in found.iter().zip(&caches) {
        let (bits, ratio, by_best) = (cache.bits_per_element(), found[0].1 / median, found[0].2 / best);
        let rate = 1.0 / median;
        println!(
            "decode {tokens} {name:5} {rate:6.1} tokens/s, {bits:.3} bits an element, x{ratio:.2} ({by_best:.2}) of bf16"
        );
    }
}
