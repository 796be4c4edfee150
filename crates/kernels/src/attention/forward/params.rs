//! The parameters of the forward kernel, each with its launch argument.

use crate::attention::forward::call::ForwardCall;
use crate::attention::forward::features::Features;
use crate::attention::forward::mma_sync::params::Rows;
use crate::params::Params;
use crate::parts::block_lists::Lists;
use crate::parts::modifier::{Parameters, Sinks};
use crate::parts::nonfinite::NonfinitePath;
use crate::parts::schedule::{Equal, Of};
use crate::parts::sequences::Sequences;
use fulgurite_ptx::{Divisor, Half, Pair, Pointer, Tensor, TileShape, Val, Word};

/// O in global memory.
pub(super) enum OutputMemory<'k> {
    /// 16-bit elements, which TMA stores.
    Copied(Tensor<'k>),
    /// f32 elements, which threads store.
    F32(Rows<'k>),
}

impl<'k> OutputMemory<'k> {
    /// O of 16-bit elements. A plan refuses f32 ones before it builds a kernel that calls this.
    pub fn copied(&self) -> &Tensor<'k> {
        match self {
            OutputMemory::Copied(o) => o,
            OutputMemory::F32(_) => panic!("bug in fulgurite: a kernel without f32 results is built for them"),
        }
    }
}

/// The kernel's parameters.
pub(super) struct ForwardParams<'k, T> {
    pub q: Tensor<'k>,
    pub keys: Tensor<'k>,
    pub values: Tensor<'k>,
    pub o: OutputMemory<'k>,
    pub lse: Pointer<'k, f32>,
    /// Two words: tickets drawn, and key blocks computed twice.
    pub counters: Pointer<'k, u32>,
    /// Rows of one head's LSE.
    pub lse_rows: Val<'k, u32>,
    pub heads: Divisor<'k>,
    /// Query heads per key/value head.
    pub group: Divisor<'k>,
    pub scale: Val<'k, f32>,
    pub sequences: Sequences<'k>,
    /// Tile order of a batch of equal sequences.
    pub bands: Option<Equal<'k>>,
    pub lists: Option<Lists<'k>>,
    pub modifiers: Parameters<'k>,
    pub sinks: Option<Sinks<'k>>,
    pub nonfinite: Option<NonfinitePath<'k, T>>,
}

impl<'k, T: Half> ForwardParams<'k, T>
where
    Pair<T>: Word,
{
    /// Declares them for key blocks of `cols` keys; `shapes` are the tiles in which q, k, v and o move.
    pub fn declare(p: &Params<'k, ForwardCall>, features: &Features, cols: u32, shapes: [TileShape; 4]) -> Self {
        let ragged = features.ragged;
        let rank = Sequences::rank(ragged);
        let q = p.tensor("q", shapes[0], rank, |call| call.q.span());
        let keys = p.tensor("k", shapes[1], rank, |call| call.k.span());
        let values = p.tensor("v", shapes[2], rank, |call| call.v.span());
        let o = match features.results.is_f32() {
            true => OutputMemory::F32(Rows::declare(p, "o", Of::O, |call| &call.o)),
            false => OutputMemory::Copied(p.tensor("o", shapes[3], rank, |call| call.o.span())),
        };
        let lse = p.pointer("lse", |call| call.results.lse);
        let counters = p.pointer("counters", |call| call.common.counters);
        let lse_rows = p.u32("lse_rows", |call| call.results.lse_rows as u32);
        let heads = p.divisor("heads", |call| call.heads as u32);
        let group = p.divisor("group", |call| call.common.group as u32);
        let scale = p.f32("scale", |call| call.common.scale);
        let sequences = Sequences::declare(p, ragged, |call| call.common.dense(), |call| call.common.ragged());
        let bands = (!ragged.any()).then(|| Equal::declare(p, |call| call.bands()));
        let lists = features.blocks.map(|blocks| Lists::declare(p, blocks, cols, |call| call.lists()));
        let modifiers = Parameters::declare(p, &features.modifiers, |call| &call.common.aux);
        let sinks = features.sinks.map(|dtype| Sinks::declare(p, dtype, |call| call.results.sinks()));
        let nonfinite = features.hides_keys().then(|| NonfinitePath::declare(p, |call| call.common.plain()));
        let sequences = match features.modifiers.is_empty() {
            true => sequences,
            false => sequences.counting(p, |call| call.common.dense()),
        };
        ForwardParams {
            q,
            keys,
            values,
            o,
            lse,
            counters,
            lse_rows,
            heads,
            group,
            scale,
            sequences,
            bands,
            lists,
            modifiers,
            sinks,
            nonfinite,
        }
    }
}
