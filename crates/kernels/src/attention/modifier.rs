//! Score and mask modifiers as instructions on the scores of a block.
//!
//! Steps of a program that read neither key nor score are computed once a tile, the others for each element. An integer
//! that moves with the key by a constant is a base for each row plus a number known here, so that distances cost one
//! addition, and their conversion to floats one a row.

use super::softmax::Scores;
use fulgurite_core::DType;
use fulgurite_core::expr::{AuxSpec, Binary, Program, Step, Type, Unary, Var as Index};
use fulgurite_ptx::{Acc, Builder, Group, Number, Pointer, Scope, Val, Var, bf16, f16};
use std::collections::HashMap;
use std::f32::consts::{LN_2, LOG2_E};

/// What of a problem's expressions shapes a kernel.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Modifiers {
    /// The modified score as a function of the scaled one.
    pub score: Option<Program>,
    /// The part of the mask that is not a span.
    pub mask: Option<Program>,
    /// Type and number of axes of each auxiliary tensor.
    pub aux: Vec<(DType, usize)>,
    /// Whether sums of a few lengths may need more bits than a float has.
    pub long: bool,
    /// Whether rows of a tile may be of different heads.
    pub mixed_heads: bool,
}

impl Modifiers {
    /// Those of programs, whose sequences are at most so long.
    pub fn new(score: Option<&Program>, mask: Option<&Program>, aux: &[AuxSpec], longest: usize) -> Modifiers {
        let aux = aux.iter().map(|spec| (spec.dtype, spec.shape.len())).collect();
        Modifiers {
            score: score.cloned(),
            mask: mask.cloned(),
            aux,
            long: longest > SHORT as usize,
            mixed_heads: false,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.score.is_none() && self.mask.is_none()
    }

    /// Whether elements of tensors are read for each score.
    pub fn loads_move(&self) -> bool {
        let moves = |program: &Program| {
            let analysed = Analysed::new(program, false, self);
            let steps = program.steps().iter().zip(&analysed.reads);
            steps.into_iter().any(|(step, reads)| matches!(step, Step::Load(..)) && reads.moves())
        };
        self.score.iter().chain(&self.mask).any(moves)
    }

    /// What the scores of the kernel are multiplied by before and after the modifier, beside the scale and log2(e): a
    /// constant factor on either side of it goes there instead of into an instruction for each element.
    pub fn factors(&self) -> [f32; 2] {
        let Some(score) = &self.score else { return [1.0; 2] };
        let folded = Folded::of(score);
        [folded.input.map_or(1.0, |(_, x)| x), folded.output.map_or(1.0, |(_, x)| x)]
    }
}

/// Eight numbers up to this one add up to less than 2^24, which floats count exactly.
const SHORT: u32 = 1 << 20;

/// Constant factors at both ends of a score program.
struct Folded {
    /// The step that multiplies the score, and by how much.
    input: Option<(usize, f32)>,
    /// The step that the last one multiplies, and by how much.
    output: Option<(usize, f32)>,
}

impl Folded {
    fn of(program: &Program) -> Folded {
        let steps = program.steps();
        let constant = |i: usize| match steps[i] {
            Step::Float(bits) => Some(f32::from_bits(bits)),
            _ => None,
        };
        // The other operand, and the factor.
        let product = |i: usize| match steps[i] {
            Step::Binary(Binary::Mul, a, b) => constant(a).map(|x| (b, x)).or(constant(b).map(|x| (a, x))),
            Step::Binary(Binary::Div, a, b) => constant(b).map(|x| (a, x.recip())),
            _ => None,
        };
        let score = steps.iter().position(|s| *s == Step::Var(Index::Score));
        let mut readers = (0..steps.len()).filter(|&i| operands(&steps[i]).iter().any(|x| Some(*x) == score));
        let input = match (readers.next(), readers.next()) {
            (Some(only), None) => product(only).filter(|(x, _)| Some(*x) == score).map(|(_, x)| (only, x)),
            _ => None,
        };
        let input = input.filter(|(_, x)| x.is_normal());
        let last = steps.len() - 1;
        let output = product(last).filter(|(at, x)| *x > 0.0 && x.is_normal() && program.types()[*at] == Type::Float);
        let output = output.filter(|_| input.is_none_or(|(at, _)| at != last));
        Folded { input, output }
    }
}

fn operands(step: &Step) -> Vec<usize> {
    match step {
        Step::Var(_) | Step::Float(_) | Step::Int(_) | Step::Bool(_) => vec![],
        Step::Unary(_, a) => vec![*a],
        Step::Binary(_, a, b) => vec![*a, *b],
        Step::Select(c, a, b) => vec![*c, *a, *b],
        Step::Load(_, at) => at.clone(),
    }
}

/// What a step reads, directly or not.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Reads {
    row: bool,
    key: bool,
    score: bool,
}

