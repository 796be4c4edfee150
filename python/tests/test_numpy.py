"""The package with NumPy alone, against float64."""

import numpy as np
import pytest
from judge import close
from reference import attention as reference
from reference import gradients as reference_gradients

import fulgurite

pytestmark = pytest.mark.usefixtures("judged")


def tensors(shape_q, kv_heads=None, k_len=None, value_dim=None, dtype=np.float32, seed=0):
    batch, q_len, heads, dim = shape_q
    kv_heads, k_len, value_dim = kv_heads or heads, q_len if k_len is None else k_len, value_dim or dim
    rng = np.random.default_rng(seed)
    shapes = shape_q, (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, value_dim)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(q, k, v, **options):
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
    want_o, want_lse = reference(q, k, v, **options)
    assert o.dtype == q.dtype and lse.dtype == np.float32
    close(o, want_o)
    close(lse, want_lse, "lse")


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 7, 3, 5), (1, 130, 2, 64), (2, 65, 4, 33), (1, 33, 1, 128)])
def test_shapes(shape, dtype):
    check(*tensors(shape, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True),
        dict(causal="top-left"),
        dict(window=(5, 3)),
        dict(window=(None, -2)),
        dict(causal=True, window=(10, None)),
        dict(scale=0.3),
        dict(softcap=2.0),
        dict(softcap=5.0, causal=True, scale=1.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [(40, 40), (17, 70), (70, 17)])
def test_options(lengths, options):
    q_len, k_len = lengths
    check(*tensors((2, q_len, 4, 32), kv_heads=2, k_len=k_len, value_dim=24), **options)


def test_sinks_and_slopes():
    q, k, v = tensors((2, 50, 4, 16), kv_heads=1)
    per_head = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    check(q, k, v, sinks=per_head)
    check(q, k, v, alibi_slopes=np.abs(per_head), causal=True)


HOW = [dict(threads=1), dict(threads=3), dict(rescale="always"), dict(tau=8), dict(exp="poly:5")]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_how(how):
    q, k, v = tensors((2, 90, 2, 40))
    close(fulgurite.attention(q, k, v, **how), reference(q, k, v)[0])


def test_every_engine():
    q, k, v = tensors((1, 90, 2, 40))
    want = reference(q, k, v, causal=True)[0]
    for engine in fulgurite.engines():
        close(fulgurite.attention(q, k, v, causal=True, engine=engine), want)


def test_strides_are_read_in_place():
    q, k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in tensors((2, 20, 4, 16)))
    check(q, k, v)
    check(q[:, ::2], k, v)
    check(q, np.broadcast_to(k[:, :, :1], k.shape), v)


def test_out():
    q, k, v = tensors((1, 20, 2, 16))
    out = np.full((1, 20, 4, 16), 7, np.float32)[:, :, :2]
    assert fulgurite.attention(q, k, v, out=out) is out
    close(out, reference(q, k, v)[0])


def test_packed():
    lengths_q, lengths_k = [5, 0, 33], [9, 4, 33]
    q, _, _ = tensors((1, sum(lengths_q), 4, 16))
    k, v, _ = tensors((1, sum(lengths_k), 2, 16), seed=1)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths_q, lengths_k))
    o, lse = fulgurite.attention(q[0], k[0], v[0], causal=True, cu_seqlens=(cu_q, cu_k), return_lse=True)
    assert lse.shape == (4, sum(lengths_q))
    for b in range(3):
        a, c = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        want_o, want_lse = reference(q[:, a], k[:, c], v[:, c], causal=True)
        close(o[None, a], want_o)
        close(lse[None, :, a], want_lse, "lse")


def test_used_lengths():
    q, k, v = tensors((2, 6, 2, 16), k_len=30)
    o = fulgurite.attention(q, k, v, used_lengths=(None, [30, 11]))
    close(o[:1], reference(q[:1], k[:1], v[:1])[0])
    close(o[1:], reference(q[1:], k[1:, :11], v[1:, :11])[0])


