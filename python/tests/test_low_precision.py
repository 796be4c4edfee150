"""Low precision from Python: products in INT8 and minifloats, sageattn, and the packed key/value cache."""

import importlib.util

import numpy as np
import pytest
from judge import judged as judging
from reference import attention as reference

import fulgurite
from fulgurite import KvCache, attention, attention_backward, sageattn

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
PRECISIONS = ["int8", "int8:128", "nvfp4", "mxfp4", "mxfp8", "nvfp4/native", "native/mxfp8"]


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def cosine(a, b):
    a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
    return a @ b / np.sqrt((a @ a) * (b @ b))


def drawn(rng):
    batch, kv, group = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    q_len, k_len, dim = int(rng.integers(1, 40)), int(rng.integers(1, 90)), int(rng.integers(1, 40))
    shape = lambda n, heads: (batch, n, heads, dim)
    arrays = [normal(rng, *shape(q_len, kv * group)), normal(rng, *shape(k_len, kv)), normal(rng, *shape(k_len, kv))]
    options = {"causal": bool(rng.integers(0, 2))}
    if rng.random() < 0.3:
        options["window"] = (int(rng.integers(0, 20)), int(rng.integers(0, 5)))
    return arrays, options


def test_random_calls():
    """200 calls, each judged by the rule beside the oracle, which makes the same codes."""
    rng = np.random.default_rng(1)
    with judging():
        for number in range(200):
            (q, k, v), options = drawn(rng)
            attention(q, k, v, precision=PRECISIONS[number % len(PRECISIONS)], return_lse=True, **options)


def test_random_gradients():
    """Gradients pass the rounding unchanged, so that the oracle judges them, and differences cannot."""
    rng = np.random.default_rng(2)
    for number in range(20):
        (q, k, v), options = drawn(rng)
        options["precision"] = PRECISIONS[2:][number % 5]
        with judging():
            o, lse = attention(q, k, v, return_lse=True, **options)
            found = attention_backward(normal(rng, *o.shape), q, k, v, o, lse, **options)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.999), ("nvfp4", 0.97), ("mxfp4", 0.95), ("mxfp8", 0.998)])
def test_how_close(precision, least):
    rng = np.random.default_rng(3)
    q, k, v = (normal(rng, 1, 128, 2, 64) for _ in range(3))
    o = attention(q, k, v, precision=precision)
    assert least < cosine(o, reference(q, k, v)[0]) < 1.0
    assert (o != attention(q, k, v)).any()
    assert (attention(q, k, v, precision="native") == attention(q, k, v)).all()


def test_refusals():
    q = np.zeros((1, 4, 2, 8), np.float32)
    for options, words in (
        (dict(precision="int9"), '`precision` is "int9", allowed: native, int8'),
        (dict(precision=8), "`precision` is 8, allowed: a name"),
        (dict(precision="int8:63"), "a block of 63 keys, allowed: multiples of 64"),
        (dict(precision="int8", engine="oracle", out=3), "allowed"),
    ):
        with pytest.raises(ValueError) as refused:
            attention(q, q, q, **options)
        assert words in str(refused.value)
    broken = q.copy()
    broken[0, 1, 0, 3] = np.nan
    with pytest.raises(ValueError, match="allowed: finite numbers with precision nvfp4"):
        attention(broken, q, q, precision="nvfp4")
    o, lse = attention(q, q, q, precision="int8", return_lse=True)
    with pytest.raises(ValueError, match="int8|INT8"):
        attention_backward(o, q, q, q, o, lse, precision="int8")


