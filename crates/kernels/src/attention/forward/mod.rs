//! Forward attention on Hopper: a persistent, warp-specialised kernel with one loading thread (TMA) and several compute
//! warpgroups, which take turns at the tensor cores (ping-pong). p stays in registers.
//!
//! s = q k^T, m = running row maximum of s, p = 2^(scale (s - m)), l = running row sum of p, o = p v. Each warpgroup
//! has 64 rows of a tile of queries and goes through the key blocks from the last to the first, so that masked blocks
//! come first. While the softmax of a block runs, the tensor cores work on p v of the previous block. In "joined"
//! tiles, the scores of the next tile's first block start together with the last p v of this tile. A row without keys
//! yields zeros and an LSE of -inf.

mod arguments;
pub(crate) mod call;
mod compute;
pub mod config;
mod construction;
mod f32_output;
pub(crate) mod facts;
pub mod features;
mod load;
pub mod mma_sync;
mod order;
mod params;
pub mod plan;
pub mod tcgen05;
mod tiles;
pub(crate) mod tiling;

pub use crate::attention::forward::features::Features;

use crate::attention::forward::call::ForwardCall;
use crate::attention::forward::compute::ComputeRole;
use crate::attention::forward::config::ForwardConfig;
use crate::attention::forward::construction::{ForwardKernel, shapes, tiled};
use crate::attention::forward::load::Load;
use crate::attention::forward::params::ForwardParams;
use crate::params::{Bindings, Params, Program};
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Warpgroups, Word, bf16};

/// Builds the forward kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, config: ForwardConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let build = |p: &Params<'_, ForwardCall>| build::<T>(p, features, config);
    Ok(Program::build("attention_forward", target, build)?.into_kernel())
}

/// The launch arguments of the forward kernel. They do not depend on the element type.
pub(crate) fn bindings(features: &Features, config: ForwardConfig) -> Bindings<ForwardCall> {
    let (config, tiling) = tiled(features, config);
    Bindings::declared(|p| {
        ForwardParams::<bf16>::declare(p, features, config.cols, shapes::<bf16>(features, &config, &tiling));
    })
}

fn build<T: Half>(p: &Params<'_, ForwardCall>, features: &Features, config: ForwardConfig)
where
    Pair<T>: Word,
{
    let kernel = ForwardKernel::<T>::new(p, features, config);
    let source = kernel.source();
    let [compute, load] = config.registers;
    p.builder().role("load", Warpgroups(1).registers(load), |w| {
        w.one_thread(|t| Load::new(t, kernel.loading(), &*source).run(t));
    });
    p.builder().role("compute", Warpgroups(config.groups).registers(compute), |w| {
        ComputeRole::run(w, &kernel, &*source);
    });
}
