//! The tensors of a call of the gated delta rule, and the proof that they fit the problem.

use super::{GatedDelta, TokenLayout};
use crate::dtype::DType;
use crate::error::InputError;
use crate::fit::{asked, dtype_is, integers, last_stride, shape_is};
use crate::inputs::RowLayout;
use crate::problem::check_offsets;
use crate::tensor::{Tensor, TensorError, TensorView, TensorViewMut};

/// The tensors of a forward call.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeltaInputs<'a> {
    /// Queries.
    pub q: TensorView<'a>,
    /// Keys.
    pub k: TensorView<'a>,
    /// Values.
    pub v: TensorView<'a>,
    /// Log decays, finite and at most 0; any float type.
    pub g: TensorView<'a>,
    /// Step sizes, finite; any float type.
    pub beta: TensorView<'a>,
    /// Initial states, f32.
    pub initial_state: Option<TensorView<'a>>,
    /// Cumulative offsets of packed sequences, i32.
    pub cu_seqlens: Option<TensorView<'a>>,
}

impl<'a> DeltaInputs<'a> {
    /// The five tensors that every call has.
    pub fn new(
        q: TensorView<'a>,
        k: TensorView<'a>,
        v: TensorView<'a>,
        g: TensorView<'a>,
        beta: TensorView<'a>,
    ) -> Self {
        DeltaInputs { q, k, v, g, beta, initial_state: None, cu_seqlens: None }
    }
    /// Sets the initial states.
    pub fn initial_state(mut self, state: TensorView<'a>) -> Self {
        self.initial_state = Some(state);
        self
    }
    /// Sets the offsets of packed sequences.
    pub fn cu_seqlens(mut self, offsets: TensorView<'a>) -> Self {
        self.cu_seqlens = Some(offsets);
        self
    }

    /// Checks that these tensors fit `problem` and binds the two together. This reads the gates: a NaN, an infinity or
    /// a growing state is rejected.
    pub fn bind(&self, problem: &'a GatedDelta) -> Result<DeltaBound<'a>, InputError> {
        for (arg, view, want) in
            [("q", &self.q, problem.q_shape()), ("k", &self.k, problem.q_shape()), ("v", &self.v, problem.v_shape())]
        {
            shape_is(arg, view.shape(), &want)?;
            dtype_is(arg, view.dtype(), problem.dtype())?;
            last_stride(arg, view.shape(), view.strides())?;
        }
        for (arg, view) in [("g", &self.g), ("beta", &self.beta)] {
            shape_is(arg, view.shape(), &problem.gate_shape())?;
            if !view.dtype().is_float() {
                return Err(InputError::DType { arg: arg.into(), got: view.dtype(), want: "f32, f16 or bf16" });
            }
        }
        let hint = ["call DeltaInputs::initial_state", "say so with GatedDeltaBuilder::initial_state"];
        let initial_state = asked("initial_state", problem.has_initial_state(), self.initial_state, hint)?;
        if let Some(state) = &initial_state {
            shape_is("initial_state", state.shape(), &problem.state_shape())?;
            dtype_is("initial_state", state.dtype(), DType::F32)?;
            last_stride("initial_state", state.shape(), state.strides())?;
        }
        let (g, beta) = (self.g.to_f64(), self.beta.to_f64());
        if let Some(at) = g.iter().position(|g| !(g.is_finite() && *g <= 0.0)) {
            let hint = "g is a log decay: pass -exp(A_log) * softplus(..), and large negative numbers for -inf";
            return Err(InputError::Value { arg: "g", at, got: g[at], allowed: "finite and at most 0", hint });
        }
        if let Some(at) = beta.iter().position(|b| !b.is_finite()) {
            let hint = "beta is usually a sigmoid";
            return Err(InputError::Value { arg: "beta", at, got: beta[at], allowed: "finite", hint });
        }
        let narrow = |x: Vec<f64>| x.into_iter().map(|x| x as f32).collect();
        Ok(DeltaBound {
            problem,
            q: self.q,
            k: self.k,
            v: self.v,
            g: narrow(g),
            beta: narrow(beta),
            initial_state,
            sequences: self.sequences(problem)?,
        })
    }

    fn sequences(&self, problem: &GatedDelta) -> Result<Vec<Tokens>, InputError> {
        let packed = matches!(problem.layout(), TokenLayout::Packed { .. });
        let hint = ["call DeltaInputs::cu_seqlens", "build the problem with GatedDeltaBuilder::packed"];
        let offsets = asked("cu_seqlens", packed, self.cu_seqlens, hint)?;
        match (problem.layout(), offsets) {
            (TokenLayout::Packed { batch, total, longest }, Some(offsets)) => {
                let offsets = integers("cu_seqlens", &offsets, batch + 1)?;
                let (sum, long) = check_offsets("cu_seqlens", &offsets)?;
                if sum > total || long > longest {
                    let allowed = format!("at most {total} tokens and {longest} in a sequence");
                    return Err(InputError::Total { arg: "cu_seqlens", what: "the last offset", got: sum, allowed });
                }
                let one = |i: usize| Tokens {
                    number: i,
                    start: offsets[i] as usize,
                    len: (offsets[i + 1] - offsets[i]) as usize,
                };
                Ok((0..batch).map(one).collect())
            }
            _ => Ok((0..problem.batch()).map(|i| Tokens { number: i, start: 0, len: problem.max_len() }).collect()),
        }
    }
}

/// The position of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tokens {
    /// Index of the sequence.
    pub number: usize,
    /// First row in a packed tensor; 0 in a dense one.
    pub start: usize,
    /// Number of tokens.
    pub len: usize,
}

