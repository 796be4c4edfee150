"""The functions of flash-attn, with its signatures and semantics.

Layout `[batch, sequence, heads, head_dim]`, packed `[total, heads, head_dim]`. `causal` is aligned bottom-right: the
last query sees the last key. A side of `window_size` that is -1 or None is unbounded. `deterministic` affects
gradients on a GPU; everything else is always deterministic. Arguments that only tune a GPU (`num_splits`, `pack_gqa`,
`sm_margin`) have no effect. Unsupported arguments of flash-attn raise NotImplementedError with their name.
"""

from __future__ import annotations

import functools
from typing import Any

from ._api import attention
from ._arrays import is_torch, rows, shape_of

Array = Any

# Arguments with other names in fulgurite's own messages.
_NAMES = {
    "scale": "softmax_scale",
    "window": "window_size",
    "max_lengths": "max_seqlen",
    "used_q": "seqused_q",
    "used_k": "seqused_k",
}


# The default of flash-attn: both sides of the window are open.
_UNBOUNDED = (-1, -1)


def renaming(names: dict[str, str]):
    """Turns the argument names in messages into those of the decorated function."""

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                text = str(error)
                renamed = text
                for own, theirs in names.items():
                    renamed = renamed.replace(f"`{own}`", f"`{theirs}`")
                if renamed == text:
                    raise
                raise type(error)(renamed) from error.__cause__

        return call

    return decorate


def refuse(**arguments):
    """Raises if one of the arguments differs from its default: `name=(value, default)`."""
    for name, (value, *defaults) in arguments.items():
        if not any(value is default or (isinstance(value, (int, float)) and value == default) for default in defaults):
            shown = "a tensor" if hasattr(value, "shape") else repr(value)
            raise NotImplementedError(f"`{name}` is {shown}, allowed: {defaults[0]!r}; fulgurite does not have it")


def check_dropout(dropout_p):
    """Rejects dropout, which is not supported."""
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        raise ValueError(
            f"`dropout_p` is {dropout_p!r}, allowed: 0.0; fulgurite has no dropout, a random mask could not be checked"
        )


def _window(window_size):
    if window_size is None or window_size is _UNBOUNDED:
        return None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"`window_size` is {window_size!r}, allowed: (left, right), -1 or None is unbounded")
    left, right = (None if side is None or side == -1 else side for side in window_size)
    return None if left is None and right is None else (left, right)


def _softcap(softcap):
    return None if softcap is None or (isinstance(softcap, (int, float)) and softcap == 0) else softcap


def _sinks(learnable_sink, s_aux):
    """The sinks, which have two names."""
    if learnable_sink is None or s_aux is None:
        return s_aux if learnable_sink is None else learnable_sink
    raise ValueError("`learnable_sink` and `s_aux` are one argument, allowed: one of them")


def _flash(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, probs, lse, **more):
    if not isinstance(causal, bool):
        raise ValueError(f"`causal` is {causal!r}, allowed: True, False")
    result = attention(
        rows(q),
        rows(k),
        rows(v),
        causal=causal,
        window=_window(window_size),
        scale=softmax_scale,
        softcap=_softcap(softcap),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        return_lse=bool(probs or lse),
        **more,
    )
    return (*result, None) if probs else result


@renaming(_NAMES)
def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Array | None = None,
    s_aux: Array | None = None,
    return_lse: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    attention_chunk: int = 0,
) -> Any:
    """Attention over `[batch, sequence, heads, head_dim]`; k and v may have fewer heads, v another head_dim.

    Returns out; with `return_attn_probs` (out, softmax_lse, None), with `return_lse` (out, softmax_lse), softmax_lse
    float32 `[batch, heads, sequence]`. `learnable_sink` (or `s_aux`) is one logit per head that is added to
    the softmax denominator.
    """
    check_dropout(dropout_p)
    if attention_chunk or not (qv is q_descale is k_descale is v_descale is None):
        refuse(
            qv=(qv, None),
            q_descale=(q_descale, None),
            k_descale=(k_descale, None),
            v_descale=(v_descale, None),
            attention_chunk=(attention_chunk, 0),
        )
    sinks = _sinks(learnable_sink, s_aux)
    return _flash(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, return_attn_probs, return_lse,
        deterministic=deterministic,
    )  # fmt: skip


