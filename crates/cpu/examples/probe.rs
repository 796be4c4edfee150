//! Speed of forward over a grid, beside the rate of a plain multiply-add loop.
use fulgurite_core::*;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let threads: usize = args.get(1).map_or(2, |s| s.parse().unwrap());
    let lens: Vec<usize> =
        args.get(2).map_or(vec![512, 2048, 8192], |s| s.split(',').map(|x| x.parse().unwrap()).collect());
    let secs: f64 = args.get(3).map_or(0.8, |s| s.parse().unwrap());
    let rescale: Option<Rescale> = args.get(4).map(|s| s.parse().unwrap());
    for d in [64usize, 128] {
        for &s in &lens {
            for causal in [false, true] {
                let (b, h) = (8192 / s, 1024 / d);
                let mut seed = 1u64;
                let mut rnd = |n: usize| -> Vec<f32> {
                    (0..n)
                        .map(|_| {
                            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                            ((seed >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 3.4
                        })
                        .collect()
                };
                let (q, k, v) = (rnd(b * s * h * d), rnd(b * s * h * d), rnd(b * s * h * d));
                let problem = Problem::builder()
                    .dense(b, s, s)
                    .heads(h, h)
                    .head_dim(d)
                    .mask(if causal { Mask::causal() } else { Mask::none() })
                    .build()
                    .unwrap();
                let shape = problem.q_shape();
                let inputs = Inputs::new(
                    TensorView::new(&q, &shape).unwrap(),
                    TensorView::new(&k, &shape).unwrap(),
                    TensorView::new(&v, &shape).unwrap(),
                );
                let bound = inputs.bind(&problem).unwrap();
                let mut f = Forward::zeros(&problem).unwrap();
                let options = fulgurite_cpu::Options { threads: Some(threads), rescale, ..Default::default() };
                fulgurite_cpu::forward(&bound, &mut f.outputs(), &options);
                // check one row
                let (bi, hi, qi) = (b - 1, h / 2, s * 2 / 3);
                let at = |t: &[f32], i: usize| t[((bi * s + i) * h + hi) * d..][..d].to_vec();
                let qr = at(&q, qi);
                let n = if causal { qi + 1 } else { s };
                let sc: Vec<f64> = (0..n)
                    .map(|j| {
                        at(&k, j).iter().zip(&qr).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>()
                            * problem.scale() as f64
                    })
                    .collect();
                let m = sc.iter().cloned().fold(f64::MIN, f64::max);
                let z: f64 = sc.iter().map(|x| (x - m).exp()).sum();
                let mut o = vec![0.0f64; d];
                for j in 0..n {
                    for (x, y) in o.iter_mut().zip(at(&v, j)) {
                        *x += (sc[j] - m).exp() / z * y as f64;
                    }
                }
                let got = f.o.view();
                let err = (0..d).map(|c| (got.get(&[bi, qi, hi, c]) - o[c]).abs()).fold(0.0, f64::max);
                let mut times = vec![];
                let mut last = Default::default();
                let t0 = Instant::now();
                while t0.elapsed().as_secs_f64() < secs || times.len() < 3 {
                    let t = Instant::now();
                    last = fulgurite_cpu::forward(&bound, &mut f.outputs(), &options);
                    times.push(t.elapsed().as_secs_f64());
                }
                times.sort_by(f64::total_cmp);
                let flops = 4.0 * (b * h * s * s * d) as f64 / if causal { 2.0 } else { 1.0 };
                println!(
                    "d{d} s{s} {} median {:.0} best {:.0} GFLOP/s err {err:.1e} {:?}",
                    if causal { "causal" } else { "full  " },
                    flops / times[times.len() / 2] / 1e9,
                    flops / times[0] / 1e9,
                    last
                );
            }
        }
    }
}
