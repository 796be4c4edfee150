//! Score and mask modifiers as expressions.
//!
//! An [`Expr`] is a tree over the score, the batch, head, query and key indices, the lengths of the sequence, and
//! elements of auxiliary tensors. It is a value with four readers: the oracle evaluates it in f64, the CPU engine
//! evaluates it a tile at a time, GPU kernels lower it to instructions, and backward differentiates it. Indices are
//! relative to the sequence. Integers have 32 bits and wrap; they are promoted to floats when combined with floats;
//! booleans never are. Types are checked when the problem is built.
//!
//! ```
//! use fulgurite_core::expr::{k, k_len, q, q_len, score};
//!
//! // Keys far to the left fade, keys to the right are hidden.
//! let distance = q() + k_len() - q_len() - k();
//! let fade = score() - 0.1 * distance.clone().to_float();
//! let visible = distance.at_least(0);
//! assert_eq!(fade.to_string(), "(score - (0.1 * float((((q + k_len) - q_len) - k))))");
//! assert_eq!(visible.to_string(), "((((q + k_len) - q_len) - k) >= 0)");
//! ```

mod derivative;
mod interval;
mod program;

pub use interval::{Coverage, Domain, Interval};
pub use program::{AuxSpec, Env, ExprError, Program, Step, Type, Value};

use std::fmt;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Rem, Sub};
use std::sync::Arc;

/// Variables of an expression, besides auxiliary tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Var {
    /// The score, scaled and changed by earlier modifiers. Not allowed in masks.
    Score,
    /// Index of the sequence in the batch.
    Batch,
    /// Query head.
    Head,
    /// Query index in its sequence.
    Query,
    /// Key index in its sequence.
    Key,
    /// Number of queries of the sequence.
    QueryLen,
    /// Number of keys of the sequence.
    KeyLen,
}

impl Var {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Var::Score => "score",
            Var::Batch => "batch",
            Var::Head => "head",
            Var::Query => "q",
            Var::Key => "k",
            Var::QueryLen => "q_len",
            Var::KeyLen => "k_len",
        }
    }
}

/// Operations on one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unary {
    /// The negative of x.
    Neg,
    /// Magnitude; its derivative at 0 is 0.
    Abs,
    /// e to the power of x.
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// Hyperbolic tangent.
    Tanh,
    /// Logical not.
    Not,
    /// Integer to float.
    ToFloat,
    /// Float to integer, rounding down; values outside i32 saturate, NaN becomes 0.
    Floor,
}

/// Operations on two values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Binary {
    /// x + y
    Add,
    /// x - y
    Sub,
    /// x * y
    Mul,
    /// x / y; integers round down, and division by integer 0 gives 0.
    Div,
    /// x - y * floor(x / y), on integers; 0 if y is 0.
    Rem,
    /// The smaller of both; at a tie the derivative is the first argument's.
    Min,
    /// The larger of both; at a tie the derivative is the first argument's.
    Max,
    /// x == y
    Eq,
    /// x < y
    Lt,
    /// x <= y
    Le,
    /// Logical and.
    And,
    /// Logical or.
    Or,
}

impl Unary {
    /// As it is printed before its operand.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Unary::Neg => "-",
            Unary::Abs => "abs",
            Unary::Exp => "exp",
            Unary::Log => "log",
            Unary::Sqrt => "sqrt",
            Unary::Tanh => "tanh",
            Unary::Not => "!",
            Unary::ToFloat => "float",
            Unary::Floor => "floor",
        }
    }
}

impl Binary {
    /// As it is printed between its operands; `min` and `max` stand before them.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Binary::Add => "+",
            Binary::Sub => "-",
            Binary::Mul => "*",
            Binary::Div => "/",
            Binary::Rem => "%",
            Binary::Min => "min",
            Binary::Max => "max",
            Binary::Eq => "==",
            Binary::Lt => "<",
            Binary::Le => "<=",
            Binary::And => "&",
            Binary::Or => "|",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Var(Var),
    Float(f32),
    Int(i32),
    Bool(bool),
    Unary(Unary, Expr),
    Binary(Binary, Expr, Expr),
    Select(Expr, Expr, Expr),
    Load {
        name: Arc<str>,
        at: Vec<Expr>,
    },
    /// Replaces a tree beyond [`MAX_NODES`]; compiling it is an error.
    TooLarge,
}

/// Limit of a tree's size; a larger one is a mistake (or an attack). Subtrees are shared, so a few doublings would
/// build a tree that no traversal could finish, and a long chain would exhaust the stack.
pub(crate) const MAX_NODES: u32 = 4096;

/// A modifier: cheap to clone, and built with operators and the functions of this module.
#[derive(Clone, PartialEq)]
pub struct Expr(pub(crate) Arc<Node>, u32);

fn var(v: Var) -> Expr {
    Expr::new(Node::Var(v))
}

