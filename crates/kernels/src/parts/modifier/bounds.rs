//! Bounds of a mask over a block of scores, as instructions: the interval arithmetic of
//! [`fulgurite_core::expr::Program::bounds`] on the values of a kernel.
//!
//! Steps that read tensors at positions of one side (queries or keys) are not bounded by arithmetic: another kernel
//! evaluates them for each row or key of a block ([`Bounded::extremes`]), and their smallest and largest values are read
//! here. Steps that read no position are evaluated as they are.
//!
//! Bounds may be too wide, never too narrow. Floats are widened after each operation, because single elements are
//! computed with other roundings.

use crate::parts::modifier::evaluate::{At, Evaluation, int_binary};
use crate::parts::modifier::{Analysed, Index, Modifiers, Parameters, Running, TilePosition, Word, operands};
use fulgurite_core::expr::{Binary, Program, Step, Type, Unary};
use fulgurite_ptx::{Group, Pointer, Scope, Val};
use std::collections::HashMap;

/// Integers below this magnitude are far enough from the limits of an i32 for one operation.
const SAFE: f32 = (1 << 30) as f32;
/// Integers up to this magnitude are exact as floats.
const EXACT: f32 = (1 << 24) as f32;
/// Relative width that an operation on floats adds to its bounds: 16 times its rounding.
const WIDER: f32 = 1.0 / (1 << 20) as f32;

/// The positions that a step reads, directly or through other steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Positions {
    query: bool,
    key: bool,
    /// Whether a tensor is read at an index that depends on them.
    loads: bool,
    /// Whether positions are read through quotients only, so that the step has few values in a block.
    coarse: bool,
}

impl Positions {
    fn none() -> Positions {
        Positions { coarse: true, ..Positions::default() }
    }

    fn any(self) -> bool {
        self.query | self.key
    }

    fn or(self, other: Positions) -> Positions {
        Positions {
            query: self.query | other.query,
            key: self.key | other.key,
            loads: self.loads | other.loads,
            coarse: self.coarse & other.coarse,
        }
    }

    /// The side whose rows decide the step through a tensor: 0 for queries, 1 for keys.
    fn scanned_side(self) -> Option<usize> {
        match self {
            Positions { query: true, key: false, loads: true, .. } => Some(0),
            Positions { query: false, key: true, loads: true, .. } => Some(1),
            _ => None,
        }
    }
}

/// A mask program whose bounds over a block decide whether the block is hidden.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Bounded {
    program: Program,
    positions: Vec<Positions>,
    /// For queries and for keys: the steps whose smallest and largest value in each block another kernel finds.
    scanned: [Vec<usize>; 2],
}

impl Bounded {
    /// `None` for a program whose bounds say nothing: one that reads no position, or reads tensors by query and key at
    /// once for every element.
    pub fn new(program: &Program) -> Option<Bounded> {
        let positions = positions(program);
        let root = program.steps().len() - 1;
        let mut bounded = Bounded { program: program.clone(), positions, scanned: Default::default() };
        bounded.scan(root, &mut vec![false; root + 1]);
        (bounded.positions[root].any() && bounded.decides(root)).then_some(bounded)
    }

    /// Collects the largest steps that read tensors at positions of one side.
    fn scan(&mut self, i: usize, visited: &mut [bool]) {
        if std::mem::replace(&mut visited[i], true) {
            return;
        }
        match self.positions[i].scanned_side() {
            Some(side) => self.scanned[side].push(i),
            None if self.positions[i].any() => {
                operands(&self.program.steps()[i]).into_iter().for_each(|x| self.scan(x, visited));
            }
            None => {}
        }
    }

    /// Whether the bounds of a step can be narrower than its type.
    fn decides(&self, i: usize) -> bool {
        if !self.positions[i].any() || self.positions[i].scanned_side().is_some() {
            return true;
        }
        let all = |of: &[usize]| of.iter().all(|&x| self.decides(x));
        match &self.program.steps()[i] {
            Step::Var(index) => *index != Index::Score,
            Step::Float(_) | Step::Int(_) | Step::Bool(_) => true,
            Step::Unary(Unary::Exp | Unary::Log | Unary::Sqrt | Unary::Tanh, _) => false,
            Step::Unary(_, a) => self.decides(*a),
            Step::Binary(Binary::And | Binary::Or, a, b) => self.decides(*a) || self.decides(*b),
            Step::Binary(Binary::Rem, a, b) => self.positions[*a].coarse && all(&[*a, *b]),
            Step::Binary(_, a, b) => all(&[*a, *b]),
            Step::Select(c, a, b) => all(&[*c, *a, *b]),
            Step::Load(_, at) => at.iter().all(|&x| self.positions[x].coarse) && all(at),
        }
    }

