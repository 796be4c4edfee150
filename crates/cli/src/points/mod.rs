//! `cluster`, `neighbors` and `svd`: rows of a file, the results, and a picture of them.

pub mod args;
mod picture;

use crate::io::{self, Format, Stored};
use crate::{Failure, json, progress, say};
use args::{ClusterCommand, DbscanArgs, HdbscanArgs, KmeansArgs, NeighborsArgs, RowsArgs, SvdArgs};
use fulgurite::neighbors::{
    Dbscan, FileRows, Hdbscan, Init, Ivf, KMeans, Method, NeighborIndex, Options, Pca, Points, TruncatedSvd,
};
use fulgurite::{DType, Tensor};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

impl From<fulgurite::neighbors::Error> for Failure {
    fn from(e: fulgurite::neighbors::Error) -> Failure {
        Failure::Input(e.into())
    }
}

/// The results of a command, for people and for `--json`.
#[derive(Debug, Default, Serialize)]
struct Summary {
    command: &'static str,
    rows: usize,
    columns: usize,
    seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    clusters: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    noise: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    inertia: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    steps: Option<usize>,
    /// Points of each cluster.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    sizes: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queries: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_distance_of_nearest: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recall: Option<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    singular_values: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    explained_variance_ratio: Vec<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    method: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    written_to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    report: Option<String>,
}

/// A summary, and the results where they are not in files.
#[derive(Serialize)]
struct WithArrays<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    results: BTreeMap<&'a str, Array>,
}

/// A tensor of one or two axes.
#[derive(Serialize)]
#[serde(untagged)]
enum Array {
    Integers(Vec<i64>),
    Numbers(Vec<f64>),
    IntegerRows(Vec<Vec<i64>>),
    NumberRows(Vec<Vec<f64>>),
}

impl Array {
    fn new<'a>((name, tensor): &(&'a str, Tensor)) -> (&'a str, Array) {
        let values = tensor.view().to_f64();
        let integers = || values.iter().map(|&x| x as i64).collect::<Vec<i64>>();
        let array = match (tensor.shape().len(), tensor.dtype().is_float()) {
            (1, false) => Array::Integers(integers()),
            (1, true) => Array::Numbers(values),
            (_, false) => Array::IntegerRows(integers().chunks(tensor.shape()[1].max(1)).map(<[_]>::to_vec).collect()),
            (_, true) => Array::NumberRows(values.chunks(tensor.shape()[1].max(1)).map(<[_]>::to_vec).collect()),
        };
        (name, array)
    }
}

/// Rows of a file as f32.
struct LoadedRows {
    data: Vec<f32>,
    shape: [usize; 2],
}

impl LoadedRows {
    fn read(path: &Path, name: &str) -> Result<LoadedRows, Failure> {
        let shown = path.display();
        let stored = if path.extension().is_some_and(|e| e == "npy") {
            let bytes = std::fs::read(path)
                .map_err(|e| Failure::input(format_args!("cannot read {shown}: {}", io::reason(&e))))?;
            io::npy::note_f64(path, &bytes);
            io::npy::decode(&bytes).map_err(|e| Failure::input(format_args!("{shown}: {e}")))?
        } else if path.extension().is_some_and(|e| e == "safetensors") {
            let mut tensors = io::read(path)?;
            let has = tensors.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let missing = format!("{shown} has no tensor `{name}`, it has: {has}; choose one with --name");
            tensors.remove(name).ok_or_else(|| Failure::input(missing))?
        } else {
            let text = format_args!("`IN` is {shown}, allowed: a name ending in .npy or .safetensors");
            return Err(Failure::input(text));
        };
        let tensor = match stored {
            Stored::Tensor(tensor) if tensor.dtype().is_float() => tensor,
            Stored::Tensor(tensor) => return Err(wrong_type(path, tensor.dtype().name())),
            Stored::Other(dtype) => return Err(wrong_type(path, &dtype)),
        };
        let shape = <[usize; 2]>::try_from(&tensor.shape()[..]).map_err(|_| {
            Failure::input(format_args!("{shown} has {} axes, allowed: 2 (rows of elements)", tensor.shape().len()))
        })?;
        let data = match tensor.as_slice::<f32>() {
            Some(values) => values.to_vec(),
            None => tensor.view().to_f64().iter().map(|&x| x as f32).collect(),
        };
        Ok(LoadedRows { data, shape })
    }

    fn points(&self) -> Result<Points<'_>, Failure> {
        Ok(Points::new(&self.data, self.shape)?)
    }
}

