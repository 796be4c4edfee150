"""fulgurite on the CPU beside PyTorch, ONNX Runtime and OpenVINO: one process, one run, ratios.

    python bench/cpu.py                                all parts, all cores
    python bench/cpu.py forward --dims 64 --seqs 512   a corner of the grid
    python bench/cpu.py --json out/cpu.json --md out/cpu.md
    python bench/cpu.py decode --onto --json out/cpu.json --md out/cpu.md      a piece of it anew, the rest as it was

Parts: forward, backward, decode, memory. Every contender's result is compared before it is timed; a wrong one, or
a bar that is not met, makes the exit status 1.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("forward", "backward", "decode", "memory")
TOKENS, WIDTH = 8192, 1024  # batch x sequence, heads x head_dim
# Largest differences allowed between contenders, as shares of the largest element: enough to see that they compute
# the same thing. How exact ours is, tests say.
TOLERANCE = {"f32": 1e-4, "bf16": 3e-2, "f16": 5e-3, "backward": 1e-3}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"default: {' '.join(PARTS)}")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1.5, help="at least this long for a cell")
    parser.add_argument("--rounds", type=int, default=5, help="at least this many turns for each contender")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqs", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--engine", help="one of ours by name, such as cpu:avx2")
    parser.add_argument("--no-peers", action="store_true", help="only ours and the matrix product")
    parser.add_argument("--no-build", action="store_true", help="use the extension as it is")
    parser.add_argument("--onto", action="store_true", help="keep cells of the file of --json that this run leaves out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--md", type=Path)
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"part {unknown[0]!r} does not exist; allowed: {', '.join(PARTS)}")
    if args.onto and not args.json:
        parser.error("--onto has nothing to keep; name the file with --json")
    args.parts = args.parts or list(PARTS)
    return args


args = arguments()
# Libraries read these when they are loaded.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = str(args.threads)
# Results of several MiB come from fresh pages by default, which costs those peers that allocate them anew in every
# call some percent: let the allocator keep them. M_MMAP_MAX = -4, M_TRIM_THRESHOLD = -1.
if sys.platform == "linux":
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)
    libc.mallopt(-1, 2**31 - 1)

sys.path[:0] = [str(HERE.parent / "python")]
if not args.no_build:
    import build

    build.build()

import fulgurite  # noqa: E402
import numpy as np  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
from report_cpu_page import markdown  # noqa: E402
from race import (  # noqa: E402
    Contender, Steal, commit, differences, geometric_mean, last_level_cache_bytes, machine, race, say, today,
)  # fmt: skip

torch.set_num_threads(args.threads)
HOW = {"threads": args.threads, "engine": args.engine}
TORCH = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
problems = []  # what makes the exit status 1


def random(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def as_torch(x, dtype):
    """In NumPy's memory, which comes in huge pages where the system gives them, whatever the type."""
    if dtype == "f32":
        return torch.from_numpy(x)
    room = torch.from_numpy(np.empty(x.shape, np.int16)).view(TORCH[dtype])
    return room.copy_(torch.from_numpy(x))


