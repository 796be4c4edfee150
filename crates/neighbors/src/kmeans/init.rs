//! First centroids.

use crate::{Metric, Points};
use fulgurite_core::random::Rng;
use fulgurite_core::stop;
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{Frame, Scanner};

/// Rows whose distances are summed together.
const PART: usize = 2048;

/// Different rows, uniformly.
pub(super) fn random(points: Points<'_>, clusters: usize, seed: u64) -> Vec<f32> {
    let rows = distinct(points.len(), clusters, seed);
    rows.iter().flat_map(|&row| points.row(row).iter().copied()).collect()
}

/// `count` different numbers below `n`, in the order in which they were drawn.
pub(super) fn distinct(n: usize, count: usize, seed: u64) -> Vec<usize> {
    let mut rng = Rng::new(seed);
    // A Fisher-Yates shuffle that remembers only the places it touched.
    let mut moved = std::collections::HashMap::new();
    (0..count)
        .map(|i| {
            let j = rng.range(i..n);
            let at = moved.get(&j).copied().unwrap_or(j);
            let own = moved.get(&i).copied().unwrap_or(i);
            moved.insert(j, own);
            at
        })
        .collect()
}

/// Each next centroid is a point, drawn with the probability of its squared distance to the centroids so far (with the
/// other metrics, the squared distance of the directions). Where all distances are 0, uniformly.
pub(super) fn plus_plus(
    points: Points<'_>,
    clusters: usize,
    seed: u64,
    scanner: &Scanner,
    frame: &Frame,
    metric: Metric,
) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    let scale = f64::from(frame.scale).powi(2);
    let mut nearest: Vec<f64> = stop::zeros("distances to the first centroids", points.len());
    nearest.fill(f64::INFINITY);
    let mut sums: Vec<f64> = stop::zeros("distances to the first centroids", points.len().div_ceil(PART));
    let mut chosen = vec![rng.range(0..points.len())];
    let norm = |x: &[f32]| scanner.dot(x, x).sqrt().max(f64::MIN_POSITIVE);
    while chosen.len() < clusters {
        let last = points.row(chosen[chosen.len() - 1]);
        let last_norm = norm(last);
        pool::each(scanner.threads(), nearest.chunks_mut(PART).zip(&mut sums), |part, (nearest, sum)| {
            *sum = 0.0;
            for (i, nearest) in nearest.iter_mut().enumerate() {
                let x = points.row(part * PART + i);
                let far = match metric {
                    Metric::Euclidean => scanner.distance(x, last) * scale,
                    _ => (2.0 - 2.0 * scanner.dot(x, last) / (norm(x) * last_norm)).max(0.0),
                };
                *nearest = nearest.min(far);
                *sum += *nearest;
            }
        });
        chosen.push(draw(&nearest, &sums, &mut rng));
    }
    chosen.iter().flat_map(|&row| points.row(row).iter().copied()).collect()
}

fn draw(nearest: &[f64], sums: &[f64], rng: &mut Rng) -> usize {
    let total: f64 = sums.iter().sum();
    if total.is_nan() || total <= 0.0 {
        return rng.range(0..nearest.len());
    }
    let mut at = rng.uniform() * total;
    for (part, &sum) in sums.iter().enumerate() {
        if at >= sum && part + 1 < sums.len() {
            at -= sum;
            continue;
        }
        let first = part * PART;
        let own = &nearest[first..(first + PART).min(nearest.len())];
        // Rounding may leave a little more than the part has: then its last point that can be drawn.
        let mut last = None;
        for (i, &x) in own.iter().enumerate().filter(|(_, x)| **x > 0.0) {
            if at < x {
                return first + i;
            }
            at -= x;
            last = Some(first + i);
        }
        if let Some(last) = last {
            return last;
        }
    }
    nearest.iter().position(|&x| x > 0.0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_rows_differ() {
        for (n, count) in [(1, 1), (5, 5), (1000, 40)] {
            let mut rows = distinct(n, count, 9);
            rows.sort_unstable();
            rows.dedup();
            assert!(rows.len() == count && rows.iter().all(|&r| r < n));
        }
    }

    #[test]
    fn points_at_distance_zero_are_not_drawn() {
        let nearest = [0.0, 3.0, 0.0, 1.0, 0.0];
        let mut rng = Rng::new(4);
        for _ in 0..200 {
            assert!([1, 3].contains(&draw(&nearest, &[4.0], &mut rng)));
        }
    }
}
