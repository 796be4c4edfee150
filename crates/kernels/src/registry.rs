//! Every kernel by name, so that tools can list, print and assemble them all.
//!
//! ```
//! use fulgurite_kernels::registry;
//! use fulgurite_ptx::Target;
//!
//! let entry = registry::all().iter().find(|entry| entry.name == "vector_add").unwrap();
//! let kernel = (entry.build)(Target::AMPERE)?;
//! assert!(kernel.ptx().contains(".target sm_80"));
//! # Ok::<(), fulgurite_ptx::BuildError>(())
//! ```

use crate::add::VECTOR_ADD;
use crate::attention::backward::BackwardConfig;
use crate::attention::decode::DecodeConfig;
use crate::attention::forward::config::ForwardConfig;
use crate::attention::forward::plan::{ConfigTable, ForwardPlan};
use crate::attention::{backward, decode, forward};
use crate::gemm;
use crate::gemm::{GemmConfig, Layouts};
use crate::parts::repack;
use crate::row_dot::ROW_DOT;
use crate::softmax::ROW_SOFTMAX;
use crate::tensor_operator::TensorOperator;
use fulgurite_core::{BlockSpec, DType, Mask, Problem, ProblemError};
use fulgurite_ptx::{BuildError, Half, Kernel, Major, Number, Pair, Target, Word, bf16, f16};
use std::sync::OnceLock;

/// A kernel that can be built by name.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Unique name of the kernel.
    pub name: &'static str,
    /// One-line summary of what it computes.
    pub summary: &'static str,
    /// Builds it with its usual tile configuration. Fails for a target that lacks one of its instructions, and names
    /// the instruction.
    pub build: fn(Target) -> Result<Kernel, BuildError>,
    /// A call on random tensors; `None` for a kernel that reads tensors with special contents, such as offsets.
    pub example: Option<Example>,
}

/// A call of a kernel on random tensors. The caller chooses lengths, batch and heads; the kernel determines the rest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Example {
    /// An operator over whole tensors.
    Tensors(&'static TensorOperator),
    /// A matrix product on Hopper (`wgmma`).
    Product {
        /// Element type.
        number: Number,
        /// Memory layouts of the operands.
        layouts: Layouts,
    },
    /// A product of single warps (`mma.sync`).
    SyncProduct {
        /// Element type.
        number: Number,
        /// Memory layouts of the operands.
        layouts: Layouts,
    },
    /// A kernel of attention.
    Attention {
        /// The problem, except lengths, batch and heads.
        problem: AttentionExample,
        /// The kernel of the operator.
        part: AttentionPart,
    },
}

/// An attention problem, except lengths, batch and heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionExample {
    /// Element type.
    pub number: Number,
    /// Head dimension of q, k and v.
    pub head_dim: u32,
    /// Whether the mask is causal; otherwise there is no mask.
    pub causal: bool,
}

impl AttentionExample {
    /// The problem with these sizes.
    pub fn problem(
        &self,
        [batch, q_len, k_len]: [usize; 3],
        [heads, kv_heads]: [usize; 2],
    ) -> Result<Problem, ProblemError> {
        let dtype = if self.number == Number::F16 { DType::F16 } else { DType::Bf16 };
        let mask = if self.causal { Mask::causal() } else { Mask::none() };
        let problem = Problem::builder().dense(batch, q_len, k_len).heads(heads, kv_heads);
        problem.head_dim(self.head_dim as usize).mask(mask).dtype(dtype).build()
    }
}

/// One of the attention kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionPart {
    /// Forward attention.
    Forward,
    /// Forward attention with few queries (decode).
    Decode,
    /// A launch of the gradients, by its index in the plan.
    Backward {
        /// Index of the launch, from 0.
        launch: usize,
    },
}

const fn attention_example(number: Number, head_dim: u32, causal: bool, part: AttentionPart) -> Example {
    Example::Attention { problem: AttentionExample { number, head_dim, causal }, part }
}

const fn forward_example(number: Number, head_dim: u32, causal: bool) -> Example {
    attention_example(number, head_dim, causal, AttentionPart::Forward)
}

const fn decode_example(number: Number, head_dim: u32, causal: bool) -> Example {
    attention_example(number, head_dim, causal, AttentionPart::Decode)
}

const fn backward_example(number: Number, head_dim: u32, causal: bool, launch: usize) -> Example {
    attention_example(number, head_dim, causal, AttentionPart::Backward { launch })
}

