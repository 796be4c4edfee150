//! An array of the caller: its memory, its elements, and how to make another of its kind.

use crate::foreign::{self, ArrayProtocol};
use crate::memory::HostSpan;
use fulgurite::Error;
use fulgurite_core::tensor::MAX_RANK;
use fulgurite_core::{DType, TensorView, TensorViewMut};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple};
use std::fmt;

/// A `ValueError` for a mistake of the caller.
pub fn wrong(text: impl Into<String>) -> PyErr {
    PyValueError::new_err(text.into())
}

/// Maps mistakes of the caller to `ValueError`, and device failures to `RuntimeError`.
pub fn refuse(error: Error) -> PyErr {
    match error {
        Error::Device(_) => PyRuntimeError::new_err(error.to_string()),
        _ => wrong(error.to_string()),
    }
}

/// Like [`refuse`], for a forward call: the caller knows its result as `out`.
pub fn refuse_forward(error: Error) -> PyErr {
    match error {
        Error::Device(_) => refuse(error),
        _ => wrong(error.to_string().replace("`o`", "`out`")),
    }
}

/// An element type in DLPack's numbering.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Element {
    /// 0 signed, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool; all others are unsupported.
    pub code: u8,
    /// Width in bits; 0 if it does not fit this type.
    pub bits: u8,
}

impl Element {
    /// The element of `DType::F32`.
    pub const F32: Element = Element { code: 2, bits: 32 };
    /// The element of `DType::I32`.
    pub const I32: Element = Element { code: 0, bits: 32 };

    /// The element type with torch's name; an unknown name gives an unsupported type.
    pub fn named(name: &str) -> Element {
        let digits = name.trim_start_matches(|c: char| c.is_alphabetic());
        let code = match &name[..name.len() - digits.len()] {
            "int" => 0,
            "uint" => 1,
            "float" => 2,
            "bfloat" => 4,
            "complex" => 5,
            "bool" => 6,
            _ => 3,
        };
        Element { code, bits: if code == 6 { 8 } else { digits.parse().unwrap_or(0) } }
    }

    /// The corresponding type of core tensors.
    pub fn dtype(self) -> Option<DType> {
        match (self.code, self.bits) {
            (2, 32) => Some(DType::F32),
            (2, 16) => Some(DType::F16),
            (4, 16) => Some(DType::Bf16),
            (0, 32) => Some(DType::I32),
            _ => None,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Element { code, bits } = self;
        match code {
            0 => write!(f, "int{bits}"),
            1 => write!(f, "uint{bits}"),
            2 => write!(f, "float{bits}"),
            4 => write!(f, "bfloat{bits}"),
            5 => write!(f, "complex{bits}"),
            6 => f.write_str("bool"),
            _ => f.write_str("of another type"),
        }
    }
}

/// The device that owns the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Host memory, which this process reads and writes.
    Host,
    /// A CUDA GPU, by its index.
    Cuda(i32),
    /// Another device, by DLPack's number of its kind.
    Other(i32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host => f.write_str("cpu"),
            Place::Cuda(number) => write!(f, "cuda:{number}"),
            Place::Other(kind) => write!(f, "a device of kind {kind}"),
        }
    }
}

/// The description of an array: memory, elements and layout. Strides are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    address: usize,
    element: Element,
    place: Place,
    /// Kind and index of the device in DLPack's terms.
    device: [i32; 2],
    writable: bool,
    rank: usize,
    shape: [usize; MAX_RANK],
    /// Strides; `None` means contiguous, derived from the shape.
    strides: [Option<isize>; MAX_RANK],
}

/// An array as its library describes it.
pub struct Array {
    layout: Layout,
    /// An object that must live as long as this one.
    kept: Option<Py<PyAny>>,
}

impl Array {
    /// An array whose sizes are yet to be set, axis by axis.
    pub fn new(
        arg: &str,
        address: usize,
        element: Element,
        rank: usize,
        place: Place,
        writable: bool,
    ) -> PyResult<Array> {
        if rank > MAX_RANK {
            return Err(wrong(format!("`{arg}` has {rank} axes, allowed: at most {MAX_RANK}")));
        }
        let (shape, strides) = ([0; MAX_RANK], [None; MAX_RANK]);
        let device = match place {
            Place::Host => [1, 0],
            Place::Cuda(number) => [2, number],
            Place::Other(kind) => [kind, 0],
        };
        Ok(Array { layout: Layout { address, element, place, device, writable, rank, shape, strides }, kept: None })
    }

