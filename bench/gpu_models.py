"""Attention on the shapes that models have, beside its peers: a part of bench/gpu.py.

    python python/build.py && python bench/gpu.py models shapes

`models` is a table of known models, `shapes` draws random ones (odd lengths, grouped heads, other head dims).
Both passes; every contender runs in one process, and each of our
results is compared with float64 first. A ratio is against the fastest peer that ran.
"""

import functools
import math
import random
import statistics
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

import fulgurite
from gpu_race import race

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """One causal attention layer of a model."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None  # keys to the left of the query, the query's own not counted
    softcap: float = 0.0
    sinks: bool = False

    def pairs(self):
        """(query, key) pairs that are visible, of one head of one sequence."""
        n, w = self.length, self.length if self.window is None else min(self.length, self.window + 1)
        return w * (w + 1) // 2 + (n - w) * w

    def flops(self, products):
        return 2 * products * self.batch * self.heads * self.dim * self.pairs()

    def text(self):
        more = [] if self.window is None else [f"window {self.window + 1}"]
        more += [f"softcap {self.softcap:g}"] * (self.softcap > 0) + ["sinks"] * self.sinks
        return f"{self.name} {self.batch} x {self.length}, {self.heads}/{self.kv_heads}, d {self.dim}" + "".join(f", {word}" for word in more)


MODELS = (
    Shape("Llama-3-8B", 1, 8192, 32, 8, 128),
    Shape("Llama-3-70B", 2, 4096, 64, 8, 128),
    Shape("Qwen2.5-7B", 2, 4096, 28, 4, 128),
    Shape("Qwen3-0.6B", 8, 2048, 16, 8, 128),
    Shape("Gemma-3 local", 1, 8192, 16, 8, 256, window=1023),
    Shape("Gemma-2", 1, 4096, 16, 8, 256, softcap=50.0),
    Shape("Mistral", 1, 16384, 32, 8, 128, window=4095),
    Shape("GPT-OSS", 1, 4096, 64, 8, 64, window=127, sinks=True),
    Shape("Phi-3-mini", 2, 4096, 32, 32, 96),
    Shape("Llama-3.2-1B", 8, 2048, 32, 8, 64),
    Shape("Falcon-7B", 4, 2048, 71, 1, 64),
    Shape("GPT-2", 16, 1024, 12, 12, 64),
)


def drawn(count, seed):
    """Random shapes of models: lengths that no tile divides, groups of 1 to 71 query heads."""
    rng = random.Random(seed)
    while count > 0:
        kv_heads, group = rng.choice((1, 2, 3, 4, 8, 16)), rng.choice((1, 1, 2, 3, 4, 7, 8, 16, 71))
        batch, length = rng.choice((1, 2, 3, 4, 8, 16)), int(math.exp(rng.uniform(math.log(200), math.log(20000))))
        dim = rng.choice((64, 64, 80, 96, 112, 128, 128, 128, 160, 192, 256))
        heads, length = kv_heads * group, length + (length % 64 == 0)
        if heads <= 80 and 2**21 <= batch * length * heads * dim <= 2**27:
            count -= 1
            yield Shape("drawn", batch, length, heads, kv_heads, dim)


# ---------------------------------------------------------------------------------------------- contenders
def tensors(shape):
    q = torch.randn(shape.batch, shape.length, shape.heads, shape.dim, device="cuda").to(BF16)
    k, v = (torch.randn(shape.batch, shape.length, shape.kv_heads, shape.dim, device="cuda").to(BF16) for _ in range(2))
    sinks = torch.randn(shape.heads, device="cuda") if shape.sinks else None
    return q, k, v, sinks


def options_of(shape, sinks):
    found = {"causal": True}
    if shape.window is not None:
        found = {"window": (shape.window, 0)}
    if shape.softcap:
        found["softcap"] = shape.softcap
    if sinks is not None:
        found["sinks"] = sinks
    return found


def forwards(shape, peers, q, k, v, sinks):
    """Peers that have all features of the shape, each as a call that returns o."""
    plain = shape.window is None and not shape.softcap and not shape.sinks
    calls = {}
    if plain:
        calls["cudnn"] = peers["sdpa"](SDPBackend.CUDNN_ATTENTION, q, k, v, True)
    own = {"causal": True, "softcap": shape.softcap}
    if shape.window is not None:
        own["window_size"] = (shape.window, 0)
    if peers["fa3"] and sinks is None and not q.requires_grad:
        calls["fa3"] = lambda: peers["first"](peers["fa3"](q, k, v, **own))
    if peers["fa4"]:
        sink = {} if sinks is None else {"learnable_sink": sinks.to(BF16)}
        calls["fa4"] = lambda: peers["first"](peers["fa4"](q, k, v, **own, **sink))
    if peers["flex"] and not shape.sinks and not plain:
        calls["flex"] = flex(shape, peers["flex"], q, k, v)
    return calls


def flex(shape, flex_attention, q, k, v):
    from torch.nn.attention.flex_attention import create_block_mask

    far = shape.length if shape.window is None else shape.window
    block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= far), None, None, shape.length, shape.length, device="cuda")
    cap = shape.softcap
    score_mod = (lambda s, b, h, i, j: cap * torch.tanh(s / cap)) if cap else None
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: flex_attention(qt, kt, vt, score_mod=score_mod, block_mask=block_mask, enable_gqa=True).transpose(1, 2)


def surviving(calls, say):
    """Without contenders that cannot do it; says why."""
    kept = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            kept[name] = call
        except Exception as failure:  # whatever keeps a peer from running, it does not take part
            say(f"  {name} does not take part: {(str(failure).splitlines() or [repr(failure)])[0][:120]}")
    return kept


# ---------------------------------------------------------------------------------------------- float64
def reference(shape, q, k, v, d_o, sinks):
    """o and d_q of the first query head, d_k and d_v of the first key/value head, of the first sequence, in float64."""
    group, n, scale = shape.heads // shape.kv_heads, shape.length, shape.dim**-0.5
    keys, values = k[0, :, 0].double(), v[0, :, 0].double()
    d_k, d_v, o, d_q = torch.zeros_like(keys), torch.zeros_like(values), None, None
    place = torch.arange(n, device=q.device)
    for head in range(group):
        queries, grads = q[0, :, head].double(), d_o[0, :, head].double()
        outs, d_queries = torch.zeros_like(queries), torch.zeros_like(queries)
        for start in range(0, n, 2048):
            rows = slice(start, min(n, start + 2048))
            scores = queries[rows] @ keys.mT * scale
            slope = 1.0
            if shape.softcap:
                bent = torch.tanh(scores / shape.softcap)
                scores, slope = shape.softcap * bent, 1 - bent**2
            far = place[rows, None] - place[None]
            scores = scores.masked_fill((far < 0) | (far > (n if shape.window is None else shape.window)), -math.inf)
            lse = torch.logsumexp(scores, -1, keepdim=True)
            if sinks is not None:
                lse = torch.logaddexp(lse, sinks[head].double())
            p = torch.exp(scores - lse)
            outs[rows] = p @ values
            d_p = grads[rows] @ values.mT
            d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * slope * scale
            d_queries[rows] = d_s @ keys
            d_k += d_s.mT @ queries[rows]
            d_v += p.mT @ grads[rows]
        if head == 0:
            o, d_q = outs, d_queries
    return o, d_q, d_k, d_v


def distance(got, want):
    return ((got[0, :, 0].double() - want).norm() / want.norm()).item()


# ---------------------------------------------------------------------------------------------- races
def one(shape, peers, rounds, say):
    """A row of the table: rates of both passes."""
    q, k, v, sinks = tensors(shape)
    d_o, options = torch.randn_like(q), options_of(shape, sinks)
    out = torch.empty_like(q)
    ours = functools.partial(fulgurite.attention, q, k, v, out=out, **options)
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
    wants = reference(shape, q, k, v, d_o, sinks)
    row = {"shape": shape.text(), "error": {"o": distance(o, wants[0])}}
    for kind, products in (("forward", 2), ("backward", 5)):
        if kind == "forward":
            calls = {"ours": ours, **forwards(shape, peers, q, k, v, sinks)}
        else:
            grads = tuple(torch.empty_like(x) for x in (q, k, v) + ((sinks,) if shape.sinks else ()))
            mine = functools.partial(fulgurite.attention_backward, d_o, q, k, v, o, lse, out=grads, **options)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            made = surviving(forwards(shape, peers, *leaves, sinks), say)
            calls = {"ours": mine}
            for name, call in made.items():
                calls[name] = functools.partial(torch.autograd.grad, call(), leaves, d_o, retain_graph=True)
        calls = surviving(calls, say)
        if "ours" not in calls:
            row[kind] = None
            continue
        if kind == "backward":
            got = calls["ours"]()
            row["error"] |= {name: distance(g, w) for name, g, w in zip(("d_q", "d_k", "d_v"), got[:3], wants[1:])}
        ms = race(calls, rounds)
        rate = {name: shape.flops(products) / t / 1e9 for name, t in ms.items()}
        best = max((x for name, x in rate.items() if name != "ours"), default=math.nan)
        row[kind] = {"tflops": rate, "ms": ms, "ratio": rate["ours"] / best}
        say(f"{shape.text()} {kind}: " + " ".join(f"{name} {x:.0f}" for name, x in rate.items()) + f"; best {rate['ours'] / best:.3f}")
    say(f"   errors {', '.join(f'{name} {x:.1e}' for name, x in row['error'].items())}")
    return row


def table(shapes, peers, rounds, say):
    rows = []
    for shape in shapes:
        rows.append(one(shape, peers, rounds, say))
        torch.cuda.empty_cache()
    found = {"rows": rows}
    for kind in ("forward", "backward"):
        ratios = [row[kind]["ratio"] for row in rows if row[kind] and not math.isnan(row[kind]["ratio"])]
        if ratios:
            found[kind] = {"geometric_mean": math.exp(statistics.mean(map(math.log, ratios))), "smallest": min(ratios)}
            say(f"{kind}: geometric mean over the best peer {found[kind]['geometric_mean']:.3f}, smallest {found[kind]['smallest']:.3f}")
    return found
