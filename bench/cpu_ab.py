"""Two builds of the package side by side on one CPU: no call may become slower.

    python bench/cpu_ab.py OLD_FOLDER NEW_FOLDER [--rounds N] [--passes N] [--threads N] [--cells WORD ...] [--json FILE]

Each folder holds a whole package (Python files and extension) under the name that it is imported by, so the two names
differ: `cp -r python/fulgurite before`. Both are loaded into one process and alternate. Every pass walks the whole
grid, so that a slow minute of the machine does not fall on one cell. A ratio is the median time of the old build over all
passes, divided by that of the new one: above 1 the new one is faster. The ratio of the shortest times stands beside it; a
difference that only one of them shows is noise.
"""

import argparse
import functools
import importlib
import json
import os
import statistics
import sys
from pathlib import Path

import numpy

from race import Contender, race

TOKENS, WIDTH = 4096, 1024


def rows(rng, *shape):
    return rng.standard_normal(shape, dtype=numpy.float32)


def forward(packages, q, k, v, **options):
    out = numpy.empty_like(q)
    return {side: functools.partial(package.attention, q, k, v, out=out, **options) for side, package in packages.items()}


def backward(packages, q, k, v, **options):
    o, lse = packages["old"].attention(q, k, v, return_lse=True, **options)
    given = (o.copy(), q, k, v, o, lse)
    options["out"] = tuple(numpy.empty_like(x) for x in (q, k, v))
    return {side: functools.partial(package.attention_backward, *given, **options) for side, package in packages.items()}


def cells():
    """Name, maker of the calls, [batch, queries, heads, head dim, keys], options."""
    for make in (forward, backward):
        for dim in (64, 128):
            for n in (128, 512, 2048, 4096):
                for causal in (False, True):
                    shape = (TOKENS // n, n, WIDTH // dim, dim, n)
                    yield f"{make.__name__} d{dim} {n} {'causal' if causal else 'full'}", make, shape, {"causal": causal}
        yield f"{make.__name__} d64 2048 window 256", make, (2, 2048, 16, 64, 2048), {"window": (256, 0)}
        yield f"{make.__name__} d64 2048 softcap", make, (2, 2048, 16, 64, 2048), {"softcap": 30.0}
    for batch, keys in ((1, 8192), (8, 2048)):
        yield f"decode {batch} x {keys}", forward, (batch, 1, 16, 64, keys), {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cells", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--json")
    options = parser.parse_args()
    packages = {}
    for side, folder in (("old", options.old), ("new", options.new)):
        sys.path.insert(0, str(folder.resolve().parent))
        packages[side] = importlib.import_module(folder.name)
    rng, medians, bests = numpy.random.default_rng(1), {}, {}
    for _ in range(options.passes):
        for name, make, (batch, n, heads, dim, keys), keywords in cells():
            if not all(word in name for word in options.cells):
                continue
            q = rows(rng, batch, n, heads, dim)
            k, v = (rows(rng, batch, keys, heads, dim) for _ in range(2))
            # Both builds get the same memory: results in pages of their own cost one of them up to 10 % in short cells.
            calls = make(packages, q, k, v, threads=options.threads, **keywords)
            timed = race([Contender(side, call) for side, call in calls.items()], 0, options.rounds)
            for side, of_side in timed.items():
                medians.setdefault(name, {}).setdefault(side, []).append(of_side["median_s"])
                bests.setdefault(name, {}).setdefault(side, []).append(of_side["best_s"])
    found = []
    for name in medians:
        ms = {side: 1e3 * statistics.median(medians[name][side]) for side in packages}
        by_bests = min(bests[name]["old"]) / min(bests[name]["new"])
        found.append({"cell": name, "ms": ms, "ratio": ms["old"] / ms["new"], "by_bests": by_bests})
        print(f"{name}: {ms['old']:.3f} -> {ms['new']:.3f} ms, {ms['old'] / ms['new']:.3f}, by bests {by_bests:.3f}", flush=True)
    for key in ("ratio", "by_bests"):
        worst = min(found, key=lambda row: row[key])
        mean = statistics.geometric_mean([row[key] for row in found])
        print(f"{len(found)} cells, {key}: geometric mean {mean:.4f}, lowest {worst[key]:.3f} ({worst['cell']})")
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
