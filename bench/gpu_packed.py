"""Packed decode on a GPU beside a dense batch: one query for each sequence, lengths equal and not.

    python python/build.py && python bench/gpu_packed.py

The two alternate in one process, medians of 15 rounds. The dense batch has the mean length of the packed one, so the ratio is what
unequal lengths and offsets on the device cost. Results are first compared with those of a padded batch.
"""

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402
from gpu_race import race  # noqa: E402

DIM = 128


def lengths(kind, batch):
    """Keys of each sequence."""
    if kind == "equal":
        return [4096] * batch
    low, high = {"3/4 to 1": (3072, 4097), "1 to longest": (1, 8193)}[kind]
    return torch.randint(low, high, (batch,), generator=torch.Generator().manual_seed(1)).tolist()


def measure(kind, heads, kv_heads, batch):
    own = lengths(kind, batch)
    longest, mean = max(own), sum(own) // batch
    q = torch.randn(batch, 1, heads, DIM, device="cuda").bfloat16()
    k, v = (torch.randn(batch, longest, kv_heads, DIM, device="cuda").bfloat16() for _ in range(2))
    offsets = torch.tensor([0, *own], device="cuda").cumsum(0).to(torch.int32)
    packed = [torch.cat([x[i, :n] for i, n in enumerate(own)]) for x in (k, v)]
    queries = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    call = functools.partial(
        fulgurite.flash_attn_varlen_func, q[:, 0], *packed, queries, offsets, 1, longest
    )
    used = torch.tensor(own, device="cuda", dtype=torch.int32)
    padded = fulgurite.attention(q, k, v, used_lengths=(None, used))
    assert torch.equal(call(), padded[:, 0]), "packed and padded sequences differ"
    dense = functools.partial(fulgurite.attention, q, k[:, :mean].contiguous(), v[:, :mean].contiguous())
    ms = race({"dense": dense, "packed": call}, 15)
    ratio = ms["packed"] / ms["dense"]
    print(f"{kind}, {heads}/{kv_heads} heads, {batch} sequences: dense {ms['dense']:.4f} ms, packed {ms['packed']:.4f} ms, {ratio:.3f}", flush=True)


def main():
    for heads, kv_heads in ((32, 8), (28, 4), (24, 8), (16, 16)):
        for batch in (32, 64, 128):
            measure("equal", heads, kv_heads, batch)
        measure("3/4 to 1", heads, kv_heads, 64)
        measure("1 to longest", heads, kv_heads, 64)


if __name__ == "__main__":
    main()
