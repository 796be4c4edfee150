"""Callables in FlexAttention's form, with NumPy alone: forward and backward, and what is refused."""

import functools

import numpy as np
import pytest
from judge import close
from reference import flex_attention, flex_gradients

import fulgurite

RNG = np.random.default_rng(7)
pytestmark = pytest.mark.usefixtures("judged")


def tensors(shape=(2, 13, 4, 8), kv_heads=2, k_len=17):
    batch, q_len, heads, dim = shape
    shapes = shape, (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, dim)
    return [RNG.standard_normal(each).astype(np.float32) for each in shapes]


TABLE = RNG.standard_normal((4, 17)).astype(np.float32)
DOCUMENTS = np.arange(17) // 5
KEEP = RNG.random((13, 17)) > 0.3
HALF = TABLE.astype(np.float16)


def shifted(score, b, h, q_idx, kv_idx, by=0.5):
    return score + by * (q_idx - kv_idx)


def add_table(score, h, kv_idx):
    return score + TABLE[h, kv_idx]


SCORES = {
    "alibi": lambda s, b, h, q, k: s - 2.0 ** (-(h + 1) * 2) * abs(q - k),
    "table": lambda s, b, h, q, k: s + TABLE[h, k],
    "constant index": lambda s, b, h, q, k: s * TABLE[-1, 3],
    "half": lambda s, b, h, q, k: s + HALF[h, k],
    "softcap": lambda s, b, h, q, k: 5 * np.tanh(s / 5),
    "where": lambda s, b, h, q, k: np.where(q >= k, s, -np.inf),
    "relative": lambda s, b, h, q, k: s + TABLE[h, np.clip(q - k + 8, 0, 16)],
    "integers": lambda s, b, h, q, k: s + ((q * 3 - k) // 4 % 3) / 2 - (q // 2 > k),
    "floats": lambda s, b, h, q, k: np.exp(-(s**2)) + np.sqrt(abs(s) + 1) - np.minimum(s, 0.5) + np.maximum(s, k),
    "rounding": lambda s, b, h, q, k: s + np.floor(q / 3) - np.ceil(k / 4) + (k / 3).astype(np.int32) + q % 2.5,
    "booleans": lambda s, b, h, q, k: s + (q > k) * 0.5 - ((q == k) ^ (k != 3)) + (~(k < q) & (b == 1)),
    "bits": lambda s, b, h, q, k: s + ((q & 6) | (k ^ 3)) * 0.1 - ((k << 2) >> 3) * 0.1 + (~q & 5) * 0.1,
    "bits of two": lambda s, b, h, q, k: s + ((q - 5) & (k - 9)) * 0.1 - (q ^ k) * 0.1 + ((q - 9) | k) * 0.1,
    "bits of negatives": lambda s, b, h, q, k: s + ((q - 9) & -4) * 0.1 + (((q - 9) & 2147483647) >> 28) * 0.1,
    "rounding to even": lambda s, b, h, q, k: s + np.rint(q / 2) - np.fmod(q - k, 3) + np.fmod(s, 0.75),
    "partial": functools.partial(shifted, by=0.25),
    "default": shifted,
    "another function": lambda s, b, h, q, k: add_table(5 * np.tanh(s / 5), h, k),
}
MASKS = {
    "causal": lambda b, h, q, k: q + 4 >= k,
    "documents": lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k],
    "booleans": lambda b, h, q, k: KEEP[q, k],
    "heads": lambda b, h, q, k: (h % 2 == 0) | (k < 9),
    "nothing": lambda b, h, q, k: k < 0,
    "everything": lambda b, h, q, k: True,
    "noop": fulgurite.noop_mask,
    "morton": lambda b, h, q, k: ((q & 1) | (q >> 1 & 2)) == ((k & 1) | (k >> 1 & 2)),
    "parity": lambda b, h, q, k: ((q ^ k) & 3) != 2,
    "and": fulgurite.and_masks(lambda b, h, q, k: q + 4 >= k, lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
    "or": fulgurite.or_masks(lambda b, h, q, k: k < 3, fulgurite.and_masks(lambda b, h, q, k: KEEP[q, k])),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name):
    q, k, v = tensors()
    got = fulgurite.attention(q, k, v, score_mod=SCORES[name], return_lse=True)
    for x, want, result in zip(got, flex_attention(q, k, v, score_mod=SCORES[name]), ("o", "lse")):
        close(x, want, result)


@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name):
    q, k, v = tensors()
    got = fulgurite.attention(q, k, v, mask_mod=MASKS[name], return_lse=True)
    for x, want, result in zip(got, flex_attention(q, k, v, mask_mod=MASKS[name]), ("o", "lse")):
        close(x, want, result)


