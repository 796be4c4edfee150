"""Clusters, neighbours and components of rows that Ray actors hold.

>>> import ray
>>> from fulgurite.ray import Shards
>>> shards = Shards(["part-0.npy", "part-1.npy"], actors=2)     # files, arrays, object references, or a Ray dataset
>>> found = shards.kmeans(64)
>>> distances, rows = shards.kneighbors(queries, 10)
>>> values, vectors = shards.pca(8)

Each actor holds some shards, and sends only sums, neighbours or sketches. Parts are merged in the order of the shards,
so that results have the bits of `fulgurite.shards` in one process over the same shards, for any number of actors. Ray
starts an actor again if it dies; it then reads its shards again, and the call that was lost is repeated.

`AssignBatches` is the step of k-means for `Dataset.map_batches`.
"""

from __future__ import annotations

import os
from typing import Any, Callable

import numpy as np

from . import shards
from ._estimators import rows_of, whole

try:
    import ray
except ImportError as cause:
    raise ImportError("fulgurite.ray needs Ray; install ray") from cause

Array = Any

__all__ = ["AssignBatches", "ShardedLists", "Shards"]


def _rows(source):
    """The rows of a shard: an array, or the path of a `.npy` file."""
    if isinstance(source, (str, os.PathLike)):
        source = np.load(source, mmap_mode="r")
    return rows_of("shards", source)


class _Holder:
    """An actor with some of the shards. Its methods give one part for each of them."""

    def __init__(self, sources, n_threads):
        # References inside a list reach an actor as references.
        sources = [ray.get(x) if isinstance(x, ray.ObjectRef) else x for x in sources]
        self.rows = [_rows(x) for x in sources]
        self.threads = n_threads
        self.made = None

    def sizes(self):
        return [x.shape for x in self.rows]

    def apply(self, numbers, function):
        return [function(at, x) for at, x in zip(numbers, self.rows)]

    def sums(self, centroids, metric):
        return [shards.assign_and_sum(x, centroids, metric=metric, n_threads=self.threads) for x in self.rows]

    def topk(self, first, queries, count, metric):
        return [
            shards.topk(x, queries, count, first_row=at, metric=metric, n_threads=self.threads)
            for x, at in zip(self.rows, first)
        ]

    def lists(self, first, key, centroids, metric):
        """Makes the inverted lists of each shard, and keeps those of the last centroids. An actor that was started
        again makes them again."""
        if self.made is None or self.made[0] != key:
            made = []
            for x, at in zip(self.rows, first):
                labels = shards.assign_and_sum(x, centroids, metric=metric, n_threads=self.threads).labels
                made.append(shards.lists(x, centroids, labels, first_row=at, metric=metric))
            self.made = (key, made)
        return self.made[1]

    def search_lists(self, first, key, centroids, metric, queries, count, n_probes):
        return [
            shards.search_lists(x, queries, count, n_probes=n_probes, n_threads=self.threads)
            for x in self.lists(first, key, centroids, metric)
        ]

    def sketches(self):
        return [shards.sketch(x) for x in self.rows]