/// The score after the previous modifier, scaled, in natural units.
pub fn score() -> Expr {
    var(Var::Score)
}
/// Index of the sequence in the batch.
pub fn batch() -> Expr {
    var(Var::Batch)
}
/// Query head.
pub fn head() -> Expr {
    var(Var::Head)
}
/// Query index in its sequence.
pub fn q() -> Expr {
    var(Var::Query)
}
/// Key index in its sequence.
pub fn k() -> Expr {
    var(Var::Key)
}
/// Number of queries of the sequence.
pub fn q_len() -> Expr {
    var(Var::QueryLen)
}
/// Number of keys of the sequence.
pub fn k_len() -> Expr {
    var(Var::KeyLen)
}
/// An element of the auxiliary tensor `name`, one index for each of its axes.
pub fn load(name: &str, at: impl IntoIterator<Item = Expr>) -> Expr {
    Expr::new(Node::Load { name: name.into(), at: at.into_iter().collect() })
}
/// `yes` if `condition` holds, else `no`.
pub fn select(condition: Expr, yes: impl Into<Expr>, no: impl Into<Expr>) -> Expr {
    Expr::new(Node::Select(condition, yes.into(), no.into()))
}

impl Expr {
    fn new(node: Node) -> Expr {
        let size = |parts: &[&Expr]| parts.iter().fold(1u32, |sum, e| sum.saturating_add(e.1));
        let nodes = match &node {
            Node::Unary(_, a) => size(&[a]),
            Node::Binary(_, a, b) => size(&[a, b]),
            Node::Select(c, a, b) => size(&[c, a, b]),
            Node::Load { at, .. } => size(&at.iter().collect::<Vec<_>>()),
            Node::Var(_) | Node::Float(_) | Node::Int(_) | Node::Bool(_) | Node::TooLarge => 1,
        };
        if nodes > MAX_NODES { Expr(Arc::new(Node::TooLarge), 1) } else { Expr(Arc::new(node), nodes) }
    }

    pub(crate) fn unary(self, op: Unary) -> Expr {
        Expr::new(Node::Unary(op, self))
    }
    pub(crate) fn binary(self, op: Binary, rhs: impl Into<Expr>) -> Expr {
        Expr::new(Node::Binary(op, self, rhs.into()))
    }

    /// Magnitude.
    pub fn abs(self) -> Expr {
        self.unary(Unary::Abs)
    }
    /// e to the power of this.
    pub fn exp(self) -> Expr {
        self.unary(Unary::Exp)
    }
    /// Natural logarithm.
    pub fn log(self) -> Expr {
        self.unary(Unary::Log)
    }
    /// Square root.
    pub fn sqrt(self) -> Expr {
        self.unary(Unary::Sqrt)
    }
    /// Hyperbolic tangent.
    pub fn tanh(self) -> Expr {
        self.unary(Unary::Tanh)
    }
    /// An integer as a float.
    pub fn to_float(self) -> Expr {
        self.unary(Unary::ToFloat)
    }
    /// The largest integer not above this float.
    pub fn floor(self) -> Expr {
        self.unary(Unary::Floor)
    }
    /// The smaller of two.
    pub fn min(self, rhs: impl Into<Expr>) -> Expr {
        self.binary(Binary::Min, rhs)
    }
    /// The larger of two.
    pub fn max(self, rhs: impl Into<Expr>) -> Expr {
        self.binary(Binary::Max, rhs)
    }
    /// this == rhs
    pub fn equals(self, rhs: impl Into<Expr>) -> Expr {
        self.binary(Binary::Eq, rhs)
    }
    /// this != rhs
    pub fn differs(self, rhs: impl Into<Expr>) -> Expr {
        !self.equals(rhs)
    }
    /// this < rhs
    pub fn less(self, rhs: impl Into<Expr>) -> Expr {
        self.binary(Binary::Lt, rhs)
    }
    /// this <= rhs
    pub fn at_most(self, rhs: impl Into<Expr>) -> Expr {
        self.binary(Binary::Le, rhs)
    }
    /// this > rhs
    pub fn more(self, rhs: impl Into<Expr>) -> Expr {
        rhs.into().less(self)
    }
    /// this >= rhs
    pub fn at_least(self, rhs: impl Into<Expr>) -> Expr {
        rhs.into().at_most(self)
    }

    /// This expression with every occurrence of the score replaced: `g.after(f)` is g(f(score)).
    pub fn after(&self, inner: &Expr) -> Expr {
        self.map(&|node| matches!(node, Node::Var(Var::Score)).then(|| inner.clone()))
    }

