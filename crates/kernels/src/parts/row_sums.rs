//! The unit that sums the rows of p.

use serde::{Deserialize, Serialize};

/// The unit that sums the rows of p.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Added {
    /// Each thread sums its own elements: p before rounding, one instruction per element.
    #[serde(rename = "threads")]
    ByThreads,
    /// The tensor cores sum p after rounding, as one more column of p v in which v is 1.
    #[serde(rename = "column")]
    ByColumn,
}

impl Added {
    /// Number of partial sums that a thread keeps per row.
    pub(crate) fn chains(self) -> usize {
        match self {
            Added::ByThreads => 2,
            Added::ByColumn => 0,
        }
    }
}
