"""Strides that TMA cannot take, and head dims up to 512: python bench/gpu_shapes.py (after python/build.py).

A call on strided tensors must have the bits of the same call on contiguous ones; head dims are checked against float64. Times are
medians of rounds in which the contenders alternate: a strided call, the same after .contiguous(), and a contiguous one.
"""

import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402

ROUNDS = 15

# Batch, queries, keys, heads, heads of keys, head_dim, options.
STRIDED = (
    (2, 4096, 4096, 16, 16, 128, {}),
    (2, 4096, 4096, 16, 4, 64, {"causal": True}),
    (3, 500, 900, 4, 4, 256, {"causal": True}),
    (4, 3, 9000, 32, 8, 128, {"causal": True}),
)
DIMS = (1, 7, 60, 100, 130, 255, 257, 264, 300, 384, 512)
# Sequence, head_dim: 16384 tokens, 4 heads.
TIMED = ((1024, 384), (4096, 384), (1024, 512), (4096, 512))


def spread(x, before, after):
    """The same values, `before` elements from where memory begins, `after` more than packed between heads, rows and sequences."""
    b, s, h, d = x.shape
    head = d + after
    row = h * head + after
    batch = s * row + after
    memory = torch.full((before + b * batch,), float("nan"), dtype=x.dtype, device=x.device)
    view = memory.as_strided(x.shape, (batch, row, head, 1), before)
    view.copy_(x)
    return view


def time(contenders):
    """Medians in milliseconds."""
    events = [[] for _ in contenders]
    for call in contenders:
        call()
    for _ in range(ROUNDS):
        for call, own in zip(contenders, events):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            call()
            pair[1].record()
            own.append(pair)
    torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) for a, b in own) for own in events]


def reference(q, k, v, causal):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        n, m = s.shape[-2:]
        s = s.masked_fill(torch.ones(n, m, device=s.device).tril(m - n) == 0, float("-inf"))
    return (s.softmax(-1).nan_to_num() @ v).transpose(1, 2)


def draw(b, s, h, d, dtype=torch.bfloat16):
    return torch.randn(b, s, h, d, device="cuda").to(dtype)


def strided():
    wrong = 0
    for problem in STRIDED:
        b, n, m, h, h_kv, d, options = problem
        plain = [draw(b, n, h, d), draw(b, m, h_kv, d), draw(b, m, h_kv, d)]
        want = fulgurite.attention(*plain, **options)
        odd = [spread(x, 1, 1) for x in plain]
        got, out = fulgurite.attention(*odd, **options), spread(torch.zeros_like(want), 3, 1)
        fulgurite.attention(*odd, out=out, **options)
        same = [torch.equal(got, want), torch.equal(out, want)]
        wrong += not all(same)
        outs = [torch.empty_like(want) for _ in range(2)]
        times = time(
            (
                lambda: fulgurite.attention(*odd, out=out, **options),
                lambda: fulgurite.attention(*(x.contiguous() for x in odd), out=outs[0], **options),
                lambda: fulgurite.attention(*plain, out=outs[1], **options),
            )
        )
        print(problem, f"bits equal {same}; strided, .contiguous() first, contiguous:", *(f"{t:.3f}" for t in times), "ms", flush=True)
    return wrong


def head_dims():
    wrong = 0
    for d in DIMS:
        for dtype, allowed in ((torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
            for causal in (False, True):
                q, k, v = draw(2, 300, 4, d, dtype), draw(2, 500, 2, d, dtype), draw(2, 500, 2, d, dtype)
                got = fulgurite.attention(q, k, v, causal=causal).double()
                want = reference(q, *(x.repeat_interleave(2, 2) for x in (k, v)), causal)
                error = ((got - want).norm() / want.norm()).item()
                ok = error <= allowed
                wrong += not ok
                print(f"head_dim {d}, {dtype}, causal {causal}: relative error {error:.1e}{'' if ok else ' WRONG'}", flush=True)
    return wrong


def timed():
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for s, d in TIMED:
        for causal in (False, True):
            q, k, v = (draw(16384 // s, s, 4, d) for _ in range(3))
            out = torch.empty_like(q)
            theirs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
            times = time(
                (
                    lambda: fulgurite.attention(q, k, v, causal="top-left" if causal else False, out=out),
                    lambda: sdpa(*theirs, is_causal=causal),
                )
            )
            flops = 4 * 16384 * s * 4 * d / (2 if causal else 1)
            rates = [flops / t / 1e9 for t in times]
            print(f"s {s}, d {d}, causal {causal}: ours {rates[0]:.0f}, torch {rates[1]:.0f} TFLOP/s, {rates[0] / rates[1]:.2f} x", flush=True)


def main():
    torch.manual_seed(5)
    wrong = strided() + head_dims()
    timed()
    print("wrong:", wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
