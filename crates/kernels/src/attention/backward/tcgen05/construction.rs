//! The kernel under construction: its parameters, its shared memory and its tensor memory.

use crate::attention::backward::d_q::service::Log;
use crate::attention::backward::marks::Marks;
use crate::attention::backward::modifiers::ModifierParams;
use crate::attention::backward::state::{Call, declare_marks};
use crate::attention::backward::tcgen05::config::{GROUPS, ROWS};
use crate::attention::backward::tiles::{TileMap, Work};
use crate::attention::backward::{Features, KernelShape};
use crate::params::Params;
use crate::parts::mask::Spans;
use fulgurite_core::Exp;
use fulgurite_ptx::tcgen05::COLUMNS;
use fulgurite_ptx::{
    Half, Pair, Pipe, Pointer, Scope, StagedSums, Tensor, TensorRing, TensorTile, Tile, TileShape, Val, Which, Who,
    Word,
};
use std::marker::PhantomData;

/// Queries of which a warpgroup computes p and d_z.
pub(super) const HALF: u32 = ROWS / GROUPS;

/// The kernel's parameters.
pub(super) struct TensorParams<'k> {
    pub q: Tensor<'k>,
    pub k: Tensor<'k>,
    pub v: Tensor<'k>,
    pub d_o: Tensor<'k>,
    pub d_k: Tensor<'k>,
    pub d_v: Tensor<'k>,
    /// -LSE in powers of two, and delta, of padded rows.
    pub shift: Pointer<'k, f32>,
    pub delta: Pointer<'k, f32>,
    /// f32 sums of d_q.
    pub sums: Pointer<'k, f32>,
    /// The marks of d_k and d_v.
    pub marks: [Marks<'k>; 2],
    pub map: TileMap<'k>,
    pub modifiers: Option<ModifierParams<'k>>,
    pub scale_log2: Val<'k, f32>,
    pub scale: Val<'k, f32>,
}

impl<'k> TensorParams<'k> {
    fn declare<T: Half>(p: &Params<'k, Call>, features: &Features, shape: &KernelShape) -> Self {
        let [d, dv] = shape.dims;
        let tile = |cols| TileShape::new(T::NUMBER, ROWS, cols);
        // Axes: element, row, head, batch. Ragged tensors have one more.
        let rank = if features.ragged.any() { 5 } else { 4 };
        let q = p.tensor("q", tile(d), rank, |call| call.q.clone());
        let k = p.tensor("k", tile(d), rank, |call| call.k.clone());
        let v = p.tensor("v", tile(dv), rank, |call| call.v.clone());
        let d_o = p.tensor("d_o", tile(dv), rank, |call| call.d_o.clone());
        let d_k = p.tensor("d_k", tile(d), rank, |call| call.d_k.clone());
        let d_v = p.tensor("d_v", tile(dv), rank, |call| call.d_v.clone());
        let shift = p.pointer::<f32>("shift", |call| call.shift);
        let delta = p.pointer::<f32>("delta", |call| call.delta);
        let sums = p.pointer::<f32>("sums", |call| call.sums);
        let marks = declare_marks(p, features);
        let spans = Spans::of(&features.mask).transposed();
        let map = TileMap::declare(p, |call: &Call| &call.map, (shape, false, features.ragged), spans);
        let modifiers = (&features.modifiers, features.ragged.any());
        // The kernel has no service that waits, so the log stays empty.
        let modifiers = ModifierParams::declare(p, |call: &Call| &call.modifiers, modifiers, &Log::new());
        let scale_log2 = p.f32("scale_log2", |call| call.scale_log2);
        let scale = p.f32("scale", |call| call.scale);
        TensorParams { q, k, v, d_o, d_k, d_v, shift, delta, sums, marks, map, modifiers, scale_log2, scale }
    }
}

/// Stages in shared memory that the load role fills.
pub(super) struct Stages<'k> {
    pub keys: Pipe<'k>,
    pub values: Pipe<'k>,
    pub queries: Pipe<'k>,
    pub outputs: Pipe<'k>,
    /// -LSE and delta. Other warps read them than q and d_o, so they have stages of their own.
    pub shift: Pipe<'k>,
    pub delta: Pipe<'k>,
}

