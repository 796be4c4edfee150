//! The modifiers of a problem in the role that computes: on a whole block in place, on one element, or on the way into the
//! exponentials.

use crate::parts::modifier::evaluate::{At, Evaluation, Line, Quick, TANH, TANH_BOUND, Tanh};
use crate::parts::modifier::{Modifiers, Parameters, Place, Running, Word};
use crate::parts::softmax::Scores;
use fulgurite_core::expr::{Program, Step, Unary};
use fulgurite_ptx::{Group, RowView, Scope, Val, Var};
use std::collections::HashMap;

/// The modifiers of a problem in the role that computes.
pub struct Modify<'a, 'k> {
    parameters: &'a Parameters<'k>,
    score: Option<Running<'k>>,
    mask: Option<Running<'k>>,
    /// What scores are multiplied by before the modifier.
    scale: Val<'k, f32>,
    /// How the tangent is computed where it need not be exact.
    tanh: Tanh,
    /// The polynomial's coefficients and its bound for scores that are not yet multiplied, where it is asked for.
    polynomial: Option<([Var<'k, f32>; 4], Var<'k, f32>)>,
}

impl<'a, 'k> Modify<'a, 'k> {
    pub fn new(
        w: &Scope<'k, Group>,
        modifiers: &Modifiers,
        parameters: &'a Parameters<'k>,
        scale: Val<'k, f32>,
        tanh: Tanh,
    ) -> Self {
        // Constant factors stand in the scale where nobody wants the derivative.
        Modify::folding(w, modifiers, parameters, (scale, tanh), !modifiers.transposed)
    }

    /// The same without constant factors in the scale.
    pub fn unfolded(
        w: &Scope<'k, Group>,
        modifiers: &Modifiers,
        parameters: &'a Parameters<'k>,
        scale: Val<'k, f32>,
        tanh: Tanh,
    ) -> Self {
        Modify::folding(w, modifiers, parameters, (scale, tanh), false)
    }

    fn folding(
        w: &Scope<'k, Group>,
        modifiers: &Modifiers,
        parameters: &'a Parameters<'k>,
        (scale, tanh): (Val<'k, f32>, Tanh),
        fold: bool,
    ) -> Self {
        let score = modifiers.score.as_ref().map(|program| Running::new(w, program, fold, modifiers));
        let mask = modifiers.mask.as_ref().map(|program| Running::new(w, program, false, modifiers));
        let bends = |step: &Step| matches!(step, Step::Unary(Unary::Tanh, _));
        let bent = modifiers.score.as_ref().filter(|program| program.steps().iter().any(bends));
        let polynomial = bent.filter(|_| tanh == Tanh::Polynomial).map(|_| {
            let square = scale * scale;
            let mut power = scale;
            let coefficients = TANH.map(|c| {
                let coefficient = w.var(power * c);
                power = power * square;
                coefficient
            });
            (coefficients, w.var(scale.recip() * TANH_BOUND))
        });
        Modify { parameters, score, mask, scale, tanh, polynomial }
    }

    /// For a tile.
    pub fn set(&self, w: &Scope<'k, Group>, place: Place<'k>) {
        self.score.iter().chain(&self.mask).for_each(|running| running.set(w, self.parameters, place));
    }

    /// The scores of a block that become exponents as they are modified; in one that `cuts`, or where something was too large
    /// for a quick way, they are done again by `settle`. `log2` is what modified scores are multiplied by.
    pub fn quick<'b>(
        &'b self,
        w: &'b Scope<'k, Group>,
        key: Val<'k, i32>,
        full: Option<Val<'k, bool>>,
        log2: Val<'k, f32>,
        (cuts, cols): (Val<'k, bool>, u32),
        settle: &'b dyn Fn(&Scope<'k, Group>),
    ) -> Unsettled<'b, 'k> {
        let mut changer = Changer::new(self, w, key + w.first_col().to_i32());
        if let Some(score) = &mut changer.score {
            let of_raw = self.polynomial.map(|(coefficients, bound)| (coefficients.map(|c| c.get()), bound.get()));
            score.quick = Some(Quick { tanh: self.tanh, of_raw, largest: [None; 2], turns: None, cols });
        }
        let (factor, both) = (self.scale, self.scale * log2);
        Unsettled { changer, factor, full, log2, both, cuts, settle, lines: [None; 2] }
    }

