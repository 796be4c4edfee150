"""Our matrix product beside cuBLAS (torch.matmul) on one GPU, in one process, alternating.

    python python/build.py && python bench/gpu_gemm.py [--json FILE] [--check N] [--seconds S]

First N random products (shapes, tails, padded strides, batches, all layouts, both types) are compared with float64
products of the same inputs, and run twice: every bit must be the same, and nothing beside C may change. Then the race.
"""

import argparse
import functools
import json
import os
import random
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from fulgurite._fulgurite import Gpu  # noqa: E402
from gpu_race import race  # noqa: E402

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
SHAPES = [(8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 4096)]
BARS = {(8192, 8192, 8192): 0.95, (4096, 4096, 4096): 0.92, (16384, 4096, 4096): 0.92}


def raw(x):
    """`x` is [batch, rows, cols] with contiguous columns."""
    storage = x.untyped_storage()
    bytes_left = storage.nbytes() - (x.data_ptr() - storage.data_ptr())
    return (x.data_ptr(), bytes_left, x.shape[1], x.shape[2], x.stride(1), x.shape[0], x.stride(0))


def matrices(batch, rows, cols, dtype, pad):
    """Random numbers with rows that are padded to 16 bytes and then some."""
    width = -(-cols // 8) * 8 + 8 * pad
    return torch.randn(batch, rows, width, device="cuda").to(dtype)[:, :, :cols]


def operands(layout, batch, m, n, k, dtype, pad):
    a = matrices(batch, m, k, dtype, pad) if layout[0] == "k" else matrices(batch, k, m, dtype, pad)
    b = matrices(batch, n, k, dtype, pad) if layout[1] == "k" else matrices(batch, k, n, dtype, pad)
    return a, b


def wide(layout, a, b):
    """Both as float64 [m, k] and [k, n]."""
    left = a.double() if layout[0] == "k" else a.double().mT
    right = b.double().mT if layout[1] == "k" else b.double()
    return left, right


def check(gpu, seed, count, cluster):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    stream = torch.cuda.current_stream().cuda_stream
    worst = 0.0
    for case in range(count):
        name, layout = rng.choice(list(TYPES)), rng.choice(["kk", "kn", "mk", "mn"])
        dtype = TYPES[name]
        batch, pad = rng.randint(1, 3), rng.randint(0, 3)
        m, n, k = (rng.choice([rng.randint(1, 40), rng.randint(1, 700), rng.randint(1, 700)]) for _ in range(3))
        a, b = operands(layout, batch, m, n, k, dtype, pad)
        c = matrices(batch, m, n, dtype, pad)
        memory = torch.as_strided(c, (c.untyped_storage().nbytes() // 2,), (1,), 0)
        memory.fill_(7.0)
        tuning = (128, 256, 4, cluster, 8)
        gpu.gemm(name, layout, raw(a), raw(b), raw(c), stream, tuning)
        first = memory.clone()
        outside = torch.ones_like(memory, dtype=torch.bool)
        torch.as_strided(outside, c.shape, c.stride(), 0).fill_(False)
        assert bool((memory[outside] == 7.0).all()), f"case {case}: memory beside C changed"
        left, right = wide(layout, a, b)
        want, size = left @ right, left.abs() @ right.abs()
        # Rounding to the type of C, and f32 accumulation that cuts toward zero.
        unit, least = (2.0**-8, 1e-38) if name == "bf16" else (2.0**-11, 2.0**-25)
        bound = want.abs() * unit + size * (k / 16 + 4) * 2.0**-23 + least
        error = ((c.double() - want).abs() / bound).max().item()
        assert error <= 1.0, f"case {case}: {name} {layout} {batch}x{m}x{n}x{k}: {error} of the bound"
        worst = max(worst, error)
        memory.fill_(7.0)
        gpu.gemm(name, layout, raw(a), raw(b), raw(c), stream, tuning)
        assert torch.equal(memory, first), f"case {case}: other bits the second time"
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--check", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    gpu = Gpu(0, ptxas=os.environ.get("PTXAS"))
    props = torch.cuda.get_device_properties(0)
    start = time.time()
    worst = max(check(gpu, options.seed + cluster, options.check // 2, cluster) for cluster in (1, 2))
    print(f"{options.check // 2 * 2} random products agree, worst {worst:.2f} of the bound, same bits twice, {time.time() - start:.0f} s")
    rows, missed = [], []
    stream = torch.cuda.current_stream().cuda_stream
    print(f"{gpu.name}: TFLOP/s (ratio to cuBLAS)")
    for m, n, k in SHAPES:
        for name, dtype in TYPES.items():
            a, b = operands("kk", 1, m, n, k, dtype, 0)
            c = torch.empty(1, m, n, device="cuda", dtype=dtype)
            out = torch.empty(m, n, device="cuda", dtype=dtype)
            calls, keep = {"cublas": functools.partial(torch.matmul, a[0], b[0].mT, out=out)}, []
            for layout in ("kk", "kn", "mk", "mn") if name == "bf16" else ("kk",):
                x, y = operands(layout, 1, m, n, k, dtype, 0)
                keep.append((x, y))  # the kernel sees addresses only
                calls[layout] = functools.partial(gpu.gemm, name, layout, raw(x), raw(y), raw(c), stream)
            times = race(calls, options.rounds, 2.0)
            rate = {who: 2 * m * n * k / ms / 1e9 for who, ms in times.items()}
            ratios = {who: rate[who] / rate["cublas"] for who in rate if who != "cublas"}
            print(f"{m}x{n}x{k} {name}: cuBLAS {rate['cublas']:.0f}; " + ", ".join(f"{w} {rate[w]:.0f} ({r:.3f})" for w, r in ratios.items()))
            rows.append({"m": m, "n": n, "k": k, "dtype": name, "tflops": rate, "ratios": ratios})
            if min(ratios.values()) < BARS[m, n, k]:
                missed.append((m, n, k, name))
    if options.json:
        machine = {"gpu": props.name, "torch": torch.__version__, "cuda": torch.version.cuda}
        Path(options.json).write_text(json.dumps({"machine": machine, "command": " ".join(Path(word).name for word in sys.argv), "rows": rows}, indent=1) + "\n")
    for cell in missed:
        print("below the bar:", *cell)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
