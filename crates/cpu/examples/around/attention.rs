//! Block skipping, Parallax and Lighthouse beside our own dense causal attention.

use super::{Line, race, random};
use fulgurite_core::lighthouse::{Lighthouse, TILE};
use fulgurite_core::parallax::{Parallax, ParallaxForward};
use fulgurite_core::random::Rng;
use fulgurite_core::skip::{HeadClass, Lambda, Skip, SkipProblem};
use fulgurite_core::{DType, Forward, Gradients, Inputs, Mask, Problem, ProblemBuilder, Saved, Tensor, TensorView};
use fulgurite_cpu::{
    Options, backward, forward, lighthouse_backward, lighthouse_forward, parallax_forward, skip_forward,
};

/// The most resident memory of this process so far, in MiB.
fn peak_mebibytes() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes: f64 = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(f64::NAN);
    kibibytes / 1024.0
}

/// `[batch, sequence, heads, dim]` with each head in one piece.
fn heads_outside<'a>(x: &'a Tensor, shape: &[usize]) -> TensorView<'a> {
    let [_, n, h, d] = [shape[0], shape[1], shape[2], shape[3]];
    TensorView::strided(x.view().data(), shape, &[h * n * d, d, n * d, 1]).expect("strides that fit")
}

fn options(threads: usize) -> Options {
    Options { threads: Some(threads), ..Options::default() }
}

/// The tensors of block skipping, 8192 keys, 8 heads of 64.
struct Long {
    dense: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: Vec<usize>,
}

const LONG: [usize; 3] = [8192, 8, 64];

fn builder(dtype: DType) -> ProblemBuilder {
    let [n, h, d] = LONG;
    Problem::builder().dense(1, n, n).heads(h, h).head_dim(d).dtype(dtype).mask(Mask::causal())
}

impl Long {
    fn new(dtype: DType) -> Long {
        let [n, _, d] = LONG;
        let dense = builder(dtype).build().expect("a problem");
        let rng = &mut Rng::new(1);
        let shape = dense.q_shape();
        let mut of = |by: f64| random(rng, dtype, &shape, |x| by * x);
        let (q, v) = (of(8.0), of(1.0));
        // For the skip in the kernel: three of ten tiles of keys matter.
        let keys: Vec<f64> = {
            let all = of(1.0).view().to_f64();
            all.into_iter().enumerate().map(|(i, x)| if i / d % n / 128 % 10 < 3 { x } else { 0.05 * x }).collect()
        };
        let k = Tensor::from_f64(dtype, &keys, &shape).expect("keys");
        Long { dense, q, k, v, shape }
    }

    fn inputs(&self) -> Inputs<'_> {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| heads_outside(x, &self.shape));
        Inputs::new(q, k, v)
    }
}

fn windows(dtype: DType) -> SkipProblem {
    let classes = vec![HeadClass::Window { keys: 128, sinks: 16 }];
    SkipProblem::new(builder(dtype), Skip { classes, tile: [64, 128], ..Skip::default() }).expect("a problem")
}

fn lambda(dtype: DType) -> SkipProblem {
    let skip = Skip { lambda: Some(Lambda::Fixed(1e-3)), tile: [64, 128], ..Skip::default() };
    SkipProblem::new(builder(dtype), skip).expect("a problem")
}

/// Windows, or the skip in the kernel, many times and nothing else, for a profiler.
fn alone(what: &str, problem: fn(DType) -> SkipProblem, rounds: usize, threads: usize) -> Vec<Line> {
    let one = |dtype: DType| {
        let (long, problem) = (Long::new(dtype), problem(dtype));
        let inputs = long.inputs();
        let bound = problem.bind(&inputs).expect("fits");
        let mut out = Forward::zeros(&long.dense).expect("outputs");
        let [time] = race(
            rounds,
            [&mut || {
                skip_forward(&bound, &mut out.outputs(), &options(threads));
            }],
        );
        Line(format!("{what}, {dtype}"), vec![("seconds".into(), time)])
    };
    vec![one(DType::F32), one(DType::Bf16)]
}

