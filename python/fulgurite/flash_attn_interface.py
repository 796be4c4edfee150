"""The private functions of flash-attn 2.8 that ring-flash-attention and long-context-attention call, on torch tensors.

>>> fulgurite.register_as_flash_attn()      # before they are imported
>>> from ring_flash_attn import zigzag_ring_flash_attn_func

`_flash_attn_forward` and its relatives have the arguments and the results of flash-attn's. Dropout is refused.
The public functions are here too, as in flash-attn's module of this name.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

from ._api import attention, attention_backward
from ._arrays import rows
from ._messages import check_dropout, refuse, renaming
from .flash import (
    _NAMES,
    _causal,
    _softcap,
    _window,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

Tensor = Any
# The version of flash-attn whose arguments these are.
_VERSION = "2.8.3"
_PUBLIC = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
_MESSAGES = {**_NAMES, "d_o": "dout", "lse": "softmax_lse", "cu_seqlens": "cu_seqlens_q"}

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    *(function.__name__ for function in _PUBLIC),
    "register_as_flash_attn",
]


def register_as_flash_attn() -> None:
    """Makes `import flash_attn` and `from flash_attn.flash_attn_interface import ...` give fulgurite's functions, in
    this process. For libraries that import flash-attn by name; call it before they are imported.

    Where flash-attn itself is installed or imported, this is an error: one of the two would be used by accident.
    """
    known = sys.modules.get("flash_attn")
    if known is not None and getattr(known, "__fulgurite__", False):
        return
    if known is not None or importlib.util.find_spec("flash_attn") is not None:
        raise ValueError("`flash_attn` is installed, allowed: only where it is not; uninstall it, or call it directly")
    package = types.ModuleType("flash_attn", __doc__)
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None, is_package=True)
    package.__path__ = []
    package.__version__, package.__fulgurite__ = _VERSION, True
    for function in _PUBLIC:
        setattr(package, function.__name__, function)
    package.flash_attn_interface = sys.modules[__name__]
    sys.modules["flash_attn"] = package
    sys.modules["flash_attn.flash_attn_interface"] = sys.modules[__name__]


def _options(dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes):
    check_dropout(dropout_p)
    return {
        "scale": softmax_scale,
        "causal": _causal(causal),
        "window": _window((left, right)),
        "softcap": _softcap(softcap),
        "alibi_slopes": alibi_slopes,
    }


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """(out, softmax_lse, None, rng_state), without gradients; softmax_lse is float32 `[batch, heads, sequence]`."""
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _forward(q, k, v, options)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """`_flash_attn_forward` over packed sequences; softmax_lse is `[heads, total]`."""
    refuse(block_table=(block_table, None), leftpad_k=(leftpad_k, None), seqused_k=(seqused_k, None))
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    options.update(cu_seqlens=(cu_seqlens_q, cu_seqlens_k), max_lengths=(max_seqlen_q, max_seqlen_k))
    return _forward(q, k, v, options)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients into dq, dk and dv; `out` and `softmax_lse` may be those over more keys than `k` has.

    Returns the sum of dout out over head_dim, float32 `[batch, heads, sequence]`.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    return _gradients(dout, q, k, v, out, softmax_lse, (dq, dk, dv), deterministic, options)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` over packed sequences; returns `[heads, total]`."""
    options = _options(dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    options.update(cu_seqlens=(cu_seqlens_q, cu_seqlens_k), max_lengths=(max_seqlen_q, max_seqlen_k))
    return _gradients(dout, q, k, v, out, softmax_lse, (dq, dk, dv), deterministic, options)


# The functions themselves are not decorated: libraries read their arguments with `inspect.getfullargspec`.
@renaming(_MESSAGES)
def _forward(q, k, v, options):
    """The four results of flash-attn: out, LSE, no probabilities, and a generator state that nothing reads."""
    import torch

    with torch.no_grad():
        out, lse = attention(rows(q), rows(k), rows(v), return_lse=True, **options)
    return out, lse, None, torch.zeros(2, dtype=torch.int64)


@renaming(_MESSAGES)
def _gradients(dout, q, k, v, out, softmax_lse, into, deterministic, options):
    import torch

    with torch.no_grad():
        found = attention_backward(
            rows(dout), rows(q), rows(k), rows(v), rows(out), softmax_lse.contiguous(), deterministic=deterministic,
            **options,
        )  # fmt: skip
        for to, gradient in zip(into, found):
            if to is not None:
                to.copy_(gradient)
        return (dout.float() * out.float()).sum(-1).transpose(-1, -2)
