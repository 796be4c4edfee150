"""The model of `fulgurite explain --ranks` beside rings of 2 and 4 gloo processes: docs/lab/014-distributed.md.

    python python/build.py && cargo build --release -p fulgurite-cli
    python bench/ring_model.py [--command target/release/fulgurite] [--lengths 256 1024 4096] [--rounds 7] [--json FILE]

The model gets what this machine has in place of an H200 and NVLink: times of a rank's steps, while all ranks compute and
nothing is sent, and the rate and latency of the link, while all ranks send and nothing is computed. It predicts the bytes
that a rank sends, the time from start to end, and how much of it is waiting. Then rings run, and the same is measured.

    bytes    sent by a rank; must equal the prediction and the closed form
    time     computation and waiting of the slowest rank
    waiting  for messages, mean of the ranks
    hidden   share of the messages' time that computation hides: 1 - waiting / the time of all messages without computation

bf16, causal, head-tail shards, 8 query heads and 2 key/value heads of 64, one thread for each rank. Of the rounds, the one
with the median time counts. Exits with 1 if bytes differ.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests"), str(ROOT / "bench")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import Pool  # noqa: E402

from fulgurite import distributed as fd  # noqa: E402
from fulgurite.distributed._exchange import Group  # noqa: E402

HEADS, KV_HEADS, DIM = 8, 2, 64
PASSES = ("forward", "backward")


class Silent:
    """Within it, messages bring back what is sent, at once."""

    def __enter__(self):
        self.start, self.wait = Group.start, Group.wait

        def start(_group, _kind, sent, _to, received, _source):
            received.copy_(sent)
            return []

        Group.start, Group.wait = start, lambda _group, _works, _doing: None

    def __exit__(self, *_):
        Group.start, Group.wait = self.start, self.wait


def passes(group, rank, count, length):
    """Functions that run forward and backward of this rank; the second needs the result of the first."""
    make = torch.Generator().manual_seed(rank)
    layout = fd.sequence_layout(length, count)
    draw = lambda heads: torch.randn(1, layout.rows, heads, DIM, generator=make).bfloat16()  # noqa: E731
    q, k, v = (draw(heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    call = dict(group=group, balance=layout, causal=True, threads=1, check=False)
    d_o = draw(HEADS)
    closed = [
        fd.bytes_sent(q, k, v, ring=count, layout=layout, causal=True, backward=backward) for backward in (False, True)
    ]
    closed[1] = {kind: closed[1][kind] - closed[0][kind] for kind in closed[1]}
    return lambda: fd.context_parallel_attention(q, k, v, **call), lambda o: o.backward(d_o), closed


def seconds(spans, kind):
    return sum(each.end - each.start for each in spans if each.kind == kind) / 1e9


def steps(spans):
    """Seconds of computation of each step."""
    found = {}
    for each in spans:
        if each.kind == "compute":
            step = int(each.name.rsplit(" ", 1)[1])
            found[step] = found.get(step, 0.0) + (each.end - each.start) / 1e9
    return [found[step] for step in sorted(found)]


def both(group, forward, backward):
    """(spans, bytes sent) of a forward and a backward that all ranks start together."""
    found = []
    for at in range(2):
        dist.barrier(group)
        with fd.timeline() as spans, fd.traffic() as sent:
            if at == 0:
                o = forward()
            else:
                backward(o)
        found.append((spans, sent))
    return found


def of_rank(group, rank, count, length, rounds):
    """What a rank measures: [steps without messages, ring, bytes] of each round and pass."""
    forward, backward, closed = passes(group, rank, count, length)
    both(group, forward, backward)
    found = []
    for _ in range(rounds):
        with Silent():
            alone = [steps(spans) for spans, _ in both(group, forward, backward)]
        ring = both(group, forward, backward)
        row = []
        for at in range(2):
            spans, sent = ring[at]
            times = seconds(spans, "compute"), seconds(spans, "wait")
            row.append({"steps": alone[at], "times": times, "sent": {kind: sent[kind] for kind in closed[at]}})
        found.append(row)
    return found, closed


def link(group, rank, count, sizes, rounds):
    """The median seconds of a message of each size, from each rank to the next at once."""
    ring, found = Group(group, None), []
    for size in sizes:
        sent, received, times = torch.zeros(size // 4), torch.zeros(size // 4), []
        for _ in range(rounds):
            dist.barrier(group)
            start = time.perf_counter()
            works = ring.start("keys", sent, (rank + 1) % count, received, (rank - 1) % count)
            ring.wait(works, "measuring the link")
            times.append(time.perf_counter() - start)
        found.append(statistics.median(times))
    return found


def predicted(command, length, count, backward, rate, latency, first, later):
    text = [command, "explain", "--json", "--causal", "--q-len", length, "--heads", HEADS, "--kv-heads", KV_HEADS]
    text += ["--head-dim", DIM, "--ranks", count, "--link", rate / 1e9, "--latency", latency * 1e6]
    text += ["--step-ms", f"{first * 1e3},{later * 1e3}", *(["--backward"] if backward else [])]
    done = subprocess.run(list(map(str, text)), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["ring"]


def compare(pool, command, count, length, rounds):
    """A row for each pass, and whether all bytes are equal."""
    from ring_model import link as of_link
    from ring_model import of_rank as work

    bytes_ = 2 * (length // count) * KV_HEADS * DIM * 2
    times = pool.run(of_link, count, [16, bytes_, 2 * bytes_], 31)
    small, keys, gradients = (statistics.mean(of) for of in zip(*times))
    ranks = pool.run(work, count, length, rounds)
    rows = []
    for at, name in enumerate(PASSES):
        mean = lambda of: statistics.mean(of(row) for found, _ in ranks for row in found)  # noqa: E731
        first = mean(lambda row: row[at]["steps"][0])
        later = mean(lambda row: statistics.mean(row[at]["steps"][1:]))
        # The rate of the larger message of the pass.
        most, size = ((keys, bytes_), (gradients, 2 * bytes_))[at]
        latency, rate = small, size / max(most - small, 1e-9)
        want = predicted(command, length, count, bool(at), rate, latency, first, later)
        of_round = lambda n: max(sum(found[n][at]["times"]) for found, _ in ranks)  # noqa: E731
        n = sorted(range(rounds), key=of_round)[rounds // 2]
        waiting = statistics.mean(found[n][at]["times"][1] for found, _ in ranks)
        sent = [found[n][at]["sent"] for found, _ in ranks]
        asked = [{kind: want["bytes_sent"][kind] for kind in closed[at]} for _, closed in ranks]
        message = want["message_us"] / 1e6
        rows.append(
            {
                "ranks": count,
                "length": length,
                "pass": name,
                "bytes": sum(sent[0].values()),
                "bytes_equal": sent == asked == [closed[at] for _, closed in ranks],
                "step_ms": [first * 1e3, later * 1e3],
                "link_gb_s": rate / 1e9,
                "latency_us": latency * 1e6,
                "messages_ms": message * 1e3,
                "time_ms": [want["us"] / 1e3, of_round(n) * 1e3],
                "waiting_ms": [want["exposed_us"] / 1e3, waiting * 1e3],
                "hidden": [1 - want["exposed_us"] / 1e6 / message, 1 - waiting / message],
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--command", default=str(ROOT / "target" / "release" / "fulgurite"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pool, rows = Pool(), []
    for count in (2, 4):
        for length in options.lengths:
            for row in compare(pool, options.command, count, length, options.rounds):
                rows.append(row)
                (time_, found), (wait, waited), (hides, hidden) = row["time_ms"], row["waiting_ms"], row["hidden"]
                print(
                    f"{count} ranks, {length:5} tokens, {row['pass']:8}: {row['bytes']} bytes "
                    f"{'ok' if row['bytes_equal'] else 'WRONG'}; steps {row['step_ms'][0]:.2f}, {row['step_ms'][1]:.2f} ms, "
                    f"link {row['link_gb_s']:.2f} GB/s + {row['latency_us']:.0f} us; predicted, measured: time {time_:.2f}, "
                    f"{found:.2f} ms ({100 * (found / time_ - 1):+.0f} %), waiting {wait:.2f}, {waited:.2f} ms, hidden "
                    f"{100 * hides:.0f}, {100 * hidden:.0f} % of {row['messages_ms']:.2f} ms of messages",
                    flush=True,
                )
    pool.close()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["bytes_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
