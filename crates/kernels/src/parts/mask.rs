//! The part of a mask that is one interval of keys per query. It answers two questions: which key blocks a tile of
//! queries sees, and which elements of a block are visible.

use fulgurite_core::Mask;
use fulgurite_core::mask::{Align, Span};
use fulgurite_ptx::{Acc, Fragment, Group, Half, Pair, RowView, Scope, Val, Var, Word};
use std::marker::PhantomData;

/// The intervals (spans) of a mask; a key must be inside all of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Spans(Vec<Span>);

/// The keys from `start` up to, but not including, `end`.
#[derive(Clone, Copy)]
pub struct KeyRange<'k> {
    pub start: Val<'k, i32>,
    pub end: Val<'k, i32>,
}

/// Number of visible keys, and the position of the diagonals among them.
#[derive(Clone, Copy)]
pub struct Lengths<'k> {
    /// Number of keys that some query sees.
    pub k: Val<'k, i32>,
    /// Key on the diagonal of query 0, if the diagonal is aligned to the last query and key; `top_left`: to the first
    /// ones.
    pub bottom_right: Val<'k, i32>,
    pub top_left: Val<'k, i32>,
}

impl<'k> Lengths<'k> {
    /// Lengths for the transposed mask, whose rows are keys: it has `queries` columns, and its diagonals change sign.
    #[track_caller]
    pub fn transposed(self, queries: Val<'k, i32>) -> Lengths<'k> {
        let zero = queries.literal(0);
        Lengths { k: queries, bottom_right: zero - self.bottom_right, top_left: zero - self.top_left }
    }
}

impl Spans {
    pub fn of(mask: &Mask) -> Spans {
        Spans(mask.spans().to_vec())
    }

    /// The transposed mask: the interval of queries that see each key. [`Lengths::transposed`] gives the lengths for
    /// it.
    pub fn transposed(&self) -> Spans {
        Spans(self.0.iter().map(Span::transposed).collect())
    }

    /// Whether some rows end before the last key.
    pub fn bounded_right(&self) -> bool {
        self.0.iter().any(|span| span.right.is_some())
    }
    /// Whether some rows start after the first key.
    pub fn bounded_left(&self) -> bool {
        self.0.iter().any(|span| span.left.is_some())
    }

    /// The keys that a query sees.
    #[track_caller]
    pub fn keys<'k>(&self, row: Val<'k, i32>, lengths: Lengths<'k>) -> KeyRange<'k> {
        let mut keys = KeyRange { start: row.literal(0), end: lengths.k };
        for span in &self.0 {
            let diagonal = match span.align {
                Align::BottomRight => row + lengths.bottom_right,
                Align::TopLeft => row + lengths.top_left,
            };
            if let Some(right) = span.right {
                keys.end = keys.end.min(diagonal + (right as i32 + 1));
            }
            if let Some(left) = span.left {
                keys.start = keys.start.max(diagonal - left as i32);
            }
        }
        keys
    }

    /// First and past-the-last block of `cols` keys that some query of rows `first` to `last` sees; at least one block.
    #[track_caller]
    pub fn blocks<'k>(
        &self,
        first: Val<'k, i32>,
        last: Val<'k, i32>,
        cols: u32,
        lengths: Lengths<'k>,
    ) -> [Val<'k, u32>; 2] {
        let cols = cols as i32;
        // Intervals move right as the row grows, so the first row has the first visible key and the last row the last.
        let end = match self.bounded_right() {
            true => self.keys(last, lengths).end.max(1).min(lengths.k),
            false => lengths.k,
        };
        let end = (end + (cols - 1)).to_u32() / cols as u32;
        let end = end.max(1);
        let start = match self.bounded_left() {
            true => (self.keys(first, lengths).start.max(0).to_u32() / cols as u32).min(end - 1),
            false => end.literal(0),
        };
        [start, end]
    }
}

/// A key block.
#[derive(Clone, Copy)]
pub struct Block<'k> {
    /// Index of its first key.
    pub first: Val<'k, i32>,
    /// For blocks from lists: whether every key of this block is visible regardless of the spans, and the total number
    /// of keys.
    pub full: Option<(Val<'k, bool>, Val<'k, i32>)>,
}

