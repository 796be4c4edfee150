//! Which tile of keys comes next, where its sequence lies, and which steps of queries see it.

use crate::attention::backward::main::{Call, Main};
use crate::params::Params;
use crate::parts::mask::Lengths;
use crate::parts::schedule::{BandArgs, Equal, Ragged, SequenceArgs, Unequal, Walk};
use fulgurite_ptx::{Scope, Slice, Thread, Val, Who};

/// Names of the rows from one sequence to the next.
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

/// A tile of keys, as the loading thread hands it out.
#[derive(Clone, Copy)]
pub(crate) struct Work<'k> {
    /// Its number in its head.
    pub tile: Val<'k, u32>,
    /// Head of keys.
    pub head: Val<'k, u32>,
    pub batch: Val<'k, u32>,
    /// Steps of queries that see it, from the first to past the last: none means that there are no more tiles.
    pub steps: [Val<'k, u32>; 2],
    /// Where tiles are cut into pieces: its number among those that are. A piece has some of the steps.
    pub piece: Option<Val<'k, u32>>,
    /// Where sequences have lengths of their own.
    pub sequence: Option<Sequence<'k>>,
}

/// A sequence with a length of its own.
#[derive(Clone, Copy)]
pub(crate) struct Sequence<'k> {
    /// First row of packed q, and of packed k and v.
    q_start: Val<'k, u32>,
    k_start: Val<'k, u32>,
    k_room: Val<'k, u32>,
    /// Queries and keys in use.
    pub q_len: Val<'k, u32>,
    pub k_len: Val<'k, u32>,
    /// Its first step among those of a head.
    first_step: Val<'k, u32>,
}

/// Where a message has the steps of a tile.
pub(crate) const FIRST: usize = 3;
pub(crate) const END: usize = 4;
/// Numbers of a message, without and with a sequence.
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
    /// Keys less queries: where diagonals that end at the last query and key begin.
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

