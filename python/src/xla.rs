//! The C interface through which XLA, the compiler under JAX, calls functions of other libraries.
//!
//! XLA passes one structure with the buffers of the call and with its attributes, and takes back an error or nothing. The
//! layouts below are those that jaxlib publishes in `xla/ffi/api/c_api.h` as major version 0; within it, fields are only
//! added at the end, and each structure begins with its size. Unsafe code here reads these structures; the elements of
//! buffers are accessed in `memory` alone.

use crate::array::{Array, Element, Place, wrong};
use pyo3::prelude::*;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_raw_parts;

/// The beginning of every structure; `next` is the first of a list of extensions.
#[repr(C)]
struct Head {
    size: usize,
    next: *mut Extension,
}

#[repr(C)]
struct Extension {
    size: usize,
    kind: c_int,
    next: *mut Extension,
}

/// The extension by which XLA asks for the version of a function instead of calling it.
#[repr(C)]
struct MetadataExtension {
    extension: Extension,
    metadata: *mut Metadata,
}

const METADATA: c_int = 1;

#[repr(C)]
struct Version {
    head: Head,
    major: c_int,
    minor: c_int,
}

/// The head of `XLA_FFI_Metadata`. Its other fields keep the values that XLA set.
#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
}

#[repr(C)]
struct RawBuffer {
    head: Head,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

/// Arguments and results have the same form.
#[repr(C)]
struct Buffers {
    head: Head,
    count: i64,
    kinds: *const c_int,
    buffers: *const *const RawBuffer,
}

const BUFFER: c_int = 1;

#[repr(C)]
struct Text {
    data: *const u8,
    len: usize,
}

#[repr(C)]
struct Attributes {
    head: Head,
    count: i64,
    kinds: *const c_int,
    names: *const *const Text,
    values: *const *const c_void,
}

const STRING: c_int = 4;

/// The structure of a call. Later versions have one more field.
#[repr(C)]
pub struct RawCall {
    head: Head,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Buffers,
    results: Buffers,
    attributes: Attributes,
}

const EXECUTE: c_int = 3;

#[repr(C)]
struct ErrorArguments {
    head: Head,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct StreamArguments {
    head: Head,
    context: *mut c_void,
    stream: *mut c_void,
}

#[repr(C)]
struct DeviceArguments {
    head: Head,
    context: *mut c_void,
    number: i32,
}

/// An error that belongs to whom it is returned to.
#[repr(C)]
pub struct RawError {
    _opaque: [u8; 0],
}

type CreateError = unsafe extern "C" fn(*mut ErrorArguments) -> *mut RawError;
type DestroyError = unsafe extern "C" fn(*mut DestroyArguments);
type GetStream = unsafe extern "C" fn(*mut StreamArguments) -> *mut RawError;
type GetDevice = unsafe extern "C" fn(*mut DeviceArguments) -> *mut RawError;

#[repr(C)]
struct DestroyArguments {
    head: Head,
    error: *mut RawError,
}

/// XLA's own functions, in the order of the header; those that are not used here are plain addresses.
#[repr(C)]
struct Api {
    head: Head,
    version: Version,
    internal: *const c_void,
    create_error: CreateError,
    get_message: *const c_void,
    destroy_error: DestroyError,
    register: *const c_void,
    get_stream: GetStream,
    /// Types, states, memory, threads, futures and the number of a run.
    others: [*const c_void; 12],
    get_device: GetDevice,
}

/// Codes of errors, as in gRPC.
const INVALID_ARGUMENT: c_int = 3;
const INTERNAL: c_int = 13;

/// The version of the interface that this file was written for.
const VERSION: (c_int, c_int) = (0, 3);

fn head<T>() -> Head {
    Head { size: size_of::<T>(), next: std::ptr::null_mut() }
}

/// A call of XLA that has to be executed.
pub struct XlaCall<'a> {
    raw: &'a RawCall,
}

impl XlaCall<'_> {
    /// The arguments, by their names in messages; there must be one name for each.
    pub fn arguments(&self, names: &[&str], place: Place) -> PyResult<Vec<Array>> {
        self.arrays(&self.raw.arguments, names, place, false)
    }

