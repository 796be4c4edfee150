//! Options of a simulated launch.

/// The order in which warps and asynchronous operations take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interleaving {
    /// Random, by the seed, and adversarial: copies and products finish as late or as early as they may.
    Random,
    /// By an approximate clock, for a timeline.
    Timed,
}

/// The order in which the products of one thread into tensor memory run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorOrder {
    /// All of them in the order in which they start. Public kernels rely on it.
    Queue,
    /// Only products into one accumulator, as the manual promises; and accesses of threads need fences.
    Strict,
}

/// Options of a simulated launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Seed of the random order; equal seeds give equal runs.
    pub seed: u64,
    /// Number of warp instructions after which a launch counts as endless.
    pub budget: u64,
    /// Whether memory, barriers and registers are checked.
    pub checks: bool,
    /// The order of turns.
    pub order: Interleaving,
    /// Number of clusters that run at the same time at first; more are admitted if those wait for others.
    pub resident: u32,
    /// What orders accesses to tensor memory.
    pub tensor: TensorOrder,
    /// Whether products must read every scale that a copy brings to tensor memory, unless it equals one that they read. A
    /// kernel that reads part of a block may be right; one that reads the same scales for every step is not.
    pub whole_scales: bool,
    /// Whether products are computed. Without, they leave zeros: enough for a timeline of a kernel whose control flow does
    /// not depend on results.
    pub arithmetic: bool,
}

impl Default for Options {
    fn default() -> Self {
        let (order, tensor) = (Interleaving::Random, TensorOrder::Queue);
        Options {
            seed: 0,
            budget: 1 << 32,
            checks: true,
            order,
            resident: 2,
            tensor,
            whole_scales: false,
            arithmetic: true,
        }
    }
}
