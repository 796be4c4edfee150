"""torch.ops.fulgurite: forward and backward with shapes for tracing, so that torch.compile sees one node each.

This module is imported only if torch is available. The operators take the description of a call as text, which is
complete: a compiled graph has the same meaning in another process.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from . import _describe, _dispatch

_library = torch.library.Library("fulgurite", "DEF")
# A compiler must not change strides unnoticed: any strides work, except on the last axis.
_tags = tuple(
    getattr(torch.Tag, name) for name in ("needs_exact_strides", "pt2_compliant_tag") if hasattr(torch.Tag, name)
)
_library.define(
    "forward(Tensor q, Tensor k, Tensor v, Tensor[] extras, str description) -> (Tensor, Tensor)", tags=_tags
)
_library.define(
    "backward(Tensor q, Tensor k, Tensor v, Tensor[] extras, Tensor o, Tensor lse, Tensor d_o, Tensor? d_lse, "
    "str description) -> Tensor[]",
    tags=_tags,
)

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_casting = getattr(torch._C, "_is_any_autocast_enabled", None) or (lambda: torch.is_autocast_enabled("cpu"))


def takes(
    q,
    k,
    v,
    extras,
    # Looked up once: each lookup costs as much as the check itself.
    compiling=torch.compiler.is_dynamo_compiling,
    modes=torch._C._len_torch_dispatch_stack,
    casting=_casting,
    recording=torch.is_grad_enabled,
) -> bool:
    """Whether a call has to go through the operators."""
    if compiling():
        return True
    if forward_ad._current_level >= 0:
        _no_tangents(q, k, v, extras)
    if type(q) not in _PLAIN:
        if isinstance(q, torch.Tensor):
            return True
        for name, x in (("k", k), ("v", v)):
            if recording() and getattr(x, "requires_grad", False):
                raise ValueError(f"`q` is a {type(q).__name__}, allowed: a torch tensor where `{name}` needs a gradient")
        return False
    if modes() or casting():
        return True
    if not recording():
        return False
    try:
        if q.requires_grad or k.requires_grad or v.requires_grad:
            return True
    except AttributeError:  # an array of another library
        return any(getattr(x, "requires_grad", False) for x in (q, k, v, *extras))
    return bool(extras) and any(getattr(x, "requires_grad", False) for x in extras)


def _no_tangents(*tensors):
    """Rejects tensors with tangents: forward-mode derivatives are not supported, and None would be taken for zero."""
    for x in (*tensors[:3], *tensors[3]):
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("fulgurite has no forward-mode derivatives (JVP); use backward()")


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated again: they pass through, and differentiating them raises an error."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("fulgurite's gradients cannot be differentiated again (create_graph=True)")


def _once(ctx, gradients, given):
    """The gradients, connected to their inputs if autograd builds a graph of them."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return gradients
    there = [at for at, x in enumerate(gradients) if x is not None]
    depends = [x for x in (*ctx.saved_tensors, *given) if x is not None and x.requires_grad]
    tied = _Once.apply(len(there), *(gradients[at] for at in there), *depends)
    gradients = list(gradients)
    for at, x in zip(there, tied):
        gradients[at] = x
    return gradients


