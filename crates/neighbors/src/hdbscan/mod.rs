//! HDBSCAN: distances stretched where points are sparse, a minimum spanning tree of them, and of the hierarchy it makes the
//! clusters that persist longest.
//!
//! The tree is Boruvka's: each round every component finds its nearest neighbour outside, by the tile loop, and no matrix
//! of distances exists. Weights are computed in f64; which of two edges is shorter is decided in f32, so edges
//! that differ by less than its rounding may stand for each other.

mod boruvka;
mod condense;

use crate::{Error, Metric, NeighborIndex, Options, Points};
use fulgurite_core::stop;

/// An edge of the minimum spanning tree of mutual reachability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TreeEdge {
    /// Its two points, the lower first.
    pub ends: (u32, u32),
    /// The largest of their distance and their two core distances.
    pub weight: f64,
}

/// How to cluster by density at every scale.
#[derive(Debug, Clone)]
pub struct Hdbscan {
    min_cluster_size: usize,
    min_samples: Option<usize>,
    allow_single_cluster: bool,
    options: Options,
}

/// Clusters, how firmly points belong to them, and the tree they come from.
#[derive(Debug, Clone, PartialEq)]
pub struct HdbscanModel {
    /// The cluster of each point, -1 for noise.
    pub labels: Vec<i32>,
    /// From 0 (noise) to 1 (in the cluster as long as it exists).
    pub probabilities: Vec<f32>,
    /// How persistent each cluster is; none is longer than its own density lasts.
    pub stabilities: Vec<f64>,
    /// Distance of each point to its neighbour `min_samples`.
    pub core_distances: Vec<f32>,
    /// The minimum spanning tree, shortest edge first.
    pub tree: Vec<TreeEdge>,
}

impl Hdbscan {
    /// Settings for clusters of at least `min_cluster_size` points.
    pub fn new(min_cluster_size: usize) -> Hdbscan {
        Hdbscan { min_cluster_size, min_samples: None, allow_single_cluster: false, options: Options::default() }
    }

    /// The neighbour (the point itself not counted) whose distance is the core distance; default the least size of a
    /// cluster. More makes more noise.
    pub fn min_samples(mut self, min_samples: usize) -> Self {
        self.min_samples = Some(min_samples);
        self
    }

    /// Whether all points together may be the one cluster.
    pub fn allow_single_cluster(mut self, allow: bool) -> Self {
        self.allow_single_cluster = allow;
        self
    }

    /// Instruction set and threads.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Clusters points, by euclidean distance.
    ///
    /// ```
    /// use fulgurite_neighbors::{Error, Hdbscan, Points};
    /// let mut data: Vec<f32> = (0..20).map(|i| i as f32 * 0.01).collect();
    /// data.extend((0..20).map(|i| 10.0 + i as f32 * 0.01));
    /// data.push(100.0);
    /// let found = Hdbscan::new(5).fit(Points::new(&data, [41, 1])?)?;
    /// assert_eq!((found.labels[0], found.labels[30], found.labels[40]), (0, 1, -1));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn fit(&self, points: Points<'_>) -> Result<HdbscanModel, Error> {
        let n = points.len();
        if self.min_cluster_size < 2 {
            let (got, hint) = (self.min_cluster_size, "one point is no cluster");
            return Err(Error::Count { arg: "min_cluster_size", got, low: 2, high: usize::MAX, hint });
        }
        if self.min_samples == Some(0) {
            let hint = "the nearest other point is the first";
            return Err(Error::Count { arg: "min_samples", got: 0, low: 1, high: usize::MAX, hint });
        }
        if n >= 1 << 24 {
            return Err(Error::Count { arg: "points", got: n, low: 1, high: (1 << 24) - 1, hint: "cluster a sample" });
        }
        if n == 1 {
            let core_distances = vec![0.0];
            let labels = vec![-1];
            return Ok(HdbscanModel {
                labels,
                probabilities: vec![0.0],
                stabilities: vec![],
                core_distances,
                tree: vec![],
            });
        }
        stop::catch_memory(|| self.fitted(points))?
    }

    fn fitted(&self, points: Points<'_>) -> Result<HdbscanModel, Error> {
        // Numbers of a point in the tree, its merges and clusters.
        const POINT: usize = 256;
        let n = points.len();
        stop::ask("the tree of all points", n.saturating_mul(POINT));
        let neighbour = self.min_samples.unwrap_or(self.min_cluster_size).min(n - 1);
        let index = NeighborIndex::new(points, Metric::Euclidean, self.options)?;
        let lists = index.lists(points, neighbour, &|query, key| query == key as usize);
        let cores: Vec<f64> = lists.iter().map(|list| list[list.len() - 1].0.sqrt()).collect();
        let tree = boruvka::tree(points, &cores, &lists, &self.options);
        let condensed = condense::Condensed::new(&tree, n, self.min_cluster_size);
        let (labels, probabilities, stabilities) = condensed.clusters(self.allow_single_cluster);
        let core_distances = cores.iter().map(|&core| core as f32).collect();
        Ok(HdbscanModel { labels, probabilities, stabilities, core_distances, tree })
    }
}
