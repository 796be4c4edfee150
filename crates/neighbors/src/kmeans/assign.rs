//! The nearest centroid of each point: one walk over tiles, and a second look at points for which two centroids are worth the
//! same within the error of the first.

use crate::{Metric, Points};
use fulgurite_core::stop;
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{Best, Fold, Frame, MAX_LANES, PackedKeys, Queries, Scanner, Scores};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows whose distances one sum takes in order.
const SUM: usize = 4096;

pub(crate) struct Assign<'a> {
    scanner: Scanner,
    frame: &'a Frame,
    metric: Metric,
    exact: bool,
}

/// A point that needs a second look: every centroid worth at least `bar` may be the nearest.
struct Doubt {
    row: u32,
    bar: f32,
}

impl<'a> Assign<'a> {
    pub fn new(scanner: Scanner, frame: &'a Frame, metric: Metric, exact: bool) -> Self {
        Assign { scanner, frame, metric, exact }
    }

    pub fn keys(&self, centroids: &[f32], d: usize) -> PackedKeys {
        self.scanner.keys(centroids, d, self.frame, self.metric.worth())
    }

    /// Less is nearer; exact but for the rounding of f64.
    fn far(&self, x: &[f32], c: &[f32]) -> f64 {
        match self.metric {
            Metric::Euclidean => self.scanner.distance(x, c),
            Metric::Dot => -self.scanner.dot(x, c),
            Metric::Cosine => {
                let norms = self.scanner.dot(x, x).sqrt() * self.scanner.dot(c, c).sqrt();
                1.0 - self.scanner.dot(x, c) / norms.max(f64::MIN_POSITIVE)
            }
        }
    }

    /// Writes the labels and returns how many changed.
    pub fn labels(&self, points: Points<'_>, keys: &PackedKeys, centroids: &[f32], labels: &mut [u32]) -> usize {
        let (changed, doubts) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let group = self.scanner.group();
        pool::each(self.scanner.threads(), labels.chunks_mut(group), |item, labels| {
            let first = item * group;
            let range = (first, labels.len());
            let queries = Queries { rows: points.data(), d: points.dim(), range, list: None, frame: self.frame };
            let mut fold = Nearest::default();
            self.scanner.walk(&queries, keys, 0..keys.len(), &mut fold);
            let mut own = Vec::new();
            for (i, label) in labels.iter_mut().enumerate() {
                let (best, second) = (f64::from(fold.best.best[i]), f64::from(fold.best.second[i]));
                // 1.001: the norm is summed in f32.
                let margin = self.scanner.margin(points.dim(), keys, 1.001 * f64::from(fold.norms[i]).sqrt());
                // Written so that a NaN is a doubt.
                let sure = best - second > 2.0 * margin;
                if self.exact && keys.len() > 1 && !sure {
                    own.push(Doubt { row: (first + i) as u32, bar: below(best - 2.0 * margin) });
                } else if *label != fold.best.index[i] {
                    *label = fold.best.index[i];
                    changed.fetch_add(1, Ordering::Relaxed);
                }
            }
            if !own.is_empty() {
                doubts.lock().unwrap_or_else(|e| e.into_inner()).extend(own);
            }
        });
        let mut doubts: Vec<Doubt> = doubts.into_inner().unwrap_or_else(|e| e.into_inner());
        doubts.sort_unstable_by_key(|doubt| doubt.row);
        changed.into_inner() + self.resolve(points, keys, centroids, &doubts, labels)
    }

