"""flash-attn's functions and torch's in their NumPy form: meaning, names, refusals. Gradients are tested with torch."""

import numpy as np
import pytest
from judge import close
from reference import attention as reference
from reference import flex_attention as flex

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
    for name, value in (("qv", q), ("q_descale", q)):
        with pytest.raises(NotImplementedError, match=f"`{name}` is "):
            fulgurite.flash_attn_func(q, k, v, **{name: value})
    for name in ("block_table", "page_table", "qv", "q_descale", "k_descale", "v_descale"):
        with pytest.raises(NotImplementedError, match=f"`{name}` is a tensor, allowed: None"):
            fulgurite.flash_attn_with_kvcache(q, k, v, **{name: q})
    for name in ("gather_kv_indices", "score_mod_bwd", "aux_scalars", "block_sparse_tensors"):
        for function in (fulgurite.flash_attn_func, fulgurite.flash_attn_varlen_func):
            with pytest.raises(NotImplementedError, match=f"`{name}` is a tensor, allowed: None"):
                function(q, k, v, **{name: q})
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


def test_windows_and_causal_of_other_types():
    q, k, v = tensors()
    want = reference(q, k, v, window=(2, 1))[0]
    given = [[2, 1], np.array([2, 1]), (np.int64(2), np.int32(1)), np.array([2, 1], np.uint8)]
    try:
        import torch

        given += [torch.tensor([2, 1]), (torch.tensor(2), 1)]
    except ImportError:
        pass
    for window in given:
        close(fulgurite.flash_attn_func(q, k, v, window_size=window), want)
    for window in (None, [-1, -1], np.array([-1, -1]), (None, None), (np.int64(-1), -1)):
        close(fulgurite.flash_attn_func(q, k, v, window_size=window), reference(q, k, v)[0])
    for causal, alike in ((None, False), (np.True_, True), (np.False_, False)):
        close(fulgurite.flash_attn_func(q, k, v, causal=causal), reference(q, k, v, causal=alike)[0])
    flash = fulgurite.flash_attn_func
    for window in (
        np.array([1, 2, 3]),
        np.array(3),
        [1],
        "12",
        np.array([1.5, 2.0]),
        (True, 1),
        ("1", "2"),
        (None, -1),
    ):
        assert refused(flash, q, k, v, window_size=window).startswith("`window_size` is ")
    for causal in (1, 0, "bottom-right", np.array([True]), np.int64(1), 0.0):
        assert refused(flash, q, k, v, causal=causal) == f"`causal` is {causal!r}, allowed: True, False"