# The modifiers that capture a table, for differences in float64.
LEARNED = {
    "table": (TABLE, lambda table: lambda s, b, h, q, k: s + table[h, k]),
    "relative": (TABLE, lambda table: lambda s, b, h, q, k: s + table[h, np.clip(q - k + 8, 0, 16)]),
    "half": (HALF, lambda table: lambda s, b, h, q, k: s + table[h, k]),
}


@pytest.mark.parametrize("name", ["alibi", "table", "relative", "softcap", "half"])
def test_backward(name):
    q, k, v = tensors((1, 4, 4, 3), 2, 5)
    options = {"score_mod": SCORES[name], "mask_mod": lambda b, h, q, k: q + 1 >= k}
    d_o = RNG.standard_normal(q.shape).astype(np.float32)
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
    got = fulgurite.attention_backward(d_o, q, k, v, o, lse, **options)
    names, captures, exact = ["d_q", "d_k", "d_v"], [], options
    if name in LEARNED:
        captures = [LEARNED[name][0].astype(np.float64)]
        exact = {**options, "score_mod": LEARNED[name][1](*captures)}
        names.append("d_HALF" if name == "half" else "d_TABLE")
    assert len(got) == len(names)
    for gradient, want, of in zip(got, flex_gradients(d_o, [q, k, v], captures, **exact), names):
        close(gradient, want, of)


def test_several_captures_and_names():
    q, k, v = tensors((1, 6, 4, 8), 4, 17)
    table, other = TABLE[:, :17].copy(), TABLE[:, :17] * 2
    bias = np.float32(0.5)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, kv_idx] - other[h, kv_idx] + bias + table[h, 0]

    o = fulgurite.attention(q, k, v, score_mod=score_mod)
    close(o, flex_attention(q, k, v, score_mod=score_mod)[0])
    in_steps = fulgurite.attention(q, k, v, score_mod=lambda s, b, h, q, k: s + table[h][k])
    close(in_steps, flex_attention(q, k, v, lambda s, b, h, q, k: s + table[h, k])[0])
    holder = {"plain": table, "wrapped": fulgurite.captured(table)}
    by_hand = fulgurite.attention(q, k, v, score_mod=lambda s, b, h, q, k: s + holder["wrapped"][h, k])
    assert (by_hand == in_steps).all()
    with pytest.raises(ValueError, match=r"fulgurite.captured\(array\)"):
        fulgurite.attention(q, k, v, score_mod=lambda s, b, h, q, k: s + holder["plain"][h, k])
    with pytest.raises(ValueError, match="`table`: axis 1 is read from 1 to 17, allowed: 0 to 16"):
        fulgurite.attention(q, k, v, score_mod=lambda s, b, h, q, k: s + table[h, k + 1])


def refused(**options):
    with pytest.raises(ValueError) as error:
        fulgurite.attention(*tensors(), **options)
    return str(error.value)


