//! The attention problem as one validated value.

use crate::block::BlockSpec;
use crate::dtype::DType;
use crate::error::{OffsetsError, ProblemError};
use crate::exp::Exp;
use crate::expr::{AuxSpec, Domain, Expr, ExprError, Program, Type, Var, batch, head, k, k_len, load, q, q_len, score};
pub use crate::limits::MAX_HEAD_DIM;
use crate::mask::{DOCUMENTS_K, DOCUMENTS_Q, FAR, Mask, PREFIX_LENGTHS};
use crate::precision::{Precision, PrecisionError};
use crate::tensor::Dims;

/// Auxiliary tensor of [`ProblemBuilder::alibi`]: f32, `[q_heads]`.
pub const ALIBI_SLOPES: &str = "alibi_slopes";
/// Auxiliary tensor of [`ProblemBuilder::bias`].
pub const BIAS: &str = "bias";

/// The layout of sequences in the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[batch, sequence, heads, head_dim]`: every sequence has memory for the same number of rows.
    Dense {
        /// Number of sequences.
        batch: usize,
        /// Query rows per sequence.
        q_len: usize,
        /// Key rows per sequence.
        k_len: usize,
    },
    /// `[total, heads, head_dim]`: packed sequences, with offsets in `cu_seqlens`.
    Packed(Packed),
}

/// Sizes of a packed batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Packed {
    /// Number of sequences.
    pub batch: usize,
    /// Rows of q.
    pub total_q: usize,
    /// Rows of k and v.
    pub total_k: usize,
    /// Largest number of queries of a sequence.
    pub max_q: usize,
    /// Largest number of keys of a sequence.
    pub max_k: usize,
}

/// Checks cumulative offsets and returns (total, longest).
pub(crate) fn check_offsets(arg: &'static str, offsets: &[i32]) -> Result<(usize, usize), OffsetsError> {
    if offsets.first() != Some(&0) {
        return Err(OffsetsError::Begin { arg, got: offsets.first().copied() });
    }
    let mut longest = 0;
    for (i, pair) in offsets.windows(2).enumerate() {
        if pair[1] < pair[0] {
            return Err(OffsetsError::NotMonotonic { arg, at: i + 1, got: pair[1], before: pair[0] });
        }
        longest = longest.max((pair[1] - pair[0]) as usize);
    }
    Ok((offsets[offsets.len() - 1] as usize, longest))
}

/// The gradient of one element that a score modifier loads.
#[derive(Debug, Clone, PartialEq)]
pub struct AuxGradient {
    /// Index of the auxiliary tensor.
    pub aux: usize,
    /// One program per index of the load.
    pub at: Vec<Program>,
    /// Derivative of the modified score with respect to the element.
    pub derivative: Program,
}

/// A validated attention problem: structure only. Contents come with the [`Inputs`](crate::Inputs).
///
/// ```
/// use fulgurite_core::{DType, Mask, Problem};
///
/// let problem = Problem::builder()
///     .dense(2, 128, 128)
///     .heads(8, 2)
///     .head_dim(64)
///     .dtype(DType::Bf16)
///     .mask(Mask::causal())
///     .build()?;
/// assert_eq!(problem.q_shape(), [2, 128, 8, 64]);
///
/// let refused = Problem::builder().dense(2, 128, 128).heads(8, 3).head_dim(64).build();
/// assert!(refused.unwrap_err().to_string().contains("8 query heads over 3"));
/// # Ok::<(), fulgurite_core::ProblemError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    layout: Layout,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    dtype: DType,
    scale: f32,
    mask: Mask,
    score_mod: Option<Expr>,
    has_softcap: bool,
    aux: Vec<AuxSpec>,
    sinks: bool,
    used_q: bool,
    used_k: bool,
    blocks: Option<BlockSpec>,
    exp: Exp,
    precision: Precision,
    programs: Programs,
}

#[derive(Debug, Clone, PartialEq)]
struct Programs {
    score: Option<Program>,
    score_derivative: Option<Program>,
    mask: Option<Program>,
    mask_rest: Option<Program>,
    aux_gradients: Vec<AuxGradient>,
}

