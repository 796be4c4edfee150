//! Score modifiers and masks on tiles of scores.
//!
//! A mask that heads share becomes bits once per call: one word per tile and key, a bit per lane. The words tell which
//! blocks a tile skips, which it takes as if there were no mask, and which scores of the others are hidden.

use crate::evaluate::{Evaluator, KEYS, LaneEnv, TileProgram};
use crate::forward::PRODUCT_ROWS;
use crate::pool;
use crate::simd::{Ahead, STRIP_LANES, Square};
use crate::step::Step;
use crate::tiles::{Context, Lanes, MAX_LANES, Tile};
use fulgurite_core::expr::{Coverage, Domain, Program, Var};
use fulgurite_core::{Bound, DType, Problem, stop};
use std::ops::Range;
use std::sync::{Mutex, OnceLock};

/// Keys whose coverage is found from bounds before single elements are evaluated.
const BLOCK: usize = 128;
/// Largest size of a call's bits, in words: 64 MiB. Above, they are made tile by tile, again for each head.
pub(crate) const MOST_WORDS: usize = 8 << 20;

/// The expressions of a problem, planned for a call.
pub(crate) struct Expressions<'a> {
    score: Option<TileProgram<'a>>,
    derivative: Option<TileProgram<'a>>,
    mask: Option<TileProgram<'a>>,
    bits: OnceLock<MaskBits>,
}

impl<'a> Expressions<'a> {
    pub fn new(problem: &'a Problem, one_head: bool) -> Self {
        let plan = |program: Option<&'a Program>| program.map(|program| TileProgram::new(program, one_head));
        Expressions {
            score: plan(problem.score_program()),
            derivative: plan(problem.score_derivative()).filter(|plan| !plan.is_one()),
            mask: plan(problem.mask_rest()),
            bits: OnceLock::new(),
        }
    }
}

/// What lanes see of keys according to the rest of the mask, for all tiles of a call.
struct MaskBits {
    /// For each tile that differs, a word per key.
    words: Vec<u64>,
    /// For each of these tiles, the keys that its lanes see.
    hulls: Vec<Hull>,
    sequences: Vec<BitsOfSequence>,
}

/// Where the bits of a sequence's tiles are.
#[derive(Clone, Copy)]
struct BitsOfSequence {
    /// The first word, and the words of a tile: one for each key.
    first: usize,
    keys: usize,
    /// Index of the first tile.
    tiles: usize,
}

/// What the rest of a mask lets a tile see, if that is simple: padding, prefixes, documents, and causal masks that came as
/// an expression need not be asked key by key.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hull {
    /// The keys from the first to the last that some lane sees.
    pub keys: Range<usize>,
    pub form: HullForm,
}

/// How much of a hull's keys the lanes of a tile see.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum HullForm {
    /// Each lane has its own bits.
    #[default]
    Bits,
    /// Every lane sees all of them.
    Whole,
    /// Each lane sees one interval: its first key, and one past its last. Lanes without keys have the interval of length 0
    /// at the first key of the hull.
    Intervals(Box<[[i32; MAX_LANES]; 2]>),
}

impl Hull {
    /// Of a tile with a word for each key, of which the lowest `rows` bits count.
    fn new(words: &[u64], rows: usize) -> Hull {
        let lanes = u64::MAX >> (64 - rows);
        let first = words.iter().position(|word| word & lanes != 0).unwrap_or(0);
        let end = words.iter().rposition(|word| word & lanes != 0).map_or(first, |last| last + 1);
        let keys = first..end;
        if words[first..end].iter().all(|word| word & lanes == lanes) {
            return Hull { keys, form: HullForm::Whole };
        }
        let form = intervals(&words[first..end], first as i32, lanes);
        Hull { keys, form: form.map_or(HullForm::Bits, |own| HullForm::Intervals(Box::new(own))) }
    }
}

/// The interval of each lane among `lanes`, if each sees one; the first word is that of key `first`.
fn intervals(words: &[u64], first: i32, lanes: u64) -> Option<[[i32; MAX_LANES]; 2]> {
    let [mut lo, mut hi] = [[first; MAX_LANES]; 2];
    let (mut begun, mut ended) = (0u64, 0u64);
    let each = |mut bits: u64, row: &mut [i32; MAX_LANES], key: i32| {
        while bits != 0 {
            row[bits.trailing_zeros() as usize] = key;
            bits &= bits - 1;
        }
    };
    for (key, &word) in (first..).zip(words) {
        let word = word & lanes;
        if word & ended != 0 {
            return None;
        }
        each(word & !begun, &mut lo, key);
        let over = begun & !word & !ended;
        each(over, &mut hi, key);
        (begun, ended) = (begun | word, ended | over);
    }
    each(begun & !ended, &mut hi, first + words.len() as i32);
    Some([lo, hi])
}

