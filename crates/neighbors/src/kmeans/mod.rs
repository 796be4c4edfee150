//! k-means by Lloyd's steps: exact assignment without the matrix of distances, and an update whose sums have one order.

mod assign;
mod init;
mod stream;
mod update;

use crate::points::{Moments, checked_tolerance, frame_of, precision};
use crate::{Error, Metric, Options, Points};
use assign::Assign;
pub(crate) use assign::below;
use fulgurite_core::stop;
use fulgurite_core::tensor::ask_memory;
use fulgurite_cpu::scan::{Frame, Scanner};
pub(crate) use update::{Update, sorted};

/// The choice of the first centroids.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub enum Init<'a> {
    /// k-means++: each next centroid a point drawn by its squared distance to those before it.
    #[default]
    PlusPlus,
    /// Different points drawn at random.
    Random,
    /// These.
    Given(Points<'a>),
}

/// How far a fit has come.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Progress {
    /// Steps done.
    pub step: usize,
    /// Rows assigned in the current step, where they come from a file; else all.
    pub rows: usize,
    /// All rows.
    pub of: usize,
    /// How far the centroids moved in the last step: the root of the sum of squares.
    pub moved: f64,
}

/// Settings of k-means.
///
/// ```
/// use fulgurite_neighbors::{Error, KMeans, Points};
/// let data: Vec<f32> = (0..100).map(|i| (i % 4) as f32 * 10.0 + i as f32 * 0.001).collect();
/// let points = Points::new(&data, [100, 1])?;
/// let model = KMeans::new(4).seed(3).fit(points)?;
/// assert!(model.inertia() < 1.0);
/// assert_eq!(
///     KMeans::new(200).fit(points).unwrap_err().to_string(),
///     "`clusters` is 200, allowed: 1 to 100; there are not more points"
/// );
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct KMeans<'a> {
    clusters: usize,
    metric: Metric,
    init: Init<'a>,
    seed: u64,
    max_steps: usize,
    tolerance: f64,
    score_tolerance: Option<f64>,
    options: Options,
}