@renaming(_NAMES)
def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    *,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    learnable_sink: Array | None = None,
    s_aux: Array | None = None,
    return_lse: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    page_table: Array | None = None,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    attention_chunk: int = 0,
) -> Any:
    """Attention over packed sequences, `[total, heads, head_dim]`.

    `cu_seqlens_q` and `cu_seqlens_k` are cumulative offsets, batch + 1 each. On a GPU they are not read back, and
    `max_seqlen_q` selects the decode kernel; elsewhere `max_seqlen_q` and `max_seqlen_k` are optional.
    softmax_lse is `[heads, total]`.
    """
    check_dropout(dropout_p)
    refuse(
        block_table=(block_table, None),
        page_table=(page_table, None),
        qv=(qv, None),
        q_descale=(q_descale, None),
        k_descale=(k_descale, None),
        v_descale=(v_descale, None),
        attention_chunk=(attention_chunk, 0),
    )
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None:
            raise ValueError(f"`{name}` is None, allowed: cumulative offsets, batch + 1 of them")
    used = None if seqused_q is None and seqused_k is None else (seqused_q, seqused_k)
    sinks = _sinks(learnable_sink, s_aux)
    return _flash(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, return_attn_probs, return_lse,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k), used_lengths=used, deterministic=deterministic,
        max_lengths=(max_seqlen_q, max_seqlen_k),
    )  # fmt: skip


