//! The way that a forward call takes, derived from the problem alone.

use crate::decode;
use crate::evaluate::TileProgram;
use crate::modify::MOST_WORDS;
use crate::simd::{DEPTH, GROUP, Kernels, MatrixKernels, parts};
use crate::tiles::exp_kind;
use crate::unit::Vectors;
use crate::{Isa, Options};
use fulgurite_core::expr::Var;
use fulgurite_core::{Mask, Precision, Problem};
use std::fmt;

/// Vector operations of the softmax on a score: loads, subtraction, scale, exponential, sum and store.
const SOFTMAX: f64 = 14.0;

/// How a forward call goes through the scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Path {
    /// Few queries: the keys are read once, all heads together, in parts of fixed length.
    Decode,
    /// A tile of queries takes one block of keys after the other.
    Blocks,
    /// A tile of queries takes several blocks in one piece of code, which multiplies on the matrix unit while the vectors
    /// exponentiate.
    Pipelined,
}

/// What a mask becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MaskForm {
    /// There is none, or it is an interval of keys for each query.
    Intervals,
    /// Bits, made once per call and shared by heads. Without a matrix unit, a tile whose bits are an interval goes on
    /// without them; padding is such a mask.
    Bits,
    /// It depends on the head, or its bits would take too much memory: every tile evaluates its own scores.
    Evaluated,
}

/// The way of a forward call, and what it costs by a count of vector operations.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Way {
    /// How it goes through the scores.
    pub path: Path,
    /// What the mask becomes.
    pub mask: MaskForm,
    /// Queries of a tile, heads of a group included, and keys of a block.
    pub tile: [usize; 2],
    /// Scores that the intervals of the mask keep, over all heads.
    pub scores: f64,
    /// Floating-point operations of both products over these scores.
    pub flops: f64,
    /// Vector operations on a score: in the products, counted as if vectors did them at the unit's rate, and in the
    /// softmax.
    pub plain_operations: f64,
    /// Vector operations on a score by the modifiers.
    pub modifier_operations: f64,
}

impl Way {
    /// The way of a problem with these options. Packed sequences count as their longest.
    ///
    /// ```
    /// use fulgurite_core::Problem;
    /// use fulgurite_cpu::{Options, Way};
    /// let plain = || Problem::builder().dense(1, 512, 512).heads(8, 8).head_dim(64);
    /// let (plain, capped) = (plain().build()?, plain().softcap(30.0).build()?);
    /// let cost = |problem| Way::of(problem, &Options::default()).cost();
    /// assert_eq!(cost(&plain), 1.0);
    /// assert!(cost(&capped) > 1.0);
    /// # Ok::<(), fulgurite_core::ProblemError>(())
    /// ```
    pub fn of(problem: &Problem, options: &Options) -> Way {
        let kernels = options.kernels();
        let unit = kernels.matrix_for(problem.dtype());
        let path = path(problem, unit);
        let block = match unit {
            _ if path == Path::Decode => decode::BLOCK,
            Some(_) => MatrixKernels::BLOCK,
            None => Vectors::BLOCK,
        };
        let (d, dv) = (problem.head_dim(), problem.value_dim());
        let scores = scores(problem);
        let one_head = problem.blocks().is_some_and(|spec| spec.heads > 1) || problem.group() == 1;
        let modifiers = problem.score_program().map(|program| TileProgram::new(program, one_head));
        Way {
            path,
            mask: mask(problem, kernels, one_head),
            tile: [kernels.tile, block],
            scores,
            flops: 2.0 * (d + dv) as f64 * scores,
            plain_operations: (d + dv) as f64 / rate(problem, options, unit) + SOFTMAX,
            modifier_operations: modifiers.map_or(0.0, |plan| plan.operations()),
        }
    }

    /// Time beside plain attention over the same scores, estimated from the operations: 1 without modifiers.
    pub fn cost(&self) -> f64 {
        1.0 + self.modifier_operations / self.plain_operations
    }
}

/// Products of a unit in the time of one vector operation.
fn rate(problem: &Problem, options: &Options, unit: Option<&MatrixKernels>) -> f64 {
    let on_tiles = options.isa.unwrap_or_else(|| Isa::available()[0]) == Isa::Amx;
    match unit {
        // A tile product takes as long as 16 vector operations and does the work of 256. Numbers in parts multiply every
        // part by those that count.
        Some(_) if on_tiles => 16.0 / [1.0, 3.0, 6.0][parts(problem.dtype()) - 1],
        _ => 1.0,
    }
}

fn path(problem: &Problem, unit: Option<&'static MatrixKernels>) -> Path {
    let exp = exp_kind(problem);
    if decode::suits_rows(problem, exp, problem.max_q_len()) {
        return Path::Decode;
    }
    let native = problem.precision() == Precision::Native && problem.blocks().is_none();
    let sizes = [MatrixKernels::BLOCK / DEPTH, problem.head_dim().div_ceil(DEPTH), problem.value_dim().div_ceil(GROUP)];
    let pipelined =
        |unit: &MatrixKernels| parts(problem.dtype()) == 1 && unit.bf16.suits(exp) && unit.has_pipeline(sizes);
    if native && unit.is_some_and(pipelined) { Path::Pipelined } else { Path::Blocks }
}

fn mask(problem: &Problem, kernels: &Kernels, one_head: bool) -> MaskForm {
    let Some(rest) = problem.mask_rest() else { return MaskForm::Intervals };
    let plan = TileProgram::new(rest, one_head);
    let sequences = if plan.reads(Var::Batch) { problem.batch() } else { 1 };
    let tiles = (problem.max_q_len() * problem.group()).div_ceil(kernels.tile);
    let words = sequences.saturating_mul(tiles).saturating_mul(problem.max_k_len());
    if plan.reads(Var::Head) || words > MOST_WORDS { MaskForm::Evaluated } else { MaskForm::Bits }
}

/// Scores inside the intervals of the mask.
fn scores(problem: &Problem) -> f64 {
    let (q_len, k_len) = (problem.max_q_len(), problem.max_k_len());
    let mask: &Mask = problem.mask();
    let seen: f64 = (0..q_len).map(|q| mask.keys(q, q_len, k_len).len() as f64).sum();
    seen * problem.batch() as f64 * problem.q_heads() as f64
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, keys] = self.tile;
        match self.path {
            Path::Decode => write!(f, "decode, keys read once for all heads, {keys} at a time")?,
            Path::Blocks => write!(f, "tiles of {rows} queries by {keys} keys, one after the other")?,
            Path::Pipelined => {
                write!(f, "tiles of {rows} queries by {keys} keys, products and exponentials overlapped")?
            }
        }
        match self.mask {
            MaskForm::Intervals => {}
            MaskForm::Bits => write!(f, "; the mask becomes bits once per call")?,
            MaskForm::Evaluated => write!(f, "; every tile evaluates the mask")?,
        }
        write!(f, "; {:.3} GFLOP in products", self.flops / 1e9)?;
        if self.modifier_operations > 0.0 {
            let (own, plain) = (self.modifier_operations, self.plain_operations);
            write!(
                f,
                "; modifiers add {own:.0} vector operations to the {plain:.0} of a score, about {:.2} of plain",
                self.cost()
            )?;
        }
        Ok(())
    }
}
