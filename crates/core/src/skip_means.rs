//! Means of tiles as the proxy of block skipping, each computed once for a call.

use crate::inputs::{Bound, Sequence};
use crate::problem::Side;
use crate::sums::dot;
use crate::tensor::Data;
use half::bf16;
use half::slice::HalfFloatSliceExt;
use std::ops::Range;
use std::sync::OnceLock;

/// The rows of a tile in two numbers: where they point on average, and how alike they are.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TileMean {
    /// Mean of the rows.
    pub mean: Vec<f64>,
    /// Mean of the Gram matrix of the unit rows, from 0 to 1. It is NaN if a row is not finite.
    pub alike: f64,
}

/// Means of all tiles of q or k, computed by the first thread that needs them.
#[derive(Debug)]
pub(crate) struct TileMeans {
    side: Side,
    /// Rows of a tile.
    rows: usize,
    heads: usize,
    /// Tiles of the longest sequence.
    tiles: usize,
    means: Vec<OnceLock<TileMean>>,
}

impl TileMeans {
    /// Means of tiles of `rows` queries or keys. None is computed yet.
    pub fn new(bound: &Bound<'_>, side: Side, rows: usize) -> TileMeans {
        let problem = bound.problem();
        let (heads, most) = match side {
            Side::Query => (problem.q_heads(), problem.max_q_len()),
            Side::Key => (problem.kv_heads(), problem.max_k_len()),
        };
        let tiles = most.div_ceil(rows);
        let means = (0..bound.sequences().len() * heads * tiles).map(|_| OnceLock::new()).collect();
        TileMeans { side, rows, heads, tiles, means }
    }

    /// The mean of a tile of a head. A thread waits for another that computes the same.
    pub fn of(&self, bound: &Bound<'_>, s: &Sequence, head: usize, tile: usize) -> &TileMean {
        let at = (s.batch * self.heads + head) * self.tiles + tile;
        self.means[at].get_or_init(|| {
            let count = match self.side {
                Side::Query => s.q_len,
                Side::Key => s.k_len,
            };
            let rows = tile * self.rows..((tile + 1) * self.rows).min(count);
            summary(bound, self.side, s, head, rows)
        })
    }
}

/// The mean of some rows of a head, and how alike they are.
fn summary(bound: &Bound<'_>, side: Side, s: &Sequence, head: usize, rows: Range<usize>) -> TileMean {
    let view = match side {
        Side::Query => bound.q(),
        Side::Key => bound.k(),
    };
    let (d, at) = (bound.problem().head_dim(), bound.row_layout(view.strides(), s, side));
    let each = 1.0 / rows.len() as f64;
    let (mut mean, mut unit, mut row) = (vec![0.0f64; d], vec![0.0f64; d], vec![0.0f32; d]);
    for i in rows {
        let start = at.at(i, head);
        // The last axis is contiguous, so a row is a slice. bf16 is the upper half of an f32.
        match view.data() {
            Data::F32(x) => row.copy_from_slice(&x[start..start + d]),
            Data::F16(x) => x[start..start + d].convert_to_f32_slice(&mut row),
            Data::Bf16(x) => {
                let wide = |x: &bf16| f32::from_bits(u32::from(x.to_bits()) << 16);
                row.iter_mut().zip(&x[start..start + d]).for_each(|(to, x)| *to = wide(x));
            }
            _ => row.iter_mut().enumerate().for_each(|(c, to)| *to = view.at(start + c) as f32),
        }
        let share = each / dot(&row, &row).sqrt().max(1e-30);
        for ((mean, unit), &x) in mean.iter_mut().zip(&mut unit).zip(&row) {
            *mean += f64::from(x) * each;
            *unit += f64::from(x) * share;
        }
    }
    // The mean of the Gram matrix of unit rows is the squared norm of their mean.
    TileMean { alike: dot(&unit, &unit), mean }
}

#[cfg(test)]
mod tests {
    use crate::random::Rng;
    use crate::skip::{HeadClass, Proxy, Skip, SkipProblem, TileCounts};
    use crate::{DType, Inputs, Mask, Problem, Side, Tensor};
    use proptest::prelude::*;

    const ROWS: usize = 32;
    const COLS: usize = 16;
    const D: usize = 5;

    /// Selection by its definition, written from the formulas alone: plain loops over `[sequence][dim]`.
    struct Definition {
        q: Vec<f64>,
        k: Vec<f64>,
        proxy: Proxy,
        first_tile: bool,
    }

