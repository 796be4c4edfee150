//! Checks of single tensors: device, shape, type and strides.

use crate::dtype::DType;
use crate::error::InputError;
use crate::problem::Problem;
use crate::tensor::{Place, TensorView, ask_memory};

pub(crate) fn shape_is(arg: &str, got: &[usize], want: &[usize]) -> Result<(), InputError> {
    if got == want {
        return Ok(());
    }
    Err(InputError::Shape { arg: arg.into(), got: got.to_vec(), want: want.to_vec() })
}

pub(crate) fn dtype_is(arg: &str, got: DType, want: DType) -> Result<(), InputError> {
    if got == want { Ok(()) } else { Err(InputError::DType { arg: arg.into(), got, want: want.name() }) }
}

/// Checks device, shape, type and last stride of a tensor of rows (q, k, v, o and their gradients).
pub(crate) fn rows_fit(
    arg: &'static str,
    view: &TensorView<'_>,
    want: &[usize],
    problem: &Problem,
    place: Place,
) -> Result<(), InputError> {
    rows_are(arg, view, want, problem.dtype(), place)
}

/// Checks device, shape, type and last stride of a tensor of rows of any type.
pub(crate) fn rows_are(
    arg: &'static str,
    view: &TensorView<'_>,
    want: &[usize],
    dtype: DType,
    place: Place,
) -> Result<(), InputError> {
    check_on(arg, view, want, dtype, place)?;
    last_stride(arg, view.shape(), view.strides())
}

/// Checks device, shape and type of a tensor; any strides are allowed.
pub(crate) fn check_on(
    arg: &str,
    view: &TensorView<'_>,
    want: &[usize],
    dtype: DType,
    place: Place,
) -> Result<(), InputError> {
    place_is(arg, view, place)?;
    shape_is(arg, view.shape(), want)?;
    dtype_is(arg, view.dtype(), dtype)
}

/// Checks shape and type of a tensor in host memory; any strides are allowed.
pub fn check_like(arg: &'static str, view: &TensorView<'_>, want: &[usize], dtype: DType) -> Result<(), InputError> {
    check_on(arg, view, want, dtype, Place::Host)
}

pub(crate) fn place_is(arg: &str, view: &TensorView<'_>, want: Place) -> Result<(), InputError> {
    let got = view.place();
    if got == want { Ok(()) } else { Err(InputError::Place { arg: arg.into(), got, want }) }
}

/// Checks that a small tensor on a device is contiguous: kernels index it without strides.
pub(crate) fn device_contiguous(arg: &str, view: &TensorView<'_>) -> Result<(), InputError> {
    let (mut step, shape) = (1, view.shape());
    let fits = shape.iter().zip(view.strides().iter()).rev().all(|(&size, &stride)| {
        let fits = size <= 1 || stride == step;
        step *= size;
        fits
    });
    if fits || view.place() == Place::Host || shape.contains(&0) {
        return Ok(());
    }
    Err(InputError::Strides { arg: arg.into(), got: view.strides().to_vec() })
}

/// Checks device, type and length of a list of integers.
pub(crate) fn integers_fit(
    arg: &'static str,
    view: &TensorView<'_>,
    want: usize,
    place: Place,
) -> Result<(), InputError> {
    check_on(arg, view, &[want], DType::I32, place)?;
    device_contiguous(arg, view)
}

/// Checks that the elements of a row are contiguous.
pub(crate) fn last_stride(arg: &'static str, shape: &[usize], strides: &[usize]) -> Result<(), InputError> {
    let (last, size) = (strides[strides.len() - 1], shape[shape.len() - 1]);
    if last != 1 && size > 1 { Err(InputError::LastStride { arg, got: last }) } else { Ok(()) }
}

/// The integers of a rank-one i32 tensor.
pub(crate) fn integers(arg: &'static str, view: &TensorView<'_>, want: usize) -> Result<Vec<i32>, InputError> {
    dtype_is(arg, view.dtype(), DType::I32)?;
    shape_is(arg, view.shape(), &[want])?;
    ask_memory(format_args!("a copy of `{arg}`"), want.saturating_mul(size_of::<f64>()))?;
    Ok(view.to_f64().into_iter().map(|x| x as i32).collect())
}

pub(crate) fn asked<T>(
    arg: &'static str,
    wanted: bool,
    given: Option<T>,
    hint: [&'static str; 2],
) -> Result<Option<T>, InputError> {
    match (wanted, given) {
        (true, None) => Err(InputError::Missing { arg: arg.into(), hint: hint[0] }),
        (false, Some(_)) => Err(InputError::Unused { arg: arg.into(), hint: hint[1] }),
        (_, given) => Ok(given),
    }
}
