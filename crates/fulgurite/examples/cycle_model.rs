//! Compares the cycle model with measurements: `cycle_model [forward|backward|sync|blackwell]..`, all of them by default.
//! Run it in the root of the repository, where it reads `docs/lab/results`.

use fulgurite::gpu::{Arch, Predicted, Tables, Target, TensorUnit, predict, predict_backward};
use fulgurite::{DType, Mask, Problem, ProblemBuilder};
use serde_json::Value;
use std::error::Error;

/// Tokens and heads x dim of the grids.
const TOKENS: usize = 16384;
const WIDTH: usize = 2048;

fn builder(dim: usize, causal: bool) -> ProblemBuilder {
    let mask = if causal { Mask::causal() } else { Mask::none() };
    Problem::builder().heads(WIDTH / dim, WIDTH / dim).head_dim(dim).dtype(DType::Bf16).mask(mask)
}

fn read(name: &str) -> Result<Value, Box<dyn Error>> {
    Ok(serde_json::from_str(&std::fs::read_to_string(format!("docs/lab/results/{name}.json"))?)?)
}

/// Prints a cell; its relative error.
fn cell(name: &str, predicted: &Predicted, flops: f64, measured: f64) -> f64 {
    let tflops = flops / predicted.seconds / 1e12;
    let (c, error) = (&predicted.cycles, tflops / measured - 1.0);
    println!(
        "| {name} | {measured:.0} | {tflops:.0} | {:+.1} % | {:.0}, {:.0}, {:.0} | {:.2} | {} |",
        error * 100.0,
        c.block,
        c.tile,
        c.start,
        predicted.gigahertz,
        predicted.bound
    );
    error
}

fn grid(rows: &[Value], backward: bool) -> Result<(), Box<dyn Error>> {
    let mut worst = Vec::new();
    for row in rows {
        let get = |key: &str| row[key].as_u64().unwrap_or(0) as usize;
        let (dim, n, causal) = (get("d"), get("n"), row["causal"].as_bool().unwrap_or(false));
        let measured = row["tflops"]["ours"].as_f64().unwrap_or(f64::NAN);
        let of = if backward { predict_backward } else { predict };
        let predicted = of(&builder(dim, causal), [TOKENS / n, n, n], Target::HOPPER, &Tables::default(), None)?;
        let products = if backward { 10.0 } else { 4.0 };
        let flops = products * (TOKENS * WIDTH * n) as f64 * if causal { 0.5 } else { 1.0 };
        let name = format!("{dim} {} {n}", if causal { "causal" } else { "full" });
        worst.push(cell(&name, &predicted, flops, measured));
    }
    summary(&worst);
    Ok(())
}

fn summary(errors: &[f64]) {
    let within = errors.iter().filter(|e| e.abs() <= 0.1).count();
    let worst = errors.iter().fold(0.0f64, |a, e| a.max(e.abs()));
    println!("\n{within} of {} within 10 %, the worst at {:.1} %\n", errors.len(), worst * 100.0);
}

/// Cells named `d 64 1024 causal False`, with products by `mma.sync`.
fn sync(rows: &[Value]) -> Result<(), Box<dyn Error>> {
    let mut errors = Vec::new();
    for row in rows {
        let name = row["name"].as_str().unwrap_or_default();
        let words: Vec<&str> = name.split(' ').collect();
        let at = words.iter().position(|w| *w == "d").unwrap_or(0);
        let [Some(dim), Some(n)] = [1, 2].map(|i| words.get(at + i).and_then(|w| w.parse::<usize>().ok())) else {
            continue;
        };
        let (causal, backward) = (name.ends_with("True"), words[0] == "backward");
        let of = if backward { predict_backward } else { predict };
        let unit = Some(TensorUnit::MmaSync);
        let predicted = of(&builder(dim, causal), [TOKENS / n, n, n], Target::HOPPER, &Tables::default(), unit)?;
        let products = if backward { 10.0 } else { 4.0 };
        let flops = products * (TOKENS * WIDTH * n) as f64 * if causal { 0.5 } else { 1.0 };
        errors.push(cell(name, &predicted, flops, row["tflops"]["ours"].as_f64().unwrap_or(f64::NAN)));
    }
    summary(&errors);
    Ok(())
}

/// Forward attention by `tcgen05`; no GPU has measured it.
fn blackwell() -> Result<(), Box<dyn Error>> {
    for arch in [Arch::SM_100A, Arch::SM_103A] {
        for dim in [64, 128] {
            for causal in [false, true] {
                for n in [1024, 4096, 16384] {
                    let target = Target::new(arch);
                    let predicted =
                        predict(&builder(dim, causal), [TOKENS / n, n, n], target, &Tables::default(), None)?;
                    let flops = 4.0 * (TOKENS * WIDTH * n) as f64 * if causal { 0.5 } else { 1.0 };
                    let name = format!("{} {dim} {} {n}", arch.gpu, if causal { "causal" } else { "full" });
                    cell(&name, &predicted, flops, f64::NAN);
                }
            }
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let asked: Vec<String> = std::env::args().skip(1).collect();
    let asks = |name: &str| asked.is_empty() || asked.iter().any(|word| word == name);
    println!("| cell | measured | predicted | error | cycles of a block, a tile, a CTA | GHz | bound |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    if asks("forward") {
        grid(read("gpu-forward")?["grid"]["rows"].as_array().ok_or("no rows")?, false)?;
    }
    if asks("backward") {
        grid(read("gpu-backward")?["backward"]["rows"].as_array().ok_or("no rows")?, true)?;
    }
    if asks("sync") {
        sync(read("gpu-sync-grid")?.as_array().ok_or("no rows")?)?;
    }
    if asks("blackwell") {
        blackwell()?;
    }
    Ok(())
}
