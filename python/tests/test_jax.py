"""JAX arrays in and out, through DLPack."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from reference import attention as reference  # noqa: E402

import fulgurite  # noqa: E402


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16], ids=str)
def test_forward_and_backward(dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_o = (jax.random.normal(key, (2, 11, 4, 8)).astype(dtype) for key in keys)
    o, lse = fulgurite.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == dtype and lse.dtype == jnp.float32
    want, want_lse = reference(*(np.asarray(x, np.float64) for x in (q, k, v)), causal=True)
    bound = 3e-5 if dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(np.asarray(o, np.float64), want, atol=bound)
    np.testing.assert_allclose(np.asarray(lse), want_lse, atol=bound)
    gradients = fulgurite.attention_backward(d_o, q, k, v, o, lse, causal=True)
    assert all(isinstance(g, jax.Array) and g.dtype == dtype and g.shape == q.shape for g in gradients)

    def plain(q, k, v):
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((11, 11), bool)), scores, -jnp.inf)
        return (jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v) * d_o.astype(jnp.float32)).sum()

    wanted = jax.grad(plain, (0, 1, 2))(*(x.astype(jnp.float32) for x in (q, k, v)))
    for got, want in zip(gradients, wanted):
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want), atol=4 * bound, rtol=0.05)


def test_modifiers_capture_jax_arrays():
    q = jax.random.normal(jax.random.key(1), (1, 6, 2, 8))
    table = jnp.arange(6, dtype=jnp.float32)
    o = fulgurite.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[j])
    np.testing.assert_allclose(o, fulgurite.attention(q, q, q, bias=table), atol=1e-6)


def test_what_is_refused():
    q = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="`q` cannot be read in place"):
        jax.jit(lambda x: fulgurite.attention(x, x, x))(q)
    with pytest.raises(ValueError, match="`out` is read-only"):
        fulgurite.attention(q, q, q, out=q + 1)
