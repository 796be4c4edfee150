//! Reads arrays of other libraries without a copy: DLPack's C table, DLPack's capsules, NumPy's array struct.
//!
//! Unsafe code here reads descriptions (pointers to shapes and strides) that libraries promise to keep valid while the
//! object lives. Only `memory` accesses the elements.

use crate::array::{Array, Element, Place, wrong};
use pyo3::exceptions::PyException;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyType};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::slice::from_raw_parts;
use std::sync::Mutex;

/// `DLTensor` of DLPack 1.x.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// Describes an object as a `DLTensor`.
type Fill = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;
/// Allocates memory for a tensor like the first argument. On failure it calls the last argument with the context before
/// it.
type Allocate = unsafe extern "C" fn(*mut DlTensor, *mut *mut c_void, *mut c_void, SetError) -> c_int;
type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);
/// Turns allocated memory into an object, which then owns it.
type Wrap = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> c_int;

/// The current stream of the library on a device, given by kind and index.
type Current = unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int;

/// The head of `DLPackExchangeAPI` and the entries used here.
#[repr(C)]
struct ExchangeTable {
    major: u32,
    minor: u32,
    previous: *const c_void,
    allocate: Option<Allocate>,
    managed_from_object: *const c_void,
    managed_to_object: Option<Wrap>,
    tensor_from_object: Option<Fill>,
    current_stream: Option<Current>,
}

/// `PyArrayInterface` of NumPy.
#[repr(C)]
struct ArrayStruct {
    two: c_int,
    nd: c_int,
    typekind: c_char,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *mut c_void,
}

const NUMPY_NOTSWAPPED: c_int = 0x200;
const NUMPY_WRITEABLE: c_int = 0x400;

/// How the arrays of a Python type describe themselves.
#[derive(Clone, Copy)]
pub enum ArrayProtocol {
    /// A table of C functions on the type: torch 2.10 and later.
    Table(Table),
    /// NumPy's `__array_struct__`.
    Struct,
    /// Methods `data_ptr`, `stride`, attributes `shape`, `dtype`, `device`: any torch version.
    Methods(Option<IsNeg>),
    /// `__dlpack__`: JAX and others.
    Capsule,
}

/// The functions of the type on which the table was found.
#[derive(Clone, Copy)]
pub struct Table {
    fill: Fill,
    allocate: Allocate,
    wrap: Wrap,
    current: Option<Current>,
    is_neg: Option<IsNeg>,
}

impl ArrayProtocol {
    /// Tells whether an array has the negative bit; `None` if arrays of the type cannot have it.
    fn is_neg(self) -> Option<IsNeg> {
        match self {
            ArrayProtocol::Table(table) => table.is_neg,
            ArrayProtocol::Methods(is_neg) => is_neg,
            ArrayProtocol::Struct | ArrayProtocol::Capsule => None,
        }
    }
}

impl Table {
    /// A new contiguous tensor on `device` (kind and index).
    pub fn allocate(self, py: Python<'_>, element: Element, device: [i32; 2], shape: &[usize]) -> PyResult<Py<PyAny>> {
        unsafe extern "C" fn note(context: *mut c_void, _kind: *const c_char, message: *const c_char) {
            // SAFETY: the context is the string below, and libraries pass zero-terminated text.
            unsafe {
                *context.cast::<String>() =
                    CStr::from_ptr(message).to_string_lossy().lines().next().unwrap_or("").into();
            }
        }
        let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let mut prototype = DlTensor {
            data: std::ptr::null_mut(),
            device_type: device[0],
            device_id: device[1],
            ndim: sizes.len() as i32,
            code: element.code,
            bits: element.bits,
            lanes: 1,
            shape: sizes.as_ptr(),
            strides: std::ptr::null(),
            byte_offset: 0,
        };
        let (mut managed, mut object, mut why) = (std::ptr::null_mut(), std::ptr::null_mut(), String::new());
        // SAFETY: the prototype has all fields that an allocation reads; the pointers refer to locals that outlive the
        // call.
        let failed = unsafe { (self.allocate)(&mut prototype, &mut managed, (&raw mut why).cast(), note) } != 0;
        if failed || managed.is_null() {
            return Err(wrong(format!("a result of shape {shape:?} cannot be made: {why}")));
        }
        // SAFETY: the same library made `managed`, and ownership passes to it; on success `object` is a new reference.
        unsafe {
            if (self.wrap)(managed, &mut object) != 0 {
                return Err(unreadable("out", PyErr::take(py)));
            }
            Ok(Bound::from_owned_ptr(py, object.cast()).unbind())
        }
    }
}

/// The types seen so far. Each is kept alive, so that its address stays unique.
static TYPES: Mutex<Vec<(Py<PyType>, ArrayProtocol)>> = Mutex::new(Vec::new());

