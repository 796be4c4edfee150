//! The tile scheduler: the order of query tiles, and the position of each tile's sequence.
//!
//! A counter hands out tile numbers. In a batch of equal sequences, a number determines its tile. In a ragged batch,
//! the loading thread walks along the sequences as the numbers grow.

use crate::params::{Lens, Params};
use crate::parts::mask::{Lengths, Spans};
use fulgurite_core::Layout;
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Divisor, Pointer, Scope, Slice, Val, Var, Who};

/// The lengths that differ between sequences.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ragged {
    /// Whether sequences are stored back to back and found by offsets. Otherwise each has memory for the same number of
    /// rows.
    pub packed: bool,
    /// Whether used lengths of queries are given.
    pub used_q: bool,
    /// Whether used lengths of keys are given.
    pub used_k: bool,
}

impl Ragged {
    /// Whether any sequence has its own length.
    pub fn any(self) -> bool {
        self.packed || self.used_q || self.used_k
    }
}

/// Position of a ragged sequence in the tensors, and its lengths.
#[derive(Clone, Copy)]
pub struct Sequence<'k> {
    /// First row of packed q and o.
    pub q_start: Val<'k, u32>,
    /// Rows of q and o that the sequence has memory for.
    pub q_room: Val<'k, u32>,
    /// Queries and keys in use.
    pub q_len: Val<'k, u32>,
    pub k_len: Val<'k, u32>,
    /// First row of packed k and v.
    pub k_start: Val<'k, u32>,
    /// The first key that some query sees. Kernels never load invisible keys at either end: 0 times NaN would still be
    /// NaN.
    pub first: Val<'k, u32>,
    /// Number of keys from the first visible one to the last.
    pub seen: Val<'k, u32>,
}

impl<'k> Sequence<'k> {
    /// Lengths for masks.
    #[track_caller]
    pub fn lengths(&self) -> Lengths<'k> {
        let [q, k, first] = [self.q_len, self.k_len, self.first].map(|n| n.to_i32());
        Lengths { k: self.seen.to_i32(), bottom_right: k - q - first, top_left: q.literal(0) - first }
    }
    fn words(&self) -> [Val<'k, u32>; WORDS] {
        [self.q_start, self.q_room, self.q_len, self.k_len, self.k_start, self.first, self.seen]
    }
    fn from_words([q_start, q_room, q_len, k_len, k_start, first, seen]: [Val<'k, u32>; WORDS]) -> Self {
        Sequence { q_start, q_room, q_len, k_len, k_start, first, seen }
    }
}

/// Names of the parameters for the row stride between sequences, one for each tensor.
pub const STEPS: [&str; 4] = ["q_step", "k_step", "v_step", "o_step"];

/// A tensor of rows, in the order of [`STEPS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    Q,
    K,
    V,
    O,
}

/// Number of words that describe a sequence in a message.
const WORDS: usize = 7;

/// A tile of queries, as the loading thread announces it to the compute warpgroups.
#[derive(Clone, Copy)]
pub struct Work<'k> {
    /// First row in the sequence.
    pub row: Val<'k, u32>,
    pub head: Val<'k, u32>,
    pub batch: Val<'k, u32>,
    /// First and past-the-last key block. An end of 0 means that there are no more tiles.
    pub blocks: [Val<'k, u32>; 2],
    /// The sequence of a ragged batch.
    pub sequence: Option<Sequence<'k>>,
    /// Index of the tile, if its message contains it.
    pub tile: Option<Val<'k, u32>>,
}

/// The words that a tile's message contains.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Whether the first key block may differ from 0.
    pub first: bool,
    pub ragged: bool,
    /// Whether a tile's message contains its index.
    pub tile: bool,
}

impl Shape {
    /// Number of words in a message.
    pub fn words(self) -> usize {
        let sequence = if self.ragged { WORDS } else { 0 };
        (5 + sequence + usize::from(self.tile)).next_multiple_of(4)
    }
}

