"""Wrong calls of the variants of attention, at random: each is an exception that says why, or a result; no crash."""

import os

import numpy as np
import pytest

import fulgurite
from fulgurite import fla

COUNT = 1000 if os.environ.get("FULGURITE_LONG") == "1" else 100
REFUSED = (ValueError, TypeError, NotImplementedError)


def valid():
    """Arrays for every function, by name."""
    rng = np.random.default_rng(0)
    make = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    x = {name: make(1, 64, 2, 8) for name in ("q", "k", "v", "r", "d_o")}
    x.update(g=-np.abs(make(1, 64, 2)), beta=np.abs(make(1, 64, 2)), state=make(1, 2, 8, 8))
    x.update(lse=make(1, 2, 64), offsets=np.array([0, 20, 64]), a_log=make(2), rows=make(5, 2, 8))
    return x


def cached(x):
    cache = fulgurite.KvCache(2, 8, 100, storage="packed", v_bits=2)
    cache.append(x["rows"], x["rows"])
    return cache.attend(x["rows"][:1] if hasattr(x["rows"], "__getitem__") else x["rows"])


CALLS = {
    "chunk": lambda x: fla.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["state"], output_final_state=True
    ),
    "gates": lambda x: fla.fused_recurrent_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], beta=x["beta"], use_gate_in_kernel=True, A_log=x["a_log"], dt_bias=x["a_log"]
    ),
    "packed": lambda x: fla.chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], cu_seqlens=x["offsets"], output_final_state=True
    ),
    "chunk backward": lambda x: fla.chunk_gated_delta_rule_backward(
        x["d_o"], x["q"], x["k"], x["v"], x["g"], x["beta"], d_final_state=x["state"], state_v_first=True
    ),
    "parallax": lambda x: fulgurite.parallax_attention(x["q"], x["k"], x["v"], x["r"], causal=True),
    "parallax backward": lambda x: fulgurite.parallax_attention_backward(x["d_o"], x["q"], x["k"], x["v"], x["r"]),
    "lighthouse": lambda x: fulgurite.lighthouse_attention(x["q"], x["k"], x["v"], budget=4, tile=2),
    "lighthouse backward": lambda x: fulgurite.lighthouse_attention_backward(
        x["d_o"], x["q"], x["k"], x["v"], budget=4, tile=2
    ),
    "skip": lambda x: fulgurite.attention(x["q"], x["k"], x["v"], causal=True, skip="window:20:4,tile:16x16"),
    "skip backward": lambda x: fulgurite.attention_backward(
        x["d_o"], x["q"], x["k"], x["v"], x["d_o"], x["lse"], causal=True, skip="log,tile:16x16"
    ),
    "skip report": lambda x: fulgurite.skip_report(x["q"], x["k"], x["v"], skip="top:0.5,tile:16x16"),
    "classes": lambda x: fulgurite.classify_heads(x["q"], x["k"], windows=(16,)),
    "int8": lambda x: fulgurite.attention(x["q"], x["k"], x["v"], precision="int8"),
    "nvfp4": lambda x: fulgurite.attention(x["q"], x["k"], x["v"], precision="nvfp4"),
    "sageattn": lambda x: fulgurite.sageattn(x["q"], x["k"], x["v"], tensor_layout="NHD"),
    "cache": cached,
    "bits": lambda x: fulgurite.KvCache.choose_bits(x["rows"], 1),
    "merge": lambda x: fulgurite.merge(x["q"], x["lse"], x["k"], x["lse"]),
    "explain": lambda x: fulgurite.explain(x["q"], x["k"], x["v"]),
    "counters": lambda x: fulgurite.attention_counters(x["q"], x["k"], x["v"]),
}


def spoiled(rng, array):
    """An array that is wrong in one way."""
    axis = int(rng.integers(0, array.ndim))
    choices = [
        lambda: array.astype(rng.choice(["float64", "int32", "int8", "uint16", "bool", "complex64", ">f4", "float16"])),
        lambda: array[0],
        lambda: array[None],
        lambda: array.ravel(),
        lambda: np.float32(3),
        lambda: np.concatenate([array] * 2, axis),
        lambda: np.delete(array, 0, axis),
        lambda: np.take(array, [], axis),
        lambda: np.flip(array, axis),
        lambda: np.moveaxis(array, 0, -1),
        lambda: np.full_like(array, rng.choice([np.nan, np.inf, -np.inf, 3e38]) if array.dtype.kind == "f" else -7),
        lambda: array.tolist(),
        lambda: "array",
        lambda: None,
        lambda: object(),
        lambda: array.reshape((1,) * 9 + (-1,)),
        lambda: np.ma.masked_array(array, mask=array > 0),
    ]
    return choices[int(rng.integers(0, len(choices)))]()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name):
    call, right = CALLS[name], valid()
    call(right)
    rng = np.random.default_rng(sum(map(ord, name)))
    refused = 0
    for _ in range(COUNT):
        wrong = dict(right)
        for key in rng.choice(list(right), int(rng.integers(1, 4)), replace=False):
            wrong[key] = spoiled(rng, right[key])
        try:
            call(wrong)
        except REFUSED as error:
            refused += 1
            assert str(error), "an error says what is wrong"
    assert refused > COUNT / 20
