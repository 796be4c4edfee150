"""Errors in the words of the function that was called: argument names, order of axes, unsupported arguments."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Callable, TypeVar

if TYPE_CHECKING:
    from typing_extensions import ParamSpec

    P = ParamSpec("P")

R = TypeVar("R")

# A message about q, k or v, and the four axes of a shape in it.
_IS_ROWS = re.compile("`[qkv]` ")
_HEADS = re.compile(r"\[([\w ]+), ([\w ]+), ([\w ]+), ([\w ]+)\]")


def renaming(names: dict[str, str], heads_first: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turns the argument names in messages into those of the decorated function, whose signature stays.

    `heads_first` also shows the shapes of q, k and v with heads before the sequence.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except ValueError as error:
                text = str(error)
                renamed = _HEADS.sub(r"[\1, \3, \2, \4]", text) if heads_first and _IS_ROWS.match(text) else text
                for own, theirs in names.items():
                    renamed = renamed.replace(f"`{own}`", f"`{theirs}`")
                if renamed == text:
                    raise
                raise type(error)(renamed) from error.__cause__

        return call

    return decorate


def refuse(**arguments):
    """Raises if one of the arguments differs from its default: `name=(value, default)`."""
    for name, (value, *defaults) in arguments.items():
        if not any(value is default or (isinstance(value, (int, float)) and value == default) for default in defaults):
            shown = "a tensor" if hasattr(value, "shape") else repr(value)
            raise NotImplementedError(f"`{name}` is {shown}, allowed: {defaults[0]!r}; fulgurite does not have it")


def check_dropout(dropout_p):
    """Rejects dropout, which is not supported."""
    if not isinstance(dropout_p, (int, float)) or dropout_p != 0:
        raise ValueError(
            f"`dropout_p` is {dropout_p!r}, allowed: 0.0; fulgurite has no dropout, a random mask could not be checked"
        )