impl<'k> Work<'k> {
    pub fn message(self, shape: Shape) -> Vec<Val<'k, u32>> {
        let mut message = vec![self.row, self.head, self.batch, self.blocks[1], self.blocks[0]];
        message.extend(self.sequence.iter().flat_map(|s| s.words()));
        message.extend(self.tile.filter(|_| shape.tile));
        message
    }
    pub fn read(message: &[Val<'k, u32>], shape: Shape) -> Self {
        let &[row, head, batch, end, first, ref rest @ ..] = message else {
            panic!("bug in fulgurite: a message of {} numbers", message.len())
        };
        let first = if shape.first { first } else { row.literal(0) };
        let sequence = shape.ragged.then(|| Sequence::from_words(std::array::from_fn(|i| rest[i])));
        let tile = shape.tile.then(|| rest[if shape.ragged { WORDS } else { 0 }]);
        Work { row, head, batch, blocks: [first, end], sequence, tile }
    }
}

/// A tile of queries in registers that a loop carries.
pub struct WorkVars<'k> {
    vars: [Var<'k, u32>; 4],
    first: Option<Var<'k, u32>>,
    sequence: Option<[Var<'k, u32>; WORDS]>,
    tile: Option<Var<'k, u32>>,
}

impl<'k> WorkVars<'k> {
    pub fn new<W: Who>(w: &Scope<'k, W>, shape: Shape) -> Self {
        WorkVars {
            vars: [0; 4].map(|_| w.var(0u32)),
            first: shape.first.then(|| w.var(0u32)),
            sequence: shape.ragged.then(|| [0; WORDS].map(|_| w.var(0u32))),
            tile: shape.tile.then(|| w.var(0u32)),
        }
    }
    pub fn set(&self, work: Work<'k>) {
        let [first, end] = work.blocks;
        self.vars.iter().zip([work.row, work.head, work.batch, end]).for_each(|(var, x)| var.set(x));
        self.first.iter().for_each(|var| var.set(first));
        if let (Some(vars), Some(sequence)) = (&self.sequence, work.sequence) {
            vars.iter().zip(sequence.words()).for_each(|(var, x)| var.set(x));
        }
        if let (Some(var), Some(tile)) = (self.tile, work.tile) {
            var.set(tile);
        }
    }
    pub fn get(&self) -> Work<'k> {
        let [row, head, batch, end] = self.vars.map(|var| var.get());
        let first = self.first.map_or(row.literal(0), |var| var.get());
        let sequence = self.sequence.map(|vars| Sequence::from_words(vars.map(|var| var.get())));
        let tile = self.tile.map(|var| var.get());
        Work { row, head, batch, blocks: [first, end], sequence, tile }
    }
}

/// The tiles of a batch of equal sequences.
///
/// Bands of `order` (head, sequence) pairs follow each other; the keys of a band fit in L2. The last band has `last`
/// pairs. Within a band, the last rows go first, because under a causal mask they have the most keys.
#[derive(Clone, Copy)]
pub struct Equal<'k> {
    pub tiles: Val<'k, u32>,
    m_tiles: Val<'k, u32>,
    pub pairs: Val<'k, u32>,
    /// Number of bands before the last one.
    bands: Val<'k, u32>,
    /// Tiles per band, in all bands but the last.
    band: Divisor<'k>,
    order: Divisor<'k>,
    last: Divisor<'k>,
}

