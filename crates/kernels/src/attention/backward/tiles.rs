//! Key tiles: the tile of a number, the position of its sequence, and the steps of queries that see it.

use crate::attention::backward::spread::HeadSpread;
use crate::attention::backward::step_ranges::{RangeArgs, StepRanges};
use crate::attention::backward::{BackwardConfig, KernelShape, Spread as SpreadShape};
use crate::params::{Lens, Params};
use crate::parts::mask::{Lengths, Spans};
use crate::parts::schedule::{BandArgs, Equal, Ragged, SequenceArgs, Unequal, Walk};
use fulgurite_ptx::{Divisor, Scope, Slice, Thread, Val, Who};

/// Parameters: rows from one sequence to the next, in the order of [`Of`].
pub const STEPS: [&str; 6] = ["q_step", "k_step", "v_step", "d_o_step", "d_k_step", "d_v_step"];

/// A tensor of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    Q,
    K,
    V,
    DO,
    DK,
    DV,
}

/// A tile of keys, or a piece of one, as the load thread hands it out.
#[derive(Clone, Copy)]
pub(crate) struct Work<'k> {
    /// Index in its head.
    pub tile: Val<'k, u32>,
    /// Key/value head, or the part of one where query heads are spread over CTAs.
    pub head: Val<'k, u32>,
    pub batch: Val<'k, u32>,
    /// Steps of queries that see it: the first, and past the last. An empty range with end 0 means that there are no more tiles.
    pub steps: [Val<'k, u32>; 2],
    /// With split tiles: its number among the split tiles. A piece has some of the steps.
    pub piece: Option<Val<'k, u32>>,
    /// The sequence, if sequences differ in length.
    pub sequence: Option<Sequence<'k>>,
}

/// A sequence of a batch whose sequences differ in length.
#[derive(Clone, Copy)]
pub(crate) struct Sequence<'k> {
    /// First row of packed q, and of packed k and v.
    q_start: Val<'k, u32>,
    k_start: Val<'k, u32>,
    k_room: Val<'k, u32>,
    /// Queries and keys in use.
    pub q_len: Val<'k, u32>,
    pub k_len: Val<'k, u32>,
    /// Index of its first step among those of a head.
    first_step: Val<'k, u32>,
}

/// Indices of a tile's first step, and of past its last, in a message.
pub(crate) const FIRST: usize = 3;
pub(crate) const END: usize = 4;
/// Words of a message, without and with a sequence.
const WORDS: [usize; 2] = [6, 11];

impl<'k> Work<'k> {
    pub fn message(self) -> Vec<Val<'k, u32>> {
        let mut message = vec![self.tile, self.head, self.batch, self.steps[0], self.steps[1]];
        message.extend(self.piece);
        message.extend(
            self.sequence.iter().flat_map(|s| [s.q_start, s.k_start, s.k_room, s.q_len, s.k_len, s.first_step]),
        );
        message
    }
}

/// Arguments of [`Tiles`].
#[derive(Debug, Clone)]
pub(crate) enum TileArgs {
    Equal(EqualArgs),
    Unequal(SequenceArgs),
}

/// Arguments of sequences of equal length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EqualArgs {
    pub bands: BandArgs,
    pub k_len: u32,
    /// The first key, and the first query, that the copy engine reads.
    pub first_key: u32,
    pub first_query: u32,
    /// Keys minus queries: the start of diagonals that end at the last query and key.
    pub bottom_right: i32,
}

impl TileArgs {
    fn equal(&self) -> &EqualArgs {
        match self {
            TileArgs::Equal(args) => args,
            TileArgs::Unequal(_) => unreachable!("bug in fulgurite: arguments of unequal sequences"),
        }
    }

    fn unequal(&self) -> &SequenceArgs {
        match self {
            TileArgs::Unequal(args) => args,
            TileArgs::Equal(_) => unreachable!("bug in fulgurite: arguments of equal sequences"),
        }
    }
}

