"""A block of scores between some queries and some keys of a longer sequence: the step that rings are made of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .. import _fulgurite
from .._arrays import shape_of
from ._layout import Mask, block_between
from ._ring import Call, _wide, add_block, add_block_gradients

Tensor = torch.Tensor


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, *, q_start: int = 0, k_start: int = 0, causal: bool = False,
    window: tuple[int | None, int | None] | None = None, cu_seqlens: Tensor | None = None, scale: float | None = None,
    softcap: float | None = None, alibi_slopes: Tensor | None = None, into: tuple[Tensor, Tensor] | None = None,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse), float32, of queries over some of the keys of a longer sequence; without autograd.

    q, k, v           `[batch, rows, heads, head_dim]`, any number of rows
    q_start, k_start  the position in the sequence of the first query and of the first key. The mask and ALiBi count
                      positions in the sequence: queries at 100 to 199 with `causal` see keys at 0 to 99 wholly
    cu_seqlens        offsets of documents in the whole sequence; queries and keys are then of the same rows, or of rows
                      that do not overlap
    into              (o, lse) over other keys, `[batch, rows, heads, head_dim]` and `[batch, heads, rows]`, float32:
                      the block is merged into them. Where lse is -inf, o may hold anything. Hopper kernels merge at the end
                      of each tile, and round nothing to 16 bits

    Rows that see no key have o = 0 and lse = -inf. The same block gives the same bits.
    """
    call, block, slopes = _block(q, k, v, q_start, k_start, causal, window, cu_seqlens, scale, softcap, alibi_slopes)
    call.options["threads"] = threads
    shapes = ((*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1]))
    if into is None:
        out = torch.zeros(shapes[0], dtype=torch.float32, device=q.device)
        lse = torch.full(shapes[1], -torch.inf, device=q.device)
    else:
        out, lse = (_sums(name, x, shape, q) for name, x, shape in zip(("o", "lse"), into, shapes))
    if block is not None:
        with torch.no_grad():
            add_block(call, block, _wide(q), _wide(k), _wide(v), slopes, out, lse)
    return out, lse


def block_attention_backward(
    d_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, d_lse: Tensor | None = None,
    q_start: int = 0, k_start: int = 0, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | None = None, scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, into: tuple[Tensor, Tensor, Tensor] | None = None,
    deterministic: bool = False, threads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(d_q, d_k, d_v), float32, of a block of scores.

    o, lse  the result of these queries over all keys of the sequence, o in the type of q
    into    float32 gradients to which those of the block are added

    The other arguments are those of `block_attention`.
    """
    call, block, slopes = _block(q, k, v, q_start, k_start, causal, window, cu_seqlens, scale, softcap, alibi_slopes)
    call.options.update(threads=threads, deterministic=deterministic)
    if into is None:
        totals = tuple(torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (q, k, v))
    else:
        totals = tuple(_sums(name, x, like.shape, q) for name, x, like in zip(("d_q", "d_k", "d_v"), into, (q, k, v)))
    if block is not None:
        with torch.no_grad():
            saved = (_wide(o), lse, _wide(d_o).contiguous(), d_lse)
            add_block_gradients(call, block, _wide(q), _wide(k), _wide(v), saved, slopes, totals)
    return totals


def _sums(name, x, shape, q):
    """A float32 tensor that is added to."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.shape != torch.Size(shape) or x.device != q.device:
        shown = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"`into` has `{name}` as {shown}, allowed: torch.float32 {list(shape)} on {q.device}")
    return x


def _block(q, k, v, q_start, k_start, causal, window, cu_seqlens, scale, softcap, alibi_slopes):
    """The options of a block, the block, and the slopes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or len(shape_of(name, x, "[batch, rows, heads, head_dim]")) != 4:
            shown = list(x.shape) if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"`{name}` is {shown}, allowed: a tensor [batch, rows, heads, head_dim]")
    for name, start in (("q_start", q_start), ("k_start", k_start)):
        if isinstance(start, (bool, float)) or not hasattr(start, "__index__") or int(start) < 0:
            raise ValueError(f"`{name}` is {start!r}, allowed: an integer, 0 or more")
    chunks = [(int(start), int(start) + x.shape[1]) for start, x in ((q_start, q), (k_start, k))]
    end = max(stop for _, stop in chunks)
    mask = Mask.of(end, causal, window, cu_seqlens)
    if mask.documents[-1] < end:
        raise ValueError(f"`cu_seqlens` ends at {mask.documents[-1]}, allowed: {end} or more, the end of q and k")
    block = block_between(*chunks, mask)
    if block is not None:
        (q0, q1), (k0, k1) = block.q, block.k
        block = block._replace(q=(q0 - chunks[0][0], q1 - chunks[0][0]), k=(k0 - chunks[1][0], k1 - chunks[1][0]))
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.float().contiguous()
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "deterministic": False, "threads": None}
    return Call(None, (), end, mask, options), block, alibi_slopes


@contextlib.contextmanager
def sm_margin(count: int, device: int = 0) -> Iterator[None]:
    """Within it, persistent kernels of a GPU (Hopper's) leave `count` SMs free, for the kernels of communication.

    >>> with sm_margin(16):
    ...     o = context_parallel_attention(q, k, v)

    Results have the same bits. It holds for all threads of the process.
    """
    if isinstance(count, (bool, float)) or not hasattr(count, "__index__") or not 0 <= int(count) < 2**31:
        raise ValueError(f"`count` is {count!r}, allowed: a number of SMs, 0 or more")
    _fulgurite.set_sm_margin(device, int(count))
    try:
        yield
    finally:
        _fulgurite.set_sm_margin(device, 0)
