"""Every call of a variant beside its f64 oracle, by the tolerance rule.

`judge.close` then compares with an independent reference, and allows what the rule allows for the last call.
"""

import contextlib

import judge

from fulgurite import _variants


class Recorded:
    """A variant whose calls are judged."""

    def __init__(self, variant):
        self.variant = variant

    def forward(self, tensors):
        outputs = self.variant.forward(tensors)
        self._accept(self.variant.judge(_host(tensors), _host(outputs)))
        return outputs

    def counted(self, tensors):
        return self.variant.counted(tensors)

    def backward(self, tensors, outputs, d_outputs):
        gradients = self.variant.backward(tensors, outputs, d_outputs)
        self._accept(self.variant.judge(_host(tensors), _host(outputs), _host(d_outputs), _host(gradients)))
        return gradients

    def _accept(self, judged):
        if COUNTS["paused"]:
            return
        assert judged, "nothing was judged"
        COUNTS["judged"] += 1
        failures = [f"{each.name}: {each.text}" for each in judged if not each.ok]
        assert not failures, failures
        judge.ALLOWED.update((each.name, each.allowed) for each in judged)


# How many calls were judged, and whether the next ones are not.
COUNTS = {"judged": 0, "paused": False}


@contextlib.contextmanager
def paused():
    """Judges no call."""
    COUNTS["paused"] = True
    try:
        yield
    finally:
        COUNTS["paused"] = False


def _host(tensors):
    return [x.detach() if hasattr(x, "detach") else x for x in tensors]


@contextlib.contextmanager
def judged():
    """Judges every call of a variant by the tolerance rule."""
    found, made = _variants.variant, {}

    def recorded(text):
        if text not in made:
            made[text] = Recorded(found(text))
        return made[text]

    _variants.variant = recorded
    COUNTS["judged"] = 0
    judge.ALLOWED.clear()
    try:
        yield
    finally:
        _variants.variant = found