/// Operators over whole tensors, which the command line and Python call by name.
pub fn tensor_operators() -> impl Iterator<Item = &'static TensorOperator> {
    all().iter().filter_map(|entry| match entry.example {
        Some(Example::Tensors(operator)) => Some(operator),
        _ => None,
    })
}

/// The entry of an operator over whole tensors.
macro_rules! entry {
    ($operator:ident) => {
        Entry {
            name: $operator.name,
            summary: $operator.summary,
            build: |target| $operator.kernel(target),
            example: Some(Example::Tensors(&$operator)),
        }
    };
}

/// Every kernel, in the order in which they are listed.
pub fn all() -> &'static [Entry] {
    static JOINED: OnceLock<Vec<Entry>> = OnceLock::new();
    JOINED.get_or_init(|| [ALL, FEATURES, DECODE_FEATURES, MMA_SYNC].concat())
}

/// Operand layouts in the letters of BLAS, for row-major matrices: `t` means transposed.
const NN: Layouts = Layouts { a: Major::Inner, b: Major::Outer };
const NT: Layouts = Layouts { a: Major::Inner, b: Major::Inner };
const TN: Layouts = Layouts { a: Major::Outer, b: Major::Outer };
const TT: Layouts = Layouts { a: Major::Outer, b: Major::Inner };

fn product<T: Half>(target: Target, layouts: Layouts) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    gemm::kernel::<T>(target, layouts, GemmConfig::default())
}

/// Forward attention, tuned for 8192 keys.
fn attention<T: Half>(target: Target, head_dim: u32, mask: Mask) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let config = ForwardConfig::hopper(head_dim, 8192);
    let features = forward::Features::plain([head_dim, head_dim], mask);
    forward::kernel::<T>(target, &features, config)
}

/// Forward attention with few queries.
fn attention_decode<T: Half>(target: Target, head_dim: u32, mask: Mask) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let dims = [head_dim, head_dim];
    decode::kernel::<T>(target, &forward::Features::plain(dims, mask), DecodeConfig::hopper(decode::padded(dims)))
}

/// The main kernel of the gradients of attention.
fn gradients<T: Half>(target: Target, head_dim: u32, mask: Mask) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    backward::main::kernel::<T>(target, &of_backward(head_dim, mask), BackwardConfig::hopper(head_dim))
}

fn of_backward(head_dim: u32, mask: Mask) -> backward::Features {
    backward::Features::plain([head_dim, head_dim], mask)
}

/// Forward attention in bf16 with a feature, planned for a call of 2 x 8192 tokens.
fn featured(target: Target, head_dim: usize, feature: &str, variant: Variant) -> Result<Kernel, BuildError> {
    let (batch, len, heads) = (2, 8192, 16);
    let q_len = if variant == Variant::Decode { 4 } else { len };
    let offsets = |len: usize| [0, len / 2, 2 * len].map(|at| at as i32);
    let base = Problem::builder().heads(heads, heads / 4).head_dim(head_dim).dtype(DType::Bf16);
    let problem = match feature {
        "packed" => base.packed(&offsets(q_len), &offsets(len)).mask(Mask::causal()),
        _ => base.dense(batch, q_len, len),
    };
    let problem = match feature {
        "softcap" => problem.softcap(30.0),
        "alibi" => problem.alibi().mask(Mask::causal()),
        "bias" => problem.bias([1, heads, q_len, len], DType::Bf16, false),
        "documents" => {
            let ids = [("documents_q", q_len), ("documents_k", len)];
            let problem = problem.mask(Mask::documents());
            ids.into_iter().fold(problem, |p, (name, len)| p.aux(name, DType::I32, &[batch, len]))
        }
        "causal" => problem.mask(Mask::causal()),
        "sinks" => problem.sinks().mask(Mask::window(1024, 0)),
        "blocks" => problem.block_mask(BlockSpec::default()).mask(Mask::causal()),
        _ => problem,
    };
    let problem = problem.build().unwrap_or_else(|e| panic!("bug in fulgurite: {feature}: {e}"));
    let plan = match variant {
        Variant::Wgmma | Variant::Decode => ForwardPlan::new(&problem, None),
        Variant::MmaSync => ForwardPlan::mma_sync(&problem, None, &ConfigTable::default()),
    };
    let plan = plan.unwrap_or_else(|e| panic!("bug in fulgurite: no {e}"));
    let plan = if problem.has_sinks() { plan.with_sinks(DType::F32) } else { plan };
    plan.kernel(target)
}

