"""Block skipping from Python: an independent selection, gradients, torch.compile, calibration, refusals."""

import importlib.util

import numpy as np
import pytest
import variant_judge
from judge import close
from reference import attention as reference
from reference import visible

import fulgurite
from fulgurite import Skip, attention, attention_backward, classify_heads, skip_report

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


@pytest.fixture(autouse=True)
def judged():
    with variant_judge.judged():
        yield


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def kept_tiles(q, k, keep, window, log, threshold, tile):
    """[q tiles, k tiles] of one head: classes, then the greedy walk of the kernel; None if a decision is too close."""
    (q_len, k_len), (rows, cols) = keep.shape, tile
    i, j = np.arange(q_len)[:, None] + k_len - q_len, np.arange(k_len)[None]
    seen = keep.copy()
    if window is not None:
        seen &= (i - j < window[0]) | (j < window[1])
    scores = np.where(seen, q.astype(np.float64) @ k.astype(np.float64).T * q.shape[1] ** -0.5, -np.inf)
    shape = -(-q_len // rows), -(-k_len // cols)
    kept = np.zeros(shape, bool)
    for a in range(shape[0]):
        block = scores[a * rows : (a + 1) * rows]
        tops = [block[:, b * cols : (b + 1) * cols].max(1, initial=-np.inf) for b in range(shape[1])]
        tiles = [b for b in range(shape[1]) if np.isfinite(tops[b]).any()]
        if log and tiles:
            last = (min((a + 1) * rows, q_len) - 1 + k_len - q_len) // cols
            distances = {0} | {1 << n for n in range(20)}
            tiles = [b for b in tiles if b == 0 or last - b in distances]
        order = ([0] if 0 in tiles else []) + [b for b in tiles[::-1] if b != 0]
        top = np.full(block.shape[0], -np.inf)
        for b in order:
            top = np.maximum(top, tops[b])
            with np.errstate(invalid="ignore"):
                margin = np.where(np.isfinite(tops[b]), tops[b] - top, -np.inf).max() - np.log(threshold or 1e-300)
            if abs(margin) < 1e-4:
                return None
            kept[a, b] = threshold is None or margin > 0
    return kept, seen


def skip_call(rng):
    batch, kv, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    length, extra, dim = int(rng.integers(1, 150)), int(rng.integers(0, 60)), int(rng.integers(1, 17))
    heads = kv * group
    q = normal(rng, batch, length, heads, dim) * np.float32(rng.choice([1, 5]))
    k, v = normal(rng, batch, length + extra, kv, dim), normal(rng, batch, length + extra, kv, int(rng.integers(1, 9)))
    tile = int(rng.choice([16, 32])), int(rng.choice([16, 32]))
    kind = rng.choice(["dense", "window"])
    window = (int(rng.integers(1, 60)), int(rng.integers(0, 20))) if kind == "window" else None
    threshold = float(rng.choice([0.01, 0.2])) if rng.random() < 0.5 else None
    classes = "dense" if window is None else f"window:{window[0]}:{window[1]}"
    return [q, k, v], Skip(classes, threshold=threshold, tile=tile), window, threshold, tile


def test_random_calls():
    """Tiles and results of the engine beside an independent selection and attention over its tiles."""
    rng = np.random.default_rng(1)
    compared = 0
    for _ in range(200):
        (q, k, v), skip, window, threshold, tile = skip_call(rng)
        report = skip_report(q, k, v, skip=skip, causal=True)
        o, lse = attention(q, k, v, causal=True, skip=str(skip), return_lse=True)
        keep, group = visible(q.shape[1], k.shape[1], True), q.shape[2] // k.shape[2]
        assert report.tiles.sum() == report.kept <= report.by_proxy <= report.by_class <= report.visible
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                found = kept_tiles(q[b, :, h], k[b, :, h // group], keep, window, False, threshold, tile)
                if found is None:
                    continue
                kept, seen = found
                assert (report.tiles[b, h].astype(bool) == kept).all()
                whole = np.kron(kept, np.ones(tile, bool))[: q.shape[1], : k.shape[1]] & seen
                scores = np.float64(q[b, :, h]) @ np.float64(k[b, :, h // group]).T * q.shape[3] ** -0.5
                p = np.where(whole, np.exp(scores - np.where(whole, scores, -np.inf).max(1, keepdims=True)), 0)
                want = p / p.sum(1, keepdims=True) @ np.float64(v[b, :, h // group])
                close(o[b, :, h], want)
                compared += 1
    assert compared > 300 and variant_judge.COUNTS["judged"] == 200


LEVELS = ["log,tile:16x16", "mass:0.7:-1,tile:16x16", "top:0.3,tile:16x32", "dense,log,tile:32x16"]


@pytest.mark.parametrize("text", LEVELS)
def test_other_levels_are_attention_over_their_tiles(text):
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, 1, 160, 2, 8) for _ in range(3))
    report = skip_report(q, k, v, skip=text, causal=True)
    assert 0 < report.kept < report.visible
    rows, cols = map(int, text.split("tile:")[1].split("x"))
    mask = np.kron(report.tiles.astype(bool), np.ones((rows, cols), bool))[..., :160, :160]
    want = attention(q, k, v, causal=True, mask=mask)
    close(attention(q, k, v, causal=True, skip=text), want)


def test_gradients_are_differences():
    rng = np.random.default_rng(3)
    for _ in range(20):
        (q, k, v), skip, window, _, _ = skip_call(rng)
        classes = str(skip).split(",")[0]  # classes do not depend on values, so that differences exist
        options = {"causal": True, "skip": f"{classes},tile:16x16"}
        o, lse = attention(q, k, v, return_lse=True, **options)
        d_o = normal(rng, *o.shape)
        # Peaked rows, whose gradients cancel: the differences judge them.
        with variant_judge.paused():
            found = attention_backward(d_o, q, k, v, o, lse, **options)
        for leaf, gradient in zip((q, k, v), found):
            at = tuple(int(rng.integers(0, n)) for n in leaf.shape)
            value, step, ends = leaf[at], np.float32(2**-7), []
            for sign in (1, -1):
                leaf[at] = value + sign * step
                ends.append((np.float64(attention(q, k, v, **options)) * d_o).sum())
            leaf[at] = value
            difference = (ends[0] - ends[1]) / (2 * np.float64(step))
            assert abs(difference - gradient[at]) <= 1e-2 * max(1.0, float(np.abs(gradient).max()))


def test_packed_sequences_and_extras():
    rng = np.random.default_rng(4)
    q, k, v = (normal(rng, 90, 2, 8) for _ in range(3))
    offsets = np.array([0, 30, 90])
    options = {"causal": True, "skip": "window:20:4,tile:16x16"}
    packed, lse = attention(q, k, v, cu_seqlens=(offsets, offsets), return_lse=True, **options)
    assert lse.shape == (2, 90)
    alone = attention(q[None, 30:], k[None, 30:], v[None, 30:], **options)
    assert (packed[30:] == alone[0]).all()
    bias = normal(rng, 90, 90)
    batch = [x[None] for x in (q, k, v)]
    o, lse = attention(*batch, bias=bias, return_lse=True, **options)
    found = attention_backward(np.ones_like(o), *batch, o, lse, bias=bias, **options)
    assert len(found) == 4 and found[3].shape == bias.shape


def test_nothing_skipped_is_attention():
    rng = np.random.default_rng(5)
    q, k, v = (normal(rng, 2, 70, 2, 16) for _ in range(3))
    close(attention(q, k, v, skip=Skip()), reference(q, k, v)[0])


def test_calibration_finds_the_class_of_a_head():
    """Head 0 attends to nearby keys, head 1 to everything."""
    rng = np.random.default_rng(6)
    tokens, dim = 256, 16
    angles = np.arange(tokens)[:, None] * (0.5 ** np.arange(dim // 2))[None]
    near = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32) * 6
    far = normal(rng, tokens, dim) * np.float32(0.1)
    q = k = np.stack([near, far], 1)[None]
    classes = classify_heads(q, k, windows=(16, 32, 64), sinks=4, share=0.95)
    assert classes[0].startswith("window:") and classes[1] == "dense"
    v = normal(rng, 1, tokens, 2, 8)
    error = np.abs(attention(q, k, v, causal=True, skip=Skip(classes, tile=(32, 32))) - attention(q, k, v, causal=True))
    assert error.max() < 0.5 and (error[:, :, 1] < 1e-5).all()


WRONG = [
    (dict(skip="window"), '`skip` has "window", allowed: dense, log, window:KEYS'),
    (dict(skip=""), "`skip` is '', allowed: a Skip"),
    (dict(skip=3), "`skip` is 3, allowed: a Skip"),
    (dict(skip="dense,dense,dense"), "`classes` is 3, allowed: 1, or one for each query head"),
    (dict(skip="tile:8x64"), "`tile rows` is 8, allowed: 16 to 1024"),
    (dict(skip="tile:64x60"), "`tile keys` is 60, allowed: 16, 32, 64 or 128"),
    (dict(skip="top:2"), "`proxy share` is 2, allowed"),
    (dict(skip="lambda:1"), "`lambda` is 1, allowed"),
    (dict(skip="dense", sinks=np.zeros(2, np.float32)), "block skipping has no sink logits"),
    (dict(skip="dense", exp="sas"), "block skipping has no sink logits and exp sas"),
    (dict(skip="dense", precision="int8"), "block skipping has no quantised products"),
    (dict(skip="dense", engine="oracle"), "oracle"),
    (dict(skip="dense", out=np.zeros((1, 4, 2, 8), np.float32)), "`out` was given, allowed: only without `skip`"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[str(change) for change, _ in WRONG])
def test_refusals(change, words):
    rows = np.zeros((1, 4, 2, 8), np.float32)
    with pytest.raises(ValueError) as refused:
        attention(rows, rows, rows, causal=True, **change)
    assert words in str(refused.value)


def test_wrong_options_of_skip():
    for options, words in (
        (dict(mass=0.5, top=0.5), "allowed: one of them"),
        (dict(similarity=0.5), "only with `mass` or `top`"),
        (dict(threshold=0.1, threshold_per_key=1.0), "allowed: one"),
        (dict(tile=64), "`tile` is one int, allowed: a pair"),
        (dict(tile=(64, 1.5)), "`tile` is 1.5, allowed: an integer"),
        (dict(mass="half"), "`mass` is 'half', allowed: a number"),
    ):
        with pytest.raises(ValueError, match=words):
            Skip(**options)
    with pytest.raises(ValueError, match="`share` is 2, allowed"):
        classify_heads(np.zeros((1, 4, 1, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32), share=2)
    assert str(Skip(["dense", "log"], top=0.5, similarity=0.25)) == "dense,log,top:0.5:0.25,tile:128x64"


@needs_torch
def test_torch():
    import torch

    rng = np.random.default_rng(7)
    q, k, v = (torch.from_numpy(normal(rng, 1, 70, 2, 8)).requires_grad_() for _ in range(3))
    options = {"causal": True, "skip": "window:30:4,lambda:0.05,tile:16x16"}
    o, lse = attention(q, k, v, return_lse=True, **options)
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse)
    found = torch.autograd.grad((o * d_o).sum() + (lse * d_lse).sum(), (q, k, v))
    plain = [x.detach().numpy() for x in (q, k, v, o, lse)]
    want = attention_backward(d_o.numpy(), *plain, d_lse=d_lse.numpy(), **options)
    assert all(torch.equal(a, torch.from_numpy(b)) for a, b in zip(found, want))

    def layer(q, k, v):
        return attention(q * 2, k, v, **options) + attention(q, k, v, causal=True, skip=Skip("log", tile=(32, 16)))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(layer(q, k, v).square().sum(), (q, k, v))
    found = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, want))


@needs_torch
def test_torch_operators_are_registered_correctly():
    import torch

    from fulgurite import _torch_variants  # noqa: F401  (registers them)

    q = torch.randn(1, 40, 1, 4, requires_grad=True)
    text = "skip window:20:4,tile:16x16;causal bottom-right;"
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.fulgurite.variant_forward.default, ([q, q, q], text), test_utils=utils)


def test_jax():
    jax = pytest.importorskip("jax")
    q = jax.numpy.asarray(normal(np.random.default_rng(8), 1, 64, 2, 8))
    assert isinstance(fulgurite.attention(q, q, q, causal=True, skip="window:20:4,tile:16x16"), jax.Array)
