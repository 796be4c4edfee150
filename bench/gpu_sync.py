"""Attention and its gradients by mma.sync beside FlashAttention-2 (torch's flash backend), in one process on any GPU since
Ampere.

    python python/build.py && python bench/gpu_sync.py check grid models
    python bench/gpu_sync.py tune --dims 64 128
    python bench/gpu_sync.py check-backward backward models-backward
    python bench/gpu_sync.py tune-backward --dims 64 128 256
    python bench/gpu_sync.py heads

`check` compares with float32, `grid` has square problems, `models` the shapes of known models, and `tune` races tile
configurations against each other, and `heads` numbers of parts that share the query heads of a key/value head. Every line is a ratio of medians in one run; above 1 we are faster.
"""

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
from fulgurite import _describe  # noqa: E402
from gpu_models import MODELS  # noqa: E402
from gpu_race import race  # noqa: E402

ENGINE = "cuda:mma.sync"


def tensors(batch, length, heads, kv_heads, dim, dtype=torch.bfloat16):
    return [torch.randn(batch, length, h, dim, device="cuda").to(dtype) for h in (heads, kv_heads, kv_heads)]


def flash2(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=q.shape[2] != k.shape[2]
        )


def cell(name, sizes, causal, rounds, results, tuning=("",), **options):
    """Races ours, with each tile configuration, against FlashAttention-2."""
    batch, length, heads, kv_heads, dim = sizes
    q, k, v = tensors(*sizes)
    out = torch.empty_like(q)
    calls = {}
    for text in tuning:

        def ours(text=text):
            _describe.sync_tuning = text
            fulgurite.attention(q, k, v, causal=causal, out=out, engine=ENGINE, **options)

        try:
            ours()
        except Exception as e:
            print(f"{name}: {text}: {e}")
            continue
        calls[text or "ours"] = ours
    if not options:
        calls["flash2"] = functools.partial(flash2, q, k, v, causal)
    calls["wgmma"] = functools.partial(fulgurite.attention, q, k, v, causal=causal, out=out, engine="cuda", **options)
    ms = race(calls, rounds)
    _describe.sync_tuning = ""
    pairs = length * (length + 1) / 2 if causal else length * length
    rate = {who: 4 * batch * heads * dim * pairs / t / 1e9 for who, t in ms.items()}
    best = max((who for who in rate if who not in ("flash2", "wgmma")), key=rate.get)
    ratio = rate[best] / rate["flash2"] if "flash2" in rate else math.nan
    print(f"{name}: " + ", ".join(f"{who} {x:.0f}" for who, x in rate.items()) + f" TFLOP/s; {best} / flash2 {ratio:.3f}", flush=True)
    results.append({"name": name, "tflops": rate, "best": best, "ratio": ratio})
    return ratio


def check():
    """Random problems against float32 on the same inputs."""
    rng = torch.Generator().manual_seed(1)
    for i in range(60):
        pick = lambda *xs: xs[int(torch.randint(len(xs), (1,), generator=rng))]  # noqa: E731
        batch, group, kv_heads, dim = pick(1, 2, 3), pick(1, 2, 5), pick(1, 2, 3), pick(16, 40, 64, 72, 96, 128, 160, 192, 256)
        q_len, k_len, causal, dtype = pick(1, 63, 64, 129, 300, 1000), pick(1, 31, 64, 200, 777, 2000), pick(True, False), pick(torch.bfloat16, torch.float16)
        q = torch.randn(batch, q_len, group * kv_heads, dim, device="cuda").to(dtype)
        k, v = (torch.randn(batch, k_len, kv_heads, dim, device="cuda").to(dtype) for _ in range(2))
        ours, lse = fulgurite.attention(q, k, v, causal=causal, engine=ENGINE, return_lse=True)
        wide = [x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))]
        scores = wide[0] @ wide[1].mT / math.sqrt(dim)
        if causal:
            seen = torch.ones(q_len, k_len, device="cuda", dtype=torch.bool).tril(k_len - q_len)
            scores = scores.masked_fill(~seen, -math.inf)
        want = torch.nan_to_num(scores.softmax(-1)) @ wide[2]
        error = (ours.double() - want.transpose(1, 2)).abs().max().item()
        lse_error = torch.nan_to_num(lse.double() - scores.logsumexp(-1), nan=0.0).abs().max().item()
        allowed = 3e-2 if dtype is torch.bfloat16 else 4e-3
        assert error < allowed and lse_error < 1e-3, (q.shape, k.shape, causal, dtype, error, lse_error)
    print("check: 60 random problems agree with float64")


