"""`fulgurite.jax.attention` under jit, grad and vmap: the bits of eager calls, gradients of a reference in float64."""

import os
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi", reason="this JAX has no public foreign calls")

import jax.numpy as jnp  # noqa: E402
from judge import close  # noqa: E402
from reference import flex_attention  # noqa: E402
from reference import gradients as reference_gradients  # noqa: E402

import fulgurite  # noqa: E402
import fulgurite.jax  # noqa: E402

pytestmark = pytest.mark.usefixtures("judged")
attention = fulgurite.jax.attention


def arrays(batch=2, q_len=9, k_len=13, heads=4, kv_heads=2, head_dim=8, dtype=jnp.float32, count=4):
    rows, keys_and_values = (batch, q_len, heads, head_dim), (batch, k_len, kv_heads, head_dim)
    shapes = [rows, keys_and_values, keys_and_values, rows]
    keys = jax.random.split(jax.random.key(3), 4)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)][:count]


def same(a, b):
    """Whether two trees of arrays have the same types, shapes and bits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs)


def bits(x):
    return jax.tree.map(np.asarray, x)


OPTIONS = [
    {},
    {"causal": True},
    {"causal": "top-left", "scale": 0.3},
    {"window": (3, 0)},
    {"window": (4, 2), "softcap": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_jit_and_grad_have_the_bits_of_eager_calls(dtype, options):
    q, k, v, d_o = arrays(dtype=dtype)
    want = fulgurite.attention(q, k, v, return_lse=True, **options)
    compiled = jax.jit(lambda q, k, v: attention(q, k, v, return_lse=True, **options))
    assert same(bits(compiled(q, k, v)), bits(want))
    assert same(bits(attention(q, k, v, **options)), bits(want[0]))

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, **options).astype(jnp.float32) * d_o.astype(jnp.float32))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    wanted = fulgurite.attention_backward(d_o, q, k, v, *want, **options)
    assert same(bits(gradients), bits(tuple(wanted)))


def test_gradients_agree_with_the_reference():
    q, k, v, d_o = arrays(q_len=13)
    o, lse = fulgurite.attention(q, k, v, causal=True, return_lse=True)
    fulgurite.attention_backward(d_o, q, k, v, o, lse, causal=True)  # judged; allows what the rule allows
    gradients = jax.grad(lambda *x: jnp.vdot(attention(*x, causal=True), d_o), argnums=(0, 1, 2))(q, k, v)
    exact = [np.asarray(x, np.float64) for x in (d_o, q, k, v)]
    for got, want, name in zip(gradients, reference_gradients(*exact, causal=True), ("d_q", "d_k", "d_v")):
        close(got, want, name)


def test_the_gradient_of_the_lse():
    q, k, v, d_o = arrays()
    d_lse = jax.random.normal(jax.random.key(9), (2, 4, 9))

    def loss(q, k, v):
        o, lse = attention(q, k, v, return_lse=True)
        return jnp.vdot(o, d_o) + jnp.vdot(lse, d_lse)

    o, lse = fulgurite.attention(q, k, v, return_lse=True)
    want = fulgurite.attention_backward(d_o, q, k, v, o, lse, d_lse=d_lse)
    assert same(bits(jax.grad(loss, argnums=(0, 1, 2))(q, k, v)), bits(tuple(want)))
    only_lse = jax.grad(lambda q: attention(q, k, v, return_lse=True)[1].sum())(q)
    want = fulgurite.attention_backward(jnp.zeros_like(o), q, k, v, o, lse, d_lse=jnp.ones_like(lse))[0]
    assert same(bits(only_lse), bits(want))


def test_tensors_besides_q_k_and_v_are_traced_and_have_gradients():
    q, k, v, d_o = arrays()
    bias = jax.random.normal(jax.random.key(5), (4, 9, 13))
    sinks = jnp.linspace(-1, 1, 4, dtype=jnp.bfloat16)
    table = jnp.arange(13, dtype=jnp.float32) / 13
    keep = jax.random.bernoulli(jax.random.key(6), 0.7, (9, 13))

    def call(q, bias, sinks, table, of):
        modifier = lambda s, b, h, i, j: s + table[j]
        return of(q, k, v, bias=bias, sinks=sinks, mask=keep, score_mod=modifier, return_lse=True)

    want = call(q, bias, sinks.astype(jnp.float32), table, fulgurite.attention)
    assert same(bits(jax.jit(lambda *x: call(*x, attention))(q, bias, sinks, table)), bits(want))
    loss = lambda *x: jnp.vdot(call(*x, attention)[0], d_o)
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, bias, sinks, table)
    modifier = lambda s, b, h, i, j: s + table[j]
    given = dict(bias=bias, sinks=sinks.astype(jnp.float32), mask=keep, score_mod=modifier)
    d_q, _, _, d_sinks, d_bias, d_table = fulgurite.attention_backward(d_o, q, k, v, *want, **given)
    assert same(bits(got), bits((d_q, d_bias, d_sinks.astype(jnp.bfloat16), d_table)))
    # What is not differentiated costs nothing: the gradient of bias alone has the same bits.
    assert same(bits(jax.grad(loss, argnums=1)(q, bias, sinks, table)), bits(d_bias))


def test_captured_tracers_against_the_reference():
    q, k, v, _ = arrays(batch=1)
    table = jnp.arange(13, dtype=jnp.float32)
    modifier = lambda t: lambda s, b, h, i, j: s + t[j]
    causal = lambda b, h, i, j: j <= i
    got = jax.jit(lambda t: attention(q, k, v, score_mod=modifier(t), mask_mod=causal))(table)
    fulgurite.attention(q, k, v)  # judged; allows what the rule allows
    grouped = [jnp.repeat(x, 2, axis=2) for x in (k, v)]
    want = flex_attention(q, *grouped, score_mod=modifier(np.arange(13)), mask_mod=causal)[0]
    close(got, want)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (1, 0, None)], ids=str)
def test_vmap_joins_the_batch(axes):
    q, k, v, d_o = arrays(batch=6)
    stacked = [x.reshape(3, 2, *x.shape[1:]) if axis is not None else x[:2] for x, axis in zip((q, k, v), axes)]
    stacked = [jnp.moveaxis(x, 0, axis) if axis else x for x, axis in zip(stacked, axes)]
    one = lambda q, k, v: attention(q, k, v, causal=True)
    program = jax.make_jaxpr(jax.vmap(one, in_axes=axes))(*stacked)
    assert "scan" not in str(program) and "while" not in str(program)
    got = jax.jit(jax.vmap(one, in_axes=axes))(*stacked)
    at = lambda x, axis, n: x if axis is None else jnp.take(x, n, axis=axis)
    want = [one(*(at(x, axis, n) for x, axis in zip(stacked, axes))) for n in range(3)]
    assert same(bits(got), bits(jnp.stack(want)))
    loss = lambda q, k, v: jnp.sum(one(q, k, v) * d_o[:2])
    got = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), in_axes=axes)(*stacked)
    want = [jax.grad(loss, argnums=(0, 1, 2))(*(at(x, axis, n) for x, axis in zip(stacked, axes))) for n in range(3)]
    assert same(bits(got), bits(jax.tree.map(lambda *x: jnp.stack(x), *want)))


def test_vmap_in_vmap_and_over_what_depends_on_the_batch():
    q, k, v, _ = arrays(batch=1)
    scales = jnp.linspace(0.5, 2, 6).reshape(2, 3)
    call = lambda s: attention(s * q, k, v)
    got = jax.vmap(jax.vmap(call))(scales)
    assert same(bits(got), bits(jnp.stack([jnp.stack([call(s) for s in row]) for row in scales])))
    bias = jax.random.normal(jax.random.key(7), (3, 9, 13))
    call = lambda b: attention(q, k, v, bias=b)
    assert same(bits(jax.vmap(call)(bias)), bits(jnp.stack([call(b) for b in bias])))
    # The modifier reads the index of the sequence, which begins anew for each element of the mapped axis.
    qs = jnp.stack([jnp.concatenate([q, 2 * q]), jnp.concatenate([-q, q])])
    two = [jnp.concatenate([x, x]) for x in (k, v)]
    call = lambda q: attention(q, *two, score_mod=lambda s, b, h, i, j: s * (b + 1))
    assert same(bits(jax.vmap(call)(qs)), bits(jnp.stack([call(q) for q in qs])))
    gradient = jax.grad(lambda q, b: attention(q, k, v, bias=b).sum(), argnums=1)
    got = jax.vmap(gradient, in_axes=(0, None))(jnp.stack([q, 2 * q]), bias[0])
    assert same(bits(got), bits(jnp.stack([gradient(q, bias[0]), gradient(2 * q, bias[0])])))


def test_packed_sequences_and_lengths():
    keys = jax.random.split(jax.random.key(2), 3)
    q, k, v = (jax.random.normal(key, (12, heads, 8)) for key, heads in zip(keys, (4, 2, 2)))
    offsets = jnp.asarray([0, 5, 12])
    want = fulgurite.attention(q, k, v, cu_seqlens=(offsets, offsets), causal=True)
    call = jax.jit(lambda offsets: attention(q, k, v, cu_seqlens=(offsets, offsets), causal=True))
    assert same(bits(call(offsets)), bits(want))
    with pytest.raises(Exception, match="cu_seqlens_q"):
        call(jnp.asarray([0, 5, 13])).block_until_ready()
    q, k, v, _ = arrays()
    used = jnp.asarray([13, 4])
    want = fulgurite.attention(q, k, v, used_lengths=(None, used))
    assert same(bits(jax.jit(lambda used: attention(q, k, v, used_lengths=(None, used)))(used)), bits(want))


def test_block_masks():
    q, k, v, _ = arrays(q_len=64, k_len=64)
    blocks = fulgurite.create_block_mask(lambda b, h, i, j: i - j < 20, None, None, 64, 64, BLOCK_SIZE=16)
    want = fulgurite.attention(q, k, v, block_mask=blocks)
    assert same(bits(jax.jit(lambda q: attention(q, k, v, block_mask=blocks))(q)), bits(want))


def test_rows_without_keys_and_empty_arrays():
    q, k, v, _ = arrays(q_len=5, k_len=2)
    o, lse = jax.jit(lambda q: attention(q, k, v, causal=True, return_lse=True))(q)
    assert (o[:, :3] == 0).all() and jnp.isneginf(lse[:, :, :3]).all()
    assert attention(q[:, :0], k, v).shape == (2, 0, 4, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (np.asarray(q, np.float64), k, v), "`q` is float64, allowed: f32, f16, bf16"),
        (lambda q, k, v: (q.astype(int), k, v), "`dtype` is i32|`q` is i32"),
        (lambda q, k, v: (q, k.astype(jnp.bfloat16), v), "`k` is bf16"),
        (lambda q, k, v: (q, k[:, :, :1], v), "`k` has shape"),
        (lambda q, k, v: (q[0], k, v), r"`q` has shape \[9, 4, 8\], allowed"),
        (lambda q, k, v: (q, k, "v"), "`v` is a str"),
    ],
    ids=["float64", "int", "types differ", "heads differ", "rank", "text"],
)
def test_a_wrong_call_is_refused_while_tracing(change, message):
    q, k, v, _ = arrays()
    wrong = change(q, k, v)
    with pytest.raises(ValueError, match=message):
        attention(*wrong)
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda unused: attention(*wrong))(q)


def test_what_else_is_refused():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match="`scale` is .*, allowed: a number"):
        jax.jit(lambda scale: attention(q, k, v, scale=scale))(1.0)
    with pytest.raises(ValueError, match="`sinks` has shape"):
        attention(q, k, v, sinks=jnp.zeros(3))
    with pytest.raises(ValueError, match="call fulgurite.jax.attention"):
        jax.jit(lambda q: fulgurite.attention(q, k, v))(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: jax.grad(lambda q: attention(q, k, v).sum())(q).sum())(q)


def test_programs_run_in_threads_and_after_their_python_objects_are_gone():
    program = """
import gc, threading, numpy as np, jax, fulgurite, fulgurite.jax
from fulgurite import _dispatch
q = jax.random.normal(jax.random.key(0), (2, 65, 4, 16))
call = jax.jit(jax.grad(lambda q: fulgurite.jax.attention(q, q, q, causal=True).sum()))
want = np.asarray(call(q)).tobytes()
_dispatch._known.clear(); gc.collect()
failures = []
def work():
    for _ in range(20):
        if np.asarray(call(q)).tobytes() != want: failures.append(1)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not failures
"""
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