    /// Sets the size and the stride of an axis.
    pub fn set(&mut self, axis: usize, size: usize, stride: Option<isize>) {
        (self.layout.shape[axis], self.layout.strides[axis]) = (size, stride);
    }

    /// Keeps `object` alive as long as this array.
    pub fn keep(&mut self, object: Py<PyAny>) {
        self.kept = Some(object);
    }

    /// The description, if the object of the caller owns the memory: it tells two calls on the same memory.
    pub fn own_layout(&self) -> Option<&Layout> {
        self.kept.is_none().then_some(&self.layout)
    }

    /// Reads the description of an object.
    pub fn read(arg: &str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
        match foreign::protocol(object)? {
            Some(protocol) => match foreign::resolved(object, protocol)? {
                None => foreign::read(arg, object, protocol),
                // Read a copy, and do not allow writes to it in place of the original.
                Some(copy) => {
                    let mut array = foreign::read(arg, &copy, protocol)?;
                    array.layout.writable = false;
                    array.keep(copy.unbind());
                    Ok(array)
                }
            },
            None => Err(wrong(format!(
                "`{arg}` is a {}, allowed: a NumPy array, a torch tensor or an array that protocol DLPack",
                object.get_type().name()?
            ))),
        }
    }

    /// Reads the description of a result that was just made: its memory holds its elements, and may be written.
    pub fn of_result(arg: &str, fresh: &Bound<'_, PyAny>) -> PyResult<Array> {
        let mut array = match foreign::protocol(fresh)? {
            Some(protocol) => foreign::read(arg, fresh, protocol)?,
            None => Array::read(arg, fresh)?,
        };
        // Libraries that give capsules do not say so.
        array.layout.writable = true;
        Ok(array)
    }

    /// The size of each axis.
    pub fn shape(&self) -> &[usize] {
        &self.layout.shape[..self.layout.rank]
    }

    /// The device of the array.
    pub fn place(&self) -> Place {
        self.layout.place
    }

    /// Index of the GPU that holds the array.
    pub fn gpu(&self) -> Option<i32> {
        match self.layout.place {
            Place::Cuda(number) => Some(number),
            _ => None,
        }
    }

    /// The element type in the library's numbering.
    pub fn element(&self) -> Element {
        self.layout.element
    }

    /// The element type.
    pub fn dtype(&self, arg: &str) -> PyResult<DType> {
        let element = self.layout.element;
        element.dtype().ok_or_else(|| wrong(format!("`{arg}` is {element}, allowed: f32, f16, bf16, i32; convert it")))
    }

    /// Strides as unsigned numbers, and the memory from the first to the last element.
    fn span(&self, arg: &str) -> PyResult<([usize; MAX_RANK], HostSpan)> {
        let (shape, dtype) = (self.shape(), self.dtype(arg)?);
        if shape.contains(&0) {
            // Without elements no stride is ever used, and libraries put arbitrary values there.
            return Ok(([1; MAX_RANK], HostSpan::new(0, dtype, 0).map_err(|e| wrong(e.to_string()))?));
        }
        let overflow = || wrong(format!("`{arg}` of shape {shape:?} overflows the address space"));
        let mut steps = [0usize; MAX_RANK];
        let (mut last, mut contiguous) = (0usize, 1usize);
        for axis in (0..self.layout.rank).rev() {
            let size = shape[axis];
            // The stride of an axis of one element is never used either.
            let stride = if size == 1 { 0 } else { self.layout.strides[axis].unwrap_or(contiguous as isize) };
            steps[axis] = usize::try_from(stride).map_err(|_| {
                wrong(format!("`{arg}` has stride {stride} on axis {axis}, allowed: 0 or more; copy it"))
            })?;
            let reach = (size - 1).checked_mul(steps[axis]);
            last = reach.and_then(|reach| last.checked_add(reach)).ok_or_else(overflow)?;
            contiguous = contiguous.checked_mul(size).ok_or_else(overflow)?;
        }
        let len = last.checked_add(1).ok_or_else(overflow)?;
        let span = HostSpan::new(self.layout.address, dtype, len).map_err(|e| wrong(format!("`{arg}` {e}")))?;
        Ok((steps, span))
    }

    /// Strides, address and bytes, for arrays on a device.
    pub fn memory(&self, arg: &str) -> PyResult<([usize; MAX_RANK], usize, usize)> {
        let (strides, span) = self.span(arg)?;
        Ok((strides, self.layout.address, span.bytes()))
    }

