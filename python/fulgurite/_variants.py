"""Variants of attention: one path for all of them, a description and tensors in, tensors out.

The description is a text, complete as that of attention; `python/src/variants` parses it and documents the entries.
torch tensors that take part in autograd or in a compiled graph go through the operators of `_torch_variants`,
everything else goes directly to the extension.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

from . import _dispatch
from ._describe import roles
from ._fulgurite import Variant

_MAX_KNOWN = 4096
_known: dict[str, Variant] = {}

# Tensors of integers, which have no gradients.
_INTEGERS = {"cu_seqlens"}


class Kind(NamedTuple):
    """What torch has to know about a variant without running it."""

    # Names of the tensors that every call has; their gradients have their types. All others are f32.
    rows: tuple[str, ...]
    # (tensors by name, description) -> (shape, whether it is f32 regardless of q) of each output.
    outputs: Callable[[dict[str, Any], str], list[tuple[tuple, bool]]]
    # How many of the outputs, from the first, have gradients.
    differentiable: int
    # How many of the outputs, from the first, backward reads.
    saved: int
    # Whether the tensors that not every call has, other than integers, have gradients.
    others: bool = False


def _delta_outputs(tensors, text):
    v = tensors["v"]
    all_ = [(tuple(v.shape), False)]
    if ";state;" in text:
        offsets = tensors.get("cu_seqlens")
        sequences = v.shape[0] if offsets is None else offsets.shape[0] - 1
        dims = (tensors["q"].shape[-1], v.shape[-1])
        all_.append(((sequences, v.shape[-2], *(dims[::-1] if ";v_first;" in text else dims)), True))
    return all_


def _parallax_outputs(tensors, text):
    q, v = tensors["q"], tensors["v"]
    if "with cu_seqlens_q;" in text:
        lse = (q.shape[1], q.shape[0])
    else:
        lse = (q.shape[0], q.shape[2], q.shape[1])
    return [((*q.shape[:-1], v.shape[-1]), False), (lse, True), (lse, True)]


def _lighthouse_outputs(tensors, text):
    return [((*tensors["q"].shape[:-1], tensors["v"].shape[-1]), False)]


KINDS = {
    "gated_delta": Kind(("q", "k", "v"), _delta_outputs, 2, 0, True),
    "lighthouse": Kind(("q", "k", "v"), _lighthouse_outputs, 1, 0),
    "parallax": Kind(("q", "k", "v", "r"), _parallax_outputs, 1, 3),
}


def kind(text: str) -> Kind:
    """The kind of variant that a description asks for."""
    return KINDS[text[: text.index(";")].split(" ")[0]]


def names(text: str) -> list[str]:
    """The name of each tensor."""
    return [*kind(text).rows, *roles(text)]


def gradients(text: str) -> list[int]:
    """Which tensors have gradients."""
    of = kind(text)
    count = len(of.rows)
    return [at for at, name in enumerate(names(text)) if at < count or of.others and name not in _INTEGERS]


def variant(text: str) -> Variant:
    """The prepared variant of this text."""
    found = _known.get(text)
    if found is None:
        found = _known[text] = Variant(text)
        if len(_known) > _MAX_KNOWN:
            _known.pop(next(iter(_known)), None)
    return found


def forward(text: str, tensors: list[Any]) -> list[Any]:
    """The outputs of a call."""
    ops = _dispatch.ops()
    if ops is not None and ops.takes(tensors[0], tensors[1], tensors[2], tensors[3:]):
        from . import _torch_variants

        return _torch_variants.forward(tensors, text)
    return variant(text).forward(tensors)


def backward(text: str, tensors: list[Any], outputs: list[Any], d_outputs: list[Any]) -> list[Any]:
    """The gradients of the tensors that have one, for arrays without autograd."""
    return variant(text).backward(tensors, outputs, d_outputs)
