//! Block-skip attention: a head computes only some tiles of scores, chosen at three levels that compose.
//!
//! 1. A class per head, known beforehand: all keys, a window with the first keys, or tiles at powers of two.
//! 2. A proxy: means of tiles represent their rows, or clusters of keys represent their keys, and tiles that would get
//!    little weight are left out.
//! 3. In the kernel: a tile whose largest score is below lambda of the running maximum, in every row, is dropped before
//!    its exponentials and its values. Tiles are visited from the diagonal down (tile 0 first if sinks are kept), so
//!    that the maximum is large early. The order is part of the definition.
//!
//! The kept tiles form a [`BlockMask`]: the result is exactly attention with that mask, and so are the gradients. A
//! dropped weight is at most lambda of the row's largest, so with n dropped keys |o - exact| <= 2 lambda n max|v|.

use crate::block::{BlockMask, BlockSpec};
use crate::error::{InputError, ProblemError};
use crate::expr::{Expr, head, k, k_len, q, q_len};
use crate::inputs::{Bound, Inputs, Sequence};
use crate::mask::Mask;
use crate::precision::Precision;
use crate::problem::{Problem, ProblemBuilder, Side};
use crate::skip_clusters::Clusters;
use crate::skip_means::TileMeans;
use crate::sums::dot;
use std::ops::Range;
use std::sync::Arc;

pub use crate::skip_text::SkipTextError;

/// The keys that a head looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadClass {
    /// Every key.
    Dense,
    /// The last `keys` keys up to the diagonal, and the first `sinks` of the sequence.
    Window {
        /// Keys of the window, including the diagonal's own.
        keys: usize,
        /// Keys at the start that every row sees.
        sinks: usize,
    },
    /// Tiles at distances 0, 1, 2, 4, 8, .. before the diagonal's, and the first tile.
    Log,
}

/// The tiles that a proxy keeps in each row of tiles. If the mean of the Gram matrix of a tile's unit rows is below
/// `similarity`, the tile's mean does not represent it, and the tile is kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Proxy {
    /// The fewest tiles whose shares of the softmax over tiles together exceed `mass`.
    Mass {
        /// Mass from 0 to 1; 0.98 is usual.
        mass: f32,
        /// Similarity from -1 to 1; 0.6 is usual.
        similarity: f32,
    },
    /// The `share` of a row's tiles, rounded up: those with the largest values. Tiles that are kept in any case count.
    Top {
        /// Share from 0 to 1; 0.5 is usual.
        share: f32,
        /// Similarity from -1 to 1; -0.1 is usual.
        similarity: f32,
    },
}

/// The tiles that the kernel drops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lambda {
    /// Tiles below this fraction of the maximum.
    Fixed(f32),
    /// Tiles below this fraction of the maximum divided by the number of keys that the tile's last row sees.
    PerKey(f32),
}

/// All levels of block skipping.
#[derive(Debug, Clone, PartialEq)]
pub struct Skip {
    /// One class for all heads, or one per query head.
    pub classes: Vec<HeadClass>,
    /// The proxy of level 2.
    pub proxy: Option<Proxy>,
    /// The threshold of level 3.
    pub lambda: Option<Lambda>,
    /// Rows and keys of a tile.
    pub tile: [usize; 2],
    /// Whether tile 0 is always kept, and visited first.
    pub first_tile: bool,
}

impl Default for Skip {
    /// Dense heads, nothing dropped, tiles of 128 rows and 64 keys.
    fn default() -> Skip {
        Skip { classes: vec![HeadClass::Dense], proxy: None, lambda: None, tile: [128, 64], first_tile: true }
    }
}

/// An attention problem that skips tiles.
#[derive(Debug, Clone, PartialEq)]
pub struct SkipProblem {
    base: Problem,
    meaning: Problem,
    skip: Skip,
}

