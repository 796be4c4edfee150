//! Trains a small language model, character by character, on this repository's own documents.
//!
//! What mixes tokens, forward and backward, is fulgurite's: causal attention with grouped heads and ALiBi instead of
//! positions, or the gated delta rule (`train/mixer.rs`). Everything else (embedding, linear layers, RMS norm, GELU, cross
//! entropy, Adam) is written out below in plain f32 loops.
//!
//!     cargo run --release -p fulgurite --example train                        # about half a minute on two cores
//!     cargo run --release -p fulgurite --example train -- --steps 2000        # longer, better
//!     cargo run --release -p fulgurite --example train -- --check-gradients   # the whole model against finite differences
//!     cargo run --release -p fulgurite --example train -- --fp4 [FILE]        # 4-bit attention: before and after training with it
//!     cargo run --release -p fulgurite --example train -- --gated-delta [STEPS [FILE.svg]]  # both mixers, loss by step

#[path = "train/mixer.rs"]
mod mixer;
#[path = "plot.rs"]
mod plot;

use fulgurite::format::GroupFormat;
use fulgurite::{Delta, GroupAttention, Precision, Tensor};
use mixer::{Mixed, Mixer, Output};
use plot::{Plot, Series};
use std::error::Error;

const TEXT: &str = concat!(
    include_str!("../docs/guide/first-steps.md"),
    include_str!("../ARCHITECTURE.md"),
    include_str!("../CONTRIBUTING.md"),
    include_str!("../docs/guide/python.md"),
    include_str!("../docs/guide/writing-a-kernel.md"),
    include_str!("../docs/guide/debugging-without-a-gpu.md"),
    include_str!("../docs/guide/neighbors.md"),
    include_str!("../docs/guide/around-attention.md"),
);

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => train(400),
        ["--steps", n] => train(whole(n)?),
        ["--check-gradients"] => check_gradients(),
        ["--fp4"] => fp4(None),
        ["--fp4", file] => fp4(Some(file)),
        ["--gated-delta"] => mixers(400, None),
        ["--gated-delta", steps] => mixers(whole(steps)?, None),
        ["--gated-delta", steps, file] => mixers(whole(steps)?, Some(file)),
        _ => {
            Err("usage: train [--steps N | --check-gradients | --fp4 [FILE] | --gated-delta [STEPS [FILE.svg]]]".into())
        }
    }
}

fn whole(text: &str) -> Result<usize> {
    Ok(text.parse().map_err(|_| format!("steps are {text}, allowed: a whole number"))?)
}

/// Sizes of a model and of one step of training.
#[derive(Clone, Copy)]
struct Size {
    dim: usize,
    heads: (usize, usize),
    head_dim: usize,
    hidden: usize,
    layers: usize,
    batch: usize,
    context: usize,
}

const SIZE: Size = Size { dim: 64, heads: (4, 2), head_dim: 16, hidden: 192, layers: 2, batch: 8, context: 64 };

fn train(steps: usize) -> Result<()> {
    let size = SIZE;
    let text = Text::new(TEXT);
    let mut random = Random(1);
    let mut model = Model::new(size, Mixer::attention(&size, Precision::Native)?, text.alphabet.len(), &mut random)?;
    let parameters: usize = model.parameters().iter().map(|p| p.w.len()).sum();
    println!("{} characters, {} different, {parameters} parameters", text.tokens.len(), text.alphabet.len());
    let started = std::time::Instant::now();
    let mut losses = Vec::with_capacity(steps);
    for step in 0..steps {
        let (inputs, targets) = text.batch(&size, &mut random);
        losses.push(model.step(&inputs, &targets)?);
        let progress = step as f32 / steps as f32;
        let rate = 4e-3 * (step as f32 / 20.0).min(1.0) * (1.0 - 0.9 * progress);
        for parameter in model.parameters() {
            parameter.adam(rate, step as i32 + 1);
        }
        if (step + 1) % 20 == 0 || step + 1 == steps {
            println!("step {:4}  loss {:.3}  {:.1} s", step + 1, mean(&losses, 20), started.elapsed().as_secs_f64());
        }
    }
    println!("\n{}", text.decode(&model.continue_with(&text.encode("The "), 240, &mut random)?));
    let (first, last) = (losses.first().copied().unwrap_or(0.0), mean(&losses, 20));
    println!("\nloss {first:.3} -> {last:.3}");
    // 60 steps already take a nat off; anything less means that learning is broken.
    assert!(steps < 60 || last < first - 1.0, "the loss did not fall: {first} -> {last}");
    Ok(())
}

