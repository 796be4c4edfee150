"""Nearest neighbours with scikit-learn's names, on the CPU: exact, or approximate in inverted lists.

>>> from fulgurite.neighbors import IVFNeighbors, NearestNeighbors
>>> distances, rows = NearestNeighbors(n_neighbors=10).fit(base).kneighbors(queries)
>>> lists = IVFNeighbors(n_neighbors=10, n_probes=16).fit(base)
>>> lists.recall(queries[:200])  # the fraction of the true neighbours that it finds
"""

from __future__ import annotations

from . import _fulgurite
from ._estimators import Estimator, rows_of, seed_of, threads_of, whole

__all__ = ["IVFNeighbors", "NearestNeighbors"]


class NearestNeighbors(Estimator):
    """The nearest rows, by "euclidean" distance, "cosine" (1 minus the cosine) or "dot" (the negated dot product).

    Exact, unless `score_tolerance` allows errors of scores relative to the norms of query and row; from 1/64 on, a
    matrix unit computes in bf16. The returned distances are exact in either case.
    """

    def __init__(self, n_neighbors=5, *, metric="euclidean", score_tolerance=None, n_threads=None):
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.score_tolerance = score_tolerance
        self.n_threads = n_threads

    def fit(self, X, y=None):
        """Packs a copy of the rows for searches."""
        self._rows = rows_of("X", X)
        self._made = None
        self.n_samples_fit_, self.n_features_in_ = self._rows.shape
        self._index()
        return self

    def kneighbors(self, X=None, n_neighbors=None, return_distance=True):
        """Distances and row numbers of the nearest rows, nearest first; ties are ordered by row number.

        Without `X`, finds the nearest other rows of each fitted row.
        """
        return self._search(X, n_neighbors, return_distance, 0)

    def _asked(self):
        """The parameters on which the index depends, besides the rows."""
        return (self.metric, self.score_tolerance, threads_of(self.n_threads)), None

    def _index(self):
        rows, asked = self._fitted("_rows"), self._asked()
        if self._made is None or self._made[0] != asked:
            self._made = (asked, _fulgurite.Index(rows, *asked))
        return self._made[1]

    def _count(self, n_neighbors):
        return whole("n_neighbors", self.n_neighbors if n_neighbors is None else n_neighbors, len(self._rows))

    def _search(self, X, n_neighbors, return_distance, probes):
        import numpy as np

        index, k = self._index(), self._count(n_neighbors)
        queries = None if X is None else rows_of("X", X)
        count = len(self._rows) if queries is None else len(queries)
        # Reject more neighbours than rows before allocating arrays of that size.
        room = k if k <= len(self._rows) else 0
        rows, distances = np.empty((count, room), np.int32), np.empty((count, room), np.float32)
        index.search(queries, k, probes, rows, distances)
        rows = rows.astype(np.int64)
        return (distances, rows) if return_distance else rows

    def __getstate__(self):
        return {**self.__dict__, "_made": None}


class IVFNeighbors(NearestNeighbors):
    """The nearest rows in inverted lists: k-means assigns rows to `n_lists` lists (default: the square root of their
    number), and a query searches the `n_probes` lists with the nearest centroids (default: 8). Searching all lists
    gives the exact answer; `recall` measures the quality with fewer.
    """

    def __init__(
        self,
        n_neighbors=5,
        *,
        n_lists=None,
        n_probes=None,
        metric="euclidean",
        max_iter=10,
        random_state=None,
        score_tolerance=None,
        n_threads=None,
    ):
        super().__init__(n_neighbors, metric=metric, score_tolerance=score_tolerance, n_threads=n_threads)
        self.n_lists = n_lists
        self.n_probes = n_probes
        self.max_iter = max_iter
        self.random_state = random_state

    def kneighbors(self, X=None, n_neighbors=None, return_distance=True, *, n_probes=None):
        """Like `NearestNeighbors.kneighbors`, in `n_probes` lists, or more if they hold too few rows."""
        return self._search(X, n_neighbors, return_distance, self._probes(n_probes))

    def recall(self, X, n_neighbors=None, *, n_probes=None):
        """The fraction of the true nearest rows of `X` that `kneighbors` finds; takes as long as the exact search."""
        index, k = self._index(), self._count(n_neighbors)
        return index.recall(rows_of("X", X), k, self._probes(n_probes))

    def _lists(self):
        rows = len(self._fitted("_rows"))
        return int(rows**0.5) if self.n_lists is None else whole("n_lists", self.n_lists, rows)

    def _probes(self, n_probes):
        wanted = self.n_probes if n_probes is None else n_probes
        return min(8, self._lists()) if wanted is None else whole("n_probes", wanted, self._lists())

    def _asked(self):
        steps = whole("max_iter", self.max_iter, 2**31)
        return super()._asked()[0], (self._lists(), seed_of(self.random_state), steps)
