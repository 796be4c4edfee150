"""Traces Python callables in FlexAttention's form into expressions.

    score_mod(score, b, h, q_idx, kv_idx) -> score          mask_mod(b, h, q_idx, kv_idx) -> bool

A callable runs once with stand-ins that record the operations on them. It may use operators, the functions of torch and
NumPy that are listed in `FUNCTIONS`, and methods of the same names; stand-ins index the arrays that the callable
captures. An operation that cannot be recorded raises an error that names it. Gradients need no second function.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from typing import Any, Callable

from ._arrays import is_torch

# A hand-written modifier has a few hundred characters.
_MAX_CHARACTERS = 40_000


class _Tracing(threading.local):
    """The active tracers of this thread, innermost last; they name captured arrays."""

    def __init__(self):
        self.tracers: list[Any] = []


tracing = _Tracing()


class TraceError(ValueError):
    """A callable performs an operation that cannot be recorded."""


def untraceable(what):
    """Raises the error for an operation that expressions do not have."""
    raise TraceError(
        f"{what} cannot be traced; allowed: arithmetic, comparisons, & | ^ ~ << >>, {', '.join(sorted(FUNCTIONS))}"
    )


class Traced:
    """Stands for a number or a condition while a callable is traced."""

    __slots__ = ("kind", "text")
    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]
    # Attributes that torch's own helpers read from an index.
    ndim = 0
    shape = ()
    device = None

    def __init__(self, text: str, kind: str):
        if len(text) > _MAX_CHARACTERS:
            raise TraceError("the expression is too large; move constant parts into a tensor and index it")
        self.text, self.kind = text, kind

    def __repr__(self):
        return f"<{self.kind} {self.text}>"

    def __add__(self, other):
        return arithmetic("add", self, other)

    def __radd__(self, other):
        return arithmetic("add", other, self)

    def __sub__(self, other):
        return arithmetic("sub", self, other)

    def __rsub__(self, other):
        return arithmetic("sub", other, self)

    def __mul__(self, other):
        return arithmetic("mul", self, other)

    def __rmul__(self, other):
        return arithmetic("mul", other, self)

    def __truediv__(self, other):
        return _true_divide(self, other)

    def __rtruediv__(self, other):
        return _true_divide(other, self)

    def __floordiv__(self, other):
        return _floor_divide(self, other)

    def __rfloordiv__(self, other):
        return _floor_divide(other, self)

    def __mod__(self, other):
        return _remainder(self, other)

    def __rmod__(self, other):
        return _remainder(other, self)

    def __pow__(self, other):
        return _power(self, other)

    def __rpow__(self, other):
        return _power(other, self)

    def __neg__(self):
        return unary("neg", self)

    def __pos__(self):
        return self

    def __abs__(self):
        return unary("abs", self)

    def __eq__(self, other):
        return _compare("eq", self, other)

    def __ne__(self, other):
        return _not(_compare("eq", self, other))

    def __lt__(self, other):
        return _compare("lt", self, other)

    def __le__(self, other):
        return _compare("le", self, other)

    def __gt__(self, other):
        return _compare("lt", other, self)

    def __ge__(self, other):
        return _compare("le", other, self)

    def __and__(self, other):
        return _logic("and", self, other)

    __rand__ = __and__

    def __or__(self, other):
        return _logic("or", self, other)

    __ror__ = __or__

    def __xor__(self, other):
        return _exclusive(self, other)

    __rxor__ = __xor__

    def __lshift__(self, other):
        return _bits().shift(self, other, True)

    def __rshift__(self, other):
        return _bits().shift(self, other, False)

    def __rlshift__(self, other):
        return _bits().shift(other, self, True)

    def __rrshift__(self, other):
        return _bits().shift(other, self, False)

    def __invert__(self):
        return _not(self)

    def __bool__(self):
        raise TraceError(
            "a traced value was used as a Python condition (`if`, `and`, `or`, `not`, chained comparison); "
            "allowed: torch.where, `&`, `|`, `~`"
        )

    def __index__(self):
        raise TraceError(
            "a traced value was used as a Python integer or an index; index arrays that the callable captures"
        )

    __int__ = __index__
    __iter__ = __index__
    __len__ = __index__

    def __float__(self):
        raise TraceError("a traced value was used as a Python float; use functions of torch or NumPy instead of math")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in FUNCTIONS:
            return functools.partial(FUNCTIONS[name], self)
        untraceable(f"`.{name}` of a traced value")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        if method != "__call__":
            untraceable(f"numpy.{ufunc.__name__}.{method}")
        return call(ufunc, args, kwargs, "numpy")

    def __array_function__(self, func, types, args, kwargs):
        return call(func, args, kwargs)

    @property
    def dtype(self):
        library = sys.modules.get("torch") or __import__("numpy")
        return {"float": library.float32, "int": library.int32}.get(self.kind) or getattr(library, "bool", bool)


class Captured:
    """An array that a callable reads: traced values index it, one per axis."""

    __slots__ = ("array", "at")
    __array_ufunc__ = None

    def __init__(self, array, at=()):
        self.array, self.at = array, at

    def __getitem__(self, index):
        at = self.at + (index if isinstance(index, tuple) else (index,))
        rank = len(self.array.shape)
        if len(at) > rank:
            raise TraceError(
                f"a captured array of shape {list(self.array.shape)} has {len(at)} indices, allowed: {rank}"
            )
        return _load(self.array, at) if len(at) == rank else Captured(self.array, at)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("shape", "dtype", "ndim", "device", "size", "numel") and not self.at:
            return getattr(self.array, name)
        raise TraceError(
            f"`{name}` of a captured array cannot be traced, allowed: indexing it; do it before, outside the callable"
        )


def lift(value) -> Traced:
    """Converts the other operand of an operation to a traced value."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, Captured):
        if not value.array.shape:
            return _load(value.array, ())
        left = len(value.array.shape) - len(value.at)
        raise TraceError(f"a captured array is used with {left} axes left over; index each of its axes")
    if isinstance(value, bool):
        return Traced("true" if value else "false", "bool")
    if isinstance(value, int):
        if not -(2**31) <= value < 2**31:
            raise TraceError(f"{value} does not fit 32 bits")
        return Traced(f"i{value}", "int")
    if isinstance(value, float):
        return Traced(f"f{value!r}", "float")
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if tuple(value.shape) == () and not is_torch(value) and hasattr(value, "item"):
            return lift(value.item())
        return lift(Captured(value))
    raise TraceError(f"a {type(value).__name__} beside a traced value cannot be traced")


