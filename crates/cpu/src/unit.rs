//! The units that multiply in forward and compute the scores of backward: the vectors, or a matrix unit.
//!
//! A unit packs the operands of the two products in its own layout, and multiplies the parts that a step has to
//! compute. The tile loop does not know which unit it uses.

use crate::memory::Arena;
use crate::simd::{
    Ahead, BlockPosition, DEPTH, GROUP, Hold, Kernels, LaneProbe, Matrix, MatrixKernels, MatrixMut, Panels, Pipelined,
    PipelinedBlock, PipelinedTile, Policy, RowsAt, SLOTS, Seen, SoftmaxArgs, SoftmaxStats, Source, Square, Sum, parts,
};
use crate::step::{Coverage, Step};
use crate::tiles::{Context, KeyRows, MAX_LANES, Tile};
use fulgurite_core::{DType, Data, Sequence, TensorView};
use std::ops::Range;

/// Workspace sizes of a unit, in f32 elements.
pub(crate) struct BufferSizes {
    /// Packed queries of a tile.
    pub queries: usize,
    /// One packed key. Blocks of keys start at multiples of [`GROUP`] and have space for whole groups.
    pub key: usize,
    /// A packed block of values.
    pub values: usize,
    /// A tile of probabilities, packed.
    pub weights: usize,
}

/// The keys of a block of one key/value head.
pub(crate) struct Keys<'a> {
    pub sequence: &'a Sequence,
    pub head: usize,
    pub range: Range<usize>,
}

/// One tile's products with one block of keys.
pub(crate) struct Products<'a> {
    pub step: &'a Step,
    /// Lanes of the tile.
    pub stride: usize,
    pub ahead: &'a mut Ahead,
}

/// Memory for `output`, of the sizes in [`BufferSizes`].
pub(crate) struct Scratch<'a> {
    pub values: &'a mut [f32],
    pub weights: &'a mut [f32],
    /// Whether softmax has already packed the weights.
    pub packed: bool,
    /// The factor of O, if the unit [rescales](Unit::rescales).
    pub alpha: [f32; MAX_LANES],
    /// Probes that go with the weights.
    pub probe: Option<LaneProbe<'a>>,
}

impl<'a> Scratch<'a> {
    pub fn new(values: &'a mut [f32], weights: &'a mut [f32]) -> Self {
        Scratch { values, weights, packed: false, alpha: [1.0; MAX_LANES], probe: None }
    }
}

/// The operands of a block of scores, and the values that follow.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub q: &'a [f32],
    pub k: KeyRows<'a>,
    pub v: KeyRows<'a>,
}

/// Blocks for [`Unit::pipeline`]; see [`Pipelined`].
pub(crate) struct Run<'a, 't> {
    pub blocks: &'a [[KeyRows<'a>; 2]],
    pub origin: usize,
    pub tiles: &'a mut [PipelinedTile<'t>],
    pub first: BlockPosition,
    pub limit: f32,
    pub s: &'a mut [f32],
    pub weights: &'a mut [f32],
    pub ahead: &'a mut [Ahead; 2],
    pub modify: Option<&'t mut (dyn FnMut(Square<'_>) + 't)>,
}