impl<'k> Equal<'k> {
    /// Declares the parameters with their arguments.
    pub fn declare<C: 'static>(p: &Params<'k, C>, bands: impl Lens<C, BandArgs>) -> Self {
        Equal {
            m_tiles: p.u32("m_tiles", move |call| bands(call).m_tiles),
            tiles: p.u32("tiles", move |call| bands(call).tiles),
            pairs: p.u32("pairs", move |call| bands(call).pairs),
            bands: p.u32("bands", move |call| bands(call).bands),
            band: p.divisor("band", move |call| bands(call).band),
            order: p.divisor("order", move |call| bands(call).order),
            last: p.divisor("last", move |call| bands(call).last),
        }
    }

    /// Batch and head of a tile, and its index among the head's tiles in row order.
    #[track_caller]
    pub fn find(&self, heads: Divisor<'k>, tile: Val<'k, u32>) -> [Val<'k, u32>; 3] {
        let [batch, head, up] = self.position(heads, tile);
        [batch, head, self.m_tiles - 1 - up]
    }

    /// Batch and head of a tile, and the number of the head's tiles that precede it in the schedule.
    #[track_caller]
    pub fn position(&self, heads: Divisor<'k>, tile: Val<'k, u32>) -> [Val<'k, u32>; 3] {
        let number = self.band.div_rem(tile)[0].min(self.bands);
        let count = Divisor::select(number.lt(self.bands), self.order, self.last);
        let [up, across] = count.div_rem(tile - number * self.band.value());
        let [batch, head] = heads.div_rem(number * self.order.value() + across);
        [batch, head, up]
    }

    /// Index of a tile, from its batch, its head, and its index among the head's tiles in row order.
    #[track_caller]
    pub fn index(&self, heads: Val<'k, u32>, [batch, head, number]: [Val<'k, u32>; 3]) -> Val<'k, u32> {
        let pair = batch * heads + head;
        let band = self.order.div_rem(pair)[0].min(self.bands);
        let count = band.lt(self.bands).select(self.order.value(), self.last.value());
        let across = pair - band * self.order.value();
        band * self.band.value() + (self.m_tiles - 1 - number) * count + across
    }

    /// Number of tiles per head.
    pub fn tiles_of_head(&self) -> Val<'k, u32> {
        self.m_tiles
    }
}

/// Launch arguments of [`Equal`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BandArgs {
    m_tiles: u32,
    tiles: u32,
    pairs: u32,
    bands: u32,
    band: u32,
    order: u32,
    last: u32,
}

impl BandArgs {
    /// `tiles` tiles of each of `pairs` (head, sequence) pairs, in bands of `order` pairs and a last band of `last` pairs.
    pub fn new([tiles, pairs]: [u64; 2], [order, last]: [u64; 2]) -> BandArgs {
        let bands = (pairs - last) / order.max(1);
        BandArgs {
            m_tiles: tiles as u32,
            tiles: (tiles * pairs) as u32,
            pairs: pairs as u32,
            bands: bands as u32,
            band: (order * tiles) as u32,
            order: order as u32,
            last: last as u32,
        }
    }
}

/// Launch arguments of [`Sides`] and [`Unequal`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequenceArgs {
    batch: u32,
    rows: [u32; 2],
    offsets: Option<[Span; 2]>,
    used: [Option<Span>; 2],
    /// Row stride between sequences in each tensor of rows; empty for packed sequences.
    pub steps: Vec<u32>,
}

impl SequenceArgs {
    /// The sequences of a layout, with offsets if they are packed, and used lengths of queries and keys if given.
    pub fn new(layout: Layout, offsets: Option<[Span; 2]>, used: [Option<Span>; 2]) -> SequenceArgs {
        let (batch, q_rows, k_rows) = match layout {
            Layout::Dense { batch, q_len, k_len } => (batch, q_len, k_len),
            Layout::Packed(p) => (p.batch, p.total_q, p.total_k),
        };
        let rows = [q_rows as u32, k_rows as u32];
        SequenceArgs { batch: batch as u32, rows, offsets, used, steps: Vec::new() }
    }

    fn offsets(&self, side: usize) -> Span {
        self.offsets.expect("bug in fulgurite: packed sequences without offsets")[side]
    }

    fn used(&self, side: usize) -> Span {
        self.used[side].expect("bug in fulgurite: used lengths are not given")
    }
}

