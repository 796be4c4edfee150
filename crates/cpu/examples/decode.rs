//! One query over long keys: bytes of K and V a second. `decode [dtype] [threads] [seconds]`

use fulgurite_core::*;
use fulgurite_cpu::{Options, forward};
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let dtype = DType::FLOATS.into_iter().find(|d| Some(d.name()) == args.first().map(|s| &**s)).unwrap_or(DType::F32);
    let threads = args.get(1).map_or(2, |s| s.parse().expect("threads"));
    let seconds: f64 = args.get(2).map_or(2.0, |s| s.parse().expect("seconds"));
    let problem =
        Problem::builder().dense(1, 1, 8192).heads(32, 8).head_dim(128).dtype(dtype).build().expect("problem");
    let ones = |shape: &[usize]| {
        let mut t = Tensor::zeros(dtype, shape).expect("tensor");
        t.view_mut().fill(0.1);
        t
    };
    let (q, k, v) = (ones(&problem.q_shape()), ones(&problem.k_shape()), ones(&problem.v_shape()));
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let bound = inputs.bind(&problem).expect("fits");
    let mut f = Forward::zeros(&problem).expect("tensors");
    let options = Options { threads: Some(threads), ..Options::default() };
    let bytes = (2 * 8192 * 8 * 128 * dtype.size_bytes()) as f64;
    let (begin, mut rates) = (Instant::now(), vec![]);
    while begin.elapsed().as_secs_f64() < seconds {
        let start = Instant::now();
        forward(&bound, &mut f.outputs(), &options);
        rates.push(bytes / start.elapsed().as_secs_f64() / 1e9);
    }
    rates.sort_by(f64::total_cmp);
    println!("{dtype}: {:.1} GB/s median, {:.1} best", rates[rates.len() / 2], rates[rates.len() - 1]);
}
