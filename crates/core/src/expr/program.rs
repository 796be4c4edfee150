//! Expressions as typed straight-line programs, with common subexpressions evaluated once.

use super::{Binary, Expr, Node, Unary, Var};
use crate::dtype::DType;
use crate::tensor::TensorView;
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;

/// The type of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    /// A score (f64 in the oracle, f32 in engines).
    Float,
    /// An index: an i32 that wraps.
    Int,
    /// A condition.
    Bool,
}

impl Type {
    fn name(self) -> &'static str {
        match self {
            Type::Float => "a float",
            Type::Int => "an integer",
            Type::Bool => "a boolean",
        }
    }
}

/// An auxiliary tensor that expressions read: its declaration, not its contents.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AuxSpec {
    /// The name used in [`load`](super::load) and in the inputs.
    pub name: Arc<str>,
    /// Element type; float types read as floats, i32 as integers.
    pub dtype: DType,
    /// The size of each axis.
    pub shape: Vec<usize>,
    /// Whether backward computes its gradient.
    pub grad: bool,
}

/// The reason why an expression was rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ExprError {
    /// An operand has a type that the operation does not accept.
    #[error(
        "in `{expr}`: `{operand}` is {got}, allowed: {allowed}; convert it with to_float(), floor() or a comparison"
    )]
    Operand {
        /// The operation, as text.
        expr: String,
        /// The operand, as text.
        operand: String,
        /// Type of the operand or expression.
        got: &'static str,
        /// Types that the operation accepts.
        allowed: &'static str,
    },
    /// The expression has the wrong type.
    #[error("`{expr}` is {got}, allowed: {allowed}; a score modifier gives a float, a mask a boolean")]
    Output {
        /// The expression, as text.
        expr: String,
        /// Type of the operand or expression.
        got: &'static str,
        /// Required type.
        allowed: &'static str,
    },
    /// A load from an undeclared tensor.
    #[error("`{expr}` reads `{name}`, declared: {declared:?}; declare it with ProblemBuilder::aux")]
    Unknown {
        /// The load, as text.
        expr: String,
        /// The unknown name.
        name: String,
        /// The declared names.
        declared: Vec<String>,
    },
    /// A load has too many or too few indices.
    #[error("`{expr}` has {got} indices, `{name}` has {rank} axes; give one index for each axis")]
    Rank {
        /// The load, as text.
        expr: String,
        /// Name of the tensor.
        name: String,
        /// Number of indices.
        got: usize,
        /// Number of axes.
        rank: usize,
    },
    /// A mask that reads the score.
    #[error("mask `{expr}` reads the score; hide keys by score with a score modifier that gives -inf")]
    ScoreInMask {
        /// The mask, as text.
        expr: String,
    },
    /// The expression is too large.
    #[error("expression has more than {max} operations; move constant parts into an auxiliary tensor")]
    TooLarge {
        /// Largest allowed number of operations.
        max: usize,
    },
}

/// One operation; operands are indices of earlier steps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Step {
    /// A variable.
    Var(Var),
    /// The bits of an f32 constant.
    Float(u32),
    /// An integer constant.
    Int(i32),
    /// A boolean constant.
    Bool(bool),
    /// An operation with one operand.
    Unary(Unary, usize),
    /// An operation with two operands of the same type.
    Binary(Binary, usize, usize),
    /// Condition, value if true, value if false.
    Select(usize, usize, usize),
    /// Index of the tensor, and one step per index; indices outside the shape are clamped.
    Load(usize, Vec<usize>),
}

/// A typed expression, ready to be evaluated.
#[derive(Debug, Clone, PartialEq)]
pub struct Program {
    steps: Vec<Step>,
    types: Vec<Type>,
}

/// Limit of the number of operations, on which every engine may rely; more are a mistake (or an attack).
const MAX_STEPS: usize = 1024;

struct Builder<'a> {
    aux: &'a [AuxSpec],
    steps: Vec<Step>,
    types: Vec<Type>,
    known: HashMap<Step, usize>,
}