/// The kernel of forward attention that is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    Wgmma,
    Decode,
    MmaSync,
}

/// Entries of features at three head dimensions.
macro_rules! features {
    ($($feature:literal: $summary:literal;)*) => {
        const FEATURES: &[Entry] = &[$(
            features!(@one 64, $feature, $summary),
            features!(@one 128, $feature, $summary),
            features!(@one 256, $feature, $summary),
        )*];
    };
    (@one $dim:literal, $feature:literal, $summary:literal) => {
        Entry {
            name: concat!("attention-bf16-d", $dim, "-", $feature),
            summary: concat!("forward attention, bf16, head_dim ", $dim, ", ", $summary),
            build: |target| featured(target, $dim, $feature, Variant::Wgmma),
            example: None,
        }
    };
    (@sync $dim:literal, $feature:literal, $summary:literal) => {
        Entry {
            name: concat!("attention-sync-bf16-d", $dim, "-", $feature),
            summary: concat!("forward attention by mma.sync, bf16, head_dim ", $dim, ", ", $summary),
            build: |target| featured(target, $dim, $feature, Variant::MmaSync),
            example: None,
        }
    };
    (@decode $dim:literal, $feature:literal, $summary:literal) => {
        Entry {
            name: concat!("attention-decode-bf16-d", $dim, "-", $feature),
            summary: concat!("decode attention, bf16, head_dim ", $dim, ", ", $summary),
            build: |target| featured(target, $dim, $feature, Variant::Decode),
            example: None,
        }
    };
}
features! {
    "softcap": "softcap";
    "alibi": "causal mask and ALiBi";
    "bias": "a bias for each head";
    "documents": "document mask";
    "sinks": "window and sinks";
    "packed": "packed sequences under a causal mask";
    "blocks": "block mask over a causal one";
}
const DECODE_FEATURES: &[Entry] = &[
    features!(@decode 128, "softcap", "softcap"),
    features!(@decode 256, "softcap", "softcap"),
    features!(@decode 128, "alibi", "causal mask and ALiBi"),
    features!(@decode 128, "bias", "a bias for each head"),
    features!(@decode 256, "bias", "a bias for each head"),
    features!(@decode 128, "documents", "document mask"),
    features!(@decode 256, "documents", "document mask"),
    features!(@decode 128, "sinks", "window and sinks"),
    features!(@decode 128, "packed", "packed sequences under a causal mask"),
    features!(@decode 256, "packed", "packed sequences under a causal mask"),
];
/// Forward attention on every GPU since Ampere.
const MMA_SYNC: &[Entry] = &[
    features!(@sync 64, "full", "no mask"),
    features!(@sync 64, "causal", "causal mask"),
    features!(@sync 96, "full", "no mask"),
    features!(@sync 96, "causal", "causal mask"),
    features!(@sync 128, "full", "no mask"),
    features!(@sync 128, "causal", "causal mask"),
    features!(@sync 256, "full", "no mask"),
    features!(@sync 256, "causal", "causal mask"),
    features!(@sync 64, "softcap", "softcap"),
    features!(@sync 64, "alibi", "causal mask and ALiBi"),
    features!(@sync 64, "bias", "a bias for each head"),
    features!(@sync 64, "documents", "document mask"),
    features!(@sync 64, "sinks", "window and sinks"),
    features!(@sync 64, "packed", "packed sequences under a causal mask"),
    features!(@sync 64, "blocks", "block mask over a causal one"),
    features!(@sync 128, "softcap", "softcap"),
    features!(@sync 128, "alibi", "causal mask and ALiBi"),
    features!(@sync 128, "bias", "a bias for each head"),
    features!(@sync 128, "documents", "document mask"),
    features!(@sync 128, "sinks", "window and sinks"),
    features!(@sync 128, "packed", "packed sequences under a causal mask"),
    features!(@sync 128, "blocks", "block mask over a causal one"),
    features!(@sync 256, "softcap", "softcap"),
    features!(@sync 256, "alibi", "causal mask and ALiBi"),
    features!(@sync 256, "bias", "a bias for each head"),
    features!(@sync 256, "documents", "document mask"),
    features!(@sync 256, "sinks", "window and sinks"),
    features!(@sync 256, "packed", "packed sequences under a causal mask"),
    features!(@sync 256, "blocks", "block mask over a causal one"),
];

