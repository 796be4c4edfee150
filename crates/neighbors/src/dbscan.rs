//! DBSCAN: points with enough neighbours are cores, cores within reach are one cluster, and points
//! within reach of a core belong to its cluster.

use crate::knn::NeighborIndex;
use crate::points::precision;
use crate::union::Union;
use crate::{Error, Metric, Options, Points};
use fulgurite_core::stop;
use fulgurite_cpu::pool;
use std::sync::Mutex;

/// Pairs that a thread keeps before it joins their sets.
const PAIRS: usize = 1 << 14;

/// Settings of DBSCAN.
#[derive(Debug, Clone)]
pub struct Dbscan {
    radius: f64,
    min_samples: usize,
    options: Options,
}

/// Clusters and noise.
#[derive(Debug, Clone, PartialEq)]
pub struct DbscanModel {
    /// The cluster of each point, -1 for noise. Clusters are numbered by their first core.
    pub labels: Vec<i32>,
    /// Which points are cores.
    pub cores: Vec<u32>,
    /// Number of clusters.
    pub clusters: usize,
}

impl Dbscan {
    /// Neighbours are at most `radius` away (euclidean); a core has at least 5, itself included.
    pub fn new(radius: f64) -> Dbscan {
        Dbscan { radius, min_samples: 5, options: Options::default() }
    }

    /// Neighbours of a core, itself included.
    pub fn min_samples(mut self, min_samples: usize) -> Self {
        self.min_samples = min_samples;
        self
    }

    /// Instruction set and threads.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Clusters points. Two walks over all pairs, none of which is kept.
    ///
    /// ```
    /// use fulgurite_neighbors::{Dbscan, Error, Points};
    /// let points = Points::new(&[0.0, 0.1, 0.2, 9.0, 9.1, 9.2, 50.0], [7, 1])?;
    /// let found = Dbscan::new(0.15).min_samples(2).fit(points)?;
    /// assert_eq!(found.labels, [0, 0, 0, 1, 1, 1, -1]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn fit(&self, points: Points<'_>) -> Result<DbscanModel, Error> {
        if !self.radius.is_finite() || self.radius <= 0.0 {
            let (got, hint) = (self.radius, "the distance of neighbours");
            return Err(Error::Value { arg: "radius", got, allowed: "finite and above 0", hint });
        }
        if self.min_samples == 0 {
            let hint = "a core counts itself";
            return Err(Error::Count { arg: "min_samples", got: 0, low: 1, high: usize::MAX, hint });
        }
        stop::catch_memory(|| self.fitted(points))?
    }

    fn fitted(&self, points: Points<'_>) -> Result<DbscanModel, Error> {
        const ROW: usize = size_of::<Vec<u32>>() + 4 * size_of::<u32>();
        stop::ask("labels and lists of cores", points.len().saturating_mul(ROW));
        let index = NeighborIndex::packed(points, Metric::Euclidean, self.options, precision(None))?;
        let (n, group, threads) = (points.len(), index.scanner().group(), index.scanner().threads());
        let mut counts = vec![0u32; n];
        pool::each(threads, counts.chunks_mut(group), |item, counts| {
            let first = item * group;
            index.within(first..first + counts.len(), self.radius, &mut |row, _| counts[row - first] += 1);
        });
        let core: Vec<bool> = counts.iter().map(|&count| count as usize >= self.min_samples).collect();
        let sets = Mutex::new(Union::new(n));
        // For a point that is no core, every core that reaches it.
        let mut reached: Vec<Vec<u32>> = vec![Vec::new(); n];
        pool::each(threads, reached.chunks_mut(group), |item, reached| {
            let first = item * group;
            let mut pairs = Vec::new();
            let join = |pairs: &mut Vec<(u32, u32)>| {
                let mut sets = sets.lock().unwrap_or_else(|e| e.into_inner());
                pairs.drain(..).for_each(|(a, b)| _ = sets.join(a, b));
            };
            index.within(first..first + reached.len(), self.radius, &mut |row, other| {
                if !core[other as usize] {
                    return;
                }
                if !core[row] {
                    reached[row - first].push(other);
                } else if other < row as u32 {
                    pairs.push((row as u32, other));
                    if pairs.len() >= PAIRS {
                        join(&mut pairs);
                    }
                }
            });
            join(&mut pairs);
        });
        let mut sets = sets.into_inner().unwrap_or_else(|e| e.into_inner());
        let mut labels = vec![-1i32; n];
        let mut clusters = 0;
        for row in (0..n).filter(|&row| core[row]) {
            // A set is named by its least row, which comes first.
            let root = sets.find(row as u32) as usize;
            if root == row {
                labels[row] = clusters;
                clusters += 1;
            } else {
                labels[row] = labels[root];
            }
        }
        for row in (0..n).filter(|&row| !core[row]) {
            // The first cluster that reaches it.
            labels[row] = reached[row].iter().map(|&other| labels[other as usize]).min().unwrap_or(-1);
        }
        let cores = (0..n as u32).filter(|&row| core[row as usize]).collect();
        Ok(DbscanModel { labels, cores, clusters: clusters as usize })
    }
}
