//! Calls whose arrays lie on a GPU: they stay there, and the kernel goes on the caller's stream.

use crate::array::{Array, Place, wrong};
use crate::description::{BLOCK_LISTS, Description, MAX_PROBLEMS, Role};
use crate::foreign;
use fulgurite::gpu::{
    self, Attention, DeviceAux, DeviceBlockLists, DeviceTensor, Gpu, GpuError, Gradient, GradientTensors, Options,
    Order, Span, Stream, Tensors, Wish,
};
use fulgurite::{DType, Problem};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A GPU, and memory on it for an LSE that nobody asked for. What was too little stays: recorded launches write it.
pub struct Device {
    gpu: Gpu,
    unwanted: Mutex<Vec<gpu::Buffer>>,
}

fn refuse(error: GpuError) -> PyErr {
    match error {
        GpuError::Device(_) => PyRuntimeError::new_err(error.to_string()),
        _ => wrong(error.to_string()),
    }
}

/// The GPU with this number, opened the first time. Compiled kernels are kept in the user's cache folder.
fn device(number: i32) -> PyResult<Arc<Device>> {
    static OPEN: Mutex<Vec<(i32, Arc<Device>)>> = Mutex::new(Vec::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, device)) = open.iter().find(|(known, _)| *known == number) {
        return Ok(device.clone());
    }
    let options = Options {
        cache: gpu::default_cache_dir(&|name| std::env::var_os(name)),
        ptxas: std::env::var_os("PTXAS").map(Into::into),
        ..Options::default()
    };
    let gpu = Gpu::open(number.max(0) as u32, options).map_err(refuse)?;
    let device = Arc::new(Device { gpu, unwanted: Mutex::default() });
    open.push((number, device.clone()));
    Ok(device)
}

impl Device {
    /// Memory for an LSE that nobody reads: several launches may write it at once.
    fn unwanted(&self, bytes: u64) -> Result<Span, GpuError> {
        let mut unwanted = self.unwanted.lock().unwrap_or_else(PoisonError::into_inner);
        match unwanted.last().map(gpu::Buffer::span) {
            Some(span) if span.bytes() >= bytes => Ok(span),
            _ => {
                // At least twice what there was: all that stays is less than the last.
                let fresh = self.gpu.device().allocate(bytes.next_power_of_two().max(1 << 20))?;
                let span = fresh.span();
                unwanted.push(fresh);
                Ok(span)
            }
        }
    }
}

/// What was compiled for the problems of a description, by problem and GPU (and whether the LSE is read, or has a gradient).
/// Each holds its problem, so that its address stays its own.
#[derive(Default)]
pub struct Compiled {
    forward: Mutex<HashMap<(usize, i32, bool), Known<Attention>>>,
    backward: Mutex<HashMap<(usize, i32, bool), Known<Gradient>>>,
}

type Known<T> = (Arc<Problem>, Arc<Device>, Arc<T>);

/// Enters what is known of a problem. With too many all are forgotten: their kernels stay with the GPU, and what is recorded
/// keeps its memory.
fn remember<T>(all: &mut HashMap<(usize, i32, bool), Known<T>>, key: (usize, i32, bool), known: Known<T>) {
    if all.len() >= MAX_PROBLEMS {
        all.clear();
    }
    all.insert(key, known);
}

impl Compiled {
    fn get(
        &self,
        py: Python<'_>,
        description: &Description,
        problem: &Arc<Problem>,
        (sinks, lse): (Option<DType>, bool),
        number: i32,
    ) -> PyResult<(Arc<Device>, Arc<Attention>)> {
        let key = (Arc::as_ptr(problem) as usize, number, lse);
        let all = || self.forward.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device, attention)) = all().get(&key) {
            return Ok((device.clone(), attention.clone()));
        }
        let wish = Wish { sinks, rescale: description.rescale, config: description.tuning, lse };
        let (device, attention) = py.detach(|| -> PyResult<_> {
            let device = device(number)?;
            let attention = device.gpu.attention(problem, &wish).map_err(refuse)?;
            Ok((device, Arc::new(attention)))
        })?;
        remember(&mut all(), key, (problem.clone(), device.clone(), attention.clone()));
        Ok((device, attention))
    }

    fn gradient(
        &self,
        py: Python<'_>,
        problem: &Arc<Problem>,
        (d_lse, order): (bool, Order),
        number: i32,
    ) -> PyResult<(Arc<Device>, Arc<Gradient>)> {
        let key = (Arc::as_ptr(problem) as usize, number, d_lse);
        let all = || self.backward.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device, gradient)) = all().get(&key) {
            return Ok((device.clone(), gradient.clone()));
        }
        let (device, gradient) = py.detach(|| -> PyResult<_> {
            let device = device(number)?;
            let gradient = device.gpu.gradient(problem, d_lse, order).map_err(refuse)?;
            Ok((device, Arc::new(gradient)))
        })?;
        remember(&mut all(), key, (problem.clone(), device.clone(), gradient.clone()));
        Ok((device, gradient))
    }
}

