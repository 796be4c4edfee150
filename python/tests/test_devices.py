"""Every public function, with each of its arrays on another device than the others: refused by name, never read.

Tensors on torch's device "meta" have no memory, so that this runs without a GPU: an address that is read before its
device is known would end the process. On a GPU the same table says which functions compute there.
"""

import pytest

torch = pytest.importorskip("torch")

import fulgurite  # noqa: E402
from fulgurite import fla  # noqa: E402
from fulgurite.cluster import DBSCAN, HDBSCAN, KMeans  # noqa: E402
from fulgurite.decomposition import PCA, TruncatedSVD  # noqa: E402
from fulgurite.neighbors import NearestNeighbors  # noqa: E402
from fulgurite.shards import assign_and_sum  # noqa: E402

KINDS = (ValueError, TypeError, NotImplementedError)
# Sums by torch's own functions, which also compute shapes on "meta".
BY_TORCH = {"merge", "flash_attn_combine"}


def floats(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def whole(*values):
    return torch.tensor(values, dtype=torch.int32)


Q, LSE = (1, 6, 2, 8), (1, 2, 6)
ROWS = {"q": Q, "k": Q, "v": Q}
LONG = (1, 64, 2, 8)
LONG_ROWS = {"q": LONG, "k": LONG, "v": LONG}
PACKED = {"q": (6, 2, 8), "k": (6, 2, 8), "v": (6, 2, 8)}
HEADS_FIRST = {"query": (1, 2, 6, 8), "key": (1, 2, 6, 8), "value": (1, 2, 6, 8)}
OFFSETS = {"cu_seqlens_q": whole(0, 2, 6), "cu_seqlens_k": whole(0, 2, 6)}
GATES = {"g": torch.full((1, 6, 2), -0.1), "beta": (1, 6, 2)}
DELTA = {**ROWS, **GATES, "initial_state": (1, 2, 8, 8)}
CACHE = {"q": (2, 1, 2, 8), "k_cache": (2, 6, 2, 8), "v_cache": (2, 6, 2, 8), "k": (2, 1, 2, 8), "v": (2, 1, 2, 8)}


def of_attention(sinks, alibi_slopes, bias, mask, used, table, **rows):
    """All that `attention` takes, but offsets, which go with packed rows."""
    return fulgurite.attention(
        **rows, sinks=sinks, alibi_slopes=alibi_slopes, bias=bias, mask=mask, used_lengths=(None, used),
        score_mod=lambda s, b, h, i, j: s + table[j], mask_mod=lambda b, h, i, j: table[i] < 9,
    )  # fmt: skip


def cached(k, v, q):
    cache = fulgurite.KvCache(2, 8, 9)
    cache.append(k, v)
    return cache.attend(q)


def blocks(documents, **rows):
    mask = fulgurite.create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 6, 6)
    return fulgurite.flex_attention(*rows.values(), block_mask=mask) if rows else mask


AUX = {
    "sinks": (2,), "alibi_slopes": (2,), "bias": (1, 2, 6, 6), "mask": torch.ones(6, 6, dtype=torch.bool),
    "used": whole(5), "table": (6,),
}  # fmt: skip

