"""`python -m fulgurite doctor | bench | check`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from typing import Any

import fulgurite
from fulgurite import _fulgurite


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit status: 2 for invalid arguments, 1 for a failure."""
    parser = argparse.ArgumentParser(prog="python -m fulgurite", description="Attention at the speed of the machine")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor_ = commands.add_parser("doctor", help="what was found here, which engine is chosen and why")
    bench_ = commands.add_parser("bench", help="speed over a small grid, beside torch where it is installed")
    check_ = commands.add_parser("check", help="every case of the table against the f64 oracle")
    for command in (doctor_, bench_, check_):
        command.add_argument("--engine", default="best", help="one of `fulgurite.engines()`, or best, cpu")
        command.add_argument("--json", action="store_true", help="machine-readable")
    bench_.add_argument("--seconds", type=float, default=0.5, help="at least this long for each contender and cell")
    bench_.add_argument("--sequences", type=int, nargs="+", default=[512, 2048], help="lengths")
    check_.add_argument("--dtypes", nargs="+", default=["f32", "f16", "bf16"], choices=["f32", "f16", "bf16"])
    options = parser.parse_args(arguments)
    try:
        results, text, ok = {"doctor": doctor, "bench": bench, "check": check}[options.command](options)
    except ValueError as error:
        print(f"fulgurite: {error}", file=sys.stderr)
        return 2
    try:
        print(json.dumps(results, indent=2) if options.json else text, flush=True)
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if ok else 1


def _versions() -> dict:
    versions: dict[str, Any] = {"fulgurite": fulgurite.__version__, "python": platform.python_version()}
    from importlib import metadata

    for name in ("numpy", "torch", "transformers", "jax"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _gpu() -> str:
    """The GPU that serves CUDA tensors, or why there is none."""
    try:
        return _fulgurite.explain("cuda")[0]
    except (RuntimeError, ValueError) as error:
        return f"not used: {error}"


def doctor(options) -> tuple:
    """Describes this machine and its engines."""
    return (*found(options.engine), True)


def found(name: str) -> tuple[dict[str, Any], str]:
    """What `doctor` says, as values and as text."""
    engine, *why = _fulgurite.explain(name)
    results: dict[str, Any] = {
        "versions": _versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "extension": _fulgurite.__file__,
        "engine": engine,
        "why": why,
        "gpu": _gpu(),
    }
    lines = [f"{name:12}  {version or 'not installed'}" for name, version in results["versions"].items()]
    lines += [
        "",
        f"system        {results['system']}, {results['cores']} cores",
        f"extension     {results['extension']}",
    ]
    lines += [f"gpu           {results['gpu']}", "", f"engine        {engine}", *(f"  {line}" for line in why)]
    return results, "\n".join(lines)


def _best_seconds(function, seconds):
    """The minimum time over as many calls as fit."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        function()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def bench(options) -> tuple:
    """GFLOP/s of 8 heads of dimension 64, full and causal, next to torch's. The full comparison is `bench/cpu.py`."""
    import numpy

    torch: Any = None
    try:
        import torch
    except ImportError:
        pass
    rows = []
    for length in options.sequences:
        if length < 1:
            raise ValueError(f"`--sequences` has {length}, allowed: 1 or more")
        rng = numpy.random.default_rng(0)
        q, k, v = (rng.standard_normal((1, length, 8, 64), dtype=numpy.float32) for _ in range(3))
        for causal in (False, True):
            flops = 4 * 8 * 64 * length * length / (2 if causal else 1)
            out = numpy.empty_like(q)
            ours = lambda: fulgurite.attention(q, k, v, causal=causal, engine=options.engine, out=out)
            row = {"length": length, "causal": causal, "ours": flops / _best_seconds(ours, options.seconds) / 1e9}
            if torch is not None:
                tensors = [torch.from_numpy(x).transpose(1, 2).contiguous() for x in (q, k, v)]
                sdpa = torch.nn.functional.scaled_dot_product_attention
                theirs = lambda: sdpa(*tensors, is_causal=causal)
                row["torch"] = flops / _best_seconds(theirs, options.seconds) / 1e9
            rows.append(row)
    lines = ["f32, 1 x 8 heads x length x 64, GFLOP/s, the best call of each", ""]
    for row in rows:
        line = f"{row['length']:6} {'causal' if row['causal'] else 'full':7} ours {row['ours']:8.1f}"
        if "torch" in row:
            line += f"   torch {row['torch']:8.1f}   x{row['ours'] / row['torch']:.2f}"
        lines.append(line)
    return {"versions": _versions(), "rows": rows}, "\n".join(lines), True


def check(options) -> tuple:
    """The largest error of each feature, as a fraction of the tolerance."""
    features: dict[str, dict] = {}
    failures, refused, total = [], 0, 0
    for dtype in options.dtypes:
        for outcome in _fulgurite.check(options.engine, dtype):
            total += 1
            refused += outcome.refused
            failures += [f"{dtype} {outcome.case}: {failure}" for failure in outcome.failures]
            for feature in outcome.features:
                row = features.setdefault(feature, dict.fromkeys(options.dtypes, None))
                if not outcome.refused:
                    row[dtype] = max(row[dtype] or 0.0, outcome.share)
    lines = ["Largest error as a share of what the tolerance rule allows, over o, lse and all gradients:", ""]
    lines.append(f"{'feature':24}" + "".join(f"{dtype:>9}" for dtype in options.dtypes))
    for feature, row in features.items():
        shares = (("refused" if share is None else f"{share:.2f}") for share in row.values())
        lines.append(f"{feature:24}" + "".join(f"{share:>9}" for share in shares))
    lines += ["", *failures[:20]]
    lines.append(f"{total} cases, {refused} refused, {len(failures)} comparisons outside the tolerance")
    results = {"features": features, "cases": total, "refused": refused, "failures": failures}
    return results, "\n".join(lines), not failures


if __name__ == "__main__":
    sys.exit(main())
