"""`attention` and `attention_backward`: one description of the problem, arrays of any library."""

from __future__ import annotations

import sys
from typing import Any, Callable, Literal

from . import _describe, _dispatch, _variants
from ._arrays import integers, kind_of, needs_grad, readable, shape_of, squeezed
from .capture import Tracer
from .masks import block_lists
from .skipping import entry

Array = Any
_LAYOUTS = {False: "[batch, sequence, heads, head_dim]", True: "[total, heads, head_dim]"}


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
    skip: Any | None = None,
    precision: str | None = None,
    exp: str | None = None,
    rescale: str | None = None,
    tau: float | None = None,
    engine: str | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    out: Array | None = None,
) -> Any:
    """softmax(mask(modify(scale q k^T))) v, for each head.

    q, k, v       `[batch, sequence, heads, head_dim]`, or packed `[total, heads, head_dim]` with `cu_seqlens`;
                  q_heads must be a multiple of kv_heads; v may have a different head_dim
    causal        True: the last query sees all keys ("bottom-right"); "top-left": the first query sees one
    window        (left, right): number of keys before and after the diagonal, inclusive; None means unbounded
    scale         default 1 / sqrt(head_dim)
    softcap       c tanh(score / c)
    mask          booleans that broadcast to `[batch, heads, q_len, k_len]`; True keeps the score
    bias          floats that broadcast to the same shape, added to the scores; has a gradient
    score_mod     `(score, b, h, q_idx, kv_idx) -> score`, as in FlexAttention; it may index captured tensors, which
                  have gradients
    mask_mod      `(b, h, q_idx, kv_idx) -> bool`; True keeps the score
    block_mask    from `create_block_mask`, or torch's; blocks that it does not list are skipped
    sinks         `[heads]`: one logit per head that is added to the softmax denominator
    alibi_slopes  float32 `[heads]` or `[batch, heads]`: the score falls with the distance from the diagonal
    cu_seqlens    (for q, for k): cumulative offsets, batch + 1 each
    used_lengths  (for q, for k): number of rows in use in each sequence; either may be None
    max_lengths   (for q, for k): upper bounds of the lengths of packed sequences. On a GPU, `cu_seqlens` is not
                  read back, and this bound selects the decode kernel if there are few queries; rows past the bound are
                  undefined there
    skip          tiles of scores to leave out: a `Skip`, or its text as in "window:128:16,lambda:0.001"; CPU only
    precision     of the products: "int8" (no gradients), "nvfp4", "mxfp4", "mxfp8", or two of these for scores and
                  values as in "nvfp4/native"; gradients pass the rounding unchanged; CPU only
    exp, rescale, tau, engine, threads
                  how it is computed: the exponential ("native", "poly:5", "sas"), the rescale policy ("always",
                  "lazy:8", "optimistic"; tau=T is rescale="lazy:T"), one of `fulgurite.engines()`, and the number
                  of threads
    deterministic makes gradients on a GPU bitwise reproducible. Without it, d_q and the gradients of bias and of
                  captured tensors may differ in their last bits from run to run
    return_lse    also return the log of the softmax denominator, float32 `[batch, heads, sequence]`
    out           array for the result; not allowed if gradients are needed

    The order of operations is: scale, softcap, ALiBi, bias, score_mod; masks; sinks; softmax; product with v.
    Returns o, or (o, lse), as arrays of the same kind as q. A row that sees no key is 0, and its LSE is -inf.
    """
    ops = _dispatch._ops
    if (
        mask
        is bias
        is score_mod
        is mask_mod
        is block_mask
        is sinks
        is alibi_slopes
        is cu_seqlens
        is used_lengths
        is max_lengths
        is skip
        is None
        and (ops is not None or "torch" not in sys.modules)
        and (ops is None or not ops.takes(q, k, v, ()))
    ):
        if (
            window is scale is softcap is exp is rescale is tau is engine is threads is precision is None
            and causal.__class__ is bool
            and deterministic is False
            and not _describe.backward_tuning
        ):
            key = causal  # most calls; a short key is found sooner
        else:
            # Include types: 1 == True and 2.0 == 2, but not every argument accepts both.
            kinds = (type(causal), type(threads), type(window) is tuple and tuple(map(type, window)))
            tuned = (_describe.backward_tuning, _describe.sync_tuning)
            key = (
                causal, window, scale, softcap, exp, rescale, tau, engine, threads, deterministic, precision, kinds,
                tuned,
            )  # fmt: skip
        try:
            prepared = _dispatch._known.get(key)
        except TypeError:  # a list, or an array
            prepared = None
        if prepared is None:
            prepared = _dispatch.description(
                _describe.options(
                    causal, window, scale, softcap, exp, rescale, tau, engine, threads, deterministic, precision
                )
            )
            _dispatch.remember(key, prepared)
        return prepared.forward(q, k, v, (), out, return_lse)
    text = _describe.options(
        causal, window, scale, softcap, exp, rescale, tau, engine, threads, deterministic, precision
    )
    packed = cu_seqlens is not None
    text += _longest(packed, max_lengths, ops)
    call = _general
    if skip is not None:
        text = entry(skip) + text
    if ops is not None and not (score_mod is mask_mod is block_mask is None) and ops.torch.compiler.is_compiling():
        call = ops.between_graphs(_general)
    tensors = (mask, bias, score_mod, mask_mod, block_mask, sinks, alibi_slopes, cu_seqlens, used_lengths)
    return call(text, q, k, v, packed, tensors, out, return_lse)


