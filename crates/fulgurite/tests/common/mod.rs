//! A forward call on the simulated GPU against the oracle, by the tolerance rule.

use fulgurite::{Choice, engine};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Forward, Inputs, Outputs, ProblemBuilder, Tensor, compare};

/// What a call has beside q, k and v.
#[derive(Default)]
pub struct More {
    pub sinks: Option<Vec<f64>>,
    pub used: [Option<Vec<f64>>; 2],
    pub offsets: Option<[Vec<f64>; 2]>,
    /// A value that a key holds in all its elements: NaN or infinite for one that must not show.
    pub poison: Option<(usize, f64)>,
    /// f32.
    pub aux: Vec<(&'static str, Vec<f64>)>,
}

fn ints(values: &[f64]) -> Tensor {
    Tensor::from_f64(DType::I32, values, &[values.len()]).unwrap()
}

/// Random inputs in this type.
pub fn check(name: &str, dtype: DType, builder: ProblemBuilder, more: &More) {
    let problem = builder.dtype(dtype).build().unwrap();
    let mut rng = Rng::new(3);
    let mut draw = |shape: &[usize], poison: Option<(usize, f64)>| {
        let mut numbers = rng.normals(shape.iter().product(), 1.0);
        if let Some((key, x)) = poison {
            let row = shape[shape.len() - 2] * shape[shape.len() - 1];
            numbers[key * row..(key + 1) * row].fill(x);
        }
        Tensor::from_f64(dtype, &numbers, shape).unwrap()
    };
    let q = draw(&problem.q_shape(), None);
    let [k, v] = [draw(&problem.k_shape(), None), draw(&problem.v_shape(), more.poison)];
    let sinks = more.sinks.as_ref().map(|s| Tensor::from_f64(DType::F32, s, &[s.len()]).unwrap());
    let used = [0, 1].map(|side| more.used[side].as_deref().map(ints));
    let offsets = more.offsets.as_ref().map(|both| [0, 1].map(|side| ints(&both[side])));
    let aux: Vec<(&str, Tensor)> =
        more.aux.iter().map(|(name, x)| (*name, Tensor::from_f64(DType::F32, x, &[x.len()]).unwrap())).collect();
    let mut inputs = Inputs::new(q.view(), k.view(), v.view())
        .used_lengths(used[0].as_ref().map(Tensor::view), used[1].as_ref().map(Tensor::view));
    if let Some(sinks) = &sinks {
        inputs = inputs.sinks(sinks.view());
    }
    if let Some([q, k]) = &offsets {
        inputs = inputs.cu_seqlens(q.view(), k.view());
    }
    for (name, tensor) in &aux {
        inputs = inputs.aux(*name, tensor.view());
    }
    let mut got = Forward::zeros(&problem).unwrap();
    let mut outputs = Outputs { o: got.o.view_mut(), lse: got.lse.view_mut() };
    engine(Choice::Sim).unwrap().forward_into(&problem, &inputs, &mut outputs, &Default::default()).unwrap();
    let bound = inputs.bind(&problem).unwrap();
    for (tensor, verdict) in compare::check_forward(&bound, &got, 0) {
        assert!(verdict.ok(), "{name} ({dtype}): {tensor}: {verdict}");
    }
}
