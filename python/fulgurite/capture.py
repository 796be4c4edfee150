"""Runs callables under tracing, and handles captured arrays and masks made of masks."""

from __future__ import annotations

import functools
import operator
import sys
import types
from typing import Any, Callable

from . import _composed  # noqa: F401  (adds functions to those that can be traced)
from ._arrays import is_torch, kind_of, readable
from .trace import Captured, Traced, TraceError, as_float, call, has_traced, lift, tracing

# Names that descriptions reserve for tensors with a dedicated role.
_TAKEN = ("alibi_slopes", "alibi_slopes_of_batch", "bias", "mask", "prefix_lengths", "documents_q", "documents_k")


class TracedMask:
    """A mask that was already traced: its expression, and the arrays that it captured.

    Code that expects a torch tensor of booleans can index it, compare it, add it to scores and read its attributes;
    `make` then builds the dense tensor. `lengths` are the numbers of queries and keys that it is for, or None.
    """

    __slots__ = ("_dense", "_make", "lengths", "text", "tracer")

    def __init__(self, text: str, tracer: Tracer, make: Callable | None = None, lengths: tuple[int, int] | None = None):
        self.text, self.tracer, self._make, self._dense = text, tracer, make, None
        self.lengths = lengths

    def dense(self):
        """The mask as a tensor of booleans; True keeps the key."""
        if self._dense is None:
            if self._make is None:
                raise AttributeError("this mask has no dense form, allowed: mask_mod=")
            self._dense = self._make()
        return self._dense

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, at):
        return self.dense()[at]

    def __add__(self, scores):
        return self.__torch_function__(operator.add, (), (scores, self))

    __radd__ = __add__

    def __eq__(self, other):
        return self.dense() == other

    def __ne__(self, other):
        return self.dense() != other

    def __invert__(self):
        return ~self.dense()

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        import torch
        from torch.utils._pytree import tree_map

        kwargs = kwargs or {}
        adds = function.__name__.strip("_") in ("add", "iadd", "radd")
        given = (*args, *kwargs.values())
        others = [x.dtype for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()]

        def plain(x):
            if not isinstance(x, cls):
                return x
            if not (adds and others):
                return x.dense()
            # A mask that is added to scores is 0 where it keeps a key.
            scores = torch.zeros(x.shape, dtype=others[0], device=x.device)
            return scores.masked_fill(~x.dense(), torch.finfo(others[0]).min)

        return function(*tree_map(plain, args), **tree_map(plain, kwargs))