/// The training proof: (a) a model trained in f32 until text that it never saw gets no better, (b) the same weights with
/// 4-bit attention, (c) trained on through it, (d) trained on with the naive gradient; beside them f32 trained on by as many
/// steps. Losses over steps go to `file` as comma-separated values, with the results below.
fn fp4(file: Option<&str>) -> Result<()> {
    let size = Size { dim: 64, heads: (4, 2), head_dim: 16, hidden: 192, layers: 2, batch: 8, context: 64 };
    let (steps, more, batches) = (2000, 600, 100);
    let text = Text::new(TEXT);
    let mut random = Random(1);
    let mut model = Model::new(size, Mixer::attention(&size, Precision::Native)?, text.alphabet.len(), &mut random)?;
    let all = Some(GroupFormat::NVFP4);
    let exact = Precision::NVFP4;
    let naive = Precision::Groups(GroupAttention { qk: all, pv: all, delta: Delta::Rounded });
    println!("{} characters, {} held out", text.tokens.len(), text.held_out.len());
    model.learn(&text, &mut random, steps, 4e-3)?;
    let start: Vec<Vec<f32>> = model.parameters().iter().map(|p| p.w.clone()).collect();
    let mut found = vec![("a: f32", model.evaluate(&text.held_out, batches)?)];
    model.mixer = Mixer::attention(&size, exact)?;
    found.push(("b: its weights in fp4", model.evaluate(&text.held_out, batches)?));
    // Everybody goes on from the same weights over the same pieces of text: what is compared is the attention.
    let runs =
        [("c: fp4, trained on", exact), ("d: fp4, naive gradient", naive), ("f32, trained on", Precision::Native)];
    let mut losses = Vec::new();
    for (name, precision) in runs {
        for (parameter, w) in model.parameters().into_iter().zip(&start) {
            *parameter = Parameter::new(parameter.name, w.clone());
        }
        model.mixer = Mixer::attention(&size, precision)?;
        losses.push(model.learn(&text, &mut Random(2), more, 1e-3)?);
        found.push((name, model.evaluate(&text.held_out, batches)?));
    }
    found.iter().for_each(|(name, loss)| println!("{name:>24}: loss {loss:.4} on what was held out"));
    let closed = |i: usize| 100.0 * (found[1].1 - found[i].1) / (found[1].1 - found[0].1);
    println!("closed of the gap between b and a: {:.0} % by c, {:.0} % by d", closed(2), closed(3));
    if let Some(file) = file {
        let row = |i: usize| losses.iter().map(|l| format!("{:.5}", l[i])).collect::<Vec<_>>().join(",");
        let rows: Vec<String> = (0..more as usize).map(|i| format!("{i},{}", row(i))).collect();
        let results: Vec<String> = found.iter().map(|(name, loss)| format!("# {name},{loss:.5}")).collect();
        std::fs::write(file, format!("step,c,d,f32\n{}\n{}\n", rows.join("\n"), results.join("\n")))?;
    }
    assert!(closed(2) >= 80.0, "training through 4-bit attention closed too little");
    Ok(())
}

