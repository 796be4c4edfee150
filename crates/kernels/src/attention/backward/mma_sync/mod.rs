//! The main kernel of backward on every GPU since Ampere: `mma.sync` of single warps, and a ring that the same warps fill
//! with `cp.async`.
//!
//! A CTA has one tile of keys and walks over the queries that see it, as the Hopper kernel does. Its two warpgroups share
//! the tile as in the schedule `columns` of Hopper: each computes p and d_z of half of
//! the queries, and has half of the columns of d_k, d_v and d_q. p and d_z pass through shared memory. Tiles, mask,
//! modifiers, p, d_z, and the kernels before and after are those of Hopper.

mod compute;
pub(crate) mod config;
mod params;
mod stages;

use crate::attention::backward::mma_sync::compute::SyncBackward;
use crate::attention::backward::state::Call;
use crate::attention::backward::{BackwardConfig, Features, KernelShape};
use crate::params::{Params, Program};
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Warpgroups, Word};

/// The main kernel, without the arguments of its launches, for a problem whose sizes are not known.
pub fn kernel<T: Half>(target: Target, features: &Features, config: BackwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    Ok(program::<T>(target, features, &KernelShape::plain(features, config))?.into_kernel())
}

/// The main kernel.
pub(crate) fn program<T: Half>(
    target: Target,
    features: &Features,
    shape: &KernelShape,
) -> Result<Program<Call>, BuildError>
where
    Pair<T>: Word,
{
    Program::build("attention_backward_sync", target, |p| match shape.config.share.key_blocks_per_warp() {
        2 => build::<2, T>(p, features, shape),
        _ => build::<1, T>(p, features, shape),
    })
}

fn build<const M: usize, T: Half>(p: &Params<'_, Call>, features: &Features, shape: &KernelShape)
where
    Pair<T>: Word,
{
    let kernel = SyncBackward::<M, T>::new(p, features, shape);
    p.builder().role("compute", Warpgroups(2), |w| kernel.run(w));
}