impl<'k> Block<'k> {
    /// Whether the block is full: every key is visible regardless of the spans. `None` without lists.
    pub fn is_full(&self) -> Option<Val<'k, bool>> {
        self.full.map(|(full, _)| full)
    }
}

/// Limits of the visible keys for the rows of a thread and of its warpgroup; constant over a tile.
pub struct Limits<'k, A = Acc<'k>> {
    spans: Spans,
    /// First and past-the-last visible key of each of the thread's rows, minus the thread's first column.
    rows: Vec<[Var<'k, i32>; 2]>,
    /// First and past-the-last key that every row of the warpgroup sees. Blocks inside this interval need no mask.
    safe: [Var<'k, i32>; 2],
    /// Whether the start of a row must be checked, and whether its end must be.
    sides: [bool; 2],
    view: PhantomData<A>,
}

impl<'k, A: RowView<'k>> Limits<'k, A> {
    /// Limits for the accumulators of any tensor unit.
    pub fn of_view(w: &Scope<'k, Group>, spans: &Spans) -> Self {
        let pair = || [w.var(0i32), w.var(0i32)];
        let sides = [spans.bounded_left(), true];
        let rows = (0..A::ROWS).map(|_| pair()).collect();
        Limits { spans: spans.clone(), rows, safe: pair(), sides, view: PhantomData }
    }

    /// Limits for scores whose rows are keys and whose columns are queries, with transposed `spans`. Rows past the last
    /// key need a mask. Columns past the last query do not, because their LSE makes their probabilities 0.
    pub fn of_keys(w: &Scope<'k, Group>, spans: &Spans) -> Self {
        Limits { sides: [true, spans.bounded_right()], ..Limits::of_view(w, spans) }
    }

    /// Sets the limits for a tile of keys. The warpgroup's rows start at key `first`; the sequence has `count` keys.
    #[track_caller]
    pub fn set_keys(&self, w: &Scope<'k, Group>, first: Val<'k, i32>, count: Val<'k, i32>, lengths: Lengths<'k>) {
        /// Larger than any query index.
        const NEVER: i32 = 1 << 30;
        self.set(w, first, lengths);
        for (i, [start, _]) in self.rows.iter().enumerate() {
            let row = first + A::first_row(w).to_i32() + A::row_offset(i) as i32;
            start.set(row.ge(count).select::<i32>(NEVER, start.get()));
        }
        let start = self.safe[0];
        start.set((first + A::GROUP_ROWS as i32).gt(count).select::<i32>(NEVER, start.get()));
    }

    /// Sets the limits for a tile whose warpgroup's rows start at query `first`.
    #[track_caller]
    pub fn set(&self, w: &Scope<'k, Group>, first: Val<'k, i32>, lengths: Lengths<'k>) {
        let rows: Vec<_> = (0..A::ROWS).map(|i| first + A::first_row(w).to_i32() + A::row_offset(i) as i32).collect();
        self.set_queries(w, rows, [first, first + (A::GROUP_ROWS as i32 - 1)], lengths);
    }

    /// Sets the limits for a thread whose rows are these queries, in a warpgroup with queries `first` to `last`.
    #[track_caller]
    pub fn set_queries(
        &self,
        w: &Scope<'k, Group>,
        rows: impl IntoIterator<Item = Val<'k, i32>>,
        [first, last]: [Val<'k, i32>; 2],
        lengths: Lengths<'k>,
    ) {
        let col = A::first_col(w).to_i32();
        for ([start, end], row) in self.rows.iter().zip(rows) {
            let keys = self.spans.keys(row, lengths);
            start.set(keys.start - col);
            end.set(keys.end - col);
        }
        let [start, end] = self.safe;
        start.set(self.spans.keys(last, lengths).start);
        end.set(self.spans.keys(first, lengths).end);
    }

    /// Whether the thread's `i`-th row sees a key, either through its limits or because the key's block is full.
    #[track_caller]
    pub fn sees(
        &self,
        w: &Scope<'k, Group>,
        i: usize,
        key: Val<'k, i32>,
        full: Option<Val<'k, bool>>,
    ) -> Val<'k, bool> {
        let place = key - A::first_col(w).to_i32();
        let [start, end] = self.rows[i].map(|limit| limit.get());
        let seen = self.inside(|| start.le(place), || end.gt(place)).unwrap_or(w.constant(true));
        full.map_or(seen, |full| seen | full)
    }

    /// The conjunction of both conditions, each built only if the mask checks that side.
    fn inside(&self, start: impl Fn() -> Val<'k, bool>, end: impl Fn() -> Val<'k, bool>) -> Option<Val<'k, bool>> {
        let [left, right] = self.sides;
        let sides = [right.then(end), left.then(start)];
        sides.into_iter().flatten().reduce(|a, b| a & b)
    }

