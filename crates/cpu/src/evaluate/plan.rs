//! What is known about a program before it runs: on which axes each step depends, which steps are computed together,
//! and where blocks of values live.

use fulgurite_core::expr::{Binary, Program, Step, Type, Unary, Var};

/// The axes along which a value changes inside a tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Axes {
    pub lanes: bool,
    pub keys: bool,
}

impl Axes {
    const NONE: Axes = Axes { lanes: false, keys: false };

    fn and(self, other: Axes) -> Axes {
        Axes { lanes: self.lanes || other.lanes, keys: self.keys || other.keys }
    }
}

/// `post * tanh(pre * x)`: the factors of a hyperbolic tangent, which one pass over the values applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Capped {
    pub x: usize,
    /// The uniform step that multiplies x, or divides it.
    pub pre: Option<(Binary, usize)>,
    /// The uniform step that multiplies the result.
    pub post: Option<usize>,
}

/// A program and how to evaluate it on tiles.
#[derive(Debug)]
pub(crate) struct TileProgram<'a> {
    pub(super) program: &'a Program,
    pub(super) axes: Vec<Axes>,
    /// For each step that changes along both axes, the block of values it may use.
    pub(super) block: Vec<usize>,
    pub(super) blocks: usize,
    pub(super) capped: Vec<Option<Capped>>,
    /// Steps that some other step computes on its own.
    pub(super) absorbed: Vec<bool>,
}

impl<'a> TileProgram<'a> {
    /// With `one_head`, all lanes of a tile belong to one head.
    pub fn new(program: &'a Program, one_head: bool) -> Self {
        let steps = program.steps();
        let mut axes: Vec<Axes> = Vec::with_capacity(steps.len());
        for step in steps {
            let own = match step {
                Step::Var(Var::Score) => Axes { lanes: true, keys: true },
                Step::Var(Var::Key) => Axes { lanes: false, keys: true },
                Step::Var(Var::Query) => Axes { lanes: true, keys: false },
                Step::Var(Var::Head) => Axes { lanes: !one_head, keys: false },
                _ => operands(step).iter().fold(Axes::NONE, |all, &x| all.and(axes[x])),
            };
            axes.push(own);
        }
        let mut plan = TileProgram {
            program,
            block: vec![0; steps.len()],
            blocks: 0,
            capped: vec![None; steps.len()],
            absorbed: vec![false; steps.len()],
            axes,
        };
        plan.find_caps();
        plan.assign_blocks();
        plan
    }

    /// Whether the result is the constant 1.
    pub fn is_one(&self) -> bool {
        matches!(self.program.steps(), [Step::Float(bits)] if *bits == 1f32.to_bits())
    }

    /// Whether the bounds of the result over a block cost less than the block: no element of a tensor belongs to one key
    /// and one lane, and the result changes along both.
    pub fn has_bounds(&self) -> bool {
        !self.reads_cells() && self.axes.last().is_some_and(|axes| axes.lanes && axes.keys)
    }

    /// Whether an element of a tensor belongs to one key and one lane.
    pub fn reads_cells(&self) -> bool {
        let steps = self.program.steps().iter().zip(&self.axes);
        steps.into_iter().any(|(step, axes)| matches!(step, Step::Load(..)) && axes.lanes && axes.keys)
    }

    /// Whether the result may grow or fall evenly along the keys, as with a distance that is added.
    pub fn slopes(&self) -> bool {
        let steps = self.program.steps().iter().zip(&self.axes);
        steps.into_iter().any(|(step, axes)| axes.keys && matches!(step, Step::Unary(Unary::ToFloat, _)))
    }

    /// Vector operations on a score, about: what depends on the lane or the key alone costs nothing.
    pub fn operations(&self) -> f64 {
        let steps = self.program.steps().iter().zip(&self.axes).zip(self.capped.iter().zip(&self.absorbed));
        let cost = |((step, axes), (capped, absorbed)): ((&Step, &Axes), (&Option<Capped>, &bool))| {
            if !(axes.lanes && axes.keys) || *absorbed {
                return 0.0;
            }
            match step {
                Step::Var(_) => 0.0,
                _ if capped.is_some() => 17.0,
                Step::Unary(Unary::Exp | Unary::Log, _) => 16.0,
                Step::Unary(Unary::Sqrt, _) => 8.0,
                Step::Load(..) => 4.0,
                _ => 1.0,
            }
        };
        // The scores are loaded and stored once more.
        2.0 + steps.map(cost).sum::<f64>()
    }

