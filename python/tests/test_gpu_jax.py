"""`fulgurite.jax.attention` on a GPU: jit, grad and vmap against plain JAX in float32."""

import os

# Before JAX starts: torch's tests run in the same process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.ffi", reason="this JAX has no public foreign calls")

import jax.numpy as jnp  # noqa: E402
from reference import visible  # noqa: E402

import fulgurite.jax  # noqa: E402

attention = fulgurite.jax.attention
LIMITS = {"bfloat16": 0.012, "float16": 0.002}


def gpu():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


pytestmark = pytest.mark.skipif(gpu() is None, reason="JAX sees no GPU")


def arrays(dtype, batch=2, q_len=150, k_len=215, heads=4, kv_heads=2, head_dim=64):
    rows, keys_and_values = (batch, q_len, heads, head_dim), (batch, k_len, kv_heads, head_dim)
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = [rows, keys_and_values, keys_and_values, rows]
    return [jax.device_put(jax.random.normal(key, shape).astype(dtype), gpu()) for key, shape in zip(keys, shapes)]


def weighted(call, d_o):
    return lambda *x: jnp.sum(call(*x).astype(jnp.float32) * d_o.astype(jnp.float32))


def plain(q, k, v, **options):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[-1] ** -0.5
    keep = visible(q.shape[1], k.shape[1], **options)
    weights = jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhij,bjhd->bihd", weights, v, precision="highest")


def near(got, want, dtype):
    got, want = (np.asarray(x.astype(jnp.float32), np.float64) for x in (got, want))
    assert np.linalg.norm(got - want) <= LIMITS[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 0)}], ids=str)
@pytest.mark.parametrize("dtype", LIMITS)
def test_results_and_gradients_under_jit(dtype, options):
    q, k, v, d_o = arrays(dtype)
    call = lambda q, k, v: attention(q, k, v, **options)
    o = jax.jit(call)(q, k, v)
    assert o.devices() == {gpu()} and o.dtype == q.dtype
    reference = lambda q, k, v: plain(q, k, v, **options)
    near(o, reference(q, k, v), dtype)
    got, wanted = (jax.jit(jax.grad(weighted(of, d_o), argnums=(0, 1, 2)))(q, k, v) for of in (call, reference))
    for gradient, want in zip(got, wanted, strict=True):
        assert gradient.devices() == {gpu()}
        near(gradient, want, dtype)


def test_vmap_joins_its_axis_with_the_batch():
    q, k, v, _ = arrays("bfloat16", batch=6)
    call = jax.jit(lambda q, k, v: attention(q, k, v, causal=True))
    split = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, v)]
    assert (jax.vmap(call)(*split).reshape(q.shape) == call(q, k, v)).all()


def test_tensors_of_another_device_or_type_are_refused():
    q, k, v, _ = arrays("float32", head_dim=8)
    with pytest.raises(Exception, match="f32|float32"):
        jax.block_until_ready(jax.jit(attention)(q, k, v))