/// Trains one model with attention and one with the gated delta rule over the same pieces of text; the losses over steps go
/// to `file` as a picture.
fn mixers(steps: usize, file: Option<&str>) -> Result<()> {
    let text = Text::new(TEXT);
    let mut series = Vec::new();
    for (name, mixer) in
        [("attention", Mixer::attention(&SIZE, Precision::Native)?), ("gated delta rule", Mixer::delta(&SIZE)?)]
    {
        let mut random = Random(1);
        let mut model = Model::new(SIZE, mixer, text.alphabet.len(), &mut random)?;
        let parameters: usize = model.parameters().iter().map(|p| p.w.len()).sum();
        let started = std::time::Instant::now();
        let mut losses = Vec::with_capacity(steps);
        let mut pieces = Random(2);
        for step in 0..steps {
            let (inputs, targets) = text.batch(&SIZE, &mut pieces);
            losses.push(model.step(&inputs, &targets)?);
            let rate = 4e-3 * (step as f32 / 20.0).min(1.0) * (1.0 - 0.9 * step as f32 / steps as f32);
            model.parameters().into_iter().for_each(|p| p.adam(rate, step as i32 + 1));
        }
        let (first, last) = (losses.first().copied().unwrap_or(0.0), mean(&losses, 20));
        let seconds = started.elapsed().as_secs_f64();
        println!("{name:>16}: {parameters} parameters, loss {first:.3} -> {last:.3} in {steps} steps, {seconds:.1} s");
        assert!(steps < 30 || last < first - 0.7, "the loss of {name} did not fall: {first} -> {last}");
        let points = (0..steps).map(|i| ((i + 1) as f64, mean(&losses[..=i], 20))).collect();
        series.push(Series { name: name.into(), points, dots: false });
    }
    if let Some(file) = file {
        let title = "A small language model by what mixes its tokens".into();
        let (x, y) = ("step".into(), "loss, nats a character, mean of 20 steps".into());
        std::fs::write(file, Plot { title, x, y, powers: false, series }.svg())?;
        println!("picture: {file}");
    }
    Ok(())
}

fn mean(losses: &[f64], last: usize) -> f64 {
    let tail = &losses[losses.len().saturating_sub(last)..];
    tail.iter().sum::<f64>() / tail.len() as f64
}

/// Steps along a direction and compares the change of the loss with what the gradient says, one parameter at a time.
fn check_gradients() -> Result<()> {
    let size = Size { dim: 12, heads: (4, 2), head_dim: 5, hidden: 20, layers: 2, batch: 2, context: 9 };
    for (name, mixer) in
        [("attention", Mixer::attention(&size, Precision::Native)?), ("gated delta rule", Mixer::delta(&size)?)]
    {
        println!("{name}");
        check_gradients_of(size, mixer)?;
    }
    println!("all gradients agree");
    Ok(())
}

fn check_gradients_of(size: Size, mixer: Mixer) -> Result<()> {
    let text = Text::new(TEXT);
    let mut random = Random(7);
    let mut model = Model::new(size, mixer, text.alphabet.len(), &mut random)?;
    let (inputs, targets) = text.batch(&size, &mut random);
    model.step(&inputs, &targets)?;
    // The loss is near 4 and known to about 2^-22; over a step of h that is an error of 1e-4 in the slope. Of two steps the
    // third derivative, which depends on the text, is taken out: what is left is of the order of h^4.
    let h = 1e-2;
    for at in 0..model.parameters().len() {
        let parameter = &mut *model.parameters()[at];
        let (start, gradient) = (parameter.w.clone(), parameter.g.clone());
        let norm = length(&gradient);
        // Half along the gradient, so that there is something to see; half elsewhere, so that nothing hides.
        let noise: Vec<f32> = gradient.iter().map(|_| random.normal()).collect();
        let scale = length(&noise);
        let direction: Vec<f32> = gradient.iter().zip(&noise).map(|(g, n)| g / norm + n / scale).collect();
        let want: f32 = direction.iter().zip(&gradient).map(|(d, g)| d * g).sum();
        let mut loss_at = |h: f32| -> Result<f64> {
            let moved = start.iter().zip(&direction).map(|(w, d)| w + h * d).collect();
            model.parameters()[at].w = moved;
            Ok(model.forward(&inputs, &targets)?.loss)
        };
        let mut slope_by = |h: f32| -> Result<f64> { Ok((loss_at(h)? - loss_at(-h)?) / f64::from(2.0 * h)) };
        let got = ((4.0 * slope_by(h / 2.0)? - slope_by(h)?) / 3.0) as f32;
        let name = model.parameters()[at].name;
        model.parameters()[at].w = start;
        let difference = (got - want).abs();
        println!("{name:>15}  slope {want:9.5}  by differences {got:9.5}");
        assert!(difference <= 5e-3 * norm + 1e-4, "{name}: {got}, by the gradient {want}");
    }
    Ok(())
}