    /// Number of arguments.
    pub fn argument_count(&self) -> usize {
        usize::try_from(self.raw.arguments.count).unwrap_or(0)
    }

    /// The buffers to fill, like [`arguments`](Self::arguments).
    pub fn results(&self, names: &[&str], place: Place) -> PyResult<Vec<Array>> {
        self.arrays(&self.raw.results, names, place, true)
    }

    fn arrays(&self, buffers: &Buffers, names: &[&str], place: Place, writable: bool) -> PyResult<Vec<Array>> {
        let count = usize::try_from(buffers.count).unwrap_or(0);
        if count != names.len() {
            return Err(wrong(format!("a call from XLA has {count} buffers, allowed: {}", names.join(", "))));
        }
        // An empty list may be null.
        if count == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: `RawCall` is as in the header, so both lists have `count` entries and live until the call returns.
        let (kinds, list) = unsafe { (from_raw_parts(buffers.kinds, count), from_raw_parts(buffers.buffers, count)) };
        let known = names.iter().zip(kinds.iter().zip(list));
        known
            .map(|(name, (&kind, &buffer))| {
                if kind != BUFFER || buffer.is_null() {
                    return Err(wrong(format!("`{name}` is not a buffer, allowed: an array")));
                }
                // SAFETY: an entry of kind `BUFFER` points to such a structure, which lives until the call returns.
                array(name, unsafe { &*buffer }, place, writable)
            })
            .collect()
    }

    /// The attribute of this name, if it is a text.
    pub fn text(&self, name: &str) -> Option<&str> {
        let Attributes { kinds, names, values, count, .. } = self.raw.attributes;
        let find = |at: usize| {
            // SAFETY: `RawCall` is as in the header, so the three lists have `count` entries, and `at` is one of them.
            // An attribute of kind `STRING` is a `Text`, as every name is; all live until the call returns.
            unsafe {
                let is_named = (*kinds.add(at) == STRING) && bytes(*names.add(at)) == name.as_bytes();
                is_named.then(|| bytes((*values.add(at)).cast::<Text>()))
            }
        };
        let found = (0..usize::try_from(count).unwrap_or(0)).find_map(find)?;
        std::str::from_utf8(found).ok()
    }

    /// The stream of the device on which XLA executes the call.
    pub fn stream(&self) -> PyResult<u64> {
        let mut arguments = StreamArguments {
            head: head::<StreamArguments>(),
            context: self.raw.context,
            stream: std::ptr::null_mut(),
        };
        // SAFETY: the table of functions lives as long as the process, and the arguments as long as this call.
        let error = unsafe { ((*self.raw.api).get_stream)(&mut arguments) };
        self.succeeded(error, "stream")?;
        Ok(arguments.stream.expose_provenance() as u64)
    }

    /// Index of the device on which XLA executes the call.
    pub fn device(&self) -> PyResult<i32> {
        // SAFETY: the table of functions lives as long as the process.
        let api = unsafe { &*self.raw.api };
        if api.head.size < size_of::<Api>() {
            return Err(wrong("jaxlib is too old to say which GPU a call is for, allowed: 0.8 or later"));
        }
        let mut arguments = DeviceArguments { head: head::<DeviceArguments>(), context: self.raw.context, number: 0 };
        // SAFETY: the size of the table shows that it has this function; the arguments live as long as this call.
        let error = unsafe { (api.get_device)(&mut arguments) };
        self.succeeded(error, "device")?;
        Ok(arguments.number)
    }

