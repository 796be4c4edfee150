//! Where the tensors of a call lie, and how they become the arguments of a kernel.

use fulgurite_core::Layout;
use fulgurite_ptx::device::{Span, TensorSpan, Value};
use fulgurite_ptx::{Kernel, Number, divisor_values};
use std::collections::HashMap;

/// Bytes of a launch's counters, where the plan does not want more.
pub const COUNTERS: u64 = 8;

/// A tensor `[batch, sequence, heads, dim]` in a device's memory, strides in elements, the last axis contiguous. A packed
/// batch is one sequence here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Its memory, from the first element on.
    pub span: Span,
    /// Sizes.
    pub shape: [u64; 4],
    /// Elements from one to the next along the first three axes.
    pub strides: [u64; 3],
}

impl DeviceTensor {
    /// One that lies together.
    pub fn packed(span: Span, shape: [u64; 4]) -> DeviceTensor {
        let [_, s, h, d] = shape;
        DeviceTensor { span, shape, strides: [s * h * d, h * d, d] }
    }

    /// `count` rows from the `first` on.
    pub(crate) fn rows(&self, first: u64, count: u64) -> DeviceTensor {
        let [b, _, h, d] = self.shape;
        // Elements are of 16 bits.
        DeviceTensor { span: self.span.from(first * self.strides[1] * 2), shape: [b, count, h, d], ..*self }
    }

    /// As the copy engine sees it: element, row, head, batch.
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

    /// Rows from one sequence to the next, where that is a whole number.
    pub(crate) fn step(&self) -> Option<u64> {
        let ([b, s, ..], [batch, row, _]) = (self.shape, self.strides);
        match (b <= 1, row) {
            (true, _) => Some(s),
            (false, 0) => None,
            (false, row) => batch.is_multiple_of(row).then(|| batch / row),
        }
    }

    /// The same with memory that `any` has where there is nothing to read: every element is masked then.
    pub(crate) fn or(&self, any: &DeviceTensor) -> DeviceTensor {
        match self.shape.contains(&0) {
            true => DeviceTensor { shape: [1, 1, 1, any.shape[3]], ..*any },
            false => *self,
        }
    }

    /// As the copy engine sees it when sequences have lengths of their own: all rows of all sequences in one axis.
    pub(crate) fn ragged(&self, number: Number) -> Option<TensorSpan> {
        let ([b, s, h, d], [_, row, head]) = (self.shape, self.strides);
        let bytes = u64::from(number.bytes());
        let rows = b.saturating_sub(1) * self.step()? + s;
        Some(TensorSpan::ragged(self.span, number, [rows, h, d], [row * bytes, head * bytes]))
    }
}

/// An auxiliary tensor in a device's memory: the shape is the problem's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAux {
    /// Its memory, from the first element on.
    pub span: Span,
    /// Elements from one to the next along each axis.
    pub strides: Vec<u64>,
}

/// The lists of a block mask in a device's memory: i32, partial blocks first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceBlockLists {
    /// `[batch | 1, heads | 1, query blocks]` each.
    pub counts: [Span; 2],
    /// The same with one more axis of this many entries each.
    pub blocks: [Span; 2],
    /// Entries of a list.
    pub widths: [u32; 2],
}

/// The tensors of a call in a device's memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensors {
    /// q, k, v and o.
    pub rows: [DeviceTensor; 4],
    /// f32, contiguous, in the shape of the problem's LSE.
    pub lse: Span,
    /// [`COUNTERS`] bytes or what the plan wants, zeros before the first launch, and again after every one but for the
    /// second word, a count of blocks done again. Launches that may run at the same time need their own.
    pub counters: Span,
    /// What the plan wants, whatever it holds. Launches that may run at the same time need their own.
    pub scratch: Option<Span>,
    /// A logit for each head.
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
    /// Those that every call has.
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

/// Where each parameter of a kernel stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Slots(HashMap<String, usize>);

impl Slots {
    pub fn of(kernel: &Kernel) -> Slots {
        Slots(kernel.params.iter().enumerate().map(|(i, param)| (param.name.clone(), i)).collect())
    }
}

