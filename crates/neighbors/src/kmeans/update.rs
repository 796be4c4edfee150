//! New centroids: points sorted by label, summed in f64 in pieces whose cuts depend on the data alone.

use crate::{Metric, Points};
use fulgurite_core::stop;
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::Scanner;

/// Rows that are sorted at a time. Data that comes in parts is cut at multiples of it, so that the sums have the
/// same order as those of data in memory.
pub(crate) const CHUNK: usize = 1 << 15;
/// Sorted rows that one sum takes in.
const PIECE: usize = 256;

/// Sums and counts of clusters.
pub(crate) struct Update {
    sums: Vec<f64>,
    counts: Vec<u64>,
    d: usize,
}

/// The sum of a run of one cluster's points.
struct Run {
    cluster: usize,
    count: u64,
    sum: Vec<f64>,
}

impl Update {
    pub fn new(clusters: usize, d: usize) -> Update {
        let what = "sums of clusters";
        Update { sums: stop::zeros(what, clusters * d), counts: stop::zeros(what, clusters), d }
    }

    /// Adds points; but for the last call their number is a multiple of [`CHUNK`].
    pub fn add(&mut self, scanner: &Scanner, points: Points<'_>, labels: &[u32]) {
        for (chunk, labels) in labels.chunks(CHUNK).enumerate() {
            self.chunk(scanner, points.part(chunk * CHUNK, labels.len()), labels);
        }
    }

    fn chunk(&mut self, scanner: &Scanner, points: Points<'_>, labels: &[u32]) {
        let order = sorted(labels, self.counts.len());
        let mut pieces: Vec<Vec<Run>> = Vec::new();
        pieces.resize_with(order.len().div_ceil(PIECE), Vec::new);
        pool::each(scanner.threads(), order.chunks(PIECE).zip(&mut pieces), |_, (rows, runs)| {
            for &row in rows {
                let cluster = labels[row as usize] as usize;
                if runs.last().is_none_or(|run: &Run| run.cluster != cluster) {
                    runs.push(Run { cluster, count: 0, sum: vec![0.0; self.d] });
                }
                if let Some(run) = runs.last_mut() {
                    scanner.add_wide(points.row(row as usize), &mut run.sum);
                    run.count += 1;
                }
            }
        });
        for run in pieces.into_iter().flatten() {
            let own = &mut self.sums[run.cluster * self.d..(run.cluster + 1) * self.d];
            own.iter_mut().zip(&run.sum).for_each(|(all, x)| *all += x);
            self.counts[run.cluster] += run.count;
        }
    }

    /// The sums, one cluster behind the other, and the counts.
    pub fn into_parts(self) -> (Vec<f64>, Vec<u64>) {
        (self.sums, self.counts)
    }

    /// Means become centroids; a cluster without points keeps its own. Returns how far they moved, as the root of the sum
    /// of squares.
    pub fn finish(self, centroids: &mut [f32], metric: Metric) -> f64 {
        let mut moved = 0.0;
        let rows = centroids.chunks_exact_mut(self.d).zip(self.sums.chunks_exact(self.d));
        for ((centroid, sum), &count) in rows.zip(&self.counts) {
            if count == 0 {
                continue;
            }
            let mut new: Vec<f32> = sum.iter().map(|s| (s / count as f64) as f32).collect();
            if metric == Metric::Cosine {
                if new.iter().all(|&x| x == 0.0) {
                    continue; // directions that cancel have no mean
                }
                unit(&mut new);
            }
            for (c, x) in centroid.iter_mut().zip(new) {
                moved += (f64::from(x) - f64::from(*c)).powi(2);
                *c = x;
            }
        }
        moved.sqrt()
    }
}

/// Scales a row to length 1; one of zeros stays.
pub(crate) fn unit(row: &mut [f32]) {
    let norm = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
    if norm > 0.0 {
        row.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

/// Rows by label, and by number within a label.
pub(crate) fn sorted(labels: &[u32], clusters: usize) -> Vec<u32> {
    let mut starts: Vec<usize> = stop::zeros("rows by cluster", clusters + 1);
    labels.iter().for_each(|&label| starts[label as usize + 1] += 1);
    for c in 0..clusters {
        starts[c + 1] += starts[c];
    }
    let mut order: Vec<u32> = stop::zeros("rows by cluster", labels.len());
    for (row, &label) in labels.iter().enumerate() {
        order[starts[label as usize]] = row as u32;
        starts[label as usize] += 1;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_is_stable() {
        assert_eq!(sorted(&[2, 0, 2, 1, 0], 3), [1, 4, 3, 0, 2]);
        assert_eq!(sorted(&[], 2), [0u32; 0]);
    }
}