    fn succeeded(&self, error: *mut RawError, what: &str) -> PyResult<()> {
        if error.is_null() {
            return Ok(());
        }
        let mut arguments = DestroyArguments { head: head::<DestroyArguments>(), error };
        // SAFETY: an error that XLA returns belongs to its caller, who destroys it once.
        unsafe { ((*self.raw.api).destroy_error)(&mut arguments) };
        Err(wrong(format!("XLA does not give the {what} of the call")))
    }
}

/// # Safety
/// `text` points to a `Text` that outlives `'a`, and so do its bytes.
unsafe fn bytes<'a>(text: *const Text) -> &'a [u8] {
    // SAFETY: guaranteed by the caller; the pointer of an empty text may be null.
    unsafe {
        match (*text).len {
            0 => &[],
            len => from_raw_parts((*text).data, len),
        }
    }
}

fn array(name: &str, buffer: &RawBuffer, place: Place, writable: bool) -> PyResult<Array> {
    let (code, bits) = match buffer.dtype {
        1 => (6, 8),
        kind @ 2..=5 => (0, 8 << (kind - 2)),
        kind @ 6..=9 => (1, 8 << (kind - 6)),
        10 => (2, 16),
        11 => (2, 32),
        12 => (2, 64),
        16 => (4, 16),
        _ => (3, 0),
    };
    let rank = usize::try_from(buffer.rank).unwrap_or(usize::MAX);
    let mut array = Array::new(name, buffer.data.expose_provenance(), Element { code, bits }, rank, place, writable)?;
    for axis in 0..rank {
        // SAFETY: the list has `rank` entries and lives until the call returns.
        let size = unsafe { *buffer.dims.add(axis) };
        // XLA gives buffers in row-major order.
        array.set(axis, usize::try_from(size).unwrap_or(0), None);
    }
    Ok(array)
}

/// Answers a call of XLA: executes `work`, or tells the version of this interface if XLA asks for it.
///
/// # Safety
/// `call` points to a structure as in the header, which nothing writes to until the function returns.
pub unsafe fn answer(call: *mut RawCall, work: impl FnOnce(&XlaCall<'_>) -> PyResult<()>) -> *mut RawError {
    // SAFETY: guaranteed by the caller.
    let raw = unsafe { &*call };
    let mut extension = raw.head.next;
    while !extension.is_null() {
        // SAFETY: the list of extensions is valid, and one of this kind is a `MetadataExtension`, whose metadata XLA lets us
        // write.
        unsafe {
            if (*extension).kind == METADATA {
                let metadata = (*extension.cast::<MetadataExtension>()).metadata;
                ((*metadata).version.major, (*metadata).version.minor) = version(raw);
                return std::ptr::null_mut();
            }
            extension = (*extension).next;
        }
    }
    if raw.stage != EXECUTE {
        return std::ptr::null_mut();
    }
    let (message, code) = match catch_unwind(AssertUnwindSafe(|| work(&XlaCall { raw }))) {
        Ok(Ok(())) => return std::ptr::null_mut(),
        Ok(Err(error)) => (message(&error), INVALID_ARGUMENT),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
            (text.to_string(), INTERNAL)
        }
    };
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    let mut arguments = ErrorArguments { head: head::<ErrorArguments>(), message: message.as_ptr(), code };
    // SAFETY: the table of functions lives as long as the process; XLA copies the message.
    unsafe { ((*raw.api).create_error)(&mut arguments) }
}

/// The version to tell: XLA's own if it reveals it, because versions since 0.1 differ in fields that are not used here.
fn version(raw: &RawCall) -> (c_int, c_int) {
    // SAFETY: the table of functions lives as long as the process, and begins with its version.
    match unsafe { raw.api.as_ref() } {
        Some(api) if api.version.major == VERSION.0 => (api.version.major, api.version.minor),
        _ => VERSION,
    }
}

fn message(error: &PyErr) -> String {
    // The text of an exception belongs to Python. No thread that waits for this call holds the GIL.
    Python::try_attach(|py| error.value(py).to_string()).unwrap_or_else(|| "Python is shutting down".into())
}
