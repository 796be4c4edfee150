"""Results over parts of the keys: `merge` and `flash_attn_combine`. `get_scheduler_metadata` has nothing to plan."""

from __future__ import annotations

from typing import Any

import numpy

from ._arrays import is_torch, kind_of, shape_of, unmasked
from ._messages import refuse

Array = Any


def flash_attn_combine(
    out_partial: Array,
    lse_partial: Array,
    out: Array | None = None,
    out_dtype: Any = None,
    cu_seqlens: Array | None = None,
    seqused: Array | None = None,
    virtual_batch_idx: Array | None = None,
    return_lse: bool = True,
) -> tuple[Any, Any]:
    """The attention over all keys, from its results over parts of them.

    out_partial   `[parts, batch, sequence, heads, head_dim]`, or `[parts, total, heads, head_dim]`
    lse_partial   `[parts, batch, sequence, heads]`, or `[parts, total, heads]`; a part with LSE -inf saw no key
    out           takes the result
    out_dtype     of the result; default: that of `out`, or of `out_partial`
    cu_seqlens, seqused
                  rows outside of them may have any value, and have no effect here

    Returns (out, lse); lse is float32 `[batch, sequence, heads]`, or None without `return_lse`.
    """
    refuse(virtual_batch_idx=(virtual_batch_idx, None))
    shape = shape_of("out_partial", out_partial, "[parts, batch, sequence, heads, head_dim]")
    if len(shape) not in (4, 5) or not shape[0]:
        raise ValueError(
            f"`out_partial` has shape {list(shape)}, allowed: [parts, batch, sequence, heads, head_dim], or "
            f"[parts, total, heads, head_dim], with at least one part"
        )
    if shape_of("lse_partial", lse_partial, "[parts, ..., heads]") != shape[:-1]:
        raise ValueError(f"`lse_partial` has shape {list(lse_partial.shape)}, allowed: {list(shape[:-1])}")
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if kind_of(unmasked(name, x)) != "float" or is_torch(x) != is_torch(out_partial):
            raise ValueError(f"`{name}` is {type(x).__name__} of {x.dtype}, allowed: floats of one library")
        _beside(name, x, "out_partial", out_partial)
    if out is not None:
        if shape_of("out", out, "[batch, sequence, heads, head_dim]") != shape[1:]:
            raise ValueError(f"`out` has shape {list(out.shape)}, allowed: {list(shape[1:])}")
        if out_dtype is not None and out_dtype != out.dtype:
            raise ValueError(f"`out_dtype` is {out_dtype}, `out` is {out.dtype}, allowed: one type")
        out_dtype = out.dtype
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    total, lse = (_by_torch if is_torch(out_partial) else _by_numpy)(out_partial, lse_partial)
    total = total.to(dtype) if is_torch(total) else total.astype(dtype)
    if out is not None:
        out[...] = total
    return total if out is None else out, lse if return_lse else None


