//! Facts of a problem that decide how backward runs it. Nothing here depends on a configuration.

use crate::attention::backward::d_q::exact;
use crate::attention::backward::{Features, ModifierGradients};
use crate::parts::expression_blocks::ExpressionBlocks;
use crate::parts::results::ResultType;
use fulgurite_core::{BlockSpec, Layout};
use fulgurite_ptx::device::Span;
use fulgurite_ptx::{Arch, Number};

/// A problem as backward sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Facts {
    /// Element type of q, k, v, o and their gradients.
    pub number: Number,
    pub features: Features,
    pub layout: Layout,
    /// Query heads, key/value heads.
    pub heads: [u64; 2],
    pub scale: f32,
    /// The GPU that the schedule is made for. On a GPU with another SM count results stay right: sums stay allocated longer than
    /// needed, or CTAs wait for them.
    pub arch: Arch,
    pub has_sinks: bool,
    /// The element type of d_q, d_k and d_v, and whether they are added to given ones.
    pub results: ResultType,
    /// The blocks of a block mask, or of the mask's expression.
    pub blocks: Option<BlockSpec>,
    /// The blocks that the mask's expression hides or shows, if their table is made from it.
    pub expression: Option<ExpressionBlocks>,
    /// Shapes of auxiliary tensors. With a block mask, the last one is its table of blocks.
    pub aux_shapes: Vec<Vec<usize>>,
}

impl Facts {
    /// Rows of q, and rows of k and v: of each sequence, or of the whole batch if it is packed.
    pub fn lengths(&self) -> [u64; 2] {
        let (q, k) = match self.layout {
            Layout::Dense { q_len, k_len, .. } => (q_len, k_len),
            Layout::Packed(p) => (p.total_q, p.total_k),
        };
        [q as u64, k as u64]
    }

    /// Rows of d_q, and of d_k and d_v, in all heads.
    pub fn result_rows(&self) -> [u64; 2] {
        let [q, k] = self.lengths();
        let sequences = match self.layout {
            Layout::Dense { batch, .. } => batch as u64,
            Layout::Packed(_) => 1,
        };
        [sequences * self.heads[0] * q, sequences * self.heads[1] * k]
    }

    /// Words of marks of d_q, d_k and d_v: one for each row, in whole fours.
    pub fn mark_words(&self) -> [u64; 3] {
        let [q, k] = self.result_rows().map(|rows| rows.next_multiple_of(4));
        [q, k, k]
    }

    /// Number of sequences.
    pub fn batch(&self) -> u64 {
        match self.layout {
            Layout::Dense { batch, .. } => batch as u64,
            Layout::Packed(p) => p.batch as u64,
        }
    }

    /// Pairs of key/value head and sequence.
    pub fn pairs(&self) -> u64 {
        self.batch() * self.heads[1]
    }

    /// Query heads of each key/value head.
    pub fn group(&self) -> u64 {
        self.heads[0].checked_div(self.heads[1]).unwrap_or(0)
    }

    /// Number of query heads whose rows are stored separately: of all sequences, or of one if sequences follow each
    /// other in a head.
    pub fn all_heads(&self) -> u64 {
        if self.features.ragged.any() { self.heads[0] } else { self.batch() * self.heads[0] }
    }

    /// Sequences of equal length that have keys, and scores without modifiers.
    pub fn is_plain(&self) -> bool {
        !self.features.ragged.any() && self.features.modifiers.is_empty() && self.lengths()[1] > 0
    }

    /// Elements of the table of blocks; 0 without a block mask.
    pub fn block_table_elements(&self) -> u64 {
        let shape = self.aux_shapes.last().filter(|_| self.blocks.is_some());
        shape.map_or(0, |shape| shape.iter().map(|&n| n as u64).product())
    }

    /// Whether a block mask has few enough query blocks for the kernel that finds step ranges, which counts them in f32.
    pub fn has_step_ranges(&self) -> bool {
        let q_blocks = self.aux_shapes.last().and_then(|shape| shape.iter().rev().nth(1));
        self.blocks.is_some() && q_blocks.is_some_and(|&n| n < 1 << 24)
    }

    /// 64-bit words in which the gradient of an auxiliary tensor is summed exactly; 0 if it is not.
    pub fn exact_words(&self, aux: usize) -> u64 {
        let ModifierGradients { aux: gradients, exact, .. } = &self.features.modifiers;
        let exact = gradients.iter().zip(exact).any(|(gradient, exact)| gradient.aux == aux && *exact);
        let elements = || self.aux_shapes[aux].iter().map(|&n| n as u64).product::<u64>();
        if exact { exact::WORDS * elements() } else { 0 }
    }

    /// 64-bit words of all auxiliary tensors.
    pub fn all_exact_words(&self) -> u64 {
        (0..self.aux_shapes.len()).map(|aux| self.exact_words(aux)).sum()
    }

    /// The words of one auxiliary tensor, if its gradient is summed exactly; `all` holds those of all tensors.
    pub fn exact_words_at(&self, all: Span, aux: usize) -> Option<Span> {
        let before: u64 = (0..aux).map(|aux| self.exact_words(aux)).sum();
        let words = self.exact_words(aux);
        (words > 0).then(|| all.from(8 * before).first(8 * words))
    }
}
