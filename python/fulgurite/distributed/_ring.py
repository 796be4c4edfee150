"""Ring attention: keys and values travel from rank to rank while each rank computes with those that have arrived.

A block of scores gives (o, LSE), and `merge` adds it to the accumulated (o, LSE) of its rows. In backward, f32
gradients of keys and values travel one step behind the keys and values to which they belong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import _dispatch
from .._api import _described, attention, attention_backward
from .._combine import merge
from ._exchange import Group, span
from ._layout import Mask, blocks, hops, runs


class Call(NamedTuple):
    """The description of a ring: everything besides its tensors."""

    group: Group
    # Chunks of the sequence that each rank of the group holds.
    slots: tuple
    length: int
    mask: Mask
    # Keywords of `attention` for every block.
    options: dict[str, Any]

    def hops(self):
        """How many times keys travel."""
        return hops(self.slots, self.length, self.mask)

    def blocks(self, step):
        """The blocks that this rank computes after keys have travelled this many times."""
        rank, ranks = self.group.rank, self.group.size
        return blocks(self.slots[rank], self.slots[(rank - step) % ranks], self.length, self.mask)


class Pair:
    """Two tensors in one piece of memory, which one message moves."""

    def __init__(self, shapes, dtype, device):
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.memory = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.views = [part.view(shape) for part, shape in zip(self.memory.split(sizes), shapes)]


def _wide(x):
    """The tensor in f32 where kernels have f32 results only from f32 inputs: parts must not be rounded to 16 bits.
    Kernels of a GPU take 16 bits, and write f32 results where `_kernels_merge`."""
    return x if x.is_cuda else x.float()


def _kernels_merge(q, v):
    """Whether kernels merge the result of a block with the f32 results before it: threads store four elements at a time.
    Other head dimensions have 16-bit parts on a GPU."""
    dims = (q.shape[-1], v.shape[-1])
    return q.is_cuda and q.dtype != torch.float32 and max(dims) <= 256 and not any(d % 4 for d in dims)


def _part(x, rows):
    """Rows of a tensor `[batch, sequence, ...]`. A GPU copies them: its kernels need aligned rows."""
    x = x[:, rows[0] : rows[1]]
    return x.contiguous() if x.is_cuda else x


def _columns(x, rows):
    """Rows of a tensor `[batch, heads, sequence]`."""
    x = x[:, :, rows[0] : rows[1]]
    return x.contiguous() if x.is_cuda else x


def _keywords(call, block, slopes, device):
    """The keywords of `attention` for a block."""
    more = {**call.options, "window": block.window}
    if slopes is not None:
        shift = torch.tensor([block.shift], dtype=torch.int32, device=device)

        def fall(score, b, h, q_idx, kv_idx):
            return score - slopes[h] * abs(q_idx + shift[0] - kv_idx)

        more["score_mod"] = fall
    if block.documents is not None:
        offsets = torch.tensor(block.documents, dtype=torch.int32, device=device)
        more["cu_seqlens"] = (offsets, offsets)
    return more


def _forward(call, block, q, k, v, slopes):
    """(o, lse) of a block, with a batch axis."""
    q, k, v = _part(q, block.q), _part(k, block.k), _part(v, block.k)
    more = _keywords(call, block, slopes, q.device)
    if block.documents is None:
        return attention(q, k, v, return_lse=True, **more)
    parts = [attention(a, b, c, return_lse=True, **more) for a, b, c in zip(q, k, v)]
    return torch.stack([o for o, _ in parts]), torch.stack([lse for _, lse in parts])


def add_block(call, block, q, k, v, slopes, out, lse):
    """Merges the result of a block with the f32 results of its rows, `[batch, sequence, heads, head_dim]`."""
    if not _kernels_merge(q, v):
        part, part_lse = _forward(call, block, q, k, v, slopes)
        _merge(out, lse, block.q, part.float(), part_lse)
        return
    more = _keywords(call, block, slopes, q.device)
    del more["deterministic"]
    out, part_lse = out[:, block.q[0] : block.q[1]], lse[:, :, block.q[0] : block.q[1]].contiguous()
    tensors = [_part(q, block.q), _part(k, block.k), _part(v, block.k)]
    # Documents are packed sequences, which have no batch axis.
    calls = [(tensors, out, part_lse)]
    if block.documents is not None:
        calls = [([x[at] for x in tensors], out[at], part_lse[at]) for at in range(len(q))]
    for given, o_rows, lse_rows in calls:
        text, extras = _described(*given, **more)
        _dispatch.description(text).forward_into(*given, extras, (o_rows, lse_rows), True)
    lse[:, :, block.q[0] : block.q[1]] = part_lse


def add_block_gradients(call, block, q, k, v, saved, slopes, totals):
    """Adds the gradients of a block to the f32 gradients of q, k and v."""
    if not _kernels_merge(q, v):
        parts = _backward(call, block, q, k, v, saved, slopes)
        for total, rows, part in zip(totals, (block.q, block.k, block.k), parts):
            total[:, rows[0] : rows[1]] += part
        return
    more = _keywords(call, block, slopes, q.device)
    order = "order fixed;" if more.pop("deterministic") else ""
    q, k, v = _part(q, block.q), _part(k, block.k), _part(v, block.k)
    o, lse, d_o, d_lse = saved
    o, d_o, lse = _part(o, block.q), _part(d_o, block.q), _columns(lse, block.q)
    d_lse = None if d_lse is None else _columns(d_lse, block.q)
    totals = [total[:, rows[0] : rows[1]] for total, rows in zip(totals, (block.q, block.k, block.k))]
    calls = [((q, k, v), (o, lse, d_o, d_lse), totals)]
    if block.documents is not None:
        one = lambda tensors, at: [None if x is None else x[at] for x in tensors]  # noqa: E731
        calls = [(one((q, k, v), at), one((o, lse, d_o, d_lse), at), one(totals, at)) for at in range(len(q))]
    for given, kept, results in calls:
        text, extras = _described(*given, **more)
        _dispatch.description(text + order).backward_into(*given, extras, tuple(kept), list(results), True)


def _backward(call, block, q, k, v, saved, slopes):
    """The gradients of q, k and v of a block, with a batch axis."""
    q, k, v = _part(q, block.q), _part(k, block.k), _part(v, block.k)
    o, lse, d_o, d_lse = saved
    o, d_o, lse = _part(o, block.q), _part(d_o, block.q), _columns(lse, block.q)
    d_lse = None if d_lse is None else _columns(d_lse, block.q)
    more = _keywords(call, block, slopes, q.device)
    if block.documents is None:
        return attention_backward(d_o, q, k, v, o, lse, d_lse=d_lse, **more)[:3]
    parts = [
        attention_backward(
            d_o[at], q[at], k[at], v[at], o[at], lse[at], d_lse=None if d_lse is None else d_lse[at], **more
        )[:3]
        for at in range(len(q))
    ]
    return [torch.stack(each) for each in zip(*parts)]


def _travel(call, keys, values):
    """Yields the keys and values of this rank, then those of the rank before it, and so on, in f32 where `_wide` says
    so. The next ones are on their way meanwhile."""
    group, last = call.group, call.hops()
    here = Pair([keys.shape, values.shape], keys.dtype, keys.device)
    for view, x in zip(here.views, (keys, values)):
        view.copy_(x)
    spare = Pair([keys.shape, values.shape], keys.dtype, keys.device) if last else None
    for step in range(last + 1):
        if step < last:
            ring = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            works = group.start("keys", here.memory, ring[0], spare.memory, ring[1])
        yield step, *map(_wide, here.views)
        if step < last:
            group.wait(works, f"passing keys on, step {step + 1} of {last}")
            here, spare = spare, here


class Ring(torch.autograd.Function):
    """(o, lse) of the queries of this rank over all keys, `[batch, sequence, heads, head_dim]`."""

    @staticmethod
    def forward(ctx, call, q, k, v, sinks, slopes):
        out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=torch.float32, device=q.device)
        lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, device=q.device)
        wide_q = _wide(q)
        for step, keys, values in _travel(call, k, v):
            for block in call.blocks(step):
                with span("compute", f"block of step {step}"):
                    add_block(call, block, wide_q, keys, values, slopes, out, lse)
        if sinks is not None:
            for row, start, stop in runs(call.slots[call.group.rank], call.length):
                rows = (row, row + stop - start)
                sink = sinks.float()[None, :, None].expand_as(lse[:, :, : stop - start])
                _merge(out, lse, rows, torch.zeros_like(out[:, : stop - start]), sink)
        out = out.to(q.dtype)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, sinks, slopes)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, d_lse):
        q, k, v, out, lse, sinks, slopes = ctx.saved_tensors
        call = ctx.call
        d_o = torch.zeros_like(out) if d_o is None else d_o
        d_lse = None if d_lse is None else d_lse.float().contiguous()
        wide_q, saved = _wide(q), (_wide(out), lse, _wide(d_o).contiguous(), d_lse)
        d_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        carried = _Carried(call, k, v)
        for step, keys, values in _travel(call, k, v):
            d_k, d_v = carried.fresh()
            for block in call.blocks(step):
                with span("compute", f"gradients of step {step}"):
                    add_block_gradients(call, block, wide_q, keys, values, saved, slopes, (d_q, d_k, d_v))
            carried.add(step)
        d_k, d_v = carried.home()
        d_sinks = None if sinks is None else _d_sinks(sinks, saved).to(sinks.dtype)
        return None, d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks, None


def _merge(out, lse, rows, part, part_lse):
    """Adds the result of a block to the rows that it covers."""
    o_rows, lse_rows = out[:, rows[0] : rows[1]], lse[:, :, rows[0] : rows[1]]
    merged, merged_lse = merge(o_rows, lse_rows, part, part_lse)
    o_rows.copy_(merged)
    lse_rows.copy_(merged_lse)


def _d_sinks(sinks, saved):
    out, lse, d_o, d_lse = saved
    delta = (d_o.float() * out.float()).sum(-1).transpose(1, 2)
    slope = -delta if d_lse is None else d_lse - delta
    share = torch.exp(sinks.float()[None, :, None] - lse)
    # Padding has LSE -inf.
    return torch.where(torch.isinf(lse), 0.0, share * slope).sum((0, 2))


class _Carried:
    """Gradients of the keys and values that a rank has, on their way through the ring and then home."""

    def __init__(self, call, k, v):
        self.call, self.last = call, call.hops()
        self.shapes, self.device = [k.shape, v.shape], k.device
        self.waiting = None
        self.own = self.came = None

    def fresh(self):
        """Room for the gradients of the keys and values that are here."""
        self.own = Pair(self.shapes, torch.float32, self.device)
        self.own.memory.zero_()
        return self.own.views

    def add(self, step):
        """Adds the gradients from the ranks before this one, and sends the sum on."""
        group = self.call.group
        if step:
            group.wait(self.waiting, f"passing gradients on, step {step} of {self.last}")
            self.own.memory.add_(self.came.memory)
        if not self.last:
            return
        # After the last step, gradients go straight to the rank of their keys.
        far = 1 if step < self.last else -self.last
        self.came = Pair(self.shapes, torch.float32, self.device)
        self.sent = self.own  # kept alive until it has been sent
        to, source = (group.rank + far) % group.size, (group.rank - far) % group.size
        self.waiting = group.start("gradients", self.own.memory, to, self.came.memory, source)

    def home(self):
        """The gradients of the keys and values of this rank, over all ranks."""
        if not self.last:
            return self.own.views
        self.call.group.wait(self.waiting, "returning gradients")
        return self.came.views