/// Tensors that fit a problem. A value of this type proves that every check has passed.
#[derive(Debug, Clone)]
pub struct DeltaBound<'a> {
    problem: &'a GatedDelta,
    q: TensorView<'a>,
    k: TensorView<'a>,
    v: TensorView<'a>,
    g: Vec<f32>,
    beta: Vec<f32>,
    initial_state: Option<TensorView<'a>>,
    sequences: Vec<Tokens>,
}

impl<'a> DeltaBound<'a> {
    /// The problem.
    pub fn problem(&self) -> &'a GatedDelta {
        self.problem
    }
    /// Queries.
    pub fn q(&self) -> &TensorView<'a> {
        &self.q
    }
    /// Keys.
    pub fn k(&self) -> &TensorView<'a> {
        &self.k
    }
    /// Values.
    pub fn v(&self) -> &TensorView<'a> {
        &self.v
    }
    /// Log decays, row-major, finite and at most 0.
    pub fn g(&self) -> &[f32] {
        &self.g
    }
    /// Steps, row-major and finite.
    pub fn beta(&self) -> &[f32] {
        &self.beta
    }
    /// Initial states.
    pub fn initial_state(&self) -> Option<&TensorView<'a>> {
        self.initial_state.as_ref()
    }
    /// The sequences of the batch.
    pub fn sequences(&self) -> &[Tokens] {
        &self.sequences
    }
    /// Index of token `t` of a sequence and value head in g and beta.
    pub fn gate(&self, sequence: &Tokens, t: usize, value_head: usize) -> usize {
        let row = match self.problem.layout() {
            TokenLayout::Dense { len, .. } => sequence.number * len + t,
            TokenLayout::Packed { .. } => sequence.start + t,
        };
        row * self.problem.value_heads() + value_head
    }
    /// Positions of a sequence's tokens in a tensor with the strides of q, k, v or o.
    pub fn row_layout(&self, strides: &[usize], sequence: &Tokens) -> RowLayout {
        match self.problem.layout() {
            TokenLayout::Dense { .. } => {
                RowLayout { offset: sequence.number * strides[0], row: strides[1], head: strides[2] }
            }
            TokenLayout::Packed { .. } => {
                RowLayout { offset: sequence.start * strides[0], row: strides[0], head: strides[1] }
            }
        }
    }
    /// Whether every row of the tensors belongs to a sequence. The outputs of other rows are zero.
    pub fn all_tokens_used(&self) -> bool {
        match self.problem.layout() {
            TokenLayout::Dense { .. } => true,
            TokenLayout::Packed { total, .. } => self.sequences.iter().map(|s| s.len).sum::<usize>() == total,
        }
    }
}

