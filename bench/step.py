"""A training step of a small GPT on a GPU, with our attention and with torch's (cuDNN): how long, and how much of it is attention.

    python bench/step.py [--layers 4] [--width 2048] [--heads 16] [--tokens 16384] [--lengths 1024,4096,16384]
                         [--rounds 8] [--json out/step.json]

bf16, causal, forward, backward and AdamW; the model is the one of `train.py`, without grouped heads. Contenders
alternate, medians. "attention" is its forward and backward alone, on tensors of the same shapes, times the layers.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import train


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


CONTENDERS = {"ours": train.ours, "cudnn": cudnn}


def timed(work):
    """Milliseconds on the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def steps(length, options):
    """A function for each contender that does one step."""
    made = {}
    for name, attention in CONTENDERS.items():
        torch.manual_seed(0)
        model = train.Model(attention, options.width, options.layers, options.heads, options.heads)
        model = model.to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(0, 256, (options.tokens // length, length + 1), device="cuda")

        def step(model=model, optimizer=optimizer, tokens=tokens):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()

        made[name] = step
    return made


def alone(length, options):
    """The same for attention by itself, once a layer."""
    shape = (options.tokens // length, length, options.heads, options.width // options.heads)
    q, k, v, d_o = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def run(attention):
        for _ in range(options.layers):
            torch.autograd.grad(attention(q, k, v), (q, k, v), d_o)

    return {name: lambda attention=attention: run(attention) for name, attention in CONTENDERS.items()}


def race(works, rounds):
    times = {name: [] for name in works}
    for name, work in works.items():
        timed(work)
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(timed(work))
    return {name: statistics.median(all_times) for name, all_times in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("step.py: torch sees no GPU")
    rows = []
    print(f"{torch.cuda.get_device_name()}, {options.layers} layers, width {options.width}, {options.heads} heads")
    for length in map(int, options.lengths.split(",")):
        attention, whole = (race(make(length, options), options.rounds) for make in (alone, steps))
        rows.append({"length": length, "attention_ms": attention, "step_ms": whole})
        ours, theirs = whole["ours"], whole["cudnn"]
        print(
            f"{length:6}: step {ours:.2f} ms, cuDNN {theirs:.2f} ms, {theirs / ours:.3f}x; attention "
            f"{attention['ours'] / ours:.0%} of our step, {attention['cudnn'] / theirs:.0%} of theirs"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
