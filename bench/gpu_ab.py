"""Two builds of the package side by side on one GPU: no call may become slower.

    python bench/gpu_ab.py OLD_FOLDER NEW_FOLDER [--rounds N] [--json FILE]

Each folder holds a whole package (Python files and extension) under the name that it is imported by, so the two names
differ: `cp -r python/fulgurite before`, and its `_torch_ops.py` registers operators under another name. Both are loaded into one process and alternate. A ratio is the time of the old
build divided by that of the new one: above 1 the new one is faster.
"""

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from gpu_race import race

BF16 = torch.bfloat16
TOKENS, WIDTH = 16384, 2048


def tensors(b, n, h, d, m=None, h_kv=None):
    shapes = ((b, n, h, d), (b, m or n, h_kv or h, d), (b, m or n, h_kv or h, d))
    return tuple(torch.randn(shape, device="cuda").to(BF16) for shape in shapes)


def forward(package, q, k, v, **options):
    out = torch.empty_like(q)
    return functools.partial(package.attention, q, k, v, out=out, **options)


def backward(package, q, k, v, **options):
    o, lse = package.attention(q, k, v, return_lse=True, **options)
    d_o, out = torch.randn_like(o), [torch.empty_like(x) for x in (q, k, v)]
    return functools.partial(package.attention_backward, d_o, q, k, v, o, lse, out=out, **options)


def cells():
    """Name, maker of a call, tensors and options."""
    for dim in (64, 128, 256):
        for n in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                shape = (TOKENS // n, n, WIDTH // dim, dim)
                yield f"forward d{dim} {n} {'causal' if causal else 'full'}", forward, shape, {"causal": causal}
                if n <= 8192 or dim == 128:
                    yield f"backward d{dim} {n} {'causal' if causal else 'full'}", backward, shape, {"causal": causal}
    for batch in (1, 32):
        for keys in (8192, 65536):
            for queries in (1, 4, 16):
                yield f"decode {batch} x {keys}, {queries}", forward, (batch, queries, 32, 128, keys, 8), {"causal": True}


def host_us(packages):
    """Microseconds of the host for a small call, the builds alternating."""
    q, k, v = tensors(1, 128, 16, 128)
    found = {name: [] for name in packages}
    for _ in range(40):
        for name, package in packages.items():
            call = forward(package, q, k, v)
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            found[name].append((time.perf_counter() - start) * 1e4)
            torch.cuda.synchronize()
    return {name: statistics.median(all_us) for name, all_us in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json")
    options = parser.parse_args()
    packages = {}
    for side, folder in (("old", options.old), ("new", options.new)):
        sys.path.insert(0, str(folder.resolve().parent))
        packages[side] = importlib.import_module(folder.name)
    rows = []
    for name, make, shape, keywords in cells():
        q, k, v = tensors(*shape)
        ms = race({side: make(package, q, k, v, **keywords) for side, package in packages.items()}, options.rounds)
        rows.append({"cell": name, "ms": ms, "ratio": ms["old"] / ms["new"]})
        print(f"{name}: {ms['old']:.4f} -> {ms['new']:.4f} ms, {ms['old'] / ms['new']:.3f}", flush=True)
        del q, k, v
    host = host_us(packages)
    worst = min(rows, key=lambda row: row["ratio"])
    mean = statistics.geometric_mean([row["ratio"] for row in rows])
    print(f"{len(rows)} cells: geometric mean {mean:.4f}, lowest {worst['ratio']:.3f} ({worst['cell']})")
    print(f"host: {host['old']:.2f} -> {host['new']:.2f} us a call")
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows, "host_us": host}, indent=1) + "\n")


if __name__ == "__main__":
    main()