# Name: the call, its arrays (shapes of float32, or tensors), and whether it computes tensors of a GPU in bfloat16.
CALLS = {
    "attention": (of_attention, {**ROWS, **AUX}, True),
    "attention, packed": (
        lambda cu_seqlens_q, cu_seqlens_k, **x: fulgurite.attention(**x, cu_seqlens=(cu_seqlens_q, cu_seqlens_k)),
        {**PACKED, **OFFSETS}, True,
    ),
    "attention, out": (lambda **x: fulgurite.attention(**x), {**ROWS, "out": Q}, True),
    "attention, skip": (lambda **x: fulgurite.attention(**x, skip="window:4:1"), ROWS, False),
    "attention, int8": (lambda **x: fulgurite.attention(**x, precision="int8"), ROWS, False),
    "attention_backward": (
        lambda **x: fulgurite.attention_backward(**x), {"d_o": Q, **ROWS, "o": Q, "lse": LSE, "sinks": (2,)}, True,
    ),
    "attention_counters": (lambda **x: fulgurite.attention_counters(**x), ROWS, False),
    "explain": (lambda **x: fulgurite.explain(**x), ROWS, True),
    "merge": (lambda **x: fulgurite.merge(**x), {"o_a": Q, "lse_a": LSE, "o_b": Q, "lse_b": LSE}, True),
    "flash_attn_combine": (
        lambda **x: fulgurite.flash_attn_combine(**x), {"out_partial": (2, *Q), "lse_partial": (2, 1, 6, 2)}, True,
    ),
    "flash_attn_func": (
        lambda **x: fulgurite.flash_attn_func(**x), {**ROWS, "alibi_slopes": (2,), "learnable_sink": (2,)}, True,
    ),
    "flash_attn_qkvpacked_func": (lambda **x: fulgurite.flash_attn_qkvpacked_func(**x), {"qkv": (1, 6, 3, 2, 8)}, True),
    "flash_attn_kvpacked_func": (
        lambda **x: fulgurite.flash_attn_kvpacked_func(**x), {"q": Q, "kv": (1, 6, 2, 2, 8)}, True,
    ),
    "flash_attn_varlen_func": (
        lambda **x: fulgurite.flash_attn_varlen_func(**x, max_seqlen_q=4, max_seqlen_k=4), {**PACKED, **OFFSETS}, True,
    ),
    "flash_attn_varlen_qkvpacked_func": (
        lambda qkv, cu: fulgurite.flash_attn_varlen_qkvpacked_func(qkv, cu, 4),
        {"qkv": (6, 3, 2, 8), "cu": whole(0, 2, 6)}, True,
    ),
    "flash_attn_varlen_kvpacked_func": (
        lambda q, kv, cu_seqlens_q, cu_seqlens_k: fulgurite.flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens_q, cu_seqlens_k, 4, 4
        ),
        {"q": (6, 2, 8), "kv": (6, 2, 2, 8), **OFFSETS}, True,
    ),
    "flash_attn_with_kvcache": (
        lambda **x: fulgurite.flash_attn_with_kvcache(**x), {**CACHE, "cache_seqlens": whole(3, 4)}, True,
    ),
    "flash_attn_with_kvcache, a number": (
        lambda **x: fulgurite.flash_attn_with_kvcache(**x, cache_seqlens=3), CACHE, True,
    ),
    "flash_attn_with_kvcache, rows": (
        lambda **x: fulgurite.flash_attn_with_kvcache(**x, cache_seqlens=3), {**CACHE, "cache_batch_idx": whole(1, 0)},
        True,
    ),
    "flex_attention": (lambda **x: fulgurite.flex_attention(**x), HEADS_FIRST, True),
    "create_block_mask": (blocks, {"documents": whole(0, 0, 0, 1, 1, 1)}, True),
    "create_block_mask in a call": (blocks, {"documents": whole(0, 0, 0, 1, 1, 1), **HEADS_FIRST}, True),
    "scaled_dot_product_attention": (
        lambda **x: fulgurite.scaled_dot_product_attention(**x), {**HEADS_FIRST, "attn_mask": (6, 6)}, True,
    ),
    "sageattn": (lambda **x: fulgurite.sageattn(**x), {"q": (1, 2, 6, 8), "k": (1, 2, 6, 8), "v": (1, 2, 6, 8)}, False),
    "parallax_attention": (lambda **x: fulgurite.parallax_attention(**x), {**ROWS, "r": Q}, False),
    "parallax_attention_backward": (
        lambda **x: fulgurite.parallax_attention_backward(**x), {"d_o": Q, **ROWS, "r": Q}, False,
    ),
    "lighthouse_attention": (lambda **x: fulgurite.lighthouse_attention(**x, budget=4, tile=2), LONG_ROWS, False),
    "lighthouse_attention_backward": (
        lambda **x: fulgurite.lighthouse_attention_backward(**x, budget=4, tile=2), {"d_o": LONG, **LONG_ROWS}, False,
    ),
    "skip_report": (lambda **x: fulgurite.skip_report(**x, skip="top:0.5,tile:16x16"), LONG_ROWS, False),
    "classify_heads": (lambda **x: fulgurite.classify_heads(**x, windows=(2,)), {"q": Q, "k": Q}, False),
    "KvCache": (cached, {"k": (3, 2, 8), "v": (3, 2, 8), "q": (1, 2, 8)}, False),
    "KvCache.choose_bits": (lambda rows: fulgurite.KvCache.choose_bits(rows, 1), {"rows": (5, 2, 8)}, False),
    "chunk_gated_delta_rule": (lambda **x: fla.chunk_gated_delta_rule(**x), DELTA, False),
    "fused_recurrent_gated_delta_rule": (lambda **x: fla.fused_recurrent_gated_delta_rule(**x), DELTA, False),
    "chunk_gated_delta_rule_backward": (
        lambda **x: fla.chunk_gated_delta_rule_backward(**x), {"d_o": Q, **ROWS, **GATES}, False,
    ),
    "ops.vector_add": (lambda a, b: fulgurite.ops.vector_add(a, b), {"a": (64,), "b": (64,)}, True),
    "KMeans": (lambda X: KMeans(2).fit(X), {"X": (6, 3)}, False),
    "HDBSCAN": (lambda X: HDBSCAN(min_cluster_size=2).fit(X), {"X": (6, 3)}, False),
    "DBSCAN": (lambda X: DBSCAN().fit(X), {"X": (6, 3)}, False),
    "assign_and_sum": (lambda X, centroids: assign_and_sum(X, centroids), {"X": (6, 3), "centroids": (2, 3)}, False),
    "NearestNeighbors": (
        lambda X, asked: NearestNeighbors(n_neighbors=2).fit(X).kneighbors(asked), {"X": (6, 3), "asked": (2, 3)}, False,
    ),
    "PCA": (lambda X: PCA(2).fit_transform(X), {"X": (6, 3)}, False),
    "TruncatedSVD": (lambda X: TruncatedSVD(2).fit_transform(X), {"X": (6, 3)}, False),
}  # fmt: skip

