//! The modifiers of a problem in the compute role: applied to a whole block in place, to one element, or on the way
//! into the exponentials.

use crate::parts::modifier::evaluate::{At, Evaluation, Line, Quick, TANH, TANH_BOUND, Tanh};
use crate::parts::modifier::{Modifiers, Parameters, Running, TilePosition, Word};
use crate::parts::softmax::Scores;
use fulgurite_core::expr::{Program, Step, Unary};
use fulgurite_ptx::{Acc, Group, RowView, Scope, Val, Var};
use std::collections::HashMap;
use std::marker::PhantomData;

/// The modifiers of a problem in the compute role.
pub struct Modify<'a, 'k, A = Acc<'k>> {
    parameters: &'a Parameters<'k>,
    score: Option<Running<'k>>,
    mask: Option<Running<'k>>,
    block_kind: Option<Running<'k>>,
    /// Factor of the scores before the modifier.
    scale: Val<'k, f32>,
    /// Approximation of tanh where it need not be exact.
    tanh: Tanh,
    /// Coefficients and bound of the tanh polynomial for unscaled scores, if the score program contains a tanh.
    polynomial: Option<([Var<'k, f32>; 4], Var<'k, f32>)>,
    view: PhantomData<A>,
}

impl<'a, 'k, A: RowView<'k>> Modify<'a, 'k, A> {
    /// Modifiers for the accumulators of any tensor unit.
    pub fn of_view(
        w: &Scope<'k, Group>,
        modifiers: &Modifiers,
        parameters: &'a Parameters<'k>,
        scale: Val<'k, f32>,
        tanh: Tanh,
    ) -> Self {
        // Constant factors are folded into the scale, unless the backward pass needs the derivative.
        let fold = !modifiers.transposed;
        let score = modifiers.score.as_ref().map(|program| Running::new(w, program, fold, modifiers, A::ROWS));
        let running = |program: &Program| Running::new(w, program, false, modifiers, A::ROWS);
        let (mask, block_kind) = (modifiers.mask.as_ref().map(running), modifiers.block_kind.as_ref().map(running));
        let bends = |step: &Step| matches!(step, Step::Unary(Unary::Tanh, _));
        let bent = modifiers.score.as_ref().filter(|program| program.steps().iter().any(bends));
        let polynomial = bent.map(|_| {
            let square = scale * scale;
            let mut power = scale;
            let coefficients = TANH.map(|c| {
                let coefficient = w.var(power * c);
                power = power * square;
                coefficient
            });
            (coefficients, w.var(scale.recip() * TANH_BOUND))
        });
        Modify { parameters, score, mask, block_kind, scale, tanh, polynomial, view: PhantomData }
    }

    /// Computes the values that are constant over a tile.
    pub fn set(&self, w: &Scope<'k, Group>, place: &TilePosition<'k>) {
        self.score
            .iter()
            .chain(&self.mask)
            .chain(&self.block_kind)
            .for_each(|running| running.set(w, self.parameters, place));
    }

    /// The scores of a block, modified on their way into the exponents by fast paths. If the block needs a mask
    /// (`cuts`), or a value exceeds the bound of a fast path, `settle` recomputes the scores. `log2` is the factor of
    /// the modified scores.
    pub fn quick<'b>(
        &'b self,
        w: &'b Scope<'k, Group>,
        key: Val<'k, i32>,
        full: Option<Val<'k, bool>>,
        log2: Val<'k, f32>,
        (cuts, cols): (Val<'k, bool>, u32),
        settle: &'b dyn Fn(&Scope<'k, Group>),
    ) -> Unsettled<'b, 'k> {
        let mut changer = Changer::new(self, w, key + A::first_col(w).to_i32());
        if let Some(score) = &mut changer.score {
            let of_raw = self.polynomial.map(|(coefficients, bound)| (coefficients.map(|c| c.get()), bound.get()));
            score.quick = Some(Quick { tanh: self.tanh, of_raw, largest: [None; 2], turns: None, cols });
        }
        let (factor, both) = (self.scale, self.scale * log2);
        Unsettled { changer, factor, full, log2, both, cuts, settle, lines: vec![None; A::ROWS] }
    }

    /// One score of the thread's `row`-th row, modified as [`apply`](Self::apply) does, for a key of the sequence.
    pub fn one(
        &self,
        w: &Scope<'k, Group>,
        raw: Val<'k, f32>,
        row: usize,
        key: Val<'k, i32>,
        full: Option<Val<'k, bool>>,
    ) -> Val<'k, f32> {
        let mut changer = Changer::new(self, w, key);
        changer.change(At { row, col: 0, score: Some([raw, self.scale]) }, raw, full)
    }

    /// As [`one`](Self::one), in a block of this kind if the mask has blocks.
    pub fn one_in_block(
        &self,
        w: &Scope<'k, Group>,
        raw: Val<'k, f32>,
        row: usize,
        key: Val<'k, i32>,
        kind: Option<BlockKind<'k>>,
    ) -> Val<'k, f32> {
        let Some(BlockKind(kind)) = kind else { return self.one(w, raw, row, key, None) };
        let (full, partial) = (kind.eq(BlockKind::FULL), kind.eq(BlockKind::PARTIAL));
        let score = self.one(w, raw, row, key, Some(full));
        (full | partial).select(score, f32::NEG_INFINITY)
    }

    /// The kind of the block that holds a tile, whose first column is `key` of the sequence.
    pub fn block_kind(&self, w: &Scope<'k, Group>, key: Val<'k, i32>) -> Option<BlockKind<'k>> {
        let running = self.block_kind.as_ref()?;
        let (parameters, place, quick, known) = (self.parameters, None, None, HashMap::new());
        let mut evaluation = Evaluation { w, running, parameters, place, key: Some(key), quick, known };
        let last = running.analysed.program.steps().len() - 1;
        Some(BlockKind(evaluation.step(last, At { row: 0, col: 0, score: None }).int()))
    }

    /// Modifies the scores of a tile that starts at `key` of the sequence and lies in a block of this kind. The mask is
    /// evaluated in partial blocks only.
    pub fn apply_in_block(&self, w: &Scope<'k, Group>, s: &A, key: Val<'k, i32>, BlockKind(kind): BlockKind<'k>) {
        let key = key + A::first_col(w).to_i32();
        let at = |i: usize, x| At { row: A::row_of(i), col: A::col_of(i), score: Some([x, self.scale]) };
        let mut changer = Changer { mask: None, ..Changer::new(self, w, key) };
        if self.score.is_some() {
            s.elements().enumerate().for_each(|(i, x)| s.set(i, changer.change(at(i, x), x, None)));
        }
        w.when(kind.ne(BlockKind::FULL), |w| {
            let (mut changer, partial) = (Changer::new(self, w, key), kind.eq(BlockKind::PARTIAL));
            for (i, x) in s.elements().enumerate() {
                s.set(i, partial.select(changer.hide(at(i, x), x, None), f32::NEG_INFINITY));
            }
        });
    }

    /// Modifies the scores of the block that starts at `key` of the sequence. The mask is ignored in a block that is
    /// known to be `full`.
    pub fn apply(&self, w: &Scope<'k, Group>, s: &A, key: Val<'k, i32>, full: Option<Val<'k, bool>>) {
        if self.score.is_none() && self.mask.is_none() {
            return;
        }
        let mut changer = Changer::new(self, w, key + A::first_col(w).to_i32());
        for (i, x) in s.elements().enumerate() {
            let at = At { row: A::row_of(i), col: A::col_of(i), score: Some([x, self.scale]) };
            s.set(i, changer.change(at, x, full));
        }
    }
}

