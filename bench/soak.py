"""Threads that trace callables and call, for minutes: results have the bits that they have alone, memory does not grow.

    python bench/soak.py [--minutes 10] [--threads 8] [--seed 0]
"""

import argparse
import gc
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np  # noqa: E402  (after the path)

import fulgurite  # noqa: E402

# The largest growth of memory after the first fifth of the run, in bytes: caches are full by then.
GROWTH = 8 << 20


def tensors(rng, q_len, k_len, heads=4, kv=2, dim=16):
    make = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return make(1, q_len, heads, dim), make(1, k_len, kv, dim), make(1, k_len, kv, dim), make(1, q_len, heads, dim)


def with_gradients(q, k, v, d_o, **options):
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
    return [o, lse, *fulgurite.attention_backward(d_o, q, k, v, o, lse, **options)]


def traced_bias(rng):
    """A captured table, read by a callable that gives way to other threads while it is traced."""
    q, k, v, d_o = tensors(rng, 40, 70)
    table = rng.standard_normal(70).astype(np.float32)

    def run():
        def score_mod(score, b, h, i, j):
            time.sleep(0)
            return np.tanh(score + table[j]) + table[i]

        return with_gradients(q, k, v, d_o, score_mod=score_mod)

    return run


def traced_mask(rng):
    q, k, v, d_o = tensors(rng, 65, 65)
    documents = np.sort(rng.integers(0, 5, 65)).astype(np.int32)

    def run():
        def same(b, h, i, j):
            time.sleep(0)
            return documents[i] == documents[j]

        return with_gradients(q, k, v, d_o, mask_mod=same, causal=True)

    return run


def blocks(rng):
    q, k, v, _ = tensors(rng, 200, 200)
    n = int(rng.integers(2, 60))

    def run():
        mask = fulgurite.create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < n), None, None, 200, 200)
        rows = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
        return [fulgurite.flex_attention(*rows, block_mask=mask, enable_gqa=True)]

    return run


def plain(rng):
    q, k, v, d_o = tensors(rng, 129, 200)
    return lambda: with_gradients(q, k, v, d_o, window=(50, 3), threads=3)


def new_lengths(rng):
    """Problems that no earlier call had: what is kept for each must be bounded."""
    base = tensors(rng, 300, 300)

    def run():
        n = 1 + time.monotonic_ns() % 299
        q, k, v, d_o = (x[:, :n] for x in base)
        o = fulgurite.attention(q, k, v, causal=True)
        # The first row sees one key: its result is that value.
        assert (o[:, 0] == np.repeat(v[:, 0], 2, axis=1)).all()
        return []

    return run


def cache(rng):
    rows = rng.standard_normal((9, 2, 16)).astype(np.float32)

    def run():
        kept = fulgurite.KvCache(2, 16, 20, storage="packed")
        kept.append(rows, rows)
        return list(kept.attend(rows[:1], return_lse=True))

    return run


KINDS = [traced_bias, traced_mask, blocks, plain, new_lengths, cache]


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    jobs = [kind(rng) for _ in range(3) for kind in KINDS]
    alone = [job() for job in jobs]
    counts, wrong, stop = [0] * args.threads, [], threading.Event()

    def work(number):
        order = np.random.default_rng([args.seed, number])
        while not stop.is_set():
            at = int(order.integers(len(jobs)))
            try:
                same = all(np.array_equal(a, b) for a, b in zip(jobs[at](), alone[at], strict=True))
            except Exception as error:  # told below: a thread's own would only be printed
                wrong.append((at, repr(error)))
            else:
                if not same:
                    wrong.append((at, "other bits"))
            counts[number] += 1

    sys.setswitchinterval(1e-4)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(args.threads)]
    for thread in threads:
        thread.start()
    begin, sizes = time.monotonic(), []
    while (passed := time.monotonic() - begin) < 60 * args.minutes and len(wrong) < 20:
        gc.collect()
        sizes.append((passed, resident()))
        mib = sizes[-1][1] / 2**20
        print(f"{passed:5.0f} s  {sum(counts):8d} calls  {len(wrong)} wrong  RSS {mib:.1f} MiB", flush=True)
        time.sleep(min(30, 6 * args.minutes))
    stop.set()
    for thread in threads:
        thread.join()
    late = [size for passed, size in sizes if passed >= 12 * args.minutes]
    growth = max(late, default=0) - min(late, default=0)
    told = f"memory within {growth / 2**20:.1f} MiB after a fifth of the time"
    print(f"{sum(counts)} calls in {args.threads} threads, {len(wrong)} wrong, {told}")
    for each in wrong[:5]:
        print(each)
    sys.exit(bool(wrong) or growth > GROWTH)


if __name__ == "__main__":
    main()