pub fn window_alone(threads: usize) -> Vec<Line> {
    alone("window 128, 16 sinks", windows, 40, threads)
}

pub fn skip_alone(threads: usize) -> Vec<Line> {
    alone("skip in the kernel", lambda, 10, threads)
}

pub fn window(threads: usize) -> Vec<Line> {
    let one = |dtype: DType| {
        let (long, window) = (Long::new(dtype), windows(dtype));
        let inputs = long.inputs();
        let (all, some) = (inputs.bind(&long.dense).expect("fits"), window.bind(&inputs).expect("fits"));
        let mut outs: [Forward; 2] = std::array::from_fn(|_| Forward::zeros(&long.dense).expect("outputs"));
        let [a, b] = &mut outs;
        let [dense, windowed] = race(
            9,
            [
                &mut || {
                    forward(&all, &mut a.outputs(), &options(threads));
                },
                &mut || {
                    skip_forward(&some, &mut b.outputs(), &options(threads));
                },
            ],
        );
        Line(
            format!("window 128, 16 sinks, {dtype}, 8192 keys, causal, 8 heads, d 64"),
            vec![
                ("dense_seconds".into(), dense),
                ("window_seconds".into(), windowed),
                ("dense_over_window".into(), dense / windowed),
            ],
        )
    };
    vec![one(DType::F32), one(DType::Bf16)]
}

pub fn skip(threads: usize) -> Vec<Line> {
    let one = |dtype: DType| {
        let long = Long::new(dtype);
        let inputs = long.inputs();
        let lambda = lambda(dtype);
        let (bound, some) = (inputs.bind(&long.dense).expect("fits"), lambda.bind(&inputs).expect("fits"));
        let mut outs: [Forward; 2] = std::array::from_fn(|_| Forward::zeros(&long.dense).expect("outputs"));
        let [a, b] = &mut outs;
        let mut outcome = None;
        let [all, dropped] = race(
            9,
            [
                &mut || {
                    forward(&bound, &mut a.outputs(), &options(threads));
                },
                &mut || outcome = Some(skip_forward(&some, &mut b.outputs(), &options(threads))),
            ],
        );
        let outcome = outcome.expect("a run");
        let pairs = outs[1].o.view().to_f64().into_iter().zip(outs[0].o.view().to_f64());
        let error = pairs.map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
        let share = 1.0 - outcome.counts.kept as f64 / outcome.counts.visible as f64;
        Line(
            format!("skip in the kernel, {dtype}, 8192 keys, causal, 8 heads, d 64"),
            vec![
                ("dense_seconds".into(), all),
                ("lambda_seconds".into(), dropped),
                ("dense_over_lambda".into(), all / dropped),
                ("skipped_share".into(), share),
                ("error".into(), error),
                ("error_bound".into(), outcome.error_bound),
            ],
        )
    };
    vec![one(DType::F32), one(DType::Bf16)]
}

pub fn parallax(threads: usize) -> Vec<Line> {
    parallax_beside(true, threads)
}

/// Parallax's forward many times and nothing else, for a profiler.
pub fn parallax_alone(threads: usize) -> Vec<Line> {
    parallax_beside(false, threads)
}

