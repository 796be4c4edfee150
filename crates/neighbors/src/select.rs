//! Selects the blocks of keys that a block of queries should see: keys and queries are sorted by clusters, and blocks
//! are kept until they hold most of the weight that their means promise.
//!
//! Attention without a mask does not care about the order of its keys, so keys that point the same way can be put into
//! the same blocks. Where two clusters meet in a block each speaks for its own part: the mean of both would
//! promise neither's weight.

use crate::kmeans::sorted;
use crate::{Error, KMeans, Metric, Options, Points, oracle};
use fulgurite_core::{BlockMask, BlockSpec, stop};
use fulgurite_cpu::scan::{Digits, Scanner};

/// Settings of the selection.
#[derive(Debug, Clone)]
pub struct KeySelector {
    block: [usize; 2],
    weight: f64,
    seed: u64,
    steps: usize,
    options: Options,
}

/// Orders of queries and keys, and the blocks to compute in these orders.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// Row i of the sorted queries is this query.
    pub query_order: Vec<u32>,
    /// Row j of the sorted keys (and values) is this key.
    pub key_order: Vec<u32>,
    /// The blocks to compute, for sorted queries and keys.
    pub blocks: BlockMask,
    /// The share of all blocks that they are.
    pub kept: f64,
}

impl KeySelector {
    /// Keep blocks until their means promise this share of the weight, for blocks of 64 queries and 64 keys.
    pub fn new(weight: f64) -> KeySelector {
        KeySelector { block: [64, 64], weight, seed: 0, steps: 10, options: Options::default() }
    }

    /// Queries and keys of a block.
    pub fn block(mut self, rows: usize, columns: usize) -> Self {
        self.block = [rows, columns];
        self
    }

    /// Decides where k-means begins.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Instruction set and threads.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Chooses for one head: its queries and keys, and the factor of their products.
    ///
    /// ```
    /// use fulgurite_neighbors::{Error, KeySelector, Points};
    /// let data: Vec<f32> = (0..64).flat_map(|i| if i % 2 == 0 { [8.0, 0.0] } else { [0.0, 8.0] }).collect();
    /// let rows = Points::new(&data, [64, 2])?;
    /// let found = KeySelector::new(0.99).block(16, 16).select(rows, rows, 1.0)?;
    /// assert_eq!(found.kept, 0.5); // each direction sees its own
    /// # Ok::<(), Error>(())
    /// ```
    pub fn select(&self, queries: Points<'_>, keys: Points<'_>, scale: f64) -> Result<Selection, Error> {
        let queries = queries.of_dim("queries", keys.dim())?;
        let (weight, hint) = (self.weight, "the share of the weight to keep");
        if !(weight > 0.0 && weight <= 1.0) {
            return Err(Error::Value { arg: "weight", got: weight, allowed: "above 0, at most 1", hint });
        }
        if !scale.is_finite() || scale <= 0.0 {
            let hint = "1 / sqrt(head_dim) is usual";
            return Err(Error::Value { arg: "scale", got: scale, allowed: "finite and above 0", hint });
        }
        if self.block.contains(&0) {
            return Err(Error::Count {
                arg: "block",
                got: 0,
                low: 1,
                high: usize::MAX,
                hint: "rows and columns of a block",
            });
        }
        stop::catch_memory(|| self.selected(queries, keys, scale))?
    }

    fn selected(&self, queries: Points<'_>, keys: Points<'_>, scale: f64) -> Result<Selection, Error> {
        let [rows, cols] = self.block;
        let blocks = queries.len().div_ceil(rows).saturating_mul(keys.len().div_ceil(cols));
        stop::ask("shares of all blocks", blocks.saturating_mul(size_of::<f64>() + size_of::<i32>()));
        let (query_order, _) = self.order(queries, rows)?;
        let (key_order, labels) = self.order(keys, cols)?;
        let pieces = pieces(keys, &key_order, &labels, cols);
        let shares = self.shares(queries, &query_order, &pieces, keys.len().div_ceil(cols), scale);
        let blocks = [queries.len().div_ceil(rows), keys.len().div_ceil(cols)];
        let lists: Vec<Vec<i32>> = shares.chunks_exact(blocks[1]).map(|row| keep(row, self.weight)).collect();
        let kept = lists.iter().map(Vec::len).sum::<usize>() as f64 / (blocks[0] * blocks[1]) as f64;
        let spec = BlockSpec { rows, cols, batch: 1, heads: 1 };
        let none = vec![Vec::new(); blocks[0]];
        let blocks = BlockMask::new(spec, blocks, none, lists).expect("bug in fulgurite: lists of a selection ascend");
        Ok(Selection { query_order, key_order, blocks, kept })
    }

    /// Rows by cluster, and the labels. Twice as many clusters as blocks: one that holds two directions speaks for neither.
    /// Each cluster is followed by the nearest that is left, so that a block holds few directions.
    fn order(&self, points: Points<'_>, block: usize) -> Result<(Vec<u32>, Vec<u32>), Error> {
        let clusters = (2 * points.len().div_ceil(block)).min(points.len());
        let kmeans = KMeans::new(clusters).seed(self.seed).max_steps(self.steps).options(self.options);
        let model = kmeans.fit(points)?;
        let place = chain(Points::new(model.centroids(), [clusters, points.dim()])?);
        let labels: Vec<u32> = model.labels().iter().map(|&label| place[label as usize]).collect();
        Ok((sorted(&labels, clusters), labels))
    }

