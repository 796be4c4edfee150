//! Activations of raw gates: the log decay and the step size of the gated delta rule as models compute them.
//!
//! ```text
//! g = -exp(A_log) softplus(raw + dt_bias)        beta = sigmoid(raw), or twice that
//! ```

use crate::error::Error;
use fulgurite_core::inputs::check_like;
use fulgurite_core::{DType, InputError, Tensor, TensorView, TensorViewMut};

/// How beta comes from the tensor of that name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DeltaStep {
    /// The tensor holds beta.
    #[default]
    Given,
    /// beta = sigmoid(tensor), between 0 and 1.
    Sigmoid,
    /// beta = 2 sigmoid(tensor), between 0 and 2: the state's eigenvalues may be negative.
    TwiceSigmoid,
}

/// The activations of a call. By default the tensors hold g and beta themselves.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeltaGates<'a> {
    /// `A_log`, `[value_heads]`, if g is raw.
    pub a_log: Option<TensorView<'a>>,
    /// `dt_bias`, `[value_heads]`; only with `a_log`.
    pub dt_bias: Option<TensorView<'a>>,
    /// How beta is computed.
    pub step: DeltaStep,
}

/// Gradients of `A_log` and `dt_bias`, f32, if the call has these tensors.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GateGradients {
    /// Of `A_log`.
    pub d_a_log: Option<Vec<f32>>,
    /// Of `dt_bias`.
    pub d_dt_bias: Option<Vec<f32>>,
}

/// Checks that a parameter has one float per value head.
fn check_parameter(arg: &'static str, view: &TensorView<'_>, heads: usize) -> Result<(), InputError> {
    if !view.dtype().is_float() {
        return Err(InputError::DType { arg: arg.into(), got: view.dtype(), want: "f32, f16 or bf16" });
    }
    check_like(arg, view, &[heads], view.dtype())
}

/// log(1 + e^x) without overflow.
fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn sigmoid(x: f64) -> f64 {
    let e = (-x.abs()).exp();
    if x < 0.0 { e / (1.0 + e) } else { 1.0 / (1.0 + e) }
}