/// Pairs of the last of some bands of `order`.
pub(crate) fn rest(pairs: u64, order: u64) -> u64 {
    let order = order.max(1);
    pairs - pairs.saturating_sub(1) / order * order
}

/// Arguments by the names of their parameters; those that the kernel does not have are left out.
pub(crate) struct Arguments<'a> {
    slots: &'a Slots,
    values: Vec<Option<Value>>,
}

impl<'a> Arguments<'a> {
    pub fn new(slots: &'a Slots) -> Self {
        Arguments { slots, values: vec![None; slots.0.len()] }
    }
    pub fn add(&mut self, name: &str, value: Value) {
        if let Some(&slot) = self.slots.0.get(name) {
            self.values[slot] = Some(value);
        }
    }
    pub fn add_u32(&mut self, name: &str, n: u64) {
        self.add(name, Value::U32(n as u32));
    }
    /// The three parameters of a number that is divided by.
    pub fn divisor(&mut self, [name, magic, shift]: [&str; 3], d: u64) {
        for (name, value) in [name, magic, shift].into_iter().zip(divisor_values(d as u32)) {
            self.add(name, value);
        }
    }
    /// Tiles of equal sequences: `tiles` of each pair of head and sequence, in bands of `order` pairs, and the `last` of them
    /// together.
    pub fn bands(&mut self, [tiles, pairs]: [u64; 2], [order, last]: [u64; 2]) {
        let bands = (pairs - last) / order.max(1);
        for (name, n) in [("m_tiles", tiles), ("tiles", tiles * pairs), ("pairs", pairs), ("bands", bands)] {
            self.add_u32(name, n);
        }
        self.divisor(["band", "band_magic", "band_shift"], order * tiles);
        self.divisor(["order", "order_magic", "order_shift"], order);
        self.divisor(["last", "last_magic", "last_shift"], last);
    }
    /// Auxiliary tensors of these shapes.
    pub fn aux<'b>(&mut self, all: impl Iterator<Item = &'b DeviceAux>, shapes: &[Vec<usize>]) {
        for (i, (aux, shape)) in all.zip(shapes).enumerate() {
            self.add(&format!("aux{i}"), Value::Pointer(aux.span));
            for (axis, (&stride, &n)) in aux.strides.iter().zip(shape).enumerate() {
                self.add_u32(&format!("aux{i}_last{axis}"), (n as u64).saturating_sub(1));
                self.add_u32(&format!("aux{i}_stride{axis}"), stride);
            }
        }
    }
    /// Sequences with lengths of their own: how many, the rows of q and k, offsets and used lengths.
    pub fn sequences(&mut self, layout: Layout, cu_seqlens: Option<[Span; 2]>, used: [Option<Span>; 2]) {
        let (batch, q_rows, k_rows) = match layout {
            Layout::Dense { batch, q_len, k_len } => (batch, q_len, k_len),
            Layout::Packed(p) => (p.batch, p.total_q, p.total_k),
        };
        for (name, n) in [("batch", batch), ("q_rows", q_rows), ("k_rows", k_rows)] {
            self.add_u32(name, n as u64);
        }
        for (name, span) in ["cu_seqlens_q", "cu_seqlens_k"].into_iter().zip(cu_seqlens.into_iter().flatten()) {
            self.add(name, Value::Pointer(span));
        }
        for (name, span) in ["used_q", "used_k"].into_iter().zip(used) {
            span.into_iter().for_each(|span| self.add(name, Value::Pointer(span)));
        }
    }
    /// In the kernel's order.
    pub fn finish(self) -> Vec<Value> {
        let name = |slot: usize| self.slots.0.iter().find(|(_, at)| **at == slot).map(|(name, _)| name.clone());
        let all = self.values.into_iter().enumerate();
        all.map(|(slot, value)| value.unwrap_or_else(|| panic!("bug in fulgurite: no argument for {:?}", name(slot))))
            .collect()
    }
}