    /// Rejects an array that must not be written, or whose memory is a copy that the caller does not see.
    pub fn check_writable(&self, arg: &str) -> PyResult<()> {
        match self.layout.writable {
            true => Ok(()),
            false => Err(wrong(format!("`{arg}` is read-only, allowed: memory that may be written; copy it"))),
        }
    }

    /// Rejects an address outside host memory: reading it would crash the process.
    fn on_host(&self, arg: &str) -> PyResult<()> {
        match self.layout.place {
            Place::Host => Ok(()),
            place => Err(wrong(format!("`{arg}` is on {place}, allowed here: cpu; move it with .cpu()"))),
        }
    }

    /// The memory from the first to the last element in whole 8-byte words.
    pub fn words(&self, arg: &str) -> PyResult<&[u64]> {
        self.on_host(arg)?;
        let (_, span) = self.span(arg)?;
        // SAFETY: the extension's contract holds, and the call writes to no array.
        unsafe { span.words() }.map_err(|e| wrong(format!("`{arg}` {e}")))
    }

    /// A read-only tensor view, valid until `self` is dropped at the end of the call.
    pub fn view<'a>(&'a self, arg: &'a str, claims: &mut Claims<'a>) -> PyResult<TensorView<'a>> {
        self.on_host(arg)?;
        let (strides, span) = self.span(arg)?;
        claims.0.push((arg, span));
        // SAFETY: the extension's contract holds. No slice for writing overlaps this one: `view_mut` checks every
        // claimed span, and nothing is claimed for reading after something is claimed for writing.
        let data = unsafe { span.read() };
        TensorView::strided(data, self.shape(), &strides[..self.layout.rank])
            .map_err(|e| wrong(format!("`{arg}`: {e}")))
    }

    /// A writable tensor view, valid until `self` is dropped at the end of the call.
    pub fn view_mut<'a>(&'a self, arg: &'a str, claims: &mut Claims<'a>) -> PyResult<TensorViewMut<'a>> {
        self.view_mut_from(0, arg, claims)
    }

    /// Like [`view_mut`](Self::view_mut), without the first axis, which must have one element.
    pub fn view_mut_unbatched<'a>(&'a self, arg: &'a str, claims: &mut Claims<'a>) -> PyResult<TensorViewMut<'a>> {
        match self.shape() {
            [1, ..] => self.view_mut_from(1, arg, claims),
            other => Err(wrong(format!("`{arg}` has shape {other:?}, allowed: a first axis of 1"))),
        }
    }

    fn view_mut_from<'a>(&'a self, axis: usize, arg: &'a str, claims: &mut Claims<'a>) -> PyResult<TensorViewMut<'a>> {
        self.check_writable(arg)?;
        self.on_host(arg)?;
        let (strides, span) = self.span(arg)?;
        if let Some((other, _)) = claims.0.iter().find(|(_, claimed)| claimed.overlaps(&span)) {
            return Err(wrong(format!("`{arg}` shares memory with `{other}`; write into a tensor of its own")));
        }
        claims.0.push((arg, span));
        // SAFETY: the extension's contract holds, and no other slice of this call overlaps the memory.
        let data = unsafe { span.write() };
        TensorViewMut::strided(data, &self.shape()[axis..], &strides[axis..self.layout.rank])
            .map_err(|e| wrong(format!("`{arg}`: {e}")))
    }
}

/// The memory that one call uses, so that no memory is written while it is also read or written elsewhere.
#[derive(Debug)]
pub struct Claims<'a>(Vec<(&'a str, HostSpan)>);

impl Default for Claims<'_> {
    fn default() -> Self {
        Claims(Vec::with_capacity(8)) // q, k, v, o, lse and some more
    }
}

/// A result while it is being filled.
pub struct Fresh {
    object: Py<PyAny>,
    /// Converts the filled result: `asarray` of the caller's library, if the array was made by another one.
    into: Option<Py<PyAny>>,
}

impl Fresh {
    /// The object to fill.
    pub fn object<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.object.bind(py)
    }

    /// The result in the form that the caller gets.
    pub fn finish(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.into {
            None => Ok(self.object),
            Some(into) => into.call1(py, (self.object,)),
        }
    }
}

/// JAX takes over memory without a copy if its address is a multiple of this.
const ALIGN_BYTES: usize = 64;