/// A file whose rows are read in parts.
fn in_parts(args: &RowsArgs) -> Result<FileRows, Failure> {
    let path = &args.input;
    if path.extension().is_some_and(|e| e == "safetensors") {
        let (offset, shape) = io::safetensors::rows_in(path, &args.name)
            .map_err(|e| Failure::input(format_args!("{}: {e}", path.display())))?;
        return Ok(FileRows::at(path, offset, shape)?);
    }
    Ok(FileRows::open(path)?)
}

fn wrong_type(path: &Path, got: &str) -> Failure {
    Failure::input(format_args!("{} is {got}, allowed: f32, f16, bf16; convert it", path.display()))
}

fn options(args: &RowsArgs) -> Options {
    Options { threads: args.threads, ..Options::default() }
}

/// Refuses a wrong output before any work.
fn format(args: &RowsArgs) -> Result<Option<Format>, Failure> {
    args.output.as_deref().map(Format::of).transpose()
}

fn tensor_f32(data: &[f32], shape: &[usize]) -> Result<Tensor, Failure> {
    Ok(Tensor::new(data.to_vec(), shape).map_err(fulgurite::Error::from)?)
}

fn tensor_i32(data: impl Iterator<Item = i32>, shape: &[usize]) -> Result<Tensor, Failure> {
    Ok(Tensor::new(data.collect::<Vec<i32>>(), shape).map_err(fulgurite::Error::from)?)
}

