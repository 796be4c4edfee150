"""JAX arrays in and out, through DLPack."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from judge import close  # noqa: E402
from reference import attention as reference  # noqa: E402
from reference import flex_attention  # noqa: E402
from reference import gradients as reference_gradients  # noqa: E402

import fulgurite  # noqa: E402

pytestmark = pytest.mark.usefixtures("judged")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16], ids=str)
def test_forward_and_backward(dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_o = (jax.random.normal(key, (1, 11, 2, 8)).astype(dtype) for key in keys)
    o, lse = fulgurite.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == dtype and lse.dtype == jnp.float32
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    want, want_lse = reference(*exact, causal=True)
    close(o, want)
    close(lse, want_lse, "lse")
    gradients = fulgurite.attention_backward(d_o, q, k, v, o, lse, causal=True)
    assert all(isinstance(g, jax.Array) and g.dtype == dtype and g.shape == q.shape for g in gradients)
    wanted = reference_gradients(np.asarray(d_o, np.float64), *exact, causal=True)
    for got, want, name in zip(gradients, wanted, ("d_q", "d_k", "d_v")):
        close(got, want, name)


def test_modifiers_capture_jax_arrays():
    q = jax.random.normal(jax.random.key(1), (1, 6, 2, 8))
    table = jnp.arange(6, dtype=jnp.float32)
    o = fulgurite.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[j])
    close(o, flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + np.arange(6)[j])[0])


def test_what_is_refused():
    q = jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="`q` cannot be read in place"):
        jax.jit(lambda x: fulgurite.attention(x, x, x))(q)
    with pytest.raises(ValueError, match="`out` is read-only"):
        fulgurite.attention(q, q, q, out=q + 1)
