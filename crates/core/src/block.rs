//! Block masks: for each block of queries, the key blocks that it may see.
//!
//! Each row of blocks has two lists: *partial* blocks, in which the problem's mask still decides each element, and
//! *full* blocks, in which every element is visible. Blocks in neither list are skipped. If the problem has no mask,
//! partial and full blocks mean the same.

use crate::expr::Coverage;
use thiserror::Error;

/// The structure of a block mask, part of the problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockSpec {
    /// Queries per block.
    pub rows: usize,
    /// Keys per block.
    pub cols: usize,
    /// 1 (shared by all sequences) or the batch size.
    pub batch: usize,
    /// 1 (shared by all heads) or the number of query heads.
    pub heads: usize,
}

impl Default for BlockSpec {
    fn default() -> Self {
        BlockSpec { rows: 128, cols: 128, batch: 1, heads: 1 }
    }
}

/// The reason why block lists were rejected.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The wrong number of rows.
    #[error("block mask: `{list}` has {got} rows, allowed: {want} (batch x heads x query blocks)")]
    Rows {
        /// `partial` or `full`.
        list: &'static str,
        /// Number of rows given.
        got: usize,
        /// Number of rows expected.
        want: usize,
    },
    /// A block outside the matrix, or a list that is not ascending.
    #[error("block mask: `{list}` row {row} has {got:?}, allowed: ascending numbers below {blocks}")]
    Order {
        /// `partial` or `full`.
        list: &'static str,
        /// Index of the row of blocks.
        row: usize,
        /// The list of the row.
        got: Vec<i32>,
        /// Number of key blocks.
        blocks: usize,
    },
    /// A block that is in both lists.
    #[error("block mask: row {row} lists block {block} as partial and as full; remove one")]
    Both {
        /// Index of the row of blocks.
        row: usize,
        /// Index of the block.
        block: i32,
    },
    /// An invalid size.
    #[error("block mask: {what} is {got}, allowed: {allowed}")]
    Size {
        /// Name of the size.
        what: &'static str,
        /// Value of the size.
        got: usize,
        /// Allowed values.
        allowed: &'static str,
    },
}

/// One ascending list of key blocks for each row of blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Lists {
    /// Row r is `blocks[starts[r]..starts[r + 1]]`.
    starts: Vec<usize>,
    blocks: Vec<i32>,
}

impl Lists {
    fn new(rows: impl IntoIterator<Item = Vec<i32>>) -> Lists {
        let mut lists = Lists { starts: vec![0], blocks: Vec::new() };
        for row in rows {
            lists.blocks.extend(row);
            lists.starts.push(lists.blocks.len());
        }
        lists
    }
    fn list(&self, number: usize) -> &[i32] {
        &self.blocks[self.starts[number]..self.starts[number + 1]]
    }
}

/// The contents of a block mask. Its lists are guaranteed to be ascending, inside the matrix and disjoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockMask {
    spec: BlockSpec,
    q_blocks: usize,
    k_blocks: usize,
    partial: Lists,
    full: Lists,
}

impl BlockMask {
    /// A block mask from two lists for each (batch, head, query block), in that order.
    pub fn new(
        spec: BlockSpec,
        [q_blocks, k_blocks]: [usize; 2],
        partial: Vec<Vec<i32>>,
        full: Vec<Vec<i32>>,
    ) -> Result<BlockMask, BlockError> {
        spec.check()?;
        let rows = [spec.batch, spec.heads, q_blocks].iter().try_fold(1usize, |n, &m| n.checked_mul(m));
        let want =
            rows.ok_or(BlockError::Size { what: "batch x heads x query blocks", got: usize::MAX, allowed: "less" })?;
        for (list, lists) in [("partial", &partial), ("full", &full)] {
            if lists.len() != want {
                return Err(BlockError::Rows { list, got: lists.len(), want });
            }
            for (row, blocks) in lists.iter().enumerate() {
                let ascending = blocks.windows(2).all(|w| w[0] < w[1]);
                let inside = blocks.iter().all(|&b| b >= 0 && (b as usize) < k_blocks);
                if !(ascending && inside) {
                    return Err(BlockError::Order { list, row, got: blocks.clone(), blocks: k_blocks });
                }
            }
        }
        for (row, (p, f)) in partial.iter().zip(&full).enumerate() {
            if let Some(&block) = p.iter().find(|b| f.binary_search(b).is_ok()) {
                return Err(BlockError::Both { row, block });
            }
        }
        Ok(BlockMask { spec, q_blocks, k_blocks, partial: Lists::new(partial), full: Lists::new(full) })
    }

    /// Block sizes, and whether sequences and heads share the lists.
    pub fn spec(&self) -> BlockSpec {
        self.spec
    }

    /// Number of query blocks and of key blocks.
    pub fn blocks(&self) -> [usize; 2] {
        [self.q_blocks, self.k_blocks]
    }

    fn list_number(&self, batch: usize, head: usize, q_block: usize) -> usize {
        let b = if self.spec.batch == 1 { 0 } else { batch };
        let h = if self.spec.heads == 1 { 0 } else { head };
        (b * self.spec.heads + h) * self.q_blocks + q_block
    }

    /// The partial and the full blocks of a row of blocks, each ascending.
    pub fn lists(&self, batch: usize, head: usize, q_block: usize) -> (&[i32], &[i32]) {
        let number = self.list_number(batch, head, q_block);
        (self.partial.list(number), self.full.list(number))
    }

    /// Whether one element is hidden, decided by the mask, or visible.
    pub fn coverage(&self, batch: usize, head: usize, q: usize, k: usize) -> Coverage {
        let (partial, full) = self.lists(batch, head, q / self.spec.rows);
        let block = (k / self.spec.cols) as i32;
        if full.binary_search(&block).is_ok() {
            Coverage::Full
        } else if partial.binary_search(&block).is_ok() {
            Coverage::Partial
        } else {
            Coverage::Empty
        }
    }
}

impl BlockSpec {
    /// Number of query and key blocks that cover the given lengths.
    pub fn blocks(&self, q_len: usize, k_len: usize) -> [usize; 2] {
        [q_len.div_ceil(self.rows), k_len.div_ceil(self.cols)]
    }

    pub(crate) fn check(&self) -> Result<(), BlockError> {
        for (what, got) in [("rows", self.rows), ("cols", self.cols), ("batch", self.batch), ("heads", self.heads)] {
            if got == 0 || got >= crate::mask::FAR as usize {
                return Err(BlockError::Size { what, got, allowed: "1 to 2^30 - 1" });
            }
        }
        Ok(())
    }
}
