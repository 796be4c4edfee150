//! The main kernel of backward: persistent CTAs with a load role and two warpgroups that compute.
//!
//! A CTA owns one tile of keys of one key/value head. For each query head of that group it loops over the steps of queries that
//! see the tile. It computes S^T = K Q^T, so the rows of its accumulators are keys: d_k and d_v stay in registers to the end,
//! and their sums are deterministic. d_q is added to f32 sums in global memory; [`d_q`](crate::attention::backward::d_q) says how. How the two
//! warpgroups share a tile is a schedule (`schedules`); with CTA pairs, two CTAs share two tiles.

use crate::attention::backward::d_q::service::{Actor, Log};
use crate::attention::backward::load::Load;
use crate::attention::backward::schedules::roles;
use crate::attention::backward::state::{Call, Main};
use crate::attention::backward::{BackwardConfig, Features, KernelShape};
use crate::params::{Params, Program};
use fulgurite_ptx::{BuildError, Half, Kernel, Pair, Target, Warpgroups, Word};
use std::rc::Rc;

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
    Program::build("attention_backward", target, |p| {
        build::<T>(p, features, shape);
    })
}

/// Builds the roles. Returns what they wait for and signal.
pub(crate) fn build<T: Half>(p: &Params<'_, Call>, features: &Features, shape: &KernelShape) -> Rc<Log>
where
    Pair<T>: Word,
{
    let (k, config) = (p.builder(), shape.config);
    let main = Main::new::<T>(p, features, shape);
    k.role("load", Warpgroups(1).registers(config.registers[1]), |w| Load(&main).run(w));
    main.d_q.log.enter(Actor::Compute);
    roles::declare::<T>(&main);
    main.d_q.log.clone()
}