def _load(array, at) -> Traced:
    tracer = tracing.tracers[-1] if tracing.tracers else None
    if tracer is None:
        raise TraceError("a captured array was indexed after tracing; do not keep traced values")
    words = []
    for axis, index in enumerate(at):
        if isinstance(index, (slice, type(None), type(Ellipsis))):
            raise TraceError(
                "a slice, None or ... beside a traced index cannot be traced; give one index for each axis"
            )
        index = lift(index)
        if index.kind != "int":
            raise TraceError(f"a captured array is indexed by a {index.kind}, allowed: integers")
        if index.text.startswith("i-"):
            index = lift(int(array.shape[axis]) + int(index.text[1:]))
        words.append(index.text)
    name, shape, kind = tracer.name_of(array)
    if not shape:
        words, at = ["i0"], (0,)
    text = f"load {name} {len(at)} {' '.join(words)}"
    return Traced(f"not eq {text} i0", "bool") if kind == "bool" else Traced(text, kind)


def number(value) -> Traced:
    """Converts booleans to 0 and 1 where numbers are expected."""
    value = lift(value)
    return Traced(f"select {value.text} i1 i0", "int") if value.kind == "bool" else value


def as_float(value) -> Traced:
    value = number(value)
    return value if value.kind == "float" else Traced(f"float {value.text}", "float")


def integer(value) -> Traced:
    """Truncates toward zero, as torch does."""
    value = number(value)
    if value.kind == "int":
        return value
    down, up = f"floor {value.text}", f"neg floor neg {value.text}"
    return Traced(f"select lt {value.text} f0.0 {up} {down}", "int")


