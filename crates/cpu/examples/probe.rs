//! Forward or backward over a grid, as a share of what a large product by the micro-kernel reaches at the same time.
//!
//! Instruction sets take turns, so that a drift of the machine meets all of them.
//!
//! `probe [forward|backward] [threads] [lengths] [seconds] [bshd|bhsd] [rescale] [dtype] [full|causal|both] [dims] [isas]`

use fulgurite_core::random::Rng;
use fulgurite_core::*;
use fulgurite_cpu::{Isa, Options, backward, forward, probe::gemm_gflops};
use std::time::Instant;

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or(default.into());
    let back = arg(0, "forward") == "backward";
    let threads: usize = arg(1, "2").parse().expect("threads");
    let lens: Vec<usize> = arg(2, "512,2048,8192").split(',').map(|x| x.parse().expect("length")).collect();
    let seconds: f64 = arg(3, "0.8").parse().expect("seconds");
    let heads_outside = arg(4, "bhsd") == "bhsd";
    let rescale: Rescale = arg(5, "lazy").parse().expect("rescale");
    let dtype = DType::FLOATS.into_iter().find(|d| d.name() == arg(6, "f32")).expect("dtype");
    let masks: &[bool] = match arg(7, "both").as_str() {
        "full" => &[false],
        "causal" => &[true],
        _ => &[false, true],
    };
    let dims: Vec<usize> = arg(8, "64,128").split(',').map(|x| x.parse().expect("dim")).collect();
    let isas: Vec<Isa> = match args.get(9) {
        None => vec![Isa::available()[0]],
        Some(names) => Isa::available().into_iter().filter(|isa| names.split(',').any(|n| n == isa.name())).collect(),
    };
    let options = Options { threads: Some(threads), rescale: Some(rescale), ..Options::default() };
    for &d in &dims {
        for &s in &lens {
            for &causal in masks {
                let (b, h) = (8192 / s, 1024 / d);
                let mut rng = Rng::new(1);
                let n = b * s * h * d;
                let mut random = || Tensor::from_f64(dtype, &rng.normals(n, 1.0), &[n]).expect("tensor");
                let tensors = [random(), random(), random(), random()];
                let mask = if causal { Mask::causal() } else { Mask::none() };
                let problem = Problem::builder().dense(b, s, s).heads(h, h).head_dim(d).dtype(dtype).mask(mask).build();
                let problem = problem.expect("problem");
                let shape = problem.q_shape();
                let strides = if heads_outside { [h * s * d, d, s * d, 1] } else { [h * s * d, h * d, d, 1] };
                let [q, k, v, d_o] = [0, 1, 2, 3]
                    .map(|i: usize| TensorView::strided(tensors[i].view().data(), &shape, &strides).expect("view"));
                let inputs = Inputs::new(q, k, v);
                let bound = inputs.bind(&problem).expect("fits");
                let mut data = [0; 4].map(|_| Tensor::zeros(dtype, &[n]).expect("tensor"));
                let mut lse = Tensor::zeros(DType::F32, &problem.lse_shape()).expect("tensor");
                let [o, dq, dk, dv] = &mut data;
                fn out<'a>(t: &'a mut Tensor, shape: &[usize], strides: &[usize]) -> TensorViewMut<'a> {
                    let mut flat = t.view_mut();
                    let data = match std::mem::replace(flat.data_mut(), DataMut::F32(&mut [])) {
                        DataMut::F32(x) => TensorViewMut::strided(x, shape, strides),
                        DataMut::F16(x) => TensorViewMut::strided(x, shape, strides),
                        DataMut::Bf16(x) => TensorViewMut::strided(x, shape, strides),
                        _ => unreachable!(),
                    };
                    data.expect("view")
                }
                let flops = if back { 10.0 } else { 4.0 } * (b * h * s * s * d) as f64 / if causal { 2.0 } else { 1.0 };
                let mut found: Vec<(Vec<f64>, Vec<f64>)> = isas.iter().map(|_| Default::default()).collect();
                let begin = Instant::now();
                forward(&bound, &mut Outputs { o: out(o, &shape, &strides), lse: lse.view_mut() }, &options);
                while begin.elapsed().as_secs_f64() < seconds || found[0].0.len() < 3 {
                    for (&isa, (rates, shares)) in isas.iter().zip(&mut found) {
                        let options = Options { isa: Some(isa), ..options };
                        let before = gemm_gflops(&options);
                        let start = Instant::now();
                        if back {
                            let o = TensorView::strided(o.view().data(), &shape, &strides).expect("view");
                            let saved = Saved { o, lse: lse.view(), d_o, d_lse: None };
                            let mut gradients = GradientOutputs {
                                d_q: out(dq, &shape, &strides),
                                d_k: out(dk, &shape, &strides),
                                d_v: out(dv, &shape, &strides),
                                d_sinks: None,
                                d_aux: vec![],
                            };
                            backward(&bound, &saved, &mut gradients, &options);
                        } else {
                            let mut outputs = Outputs { o: out(o, &shape, &strides), lse: lse.view_mut() };
                            forward(&bound, &mut outputs, &options);
                        }
                        let rate = flops / start.elapsed().as_secs_f64() / 1e9;
                        rates.push(rate);
                        shares.push(rate / (0.5 * (before + gemm_gflops(&options))));
                    }
                }
                let mask = if causal { "causal" } else { "full" };
                for (isa, (rates, shares)) in isas.iter().zip(found) {
                    let best = rates.iter().copied().fold(0.0, f64::max);
                    let (rate, share) = (median(rates), median(shares));
                    let name = isa.name();
                    println!(
                        "d{d:3} s{s:4} {mask:6} {name:8} {rate:5.0} GFLOP/s (best {best:5.0}), {share:.3} of a large product"
                    );
                }
            }
        }
    }
}
