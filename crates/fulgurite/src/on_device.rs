//! Attention on a device, from tensors in the host's memory: they are copied there and back.
//!
//! The engines that the names `cuda` and `sim` ask for are this one. It is how every device is checked against the oracle; who has
//! tensors on the device already does not want the copies, and [`Choice::Best`](crate::Choice::Best) never takes it.

use crate::compiled::{CompileError, Compiled, check_target, module_of};
use crate::engine::{Engine, Run, Unsupported};
use crate::profile::Tables;
use crate::{Counters, Error};
use fulgurite_core::{
    BlockMask, Bound, Data, DataMut, GradientOutputs, Inputs, Outputs, Problem, Rescale, Saved, TensorView,
    TensorViewMut,
};
use fulgurite_kernels::attention::backward::plan::{BackwardPlan, Tensors as BackwardTensors};
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_kernels::attention::forward::plan::{
    DeviceAux, DeviceBlockLists, DeviceTensor, ForwardPlan, NoKernel, Tensors,
};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Module, Plan as Launches, Span, Stream};
use std::fmt::Debug;
use std::sync::Arc;

/// A device as an engine.
pub(crate) struct OnDevice {
    name: &'static str,
    device: Arc<dyn Device>,
    rescale: Option<Rescale>,
    /// Cuts of the kernels.
    tables: Tables,
    /// In which order d_q is added up.
    order: Order,
    /// The cut of backward, whatever the table and its rules say.
    forced: Option<BackwardConfig>,
    compiled: Compiled,
}

impl OnDevice {
    pub fn new(name: &'static str, device: Arc<dyn Device>, rescale: Option<Rescale>, tables: Tables) -> Self {
        OnDevice { name, device, rescale, tables, order: Order::Any, forced: None, compiled: Compiled::default() }
    }

    /// The same with gradients that are added up in this order.
    pub fn in_order(self, order: Order) -> Self {
        OnDevice { order, ..self }
    }

    /// The same with one cut of backward for everything: of a short problem it is that of the long one it stands for.
    pub fn forcing(self, config: BackwardConfig) -> Self {
        OnDevice { forced: Some(config), ..self }
    }

    fn plan(&self, problem: &Problem) -> Result<ForwardPlan, Unsupported> {
        self.planned(ForwardPlan::by_table(problem, self.rescale, &self.tables.forward))
    }

    fn backward_plan(&self, problem: &Problem, d_lse: bool) -> Result<BackwardPlan, Unsupported> {
        let plan = self.planned(BackwardPlan::by_table(problem, d_lse, self.order, &self.tables.backward))?;
        Ok(self.forced.map_or(plan.clone(), |config| plan.with_config(config)))
    }

    /// The plan, or why there is none on this device.
    fn planned<P>(&self, plan: Result<P, NoKernel>) -> Result<P, Unsupported> {
        let ready = plan.and_then(|plan| check_target(self.device.as_ref()).map(|()| plan));
        ready.map_err(|missing| self.refuse(missing.feature))
    }

    fn refuse(&self, feature: String) -> Unsupported {
        Unsupported { engine: self.name.into(), feature, instead: "the engine `cpu` has it".into() }
    }

    /// A plan that has no kernel.
    fn uncompiled(&self, e: CompileError, plan: &dyn Debug) -> Error {
        let missing = e.missing(&self.tables, self.device.as_ref(), plan);
        missing.map_or_else(Error::from, |missing| self.refuse(missing.feature).into())
    }

    /// Launches a call, with copies of the tensors that its kernel cannot take as they lie, and waits for it.
    fn run(
        &self,
        memory: &mut Vec<Buffer>,
        plan: ForwardPlan,
        mut modules: Vec<Module>,
        tensors: &Tensors,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let (refuse, multiprocessors) =
            (|missing: NoKernel| self.refuse(missing.feature), self.device.multiprocessors());
        let cover = modules.get(1).and_then(|module| plan.cover(&module.shared_kernel(), tensors));
        let (copies, ready) = (plan.copies(&tensors.rows), plan.ready(modules[0].shared_kernel()));
        let mut launches = match copies {
            None => {
                let launch = ready.launch(tensors, multiprocessors).map_err(refuse)?;
                Launches { launches: launch.into_iter().collect() }
            }
            Some(copies) => {
                let (kernels, copying) = self.compiled.copying(self.device.as_ref())?;
                modules.extend(copying);
                let room = self.room(memory, copies.bytes() as usize)?;
                ready.with_copies(&copies, &kernels, tensors, room, multiprocessors).map_err(refuse)?
            }
        };
        if launches.launches.is_empty() {
            return Ok(());
        }
        launches.launches.splice(0..0, cover);
        self.launch(&launches, &modules, run)
    }

