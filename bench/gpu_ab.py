"""Two builds of the package side by side on one GPU: no call may become slower.

    python bench/gpu_ab.py OLD_FOLDER NEW_FOLDER [--rounds N] [--passes N] [--cells WORD ...] [--json FILE]

Each folder holds a whole package (Python files and extension) under the name that it is imported by, so the two names
differ: `cp -r python/fulgurite before`, and its `_torch_ops.py` registers operators under another name. Both are loaded
into one process and alternate. Every pass walks the whole grid, so that a slow second of the machine does not fall on one
cell. `--cells` keeps the cells whose names contain all words. A ratio is the median time of the old build over all passes, divided by that of the new one: above 1 the new one is
faster.
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

from gpu_race import samples

BF16 = torch.bfloat16
TOKENS, WIDTH = 16384, 2048

# Grouped heads and head dims of models: batch, queries, heads, head dim, keys, heads of keys; and options.
MODELS = {
    "llama-3-8b": ((1, 8192, 32, 128, 8192, 8), {}),
    "qwen2.5-7b": ((2, 4096, 28, 128, 4096, 4), {}),
    "gemma-2": ((1, 4096, 16, 256, 4096, 8), {"softcap": 50.0}),
    "gpt-oss": ((1, 4096, 64, 64, 4096, 8), {"window": (127, 0)}),
    "phi-3-mini": ((2, 4096, 32, 96), {}),
    "falcon-7b": ((4, 2048, 71, 64, 2048, 1), {}),
    "gpt-2": ((16, 1024, 12, 64), {}),
    "short": ((16, 300, 12, 64), {}),
}


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


def with_bias(package, q, k, v, kind):
    """Gradients of a bias, of a captured table, or of sinks, under a causal mask."""
    heads, n, m = q.shape[2], q.shape[1], k.shape[1]
    if kind == "bias":
        options = {"bias": torch.randn(1, heads, n, m, device="cuda")}
    elif kind == "sinks":
        options = {"sinks": torch.randn(heads, device="cuda")}
    else:
        table = torch.randn(heads, m, device="cuda")
        options = {"score_mod": lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx]}
    o, lse = package.attention(q, k, v, return_lse=True, causal=True, **options)
    d_o = torch.randn_like(o)
    return functools.partial(package.attention_backward, d_o, q, k, v, o, lse, causal=True, **options)


def unequal(package, q, k, v, **options):
    """Decode with lengths from an eighth of the keys to all of them."""
    lengths = torch.linspace(k.shape[1] / 8, k.shape[1], k.shape[0], device="cuda").to(torch.int32)
    lengths = lengths[torch.randperm(k.shape[0], generator=torch.Generator("cuda").manual_seed(1), device="cuda")]
    return forward(package, q, k, v, used_lengths=(None, lengths), **options)


def cells():
    """Name, maker of a call, tensors and options."""
    for dim in (64, 128, 256):
        for n in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                shape = (TOKENS // n, n, WIDTH // dim, dim)
                yield f"forward d{dim} {n} {'causal' if causal else 'full'}", forward, shape, {"causal": causal}
                if n <= 8192 or dim == 128:
                    yield f"backward d{dim} {n} {'causal' if causal else 'full'}", backward, shape, {"causal": causal}
        for n in (1024, 4096):
            shape = (TOKENS // n, n, WIDTH // dim, dim)
            yield f"forward d{dim} {n} window 256", forward, shape, {"window": (256, 0)}
    for left in (128, 512, 1024, 4096):
        yield f"forward d64 8192 window {left}", forward, (2, 8192, 16, 64), {"causal": True, "window": (left - 1, 0)}
    for name, (shape, options) in MODELS.items():
        yield f"forward {name}", forward, shape, {"causal": True, **options}
        yield f"backward {name}", backward, shape, {"causal": True, **options}
    for kind in ("bias", "table", "sinks"):
        for dim in (64, 128):
            yield f"backward {kind} d{dim}", with_bias, (2, 2048, 16, dim), {"kind": kind}
    for keys, batches in ((2048, (1, 8, 32)), (8192, (1, 2, 4, 6, 8, 12, 16, 24, 32)), (65536, (1, 8, 32))):
        for batch in batches:
            for queries in (1, 4, 16):
                shape = (batch, queries, 32, 128, keys, 8)
                yield f"decode {batch} x {keys}, {queries}", forward, shape, {"causal": True}
                if batch in (8, 24, 32) and keys == 8192:
                    yield f"decode {batch} x {keys}, {queries}, unequal", unequal, shape, {"causal": True}
    for heads, kv_heads, dim in ((32, 32, 128), (16, 2, 128), (64, 8, 64), (71, 1, 64), (16, 8, 256)):
        for batch in (1, 5, 17):
            shape = (batch, 1, heads, dim, 5000, kv_heads)
            yield f"decode {batch} x 5000, {heads}/{kv_heads} of {dim}", forward, shape, {"causal": True}


def host_calls(package):
    """Small calls whose time is that of the host."""
    q, k, v = tensors(1, 128, 16, 128)
    o, lse = package.attention(q, k, v, return_lse=True)
    d_o, gradients = torch.randn_like(o), [torch.empty_like(x) for x in (q, k, v)]
    layers = [tensors(1, 128, 16, 128) for _ in range(32)]

    def model():
        for layer in layers:
            package.attention(*layer)

    return {
        "attention, out": forward(package, q, k, v),
        "attention": functools.partial(package.attention, q, k, v),
        "attention, causal": functools.partial(package.attention, q, k, v, causal=True),
        "flash_attn_func": functools.partial(package.flash_attn_func, q, k, v),
        "backward": functools.partial(package.attention_backward, d_o, q, k, v, o, lse, out=gradients),
        "32 layers": model,
    }


def host_us(packages):
    """Microseconds of the host for each small call, the builds alternating."""
    calls = {side: host_calls(package) for side, package in packages.items()}
    found = {}
    for name in calls["old"]:
        times = {side: [] for side in packages}
        repeats = 5 if name == "32 layers" else 100
        for _ in range(40):
            for side in packages:
                call = calls[side][name]
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(repeats):
                    call()
                times[side].append((time.perf_counter() - start) * 1e6 / repeats)
                torch.cuda.synchronize()
        found[name] = {side: statistics.median(all_us) for side, all_us in times.items()}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--cells", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--json")
    options = parser.parse_args()
    packages = {}
    for side, folder in (("old", options.old), ("new", options.new)):
        sys.path.insert(0, str(folder.resolve().parent))
        packages[side] = importlib.import_module(folder.name)
    host = host_us(packages)
    for name, us in host.items():
        print(f"host, {name}: {us['old']:.2f} -> {us['new']:.2f} us a call", flush=True)
    times = {}
    for _ in range(options.passes):
        for name, make, shape, keywords in cells():
            if not all(word in name for word in options.cells):
                continue
            q, k, v = tensors(*shape)
            calls = {side: make(package, q, k, v, **keywords) for side, package in packages.items()}
            of_cell = times.setdefault(name, {side: [] for side in packages})
            for side, more in samples(calls, options.rounds).items():
                of_cell[side] += more
            del q, k, v, calls
    rows = []
    for name, of_cell in times.items():
        ms = {side: statistics.median(all_ms) for side, all_ms in of_cell.items()}
        rows.append({"cell": name, "ms": ms, "ratio": ms["old"] / ms["new"]})
        print(f"{name}: {ms['old']:.4f} -> {ms['new']:.4f} ms, {ms['old'] / ms['new']:.3f}", flush=True)
    worst = min(rows, key=lambda row: row["ratio"])
    mean = statistics.geometric_mean([row["ratio"] for row in rows])
    print(f"{len(rows)} cells: geometric mean {mean:.4f}, lowest {worst['ratio']:.3f} ({worst['cell']})")
    if options.json:
        Path(options.json).write_text(json.dumps({"rows": rows, "host_us": host}, indent=1) + "\n")


if __name__ == "__main__":
    main()