BACKWARD = {
    64: ["", "rows=64 depth=4", "rows=128 depth=3", "share=warps16 rows=64 depth=4", "share=warps16 rows=64 depth=3"],
    128: ["", "depth=3", "share=warps16 depth=4", "share=warps16 depth=3"],
    256: ["", "depth=3", "depth=4"],
}


def backward_cell(name, sizes, causal, rounds, results, tuning=("",), **options):
    """Races our gradients, with each tile configuration, against FlashAttention-2."""
    batch, length, heads, kv_heads, dim = sizes
    q, k, v = tensors(*sizes)
    d_o, out = torch.randn_like(q), tuple(torch.empty_like(x) for x in (q, k, v))
    o, lse = fulgurite.attention(q, k, v, causal=causal, engine=ENGINE, return_lse=True, **options)
    calls = {}
    for text in tuning:

        def ours(text=text, engine=ENGINE):
            _describe.backward_tuning = text
            fulgurite.attention_backward(d_o, q, k, v, o, lse, causal=causal, out=out, engine=engine, **options)
            _describe.backward_tuning = ""

        try:
            ours()
        except Exception as e:
            _describe.backward_tuning = ""
            print(f"{name}: {text}: {e}")
            continue
        calls[text or "ours"] = ours
    if not options:
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            theirs = scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=heads != kv_heads)
        calls["flash2"] = functools.partial(torch.autograd.grad, theirs, leaves, d_o.transpose(1, 2), retain_graph=True)
    calls["wgmma"] = lambda: ours(text="", engine="cuda")
    ms = race(calls, rounds)
    pairs = length * (length + 1) / 2 if causal else length * length
    rate = {who: 10 * batch * heads * dim * pairs / t / 1e9 for who, t in ms.items()}
    best = max((who for who in rate if who not in ("flash2", "wgmma")), key=rate.get, default=None)
    ratio = rate[best] / rate["flash2"] if best and "flash2" in rate else math.nan
    print(f"{name}: " + ", ".join(f"{who} {x:.0f}" for who, x in rate.items()) + f" TFLOP/s; {best} / flash2 {ratio:.3f}", flush=True)
    results.append({"name": name, "tflops": rate, "best": best, "ratio": ratio})
    return ratio


def check_backward(count=60):
    """Gradients of random problems against float64 on the same inputs, and the bits of two runs."""
    rng = torch.Generator().manual_seed(2)
    worst = 0.0
    for _ in range(count):
        pick = lambda *xs: xs[int(torch.randint(len(xs), (1,), generator=rng))]  # noqa: E731
        batch, group, kv_heads, dim = pick(1, 2, 3), pick(1, 2, 5), pick(1, 2, 3), pick(16, 40, 64, 72, 96, 128, 160, 192, 256)
        q_len, k_len, causal, dtype = pick(1, 63, 64, 129, 300, 1000), pick(1, 31, 64, 200, 777, 2000), pick(True, False), pick(torch.bfloat16, torch.float16)
        q = torch.randn(batch, q_len, group * kv_heads, dim, device="cuda").to(dtype).requires_grad_()
        k, v = (torch.randn(batch, k_len, kv_heads, dim, device="cuda").to(dtype).requires_grad_() for _ in range(2))
        d_o = torch.randn_like(q)
        o = fulgurite.attention(q, k, v, causal=causal, engine=ENGINE)
        ours, again = (torch.autograd.grad(o, (q, k, v), d_o, retain_graph=True) for _ in range(2))
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        wq, wk, wv = wide[0].transpose(1, 2), *(x.repeat_interleave(group, 2).transpose(1, 2) for x in wide[1:])
        scores = wq @ wk.mT / math.sqrt(dim)
        if causal:
            seen = torch.ones(q_len, k_len, device="cuda", dtype=torch.bool).tril(k_len - q_len)
            scores = scores.masked_fill(~seen, -1e300)
            p = scores.softmax(-1).masked_fill(~seen, 0.0)
        else:
            p = scores.softmax(-1)
        want = torch.autograd.grad((p @ wv).transpose(1, 2), wide, d_o.double())
        eps = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
        for name, x, y, z in zip("qkv", ours, again, want):
            error = ((x.double() - z).abs().max() / max(z.abs().max().item(), 1e-3)).item() / eps
            worst = max(worst, error)
            assert error < 8, (name, q.shape, k.shape, causal, dtype, error)
            assert name == "q" or torch.equal(x, y), (name, q.shape, k.shape, "two runs differ")
    print(f"check-backward: {count} random problems agree with float64 (worst {worst:.2f} units of rounding of the largest element); d_k and d_v have the same bits twice")


