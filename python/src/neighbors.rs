//! Clusters, neighbours and components: reads rows, and writes results into arrays of the caller. Use the modules
//! `cluster`, `neighbors` and `decomposition` of the package.

use crate::array::{Array, Claims, wrong};
use crate::gil::detach;
use fulgurite::neighbors::{
    Dbscan, Decomposition, FileRows, Hdbscan, Init, Ivf, IvfIndex, KMeans, KMeansModel, Method, Metric, NeighborIndex,
    Options, Pca, Points, TruncatedSvd,
};
use fulgurite_core::DataMut;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::path::PathBuf;

type Any<'a, 'py> = &'a Bound<'py, PyAny>;

fn refused(error: fulgurite::neighbors::Error) -> PyErr {
    wrong(error.to_string())
}

fn metric(name: &str) -> PyResult<Metric> {
    let found = Metric::ALL.into_iter().find(|metric| metric.name() == name);
    found.ok_or_else(|| wrong(format!("`metric` is {name:?}, allowed: 'euclidean', 'cosine', 'dot'")))
}

fn options(threads: Option<usize>) -> Options {
    Options { threads, ..Options::default() }
}

/// The rows of a contiguous f32 array.
fn read<'a>(arg: &'static str, array: &'a Array, claims: &mut Claims<'a>) -> PyResult<&'a [f32]> {
    let view = array.view(arg, claims)?;
    let steps = view.shape().iter().rev().scan(1, |n, &size| Some(std::mem::replace(n, *n * size)));
    let contiguous = view.strides().iter().rev().zip(steps).zip(view.shape().iter().rev());
    let empty = view.shape().contains(&0);
    let contiguous = empty || contiguous.into_iter().all(|((&stride, step), &size)| size <= 1 || stride == step);
    match view.slice::<f32>() {
        Some(all) if contiguous => Ok(all),
        _ => Err(wrong(format!(
            "`{arg}` is {} with gaps or of another type, allowed: contiguous float32",
            array.element()
        ))),
    }
}

fn shape(arg: &str, array: &Array) -> PyResult<[usize; 2]> {
    <[usize; 2]>::try_from(array.shape())
        .map_err(|_| wrong(format!("`{arg}` has {} axes, allowed: 2 (rows of elements)", array.shape().len())))
}

/// Results of one of the two supported types.
enum Values<'a> {
    F32(&'a [f32]),
    I32(&'a [i32]),
}

/// Writes results into a contiguous array with the same number of elements.
fn fill(arg: &str, to: Any<'_, '_>, values: Values<'_>) -> PyResult<()> {
    let array = Array::read(arg, to)?;
    let mut claims = Claims::default();
    let mut view = array.view_mut(arg, &mut claims)?;
    match (view.data_mut(), values) {
        (DataMut::F32(out), Values::F32(values)) if out.len() == values.len() => out.copy_from_slice(values),
        (DataMut::I32(out), Values::I32(values)) if out.len() == values.len() => out.copy_from_slice(values),
        _ => return Err(wrong(format!("`{arg}` is of another type or size than its results"))),
    }
    Ok(())
}

/// Options of k-means.
#[derive(FromPyObject)]
pub struct KMeansOptions<'py> {
    #[pyo3(item)]
    clusters: usize,
    #[pyo3(item)]
    metric: String,
    #[pyo3(item)]
    init: Bound<'py, PyAny>,
    #[pyo3(item)]
    seed: u64,
    #[pyo3(item)]
    max_steps: usize,
    #[pyo3(item)]
    tolerance: f64,
    #[pyo3(item)]
    score_tolerance: Option<f64>,
    #[pyo3(item)]
    threads: Option<usize>,
}

/// The source of rows.
enum Source<'a> {
    Memory(Points<'a>),
    File { path: PathBuf, memory_bytes: usize },
}

