//! Approximate search: rows in lists by their nearest centroid, and queries that look into the nearest few lists.

use crate::kmeans::sorted;
use crate::knn::{Search, ask_lists, nearer};
use crate::points::{Kept, checked_tolerance, precision};
use crate::{Error, Init, KMeans, Metric, NeighborIndex, Neighbors, Options, Points};
use fulgurite_core::stop;
use fulgurite_cpu::pool;
use fulgurite_cpu::scan::{PackedKeys, Queries};
use std::sync::Mutex;

/// Rows for each list from which centroids are learned; more change them little.
const TRAIN: usize = 256;

/// Settings of an index of inverted lists.
#[derive(Debug, Clone)]
pub struct Ivf {
    lists: usize,
    metric: Metric,
    seed: u64,
    steps: usize,
    score_tolerance: Option<f64>,
    options: Options,
}

impl Ivf {
    /// Settings for this number of lists; the square root of the number of rows is a good first guess.
    pub fn new(lists: usize) -> Ivf {
        Ivf { lists, metric: Metric::Euclidean, seed: 0, steps: 10, score_tolerance: None, options: Options::default() }
    }

    /// The metric.
    pub fn metric(mut self, metric: Metric) -> Self {
        self.metric = metric;
        self
    }

    /// Seed of the random draws.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Steps of k-means.
    pub fn steps(mut self, steps: usize) -> Self {
        self.steps = steps;
        self
    }

    /// Allow errors of a score, as in [`NeighborIndex::with_tolerance`]. `None`, the default, is exact in the lists that
    /// are looked into.
    pub fn score_tolerance(mut self, tolerance: Option<f64>) -> Self {
        self.score_tolerance = tolerance;
        self
    }

    /// Instruction set and threads.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Builds the index: centroids by k-means over a sample, then every row into the list of its nearest.
    ///
    /// ```
    /// use fulgurite_neighbors::{Error, Ivf, Points};
    /// let data: Vec<f32> = (0..200).map(|i| (i * i % 97) as f32).collect();
    /// let points = Points::new(&data, [100, 2])?;
    /// let index = Ivf::new(8).build(points)?;
    /// // Looking into every list is exact.
    /// assert_eq!(index.recall(points, 3, 8)?, 1.0);
    /// assert!(index.recall(points, 3, 1)? > 0.3);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn build<'a>(&self, points: Points<'a>) -> Result<IvfIndex<'a>, Error> {
        let n = points.len();
        if self.lists == 0 || self.lists > n {
            let hint = "not more lists than rows";
            return Err(Error::Count { arg: "lists", got: self.lists, low: 1, high: n, hint });
        }
        checked_tolerance(self.score_tolerance)?;
        stop::catch_memory(|| self.built(points))?
    }

    fn built<'a>(&self, points: Points<'a>) -> Result<IvfIndex<'a>, Error> {
        let (n, d) = (points.len(), points.dim());
        let points = points.with_angles("points", self.metric)?;
        let kmeans =
            KMeans::new(self.lists).metric(self.metric).seed(self.seed).max_steps(self.steps).init(Init::Random);
        let kmeans = kmeans.options(self.options);
        let wanted = TRAIN.saturating_mul(self.lists);
        let (model, labels) = if wanted >= n {
            let model = kmeans.fit(points)?;
            let labels = model.labels().to_vec();
            (model, labels)
        } else {
            stop::ask("a sample of the rows", wanted.saturating_mul(d * size_of::<f32>()));
            // Every n/wanted-th row: a sample that needs no second seed.
            let sample: Vec<f32> = (0..wanted)
                .flat_map(|i| points.row((i as u128 * n as u128 / wanted as u128) as usize))
                .copied()
                .collect();
            let model = kmeans.fit(Points::new(&sample, [wanted, d])?)?;
            let labels = model.predict(points)?;
            (model, labels)
        };
        // Rows of the lists, packed and as they are packed.
        stop::ask("rows of the lists", n.saturating_mul(2 * d * size_of::<f32>() + size_of::<u32>()));
        let search = Search::new(points, self.metric, &self.options, precision(self.score_tolerance));
        let order = sorted(&labels, self.lists);
        let mut lists = Vec::with_capacity(self.lists);
        let mut start = 0;
        for list in 0..self.lists as u32 {
            let end = start + order[start..].iter().take_while(|&&row| labels[row as usize] == list).count();
            let rows: Vec<f32> = order[start..end].iter().flat_map(|&row| points.row(row as usize)).copied().collect();
            lists.push(List { rows: order[start..end].to_vec(), keys: search.keys(&rows, d) });
            start = end;
        }
        let (points, centroids) = (Kept::borrowed(points), model.centroids().to_vec());
        Ok(IvfIndex { points, search, centroids, lists, options: self.options })
    }
}

struct List {
    rows: Vec<u32>,
    keys: PackedKeys,
}

/// Inverted lists over rows.
pub struct IvfIndex<'a> {
    points: Kept<'a>,
    search: Search,
    centroids: Vec<f32>,
    lists: Vec<List>,
    options: Options,
}

impl std::fmt::Debug for IvfIndex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("IvfIndex");
        out.field("rows", &self.points.points().len()).field("lists", &self.lists.len()).finish_non_exhaustive()
    }
}

