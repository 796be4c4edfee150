"""merge, exponential strategies, rescale policies, counters and explain."""

import importlib.util

import numpy as np
import pytest
from judge import judged as judging
from reference import attention as reference

import fulgurite
from fulgurite import attention, attention_counters, explain, merge

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


def test_notebooks_show_escaped_tables_and_tiles():
    mask = fulgurite.create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < 200), None, None, 1000, 1000)
    shown = mask._repr_html_()
    full, partial = int(mask.full_kv_num_blocks.sum()), int(mask.kv_num_blocks.sum())
    assert partial > 0 and shown.count("<rect") == full + partial and f"partial {partial / 64:.1%}" in shown
    empty = fulgurite.create_block_mask(lambda b, h, i, j: j <= i, None, None, 0, 0)
    assert "<svg" in empty._repr_html_()
    large = fulgurite.create_block_mask(lambda b, h, i, j: j <= i, None, None, 40000, 40000)
    assert shown.count("<script") == 0 and large._repr_html_().count("<rect") < 96 * 96
    q = np.zeros((1, 4, 1, 8), np.float32)
    assert "cpu" in explain(q, q, q)._repr_html_()
    found = fulgurite.doctor()
    assert found["versions"]["fulgurite"] == fulgurite.__version__ and "\ngpu  " in str(found)
    assert "<table>" in found._repr_html_() and "&lt;" in fulgurite._html.rows("<", [("a", "<b>")])


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def parts_of(rng):
    batch, kv, group = (int(rng.integers(1, 3)) for _ in range(3))
    q_len, k_len, dim = int(rng.integers(1, 20)), int(rng.integers(0, 60)), int(rng.integers(1, 20))
    q = normal(rng, batch, q_len, kv * group, dim) * np.float32(rng.choice([1, 6]))
    k, v = (normal(rng, batch, k_len, kv, dim) for _ in range(2))
    return q, k, v, int(rng.integers(0, k_len + 1))


