//! Tensors: owned, borrowed and borrowed for writing.
//!
//! A view is memory, an element type, a shape and strides in elements. The memory is a host slice, or device memory of
//! which this crate knows only the size ([`DeviceMemory`]). A view guarantees that every index inside the shape is
//! inside the memory; a [`TensorViewMut`] also guarantees that no two indices share an element.

mod footprint;
mod layout;

use crate::dtype::{DType, Element};
use crate::stop;
use half::{bf16, f16};
use layout::{for_each_offset, layout, no_overlap};
use std::any::Any;
use std::fmt;

pub use footprint::Footprint;
pub use layout::{Dims, MAX_RANK, TensorError, ask_memory};

macro_rules! per_dtype {
    ($value:expr, $slice:ident => $body:expr, $kind:ident) => {
        match $value {
            $kind::F32($slice) => $body,
            $kind::F16($slice) => $body,
            $kind::Bf16($slice) => $body,
            $kind::I32($slice) => $body,
        }
    };
}

/// A borrowed slice of one of the element types.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
#[allow(missing_docs)] // each variant is named after its element type
pub enum Data<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
    I32(&'a [i32]),
}

/// A mutably borrowed slice of one of the element types.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs)] // each variant is named after its element type
pub enum DataMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    Bf16(&'a mut [bf16]),
    I32(&'a mut [i32]),
}

#[derive(Debug, Clone, PartialEq)]
enum Owned {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    I32(Vec<i32>),
}

macro_rules! conversions {
    ($($t:ty, $variant:ident;)*) => {$(
        impl<'a> From<&'a [$t]> for Data<'a> {
            fn from(slice: &'a [$t]) -> Self {
                Data::$variant(slice)
            }
        }
        impl<'a> From<&'a Vec<$t>> for Data<'a> {
            fn from(vec: &'a Vec<$t>) -> Self {
                Data::$variant(vec)
            }
        }
        impl<'a> From<&'a mut [$t]> for DataMut<'a> {
            fn from(slice: &'a mut [$t]) -> Self {
                DataMut::$variant(slice)
            }
        }
        impl<'a> From<&'a mut Vec<$t>> for DataMut<'a> {
            fn from(vec: &'a mut Vec<$t>) -> Self {
                DataMut::$variant(vec)
            }
        }
        impl From<Vec<$t>> for Owned {
            fn from(vec: Vec<$t>) -> Self {
                Owned::$variant(vec)
            }
        }
        impl Storable for $t {
            fn slice<'a>(data: &Data<'a>) -> Option<&'a [Self]> {
                match data {
                    Data::$variant(slice) => Some(slice),
                    _ => None,
                }
            }
            fn own(vec: Vec<Self>) -> Tensor {
                let dims = Dims::new(&[vec.len()]).expect("rank 1");
                Tensor { data: Owned::$variant(vec), shape: dims }
            }
        }
    )*};
}

/// An [`Element`] that the tensor types can hand out as a slice.
pub trait Storable: Element {
    /// The slice inside `data` if it holds this type.
    fn slice<'a>(data: &Data<'a>) -> Option<&'a [Self]>;
    /// A tensor of rank one around `vec`.
    fn own(vec: Vec<Self>) -> Tensor;
}

conversions! {
    f32, F32;
    f16, F16;
    bf16, Bf16;
    i32, I32;
}

impl Data<'_> {
    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Data::F32(_) => DType::F32,
            Data::F16(_) => DType::F16,
            Data::Bf16(_) => DType::Bf16,
            Data::I32(_) => DType::I32,
        }
    }

    /// Number of elements in the slice.
    #[allow(clippy::len_without_is_empty)] // emptiness is a property of the shape, not of the buffer
    pub fn len(&self) -> usize {
        per_dtype!(self, s => s.len(), Data)
    }
}

impl DataMut<'_> {
    /// A read-only view of the memory.
    pub fn as_data(&self) -> Data<'_> {
        match self {
            DataMut::F32(s) => Data::F32(s),
            DataMut::F16(s) => Data::F16(s),
            DataMut::Bf16(s) => Data::Bf16(s),
            DataMut::I32(s) => Data::I32(s),
        }
    }
}

/// A device, by its kind and its index among devices of that kind: `cuda:0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceId {
    /// Kind, such as `cuda` or `sim`.
    pub kind: &'static str,
    /// Index, from 0.
    pub number: u32,
}

/// The device of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Memory of this process.
    Host,
    /// Memory of a device.
    Device(DeviceId),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("cpu"),
            Place::Device(DeviceId { kind, number }) => write!(f, "{kind}:{number}"),
        }
    }
}