def merge(o_a: Array, lse_a: Array, o_b: Array, lse_b: Array) -> tuple[Any, Any]:
    """(o, lse) over all keys, from results over two disjoint parts of them.

    o_a, o_b      `[batch, sequence, heads, head_dim]`, or packed `[total, heads, head_dim]`
    lse_a, lse_b  `[batch, heads, sequence]`, or packed `[heads, total]`, as `attention(..., return_lse=True)` gives
                  them; a part with LSE -inf saw no key

    Merging is associative, so that more parts merge one after the other (ring, tree and cascade schemes). torch tensors
    have gradients, through o and through the LSE.
    """
    shape = shape_of("o_a", o_a, "[batch, sequence, heads, head_dim]")
    if len(shape) not in (3, 4):
        allowed = "[batch, sequence, heads, head_dim], or [total, heads, head_dim]"
        raise ValueError(f"`o_a` has shape {list(shape)}, allowed: {allowed}")
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    for name, x, want in (("o_b", o_b, shape), ("lse_a", lse_a, lse_shape), ("lse_b", lse_b, lse_shape)):
        if shape_of(name, x, list(want)) != want:
            raise ValueError(f"`{name}` has shape {list(x.shape)}, allowed: {list(want)}")
    for name, x in (("o_a", o_a), ("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        if kind_of(unmasked(name, x)) != "float" or type(x) is not type(o_a) and not (is_torch(x) and is_torch(o_a)):
            raise ValueError(f"`{name}` is {type(x).__name__} of {x.dtype}, allowed: floats of one library")
        _beside(name, x, "o_a", o_a)
    if is_torch(o_a):
        return _merge_by_torch(o_a, lse_a, o_b, lse_b)
    by_rows = [numpy.swapaxes(numpy.asarray(x), -1, -2) for x in (lse_a, lse_b)]
    o, lse = _by_numpy(numpy.stack([numpy.asarray(o_a), numpy.asarray(o_b)]), numpy.stack(by_rows))
    o, lse = o.astype(numpy.asarray(o_a).dtype), numpy.ascontiguousarray(numpy.swapaxes(lse, -1, -2))
    if not isinstance(o_a, numpy.ndarray):
        asarray = o_a.__array_namespace__().asarray
        return asarray(o), asarray(lse)
    return o, lse


def _beside(name, x, first, other):
    """Rejects a torch tensor on another device than the first one."""
    if is_torch(x) and x.device != other.device:
        raise ValueError(
            f"`{name}` is on {x.device}, `{first}` on {other.device}, allowed: one device; move it with .to({first}.device)"
        )


def _merge_by_torch(o_a, lse_a, o_b, lse_b):
    import torch

    lse_a, lse_b = lse_a.float(), lse_b.float()
    # Where no part saw a key, the difference of infinities is NaN, also in its gradient.
    empty = torch.maximum(lse_a, lse_b) == -float("inf")
    a, b = (torch.where(empty, 0.0, x) for x in (lse_a, lse_b))
    lse = torch.logaddexp(a, b)
    parts = []
    for o, x in ((o_a, a), (o_b, b)):
        share = torch.where(empty, 0.0, torch.exp(x - lse)).transpose(-1, -2)[..., None]
        # A part that saw no key may hold anything.
        parts.append(torch.where(share == 0, 0.0, share * o.float()))
    return (parts[0] + parts[1]).to(o_a.dtype), torch.where(empty, -float("inf"), lse)


def _by_torch(out_partial, lse_partial):
    import torch

    lse_partial = lse_partial.float()
    lse = torch.logsumexp(lse_partial, 0)
    shares = torch.exp(lse_partial - torch.where(lse == -float("inf"), 0.0, lse))[..., None]
    # A part that saw no key may hold anything.
    return torch.where(shares == 0, 0.0, shares * out_partial.float()).sum(0), lse


def _by_numpy(out_partial, lse_partial):
    lse_partial = numpy.asarray(lse_partial).astype(numpy.float32)
    most = lse_partial.max(0)
    most = numpy.where(numpy.isneginf(most), numpy.float32(0), most)
    with numpy.errstate(invalid="ignore"):  # an LSE of +inf, which is no result of attention
        shares = numpy.exp(lse_partial - most)
    with numpy.errstate(divide="ignore"):
        lse = most + numpy.log(shares.sum(0))
    shares = numpy.exp(lse_partial - numpy.where(numpy.isneginf(lse), numpy.float32(0), lse))[..., None]
    with numpy.errstate(invalid="ignore"):
        return numpy.where(shares == 0, 0, shares * numpy.asarray(out_partial).astype(numpy.float32)).sum(0), lse


def get_scheduler_metadata(
    *sizes: Any,
    batch_size: int | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_heads_q: int | None = None,
    num_heads_kv: int | None = None,
    nheads: int | None = None,
    nheads_kv: int | None = None,
    headdim: int | None = None,
    headdim_v: int | None = None,
    cache_seqlens: Array | None = None,
    qkv_dtype: Any = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    cache_leftpad: Array | None = None,
    leftpad_k: Array | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    seqlen_k_per_split: int | None = None,
) -> None:
    """None, for `scheduler_metadata=` of the other functions: fulgurite plans each call by itself.

    It takes the arguments of FlashAttention-3 and of FlashAttention-4, and uses none of them.
    """
