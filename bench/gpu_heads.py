"""Gradients with grouped query heads by the number of parts that share them: docs/lab/006-hopper-backward.md, 113 to 120.

    python python/build.py && python bench/gpu_heads.py [--rounds N] [--wide]

Every line is one shape; its configurations alternate in one process. Rates are TFLOP/s. Gradients of each configuration are
compared with those of the rule first.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
from fulgurite import _describe  # noqa: E402
from gpu_models import MODELS, Shape, options_of, tensors  # noqa: E402
from gpu_race import race  # noqa: E402

BF16 = torch.bfloat16
# Of the norm of a gradient: configurations differ in the order of additions alone.
FAR = 0.01


def parts(*counts):
    return ["", *(f"head_splits={count}" for count in counts)]


BANDS = ["", *(f"head_splits={n}" + (f" pairs={p}" if p else "") for n in (1, 2, 4, 8) for p in (0, 2, 4, 8))]
MODEL = {shape.name: shape for shape in MODELS}
SWEEPS = (
    (MODEL["Llama-3-70B"], BANDS),
    (MODEL["Qwen2.5-7B"], parts(1, 2, 4, 7)),
    (MODEL["Falcon-7B"], parts(1, 4, 8, 12, 16, 24, 36, 71)),
    (MODEL["Llama-3-8B"], parts(1, 2, 4)),
    (MODEL["Mistral"], parts(1, 2, 4)),
    (MODEL["Qwen3-0.6B"], parts(1, 2)),
    (MODEL["Llama-3.2-1B"], parts(1, 2, 4)),
    (Shape("other", 2, 5000, 32, 4, 128), parts(1, 2, 4, 8)),
    (Shape("other", 1, 3001, 16, 2, 96), parts(1, 2, 4, 8)),
    (Shape("other", 1, 1111, 71, 1, 64), parts(1, 4, 8, 16, 32, 71)),
    (Shape("other", 3, 777, 24, 3, 128), parts(1, 2, 4, 8)),
    (Shape("other", 16, 300, 16, 4, 64), parts(1, 2, 4)),
    (Shape("other", 1, 20000, 8, 1, 128), parts(1, 2, 4, 8)),
)
# Head dims above 128: pairs of CTAs, which cannot spread heads, and configurations without pairs, which can.
PAIRS = "share=pairs rows=64 adds=threads depth=2 key_depth=1 early=8 drain=yes join=never registers=240:24"
COLUMNS = PAIRS.replace("pairs", "columns").replace("240:24", "232:40")


def wide(*counts):
    return ["", PAIRS, *(f"{COLUMNS} head_splits={count}" for count in counts)]


WIDE = (
    (Shape("Gemma-2B", 1, 8192, 8, 1, 256), wide(1, 2, 4, 8)),
    (Shape("other", 2, 6144, 16, 2, 256), wide(1, 2, 4, 8)),
    (Shape("other", 3, 285, 71, 1, 256), wide(1, 8, 16, 24, 36)),
    (Shape("other", 1, 4096, 16, 8, 256), wide(1, 2)),
    (Shape("other", 4, 1000, 32, 4, 256), wide(1, 2, 4)),
    (Shape("other", 4, 7384, 16, 16, 160), wide(1)),
    (Shape("other", 1, 6128, 64, 16, 160), wide(1, 2, 4)),
    (Shape("other", 16, 438, 64, 8, 160), wide(1, 2)),
    (Shape("other", 8, 1670, 24, 8, 192), wide(1, 3)),
    (Shape("other", 3, 4163, 48, 3, 192), wide(1, 2, 4, 8)),
    (Shape("other", 2, 10860, 4, 1, 192), wide(1, 2, 4)),
    (Shape("other", 2, 860, 7, 1, 192), wide(1, 4, 7)),
)
PACKED = (4096, 2048, 8192, 1024, 512, 12288, 4608)


def contenders(tunings, call, outputs):
    """A call for each configuration that has kernels, all with the gradients of the rule, the first one."""
    found, want = {}, None
    for tuning in tunings:
        out = outputs()

        def run(tuning=tuning, out=out):
            _describe.backward_tuning = tuning
            call(out)

        run()
        torch.cuda.synchronize()
        want = want or [x.clone() for x in out]
        far = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(out, want))
        if far > FAR:
            raise SystemExit(f"{tuning}: gradients are {far:.3f} of their norm away from those of the rule")
        found[tuning or "rule"] = run
    return found


def show(name, flops, ms):
    short = {PAIRS: "pairs"} | {f"{COLUMNS} head_splits={n}": f"columns head_splits={n}" for n in range(100)}
    print(f"{name}: " + "; ".join(f"{short.get(tuning, tuning)} {flops / t / 1e9:.0f}" for tuning, t in ms.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--wide", action="store_true", help="head dims above 128 alone")
    options = parser.parse_args()
    rounds = options.rounds
    for shape, tunings in WIDE if options.wide else SWEEPS:
        q, k, v, sinks = tensors(shape)
        given = options_of(shape, sinks)
        _describe.backward_tuning = ""
        o, lse = fulgurite.attention(q, k, v, return_lse=True, **given)
        d_o = torch.randn_like(o)
        call = lambda out: fulgurite.attention_backward(d_o, q, k, v, o, lse, out=out, **given)  # noqa: E731, B023
        show(shape.text(), shape.flops(5), race(contenders(tunings, call, lambda: [torch.empty_like(x) for x in (q, k, v)]), rounds))  # noqa: B023
    if options.wide:
        return
    offsets = torch.tensor([0, *PACKED], device="cuda").cumsum(0).to(torch.int32)
    longest = max(PACKED)
    for heads, kv_heads in ((32, 8), (16, 16)):
        q, k, v = (torch.randn(sum(PACKED), n, 128, device="cuda").to(BF16) for n in (heads, kv_heads, kv_heads))
        given = {"causal": True, "cu_seqlens": (offsets, offsets), "max_lengths": (longest, longest)}
        _describe.backward_tuning = ""
        o, lse = fulgurite.attention(q, k, v, return_lse=True, **given)
        d_o = torch.randn_like(o)
        call = lambda out: fulgurite.attention_backward(d_o, q, k, v, o, lse, out=out, **given)  # noqa: E731, B023
        flops = sum(2 * 5 * heads * 128 * n * (n + 1) // 2 for n in PACKED)
        show(f"packed {heads}/{kv_heads}", flops, race(contenders(parts(1, 2, 4), call, lambda: [torch.empty_like(x) for x in (q, k, v)]), rounds))  # noqa: B023
    _describe.backward_tuning = ""


if __name__ == "__main__":
    main()