def test_refusals_name_the_operation():
    def if_(score, b, h, q_idx, kv_idx):
        return score if q_idx > kv_idx else -score

    score = lambda f: refused(score_mod=f)
    assert score(if_).startswith("`score_mod`: a traced value was used as a Python condition (`if`,")
    assert "`numpy.sin`" in score(lambda s, b, h, q, k: np.sin(s))
    assert "`.cumsum` of a traced value" in score(lambda s, b, h, q, k: s.cumsum())
    assert "`numpy.sum`" in score(lambda s, b, h, q, k: np.sum(s))
    assert "1 axes left over" in score(lambda s, b, h, q, k: s + TABLE[h])
    assert "has 3 indices, allowed: 2" in score(lambda s, b, h, q, k: s + TABLE[h, k, q])
    assert "indexed by a float, allowed: integers" in score(lambda s, b, h, q, k: s + TABLE[h, s])
    assert "a slice, None or ..." in score(lambda s, b, h, q, k: s + TABLE[h, 0:1])
    assert "`&` of a float and a int" in score(lambda s, b, h, q, k: s + (s & k))
    assert "`<<` of a int by a traced value" in score(lambda s, b, h, q, k: s + (q << k))
    assert "`>>` of a float" in score(lambda s, b, h, q, k: s + (s >> 1))
    assert "`<<` is by 31, allowed: 0 to 30" in score(lambda s, b, h, q, k: s + (q << 31))
    assert "the power 2.5" in score(lambda s, b, h, q, k: s**2.5)
    assert "Python float" in score(lambda s, b, h, q, k: float(s))
    assert "Python integer" in score(lambda s, b, h, q, k: [1, 2][k])
    assert "does not fit 32 bits" in score(lambda s, b, h, q, k: s + 2**40)
    assert "a str beside a traced value" in score(lambda s, b, h, q, k: s + "1")
    assert "too large" in score(lambda s, b, h, q, k: functools.reduce(lambda x, _: x * x, range(60), s))
    assert score(lambda s, b, h: s).startswith("`score_mod` could not be traced as (score, b, h, q_idx, kv_idx): ")
    assert score(3) == "`score_mod` is a int, allowed: a callable (score, b, h, q_idx, kv_idx)"
    assert "a NoneType beside a traced value" in score(lambda s, b, h, q, k: None)
    assert (
        refused(mask_mod=lambda b, h, q, k: q - k) == "`mask_mod` gives a int, allowed: a condition, True keeps the key"
    )


def test_deep_expressions_are_refused():
    deep = lambda s, b, h, q, k: functools.reduce(lambda x, i: x + float(i), range(3000), s)
    assert "too large" in refused(score_mod=deep) or "nested" in refused(score_mod=deep)


def test_block_masks():
    q, k, v = tensors()
    causal = lambda b, h, q, k: q + 4 >= k
    for mask_mod in (causal, MASKS["documents"], MASKS["and"], MASKS["nothing"]):
        for size in (4, (3, 8), 128):
            block_mask = fulgurite.create_block_mask(mask_mod, None, None, 13, 17, BLOCK_SIZE=size)
            o = fulgurite.attention(q, k, v, block_mask=block_mask)
            close(o, flex_attention(q, k, v, mask_mod=mask_mod)[0])
    block_mask = fulgurite.create_block_mask(causal, None, None, 13, 17, BLOCK_SIZE=4)
    assert block_mask.shape == (1, 1, 13, 17) and block_mask.kv_indices.shape == (1, 1, 4, 5)
    assert block_mask.to_dense()[0, 0].tolist() == [[j <= i + 1 for j in range(5)] for i in range(4)]
    assert block_mask.full_kv_num_blocks.ravel().tolist() == [1, 2, 3, 5]
    assert repr(block_mask).startswith("BlockMask(shape=(1, 1, 13, 17), sparsity=")
    each = fulgurite.create_block_mask(MASKS["heads"], 2, 4, 13, 17, BLOCK_SIZE=4)
    assert each.shape == (2, 4, 13, 17)
    want = flex_attention(q, k, v, mask_mod=MASKS["heads"])[0]
    close(fulgurite.attention(q, k, v, block_mask=each), want)


def test_refused_block_masks():
    causal = lambda b, h, q, k: q >= k
    with pytest.raises(ValueError, match="`H` is None and `mask_mod` reads that index"):
        fulgurite.create_block_mask(MASKS["heads"], None, None, 13, 17)
    with pytest.raises(ValueError, match="`BLOCK_SIZE` is 0, allowed"):
        fulgurite.create_block_mask(causal, None, None, 13, 17, BLOCK_SIZE=0)
    with pytest.raises(ValueError, match="`Q_LEN` is -1, allowed"):
        fulgurite.create_block_mask(causal, None, None, -1, 17)
    with pytest.raises(ValueError, match="`and_masks` was given no mask"):
        fulgurite.and_masks()
    assert "`block_mask` is a function, allowed: what `create_block_mask` gives" in refused(block_mask=causal)
    other = fulgurite.create_block_mask(causal, None, None, 300, 300)
    assert "make the block mask for these lengths" in refused(block_mask=other)


