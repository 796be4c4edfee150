"""The functions of torch: `scaled_dot_product_attention` and `flex_attention`, with its layouts and semantics."""

from __future__ import annotations

import sys
from typing import Any, Callable, NamedTuple

from ._api import attention
from ._arrays import is_torch, kind_of, rows, shape_of
from ._messages import check_dropout, refuse, renaming

Array = Any
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "mask": "attn_mask"}


class AuxRequest(NamedTuple):
    """What `flex_attention` returns beside its output, as in torch; `max_scores` is not supported."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """What `AuxRequest` asked for; None for the rest."""

    lse: Any = None
    max_scores: Any = None


def _swap(array):
    """`[..., heads, sequence, dim]` as `[..., sequence, heads, dim]` or back, without a copy."""
    return array.transpose(-3, -2) if is_torch(array) else array.swapaxes(-3, -2)


def _broadcast(array, shape):
    if tuple(array.shape) == shape:
        return array
    if is_torch(array):
        return array.expand(shape)
    import numpy

    return numpy.broadcast_to(array, shape)


def _leading(query, key, value, rank):
    """The axes before heads, which may broadcast."""
    sizes = []
    for axis in range(rank - 3):
        found = {name: x.shape[axis] for name, x in (("query", query), ("key", key), ("value", value))}
        most = max(found.values(), key=lambda size: (size != 1, size))
        for name, size in found.items():
            if size not in (1, most):
                raise ValueError(f"`{name}` has size {size} on axis {axis}, allowed: 1 or {most}")
        sizes.append(most)
    return tuple(sizes)


@renaming(_NAMES, heads_first=True)
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`: `[..., heads, sequence, head_dim]` in and out.

    attn_mask    broadcasts to `[..., heads, L, S]`: booleans, True keeps the score; or floats that are added, with a
                 gradient
    dropout_p    must be 0
    is_causal    aligned top-left: query i sees keys 0 to i, whatever the lengths; not together with `attn_mask`
    enable_gqa   lets key and value have fewer heads; query head h uses key/value head h // (Hq / Hkv)
    """
    check_dropout(dropout_p)
    if attn_mask is not None and is_causal:
        raise ValueError("`is_causal` is True and `attn_mask` was given, allowed: one of them")
    causal = "top-left" if is_causal else False
    shapes = [shape_of(name, x, "[..., L, E]") for name, x in (("query", query), ("key", key), ("value", value))]
    rank = len(shapes[0])
    for name, shape in zip(("query", "key", "value"), shapes):
        if len(shape) != rank or rank < 2:
            raise ValueError(
                f"`{name}` has shape {list(shape)}, allowed: [..., heads, sequence, head_dim], {rank} axes"
            )
    (q_len, head_dim), (k_len, key_dim), (v_len, _) = (shape[-2:] for shape in shapes)
    if key_dim != head_dim:
        raise ValueError(f"`key` has head_dim {key_dim}, allowed: {head_dim}, that of `query`")
    if v_len != k_len:
        raise ValueError(f"`value` has {v_len} rows, allowed: {k_len}, those of `key`")
    if rank == 2:
        query, key, value = query[None, None], key[None, None], value[None, None]
    elif rank == 3:  # the first axis counts sequences, not heads: they broadcast
        query, key, value = query[:, None], key[:, None], value[:, None]
    batch = _leading(query, key, value, max(4, rank))
    heads, k_heads, v_heads = (x.shape[-3] for x in (query, key, value))
    if heads != k_heads or heads != v_heads:
        if enable_gqa and k_heads == v_heads:
            pass  # the problem checks divisibility
        elif not enable_gqa and {k_heads, v_heads} <= {1, heads}:
            key, value = (_broadcast(x, (*x.shape[:-3], heads, *x.shape[-2:])) for x in (key, value))
        else:
            raise ValueError(
                f"`query` has {heads} heads, `key` {k_heads}, `value` {v_heads}, allowed: the same; fewer for key and "
                f"value with enable_gqa=True"
            )
    flat = [_broadcast(x, (*batch, *x.shape[-3:])) for x in (query, key, value)]
    flat = [x.reshape((-1, *x.shape[-3:])) if len(batch) != 1 else x for x in flat]
    q, k, v = (rows(_swap(x)) for x in flat)
    mask = bias = None
    if (variant := getattr(attn_mask, "variant", None)) is not None:
        causal, attn_mask = _causal_bias(attn_mask, variant, q_len, k_len), None
    if attn_mask is not None:
        attn_mask = _scores("attn_mask", attn_mask, batch, rank, (heads, q_len, k_len))
        mask, bias = (attn_mask, None) if kind_of(attn_mask) == "bool" else (None, attn_mask)
    o = _swap(attention(q, k, v, causal=causal, scale=scale, mask=mask, bias=bias))
    if rank < 4:
        return o[0, 0] if rank == 2 else o[:, 0]
    return o.reshape((*batch, *o.shape[-3:])) if len(batch) != 1 else o


