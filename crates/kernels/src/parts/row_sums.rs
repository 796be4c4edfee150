//! The unit that sums the rows of p.

/// The unit that sums the rows of p.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Added {
    /// Each thread sums its own elements: p before rounding, one instruction per element.
    ByThreads,
    /// The tensor cores sum p after rounding, as one more column of p v in which v is 1.
    ByColumn,
}

impl Added {
    /// The word for each variant in a configuration's text.
    pub(crate) const NAMES: [(&str, Added); 2] = [("threads", Added::ByThreads), ("column", Added::ByColumn)];

    /// Number of partial sums that a thread keeps per row.
    pub(crate) fn chains(self) -> usize {
        match self {
            Added::ByThreads => 2,
            Added::ByColumn => 0,
        }
    }
}
