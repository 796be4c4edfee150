"""torch.ops.fulgurite: forward and backward with shapes for tracing, so that torch.compile sees one node each.

This module is imported when torch is there. The operators take the description of a call as text, which is complete:
a compiled graph that is loaded by another process means the same.
"""

from __future__ import annotations

import torch

from . import _describe, _dispatch

_library = torch.library.Library("fulgurite", "DEF")
_library.define("forward(Tensor q, Tensor k, Tensor v, Tensor[] extras, str description) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor o, Tensor lse, Tensor d_o, Tensor? d_lse, "
    "str description) -> Tensor[]"
)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_casting = getattr(torch._C, "_is_any_autocast_enabled", None) or (lambda: torch.is_autocast_enabled("cpu"))


def takes(
    q,
    k,
    v,
    extras,
    # Looked up once: each question costs as much as the answer.
    compiling=torch.compiler.is_dynamo_compiling,
    modes=torch._C._len_torch_dispatch_stack,
    casting=_casting,
    recording=torch.is_grad_enabled,
) -> bool:
    """Whether a call has to go through the operators."""
    if compiling():
        return True
    if type(q) not in _PLAIN:
        return isinstance(q, torch.Tensor)
    if modes() or casting():
        return True
    if not recording():
        return False
    if q.requires_grad or getattr(k, "requires_grad", False) or getattr(v, "requires_grad", False):
        return True
    return bool(extras) and any(getattr(x, "requires_grad", False) for x in extras)


def forward(q, k, v, extras, text):
    """(o, lse) by the operator."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"`{name}` is a {type(x).__name__} beside torch tensors, allowed: a torch tensor")
        if x.device != q.device:
            raise ValueError(f"`{name}` is on {x.device}, `q` on {q.device}, allowed: one device")
    extras = [x if isinstance(x, torch.Tensor) else torch.from_numpy(x).to(q.device) for x in extras]
    for role, x in zip(_describe.roles(text), extras):
        if x.device != q.device:
            raise ValueError(f"`{role}` is on {x.device}, `q` on {q.device}, allowed: one device")
    return torch.ops.fulgurite.forward(q, k, v, extras, text)


# Tracing a callable is Python that a graph cannot hold: such calls stand between two graphs.
between_graphs = torch.compiler.disable


def autocast(*tensors):
    """The tensors as autocast wants them, where it is on."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _forward(q, k, v, extras, description):
    with torch._C._AutoDispatchBelowAutograd():
        return _dispatch.description(description).forward(q, k, v, extras, None, True)


def _backward(q, k, v, extras, o, lse, d_o, d_lse, description):
    with torch._C._AutoDispatchBelowAutograd():
        return _dispatch.description(description).backward(q, k, v, extras, (o, lse, d_o, d_lse), None)


for _device in ("CPU", "CUDA"):
    _library.impl("forward", _forward, _device)
    _library.impl("backward", _backward, _device)


def _is_packed(description):
    return "with cu_seqlens_q;" in description


@torch.library.register_fake("fulgurite::forward", lib=_library)
def _(q, k, v, extras, description):
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if _is_packed(description):
        return o, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@torch.library.register_fake("fulgurite::backward", lib=_library)
def _(q, k, v, extras, o, lse, d_o, d_lse, description):
    rows = [x.new_empty(x.shape) for x in (q, k, v)]
    return rows + [
        extras[at].new_empty(extras[at].shape, dtype=torch.float32) for at in _describe.gradients(description)
    ]


def _setup(ctx, inputs, output):
    q, k, v, extras, description = inputs
    ctx.description, ctx.count = description, len(extras)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *extras, *output)


def _derive(ctx, d_o, d_lse):
    q, k, v, *extras, o, lse = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(o)
    d_lse = None if d_lse is None else d_lse.float()
    d_q, d_k, d_v, *others = torch.ops.fulgurite.backward(q, k, v, extras, o, lse, d_o, d_lse, ctx.description)
    d_extras = [None] * ctx.count
    for at, gradient in zip(_describe.gradients(ctx.description), others):
        d_extras[at] = gradient.to(extras[at].dtype)
    return d_q, d_k, d_v, d_extras, None


torch.library.register_autograd("fulgurite::forward", _derive, setup_context=_setup, lib=_library)
