//! Forward attention on data-centre Blackwell: products of one thread into tensor memory.
//!
//! A CTA takes tiles of 128 queries for each of its softmax warpgroups. One warp loads, as on Hopper. One warp starts all
//! products: s = q k^T into tensor memory, and o += p v with p from tensor memory. A warpgroup turns its scores into p,
//! which overwrites half of them, and at the end of a tile writes its rows of O. While one warpgroup computes p, the
//! tensor cores work for the other. A softmax thread rescales its own row of o, and with the optimistic policy that is
//! rare, so no warpgroup is kept for corrections. Mask, modifiers, softmax and epilogue are those of the Hopper kernel.

pub mod config;
mod construction;
mod multiply;
mod softmax;

use crate::attention::forward::call::ForwardCall;
use crate::attention::forward::features::Features;
use crate::attention::forward::load::Load;
use crate::attention::forward::tcgen05::config::TensorConfig;
use crate::attention::forward::tcgen05::construction::{TensorKernel, declared};
use crate::attention::forward::tcgen05::softmax::SoftmaxRole;
use crate::params::{Bindings, Params, Program};
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Warpgroups, Warps, Word, bf16};

/// Builds the kernel.
pub fn kernel<T: Half>(target: Target, features: &Features, config: TensorConfig) -> Result<Kernel, BuildError>
where
    Pair<T>: Word,
{
    let build = |p: &Params<'_, ForwardCall>| build::<T>(p, features, config);
    Ok(Program::build("attention_forward_tensor", target, build)?.into_kernel())
}

/// The launch arguments of the kernel. They do not depend on the element type.
pub(crate) fn bindings(features: &Features, config: TensorConfig) -> Bindings<ForwardCall> {
    Bindings::declared(|p| {
        declared::<bf16>(p, features, &config);
    })
}

fn build<T: Half>(p: &Params<'_, ForwardCall>, features: &Features, config: TensorConfig)
where
    Pair<T>: Word,
{
    let kernel = TensorKernel::<T>::new(p, features, config);
    let [compute, other] = config.registers;
    p.builder().role("softmax", Warpgroups(config.groups).registers(compute), |w| SoftmaxRole::run(w, &kernel));
    p.builder().role("load", Warps(1).registers(other), |w| {
        w.one_thread(|t| {
            let source = kernel.key_blocks().source();
            Load::new(t, kernel.loading(), &*source).run(t);
        });
    });
    p.builder().role("multiply", Warps(1), |w| multiply::run(w, &kernel));
    // `setmaxnreg` changes whole warpgroups.
    p.builder().role("spare", Warps(2), |_| {});
}