/// How tiles are found.
pub(crate) enum Tiles<'k> {
    Equal {
        tiles: Box<Equal<'k>>,
        k_len: Val<'k, u32>,
        /// The first key, and the first query, that the copy engine is told of: others are read as zeros.
        first: [Val<'k, u32>; 2],
        /// Where the diagonals of masks begin.
        diagonals: [Val<'k, i32>; 2],
    },
    Unequal(Unequal<'k>),
}

impl<'k> Tiles<'k> {
    /// Declares the parameters.
    pub fn declare(p: &Params<'k, Call>, ragged: Ragged) -> Self {
        if ragged.any() {
            return Tiles::Unequal(Unequal::declare(p, ragged, 1, &STEPS, |call: &Call| call.tiles.unequal()));
        }
        let tiles = Box::new(Equal::declare(p, |call: &Call| &call.tiles.equal().bands));
        let k_len = p.u32("k_len", |call| call.tiles.equal().k_len);
        let first_key = p.u32("first_key", |call| call.tiles.equal().first_key);
        let first_query = p.u32("first_query", |call| call.tiles.equal().first_query);
        let bottom_right = p.i32("bottom_right", |call| call.tiles.equal().bottom_right);
        let top_left = p.i32("top_left", |_| 0);
        Tiles::Equal { tiles, k_len, first: [first_key, first_query], diagonals: [bottom_right, top_left] }
    }

    fn ragged(&self) -> bool {
        matches!(self, Tiles::Unequal(_))
    }

    /// Numbers of a message.
    pub fn words(&self) -> usize {
        WORDS[usize::from(self.ragged())].next_multiple_of(4)
    }
}

impl<'k> Main<'k> {
    /// What a message says.
    pub(crate) fn read(&self, message: &[Val<'k, u32>]) -> Work<'k> {
        let &[tile, head, batch, first, end, ref rest @ ..] = message else {
            panic!("bug in fulgurite: a message of {} numbers", message.len())
        };
        let sequence = self.tiles.ragged().then(|| {
            let [q_start, k_start, k_room, q_len, k_len, first_step] = std::array::from_fn(|i| rest[i]);
            Sequence { q_start, k_start, k_room, q_len, k_len, first_step }
        });
        let piece = self.pieces.as_ref().map(|_| rest[0]);
        Work { tile, head, batch, steps: [first, end], piece, sequence }
    }

    /// Keys of a sequence.
    pub(crate) fn k_len(&self, sequence: Option<Sequence<'k>>) -> Val<'k, u32> {
        match (&self.tiles, sequence) {
            (Tiles::Equal { k_len, .. }, _) => *k_len,
            (Tiles::Unequal(_), Some(sequence)) => sequence.k_len,
            (Tiles::Unequal(_), None) => unreachable!("bug in fulgurite: a tile without its sequence"),
        }
    }

    /// Lengths of the exchanged mask. Of equal sequences all rows of the steps are queries.
    #[track_caller]
    pub(crate) fn lengths(&self, sequence: Option<Sequence<'k>>) -> Lengths<'k> {
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
    pub(crate) fn steps_of(&self, tile: Val<'k, u32>, sequence: Option<Sequence<'k>>) -> [Val<'k, u32>; 2] {
        let keys = self.config.keys();
        let start = tile * keys;
        let last = (start + (keys - 1)).min(self.k_len(sequence).max(1) - 1);
        self.spans.blocks(start.to_i32(), last.to_i32(), self.config.rows, self.lengths(sequence))
    }

    /// Tiles of a head.
    pub(crate) fn tiles_of_head(&self, sequence: Option<Sequence<'k>>) -> Val<'k, u32> {
        let keys = self.config.keys();
        match (&self.tiles, sequence) {
            (Tiles::Equal { tiles, .. }, _) => tiles.tiles_of_head(),
            (_, Some(s)) => (s.k_room + (keys - 1)) / keys,
            (_, None) => unreachable!("bug in fulgurite: a tile without its sequence"),
        }
    }

    /// A sequence by its number, where they have lengths of their own.
    pub(crate) fn sequence<W: Who>(&self, t: &Scope<'k, W>, number: Val<'k, u32>) -> Option<Sequence<'k>> {
        let Tiles::Unequal(unequal) = &self.tiles else { return None };
        let sides = &unequal.sides;
        let [q_start, q_room] = sides.room(t, 0, number);
        let [k_start, k_room] = sides.room(t, 1, number);
        let (q_len, k_len) = (sides.used(t, 0, number, q_room), sides.used(t, 1, number, k_room));
        let first_step = sides.first_step(t, number, self.config.rows);
        Some(Sequence { q_start, k_start, k_room, q_len, k_len, first_step })
    }

    /// The walk along sequences with lengths of their own.
    pub(crate) fn start_walk(&self, t: &Scope<'k, Thread>) -> Option<Walk<'k>> {
        match &self.tiles {
            Tiles::Equal { .. } => None,
            Tiles::Unequal(unequal) => Some(unequal.start(t, self.config.keys(), self.heads.value())),
        }
    }

    /// Whether there is a tile with this number, or a run of pieces. They are asked for in ascending order.
    pub(crate) fn seek(&self, t: &Scope<'k, Thread>, walk: Option<&Walk<'k>>, tile: Val<'k, u32>) -> Val<'k, bool> {
        match (&self.tiles, walk) {
            (Tiles::Equal { tiles, .. }, _) => match &self.pieces {
                Some(pieces) => pieces.has(tile),
                None => tile.lt(tiles.tiles),
            },
            (Tiles::Unequal(unequal), Some(walk)) => {
                unequal.seek(t, walk, tile, self.config.keys(), self.heads.value())
            }
            (_, None) => unreachable!("bug in fulgurite: a walk was just made"),
        }
    }

    /// The tile with a number that was sought. Those of equal sequences come in bands of some (head, batch) pairs; in a band,
    /// and in a sequence, the first keys go first, which under a causal mask most queries see. In a fixed order neighbours
    /// go the other way round.
    pub(crate) fn find(&self, t: &Scope<'k, Thread>, walk: Option<&Walk<'k>>, number: Val<'k, u32>) -> Work<'k> {
        let ([batch, head, place], sequence) = match (&self.tiles, walk) {
            (Tiles::Equal { tiles, .. }, _) => (tiles.place(self.heads, number), None),
            (Tiles::Unequal(unequal), Some(walk)) => {
                let [batch, head, place, _] = unequal.place(walk, number, self.heads);
                ([batch, head, place], self.sequence(t, batch))
            }
            (_, None) => unreachable!("bug in fulgurite: a walk was just made"),
        };
        let tile = if self.turns.is_some() { self.in_turn(place, sequence) } else { place };
        Work { tile, head, batch, steps: self.steps_of(tile, sequence), piece: None, sequence }
    }

    /// Steps before the first of a tile's first head of queries and of its sequence.
    #[track_caller]
    pub(crate) fn steps_before(&self, work: &Work<'k>) -> Val<'k, u32> {
        self.steps_before_head(work, work.head * self.group)
    }

    /// The same of a head of queries.
    #[track_caller]
    pub(crate) fn steps_before_head(&self, work: &Work<'k>, head: Val<'k, u32>) -> Val<'k, u32> {
        match work.sequence {
            Some(sequence) => head * self.steps + sequence.first_step,
            None => (work.batch * self.heads.value() * self.group + head) * self.steps,
        }
    }

    /// The same among the steps that have sums.
    #[track_caller]
    pub(crate) fn sums_before(&self, work: &Work<'k>) -> Val<'k, u32> {
        match &self.rounding {
            Some(rounding) => rounding.place(self.pair(work)) * self.group * self.steps,
            None => self.steps_before(work),
        }
    }

    /// Coordinates of a tile of a tensor, from a column and a row of its sequence on.
    #[track_caller]
    pub(crate) fn at(&self, of: Of, work: &Work<'k>, [col, row, head]: [Val<'k, u32>; 3]) -> Vec<Val<'k, u32>> {
        let read = matches!(of, Of::Q | Of::DO | Of::K | Of::V);
        let keys = matches!(of, Of::K | Of::V | Of::DK | Of::DV);
        match (&self.tiles, work.sequence) {
            (Tiles::Equal { first, .. }, _) => {
                let row = if read { row - first[usize::from(!keys)] } else { row };
                vec![col, row, head, work.batch]
            }
            (Tiles::Unequal(unequal), Some(s)) => {
                let start = unequal.first_row(of as usize, work.batch, if keys { s.k_start } else { s.q_start });
                // What is not in use, and keys that no query sees, are read as zeros.
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

    /// How many keys there are up to the last that some query sees.
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
