//! Key tiles: the tile of a number, the position of its sequence, and the steps of queries that see it.

use crate::attention::backward::marks::{HeadRows, MarkedPart};
use crate::attention::backward::spread::HeadSpread;
use crate::attention::backward::step_ranges::{RangeArgs, StepRanges};
use crate::attention::backward::{BackwardConfig, KernelShape, Spread as SpreadShape};
use crate::params::{Lens, Params, given};
use crate::parts::mask::{Lengths, Spans};
use crate::parts::row_memory::RowsOf;
use crate::parts::schedule::{BandArgs, Equal, Ragged, RaggedWalk, SequenceArgs, Unequal};
use fulgurite_ptx::{Divisor, Scope, Slice, Val, Who};

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
    pub sequence: Sequence<'k>,
}

/// A sequence of the batch.
#[derive(Clone, Copy)]
pub(crate) enum Sequence<'k> {
    /// One of equal sequences.
    Dense(DenseSequence<'k>),
    Ragged(RaggedSequence<'k>),
}

/// The facts that equal sequences share, all of them parameters.
#[derive(Clone, Copy)]
pub(crate) struct DenseSequence<'k> {
    pub k_len: Val<'k, u32>,
    /// The first key, and the first query, of the tensors that TMA reads. Others are read as zeros.
    first: [Val<'k, u32>; 2],
    /// Start of the mask's diagonals, aligned to the last query and key, and to the first ones.
    diagonals: [Val<'k, i32>; 2],
    /// Key tiles of a head.
    tiles: Val<'k, u32>,
}

/// A sequence of a batch whose sequences differ in length.
#[derive(Clone, Copy)]
pub(crate) struct RaggedSequence<'k> {
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
        if let Sequence::Ragged(s) = self.sequence {
            message.extend([s.q_start, s.k_start, s.k_room, s.q_len, s.k_len, s.first_step]);
        }
        message
    }
}

/// Arguments of sequences of equal length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseArgs {
    pub bands: BandArgs,
    pub k_len: u32,
    /// The first key, and the first query, that TMA reads.
    pub first_key: u32,
    pub first_query: u32,
    /// Keys minus queries: the start of diagonals that end at the last query and key.
    pub bottom_right: i32,
}

/// The tiles of a batch, by the kind of its sequences.
enum Tiles<'k> {
    Dense { bands: Box<Equal<'k>>, sequence: DenseSequence<'k> },
    Ragged(Unequal<'k>),
}

impl<'k> Tiles<'k> {
    fn declare<C: 'static>(p: &Params<'k, C>, ragged: Ragged, args: impl Lens<C, TileMapArgs>) -> Self {
        if ragged.any() {
            return Tiles::Ragged(Unequal::declare(p, ragged, 1, &STEPS, move |call| given(&args(call).ragged)));
        }
        let dense = move |call: &C| *given(&args(call).dense);
        let bands = Box::new(Equal::declare(p, move |call| &given(&args(call).dense).bands));
        let k_len = p.u32("k_len", move |call| dense(call).k_len);
        let first_key = p.u32("first_key", move |call| dense(call).first_key);
        let first_query = p.u32("first_query", move |call| dense(call).first_query);
        let bottom_right = p.i32("bottom_right", move |call| dense(call).bottom_right);
        let top_left = p.i32("top_left", |_| 0);
        let (first, diagonals) = ([first_key, first_query], [bottom_right, top_left]);
        let sequence = DenseSequence { k_len, first, diagonals, tiles: bands.tiles_of_head() };
        Tiles::Dense { bands, sequence }
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
    /// Arguments for a batch of equal sequences; `None` if it is ragged.
    pub dense: Option<DenseArgs>,
    /// Arguments for a ragged batch; `None` if all sequences are equally long.
    pub ragged: Option<SequenceArgs>,
}