class Shards:
    """Rows in shards that Ray actors hold; the rows of all shards, in their order, are numbered from 0."""

    def __init__(
        self, sources: Any, *, actors: int = 2, n_threads: int | None = 1, column: str = "data",
        options: dict[str, Any] | None = None,
    ):  # fmt: skip
        """Starts the actors.

        sources    arrays, paths of `.npy` files, or object references, one for each shard; or a Ray dataset, of which
                   `column` has the rows and each block is a shard
        actors     how many actors; shards are dealt out in turn
        n_threads  threads of each actor
        options    of the actors, as for `ray.remote`, beside `max_restarts=-1` and `max_task_retries=-1`
        """
        if hasattr(sources, "to_numpy_refs"):
            sources = sources.to_numpy_refs(column=column)
        sources = list(sources)
        count = min(whole("actors", actors, 2**31), len(sources))
        if not sources or not count:
            raise ValueError(f"`sources` has {len(sources)} shards on {actors} actors, allowed: one or more of each")
        # Rows go to the object store under references that this object keeps. As arguments of an actor's constructor, they
        # would go there too, but could be gone when Ray starts the actor again.
        kept = (str, os.PathLike, ray.ObjectRef)
        self._sources = sources = [x if isinstance(x, kept) else ray.put(rows_of("sources", x)) for x in sources]
        holder = ray.remote(**{"max_restarts": -1, "max_task_retries": -1, **(options or {})})(_Holder)
        self._actors = [holder.remote(sources[at::count], n_threads) for at in range(count)]
        shapes = self._each("sizes")
        for shape in shapes:
            if shape[1] != shapes[0][1]:
                raise ValueError(f"`sources` have {shape[1]} and {shapes[0][1]} columns, allowed: the same")
        self.sizes = [shape[0] for shape in shapes]
        self.columns = shapes[0][1]

    @property
    def actors(self) -> list[Any]:
        """The handles of the actors."""
        return list(self._actors)

    def _each(self, method, *arguments, dealt=None):
        """The parts of all shards, in their order; `dealt` is a first argument that each shard has its own of."""
        count = len(self._actors)
        calls = []
        for at, actor in enumerate(self._actors):
            own = arguments if dealt is None else (dealt[at::count], *arguments)
            calls.append(getattr(actor, method).remote(*own))
        parts = ray.get(calls)
        total = sum(map(len, parts))
        return [parts[at % count][at // count] for at in range(total)]

    def each(self, function: Callable[[int, Any], Any]) -> list[Any]:
        """`function(number, rows)` of each shard, computed by its actor, in the order of the shards."""
        return self._each("apply", ray.put(function), dealt=list(range(len(self.sizes))))

    def kmeans(
        self, n_clusters: int, *, init: Array | None = None, metric: str = "euclidean", max_iter: int = 300,
        tol: float = 1e-4, random_state: int | None = None,
    ) -> shards.KMeansResult:  # fmt: skip
        """k-means over all rows: centroids, labels of all rows, inertia, steps.

        init  the first centroids; default: k-means|| over the shards (`fulgurite.shards.seeds`)
        """
        if init is None:
            init = shards.seeds(self.each, n_clusters, random_state=random_state, n_threads=1)
        init = rows_of("init", init)
        if init.shape != (n_clusters, self.columns):
            raise ValueError(f"`init` has shape {list(init.shape)}, allowed: {[n_clusters, self.columns]}")

        def parts(centroids):
            return self._each("sums", ray.put(centroids), metric)

        return shards.kmeans(parts, init, metric=metric, max_iter=max_iter, tol=tol)

    def _first(self):
        """The number of the first row of each shard."""
        return np.concatenate([[0], np.cumsum(self.sizes)])[:-1].tolist()

    def ivf(
        self, n_lists: int, *, metric: str = "euclidean", max_iter: int = 10, random_state: int | None = None
    ) -> ShardedLists:  # fmt: skip
        """Inverted lists over all rows: k-means finds their centroids, and each actor orders its rows by list."""
        found = self.kmeans(n_lists, metric=metric, max_iter=max_iter, random_state=random_state)
        return ShardedLists(self, found.centroids, metric)

    def kneighbors(self, queries: Array, n_neighbors: int = 5, *, metric: str = "euclidean") -> tuple[Array, Array]:
        """(distances, rows): the nearest rows of each query among all shards."""
        first = self._first()
        queries = ray.put(rows_of("queries", queries))
        parts = self._each("topk", queries, n_neighbors, metric, dealt=first)
        return shards.merge_topk(parts, n_neighbors)

    def pca(self, n_components: int) -> tuple[Array, Array]:
        """(singular values, components) of all rows minus their mean."""
        return shards.components(self.sketch(), n_components)

    def svd(self, n_components: int) -> tuple[Array, Array]:
        """(singular values, components) of all rows."""
        return shards.components(self.sketch(), n_components, centred=False)

    def sketch(self) -> shards.Sketch:
        """The merged sketch of all rows."""
        return shards.merge_sketches(self._each("sketches"))

    def close(self) -> None:
        """Ends the actors."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._sources = [], []


class ShardedLists:
    """Inverted lists over the shards of actors, from `Shards.ivf`."""

    def __init__(self, held: Shards, centroids: Array, metric: str):
        self.centroids = centroids
        self._held, self._metric = held, metric
        self._key, self._centroids = os.urandom(8), ray.put(centroids)

    def kneighbors(self, queries: Array, n_neighbors: int = 5, *, n_probes: int = 8) -> tuple[Array, Array]:
        """(distances, rows): the nearest rows of each query in the lists of its `n_probes` nearest centroids; with all
        lists, the exact answer. Where lists hold too few rows, distances are infinite and rows -1."""
        whole("n_probes", n_probes, len(self.centroids))
        parts = self._held._each(
            "search_lists", self._key, self._centroids, self._metric, ray.put(rows_of("queries", queries)), n_neighbors,
            n_probes, dealt=self._held._first(),
        )  # fmt: skip
        return shards.merge_topk(parts, n_neighbors)


class AssignBatches:
    """The step of k-means for `Dataset.map_batches`: an actor that holds centroids, and gives one row for each batch.

    >>> parts = data.map_batches(AssignBatches, fn_constructor_args=(centroids,), concurrency=2, batch_size=None)
    >>> merged = AssignBatches.merge(parts.take_all())

    A batch has rows in `column`. `order` is a column of integers that grows with the rows, such as an id: batches are
    merged in its order, because Ray gives them back in any order.
    """

    def __init__(
        self, centroids: Array, *, column: str = "data", order: str | None = None, metric: str = "euclidean",
        n_threads: int | None = 1,
    ):  # fmt: skip
        self.centroids, self.column, self.order = rows_of("centroids", centroids), column, order
        self.metric, self.n_threads = metric, n_threads

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The sums, counts and inertia of a batch."""
        if self.column not in batch:
            raise ValueError(f"`column` is {self.column!r}, allowed: {', '.join(map(repr, batch))}")
        part = shards.assign_and_sum(batch[self.column], self.centroids, metric=self.metric, n_threads=self.n_threads)
        first = int(np.min(batch[self.order])) if self.order is not None and len(part.labels) else 0
        return {
            "first": np.array([first]),
            "sums": part.sums[None],
            "counts": part.counts[None],
            "inertia": np.array([part.inertia]),
        }

    @staticmethod
    def merge(rows: list[dict[str, Any]]) -> shards.ClusterSums:
        """The sums of all batches, for `next_centroids`; without labels."""
        rows = sorted(rows, key=lambda row: row["first"])
        none = np.empty(0, np.int32)
        return shards.merge_sums(
            shards.ClusterSums(none, np.asarray(row["sums"]), np.asarray(row["counts"]), float(row["inertia"]))
            for row in rows
        )