    /// The program.
    #[cfg(test)]
    pub fn program_for_tests(&self) -> Program {
        self.program.clone()
    }

    /// Whether the program reads this index.
    pub fn reads(&self, index: Index) -> bool {
        self.program.steps().contains(&Step::Var(index))
    }

    /// Steps that another kernel bounds: of queries, of keys.
    pub fn scanned(&self) -> [usize; 2] {
        [0, 1].map(|side| self.scanned[side].len())
    }

    fn running<'k>(&self, modifiers: &Modifiers) -> Running<'k> {
        Running { analysed: Analysed::new(&self.program, false, modifiers), kept: HashMap::new() }
    }

    /// The smallest and the largest value of each scanned step of a side over all lanes of a warp and all `rows` of a
    /// lane, as bits. Conditions are 0 and 1.
    pub fn extremes<'k>(
        &self,
        w: &Scope<'k, Group>,
        (side, rows): (usize, &[Val<'k, i32>]),
        (modifiers, parameters, place): (&Modifiers, &Parameters<'k>, &TilePosition<'k>),
    ) -> Vec<[Val<'k, u32>; 2]> {
        let running = self.running(modifiers);
        let mut values: Vec<Vec<Word<'k>>> = vec![Vec::new(); self.scanned[side].len()];
        for &row in rows {
            // The position of the other side is not read.
            let place = TilePosition { rows: vec![row], ..place.clone() };
            let mut evaluation = Evaluation {
                w,
                running: &running,
                parameters,
                place: Some(&place),
                key: Some(row),
                quick: None,
                known: HashMap::new(),
            };
            for (values, &step) in values.iter_mut().zip(&self.scanned[side]) {
                values.push(evaluation.step(step, At { row: 0, col: 0, score: None }));
            }
        }
        values.into_iter().map(|values| extremes(w, &values)).collect()
    }
}

/// The smallest and the largest of a step's values over a warp. A NaN among floats gives the whole line.
fn extremes<'k>(w: &Scope<'k, Group>, values: &[Word<'k>]) -> [Val<'k, u32>; 2] {
    let fold = |f: &dyn Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>| {
        let all = values.iter().map(|word| word.float()).reduce(f).expect("bug in fulgurite: a block without rows");
        w.reduce(all, 32, f)
    };
    match values[0] {
        Word::Float(_) => {
            let is_nan = values.iter().map(|word| word.float()).map(|x| x.ne(x)).reduce(|a, b| a | b);
            let is_nan = w.any(is_nan.expect("bug in fulgurite: a block without rows"));
            let (low, high) = (fold(&|a, b| a.min(b)), fold(&|a, b| a.max(b)));
            let low: Val<'k, f32> = is_nan.select(f32::NEG_INFINITY, low);
            let high: Val<'k, f32> = is_nan.select(f32::INFINITY, high);
            [low.to_bits(), high.to_bits()]
        }
        _ => {
            let ints = values.iter().map(|&word| match word {
                Word::Bool(x) => x.select::<i32>(1, 0),
                word => word.int(),
            });
            let low = ints.clone().reduce(|a, b| a.min(b)).expect("bug in fulgurite: a block without rows");
            let high = ints.reduce(|a, b| a.max(b)).expect("bug in fulgurite: a block without rows");
            [w.smallest(low).to_u32(), w.largest(high).to_u32()]
        }
    }
}

fn positions(program: &Program) -> Vec<Positions> {
    let mut all: Vec<Positions> = Vec::new();
    for step in program.steps() {
        let inner = operands(step).into_iter().fold(Positions::none(), |sum, x| sum.or(all[x]));
        all.push(match step {
            Step::Var(Index::Query) => Positions { query: true, ..Positions::default() },
            Step::Var(Index::Key) => Positions { key: true, ..Positions::default() },
            Step::Binary(Binary::Div, ..) => Positions { coarse: true, ..inner },
            Step::Load(..) if inner.any() => Positions { loads: true, ..inner },
            _ => inner,
        });
    }
    all
}

/// The set of values that a step can take in a block: smallest and largest; for a condition, whether it can be false and
/// whether it can be true. Floats from -inf to inf may also be NaN.
#[derive(Clone, Copy)]
enum Interval<'k> {
    Float([Val<'k, f32>; 2]),
    Int([Val<'k, i32>; 2]),
    Bool([Val<'k, bool>; 2]),
}

impl<'k> Interval<'k> {
    fn floats(self) -> [Val<'k, f32>; 2] {
        match self {
            Interval::Float(x) => x,
            _ => panic!("bug in fulgurite: a typed program has a float here"),
        }
    }
    fn ints(self) -> [Val<'k, i32>; 2] {
        match self {
            Interval::Int(x) => x,
            _ => panic!("bug in fulgurite: a typed program has an integer here"),
        }
    }
    fn bools(self) -> [Val<'k, bool>; 2] {
        match self {
            Interval::Bool(x) => x,
            _ => panic!("bug in fulgurite: a typed program has a condition here"),
        }
    }
}

/// The extremes of scanned steps of one block, as [`Bounded::extremes`] gives them: two words for each step.
pub(crate) type Extremes<'k> = Pointer<'k, u32>;

/// The bounds of a mask over blocks of some queries.
pub(crate) struct RowBounds<'a, 'k> {
    bounded: &'a Bounded,
    parameters: &'a Parameters<'k>,
    running: Running<'k>,
    place: TilePosition<'k>,
    /// First and last query, and the extremes of steps of queries.
    queries: ([Val<'k, i32>; 2], Extremes<'k>),
    /// Bounds of the steps that read no key.
    known: HashMap<usize, Interval<'k>>,
}

impl<'a, 'k> RowBounds<'a, 'k> {
    /// Bounds for these queries. Everything that does not depend on keys is computed here.
    pub fn new(
        w: &Scope<'k, Group>,
        bounded: &'a Bounded,
        (modifiers, parameters): (&Modifiers, &'a Parameters<'k>),
        place: TilePosition<'k>,
        queries: ([Val<'k, i32>; 2], Extremes<'k>),
    ) -> Self {
        let (running, known) = (bounded.running(modifiers), HashMap::new());
        let mut bounds = RowBounds { bounded, parameters, running, place, queries, known };
        let mut block = BlockBounds { w, rows: &bounds, keys: None, known: HashMap::new() };
        let mut todo = vec![bounded.program.steps().len() - 1];
        let mut visited = vec![false; todo[0] + 1];
        while let Some(i) = todo.pop() {
            if std::mem::replace(&mut visited[i], true) {
                continue;
            }
            match bounded.positions[i] {
                of if !of.key => {
                    block.step(i);
                }
                of if of.scanned_side().is_none() => todo.extend(operands(&bounded.program.steps()[i])),
                _ => {}
            }
        }
        let known = block.known;
        bounds.known = known;
        bounds
    }

    /// Whether the mask can be false, and whether it can be true, for keys from the first to the last.
    pub fn over(&self, w: &Scope<'k, Group>, keys: [Val<'k, i32>; 2], extremes: Extremes<'k>) -> [Val<'k, bool>; 2] {
        let mut block = BlockBounds { w, rows: self, keys: Some((keys, extremes)), known: self.known.clone() };
        block.step(self.bounded.program.steps().len() - 1).bools()
    }
}

/// The bounds of steps over one block while its section of the kernel is built.
struct BlockBounds<'b, 'k> {
    w: &'b Scope<'k, Group>,
    rows: &'b RowBounds<'b, 'k>,
    keys: Option<([Val<'k, i32>; 2], Extremes<'k>)>,
    known: HashMap<usize, Interval<'k>>,
}

impl<'k> BlockBounds<'_, 'k> {
    fn step(&mut self, i: usize) -> Interval<'k> {
        if let Some(&known) = self.known.get(&i) {
            return known;
        }
        let bounds = self.compute(i);
        self.known.insert(i, bounds);
        bounds
    }

    fn compute(&mut self, i: usize) -> Interval<'k> {
        let bounded = self.rows.bounded;
        let of = bounded.positions[i];
        if let Some(side) = of.scanned_side() {
            let number = bounded.scanned[side].iter().position(|&step| step == i);
            let number = number.expect("bug in fulgurite: a step of one side that was not scanned") as u32;
            let extremes = if side == 0 { self.rows.queries.1 } else { self.of_keys().1 };
            let [low, high] = [2 * number, 2 * number + 1].map(|at| extremes.load(self.w, at));
            return match bounded.program.types()[i] {
                Type::Float => Interval::Float([low.to_f32_bits(), high.to_f32_bits()]),
                Type::Int => Interval::Int([low.to_i32(), high.to_i32()]),
                Type::Bool => Interval::Bool([low.eq(0), high.eq(1)]),
            };
        }
        if !of.any() {
            return self.value(i);
        }
        match bounded.program.steps()[i].clone() {
            Step::Var(Index::Query) => Interval::Int(self.rows.queries.0),
            Step::Var(Index::Key) => Interval::Int(self.of_keys().0),
            Step::Unary(op, a) => self.unary(op, a),
            Step::Binary(op, a, b) => self.binary(op, a, b),
            Step::Select(c, a, b) => self.select(c, a, b),
            Step::Load(tensor, at) => self.load(tensor, &at),
            Step::Var(_) | Step::Float(_) | Step::Int(_) | Step::Bool(_) => {
                unreachable!("bug in fulgurite: a step that reads no position has a value")
            }
        }
    }

    fn of_keys(&self) -> ([Val<'k, i32>; 2], Extremes<'k>) {
        self.keys.expect("bug in fulgurite: a step that reads keys, computed without them")
    }

    /// The value of a step that reads no position.
    fn value(&mut self, i: usize) -> Interval<'k> {
        let RowBounds { running, parameters, place, .. } = self.rows;
        let (place, key, known) = (Some(place), Some(place.k_len), HashMap::new());
        let mut evaluation = Evaluation { w: self.w, running, parameters, place, key, quick: None, known };
        // Some instructions take no constants.
        match evaluation.step(i, At { row: 0, col: 0, score: None }) {
            Word::Float(x) => {
                let x = self.w.var(x).get();
                let is_nan = x.ne(x);
                Interval::Float([is_nan.select(f32::NEG_INFINITY, x), is_nan.select(f32::INFINITY, x)])
            }
            Word::Int(x) => Interval::Int([self.w.var(x).get(); 2]),
            Word::Bool(x) => {
                let x = self.w.var(x).get();
                Interval::Bool([!x, x])
            }
        }
    }

    /// Any float, or any integer.
    fn whole(&self, ty: Type) -> Interval<'k> {
        match ty {
            Type::Float => Interval::Float([f32::NEG_INFINITY, f32::INFINITY].map(|x| self.w.var(x).get())),
            Type::Int => Interval::Int([i32::MIN, i32::MAX].map(|x| self.w.var(x).get())),
            Type::Bool => Interval::Bool([self.w.var(true).get(); 2]),
        }
    }

    /// Integers between these, or any integer where `fits` does not hold.
    fn int(&self, [low, high]: [Val<'k, i32>; 2], fits: Val<'k, bool>) -> Interval<'k> {
        Interval::Int([fits.select(low, i32::MIN), fits.select(high, i32::MAX)])
    }

    /// The hull of floats, widened; any float where one of them is NaN or the sum of all is not a number.
    fn hull(&self, candidates: &[Val<'k, f32>]) -> Interval<'k> {
        let fold = |f: &dyn Fn(Val<'k, f32>, Val<'k, f32>) -> Val<'k, f32>| {
            candidates.iter().copied().reduce(f).expect("bug in fulgurite: no candidates")
        };
        let (low, high, sum) = (fold(&|a, b| a.min(b)), fold(&|a, b| a.max(b)), fold(&|a, b| a + b));
        let (low, high) = (low - low.abs() * WIDER, high + high.abs() * WIDER);
        // The sum is NaN where a candidate is, and where infinities of both signs meet. A widened infinity stays one.
        let bad = sum.ne(sum) | low.ne(low) | high.ne(high);
        Interval::Float([bad.select(f32::NEG_INFINITY, low), bad.select(f32::INFINITY, high)])
    }

    fn unary(&mut self, op: Unary, a: usize) -> Interval<'k> {
        let x = self.step(a);
        match (op, x) {
            (Unary::Not, _) => {
                let [f, t] = x.bools();
                Interval::Bool([t, f])
            }
            (Unary::Neg, Interval::Int([low, high])) => {
                let ends = [high, low].map(|x| x.literal(0) - x);
                self.int(ends, fits(&[low, high]))
            }
            (Unary::Neg, _) => {
                let [low, high] = x.floats();
                Interval::Float([-high, -low])
            }
            (Unary::Abs, Interval::Int([low, high])) => {
                // max(low, -high, 0) is the distance from 0 to the interval.
                let [below, above] = [low, high].map(|x| x.literal(0) - x);
                self.int([low.max(above).max(0), below.max(high)], fits(&[low, high]))
            }
            (Unary::Abs, _) => {
                let [low, high] = x.floats();
                // The whole line stays the whole line: it may be NaN.
                let whole = low.eq(f32::NEG_INFINITY) & high.eq(f32::INFINITY);
                let ends = [low.max(-high).max(0.0), (-low).max(high)];
                Interval::Float([whole.select(f32::NEG_INFINITY, ends[0]), ends[1]])
            }
            (Unary::ToFloat, _) => {
                let wider = |x: Val<'k, f32>| x.abs().gt(EXACT).select::<f32>(x.abs() * WIDER, 0.0);
                let [low, high] = x.ints().map(|x| x.to_f32());
                Interval::Float([low - wider(low), high + wider(high)])
            }
            (Unary::Floor, _) => {
                let ends = x.floats();
                self.int(ends.map(|x| x.floor().to_i32()), ends[0].abs().lt(SAFE) & ends[1].abs().lt(SAFE))
            }
            (Unary::Exp | Unary::Log | Unary::Sqrt | Unary::Tanh, _) => self.whole(Type::Float),
        }
    }

    fn binary(&mut self, op: Binary, a: usize, b: usize) -> Interval<'k> {
        match (self.step(a), self.step(b)) {
            (Interval::Float(x), Interval::Float(u)) => self.of_floats(op, x, u),
            (Interval::Int(x), Interval::Int(u)) => self.of_ints(op, x, u),
            (x, u) => {
                let ([xf, xt], [uf, ut]) = (x.bools(), u.bools());
                match op {
                    Binary::And => Interval::Bool([xf | uf, xt & ut]),
                    Binary::Or => Interval::Bool([xf & uf, xt | ut]),
                    // Equality of conditions is not part of the language of masks; nothing is claimed about it.
                    _ => self.whole(Type::Bool),
                }
            }
        }
    }

    fn of_floats(&self, op: Binary, [x, y]: [Val<'k, f32>; 2], [u, v]: [Val<'k, f32>; 2]) -> Interval<'k> {
        let whole = |[low, high]: [Val<'k, f32>; 2]| low.eq(f32::NEG_INFINITY) & high.eq(f32::INFINITY);
        let unknown = whole([x, y]) | whole([u, v]);
        let bools = |f: Val<'k, bool>, t: Val<'k, bool>| Interval::Bool([f | unknown, t | unknown]);
        let known = |ends: [Val<'k, f32>; 2]| {
            Interval::Float([unknown.select(f32::NEG_INFINITY, ends[0]), unknown.select(f32::INFINITY, ends[1])])
        };
        match op {
            Binary::Add => self.hull(&[x + u, y + v]),
            Binary::Sub => self.hull(&[x - v, y - u]),
            Binary::Mul => self.hull(&[x * u, x * v, y * u, y * v]),
            Binary::Div => {
                let Interval::Float(ends) = self.hull(&[x / u, x / v, y / u, y / v]) else {
                    unreachable!("bug in fulgurite: a hull of floats")
                };
                let by_zero = u.le(0.0) & v.ge(0.0);
                Interval::Float([by_zero.select(f32::NEG_INFINITY, ends[0]), by_zero.select(f32::INFINITY, ends[1])])
            }
            Binary::Min => known([x.min(u), y.min(v)]),
            Binary::Max => known([x.max(u), y.max(v)]),
            Binary::Eq => bools(!(x.eq(y) & u.eq(v) & x.eq(u)), !(y.lt(u) | v.lt(x))),
            Binary::Lt => bools(y.ge(u), x.lt(v)),
            Binary::Le => bools(y.gt(u), x.le(v)),
            Binary::Rem | Binary::And | Binary::Or => {
                unreachable!("bug in fulgurite: a typed program has no {op:?} of floats")
            }
        }
    }

    fn of_ints(&self, op: Binary, [i, j]: [Val<'k, i32>; 2], [m, n]: [Val<'k, i32>; 2]) -> Interval<'k> {
        let safe = fits(&[i, j, m, n]);
        let quotient = |x, y| int_binary(Binary::Div, x, y).int();
        let hull = |all: [Val<'k, i32>; 4]| {
            let [low, high] = [|a: Val<'k, i32>, b| a.min(b), |a: Val<'k, i32>, b| a.max(b)]
                .map(|f| all.into_iter().reduce(f).expect("bug in fulgurite: no candidates"));
            [low, high]
        };
        match op {
            Binary::Add => self.int([i + m, j + n], safe),
            Binary::Sub => self.int([i - n, j - m], safe),
            Binary::Mul => {
                // No product of the ends is near the limits, so none in between is.
                let [a, b, c, d] = [(i, m), (i, n), (j, m), (j, n)].map(|(x, y)| (x.to_f32() * y.to_f32()).abs());
                self.int(hull([i * m, i * n, j * m, j * n]), a.max(b).max(c.max(d)).le(SAFE))
            }
            Binary::Div => {
                // A range of divisors that contains 0 also contains 1 or -1, or is just 0, which gives 0.
                let most = i.max(i.literal(0) - i).max(j.max(j.literal(0) - j));
                let [low, high] = hull([quotient(i, m), quotient(i, n), quotient(j, m), quotient(j, n)]);
                let by_zero = m.le(0) & n.ge(0);
                self.int([by_zero.select(most.literal(0) - most, low), by_zero.select(most, high)], safe)
            }
            Binary::Rem => {
                let (first, last) = (quotient(i, m), quotient(j, m));
                let (base, same) = (m * first, m.eq(n) & m.gt(0) & first.eq(last));
                let low = same.select::<i32>(i - base, (m + 1).min(0));
                self.int([low, same.select::<i32>(j - base, (n - 1).max(0))], safe)
            }
            Binary::Min => Interval::Int([i.min(m), j.min(n)]),
            Binary::Max => Interval::Int([i.max(m), j.max(n)]),
            Binary::Eq => Interval::Bool([!(i.eq(j) & m.eq(n) & i.eq(m)), !(j.lt(m) | n.lt(i))]),
            Binary::Lt => Interval::Bool([j.ge(m), i.lt(n)]),
            Binary::Le => Interval::Bool([j.gt(m), i.le(n)]),
            Binary::And | Binary::Or => unreachable!("bug in fulgurite: a typed program has no {op:?} of integers"),
        }
    }

    fn select(&mut self, c: usize, a: usize, b: usize) -> Interval<'k> {
        let ([f, t], a, b) = (self.step(c).bools(), self.step(a), self.step(b));
        match (a, b) {
            (Interval::Bool(a), Interval::Bool(b)) => Interval::Bool([0, 1].map(|i| (t & a[i]) | (f & b[i]))),
            (Interval::Float([x, y]), Interval::Float([u, v])) => {
                let pick = |a: Val<'k, f32>, b: Val<'k, f32>, both: Val<'k, f32>| {
                    let inner: Val<'k, f32> = f.select(both, a);
                    t.select::<f32>(inner, b)
                };
                Interval::Float([pick(x, u, x.min(u)), pick(y, v, y.max(v))])
            }
            (a, b) => {
                let ([x, y], [u, v]) = (a.ints(), b.ints());
                let pick = |a: Val<'k, i32>, b: Val<'k, i32>, both: Val<'k, i32>| {
                    let inner: Val<'k, i32> = f.select(both, a);
                    t.select::<i32>(inner, b)
                };
                Interval::Int([pick(x, u, x.min(u)), pick(y, v, y.max(v))])
            }
        }
    }

    /// An element of a tensor that is read by query and key: its value where the block has one index only.
    fn load(&mut self, tensor: usize, at: &[usize]) -> Interval<'k> {
        let aux = &self.rows.parameters.aux[tensor];
        let (mut offset, mut one) = (self.w.constant(0u64), self.w.constant(true));
        for (&index, [last, stride]) in at.iter().zip(&aux.axes) {
            let [low, high] = self.step(index).ints().map(|x| x.max(0).to_u32().min(*last));
            offset = low.mul_wide(*stride) + offset;
            one = low.eq(high) & one;
        }
        match aux.array.load(self.w, offset) {
            Word::Int(x) => self.int([x, x], one),
            word => {
                let x = word.float();
                let known = x.eq(x) & one;
                Interval::Float([known.select(x, f32::NEG_INFINITY), known.select(x, f32::INFINITY)])
            }
        }
    }
}

/// Whether integers are far from the limits of an i32.
fn fits<'k>(of: &[Val<'k, i32>]) -> Val<'k, bool> {
    let largest = of.iter().map(|x| x.to_f32().abs()).reduce(|a, b| a.max(b));
    largest.expect("bug in fulgurite: no integers").lt(SAFE)
}