impl Reads {
    fn moves(self) -> bool {
        self.key || self.score
    }
    fn or(self, other: Reads) -> Reads {
        Reads { row: self.row | other.row, key: self.key | other.key, score: self.score | other.score }
    }
}

/// A program with what is known of its steps before anything is built.
struct Analysed {
    program: Program,
    reads: Vec<Reads>,
    /// By how much an integer grows from one key to the next, where that is a constant.
    slopes: Vec<Option<i32>>,
    /// Steps that stay and that moving ones (or the result) need.
    kept: Vec<usize>,
    folded: Folded,
    long: bool,
}

impl Analysed {
    fn new(program: &Program, fold: bool, modifiers: &Modifiers) -> Analysed {
        let steps = program.steps();
        let mut reads: Vec<Reads> = Vec::new();
        let mut slopes: Vec<Option<i32>> = Vec::new();
        for (i, step) in steps.iter().enumerate() {
            let own = match step {
                Step::Var(Index::Score) => Reads { score: true, ..Reads::default() },
                Step::Var(Index::Key) => Reads { key: true, ..Reads::default() },
                Step::Var(Index::Query) => Reads { row: true, ..Reads::default() },
                Step::Var(Index::Head) => Reads { row: modifiers.mixed_heads, ..Reads::default() },
                other => operands(other).into_iter().fold(Reads::default(), |all, x| all.or(reads[x])),
            };
            let integer = program.types()[i] == Type::Int;
            let pair = |a: usize, b: usize| slopes[a].zip(slopes[b]);
            let constant = |i: usize| match steps[i] {
                Step::Int(x) => Some(x),
                _ => None,
            };
            slopes.push(match step {
                _ if !integer => None,
                Step::Var(Index::Key) => Some(1),
                _ if !own.moves() => Some(0),
                Step::Unary(Unary::Neg, a) => slopes[*a].map(|x: i32| x.wrapping_neg()),
                Step::Binary(Binary::Add, a, b) => pair(*a, *b).map(|(x, y)| x.wrapping_add(y)),
                Step::Binary(Binary::Sub, a, b) => pair(*a, *b).map(|(x, y)| x.wrapping_sub(y)),
                Step::Binary(Binary::Mul, a, b) => match (constant(*a), constant(*b)) {
                    (Some(x), _) => slopes[*b].map(|y| x.wrapping_mul(y)),
                    (_, Some(y)) => slopes[*a].map(|x| x.wrapping_mul(y)),
                    _ => None,
                },
                _ => None,
            });
            reads.push(own);
        }
        let folded = if fold { Folded::of(program) } else { Folded { input: None, output: None } };
        let literal = |i: usize| matches!(steps[i], Step::Float(_) | Step::Int(_) | Step::Bool(_));
        let stays = |i: usize| !reads[i].moves() && !literal(i);
        let mut kept: Vec<usize> =
            (0..steps.len()).filter(|&i| reads[i].moves()).flat_map(|i| operands(&steps[i])).collect();
        kept.push(steps.len() - 1);
        kept.retain(|&i| stays(i));
        kept.sort_unstable();
        kept.dedup();
        Analysed { program: program.clone(), reads, slopes, kept, folded, long: modifiers.long }
    }
}

/// A value of a program.
#[derive(Clone, Copy)]
enum Word<'k> {
    Float(Val<'k, f32>),
    Int(Val<'k, i32>),
    Bool(Val<'k, bool>),
}

impl<'k> Word<'k> {
    fn float(self) -> Val<'k, f32> {
        match self {
            Word::Float(x) => x,
            _ => panic!("bug in fulgurite: a typed program has a float here"),
        }
    }
    fn int(self) -> Val<'k, i32> {
        match self {
            Word::Int(x) => x,
            _ => panic!("bug in fulgurite: a typed program has an integer here"),
        }
    }
    fn bool(self) -> Val<'k, bool> {
        match self {
            Word::Bool(x) => x,
            _ => panic!("bug in fulgurite: a typed program has a condition here"),
        }
    }
}