    /// Runs launches whose modules are among these, waits for them, and times them where that is asked for.
    fn launch(&self, launches: &Launches, modules: &[Module], run: &Run<'_>) -> Result<(), Error> {
        let once =
            || launches.run(self.device.as_ref(), Stream::default(), &mut |kernel| Ok(module_of(modules, kernel)));
        once()?;
        self.device.synchronize(Stream::default())?;
        let Some(stopwatch) = run.stopwatch else { return Ok(()) };
        let rows = |count| (0..count).try_for_each(|_| once());
        Ok(stopwatch.run(|count| self.device.timed(Stream::default(), &mut || rows(count)))?)
    }

    /// Copies a tensor of rows there, as four axes.
    fn rows(&self, memory: &mut Vec<Buffer>, view: &TensorView<'_>) -> Result<DeviceTensor, Error> {
        let span = self.upload(memory, &packed_bytes(view))?;
        Ok(DeviceTensor::packed(span, four_axes(view.shape())))
    }

    /// Copies bytes there.
    fn upload(&self, memory: &mut Vec<Buffer>, bytes: &[u8]) -> Result<Span, DeviceError> {
        let span = self.room(memory, bytes.len())?;
        self.device.upload(span, bytes)?;
        Ok(span)
    }

    /// Memory for at least a few bytes: an empty tensor has an address too.
    fn room(&self, memory: &mut Vec<Buffer>, bytes: usize) -> Result<Span, DeviceError> {
        let buffer = self.device.allocate(bytes.max(64) as u64)?;
        let span = buffer.span().first(bytes as u64);
        memory.push(buffer);
        Ok(span)
    }

    /// Copies a packed tensor of 16 bits to where it belongs.
    fn download(&self, from: Span, to: &mut TensorViewMut<'_>) -> Result<(), Error> {
        let (shape, strides) = (*to.shape(), *to.strides());
        let mut words = vec![0; 2 * shape.count()];
        self.device.download(from, &mut words)?;
        let mut halves = words.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let data = to.data_mut();
        if is_packed(&shape, &strides) {
            match data {
                DataMut::F16(all) => all.iter_mut().zip(halves).for_each(|(to, x)| *to = half::f16::from_bits(x)),
                DataMut::Bf16(all) => all.iter_mut().zip(halves).for_each(|(to, x)| *to = half::bf16::from_bits(x)),
                _ => unreachable!("bug in fulgurite: a type that the plan refused"),
            }
            return Ok(());
        }
        each_offset(&shape, &strides, |offset| {
            let bits = halves.next().expect("bug in fulgurite: as many elements as offsets");
            match data {
                DataMut::F16(all) => all[offset] = half::f16::from_bits(bits),
                DataMut::Bf16(all) => all[offset] = half::bf16::from_bits(bits),
                _ => unreachable!("bug in fulgurite: a type that the plan refused"),
            }
        });
        Ok(())
    }

    /// Offsets of packed sequences, and used lengths.
    fn lengths(&self, memory: &mut Vec<Buffer>, inputs: &Inputs<'_>) -> Result<Lengths, Error> {
        let mut whole = |view: &TensorView<'_>| self.upload(memory, &packed_bytes(view));
        let cu_seqlens = match (&inputs.cu_seqlens_q, &inputs.cu_seqlens_k) {
            (Some(q), Some(k)) => Some([whole(q)?, whole(k)?]),
            _ => None,
        };
        let mut used = |view: &Option<TensorView<'_>>| view.as_ref().map(&mut whole).transpose();
        Ok((cu_seqlens, [used(&inputs.used_q)?, used(&inputs.used_k)?]))
    }

