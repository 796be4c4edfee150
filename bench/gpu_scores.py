"""What ALiBi and softcap cost in forward attention on a GPU: time over that of plain attention with the same mask.

    python python/build.py && python bench/gpu_scores.py

Contenders alternate in one process, medians of rounds. Each is compared with float64 attention on a few queries first.
"""

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
from gpu_race import race  # noqa: E402

# Batch, tokens, query heads, key/value heads, head dim.
SHAPES = ((8, 2048, 16, 16, 64), (1, 16384, 32, 32, 64), (8, 2048, 16, 16, 128), (1, 16384, 16, 16, 128), (2, 5000, 28, 4, 128), (1, 8192, 8, 8, 256))
CAP = 50.0


def reference(q, k, v, rows, causal, slopes, cap):
    """Outputs of some queries of the first sequence and head, in float64."""
    q, k, v = q[0, rows, 0].double(), k[0, :, 0].double(), v[0, :, 0].double()
    scores = q @ k.T * q.shape[-1] ** -0.5
    distance = rows[:, None] - torch.arange(k.shape[0], device=q.device)[None]
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores - slopes[0].double() * distance.abs() if slopes is not None else scores
    scores = scores.masked_fill(distance < 0, float("-inf")) if causal else scores
    return torch.softmax(scores, -1) @ v


def measure(batch, tokens, heads, kv_heads, dim):
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = make(batch, tokens, heads, dim), make(batch, tokens, kv_heads, dim), make(batch, tokens, kv_heads, dim)
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device="cuda", dtype=torch.float32) / heads)
    rows = torch.tensor([0, 1, 77, tokens // 2, tokens - 1], device="cuda")
    variants = {"plain": {}, "ALiBi": {"alibi_slopes": slopes}, "softcap": {"softcap": CAP}}
    calls = {}
    for causal in (False, True):
        for name, options in variants.items():
            call = functools.partial(fulgurite.flash_attn_func, q, k, v, causal=causal, **options)
            expected = reference(q, k, v, rows, causal, options.get("alibi_slopes"), options.get("softcap"))
            error = float((call()[0, rows, 0].double() - expected).abs().max())
            assert error < 0.03, f"{name}, causal {causal}: off by {error:.2g}"
            calls[name, causal] = call
    times = race(calls, 12)
    print(f"{batch} x {tokens}, heads {heads}/{kv_heads}, d {dim}")
    for causal in (False, True):
        plain = times["plain", causal]
        costs = ", ".join(f"{name} {times[name, causal] / plain:.3f}" for name in ("ALiBi", "softcap"))
        print(f"  {'causal' if causal else 'full'}: plain {plain:.3f} ms; {costs} times as long", flush=True)


if __name__ == "__main__":
    for shape in SHAPES:
        measure(*shape)
