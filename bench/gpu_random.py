"""Random problems with grouped heads on a GPU against float64: outputs, gradients, and bits over many runs.

    python python/build.py && python bench/gpu_random.py [--count N] [--seed N] [--bits N] [--engine NAME]
    compute-sanitizer --tool memcheck python bench/gpu_random.py --count 10 --bits 0
    compute-sanitizer --tool racecheck python bench/gpu_random.py --count 10 --bits 0 --engine cuda:mma.sync

An error is a share of the norm of a tensor. The limits are loose (five times what 16-bit results of right kernels have):
this finds wrong results on real hardware. The tolerance rule is what `fulgurite check --engine cuda` applies.
"""

import argparse
import math
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402

LIMITS = {torch.bfloat16: 0.012, torch.float16: 0.002}
RUNS = 200


def output(q, k, v, mask, softcap, bias=None, sinks=None):
    """o of tensors in float64."""
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~mask, -math.inf)
    top = scores.amax(-1, keepdim=True).clamp_min(-1e30)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        # A row that sees no key has nothing but its sink, and o is 0 whatever the weight of the sink is.
        total = total + torch.where(mask.any(-1)[:, None], torch.exp(sinks[:, None, None] - top), 1)
    return torch.einsum("bhij,bjhd->bihd", weights / torch.where(total == 0, 1, total), v.repeat_interleave(group, 2))


def reference(q, k, v, d_o, mask, softcap):
    """o and the gradients in float64."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    o = output(q, k, v, mask, softcap)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), d_o.double())


def drawn(rng):
    """Tensors, options and the mask of a random problem."""
    dtype, dim = rng.choice(list(LIMITS)), rng.choice((64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 256))
    kv_heads, group, batch = rng.choice((1, 1, 2, 3)), rng.choice((2, 3, 4, 5, 7, 8, 16, 71)), rng.choice((1, 1, 2, 3))
    group = group if kv_heads * group <= 80 else 7
    n = rng.randint(1, 700)
    m = rng.choice((n, n, rng.randint(1, 700)))
    rows, cols = torch.arange(n, device="cuda")[:, None] + (m - n), torch.arange(m, device="cuda")[None]
    options, mask = {}, torch.ones(n, m, dtype=torch.bool, device="cuda")
    if rng.random() < 0.7:
        options["causal"], mask = True, cols <= rows
    elif rng.random() < 0.5:
        left = rng.randint(0, 200)
        options["window"], mask = (left, 0), (cols <= rows) & (cols >= rows - left)
    if rng.random() < 0.2:
        options["softcap"] = 20.0
    q = torch.randn(batch, n, kv_heads * group, dim, device="cuda").to(dtype)
    k, v = (torch.randn(batch, m, kv_heads, dim, device="cuda").to(dtype) for _ in range(2))
    return q, k, v, options, mask


def error(got, want):
    norm = want.norm()
    return float((got.double() - want).norm() / norm) if norm > 1e-6 else float(got.double().norm())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bits", type=int, default=12, help=f"problems whose gradients are computed {RUNS} times")
    parser.add_argument("--engine", help="such as cuda:mma.sync; the best for the GPU without it")
    asked = parser.parse_args()
    engine = {"engine": asked.engine} if asked.engine else {}
    rng, wrong, worst = random.Random(asked.seed), 0, 0.0
    for number in range(asked.count):
        q, k, v, options, mask = drawn(rng)
        options.update(engine)
        fixed = {"deterministic": rng.random() < 0.4 and "mma" not in (asked.engine or ""), **options}
        d_o = torch.randn_like(q)
        o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
        gradients = fulgurite.attention_backward(d_o, q, k, v, o, lse, **fixed)
        wants = reference(q, k, v, d_o, mask, options.get("softcap"))
        for name, got, want in zip(("o", "d_q", "d_k", "d_v"), (o, *gradients), wants):
            share = error(got, want) / LIMITS[q.dtype]
            worst = max(worst, share)
            if not share <= 1:
                wrong += 1
                print(f"WRONG {number} {name}: {share:.2f} of the limit, q {list(q.shape)}, k {list(k.shape)}, {q.dtype}, {fixed}")
        for _ in range(RUNS if number < asked.bits else 0):
            again = fulgurite.attention_backward(d_o, q, k, v, o, lse, **fixed)
            same = [torch.equal(a, b) for a, b in zip(gradients, again)]
            if not all(same[1:]) or (fixed["deterministic"] and not same[0]):
                wrong += 1
                print(f"BITS {number}: equal d_q, d_k, d_v {same}, q {list(q.shape)}, k {list(k.shape)}, {fixed}")
                break
    torch.cuda.synchronize()
    print(f"{asked.count} problems, {wrong} wrong, the worst at {worst:.2f} of its limit")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