impl SkipProblem {
    /// Attention as described, restricted to the tiles that `skip` keeps. Heads with windows need a causal mask.
    pub fn new(builder: ProblemBuilder, skip: Skip) -> Result<SkipProblem, ProblemError> {
        let base = builder.clone().build()?;
        let refuse = |what, hint| Err(ProblemError::Around { system: "block skipping", what, hint });
        if base.blocks().is_some() {
            return refuse("block masks of its own", "give them to attention, or leave them out");
        }
        if base.has_sinks() || base.exp().is_sas() {
            return refuse("sink logits and exp sas", "leave them out");
        }
        if base.precision() != Precision::Native {
            return refuse("quantised products", "use precision native");
        }
        let number =
            |arg, got, allowed: &str, hint| Err(ProblemError::Number { arg, got, allowed: allowed.into(), hint });
        let [rows, cols] = skip.tile;
        if !(16..=1024).contains(&rows) {
            return number("tile rows", rows, "16 to 1024", "128 is usual");
        }
        if ![16, 32, 64, 128].contains(&cols) {
            return number("tile keys", cols, "16, 32, 64 or 128", "64 is usual");
        }
        if ![1, base.q_heads()].contains(&skip.classes.len()) {
            return number("classes", skip.classes.len(), "1, or one for each query head", "repeat or drop some");
        }
        for class in &skip.classes {
            if let HeadClass::Window { keys, sinks } = *class
                && (keys == 0 || keys.max(sinks) >= 1 << 30)
            {
                return number("window", keys, "1 to 2^30 - 1", "a row sees at least its own key");
            }
        }
        let within = |arg, got: f32, low: f32, high: f32| {
            let ok = got >= low && got <= high;
            if ok { Ok(()) } else { Err(ProblemError::Share { arg, got, low, high }) }
        };
        match skip.proxy {
            Some(Proxy::Mass { mass: share, similarity } | Proxy::Top { share, similarity }) => {
                within("proxy share", share, 0.0, 1.0)?;
                within("proxy similarity", similarity, -1.0, 1.0)?;
            }
            None => {}
        }
        match skip.lambda {
            Some(Lambda::Fixed(x)) => within("lambda", x, 0.0, 0.999)?,
            Some(Lambda::PerKey(x)) => within("lambda per key", x, 0.0, 1e9)?,
            None => {}
        }
        let spec = BlockSpec { rows, cols, batch: base.batch(), heads: base.q_heads() };
        let mut meaning = builder.block_mask(spec);
        if let Some(seen) = skip.class_mask(base.q_heads()) {
            meaning = meaning.mask(Mask::custom(seen));
        }
        Ok(SkipProblem { meaning: meaning.build()?, base, skip })
    }

    /// Attention without skipping.
    pub fn base(&self) -> &Problem {
        &self.base
    }
    /// Attention with the mask of the classes and a block mask for the kept tiles: it defines results and gradients.
    pub fn meaning(&self) -> &Problem {
        &self.meaning
    }
    /// The levels of skipping.
    pub fn skip(&self) -> &Skip {
        &self.skip
    }

    /// Checks that tensors fit, and binds them.
    pub fn bind<'a>(&'a self, inputs: &Inputs<'a>) -> Result<SkipBound<'a>, InputError> {
        let bound = inputs.bind(&self.base)?;
        let [rows, cols] = self.skip.tile;
        let means = self.skip.proxy.map(|_| {
            Arc::new([(Side::Query, rows), (Side::Key, cols)].map(|(side, rows)| TileMeans::new(&bound, side, rows)))
        });
        Ok(SkipBound { problem: self, bound, means, clusters: None })
    }
}

impl Skip {
    /// The class of a head.
    pub fn class(&self, head: usize) -> HeadClass {
        self.classes[if self.classes.len() == 1 { 0 } else { head }]
    }

