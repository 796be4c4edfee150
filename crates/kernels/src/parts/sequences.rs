//! The sequences of a batch: all equal in length, or ragged.
//!
//! Kernels ask [`Sequences`] for row positions and sequence lengths; only this module distinguishes the two kinds.

use crate::params::{Lens, Params};
use crate::parts::arguments::DeviceTensor;
use crate::parts::mask::{Lengths, Spans};
use crate::parts::schedule::{Of, Ragged, STEPS, Sequence, SequenceArgs, Unequal, Work};
use fulgurite_core::Mask;
use fulgurite_ptx::{Scope, Val, Who};

/// Visible keys of equal sequences. A launch leaves the others out: a hidden key has probability 0, but 0 times an
/// infinite or NaN value would still be NaN.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Visible {
    pub first: u64,
    pub count: u64,
}

impl Visible {
    pub fn of(mask: &Mask, q_len: u64, k_len: u64) -> Visible {
        let [q_len, k_len] = [q_len, k_len].map(|n| n as usize);
        if q_len == 0 {
            return Visible { first: 0, count: 0 };
        }
        let (first, end) = (mask.keys(0, q_len, k_len).start, mask.keys(q_len - 1, q_len, k_len).end);
        Visible { first: first as u64, count: end.saturating_sub(first) as u64 }
    }

    /// The visible rows of a tensor. With no keys everything is masked, so any valid address will do: use `any`'s.
    pub fn part(&self, tensor: &DeviceTensor, any: &DeviceTensor) -> DeviceTensor {
        match self.count == 0 || tensor.shape.contains(&0) {
            true => DeviceTensor { shape: [1, 1, 1, any.shape[3]], ..*any },
            false => tensor.rows(self.first, self.count),
        }
    }
}

/// Launch arguments of [`Dense`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseArgs {
    pub q_len: u64,
    /// Keys per sequence, visible or not.
    pub k_len: u64,
    pub visible: Visible,
}

/// A batch of sequences of equal lengths.
pub(crate) struct Dense<'k> {
    pub q_len: Val<'k, u32>,
    /// Lengths of the visible keys.
    pub lengths: Lengths<'k>,
    counted: Option<CountedKeys<'k>>,
}

/// Key indices as expressions see them: hidden keys count.
#[derive(Clone, Copy)]
struct CountedKeys<'k> {
    /// Index of the first visible key.
    first: Val<'k, u32>,
    /// Keys per sequence, visible or not.
    all: Val<'k, u32>,
}

impl<'k> Dense<'k> {
    /// Declares the parameters of the lengths.
    pub fn declare<C: 'static>(p: &Params<'k, C>, at: impl Lens<C, DenseArgs>) -> Self {
        let q_len = p.u32("q_len", move |call| at(call).q_len as u32);
        let k_len = p.u32("k_len", move |call| at(call).visible.count as u32);
        let bottom_right = p.i32("bottom_right", move |call| {
            let DenseArgs { q_len, k_len, visible } = *at(call);
            (k_len as i64 - q_len as i64 - visible.first as i64) as i32
        });
        let top_left = p.i32("top_left", move |call| -(at(call).visible.first as i64) as i32);
        Dense { q_len, lengths: Lengths { k: k_len.to_i32(), bottom_right, top_left }, counted: None }
    }

    /// Declares the parameters of key indices as expressions see them.
    pub fn counting<C: 'static>(self, p: &Params<'k, C>, at: impl Lens<C, DenseArgs>) -> Self {
        let first = p.u32("first_key", move |call| at(call).visible.first as u32);
        let all = p.u32("all_keys", move |call| at(call).k_len as u32);
        Dense { counted: Some(CountedKeys { first, all }), ..self }
    }
}

/// Lengths that expressions read.
#[derive(Clone, Copy)]
pub(crate) struct Counts<'k> {
    pub q_len: Val<'k, u32>,
    pub k_len: Val<'k, u32>,
    /// Index of the first visible key.
    pub first_key: Val<'k, u32>,
}

/// Keys of a sequence that some query sees.
#[derive(Clone, Copy)]
pub(crate) struct VisibleKeys<'k> {
    pub count: Val<'k, u32>,
    /// Index of the first visible key.
    pub first: Val<'k, u32>,
}

/// One sequence of a batch, found by its index.
#[derive(Clone, Copy)]
pub(crate) struct SequenceOfBatch<'k> {
    /// `None` if all sequences have equal length.
    pub sequence: Option<Sequence<'k>>,
    /// Number of query rows that the sequence has memory for.
    pub q_rows: Val<'k, u32>,
    /// Queries in use; at least one in a ragged batch.
    pub q_len: Val<'k, u32>,
    pub lengths: Lengths<'k>,
}

/// A tile of queries of any schedule.
pub(crate) trait QueryTile<'k> {
    fn batch(&self) -> Val<'k, u32>;
    /// The tile's message, which ragged sequences need.
    fn work(&self) -> Work<'k>;
}

impl<'k> QueryTile<'k> for Work<'k> {
    fn batch(&self) -> Val<'k, u32> {
        self.batch
    }
    fn work(&self) -> Work<'k> {
        *self
    }
}

