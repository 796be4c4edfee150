//! Attention on a device, from tensors in the host's memory: they are copied there and back.
//!
//! The engines that the names `cuda` and `sim` ask for are this one. It is how every device is checked against the oracle; who has
//! tensors on the device already does not want the copies, and [`Choice::Best`](crate::Choice::Best) never takes it.

use crate::engine::{Engine, Run, Unsupported};
use crate::{Counters, Error};
use fulgurite_core::{
    Data, DataMut, GradientOutputs, Inputs, Outputs, Problem, Rescale, Saved, TensorView, TensorViewMut,
};
use fulgurite_kernels::attention::backward::Order;
use fulgurite_kernels::attention::backward::plan::{Backward, Kernels, Tensors};
use fulgurite_kernels::attention::plan::{Forward, Missing, Placed};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Module, Span, Stream};
use std::sync::{Arc, Mutex, PoisonError};

/// A device as an engine.
pub(crate) struct OnDevice {
    name: &'static str,
    device: Box<dyn Device>,
    rescale: Option<Rescale>,
    /// Kernels that were compiled, each with a call that it was compiled for.
    loaded: Mutex<Vec<(Forward, Module)>>,
    /// The same for backward, its kernels in the order in which they run.
    loaded_backward: Mutex<Vec<(Backward, Kernels, [Module; 3])>>,
}

impl OnDevice {
    pub fn new(name: &'static str, device: Box<dyn Device>, rescale: Option<Rescale>) -> Self {
        OnDevice { name, device, rescale, loaded: Mutex::default(), loaded_backward: Mutex::default() }
    }

    /// The plan, or why there is none on this device.
    fn planned<P>(&self, plan: Result<P, Missing>) -> Result<P, Unsupported> {
        let refuse = |feature: String| Unsupported {
            engine: self.name.into(),
            feature,
            instead: "the engine `cpu` has it".into(),
        };
        let plan = plan.map_err(|missing| refuse(missing.feature))?;
        match self.device.target().sm {
            90 => Ok(plan),
            other => Err(refuse(format!("kernels for sm_{other} (it has them for sm_90)"))),
        }
    }

    fn plan(&self, problem: &Problem) -> Result<Forward, Unsupported> {
        self.planned(Forward::new(problem, self.rescale))
    }

    fn module(&self, plan: &Forward) -> Result<Module, Error> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, module)) = loaded.iter().find(|(known, _)| known.same_kernel(plan)) {
            return Ok(module.clone());
        }
        let kernel = plan.kernel(self.device.target()).unwrap_or_else(|e| panic!("bug in fulgurite: {e}\n{plan:?}"));
        let module = self.device.load(Arc::new(kernel))?;
        loaded.push((plan.clone(), module.clone()));
        Ok(module)
    }

    fn backward_modules(&self, plan: &Backward) -> Result<(Kernels, [Module; 3]), Error> {
        let mut loaded = self.loaded_backward.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, kernels, modules)) = loaded.iter().find(|(known, ..)| known.same_kernels(plan)) {
            return Ok((kernels.clone(), modules.clone()));
        }
        let kernels = plan.kernels(self.device.target()).unwrap_or_else(|e| panic!("bug in fulgurite: {e}\n{plan:?}"));
        let load = |kernel: &Arc<_>| self.device.load(Arc::clone(kernel));
        let modules = [load(&kernels.prepare)?, load(&kernels.main)?, load(&kernels.finish)?];
        loaded.push((plan.clone(), kernels.clone(), modules.clone()));
        Ok((kernels, modules))
    }

    fn upload(&self, view: &TensorView<'_>) -> Result<(Buffer, Placed), Error> {
        let shape = [0, 1, 2, 3].map(|axis| view.shape()[axis] as u64);
        let bytes = packed_bytes(view);
        let buffer = self.room(bytes.len())?;
        self.device.upload(buffer.span(), &bytes)?;
        let placed = Placed::packed(buffer.span(), shape);
        Ok((buffer, placed))
    }

    /// Copies a packed tensor of 16 bits to where it belongs.
    fn download(&self, from: &Buffer, to: &mut TensorViewMut<'_>) -> Result<(), Error> {
        let (shape, strides) = (*to.shape(), *to.strides());
        let mut words = vec![0; 2 * shape.count()];
        self.device.download(Span { bytes: words.len() as u64, ..from.span() }, &mut words)?;
        let mut halves = words.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let data = to.data_mut();
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

    /// Numbers of f32, in order.
    fn upload_numbers(&self, view: &TensorView<'_>) -> Result<Buffer, Error> {
        let bytes: Vec<u8> = view.to_f64().iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        let buffer = self.room(bytes.len())?;
        self.device.upload(Span { bytes: bytes.len() as u64, ..buffer.span() }, &bytes)?;
        Ok(buffer)
    }

    /// Memory for at least a few bytes: an empty tensor has an address too.
    fn room(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        self.device.allocate(bytes.max(64) as u64)
    }
}