def _boolean(value) -> Traced:
    value = lift(value)
    if value.text in ("i0", "i1"):
        return lift(value.text == "i1")
    return value if value.kind == "bool" else _not(_compare("eq", value, 0 if value.kind == "int" else 0.0))


def arithmetic(op, a, b) -> Traced:
    a, b = number(a), number(b)
    return Traced(f"{op} {a.text} {b.text}", "float" if "float" in (a.kind, b.kind) else "int")


def _true_divide(a, b) -> Traced:
    a, b = as_float(a), as_float(b)
    return Traced(f"div {a.text} {b.text}", "float")


def _floor_divide(a, b) -> Traced:
    a, b = number(a), number(b)
    if a.kind == b.kind == "int":
        return Traced(f"div {a.text} {b.text}", "int")
    return as_float(unary("floor", _true_divide(a, b)))


def divide(a, b, rounding_mode=None) -> Traced:
    """torch.div: true division, or rounded down or towards zero."""
    if rounding_mode is None:
        return _true_divide(a, b)
    floor = _floor_divide(a, b)
    if rounding_mode == "floor":
        return floor
    if rounding_mode != "trunc":
        raise TraceError(f"`rounding_mode` is {rounding_mode!r}, allowed: None, 'floor', 'trunc'")
    a, b = number(a), number(b)
    if floor.kind == "int":
        exact, opposite = _compare("eq", floor * b, a), _not(_compare("eq", a < 0, b < 0))
        return where(_not(exact) & opposite, floor + 1, floor)
    quotient = _true_divide(a, b)
    return where(quotient < 0, -as_float(unary("floor", -quotient)), floor)


def _remainder(a, b) -> Traced:
    a, b = number(a), number(b)
    if a.kind == b.kind == "int":
        return Traced(f"rem {a.text} {b.text}", "int")
    return a - b * _floor_divide(a, b)


def _power(a, b) -> Traced:
    if isinstance(a, (int, float)) and not isinstance(a, bool) and a > 0:
        return unary("exp", as_float(b) * math.log(a))
    if not isinstance(b, (int, float)) or isinstance(b, bool):
        untraceable("a power with a traced exponent and a traced base")
    if b == 0.5:
        return unary("sqrt", as_float(a))
    if b != int(b) or abs(b) > 8:
        untraceable(f"the power {b}")
    result = lift(1 if isinstance(b, int) and b >= 0 else 1.0)
    for step in range(abs(int(b))):
        result = number(a) if step == 0 else result * a
    return _true_divide(1.0, result) if b < 0 else result


_FLOATS = ("exp", "log", "sqrt", "tanh")


def unary(op, a) -> Traced:
    a = as_float(a) if op in _FLOATS or op == "floor" else number(a)
    return Traced(f"{op} {a.text}", "int" if op == "floor" else a.kind)


def _compare(op, a, b) -> Traced:
    a, b = number(a), number(b)
    return Traced(f"{op} {a.text} {b.text}", "bool")


def _logic(op, a, b) -> Traced:
    a, b = lift(a), lift(b)
    if not a.kind == b.kind == "bool":
        return _bits().integers("&" if op == "and" else "|", a, b)
    for x, y in ((a, b), (b, a)):
        if x.text in ("true", "false"):
            return y if (x.text == "true") == (op == "and") else x
    return Traced(f"{op} {a.text} {b.text}", "bool")


def _exclusive(a, b) -> Traced:
    a, b = lift(a), lift(b)
    if not a.kind == b.kind == "bool":
        return _bits().integers("^", a, b)
    return _logic("or", a, b) & _not(_logic("and", a, b))


def _bits():
    """Operations on the bits of integers, which are made of other operations."""
    from . import _composed

    return _composed


def _not(a) -> Traced:
    a = lift(a)
    if a.kind == "int":
        return -a - 1
    if a.kind != "bool":
        untraceable(f"`~` of a {a.kind}")
    return Traced(a.text[4:] if a.text.startswith("not ") else f"not {a.text}", "bool")


