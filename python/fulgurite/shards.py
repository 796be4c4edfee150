"""Clusters, neighbours and components of rows that are divided into shards: the part of each shard, and merges.

The functions have no opinion on where shards are: threads, processes, Ray actors (`fulgurite.ray`), Spark partitions or
ranks of torch.distributed. A part is small, and a merge adds in f64 in the order of the parts. So the same shards give
the same bits on one machine and on many.

>>> from fulgurite.shards import assign_and_sum, kmeans
>>> found = kmeans(lambda centroids: [assign_and_sum(rows, centroids) for rows in shards], first)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from . import _fulgurite
from ._estimators import rows_of, seed_of, threads_of, whole
from ._lists import InvertedLists, lists, probed, search_lists
from .neighbors import NearestNeighbors

Array = Any

__all__ = [
    "ClusterSums",
    "InvertedLists",
    "KMeansResult",
    "Sketch",
    "assign_and_sum",
    "components",
    "kmeans",
    "lists",
    "merge_sketches",
    "merge_sums",
    "merge_topk",
    "next_centroids",
    "probed",
    "search_lists",
    "seeds",
    "sketch",
    "topk",
]


class ClusterSums(NamedTuple):
    """The part of a shard in a step of k-means."""

    # The cluster of each row, int32 [rows].
    labels: Any
    # The sum of the rows of each cluster, float64 [clusters, columns], and their number, int64 [clusters].
    sums: Any
    counts: Any
    # The sum of the squared distances to the centroids; of distances with "cosine", of negated products with "dot".
    inertia: float


def assign_and_sum(
    X: Array, centroids: Array, *, metric: str = "euclidean", n_threads: int | None = None
) -> ClusterSums:
    """Assigns the rows of a shard to their nearest centroids, and sums the rows of each cluster. X may have no rows.

    The sums are f64, and their order depends on the rows alone.
    """
    X, centroids = rows_of("X", X), rows_of("centroids", centroids)
    labels = np.empty(len(X), np.int32)
    if X.shape[1] != centroids.shape[1]:
        raise ValueError(f"`X` has {X.shape[1]} columns, allowed: {centroids.shape[1]}, those of `centroids`")
    if not len(X):
        return ClusterSums(labels, np.zeros(centroids.shape), np.zeros(len(centroids), np.int64), 0.0)
    sums, counts, inertia = _fulgurite.assign_and_sum(X, centroids, metric, threads_of(n_threads), labels)
    sums = np.frombuffer(sums, np.float64).reshape(centroids.shape).copy()
    return ClusterSums(labels, sums, np.array(counts, np.int64), inertia)


def merge_sums(parts: Iterable[ClusterSums]) -> ClusterSums:
    """The part of several shards, added in f64 in their order; labels are those of all rows."""
    parts = _some("parts", parts)
    sums, counts, inertia = parts[0].sums.copy(), parts[0].counts.copy(), float(parts[0].inertia)
    for part in parts[1:]:
        if part.sums.shape != sums.shape:
            raise ValueError(f"`parts` have sums {part.sums.shape} and {sums.shape}, allowed: the same centroids")
        sums += part.sums
        counts += part.counts
        inertia += float(part.inertia)
    return ClusterSums(np.concatenate([part.labels for part in parts]), sums, counts, inertia)


def next_centroids(centroids: Array, part: ClusterSums, *, metric: str = "euclidean") -> tuple[Array, float]:
    """The centroids of the next step, and how far they moved (the root of the sum of squares). A cluster without rows
    keeps its centroid; with "cosine", centroids have length 1."""
    centroids = rows_of("centroids", centroids)
    filled = part.counts > 0
    means = part.sums / np.maximum(part.counts, 1)[:, None]
    new = means.astype(np.float32)
    if metric == "cosine":
        filled &= new.any(1)  # directions that cancel have no mean
        norms = np.sqrt((new.astype(np.float64) ** 2).sum(1, keepdims=True))
        new = (new / np.maximum(norms, np.finfo(np.float64).tiny)).astype(np.float32)
    new = np.where(filled[:, None], new, centroids)
    moved = np.sqrt(((new.astype(np.float64) - centroids) ** 2).sum())
    return new, float(moved)


class KMeansResult(NamedTuple):
    """Centroids of k-means over shards; labels and inertia are those of the last step."""

    centroids: Any
    labels: Any
    inertia: float
    steps: int


def kmeans(
    parts: Callable[[Any], Iterable[ClusterSums]], centroids: Array, *, metric: str = "euclidean",
    max_iter: int = 300, tol: float = 1e-4,
) -> KMeansResult:  # fmt: skip
    """Lloyd's algorithm over shards.

    parts      `parts(centroids)` gives the part of each shard (`assign_and_sum`), in the order of the shards
    centroids  the first centroids, `[clusters, columns]`
    max_iter   the most steps
    tol        stop when the squares of the centroids' moves add up to no more than this times the mean inertia of a row
    """
    centroids = rows_of("centroids", centroids)
    steps = whole("max_iter", max_iter, 2**31)
    if not isinstance(tol, (int, float)) or not tol >= 0:
        raise ValueError(f"`tol` is {tol!r}, allowed: 0 or more")
    found = merge_sums(parts(centroids))
    for step in range(1, steps + 1):
        centroids, moved = next_centroids(centroids, found, metric=metric)
        before, found = found, merge_sums(parts(centroids))
        scale = abs(before.inertia) / max(int(before.counts.sum()), 1)
        # Rows that stay in their clusters give the same sums. Parts of other engines have no labels that could tell.
        same = np.array_equal(before.sums, found.sums) and np.array_equal(before.counts, found.counts)
        if moved * moved <= tol * scale or same:
            return KMeansResult(centroids, found.labels, found.inertia, step)
    return KMeansResult(centroids, found.labels, found.inertia, steps)


def seeds(
    each: Callable[[Callable[[int, Any], Any]], Iterable[Any]], n_clusters: int, *, rounds: int = 5,
    random_state: int | None = None, n_threads: int | None = None,
) -> Array:  # fmt: skip
    """First centroids for `kmeans`, by k-means||: in each round, every shard draws rows that are far from those drawn
    before, and k-means++ chooses among all drawn rows by their weight. By euclidean distance.

    each          `each(function)` gives `function(number, rows)` of each shard, in the order of the shards
    rounds        of about 2 n_clusters drawn rows each
    random_state  the draws depend on it, on the number of the shard and on its rows
    """
    clusters, seed = whole("n_clusters", n_clusters, 2**31), seed_of(random_state)
    sizes = list(each(_Sizes()))
    total = sum(sizes)
    if not 1 <= clusters <= total:
        raise ValueError(f"`n_clusters` is {clusters}, allowed: 1 to {total}, the number of rows")
    first = int(np.random.default_rng([seed, 0]).integers(total))
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1]
    found = np.concatenate(list(each(_Taken(starts.tolist(), [first]))))
    for number in range(1, whole("rounds", rounds, 2**31) + 1):
        spread = float(sum(each(_Spread(found, n_threads)), 0.0))
        if spread == 0.0:
            break
        drawn = list(each(_Drawn(found, 2 * clusters / spread, [seed, number], n_threads)))
        found = np.concatenate([found, *drawn])
    if len(found) < clusters:  # few rows, or few that differ
        rest = np.random.default_rng([seed, 2**32]).choice(total, clusters - len(found), replace=False)
        found = np.concatenate([found, *each(_Taken(starts.tolist(), np.sort(rest).tolist()))])
    weights = merge_sums(each(_Assigned(found, n_threads))).counts
    return _plus_plus(found, weights.astype(np.float64), clusters, np.random.default_rng([seed, 2**32 + 1]))


class _Sizes:
    def __call__(self, number, rows):
        return len(rows)


class _Taken(NamedTuple):
    """Rows by their number among all."""

    starts: list
    wanted: list

    def __call__(self, number, rows):
        at = np.array(self.wanted, np.int64) - self.starts[number]
        return np.asarray(rows, np.float32)[at[(at >= 0) & (at < len(rows))]]


class _Assigned(NamedTuple):
    found: Any
    threads: Any

    def __call__(self, number, rows):
        return assign_and_sum(rows, self.found, n_threads=self.threads)


class _Spread(NamedTuple):
    found: Any
    threads: Any

    def __call__(self, number, rows):
        return assign_and_sum(rows, self.found, n_threads=self.threads).inertia


class _Drawn(NamedTuple):
    """Rows drawn with a probability that grows with their squared distance to the nearest of `found`."""

    found: Any
    rate: float
    seed: list
    threads: Any

    def __call__(self, number, rows):
        distances, _ = topk(self.found, rows, 1, n_threads=self.threads) if len(rows) else (np.empty((0, 1)), None)
        chance = self.rate * distances[:, 0].astype(np.float64) ** 2
        drawn = np.random.default_rng([*self.seed, number]).random(len(rows)) < chance
        return np.asarray(rows, np.float32)[drawn]


def _plus_plus(rows, weights, clusters, rng):
    """k-means++ of rows with weights."""
    wide = rows.astype(np.float64)
    chosen = [int(rng.choice(len(rows), p=weights / weights.sum()))]
    near = np.full(len(rows), np.inf)
    while len(chosen) < clusters:
        near = np.minimum(near, ((wide - wide[chosen[-1]]) ** 2).sum(1))
        near[chosen] = 0.0
        share = weights * near
        if share.sum() > 0:
            chosen.append(int(rng.choice(len(rows), p=share / share.sum())))
        else:  # the rest are duplicates
            chosen.append(next(at for at in range(len(rows)) if at not in chosen))
    return rows[chosen]


def topk(
    X: Array, queries: Array, n_neighbors: int, *, first_row: int = 0, metric: str = "euclidean",
    n_threads: int | None = None,
) -> tuple[Array, Array]:  # fmt: skip
    """(distances, rows): the nearest rows of a shard, or all of them if it has fewer.

    first_row  the number of the first row of the shard among all rows
    """
    X, queries = rows_of("X", X), rows_of("queries", queries)
    count = min(whole("n_neighbors", n_neighbors, 2**31), len(X))
    if not len(X):
        return np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    index = NearestNeighbors(count, metric=metric, n_threads=n_threads).fit(X)
    distances, rows = index.kneighbors(queries)
    return distances, rows + first_row


def merge_topk(parts: Iterable[tuple[Array, Array]], n_neighbors: int) -> tuple[Array, Array]:
    """(distances, rows) of the nearest rows of all shards, from those of each (`topk`), nearest first; equal distances
    are ordered by row."""
    parts = _some("parts", parts)
    count = whole("n_neighbors", n_neighbors, 2**31)
    for distances, rows in parts:
        if np.shape(distances) != np.shape(rows) or np.ndim(rows) != 2 or len(rows) != len(parts[0][1]):
            raise ValueError(
                f"`parts` have shapes {np.shape(distances)} and {np.shape(rows)}, allowed: two arrays "
                f"[{len(parts[0][1])}, neighbours] each"
            )
    distances, rows = (np.concatenate([part[at] for part in parts], 1) for at in range(2))
    if not 1 <= count <= rows.shape[1]:
        raise ValueError(f"`n_neighbors` is {count}, allowed: 1 to {rows.shape[1]}, the rows of all parts")
    order = np.lexsort((rows, distances), axis=-1)[:, :count]
    return np.take_along_axis(distances, order, 1), np.take_along_axis(rows, order, 1)


class Sketch(NamedTuple):
    """The contribution of a shard to PCA and SVD: triangles with the same singular values as its rows."""

    # Number of rows, and their mean, float64 [columns].
    count: int
    mean: Any
    # R of the QR decomposition of the rows minus their mean, and of the rows; float64 [at most columns, columns].
    centred: Any
    plain: Any


def sketch(X: Array) -> Sketch:
    """The sketch of a shard, in f64. X may have no rows."""
    X = rows_of("X", X)
    if not np.isfinite(X).all():
        raise ValueError("`X` has elements that are not finite, allowed: finite numbers")
    wide = X.astype(np.float64)
    mean = wide.mean(0) if len(X) else np.zeros(X.shape[1])
    return Sketch(len(X), mean, _triangle(wide - mean), _triangle(wide))


def _triangle(rows):
    return np.linalg.qr(rows, mode="r") if len(rows) else rows


def merge_sketches(parts: Iterable[Sketch]) -> Sketch:
    """The sketch of several shards, merged in their order."""
    parts = _some("parts", parts)
    count, mean, centred, plain = parts[0]
    for part in parts[1:]:
        if part.mean.shape != mean.shape:
            raise ValueError(f"`parts` have {len(part.mean)} and {len(mean)} columns, allowed: the same")
        total = count + part.count
        # Two means that differ spread the rows by one more row.
        between = (part.mean - mean) * np.sqrt(count * part.count / max(total, 1))
        centred = _triangle(np.concatenate([centred, part.centred, between[None]]))
        plain = _triangle(np.concatenate([plain, part.plain]))
        mean = mean + (part.mean - mean) * (part.count / max(total, 1))
        count = total
    return Sketch(count, mean, centred, plain)


def components(found: Sketch, n_components: int, *, centred: bool = True) -> tuple[Array, Array]:
    """(singular values f64, components f32), largest first: PCA, or the truncated SVD without `centred`. The largest
    element of each component is positive."""
    triangle = found.centred if centred else found.plain
    most = min(found.count, len(found.mean))
    count = whole("n_components", n_components, most)
    if not 1 <= count <= most:
        raise ValueError(f"`n_components` is {n_components!r}, allowed: 1 to {most}, the lesser of rows and columns")
    _, values, vectors = np.linalg.svd(triangle, full_matrices=False)
    values, vectors = values[:count], vectors[:count]
    signs = np.sign(vectors[np.arange(len(vectors)), np.abs(vectors).argmax(1)])
    return values, (vectors * signs[:, None]).astype(np.float32)


def _some(name, parts) -> Sequence:
    parts = list(parts)
    if not parts:
        raise ValueError(f"`{name}` is empty, allowed: one or more")
    return parts
