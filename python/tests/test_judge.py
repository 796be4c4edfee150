"""The judge itself: what is right passes, and planted errors are found."""

import numpy as np
import pytest
from judge import close, judged
from reference import attention as reference

import fulgurite
from fulgurite._fulgurite import Description

RNG = np.random.default_rng(2)
Q, K, V, D_O = (RNG.standard_normal((1, 40, 2, 16)).astype(np.float32) for _ in range(4))
CAUSAL = Description("causal bottom-right;")


def wrong(results, saved=None):
    """Names of the tensors outside the tolerance."""
    return [each.name for each in CAUSAL.judge(Q, K, V, [], results, saved) if not each.ok]


def test_planted_errors_are_found():
    o, lse = CAUSAL.forward(Q, K, V, (), None, True)
    assert wrong([o]) == wrong([o, lse]) == []
    for results, names in (([o * 1.0001, lse], ["o"]), ([o, lse + np.float32(1e-3)], ["lse"])):
        assert wrong(results) == names
    nan = o.copy()
    nan[0, 3, 1, 5] = np.nan
    assert wrong([nan]) == ["o"]
    assert wrong([fulgurite.attention(Q, K, V)]) == ["o"]  # without the mask


def test_planted_errors_of_gradients_are_found():
    o, lse = CAUSAL.forward(Q, K, V, (), None, True)
    saved = (o, lse, D_O, None)
    gradients = CAUSAL.backward(Q, K, V, (), saved, None)
    assert wrong(gradients, saved) == []
    for at, name in enumerate(("d_q", "d_k", "d_v")):
        planted = [x * np.float32(1.001 if i == at else 1) for i, x in enumerate(gradients)]
        assert wrong(planted, saved) == [name]


def test_a_reference_of_another_problem_disagrees():
    with judged():
        o = fulgurite.attention(Q, K, V, causal=True)
    close(o, reference(Q, K, V, causal=True)[0])
    close(o[:, 7:9], reference(Q, K, V, causal=True)[0][:, 7:9])
    for other in ({}, {"causal": True, "scale": 0.2501}):
        with pytest.raises(AssertionError, match="o: worst"):
            close(o, reference(Q, K, V, **other)[0])


def test_a_wrong_engine_is_caught_during_the_call(monkeypatch):
    class Damaged:
        def forward(self, *call):
            return CAUSAL.forward(*call) + np.float32(1e-3)

        judge = CAUSAL.judge

    with judged():
        from fulgurite import _dispatch

        recorded = _dispatch.description("causal bottom-right;")
        monkeypatch.setattr(recorded, "description", Damaged())
        with pytest.raises(AssertionError, match="o: WRONG"):
            recorded.forward(Q, K, V, (), None, False)


def test_what_is_refused():
    def refused(results, saved=None):
        with pytest.raises(ValueError) as error:
            CAUSAL.judge(Q, K, V, [], results, saved)
        return str(error.value)

    o, lse = CAUSAL.forward(Q, K, V, (), None, True)
    assert refused([]) == "`results` has 0 arrays, allowed: o, or o and lse"
    assert refused([o[:, 1:]]) == "`o` is f32 [1, 39, 2, 16], allowed: f32 [1, 40, 2, 16]"
    assert refused([o.astype(np.float16)]) == "`o` is f16 [1, 40, 2, 16], allowed: f32 [1, 40, 2, 16]"
    assert refused([Q, K], (o, lse, D_O, None)) == "`out` has 2 arrays, allowed: d_q, d_k, d_v"
    assert refused([Q, K, V], (o, lse, D_O[:, 1:], None)).startswith("`d_o` has shape [1, 39, 2, 16], allowed:")