impl<'a> KMeans<'a> {
    /// Settings for this number of clusters: euclidean, k-means++, at most 300 steps.
    pub fn new(clusters: usize) -> KMeans<'a> {
        KMeans {
            clusters,
            metric: Metric::Euclidean,
            init: Init::PlusPlus,
            seed: 0,
            max_steps: 300,
            tolerance: 1e-4,
            score_tolerance: None,
            options: Options::default(),
        }
    }

    /// The metric. With [`Metric::Cosine`] centroids have length 1.
    pub fn metric(mut self, metric: Metric) -> Self {
        self.metric = metric;
        self
    }

    /// The choice of the first centroids.
    pub fn init(mut self, init: Init<'a>) -> Self {
        self.init = init;
        self
    }

    /// Seed of the random draws.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The most steps. 0 assigns points to the first centroids.
    pub fn max_steps(mut self, steps: usize) -> Self {
        self.max_steps = steps;
        self
    }

    /// Stop when the squares of the centroids' moves add up to no more than this times the mean variance of a
    /// column. Steps also end when no label changes.
    pub fn tolerance(mut self, tolerance: f64) -> Self {
        self.tolerance = tolerance;
        self
    }

    /// Allow errors of a score, relative to the norms of point and centroid (about their mean). From 2^-6 on, a matrix
    /// unit multiplies in bf16 and nothing is looked at again; from 2^-12 on in two parts. `None`, the default, is exact.
    pub fn score_tolerance(mut self, tolerance: Option<f64>) -> Self {
        self.score_tolerance = tolerance;
        self
    }

    /// Instruction set and threads.
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    fn check(&self, n: usize, d: usize) -> Result<(), Error> {
        if self.clusters == 0 || self.clusters > n {
            let hint = if self.clusters == 0 { "at least one" } else { "there are not more points" };
            return Err(Error::Count { arg: "clusters", got: self.clusters, low: 1, high: n, hint });
        }
        let (tolerance, allowed) = (self.tolerance, "0 or more");
        if tolerance.is_nan() || tolerance < 0.0 {
            return Err(Error::Value {
                arg: "tolerance",
                got: tolerance,
                allowed,
                hint: "0 runs until no label changes",
            });
        }
        checked_tolerance(self.score_tolerance)?;
        if let Init::Given(centroids) = &self.init {
            centroids.of_dim("init", d)?.with_angles("init", self.metric)?;
            if centroids.len() != self.clusters {
                let (got, want) = (centroids.len(), self.clusters);
                return Err(Error::Count { arg: "init", got, low: want, high: want, hint: "one row for each cluster" });
            }
        }
        Ok(())
    }

    fn scanner(&self) -> Scanner {
        Scanner::new(&self.options, precision(self.score_tolerance).0)
    }

    /// Whether labels are computed again in f64 where products may be wrong.
    fn exact(&self) -> bool {
        precision(self.score_tolerance).1
    }

    /// Clusters points.
    pub fn fit(&self, points: Points<'_>) -> Result<KMeansModel, Error> {
        self.fit_with(points, &mut |_| ())
    }

    /// Clusters points and tells how far it is.
    pub fn fit_with(&self, points: Points<'_>, progress: &mut dyn FnMut(Progress)) -> Result<KMeansModel, Error> {
        self.check(points.len(), points.dim())?;
        stop::catch_memory(|| self.fitted(points, progress))?
    }

    /// Asks for the memory of labels, of distances to the first centroids, and of centroids, keys and sums.
    fn ask(&self, n: usize, d: usize) {
        let (row, cluster) = (size_of::<u32>() + size_of::<f64>(), d * (3 * size_of::<f32>() + size_of::<f64>()));
        let bytes = n.saturating_mul(row).saturating_add(self.clusters.saturating_mul(cluster));
        stop::ask("labels, centroids and their sums", bytes);
    }

    fn fitted(&self, points: Points<'_>, progress: &mut dyn FnMut(Progress)) -> Result<KMeansModel, Error> {
        self.ask(points.len(), points.dim());
        let points = points.with_angles("points", self.metric)?;
        let scanner = self.scanner();
        let mut moments = Moments::new(points.dim());
        moments.add(points, scanner.threads());
        let frame = moments.frame(self.metric);
        let stop = self.stop(&moments);
        let mut centroids = self.first(points, &scanner, &frame);
        let assign = Assign::new(scanner, &frame, self.metric, self.exact());
        let mut labels = unlabelled(points.len());
        let (mut steps, mut settled) = (0, false);
        while steps < self.max_steps && !settled {
            let changed = assign.labels(points, &assign.keys(&centroids, points.dim()), &centroids, &mut labels);
            let mut update = Update::new(self.clusters, points.dim());
            update.add(&scanner, points, &labels);
            let moved = update.finish(&mut centroids, self.metric);
            steps += 1;
            settled = moved * moved <= stop || changed == 0;
            progress(Progress { step: steps, rows: points.len(), of: points.len(), moved });
        }
        assign.labels(points, &assign.keys(&centroids, points.dim()), &centroids, &mut labels);
        let inertia = assign.inertia(points, &centroids, &labels);
        Ok(KMeansModel { centroids, labels, inertia, steps, d: points.dim(), made: self.made(frame) })
    }

    fn stop(&self, moments: &Moments) -> f64 {
        let variances = moments.variances();
        self.tolerance * variances.iter().sum::<f64>() / variances.len() as f64
    }

    fn first(&self, points: Points<'_>, scanner: &Scanner, frame: &Frame) -> Vec<f32> {
        let mut centroids = match self.init {
            Init::Given(centroids) => centroids.data().to_vec(),
            Init::Random => init::random(points, self.clusters, self.seed),
            Init::PlusPlus => init::plus_plus(points, self.clusters, self.seed, scanner, frame, self.metric),
        };
        if self.metric == Metric::Cosine {
            centroids.chunks_exact_mut(points.dim()).for_each(update::unit);
        }
        centroids
    }

    fn made(&self, frame: Frame) -> Made {
        Made { metric: self.metric, exact: self.exact(), scanner: self.scanner(), frame }
    }
}

/// Labels of rows that have none yet.
fn unlabelled(rows: usize) -> Vec<u32> {
    let mut labels = stop::zeros("labels", rows);
    labels.fill(u32::MAX);
    labels
}

/// The part of a model that later queries need.
struct Made {
    metric: Metric,
    exact: bool,
    scanner: Scanner,
    frame: Frame,
}

/// Clusters that were found.
pub struct KMeansModel {
    centroids: Vec<f32>,
    labels: Vec<u32>,
    inertia: f64,
    steps: usize,
    d: usize,
    made: Made,
}

/// The part of a shard in a step of k-means, from [`KMeansModel::assign_and_sum`].
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterSums {
    /// The cluster of each point.
    pub labels: Vec<u32>,
    /// The sum of the points of each cluster, `[clusters, dim]`, in f64 and in an order that the points alone decide.
    pub sums: Vec<f64>,
    /// The number of points of each cluster.
    pub counts: Vec<u64>,
    /// The inertia of the points.
    pub inertia: f64,
}

impl std::fmt::Debug for KMeansModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("KMeansModel");
        out.field("clusters", &self.clusters()).field("dim", &self.d).field("steps", &self.steps);
        out.field("inertia", &self.inertia).finish_non_exhaustive()
    }
}

