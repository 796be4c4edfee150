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

mod example;

pub use example::{AttentionExample, AttentionPart, Example, Feature};

use crate::add::VECTOR_ADD;
use crate::attention::backward::plan::BackwardPlan;
use crate::attention::backward::{BackwardConfig, Order};
use crate::attention::decode::DecodeConfig;
use crate::attention::forward::config::ForwardConfig;
use crate::attention::{backward, decode, forward};
use crate::gemm;
use crate::gemm::{GemmConfig, Layouts};
use crate::parts::repack;
use crate::row_dot::ROW_DOT;
use crate::softmax::ROW_SOFTMAX;
use crate::tensor_operator::TensorOperator;
use fulgurite_core::Mask;
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
    /// The problem that it belongs to; `None` for a kernel that serves every problem, such as a copy.
    pub example: Option<Example>,
}

const fn attention_example(number: Number, head_dim: u32, feature: Feature, part: AttentionPart) -> Example {
    Example::Attention { problem: AttentionExample { number, head_dim, feature }, part }
}

const fn forward_example(number: Number, head_dim: u32, feature: Feature) -> Example {
    attention_example(number, head_dim, feature, AttentionPart::Forward)
}

const fn decode_example(number: Number, head_dim: u32, feature: Feature) -> Example {
    attention_example(number, head_dim, feature, AttentionPart::Decode)
}

