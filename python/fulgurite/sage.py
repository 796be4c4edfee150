"""SageAttention's function, on fulgurite's INT8 attention."""

from __future__ import annotations

from typing import Any

from ._api import attention
from ._arrays import rows, shape_of
from ._messages import refuse, renaming

Array = Any


@renaming({"scale": "sm_scale"})
def sageattn(
    q: Array,
    k: Array,
    v: Array,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    smooth_k: bool = True,
    engine: str | None = None,
    threads: int | None = None,
) -> Any:
    """Attention with 8-bit products, as in SageAttention: forward only.

    q, k, v       `[batch, heads, sequence, head_dim]` ("HND") or `[batch, sequence, heads, head_dim]` ("NHD")
    is_causal     for queries and keys of one length
    sm_scale      default 1 / sqrt(head_dim)
    return_lse    also return the log of the softmax denominator, float32 `[batch, heads, sequence]`
    smooth_k      the mean over tokens is subtracted from k before it is rounded; False is refused

    Keys are rounded in blocks of 64. Returns o, or (o, lse), in the layout of q.
    """
    refuse(smooth_k=(smooth_k, True))
    if tensor_layout not in ("HND", "NHD"):
        raise ValueError(f"`tensor_layout` is {tensor_layout!r}, allowed: 'HND', 'NHD'")
    heads_first = tensor_layout == "HND"
    axes = "[batch, heads, sequence, head_dim]" if heads_first else "[batch, sequence, heads, head_dim]"
    for name, array in (("q", q), ("k", k), ("v", v)):
        shape = shape_of(name, array, axes)
        if len(shape) != 4:
            raise ValueError(f"`{name}` has shape {list(shape)}, allowed: {axes}")
    if is_causal:
        lengths = [tuple(x.shape)[2 if heads_first else 1] for x in (q, k)]
        if lengths[0] != lengths[1]:
            counts = f"{lengths[0]} queries and {lengths[1]} keys"
            raise ValueError(f"`is_causal` is True with {counts}, allowed: one length")
    if heads_first:
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {"causal": bool(is_causal), "scale": sm_scale, "precision": "int8", "engine": engine, "threads": threads}
    o, lse = attention(rows(q), rows(k), rows(v), return_lse=True, **options)
    o = o.swapaxes(1, 2) if heads_first else o
    return (o, lse) if return_lse else o