    /// Rebuilds the tree, replacing every node for which `replace` returns an expression.
    pub(crate) fn map(&self, replace: &dyn Fn(&Node) -> Option<Expr>) -> Expr {
        if let Some(other) = replace(&self.0) {
            return other;
        }
        let node = match &*self.0 {
            Node::Unary(op, a) => Node::Unary(*op, a.map(replace)),
            Node::Binary(op, a, b) => Node::Binary(*op, a.map(replace), b.map(replace)),
            Node::Select(c, a, b) => Node::Select(c.map(replace), a.map(replace), b.map(replace)),
            Node::Load { name, at } => {
                Node::Load { name: name.clone(), at: at.iter().map(|e| e.map(replace)).collect() }
            }
            Node::Var(_) | Node::Float(_) | Node::Int(_) | Node::Bool(_) | Node::TooLarge => return self.clone(),
        };
        Expr::new(node)
    }

    /// Calls `visit` on every node, children first.
    pub(crate) fn walk(&self, visit: &mut dyn FnMut(&Expr)) {
        match &*self.0 {
            Node::Unary(_, a) => a.walk(visit),
            Node::Binary(_, a, b) => {
                a.walk(visit);
                b.walk(visit);
            }
            Node::Select(c, a, b) => {
                c.walk(visit);
                a.walk(visit);
                b.walk(visit);
            }
            Node::Load { at, .. } => at.iter().for_each(|e| e.walk(visit)),
            Node::Var(_) | Node::Float(_) | Node::Int(_) | Node::Bool(_) | Node::TooLarge => {}
        }
        visit(self);
    }

    /// The names of the auxiliary tensors this expression reads, each once, in order of appearance.
    pub fn aux_names(&self) -> Vec<Arc<str>> {
        let mut names: Vec<Arc<str>> = Vec::new();
        self.walk(&mut |e| {
            if let Node::Load { name, .. } = &*e.0
                && !names.contains(name)
            {
                names.push(name.clone());
            }
        });
        names
    }
}

impl From<f32> for Expr {
    fn from(x: f32) -> Self {
        Expr::new(Node::Float(x))
    }
}
impl From<i32> for Expr {
    fn from(x: i32) -> Self {
        Expr::new(Node::Int(x))
    }
}
impl From<bool> for Expr {
    fn from(x: bool) -> Self {
        Expr::new(Node::Bool(x))
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $op:ident;)*) => {$(
        impl<T: Into<Expr>> $trait<T> for Expr {
            type Output = Expr;
            fn $method(self, rhs: T) -> Expr {
                self.binary(Binary::$op, rhs)
            }
        }
        impl $trait<Expr> for f32 {
            type Output = Expr;
            fn $method(self, rhs: Expr) -> Expr {
                Expr::from(self).binary(Binary::$op, rhs)
            }
        }
        impl $trait<Expr> for i32 {
            type Output = Expr;
            fn $method(self, rhs: Expr) -> Expr {
                Expr::from(self).binary(Binary::$op, rhs)
            }
        }
    )*};
}

operators! {
    Add add Add;
    Sub sub Sub;
    Mul mul Mul;
    Div div Div;
    Rem rem Rem;
}

impl<T: Into<Expr>> BitAnd<T> for Expr {
    type Output = Expr;
    fn bitand(self, rhs: T) -> Expr {
        self.binary(Binary::And, rhs)
    }
}
impl<T: Into<Expr>> BitOr<T> for Expr {
    type Output = Expr;
    fn bitor(self, rhs: T) -> Expr {
        self.binary(Binary::Or, rhs)
    }
}
impl Not for Expr {
    type Output = Expr;
    fn not(self) -> Expr {
        self.unary(Unary::Not)
    }
}
impl Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        self.unary(Unary::Neg)
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Node::Var(v) => f.write_str(v.name()),
            Node::Float(x) => write!(f, "{x:?}"),
            Node::Int(x) => write!(f, "{x}"),
            Node::Bool(x) => write!(f, "{x}"),
            Node::TooLarge => f.write_str("..."),
            Node::Unary(op, a) => {
                write!(f, "{}({a})", op.name())
            }
            Node::Binary(op, a, b) => match op {
                Binary::Min => write!(f, "min({a}, {b})"),
                Binary::Max => write!(f, "max({a}, {b})"),
                // `more` and `at_least` are stored with swapped sides; they are recognised by a constant on the left.
                Binary::Lt if matches!(*a.0, Node::Int(_) | Node::Float(_)) => write!(f, "({b} > {a})"),
                Binary::Le if matches!(*a.0, Node::Int(_) | Node::Float(_)) => write!(f, "({b} >= {a})"),
                _ => write!(f, "({a} {} {b})", op.name()),
            },
            Node::Select(c, a, b) => write!(f, "select({c}, {a}, {b})"),
            Node::Load { name, at } => {
                write!(f, "{name}[")?;
                for (i, e) in at.iter().enumerate() {
                    write!(f, "{}{e}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
        }
    }
}

impl fmt::Debug for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
