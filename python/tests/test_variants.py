"""Parallax and Lighthouse: every library, independent references, gradients, torch.compile, refusals."""

import importlib.util

import numpy as np
import pytest
import variant_judge
from judge import close
from reference import visible

import fulgurite
from fulgurite import (
    lighthouse_attention,
    lighthouse_attention_backward,
    parallax_attention,
    parallax_attention_backward,
)

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


@pytest.fixture(autouse=True)
def judged():
    with variant_judge.judged():
        yield


def named(x):
    """The name of a wrong call: the arguments that it changes."""
    return "-".join(x) if isinstance(x, dict) else ""


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def differences(call, leaves, gradients, d_o, rng, count=3):
    """Compares gradients with central differences of sum(o d_o) at random elements."""
    for leaf, gradient in zip(leaves, gradients):
        assert gradient.shape == leaf.shape
        for _ in range(count):
            at = tuple(int(rng.integers(0, n)) for n in leaf.shape)
            value, step, ends = leaf[at], np.float32(2**-7), []
            for sign in (1, -1):
                leaf[at] = value + sign * step
                ends.append((np.float64(call()) * d_o).sum())
            leaf[at] = value
            difference = (ends[0] - ends[1]) / (2 * np.float64(step))
            assert abs(difference - gradient[at]) <= 1e-2 * max(1.0, float(np.abs(gradient).max()))


def parallax_reference(q, k, v, r, keep, scale=None):
    """o in float64: the covariance form, which the engine does not use."""
    q, k, v, r = (np.asarray(x, np.float64) for x in (q, k, v, r))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = np.where(keep, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    p = np.exp(scores - np.where(np.isfinite(top), top, 0))
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    mean_k, mean_v = np.einsum("bhij,bjhd->bihd", p, k), np.einsum("bhij,bjhd->bihd", p, v)
    both = np.einsum("bhij,bjhd,bjhe->bihde", p, v, k)
    covariance = both - np.einsum("bihd,bihe->bihde", mean_v, mean_k)
    return mean_v - np.einsum("bihde,bihe->bihd", covariance, r)


def parallax_call(rng):
    batch, heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    q_len, k_len, dim, value_dim = (int(rng.integers(1, n)) for n in (20, 40, 17, 17))
    q, r = (normal(rng, batch, q_len, heads * group, dim) for _ in range(2))
    k, v = normal(rng, batch, k_len, heads, dim), normal(rng, batch, k_len, heads, value_dim)
    options = {"causal": bool(rng.integers(0, 2))}
    if rng.random() < 0.3:
        options["window"] = (int(rng.integers(0, 9)), 2)
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(0.05, 1.0))
    keep = visible(q_len, k_len, options["causal"], options.get("window"))
    if rng.random() < 0.2:
        options["mask"] = rng.random((q_len, k_len)) < 0.7
        keep = keep & options["mask"]
    return [q, k, v, r], options, keep


def test_parallax_random_calls():
    rng = np.random.default_rng(1)
    for _ in range(200):
        tensors, options, keep = parallax_call(rng)
        o, lse = parallax_attention(*tensors, return_lse=True, **options)
        assert lse.shape == (o.shape[0], o.shape[2], o.shape[1]) and lse.dtype == np.float32
        close(o, parallax_reference(*tensors, keep, options.get("scale")))
    assert variant_judge.COUNTS["judged"] == 200


def test_parallax_gradients_are_differences():
    rng = np.random.default_rng(2)
    for _ in range(20):
        tensors, options, _ = parallax_call(rng)
        d_o = normal(rng, *tensors[0].shape[:3], tensors[2].shape[-1])
        # A query that sees one key has a gradient of 0, of which f32 leaves the rounding of terms: differences judge.
        with variant_judge.paused():
            found = parallax_attention_backward(d_o, *tensors, **options)
        differences(lambda: parallax_attention(*tensors, **options), tensors, found, d_o, rng)


def test_parallax_without_a_probe_is_attention():
    rng = np.random.default_rng(3)
    q, k, v = (normal(rng, 2, 30, 2, 16) for _ in range(3))
    assert (parallax_attention(q, k, v, q * 0, causal=True) == fulgurite.attention(q, k, v, causal=True)).all()


def test_parallax_packed_and_masks():
    rng = np.random.default_rng(4)
    q, k, v, r = (normal(rng, 50, 2, 8) for _ in range(4))
    offsets = np.array([0, 20, 50])
    packed, lse = parallax_attention(q, k, v, r, causal=True, cu_seqlens=(offsets, offsets), return_lse=True)
    assert lse.shape == (2, 50)
    alone = parallax_attention(*(x[None, 20:] for x in (q, k, v, r)), causal=True)
    assert (packed[20:] == alone[0]).all()
    batch = [x[None] for x in (q, k, v, r)]
    traced = parallax_attention(*batch, mask_mod=lambda b, h, i, j: (j <= i) & (i - j < 7))
    close(traced, parallax_attention(*batch, causal=True, window=(6, None)))


