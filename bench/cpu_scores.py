"""What masks, biases and score modifiers cost on the CPU: beside plain attention, and beside PyTorch's SDPA.

    python bench/cpu_scores.py --tokens 512 1024 --dims 64 128 --dtypes f32 bf16 --backward

Each case alternates with plain attention and with `torch.nn.functional.scaled_dot_product_attention` given the same mask or
bias (for a modifier, the bias it amounts to; softcap has no such form and no column). The figures are ratios of medians within
one run: `cost` is ours over our plain attention (lower is better), `torch` is SDPA's time over ours (above 1 means that we
are faster). With `--backward`, a call is forward and backward; `--only 'ALiBi|H,S,S'` chooses cases.
"""

import argparse
import pathlib
import re
import sys

import torch
import torch.nn.functional as F

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent / "python")]

import fulgurite  # noqa: E402
from race import Contender, race  # noqa: E402

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SETS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


def cases(batch, heads, tokens, dtype):
    """Name, keywords of our call, and the mask or bias for SDPA (None: no equal)."""
    lengths = torch.tensor([tokens - 1 - (i * tokens) // (3 * batch) for i in range(batch)])
    keep = torch.arange(tokens)[None, :] < lengths[:, None]
    keys = keep[:, None, None, :]
    documents = (torch.arange(tokens) * 4 // tokens).to(torch.int32)
    same = (documents[:, None] == documents[None, :])[None, None]
    slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)])
    index = torch.arange(tokens)
    away = (index[:, None] - index[None, :]).abs()
    alibi = -(slopes[:, None, None] * away)[None].to(dtype)
    full = torch.randn(1, heads, tokens, tokens, generator=torch.Generator().manual_seed(1)).to(dtype)
    row = full[:, :1, :1, :].contiguous()
    table = torch.randn(heads, 2 * tokens - 1, generator=torch.Generator().manual_seed(2)).to(dtype)
    relative = table[:, (index[:, None] - index[None, :]) + tokens - 1][None].contiguous()
    holes = (torch.rand(1, 1, tokens, tokens, generator=torch.Generator().manual_seed(3)) < 0.8) | torch.eye(tokens).bool()
    return [
        ("plain", {}, "plain"),
        ("padding mask [B,1,1,S]", {"mask": keys}, keys),
        ("captured padding", {"mask_mod": lambda b, h, q, k: keep[b, k]}, keys),
        ("documents", {"mask_mod": lambda b, h, q, k: documents[q] == documents[k]}, same),
        ("ALiBi", {"alibi_slopes": slopes}, alibi),
        ("softcap", {"softcap": 30.0}, None),
        ("bias [1,H,S,S]", {"bias": full}, full),
        ("bias [1,1,1,S]", {"bias": row}, row),
        ("relative table", {"score_mod": lambda s, b, h, q, k: s + table[h, q - k + (tokens - 1)]}, relative),
        ("boolean [1,1,S,S]", {"mask": holes}, holes),
    ]


def compare(args, dtype, tokens, dim, backward):
    batch = args.batch

    def fresh(axes):
        return torch.randn(axes, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype]).requires_grad_(backward)

    ours = [fresh((batch, tokens, args.heads, dim)) for _ in range(3)]
    theirs = [x.detach().transpose(1, 2).requires_grad_(backward) for x in ours]
    d_o = torch.randn(batch, tokens, args.heads, dim).to(DTYPES[dtype])

    def finish(o, tensors, d_o):
        if backward:
            torch.autograd.grad(o, tensors, d_o)

    def own(options):
        return lambda: finish(fulgurite.attention(*ours, threads=args.threads, **options), ours, d_o)

    def sdpa(mask):
        return lambda: finish(F.scaled_dot_product_attention(*theirs, attn_mask=mask), theirs, d_o.transpose(1, 2))

    what = "forward and backward" if backward else "forward"
    print(f"\n{dtype}, {batch} x {args.heads} heads x {tokens} tokens x {dim}, {what}")
    print(f"{'':24}{'ms':>9}{'cost':>8}{'torch':>8}")
    plain = own({})
    for name, options, mask in cases(batch, args.heads, tokens, DTYPES[dtype]):
        if not args.only.search(name):
            continue
        calls = [Contender("plain", plain), Contender("ours", own(options))]
        if mask is not None:
            calls.append(Contender("torch", sdpa(None if isinstance(mask, str) else mask)))
        taken = {name: own["median_s"] for name, own in race(calls, args.seconds, 5).items()}
        ratio = f"{taken['torch'] / taken['ours']:8.2f}" if "torch" in taken else ""
        print(f"{name:24}{taken['ours'] * 1e3:9.3f}{taken['ours'] / taken['plain']:8.2f}{ratio}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512])
    parser.add_argument("--dims", type=int, nargs="+", default=[64])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["f32", "bf16"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="cases by name")
    parser.add_argument("--backward", action="store_true", help="forward and backward, after forward alone")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    flags = pathlib.Path("/proc/cpuinfo").read_text().split()
    found = " ".join(name for name in SETS if name in flags)
    print(f"torch {torch.__version__}, {args.threads} threads, instruction sets: {found}")
    for dtype in args.dtypes:
        for tokens in args.tokens:
            for dim in args.dims:
                for backward in [False, True] if args.backward else [False]:
                    compare(args, dtype, tokens, dim, backward)


if __name__ == "__main__":
    main()
