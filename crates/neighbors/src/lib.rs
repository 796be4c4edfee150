//! Attention makes a tile of scores, folds it into a running summary and throws it away. With the best key as the fold it
//! is k-means; with the best k, nearest neighbours; on those stand HDBSCAN and DBSCAN; and the Gram
//! matrix gives PCA and truncated SVD. All of it runs on the micro-kernels and threads of the CPU engine.
//!
//! Answers are exact: products may drop digits (on matrix units they do), but whatever lies within their error is
//! looked at again in f64, so labels and neighbours are those of an f64 computation, whatever the
//! instruction set. They do not depend on the number of threads.
//!
//! ```
//! use fulgurite_neighbors::{KMeans, Points};
//! let data = [0.0, 0.1, 5.0, 5.1, 0.2, 4.9];
//! let points = Points::new(&data, [6, 1])?;
//! let model = KMeans::new(2).seed(1).fit(points)?;
//! assert_eq!(model.labels()[0], model.labels()[1]);
//! assert_ne!(model.labels()[0], model.labels()[2]);
//! assert_eq!(model.predict(Points::new(&[0.05], [1, 1])?)?, [model.labels()[0]]);
//! # Ok::<(), fulgurite_neighbors::Error>(())
//! ```

#![forbid(unsafe_code)]

mod dbscan;
mod error;
mod hdbscan;
mod ivf;
mod kmeans;
mod knn;
pub mod oracle;
mod points;
mod rows;
mod select;
mod svd;
mod union;

pub use dbscan::{Dbscan, DbscanModel};
pub use error::Error;
pub use fulgurite_cpu::{Isa, Options};
pub use hdbscan::{Hdbscan, HdbscanModel, TreeEdge};
pub use ivf::{Ivf, IvfIndex};
pub use kmeans::{ClusterSums, Init, KMeans, KMeansModel, Progress};
pub use knn::{NeighborIndex, Neighbors};
pub use points::{Metric, Points};
pub use rows::{FileRows, RowSource};
pub use select::{KeySelector, Selection};
pub use svd::{Decomposition, Method, Pca, TruncatedSvd};