/// A new contiguous array of the same kind and on the same device as `like`, which `array` describes. It has the type
/// of `like` unless `element` names another one.
pub fn fresh(like: &Bound<'_, PyAny>, array: &Array, shape: &[usize], element: Option<Element>) -> PyResult<Fresh> {
    static EMPTY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let py = like.py();
    let protocol = foreign::protocol(like)?;
    if let Some(ArrayProtocol::Table(table)) = protocol {
        let element = element.unwrap_or(array.layout.element);
        return Ok(Fresh { object: table.allocate(py, element, array.layout.device, shape)?, into: None });
    }
    let dimensions = PyTuple::new(py, shape)?;
    let name = element.map(|element| element.to_string());
    let object = match protocol {
        Some(ArrayProtocol::Methods(_)) if name.is_some() => {
            let options = PyDict::new(py);
            options.set_item("dtype", py.import("torch")?.getattr(name.unwrap_or_default().as_str())?)?;
            like.call_method("new_empty", (dimensions,), Some(&options))?
        }
        Some(ArrayProtocol::Table(_) | ArrayProtocol::Methods(_)) => {
            like.call_method1(pyo3::intern!(py, "new_empty"), (dimensions,))?
        }
        Some(ArrayProtocol::Capsule) if !like.hasattr("__array_namespace__")? || !like.hasattr("dtype")? => {
            let name = like.get_type().name()?;
            return Err(wrong(format!(
                "`q` is a {name} without `dtype` or `__array_namespace__`, with which its library makes a result, \
                 allowed: arrays of NumPy, torch or the array API"
            )));
        }
        Some(ArrayProtocol::Capsule) if matches!(array.place(), Place::Cuda(_)) => {
            return on_its_gpu(like, shape, name);
        }
        Some(ArrayProtocol::Capsule) => return aligned(like, shape, name),
        Some(ArrayProtocol::Struct) | None => {
            let dtype = match element {
                Some(Element::F32) => pyo3::intern!(py, "float32").clone().into_any(),
                Some(other) => PyString::new(py, &other.to_string()).into_any(),
                None => like.getattr(pyo3::intern!(py, "dtype"))?,
            };
            EMPTY
                .get_or_try_init(py, || Ok::<_, PyErr>(py.import("numpy")?.getattr("empty")?.unbind()))?
                .bind(py)
                .call1((dimensions, dtype))?
        }
    };
    Ok(Fresh { object: object.unbind(), into: None })
}

/// An array made by the library itself on the GPU of `like`; nothing else refers to it yet.
fn on_its_gpu(like: &Bound<'_, PyAny>, shape: &[usize], name: Option<String>) -> PyResult<Fresh> {
    let py = like.py();
    let library = like.call_method0("__array_namespace__")?;
    let options = PyDict::new(py);
    options.set_item("dtype", name.map_or_else(|| like.getattr("dtype"), |name| library.getattr(name.as_str()))?)?;
    options.set_item("device", like.getattr("device")?)?;
    let object = library.call_method("empty", (PyTuple::new(py, shape)?,), Some(&options))?;
    // Some libraries fill the array asynchronously: wait, so that they do not overwrite our results.
    if object.hasattr("block_until_ready")? {
        object.call_method0("block_until_ready")?;
    }
    Ok(Fresh { object: object.unbind(), into: None })
}

/// A NumPy array that another library will take over.
fn aligned(like: &Bound<'_, PyAny>, shape: &[usize], name: Option<String>) -> PyResult<Fresh> {
    let py = like.py();
    let numpy = py.import("numpy")?;
    let dtype = name.map_or_else(|| like.getattr("dtype"), |name| numpy.getattr(name.as_str()))?;
    let dtype = numpy.call_method1("dtype", (dtype,))?;
    let size: usize = dtype.getattr("itemsize")?.extract()?;
    let bytes = shape.iter().try_fold(size, |n, &m| n.checked_mul(m)).and_then(|n| n.checked_add(ALIGN_BYTES));
    let bytes = bytes.ok_or_else(|| wrong(format!("a result of shape {shape:?} overflows the address space")))?;
    let room = numpy.call_method1("empty", (bytes, "uint8"))?;
    let start: usize = room.getattr("ctypes")?.getattr("data")?.extract()?;
    let skip = start.next_multiple_of(ALIGN_BYTES) - start;
    let options = PyDict::new(py);
    options.set_item("buffer", room)?;
    options.set_item("offset", skip)?;
    let object = numpy.getattr("ndarray")?.call((PyTuple::new(py, shape)?, dtype), Some(&options))?;
    let into = like.call_method0("__array_namespace__")?.getattr("asarray")?;
    Ok(Fresh { object: object.unbind(), into: Some(into.unbind()) })
}