    /// The classes as a condition; `None` if windows limit no head.
    fn class_mask(&self, heads: usize) -> Option<Expr> {
        let one = |class: HeadClass| match class {
            HeadClass::Window { keys, sinks } => {
                let first = q() + k_len() - q_len() - (keys as i32 - 1);
                Some(k().at_least(first) | k().less(sinks as i32))
            }
            HeadClass::Dense | HeadClass::Log => None,
        };
        if self.classes.len() == 1 {
            return one(self.classes[0]);
        }
        let limited = |h: &usize| one(self.classes[*h]).is_some();
        let own = |h: usize| one(self.classes[h]).map(|seen| !head().equals(h as i32) | seen);
        (0..heads).filter(limited).filter_map(own).reduce(|a, b| a & b)
    }
}

impl HeadClass {
    /// The keys that a class lets query `q` see, besides the mask: those at the start, and the others. Both ranges are
    /// ascending and disjoint.
    pub fn keys(self, q: usize, q_len: usize, k_len: usize) -> [Range<usize>; 2] {
        match self {
            HeadClass::Window { keys, sinks } => {
                let first =
                    (q as i64 + k_len as i64 - q_len as i64 - (keys as i64 - 1)).clamp(0, k_len as i64) as usize;
                [0..sinks.min(first), first..k_len]
            }
            HeadClass::Dense | HeadClass::Log => [0..0, 0..k_len],
        }
    }
}

/// Tiles with the logarithm of their weight, and tiles that a proxy does not represent.
type Weighed = (Vec<(usize, f64)>, Vec<usize>);

/// Number of tiles in a share of `n`, rounded up. `share` may exceed the decimal number that the caller wrote by half a
/// unit in its last place, so 0.4 of 10 is 4.
fn share_of(share: f32, n: usize) -> usize {
    (f64::from(share) * n as f64 * (1.0 - f64::from(f32::EPSILON))).ceil() as usize
}

/// Tensors that fit the problem.
#[derive(Debug, Clone)]
pub struct SkipBound<'a> {
    problem: &'a SkipProblem,
    bound: Bound<'a>,
    /// Means of the tiles of q and k, if there is a proxy.
    means: Option<Arc<[TileMeans; 2]>>,
    clusters: Option<Arc<Clusters>>,
}

/// The number of tiles left at each level, among those that the mask lets some row see.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TileCounts {
    /// Tiles that the mask keeps.
    pub visible: u64,
    /// Tiles that the classes keep.
    pub by_class: u64,
    /// Tiles that the proxy keeps.
    pub by_proxy: u64,
    /// Tiles that the kernel keeps.
    pub kept: u64,
}