def test_nothing_to_see():
    q, k, v = tensors((1, 4, 2, 8))
    o, lse = fulgurite.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (o == 0).all() and np.isneginf(lse).all()
    assert fulgurite.attention(q[:, :0], k, v).shape == (1, 0, 2, 8)
    assert fulgurite.attention(q[:0], k[:0], v[:0]).shape == (0, 4, 2, 8)


@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(softcap=1.5), dict(window=(2, 1))], ids=str)
def test_backward(options):
    q, k, v = tensors((1, 5, 2, 4), kv_heads=1, k_len=6, value_dim=3)
    d_o = np.random.default_rng(5).standard_normal((1, 5, 2, 3)).astype(np.float32)
    o, lse = fulgurite.attention(q, k, v, return_lse=True, **options)
    got = fulgurite.attention_backward(d_o, q, k, v, o, lse, **options)
    for name, gradient, want in zip(("d_q", "d_k", "d_v"), got, reference_gradients(d_o, q, k, v, **options)):
        close(gradient, want, name)


def test_backward_with_sinks():
    q, k, v = tensors((1, 5, 2, 4))
    sinks = np.array([0.3, -0.6], np.float32)
    d_o = np.random.default_rng(5).standard_normal(q.shape).astype(np.float32)
    o, lse = fulgurite.attention(q, k, v, return_lse=True, sinks=sinks)
    *got, d_sinks = fulgurite.attention_backward(d_o, q, k, v, o, lse, sinks=sinks)
    for name, gradient, want in zip(("d_q", "d_k", "d_v"), got, reference_gradients(d_o, q, k, v, sinks=sinks)):
        close(gradient, want, name)
    step = 1e-5  # of the central difference
    want = []
    for head in range(2):
        up, down = sinks.astype(np.float64), sinks.astype(np.float64)
        up[head] += step
        down[head] -= step
        ends = [(reference(q, k, v, sinks=s)[0] * d_o).sum() for s in (up, down)]
        want.append((ends[0] - ends[1]) / (2 * step))
    close(d_sinks, want, "d_sinks")


GOOD = tensors((1, 4, 4, 8))


def refused(*arrays, **options):
    with pytest.raises(ValueError) as error:
        fulgurite.attention(*(arrays or GOOD), **options)
    return str(error.value)


def test_refusals_say_what_is_allowed():
    q, k, v = GOOD
    assert refused(q[0], k, v) == "`q` has shape [4, 4, 8], allowed: [batch, sequence, heads, head_dim]"
    assert refused(q, k[:, :, :3], v[:, :, :3]).startswith("`heads`: 4 query heads over 3 key/value heads, allowed:")
    assert refused(q, k[..., :7], v).startswith("`k` has shape [1, 4, 4, 7], allowed: [1, 4, 4, 8]")
    assert refused(q.astype(np.float64), k, v) == "`q` is float64, allowed: f32, f16, bf16, i32; convert it"
    assert refused(q, k.astype(np.float16), v).startswith("`k` is f16, allowed: f32;")
    assert refused(q.astype(np.int32), *GOOD[1:]).startswith("`dtype` is i32, allowed: f32, f16, bf16;")
    assert refused(scale=float("nan")).startswith("`scale` is NaN, allowed: finite and above 0;")
    assert refused(scale=-1.0).startswith("`scale` is -1, allowed:")
    assert refused(softcap=0.0).startswith("`softcap` is 0, allowed:")
    assert refused(causal="left").startswith("`causal` is 'left', allowed:")
    assert refused(exp="fast").startswith('`exp` is "fast", allowed:')
    assert refused(rescale="never").startswith('`rescale` is "never", allowed:')
    assert refused(tau=-1.0).startswith("`tau` is -1, allowed:")
    assert "give one" in refused(tau=1.0, rescale="always")
    assert refused(engine="mmx").startswith('`engine` is "mmx", allowed: best, cpu,')
    assert refused(threads=0).startswith("`threads` is 0, allowed: 1 to")
    assert "does not have exp sas:-10 with rescale lazy:8" in refused(exp="sas", tau=8)
    assert refused([1.0], k, v).startswith("`q` is a list, allowed: a NumPy array, a torch tensor or")
    assert refused(sinks=np.zeros(3, np.float32)).startswith("`sinks` has shape [3], allowed: [4];")
    assert refused(alibi_slopes=np.zeros(4, np.float16)).startswith("`alibi_slopes` is f16, allowed: f32;")