    /// Whether the program reads a variable.
    pub fn reads(&self, v: Var) -> bool {
        self.program.reads(v)
    }

    pub(super) fn float(&self, step: usize) -> bool {
        self.program.types()[step] == Type::Float
    }

    fn uniform(&self, step: usize) -> bool {
        self.axes[step] == Axes::NONE
    }

    /// Finds hyperbolic tangents of blocks, with the uniform factors around them that nothing else reads.
    fn find_caps(&mut self) {
        let steps = self.program.steps();
        let mut uses = vec![0usize; steps.len()];
        steps.iter().flat_map(operands).for_each(|x| uses[x] += 1);
        for (i, step) in steps.iter().enumerate() {
            match *step {
                Step::Unary(Unary::Tanh, a) if self.axes[i].lanes && self.axes[i].keys => {
                    let mut own = Capped { x: a, pre: None, post: None };
                    if let Step::Binary(op @ (Binary::Mul | Binary::Div), x, y) = steps[a]
                        && uses[a] == 1
                        && self.capped[a].is_none()
                    {
                        let found = match (self.uniform(x), self.uniform(y)) {
                            (false, true) => Some((x, y)),
                            (true, false) if op == Binary::Mul => Some((y, x)),
                            _ => None,
                        };
                        if let Some((x, factor)) = found {
                            own = Capped { x, pre: Some((op, factor)), post: None };
                            self.absorbed[a] = true;
                        }
                    }
                    self.capped[i] = Some(own);
                }
                Step::Binary(Binary::Mul, a, b) => {
                    let (inner, factor) = if self.uniform(a) { (b, a) } else { (a, b) };
                    let cap = self.capped[inner].filter(|own| own.post.is_none() && uses[inner] == 1);
                    if let (Some(own), true) = (cap, self.uniform(factor)) {
                        self.capped[i] = Some(Capped { post: Some(factor), ..own });
                        self.absorbed[inner] = true;
                    }
                }
                _ => {}
            }
        }
    }

    /// Gives every step that changes along both axes a block, and reuses those whose last reader has run, so that a
    /// long program stays in the L1 cache.
    fn assign_blocks(&mut self) {
        let steps = self.program.steps();
        let read_by = |plan: &TileProgram<'_>, i: usize| match plan.capped[i] {
            Some(own) => vec![own.x],
            None => operands(&steps[i]),
        };
        let mut last = vec![steps.len(); steps.len()];
        for i in (0..steps.len()).filter(|&i| !self.absorbed[i]) {
            read_by(self, i).into_iter().for_each(|x| last[x] = i);
        }
        let mut free: Vec<usize> = Vec::new();
        for i in 0..steps.len() {
            if self.absorbed[i] || !(self.axes[i].lanes && self.axes[i].keys) {
                continue;
            }
            // An operand's block is free only for the steps that follow: a step never writes over what it reads.
            self.block[i] = free.pop().unwrap_or_else(|| {
                self.blocks += 1;
                self.blocks - 1
            });
            let mut read = read_by(self, i);
            read.sort_unstable();
            read.dedup();
            free.extend(
                read.into_iter()
                    .filter(|&x| last[x] == i && self.axes[x].lanes && self.axes[x].keys && !self.absorbed[x])
                    .map(|x| self.block[x]),
            );
        }
    }
}

/// The steps that a step reads.
pub(super) fn operands(step: &Step) -> Vec<usize> {
    match step {
        Step::Var(_) | Step::Float(_) | Step::Int(_) | Step::Bool(_) => Vec::new(),
        Step::Unary(_, a) => vec![*a],
        Step::Binary(_, a, b) => vec![*a, *b],
        Step::Select(c, a, b) => vec![*c, *a, *b],
        Step::Load(_, at) => at.clone(),
    }
}