fn length(x: &[f32]) -> f32 {
    x.iter().map(|x| x * x).sum::<f32>().sqrt()
}

/// A text as numbers. Of every ten stretches of it one is held out: training never sees it.
struct Text {
    alphabet: Vec<char>,
    tokens: Vec<usize>,
    held_out: Vec<usize>,
}

/// Characters of a stretch of the text.
const STRETCH: usize = 512;

impl Text {
    fn new(text: &str) -> Text {
        let mut alphabet: Vec<char> = text.chars().collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let mut this = Text { alphabet, tokens: Vec::new(), held_out: Vec::new() };
        for (i, stretch) in this.encode(text).chunks(STRETCH).enumerate() {
            let to = if i % 10 == 5 { &mut this.held_out } else { &mut this.tokens };
            to.extend(stretch);
        }
        this
    }
    fn encode(&self, text: &str) -> Vec<usize> {
        text.chars().filter_map(|c| self.alphabet.binary_search(&c).ok()).collect()
    }
    fn decode(&self, tokens: &[usize]) -> String {
        tokens.iter().map(|&t| self.alphabet[t]).collect()
    }
    /// Random pieces of the text, and the same pieces one character later.
    fn batch(&self, size: &Size, random: &mut Random) -> (Vec<usize>, Vec<usize>) {
        pieces(&self.tokens, size, random)
    }
}

fn pieces(tokens: &[usize], size: &Size, random: &mut Random) -> (Vec<usize>, Vec<usize>) {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for _ in 0..size.batch {
        let start = random.below(tokens.len() - size.context);
        inputs.extend(&tokens[start..start + size.context]);
        targets.extend(&tokens[start + 1..start + 1 + size.context]);
    }
    (inputs, targets)
}

/// Weights, their gradient, and what Adam remembers of earlier gradients.
struct Parameter {
    name: &'static str,
    w: Vec<f32>,
    g: Vec<f32>,
    mean: Vec<f32>,
    square: Vec<f32>,
}

impl Parameter {
    fn new(name: &'static str, w: Vec<f32>) -> Parameter {
        let zeros = vec![0.0; w.len()];
        Parameter { name, w, g: zeros.clone(), mean: zeros.clone(), square: zeros }
    }
    /// Adam (Kingma and Ba, algorithm 1).
    fn adam(&mut self, rate: f32, step: i32) {
        let (b1, b2) = (0.9f32, 0.98f32);
        let (c1, c2) = (1.0 - b1.powi(step), 1.0 - b2.powi(step));
        for (((w, g), m), s) in self.w.iter_mut().zip(&self.g).zip(&mut self.mean).zip(&mut self.square) {
            *m = b1 * *m + (1.0 - b1) * g;
            *s = b2 * *s + (1.0 - b2) * g * g;
            *w -= rate * (*m / c1) / ((*s / c2).sqrt() + 1e-8);
        }
    }
}

/// y = x W, with W of `[inputs, outputs]`.
struct Linear {
    weight: Parameter,
    inputs: usize,
    outputs: usize,
}

impl Linear {
    fn new(name: &'static str, inputs: usize, outputs: usize, random: &mut Random) -> Linear {
        let scale = (inputs as f32).sqrt().recip();
        let weight = Parameter::new(name, (0..inputs * outputs).map(|_| scale * random.normal()).collect());
        Linear { weight, inputs, outputs }
    }
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; x.len() / self.inputs * self.outputs];
        add_product(&mut y, x, &self.weight.w, self.inputs, self.outputs);
        y
    }
    /// dW += x^T dy; gives dx = dy W^T.
    fn backward(&mut self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.inputs;
        add_product(&mut self.weight.g, &transposed(x, self.inputs), dy, rows, self.outputs);
        let mut dx = vec![0.0; x.len()];
        add_product(&mut dx, dy, &transposed(&self.weight.w, self.outputs), self.outputs, self.inputs);
        dx
    }
}

/// y = gain * x / sqrt(mean of x^2 over a row).
struct Norm {
    gain: Parameter,
}

