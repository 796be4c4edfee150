//! Tensors of a call in device memory, as callers give them and as TMA sees them.

use fulgurite_ptx::Number;
use fulgurite_ptx::device::{Span, TensorSpan};

/// Bytes of a launch's counters, unless the plan asks for more.
pub const COUNTERS: u64 = 8;

/// A tensor `[batch, sequence, heads, dim]` in device memory, strides in elements, the last axis contiguous. A packed
/// batch is one sequence here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Memory that starts at the first element.
    pub span: Span,
    /// Elements along each axis.
    pub shape: [u64; 4],
    /// Strides of the first three axes, in elements.
    pub strides: [u64; 3],
}

impl DeviceTensor {
    /// A contiguous tensor.
    pub fn packed(span: Span, shape: [u64; 4]) -> DeviceTensor {
        let [_, s, h, d] = shape;
        DeviceTensor { span, shape, strides: [s * h * d, h * d, d] }
    }

    /// `count` rows, starting at row `first`.
    pub(crate) fn rows(&self, first: u64, count: u64) -> DeviceTensor {
        let [b, _, h, d] = self.shape;
        // Elements have 16 bits.
        DeviceTensor { span: self.span.from(first * self.strides[1] * 2), shape: [b, count, h, d], ..*self }
    }

    /// The tensor for TMA, with axes element, row, head, batch.
    pub(crate) fn tensor(&self, number: Number) -> TensorSpan {
        let ([b, s, h, d], [batch, row, head]) = (self.shape, self.strides);
        let bytes = u64::from(number.bytes());
        TensorSpan {
            span: self.span,
            number,
            extent: vec![d, s, h, b],
            strides: [row, head, batch].map(|stride| stride * bytes).to_vec(),
            ragged: None,
        }
    }

    /// Rows from one sequence to the next, if that is a whole number.
    pub(crate) fn step(&self) -> Option<u64> {
        let ([b, s, ..], [batch, row, _]) = (self.shape, self.strides);
        match (b <= 1, row) {
            (true, _) => Some(s),
            (false, 0) => None,
            (false, row) => batch.is_multiple_of(row).then(|| batch / row),
        }
    }

    /// This tensor, or if it is empty one element of `any`: a kernel needs a valid address even if it masks every element.
    pub(crate) fn or(&self, any: &DeviceTensor) -> DeviceTensor {
        match self.shape.contains(&0) {
            true => DeviceTensor { shape: [1, 1, 1, any.shape[3]], ..*any },
            false => *self,
        }
    }

    /// The tensor of a ragged batch for TMA, with all rows of all sequences in one axis.
    pub(crate) fn ragged(&self, number: Number) -> Option<TensorSpan> {
        let ([b, s, h, d], [_, row, head]) = (self.shape, self.strides);
        let bytes = u64::from(number.bytes());
        let rows = b.saturating_sub(1) * self.step()? + s;
        Some(TensorSpan::ragged(self.span, number, [rows, h, d], [row * bytes, head * bytes]))
    }
}

/// An auxiliary tensor in device memory. Its shape is the problem's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAux {
    /// Memory that starts at the first element.
    pub span: Span,
    /// Strides of all axes, in elements.
    pub strides: Vec<u64>,
}

/// The lists of a block mask in device memory: i32, the list of partial blocks before the list of full ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceBlockLists {
    /// Blocks listed for each row of blocks: `[batch | 1, heads | 1, query blocks]`.
    pub counts: [Span; 2],
    /// Listed blocks: `[batch | 1, heads | 1, query blocks, width]`.
    pub blocks: [Span; 2],
    /// Width of each list, in entries.
    pub widths: [u32; 2],
}

/// The tensors of a forward call in device memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensors {
    /// q, k, v and o.
    pub rows: [DeviceTensor; 4],
    /// LSE: f32, contiguous, in the shape of the problem's LSE.
    pub lse: Span,
    /// Counters, with as many bytes as the plan asks for, zero before the first launch. Every launch leaves them zero,
    /// except for the second word: it counts key blocks that were computed twice. Concurrent launches need separate
    /// counters.
    pub counters: Span,
    /// Workspace with as many bytes as the plan asks for, with any content. Concurrent launches need separate
    /// workspaces.
    pub scratch: Option<Span>,
    /// One logit per head.
    pub sinks: Option<Span>,
    /// Offsets of packed sequences in q, and in k and v: i32, `[batch + 1]`.
    pub cu_seqlens: Option<[Span; 2]>,
    /// Queries and keys in use: i32, `[batch]`.
    pub used: [Option<Span>; 2],
    /// Auxiliary tensors in the order of the problem.
    pub aux: Vec<DeviceAux>,
    /// The lists of a block mask.
    pub lists: Option<DeviceBlockLists>,
}

impl Tensors {
    /// The tensors that every call has.
    pub fn new(rows: [DeviceTensor; 4], lse: Span, counters: Span) -> Tensors {
        Tensors {
            rows,
            lse,
            counters,
            scratch: None,
            sinks: None,
            cu_seqlens: None,
            used: [None; 2],
            aux: Vec::new(),
            lists: None,
        }
    }
}

/// Pairs of the last band, if all others have `order`.
pub(crate) fn rest(pairs: u64, order: u64) -> u64 {
    let order = order.max(1);
    pairs - pairs.saturating_sub(1) / order * order
}