    /// One score of the thread's `row`-th row as [`apply`](Self::apply) changes it, for a key of the sequence.
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

    /// Changes the scores of the block that begins at this key of the sequence; in a block that is known to be `full`, the
    /// mask does not count.
    pub fn apply<A: RowView<'k>>(&self, w: &Scope<'k, Group>, s: &A, key: Val<'k, i32>, full: Option<Val<'k, bool>>) {
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

/// Another program over scores and indices in the role that computes.
pub struct Function<'a, 'k> {
    parameters: &'a Parameters<'k>,
    running: Running<'k>,
    scale: Val<'k, f32>,
}

impl<'a, 'k> Function<'a, 'k> {
    pub fn new(
        w: &Scope<'k, Group>,
        program: &Program,
        modifiers: &Modifiers,
        parameters: &'a Parameters<'k>,
        scale: Val<'k, f32>,
    ) -> Self {
        Function { parameters, running: Running::new(w, program, false, modifiers), scale }
    }

    /// For a tile.
    pub fn set(&self, w: &Scope<'k, Group>, place: Place<'k>) {
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

    /// Its values for the raw scores of a block that begins at this column.
    pub fn floats<A: RowView<'k>>(&self, w: &Scope<'k, Group>, s: &A, first: Val<'k, i32>) -> Vec<Val<'k, f32>> {
        self.values(w, s, first).into_iter().map(Word::float).collect()
    }

    /// Its value for the raw score of the thread's `row`-th row at one column.
    pub fn one(&self, w: &Scope<'k, Group>, raw: Val<'k, f32>, row: usize, column: Val<'k, i32>) -> Val<'k, f32> {
        let (parameters, running, key) = (self.parameters, &self.running, Some(column));
        let mut evaluation =
            Evaluation { w, running, parameters, place: None, key, quick: None, known: HashMap::new() };
        let last = running.analysed.program.steps().len() - 1;
        evaluation.step(last, At { row, col: 0, score: Some([raw, self.scale]) }).float()
    }

    /// The same for indices.
    pub fn ints<A: RowView<'k>>(&self, w: &Scope<'k, Group>, s: &A, first: Val<'k, i32>) -> Vec<Val<'k, i32>> {
        self.values(w, s, first).into_iter().map(Word::int).collect()
    }

    /// Whether it is the same for all columns, and for all rows, of a thread's tile.
    pub fn stays(&self) -> [bool; 2] {
        let reads = self.running.analysed.reads.last().copied().unwrap_or_default();
        [!reads.moves(), !reads.row && !reads.score]
    }
}

/// Both programs while a piece of the kernel is built.
struct Changer<'a, 'k> {
    score: Option<Evaluation<'a, 'k>>,
    mask: Option<Evaluation<'a, 'k>>,
}

impl<'a, 'k> Changer<'a, 'k> {
    fn new(modify: &'a Modify<'_, 'k>, w: &'a Scope<'k, Group>, key: Val<'k, i32>) -> Self {
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

    /// The score, or the power of two, of an element that the mask may hide.
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
    /// The product of the two factors.
    both: Val<'k, f32>,
    cuts: Val<'k, bool>,
    settle: &'a dyn Fn(&Scope<'k, Group>),
    /// For each row, what is added to its scaled scores, in powers of two and shifted, where that is a line.
    lines: [Option<Option<Line<'k>>>; 2],
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
        // Two multiply-adds where the score is moved along a line, as by ALiBi.
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
