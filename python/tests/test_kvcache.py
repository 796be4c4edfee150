"""`flash_attn_with_kvcache` with indices, rotary embedding and packed queries, on NumPy arrays and torch tensors."""

import numpy as np
import pytest
from judge import close
from reference import attention as reference

import fulgurite

RNG = np.random.default_rng(5)
pytestmark = pytest.mark.usefixtures("judged")
LIBRARIES = ["numpy", "torch"]


def of(library, *arrays):
    """The arrays in a library; torch shares their memory."""
    if library == "numpy":
        return arrays
    torch = pytest.importorskip("torch")
    return tuple(torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arrays)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def tables(positions, rotary_dim):
    angles = np.arange(positions)[:, None] / 50.0 ** (np.arange(rotary_dim // 2) / rotary_dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def turned(x, positions, cos, sin, interleaved):
    """x `[rows, heads, dim]`, each pair of elements turned by its angle, in float32."""
    half = cos.shape[1]
    result = x.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[positions, i][:, None], sin[positions, i][:, None]
        result[..., a], result[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return result


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("indices", [[4, 0, 2], [1, 2, 3], [0, 2, 4]])
@pytest.mark.parametrize("append", [False, True])
def test_batch_indices(library, indices, append):
    q, k, v = normal(3, 2, 4, 8), normal(3, 2, 2, 8), normal(3, 2, 2, 8)
    k_cache, v_cache = normal(5, 12, 2, 8), normal(5, 12, 2, 8)
    before = k_cache.copy(), v_cache.copy()
    lengths, at = np.array([3, 10, 7], np.int32), np.array(indices, np.int32)
    new = (k, v) if append else (None, None)
    out = fulgurite.flash_attn_with_kvcache(
        *of(library, q, k_cache, v_cache, *new), cache_seqlens=of(library, lengths)[0],
        cache_batch_idx=of(library, at)[0], causal=True,
    )  # fmt: skip
    for b, (row, length) in enumerate(zip(indices, lengths)):
        end = length + 2 * append
        keys, values = before[0][row, :end].copy(), before[1][row, :end].copy()
        if append:
            keys[length:], values[length:] = k[b], v[b]
        close(np.asarray(out)[b : b + 1], reference(q[b : b + 1], keys[None], values[None], causal=True)[0])
        assert (k_cache[row, :end] == keys).all() and (v_cache[row, :end] == values).all()
        assert (k_cache[row, end:] == before[0][row, end:]).all()
    for row in {0, 1, 2, 3, 4}.difference(indices):
        assert (k_cache[row] == before[0][row]).all() and (v_cache[row] == before[1][row]).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 16])
@pytest.mark.parametrize("mode", ["full", "causal", "window"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_rotary(library, interleaved, rotary_dim, mode, elsewhere):
    q, k, v = normal(2, 3, 4, 16), normal(2, 3, 2, 16), normal(2, 3, 2, 16)
    k_cache, v_cache = normal(2, 12, 2, 16), normal(2, 12, 2, 16)
    old = k_cache.copy()
    cos, sin = tables(40, rotary_dim)
    lengths = np.array([4, 9], np.int32)
    starts = np.array([20, 1], np.int32) if elsewhere else lengths
    options = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (3, -1)}}[mode]
    given = q.copy(), k.copy()
    out = fulgurite.flash_attn_with_kvcache(
        *of(library, q, k_cache, v_cache, k, v, cos, sin), cache_seqlens=of(library, lengths)[0],
        rotary_interleaved=interleaved, rotary_seqlens=of(library, starts)[0] if elsewhere else None, **options,
    )  # fmt: skip
    assert (q == given[0]).all() and (k == given[1]).all(), "an argument was changed"
    own = {"full": {}, "causal": {"causal": True}, "window": {"window": (3, None)}}[mode]
    for b, (length, start) in enumerate(zip(lengths, starts)):
        places = start + np.arange(3)
        rows = turned(q[b], places if options else np.full(3, start), cos, sin, interleaved)
        keys = np.concatenate([old[b, :length], turned(k[b], places, cos, sin, interleaved)])
        assert (k_cache[b, : length + 3] == keys).all()
        assert (v_cache[b, length : length + 3] == v[b]).all()
        want = reference(rows[None], keys[None], v_cache[b : b + 1, : length + 3], **own)[0]
        close(out[b : b + 1], want)


def test_rotary_rounds_once():
    torch = pytest.importorskip("torch")
    q, k, v, k_cache, v_cache = (torch.from_numpy(normal(1, 2, 2, 16)).bfloat16() for _ in range(5))
    k_cache, v_cache = (torch.cat([x, x], 1) for x in (k_cache, v_cache))
    cos, sin = (torch.from_numpy(x).bfloat16() for x in tables(8, 16))
    fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=1)
    want = turned(k[0].float().numpy(), np.arange(1, 3), cos.float().numpy(), sin.float().numpy(), True)
    assert (k_cache[0, 1:3] == torch.from_numpy(want).bfloat16()).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("indices", [None, [2, 0]])
