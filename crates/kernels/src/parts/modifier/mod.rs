//! Score and mask modifiers as instructions on the scores of a block.
//!
//! Steps of a program that read neither key nor score are computed once per tile, all others for each element. An integer
//! that grows by a constant from key to key is computed as a base per row plus a constant. So a distance costs one addition
//! per element, and its conversion to a float one instruction per row.

mod bounds;
mod evaluate;
mod modify;

pub(crate) use bounds::{Bounded, RowBounds};
pub use evaluate::Tanh;
pub use modify::{BlockKind, Function, Modify};

use crate::params::{Lens, Params};
use crate::parts::arguments::DeviceAux;
use fulgurite_core::DType;
use fulgurite_core::expr::{AuxSpec, Binary, Program, Step, Type, Unary, Var as Index};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Group, Pointer, Scope, Val, Var, bf16, f16};
use std::collections::HashMap;
use std::f32::consts::LOG2_E;

/// The expressions of a problem, as far as they affect a kernel's text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Modifiers {
    /// The modified score as a function of the scaled one.
    pub score: Option<Program>,
    /// The part of the mask that is not an interval of keys.
    pub mask: Option<Program>,
    /// The kind of the block that a tile lies in (0 hidden, 1 partial, 2 full), for a block mask whose blocks are whole
    /// tiles. The mask then holds in partial blocks only.
    pub block_kind: Option<Program>,
    /// Type and number of axes of each auxiliary tensor.
    pub aux: Vec<(DType, usize)>,
    /// Whether sums of a few lengths may need more bits than the mantissa of a float has.
    pub long: bool,
    /// Whether rows of a tile may belong to different heads.
    pub mixed_heads: bool,
    /// Whether the rows of a tile are keys and the columns queries.
    pub transposed: bool,
}

impl Modifiers {
    /// The modifiers of these programs, for sequences of at most `longest` queries and keys.
    pub fn new(score: Option<&Program>, mask: Option<&Program>, aux: &[AuxSpec], longest: usize) -> Modifiers {
        let aux = aux.iter().map(|spec| (spec.dtype, spec.shape.len())).collect();
        Modifiers {
            score: score.cloned(),
            mask: mask.cloned(),
            block_kind: None,
            aux,
            long: longest > SHORT as usize,
            mixed_heads: false,
            transposed: false,
        }
    }

    /// Whether there is no modifier.
    pub fn is_empty(&self) -> bool {
        self.score.is_none() && !self.hides()
    }

    /// Whether single elements may be hidden.
    pub fn hides(&self) -> bool {
        self.mask.is_some() || self.block_kind.is_some()
    }

    /// Whether a modifier loads from an auxiliary tensor for each score.
    pub fn loads_move(&self) -> bool {
        let moves = |program: &Program| {
            let analysed = Analysed::new(program, false, self);
            let steps = program.steps().iter().zip(&analysed.reads);
            steps.into_iter().any(|(step, reads)| matches!(step, Step::Load(..)) && reads.moves())
        };
        self.score.iter().chain(&self.mask).any(moves)
    }

    /// Whether the modified score may be -inf, which hides its key: by a constant, by a value of a tensor, or by an
    /// operation that makes infinities of finite numbers.
    pub fn hides_by_score(&self) -> bool {
        let hides = |program: &Program| {
            let analysed = Analysed::new(program, false, self);
            let steps = program.steps();
            let float = |i: usize| program.types()[i] == Type::Float;
            steps.iter().enumerate().any(|(i, step)| match step {
                Step::Float(x) => !f32::from_bits(*x).is_finite(),
                Step::Load(..) => float(i) && analysed.reads[i].moves(),
                Step::Unary(Unary::Log | Unary::Exp, _) => true,
                Step::Binary(Binary::Div, _, by) => float(i) && !matches!(steps[*by], Step::Float(_) | Step::Int(_)),
                _ => false,
            })
        };
        self.score.as_ref().is_some_and(hides)
    }

    /// Whether the score depends on the distance of query and key, as with ALiBi.
    pub fn reads_distance(&self) -> bool {
        let distance = |program: &Program| {
            let analysed = Analysed::new(program, false, self);
            let sloped = |x: &usize| analysed.slopes[*x].is_some_and(|slope| slope != 0);
            program.steps().iter().any(|step| matches!(step, Step::Unary(Unary::Abs, x) if sloped(x)))
        };
        self.score.as_ref().is_some_and(distance)
    }

