//! A device as an attention engine. Tensors in host memory are copied to the device and back; tensors on the device are
//! used in place.
//!
//! The engines `cuda` and `sim` use this type. [`Choice::Best`](crate::Choice::Best) never chooses it, because it moves
//! data.

use super::memory::DeviceSpan;
use super::session::Session;
use crate::engine::{Engine, Run, Unsupported};
use crate::{Counters, Error};
use fulgurite_core::{
    BlockLists, BlockMask, DType, Data, DataMut, GradientOutputs, Inputs, Outputs, Place, Problem, Rescale, Saved,
    Tensor, TensorView, TensorViewMut, stop,
};
use fulgurite_kernels::attention::backward::{BackwardConfig, Order};
use fulgurite_kernels::operator::{Backward, BackwardOptions, Forward, ForwardOptions, Tables, choose_unit};
use fulgurite_ptx::TensorUnit;
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Stream};
use std::sync::Arc;

/// A device as an attention engine.
pub(crate) struct OnDevice<D: Device + ?Sized> {
    session: Session<D>,
    rescale: Option<Rescale>,
    order: Order,
    /// A tile configuration of backward that overrides the tables.
    forced: Option<BackwardConfig>,
    /// The unit that multiplies matrices.
    unit: Option<TensorUnit>,
    /// Whether the LSE is read.
    lse: bool,
}

impl<D: Device + ?Sized> OnDevice<D> {
    pub fn new(device: Arc<D>, rescale: Option<Rescale>, tables: Tables) -> Self {
        OnDevice {
            session: Session::new(device, tables),
            rescale,
            order: Order::Any,
            forced: None,
            unit: None,
            lse: true,
        }
    }

    /// This engine, accumulating gradients in the given order.
    pub fn in_order(self, order: Order) -> Self {
        OnDevice { order, ..self }
    }

    /// This engine with one tile configuration of backward for every problem.
    pub fn forcing(self, config: BackwardConfig) -> Self {
        OnDevice { forced: Some(config), ..self }
    }

    /// This engine with the unit that multiplies matrices; `None` means the fastest one.
    pub fn with_unit(self, unit: Option<TensorUnit>) -> Self {
        OnDevice { unit, ..self }
    }

    /// This engine for callers that do not read the LSE.
    pub fn without_lse(self) -> Self {
        OnDevice { lse: false, ..self }
    }

    fn forward_options(&self, inputs: &Inputs<'_>) -> ForwardOptions {
        let sinks = inputs.sinks.as_ref().map(TensorView::dtype);
        ForwardOptions { sinks, rescale: self.rescale, unit: self.unit, lse: self.lse, ..ForwardOptions::default() }
    }

    /// Runs a call, waits for it, and times it if requested.
    fn run_timed(&self, run: &Run<'_>, mut once: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
        let device = self.session.device();
        once()?;
        device.synchronize(Stream::default())?;
        let Some(stopwatch) = run.stopwatch else { return Ok(()) };
        stopwatch.run(|count| {
            let mut failed = None;
            let seconds = device.timed(Stream::default(), &mut || {
                for _ in 0..count {
                    if let Err(e) = once() {
                        failed = Some(e);
                        break;
                    }
                }
                Ok(())
            })?;
            failed.map_or(Ok(seconds), Err)
        })
    }
}

/// A row-major copy of a host tensor on the device.
pub(super) struct Copied {
    memory: DeviceSpan,
    /// Frees the memory when dropped.
    _buffer: Buffer,
    dtype: DType,
    shape: Vec<usize>,
}

impl Copied {
    /// Allocates memory for a tensor, with undefined contents.
    pub(super) fn room(device: &(impl Device + ?Sized), dtype: DType, shape: &[usize]) -> Result<Copied, DeviceError> {
        let bytes = dtype.size_bytes() * shape.iter().product::<usize>();
        // Tensors go there and back through a buffer on the host: nothing is computed that could not be brought back.
        stop::ask("a copy of a tensor", bytes);
        let bytes = bytes as u64;
        // A tensor without elements also needs an address.
        let buffer = device.allocate(bytes.max(64))?;
        let memory = DeviceSpan::new(device, buffer.span().first(bytes));
        Ok(Copied { memory, _buffer: buffer, dtype, shape: shape.to_vec() })
    }

