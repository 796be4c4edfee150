"""Block skipping: which tiles of scores `attention(..., skip=...)` leaves out, and what was left out."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from . import _describe, _variants
from ._arrays import shape_of

Array = Any


class Skip:
    """The levels of block skipping, for `skip=` of `attention`. Its text (`str(skip)`) works there too.

    classes       keys that a head looks at: "dense", "window:KEYS:SINKS" or "log", one for all heads or one for each
    mass, top     a proxy keeps the fewest tiles whose shares of the softmax over tile means exceed `mass`, or the share
                  `top` of the tiles; at most one of them
    similarity    tiles whose rows are less similar to each other are kept whatever the proxy says
    threshold     lambda: the kernel drops tiles whose largest weight is below this fraction of the running maximum
    threshold_per_key
                  the same, divided by the number of keys that a row sees
    tile          rows and keys of a tile
    first_tile    whether the first tile is always kept

    >>> str(Skip("window:128:16", threshold=0.001, tile=(64, 64)))
    'window:128:16,lambda:0.001,tile:64x64'
    """

    def __init__(
        self,
        classes: str | Sequence[str] = "dense",
        *,
        mass: float | None = None,
        top: float | None = None,
        similarity: float | None = None,
        threshold: float | None = None,
        threshold_per_key: float | None = None,
        tile: tuple[int, int] = (128, 64),
        first_tile: bool = True,
    ) -> None:
        parts = [classes] if isinstance(classes, str) else [_describe._word("classes", each) for each in classes]
        if mass is not None and top is not None:
            raise ValueError(f"`mass` is {mass} and `top` is {top}, allowed: one of them")
        if similarity is not None and mass is None and top is None:
            raise ValueError(f"`similarity` is {similarity}, allowed: only with `mass` or `top`")
        if threshold is not None and threshold_per_key is not None:
            raise ValueError(f"`threshold` is {threshold} and `threshold_per_key` is {threshold_per_key}, allowed: one")
        near = "" if similarity is None else f":{_describe._number('similarity', similarity)}"
        for name, key, value in (("mass", "mass", mass), ("top", "top", top)):
            if value is not None:
                parts.append(f"{key}:{_describe._number(name, value)}{near}")
        if threshold is not None:
            parts.append(f"lambda:{_describe._number('threshold', threshold)}")
        if threshold_per_key is not None:
            parts.append(f"lambda-per-key:{_describe._number('threshold_per_key', threshold_per_key)}")
        rows, keys = _describe.pair("tile", tile, "rows and keys")
        parts.append(f"tile:{_describe._integer('tile', rows)}x{_describe._integer('tile', keys)}")
        if not first_tile:
            parts.append("no-first-tile")
        self._text = ",".join(parts)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Skip({self._text!r})"


class SkipReport(NamedTuple):
    """What a call with `skip` computed: tiles left at each level, and a bound of the error of the last level."""

    visible: int
    by_class: int
    by_proxy: int
    kept: int
    # Of the difference between o and its value with every tile that the proxy keeps.
    error_bound: float
    # int32 `[batch, heads, query tiles, key tiles]`: 1 where a tile was computed.
    tiles: Any


def entry(skip: Any) -> str:
    """The first entry of the description."""
    text = str(skip) if isinstance(skip, Skip) else skip
    if not isinstance(text, str) or not text or any(c in " ;\t\n" for c in text):
        raise ValueError(f"`skip` is {skip!r}, allowed: a Skip, or its text as in 'window:128:16,tile:64x64'")
    return f"skip {text};"


def skip_report(q: Array, k: Array, v: Array, *, skip: str | Skip, **options: Any) -> SkipReport:
    """Runs `attention(q, k, v, skip=skip, **options)` and reports the tiles that it computed."""
    from ._api import _described

    text, extras = _described(q, k, v, **options)
    outputs, counts = _variants.variant(entry(skip) + text).counted([q, k, v, *extras])
    return SkipReport(
        counts.visible, counts.by_class, counts.by_proxy, counts.kept, counts.error_bound, outputs[2]
    )


def classify_heads(
    q: Array,
    k: Array,
    *,
    windows: Sequence[int] = (64, 128, 256, 512, 1024),
    sinks: int = 16,
    share: float = 0.99,
    scale: float | None = None,
) -> list[str]:
    """The class of each head, from the q and k of a model on sample data: calibration for `Skip(classes=...)`.

    q, k          `[batch, tokens, heads, head_dim]`, as the model gives them to causal attention
    windows       sizes to try, smallest first
    sinks         keys at the start that every query sees
    share         of the softmax that the keys of a class must hold, averaged over queries

    A head gets the smallest window whose keys hold that share, or "dense".
    """
    from ._api import attention

    shape = shape_of("q", q, "[batch, tokens, heads, head_dim]")
    if len(shape) != 4 or not shape[0] * shape[1] * shape[2]:
        raise ValueError(f"`q` has shape {list(shape)}, allowed: [batch, tokens, heads, head_dim] with elements")
    if not 0 < share <= 1:
        raise ValueError(f"`share` is {share}, allowed: above 0 up to 1")
    import numpy

    if hasattr(q, "detach"):
        q, k = q.detach(), k.detach()
    options = {"causal": True, "scale": scale, "return_lse": True}
    whole = numpy.asarray(attention(q, k, k, **options)[1], numpy.float64)
    classes = ["dense"] * shape[2]
    for size in sorted(windows, reverse=True):
        size, first = int(_describe._integer("windows", size)), int(_describe._integer("sinks", sinks))
        seen = lambda b, h, i, j, size=size, first=first: (i - j < size) | (j < first)
        part = numpy.asarray(attention(q, k, k, mask_mod=seen, **options)[1], numpy.float64)
        held = numpy.exp(part - whole).mean(axis=(0, 2))
        for head in range(shape[2]):
            if held[head] >= share:
                classes[head] = f"window:{size}:{first}"
    return classes