/// The evaluators of a call's expressions, with what they know about one tile.
pub(crate) struct Modifier<'a> {
    score: Option<Evaluator<'a>>,
    derivative: Option<Evaluator<'a>>,
    /// Of the rest of the mask, if the call has no bits.
    mask: Option<Evaluator<'a>>,
    /// Sequence, head, first row and lanes of the tile.
    tile: Option<(usize, usize, usize, Range<usize>)>,
    /// The tile's part of the call's bits, if there are any.
    words: Option<Range<usize>>,
}

impl Modifier<'_> {
    /// Changes to some lanes of a tile.
    fn prepare(&mut self, cx: &Context<'_>, tile: &Tile, lanes: &Lanes, range: Range<usize>) {
        let own = (tile.sequence, tile.head, tile.first, range.clone());
        if self.tile.as_ref() == Some(&own) {
            return;
        }
        let env = cx.env(tile, lanes, range);
        self.words = cx.place_of_bits(tile);
        [&mut self.score, &mut self.derivative, &mut self.mask].into_iter().flatten().for_each(|x| x.prepare(&env));
        self.tile = Some(own);
    }
}

/// Blocks of at most [`KEYS`] keys.
pub(crate) fn in_blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    keys.clone().step_by(KEYS).map(move |start| start..(start + KEYS).min(keys.end))
}

