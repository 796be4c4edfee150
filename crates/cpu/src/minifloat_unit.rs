//! Minifloat operands as a unit of the tile loop. Rows are expanded when a tile or a block needs them, and another unit
//! takes over from there. No operand is ever expanded as a whole.

use crate::memory::{Arena, halves_of};
use crate::simd::{Hold, Kernels, SoftmaxArgs, SoftmaxStats, Source};
use crate::tiles::{Context, KeyRows, MAX_LANES, Tile};
use crate::unit::{BufferSizes, Keys, Operands, Packer, Products, QueryRows, Scratch, Unit, source};
use fulgurite_core::format::{GroupFormat, Grouped};
use fulgurite_core::{DType, Data, TensorView, bf16, f16};

/// The source of an operand's values.
#[derive(Clone, Copy)]
pub(crate) enum Operand<'a> {
    /// The tensor, unchanged.
    Tensor,
    /// The tensor, rounded to a format.
    Rounded(GroupFormat),
    /// Codes: Q and K have a row per `[batch, token, head]`, V has one per `[batch, head, channel]`.
    Codes(&'a Grouped),
}

/// Another unit over expanded operands.
pub(crate) struct Expanded<'a> {
    pub inner: &'a dyn Packer,
    pub q: Operand<'a>,
    pub k: Operand<'a>,
    pub v: Operand<'a>,
}

/// Elements of a tile's queries in the problem's type.
enum Owned {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

impl Owned {
    fn new(kernels: &Kernels, dtype: DType, values: Vec<f32>) -> Owned {
        match dtype {
            DType::Bf16 => {
                let mut to = vec![bf16::ZERO; values.len()];
                kernels.narrow_bf16(&values, &mut to);
                Owned::Bf16(to)
            }
            DType::F16 => {
                let mut to = vec![f16::ZERO; values.len()];
                kernels.narrow_f16(&values, &mut to);
                Owned::F16(to)
            }
            _ => Owned::F32(values),
        }
    }
    fn data(&self) -> Data<'_> {
        match self {
            Owned::F32(x) => Data::F32(x),
            Owned::F16(x) => Data::F16(x),
            Owned::Bf16(x) => Data::Bf16(x),
        }
    }
}

/// Rows of the codes' values, all exact in the problem's type: `n` of `width` elements, in the given space.
fn narrowed<'b>(cx: &Context<'_>, space: &'b mut [f32], [rows, width, n]: [usize; 3]) -> Source<'b> {
    let (values, rest) = space.split_at_mut(rows * width);
    let data = match cx.problem.dtype() {
        DType::Bf16 => {
            let to = &mut halves_of::<bf16>(rest)[..rows * width];
            cx.kernels.narrow_bf16(values, to);
            Data::Bf16(to)
        }
        DType::F16 => {
            let to = &mut halves_of::<f16>(rest)[..rows * width];
            cx.kernels.narrow_f16(values, to);
            Data::F16(to)
        }
        _ => Data::F32(values),
    };
    Source { data, offset: 0, row: width, rows, n }
}

impl Expanded<'_> {
    /// Keys of a block; groups run along each key.
    fn key_rows<'b>(&self, cx: &Context<'b>, keys: &Keys<'_>, space: &'b mut [f32]) -> Source<'b> {
        let (n, width, count) = (cx.d, cx.d_pad, keys.range.len());
        let view = cx.bound.k();
        let from = source(cx, view, keys, n);
        if matches!(self.k, Operand::Tensor) {
            return from;
        }
        for (i, row) in space.chunks_exact_mut(width).take(count).enumerate() {
            let (row, rest) = row.split_at_mut(n);
            rest.fill(0.0);
            match self.k {
                Operand::Codes(codes) => {
                    let [tokens, heads] = lengths(view);
                    let at = (keys.sequence.batch * tokens + keys.range.start + i) * heads + keys.head;
                    cx.kernels.expand(codes, at, 0, row);
                }
                Operand::Rounded(format) => {
                    cx.kernels.widen(&from.data, from.offset + i * from.row, row);
                    cx.kernels.round_rows(row, n, format);
                }
                Operand::Tensor => {}
            }
        }
        narrowed(cx, space, [count, width, n])
    }

    /// Values of a block; groups run along the keys, and blocks start at group boundaries.
    fn value_rows<'b>(&self, cx: &Context<'b>, keys: &Keys<'_>, space: &'b mut [f32]) -> Source<'b> {
        let (n, width, count) = (cx.dv, cx.dv_pad, keys.range.len());
        let view = cx.bound.v();
        let from = source(cx, view, keys, n);
        match self.v {
            Operand::Tensor => return from,
            Operand::Codes(codes) => {
                let heads = lengths(view)[1];
                let block = self.inner.block(cx).next_multiple_of(cx.kernels.lanes);
                let (rows, turned) = space.split_at_mut(block * width);
                turned[..width * block].fill(0.0);
                for (c, to) in turned.chunks_exact_mut(block).take(n).enumerate() {
                    let row = (keys.sequence.batch * heads + keys.head) * n + c;
                    cx.kernels.expand(codes, row, keys.range.start, &mut to[..count]);
                }
                cx.kernels.transpose(turned, block, rows, width, width, block);
            }
            Operand::Rounded(format) => {
                for (i, row) in space.chunks_exact_mut(width).take(count).enumerate() {
                    cx.kernels.widen(&from.data, from.offset + i * from.row, &mut row[..n]);
                    row[n..].fill(0.0);
                }
                for lane in (0..width).step_by(cx.kernels.lanes) {
                    cx.kernels.round_weights(space, width, lane, (0, count), format);
                }
            }
        }
        narrowed(cx, space, [count, width, n])
    }

    /// Extra space per row of `width`, besides the inner unit's: as f32, and transposed or in the problem's type.
    fn space(width: usize) -> usize {
        2 * width
    }
}