impl Problem {
    /// Starts the description of a problem.
    pub fn builder() -> ProblemBuilder {
        ProblemBuilder::default()
    }

    /// The layout of sequences in the tensors.
    pub fn layout(&self) -> Layout {
        self.layout
    }
    /// Number of sequences.
    pub fn batch(&self) -> usize {
        match self.layout {
            Layout::Dense { batch, .. } => batch,
            Layout::Packed(p) => p.batch,
        }
    }
    /// Largest number of queries of a sequence.
    pub fn max_q_len(&self) -> usize {
        match self.layout {
            Layout::Dense { q_len, .. } => q_len,
            Layout::Packed(p) => p.max_q,
        }
    }
    /// Largest number of keys of a sequence.
    pub fn max_k_len(&self) -> usize {
        match self.layout {
            Layout::Dense { k_len, .. } => k_len,
            Layout::Packed(p) => p.max_k,
        }
    }
    /// Number of query heads.
    pub fn q_heads(&self) -> usize {
        self.q_heads
    }
    /// Number of key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }
    /// Number of query heads that share a key/value head: query head h uses key/value head h / group.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }
    /// Dimension of q and k.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }
    /// Dimension of v and o.
    pub fn value_dim(&self) -> usize {
        self.value_dim
    }
    /// Type of q, k, v and o.
    pub fn dtype(&self) -> DType {
        self.dtype
    }
    /// Factor of q . k.
    pub fn scale(&self) -> f32 {
        self.scale
    }
    /// This problem with another scale, which must be finite and positive.
    pub(crate) fn with_scale(&self, scale: f32) -> Problem {
        Problem { scale, ..self.clone() }
    }
    /// The mask: the keys that a query may see.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }
    /// All score modifiers as one expression.
    pub fn score_mod(&self) -> Option<&Expr> {
        self.score_mod.as_ref()
    }
    /// Whether scores have a softcap; the tolerance rule depends on it.
    pub fn has_softcap(&self) -> bool {
        self.has_softcap
    }
    /// The auxiliary tensors that expressions read; their order defines their indices.
    pub fn aux(&self) -> &[AuxSpec] {
        &self.aux
    }
    /// Whether a learnable sink per head is added to the denominator.
    pub fn has_sinks(&self) -> bool {
        self.sinks
    }
    /// Whether used lengths of q are given.
    pub fn has_used_q(&self) -> bool {
        self.used_q
    }
    /// Whether used lengths of k are given.
    pub fn has_used_k(&self) -> bool {
        self.used_k
    }
    /// The structure of the block mask, if there is one.
    pub fn blocks(&self) -> Option<BlockSpec> {
        self.blocks
    }
    /// The exponential of the softmax.
    pub fn exp(&self) -> Exp {
        self.exp
    }

    /// The number formats of the products.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// The modified score as a function of the scaled score.
    pub fn score_program(&self) -> Option<&Program> {
        self.programs.score.as_ref()
    }
    /// Derivative of the modified score with respect to the scaled score.
    pub fn score_derivative(&self) -> Option<&Program> {
        self.programs.score_derivative.as_ref()
    }
    /// The first integer operation of a modifier or mask whose exact result may leave 32 bits at this problem's lengths,
    /// as text, and the bounds of that result. What depends on contents of tensors is left out:
    /// [`Bound::past_32_bits`](crate::Bound::past_32_bits) reads them.
    pub fn past_32_bits(&self) -> Option<(String, i64, i64)> {
        let (q_len, k_len) = (self.max_q_len(), self.max_k_len());
        let domain = Domain {
            batch: 0..self.batch(),
            heads: 0..self.q_heads(),
            q: 0..q_len,
            k: 0..k_len,
            q_len: (0, q_len),
            k_len: (0, k_len),
            aux: &[],
        };
        if [self.batch(), q_len, k_len].contains(&0) {
            return None;
        }
        let programs = [self.score_program(), self.mask_program()];
        programs.into_iter().flatten().find_map(|program| program.past_32_bits(&domain, false))
    }