impl Context<'_> {
    /// Evaluators for scores of which one is `scale` in natural units.
    pub fn modifier(&self, scale: f32) -> Modifier<'_> {
        let (aux, short) = (self.bound.aux(), self.problem.dtype() != DType::F32);
        let all = &*self.expressions;
        Modifier {
            score: all.score.as_ref().map(|plan| Evaluator::new(plan, aux, scale, short)),
            derivative: all.derivative.as_ref().map(|plan| Evaluator::new(plan, aux, scale, short)),
            // Where a mask has become bits, nothing is evaluated.
            mask: all
                .mask
                .as_ref()
                .filter(|_| all.bits.get().is_none())
                .map(|plan| Evaluator::new(plan, aux, scale, short)),
            tile: None,
            words: None,
        }
    }

    /// Whether scores may grow or fall along the keys, however similar queries and keys are.
    pub fn slopes(&self) -> bool {
        self.expressions.score.as_ref().is_some_and(TileProgram::slopes)
    }

    /// Whether the modifiers read an element of a tensor for each key and lane.
    pub fn reads_far_rows(&self) -> bool {
        self.expressions.score.as_ref().is_some_and(TileProgram::reads_cells)
    }

    /// Whether the derivative of the modifiers is not 1 everywhere.
    pub fn has_derivative(&self) -> bool {
        self.expressions.derivative.is_some()
    }

    /// The environment of an expression on lanes of a tile.
    pub fn env<'b>(&self, tile: &Tile, lanes: &'b Lanes, range: Range<usize>) -> LaneEnv<'b> {
        let s = &self.bound.sequences()[tile.sequence];
        let (q, head) = (&lanes.q[range.clone()], &lanes.head[range]);
        LaneEnv { batch: s.batch, q_len: s.q_len, k_len: s.k_len, q, head }
    }

    /// Queues prefetches of what the modifiers of a step read; the product of its scores runs them.
    pub fn prefetch_modifier(
        &self,
        modifier: &mut Modifier<'_>,
        (tile, lanes): (&Tile, &Lanes),
        (step, origin): (&Step, usize),
        ahead: &mut Ahead,
    ) {
        modifier.prepare(self, tile, lanes, 0..lanes.stride);
        let keys = step.hull();
        if let Some(score) = &mut modifier.score {
            score.prefetch(origin + keys.start..origin + keys.end, ahead, keys.len() / PRODUCT_ROWS);
        }
    }

    /// Applies the score modifiers, then hides what the rest of the mask hides (as -inf). Writes the derivative of the
    /// modifiers to `derivative` first, if it is given and not 1.
    pub fn modify(
        &self,
        modifier: &mut Modifier<'_>,
        (tile, lanes): (&Tile, &Lanes),
        (step, origin): (&Step, usize),
        s: &mut [f32],
        derivative: Option<&mut [f32]>,
    ) {
        let stride = lanes.stride;
        modifier.prepare(self, tile, lanes, 0..stride);
        let Modifier { score, derivative: slope, mask, words: bits, .. } = modifier;
        if let (Some(slope), Some(out)) = (slope, derivative) {
            for keys in in_blocks(step.hull()) {
                let (first, rows) = ((origin + keys.start) as i32, keys.start * stride..keys.end * stride);
                self.kernels.evaluate(slope, first, keys.len(), (&s[rows.clone()], stride), &mut out[rows]);
            }
        }
        if let Some(score) = score {
            for keys in in_blocks(step.hull()) {
                let (first, rows) = ((origin + keys.start) as i32, keys.start * stride..keys.end * stride);
                self.kernels.modify(score, first, keys.len(), (&mut s[rows], stride));
            }
        }
        if step.rest {
            for keys in in_blocks(step.hull()) {
                let rows = keys.start * stride..keys.end * stride;
                let mut room = [0; KEYS];
                let words = self.words(mask, bits, origin + keys.start..origin + keys.end, &mut room);
                self.kernels.hide((&mut s[rows], stride), words, 0);
            }
        }
    }

    /// Like [`modify`](Self::modify), on half the lanes of a tile and 32 keys. Keys past the last are left alone.
    pub fn modify_square(&self, modifier: &mut Modifier<'_>, (tile, lanes): (&Tile, &Lanes), square: Square<'_>) {
        let Square { strip, key, s, .. } = square;
        let (first, k_len) = (strip * STRIP_LANES, self.bound.sequences()[tile.sequence].k_len);
        let n = KEYS.min(k_len - key);
        modifier.prepare(self, tile, lanes, first..first + STRIP_LANES);
        if let Some(score) = &mut modifier.score {
            self.kernels.modify(score, key as i32, n, (s, STRIP_LANES));
        }
        if !lanes.decided {
            let mut room = [0; KEYS];
            let words = self.words(&mut modifier.mask, &modifier.words, key..key + n, &mut room);
            // Bits of the call are those of all lanes, evaluated ones those of the strip.
            let first = if modifier.words.is_some() { first } else { 0 };
            let all = words.iter().fold(u64::MAX, |all, word| all & word) >> first;
            if all & u64::from(u32::MAX) != u64::from(u32::MAX) {
                self.kernels.hide((s, STRIP_LANES), words, first);
            }
        }
    }

    /// Whether no lane of a tile sees any of these keys, according to the rest of the mask.
    pub fn sees_none(&self, tile: &Tile, lanes: &Lanes, keys: &Range<usize>) -> bool {
        let (first, last) = lanes.reach();
        let keys = keys.start.max(first).min(last)..keys.end.min(last);
        let rest = self.problem.mask_rest().filter(|_| !lanes.decided);
        keys.is_empty() || rest.is_some_and(|rest| self.coverage(rest, tile, &keys) == Coverage::Empty)
    }

    /// What the lanes of a tile see of at most [`KEYS`] keys: from the call's bits, or evaluated into `room`.
    fn words<'b>(
        &'b self,
        mask: &mut Option<Evaluator<'_>>,
        bits: &Option<Range<usize>>,
        keys: Range<usize>,
        room: &'b mut [u64; KEYS],
    ) -> &'b [u64] {
        if let (Some(bits), Some(own)) = (self.expressions.bits.get(), bits) {
            return &bits.words[own.clone()][keys];
        }
        let mask = mask.as_mut().expect("bug in fulgurite: a mask without bits has no evaluator");
        let room = &mut room[..keys.len()];
        self.kernels.conditions(mask, keys.start as i32, room);
        room
    }

    /// The bits of a tile, a word for each key of its sequence, if the call has them.
    fn bits_of(&self, tile: &Tile) -> Option<&[u64]> {
        let bits = self.expressions.bits.get()?;
        Some(&bits.words[self.place_of_bits(tile)?])
    }

    fn place_of_bits(&self, tile: &Tile) -> Option<Range<usize>> {
        let own = self.expressions.bits.get()?.sequences.get(tile.sequence)?;
        let at = own.first + self.slot(tile.sequence, tile.first) * own.keys;
        Some(at..at + own.keys)
    }

    /// Whether tiles look for intervals in their bits. On a matrix unit that has not been tested yet.
    fn has_hulls(&self) -> bool {
        self.kernels.matrix_for(self.problem.dtype()).is_none()
    }

    /// The keys that a tile sees, if the call has bits.
    pub fn hull_of_bits(&self, tile: &Tile) -> Option<&Hull> {
        let bits = self.expressions.bits.get().filter(|_| self.has_hulls())?;
        let own = bits.sequences.get(tile.sequence)?;
        bits.hulls.get(own.tiles + self.slot(tile.sequence, tile.first))
    }

    /// Index of a tile that begins at a packed row, among those of its sequence and a head.
    fn slot(&self, sequence: usize, first: usize) -> usize {
        let (unit, lanes) = (self.tile_unit(sequence), self.kernels.tile);
        first / unit * unit.div_ceil(lanes) + first % unit / lanes
    }

    /// How much of the keys the rest of the mask lets a tile see.
    pub fn coverage(&self, rest: &Program, tile: &Tile, keys: &Range<usize>) -> Coverage {
        let Some(words) = self.bits_of(tile) else { return self.bounds(rest, tile, keys) };
        let (mut all, mut any) = (u64::MAX, 0);
        words[keys.clone()].iter().for_each(|word| (all, any) = (all & word, any | word));
        let lanes = u64::MAX >> (64 - tile.rows);
        match (any & lanes, all & lanes == lanes) {
            (0, _) => Coverage::Empty,
            (_, true) => Coverage::Full,
            _ => Coverage::Partial,
        }
    }

    fn bounds(&self, rest: &Program, tile: &Tile, keys: &Range<usize>) -> Coverage {
        let s = &self.bound.sequences()[tile.sequence];
        rest.coverage(&Domain {
            batch: s.batch..s.batch + 1,
            heads: tile.head..tile.head + self.pack,
            q: self.queries(tile),
            k: keys.clone(),
            q_len: (s.q_len, s.q_len),
            k_len: (s.k_len, s.k_len),
            aux: self.bound.aux(),
        })
    }

    /// Makes the bits of a mask that does not depend on the head; call it before the walk.
    pub fn prepare_mask(&self, threads: usize) {
        let expressions = &*self.expressions;
        let (Some(plan), Some(rest)) = (&expressions.mask, self.problem.mask_rest()) else { return };
        if plan.reads(Var::Head) || expressions.bits.get().is_some() {
            return;
        }
        let all = self.bound.sequences();
        let (mut sequences, mut own): (Vec<BitsOfSequence>, Vec<usize>) = (Vec::with_capacity(all.len()), Vec::new());
        let (mut total, mut all_tiles) = (0, 0);
        for (i, s) in all.iter().enumerate() {
            // Sequences of one shape share their bits, unless the mask tells them apart.
            let same = !plan.reads(Var::Batch) && i > 0 && (s.q_len, s.k_len) == (all[0].q_len, all[0].k_len);
            if same {
                sequences.push(sequences[0]);
                continue;
            }
            let rows = s.q_len * self.pack;
            let tiles = if rows == 0 { 0 } else { self.slot(i, rows - 1) + 1 };
            sequences.push(BitsOfSequence { first: total, keys: s.k_len, tiles: all_tiles });
            own.push(i);
            total += tiles * s.k_len;
            all_tiles += tiles;
        }
        if total > MOST_WORDS {
            return;
        }
        let mut words: Vec<u64> = stop::zeros("bits of the mask", total);
        let mut hulls: Vec<Hull> = stop::zeros("bits of the mask", all_tiles);
        let mut slots: Vec<TileBits<'_>> = Vec::with_capacity(all_tiles);
        let (mut left, mut hulls_left) = (&mut words[..], hulls.iter_mut());
        for &sequence in &own {
            // The first tiles of a key/value head are those of its first query head, or of all.
            let mut tiles: Vec<Tile> = self.tiles(sequence, 0).filter(|tile| tile.head == 0).collect();
            tiles.sort_unstable_by_key(|tile| tile.first);
            for (tile, hull) in tiles.into_iter().zip(&mut hulls_left) {
                let (words, rest) = left.split_at_mut(all[sequence].k_len);
                slots.push((tile, Mutex::new((words, hull))));
                left = rest;
            }
        }
        let has_hulls = self.has_hulls();
        pool::run(threads, slots.len(), &|i| {
            let (tile, own) = &slots[i];
            let (words, hull) = &mut *own.lock().unwrap_or_else(|e| e.into_inner());
            self.fill_bits(plan, rest, tile, words);
            if has_hulls {
                **hull = Hull::new(words, tile.rows);
            }
        });
        drop(slots);
        expressions.bits.get_or_init(|| MaskBits { words, hulls, sequences });
    }

    fn fill_bits(&self, plan: &TileProgram<'_>, rest: &Program, tile: &Tile, words: &mut [u64]) {
        let lanes = self.lanes(tile);
        let mut mask = Evaluator::new(plan, self.bound.aux(), 1.0, false);
        mask.prepare(&self.env(tile, &lanes, 0..lanes.stride));
        let (first, last) = lanes.reach();
        for start in (first..last).step_by(BLOCK) {
            let keys = start..(start + BLOCK).min(last);
            // Bounds are cheaper than elements where they need not read an element for each lane and key.
            let known = if plan.has_bounds() { self.bounds(rest, tile, &keys) } else { Coverage::Partial };
            match known {
                Coverage::Empty => {}
                Coverage::Full => words[keys].fill(u64::MAX),
                Coverage::Partial => {
                    for keys in in_blocks(keys) {
                        self.kernels.conditions(&mut mask, keys.start as i32, &mut words[keys]);
                    }
                }
            }
        }
    }
}

