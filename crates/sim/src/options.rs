//! Options of a simulated launch.

/// The order in which warps and asynchronous operations take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Random, by the seed, and adversarial: copies and products finish as late or as early as they may.
    Random,
    /// By an approximate clock, for a timeline.
    Timed,
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
    pub order: Order,
    /// Number of clusters that run at the same time at first; more are admitted if those wait for others.
    pub resident: u32,
}

impl Default for Options {
    fn default() -> Self {
        Options { seed: 0, budget: 1 << 32, checks: true, order: Order::Random, resident: 2 }
    }
}