# Public names that take no arrays.
WITHOUT_ARRAYS = {
    "AuxOutput", "AuxRequest", "BlockMask", "Counters", "Explanation", "Findings", "Skip", "SkipReport", "TraceError",
    "__version__", "and_masks", "captured", "create_mask", "doctor", "engines", "fla", "get_scheduler_metadata",
    "noop_mask", "or_masks", "register_as_flash_attn", "register_with_diffusers", "register_with_transformers",
}  # fmt: skip


def arrays(given):
    return {name: x.clone() if torch.is_tensor(x) else floats(*x) for name, x in given.items()}


def test_every_public_function_is_in_the_table():
    tried = {name.split(",")[0].split(" in ")[0].split(".")[0] for name in CALLS}
    assert set(fulgurite.__all__) - tried == WITHOUT_ARRAYS, (set(fulgurite.__all__) - tried) ^ WITHOUT_ARRAYS


@pytest.mark.parametrize("name", CALLS)
def test_one_array_elsewhere_is_refused(name):
    call, given, _ = CALLS[name]
    call(**arrays(given))
    for moved in given:
        tensors = arrays(given)
        tensors[moved] = tensors[moved].to("meta")
        with pytest.raises(KINDS) as error:
            call(**tensors)
        assert "meta" in str(error.value), f"{moved}: {error.value!r}"


@pytest.mark.parametrize("name", sorted(set(CALLS) - BY_TORCH))
def test_all_arrays_elsewhere_are_refused(name):
    call, given, _ = CALLS[name]
    with pytest.raises(KINDS) as error:
        call(**{name: x.to("meta") for name, x in arrays(given).items()})
    assert "meta" in str(error.value), repr(error.value)


# In float32 whatever the type of q: factors and sums of rows, and what kernels over whole tensors take.
IN_F32 = {
    "lse", "lse_a", "lse_b", "lse_partial", "alibi_slopes", "bias", "sinks", "learnable_sink", "table", "a", "b",
}  # fmt: skip
# Numbers that a call takes from the host, too: they are checked there.
ALSO_ON_HOST = {"cache_seqlens", "cache_batch_idx"}


def on_gpu(given):
    """The arrays of a call as tensors of a GPU."""
    moved = {name: x.cuda() for name, x in arrays(given).items()}
    return {name: x.bfloat16() if x.is_floating_point() and name not in IN_F32 else x for name, x in moved.items()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_computes_what_the_table_says(name):
    call, given, computes = CALLS[name]
    tensors = on_gpu(given)
    if not computes:
        with pytest.raises(KINDS):
            call(**tensors)
        return
    call(**tensors)
    torch.cuda.synchronize()
    for moved in given:
        elsewhere = {**tensors, moved: tensors[moved].cpu()}
        if moved in ALSO_ON_HOST:
            call(**elsewhere)
        elif len(given) > 1:
            with pytest.raises(KINDS):
                call(**elsewhere)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", [name for name, (*_, computes) in CALLS.items() if computes and name != "explain"])
def test_a_gpu_records_what_it_computes(name):
    call, given, _ = CALLS[name]
    if "block_mask" in name:
        pytest.skip("lists of blocks are made on the host")
    tensors = on_gpu(given)
    call(**tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**tensors)
    graph.replay()
    torch.cuda.synchronize()