impl KMeansModel {
    /// A model of centroids that were found before: it predicts and transforms, and has no labels of its own.
    ///
    /// ```
    /// use fulgurite_neighbors::{Error, KMeansModel, Metric, Options, Points};
    /// let centroids = Points::new(&[0.0, 10.0], [2, 1])?;
    /// let model = KMeansModel::of(centroids, Metric::Euclidean, Options::default())?;
    /// assert_eq!(model.predict(Points::new(&[7.0, 2.0], [2, 1])?)?, [1, 0]);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn of(centroids: Points<'_>, metric: Metric, options: Options) -> Result<KMeansModel, Error> {
        let d = centroids.dim();
        ask_memory("a copy of the centroids", size_of_val(centroids.data()))?;
        let made = KMeans::new(centroids.len()).metric(metric).options(options);
        let frame = frame_of(centroids, metric, made.scanner().threads());
        let centroids = centroids.data().to_vec();
        Ok(KMeansModel { centroids, labels: Vec::new(), inertia: 0.0, steps: 0, d, made: made.made(frame) })
    }

    /// The centroids, one behind the other.
    pub fn centroids(&self) -> &[f32] {
        &self.centroids
    }

    /// Number of clusters.
    pub fn clusters(&self) -> usize {
        self.centroids.len() / self.d
    }

    /// Elements of a row.
    pub fn dim(&self) -> usize {
        self.d
    }

    /// The cluster of each point: that of the nearest centroid, the first of equally near ones.
    pub fn labels(&self) -> &[u32] {
        &self.labels
    }

    /// The sum over points of the squared distance to their centroid (of 1 less the cosine, or of the negated dot
    /// product, with those metrics).
    pub fn inertia(&self) -> f64 {
        self.inertia
    }

    /// Steps that were done.
    pub fn steps(&self) -> usize {
        self.steps
    }

    fn assign(&self) -> Assign<'_> {
        Assign::new(self.made.scanner, &self.made.frame, self.made.metric, self.made.exact)
    }

    /// The clusters of other points.
    pub fn predict(&self, points: Points<'_>) -> Result<Vec<u32>, Error> {
        stop::catch_memory(|| self.labels_of(points))?
    }

    fn labels_of(&self, points: Points<'_>) -> Result<Vec<u32>, Error> {
        let points = points.of_dim("points", self.d)?.with_angles("points", self.made.metric)?;
        let mut labels = unlabelled(points.len());
        let assign = self.assign();
        assign.labels(points, &assign.keys(&self.centroids, self.d), &self.centroids, &mut labels);
        Ok(labels)
    }

    /// The distance of each point to each centroid, `[points, clusters]`.
    pub fn transform(&self, points: Points<'_>) -> Result<Vec<f32>, Error> {
        let points = points.of_dim("points", self.d)?.with_angles("points", self.made.metric)?;
        Ok(stop::catch_memory(|| self.assign().distances(points, &self.centroids))?)
    }

    /// The labels of a shard of points, and its part of a step: sums, counts and inertia.
    ///
    /// A step over all points takes the parts of all shards, added in the order of the shards.
    ///
    /// ```
    /// use fulgurite_neighbors::{Error, KMeansModel, Metric, Options, Points};
    /// let centroids = Points::new(&[0.0, 10.0], [2, 1])?;
    /// let model = KMeansModel::of(centroids, Metric::Euclidean, Options::default())?;
    /// let part = model.assign_and_sum(Points::new(&[7.0, 2.0, 9.0], [3, 1])?)?;
    /// assert_eq!((part.labels, part.sums, part.counts, part.inertia), (vec![1, 0, 1], vec![2.0, 16.0], vec![1, 2], 14.0));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn assign_and_sum(&self, points: Points<'_>) -> Result<ClusterSums, Error> {
        stop::catch_memory(|| self.part_of(points))?
    }

    fn part_of(&self, points: Points<'_>) -> Result<ClusterSums, Error> {
        let labels = self.labels_of(points)?;
        let mut update = Update::new(self.clusters(), self.d);
        update.add(&self.made.scanner, points, &labels);
        let (sums, counts) = update.into_parts();
        let inertia = self.assign().inertia(points, &self.centroids, &labels);
        Ok(ClusterSums { labels, sums, counts, inertia })
    }

    /// [`inertia`](Self::inertia) of other points.
    pub fn inertia_of(&self, points: Points<'_>) -> Result<f64, Error> {
        let labels = self.predict(points)?;
        Ok(stop::catch_memory(|| self.assign().inertia(points, &self.centroids, &labels))?)
    }
}
