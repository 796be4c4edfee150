//! One query over long keys, as a share of a read-only sum over the same buffers at the same time.
//!
//! Hot repeats on the same K and V; cold walks over copies that no cache holds together. Instruction sets take turns.
//! `decode [dtype] [threads] [seconds] [isas]`

use fulgurite_core::*;
use fulgurite_cpu::{Isa, Options, forward};
use std::time::Instant;

/// Sums 64-bit words on as many threads: reads everything, keeps nothing. Seconds of the slowest, without starting them.
fn read(buffers: [&[u64]; 2], threads: usize) -> f64 {
    let own = move |i: usize| {
        let start = Instant::now();
        for buffer in buffers {
            let n = buffer.len() / threads;
            // Four streams side by side, as the comparison with peers reads: the prefetchers follow more than one page.
            let own = &buffer[i * n..(i + 1) * n];
            let (stream, mut sums) = (n / 4, [[0u64; 8]; 4]);
            for at in (0..stream - stream % 8).step_by(8) {
                for (number, sum) in sums.iter_mut().enumerate() {
                    let line = &own[number * stream + at..][..8];
                    sum.iter_mut().zip(line).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
                }
            }
            std::hint::black_box(sums);
        }
        start.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|i| scope.spawn(move || own(i))).collect();
        others.into_iter().fold(own(0), |slowest, t| slowest.max(t.join().expect("reader")))
    })
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let dtype = DType::FLOATS.into_iter().find(|d| Some(d.name()) == args.first().map(|s| &**s)).unwrap_or(DType::F32);
    let threads = args.get(1).map_or(2, |s| s.parse().expect("threads"));
    let seconds: f64 = args.get(2).map_or(2.0, |s| s.parse().expect("seconds"));
    let isas: Vec<Isa> = match args.get(3) {
        None => vec![Isa::available()[0]],
        Some(names) => Isa::available().into_iter().filter(|isa| names.split(',').any(|n| n == isa.name())).collect(),
    };
    let problem =
        Problem::builder().dense(1, 1, 8192).heads(32, 8).head_dim(128).dtype(dtype).build().expect("problem");
    let bytes = 2 * 8192 * 8 * 128 * dtype.size_bytes();
    let q = Tensor::from_f64(dtype, &vec![0.1; 32 * 128], &problem.q_shape()).expect("tensor");
    let mut f = Forward::zeros(&problem).expect("tensors");
    for (name, copies) in [("hot", 1), ("cold", (512 << 20) / bytes)] {
        let data: Vec<[Vec<u64>; 2]> =
            (0..copies).map(|_| [0; 2].map(|_| vec![0x3dcd_3dcd_3dcd_3dcd; bytes / 16])).collect();
        let (begin, mut turn) = (Instant::now(), 0);
        let mut found: Vec<(Vec<f64>, Vec<f64>)> = isas.iter().map(|_| Default::default()).collect();
        while begin.elapsed().as_secs_f64() < seconds {
            for (&isa, (rates, shares)) in isas.iter().zip(&mut found) {
                let options = Options { isa: Some(isa), threads: Some(threads), ..Options::default() };
                let mut next = || {
                    turn += 1;
                    &data[turn % copies]
                };
                let [k, v] = next();
                let sum = read([k, v], threads);
                // The second call counts, as in the comparison with peers: the first wakes the threads.
                let mut own = 0.0;
                for _ in 0..2 {
                    let [k, v] = next().each_ref().map(|words| view(words, dtype, &problem.k_shape()));
                    let inputs = Inputs::new(q.view(), k, v);
                    let bound = inputs.bind(&problem).expect("fits");
                    let start = Instant::now();
                    forward(&bound, &mut f.outputs(), &options);
                    own = start.elapsed().as_secs_f64();
                }
                rates.push(bytes as f64 / own / 1e9);
                shares.push(sum / own);
            }
        }
        for (isa, (rates, shares)) in isas.iter().zip(found) {
            let best = rates.iter().copied().fold(0.0, f64::max);
            let (rate, share, isa) = (median(rates), median(shares), isa.name());
            println!("{dtype} {name:4} {isa:8} {rate:5.1} GB/s (best {best:5.1}), {share:.2} of a read-only sum");
        }
    }
}

/// The words as elements: no bits of these types are invalid.
fn view<'a>(words: &'a [u64], dtype: DType, shape: &[usize]) -> TensorView<'a> {
    // SAFETY: plain numbers of a smaller size and alignment.
    let data: Data<'a> = unsafe {
        match dtype {
            DType::F32 => words.align_to::<f32>().1.into(),
            DType::F16 => words.align_to::<half::f16>().1.into(),
            _ => words.align_to::<half::bf16>().1.into(),
        }
    };
    let strides = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1];
    TensorView::strided(data, shape, &strides).expect("view")
}