/// An array of a tensor's elements among a kernel's parameters.
#[derive(Clone, Copy)]
enum Array<'k> {
    F32(Pointer<'k, f32>),
    F16(Pointer<'k, f16>),
    Bf16(Pointer<'k, bf16>),
    I32(Pointer<'k, i32>),
}

impl<'k> Array<'k> {
    fn new(k: &'k Builder, name: &str, dtype: DType) -> Self {
        match dtype {
            DType::F16 => Array::F16(k.array(name)),
            DType::Bf16 => Array::Bf16(k.array(name)),
            DType::I32 => Array::I32(k.array(name)),
            _ => Array::F32(k.array(name)),
        }
    }
    fn load<W: fulgurite_ptx::Who>(self, w: &Scope<'k, W>, at: Val<'k, u64>) -> Word<'k> {
        match self {
            Array::F32(array) => Word::Float(array.at_wide(at).load(w, 0)),
            Array::F16(array) => Word::Float(array.at_wide(at).load(w, 0).widen()),
            Array::Bf16(array) => Word::Float(array.at_wide(at).load(w, 0).widen()),
            Array::I32(array) => Word::Int(array.at_wide(at).load(w, 0)),
        }
    }
}

/// A logit for each head among a kernel's parameters, in any float type.
#[derive(Clone, Copy)]
pub struct Sinks<'k>(Array<'k>);

impl<'k> Sinks<'k> {
    pub fn new(k: &'k Builder, dtype: DType) -> Self {
        Sinks(Array::new(k, "sinks", dtype))
    }
    /// The sink of a head, in powers of two.
    pub fn of_head(self, w: &Scope<'k, Group>, head: Val<'k, u32>) -> Val<'k, f32> {
        self.0.load(w, head.to_u64()).float() * LOG2_E
    }
}

/// An auxiliary tensor among the parameters: its elements, and for each axis the last index and the stride in elements.
struct Aux<'k> {
    array: Array<'k>,
    axes: Vec<[Val<'k, u32>; 2]>,
}

/// Where a tile stands.
#[derive(Clone, Copy)]
pub struct Place<'k> {
    pub batch: Val<'k, u32>,
    /// Of the thread's two rows, and their queries in the sequence.
    pub heads: [Val<'k, u32>; 2],
    pub rows: [Val<'k, i32>; 2],
    pub q_len: Val<'k, i32>,
    pub k_len: Val<'k, i32>,
}

/// The parameters that modifiers read, declared before any role.
pub struct Parameters<'k> {
    aux: Vec<Aux<'k>>,
}

impl<'k> Parameters<'k> {
    pub fn new(k: &'k Builder, modifiers: &Modifiers) -> Self {
        let aux = modifiers.aux.iter().enumerate().map(|(i, &(dtype, rank))| {
            let array = Array::new(k, &format!("aux{i}"), dtype);
            let axis = |axis| ["last", "stride"].map(|what| k.param::<u32>(&format!("aux{i}_{what}{axis}")));
            Aux { array, axes: (0..rank).map(axis).collect() }
        });
        Parameters { aux: aux.collect() }
    }
}

/// A program in a role: what stays over a tile is kept in registers.
struct Running<'k> {
    analysed: Analysed,
    /// For each kept step its value in the thread's two rows; the same register where the row does not matter.
    kept: HashMap<usize, [Kept<'k>; 2]>,
}

