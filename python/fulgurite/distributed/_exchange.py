"""Messages between ranks: agreement on the call, neighbours in a ring, all-to-all, and a count of the bytes sent."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Bytes of a rank's account of its call.
_ROOM = 2048
_counts: list[dict[str, int]] = []


class PeerError(RuntimeError):
    """A rank did not answer in time, or its connection was lost."""


class MismatchError(ValueError):
    """The ranks of a group make different calls, or one of them makes a wrong call. Raised on every rank."""


@contextlib.contextmanager
def traffic():
    """Counts the bytes that this rank sends to others, by kind: "keys" (keys and values in a ring), "gradients" (of
    them), "heads" (all-to-all), "states" (of the gated delta rule), "rows" (`unshard_sequence`), and "call" (agreement
    on the call).

    >>> with traffic() as sent:
    ...     context_parallel_attention(q, k, v)
    >>> sent["keys"]
    """
    counted = dict.fromkeys(("keys", "gradients", "heads", "states", "rows", "call"), 0)
    _counts.append(counted)
    try:
        yield counted
    finally:
        _counts.remove(counted)


def count(kind, sent):
    """Adds bytes to the counts that are active."""
    for counted in _counts:
        counted[kind] += sent


class Span(NamedTuple):
    """An interval of a rank's host, in ns of `time.time_ns`, which ranks of one machine share."""

    # "compute", "message" (from its start until it is known to have ended), or "wait" (for a message).
    kind: str
    name: str
    start: int
    end: int


_timelines: list[list[Span]] = []


@contextlib.contextmanager
def timeline():
    """Records what this rank does in a ring, as a list of `Span`. Kernels of a GPU run on after their calls return:
    there, use a profiler of GPUs.

    >>> with timeline() as spans:
    ...     context_parallel_attention(q, k, v)
    >>> write_trace("ring.json", [spans])                               # opens in Perfetto
    """
    spans: list[Span] = []
    _timelines.append(spans)
    try:
        yield spans
    finally:
        _timelines.remove(spans)


@contextlib.contextmanager
def span(kind, name):
    """Records an interval."""
    start = time.time_ns()
    try:
        yield
    finally:
        record(kind, name, start)


def record(kind, name, start):
    """Records an interval that ends now."""
    for spans in _timelines:
        spans.append(Span(kind, name, start, time.time_ns()))


def write_trace(path, ranks: Sequence[Sequence[Span]]) -> None:
    """Writes the spans of each rank (`timeline`) as a trace that Perfetto and chrome://tracing open."""
    first = min((one.start for spans in ranks for one in spans), default=0)
    rows = {"compute": 0, "wait": 0, "message": 1}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in range(len(ranks))
    ]
    for rank, spans in enumerate(ranks):
        for one in spans:
            times = {"ts": (one.start - first) / 1e3, "dur": (one.end - one.start) / 1e3}
            events.append({"ph": "X", "name": one.name, "cat": one.kind, "pid": rank, "tid": rows[one.kind], **times})
    with open(path, "w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


class _Works(list):
    """Requests of a message, with its name and the time of its start."""

    def __init__(self, works, name):
        super().__init__(works)
        self.name, self.started = name, time.time_ns()


def between_graphs(function):
    """A function that sends messages: torch.compile calls it between two graphs.

    The compiler is imported only where it is in use, which takes seconds.
    """

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def size_of(tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


class Group:
    """A process group with a time limit. Peers are numbered within the group."""

    def __init__(self, group, seconds):
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.seconds = seconds

    def wait(self, works, doing):
        """Waits until messages are there."""
        limit = None if self.seconds is None else datetime.timedelta(seconds=self.seconds)
        before = time.time_ns()
        try:
            for work in works:
                done = work.wait() if limit is None else work.wait(limit)
                if done is False:
                    raise RuntimeError("the message failed")
        except RuntimeError as cause:
            raise self._lost(doing, cause) from cause
        record("wait", doing, before)
        if isinstance(works, _Works):
            record("message", works.name, works.started)

    def _lost(self, doing, cause):
        limit = "the time limit of the group" if self.seconds is None else f"{self.seconds:g} s"
        first = str(cause).strip().splitlines()[0][:200] if str(cause).strip() else type(cause).__name__
        return PeerError(
            f"rank {self.rank} of {self.size} got no answer while {doing}, time limit: {limit}; a peer is dead, slow "
            f"or raised an error. Destroy the process group and start the ranks again. The transport says: {first}"
        )

    def collective(self, doing, function, *arguments):
        """Runs a collective operation of torch.distributed with the time limit."""
        if self.size == 1:
            return
        try:
            work = function(*arguments, group=self.group, async_op=True)
        except RuntimeError as cause:
            raise self._lost(doing, cause) from cause
        self.wait([work], doing)

    def start(self, kind, sent, to, received, source):
        """Starts to send one tensor to a peer and to receive one from a peer; `wait` with the result finishes it."""
        count(kind, size_of(sent))
        peer = lambda rank: dist.get_global_rank(self.group, rank)  # noqa: E731
        operations = [
            dist.P2POp(dist.isend, sent, peer(to), self.group),
            dist.P2POp(dist.irecv, received, peer(source), self.group),
        ]
        try:
            return _Works(dist.batch_isend_irecv(operations), kind)
        except RuntimeError as cause:
            raise self._lost(f"sending to rank {to}", cause) from cause

    def gather(self, kind, doing, tensor):
        """The tensor of every rank, stacked."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return tensor[None]
        count(kind, (self.size - 1) * size_of(tensor))
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self.collective(doing, dist.all_gather, found, tensor)
        return torch.stack(found)

    def swap(self, tensor):
        """Part i of the first axis goes to rank i; returns the parts from all ranks."""
        tensor = tensor.contiguous()
        if self.size == 1:
            return tensor
        count("heads", size_of(tensor) // self.size * (self.size - 1))
        found = torch.empty_like(tensor)
        self.collective("exchanging heads", dist.all_to_all_single, found, tensor)
        return found


def agree(groups, device, account, error=None):
    """Checks that all ranks make the same call, before anything else is sent.

    groups   the groups of a call, one for each axis of the mesh
    account  properties of the call that must be equal on all ranks, by name
    error    an exception of this rank, which every rank then raises as a `MismatchError`
    """
    text = {"error": str(error)[:1024]} if error is not None else account
    # Non-ASCII characters would make the text longer than its characters.
    data = json.dumps(text).encode()
    if len(data) > _ROOM:
        data = json.dumps({"error": "the account of the call is too long"}).encode()
    own = torch.zeros(_ROOM, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    all_ = own.to(device)[None]
    for group in groups:
        all_ = group.gather("call", "agreeing on the call", all_).flatten(0, 1)
    accounts = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in all_.cpu()]
    if error is not None:
        raise error
    for rank, other in enumerate(accounts):
        if "error" in other:
            raise MismatchError(f"rank {rank} made a wrong call: {other['error']}")
    for name in account:
        values = [other.get(name) for other in accounts]
        if any(value != values[0] for value in values):
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise MismatchError(f"`{name}` differs between ranks ({shown}), allowed: the same on all ranks")