/// The output tensors of a forward call.
#[derive(Debug)]
pub struct DeltaOutputs<'a> {
    /// Shaped like v.
    pub o: TensorViewMut<'a>,
    /// The states after the last tokens, f32, if requested.
    pub final_state: Option<TensorViewMut<'a>>,
}

fn fits(arg: &'static str, view: &TensorViewMut<'_>, want: &[usize], dtype: DType) -> Result<(), InputError> {
    shape_is(arg, view.shape(), want)?;
    dtype_is(arg, view.dtype(), dtype)?;
    last_stride(arg, view.shape(), view.strides())
}

impl DeltaOutputs<'_> {
    /// Checks that these tensors fit `problem`.
    pub fn check(&self, problem: &GatedDelta) -> Result<(), InputError> {
        fits("o", &self.o, &problem.v_shape(), problem.dtype())?;
        self.final_state.as_ref().map_or(Ok(()), |s| fits("final_state", s, &problem.state_shape(), DType::F32))
    }
}

/// The result of a forward call.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaForward {
    /// Shaped like v.
    pub o: Tensor,
    /// f32, `[sequences, value_heads, key_dim, value_dim]`.
    pub final_state: Tensor,
}

impl DeltaForward {
    /// Zeros of the right shapes.
    pub fn zeros(problem: &GatedDelta) -> Result<Self, TensorError> {
        let o = Tensor::zeros(problem.dtype(), &problem.v_shape())?;
        Ok(DeltaForward { o, final_state: Tensor::zeros(DType::F32, &problem.state_shape())? })
    }
    /// A writable view.
    pub fn outputs(&mut self) -> DeltaOutputs<'_> {
        DeltaOutputs { o: self.o.view_mut(), final_state: Some(self.final_state.view_mut()) }
    }
}

/// The inputs of backward besides those of forward; backward recomputes everything else.
#[derive(Debug, Clone, Copy)]
pub struct DeltaSaved<'a> {
    /// Gradient of o.
    pub d_o: TensorView<'a>,
    /// Gradient of the final states (f32), if they were used.
    pub d_final_state: Option<TensorView<'a>>,
}

impl DeltaSaved<'_> {
    /// Checks that these tensors fit `problem`.
    pub fn check(&self, problem: &GatedDelta) -> Result<(), InputError> {
        shape_is("d_o", self.d_o.shape(), &problem.v_shape())?;
        dtype_is("d_o", self.d_o.dtype(), problem.dtype())?;
        if let Some(d) = &self.d_final_state {
            shape_is("d_final_state", d.shape(), &problem.state_shape())?;
            dtype_is("d_final_state", d.dtype(), DType::F32)?;
        }
        Ok(())
    }
}

/// The result of a backward call.
#[derive(Debug, Clone, PartialEq)]
pub struct DeltaGradients {
    /// Shaped like q.
    pub d_q: Tensor,
    /// Shaped like k.
    pub d_k: Tensor,
    /// Shaped like v.
    pub d_v: Tensor,
    /// f32, shaped like g.
    pub d_g: Tensor,
    /// f32, shaped like beta.
    pub d_beta: Tensor,
    /// Gradient of the initial states (zeros or given), f32.
    pub d_initial_state: Tensor,
}

impl DeltaGradients {
    /// Zeros of the right shapes.
    pub fn zeros(problem: &GatedDelta) -> Result<Self, TensorError> {
        let like = |shape: Vec<usize>, dtype| Tensor::zeros(dtype, &shape);
        Ok(DeltaGradients {
            d_q: like(problem.q_shape(), problem.dtype())?,
            d_k: like(problem.q_shape(), problem.dtype())?,
            d_v: like(problem.v_shape(), problem.dtype())?,
            d_g: like(problem.gate_shape(), DType::F32)?,
            d_beta: like(problem.gate_shape(), DType::F32)?,
            d_initial_state: like(problem.state_shape(), DType::F32)?,
        })
    }
    /// A writable view.
    pub fn outputs(&mut self) -> DeltaGradientOutputs<'_> {
        DeltaGradientOutputs {
            d_q: self.d_q.view_mut(),
            d_k: self.d_k.view_mut(),
            d_v: self.d_v.view_mut(),
            d_g: self.d_g.view_mut(),
            d_beta: self.d_beta.view_mut(),
            d_initial_state: self.d_initial_state.view_mut(),
        }
    }
}

