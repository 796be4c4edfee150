//! Everything of a call that is not q, k, v or a result.

use crate::tensor::{Claims, Raw};
use fulgurite::{Choice, Engine, Exp, Inputs, Mask, Problem, Rescale, Settings, TensorView};
use fulgurite_core::Packed;
use fulgurite_core::problem::ALIBI_SLOPES;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::fmt::Display;
use std::sync::LazyLock;

/// Asked once: the system reads files to answer.
static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

/// A refusal as Python sees it.
pub fn refuse(error: impl Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// The options of a call, from a dict; what is absent has its default.
#[derive(Debug, FromPyObject)]
#[pyo3(from_item_all)]
pub struct Call {
    /// `bottom-right` or `top-left`: which diagonal a causal mask follows. Must be there, if only as None.
    causal: Option<String>,
    /// Keys before and after the bottom-right diagonal; None is unbounded.
    #[pyo3(default)]
    window: Option<(Option<i64>, Option<i64>)>,
    #[pyo3(default)]
    scale: Option<f32>,
    #[pyo3(default)]
    softcap: Option<f32>,
    /// f32, f16 or bf16, `[q_heads]`.
    #[pyo3(default)]
    sinks: Option<Raw>,
    /// f32, `[q_heads]`.
    #[pyo3(default)]
    alibi_slopes: Option<Raw>,
    /// i32, `[batch + 1]`; with it q, k and v are packed `[total, heads, dim]`.
    #[pyo3(default)]
    cu_seqlens_q: Option<Raw>,
    #[pyo3(default)]
    cu_seqlens_k: Option<Raw>,
    /// i32, `[batch]`.
    #[pyo3(default)]
    used_q: Option<Raw>,
    #[pyo3(default)]
    used_k: Option<Raw>,
    #[pyo3(default)]
    exp: Option<String>,
    #[pyo3(default)]
    engine: Option<String>,
    #[pyo3(default)]
    threads: Option<usize>,
    #[pyo3(default)]
    rescale: Option<String>,
}

impl Call {
    /// The problem that these tensors and options describe.
    pub fn problem(&self, q: &Raw, k: &Raw, v: &Raw) -> PyResult<Problem> {
        let packed = self.cu_seqlens_q.is_some() || self.cu_seqlens_k.is_some();
        let (rank, layout) =
            if packed { (3, "[total, heads, head_dim]") } else { (4, "[batch, sequence, heads, head_dim]") };
        for (arg, raw) in [("q", q), ("k", k), ("v", v)] {
            if raw.shape().len() != rank {
                return Err(refuse(format!("`{arg}` has shape {:?}, allowed: {layout}", raw.shape())));
            }
        }
        let [.., q_heads, head_dim] = *q.shape() else { unreachable!("the rank was checked") };
        let [.., kv_heads, value_dim] = *v.shape() else { unreachable!("the rank was checked") };
        let mut builder = Problem::builder()
            .heads(q_heads, kv_heads)
            .head_dims(head_dim, value_dim)
            .dtype(q.dtype("q")?)
            .mask(self.mask()?)
            .used_lengths(self.used_q.is_some(), self.used_k.is_some());
        builder = match (&self.cu_seqlens_q, &self.cu_seqlens_k) {
            (Some(cu_q), Some(cu_k)) => {
                let claims = &mut Claims::default();
                let (batch, max_q) = lengths(&cu_q.view("cu_seqlens_q", claims)?);
                let (_, max_k) = lengths(&cu_k.view("cu_seqlens_k", claims)?);
                let (total_q, total_k) = (q.shape()[0], k.shape()[0]);
                builder.packed_sizes(Packed { batch, total_q, total_k, max_q, max_k })
            }
            (None, None) => builder.dense(q.shape()[0], q.shape()[1], k.shape()[1]),
            _ => return Err(refuse("`cu_seqlens_q` and `cu_seqlens_k` belong together; give both or neither")),
        };
        if let Some(scale) = self.scale {
            builder = builder.scale(scale);
        }
        if let Some(softcap) = self.softcap {
            builder = builder.softcap(softcap);
        }
        if self.sinks.is_some() {
            builder = builder.sinks();
        }
        if self.alibi_slopes.is_some() {
            builder = builder.alibi();
        }
        if let Some(exp) = &self.exp {
            builder = builder.exp(exp.parse::<Exp>().map_err(refuse)?);
        }
        builder.build().map_err(refuse)
    }

    fn mask(&self) -> PyResult<Mask> {
        let mask = match self.causal.as_deref() {
            None => Mask::none(),
            Some("bottom-right") => Mask::causal(),
            Some("top-left") => Mask::causal_top_left(),
            Some(other) => {
                return Err(refuse(format!(
                    "`causal` is {other:?}, allowed: True, False, \"bottom-right\", \"top-left\""
                )));
            }
        };
        let window = self.window.map_or(Mask::none(), |(left, right)| Mask::window(left, right));
        Ok(mask.and(window))
    }

    /// All tensors that forward reads.
    pub fn inputs<'a>(&'a self, claims: &mut Claims, q: &'a Raw, k: &'a Raw, v: &'a Raw) -> PyResult<Inputs<'a>> {
        let mut inputs = Inputs::new(q.view("q", claims)?, k.view("k", claims)?, v.view("v", claims)?);
        let mut optional = |arg, raw: &'a Option<Raw>| raw.as_ref().map(|raw| raw.view(arg, claims)).transpose();
        inputs.sinks = optional("sinks", &self.sinks)?;
        inputs.cu_seqlens_q = optional("cu_seqlens_q", &self.cu_seqlens_q)?;
        inputs.cu_seqlens_k = optional("cu_seqlens_k", &self.cu_seqlens_k)?;
        inputs.used_q = optional("used_q", &self.used_q)?;
        inputs.used_k = optional("used_k", &self.used_k)?;
        if let Some(slopes) = optional(ALIBI_SLOPES, &self.alibi_slopes)? {
            inputs = inputs.aux(ALIBI_SLOPES, slopes);
        }
        Ok(inputs)
    }

    /// Who computes.
    pub fn engine(&self) -> PyResult<Box<dyn Engine>> {
        let choice = self.engine.as_deref().map_or(Ok(Choice::Best), str::parse).map_err(refuse)?;
        let mut settings = Settings::default().threads(self.threads.unwrap_or(*CORES));
        if let Some(rescale) = &self.rescale {
            settings = settings.rescale(rescale.parse::<Rescale>().map_err(refuse)?);
        }
        fulgurite::engine_with(choice, &settings).map_err(refuse)
    }
}

/// Number of sequences and the longest, of offsets that nobody has checked yet: binding them to the problem does.
fn lengths(offsets: &TensorView<'_>) -> (usize, usize) {
    let offsets = offsets.to_f64();
    let longest = offsets.windows(2).map(|pair| (pair[1] - pair[0]).max(0.0) as usize).max();
    (offsets.len().saturating_sub(1), longest.unwrap_or(0))
}
