"""flash-attn's functions and torch's in their NumPy form: meaning, names, refusals. Gradients are tested with torch."""

import numpy as np
import pytest
from judge import close
from reference import attention as reference

import fulgurite

RNG = np.random.default_rng(3)
pytestmark = pytest.mark.usefixtures("judged")


def tensors(q_len=9, k_len=9, heads=4, kv_heads=2, batch=2, dim=8):
    shapes = (batch, q_len, heads, dim), (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, dim)
    return [RNG.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("lengths", [(9, 9), (3, 9), (9, 3)])
def test_causal_is_bottom_right_and_windows_are_inclusive(lengths):
    q, k, v = tensors(*lengths)
    close(fulgurite.flash_attn_func(q, k, v, causal=True), reference(q, k, v, causal=True)[0])
    close(fulgurite.flash_attn_func(q, k, v, window_size=(2, 1)), reference(q, k, v, window=(2, 1))[0])
    close(fulgurite.flash_attn_func(q, k, v, window_size=(2, -1)), reference(q, k, v, window=(2, None))[0])
    want = reference(q, k, v, causal=True, window=(2, 5))[0]
    close(fulgurite.flash_attn_func(q, k, v, 0.0, None, True, (2, 5)), want)


def test_scores():
    q, k, v = tensors()
    slopes = np.array([0.5, 0.25, 0.125, 1.0], np.float32)
    close(fulgurite.flash_attn_func(q, k, v, softmax_scale=0.7), reference(q, k, v, scale=0.7)[0])
    close(fulgurite.flash_attn_func(q, k, v, softcap=2.0), reference(q, k, v, softcap=2.0)[0])
    close(fulgurite.flash_attn_func(q, k, v, alibi_slopes=slopes), reference(q, k, v, alibi_slopes=slopes)[0])
    each = np.stack([slopes, slopes[::-1]])
    got = fulgurite.flash_attn_func(q, k, v, alibi_slopes=each, softcap=3.0, causal=True)
    for b in range(2):
        options = {"alibi_slopes": each[b], "softcap": 3.0, "causal": True}
        close(got[b : b + 1], reference(q[b : b + 1], k[b : b + 1], v[b : b + 1], **options)[0])
    close(fulgurite.flash_attn_func(q, k, v, learnable_sink=slopes), reference(q, k, v, sinks=slopes)[0])
    close(fulgurite.flash_attn_func(q, k, v, s_aux=slopes), reference(q, k, v, sinks=slopes)[0])


def test_results():
    q, k, v = tensors()
    out, lse, probabilities = fulgurite.flash_attn_func(q, k, v, return_attn_probs=True)
    want, want_lse = reference(q, k, v)
    close(out, want)
    close(lse, want_lse, "lse")
    assert probabilities is None
    out, lse = fulgurite.flash_attn_func(q, k, v, return_lse=True, deterministic=True, num_splits=4, pack_gqa=True)
    close(lse, want_lse, "lse")


def test_packed_arrays():
    qkv = RNG.standard_normal((2, 9, 3, 4, 8)).astype(np.float32)
    want = reference(*(qkv[:, :, at] for at in range(3)), causal=True)[0]
    close(fulgurite.flash_attn_qkvpacked_func(qkv, causal=True), want)
    q, k, v = tensors()
    close(fulgurite.flash_attn_kvpacked_func(q, np.stack([k, v], 2), causal=True), reference(q, k, v, causal=True)[0])


def test_varlen():
    q, k, v = (x[0] for x in tensors(20, 26, batch=1))
    cu_q, cu_k = np.array([0, 5, 5, 20]), np.array([0, 9, 13, 26])
    out, lse, _ = fulgurite.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 15, 13, causal=True, return_attn_probs=True)
    assert lse.shape == (4, 20)
    for b in range(3):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        want, want_lse = reference(q[None, rows], k[None, keys], v[None, keys], causal=True)
        close(out[None, rows], want)
        close(lse[None, :, rows], want_lse, "lse")
    used = fulgurite.flash_attn_varlen_func(q, k, v, cu_q, cu_k, seqused_k=np.array([4, 4, 13]))
    close(used[None, :5], reference(q[None, :5], k[None, :4], v[None, :4])[0])
    kv = np.stack([k, v], 1)
    again = fulgurite.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 15, 13, causal=True)
    assert (again == out).all()
    qkv = np.stack([q, q + 1, q + 2], 1)
    got = fulgurite.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 15)
    close(got[None, :5], reference(q[None, :5], q[None, :5] + 1, q[None, :5] + 2)[0])


def test_kvcache():
    q, k, v = tensors(2, 2)
    k_cache, v_cache = (RNG.standard_normal((2, 12, 2, 8)).astype(np.float32) for _ in range(2))
    before = k_cache.copy(), v_cache.copy()
    lengths = np.array([3, 7], np.int32)
    out = fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    for b, length in enumerate(lengths):
        for cache, old, rows in ((k_cache, before[0], k), (v_cache, before[1], v)):
            assert (cache[b, length : length + 2] == rows[b]).all()
            assert (cache[b, :length] == old[b, :length]).all() and (
                cache[b, length + 2 :] == old[b, length + 2 :]
            ).all()
        keys = slice(0, length + 2)
        want = reference(q[b : b + 1], k_cache[b : b + 1, keys], v_cache[b : b + 1, keys], causal=True)[0]
        close(out[b : b + 1], want)
    out, lse = fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=5, return_softmax_lse=True)
    want, want_lse = reference(q, k_cache[:, :5], v_cache[:, :5])
    close(out, want)
    close(lse, want_lse, "lse")
    out = fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9, cache_leftpad=np.array([0, 4]))
    close(out[1:], reference(q[1:], k_cache[1:, 4:9], v_cache[1:, 4:9])[0])
    close(fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache), reference(q, k_cache, v_cache)[0])


