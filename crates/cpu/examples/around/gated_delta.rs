//! The gated delta rule: chunked beside recurrent, length, threads with one head.

use super::{Line, race, random};
use fulgurite_core::gated_delta::{
    DeltaForward, DeltaGradients, DeltaInputs, DeltaSaved, GatedDelta, QkNorm, check_forward,
};
use fulgurite_core::random::Rng;
use fulgurite_core::{DType, Tensor};
use fulgurite_cpu::{DeltaForm, DeltaSegments, Isa, Options, gated_delta_backward, gated_delta_forward};

struct Case {
    problem: GatedDelta,
    tensors: [Tensor; 5],
    d_o: Tensor,
}

impl Case {
    /// Gates decay by e^-`decay` a token on average.
    fn new(len: usize, heads: [usize; 2], dtype: DType, decay: f64) -> Case {
        let builder = GatedDelta::builder().dense(1, len).heads(heads[0], heads[1]).head_dim(128);
        let problem = builder.dtype(dtype).qk_norm(QkNorm::Inside).build().expect("a problem");
        let rng = &mut Rng::new(1);
        let mut of = |shape: &[usize], dtype, map: fn(f64) -> f64, by: f64| random(rng, dtype, shape, |x| by * map(x));
        let gates = problem.gate_shape();
        let same = |x: f64| x;
        Case {
            tensors: [
                of(&problem.q_shape(), dtype, same, 1.0),
                of(&problem.q_shape(), dtype, same, 1.0),
                of(&problem.v_shape(), dtype, same, 1.0),
                of(&gates, DType::F32, |x| -(1.0 + x.exp()).ln() / 0.8, decay),
                of(&gates, DType::F32, |x| 1.0 / (1.0 + (-x).exp()), 1.0),
            ],
            d_o: of(&problem.v_shape(), dtype, same, 1.0),
            problem,
        }
    }

    fn inputs(&self) -> DeltaInputs<'_> {
        let [q, k, v, g, beta] = self.tensors.each_ref().map(Tensor::view);
        DeltaInputs::new(q, k, v, g, beta)
    }
}

fn seconds<const N: usize>(
    case: &Case,
    rounds: usize,
    isa: Option<Isa>,
    how: [(DeltaForm, DeltaSegments, usize); N],
) -> [f64; N] {
    let inputs = case.inputs();
    let bound = inputs.bind(&case.problem).expect("tensors that fit");
    let bound = &bound;
    let mut calls = how.map(|(form, segments, threads)| {
        let mut out = DeltaForward::zeros(&case.problem).expect("outputs");
        let options = Options { threads: Some(threads), isa, ..Options::default() };
        move || {
            gated_delta_forward(bound, &mut out.outputs(), form, segments, &options);
        }
    });
    race(rounds, calls.each_mut().map(|call| call as &mut dyn FnMut()))
}

/// The chunked form many times and nothing else, for a profiler.
pub fn alone(threads: usize) -> Vec<Line> {
    let one = |dtype: DType| {
        let case = Case::new(4096, [16, 32], dtype, 0.1);
        let [time] = seconds(&case, 25, None, [(DeltaForm::Chunked, DeltaSegments::Whole, threads)]);
        Line(format!("gated delta rule, {dtype}, chunked"), vec![("seconds".into(), time)])
    };
    vec![one(DType::F32), one(DType::Bf16)]
}

/// Gradients beside forward: many heads, and one.
pub fn backward(threads: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for (len, heads) in [(4096, [16, 32]), (3001, [8, 8]), (16384, [1, 1])] {
            let case = Case::new(len, heads, dtype, 0.1);
            let inputs = case.inputs();
            let bound = inputs.bind(&case.problem).expect("tensors that fit");
            let options = Options { threads: Some(threads), ..Options::default() };
            let mut out = DeltaForward::zeros(&case.problem).expect("outputs");
            let mut gradients = DeltaGradients::zeros(&case.problem).expect("gradients");
            let saved = DeltaSaved { d_o: case.d_o.view(), d_final_state: None };
            let segments = DeltaSegments::Auto;
            let [forward, backward] = race(
                5,
                [
                    &mut || {
                        gated_delta_forward(&bound, &mut out.outputs(), DeltaForm::Chunked, segments, &options);
                    },
                    &mut || gated_delta_backward(&bound, &saved, &mut gradients.outputs(), &options),
                ],
            );
            lines.push(Line(
                format!("gated delta rule, {dtype}, {len} tokens, {} value heads over {}, d 128", heads[1], heads[0]),
                vec![
                    ("forward_seconds".into(), forward),
                    ("backward_seconds".into(), backward),
                    ("backward_over_forward".into(), backward / forward),
                ],
            ));
        }
    }
    lines
}

