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

pub use example::{AttentionExample, AttentionPart, BackwardPart, Example, Feature};

use crate::add::VECTOR_ADD;
use crate::attention::backward::plan::BackwardPlan;
use crate::attention::backward::{BackwardConfig, Order};
use crate::attention::decode::DecodeConfig;
use crate::attention::forward::config::ForwardConfig;
use crate::attention::{backward, decode, forward};
use crate::gemm::product::ProductPlan;
use crate::gemm::scaled::{self, ScaledFormat};
use crate::gemm::{self, GemmConfig, Layouts};
use crate::parts::repack;
use crate::row_dot::ROW_DOT;
use crate::softmax::ROW_SOFTMAX;
use crate::tensor_operator::TensorOperator;
use fulgurite_core::Mask;
use fulgurite_ptx::{BuildError, Half, Kernel, Major, Number, Pair, Target, TensorUnit, Word, bf16, f16};
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

/// The main kernel is the second launch.
const fn backward_example(number: Number, head_dim: u32, feature: Feature) -> Example {
    attention_example(number, head_dim, feature, AttentionPart::Backward(BackwardPart::Main))
}

/// A kernel of the gradients in bf16, head_dim 128, without a mask.
const fn backward_part_example(part: BackwardPart) -> Example {
    attention_example(Number::Bf16, 128, Feature::Full, AttentionPart::Backward(part))
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
    JOINED.get_or_init(|| {
        let products =
            [WGMMA_PRODUCTS, MMA_SYNC_PRODUCTS, TCGEN05_PRODUCTS, PAIR_PRODUCTS, SCALED_PRODUCTS, CLAIMING_PRODUCTS]
                .concat();
        let forward = [FORWARD, FEATURES, FORWARD_SYNC, FORWARD_TENSOR].concat();
        let decode = [DECODE, DECODE_FEATURES].concat();
        let backward = [BACKWARD, BACKWARD_SYNC, BACKWARD_TENSOR, AUXILIARY].concat();
        [OPERATORS.to_vec(), products, forward, decode, backward].concat()
    })
}

/// Operand layouts in the letters of BLAS, for row-major matrices: `t` means transposed.
const NN: Layouts = Layouts { a: Major::Inner, b: Major::Outer };
const NT: Layouts = Layouts { a: Major::Inner, b: Major::Inner };
const TN: Layouts = Layouts { a: Major::Outer, b: Major::Outer };
const TT: Layouts = Layouts { a: Major::Outer, b: Major::Inner };

/// Entries of products by one tensor unit in clusters of one size, in every layout of some element types.
macro_rules! products {
    ($unit:ident $cluster:literal $prefix:literal $by:literal: $($number:ident $element:literal),*) => {
        &[$(
            products!(@entry $unit $cluster $prefix $by $number $element NN "nn" "A [m][k], B [k][n]"),
            products!(@entry $unit $cluster $prefix $by $number $element NT "nt" "A [m][k], B [n][k]"),
            products!(@entry $unit $cluster $prefix $by $number $element TN "tn" "A [k][m], B [k][n]"),
            products!(@entry $unit $cluster $prefix $by $number $element TT "tt" "A [k][m], B [n][k]"),
        )*]
    };
    (@entry $unit:ident $cluster:literal $prefix:literal $by:literal $number:ident $element:literal $layouts:ident $name:literal $shapes:literal) => {
        Entry {
            name: concat!($prefix, "-", $element, "-", $name),
            summary: concat!("C = A B", $by, ", ", $element, "; ", $shapes),
            build: |target| {
                ProductPlan::usual_kernel(target, (Number::$number, $layouts), (TensorUnit::$unit, $cluster))
            },
            example: Some(Example::Product {
                number: Number::$number,
                layouts: $layouts,
                unit: TensorUnit::$unit,
                cluster: $cluster,
            }),
        }
    };
}

const WGMMA_PRODUCTS: &[Entry] = products!(Wgmma 1 "gemm" "": Bf16 "bf16", F16 "f16");
const MMA_SYNC_PRODUCTS: &[Entry] = products!(MmaSync 1 "gemm-sync" " by mma.sync": Bf16 "bf16");
const TCGEN05_PRODUCTS: &[Entry] = products!(Tcgen05 1 "gemm-tensor" " by tcgen05": Bf16 "bf16", F16 "f16");
const PAIR_PRODUCTS: &[Entry] = products!(Tcgen05 2 "gemm-pair" " by tcgen05 of CTA pairs": Bf16 "bf16", F16 "f16");

/// Entries of products of scaled factors.
macro_rules! scaled {
    ($($name:literal $format:ident $cluster:literal $summary:literal;)*) => {
        &[$(Entry {
            name: $name,
            summary: $summary,
            build: |target| {
                let config = GemmConfig { cluster: $cluster, ..scaled::CONFIG };
                scaled::kernel::<bf16>(target, ScaledFormat::$format, config)
            },
            example: None,
        },)*]
    };
}