#[derive(Clone, Copy)]
enum Kept<'k> {
    Float(Var<'k, f32>),
    Int(Var<'k, i32>),
    /// Conditions are kept as numbers: predicate registers are few.
    Bool(Var<'k, u32>),
}

impl<'k> Kept<'k> {
    fn new(w: &Scope<'k, Group>, ty: Type) -> Self {
        match ty {
            Type::Float => Kept::Float(w.var(0.0f32)),
            Type::Int => Kept::Int(w.var(0i32)),
            Type::Bool => Kept::Bool(w.var(0u32)),
        }
    }
    fn set(self, word: Word<'k>) {
        match (self, word) {
            (Kept::Float(var), word) => var.set(word.float()),
            (Kept::Int(var), word) => var.set(word.int()),
            (Kept::Bool(var), word) => var.set(word.bool().select::<u32>(1, 0)),
        }
    }
    fn get(self) -> Word<'k> {
        match self {
            Kept::Float(var) => Word::Float(var.get()),
            Kept::Int(var) => Word::Int(var.get()),
            Kept::Bool(var) => Word::Bool(var.get().ne(0)),
        }
    }
}

impl<'k> Running<'k> {
    fn new(w: &Scope<'k, Group>, program: &Program, fold: bool, modifiers: &Modifiers) -> Self {
        let analysed = Analysed::new(program, fold, modifiers);
        let two = |&i: &usize| {
            let ty = analysed.program.types()[i];
            let first = Kept::new(w, ty);
            (i, [first, if analysed.reads[i].row { Kept::new(w, ty) } else { first }])
        };
        let kept = analysed.kept.iter().map(two).collect();
        Running { analysed, kept }
    }

    /// Computes what stays over a tile.
    fn set(&self, w: &Scope<'k, Group>, parameters: &Parameters<'k>, place: Place<'k>) {
        let (place, known) = (Some(place), HashMap::new());
        let mut evaluation = Evaluation { w, running: self, parameters, place, key: None, quick: None, known };
        for (&i, vars) in self.analysed.kept.iter().map(|i| (i, &self.kept[i])) {
            let rows = if self.analysed.reads[i].row { 2 } else { 1 };
            for (row, var) in vars.iter().enumerate().take(rows) {
                let value = evaluation.step(i, At { row, col: 0, score: None });
                var.set(value);
            }
        }
    }
}

/// An element of a block.
#[derive(Clone, Copy)]
struct At<'k> {
    row: usize,
    /// Beside the thread's first column.
    col: u32,
    /// The raw score, and what it is to be multiplied by.
    score: Option<[Val<'k, f32>; 2]>,
}

/// Values of a program's steps while a piece of the kernel is built.
struct Evaluation<'a, 'k> {
    w: &'a Scope<'k, Group>,
    running: &'a Running<'k>,
    parameters: &'a Parameters<'k>,
    /// Where the tile stands; absent where kept values stand for it.
    place: Option<Place<'k>>,
    /// The key of the thread's first column.
    key: Option<Val<'k, i32>>,
    /// Where a tangent may be wrong for large arguments: their largest magnitude so far, in units of the bound.
    quick: Option<Quick<'k>>,
    /// Steps by number, row and column, each as far as it matters.
    known: HashMap<(usize, usize, u32, Form), Word<'k>>,
}

/// Ways that are quick and hold for most blocks: whether they did is seen on the way, and told at the end.
#[derive(Clone, Copy)]
struct Quick<'k> {
    tanh: Tanh,
    /// The polynomial's coefficients and its bound for scores as the product gave them, where the argument is the scaled
    /// score.
    of_raw: Option<([Val<'k, f32>; 4], Val<'k, f32>)>,
    /// Largest magnitudes so far: of raw scores, and of other arguments.
    largest: [Option<Val<'k, f32>>; 2],
    /// Whether a distance that was taken for one of its signs has both.
    turns: Option<Val<'k, bool>>,
    /// Keys of a block.
    cols: u32,
}

/// How the tangent is computed where it need not be exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tanh {
    /// By the special-function unit, with an error of 2^-11 of the value: what bf16 makes of probabilities is more.
    Unit,
    /// As a polynomial, up to a bound.
    Polynomial,
}

impl Tanh {
    /// For probabilities of this type.
    pub fn of(number: Number) -> Tanh {
        if number == Number::Bf16 { Tanh::Unit } else { Tanh::Polynomial }
    }
}

/// tanh(x) = x (c0 + c1 x^2 + c2 x^4 + c3 x^6) with an error below 4e-6 for |x| up to the bound: a least-maximum fit.
const TANH: [f32; 4] = [0.999_955_6, -0.332_227_5, 0.125_770_37, -0.033_777_617];
const TANH_BOUND: f32 = 0.75;

fn polynomial<'k>(x: Val<'k, f32>, [c0, c1, c2, c3]: [Val<'k, f32>; 4]) -> Val<'k, f32> {
    let z = x * x;
    z.mul_add(c3, c2).mul_add(z, c1).mul_add(z, c0) * x
}

impl<'k> Quick<'k> {
    fn note(&mut self, which: usize, x: Val<'k, f32>) {
        let size = x.abs();
        self.largest[which] = Some(self.largest[which].map_or(size, |most| most.max(size)));
    }

    /// Whether an argument was beyond the bound.
    fn doubt(&self) -> Option<Val<'k, bool>> {
        let [raw, other] = self.largest;
        let raw = raw.zip(self.of_raw).map(|(most, (_, bound))| most.gt(bound));
        let other = other.map(|most| most.gt(TANH_BOUND));
        [raw, other, self.turns].into_iter().flatten().reduce(|a, b| a | b)
    }
}

/// A float that grows with the column by a constant: a + b col.
#[derive(Clone, Copy)]
struct Line<'k> {
    a: Val<'k, f32>,
    b: Option<Val<'k, f32>>,
}

