//! Evaluates the steps of a program on demand, and each of them once.

use crate::parts::modifier::{Index, Parameters, Running, SHORT, TilePosition, Word};
use fulgurite_core::expr::{Binary, Step, Type, Unary};
use fulgurite_ptx::{Group, Number, Scope, Val};
use std::collections::HashMap;
use std::f32::consts::{LN_2, LOG2_E};

/// Position of an element in a key block, and its score.
#[derive(Clone, Copy)]
pub(crate) struct At<'k> {
    pub(crate) row: usize,
    /// Column relative to the thread's first column.
    pub(crate) col: u32,
    /// The raw score, and the factor that scales it.
    pub(crate) score: Option<[Val<'k, f32>; 2]>,
}

/// Values of a program's steps while a section of the kernel is built.
pub(crate) struct Evaluation<'a, 'k> {
    pub(crate) w: &'a Scope<'k, Group>,
    pub(crate) running: &'a Running<'k>,
    pub(crate) parameters: &'a Parameters<'k>,
    /// Position of the tile; `None` if kept values replace it.
    pub(crate) place: Option<&'a TilePosition<'k>>,
    /// Index of the key (or query) in the thread's first column.
    pub(crate) key: Option<Val<'k, i32>>,
    /// State of the fast paths, some of which are wrong for large arguments; `None` if only exact paths are allowed.
    pub(crate) quick: Option<Quick<'k>>,
    /// Values that have been built, by step, row, column and form. Row and column are 0 if the value does not depend on
    /// them.
    pub(crate) known: HashMap<(usize, usize, u32, Form), Word<'k>>,
}

/// Fast paths that are correct for most blocks. Checks along the way find the others, and [`doubt`](Self::doubt)
/// reports them.
#[derive(Clone, Copy)]
pub(crate) struct Quick<'k> {
    pub(crate) tanh: Tanh,
    /// Coefficients and bound of the polynomial for raw scores, if the argument of the tanh is the scaled score.
    pub(crate) of_raw: Option<([Val<'k, f32>; 4], Val<'k, f32>)>,
    /// Largest magnitudes so far: of raw scores, and of other arguments.
    pub(crate) largest: [Option<Val<'k, f32>>; 2],
    /// Whether a distance that was assumed to have one sign changes sign within the block.
    pub(crate) turns: Option<Val<'k, bool>>,
    /// Keys per block.
    pub(crate) cols: u32,
}

/// Approximation of tanh where it need not be exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tanh {
    /// A quarter by the polynomial and the rest by the special-function unit, so that neither the issue slots nor the unit
    /// limit the other. The unit has a relative error of 2^-11; the rounding of probabilities to bf16 is coarser.
    Mixed,
    /// A polynomial, valid up to a bound on the argument.
    Polynomial,
}

impl Tanh {
    /// The approximation for probabilities of this type.
    pub fn of(number: Number) -> Tanh {
        if number == Number::Bf16 { Tanh::Mixed } else { Tanh::Polynomial }
    }

    /// Whether the special-function unit computes the elements of a column, counted from the thread's first. A thread of
    /// `wgmma` or `mma.sync` has two columns of every eight.
    fn by_unit(self, col: u32) -> bool {
        self == Tanh::Mixed && col / 8 % 8 >= 2
    }
}

/// tanh(x) = x (c0 + c1 x^2 + c2 x^4 + c3 x^6), a minimax fit with an error below 4e-6 for |x| up to the bound.
pub(crate) const TANH: [f32; 4] = [0.999_955_6, -0.332_227_5, 0.125_770_37, -0.033_777_617];
pub(crate) const TANH_BOUND: f32 = 0.75;