    /// Whether a modifier or mask computes with integers that it loads.
    pub fn computes_with_loads(&self) -> bool {
        [self.score_program(), self.mask_program()].into_iter().flatten().any(Program::computes_with_loads)
    }

    /// The whole mask; `None` if everything is visible.
    pub fn mask_program(&self) -> Option<&Program> {
        self.programs.mask.as_ref()
    }
    /// The part of the mask that is not a span.
    pub fn mask_rest(&self) -> Option<&Program> {
        self.programs.mask_rest.as_ref()
    }
    /// The loads from which gradients of auxiliary tensors come.
    pub fn aux_gradients(&self) -> &[AuxGradient] {
        &self.programs.aux_gradients
    }

    fn token_dims(&self, side: Side, heads: usize, dim: usize) -> Dims {
        match self.layout {
            Layout::Dense { batch, q_len, k_len } => {
                Dims::from([batch, if side == Side::Query { q_len } else { k_len }, heads, dim])
            }
            Layout::Packed(p) => Dims::from([if side == Side::Query { p.total_q } else { p.total_k }, heads, dim]),
        }
    }
    /// Shapes of q, k, v and o, without an allocation.
    pub(crate) fn row_dims(&self) -> [Dims; 4] {
        let (query, key) = (Side::Query, Side::Key);
        [
            self.token_dims(query, self.q_heads, self.head_dim),
            self.token_dims(key, self.kv_heads, self.head_dim),
            self.token_dims(key, self.kv_heads, self.value_dim),
            self.token_dims(query, self.q_heads, self.value_dim),
        ]
    }
    /// Shape of the LSE, without an allocation.
    pub fn lse_dims(&self) -> Dims {
        match self.layout {
            Layout::Dense { batch, q_len, .. } => Dims::from([batch, self.q_heads, q_len]),
            Layout::Packed(p) => Dims::from([self.q_heads, p.total_q]),
        }
    }
    /// Shape of q.
    pub fn q_shape(&self) -> Vec<usize> {
        self.row_dims()[0].to_vec()
    }
    /// Shape of k.
    pub fn k_shape(&self) -> Vec<usize> {
        self.row_dims()[1].to_vec()
    }
    /// Shape of v.
    pub fn v_shape(&self) -> Vec<usize> {
        self.row_dims()[2].to_vec()
    }
    /// Shape of o.
    pub fn o_shape(&self) -> Vec<usize> {
        self.row_dims()[3].to_vec()
    }
    /// Shape of the LSE: `[batch, heads, q_len]`, packed `[heads, total_q]`.
    pub fn lse_shape(&self) -> Vec<usize> {
        self.lse_dims().to_vec()
    }
}

/// The query side or the key side of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// q, o and their gradients.
    Query,
    /// k, v and their gradients.
    Key,
}

/// Describes a problem step by step; only [`build`](ProblemBuilder::build) can reject it.
#[derive(Debug, Clone, Default)]
pub struct ProblemBuilder {
    layout: Option<Layout>,
    offsets_error: Option<OffsetsError>,
    heads: Option<(usize, usize)>,
    head_dims: Option<(usize, usize)>,
    dtype: Option<DType>,
    scale: Option<f32>,
    mask: Mask,
    softcap: Option<f32>,
    alibi: bool,
    bias: Option<([usize; 4], DType, bool)>,
    score_mods: Vec<Expr>,
    aux: Vec<AuxSpec>,
    sinks: bool,
    used_q: bool,
    used_k: bool,
    blocks: Option<BlockSpec>,
    exp: Exp,
    precision: Precision,
}