# The keywords of FlashAttention-3 and 4 that are not in flash-attn 2, with values that change nothing.
NEWER = {
    "flash_attn_func": {
        "qv": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0, "num_splits": 3,
        "pack_gqa": True, "sm_margin": 8, "gather_kv_indices": None, "learnable_sink": None, "score_mod": None,
        "score_mod_bwd": None, "mask_mod": None, "aux_tensors": None, "aux_scalars": None, "block_sparse_tensors": None,
        "block_sparse_tensors_bwd": None, "return_lse": False, "out": None,
    },
    "flash_attn_varlen_func": {
        "qv": None, "min_seqlen_k": 3, "gather_kv_indices": None, "page_table": None, "learnable_sink": None,
        "num_splits": 3, "pack_gqa": False, "score_mod": None, "score_mod_bwd": None, "mask_mod": None,
        "block_sparse_tensors": None, "aux_tensors": None, "aux_scalars": None, "return_lse": False,
        "scheduler_metadata": object(), "seqlen_k_per_split": 64, "disable_scheduler_metadata": True,
        "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0, "sm_margin": 8, "fa_version": 3,
        "seqused_q": None, "seqused_k": None, "out": None,
    },
    "flash_attn_with_kvcache": {
        "qv": None, "page_table": None, "cu_seqlens_q": None, "cu_seqlens_k_new": None, "max_seqlen_q": 9,
        "rotary_seqlens": None, "q_descale": None, "k_descale": None, "v_descale": None, "attention_chunk": 0,
        "scheduler_metadata": object(), "num_splits": 3, "pack_gqa": True, "sm_margin": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NEWER)
def test_newer_keywords_that_change_nothing(name):
    q, k, v = tensors()
    function = getattr(fulgurite, name)
    assert (function(q, k, v, causal=True, **NEWER[name]) == fulgurite.flash_attn_func(q, k, v, causal=True)).all()
    with pytest.raises(TypeError, match="casual"):
        function(q, k, v, casual=True)


def test_schedules_are_made_inside():
    make = fulgurite.get_scheduler_metadata
    assert make(2, 1, 64, 4, 2, 16, np.array([3, 4]), causal=True, window_size=(3, 0), page_size=None) is None
    assert make(max_seqlen_q=4, max_seqlen_k=4, nheads=2, nheads_kv=2, headdim=8, num_splits=1) is None
    with pytest.raises(TypeError, match="casual"):
        make(2, casual=True)


def test_padded_batches_with_used_lengths():
    q, k, v = tensors(6, 9)
    used_q, used_k = np.array([6, 2]), np.array([4, 9])
    options = {"causal": True, "return_lse": True}
    out, lse = fulgurite.flash_attn_varlen_func(q, k, v, seqused_q=used_q, seqused_k=used_k, **options)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    cu_q, cu_k = np.array([0, 6, 12]), np.array([0, 9, 18])
    mixed = {"seqused_q": used_q, "seqused_k": used_k, **options}
    only_k, only_k_lse = fulgurite.flash_attn_varlen_func(flat(q), k, v, cu_q, **mixed)
    only_q, only_q_lse = fulgurite.flash_attn_varlen_func(q, flat(k), flat(v), None, cu_k, **mixed)
    assert only_q.shape == q.shape and only_q_lse.shape == (2, 4, 6) and only_k_lse.shape == (4, 12)
    for b in range(2):
        rows, keys = slice(0, used_q[b]), slice(0, used_k[b])
        want, want_lse = reference(q[b : b + 1, rows], k[b : b + 1, keys], v[b : b + 1, keys], causal=True)
        for got in (out[b, rows], only_q[b, rows], only_k.reshape(out.shape)[b, rows]):
            close(got[None], want)
        for got in (lse[b, :, rows], only_q_lse[b, :, rows], only_k_lse.reshape(4, 2, 6)[:, b, rows]):
            close(got[None], want_lse, "lse")
    varlen = fulgurite.flash_attn_varlen_func
    assert refused(varlen, q[0], k[0], v[0]).startswith("`cu_seqlens_q` is None, allowed for `q` of shape [6, 4, 8]: ")
    assert refused(varlen, q, k[0], v[0]).startswith("`cu_seqlens_k` is None, allowed for `k` of shape [9, 2, 8]: ")
    assert "seqused_k" in refused(varlen, q, k, v, seqused_k=np.array([4, 10]))
    with pytest.raises(NotImplementedError, match="`out` is a tensor"):
        varlen(q, flat(k), flat(v), None, cu_k, out=np.empty_like(q))


def test_out_is_written():
    q, k, v = tensors()
    out = np.empty_like(q)
    assert fulgurite.flash_attn_func(q, k, v, causal=True, out=out) is out
    close(out, reference(q, k, v, causal=True)[0])
    assert refused(fulgurite.flash_attn_func, q, k, v, out=out[:1]).startswith("`out` ")


def test_callables_of_flash_attention_4():
    q, k, v = tensors(5, 9)
    table, seen = RNG.standard_normal(9).astype(np.float32), np.array([True, False] * 4 + [True])
    flash = fulgurite.flash_attn_func
    want = fulgurite.attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s + table[j], mask_mod=lambda b, h, i, j: seen[j]
    )

    def score_mod(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return score + aux_tensors[0][kv_idx]

    def mask_mod(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):
        return aux_tensors[1][kv_idx]

    assert (flash(q, k, v, score_mod=score_mod, mask_mod=mask_mod, aux_tensors=[table, seen]) == want).all()
    bottom_right = lambda b, h, i, j, info, aux: j <= i + info.seqlen_k - info.seqlen_q
    assert (flash(q, k, v, mask_mod=bottom_right) == flash(q, k, v, causal=True)).all()
    plain = lambda b, h, i, j: j <= i
    close(flash(q, k, v, mask_mod=plain), reference(q, k, v, causal="top-left")[0])
    assert "put `causal` into `mask_mod`" in refused(flash, q, k, v, causal=True, mask_mod=plain)
    assert refused(flash, q, k, v, mask_mod=3).startswith("`mask_mod` is a int, allowed: a callable")
    assert "has no argument for it" in refused(flash, q, k, v, mask_mod=plain, aux_tensors=[table])
    assert "was given without `score_mod`" in refused(flash, q, k, v, aux_tensors=[table])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_combine(library):
    q, k, v = tensors(5, 12)
    parts = [slice(0, 3), slice(3, 3), slice(3, 12)]
    results = [fulgurite.attention(q, k[:, part], v[:, part], return_lse=True) for part in parts]
    outs, lses = np.stack([out for out, _ in results]), np.stack([lse.swapaxes(1, 2) for _, lse in results])
    outs[1] = np.nan  # saw no key: may hold anything
    lses[:, 1, 0], outs[:, 1, 0] = -np.inf, np.nan  # a row that no part saw
    want, want_lse = reference(q, k, v)
    want[1, 0], want_lse[1, :, 0] = 0, -np.inf
    convert = (lambda x: x) if library == "numpy" else pytest.importorskip("torch").from_numpy
    outs, lses = convert(outs), convert(lses)
    fulgurite.attention(q, k, v, return_lse=True)  # for its tolerance
    combine = fulgurite.flash_attn_combine
    out, lse = combine(outs, lses)
    close(out, want)
    close(lse, want_lse.swapaxes(1, 2), "lse")
    out, lse = combine(outs[:, 0], lses[:, 0])
    close(out, want[0])
    close(lse, want_lse[0].T, "lse")
    kept = outs[0] * 0
    again, nothing = combine(outs, lses, kept, return_lse=False)
    assert again is kept and nothing is None
    close(kept, want)
    half = convert(np.zeros(1, np.float16)).dtype
    assert combine(outs, lses, out_dtype=half)[0].dtype == half
    assert refused(combine, outs[0, 0], lses).startswith("`out_partial` has shape [5, 4, 8], allowed: [parts, batch")
    assert refused(combine, outs, lses[:, :, :4]).startswith(
        "`lse_partial` has shape [3, 2, 4, 4], allowed: [3, 2, 5, 4]"
    )
    assert refused(combine, outs, lses, kept[:1]).startswith("`out` has shape [1, 5, 4, 8], allowed: [2, 5, 4, 8]")
    assert refused(combine, outs, lses, kept, half).endswith("allowed: one type")
    with pytest.raises(NotImplementedError, match="`virtual_batch_idx`"):
        combine(outs, lses, virtual_batch_idx=np.array([1, 0]))


def in_chunks(q, k, v, size, first=0, causal=False):
    """The reference of one sequence with `attention_chunk`; keys before `first` are hidden."""
    rows, keys = np.arange(q.shape[1]) + k.shape[1] - q.shape[1] - first, np.arange(k.shape[1]) - first
    keep = (rows[:, None] // size == keys // size) & (keys >= 0) & ((keys <= rows[:, None]) | (not causal))
    return flex(q, k, v, mask_mod=lambda b, h, i, j: keep[i, j])


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("lengths", [(9, 9), (4, 9), (9, 4)])
def test_attention_chunk(size, lengths):
    q, k, v = tensors(*lengths)
    out, lse = fulgurite.flash_attn_func(q, k, v, attention_chunk=size, return_lse=True)
    want, want_lse = in_chunks(q, k, v, size)
    close(out, want)
    close(lse, want_lse, "lse")
    close(fulgurite.flash_attn_func(q, k, v, attention_chunk=size, causal=True), in_chunks(q, k, v, size, 0, True)[0])
    odd = lambda b, h, i, j: j % 2 == 1
    if lengths[0] <= lengths[1]:  # a query before the first key is in the chunk before
        both = fulgurite.flash_attn_func(q, k, v, attention_chunk=100, mask_mod=odd)
        assert (both == fulgurite.flash_attn_func(q, k, v, mask_mod=odd)).all()
    used = np.array([4, 3])
    out = fulgurite.flash_attn_varlen_func(q, k, v, seqused_k=used, attention_chunk=size)
    for b, n in enumerate(used):
        close(out[b : b + 1], in_chunks(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], size)[0])
    pads = np.array([0, 2])
    out = fulgurite.flash_attn_with_kvcache(q, k, v, cache_leftpad=pads, attention_chunk=size)
    for b, n in enumerate(pads):
        close(out[b : b + 1], in_chunks(q[b : b + 1], k[b : b + 1], v[b : b + 1], size, n)[0])
    for wrong in (-1, 2.5, True, "3", None):
        assert refused(fulgurite.flash_attn_func, q, k, v, attention_chunk=wrong, out=np.empty_like(q)).startswith(
            f"`attention_chunk` is {wrong!r}, allowed: an integer, 0 for no chunks"
        )