impl DeltaGates<'_> {
    /// Whether both tensors are used unchanged.
    pub fn are_given(&self) -> bool {
        self.a_log.is_none() && self.step == DeltaStep::Given
    }

    /// A_log and dt_bias (zeros if there is none) as f64.
    fn parameters(&self, heads: usize) -> Result<Option<[Vec<f64>; 2]>, Error> {
        let Some(a_log) = &self.a_log else { return Ok(None) };
        check_parameter("A_log", a_log, heads)?;
        let bias = match &self.dt_bias {
            None => vec![0.0; heads],
            Some(bias) => {
                check_parameter("dt_bias", bias, heads)?;
                bias.to_f64()
            }
        };
        Ok(Some([a_log.to_f64(), bias]))
    }

    /// g in f32, from the raw tensor, whose last axis is the value heads; `None` if the tensor holds g itself.
    pub fn g(&self, raw: &TensorView<'_>) -> Result<Option<Tensor>, Error> {
        let heads = raw.shape().last().copied().unwrap_or(0);
        let Some([a_log, bias]) = self.parameters(heads)? else { return Ok(None) };
        let g = |(i, x): (usize, f64)| -a_log[i % heads].exp() * softplus(x + bias[i % heads]);
        let values: Vec<f64> = raw.to_f64().into_iter().enumerate().map(g).collect();
        Ok(Some(Tensor::from_f64(DType::F32, &values, raw.shape())?))
    }

    /// beta in f32, from the raw tensor; `None` if the tensor holds beta itself.
    pub fn beta(&self, raw: &TensorView<'_>) -> Result<Option<Tensor>, Error> {
        let factor = match self.step {
            DeltaStep::Given => return Ok(None),
            DeltaStep::Sigmoid => 1.0,
            DeltaStep::TwiceSigmoid => 2.0,
        };
        let values: Vec<f64> = raw.to_f64().into_iter().map(|x| factor * sigmoid(x)).collect();
        Ok(Some(Tensor::from_f64(DType::F32, &values, raw.shape())?))
    }

    /// Turns the gradients of g and beta into those of the raw tensors, in place, and returns those of the parameters.
    pub fn backward(
        &self,
        [raw_g, raw_beta]: [&TensorView<'_>; 2],
        d_g: &mut TensorViewMut<'_>,
        d_beta: &mut TensorViewMut<'_>,
    ) -> Result<GateGradients, Error> {
        let factor = match self.step {
            DeltaStep::Given => None,
            DeltaStep::Sigmoid => Some(1.0),
            DeltaStep::TwiceSigmoid => Some(2.0),
        };
        if let Some(factor) = factor {
            let pairs = raw_beta.to_f64().into_iter().zip(d_beta.as_view().to_f64());
            let values: Vec<f64> = pairs.map(|(x, d)| d * factor * sigmoid(x) * sigmoid(-x)).collect();
            d_beta.write_f64(&values);
        }
        let heads = raw_g.shape().last().copied().unwrap_or(0);
        let Some([a_log, bias]) = self.parameters(heads)? else { return Ok(GateGradients::default()) };
        let (mut d_a_log, mut d_bias) = (vec![0.0f64; heads], vec![0.0f64; heads]);
        let pairs = raw_g.to_f64().into_iter().zip(d_g.as_view().to_f64()).enumerate();
        let values: Vec<f64> = pairs
            .map(|(i, (x, d))| {
                let (h, factor) = (i % heads, -a_log[i % heads].exp());
                let moved = x + bias[h];
                let d_raw = d * factor * sigmoid(moved);
                d_a_log[h] += d * factor * softplus(moved);
                d_bias[h] += d_raw;
                d_raw
            })
            .collect();
        d_g.write_f64(&values);
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
        Ok(GateGradients { d_a_log: Some(narrow(d_a_log)), d_dt_bias: self.dt_bias.map(|_| narrow(d_bias)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gradients_are_the_differences_of_the_gates() {
        let tensor = |x: &[f32], shape: &[usize]| Tensor::new(x.to_vec(), shape).unwrap();
        let raw = [-30.0f32, -1.5, 0.0, 0.25, 2.0, 40.0];
        let (a_log, bias) = (tensor(&[0.3, -0.7], &[2]), tensor(&[0.1, -0.2], &[2]));
        let ones = || tensor(&[1.0; 6], &[1, 3, 2]);
        let gates = |a_log: &Tensor, bias: &Tensor, raw: &[f32]| {
            let gates =
                DeltaGates { a_log: Some(a_log.view()), dt_bias: Some(bias.view()), step: DeltaStep::TwiceSigmoid };
            let raw = tensor(raw, &[1, 3, 2]);
            let (g, beta) = (gates.g(&raw.view()).unwrap().unwrap(), gates.beta(&raw.view()).unwrap().unwrap());
            let (mut d_g, mut d_beta) = (ones(), ones());
            let both = [&raw.view(), &raw.view()];
            let rest = gates.backward(both, &mut d_g.view_mut(), &mut d_beta.view_mut()).unwrap();
            ([g, beta, d_g, d_beta].map(|x| x.view().to_f64()), rest)
        };
        let ([g, beta, d_g, d_beta], rest) = gates(&a_log, &bias, &raw);
        assert!(g.iter().all(|g| *g <= 0.0) && beta.iter().all(|b| (0.0..=2.0).contains(b)));
        let step = 1.0 / 128.0;
        let close = |got: f64, want: f64| assert!((got - want).abs() <= 1e-4 + 1e-4 * want.abs(), "{got} {want}");
        for i in 0..6 {
            let at = |x: f32| {
                let mut raw = raw;
                raw[i] += x;
                gates(&a_log, &bias, &raw).0
            };
            let (more, less) = (at(step), at(-step));
            close((more[0][i] - less[0][i]) / f64::from(2.0 * step), d_g[i]);
            close((more[1][i] - less[1][i]) / f64::from(2.0 * step), d_beta[i]);
        }
        let sum = |a_log: &[f32], bias: &[f32]| -> f64 {
            gates(&tensor(a_log, &[2]), &tensor(bias, &[2]), &raw).0[0].iter().sum()
        };
        let a = (sum(&[0.3 + step, -0.7], &[0.1, -0.2]) - sum(&[0.3 - step, -0.7], &[0.1, -0.2])) / 0.015625;
        close(a, f64::from(rest.d_a_log.unwrap()[0]));
        let b = (sum(&[0.3, -0.7], &[0.1, -0.2 + step]) - sum(&[0.3, -0.7], &[0.1, -0.2 - step])) / 0.015625;
        close(b, f64::from(rest.d_dt_bias.unwrap()[1]));
        let short = DeltaGates { a_log: Some(a_log.view()), ..DeltaGates::default() };
        let refused = short.g(&tensor(&[0.0; 3], &[1, 1, 3]).view()).unwrap_err().to_string();
        assert!(refused.starts_with("`A_log` has shape [2], allowed: [3]"), "{refused}");
    }
}
