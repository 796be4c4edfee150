//! The definition of attention: f64, simple loops, no tiles.
//!
//! The order of operations in each row is: scale; score modifiers; mask; add the sink to the denominator; softmax;
//! product with V. A masked key takes part in no arithmetic, so its contents cannot leak. A row without visible keys
//! has o = 0 and LSE = -inf, or the value of its sink. NaN propagates.

use crate::exact::Exact;
pub use crate::exact::sink_share;
use crate::inputs::Bound;
use crate::problem::Problem;
use crate::tensor::TensorView;
use crate::walk;
pub use crate::walk::At;

/// The exact result of forward.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// Row-major in the shape of o.
    pub o: Vec<f64>,
    /// Row-major in the shape of the LSE.
    pub lse: Vec<f64>,
}

/// The exact gradients.
#[derive(Debug, Clone, PartialEq)]
pub struct GradientAnswer {
    /// Row-major in the shape of q.
    pub d_q: Vec<f64>,
    /// Row-major in the shape of k.
    pub d_k: Vec<f64>,
    /// Row-major in the shape of v.
    pub d_v: Vec<f64>,
    /// Gradient of the sinks, `[q_heads]`, if the problem has sinks.
    pub d_sinks: Option<Vec<f64>>,
    /// Gradients of auxiliary tensors: one entry per tensor, if a gradient was requested.
    pub d_aux: Vec<Option<Vec<f64>>>,
}

/// The result for one query row.
#[derive(Debug, Clone, PartialEq)]
pub struct RowAnswer {
    /// `[value_dim]`.
    pub o: Vec<f64>,
    /// Natural logarithm of the softmax denominator.
    pub lse: f64,
}

/// The gradients of one key.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyGradient {
    /// `[head_dim]`.
    pub d_k: Vec<f64>,
    /// `[value_dim]`.
    pub d_v: Vec<f64>,
}

/// The whole forward result.
///
/// ```
/// use fulgurite_core::{Inputs, Problem, Tensor, oracle};
///
/// let problem = Problem::builder().dense(1, 1, 2).heads(1, 1).head_dim(1).build()?;
/// let q = Tensor::new(vec![0.0f32], &[1, 1, 1, 1])?;
/// let (k, v) = (Tensor::new(vec![1.0f32, 2.0], &[1, 2, 1, 1])?, Tensor::new(vec![3.0f32, 5.0], &[1, 2, 1, 1])?);
/// let bound = Inputs::new(q.view(), k.view(), v.view()).bind(&problem)?;
/// let answer = oracle::forward(&bound);
/// assert_eq!((answer.o[0], answer.lse[0]), (4.0, 2f64.ln())); // equal scores: the mean of v
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn forward(bound: &Bound<'_>) -> Answer {
    let (o, lse) = walk::forward::<Exact>(bound);
    Answer { o, lse }
}

/// The forward result of chosen query rows.
pub fn forward_rows(bound: &Bound<'_>, rows: &[At]) -> Vec<RowAnswer> {
    walk::forward_rows::<Exact>(bound, rows).into_iter().map(|(o, lse)| RowAnswer { o, lse }).collect()
}

/// Computes all gradients, after its own forward pass.
pub fn backward(bound: &Bound<'_>, d_o: &TensorView<'_>, d_lse: Option<&TensorView<'_>>) -> GradientAnswer {
    GradientAnswer::new(bound.problem(), walk::backward::<Exact>(bound, d_o, d_lse))
}

/// d_q of chosen query rows.
pub fn backward_rows(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    rows: &[At],
) -> Vec<Vec<f64>> {
    walk::backward_rows::<Exact>(bound, d_o, d_lse, rows)
}

/// d_k and d_v of chosen keys; `At::head` counts key/value heads. Costs a whole backward pass per chosen head, because
/// every row that sees a key needs its LSE.
pub fn backward_keys(
    bound: &Bound<'_>,
    d_o: &TensorView<'_>,
    d_lse: Option<&TensorView<'_>>,
    keys: &[At],
) -> Vec<KeyGradient> {
    let found = walk::backward_keys::<Exact>(bound, d_o, d_lse, keys);
    found.into_iter().map(|(d_k, d_v)| KeyGradient { d_k, d_v }).collect()
}

impl GradientAnswer {
    pub(crate) fn new(problem: &Problem, sums: walk::GradientSums) -> GradientAnswer {
        GradientAnswer {
            d_q: sums.d_q,
            d_k: sums.d_k,
            d_v: sums.d_v,
            d_sinks: problem.has_sinks().then_some(sums.d_sinks),
            d_aux: sums.d_aux,
        }
    }
}
