//! What mixes tokens in a layer: attention, or the gated delta rule. The one part of the model that is not written out.

use super::{Result, Size};
use fulgurite::variants::{DeltaSaved, GatedDelta, GatedDeltaCall, gated_delta};
use fulgurite::{Choice, Engine, Forward, Inputs, Mask, Precision, Problem, Run, Tensor, TensorView, engine};

/// Which one, with what it keeps between calls.
pub enum Mixer {
    Attention(Box<Attention>),
    Delta(GatedDelta),
}

/// Causal attention with ALiBi in the place of positions.
pub struct Attention {
    problem: Problem,
    slopes: Tensor,
    engine: Box<dyn Engine>,
}

/// What a layer gives to its mixer: rows of q, k and v, and for the delta rule of gates and steps before their bends.
pub struct Mixed {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub gates: Option<[Vec<f32>; 2]>,
}

/// What it gets back.
pub struct Output {
    pub o: Tensor,
    /// What attention's backward needs.
    forward: Option<Forward>,
}

/// Gradients of what was given.
pub struct Gradients {
    pub d_q: Tensor,
    pub d_k: Tensor,
    pub d_v: Tensor,
    pub gates: Option<[Vec<f32>; 2]>,
}

/// Log decays begin near e^-0.05 a token: half of the state is left after 14.
const SLOW: f32 = 3.0;

fn logistic(x: f32) -> f32 {
    (1.0 + (-x).exp()).recip()
}

impl Mixer {
    pub fn attention(size: &Size, precision: Precision) -> Result<Mixer> {
        let problem = Problem::builder()
            .dense(size.batch, size.context, size.context)
            .heads(size.heads.0, size.heads.1)
            .head_dim(size.head_dim)
            .mask(Mask::causal())
            .alibi()
            .precision(precision)
            .build()?;
        let slopes: Vec<f32> = (0..size.heads.0).map(|head| 0.5f32.powi(head as i32)).collect();
        let slopes = Tensor::new(slopes, &[size.heads.0])?;
        Ok(Mixer::Attention(Box::new(Attention { problem, slopes, engine: engine(Choice::Best)? })))
    }

    /// The heads that are many hold values here, the few hold q and k: as many numbers as attention has.
    pub fn delta(size: &Size) -> Result<Mixer> {
        let builder = GatedDelta::builder().dense(size.batch, size.context).heads(size.heads.1, size.heads.0);
        Ok(Mixer::Delta(builder.head_dim(size.head_dim).build()?))
    }

    /// The same for another number of sequences.
    pub fn again(&self, size: &Size) -> Result<Mixer> {
        match self {
            Mixer::Attention(own) => Mixer::attention(size, own.problem.precision()),
            Mixer::Delta(_) => Mixer::delta(size),
        }
    }

    /// Heads of q, of k and of v.
    pub fn heads(&self, size: &Size) -> [usize; 3] {
        match self {
            Mixer::Attention(_) => [size.heads.0, size.heads.1, size.heads.1],
            Mixer::Delta(_) => [size.heads.1, size.heads.1, size.heads.0],
        }
    }

    pub fn has_gates(&self) -> bool {
        matches!(self, Mixer::Delta(_))
    }

    pub fn forward(&self, mixed: &Mixed) -> Result<Output> {
        match self {
            Mixer::Attention(own) => {
                let forward = own.engine.forward(&own.problem, &own.inputs(mixed)?, &Run::default())?;
                Ok(Output { o: forward.o.clone(), forward: Some(forward) })
            }
            Mixer::Delta(problem) => {
                let out = with_delta(problem, mixed, |call| Ok(call.forward()?))?;
                Ok(Output { o: out.o, forward: None })
            }
        }
    }

    pub fn backward(&self, mixed: &Mixed, output: &Output, d_o: &[f32]) -> Result<Gradients> {
        match self {
            Mixer::Attention(own) => {
                let forward = output.forward.as_ref().expect("attention keeps its forward");
                let d_o = TensorView::new(d_o, &own.problem.o_shape())?;
                let inputs = own.inputs(mixed)?;
                let g = own.engine.backward(&own.problem, &inputs, &forward.saved(d_o), &Run::default())?;
                Ok(Gradients { d_q: g.d_q, d_k: g.d_k, d_v: g.d_v, gates: None })
            }
            Mixer::Delta(problem) => {
                let saved = DeltaSaved { d_o: TensorView::new(d_o, &problem.v_shape())?, d_final_state: None };
                let g = with_delta(problem, mixed, |call| Ok(call.backward(&saved)?))?;
                let [decay, step] = mixed.gates.as_ref().expect("the delta rule has gates");
                // g = -softplus(x - SLOW) and beta = logistic(x).
                let d_decay = super::values(&g.d_g).iter().zip(decay).map(|(d, x)| -d * logistic(x - SLOW)).collect();
                let d_step = super::values(&g.d_beta).iter().zip(step);
                let d_step = d_step.map(|(d, x)| d * logistic(*x) * (1.0 - logistic(*x))).collect();
                Ok(Gradients { d_q: g.d_q, d_k: g.d_k, d_v: g.d_v, gates: Some([d_decay, d_step]) })
            }
        }
    }
}

impl Attention {
    fn inputs<'a>(&'a self, mixed: &'a Mixed) -> Result<Inputs<'a>> {
        let q = TensorView::new(&mixed.q[..], &self.problem.q_shape())?;
        let k = TensorView::new(&mixed.k[..], &self.problem.k_shape())?;
        let v = TensorView::new(&mixed.v[..], &self.problem.v_shape())?;
        Ok(Inputs::new(q, k, v).aux("alibi_slopes", self.slopes.view()))
    }
}

/// A call of the delta rule, with q and k normalised inside.
fn with_delta<T>(problem: &GatedDelta, mixed: &Mixed, run: impl FnOnce(GatedDeltaCall<'_>) -> Result<T>) -> Result<T> {
    let [decay, step] = mixed.gates.as_ref().expect("the delta rule has gates");
    let softplus = |x: f32| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let g: Vec<f32> = decay.iter().map(|x| -softplus(x - SLOW)).collect();
    let beta: Vec<f32> = step.iter().map(|x| logistic(*x)).collect();
    let q = TensorView::new(&mixed.q[..], &problem.q_shape())?;
    let k = TensorView::new(&mixed.k[..], &problem.q_shape())?;
    let v = TensorView::new(&mixed.v[..], &problem.v_shape())?;
    let g = TensorView::new(&g[..], &problem.gate_shape())?;
    let beta = TensorView::new(&beta[..], &problem.gate_shape())?;
    run(gated_delta(&q, &k, &v, &g, &beta).l2norm())
}