PARALLAX_WRONG = [
    (dict(r=np.zeros((1, 4, 2, 9), np.float32)), "`r` has shape [1, 4, 2, 9], allowed: [1, 4, 2, 8]"),
    (dict(r=np.zeros((1, 4, 2, 8), np.float16)), "`r` is f16, allowed: f32"),
    (dict(r=None), "`r` is a NoneType, allowed: an array"),
    (dict(q=np.zeros((4, 2, 8), np.float32)), "`q` has shape [4, 2, 8], allowed: [batch, sequence, heads, head_dim]"),
    (dict(k=np.zeros((1, 4, 3, 8), np.float32)), "allowed"),
    (dict(scale=-1.0), "`scale` is -1, allowed: finite and above 0"),
    (dict(exp="sas"), "parallax has no exp sas; use auto"),
    (dict(causal="left"), "`causal` is 'left', allowed"),
    (dict(engine="oracle"), "oracle"),
    (dict(threads=0), "`threads` is 0, allowed"),
    (dict(mask=np.zeros((5, 5), bool)), "`mask` has shape [5, 5], allowed: what broadcasts to [1, 2, 4, 4]"),
    (dict(mask=np.zeros((4, 4), np.float32)), "`mask` is float32, allowed: booleans"),
]


@pytest.mark.parametrize(("change", "words"), PARALLAX_WRONG, ids=named)
def test_parallax_refusals(change, words):
    rows = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError) as refused:
        parallax_attention(**{"q": rows, "k": rows, "v": rows, "r": rows, **change})
    assert words in str(refused.value)


