//! Attention under `jax.jit`, `jax.grad` and `jax.vmap`: the functions that XLA calls in compiled programs.
//!
//! A call carries the description as its attribute `description`, and buffers: q, k, v and the tensors that the
//! description names, for backward also o, lse, d_o and perhaps d_lse. `fulgurite/jax.py` writes such calls.

use crate::array::{Array, Element, Place, refuse, wrong};
use crate::cuda::{self, Caller};
use crate::description::{Description, Role};
use crate::dispatch::Call;
use crate::xla::{self, RawCall, RawError, XlaCall};
use fulgurite::gpu::ResultType;
use fulgurite::{DeviceId, DeviceMemory, TensorView};
use fulgurite_core::lru::Lru;
use pyo3::ffi::c_str;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Number of descriptions that are kept parsed; the least recently used one is dropped first.
const MAX_DESCRIPTIONS: usize = 512;

/// The parsed description of this text. Compiled programs may outlive every Python object, so this cache is not Python's.
fn description(text: &str) -> PyResult<Arc<Description>> {
    type Known = Lru<(String, Arc<Description>)>;
    static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(|| Mutex::new(Lru::new(MAX_DESCRIPTIONS)));
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, found)) = known.find(|(key, _)| key == text) {
        return Ok(found.clone());
    }
    let made = Arc::new(Description::parse(text).map_err(wrong)?);
    known.insert((text.to_string(), made.clone()));
    Ok(made)
}

/// Splits the buffers of a call into q, k and v, one for each role of the description, and the rest.
fn split(description: &Description, arguments: Vec<Array>) -> PyResult<([Array; 3], Vec<Array>, Vec<Array>)> {
    let mut arguments = arguments.into_iter();
    let mut next = || arguments.next().ok_or_else(|| wrong("a call from XLA has too few buffers"));
    let rows = [next()?, next()?, next()?];
    let extras = description.roles.iter().map(|_| next()).collect::<PyResult<Vec<_>>>()?;
    Ok((rows, extras, arguments.collect()))
}

fn names(description: &Description) -> Vec<&str> {
    ["q", "k", "v"].into_iter().chain(description.roles.iter().map(Role::name)).collect()
}

/// The device of a call: host memory, or a GPU with the stream of the call.
fn place(call: &XlaCall<'_>, on_gpu: bool) -> PyResult<(Place, Option<Caller<'static, 'static>>)> {
    match on_gpu {
        false => Ok((Place::Host, None)),
        true => Ok((Place::Cuda(call.device()?), Some(Caller::Stream(call.stream()?)))),
    }
}

fn asked(call: &XlaCall<'_>) -> PyResult<Arc<Description>> {
    description(call.text("description").ok_or_else(|| wrong("a call from XLA has no attribute `description`"))?)
}

fn forward(call: &XlaCall<'_>, on_gpu: bool) -> PyResult<()> {
    let (description, (place, caller)) = (asked(call)?, place(call, on_gpu)?);
    let (rows, extras, _) = split(&description, call.arguments(&names(&description), place)?)?;
    let results = call.results(&["out", "lse"], place)?;
    let work = Call::of_arrays(&description, rows, extras)?;
    match caller {
        None => work.forward_on_host(&results[0], Some(&results[1])),
        Some(caller) => cuda::forward(&work.on_gpu(caller), &results[0], Some(&results[1]), ResultType::Input),
    }
}

fn backward(call: &XlaCall<'_>, on_gpu: bool) -> PyResult<()> {
    let (description, (place, caller)) = (asked(call)?, place(call, on_gpu)?);
    let mut names = names(&description);
    names.extend(["o", "lse", "d_o"]);
    if call.argument_count() > names.len() {
        names.push("d_lse");
    }
    let (rows, extras, saved) = split(&description, call.arguments(&names, place)?)?;
    let work = Call::of_arrays(&description, rows, extras)?;
    let want = work.gradients();
    let results = call.results(&want.iter().map(|(name, ..)| name.as_str()).collect::<Vec<_>>(), place)?;
    let saved = [saved.first(), saved.get(1), saved.get(2), saved.get(3)];
    match caller {
        None => work.backward_on_host(saved, &results),
        Some(caller) => work.backward_on_gpu(caller, saved, &results, ResultType::Input),
    }
}