    /// Auxiliary tensors.
    fn aux(&self, memory: &mut Vec<Buffer>, bound: &Bound<'_>) -> Result<Vec<DeviceAux>, Error> {
        let placed = |view: &TensorView<'_>| {
            let shape: Vec<u64> = view.shape().iter().map(|&n| n as u64).collect();
            let strides = (0..shape.len()).map(|axis| shape[axis + 1..].iter().product()).collect();
            Ok(DeviceAux { span: self.upload(memory, &packed_bytes(view))?, strides })
        };
        bound.aux().iter().map(placed).collect()
    }

    /// The tensors of a call beside q, k, v, o and the LSE.
    fn more(
        &self,
        memory: &mut Vec<Buffer>,
        inputs: &Inputs<'_>,
        bound: &Bound<'_>,
        tensors: &mut Tensors,
    ) -> Result<(), Error> {
        (tensors.cu_seqlens, tensors.used) = self.lengths(memory, inputs)?;
        let mut whole = |view: &TensorView<'_>| self.upload(memory, &packed_bytes(view));
        tensors.sinks = inputs.sinks.as_ref().map(&mut whole).transpose()?;
        tensors.aux = self.aux(memory, bound)?;
        tensors.lists = bound.block_mask().map(|mask| self.lists(memory, mask)).transpose()?;
        Ok(())
    }

    /// The lists of a block mask, each with room for the longest.
    fn lists(&self, memory: &mut Vec<Buffer>, mask: &BlockMask) -> Result<DeviceBlockLists, Error> {
        let spec = mask.spec();
        let rows = || {
            let [q_blocks, _] = mask.blocks();
            (0..spec.batch).flat_map(move |b| (0..spec.heads).flat_map(move |h| (0..q_blocks).map(move |i| (b, h, i))))
        };
        let bytes = |numbers: Vec<i32>| numbers.into_iter().flat_map(i32::to_le_bytes).collect::<Vec<u8>>();
        let mut one = |pick: &dyn Fn((usize, usize, usize)) -> Vec<i32>| -> Result<(Span, Span, u32), Error> {
            let lists: Vec<Vec<i32>> = rows().map(pick).collect();
            let width = lists.iter().map(Vec::len).max().unwrap_or(0).max(1);
            let counts = lists.iter().map(|list| list.len() as i32).collect();
            let padded =
                |list: &Vec<i32>| list.iter().copied().chain(std::iter::repeat(0)).take(width).collect::<Vec<_>>();
            let blocks = lists.iter().flat_map(padded).collect();
            Ok((self.upload(memory, &bytes(counts))?, self.upload(memory, &bytes(blocks))?, width as u32))
        };
        let partial = one(&|(b, h, i)| mask.lists(b, h, i).0.to_vec())?;
        let full = one(&|(b, h, i)| mask.lists(b, h, i).1.to_vec())?;
        Ok(DeviceBlockLists { counts: [partial.0, full.0], blocks: [partial.1, full.1], widths: [partial.2, full.2] })
    }
}

/// Offsets of q and of k, and used lengths of both.
type Lengths = (Option<[Span; 2]>, [Option<Span>; 2]);

/// A shape of rows with its batch axis: a packed batch is one sequence.
fn four_axes(shape: &[usize]) -> [u64; 4] {
    let mut axes = [1; 4];
    let first = 4 - shape.len();
    shape.iter().enumerate().for_each(|(i, &n)| axes[first + i] = n as u64);
    axes
}

/// The elements of a tensor, in order.
fn packed_bytes(view: &TensorView<'_>) -> Vec<u8> {
    /// Elements that lie together, at once.
    fn together<const N: usize, T: Copy>(all: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        let mut out = vec![0; N * all.len()];
        out.chunks_exact_mut(N).zip(all).for_each(|(to, &x)| to.copy_from_slice(&bytes(x)));
        out
    }
    let count = view.shape().count();
    if is_packed(view.shape(), view.strides()) {
        match view.data() {
            Data::F32(all) => return together(&all[..count], f32::to_le_bytes),
            Data::F16(all) => return together(&all[..count], half::f16::to_le_bytes),
            Data::Bf16(all) => return together(&all[..count], half::bf16::to_le_bytes),
            Data::I32(all) => return together(&all[..count], i32::to_le_bytes),
            _ => unreachable!("bug in fulgurite: a type that the problem refused"),
        }
    }
    let mut bytes = Vec::with_capacity(view.dtype().size_bytes() * count);
    each_offset(view.shape(), view.strides(), |offset| match view.data() {
        Data::F32(all) => bytes.extend(all[offset].to_le_bytes()),
        Data::F16(all) => bytes.extend(all[offset].to_le_bytes()),
        Data::Bf16(all) => bytes.extend(all[offset].to_le_bytes()),
        Data::I32(all) => bytes.extend(all[offset].to_le_bytes()),
        _ => unreachable!("bug in fulgurite: a type that the problem refused"),
    });
    bytes
}