const ALL: &[Entry] = &[
    entry!(VECTOR_ADD),
    Entry {
        name: "gemm-bf16-nn",
        summary: "C = A B, bf16; A [m][k], B [k][n]",
        build: |target| product::<bf16>(target, NN),
        example: Some(Example::Product { number: Number::Bf16, layouts: NN }),
    },
    Entry {
        name: "gemm-bf16-nt",
        summary: "C = A B, bf16; A [m][k], B [n][k]",
        build: |target| product::<bf16>(target, NT),
        example: Some(Example::Product { number: Number::Bf16, layouts: NT }),
    },
    Entry {
        name: "gemm-bf16-tn",
        summary: "C = A B, bf16; A [k][m], B [k][n]",
        build: |target| product::<bf16>(target, TN),
        example: Some(Example::Product { number: Number::Bf16, layouts: TN }),
    },
    Entry {
        name: "gemm-bf16-tt",
        summary: "C = A B, bf16; A [k][m], B [n][k]",
        build: |target| product::<bf16>(target, TT),
        example: Some(Example::Product { number: Number::Bf16, layouts: TT }),
    },
    Entry {
        name: "gemm-f16-nn",
        summary: "C = A B, f16; A [m][k], B [k][n]",
        build: |target| product::<f16>(target, NN),
        example: Some(Example::Product { number: Number::F16, layouts: NN }),
    },
    Entry {
        name: "gemm-f16-nt",
        summary: "C = A B, f16; A [m][k], B [n][k]",
        build: |target| product::<f16>(target, NT),
        example: Some(Example::Product { number: Number::F16, layouts: NT }),
    },
    Entry {
        name: "gemm-f16-tn",
        summary: "C = A B, f16; A [k][m], B [k][n]",
        build: |target| product::<f16>(target, TN),
        example: Some(Example::Product { number: Number::F16, layouts: TN }),
    },
    Entry {
        name: "gemm-f16-tt",
        summary: "C = A B, f16; A [k][m], B [n][k]",
        build: |target| product::<f16>(target, TT),
        example: Some(Example::Product { number: Number::F16, layouts: TT }),
    },
    Entry {
        name: "gemm-sync-bf16-nn",
        summary: "C = A B by mma.sync, bf16; A [m][k], B [k][n]",
        build: |target| gemm::mma_sync::kernel::<bf16>(target, NN),
        example: Some(Example::SyncProduct { number: Number::Bf16, layouts: NN }),
    },
    Entry {
        name: "gemm-sync-bf16-nt",
        summary: "C = A B by mma.sync, bf16; A [m][k], B [n][k]",
        build: |target| gemm::mma_sync::kernel::<bf16>(target, NT),
        example: Some(Example::SyncProduct { number: Number::Bf16, layouts: NT }),
    },
    Entry {
        name: "gemm-sync-bf16-tn",
        summary: "C = A B by mma.sync, bf16; A [k][m], B [k][n]",
        build: |target| gemm::mma_sync::kernel::<bf16>(target, TN),
        example: Some(Example::SyncProduct { number: Number::Bf16, layouts: TN }),
    },
    Entry {
        name: "gemm-sync-bf16-tt",
        summary: "C = A B by mma.sync, bf16; A [k][m], B [n][k]",
        build: |target| gemm::mma_sync::kernel::<bf16>(target, TT),
        example: Some(Example::SyncProduct { number: Number::Bf16, layouts: TT }),
    },
    entry!(ROW_SOFTMAX),
    entry!(ROW_DOT),
    Entry {
        name: "attention-bf16-d64-full",
        summary: "forward attention, bf16, head_dim 64, no mask",
        build: |target| attention::<bf16>(target, 64, Mask::none()),
        example: Some(forward_example(Number::Bf16, 64, false)),
    },
    Entry {
        name: "attention-bf16-d64-causal",
        summary: "forward attention, bf16, head_dim 64, causal mask",
        build: |target| attention::<bf16>(target, 64, Mask::causal()),
        example: Some(forward_example(Number::Bf16, 64, true)),
    },
    Entry {
        name: "attention-bf16-d128-full",
        summary: "forward attention, bf16, head_dim 128, no mask",
        build: |target| attention::<bf16>(target, 128, Mask::none()),
        example: Some(forward_example(Number::Bf16, 128, false)),
    },
    Entry {
        name: "attention-bf16-d128-causal",
        summary: "forward attention, bf16, head_dim 128, causal mask",
        build: |target| attention::<bf16>(target, 128, Mask::causal()),
        example: Some(forward_example(Number::Bf16, 128, true)),
    },
    Entry {
        name: "attention-f16-d64-full",
        summary: "forward attention, f16, head_dim 64, no mask",
        build: |target| attention::<f16>(target, 64, Mask::none()),
        example: Some(forward_example(Number::F16, 64, false)),
    },
    Entry {
        name: "attention-f16-d64-causal",
        summary: "forward attention, f16, head_dim 64, causal mask",
        build: |target| attention::<f16>(target, 64, Mask::causal()),
        example: Some(forward_example(Number::F16, 64, true)),
    },
    Entry {
        name: "attention-f16-d128-full",
        summary: "forward attention, f16, head_dim 128, no mask",
        build: |target| attention::<f16>(target, 128, Mask::none()),
        example: Some(forward_example(Number::F16, 128, false)),
    },
    Entry {
        name: "attention-f16-d128-causal",
        summary: "forward attention, f16, head_dim 128, causal mask",
        build: |target| attention::<f16>(target, 128, Mask::causal()),
        example: Some(forward_example(Number::F16, 128, true)),
    },
    Entry {
        name: "attention-bf16-d512-full",
        summary: "forward attention, bf16, head_dim 512, no mask",
        build: |target| attention::<bf16>(target, 512, Mask::none()),
        example: Some(forward_example(Number::Bf16, 512, false)),
    },
    Entry {
        name: "attention-f16-d512-causal",
        summary: "forward attention, f16, head_dim 512, causal mask",
        build: |target| attention::<f16>(target, 512, Mask::causal()),
        example: Some(forward_example(Number::F16, 512, true)),
    },
    Entry {
        name: "attention-decode-bf16-d64-full",
        summary: "decode attention, bf16, head_dim 64, no mask",
        build: |target| attention_decode::<bf16>(target, 64, Mask::none()),
        example: Some(decode_example(Number::Bf16, 64, false)),
    },
    Entry {
        name: "attention-decode-bf16-d128-full",
        summary: "decode attention, bf16, head_dim 128, no mask",
        build: |target| attention_decode::<bf16>(target, 128, Mask::none()),
        example: Some(decode_example(Number::Bf16, 128, false)),
    },
    Entry {
        name: "attention-decode-bf16-d128-causal",
        summary: "decode attention, bf16, head_dim 128, causal mask",
        build: |target| attention_decode::<bf16>(target, 128, Mask::causal()),
        example: Some(decode_example(Number::Bf16, 128, true)),
    },
    Entry {
        name: "attention-decode-bf16-d256-full",
        summary: "decode attention, bf16, head_dim 256, no mask",
        build: |target| attention_decode::<bf16>(target, 256, Mask::none()),
        example: Some(decode_example(Number::Bf16, 256, false)),
    },
    Entry {
        name: "attention-decode-f16-d128-full",
        summary: "decode attention, f16, head_dim 128, no mask",
        build: |target| attention_decode::<f16>(target, 128, Mask::none()),
        example: Some(decode_example(Number::F16, 128, false)),
    },
    Entry {
        name: "attention-pack",
        summary: "a tensor of 16-bit elements whose strides the copy engine cannot take, packed",
        build: |target| repack::kernel(target, repack::Direction::Pack),
        example: None,
    },
    Entry {
        name: "attention-unpack",
        summary: "a packed tensor of 16-bit elements, back to where it lies",
        build: |target| repack::kernel(target, repack::Direction::Unpack),
        example: None,
    },
    Entry {
        name: "backward-bf16-d64-full",
        summary: "gradients of attention, bf16, head_dim 64, no mask",
        build: |target| gradients::<bf16>(target, 64, Mask::none()),
        example: Some(backward_example(Number::Bf16, 64, false, 1)),
    },
    Entry {
        name: "backward-bf16-d64-causal",
        summary: "gradients of attention, bf16, head_dim 64, causal mask",
        build: |target| gradients::<bf16>(target, 64, Mask::causal()),
        example: Some(backward_example(Number::Bf16, 64, true, 1)),
    },
    Entry {
        name: "backward-bf16-d128-full",
        summary: "gradients of attention, bf16, head_dim 128, no mask",
        build: |target| gradients::<bf16>(target, 128, Mask::none()),
        example: Some(backward_example(Number::Bf16, 128, false, 1)),
    },
    Entry {
        name: "backward-bf16-d128-causal",
        summary: "gradients of attention, bf16, head_dim 128, causal mask",
        build: |target| gradients::<bf16>(target, 128, Mask::causal()),
        example: Some(backward_example(Number::Bf16, 128, true, 1)),
    },
    Entry {
        name: "backward-f16-d64-full",
        summary: "gradients of attention, f16, head_dim 64, no mask",
        build: |target| gradients::<f16>(target, 64, Mask::none()),
        example: Some(backward_example(Number::F16, 64, false, 1)),
    },
    Entry {
        name: "backward-f16-d64-causal",
        summary: "gradients of attention, f16, head_dim 64, causal mask",
        build: |target| gradients::<f16>(target, 64, Mask::causal()),
        example: Some(backward_example(Number::F16, 64, true, 1)),
    },
    Entry {
        name: "backward-f16-d128-full",
        summary: "gradients of attention, f16, head_dim 128, no mask",
        build: |target| gradients::<f16>(target, 128, Mask::none()),
        example: Some(backward_example(Number::F16, 128, false, 1)),
    },
    Entry {
        name: "backward-f16-d128-causal",
        summary: "gradients of attention, f16, head_dim 128, causal mask",
        build: |target| gradients::<f16>(target, 128, Mask::causal()),
        example: Some(backward_example(Number::F16, 128, true, 1)),
    },
    Entry {
        name: "backward-bf16-d128-packed",
        summary: "gradients of attention, bf16, head_dim 128, causal mask, sequences with lengths of their own",
        build: |target| {
            let mut features = of_backward(128, Mask::causal());
            features.ragged.packed = true;
            let config = BackwardConfig::with_room(128, true, backward::RegisterPressure::None);
            backward::main::kernel::<bf16>(target, &features, config)
        },
        example: None,
    },
    Entry {
        name: "backward-bf16-d256-full",
        summary: "gradients of attention, bf16, head_dim 256, no mask",
        build: |target| gradients::<bf16>(target, 256, Mask::none()),
        example: Some(backward_example(Number::Bf16, 256, false, 1)),
    },
    Entry {
        name: "backward-bf16-d256-causal",
        summary: "gradients of attention, bf16, head_dim 256, causal mask",
        build: |target| gradients::<bf16>(target, 256, Mask::causal()),
        example: Some(backward_example(Number::Bf16, 256, true, 1)),
    },
    Entry {
        name: "backward-f16-d256-full",
        summary: "gradients of attention, f16, head_dim 256, no mask",
        build: |target| gradients::<f16>(target, 256, Mask::none()),
        example: Some(backward_example(Number::F16, 256, false, 1)),
    },
    Entry {
        name: "backward-f16-d256-causal",
        summary: "gradients of attention, f16, head_dim 256, causal mask",
        build: |target| gradients::<f16>(target, 256, Mask::causal()),
        example: Some(backward_example(Number::F16, 256, true, 1)),
    },
    Entry {
        name: "backward-prepare-bf16-d128",
        summary: "row sums of d_o o and zeros, before the gradients; bf16, head_dim 128",
        build: |target| {
            backward::prepare::kernel::<bf16>(target, &of_backward(128, Mask::none()), BackwardConfig::hopper(128))
        },
        example: Some(backward_example(Number::Bf16, 128, false, 0)),
    },
    Entry {
        name: "backward-finish-bf16-d128",
        summary: "d_q from its sums, after the gradients; bf16, head_dim 128",
        build: |target| {
            backward::finish::kernel::<bf16>(target, &of_backward(128, Mask::none()), BackwardConfig::hopper(128))
        },
        example: Some(backward_example(Number::Bf16, 128, false, 2)),
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let names: std::collections::HashSet<&str> = all().iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), all().len());
    }

    #[test]
    fn every_kernel_is_built_for_hopper_and_printed_the_same_twice() {
        for entry in all() {
            let build = || (entry.build)(Target::HOPPER).unwrap_or_else(|e| panic!("{}: {e}", entry.name));
            let kernel = build();
            assert_eq!(kernel.ptx(), kernel.ptx(), "{}", entry.name);
            assert_eq!(kernel.ptx(), build().ptx(), "{}", entry.name);
        }
    }

    #[test]
    fn a_kernel_for_another_target_says_what_it_needs() {
        for entry in all() {
            match (entry.build)(Target::AMPERE) {
                Ok(kernel) => assert!(kernel.ptx().contains(".target sm_80"), "{}", entry.name),
                Err(BuildError::Needs { .. }) => {}
                Err(e) => panic!("{}: {e}", entry.name),
            }
        }
    }
}
