//! Expressions on blocks of scores: [`KEYS`] keys by the lanes of a tile, one step of the program at a time.
//!
//! A value is kept in the cheapest form that holds it. What depends on the lane alone is computed once per tile, what
//! depends on the key alone once per key, and an index that grows evenly along the keys is a base and a slope per lane.
//! Only what depends on both fills a block. A value does not depend on the form it is kept in, so neither do bits on
//! where a block begins.

mod load;
mod plan;
mod ramp;

use crate::functions::{div_floor, exp, ln, rem_floor, tanh};
use crate::simd::{Pass, Plane, Simd, Term, bits, capped, pass};
use crate::tiles::MAX_LANES;
use fulgurite_core::TensorView;
use fulgurite_core::expr::{Binary, Step, Unary, Var};
use load::Known;
use plan::Capped;
pub(crate) use plan::TileProgram;

/// Keys of a block.
pub(crate) const KEYS: usize = 32;

/// The lanes of a tile, or some of them.
#[derive(Clone, Copy)]
pub(crate) struct LaneEnv<'a> {
    pub batch: usize,
    pub q_len: usize,
    pub k_len: usize,
    /// Query index and head of each lane, in whole vectors.
    pub q: &'a [i32],
    pub head: &'a [i32],
}

/// Where and how a step's value is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// One value per lane, or one for all lanes, in `rows`.
    Lanes,
    /// One value per key, in `columns`.
    Keys,
    /// `base + slope k` per lane, from the rows of a step, and for floats times the value of another. Integers count
    /// keys from the first of the sequence; floats from the first of the block, and are integers below 2^24 until they
    /// are scaled, so that their sums are exact. With `magnitude`, the sign is dropped before the factor.
    Ramp { rows: usize, factor: Option<usize>, magnitude: bool },
    /// One value per key and lane, in the step's block.
    Plane,
    /// The scores themselves, times the scale.
    Score,
}

/// Values of each lane; of a ramp its base and slope.
#[derive(Clone)]
struct LaneRows {
    value: [u32; MAX_LANES],
    slope: [u32; MAX_LANES],
}

/// The factor of ramps that have none.
const ONES: [f32; MAX_LANES] = [1.0; MAX_LANES];

/// The scores of a block, and where the result goes; `out` may be `s`.
#[derive(Clone, Copy)]
pub(crate) struct Cells {
    /// The first key and the number of keys, at most [`KEYS`].
    first: i32,
    n: usize,
    s: Plane<*const f32>,
    out: Option<Plane<*mut f32>>,
}

impl Cells {
    /// # Safety
    /// While the value lives, `s` and `out` have `n` keys and the lanes of every evaluator that gets it. `s` is not read by
    /// a program without scores.
    pub unsafe fn new(first: i32, n: usize, s: Plane<*const f32>, out: Option<Plane<*mut f32>>) -> Cells {
        Cells { first, n, s, out }
    }
}

/// A program with its values for one tile.
pub(crate) struct Evaluator<'a> {
    plan: &'a TileProgram<'a>,
    aux: &'a [TensorView<'a>],
    /// The factor that converts a score to natural units, and whether results have 16 bits.
    scale: f32,
    short: bool,
    lanes: usize,
    forms: Vec<Form>,
    /// Whether a step's form holds for all keys of the tile.
    fixed: Vec<bool>,
    /// Loads whose elements are known for all keys of the tile.
    known: Vec<Option<Box<Known>>>,
    rows: Vec<LaneRows>,
    columns: Vec<[u32; KEYS]>,
    blocks: Vec<Vec<u32>>,
    scratch: Vec<f32>,
    /// The load whose elements a product prefetches for this tile.
    prefetched: Option<usize>,
}