/// Whether elements lie together in row-major order.
fn is_packed(shape: &[usize], strides: &[usize]) -> bool {
    let mut step = 1;
    shape.iter().zip(strides).rev().all(|(&n, &stride)| {
        let fits = n == 1 || stride == step;
        step *= n;
        fits
    })
}

/// Calls `f` with the place of each element, in row-major order.
fn each_offset(shape: &[usize], strides: &[usize], mut f: impl FnMut(usize)) {
    let count: usize = shape.iter().product();
    for i in 0..count {
        let mut rest = i;
        let mut offset = 0;
        for (&n, &stride) in shape.iter().zip(strides).rev() {
            offset += rest % n * stride;
            rest /= n;
        }
        f(offset);
    }
}

impl Engine for OnDevice {
    fn name(&self) -> &str {
        self.name
    }

    fn describe(&self) -> String {
        let rescale = self.rescale.map(|r| format!(", rescale {r}")).unwrap_or_default();
        let order = if self.order == Order::Fixed { ", gradients in a fixed order" } else { "" };
        format!("{}, {}, tensors copied there and back{rescale}{order}", self.name, self.device.name())
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        self.plan(problem).map(|_| ())
    }

    fn forward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let mut plan = self.plan(problem)?;
        let bound = inputs.bind(problem)?;
        outputs.check(problem)?;
        if let Some(sinks) = &inputs.sinks {
            plan = plan.with_sinks(sinks.dtype());
        }
        let modules = self.compiled.forward(self.device.as_ref(), &plan).map_err(|e| self.uncompiled(e, &plan))?;
        let memory = &mut Vec::new();
        let [q, k, v] = [self.rows(memory, bound.q())?, self.rows(memory, bound.k())?, self.rows(memory, bound.v())?];
        let (o_shape, lse_count) = (*outputs.o.shape(), outputs.lse.shape().count());
        let o = DeviceTensor::packed(self.room(memory, 2 * o_shape.count())?, four_axes(&o_shape));
        let lse = self.room(memory, 4 * lse_count)?;
        let counters = self.upload(memory, &vec![0; plan.counter_bytes() as usize])?;
        let mut tensors = Tensors::new([q, k, v, o], lse, counters);
        tensors.scratch = Some(self.room(memory, plan.scratch_bytes() as usize)?);
        self.more(memory, inputs, &bound, &mut tensors)?;
        self.run(memory, plan, modules, &tensors, run)?;