def test_dense_masks_and_bias():
    q, k, v = tensors()
    rows = RNG.random((2, 1, 13, 17)) > 0.4
    keep = lambda b, h, q, k: rows[b, 0, q, k]
    close(fulgurite.attention(q, k, v, mask=rows), flex_attention(q, k, v, mask_mod=keep)[0])
    close(fulgurite.attention(q, k, v, mask=KEEP), flex_attention(q, k, v, mask_mod=MASKS["booleans"])[0])
    bias = RNG.standard_normal((4, 1, 17)).astype(np.float32)
    add = lambda s, b, h, q, k: s + bias[h, 0, k]
    close(fulgurite.attention(q, k, v, bias=bias), flex_attention(q, k, v, score_mod=add)[0])
    assert "`mask` is float32, allowed: booleans" in refused(mask=bias)
    assert "`bias` is bool, allowed: floats" in refused(bias=KEEP)
    assert "`bias` has shape [4, 1, 5], allowed: what broadcasts to [2, 4, 13, 17]" in refused(bias=bias[..., :5])
    assert "`mask` has 5 axes" in refused(mask=rows[None])
    assert "`mask` is a list, allowed: an array" in refused(mask=[True])


def test_masks_that_engines_know():
    from fulgurite._describe import mask_entries

    assert mask_entries("le k q") == "causal top-left;"
    diagonal = "add q sub k_len q_len"
    assert mask_entries(f"and le k {diagonal} lt sub {diagonal} i5 k") == "causal bottom-right;window 4 -;"
    rest = "not eq load pad 2 b k i0"
    assert mask_entries(f"and and {rest} le k q or lt q k true") == f"mask {rest};causal top-left;mask or lt q k true;"
    assert mask_entries("true") == ""
    q, k, v = tensors((2, 13, 4, 8), 2, 13)
    q_len, k_len = fulgurite.capture.Tracer.q_len, fulgurite.capture.Tracer.k_len
    window = lambda b, h, q, k: (k <= q + (k_len - q_len)) & (k > q + (k_len - q_len) - 5)
    got = fulgurite.attention(q, k, v, mask_mod=window)
    assert (got == fulgurite.attention(q, k, v, causal=True, window=(4, None))).all()


@pytest.mark.parametrize("shape", [(1, 1, 4, 5), (4, 5), (2, 4, 1, 5), (4, 1, 1), (1,), ()])
def test_gradients_of_a_bias(shape):
    q, k, v = tensors((2, 4, 4, 3), 2, 5)
    bias = RNG.standard_normal(shape).astype(np.float32)
    sinks = np.zeros(4, np.float32)
    full = np.broadcast_to(bias, (2, 4, 4, 5))
    d_o = RNG.standard_normal(q.shape).astype(np.float32)
    o, lse = fulgurite.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    # The oracle's gradient of the whole, summed over what was repeated.
    whole = {"bias": np.ascontiguousarray(full), "sinks": sinks, "engine": fulgurite.engines()[-1]}
    *_, want = fulgurite.attention_backward(d_o, q, k, v, o, lse, **whole)
    *_, d_sinks, d_bias = fulgurite.attention_backward(d_o, q, k, v, o, lse, bias=bias, sinks=sinks)
    assert d_bias.shape == bias.shape and d_sinks.shape == (4,)
    axes = tuple(axis for axis in range(4) if ((1,) * (4 - len(shape)) + shape)[axis] == 1)
    close(d_bias, want.astype(np.float64).sum(axis=axes).reshape(shape), "d_bias")
    out = [np.empty_like(x) for x in (q, k, v, sinks)] + [np.empty_like(bias)]
    assert fulgurite.attention_backward(d_o, q, k, v, o, lse, bias=bias, sinks=sinks, out=out)[-1] is out[-1]
    assert (out[-1] == d_bias).all()


