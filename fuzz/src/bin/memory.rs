//! Wild sizes while large requests for memory fail: every engine computes, or refuses with a reason. None ends the process.

#![no_main]

use arbitrary::{Result, Unstructured};
use fulgurite::{Choice, Engine, Error, Inputs, Run, engine};
use fulgurite_core::{DType, Problem, Tensor, TensorView};
use fulgurite_fuzz::limit::{Limited, with_at_most};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Work beyond this is too slow for every input: scores, and rows without a score.
const MOST_SCORES: usize = 1 << 16;
const MOST_ROWS: usize = 1 << 13;

/// Memory below this is not asked for first.
const MIB: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    // Running out of bytes is the only way to fail.
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let (builder, cu_seqlens) = fulgurite_fuzz::builder(u)?;
    let largest = u.int_in_range(2..=32usize)? * MIB / 2;
    let choice = *u.choose(&[Choice::Oracle, Choice::Cpu])?;
    let Ok(problem) = builder.build() else { return Ok(()) };
    // Lists of this length are allowed and only slow, even where each sequence and head is empty.
    if problem.batch().saturating_mul(problem.q_heads()) > MOST_ROWS {
        return Ok(());
    }
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let data: Vec<Tensor> = shapes.iter().map(|shape| one_row(shape, problem.dtype())).collect();
    let rows: Vec<TensorView<'_>> = data.iter().zip(&shapes).map(|(row, shape)| repeated(row, shape)).collect();
    let mut named = Vec::new();
    for spec in problem.aux() {
        let Some(tensor) = fulgurite_fuzz::tensor(u, spec.dtype, &spec.shape)? else { return Ok(()) };
        named.push((spec.name.to_string(), tensor));
    }
    let sinks = fulgurite_fuzz::tensor(u, DType::F32, &[problem.q_heads()])?;
    let used: Vec<i32> = (0..problem.batch()).map(|_| u.int_in_range(0..=4)).collect::<Result<_>>()?;
    let used = Tensor::new(used.clone(), &[used.len()]).expect("one axis");
    let offsets =
        cu_seqlens.map(|(q, k)| [q, k].map(|list| Tensor::new(list.clone(), &[list.len()]).expect("one axis")));
    let blocks = fulgurite_fuzz::block_mask(u, &problem)?;
    let mut inputs = Inputs::new(rows[0], rows[1], rows[2]);
    for (name, tensor) in &named {
        inputs = inputs.aux(name, tensor.view());
    }
    if problem.has_sinks() {
        inputs.sinks = sinks.as_ref().map(Tensor::view);
    }
    inputs.used_q = problem.has_used_q().then(|| used.view());
    inputs.used_k = problem.has_used_k().then(|| used.view());
    if let Some([q, k]) = &offsets {
        inputs = inputs.cu_seqlens(q.view(), k.view());
    }
    inputs.block_mask = blocks.as_ref();
    let engine = engine(choice).expect("both are everywhere");
    with_at_most(largest, || calls(engine.as_ref(), &problem, &inputs, rows[3], largest));
    Ok(())
}

fn calls(engine: &dyn Engine, problem: &Problem, inputs: &Inputs<'_>, d_o: TensorView<'_>, largest: usize) {
    let size = |shape: &[usize]| shape.iter().product::<usize>().saturating_mul(problem.dtype().size_bytes());
    // What is refused is refused at once; the rest has to be computed here.
    if size(&problem.o_shape()) <= largest && is_slow(problem, inputs) {
        return;
    }
    let forward = match engine.forward(problem, inputs, &Run::default()) {
        Ok(forward) => forward,
        Err(refused) => return assert!(!refused.to_string().is_empty()),
    };
    assert!(size(&problem.o_shape()) <= largest.max(MIB));
    match engine.backward(problem, inputs, &forward.saved(d_o), &Run::default()) {
        Ok(gradients) => assert_eq!(gradients.d_q.shape()[..], problem.q_shape()[..]),
        Err(Error::Unsupported(_)) => {}
        Err(refused) => assert!(!refused.to_string().is_empty()),
    }
}

fn is_slow(problem: &Problem, inputs: &Inputs<'_>) -> bool {
    let Ok(bound) = inputs.bind(problem) else { return false };
    let heads = problem.q_heads();
    let scores = bound.sequences().iter().map(|s| (s.q_len * heads).saturating_mul(s.k_len.max(1)));
    let keys: usize = bound.sequences().iter().map(|s| s.k_len * problem.kv_heads()).sum();
    let scores = scores.fold(0usize, usize::saturating_add);
    scores.saturating_add(keys) > MOST_SCORES || scores > MOST_ROWS && problem.max_k_len() == 0
}

/// One row of the tensor, which [`repeated`] repeats along all other axes: a shape of any size in a few bytes.
fn one_row(shape: &[usize], dtype: DType) -> Tensor {
    let n = shape.last().copied().unwrap_or(1);
    let values: Vec<f64> = (0..n).map(|i| (i % 7) as f64 * 0.25 - 0.5).collect();
    Tensor::from_f64(dtype, &values, &[n]).expect("a head is narrow")
}

fn repeated<'a>(row: &'a Tensor, shape: &[usize]) -> TensorView<'a> {
    let mut strides = vec![0; shape.len()];
    if let Some(last) = strides.last_mut() {
        *last = 1;
    }
    TensorView::strided(row.view().data(), shape, &strides).expect("a row repeated")
}
