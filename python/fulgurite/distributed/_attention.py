"""`context_parallel_attention`: attention over a sequence whose rows are divided among ranks."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh

from .._api import attention
from ._exchange import Group, agree, between_graphs
from ._layout import Layout, Mask, hops, offsets_of, sequence_layout
from ._ring import Call, Ring

Tensor = torch.Tensor
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_STRATEGIES = ("ring", "ulysses", "2d")


@between_graphs
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: Any = None,
    strategy: str | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | None = None,
    length: int | None = None,
    balance: str | Layout = "zigzag",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    threads: int | None = None,
    return_lse: bool = False,
    timeout: float | None = None,
    check: bool = True,
) -> Any:
    """Attention over a sequence whose rows are divided among the ranks of a process group.

    Every rank calls it with its own rows and gets the results of its own rows; masks and ALiBi count positions in the
    whole sequence. Gradients flow through q, k, v and sinks.

    q, k, v      the rows of this rank, as `shard_sequence` gives them: `[batch, rows, heads, head_dim]`, or packed
                 `[rows, heads, head_dim]` with `cu_seqlens`
    group        the ranks, one shard each, in order; default: all
    mesh         a `DeviceMesh` instead: one axis, or two axes (ring, ulysses) for strategy "2d"; shards are numbered in
                 the order of its ranks
    strategy     "ring": keys and values travel from rank to rank, under computation. "ulysses": an all-to-all gives
                 each rank all rows of some heads; q must have a multiple of `ranks` heads. "2d": ulysses on the last
                 axis of the mesh, a ring on the first. Default: "ring", or "2d" for a mesh with two axes
    causal, window, scale, softcap, alibi_slopes, sinks, deterministic, threads, return_lse
                 as for `attention`; alibi_slopes is `[heads]`
    cu_seqlens   cumulative offsets of documents in the whole sequence, the same on all ranks
    length       rows of the whole sequence; default: the rows of all ranks, or the end of `cu_seqlens`
    balance      how rows were divided, by name, or a `Layout` from `sequence_layout`
    timeout      seconds to wait for a message; default: the limit of the process group
    check        compare the call of all ranks before it starts, with one small all-gather; a rank that makes another
                 call than the others then gives a `MismatchError` on every rank

    Rows that are padding get 0, LSE -inf and gradients of 0. The gradient of `sinks` is that of the rows (or heads) of
    this rank: sum it over ranks, as those of weights. Results have the bits of other runs with the same layout. A peer
    that dies gives a `PeerError`.
    """
    ring, heads = _groups(group, mesh, strategy, timeout)
    ranks = ring.size * heads.size
    packed = cu_seqlens is not None
    error = layout = mask = None
    try:
        layout, mask = _checked(
            q, k, v, ranks, heads.size, causal, window, cu_seqlens, length, balance, alibi_slopes, sinks
        )
        if packed:
            q, k, v = q[None], k[None], v[None]
        options = {
            "scale": scale, "softcap": softcap, "deterministic": deterministic, "threads": threads,
        }  # fmt: skip
        _try_options(options)
        for name in ("scale", "softcap"):
            options[name] = None if options[name] is None else float(options[name])
    except (ValueError, NotImplementedError) as wrong:
        error = wrong
    if check:
        account = None if error else _account(q, k, v, layout, mask, options, ring, heads, sinks, alibi_slopes)
        device = q.device if isinstance(q, Tensor) else torch.device("cpu")
        agree([heads, ring], device, account, error)
    elif error:
        raise error
    out, lse = _compute(q, k, v, ring, heads, layout, mask, options, sinks, alibi_slopes, return_lse)
    if packed:
        out, lse = out[0], lse if lse is None else lse[0]
    return (out, lse) if return_lse else out


def _groups(group, mesh, strategy, timeout):
    """The groups of the ring and of the exchange of heads."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("there is no process group, allowed: after torch.distributed.init_process_group")
    if strategy not in (None, *_STRATEGIES):
        raise ValueError(f"`strategy` is {strategy!r}, allowed: {', '.join(map(repr, _STRATEGIES))}")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"`timeout` is {timeout!r}, allowed: seconds, more than 0")
    if mesh is not None and not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise ValueError(f"`mesh` is a {type(mesh).__name__}, allowed: a DeviceMesh")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"`group` is a {type(group).__name__}, allowed: a ProcessGroup; a DeviceMesh is `mesh`")
    if mesh is not None and group is not None:
        raise ValueError("`group` and `mesh` were given, allowed: one of them")
    axes = 1 if mesh is None else mesh.ndim
    if axes != (2 if strategy == "2d" else 1) and not (strategy is None and axes == 2):
        want = "2 axes (ring, ulysses)" if strategy == "2d" else "1 axis"
        raise ValueError(
            f"`mesh` has {axes if mesh is not None else 'no'} axes, strategy {strategy or 'ring'!r} needs {want}"
        )
    if axes == 2:
        ring, heads = (Group(mesh.get_group(axis), timeout) for axis in range(2))
    else:
        every = Group(group if mesh is None else mesh.get_group(), timeout)
        alone = _Alone()
        ring, heads = (alone, every) if strategy == "ulysses" else (every, alone)
    for each in (ring, heads):
        if each.rank < 0:
            raise ValueError("this rank is not in `group`, allowed: ranks of the group")
    return ring, heads