    /// Whether some row of the warpgroup does not see the whole block.
    #[track_caller]
    pub fn cuts(&self, block: &Block<'k>, cols: u32) -> Val<'k, bool> {
        let ([left, right], end) = (self.sides, block.first + cols as i32);
        let cuts = [right.then(|| end.gt(self.safe[1].get())), left.then(|| block.first.lt(self.safe[0].get()))];
        let cut = cuts.into_iter().flatten().reduce(|a, b| a | b).expect("bug in fulgurite: rows without an end");
        match block.full {
            Some((full, all)) => (full & end.gt(all)) | (!full & cut),
            None => cut,
        }
    }

    /// Sets the scores of invisible keys to -inf.
    #[track_caller]
    pub fn apply(&self, w: &Scope<'k, Group>, s: &A, block: &Block<'k>) {
        self.apply_set(w, s, block, |_| {});
    }

    /// Sets the scores of invisible keys to -inf. `set` recomputes the limits of the thread's rows, which are constant
    /// over the tile, so they occupy registers only in blocks that need a mask.
    #[track_caller]
    pub fn apply_set(&self, w: &Scope<'k, Group>, s: &A, block: &Block<'k>, set: impl FnOnce(&Scope<'k, Group>)) {
        self.where_cut(w, s.cols(), block, set, |seen| {
            for (i, x) in s.elements().enumerate() {
                if let Some(seen) = seen(i) {
                    s.set(i, seen.select::<f32>(x, f32::NEG_INFINITY));
                }
            }
        });
    }

    /// Zeroes the elements of invisible keys in two fragments with the block's columns.
    #[track_caller]
    pub fn hide<T: Half>(
        &self,
        w: &Scope<'k, Group>,
        (fragments, cols): ([&Fragment<'k, T>; 2], u32),
        block: &Block<'k>,
        set: impl FnOnce(&Scope<'k, Group>),
    ) where
        Pair<T>: Word,
    {
        self.where_cut(w, cols, block, set, |seen| {
            for pair in 0..cols as usize / 4 {
                if let Some(both) = seen(2 * pair).zip(seen(2 * pair + 1)) {
                    fragments.iter().for_each(|fragment| fragment.keep(pair, both.into()));
                }
            }
        });
    }

    /// Calls `change` in blocks that need a mask, with a function that tells whether the thread's `i`-th element is
    /// visible.
    #[track_caller]
    fn where_cut(
        &self,
        w: &Scope<'k, Group>,
        cols: u32,
        block: &Block<'k>,
        set: impl FnOnce(&Scope<'k, Group>),
        change: impl FnOnce(&dyn Fn(usize) -> Option<Val<'k, bool>>),
    ) {
        w.when(self.cuts(block, cols), |w| {
            set(w);
            // In a full block, every existing key is visible, whatever the spans say.
            let bounds = |limits: [Val<'k, i32>; 2]| match block.full {
                Some((full, all)) => {
                    let end = all - A::first_col(w).to_i32();
                    [full.select::<i32>(0, limits[0]), full.select::<i32>(end, limits[1])]
                }
                None => limits,
            };
            let limit = |row: &[Var<'k, i32>; 2]| bounds(row.map(|limit| limit.get())).map(|limit| limit - block.first);
            let limits: Vec<[Val<'k, i32>; 2]> = self.rows.iter().map(limit).collect();
            change(&|i| {
                let ([start, end], col) = (limits[A::row_of(i)], A::col_of(i) as i32);
                self.inside(|| start.le(col), || end.gt(col))
            });
        });
    }
}