def test_refused_memory():
    q, k, v = GOOD
    assert "has stride 2 on its last axis" in refused(np.repeat(q, 2, axis=-1)[..., ::2], k, v)
    assert "has stride -32 on axis 1, allowed: 0 or more" in refused(q[:, ::-1], k, v)
    assert refused(out=q) == "`out` shares memory with `q`; write into a tensor of its own"
    narrow = np.zeros((1, 4, 1, 8), np.float32)
    assert "`out` is read-only, allowed: memory that may be written" in refused(out=np.broadcast_to(narrow, q.shape))
    repeated = np.lib.stride_tricks.as_strided(narrow, q.shape, (128, 32, 0, 4))
    assert "overlap" in refused(out=repeated)
    wide = np.zeros((1, 4, 4, 9), np.float32)
    assert refused(out=wide).startswith("`out` has shape [1, 4, 4, 9], allowed: [1, 4, 4, 8]")
    odd = np.frombuffer(bytearray(q.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(q.shape)
    assert "allowed: multiples of 4; copy it" in refused(odd, k, v)
    assert "foreign byte order" in refused(q.astype(">f4"), k, v)


def test_refused_offsets():
    q, k, v = (x[0] for x in GOOD)
    pack = lambda *pair: refused(q, k, v, cu_seqlens=pair)
    assert pack([0, 3, 2, 4], [0, 1, 2, 4]).startswith("`cu_seqlens_q`[2] is 2 after 3, allowed: not smaller;")
    assert pack([1, 4], [0, 4]).startswith("`cu_seqlens_q` begins with Some(1), allowed: 0;")
    assert pack([0, 5], [0, 4]).startswith("`cu_seqlens_q`: the last offset is 5, allowed: at most 4")
    assert pack([0, 4], [0, 2, 4]).startswith("`cu_seqlens_k` has shape [3], allowed: [2]")
    assert pack([0, 4], None) == "`cu_seqlens_q` and `cu_seqlens_k` belong together; give both or neither"
    assert pack([0, 2**40], [0, 4]).endswith("allowed: 32-bit integers")
    assert pack([0.5], [0, 4]) == "`cu_seqlens` is float64, allowed: integers"
    assert refused(*GOOD, used_lengths=(None, [5])).startswith("`used_k`[0] is 5, allowed: 0 to 4")
    assert refused(*GOOD, max_lengths=(1, 4)).startswith("`max_lengths` was given without `cu_seqlens`")
    assert "a pair, for queries and for keys" in refused(q, k, v, cu_seqlens=np.array([0, 4]))


def test_read_sum():
    words = np.random.default_rng(0).integers(0, 2**60, 100_003, dtype=np.uint64)
    elements = words.view(np.int32)
    arrays = [elements, elements[:7], elements[:0]]
    want = (int(words.sum(dtype=np.uint64)) + int(words[:3].sum(dtype=np.uint64))) % 2**64
    for threads in (1, 2, 3):
        total, seconds = fulgurite._fulgurite.read_sum(arrays, threads)
        assert total == want and seconds > 0
    with pytest.raises(ValueError, match="multiples of 8"):
        fulgurite._fulgurite.read_sum([elements[1:9]], 1)
    with pytest.raises(ValueError, match="`arrays`"):
        fulgurite._fulgurite.read_sum([words.ctypes.data], 1)


def test_a_window_that_hides_every_key():
    """-1 is unbounded in flash-attn; here a negative side is an offset."""
    q = np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(ValueError, match=r"`window` is \(-1, -1\), which hides every key, allowed: None"):
        fulgurite.attention(q, q, q, window=(-1, -1))
    assert fulgurite.attention(q, q, q, window=(3, -1)).shape == q.shape
