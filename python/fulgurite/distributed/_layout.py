"""Which rows of a sequence each rank holds, and the blocks of scores that a pair of ranks shares."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy

from .._arrays import shape_of
from .._describe import pair

Array = Any
# Chunks per rank, by balance.
_CHUNKS = {"contiguous": 1, "zigzag": 2, "work": 4}


class Layout(NamedTuple):
    """The rows of a sequence that each rank holds, from `sequence_layout`. The same on every rank.

    length  rows of the whole sequence
    rows    rows of each rank; all ranks have the same number
    slots   for each rank, the (start, stop) of its chunks of the sequence, ascending; positions from `length` on are
            padding
    """

    length: int
    rows: int
    slots: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.slots)

    def positions(self, rank: int):
        """The position in the sequence of each row of a rank, as an int64 array; `length` and more is padding."""
        return numpy.concatenate([numpy.arange(*slot) for slot in self.slots[rank]])


def sequence_layout(
    length: int,
    ranks: int,
    *,
    balance: str = "zigzag",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Array | None = None,
) -> Layout:
    """Divides a sequence among ranks.

    length, ranks  rows of the whole sequence, and the number of ranks
    balance        "contiguous": one chunk per rank, in order. "zigzag": chunks i and 2 ranks - 1 - i, which balances
                   a causal mask. "work": four chunks per rank, chosen so that the ranks compute similar numbers of
                   scores, for windows and documents
    causal, window, cu_seqlens
                   the mask, which only "work" reads

    A length that the chunks do not divide is padded at the end of the sequence: the last chunks are partly or wholly
    padding.
    """
    length, ranks = _count("length", length, 0), _count("ranks", ranks, 1)
    if balance not in _CHUNKS:
        raise ValueError(f"`balance` is {balance!r}, allowed: {', '.join(map(repr, _CHUNKS))}, or a Layout")
    if balance != "work":
        return _layout(length, ranks, balance, None)
    return _layout(length, ranks, balance, Mask.of(length, causal, window, cu_seqlens))


def _count(name, value, least):
    if isinstance(value, (bool, float)) or not hasattr(value, "__index__") or int(value) < least:
        raise ValueError(f"`{name}` is {value!r}, allowed: an integer, {least} or more")
    return int(value)


@functools.lru_cache(256)
def _layout(length, ranks, balance, mask):
    per_rank = _CHUNKS[balance]
    count = per_rank * ranks
    size = -(-length // count)
    chunks = [(at * size, (at + 1) * size) for at in range(count)]
    if balance == "contiguous":
        owners = list(range(count))
    elif balance == "zigzag":
        owners = [min(at, count - 1 - at) for at in range(count)]
    else:
        owners = _by_work(mask.work(chunks), ranks, per_rank)
    slots = tuple(tuple(chunk for chunk, owner in zip(chunks, owners) if owner == rank) for rank in range(ranks))
    return Layout(length, per_rank * size, slots)


def _by_work(work, ranks, per_rank):
    """The rank of each chunk: the largest chunk that is left goes to the rank with the least work."""
    owners, loads, counts = [0] * len(work), [0] * ranks, [0] * ranks
    for at in sorted(range(len(work)), key=lambda at: (-work[at], at)):
        rank = min((rank for rank in range(ranks) if counts[rank] < per_rank), key=lambda rank: (loads[rank], rank))
        owners[at] = rank
        loads[rank] += work[at]
        counts[rank] += 1
    return owners


class Mask(NamedTuple):
    """Which keys a query sees, by their positions in the whole sequence."""

    # Keys before and after the query; None is unbounded.
    left: int | None
    right: int | None
    # Where each document starts, and the end of the last one.
    documents: tuple[int, ...]

    @staticmethod
    def of(length, causal, window, cu_seqlens) -> Mask:
        """The mask of a call over a sequence of this length."""
        if not isinstance(causal, (bool, numpy.bool_)):
            raise ValueError(f"`causal` is {causal!r}, allowed: True, False")
        left, right = (None, None) if window is None else pair("window", window, "keys before and after the query")
        for side in (left, right):
            if side is not None and (isinstance(side, (bool, float)) or not hasattr(side, "__index__")):
                raise ValueError(f"`window` is {window!r}, allowed: two integers, None for an unbounded side")
        left, right = (None if side is None else int(side) for side in (left, right))
        if causal:
            right = 0 if right is None else min(right, 0)
        if left is not None and right is not None and left + right < 0:
            raise ValueError(f"`window` is {window!r}, which hides every key, allowed: None for an unbounded side")
        return Mask(left, right, (0, length) if cu_seqlens is None else offsets_of(cu_seqlens))

    def work(self, chunks):
        """The number of scores of the queries of each chunk."""
        bounds = numpy.asarray(self.documents, numpy.int64)
        at = numpy.arange(bounds[-1])
        document = numpy.searchsorted(bounds, at, "right") - 1
        first, last = bounds[document], bounds[document + 1]
        if self.left is not None:
            first = numpy.maximum(first, at - self.left)
        if self.right is not None:
            last = numpy.minimum(last, at + self.right + 1)
        total = numpy.concatenate([[0], numpy.cumsum(numpy.maximum(last - first, 0))])
        return [int(total[min(stop, len(at))] - total[min(start, len(at))]) for start, stop in chunks]


def offsets_of(cu_seqlens) -> tuple[int, ...]:
    """Offsets of packed documents, checked."""
    shape = shape_of("cu_seqlens", cu_seqlens, "[documents + 1]")
    values = cu_seqlens.tolist()
    ascending = (
        len(shape) == 1 and len(values) > 1 and values[0] == 0 and all(a <= b for a, b in zip(values, values[1:]))
    )
    if not ascending or not all(isinstance(x, int) for x in values):
        raise ValueError(
            f"`cu_seqlens` is {str(values)[:80]}, allowed: ascending integers from 0, documents + 1 of them, for the "
            f"whole sequence"
        )
    return tuple(values)


class Block(NamedTuple):
    """A block of scores: rows of the queries and of the keys of two ranks, and the mask between them."""

    q: tuple[int, int]
    k: tuple[int, int]
    # Keys before and after the diagonal of the block, which ends in its last row and column.
    window: tuple[int | None, int | None] | None
    # Offsets of documents in a block on the diagonal of the sequence; otherwise None.
    documents: tuple[int, ...] | None
    # The position of the first query minus that of the first key.
    shift: int


def runs(slots, length):
    """The chunks of a rank without padding, as (first row, start, stop); chunks that touch become one."""
    found, row = [], 0
    for start, stop in slots:
        end = min(stop, length)
        if start < end:
            if found and found[-1][2] == start and found[-1][0] + start - found[-1][1] == row:
                found[-1] = (*found[-1][:2], end)
            else:
                found.append((row, start, end))
        row += stop - start
    return found


@functools.lru_cache(4096)
def blocks(q_slots, k_slots, length, mask) -> tuple[Block, ...]:
    """The blocks of scores between the queries of one rank and the keys of one rank that are not empty."""
    found = []
    for q_row, q_start, q_stop in runs(q_slots, length):
        for k_row, k_start, k_stop in runs(k_slots, length):
            made = _block((q_start, q_stop), (k_start, k_stop), mask)
            if made is not None:
                (q0, q1), (k0, k1) = made.q, made.k
                q_at, k_at = q_row - q_start, k_row - k_start
                found.append(made._replace(q=(q0 + q_at, q1 + q_at), k=(k0 + k_at, k1 + k_at)))
    return tuple(found)


def _block(q, k, mask):
    """The block between two chunks, with positions as rows. The chunks are equal or disjoint."""
    bounds = mask.documents
    if q == k:
        cuts = sorted({q[0], q[1], *(x for x in bounds if q[0] < x < q[1])})
        window = None if mask.left is mask.right is None else (mask.left, mask.right)
        return Block(q, k, window, tuple(x - q[0] for x in cuts) if len(cuts) > 2 else None, 0)
    # Disjoint chunks share at most one document: the one that contains the start of the later chunk.
    later = max(q[0], k[0])
    at = int(numpy.searchsorted(bounds, later, "right")) - 1
    first, last = bounds[at], bounds[at + 1]
    (q0, q1), (k0, k1) = ((max(a, first), min(b, last)) for a, b in (q, k))
    left, right = mask.left, mask.right
    if q0 < q1 and k0 < k1:
        # Rows and columns without a visible score are left out.
        if right is not None:
            k1, q0 = min(k1, q1 + right), max(q0, k0 - right)
        if left is not None:
            k0, q1 = max(k0, q0 - left), min(q1, k1 + left)
    if q0 >= q1 or k0 >= k1:
        return None
    shift = q0 - k0
    longer = (k1 - k0) - (q1 - q0)
    before = None if left is None or q1 - 1 - left <= k0 else left - shift + longer
    after = None if right is None or q0 + right >= k1 - 1 else right + shift - longer
    return Block((q0, q1), (k0, k1), None if before is after is None else (before, after), None, shift)


def block_between(q, k, mask) -> Block | None:
    """The block between any chunk of queries and any chunk of keys, with positions as rows; None if it is empty. Where
    documents divide the sequence, chunks are equal or disjoint."""
    if q[0] >= q[1] or k[0] >= k[1]:
        return None
    if q != k and q[0] < k[1] and k[0] < q[1] and len(mask.documents) > 2:
        raise ValueError(
            f"queries at {q[0]} to {q[1]} and keys at {k[0]} to {k[1]} overlap, allowed with `cu_seqlens`: equal or "
            f"disjoint rows; divide them"
        )
    return _block(q, k, mask)


@functools.lru_cache(256)
def hops(slots, length, mask) -> int:
    """How many times keys travel to the next rank until every rank has had all it needs."""
    ranks = len(slots)
    for step in range(ranks - 1, 0, -1):
        if any(blocks(slots[rank], slots[(rank - step) % ranks], length, mask) for rank in range(ranks)):
            return step
    return 0
