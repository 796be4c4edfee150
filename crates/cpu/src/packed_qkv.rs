//! Attention over packed codes, for inference with K and V stored in four or eight bits.

use crate::minifloat_unit::Operand;
use crate::{Counters, Options, groups};
use fulgurite_core::format::{FormatError, GroupFormat, Grouped};
use fulgurite_core::{
    GroupAttention, InputError, Inputs, Layout, Outputs, Precision, Problem, Tensor, TensorError, TensorView,
};
use thiserror::Error;

/// Q, K and V of a problem in codes. Q and K have a row per `[batch, token, head]` with groups along the head
/// dimension; V has one per `[batch, head, channel]` with groups along the tokens, as products need it.
///
/// ```
/// use fulgurite_core::{Forward, Precision, Problem, Tensor};
/// use fulgurite_cpu::{Options, PackedQkv, packed_forward};
///
/// let problem = Problem::builder().dense(1, 3, 20).heads(2, 1).head_dim(16).precision(Precision::NVFP4).build()?;
/// let tensor = |shape: &[usize]| Tensor::new(vec![0.5f32; shape.iter().product()], shape);
/// let (q, k) = (tensor(&problem.q_shape())?, tensor(&problem.k_shape())?);
/// let packed = PackedQkv::new(&problem, &q.view(), &k.view(), &k.view())?;
/// assert!(packed.size_bytes() < 4 * (96 + 320 + 320) / 5);
/// let mut out = Forward::zeros(&problem)?;
/// packed_forward(&problem, &packed, &mut out.outputs(), &Options::default())?;
/// assert!(out.o.view().to_f64().iter().all(|o| (o - 0.5).abs() < 0.05));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct PackedQkv {
    q: Grouped,
    k: Grouped,
    v: Grouped,
}

