"""The step of k-means over Arrow record batches, as Spark's `mapInArrow` and other engines hand them to Python.

>>> from fulgurite.arrow import AssignArrow
>>> from fulgurite.shards import kmeans
>>> def parts(centroids):
...     step = AssignArrow(centroids, column="features")
...     return AssignArrow.parts(frame.mapInArrow(step, AssignArrow.SCHEMA).collect())
>>> found = kmeans(parts, first)

A partition is a shard: its batches are merged in their order, and parts in the order of the partitions. So results have
the bits of `fulgurite.shards` over the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from . import shards
from ._estimators import rows_of

try:
    import pyarrow
    import pyarrow.compute
except ImportError as cause:
    raise ImportError("fulgurite.arrow needs pyarrow; install pyarrow") from cause

Array = Any

__all__ = ["AssignArrow", "rows_of_batch"]


def rows_of_batch(batch: pyarrow.RecordBatch, column: str) -> Any:
    """The rows of a record batch, float32 `[rows, elements]`: a column of lists of numbers, each of the same length."""
    if column not in batch.schema.names:
        raise ValueError(f"`column` is {column!r}, allowed: {', '.join(map(repr, batch.schema.names))}")
    values = batch.column(batch.schema.names.index(column))
    kind = values.type
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    if not is_list or not (pyarrow.types.is_floating(kind.value_type) or pyarrow.types.is_integer(kind.value_type)):
        raise ValueError(f"`{column}` is {kind}, allowed: lists of numbers")
    flat = values.flatten()
    if values.null_count or flat.null_count:
        raise ValueError(f"`{column}` has {values.null_count + flat.null_count} nulls, allowed: none; drop these rows")
    if not len(values):
        return np.empty((0, kind.list_size if pyarrow.types.is_fixed_size_list(kind) else 0), np.float32)
    width = len(flat) // len(values)
    lengths = set(pyarrow.compute.list_value_length(values).to_pylist())
    if lengths != {width}:
        raise ValueError(f"`{column}` has lists of {min(lengths)} to {max(lengths)} elements, allowed: one length")
    return rows_of(column, flat.to_numpy(zero_copy_only=False).reshape(len(values), width))


class AssignArrow:
    """The step of k-means over an iterator of record batches; gives one batch with one row.

    centroids  `[clusters, columns]`
    column     the column of the rows: lists of numbers
    partition  the number of the partition; default: that of Spark's task, or 0
    """

    # Of the batch that it gives, as Spark writes it.
    SCHEMA = "partition bigint, sums array<double>, counts array<bigint>, inertia double"

    def __init__(
        self, centroids: Array, *, column: str, metric: str = "euclidean", partition: int | None = None,
        n_threads: int | None = 1,
    ):  # fmt: skip
        self.centroids, self.column, self.metric = rows_of("centroids", centroids), column, metric
        self.partition, self.n_threads = partition, n_threads

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """The sums, counts and inertia of all batches."""
        parts = [shards.assign_and_sum(np.empty((0, self.centroids.shape[1])), self.centroids, metric=self.metric)]
        for batch in batches:
            if batch.num_rows:
                rows = rows_of_batch(batch, self.column)
                parts.append(shards.assign_and_sum(rows, self.centroids, metric=self.metric, n_threads=self.n_threads))
        merged = shards.merge_sums(parts)
        yield pyarrow.RecordBatch.from_pydict(
            {
                "partition": pyarrow.array([self._number()], pyarrow.int64()),
                "sums": pyarrow.array([merged.sums.ravel()], pyarrow.list_(pyarrow.float64())),
                "counts": pyarrow.array([merged.counts], pyarrow.list_(pyarrow.int64())),
                "inertia": pyarrow.array([merged.inertia], pyarrow.float64()),
            }
        )

    def _number(self):
        if self.partition is not None:
            return self.partition
        try:
            from pyspark import TaskContext
        except ImportError:
            return 0
        task = TaskContext.get()
        return 0 if task is None else task.partitionId()

    @staticmethod
    def parts(rows: Iterable[Any]) -> list[shards.ClusterSums]:
        """The parts of all partitions in their order, without labels, from the rows that a query collects."""
        found = []
        for row in sorted(rows, key=lambda row: row["partition"]):
            counts = np.asarray(row["counts"], np.int64)
            sums = np.asarray(row["sums"], np.float64).reshape(len(counts), -1)
            found.append(shards.ClusterSums(np.empty(0, np.int32), sums, counts, float(row["inertia"])))
        return found