def where(condition, yes, no) -> Traced:
    condition, yes, no = _boolean(condition), lift(yes), lift(no)
    if yes.kind != no.kind:
        yes, no = number(yes), number(no)
    if yes.kind != no.kind:
        yes, no = as_float(yes), as_float(no)
    return Traced(f"select {condition.text} {yes.text} {no.text}", yes.kind)


def _extreme(op, a, b) -> Traced:
    return arithmetic(op, a, b)


def _clamp(a, min=None, max=None, **numpy) -> Traced:
    min, max = numpy.pop("a_min", min), numpy.pop("a_max", max)
    result = number(a)
    if min is not None:
        result = _extreme("max", result, min)
    return result if max is None else _extreme("min", result, max)


def to(a, *args, **kwargs) -> Traced:
    """Converts to the type that is among the arguments; devices and layouts have no effect."""
    a = lift(a)
    for want in (*args, *kwargs.values()):
        if isinstance(want, Traced):
            return _as(a, want.kind)
        name = getattr(want, "__name__", str(want)).rpartition(".")[2]
        if name in ("double", "half") or name.startswith(("float", "bfloat")):
            return _as(a, "float")
        if name in ("long",) or name.startswith(("int", "uint")):
            return _as(a, "int")
        if name.startswith("bool"):
            return _as(a, "bool")
    return a


def _as(a, kind) -> Traced:
    return {"float": as_float, "int": integer, "bool": _boolean}[kind](a)


def _filled(value):
    def make(_, shape=(), *more, dtype=None, **kwargs):
        if shape not in ((), []) or more:
            untraceable("a new tensor with axes")
        return to(lift(value), dtype) if dtype is not None else lift(value)

    return make


def _add_scaled(op):
    def function(a, b, alpha=1, **kwargs):
        return arithmetic(op, a, b if alpha == 1 else arithmetic("mul", b, alpha))

    return function