    /// The share of a block of queries' weight that each block of keys promises.
    fn shares(
        &self,
        queries: Points<'_>,
        query_order: &[u32],
        pieces: &[Piece],
        blocks: usize,
        scale: f64,
    ) -> Vec<f64> {
        let (rows, d) = (self.block[0], queries.dim());
        let scanner = Scanner::new(&self.options, Digits::All);
        let width = scanner.padded(pieces.len());
        let mut means: Vec<f32> = stop::zeros("means of clusters", d * width);
        for (p, piece) in pieces.iter().enumerate() {
            piece.mean.iter().enumerate().for_each(|(x, &value)| means[x * width + p] = value);
        }
        let mut out = Vec::with_capacity(query_order.len().div_ceil(rows) * blocks);
        for own in query_order.chunks(rows) {
            let asks: Vec<f32> = own.iter().flat_map(|&query| queries.row(query as usize)).copied().collect();
            let mut scores = vec![0.0f32; own.len() * width];
            scanner.times(&asks, d, &means, width, &mut scores);
            let mut shares = vec![0.0f64; blocks];
            for row in scores.chunks_exact(width) {
                let logit = |(piece, &score): (&Piece, &f32)| f64::from(score) * scale + (piece.keys as f64).ln();
                let logits: Vec<f64> = pieces.iter().zip(row).map(logit).collect();
                let most = logits.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                let sum: f64 = logits.iter().map(|x| (x - most).exp()).sum();
                for (piece, x) in pieces.iter().zip(&logits) {
                    shares[piece.block] += (x - most).exp() / sum / own.len() as f64;
                }
            }
            out.extend(shares);
        }
        out
    }
}

/// The place of each row in a chain that begins with the first and goes on with the nearest that is left.
fn chain(rows: Points<'_>) -> Vec<u32> {
    let mut place = vec![u32::MAX; rows.len()];
    let mut at = 0;
    for step in 0..rows.len() as u32 {
        place[at] = step;
        let far = |&row: &usize| oracle::far(Metric::Euclidean, rows.row(at), rows.row(row));
        let left = (0..rows.len()).filter(|&row| place[row] == u32::MAX);
        at = left.min_by(|a, b| far(a).total_cmp(&far(b))).unwrap_or(at);
    }
    place
}

/// Keys of one cluster in one block.
struct Piece {
    block: usize,
    keys: usize,
    mean: Vec<f32>,
}

fn pieces(keys: Points<'_>, order: &[u32], labels: &[u32], cols: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (block, own) in order.chunks(cols).enumerate() {
        for run in own.chunk_by(|&a, &b| labels[a as usize] == labels[b as usize]) {
            let mut sum = vec![0.0f64; keys.dim()];
            for &key in run {
                sum.iter_mut().zip(keys.row(key as usize)).for_each(|(s, &x)| *s += f64::from(x));
            }
            let mean = sum.iter().map(|s| (s / run.len() as f64) as f32).collect();
            pieces.push(Piece { block, keys: run.len(), mean });
        }
    }
    pieces
}

/// The largest shares that together reach `weight`, ascending by number; at least one.
fn keep(shares: &[f64], weight: f64) -> Vec<i32> {
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]).then(a.cmp(&b)));
    let mut held = 0.0;
    let mut kept: Vec<i32> = Vec::new();
    for block in order {
        // The sum of all may round to less than 1: then all are kept.
        if held >= weight && !kept.is_empty() {
            break;
        }
        held += shares[block];
        kept.push(block as i32);
    }
    kept.sort_unstable();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_blocks_hold_the_weight() {
        assert_eq!(keep(&[0.1, 0.6, 0.3], 0.5), [1]);
        assert_eq!(keep(&[0.1, 0.6, 0.3], 0.7), [1, 2]);
        assert_eq!(keep(&[0.1, 0.6, 0.3], 1.0), [0, 1, 2]);
        assert_eq!(keep(&[f64::NAN], 0.5), [0]);
    }

    #[test]
    fn a_chain_goes_to_the_nearest_that_is_left() {
        let rows = Points::new(&[5.0, 0.0, 6.0, 1.0, 9.0], [5, 1]).unwrap();
        assert_eq!(chain(rows), [0, 4, 1, 3, 2]);
    }

    #[test]
    fn odd_sizes_and_bad_calls() {
        let data: Vec<f32> = (0..70 * 3).map(|i| (i * 37 % 11) as f32).collect();
        let (q, k) = (Points::new(&data[..10 * 3], [10, 3]).unwrap(), Points::new(&data, [70, 3]).unwrap());
        let found = KeySelector::new(1.0).block(4, 16).select(q, k, 0.5).unwrap();
        assert_eq!((found.kept, found.blocks.blocks()), (1.0, [3, 5]));
        let mut order = found.key_order.clone();
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(i, &key)| i as u32 == key));
        for (selector, scale) in
            [(KeySelector::new(0.0), 1.0), (KeySelector::new(0.5), f64::NAN), (KeySelector::new(0.5).block(0, 1), 1.0)]
        {
            assert!(selector.select(q, k, scale).is_err());
        }
        let other = Points::new(&data, [105, 2]).unwrap();
        assert!(KeySelector::new(0.5).select(other, k, 1.0).is_err());
    }
}
