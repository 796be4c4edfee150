//! The part of a schedule on which the kernels' texts depend.

use crate::attention::backward::{BackwardConfig, Features};
use crate::parts::results::ResultType;

/// Whether the query heads of a key/value head are spread over several CTAs. The main kernel then leaves f32 parts of d_k and
/// d_v, and another kernel adds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Each CTA walks over all of them.
    No,
    /// In parts of equally many heads.
    Even,
    /// In parts that differ by one head. To find the first head of a part takes a division.
    Uneven,
}

/// A configuration as a problem's kernels use it, and the services that it asks for. Derived from [`Features`], the
/// configuration and the problem's sizes when a [plan](crate::attention::backward::plan::BackwardPlan) is made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelShape {
    /// Tiles, stages and registers. A field that the kernel cannot keep is already adjusted here.
    pub config: BackwardConfig,
    /// Elements of a row of q and k, and of a row of v and o, as the products see them: [`Features::dims`] rounded up to
    /// whole tiles ([`BackwardConfig::padded`]). Missing elements are read as zeros.
    pub dims: [u32; 2],
    /// Elements of a row of d_k and of d_v that the products compute ([`BackwardConfig::widths`]).
    pub widths: [u32; 2],
    /// Whether the main kernel converts d_q to 16 bits, so that there is no finish kernel. Needs copy-engine reduction
    /// and sequences of equal length that have keys.
    pub rounds: bool,
    /// Whether the main kernel can split its last tiles. Has the requirements of `rounds`, and also needs no mask and
    /// any order of additions.
    pub splits: bool,
    /// A tile has one query head: q_heads equals kv_heads, or every head has CTAs of its own. Set only with copy-engine
    /// reduction; the step loop then skips its test for the next head.
    pub single: bool,
    /// Whether the query heads of a key/value head are spread over several CTAs.
    pub spread: Spread,
    /// Whether a table limits the steps of each key tile: those that a block mask leaves. Needs any order of additions, because
    /// in a fixed order tiles know the steps of others.
    pub step_ranges: bool,
    /// The main kernel zeroes those sums of d_q that no first tile needs. Needs copy-engine reduction and sequences of equal
    /// length.
    pub zero_fills: bool,
    /// The element type of d_q, d_k and d_v, and whether they are added to given ones. f32 needs a finish kernel, and
    /// sequences of different lengths parts of d_k and d_v in scratch memory.
    pub results: ResultType,
}

impl KernelShape {
    /// The shape for a problem whose sizes are not known: `rounds`, `splits`, `single` and `step_ranges` are false, and heads
    /// are not spread.
    pub fn plain(features: &Features, config: BackwardConfig) -> KernelShape {
        let zero_fills = config.has_bulk_reduce() && !features.ragged.any();
        let (dims, widths) = (config.padded(features.dims), config.widths(features.dims));
        KernelShape {
            config,
            dims,
            widths,
            rounds: false,
            splits: false,
            single: false,
            spread: Spread::No,
            step_ranges: false,
            zero_fills,
            results: ResultType::Input,
        }
    }
}