/// Memory of a device. Only the code that runs the device knows its type and uses its address: it downcasts
/// [`as_any`](Self::as_any) to its own type, and rejects any other.
pub trait DeviceMemory: fmt::Debug + Sync {
    /// The device of the memory.
    fn device(&self) -> DeviceId;
    /// Address of the first byte.
    fn address(&self) -> u64;
    /// Length in bytes.
    fn bytes(&self) -> u64;
    /// The memory as a type for downcasting.
    fn as_any(&self) -> &dyn Any;
}

/// Checks shape and strides against memory of a device.
fn device_layout(
    memory: &dyn DeviceMemory,
    dtype: DType,
    shape: &[usize],
    strides: Option<&[usize]>,
) -> Result<(Dims, Dims), TensorError> {
    let (align, address) = (dtype.size_bytes() as u64, memory.address());
    let layout = layout((memory.bytes() / align) as usize, shape, strides)?;
    if !address.is_multiple_of(align) && !layout.0.contains(&0) {
        return Err(TensorError::Alignment { address, align });
    }
    Ok(layout)
}

/// A tensor borrowed for reading. Strides may repeat elements (broadcast axes have stride 0).
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// The elements; empty if the tensor is on a device.
    data: Data<'a>,
    device: Option<&'a dyn DeviceMemory>,
    shape: Dims,
    strides: Dims,
}

impl<'a> TensorView<'a> {
    /// A row-major view of `data`.
    ///
    /// ```
    /// # use fulgurite_core::TensorView;
    /// let x = vec![0.0f32; 6];
    /// assert!(TensorView::new(&x, &[2, 3]).is_ok());
    /// assert!(TensorView::new(&x, &[2, 4]).is_err());
    /// ```
    pub fn new(data: impl Into<Data<'a>>, shape: &[usize]) -> Result<Self, TensorError> {
        let data = data.into();
        let (shape, strides) = layout(data.len(), shape, None)?;
        Ok(TensorView { data, device: None, shape, strides })
    }

    /// A view with strides in elements; `data` starts at index (0, .., 0).
    pub fn strided(data: impl Into<Data<'a>>, shape: &[usize], strides: &[usize]) -> Result<Self, TensorError> {
        let data = data.into();
        let (shape, strides) = layout(data.len(), shape, Some(strides))?;
        Ok(TensorView { data, device: None, shape, strides })
    }

    /// A view of device memory, with strides in elements; without them it is row-major. Its elements cannot be read
    /// here.
    pub fn on_device(
        memory: &'a dyn DeviceMemory,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Self, TensorError> {
        let (shape, strides) = device_layout(memory, dtype, shape, strides)?;
        let data = match dtype {
            DType::F32 => Data::F32(&[]),
            DType::F16 => Data::F16(&[]),
            DType::Bf16 => Data::Bf16(&[]),
            DType::I32 => Data::I32(&[]),
        };
        Ok(TensorView { data, device: Some(memory), shape, strides })
    }

    /// The device of the tensor.
    pub fn place(&self) -> Place {
        self.device.map_or(Place::Host, |memory| Place::Device(memory.device()))
    }

    /// The bytes of a tensor on a device; `None` for a host tensor, and for one without elements.
    pub fn footprint(&self) -> Option<Footprint> {
        Footprint::new(self.device?.address(), self.dtype().size_bytes(), &self.shape, &self.strides)
    }

    /// The memory of a tensor on a device.
    pub fn device_memory(&self) -> Option<&'a dyn DeviceMemory> {
        self.device
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.data.dtype()
    }

    /// The size of each axis.
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// Strides of the axes, in elements.
    pub fn strides(&self) -> &Dims {
        &self.strides
    }

    /// The memory, starting at index (0, .., 0); empty if the tensor is on a device.
    pub fn data(&self) -> Data<'a> {
        self.data
    }

    /// The memory as a typed slice, if the type is `T`.
    pub fn slice<T: Storable>(&self) -> Option<&'a [T]> {
        T::slice(&self.data)
    }

    /// The element at an offset in memory, counted from the start of [`data`](Self::data).
    pub fn at(&self, offset: usize) -> f64 {
        per_dtype!(self.data, s => Element::to_f64(s[offset]), Data)
    }

    /// The element at `index`. Panics outside the shape, like indexing a slice, and for a tensor on a device.
    pub fn get(&self, index: &[usize]) -> f64 {
        assert_eq!(index.len(), self.shape.len(), "index rank");
        let inside = index.iter().zip(self.shape.iter()).all(|(i, n)| i < n);
        assert!(inside, "index {index:?} outside shape {:?}", self.shape);
        self.at(index.iter().zip(self.strides.iter()).map(|(i, s)| i * s).sum())
    }

    /// All elements in row-major order, as f64.
    pub fn to_f64(&self) -> Vec<f64> {
        stop::ask("a copy in f64", self.shape.count().saturating_mul(size_of::<f64>()));
        let mut out = Vec::with_capacity(self.shape.count());
        for_each_offset(&self.shape, &self.strides, |offset| out.push(self.at(offset)));
        out
    }

    /// A contiguous copy.
    pub fn to_tensor(&self) -> Tensor {
        fn gather<T: Copy>(from: &[T], shape: &Dims, strides: &Dims) -> Vec<T> {
            stop::ask("a copy", shape.count().saturating_mul(size_of::<T>()));
            let mut out = Vec::with_capacity(shape.count());
            for_each_offset(shape, strides, |offset| out.push(from[offset]));
            out
        }
        let data = per_dtype!(self.data, s => Owned::from(gather(s, &self.shape, &self.strides)), Data);
        Tensor { data, shape: self.shape }
    }
}