/// How this object describes itself; `None` if it is not an array.
pub fn protocol(object: &Bound<'_, PyAny>) -> PyResult<Option<ArrayProtocol>> {
    // SAFETY: every object has a type, and the pointer is only compared.
    let address = unsafe { ffi::Py_TYPE(object.as_ptr()) }.cast::<ffi::PyObject>();
    let seen =
        |types: &[(Py<PyType>, ArrayProtocol)]| types.iter().find(|(ty, _)| ty.as_ptr() == address).map(|seen| seen.1);
    if let Some(known) = seen(&TYPES.lock().unwrap_or_else(|e| e.into_inner())) {
        return Ok(Some(known));
    }
    let ty = object.get_type();
    let found = if let Some(table) = table(object)? {
        Some(ArrayProtocol::Table(table))
    } else if ty.hasattr("__array_struct__")? {
        Some(ArrayProtocol::Struct)
    } else if ty.hasattr("data_ptr")? && ty.hasattr("stride")? {
        Some(ArrayProtocol::Methods(IsNeg::find(object)?))
    } else if ty.hasattr("__dlpack__")? {
        Some(ArrayProtocol::Capsule)
    } else {
        None
    };
    if found.is_some() && ty.hasattr("harden_mask")? {
        let name = ty.name()?;
        return Err(wrong(format!("an array is a {name}, whose mask would be ignored; use .filled(...)")));
    }
    if let Some(found) = found {
        let mut types = TYPES.lock().unwrap_or_else(|e| e.into_inner());
        // Programs have a few types; a program that keeps creating classes must not keep all of them alive.
        let old = if types.len() >= MAX_TYPES { std::mem::take(&mut *types) } else { Vec::new() };
        types.push((ty.unbind(), found));
        drop(types);
        drop(old); // may run code of theirs, so not under the lock
    }
    Ok(found)
}

const MAX_TYPES: usize = 64;

/// A copy of a torch tensor whose memory does not hold its elements: one with the negative bit.
pub fn resolved<'py>(object: &Bound<'py, PyAny>, protocol: ArrayProtocol) -> PyResult<Option<Bound<'py, PyAny>>> {
    match protocol.is_neg() {
        Some(is_neg) if is_neg.of(object)? => object.call_method0("resolve_neg").map(Some),
        _ => Ok(None),
    }
}

/// The C function behind `torch.Tensor.is_neg`; `None` if the method is something else. A call of the method through Python
/// costs as much again as the function.
#[derive(Clone, Copy)]
pub struct IsNeg(Option<ffi::PyCFunction>);

impl IsNeg {
    /// The function, if the object is a torch tensor; arrays of other libraries have no negative bit.
    fn find(object: &Bound<'_, PyAny>) -> PyResult<Option<IsNeg>> {
        // Do not import torch for an array of another library.
        let Ok(torch) = object.py().import("sys")?.getattr("modules")?.get_item("torch") else { return Ok(None) };
        let Ok(tensor) = torch.getattr("Tensor") else { return Ok(None) };
        if !object.is_instance(&tensor)? {
            return Ok(None);
        }
        let bound = tensor.getattr("is_neg")?.call_method1("__get__", (object,))?;
        // SAFETY: `bound` is alive, and the first function checks that the other two may read it.
        let function = unsafe {
            let readable = ffi::PyCFunction_Check(bound.as_ptr()) != 0;
            match readable && ffi::PyCFunction_GetFlags(bound.as_ptr()) == ffi::METH_NOARGS {
                true => ffi::PyCFunction_GetFunction(bound.as_ptr()),
                false => None,
            }
        };
        Ok(Some(IsNeg(function)))
    }

    fn of(self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(function) = self.0 else { return object.call_method0("is_neg")?.is_truthy() };
        // SAFETY: the function is a method without arguments of torch's tensor type, and the type of `object` is that or a
        // subclass. The function returns a new reference, or null with an error set.
        unsafe { Bound::from_owned_ptr_or_err(object.py(), function(object.as_ptr(), std::ptr::null_mut()))? }
            .is_truthy()
    }
}

fn table(object: &Bound<'_, PyAny>) -> PyResult<Option<Table>> {
    let Ok(capsule) = object.get_type().getattr("__dlpack_c_exchange_api__") else { return Ok(None) };
    let Ok(capsule) = capsule.cast_into::<PyCapsule>() else { return Ok(None) };
    let Ok(pointer) = capsule.pointer_checked(Some(c"dlpack_exchange_api")) else { return Ok(None) };
    // SAFETY: a capsule of this name holds such a table, which its library keeps for the life of the process.
    let table = unsafe { pointer.cast::<ExchangeTable>().as_ref() };
    Ok(match (table.major, table.tensor_from_object, table.allocate, table.managed_to_object) {
        (1, Some(fill), Some(allocate), Some(wrap)) => {
            Some(Table { fill, allocate, wrap, current: table.current_stream, is_neg: IsNeg::find(object)? })
        }
        _ => None,
    })
}

