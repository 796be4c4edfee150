"""The functions of flash-attn, with its signatures and semantics.

Layout `[batch, sequence, heads, head_dim]`, packed `[total, heads, head_dim]`. `causal` is aligned bottom-right: the
last query sees the last key. A side of `window_size` that is -1 or None is unbounded. `deterministic` affects
gradients on a GPU; everything else is always deterministic.

The order of arguments is that of flash-attn 2; the arguments of FlashAttention-3 and 4 follow and are given by name.
Those that only tune a GPU (`num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`, `min_seqlen_k`,
`seqlen_k_per_split`, `disable_scheduler_metadata`, `fa_version`) have no effect. Unsupported arguments raise
NotImplementedError with their name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, Union

import numpy

from . import _cache
from ._api import attention
from ._arrays import is_torch, rows, shape_of
from ._messages import check_dropout, refuse, renaming
from .capture import Captured, Tracer
from .masks import and_masks

if TYPE_CHECKING:
    from typing_extensions import Protocol

    class _TwoIntegers(Protocol):
        """An array of two integers."""

        def tolist(self) -> Any: ...


Array = Any
# (left, right); None or -1 is unbounded.
Window = Union[Sequence[Union[int, None]], "_TwoIntegers", None]

# Arguments with other names in fulgurite's own messages.
_NAMES = {
    "scale": "softmax_scale",
    "window": "window_size",
    "max_lengths": "max_seqlen",
    "used_q": "seqused_q",
    "used_k": "seqused_k",
    "o": "out",
}


# The default of flash-attn: both sides of the window are open.
_UNBOUNDED = (-1, -1)


def _window(window_size):
    if window_size is None or window_size is _UNBOUNDED:
        return None
    sides = window_size.tolist() if hasattr(window_size, "tolist") else window_size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ValueError(f"`window_size` is {window_size!r}, allowed: (left, right), -1 or None is unbounded")
    left, right = (side if type(side) is int else _side(side) for side in sides)
    if None in (left, right) and -1 in (left, right):
        raise ValueError(
            f"`window_size` is {window_size!r}: -1 is unbounded in flash-attn 2, an offset in FlashAttention-4, "
            f"where None is unbounded, allowed: (None, None) or (-1, -1); `attention` has `window` with offsets"
        )
    left, right = (None if side == -1 else side for side in (left, right))
    return None if left is None and right is None else (left, right)


def _side(side):
    """A side of the window that is not a Python integer."""
    if side is None:
        return None
    if isinstance(side, (bool, float)) or not hasattr(side, "__index__"):
        raise ValueError(f"`window_size` is {side!r}, allowed: an integer, -1 or None is unbounded")
    return int(side)


def _causal(causal):
    """Accepts None and NumPy's booleans as well."""
    if causal is None or isinstance(causal, numpy.bool_):
        return bool(causal)
    if not isinstance(causal, bool):
        raise ValueError(f"`causal` is {causal!r}, allowed: True, False")
    return causal


def _softcap(softcap):
    return None if softcap is None or (isinstance(softcap, (int, float)) and softcap == 0) else softcap


def _sinks(learnable_sink, s_aux):
    """The sinks, which have two names."""
    if learnable_sink is None or s_aux is None:
        return s_aux if learnable_sink is None else learnable_sink
    raise ValueError("`learnable_sink` and `s_aux` are one argument, allowed: one of them")


def _flash(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, probs, lse, **more):
    if not isinstance(causal, bool):
        causal = _causal(causal)
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


class _Lengths:
    """What a callable of FlashAttention-4 reads from its `seqlen_info`: the lengths of the sequence."""

    seqlen_q, seqlen_k = Tracer.q_len, Tracer.k_len