/// A tensor borrowed for writing; no two indices share an element.
#[derive(Debug)]
pub struct TensorViewMut<'a> {
    /// The elements; empty if the tensor is on a device.
    data: DataMut<'a>,
    device: Option<&'a dyn DeviceMemory>,
    shape: Dims,
    strides: Dims,
}

impl<'a> TensorViewMut<'a> {
    /// A row-major view of `data`.
    pub fn new(data: impl Into<DataMut<'a>>, shape: &[usize]) -> Result<Self, TensorError> {
        let data = data.into();
        let (shape, strides) = layout(data.as_data().len(), shape, None)?;
        Ok(TensorViewMut { data, device: None, shape, strides })
    }

    /// A view with strides in elements; `data` starts at index (0, .., 0).
    pub fn strided(data: impl Into<DataMut<'a>>, shape: &[usize], strides: &[usize]) -> Result<Self, TensorError> {
        let data = data.into();
        let (shape, strides) = layout(data.as_data().len(), shape, Some(strides))?;
        no_overlap(&shape, &strides)?;
        Ok(TensorViewMut { data, device: None, shape, strides })
    }

    /// A view of device memory, with strides in elements; without them it is row-major. Its elements cannot be written
    /// here.
    pub fn on_device(
        memory: &'a dyn DeviceMemory,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<Self, TensorError> {
        let (shape, strides) = device_layout(memory, dtype, shape, strides)?;
        no_overlap(&shape, &strides)?;
        let data = match dtype {
            DType::F32 => DataMut::F32(&mut []),
            DType::F16 => DataMut::F16(&mut []),
            DType::Bf16 => DataMut::Bf16(&mut []),
            DType::I32 => DataMut::I32(&mut []),
        };
        Ok(TensorViewMut { data, device: Some(memory), shape, strides })
    }

    /// The device of the tensor.
    pub fn place(&self) -> Place {
        self.device.map_or(Place::Host, |memory| Place::Device(memory.device()))
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.data.as_data().dtype()
    }

    /// The size of each axis.
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// Strides of the axes, in elements.
    pub fn strides(&self) -> &Dims {
        &self.strides
    }

    /// The memory, starting at index (0, .., 0).
    pub fn data_mut(&mut self) -> &mut DataMut<'a> {
        &mut self.data
    }

    /// A read-only view of the tensor.
    pub fn as_view(&self) -> TensorView<'_> {
        TensorView { data: self.data.as_data(), device: self.device, shape: self.shape, strides: self.strides }
    }

    /// Writes the nearest representable value at an offset in memory.
    pub fn set_at(&mut self, offset: usize, x: f64) {
        per_dtype!(&mut self.data, s => s[offset] = Element::from_f64(x), DataMut)
    }

    /// Fills the tensor with `x`.
    pub fn fill(&mut self, x: f64) {
        let (mut outer, strides) = (self.shape, self.strides);
        let mut row = 1;
        // Fill contiguous rows as slices.
        if let (Some(last), Some(1)) = (outer.len().checked_sub(1), strides.last()) {
            row = outer[last];
            outer.axes[last] = row.min(1);
        }
        per_dtype!(&mut self.data, s => {
            let x = Element::from_f64(x);
            for_each_offset(&outer, &strides, |offset| s[offset..offset + row].fill(x));
        }, DataMut)
    }

    /// Writes all elements in row-major order, each rounded to the element type.
    ///
    /// Panics if there are not as many values as elements.
    pub fn write_f64(&mut self, values: &[f64]) {
        assert_eq!(values.len(), self.shape.count(), "number of values");
        let (shape, strides) = (self.shape, self.strides);
        let mut values = values.iter();
        for_each_offset(&shape, &strides, |offset| {
            if let Some(&x) = values.next() {
                self.set_at(offset, x);
            }
        });
    }
}

/// An owned, row-major tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    data: Owned,
    shape: Dims,
}