/// The kind of a block of a block mask, read from its table.
#[derive(Clone, Copy)]
pub struct BlockKind<'k>(Val<'k, i32>);

impl BlockKind<'_> {
    const PARTIAL: i32 = 1;
    const FULL: i32 = 2;
}

/// Another program over scores and indices in the compute role, such as a derivative.
pub struct Function<'a, 'k> {
    parameters: &'a Parameters<'k>,
    running: Running<'k>,
    scale: Val<'k, f32>,
}

impl<'a, 'k> Function<'a, 'k> {
    /// A program over the accumulators of any tensor unit.
    pub fn of_view<A: RowView<'k>>(
        w: &Scope<'k, Group>,
        program: &Program,
        modifiers: &Modifiers,
        parameters: &'a Parameters<'k>,
        scale: Val<'k, f32>,
    ) -> Self {
        Function { parameters, running: Running::new(w, program, false, modifiers, A::ROWS), scale }
    }

    /// Computes the values that are constant over a tile.
    pub fn set(&self, w: &Scope<'k, Group>, place: &TilePosition<'k>) {
        self.running.set(w, self.parameters, place);
    }

    fn values<A: RowView<'k>>(&self, w: &Scope<'k, Group>, s: &A, first: Val<'k, i32>) -> Vec<Word<'k>> {
        let (parameters, key) = (self.parameters, Some(first + A::first_col(w).to_i32()));
        let running = &self.running;
        let mut evaluation =
            Evaluation { w, running, parameters, place: None, key, quick: None, known: HashMap::new() };
        let last = running.analysed.program.steps().len() - 1;
        let elements = s.elements().enumerate();
        let at = |(i, x)| At { row: A::row_of(i), col: A::col_of(i), score: Some([x, self.scale]) };
        elements.map(|element| evaluation.step(last, at(element))).collect()
    }

    /// The program's value for one raw score of the thread's `row`-th row, in column `first`.
    pub fn one(&self, w: &Scope<'k, Group>, raw: Val<'k, f32>, row: usize, first: Val<'k, i32>) -> Val<'k, f32> {
        let (parameters, running) = (self.parameters, &self.running);
        let (place, quick, known) = (None, None, HashMap::new());
        let mut evaluation = Evaluation { w, running, parameters, place, key: Some(first), quick, known };
        let last = running.analysed.program.steps().len() - 1;
        evaluation.step(last, At { row, col: 0, score: Some([raw, self.scale]) }).float()
    }

    /// The program's values for the raw scores of a block that starts at column `first`.
    pub fn floats<A: RowView<'k>>(&self, w: &Scope<'k, Group>, s: &A, first: Val<'k, i32>) -> Vec<Val<'k, f32>> {
        self.values(w, s, first).into_iter().map(Word::float).collect()
    }

    /// The program's integer values for a block that starts at column `first`.
    pub fn ints<A: RowView<'k>>(&self, w: &Scope<'k, Group>, s: &A, first: Val<'k, i32>) -> Vec<Val<'k, i32>> {
        self.values(w, s, first).into_iter().map(Word::int).collect()
    }

    /// Whether the value is the same for all columns, and for all rows, of a thread's tile.
    pub fn stays(&self) -> [bool; 2] {
        let reads = self.running.analysed.reads.last().copied().unwrap_or_default();
        [!reads.moves(), !reads.row && !reads.score]
    }
}

