//! The problems that registered kernels belong to.

use crate::attention::backward::plan::Kernels;
use crate::attention::forward::plan::{ConfigTable, ForwardPlan, NoKernel};
use crate::gemm::Layouts;
use crate::tensor_operator::TensorOperator;
use fulgurite_core::{BlockSpec, DType, Mask, Problem, ProblemError};
use fulgurite_ptx::{Kernel, Number, TensorUnit};
use std::sync::Arc;

/// A call of a kernel on random tensors. The caller chooses lengths, batch and heads; the kernel determines the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Example {
    /// An operator over whole tensors.
    Tensors(&'static TensorOperator),
    /// A matrix product.
    Product {
        /// Element type.
        number: Number,
        /// Memory layouts of the operands.
        layouts: Layouts,
        /// The unit that multiplies.
        unit: TensorUnit,
        /// Smallest number of CTAs in a cluster.
        cluster: u32,
    },
    /// A kernel of attention.
    Attention {
        /// The problem, except lengths, batch and heads.
        problem: AttentionExample,
        /// The kernel of the operator.
        part: AttentionPart,
    },
}

impl Example {
    /// The tensor unit that the kernel needs; `None` for one that multiplies no matrices.
    pub fn unit(&self) -> Option<TensorUnit> {
        match self {
            Example::Tensors(_) => None,
            Example::Product { unit, .. } => Some(*unit),
            Example::Attention { part, .. } => Some(match part {
                AttentionPart::Forward | AttentionPart::Decode | AttentionPart::Backward(_) => TensorUnit::Wgmma,
                AttentionPart::ForwardSync | AttentionPart::BackwardSync => TensorUnit::MmaSync,
                AttentionPart::ForwardTensor | AttentionPart::BackwardTensor => TensorUnit::Tcgen05,
            }),
        }
    }
}

/// An attention problem, except lengths, batch and heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionExample {
    /// Element type.
    pub number: Number,
    /// Head dimension of q, k and v.
    pub head_dim: u32,
    /// Mask, modifier or layout.
    pub feature: Feature,
}

/// Mask, modifier or layout of an attention problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// No mask.
    Full,
    /// A causal mask.
    Causal,
    /// Softcap.
    Softcap,
    /// ALiBi under a causal mask.
    Alibi,
    /// A bias for each head, in bf16.
    Bias,
    /// A document mask.
    Documents,
    /// Sinks and a window of 1024 keys.
    Sinks,
    /// Packed sequences under a causal mask: two whose lengths are as one to three.
    Packed,
    /// A block mask over a causal one.
    Blocks,
}

impl AttentionExample {
    /// The problem with these sizes.
    pub fn problem(
        &self,
        [batch, q_len, k_len]: [usize; 3],
        [heads, kv_heads]: [usize; 2],
    ) -> Result<Problem, ProblemError> {
        let dtype = if self.number == Number::F16 { DType::F16 } else { DType::Bf16 };
        let base = Problem::builder().heads(heads, kv_heads).head_dim(self.head_dim as usize).dtype(dtype);
        let offsets = |len: usize| [0, batch * len / 4, batch * len].map(|at| at as i32);
        let problem = match self.feature {
            Feature::Packed => base.packed(&offsets(q_len), &offsets(k_len)),
            _ => base.dense(batch, q_len, k_len),
        };
        let problem = match self.feature {
            Feature::Full => problem,
            Feature::Causal | Feature::Packed => problem.mask(Mask::causal()),
            Feature::Softcap => problem.softcap(30.0),
            Feature::Alibi => problem.alibi().mask(Mask::causal()),
            Feature::Bias => problem.bias([1, heads, q_len, k_len], DType::Bf16, false),
            Feature::Documents => {
                let ids = [("documents_q", q_len), ("documents_k", k_len)];
                let problem = problem.mask(Mask::documents());
                ids.into_iter().fold(problem, |p, (name, len)| p.aux(name, DType::I32, &[batch, len]))
            }
            Feature::Sinks => problem.sinks().mask(Mask::window(1024, 0)),
            Feature::Blocks => problem.block_mask(BlockSpec::default()).mask(Mask::causal()),
        };
        problem.build()
    }

    /// The forward plan of a problem of this kind, or the decode plan, by a part's instructions.
    pub fn plan(&self, problem: &Problem, part: AttentionPart) -> Result<ForwardPlan, NoKernel> {
        match part {
            AttentionPart::ForwardSync => ForwardPlan::mma_sync(problem, None, &ConfigTable::default()),
            AttentionPart::ForwardTensor => ForwardPlan::tcgen05(problem, None, &ConfigTable::default()),
            _ => ForwardPlan::new(problem, None),
        }
    }
}

/// One of the attention kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionPart {
    /// Forward attention on Hopper (`wgmma`).
    Forward,
    /// Forward attention on every GPU since Ampere (`mma.sync`).
    ForwardSync,
    /// Forward attention on data-centre Blackwell (`tcgen05`).
    ForwardTensor,
    /// Forward attention with few queries (decode).
    Decode,
    /// A kernel of the gradients on Hopper (`wgmma`).
    Backward(BackwardPart),
    /// The main kernel of the gradients on every GPU since Ampere (`mma.sync`).
    BackwardSync,
    /// The main kernel of the gradients on data-centre Blackwell (`tcgen05`).
    BackwardTensor,
}

/// One of the kernels that compute gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardPart {
    /// Row sums and zeros, before the main kernel.
    Prepare,
    /// The products.
    Main,
    /// The conversion of d_q, after the main kernel.
    Finish,
}

impl BackwardPart {
    /// This kernel among those of a call, if the call has it.
    pub fn of<'a>(&self, kernels: &'a Kernels) -> Option<&'a Arc<Kernel>> {
        match self {
            BackwardPart::Prepare => Some(&kernels.prepare),
            BackwardPart::Main => Some(&kernels.main),
            BackwardPart::Finish => kernels.finish.as_ref(),
        }
    }
}