/// The output tensors of a backward call.
#[derive(Debug)]
pub struct DeltaGradientOutputs<'a> {
    /// Shaped like q.
    pub d_q: TensorViewMut<'a>,
    /// Shaped like k.
    pub d_k: TensorViewMut<'a>,
    /// Shaped like v.
    pub d_v: TensorViewMut<'a>,
    /// f32, row-major, shaped like g.
    pub d_g: TensorViewMut<'a>,
    /// f32, row-major, shaped like beta.
    pub d_beta: TensorViewMut<'a>,
    /// f32, shaped like the states.
    pub d_initial_state: TensorViewMut<'a>,
}

impl DeltaGradientOutputs<'_> {
    /// Checks that these tensors fit `problem`.
    pub fn check(&self, problem: &GatedDelta) -> Result<(), InputError> {
        let (dtype, wide) = (problem.dtype(), DType::F32);
        fits("d_q", &self.d_q, &problem.q_shape(), dtype)?;
        fits("d_k", &self.d_k, &problem.q_shape(), dtype)?;
        fits("d_v", &self.d_v, &problem.v_shape(), dtype)?;
        fits("d_g", &self.d_g, &problem.gate_shape(), wide)?;
        fits("d_beta", &self.d_beta, &problem.gate_shape(), wide)?;
        fits("d_initial_state", &self.d_initial_state, &problem.state_shape(), wide)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_contents_are_refused_with_their_place() {
        let problem = GatedDelta::builder().dense(1, 3).heads(1, 2).head_dim(4).initial_state().build().unwrap();
        let zeros = |shape: Vec<usize>| Tensor::zeros(DType::F32, &shape).unwrap();
        let (q, v, beta) = (zeros(problem.q_shape()), zeros(problem.v_shape()), zeros(problem.gate_shape()));
        let state = zeros(problem.state_shape());
        let with = |g: [f32; 6], beta: &Tensor, state: &Tensor| {
            let g = Tensor::new(g.to_vec(), &[1, 3, 2]).unwrap();
            let inputs = DeltaInputs::new(q.view(), q.view(), v.view(), g.view(), beta.view());
            inputs.initial_state(state.view()).bind(&problem).map(|_| ()).map_err(|e| e.to_string())
        };
        assert_eq!(with([0.0; 6], &beta, &state), Ok(()));
        let mut g = [0.0; 6];
        g[4] = 0.5;
        assert_eq!(
            with(g, &beta, &state).unwrap_err(),
            "`g` holds 0.5 at element 4, allowed: finite and at most 0; g is a log decay: pass -exp(A_log) * softplus(..), and large negative numbers for -inf"
        );
        g[4] = f32::NAN;
        assert!(with(g, &beta, &state).unwrap_err().starts_with("`g` holds NaN at element 4"));
        g[4] = f32::NEG_INFINITY;
        assert!(with(g, &beta, &state).unwrap_err().starts_with("`g` holds -inf"));
        let nan = Tensor::new(vec![f32::NAN; 6], &[1, 3, 2]).unwrap();
        assert!(with([0.0; 6], &nan, &state).unwrap_err().starts_with("`beta` holds NaN at element 0"));
        let turned = zeros(vec![1, 2, 4, 5]);
        assert_eq!(
            with([0.0; 6], &beta, &turned).unwrap_err(),
            "`initial_state` has shape [1, 2, 4, 5], allowed: [1, 2, 4, 4]; check the sizes given to the problem"
        );
        let g = zeros(problem.gate_shape());
        let inputs = DeltaInputs::new(q.view(), q.view(), v.view(), g.view(), beta.view());
        assert!(inputs.bind(&problem).unwrap_err().to_string().contains("call DeltaInputs::initial_state"));
    }
}
