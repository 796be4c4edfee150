"""The steps of a ring on one GPU, which plays all ranks one after the other: docs/lab/014-distributed.md.

    python python/build.py && python bench/gpu_ring.py [--length 131072] [--ranks 2 4 8] [--rounds 3] [--margin 16] [--kernels]

bf16, causal, head-tail shards, 32 query heads and 8 key/value heads of 128. All blocks of all ranks have the FLOPs of one
call over the whole sequence. Three ways are timed, in turns, forward and backward:

    one piece   one call over the whole sequence
    plain       the blocks, with 16-bit results that nothing merges
    ring        the blocks, whose f32 results kernels merge (forward) or add up (backward)

ring / one piece is what dividing the work costs, and ring / plain what merging costs. `--kernels` adds the milliseconds of
each kernel in both, once, as the profiler of torch sees them. Results are checked first: against f64 on
a short sequence, and against one piece on the long one. Exits with 1 if a check fails.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
from fulgurite.distributed import sequence_layout, sm_margin  # noqa: E402
from fulgurite.distributed._layout import Mask, blocks  # noqa: E402
from fulgurite.distributed._ring import (  # noqa: E402
    Call,
    _backward,
    _forward,
    add_block,
    add_block_gradients,
)

HEADS, KV_HEADS, DIM = 32, 8, 128
OPTIONS = {"scale": None, "softcap": None, "deterministic": False, "threads": None}


class AllRanks:
    """A sequence on `ranks` ranks of one GPU. Rows of a rank are next to each other."""

    def __init__(self, tensors, ranks):
        self.length = tensors[0].shape[1]
        self.layout = sequence_layout(self.length, ranks)
        order = [torch.from_numpy(self.layout.positions(rank)) for rank in range(ranks)]
        self.order = torch.cat(order).to(tensors[0].device)
        self.call = Call(None, self.layout.slots, self.length, Mask.of(self.length, True, None, None), dict(OPTIONS))
        self.q, self.k, self.v, self.d_o = (self.divided(x) for x in tensors)
        self.out = torch.empty((*self.q.shape[:3], DIM), dtype=torch.float32, device=self.q.device)
        self.lse = torch.empty((ranks, 1, HEADS, self.layout.rows), device=self.q.device)

    def divided(self, x):
        """[ranks, rows, heads, dim] of [1, sequence, heads, dim]."""
        return x[0][self.order].view(self.layout.ranks, self.layout.rows, *x.shape[2:])

    def whole(self, x):
        """The inverse."""
        made = torch.empty((self.length, *x.shape[2:]), dtype=x.dtype, device=x.device)
        made[self.order] = x.reshape(self.length, *x.shape[2:])
        return made[None]

    def steps(self):
        """(rank, rank of the keys, block) of all steps of all ranks."""
        slots, ranks = self.layout.slots, self.layout.ranks
        for rank in range(ranks):
            for step in range(ranks):
                source = (rank - step) % ranks
                for block in blocks(slots[rank], slots[source], self.length, self.call.mask):
                    yield rank, source, block

    def forward(self):
        self.lse.fill_(-math.inf)
        for rank, source, block in self.steps():
            rows = (x[at][None] for x, at in ((self.q, rank), (self.k, source), (self.v, source)))
            add_block(self.call, block, *rows, None, self.out[rank][None], self.lse[rank])

    def plain_forward(self):
        for rank, source, block in self.steps():
            rows = (x[at][None] for x, at in ((self.q, rank), (self.k, source), (self.v, source)))
            _forward(self.call, block, *rows, None)

    def keep(self):
        """Room for gradients, and the result in the type of q."""
        self.o = self.out.to(self.q.dtype)
        self.totals = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (self.q, self.k, self.v)]

    def saved(self, rank):
        return self.o[rank][None], self.lse[rank], self.d_o[rank][None], None

    def backward(self):
        for rank, source, block in self.steps():
            rows = (x[at][None] for x, at in ((self.q, rank), (self.k, source), (self.v, source)))
            totals = [x[at][None] for x, at in zip(self.totals, (rank, source, source))]
            add_block_gradients(self.call, block, *rows, self.saved(rank), None, totals)

    def plain_backward(self):
        for rank, source, block in self.steps():
            rows = (x[at][None] for x, at in ((self.q, rank), (self.k, source), (self.v, source)))
            _backward(self.call, block, *rows, self.saved(rank), None)


def tensors(length, device="cuda"):
    make = torch.Generator(device).manual_seed(1)
    draw = lambda heads: torch.randn(1, length, heads, DIM, generator=make, device=device).bfloat16()  # noqa: E731
    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS), draw(HEADS)


def reference(q, k, v, d_o):
    """o and gradients in f64."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    wide = [x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide[0]) / math.sqrt(DIM)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    o = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -math.inf).softmax(-1), wide[1])
    return o.detach(), *torch.autograd.grad(o, (q, k, v), d_o.double())