def models():
    """Name, sizes and options of each known model without sinks."""
    for model in MODELS:
        if not model.sinks:
            options = {} if model.window is None else {"window": (model.window, 0)}
            options |= {"softcap": model.softcap} if model.softcap else {}
            yield model.text(), (model.batch, model.length, model.heads, model.kv_heads, model.dim), options


def geomean(ratios):
    ratios = [r for r in ratios if not math.isnan(r)]
    if ratios:
        print(f"{len(ratios)} cells: lowest {min(ratios):.3f}, geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f}")


PARTS = ("check", "grid", "models", "tune", "check-backward", "backward", "models-backward", "tune-backward", "heads")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", help="write the results here, as JSON")
    args = parser.parse_args()
    results = []
    if "check" in args.parts:
        check()
    if "tune" in args.parts:
        for dim, causal in itertools.product(args.dims, (False, True)):
            tuning = [f"blocks={b} cols={c} depth={d}" for b, c, d in itertools.product((1, 2), (32, 48, 64, 80, 96, 112, 128), (2, 3))]
            fits = [t for t in tuning if shared(t, dim) <= 99 * 1024 and not ("blocks=2" in t and registers(t, dim) > 250)]
            heads = max(1, 2048 // dim)
            cell(f"tune d {dim} causal {causal}", (4, 4096, heads, heads, dim), causal, args.rounds, results, fits)
    if "check-backward" in args.parts:
        check_backward()
    if "tune-backward" in args.parts:
        for dim, causal in itertools.product(args.dims, (False, True)):
            heads = max(1, 2048 // dim)
            size = (4, 4096, heads, heads, dim)
            backward_cell(f"tune-backward d {dim} causal {causal}", size, causal, args.rounds, results, BACKWARD.get(dim, [""]))
    if "backward" in args.parts:
        grid = itertools.product(args.dims, args.lengths, (False, True))
        sizes = ((f"backward d {d} {n} causal {c}", (16384 // n, n, 2048 // d, 2048 // d, d), c) for d, n, c in grid)
        geomean([backward_cell(name, size, causal, args.rounds, results) for name, size, causal in sizes])
    if "models-backward" in args.parts:
        geomean([backward_cell(f"backward {name}", size, True, args.rounds, results, **options) for name, size, options in models()])
    if "heads" in args.parts:
        for name, size, options in models():
            group = size[2] // size[3]
            if group > 1 and not options:
                counts = sorted({n for n in (1, 2, 4, 8, 16, 24, group) if n <= group})
                tuning = ["", *(f"head_splits={n}" for n in counts)]
                backward_cell(f"heads {name}", size, True, args.rounds, results, tuning)
    if "grid" in args.parts:
        grid = itertools.product(args.dims, args.lengths, (False, True))
        sizes = ((f"d {d} {n} causal {c}", (16384 // n, n, 2048 // d, 2048 // d, d), c) for d, n, c in grid)
        geomean([cell(name, size, causal, args.rounds, results) for name, size, causal in sizes])
    if "models" in args.parts:
        geomean([cell(name, size, True, args.rounds, results, **options) for name, size, options in models()])
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


def numbers(text):
    return [int(word.split("=")[1]) for word in text.split()]


def shared(text, dim):
    """Bytes of shared memory of a configuration."""
    blocks, cols, depth = numbers(text)
    return 2 * dim * (64 * blocks + depth * cols)


def registers(text, dim):
    """Registers of a thread for accumulators and probabilities."""
    blocks, cols, _ = numbers(text)
    return blocks * (dim // 2 + cols // 2 + cols // 4)


if __name__ == "__main__":
    main()
