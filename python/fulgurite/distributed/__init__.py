"""Sequences divided among ranks, on `torch.distributed`: attention in rings, by exchange of heads, and both; the gated
delta rule.

>>> from fulgurite.distributed import context_parallel_attention, sequence_layout, shard_sequence
>>> layout = sequence_layout(tokens.shape[1], ranks=4)               # the same on every rank
>>> mine = shard_sequence(tokens, layout)                            # the rows of this rank
>>> q, k, v = project(mine)
>>> o = context_parallel_attention(q, k, v, causal=True, balance=layout)

Process groups come from the caller: gloo for the CPU, NCCL for GPUs. `docs/guide/distributed.md` is the guide.
"""

from __future__ import annotations

try:
    import torch.distributed  # noqa: F401
except ImportError as cause:
    raise ImportError("fulgurite.distributed needs torch with torch.distributed; install torch") from cause

from ._attention import bytes_sent, context_parallel_attention, shard_sequence, unshard_sequence
from ._blocks import block_attention, block_attention_backward, sm_margin
from ._delta import context_parallel_gated_delta_rule
from ._exchange import MismatchError, PeerError, Span, timeline, traffic, write_trace
from ._layout import Layout, sequence_layout
from ._template import ring_op, ring_op_backward

__all__ = [
    "Layout",
    "MismatchError",
    "PeerError",
    "Span",
    "block_attention",
    "block_attention_backward",
    "bytes_sent",
    "context_parallel_attention",
    "context_parallel_gated_delta_rule",
    "ring_op",
    "ring_op_backward",
    "sequence_layout",
    "shard_sequence",
    "sm_margin",
    "timeline",
    "traffic",
    "unshard_sequence",
    "write_trace",
]
