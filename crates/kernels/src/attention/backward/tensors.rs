//! Where the tensors of a call lie.

use crate::attention::forward::plan::{DeviceAux, DeviceBlockLists, DeviceTensor};
use crate::parts::repack::{Direction, Named};
use fulgurite_ptx::device::Span;

/// Where the tensors of a call lie. The LSE and its gradient are f32, contiguous, in the shape of the problem's LSE.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensors {
    /// Inputs of forward.
    pub q: DeviceTensor,
    /// The same.
    pub k: DeviceTensor,
    /// The same.
    pub v: DeviceTensor,
    /// Output of forward.
    pub o: DeviceTensor,
    /// LSE of forward.
    pub lse: Span,
    /// Gradient of o.
    pub d_o: DeviceTensor,
    /// Gradient of the LSE, where there is one.
    pub d_lse: Option<Span>,
    /// Results.
    pub d_q: DeviceTensor,
    /// The same.
    pub d_k: DeviceTensor,
    /// The same.
    pub d_v: DeviceTensor,
    /// Sinks and their gradients, `[heads]`, f32, where the problem has them.
    pub sinks: Option<[Span; 2]>,
    /// Offsets of packed sequences in q, and in k and v: i32, `[batch + 1]`.
    pub cu_seqlens: Option<[Span; 2]>,
    /// Queries and keys in use: i32, `[batch]`.
    pub used: [Option<Span>; 2],
    /// Auxiliary tensors in the order of the problem.
    pub aux: Vec<DeviceAux>,
    /// Their gradients, f32 and contiguous, for those that want one.
    pub d_aux: Vec<Option<Span>>,
    /// The lists of a block mask.
    pub lists: Option<DeviceBlockLists>,
}

impl Tensors {
    /// Those that every call has: inputs, output and LSE of forward, the gradient of the output, and room for the results.
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

/// The rows of a call, as they would be copied.
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

/// Strides of batch, row and head in pairs of elements.
pub(crate) fn pairs(placed: &DeviceTensor) -> [u64; 3] {
    placed.strides.map(|stride| stride / 2)
}
