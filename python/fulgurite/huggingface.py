"""transformers: `register_with_transformers()`, then `attn_implementation="fulgurite"`; diffusers:
`register_with_diffusers()`, then `model.set_attention_backend("fulgurite")`.

The mask of a model arrives as a function of indices and is traced into an expression, so that no `[q_len, k_len]` mask
is made; padding is a captured tensor. Inside torch.compile masks are dense booleans, as for "sdpa".
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from ._api import attention
from ._arrays import rows
from .capture import TracedMask, Tracer
from ._messages import refuse
from .sdpa import scaled_dot_product_attention
from .trace import TraceError

NAME = "fulgurite"
# Tensors that models hand to every attention: known below, or without effect on its result.
_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "input_ids", "max_length_k", "max_length_q",
    "num_items_in_batch", "position_ids", "seq_idx", "token_type_ids",
}  # fmt: skip


def register_with_transformers(name: str = NAME) -> None:
    """Registers `attn_implementation="fulgurite"` with transformers: the attention and its masks.

    From then on, a model that never asks for an attention interface raises an error with its name if it is made with
    this `attn_implementation`; it would compute its own attention otherwise, without a word.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    except ImportError as cause:
        raise ImportError("transformers 4.53 or later is needed: pip install transformers") from cause
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask_for)
    _registered.add(name)
    chosen = getattr(PreTrainedModel, "get_correct_attn_implementation", None)
    if chosen is not None and not hasattr(chosen, "fulgurite"):
        PreTrainedModel.get_correct_attn_implementation = _checking(chosen)


_registered: set[str] = set()


