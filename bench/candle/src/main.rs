//! fulgurite beside candle's CPU attention: one process, contenders taking turns, 16 heads x 2048 x 64, f32.
//!
//! ```text
//! RAYON_NUM_THREADS=2 cargo run --release -- [--seconds S] [--json PATH]
//! ```
//!
//! candle is called twice: its fused `flash_attn` for CPUs, which the bar is about, and the plain matmul, softmax,
//! matmul, for information. Threads: `RAYON_NUM_THREADS` for all contenders, or all cores. The exit status is 1 if
//! a result is wrong or the ratio is below the bar.

use candle_core::{D, Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use fulgurite_core::{Bound, Forward, Inputs, Mask, Problem, TensorView};
use fulgurite_cpu::Options;
use serde_json::{Value, json};
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

const SEQ: usize = 2048;
const HEADS: usize = 16;
const DIM: usize = 64;
/// Ours against candle's `flash_attn`, without a mask.
const BAR: f64 = 10.0;
/// Every contender gets at least this many turns that count.
const ROUNDS: usize = 5;
/// On results of the order of 0.1 to 1: enough to see that all compute the same.
const TOLERANCE: f32 = 1e-4;
const NAMES: [&str; 3] = ["ours", "candle flash_attn", "candle unfused"];

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Uniform numbers of variance 1, the same in every run.
fn random(seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..SEQ * HEADS * DIM).map(|_| (next() - 0.5) * 12f32.sqrt()).collect()
}

/// The inputs of all contenders, each in the layout it likes best.
struct Case<'a> {
    bound: Bound<'a>,
    options: Options,
    result: Forward,
    /// q, k, v as `[1, sequence, heads, dim]`, what `flash_attn` takes.
    rows: Vec<Tensor>,
    /// The same as `[1, heads, sequence, dim]`.
    by_head: Vec<Tensor>,
    /// Added to the scores of the unfused path: `[sequence, sequence]`, 0 or -inf.
    hidden: Option<Tensor>,
}

impl Case<'_> {
    /// Runs contender `number`; candle's results are tensors `[1, heads, sequence, dim]`, ours lies in `result`.
    fn run(&mut self, number: usize) -> Outcome<Option<Tensor>> {
        let scale = self.bound.problem().scale();
        match number {
            0 => {
                fulgurite_cpu::forward(&self.bound, &mut self.result.outputs(), &self.options);
                Ok(None)
            }
            1 => {
                let mask = if self.hidden.is_some() { AttnMask::causal() } else { AttnMask::None };
                let [q, k, v] = &self.rows[..] else { unreachable!("three tensors") };
                Ok(Some(flash_attn::<f32>(q, k, v, scale, mask, None, None)?))
            }
            _ => {
                let [q, k, v] = &self.by_head[..] else { unreachable!("three tensors") };
                let mut scores = (q.matmul(&k.t()?)? * f64::from(scale))?;
                if let Some(hidden) = &self.hidden {
                    scores = scores.broadcast_add(hidden)?;
                }
                Ok(Some(candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(v)?))
            }
        }
    }

    /// A result as `[sequence, heads, dim]`.
    fn values(&self, o: Option<Tensor>) -> Outcome<Vec<f32>> {
        match o {
            None => Ok(self.result.o.as_slice::<f32>().ok_or("ours is not f32")?.to_vec()),
            Some(o) => Ok(o.transpose(1, 2)?.contiguous()?.flatten_all()?.to_vec1()?),
        }
    }
}

