//! Kernels that were compiled on a device. A kernel's text depends on features and cut, never on lengths: a call of another
//! length finds the kernel of an earlier one, unless its length asks for another cut.

use crate::profile::Tables;
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Kernels};
use fulgurite_kernels::attention::forward::plan::{Copying, ForwardPlan, NoKernel};
use fulgurite_ptx::device::{Device, DeviceError, Module};
use fulgurite_ptx::{BuildError, Kernel};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use thiserror::Error;

/// Why a plan has no kernel.
#[derive(Debug, Error)]
#[error(transparent)]
pub(crate) enum CompileError {
    /// Its cut has none.
    Build(#[from] BuildError),
    /// The device did not take it.
    Device(#[from] DeviceError),
}

impl CompileError {
    /// What the device does not have, because its profile says so, or the device's own error. Cuts that are built in have
    /// kernels.
    pub fn missing(self, tables: &Tables, device: &dyn Device, plan: &dyn Debug) -> Result<NoKernel, DeviceError> {
        match self {
            CompileError::Device(e) => Err(e),
            CompileError::Build(e) if *tables == Tables::default() => panic!("bug in fulgurite: {e}\n{plan:?}"),
            CompileError::Build(e) => {
                Ok(NoKernel { feature: format!("a kernel cut as the profile of {} says: {e}", device.name()) })
            }
        }
    }
}

/// Refuses a device that there are no kernels of attention for.
pub(crate) fn check_target(device: &dyn Device) -> Result<(), NoKernel> {
    match device.target().sm() {
        90 => Ok(()),
        other => Err(NoKernel { feature: format!("kernels for sm_{other} (it has them for sm_90)") }),
    }
}

/// Whether a module is a kernel's.
pub(crate) fn is_of(module: &Module, kernel: &Arc<Kernel>) -> bool {
    Arc::ptr_eq(&module.shared_kernel(), kernel)
}

/// The one of these modules that is a kernel's.
pub(crate) fn module_of<'m>(modules: impl IntoIterator<Item = &'m Module>, kernel: &Arc<Kernel>) -> Module {
    let known = modules.into_iter().find(|module| is_of(module, kernel));
    known.expect("bug in fulgurite: a launch of another kernel").clone()
}

/// Features and cuts whose kernels are kept; beyond it they are forgotten all at once. Who uses one holds it.
const MAX_KNOWN: usize = 512;

fn remember<T>(known: &mut Vec<T>, fresh: T) {
    if known.len() >= MAX_KNOWN {
        known.clear();
    }
    known.push(fresh);
}

/// Kernels that were compiled, each with a call that it was compiled for. While one thread compiles, others find what there
/// is.
#[derive(Default)]
pub(crate) struct Compiled {
    forward: Mutex<Vec<(ForwardPlan, Vec<Module>)>>,
    /// The modules in the order of the kernels.
    backward: Mutex<Vec<(BackwardPlan, Kernels, Vec<Module>)>>,
    /// Kernels that copy tensors which the others cannot take.
    copying: Mutex<Option<(Copying, [Module; 2])>>,
}

impl Compiled {
    /// The module of a plan's kernel, and of the one that makes its table of blocks, if it has one.
    pub fn forward(&self, device: &dyn Device, plan: &ForwardPlan) -> Result<Vec<Module>, CompileError> {
        let known = || self.forward.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |other: &ForwardPlan| other.same_kernel(plan) && other.block_form() == plan.block_form();
        if let Some((_, modules)) = known().iter().find(|(other, _)| same(other)) {
            return Ok(modules.clone());
        }
        let target = device.target();
        let kernels = [Some(plan.kernel(target)?), plan.cover_kernel(target)?];
        let load = |kernel: Kernel| device.load(Arc::new(kernel));
        let modules = kernels.into_iter().flatten().map(load).collect::<Result<Vec<_>, _>>()?;
        remember(&mut known(), (plan.clone(), modules.clone()));
        Ok(modules)
    }

    /// The kernels of a plan of gradients.
    pub fn backward(&self, device: &dyn Device, plan: &BackwardPlan) -> Result<(Kernels, Vec<Module>), CompileError> {
        let known = || self.backward.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kernels, modules)) = known().iter().find(|(other, ..)| other.same_kernels(plan)) {
            return Ok((kernels.clone(), modules.clone()));
        }
        let kernels = plan.kernels(device.target())?;
        let load = |kernel: &Arc<_>| device.load(Arc::clone(kernel));
        let modules = kernels.all().map(load).collect::<Result<Vec<_>, _>>()?;
        remember(&mut known(), (plan.clone(), kernels.clone(), modules.clone()));
        Ok((kernels, modules))
    }

    /// The kernels that copy, made for the first call that needs them.
    pub fn copying(&self, device: &dyn Device) -> Result<(Copying, [Module; 2]), DeviceError> {
        let mut copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*copying {
            return Ok(known.clone());
        }
        let kernels = Copying::new(device.target()).unwrap_or_else(|e| panic!("bug in fulgurite: {e}"));
        let modules = [device.load(kernels.pack.clone())?, device.load(kernels.unpack.clone())?];
        Ok(copying.insert((kernels, modules)).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::{DType, Mask, Problem};
    use fulgurite_kernels::attention::backward::Order;
    use fulgurite_sim::Sim;

    fn problem(len: usize, mask: Mask) -> Problem {
        Problem::builder()
            .dense(1, len, len)
            .heads(2, 2)
            .head_dim(64)
            .dtype(DType::Bf16)
            .mask(mask)
            .build()
            .expect("a problem that every engine has")
    }

    /// Another length has the kernels of the first, other features have their own.
    #[test]
    fn a_new_length_compiles_nothing() {
        let (compiled, device) = (Compiled::default(), Sim::default());
        let kernels = |len, mask: Mask| {
            let problem = problem(len, mask);
            let forward = compiled.forward(&device, &ForwardPlan::new(&problem, None).expect("it has it"));
            let backward =
                compiled.backward(&device, &BackwardPlan::new(&problem, false, Order::Any).expect("it has it"));
            let (Ok(forward), Ok((_, backward))) = (forward, backward) else { panic!("they compile") };
            forward.into_iter().chain(backward).map(|module| Arc::as_ptr(&module.shared_kernel())).collect::<Vec<_>>()
        };
        let first = kernels(700, Mask::causal());
        assert_eq!(kernels(901, Mask::causal()), first);
        let (known, known_backward) = (compiled.forward.lock().unwrap().len(), compiled.backward.lock().unwrap().len());
        assert_eq!((known, known_backward), (1, 1));
        let window = kernels(700, Mask::window(Some(100), Some(0)));
        assert!(window.iter().zip(&first).all(|(one, other)| one != other));
        assert_eq!(kernels(700, Mask::causal()), first);
    }
}