pub fn measure(threads: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    let whole = DeltaSegments::Whole;
    for dtype in [DType::F32, DType::Bf16] {
        let case = Case::new(4096, [16, 32], dtype, 0.1);
        let how = [(DeltaForm::Chunked, whole, threads), (DeltaForm::Recurrent, whole, threads)];
        let [chunked, recurrent] = seconds(&case, 5, None, how);
        let mut gradients = DeltaGradients::zeros(&case.problem).expect("gradients");
        let inputs = case.inputs();
        let bound = inputs.bind(&case.problem).expect("tensors that fit");
        let options = Options { threads: Some(threads), ..Options::default() };
        let saved = DeltaSaved { d_o: case.d_o.view(), d_final_state: None };
        let [backward] = race(1, [&mut || gated_delta_backward(&bound, &saved, &mut gradients.outputs(), &options)]);
        let mut out = DeltaForward::zeros(&case.problem).expect("outputs");
        gated_delta_forward(&bound, &mut out.outputs(), DeltaForm::Chunked, whole, &options);
        let right = check_forward(&bound, &out, 1).iter().all(|(_, verdict)| verdict.ok());
        lines.push(Line(
            format!("gated delta rule, {dtype}, 4096 tokens, 32 value heads over 16, d 128"),
            vec![
                ("chunked_seconds".into(), chunked),
                ("recurrent_seconds".into(), recurrent),
                ("recurrent_over_chunked".into(), recurrent / chunked),
                ("backward_seconds".into(), backward),
                ("right".into(), f64::from(u8::from(right))),
            ],
        ));
    }
    for dtype in [DType::F32, DType::Bf16] {
        // The lengths in turn, so that whatever else the machine does meets all of them.
        let lengths = [1024usize, 4096, 16384, 65536];
        let cases = lengths.map(|len| Case::new(len, [2, 2], dtype, 0.1));
        let inputs = cases.each_ref().map(Case::inputs);
        let mut calls: [_; 4] = std::array::from_fn(|i| {
            let bound = inputs[i].bind(&cases[i].problem).expect("tensors that fit");
            let mut out = DeltaForward::zeros(&cases[i].problem).expect("outputs");
            let options = Options { threads: Some(threads), ..Options::default() };
            // Short ones several times: as many tokens each.
            move || {
                for _ in 0..65536 / lengths[i] {
                    gated_delta_forward(&bound, &mut out.outputs(), DeltaForm::Chunked, whole, &options);
                }
            }
        });
        let times = race(9, calls.each_mut().map(|call| call as &mut dyn FnMut()));
        let numbers = lengths.iter().zip(times).map(|(len, time)| (format!("us_a_token_{len}"), time / 65536.0 * 1e6));
        let numbers = numbers.collect();
        lines.push(Line(format!("gated delta rule, {dtype}, 2 heads, d 128, uncut: time by length"), numbers));
    }
    for dtype in [DType::F32, DType::Bf16] {
        // Beside the best instruction set the vectors, which no matrix unit holds back.
        let vectors = Some(Isa::Avx512).filter(|isa| Isa::available().contains(isa));
        let ways = [
            ("decaying", DeltaSegments::Auto, None),
            ("exact", DeltaSegments::Exact, None),
            ("decaying, by vectors,", DeltaSegments::Auto, vectors),
        ];
        for (name, how, isa) in ways {
            let case = Case::new(16384, [1, 1], dtype, 0.1);
            let form = DeltaForm::Chunked;
            let ways = [(form, how, 1), (form, how, threads), (form, whole, 1)];
            let [one, many, uncut] = seconds(&case, 7, isa, ways);
            lines.push(Line(
                format!("gated delta rule, {dtype}, 16384 tokens, 1 head, {name} segments"),
                vec![
                    ("one_thread_seconds".into(), one),
                    ("threads_seconds".into(), many),
                    ("scaling".into(), one / many),
                    ("over_uncut_on_one_thread".into(), uncut / many),
                ],
            ));
        }
    }
    lines
}
