//! The arguments of `cluster`, `neighbors` and `svd`.

use clap::Subcommand;
use clap::builder::RangedU64ValueParser;
use fulgurite::neighbors::Metric;
use std::path::PathBuf;

/// As many as attention takes.
const MAX_THREADS: u64 = fulgurite::Settings::MAX_THREADS as u64;

/// Rows in and out.
#[derive(Debug, Clone, clap::Args)]
pub struct RowsArgs {
    /// FILE.npy, or FILE.safetensors with a tensor `points`: rows of f32, f16 or bf16
    #[arg(value_name = "IN")]
    pub input: PathBuf,
    /// The tensor of a safetensors file
    #[arg(long, default_value = "points", value_name = "NAME")]
    pub name: String,
    /// FILE.safetensors, or a folder for .npy files; nothing is written if not given
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,
    /// Write a page with a picture: the first two components, coloured
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Threads, 1 to 4096; one per core if not given
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=MAX_THREADS))]
    pub threads: Option<usize>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `cluster`.
#[derive(Debug, clap::Args)]
pub struct ClusterArgs {
    /// The method.
    #[command(subcommand)]
    pub command: ClusterCommand,
}

/// The method.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// k-means: writes labels and centroids
    Kmeans(KmeansArgs),
    /// HDBSCAN: writes labels (-1 is noise), probabilities and core distances
    Hdbscan(HdbscanArgs),
    /// DBSCAN: writes labels (-1 is noise)
    Dbscan(DbscanArgs),
}

/// Arguments of `cluster kmeans`.
#[derive(Debug, clap::Args)]
pub struct KmeansArgs {
    /// Rows in and out.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Number of clusters
    #[arg(short = 'k', long, value_name = "N")]
    pub clusters: usize,
    /// euclidean, cosine or dot
    #[arg(long, default_value = "euclidean", value_name = "NAME", value_parser = metric)]
    pub metric: Metric,
    /// k-means++ or random
    #[arg(long, default_value = "k-means++", value_name = "NAME", value_parser = ["k-means++", "random"])]
    pub init: String,
    /// Seed of the random draws
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
    /// The most steps
    #[arg(long, default_value_t = 300, value_name = "N")]
    pub steps: usize,
    /// Stop when centroids move less, relative to the variance; 0: when no label changes
    #[arg(long, default_value_t = 1e-4, value_name = "X", allow_hyphen_values = true)]
    pub tolerance: f64,
    /// Allow errors of scores, relative to the norms of row and centroid: from 0.016 on, bf16 on a matrix unit
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub score_tolerance: Option<f64>,
    /// Rows of a mini-batch
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
    /// Read IN (f32) in parts, with this many MiB of rows in memory at a time
    #[arg(long, value_name = "MIB")]
    pub memory: Option<usize>,
}

/// Arguments of `cluster hdbscan`.
#[derive(Debug, clap::Args)]
pub struct HdbscanArgs {
    /// Rows in and out.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// The fewest points of a cluster
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub min_cluster_size: usize,
    /// The neighbour whose distance is the core distance; default as many as the fewest points
    #[arg(long, value_name = "N")]
    pub min_samples: Option<usize>,
    /// Whether all points together may be the one cluster
    #[arg(long)]
    pub allow_single_cluster: bool,
}

/// Arguments of `cluster dbscan`.
#[derive(Debug, clap::Args)]
pub struct DbscanArgs {
    /// Rows in and out.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Largest distance between neighbours
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub radius: f64,
    /// Neighbours of a core, itself included
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub min_samples: usize,
}

/// Arguments of `neighbors`.
#[derive(Debug, clap::Args)]
pub struct NeighborsArgs {
    /// Rows in and out.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Number of neighbours of each row
    #[arg(short, default_value_t = 10, value_name = "N")]
    pub k: usize,
    /// FILE.npy or FILE.safetensors with the rows that ask; if not given, each row of IN asks for others
    #[arg(long, value_name = "FILE")]
    pub queries: Option<PathBuf>,
    /// euclidean, cosine or dot
    #[arg(long, default_value = "euclidean", value_name = "NAME", value_parser = metric)]
    pub metric: Metric,
    /// Allow errors of scores, relative to the norms of query and row: from 0.016 on, bf16 on a matrix unit
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub score_tolerance: Option<f64>,
    /// Search approximately, in this many inverted lists; needs --queries
    #[arg(long, value_name = "N", requires = "queries")]
    pub lists: Option<usize>,
    /// Lists that a query looks into
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub probes: usize,
}

/// Arguments of `svd`.
#[derive(Debug, clap::Args)]
pub struct SvdArgs {
    /// Rows in and out.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Number of components
    #[arg(short, default_value_t = 2, value_name = "N")]
    pub k: usize,
    /// Take the mean off first: principal components
    #[arg(long)]
    pub centred: bool,
    /// Allow relative errors of the singular values: the randomised form, where it is less work
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub tolerance: Option<f64>,
    /// Seed of the random draws
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub seed: u64,
}

fn metric(text: &str) -> Result<Metric, String> {
    let found = Metric::ALL.into_iter().find(|metric| metric.name() == text);
    found.ok_or_else(|| "allowed: euclidean, cosine, dot".into())
}