def test_dense_masks():
    """`create_mask` calls a mask on arrays of indices; block lists find the same elements by intervals."""
    for name, mask_mod in MASKS.items():
        dense = fulgurite.create_mask(mask_mod, 2, 4, 13, 17)
        assert dense.shape == (2, 4, 13, 17) and dense.dtype == bool
        at = np.meshgrid(*(np.arange(n) for n in dense.shape), indexing="ij")
        assert (dense == mask_mod(*at)).all(), name
        blocks = fulgurite.create_block_mask(mask_mod, 2, 4, 13, 17, BLOCK_SIZE=4, _compile=True)
        seen = np.zeros((2, 4, 16, 20), bool)
        seen[:, :, :13, :17] = dense
        seen = seen.reshape(2, 4, 4, 4, 5, 4).any(axis=(3, 5))
        assert (blocks.to_dense() | ~seen).all(), name
    hidden = fulgurite.create_mask(lambda s, b, h, q, k: np.where(q >= k, s, -np.inf), None, None, 3, 4)
    assert (hidden == np.tri(3, 4, dtype=bool)).all() and hidden.shape == (1, 1, 3, 4)
    with pytest.raises(ValueError, match="`mod_fn` is a int, allowed"):
        fulgurite.create_mask(3, 1, 1, 2, 2)
    with pytest.raises(ValueError, match="`H` is 0, allowed: an integer of at least 1"):
        fulgurite.create_mask(MASKS["causal"], 1, 0, 2, 2)
    with pytest.raises(ValueError, match="`mod_fn` does not take arrays of indices"):
        fulgurite.create_mask(lambda b: b, 1, 1, 2, 2)