impl Norm {
    fn new(name: &'static str, dim: usize) -> Norm {
        Norm { gain: Parameter::new(name, vec![1.0; dim]) }
    }
    fn inverse(x: &[f32]) -> f32 {
        (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32 + 1e-6).sqrt().recip()
    }
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let mut y = Vec::with_capacity(x.len());
        for row in x.chunks_exact(self.gain.w.len()) {
            let r = Norm::inverse(row);
            y.extend(row.iter().zip(&self.gain.w).map(|(x, gain)| gain * x * r));
        }
        y
    }
    fn backward(&mut self, x: &[f32], dy: &[f32]) -> Vec<f32> {
        let dim = self.gain.w.len();
        let mut dx = vec![0.0; x.len()];
        for ((x, dy), dx) in x.chunks_exact(dim).zip(dy.chunks_exact(dim)).zip(dx.chunks_exact_mut(dim)) {
            let r = Norm::inverse(x);
            let mut dot = 0.0;
            for i in 0..dim {
                self.gain.g[i] += dy[i] * x[i] * r;
                dot += dy[i] * self.gain.w[i] * x[i];
            }
            for i in 0..dim {
                dx[i] = r * (dy[i] * self.gain.w[i] - x[i] * dot * r * r / dim as f32);
            }
        }
        dx
    }
}

struct Layer {
    before_attention: Norm,
    query: Linear,
    key: Linear,
    value: Linear,
    /// Decays and steps of the delta rule.
    gates: Option<[Linear; 2]>,
    merge: Linear,
    before_mlp: Norm,
    up: Linear,
    down: Linear,
}

/// What a layer's backward needs of its forward.
struct LayerSaved {
    x: Vec<f32>,
    normed: Vec<f32>,
    mixed: Mixed,
    output: Output,
    middle: Vec<f32>,
    middle_normed: Vec<f32>,
    up: Vec<f32>,
    bent: Vec<f32>,
}

fn values(tensor: &Tensor) -> &[f32] {
    tensor.as_slice().expect("the problem is f32")
}

impl Layer {
    fn new(size: &Size, mixer: &Mixer, random: &mut Random) -> Layer {
        let [q, k, v] = mixer.heads(size).map(|heads| heads * size.head_dim);
        let o = size.heads.0 * size.head_dim;
        Layer {
            before_attention: Norm::new("attention norm", size.dim),
            query: Linear::new("query", size.dim, q, random),
            key: Linear::new("key", size.dim, k, random),
            value: Linear::new("value", size.dim, v, random),
            gates: mixer.has_gates().then(|| ["decay", "step"].map(|n| Linear::new(n, size.dim, size.heads.0, random))),
            merge: Linear::new("merge", o, size.dim, random),
            before_mlp: Norm::new("mlp norm", size.dim),
            up: Linear::new("up", size.dim, size.hidden, random),
            down: Linear::new("down", size.hidden, size.dim, random),
        }
    }
    fn forward(&self, x: Vec<f32>, mixer: &Mixer) -> Result<(Vec<f32>, LayerSaved)> {
        let normed = self.before_attention.forward(&x);
        let (q, k, v) = (self.query.forward(&normed), self.key.forward(&normed), self.value.forward(&normed));
        let gates = self.gates.as_ref().map(|gates| gates.each_ref().map(|linear| linear.forward(&normed)));
        let mixed = Mixed { q, k, v, gates };
        let output = mixer.forward(&mixed)?;
        let middle = sum(&x, &self.merge.forward(values(&output.o)));
        let middle_normed = self.before_mlp.forward(&middle);
        let up = self.up.forward(&middle_normed);
        let bent: Vec<f32> = up.iter().map(|&x| gelu(x).0).collect();
        let y = sum(&middle, &self.down.forward(&bent));
        Ok((y, LayerSaved { x, normed, mixed, output, middle, middle_normed, up, bent }))
    }
    fn backward(&mut self, saved: &LayerSaved, dy: Vec<f32>, mixer: &Mixer) -> Result<Vec<f32>> {
        let mut d_up = self.down.backward(&saved.bent, &dy);
        d_up.iter_mut().zip(&saved.up).for_each(|(d, &x)| *d *= gelu(x).1);
        let d_normed = self.up.backward(&saved.middle_normed, &d_up);
        let d_middle = sum(&dy, &self.before_mlp.backward(&saved.middle, &d_normed));
        let d_o = self.merge.backward(values(&saved.output.o), &d_middle);
        let d = mixer.backward(&saved.mixed, &saved.output, &d_o)?;
        let from_q = self.query.backward(&saved.normed, values(&d.d_q));
        let from_k = self.key.backward(&saved.normed, values(&d.d_k));
        let from_v = self.value.backward(&saved.normed, values(&d.d_v));
        let mut d_normed = sum(&from_q, &sum(&from_k, &from_v));
        for (linear, d) in self.gates.iter_mut().flatten().zip(d.gates.iter().flatten()) {
            d_normed = sum(&d_normed, &linear.backward(&saved.normed, d));
        }
        Ok(sum(&d_middle, &self.before_attention.backward(&saved.x, &d_normed)))
    }
}