pub(crate) trait Unit: Sync {
    /// Resources that a thread holds while it multiplies.
    fn hold(&self) -> Option<Hold>;
    /// Keys per block. It determines the order of sums, so it depends only on the problem's dimensions and type.
    fn block(&self, cx: &Context<'_>) -> usize;
    fn buffer_sizes(&self, cx: &Context<'_>) -> BufferSizes;
    /// The factor that converts a score to natural units.
    fn score_scale(&self, cx: &Context<'_>) -> f32;
    /// Packs the queries of a tile; `rows` is scratch for one tile.
    fn queries(&self, cx: &Context<'_>, tile: &Tile, stride: usize, rows: &mut [f32], out: &mut [f32]);
    /// Packs keys of a block into a buffer of the size in [`BufferSizes`].
    fn keys_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b>;
    /// Packs the values of a block, alike.
    fn values_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b>;
    /// Packs both.
    fn block_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, [k, v]: [&'b mut [f32]; 2]) -> [KeyRows<'b>; 2] {
        [self.keys_of(cx, keys, k), self.values_of(cx, keys, v)]
    }
    /// Computes S = K Q^T in the parts that the step needs.
    fn scores(&self, cx: &Context<'_>, products: Products<'_>, k: KeyRows<'_>, q: &[f32], s: &mut [f32]);
    /// Number of blocks that are packed together, so that a tile takes several in a row.
    fn span(&self, _: &Context<'_>) -> usize {
        1
    }
    /// Processes several blocks at once for all tiles of an item, if [`span`](Self::span) is more than one. Returns the
    /// block at which it stopped before the end, which needs single steps.
    fn pipeline(&self, _: &Context<'_>, _: Run<'_, '_>) -> Option<BlockPosition> {
        unreachable!("bug in fulgurite: this unit takes one block at a time")
    }
    /// Whether some score of a whole block of keys is within its lane's limit, and whether all are near the references,
    /// if [`span`](Self::span) is more than one; `s` is scratch for a tile.
    fn block_max(&self, _: &Context<'_>, _: KeyRows<'_>, _: &[f32], _s: &mut [f32], _: &mut Seen<'_>) -> [bool; 2] {
        unreachable!("bug in fulgurite: a unit that takes single steps")
    }
    /// Whether `output` multiplies O by alpha itself.
    fn rescales(&self) -> bool {
        false
    }
    /// One step of the online softmax over scores.
    fn softmax(
        &self,
        cx: &Context<'_>,
        args: &mut SoftmaxArgs<'_>,
        _: Operands<'_>,
        scratch: &mut Scratch<'_>,
    ) -> SoftmaxStats {
        scratch.packed = false;
        cx.kernels.softmax(args, scratch.probe.as_mut())
    }
    /// Computes O += V^T P, after `softmax`. All values that lanes do not see must be finite
    /// ([`hidden_values`](Context::hidden_values)).
    fn output(
        &self,
        cx: &Context<'_>,
        products: Products<'_>,
        v: KeyRows<'_>,
        p: &[f32],
        o: &mut [f32],
        scratch: &mut Scratch<'_>,
    );
}

/// A unit that packs any rows.
pub(crate) trait Packer: Unit {
    /// Like [`Unit::queries`], for any rows.
    fn queries_from(&self, cx: &Context<'_>, from: &QueryRows<'_>, stride: usize, rows: &mut [f32], out: &mut [f32]);
    fn keys_from<'b>(&self, cx: &Context<'b>, from: Source<'b>, buffer: &'b mut [f32]) -> KeyRows<'b>;
    fn values_from<'b>(&self, cx: &Context<'b>, from: Source<'b>, buffer: &'b mut [f32]) -> KeyRows<'b>;
    /// Keys of the problem.
    fn keys<'b>(&self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        self.keys_from(cx, source(cx, cx.bound.k(), keys, cx.d), buffer)
    }
    /// Values of the problem.
    fn values<'b>(&self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        self.values_from(cx, source(cx, cx.bound.v(), keys, cx.dv), buffer)
    }
}

impl Kernels {
    /// The unit that packs rows of this type: a matrix unit, or the vectors.
    pub fn packer(&self, dtype: DType) -> &'static dyn Packer {
        self.matrix_for(dtype).map_or(&Vectors, |unit| unit)
    }
}

/// Products by fused multiply-adds. Only operands that need conversion are packed.
pub(crate) struct Vectors;

impl Vectors {
    /// With 64 lanes a block of S (32 KiB) stays in the L1 cache.
    pub const BLOCK: usize = 128;
}