def test_sageattn():
    rng = np.random.default_rng(4)
    q, k, v = (normal(rng, 2, 3, 70, 32) for _ in range(3))  # [batch, heads, sequence, dim]
    turned = [x.swapaxes(1, 2) for x in (q, k, v)]
    o, lse = sageattn(q, k, v, is_causal=True, return_lse=True)
    assert o.shape == q.shape and lse.shape == (2, 3, 70)
    want = attention(*map(np.ascontiguousarray, turned), causal=True, precision="int8")
    assert (o == want.swapaxes(1, 2)).all()
    assert (sageattn(*turned, tensor_layout="NHD", is_causal=True) == want).all()
    for options, words in (
        (dict(tensor_layout="BHND"), "`tensor_layout` is 'BHND', allowed: 'HND', 'NHD'"),
        (dict(sm_scale=-1.0), "`sm_scale` is -1, allowed"),
        (dict(k=k[:, :, :5], v=v[:, :, :5], is_causal=True), "`is_causal` is True with 70 queries and 5 keys"),
        (dict(q=q[0]), "`q` has shape \\[3, 70, 32\\], allowed: \\[batch, heads"),
    ):
        with pytest.raises(ValueError, match=words):
            sageattn(**{"q": q, "k": k, "v": v, **options})
    with pytest.raises(NotImplementedError, match="`smooth_k` is False, allowed: True"):
        sageattn(q, k, v, smooth_k=False)
    with pytest.raises(TypeError, match="qk_quant_gran"):
        sageattn(q, k, v, qk_quant_gran="per_warp")


@needs_torch
def test_torch():
    import torch

    rng = np.random.default_rng(5)
    q, k, v = (torch.from_numpy(normal(rng, 1, 40, 2, 16)).requires_grad_() for _ in range(3))

    def layer(q, k, v):
        return attention(q * 2, k, v, causal=True, precision="nvfp4") + attention(q, k, v, precision="mxfp8/native")

    want = torch.autograd.grad(layer(q, k, v).square().sum(), (q, k, v))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(q, k, v).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(found, want))
    o = sageattn(*(x.detach().transpose(1, 2).bfloat16() for x in (q, k, v)))
    assert o.dtype == torch.bfloat16
    o = attention(q, k, v, precision="int8")
    with pytest.raises(ValueError, match="int8|INT8"):
        o.sum().backward()


@pytest.mark.parametrize("storage", ["float32", "float16", "packed"])
def test_a_cache_is_attention_over_what_it_holds(storage):
    """The oracle of a cache: attention in float64 over the keys and values that it gives back."""
    rng = np.random.default_rng(6)
    for number in range(70):
        heads, group, dim, value_dim = (int(rng.integers(1, n)) for n in (3, 4, 40, 40))
        bits = {"k_bits": rng.choice([2, 4], heads).tolist(), "v_bits": int(rng.choice([2, 4]))}
        options = {"value_dim": value_dim, "storage": storage, **(bits if storage == "packed" else {})}
        cache = KvCache(heads, dim, 400, **options)
        for _ in range(int(rng.integers(1, 4))):
            tokens = int(rng.integers(1, 90))
            cache.append(normal(rng, tokens, heads, dim), normal(rng, tokens, heads, value_dim))
        if number % 3 == 0:
            cache.truncate(int(rng.integers(1, len(cache) + 1)))
        held = [[cache.token(t, h) for h in range(heads)] for t in range(len(cache))]
        k, v = (np.array([[pair[at] for pair in row] for row in held]) for at in (0, 1))
        queries = int(rng.integers(1, min(4, len(cache)) + 1))
        q = normal(rng, queries, heads * group, dim)
        o, lse = cache.attend(q, return_lse=True)
        want, want_lse = reference(q[None], k[None], v[None], causal=True)
        # Codes of queries and weights are rounded too where the storage is packed.
        bar = {"float32": 1e-5, "float16": 1e-2, "packed": 0.1}[storage]
        assert np.abs(o - want[0]).max() <= bar and np.abs(lse - want_lse[0]).max() <= bar
        assert o.dtype == np.float32