def picked(q_norms, k_norms, levels, pool, budget, tile):
    """The nodes of one head as (sort key, level, index): the paper's selection, with plain lists."""
    tokens = len(q_norms)
    tops = lambda norms, level: norms.reshape(-1, pool ** (level - 1)).max(1)
    nodes, tiles, found = tokens // pool ** (levels - 1), 1 if levels == 1 else budget // tile, []
    for t in range(tiles):
        candidates = list(range(t * nodes // tiles, (t + 1) * nodes // tiles))
        for level in range(levels, 1, -1):
            width = pool ** (level - 1)
            a, b = tops(q_norms, level), tops(k_norms, level)
            first = sorted(candidates, key=lambda i: (-a[i], i))[: tile // 2]
            rest = [i for i in candidates if i not in first]
            chosen = first + sorted(rest, key=lambda i: (-b[i], i))[: tile // 2]
            for i in candidates:  # a node with children comes right after the last of them
                found.append((width * (i + 1) - 2.0 ** (1 - level) if i in chosen else width * i, level, i))
            candidates = [child for i in sorted(chosen) for child in range(i * pool, (i + 1) * pool)]
        found += [(float(i), 1, i) for i in candidates]
    return sorted(found)


def lighthouse_reference(q, k, v, levels, pool, budget, tile):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, tokens, heads, dim = q.shape
    group, o = heads // k.shape[2], np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            own = q[b, :, h], k[b, :, h // group], v[b, :, h // group]
            norms = [np.sqrt((x * x).sum(-1)).astype(np.float32) for x in own[:2]]
            nodes = picked(*norms, levels, pool, budget, tile)
            spans = [slice(i * pool ** (level - 1), (i + 1) * pool ** (level - 1)) for _, level, i in nodes]
            means = [np.stack([x[span].mean(0) for span in spans]) for x in own]
            scores = means[0] @ means[1].T / np.sqrt(dim)
            scores = np.where(np.tril(np.ones(scores.shape, bool)), scores, -np.inf)
            p = np.exp(scores - scores.max(-1, keepdims=True))
            rows = p / p.sum(-1, keepdims=True) @ means[2]
            for row, (_, level, i) in zip(rows, nodes):
                width = pool ** (level - 1)
                start = i * width + width - 1
                o[b, start : start + width, h] += row
    return o


def lighthouse_call(rng, most_tokens=128):
    levels, pool = int(rng.integers(1, 4)), int(rng.choice([2, 4]))
    tile = int(rng.choice([2, 4]))
    widest = pool**levels
    tokens = widest * int(rng.integers(1, max(2, most_tokens // widest)))
    coarsest = tokens // pool ** (levels - 1)
    most = coarsest // tile
    if most == 0:
        tile, most = 2, coarsest // 2
    budget = tile * int(rng.integers(1, most + 1))
    kv, group, dim, value_dim = (int(rng.integers(1, n)) for n in (3, 3, 12, 12))
    batch = int(rng.integers(1, 3))
    q = normal(rng, batch, tokens, kv * group, dim)
    k, v = normal(rng, batch, tokens, kv, dim), normal(rng, batch, tokens, kv, value_dim)
    return [q, k, v], {"levels": levels, "pool": pool, "budget": budget, "tile": tile}


def test_lighthouse_random_calls():
    rng = np.random.default_rng(5)
    for _ in range(200):
        tensors, options = lighthouse_call(rng, 64)
        close(lighthouse_attention(*tensors, **options), lighthouse_reference(*tensors, **options))
    assert variant_judge.COUNTS["judged"] == 200


def test_lighthouse_gradients_are_differences():
    """Differences by values, which the selection does not read; the oracle judges the gradients of q and k."""
    rng = np.random.default_rng(6)
    for _ in range(20):
        tensors, options = lighthouse_call(rng)
        d_o = normal(rng, *tensors[0].shape[:3], tensors[2].shape[-1])
        found = lighthouse_attention_backward(d_o, *tensors, **options)
        differences(lambda: lighthouse_attention(*tensors, **options), tensors[2:], found[2:], d_o, rng)


def test_lighthouse_with_one_level_is_attention():
    rng = np.random.default_rng(7)
    q, k, v = (normal(rng, 2, 32, 2, 16) for _ in range(3))
    close(lighthouse_attention(q, k, v, levels=1, pool=2), fulgurite.attention(q, k, v, causal=True))


LIGHTHOUSE_WRONG = [
    (dict(q=np.zeros((64, 2, 8), np.float32)), "`q` has shape [64, 2, 8], allowed: [batch, sequence, heads, head_dim]"),
    (dict(k=np.zeros((1, 32, 2, 8), np.float32)), "`k` has shape [1, 32, 2, 8], allowed: [1, 64, 2, 8]"),
    (dict(v=np.zeros((1, 64, 2, 8), np.float16)), "`v` is f16, allowed: f32"),
    (dict(levels=9), "`levels` is 9, allowed: 1 to 8"),
    (dict(levels=0), "`levels` is 0, allowed: 1 to 8"),
    (dict(levels=2.5), "`levels` is 2.5, allowed: an integer"),
    (dict(pool=3), "`pool` is 3, allowed: 2, 4, 8"),
    (dict(levels=4), "`len` is 64, allowed: a multiple of 256"),
    (dict(tile=3), "`tile` is 3, allowed: an even number"),
    (dict(budget=5), "`budget` is 5, allowed: a multiple of 2"),
    (dict(budget=64), "`budget` is 64, allowed: a multiple of 2 up to the 4 nodes"),
    (dict(budget=-2), "`budget` is 0, allowed: a multiple of 2"),
    (dict(engine="sim"), "sim"),
    (dict(threads=5000), "`threads` is 5000, allowed: 1 to"),
]


@pytest.mark.parametrize(("change", "words"), LIGHTHOUSE_WRONG, ids=named)
def test_lighthouse_refusals(change, words):
    rows = np.zeros((1, 64, 2, 8), np.float32)
    with pytest.raises(ValueError) as refused:
        lighthouse_attention(**{"q": rows, "k": rows, "v": rows, "budget": 2, "tile": 2, **change})
    assert words in str(refused.value)


@needs_torch
def test_torch():
    import torch

    rng = np.random.default_rng(8)
    q, k, v, r = (torch.from_numpy(normal(rng, 1, 64, 2, 8)).requires_grad_() for _ in range(4))
    plain = [x.detach().numpy() for x in (q, k, v, r)]
    d_o = normal(rng, 1, 64, 2, 8)
    o, lse = parallax_attention(q, k, v, r, causal=True, return_lse=True)
    assert not lse.requires_grad
    found = torch.autograd.grad(o, (q, k, v, r), torch.from_numpy(d_o))
    for got, want in zip(found, parallax_attention_backward(d_o, *plain, causal=True)):
        assert torch.equal(got, torch.from_numpy(want))
    o = lighthouse_attention(q, k, v, budget=4, tile=2)
    found = torch.autograd.grad(o, (q, k, v), torch.from_numpy(d_o))
    for got, want in zip(found, lighthouse_attention_backward(d_o, *plain[:3], budget=4, tile=2)):
        assert torch.equal(got, torch.from_numpy(want))
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v, r)]
    o = parallax_attention(*half) + lighthouse_attention(*half[:3], budget=4, tile=2)
    o.float().square().sum().backward()
    assert o.dtype == torch.bfloat16 and all(x.grad.dtype == torch.bfloat16 for x in half)


@needs_torch
def test_torch_compile_has_no_graph_break():
    import torch

    rng = np.random.default_rng(9)

    def layer(q, k, v, r):
        offsets = torch.tensor([0, 20, 64])
        packed = parallax_attention(q[0], k[0], v[0], r[0], causal=True, cu_seqlens=(offsets, offsets))
        o = parallax_attention(q, k, v * 2, r, causal=True, window=(9, 0)) + packed
        return o + lighthouse_attention(q, k, v, budget=4, tile=2)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    tensors = [torch.from_numpy(normal(rng, 1, 64, 2, 8)).requires_grad_() for _ in range(4)]
    want = torch.autograd.grad(layer(*tensors).square().sum(), tensors)
    found = torch.autograd.grad(compiled(*tensors).square().sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_jax():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(10)
    q, k, v, r = (jax.numpy.asarray(normal(rng, 1, 64, 2, 8)) for _ in range(4))
    for o in (parallax_attention(q, k, v, r), lighthouse_attention(q, k, v, budget=4, tile=2)):
        assert isinstance(o, jax.Array)
