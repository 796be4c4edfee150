//! What is refused before memory is asked for, and memory that cannot be had.

use fulgurite::{Choice, Error, Forward, Inputs, Problem, Run, Tensor, TensorView, attention, engine};

/// One row of ones, repeated along all other axes: a tensor of any size in a few bytes.
fn repeated<'a>(row: &'a Tensor, shape: &[usize]) -> TensorView<'a> {
    let mut strides = vec![0; shape.len()];
    strides[shape.len() - 1] = 1;
    TensorView::strided(row.view().data(), shape, &strides).unwrap()
}

#[test]
fn offsets_beyond_the_rows_are_refused() {
    let q = Tensor::new(vec![0.5f32; 4 * 8], &[4, 1, 8]).unwrap();
    let offsets = Tensor::new(vec![0, (1 << 30) - 1], &[2]).unwrap();
    let refused = attention(&q, &q, &q).cu_seqlens(&offsets, &offsets).forward().unwrap_err().to_string();
    assert!(refused.starts_with("`q` has shape [4, 1, 8], allowed: [1073741823, 1, 8]"), "{refused}");
}

/// Results that no process can have: 2^29 rows of 512 elements in 32 heads are 32 TiB.
#[test]
fn results_without_memory_are_refused_with_their_size() {
    let row = Tensor::new(vec![0.5f32; 512], &[512]).unwrap();
    let problem = Problem::builder().dense(1, 1 << 29, 0).heads(32, 1).head_dim(512).build().unwrap();
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape()];
    let [q, k, v] = shapes.each_ref().map(|shape| repeated(&row, shape));
    let inputs = Inputs::new(q, k, v);
    for choice in [Choice::Cpu, Choice::Oracle] {
        let refused = engine(choice).unwrap().forward(&problem, &inputs, &Run::default()).unwrap_err();
        assert!(matches!(refused, Error::Tensor(_)), "{refused:?}");
        assert!(refused.to_string().contains("needs 35184372088832 bytes"), "{refused}");
    }
}

/// Any number of sequences and heads fits in tensors without elements; lists of a million times a million do not fit in memory.
#[test]
fn lists_of_sequences_and_heads_are_asked_for() {
    let n = 1 << 20;
    let problem = Problem::builder().dense(n, 0, 0).heads(n, n).head_dim(8).build().unwrap();
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let [q, k, v, d_o] = shapes.map(|shape| Tensor::new(Vec::<f32>::new(), &shape).unwrap());
    let (inputs, cpu) = (Inputs::new(q.view(), k.view(), v.view()), engine(Choice::Cpu).unwrap());
    let saved = Forward::zeros(&problem).unwrap();
    let refused = [
        cpu.forward(&problem, &inputs, &Run::default()).unwrap_err(),
        cpu.backward(&problem, &inputs, &saved.saved(d_o.view()), &Run::default()).unwrap_err(),
    ];
    for refused in refused {
        assert!(matches!(refused, Error::Tensor(_)), "{refused:?}");
        assert!(
            refused.to_string().starts_with("lists of sequences and heads needs 281474976710656 bytes"),
            "{refused}"
        );
    }
}