impl ProblemBuilder {
    /// Sets dense sequences: `[batch, sequence, heads, head_dim]`.
    pub fn dense(mut self, batch: usize, q_len: usize, k_len: usize) -> Self {
        self.layout = Some(Layout::Dense { batch, q_len, k_len });
        self
    }
    /// Sets packed sequences, from their cumulative offsets.
    pub fn packed(mut self, cu_seqlens_q: &[i32], cu_seqlens_k: &[i32]) -> Self {
        let sizes = || -> Result<Packed, OffsetsError> {
            let (total_q, max_q) = check_offsets("cu_seqlens_q", cu_seqlens_q)?;
            let (total_k, max_k) = check_offsets("cu_seqlens_k", cu_seqlens_k)?;
            if cu_seqlens_q.len() != cu_seqlens_k.len() {
                return Err(OffsetsError::Batch { q: cu_seqlens_q.len(), k: cu_seqlens_k.len() });
            }
            Ok(Packed { batch: cu_seqlens_q.len() - 1, total_q, total_k, max_q, max_k })
        };
        match sizes() {
            Ok(packed) => self.layout = Some(Layout::Packed(packed)),
            Err(e) => self.offsets_error = Some(e),
        }
        self
    }
    /// Sets packed sequences, from their sizes alone (the offsets may be in device memory).
    pub fn packed_sizes(mut self, packed: Packed) -> Self {
        self.layout = Some(Layout::Packed(packed));
        self
    }
    /// Sets the number of query heads and of key/value heads.
    pub fn heads(mut self, q_heads: usize, kv_heads: usize) -> Self {
        self.heads = Some((q_heads, kv_heads));
        self
    }
    /// Sets one dimension for q, k and v.
    pub fn head_dim(self, dim: usize) -> Self {
        self.head_dims(dim, dim)
    }
    /// Sets the dimension of q and k, and that of v.
    pub fn head_dims(mut self, head_dim: usize, value_dim: usize) -> Self {
        self.head_dims = Some((head_dim, value_dim));
        self
    }
    /// Sets the type of q, k, v and o; the default is f32.
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }
    /// Sets the factor of q . k; the default is 1/sqrt(head_dim).
    pub fn scale(mut self, scale: f32) -> Self {
        self.scale = Some(scale);
        self
    }
    /// Adds a mask; several are combined with `and`.
    pub fn mask(mut self, mask: Mask) -> Self {
        self.mask = self.mask.and(mask);
        self
    }
    /// Widens the windows of the masks so far, as [`Mask::reaching`] does.
    pub fn windows_reaching(mut self, keys: i64) -> Self {
        self.mask = self.mask.reaching(keys);
        self
    }
    /// Applies cap * tanh(score / cap), before every other modifier.
    pub fn softcap(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }
    /// Subtracts alibi_slopes\[head\] * |q + k_len - q_len - k| from the score, after softcap.
    pub fn alibi(mut self) -> Self {
        self.alibi = true;
        self
    }
    /// Adds a bias to the score, after ALiBi. `shape` is `[batch, heads, q_len, k_len]`, each 1 or the full size.
    pub fn bias(mut self, shape: [usize; 4], dtype: DType, grad: bool) -> Self {
        self.bias = Some((shape, dtype, grad));
        self
    }
    /// Adds your own score modifier, after the built-in ones; several apply in the order given.
    pub fn score_mod(mut self, modifier: Expr) -> Self {
        self.score_mods.push(modifier);
        self
    }
    /// Declares an auxiliary tensor for expressions.
    pub fn aux(mut self, name: &str, dtype: DType, shape: &[usize]) -> Self {
        self.aux.push(AuxSpec { name: name.into(), dtype, shape: shape.to_vec(), grad: false });
        self
    }
    /// Declares an auxiliary tensor whose gradient backward computes.
    pub fn aux_with_grad(mut self, name: &str, dtype: DType, shape: &[usize]) -> Self {
        self.aux.push(AuxSpec { name: name.into(), dtype, shape: shape.to_vec(), grad: true });
        self
    }
    /// Adds one learnable logit per query head to the denominator.
    pub fn sinks(mut self) -> Self {
        self.sinks = true;
        self
    }
    /// Declares that used lengths are given for queries, for keys.
    pub fn used_lengths(mut self, queries: bool, keys: bool) -> Self {
        (self.used_q, self.used_k) = (queries, keys);
        self
    }
    /// Restricts attention to listed blocks.
    pub fn block_mask(mut self, spec: BlockSpec) -> Self {
        self.blocks = Some(spec);
        self
    }
    /// Sets the exponential.
    pub fn exp(mut self, exp: Exp) -> Self {
        self.exp = exp;
        self
    }

    /// Sets the number formats of the products; the default is that of the tensors.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Checks everything and builds the problem.
    pub fn build(self) -> Result<Problem, ProblemError> {
        if let Some(e) = self.offsets_error {
            return Err(e.into());
        }
        let layout = self.layout.ok_or(ProblemError::Missing { arg: "dense" })?;
        let (q_heads, kv_heads) = self.heads.ok_or(ProblemError::Missing { arg: "heads" })?;
        let (head_dim, value_dim) = self.head_dims.ok_or(ProblemError::Missing { arg: "head_dim" })?;
        if q_heads == 0 || kv_heads == 0 || q_heads % kv_heads != 0 {
            return Err(ProblemError::Heads { q: q_heads, kv: kv_heads });
        }
        for (arg, got) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if !(1..=MAX_HEAD_DIM).contains(&got) {
                return Err(ProblemError::HeadDim { arg, got });
            }
        }
        let dtype = self.dtype.unwrap_or(DType::F32);
        if !dtype.is_float() {
            return Err(ProblemError::DType { got: dtype });
        }
        let scale = self.scale.unwrap_or_else(|| (1.0 / (head_dim as f64).sqrt()) as f32);
        if !(scale.is_finite() && scale > 0.0) {
            return Err(ProblemError::Scale { got: scale });
        }
        ordinary("scale", scale)?;
        let lengths = match layout {
            Layout::Dense { batch, q_len, k_len } => {
                [("batch", batch), ("q_len", q_len), ("k_len", k_len), ("heads", q_heads)]
            }
            Layout::Packed(p) => [
                ("batch", p.batch),
                ("total_q", p.total_q.max(p.max_q)),
                ("total_k", p.total_k.max(p.max_k)),
                ("heads", q_heads),
            ],
        };
        for (arg, got) in lengths {
            if got >= FAR as usize {
                return Err(ProblemError::Length { arg, got });
            }
        }
        if let Some(spec) = self.blocks {
            spec.check()?;
        }
        let precision = self.precision.check()?;
        if matches!(precision, Precision::Int8(_)) && self.blocks.is_some() {
            return Err(PrecisionError::BlockMask.into());
        }
        self.exp.check_precision(precision)?;
        let mut problem = Problem {
            layout,
            q_heads,
            kv_heads,
            head_dim,
            value_dim,
            dtype,
            scale,
            mask: self.mask,
            score_mod: None,
            has_softcap: self.softcap.is_some(),
            aux: self.aux,
            sinks: self.sinks,
            used_q: self.used_q,
            used_k: self.used_k,
            blocks: self.blocks,
            exp: self.exp.check()?,
            precision,
            programs: Programs {
                score: None,
                score_derivative: None,
                mask: None,
                mask_rest: None,
                aux_gradients: Vec::new(),
            },
        };
        let shapes =
            [("q", problem.q_shape()), ("k", problem.k_shape()), ("v", problem.v_shape()), ("o", problem.o_shape())];
        for (arg, shape) in shapes {
            let bytes = shape.iter().try_fold(4usize, |n, &m| n.checked_mul(m.max(1)));
            if bytes.is_none_or(|b| b > isize::MAX as usize) {
                return Err(ProblemError::Overflow { arg, shape });
            }
        }
        let mut mods = Vec::new();
        if let Some(cap) = self.softcap {
            if !(cap.is_finite() && cap > 0.0) {
                return Err(ProblemError::Softcap { got: cap });
            }
            ordinary("softcap", cap)?;
            mods.push(cap * (score() / cap).tanh());
        }
        if self.alibi {
            problem.declare(ALIBI_SLOPES, DType::F32, vec![q_heads]);
            let distance = (q() + k_len() - q_len() - k()).abs();
            mods.push(score() - load(ALIBI_SLOPES, [head()]) * distance);
        }
        if let Some((shape, dtype, grad)) = self.bias {
            let full = [problem.batch(), q_heads, problem.max_q_len(), problem.max_k_len()];
            for (axis, (&got, &want)) in shape.iter().zip(&full).enumerate() {
                if got != 1 && got != want {
                    return Err(ProblemError::BiasShape { axis, got, want });
                }
            }
            problem.aux.push(AuxSpec { name: BIAS.into(), dtype, shape: shape.to_vec(), grad });
            let index = |axis: usize, e: Expr| if shape[axis] == 1 { Expr::from(0) } else { e };
            mods.push(score() + load(BIAS, [index(0, batch()), index(1, head()), index(2, q()), index(3, k())]));
        }
        mods.extend(self.score_mods);
        problem.score_mod = mods.into_iter().reduce(|inner, outer| outer.after(&inner));
        problem.compile()?;
        Ok(problem)
    }
}

