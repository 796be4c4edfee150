"""A small GPT whose sequences are divided among processes, trained on the pages of this repository.

    python examples/context_parallel_gpt.py                     # on 1, 2 and 4 processes: the losses are the same
    torchrun --nproc-per-node 2 examples/context_parallel_gpt.py

Every process has all weights and its rows of every sequence. Attention is the only operation that needs rows of other
processes; gradients of weights are summed, as in data parallelism.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import nn

from fulgurite.distributed import context_parallel_attention, sequence_layout, shard_sequence

DIM, HEADS, KV_HEADS, LAYERS, BYTES = 64, 4, 2, 2, 256
BATCH, LENGTH = 2, 253  # a length that no number of processes divides


class Block(nn.Module):
    """Attention over all rows, then a feed-forward layer over the own rows."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.size = DIM // HEADS
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * self.size, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x, layout):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 2)
        o = context_parallel_attention(q, k, v, causal=True, balance=layout, threads=1)
        x = x + self.out(o.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, BYTES, bias=False)

    def forward(self, tokens, places, layout):
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, layout)
        return self.head(self.norm(x))


def text() -> torch.Tensor:
    """The bytes to train on: the pages of the guide."""
    pages = sorted((Path(__file__).resolve().parents[1] / "docs" / "guide").glob("*.md"))
    data = b"".join(page.read_bytes() for page in pages) or bytes(range(256)) * 64
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(steps: int) -> list[float]:
    """The loss of each step, over all rows."""
    torch.manual_seed(0)  # the same weights and batches on every process
    model, data = Gpt(), text()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layout = sequence_layout(LENGTH, ranks, balance="zigzag")
    positions = torch.from_numpy(layout.positions(rank))
    places = positions.clamp(max=LENGTH - 1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,))
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        tokens, targets = (shard_sequence(x, layout, rank) for x in (rows[:, :-1], rows[:, 1:]))
        targets[:, positions >= LENGTH] = -100  # padding has no target
        scores = model(tokens, places, layout)
        # The sum over the own rows, divided by the number of all rows: gradients then add up over processes.
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * LENGTH)
        optimiser.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        for x in (total, *(weight.grad for weight in model.parameters())):
            dist.all_reduce(x)
        optimiser.step()
        losses.append(float(total))
    return losses


def run(rank: int, ranks: int, port: int, steps: int, results) -> None:
    """One process of a group on this machine."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    losses = train(steps)
    if rank == 0:
        results.put((ranks, losses))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> None:
    """Trains on each number of processes, and compares the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started the processes
        dist.init_process_group("gloo")
        losses = train(asked.steps)
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} processes: loss {losses[0]:.4f} to {losses[-1]:.4f}")
        dist.destroy_process_group()
        return
    results = processes.get_context("forkserver").Queue()
    found = {}
    for ranks in asked.ranks:
        arguments = (ranks, free_port(), asked.steps, results)
        processes.start_processes(run, arguments, nprocs=ranks, start_method="forkserver")
        ranks, found[ranks] = results.get()
        print(f"{ranks} processes: loss {found[ranks][0]:.4f} to {found[ranks][-1]:.4f}")
    first = found[asked.ranks[0]]
    for ranks, losses in found.items():
        worst = max(abs(a - b) / a for a, b in zip(first, losses))
        print(f"{ranks} processes: losses differ by {worst:.1e} from those of {asked.ranks[0]}, relative")
        assert worst < 1e-4, "the losses are not those of one process"
        assert asked.steps < 20 or losses[-1] < 0.9 * losses[0], "the model does not learn"


if __name__ == "__main__":
    # Imports take longer than the training: one process does them, and the others are forks of it.
    processes.get_context("forkserver").set_forkserver_preload(["torch.distributed.device_mesh", "torch._dynamo"])
    main()
