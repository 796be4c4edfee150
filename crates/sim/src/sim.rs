//! The simulator as a device.

use crate::architecture::Architecture;
use crate::counters::Counts;
use crate::finding::Finding;
use crate::memory::Memory;
use crate::options::Options;
use crate::program::Program;
use crate::timeline::Timeline;
use crate::world::World;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Module, Span, Stream, Value, check_launch};
use fulgurite_ptx::kernel::{Kernel, Target};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory limit in bytes, which a test machine can spare.
const CAPACITY: u64 = 4 << 30;

/// Report of a launch.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Faults of the kernel; empty if nothing was found.
    pub findings: Vec<Finding>,
    /// Name and counters of each role.
    pub roles: Vec<(String, Counts)>,
    /// Number of CTAs in the grid.
    pub blocks: u64,
    /// Timeline, if [`Interleaving::Timed`](crate::Interleaving::Timed) was requested.
    pub timeline: Option<Timeline>,
}

impl Report {
    /// Counters of all roles together.
    pub fn total(&self) -> Counts {
        let mut total = Counts::default();
        self.roles.iter().for_each(|(_, counts)| total.add(counts));
        total
    }
}

struct State {
    memory: Memory,
    options: Options,
    last: Report,
    /// Counters by the names of kernels.
    counts: BTreeMap<String, Counts>,
    /// Cycles of all launches of a kernel, by its name, if the order is [`Timed`](crate::Interleaving::Timed).
    cycles: BTreeMap<String, u64>,
    /// The first failure on the stream, until a caller asks for it.
    failed: Option<DeviceError>,
    /// Called during launches.
    poll: fn(),
}

/// A simulated GPU.
#[derive(Clone)]
pub struct Sim {
    state: Arc<Mutex<State>>,
    target: Target,
    rates: Architecture,
}

/// Frees an allocation on drop.
struct Owner {
    state: Arc<Mutex<State>>,
    address: u64,
}