        self.download(o.span, &mut outputs.o)?;
        let mut words = vec![0; 4 * lse_count];
        self.device.download(lse, &mut words)?;
        let mut numbers = words.chunks_exact(4).map(|w| f32::from_le_bytes([w[0], w[1], w[2], w[3]]));
        let (shape, strides) = (*outputs.lse.shape(), *outputs.lse.strides());
        let DataMut::F32(all) = outputs.lse.data_mut() else {
            unreachable!("bug in fulgurite: an LSE that is not f32")
        };
        each_offset(&shape, &strides, |offset| {
            all[offset] = numbers.next().expect("bug in fulgurite: as many elements as offsets");
        });
        if let Some(tally) = run.tally {
            let mut word = [0; 4];
            let second = counters.from(4).first(4);
            self.device.download(second, &mut word)?;
            tally.add(Counters { blocks_redone: u64::from(u32::from_le_bytes(word)), ..Counters::default() });
        }
        Ok(())
    }

    fn backward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let plan = self.backward_plan(problem, saved.d_lse.is_some())?;
        let bound = inputs.bind(problem)?;
        saved.check(problem)?;
        gradients.check(problem)?;
        let compiled = self.compiled.backward(self.device.as_ref(), &plan);
        let (kernels, modules) = compiled.map_err(|e| self.uncompiled(e, &plan))?;
        let memory = &mut Vec::new();
        let [q, k, v] = [self.rows(memory, bound.q())?, self.rows(memory, bound.k())?, self.rows(memory, bound.v())?];
        let [o, d_o] = [self.rows(memory, &saved.o)?, self.rows(memory, &saved.d_o)?];
        let lse = self.upload(memory, &packed_bytes(&saved.lse))?;
        let d_lse = saved.d_lse.as_ref().map(|view| self.upload(memory, &packed_bytes(view))).transpose()?;
        let mut result = |like: DeviceTensor| -> Result<DeviceTensor, DeviceError> {
            let span = self.room(memory, 2 * like.shape.iter().product::<u64>() as usize)?;
            Ok(DeviceTensor::packed(span, like.shape))
        };
        let [d_q, d_k, d_v] = [result(q)?, result(k)?, result(v)?];
        let scratch = self.room(memory, plan.scratch_bytes() as usize)?;
        let sinks = match bound.sinks() {
            Some(view) => {
                let bytes: Vec<u8> = view.to_f64().iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
                Some([self.upload(memory, &bytes)?, self.room(memory, bytes.len())?])
            }
            None => None,
        };
        let mut tensors =
            BackwardTensors { d_lse, sinks, ..BackwardTensors::new([q, k, v, o], lse, d_o, [d_q, d_k, d_v]) };
        (tensors.cu_seqlens, tensors.used) = self.lengths(memory, inputs)?;
        tensors.aux = self.aux(memory, &bound)?;
        tensors.lists = bound.block_mask().map(|mask| self.lists(memory, mask)).transpose()?;
        for to in &gradients.d_aux {
            let room = to.as_ref().map(|to| self.room(memory, 4 * to.shape().count())).transpose()?;
            tensors.d_aux.push(room);
        }
        let (multiprocessors, mut modules) = (self.device.multiprocessors(), modules);
        let launches = match plan.copies(&tensors) {
            None => plan.plan(&kernels, &tensors, scratch, multiprocessors),
            Some(copies) => {
                let (copying, loaded) = self.compiled.copying(self.device.as_ref())?;
                modules.extend(loaded);
                let room = self.room(memory, copies.bytes() as usize)?;
                plan.with_copies((&copies, &copying, room), &kernels, &tensors, scratch, multiprocessors)
            }
        };
        let launches = launches.map_err(|missing| self.refuse(missing.feature))?;
        self.launch(&launches, &modules, run)?;
        self.download(d_q.span, &mut gradients.d_q)?;
        self.download(d_k.span, &mut gradients.d_k)?;
        self.download(d_v.span, &mut gradients.d_v)?;
        let sinks = sinks.map(|[_, from]| from).zip(gradients.d_sinks.as_mut());
        let aux = tensors.d_aux.iter().zip(&mut gradients.d_aux).filter_map(|(from, to)| (*from).zip(to.as_mut()));
        for (from, to) in sinks.into_iter().chain(aux) {
            let mut words = vec![0; 4 * to.shape().count()];
            self.device.download(from, &mut words)?;
            let numbers = words.chunks_exact(4).map(|w| f64::from(f32::from_le_bytes([w[0], w[1], w[2], w[3]])));
            to.write_f64(&numbers.collect::<Vec<_>>());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::cases::{self, Case};
    use fulgurite_core::compare::check_backward;
    use fulgurite_core::{DType, Gradients, oracle};
    use fulgurite_sim::{Options, Sim};

    /// Gradients of a case in a fixed order, with all blocks at once; they are right.
    fn fixed(case: &Case, seed: u64) -> Gradients {
        let sim = Sim::new(Options { seed, resident: 8, ..Options::default() });
        let engine = OnDevice::new("sim", Arc::new(sim), None, Tables::default()).in_order(Order::Fixed);
        let forward = oracle::forward(&case.bound()).to_forward(case.problem()).unwrap();
        let saved = Saved { d_lse: case.d_lse(), ..forward.saved(case.d_o()) };
        let gradients = engine.backward(case.problem(), &case.inputs(), &saved, &Run::default()).unwrap();
        for (name, verdict) in check_backward(&case.bound(), &saved, &gradients, 0) {
            assert!(verdict.ok(), "{case} {name}: {verdict}");
        }
        gradients
    }

    /// Every gradient of an auxiliary tensor of the table, whoever adds first.
    #[test]
    fn a_fixed_order_gives_auxiliary_tensors_the_same_bits() {
        let mut table = cases::cases(DType::Bf16);
        table.retain(|case| !case.problem().aux_gradients().is_empty());
        assert!(table.len() > 2, "{}", table.len());
        for case in &table {
            let first = fixed(case, 1);
            assert!((2..4).all(|seed| fixed(case, seed) == first), "{case}");
        }
    }
}
