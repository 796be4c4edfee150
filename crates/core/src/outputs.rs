//! The results of forward and backward, and the tensors that backward reads besides those of forward.

use crate::dtype::DType;
use crate::error::InputError;
use crate::fit::{check_on, device_contiguous, last_stride, rows_are, rows_fit, shape_is};
use crate::problem::Problem;
use crate::tensor::{Place, Tensor, TensorError, TensorView, TensorViewMut};

/// The output tensors of a forward call.
#[derive(Debug)]
pub struct Outputs<'a> {
    /// The result, shaped like q with the value dimension.
    pub o: TensorViewMut<'a>,
    /// Log of the softmax denominator, f32.
    pub lse: TensorViewMut<'a>,
}

impl Outputs<'_> {
    /// Checks that these tensors are in host memory and fit `problem`.
    pub fn check(&self, problem: &Problem) -> Result<(), InputError> {
        self.check_on(problem, Place::Host)
    }

    /// Checks that these tensors are on this device and fit `problem`.
    pub fn check_on(&self, problem: &Problem, place: Place) -> Result<(), InputError> {
        check_o(&self.o, problem, place)?;
        lse_fits("lse", &self.lse.as_view(), problem, place)
    }
}

/// Checks that the result of a forward call is on this device and fits `problem`.
pub fn check_o(o: &TensorViewMut<'_>, problem: &Problem, place: Place) -> Result<(), InputError> {
    rows_fit("o", &o.as_view(), &problem.row_dims()[3], problem, place)
}

/// Checks the result of a forward call in an element type of its own: f32, for parts that are merged later.
pub fn check_o_of(o: &TensorViewMut<'_>, problem: &Problem, dtype: DType, place: Place) -> Result<(), InputError> {
    rows_are("o", &o.as_view(), &problem.row_dims()[3], dtype, place)
}

/// Checks that the LSE, or its gradient, is on this device and fits `problem`.
pub fn lse_fits(arg: &str, view: &TensorView<'_>, problem: &Problem, place: Place) -> Result<(), InputError> {
    check_on(arg, view, &problem.lse_dims(), DType::F32, place)?;
    device_contiguous(arg, view)
}

/// The result of a forward call.
#[derive(Debug, Clone, PartialEq)]
pub struct Forward {
    /// `[batch, q_len, heads, value_dim]`, packed `[total_q, heads, value_dim]`.
    pub o: Tensor,
    /// `[batch, heads, q_len]`, packed `[heads, total_q]`; natural logarithm, f32.
    pub lse: Tensor,
}

impl Forward {
    /// Zeros of the right shapes.
    pub fn zeros(problem: &Problem) -> Result<Forward, TensorError> {
        Ok(Forward {
            o: Tensor::zeros(problem.dtype(), &problem.o_shape())?,
            lse: Tensor::zeros(DType::F32, &problem.lse_shape())?,
        })
    }

    /// A writable view.
    pub fn outputs(&mut self) -> Outputs<'_> {
        Outputs { o: self.o.view_mut(), lse: self.lse.view_mut() }
    }

    /// The inputs of backward from this result, with the gradient of o.
    pub fn saved<'a>(&'a self, d_o: TensorView<'a>) -> Saved<'a> {
        Saved { o: self.o.view(), lse: self.lse.view(), d_o, d_lse: None }
    }
}

/// The inputs of backward besides those of forward.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// Output of forward.
    pub o: TensorView<'a>,
    /// LSE of forward.
    pub lse: TensorView<'a>,
    /// Gradient of o.
    pub d_o: TensorView<'a>,
    /// Gradient of the LSE (f32), if it was used.
    pub d_lse: Option<TensorView<'a>>,
}

impl Saved<'_> {
    /// Checks that these tensors are in host memory and fit `problem`.
    pub fn check(&self, problem: &Problem) -> Result<(), InputError> {
        self.check_on(problem, Place::Host)
    }

    /// Checks that these tensors are on this device and fit `problem`.
    pub fn check_on(&self, problem: &Problem, place: Place) -> Result<(), InputError> {
        rows_fit("o", &self.o, &problem.o_shape(), problem, place)?;
        check_on("d_o", &self.d_o, &problem.o_shape(), problem.dtype(), place)?;
        if place != Place::Host {
            // In host memory d_o may be broadcast: the gradient of a sum has stride 0 everywhere.
            last_stride("d_o", self.d_o.shape(), self.d_o.strides())?;
        }
        lse_fits("lse", &self.lse, problem, place)?;
        self.d_lse.map_or(Ok(()), |view| lse_fits("d_lse", &view, problem, place))
    }
}

