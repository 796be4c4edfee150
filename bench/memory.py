"""Prints how much memory a call takes beside inputs and outputs, in bytes. One process for each measurement.

    python bench/memory.py forward|backward LENGTH HEAD_DIM THREADS
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np  # noqa: E402

import fulgurite  # noqa: E402


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def main(part, length, dim, threads):
    rng = np.random.default_rng(0)
    q, k, v, d_o = (rng.standard_normal((1, length, 1, dim), dtype=np.float32) for _ in range(4))
    new = lambda *shape: np.full(shape, 1.0, np.float32)  # touched, so that it is resident before
    o = new(1, length, 1, dim)
    d_q, d_k, d_v = (new(1, length, 1, dim) for _ in range(3))
    forward = lambda: fulgurite.attention(q, k, v, threads=threads, out=o)
    if part == "backward":  # for o and lse; what it leaves allocated is not counted, the peak of backward alone is
        _, lse = fulgurite.attention(q, k, v, threads=threads, out=o, return_lse=True)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    if part == "forward":
        forward()
    else:
        fulgurite.attention_backward(d_o, q, k, v, o, lse, threads=threads, out=(d_q, d_k, d_v))
    results = [o] if part == "forward" else [d_q, d_k, d_v]
    print(
        json.dumps(
            {
                "extra_bytes": resident("VmHWM") - before,
                "inputs_outputs_bytes": sum(x.nbytes for x in [q, k, v, *results]),
                "scores_bytes": length * length * 4,
                "finite": all(bool(np.isfinite(x).all()) for x in results),
                "written": all(bool((x != 1.0).any()) for x in results),
            }
        )
    )


if __name__ == "__main__":
    part, *numbers = sys.argv[1:]
    main(part, *map(int, numbers))