impl<'a> SkipBound<'a> {
    /// The problem.
    pub fn problem(&self) -> &'a SkipProblem {
        self.problem
    }
    /// The tensors, without skipping.
    pub fn bound(&self) -> &Bound<'a> {
        &self.bound
    }

    /// Uses clusters of keys at level 2 in place of tile means: for each query, a tile is worth what the means of its
    /// keys' clusters are. `labels` gives the cluster of each key, as arbitrary numbers, in the order of k without its
    /// last axis; k-means of a head's keys gives good ones. The proxy still decides how many tiles are kept; its
    /// `similarity` is ignored.
    pub fn with_clusters(mut self, labels: &[u32]) -> Result<Self, InputError> {
        if self.problem.skip.proxy.is_none() {
            return Err(InputError::Unused { arg: "labels".into(), hint: "choose a proxy, mass or top" });
        }
        self.clusters = Some(Arc::new(Clusters::new(&self.bound, labels, self.problem.skip.tile[1])?));
        Ok(self)
    }

    /// The tiles of q, then of k, whose means [`admitted`](Self::admitted) will ask for: the side, a sequence, a head and
    /// a tile. Threads that compute them first, with [`mean`](Self::mean), do not wait for each other later. Heads that
    /// see few tiles are left out.
    pub fn mean_tiles(&self) -> Vec<(Side, usize, usize, usize)> {
        let (problem, skip) = (&self.problem.base, &self.problem.skip);
        if skip.proxy.is_none() || self.clusters.is_some() {
            return Vec::new();
        }
        let (group, [rows, cols]) = (problem.group(), skip.tile);
        let dense = |head: &usize| matches!(skip.class(*head), HeadClass::Dense | HeadClass::Log);
        let heads: Vec<usize> = (0..problem.q_heads()).filter(dense).collect();
        let mut all = Vec::new();
        for (number, s) in self.bound.sequences().iter().enumerate().filter(|(_, s)| s.q_len > 0 && s.k_len > 0) {
            let edges = [0, s.q_len - 1].map(|q| problem.mask().keys(q, s.q_len, s.k_len));
            let seen = edges[0].start.min(edges[1].start) / cols..edges[0].end.max(edges[1].end).div_ceil(cols);
            for (i, &head) in heads.iter().enumerate() {
                all.extend((0..s.q_len.div_ceil(rows)).map(|tile| (Side::Query, number, head, tile)));
                if i == 0 || heads[i - 1] / group != head / group {
                    all.extend(seen.clone().map(|tile| (Side::Key, number, head / group, tile)));
                }
            }
        }
        all
    }

    /// Computes the mean of a tile of [`mean_tiles`](Self::mean_tiles), unless it is known.
    pub fn mean(&self, (side, sequence, head, tile): (Side, usize, usize, usize)) {
        let Some(means) = &self.means else { return };
        means[usize::from(side == Side::Key)].of(&self.bound, &self.bound.sequences()[sequence], head, tile);
    }

    /// The rows of a tile of queries.
    pub fn tile_rows(&self, s: &Sequence, tile: usize) -> Range<usize> {
        let rows = self.problem.skip.tile[0];
        (tile * rows).min(s.q_len)..((tile + 1) * rows).min(s.q_len)
    }

    /// The key tiles that levels 1 and 2 keep in a row of tiles, ascending.
    pub fn admitted(&self, s: &Sequence, head: usize, tile: usize, counts: &mut TileCounts) -> Vec<usize> {
        let skip = &self.problem.skip;
        let rows = self.tile_rows(s, tile);
        if rows.is_empty() || s.k_len == 0 {
            return Vec::new();
        }
        let cols = skip.tile[1];
        let last = rows.end - 1;
        // Check the first and the last row only: spans move with the rows.
        let edges = || [rows.start, last].into_iter();
        let hull = |class: bool| {
            let mask = self.problem.base.mask();
            let own = skip.class(head);
            let part = |q: usize| {
                let span = mask.keys(q, s.q_len, s.k_len);
                let parts = if class { own.keys(q, s.q_len, s.k_len) } else { [0..0, 0..s.k_len] };
                parts.map(|p| p.start.max(span.start)..p.end.min(span.end))
            };
            let all: Vec<[Range<usize>; 2]> = edges().map(part).collect();
            [0, 1].map(|i| {
                let seen = || all.iter().map(|p| p[i].clone()).filter(|p| p.start < p.end);
                seen().map(|p| p.start).min().unwrap_or(0)..seen().map(|p| p.end).max().unwrap_or(0)
            })
        };
        let count = |parts: [Range<usize>; 2]| -> Vec<usize> {
            let mut tiles: Vec<usize> = parts
                .into_iter()
                .filter(|p| p.start < p.end)
                .flat_map(|p| p.start / cols..p.end.div_ceil(cols))
                .collect();
            tiles.dedup();
            tiles
        };
        let [_, all] = hull(false);
        counts.visible += (all.end.div_ceil(cols) - all.start / cols) as u64;
        let mut tiles = count(hull(true));
        tiles.sort_unstable();
        tiles.dedup();
        if skip.class(head) == HeadClass::Log {
            let diagonal = |q: usize| (q + s.k_len).saturating_sub(s.q_len).min(s.k_len - 1) / cols;
            let from = diagonal(rows.start);
            tiles.retain(|&t| t == 0 || t >= from || (from - t).is_power_of_two());
        }
        counts.by_class += tiles.len() as u64;
        if let Some(proxy) = skip.proxy {
            tiles = self.select(proxy, s, head, tile, tiles);
        }
        counts.by_proxy += tiles.len() as u64;
        tiles
    }

    /// Level 2: means of tiles represent their rows, or clusters represent keys.
    fn select(&self, proxy: Proxy, s: &Sequence, head: usize, tile: usize, tiles: Vec<usize>) -> Vec<usize> {
        let rows = self.tile_rows(s, tile);
        let cols = self.problem.skip.tile[1];
        let Some((scored, mut keep)) = self.weigh(proxy, s, head, tile, &tiles) else { return tiles };
        let diagonal = |q: usize| (q + s.k_len).saturating_sub(s.q_len).min(s.k_len.max(1) - 1) / cols;
        let (first, last) = (diagonal(rows.start), diagonal(rows.end - 1));
        let always = |t: usize| (first..=last).contains(&t) || (t == 0 && self.problem.skip.first_tile);
        keep.extend(scored.iter().map(|x| x.0).filter(|&t| always(t)));
        let top = scored.iter().map(|x| x.1).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scored.iter().map(|x| (x.1 - top).exp()).sum();
        let mut best = scored;
        best.sort_by(|x, y| y.1.total_cmp(&x.1).then(x.0.cmp(&y.0)));
        let chosen: Vec<usize> = match proxy {
            // Tiles that are kept in any case count, so the share kept is the share asked for.
            Proxy::Top { share, .. } => {
                let rest = share_of(share, tiles.len()).saturating_sub(keep.len());
                best.iter().map(|x| x.0).filter(|&t| !always(t)).take(rest).collect()
            }
            Proxy::Mass { mass, .. } => {
                let mut before = 0.0;
                let within = |x: &&(usize, f64)| {
                    let within = before <= f64::from(mass);
                    before += (x.1 - top).exp() / total;
                    within
                };
                best.iter().take_while(within).map(|x| x.0).filter(|&t| !always(t)).collect()
            }
        };
        keep.extend(chosen);
        keep.sort_unstable();
        keep
    }

    /// The logarithm of each tile's weight for a tile of rows, up to a constant, and the tiles that the proxy does not
    /// represent. `None` if it does not represent the rows.
    fn weigh(&self, proxy: Proxy, s: &Sequence, head: usize, tile: usize, tiles: &[usize]) -> Option<Weighed> {
        if let Some(clusters) = &self.clusters {
            return Some(clusters.speak(&self.bound, s, head, self.tile_rows(s, tile), tiles));
        }
        let problem = &self.problem.base;
        let similarity = f64::from(match proxy {
            Proxy::Mass { similarity, .. } | Proxy::Top { similarity, .. } => similarity,
        });
        let [queries, keys] = &**self.means.as_ref().expect("bug in fulgurite: a proxy without means");
        let own = queries.of(&self.bound, s, head, tile);
        // Rows that are not finite are like no others.
        if own.alike.is_nan() || own.alike <= similarity {
            return None;
        }
        let (mut scored, mut keep) = (Vec::with_capacity(tiles.len()), Vec::new());
        for &t in tiles {
            let other = keys.of(&self.bound, s, head / problem.group(), t);
            if other.alike > similarity {
                scored.push((t, dot(&own.mean, &other.mean) * f64::from(problem.scale())));
            } else {
                keep.push(t);
            }
        }
        Some((scored, keep))
    }

    /// Lambda of a tile of rows.
    pub fn lambda(&self, s: &Sequence, head: usize, rows: Range<usize>) -> Option<f64> {
        match self.problem.skip.lambda? {
            Lambda::Fixed(x) => Some(f64::from(x)),
            Lambda::PerKey(x) => {
                let last = rows.end.max(1) - 1;
                let span = self.problem.base.mask().keys(last, s.q_len, s.k_len);
                let parts = self.problem.skip.class(head).keys(last, s.q_len, s.k_len);
                let seen: usize =
                    parts.iter().map(|p| p.end.min(span.end).saturating_sub(p.start.max(span.start))).sum();
                Some((f64::from(x) / seen.max(1) as f64).min(0.999))
            }
        }
    }

    /// The order in which a row of tiles is visited.
    pub fn order(&self, tiles: &[usize]) -> Vec<usize> {
        let first = self.problem.skip.first_tile && tiles.first() == Some(&0);
        let rest = &tiles[usize::from(first)..];
        first.then_some(0).into_iter().chain(rest.iter().rev().copied()).collect()
    }

    /// The definition of the kept tiles, in f64, with the margin of each decision of the kernel in powers of e: for
    /// each sequence, head and row of tiles, the tiles with how far their largest weight is above (kept) or below
    /// lambda.
    pub fn decide(&self) -> Vec<Vec<(usize, f64)>> {
        let problem = &self.problem.base;
        let cols = self.problem.skip.tile[1];
        let mut all = Vec::new();
        self.each(|s, head, tile| {
            let rows = self.tile_rows(s, tile);
            let tiles = self.admitted(s, head, tile, &mut TileCounts::default());
            let lambda = self.lambda(s, head, rows.clone()).map(f64::ln);
            let (q_at, k_at) = (
                self.bound.row_layout(self.bound.q().strides(), s, Side::Query),
                self.bound.row_layout(self.bound.k().strides(), s, Side::Key),
            );
            let mut max = vec![f64::NEG_INFINITY; rows.len()];
            let mut found = Vec::new();
            for t in self.order(&tiles) {
                let keys = t * cols..((t + 1) * cols).min(s.k_len);
                let mut margin = f64::NEG_INFINITY;
                for (i, q) in rows.clone().enumerate() {
                    let seen: Vec<usize> = crate::walk::visible(&self.bound, s, head, q);
                    let parts = self.problem.skip.class(head).keys(q, s.q_len, s.k_len);
                    let own = |k: &&usize| keys.contains(*k) && parts.iter().any(|p| p.contains(*k));
                    let score = |k: &usize| {
                        let (a, b) = (q_at.at(q, head), k_at.at(*k, head / problem.group()));
                        let dot = |c: usize| self.bound.q().at(a + c) * self.bound.k().at(b + c);
                        f64::from(problem.scale()) * (0..problem.head_dim()).map(dot).sum::<f64>()
                    };
                    let top = seen.iter().filter(own).map(score).fold(f64::NEG_INFINITY, f64::max);
                    let next = max[i].max(top);
                    if top > f64::NEG_INFINITY {
                        margin = margin.max(lambda.map_or(f64::INFINITY, |lambda| top - next - lambda));
                    }
                    max[i] = next;
                }
                if margin > f64::NEG_INFINITY {
                    found.push((t, margin));
                }
            }
            found.sort_unstable_by_key(|x| x.0);
            all.push(found);
        });
        all
    }

    /// Calls `visit` for every sequence, query head and tile of rows, in the order of the lists of a block mask.
    pub fn each(&self, mut visit: impl FnMut(&Sequence, usize, usize)) {
        let problem = &self.problem.base;
        let tiles = problem.max_q_len().div_ceil(self.problem.skip.tile[0]);
        for s in self.bound.sequences() {
            for head in 0..problem.q_heads() {
                (0..tiles).for_each(|tile| visit(s, head, tile));
            }
        }
    }

    /// A block mask of kept tiles, one list per row of tiles in the order of [`each`](Self::each).
    pub fn block_mask(&self, kept: Vec<Vec<i32>>) -> BlockMask {
        let problem = &self.problem.meaning;
        let spec = problem.blocks().expect("the meaning has blocks");
        let blocks = spec.blocks(problem.max_q_len(), problem.max_k_len());
        let full = vec![Vec::new(); kept.len()];
        BlockMask::new(spec, blocks, kept, full).expect("bug in fulgurite: kept tiles are ascending and inside")
    }
}