/// Start and length of ragged sequences, for queries (side 0) and keys (side 1).
pub struct Sides<'k> {
    ragged: Ragged,
    /// The side whose tiles the scheduler walks. Packed batches have one extra sequence on this side: the rows of no
    /// sequence.
    walked: usize,
    batch: Val<'k, u32>,
    /// Rows of each sequence's memory, or of the whole tensor if sequences are packed.
    rows: [Val<'k, u32>; 2],
    offsets: Option<[Pointer<'k, u32>; 2]>,
    used: [Option<Pointer<'k, u32>>; 2],
}

impl<'k> Sides<'k> {
    /// Declares the parameters with their arguments.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        ragged: Ragged,
        walked: usize,
        args: impl Lens<C, SequenceArgs>,
    ) -> Self {
        let batch = p.u32("batch", move |call| args(call).batch);
        let rows = [("q_rows", 0), ("k_rows", 1)].map(|(name, side)| p.u32(name, move |call| args(call).rows[side]));
        let offset = |(name, side)| p.array::<u32>(name, move |call| args(call).offsets(side));
        let offsets = ragged.packed.then(|| [("cu_seqlens_q", 0), ("cu_seqlens_k", 1)].map(offset));
        let used = [(ragged.used_q, "used_q", 0), (ragged.used_k, "used_k", 1)]
            .map(|(has, name, side)| has.then(|| p.array(name, move |call| args(call).used(side))));
        Sides { ragged, walked, batch, rows, offsets, used }
    }

    /// Number of sequences to walk.
    pub fn count(&self) -> Val<'k, u32> {
        if self.ragged.packed { self.batch + 1 } else { self.batch }
    }

    /// First row (in a packed tensor) and number of rows of a sequence. Offsets that do not ascend give empty
    /// sequences.
    #[track_caller]
    pub fn room<W: Who>(&self, t: &Scope<'k, W>, side: usize, sequence: Val<'k, u32>) -> [Val<'k, u32>; 2] {
        let rows = self.rows[side];
        match self.offsets {
            Some(offsets) => {
                let start = offsets[side].load(t, sequence).min(rows);
                let last = sequence.eq(self.batch);
                let end = offsets[side].load(t, (sequence + 1).min(self.batch)).min(rows);
                // The extra sequence has the rows after the last sequence on the walked side, and none on the other.
                let end = last.select::<u32>(if side == self.walked { rows } else { start }, end);
                [start, end.max(start) - start]
            }
            None => [t.constant(0u32), rows],
        }
    }

    /// Index of a sequence's first step of `rows` queries. Sequences do not share steps, and each has at least one.
    #[track_caller]
    pub fn first_step<W: Who>(&self, t: &Scope<'k, W>, sequence: Val<'k, u32>, rows: u32) -> Val<'k, u32> {
        self.first_block(t, 0, sequence, rows)
    }

    /// Number of a sequence's first block of `rows` rows of a side. Sequences do not share blocks, and each has at least one.
    #[track_caller]
    pub fn first_block<W: Who>(
        &self,
        t: &Scope<'k, W>,
        side: usize,
        sequence: Val<'k, u32>,
        rows: u32,
    ) -> Val<'k, u32> {
        match self.offsets {
            Some(offsets) => offsets[side].load(t, sequence).min(self.rows[side]) / rows + sequence,
            None => ((self.rows[side] + (rows - 1)) / rows).max(1) * sequence,
        }
    }

    /// The sequence of a step: the last one whose first step is not after it.
    pub fn of_step<W: Who>(&self, t: &Scope<'k, W>, step: Val<'k, u32>, rows: u32) -> Val<'k, u32> {
        self.of_block(t, 0, step, rows)
    }

    /// The sequence that a block of `rows` rows of a side belongs to: the last one whose first block is not after it.
    pub fn of_block<W: Who>(&self, t: &Scope<'k, W>, side: usize, block: Val<'k, u32>, rows: u32) -> Val<'k, u32> {
        let (low, high) = (t.var(0u32), t.var(self.count()));
        t.repeat(|t, leave| {
            let middle = (low.get() + high.get()) / 2;
            leave.when((high.get() - low.get()).le(1));
            let after = self.first_block(t, side, middle, rows).gt(block);
            low.set(after.select(low.get(), middle));
            high.set(after.select(middle, high.get()));
        });
        low.get()
    }

    /// Number of rows of a sequence in use, at most `room`.
    #[track_caller]
    pub fn used<W: Who>(
        &self,
        t: &Scope<'k, W>,
        side: usize,
        sequence: Val<'k, u32>,
        room: Val<'k, u32>,
    ) -> Val<'k, u32> {
        let within = match self.used[side] {
            // A negative length counts as 0.
            Some(used) => used.load(t, sequence.min(self.batch - 1)).to_i32().max(0).to_u32().min(room),
            None => room,
        };
        match self.ragged.packed {
            true => sequence.eq(self.batch).select::<u32>(0, within),
            false => within,
        }
    }
}