    pub(super) fn of(device: &(impl Device + ?Sized), view: &TensorView<'_>) -> Result<Copied, DeviceError> {
        let copied = Copied::room(device, view.dtype(), view.shape())?;
        device.upload(copied.memory.span(), &packed_bytes(view))?;
        Ok(copied)
    }

    fn optional(device: &(impl Device + ?Sized), view: Option<&TensorView<'_>>) -> Result<Option<Copied>, DeviceError> {
        view.map(|view| Copied::of(device, view)).transpose()
    }

    pub(super) fn view(&self) -> Result<TensorView<'_>, Error> {
        Ok(TensorView::on_device(&self.memory, self.dtype, &self.shape, None)?)
    }

    pub(super) fn view_mut(&self) -> Result<TensorViewMut<'_>, Error> {
        Ok(TensorViewMut::on_device(&self.memory, self.dtype, &self.shape, None)?)
    }

    /// Copies the elements back to a host tensor of the same shape and type.
    pub(super) fn download(
        &self,
        device: &(impl Device + ?Sized),
        to: &mut TensorViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let mut bytes: Vec<u8> = stop::zeros("a copy of a tensor", self.memory.span().bytes() as usize);
        device.download(self.memory.span(), &mut bytes)?;
        unpack(&bytes, to);
        Ok(())
    }
}

fn view_of(copied: &Option<Copied>) -> Result<Option<TensorView<'_>>, Error> {
    copied.as_ref().map(Copied::view).transpose()
}

/// Device copies of all inputs of a forward call.
struct CopiedInputs<'a> {
    rows: [Copied; 3],
    sinks: Option<Copied>,
    cu_seqlens: [Option<Copied>; 2],
    used: [Option<Copied>; 2],
    aux: Vec<(&'a str, Copied)>,
    /// Counts and blocks of the partial lists, then of the full ones.
    lists: Option<[Copied; 4]>,
}

impl<'a> CopiedInputs<'a> {
    fn of(device: &(impl Device + ?Sized), inputs: &Inputs<'a>, sinks: Option<&TensorView<'_>>) -> Result<Self, Error> {
        let one = |view: &TensorView<'_>| Copied::of(device, view);
        let maybe = |view: &Option<TensorView<'_>>| Copied::optional(device, view.as_ref());
        let aux = |(name, view): &(&'a str, TensorView<'a>)| Ok::<_, DeviceError>((*name, one(view)?));
        Ok(CopiedInputs {
            rows: [one(&inputs.q)?, one(&inputs.k)?, one(&inputs.v)?],
            sinks: Copied::optional(device, sinks)?,
            cu_seqlens: [maybe(&inputs.cu_seqlens_q)?, maybe(&inputs.cu_seqlens_k)?],
            used: [maybe(&inputs.used_q)?, maybe(&inputs.used_k)?],
            aux: inputs.aux.iter().map(aux).collect::<Result<_, _>>()?,
            lists: inputs.block_mask.map(|mask| copied_lists(device, mask)).transpose()?,
        })
    }

    fn inputs(&self) -> Result<Inputs<'_>, Error> {
        let [q, k, v] = &self.rows;
        let mut inputs = Inputs::new(q.view()?, k.view()?, v.view()?);
        inputs.sinks = view_of(&self.sinks)?;
        (inputs.cu_seqlens_q, inputs.cu_seqlens_k) = (view_of(&self.cu_seqlens[0])?, view_of(&self.cu_seqlens[1])?);
        (inputs.used_q, inputs.used_k) = (view_of(&self.used[0])?, view_of(&self.used[1])?);
        for (name, copied) in &self.aux {
            inputs.aux.push((name, copied.view()?));
        }
        if let Some([counts, blocks, full_counts, full_blocks]) = &self.lists {
            let (counts, blocks) = ([counts.view()?, full_counts.view()?], [blocks.view()?, full_blocks.view()?]);
            inputs.block_lists = Some(Box::new(BlockLists { counts, blocks }));
        }
        Ok(inputs)
    }
}

