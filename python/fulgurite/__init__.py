"""Fast attention for NumPy, torch and JAX arrays.

>>> import numpy as np, fulgurite
>>> q = k = v = np.random.randn(1, 128, 8, 64).astype(np.float32)   # [batch, sequence, heads, head_dim]
>>> o = fulgurite.attention(q, k, v, causal=True)

NumPy arrays, torch tensors and arrays that support DLPack (such as JAX's) are read in place, with any strides as long
as the last axis is contiguous; results are of the same kind. torch tensors have gradients, and torch.compile sees one
operator. Programs that JAX traces call `fulgurite.jax.attention`. Invalid calls raise ValueError with a message that
says what is allowed.

`attention` covers all features. The functions of flash-attn (`flash_attn_func` and its relatives) and of torch
(`scaled_dot_product_attention`, `flex_attention`) offer them under familiar signatures, and
`register_with_transformers()` registers `attn_implementation="fulgurite"`, `register_with_diffusers()` the attention
backend of that name. `python -m fulgurite doctor` describes the
machine.

`fulgurite.cluster`, `fulgurite.neighbors` and `fulgurite.decomposition` contain k-means, HDBSCAN, DBSCAN, nearest
neighbours, PCA and truncated SVD under scikit-learn's names. `fulgurite.distributed` divides sequences among the ranks
of torch.distributed; `fulgurite.shards` and `fulgurite.ray` divide rows among workers. `fulgurite.fla` has the gated
delta rule under flash-linear-attention's names; `parallax_attention` and `lighthouse_attention` are other variants.
`fulgurite.ops` has the registered operators over whole tensors.
"""

try:
    from . import _fulgurite  # noqa: F401
except ImportError as error:
    if "subinterpreter" not in str(error):
        raise
    raise ImportError(
        "fulgurite was imported in a sub-interpreter, allowed: the main interpreter of a process; use threads, whose "
        "calls run without the GIL, or processes"
    ) from error

from . import fla, ops
from ._api import attention, attention_backward
from ._combine import flash_attn_combine, get_scheduler_metadata, merge
from ._fulgurite import __version__, engines
from .capture import captured
from .flash import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .flash_attn_interface import register_as_flash_attn
from .huggingface import register_with_diffusers, register_with_transformers
from .insight import Counters, Explanation, Findings, attention_counters, doctor, explain
from .kvcache import KvCache
from .masks import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
from .sage import sageattn
from .sdpa import AuxOutput, AuxRequest, flex_attention, scaled_dot_product_attention
from .skipping import Skip, SkipReport, classify_heads, skip_report
from .trace import TraceError
from .variants import (
    lighthouse_attention,
    lighthouse_attention_backward,
    parallax_attention,
    parallax_attention_backward,
)

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Counters",
    "Explanation",
    "Findings",
    "KvCache",
    "Skip",
    "SkipReport",
    "TraceError",
    "__version__",
    "and_masks",
    "attention",
    "attention_backward",
    "attention_counters",
    "captured",
    "classify_heads",
    "create_block_mask",
    "create_mask",
    "doctor",
    "engines",
    "explain",
    "fla",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "get_scheduler_metadata",
    "lighthouse_attention",
    "lighthouse_attention_backward",
    "merge",
    "noop_mask",
    "ops",
    "or_masks",
    "parallax_attention",
    "parallax_attention_backward",
    "register_as_flash_attn",
    "register_with_diffusers",
    "register_with_transformers",
    "sageattn",
    "scaled_dot_product_attention",
    "skip_report",
]
