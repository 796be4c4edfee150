//! Random masks, biases and score modifiers against the oracle: odd lengths, groups of heads, strides, all types and every
//! instruction set, forward and backward.

use fulgurite_core::compare::{check_backward, check_forward};
use fulgurite_core::expr::{Expr, batch, head, k, k_len, load, q, q_len, score, select};
use fulgurite_core::random::Rng;
use fulgurite_core::{Bound, DType, Forward, Gradients, Inputs, Mask, Problem, ProblemBuilder, Tensor, TensorView};
use fulgurite_cpu::{Isa, Options, backward, forward};

/// Sizes of a problem, and the tensors that its expressions read.
struct Draw {
    rng: Rng,
    sizes: [usize; 4],
    aux: Vec<(&'static str, DType, Vec<usize>, bool)>,
}

impl Draw {
    fn coin(&mut self) -> bool {
        self.rng.chance(0.5)
    }

    /// Declares a tensor of floats, the last one perhaps with a gradient.
    fn floats(&mut self, name: &'static str, shape: &[usize]) {
        let dtype = self.rng.pick(&[DType::F32, DType::F16, DType::Bf16]);
        let grad = self.rng.chance(0.2);
        self.aux.push((name, dtype, shape.to_vec(), grad));
    }

    fn integers(&mut self, name: &'static str, shape: &[usize]) {
        self.aux.push((name, DType::I32, shape.to_vec(), false));
    }

    /// A modifier of the score.
    fn modifier(&mut self) -> Expr {
        let [batches, heads, q_most, k_most] = self.sizes;
        let away = || (q() + k_len() - q_len() - k()).abs().to_float();
        match self.rng.range(0..13) {
            0 => {
                self.floats("slopes", &[heads]);
                score() - load("slopes", [head()]).abs() * 0.1 * away()
            }
            1 => score() + (k() - q()).to_float() * 0.02,
            2 => 4.0 * (score() / 4.0).tanh(),
            3 => {
                self.floats("full", &[heads, q_most, k_most]);
                score() + load("full", [head(), q(), k()])
            }
            4 => {
                self.floats("of keys", &[batches, k_most]);
                score() + load("of keys", [batch(), k()])
            }
            5 => {
                self.floats("table", &[heads, q_most + k_most]);
                score() + load("table", [head(), q() - k() + k_most as i32])
            }
            6 => {
                self.floats("near", &[33]);
                score() + load("near", [(k() - q()).max(-16).min(16) + 16])
            }
            7 => {
                self.floats("turned", &[k_most, q_most]);
                score() * 0.5 - load("turned", [k(), q()])
            }
            8 => select((k() / 3).equals(q() / 3), score() + 1.0, score() * 0.5),
            9 => score() - (away() + 1.0).log() * 0.3,
            10 => score().max(-1.5) + (score() * 0.25).exp().min(2.0),
            11 => {
                self.integers("buckets", &[q_most + k_most]);
                self.floats("of buckets", &[9, heads]);
                let bucket = load("buckets", [k() - q() + q_most as i32]);
                score() + load("of buckets", [bucket, head()])
            }
            _ => select((k() % 5).less(4), score(), f32::NEG_INFINITY),
        }
    }

    /// A condition that hides keys.
    fn condition(&mut self) -> Expr {
        let [batches, heads, q_most, k_most] = self.sizes;
        match self.rng.range(0..6) {
            0 => {
                self.integers("keep", &[batches, k_most]);
                load("keep", [batch(), k()]).differs(0)
            }
            1 => {
                self.integers("documents", &[q_most.max(k_most)]);
                (load("documents", [q()]) / 4).equals(load("documents", [k()]) / 4)
            }
            2 => {
                self.integers("holes", &[q_most, k_most]);
                load("holes", [q(), k()]).differs(0)
            }
            3 => {
                self.integers("holes of heads", &[heads, q_most, k_most]);
                load("holes of heads", [head(), q(), k()]).differs(0)
            }
            4 => (k() % 7).differs(3) | q().equals(k()),
            // Left padding: whole blocks of the first keys are hidden.
            _ => k().at_least(k_len() / 3 + batch() * 2),
        }
    }

