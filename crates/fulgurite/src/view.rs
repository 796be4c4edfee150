//! Types that can be read as a tensor.

use fulgurite_core::{Tensor, TensorError, TensorView, TensorViewMut};
use thiserror::Error;

/// The reason why a value cannot be read as a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ViewError {
    /// An axis with a negative stride.
    #[error(
        "array of shape {shape:?} has strides {strides:?}, allowed: none below 0; copy it with `as_standard_layout`"
    )]
    NegativeStride {
        /// The shape of the array.
        shape: Vec<usize>,
        /// Its strides in elements.
        strides: Vec<isize>,
    },
    /// An array with gaps, such as a part of a larger one.
    #[error(
        "array of shape {shape:?} with strides {strides:?} has gaps, allowed: axes in any order without gaps; copy it with `as_standard_layout`"
    )]
    Gaps {
        /// The shape of the array.
        shape: Vec<usize>,
        /// Its strides in elements.
        strides: Vec<isize>,
    },
    /// A shape that no tensor view can have.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

/// A type that can be read as a tensor: [`Tensor`], [`TensorView`], [`TensorViewMut`] and, with the feature `ndarray`,
/// arrays and views of that crate, with axes in any order and no gaps.
///
/// ```
/// use fulgurite::{AsView, Tensor};
/// let x = Tensor::new(vec![0.0f32; 6], &[2, 3])?;
/// assert_eq!(x.as_view()?.shape()[..], [2, 3]);
/// # Ok::<(), fulgurite::Error>(())
/// ```
#[cfg_attr(
    feature = "ndarray",
    doc = "
```
use ndarray::Array4;
let x = Array4::<f32>::ones((1, 4, 2, 8));
let result = fulgurite::attention(&x, &x, &x).causal().forward()?;
assert_eq!(result.o.shape()[..], [1, 4, 2, 8]);
# Ok::<(), fulgurite::Error>(())
```"
)]
pub trait AsView {
    /// A read-only view of the tensor.
    fn as_view(&self) -> Result<TensorView<'_>, ViewError>;
}

impl AsView for Tensor {
    fn as_view(&self) -> Result<TensorView<'_>, ViewError> {
        Ok(self.view())
    }
}

impl AsView for TensorView<'_> {
    fn as_view(&self) -> Result<TensorView<'_>, ViewError> {
        Ok(*self)
    }
}

impl AsView for TensorViewMut<'_> {
    fn as_view(&self) -> Result<TensorView<'_>, ViewError> {
        Ok(TensorViewMut::as_view(self))
    }
}

#[cfg(feature = "ndarray")]
impl<S, D> AsView for ndarray::ArrayBase<S, D>
where
    S: ndarray::Data,
    D: ndarray::Dimension,
    for<'x> fulgurite_core::Data<'x>: From<&'x [S::Elem]>,
{
    fn as_view(&self) -> Result<TensorView<'_>, ViewError> {
        let (shape, strides) = (self.shape().to_vec(), self.strides().to_vec());
        // An axis of at most one element may have any stride, because it is never stepped along.
        let steps = |axis: usize| if self.shape()[axis] > 1 { Ok(self.strides()[axis]) } else { Ok(1) };
        let positive: Result<Vec<usize>, isize> =
            (0..shape.len()).map(|axis| steps(axis).and_then(|s| usize::try_from(s).map_err(|_| s))).collect();
        let Ok(positive) = positive else { return Err(ViewError::NegativeStride { shape, strides }) };
        let Some(data) = self.as_slice_memory_order() else { return Err(ViewError::Gaps { shape, strides }) };
        Ok(TensorView::strided(data, &shape, &positive)?)
    }
}

#[cfg(all(test, feature = "ndarray"))]
mod tests {
    use super::*;
    use ndarray::{Array4, Axis, Slice};

    #[test]
    fn arrays_keep_their_strides() {
        let x = Array4::from_shape_fn((2, 3, 4, 5), |(a, b, c, d)| (a * 1000 + b * 100 + c * 10 + d) as f32);
        assert_eq!(x.as_view().unwrap().get(&[1, 2, 3, 4]), 1234.0);
        let turned = x.view().permuted_axes([0, 2, 1, 3]);
        let view = turned.as_view().unwrap();
        assert_eq!(view.shape()[..], [2, 4, 3, 5]);
        assert_eq!(view.get(&[1, 3, 2, 4]), 1234.0);
    }

    #[test]
    fn arrays_that_cannot_be_viewed_say_why() {
        let x = Array4::<f32>::zeros((1, 4, 1, 2));
        assert_eq!(
            x.slice_axis(Axis(1), Slice::from(..).step_by(-1)).as_view().unwrap_err().to_string(),
            "array of shape [1, 4, 1, 2] has strides [8, -2, 2, 1], allowed: none below 0; copy it with `as_standard_layout`"
        );
        assert_eq!(
            x.slice_axis(Axis(1), Slice::from(..).step_by(2)).as_view().unwrap_err().to_string(),
            "array of shape [1, 2, 1, 2] with strides [8, 4, 2, 1] has gaps, allowed: axes in any order without gaps; copy it with `as_standard_layout`"
        );
    }
}
