"""Short sequences on the CPU, as encoders and embedding models have them: ours beside PyTorch's SDPA.

    python bench/cpu_short.py                                       the whole grid, in a minute
    python bench/cpu_short.py --tokens 77 197 --batch 1             odd lengths, one sequence

Tensors are `[batch, sequence, heads, dim]` in memory, as a projection leaves them; SDPA gets transposed views, ours the tensors
themselves. `padded` adds a key padding mask `[batch, 1, 1, sequence]` to both. Contenders alternate in one process, and `torch` is the ratio
of medians: SDPA's time over ours, above 1 where we are faster. Results are compared before they are timed.
"""

import argparse
import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "python")]

import fulgurite  # noqa: E402
from race import Contender, Steal, geometric_mean, race  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Largest differences allowed, as shares of the largest element: enough to see that both compute the same thing.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2, "f16": 5e-3}
SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
WIDTH = 768  # heads x dim, of BERT-base and its many children
ROWS = 2048  # batch x tokens, if no batch is given


def cell(args, dtype, tokens, dim, padded):
    batch, heads = args.batch or max(1, ROWS // tokens), args.heads or max(1, WIDTH // dim)
    # From one projection, so that rows of one head lie apart by all heads.
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, tokens, heads, dim, generator=generator).to(DTYPES[dtype]) for _ in range(3))
    mask = None
    if padded:
        lengths = torch.tensor([tokens - (i * tokens) // (2 * batch) for i in range(batch)])
        lengths[0] = tokens if batch > 1 else max(1, tokens - tokens // 4)
        mask = (torch.arange(tokens)[None, :] < lengths[:, None])[:, None, None, :]
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    own = lambda: fulgurite.attention(q, k, v, mask=mask, threads=args.threads)
    sdpa = lambda: F.scaled_dot_product_attention(*turned, attn_mask=mask)
    got, want = own().float(), sdpa().transpose(1, 2).float()
    if not (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max():
        sys.exit(f"{dtype} {batch} x {heads} x {tokens} x {dim}: results differ by {(got - want).abs().max()}")
    calls = [Contender("ours", lambda: own() is None or None), Contender("torch", lambda: sdpa() is None or None)]
    taken = {name: result["median_s"] for name, result in race(calls, args.seconds, 3).items()}
    flops = 4 * batch * heads * tokens * tokens * dim
    ratio = taken["torch"] / taken["ours"]
    print(
        f"{dtype:5}{tokens:5}{dim:5}{batch:4} x {heads:3}  {'padded' if padded else '':8}{taken['ours'] * 1e6:10.0f}"
        f"{flops / taken['ours'] / 1e9:9.1f}{ratio:8.2f}",
        flush=True,
    )
    return ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--dims", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch", type=int, help=f"default: {ROWS} tokens in all")
    parser.add_argument("--heads", type=int, help=f"default: {WIDTH} channels in all")
    parser.add_argument("--masks", nargs="+", choices=["none", "padded"], default=["none", "padded"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.6, help="per cell")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    found = " ".join(name for name in SETS if name in pathlib.Path("/proc/cpuinfo").read_text().split())
    print(f"torch {torch.__version__}, {args.threads} threads, instruction sets: {found}")
    print(f"{'':5}{'seq':>5}{'dim':>5}{'batch x heads':>14} {'':8}{'us':>7}{'GFLOP/s':>9}{'torch':>8}")
    steal, ratios = Steal(), {}
    for dtype in args.dtypes:
        for tokens in args.tokens:
            for dim in args.dims:
                for mask in args.masks:
                    ratios[dtype, tokens, dim, mask] = cell(args, dtype, tokens, dim, mask == "padded")
    for dtype in args.dtypes:
        own = [ratio for key, ratio in ratios.items() if key[0] == dtype]
        print(f"{dtype}: lowest {min(own):.2f}, geometric mean {geometric_mean(own):.2f}, {sum(r < 1 for r in own)} of {len(own)} below 1.0")
    lowest = min(ratios, key=ratios.get)
    print(f"all: lowest {ratios[lowest]:.2f} at {lowest}, geometric mean {geometric_mean(ratios.values()):.2f}, steal {steal.share():.0%}")


if __name__ == "__main__":
    main()
