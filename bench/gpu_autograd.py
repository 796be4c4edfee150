"""What a small step of training costs the host: attention forward and backward by autograd, ours beside torch's SDPA.

    python python/build.py && python bench/gpu_autograd.py [--rounds 30]

Shapes are so small that the GPU waits for the host. Contenders alternate in one process; a row is the median of wall times
of 50 steps, eager, by `torch.compile`, and as the replay of a CUDA graph. Gradients of both are compared first.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402

# Batch, tokens, query heads, key/value heads, head dim.
SHAPES = ((1, 64, 4, 4, 64), (2, 100, 8, 2, 64), (16, 300, 12, 12, 64))
STEPS = 50


def ours(q, k, v):
    return fulgurite.flash_attn_func(q, k, v, causal=True)


def sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def step(attention, leaves):
    """One forward and backward pass; the graph around attention is a product and a sum, as in a layer."""
    q, k, v = leaves
    return torch.autograd.grad((attention(q * 0.5, k * 0.5, v * 0.5) * 2.0).sum(), leaves)


def captured(run):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def race(calls, rounds):
    times = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in list(calls.items())[:: 1 if number % 2 == 0 else -1]:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                call()
            spent = time.perf_counter() - start
            torch.cuda.synchronize()
            if number:
                times[name].append(spent / STEPS * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(1)
    for batch, tokens, heads, kv_heads, dim in SHAPES:
        make = lambda heads: torch.randn(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16).requires_grad_()
        leaves = (make(heads), make(kv_heads), make(kv_heads))
        modes = {"eager": {"ours": ours, "sdpa": sdpa}}
        modes["compiled"] = {name: torch.compile(attention, fullgraph=True, dynamic=False) for name, attention in modes["eager"].items()}
        print(f"{batch} x {tokens}, heads {heads}/{kv_heads}, d {dim}")
        for mode, attentions in modes.items():
            calls = {name: lambda attention=attention: step(attention, leaves) for name, attention in attentions.items()}
            for mine, theirs in zip(calls["ours"](), calls["sdpa"]()):
                far = ((mine.double() - theirs.double()).norm() / theirs.double().norm()).item()
                assert far < 0.02, f"gradients differ by {far:.2g} of their norm"
            us = race(calls, options.rounds)
            print(f"  {mode}: ours {us['ours']:.0f} us, sdpa {us['sdpa']:.0f} us; {us['sdpa'] / us['ours']:.2f} times as fast", flush=True)
            if mode == "eager":
                graphs = {name: captured(call) for name, call in calls.items()}
                us = race(graphs, options.rounds)
                print(f"  replayed: ours {us['ours']:.0f} us, sdpa {us['sdpa']:.0f} us", flush=True)


if __name__ == "__main__":
    main()
