//! The parameters of the `mma.sync` kernel, each with its launch argument.

use crate::attention::forward::call::{ForwardCall, RowTensor};
use crate::attention::forward::features::Features;
use crate::attention::forward::mma_sync::config::SyncConfig;
use crate::params::{Lens, Params};
use crate::parts::block_lists::Lists;
use crate::parts::modifier::{Parameters, Sinks};
use crate::parts::nonfinite::NonfinitePath;
use crate::parts::schedule::{Equal, Of, Work};
use crate::parts::sequences::Sequences;
use fulgurite_ptx::{Divisor, GlobalRows, Half, Pair, Pointer, Val, Word};

/// A tensor of rows that threads address themselves. Strides are in bytes.
pub(in crate::attention::forward) struct RowMemory<'k> {
    of: Of,
    memory: Pointer<'k, u32>,
    batch: Val<'k, u64>,
    row: Val<'k, u64>,
    head: Val<'k, u64>,
    /// Bytes per row.
    bytes: Val<'k, u32>,
}

impl<'k> RowMemory<'k> {
    pub fn declare(p: &Params<'k, ForwardCall>, name: &str, of: Of, at: impl Lens<ForwardCall, RowTensor>) -> Self {
        let stride =
            |axis: usize| move |call: &ForwardCall| at(call).tensor.strides[axis] * u64::from(at(call).number.bytes());
        RowMemory {
            of,
            memory: p.pointer(name, move |call| at(call).tensor.span),
            batch: p.u64(&format!("{name}_batch"), stride(0)),
            row: p.u64(&format!("{name}_row"), stride(1)),
            head: p.u64(&format!("{name}_head"), stride(2)),
            bytes: p
                .u32(&format!("{name}_bytes"), move |call| at(call).tensor.shape[3] as u32 * at(call).number.bytes()),
        }
    }

    /// The rows of a head in the tile's sequence, from row `first` on; `count` is the number of the sequence's rows.
    #[track_caller]
    pub fn rows(
        &self,
        sequences: &Sequences<'k>,
        work: &Work<'k>,
        head: Val<'k, u32>,
        [first, count]: [Val<'k, u32>; 2],
    ) -> GlobalRows<'k> {
        let part = |n: Val<'k, u32>, stride: Val<'k, u64>| n.to_u64().mul_wide_64(stride);
        let start = self.memory.address() + part(head, self.head);
        let address = match sequences.ragged() {
            Some(unequal) => start + part(unequal.slice(work, self.of).start + first, self.row),
            None => start + part(work.batch, self.batch) + part(first, self.row),
        };
        GlobalRows { address, stride: self.row, rows: count - first.min(count), bytes: self.bytes }
    }
}

/// The kernel's parameters.
pub(super) struct SyncParams<'k, T> {
    pub q: RowMemory<'k>,
    pub k: RowMemory<'k>,
    pub v: RowMemory<'k>,
    pub o: RowMemory<'k>,
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
            q: RowMemory::declare(p, "q", Of::Q, |call| &call.q),
            k: RowMemory::declare(p, "k", Of::K, |call| &call.k),
            v: RowMemory::declare(p, "v", Of::V, |call| &call.v),
            o: RowMemory::declare(p, "o", Of::O, |call| &call.o),
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
            nonfinite: features.hides_elements().then(|| NonfinitePath::declare(p, |call| call.common.plain())),
        }
    }
}
