"""Inverted lists over shards: rows in lists by their nearest centroid, searched list by list."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._estimators import rows_of, whole
from .neighbors import NearestNeighbors

Array = Any


class InvertedLists(NamedTuple):
    """The inverted lists of a shard, from `lists`: its rows ordered by list."""

    centroids: Any
    # Rows in the order of their lists, and the number of each among the rows of all shards.
    rows: Any
    numbers: Any
    # Where each list starts, and the end of the last one.
    starts: Any
    metric: str


def lists(X: Array, centroids: Array, labels: Array, *, first_row: int = 0, metric: str = "euclidean") -> InvertedLists:
    """The inverted lists of a shard. X may have no rows.

    centroids  `[lists, columns]`, the same for all shards, such as those of `kmeans` over them
    labels     the list of each row, from `assign_and_sum`
    first_row  the number of the first row of the shard among all rows
    """
    X, centroids, labels = rows_of("X", X), rows_of("centroids", centroids), np.asarray(labels)
    count = len(centroids)
    fits = labels.shape == (len(X),) and labels.dtype.kind in "iu"
    if not fits or (len(X) and not 0 <= labels.min() <= labels.max() < count):
        raise ValueError(
            f"`labels` is {labels.dtype} {list(labels.shape)}, allowed: {len(X)} integers from 0 to {count - 1}"
        )
    # A stable order: rows of a list keep the order of their numbers.
    order = np.argsort(labels, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=count))])
    return InvertedLists(centroids, X[order], order + first_row, starts, metric)


def probed(centroids: Array, queries: Array, n_probes: int, *, metric: str = "euclidean", n_threads: int | None = None):
    """The lists of the `n_probes` nearest centroids of each query, nearest first."""
    centroids = rows_of("centroids", centroids)
    count = whole("n_probes", n_probes, len(centroids))
    if not 1 <= count <= len(centroids):
        raise ValueError(f"`n_probes` is {n_probes!r}, allowed: 1 to {len(centroids)}, the number of lists")
    nearest = NearestNeighbors(count, metric=metric, n_threads=n_threads).fit(centroids)
    return nearest.kneighbors(rows_of("queries", queries), return_distance=False)


def search_lists(
    found: InvertedLists, queries: Array, n_neighbors: int, *, n_probes: int = 8, n_threads: int | None = None
) -> tuple[Array, Array]:
    """(distances, rows): the nearest rows of a shard in the lists that each query probes, for `merge_topk`. Where these
    hold fewer than `n_neighbors`, distances are infinite and rows -1. With all lists, the answer is exact."""
    queries = rows_of("queries", queries)
    count = whole("n_neighbors", n_neighbors, 2**31)
    probes = probed(found.centroids, queries, n_probes, metric=found.metric, n_threads=n_threads)
    distances = np.full((len(queries), count), np.inf, np.float32)
    numbers = np.full((len(queries), count), -1, np.int64)
    for at in range(len(found.centroids)):
        start, stop = int(found.starts[at]), int(found.starts[at + 1])
        asking = np.flatnonzero((probes == at).any(1))
        if start == stop or not len(asking):
            continue
        nearest = NearestNeighbors(min(count, stop - start), metric=found.metric, n_threads=n_threads)
        near, rows = nearest.fit(found.rows[start:stop]).kneighbors(queries[asking])
        near = np.concatenate([distances[asking], near], 1)
        rows = np.concatenate([numbers[asking], found.numbers[start + rows]], 1)
        order = np.lexsort((rows, near), axis=-1)[:, :count]
        distances[asking] = np.take_along_axis(near, order, 1)
        numbers[asking] = np.take_along_axis(rows, order, 1)
    return distances, numbers