def test_fork_save_load(tmp_path):
    rng = np.random.default_rng(7)
    cache = KvCache(2, 16, 300, storage="packed", k_bits=4, v_bits=[4, 2], threads=1)
    cache.append(normal(rng, 150, 2, 16), normal(rng, 150, 2, 16))
    q = normal(rng, 1, 4, 16)
    want = cache.attend(q)
    other = cache.fork()
    other.append(normal(rng, 3, 2, 16), normal(rng, 3, 2, 16))
    assert len(other) == 153 and len(cache) == 150 and (cache.attend(q) == want).all()
    other.truncate(150)
    path = tmp_path / "prompt.safetensors"
    cache.save(path)
    loaded = KvCache.load(path)
    assert (loaded.attend(q) == want).all() and len(loaded) == 150 and loaded.capacity == 300
    assert loaded.bits_per_element < 8 < cache.size_bytes and "packed" in repr(loaded)
    data = path.read_bytes()
    for wrong in (b"", data[:4], data[:-5], b"\xff" * 64, data[:8] + b"{}" + data[10:]):
        path.write_bytes(wrong)
        with pytest.raises(ValueError):
            KvCache.load(path)


def test_bits_from_data():
    """Heads whose channels have equal ranges get two bits."""
    rng = np.random.default_rng(8)
    rows = normal(rng, 100, 3, 8)
    rows[:, 1, 0] *= 50
    assert KvCache.choose_bits(rows, 2) == [2, 4, 2]
    assert KvCache.choose_bits(rows, 0) == [4, 4, 4]
    with pytest.raises(ValueError, match="`two` is 4, allowed: 0 to 3"):
        KvCache.choose_bits(rows, 4)
    with pytest.raises(ValueError, match="`rows` has shape"):
        KvCache.choose_bits(rows[0], 1)


def test_a_cache_refuses():
    cache = KvCache(2, 8, 4)
    x = np.zeros((1, 2, 8), np.float32)
    cache.append(x, x)
    calls = (
        (lambda: cache.append(x[0], x[0]), "`k` has shape"),
        (lambda: cache.append(x, np.zeros((1, 2, 9), np.float32)), "`v` has shape"),
        (lambda: cache.append(np.repeat(x, 4, 0), np.repeat(x, 4, 0)), "4"),
        (lambda: cache.append(x.astype(np.float64), x), "`k` is float64"),
        (lambda: cache.append("x", x), "`k` is a str"),
        (lambda: cache.attend(np.zeros((1, 3, 8), np.float32)), "`q` has shape"),
        (lambda: cache.attend(x, scale=0), "`scale` is 0"),
        (lambda: cache.attend(x, scale="big"), "`scale` is 'big', allowed: a number"),
        (lambda: cache.truncate(2), "`length` is 2, allowed: 0 to 1"),
        (lambda: cache.truncate(-1), "`length` is -1, allowed"),
        (lambda: cache.token(1, 0), "`token` is 1, allowed: 0 to 0"),
        (lambda: KvCache(0, 8, 4), "`heads` is 0, allowed: 1 to"),
        (lambda: KvCache(1, 8, -4), "`capacity` is 0, allowed: 1 to"),
        (lambda: KvCache(1, 8, 4, storage="int8"), "`storage` is 'int8', allowed"),
        (lambda: KvCache(1, 8, 4, k_bits=4), "`k_bits` was given, allowed: only with storage='packed'"),
        (lambda: KvCache(1, 8, 4, storage="packed", k_bits=3), "`k_bits` is \\[3\\], allowed: 4 or 2"),
        (lambda: KvCache(2, 8, 4, storage="packed", v_bits=[4]), "v bits"),
        (lambda: KvCache(1, 8, 4, engine="cuda"), "cuda"),
        (lambda: KvCache(1, 8, 4, threads=0), "`threads` is 0"),
    )
    for call, words in calls:
        with pytest.raises(ValueError, match=words):
            call()


@needs_torch
def test_a_cache_of_torch_tensors():
    import torch

    torch.manual_seed(0)
    cache = KvCache(2, 16, 100, storage="bfloat16")
    k, v = (torch.randn(30, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    cache.append(k, v)
    o, lse = cache.attend(torch.randn(1, 4, 16, dtype=torch.bfloat16), return_lse=True)
    assert o.dtype == torch.bfloat16 and lse.dtype == torch.float32 and tuple(lse.shape) == (4, 1)


def test_jax():
    jax = pytest.importorskip("jax")
    q = jax.numpy.asarray(normal(np.random.default_rng(9), 1, 20, 2, 8))
    assert isinstance(fulgurite.attention(q, q, q, precision="mxfp8"), jax.Array)