/// A tile and the memory for its mask: the words of its keys, and their hull.
type TileBits<'a> = (Tile, Mutex<(&'a mut [u64], &'a mut Hull)>);

/// Evaluators of the gradient of an auxiliary tensor.
pub(crate) fn evaluator<'a>(plan: &'a TileProgram<'a>, bound: &'a Bound<'a>) -> Evaluator<'a> {
    Evaluator::new(plan, bound.aux(), 1.0, false)
}

const _: () = assert!(MAX_LANES <= 64, "a word has a bit for each lane");

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // a list of ranges, of which there may be one
mod tests {
    use super::*;

    /// Words of lanes that each see the keys of some ranges.
    fn words(lanes: &[&[Range<usize>]], keys: usize) -> Vec<u64> {
        let sees = |key: usize, own: &[Range<usize>]| own.iter().any(|range| range.contains(&key));
        (0..keys)
            .map(|key| lanes.iter().enumerate().map(|(lane, own)| u64::from(sees(key, own)) << lane).sum())
            .collect()
    }

    #[test]
    fn padding_is_whole() {
        let hull = Hull::new(&words(&[&[3..9], &[3..9]], 12), 2);
        assert_eq!((hull.keys, hull.form), (3..9, HullForm::Whole));
        // Bits past the last row do not count.
        let hull = Hull::new(&words(&[&[3..9], &[3..9], &[0..2]], 12), 2);
        assert_eq!((hull.keys, hull.form), (3..9, HullForm::Whole));
        let hull = Hull::new(&words(&[&[], &[]], 12), 2);
        assert_eq!((hull.keys, hull.form), (0..0, HullForm::Whole));
        assert_eq!(Hull::new(&[u64::MAX; 5], 64).keys, 0..5);
    }

    #[test]
    fn intervals_are_found_and_holes_are_not() {
        let of = |lanes: &[&[Range<usize>]]| Hull::new(&words(lanes, 12), lanes.len());
        let ends = |form: HullForm, n: usize| match form {
            HullForm::Intervals(own) => own.map(|row| row[..n].to_vec()),
            other => panic!("{other:?}"),
        };
        let causal: [&[Range<usize>]; 4] = [&[], &[2..3], &[2..4], &[2..12]];
        let hull = of(&causal);
        assert_eq!(hull.keys, 2..12);
        assert_eq!(ends(hull.form, 4), [vec![2, 2, 2, 2], vec![2, 3, 4, 12]]);
        let documents: [&[Range<usize>]; 3] = [&[0..5], &[0..5], &[5..9]];
        assert_eq!(ends(of(&documents).form, 3), [vec![0, 0, 5], vec![5, 5, 9]]);
        let holes: [&[Range<usize>]; 2] = [&[0..4, 5..6], &[0..6]];
        assert_eq!((of(&holes).keys, of(&holes).form), (0..6, HullForm::Bits));
    }
}
