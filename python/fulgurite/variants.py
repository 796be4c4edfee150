"""Variants of attention: `parallax_attention` and `lighthouse_attention`, with their gradients.

Arrays in host memory, of NumPy, torch or a library with DLPack. torch tensors have gradients, and torch.compile sees
one operator; the functions that end in `_backward` are for arrays without autograd.
"""

from __future__ import annotations

from typing import Any, Callable, Literal

from . import _describe, _dispatch, _variants
from ._api import _LAYOUTS, _broadcasts, _extras, _rows
from ._arrays import shape_of

Array = Any


def parallax_attention(
    q: Array,
    k: Array,
    v: Array,
    r: Array,
    *,
    causal: bool | Literal["bottom-right", "top-left"] = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    mask_mod: Callable[..., Any] | None = None,
    cu_seqlens: tuple[Array, Array] | None = None,
    used_lengths: tuple[Array | None, Array | None] | None = None,
    exp: str | None = None,
    rescale: str | None = None,
    engine: str | None = None,
    threads: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention minus a learned correction: mean(v) - Cov(v, k) r under the softmax of each query. r = 0 is attention.

    q, k, v       as in `attention`
    r             the probe, shaped like q
    causal, window, scale, mask, mask_mod, cu_seqlens, used_lengths, exp, rescale, engine, threads
                  as in `attention`; score modifiers, sinks and block masks are not supported
    return_lse    also return the LSE of the softmax, float32 `[batch, heads, sequence]`; it has no gradient

    Returns o, or (o, lse).
    """
    text, tensors = _parallax(
        q, k, v, r, causal, window, scale, mask, mask_mod, cu_seqlens, used_lengths, exp, rescale, engine, threads
    )
    o, lse, _ = _variants.forward(text, tensors)
    return (o, lse) if return_lse else o


def parallax_attention_backward(
    d_o: Array,
    q: Array,
    k: Array,
    v: Array,
    r: Array,
    *,
    causal: bool | Literal["bottom-right", "top-left"] = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    mask_mod: Callable[..., Any] | None = None,
    cu_seqlens: tuple[Array, Array] | None = None,
    used_lengths: tuple[Array | None, Array | None] | None = None,
    exp: str | None = None,
    rescale: str | None = None,
    engine: str | None = None,
    threads: int | None = None,
) -> tuple[Any, Any, Any, Any]:
    """(d_q, d_k, d_v, d_r) of `parallax_attention`, for arrays without autograd. Forward is computed again."""
    text, tensors = _parallax(
        q, k, v, r, causal, window, scale, mask, mask_mod, cu_seqlens, used_lengths, exp, rescale, engine, threads
    )
    prepared = _variants.variant(text)
    d_q, d_k, d_v, d_r = prepared.backward(tensors, prepared.forward(tensors), [d_o])
    return d_q, d_k, d_v, d_r


def _parallax(
    q, k, v, r, causal, window, scale, mask, mask_mod, cu_seqlens, used_lengths, exp, rescale, engine, threads
):
    """The description and the tensors of a call."""
    text = "parallax;" + _describe.options(causal, window, scale, None, exp, rescale, None, engine, threads)
    packed = cu_seqlens is not None
    for name, array in (("q", q), ("k", k), ("v", v), ("r", r)):
        _rows(name, array, packed)
    if mask is mask_mod is cu_seqlens is used_lengths is None:
        return text, [q, k, v, r]
    if mask is not None and not packed:
        _broadcasts("mask", mask, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    collect, ops = _extras, _dispatch.ops()
    if ops is not None and mask_mod is not None and ops.torch.compiler.is_compiling():
        collect = ops.between_graphs(_extras)
    extras = collect(mask, None, None, mask_mod, None, None, None, cu_seqlens, used_lengths, _never, q)
    return text + extras.entries, [q, k, v, r, *extras.tensors]


def _never(array) -> bool:
    """Tensors that masks read have no gradients."""
    return False


def lighthouse_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    levels: int = 3,
    pool: int = 4,
    budget: int | None = None,
    tile: int = 128,
    engine: str | None = None,
    threads: int | None = None,
) -> Any:
    """Causal attention over selected nodes of a pyramid of means, added back to the tokens, for long sequences.

    **The selection sees the future**, so this layer suits the first part of a training, not generation.

    q, k, v       `[batch, tokens, heads, head_dim]`; q_heads must be a multiple of kv_heads; tokens must be a multiple
                  of pool ** levels
    levels        of the pyramid; 1 is dense attention
    pool          nodes that are averaged into one of the next level: a power of 2
    budget        nodes picked at each level, a multiple of `tile`; default: a 64th of the tokens
    tile          nodes picked from each tile of the sequence
    engine, threads
                  one of `fulgurite.engines()` that runs on the CPU, and the number of threads

    Returns o. Gradients take the selection as constant; backward repeats it.
    """
    text = _lighthouse(levels, pool, budget, tile, engine, threads)
    return _variants.forward(text, _towers(q, k, v))[0]


def lighthouse_attention_backward(
    d_o: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    levels: int = 3,
    pool: int = 4,
    budget: int | None = None,
    tile: int = 128,
    engine: str | None = None,
    threads: int | None = None,
) -> tuple[Any, Any, Any]:
    """(d_q, d_k, d_v) of `lighthouse_attention`, for arrays without autograd."""
    text = _lighthouse(levels, pool, budget, tile, engine, threads)
    d_q, d_k, d_v = _variants.backward(text, _towers(q, k, v), [], [d_o])
    return d_q, d_k, d_v


def _towers(q, k, v):
    for name, array in (("q", q), ("k", k), ("v", v)):
        shape = shape_of(name, array, _LAYOUTS[False])
        if len(shape) != 4:
            raise ValueError(f"`{name}` has shape {list(shape)}, allowed: {_LAYOUTS[False]}")
    return [q, k, v]


def _lighthouse(levels, pool, budget, tile, engine, threads) -> str:
    text = "lighthouse;"
    numbers = ("levels", levels), ("pool", pool), ("budget", budget), ("tile", tile), ("threads", threads)
    for name, value in numbers:
        if value is not None:
            text += f"{name} {_describe._integer(name, value)};"
    if engine is not None:
        text += f"engine {_describe._word('engine', engine)};"
    return text
