"""Functions that traced callables may use, made of the steps that expressions have: bits of integers, activations,
rounding. Importing this module adds them to those of `trace`."""

from __future__ import annotations

import math

from . import trace
from .trace import Traced, TraceError, as_float, lift

# Integers of expressions have 32 bits, the last of which is the sign.
_BITS = 31
# exp of more overflows in float32, and its gradient would be inf * 0.
_LARGEST_EXPONENT = 80.0


def _bits(x: Traced, low: int, high: int) -> Traced:
    """The bits from `low` up to `high`, at their place. Division and remainder round down, so that negative numbers
    have the bits of two's complement."""
    if high - low == _BITS:  # 1 << 31 does not fit
        # The minimum says to the check of 32 bits what the condition says.
        return trace.where(x < 0, trace.arithmetic("min", x, -1) + (2**31 - 1) + 1, x)
    shifted = x if low == 0 else x // (1 << low)
    return shifted % (1 << (high - low)) * (1 << low)


def _runs(mask: int):
    """(low, high) of each run of ones in a number that is not negative."""
    at = 0
    while mask >> at:
        low = at + ((mask >> at) & -(mask >> at)).bit_length() - 1
        high = low
        while mask >> high & 1:
            high += 1
        yield low, high
        at = high


def _and_integers(a, b) -> Traced:
    """a & b: the runs of ones of a constant, or bit after bit of two traced values."""
    a, b = trace.number(a), trace.number(b)
    for x, y in ((a, b), (b, a)):
        if y.text[0] == "i":
            mask = int(y.text[1:])
            if mask < 0:  # x & m is x without the bits that m lacks
                return x - _and_integers(x, ~mask)
            parts = [_bits(x, low, high) for low, high in _runs(mask)]
            return sum(parts[1:], parts[0]) if parts else lift(0)
    negative = trace.where((a < 0) & (b < 0), -(2**31), 0)
    return sum((_bits(a, at, at + 1) * (b // (1 << at) % 2) for at in range(_BITS)), negative)


def integers(op: str, a, b) -> Traced:
    """`&`, `|` and `^` of numbers, of which at least one is an integer."""
    a, b = trace.number(a), trace.number(b)
    if not a.kind == b.kind == "int":
        trace.untraceable(f"`{op}` of a {a.kind} and a {b.kind}")
    both = _and_integers(a, b)
    return {"&": lambda: both, "|": lambda: a + b - both, "^": lambda: a + b - both * 2}[op]()


def shift(a, by, left: bool) -> Traced:
    """a << by or a >> by; `by` is a constant."""
    a, by = trace.number(a), lift(by)
    sign = "<<" if left else ">>"
    if a.kind != "int" or by.text[0] != "i":
        trace.untraceable(f"`{sign}` of a {a.kind} by a traced value" if a.kind == "int" else f"`{sign}` of a {a.kind}")
    count = int(by.text[1:])
    if not 0 <= count < _BITS:
        raise TraceError(f"`{sign}` is by {count}, allowed: 0 to {_BITS - 1}")
    return a * (1 << count) if left else a // (1 << count)


def _exp(a) -> Traced:
    return trace.unary("exp", a)


def sigmoid(a) -> Traced:
    """1 / (1 + exp(-a)), with a gradient of 0 instead of NaN where exp would overflow."""
    return 1.0 / (_exp(trace.arithmetic("min", -as_float(a), _LARGEST_EXPONENT)) + 1.0)


def _expm1(a) -> Traced:
    """exp(a) - 1, without cancellation for small a."""
    a = as_float(a)
    half = trace.unary("tanh", trace.arithmetic("min", a, 1.0) * 0.5)
    return trace.where(abs(a) < 0.5, half * 2.0 / (1.0 - half), _exp(a) - 1.0)


def _softplus(a, beta=1.0, threshold=20.0) -> Traced:
    """log(1 + exp(beta a)) / beta, linear above the threshold, as in torch."""
    a = as_float(a)
    scaled = a * float(beta)
    below = trace.unary("log", _exp(trace.arithmetic("min", scaled, float(threshold))) + 1.0)
    return trace.where(scaled > float(threshold), a, below * (1.0 / float(beta)))


def _log_sigmoid(a) -> Traced:
    a = as_float(a)
    return trace.arithmetic("min", a, 0.0) - trace.unary("log", _exp(-abs(a)) + 1.0)


def _elu(a, alpha=1.0, inplace=False) -> Traced:
    a = as_float(a)
    return trace.where(a > 0.0, a, _expm1(trace.arithmetic("min", a, 0.0)) * float(alpha))


def _gelu(a, approximate="none") -> Traced:
    if approximate != "tanh":
        trace.untraceable(
            f"`gelu` with approximate={approximate!r}, which needs erf (approximate='tanh' can be traced)"
        )
    a = as_float(a)
    return a * 0.5 * (trace.unary("tanh", (a + a * a * a * 0.044715) * math.sqrt(2 / math.pi)) + 1.0)


def _relu(a, inplace=False) -> Traced:
    return trace.arithmetic("max", a, 0.0 if trace.number(a).kind == "float" else 0)


def _leaky_relu(a, negative_slope=0.01, inplace=False) -> Traced:
    a = as_float(a)
    return trace.where(a > 0.0, a, a * float(negative_slope))


def _hardtanh(a, min_val=-1.0, max_val=1.0, inplace=False) -> Traced:
    return trace.arithmetic("min", trace.arithmetic("max", as_float(a), float(min_val)), float(max_val))


def _fmod(a, b) -> Traced:
    """The remainder of division towards zero."""
    a, b = trace.number(a), trace.number(b)
    return a - b * trace.divide(a, b, "trunc")


def _frac(a) -> Traced:
    a = as_float(a)
    return a - as_float(trace.integer(a))


def _round(a, decimals=0) -> Traced:
    """The nearest integer, of two the even one."""
    if decimals != 0:
        trace.untraceable(f"`round` to {decimals} decimals")
    a = trace.number(a)
    if a.kind == "int":
        return a
    up = trace.unary("floor", a + 0.5)
    return as_float(trace.where((as_float(up) - a == 0.5) & (up % 2 == 1), up - 1, up))


def _log_add_exp(a, b) -> Traced:
    a, b = as_float(a), as_float(b)
    return trace.arithmetic("max", a, b) + trace.unary("log", _exp(-abs(a - b)) + 1.0)


def _lerp(a, end, weight) -> Traced:
    a = as_float(a)
    return a + (as_float(end) - a) * weight


def _masked_fill(a, mask, value) -> Traced:
    return trace.where(mask, value, a)


def _full_like(a, fill_value, dtype=None, **kwargs) -> Traced:
    return trace.to(fill_value, lift(a) if dtype is None else dtype)


def _new_full(a, size, fill_value, dtype=None, **kwargs) -> Traced:
    if tuple(size):
        trace.untraceable("a new tensor with axes")
    return _full_like(a, fill_value, dtype)


trace.FUNCTIONS.update(
    {
        "elu": _elu,
        "expm1": _expm1,
        "fmod": _fmod,
        "frac": _frac,
        "full_like": _full_like,
        "gelu": _gelu,
        "hardtanh": _hardtanh,
        "leaky_relu": _leaky_relu,
        "lerp": _lerp,
        "log10": lambda a: trace.unary("log", a) * (1 / math.log(10)),
        "logaddexp": _log_add_exp,
        "log_sigmoid": _log_sigmoid,
        "logsigmoid": _log_sigmoid,
        "masked_fill": _masked_fill,
        "new_full": _new_full,
        "relu": _relu,
        "relu6": lambda a, inplace=False: _hardtanh(a, 0.0, 6.0),
        "rint": _round,
        "round": _round,
        "sigmoid": sigmoid,
        "silu": lambda a, inplace=False: as_float(a) * sigmoid(a),
        "softplus": _softplus,
    }
)