impl Builder<'_> {
    fn push(&mut self, step: Step, ty: Type) -> Result<usize, ExprError> {
        if let Some(&at) = self.known.get(&step) {
            return Ok(at);
        }
        let at = self.steps.len();
        if at >= MAX_STEPS {
            return Err(ExprError::TooLarge { max: MAX_STEPS });
        }
        self.known.insert(step.clone(), at);
        self.steps.push(step);
        self.types.push(ty);
        Ok(at)
    }

    /// The step as a float, converted if it is an integer.
    fn float(&mut self, at: usize, whole: &Expr, operand: &Expr) -> Result<usize, ExprError> {
        match self.types[at] {
            Type::Float => Ok(at),
            Type::Int => self.push(Step::Unary(Unary::ToFloat, at), Type::Float),
            Type::Bool => Err(wrong(whole, operand, Type::Bool, "a number")),
        }
    }

    fn want(&self, at: usize, want: Type, whole: &Expr, operand: &Expr) -> Result<(), ExprError> {
        if self.types[at] == want { Ok(()) } else { Err(wrong(whole, operand, self.types[at], want.name())) }
    }

    fn add(&mut self, e: &Expr) -> Result<usize, ExprError> {
        match &*e.0 {
            Node::Var(v) => self.push(Step::Var(*v), if *v == Var::Score { Type::Float } else { Type::Int }),
            Node::Float(x) => self.push(Step::Float(x.to_bits()), Type::Float),
            Node::Int(x) => self.push(Step::Int(*x), Type::Int),
            Node::Bool(x) => self.push(Step::Bool(*x), Type::Bool),
            Node::TooLarge => Err(ExprError::TooLarge { max: MAX_STEPS }),
            Node::Unary(op, a) => {
                let mut x = self.add(a)?;
                let ty = match op {
                    Unary::Neg | Unary::Abs => match self.types[x] {
                        Type::Bool => return Err(wrong(e, a, Type::Bool, "a number")),
                        ty => ty,
                    },
                    Unary::Exp | Unary::Log | Unary::Sqrt | Unary::Tanh => {
                        x = self.float(x, e, a)?;
                        Type::Float
                    }
                    Unary::ToFloat => {
                        return self.float(x, e, a);
                    }
                    Unary::Floor => {
                        if self.types[x] == Type::Int {
                            return Ok(x);
                        }
                        self.want(x, Type::Float, e, a)?;
                        Type::Int
                    }
                    Unary::Not => {
                        self.want(x, Type::Bool, e, a)?;
                        Type::Bool
                    }
                };
                self.push(Step::Unary(*op, x), ty)
            }
            Node::Binary(op, a, b) => {
                let (mut x, mut y) = (self.add(a)?, self.add(b)?);
                if matches!(op, Binary::And | Binary::Or) {
                    self.want(x, Type::Bool, e, a)?;
                    self.want(y, Type::Bool, e, b)?;
                    return self.push(Step::Binary(*op, x, y), Type::Bool);
                }
                if *op == Binary::Rem {
                    self.want(x, Type::Int, e, a)?;
                    self.want(y, Type::Int, e, b)?;
                } else if self.types[x] != self.types[y] || self.types[x] == Type::Bool {
                    x = self.float(x, e, a)?;
                    y = self.float(y, e, b)?;
                }
                let ty = match op {
                    Binary::Eq | Binary::Lt | Binary::Le => Type::Bool,
                    _ => self.types[x],
                };
                self.push(Step::Binary(*op, x, y), ty)
            }
            Node::Select(c, a, b) => {
                let condition = self.add(c)?;
                self.want(condition, Type::Bool, e, c)?;
                let (mut x, mut y) = (self.add(a)?, self.add(b)?);
                if self.types[x] != self.types[y] {
                    x = self.float(x, e, a)?;
                    y = self.float(y, e, b)?;
                }
                let ty = self.types[x];
                self.push(Step::Select(condition, x, y), ty)
            }
            Node::Load { name, at } => {
                let found = self.aux.iter().position(|spec| spec.name == *name);
                let tensor = found.ok_or_else(|| ExprError::Unknown {
                    expr: e.to_string(),
                    name: name.to_string(),
                    declared: self.aux.iter().map(|spec| spec.name.to_string()).collect(),
                })?;
                let spec = &self.aux[tensor];
                let (rank, dtype) = (spec.shape.len(), spec.dtype);
                if at.len() != rank {
                    return Err(ExprError::Rank { expr: e.to_string(), name: name.to_string(), got: at.len(), rank });
                }
                let mut indices = Vec::with_capacity(rank);
                for index in at {
                    let step = self.add(index)?;
                    self.want(step, Type::Int, e, index)?;
                    indices.push(step);
                }
                let ty = if dtype.is_float() { Type::Float } else { Type::Int };
                self.push(Step::Load(tensor, indices), ty)
            }
        }
    }
}