fn parallax_beside(attention: bool, threads: usize) -> Vec<Line> {
    let mut lines = Vec::new();
    for dtype in [DType::F32, DType::Bf16] {
        for (name, q_len, n, heads, kv, d, rounds) in
            [("forward, causal", 2048, 2048, 8, 8, 64, 31), ("decode", 1, 16384, 8, 8, 128, 31)]
        {
            let problem = Problem::builder().dense(1, q_len, n).heads(heads, kv).head_dim(d).dtype(dtype);
            let problem = problem.mask(Mask::causal()).build().expect("a problem");
            let parallax = Parallax::new(problem.clone()).expect("a problem");
            let rng = &mut Rng::new(1);
            let mut of = |shape: Vec<usize>, by: f64| random(rng, dtype, &shape, |x| by * x);
            let (q, r) = (of(problem.q_shape(), 1.0), of(problem.q_shape(), 0.1));
            let (k, v) = (of(problem.k_shape(), 1.0), of(problem.v_shape(), 1.0));
            let (qs, ks) = (problem.q_shape(), problem.k_shape());
            let (qv, rv) = (heads_outside(&q, &qs), heads_outside(&r, &qs));
            let inputs = Inputs::new(qv, heads_outside(&k, &ks), heads_outside(&v, &ks));
            let (bound, both) = (inputs.bind(&problem).expect("fits"), parallax.bind(&inputs, rv).expect("fits"));
            let mut a = Forward::zeros(&problem).expect("outputs");
            let mut b = ParallaxForward::zeros(&parallax).expect("outputs");
            let mut corrected = || parallax_forward(&both, &mut b.outputs(), &options(threads));
            let what = format!("parallax {name}, {dtype}, {q_len} queries, {n} keys, {heads} heads, d {d}");
            if !attention {
                if q_len > 1 {
                    let [seconds] = race(100, [&mut corrected]);
                    lines.push(Line(what, vec![("seconds".into(), seconds)]));
                }
                continue;
            }
            let mut plain = || {
                forward(&bound, &mut a.outputs(), &options(threads));
            };
            let [plain, corrected] = race(rounds, [&mut plain, &mut corrected]);
            lines.push(Line(
                what,
                vec![
                    ("attention_seconds".into(), plain),
                    ("parallax_seconds".into(), corrected),
                    ("parallax_over_attention".into(), corrected / plain),
                ],
            ));
        }
    }
    lines
}

pub fn lighthouse(threads: usize) -> Vec<Line> {
    [(32768, DType::F32), (32768, DType::Bf16), (65536, DType::F32)]
        .into_iter()
        .flat_map(|(n, dtype)| lighthouse_beside_dense(n, dtype, threads))
        .collect()
}

fn lighthouse_beside_dense(n: usize, dtype: DType, threads: usize) -> Vec<Line> {
    let d = 64;
    let light = Lighthouse::new([1, n, 1, 1], [d, d], 3, 4, n / 64, TILE).and_then(|light| light.dtype(dtype));
    let light = light.expect("a problem");
    let problem = Problem::builder().dense(1, n, n).heads(1, 1).head_dim(d).mask(Mask::causal()).dtype(dtype).build();
    let problem = problem.expect("a problem");
    let rng = &mut Rng::new(1);
    let mut of = || random(rng, dtype, &[1, n, 1, d], |x| x);
    let [q, k, v, d_o] = [of(), of(), of(), of()];
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let bound = inputs.bind(&problem).expect("fits");
    let before = peak_mebibytes();
    let mut picked = || {
        let out = lighthouse_forward(&light, &q.view(), &k.view(), &v.view(), &options(threads)).expect("forward");
        lighthouse_backward(&light, &out, &d_o.view(), &options(threads)).expect("backward");
    };
    picked();
    let memory = peak_mebibytes() - before;
    let [dense, picked] = race(
        1,
        [
            &mut || {
                let mut out = Forward::zeros(&problem).expect("outputs");
                forward(&bound, &mut out.outputs(), &options(threads));
                let mut gradients = Gradients::zeros(&problem).expect("gradients");
                let saved = Saved { d_lse: None, ..out.saved(d_o.view()) };
                backward(&bound, &saved, &mut gradients.outputs(), &options(threads));
            },
            &mut picked,
        ],
    );
    vec![Line(
        format!("lighthouse forward and backward, {dtype}, {n} tokens, 1 head, d {d}, L 3, p 4, k n/64"),
        vec![
            ("dense_seconds".into(), dense),
            ("lighthouse_seconds".into(), picked),
            ("dense_over_lighthouse".into(), dense / picked),
            ("picked".into(), light.picked() as f64),
            ("peak_mebibytes_above_inputs".into(), memory),
            ("inputs_mebibytes".into(), (4 * n * d * dtype.size_bytes()) as f64 / (1 << 20) as f64),
        ],
    )]
}
