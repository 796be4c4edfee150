//! The query heads of a key/value head in parts, each with CTAs of its own.

use crate::attention::backward::shape::Spread;

/// The query heads of a key/value head in parts of consecutive heads. Parts differ by one head at most, and each has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeadSpread {
    /// Query heads of a key/value head.
    pub group: u64,
    /// Parts of them.
    pub parts: u64,
    /// Whether a single part goes through scratch memory, too: the kernel that adds parts then writes f32 results of
    /// sequences of different lengths.
    pub keeps_sums: bool,
}

impl HeadSpread {
    /// Divides `group` heads into `parts` parts, clamped to 1..=`group`.
    pub fn new(group: u64, parts: u64) -> HeadSpread {
        HeadSpread { group, parts: parts.clamp(1, group.max(1)), keeps_sums: false }
    }

    /// The first query head of a part; parts of all key/value heads are numbered one after the other. Kernels compute the same.
    pub fn first(&self, part: u64) -> u64 {
        part * self.group / self.parts
    }

    /// Query heads of the longest part.
    pub fn most(&self) -> u64 {
        self.group.div_ceil(self.parts)
    }

    /// The part of the choice on which kernels' texts depend.
    pub fn shape(&self) -> Spread {
        match (self.is_spread(), self.group % self.parts) {
            (false, _) => Spread::No,
            (true, 0) => Spread::Even,
            (true, _) => Spread::Uneven,
        }
    }

    /// Whether parts go through scratch memory.
    pub fn is_spread(&self) -> bool {
        self.parts > 1 || self.keeps_sums
    }
}