fn wrong(whole: &Expr, operand: &Expr, got: Type, allowed: &'static str) -> ExprError {
    ExprError::Operand { expr: whole.to_string(), operand: operand.to_string(), got: got.name(), allowed }
}

/// The inputs of a program: one element of the score matrix.
#[derive(Debug, Clone, Copy)]
pub struct Env<'a> {
    /// The scaled score.
    pub score: f64,
    /// Index of the sequence.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query index.
    pub q: usize,
    /// Key index.
    pub k: usize,
    /// Queries of this sequence.
    pub q_len: usize,
    /// Keys of this sequence.
    pub k_len: usize,
    /// The auxiliary tensors, in the order of the problem.
    pub aux: &'a [TensorView<'a>],
}

/// The value of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)] // the variants are those of `Type`
pub enum Value {
    Float(f64),
    /// Always in the range of an i32.
    Int(i64),
    Bool(bool),
}

/// Wraps to the range of an i32. Results of operations on two i32 fit an i64, so nothing is lost before.
fn wrap(x: i64) -> i64 {
    i64::from(x as i32)
}

/// Rounds down; saturates outside the range, and gives 0 for NaN.
pub(crate) fn floor(x: f64) -> i64 {
    i64::from(x.floor() as i32)
}

impl Value {
    /// The value of a float.
    pub fn float(self) -> f64 {
        match self {
            Value::Float(x) => x,
            Value::Int(x) => x as f64,
            Value::Bool(x) => f64::from(u8::from(x)),
        }
    }
    /// The value of an integer; conditions count as 0 and 1.
    pub fn int(self) -> i64 {
        match self {
            Value::Float(x) => x as i64,
            Value::Int(x) => x,
            Value::Bool(x) => i64::from(x),
        }
    }
    /// The value of a condition; nonzero numbers count as true.
    pub fn bool(self) -> bool {
        match self {
            Value::Float(x) => x != 0.0,
            Value::Int(x) => x != 0,
            Value::Bool(x) => x,
        }
    }
}

/// Integer division of two i32, rounding down; 0 if the divisor is 0.
pub(crate) fn div_floor(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    if a % b != 0 && (a < 0) != (b < 0) { a / b - 1 } else { a / b }
}

impl Program {
    /// Checks names and types and flattens the expression. `aux` defines the indices of the tensors.
    pub fn compile(e: &Expr, aux: &[AuxSpec], want: Type) -> Result<Program, ExprError> {
        let mut builder = Builder { aux, steps: Vec::new(), types: Vec::new(), known: HashMap::new() };
        let mut last = builder.add(e)?;
        if want == Type::Float && builder.types[last] == Type::Int {
            last = builder.push(Step::Unary(Unary::ToFloat, last), Type::Float)?;
        }
        let got = builder.types[last];
        if got != want {
            return Err(ExprError::Output { expr: e.to_string(), got: got.name(), allowed: want.name() });
        }
        // The output is the last step; steps after a shared output are not needed.
        builder.steps.truncate(last + 1);
        builder.types.truncate(last + 1);
        Ok(Program { steps: builder.steps, types: builder.types })
    }

    /// The operations in order; the last one is the result.
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// The type of each step.
    pub fn types(&self) -> &[Type] {
        &self.types
    }

    /// A step as text, as expressions print themselves; tensors have only their numbers.
    pub(crate) fn text(&self, step: usize) -> String {
        let of = |i: &usize| self.text(*i);
        match &self.steps[step] {
            Step::Var(v) => v.name().into(),
            Step::Float(bits) => format!("{:?}", f32::from_bits(*bits)),
            Step::Int(x) => x.to_string(),
            Step::Bool(x) => x.to_string(),
            Step::Unary(op, a) => format!("{}({})", op.name(), of(a)),
            Step::Binary(op @ (Binary::Min | Binary::Max), a, b) => format!("{}({}, {})", op.name(), of(a), of(b)),
            Step::Binary(op, a, b) => format!("({} {} {})", of(a), op.name(), of(b)),
            Step::Select(c, a, b) => format!("select({}, {}, {})", of(c), of(a), of(b)),
            Step::Load(tensor, at) => {
                format!("tensor {tensor}[{}]", at.iter().map(of).collect::<Vec<_>>().join(", "))
            }
        }
    }

