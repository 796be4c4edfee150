"""A small Llama-like model trained with our attention and with torch's from the same seed: the loss curves agree.

    python bench/train.py [--device cpu|cuda] [--dtype f32|bf16] [--steps 200] [--compile]
                          [--json out/train.json] [--svg out/train.svg]

Two layers with grouped heads, rotary embedding and RMS norms, on the bytes of this repository's pages. Three runs see the
same batches: torch's sdpa, the same mathematics written out in torch, and ours. How far the first two part is the noise of
the type; ours may be away from sdpa by twice as much (and some rounding steps of the loss). With --compile the model goes
through torch.compile, and a graph break is an error. The exit status is 1 when curves or gradients disagree.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fulgurite  # noqa: E402


def written_out(q, k, v):
    """Causal attention, [batch, heads, sequence, dim], in the type of q."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.float().masked_fill(hidden, -torch.inf), -1).to(v.dtype) @ v


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def ours(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return fulgurite.flash_attn_func(q, k, v, causal=True).transpose(1, 2)


def rotate(x):
    """Rotary embedding over [batch, heads, sequence, dim]."""
    half = x.shape[-1] // 2
    positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    def __init__(self, width, heads, kv_heads, attention):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.attention = heads, kv_heads, width // heads, attention
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        rows = self.qkv(self.norm_attention(x)).view(batch, length, -1, self.dim).transpose(1, 2)
        q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], 1)
        o = self.attention(rotate(q), rotate(k), v)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, attention, width=128, layers=2, heads=4, kv_heads=2):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Layer(width, heads, kv_heads, attention) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def text():
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/guide/*.md")])
    return torch.tensor(list(b"".join(page.read_bytes() for page in pages)))


def train(attention, data, options):
    """(losses, seconds, graph breaks)."""
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    model = Model(attention).to(options.device, dtype)
    generator, breaks = torch.Generator().manual_seed(1), 0
    step_model = model
    if options.compile:
        torch._dynamo.reset()
        example = torch.zeros(2, options.length, dtype=torch.long, device=options.device)
        breaks = torch._dynamo.explain(model)(example).graph_break_count
        torch._dynamo.reset()
        step_model = torch.compile(model, fullgraph=True, backend=options.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, start = [], time.perf_counter()
    for _ in range(options.steps):
        at = torch.randint(0, len(data) - options.length - 1, (options.batch,), generator=generator)
        rows = torch.stack([data[i : i + options.length + 1] for i in at.tolist()]).to(options.device)
        logits = step_model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - start, breaks


def svg(curves, title):
    """The curves as a picture of 640 x 360."""
    top, count = max(max(curve) for curve in curves.values()), max(map(len, curves.values()))
    colours = {"sdpa": "#1b6ca8", "written out": "#999999", "ours": "#d1495b"}
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="640" height="360" fill="white"/><text x="48" y="20">{title}</text>')
    for tick in range(int(top) + 1):
        y = 330 - 300 * tick / top
        parts.append(
            f'<path d="M48 {y:.1f}H624" stroke="#ddd"/><text x="40" y="{y + 4:.1f}" text-anchor="end">{tick}</text>'
        )
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(
            f"{48 + 576 * i / max(1, count - 1):.1f},{330 - 300 * y / top:.1f}" for i, y in enumerate(curve)
        )
        dash = ' stroke-dasharray="6 5"' if name == "ours" else ""
        colour = colours[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        parts.append(f'<text x="600" y="{44 + 16 * number}" fill="{colour}" text-anchor="end">{name}</text>')
    parts.append(
        f'<text x="336" y="352" text-anchor="middle">step, 0 to {count - 1}; cross entropy of bytes</text></svg>'
    )
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--backend", default="aot_eager", help="of torch.compile; inductor needs a C++ compiler on a CPU"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    data = text()  # once: all runs see the same
    runs = {
        name: train(attention, data, options)
        for name, attention in (("sdpa", sdpa), ("written out", written_out), ("ours", ours))
    }
    curves = {name: losses for name, (losses, _, _) in runs.items()}
    part = lambda name: max(abs(a - b) for a, b in zip(curves[name], curves["sdpa"]))
    noise, away = part("written out"), part("ours")
    allowed = 2 * noise + 8 * 2.0**-23 * max(curves["sdpa"])  # losses are f32, whatever the model is
    breaks = runs["ours"][2]
    for name, (losses, seconds, _) in runs.items():
        print(f"{name:12} first {losses[0]:.4f}  last {losses[-1]:.4f}  {seconds:.1f} s")
    print(
        f"noise of the type {noise:.2e}, ours away from sdpa {away:.2e}, allowed {allowed:.2e}; graph breaks {breaks}"
    )
    learned = curves["ours"][-1] < 0.8 * curves["ours"][0] or options.steps < 50
    ok = away <= allowed and breaks == 0 and learned
    if options.json:
        record = {
            "options": {k: str(v) for k, v in vars(options).items()},
            "torch": torch.__version__,
            "curves": curves,
        }
        record |= {"noise": noise, "away": away, "allowed": allowed, "graph_breaks": breaks, "ok": ok}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record) + "\n")
    if options.svg:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(svg(curves, f"2 layers, {options.dtype}, {options.device}, {options.steps} steps"))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