impl<'k> Line<'k> {
    fn times(self, x: Val<'k, f32>) -> Self {
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

/// How a value is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Form {
    /// As it is.
    Plain,
    /// An integer that moves with the key, at the thread's first column.
    Base,
    /// The same as a float.
    FloatBase,
    /// An integer as a float.
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
        // A value that reads the score reads its row and column.
        let row = if reads.row || reads.score { at.row } else { 0 };
        let key = (i, row, if moves { at.col } else { 0 }, form);
        if let Some(&word) = self.known.get(&key) {
            return word;
        }
        let word = f(self);
        self.known.insert(key, word);
        word
    }

    /// The value of a step.
    fn step(&mut self, i: usize, at: At<'k>) -> Word<'k> {
        if let Some(word) = self.literal(i) {
            return word;
        }
        let running = self.running;
        if self.place.is_none()
            && let Some(kept) = running.kept.get(&i)
        {
            return self.remember(i, at, Form::Plain, |_| kept[at.row].get());
        }
        self.remember(i, at, Form::Plain, |this| {
            match running.analysed.slopes[i] {
                // Distances: a base for each row, and a constant.
                Some(slope) if slope != 0 => {
                    let base = this.base(i, at);
                    Word::Int(base + slope.wrapping_mul(at.col as i32))
                }
                _ => this.compute(i, at),
            }
        })
    }

    /// An integer that moves with the key by a constant, at the thread's first column.
    fn base(&mut self, i: usize, at: At<'k>) -> Val<'k, i32> {
        self.remember(i, at, Form::Base, |this| this.compute(i, At { col: 0, ..at })).int()
    }

    /// An integer as a float; a sum of a few short lengths is as exact in floats.
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
                // The factor stands in the score's own.
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
            Index::Key => {
                let first = self.key.expect("bug in fulgurite: a step that stays reads the key");
                Word::Int(first + at.col as i32)
            }
            Index::Query => Word::Int(place().rows[at.row]),
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

    /// The tangent where it may be wrong for large arguments.
    fn quick_tanh(&mut self, a: usize, at: At<'k>) -> Option<Val<'k, f32>> {
        let mut quick = self.quick?;
        if quick.tanh == Tanh::Unit {
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

    /// A float as a line along the thread's row, where it is one.
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
                    // The distance has one sign along the block, or the block is done again.
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

    /// An integer that moves with the key, as a line.
    fn distance(&mut self, i: usize, slope: i32, at: At<'k>) -> Line<'k> {
        let a = self.remember(i, at, Form::FloatBase, |this| Word::Float(this.base(i, at).to_f32())).float();
        Line { a, b: Some(self.w.constant(slope as f32)) }
    }

    /// What is added to the scaled score, where the program does just that and it is a line.
    fn added_line(&mut self, at: At<'k>) -> Option<Line<'k>> {
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
        // NaN on either side stays.
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

    /// a + b or a - b; a product on either side goes into one instruction with it.
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

    /// The factors of a step that moves, is a product and is read here alone as far as that matters.
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

/// tanh(x) = 1 - 2 / (e^2x + 1): two operations of the special-function unit and no error worth the name. The unit's own
/// tangent is wrong by 2^-11 of its value, which a score in the tens shows in the result.
fn tanh(x: Val<'_, f32>) -> Val<'_, f32> {
    let e = (x * (2.0 * LOG2_E)).exp2();
    (e + 1.0).recip().mul_add(-2.0, 1.0)
}

fn int_binary<'k>(op: Binary, x: Val<'k, i32>, y: Val<'k, i32>) -> Word<'k> {
    let floor = || {
        let quotient = x / y;
        let rest = x - quotient * y;
        // Cut towards zero; one less where the signs differ and something is left.
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
        let score = modifiers.score.as_ref().map(|program| Running::new(w, program, true, modifiers));
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
    pub fn apply(&self, w: &Scope<'k, Group>, s: &Acc<'k>, key: Val<'k, i32>, full: Option<Val<'k, bool>>) {
        if self.score.is_none() && self.mask.is_none() {
            return;
        }
        let mut changer = Changer::new(self, w, key + w.first_col().to_i32());
        for (i, x) in s.elements().enumerate() {
            let at = At { row: Acc::row_of(i), col: Acc::col_of(i), score: Some([x, self.scale]) };
            s.set(i, changer.change(at, x, full));
        }
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
    fn exponent(&mut self, i: usize, raw: Val<'k, f32>, shift: Val<'k, f32>) -> Val<'k, f32> {
        let at = At { row: Acc::row_of(i), col: Acc::col_of(i), score: Some([raw, self.factor]) };
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