    /// Whether some step reads `v`.
    pub fn reads(&self, v: Var) -> bool {
        self.steps.contains(&Step::Var(v))
    }

    /// The result for one element, in f64. This defines the meaning of a program.
    pub fn eval(&self, env: &Env<'_>) -> Value {
        let mut values: Vec<Value> = Vec::with_capacity(self.steps.len());
        for (step, ty) in self.steps.iter().zip(&self.types) {
            let value = match step {
                Step::Var(v) => match v {
                    Var::Score => Value::Float(env.score),
                    Var::Batch => Value::Int(env.batch as i64),
                    Var::Head => Value::Int(env.head as i64),
                    Var::Query => Value::Int(env.q as i64),
                    Var::Key => Value::Int(env.k as i64),
                    Var::QueryLen => Value::Int(env.q_len as i64),
                    Var::KeyLen => Value::Int(env.k_len as i64),
                },
                Step::Float(bits) => Value::Float(f64::from(f32::from_bits(*bits))),
                Step::Int(x) => Value::Int(i64::from(*x)),
                Step::Bool(x) => Value::Bool(*x),
                Step::Unary(op, a) => unary(*op, values[*a]),
                Step::Binary(op, a, b) => binary(*op, values[*a], values[*b]),
                Step::Select(c, a, b) => {
                    if values[*c].bool() {
                        values[*a]
                    } else {
                        values[*b]
                    }
                }
                Step::Load(tensor, at) => {
                    let view = &env.aux[*tensor];
                    let mut offset = 0;
                    for (axis, index) in at.iter().enumerate() {
                        let last = view.shape()[axis].saturating_sub(1) as i64;
                        offset += values[*index].int().clamp(0, last) as usize * view.strides()[axis];
                    }
                    if *ty == Type::Float { Value::Float(view.at(offset)) } else { Value::Int(view.at(offset) as i64) }
                }
            };
            values.push(value);
        }
        values[values.len() - 1]
    }
}

fn unary(op: Unary, a: Value) -> Value {
    match (op, a) {
        (Unary::Neg, Value::Float(x)) => Value::Float(-x),
        (Unary::Neg, x) => Value::Int(wrap(-x.int())),
        (Unary::Abs, Value::Float(x)) => Value::Float(x.abs()),
        (Unary::Abs, x) => Value::Int(wrap(x.int().abs())),
        (Unary::Exp, x) => Value::Float(x.float().exp()),
        (Unary::Log, x) => Value::Float(x.float().ln()),
        (Unary::Sqrt, x) => Value::Float(x.float().sqrt()),
        (Unary::Tanh, x) => Value::Float(x.float().tanh()),
        (Unary::Not, x) => Value::Bool(!x.bool()),
        (Unary::ToFloat, x) => Value::Float(x.float()),
        (Unary::Floor, x) => Value::Int(floor(x.float())),
    }
}

fn binary(op: Binary, a: Value, b: Value) -> Value {
    let floats = matches!(a, Value::Float(_));
    let (x, y) = (a.float(), b.float());
    // Only for two integers: a float beyond the range of an i32 cannot be converted.
    let (i, j) = if floats { (0, 0) } else { (a.int(), b.int()) };
    let number = |float: f64, int: i64| if floats { Value::Float(float) } else { Value::Int(wrap(int)) };
    match op {
        Binary::Add => number(x + y, i + j),
        Binary::Sub => number(x - y, i - j),
        Binary::Mul => number(x * y, i * j),
        Binary::Div => number(x / y, div_floor(i, j)),
        Binary::Rem => Value::Int(if j == 0 { 0 } else { i - j * div_floor(i, j) }),
        // A NaN on either side is kept: a NaN score must not vanish in a clamp.
        Binary::Min => number(if x.is_nan() || x <= y { x } else { y }, i.min(j)),
        Binary::Max => number(if x.is_nan() || x >= y { x } else { y }, i.max(j)),
        Binary::Eq => Value::Bool(if floats { x == y } else { i == j }),
        Binary::Lt => Value::Bool(if floats { x < y } else { i < j }),
        Binary::Le => Value::Bool(if floats { x <= y } else { i <= j }),
        Binary::And => Value::Bool(a.bool() && b.bool()),
        Binary::Or => Value::Bool(a.bool() || b.bool()),
    }
}