def test_what_is_not_there_is_named():
    q, k, v = tensors()
    for name, value in (("qv", q), ("q_descale", q), ("attention_chunk", 4)):
        with pytest.raises(NotImplementedError, match=f"`{name}` is "):
            fulgurite.flash_attn_func(q, k, v, **{name: value})
    for name in ("rotary_cos", "cache_batch_idx", "block_table", "page_table"):
        with pytest.raises(NotImplementedError, match=f"`{name}` is a tensor, allowed: None"):
            fulgurite.flash_attn_with_kvcache(q, k, v, **{name: q})
    for function in (fulgurite.flash_attn_func, fulgurite.scaled_dot_product_attention):
        with pytest.raises(ValueError, match="`dropout_p` is 0.1, allowed: 0.0"):
            function(q, k, v, dropout_p=0.1)


def refused(function, *args, **options):
    with pytest.raises(ValueError) as error:
        function(*args, **options)
    return str(error.value)


def test_refusals_use_the_names_of_the_function():
    q, k, v = tensors()
    flash, sdpa = fulgurite.flash_attn_func, fulgurite.scaled_dot_product_attention
    cache = fulgurite.flash_attn_with_kvcache
    assert refused(flash, q, k, v, softmax_scale=-1.0).startswith("`softmax_scale` is -1, allowed: finite and above 0")
    assert refused(flash, q, k, v, window_size=3).startswith("`window_size` is 3, allowed: (left, right)")
    assert refused(flash, q, k, v, window_size=(1.5, 2)).startswith("`window_size` is 1.5, allowed: an integer")
    assert refused(flash, q, k, v, causal="yes") == "`causal` is 'yes', allowed: True, False"
    assert refused(flash, q, k, v, deterministic="yes") == "`deterministic` is 'yes', allowed: True, False"
    assert "one argument" in refused(flash, q, k, v, s_aux=q, learnable_sink=q)
    assert refused(fulgurite.flash_attn_qkvpacked_func, q).startswith(
        "`qkv` has shape [2, 9, 4, 8], allowed: 3 at axis 2"
    )
    assert refused(cache, q, k, v, cache_seqlens=10).startswith("`cache_seqlens`[0] is 10, allowed: 0 to 9")
    assert "do not fit a room of 9" in refused(cache, q, k, v, k, v, cache_seqlens=1)
    assert "give both or neither" in refused(cache, q, k, v, k)
    assert "`query` is float64" in refused(sdpa, q.astype(np.float64), k, v, enable_gqa=True)
    assert "`key` has head_dim 7, allowed: 8" in refused(sdpa, q, k[..., :7], v)
    assert "allowed: the same" in refused(sdpa, q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2))
    assert "one of them" in refused(sdpa, q, q, q, np.ones((9, 9), bool), is_causal=True)
    assert "`attn_mask` has shape [9, 8], allowed: what broadcasts to" in refused(
        sdpa, q[:, None], q[:, None], q[:, None], np.ones((9, 8), bool)
    )


@pytest.mark.parametrize("lengths", [(6, 6), (3, 8), (8, 3)])
def test_sdpa_is_top_left(lengths):
    q, k, v = tensors(*lengths)
    swap = lambda x: x.swapaxes(1, 2)
    got = fulgurite.scaled_dot_product_attention(*map(swap, (q, k, v)), is_causal=True, enable_gqa=True)
    close(swap(got), reference(q, k, v, causal="top-left")[0])


def test_sdpa_shapes_and_masks():
    q, k, v = (RNG.standard_normal((2, 3, 5, 8)).astype(np.float32) for _ in range(3))
    swap = lambda x: x.swapaxes(1, 2)
    sdpa = fulgurite.scaled_dot_product_attention
    plain = swap(reference(*map(swap, (q, k, v)))[0])
    close(sdpa(q, k, v), plain)
    close(sdpa(q[0, 0], k[0, 0], v[0, 0]), plain[0, 0])
    close(sdpa(q[0], k[0], v[0]), plain[0])
    many = [np.stack([x, x * 0.5]) for x in (q, k, v)]
    got = sdpa(*many)
    close(got[0], plain)
    assert got.shape == (2, 2, 3, 5, 8)
    close(sdpa(q, k[:1], v[:1])[1], sdpa(q, np.stack([k[0]] * 2), np.stack([v[0]] * 2))[1])
    keep = RNG.random((5, 5)) > 0.3
    keep[:, 0] = True
    added = np.where(keep, 0, -np.inf).astype(np.float32)
    for shape in ((5, 5), (1, 1, 5, 5)):
        close(sdpa(q, k, v, keep.reshape(shape)), sdpa(q, k, v, added.reshape(shape)))
    close(sdpa(q[0], k[0], v[0], keep), sdpa(q[:1], k[:1], v[:1], keep)[0])
    close(sdpa(*many, np.stack([keep] * 2)[:, None, None])[1], sdpa(*(x[1] for x in many), keep))
