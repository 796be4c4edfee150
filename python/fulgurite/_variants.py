"""Variants of attention: one path for all of them, a description and tensors in, tensors out.

The description is a text, complete as that of attention; `python/src/variants` parses it and documents the entries.
torch tensors that take part in autograd or in a compiled graph go through the operators of `_torch_variants`,
everything else goes directly to the extension.
"""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple

from . import _dispatch
from ._describe import gradients as described_gradients
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
    # (tensors by name, description) -> (shape, name of the type if it is not that of q) of each output.
    outputs: Callable[[dict[str, Any], str], list[tuple[tuple, str | None]]]
    # How many of the outputs, from the first, have gradients.
    differentiable: int
    # How many of the outputs, from the first, backward reads.
    saved: int
    # Which of the tensors that not every call has have gradients, as indices among them.
    others: Callable[[str], list[int]] = lambda text: []


def _delta_outputs(tensors, text):
    v = tensors["v"]
    all_ = [(tuple(v.shape), None)]
    if ";state;" in text:
        offsets = tensors.get("cu_seqlens")
        sequences = v.shape[0] if offsets is None else offsets.shape[0] - 1
        dims = (tensors["q"].shape[-1], v.shape[-1])
        all_.append(((sequences, v.shape[-2], *(dims[::-1] if ";v_first;" in text else dims)), "float32"))
    return all_


def _parallax_outputs(tensors, text):
    q, v = tensors["q"], tensors["v"]
    if "with cu_seqlens_q;" in text:
        lse = (q.shape[1], q.shape[0])
    else:
        lse = (q.shape[0], q.shape[2], q.shape[1])
    return [((*q.shape[:-1], v.shape[-1]), None), (lse, "float32"), (lse, "float32")]


def _lighthouse_outputs(tensors, text):
    return [((*tensors["q"].shape[:-1], tensors["v"].shape[-1]), None)]


def _skip_outputs(tensors, text):
    q, k = tensors["q"], tensors["k"]
    found = re.search(r"^skip [^;]*tile:(\d+)x(\d+)", text)
    rows, cols = (int(found[1]), int(found[2])) if found else (128, 64)
    if "with cu_seqlens_q;" in text:  # a sequence may be as long as all of them
        batch, heads, q_len, k_len = tensors["cu_seqlens_q"].shape[0] - 1, q.shape[1], q.shape[0], k.shape[0]
    else:
        batch, heads, q_len, k_len = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    kept = (batch, heads, -(-q_len // rows), -(-k_len // cols))
    return [*_parallax_outputs(tensors, text)[:2], (kept, "int32")]


def _floats(text):
    return [at for at, name in enumerate(roles(text)) if name not in _INTEGERS]


KINDS = {
    "gated_delta": Kind(("q", "k", "v"), _delta_outputs, 2, 0, _floats),
    "lighthouse": Kind(("q", "k", "v"), _lighthouse_outputs, 1, 0),
    "parallax": Kind(("q", "k", "v", "r"), _parallax_outputs, 1, 3),
    "skip": Kind(("q", "k", "v"), _skip_outputs, 2, 3, described_gradients),
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
    return [*range(count), *(count + at for at in of.others(text))]


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
