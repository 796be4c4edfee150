//! The gated delta rule: linear attention whose state decays by a gate and is corrected by a delta.
//!
//! For each value head a state S (`key_dim` x `value_dim`, f32) is updated token by token:
//!
//! ```text
//! S~ = e^g S          S' = S~ + beta k (v - S~^T k)^T          o = scale S'^T q
//! ```
//!
//! g <= 0 is the log decay, beta the step size. Names, shapes and meanings of all arguments are those of
//! flash-linear-attention (`chunk_gated_delta_rule`, `fused_recurrent_gated_delta_rule`): q and k are `[batch, tokens,
//! heads, key_dim]`, v and o `[batch, tokens, value_heads, value_dim]`, g and beta `[batch, tokens, value_heads]`,
//! states `[sequences, value_heads, key_dim, value_dim]`; packed batches drop the batch axis and carry `cu_seqlens`.
//! Value head h reads key head h / (value_heads / heads).

mod compare;
mod inputs;
pub mod oracle;
mod recurrence;

pub use compare::{check_backward, check_forward};
pub use inputs::{
    DeltaBound, DeltaForward, DeltaGradientOutputs, DeltaGradients, DeltaInputs, DeltaOutputs, DeltaSaved, Tokens,
};

use crate::dtype::DType;
use crate::error::{OffsetsError, ProblemError};
use crate::mask::FAR;
use crate::problem::check_offsets;

/// Added to the sum of squares before its root, if the rule normalises q and k.
pub const L2_EPS: f64 = 1e-6;

/// The layout of tokens in the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenLayout {
    /// `[batch, tokens, ..]`.
    Dense {
        /// Number of sequences.
        batch: usize,
        /// Tokens per sequence.
        len: usize,
    },
    /// `[total, ..]` with offsets in `cu_seqlens`.
    Packed {
        /// Number of sequences.
        batch: usize,
        /// Total number of tokens.
        total: usize,
        /// Length of the longest sequence.
        longest: usize,
    },
}

/// Whether the rule itself normalises q and k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum QkNorm {
    /// q and k are used unchanged.
    #[default]
    Given,
    /// Each row is divided by its length; called `use_qk_l2norm_in_kernel` elsewhere.
    Inside,
}

/// A validated problem: structure only. Contents come with [`DeltaInputs`].
///
/// ```
/// use fulgurite_core::gated_delta::GatedDelta;
/// let problem = GatedDelta::builder().dense(1, 128).heads(2, 4).head_dim(16).build()?;
/// assert_eq!(problem.v_shape(), [1, 128, 4, 16]);
/// let refused = GatedDelta::builder().dense(1, 128).heads(4, 2).head_dim(16).build();
/// assert!(refused.unwrap_err().to_string().contains("2 value heads over 4 key heads"));
/// # Ok::<(), fulgurite_core::ProblemError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct GatedDelta {
    layout: TokenLayout,
    heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    dtype: DType,
    scale: f32,
    qk_norm: QkNorm,
    initial_state: bool,
}

impl GatedDelta {
    /// Largest key and value dimension.
    pub const MAX_DIM: usize = 256;

    /// Starts the description of a problem.
    pub fn builder() -> GatedDeltaBuilder {
        GatedDeltaBuilder::default()
    }
    /// The layout of tokens in the tensors.
    pub fn layout(&self) -> TokenLayout {
        self.layout
    }
    /// Number of sequences, and of states.
    pub fn batch(&self) -> usize {
        match self.layout {
            TokenLayout::Dense { batch, .. } | TokenLayout::Packed { batch, .. } => batch,
        }
    }
    /// Largest number of tokens of a sequence.
    pub fn max_len(&self) -> usize {
        match self.layout {
            TokenLayout::Dense { len, .. } => len,
            TokenLayout::Packed { longest, .. } => longest,
        }
    }
    /// Number of heads of q and k.
    pub fn heads(&self) -> usize {
        self.heads
    }
    /// Number of heads of v, o, g and beta.
    pub fn value_heads(&self) -> usize {
        self.value_heads
    }
    /// Number of value heads that share a key head.
    pub fn group(&self) -> usize {
        self.value_heads / self.heads
    }
    /// Dimension of q and k.
    pub fn key_dim(&self) -> usize {
        self.key_dim
    }
    /// Dimension of v and o.
    pub fn value_dim(&self) -> usize {
        self.value_dim
    }
    /// Type of q, k, v and o.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Factor of o.
    pub fn scale(&self) -> f32 {
        self.scale
    }
    /// Whether the rule normalises q and k.
    pub fn qk_norm(&self) -> QkNorm {
        self.qk_norm
    }
    /// Whether sequences start from a given state.
    pub fn has_initial_state(&self) -> bool {
        self.initial_state
    }

    fn shape(&self, rest: &[usize]) -> Vec<usize> {
        let mut shape = match self.layout {
            TokenLayout::Dense { batch, len } => vec![batch, len],
            TokenLayout::Packed { total, .. } => vec![total],
        };
        shape.extend(rest);
        shape
    }
    /// Shape of q and k.
    pub fn q_shape(&self) -> Vec<usize> {
        self.shape(&[self.heads, self.key_dim])
    }
    /// Shape of v and o.
    pub fn v_shape(&self) -> Vec<usize> {
        self.shape(&[self.value_heads, self.value_dim])
    }
    /// Shape of g and beta.
    pub fn gate_shape(&self) -> Vec<usize> {
        self.shape(&[self.value_heads])
    }
    /// Shape of the states.
    pub fn state_shape(&self) -> Vec<usize> {
        vec![self.batch(), self.value_heads, self.key_dim, self.value_dim]
    }
}