fn fit(py: Python<'_>, asked: &KMeansOptions<'_>, source: &Source<'_>, batch: Option<usize>) -> PyResult<KMeansModel> {
    let kmeans = KMeans::new(asked.clusters).metric(metric(&asked.metric)?).seed(asked.seed);
    let kmeans = kmeans.max_steps(asked.max_steps).tolerance(asked.tolerance).options(options(asked.threads));
    let kmeans = kmeans.score_tolerance(asked.score_tolerance);
    let name = asked.init.extract::<String>().ok();
    let array = match &name {
        Some(_) => None,
        None => Some(Array::read("init", &asked.init)?),
    };
    let mut claims = Claims::default();
    let init = match (&name, &array) {
        (Some(name), _) if name == "k-means++" => Init::PlusPlus,
        (Some(name), _) if name == "random" => Init::Random,
        (_, Some(array)) => {
            let rows = read("init", array, &mut claims)?;
            Init::Given(Points::named("init", rows, shape("init", array)?).map_err(refused)?)
        }
        (name, _) => {
            return Err(wrong(format!("`init` is {name:?}, allowed: 'k-means++', 'random' or an array of centroids")));
        }
    };
    let kmeans = kmeans.init(init);
    detach(py, || match (source, batch) {
        (Source::Memory(points), None) => kmeans.fit(*points),
        (Source::Memory(points), Some(batch)) => kmeans.fit_batches(points, batch, usize::MAX, &mut |_| ()),
        (Source::File { path, memory_bytes }, batch) => {
            let rows = FileRows::open(path)?;
            match batch {
                None => kmeans.fit_rows(&rows, *memory_bytes, &mut |_| ()),
                Some(batch) => kmeans.fit_batches(&rows, batch, *memory_bytes, &mut |_| ()),
            }
        }
    })?
    .map_err(refused)
}

/// k-means of an array, or of the rows of a `.npy` file of which at most `memory_bytes` bytes are held.
#[pyclass(frozen)]
pub struct Clusters(KMeansModel);

#[pymethods]
impl Clusters {
    #[new]
    #[pyo3(signature = (points, asked, batch=None, memory_bytes=1 << 30))]
    fn new(
        py: Python<'_>,
        points: Any<'_, '_>,
        asked: KMeansOptions<'_>,
        batch: Option<usize>,
        memory_bytes: usize,
    ) -> PyResult<Clusters> {
        if let Ok(path) = points.extract::<PathBuf>() {
            return fit(py, &asked, &Source::File { path, memory_bytes }, batch).map(Clusters);
        }
        let array = Array::read("X", points)?;
        let mut claims = Claims::default();
        let rows = read("X", &array, &mut claims)?;
        let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
        fit(py, &asked, &Source::Memory(points), batch).map(Clusters)
    }

    /// Returns (points, clusters, dim, inertia, steps).
    fn sizes(&self) -> (usize, usize, usize, f64, usize) {
        let model = &self.0;
        (model.labels().len(), model.clusters(), model.dim(), model.inertia(), model.steps())
    }

    /// Writes labels (i32) and centroids (f32).
    fn write(&self, labels: Any<'_, '_>, centroids: Any<'_, '_>) -> PyResult<()> {
        fill("labels", labels, Values::I32(&signed(self.0.labels())))?;
        fill("centroids", centroids, Values::F32(self.0.centroids()))
    }
}

fn signed(values: &[u32]) -> Vec<i32> {
    values.iter().map(|&x| x as i32).collect()
}

/// Writes the labels of rows by centroids (into i32), or their distances (into f32); returns the inertia of the labels.
#[pyfunction]
pub fn assign(
    py: Python<'_>,
    points: Any<'_, '_>,
    centroids: Any<'_, '_>,
    metric_name: &str,
    threads: Option<usize>,
    labels: Option<Any<'_, '_>>,
    distances: Option<Any<'_, '_>>,
) -> PyResult<f64> {
    let (array, own) = (Array::read("X", points)?, Array::read("cluster_centers_", centroids)?);
    let (mut claims, metric) = (Claims::default(), metric(metric_name)?);
    let rows = read("X", &array, &mut claims)?;
    let own_rows = read("cluster_centers_", &own, &mut claims)?;
    let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
    let own = Points::named("cluster_centers_", own_rows, shape("cluster_centers_", &own)?).map_err(refused)?;
    let model = KMeansModel::of(own, metric, options(threads)).map_err(refused)?;
    let want = distances.is_some();
    let (found, far, inertia) = detach(py, || {
        let far = if want { model.transform(points)? } else { Vec::new() };
        Ok((model.predict(points)?, far, model.inertia_of(points)?))
    })?
    .map_err(refused)?;
    if let Some(to) = labels {
        fill("labels", to, Values::I32(&signed(&found)))?;
    }
    if let Some(to) = distances {
        fill("distances", to, Values::F32(&far))?;
    }
    Ok(inertia)
}

