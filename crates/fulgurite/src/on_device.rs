//! Attention on a device, from tensors in the host's memory: they are copied there and back.
//!
//! The engines that the names `cuda` and `sim` ask for are this one. It is how every device is checked against the oracle; who has
//! tensors on the device already does not want the copies, and [`Choice::Best`](crate::Choice::Best) never takes it.

use crate::engine::{Engine, Run, Unsupported};
use crate::{Counters, Error};
use fulgurite_core::{Data, DataMut, GradientOutputs, Inputs, Outputs, Problem, Rescale, Saved, TensorView};
use fulgurite_kernels::attention::plan::{Forward, Placed};
use fulgurite_ptx::device::{Buffer, Device, DeviceError, Module, Span, Stream};
use std::sync::{Arc, Mutex, PoisonError};

/// A device as an engine.
pub(crate) struct OnDevice {
    name: &'static str,
    device: Box<dyn Device>,
    rescale: Option<Rescale>,
    /// Kernels that were compiled, each with a call that it was compiled for.
    loaded: Mutex<Vec<(Forward, Module)>>,
}

impl OnDevice {
    pub fn new(name: &'static str, device: Box<dyn Device>, rescale: Option<Rescale>) -> Self {
        OnDevice { name, device, rescale, loaded: Mutex::default() }
    }

    fn plan(&self, problem: &Problem) -> Result<Forward, Unsupported> {
        let refuse = |feature: String| Unsupported {
            engine: self.name.into(),
            feature,
            instead: "the engine `cpu` has it".into(),
        };
        let plan = Forward::new(problem, self.rescale).map_err(|missing| refuse(missing.feature))?;
        match self.device.target().sm {
            90 => Ok(plan),
            other => Err(refuse(format!("kernels for sm_{other} (it has them for sm_90)"))),
        }
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

    fn upload(&self, view: &TensorView<'_>) -> Result<(Buffer, Placed), Error> {
        let shape = [0, 1, 2, 3].map(|axis| view.shape()[axis] as u64);
        let bytes = packed_bytes(view);
        let buffer = self.room(bytes.len())?;
        self.device.upload(buffer.span(), &bytes)?;
        let placed = Placed::packed(buffer.span(), shape);
        Ok((buffer, placed))
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
        let wanted = plan.workspace();
        let workspace = self.room(wanted.bytes as usize)?;
        let zeroed = Span { bytes: wanted.zeroed_bytes, ..workspace.span() };
        self.device.upload(zeroed, &vec![0; wanted.zeroed_bytes as usize])?;
        let processors = self.device.multiprocessors();
        let launch = plan.launch(module.shared_kernel(), [q, k, v, o], lse.span(), workspace.span(), processors);
        let Some(launch) = launch else { return Ok(()) };
        self.device.launch(&module, launch.grid, &launch.args, Stream::default())?;
        self.device.synchronize(Stream::default())?;

        let mut words = vec![0; 2 * o_shape.count()];
        self.device.download(Span { bytes: words.len() as u64, ..o_buffer.span() }, &mut words)?;
        let mut halves = words.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let strides = *outputs.o.strides();
        let data = outputs.o.data_mut();
        each_offset(&o_shape, &strides, |offset| {
            let bits = halves.next().expect("bug in fulgurite: as many elements as offsets");
            match data {
                DataMut::F16(all) => all[offset] = half::f16::from_bits(bits),
                DataMut::Bf16(all) => all[offset] = half::bf16::from_bits(bits),
                _ => unreachable!("bug in fulgurite: a type that the plan refused"),
            }
        });
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
            let second = Span { address: workspace.span().address + 4, bytes: 4 };
            self.device.download(second, &mut word)?;
            tally.add(Counters { blocks_redone: u64::from(u32::from_le_bytes(word)), ..Counters::default() });
        }
        Ok(())
    }

    fn backward_into(
        &self,
        _: &Problem,
        _: &Inputs<'_>,
        _: &Saved<'_>,
        _: &mut GradientOutputs<'_>,
        _: &Run<'_>,
    ) -> Result<(), Error> {
        Err(Unsupported {
            engine: self.name.into(),
            feature: "backward".into(),
            instead: "the engine `cpu` has it".into(),
        }
        .into())
    }
}