impl Drop for Owner {
    fn drop(&mut self) {
        lock(&self.state).memory.free(self.address);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for Sim {
    fn default() -> Self {
        Sim::new(Options::default())
    }
}

impl Sim {
    /// A simulated H200: its rates and tile configurations are the ones that were measured on hardware. [`Sim::on`] takes any
    /// other GPU.
    pub fn new(options: Options) -> Self {
        Sim::on(Target::HOPPER, options)
    }

    /// A simulated GPU of any architecture, with the SM count of [`Arch::gpu`](fulgurite_ptx::Arch::gpu).
    pub fn on(target: Target, options: Options) -> Self {
        Sim::with_rates(target, Architecture::of(&target.arch), options)
    }

    /// A simulated GPU whose units have other rates: those of a GPU that does not exist, or of a part of one.
    pub fn with_rates(target: Target, rates: Architecture, options: Options) -> Self {
        let (memory, last) = (Memory::new(CAPACITY), Report::default());
        let (counts, cycles) = (BTreeMap::new(), BTreeMap::new());
        let state = State { memory, options, last, counts, cycles, failed: None, poll: || {} };
        Sim { state: Arc::new(Mutex::new(state)), target, rates }
    }

    /// The rates from which timelines and bounds are computed.
    pub fn architecture(&self) -> Architecture {
        self.rates
    }

    /// Changes the options of later launches.
    pub fn set_options(&self, options: Options) {
        lock(&self.state).options = options;
    }

    /// Calls `poll` during later launches, after some hundred instructions of warps each time. A `poll` that unwinds ends the
    /// launch; outputs hold arbitrary numbers then, and the next launch is not affected.
    pub fn polling(self, poll: fn()) -> Self {
        lock(&self.state).poll = poll;
        self
    }

    /// The report of the last launch.
    pub fn report(&self) -> Report {
        lock(&self.state).last.clone()
    }

    /// Counters of all launches of kernels with this name.
    pub fn counts_of(&self, kernel: &str) -> Counts {
        lock(&self.state).counts.get(kernel).cloned().unwrap_or_default()
    }

    /// Cycles of all launches of kernels with this name, one after the other; 0 unless the order is
    /// [`Timed`](crate::Interleaving::Timed).
    pub fn cycles_of(&self, kernel: &str) -> u64 {
        lock(&self.state).cycles.get(kernel).copied().unwrap_or_default()
    }

    /// Faults of the last launch.
    pub fn findings(&self) -> Vec<Finding> {
        lock(&self.state).last.findings.clone()
    }
}

impl Device for Sim {
    fn name(&self) -> String {
        format!("simulated {}", self.target.arch.gpu)
    }
    fn place(&self) -> (&'static str, u32) {
        ("sim", 0)
    }
    fn target(&self) -> Target {
        self.target
    }
    fn multiprocessors(&self) -> u32 {
        self.rates.arch.sms
    }

    fn allocate(&self, bytes: u64) -> Result<Buffer, DeviceError> {
        let span = lock(&self.state).memory.allocate(bytes)?;
        let owner = Owner { state: self.state.clone(), address: span.address() };
        Ok(Buffer::new(span, Box::new(owner)))
    }

    fn upload(&self, to: Span, bytes: &[u8]) -> Result<(), DeviceError> {
        let n = bytes.len() as u64;
        let outside = DeviceError::Bounds { offset: 0, bytes: n, len: to.bytes() };
        if n > to.bytes() {
            return Err(outside);
        }
        let mut state = lock(&self.state);
        let (allocation, offset) = state.memory.find(to.address(), n).ok_or(outside)?;
        allocation.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(bytes);
        allocation.shadow.set_written(offset, n);
        Ok(())
    }

    fn download(&self, from: Span, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let n = bytes.len() as u64;
        let outside = DeviceError::Bounds { offset: 0, bytes: n, len: from.bytes() };
        if n > from.bytes() {
            return Err(outside);
        }
        let mut state = lock(&self.state);
        let (allocation, offset) = state.memory.find(from.address(), n).ok_or(outside)?;
        bytes.copy_from_slice(&allocation.bytes[offset as usize..offset as usize + bytes.len()]);
        Ok(())
    }

    fn load(&self, kernel: Arc<Kernel>) -> Result<Module, DeviceError> {
        if !kernel.target.runs_on(&self.target.arch) {
            let (want, got) = (kernel.target.name(), self.target.name());
            return Err(DeviceError::Target { kernel: kernel.name.clone(), want, got });
        }
        let name = kernel.name.clone();
        let program = Program::new(kernel.clone()).map_err(|log| DeviceError::Compile { kernel: name, log })?;
        Ok(Module::new(kernel, Arc::new(program)))
    }

    fn launch(&self, module: &Module, grid: [u32; 3], args: &[Value], _: Stream<'_>) -> Result<(), DeviceError> {
        check_launch(module.kernel(), grid, args)?;
        let program = module
            .handle::<Program>()
            .ok_or(DeviceError::Failed { call: "launch", what: "the module was loaded by another device".into() })?;
        let mut guard = lock(&self.state);
        let State { memory, options, last, counts, cycles, failed, poll } = &mut *guard;
        for (param, value) in module.kernel().params.iter().zip(args) {
            let span = match value {
                Value::Pointer(span) => *span,
                Value::Tensor(tensor) => tensor.span,
                _ => continue,
            };
            if span.bytes() > 0 && memory.find(span.address(), span.bytes()).is_none() {
                let what = format!("`{}` is no memory of this device: {span:?}", param.name);
                return Err(DeviceError::Failed { call: "launch", what });
            }
        }
        memory.forget_accesses();
        let options = options.clone();
        let mut world = World::new(program, &options, self.rates, memory, args, grid);
        world.run(*poll);
        let names = module.kernel().roles.iter().map(|r| r.name.clone());
        let names: Vec<String> = if module.kernel().roles.is_empty() { vec![String::new()] } else { names.collect() };
        let blocks = grid.iter().map(|&n| u64::from(n)).product();
        let roles = names.into_iter().zip(world.counts).collect();
        let (findings, timeline) = (world.findings, world.timeline);
        let took = timeline.as_ref().map_or(0, Timeline::cycles);
        *cycles.entry(module.kernel().name.clone()).or_default() += took;
        *last = Report { findings, roles, blocks, timeline };
        counts.entry(module.kernel().name.clone()).or_default().add(&last.total());
        match last.findings.first() {
            None => Ok(()),
            Some(finding) => {
                let error = DeviceError::Failed { call: "simulate", what: finding.to_string() };
                *failed = Some(error.clone());
                Err(error)
            }
        }
    }

    fn synchronize(&self, _: Stream<'_>) -> Result<(), DeviceError> {
        lock(&self.state).failed.take().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_of_any_architecture() {
        let sim = Sim::on(Target::AMPERE, Options::default());
        assert_eq!((sim.name().as_str(), sim.multiprocessors()), ("simulated A100", 108));
        let kernel = |target| Arc::new(Kernel::build("nothing", target, |k| k.threads(32, |_| {})).unwrap());
        assert!(sim.load(kernel(Target::AMPERE)).is_ok() && Sim::default().load(kernel(Target::AMPERE)).is_ok());
        for name in ["sm_86", "sm_90a"] {
            let refused = sim.load(kernel(Target::named(name).unwrap())).err().unwrap().to_string();
            assert!(refused.contains(&format!("printed for {name}, and the device is sm_80")), "{refused}");
        }
        let refused = Sim::on(Target::named("sm_100a").unwrap(), Options::default()).load(kernel(Target::HOPPER));
        assert!(refused.is_err());
    }
}
