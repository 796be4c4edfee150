"""Clusters: KMeans, HDBSCAN and DBSCAN with the names and methods of scikit-learn, on the CPU, exact.

>>> from fulgurite.cluster import KMeans
>>> labels = KMeans(8, random_state=0).fit_predict(points)

Labels equal those of an f64 computation (the first of equally near centroids), and do not depend on the number of
threads.
"""

from __future__ import annotations

import os

from . import _fulgurite
from ._estimators import Estimator, rows_of, seed_of, threads_of

__all__ = ["DBSCAN", "HDBSCAN", "KMeans"]


class KMeans(Estimator):
    """k-means by Lloyd's algorithm.

    `init` is "k-means++", "random" or an array of centroids; the start with the least inertia of `n_init` is
    kept. `metric` is "euclidean", "cosine" or "dot". `batch_size` makes it mini-batch k-means. `score_tolerance`
    allows errors of scores, relative to the norms of point and centroid; from 1/64 on, a matrix unit computes in bf16.

    `fit` also takes the path of a `.npy` file of float32 rows, of which at most `memory_bytes` are held at a time.
    """

    def __init__(
        self,
        n_clusters=8,
        *,
        init="k-means++",
        n_init=1,
        max_iter=300,
        tol=1e-4,
        random_state=None,
        metric="euclidean",
        batch_size=None,
        score_tolerance=None,
        memory_bytes=1 << 30,
        n_threads=None,
    ):
        self.n_clusters = n_clusters
        self.init = init
        self.n_init = n_init
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.metric = metric
        self.batch_size = batch_size
        self.score_tolerance = score_tolerance
        self.memory_bytes = memory_bytes
        self.n_threads = n_threads

    def fit(self, X, y=None):
        """Finds centroids: `cluster_centers_`, `labels_`, `inertia_`, `n_iter_`."""
        import numpy as np

        source = X if isinstance(X, (str, os.PathLike)) else rows_of("X", X)
        named = isinstance(self.init, str)
        if not isinstance(self.n_init, int) or self.n_init < 1:
            raise ValueError(f"`n_init` is {self.n_init!r}, allowed: 1 and more")
        best = None
        for start in range(self.n_init if named else 1):
            asked = {
                "clusters": self.n_clusters,
                "metric": self.metric,
                "init": self.init if named else rows_of("init", self.init),
                "seed": (seed_of(self.random_state) + start) % 2**64,
                "max_steps": self.max_iter,
                "tolerance": self.tol,
                "score_tolerance": self.score_tolerance,
                "threads": threads_of(self.n_threads),
            }
            found = _fulgurite.Clusters(source, asked, self.batch_size, self.memory_bytes)
            if best is None or found.sizes()[3] < best.sizes()[3]:
                best = found
        points, clusters, dim, inertia, steps = best.sizes()
        self.labels_ = np.empty(points, np.int32)
        self.cluster_centers_ = np.empty((clusters, dim), np.float32)
        best.write(self.labels_, self.cluster_centers_)
        self._seen = None
        self.inertia_, self.n_iter_, self.n_features_in_ = inertia, steps, dim
        return self

    def fit_predict(self, X, y=None):
        """The labels of `fit`."""
        return self.fit(X).labels_

    def partial_fit(self, X, y=None):
        """Moves the centroids towards a batch of rows: each becomes the mean of all rows that were assigned to it.

        The first batch also chooses the first centroids, unless `fit` did. `labels_` and `inertia_` are those of the
        batch.
        """
        import numpy as np

        from .shards import ClusterSums, assign_and_sum, next_centroids

        X = rows_of("X", X)
        if getattr(self, "_seen", None) is None:
            if getattr(self, "cluster_centers_", None) is None:
                first = KMeans(**{**self.get_params(), "max_iter": 0, "n_init": 1, "batch_size": None}).fit(X)
                self.cluster_centers_, self.n_features_in_, self.n_iter_ = first.cluster_centers_, X.shape[1], 0
                counts = np.zeros(len(self.cluster_centers_), np.int64)
            else:
                counts = np.bincount(self.labels_, minlength=len(self.cluster_centers_))
            self._seen = ClusterSums(None, self.cluster_centers_ * counts[:, None].astype(np.float64), counts, 0.0)
        part = assign_and_sum(X, self.cluster_centers_, metric=self.metric, n_threads=self.n_threads)
        seen = ClusterSums(None, self._seen.sums + part.sums, self._seen.counts + part.counts, 0.0)
        self.cluster_centers_, _ = next_centroids(self.cluster_centers_, seen, metric=self.metric)
        self._seen = seen
        self.labels_, self.inertia_ = part.labels, part.inertia
        self.n_iter_ += 1
        return self

    def _assign(self, X, labels, distances):
        centers = self._fitted("cluster_centers_")
        return _fulgurite.assign(X, centers, self.metric, threads_of(self.n_threads), labels, distances)

    def predict(self, X):
        """The nearest centroid of each row."""
        import numpy as np

        self._fitted("cluster_centers_")
        X = rows_of("X", X)
        labels = np.empty(len(X), np.int32)
        self._assign(X, labels, None)
        return labels

    def transform(self, X):
        """The distance from each row to each centroid."""
        import numpy as np

        X = rows_of("X", X)
        distances = np.empty((len(X), len(self._fitted("cluster_centers_"))), np.float32)
        self._assign(X, None, distances)
        return distances

    def fit_transform(self, X, y=None):
        """`fit`, then `transform`."""
        return self.fit(X).transform(X)

    def score(self, X, y=None):
        """The inertia of other rows, negated."""
        self._fitted("cluster_centers_")
        return -self._assign(rows_of("X", X), None, None)