const SCALED_PRODUCTS: &[Entry] = scaled! {
    "gemm-mxfp8" Mxfp8 1 "C = A B by tcgen05, MXFP8 into bf16; A [m][k], B [n][k]";
    "gemm-nvfp4" Nvfp4 1 "C = A B by tcgen05, NVFP4 into bf16; A [m][k], B [n][k]";
    "gemm-pair-mxfp8" Mxfp8 2 "C = A B by tcgen05 of CTA pairs, MXFP8 into bf16; A [m][k], B [n][k]";
    "gemm-pair-nvfp4" Nvfp4 2 "C = A B by tcgen05 of CTA pairs, NVFP4 into bf16; A [m][k], B [n][k]";
};

const CLAIMING_PRODUCTS: &[Entry] = &[Entry {
    name: "gemm-claims-bf16-nt",
    summary: "C = A B by tcgen05, tiles claimed from CTAs that have not started, bf16; A [m][k], B [n][k]",
    build: |target| gemm::tcgen05::claiming_kernel::<bf16>(target, NT, GemmConfig::default()),
    example: None,
}];

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
    let plan = example.plan(&problem, part).unwrap_or_else(|e| panic!("bug in fulgurite: no {e}"));
    plan.fitting(target.arch).kernel(target)
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

const FORWARD_SYNC: &[Entry] = planned! {
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

/// The main kernel of the gradients of an example by a tensor unit, planned for a call of 2 x 2048 tokens.
fn planned_gradients(target: Target, example: AttentionExample, unit: TensorUnit) -> Result<Kernel, BuildError> {
    let problem = example.problem([2, 2048, 2048], [16, 4]).unwrap_or_else(|e| panic!("bug in fulgurite: {e}"));
    let pass = (false, Order::Any);
    let plan = match unit {
        TensorUnit::Tcgen05 => BackwardPlan::tcgen05(&problem, pass, target.arch),
        _ => BackwardPlan::mma_sync(&problem, pass, target.arch),
    };
    let plan = plan.unwrap_or_else(|e| panic!("bug in fulgurite: no {e}"));
    // A CTA has all query heads of its keys, and stores d_k and d_v itself.
    let config = BackwardConfig { head_splits: Some(1), ..plan.config() };
    let kernels = plan.with_config(config).kernels(target)?;
    Ok(kernels.main.as_ref().clone())
}

/// Entries of the gradients by a tensor unit in bf16, which are planned for their example.
macro_rules! planned_gradients {
    ($unit:ident $part:ident $prefix:literal $by:literal: $($dim:literal $feature:ident $name:literal $summary:literal;)*) => {
        &[$(Entry {
            name: concat!($prefix, "-bf16-d", $dim, "-", $name),
            summary: concat!("gradients of attention by ", $by, ", bf16, head_dim ", $dim, ", ", $summary),
            build: |target| {
                let example = AttentionExample { number: Number::Bf16, head_dim: $dim, feature: Feature::$feature };
                planned_gradients(target, example, TensorUnit::$unit)
            },
            example: Some(attention_example(Number::Bf16, $dim, Feature::$feature, AttentionPart::$part)),
        },)*]
    };
}

/// Head dimensions up to 160 fit the shared memory of every GPU.
const BACKWARD_SYNC: &[Entry] = planned_gradients! {
    MmaSync BackwardSync "backward-sync" "mma.sync":
    64 Full "full" "no mask";
    64 Causal "causal" "causal mask";
    96 Full "full" "no mask";
    96 Causal "causal" "causal mask";
    128 Full "full" "no mask";
    128 Causal "causal" "causal mask";
    160 Full "full" "no mask";
    160 Causal "causal" "causal mask";
    64 Softcap "softcap" "softcap";
    128 Softcap "softcap" "softcap";
    64 Alibi "alibi" "causal mask and ALiBi";
    128 Alibi "alibi" "causal mask and ALiBi";
    64 Documents "documents" "document mask";
    128 Documents "documents" "document mask";
    64 Packed "packed" "packed sequences under a causal mask";
    128 Packed "packed" "packed sequences under a causal mask";
};

const BACKWARD_TENSOR: &[Entry] = planned_gradients! {
    Tcgen05 BackwardTensor "backward-tensor" "tcgen05":
    64 Full "full" "no mask";
    64 Causal "causal" "causal mask";
    96 Full "full" "no mask";
    96 Causal "causal" "causal mask";
    128 Full "full" "no mask";
    128 Causal "causal" "causal mask";
    64 Softcap "softcap" "softcap";
    128 Softcap "softcap" "softcap";
    64 Alibi "alibi" "causal mask and ALiBi";
    128 Alibi "alibi" "causal mask and ALiBi";
    64 Documents "documents" "document mask";
    128 Documents "documents" "document mask";
    64 Packed "packed" "packed sequences under a causal mask";
    128 Packed "packed" "packed sequences under a causal mask";
};

const FORWARD_TENSOR: &[Entry] = planned! {
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

/// Entries of attention in its usual tile configuration. `$build` builds the kernel, `$example` makes its problem.
macro_rules! attention {
    ($build:ident $example:ident $prefix:literal $title:literal: $($type:ident $number:ident $element:literal $dim:literal $feature:ident;)*) => {
        &[$(Entry {
            name: concat!($prefix, "-", $element, "-d", $dim, "-", attention!(@name $feature)),
            summary: concat!($title, ", ", $element, ", head_dim ", $dim, ", ", attention!(@summary $feature)),
            build: |target| $build::<$type>(target, $dim, attention!(@mask $feature)),
            example: Some($example(Number::$number, $dim, Feature::$feature)),
        },)*]
    };
    (@name Full) => { "full" };
    (@name Causal) => { "causal" };
    (@summary Full) => { "no mask" };
    (@summary Causal) => { "causal mask" };
    (@mask Full) => { Mask::none() };
    (@mask Causal) => { Mask::causal() };
}

const FORWARD: &[Entry] = attention! {
    attention forward_example "attention" "forward attention":
    bf16 Bf16 "bf16" 64 Full;
    bf16 Bf16 "bf16" 64 Causal;
    bf16 Bf16 "bf16" 128 Full;
    bf16 Bf16 "bf16" 128 Causal;
    f16 F16 "f16" 64 Full;
    f16 F16 "f16" 64 Causal;
    f16 F16 "f16" 128 Full;
    f16 F16 "f16" 128 Causal;
    bf16 Bf16 "bf16" 512 Full;
    f16 F16 "f16" 512 Causal;
};

const DECODE: &[Entry] = attention! {
    attention_decode decode_example "attention-decode" "decode attention":
    bf16 Bf16 "bf16" 64 Full;
    bf16 Bf16 "bf16" 128 Full;
    bf16 Bf16 "bf16" 128 Causal;
    bf16 Bf16 "bf16" 256 Full;
    f16 F16 "f16" 128 Full;
};

const BACKWARD: &[Entry] = attention! {
    gradients backward_example "backward" "gradients of attention":
    bf16 Bf16 "bf16" 64 Full;
    bf16 Bf16 "bf16" 64 Causal;
    bf16 Bf16 "bf16" 128 Full;
    bf16 Bf16 "bf16" 128 Causal;
    f16 F16 "f16" 64 Full;
    f16 F16 "f16" 64 Causal;
    f16 F16 "f16" 128 Full;
    f16 F16 "f16" 128 Causal;
    bf16 Bf16 "bf16" 256 Full;
    bf16 Bf16 "bf16" 256 Causal;
    f16 F16 "f16" 256 Full;
    f16 F16 "f16" 256 Causal;
};

const OPERATORS: &[Entry] = &[entry!(VECTOR_ADD), entry!(ROW_SOFTMAX), entry!(ROW_DOT)];

/// Kernels that serve other kernels of attention.
const AUXILIARY: &[Entry] = &[
    Entry {
        name: "attention-pack",
        summary: "a tensor of 16-bit elements whose strides TMA cannot take, packed",
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
        name: "backward-bf16-d128-packed",
        summary: "gradients of attention, bf16, head_dim 128, causal mask, sequences with lengths of their own",
        build: |target| {
            let mut features = of_backward(128, Mask::causal());
            features.ragged.packed = true;
            let config = BackwardConfig::with_room(128, true, backward::RegisterPressure::None);
            backward::main::kernel::<bf16>(target, &features, config)
        },
        example: Some(backward_example(Number::Bf16, 128, Feature::Packed)),
    },
    Entry {
        name: "backward-prepare-bf16-d128",
        summary: "row sums of d_o o and zeros, before the gradients; bf16, head_dim 128",
        build: |target| {
            backward::prepare::kernel::<bf16>(target, &of_backward(128, Mask::none()), BackwardConfig::hopper(128))
        },
        example: Some(backward_part_example(BackwardPart::Prepare)),
    },
    Entry {
        name: "backward-finish-bf16-d128",
        summary: "d_q from its sums, after the gradients; bf16, head_dim 128",
        build: |target| {
            backward::finish::kernel::<bf16>(target, &of_backward(128, Mask::none()), BackwardConfig::hopper(128))
        },
        example: Some(backward_part_example(BackwardPart::Finish)),
    },
    Entry {
        name: "backward-repair-bf16-d128",
        summary: "rows of gradients that hidden rows made NaN, computed again; bf16, head_dim 128, causal mask",
        build: |target| {
            backward::repair::kernel::<bf16>(target, &of_backward(128, Mask::causal()), BackwardConfig::hopper(128))
        },
        example: None,
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
