//! The table of cases against which every engine is tested.
//!
//! A [`Case`] owns a problem and all tensors of a forward and a backward call. [`cases`] is the table; [`random`] draws
//! any number of mixtures for long runs. Both are equal on every machine.

mod drawn;
mod recipe;
mod table;
pub mod variants;

use crate::block::BlockMask;
use crate::dtype::DType;
use crate::inputs::{Bound, Inputs};
use crate::problem::Problem;
use crate::tensor::{Tensor, TensorView};
use std::fmt;

pub use drawn::{SEEDS, random, random_nonfinite, random_nonfinite_short, random_short};
pub use table::{FEATURES, NONFINITE, cases};

/// A tensor with the strides under which it is passed.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub tensor: Tensor,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

impl Stored {
    pub fn view(&self) -> TensorView<'_> {
        let data = self.tensor.view().data();
        TensorView::strided(data, &self.shape, &self.strides).expect("strides of a case fit its tensor")
    }
}

/// A problem with all inputs of forward and backward.
///
/// ```
/// use fulgurite_core::{DType, cases, compare, plain};
///
/// let case = cases::random(42, DType::Bf16);
/// let bound = case.bound();
/// let forward = plain::forward(&bound).to_forward(case.problem()).unwrap();
/// for (name, verdict) in compare::check_forward(&bound, &forward, 0) {
///     assert!(verdict.ok(), "{case}: {name}: {verdict}");
/// }
/// ```
#[derive(Debug, Clone)]
pub struct Case {
    /// Names the case in reports; unique in the table.
    pub name: String,
    /// Features that it covers, each one of [`FEATURES`].
    pub features: Vec<&'static str>,
    problem: Problem,
    q: Stored,
    k: Stored,
    v: Stored,
    d_o: Stored,
    d_lse: Option<Tensor>,
    sinks: Option<Tensor>,
    cu_seqlens: Option<[Tensor; 2]>,
    used_q: Option<Tensor>,
    used_k: Option<Tensor>,
    aux: Vec<Tensor>,
    block_mask: Option<BlockMask>,
}

impl Case {
    /// The problem of the case.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The tensors of the forward call.
    pub fn inputs(&self) -> Inputs<'_> {
        let mut inputs = Inputs::new(self.q.view(), self.k.view(), self.v.view())
            .used_lengths(self.used_q.as_ref().map(Tensor::view), self.used_k.as_ref().map(Tensor::view));
        if let Some(sinks) = &self.sinks {
            inputs = inputs.sinks(sinks.view());
        }
        if let Some([q, k]) = &self.cu_seqlens {
            inputs = inputs.cu_seqlens(q.view(), k.view());
        }
        for (spec, tensor) in self.problem.aux().iter().zip(&self.aux) {
            inputs = inputs.aux(&spec.name, tensor.view());
        }
        if let Some(mask) = &self.block_mask {
            inputs = inputs.block_mask(mask);
        }
        inputs
    }

    /// The tensors bound to the problem.
    pub fn bound(&self) -> Bound<'_> {
        self.inputs().bind(&self.problem).unwrap_or_else(|e| panic!("bug in fulgurite: case {self}: {e}"))
    }

    /// The gradient of o.
    pub fn d_o(&self) -> TensorView<'_> {
        self.d_o.view()
    }

    /// The gradient of the LSE, if the case has one.
    pub fn d_lse(&self) -> Option<TensorView<'_>> {
        self.d_lse.as_ref().map(Tensor::view)
    }

    /// Whether q, k, v or d_o hold a NaN or an infinity anywhere.
    pub fn is_nonfinite(&self) -> bool {
        [self.q.view(), self.k.view(), self.v.view(), self.d_o()]
            .iter()
            .any(|view| view.to_f64().iter().any(|x| !x.is_finite()))
    }

    /// The type of q, k and v.
    pub fn dtype(&self) -> DType {
        self.problem.dtype()
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.dtype())
    }
}
