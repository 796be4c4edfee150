"""What notebooks show of a value: HTML without scripts that follows the page's light or dark scheme."""

from __future__ import annotations

import html
from collections.abc import Iterable

import numpy

# More tiles than this along an axis are drawn as one: a picture is looked at, not counted.
_MOST_TILES = 96
_KINDS = (("skipped", "#8884"), ("partial", "#e8a33d"), ("full", "#2f6fde"))


def rows(title: str, pairs: Iterable[tuple[str, object]]) -> str:
    """A table of names and values, escaped."""
    body = "".join(
        f"<tr><th style='text-align:left'>{html.escape(str(name))}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in pairs
    )
    return f"<table><caption style='text-align:left'>{html.escape(title)}</caption>{body}</table>"


def tiles(title: str, kinds: numpy.ndarray) -> str:
    """A picture of `[rows, columns]` tiles: 0 skipped, 1 partial, 2 full; queries go down, keys to the right."""
    step = max(1, -(-max(kinds.shape, default=1) // _MOST_TILES))
    size = 4 if max(kinds.shape, default=1) > 48 else 8
    height, width = (-(-length // step) for length in kinds.shape)
    cells = []
    for row in range(height):
        for column in range(width):
            part = kinds[row * step : (row + 1) * step, column * step : (column + 1) * step]
            # A group is full or skipped only if all of it is.
            kind = int(part.flat[0]) if (part == part.flat[0]).all() else 1
            if kind:
                place = f"x='{column * size}' y='{row * size}' width='{size}' height='{size}'"
                cells.append(f"<rect {place} fill='{_KINDS[kind][1]}'/>")
    legend = "".join(
        f"<span style='color:{color}'>&#9632;</span> {name} {share(kinds, kind):.1%} &nbsp; "
        for kind, (name, color) in enumerate(_KINDS)
    )
    frame = f"viewBox='0 0 {width * size} {height * size}' width='{width * size}' height='{height * size}'"
    picture = f"<svg xmlns='http://www.w3.org/2000/svg' {frame} style='background:#8882'>{''.join(cells)}</svg>"
    below = f"<div>queries &#8595;, keys &#8594; &nbsp; {legend}</div>"
    return f"<div><div>{html.escape(title)}</div>{picture}{below}</div>"


def share(kinds: numpy.ndarray, kind: int) -> float:
    """The share of tiles of a kind."""
    return float((kinds == kind).mean()) if kinds.size else 0.0
