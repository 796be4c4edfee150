//! Clusters of keys as the proxy of block skipping. The mean of a cluster represents its keys, wherever they are. So a
//! tile with keys of two topics is credited with the weight of both, while its own mean would represent neither.

use crate::error::InputError;
use crate::inputs::{Bound, Sequence};
use crate::problem::{Layout, Side};
use std::ops::Range;

/// Clusters of all keys, by sequence and key/value head.
#[derive(Debug, PartialEq)]
pub(crate) struct Clusters {
    heads: usize,
    all: Vec<HeadClusters>,
}

/// Clusters of the keys of one head.
#[derive(Debug, PartialEq)]
struct HeadClusters {
    /// Mean of each cluster.
    means: Vec<Vec<f64>>,
    /// For each tile, the clusters with keys in it, and the number of those keys.
    tiles: Vec<Vec<(usize, f64)>>,
    /// Tiles with non-finite keys, which no mean represents.
    odd: Vec<bool>,
}

impl Clusters {
    /// Makes clusters from a label per key, in the order of k without its last axis.
    pub fn new(bound: &Bound<'_>, labels: &[u32], cols: usize) -> Result<Clusters, InputError> {
        let problem = bound.problem();
        let mut want = problem.k_shape();
        want.pop();
        if labels.len() != want.iter().product::<usize>() {
            return Err(InputError::Shape { arg: "labels".into(), got: vec![labels.len()], want });
        }
        let (heads, d) = (problem.kv_heads(), problem.head_dim());
        let strides = match problem.layout() {
            Layout::Dense { .. } => vec![want[1] * heads, heads, 1],
            Layout::Packed(_) => vec![heads, 1],
        };
        let mut all = Vec::new();
        for s in bound.sequences() {
            let (keys, own) =
                (bound.row_layout(bound.k().strides(), s, Side::Key), bound.row_layout(&strides, s, Side::Key));
            for head in 0..heads {
                let label = |key: usize| labels[own.at(key, head)];
                let row = |key: usize| (0..d).map(move |c| bound.k().at(keys.at(key, head) + c)).collect::<Vec<f64>>();
                all.push(HeadClusters::new(s.k_len, cols, d, label, row));
            }
        }
        Ok(Clusters { heads, all })
    }

    /// The logarithm of each tile's expected share of the weight of these rows, and the tiles that are always kept.
    pub fn speak(
        &self,
        bound: &Bound<'_>,
        s: &Sequence,
        head: usize,
        rows: Range<usize>,
        tiles: &[usize],
    ) -> (Vec<(usize, f64)>, Vec<usize>) {
        let problem = bound.problem();
        let (d, own) = (problem.head_dim(), &self.all[s.batch * self.heads + head / problem.group()]);
        let (odd, heard): (Vec<usize>, Vec<usize>) = tiles.iter().partition(|&&t| own.odd[t]);
        let mut shares = vec![0.0f64; heard.len()];
        let at = bound.row_layout(bound.q().strides(), s, Side::Query);
        let count = rows.len() as f64;
        for i in rows {
            let q: Vec<f64> = (0..d).map(|c| bound.q().at(at.at(i, head) + c)).collect();
            let dot = |mean: &Vec<f64>| q.iter().zip(mean).map(|(x, y)| x * y).sum::<f64>();
            let logits: Vec<f64> = own.means.iter().map(|mean| f64::from(problem.scale()) * dot(mean)).collect();
            if logits.iter().any(|x| !x.is_finite()) {
                return (Vec::new(), tiles.to_vec());
            }
            let seen = || heard.iter().flat_map(|&t| &own.tiles[t]);
            let top = seen().map(|x| logits[x.0]).fold(f64::NEG_INFINITY, f64::max);
            let weight = |t: usize| own.tiles[t].iter().map(|&(c, keys)| keys * (logits[c] - top).exp()).sum::<f64>();
            let weights: Vec<f64> = heard.iter().map(|&t| weight(t)).collect();
            let total: f64 = weights.iter().sum();
            shares.iter_mut().zip(weights).for_each(|(share, weight)| *share += weight / total / count);
        }
        (heard.into_iter().zip(shares).map(|(t, share)| (t, share.ln())).collect(), odd)
    }
}

impl HeadClusters {
    fn new(
        k_len: usize,
        cols: usize,
        d: usize,
        label: impl Fn(usize) -> u32,
        row: impl Fn(usize) -> Vec<f64>,
    ) -> HeadClusters {
        let mut names: Vec<u32> = (0..k_len).map(&label).collect();
        names.sort_unstable();
        names.dedup();
        let mut means = vec![vec![0.0; d]; names.len()];
        let mut counts = vec![0.0; names.len()];
        let count = k_len.div_ceil(cols);
        let (mut tiles, mut odd) = (Vec::with_capacity(count), vec![false; count]);
        for (tile, odd) in odd.iter_mut().enumerate() {
            let mut own: Vec<usize> = Vec::new();
            for key in tile * cols..((tile + 1) * cols).min(k_len) {
                let values = row(key);
                if values.iter().any(|x| !x.is_finite()) {
                    *odd = true;
                    continue;
                }
                let cluster = names.partition_point(|&name| name < label(key));
                means[cluster].iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
                counts[cluster] += 1.0;
                own.push(cluster);
            }
            own.sort_unstable();
            tiles.push(own.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as f64)).collect());
        }
        for (mean, n) in means.iter_mut().zip(counts) {
            mean.iter_mut().for_each(|x| *x /= f64::max(n, 1.0));
        }
        HeadClusters { means, tiles, odd }
    }
}

