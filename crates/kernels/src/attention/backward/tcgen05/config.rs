//! Tile configurations of the `tcgen05` kernel of backward. No Blackwell GPU has measured them: they follow from the memory
//! and the registers that a tile takes.

use crate::attention::backward::{Adds, BackwardConfig, Features, Pack, Share};
use fulgurite_ptx::TensorUnit;

/// Rows of a tile in tensor memory: keys of a tile, and queries of a step.
pub(super) const ROWS: u32 = 128;
/// Warpgroups that compute p and d_z.
pub(super) const GROUPS: u32 = 2;
/// Registers of a thread on average, if a CTA has 512 threads.
const POOL: u32 = 4 * 128;
/// The largest head dimension: s, d_p, d_k and d_v then fill tensor memory.
pub(crate) const MOST: u32 = 128;
/// Up to this head dimension there is shared memory for several stages of d_o.
const NARROW: u32 = 96;

impl BackwardConfig {
    /// A configuration of the `tcgen05` kernel.
    const fn of_tensor(registers: [u32; 2]) -> BackwardConfig {
        BackwardConfig {
            share: Share::Tensor,
            rows: ROWS,
            adds: Adds::CopyEngine,
            depth: 2,
            key_depth: 1,
            registers,
            early: 8,
            drain: true,
            pack: Pack::Early,
            turn: 1,
            rounds: false,
            pairs: None,
            last: None,
            sums: None,
            zeroed: None,
            head_splits: None,
            join: None,
        }
    }

    /// Whether the kernel multiplies by `tcgen05`.
    pub fn is_tensor(&self) -> bool {
        self.share.unit() == TensorUnit::Tcgen05
    }

    /// The configuration of the `tcgen05` kernel for a problem's features, if it has one.
    pub fn tensor(features: &Features) -> Option<BackwardConfig> {
        let largest = features.dims[0].max(features.dims[1]);
        // A thread that moves d_q has a row of it in registers, next to which few of the modifiers' parameters fit.
        let registers = if features.modifiers.is_empty() { [136, 88] } else { [136, 80] };
        let config = BackwardConfig::of_tensor(registers);
        config.has_tensor_kernel(largest).then_some(config)
    }

    /// Whether the `tcgen05` kernel has this configuration for rows of `head_dim` elements.
    pub(crate) fn has_tensor_kernel(&self, head_dim: u32) -> bool {
        let [compute, other] = self.registers;
        let registers = GROUPS * compute + other < POOL;
        let depth = (2..=3).contains(&self.depth) && (self.depth == 2 || head_dim <= 64);
        self.rows == ROWS && self.key_depth == 1 && head_dim <= MOST && depth && registers
    }

    /// Configurations to try beside this one.
    pub(crate) fn tensor_neighbours(self, head_dim: u32) -> Vec<BackwardConfig> {
        let depth = [2, 3].map(|depth| BackwardConfig { depth, ..self });
        let registers = [[136, 88], [144, 72], [144, 88]].map(|registers| BackwardConfig { registers, ..self });
        let all = depth.into_iter().chain(registers);
        all.filter(|config| *config != self && config.has_tensor_kernel(head_dim)).collect()
    }

    /// Registers of a thread that moves d_q to its sums.
    pub(super) fn sum_registers(&self) -> u32 {
        POOL - GROUPS * self.registers[0] - self.registers[1]
    }

    /// Stages of d_o.
    pub(super) fn output_depth(&self, dims: [u32; 2]) -> u32 {
        if dims[0].max(dims[1]) <= NARROW { self.depth } else { 1 }
    }

    /// Columns of d_q that are staged at a time; an even number of parts, if there is one.
    pub(super) fn sum_cols(&self, d: u32) -> u32 {
        [32, 24, 16].into_iter().find(|cols| d.is_multiple_of(2 * cols)).unwrap_or(16)
    }
}