@functools.lru_cache(None)
def _source(module):
    """The source text of a module; empty if there is none."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


# By these flags a model says that its attention may be replaced.
_FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")


def _checking(chosen):
    """The method by which a model accepts an `attn_implementation`, with a check that it will use ours."""

    @functools.wraps(chosen)
    def checked(self, requested_attention=None, *args, **kwargs):
        if requested_attention in _registered:
            model = type(self)
            reason, source = None, _source(model.__module__)
            if not getattr(model, "_can_set_attn_implementation", lambda: True)():
                reason = "computes its own attention and asks for no attention interface"
            elif re.search(r"^class \w*Attention\w*\(", source, re.M) and not any(
                getattr(model, flag, True) for flag in _FLAGS
            ):
                reason = "says that it supports eager attention only"
            elif "_ATTENTION_CLASSES[" in source:  # by the name of the implementation
                reason = "looks its attention up in a table of its own"
            if reason is not None:
                raise ValueError(
                    f"`attn_implementation` is {requested_attention!r}, but {model.__name__} {reason}, allowed: "
                    f"'eager'; for one part of a model: {{'': {requested_attention!r}, 'name_of_its_config': 'eager'}}"
                )
        return chosen(self, requested_attention, *args, **kwargs)

    checked.fulgurite = True
    return checked


def attention_mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    **kwargs,
) -> Any:
    """The `attention_mask` of a layer: a traced mask, or a dense one if tracing fails."""
    import torch
    from transformers import masking_utils as masks

    mask_function = mask_function or masks.causal_mask_function
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    dense = functools.partial(
        masks.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    # A cache with room for later tokens is made to be compiled: generation then prepares one mask for all layers, and
    # recognises it by its four axes. Attention to more keys than tokens so far, as to an encoder, looks alike.
    if torch.compiler.is_compiling() or kv_length > int(q_offset) - int(kv_offset) + q_length:
        return dense()
    try:
        return _traced(q_length, kv_length, int(q_offset), int(kv_offset), mask_function, attention_mask, masks, dense)
    except TraceError:
        return dense()


def _traced(q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, masks, dense):
    if attention_mask is not None and not bool(attention_mask.all()):
        padding = masks.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = masks.and_masks(mask_function, masks.padding_mask_function(padding))
    # Use the lengths if they suffice: the description then stays the same from one generated token to the next.
    by_lengths = q_offset - kv_offset == kv_length - q_length

    def shifted(b, h, q_idx, kv_idx):
        q_idx = q_idx + (Tracer.k_len - Tracer.q_len) if by_lengths else q_idx + (q_offset - kv_offset)
        if kv_offset:
            q_idx, kv_idx = q_idx + kv_offset, kv_idx + kv_offset
        return mask_function(b, h, q_idx, kv_idx)

    tracer = Tracer()
    return TracedMask(tracer.mask("mask_function", shifted), tracer, dense, (q_length, kv_length))


def _cut(mask, module, q_length, kv_length):
    """The dense mask of a layer that keeps fewer keys than its mask has. Keys that a mask does not have are refused."""
    if q_length != mask.lengths[0] or kv_length > mask.lengths[1]:
        raise NotImplementedError(
            f"`attention_mask` is for {mask.lengths[0]} queries and {mask.lengths[1]} keys, but "
            f"{type(module).__name__} has {q_length} queries and {kv_length} keys, and what hides the "
            f"others is not known; use another attn_implementation for this model"
        )
    return mask.dense()


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    position_bias: Any = None,
    **kwargs,
) -> tuple:
    """Attention of one layer: `[batch, heads, sequence, head_dim]` in, `[batch, sequence, heads, head_dim]` out."""
    if dropout:
        raise ValueError(f"`dropout` is {dropout}, allowed: 0.0; set attention_dropout=0.0 in the model's config")
    if kwargs.get("output_attentions"):
        raise ValueError(
            "`output_attentions` is True, fulgurite does not make the weights; use attn_implementation='eager'"
        )
    if kwargs.get("cache") is not None or kwargs.get("block_table") is not None:
        raise NotImplementedError("`cache`: paged caches are not here; use another attn_implementation for serving")
    for name, value_given in kwargs.items():
        if name not in _HARMLESS and hasattr(value_given, "shape") and hasattr(value_given, "dtype"):
            raise NotImplementedError(
                f"`{name}` is a tensor that {type(module).__name__} hands to its attention, and fulgurite does not "
                "know what it changes; use another attn_implementation for this model"
            )
    q, k, v = (rows(x.transpose(1, 2)) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux}
    bias = position_bias
    if isinstance(attention_mask, TracedMask) and attention_mask.lengths != (q.shape[1], k.shape[1]):
        attention_mask = _cut(attention_mask, module, q.shape[1], k.shape[1])
    if isinstance(attention_mask, TracedMask):
        options["mask_mod"] = attention_mask
    elif attention_mask is not None:
        dense = attention_mask[..., : k.shape[1]]
        if dense.ndim == 2:
            dense = dense[:, None, None, :].bool()
        if str(dense.dtype) == "torch.bool":
            options["mask"] = dense
        else:
            bias = dense if bias is None else bias + dense
    else:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        options["causal"] = bool(causal) and q.shape[1] > 1
        if sliding_window is not None:
            options["window"] = (sliding_window - 1, None if causal else sliding_window - 1)
    if kwargs.get("cu_seq_lens_q") is not None and attention_mask is None and q.shape[0] == 1:
        options["cu_seqlens"] = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
        o = attention(q[0], k[0], v[0], bias=bias, **options)
        return o[None], None
    return attention(q, k, v, bias=bias, **options), None


def register_with_diffusers(name: str = NAME) -> None:
    """Registers the attention backend "fulgurite" with diffusers, for `model.set_attention_backend("fulgurite")`.

    From then on, a model none of whose layers asks for an attention backend raises an error with its name if it is
    given this one; diffusers would keep its own attention without a word.
    """
    try:
        from diffusers import ModelMixin
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as cause:
        raise ImportError("diffusers 0.35 or later is needed: pip install diffusers") from cause
    if name not in AttentionBackendName._value2member_map_:
        # The names of backends are an enumeration, and registering needs a member.
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[name] = member
        AttentionBackendName._member_names_.append(member._name_)
    _AttentionBackendRegistry.register(AttentionBackendName(name))(diffusers_attention)
    _backends.add(name)
    chosen = ModelMixin.set_attention_backend
    if not hasattr(chosen, "fulgurite"):
        ModelMixin.set_attention_backend = _checking_backend(chosen)


_backends: set[str] = set()


def _checking_backend(chosen):
    """The method by which a diffusers model takes a backend, with a check that one of its layers will use ours."""

    @functools.wraps(chosen)
    def checked(self, backend):
        processors = [getattr(module, "processor", None) for module in self.modules()]
        if str(backend).lower() in _backends and not any(hasattr(each, "_attention_backend") for each in processors):
            raise ValueError(
                f"`backend` is {backend!r}, but no layer of {type(self).__name__} asks for an attention backend, "
                f"allowed: models whose attention processors do; this one keeps its own"
            )
        return chosen(self, backend)

    checked.fulgurite = True
    return checked


def diffusers_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Attention of one layer of a diffusers model: `[batch, sequence, heads, head_dim]` in and out."""
    refuse(return_lse=(return_lse, False), parallel_config=(_parallel_config, None))
    if attn_mask is not None and attn_mask.ndim == 2 and tuple(attn_mask.shape) == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # one row of keys for each sequence
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)
