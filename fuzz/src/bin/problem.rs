//! Whatever is described, `build` answers or refuses; whatever is brought, `bind` answers or refuses; and what both
//! let through, the oracle computes. None of them panics.

#![no_main]

use arbitrary::{Result, Unstructured};
use fulgurite_core::{BlockSpec, DType, Forward, Inputs, Tensor, oracle};
use libfuzzer_sys::fuzz_target;

/// Scores beyond this are too slow to compute for every input.
const MOST_SCORES: usize = 2048;

fuzz_target!(|bytes: &[u8]| {
    // Running out of bytes is the only way to fail.
    let _ = run(&mut Unstructured::new(bytes));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let (builder, cu_seqlens) = fulgurite_fuzz::builder(u)?;
    let problem = match builder.build() {
        Ok(problem) => problem,
        Err(refused) => {
            assert!(!refused.to_string().is_empty());
            return Ok(());
        }
    };
    // A list of so many sequences or heads is allowed and only slow, even where each of them is empty.
    if problem.batch().max(problem.q_heads()) > MOST_SCORES {
        return Ok(());
    }
    let mut rows = Vec::new();
    for shape in [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()] {
        let Some(tensor) = fulgurite_fuzz::tensor(u, problem.dtype(), &shape)? else { return Ok(()) };
        rows.push(tensor);
    }
    let mut named = Vec::new();
    for spec in problem.aux() {
        let Some(tensor) = fulgurite_fuzz::tensor(u, spec.dtype, &spec.shape)? else { return Ok(()) };
        named.push((spec.name.to_string(), tensor));
    }
    let sinks = fulgurite_fuzz::tensor(u, DType::F32, &[problem.q_heads()])?;
    let used = [fulgurite_fuzz::tensor(u, DType::I32, &[problem.batch()])?, used_lengths(u, problem.batch())?];
    let offsets = cu_seqlens.map(|(q, k)| [q, k].map(|list| Tensor::new(list.clone(), &[list.len()]).unwrap()));
    let blocks = fulgurite_fuzz::block_mask(u, &problem)?;

    let mut inputs = Inputs::new(
        fulgurite_fuzz::view(u, &rows[0])?,
        fulgurite_fuzz::view(u, &rows[1])?,
        fulgurite_fuzz::view(u, &rows[2])?,
    );
    for (name, tensor) in &named {
        inputs = inputs.aux(name, tensor.view());
    }
    if problem.has_sinks() {
        inputs.sinks = sinks.as_ref().map(Tensor::view);
    }
    let [loose, strict] = &used;
    let lengths = if u.ratio(1, 8)? { loose } else { strict };
    if problem.has_used_q() {
        inputs.used_q = lengths.as_ref().map(Tensor::view);
    }
    if problem.has_used_k() {
        inputs.used_k = lengths.as_ref().map(Tensor::view);
    }
    if let Some([q, k]) = &offsets {
        inputs = inputs.cu_seqlens(q.view(), k.view());
    }
    inputs.block_mask = blocks.as_ref();

    let bound = match inputs.bind(&problem) {
        Ok(bound) => bound,
        Err(refused) => {
            assert!(!refused.to_string().is_empty());
            return Ok(());
        }
    };
    let scores: usize = bound.sequences().iter().map(|s| s.q_len * s.k_len * problem.q_heads()).sum();
    if scores > MOST_SCORES {
        return Ok(());
    }
    let answer = oracle::forward(&bound);
    assert_eq!(answer.o.len(), problem.o_shape().iter().product::<usize>());
    let forward = Forward::zeros(&problem).expect("its elements were counted above");
    if forward.saved(rows[3].view()).check(&problem).is_ok() {
        let gradients = oracle::backward(&bound, &rows[3].view(), None);
        assert_eq!(gradients.d_aux.len(), problem.aux().len());
    }
    let [rows, cols] = [u.int_in_range(1..=4)?, u.int_in_range(1..=4)?];
    fulgurite_fuzz::check_promises(&bound, BlockSpec { rows, cols, batch: 1, heads: 1 });
    Ok(())
}

fn used_lengths(u: &mut Unstructured<'_>, batch: usize) -> Result<Option<Tensor>> {
    if batch > 64 {
        return Ok(None);
    }
    let lengths = (0..batch).map(|_| u.int_in_range(0..=4)).collect::<Result<Vec<i32>>>()?;
    Ok(Tensor::new(lengths, &[batch]).ok())
}