#[cfg(test)]
mod tests {
    use crate::random::Rng;
    use crate::skip::{Proxy, Skip, SkipProblem, TileCounts};
    use crate::{DType, Inputs, Mask, Problem, Tensor};

    const N: usize = 96;

    fn skip(proxy: Option<Proxy>) -> Skip {
        Skip { proxy, tile: [32, 16], first_tile: false, ..Skip::default() }
    }

    fn tensors(rng: &mut Rng, d: usize) -> [Tensor; 2] {
        [3.0, 1.0].map(|sigma| Tensor::from_f64(DType::F32, &rng.normals(N * d, sigma), &[1, N, 1, d]).unwrap())
    }

    /// If every key is its own cluster, a tile's expected weight is exactly that of its keys.
    #[test]
    fn a_cluster_for_each_key_promises_the_truth() {
        let (mut rng, d, mass) = (Rng::new(5), 6, 0.7);
        let builder = Problem::builder().dense(1, N, N).heads(1, 1).head_dim(d);
        let proxy = Proxy::Mass { mass, similarity: 1.0 };
        let problem = SkipProblem::new(builder, skip(Some(proxy))).unwrap();
        let [q, k] = tensors(&mut rng, d);
        let inputs = Inputs::new(q.view(), k.view(), k.view());
        // Labels may be arbitrary numbers.
        let labels: Vec<u32> = (0..N as u32).map(|key| u32::MAX - 7 * key).collect();
        let bound = problem.bind(&inputs).unwrap().with_clusters(&labels).unwrap();
        let (q, k) = (q.view().to_f64(), k.view().to_f64());
        bound.each(|s, head, tile| {
            let mut shares = [0.0; N / 16];
            for i in tile * 32..(tile + 1) * 32 {
                let dot = |j: usize| (0..d).map(|c| q[i * d + c] * k[j * d + c]).sum::<f64>();
                let weights: Vec<f64> = (0..N).map(|j| (dot(j) / (d as f64).sqrt()).exp()).collect();
                let total: f64 = weights.iter().sum();
                weights.iter().enumerate().for_each(|(j, w)| shares[j / 16] += w / total / 32.0);
            }
            let mut order: Vec<usize> = (0..N / 16).collect();
            order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]));
            let mut held = 0.0;
            let diagonal = |t: &usize| (tile * 2..=tile * 2 + 1).contains(t);
            let mut want: Vec<usize> = order
                .into_iter()
                .filter(|&t| {
                    let within = held <= f64::from(mass);
                    held += shares[t];
                    within || diagonal(&t)
                })
                .collect();
            want.sort_unstable();
            assert_eq!(bound.admitted(s, head, tile, &mut TileCounts::default()), want);
        });
    }

    #[test]
    fn keys_that_are_no_numbers_are_kept_and_wrong_labels_refused() {
        let (mut rng, d) = (Rng::new(6), 4);
        let builder = Problem::builder().dense(1, N, N).heads(1, 1).head_dim(d).mask(Mask::causal());
        let top = Some(Proxy::Top { share: 0.0, similarity: 1.0 });
        let problem = SkipProblem::new(builder.clone(), skip(top)).unwrap();
        let [q, k] = tensors(&mut rng, d);
        let mut values = k.view().to_f64();
        values[17 * d] = f64::NAN;
        let k = Tensor::from_f64(DType::F32, &values, &[1, N, 1, d]).unwrap();
        let inputs = Inputs::new(q.view(), k.view(), k.view());
        let bound = problem.bind(&inputs).unwrap().with_clusters(&[3; N]).unwrap();
        let mut last = Vec::new();
        bound.each(|s, head, tile| last = bound.admitted(s, head, tile, &mut TileCounts::default()));
        assert_eq!(last, [1, 4, 5], "the tile of key 17, and the diagonal's");
        let short = problem.bind(&inputs).unwrap().with_clusters(&[0; 5]).unwrap_err().to_string();
        assert_eq!(short, "`labels` has shape [5], allowed: [1, 96, 1]; check the sizes given to the problem");
        let none = SkipProblem::new(builder, skip(None)).unwrap();
        let unused = none.bind(&inputs).unwrap().with_clusters(&[0; N]).unwrap_err().to_string();
        assert_eq!(unused, "`labels` was given, the problem does not use it; choose a proxy, mass or top");
    }
}