/// The part of a shard in a step of k-means: writes labels (i32); returns sums as the bytes of f64, counts and inertia.
#[pyfunction]
pub fn assign_and_sum<'py>(
    py: Python<'py>,
    points: Any<'_, 'py>,
    centroids: Any<'_, 'py>,
    metric_name: &str,
    threads: Option<usize>,
    labels: Any<'_, 'py>,
) -> PyResult<(Bound<'py, PyBytes>, Vec<u64>, f64)> {
    let (array, own) = (Array::read("X", points)?, Array::read("centroids", centroids)?);
    let (mut claims, metric) = (Claims::default(), metric(metric_name)?);
    let rows = read("X", &array, &mut claims)?;
    let own_rows = read("centroids", &own, &mut claims)?;
    let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
    let own = Points::named("centroids", own_rows, shape("centroids", &own)?).map_err(refused)?;
    let model = KMeansModel::of(own, metric, options(threads)).map_err(refused)?;
    let part = detach(py, || model.assign_and_sum(points))?.map_err(refused)?;
    fill("labels", labels, Values::I32(&signed(&part.labels)))?;
    let sums: Vec<u8> = part.sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
    Ok((PyBytes::new(py, &sums), part.counts, part.inertia))
}

/// Rows that can be searched, exactly or in inverted lists.
enum Searched {
    All(Box<NeighborIndex<'static>>),
    Lists(Box<IvfIndex<'static>>),
}

/// An index over a copy of rows. `asked` is metric, score tolerance and threads. For approximate search, `lists` is the
/// number of lists, the seed and the steps of k-means.
#[pyclass(frozen)]
pub struct Index(Searched);

#[pymethods]
impl Index {
    #[new]
    #[pyo3(signature = (points, asked, lists=None))]
    fn new(
        py: Python<'_>,
        points: Any<'_, '_>,
        asked: (String, Option<f64>, Option<usize>),
        lists: Option<(usize, u64, usize)>,
    ) -> PyResult<Index> {
        let array = Array::read("X", points)?;
        let mut claims = Claims::default();
        let rows = read("X", &array, &mut claims)?;
        let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
        let (name, tolerance, threads) = asked;
        let (metric, options) = (metric(&name)?, options(threads));
        let made = detach(py, || match lists {
            None => {
                let index = NeighborIndex::with_tolerance(points, metric, options, tolerance)?;
                Ok(Searched::All(Box::new(index.into_owned()?)))
            }
            Some((count, seed, steps)) => {
                let lists = Ivf::new(count).metric(metric).seed(seed).steps(steps);
                let index = lists.score_tolerance(tolerance).options(options).build(points)?;
                Ok(Searched::Lists(Box::new(index.into_owned()?)))
            }
        })?;
        made.map(Index).map_err(refused)
    }

    /// Finds the k nearest rows of each query, or the nearest other rows of each row; with lists, in `probes` of them.
    /// Writes i32 and f32.
    fn search(
        &self,
        py: Python<'_>,
        queries: Option<Any<'_, '_>>,
        k: usize,
        probes: usize,
        rows: Any<'_, '_>,
        distances: Any<'_, '_>,
    ) -> PyResult<()> {
        let array = queries.map(|queries| Array::read("X", queries)).transpose()?;
        let mut claims = Claims::default();
        let asks = array.as_ref().map(|array| asking(array, &mut claims)).transpose()?;
        let found = detach(py, || match (&self.0, asks) {
            (Searched::All(index), Some(asks)) => index.search(asks, k),
            (Searched::All(index), None) => index.search_self(k),
            (Searched::Lists(index), Some(asks)) => index.search(asks, k, probes),
            (Searched::Lists(index), None) => index.search_self(k, probes),
        })?;
        let found = found.map_err(refused)?;
        fill("rows", rows, Values::I32(&signed(&found.rows)))?;
        fill("distances", distances, Values::F32(&found.distances))
    }

    /// The fraction of the true k nearest rows that a search with this many probes finds.
    fn recall(&self, py: Python<'_>, queries: Any<'_, '_>, k: usize, probes: usize) -> PyResult<f64> {
        let array = Array::read("X", queries)?;
        let mut claims = Claims::default();
        let asks = asking(&array, &mut claims)?;
        detach(py, || match &self.0 {
            Searched::All(_) => Ok(1.0),
            Searched::Lists(index) => index.recall(asks, k, probes),
        })?
        .map_err(refused)
    }
}

fn asking<'a>(array: &'a Array, claims: &mut Claims<'a>) -> PyResult<Points<'a>> {
    Points::named("X", read("X", array, claims)?, shape("X", array)?).map_err(refused)
}

/// HDBSCAN: writes labels (i32) and probabilities (f32); returns stabilities.
#[pyfunction]
pub fn hdbscan(
    py: Python<'_>,
    points: Any<'_, '_>,
    asked: (usize, Option<usize>, bool, Option<usize>),
    labels: Any<'_, '_>,
    probabilities: Any<'_, '_>,
) -> PyResult<Vec<f64>> {
    let array = Array::read("X", points)?;
    let mut claims = Claims::default();
    let rows = read("X", &array, &mut claims)?;
    let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
    let (size, samples, single, threads) = asked;
    let mut hdbscan = Hdbscan::new(size).allow_single_cluster(single).options(options(threads));
    if let Some(samples) = samples {
        hdbscan = hdbscan.min_samples(samples);
    }
    let found = detach(py, || hdbscan.fit(points))?.map_err(refused)?;
    fill("labels", labels, Values::I32(&found.labels))?;
    fill("probabilities", probabilities, Values::F32(&found.probabilities))?;
    Ok(found.stabilities)
}

/// DBSCAN: writes labels (i32); returns the indices of core points.
#[pyfunction]
pub fn dbscan(
    py: Python<'_>,
    points: Any<'_, '_>,
    asked: (f64, usize, Option<usize>),
    labels: Any<'_, '_>,
) -> PyResult<Vec<u32>> {
    let array = Array::read("X", points)?;
    let mut claims = Claims::default();
    let rows = read("X", &array, &mut claims)?;
    let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
    let (radius, samples, threads) = asked;
    let dbscan = Dbscan::new(radius).min_samples(samples).options(options(threads));
    let found = detach(py, || dbscan.fit(points))?.map_err(refused)?;
    fill("labels", labels, Values::I32(&found.labels))?;
    Ok(found.cores)
}

/// Singular values, explained variances and their ratios, and whether the randomised form was used.
type Decomposed = (Vec<f64>, Vec<f64>, Vec<f64>, bool);

/// Truncated SVD, or PCA if an array for the mean is given. Writes components and mean (f32); returns singular values,
/// explained variances and their ratios, and whether the randomised form was used.
#[pyfunction]
pub fn svd(
    py: Python<'_>,
    points: Any<'_, '_>,
    asked: (usize, Option<f64>, u64, Option<usize>),
    components: Any<'_, '_>,
    mean: Option<Any<'_, '_>>,
) -> PyResult<Decomposed> {
    let array = Array::read("X", points)?;
    let mut claims = Claims::default();
    let rows = read("X", &array, &mut claims)?;
    let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
    let (k, tolerance, seed, threads) = asked;
    let centred = mean.is_some();
    let found = detach(py, || match centred {
        true => Pca::new(k).tolerance(tolerance).seed(seed).options(options(threads)).fit(points),
        false => TruncatedSvd::new(k).tolerance(tolerance).seed(seed).options(options(threads)).fit(points),
    })?;
    let found = found.map_err(refused)?;
    fill("components", components, Values::F32(found.components()))?;
    if let (Some(to), Some(values)) = (mean, found.mean()) {
        fill("mean", to, Values::F32(values))?;
    }
    let randomised = found.method() == Method::Randomised;
    Ok((found.singular_values().to_vec(), found.explained_variance(), found.explained_variance_ratio(), randomised))
}

/// Coordinates of rows along components.
#[pyfunction]
pub fn project(
    py: Python<'_>,
    points: Any<'_, '_>,
    components: Any<'_, '_>,
    mean: Option<Any<'_, '_>>,
    threads: Option<usize>,
    out: Any<'_, '_>,
) -> PyResult<()> {
    let (array, own) = (Array::read("X", points)?, Array::read("components_", components)?);
    let about = mean.map(|mean| Array::read("mean_", mean)).transpose()?;
    let mut claims = Claims::default();
    let rows = read("X", &array, &mut claims)?;
    let own_rows = read("components_", &own, &mut claims)?;
    let mean = about.as_ref().map(|about| read("mean_", about, &mut claims)).transpose()?;
    let points = Points::named("X", rows, shape("X", &array)?).map_err(refused)?;
    let own = Points::named("components_", own_rows, shape("components_", &own)?).map_err(refused)?;
    let found = Decomposition::of(own, mean, options(threads)).map_err(refused)?;
    let found = detach(py, || found.transform(points))?.map_err(refused)?;
    fill("out", out, Values::F32(&found))
}