fn polynomial<'k>(x: Val<'k, f32>, [c0, c1, c2, c3]: [Val<'k, f32>; 4]) -> Val<'k, f32> {
    let z = x * x;
    z.mul_add(c3, c2).mul_add(z, c1).mul_add(z, c0) * x
}

impl<'k> Quick<'k> {
    fn note(&mut self, which: usize, x: Val<'k, f32>) {
        let size = x.abs();
        self.largest[which] = Some(self.largest[which].map_or(size, |most| most.max(size)));
    }

    /// Whether a fast path may be wrong in this block: an argument exceeded its bound, or a distance changed sign.
    pub(crate) fn doubt(&self) -> Option<Val<'k, bool>> {
        let [raw, other] = self.largest;
        let raw = raw.zip(self.of_raw).map(|(most, (_, bound))| most.gt(bound));
        let other = other.map(|most| most.gt(TANH_BOUND));
        [raw, other, self.turns].into_iter().flatten().reduce(|a, b| a | b)
    }
}

/// A float that is linear in the column: a + b col.
#[derive(Clone, Copy)]
pub(crate) struct Line<'k> {
    pub(crate) a: Val<'k, f32>,
    pub(crate) b: Option<Val<'k, f32>>,
}

impl<'k> Line<'k> {
    pub(crate) fn times(self, x: Val<'k, f32>) -> Self {
        Line { a: self.a * x, b: self.b.map(|b| b * x) }
    }
    fn plus(self, other: Line<'k>) -> Self {
        let b = match (self.b, other.b) {
            (Some(x), Some(y)) => Some(x + y),
            (x, y) => x.or(y),
        };
        Line { a: self.a + other.a, b }
    }
    fn negative(self) -> Self {
        Line { a: -self.a, b: self.b.map(|b| -b) }
    }
}

/// The form in which a value is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    /// The value of the step.
    Plain,
    /// An integer that is linear in the key, evaluated at the thread's first column.
    Base,
    /// An integer that is linear in the key, evaluated at the thread's first column and converted to a float.
    FloatBase,
    /// An integer converted to a float.
    Float,
}