struct Model {
    size: Size,
    mixer: Mixer,
    embedding: Parameter,
    layers: Vec<Layer>,
    last_norm: Norm,
    output: Linear,
}

/// A forward pass over a batch.
struct Pass {
    loss: f64,
    layers: Vec<LayerSaved>,
    last: Vec<f32>,
    normed: Vec<f32>,
    probabilities: Vec<f32>,
}

impl Model {
    fn new(size: Size, mixer: Mixer, alphabet: usize, random: &mut Random) -> Result<Model> {
        let embedding = (0..alphabet * size.dim).map(|_| 0.5 * random.normal()).collect();
        Ok(Model {
            size,
            embedding: Parameter::new("embedding", embedding),
            layers: (0..size.layers).map(|_| Layer::new(&size, &mixer, random)).collect(),
            mixer,
            last_norm: Norm::new("last norm", size.dim),
            output: Linear::new("output", size.dim, alphabet, random),
        })
    }
    /// Trains for some steps, the rate falling to a twentieth; gives the loss of each.
    fn learn(&mut self, text: &Text, random: &mut Random, steps: i32, rate: f32) -> Result<Vec<f64>> {
        let mut losses = Vec::new();
        for step in 0..steps {
            let (inputs, targets) = text.batch(&self.size, random);
            losses.push(self.step(&inputs, &targets)?);
            let rate = rate * (step as f32 / 20.0).min(1.0) * (1.0 - 0.95 * step as f32 / steps as f32);
            self.parameters().into_iter().for_each(|p| p.adam(rate, step + 1));
        }
        Ok(losses)
    }
    /// The mean loss over pieces of text, the same in every call.
    fn evaluate(&self, tokens: &[usize], batches: usize) -> Result<f64> {
        let mut random = Random(99);
        let mut sum = 0.0;
        for _ in 0..batches {
            let (inputs, targets) = pieces(tokens, &self.size, &mut random);
            sum += self.forward(&inputs, &targets)?.loss;
        }
        Ok(sum / batches as f64)
    }
    fn parameters(&mut self) -> Vec<&mut Parameter> {
        let mut all = vec![&mut self.embedding, &mut self.last_norm.gain, &mut self.output.weight];
        for layer in &mut self.layers {
            all.extend([&mut layer.before_attention.gain, &mut layer.before_mlp.gain]);
            let linear = [&mut layer.query, &mut layer.key, &mut layer.value, &mut layer.merge];
            all.extend(linear.map(|linear| &mut linear.weight));
            all.extend(layer.gates.iter_mut().flatten().map(|linear| &mut linear.weight));
            all.extend([&mut layer.up.weight, &mut layer.down.weight]);
        }
        all
    }
    fn forward(&self, tokens: &[usize], targets: &[usize]) -> Result<Pass> {
        let dim = self.size.dim;
        let mut x: Vec<f32> = tokens.iter().flat_map(|&t| &self.embedding.w[t * dim..][..dim]).copied().collect();
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let (y, saved) = layer.forward(x, &self.mixer)?;
            layers.push(saved);
            x = y;
        }
        let normed = self.last_norm.forward(&x);
        let mut probabilities = self.output.forward(&normed);
        let mut loss = 0.0;
        for (row, &target) in probabilities.chunks_exact_mut(self.output.outputs).zip(targets) {
            softmax(row);
            loss -= f64::from(row[target]).ln() / targets.len() as f64;
        }
        Ok(Pass { loss, layers, last: x, normed, probabilities })
    }
    /// Forward and backward: fills every gradient and gives the loss.
    fn step(&mut self, tokens: &[usize], targets: &[usize]) -> Result<f64> {
        self.parameters().into_iter().for_each(|p| p.g.fill(0.0));
        let mut pass = self.forward(tokens, targets)?;
        // The derivative of cross entropy after softmax: probabilities minus the truth.
        for (row, &target) in pass.probabilities.chunks_exact_mut(self.output.outputs).zip(targets) {
            row[target] -= 1.0;
            row.iter_mut().for_each(|p| *p /= targets.len() as f32);
        }
        let d_normed = self.output.backward(&pass.normed, &pass.probabilities);
        let mut dx = self.last_norm.backward(&pass.last, &d_normed);
        for (layer, saved) in self.layers.iter_mut().zip(&pass.layers).rev() {
            dx = layer.backward(saved, dx, &self.mixer)?;
        }
        for (&token, dx) in tokens.iter().zip(dx.chunks_exact(self.size.dim)) {
            let row = &mut self.embedding.g[token * self.size.dim..][..self.size.dim];
            row.iter_mut().zip(dx).for_each(|(g, d)| *g += d);
        }
        Ok(pass.loss)
    }
    /// Writes on, one character at a time; the whole context is computed again for each.
    fn continue_with(&mut self, start: &[usize], count: usize, random: &mut Random) -> Result<Vec<usize>> {
        let context = self.size.context;
        let alone = self.mixer.again(&Size { batch: 1, ..self.size })?;
        let trained = std::mem::replace(&mut self.mixer, alone);
        let mut text = start.to_vec();
        for _ in 0..count {
            let from = text.len().saturating_sub(context);
            let mut window = text[from..].to_vec();
            let last = window.len() - 1;
            window.resize(context, 0); // behind the last character, and so never seen
            let pass = self.forward(&window, &vec![0; context])?;
            let row = &pass.probabilities[last * self.output.outputs..][..self.output.outputs];
            let mut left = random.unit();
            let chosen = row.iter().position(|p| {
                left -= p;
                left < 0.0
            });
            text.push(chosen.unwrap_or(row.len() - 1));
        }
        self.mixer = trained;
        Ok(text)
    }
}