/// The lists of a block mask, each padded to the longest.
fn copied_lists(device: &(impl Device + ?Sized), mask: &BlockMask) -> Result<[Copied; 4], Error> {
    let (spec, [q_blocks, _]) = (mask.spec(), mask.blocks());
    let rows =
        || (0..spec.batch).flat_map(move |b| (0..spec.heads).flat_map(move |h| (0..q_blocks).map(move |i| (b, h, i))));
    let shape = [spec.batch, spec.heads, q_blocks];
    let one = |pick: &dyn Fn((usize, usize, usize)) -> Vec<i32>| -> Result<[Copied; 2], Error> {
        let lists: Vec<Vec<i32>> = rows().map(pick).collect();
        let width = lists.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let counts: Vec<i32> = lists.iter().map(|list| list.len() as i32).collect();
        let padded = |list: &Vec<i32>| list.iter().copied().chain(std::iter::repeat(0)).take(width).collect::<Vec<_>>();
        let blocks: Vec<i32> = lists.iter().flat_map(padded).collect();
        let (counts, blocks) =
            (Tensor::new(counts, &shape)?, Tensor::new(blocks, &[spec.batch, spec.heads, q_blocks, width])?);
        Ok([Copied::of(device, &counts.view())?, Copied::of(device, &blocks.view())?])
    };
    let [counts, blocks] = one(&|(b, h, i)| mask.lists(b, h, i).0.to_vec())?;
    let [full_counts, full_blocks] = one(&|(b, h, i)| mask.lists(b, h, i).1.to_vec())?;
    Ok([counts, blocks, full_counts, full_blocks])
}

/// The elements of a tensor in row-major order.
fn packed_bytes(view: &TensorView<'_>) -> Vec<u8> {
    let tensor;
    let packed = match is_packed(view.shape(), view.strides()) {
        true => *view,
        false => {
            tensor = view.to_tensor();
            tensor.view()
        }
    };
    fn bytes<const N: usize, T: Copy>(all: &[T], count: usize, bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        let mut out: Vec<u8> = stop::zeros("a copy of a tensor", N * count);
        out.chunks_exact_mut(N).zip(all).for_each(|(to, &x)| to.copy_from_slice(&bytes(x)));
        out
    }
    let count = view.shape().count();
    match packed.data() {
        Data::F32(all) => bytes(all, count, f32::to_le_bytes),
        Data::F16(all) => bytes(all, count, half::f16::to_le_bytes),
        Data::Bf16(all) => bytes(all, count, half::bf16::to_le_bytes),
        Data::I32(all) => bytes(all, count, i32::to_le_bytes),
        _ => unreachable!("bug in fulgurite: a type that the problem refused"),
    }
}

/// Writes elements in row-major order into a tensor.
fn unpack(bytes: &[u8], to: &mut TensorViewMut<'_>) {
    fn put<const N: usize, T>(bytes: &[u8], offsets: &[usize], all: &mut [T], from: impl Fn([u8; N]) -> T) {
        let elements = bytes.chunks_exact(N).map(|chunk| {
            let mut word = [0; N];
            word.copy_from_slice(chunk);
            from(word)
        });
        match offsets.is_empty() {
            true => all.iter_mut().zip(elements).for_each(|(to, x)| *to = x),
            false => offsets.iter().zip(elements).for_each(|(&at, x)| all[at] = x),
        }
    }
    let (shape, strides) = (*to.shape(), *to.strides());
    let mut offsets = Vec::new();
    if !is_packed(&shape, &strides) {
        stop::ask("offsets of a tensor's elements", shape.count().saturating_mul(size_of::<usize>()));
        offsets.reserve_exact(shape.count());
        each_offset(&shape, &strides, |offset| offsets.push(offset));
    }
    match to.data_mut() {
        DataMut::F32(all) => put(bytes, &offsets, all, f32::from_le_bytes),
        DataMut::F16(all) => put(bytes, &offsets, all, half::f16::from_le_bytes),
        DataMut::Bf16(all) => put(bytes, &offsets, all, half::bf16::from_le_bytes),
        DataMut::I32(all) => put(bytes, &offsets, all, i32::from_le_bytes),
        _ => unreachable!("bug in fulgurite: a type that the problem refused"),
    }
}

/// Whether elements are contiguous in row-major order.
pub(super) fn is_packed(shape: &[usize], strides: &[usize]) -> bool {
    let mut step = 1;
    let empty = shape.contains(&0);
    shape.iter().zip(strides).rev().all(|(&n, &stride)| {
        let fits = empty || n == 1 || stride == step;
        step *= n;
        fits
    })
}

