"""Low precision on the CPU: bf16 beside PyTorch and OpenVINO, and beside our own f32, in one process.

    python bench/lowp.py                                   all parts, all cores
    python bench/lowp.py forward --dims 64 --seqs 512      a corner of the grid
    python bench/lowp.py --json docs/lab/results/lowp.json

Parts: forward, backward. Cells are those of bench/cpu.py. Every contender's result is compared before it is timed.
The exit status is 1 when one is wrong; bars are printed with whether they are met.
"""

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("forward", "backward")
TOKENS, WIDTH = 8192, 1024  # batch x sequence, heads x head_dim
# Largest difference from torch's f32 result, as a share of the largest element; how exact ours is, tests say.
TOLERANCE = 4e-2

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("parts", nargs="*", default=list(PARTS))
parser.add_argument("--threads", type=int, default=os.cpu_count())
parser.add_argument("--seconds", type=float, default=1.0, help="at least this long for a cell")
parser.add_argument("--rounds", type=int, default=5, help="at least this many turns for each contender")
parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
parser.add_argument("--seqs", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
parser.add_argument("--no-build", action="store_true", help="use the extension as it is")
parser.add_argument("--json", type=Path, help="rows are merged into this file, part by part")
args = parser.parse_args()
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = str(args.threads)

sys.path[:0] = [str(HERE.parent / "python")]
if not args.no_build:
    import build

    build.build()

import fulgurite  # noqa: E402
import numpy as np  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
from race import Contender, Steal, commit, differences, geometric_mean, machine, race, say, today  # noqa: E402

torch.set_num_threads(args.threads)
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16}
problems = []


