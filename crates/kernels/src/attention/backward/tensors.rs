//! The tensors of a call in device memory.

use crate::attention::forward::plan::{DeviceAux, DeviceBlockLists, DeviceTensor};
use crate::params::{Lens, Params};
use crate::parts::repack::{Direction, Named};
use fulgurite_ptx::Val;
use fulgurite_ptx::device::Span;

/// The tensors of a call in device memory. The LSE and its gradient are f32, contiguous, in the shape of the problem's LSE.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensors {
    /// Queries.
    pub q: DeviceTensor,
    /// Keys.
    pub k: DeviceTensor,
    /// Values.
    pub v: DeviceTensor,
    /// Output of forward.
    pub o: DeviceTensor,
    /// LSE of forward.
    pub lse: Span,
    /// Gradient of o.
    pub d_o: DeviceTensor,
    /// Gradient of the LSE, if it has one.
    pub d_lse: Option<Span>,
    /// Gradient of q, a result.
    pub d_q: DeviceTensor,
    /// Gradient of k, a result.
    pub d_k: DeviceTensor,
    /// Gradient of v, a result.
    pub d_v: DeviceTensor,
    /// Sinks and their gradients, `[heads]`, f32, if the problem has sinks.
    pub sinks: Option<[Span; 2]>,
    /// First rows of packed sequences in q, and in k and v: i32, `[batch + 1]`.
    pub cu_seqlens: Option<[Span; 2]>,
    /// Queries and keys in use: i32, `[batch]`.
    pub used: [Option<Span>; 2],
    /// Auxiliary tensors in the order of the problem.
    pub aux: Vec<DeviceAux>,
    /// Gradients of auxiliary tensors, f32 and contiguous; `None` for a tensor that wants none.
    pub d_aux: Vec<Option<Span>>,
    /// The lists of a block mask.
    pub lists: Option<DeviceBlockLists>,
}

impl Tensors {
    /// The tensors that every call has: inputs, output and LSE of forward, the gradient of the output, and the results.
    pub fn new(
        [q, k, v, o]: [DeviceTensor; 4],
        lse: Span,
        d_o: DeviceTensor,
        [d_q, d_k, d_v]: [DeviceTensor; 3],
    ) -> Tensors {
        let (d_lse, sinks, cu_seqlens, used, lists) = (None, None, None, [None; 2], None);
        let (aux, d_aux) = (Vec::new(), Vec::new());
        Tensors { q, k, v, o, lse, d_o, d_lse, d_q, d_k, d_v, sinks, cu_seqlens, used, aux, d_aux, lists }
    }
}

/// The tensors of rows by name, each with the direction of its copy if it needs one.
pub(crate) fn named(tensors: &Tensors) -> [Named; 8] {
    let &Tensors { q, k, v, o, d_o, d_q, d_k, d_v, .. } = tensors;
    let input = |name, placed| (name, placed, Direction::Pack);
    let result = |name, placed| (name, placed, Direction::Unpack);
    [
        input("q", q),
        input("k", k),
        input("v", v),
        input("o", o),
        input("d_o", d_o),
        result("d_q", d_q),
        result("d_k", d_k),
        result("d_v", d_v),
    ]
}

/// The tensors of rows as threads address them, and the rows of equal sequences that hold something.
#[derive(Debug, Clone)]
pub(crate) struct ThreadRows {
    /// q, k, v, d_o, d_k, d_v.
    pub tensors: [DeviceTensor; 6],
    /// First and past-the-last key that some query sees, and the same for queries. The values of others must not show, even
    /// multiplied by a probability of 0.
    pub seen: [[u32; 2]; 2],
    /// Keys of a sequence.
    pub keys: u32,
}

/// Arguments of a tensor that threads read or write by pointer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowArgs {
    pub span: Span,
    /// Strides of batch, row and head, in words of 32 bits: pairs of 16-bit elements.
    strides: [u32; 3],
}

impl RowArgs {
    pub fn new(tensor: &DeviceTensor) -> RowArgs {
        RowArgs { span: tensor.span, strides: tensor.strides.map(|stride| (stride / 2) as u32) }
    }

    /// Of an f32 tensor: a word of 32 bits is one element.
    pub fn of_words(tensor: &DeviceTensor) -> RowArgs {
        RowArgs { span: tensor.span, strides: tensor.strides.map(|stride| stride as u32) }
    }

    /// Declares the strides of a tensor.
    pub fn declare_strides<'k, C: 'static>(
        p: &Params<'k, C>,
        name: &str,
        args: impl Lens<C, RowArgs>,
    ) -> [Val<'k, u32>; 3] {
        let stride = |(axis, i): (&str, usize)| p.u32(&format!("{name}_{axis}"), move |call| args(call).strides[i]);
        [("batch", 0), ("row", 1), ("head", 2)].map(stride)
    }
}
