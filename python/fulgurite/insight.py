"""What a call does: which engine computes it and why (`explain`), and how often it rescaled (`attention_counters`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from . import _dispatch, _html

Array = Any


class Explanation(Mapping[str, Any]):
    """How a call would be computed, as a mapping; `str()` gives the lines that the command prints.

    engine        name of the engine that computes it, or None if none can
    products      the unit that computes its products, or None if the engine does not say
    way           on the CPU: tiles, what the mask becomes, the work of the products and the cost of modifiers, or None
    engines       every engine of this machine with its verdict
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        engines, chosen, products, way = {}, None, None, None
        for line in lines:
            name, _, verdict = line.partition(": ")
            engines[name] = verdict
            if verdict.startswith("runs it"):
                chosen = name
                _, _, unit = verdict.partition("; products on ")
                unit, _, rest = unit.partition("; way: ")
                products, way = unit or None, rest or None
        self._values = {"engine": chosen, "products": products, "way": way, "engines": engines}

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def __repr__(self) -> str:
        return f"Explanation({self._values!r})"

    def _repr_html_(self) -> str:
        first = [("engine", self["engine"]), ("products", self["products"] or "")]
        return _html.rows("which engine computes this call", [*first, *self["engines"].items()])


class Findings(Mapping[str, Any]):
    """What `doctor` found, as a mapping; `str()` gives the lines that `python -m fulgurite doctor` prints."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        self._values, self._text = values, text

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Findings({self._values!r})"

    def _repr_html_(self) -> str:
        found = dict(self._values)
        pairs = [(name, version or "not installed") for name, version in found.pop("versions").items()]
        for name, value in found.items():
            pairs.append((name, "; ".join(value) if isinstance(value, list) else value))
        return _html.rows("what fulgurite found on this machine", pairs)


def doctor(engine: str = "best") -> Findings:
    """Versions, machine, GPU and the engine that is chosen, with the reason."""
    from .__main__ import found

    return Findings(*found(engine))


def explain(q: Array, k: Array, v: Array, **options: Any) -> Explanation:
    """Which engine computes `attention(q, k, v, **options)` and why. Nothing is computed.

    The options are those of `attention` that describe the problem or its computation.
    """
    description, extras = _prepared(q, k, v, options)
    return Explanation(description.explain(q, k, v, extras))


class Counters(NamedTuple):
    """Counters of a forward call; each row and block of keys counts once."""

    # Blocks whose maximum exceeded that of the row so far.
    rescales_possible: int
    # Rescales that were done among these.
    rescales_done: int
    # Blocks that were computed again because an optimistic maximum was too low.
    blocks_redone: int


def attention_counters(q: Array, k: Array, v: Array, **options: Any) -> Counters:
    """Runs `attention(q, k, v, **options)` on host arrays and counts its rescales, to compare rescale policies."""
    description, extras = _prepared(q, k, v, options)
    return Counters(*description.counted(q, k, v, extras)[2])


def _prepared(q, k, v, options):
    from ._api import _described

    try:
        text, extras = _described(q, k, v, **options)
    except TypeError as error:
        unknown = str(error).partition("unexpected keyword argument ")[2]
        if not unknown:
            raise
        raise TypeError(f"unexpected option {unknown}, allowed: those of `attention` for the problem") from None
    plain = [x.detach() if hasattr(x, "detach") else x for x in extras]
    return _dispatch.description(text), plain
