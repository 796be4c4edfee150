//! Short sequences in BSHD layout (`[batch, sequence, heads, dim]`), on one thread, by the CPU time of that thread: a share of a large
//! product in the same unit, so that other programs on the machine disturb little.
//!
//! `short [lengths] [dims] [dtypes] [seconds] [isa] [padded]`; Linux only.

use fulgurite_core::expr::{batch, k, load};
use fulgurite_core::random::Rng;
use fulgurite_core::*;
use fulgurite_cpu::{Isa, Options, forward, probe::gemm_gflops};

/// Seconds of this thread on a CPU.
fn cpu_seconds() -> f64 {
    // Reading the time of a running thread is exact only after it has given way.
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    text.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") * 1e-9
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or(default.into());
    let list = |i: usize, default: &str| -> Vec<usize> {
        arg(i, default).split(',').map(|x| x.parse().expect("a number")).collect()
    };
    let (lens, dims) = (list(0, "64,77,128,256,512"), list(1, "32,64,128"));
    let names = arg(2, "f32,bf16,f16");
    let seconds: f64 = arg(3, "0.3").parse().expect("seconds");
    let isa = Isa::available().into_iter().find(|isa| isa.name() == arg(4, Isa::available()[0].name())).expect("isa");
    let padded = arg(5, "") == "padded";
    let options = Options { isa: Some(isa), threads: Some(1), ..Options::default() };
    for dtype in DType::FLOATS.into_iter().filter(|dtype| names.split(',').any(|name| name == dtype.name())) {
        for &d in &dims {
            for &s in &lens {
                let (b, h) = ((1024 / s).max(1), 768 / d);
                let mut rng = Rng::new(1);
                let shape = [b, s, h, d];
                let n = b * s * h * d;
                let mut random = || Tensor::from_f64(dtype, &rng.normals(n, 1.0), &shape).expect("tensor");
                let [q, key, v] = [random(), random(), random()];
                let mut builder = Problem::builder().dense(b, s, s).heads(h, h).head_dim(d).dtype(dtype);
                let mut keep = Vec::new();
                for i in 0..b {
                    let n = s - i * s / (2 * b);
                    keep.extend((0..s).map(|j| i32::from(j < n)));
                }
                let keep = Tensor::new(keep, &[b, s]).expect("tensor");
                if padded {
                    let mask = Mask::custom(load("keep", [batch(), k()]).differs(0));
                    builder = builder.mask(mask).aux("keep", DType::I32, &[b, s]);
                }
                let problem = builder.build().expect("problem");
                let mut inputs = Inputs::new(q.view(), key.view(), v.view());
                if padded {
                    inputs = inputs.aux("keep", keep.view());
                }
                let mut result = Forward::zeros(&problem).expect("result");
                let mut one = || {
                    let bound = inputs.bind(&problem).expect("fits");
                    forward(&bound, &mut result.outputs(), &options);
                };
                one();
                let (mut calls, begin, wall) = (0, cpu_seconds(), std::time::Instant::now());
                while wall.elapsed().as_secs_f64() < seconds || calls < 3 {
                    one();
                    calls += 1;
                }
                let taken = (cpu_seconds() - begin) / f64::from(calls);
                let rate = (4 * b * h * s * s * d) as f64 / taken / 1e9;
                println!(
                    "{:4} d{d:3} s{s:4} {}: {:8.1} us a call, {rate:6.1} GFLOP/s",
                    dtype.name(),
                    isa.name(),
                    taken * 1e6
                );
            }
        }
    }
    let (begin, wall, mut n) = (cpu_seconds(), std::time::Instant::now(), 0);
    while wall.elapsed().as_secs_f64() < 1.0 {
        gemm_gflops(&options);
        n += 1;
    }
    let rate = 2.0 * 2048f64.powi(3) * f64::from(n) / (cpu_seconds() - begin) / 1e9;
    println!("large product, with packing and its set-up: {rate:.1} GFLOP/s");
}
