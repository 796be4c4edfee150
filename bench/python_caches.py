"""What the Python package's caches of descriptions and problems save in one call (docs/decisions/0042).

A call with a wrong `out` is refused after its problem is known and before anything is computed, so it shows the cost of
both. Prints the least of 40 means.

    python python/build.py && PYTHONPATH=python python bench/python_caches.py
"""

import time

import numpy as np
from fulgurite import _describe
from fulgurite._fulgurite import Description

KINDS = {"plain": {}, "window": {"window": (128, 0)}, "softcap": {"softcap": 30.0}}


def least(function, count=300, rounds=40):
    """Microseconds of one call."""
    means = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            function()
        means.append((time.perf_counter() - start) / count)
    return min(means) * 1e6


def main():
    q, wrong = (np.zeros((1, 1, 1, dim), np.float32) for dim in (16, 8))

    def refused(description):
        try:
            description.forward(q, q, q, (), wrong, False)
        except ValueError:
            return
        raise SystemExit("a wrong `out` was not refused")

    for name, options in KINDS.items():

        def text():
            window, softcap = options.get("window"), options.get("softcap")
            return _describe.options(True, window, None, softcap, None, None, None, "cpu", 1, False, None)

        words = text()
        known = Description(words)
        refused(known)
        parsing = least(lambda: Description(words))
        build = least(lambda: refused(Description(words))) - parsing - least(lambda: refused(known))
        print(f"{name}: options as text {least(text):.1f} us, parsing {parsing:.1f} us, building the problem {build:.1f} us")


if __name__ == "__main__":
    main()
