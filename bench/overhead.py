"""What a call from Python costs beside the engine, at batch 1 and tiny shapes: one process, the best of many rounds.

    python bench/overhead.py [--json out/overhead.json] [--bar 5]

Attention, and the gated delta rule (`delta`). The bare time is the engine's own forward in a loop in Rust, on the same
arrays, with everything around it done once.
Contenders take turns; the best of many short rounds is quoted, because what else runs on the machine only ever adds.
The exit status is 1 when a call without gradients costs more than the bar (microseconds) beside the bare time, or the
gated delta rule, which reads and makes twice as many arrays, more than twice the bar.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np  # noqa: E402

import fulgurite  # noqa: E402
from fulgurite._dispatch import description  # noqa: E402
from fulgurite._variants import variant  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

CALLS = 50  # of one round: some hundred microseconds, less than a slice of the scheduler
ROUNDS = 1500
# [batch, q_len, heads, head_dim]
SHAPES = [(1, 1, 1, 16), (1, 1, 8, 64), (1, 16, 2, 32)]


def microseconds(contenders):
    """The best time of one call of each; they take turns."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            best[name] = min(best[name], call())
    return {name: 1e6 * seconds / CALLS for name, seconds in best.items()}


def timed(call):
    def round_():
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        return time.perf_counter() - start

    return round_


def contenders(shape, library):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    if library == "torch":
        q, k, v = map(torch.from_numpy, (q, k, v))
    out = q * 0
    attention = fulgurite.attention
    prepared = description("causal bottom-right;threads 1;")
    found = {
        "bare": lambda: prepared.time(q, k, v, out, CALLS),
        "attention": timed(lambda: attention(q, k, v, causal=True, threads=1)),
        "attention, out given": timed(lambda: attention(q, k, v, causal=True, threads=1, out=out)),
        "flash_attn_func": timed(lambda: fulgurite.flash_attn_func(q, k, v, causal=True)),
    }
    gates = out[..., 0] * 0
    delta = variant("gated_delta recurrent;state;threads 1;with g;with beta;")
    step = fulgurite.fla.fused_recurrent_gated_delta_rule
    found["delta bare"] = lambda: delta.time([q, k, v, gates, gates], CALLS)
    found["delta"] = timed(lambda: step(q, k, v, gates, beta=gates, output_final_state=True, threads=1))
    if library == "torch":
        text = "causal bottom-right;threads 1;"
        swapped = [x.transpose(1, 2) for x in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        leaf = q.clone().requires_grad_()
        found["operator"] = timed(lambda: torch.ops.fulgurite.forward(q, k, v, [], text))
        found["with gradients"] = timed(lambda: attention(leaf, k, v, causal=True, threads=1))
        found["torch sdpa"] = timed(lambda: sdpa(*swapped, is_causal=True))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--bar", type=float, default=5.0)
    arguments = parser.parse_args()
    rows, missed = [], False
    for library in ["numpy", *(["torch"] if torch is not None else [])]:
        for shape in SHAPES:
            times = microseconds(contenders(shape, library))
            over = times["attention"] - times["bare"]
            over_delta = times["delta"] - times["delta bare"]
            missed |= not (over <= arguments.bar and over_delta <= 2 * arguments.bar)
            rows.append(
                {
                    "library": library,
                    "shape": shape,
                    "microseconds": times,
                    "overhead_us": over,
                    "delta_overhead_us": over_delta,
                }
            )
            print(f"{library} {shape}: overhead {over:.2f} us, delta {over_delta:.2f}; " + ", ".join(f"{n} {t:.2f}" for n, t in times.items()))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        versions = {"fulgurite": fulgurite.__version__, "numpy": np.__version__}
        versions["torch"] = None if torch is None else torch.__version__
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
