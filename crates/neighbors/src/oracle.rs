//! The definition of each answer: f64, loops, no tiles.

use crate::{Metric, Points};

/// The distance of two rows; euclidean distances are squared.
pub fn far(metric: Metric, a: &[f32], b: &[f32]) -> f64 {
    let pairs = || a.iter().zip(b).map(|(&a, &b)| (f64::from(a), f64::from(b)));
    let dot = || pairs().map(|(a, b)| a * b).sum::<f64>();
    match metric {
        Metric::Euclidean => pairs().map(|(a, b)| (a - b) * (a - b)).sum(),
        Metric::Dot => -dot(),
        Metric::Cosine => {
            let (aa, bb) = pairs().fold((0.0, 0.0), |(aa, bb), (a, b)| (aa + a * a, bb + b * b));
            1.0 - dot() / (aa.sqrt() * bb.sqrt()).max(f64::MIN_POSITIVE)
        }
    }
}

/// The nearest centroid of each point, the first of equally near ones.
pub fn labels(metric: Metric, points: Points<'_>, centroids: Points<'_>) -> Vec<u32> {
    let nearest = |i: usize| {
        let mut best = (f64::INFINITY, 0);
        for c in 0..centroids.len() {
            let value = far(metric, points.row(i), centroids.row(c));
            if value < best.0 {
                best = (value, c as u32);
            }
        }
        best.1
    };
    (0..points.len()).map(nearest).collect()
}

/// Means of the points of each cluster; a cluster without points keeps its centroid.
pub fn means(points: Points<'_>, labels: &[u32], centroids: Points<'_>) -> Vec<f64> {
    let d = points.dim();
    let mut out: Vec<f64> = Vec::with_capacity(centroids.len() * d);
    for c in 0..centroids.len() {
        let own: Vec<usize> = (0..points.len()).filter(|&i| labels[i] as usize == c).collect();
        for x in 0..d {
            let sum: f64 = own.iter().map(|&i| f64::from(points.row(i)[x])).sum();
            out.push(if own.is_empty() { f64::from(centroids.row(c)[x]) } else { sum / own.len() as f64 });
        }
    }
    out
}

/// The k nearest rows of `base` for each query: (how far, row), nearest first, lower rows first among equals.
pub fn neighbors(metric: Metric, queries: Points<'_>, base: Points<'_>, k: usize) -> Vec<Vec<(f64, u32)>> {
    let nearest = |i: usize| {
        let mut all: Vec<(f64, u32)> =
            (0..base.len()).map(|j| (far(metric, queries.row(i), base.row(j)), j as u32)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        all.truncate(k);
        all
    };
    (0..queries.len()).map(nearest).collect()
}

/// The weight of a minimum spanning tree of the mutual reachability distances (Prim's algorithm), from the distances
/// to neighbour `min_samples` (the point itself is the first).
pub fn spanning_tree(points: Points<'_>, min_samples: usize) -> (Vec<f64>, f64) {
    let n = points.len();
    let lists = neighbors(Metric::Euclidean, points, points, min_samples.min(n));
    let cores: Vec<f64> = lists.iter().map(|list| list[list.len() - 1].0.sqrt()).collect();
    let mut best = vec![f64::INFINITY; n];
    let mut inside = vec![false; n];
    let (mut at, mut total) = (0, 0.0);
    for _ in 1..n {
        inside[at] = true;
        for j in (0..n).filter(|&j| !inside[j]) {
            let away = far(Metric::Euclidean, points.row(at), points.row(j)).sqrt();
            best[j] = best[j].min(away.max(cores[at]).max(cores[j]));
        }
        at = (0..n)
            .filter(|&j| !inside[j])
            .fold(usize::MAX, |a, j| if a == usize::MAX || best[j] < best[a] { j } else { a });
        total += best[at];
    }
    (cores, total)
}