impl<'a> Evaluator<'a> {
    pub fn new(plan: &'a TileProgram<'a>, aux: &'a [TensorView<'a>], scale: f32, short: bool) -> Self {
        let steps = plan.axes.len();
        let empty = LaneRows { value: [0; MAX_LANES], slope: [0; MAX_LANES] };
        Evaluator {
            plan,
            aux,
            scale,
            short,
            lanes: 0,
            forms: vec![Form::Lanes; steps],
            fixed: vec![false; steps],
            known: (0..steps).map(|_| None).collect(),
            rows: vec![empty; steps],
            columns: vec![[0; KEYS]; steps],
            blocks: vec![vec![0; KEYS * MAX_LANES]; plan.blocks],
            scratch: vec![0.0; MAX_LANES * KEYS],
            prefetched: None,
        }
    }

    /// Lanes of the current tile.
    pub fn lanes(&self) -> usize {
        self.lanes
    }

    /// Whether the program reads scores.
    pub fn reads_scores(&self) -> bool {
        self.plan.reads(Var::Score)
    }

    /// Computes the steps that are constant over all keys, for the lanes of another tile.
    pub fn prepare(&mut self, env: &LaneEnv<'_>) {
        let lanes = env.q.len();
        assert!(lanes <= MAX_LANES && env.head.len() == lanes, "lanes of the tile");
        (self.lanes, self.prefetched) = (lanes, None);
        let nothing = Cells { first: 0, n: 1, s: Plane { data: std::ptr::null(), stride: 0 }, out: None };
        for (i, step) in self.plan.program.steps().iter().enumerate() {
            if self.plan.axes[i].keys {
                self.fix(i);
                if let Step::Load(tensor, index) = step {
                    self.know(i, *tensor, index);
                }
                continue;
            }
            self.forms[i] = Form::Lanes;
            let out = &mut self.rows[i].value[..lanes];
            match step {
                Step::Var(Var::Query) => out.iter_mut().zip(env.q).for_each(|(o, &q)| *o = q as u32),
                Step::Var(Var::Head) => out.iter_mut().zip(env.head).for_each(|(o, &h)| *o = h as u32),
                Step::Var(Var::Batch) => out.fill(env.batch as u32),
                Step::Var(Var::QueryLen) => out.fill(env.q_len as u32),
                Step::Var(Var::KeyLen) => out.fill(env.k_len as u32),
                Step::Var(_) => unreachable!("bug in fulgurite: a variable of keys among those of lanes"),
                Step::Float(bits) => out.fill(*bits),
                Step::Int(x) => out.fill(*x as u32),
                Step::Bool(x) => out.fill(u32::from(*x)),
                Step::Unary(op, a) => self.unary(i, *op, *a, &nothing),
                Step::Binary(op, a, b) => self.binary(i, *op, [*a, *b], &nothing),
                Step::Select(c, a, b) => self.select(i, [*c, *a, *b], &nothing),
                Step::Load(tensor, index) => self.load_anywhere(i, *tensor, index, &nothing),
            }
        }
    }

    /// Evaluates a block. The result goes to `out`, if it is given; [`words`](Self::words) reads
    /// it otherwise.
    ///
    /// # Safety
    /// As for [`Simd`]; the scores and `out` have `n` keys and the tile's lanes.
    #[inline(always)]
    pub unsafe fn run<S: Simd>(&mut self, at: &Cells) {
        assert!(at.n <= KEYS && self.lanes.is_multiple_of(S::LANES), "keys of a block, and whole vectors");
        let steps = self.plan.program.steps();
        let mut done = false;
        for (i, step) in steps.iter().enumerate() {
            if !self.plan.axes[i].keys || self.plan.absorbed[i] || self.fixed[i] {
                continue;
            }
            // Only the last step writes to `out`, because the scores may be there.
            let out = at.out.filter(|_| i + 1 == steps.len());
            // SAFETY: passed on.
            done = unsafe { self.step::<S>(i, step, at, out) };
        }
        if let (Some(out), false) = (at.out, done) {
            for key in 0..at.n {
                let mut room = [0; MAX_LANES];
                let row = self.result_row(key, &mut room, at);
                // SAFETY: `out` has these lanes (caller). The row is a copy if it comes from the scores.
                unsafe {
                    std::ptr::copy_nonoverlapping(row.as_ptr().cast(), out.data.add(key * out.stride), row.len())
                };
            }
        }
    }

    /// Evaluates one step that changes from key to key; true if its value is in `out`.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    #[inline(always)]
    unsafe fn step<S: Simd>(&mut self, i: usize, step: &Step, at: &Cells, out: Option<Plane<*mut f32>>) -> bool {
        // SAFETY: passed on.
        unsafe {
            if let Some(own) = self.plan.capped[i] {
                return self.cap::<S>(i, own, at, out);
            }
            match step {
                Step::Var(_) => self.forms[i] = Form::Score,
                Step::Unary(op, a) => {
                    if !self.ramp_unary(i, *op, *a, at) {
                        self.unary(i, *op, *a, at);
                    }
                }
                Step::Binary(op, a, b) => {
                    if !self.ramp_binary(i, *op, [*a, *b], at) {
                        if let Some(written) = self.pass::<S>(i, *op, [*a, *b], at, out) {
                            return written;
                        }
                        self.binary(i, *op, [*a, *b], at);
                    }
                }
                Step::Select(c, a, b) => self.select(i, [*c, *a, *b], at),
                Step::Load(tensor, index) => self.load::<S>(i, *tensor, index, at),
                Step::Float(_) | Step::Int(_) | Step::Bool(_) => {}
            }
            false
        }
    }

    /// One row of the result of the last block, in `room` if it must be computed.
    fn result_row<'x>(&'x self, key: usize, room: &'x mut [u32; MAX_LANES], at: &Cells) -> &'x [u32] {
        self.row_of(self.forms.len() - 1, key, room, at)
    }

    /// The result of the last block as bits, if it is a condition: one word per key.
    ///
    /// # Safety
    /// As for [`run`](Self::run), whose block `at` is.
    #[inline(always)]
    pub unsafe fn words<S: Simd>(&self, at: &Cells, out: &mut [u64]) {
        let last = self.forms.len() - 1;
        let all = u64::MAX >> (64 - self.lanes);
        for (key, word) in out.iter_mut().enumerate().take(at.n) {
            let mut room = [0; MAX_LANES];
            *word = match self.forms[last] {
                Form::Keys if self.columns[last][key] != 0 => all,
                Form::Keys => 0,
                // SAFETY: passed on.
                _ => unsafe { bits::<S>(self.row_of(last, key, &mut room, at)) },
            };
        }
    }

    /// The value of a step at one key, per lane.
    #[inline(never)]
    fn row_of<'x>(&'x self, step: usize, key: usize, room: &'x mut [u32; MAX_LANES], at: &Cells) -> &'x [u32] {
        let lanes = self.lanes;
        let room = &mut room[..lanes];
        match self.forms[step] {
            Form::Lanes => return &self.rows[step].value[..lanes],
            Form::Plane => return &self.blocks[self.plan.block[step]][key * lanes..(key + 1) * lanes],
            Form::Keys => room.fill(self.columns[step][key]),
            Form::Ramp { rows, factor, magnitude } if self.plan.float(step) => {
                let rows = &self.rows[rows];
                for (lane, o) in room.iter_mut().enumerate() {
                    let [base, slope] = [rows.value[lane], rows.slope[lane]].map(f32::from_bits);
                    let factor = factor.map_or(1.0, |step| f32::from_bits(self.rows[step].value[lane]));
                    let x = base + slope * key as f32;
                    *o = (factor * if magnitude { x.abs() } else { x }).to_bits();
                }
            }
            Form::Ramp { rows, magnitude, .. } => {
                let (rows, key) = (&self.rows[rows], (at.first as u32).wrapping_add(key as u32));
                for ((o, &base), &slope) in room.iter_mut().zip(&rows.value).zip(&rows.slope) {
                    let x = base.wrapping_add(slope.wrapping_mul(key));
                    *o = if magnitude { (x as i32).wrapping_abs() as u32 } else { x };
                }
            }
            Form::Score => {
                assert!(key < at.n, "a key of the block");
                for (lane, o) in room.iter_mut().enumerate() {
                    // SAFETY: `Cells::new` promises that the scores have every lane of its keys.
                    *o = (unsafe { *at.s.data.add(key * at.s.stride + lane) } * self.scale).to_bits();
                }
            }
        }
        room
    }

    /// The value of a step per key, if it does not depend on the lane.
    fn column_of(&self, step: usize, at: &Cells) -> [u32; KEYS] {
        if self.forms[step] == Form::Keys {
            return self.columns[step];
        }
        let mut column = [self.rows[step].value[0]; KEYS];
        if let Form::Ramp { .. } = self.forms[step] {
            for (key, o) in column.iter_mut().enumerate().take(at.n) {
                *o = self.row_of(step, key, &mut [0; MAX_LANES], at)[0];
            }
        }
        column
    }

    /// Computes a step from rows of its operands, along the axes on which it depends.
    #[inline(always)]
    fn each<const N: usize>(&mut self, i: usize, from: [usize; N], at: &Cells, f: impl Fn(&mut [u32], [&[u32]; N])) {
        let (axes, lanes) = (self.plan.axes[i], self.lanes);
        if !axes.keys {
            let mut out = self.rows[i].value;
            f(&mut out[..lanes], from.map(|x| &self.rows[x].value[..lanes]));
            self.rows[i].value = out;
        } else if !axes.lanes {
            let columns = from.map(|x| self.column_of(x, at));
            f(&mut self.columns[i][..at.n], columns.each_ref().map(|x| &x[..at.n]));
            self.forms[i] = Form::Keys;
        } else {
            let mut out = std::mem::take(&mut self.blocks[self.plan.block[i]]);
            let mut rooms = [[0; MAX_LANES]; N];
            for (key, out) in out.chunks_exact_mut(lanes).enumerate().take(at.n) {
                let mut rooms = rooms.iter_mut();
                let rows = from.map(|x| self.row_of(x, key, rooms.next().expect("one for each operand"), at));
                f(out, rows);
            }
            self.blocks[self.plan.block[i]] = out;
            self.forms[i] = Form::Plane;
        }
    }

    /// The rows of a step that every lane and key needs on its own, with the factor that is still to be applied.
    fn plane(&self, step: usize, at: &Cells) -> Option<(Plane<*const f32>, f32)> {
        match self.forms[step] {
            Form::Score => Some((at.s, self.scale)),
            Form::Plane => {
                let data = self.blocks[self.plan.block[step]].as_ptr().cast();
                Some((Plane { data, stride: self.lanes }, 1.0))
            }
            _ => None,
        }
    }

    /// A step as the second operand of a pass.
    fn term(&self, step: usize) -> Option<Term> {
        let block = self.plan.block[step];
        match self.forms[step] {
            Form::Lanes => Some(Term::Lanes(self.rows[step].value.as_ptr().cast())),
            Form::Keys => Some(Term::Keys(self.columns[step].as_ptr().cast())),
            Form::Ramp { rows, factor, magnitude } => {
                let factor = factor.map_or(ONES.as_ptr(), |step| self.rows[step].value.as_ptr().cast());
                let rows = &self.rows[rows];
                Some(Term::Ramp([rows.value.as_ptr().cast(), rows.slope.as_ptr().cast(), factor], magnitude))
            }
            Form::Plane => Some(Term::Plane(Plane { data: self.blocks[block].as_ptr().cast(), stride: self.lanes })),
            Form::Score => None,
        }
    }

    /// Where a pass writes: to `out`, or to the step's own block.
    fn target(&mut self, i: usize, out: Option<Plane<*mut f32>>) -> Plane<*mut f32> {
        self.forms[i] = Form::Plane;
        let block = &mut self.blocks[self.plan.block[i]];
        out.unwrap_or(Plane { data: block.as_mut_ptr().cast(), stride: self.lanes })
    }

    /// A sum, difference or product of floats in one pass over a block; `None` if it is none, else whether it is in
    /// `out`.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    #[inline(always)]
    unsafe fn pass<S: Simd>(
        &mut self,
        i: usize,
        op: Binary,
        [x, y]: [usize; 2],
        at: &Cells,
        out: Option<Plane<*mut f32>>,
    ) -> Option<bool> {
        if !(self.plan.float(i) && self.plan.axes[i].lanes) {
            return None;
        }
        let score = |step: usize| self.forms[step] == Form::Score;
        // The first operand is a plane, and the scores if they are one of the two.
        let swapped = score(y) || self.plane(x, at).is_none();
        let (a, b) = if swapped { (y, x) } else { (x, y) };
        let (plane, scale) = self.plane(a, at)?;
        let mut term = self.term(b)?;
        let how = match (op, swapped) {
            (Binary::Add, _) => Pass::Sum { scale, sign: 1.0 },
            (Binary::Sub, false) => Pass::Sum { scale, sign: -1.0 },
            (Binary::Sub, true) => Pass::Sum { scale: -scale, sign: 1.0 },
            (Binary::Mul, _) => Pass::Product { scale },
            (Binary::Div, false) if self.forms[b] == Form::Lanes => {
                // A product with the reciprocal, where that loses nothing but a rounding.
                let value = self.rows[b].value.map(|x| 1.0 / f32::from_bits(x));
                if !value[..self.lanes].iter().all(|x| x.is_normal()) {
                    return None;
                }
                self.rows[i].value = value.map(f32::to_bits);
                term = Term::Lanes(self.rows[i].value.as_ptr().cast());
                Pass::Product { scale }
            }
            _ => return None,
        };
        let target = self.target(i, out);
        // SAFETY: planes have the tile's lanes and `n` keys, rows the lanes, columns the keys. A step's block is not
        // one that it reads.
        unsafe { pass::<S>(target, plane, [at.n, self.lanes], how, term) };
        Some(out.is_some())
    }

    /// A hyperbolic tangent with the factors around it; true if it is in `out`.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    #[inline(always)]
    unsafe fn cap<S: Simd>(&mut self, i: usize, own: Capped, at: &Cells, out: Option<Plane<*mut f32>>) -> bool {
        let uniform = |step: usize| f32::from_bits(self.rows[step].value[0]);
        let pre = match own.pre {
            Some((Binary::Div, by)) => 1.0 / uniform(by),
            Some((_, by)) => uniform(by),
            None => 1.0,
        };
        let post = own.post.map_or(1.0, uniform);
        let found = self.plane(own.x, at).map(|(plane, scale)| (plane, scale * pre));
        let (plane, pre) = found.unwrap_or_else(|| {
            // A form that is no plane: write it out, into the step's own block.
            let mut block = std::mem::take(&mut self.blocks[self.plan.block[i]]);
            for (key, row) in block.chunks_exact_mut(self.lanes).enumerate().take(at.n) {
                row.copy_from_slice(self.row_of(own.x, key, &mut [0; MAX_LANES], at));
            }
            let data = block.as_ptr().cast();
            self.blocks[self.plan.block[i]] = block;
            (Plane { data, stride: self.lanes }, pre)
        });
        let target = self.target(i, out);
        // SAFETY: as in `pass`; the target may be the operand itself, which is read first, vector by vector.
        unsafe { capped::<S>(target, plane, [at.n, self.lanes], [pre, post], self.short) };
        out.is_some()
    }

    #[inline(always)]
    fn unary(&mut self, i: usize, op: Unary, a: usize, at: &Cells) {
        let float = self.plan.float(i);
        match op {
            Unary::Neg if float => self.each(i, [a], at, |o, [a]| map_f(o, a, |x| -x)),
            Unary::Neg => self.each(i, [a], at, |o, [a]| map_i(o, a, i32::wrapping_neg)),
            Unary::Abs if float => self.each(i, [a], at, |o, [a]| map_f(o, a, f32::abs)),
            Unary::Abs => self.each(i, [a], at, |o, [a]| map_i(o, a, i32::wrapping_abs)),
            Unary::Exp => self.each(i, [a], at, |o, [a]| map_f(o, a, exp)),
            Unary::Log => self.each(i, [a], at, |o, [a]| map_f(o, a, ln)),
            Unary::Sqrt => self.each(i, [a], at, |o, [a]| map_f(o, a, f32::sqrt)),
            Unary::Tanh => self.each(i, [a], at, |o, [a]| map_f(o, a, tanh)),
            Unary::Not => self.each(i, [a], at, |o, [a]| map_i(o, a, |x| i32::from(x == 0))),
            Unary::ToFloat => self.each(i, [a], at, |o, [a]| map_i(o, a, |x| (x as f32).to_bits() as i32)),
            Unary::Floor => self.each(i, [a], at, |o, [a]| map_i(o, a, |x| f32::from_bits(x as u32).floor() as i32)),
        }
    }

    #[inline(always)]
    fn binary(&mut self, i: usize, op: Binary, from: [usize; 2], at: &Cells) {
        match (op, self.plan.float(from[0])) {
            (Binary::Add, true) => self.each(i, from, at, |o, ab| zip_f(o, ab, |x, y| x + y)),
            (Binary::Add, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, i32::wrapping_add)),
            (Binary::Sub, true) => self.each(i, from, at, |o, ab| zip_f(o, ab, |x, y| x - y)),
            (Binary::Sub, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, i32::wrapping_sub)),
            (Binary::Mul, true) => self.each(i, from, at, |o, ab| zip_f(o, ab, |x, y| x * y)),
            (Binary::Mul, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, i32::wrapping_mul)),
            (Binary::Div, true) => self.each(i, from, at, |o, ab| zip_f(o, ab, |x, y| x / y)),
            (Binary::Div, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, div_floor)),
            (Binary::Rem, _) => self.each(i, from, at, |o, ab| zip_i(o, ab, rem_floor)),
            (Binary::Min, true) => self.each(i, from, at, |o, ab| zip_f(o, ab, min)),
            (Binary::Min, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, i32::min)),
            (Binary::Max, true) => self.each(i, from, at, |o, ab| zip_f(o, ab, max)),
            (Binary::Max, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, i32::max)),
            (Binary::Eq, true) => self.each(i, from, at, |o, ab| test_f(o, ab, |x, y| x == y)),
            (Binary::Eq, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, |x, y| i32::from(x == y))),
            (Binary::Lt, true) => self.each(i, from, at, |o, ab| test_f(o, ab, |x, y| x < y)),
            (Binary::Lt, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, |x, y| i32::from(x < y))),
            (Binary::Le, true) => self.each(i, from, at, |o, ab| test_f(o, ab, |x, y| x <= y)),
            (Binary::Le, false) => self.each(i, from, at, |o, ab| zip_i(o, ab, |x, y| i32::from(x <= y))),
            (Binary::And, _) => self.each(i, from, at, |o, ab| zip_i(o, ab, |x, y| x & y)),
            (Binary::Or, _) => self.each(i, from, at, |o, ab| zip_i(o, ab, |x, y| x | y)),
        }
    }

    #[inline(always)]
    fn select(&mut self, i: usize, from: [usize; 3], at: &Cells) {
        self.each(i, from, at, |out, [c, a, b]| {
            for (((o, &c), &a), &b) in out.iter_mut().zip(c).zip(a).zip(b) {
                *o = if c != 0 { a } else { b };
            }
        });
    }
}