impl Problem {
    /// Adds an auxiliary tensor that a built-in modifier needs, unless the caller declared it.
    fn declare(&mut self, name: &str, dtype: DType, shape: Vec<usize>) {
        if !self.aux.iter().any(|spec| &*spec.name == name) {
            self.aux.push(AuxSpec { name: name.into(), dtype, shape, grad: false });
        }
    }

    fn compile(&mut self) -> Result<(), ProblemError> {
        let whole_mask = self.mask.expr();
        let reads: Vec<_> = whole_mask.iter().flat_map(Expr::aux_names).collect();
        for name in reads {
            let (batch, q_len, k_len) = (self.batch(), self.max_q_len(), self.max_k_len());
            match &*name {
                PREFIX_LENGTHS => self.declare(PREFIX_LENGTHS, DType::I32, vec![batch]),
                DOCUMENTS_Q => self.declare(DOCUMENTS_Q, DType::I32, vec![batch, q_len]),
                DOCUMENTS_K => self.declare(DOCUMENTS_K, DType::I32, vec![batch, k_len]),
                _ => {}
            }
        }
        for (i, spec) in self.aux.iter().enumerate() {
            if self.aux[..i].iter().any(|other| other.name == spec.name) {
                return Err(ProblemError::AuxTwice { name: spec.name.to_string() });
            }
            if spec.grad && !spec.dtype.is_float() {
                return Err(ProblemError::AuxGrad { name: spec.name.to_string(), got: spec.dtype });
            }
        }
        let aux = &self.aux;
        let condition = |e: &Expr| -> Result<Program, ExprError> {
            let program = Program::compile(e, aux, Type::Bool)?;
            if program.reads(Var::Score) { Err(ExprError::ScoreInMask { expr: e.to_string() }) } else { Ok(program) }
        };
        self.programs.mask = whole_mask.as_ref().map(condition).transpose()?;
        self.programs.mask_rest = self.mask.rest().map(condition).transpose()?;
        let Some(modifier) = &self.score_mod else { return Ok(()) };
        self.programs.score = Some(Program::compile(modifier, aux, Type::Float)?);
        self.programs.score_derivative = Some(Program::compile(&modifier.derivative(), aux, Type::Float)?);
        for (number, spec) in aux.iter().enumerate().filter(|(_, spec)| spec.grad) {
            for (at, derivative) in modifier.load_derivatives(&spec.name) {
                let at = at.iter().map(|e| Program::compile(e, aux, Type::Int)).collect::<Result<_, _>>()?;
                let derivative = Program::compile(&derivative, aux, Type::Float)?;
                self.programs.aux_gradients.push(AuxGradient { aux: number, at, derivative });
            }
        }
        Ok(())
    }
}