/// The elements of a 16-bit tensor, in order.
fn packed_bytes(view: &TensorView<'_>) -> Vec<u8> {
    let bits = |offset: usize| match view.data() {
        Data::F16(all) => all[offset].to_bits(),
        Data::Bf16(all) => all[offset].to_bits(),
        _ => unreachable!("bug in fulgurite: a type that the plan refused"),
    };
    let mut bytes = Vec::with_capacity(2 * view.shape().count());
    each_offset(view.shape(), view.strides(), |offset| bytes.extend_from_slice(&bits(offset).to_le_bytes()));
    bytes
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
        format!("{}, {}, tensors copied there and back{rescale}", self.name, self.device.name())
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
        let plan = self.plan(problem)?;
        let bound = inputs.bind(problem)?;
        outputs.check(problem)?;
        let module = self.module(&plan)?;
        let (_q, q) = self.upload(bound.q())?;
        let (_k, k) = self.upload(bound.k())?;
        let (_v, v) = self.upload(bound.v())?;
        let (o_shape, lse_count) = (*outputs.o.shape(), outputs.lse.shape().count());
        let o_buffer = self.room(2 * o_shape.count())?;
        let o = Placed::packed(o_buffer.span(), [0, 1, 2, 3].map(|axis| o_shape[axis] as u64));
        let lse = self.room(4 * lse_count)?;
        let counters = self.room(8)?;
        self.device.upload(Span { bytes: 8, ..counters.span() }, &[0; 8])?;
        let processors = self.device.multiprocessors();
        let launch = plan.launch(module.shared_kernel(), [q, k, v, o], lse.span(), counters.span(), processors);
        let Some(launch) = launch else { return Ok(()) };
        self.device.launch(&module, launch.grid, &launch.args, Stream::default())?;
        self.device.synchronize(Stream::default())?;

        self.download(&o_buffer, &mut outputs.o)?;
        let mut words = vec![0; 4 * lse_count];
        self.device.download(Span { bytes: words.len() as u64, ..lse.span() }, &mut words)?;
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
            let second = Span { address: counters.span().address + 4, bytes: 4 };
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
        _: &Run<'_>,
    ) -> Result<(), Error> {
        let plan = self.planned(Backward::new(problem, saved.d_lse.is_some(), Order::Any))?;
        let bound = inputs.bind(problem)?;
        saved.check(problem)?;
        gradients.check(problem)?;
        let (kernels, modules) = self.backward_modules(&plan)?;
        let (_q, q) = self.upload(bound.q())?;
        let (_k, k) = self.upload(bound.k())?;
        let (_v, v) = self.upload(bound.v())?;
        let (_o, o) = self.upload(&saved.o)?;
        let (_d_o, d_o) = self.upload(&saved.d_o)?;
        let lse = self.upload_numbers(&saved.lse)?;
        let d_lse = saved.d_lse.as_ref().map(|view| self.upload_numbers(view)).transpose()?;
        let results = [q, k, v].map(|like| self.room(2 * like.shape.iter().product::<u64>() as usize));
        let [d_q_buffer, d_k_buffer, d_v_buffer] = results;
        let (d_q_buffer, d_k_buffer, d_v_buffer) = (d_q_buffer?, d_k_buffer?, d_v_buffer?);
        let scratch = self.room(plan.scratch_bytes() as usize)?;
        let result = |buffer: &Buffer, like: Placed| Placed::packed(buffer.span(), like.shape);
        let tensors = Tensors {
            q,
            k,
            v,
            o,
            lse: lse.span(),
            d_o,
            d_lse: d_lse.as_ref().map(Buffer::span),
            d_q: result(&d_q_buffer, q),
            d_k: result(&d_k_buffer, k),
            d_v: result(&d_v_buffer, v),
        };
        let launches = plan.plan(&kernels, &tensors, scratch.span(), self.device.multiprocessors());
        launches.run(self.device.as_ref(), Stream::default(), &mut |kernel| {
            let known = modules.iter().find(|module| Arc::ptr_eq(&module.shared_kernel(), kernel));
            Ok(known.expect("bug in fulgurite: a launch of another kernel").clone())
        })?;
        self.device.synchronize(Stream::default())?;
        self.download(&d_q_buffer, &mut gradients.d_q)?;
        self.download(&d_k_buffer, &mut gradients.d_k)?;
        self.download(&d_v_buffer, &mut gradients.d_v)
    }
}
