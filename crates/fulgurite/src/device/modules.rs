//! Compiled kernels. A kernel's text depends on features and tile configuration, never on lengths, so a plan for
//! another length reuses the kernels of an earlier one.

use crate::Error;
use fulgurite_core::lru::Lru;
use fulgurite_kernels::attention::forward::plan::Copying;
use fulgurite_kernels::operator::Plan;
use fulgurite_ptx::device::{Device, Module};
use fulgurite_ptx::{BuildError, Kernel};
use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

/// Number of plans whose kernels are kept. A prepared call holds its own kernels, even if they are dropped here.
const MAX_KNOWN: usize = 512;

/// A plan, its kernels and their modules: `(P, P::Kernels, Vec<Module>)` of some plan `P`.
type Known = Box<dyn Any + Send + Sync>;

/// The kernels that a device has compiled.
pub(super) struct Modules {
    known: Mutex<Lru<Known>>,
    /// Kernels that copy tensors whose layout other kernels cannot address.
    copying: Mutex<Option<(Copying, [Module; 2])>>,
}

impl Default for Modules {
    fn default() -> Self {
        Modules { known: Mutex::new(Lru::new(MAX_KNOWN)), copying: Mutex::default() }
    }
}

/// Whether a module was compiled from this kernel.
pub(super) fn is_of(module: &Module, kernel: &Arc<Kernel>) -> bool {
    Arc::ptr_eq(&module.shared_kernel(), kernel)
}

impl Modules {
    /// The compiled kernels of a plan. While one thread compiles, others can still look up kernels.
    pub fn get<P: Plan + Clone>(
        &self,
        device: &(impl Device + ?Sized),
        plan: &P,
        refuse: impl FnOnce(BuildError) -> Error,
    ) -> Result<(P::Kernels, Vec<Module>), Error> {
        type Entry<P> = (P, <P as Plan>::Kernels, Vec<Module>);
        let known = || self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |entry: &Known| entry.downcast_ref::<Entry<P>>().is_some_and(|(other, ..)| other.same_kernels(plan));
        if let Some((_, kernels, modules)) = known().find(same).and_then(|entry| entry.downcast_ref::<Entry<P>>()) {
            return Ok((kernels.clone(), modules.clone()));
        }
        let kernels = plan.build(device.target()).map_err(refuse)?;
        let modules = P::list(&kernels).into_iter().map(|kernel| device.load(kernel)).collect::<Result<Vec<_>, _>>()?;
        known().insert(Box::new((plan.clone(), kernels.clone(), modules.clone())));
        Ok((kernels, modules))
    }

    /// The copy kernels, compiled for the first call that needs them.
    pub fn copying(
        &self,
        device: &(impl Device + ?Sized),
        refuse: impl FnOnce(BuildError) -> Error,
    ) -> Result<(Copying, [Module; 2]), Error> {
        let mut copying = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*copying {
            return Ok(known.clone());
        }
        let kernels = Copying::new(device.target()).map_err(refuse)?;
        let modules = [device.load(kernels.pack.clone())?, device.load(kernels.unpack.clone())?];
        Ok(copying.insert((kernels, modules)).clone())
    }
}