    /// Looks at the doubts again: all centroids above the bar, compared in f64.
    fn resolve(
        &self,
        points: Points<'_>,
        keys: &PackedKeys,
        centroids: &[f32],
        doubts: &[Doubt],
        labels: &mut [u32],
    ) -> usize {
        let rows: Vec<u32> = doubts.iter().map(|doubt| doubt.row).collect();
        let mut nearest: Vec<u32> = stop::zeros("labels", rows.len());
        let (group, d) = (self.scanner.group(), points.dim());
        pool::each(self.scanner.threads(), nearest.chunks_mut(group), |item, nearest| {
            let (first, count) = (item * group, nearest.len());
            let mut bars: Vec<f32> = doubts[first..first + count].iter().map(|doubt| doubt.bar).collect();
            bars.resize(count.next_multiple_of(MAX_LANES), f32::INFINITY);
            let mut fold = Candidates { bars, found: Vec::new(), all: vec![Vec::new(); count] };
            let range = (first, count);
            let queries = Queries { rows: points.data(), d, range, list: Some(&rows), frame: self.frame };
            self.scanner.walk(&queries, keys, 0..keys.len(), &mut fold);
            for (i, (out, candidates)) in nearest.iter_mut().zip(&fold.all).enumerate() {
                let x = points.row(rows[first + i] as usize);
                let far = |c: u32| self.far(x, &centroids[c as usize * d..(c as usize + 1) * d]);
                // Nothing above a bar that is no number: overflow, so look at every centroid.
                let every = 0..keys.len() as u32;
                *out = if candidates.is_empty() { least(every, far) } else { least(candidates.iter().copied(), far) };
            }
        });
        let mut changed = 0;
        for (&row, &label) in rows.iter().zip(&nearest) {
            changed += usize::from(labels[row as usize] != label);
            labels[row as usize] = label;
        }
        changed
    }

    /// Sum of the distances of [`far`](Self::far), in f64, in an order that depends on the rows alone.
    pub fn inertia(&self, points: Points<'_>, centroids: &[f32], labels: &[u32]) -> f64 {
        let mut total = 0.0;
        self.inertia_parts(points, centroids, labels, &mut total);
        total
    }

    /// The same, added to the sum of the rows before.
    pub fn inertia_parts(&self, points: Points<'_>, centroids: &[f32], labels: &[u32], total: &mut f64) {
        let d = points.dim();
        let mut sums: Vec<f64> = stop::zeros("sums of distances", labels.len().div_ceil(SUM));
        pool::each(self.scanner.threads(), labels.chunks(SUM).zip(&mut sums), |item, (labels, sum)| {
            for (i, &label) in labels.iter().enumerate() {
                let c = label as usize;
                *sum += self.far(points.row(item * SUM + i), &centroids[c * d..(c + 1) * d]);
            }
        });
        sums.iter().for_each(|sum| *total += sum);
    }

    /// All distances, as the metric has them.
    pub fn distances(&self, points: Points<'_>, centroids: &[f32]) -> Vec<f32> {
        let d = points.dim();
        let clusters = centroids.len() / d;
        let mut out: Vec<f32> = stop::zeros("distances to all centroids", points.len().saturating_mul(clusters));
        pool::each(self.scanner.threads(), out.chunks_mut(64 * clusters), |item, out| {
            for (i, row) in out.chunks_exact_mut(clusters).enumerate() {
                let x = points.row(item * 64 + i);
                for (out, c) in row.iter_mut().zip(centroids.chunks_exact(d)) {
                    let far = self.far(x, c);
                    *out = if self.metric == Metric::Euclidean { far.sqrt() } else { far } as f32;
                }
            }
        });
        out
    }
}

/// The first of the least; candidates ascend.
fn least(candidates: impl Iterator<Item = u32>, far: impl Fn(u32) -> f64) -> u32 {
    let mut best = (f64::INFINITY, u32::MAX);
    for c in candidates {
        let value = far(c);
        if value < best.0 || best.1 == u32::MAX {
            best = (value, c);
        }
    }
    best.1
}

/// As f32, not above.
pub(crate) fn below(x: f64) -> f32 {
    let y = x as f32;
    if f64::from(y) > x { y.next_down() } else { y }
}

#[derive(Default)]
struct Nearest {
    best: Best,
    norms: Vec<f32>,
}

impl Fold for Nearest {
    fn begin(&mut self, norms: &[f32]) {
        self.norms = norms.to_vec();
        self.best.reset(norms.len());
    }
    fn tile(&mut self, scores: &Scores<'_>) {
        scores.best(&mut self.best);
    }
}

struct Candidates {
    bars: Vec<f32>,
    found: Vec<(u32, u32, f32)>,
    all: Vec<Vec<u32>>,
}

impl Fold for Candidates {
    fn begin(&mut self, _: &[f32]) {}
    fn tile(&mut self, scores: &Scores<'_>) {
        self.found.clear();
        scores.above(&self.bars, &mut self.found);
        for &(lane, key, _) in &self.found {
            self.all[scores.lanes.0 + lane as usize].push(scores.first_key as u32 + key);
        }
    }
}