class _Alone(Group):
    """A group of this rank alone, which needs no process group."""

    def __init__(self):
        self.group, self.rank, self.size, self.seconds = None, 0, 1, None


def _checked(q, k, v, ranks, head_ranks, causal, window, cu_seqlens, length, balance, alibi_slopes, sinks):
    """The layout and the mask of a call."""
    axes = 4 if cu_seqlens is None else 3
    form = "[batch, rows, heads, head_dim]" if axes == 4 else "[rows, heads, head_dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dtype not in _FLOATS:
            shown = f"{x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"`{name}` is {shown}, allowed: a torch tensor of float32, float16 or bfloat16")
        if x.ndim != axes:
            raise ValueError(f"`{name}` has shape {list(x.shape)}, allowed: {form}")
        if x.shape[:-2] != q.shape[:-2] or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"`{name}` is {x.dtype} {list(x.shape)} on {x.device}, `q` {q.dtype} {list(q.shape)} on {q.device}, "
                f"allowed: one type, one device, and equal numbers of rows"
            )
    if k.shape[-2] != v.shape[-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"`k` has shape {list(k.shape)}, `q` {list(q.shape)}, `v` {list(v.shape)}, allowed: {form}")
    count, kv_count = q.shape[-2], k.shape[-2]
    if not kv_count or count % kv_count or count % head_ranks:
        raise ValueError(
            f"`q` has {count} heads and `k` {kv_count}, allowed: a multiple of those of `k` and of the {head_ranks} "
            f"ranks that exchange heads"
        )
    for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if x is not None and (not isinstance(x, Tensor) or x.shape != (count,)):
            raise ValueError(f"`{name}` is {getattr(x, 'shape', x)}, allowed: a tensor [{count}], one value per head")
    rows = q.shape[-3]
    if cu_seqlens is not None:
        total = offsets_of(cu_seqlens)[-1]
        if length not in (None, total):
            raise ValueError(
                f"`length` is {length!r}, `cu_seqlens` ends at {total}, allowed: the same, or leave it out"
            )
        length = total
    if isinstance(balance, Layout):
        layout, own = balance, balance.length
        if length not in (None, own) or balance.ranks != ranks:
            raise ValueError(
                f"`balance` is a layout of {own} rows on {balance.ranks} ranks, allowed: {length or own} on {ranks}"
            )
    else:
        length = rows * ranks if length is None else length
        layout = sequence_layout(length, ranks, balance=balance, causal=causal, window=window, cu_seqlens=cu_seqlens)
    if layout.rows != rows:
        raise ValueError(
            f"`q` has {rows} rows, allowed: {layout.rows}, the share of {layout.length} rows on {ranks} ranks; "
            f"`shard_sequence` gives it, padded"
        )
    return layout, Mask.of(layout.length, causal, window, cu_seqlens)


def _try_options(options):
    """Computes one score, so that options that `attention` refuses are refused before anything is sent."""
    one = torch.zeros(1, 1, 1, 16)
    with torch.no_grad():
        attention(one, one, one, **options)