/// Number of tokens and heads of a dense tensor of rows.
fn lengths(view: &TensorView<'_>) -> [usize; 2] {
    [view.shape()[1], view.shape()[2]]
}

impl Unit for Expanded<'_> {
    fn hold(&self) -> Option<Hold> {
        self.inner.hold()
    }
    fn block(&self, cx: &Context<'_>) -> usize {
        self.inner.block(cx)
    }
    fn buffer_sizes(&self, cx: &Context<'_>) -> BufferSizes {
        let (room, block) = (self.inner.buffer_sizes(cx), self.inner.block(cx));
        BufferSizes {
            key: room.key + Self::space(cx.d_pad),
            values: Arena::room(room.values) + block * Self::space(cx.dv_pad),
            ..room
        }
    }
    fn score_scale(&self, cx: &Context<'_>) -> f32 {
        self.inner.score_scale(cx)
    }
    fn rescales(&self) -> bool {
        self.inner.rescales()
    }
    fn queries(&self, cx: &Context<'_>, tile: &Tile, stride: usize, rows: &mut [f32], out: &mut [f32]) {
        let (n, view) = (cx.d, cx.bound.q());
        if matches!(self.q, Operand::Tensor) {
            return self.inner.queries(cx, tile, stride, rows, out);
        }
        let starts = cx.row_starts(tile, view.strides());
        let mut values = vec![0.0f32; tile.rows * n];
        for (lane, row) in values.chunks_exact_mut(n).enumerate() {
            match self.q {
                Operand::Codes(codes) => {
                    let ([tokens, heads], (q, head)) = (lengths(view), cx.query_and_head(tile, lane));
                    let batch = cx.bound.sequences()[tile.sequence].batch;
                    cx.kernels.expand(codes, (batch * tokens + q) * heads + head, 0, row);
                }
                Operand::Rounded(format) => {
                    cx.kernels.widen(&view.data(), starts[lane], row);
                    cx.kernels.round_rows(row, n, format);
                }
                Operand::Tensor => {}
            }
        }
        let values = Owned::new(cx.kernels, cx.problem.dtype(), values);
        let starts: [usize; MAX_LANES] = std::array::from_fn(|lane| lane.min(tile.rows - 1) * n);
        let from = QueryRows { data: values.data(), starts, rows: tile.rows, row: Some(n) };
        self.inner.queries_from(cx, &from, stride, rows, out);
    }
    fn keys_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        let (k, space) = buffer.split_at_mut(self.inner.block(cx) * self.inner.buffer_sizes(cx).key);
        self.inner.keys_from(cx, self.key_rows(cx, keys, space), k)
    }
    fn values_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        let values = self.inner.buffer_sizes(cx).values;
        let (v, space) = buffer.split_at_mut(Arena::room(values));
        self.inner.values_from(cx, self.value_rows(cx, keys, space), &mut v[..values])
    }
    fn scores(&self, cx: &Context<'_>, products: Products<'_>, k: KeyRows<'_>, q: &[f32], s: &mut [f32]) {
        self.inner.scores(cx, products, k, q, s);
    }
    fn softmax(
        &self,
        cx: &Context<'_>,
        args: &mut SoftmaxArgs<'_>,
        operands: Operands<'_>,
        scratch: &mut Scratch<'_>,
    ) -> SoftmaxStats {
        self.inner.softmax(cx, args, operands, scratch)
    }
    fn output(
        &self,
        cx: &Context<'_>,
        products: Products<'_>,
        v: KeyRows<'_>,
        p: &[f32],
        o: &mut [f32],
        scratch: &mut Scratch<'_>,
    ) {
        self.inner.output(cx, products, v, p, o, scratch);
    }
}