    /// Whether the modifiers and their derivative leave enough registers to a register-hungry kernel. The bounds were
    /// found with the assembler: scores up to softcap with ALiBi, masks up to the document mask.
    pub fn are_light(&self, derivative: Option<&Program>) -> bool {
        let weigh = |program: Option<&Program>| program.map_or(Weight::default(), |program| self.weight(program));
        let (score, slope, mask) = (weigh(self.score.as_ref()), weigh(derivative), weigh(self.mask.as_ref()));
        match (&self.score, &self.mask) {
            // A mask of partial blocks is evaluated where fewer values are live.
            (None, _) if self.block_kind.is_some() => {
                mask.within(Weight { kept: 6, steps: 12, tangents: 0, axes: 2, heavy: 8 })
            }
            (None, _) => mask.within(Weight { kept: 3, steps: 3, tangents: 0, axes: 2, heavy: 0 }),
            (Some(_), None) => {
                let most = Weight { kept: 5, steps: 12, tangents: 1, axes: 0, heavy: 0 };
                // The derivative may contain one tanh, or must be short.
                let most_slope = Weight { kept: 1, steps: if slope.tangents == 1 { 7 } else { 4 }, ..most };
                score.within(most) && slope.within(most_slope)
            }
            (Some(_), Some(_)) => false,
        }
    }

    fn weight(&self, program: &Program) -> Weight {
        let analysed = Analysed::new(program, false, self);
        let kept = analysed.kept.iter().map(|&i| if analysed.reads[i].row { 2 } else { 1 }).sum();
        let mut weight = Weight { kept, ..Weight::default() };
        let steps = program.steps();
        for (step, _) in steps.iter().zip(&analysed.reads).filter(|(_, reads)| reads.moves()) {
            weight.steps += 1;
            match step {
                Step::Load(_, at) => weight.axes = weight.axes.max(at.len()),
                Step::Unary(Unary::Tanh, _) => weight.tangents += 1,
                Step::Var(_) | Step::Float(_) | Step::Int(_) | Step::Bool(_) => {}
                Step::Unary(Unary::Neg | Unary::Abs | Unary::ToFloat, _) => {}
                Step::Binary(Binary::Add | Binary::Sub | Binary::Mul | Binary::Eq, ..) => {}
                Step::Binary(Binary::Div, _, by) if matches!(steps[*by], Step::Float(_)) => {}
                _ => weight.heavy += 1,
            }
        }
        weight
    }

    /// Factors of the scores before and after the modifier, besides the scale and log2(e). A constant factor at either
    /// end of the program is folded into these, which saves an instruction per element.
    pub fn factors(&self) -> [f32; 2] {
        let Some(score) = &self.score else { return [1.0; 2] };
        let folded = Folded::of(score);
        [folded.input.map_or(1.0, |(_, x)| x), folded.output.map_or(1.0, |(_, x)| x)]
    }
}

/// Resources per thread that a program needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Weight {
    /// Registers that hold values over a tile.
    kept: usize,
    /// Steps per score.
    steps: usize,
    /// tanh steps among them.
    tangents: usize,
    /// Steps that take more than two instructions.
    heavy: usize,
    /// Number of axes of the largest tensor that is loaded for each score.
    axes: usize,
}

impl Weight {
    fn within(self, most: Weight) -> bool {
        let fits = [self.kept <= most.kept, self.steps <= most.steps, self.tangents <= most.tangents];
        fits.iter().all(|fits| *fits) && self.heavy <= most.heavy && self.axes <= most.axes
    }
}

/// Eight numbers up to this one sum to less than 2^24, which is exact in a float.
const SHORT: u32 = 1 << 20;

/// Constant factors at both ends of a score program.
struct Folded {
    /// The step that multiplies the score, and its factor.
    input: Option<(usize, f32)>,
    /// The step that the last step multiplies, and its factor.
    output: Option<(usize, f32)>,
}