/// Describes a problem step by step; only [`build`](GatedDeltaBuilder::build) can reject it.
#[derive(Debug, Clone, Default)]
pub struct GatedDeltaBuilder {
    layout: Option<TokenLayout>,
    offsets_error: Option<OffsetsError>,
    heads: Option<(usize, usize)>,
    dims: Option<(usize, usize)>,
    dtype: Option<DType>,
    scale: Option<f32>,
    qk_norm: QkNorm,
    initial_state: bool,
}

impl GatedDeltaBuilder {
    /// Sets sequences of equal length.
    pub fn dense(mut self, batch: usize, len: usize) -> Self {
        self.layout = Some(TokenLayout::Dense { batch, len });
        self
    }
    /// Sets packed sequences, from their cumulative offsets.
    pub fn packed(mut self, cu_seqlens: &[i32]) -> Self {
        match check_offsets("cu_seqlens", cu_seqlens) {
            Ok((total, longest)) => {
                self.layout = Some(TokenLayout::Packed { batch: cu_seqlens.len() - 1, total, longest });
            }
            Err(e) => self.offsets_error = Some(e),
        }
        self
    }
    /// Sets the number of heads of q and k, and of v.
    pub fn heads(mut self, heads: usize, value_heads: usize) -> Self {
        self.heads = Some((heads, value_heads));
        self
    }
    /// Sets one dimension for q, k and v.
    pub fn head_dim(self, dim: usize) -> Self {
        self.head_dims(dim, dim)
    }
    /// Sets the dimension of q and k, and that of v.
    pub fn head_dims(mut self, key_dim: usize, value_dim: usize) -> Self {
        self.dims = Some((key_dim, value_dim));
        self
    }
    /// Sets the type of q, k, v and o; the default is f32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }
    /// Sets the factor of o; the default is 1/sqrt(key_dim).
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }
    /// Sets whether the rule normalises q and k.
    pub fn qk_norm(mut self, norm: QkNorm) -> Self {
        self.qk_norm = norm;
        self
    }
    /// Makes sequences start from given states.
    pub fn initial_state(mut self) -> Self {
        self.initial_state = true;
        self
    }

    /// Checks everything and builds the problem.
    pub fn build(self) -> Result<GatedDelta, ProblemError> {
        if let Some(e) = self.offsets_error {
            return Err(e.into());
        }
        let layout = self.layout.ok_or(ProblemError::Missing { arg: "dense" })?;
        let (heads, value_heads) = self.heads.ok_or(ProblemError::Missing { arg: "heads" })?;
        let (key_dim, value_dim) = self.dims.ok_or(ProblemError::Missing { arg: "head_dim" })?;
        if heads == 0 || value_heads == 0 || value_heads % heads != 0 {
            return Err(ProblemError::ValueHeads { heads, value_heads });
        }
        for (arg, got) in [("key_dim", key_dim), ("value_dim", value_dim)] {
            if !(1..=GatedDelta::MAX_DIM).contains(&got) {
                return Err(ProblemError::StateDim { arg, got, max: GatedDelta::MAX_DIM });
            }
        }
        let dtype = self.dtype.unwrap_or(DType::F32);
        if !dtype.is_float() {
            return Err(ProblemError::DType { got: dtype });
        }
        let scale = self.scale.unwrap_or(1.0 / (key_dim as f32).sqrt());
        if !(scale.is_finite() && scale > 0.0) {
            return Err(ProblemError::Scale { got: scale });
        }
        let lengths = match layout {
            TokenLayout::Dense { batch, len } => [("batch", batch), ("len", len), ("heads", value_heads)],
            TokenLayout::Packed { batch, total, .. } => [("batch", batch), ("total", total), ("heads", value_heads)],
        };
        for (arg, got) in lengths {
            if got >= FAR as usize {
                return Err(ProblemError::Length { arg, got });
            }
        }
        let problem = GatedDelta {
            layout,
            heads,
            value_heads,
            key_dim,
            value_dim,
            dtype,
            scale,
            qk_norm: self.qk_norm,
            initial_state: self.initial_state,
        };
        let shapes = [("q", problem.q_shape()), ("v", problem.v_shape()), ("initial_state", problem.state_shape())];
        for (arg, shape) in shapes {
            let bytes = shape.iter().try_fold(8usize, |n, &m| n.checked_mul(m.max(1)));
            if bytes.is_none_or(|b| b > isize::MAX as usize) {
                return Err(ProblemError::Overflow { arg, shape });
            }
        }
        Ok(problem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> GatedDeltaBuilder {
        GatedDelta::builder().dense(1, 4).heads(2, 4).head_dim(8)
    }

    #[test]
    fn bad_problems_say_what_is_allowed() {
        let refused = |b: GatedDeltaBuilder| b.build().expect_err("must be refused").to_string();
        assert_eq!(
            refused(base().heads(2, 3)),
            "`heads`: 3 value heads over 2 key heads, allowed: at least 1 each, value heads a multiple of key heads; repeat or drop heads of v"
        );
        assert_eq!(refused(base().head_dims(300, 8)), "`key_dim` is 300, allowed: 1 to 256; split wider heads");
        assert_eq!(refused(base().head_dims(8, 0)), "`value_dim` is 0, allowed: 1 to 256; split wider heads");
        assert!(refused(base().scale(f32::NAN)).starts_with("`scale` is NaN"));
        assert!(refused(base().dtype(DType::I32)).contains("allowed: f32, f16, bf16"));
        assert!(refused(base().packed(&[0, 5, 3])).contains("`cu_seqlens`[2] is 3 after 5"));
        assert!(refused(base().dense(1 << 29, 1 << 29)).contains("overflows the address space"));
        assert!(refused(GatedDelta::builder().heads(1, 1).head_dim(8)).contains("`dense` was not given"));
    }
}
