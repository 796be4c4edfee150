//! The order of additions to d_q.

/// The order in which CTAs add to d_q.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// CTAs add as soon as they can. The last bits of d_q differ from run to run.
    #[default]
    Any,
    /// CTAs take turns (deterministic mode). d_q has the same bits in every run, whatever else runs on the GPU.
    Fixed,
}
