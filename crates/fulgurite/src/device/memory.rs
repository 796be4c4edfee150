//! Device memory as core's tensors see it.

use crate::Error;
use fulgurite_core::{DeviceId, DeviceMemory, InputError, Place, TensorView};
use fulgurite_ptx::device::{Buffer, Device, Span};
use std::any::Any;

/// Memory of a device, for a [`TensorView::on_device`].
///
/// ```
/// use fulgurite::gpu::DeviceSpan;
/// use fulgurite::sim::{Device, Sim};
/// use fulgurite::{DType, TensorView};
///
/// let sim = Sim::default();
/// let buffer = sim.allocate(64)?;
/// let memory = DeviceSpan::of(&sim, &buffer);
/// assert!(TensorView::on_device(&memory, DType::Bf16, &[4, 8], None).is_ok());
/// assert!(TensorView::on_device(&memory, DType::F32, &[4, 8], None).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceSpan {
    span: Span,
    device: DeviceId,
}

impl DeviceSpan {
    /// Memory that this device has allocated, or vouches for.
    pub fn new(device: &(impl Device + ?Sized), span: Span) -> DeviceSpan {
        let (kind, number) = device.place();
        DeviceSpan { span, device: DeviceId { kind, number } }
    }

    /// A whole buffer of this device.
    pub fn of(device: &(impl Device + ?Sized), buffer: &Buffer) -> DeviceSpan {
        DeviceSpan::new(device, buffer.span())
    }

    /// The memory as a launch argument.
    pub fn span(&self) -> Span {
        self.span
    }
}

impl DeviceMemory for DeviceSpan {
    fn device(&self) -> DeviceId {
        self.device
    }
    fn address(&self) -> u64 {
        self.span.address()
    }
    fn bytes(&self) -> u64 {
        self.span.bytes()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The memory of a device tensor as a launch argument.
pub(super) fn span_of(arg: &str, view: &TensorView<'_>) -> Result<Span, Error> {
    let own = view.device_memory().and_then(|memory| memory.as_any().downcast_ref::<DeviceSpan>());
    match own {
        Some(memory) => Ok(memory.span),
        None => {
            let want = Place::Device(DeviceId { kind: "a device of fulgurite", number: 0 });
            Err(InputError::Place { arg: arg.into(), got: view.place(), want }.into())
        }
    }
}