/// The score and mask programs while a section of the kernel is built.
struct Changer<'a, 'k> {
    score: Option<Evaluation<'a, 'k>>,
    mask: Option<Evaluation<'a, 'k>>,
}

impl<'a, 'k> Changer<'a, 'k> {
    fn new<A>(modify: &'a Modify<'_, 'k, A>, w: &'a Scope<'k, Group>, key: Val<'k, i32>) -> Self {
        let evaluation = |running| Evaluation {
            w,
            running,
            parameters: modify.parameters,
            place: None,
            key: Some(key),
            quick: None,
            known: HashMap::new(),
        };
        Changer { score: modify.score.as_ref().map(evaluation), mask: modify.mask.as_ref().map(evaluation) }
    }

    fn change(&mut self, at: At<'k>, x: Val<'k, f32>, full: Option<Val<'k, bool>>) -> Val<'k, f32> {
        let mut new = x;
        if let Some(score) = &mut self.score {
            let analysed = &score.running.analysed;
            let last = analysed.folded.output.map_or(analysed.program.steps().len() - 1, |(at, _)| at);
            new = score.step(last, at).float();
        }
        self.hide(at, new, full)
    }

    /// Returns `x`, the score or the exponent of an element, or -inf if the mask hides the element.
    fn hide(&mut self, at: At<'k>, x: Val<'k, f32>, full: Option<Val<'k, bool>>) -> Val<'k, f32> {
        let Some(mask) = &mut self.mask else { return x };
        let steps = mask.running.analysed.program.steps().len();
        let seen = mask.step(steps - 1, at).bool();
        let seen = full.map_or(seen, |full| seen | full);
        seen.select(x, f32::NEG_INFINITY)
    }
}

/// Scores that are modified on their way into the exponentials.
pub struct Unsettled<'a, 'k> {
    changer: Changer<'a, 'k>,
    factor: Val<'k, f32>,
    full: Option<Val<'k, bool>>,
    log2: Val<'k, f32>,
    /// The product of `factor` and `log2`.
    both: Val<'k, f32>,
    cuts: Val<'k, bool>,
    settle: &'a dyn Fn(&Scope<'k, Group>),
    /// For each row, the term added to its scaled scores (in powers of two, including the shift), if that is linear.
    lines: Vec<Option<Option<Line<'k>>>>,
}

impl<'k> Unsettled<'_, 'k> {
    fn line(&mut self, at: At<'k>, shift: Val<'k, f32>) -> Option<Line<'k>> {
        if let Some(known) = self.lines[at.row] {
            return known;
        }
        let added = self.changer.score.as_mut().and_then(|score| score.added_line(at));
        let line = added.map(|line| {
            let scaled = line.times(self.log2);
            Line { a: scaled.a + shift, ..scaled }
        });
        self.lines[at.row] = Some(line);
        line
    }
}

impl<'k> Scores<'k> for Unsettled<'_, 'k> {
    fn exponent(&mut self, row: usize, col: u32, raw: Val<'k, f32>, shift: Val<'k, f32>) -> Val<'k, f32> {
        let at = At { row, col, score: Some([raw, self.factor]) };
        // Two multiply-adds suffice if the modifier adds a linear term, as ALiBi does.
        if let Some(Line { a, b: Some(b) }) = self.line(at, shift) {
            let added = if at.col == 0 { a } else { b.mul_add(at.col as f32, a) };
            return self.changer.hide(at, raw.mul_add(self.both, added), self.full);
        }
        self.changer.change(at, raw, self.full).mul_add(self.log2, shift)
    }

    fn doubt(&self) -> Option<Val<'k, bool>> {
        let quick = self.changer.score.as_ref().and_then(|score| score.quick).and_then(|quick| quick.doubt());
        Some(quick.map_or(self.cuts, |doubt| self.cuts | doubt))
    }

    fn settle(&self, w: &Scope<'k, Group>) {
        (self.settle)(w);
    }
}