impl Folded {
    fn of(program: &Program) -> Folded {
        let steps = program.steps();
        let constant = |i: usize| match steps[i] {
            Step::Float(bits) => Some(f32::from_bits(bits)),
            _ => None,
        };
        // The other operand of a product, and the constant factor.
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

/// Inputs that a step reads, directly or through other steps.
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

/// A program with the properties of its steps that are known before building.
struct Analysed {
    program: Program,
    reads: Vec<Reads>,
    /// Constant by which an integer grows from one key to the next, if there is one.
    slopes: Vec<Option<i32>>,
    /// Steps that are constant over a tile and that varying steps (or the result) need.
    kept: Vec<usize>,
    folded: Folded,
    long: bool,
    /// The index that varies along the columns.
    moving: Index,
}

impl Analysed {
    fn new(program: &Program, fold: bool, modifiers: &Modifiers) -> Analysed {
        let steps = program.steps();
        let (moving, staying) =
            if modifiers.transposed { (Index::Query, Index::Key) } else { (Index::Key, Index::Query) };
        let mut reads: Vec<Reads> = Vec::new();
        let mut slopes: Vec<Option<i32>> = Vec::new();
        for (i, step) in steps.iter().enumerate() {
            let own = match step {
                Step::Var(Index::Score) => Reads { score: true, ..Reads::default() },
                Step::Var(index) if *index == moving => Reads { key: true, ..Reads::default() },
                Step::Var(index) if *index == staying => Reads { row: true, ..Reads::default() },
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
                Step::Var(index) if *index == moving => Some(1),
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
        let long = modifiers.long;
        Analysed { program: program.clone(), reads, slopes, kept, folded, long, moving }
    }
}

/// A typed value of a program.
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

/// An array of elements of some type among a kernel's parameters.
#[derive(Clone, Copy)]
enum Array<'k> {
    F32(Pointer<'k, f32>),
    F16(Pointer<'k, f16>),
    Bf16(Pointer<'k, bf16>),
    I32(Pointer<'k, i32>),
}

impl<'k> Array<'k> {
    /// Declares the parameter with its argument.
    fn declare<C: 'static>(
        p: &Params<'k, C>,
        name: &str,
        dtype: DType,
        span: impl Fn(&C) -> Span + Send + Sync + 'static,
    ) -> Self {
        match dtype {
            DType::F16 => Array::F16(p.array(name, span)),
            DType::Bf16 => Array::Bf16(p.array(name, span)),
            DType::I32 => Array::I32(p.array(name, span)),
            _ => Array::F32(p.array(name, span)),
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

/// One sink logit per head among a kernel's parameters, in any float type.
#[derive(Clone, Copy)]
pub struct Sinks<'k>(Array<'k>);

impl<'k> Sinks<'k> {
    /// Declares the parameter with its argument.
    pub fn declare<C: 'static>(p: &Params<'k, C>, dtype: DType, at: impl Lens<C, Span>) -> Self {
        Sinks(Array::declare(p, "sinks", dtype, move |call| *at(call)))
    }
    /// The sink of a head, scaled to powers of two.
    pub fn of_head(self, w: &Scope<'k, Group>, head: Val<'k, u32>) -> Val<'k, f32> {
        self.0.load(w, head.to_u64()).float() * LOG2_E
    }
}

/// An auxiliary tensor among the parameters: its elements, and for each axis the last index and the stride in elements.
struct Aux<'k> {
    array: Array<'k>,
    axes: Vec<[Val<'k, u32>; 2]>,
}

/// Position of a tile.
#[derive(Clone)]
pub struct TilePosition<'k> {
    pub batch: Val<'k, u32>,
    /// Heads of the thread's rows; `rows`: their queries in the sequence, or keys if rows are keys.
    pub heads: Vec<Val<'k, u32>>,
    pub rows: Vec<Val<'k, i32>>,
    pub q_len: Val<'k, i32>,
    pub k_len: Val<'k, i32>,
}

/// The parameters that modifiers read, declared before any role.
pub struct Parameters<'k> {
    aux: Vec<Aux<'k>>,
}

impl<'k> Parameters<'k> {
    /// Declares the parameters with their arguments: the auxiliary tensors of a call in the order of the modifiers.
    pub fn declare<C: 'static>(p: &Params<'k, C>, modifiers: &Modifiers, args: impl Lens<C, Vec<AuxArgs>>) -> Self {
        let aux = modifiers.aux.iter().enumerate().map(|(i, &(dtype, rank))| {
            let array = Array::declare(p, &format!("aux{i}"), dtype, move |call| args(call)[i].span);
            let axis = |axis: usize| {
                [("last", 0), ("stride", 1)].map(|(what, side)| {
                    p.u32(&format!("aux{i}_{what}{axis}"), move |call| args(call)[i].axes[axis][side])
                })
            };
            Aux { array, axes: (0..rank).map(axis).collect() }
        });
        Parameters { aux: aux.collect() }
    }
}

/// Launch arguments of an auxiliary tensor: its memory, and for each axis the last index and the stride in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuxArgs {
    pub span: Span,
    pub axes: Vec<[u32; 2]>,
}

impl AuxArgs {
    /// The arguments of a tensor of this shape.
    pub fn new(aux: &DeviceAux, shape: &[usize]) -> AuxArgs {
        let axis = |(&stride, &n): (&u64, &usize)| [(n as u64).saturating_sub(1) as u32, stride as u32];
        AuxArgs { span: aux.span, axes: aux.strides.iter().zip(shape).map(axis).collect() }
    }
}

/// A program in a role. Values that are constant over a tile stay in registers.
struct Running<'k> {
    analysed: Analysed,
    /// For each kept step, its value in each of the thread's rows, or one value if it does not depend on the row.
    kept: HashMap<usize, Vec<Kept<'k>>>,
}

#[derive(Clone, Copy)]
enum Kept<'k> {
    Float(Var<'k, f32>),
    Int(Var<'k, i32>),
    /// Conditions are kept as numbers, because predicate registers are few.
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
    /// A program for threads that hold elements of `rows` rows.
    fn new(w: &Scope<'k, Group>, program: &Program, fold: bool, modifiers: &Modifiers, rows: usize) -> Self {
        let analysed = Analysed::new(program, fold, modifiers);
        let values = |&i: &usize| {
            let count = if analysed.reads[i].row { rows } else { 1 };
            (i, (0..count).map(|_| Kept::new(w, analysed.program.types()[i])).collect())
        };
        let kept = analysed.kept.iter().map(values).collect();
        Running { analysed, kept }
    }
}