const fn backward_example(number: Number, head_dim: u32, feature: Feature, launch: usize) -> Example {
    attention_example(number, head_dim, feature, AttentionPart::Backward { launch })
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
    JOINED.get_or_init(|| [ALL, FEATURES, DECODE_FEATURES, MMA_SYNC, BACKWARD_SYNC, TCGEN05, TENSOR].concat())
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

/// Forward attention of an example, planned for a call of 2 x 8192 tokens.
fn planned(target: Target, example: AttentionExample, part: AttentionPart) -> Result<Kernel, BuildError> {
    let q_len = if part == AttentionPart::Decode { 4 } else { 8192 };
    let problem = example.problem([2, q_len, 8192], [16, 4]).unwrap_or_else(|e| panic!("bug in fulgurite: {e}"));
    example.plan(&problem, part).unwrap_or_else(|e| panic!("bug in fulgurite: no {e}")).kernel(target)
}

/// Entries of forward attention in bf16 that are planned for their example.
macro_rules! planned {
    ($part:ident $prefix:literal $title:literal: $($dim:literal $feature:ident $name:literal $summary:literal;)*) => {
        &[$(Entry {
            name: concat!($prefix, "-bf16-d", $dim, "-", $name),
            summary: concat!($title, ", bf16, head_dim ", $dim, ", ", $summary),
            build: |target| {
                let example = AttentionExample { number: Number::Bf16, head_dim: $dim, feature: Feature::$feature };
                planned(target, example, AttentionPart::$part)
            },
            example: Some(attention_example(Number::Bf16, $dim, Feature::$feature, AttentionPart::$part)),
        },)*]
    };
}

const FEATURES: &[Entry] = planned! {
    Forward "attention" "forward attention":
    64 Softcap "softcap" "softcap";
    128 Softcap "softcap" "softcap";
    256 Softcap "softcap" "softcap";
    64 Alibi "alibi" "causal mask and ALiBi";
    128 Alibi "alibi" "causal mask and ALiBi";
    256 Alibi "alibi" "causal mask and ALiBi";
    64 Bias "bias" "a bias for each head";
    128 Bias "bias" "a bias for each head";
    256 Bias "bias" "a bias for each head";
    64 Documents "documents" "document mask";
    128 Documents "documents" "document mask";
    256 Documents "documents" "document mask";
    64 Sinks "sinks" "window and sinks";
    128 Sinks "sinks" "window and sinks";
    256 Sinks "sinks" "window and sinks";
    64 Packed "packed" "packed sequences under a causal mask";
    128 Packed "packed" "packed sequences under a causal mask";
    256 Packed "packed" "packed sequences under a causal mask";
    64 Blocks "blocks" "block mask over a causal one";
    128 Blocks "blocks" "block mask over a causal one";
    256 Blocks "blocks" "block mask over a causal one";
};

const DECODE_FEATURES: &[Entry] = planned! {
    Decode "attention-decode" "decode attention":
    128 Softcap "softcap" "softcap";
    256 Softcap "softcap" "softcap";
    128 Alibi "alibi" "causal mask and ALiBi";
    128 Bias "bias" "a bias for each head";
    256 Bias "bias" "a bias for each head";
    128 Documents "documents" "document mask";
    256 Documents "documents" "document mask";
    128 Sinks "sinks" "window and sinks";
    128 Packed "packed" "packed sequences under a causal mask";
    256 Packed "packed" "packed sequences under a causal mask";
};

const MMA_SYNC: &[Entry] = planned! {
    ForwardSync "attention-sync" "forward attention by mma.sync":
    64 Full "full" "no mask";
    64 Causal "causal" "causal mask";
    96 Full "full" "no mask";
    96 Causal "causal" "causal mask";
    128 Full "full" "no mask";
    128 Causal "causal" "causal mask";
    256 Full "full" "no mask";
    256 Causal "causal" "causal mask";
    64 Softcap "softcap" "softcap";
    64 Alibi "alibi" "causal mask and ALiBi";
    64 Bias "bias" "a bias for each head";
    64 Documents "documents" "document mask";
    64 Sinks "sinks" "window and sinks";
    64 Packed "packed" "packed sequences under a causal mask";
    64 Blocks "blocks" "block mask over a causal one";
    128 Softcap "softcap" "softcap";
    128 Alibi "alibi" "causal mask and ALiBi";
    128 Bias "bias" "a bias for each head";
    128 Documents "documents" "document mask";
    128 Sinks "sinks" "window and sinks";
    128 Packed "packed" "packed sequences under a causal mask";
    128 Blocks "blocks" "block mask over a causal one";
    256 Softcap "softcap" "softcap";
    256 Alibi "alibi" "causal mask and ALiBi";
    256 Bias "bias" "a bias for each head";
    256 Documents "documents" "document mask";
    256 Sinks "sinks" "window and sinks";
    256 Packed "packed" "packed sequences under a causal mask";
    256 Blocks "blocks" "block mask over a causal one";
};

/// The main kernel of the gradients by `mma.sync`, planned for a call of 2 x 2048 tokens.
fn planned_gradients(target: Target, example: AttentionExample) -> Result<Kernel, BuildError> {
    let problem = example.problem([2, 2048, 2048], [16, 4]).unwrap_or_else(|e| panic!("bug in fulgurite: {e}"));
    let plan = BackwardPlan::mma_sync(&problem, (false, Order::Any), target.arch);
    let kernels = plan.unwrap_or_else(|e| panic!("bug in fulgurite: no {e}")).kernels(target)?;
    Ok(kernels.main.as_ref().clone())
}

/// Entries of the gradients by `mma.sync` in bf16, which are planned for their example.
macro_rules! gradients_by_warps {
    ($($dim:literal $feature:ident $name:literal $summary:literal $launch:literal;)*) => {
        &[$(Entry {
            name: concat!("backward-sync-bf16-d", $dim, "-", $name),
            summary: concat!("gradients of attention by mma.sync, bf16, head_dim ", $dim, ", ", $summary),
            build: |target| {
                let example = AttentionExample { number: Number::Bf16, head_dim: $dim, feature: Feature::$feature };
                planned_gradients(target, example)
            },
            example: Some(attention_example(
                Number::Bf16,
                $dim,
                Feature::$feature,
                AttentionPart::BackwardSync { launch: $launch },
            )),
        },)*]
    };
}

/// Head dimensions up to 160 fit the shared memory of every GPU.
const BACKWARD_SYNC: &[Entry] = gradients_by_warps! {
    64 Full "full" "no mask" 1;
    64 Causal "causal" "causal mask" 1;
    96 Full "full" "no mask" 1;
    96 Causal "causal" "causal mask" 1;
    128 Full "full" "no mask" 1;
    128 Causal "causal" "causal mask" 1;
    160 Full "full" "no mask" 1;
    160 Causal "causal" "causal mask" 1;
    64 Softcap "softcap" "softcap" 1;
    128 Softcap "softcap" "softcap" 1;
    64 Alibi "alibi" "causal mask and ALiBi" 1;
    128 Alibi "alibi" "causal mask and ALiBi" 1;
    64 Documents "documents" "document mask" 1;
    128 Documents "documents" "document mask" 1;
    64 Packed "packed" "packed sequences under a causal mask" 1;
    128 Packed "packed" "packed sequences under a causal mask" 1;
};

const TENSOR: &[Entry] = planned! {
    ForwardTensor "attention-tensor" "forward attention by tcgen05":
    64 Full "full" "no mask";
    64 Causal "causal" "causal mask";
    96 Full "full" "no mask";
    96 Causal "causal" "causal mask";
    128 Full "full" "no mask";
    128 Causal "causal" "causal mask";
    64 Softcap "softcap" "softcap";
    64 Alibi "alibi" "causal mask and ALiBi";
    64 Bias "bias" "a bias for each head";
    64 Documents "documents" "document mask";
    64 Sinks "sinks" "window and sinks";
    64 Packed "packed" "packed sequences under a causal mask";
    64 Blocks "blocks" "block mask over a causal one";
    128 Softcap "softcap" "softcap";
    128 Alibi "alibi" "causal mask and ALiBi";
    128 Bias "bias" "a bias for each head";
    128 Documents "documents" "document mask";
    128 Sinks "sinks" "window and sinks";
    128 Packed "packed" "packed sequences under a causal mask";
    128 Blocks "blocks" "block mask over a causal one";
};

const TCGEN05: &[Entry] = &[
    Entry {
        name: "gemm-tensor-bf16-nn",
        summary: "C = A B by tcgen05, bf16; A [m][k], B [k][n]",
        build: |target| gemm::tcgen05::kernel::<bf16>(target, NN, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::Bf16, layouts: NN }),
    },
    Entry {
        name: "gemm-tensor-bf16-nt",
        summary: "C = A B by tcgen05, bf16; A [m][k], B [n][k]",
        build: |target| gemm::tcgen05::kernel::<bf16>(target, NT, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::Bf16, layouts: NT }),
    },
    Entry {
        name: "gemm-tensor-bf16-tn",
        summary: "C = A B by tcgen05, bf16; A [k][m], B [k][n]",
        build: |target| gemm::tcgen05::kernel::<bf16>(target, TN, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::Bf16, layouts: TN }),
    },
    Entry {
        name: "gemm-tensor-bf16-tt",
        summary: "C = A B by tcgen05, bf16; A [k][m], B [n][k]",
        build: |target| gemm::tcgen05::kernel::<bf16>(target, TT, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::Bf16, layouts: TT }),
    },
    Entry {
        name: "gemm-tensor-f16-nn",
        summary: "C = A B by tcgen05, f16; A [m][k], B [k][n]",
        build: |target| gemm::tcgen05::kernel::<f16>(target, NN, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::F16, layouts: NN }),
    },
    Entry {
        name: "gemm-tensor-f16-nt",
        summary: "C = A B by tcgen05, f16; A [m][k], B [n][k]",
        build: |target| gemm::tcgen05::kernel::<f16>(target, NT, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::F16, layouts: NT }),
    },
    Entry {
        name: "gemm-tensor-f16-tn",
        summary: "C = A B by tcgen05, f16; A [k][m], B [k][n]",
        build: |target| gemm::tcgen05::kernel::<f16>(target, TN, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::F16, layouts: TN }),
    },
    Entry {
        name: "gemm-tensor-f16-tt",
        summary: "C = A B by tcgen05, f16; A [k][m], B [n][k]",
        build: |target| gemm::tcgen05::kernel::<f16>(target, TT, GemmConfig::default()),
        example: Some(Example::TensorProduct { number: Number::F16, layouts: TT }),
    },
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
        example: Some(forward_example(Number::Bf16, 64, Feature::Full)),
    },
    Entry {
        name: "attention-bf16-d64-causal",
        summary: "forward attention, bf16, head_dim 64, causal mask",
        build: |target| attention::<bf16>(target, 64, Mask::causal()),
        example: Some(forward_example(Number::Bf16, 64, Feature::Causal)),
    },
    Entry {
        name: "attention-bf16-d128-full",
        summary: "forward attention, bf16, head_dim 128, no mask",
        build: |target| attention::<bf16>(target, 128, Mask::none()),
        example: Some(forward_example(Number::Bf16, 128, Feature::Full)),
    },
    Entry {
        name: "attention-bf16-d128-causal",
        summary: "forward attention, bf16, head_dim 128, causal mask",
        build: |target| attention::<bf16>(target, 128, Mask::causal()),
        example: Some(forward_example(Number::Bf16, 128, Feature::Causal)),
    },
    Entry {
        name: "attention-f16-d64-full",
        summary: "forward attention, f16, head_dim 64, no mask",
        build: |target| attention::<f16>(target, 64, Mask::none()),
        example: Some(forward_example(Number::F16, 64, Feature::Full)),
    },
    Entry {
        name: "attention-f16-d64-causal",
        summary: "forward attention, f16, head_dim 64, causal mask",
        build: |target| attention::<f16>(target, 64, Mask::causal()),
        example: Some(forward_example(Number::F16, 64, Feature::Causal)),
    },
    Entry {
        name: "attention-f16-d128-full",
        summary: "forward attention, f16, head_dim 128, no mask",
        build: |target| attention::<f16>(target, 128, Mask::none()),
        example: Some(forward_example(Number::F16, 128, Feature::Full)),
    },
    Entry {
        name: "attention-f16-d128-causal",
        summary: "forward attention, f16, head_dim 128, causal mask",
        build: |target| attention::<f16>(target, 128, Mask::causal()),
        example: Some(forward_example(Number::F16, 128, Feature::Causal)),
    },
    Entry {
        name: "attention-bf16-d512-full",
        summary: "forward attention, bf16, head_dim 512, no mask",
        build: |target| attention::<bf16>(target, 512, Mask::none()),
        example: Some(forward_example(Number::Bf16, 512, Feature::Full)),
    },
    Entry {
        name: "attention-f16-d512-causal",
        summary: "forward attention, f16, head_dim 512, causal mask",
        build: |target| attention::<f16>(target, 512, Mask::causal()),
        example: Some(forward_example(Number::F16, 512, Feature::Causal)),
    },
    Entry {
        name: "attention-decode-bf16-d64-full",
        summary: "decode attention, bf16, head_dim 64, no mask",
        build: |target| attention_decode::<bf16>(target, 64, Mask::none()),
        example: Some(decode_example(Number::Bf16, 64, Feature::Full)),
    },
    Entry {
        name: "attention-decode-bf16-d128-full",
        summary: "decode attention, bf16, head_dim 128, no mask",
        build: |target| attention_decode::<bf16>(target, 128, Mask::none()),
        example: Some(decode_example(Number::Bf16, 128, Feature::Full)),
    },
    Entry {
        name: "attention-decode-bf16-d128-causal",
        summary: "decode attention, bf16, head_dim 128, causal mask",
        build: |target| attention_decode::<bf16>(target, 128, Mask::causal()),
        example: Some(decode_example(Number::Bf16, 128, Feature::Causal)),
    },
    Entry {
        name: "attention-decode-bf16-d256-full",
        summary: "decode attention, bf16, head_dim 256, no mask",
        build: |target| attention_decode::<bf16>(target, 256, Mask::none()),
        example: Some(decode_example(Number::Bf16, 256, Feature::Full)),
    },
    Entry {
        name: "attention-decode-f16-d128-full",
        summary: "decode attention, f16, head_dim 128, no mask",
        build: |target| attention_decode::<f16>(target, 128, Mask::none()),
        example: Some(decode_example(Number::F16, 128, Feature::Full)),
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
        example: Some(backward_example(Number::Bf16, 64, Feature::Full, 1)),
    },
    Entry {
        name: "backward-bf16-d64-causal",
        summary: "gradients of attention, bf16, head_dim 64, causal mask",
        build: |target| gradients::<bf16>(target, 64, Mask::causal()),
        example: Some(backward_example(Number::Bf16, 64, Feature::Causal, 1)),
    },
    Entry {
        name: "backward-bf16-d128-full",
        summary: "gradients of attention, bf16, head_dim 128, no mask",
        build: |target| gradients::<bf16>(target, 128, Mask::none()),
        example: Some(backward_example(Number::Bf16, 128, Feature::Full, 1)),
    },
    Entry {
        name: "backward-bf16-d128-causal",
        summary: "gradients of attention, bf16, head_dim 128, causal mask",
        build: |target| gradients::<bf16>(target, 128, Mask::causal()),
        example: Some(backward_example(Number::Bf16, 128, Feature::Causal, 1)),
    },
    Entry {
        name: "backward-f16-d64-full",
        summary: "gradients of attention, f16, head_dim 64, no mask",
        build: |target| gradients::<f16>(target, 64, Mask::none()),
        example: Some(backward_example(Number::F16, 64, Feature::Full, 1)),
    },
    Entry {
        name: "backward-f16-d64-causal",
        summary: "gradients of attention, f16, head_dim 64, causal mask",
        build: |target| gradients::<f16>(target, 64, Mask::causal()),
        example: Some(backward_example(Number::F16, 64, Feature::Causal, 1)),
    },
    Entry {
        name: "backward-f16-d128-full",
        summary: "gradients of attention, f16, head_dim 128, no mask",
        build: |target| gradients::<f16>(target, 128, Mask::none()),
        example: Some(backward_example(Number::F16, 128, Feature::Full, 1)),
    },
    Entry {
        name: "backward-f16-d128-causal",
        summary: "gradients of attention, f16, head_dim 128, causal mask",
        build: |target| gradients::<f16>(target, 128, Mask::causal()),
        example: Some(backward_example(Number::F16, 128, Feature::Causal, 1)),
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
        example: Some(backward_example(Number::Bf16, 128, Feature::Packed, 1)),
    },
    Entry {
        name: "backward-bf16-d256-full",
        summary: "gradients of attention, bf16, head_dim 256, no mask",
        build: |target| gradients::<bf16>(target, 256, Mask::none()),
        example: Some(backward_example(Number::Bf16, 256, Feature::Full, 1)),
    },
    Entry {
        name: "backward-bf16-d256-causal",
        summary: "gradients of attention, bf16, head_dim 256, causal mask",
        build: |target| gradients::<bf16>(target, 256, Mask::causal()),
        example: Some(backward_example(Number::Bf16, 256, Feature::Causal, 1)),
    },
    Entry {
        name: "backward-f16-d256-full",
        summary: "gradients of attention, f16, head_dim 256, no mask",
        build: |target| gradients::<f16>(target, 256, Mask::none()),
        example: Some(backward_example(Number::F16, 256, Feature::Full, 1)),
    },
    Entry {
        name: "backward-f16-d256-causal",
        summary: "gradients of attention, f16, head_dim 256, causal mask",
        build: |target| gradients::<f16>(target, 256, Mask::causal()),
        example: Some(backward_example(Number::F16, 256, Feature::Causal, 1)),
    },
    Entry {
        name: "backward-prepare-bf16-d128",
        summary: "row sums of d_o o and zeros, before the gradients; bf16, head_dim 128",
        build: |target| {
            backward::prepare::kernel::<bf16>(target, &of_backward(128, Mask::none()), BackwardConfig::hopper(128))
        },
        example: Some(backward_example(Number::Bf16, 128, Feature::Full, 0)),
    },
    Entry {
        name: "backward-finish-bf16-d128",
        summary: "d_q from its sums, after the gradients; bf16, head_dim 128",
        build: |target| {
            backward::finish::kernel::<bf16>(target, &of_backward(128, Mask::none()), BackwardConfig::hopper(128))
        },
        example: Some(backward_example(Number::Bf16, 128, Feature::Full, 2)),
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_ptx::Arch;

    #[test]
    fn names_are_unique() {
        let names: std::collections::HashSet<&str> = all().iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), all().len());
    }

    #[test]
    fn every_kernel_is_built_for_its_gpu_and_printed_the_same_twice() {
        for entry in all() {
            let target = match (entry.build)(Target::HOPPER) {
                Err(BuildError::Needs { .. }) => Target::new(Arch::SM_100A),
                _ => Target::HOPPER,
            };
            let build = || (entry.build)(target).unwrap_or_else(|e| panic!("{}: {e}", entry.name));
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
