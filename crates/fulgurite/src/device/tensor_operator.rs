//! Operators over whole tensors on a session: tensors of its device, or host tensors that are copied there and back.

use super::call::CheckedCall;
use super::memory::span_of;
use super::session::Session;
use super::transfer::Copied;
use crate::Error;
use fulgurite_core::{InputError, Place, Tensor, TensorView, TensorViewMut};
use fulgurite_kernels::tensor_operator::{Call, DeviceOperand, TensorOperator, TensorProblem, WholeTensors};
use fulgurite_kernels::tensor_type::{TensorRefusal, TensorType};
use fulgurite_ptx::device::{Device, Stream};

impl<D: Device + ?Sized> Session<D> {
    /// An operator over whole tensors on a stream, without waiting. All tensors are contiguous and lie on the device.
    pub fn apply(
        &self,
        operator: &'static TensorOperator,
        inputs: &[TensorView<'_>],
        output: &mut TensorViewMut<'_>,
        stream: Stream<'_>,
    ) -> Result<(), Error> {
        let problem = TensorProblem { operator, inputs: inputs.iter().map(TensorType::of).collect() };
        let prepared = self.prepare::<WholeTensors>(&problem, &())?;
        let want = operator.output(&problem.inputs)?;
        let output = output.as_view();
        let got = TensorType::of(&output);
        if got != want {
            let (allowed, hint) = (want.to_string(), "allocate it from the types of the inputs");
            return Err(TensorRefusal::Type { arg: "output", got, allowed, hint }.into());
        }
        let inputs = operator.inputs.iter().zip(inputs).map(|(arg, view)| self.operand(arg, view));
        let call = Call { inputs: inputs.collect::<Result<_, _>>()?, output: self.operand("output", &output)? };
        self.run_call(&CheckedCall::trusted(prepared, call), stream)
    }

    /// [`apply`](Self::apply) on host tensors: copies them to the device, waits, and copies the result back.
    pub fn apply_to_host(&self, operator: &'static TensorOperator, inputs: &[TensorView<'_>]) -> Result<Tensor, Error> {
        let device = &**self.device();
        let types: Vec<TensorType> = inputs.iter().map(TensorType::of).collect();
        let want = operator.output(&types)?;
        for (arg, view) in operator.inputs.iter().zip(inputs) {
            if view.place() != Place::Host {
                let (got, want) = (view.place(), Place::Host);
                return Err(InputError::Place { arg: (*arg).into(), got, want }.into());
            }
        }
        let copies = inputs.iter().map(|view| Copied::of(device, view)).collect::<Result<Vec<_>, _>>()?;
        let mut result = Tensor::zeros(want.dtype, &want.shape)?;
        let room = Copied::room(device, want.dtype, &want.shape)?;
        let views = copies.iter().map(Copied::view).collect::<Result<Vec<_>, _>>()?;
        self.apply(operator, &views, &mut room.view_mut()?, Stream::default())?;
        device.synchronize(Stream::default())?;
        room.download(device, &mut result.view_mut())?;
        Ok(result)
    }

    /// The memory of a contiguous tensor on this device.
    fn operand(&self, arg: &str, view: &TensorView<'_>) -> Result<DeviceOperand, Error> {
        let (got, want) = (view.place(), Place::Device(self.id()));
        if got != want {
            return Err(InputError::Place { arg: arg.into(), got, want }.into());
        }
        if !super::transfer::is_packed(view.shape(), view.strides()) {
            let got = view.strides().to_vec();
            return Err(InputError::Strides { arg: arg.into(), got }.into());
        }
        Ok(DeviceOperand { span: span_of(arg, view)?, shape: view.shape().to_vec() })
    }
}