/// The current stream of an object's library on a GPU; `None` if the library does not reveal it. A library that gives
/// capsules orders its work before later work on the default stream.
pub fn current_stream(object: &Bound<'_, PyAny>, number: i32) -> PyResult<Option<u64>> {
    const CUDA: i32 = 2;
    match protocol(object)? {
        Some(ArrayProtocol::Table(Table { current: Some(current), .. })) => {
            let mut stream = std::ptr::null_mut();
            // SAFETY: the table's function is called with a device that holds an array of the library; `stream` is
            // written.
            if unsafe { current(CUDA, number, &mut stream) } == 0 {
                return Ok(Some(stream.expose_provenance() as u64));
            }
            PyErr::take(object.py());
        }
        Some(ArrayProtocol::Capsule) => return Ok(None),
        _ => {}
    }
    let torch = object.py().import("torch")?;
    let stream = torch.getattr("cuda")?.call_method1("current_stream", (number,))?;
    stream.getattr("cuda_stream")?.extract().map(Some)
}

/// Reads the description of an object's array.
pub fn read(arg: &str, object: &Bound<'_, PyAny>, protocol: ArrayProtocol) -> PyResult<Array> {
    match protocol {
        ArrayProtocol::Table(table) => from_table(arg, object, table),
        ArrayProtocol::Struct => from_struct(arg, object),
        ArrayProtocol::Methods(_) => from_methods(arg, object),
        ArrayProtocol::Capsule => from_capsule(arg, object),
    }
}

fn from_table(arg: &str, object: &Bound<'_, PyAny>, Table { fill, .. }: Table) -> PyResult<Array> {
    let mut tensor = std::mem::MaybeUninit::<DlTensor>::uninit();
    // SAFETY: the table was found on the type of this object, and `tensor` has room for one.
    if unsafe { fill(object.as_ptr().cast(), tensor.as_mut_ptr()) } != 0 {
        let cause = PyErr::take(object.py());
        // A device without memory, such as `meta`, has no number in DLPack.
        return Err(match object.getattr("device").map(|device| device.to_string()) {
            Ok(device) if device != "cpu" && !device.starts_with("cuda") => {
                wrong(format!("`{arg}` is on {device}, allowed: cpu; move it with .cpu()"))
            }
            _ => unreadable(arg, cause),
        });
    }
    // SAFETY: the function succeeded, so it filled the tensor; shape and strides belong to the object, which is alive.
    unsafe { from_dl_tensor(arg, tensor.assume_init_ref(), true) }
}

/// The error for a torch tensor without its own storage, a sparse tensor, or an array that is being traced.
fn unreadable(arg: &str, cause: Option<PyErr>) -> PyErr {
    // An interrupt such as Ctrl-C is not an error of the array.
    if let Some(cause) = &cause
        && Python::attach(|py| !cause.is_instance_of::<PyException>(py))
    {
        return Python::attach(|py| cause.clone_ref(py));
    }
    let why = cause.map_or_else(|| "its library does not say why".into(), |e| e.to_string());
    // Some libraries append a traceback of their own calls.
    let why = why.lines().next().unwrap_or_default();
    wrong(format!("`{arg}` cannot be read in place ({why}), allowed: dense arrays in memory of the host"))
}

/// # Safety
/// `tensor` is as DLPack says: shape and strides have `ndim` entries each, or are null.
unsafe fn from_dl_tensor(arg: &str, tensor: &DlTensor, writable: bool) -> PyResult<Array> {
    let rank = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
    let place = match tensor.device_type {
        1 | 3 => Place::Host,
        2 => Place::Cuda(tensor.device_id),
        other => Place::Other(other),
    };
    let element = Element { code: tensor.code, bits: if tensor.lanes == 1 { tensor.bits } else { 0 } };
    let address = (tensor.data as usize).wrapping_add(tensor.byte_offset as usize);
    let mut array = Array::new(arg, address, element, rank, place, writable)?;
    for axis in 0..rank {
        // SAFETY: guaranteed by the caller; strides may be null, and then the array is contiguous.
        let (size, stride) =
            unsafe { (*tensor.shape.add(axis), (!tensor.strides.is_null()).then(|| *tensor.strides.add(axis))) };
        array.set(axis, size as usize, stride.map(|stride| stride as isize));
    }
    Ok(array)
}