/// Writes the requested files and prints a summary. Everything was computed before, so no result is left half written.
fn finish(
    args: &RowsArgs,
    format: Option<Format>,
    mut summary: Summary,
    results: &[(&str, Tensor)],
    picture: Option<(Points<'_>, &[i32])>,
) -> Result<(), Failure> {
    let mut files = Vec::new();
    if let (Some(path), Some((points, labels))) = (&args.report, picture) {
        let page = picture::page(&summary_lines(&summary), points, labels, options(args))?;
        files.push((path.clone(), page.into_bytes()));
        summary.report = Some(path.display().to_string());
    }
    if let (Some(path), Some(format)) = (&args.output, format) {
        let named: Vec<(String, &Tensor)> = results.iter().map(|(name, tensor)| (name.to_string(), tensor)).collect();
        files.extend(io::encoded(path, format, &named)?);
        summary.written_to = Some(path.display().to_string());
    }
    io::write_files(&files)?;
    if args.json {
        // With `-o` the results are in files, and may be large.
        let arrays = if summary.written_to.is_some() { &[] } else { results };
        return json::print(&WithArrays { summary: &summary, results: arrays.iter().map(Array::new).collect() });
    }
    let lines = summary_lines(&summary).into_iter().map(|(name, value)| format!("{name} {value}"));
    let mut lines: Vec<String> = lines.collect();
    lines.extend(results.iter().map(|(name, t)| format!("{name} {} {:?}", t.dtype(), t.shape())));
    if summary.written_to.is_none() {
        lines.push("not written; give -o to keep them, or --json to print them".into());
    }
    lines.extend(summary.written_to.iter().map(|path| format!("written to {path}")));
    lines.extend(summary.report.iter().map(|path| format!("report in {path}")));
    say(&lines.join("\n"))
}

/// The figures of a summary, by name.
fn summary_lines(summary: &Summary) -> Vec<(&'static str, String)> {
    let mut lines = vec![("rows", format!("{} of {}", summary.rows, summary.columns))];
    let mut add = |name, value: Option<String>| lines.extend(value.map(|value| (name, value)));
    add("clusters", summary.clusters.map(|n| n.to_string()));
    add("noise", summary.noise.map(|n| n.to_string()));
    add("inertia", summary.inertia.map(|x| format!("{x:.6e}")));
    add("steps", summary.steps.map(|n| n.to_string()));
    add("queries", summary.queries.map(|n| n.to_string()));
    add("mean distance of the nearest", summary.mean_distance_of_nearest.map(|x| format!("{x:.6}")));
    add("recall", summary.recall.map(|x| format!("{x:.4}")));
    add("method", summary.method.map(String::from));
    let list = |values: &[f64]| values.iter().map(|x| format!("{x:.6}")).collect::<Vec<_>>().join(" ");
    add("singular values", (!summary.singular_values.is_empty()).then(|| list(&summary.singular_values)));
    let ratios = &summary.explained_variance_ratio;
    add("share of the variance", (!ratios.is_empty()).then(|| list(ratios)));
    add("seconds", Some(format!("{:.3}", summary.seconds)));
    lines
}

fn sizes(labels: &[i32], clusters: usize) -> Vec<usize> {
    let mut sizes = vec![0; clusters];
    labels.iter().filter(|&&label| label >= 0).for_each(|&label| sizes[label as usize] += 1);
    sizes
}

/// Runs `cluster`.
pub fn cluster(command: &ClusterCommand) -> Result<(), Failure> {
    match command {
        ClusterCommand::Kmeans(args) => kmeans(args),
        ClusterCommand::Hdbscan(args) => hdbscan(args),
        ClusterCommand::Dbscan(args) => dbscan(args),
    }
}

fn kmeans(args: &KmeansArgs) -> Result<(), Failure> {
    let format = format(&args.rows)?;
    let init = if args.init == "random" { Init::Random } else { Init::PlusPlus };
    let kmeans = KMeans::new(args.clusters).metric(args.metric).init(init).seed(args.seed).max_steps(args.steps);
    let kmeans = kmeans.tolerance(args.tolerance).options(options(&args.rows));
    let kmeans = kmeans.score_tolerance(args.score_tolerance);
    let start = Instant::now();
    let bar = progress(args.steps);
    let mut show = |p: fulgurite::neighbors::Progress| {
        bar.set_position(p.step as u64);
        bar.set_message(format!("{} of {} rows, moved {:.2e}", p.rows, p.of, p.moved));
    };
    let (model, rows) = match args.memory {
        Some(mib) => {
            if args.rows.report.is_some() {
                let text = "`--report` needs all rows in memory; leave --memory or --report out";
                return Err(Failure::input(text));
            }
            let file = in_parts(&args.rows)?;
            let bytes = mib.saturating_mul(1 << 20);
            let model = match args.batch {
                None => kmeans.fit_rows(&file, bytes, &mut show)?,
                Some(batch) => kmeans.fit_batches(&file, batch, bytes, &mut show)?,
            };
            (model, None)
        }
        None => {
            let rows = LoadedRows::read(&args.rows.input, &args.rows.name)?;
            let points = rows.points()?;
            let model = match args.batch {
                None => kmeans.fit_with(points, &mut show)?,
                Some(batch) => kmeans.fit_batches(&points, batch, usize::MAX, &mut show)?,
            };
            (model, Some(rows))
        }
    };
    bar.finish_and_clear();
    let labels: Vec<i32> = model.labels().iter().map(|&label| label as i32).collect();
    let summary = Summary {
        command: "cluster kmeans",
        rows: labels.len(),
        columns: model.dim(),
        seconds: start.elapsed().as_secs_f64(),
        clusters: Some(model.clusters()),
        inertia: Some(model.inertia()),
        steps: Some(model.steps()),
        sizes: sizes(&labels, model.clusters()),
        ..Summary::default()
    };
    let results = [
        ("labels", tensor_i32(labels.iter().copied(), &[labels.len()])?),
        ("centroids", tensor_f32(model.centroids(), &[model.clusters(), model.dim()])?),
    ];
    let points = rows.as_ref().map(LoadedRows::points).transpose()?;
    finish(&args.rows, format, summary, &results, points.map(|points| (points, &labels[..])))
}

fn hdbscan(args: &HdbscanArgs) -> Result<(), Failure> {
    let format = format(&args.rows)?;
    let rows = LoadedRows::read(&args.rows.input, &args.rows.name)?;
    let points = rows.points()?;
    let mut hdbscan = Hdbscan::new(args.min_cluster_size).allow_single_cluster(args.allow_single_cluster);
    if let Some(samples) = args.min_samples {
        hdbscan = hdbscan.min_samples(samples);
    }
    let start = Instant::now();
    let found = hdbscan.options(options(&args.rows)).fit(points)?;
    let (n, clusters) = (points.len(), found.stabilities.len());
    let summary = Summary {
        command: "cluster hdbscan",
        rows: n,
        columns: points.dim(),
        seconds: start.elapsed().as_secs_f64(),
        clusters: Some(clusters),
        noise: Some(found.labels.iter().filter(|&&label| label < 0).count()),
        sizes: sizes(&found.labels, clusters),
        ..Summary::default()
    };
    let results = [
        ("labels", tensor_i32(found.labels.iter().copied(), &[n])?),
        ("probabilities", tensor_f32(&found.probabilities, &[n])?),
        ("core_distances", tensor_f32(&found.core_distances, &[n])?),
    ];
    finish(&args.rows, format, summary, &results, Some((points, &found.labels)))
}

fn dbscan(args: &DbscanArgs) -> Result<(), Failure> {
    let format = format(&args.rows)?;
    let rows = LoadedRows::read(&args.rows.input, &args.rows.name)?;
    let points = rows.points()?;
    let start = Instant::now();
    let dbscan = Dbscan::new(args.radius).min_samples(args.min_samples).options(options(&args.rows));
    let found = dbscan.fit(points)?;
    let summary = Summary {
        command: "cluster dbscan",
        rows: points.len(),
        columns: points.dim(),
        seconds: start.elapsed().as_secs_f64(),
        clusters: Some(found.clusters),
        noise: Some(found.labels.iter().filter(|&&label| label < 0).count()),
        sizes: sizes(&found.labels, found.clusters),
        ..Summary::default()
    };
    let results = [("labels", tensor_i32(found.labels.iter().copied(), &[points.len()])?)];
    finish(&args.rows, format, summary, &results, Some((points, &found.labels)))
}

/// Runs `neighbors`.
pub fn neighbors(args: &NeighborsArgs) -> Result<(), Failure> {
    let format = format(&args.rows)?;
    let rows = LoadedRows::read(&args.rows.input, &args.rows.name)?;
    let points = rows.points()?;
    let asks = args.queries.as_deref().map(|path| LoadedRows::read(path, &args.rows.name)).transpose()?;
    let asks = asks.as_ref().map(|rows| Points::named("queries", &rows.data, rows.shape)).transpose()?;
    let start = Instant::now();
    let (found, recall) = match (asks, args.lists) {
        (Some(asks), Some(lists)) => {
            let lists = Ivf::new(lists).metric(args.metric).score_tolerance(args.score_tolerance);
            let index = lists.options(options(&args.rows)).build(points)?;
            let found = index.search(asks, args.k, args.probes)?;
            // A report of recall over all queries would be the exact search: some rows tell.
            let some = asks.part(0, asks.len().min(200));
            (found, Some(index.recall(some, args.k, args.probes)?))
        }
        (asks, _) => {
            let tolerance = args.score_tolerance;
            let index = NeighborIndex::with_tolerance(points, args.metric, options(&args.rows), tolerance)?;
            let found = match asks {
                Some(asks) => index.search(asks, args.k)?,
                None => index.search_self(args.k)?,
            };
            (found, None)
        }
    };
    let queries = found.rows.len() / args.k;
    let nearest = found.distances.iter().step_by(args.k).map(|&x| f64::from(x)).sum::<f64>() / queries as f64;
    let summary = Summary {
        command: "neighbors",
        rows: points.len(),
        columns: points.dim(),
        seconds: start.elapsed().as_secs_f64(),
        queries: Some(queries),
        mean_distance_of_nearest: Some(nearest),
        recall,
        ..Summary::default()
    };
    let shape = [queries, args.k];
    let results = [
        ("rows", tensor_i32(found.rows.iter().map(|&row| row as i32), &shape)?),
        ("distances", tensor_f32(&found.distances, &shape)?),
    ];
    // The picture shows all rows in one colour.
    let plain = vec![0; points.len()];
    finish(&args.rows, format, summary, &results, Some((points, &plain)))
}

/// Runs `svd`.
pub fn svd(args: &SvdArgs) -> Result<(), Failure> {
    let format = format(&args.rows)?;
    let rows = LoadedRows::read(&args.rows.input, &args.rows.name)?;
    let points = rows.points()?;
    let start = Instant::now();
    let (k, options) = (args.k, options(&args.rows));
    let found = match args.centred {
        true => Pca::new(k).tolerance(args.tolerance).seed(args.seed).options(options).fit(points)?,
        false => TruncatedSvd::new(k).tolerance(args.tolerance).seed(args.seed).options(options).fit(points)?,
    };
    let coordinates = found.transform(points)?;
    let summary = Summary {
        command: "svd",
        rows: points.len(),
        columns: points.dim(),
        seconds: start.elapsed().as_secs_f64(),
        singular_values: found.singular_values().to_vec(),
        explained_variance_ratio: if args.centred { found.explained_variance_ratio() } else { Vec::new() },
        method: Some(if found.method() == Method::Randomised { "randomised" } else { "gram" }),
        ..Summary::default()
    };
    let values: Vec<f32> = found.singular_values().iter().map(|&x| x as f32).collect();
    let mut results = vec![
        ("components", tensor_f32(found.components(), &[k, points.dim()])?),
        ("singular_values", tensor_f32(&values, &[k])?),
        ("coordinates", tensor_f32(&coordinates, &[points.len(), k])?),
    ];
    if let Some(mean) = found.mean() {
        results.push(("mean", tensor_f32(mean, &[points.dim()])?));
    }
    debug_assert!(results.iter().all(|(_, t)| t.dtype() == DType::F32));
    let plain = vec![0; points.len()];
    finish(&args.rows, format, summary, &results, Some((points, &plain)))
}
