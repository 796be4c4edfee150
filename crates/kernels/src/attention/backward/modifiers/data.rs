//! Modifiers of a problem and their derivatives, as data.

use crate::attention::backward::Order;
use crate::attention::forward::plan::NoKernel;
use crate::parts::modifier::Modifiers;
use fulgurite_core::expr::{AuxSpec, Program, Step, Var as Index};
use fulgurite_core::{AuxGradient, Problem};

/// Modifiers of a problem, with derivatives.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModifierGradients {
    /// The modified score, and the part of the mask that is not a span. Rows of a tile are keys.
    pub modifiers: Modifiers,
    /// dm/dz; `None` if it is 1.
    pub derivative: Option<Program>,
    /// dm/da of every element that a score reads, for tensors that want a gradient.
    pub aux: Vec<AuxGradient>,
    /// For each entry of `aux`: whether it is summed exactly, so that the order of additions does not matter.
    pub exact: Vec<bool>,
}

/// Number of registers that modifiers occupy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterPressure {
    /// No modifiers.
    None,
    /// The modifiers fit next to whole rows of d_k and d_v of 128 elements.
    Low,
    /// The modifiers do not fit next to whole rows of d_k and d_v of 128 elements.
    High,
}

impl ModifierGradients {
    /// The modifiers of a problem. `rest` is the part of its mask that is not a span, and `block_kind` that of
    /// [`Modifiers`].
    pub(crate) fn of(
        problem: &Problem,
        (rest, block_kind): (Option<&Program>, Option<Program>),
        aux: &[AuxSpec],
        order: Order,
    ) -> Result<ModifierGradients, NoKernel> {
        let longest = problem.max_q_len().max(problem.max_k_len());
        let plain = Modifiers::new(problem.score_program(), rest, aux, longest);
        let modifiers = Modifiers { transposed: true, block_kind, ..plain };
        if modifiers.is_empty() {
            return Ok(ModifierGradients::default());
        }
        let by_score = |gradient: &AuxGradient| gradient.at.iter().any(|index| index.reads(Index::Score));
        if problem.aux_gradients().iter().any(by_score) {
            return Err(NoKernel { feature: "gradients of auxiliary tensors that scores are indices of".into() });
        }
        let derivative = problem.score_derivative().filter(|program| !is_one(program)).cloned();
        let gradients = problem.aux_gradients();
        // An element that only one score reads has one addition, so there is no order.
        let alone = |gradient: &AuxGradient| {
            let has = |var: Index| gradient.at.iter().any(|at| matches!(at.steps(), [Step::Var(own)] if *own == var));
            let only = gradients.iter().filter(|other| other.aux == gradient.aux).count() == 1;
            let [batch, head] = [(problem.batch(), Index::Batch), (problem.q_heads(), Index::Head)]
                .map(|(n, index)| n == 1 || has(index));
            only && batch && head && has(Index::Query) && has(Index::Key)
        };
        let exact = gradients.iter().map(|gradient| order == Order::Fixed && !alone(gradient)).collect();
        Ok(ModifierGradients { modifiers, derivative, aux: gradients.to_vec(), exact })
    }

    /// For a problem without scores: gradients of auxiliary tensors are zeros.
    pub(crate) fn zeros(problem: &Problem) -> ModifierGradients {
        let aux = problem.aux_gradients().to_vec();
        ModifierGradients { exact: vec![false; aux.len()], aux, ..ModifierGradients::default() }
    }

    /// Number of registers that the modifiers occupy.
    pub fn register_pressure(&self) -> RegisterPressure {
        match self.aux.is_empty() && self.modifiers.are_light(self.derivative.as_ref()) {
            _ if self.is_empty() => RegisterPressure::None,
            true => RegisterPressure::Low,
            false => RegisterPressure::High,
        }
    }

    /// Whether the problem has no modifiers.
    pub fn is_empty(&self) -> bool {
        self.modifiers.is_empty()
    }
}

/// Whether a derivative is the constant 1.
pub fn is_one(program: &Program) -> bool {
    matches!(program.steps(), [Step::Float(bits)] if f32::from_bits(*bits) == 1.0)
}