class Tracer:
    """Traces the callables of one call; an array that several of them capture becomes one tensor."""

    # Lengths of the sequence, for fulgurite's own callables.
    q_len, k_len = Traced("q_len", "int"), Traced("k_len", "int")

    def __init__(self):
        self.arrays: dict[int, tuple[str, Any, Any, str]] = {}
        self.names: dict[int, str] = {}

    def name_of(self, array):
        """(name, shape, kind) of a captured array."""
        known = self.arrays.get(id(array))
        if known is None:
            name = self.names.get(id(array), "captured")
            taken = {entry[0] for entry in self.arrays.values()}.union(_TAKEN)
            if not name.isidentifier() or name in taken:
                name = next(f"{name}_{n}" for n in range(2, 10_000) if f"{name}_{n}" not in taken)
            kind = kind_of(array)
            usable = readable(name, array)
            usable = usable.reshape(1) if not array.shape else usable
            known = self.arrays[id(array)] = name, array, usable, kind
        return known[0], tuple(known[1].shape), known[3]

    def captured(self):
        """Names and arrays, in the order of their first use."""
        return [(name, usable) for name, _, usable, _ in self.arrays.values()]

    def adopt(self, traced: TracedMask) -> str:
        """The expression of a mask that was already traced; its arrays become part of this call."""
        names = {name: array for name, array, _, _ in self.arrays.values()}
        for name, array, _, _ in traced.tracer.arrays.values():
            if names.get(name, array) is not array:
                raise ValueError(f"two masks capture arrays called `{name}`; give them names of their own")
        self.arrays.update(traced.tracer.arrays)
        return traced.text

    def score(self, arg: str, function: Callable) -> str:
        """The expression of a score modifier."""
        stand_ins = (Traced("score", "float"), *_indices())
        return as_float(self._run(arg, function, stand_ins, "(score, b, h, q_idx, kv_idx)")).text

    def mask(self, arg: str, function: Callable) -> str:
        """The expression of a mask."""
        if isinstance(function, TracedMask):
            return self.adopt(function)
        result = self._run(arg, function, _indices(), "(b, h, q_idx, kv_idx)")
        if result.kind != "bool":
            raise ValueError(f"`{arg}` gives a {result.kind}, allowed: a condition, True keeps the key")
        return result.text

    def _run(self, arg, function, stand_ins, form) -> Traced:
        if not callable(function):
            raise ValueError(f"`{arg}` is a {type(function).__name__}, allowed: a callable {form}")
        function = self._rebind(function, {})
        tracing.tracers.append(self)
        try:
            if "torch" in sys.modules:
                with _mode()():
                    return lift(function(*stand_ins))
            return lift(function(*stand_ins))
        except TraceError as cause:
            raise TraceError(f"`{arg}`: {cause}") from cause
        except TypeError as cause:
            raise ValueError(f"`{arg}` could not be traced as {form}: {cause}") from cause
        except IndexError as cause:
            hint = "wrap arrays that are reached through other objects: fulgurite.captured(array)"
            raise ValueError(f"`{arg}` could not be traced: {cause}; {hint}") from cause
        finally:
            tracing.tracers.pop()

    def _wrap(self, name, value, seen):
        """Replaces a captured value: arrays by stand-ins, functions by functions that capture stand-ins."""
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, Combined)):
            return self._rebind(value, seen)
        if type(value) in (tuple, list) and any(map(callable, value)):  # masks that a function joins
            return type(value)(self._wrap(name, each, seen) for each in value)
        if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
            self.names.setdefault(id(value), name)
            # torch tensors stay: a function mode sees them wherever they come from.
            if not is_torch(value) and tuple(value.shape) != ():
                return Captured(value)
        return value

    def _rebind(self, function, seen):
        """The function with captured arrays replaced, so that stand-ins can index them."""
        if id(function) in seen:
            return seen[id(function)]
        seen[id(function)] = function
        wrap = lambda name, value: self._wrap(name, value, seen)  # noqa: E731
        if isinstance(function, Combined):
            result = Combined(function.op, [self._rebind(each, seen) for each in function.parts])
        elif isinstance(function, functools.partial):
            args = [wrap("captured", value) for value in function.args]
            kwargs = {name: wrap(name, value) for name, value in function.keywords.items()}
            result = functools.partial(self._rebind(function.func, seen), *args, **kwargs)
        elif isinstance(function, types.MethodType):
            inner = self._rebind(function.__func__, seen)
            result = types.MethodType(inner, function.__self__)
        elif isinstance(function, types.FunctionType):
            result = _with_captures(function, wrap)
        else:
            result = function
        seen[id(function)] = result
        return result


def _with_captures(function, wrap):
    code, changed = function.__code__, False
    cells = []
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            cells.append(cell)
            continue
        other = wrap(name, value)
        changed |= other is not value
        cells.append(cell if other is value else types.CellType(other))
    globals_ = function.__globals__
    replaced = {}
    for name in code.co_names:
        value = globals_.get(name)
        if value is None or (isinstance(value, types.FunctionType) and value.__globals__ is not globals_):
            continue  # missing, or a function of another module, which has its own arrays
        other = wrap(name, value)
        if other is not value:
            replaced[name] = other
    if replaced:
        globals_, changed = {**globals_, **replaced}, True
    defaults = tuple(wrap("captured", value) for value in function.__defaults__ or ())
    changed |= any(a is not b for a, b in zip(defaults, function.__defaults__ or ()))
    if not changed:
        return function
    result = types.FunctionType(code, globals_, function.__name__, defaults or None, tuple(cells) or None)
    result.__kwdefaults__ = function.__kwdefaults__
    return result


def _indices():
    return tuple(Traced(name, "int") for name in ("b", "h", "q", "k"))


def captured(array: Any) -> Captured:
    """Wraps an array that a callable reaches through an object or a container, so that traced values can index it.

    Not needed for torch tensors, nor for arrays that are variables, defaults or arguments of `functools.partial`.
    """
    return Captured(array)


class Combined:
    """Joins masks by `and` or by `or`."""

    def __init__(self, op: str, parts: list):
        self.op, self.parts = op, parts

    def __call__(self, b, h, q_idx, kv_idx):
        result = None
        for part in self.parts:
            keep = part(b, h, q_idx, kv_idx)
            result = keep if result is None else (result & keep if self.op == "and" else result | keep)
        return result


@functools.lru_cache(None)
def _mode():
    """A torch function mode that sees every torch function, including those on tensors that a callable captured."""
    from torch.overrides import TorchFunctionMode

    class Tracing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if has_traced(args) or (kwargs and has_traced(kwargs.values())):
                return call(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return Tracing