def random(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def own(x, dtype):
    """In the memory order that torch wants, `[batch, heads, sequence, dim]`, as everybody gets it."""
    return torch.from_numpy(x).to(TORCH[dtype]).transpose(1, 2).contiguous().transpose(1, 2)


def ours(q, k, v, causal, dtype, d_o=None, engine=None):
    q, k, v = (own(x, dtype) for x in (q, k, v))
    out = torch.zeros_like(q)
    how = {"causal": causal, "threads": args.threads, "engine": engine}
    forward = lambda **more: fulgurite.attention(q, k, v, out=out, **how, **more)
    name = f"ours {dtype}" + (" vectors" if engine else "")
    if d_o is None:
        return Contender(name, lambda: forward() is None or None, lambda: [forward(), out.float().numpy()][1:])
    _, lse = forward(return_lse=True)
    given, gradients = own(d_o, dtype), [torch.zeros_like(q) for _ in range(3)]
    call = lambda: fulgurite.attention_backward(
        given, q, k, v, out, lse, out=gradients, **how
    ) and None
    return Contender(name, call, lambda: call() or [x.float().numpy() for x in gradients])


def cell(part, dim, seq, causal):
    steal = Steal()
    shape = TOKENS // seq, seq, WIDTH // dim, dim
    tensors = [random(*shape, seed=seed) for seed in range(4)]
    row = {"part": part, "cell": f"d{dim} s{seq} {'causal' if causal else 'full'}", "shape": shape, "date": today()}
    if part == "forward":
        own_two = [ours(*tensors[:3], causal, dtype) for dtype in ("bf16", "f32")]
        if "cpu:avx512" in fulgurite.engines():
            own_two.append(ours(*tensors[:3], causal, "f32", engine="cpu:avx512"))
        rivals = [
            peers.torch_forward(*tensors[:3], causal, "bfloat16"),
            peers.openvino_forward(*tensors[:3], causal, args.threads, "bf16"),
        ]
        judge = peers.torch_forward(*tensors[:3], causal)
    else:
        own_two = [ours(*tensors[:3], causal, dtype, tensors[3]) for dtype in ("bf16", "f32")]
        rivals = [peers.torch_backward(*tensors, causal, "bfloat16")]
        judge = peers.torch_backward(*tensors, causal)
    judge.name = "float32"
    row["differences"], row["largest"] = differences([*own_two, *rivals, judge], "float32")
    for name, difference in row["differences"].items():
        if not difference <= TOLERANCE * row["largest"]:  # NaN is wrong
            problems.append(f"{part} {row['cell']}: {name} is off by {difference:.3g} of {row['largest']:.3g}")
    row["timings"] = race([*own_two, *rivals], args.seconds, args.rounds)
    flops = (4 if part == "forward" else 10) * TOKENS * seq * WIDTH / (2 if causal else 1)
    for statistic in ("median", "best"):
        for timing in row["timings"].values():
            timing[f"{statistic}_gflops"] = flops / timing[f"{statistic}_s"] / 1e9
        speed = lambda name: row["timings"][name][f"{statistic}_gflops"]
        row[f"peer_{statistic}"] = max((c.name for c in rivals), key=speed)
        row[f"ratio_{statistic}"] = speed("ours bf16") / speed(row[f"peer_{statistic}"])
        row[f"to_f32_{statistic}"] = speed("ours bf16") / speed("ours f32")
        if "ours f32 vectors" in row["timings"]:
            row[f"to_vectors_{statistic}"] = speed("ours bf16") / speed("ours f32 vectors")
    row["steal"] = steal.share()
    say(
        f"{part:8} {row['cell']:16} bf16 {row['timings']['ours bf16']['median_gflops']:6.0f} GFLOP/s"
        f"  x{row['ratio_median']:.2f} (bests {row['ratio_best']:.2f}) of {row['peer_median']}"
        f"  x{row['to_f32_median']:.2f} ({row['to_f32_best']:.2f}) of our f32  steal {row['steal']:.0%}"
    )
    return row


BARS = {"forward": (1.2, 1.6), "backward": (1.5, 2.0)}


def summary(rows):
    for part, (least, mean) in BARS.items():
        own = [row for row in rows if row["part"] == part]
        for statistic in ("median", "best") if own else ():
            ratios = [row[f"ratio_{statistic}"] for row in own]
            yield f"{part}: smallest ratio to the best peer in bf16, by {statistic}s", min(ratios), least
            yield f"{part}: geometric mean of these ratios, by {statistic}s", geometric_mean(ratios), mean
            for dim, bar in ((64, 3.0), (128, 4.0)):
                long = [r[f"to_f32_{statistic}"] for r in own if r["shape"][3] == dim and r["shape"][1] >= 2048]
                if long and part == "forward":
                    yield f"forward: smallest ratio to our f32 at head dim {dim}, 2048 and up, by {statistic}s", min(long), bar
                key = f"to_vectors_{statistic}"
                long = [r[key] for r in own if r["shape"][3] == dim and r["shape"][1] >= 2048 and key in r]
                if long:
                    what = f"forward: the same to our f32 on vectors at head dim {dim}, by {statistic}s"
                    yield what, min(long), bar


def main():
    rows = []
    for part in args.parts:
        if part not in PARTS:
            parser.error(f"part {part!r} does not exist; allowed: {', '.join(PARTS)}")
        for dim in args.dims:
            for seq in args.seqs:
                rows += [cell(part, dim, seq, causal) for causal in (False, True)]
    if args.json and args.json.exists():
        # Corners of the grid may come from several runs; each row says when it was made.
        done = {(row["part"], row["cell"]) for row in rows}
        rows = [r for r in json.loads(args.json.read_text())["rows"] if (r["part"], r["cell"]) not in done] + rows
    lines = [{"what": what, "value": value, "bar": bar, "met": value >= bar} for what, value, bar in summary(rows)]
    for line in lines:
        say(f"{line['what']}: {line['value']:.2f}, bar {line['bar']:g}: {'met' if line['met'] else 'MISSED'}")
    for problem in problems:
        say(f"WRONG {problem}")
    if args.json:
        record = {"commit": commit(), "machine": machine(), "threads": args.threads, "versions": peers.versions()}
        record |= {"rows": rows, "summary": lines, "problems": problems}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
