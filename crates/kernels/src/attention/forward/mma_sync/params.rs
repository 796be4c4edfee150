//! The parameters of the `mma.sync` kernel, each with its launch argument.

use crate::attention::forward::call::{ForwardCall, RowTensor};
use crate::attention::forward::features::Features;
use crate::attention::forward::mma_sync::config::SyncConfig;
use crate::params::{Lens, Params};
use crate::parts::block_lists::Lists;
use crate::parts::modifier::{Parameters, Sinks};
use crate::parts::nonfinite::NonfinitePath;
use crate::parts::row_memory::{RowMemory, RowsOf};
use crate::parts::schedule::{Equal, Of, Work};
use crate::parts::sequences::Sequences;
use fulgurite_ptx::{Divisor, GlobalRows, Half, Pair, Pointer, Val, Word};

/// A tensor of rows, and which one it is.
pub(in crate::attention::forward) struct Rows<'k> {
    of: Of,
    memory: RowMemory<'k>,
}

impl<'k> Rows<'k> {
    pub fn declare(p: &Params<'k, ForwardCall>, name: &str, of: Of, at: impl Lens<ForwardCall, RowTensor>) -> Self {
        let bytes = move |call: &ForwardCall| at(call).number.bytes();
        Rows { of, memory: RowMemory::declare(p, name, move |call: &ForwardCall| &at(call).tensor, bytes) }
    }

    /// The rows of a head in the tile's sequence, from row `first` on; `count` is the number of the sequence's rows.
    #[track_caller]
    pub fn rows(
        &self,
        sequences: &Sequences<'k>,
        work: &Work<'k>,
        head: Val<'k, u32>,
        place: [Val<'k, u32>; 2],
    ) -> GlobalRows<'k> {
        let of = || match sequences.ragged() {
            Some(unequal) => RowsOf::Start(unequal.slice(work, self.of).start),
            None => RowsOf::Sequence(work.batch),
        };
        self.memory.rows(of, head, place)
    }
}

/// The kernel's parameters.
pub(super) struct SyncParams<'k, T> {
    pub q: Rows<'k>,
    pub k: Rows<'k>,
    pub v: Rows<'k>,
    pub o: Rows<'k>,
    pub lse: Pointer<'k, f32>,
    /// The second word counts key blocks that were computed twice.
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

impl<'k, T: Half> SyncParams<'k, T>
where
    Pair<T>: Word,
{
    pub fn declare(p: &Params<'k, ForwardCall>, features: &Features, config: &SyncConfig) -> Self {
        let ragged = features.ragged;
        let sequences = Sequences::declare(p, ragged, |call| call.common.dense(), |call| call.common.ragged());
        let sequences = match features.modifiers.is_empty() {
            true => sequences,
            false => sequences.counting(p, |call| call.common.dense()),
        };
        SyncParams {
            q: Rows::declare(p, "q", Of::Q, |call| &call.q),
            k: Rows::declare(p, "k", Of::K, |call| &call.k),
            v: Rows::declare(p, "v", Of::V, |call| &call.v),
            o: Rows::declare(p, "o", Of::O, |call| &call.o),
            lse: p.pointer("lse", |call| call.results.lse),
            counters: p.pointer("counters", |call| call.common.counters),
            lse_rows: p.u32("lse_rows", |call| call.results.lse_rows as u32),
            heads: p.divisor("heads", |call| call.heads as u32),
            group: p.divisor("group", |call| call.common.group as u32),
            scale: p.f32("scale", |call| call.common.scale),
            sequences,
            bands: (!ragged.any()).then(|| Equal::declare(p, |call| call.bands())),
            lists: features.blocks.map(|blocks| Lists::declare(p, blocks, config.cols, |call| call.lists())),
            modifiers: Parameters::declare(p, &features.modifiers, |call| &call.common.aux),
            sinks: features.sinks.map(|dtype| Sinks::declare(p, dtype, |call| call.results.sinks())),
            nonfinite: features.hides_keys().then(|| NonfinitePath::declare(p, |call| call.common.plain())),
        }
    }
}