class HDBSCAN(Estimator):
    """Clusters of varying density, by euclidean distance, equal to those of the package hdbscan.

    The core distance is the distance to the `min_samples`-th neighbour, not counting the point itself (as in the
    package hdbscan; scikit-learn counts the point itself).
    """

    def __init__(self, min_cluster_size=5, min_samples=None, *, allow_single_cluster=False, n_threads=None):
        self.min_cluster_size = min_cluster_size
        self.min_samples = min_samples
        self.allow_single_cluster = allow_single_cluster
        self.n_threads = n_threads

    def fit(self, X, y=None):
        """Finds clusters: `labels_` (-1 is noise), `probabilities_`, `cluster_persistence_` (stabilities)."""
        import numpy as np

        X = rows_of("X", X)
        self.labels_, self.probabilities_ = np.empty(len(X), np.int32), np.empty(len(X), np.float32)
        asked = (self.min_cluster_size, self.min_samples, self.allow_single_cluster, threads_of(self.n_threads))
        self.cluster_persistence_ = np.array(_fulgurite.hdbscan(X, asked, self.labels_, self.probabilities_))
        self.n_features_in_ = X.shape[1]
        return self

    def fit_predict(self, X, y=None):
        """The labels of `fit`."""
        return self.fit(X).labels_


class DBSCAN(Estimator):
    """Clusters of points with enough neighbours, by euclidean distance; `min_samples` counts the point itself."""

    def __init__(self, eps=0.5, *, min_samples=5, n_threads=None):
        self.eps = eps
        self.min_samples = min_samples
        self.n_threads = n_threads

    def fit(self, X, y=None):
        """Finds clusters: `labels_` (-1 is noise), `core_sample_indices_`, `components_`."""
        import numpy as np

        X = rows_of("X", X)
        self.labels_ = np.empty(len(X), np.int32)
        cores = _fulgurite.dbscan(X, (self.eps, self.min_samples, threads_of(self.n_threads)), self.labels_)
        self.core_sample_indices_ = np.array(cores, np.int64)
        self.components_ = X[self.core_sample_indices_]
        self.n_features_in_ = X.shape[1]
        return self

    def fit_predict(self, X, y=None):
        """The labels of `fit`."""
        return self.fit(X).labels_
