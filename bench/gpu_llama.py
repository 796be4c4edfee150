"""Layers of the size of Llama-3-8B, trained on one GPU with our attention, torch's (cuDNN) and FlashAttention-4.

    python python/build.py && python bench/gpu_llama.py [--layers 4] [--steps 50] [--tokens 8192] [--batch 1] [--json FILE]

bf16, causal, 32 query and 8 key/value heads of 128, width 4096, feed-forward width 14336, rotary positions, RMS norm, AdamW.
All contenders start from the same weights and see the same tokens. Steps alternate among them, and a row is the median of
all steps but the first ten. The losses of the contenders must agree within four times the distance between two runs of
cuDNN whose weights differ by rounding noise.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
import fulgurite  # noqa: E402

WIDTH, HIDDEN, HEADS, KV_HEADS, DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 32000
WARM_UP = 10


def ours(q, k, v):
    return fulgurite.flash_attn_func(q, k, v, causal=True)


def cudnn(q, k, v):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def contenders():
    found = {"ours": ours, "cudnn": cudnn}
    try:
        from flash_attn.cute import flash_attn_func

        def fa4(q, k, v):
            result = flash_attn_func(q, k, v, causal=True)
            return result[0] if isinstance(result, tuple) else result

        found["fa4"] = fa4
    except Exception as error:  # whatever keeps it from being imported, it does not take part
        print(f"FlashAttention-4 does not take part: {error!r}")
    return found


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        linear = lambda n, m: torch.nn.Linear(n, m, bias=False)
        self.qkv, self.out = linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), linear(HEADS * DIM, WIDTH)
        self.gate_up, self.down = linear(WIDTH, 2 * HIDDEN), linear(HIDDEN, WIDTH)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH) for _ in range(2))

    def forward(self, x, cos, sin):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, tokens, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 2)
        o = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(o.reshape(batch, tokens, -1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(torch.nn.Module):
    def __init__(self, attention, layers):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(Layer(attention) for _ in range(layers))
        self.norm, self.head = torch.nn.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        n = tokens.shape[1]
        angle = torch.outer(torch.arange(n, device=tokens.device), 500000.0 ** (-torch.arange(0, DIM, 2, device=tokens.device) / DIM))
        cos, sin = (f(angle).to(self.head.weight.dtype)[:, None] for f in (torch.cos, torch.sin))
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class Run:
    """A model in training."""

    def __init__(self, attention, layers, noise=0.0):
        torch.manual_seed(0)
        self.model = Model(attention, layers).to("cuda", torch.bfloat16)
        for weight in self.model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.02)
        if noise:
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight *= 1 + noise * torch.randn_like(weight)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.losses, self.milliseconds = [], []

    def step(self, tokens):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.optimizer.zero_grad()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        end.record()
        end.synchronize()
        self.losses.append(loss.item())
        self.milliseconds.append(start.elapsed_time(end))


def text(generator, batch, length):
    """Tokens with structure: each repeats one of the last 64 with probability 0.8."""
    fresh = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    back = torch.randint(1, 65, (batch, length), generator=generator)
    keep = torch.rand((batch, length), generator=generator) < 0.8
    source = (torch.arange(length) - back).clamp(min=0)
    for _ in range(4):
        fresh = torch.where(keep, fresh.gather(1, source), fresh)
    return fresh.cuda()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_llama.py: torch sees no GPU")
    if options.steps <= WARM_UP:
        parser.error(f"--steps is {options.steps}, allowed: more than {WARM_UP}")
    runs = {name: Run(attention, options.layers) for name, attention in contenders().items()}
    runs["noise"] = Run(cudnn, options.layers, noise=2.0**-9)
    generator = torch.Generator().manual_seed(1)
    for number in range(options.steps):
        tokens = text(generator, options.batch, options.tokens + 1)
        for run in list(runs.values())[:: 1 if number % 2 == 0 else -1]:
            run.step(tokens)
    distance = lambda name: max(abs(a - b) for a, b in zip(runs[name].losses, runs["cudnn"].losses))
    found = {"machine": torch.cuda.get_device_name(), "options": vars(options) | {"json": None}, "noise": distance("noise")}
    rates = {}
    for name, run in runs.items():
        if name != "noise":
            rates[name] = options.batch * options.tokens / statistics.median(run.milliseconds[WARM_UP:]) * 1000
            print(f"{name:6} {rates[name]:9.0f} tokens/s, loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, at most {distance(name):.4f} from cuDNN's")
    best = max(rate for name, rate in rates.items() if name != "ours")
    print(f"ours over the best peer {rates['ours'] / best:.3f}; noise {found['noise']:.4f}")
    found |= {"tokens_per_second": rates, "ratio": rates["ours"] / best, "losses": {name: run.losses for name, run in runs.items()}}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if distance("ours") > 4 * found["noise"]:
        sys.exit(f"gpu_llama.py: losses differ by {distance('ours'):.4f}, allowed: {4 * found['noise']:.4f}")


if __name__ == "__main__":
    main()