impl<'k> Evaluation<'_, 'k> {
    fn literal(&self, i: usize) -> Option<Word<'k>> {
        match self.running.analysed.program.steps()[i] {
            Step::Float(bits) => Some(Word::Float(self.w.constant(f32::from_bits(bits)))),
            Step::Int(x) => Some(Word::Int(self.w.constant(x))),
            Step::Bool(x) => Some(Word::Bool(self.w.constant(x))),
            _ => None,
        }
    }

    fn remember(&mut self, i: usize, at: At<'k>, form: Form, f: impl FnOnce(&mut Self) -> Word<'k>) -> Word<'k> {
        let reads = self.running.analysed.reads[i];
        let moves = reads.moves() && !matches!(form, Form::Base | Form::FloatBase);
        // A value that reads the score depends on its row and column.
        let row = if reads.row || reads.score { at.row } else { 0 };
        let key = (i, row, if moves { at.col } else { 0 }, form);
        if let Some(&word) = self.known.get(&key) {
            return word;
        }
        let word = f(self);
        self.known.insert(key, word);
        word
    }

    /// The value of a step at an element.
    pub(crate) fn step(&mut self, i: usize, at: At<'k>) -> Word<'k> {
        if let Some(word) = self.literal(i) {
            return word;
        }
        let running = self.running;
        if self.place.is_none()
            && let Some(kept) = running.kept.get(&i)
        {
            return self.remember(i, at, Form::Plain, |_| kept[at.row.min(kept.len() - 1)].get());
        }
        self.remember(i, at, Form::Plain, |this| {
            match running.analysed.slopes[i] {
                // Distances cost one addition: a base per row plus a constant.
                Some(slope) if slope != 0 => {
                    let base = this.base(i, at);
                    Word::Int(base + slope.wrapping_mul(at.col as i32))
                }
                _ => this.compute(i, at),
            }
        })
    }

    /// An integer that is linear in the key, evaluated at the thread's first column.
    fn base(&mut self, i: usize, at: At<'k>) -> Val<'k, i32> {
        self.remember(i, at, Form::Base, |this| this.compute(i, At { col: 0, ..at })).int()
    }

    /// An integer converted to a float. A sum of a few short lengths is exact in floats, so it is computed in floats.
    fn as_float(&mut self, i: usize, at: At<'k>) -> Val<'k, f32> {
        let word = self.remember(i, at, Form::Float, |this| {
            let analysed = &this.running.analysed;
            let slope = analysed.slopes[i].filter(|x| *x != 0);
            let step = analysed.program.steps()[i].clone();
            Word::Float(match (slope, step) {
                (Some(slope), _) if this.is_short(i) => {
                    let base = this.remember(i, at, Form::FloatBase, |this| Word::Float(this.base(i, at).to_f32()));
                    let offset = slope.wrapping_mul(at.col as i32);
                    if offset == 0 { base.float() } else { base.float() + offset as f32 }
                }
                (_, Step::Unary(Unary::Abs, a)) if this.is_short(a) => this.as_float(a, at).abs(),
                _ => this.step(i, at).int().to_f32(),
            })
        });
        word.float()
    }

    /// Whether an integer is a sum of at most eight short lengths, indices and constants.
    fn is_short(&self, i: usize) -> bool {
        fn terms(steps: &[Step], i: usize) -> Option<u32> {
            match &steps[i] {
                Step::Var(Index::Score) => None,
                Step::Var(_) => Some(1),
                Step::Int(x) => (x.unsigned_abs() <= SHORT).then_some(1),
                Step::Unary(Unary::Neg, a) => terms(steps, *a),
                Step::Binary(Binary::Add | Binary::Sub, a, b) => Some(terms(steps, *a)? + terms(steps, *b)?),
                _ => None,
            }
        }
        let analysed = &self.running.analysed;
        !analysed.long && terms(analysed.program.steps(), i).is_some_and(|n| n <= 8)
    }

    fn compute(&mut self, i: usize, at: At<'k>) -> Word<'k> {
        let analysed = &self.running.analysed;
        let float = analysed.program.types()[i] == Type::Float;
        match analysed.program.steps()[i].clone() {
            Step::Var(index) => self.variable(index, at),
            Step::Float(_) | Step::Int(_) | Step::Bool(_) => self.step(i, at),
            Step::Unary(op, a) => self.unary(op, a, at, float),
            Step::Binary(..) if analysed.folded.input.is_some_and(|(step, _)| step == i) => {
                // The factor is folded into the score's scale.
                self.variable(Index::Score, at)
            }
            Step::Binary(op, a, b) => {
                let floats = analysed.program.types()[a] == Type::Float;
                match op {
                    Binary::And => Word::Bool(self.step(a, at).bool() & self.step(b, at).bool()),
                    Binary::Or => Word::Bool(self.step(a, at).bool() | self.step(b, at).bool()),
                    _ if floats => self.float_binary(op, a, b, at),
                    _ => {
                        let (x, y) = (self.step(a, at).int(), self.step(b, at).int());
                        int_binary(op, x, y)
                    }
                }
            }
            Step::Select(c, a, b) => {
                let (c, a, b) = (self.step(c, at).bool(), self.step(a, at), self.step(b, at));
                match (a, b) {
                    (Word::Float(a), b) => Word::Float(c.select(a, b.float())),
                    (Word::Int(a), b) => Word::Int(c.select(a, b.int())),
                    (Word::Bool(a), b) => Word::Bool((c & a) | (!c & b.bool())),
                }
            }
            Step::Load(tensor, indices) => {
                let aux = &self.parameters.aux[tensor];
                let mut offset = None;
                for (index, [last, stride]) in indices.into_iter().zip(&aux.axes) {
                    let index = self.step(index, at).int().max(0).to_u32().min(*last);
                    let part = index.mul_wide(*stride);
                    offset = Some(offset.map_or(part, |sum| sum + part));
                }
                let offset = offset.unwrap_or(self.w.constant(0u64));
                aux.array.load(self.w, offset)
            }
        }
    }

    fn variable(&mut self, index: Index, at: At<'k>) -> Word<'k> {
        let place = || self.place.expect("bug in fulgurite: a step that stays was not kept");
        match index {
            Index::Score => {
                let [raw, factor] = at.score.expect("bug in fulgurite: a step that stays reads the score");
                Word::Float(raw * factor)
            }
            index if index == self.running.analysed.moving => {
                let first = self.key.expect("bug in fulgurite: a step that stays reads what moves");
                Word::Int(first + at.col as i32)
            }
            Index::Key | Index::Query => Word::Int(place().rows[at.row]),
            Index::Batch => Word::Int(place().batch.to_i32()),
            Index::Head => Word::Int(place().heads[at.row].to_i32()),
            Index::QueryLen => Word::Int(place().q_len),
            Index::KeyLen => Word::Int(place().k_len),
        }
    }

    fn unary(&mut self, op: Unary, a: usize, at: At<'k>, float: bool) -> Word<'k> {
        if op == Unary::ToFloat {
            return Word::Float(self.as_float(a, at));
        }
        if op == Unary::Tanh
            && let Some(result) = self.quick_tanh(a, at)
        {
            return Word::Float(result);
        }
        let x = self.step(a, at);
        match op {
            Unary::Neg if float => Word::Float(-x.float()),
            Unary::Neg => Word::Int(negative(x.int())),
            Unary::Abs if float => Word::Float(x.float().abs()),
            Unary::Abs => Word::Int(x.int().max(negative(x.int()))),
            Unary::Exp => Word::Float((x.float() * LOG2_E).exp2()),
            Unary::Log => Word::Float(x.float().log2() * LN_2),
            Unary::Sqrt => Word::Float(x.float().sqrt()),
            Unary::Tanh => Word::Float(tanh(x.float())),
            Unary::Not => Word::Bool(!x.bool()),
            Unary::Floor => Word::Int(x.float().floor().to_i32()),
            Unary::ToFloat => unreachable!("answered above"),
        }
    }

    /// A tanh that may be wrong for large arguments; the caller must check `quick.doubt`.
    fn quick_tanh(&mut self, a: usize, at: At<'k>) -> Option<Val<'k, f32>> {
        let mut quick = self.quick?;
        if quick.tanh.by_unit(at.col) {
            return Some(self.step(a, at).float().tanh());
        }
        let analysed = &self.running.analysed;
        let is_score = analysed.program.steps()[a] == Step::Var(Index::Score)
            || analysed.folded.input.is_some_and(|(step, _)| step == a);
        let (x, coefficients) = match (is_score, quick.of_raw, at.score) {
            (true, Some((coefficients, _)), Some([raw, _])) => {
                quick.note(0, raw);
                (raw, coefficients)
            }
            _ => {
                let x = self.step(a, at).float();
                quick.note(1, x);
                (x, TANH.map(|c| self.w.constant(c)))
            }
        };
        self.quick = Some(quick);
        Some(polynomial(x, coefficients))
    }

    /// A float as a linear function of the column along the thread's row, if it is one.
    fn line(&mut self, i: usize, at: At<'k>) -> Option<Line<'k>> {
        let analysed = &self.running.analysed;
        let step = analysed.program.steps()[i].clone();
        if !analysed.reads[i].moves() {
            return Some(Line { a: self.step(i, at).float(), b: None });
        }
        let slope = |i: usize| analysed.slopes[i].filter(|slope| *slope != 0);
        match step {
            Step::Unary(Unary::ToFloat, x) => match analysed.program.steps()[x] {
                Step::Unary(Unary::Abs, y) if self.is_short(y) => {
                    let slope = slope(y)?;
                    let line = self.distance(y, slope, at);
                    let mut quick = self.quick?;
                    // The absolute distance is linear only if its sign is constant along the block; otherwise the block
                    // is recomputed.
                    let end = line.a + slope as f32 * (quick.cols - 1) as f32;
                    let turns = (line.a * end).lt(0.0);
                    quick.turns = Some(quick.turns.map_or(turns, |others| others | turns));
                    self.quick = Some(quick);
                    let sign = (line.a + end).lt(0.0).select::<f32>(-1.0, 1.0);
                    Some(line.times(sign))
                }
                _ if self.is_short(x) => Some(self.distance(x, slope(x)?, at)),
                _ => None,
            },
            Step::Unary(Unary::Neg, x) => Some(self.line(x, at)?.negative()),
            Step::Binary(op @ (Binary::Add | Binary::Sub), x, y) => {
                let (x, y) = (self.line(x, at)?, self.line(y, at)?);
                Some(x.plus(if op == Binary::Sub { y.negative() } else { y }))
            }
            Step::Binary(Binary::Mul, x, y) => {
                let (x, y) = if analysed.reads[x].moves() { (x, y) } else { (y, x) };
                if analysed.reads[y].moves() {
                    return None;
                }
                let factor = self.step(y, at).float();
                Some(self.line(x, at)?.times(factor))
            }
            _ => None,
        }
    }

    /// An integer that is linear in the key, as a line.
    fn distance(&mut self, i: usize, slope: i32, at: At<'k>) -> Line<'k> {
        let a = self.remember(i, at, Form::FloatBase, |this| Word::Float(this.base(i, at).to_f32())).float();
        Line { a, b: Some(self.w.constant(slope as f32)) }
    }

    /// The term that the program adds to the scaled score, if the program does only that and the term is linear.
    pub(crate) fn added_line(&mut self, at: At<'k>) -> Option<Line<'k>> {
        let analysed = &self.running.analysed;
        let steps = analysed.program.steps();
        if analysed.folded.input.is_some() || analysed.folded.output.is_some() || self.quick.is_none() {
            return None;
        }
        let is_score = |i: usize| steps[i] == Step::Var(Index::Score);
        match steps[steps.len() - 1] {
            Step::Binary(Binary::Add, x, y) if is_score(x) => self.line(y, at),
            Step::Binary(Binary::Add, x, y) if is_score(y) => self.line(x, at),
            Step::Binary(Binary::Sub, x, y) if is_score(x) => Some(self.line(y, at)?.negative()),
            _ => None,
        }
    }

    fn float_binary(&mut self, op: Binary, a: usize, b: usize, at: At<'k>) -> Word<'k> {
        let steps = self.running.analysed.program.steps();
        let reciprocal = match steps[b] {
            Step::Float(bits) => Some(f32::from_bits(bits).recip()).filter(|x| x.is_normal()),
            _ => None,
        };
        match (op, reciprocal) {
            (Binary::Div, Some(x)) => return Word::Float(self.step(a, at).float() * x),
            (Binary::Add | Binary::Sub, _) => return Word::Float(self.sum(op, a, b, at)),
            _ => {}
        }
        let (x, y) = (self.step(a, at).float(), self.step(b, at).float());
        // A NaN on either side is kept.
        let pick = |first: Val<'k, bool>| {
            let either: Val<'k, f32> = first.select(x, y);
            Word::Float(x.eq(x).select(either, x))
        };
        match op {
            Binary::Mul => Word::Float(x * y),
            Binary::Div => Word::Float(x / y),
            Binary::Min => pick(x.le(y)),
            Binary::Max => pick(x.ge(y)),
            Binary::Eq => Word::Bool(x.eq(y)),
            Binary::Lt => Word::Bool(x.lt(y)),
            Binary::Le => Word::Bool(x.le(y)),
            Binary::Add | Binary::Sub | Binary::Rem | Binary::And | Binary::Or => {
                unreachable!("bug in fulgurite: a typed program has no {op:?} of floats here")
            }
        }
    }

    /// a + b or a - b, fused with a product on either side.
    fn sum(&mut self, op: Binary, a: usize, b: usize, at: At<'k>) -> Val<'k, f32> {
        let minus = op == Binary::Sub;
        let signed = |x: Val<'k, f32>| if minus { -x } else { x };
        if let Some([x, y]) = self.product(a, at) {
            let b = self.step(b, at).float();
            return x.mul_add(y, signed(b));
        }
        if let Some([x, y]) = self.product(b, at) {
            let a = self.step(a, at).float();
            return signed(x).mul_add(y, a);
        }
        let (a, b) = (self.step(a, at).float(), self.step(b, at).float());
        if minus { a - b } else { a + b }
    }

    /// The factors of a step that varies along the row and is a product, or of the score itself; `None` otherwise.
    fn product(&mut self, i: usize, at: At<'k>) -> Option<[Val<'k, f32>; 2]> {
        let analysed = &self.running.analysed;
        if !analysed.reads[i].moves() || analysed.folded.input.is_some_and(|(step, _)| step == i) {
            return None;
        }
        match analysed.program.steps()[i] {
            Step::Var(Index::Score) => at.score,
            Step::Binary(Binary::Mul, x, y) if analysed.program.types()[i] == Type::Float => {
                Some([self.step(x, at).float(), self.step(y, at).float()])
            }
            _ => None,
        }
    }
}

fn negative(x: Val<'_, i32>) -> Val<'_, i32> {
    x.literal(0) - x
}

/// tanh(x) = 1 - 2 / (e^2x + 1): two operations of the special-function unit with negligible error. The unit's own tanh
/// has a relative error of 2^-11, which is visible in results when scores are in the tens.
fn tanh(x: Val<'_, f32>) -> Val<'_, f32> {
    let e = (x * (2.0 * LOG2_E)).exp2();
    (e + 1.0).recip().mul_add(-2.0, 1.0)
}

pub(crate) fn int_binary<'k>(op: Binary, x: Val<'k, i32>, y: Val<'k, i32>) -> Word<'k> {
    let floor = || {
        let quotient = x / y;
        let rest = x - quotient * y;
        // Integer division truncates. Subtract one if the signs differ and there is a remainder, so that it rounds
        // down.
        let down = rest.ne(0) & (rest ^ y).lt(0);
        let quotient = down.select::<i32>(quotient - 1, quotient);
        y.eq(0).select::<i32>(0, quotient)
    };
    match op {
        Binary::Add => Word::Int(x + y),
        Binary::Sub => Word::Int(x - y),
        Binary::Mul => Word::Int(x * y),
        Binary::Div => Word::Int(floor()),
        Binary::Rem => Word::Int(y.eq(0).select::<i32>(0, x - floor() * y)),
        Binary::Min => Word::Int(x.min(y)),
        Binary::Max => Word::Int(x.max(y)),
        Binary::Eq => Word::Bool(x.eq(y)),
        Binary::Lt => Word::Bool(x.lt(y)),
        Binary::Le => Word::Bool(x.le(y)),
        Binary::And | Binary::Or => unreachable!("bug in fulgurite: a typed program has no {op:?} of integers"),
    }
}

impl<'k> Running<'k> {
    /// Computes the values that are constant over a tile.
    pub(super) fn set(&self, w: &Scope<'k, Group>, parameters: &Parameters<'k>, place: &TilePosition<'k>) {
        let (place, known) = (Some(place), HashMap::new());
        let mut evaluation = Evaluation { w, running: self, parameters, place, key: None, quick: None, known };
        for (&i, vars) in self.analysed.kept.iter().map(|i| (i, &self.kept[i])) {
            for (row, var) in vars.iter().enumerate() {
                let value = evaluation.step(i, At { row, col: 0, score: None });
                var.set(value);
            }
        }
    }
}