impl Unit for Vectors {
    fn hold(&self) -> Option<Hold> {
        None
    }
    fn block(&self, cx: &Context<'_>) -> usize {
        cx.block.unwrap_or(Self::BLOCK)
    }
    fn buffer_sizes(&self, cx: &Context<'_>) -> BufferSizes {
        let values = self.block(cx) * cx.dv_pad;
        BufferSizes { queries: cx.kernels.tile * cx.d_pad, key: cx.d_pad, values, weights: 0 }
    }
    fn score_scale(&self, _: &Context<'_>) -> f32 {
        1.0
    }
    fn queries(&self, cx: &Context<'_>, tile: &Tile, stride: usize, rows: &mut [f32], out: &mut [f32]) {
        self.queries_from(cx, &QueryRows::of(cx, tile), stride, rows, out);
    }
    fn keys_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        self.keys(cx, keys, buffer)
    }
    fn values_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        self.values(cx, keys, buffer)
    }
    fn scores(&self, cx: &Context<'_>, products: Products<'_>, k: KeyRows<'_>, q: &[f32], s: &mut [f32]) {
        let Products { step, stride, ahead } = products;
        for seg in step.segments(1) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
            let q = Matrix::new(q, stride).at(0, lane);
            let to = MatrixMut::at(s, stride, key, lane);
            cx.kernels.gemm(to, k.rows.at(key, 0), q, [keys, lanes, cx.d], Sum::Fresh, ahead);
        }
    }
    fn output(
        &self,
        cx: &Context<'_>,
        products: Products<'_>,
        v: KeyRows<'_>,
        p: &[f32],
        o: &mut [f32],
        _: &mut Scratch<'_>,
    ) {
        let Products { step, stride, ahead } = products;
        for seg in step.segments(1) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
            let p = Matrix::new(p, stride).at(key, lane);
            let o = MatrixMut::at(o, stride, 0, lane);
            cx.kernels.gemm_transposed(o, v.rows.at(key, 0), p, [cx.dv, lanes, keys], Sum::Onto, ahead);
        }
    }
}

impl Packer for Vectors {
    fn queries_from(&self, cx: &Context<'_>, from: &QueryRows<'_>, stride: usize, rows: &mut [f32], out: &mut [f32]) {
        cx.turned_queries(from, stride, cx.problem.scale(), rows, &mut out[..cx.d_pad * stride]);
    }
    fn keys_from<'b>(&self, cx: &Context<'b>, from: Source<'b>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        cx.keys_from(from, cx.d_pad, buffer)
    }
    fn values_from<'b>(&self, cx: &Context<'b>, from: Source<'b>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        // Where expressions hide keys, every tile asks for this; a block answers for all. Copies tell by themselves.
        let row = |key: usize, to: &mut [f32]| cx.kernels.widen(&from.data, from.offset + key * from.row, to);
        let asked = cx.has_expressions() && cx.reads_in_place(&from, cx.dv_pad);
        let finite = asked && (0..from.rows).all(|key| row(key, &mut buffer[..from.n]));
        let values = cx.keys_from(from, cx.dv_pad, buffer);
        KeyRows { finite: values.finite || finite, ..values }
    }
}

/// Sizes of a problem, in tiles.
struct Sizes {
    parts: usize,
    /// Number of parts of P, as its rounding in the problem's type requires.
    weight_parts: usize,
    /// Tiles per block of keys, along d, and column groups of V.
    block: usize,
    d: usize,
    dv: usize,
}

impl Sizes {
    fn new(unit: &MatrixKernels, cx: &Context<'_>) -> Self {
        Sizes {
            parts: parts(cx.problem.dtype()),
            weight_parts: parts(cx.problem.dtype()),
            block: unit.block(cx) / DEPTH,
            d: cx.d.div_ceil(DEPTH),
            dv: cx.dv.div_ceil(GROUP),
        }
    }
}

impl MatrixKernels {
    /// Keys of a block, if the problem does not say.
    pub const BLOCK: usize = 128;
}