    fn problem(&mut self) -> Problem {
        let dtype = self.rng.pick(&[DType::F32, DType::F16, DType::Bf16, DType::Bf16]);
        let [batches, heads, q_most, k_most] = self.sizes;
        let kv_heads = if self.coin() { heads } else { 1 };
        let d = self.rng.pick(&[24, 64, 64, 128]);
        let spans = self.rng.range(0..4);
        let base = match spans {
            0 => Mask::causal(),
            1 => Mask::window(Some(40), Some(9)),
            _ => Mask::none(),
        };
        let kind = self.rng.range(0..3);
        let mask = if kind != 1 { base.and(Mask::custom(self.condition())) } else { base };
        let mut builder: ProblemBuilder = Problem::builder().dense(batches, q_most, k_most);
        builder = builder.heads(heads, kv_heads).head_dim(d).dtype(dtype).mask(mask);
        if kind != 0 {
            builder = builder.score_mod(self.modifier());
        }
        for (name, dtype, shape, grad) in &self.aux {
            builder = if *grad { builder.aux_with_grad(name, *dtype, shape) } else { builder.aux(name, *dtype, shape) };
        }
        builder.build().unwrap()
    }

    /// A tensor, perhaps with gaps between its rows.
    fn tensor(&mut self, dtype: DType, shape: &[usize]) -> (Tensor, Vec<usize>) {
        let gap = if self.coin() { 0 } else { 3 };
        let mut strides = vec![1; shape.len()];
        for axis in (0..shape.len() - 1).rev() {
            let inner =
                if axis + 2 == shape.len() { shape[axis + 1] + gap } else { strides[axis + 1] * shape[axis + 1] };
            strides[axis] = inner;
        }
        let n = strides[0] * shape[0];
        let values: Vec<f64> = match dtype {
            // Zeros hide, ids are small, and both come in runs.
            DType::I32 => (0..n).map(|i| ((i / 37 + self.rng.range(0..3)) % 9) as f64).collect(),
            _ => self.rng.normals(n, 1.0),
        };
        (Tensor::from_f64(dtype, &values, &[n]).unwrap(), strides)
    }
}

fn run(bound: &Bound<'_>, d_o: TensorView<'_>, options: &Options) -> (Forward, Gradients) {
    let mut result = Forward::zeros(bound.problem()).unwrap();
    forward(bound, &mut result.outputs(), options);
    let mut gradients = Gradients::zeros(bound.problem()).unwrap();
    backward(bound, &result.saved(d_o), &mut gradients.outputs(), options);
    (result, gradients)
}

fn check(seed: u64, isas: &[Isa]) -> Vec<String> {
    let mut rng = Rng::new(seed);
    let sizes = [rng.range(1..3), rng.pick(&[1, 2, 4]), rng.range(1..150), rng.range(1..330)];
    let mut draw = Draw { rng, sizes, aux: Vec::new() };
    let problem = draw.problem();
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let own = shapes.each_ref().map(|shape| draw.tensor(problem.dtype(), shape));
    let specs = draw.aux.clone();
    let aux: Vec<_> = specs.iter().map(|(_, dtype, shape, _)| draw.tensor(*dtype, shape)).collect();
    let view = |(tensor, strides): &'_ (Tensor, Vec<usize>), shape: &[usize]| -> TensorView<'static> {
        // Tensors live until the end of the test.
        let tensor: &'static Tensor = Box::leak(Box::new(tensor.clone()));
        TensorView::strided(tensor.view().data(), shape, strides).unwrap()
    };
    let [q, k, v, d_o] = [0, 1, 2, 3].map(|i| view(&own[i], &shapes[i]));
    let mut inputs = Inputs::new(q, k, v);
    for ((name, _, shape, _), own) in specs.iter().zip(&aux) {
        inputs = inputs.aux(name, view(own, shape));
    }
    let bound = inputs.bind(&problem).unwrap();
    let mut failed = Vec::new();
    for &isa in isas {
        let options = |threads| Options { isa: Some(isa), threads: Some(threads), ..Options::default() };
        let (result, gradients) = run(&bound, d_o, &options(1));
        let mut verdicts = check_forward(&bound, &result, 1);
        verdicts.extend(check_backward(&bound, &result.saved(d_o), &gradients, 1));
        let wrong = verdicts.into_iter().filter(|(_, verdict)| !verdict.ok());
        failed.extend(wrong.map(|(name, verdict)| format!("{seed} {isa:?} {problem:?}: {name}: {verdict}")));
        let (again, others) = run(&bound, d_o, &options(3));
        let bits = |f: &Forward, g: &Gradients| -> Vec<u64> {
            let views = [f.o.view(), f.lse.view(), g.d_q.view(), g.d_k.view(), g.d_v.view()];
            views.iter().flat_map(|v| v.to_f64()).map(f64::to_bits).collect()
        };
        if bits(&result, &gradients) != bits(&again, &others) {
            failed.push(format!("{seed} {isa:?} {problem:?}: other bits with 3 threads"));
        }
    }
    failed
}

/// A mask that hides the keys past each sequence's length is an interval: it gives the bits of lengths in use, and
/// nothing of what it hides is read.
#[test]
fn padding_gives_the_bits_of_used_lengths() {
    let [batches, heads, tokens, d] = [3, 2, 150, 40];
    let mut rng = Rng::new(5);
    let shape = [batches, tokens, heads, d];
    let lengths = [tokens, 97, 0].map(|n| n as i32);
    let keep: Vec<i32> = lengths.iter().flat_map(|&n| (0..tokens).map(move |j| i32::from((j as i32) < n))).collect();
    let keep = Tensor::new(keep, &[batches, tokens]).unwrap();
    let lengths = Tensor::new(lengths.to_vec(), &[batches]).unwrap();
    for dtype in DType::FLOATS {
        let mut random = || Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), 1.0), &shape).unwrap();
        let [q, k, v, d_o] = [random(), random(), random(), random()];
        let builder = || Problem::builder().dense(batches, tokens, tokens).heads(heads, heads).head_dim(d).dtype(dtype);
        let mask = Mask::custom(load("keep", [batch(), fulgurite_core::expr::k()]).differs(0));
        let masked = builder().mask(mask).aux("keep", DType::I32, &[batches, tokens]).build().unwrap();
        let used = builder().used_lengths(false, true).build().unwrap();
        let inputs = || Inputs::new(q.view(), k.view(), v.view());
        let (padded, short) = (inputs().aux("keep", keep.view()), inputs().used_lengths(None, Some(lengths.view())));
        let (padded, short) = (padded.bind(&masked).unwrap(), short.bind(&used).unwrap());
        // A matrix unit multiplies whole tiles of keys, whose sums may end elsewhere.
        for isa in Isa::available().into_iter().filter(|isa| isa.products() == "vectors") {
            let options = Options { isa: Some(isa), threads: Some(2), ..Options::default() };
            let ((one, d_one), (two, d_two)) = (run(&padded, d_o.view(), &options), run(&short, d_o.view(), &options));
            for (name, a, b) in [
                ("o", &one.o, &two.o),
                ("lse", &one.lse, &two.lse),
                ("d_q", &d_one.d_q, &d_two.d_q),
                ("d_k", &d_one.d_k, &d_two.d_k),
                ("d_v", &d_one.d_v, &d_two.d_v),
            ] {
                let bits = |x: &Tensor| x.view().to_f64().into_iter().map(f64::to_bits).collect::<Vec<_>>();
                assert!(bits(a) == bits(b), "{name} in {dtype} on {isa:?}");
            }
        }
    }
}