def test_packed_queries_and_keys(library, leftpad, indices):
    """Packed rows are the same as a call for each sequence."""
    q, k, v = normal(5, 4, 16), normal(4, 2, 16), normal(4, 2, 16)
    cu_q, cu_k = np.array([0, 4, 5], np.int32), np.array([0, 1, 4], np.int32)
    caches = [normal(3 if indices else 2, 12, 2, 16) for _ in range(2)]
    apart = [x.copy() for x in caches]
    cos, sin = tables(16, 16)
    lengths, pads = np.array([6, 3], np.int32), np.array([2, 1], np.int32)
    more = {"cache_leftpad": of(library, pads)[0]} if leftpad else {}
    if indices:
        more["cache_batch_idx"] = of(library, np.array(indices, np.int32))[0]
    out, lse = fulgurite.flash_attn_with_kvcache(
        *of(library, q, *caches, k, v, cos, sin), cache_seqlens=of(library, lengths)[0], causal=True,
        cu_seqlens_q=of(library, cu_q)[0], cu_seqlens_k_new=of(library, cu_k)[0], max_seqlen_q=4,
        return_softmax_lse=True, **more,
    )  # fmt: skip
    assert tuple(lse.shape) == (4, 5)
    for b in range(2):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        row = indices[b] if indices else b
        pad = {"cache_leftpad": int(pads[b])} if leftpad else {}
        want, want_lse = fulgurite.flash_attn_with_kvcache(
            q[None, rows], apart[0][row : row + 1], apart[1][row : row + 1], k[None, keys], v[None, keys], cos, sin,
            cache_seqlens=int(lengths[b]), causal=True, return_softmax_lse=True, **pad,
        )  # fmt: skip
        close(np.asarray(out)[None, rows], want)
        close(np.asarray(lse)[None, :, rows], want_lse, "lse")
    for got, want in zip(caches, apart):
        assert (got == want).all()


def cache_call(**changed):
    """A call that is right but for what was changed; returns its message and whether the caches stayed."""
    given = {
        "q": normal(2, 2, 4, 16), "k_cache": normal(3, 8, 2, 16), "v_cache": normal(3, 8, 2, 16),
        "k": normal(2, 2, 2, 16), "v": normal(2, 2, 2, 16), "cache_seqlens": np.array([1, 6], np.int32),
        "cache_batch_idx": np.array([2, 0], np.int32), "rotary_cos": tables(8, 8)[0], "rotary_sin": tables(8, 8)[1],
    }  # fmt: skip
    given.update(changed)
    before = given["k_cache"].copy(), given["v_cache"].copy()
    with pytest.raises(ValueError) as error:
        fulgurite.flash_attn_with_kvcache(**given)
    assert (given["k_cache"] == before[0]).all() and (given["v_cache"] == before[1]).all(), "a cache was written"
    return str(error.value)


def test_refusals_come_before_any_write():
    for changed, message in (
        ({"cache_batch_idx": np.array([3, 0])}, "`cache_batch_idx`[0] is 3, allowed: 0 to 2"),
        ({"cache_batch_idx": np.array([-1, 0])}, "`cache_batch_idx`[0] is -1, allowed: 0 to 2"),
        ({"cache_batch_idx": np.array([0, 0])}, "`cache_batch_idx` is [0, 0], allowed with `k` and `v`: each"),
        ({"cache_batch_idx": np.array([0.0, 1.0])}, "`cache_batch_idx` is array([0., 1.]), allowed: an integer, or 2"),
        ({"cache_batch_idx": np.array([True, False])}, "`cache_batch_idx` is array([ True, False]), allowed"),
        ({"cache_batch_idx": None}, "`k_cache` has shape [3, 8, 2, 16], allowed: [2, room, heads, head_dim]"),
        ({"v_cache": normal(3, 7, 2, 16)}, "`v_cache` has shape [3, 7, 2, 16], allowed: [3, 8, heads, head_dim]"),
        ({"cache_seqlens": np.array([1, 7])}, "`cache_seqlens`[1] is 7, 2 new keys do not fit a room of 8"),
        ({"rotary_sin": None}, "`rotary_cos` and `rotary_sin` belong together"),
        ({"rotary_cos": None}, "`rotary_cos` and `rotary_sin` belong together"),
        ({"rotary_cos": tables(8, 18)[0]}, "`rotary_cos` has shape [8, 9], allowed: [positions, at most 8]"),
        ({"rotary_sin": tables(9, 8)[1]}, "`rotary_sin` has shape [9, 4], allowed: [8, 4], as `rotary_cos`"),
        ({"rotary_seqlens": np.array([7, 0])}, "`rotary_cos` has 8 positions, allowed: at least 9; the highest"),
        ({"rotary_cos": np.ones((8, 4), int)}, "`rotary_cos` is ndarray of int64, allowed: floats, as `q`"),
        ({"rotary_interleaved": 2}, "`rotary_interleaved` is 2, allowed: True, False"),
        ({"k": None, "v": None}, "`rotary_cos` was given without `k` and `v`"),
        ({"v": None}, "`k` and `v` belong together"),
        ({"v": normal(2, 3, 2, 16)}, "`v` has shape [2, 3, 2, 16], allowed: [2, 2, 2, 16]"),
        ({"k": normal(2, 2, 2, 16).astype(np.float16)}, "`k` is float16, allowed: float32, as its cache is"),
        ({"cache_seqlens": None}, "`cache_seqlens` is None, allowed with `k` and `v`"),
        ({"softmax_scale": -1.0}, "`softmax_scale` is -1, allowed: finite and above 0"),
        ({"window_size": (1.5, 0)}, "`window_size` is 1.5, allowed: an integer"),
        ({"causal": "yes"}, "`causal` is 'yes', allowed: True, False"),
        ({"cu_seqlens_k_new": np.array([0, 2])}, "`cu_seqlens_k_new` has 2 offsets, allowed: 3"),
        ({"cu_seqlens_q": np.array([0, 2])}, "`q` has shape [2, 2, 4, 16], allowed: [total, heads, head_dim]"),
        ({"q": normal(4, 4, 16), "cu_seqlens_q": np.array([0, 5, 4])}, "`cu_seqlens_q` is [0, 5, 4], allowed: rising"),
        ({"q": normal(2, 2, 3, 16)}, "`heads`: 3 query heads over 2 key/value heads"),
    ):  # fmt: skip
        assert cache_call(**changed).startswith(message), (changed, message)
    locked = normal(3, 8, 2, 16)
    locked.flags.writeable = False
    assert cache_call(v_cache=locked) == "`v_cache` is read-only, allowed: an array that can be written"