    impl Definition {
        fn rows(x: &[f64], tile: usize, size: usize) -> Vec<&[f64]> {
            x.chunks(D).skip(tile * size).take(size).collect()
        }

        fn mean(rows: &[&[f64]]) -> Vec<f64> {
            (0..D).map(|c| rows.iter().map(|row| row[c]).sum::<f64>() / rows.len() as f64).collect()
        }

        /// Mean cosine of all pairs of rows.
        fn alike(rows: &[&[f64]]) -> f64 {
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
            let cosine = |a: &[f64], b: &[f64]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
            let all = rows.iter().flat_map(|a| rows.iter().map(|b| cosine(a, b)));
            all.sum::<f64>() / (rows.len() * rows.len()) as f64
        }

        /// The tiles of keys that a tile of queries keeps, under a causal mask of a square problem.
        fn kept(&self, tile: usize) -> Vec<usize> {
            let queries = Self::rows(&self.q, tile, ROWS);
            let last = tile * ROWS + queries.len() - 1;
            let tiles: Vec<usize> = (0..=last / COLS).collect();
            let (wanted, similarity) = match self.proxy {
                Proxy::Mass { mass, similarity } => (mass, similarity),
                Proxy::Top { share, similarity } => (share, similarity),
            };
            if Self::alike(&queries) <= f64::from(similarity) {
                return tiles;
            }
            let always = |t: usize| (tile * ROWS / COLS..=last / COLS).contains(&t) || (t == 0 && self.first_tile);
            let q = Self::mean(&queries);
            let (mut keep, mut scored) = (Vec::new(), Vec::new());
            for &t in &tiles {
                let keys = Self::rows(&self.k, t, COLS);
                let dot: f64 = q.iter().zip(Self::mean(&keys)).map(|(x, y)| x * y).sum();
                if Self::alike(&keys) <= f64::from(similarity) {
                    keep.push(t);
                } else {
                    scored.push((dot / (D as f64).sqrt(), t));
                }
            }
            scored.sort_by(|a, b| b.0.total_cmp(&a.0));
            let total: f64 = scored.iter().map(|x| x.0.exp()).sum();
            let forced = keep.len() + scored.iter().filter(|x| always(x.1)).count();
            let budget = (1..=tiles.len()).find(|&n| n as f64 >= f64::from(wanted) * tiles.len() as f64 - 1e-6);
            let (mut before, mut others) = (0.0, budget.unwrap_or(0).saturating_sub(forced));
            for (score, t) in scored {
                let chosen = match self.proxy {
                    Proxy::Mass { mass, .. } => before <= f64::from(mass),
                    Proxy::Top { .. } => !always(t) && others > 0,
                };
                before += score.exp() / total;
                if always(t) {
                    keep.push(t);
                } else if chosen {
                    others = others.saturating_sub(1);
                    keep.push(t);
                }
            }
            keep.sort_unstable();
            keep
        }
    }

    fn tensor(values: &[f64]) -> Tensor {
        Tensor::from_f64(DType::F32, values, &[1, values.len() / D, 1, D]).unwrap()
    }

    fn problem(n: usize, proxy: Proxy, first_tile: bool) -> SkipProblem {
        let builder = Problem::builder().dense(1, n, n).heads(1, 1).head_dim(D).mask(Mask::causal());
        let skip = Skip { proxy: Some(proxy), tile: [ROWS, COLS], first_tile, ..Skip::default() };
        SkipProblem::new(builder, skip).unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        #[test]
        fn both_proxies_keep_what_their_definition_keeps(
            seed in 0u64..1 << 40,
            n in 1usize..300,
            by_mass in any::<bool>(),
            percent in 0u32..=100,
            similarity in -0.2f32..0.9,
            first_tile in any::<bool>(),
        ) {
            let mut rng = Rng::new(seed);
            // Rows around a few directions, so that some tiles are alike and others are not.
            let mut rows = |sigma: f64| -> Vec<f64> {
                let noise = rng.normals(n * D, 1.0);
                noise.iter().enumerate().map(|(i, x)| x + sigma * f64::from(u8::from(i / D / 40 % 3 == i % D))).collect()
            };
            let (q, k) = (tensor(&rows(3.0)), tensor(&rows(2.0)));
            let share = percent as f32 / 100.0;
            let proxy = match by_mass {
                true => Proxy::Mass { mass: share, similarity },
                false => Proxy::Top { share, similarity },
            };
            let problem = problem(n, proxy, first_tile);
            let bound = problem.bind(&Inputs::new(q.view(), k.view(), k.view())).unwrap();
            let definition = Definition { q: q.view().to_f64(), k: k.view().to_f64(), proxy, first_tile };
            let mut all = Ok(());
            bound.each(|s, head, tile| {
                let got = bound.admitted(s, head, tile, &mut TileCounts::default());
                let want = definition.kept(tile);
                if got != want {
                    all = Err(TestCaseError::fail(format!("row of tiles {tile}: {got:?}, definition: {want:?}")));
                }
            });
            all?;
        }
    }