/// Steep distances leave most blocks without weight. These are not multiplied, and change nothing.
#[test]
fn blocks_without_weight_add_nothing() {
    let [heads, tokens, d] = [1, 300, 32];
    let mut rng = Rng::new(6);
    let shape = [1, tokens, heads, d];
    // To both sides of a query; towards the first keys; and so that the last keys outweigh all before them.
    let away = || (k() - q()).to_float();
    for (steep, modifier) in [-3.0 * away().max(-away()), away() * -2.0, away() * 2.0].into_iter().enumerate() {
        for dtype in DType::FLOATS {
            let mut random = || Tensor::from_f64(dtype, &rng.normals(shape.iter().product(), 1.0), &shape).unwrap();
            let [q, k, v, d_o] = [random(), random(), random(), random()];
            let problem = Problem::builder().dense(1, tokens, tokens).heads(heads, heads).head_dim(d).dtype(dtype);
            let problem = problem.score_mod(score() + modifier.clone()).build().unwrap();
            let bound = Inputs::new(q.view(), k.view(), v.view()).bind(&problem).unwrap();
            for isa in Isa::available() {
                let options = Options { isa: Some(isa), threads: Some(2), ..Options::default() };
                let (result, gradients) = run(&bound, d_o.view(), &options);
                let mut verdicts = check_forward(&bound, &result, 2);
                verdicts.extend(check_backward(&bound, &result.saved(d_o.view()), &gradients, 2));
                for (name, verdict) in verdicts {
                    assert!(verdict.ok(), "{name} in {dtype} on {isa:?}, slope {steep}: {verdict}");
                }
            }
        }
    }
}

/// One instruction set for each problem; in long tests 1,000 problems on all of them.
#[test]
fn random_modified_problems_agree_with_the_oracle() {
    let (isas, long) = (Isa::available(), std::env::var_os("FULGURITE_LONG").is_some());
    let mut failed = Vec::new();
    for seed in 0..if long { 1000 } else { 80 } {
        let own = seed as usize % isas.len();
        failed.extend(check(seed, if long { &isas } else { &isas[own..=own] }));
    }
    assert!(failed.is_empty(), "{} failures:\n{}", failed.len(), failed.join("\n"));
}