/// Rejects a factor with which products leave the range of f32: their results would be silently wrong.
fn ordinary(arg: &'static str, got: f32) -> Result<(), ProblemError> {
    if (1e-30..=1e30).contains(&got) { Ok(()) } else { Err(ProblemError::Extreme { arg, got }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> ProblemBuilder {
        Problem::builder().dense(1, 4, 4).heads(2, 1).head_dim(8)
    }

    #[test]
    fn factors_beyond_f32_are_refused() {
        for (arg, got) in [("scale", 1e-39), ("scale", 1e38), ("softcap", 1e-45), ("softcap", 3e30)] {
            let builder = if arg == "scale" { base().scale(got) } else { base().softcap(got) };
            let text = refused(builder);
            assert!(text.starts_with(&format!("`{arg}` is {got:e}, allowed: 1e-30 to 1e30")), "{text}");
        }
    }

    fn refused(builder: ProblemBuilder) -> String {
        builder.build().expect_err("must be refused").to_string()
    }

    #[test]
    fn bad_problems_say_what_is_allowed() {
        assert_eq!(
            refused(base().heads(3, 2)),
            "`heads`: 3 query heads over 2 key/value heads, allowed: at least 1 each, query heads a multiple of key/value heads; repeat or drop heads of q"
        );
        assert_eq!(refused(base().head_dim(513)), "`head_dim` is 513, allowed: 1 to 512; split wider heads");
        assert_eq!(refused(base().head_dims(8, 0)), "`value_dim` is 0, allowed: 1 to 512; split wider heads");
        for scale in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
            assert!(refused(base().scale(scale)).starts_with("`scale` is"));
            assert!(refused(base().softcap(scale)).starts_with("`softcap` is"));
        }
        assert!(refused(base().scale(1e38)).starts_with("`scale` is 1e38, allowed: 1e-30 to 1e30"));
        assert!(refused(base().softcap(1e-45)).starts_with("`softcap` is 1e-45, allowed: 1e-30 to 1e30"));
        assert!(refused(base().dtype(DType::I32)).contains("allowed: f32, f16, bf16"));
        assert!(refused(base().dense(1, 1 << 30, 4)).contains("`q_len` is 1073741824"));
        assert!(refused(base().dense(1 << 29, 1 << 29, 4)).contains("overflows the address space"));
        assert!(refused(Problem::builder().heads(1, 1).head_dim(8)).contains("`dense` was not given"));
        assert!(refused(base().packed(&[0, 5, 3], &[0, 5, 6])).contains("`cu_seqlens_q`[2] is 3 after 5"));
        assert!(refused(base().packed(&[0, 5], &[0, 5, 6])).contains("has 2 offsets"));
        assert!(refused(base().packed(&[], &[])).contains("begins with None"));
        assert!(refused(base().bias([1, 3, 4, 4], DType::F32, false)).contains("axis 1 is 3, allowed: 1 or 2"));
        assert!(refused(base().aux("x", DType::F32, &[1]).aux("x", DType::F32, &[1])).contains("declared twice"));
        assert!(refused(base().aux_with_grad("x", DType::I32, &[1])).contains("cannot have a gradient"));
    }

    #[test]
    fn bad_expressions_are_refused() {
        assert!(refused(base().score_mod(score().less(1.0))).contains("is a boolean, allowed: a float"));
        assert!(refused(base().mask(Mask::custom(score().less(1.0)))).contains("reads the score"));
        assert!(refused(base().mask(Mask::custom(k()))).contains("is an integer, allowed: a boolean"));
        assert!(refused(base().score_mod(score() + load("w", [k()]))).contains("reads `w`, declared: []"));
        assert!(
            refused(base().aux("w", DType::F32, &[4, 4]).score_mod(score() + load("w", [k()])))
                .contains("has 1 indices")
        );
        assert!(refused(base().score_mod(score() + k().less(2))).contains("is a boolean, allowed: a number"));
        let long = (0..1_000_000).fold(score(), |e, i| e + i as f32);
        assert!(refused(base().score_mod(long)).contains("more than 1024"));
        let doubled = (0..200).fold(score(), |e, _| e.clone() * e);
        assert!(refused(base().score_mod(doubled)).contains("more than 1024"));
        let steps = (0..1500).fold(score(), |e, i| e + i as f32);
        assert!(refused(base().score_mod(steps)).contains("more than 1024"));
    }

    #[test]
    fn modifiers_compose_in_the_published_order() {
        let problem = base().alibi().softcap(2.0).score_mod(score() * 3.0).build().unwrap();
        assert_eq!(
            problem.score_mod().unwrap().to_string(),
            "(((2.0 * tanh((score / 2.0))) - (alibi_slopes[head] * abs((((q + k_len) - q_len) - k)))) * 3.0)"
        );
    }
}
