//! How a launch is simulated.

/// In which order warps and what runs later take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Random, by the seed, and against the kernel: copies and products finish as late or as early as they may.
    Random,
    /// By an approximate clock: for a timeline.
    Timed,
}

/// How a launch is simulated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The same seed gives the same run.
    pub seed: u64,
    /// Instructions of warps that a launch may take before it counts as endless.
    pub budget: u64,
    /// Whether memory, barriers and registers are checked.
    pub checks: bool,
    /// Who goes next.
    pub order: Order,
    /// Clusters that run at the same time, at first; more are let in where those wait for others.
    pub resident: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options { seed: 0, budget: 1 << 32, checks: true, order: Order::Random, resident: 2 }
    }
}