def _modifiers(score_mod, mask_mod, aux_tensors, causal, out, attention_chunk):
    """The keywords of `attention` for `out`, for the callables of FlashAttention-4, and for `attention_chunk`.

    A callable has FlexAttention's arguments, or two more: `seqlen_info` and `aux_tensors`.
    """
    aux = [x if is_torch(x) else Captured(x) for x in aux_tensors or ()]
    more = {} if out is None else {"out": out}
    for name, function, count in (("score_mod", score_mod, 5), ("mask_mod", mask_mod, 4)):
        if function is None:
            continue
        if not callable(function):
            raise ValueError(f"`{name}` is a {type(function).__name__}, allowed: a callable")
        more[name] = function
        if _takes(function, count + 2):
            more[name] = functools.partial(_with_aux, function, aux)
        elif aux:
            raise ValueError(
                f"`aux_tensors` was given, and `{name}` has no argument for it, allowed: {count + 2} arguments"
            )
    if aux and score_mod is mask_mod is None:
        raise ValueError("`aux_tensors` was given without `score_mod` and `mask_mod`, allowed: with one of them")
    if mask_mod is not None and causal:
        raise ValueError(
            "`causal` is True and `mask_mod` was given, allowed: one of them; put `causal` into `mask_mod`"
        )
    chunks = _chunks(attention_chunk)
    if chunks is not None:
        more["mask_mod"] = and_masks(more["mask_mod"], chunks) if mask_mod is not None else chunks
    return more


def _chunks(attention_chunk, leftpad=None):
    """The mask of `attention_chunk`: a query sees the keys of its own chunk. None without chunks.

    The last query is at the position of the last key; `leftpad` keys before the first chunk do not count.
    """
    if isinstance(attention_chunk, bool) or not hasattr(attention_chunk, "__index__") or attention_chunk < 0:
        raise ValueError(f"`attention_chunk` is {attention_chunk!r}, allowed: an integer, 0 for no chunks")
    size = int(attention_chunk)
    if not size:
        return None

    def same_chunk(b, h, q_idx, kv_idx):
        first = 0 if leftpad is None else leftpad[b]
        return (q_idx + (Tracer.k_len - Tracer.q_len) - first) // size == (kv_idx - first) // size

    return same_chunk