/// The error for an array without memory: the stand-ins of JAX, while it traces a program, have a function of their own.
fn untraced(arg: &str, object: &Bound<'_, PyAny>, cause: PyErr) -> PyErr {
    let is_traced = object.get_type().name().is_ok_and(|name| name.to_string().ends_with("Tracer"));
    match is_traced {
        true => wrong(format!(
            "`{arg}` cannot be read in place (JAX is tracing it), allowed: arrays with contents; in jit, grad and vmap call \
             fulgurite.jax.attention"
        )),
        false => unreadable(arg, Some(cause)),
    }
}

fn from_capsule(arg: &str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
    let capsule = object.call_method0("__dlpack__").map_err(|e| untraced(arg, object, e))?;
    let capsule = capsule.cast_into::<PyCapsule>().map_err(|e| unreadable(arg, Some(e.into())))?;
    let pointer = capsule.pointer_checked(Some(c"dltensor")).map_err(|e| unreadable(arg, Some(e)))?;
    // SAFETY: a capsule of this name holds a `DLManagedTensor`, which begins with the tensor. It lives as long as the
    // capsule, which the returned array keeps alive.
    let mut array = unsafe { from_dl_tensor(arg, pointer.cast::<DlTensor>().as_ref(), false)? };
    array.keep(capsule.into_any().unbind());
    Ok(array)
}

fn from_struct(arg: &str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
    let capsule = object.getattr(pyo3::intern!(object.py(), "__array_struct__"))?;
    let capsule = capsule.cast_into::<PyCapsule>().map_err(|e| unreadable(arg, Some(e.into())))?;
    let name: Option<&CStr> = None;
    let pointer = capsule.pointer_checked(name).map_err(|e| unreadable(arg, Some(e)))?;
    // SAFETY: by NumPy's protocol the capsule holds such a struct, whose lists have `nd` entries and live as long as
    // it.
    let array = unsafe { pointer.cast::<ArrayStruct>().as_ref() };
    if array.two != 2 {
        return Err(unreadable(arg, None));
    }
    if array.flags & NUMPY_NOTSWAPPED == 0 {
        return Err(wrong(format!("`{arg}` has foreign byte order, allowed: native; convert it with .astype")));
    }
    let (rank, size) = (array.nd as usize, array.itemsize as isize);
    let bits = u8::try_from(8 * size).unwrap_or(0);
    let element = match array.typekind as u8 {
        b'i' => Element { code: 0, bits },
        b'u' => Element { code: 1, bits },
        b'f' => Element { code: 2, bits },
        b'c' => Element { code: 5, bits },
        b'b' => Element { code: 6, bits },
        // A type registered with NumPy, such as ml_dtypes' bfloat16.
        _ if object.getattr("dtype")?.getattr("name")?.extract::<String>()? == "bfloat16" => {
            Element { code: 4, bits: 16 }
        }
        _ => Element { code: 3, bits },
    };
    let writable = array.flags & NUMPY_WRITEABLE != 0;
    let mut result = Array::new(arg, array.data as usize, element, rank, Place::Host, writable)?;
    if rank > 0 {
        // SAFETY: as above; NumPy gives both lists for every array that has axes.
        let (shape, strides) = unsafe { (from_raw_parts(array.shape, rank), from_raw_parts(array.strides, rank)) };
        for (axis, (&n, &stride)) in shape.iter().zip(strides).enumerate() {
            if n > 1 && stride % size != 0 {
                return Err(wrong(format!(
                    "`{arg}` has strides {strides:?} bytes, allowed: multiples of {size}; copy it"
                )));
            }
            result.set(axis, n as usize, Some(stride / size.max(1)));
        }
    }
    Ok(result)
}

fn from_methods(arg: &str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
    let device = object.getattr("device")?;
    let place = match device.getattr("type")?.extract::<String>()?.as_str() {
        "cpu" => Place::Host,
        "cuda" => Place::Cuda(device.getattr("index")?.extract::<Option<i32>>()?.unwrap_or(0)),
        _ => return Err(wrong(format!("`{arg}` is on {device}, allowed: cpu; move it with .cpu()"))),
    };
    let name = object.getattr("dtype")?.to_string();
    let element = Element::named(name.trim_start_matches("torch."));
    let shape: Vec<usize> = object.getattr("shape")?.extract()?;
    let strides: Vec<isize> = object.call_method0("stride")?.extract()?;
    let address: usize = object.call_method0("data_ptr").map_err(|e| unreadable(arg, Some(e)))?.extract()?;
    let mut array = Array::new(arg, address, element, shape.len(), place, true)?;
    for (axis, (&size, &stride)) in shape.iter().zip(&strides).enumerate() {
        array.set(axis, size, Some(stride));
    }
    Ok(array)
}