/// Refuses an array of another shape or type than the problem's.
fn fits(arg: &str, array: &Array, shape: &[usize], dtype: DType) -> PyResult<()> {
    if array.shape() != shape {
        return Err(wrong(format!("`{arg}` has shape {:?}, allowed: {shape:?}", array.shape())));
    }
    let got = array.dtype(arg)?;
    if got != dtype {
        return Err(wrong(format!("`{arg}` is {got}, allowed: {dtype}; convert it")));
    }
    Ok(())
}

/// Memory and strides of an array.
fn placed(device: &Device, arg: &str, array: &Array) -> PyResult<(Span, Vec<u64>)> {
    let (strides, address, bytes) = array.memory(arg)?;
    // SAFETY: the contract of the extension (`memory`): the caller's array lies on this GPU and lives until work that its own
    // library puts on the same stream later.
    let span = unsafe { device.gpu.cuda().memory(address as u64, bytes as u64) };
    Ok((span, strides.into_iter().map(|n| n as u64).collect()))
}

/// An array that must be contiguous, as one without elements is.
fn contiguous(device: &Device, arg: &str, array: &Array) -> PyResult<Span> {
    let (span, strides) = placed(device, arg, array)?;
    let (mut want, empty) = (1, array.shape().contains(&0));
    for (&n, &stride) in array.shape().iter().zip(&strides).rev() {
        if n > 1 && stride != want && !empty {
            return Err(wrong(format!("`{arg}` has strides {strides:?}, allowed: contiguous; call .contiguous()")));
        }
        want *= n as u64;
    }
    Ok(span)
}

/// A tensor of rows with four axes: a packed batch is one sequence.
fn rows(device: &Device, arg: &str, array: &Array) -> PyResult<DeviceTensor> {
    let (span, strides) = placed(device, arg, array)?;
    let shape: Vec<u64> = array.shape().iter().map(|&n| n as u64).collect();
    let last = strides.len() - 1;
    if strides[last] != 1 && shape[last] > 1 {
        return Err(wrong(format!("`{arg}` has stride {} on its last axis, allowed: 1; copy it", strides[last])));
    }
    // An axis of one element may have any stride, and the copy engine wants one that it can take.
    let one = shape[last].next_multiple_of(8);
    let stride = |axis: usize| if shape[axis] == 1 { one } else { strides[axis] };
    match last {
        2 => Ok(DeviceTensor { span, shape: [1, shape[0], shape[1], shape[2]], strides: [one, stride(0), stride(1)] }),
        _ => Ok(DeviceTensor {
            span,
            shape: [shape[0], shape[1], shape[2], shape[3]],
            strides: [stride(0), stride(1), stride(2)],
        }),
    }
}

/// The GPU that an array lies on.
pub fn number(array: &Array) -> Option<i32> {
    match array.place() {
        Place::Cuda(number) => Some(number),
        _ => None,
    }
}

/// A call whose arrays lie on a GPU.
pub struct Call<'a, 'py> {
    pub description: &'a Description,
    pub problem: &'a Arc<Problem>,
    /// The object behind q, whose library says which stream it works on.
    pub object: &'a Bound<'py, PyAny>,
    /// q, k and v.
    pub rows: [&'a Array; 3],
    pub extras: &'a [Array],
}

/// Offsets of q and of k, and used lengths of both.
type Lengths = (Option<[Span; 2]>, [Option<Span>; 2]);

impl Call<'_, '_> {
    fn find(&self, role: Role) -> Option<&Array> {
        self.description.roles.iter().zip(self.extras).find(|(other, _)| **other == role).map(|(_, array)| array)
    }

    fn integers(&self, device: &Device, role: Role, n: usize) -> PyResult<Option<Span>> {
        let name = role.name().to_string();
        let Some(array) = self.find(role) else { return Ok(None) };
        fits(&name, array, &[n], DType::I32)?;
        contiguous(device, &name, array).map(Some)
    }

