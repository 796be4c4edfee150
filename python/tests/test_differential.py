"""Random calls against attention in NumPy and float64: shapes, masks, modifiers, NaN and infinities, with gradients.

The reference shares no code with the extension, nor with its oracle; the tolerance is that of the rule. A few calls in
the usual tests, ten minutes of them with FULGURITE_LONG=1, and more by `python test_differential.py COUNT [SEED]`.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

if os.environ.get("FULGURITE_INSTALLED") != "1":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from judge import ALLOWED, Recorded, judged  # noqa: E402  (after the path)

import fulgurite  # noqa: E402

DTYPES = [np.float32, np.float16]
# The rule takes the error of straightforward code as its measure, one sample of it: of thousands of small problems a few
# have a lucky one. What is left of terms around 1 that cancel is allowed too.
MARGIN, LEFT = 8, 4e-6


class Measured(Recorded):
    """Takes the allowances of the rule; the results are compared with NumPy."""

    def _take(self, judged):
        pass


class Reference:
    """Softmax attention of one call in float64; a key that a row does not see takes part in nothing."""

    def __init__(self, q, k, v, scores, derivative, seen, sinks):
        """`scores` maps scaled scores to modified ones, `derivative` to their derivative; `seen` is [b, h, i, j]."""
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (q, k, v))
        self.group = q.shape[2] // k.shape[2]
        self.scale = q.shape[3] ** -0.5
        keys, values = (np.repeat(x, self.group, axis=2) for x in (self.k, self.v))
        with np.errstate(all="ignore"):
            scaled = np.einsum("bihd,bjhd->bhij", self.q, keys) * self.scale
            self.slope = derivative(scaled)
            self.s = np.where(seen, scores(scaled), -np.inf)
            # A key with a score of -inf is hidden too.
            self.seen = seen & ~np.isneginf(self.s)
            columns = self.s if sinks is None else np.concatenate([self.s, self._sink(sinks)], -1)
            top = columns.max(axis=-1, initial=-np.inf, keepdims=True)
            top = np.where(np.isneginf(top), 0.0, top)
            total = np.exp(columns - top).sum(axis=-1, keepdims=True)
            self.lse = np.where(total == 0, -np.inf, np.log(total) + top)[..., 0]
            self.p = np.where(self.seen, np.exp(self.s - top) / np.where(total == 0, 1.0, total), 0.0)
            self.o = self._sum("bhij,bjhd->bihd", self.p, values)
        self.sinks, self.values, self.keys = sinks, values, keys

    def _sink(self, sinks):
        batch, heads, rows = self.s.shape[:3]
        return np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None, None], (batch, heads, rows, 1))

    def _sum(self, spec, weights, rows):
        """An einsum in which pairs that do not see each other take no part, whatever the rows hold."""
        rows_finite = np.where(np.isfinite(rows), rows, 0.0)
        result = np.einsum(spec, weights, rows_finite)
        for kind in (np.isnan(rows), np.isposinf(rows), np.isneginf(rows)):
            if kind.any():
                result = result + self._special(spec, weights, rows, kind)
        return result

    def _special(self, spec, weights, rows, kind):
        """What the elements of one kind of not-finite number add: their sum over the pairs that see each other."""
        value = rows[kind].flat[0]
        signs = [(weights > 0) & self.seen, (weights < 0) & self.seen, (weights == 0) & self.seen, np.isnan(weights)]
        total = 0.0
        for sign, pairs in zip((1.0, -1.0, 0.0, np.nan), signs):
            met = np.einsum(spec, pairs.astype(np.float64), kind.astype(np.float64)) > 0
            total = total + np.where(met, sign * value, 0.0)
        return total

    def gradients(self, d_o):
        """(d_q, d_k, d_v) and d_sinks."""
        d_o = np.asarray(d_o, np.float64)
        shared = lambda x: x.reshape(*x.shape[:2], -1, self.group, x.shape[3]).sum(axis=3)  # noqa: E731
        with np.errstate(all="ignore"):
            d_v = shared(self._sum("bhij,bihd->bjhd", self.p, d_o))
            delta = (d_o * self.o).sum(-1).transpose(0, 2, 1)[..., None]
            d_p = np.einsum("bihd,bjhd->bhij", d_o, self.values)
            d_s = np.where(self.seen, self.p * (d_p - delta), 0.0)
            d_x = np.where(self.seen, d_s * self.slope, 0.0)
            d_q = self._sum("bhij,bjhd->bihd", d_x, self.keys) * self.scale
            d_k = shared(self._sum("bhij,bihd->bjhd", d_x, self.q)) * self.scale
            sinks = None
            if self.sinks is not None:
                weight = np.exp(np.asarray(self.sinks, np.float64)[None, :, None] - self.lse)
                sinks = -(weight * delta[..., 0]).sum(axis=(0, 2))
        return (d_q, d_k, d_v), sinks


def modifiers(rng, heads):
    """A score modifier as a callable, as a function of float64, and its derivative; or nothing."""
    bias = rng.standard_normal(heads).astype(np.float32)
    at = lambda x: x[None, :, None, None].astype(np.float64)  # noqa: E731
    place = lambda s: (np.arange(s.shape[2])[:, None] - np.arange(s.shape[3]))[None, None]  # noqa: E731
    return [
        (None, lambda s: s, np.ones_like),
        (lambda s, b, h, i, j: s + bias[h], lambda s: s + at(bias), np.ones_like),
        (lambda s, b, h, i, j: s * bias[h], lambda s: s * at(bias), lambda s: np.ones_like(s) * at(bias)),
        (lambda s, b, h, i, j: 3.0 * np.tanh(s / 3.0), lambda s: 3 * np.tanh(s / 3), lambda s: np.cosh(s / 3) ** -2.0),
        (lambda s, b, h, i, j: s - 0.125 * abs(i - j), lambda s: s - 0.125 * np.abs(place(s)), np.ones_like),
        (lambda s, b, h, i, j: np.exp(np.tanh(s)), lambda s: np.exp(np.tanh(s)),
         lambda s: np.exp(np.tanh(s)) * np.cosh(s) ** -2.0),
        (lambda s, b, h, i, j: np.sqrt(s * s + 1.0), lambda s: np.sqrt(s * s + 1), lambda s: s / np.sqrt(s * s + 1)),
        # Without a value at score 0, which lanes that only fill a tile have.
        (lambda s, b, h, i, j: s + s / np.sqrt(s * s), lambda s: s + np.sign(s), np.ones_like),
    ][rng.integers(8)]  # fmt: skip


def masks(rng, shape):
    """Options of a call, and what they mean: [b, h, i, j]."""
    batch, heads, q_len, k_len = shape
    i, j = np.arange(q_len)[:, None], np.arange(k_len)[None, :]
    diagonal, documents = i + k_len - q_len, rng.integers(0, 3, max(q_len, k_len)).astype(np.int32)
    n, left, right = (int(x) for x in rng.integers(1, 40, 3))
    spread = lambda keep: np.broadcast_to(keep, shape)  # noqa: E731
    used = rng.integers(0, k_len + 1, batch).astype(np.int32)
    return [
        ({}, spread(True)),
        ({"causal": True}, spread(j <= diagonal)),
        ({"causal": "top-left"}, spread(j <= i)),
        ({"window": (left, right)}, spread((j >= diagonal - left) & (j <= diagonal + right))),
        ({"mask_mod": lambda b, h, x, y: documents[x] == documents[y]}, spread(documents[i] == documents[j])),
        ({"mask_mod": lambda b, h, x, y: (x + y) % n < n // 2 + 1}, spread((i + j) % n < n // 2 + 1)),
        ({"used_lengths": (None, used)}, spread(j < used[:, None, None, None])),
        ({"mask_mod": lambda b, h, x, y: (h == 0) | (y <= x)},
         spread((np.arange(heads)[:, None, None] == 0) | (j <= i))),
    ][rng.integers(8)]  # fmt: skip


def plant(rng, arrays):
    """Writes NaN or an infinity over an element or a row of some array."""
    at = rng.integers(4)
    # An infinity in q or k makes a score NaN or infinite, depending on how a product is formed.
    x = np.nan if at < 2 else rng.choice([np.nan, np.inf, -np.inf])
    rows = arrays[at].reshape(-1, arrays[at].shape[-1])
    if rows.size:
        rows[rng.integers(len(rows)), : rng.choice([1, rows.shape[1]])] = x


def agree(seed, name, got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    largest = np.finfo(np.float16).max if np.abs(want[np.isfinite(want)]).max(initial=0) > 6e4 else np.inf
    assert largest == np.inf, f"seed {seed}: {name} leaves the range of float16: choose smaller inputs"
    for kind in (np.isnan, np.isposinf, np.isneginf):
        assert (kind(got) == kind(want)).all(), f"seed {seed}: {name}: {kind.__name__} in other places"
    finite = np.isfinite(want)
    worst = np.abs(got[finite] - want[finite]).max(initial=0.0)
    allowed = MARGIN * ALLOWED[name] + LEFT
    assert worst <= allowed, f"seed {seed}: {name}: {worst:.3e} of {allowed:.3e}"


def one(seed):
    rng = np.random.default_rng(seed)
    batch, kv, group = rng.integers(1, 3), rng.integers(1, 3), rng.choice([1, 1, 2, 3])

    def length():
        return int(rng.choice([rng.integers(1, 7), rng.integers(1, 50), rng.choice([63, 64, 65, 129])]))

    q_len, k_len, dim, value_dim = length(), length(), int(rng.integers(1, 20)), int(rng.integers(1, 20))
    heads = int(kv * group)
    dtype = DTYPES[rng.integers(2)]
    shapes = [(batch, q_len, heads, dim), (batch, k_len, kv, dim), (batch, k_len, kv, value_dim)]
    arrays = [rng.standard_normal(x).astype(dtype) for x in (*shapes, (batch, q_len, heads, value_dim))]
    for _ in range(rng.choice([0, 0, 1, 2])):
        plant(rng, arrays)
    q, k, v, d_o = arrays
    options, seen = masks(rng, (batch, heads, q_len, k_len))
    score_mod, scores, derivative = modifiers(rng, heads)
    sinks = rng.standard_normal(heads).astype(np.float32) if rng.random() < 0.2 else None
    if score_mod is not None:
        options["score_mod"] = score_mod
    if sinks is not None:
        options["sinks"] = sinks
    options["threads"] = int(rng.integers(1, 4))
    want = Reference(q, k, v, scores, derivative, seen, sinks)
    with judged(Measured):
        o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
        agree(seed, "o", o, want.o)
        agree(seed, "lse", lse, want.lse)
        got = fulgurite.attention_backward(d_o, q, k, v, o, lse, **options)
    rows, d_sinks = want.gradients(d_o)
    for name, mine, theirs in zip(("d_q", "d_k", "d_v"), got, rows):
        agree(seed, name, mine, theirs)
    if sinks is not None:
        agree(seed, "d_sinks", got[3], d_sinks)


def test_random_calls():
    end = time.monotonic() + (600 if os.environ.get("FULGURITE_LONG") == "1" else 2)
    seed = 0
    while seed < 20 or time.monotonic() < end:
        one(seed)
        seed += 1


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    begin, failed = time.monotonic(), 0
    for number in range(first, first + count):
        try:
            one(number)
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
    print(f"{count} calls from seed {first}: {failed} wrong, {time.monotonic() - begin:.0f} s")
    sys.exit(failed > 0)