/// Keys and queries keep their own type, in parts, and scores are scaled afterwards. In f32 the queries contain the
/// scale, as for the vectors, so that backward finds the scores of forward.
impl Unit for MatrixKernels {
    fn hold(&self) -> Option<Hold> {
        Some(self.hold())
    }
    /// Tiles load from the L2 cache as fast as from L1, and a long block loads and stores O less often: 8 to 18 %
    /// faster than with 64 keys in bf16, lab 002.
    fn block(&self, cx: &Context<'_>) -> usize {
        cx.block.unwrap_or(MatrixKernels::BLOCK)
    }
    fn buffer_sizes(&self, cx: &Context<'_>) -> BufferSizes {
        let Sizes { parts, weight_parts, block, d, dv } = Sizes::new(self, cx);
        let lanes = cx.kernels.tile / GROUP;
        BufferSizes {
            queries: Panels::room(lanes, d, parts),
            key: Panels::room(1, d, parts) / GROUP,
            values: Panels::room(dv, block, parts),
            weights: Panels::room(lanes, block, weight_parts),
        }
    }
    fn score_scale(&self, cx: &Context<'_>) -> f32 {
        if cx.problem.dtype() == DType::F32 { 1.0 } else { cx.problem.scale() }
    }
    fn queries(&self, cx: &Context<'_>, tile: &Tile, stride: usize, rows: &mut [f32], out: &mut [f32]) {
        self.queries_from(cx, &QueryRows::of(cx, tile), stride, rows, out);
    }
    fn keys_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        self.keys(cx, keys, buffer)
    }
    fn values_of<'b>(&'b self, cx: &Context<'b>, keys: &Keys<'_>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        self.values(cx, keys, buffer)
    }
    fn scores(&self, cx: &Context<'_>, products: Products<'_>, k: KeyRows<'_>, q: &[f32], s: &mut [f32]) {
        let Products { step, stride, ahead } = products;
        let Sizes { parts, d, .. } = Sizes::new(self, cx);
        for seg in step.paired_segments(GROUP, Coverage::Pair) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
            let k = Panels::new(k.rows.at(key, 0).data, d, parts);
            let q = Panels::new(q, d, parts).at(lane / GROUP, 0);
            let to = MatrixMut::at(s, stride, key, lane);
            self.multiply(to, k, q, [keys / GROUP, lanes / GROUP, d], Sum::Fresh, ahead);
        }
    }
    /// Eight blocks: Q and O then stay in the L1 cache over 1024 keys.
    fn span(&self, cx: &Context<'_>) -> usize {
        let plain = cx.rounding.is_none() && cx.problem.blocks().is_none();
        let Sizes { parts, block, d, dv, .. } = Sizes::new(self, cx);
        if plain && parts == 1 && self.bf16.suits(cx.exp) && self.has_pipeline([block, d, dv]) { 8 } else { 1 }
    }
    fn pipeline(&self, cx: &Context<'_>, run: Run<'_, '_>) -> Option<BlockPosition> {
        let Sizes { block, d, dv, .. } = Sizes::new(self, cx);
        // Non-finite values require a check of which keys have no weight.
        let own = run.blocks.iter().map(|[k, v]| PipelinedBlock { k: k.rows.data, v: v.rows.data, finite: v.finite });
        let blocks: Vec<PipelinedBlock<'_>> = own.collect();
        let mut pipelined = Pipelined {
            blocks: &blocks,
            origin: run.origin,
            tiles: run.tiles,
            first: run.first,
            log2_e: std::f32::consts::LOG2_E * cx.score_scale(),
            limit: run.limit,
            s: run.s,
            weights: run.weights,
            modify: run.modify,
        };
        MatrixKernels::pipeline(self, &mut pipelined, [block, d, dv], run.ahead)
    }
    fn block_max(&self, cx: &Context<'_>, k: KeyRows<'_>, q: &[f32], s: &mut [f32], seen: &mut Seen<'_>) -> [bool; 2] {
        let Sizes { block, d, dv, .. } = Sizes::new(self, cx);
        MatrixKernels::block_max(self, [k.rows.data, q], [block, d, dv], s, seen)
    }
    fn softmax(
        &self,
        cx: &Context<'_>,
        args: &mut SoftmaxArgs<'_>,
        Operands { v, .. }: Operands<'_>,
        scratch: &mut Scratch<'_>,
    ) -> SoftmaxStats {
        let Sizes { weight_parts, block, .. } = Sizes::new(self, cx);
        // Non-finite values require a check of which keys have no weight, and so P itself.
        let narrow = weight_parts == 1 && self.bf16.suits(args.exp) && args.policy != Policy::MaxOnly;
        let narrow = narrow && cx.rounding.is_none();
        scratch.packed = narrow && v.finite;
        if scratch.packed {
            self.bf16.softmax(args, scratch.weights, block, scratch.probe.as_mut())
        } else {
            cx.kernels.softmax(args, scratch.probe.as_mut())
        }
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
        let Products { step, stride, ahead } = products;
        let Sizes { parts, weight_parts, block, dv, .. } = Sizes::new(self, cx);
        let packed = &mut *scratch.weights;
        let groups = if scratch.packed { 0 } else { stride / GROUP };
        for (z, to) in packed.chunks_exact_mut(Panels::room(1, block, weight_parts)).take(groups).enumerate() {
            let (a, b) = step.ranges[z];
            self.pack_lanes(&p[z * GROUP..], stride, [a, b.max(a)], to, weight_parts);
        }
        for seg in step.paired_segments(DEPTH, Coverage::Seen) {
            let ((key, keys), (lane, lanes)) = (seg.keys(), seg.lanes(cx.kernels.lanes));
            let v = Panels::new(v.rows.data, block, parts).at(0, key / DEPTH);
            let p = Panels::new(packed, block, weight_parts).at(lane / GROUP, key / DEPTH);
            let o = MatrixMut::at(o, stride, 0, lane);
            self.multiply(o, v, p, [dv, lanes / GROUP, keys / DEPTH], Sum::Onto, ahead);
        }
    }
}