def _causal_bias(attn_mask, variant, q_len, k_len):
    """The alignment of torch's `CausalBias`, a tensor without elements."""
    aligned = {"UPPER_LEFT": "top-left", "LOWER_RIGHT": "bottom-right"}.get(getattr(variant, "name", None))
    if aligned is None:
        kinds = "causal_upper_left, causal_lower_right"
        raise ValueError(f"`attn_mask` is a {type(attn_mask).__name__} of {variant}, allowed: {kinds}, or a tensor")
    sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
    if sizes != (q_len, k_len):
        raise ValueError(f"`attn_mask` is for {sizes[0]} queries and {sizes[1]} keys, allowed: {q_len} and {k_len}")
    return aligned


def _scores(name, array, batch, rank, sizes):
    """A mask or bias as `[batch, heads, L, S]`; each axis has its full size or 1."""
    shape = shape_of(name, array, "[..., L, S]")
    if rank == 3 and len(shape) == 3:  # [N, L, S] beside [N, L, E]
        array = array[:, None]
        shape = tuple(array.shape)
    wanted = (*batch, *sizes)
    if len(shape) > len(wanted) or any(a not in (1, b) for a, b in zip(shape[::-1], wanted[::-1])):
        raise ValueError(f"`{name}` has shape {list(shape)}, allowed: what broadcasts to {list(wanted)}")
    if len(shape) > 4:
        array = _broadcast(array, (*batch, *shape[-3:]))
        array = array.reshape((-1, *shape[-3:]))
    elif len(batch) != 1 and len(shape) == 4:
        array = _broadcast(array, (batch[-1], *shape[-3:])).reshape((-1, *shape[-3:]))
    return array


@renaming({**_NAMES, "bias": "bias", "mask": "mask", "mask_mod": "block_mask"}, heads_first=True)
def flex_attention(
    query: Array,
    key: Array,
    value: Array,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any | None = None,
) -> Any:
    """`torch.nn.attention.flex_attention.flex_attention`: `[batch, heads, sequence, head_dim]` in and out.

    `score_mod` is traced, so it needs no compilation; `block_mask` is fulgurite's or torch's. `kernel_options` tune
    torch's kernels and have no effect here. key and value of batch 1 serve every sequence of query.

    Returns out; with `return_lse` (out, lse), lse float32 `[batch, heads, sequence]`; with
    `return_aux=AuxRequest(lse=True)`, torch's or fulgurite's, (out, AuxOutput).
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        shape = shape_of(name, x, "[batch, heads, sequence, head_dim]")
        if len(shape) != 4:
            raise ValueError(f"`{name}` has shape {list(shape)}, allowed: [batch, heads, sequence, head_dim]")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"`query` has {query.shape[1]} heads, `key` {key.shape[1]}, allowed: fewer with enable_gqa=True"
        )
    if return_aux is not None:
        return_lse = _asked(return_aux, return_lse)
    batch = query.shape[0]
    key, value = (_broadcast(x, (batch, *x.shape[1:])) if x.shape[0] == 1 else x for x in (key, value))
    q, k, v = (rows(_swap(x)) for x in (query, key, value))
    result = attention(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, return_lse=return_lse)
    out, lse = (_swap(result[0]), result[1]) if return_lse else (_swap(result), None)
    if return_aux is not None:
        kind = getattr(sys.modules.get(type(return_aux).__module__), "AuxOutput", AuxOutput)
        return out, kind(lse=lse)
    return (out, lse) if return_lse else out


def _asked(return_aux, return_lse):
    """Whether an `AuxRequest`, torch's or ours, asks for the LSE."""
    if not hasattr(return_aux, "lse"):
        raise ValueError(f"`return_aux` is {return_aux!r}, allowed: AuxRequest(lse=True)")
    if return_lse:
        raise ValueError("`return_lse` is True and `return_aux` was given, allowed: one of them")
    refuse(max_scores=(getattr(return_aux, "max_scores", False), False))
    return bool(return_aux.lse)