/// The result of a backward call.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// Shaped like q.
    pub d_q: Tensor,
    /// Shaped like k.
    pub d_k: Tensor,
    /// Shaped like v.
    pub d_v: Tensor,
    /// Gradient of the sinks: f32, `[q_heads]`, if the problem has sinks.
    pub d_sinks: Option<Tensor>,
    /// Gradients of auxiliary tensors: f32, one entry per auxiliary tensor of the problem; `None` if it has no gradient.
    pub d_aux: Vec<Option<Tensor>>,
}

impl Gradients {
    /// Zeros of the right shapes.
    pub fn zeros(problem: &Problem) -> Result<Gradients, TensorError> {
        let aux = |spec: &crate::expr::AuxSpec| spec.grad.then(|| Tensor::zeros(DType::F32, &spec.shape)).transpose();
        Ok(Gradients {
            d_q: Tensor::zeros(problem.dtype(), &problem.q_shape())?,
            d_k: Tensor::zeros(problem.dtype(), &problem.k_shape())?,
            d_v: Tensor::zeros(problem.dtype(), &problem.v_shape())?,
            d_sinks: problem.has_sinks().then(|| Tensor::zeros(DType::F32, &[problem.q_heads()])).transpose()?,
            d_aux: problem.aux().iter().map(aux).collect::<Result<_, _>>()?,
        })
    }

    /// A writable view.
    pub fn outputs(&mut self) -> GradientOutputs<'_> {
        GradientOutputs {
            d_q: self.d_q.view_mut(),
            d_k: self.d_k.view_mut(),
            d_v: self.d_v.view_mut(),
            d_sinks: self.d_sinks.as_mut().map(Tensor::view_mut),
            d_aux: self.d_aux.iter_mut().map(|t| t.as_mut().map(Tensor::view_mut)).collect(),
        }
    }
}

/// The output tensors of a backward call.
#[derive(Debug)]
pub struct GradientOutputs<'a> {
    /// Shaped like q.
    pub d_q: TensorViewMut<'a>,
    /// Shaped like k.
    pub d_k: TensorViewMut<'a>,
    /// Shaped like v.
    pub d_v: TensorViewMut<'a>,
    /// Gradient of the sinks: f32, `[q_heads]`, if the problem has sinks.
    pub d_sinks: Option<TensorViewMut<'a>>,
    /// Gradients of auxiliary tensors: f32, one entry per auxiliary tensor of the problem.
    pub d_aux: Vec<Option<TensorViewMut<'a>>>,
}

impl GradientOutputs<'_> {
    /// Checks that these tensors are in host memory and fit `problem`.
    pub fn check(&self, problem: &Problem) -> Result<(), InputError> {
        self.check_on(problem, Place::Host)
    }

    /// Checks that these tensors are on this device and fit `problem`.
    pub fn check_on(&self, problem: &Problem, place: Place) -> Result<(), InputError> {
        self.check_of(problem, problem.dtype(), place)
    }

    /// Checks gradients whose element type for q, k and v is given: f32, for parts that are added.
    pub fn check_of(&self, problem: &Problem, dtype: DType, place: Place) -> Result<(), InputError> {
        let small = |arg: &str, d: &TensorViewMut<'_>, shape: &[usize]| {
            let view = d.as_view();
            check_on(arg, &view, shape, DType::F32, place)?;
            device_contiguous(arg, &view)
        };
        for (arg, view, want) in [
            ("d_q", &self.d_q, problem.q_shape()),
            ("d_k", &self.d_k, problem.k_shape()),
            ("d_v", &self.d_v, problem.v_shape()),
        ] {
            rows_are(arg, &view.as_view(), &want, dtype, place)?;
        }
        match (&self.d_sinks, problem.has_sinks()) {
            (Some(d), true) => small("d_sinks", d, &[problem.q_heads()])?,
            (None, false) => {}
            (None, true) => {
                return Err(InputError::Missing {
                    arg: "d_sinks".into(),
                    hint: "give room for it, the problem has sinks",
                });
            }
            (Some(_), false) => {
                return Err(InputError::Unused { arg: "d_sinks".into(), hint: "the problem has no sinks" });
            }
        }
        shape_is("d_aux", &[self.d_aux.len()], &[problem.aux().len()])?;
        for (spec, given) in problem.aux().iter().zip(&self.d_aux) {
            match (spec.grad, given) {
                (true, Some(d)) => small(&format!("d_{}", spec.name), d, &spec.shape)?,
                (false, None) => {}
                (true, None) => {
                    let hint = "give room for it, or declare it with ProblemBuilder::aux";
                    return Err(InputError::Missing { arg: format!("d_{}", spec.name), hint });
                }
                (false, Some(_)) => {
                    let hint = "declare it with ProblemBuilder::aux_with_grad";
                    return Err(InputError::Unused { arg: format!("d_{}", spec.name), hint });
                }
            }
        }
        Ok(())
    }
}