/// The tiles of a ragged batch, sequence by sequence.
pub struct Unequal<'k> {
    pub sides: Sides<'k>,
    /// Row stride between sequences in each tensor of rows; `None` if sequences are packed.
    steps: Option<Vec<Val<'k, u32>>>,
}

/// The current sequence while the scheduler walks along a ragged batch.
pub struct RaggedWalk<'k> {
    sequence: Var<'k, u32>,
    /// Index of its first tile.
    first_tile: Var<'k, u32>,
    /// Number of its tiles in all heads.
    tiles: Var<'k, u32>,
    start: Var<'k, u32>,
    room: Var<'k, u32>,
}

/// A tile of a ragged batch.
pub struct RaggedTile<'k> {
    pub batch: Val<'k, u32>,
    pub head: Val<'k, u32>,
    /// Index among the head's tiles, in row order.
    pub number: Val<'k, u32>,
    pub sequence: Sequence<'k>,
}

impl<'k> Unequal<'k> {
    /// Declares the parameters with their arguments: tiles of the `walked` side, and tensors whose steps have these names.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        ragged: Ragged,
        walked: usize,
        steps: &[&str],
        args: impl Lens<C, SequenceArgs>,
    ) -> Self {
        let sides = Sides::declare(p, ragged, walked, args);
        let step = |(i, name): (usize, &&str)| p.u32(name, move |call| args(call).steps[i]);
        let steps = (!ragged.packed).then(|| steps.iter().enumerate().map(step).collect());
        Unequal { sides, steps }
    }

    /// First row of a sequence in the `tensor`-th tensor. `start` is its first row in a packed tensor.
    pub fn first_row(&self, tensor: usize, batch: Val<'k, u32>, start: Val<'k, u32>) -> Val<'k, u32> {
        self.steps.as_ref().map_or(start, |steps| batch * steps[tensor])
    }

    /// The rows of a tile's sequence in a tensor; for k and v, only the visible rows.
    #[track_caller]
    pub fn slice(&self, work: &Work<'k>, of: Of) -> Slice<'k> {
        let sequence = work.sequence.expect("bug in fulgurite: a tile without its sequence");
        let keys = matches!(of, Of::K | Of::V);
        let start = if keys { sequence.k_start } else { sequence.q_start };
        let start = self.first_row(of as usize, work.batch, start);
        match keys {
            true => Slice { start: start + sequence.first, rows: sequence.seen },
            false => Slice { start, rows: sequence.q_room },
        }
    }

    fn tiles(room: Val<'k, u32>, rows: u32, heads: Val<'k, u32>) -> Val<'k, u32> {
        (room + (rows - 1)) / rows * heads
    }

    /// Starts a walk before the first tile.
    pub fn start<W: Who>(&self, t: &Scope<'k, W>, rows: u32, heads: Val<'k, u32>) -> RaggedWalk<'k> {
        let [start, room] = self.sides.room(t, self.sides.walked, t.constant(0u32));
        RaggedWalk {
            sequence: t.var(0u32),
            first_tile: t.var(0u32),
            tiles: t.var(Self::tiles(room, rows, heads)),
            start: t.var(start),
            room: t.var(room),
        }
    }

    /// Advances the walk to the sequence of a tile, and returns whether the tile exists. Callers must ask in ascending
    /// order.
    pub fn seek<W: Who>(
        &self,
        t: &Scope<'k, W>,
        walk: &RaggedWalk<'k>,
        tile: Val<'k, u32>,
        rows: u32,
        heads: Val<'k, u32>,
    ) -> Val<'k, bool> {
        t.repeat(|t, leave| {
            leave.when((tile - walk.first_tile.get()).lt(walk.tiles.get()));
            let next = walk.sequence.get() + 1;
            leave.when(next.ge(self.sides.count()));
            let [start, room] = self.sides.room(t, self.sides.walked, next);
            walk.first_tile.set(walk.first_tile.get() + walk.tiles.get());
            walk.sequence.set(next);
            walk.start.set(start);
            walk.room.set(room);
            walk.tiles.set(Self::tiles(room, rows, heads));
        });
        (tile - walk.first_tile.get()).lt(walk.tiles.get())
    }

    /// Total number of tiles, once the walk has reached its end.
    pub fn total(walk: &RaggedWalk<'k>) -> Val<'k, u32> {
        walk.first_tile.get() + walk.tiles.get()
    }

    /// For a tile of the walk's sequence: the sequence, the head, the number of the head's tiles that precede it in the
    /// schedule, and the number of the head's tiles.
    #[track_caller]
    pub fn position(&self, walk: &RaggedWalk<'k>, tile: Val<'k, u32>, heads: Divisor<'k>) -> [Val<'k, u32>; 4] {
        let [up, head] = heads.div_rem(tile - walk.first_tile.get());
        [walk.sequence.get(), head, up, heads.div_rem(walk.tiles.get())[0]]
    }

    /// A tile of the walk's sequence.
    pub fn find<W: Who>(
        &self,
        t: &Scope<'k, W>,
        walk: &RaggedWalk<'k>,
        tile: Val<'k, u32>,
        heads: Divisor<'k>,
        spans: Option<&Spans>,
    ) -> RaggedTile<'k> {
        let [sequence, head, up, m_tiles] = self.position(walk, tile, heads);
        // The last rows go first: under a causal mask they have the most keys.
        let sequence_of = self.lengths(t, sequence, [walk.start.get(), walk.room.get()], spans);
        RaggedTile { batch: sequence, head, number: m_tiles - 1 - up, sequence: sequence_of }
    }

    /// A sequence by its index.
    pub fn sequence<W: Who>(&self, t: &Scope<'k, W>, number: Val<'k, u32>, spans: &Spans) -> Sequence<'k> {
        let queries = self.sides.room(t, 0, number);
        self.lengths(t, number, queries, Some(spans))
    }

    /// First and past-the-last row of packed q and o that belong to no sequence.
    pub fn rest<W: Who>(&self, t: &Scope<'k, W>) -> Option<[Val<'k, u32>; 2]> {
        let Sides { ragged, batch, rows, .. } = &self.sides;
        ragged.packed.then(|| [self.sides.room(t, 0, *batch)[0], rows[0]])
    }

    /// A sequence whose first query row and number of query rows are known.
    fn lengths<W: Who>(
        &self,
        t: &Scope<'k, W>,
        sequence: Val<'k, u32>,
        [q_start, q_room]: [Val<'k, u32>; 2],
        spans: Option<&Spans>,
    ) -> Sequence<'k> {
        let [k_start, k_room] = self.sides.room(t, 1, sequence);
        let q_len = self.sides.used(t, 0, sequence, q_room);
        let k_len = self.sides.used(t, 1, sequence, k_room);
        let (zero, [q, k]) = (t.constant(0i32), [q_len, k_len].map(|n| n.to_i32()));
        let whole = Lengths { k, bottom_right: k - q, top_left: zero };
        let bounded = |bounded: fn(&Spans) -> bool| spans.filter(|s| bounded(s));
        let first = bounded(Spans::bounded_left).map(|s| s.keys(zero, whole).start.max(0).min(k)).unwrap_or(zero);
        let end = bounded(Spans::bounded_right).map(|s| s.keys(q - 1, whole).end.max(first)).unwrap_or(k);
        let (first, seen) = (first.to_u32(), (end - first).to_u32());
        Sequence { q_start, q_room, q_len, k_len, k_start, first, seen }
    }
}

#[cfg(test)]
mod tests;
