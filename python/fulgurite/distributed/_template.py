"""The two operators that PyTorch's own ring takes (`_templated_ring_attention` and its backward)."""

from __future__ import annotations

import torch

from .._api import attention, attention_backward
from .._messages import check_dropout
from ._ring import _wide

Tensor = torch.Tensor


def ring_op(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, logsumexp) of `[batch, heads, sequence, head_dim]`, for `op` of PyTorch's `_templated_ring_attention`.

    On the CPU, `out` is float32 also for 16-bit inputs, so that parts are not rounded: cast the result of the ring.
    """
    check_dropout(dropout_p)
    with torch.no_grad():
        query, key, value = (_wide(x.transpose(1, 2)) for x in (query, key, value))
        out, lse = attention(query, key, value, causal=_top_left(is_causal), scale=scale, return_lse=True)
    return out.transpose(1, 2), lse


def ring_op_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, for `op` of PyTorch's `_templated_ring_attention_backward`, with
    `grad_out_name="grad_out"`; float32 on the CPU, for its sums."""
    check_dropout(dropout_p)
    with torch.no_grad():
        grad_out, query, key, value, out = (_wide(x.transpose(1, 2)) for x in (grad_out, query, key, value, out))
        found = attention_backward(
            grad_out.contiguous(), query, key, value, out, logsumexp.contiguous(), causal=_top_left(is_causal),
            scale=scale,
        )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in found)


def _top_left(is_causal):
    """torch aligns a causal mask with the first query and the first key."""
    return "top-left" if is_causal else False