def test_lists_of_blocks():
    q, k, v = tensors((1, 8, 4, 8), 2, 12)
    made = fulgurite.create_block_mask(lambda b, h, q, k: q + 4 >= k, None, None, 8, 12, BLOCK_SIZE=4)
    assert made.numel() == 96 and made.to("cuda") is made
    q_len, k_len, *lists, rows, cols, mask_mod = made.as_tuple()
    assert (q_len, k_len, rows, cols) == (8, 12, 4, 4) and mask_mod is made.mask_mod
    assert made.as_tuple(flatten=False)[0] == (8, 12)
    again = fulgurite.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, mask_mod=mask_mod)
    assert again.shape == made.shape
    close(fulgurite.attention(q, k, v, block_mask=again), flex_attention(q, k, v, mask_mod=mask_mod)[0])
    # Listed blocks without a mask are seen completely.
    counts, blocks = np.array([[1, 2]]), np.array([[[2, 0, 0], [0, 1, 0]]])
    listed = fulgurite.BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=(4, 4))
    keep = lambda b, h, q, k: np.where(q < 4, k >= 8, k < 8)
    close(fulgurite.attention(q, k, v, block_mask=listed), flex_attention(q, k, v, mask_mod=keep)[0])
    make = fulgurite.BlockMask.from_kv_blocks
    for args, options, message in (
        ((counts, blocks, counts), {}, "`full_kv_num_blocks` and `full_kv_indices` belong together"),
        ((counts, blocks[:, :1]), {}, r"`kv_num_blocks` has shape \[1, 1, 2\], allowed: \[1, 1, 1\]"),
        ((counts * 4, blocks), {}, "`kv_num_blocks` reaches from 4 to 8, allowed: 0 to 3"),
        ((counts, blocks - 1), {}, "`kv_indices` reaches from -1 to 1, allowed: 0 to 2"),
        ((counts, blocks), {"BLOCK_SIZE": 0}, "`BLOCK_SIZE` is 0"),
        ((counts * 1.0, blocks), {}, "`kv_num_blocks` is float64, allowed: integers"),
        ((counts, blocks[0, 0]), {}, r"`kv_indices` has shape \[3\], allowed: 4 axes"),
        ((counts, blocks), {"mask_mod": 3}, "`mask_mod` is a int, allowed: a callable"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*args, **options)


def test_flex_attention_shows_the_order_of_its_caller():
    q, k, v = (x.swapaxes(1, 2) for x in tensors(kv_heads=4))
    for call in (fulgurite.flex_attention, fulgurite.scaled_dot_product_attention):
        with pytest.raises(ValueError) as error:
            call(q, k, v[..., :16, :])
        assert "17" in str(error.value) and "[2, 17, 4, 8]" not in str(error.value)
    with pytest.raises(ValueError) as error:
        fulgurite.flex_attention(q, k, v[..., :16, :])
    assert str(error.value).startswith("`value` has shape [2, 4, 16, 8], allowed: [2, 4, 17, 8]")


def test_flex_attention_of_shared_keys():
    q, k, v = tensors(kv_heads=4)
    swap = lambda x: x.swapaxes(1, 2)
    out, aux = fulgurite.flex_attention(swap(q), swap(k)[:1], swap(v)[:1], return_aux=fulgurite.AuxRequest(lse=True))
    want, want_lse = flex_attention(q, k[[0, 0]], v[[0, 0]])
    close(swap(out), want)
    close(aux.lse, want_lse, "lse")
    assert aux.max_scores is None and isinstance(aux, fulgurite.AuxOutput)
    flex = functools.partial(fulgurite.flex_attention, swap(q), swap(k), swap(v))
    assert flex(return_aux=fulgurite.AuxRequest())[1] == (None, None)
    with pytest.raises(NotImplementedError, match="`max_scores` is True, allowed: False"):
        flex(return_aux=fulgurite.AuxRequest(max_scores=True))
    for options in ({"return_aux": 3}, {"return_aux": fulgurite.AuxRequest(lse=True), "return_lse": True}):
        with pytest.raises(ValueError, match="`return_(aux|lse)` is"):
            flex(**options)
    with pytest.raises(ValueError, match=r"`key` has shape \[3, 4, 17, 8\], allowed: \[2, 4, 17, 8\]"):
        fulgurite.flex_attention(swap(q), np.concatenate([swap(k), swap(k)])[:3], swap(v))


def test_integers_past_32_bits_are_refused_by_name():
    """torch and NumPy compute indices with 64 bits, expressions with 32."""
    q, k, v = tensors((1, 5, 1, 8), 1, 4096)
    hashed = lambda b, h, i, j: (j * 1_000_003) % 11 != 3  # noqa: E731
    with pytest.raises(ValueError, match=r"computes \(k \* 1000003\), from 0 to 4095012285, allowed: integers of 32 bits"):
        fulgurite.attention(q, k, v, mask_mod=hashed)
    with pytest.raises(ValueError, match="allowed: integers of 32 bits"):
        fulgurite.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (j * 1_000_003) % 11)
    with pytest.raises(ValueError, match="allowed: integers of 32 bits"):
        fulgurite.create_block_mask(hashed, None, None, 5, 4096)
    # Where the lengths keep the result small, it is computed.
    k, v = k[:, :2000], v[:, :2000]
    seen = np.broadcast_to((np.arange(2000, dtype=np.int64) * 1_000_003 % 11 != 3)[None, None, None, :], (1, 1, 5, 2000))
    o = fulgurite.attention(q, k, v, mask_mod=hashed)
    close(o, fulgurite.attention(q, k, v, mask=np.ascontiguousarray(seen)), "o")


def test_sums_of_captured_integers_are_looked_at():
    q, k, v = tensors((1, 5, 1, 8), 1, 6)
    for largest, fits in ((2**30 - 1, True), (2**30, False)):
        ids = np.array([1, 2, 3, 4, 5, largest], np.int32)
        call = lambda: fulgurite.attention(q, k, v, mask_mod=lambda b, h, i, j: ids[j] + ids[j] < 7)  # noqa: E731
        if fits:
            close(call(), fulgurite.attention(q, k, v, mask_mod=lambda b, h, i, j: j < 3), "o")
        else:
            with pytest.raises(ValueError, match=r"computes .*, from 2 to 2147483648, allowed: integers of 32 bits"):
                call()
    # An id that is only compared needs no room.
    ids = np.array([2**31 - 1, 1, 2**31 - 1, 1, 1, 1], np.int32)
    o = fulgurite.attention(q, k, v, mask_mod=lambda b, h, i, j: ids[i] == ids[j])
    assert np.isfinite(o).all()