/// The sequences of a batch among a kernel's parameters.
pub(crate) enum Sequences<'k> {
    Dense(Dense<'k>),
    Ragged(Unequal<'k>),
}

impl<'k> Sequences<'k> {
    /// Declares the parameters of the batch's kind. Tiles of ragged batches are tiles of queries.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        ragged: Ragged,
        dense: impl Lens<C, DenseArgs>,
        lengths: impl Lens<C, SequenceArgs>,
    ) -> Self {
        match ragged.any() {
            true => Sequences::Ragged(Unequal::declare(p, ragged, 0, &STEPS, lengths)),
            false => Sequences::Dense(Dense::declare(p, dense)),
        }
    }

    /// Declares the parameters of key indices as expressions see them, if the lengths do not give them.
    pub fn counting<C: 'static>(self, p: &Params<'k, C>, at: impl Lens<C, DenseArgs>) -> Self {
        match self {
            Sequences::Dense(dense) => Sequences::Dense(dense.counting(p, at)),
            ragged => ragged,
        }
    }

    /// Axes of a tensor of rows: element, row, head, batch; a ragged tensor has one more.
    pub fn rank(ragged: Ragged) -> u32 {
        if ragged.any() { 5 } else { 4 }
    }

    /// Coordinates of a tile's row for TMA.
    #[track_caller]
    pub fn at(
        &self,
        tile: &dyn QueryTile<'k>,
        of: Of,
        column: Val<'k, u32>,
        row: Val<'k, u32>,
        head: Val<'k, u32>,
    ) -> Vec<Val<'k, u32>> {
        match self {
            Sequences::Ragged(unequal) => unequal.slice(&tile.work(), of).at(column, row, head).to_vec(),
            Sequences::Dense(_) => vec![column, row, head, tile.batch()],
        }
    }

    /// Lengths for masks.
    #[track_caller]
    pub fn lengths(&self, sequence: Option<Sequence<'k>>) -> Lengths<'k> {
        match self {
            Sequences::Ragged(_) => known(sequence).lengths(),
            Sequences::Dense(dense) => dense.lengths,
        }
    }

    /// Lengths for expressions; `None` if the kernel has no expressions.
    pub fn counts(&self, sequence: Option<Sequence<'k>>) -> Option<Counts<'k>> {
        match self {
            Sequences::Ragged(_) => {
                let Sequence { q_len, k_len, first, .. } = known(sequence);
                Some(Counts { q_len, k_len, first_key: first })
            }
            Sequences::Dense(dense) => {
                dense.counted.map(|keys| Counts { q_len: dense.q_len, k_len: keys.all, first_key: keys.first })
            }
        }
    }

    /// Keys that some query sees.
    pub fn visible(&self, sequence: Option<Sequence<'k>>) -> VisibleKeys<'k> {
        match self {
            Sequences::Ragged(_) => {
                let Sequence { seen, first, .. } = known(sequence);
                VisibleKeys { count: seen, first }
            }
            Sequences::Dense(dense) => {
                let count = dense.lengths.k.to_u32();
                VisibleKeys { count, first: dense.counted.map_or(count.literal(0), |keys| keys.first) }
            }
        }
    }

    /// Rows of queries that a sequence has memory for.
    pub fn q_rows(&self, sequence: Option<Sequence<'k>>) -> Val<'k, u32> {
        match self {
            Sequences::Ragged(_) => known(sequence).q_room,
            Sequences::Dense(dense) => dense.q_len,
        }
    }

    /// A sequence by its index.
    #[track_caller]
    pub fn of_batch<W: Who>(&self, w: &Scope<'k, W>, batch: Val<'k, u32>, spans: &Spans) -> SequenceOfBatch<'k> {
        match self {
            Sequences::Dense(dense) => {
                SequenceOfBatch { sequence: None, q_rows: dense.q_len, q_len: dense.q_len, lengths: dense.lengths }
            }
            Sequences::Ragged(unequal) => {
                let sequence = unequal.sequence(w, batch, spans);
                // Rows past the last query in use are computed as copies of that query.
                let q_len = sequence.q_len.max(1);
                let (q_rows, lengths) = (sequence.q_room, sequence.lengths());
                SequenceOfBatch { sequence: Some(sequence), q_rows, q_len, lengths }
            }
        }
    }

    /// The ragged sequences; `None` if all sequences are equal.
    pub fn ragged(&self) -> Option<&Unequal<'k>> {
        match self {
            Sequences::Ragged(unequal) => Some(unequal),
            Sequences::Dense(_) => None,
        }
    }

    /// Queries per sequence; `None` if the batch is ragged.
    pub fn q_len(&self) -> Option<Val<'k, u32>> {
        match self {
            Sequences::Dense(dense) => Some(dense.q_len),
            Sequences::Ragged(_) => None,
        }
    }
}

fn known(sequence: Option<Sequence<'_>>) -> Sequence<'_> {
    sequence.expect("bug in fulgurite: a tile of a ragged batch without its sequence")
}
