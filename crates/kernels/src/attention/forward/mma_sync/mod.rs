//! Forward attention on every GPU since Ampere: `mma.sync` of single warps, and a ring that the same warps fill with
//! `cp.async`.
//!
//! A CTA computes one tile of queries. Each of its four warps has 16 or 32 rows and goes through the key blocks from the
//! last to the first. K and V of the blocks pass through one ring in the order of use. There is no load role: the warps of
//! all CTAs on an SM hide each other's latencies. Mask, modifiers, softmax and epilogue are those of the Hopper kernel.

mod compute;
pub mod config;
mod output;
pub(super) mod params;

use crate::attention::forward::call::ForwardCall;
use crate::attention::forward::features::Features;
use crate::attention::forward::mma_sync::compute::SyncKernel;
use crate::attention::forward::mma_sync::config::SyncConfig;
use crate::attention::forward::mma_sync::params::SyncParams;
use crate::params::{Bindings, Params, Program};
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Warpgroups, Word, bf16};

/// Builds the kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, config: SyncConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let build = |p: &Params<'_, ForwardCall>| match config.blocks {
        1 => build::<1, T>(p, features, config),
        // The builder refuses other numbers of blocks: their tiles have other rows than the accumulators.
        _ => build::<2, T>(p, features, config),
    };
    Ok(Program::build("attention_forward_sync", target, build)?.into_kernel())
}

/// The launch arguments of the kernel. They do not depend on the element type.
pub(crate) fn bindings(features: &Features, config: SyncConfig) -> Bindings<ForwardCall> {
    Bindings::declared(|p| {
        SyncParams::<bf16>::declare(p, features, &config);
    })
}

fn build<const M: usize, T: Half>(p: &Params<'_, ForwardCall>, features: &Features, config: SyncConfig)
where
    Pair<T>: Word,
{
    let kernel = SyncKernel::<M, T>::new(p, features, config);
    p.builder().role("compute", Warpgroups(1), |w| kernel.run(w));
}