#[inline(always)]
fn min(x: f32, y: f32) -> f32 {
    if x.is_nan() || x <= y { x } else { y }
}
#[inline(always)]
fn max(x: f32, y: f32) -> f32 {
    if x.is_nan() || x >= y { x } else { y }
}
#[inline(always)]
fn map_f(out: &mut [u32], a: &[u32], f: impl Fn(f32) -> f32) {
    for (o, &a) in out.iter_mut().zip(a) {
        *o = f(f32::from_bits(a)).to_bits();
    }
}
#[inline(always)]
fn map_i(out: &mut [u32], a: &[u32], f: impl Fn(i32) -> i32) {
    for (o, &a) in out.iter_mut().zip(a) {
        *o = f(a as i32) as u32;
    }
}
#[inline(always)]
fn zip_f(out: &mut [u32], [a, b]: [&[u32]; 2], f: impl Fn(f32, f32) -> f32) {
    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *o = f(f32::from_bits(a), f32::from_bits(b)).to_bits();
    }
}
#[inline(always)]
fn zip_i(out: &mut [u32], [a, b]: [&[u32]; 2], f: impl Fn(i32, i32) -> i32) {
    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *o = f(a as i32, b as i32) as u32;
    }
}
#[inline(always)]
fn test_f(out: &mut [u32], [a, b]: [&[u32]; 2], f: impl Fn(f32, f32) -> bool) {
    for ((o, &a), &b) in out.iter_mut().zip(a).zip(b) {
        *o = u32::from(f(f32::from_bits(a), f32::from_bits(b)));
    }
}

#[cfg(test)]
mod tests;
