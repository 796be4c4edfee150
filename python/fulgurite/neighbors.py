"""Nearest neighbours with scikit-learn's names: exact, on the CPU.

>>> from fulgurite.neighbors import NearestNeighbors
>>> distances, rows = NearestNeighbors(n_neighbors=10).fit(base).kneighbors(queries)
"""

from __future__ import annotations

from . import _fulgurite
from ._estimators import Estimator, rows_of

__all__ = ["NearestNeighbors"]


class NearestNeighbors(Estimator):
    """The nearest rows, by "euclidean" distance, "cosine" (1 less the cosine) or "dot" (the negated product)."""

    def __init__(self, n_neighbors=5, *, metric="euclidean", n_threads=None):
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.n_threads = n_threads

    def fit(self, X, y=None):
        """Keeps the rows to search; they are packed for every search anew."""
        self._rows = rows_of("X", X)
        self.n_samples_fit_, self.n_features_in_ = self._rows.shape
        return self

    def kneighbors(self, X=None, n_neighbors=None, return_distance=True):
        """Distances and row numbers of the nearest rows, nearest first, lower rows first among equals.

        Without `X`, of each row that was fitted the nearest others.
        """
        import numpy as np

        base = self._fitted("_rows")
        k = self.n_neighbors if n_neighbors is None else n_neighbors
        if not isinstance(k, (int, np.integer)) or k < 0:
            raise ValueError(f"`n_neighbors` is {k!r}, allowed: 1 to {len(base)}")
        queries = None if X is None else rows_of("X", X)
        count = len(base) if queries is None else len(queries)
        rows, distances = np.empty((count, k), np.int32), np.empty((count, k), np.float32)
        _fulgurite.kneighbors(base, queries, int(k), (self.metric, self.n_threads), rows, distances)
        rows = rows.astype(np.int64)
        return (distances, rows) if return_distance else rows
