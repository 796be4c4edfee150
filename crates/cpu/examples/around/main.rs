//! The systems around attention beside what they are compared with, alternating in one run; prints JSON.
//!
//! `around [gated-delta|gated-delta-backward|window|skip|proxy|exp|lighthouse|parallax|window-alone|gated-delta-alone]... [--threads N]`

mod attention;
mod exponentials;
mod gated_delta;
mod proxies;

use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Tensor};
use std::time::Instant;

/// Seconds of one call of each contender in turn, `rounds` times; the median of each.
fn race<const N: usize>(rounds: usize, mut contenders: [&mut dyn FnMut(); N]) -> [f64; N] {
    contenders.iter_mut().for_each(|run| run());
    let mut times = [const { Vec::new() }; N];
    for _ in 0..rounds {
        for (run, times) in contenders.iter_mut().zip(&mut times) {
            let start = Instant::now();
            run();
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    })
}

fn random(rng: &mut Rng, dtype: DType, shape: &[usize], map: impl Fn(f64) -> f64) -> Tensor {
    let n = shape.iter().product();
    let values: Vec<f64> = rng.normals(n, 1.0).into_iter().map(map).collect();
    Tensor::from_f64(dtype, &values, shape).expect("a shape with as many values")
}

/// One line of the result: what, and its numbers.
struct Line(String, Vec<(String, f64)>);

fn main() {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let mut threads = 2;
    if let Some(at) = args.iter().position(|a| a == "--threads") {
        threads = args.get(at + 1).and_then(|n| n.parse().ok()).expect("--threads N");
        args.drain(at..at + 2);
    }
    let all = ["gated-delta", "gated-delta-backward", "window", "skip", "proxy", "exp", "parallax", "lighthouse"];
    let chosen: Vec<&str> = if args.is_empty() { all.to_vec() } else { args.iter().map(String::as_str).collect() };
    let mut lines = Vec::new();
    for part in chosen {
        lines.extend(match part {
            "gated-delta" => gated_delta::measure(threads),
            "gated-delta-backward" => gated_delta::backward(threads),
            "gated-delta-alone" => gated_delta::alone(threads),
            "window" => attention::window(threads),
            "window-alone" => attention::window_alone(threads),
            "skip" => attention::skip(threads),
            "proxy" => proxies::measure(threads),
            "exp" => exponentials::measure(threads),
            "skip-alone" => attention::skip_alone(threads),
            "parallax" => attention::parallax(threads),
            "parallax-alone" => attention::parallax_alone(threads),
            "lighthouse" => attention::lighthouse(threads),
            other => panic!("no part {other:?}, there are: {all:?}"),
        });
    }
    let numbers = |numbers: &[(String, f64)]| {
        numbers.iter().map(|(name, x)| format!("\"{name}\": {x:.6}")).collect::<Vec<_>>().join(", ")
    };
    let rows: Vec<String> =
        lines.iter().map(|Line(what, n)| format!("  {{\"what\": \"{what}\", {}}}", numbers(n))).collect();
    println!("[\n{}\n]", rows.join(",\n"));
}
