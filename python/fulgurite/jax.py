"""Attention inside programs that JAX transforms: `jit`, `grad`, `vmap` and whatever is made of them.

    import fulgurite.jax
    o = jax.jit(lambda q, k, v: fulgurite.jax.attention(q, k, v, causal=True))(q, k, v)

A call is one foreign call in the compiled program (`jax.ffi`): the engine reads and writes XLA's buffers in place, on
the CPU and on NVIDIA GPUs. Gradients are those of the extension, by `jax.custom_vjp`; forward-mode and second
derivatives do not exist. `vmap` joins its axis with the batch axis; where that could change the meaning, because a
mask, a modifier or a tensor depends on the batch, it runs one call after the other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Literal

import jax
import jax.numpy as jnp
import numpy

from . import _api, _describe, _dispatch, _fulgurite

Array = Any

for _platform, _functions in _fulgurite.xla_targets().items():
    for _name, _function in _functions.items():
        jax.ffi.register_ffi_target(_name, _function, platform=_platform)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool | Literal["bottom-right", "top-left"] = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: Any | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    cu_seqlens: tuple[Array, Array] | None = None,
    used_lengths: tuple[Array | None, Array | None] | None = None,
    max_lengths: tuple[int | None, int | None] | None = None,
    precision: str | None = None,
    exp: str | None = None,
    rescale: str | None = None,
    tau: float | None = None,
    engine: str | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """softmax(mask(modify(scale q k^T))) v, for each head; the arguments are those of `fulgurite.attention`.

    Arrays may be traced: q, k, v, mask, bias, sinks, slopes, offsets, lengths, and what `score_mod` and `mask_mod`
    capture. All other arguments are part of the program. q, k, v, bias, sinks and captured float arrays have gradients,
    and so has the LSE. Types and shapes are checked while tracing; offsets and lengths when the program runs.
    """
    text = _describe.options(
        causal, window, scale, softcap, exp, rescale, tau, engine, threads, deterministic, precision
    )
    packed = cu_seqlens is not None
    text += _api._longest(packed, max_lengths, None)
    for name, array in (("q", q), ("k", k), ("v", v)):
        _api._rows(name, array, packed)
        _is_ours(name, array)
    for name, array in (("mask", mask), ("bias", bias)):
        if array is not None and not packed:
            _api._broadcasts(name, array, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    if sinks is not None:
        _is_ours("sinks", sinks)
        # A GPU adds up the gradient of a logit in float32.
        sinks = jnp.asarray(sinks, jnp.float32) if _api.kind_of_array("sinks", sinks) == "float" else sinks
    extras = _api._extras(
        mask, bias, score_mod, mask_mod, block_mask, sinks, alibi_slopes, cu_seqlens, used_lengths, _no_gradient, q
    )
    text += extras.entries
    for role, array in zip(_describe.roles(text), extras.tensors):
        _is_ours(role.split()[-1], array)
    arrays = [q, k, v, *extras.tensors]
    _dispatch.description(text).check([(str(array.dtype), array.shape) for array in arrays])
    q, k, v, *tensors = map(jnp.asarray, arrays)
    o, lse = _attention(text, q, k, v, tensors)
    return (o, lse) if return_lse else o


def _no_gradient(_array):
    """Forward asks for no gradients; what is differentiated is known when JAX transforms the call."""
    return False


def _is_ours(name, array):
    if not isinstance(array, (jax.Array, numpy.ndarray)):
        kind = f"{type(array).__module__.split('.')[0]}.{type(array).__name__}"
        raise ValueError(f"`{name}` is a {kind}, allowed: a JAX or NumPy array")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(text, q, k, v, tensors):
    return _forward(text)(q, k, v, *tensors)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Differentiated:
    """Which tensors besides q, k and v JAX differentiates: saved for backward as a part of the program."""

    tensors: tuple[bool, ...]


def _attention_forward(text, q, k, v, tensors):
    differentiated = _Differentiated(tuple(x.perturbed for x in tensors))
    q, k, v, tensors = q.value, k.value, v.value, [x.value for x in tensors]
    o, lse = _forward(text)(q, k, v, *tensors)
    return (o, lse), (q, k, v, tensors, o, lse, differentiated)


def _attention_backward(text, saved, cotangents):
    q, k, v, tensors, o, lse, differentiated = saved
    d_o, d_lse = (None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents)
    d_o = jnp.zeros_like(o) if d_o is None else d_o
    text = _with_gradients(text, differentiated.tensors)
    given = (q, k, v, *tensors, o, lse, d_o, *(() if d_lse is None else (d_lse,)))
    d_q, d_k, d_v, *others = _backward(text, d_lse is not None)(*given)
    d_tensors = [None] * len(tensors)
    for at, gradient in zip(_describe.gradients(text), others):
        d_tensors[at] = gradient.astype(tensors[at].dtype)
    return d_q, d_k, d_v, d_tensors


_attention.defvjp(_attention_forward, _attention_backward, symbolic_zeros=True)


def _with_gradients(text, differentiated):
    """The description in which the auxiliary tensors that are differentiated have gradients."""
    flags, entries = iter(differentiated), []
    for entry in text.split(";"):
        if entry.startswith("with ") and next(flags) and entry.startswith("with aux "):
            entry += " grad"
        entries.append(entry)
    return ";".join(entries)


@functools.lru_cache(maxsize=512)
def _forward(text):
    """The foreign call of forward with this description: (q, k, v, *tensors) -> (o, lse)."""

    @jax.custom_batching.custom_vmap
    def forward(q, k, v, *tensors):
        rows = (q.shape[1], q.shape[0]) if _is_packed(text) else (q.shape[0], q.shape[2], q.shape[1])
        o = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
        lse = jax.ShapeDtypeStruct(rows, jnp.float32)
        return tuple(jax.ffi.ffi_call("fulgurite_forward", (o, lse))(q, k, v, *tensors, description=text))

    @forward.def_vmap
    def _(size, batched, *arrays):
        return _batched(forward, size, batched, arrays, _joins_batches(text) and not any(batched[3:]), range(3))

    return forward


@functools.lru_cache(maxsize=512)
def _backward(text, with_d_lse):
    """The foreign call of backward: (q, k, v, *tensors, o, lse, d_o[, d_lse]) -> gradients."""
    extras = len(_describe.roles(text))
    rows = [at for at in range(6 + extras + with_d_lse) if not 3 <= at < 3 + extras]

    @jax.custom_batching.custom_vmap
    def backward(*arrays):
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:3]]
        for at in _describe.gradients(text):
            results.append(jax.ShapeDtypeStruct(arrays[3 + at].shape, jnp.float32))
        return tuple(jax.ffi.ffi_call("fulgurite_backward", results)(*arrays, description=text))

    @backward.def_vmap
    def _(size, batched, *arrays):
        # Gradients of other tensors are sums over the batch, which joining would mix.
        joins = _joins_batches(text) and not any(batched[3 : 3 + extras]) and not _describe.gradients(text)
        return _batched(backward, size, batched, arrays, joins, rows)

    return backward


def _is_packed(text):
    return "with cu_seqlens_q;" in text


def _joins_batches(text):
    """Whether the sequences of a batch are computed alike, so that an axis of `vmap` may become a part of it."""
    for entry in text.split(";"):
        words = entry.split()
        if words[:1] in (["score"], ["mask"]) and "b" in words:
            return False
        if words[:1] == ["blocks"] or words[:2] in (["with", role] for role in _OF_BATCH):
            return False
    return True


_OF_BATCH = ("cu_seqlens_q", "cu_seqlens_k", "used_q", "used_k")


def _batched(call, size, batched, arrays, joins, rows):
    """A call for each index of an axis of `vmap`: one call if it `joins` the batch, which the arrays at `rows` have."""
    if joins and size > 0:
        arrays = list(arrays)
        for at in rows:
            x = arrays[at] if batched[at] else jnp.broadcast_to(arrays[at], (size, *arrays[at].shape))
            arrays[at] = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
        results = call(*arrays)
        results = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)
    else:
        mapped = [x for x, is_batched in zip(arrays, batched) if is_batched]

        def one(given):
            given = iter(given)
            return call(*(next(given) if is_batched else x for x, is_batched in zip(arrays, batched)))

        results = jax.lax.map(one, mapped)
    return results, tuple(True for _ in results)