def forward(q, k, v, extras, text):
    """Computes (o, lse) with the operator."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"`{name}` is a {type(x).__name__} beside torch tensors, allowed: a torch tensor")
        if x.device != q.device:
            raise ValueError(f"`{name}` is on {x.device}, `q` on {q.device}, allowed: one device")
    extras = [x if isinstance(x, torch.Tensor) else torch.from_numpy(x).to(q.device) for x in extras]
    for role, x in zip(_describe.roles(text), extras):
        if x.device != q.device:
            raise ValueError(f"`{role}` is on {x.device}, `q` on {q.device}, allowed: one device")
    if (
        type(q) in _PLAIN
        and q.device.type in _KERNELS
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._len_torch_dispatch_stack()
    ):
        return _Eager.apply(q, k, v, text, *extras)
    return torch.ops.fulgurite.forward(q, k, v, extras, text)


# Tracing a callable runs Python code that a graph cannot contain: such calls cause a graph break.
between_graphs = torch.compiler.disable


def autocast(*tensors):
    """Casts the tensors as autocast requires, if it is active."""
    device = tensors[0].device.type
    # torch raises for devices without autocast, such as "meta"; a later check names them.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _forward(q, k, v, extras, description):
    with torch._C._AutoDispatchBelowAutograd():
        return _dispatch.description(description).forward(q, k, v, extras, None, True)


def _backward(q, k, v, extras, o, lse, d_o, d_lse, description):
    if d_o.is_cuda:  # TMA reads rows of contiguous elements
        d_o, d_lse = d_o.contiguous(), None if d_lse is None else d_lse.contiguous()
        # One logit per head, whose gradient is summed in f32.
        extras = [x.float() if role == "sinks" else x for role, x in zip(_describe.roles(description), extras)]
    with torch._C._AutoDispatchBelowAutograd():
        return _dispatch.description(description).backward(q, k, v, extras, (o, lse, d_o, d_lse), None)


# Implementations by device. A device that is added here is supported everywhere.
_KERNELS = {"cpu": (_forward, _backward), "cuda": (_forward, _backward)}
for _device, (_one, _other) in _KERNELS.items():
    _library.impl("forward", _one, _device.upper())
    _library.impl("backward", _other, _device.upper())


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


def _save(ctx, description, inputs, outputs):
    ctx.description, ctx.count = description, len(inputs) - 3
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *outputs)


def _derive(ctx, d_o, d_lse, backward=None):
    """Gradients of q, k and v, and of the extra tensors; None for a tensor without one."""
    q, k, v, *extras, o, lse = ctx.saved_tensors  # read once: a checkpoint drops saved tensors after access
    backward = backward or _KERNELS[q.device.type][1]
    d_o = torch.zeros_like(o) if d_o is None else d_o
    d_lse = None if d_lse is None else d_lse.float()
    d_q, d_k, d_v, *others = backward(q, k, v, extras, o, lse, d_o, d_lse, ctx.description)
    d_extras = [None] * ctx.count
    for at, gradient in zip(_describe.gradients(ctx.description), others):
        d_extras[at] = gradient.to(extras[at].dtype)
    return d_q, d_k, d_v, d_extras


def _setup(ctx, inputs, output):
    q, k, v, extras, description = inputs
    _save(ctx, description, (q, k, v, *extras), output)


def _derive_by_operator(ctx, d_o, d_lse):
    with torch.no_grad():
        d_q, d_k, d_v, d_extras = _derive(ctx, d_o, d_lse, torch.ops.fulgurite.backward)
    d_q, d_k, d_v, *d_extras = _once(ctx, [d_q, d_k, d_v, *d_extras], (d_o, d_lse))
    return d_q, d_k, d_v, d_extras, None


torch.library.register_autograd("fulgurite::forward", _derive_by_operator, setup_context=_setup, lib=_library)


class _Eager(torch.autograd.Function):
    """The operators without tracing or compilation: the general path costs more than twice as much."""

    @staticmethod
    def forward(ctx, q, k, v, description, *extras):
        outputs = _KERNELS[q.device.type][0](q, k, v, extras, description)
        _save(ctx, description, (q, k, v, *extras), outputs)
        return outputs

    @staticmethod
    def backward(ctx, d_o, d_lse):
        with torch.no_grad():
            d_q, d_k, d_v, d_extras = _derive(ctx, d_o, d_lse)
        d_q, d_k, d_v, *d_extras = _once(ctx, [d_q, d_k, d_v, *d_extras], (d_o, d_lse))
        return (d_q, d_k, d_v, None, *d_extras)