def _general(text, q, k, v, packed, tensors, out, return_lse):
    """A call with tensors besides q, k and v, or one that torch must trace."""
    extras = _extras(*tensors, needs_grad, q)
    if extras.tensors:  # otherwise the extension reports it
        for name, array in (("q", q), ("k", k), ("v", v)):
            _rows(name, array, packed)
    for name, array in (("mask", tensors[0]), ("bias", tensors[1])):
        if array is not None and not packed:
            _broadcasts(name, array, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    ops = _dispatch.ops()
    if ops is not None and isinstance(q, ops.torch.Tensor):
        q, k, v = ops.autocast(q, k, v)
    if text.startswith("skip "):
        if out is not None:
            raise ValueError("`out` was given, allowed: only without `skip`; leave it out")
        o, lse, _ = _variants.forward(text + extras.entries, [q, k, v, *extras.tensors])
        return (o, lse) if return_lse else o
    return _dispatch.forward(text + extras.entries, q, k, v, extras.tensors, out, return_lse)


def _described(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, mask=None, bias=None, score_mod=None,
    mask_mod=None, block_mask=None, sinks=None, alibi_slopes=None, cu_seqlens=None, used_lengths=None, precision=None,
    exp=None, rescale=None, tau=None, engine=None, threads=None,
):  # fmt: skip
    """The description of an attention call and the tensors besides q, k and v."""
    text = _describe.options(
        causal, window, scale, softcap, exp, rescale, tau, engine, threads, precision=precision
    )
    for name, array in (("q", q), ("k", k), ("v", v)):
        _rows(name, array, cu_seqlens is not None)
    extras = _extras(
        mask, bias, score_mod, mask_mod, block_mask, sinks, alibi_slopes, cu_seqlens, used_lengths, needs_grad, q
    )
    return text + extras.entries, extras.tensors


def _longest(packed, max_lengths, ops):
    """The description entry of upper bounds for packed sequences. A traced graph must not depend on their values."""
    if max_lengths is None:
        return ""
    if not packed:
        raise ValueError("`max_lengths` was given without `cu_seqlens`, allowed: packed sequences; leave it out")
    if ops is not None and ops.torch.compiler.is_compiling():
        return ""
    return _describe.longest(max_lengths)


def _rows(name, array, packed):
    shape = shape_of(name, array, _LAYOUTS[packed])
    if len(shape) != (3 if packed else 4):
        raise ValueError(f"`{name}` has shape {list(shape)}, allowed: {_LAYOUTS[packed]}")


def _extras(mask, bias, score_mod, mask_mod, block_mask, sinks, alibi_slopes, cu_seqlens, used_lengths, grad, q):
    """The tensors besides q, k and v, each with its description entry."""
    extras = _describe.Extras()
    if cu_seqlens is not None:
        pair = _describe.pair("cu_seqlens", cu_seqlens, "for queries and for keys")
        for role, offsets in zip(("cu_seqlens_q", "cu_seqlens_k"), pair):
            if offsets is not None:
                extras.add(role, integers("cu_seqlens", offsets))
    if used_lengths is not None:
        pair = _describe.pair("used_lengths", used_lengths, "for queries and for keys")
        for role, lengths in zip(("used_q", "used_k"), pair):
            if lengths is not None:
                extras.add(role, integers("used_lengths", lengths))
    if sinks is not None:
        extras.add("sinks", sinks)
    if alibi_slopes is not None:
        if len(shape_of("alibi_slopes", alibi_slopes, "[heads]")) == 2:
            extras.aux("alibi_slopes_of_batch", alibi_slopes, False)
            slope = "load alibi_slopes_of_batch 2 b h"
            extras.entry(f"score sub score mul {slope} float abs sub sub add q k_len q_len k;")
        else:
            extras.aux("alibi_slopes", alibi_slopes, False)
    if bias is not None:
        if kind_of_array("bias", bias) != "float":
            raise ValueError(f"`bias` is {bias.dtype}, allowed: floats; booleans that keep keys are `mask`")
        bias, element = squeezed("bias", bias)
        bias = readable("bias", bias)
        extras.aux("bias", bias, grad(bias))
        extras.entry(f"score add score {element};")
    if mask is not None:
        if kind_of_array("mask", mask) != "bool":
            raise ValueError(f"`mask` is {mask.dtype}, allowed: booleans; numbers that are added are `bias`")
        mask, element = squeezed("mask", mask)
        extras.aux("mask", readable("mask", mask), False)
        extras.entry(f"mask not eq {element} i0;")
    tracer = Tracer()
    if block_mask is not None:
        block_lists(block_mask, extras, tracer, q)
    if mask_mod is not None:
        extras.entry(_describe.mask_entries(tracer.mask("mask_mod", mask_mod)))
    if score_mod is not None:
        extras.entry(f"score {tracer.score('score_mod', score_mod)};")
    for name, array in tracer.captured():
        extras.aux(name, array, grad(array))
    return extras


def _broadcasts(name, array, sizes):
    """Rejects a mask that is larger than the scores: it would be read at other positions than its author expects."""
    shape = tuple(array.shape)
    if any(got not in (1, want) for got, want in zip(shape[::-1], sizes[::-1])):
        raise ValueError(f"`{name}` has shape {list(shape)}, allowed: what broadcasts to {list(sizes)}")


def kind_of_array(name, array):
    if not hasattr(array, "dtype"):
        raise ValueError(f"`{name}` is a {type(array).__name__}, allowed: an array")
    return kind_of(array)


def attention_backward(
    d_o: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    d_lse: Array | None = None,
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
    skip: Any | None = None,
    precision: str | None = None,
    exp: str | None = None,
    rescale: str | None = None,
    tau: float | None = None,
    engine: str | None = None,
    threads: int | None = None,
    deterministic: bool = False,
    out: tuple[Array, ...] | None = None,
) -> tuple[Any, ...]:
    """The gradients of `attention`, from its arguments, its results, and the gradient of o.

    For arrays without autograd; torch tensors have `backward()`. Returns (d_q, d_k, d_v), followed by the gradients of
    sinks, of bias and of each float array that `score_mod` captures, if present. `out` takes one array for each of
    them.
    """
    text = _describe.options(
        causal, window, scale, softcap, exp, rescale, tau, engine, threads, deterministic, precision
    )
    text += _longest(cu_seqlens is not None, max_lengths, _dispatch.ops())
    extras = _extras(
        mask, bias, score_mod, mask_mod, block_mask, sinks, alibi_slopes, cu_seqlens, used_lengths, _is_float, q
    )
    packed = cu_seqlens is not None
    for name, array in (("q", q), ("k", k), ("v", v)):
        _rows(name, array, packed)
    given = None if out is None else list(out)
    at = 3 + (sinks is not None)  # index of the bias gradient; the bias was passed without its axes of size 1
    if given is not None and bias is not None and len(given) > at:
        given[at] = given[at].reshape(extras.tensors[extras.at("bias")].shape)
    if skip is not None:
        if out is not None:
            raise ValueError("`out` was given, allowed: only without `skip`; leave it out")
        prepared, tensors = _variants.variant(entry(skip) + text + extras.entries), [q, k, v, *extras.tensors]
        gradients = prepared.backward(tensors, [o, lse, prepared.forward(tensors)[2]], [d_o, d_lse])
        if bias is not None:
            gradients[at] = gradients[at].reshape(tuple(bias.shape))
        return tuple(gradients)
    saved = (o, lse, d_o, d_lse)
    gradients = _dispatch.backward(text + extras.entries, q, k, v, extras.tensors, saved, given)
    if bias is not None:
        gradients[at] = gradients[at].reshape(tuple(bias.shape))
    return tuple(gradients if out is None else out)


def _is_float(array):
    return kind_of(array) == "float"