/// Times all contenders; a JSON object with seconds, differences and ratios.
fn race(causal: bool, threads: usize, seconds: f64) -> Outcome<Value> {
    let shape = [1, SEQ, HEADS, DIM];
    let data: Vec<_> = (1..4).map(random).collect();
    let mask = if causal { Mask::causal() } else { Mask::none() };
    let problem = Problem::builder().dense(1, SEQ, SEQ).heads(HEADS, HEADS).head_dim(DIM).mask(mask).build()?;
    let views = data.iter().map(|x| TensorView::new(x, &shape)).collect::<Result<Vec<_>, _>>()?;
    let inputs = Inputs::new(views[0], views[1], views[2]);
    let cpu = Device::Cpu;
    let rows = data.iter().map(|x| Tensor::from_slice(x, &shape, &cpu)).collect::<Result<Vec<_>, _>>()?;
    let by_head = rows.iter().map(|x| x.transpose(1, 2)?.contiguous()).collect::<Result<_, _>>()?;
    let hidden: Vec<_> = (0..SEQ * SEQ).map(|i| if i % SEQ > i / SEQ { f32::NEG_INFINITY } else { 0.0 }).collect();
    let mut case = Case {
        bound: inputs.bind(&problem)?,
        options: Options { threads: Some(threads), ..Options::default() },
        result: Forward::zeros(&problem)?,
        rows,
        by_head,
        hidden: causal.then(|| Tensor::from_vec(hidden, (SEQ, SEQ), &cpu)).transpose()?,
    };

    // The first call of each warms up and is compared.
    let mut results = Vec::new();
    for number in 0..NAMES.len() {
        let o = case.run(number)?;
        results.push(case.values(o)?);
    }
    let difference = |a: &[f32], b: &[f32]| {
        // NaN must win: f32::max would lose it.
        a.iter().zip(b).map(|(x, y)| (x - y).abs()).fold(0.0f32, |m, d| if d <= m { m } else { d })
    };
    let differences: Vec<_> = results.iter().map(|o| difference(o, &results[2])).collect();
    let correct = differences.iter().all(|d| *d <= TOLERANCE);

    let mut times = [const { Vec::new() }; NAMES.len()];
    let begin = Instant::now();
    let mut round = 0;
    while round < ROUNDS || begin.elapsed().as_secs_f64() < seconds {
        for turn in 0..NAMES.len() {
            let number = (turn + round) % NAMES.len();
            std::thread::sleep(Duration::from_millis(4)); // pools that still spin come to rest
            let start = Instant::now();
            let o = case.run(number)?;
            times[number].push(start.elapsed().as_secs_f64());
            drop(o);
        }
        round += 1;
    }

    let flops = (4 * SEQ * SEQ * HEADS * DIM) as f64 / if causal { 2.0 } else { 1.0 };
    let mut row = json!({
        "cell": format!("{HEADS} heads x {SEQ} x {DIM} f32 {}", if causal { "causal" } else { "full" }),
        "correct": correct,
        "rounds": round,
    });
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    for (number, name) in NAMES.into_iter().enumerate() {
        let (median, best) = (times[number][times[number].len() / 2], times[number][0]);
        row[name] = json!({
            "median_s": median, "best_s": best,
            "median_gflops": flops / median / 1e9, "best_gflops": flops / best / 1e9,
            "difference": differences[number],
        });
    }
    for statistic in ["median", "best"] {
        let time = |name: &str| row[name][format!("{statistic}_s")].as_f64().unwrap_or(f64::NAN);
        let [flash, unfused] = [NAMES[1], NAMES[2]].map(|name| time(name) / time("ours"));
        row[format!("ratio_{statistic}")] = json!(flash);
        row[format!("ratio_unfused_{statistic}")] = json!(unfused);
    }
    Ok(row)
}

/// As Linux names it.
fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn run() -> Outcome<bool> {
    let (mut seconds, mut path) = (5.0, None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        match word.as_str() {
            "--seconds" => seconds = value.parse()?,
            "--json" => path = Some(value),
            _ => return Err(format!("{word} is not an option, allowed: --seconds S, --json PATH").into()),
        }
    }
    let threads = candle_core::utils::get_num_threads();
    let mut rows = Vec::new();
    for causal in [false, true] {
        let row = race(causal, threads, seconds)?;
        println!("{}, {threads} threads, GFLOP/s:", row["cell"].as_str().unwrap_or_default());
        for name in NAMES {
            let of = |key: &str| row[name][key].as_f64().unwrap_or(f64::NAN);
            let [median, best, difference] = ["median_gflops", "best_gflops", "difference"].map(of);
            println!("  {name:18} {median:8.1} (best {best:.1})  difference {difference:.1e}");
        }
        let of = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
        let [median, best] = ["ratio_median", "ratio_best"].map(of);
        println!(
            "  ours is {median:.1} times flash_attn (bests {best:.1}), {:.1} times unfused",
            of("ratio_unfused_median")
        );
        rows.push(row);
    }
    let correct = rows.iter().all(|row| row["correct"] == true);
    let met = correct && rows[0]["ratio_median"].as_f64().is_some_and(|ratio| ratio >= BAR);
    println!("bar: {BAR} times candle's flash_attn, full: {}", if met { "met" } else { "not met" });
    if !correct {
        println!("wrong: results differ by more than {TOLERANCE}");
    }
    let unix_time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
    let record = json!({
        "cpu": cpu_model(), "unix_time": unix_time, "candle": "0.11", "fulgurite": env!("CARGO_PKG_VERSION"),
        "threads": threads, "bar": BAR, "met": met, "rows": rows,
    });
    match path {
        Some(path) => std::fs::write(path, serde_json::to_string_pretty(&record)? + "\n")?,
        None => println!("{record}"),
    }
    Ok(met)
}

fn main() -> ExitCode {
    match run() {
        Ok(met) => ExitCode::from(u8::from(!met)),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