/// Calls `f` with the offset of each element, in row-major order.
fn each_offset(shape: &[usize], strides: &[usize], mut f: impl FnMut(usize)) {
    let count: usize = shape.iter().product();
    for i in 0..count {
        let (mut rest, mut offset) = (i, 0);
        for (&n, &stride) in shape.iter().zip(strides).rev() {
            offset += rest % n * stride;
            rest /= n;
        }
        f(offset);
    }
}

impl<D: Device + ?Sized> Engine for OnDevice<D> {
    fn name(&self) -> &str {
        self.session.id().kind
    }

    fn describe(&self) -> String {
        let rescale = self.rescale.map(|r| format!(", rescale {r}")).unwrap_or_default();
        let order = if self.order == Order::Fixed { ", gradients in a fixed order" } else { "" };
        let (name, device) = (self.name(), self.session.device());
        // A configuration without a kernel is refused when a problem is planned.
        let products = choose_unit(device.target(), self.unit).map(|unit| format!(", products by {unit}"));
        let products = products.unwrap_or_default();
        format!("{name}, {}{products}, tensors copied there and back{rescale}{order}", device.name())
    }

    fn supports(&self, problem: &Problem) -> Result<(), Unsupported> {
        let options = ForwardOptions { rescale: self.rescale, unit: self.unit, ..ForwardOptions::default() };
        match self.session.plan::<Forward>(problem, &options) {
            Ok(_) => Ok(()),
            Err(Error::Unsupported(e)) => Err(e),
            Err(e) => {
                let (engine, instead) = (self.name().into(), "the engine `cpu` has it".into());
                Err(Unsupported { engine, feature: e.to_string(), instead })
            }
        }
    }

    fn forward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        stop::catch_memory(|| self.forward_in_place_or_copied(problem, inputs, outputs, run))?
    }

    fn backward_into(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        stop::catch_memory(|| self.backward_in_place_or_copied(problem, inputs, saved, gradients, run))?
    }
}

impl<D: Device + ?Sized> OnDevice<D> {
    fn forward_in_place_or_copied(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let (session, options) = (&self.session, self.forward_options(inputs));
        if inputs.q.place() != Place::Host {
            let prepared = session.prepare::<Forward>(problem, &options)?;
            return session.forward(&prepared, inputs, &mut outputs.o, Some(&mut outputs.lse), run.stream);
        }
        session.plan::<Forward>(problem, &options)?;
        inputs.check(problem)?;
        outputs.check(problem)?;
        let (device, prepared) = (&**session.device(), session.prepare::<Forward>(problem, &options)?);
        let copied = CopiedInputs::of(device, inputs, inputs.sinks.as_ref())?;
        let o = Copied::room(device, problem.dtype(), outputs.o.shape())?;
        let lse = Copied::room(device, DType::F32, outputs.lse.shape())?;
        let before = run.tally.map(|_| session.blocks_redone(&prepared, Stream::default())).transpose()?;
        let device_inputs = copied.inputs()?;
        self.run_timed(run, || {
            let (mut o, mut lse) = (o.view_mut()?, lse.view_mut()?);
            session.forward(&prepared, &device_inputs, &mut o, Some(&mut lse), Stream::default())
        })?;
        o.download(device, &mut outputs.o)?;
        lse.download(device, &mut outputs.lse)?;
        if let (Some(tally), Some(before)) = (run.tally, before) {
            let redone = session.blocks_redone(&prepared, Stream::default())?.wrapping_sub(before);
            tally.add(Counters { blocks_redone: redone.into(), ..Counters::default() });
        }
        Ok(())
    }

