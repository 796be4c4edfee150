//! The parameters of the `mma.sync` kernel, each with its launch argument.

use crate::attention::backward::d_q::service::Log;
use crate::attention::backward::heads::HeadParts;
use crate::attention::backward::marks::Marks;
use crate::attention::backward::modifiers::ModifierParams;
use crate::attention::backward::state::{Call, declare_marks};
use crate::attention::backward::tiles::{Of, TileMap, Work};
use crate::attention::backward::{Features, KernelShape, Spread};
use crate::params::{Params, given};
use crate::parts::mask::Spans;
use crate::parts::row_memory::RowMemory;
use fulgurite_ptx::{GlobalRows, Pointer, Val};

/// Rows of equal sequences.
struct EqualRows<'k> {
    /// First and past-the-last key, and the same of queries, that are read.
    seen: [[Val<'k, u32>; 2]; 2],
    /// Keys of a sequence.
    keys: Val<'k, u32>,
}

/// The kernel's parameters.
pub(super) struct SyncParams<'k> {
    /// In the order of [`Of`].
    rows: Vec<RowMemory<'k>>,
    equal: Option<EqualRows<'k>>,
    /// -LSE in powers of two, and delta, of padded rows.
    pub shift: Pointer<'k, f32>,
    pub delta: Pointer<'k, f32>,
    /// f32 sums of d_q.
    pub sums: Pointer<'k, f32>,
    /// The marks of d_k and d_v, unless heads are spread over CTAs.
    pub marks: Option<[Marks<'k>; 2]>,
    /// f32 parts of d_k and d_v, which replace them if heads are spread over CTAs.
    pub parts: Option<HeadParts<'k>>,
    pub map: TileMap<'k>,
    pub modifiers: Option<ModifierParams<'k>>,
    pub scale_log2: Val<'k, f32>,
    pub scale: Val<'k, f32>,
}

impl<'k> SyncParams<'k> {
    pub fn declare(p: &Params<'k, Call>, features: &Features, shape: &KernelShape) -> Self {
        let ragged = features.ragged;
        let spreads = shape.spread != Spread::No;
        let rows = [("q", 0usize), ("k", 1), ("v", 2), ("d_o", 3), ("d_k", 4), ("d_v", 5)];
        let rows = rows[..if spreads { 4 } else { 6 }]
            .iter()
            .map(|&(name, i)| RowMemory::declare(p, name, move |call: &Call| &given(&call.threads).tensors[i], |_| 2))
            .collect();
        let equal = (!ragged.any()).then(|| {
            let bound =
                |(name, side, end): (&str, usize, usize)| p.u32(name, move |call| given(&call.threads).seen[side][end]);
            let seen = [
                [("first_seen_key", 0, 0), ("end_of_seen_keys", 0, 1)].map(bound),
                [("first_seen_query", 1, 0), ("end_of_seen_queries", 1, 1)].map(bound),
            ];
            EqualRows { seen, keys: p.u32("keys", |call| given(&call.threads).keys) }
        });
        let shift = p.pointer::<f32>("shift", |call| call.shift);
        let delta = p.pointer::<f32>("delta", |call| call.delta);
        let sums = p.pointer::<f32>("sums", |call| call.sums);
        let marks = (!spreads).then(|| declare_marks(p, features));
        let parts = spreads.then(|| HeadParts::declare(p, |call: &Call| &call.head_parts, shape.widths));
        let spans = Spans::of(&features.mask).transposed();
        let map = TileMap::declare(p, |call: &Call| &call.map, (shape, false, ragged), spans);
        // The kernel has no service that waits, so the log stays empty.
        let modifiers = (&features.modifiers, ragged.any());
        let modifiers = ModifierParams::declare(p, |call: &Call| &call.modifiers, modifiers, &Log::new());
        let scale_log2 = p.f32("scale_log2", |call| call.scale_log2);
        let scale = p.f32("scale", |call| call.scale);
        SyncParams { rows, equal, shift, delta, sums, marks, parts, map, modifiers, scale_log2, scale }
    }

    /// The rows of a tensor in a tile's sequence, from row `first` on.
    #[track_caller]
    pub fn rows(&self, of: Of, work: &Work<'k>, head: Val<'k, u32>, first: Val<'k, u32>) -> GlobalRows<'k> {
        let memory = &self.rows[of as usize];
        let (place, count) = self.map.rows(of, work);
        match (count, &self.equal) {
            (Some(count), _) => memory.rows(|| place, head, [first, count]),
            (None, Some(equal)) if matches!(of, Of::DK | Of::DV) => memory.rows(|| place, head, [first, equal.keys]),
            (None, Some(equal)) => {
                let [start, end] = equal.seen[usize::from(matches!(of, Of::Q | Of::DO))];
                let rows = memory.rows(|| place, head, [first, end]);
                GlobalRows { skip: Some(start.max(first) - first), ..rows }
            }
            (None, None) => unreachable!("bug in fulgurite: equal sequences without their lengths"),
        }
    }
}
