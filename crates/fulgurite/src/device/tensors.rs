//! Converts tensors that fit a problem to the form that the kernels take.

use super::memory::span_of;
use crate::Error;
use fulgurite_core::{DType, DeviceBound, GradientOutputs, InputError, Inputs, Saved, TensorView, TensorViewMut};
use fulgurite_kernels::attention::backward::plan::Tensors as BackwardTensors;
use fulgurite_kernels::attention::forward::plan::{DeviceAux, DeviceBlockLists, DeviceTensor, NoKernel, Tensors};
use fulgurite_kernels::operator::Refusal;
use fulgurite_ptx::device::Span;

/// The reason why tensors that fit their problem cannot be run.
pub(super) enum Misfit {
    /// The memory does not match the description.
    Input(Error),
    /// No kernel supports the tensors.
    Refused(Refusal),
}

impl<E: Into<Error>> From<E> for Misfit {
    fn from(e: E) -> Self {
        Misfit::Input(e.into())
    }
}

/// A tensor of rows with four axes: a packed batch is one sequence.
fn rows(arg: &str, view: &TensorView<'_>) -> Result<DeviceTensor, Error> {
    let (shape, strides) = match (&view.shape()[..], &view.strides()[..]) {
        (&[batch, rows, heads, dim], &[of_batch, of_row, of_head, _]) => {
            ([batch, rows, heads, dim], [of_batch, of_row, of_head])
        }
        (&[rows, heads, dim], &[of_row, of_head, _]) => ([1, rows, heads, dim], [0, of_row, of_head]),
        (shape, _) => unreachable!("bug in fulgurite: `{arg}` of shape {shape:?} fits a problem"),
    };
    let (shape, strides) = (shape.map(|n| n as u64), strides.map(|n| n as u64));
    // An axis of one element may have any stride; TMA requires a multiple of 16 bytes.
    let one = shape[3].next_multiple_of(8);
    let strides = std::array::from_fn(|axis| if shape[axis] == 1 { one } else { strides[axis] });
    Ok(DeviceTensor { span: span_of(arg, view)?, shape, strides })
}

fn rows_mut(arg: &str, view: &TensorViewMut<'_>) -> Result<DeviceTensor, Error> {
    rows(arg, &view.as_view())
}

fn optional(arg: &str, view: &Option<TensorView<'_>>) -> Result<Option<Span>, Error> {
    view.as_ref().map(|view| span_of(arg, view)).transpose()
}

/// Offsets of q and k, and used lengths of both.
type Lengths = (Option<[Span; 2]>, [Option<Span>; 2]);

fn lengths(inputs: &Inputs<'_>) -> Result<Lengths, Error> {
    let [q, k] = [optional("cu_seqlens_q", &inputs.cu_seqlens_q)?, optional("cu_seqlens_k", &inputs.cu_seqlens_k)?];
    let used = [optional("used_q", &inputs.used_q)?, optional("used_k", &inputs.used_k)?];
    Ok((q.zip(k).map(|(q, k)| [q, k]), used))
}

fn aux(bound: &DeviceBound<'_, '_>) -> Result<Vec<DeviceAux>, Misfit> {
    let one = |(view, spec): (&TensorView<'_>, &fulgurite_core::expr::AuxSpec)| {
        let strides: Vec<u64> = view.strides().iter().map(|&n| n as u64).collect();
        if let Some(stride) = strides.iter().find(|stride| **stride > u64::from(u32::MAX)) {
            let feature = format!("`{}` with a stride of {stride} (it has strides below 2^32)", spec.name);
            return Err(Misfit::Refused(NoKernel { feature }.into()));
        }
        Ok(DeviceAux { span: span_of(&spec.name, view)?, strides })
    };
    bound.aux().zip(bound.problem().aux()).map(one).collect()
}

fn lists(inputs: &Inputs<'_>) -> Result<Option<DeviceBlockLists>, Error> {
    let Some(lists) = &inputs.block_lists else { return Ok(None) };
    let spans = |views: &[TensorView<'_>; 2]| -> Result<[Span; 2], Error> {
        Ok([span_of("partial block lists", &views[0])?, span_of("full block lists", &views[1])?])
    };
    let widths = lists.blocks.map(|view| view.shape().last().map_or(0, |&width| width as u32));
    Ok(Some(DeviceBlockLists { counts: spans(&lists.counts)?, blocks: spans(&lists.blocks)?, widths }))
}

/// The tensors of forward attention. The session sets counters and workspace.
pub(super) fn forward(
    bound: &DeviceBound<'_, '_>,
    o: &TensorViewMut<'_>,
    lse: Span,
    sinks: Option<DType>,
) -> Result<Tensors, Misfit> {
    let inputs = bound.inputs();
    if let Some(view) = &inputs.sinks {
        sinks_are(view, sinks.unwrap_or(DType::F32))?;
    }
    let rows = [rows("q", &inputs.q)?, rows("k", &inputs.k)?, rows("v", &inputs.v)?, rows_mut("o", o)?];
    let (cu_seqlens, used) = lengths(inputs)?;
    Ok(Tensors {
        sinks: optional("sinks", &inputs.sinks)?,
        cu_seqlens,
        used,
        aux: aux(bound)?,
        lists: lists(inputs)?,
        ..Tensors::new(rows, lse, Span::new(0, 0))
    })
}

fn sinks_are(view: &TensorView<'_>, want: DType) -> Result<(), InputError> {
    match view.dtype() {
        got if got == want => Ok(()),
        got => Err(InputError::DType { arg: "sinks".into(), got, want: want.name() }),
    }
}

/// The tensors of the gradients of attention.
pub(super) fn backward(
    bound: &DeviceBound<'_, '_>,
    saved: &Saved<'_>,
    gradients: &GradientOutputs<'_>,
) -> Result<BackwardTensors, Misfit> {
    let inputs = bound.inputs();
    if let Some(view) = &inputs.sinks {
        sinks_are(view, DType::F32)?;
    }
    let of_forward = [rows("q", &inputs.q)?, rows("k", &inputs.k)?, rows("v", &inputs.v)?, rows("o", &saved.o)?];
    let results =
        [rows_mut("d_q", &gradients.d_q)?, rows_mut("d_k", &gradients.d_k)?, rows_mut("d_v", &gradients.d_v)?];
    let written = |arg: &str, view: &Option<TensorViewMut<'_>>| {
        view.as_ref().map(|view| span_of(arg, &view.as_view())).transpose()
    };
    let (cu_seqlens, used) = lengths(inputs)?;
    let sinks = optional("sinks", &inputs.sinks)?.zip(written("d_sinks", &gradients.d_sinks)?);
    Ok(BackwardTensors {
        d_lse: optional("d_lse", &saved.d_lse)?,
        sinks: sinks.map(|(sinks, d_sinks)| [sinks, d_sinks]),
        cu_seqlens,
        used,
        aux: aux(bound)?,
        d_aux: gradients.d_aux.iter().map(|view| written("d_aux", view)).collect::<Result<_, _>>()?,
        lists: lists(inputs)?,
        ..BackwardTensors::new(of_forward, span_of("lse", &saved.lse)?, rows("d_o", &saved.d_o)?, results)
    })
}