/// The kernel under construction.
pub(super) struct TensorBackward<'k, T> {
    pub params: TensorParams<'k>,
    pub exp: Exp,
    /// Elements of a row of q and k, and of a row of v and o, as products see them.
    pub dims: [u32; 2],
    pub stages: Stages<'k>,
    /// d_z of a step in shared memory. Rows are keys.
    pub d_z: Tile<'k>,
    /// Buffers through which d_q leaves.
    pub staging: StagedSums<'k>,
    /// s of a step, and over parts of it p. The compute role answers when it has written p.
    pub scores: TensorRing<'k>,
    /// d_p of a step, and over parts of it d_z. The compute role answers when it has written d_z.
    pub products: TensorRing<'k>,
    /// d_q of a step.
    pub sums: TensorRing<'k>,
    /// Whether d_q lies over d_z.
    pub sums_over_products: bool,
    /// d_k and d_v, of which there is one tile each.
    pub d_k: TensorRing<'k>,
    pub d_v: TensorRing<'k>,
    /// The columns of s and d_p.
    s: TensorTile<'k>,
    d_p: TensorTile<'k>,
    number: PhantomData<T>,
}

impl<'k, T: Half> TensorBackward<'k, T>
where
    Pair<T>: Word,
{
    pub fn new(p: &Params<'k, Call>, features: &Features, shape: &KernelShape) -> Self {
        let (builder, config, dims @ [d, dv]) = (p.builder(), shape.config, shape.dims);
        let params = TensorParams::declare::<T>(p, features, shape);
        let tile = |cols| TileShape::new(T::NUMBER, ROWS, cols);
        let stages = Stages {
            keys: builder.pipe("k", 1, &[tile(d)]),
            values: builder.pipe("v", 1, &[tile(dv)]),
            queries: builder.pipe("q", config.depth, &[tile(d)]),
            outputs: builder.pipe("d_o", config.output_depth(dims), &[tile(dv)]),
            shift: builder.pipe_with_numbers("shift", config.depth, &[], ROWS),
            delta: builder.pipe_with_numbers("delta", config.output_depth(dims), &[], ROWS),
        };
        let d_z = builder.tile("d_z", tile(ROWS));
        let staging = builder.staged_sums("d_q", config.sum_cols(d));
        let columns = |cols| builder.tensor_accumulators(1, cols);
        let (s, d_p, d_v, d_k) = (columns(ROWS), columns(ROWS), columns(dv), columns(d));
        let sums_over_products = 2 * ROWS + dv + 2 * d > COLUMNS;
        let d_q = if sums_over_products { d_p.part(0, d) } else { columns(d) };
        TensorBackward {
            params,
            exp: features.exp,
            dims,
            stages,
            d_z,
            staging,
            scores: builder.tensor_ring_of("s", s, GROUPS),
            products: builder.tensor_ring_of("d_p", d_p, GROUPS),
            sums: builder.tensor_ring_of("d_q", d_q, 1),
            sums_over_products,
            d_k: builder.tensor_ring_of("d_k", d_k, 1),
            d_v: builder.tensor_ring_of("d_v", d_v, 1),
            s,
            d_p,
            number: PhantomData,
        }
    }

    /// Calls `f` with the CTA's tile, if it has one.
    pub fn with_tile<W: Who>(&self, w: &Scope<'k, W>, f: impl FnOnce(&Scope<'k, W>, Work<'k>)) {
        let tiles = self.params.map.tiles(w);
        let some = tiles.seek(w, w.cta());
        w.when(some, |w| f(w, tiles.find(w, w.cta())));
    }

    /// p of the queries of a warpgroup: over the first columns of its part of s. The other part is not touched, so the
    /// warpgroups need not meet.
    pub fn p(&self, group: u32) -> TensorTile<'k> {
        halved::<T>(self.s.part(group, HALF))
    }

    /// d_z of the queries of a warpgroup, over its part of d_p.
    pub fn d_z(&self, group: u32) -> TensorTile<'k> {
        halved::<T>(self.d_p.part(group, HALF))
    }
}

/// The tile of a ring: all rings of the kernel are single.
pub(super) fn only<'k>() -> Which<'k> {
    Which::Index(0)
}

/// 16-bit elements over the first columns of as many accumulators.
pub(super) fn halved<T: Half>(of: TensorTile<'_>) -> TensorTile<'_> {
    of.part(0, of.cols() / 2).overlay::<T>(of.cols())
}