def _account(q, k, v, layout, mask, options, ring, heads, sinks, slopes):
    """Properties of the call that must be equal on all ranks, by name."""
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    long = repr((layout, mask)).encode()
    return {
        "q": f"{q.dtype} {list(q.shape)} on {q.device.type}",
        "k": list(k.shape),
        "v": list(v.shape),
        "length": layout.length,
        "window": [mask.left, mask.right],
        "documents": len(mask.documents) - 1,
        "balance": hashlib.sha256(long).hexdigest()[:16],
        "options": {name: options[name] for name in ("scale", "softcap")},
        "ranks": [ring.size, heads.size],
        "extras": [x is not None and list(x.shape) for x in (sinks, slopes)],
        "requires_grad": grad,
    }


def _compute(q, k, v, ring, heads, layout, mask, options, sinks, slopes, want_lse):
    mine = slice(heads.rank * (q.shape[2] // heads.size), (heads.rank + 1) * (q.shape[2] // heads.size))
    sinks, slopes = (None if x is None else x[mine] for x in (sinks, slopes))
    # Each key head goes to every rank whose queries read it.
    copies = math.lcm(k.shape[2], heads.size) // k.shape[2]
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 2) for x in (k, v))
    # After the exchange, a rank of the ring has the rows of its row of the mesh, which are put in order.
    gathered = [
        sum((layout.slots[at * heads.size + part] for part in range(heads.size)), ()) for at in range(ring.size)
    ]
    slots = tuple(tuple(sorted(each)) for each in gathered)
    if heads.size > 1:
        q, k, v = (_in_order(_ToHeads.apply(heads, x), gathered[ring.rank], slots[ring.rank]) for x in (q, k, v))
    if ring.size == 1:
        out, lse = _alone(q, k, v, layout.length, mask, options, sinks, slopes)
    else:
        slopes = None if slopes is None else slopes.float().contiguous()
        call = Call(ring, slots, layout.length, mask, options)
        out, lse = Ring.apply(call, q, k, v, sinks, slopes)
    if heads.size == 1:
        return out, lse
    out = _ToRows.apply(heads, _in_order(out, slots[ring.rank], gathered[ring.rank]))
    if want_lse:
        lse = _in_order(lse.transpose(1, 2)[..., None], slots[ring.rank], gathered[ring.rank])
        lse = _ToRows.apply(heads, lse)[..., 0].transpose(1, 2)
    return out, lse


def _alone(q, k, v, length, mask, options, sinks, slopes):
    """All rows are on this rank: one call, with the bits of one process."""
    padding = q.shape[1] - length
    q, k, v = (x[:, :length] for x in (q, k, v))
    more = {**options, "sinks": sinks, "alibi_slopes": slopes, "return_lse": True}
    more["window"] = None if mask.left is mask.right is None else (mask.left, mask.right)
    if (mask.left, mask.right) == (None, 0):
        more.update(window=None, causal=True)
    if len(mask.documents) == 2:
        out, lse = attention(q, k, v, **more)
    else:
        offsets = torch.tensor(mask.documents, dtype=torch.int32, device=q.device)
        out, lse = attention(q[0], k[0], v[0], cu_seqlens=(offsets, offsets), **more)
        out, lse = out[None], lse[None]
    if padding:
        pad = torch.nn.functional.pad
        out, lse = pad(out, (0, 0, 0, 0, 0, padding)), pad(lse, (0, padding), value=-torch.inf)
    return out, lse


def _in_order(x, before, after):
    """Rows of chunks in another order."""
    if before == after:
        return x
    starts, row = {}, 0
    for start, stop in before:
        # Chunks of length 0 have no rows to move.
        starts[start, stop] = (row, row + stop - start)
        row += stop - start
    return torch.cat([x[:, starts[slot][0] : starts[slot][1]] for slot in after], 1)