def _unpack(name, packed, count, axis):
    """Splits one array into q, k, v (or k, v); autograd combines their gradients once."""
    shape = shape_of(name, packed, f"with {count} at axis {axis}")
    if len(shape) <= axis or shape[axis] != count:
        raise ValueError(f"`{name}` has shape {list(shape)}, allowed: {count} at axis {axis}")
    if is_torch(packed):
        return packed.unbind(axis)
    return tuple(packed[(slice(None),) * axis + (at,)] for at in range(count))


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of one array `[batch, sequence, 3, heads, head_dim]`."""
    q, k, v = _unpack("qkv", qkv, 3, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q and one array `[batch, sequence, 2, heads, head_dim]`."""
    k, v = _unpack("kv", kv, 2, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of one array `[total, 3, heads, head_dim]`."""
    q, k, v = _unpack("qkv", qkv, 3, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q and one array `[total, 2, heads, head_dim]`."""
    k, v = _unpack("kv", kv, 2, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@renaming({**_NAMES, "k": "k_cache", "v": "v_cache", "used_k": "cache_seqlens", "used_lengths": "cache_seqlens"})
def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: int | Array | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple = _UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Array | None = None,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
) -> Any:
    """Attention of q over a cache `[batch, room, heads, head_dim]`, of which `cache_seqlens` keys are in use.

    k and v, `[batch, new, heads, head_dim]`, are first appended to the caches in place, after the keys in use.
    `cache_seqlens` is one number, or one per sequence; without it the whole cache is in use. `cache_leftpad` gives the
    start of each sequence. There are no gradients. Rotary embedding, `cache_batch_idx` and paged caches are not
    supported.
    """
    refuse(
        rotary_cos=(rotary_cos, None),
        rotary_sin=(rotary_sin, None),
        cache_batch_idx=(cache_batch_idx, None),
        block_table=(block_table, None),
        page_table=(page_table, None),
    )
    layout = "[batch, sequence, heads, head_dim]"
    batch = shape_of("q", q, layout)[0] if len(shape_of("q", q, layout)) == 4 else None
    if batch is None:
        raise ValueError(f"`q` has shape {list(q.shape)}, allowed: {layout}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        shape = shape_of(name, cache, "[batch, room, heads, head_dim]")
        if len(shape) != 4 or shape[0] != batch:
            raise ValueError(f"`{name}` has shape {list(shape)}, allowed: [{batch}, room, heads, head_dim]")
    room = k_cache.shape[1]
    used = _lengths("cache_seqlens", cache_seqlens, q, batch, room)
    more: dict[str, Any] = {}
    if cache_leftpad is not None:
        leftpad = _lengths("cache_leftpad", cache_leftpad, q, batch, room)
        more["mask_mod"] = lambda b, h, q_idx, kv_idx: kv_idx >= leftpad[b]
    sinks = _sinks(learnable_sink, s_aux)
    options = (softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, False, return_softmax_lse)
    if (k is None) != (v is None):
        raise ValueError("`k` and `v` belong together; give both or neither")
    if k is not None:
        if cache_seqlens is None:
            raise ValueError("`cache_seqlens` is None, allowed with `k` and `v`: how many keys are in use before them")
        new = _fresh(k_cache, v_cache, k, v, batch)
        if not _on_gpu(q):
            for at, length in enumerate(used.tolist()):
                if length + new > room:
                    raise ValueError(f"`cache_seqlens`[{at}] is {length}, {new} new keys do not fit a room of {room}")
            # Run all checks, with no queries, before the caches are written.
            _without_gradients(q[:, :0], k_cache, v_cache, options, {**more, "used_lengths": (None, used)})
        for cache, fresh in ((k_cache, k), (v_cache, v)):
            _append(cache, fresh, used)
        used = used + new
    if cache_seqlens is not None:
        more["used_lengths"] = (None, used)
    return _without_gradients(q, k_cache, v_cache, options, more)


def _without_gradients(q, k, v, options, more):
    if is_torch(q):
        import torch

        with torch.no_grad():
            return _flash(q, k, v, *options, **more)
    return _flash(q, k, v, *options, **more)


def _on_gpu(array):
    return is_torch(array) and array.device.type != "cpu"


def _fresh(k_cache, v_cache, k, v, batch):
    """The number of new keys; checks that k and v fit the caches."""
    new = shape_of("k", k, "[batch, new, heads, head_dim]")[1:2]
    for name, fresh, cache in (("k", k, k_cache), ("v", v, v_cache)):
        want = [batch, *(new or ("new",)), *cache.shape[2:]]
        if list(shape_of(name, fresh, "[batch, new, heads, head_dim]")) != want:
            raise ValueError(f"`{name}` has shape {list(fresh.shape)}, allowed: {want}")
        if is_torch(cache) != is_torch(fresh) or cache.dtype != fresh.dtype:
            raise ValueError(f"`{name}` is {fresh.dtype}, allowed: {cache.dtype}, as its cache is")
        if is_torch(cache) and cache.device != fresh.device:
            raise ValueError(f"`{name}` is on {fresh.device}, its cache on {cache.device}, allowed: one device")
    return new[0]


def _lengths(name, lengths, q, batch, room):
    """One length per sequence, int32 on the device of q. Lengths on a GPU are not read back."""
    if _on_gpu(q) and is_torch(lengths):
        import torch

        if lengths.is_floating_point() or lengths.dtype == torch.bool or lengths.numel() not in (1, batch):
            raise ValueError(f"`{name}` is {lengths.dtype} of {lengths.numel()}, allowed: {batch} integers")
        return lengths.to(device=q.device, dtype=torch.int32).reshape(-1).expand(batch).contiguous()
    return _like(q, _used(name, lengths, batch, room))


def _used(name, lengths, batch, room):
    """One length per sequence, as Python integers."""
    if lengths is None:
        return [room] * batch
    if isinstance(lengths, int) and not isinstance(lengths, bool):
        lengths = [lengths] * batch
    elif hasattr(lengths, "tolist"):
        lengths = lengths.tolist()
        lengths = [lengths] * batch if isinstance(lengths, int) else lengths
    if not isinstance(lengths, list) or len(lengths) != batch or not all(isinstance(n, int) for n in lengths):
        raise ValueError(f"`{name}` is {lengths!r}, allowed: an integer, or {batch} of them")
    for at, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise ValueError(f"`{name}`[{at}] is {length}, allowed: 0 to {room}")
    return lengths


def _append(cache, fresh, used):
    """Writes new keys after those in use."""
    new = fresh.shape[1]
    if is_torch(cache):
        import torch

        with torch.no_grad():
            # On the device of the cache, lengths are not read back: clamp them, so that no write is out of bounds.
            at = used.to(torch.int64)[:, None] + torch.arange(new, device=cache.device)
            rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
            cache[rows, at.clamp(0, max(cache.shape[1] - 1, 0))] = fresh
        return
    for at, length in enumerate(used.tolist()):
        cache[at, length : length + new] = fresh[at]


def _like(q, lengths):
    if is_torch(q):
        import torch

        return torch.tensor(lengths, dtype=torch.int32, device=q.device)
    import numpy

    return numpy.array(lengths, numpy.int32)