/// Declares a function that XLA calls.
macro_rules! entry {
    ($name:ident, $work:expr, $on_gpu:literal) => {
        unsafe extern "C" fn $name(call: *mut RawCall) -> *mut RawError {
            // SAFETY: XLA calls the functions that are registered with it with such a structure.
            unsafe { xla::answer(call, |call| $work(call, $on_gpu)) }
        }
    };
}

entry!(forward_on_host, forward, false);
entry!(backward_on_host, backward, false);
entry!(forward_on_gpu, forward, true);
entry!(backward_on_gpu, backward, true);

/// The name of the capsules that `jax.ffi.register_ffi_target` takes.
const CAPSULE: &CStr = c_str!("xla._CUSTOM_CALL_TARGET");

/// The functions to register with JAX: `{platform: {name: capsule}}`.
pub fn targets(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    type Entry = unsafe extern "C" fn(*mut RawCall) -> *mut RawError;
    let all: [(&str, [(&str, Entry); 2]); 2] = [
        ("cpu", [("fulgurite_forward", forward_on_host), ("fulgurite_backward", backward_on_host)]),
        ("CUDA", [("fulgurite_forward", forward_on_gpu), ("fulgurite_backward", backward_on_gpu)]),
    ];
    let platforms = PyDict::new(py);
    for (platform, entries) in all {
        let functions = PyDict::new(py);
        for (name, entry) in entries {
            let address = NonNull::new(entry as *mut c_void).expect("bug in fulgurite: a function at address 0");
            // SAFETY: the address is that of a function, valid as long as the extension is loaded, which is to the end
            // of the process.
            functions.set_item(name, unsafe { PyCapsule::new_with_pointer(py, address, CAPSULE) }?)?;
        }
        platforms.set_item(platform, functions)?;
    }
    Ok(platforms)
}

/// Memory that arrays will have when a traced program runs. It has no contents.
#[derive(Debug)]
struct FutureMemory;

/// Where such memory lies, for checks that compare devices.
const TRACED: DeviceId = DeviceId { kind: "traced", number: 0 };

impl DeviceMemory for FutureMemory {
    fn device(&self) -> DeviceId {
        TRACED
    }
    fn address(&self) -> u64 {
        0
    }
    fn bytes(&self) -> u64 {
        i64::MAX as u64
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Checks types and shapes of a call whose arrays have no contents yet: q, k, v, then one for each role.
pub fn check(description: &Description, arrays: &[(String, Vec<usize>)]) -> PyResult<()> {
    let names = names(description);
    let made = names.iter().zip(arrays).map(|(name, (dtype, shape))| {
        // As on a GPU, where contents cannot be read.
        let place = Place::Cuda(0);
        let mut array = Array::new(name, 0, Element::named(dtype), shape.len(), place, false)?;
        shape.iter().enumerate().for_each(|(axis, &size)| array.set(axis, size, None));
        Ok(array)
    });
    let (rows, extras, _) = split(description, made.collect::<PyResult<Vec<_>>>()?)?;
    let problem = description.problem([&rows[0], &rows[1], &rows[2]], &extras)?;
    let views = names.iter().zip(rows.iter().chain(&extras)).map(|(name, array)| {
        TensorView::on_device(&FutureMemory, array.dtype(name)?, array.shape(), None)
            .map_err(|e| wrong(format!("`{name}`: {e}")))
    });
    // The lists of a block mask are checked when the program runs: which of them there must be depends on the device.
    if description.block_spec(&extras)?.is_some() {
        return Ok(());
    }
    let inputs = cuda::inputs_of(description, views)?;
    inputs.bind_on(&problem, TRACED).map(|_| ()).map_err(|e| refuse(e.into()))
}
