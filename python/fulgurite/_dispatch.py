"""The single path of every call: a description and tensors in, tensors out.

torch tensors that take part in autograd or in a compiled graph go through the operators of `_torch_ops`; everything
else goes directly to the extension. Both end in `python/src/dispatch.rs`, which branches by device.
"""

from __future__ import annotations

import sys

from ._fulgurite import Description

_MAX_KNOWN = 4096
# Descriptions by their text, and by the options of a plain call, which then needs no text.
_known: dict[str | tuple | bool, Description] = {}
_ops = None


def description(text: str) -> Description:
    """The prepared description of this text."""
    found = _known.get(text)
    if found is None:
        found = Description(text)
        remember(text, found)
    return found


def remember(key, found: Description) -> None:
    """Caches a description and drops the oldest if there are too many. A key that cannot be hashed is not cached."""
    try:
        _known[key] = found
    except TypeError:
        return
    if len(_known) > _MAX_KNOWN:
        _known.pop(next(iter(_known)), None)


def ops():
    """The torch operators; None if torch is not in use."""
    global _ops
    if _ops is None and "torch" in sys.modules:
        library = sys.modules["torch"].library
        # torch registers operators once in a process: a second import of the package takes those of the first.
        _ops = getattr(library, "_fulgurite_ops", None)
        if _ops is None:
            from . import _torch_ops

            _ops = library._fulgurite_ops = _torch_ops
    return _ops


def forward(text, q, k, v, extras=(), out=None, want_lse=False):
    """Computes o, or (o, lse)."""
    torch_ops = ops()
    if torch_ops is not None and torch_ops.takes(q, k, v, extras):
        if out is not None:
            raise ValueError("`out` was given, allowed: only without gradients and outside torch.compile; leave it out")
        o, lse = torch_ops.forward(q, k, v, extras, text)
        return (o, lse) if want_lse else o
    return description(text).forward(q, k, v, extras, out, want_lse)


def backward(text, q, k, v, extras, saved, out=None):
    """Gradients of q, k, v and of each tensor of `extras` that has one. `saved` is (o, lse, d_o, d_lse or None)."""
    return description(text).backward(q, k, v, extras, saved, out)


if "torch" in sys.modules:
    ops()