    /// Offsets of packed sequences, and used lengths.
    fn lengths(&self, device: &Device) -> PyResult<Lengths> {
        let batch = self.problem.batch();
        let cu_seqlens =
            match (self.integers(device, Role::CuQ, batch + 1)?, self.integers(device, Role::CuK, batch + 1)?) {
                (Some(q), Some(k)) => Some([q, k]),
                _ => None,
            };
        Ok((cu_seqlens, [self.integers(device, Role::UsedQ, batch)?, self.integers(device, Role::UsedK, batch)?]))
    }

    /// Auxiliary tensors, in the order of the problem.
    fn aux(&self, device: &Device) -> PyResult<Vec<DeviceAux>> {
        let mut all = Vec::new();
        for spec in self.problem.aux() {
            let named = |role: &Role| matches!(role, Role::Aux { name, .. } if **name == *spec.name);
            let mut roles = self.description.roles.iter().zip(self.extras);
            let array = roles.find(|(role, _)| named(role)).map(|(_, array)| array);
            let array = array.ok_or_else(|| wrong(format!("`{}` is missing", spec.name)))?;
            fits(&spec.name, array, &spec.shape, spec.dtype)?;
            let (span, strides) = placed(device, &spec.name, array)?;
            if let Some(stride) = strides.iter().find(|n| **n > u64::from(u32::MAX)) {
                return Err(wrong(format!("`{}` has a stride of {stride}, allowed: below 2^32", spec.name)));
            }
            all.push(DeviceAux { span, strides });
        }
        Ok(all)
    }
}

/// Computes o, and the LSE where it is asked for, on the stream that the library of q works on.
pub fn forward(call: &Call<'_, '_>, o: &Array, lse: Option<&Array>) -> PyResult<()> {
    let &Call { description, problem, object, rows: [q, k, v], extras } = call;
    let py = object.py();
    let number = number(q).expect("bug in fulgurite: q lies on a GPU");
    let dtype = problem.dtype();
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    for ((arg, array), shape) in [("q", q), ("k", k), ("v", v), ("out", o)].into_iter().zip(&shapes) {
        fits(arg, array, shape, dtype)?;
    }
    let sinks = call.find(Role::Sinks);
    let sink_type = sinks.map(|array| array.dtype("sinks")).transpose()?;
    let (device, attention) = description.compiled.get(py, description, problem, (sink_type, lse.is_some()), number)?;
    let lse_span = match lse {
        Some(array) => contiguous(&device, "lse", array)?,
        None => device.unwanted(4 * problem.lse_shape().iter().product::<usize>() as u64).map_err(refuse)?,
    };
    let rows = [rows(&device, "q", q)?, rows(&device, "k", k)?, rows(&device, "v", v)?, rows(&device, "out", o)?];
    let mut tensors = Tensors::new(rows, lse_span, Span::new(0, 0));
    if let Some(array) = sinks {
        fits("sinks", array, &[problem.q_heads()], array.dtype("sinks")?)?;
        tensors.sinks = Some(contiguous(&device, "sinks", array)?);
    }
    (tensors.cu_seqlens, tensors.used) = call.lengths(&device)?;
    tensors.aux = call.aux(&device)?;
    if problem.blocks().is_some() {
        tensors.lists = Some(lists(&device, description, problem, extras)?);
    }
    on_stream(&device, object, number, |stream| device.gpu.forward(&attention, &mut tensors, stream))
}

/// Puts work on the stream that the library of an object works on. One that does not tell it cannot wait for ours: its
/// results are done before it gets them.
fn on_stream(
    device: &Device,
    object: &Bound<'_, PyAny>,
    number: i32,
    work: impl FnOnce(Stream<'_>) -> Result<(), GpuError>,
) -> PyResult<()> {
    let stream = foreign::current_stream(object, number)?;
    // SAFETY: the handle is the stream that the object's library works on, on this GPU, and it lives during the call.
    let current = stream.map_or(Stream::default(), |handle| unsafe { device.gpu.cuda().stream(handle) });
    work(current).map_err(refuse)?;
    match stream {
        Some(_) => Ok(()),
        None => device.gpu.device().synchronize(Stream::default()).map_err(|e| refuse(e.into())),
    }
}

/// Fills the gradients of q, k, v, sinks and auxiliary tensors on the stream that the library of q works on.
pub fn backward(
    call: &Call<'_, '_>,
    [o, lse, d_o]: [&Array; 3],
    d_lse: Option<&Array>,
    gradients: &[Array],
) -> PyResult<()> {
    let &Call { description, problem, object, rows: [q, k, v], extras } = call;
    let py = object.py();
    let number = number(q).expect("bug in fulgurite: q lies on a GPU");
    let [d_q, d_k, d_v, others @ ..] = gradients else {
        return Err(wrong("gradients of q, k and v are wanted"));
    };
    let (device, gradient) =
        description.compiled.gradient(py, problem, (d_lse.is_some(), description.order), number)?;
    // In the order of the roles: sinks and auxiliary tensors that want a gradient.
    let wanted = |role: &Role| matches!(role, Role::Sinks | Role::Aux { grad: true, .. });
    let mut sinks = None;
    let mut d_aux: Vec<Option<Span>> = problem.aux().iter().map(|_| None).collect();
    let roles = description.roles.iter().zip(extras).filter(|(role, _)| wanted(role));
    for ((role, array), gradient) in roles.zip(others) {
        let arg = format!("d_{}", role.name());
        fits(&arg, gradient, array.shape(), DType::F32)?;
        if gradient.place() != q.place() {
            let (got, want) = (gradient.place(), q.place());
            return Err(wrong(format!("`{arg}` is on {got}, `q` on {want}, allowed: one device")));
        }
        let room = contiguous(&device, &arg, gradient)?;
        match problem.aux().iter().position(|spec| *spec.name == *role.name()) {
            Some(i) if *role != Role::Sinks => d_aux[i] = Some(room),
            _ => {
                fits("sinks", array, &[problem.q_heads()], DType::F32)?;
                sinks = Some([contiguous(&device, "sinks", array)?, room]);
            }
        }
    }
    let shapes = [problem.q_shape(), problem.k_shape(), problem.v_shape(), problem.o_shape()];
    let of_rows = [("q", q, 0), ("k", k, 1), ("v", v, 2), ("o", o, 3), ("d_o", d_o, 3)];
    let results = [("d_q", d_q, 0), ("d_k", d_k, 1), ("d_v", d_v, 2)];
    for (arg, array, shape) in of_rows.into_iter().chain(results) {
        fits(arg, array, &shapes[shape], problem.dtype())?;
        if array.place() != q.place() {
            return Err(wrong(format!("`{arg}` is on {}, `q` on {}, allowed: one device", array.place(), q.place())));
        }
    }
    for (arg, array) in [("lse", lse)].into_iter().chain(d_lse.map(|array| ("d_lse", array))) {
        fits(arg, array, &problem.lse_shape(), DType::F32)?;
    }
    let inputs = [rows(&device, "q", q)?, rows(&device, "k", k)?, rows(&device, "v", v)?, rows(&device, "o", o)?];
    let results = [rows(&device, "d_q", d_q)?, rows(&device, "d_k", d_k)?, rows(&device, "d_v", d_v)?];
    let (cu_seqlens, used) = call.lengths(&device)?;
    let tensors = GradientTensors {
        d_lse: d_lse.map(|array| contiguous(&device, "d_lse", array)).transpose()?,
        sinks,
        cu_seqlens,
        used,
        aux: call.aux(&device)?,
        d_aux,
        lists: problem.blocks().map(|_| lists(&device, description, problem, extras)).transpose()?,
        ..GradientTensors::new(inputs, contiguous(&device, "lse", lse)?, rows(&device, "d_o", d_o)?, results)
    };
    on_stream(&device, object, number, |stream| device.gpu.backward(&gradient, &tensors, stream))
}

/// The four lists of a block mask, as they lie.
fn lists(
    device: &Device,
    description: &Description,
    problem: &Problem,
    extras: &[Array],
) -> PyResult<DeviceBlockLists> {
    let spec = problem.blocks().expect("bug in fulgurite: the problem has blocks");
    let [q_blocks, k_blocks] = spec.blocks(problem.max_q_len(), problem.max_k_len());
    let counts = [spec.batch, spec.heads, q_blocks];
    let mut spans = Vec::with_capacity(4);
    for (i, name) in BLOCK_LISTS.into_iter().enumerate() {
        let found = description.roles.iter().zip(extras).find(|(role, _)| **role == Role::Blocks(i));
        let (_, array) =
            found.ok_or_else(|| wrong(format!("`{name}` is missing, a block mask on a GPU has all four lists")))?;
        let shape = if i % 2 == 0 { counts.to_vec() } else { [&counts[..], &[k_blocks]].concat() };
        fits(name, array, &shape, DType::I32)?;
        spans.push(contiguous(device, name, array)?);
    }
    Ok(DeviceBlockLists { counts: [spans[0], spans[2]], blocks: [spans[1], spans[3]], widths: [k_blocks as u32; 2] })
}
