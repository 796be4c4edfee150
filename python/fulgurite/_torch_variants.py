"""torch.ops.fulgurite.variant_forward and variant_backward: variants of attention with autograd and torch.compile.

This module is imported only if torch is available. As in `_torch_ops`, a graph holds the description as text.
"""

from __future__ import annotations

import torch

from . import _torch_ops, _variants

_library = _torch_ops._library
_library.define("variant_forward(Tensor[] tensors, str description) -> Tensor[]", tags=_torch_ops._tags)
_library.define(
    "variant_backward(Tensor[] tensors, Tensor[] outputs, Tensor?[] d_outputs, str description) -> Tensor[]",
    tags=_torch_ops._tags,
)


def forward(tensors, text):
    """Computes the outputs with the operator."""
    tensors = list(tensors)
    q = tensors[0]
    for at, name in enumerate(_variants.names(text)):
        x = tensors[at]
        if not isinstance(x, torch.Tensor):
            if at < len(_variants.kind(text).rows):
                raise ValueError(f"`{name}` is a {type(x).__name__} beside torch tensors, allowed: a torch tensor")
            x = tensors[at] = torch.from_numpy(x).to(q.device)
        if x.device != q.device:
            raise ValueError(f"`{name}` is on {x.device}, `q` on {q.device}, allowed: one device")
    if q.device.type not in ("cpu", "meta"):
        raise ValueError(f"`q` is on {q.device}, allowed here: cpu; move it with .cpu()")
    rows = len(_variants.kind(text).rows)
    tensors[:rows] = _torch_ops.autocast(*tensors[:rows])
    if (
        type(q) in _torch_ops._PLAIN
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._len_torch_dispatch_stack()
    ):
        return list(_Eager.apply(text, *tensors))
    return torch.ops.fulgurite.variant_forward(tensors, text)


def _forward(tensors, description):
    with torch._C._AutoDispatchBelowAutograd():
        return _variants.variant(description).forward(tensors)


def _backward(tensors, outputs, d_outputs, description):
    with torch._C._AutoDispatchBelowAutograd():
        return _variants.variant(description).backward(tensors, outputs, d_outputs)


_library.impl("variant_forward", _forward, "CPU")
_library.impl("variant_backward", _backward, "CPU")


@torch.library.register_fake("fulgurite::variant_forward", lib=_library)
def _(tensors, description):
    named = dict(zip(_variants.names(description), tensors))
    outputs = _variants.kind(description).outputs(named, description)
    return [tensors[0].new_empty(shape, dtype=name and getattr(torch, name)) for shape, name in outputs]


@torch.library.register_fake("fulgurite::variant_backward", lib=_library)
def _(tensors, outputs, d_outputs, description):
    rows = len(_variants.kind(description).rows)
    return [
        tensors[at].new_empty(tensors[at].shape, dtype=None if at < rows else torch.float32)
        for at in _variants.gradients(description)
    ]


def _save(ctx, description, tensors, outputs):
    ctx.description, ctx.count = description, len(tensors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *outputs[: _variants.kind(description).saved])


def _derive(ctx, d_outputs, backward):
    """The gradient of each tensor; None for a tensor without one."""
    saved = ctx.saved_tensors  # read once: a checkpoint drops saved tensors after access
    tensors, outputs = list(saved[: ctx.count]), list(saved[ctx.count :])
    kind = _variants.kind(ctx.description)
    d_outputs = list(d_outputs)[: kind.differentiable]
    gradients = [None] * ctx.count
    if any(d is not None for d in d_outputs):
        with torch.no_grad():
            found = backward(tensors, outputs, d_outputs, ctx.description)
        for at, gradient in zip(_variants.gradients(ctx.description), found):
            gradients[at] = gradient.to(tensors[at].dtype)
    return _torch_ops._once(ctx, gradients, d_outputs)


def _setup(ctx, inputs, output):
    tensors, description = inputs
    _save(ctx, description, tensors, output)


def _derive_by_operator(ctx, d_outputs):
    return _derive(ctx, d_outputs, torch.ops.fulgurite.variant_backward), None


torch.library.register_autograd("fulgurite::variant_forward", _derive_by_operator, setup_context=_setup, lib=_library)


class _Eager(torch.autograd.Function):
    """The operators without tracing or compilation: the general path costs more than twice as much."""

    @staticmethod
    def forward(ctx, description, *tensors):
        outputs = _forward(list(tensors), description)
        _save(ctx, description, tensors, outputs)
        ctx.mark_non_differentiable(*outputs[_variants.kind(description).differentiable :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *d_outputs):
        return (None, *_derive(ctx, d_outputs, _backward))