def _to_heads(group, x):
    """`[batch, rows, heads, dim]` of this rank to `[batch, rows of all ranks, heads of this rank, dim]`."""
    batch, rows, count, dim = x.shape
    parts = x.view(batch, rows, group.size, count // group.size, dim).permute(2, 0, 1, 3, 4)
    return group.swap(parts).permute(1, 0, 2, 3, 4).reshape(batch, group.size * rows, count // group.size, dim)


def _to_rows(group, x):
    """The inverse of `_to_heads`."""
    batch, rows, count, dim = x.shape
    parts = x.view(batch, group.size, rows // group.size, count, dim).permute(1, 0, 2, 3, 4)
    return group.swap(parts).permute(1, 2, 0, 3, 4).reshape(batch, rows // group.size, group.size * count, dim)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, x):
        ctx.group = group
        return _to_heads(group, x.contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        return None, _to_rows(ctx.group, d.contiguous())


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, x):
        ctx.group = group
        return _to_rows(group, x.contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        return None, _to_heads(ctx.group, d.contiguous())


def bytes_sent(
    q: Tensor, k: Tensor, v: Tensor, *, ring: int = 1, ulysses: int = 1, layout: Layout, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, cu_seqlens: Tensor | None = None, backward: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The bytes that one rank sends in `context_parallel_attention`, by closed form, as `traffic` counts them.

    q, k, v        the rows of one rank; only shapes and types are read
    ring, ulysses  ranks of the ring, and ranks that exchange heads
    backward       also count backward

    A ring sends keys and values h times, and in backward h times again, with h + 1 times f32 gradients; h is the number
    of ranks minus 1, or less if no rank sees keys that far away. An exchange among u ranks sends (u - 1) / u of q, k, v
    and o, with each key head repeated until u divides their number.
    """
    mask = Mask.of(layout.length, causal, window, cu_seqlens)
    rows, element = math.prod(q.shape[:-2]), q.element_size()
    copies = math.lcm(k.shape[-2], ulysses) // k.shape[-2]
    kv = rows * k.shape[-2] * copies * (k.shape[-1] + v.shape[-1])
    qo = rows * q.shape[-2] * (q.shape[-1] + v.shape[-1])
    slots = [layout.slots[at * ulysses : (at + 1) * ulysses] for at in range(ring)]
    slots = tuple(tuple(sorted(sum(each, ()))) for each in slots)
    far = hops(slots, layout.length, mask) if ring > 1 else 0
    twice = 2 if backward else 1
    return {
        "keys": twice * far * kv * element,
        "gradients": (far + 1) * kv * 4 if backward and far else 0,
        "heads": twice * (qo + kv) * element // ulysses * (ulysses - 1),
    }


def shard_sequence(x: Tensor, layout: Layout, rank: int | None = None, dim: int = 1) -> Tensor:
    """The rows of one rank of a tensor that holds the whole sequence on axis `dim`; padding is 0.

    For activations, token ids, labels and position ids alike. `rank` defaults to that of this process among all.
    """
    rank = dist.get_rank() if rank is None else rank
    if not isinstance(layout, Layout):
        raise ValueError(f"`layout` is a {type(layout).__name__}, allowed: a Layout from `sequence_layout`")
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"`rank` is {rank}, allowed: 0 to {layout.ranks - 1}")
    if x.shape[dim] != layout.length:
        raise ValueError(
            f"`x` has {x.shape[dim]} rows on axis {dim}, allowed: {layout.length}, the length of the layout"
        )
    parts = []
    for start, stop in layout.slots[rank]:
        first, last = min(start, layout.length), min(stop, layout.length)
        parts.append(x.narrow(dim, first, last - first))
        missing = (stop - start) - (last - first)
        if missing:
            shape = list(x.shape)
            shape[dim] = missing
            parts.append(x.new_zeros(shape))
    return torch.cat(parts, dim)


def unshard_sequence(
    x: Tensor, layout: Layout, group: dist.ProcessGroup | None = None, dim: int = 1, timeout: float | None = None
) -> Tensor:
    """The whole sequence on every rank, from the rows of each; the inverse of `shard_sequence`. Without gradients."""
    if not isinstance(layout, Layout):
        raise ValueError(f"`layout` is a {type(layout).__name__}, allowed: a Layout from `sequence_layout`")
    every = Group(group, timeout)
    error = None
    if x.shape[dim] != layout.rows or every.size != layout.ranks:
        error = ValueError(
            f"`x` has {x.shape[dim]} rows on axis {dim} of {every.size} ranks, allowed: {layout.rows} rows on "
            f"{layout.ranks} ranks, as the layout has them"
        )
    agree([every], x.device, {"x": f"{x.dtype} {list(x.shape)}", "layout": layout.length}, error)
    parts = every.gather("rows", "collecting rows", x.detach())
    pieces = []
    for part, slots in zip(parts, layout.slots):
        row = 0
        for start, stop in slots:
            kept = max(0, min(stop, layout.length) - start)
            pieces.append((start, part.narrow(dim, row, kept)))
            row += stop - start
    pieces.sort(key=lambda piece: piece[0])
    return torch.cat([piece for _, piece in pieces], dim)