impl Tensor {
    /// Makes a tensor from its elements in row-major order.
    ///
    /// ```
    /// # use fulgurite_core::Tensor;
    /// let x = Tensor::new(vec![1.0f32, 2.0], &[1, 2])?;
    /// assert_eq!(x.view().get(&[0, 1]), 2.0);
    /// # Ok::<(), fulgurite_core::TensorError>(())
    /// ```
    pub fn new<T: Storable>(data: Vec<T>, shape: &[usize]) -> Result<Self, TensorError> {
        let (dims, _) = layout(data.len(), shape, None)?;
        let mut tensor = T::own(data);
        tensor.shape = dims;
        Ok(tensor)
    }

    /// A tensor of zeros.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Self, TensorError> {
        let (dims, _) = layout(usize::MAX, shape, None)?;
        let n = dims.count();
        let bytes = n.saturating_mul(dtype.size_bytes());
        ask_memory(format_args!("a tensor of {dtype} {shape:?}"), bytes)?;
        let data = match dtype {
            DType::F32 => Owned::F32(vec![0.0; n]),
            DType::F16 => Owned::F16(vec![f16::ZERO; n]),
            DType::Bf16 => Owned::Bf16(vec![bf16::ZERO; n]),
            DType::I32 => Owned::I32(vec![0; n]),
        };
        Ok(Tensor { data, shape: dims })
    }

    /// A tensor from values in row-major order, each rounded to `dtype`.
    pub fn from_f64(dtype: DType, values: &[f64], shape: &[usize]) -> Result<Self, TensorError> {
        layout(values.len(), shape, None)?;
        let mut tensor = Tensor::zeros(dtype, shape)?;
        let count = tensor.shape.count();
        tensor.view_mut().write_f64(&values[..count]);
        Ok(tensor)
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.view().dtype()
    }

    /// The size of each axis.
    pub fn shape(&self) -> &Dims {
        &self.shape
    }

    /// A read-only view.
    pub fn view(&self) -> TensorView<'_> {
        let data = match &self.data {
            Owned::F32(v) => Data::F32(v),
            Owned::F16(v) => Data::F16(v),
            Owned::Bf16(v) => Data::Bf16(v),
            Owned::I32(v) => Data::I32(v),
        };
        TensorView { data, device: None, shape: self.shape, strides: self.contiguous() }
    }

    /// A writable view.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let strides = self.contiguous();
        let data = match &mut self.data {
            Owned::F32(v) => DataMut::F32(v),
            Owned::F16(v) => DataMut::F16(v),
            Owned::Bf16(v) => DataMut::Bf16(v),
            Owned::I32(v) => DataMut::I32(v),
        };
        TensorViewMut { data, device: None, shape: self.shape, strides }
    }

    /// The elements as a typed slice in row-major order, if the type is `T`.
    pub fn as_slice<T: Storable>(&self) -> Option<&[T]> {
        self.view().slice()
    }

    fn contiguous(&self) -> Dims {
        self.shape.contiguous_strides().expect("checked when the tensor was made")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_check_the_span() {
        let x = vec![0.0f32; 10];
        assert!(TensorView::strided(&x, &[2, 3], &[5, 2]).is_ok()); // last element 5 + 4 = 9
        let refused = TensorView::strided(&x, &[2, 3], &[6, 2]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "data has 10 elements, shape [2, 3] with strides [6, 2] needs 11; pass the whole buffer or a smaller shape"
        );
        assert!(matches!(TensorView::new(&x, &[usize::MAX, 2]), Err(TensorError::Overflow { .. })));
        assert!(matches!(TensorView::new(&x, &[0, usize::MAX, usize::MAX]), Err(TensorError::Overflow { .. })));
        assert!(TensorView::new(&x, &[0, 7]).is_ok());
        assert!(matches!(TensorView::strided(&x, &[2, 2], &[usize::MAX, 1]), Err(TensorError::Overflow { .. })));
    }

    #[test]
    fn writing_refuses_overlap() {
        let mut x = vec![0.0f32; 100];
        assert!(matches!(TensorViewMut::strided(&mut x, &[2, 3], &[0, 1]), Err(TensorError::Overlap { .. })));
        assert!(matches!(TensorViewMut::strided(&mut x, &[2, 3], &[2, 1]), Err(TensorError::Overlap { .. })));
        assert!(TensorViewMut::strided(&mut x, &[2, 3], &[1, 2]).is_ok());
        assert!(TensorViewMut::strided(&mut x, &[1, 3], &[0, 1]).is_ok());
    }

    #[test]
    fn strided_reading_follows_the_index() {
        let x: Vec<i32> = (0..24).collect();
        let v = TensorView::strided(&x, &[3, 2, 2], &[2, 12, 1]).unwrap();
        assert_eq!(v.get(&[2, 1, 1]), 17.0);
        assert_eq!(v.to_f64()[..4], [0.0, 1.0, 12.0, 13.0]);
        assert_eq!(v.to_tensor().view().to_f64(), v.to_f64());
    }
}
