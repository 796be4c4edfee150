//! The cycle model against committed measurements of an H200 (docs/lab/016-cycle-model.md).

use fulgurite::gpu::{Predicted, Tables, Target, predict, predict_backward};
use fulgurite::{DType, Mask, Problem};
use serde_json::Value;

/// Tokens and heads x dim of the grids.
const TOKENS: usize = 16384;
const WIDTH: usize = 2048;

/// Measured and predicted TFLOP/s of cells of a grid: head dim, causal, length.
fn cells(file: &str, grid: &str, backward: bool, asked: &[(usize, bool, usize)]) -> Vec<[f64; 2]> {
    let path = format!("{}/../../docs/lab/results/{file}.json", env!("CARGO_MANIFEST_DIR"));
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let rows = file[grid]["rows"].as_array().unwrap();
    let cell = |&(dim, causal, n): &(usize, bool, usize)| {
        let is_it = |row: &&Value| row["d"] == dim && row["causal"] == causal && row["n"] == n;
        let measured = rows.iter().find(is_it).unwrap()["tflops"]["ours"].as_f64().unwrap();
        let predicted = predicted(dim, causal, n, backward);
        let products = if backward { 10.0 } else { 4.0 };
        let flops = products * (TOKENS * WIDTH * n) as f64 * if causal { 0.5 } else { 1.0 };
        [measured, flops / predicted.seconds / 1e12]
    };
    asked.iter().map(cell).collect()
}

fn predicted(dim: usize, causal: bool, n: usize, backward: bool) -> Predicted {
    let mask = if causal { Mask::causal() } else { Mask::none() };
    let builder = Problem::builder().heads(WIDTH / dim, WIDTH / dim).head_dim(dim).dtype(DType::Bf16).mask(mask);
    let of = if backward { predict_backward } else { predict };
    of(&builder, [TOKENS / n, n, n], Target::HOPPER, &Tables::default(), None).unwrap()
}

fn within(cells: &[[f64; 2]], allowed: f64) {
    for [measured, predicted] in cells {
        assert!((predicted / measured - 1.0).abs() <= allowed, "{predicted} TFLOP/s, measured {measured}");
    }
}

#[test]
fn forward_is_within_ten_percent() {
    let asked = [(64, false, 512), (64, false, 16384), (128, false, 1024), (128, true, 512), (256, true, 2048)];
    within(&cells("gpu-forward", "grid", false, &asked), 0.1);
}

/// Head dims 64 and 128 from 4096 tokens on are within 10 %; pairs of CTAs at head dim 256 are slower than the model says.
#[test]
fn backward_is_within_ten_percent_but_for_pairs() {
    within(&cells("gpu-backward", "backward", true, &[(64, true, 16384), (128, false, 4096)]), 0.1);
    within(&cells("gpu-backward", "backward", true, &[(256, false, 4096)]), 0.25);
}

/// The bound of a long problem is the tensor cores at head dim 128, and latencies at 64.
#[test]
fn the_bound_is_named() {
    let bound = |dim: usize| predicted(dim, false, 8192, false).bound;
    assert!(bound(128).starts_with("tensor, 100 % of a block's cycles"), "{}", bound(128));
    assert!(bound(64).starts_with("latencies between the roles"), "{}", bound(64));
}