def test_packed_new_keys_without_new_keys():
    message = cache_call(k=None, v=None, rotary_cos=None, rotary_sin=None, cu_seqlens_k_new=np.array([0, 1, 2]))
    assert message.startswith("`cu_seqlens_k_new` was given without `k` and `v`")


def test_indices_may_repeat_where_nothing_is_written():
    q, k, v = normal(3, 1, 2, 8), normal(2, 6, 2, 8), normal(2, 6, 2, 8)
    out = fulgurite.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, cache_batch_idx=np.array([1, 1, 0]))
    for b, row in enumerate([1, 1, 0]):
        close(out[b : b + 1], reference(q[b : b + 1], k[row : row + 1, :4], v[row : row + 1, :4])[0])


@pytest.mark.parametrize("packed", [False, True])
def test_the_way_of_a_gpu_reads_no_number_back(packed, monkeypatch):
    """What a GPU does differently, on CPU tensors: the same results and caches, without `tolist`."""
    torch = pytest.importorskip("torch")
    from fulgurite import _cache, flash

    lead = (4,) if packed else (2, 2)
    given = {
        "q": normal(*lead, 4, 16), "k_cache": normal(3, 12, 2, 16), "v_cache": normal(3, 12, 2, 16),
        "k": normal(*lead, 2, 16), "v": normal(*lead, 2, 16), "cache_seqlens": np.array([3, 7], np.int32),
        "cache_batch_idx": np.array([2, 0], np.int32), "cache_leftpad": np.array([1, 2], np.int32),
    }  # fmt: skip
    given["rotary_cos"], given["rotary_sin"] = tables(12, 16)
    if packed:
        given["cu_seqlens_q"] = given["cu_seqlens_k_new"] = np.array([0, 1, 4], np.int32)
    here, there = ({name: torch.from_numpy(x.copy()) for name, x in given.items()} for _ in range(2))
    want = fulgurite.flash_attn_with_kvcache(**here, causal=True)
    monkeypatch.setattr(_cache, "on_gpu", lambda x: isinstance(x, torch.Tensor))
    monkeypatch.setattr(flash, "_accepted", set())

    def read_back(self):
        raise AssertionError("a number was read back")

    monkeypatch.setattr(torch.Tensor, "tolist", read_back)
    got = fulgurite.flash_attn_with_kvcache(**there, causal=True)
    assert len(flash._accepted) == 1
    refused = {name: x.clone() for name, x in there.items()}
    with pytest.raises(ValueError, match="`softmax_scale` is -1"):
        fulgurite.flash_attn_with_kvcache(**refused, causal=True, softmax_scale=-1.0)
    assert torch.equal(refused["k_cache"], there["k_cache"]) and torch.equal(refused["v_cache"], there["v_cache"])
    # Out of range is clamped: no write leaves the cache.
    there["cache_batch_idx"] += 100
    fulgurite.flash_attn_with_kvcache(**there, causal=True)
    monkeypatch.undo()
    close(got, want)
    assert torch.equal(refused["k_cache"], here["k_cache"]) and torch.equal(refused["v_cache"], here["v_cache"])