/// Parameters of heads that are spread over CTAs.
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
    tiles: Tiles<'k>,
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
        let step_ranges = shape.step_ranges.then(|| StepRanges::declare(p, move |call| given(&args(call).step_ranges)));
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
    pub fn number_of(&self, work: &Work<'k>) -> Val<'k, u32> {
        let spread = self.spread.as_ref().expect("bug in fulgurite: heads are not spread");
        let before = match (work.sequence, spread.part_tiles) {
            (Sequence::Ragged(s), Some(part_tiles)) => {
                let first = match spread.packed {
                    true => s.k_start / self.config.keys() + work.batch,
                    false => work.batch * self.tiles_of_head(work.sequence),
                };
                work.head * part_tiles + first
            }
            (sequence, _) => self.pair(work) * self.tiles_of_head(sequence),
        };
        before + work.tile
    }

    /// Keys of a tile.
    pub fn keys(&self) -> u32 {
        self.config.keys()
    }

    /// Number of words of a message.
    pub fn words(&self) -> usize {
        WORDS[usize::from(!self.is_dense())].next_multiple_of(4)
    }

    /// Whether sequences are equal in length.
    pub fn is_dense(&self) -> bool {
        self.bands().is_some()
    }

    /// The order of tiles, if sequences are equal in length.
    pub fn bands(&self) -> Option<Equal<'k>> {
        match &self.tiles {
            Tiles::Dense { bands, .. } => Some(**bands),
            Tiles::Ragged(_) => None,
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
        let sequence = match &self.tiles {
            Tiles::Dense { sequence, .. } => Sequence::Dense(*sequence),
            Tiles::Ragged(_) => {
                let [q_start, k_start, k_room, q_len, k_len, first_step] = std::array::from_fn(|i| rest[i]);
                Sequence::Ragged(RaggedSequence { q_start, k_start, k_room, q_len, k_len, first_step })
            }
        };
        let piece = self.splits.then(|| rest[0]);
        Work { tile, head, batch, steps: [first, end], piece, sequence }
    }

    /// Keys of a sequence.
    pub fn k_len(&self, sequence: Sequence<'k>) -> Val<'k, u32> {
        match sequence {
            Sequence::Dense(s) => s.k_len,
            Sequence::Ragged(s) => s.k_len,
        }
    }

    /// Lengths for the exchanged mask. All rows of the steps of equal sequences count as queries.
    #[track_caller]
    pub fn lengths(&self, sequence: Sequence<'k>) -> Lengths<'k> {
        match sequence {
            Sequence::Dense(DenseSequence { k_len, diagonals: [bottom_right, top_left], .. }) => {
                let queries = (self.steps * self.config.rows).to_i32();
                Lengths { k: k_len.to_i32(), bottom_right, top_left }.transposed(queries)
            }
            Sequence::Ragged(s) => {
                let [q, k] = [s.q_len, s.k_len].map(|n| n.to_i32());
                Lengths { k, bottom_right: k - q, top_left: q.literal(0) }.transposed(q)
            }
        }
    }

    /// Steps of queries that see a tile.
    pub fn steps_of(&self, tile: Val<'k, u32>, sequence: Sequence<'k>) -> [Val<'k, u32>; 2] {
        let keys = self.config.keys();
        let start = tile * keys;
        let last = (start + (keys - 1)).min(self.k_len(sequence).max(1) - 1);
        self.spans.blocks(start.to_i32(), last.to_i32(), self.config.rows, self.lengths(sequence))
    }

    /// Key tiles of a head of a sequence.
    pub fn tiles_of_head(&self, sequence: Sequence<'k>) -> Val<'k, u32> {
        let keys = self.config.keys();
        match sequence {
            Sequence::Dense(s) => s.tiles,
            Sequence::Ragged(s) => (s.k_room + (keys - 1)) / keys,
        }
    }

    /// A sequence by its number.
    pub fn sequence<W: Who>(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Sequence<'k> {
        match &self.tiles {
            Tiles::Dense { sequence, .. } => Sequence::Dense(*sequence),
            Tiles::Ragged(unequal) => {
                let sides = &unequal.sides;
                let [q_start, q_room] = sides.room(t, 0, number);
                let [k_start, k_room] = sides.room(t, 1, number);
                let (q_len, k_len) = (sides.used(t, 0, number, q_room), sides.used(t, 1, number, k_room));
                let first_step = sides.first_step(t, number, self.config.rows);
                Sequence::Ragged(RaggedSequence { q_start, k_start, k_room, q_len, k_len, first_step })
            }
        }
    }

    /// The tiles in the order of their numbers, found by threads `W`.
    pub fn tiles<'a, W: Who>(&'a self, t: &Scope<'k, W>) -> Box<dyn FindTile<'k, W> + 'a> {
        match &self.tiles {
            Tiles::Dense { bands, .. } => Box::new(DenseTiles { map: self, bands }),
            Tiles::Ragged(unequal) => {
                let walk = unequal.start(t, self.config.keys(), self.heads.value());
                Box::new(RaggedTiles { map: self, unequal, walk })
            }
        }
    }

    /// The tile at a position of the schedule. Where tiles take turns, the last keys of a head go first.
    fn work<W: Who>(
        &self,
        t: &Scope<'k, W>,
        [batch, head, position]: [Val<'k, u32>; 3],
        sequence: Sequence<'k>,
    ) -> Work<'k> {
        let tile = if self.ordered { self.tiles_of_head(sequence) - 1 - position } else { position };
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
            Sequence::Ragged(sequence) => head * self.steps + sequence.first_step,
            Sequence::Dense(_) => (self.heads_before(work) + head) * self.steps,
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

    /// The first row of a sequence in a tensor; `start` if sequences are packed.
    fn first_row(&self, of: Of, batch: Val<'k, u32>, start: Val<'k, u32>) -> Val<'k, u32> {
        match &self.tiles {
            Tiles::Dense { .. } => start,
            Tiles::Ragged(unequal) => unequal.first_row(of as usize, batch, start),
        }
    }

    /// Coordinates of a tile of a tensor, from a column and a row of its sequence on.
    #[track_caller]
    pub fn at(&self, of: Of, work: &Work<'k>, [col, row, head]: [Val<'k, u32>; 3]) -> Vec<Val<'k, u32>> {
        let read = matches!(of, Of::Q | Of::DO | Of::K | Of::V);
        let keys = matches!(of, Of::K | Of::V | Of::DK | Of::DV);
        match work.sequence {
            Sequence::Dense(DenseSequence { first, .. }) => {
                let row = if read { row - first[usize::from(!keys)] } else { row };
                vec![col, row, head, work.batch]
            }
            Sequence::Ragged(s) => {
                let start = self.first_row(of, work.batch, if keys { s.k_start } else { s.q_start });
                // Rows that are not in use, and keys that no query sees, are read as zeros.
                let rows = match (keys, read) {
                    (true, true) => self.seen_keys(s),
                    (true, false) => s.k_room,
                    (false, _) => s.q_len,
                };
                Slice { start, rows }.at(col, row, head).to_vec()
            }
        }
    }

    /// Where the rows of a tile's sequence are in a tensor that threads address themselves, and how many it has. `None`: as
    /// many as all sequences have, which are equal.
    pub fn rows(&self, of: Of, work: &Work<'k>) -> (RowsOf<'k>, Option<Val<'k, u32>>) {
        let keys = matches!(of, Of::K | Of::V | Of::DK | Of::DV);
        match work.sequence {
            Sequence::Dense(_) => (RowsOf::Sequence(work.batch), None),
            Sequence::Ragged(s) => {
                let start = self.first_row(of, work.batch, if keys { s.k_start } else { s.q_start });
                let rows = match of {
                    Of::K | Of::V => self.seen_keys(s),
                    Of::DK | Of::DV => s.k_room,
                    Of::Q | Of::DO => s.q_len,
                };
                (RowsOf::Start(start), Some(rows))
            }
        }
    }

    /// The part of d_k or d_v that begins at a column and a key of a tile's sequence, for marks. Heads are not spread.
    pub fn marked(&self, work: &Work<'k>, [col, key]: [Val<'k, u32>; 2]) -> MarkedPart<'k> {
        let (start, rows) = match work.sequence {
            Sequence::Dense(s) => (key.literal(0), s.k_len),
            Sequence::Ragged(s) => (s.k_start, s.k_room),
        };
        let of = HeadRows { batch: work.batch, head: work.head, start };
        MarkedPart { of, first: [key, col], rows }
    }

    /// Keys up to the last one that some query sees.
    fn seen_keys(&self, s: RaggedSequence<'k>) -> Val<'k, u32> {
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

/// Finds tiles of keys by their numbers.
pub(crate) trait FindTile<'k, W: Who> {
    /// Whether there is a tile with this number. Numbers must ascend from call to call.
    fn seek(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Val<'k, bool>;

    /// The tile with a number that was sought.
    fn find(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Work<'k>;
}

/// Tiles of equal sequences. They come in bands of (head, batch) pairs; in a band the first keys go first, because under a
/// causal mask most queries see them.
struct DenseTiles<'a, 'k> {
    map: &'a TileMap<'k>,
    bands: &'a Equal<'k>,
}

impl<'k, W: Who> FindTile<'k, W> for DenseTiles<'_, 'k> {
    fn seek(&self, _: &Scope<'k, W>, number: Val<'k, u32>) -> Val<'k, bool> {
        number.lt(self.bands.tiles)
    }

    fn find(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Work<'k> {
        let position = self.bands.position(self.map.heads, number);
        self.map.work(t, position, self.map.sequence(t, position[0]))
    }
}

/// Tiles of a ragged batch, found by walking along its sequences.
struct RaggedTiles<'a, 'k> {
    map: &'a TileMap<'k>,
    unequal: &'a Unequal<'k>,
    walk: RaggedWalk<'k>,
}

impl<'k, W: Who> FindTile<'k, W> for RaggedTiles<'_, 'k> {
    fn seek(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Val<'k, bool> {
        self.unequal.seek(t, &self.walk, number, self.map.config.keys(), self.map.heads.value())
    }

    fn find(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Work<'k> {
        let [batch, head, position, _] = self.unequal.position(&self.walk, number, self.map.heads);
        self.map.work(t, [batch, head, position], self.map.sequence(t, batch))
    }
}