    #[test]
    fn the_share_kept_is_the_share_asked_for() {
        let n = 40 * COLS;
        let k = tensor(&Rng::new(7).normals(n * D, 1.0).iter().map(|x| x + 4.0).collect::<Vec<f64>>());
        for (share, want) in [(0.1, 4), (0.4, 16), (0.7, 28), (0.41, 17), (1.0, 40), (0.0, 3)] {
            let problem = problem(n, Proxy::Top { share, similarity: 0.0 }, true);
            let bound = problem.bind(&Inputs::new(k.view(), k.view(), k.view())).unwrap();
            let mut last = 0;
            bound.each(|s, head, tile| last = bound.admitted(s, head, tile, &mut TileCounts::default()).len());
            // The last row of tiles has 40; two of the diagonal and the first are kept in any case.
            assert_eq!(last, want, "share {share}");
        }
    }

    /// Threads compute the means of the heads that see many tiles beforehand, each once.
    #[test]
    fn means_are_listed_once() {
        let n = 5 * ROWS + 1;
        let builder = Problem::builder().dense(2, n, n).heads(4, 2).head_dim(D).mask(Mask::causal());
        let (dense, window) = (HeadClass::Dense, HeadClass::Window { keys: 9, sinks: 0 });
        let proxy = Some(Proxy::Top { share: 0.5, similarity: 0.0 });
        let skip = Skip { classes: vec![dense, dense, window, window], proxy, tile: [ROWS, COLS], ..Skip::default() };
        let problem = SkipProblem::new(builder, skip).unwrap();
        let [q, k] = [problem.base().q_shape(), problem.base().k_shape()].map(|shape| {
            Tensor::from_f64(DType::F32, &Rng::new(3).normals(shape.iter().product(), 1.0), &shape).unwrap()
        });
        let bound = problem.bind(&Inputs::new(q.view(), k.view(), k.view())).unwrap();
        let tiles = bound.mean_tiles();
        let of = |side: Side, head: usize| tiles.iter().filter(|t| t.0 == side && t.2 == head).count();
        assert_eq!([0, 1, 2].map(|head| of(Side::Query, head)), [2 * 6, 2 * 6, 0]);
        assert_eq!([0, 1].map(|head| of(Side::Key, head)), [2 * 11, 0]);
        assert!(tiles.iter().enumerate().all(|(i, tile)| !tiles[..i].contains(tile)));
        tiles.into_iter().for_each(|tile| bound.mean(tile));
    }

    #[test]
    fn a_tile_that_is_not_finite_is_kept() {
        let n = 8 * COLS;
        let mut values: Vec<f64> = Rng::new(8).normals(n * D, 1.0).iter().map(|x| x + 4.0).collect();
        let q = tensor(&values);
        values[2 * COLS * D] = f64::NAN;
        let k = tensor(&values);
        let problem = problem(n, Proxy::Top { share: 0.0, similarity: -1.0 }, false);
        let kept = |q: &Tensor, k: &Tensor| {
            let bound = problem.bind(&Inputs::new(q.view(), k.view(), k.view())).unwrap();
            let mut last = Vec::new();
            bound.each(|s, head, tile| last = bound.admitted(s, head, tile, &mut TileCounts::default()));
            last
        };
        assert_eq!(kept(&q, &k), [2, 6, 7], "the tile with NaN, and those of the diagonal");
        let mut values = q.view().to_f64();
        values[(n - 1) * D] = f64::INFINITY;
        assert_eq!(
            kept(&tensor(&values), &q),
            (0..8).collect::<Vec<_>>(),
            "rows that no mean represents see all tiles"
        );
    }
}