FUNCTIONS: dict[str, Callable] = {
    "abs": lambda a: unary("abs", a),
    "exp": lambda a: unary("exp", a),
    "exp2": lambda a: unary("exp", as_float(a) * math.log(2)),
    "log": lambda a: unary("log", a),
    "log2": lambda a: unary("log", a) * (1 / math.log(2)),
    "log1p": lambda a: unary("log", as_float(a) + 1.0),
    "sqrt": lambda a: unary("sqrt", a),
    "rsqrt": lambda a: _true_divide(1.0, unary("sqrt", a)),
    "reciprocal": lambda a: _true_divide(1.0, a),
    "tanh": lambda a: unary("tanh", a),
    "square": lambda a: number(a) * a,
    "sign": lambda a: where(lift(a) > 0, 1, where(lift(a) < 0, -1, 0)),
    "neg": lambda a: unary("neg", a),
    "negative": lambda a: unary("neg", a),
    "positive": number,
    "floor": lambda a: as_float(unary("floor", a)) if number(a).kind == "float" else number(a),
    "ceil": lambda a: -as_float(unary("floor", -as_float(a))) if number(a).kind == "float" else number(a),
    "trunc": lambda a: as_float(integer(a)) if number(a).kind == "float" else number(a),
    "add": _add_scaled("add"),
    "sub": _add_scaled("sub"),
    "subtract": _add_scaled("sub"),
    "rsub": lambda a, b: arithmetic("sub", b, a),
    "mul": lambda a, b: arithmetic("mul", a, b),
    "multiply": lambda a, b: arithmetic("mul", a, b),
    "div": divide,
    "divide": divide,
    "true_divide": _true_divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "mod": _remainder,
    "pow": _power,
    "power": _power,
    "minimum": lambda a, b: _extreme("min", a, b),
    "maximum": lambda a, b: _extreme("max", a, b),
    "min": lambda a, b: _extreme("min", a, b),
    "max": lambda a, b: _extreme("max", a, b),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda a, min: _clamp(a, min),
    "clamp_max": lambda a, max: _clamp(a, None, max),
    "where": where,
    "eq": lambda a, b: _compare("eq", a, b),
    "equal": lambda a, b: _compare("eq", a, b),
    "ne": lambda a, b: _not(_compare("eq", a, b)),
    "not_equal": lambda a, b: _not(_compare("eq", a, b)),
    "lt": lambda a, b: _compare("lt", a, b),
    "less": lambda a, b: _compare("lt", a, b),
    "le": lambda a, b: _compare("le", a, b),
    "less_equal": lambda a, b: _compare("le", a, b),
    "gt": lambda a, b: _compare("lt", b, a),
    "greater": lambda a, b: _compare("lt", b, a),
    "ge": lambda a, b: _compare("le", b, a),
    "greater_equal": lambda a, b: _compare("le", b, a),
    "logical_and": lambda a, b: _logic("and", _boolean(a), _boolean(b)),
    "logical_or": lambda a, b: _logic("or", _boolean(a), _boolean(b)),
    "logical_xor": lambda a, b: _boolean(a) ^ _boolean(b),
    "logical_not": lambda a: _not(_boolean(a)),
    "bitwise_and": lambda a, b: _logic("and", a, b),
    "bitwise_or": lambda a, b: _logic("or", a, b),
    "bitwise_xor": _exclusive,
    "bitwise_left_shift": lambda a, b: _bits().shift(a, b, True),
    "left_shift": lambda a, b: _bits().shift(a, b, True),
    "bitwise_right_shift": lambda a, b: _bits().shift(a, b, False),
    "right_shift": lambda a, b: _bits().shift(a, b, False),
    "bitwise_not": _not,
    "invert": _not,
    "float": as_float,
    "int": integer,
    "long": integer,
    "bool": _boolean,
    "to": to,
    "type": to,
    "type_as": to,
    "astype": to,
    "clone": lift,
    "detach": lift,
    "contiguous": lift,
    "new_ones": _filled(1),
    "new_zeros": _filled(0),
    "ones_like": _filled(1),
    "zeros_like": _filled(0),
}
# Names under which torch passes operators to a function mode.
_OPERATORS = {
    "__radd__": lambda a, b: arithmetic("add", b, a),
    "__rsub__": lambda a, b: arithmetic("sub", b, a),
    "__rmul__": lambda a, b: arithmetic("mul", b, a),
    "__rdiv__": lambda a, b: _true_divide(b, a),
    "__rtruediv__": lambda a, b: _true_divide(b, a),
    "__rfloordiv__": lambda a, b: _floor_divide(b, a),
    "__rmod__": lambda a, b: _remainder(b, a),
    "__rpow__": lambda a, b: _power(b, a),
    "__getitem__": lambda a, index: (a if isinstance(a, Captured) else Captured(a))[index],
    "__and__": lambda a, b: _logic("and", a, b),
    "__rand__": lambda a, b: _logic("and", a, b),
    "__or__": lambda a, b: _logic("or", a, b),
    "__ror__": lambda a, b: _logic("or", a, b),
    "__invert__": _not,
    "__xor__": _exclusive,
    "__rxor__": _exclusive,
    "__lshift__": lambda a, b: _bits().shift(a, b, True),
    "__rlshift__": lambda a, b: _bits().shift(b, a, True),
    "__rshift__": lambda a, b: _bits().shift(a, b, False),
    "__rrshift__": lambda a, b: _bits().shift(b, a, False),
    "__pow__": _power,
    "__mod__": _remainder,
    "__floordiv__": _floor_divide,
}


def call(func, args, kwargs, library="torch"):
    """Applies a function of torch or NumPy to traced values."""
    name = getattr(func, "__name__", str(func))
    function = _OPERATORS.get(name) or FUNCTIONS.get(name)
    if function is None:
        function = FUNCTIONS.get(name.strip("_"))
    if function is None:
        untraceable(f"`{getattr(func, '__module__', None) or library}.{name}`")
    kwargs = {"b" if key == "other" else key: value for key, value in kwargs.items() if key not in ("out", "device")}
    try:
        return function(*args, **kwargs)
    except TypeError as cause:
        raise TraceError(f"`{name}` was called in a way that cannot be traced: {cause}") from cause


def has_traced(values) -> bool:
    """Whether a stand-in is among the values, or in a tuple among them."""
    return any(
        isinstance(value, (Traced, Captured)) or (isinstance(value, (tuple, list)) and has_traced(value))
        for value in values
    )