def far(found, want):
    """The root mean square of the difference, relative to that of `want`."""
    found, want = found.double(), want.double()
    return float((found - want).norm() / want.norm())


def one_piece(q, k, v, d_o):
    o, lse = fulgurite.attention(q, k, v, causal=True, return_lse=True)
    return o, lse, fulgurite.attention_backward(d_o, q, k, v, o, lse, causal=True)


def results(ring):
    """o, then the gradients, of one forward and one backward."""
    ring.forward()
    ring.keep()
    ring.backward()
    return [ring.whole(x) for x in (ring.out, *ring.totals)]


def check(ranks):
    """Errors of the ring beside those of one piece, against f64, on a length that chunks divide."""
    given = tensors(64 * 2 * max(ranks))
    want = reference(*given)
    o, _, gradients = one_piece(*given)
    single = [far(a, b) for a, b in zip((o, *gradients), want)]
    fine = True
    for count in ranks:
        found = [far(a, b) for a, b in zip(results(AllRanks(given, count)), want)]
        good = all(f <= 1.1 * s for f, s in zip(found, single))
        fine &= good
        text = ", ".join(f"{n} {f:.2e} ({s:.2e})" for n, f, s in zip(("o", "d_q", "d_k", "d_v"), found, single))
        print(f"check {count} ranks: {text} {'ok' if good else 'WRONG'}", flush=True)
    return fine


def milliseconds(calls, rounds):
    """The least time of each call, in turns."""
    best = [math.inf] * len(calls)
    for round_ in range(rounds + 1):
        for at, call in enumerate(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if round_:  # the first compiles and warms up
                best[at] = min(best[at], start.elapsed_time(end))
    return best


def of_kernels(call):
    """Milliseconds of each kernel of a call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found = {each.key[:40]: each.self_device_time_total / 1e3 for each in seen.key_averages()}
    return {name: round(ms, 2) for name, ms in sorted(found.items(), key=lambda item: -item[1]) if ms >= 0.01}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--margin", type=int, default=16)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    if not check(options.ranks):
        return 1
    given = tensors(options.length)
    q, k, v, d_o = given
    o, lse, gradients = one_piece(*given)
    found, fine = [], True
    for count in options.ranks:
        ring = AllRanks(given, count)
        errors = [far(a, b) for a, b in zip(results(ring), (o, *gradients))]
        good = max(errors) < 1e-2
        fine &= good
        print(
            f"{options.length} tokens, {count} ranks, from one piece: {errors} {'ok' if good else 'WRONG'}", flush=True
        )
        for name, calls in (
            (
                "forward",
                (lambda: fulgurite.attention(q, k, v, causal=True, return_lse=True), ring.plain_forward, ring.forward),
            ),
            (
                "backward",
                (
                    lambda: fulgurite.attention_backward(d_o, q, k, v, o, lse, causal=True),
                    ring.plain_backward,
                    ring.backward,
                ),
            ),
        ):
            whole, plain, merged = milliseconds(calls, options.rounds)
            row = {"ranks": count, "pass": name, "one_piece_ms": whole, "plain_ms": plain, "ring_ms": merged}
            row.update(ring_over_one_piece=merged / whole - 1, merge_share=(merged - plain) / merged)
            found.append(row)
            print(
                f"{count} ranks {name:8}: one piece {whole:.2f} ms, plain {plain:.2f}, ring {merged:.2f}: "
                f"{100 * row['ring_over_one_piece']:+.1f} % of one piece (bar 5), merge {100 * row['merge_share']:+.1f} % (bar 2)",
                flush=True,
            )
            if options.kernels:
                for way, call in zip(("plain", "ring"), calls[1:]):
                    print(f"    {way}: {of_kernels(call)}", flush=True)
        del ring
    with sm_margin(options.margin):
        again, _ = fulgurite.attention(q, k, v, causal=True, return_lse=True)
        [spared] = milliseconds([lambda: fulgurite.attention(q, k, v, causal=True, return_lse=True)], options.rounds)
    same = torch.equal(again, o)
    fine &= same
    print(f"{options.margin} SMs left free: {spared:.2f} ms, {'the same bits' if same else 'OTHER BITS'}", flush=True)
    print(json.dumps({"length": options.length, "rows": found, "margin": options.margin, "margin_ms": spared}))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
