//! A tensor as Python describes it, turned into a view.

use crate::call::refuse;
use crate::memory::Span;
use fulgurite_core::{DType, TensorView, TensorViewMut};
use pyo3::prelude::*;

/// `(pointer, dtype, shape, strides)`: strides in elements, dtype one of `f32`, `f16`, `bf16`, `i32`.
#[derive(Debug, FromPyObject)]
pub struct Raw(usize, String, Vec<usize>, Vec<isize>);

/// The memory that one call refers to, so that nothing is written that is also read or written elsewhere.
#[derive(Debug, Default)]
pub struct Claims(Vec<(&'static str, Span)>);

impl Raw {
    /// The size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.2
    }

    /// The element type.
    pub fn dtype(&self, arg: &str) -> PyResult<DType> {
        let all = [DType::F32, DType::F16, DType::Bf16, DType::I32];
        let found = all.into_iter().find(|dtype| dtype.name() == self.1);
        found.ok_or_else(|| refuse(format!("`{arg}` is {}, allowed: f32, f16, bf16, i32; convert it", self.1)))
    }

    /// Strides without signs, and the memory from the first to the last element.
    fn span(&self, arg: &str) -> PyResult<(Vec<usize>, Span)> {
        let Raw(address, _, shape, strides) = self;
        let dtype = self.dtype(arg)?;
        if shape.len() != strides.len() {
            return Err(refuse(format!(
                "`{arg}` has {} axes and {} strides; give one each",
                shape.len(),
                strides.len()
            )));
        }
        if shape.contains(&0) {
            // Without elements nothing is ever stepped over, and libraries put anything there.
            return Ok((vec![1; shape.len()], Span::new(0, dtype, 0).map_err(refuse)?));
        }
        let mut positive = Vec::with_capacity(strides.len());
        for (axis, (&stride, &size)) in strides.iter().zip(shape).enumerate() {
            // The same holds for an axis of one element.
            let stride = if size == 1 { 0 } else { stride };
            positive.push(usize::try_from(stride).map_err(|_| {
                refuse(format!("`{arg}` has stride {stride} on axis {axis}, allowed: 0 or more; copy it"))
            })?);
        }
        let steps = shape.iter().zip(&positive);
        let last = steps.into_iter().try_fold(0usize, |sum, (&n, &s)| sum.checked_add((n - 1).checked_mul(s)?));
        let len = last.and_then(|last| last.checked_add(1)).ok_or_else(|| {
            refuse(format!("`{arg}` of shape {shape:?} with strides {strides:?} overflows the address space"))
        })?;
        let span = Span::new(*address, dtype, len).map_err(|e| refuse(format!("`{arg}` {e}")))?;
        Ok((positive, span))
    }

    /// The tensor, for reading until `self` is dropped, which is when the call ends.
    pub fn view(&self, arg: &'static str, claims: &mut Claims) -> PyResult<TensorView<'_>> {
        let (strides, span) = self.span(arg)?;
        claims.0.push((arg, span));
        // SAFETY: the extension's contract; no slice for writing overlaps this one, since `view_mut` looks for
        // every span that was claimed, and nothing is claimed for reading after something is for writing.
        let data = unsafe { span.read() };
        TensorView::strided(data, &self.2, &strides).map_err(|e| refuse(format!("`{arg}`: {e}")))
    }

    /// The tensor, for writing until `self` is dropped, which is when the call ends.
    pub fn view_mut(&self, arg: &'static str, claims: &mut Claims) -> PyResult<TensorViewMut<'_>> {
        let (strides, span) = self.span(arg)?;
        if let Some((other, _)) = claims.0.iter().find(|(_, claimed)| claimed.overlaps(&span)) {
            return Err(refuse(format!("`{arg}` shares memory with `{other}`; write into a tensor of its own")));
        }
        claims.0.push((arg, span));
        // SAFETY: the extension's contract, and no other slice of this call touches the memory.
        let data = unsafe { span.write() };
        TensorViewMut::strided(data, &self.2, &strides).map_err(|e| refuse(format!("`{arg}`: {e}")))
    }
}