def test_merge_random_calls():
    """Attention over two parts of the keys, merged, beside attention over all of them; either part may be empty."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        q, k, v, cut = parts_of(rng)
        a, b = (attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(cut), slice(cut, None)))
        o, lse = merge(*a, *b)
        want, want_lse = reference(q, k, v)
        assert o.dtype == np.float32 and np.abs(o - want).max(initial=0) < 2e-5
        assert (np.isneginf(lse) == np.isneginf(want_lse)).all()
        finite = np.isfinite(want_lse)
        assert np.abs(lse[finite] - want_lse[finite]).max(initial=0) < 2e-5
        swapped = merge(*b, *a)
        assert np.abs(swapped[0] - o).max(initial=0) < 1e-6


def test_merge_packed_and_refusals():
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, 20, 2, 8) for _ in range(3))
    halves = [slice(0, 8), slice(8, 20)]
    whole = np.array([0, 20])
    results = [
        attention(q, k[part], v[part], cu_seqlens=(whole, np.array([0, part.stop - part.start])), return_lse=True)
        for part in halves
    ]
    o, lse = merge(*results[0], *results[1])
    assert np.abs(o - reference(q[None], k[None], v[None])[0][0]).max() < 1e-5 and lse.shape == (2, 20)
    o, lse = results[0]
    for arguments, words in (
        ((o, lse.T, o, lse), "`lse_a` has shape \\[20, 2\\], allowed: \\[2, 20\\]"),
        ((o, lse, o[:5], lse), "`o_b` has shape"),
        ((o[0, 0], lse, o, lse), "`o_a` has shape \\[8\\], allowed"),
        ((o, lse, o.astype(np.int32), lse), "`o_b` is ndarray of int32, allowed: floats of one library"),
        ((o, lse, [1.0], lse), "`o_b` is a list, allowed: an array"),
    ):
        with pytest.raises(ValueError, match=words):
            merge(*arguments)


@needs_torch
def test_merge_has_gradients_and_compiles():
    import torch

    rng = np.random.default_rng(3)
    q, k, v = (torch.from_numpy(normal(rng, 1, 12, 2, 8)).requires_grad_() for _ in range(3))

    def halves(q, k, v):
        a = attention(q, k[:, :5], v[:, :5], return_lse=True)
        b = attention(q, k[:, 5:], v[:, 5:], return_lse=True)
        o, lse = merge(*a, *b)
        return o.sin().sum() + lse.cos().sum()

    def whole(q, k, v):
        o, lse = attention(q, k, v, return_lse=True)
        return o.sin().sum() + lse.cos().sum()

    want = torch.autograd.grad(whole(q, k, v), (q, k, v))
    compiled = torch.compile(halves, fullgraph=True, backend="aot_eager")
    for function in (halves, compiled):
        for got, wanted in zip(torch.autograd.grad(function(q, k, v), (q, k, v)), want):
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    # Rows that see no key in either part: 0 and -inf, and gradients without NaN.
    o, lse = torch.zeros(1, 2, 1, 4, requires_grad=True), torch.full((1, 1, 2), -float("inf"), requires_grad=True)
    merged, total = merge(o, lse, o, lse)
    assert (merged == 0).all() and torch.isneginf(total).all()
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(merged.sum(), (o, lse)))


@pytest.mark.parametrize("exp", ["auto", "native", "poly:3", "poly:4", "poly:5", "poly:3:0.25", "sas", "sas:-6", "sas:online"])
def test_exponential_strategies(exp):
    """Each is judged by the rule beside the oracle, which has the same strategy."""
    rng = np.random.default_rng(4)
    with judging():
        for _ in range(25):
            q, k, v, _ = parts_of(rng)
            attention(q, k, v, exp=exp, return_lse=True)


def test_rescale_policies_and_counters():
    rng = np.random.default_rng(5)
    q, k, v = normal(rng, 1, 64, 2, 32) * np.float32(3), normal(rng, 1, 2048, 2, 32), normal(rng, 1, 2048, 2, 32)
    counts = {}
    for policy in ("always", "lazy:8", "optimistic"):
        with judging():
            attention(q, k, v, rescale=policy, return_lse=True)
        counts[policy] = attention_counters(q, k, v, rescale=policy)
    assert counts["always"].rescales_done > 0 == counts["always"].blocks_redone
    assert counts["lazy:8"].rescales_done < 0.2 * counts["always"].rescales_done
    assert counts["optimistic"].rescales_done <= counts["lazy:8"].rescales_done + counts["optimistic"].blocks_redone
    assert counts["lazy:8"] == attention_counters(q, k, v, tau=8)


def test_explain():
    q = np.zeros((1, 16, 2, 8), np.float32)
    found = explain(q, q, q, causal=True)
    assert found["engine"] == fulgurite.engines()[0] and found["engine"].startswith("cpu:")
    assert set(found) == {"engine", "products", "way", "engines"} and len(found) == 4
    assert "not used" in found["engines"]["oracle"] and found["products"]
    assert str(found).startswith(found["engine"] + ": runs it")
    assert explain(q, q, q, engine="oracle")["engine"] == "oracle"
    assert "INT8" in explain(q, q, q, precision="int8")["products"]
    half = q.astype(np.float16)
    assert explain(half, half, half)["products"]
    for call, kind, words in (
        (lambda: explain(q, q, q, exp="cubic"), ValueError, "`exp` is"),
        (lambda: explain(q, q[0], q), ValueError, "`k` has shape"),
        (lambda: explain(q, q, q, casual=True), TypeError, "unexpected option 'casual', allowed"),
        (lambda: attention_counters(q, q, q, skip="dense"), TypeError, "unexpected option 'skip'"),
    ):
        with pytest.raises(kind, match=words):
            call()


def test_jax():
    jax = pytest.importorskip("jax")
    q = jax.numpy.asarray(normal(np.random.default_rng(6), 1, 20, 2, 8))
    part = attention(q, q, q, return_lse=True)
    assert all(isinstance(x, jax.Array) for x in merge(*part, *part))