/// How tiles are found by their numbers.
pub(crate) enum Tiles<'k> {
    Equal {
        tiles: Box<Equal<'k>>,
        k_len: Val<'k, u32>,
        /// The first key, and the first query, of the tensors that the copy engine reads. Others are read as zeros.
        first: [Val<'k, u32>; 2],
        /// Start of the mask's diagonals, aligned to the last query and key, and to the first ones.
        diagonals: [Val<'k, i32>; 2],
    },
    Unequal(Unequal<'k>),
}

impl<'k> Tiles<'k> {
    fn declare<C: 'static>(p: &Params<'k, C>, ragged: Ragged, args: impl Lens<C, TileMapArgs>) -> Self {
        if ragged.any() {
            return Tiles::Unequal(Unequal::declare(p, ragged, 1, &STEPS, move |call| args(call).tiles.unequal()));
        }
        let tiles = Box::new(Equal::declare(p, move |call| &args(call).tiles.equal().bands));
        let k_len = p.u32("k_len", move |call| args(call).tiles.equal().k_len);
        let first_key = p.u32("first_key", move |call| args(call).tiles.equal().first_key);
        let first_query = p.u32("first_query", move |call| args(call).tiles.equal().first_query);
        let bottom_right = p.i32("bottom_right", move |call| args(call).tiles.equal().bottom_right);
        let top_left = p.i32("top_left", |_| 0);
        Tiles::Equal { tiles, k_len, first: [first_key, first_query], diagonals: [bottom_right, top_left] }
    }

    fn ragged(&self) -> bool {
        matches!(self, Tiles::Unequal(_))
    }
}

/// A step of a tile, as it is loaded.
pub(crate) struct Step<'k> {
    /// Query head.
    pub head: Val<'k, u32>,
    /// Index in its sequence.
    pub step: Val<'k, u32>,
    /// Whether it is the first of its tile.
    pub first: Val<'k, bool>,
}

/// Arguments of [`TileMap`].
#[derive(Debug, Clone)]
pub(crate) struct TileMapArgs {
    /// Steps from one query head to the next.
    pub steps: u32,
    /// How the query heads of a key/value head are spread over CTAs.
    pub spread: HeadSpread,
    /// Key/value heads.
    pub heads: u32,
    /// Tiles from one part to the next, where sequences differ in length.
    pub part_tiles: u32,
    /// The steps that a block mask leaves to each tile.
    pub step_ranges: Option<RangeArgs>,
    pub tiles: TileArgs,
}

/// Heads spread over CTAs: what a kernel divides by and multiplies with.
struct Spread<'k> {
    /// Parts of the query heads of a key/value head.
    parts: Divisor<'k>,
    /// Query heads of a part, at most.
    most: Val<'k, u32>,
    /// Query heads.
    q_heads: Val<'k, u32>,
    /// Tiles from one part to the next, where sequences differ in length.
    part_tiles: Option<Val<'k, u32>>,
    /// Whether every part is one query head, and whether parts have equally many.
    single: bool,
    even: bool,
    packed: bool,
}

/// From the number of a tile to its keys, its sequence and the queries that see it.
pub(crate) struct TileMap<'k> {
    config: BackwardConfig,
    /// Spans of the mask with queries and keys exchanged.
    pub spans: Spans,
    /// Whether tiles take turns: the last keys of a head then go first.
    ordered: bool,
    /// Whether tiles are split: a message then has the number of the split tile.
    splits: bool,
    /// Steps from one query head to the next.
    pub steps: Val<'k, u32>,
    /// Query heads of each key/value head.
    group: Val<'k, u32>,
    /// Key/value heads, or parts of them where query heads are spread over CTAs.
    pub heads: Divisor<'k>,
    spread: Option<Spread<'k>>,
    /// The steps that a block mask leaves to each tile.
    pub step_ranges: Option<StepRanges<'k>>,
    pub tiles: Tiles<'k>,
}