    fn backward_in_place_or_copied(
        &self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        saved: &Saved<'_>,
        gradients: &mut GradientOutputs<'_>,
        run: &Run<'_>,
    ) -> Result<(), Error> {
        let session = &self.session;
        let (d_lse, order, config, unit) = (saved.d_lse.is_some(), self.order, self.forced, self.unit);
        let options = BackwardOptions { d_lse, order, config, unit, ..BackwardOptions::default() };
        if inputs.q.place() != Place::Host {
            let prepared = session.prepare::<Backward>(problem, &options)?;
            return session.backward(&prepared, inputs, saved, gradients, run.stream);
        }
        session.plan::<Backward>(problem, &options)?;
        inputs.check(problem)?;
        saved.check(problem)?;
        gradients.check(problem)?;
        let (device, prepared) = (&**session.device(), session.prepare::<Backward>(problem, &options)?);
        // The kernel that sums the gradients of sinks reads f32.
        let as_f32 = |view: &TensorView<'_>| Tensor::from_f64(DType::F32, &view.to_f64(), view.shape());
        let sinks = inputs.sinks.as_ref().map(as_f32).transpose()?;
        let copied = CopiedInputs::of(device, inputs, sinks.as_ref().map(Tensor::view).as_ref())?;
        let one = |view: &TensorView<'_>| Copied::of(device, view);
        let [o, lse, d_o] = [one(&saved.o)?, one(&saved.lse)?, one(&saved.d_o)?];
        let d_lse = saved.d_lse.as_ref().map(one).transpose()?;
        let room = |to: &TensorViewMut<'_>| Copied::room(device, to.dtype(), to.shape());
        let results = [room(&gradients.d_q)?, room(&gradients.d_k)?, room(&gradients.d_v)?];
        let d_sinks = gradients.d_sinks.as_ref().map(room).transpose()?;
        let d_aux: Vec<Option<Copied>> =
            gradients.d_aux.iter().map(|to| to.as_ref().map(room).transpose()).collect::<Result<_, _>>()?;
        let device_inputs = copied.inputs()?;
        self.run_timed(run, || {
            let saved = Saved { o: o.view()?, lse: lse.view()?, d_o: d_o.view()?, d_lse: view_of(&d_lse)? };
            let [d_q, d_k, d_v] = &results;
            let mut outputs = GradientOutputs {
                d_q: d_q.view_mut()?,
                d_k: d_k.view_mut()?,
                d_v: d_v.view_mut()?,
                d_sinks: d_sinks.as_ref().map(Copied::view_mut).transpose()?,
                d_aux: d_aux.iter().map(|d| d.as_ref().map(Copied::view_mut).transpose()).collect::<Result<_, _>>()?,
            };
            session.backward(&prepared, &device_inputs, &saved, &mut outputs, Stream::default())
        })?;
        let rows = [&mut gradients.d_q, &mut gradients.d_k, &mut gradients.d_v];
        let small = d_sinks.iter().zip(gradients.d_sinks.as_mut());
        let aux = d_aux.iter().zip(&mut gradients.d_aux).filter_map(|(from, to)| from.as_ref().zip(to.as_mut()));
        for (from, to) in results.iter().zip(rows).chain(small).chain(aux) {
            from.download(device, to)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fulgurite_core::cases::{self, Case};
    use fulgurite_core::compare::check_backward;
    use fulgurite_core::expr::{Coverage, k, q};
    use fulgurite_core::random::Rng;
    use fulgurite_core::{BlockMask, BlockSpec, DType, Gradients, Layout, Mask, Tensor, oracle};
    use fulgurite_kernels::attention::backward::plan::BackwardPlan;
    use fulgurite_ptx::Target;
    use fulgurite_sim::{Options, Sim};
    use std::collections::BTreeSet;

    /// Gradients of a case in a fixed order, with all CTAs resident at once; checked against the oracle.
    fn fixed(case: &Case, seed: u64) -> Gradients {
        let sim = Sim::new(Options { seed, resident: 8, ..Options::default() });
        let engine = OnDevice::new(Arc::new(sim), None, Tables::default()).in_order(Order::Fixed);
        let forward = oracle::forward(&case.bound()).to_forward(case.problem()).unwrap();
        let saved = Saved { d_lse: case.d_lse(), ..forward.saved(case.d_o()) };
        let gradients = engine.backward(case.problem(), &case.inputs(), &saved, &Run::default()).unwrap();
        for (name, verdict) in check_backward(&case.bound(), &saved, &gradients, 0) {
            assert!(verdict.ok(), "{case} {name}: {verdict}");
        }
        gradients
    }

    /// Gradients of auxiliary tensors are deterministic in a fixed order, for every case of the table.
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

    /// An engine that divides the query heads of each key/value head into `parts` parts.
    fn spread(problem: &Problem, (order, target): (Order, Target), parts: u32, seed: u64) -> OnDevice<Sim> {
        let plan = match target.arch.tensor {
            TensorUnit::MmaSync => BackwardPlan::mma_sync(problem, (false, order), target.arch),
            _ => BackwardPlan::new(problem, false, order),
        };
        let usual = plan.unwrap().config();
        let sim = Sim::on(target, Options { seed, resident: 8, ..Options::default() });
        let engine = OnDevice::new(Arc::new(sim), None, Tables::default()).in_order(order);
        engine.forcing(BackwardConfig { head_splits: Some(parts), ..usual })
    }

    /// Two parts of heads with packed and used lengths, modified scores, sinks and block masks: results pass the tolerance
    /// rule, and d_k and d_v are deterministic.
    #[test]
    fn spread_heads_take_every_feature() {
        let mut table = cases::cases(DType::Bf16);
        table.retain(|case| {
            let problem = case.problem();
            let special = problem.has_used_k() || matches!(problem.layout(), Layout::Packed(_));
            let special = special || problem.has_sinks() || !problem.aux().is_empty() || problem.blocks().is_some();
            let finite = !case.features.iter().any(|feature| cases::NONFINITE.contains(feature));
            let plan = BackwardPlan::new(problem, false, Order::Any);
            problem.group() > 1 && special && finite && plan.is_ok_and(|plan| plan.can_split_heads())
        });
        assert!(table.len() > 4, "{}", table.len());
        for (case, seed) in table.iter().zip(1..) {
            let kind = match seed % 3 {
                0 => (Order::Fixed, Target::HOPPER),
                1 => (Order::Any, Target::HOPPER),
                _ => (Order::Any, Target::AMPERE),
            };
            let forward = oracle::forward(&case.bound()).to_forward(case.problem()).unwrap();
            let saved = Saved { d_lse: case.d_lse(), ..forward.saved(case.d_o()) };
            let run = |seed| {
                let engine = spread(case.problem(), kind, 2, seed);
                engine.backward(case.problem(), &case.inputs(), &saved, &Run::default()).unwrap()
            };
            let [one, other] = [seed, seed + 100].map(run);
            for (name, verdict) in check_backward(&case.bound(), &saved, &one, 0) {
                assert!(verdict.ok(), "{case} {name}: {verdict}");
            }
            assert_eq!((&one.d_k, &one.d_v), (&other.d_k, &other.d_v), "{case}");
        }
    }

    /// d_v of one query and one key is the sum of d_o over heads: parts are added in the order of their numbers.
    #[test]
    fn parts_are_added_in_the_order_of_their_numbers() {
        let problem = Problem::builder().dense(1, 1, 1).heads(4, 1).head_dim(64).dtype(DType::Bf16).build().unwrap();
        let zeros = |shape: &[usize]| Tensor::zeros(DType::Bf16, shape).unwrap();
        let [q, k, v] = [problem.q_shape(), problem.k_shape(), problem.v_shape()].map(|shape| zeros(&shape));
        let inputs = Inputs::new(q.view(), k.view(), v.view());
        let forward = oracle::forward(&inputs.bind(&problem).unwrap()).to_forward(&problem).unwrap();
        let d_v = |target: Target, of_heads: [f64; 4]| {
            let values: Vec<f64> = of_heads.iter().flat_map(|x| [*x; 64]).collect();
            let d_o = Tensor::from_f64(DType::Bf16, &values, &problem.o_shape()).unwrap();
            let engine = spread(&problem, (Order::Any, target), 4, 3);
            let gradients = engine.backward(&problem, &inputs, &forward.saved(d_o.view()), &Run::default()).unwrap();
            gradients.d_v.view().to_f64()[0]
        };
        let large = f64::from(1 << 24);
        // (2^24 + 1) rounds to 2^24 in f32. In the opposite order both ones count.
        for target in [Target::HOPPER, Target::AMPERE] {
            assert_eq!(d_v(target, [large, 1.0, -large, 1.0]), 1.0);
            assert_eq!(d_v(target, [1.0, -large, 1.0, large]), 2.0);
            assert_eq!(d_v(target, [1.0, large, 1.0, -large]), 0.0);
        }
    }

    /// Gradients under a random block mask with `heads` lists for 4 query heads and 2 key/value heads, and a mask in partial
    /// blocks. Returns the exponentials of the main kernel in tiles of a step and 64 keys, and how many tiles the ranges of
    /// the mask have.
    fn tiles_under_a_block_mask([rows, cols]: [usize; 2], seed: u64, heads: usize, order: Order) -> [u64; 2] {
        let mut rng = Rng::new(seed);
        let spec = BlockSpec { rows, cols, batch: 1, heads };
        let len = 330;
        let blocks = spec.blocks(len, len);
        // A few blocks in a window that differs from row to row, some of them with holes, some rows empty.
        let lists = |rng: &mut Rng| -> Vec<i32> {
            let first = rng.range(0..blocks[1]) as i32;
            (first..blocks[1].min(first as usize + 3) as i32).filter(|_| rng.chance(0.7)).collect()
        };
        let all: Vec<Vec<i32>> = (0..heads * blocks[0]).map(|_| lists(&mut rng)).collect();
        let (partial, full): (Vec<Vec<i32>>, Vec<Vec<i32>>) =
            all.into_iter().map(|list| list.into_iter().partition(|_| rng.chance(0.5))).unzip();
        let mask = BlockMask::new(spec, blocks, partial, full).unwrap();
        let problem = Problem::builder().dense(1, len, len).heads(4, 2).head_dim(64).dtype(DType::Bf16);
        let problem = problem.mask(Mask::custom(((q() * 3 + k()) % 5).less(3))).block_mask(spec).build().unwrap();
        let mut drawn = |shape: Vec<usize>| {
            let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
            Tensor::from_f64(DType::Bf16, &values, &shape).unwrap()
        };
        let [q, k, v, d_o] =
            [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()].map(&mut drawn);
        let inputs = Inputs::new(q.view(), k.view(), v.view()).block_mask(&mask);
        let bound = inputs.bind(&problem).unwrap();
        let forward = oracle::forward(&bound).to_forward(&problem).unwrap();
        let saved = forward.saved(d_o.view());
        let sim = Arc::new(Sim::new(Options { seed, ..Options::default() }));
        let engine = OnDevice::new(sim.clone(), None, Tables::default()).in_order(order);
        let gradients = engine.backward(&problem, &inputs, &saved, &Run::default()).unwrap();
        for (name, verdict) in check_backward(&bound, &saved, &gradients, 0) {
            assert!(verdict.ok(), "seed {seed}, {heads} lists, {name}: {verdict}");
        }
        let config = BackwardPlan::new(&problem, false, order).unwrap().config();
        let [rows, keys] = [config.rows as usize, config.keys() as usize];
        let sees = |head: usize, q: usize, k: usize| {
            mask.coverage(0, head.min(heads - 1), q * spec.rows, k * spec.cols) != Coverage::Empty
        };
        let steps = (0..2 * len.div_ceil(keys)).map(|at| {
            let (kv_head, tile) = (at % 2, at / 2);
            let columns = (tile * keys..(tile + 1) * keys).map(|key| key / spec.cols);
            let columns: BTreeSet<usize> = columns.filter(|&column| column < blocks[1]).collect();
            let sees =
                |row: usize| (2 * kv_head..2 * kv_head + 2).any(|h| columns.iter().any(|&column| sees(h, row, column)));
            let seen = || (0..blocks[0]).filter(|&row| sees(row));
            match (seen().min(), seen().max()) {
                (Some(first), Some(last)) => {
                    let end = ((last + 1) * spec.rows).div_ceil(rows).min(len.div_ceil(rows));
                    end - first * spec.rows / rows
                }
                _ => 1,
            }
        });
        let tile = (rows * keys) as u64;
        let exps = sim.counts_of("attention_backward").exps;
        assert_eq!(exps % tile, 0, "whole tiles");
        [exps / tile, 2 * steps.sum::<usize>() as u64]
    }

    /// The main kernel computes the steps from the first to the last query block that sees a key tile, and no others; in a
    /// fixed order it computes all of them.
    #[test]
    fn gradients_skip_what_a_block_mask_hides() {
        // Blocks that are whole steps, and blocks that are not.
        for (block, seed) in [([48, 80], 1), ([64, 128], 2)] {
            let [computed, expected] = tiles_under_a_block_mask(block, seed, 1, Order::Any);
            assert_eq!(computed, expected, "{block:?}, lists that heads share");
            let [computed, expected] = tiles_under_a_block_mask(block, seed, 4, Order::Any);
            assert_eq!(computed, expected, "{block:?}, lists of each head");
        }
        let [computed, _] = tiles_under_a_block_mask([64, 64], 1, 1, Order::Any);
        let [all, _] = tiles_under_a_block_mask([64, 64], 1, 1, Order::Fixed);
        assert!(all > computed, "{all} and {computed}");
    }
}