/// c += a b with a of `[rows, inner]` and b of `[inner, columns]`: four rows of b at a time, so that each visit to a
/// row of c is worth four multiplications.
fn add_product(c: &mut [f32], a: &[f32], b: &[f32], inner: usize, columns: usize) {
    for (c, a) in c.chunks_exact_mut(columns).zip(a.chunks_exact(inner)) {
        for (a, b) in a.chunks(4).zip(b.chunks(4 * columns)) {
            if let &[a0, a1, a2, a3] = a {
                let (b01, b23) = b.split_at(2 * columns);
                let ((b0, b1), (b2, b3)) = (b01.split_at(columns), b23.split_at(columns));
                for ((((c, b0), b1), b2), b3) in c.iter_mut().zip(b0).zip(b1).zip(b2).zip(b3) {
                    *c += a0 * b0 + a1 * b1 + (a2 * b2 + a3 * b3);
                }
            } else {
                for (a, b) in a.iter().zip(b.chunks_exact(columns)) {
                    c.iter_mut().zip(b).for_each(|(c, b)| *c += a * b);
                }
            }
        }
    }
}

fn transposed(x: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|j| x.iter().skip(j).step_by(columns)).copied().collect()
}

fn sum(a: &[f32], b: &[f32]) -> Vec<f32> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn softmax(row: &mut [f32]) {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter_mut().for_each(|x| *x = (*x - most).exp());
    let total: f32 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= total);
}

/// x times the logistic function of 1.702 x (Hendrycks and Gimpel), and its derivative.
fn gelu(x: f32) -> (f32, f32) {
    let gate = (1.0 + (-1.702 * x).exp()).recip();
    (x * gate, gate + 1.702 * x * gate * (1.0 - gate))
}

/// SplitMix64: small, seeded, the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
    /// From 0 to below 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    /// Mean 0, variance 1: twelve uniform numbers are close enough.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.unit()).sum::<f32>() - 6.0
    }
}
