"""The gated delta rule over ranks: each rank has a part of the sequence, and the state is handed on.

A rank maps the state before its rows to the state after them, S -> A S + B. A is the state after its rows with v = 0
from the identity, and B that from 0. Ranks compute A and B at the same time and exchange them, so that none waits for
the rows of the ranks before it. Gradients of states go the other way: d_S -> A^T d_S + C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..fla import chunk_gated_delta_rule, chunk_gated_delta_rule_backward
from ._exchange import Group, agree, between_graphs
from ._layout import Layout, offsets_of, sequence_layout

Tensor = torch.Tensor


@between_graphs
def context_parallel_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    length: int | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    threads: int | None = None,
    timeout: float | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`fulgurite.fla.chunk_gated_delta_rule` over a sequence whose rows are divided among the ranks of a group.

    q, k, v, g, beta  the rows of this rank, as `shard_sequence` gives them for a layout with balance "contiguous"
    group             the ranks, in the order of their rows; default: all
    length            rows of the whole sequence; default: the rows of all ranks, or the end of `cu_seqlens`
    cu_seqlens        cumulative offsets of documents in the whole sequence, the same on all ranks; the batch axis is
                      then 1. Without `initial_state` and `output_final_state`
    initial_state     before the first row of the sequence, the same on all ranks
    output_final_state
                      also return the state after the last row, on every rank
    timeout, check    as for `context_parallel_attention`
    the rest          as for `chunk_gated_delta_rule`

    Returns (o, final_state); rows that are padding get 0. Gradients of weights (A_log, dt_bias) and of initial_state
    are this rank's share: sum them over ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("there is no process group, allowed: after torch.distributed.init_process_group")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"`group` is a {type(group).__name__}, allowed: a ProcessGroup")
    every = Group(group, timeout)
    options = {
        "scale": scale,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_gate_in_kernel": use_gate_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "threads": threads,
    }
    error = shard = None
    tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    try:
        shard = _shard(every, tensors, length, cu_seqlens, output_final_state, options)
    except (ValueError, NotImplementedError) as wrong:
        error = wrong
    if check:
        agree([every], torch.device("cpu") if error else q.device, None if error else _account(tensors, shard), error)
    elif error:
        raise error
    out, state = _Delta.apply(every, shard, output_final_state, *tensors)
    return out, state if output_final_state else None


class _Shard(NamedTuple):
    """The rows of this rank."""

    # Rows of the whole sequence, and of this rank without padding.
    length: int
    rows: int
    # Offsets of the documents of this rank; a document may start before its first row and end after its last.
    documents: tuple[int, ...]
    # Whether the first document started before.
    continues: bool
    options: dict


def _shard(every, tensors, length, cu_seqlens, output_final_state, options):
    """The rows of this rank, checked: the call must be one that `chunk_gated_delta_rule` takes."""
    q, k, v, g, beta, initial_state, A_log, dt_bias = tensors
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if not isinstance(x, Tensor) or x.ndim != (4 if name in "qkv" else 3) or x.shape[:2] != q.shape[:2]:
            form = "[batch, rows, heads, dim]" if name in "qkv" else "[batch, rows, value_heads]"
            raise ValueError(f"`{name}` is {getattr(x, 'shape', x)}, allowed: a tensor {form}, with the rows of `q`")
    documents = None
    if cu_seqlens is not None:
        documents = offsets_of(cu_seqlens)
        if q.shape[0] != 1 or initial_state is not None or output_final_state:
            raise ValueError(
                "`cu_seqlens` was given, allowed: a batch of 1, without `initial_state` and `output_final_state`"
            )
        if length not in (None, documents[-1]):
            raise ValueError(f"`length` is {length!r}, `cu_seqlens` ends at {documents[-1]}, allowed: the same")
        length = documents[-1]
    length = q.shape[1] * every.size if length is None else length
    layout: Layout = sequence_layout(length, every.size, balance="contiguous")
    if layout.rows != q.shape[1]:
        raise ValueError(f"`q` has {q.shape[1]} rows, allowed: {layout.rows}, the share of {length} rows; pad it")
    start, stop = (min(at, length) for at in layout.slots[every.rank][0])
    bounds = (0, length) if documents is None else documents
    cuts = sorted({start, stop, *(x for x in bounds if start < x < stop)})
    continues = start not in bounds if documents is not None else True
    # One row of the call, so that a call that the kernel refuses is refused before anything is sent.
    one = [x[:, :1] if x.shape[1] else x.new_zeros(x.shape[0], 1, *x.shape[2:]) for x in (q, k, v, g, beta)]
    with torch.no_grad():
        one = [torch.zeros_like(x) for x in one]
        chunk_gated_delta_rule(*one, initial_state=initial_state, A_log=A_log, dt_bias=dt_bias, **options)
    options = {**options, "scale": None if options["scale"] is None else float(options["scale"])}
    return _Shard(length, stop - start, tuple(x - start for x in cuts), continues, options)


def _account(tensors, shard):
    """Properties of the call that must be equal on all ranks, by name."""
    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    account = {name: None if x is None else f"{x.dtype} {list(x.shape)}" for name, x in zip(names, tensors)}
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    options = {name: value for name, value in shard.options.items() if name != "threads"}
    return {**account, "length": shard.length, "options": options, "requires_grad": grad}


class _Delta(torch.autograd.Function):
    """(o, final state) of the rows of this rank."""

    @staticmethod
    def forward(ctx, every, shard, want_final, *tensors):
        *rows, first, A_log, dt_bias = tensors
        rows = [x[:, : shard.rows] for x in rows]
        gates = {"A_log": A_log, "dt_bias": dt_bias}
        before, after, products = _scan(every, shard, rows, gates, first)
        started = _initial(shard, before)
        q, v = tensors[0], tensors[2]
        out = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
        if shard.rows:
            part, _ = _rule(shard, rows, gates, started, False)
            out[:, : shard.rows] = part
        ctx.every, ctx.shard, ctx.products = every, shard, products
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, started)
        return out, after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_o, d_after):
        *tensors, started = ctx.saved_tensors
        *full, first, A_log, dt_bias = tensors
        every, shard, products = ctx.every, ctx.shard, ctx.products
        rows = [x[:, : shard.rows] for x in full]
        gates = {"A_log": A_log, "dt_bias": dt_bias}
        d_o = torch.zeros_like(full[2], dtype=full[0].dtype) if d_o is None else d_o
        d_o = d_o[:, : shard.rows].contiguous()
        zero = torch.zeros((full[2].shape[0], *started.shape[1:]), device=started.device)
        d_after = zero if d_after is None else d_after.float()
        # The gradient of the state before the rows of each rank, if the state after them had none.
        alone = zero if every.size == 1 else _d_before(shard, _gradients(shard, rows, gates, started, d_o, zero), zero)
        d_state = _scan_back(every, products, alone, d_after)
        found = _gradients(shard, rows, gates, started, d_o, d_state)
        result = []
        for x, gradient in zip(full, found[:5] if found else [None] * 5):
            d = torch.zeros_like(x)
            if gradient is not None:
                d[:, : shard.rows] = gradient
            result.append(d)
        d_first = None
        if first is not None:
            d_first = _d_before(shard, found, d_state) if every.rank == 0 else torch.zeros_like(first)
            d_first = d_first.to(first.dtype)
        weights = iter(found[6:] if found else ())
        d_weights = [None if x is None else next(weights, torch.zeros_like(x)).to(x.dtype) for x in (A_log, dt_bias)]
        return None, None, None, *result, d_first, *d_weights


def _rule(shard, rows, gates, started, final):
    """The rule over the rows of this rank."""
    offsets = None
    if len(shard.documents) > 2:
        offsets = torch.tensor(shard.documents, dtype=torch.int32)
    return chunk_gated_delta_rule(
        *rows, initial_state=started, output_final_state=final, cu_seqlens=offsets, **gates, **shard.options
    )


def _gradients(shard, rows, gates, started, d_o, d_state):
    """The gradients of the rule over the rows of this rank, given that of the state after its last row."""
    if not shard.rows:
        return None
    offsets, d_final = None, d_state
    if len(shard.documents) > 2:
        offsets = torch.tensor(shard.documents, dtype=torch.int32)
        d_final = torch.zeros_like(started)
        d_final[-1:] = d_state
    return chunk_gated_delta_rule_backward(
        d_o, *(x.contiguous() for x in rows), d_final_state=d_final.contiguous(), initial_state=started,
        cu_seqlens=offsets, **gates, **shard.options,
    )  # fmt: skip


def _d_before(shard, found, d_state):
    """The gradient of the state before the first row of this rank."""
    if not shard.continues:
        return torch.zeros_like(d_state)
    if found is None:
        return d_state
    return found[5][:1] if len(shard.documents) > 2 else found[5]


def _initial(shard, before):
    """The state before each document of this rank."""
    documents = len(shard.documents) - 1
    if not shard.continues:
        before = torch.zeros_like(before)
    if documents <= 1:
        return before
    return torch.cat([before, before.new_zeros(documents - 1, *before.shape[1:])])


def _scan(every, shard, rows, gates, first):
    """The state before the rows of this rank, the state after all rows, and the matrix A of each rank."""
    q, _, v, _, _ = rows
    shape = (q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    start = torch.zeros(shape, device=q.device) if first is None else first.float()
    # The rows that reach the end of this rank: those of its last document.
    tail = shard.documents[-2] if len(shard.documents) > 1 else 0
    last = [x[:, tail:] for x in rows]
    unit = torch.eye(shape[2], device=q.device).expand(*shape[:2], shape[2], shape[2]).contiguous()
    product, added = unit, torch.zeros(shape, device=q.device)
    if shard.rows:
        final = {"output_final_state": True, **gates, **shard.options}
        added = chunk_gated_delta_rule(*last, **final)[1]
        nothing = torch.zeros((*last[2].shape[:3], shape[2]), dtype=v.dtype, device=q.device)
        product = chunk_gated_delta_rule(*last[:2], nothing, *last[3:], initial_state=unit, **final)[1]
    if tail or not shard.continues:
        product = torch.zeros_like(product)  # the last document starts on this rank
    all_ = every.gather("states", "handing states on", torch.cat([product, added], -1))
    products, sums = all_[..., : shape[2]], all_[..., shape[2] :]
    state, before = start.double(), None
    for rank in range(every.size):
        if rank == every.rank:
            before = state.float()
        state = products[rank].double() @ state + sums[rank].double()
    return before, state.float(), products


def _scan_back(every, products, alone, d_after):
    """The gradient of the state after the rows of this rank; `d_after` is that of the final state on this rank."""
    if every.size == 1:
        return d_after
    all_ = every.gather("states", "handing gradients of states on", torch.stack([alone, d_after]))
    d_state = all_[:, 1].double().sum(0)
    for rank in range(every.size - 1, every.rank, -1):
        d_state = products[rank].double().transpose(-1, -2) @ d_state + all_[rank, 0].double()
    return d_state.float()