/// The reason why packed operands were rejected.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum PackedError {
    /// A problem that packed operands do not support.
    #[error("packed operands with {got}, allowed: {allowed}; {hint}")]
    Problem {
        /// The feature of the problem.
        got: String,
        /// Allowed values.
        allowed: &'static str,
        /// How to fix the call.
        hint: &'static str,
    },
    /// The codes have another format than the problem.
    #[error(
        "`{arg}` is in {got}, allowed: {want}, as the problem's precision says; pack it again, or change the precision"
    )]
    Format {
        /// Name of the operand.
        arg: &'static str,
        /// Format of the operand.
        got: GroupFormat,
        /// Format that the problem requires.
        want: GroupFormat,
    },
    /// The codes have another shape than the problem.
    #[error("`{arg}` has {got:?} rows and columns, allowed: {want:?}; V has a row for each batch, head and channel")]
    Shape {
        /// Name of the operand.
        arg: &'static str,
        /// Rows and columns of the operand.
        got: [usize; 2],
        /// Rows and columns that the problem requires.
        want: [usize; 2],
    },
    /// A tensor that does not fit the problem.
    #[error(transparent)]
    Input(#[from] InputError),
    /// A tensor that cannot be made.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Elements cannot be quantised.
    #[error(transparent)]
    Elements(#[from] FormatError),
}

/// The formats of a problem, if packed operands support it.
fn formats(problem: &Problem) -> Result<(GroupAttention, [GroupFormat; 3]), PackedError> {
    let refuse = |got: String, allowed, hint| Err(PackedError::Problem { got, allowed, hint });
    let (spec, formats) = match problem.precision() {
        Precision::Groups(spec) => match (spec.qk, spec.pv) {
            (Some(qk), Some(pv)) => (spec, [qk, qk, pv]),
            _ => {
                return refuse(
                    format!("precision {}", problem.precision()),
                    "a format for QK and one for PV",
                    "use nvfp4",
                );
            }
        },
        other => return refuse(format!("precision {other}"), "nvfp4, mxfp4, mxfp8 or two of them", "use nvfp4"),
    };
    if !matches!(problem.layout(), Layout::Dense { .. }) {
        return refuse("packed sequences".into(), "dense batches", "pad them, or pass tensors");
    }
    let beside = [
        (problem.has_sinks(), "sinks"),
        (!problem.aux().is_empty(), "auxiliary tensors"),
        (problem.blocks().is_some(), "a block mask"),
        (problem.has_used_q() || problem.has_used_k(), "used lengths"),
    ];
    if let Some((_, got)) = beside.into_iter().find(|(has, _)| *has) {
        return refuse(got.into(), "q, k and v alone", "pass tensors, which are rounded as they are read");
    }
    Ok((spec, formats))
}

/// Rows and columns of the codes of q, k and v.
fn shapes(problem: &Problem) -> [[usize; 2]; 3] {
    let rows = |shape: Vec<usize>| [shape[0] * shape[1] * shape[2], shape[3]];
    let [batch, tokens, heads, dim] = [0, 1, 2, 3].map(|axis| problem.v_shape()[axis]);
    [rows(problem.q_shape()), rows(problem.k_shape()), [batch * heads * dim, tokens]]
}

impl PackedQkv {
    /// Packs tensors of the problem.
    pub fn new(
        problem: &Problem,
        q: &TensorView<'_>,
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<PackedQkv, PackedError> {
        let (_, formats) = formats(problem)?;
        Inputs::new(*q, *k, *v).bind(problem)?;
        let values = |x: &TensorView<'_>| x.to_f64().into_iter().map(|x| x as f32).collect::<Vec<f32>>();
        let [_, tokens, heads, dim] = [0, 1, 2, 3].map(|axis| problem.v_shape()[axis]);
        let v = values(v);
        let turned: Vec<f32> = (0..v.len())
            .map(|i| {
                let (row, token) = (i / tokens, i % tokens);
                let (batch, head, channel) = (row / (heads * dim), row / dim % heads, row % dim);
                v[((batch * tokens + token) * heads + head) * dim + channel]
            })
            .collect();
        let shapes = shapes(problem);
        let pack = |i: usize, x: &[f32]| Grouped::new(formats[i], x, shapes[i][0], shapes[i][1]);
        Ok(PackedQkv { q: pack(0, &values(q))?, k: pack(1, &values(k))?, v: pack(2, &turned)? })
    }

    /// Wraps codes that were made elsewhere.
    pub fn from_codes(problem: &Problem, q: Grouped, k: Grouped, v: Grouped) -> Result<PackedQkv, PackedError> {
        let packed = PackedQkv { q, k, v };
        packed.check(problem)?;
        Ok(packed)
    }

    /// Bytes of codes and scales.
    pub fn size_bytes(&self) -> usize {
        self.q.size_bytes() + self.k.size_bytes() + self.v.size_bytes()
    }

    /// The codes of Q, K and V.
    pub fn codes(&self) -> [&Grouped; 3] {
        [&self.q, &self.k, &self.v]
    }

    fn check(&self, problem: &Problem) -> Result<GroupAttention, PackedError> {
        let (spec, formats) = formats(problem)?;
        for (i, (arg, codes)) in ["q", "k", "v"].into_iter().zip(self.codes()).enumerate() {
            if codes.format() != formats[i] {
                return Err(PackedError::Format { arg, got: codes.format(), want: formats[i] });
            }
            let (got, want) = (codes.shape(), shapes(problem)[i]);
            if got != want {
                return Err(PackedError::Shape { arg, got, want });
            }
        }
        Ok(spec)
    }
}

/// Computes forward over packed operands into `outputs`, bitwise equal to [`forward`](crate::forward) on the tensors
/// they were packed from. Rows are expanded as tiles and blocks need them.
pub fn packed_forward(
    problem: &Problem,
    inputs: &PackedQkv,
    outputs: &mut Outputs<'_>,
    options: &Options,
) -> Result<Counters, PackedError> {
    let spec = inputs.check(problem)?;
    outputs.check(problem)?;
    // The tile loop needs tensors for their shapes: one row represents all.
    let row = |dim: usize| Tensor::zeros(problem.dtype(), &[dim]);
    let (qk, v) = (row(problem.head_dim())?, row(problem.value_dim())?);
    fn alike(row: &Tensor, shape: Vec<usize>) -> Result<TensorView<'_>, TensorError> {
        TensorView::strided(row.view().data(), &shape, &[0, 0, 0, 1])
    }
    let same = [alike(&qk, problem.q_shape())?, alike(&qk, problem.k_shape())?, alike(&v, problem.v_shape())?];
    let inputs_alike = Inputs::new(same[0], same[1], same[2]);
    let operands = inputs.codes().map(Operand::Codes);
    Ok(groups::over(&inputs_alike.bind(problem)?, &spec, operands, outputs, options))
}
