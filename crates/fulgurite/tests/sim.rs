//! The engine `sim`: GPU kernels on any machine, through the same door as every engine.

use fulgurite::gpu::Order;
use fulgurite::{Choice, DType, Inputs, Mask, Problem, Run, Settings, Tensor, attention, engine, engine_with, explain};
use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::random::Rng;

#[test]
fn the_simulated_gpu_agrees_with_the_oracle() {
    let mut rng = Rng::new(4);
    let mut draw = |rows: usize, heads: usize| {
        let shape = [1, rows, heads, 64];
        Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), &shape).unwrap()
    };
    let (q, k, v) = (draw(70, 2), draw(90, 1), draw(90, 1));
    let got = attention(&q, &k, &v).causal().engine(Choice::Sim).forward().unwrap();
    let problem = Problem::builder().dense(1, 70, 90).heads(2, 1).head_dim(64).mask(Mask::causal());
    let problem = problem.dtype(DType::Bf16).build().unwrap();
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    for (name, verdict) in check_forward(&inputs.bind(&problem).unwrap(), &got, 0) {
        assert!(verdict.ok(), "{name}: {verdict}");
    }
}

#[test]
fn its_gradients_agree_with_the_oracle() {
    let problem = Problem::builder()
        .dense(1, 70, 90)
        .heads(2, 1)
        .head_dim(64)
        .mask(Mask::causal())
        .dtype(DType::Bf16)
        .build()
        .unwrap();
    let mut rng = Rng::new(6);
    let mut draw =
        |shape: &[usize]| Tensor::from_f64(DType::Bf16, &rng.normals(shape.iter().product(), 1.0), shape).unwrap();
    let (q, k, v) = (draw(&problem.q_shape()), draw(&problem.k_shape()), draw(&problem.v_shape()));
    let d_o = draw(&problem.o_shape());
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let forward = engine(Choice::Oracle).unwrap().forward(&problem, &inputs, &Run::default()).unwrap();
    let saved = forward.saved(d_o.view());
    let gradients = engine(Choice::Sim).unwrap().backward(&problem, &inputs, &saved, &Run::default()).unwrap();
    for (name, verdict) in check_backward(&inputs.bind(&problem).unwrap(), &saved, &gradients, 0) {
        assert!(verdict.ok(), "{name}: {verdict:?}");
    }
}

#[test]
fn it_is_found_by_its_name_alone() {
    assert_eq!("sim".parse(), Ok(Choice::Sim));
    assert!(engine(Choice::Sim).unwrap().describe().contains("simulated H200, products by wgmma"));
    let ampere = engine("sim:sm_86".parse().unwrap()).unwrap().describe();
    assert!(ampere.contains("A6000") && ampere.contains("products by mma.sync"), "{ampere}");
    let fixed = engine_with(Choice::Sim, &Settings::default().order(Order::Fixed)).unwrap();
    assert!(fixed.describe().ends_with(", gradients in a fixed order"));
    assert!(!fulgurite::engines().contains(&Choice::Sim));
    let problem = Problem::builder().dense(1, 8, 8).heads(1, 1).head_dim(64).dtype(DType::Bf16).build();
    assert!(explain(&problem.unwrap(), Choice::Sim).starts_with("sim: runs it, it was asked for"));
}