def _takes(function, count):
    """Whether a callable can be called with this many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _with_aux(function, aux, *indices):
    return function(*indices, _Lengths, aux)


@renaming(_NAMES)
def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | None = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    # Keyword-only arguments would cost a lookup each, in every call.
    learnable_sink: Array | None = None,
    s_aux: Array | None = None,
    return_lse: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: Array | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Array] | None = None,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    attention_chunk: int = 0,
    gather_kv_indices: Array | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
) -> Any:
    """Attention over `[batch, sequence, heads, head_dim]`; k and v may have fewer heads, v another head_dim.

    Returns out; with `return_attn_probs` (out, softmax_lse, None), with `return_lse` (out, softmax_lse), softmax_lse
    float32 `[batch, heads, sequence]`. `learnable_sink` (or `s_aux`) is one logit per head that is added to
    the softmax denominator. `out` takes the result where no gradients are needed.

    `score_mod` and `mask_mod` have FlexAttention's arguments, or two more: an object with `seqlen_q` and `seqlen_k`,
    and the list `aux_tensors`. They are traced, so they must use operators and functions of torch or NumPy; gradients
    are derived.
    """
    check_dropout(dropout_p)
    sinks = _sinks(learnable_sink, s_aux)
    if attention_chunk or not (
        qv
        is q_descale
        is k_descale
        is v_descale
        is out
        is score_mod
        is mask_mod
        is aux_tensors
        is gather_kv_indices
        is score_mod_bwd
        is aux_scalars
        is block_sparse_tensors
        is block_sparse_tensors_bwd
        is None
    ):
        refuse(
            qv=(qv, None),
            q_descale=(q_descale, None),
            k_descale=(k_descale, None),
            v_descale=(v_descale, None),
            gather_kv_indices=(gather_kv_indices, None),
            score_mod_bwd=(score_mod_bwd, None),
            aux_scalars=(aux_scalars, None),
            block_sparse_tensors=(block_sparse_tensors, None),
            block_sparse_tensors_bwd=(block_sparse_tensors_bwd, None),
        )
        return _flash(
            q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, return_attn_probs, return_lse,
            deterministic=deterministic, **_modifiers(score_mod, mask_mod, aux_tensors, causal, out, attention_chunk),
        )  # fmt: skip
    return _flash(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, return_attn_probs, return_lse,
        deterministic=deterministic,
    )  # fmt: skip


@renaming(_NAMES)
def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | None = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    # Keyword-only arguments would cost a lookup each, in every call.
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    learnable_sink: Array | None = None,
    s_aux: Array | None = None,
    return_lse: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Any = None,
    disable_scheduler_metadata: bool = False,
    min_seqlen_k: int | None = None,
    seqlen_k_per_split: int | None = None,
    fa_version: int | None = None,
    out: Array | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[Array] | None = None,
    page_table: Array | None = None,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    attention_chunk: int = 0,
    gather_kv_indices: Array | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    aux_scalars: Sequence[Any] | None = None,
    block_sparse_tensors: Any = None,
) -> Any:
    """Attention over packed sequences, `[total, heads, head_dim]`.

    `cu_seqlens_q` and `cu_seqlens_k` are cumulative offsets, batch + 1 each. On a GPU they are not read back, and
    `max_seqlen_q` selects the decode kernel; elsewhere `max_seqlen_q` and `max_seqlen_k` are optional.
    softmax_lse is `[heads, total]`. Without its offsets, a side is a padded batch `[batch, sequence, heads, head_dim]`,
    of which `seqused_q` or `seqused_k` rows are in use; where q is padded, softmax_lse is `[batch, heads, sequence]`.
    `score_mod`, `mask_mod`, `aux_tensors` and `out` are those of `flash_attn_func`.
    """
    check_dropout(dropout_p)
    refuse(
        block_table=(block_table, None),
        page_table=(page_table, None),
        qv=(qv, None),
        q_descale=(q_descale, None),
        k_descale=(k_descale, None),
        v_descale=(v_descale, None),
        gather_kv_indices=(gather_kv_indices, None),
        score_mod_bwd=(score_mod_bwd, None),
        aux_scalars=(aux_scalars, None),
        block_sparse_tensors=(block_sparse_tensors, None),
    )
    more = _modifiers(score_mod, mask_mod, aux_tensors, causal, out, attention_chunk)
    padded_q = None
    if cu_seqlens_q is None or cu_seqlens_k is None:
        for name, x, offsets in (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k)):
            if offsets is None and len(shape_of(name, x, "[batch, sequence, heads, head_dim]")) != 4:
                raise ValueError(
                    f"`cu_seqlens_{name}` is None, allowed for `{name}` of shape {list(x.shape)}: cumulative offsets, "
                    f"batch + 1 of them; a padded batch is [batch, sequence, heads, head_dim]"
                )
        if cu_seqlens_q is not None:
            k, v, cu_seqlens_k = _flat(k, v, q)
        elif cu_seqlens_k is not None:
            refuse(out=(out, None))
            padded_q = q.shape[:2]
            q, _, cu_seqlens_q = _flat(q, q, q)
    used = None if seqused_q is None and seqused_k is None else (seqused_q, seqused_k)
    if cu_seqlens_q is not None:
        more.update(cu_seqlens=(cu_seqlens_q, cu_seqlens_k), max_lengths=(max_seqlen_q, max_seqlen_k))
    sinks = _sinks(learnable_sink, s_aux)
    result = _flash(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, return_attn_probs, return_lse,
        used_lengths=used, deterministic=deterministic, **more,
    )  # fmt: skip
    return result if padded_q is None else _padded(result, padded_q)


def _padded(result, shape):
    """The result of packed queries as that of a padded batch."""
    if not isinstance(result, tuple):
        return result.reshape((*shape, *result.shape[1:]))
    out, lse, *probs = result
    lse = lse.reshape((lse.shape[0], *shape)).swapaxes(0, 1)
    return (_padded(out, shape), lse, *probs)


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
    causal: bool | None = False,
    window_size: Window = _UNBOUNDED,
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
    causal: bool | None = False,
    window_size: Window = _UNBOUNDED,
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
    causal: bool | None = False,
    window_size: Window = _UNBOUNDED,
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
    causal: bool | None = False,
    window_size: Window = _UNBOUNDED,
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
    causal: bool | None = False,
    window_size: Window = _UNBOUNDED,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Array | None = None,
    learnable_sink: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Array | None = None,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    page_table: Array | None = None,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    attention_chunk: int = 0,
) -> Any:
    """Attention of q over a cache `[batch, room, heads, head_dim]`, of which `cache_seqlens` keys are in use.

    k and v, `[batch, new, heads, head_dim]`, are first appended to the caches in place, after the keys in use. Nothing
    is written before all arguments are checked. There are no gradients.

    cache_seqlens     one number, or one per sequence; without it the whole cache is in use
    cache_batch_idx   the sequence of the cache that each sequence of q uses. On the CPU, indices at equal distances are
                      a view; other indices copy the keys in use. On a GPU, the sequences are copied
    cache_leftpad     the first key of each sequence
    rotary_cos, rotary_sin
                      `[positions, rotary_dim / 2]`: q and the new k are rotated before use. A new key i is at position
                      `cache_seqlens + i`; so is query i if `causal` or a window is given, otherwise every query is at
                      `cache_seqlens`. `rotary_seqlens` takes the place of `cache_seqlens` here. `rotary_interleaved`
                      pairs neighbouring elements; False pairs the two halves
    cu_seqlens_q      q is packed, `[total, heads, head_dim]`; `cu_seqlens_k_new` says the same of k and v

    On a GPU, lengths and indices are not read back; those out of range are clamped. Paged caches are not supported.
    """
    refuse(
        block_table=(block_table, None),
        page_table=(page_table, None),
        qv=(qv, None),
        q_descale=(q_descale, None),
        k_descale=(k_descale, None),
        v_descale=(v_descale, None),
    )
    packed = cu_seqlens_q is not None
    layout = "[total, heads, head_dim]" if packed else "[batch, sequence, heads, head_dim]"
    shape = shape_of("q", q, layout)
    if len(shape) != (3 if packed else 4):
        raise ValueError(f"`q` has shape {list(shape)}, allowed: {layout}")
    cu_q = _cache.offsets("cu_seqlens_q", cu_seqlens_q, q, shape[0])
    batch = cu_q.shape[0] - 1 if packed else shape[0]
    # With indices, the cache may have any number of sequences.
    sequences, room = _cache.sizes(k_cache, v_cache, batch if cache_batch_idx is None else "batch")
    used = _cache.per_sequence("cache_seqlens", cache_seqlens, q, batch, room)
    cache_rows = None
    if cache_batch_idx is not None:
        cache_rows = _cache.per_sequence("cache_batch_idx", cache_batch_idx, q, batch, sequences - 1)
    leftpad = None
    if cache_leftpad is not None:
        leftpad = _cache.per_sequence("cache_leftpad", cache_leftpad, q, batch, room)
    more = _cache_masks(leftpad, _chunks(attention_chunk, leftpad))
    sinks = _sinks(learnable_sink, s_aux)
    options = (softmax_scale, _causal(causal), window_size, softcap, alibi_slopes, sinks, False, return_softmax_lse)
    if (k is None) != (v is None):
        raise ValueError("`k` and `v` belong together; give both or neither")
    if k is None and not (rotary_cos is rotary_sin is None):
        raise ValueError("`rotary_cos` was given without `k` and `v`, allowed: new keys, which are rotated with q")
    if k is None and cu_seqlens_k_new is not None:
        raise ValueError("`cu_seqlens_k_new` was given without `k` and `v`, allowed: packed new keys")
    if k is not None:
        if cache_seqlens is None:
            raise ValueError("`cache_seqlens` is None, allowed with `k` and `v`: how many keys are in use before them")
        rows_k = _cache.fresh_rows(k_cache, v_cache, k, v, cu_seqlens_k_new, batch, q)
        if not _cache.on_gpu(q):
            _cache.check_room(used, rows_k.lengths, room, cache_rows)
        if rotary_cos is not None or rotary_sin is not None:
            tables = (rotary_cos, rotary_sin, rotary_interleaved)
            start = used if rotary_seqlens is None else rotary_seqlens
            local = options[1] or _window(window_size) is not None
            q, turned = _rotated(q, k, tables, start, cu_q, rows_k, batch, room, local)
        else:
            turned = k
        at = used[rows_k.sequence] + rows_k.place
        if _cache.on_gpu(q):
            _check_on_gpu(q, k_cache, v_cache, used, cache_rows, cu_q, max_seqlen_q, options, more)
        else:
            # Run all checks, with no queries, before the caches are written.
            nothing = (q[:0] if packed else q[:, :0]).reshape((batch, 0, *q.shape[-2:]))
            checked = {**more, "used_lengths": (None, used)}
            _without_gradients(nothing, k_cache[:batch], v_cache[:batch], options, checked)
        for cache, new in ((k_cache, turned), (v_cache, v)):
            _cache.append(cache, new, cache_rows, rows_k, at)
        used = used + rows_k.lengths
    lengths = None if cache_seqlens is None else used
    return _attend(q, k_cache, v_cache, lengths, cache_rows, cu_q, max_seqlen_q, options, more)


def _cache_masks(leftpad, chunks) -> dict[str, Any]:
    """The keywords of `attention` for the masks of a cache, either of which may be None."""
    masks = [] if chunks is None else [chunks]
    if leftpad is not None:
        masks.append(lambda b, h, q_idx, kv_idx: kv_idx >= leftpad[b])
    return {"mask_mod": and_masks(*masks)} if masks else {}


def _attend(q, k_cache, v_cache, lengths, cache_rows, cu_q, max_seqlen_q, options, more):
    """Attention over the keys in use; `lengths` is None if all are."""
    if cache_rows is not None:
        room = k_cache.shape[1]
        longest = room if lengths is None or _cache.on_gpu(q) else min(room, max([1, *lengths.tolist()]))
        k_cache, v_cache = (_cache.selected(cache, cache_rows, longest) for cache in (k_cache, v_cache))
    more = {**more, "used_lengths": None if lengths is None else (None, lengths)}
    if cu_q is not None:
        k_cache, v_cache, cu_k = _flat(k_cache, v_cache, q)
        more.update(cu_seqlens=(cu_q, cu_k), max_lengths=(max_seqlen_q, None))
    return _without_gradients(q, k_cache, v_cache, options, more)


# Calls on a GPU that were accepted, by everything that could be refused.
_accepted: set[tuple] = set()


def _check_on_gpu(q, k_cache, v_cache, lengths, cache_rows, cu_q, max_seqlen_q, options, more):
    """Computes a call with new keys once before they are written, if its like was not accepted before. A call without
    queries would need a kernel of its own."""
    tensors = (q, k_cache, v_cache, cache_rows, cu_q, *options[4:6])  # slopes and sinks are among them
    plain = (max_seqlen_q, *options[:2], _window(options[2]), options[3], options[7], "mask_mod" in more)
    key = (*((x.shape, x.stride(), x.dtype, x.device) if is_torch(x) else x for x in tensors), *plain)
    try:
        if key in _accepted:
            return
    except TypeError:  # an option that is an array or a list cannot be remembered
        key = None
    _attend(q, k_cache, v_cache, lengths, cache_rows, cu_q, max_seqlen_q, options, more)
    if key is not None:
        if len(_accepted) > 4096:
            _accepted.clear()
        _accepted.add(key)


def _rotated(q, k, tables, start, cu_q, rows_k, batch, room, local):
    """q and the new k with the rotary embedding."""
    rotary_cos, rotary_sin, interleaved = tables
    if not isinstance(interleaved, bool):
        raise ValueError(f"`rotary_interleaved` is {interleaved!r}, allowed: True, False")
    rows_q = _cache.Rows(cu_q, batch, q.shape[0 if cu_q is not None else 1], q)
    start = _cache.per_sequence("rotary_seqlens", start, q, batch, 2**30)
    at_k = start[rows_k.sequence] + rows_k.place
    at_q = start[rows_q.sequence] + (rows_q.place if local else 0 * rows_q.place)
    known = not _cache.on_gpu(q)
    most = max([0, *(int(at.max()) for at in (at_k, at_q) if 0 not in at.shape)]) if known else room - 1
    _cache.check_rotary(rotary_cos, rotary_sin, q, q.shape[-1], most, known)
    return tuple(_cache.rotate(x, at, rotary_cos, rotary_sin, interleaved) for x, at in ((q, at_q), (k, at_k)))


def _flat(k, v, like):
    """Padded keys and values `[batch, sequence, heads, head_dim]` as packed ones, and their offsets."""
    batch, length = k.shape[:2]
    cu_seqlens = _cache.counting(batch + 1, like) * length
    return *(x.reshape((batch * length, *x.shape[2:])) for x in (k, v)), cu_seqlens


# The new keys are called `k` and `v` in messages of the function itself, so the names are changed here.
@renaming({**_NAMES, "k": "k_cache", "v": "v_cache", "used_k": "cache_seqlens", "used_lengths": "cache_seqlens"})
def _without_gradients(q, k, v, options, more):
    if is_torch(q):
        import torch

        with torch.no_grad():
            return _flash(q, k, v, *options, **more)
    return _flash(q, k, v, *options, **more)
