//! Every registered operator over whole tensors on the simulator: right by its definition, without a race, and refusing
//! tensors that do not fit.

use fulgurite::gpu::{DeviceSpan, Session, Stream, Tables, TensorOperator, TensorType, tensor_operators};
use fulgurite::sim::{Device, Options, Sim};
use fulgurite::{DType, Tensor, TensorView, TensorViewMut};
use fulgurite_core::compare::Rule;
use fulgurite_core::random::Rng;
use std::sync::Arc;

fn session(seed: u64) -> Session<Sim> {
    Session::new(Arc::new(Sim::new(Options { seed, ..Options::default() })), Tables::default())
}

fn random(types: &[TensorType], rng: &mut Rng) -> Vec<Tensor> {
    let tensor = |t: &TensorType| {
        let count = t.shape.iter().product();
        Tensor::from_f64(t.dtype, &rng.normals(count, 1.0), &t.shape).unwrap()
    };
    types.iter().map(tensor).collect()
}

/// The tolerance rule: honest code is the definition with f32 rounding after each operation.
fn check(operator: &'static TensorOperator, rows: usize, cols: usize, seed: u64) {
    let types = (operator.example)(rows, cols);
    let tensors = random(&types, &mut Rng::new(seed));
    let views: Vec<TensorView<'_>> = tensors.iter().map(Tensor::view).collect();
    let session = session(seed);
    let got = session.apply_to_host(operator, &views).unwrap();
    assert!(session.device().findings().is_empty(), "{}: {:?}", operator.name, session.device().findings());
    let values: Vec<Vec<f64>> = views.iter().map(TensorView::to_f64).collect();
    let want = (operator.reference)(&types, &values, |x| x);
    let plain = (operator.reference)(&types, &values, |x| f64::from(x as f32));
    let rule = Rule { dtype: got.dtype(), softcap: false, gradient: false, terms: None };
    let verdict = rule.judge(&got.view().to_f64(), &want, &plain);
    assert!(verdict.ok(), "{} {rows} x {cols}: {verdict}", operator.name);
    assert_eq!(operator.exact(&views).unwrap().shape(), got.shape());
}

#[test]
fn operators_are_right_and_free_of_races() {
    for operator in tensor_operators() {
        for (seed, [rows, cols]) in [[1, 1], [3, 31], [4, 32], [5, 33], [2, 300], [17, 129]].into_iter().enumerate() {
            check(operator, rows, cols, seed as u64);
        }
    }
}

#[test]
fn nothing_is_launched_for_an_output_without_elements() {
    for operator in tensor_operators() {
        let types = (operator.example)(0, 0);
        let tensors = random(&types, &mut Rng::new(1));
        let views: Vec<TensorView<'_>> = tensors.iter().map(Tensor::view).collect();
        assert!(session(1).apply_to_host(operator, &views).unwrap().shape().contains(&0), "{}", operator.name);
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let operator = tensor_operators().find(|operator| operator.name == "row_dot").unwrap();
    let session = session(1);
    let tensor = |shape: &[usize]| Tensor::zeros(DType::F32, shape).unwrap();
    let (x, y) = (tensor(&[4, 8]), tensor(&[4, 9]));
    let refused = |inputs: &[TensorView<'_>]| session.apply_to_host(operator, inputs).unwrap_err().to_string();
    assert_eq!(refused(&[x.view()]), "`row_dot` got 1 tensors, allowed: 2, which are x, y");
    assert_eq!(
        refused(&[x.view(), y.view()]),
        "`y` is f32 [4, 9], allowed: f32 [4, 8], as x; both have the same rows and columns"
    );
    let half = Tensor::zeros(DType::F16, &[4, 8]).unwrap();
    assert_eq!(
        refused(&[half.view(), x.view()]),
        "`x` is f16 [4, 8], allowed: f32 [rows, cols]; convert or reshape it"
    );

    let sim = session.device();
    let buffers = [sim.zeroed(4096).unwrap(), sim.zeroed(4096).unwrap(), sim.zeroed(64).unwrap()];
    let memory = buffers.each_ref().map(|buffer| DeviceSpan::of(&**sim, buffer));
    let on = |i: usize, strides| TensorView::on_device(&memory[i], DType::F32, &[4, 8], strides).unwrap();
    let apply = |inputs: &[TensorView<'_>], shape: &[usize]| {
        let mut z = TensorViewMut::on_device(&memory[2], DType::F32, shape, None).unwrap();
        session.apply(operator, inputs, &mut z, Stream::default()).map_err(|e| e.to_string())
    };
    assert_eq!(apply(&[on(0, None), on(1, None)], &[4]), Ok(()));
    assert_eq!(
        apply(&[on(0, None), on(1, Some(&[16, 1]))], &[4]).unwrap_err(),
        "`y` has strides [16, 1], allowed: contiguous; make it contiguous"
    );
    assert_eq!(
        apply(&[on(0, None), on(1, None)], &[5]).unwrap_err(),
        "`output` is f32 [5], allowed: f32 [4]; allocate it from the types of the inputs"
    );
    assert_eq!(apply(&[on(0, None), x.view()], &[4]).unwrap_err(), "`y` is on cpu, allowed: sim:0; move it there");
}
