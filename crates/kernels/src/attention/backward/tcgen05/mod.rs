//! The main kernel of backward on data-centre Blackwell: products of one thread into tensor memory.
//!
//! A CTA has one tile of 128 keys and walks over the queries that see it, 128 in a step. s and d_p are multiplied transposed,
//! so their rows are keys: p^T and d_z^T go back to tensor memory as left operands of d_v and d_k. d_z goes to shared memory,
//! too, as the left operand of d_q = d_z k. d_k and d_v stay in tensor memory to the end, so their sums are deterministic. d_q
//! of each step leaves tensor memory, and TMA adds it to f32 sums.
//!
//! One warp loads, one warp starts all products (`multiply` has their order), two warpgroups compute p and d_z, one warpgroup
//! moves d_q. Tiles, mask, modifiers, p, d_z, and the kernels before and after are those of Hopper.

mod compute;
pub(crate) mod config;
mod construction;
mod load;
mod multiply;
mod sums;

use crate::attention::backward::state::Call;
use crate::attention::backward::tcgen05::compute::ComputeRole;
use crate::attention::backward::tcgen05::construction::TensorBackward;
use crate::attention::backward::{BackwardConfig, Features, KernelShape};
use crate::params::{Params, Program};
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Warpgroups, Warps, Word};

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
    Program::build("attention_backward_tensor", target, |p| build::<T>(p, features, shape))
}

fn build<T: Half>(p: &Params<'_, Call>, features: &Features, shape: &KernelShape)
where
    Pair<T>: Word,
{
    let kernel = TensorBackward::<T>::new(p, features, shape);
    let (builder, [compute, other]) = (p.builder(), shape.config.registers);
    builder.role("sums", Warpgroups(1).registers(shape.config.sum_registers()), |w| {
        kernel.with_tile(w, |w, work| sums::run(w, &kernel, &work));
    });
    builder.role("compute", Warpgroups(config::GROUPS).registers(compute), |w| {
        kernel.with_tile(w, |w, work| ComputeRole::new(w, &kernel, work).run(w));
    });
    builder.role("load", Warps(1).registers(other), |w| {
        w.one_thread(|t| kernel.with_tile(t, |t, work| load::run(t, &kernel, &work)));
    });
    builder.role("multiply", Warps(1), |w| {
        kernel.with_tile(w, |w, work| multiply::run(w, &kernel, &work));
    });
    // `setmaxnreg` changes whole warpgroups.
    builder.role("spare", Warps(2), |_| {});
}
