"""transformers: `register_with_transformers()`, then `attn_implementation="fulgurite"`.

The mask of a model arrives as a function of indices and is traced into an expression, so that no `[q_len, k_len]` mask
is made; padding is a captured tensor. Inside torch.compile masks are dense booleans, as for "sdpa".
"""

from __future__ import annotations

import functools
from typing import Any

from ._api import attention
from .capture import TracedMask, Tracer
from .trace import TraceError

NAME = "fulgurite"
# Tensors that models hand to every attention: known below, or without effect on its result.
_HARMLESS = {
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "num_items_in_batch",
    "position_ids", "seq_idx", "token_type_ids",
}  # fmt: skip


def register_with_transformers(name: str = NAME) -> None:
    """Registers `attn_implementation="fulgurite"` with transformers: the attention and its masks."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as cause:
        raise ImportError("transformers 4.53 or later is needed: pip install transformers") from cause
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask_for)


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
    return TracedMask(tracer.mask("mask_function", shifted), tracer, dense)


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
                f"`{name}` is a tensor that {type(module).__name__} hands to its attention, and fulgurite does not know what "
                "it changes; use another attn_implementation for this model"
            )
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux}
    bias = position_bias
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