impl IvfIndex<'_> {
    /// Number of lists.
    pub fn lists(&self) -> usize {
        self.lists.len()
    }

    /// The same with a copy of the rows, to be kept for as long as one likes.
    pub fn into_owned(self) -> Result<IvfIndex<'static>, Error> {
        let IvfIndex { points, search, centroids, lists, options } = self;
        Ok(IvfIndex { points: points.into_owned()?, search, centroids, lists, options })
    }

    /// The rows.
    pub fn points(&self) -> Points<'_> {
        self.points.points()
    }

    /// The k nearest rows in the `probes` lists whose centroids are nearest; more lists where these hold fewer than k rows.
    pub fn search(&self, queries: Points<'_>, k: usize, probes: usize) -> Result<Neighbors, Error> {
        let queries = queries.of_dim("queries", self.points().dim())?.with_angles("queries", self.search.metric)?;
        self.check(k, self.points().len(), probes)?;
        stop::catch_memory(|| self.found(queries, k, probes, &|_, _| false))?
    }

    /// The same for each row, which does not find itself.
    pub fn search_self(&self, k: usize, probes: usize) -> Result<Neighbors, Error> {
        self.check(k, self.points().len() - 1, probes)?;
        stop::catch_memory(|| self.found(self.points(), k, probes, &|query, row| query == row))?
    }

    fn check(&self, k: usize, most: usize, probes: usize) -> Result<(), Error> {
        if k == 0 || k > most {
            return Err(Error::Count { arg: "k", got: k, low: 1, high: most, hint: "there are not more rows to find" });
        }
        if probes == 0 || probes > self.lists.len() {
            let (low, high) = (1, self.lists.len());
            return Err(Error::Count { arg: "probes", got: probes, low, high, hint: "not more than lists" });
        }
        Ok(())
    }

    /// `skip` is asked with the numbers of query and row.
    fn found(
        &self,
        queries: Points<'_>,
        k: usize,
        probes: usize,
        skip: &(dyn Fn(u32, u32) -> bool + Sync),
    ) -> Result<Neighbors, Error> {
        ask_lists(queries.len(), k);
        let (points, d) = (self.points(), queries.dim());
        // One more than is wanted: a row may be in its own list.
        let asked = self.asked(queries, k + 1, probes)?;
        let mut found: Vec<Mutex<Vec<(f64, u32)>>> = Vec::new();
        found.resize_with(queries.len(), Mutex::default);
        let group = self.search.scanner.group();
        let items: Vec<(usize, usize)> = (0..self.lists.len())
            .flat_map(|list| (0..asked[list].len()).step_by(group).map(move |first| (list, first)))
            .collect();
        pool::run(self.search.scanner.threads(), items.len(), &|item| {
            let (list, first) = items[item];
            let (List { rows, keys }, asked) = (&self.lists[list], &asked[list]);
            let count = group.min(asked.len() - first);
            let frame = &self.search.frame;
            let asks = Queries { rows: queries.data(), d, range: (first, count), list: Some(asked), frame };
            let (lists, _) = self.search.nearest(
                &asks,
                keys,
                0..keys.len(),
                k,
                &|key| points.row(rows[key as usize] as usize),
                &|i, key| skip(asked[first + i], rows[key as usize]),
            );
            for (i, own) in lists.into_iter().enumerate() {
                let mut to = found[asked[first + i] as usize].lock().unwrap_or_else(|e| e.into_inner());
                to.extend(own.into_iter().map(|(far, key)| (far, rows[key as usize])));
            }
        });
        let lists = found.into_iter().map(|list| {
            let mut list = list.into_inner().unwrap_or_else(|e| e.into_inner());
            list.sort_unstable_by(nearer);
            list.truncate(k);
            list
        });
        Ok(Neighbors::from(lists.collect(), k, self.search.metric))
    }

    /// For each list the queries that look into it; together they hold k rows for each, or all rows.
    fn asked(&self, queries: Points<'_>, k: usize, probes: usize) -> Result<Vec<Vec<u32>>, Error> {
        let d = self.points().dim();
        let centroids = Points::new(&self.centroids, [self.lists.len(), d])?;
        // A centroid of zeros has no angle: by dot product it is the last to be asked.
        let metric = if self.search.metric == Metric::Cosine { Metric::Dot } else { self.search.metric };
        let order = NeighborIndex::new(centroids, metric, self.options)?;
        let near = order.lists(queries, probes, &|_, _| false);
        let mut asked = vec![Vec::new(); self.lists.len()];
        for (query, near) in near.into_iter().enumerate() {
            let mut rows = 0;
            for &(_, list) in &near {
                asked[list as usize].push(query as u32);
                rows += self.lists[list as usize].rows.len();
            }
            if rows < k {
                // Rare: lists in their order until there are enough.
                let all = order.lists(queries.part(query, 1), self.lists.len(), &|_, _| false);
                for &(_, list) in all[0].iter().skip(near.len()) {
                    if rows >= k {
                        break;
                    }
                    asked[list as usize].push(query as u32);
                    rows += self.lists[list as usize].rows.len();
                }
            }
        }
        Ok(asked)
    }

    /// The share of the true k nearest rows that a search with `probes` probes finds.
    pub fn recall(&self, queries: Points<'_>, k: usize, probes: usize) -> Result<f64, Error> {
        let truth = NeighborIndex::new(self.points(), self.search.metric, self.options)?.search(queries, k)?;
        Ok(self.search(queries, k, probes)?.recall(&truth))
    }
}