def heads_outside(x):
    """The same tensor in the memory order that torch wants, `[batch, heads, sequence, dim]`: any strides will do for us."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def ours_forward(q, k, v, causal, dtype, order=heads_outside, name="ours"):
    q, k, v = (order(as_torch(x, dtype)) for x in (q, k, v))
    out = torch.zeros_like(q)
    call = lambda: fulgurite.attention(q, k, v, causal=causal, out=out, **HOW) is None or None

    def result():
        call()
        return [out.float().numpy()]

    return Contender(f"{name} {dtype}", call, result)


def ours_gemm():
    """The rate of our own micro-kernel, if the extension tells it."""
    rate = getattr(fulgurite._fulgurite, "gemm_rate", None)
    if rate is None:
        return []
    contender = Contender("ours gemm", lambda: contender.flops / (rate(args.threads) * 1e9))
    contender.flops = 1e9
    return [contender]


def check(contenders, reference, tolerance, row):
    row["differences"], row["largest"] = differences(contenders, reference)
    row["reference"] = reference
    for name, difference in row["differences"].items():
        allowed = TOLERANCE[tolerance or name.split()[-1]] if name.startswith("ours") else TOLERANCE[tolerance or "f32"]
        if not difference <= allowed * row["largest"]:  # NaN is wrong
            by = f"{difference:.3g} where the largest element is {row['largest']:.3g}"
            problems.append(f"{row['part']} {row['cell']}: {name} differs from {reference} by {by}")
            row["wrong"] = True


def rates(row, work, unit):
    """Adds work/time of each contender, from medians and from bests."""
    for name, timing in row["timings"].items():
        amount = work.get(name, work[None])
        for statistic in ("median", "best"):
            timing[f"{statistic}_{unit}"] = amount / timing[f"{statistic}_s"] / 1e9


def grid():
    for dim in args.dims:
        for seq in args.seqs:
            for causal in (False, True):
                yield dim, seq, causal


def compare(row, unit, ours, rivals, key="ratio"):
    """Adds the best rival and the ratio to it, by medians and by bests."""
    for statistic in ("median", "best"):
        value = lambda name: row["timings"][name][f"{statistic}_{unit}"]
        best = max(rivals, key=value)
        row[f"{key}_{statistic}"] = value(ours) / value(best)
        row[f"{key}_to_{statistic}"] = best


def forward():
    rows = []
    for dim, seq, causal in grid():
        steal = Steal()
        shape = TOKENS // seq, seq, WIDTH // dim, dim
        q, k, v = (random(*shape, seed=seed) for seed in range(3))
        row = {"part": "forward", "cell": f"d{dim} s{seq} {'causal' if causal else 'full'}", "shape": shape}
        ours = [ours_forward(q, k, v, causal, dtype) for dtype in ("f32", "bf16", "f16")]
        # The other memory order, `[batch, sequence, heads, dim]`.
        ours.append(ours_forward(q, k, v, causal, "f32", order=lambda x: x, name="ours inside"))
        rivals = [peers.torch_forward(q, k, v, causal)]
        if not args.no_peers:
            rivals.append(peers.onnxruntime_forward(q, k, v, causal, args.threads))
            if causal:
                rivals.append(peers.onnxruntime_forward(q, k, v, causal, args.threads, grouped=True))
            rivals.append(peers.openvino_forward(q, k, v, causal, args.threads))
        check(ours + rivals, "torch", None, row)
        products = [peers.torch_matmul(2048), *ours_gemm()]
        row["timings"] = race(ours + rivals + products, args.seconds, args.rounds)
        flops = 4 * TOKENS * seq * WIDTH / (2 if causal else 1)
        rates(row, {None: flops} | {c.name: c.flops for c in products}, "gflops")
        compare(row, "gflops", "ours f32", [c.name for c in rivals])
        compare(row, "gflops", "ours f32", [c.name for c in products], "share")
        compare(row, "gflops", "ours inside f32", [c.name for c in products], "inside")
        for dtype in ("bf16", "f16"):
            compare(row, "gflops", f"ours {dtype}", ["ours f32"], dtype)
        row["steal"] = steal.share()
        rows.append(row)
        timing = row["timings"]["ours f32"]
        say(
            f"forward  {row['cell']:20} ours {timing['median_gflops']:6.1f} GFLOP/s  x{row['ratio_median']:.2f} of"
            f" {row['ratio_to_median']} (bests x{row['ratio_best']:.2f})  share {row['share_median']:.2f}"
            f" (inside {row['inside_median']:.2f})  bf16 x{row['bf16_median']:.2f}  f16 x{row['f16_median']:.2f}  {timing['cpus']:.1f} CPUs"
            f"  steal {row['steal']:.0%}" + ("  WRONG" if row.get("wrong") else "")
        )
    return rows


def large_matmul():
    """The largest product, for the record; cells carry the 2048 one, timed beside them."""
    contenders = [peers.torch_matmul(2048), peers.torch_matmul(4096), *ours_gemm()]
    row = {"part": "matmul", "cell": "f32", "timings": race(contenders, 0, args.rounds)}
    rates(row, {None: 0} | {c.name: c.flops for c in contenders}, "gflops")
    speeds = (f"{name} {t['median_gflops']:.0f} (best {t['best_gflops']:.0f})" for name, t in row["timings"].items())
    say(f"matmul   GFLOP/s: {', '.join(speeds)}")
    return [row]


def backward():
    rows = []
    for dim, seq, causal in grid():
        steal = Steal()
        shape = TOKENS // seq, seq, WIDTH // dim, dim
        q, k, v, d_o = (random(*shape, seed=seed) for seed in range(4))
        row = {"part": "backward", "cell": f"d{dim} s{seq} {'causal' if causal else 'full'}", "shape": shape}
        own_q, own_k, own_v, own_d_o = (heads_outside(as_torch(x, "f32")) for x in (q, k, v, d_o))
        o = torch.zeros_like(own_q)
        _, lse = fulgurite.attention(own_q, own_k, own_v, causal=causal, out=o, return_lse=True, **HOW)
        gradients = [torch.zeros_like(own_q) for _ in range(3)]
        saved = own_d_o, own_q, own_k, own_v, o, lse
        call = lambda: fulgurite.attention_backward(*saved, causal=causal, out=gradients, **HOW) and None
        contenders = [
            Contender("ours", call, lambda: call() or [x.numpy() for x in gradients]),
            peers.torch_backward(q, k, v, d_o, causal),
        ]
        check(contenders, "torch", "backward", row)
        row["timings"] = race(contenders, args.seconds, args.rounds)
        rates(row, {None: 10 * TOKENS * seq * WIDTH / (2 if causal else 1)}, "gflops")
        compare(row, "gflops", "ours", ["torch"])
        row["steal"] = steal.share()
        rows.append(row)
        timing = row["timings"]["ours"]
        say(
            f"backward {row['cell']:20} ours {timing['median_gflops']:6.1f} GFLOP/s  x{row['ratio_median']:.2f} of"
            f" torch (bests x{row['ratio_best']:.2f})  {timing['cpus']:.1f} CPUs  steal {row['steal']:.0%}"
            + ("  WRONG" if row.get("wrong") else "")
        )
    return rows


def decode():
    q_heads, kv_heads, dim, keys = 32, 8, 128, 8192
    group, sdpa = q_heads // kv_heads, torch.nn.functional.scaled_dot_product_attention
    rows = []
    for dtype in ("f32", "bf16"):
        one = as_torch(random(1, keys, kv_heads, dim, seed=0), dtype)
        cache_bytes = 2 * one.numel() * one.element_size()
        pool_bytes = max(2**30, 4 * last_level_cache_bytes())
        copies = -(-pool_bytes // cache_bytes)
        # What is read is the same memory for everybody; torch only takes it for [batch, heads, keys, dim].
        pool = []
        for seed in range(copies):
            pair = (random(1, keys, kv_heads, dim, seed=2 * seed + which) for which in range(2))
            pool.append(tuple(as_torch(x, dtype) for x in pair))
        q = as_torch(random(1, 1, q_heads, dim, seed=9), dtype)
        out = torch.zeros_like(q)
        for residency in ("hot", "cold"):
            steal = Steal()
            turn = [0]

            def cache():
                if residency == "hot":
                    return pool[0]
                turn[0] += 1  # shared by all contenders: nobody finds what another has just read
                return pool[turn[0] % copies]

            def ours(k, v):
                fulgurite.attention(q, k, v, out=out, **HOW)

            by_head = lambda x: x.view(1, kv_heads, keys, dim)
            with torch.no_grad():
                rows_of_head = q.view(1, kv_heads, group, dim)
                q_first = q.transpose(1, 2)
                contenders = [
                    Contender("ours", lambda: ours(*cache())),
                    Contender("read", lambda: fulgurite._fulgurite.read_sum([*cache()], args.threads)[1]),
                    Contender("torch sum", lambda: [x.view(torch.float32).sum() for x in cache()] and None),
                    Contender(
                        "torch gqa", lambda: sdpa(q_first, *map(by_head, cache()), enable_gqa=True) is None or None
                    ),
                    Contender("torch folded", lambda: sdpa(rows_of_head, *map(by_head, cache())) is None or None),
                ]
                row = {"part": "decode", "cell": f"{dtype} {residency}", "bytes": cache_bytes, "copies": copies}
                k, v = pool[0]
                ours(k, v)
                got = out.float().view(1, q_heads, dim)
                want = sdpa(q_first.float(), k.float().transpose(1, 2), v.float().transpose(1, 2), enable_gqa=True)
                folded = sdpa(rows_of_head, k.transpose(1, 2), v.transpose(1, 2)).float().view(1, q_heads, dim)
                want = want.view(1, q_heads, dim)
                judged = [Contender(name, None, lambda x=x: [x.numpy()]) for name, x in
                          (("float32", want), (f"ours {dtype}", got), ("torch folded", folded))]  # fmt: skip
                check(judged, "float32", dtype, row)
                row["timings"] = race(contenders, args.seconds, args.rounds)
            rates(row, {None: cache_bytes}, "gbs")
            compare(row, "gbs", "ours", ["read"])
            compare(row, "gbs", "ours", ["torch gqa", "torch folded"], "peer")
            row["steal"] = steal.share()
            rows.append(row)
            speed = {name: t["median_gbs"] for name, t in row["timings"].items()}
            say(
                f"decode   {row['cell']:20} GB/s: " + ", ".join(f"{name} {x:.1f}" for name, x in speed.items())
                + f"  x{row['ratio_median']:.2f} of read (bests x{row['ratio_best']:.2f})  steal {row['steal']:.0%}"
                + ("  WRONG" if row.get("wrong") else "")
            )  # fmt: skip
    return rows


def memory():
    rows = []
    for part in ("forward", "backward"):
        command = [sys.executable, str(HERE / "memory.py"), part, "32768", "64", str(args.threads)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            problems.append(f"memory {part}: {done.stderr.strip().splitlines()[-1]}")
            continue
        row = {"part": "memory", "cell": part} | json.loads(done.stdout)
        row["extra_mib"] = row["extra_bytes"] / 2**20
        if not (row["finite"] and row["written"]):
            problems.append(f"memory {part}: the result was not written or is not finite")
        rows.append(row)
        say(f"memory   {part:20} {row['extra_mib']:.1f} MiB beside inputs and outputs")
    return rows


def summary(rows):
    """What the project wants to show: value, bar (None: for information) and whether it is met."""
    # The speed of a wrong result is worth nothing.
    wrong = {problem.split()[0].rstrip(":") for problem in problems}
    lines = []
    of = lambda part: [row for row in rows if row["part"] == part]

    def add(part, what, value, least=None, most=None):
        inside = (least is None or value >= least) and (most is None or value <= most)
        bar = f"at least {least:g}" if least is not None else f"at most {most:g}" if most is not None else None
        met = None if bar is None else inside and part not in wrong
        lines.append({"what": f"{part}: {what}", "value": value, "bar": bar, "met": met})

    for part, peer in (("forward", "best peer"), ("backward", "torch")):
        cells = of(part)
        for statistic in ("median", "best") if cells else ():
            by = f"by {statistic}s"
            ratios = [row[f"ratio_{statistic}"] for row in cells]
            add(part, f"smallest ratio to {peer}, {by}", min(ratios), least=1.0)
            add(part, f"geometric mean of ratios to {peer}, {by}", geometric_mean(ratios), least=1.3)
            if part == "forward":
                share = min(row[f"share_{statistic}"] for row in cells)
                add(part, f"smallest share of the matrix product beside it, {by}", share, least=0.85)
                inside = [row[f"inside_{statistic}"] for row in cells if f"inside_{statistic}" in row]
                if inside:
                    add(part, f"smallest share with heads inside, {by}", min(inside))
                for dtype in ("bf16", "f16"):
                    ratio = min(row[f"{dtype}_{statistic}"] for row in cells)
                    add(part, f"smallest ratio of {dtype} to f32, {by}", ratio, least=0.9)
    for row in of("decode"):
        for statistic in ("median", "best"):
            share = row[f"ratio_{statistic}"]
            add("decode", f"{row['cell']}, share of the read-only sum, by {statistic}s", share, least=0.8)
    for row in of("memory"):
        most = 16 if row["cell"] == "forward" else None
        add("memory", f"{row['cell']}, MiB beside inputs and outputs", row["extra_mib"], most=most)
    return lines


def said():
    """The arguments of this run, without where its results went."""
    words = iter(sys.argv[1:])
    for word in words:
        if word in ("--json", "--md"):
            next(words, None)
        elif not word.startswith(("--json=", "--md=")):
            yield word


def kept(rows):
    """The rows among those of the file, in the order of a whole run, what is measured anew in place of the old; and the
    commands that made them."""
    command = " ".join(["python", "bench/cpu.py", *said()])
    if not (args.onto and args.json.exists()):
        return rows, command
    old = json.loads(args.json.read_text())
    commands = dict.fromkeys([*old["command"].split("; "), command])
    known = {(row["part"], row["cell"]): row | {"commit": row.get("commit", old["commit"])} for row in old["rows"]}
    known |= {(row["part"], row["cell"]): row for row in rows}
    cells = [f"d{dim} s{seq} {mask}" for dim in (64, 128) for seq in (512, 1024, 2048, 4096, 8192)
             for mask in ("full", "causal")]  # fmt: skip
    place = lambda key: (("matmul", *PARTS).index(key[0]), cells.index(key[1]) if key[1] in cells else len(cells))
    return [known[key] for key in sorted(known, key=place)], "; ".join(commands)


def main():
    steal, rows = Steal(), []
    if "forward" in args.parts:
        rows += large_matmul()
    for part in args.parts:
        rows += globals()[part]()
    for row in rows:
        row["commit"] = commit()
    rows, command = kept(rows)
    lines = summary(rows)
    record = {
        "date": today(),
        "machine": machine(),
        "threads": args.threads,
        "versions": {"fulgurite": fulgurite.__version__, "python": sys.version.split()[0]} | peers.versions(),
        "commit": ", ".join(dict.fromkeys(row["commit"] for row in rows)),
        "command": command,
        "steal": steal.share(),
        "summary": lines,
        "problems": problems,
        "rows": rows,
    }
    text = markdown(record)
    for path, content in ((args.json, json.dumps(record, indent=1) + "\n"), (args.md, text)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    print(text)
    return 1 if problems or any(line["met"] is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