impl Packer for MatrixKernels {
    fn queries_from(&self, cx: &Context<'_>, from: &QueryRows<'_>, stride: usize, rows: &mut [f32], out: &mut [f32]) {
        let Sizes { parts, d, .. } = Sizes::new(self, cx);
        if let Data::Bf16(data) = from.data {
            let rows = RowsAt { data, starts: &from.starts[..from.rows], n: cx.d };
            // Lanes past the last row are not written; their results are dropped.
            return self.bf16.turn(rows, out, d);
        }
        let (rows, turned) = rows.split_at_mut(Arena::room(cx.kernels.tile * cx.d_pad));
        let scale = cx.problem.scale() / self.score_scale(cx);
        cx.turned_queries(from, stride, scale, rows, &mut turned[..cx.d_pad * stride]);
        for (lanes, to) in (0..stride).step_by(GROUP).zip(out.chunks_exact_mut(Panels::room(1, d, parts))) {
            self.pack_lanes(&turned[lanes..], stride, [0, cx.d_pad], to, parts);
        }
    }
    fn keys_from<'b>(&self, cx: &Context<'b>, from: Source<'b>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        let Sizes { parts, d, .. } = Sizes::new(self, cx);
        let finite = self.pack_rows(&from, buffer, d);
        KeyRows { rows: Matrix::new(buffer, Panels::room(1, d, parts) / GROUP), finite }
    }
    fn values_from<'b>(&self, cx: &Context<'b>, from: Source<'b>, buffer: &'b mut [f32]) -> KeyRows<'b> {
        let Sizes { parts, block, dv, .. } = Sizes::new(self, cx);
        let written = from.rows.div_ceil(DEPTH);
        if written < block {
            // A product of a whole block must find numbers there: a weight of 0 times NaN would be NaN.
            for group in buffer.chunks_exact_mut(Panels::room(1, block, parts)).take(dv) {
                group[written * parts * SLOTS..].fill(0.0);
            }
        }
        let finite = self.pack_turned(&from, buffer, block);
        // The keys are the summed axis, so a block is taken as a whole.
        KeyRows { rows: Matrix::new(buffer, 0), finite }
    }
}

/// The rows of a tile of queries.
pub(crate) struct QueryRows<'a> {
    pub data: Data<'a>,
    /// Offset of each row, and the number of rows; further lanes repeat the last.
    pub starts: [usize; MAX_LANES],
    pub rows: usize,
    /// Distance between rows, if it is constant.
    pub row: Option<usize>,
}

impl<'a> QueryRows<'a> {
    fn of(cx: &Context<'a>, tile: &Tile) -> Self {
        let q = cx.bound.q();
        let at = cx.query_layout(q.strides(), &cx.bound.sequences()[tile.sequence]);
        let starts = cx.row_starts(tile, q.strides());
        QueryRows { data: q.data(), starts, rows: tile.rows, row: (cx.pack == 1).then_some(at.row) }
    }
}

impl Context<'_> {
    /// Offsets of a tile's rows in a tensor of queries.
    pub fn row_starts(&self, tile: &Tile, strides: &[usize]) -> [usize; MAX_LANES] {
        let at = self.query_layout(strides, &self.bound.sequences()[tile.sequence]);
        std::array::from_fn(|lane| {
            let (q, head) = self.query_and_head(tile, lane.min(tile.rows - 1));
            at.at(q, head)
        })
    }
}

/// Rows of keys in the form that packers take.
pub(crate) fn source<'b>(cx: &Context<'b>, view: &TensorView<'b>, keys: &Keys<'_>, n: usize) -> Source<'b> {
    let rows = cx.key_layout(view.strides(), keys.sequence);
    Source { data: view.data(), offset: rows.at(keys.range.start, keys.head), row: rows.row, rows: keys.range.len(), n }
}
