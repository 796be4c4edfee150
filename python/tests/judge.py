"""The one tolerance of attention results: the rule of the extension, beside its f64 oracle.

While `judged()` is active, every call of the extension is judged by the rule. `close` compares a result with an
independent reference and allows what the rule allows for the last call. An engine that is wrong fails the first check;
a front end that describes another problem than its caller means fails the second.
"""

import contextlib

import numpy as np

from fulgurite import _dispatch

# The allowed difference of each tensor of the last calls, by name: o, lse, d_q, d_k, d_v, d_sinks, d_NAME.
ALLOWED = {}


class Recorded:
    """A description whose calls are judged."""

    def __init__(self, description):
        self.description = description

    def check(self, arrays):
        self.description.check(arrays)

    def forward(self, q, k, v, extras, out, want_lse):
        results = self.description.forward(q, k, v, extras, out, want_lse)
        self._judge((q, k, v), extras, results if want_lse else (results,))
        return results

    def backward(self, q, k, v, extras, saved, out):
        gradients = self.description.backward(q, k, v, extras, saved, out)
        self._judge((q, k, v), extras, gradients, tuple(map(_host, saved)))
        return gradients

    def _judge(self, rows, extras, results, saved=None):
        rows, extras, results = ([_host(x) for x in each] for each in (rows, extras, results))
        judged = self.description.judge(*rows, extras, results, saved)
        self._take(judged)
        ALLOWED.update((each.name, each.allowed) for each in judged)

    def _take(self, judged):
        failures = [f"{each.name}: {each.text}" for each in judged if not each.ok]
        assert not failures, failures


def _host(array):
    """The array in host memory, detached; the oracle computes there."""
    return array.detach().cpu() if hasattr(array, "detach") else array


@contextlib.contextmanager
def judged(recorded_by=Recorded):
    """Judges every call of the extension by the tolerance rule."""
    known, description = _dispatch._known, _dispatch.description
    made = {}

    def recorded(text):
        if text not in made:
            made[text] = recorded_by(description(text))
        return made[text]

    # Calls without tensors besides q, k and v find their description here, without a text.
    _dispatch._known = {}
    _dispatch.description = recorded
    ALLOWED.clear()
    try:
        yield
    finally:
        _dispatch._known, _dispatch.description = known, description


def close(got, want, name="o"):
    """Asserts that a tensor of the last call, or a part of it, agrees with a reference in float64.

    `name` is that of the tensor; "d_" stands for all gradients, of which the largest allowance counts.
    """
    allowed = max(value for key, value in ALLOWED.items() if key == name or name == "d_" and key.startswith(name))
    got, want = (np.asarray(x.double() if hasattr(x, "double") else x, np.float64) for x in map(_host, (got, want)))
    assert got.shape == want.shape
    assert (np.isneginf(got) == np.isneginf(want)).all()
    finite = ~np.isneginf(want)
    worst = np.abs(got[finite] - want[finite]).max(initial=0.0)
    assert worst <= allowed, f"{name}: worst {worst:.3e} of {allowed:.3e} allowed"