impl<'k> TileMap<'k> {
    /// Declares the parameters. `spans` are those of the mask with queries and keys exchanged.
    pub fn declare<C: 'static>(
        p: &Params<'k, C>,
        args: impl Lens<C, TileMapArgs>,
        (shape, ordered, ragged): (&KernelShape, bool, Ragged),
        spans: Spans,
    ) -> Self {
        let steps = p.u32("steps", move |call| args(call).steps);
        let group = p.u32("group", move |call| args(call).spread.group as u32);
        let heads = p.divisor("heads", move |call| args(call).heads * args(call).spread.parts as u32);
        let spread = (shape.spread != SpreadShape::No).then(|| Spread {
            parts: p.divisor("head_splits", move |call| args(call).spread.parts as u32),
            most: p.u32("part_heads", move |call| args(call).spread.most() as u32),
            q_heads: p.u32("q_heads", move |call| args(call).heads * args(call).spread.group as u32),
            part_tiles: ragged.any().then(|| p.u32("part_tiles", move |call| args(call).part_tiles)),
            single: shape.single,
            even: shape.spread == SpreadShape::Even,
            packed: ragged.packed,
        });
        let tiles = Tiles::declare(p, ragged, args);
        let step_ranges = shape.step_ranges.then(|| {
            StepRanges::declare(p, move |call| {
                args(call).step_ranges.as_ref().expect("bug in fulgurite: a kernel with step ranges has them")
            })
        });
        let (config, splits) = (shape.config, shape.splits);
        TileMap { config, spans, ordered, splits, steps, group, heads, spread, step_ranges, tiles }
    }

    /// The first query head of a tile's head, or of the part with this number.
    #[track_caller]
    pub fn first_head(&self, head: Val<'k, u32>) -> Val<'k, u32> {
        match &self.spread {
            None => head * self.group,
            Some(spread) if spread.single => head,
            Some(spread) if spread.even => head * spread.most,
            Some(spread) => spread.parts.div_rem(head * self.group)[0],
        }
    }

    /// Query heads of a tile's head, or of the part with this number.
    #[track_caller]
    pub fn heads_of(&self, head: Val<'k, u32>) -> Val<'k, u32> {
        match &self.spread {
            None => self.group,
            Some(spread) if spread.single => head.literal(1),
            Some(spread) if spread.even => spread.most,
            Some(_) => self.first_head(head + 1) - self.first_head(head),
        }
    }

    /// Query heads of a tile's head, at most.
    pub fn most_heads(&self) -> Val<'k, u32> {
        self.spread.as_ref().map_or(self.group, |spread| spread.most)
    }

    /// Whether a head may have fewer query heads than others.
    pub fn is_uneven(&self) -> bool {
        self.spread.as_ref().is_some_and(|spread| !spread.even)
    }

    /// The key/value head of a tile's head.
    #[track_caller]
    pub fn kv_head(&self, head: Val<'k, u32>) -> Val<'k, u32> {
        self.spread.as_ref().map_or(head, |spread| spread.parts.div_rem(head)[0])
    }

    /// With heads spread over CTAs: the number of a tile among those of all parts.
    #[track_caller]
    pub fn place_of(&self, work: &Work<'k>) -> Val<'k, u32> {
        let spread = self.spread.as_ref().expect("bug in fulgurite: heads are not spread");
        let before = match (work.sequence, spread.part_tiles) {
            (Some(s), Some(part_tiles)) => {
                let first = match spread.packed {
                    true => s.k_start / self.config.keys() + work.batch,
                    false => work.batch * self.tiles_of_head(work.sequence),
                };
                work.head * part_tiles + first
            }
            _ => self.pair(work) * self.tiles_of_head(None),
        };
        before + work.tile
    }

    /// Keys of a tile.
    pub fn keys(&self) -> u32 {
        self.config.keys()
    }

    /// Number of words of a message.
    pub fn words(&self) -> usize {
        WORDS[usize::from(self.tiles.ragged())].next_multiple_of(4)
    }

    /// Tiles of equal sequences.
    pub fn equal(&self) -> &Equal<'k> {
        match &self.tiles {
            Tiles::Equal { tiles, .. } => tiles,
            Tiles::Unequal(_) => unreachable!("bug in fulgurite: sequences of equal length are wanted"),
        }
    }

    /// The pair of head and sequence of a tile.
    #[track_caller]
    pub fn pair(&self, work: &Work<'k>) -> Val<'k, u32> {
        work.batch * self.heads.value() + work.head
    }

    /// Index of a step among those of all heads.
    pub fn number(&self, work: &Work<'k>, step: &Step<'k>) -> Val<'k, u32> {
        self.steps_before_head(work, step.head) + step.step
    }

    /// The tile of a message.
    pub fn read(&self, message: &[Val<'k, u32>]) -> Work<'k> {
        let &[tile, head, batch, first, end, ref rest @ ..] = message else {
            panic!("bug in fulgurite: a message of {} numbers", message.len())
        };
        let sequence = self.tiles.ragged().then(|| {
            let [q_start, k_start, k_room, q_len, k_len, first_step] = std::array::from_fn(|i| rest[i]);
            Sequence { q_start, k_start, k_room, q_len, k_len, first_step }
        });
        let piece = self.splits.then(|| rest[0]);
        Work { tile, head, batch, steps: [first, end], piece, sequence }
    }

    /// Keys of a sequence.
    pub fn k_len(&self, sequence: Option<Sequence<'k>>) -> Val<'k, u32> {
        match (&self.tiles, sequence) {
            (Tiles::Equal { k_len, .. }, _) => *k_len,
            (Tiles::Unequal(_), Some(sequence)) => sequence.k_len,
            (Tiles::Unequal(_), None) => unreachable!("bug in fulgurite: a tile without its sequence"),
        }
    }

    /// Lengths for the exchanged mask. All rows of the steps of equal sequences count as queries.
    #[track_caller]
    pub fn lengths(&self, sequence: Option<Sequence<'k>>) -> Lengths<'k> {
        match (&self.tiles, sequence) {
            (Tiles::Equal { k_len, diagonals: [bottom_right, top_left], .. }, _) => {
                let queries = (self.steps * self.config.rows).to_i32();
                let lengths = Lengths { k: k_len.to_i32(), bottom_right: *bottom_right, top_left: *top_left };
                lengths.transposed(queries)
            }
            (_, Some(s)) => {
                let [q, k] = [s.q_len, s.k_len].map(|n| n.to_i32());
                Lengths { k, bottom_right: k - q, top_left: q.literal(0) }.transposed(q)
            }
            (_, None) => unreachable!("bug in fulgurite: a tile without its sequence"),
        }
    }

    /// Steps of queries that see a tile.
    pub fn steps_of(&self, tile: Val<'k, u32>, sequence: Option<Sequence<'k>>) -> [Val<'k, u32>; 2] {
        let keys = self.config.keys();
        let start = tile * keys;
        let last = (start + (keys - 1)).min(self.k_len(sequence).max(1) - 1);
        self.spans.blocks(start.to_i32(), last.to_i32(), self.config.rows, self.lengths(sequence))
    }

    /// Key tiles of a head of a sequence.
    pub fn tiles_of_head(&self, sequence: Option<Sequence<'k>>) -> Val<'k, u32> {
        let keys = self.config.keys();
        match (&self.tiles, sequence) {
            (Tiles::Equal { tiles, .. }, _) => tiles.tiles_of_head(),
            (_, Some(s)) => (s.k_room + (keys - 1)) / keys,
            (_, None) => unreachable!("bug in fulgurite: a tile without its sequence"),
        }
    }

    /// A sequence by its number, if sequences differ in length.
    pub fn sequence<W: Who>(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Option<Sequence<'k>> {
        let Tiles::Unequal(unequal) = &self.tiles else { return None };
        let sides = &unequal.sides;
        let [q_start, q_room] = sides.room(t, 0, number);
        let [k_start, k_room] = sides.room(t, 1, number);
        let (q_len, k_len) = (sides.used(t, 0, number, q_room), sides.used(t, 1, number, k_room));
        let first_step = sides.first_step(t, number, self.config.rows);
        Some(Sequence { q_start, k_start, k_room, q_len, k_len, first_step })
    }

    /// The walk along sequences, if they differ in length.
    pub fn start_walk(&self, t: &Scope<'k, Thread>) -> Option<Walk<'k>> {
        match &self.tiles {
            Tiles::Equal { .. } => None,
            Tiles::Unequal(unequal) => Some(unequal.start(t, self.config.keys(), self.heads.value())),
        }
    }

    /// Whether there is a tile with this number. Numbers must ascend from call to call.
    pub fn seek(&self, t: &Scope<'k, Thread>, walk: Option<&Walk<'k>>, tile: Val<'k, u32>) -> Val<'k, bool> {
        match (&self.tiles, walk) {
            (Tiles::Equal { tiles, .. }, _) => tile.lt(tiles.tiles),
            (Tiles::Unequal(unequal), Some(walk)) => {
                unequal.seek(t, walk, tile, self.config.keys(), self.heads.value())
            }
            (_, None) => unreachable!("bug in fulgurite: a walk was just made"),
        }
    }

    /// The tile with a number that was sought. Tiles of equal sequences come in bands of (head, batch) pairs. In a band, and in
    /// a sequence, the first keys go first: under a causal mask most queries see them. In a fixed order the last keys go first.
    pub fn find(&self, t: &Scope<'k, Thread>, walk: Option<&Walk<'k>>, number: Val<'k, u32>) -> Work<'k> {
        let ([batch, head, place], sequence) = match (&self.tiles, walk) {
            (Tiles::Equal { tiles, .. }, _) => (tiles.place(self.heads, number), None),
            (Tiles::Unequal(unequal), Some(walk)) => {
                let [batch, head, place, _] = unequal.place(walk, number, self.heads);
                ([batch, head, place], self.sequence(t, batch))
            }
            (_, None) => unreachable!("bug in fulgurite: a walk was just made"),
        };
        let tile = if self.ordered { self.tiles_of_head(sequence) - 1 - place } else { place };
        let steps = self.steps_of(tile, sequence);
        let steps = match &self.step_ranges {
            Some(ranges) => ranges.within(t, [batch, self.kv_head(head), tile], steps),
            None => steps,
        };
        Work { tile, head, batch, steps, piece: None, sequence }
    }

    /// Steps before the first step of a tile's first query head, in its sequence.
    #[track_caller]
    pub fn steps_before(&self, work: &Work<'k>) -> Val<'k, u32> {
        self.steps_before_head(work, self.first_head(work.head))
    }

    /// Steps before the first step of a query head, in a tile's sequence.
    #[track_caller]
    pub fn steps_before_head(&self, work: &Work<'k>, head: Val<'k, u32>) -> Val<'k, u32> {
        match work.sequence {
            Some(sequence) => head * self.steps + sequence.first_step,
            None => (self.heads_before(work) + head) * self.steps,
        }
    }

    /// Query heads of the sequences before a tile's.
    #[track_caller]
    fn heads_before(&self, work: &Work<'k>) -> Val<'k, u32> {
        match &self.spread {
            None => work.batch * self.heads.value() * self.group,
            Some(spread) => work.batch * spread.q_heads,
        }
    }

    /// Coordinates of a tile of a tensor, from a column and a row of its sequence on.
    #[track_caller]
    pub fn at(&self, of: Of, work: &Work<'k>, [col, row, head]: [Val<'k, u32>; 3]) -> Vec<Val<'k, u32>> {
        let read = matches!(of, Of::Q | Of::DO | Of::K | Of::V);
        let keys = matches!(of, Of::K | Of::V | Of::DK | Of::DV);
        match (&self.tiles, work.sequence) {
            (Tiles::Equal { first, .. }, _) => {
                let row = if read { row - first[usize::from(!keys)] } else { row };
                vec![col, row, head, work.batch]
            }
            (Tiles::Unequal(unequal), Some(s)) => {
                let start = unequal.first_row(of as usize, work.batch, if keys { s.k_start } else { s.q_start });
                // Rows that are not in use, and keys that no query sees, are read as zeros.
                let rows = match (keys, read) {
                    (true, true) => self.seen_keys(s),
                    (true, false) => s.k_room,
                    (false, _) => s.q_len,
                };
                Slice { start, rows }.at(col, row, head).to_vec()
            }
            (_, None) => unreachable!("bug in fulgurite: a tile without its sequence"),
        }
    }

    /// Keys up to the last one that some query sees.
    fn seen_keys(&self, s: Sequence<'k>) -> Val<'k, u32> {
        let forward = self.spans.transposed();
        let end = match forward.bounded_right() {
            true => {
                let [q, k] = [s.q_len, s.k_len].map(|n| n.to_i32());
                let lengths = Lengths { k, bottom_right: k - q, top_left: q.literal(0) };
                forward.keys(q - 1, lengths).end.max(0).to_u32()
            }
            false => s.k_len,
        };
        s.q_len.eq(0).select::<u32>(0, end)
    }
}
