"""The same bits in 200 runs, alone and in a batch, and in a CUDA graph; of gradients those of keys and values, and in a fixed order
all: python bench/gpu_bits.py (after python/build.py)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402

# Batch, queries, keys, heads, heads of keys, head_dim, options.
PROBLEMS = (
    (4, 1000, 777, 8, 2, 64, {"causal": True}),
    (2, 2048, 2048, 16, 16, 128, {}),
    (3, 500, 900, 4, 4, 256, {"causal": True}),
    # Few tiles of keys: their gradients are summed in pieces.
    (1, 3000, 2048, 4, 4, 128, {}),
    (1, 3000, 2100, 8, 4, 64, {}),
    (4, 3, 9000, 32, 8, 128, {"causal": True}),
    (2, 1, 20000, 8, 1, 64, {}),
    (4, 700, 700, 8, 8, 128, {"softcap": 20.0}),
    (4, 700, 700, 8, 8, 128, {"window": (100, 3)}),
)


def gradients(problem):
    """How many of 200 runs have other bits of d_q, d_k and d_v than the first, in any order and in a fixed one."""
    b, n, m, h, h_kv, d, options = problem
    q = torch.randn(b, n, h, d, device="cuda").bfloat16().requires_grad_()
    k, v = (torch.randn(b, m, h_kv, d, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    d_o = torch.randn(b, n, h, d, device="cuda").bfloat16()
    found = []
    for deterministic in (False, True):
        o = fulgurite.attention(q, k, v, deterministic=deterministic, **options)
        run = lambda: torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True)  # noqa: E731
        first, differ = run(), [0, 0, 0]
        for _ in range(200):
            differ = [n + (not torch.equal(a, b)) for n, a, b in zip(differ, first, run())]
        found.append(differ)
    return found


def main():
    torch.manual_seed(3)
    wrong = 0
    for problem in PROBLEMS:
        if problem[1] < 100:
            continue  # Few queries are for decoding, which has no gradients.
        usual, fixed = gradients(problem)
        wrong += any(usual[1:]) or any(fixed)
        print(problem, f"gradients that differ: d_q, d_k, d_v {usual}, in a fixed order {fixed}", flush=True)
    for problem in PROBLEMS:
        b, n, m, h, h_kv, d, options = problem
        q = torch.randn(b, n, h, d, device="cuda").bfloat16()
        k, v = (torch.randn(b, m, h_kv, d, device="cuda").bfloat16() for _ in range(2))
        o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
        # Who does not read the LSE may have other last bits of o.
        unread = fulgurite.attention(q, k, v, **options)
        differ = 0
        for _ in range(200):
            again = fulgurite.attention(q, k, v, return_lse=True, **options)
            differ += not (torch.equal(o, again[0]) and torch.equal(lse, again[1]))
        alone = torch.cat([fulgurite.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], **options) for i in range(b)])
        graph, stream, out = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.empty_like(o)
        with torch.cuda.stream(stream):
            fulgurite.attention(q, k, v, out=out, **options)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            fulgurite.attention(q, k, v, out=out, **options)
            fulgurite.attention(q, k, v, out=out, **options)
        out.zero_()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        same = [differ == 0, torch.equal(alone, unread), torch.equal(out, unread)]
        wrong += not all(same)
        print(problem, f"runs that differ {differ}, alone equal {same[1]}, graph equal {same[2]}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
