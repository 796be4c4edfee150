"""The gated delta rule under the names and signatures of flash-linear-attention (`fla.ops.gated_delta_rule`).

>>> import numpy as np
>>> from fulgurite.fla import chunk_gated_delta_rule
>>> rng = np.random.default_rng(0)
>>> q, k, v = (rng.standard_normal((1, 100, 2, 16), dtype=np.float32) for _ in range(3))
>>> g, beta = np.full((1, 100, 2), -0.1, np.float32), np.full((1, 100, 2), 0.5, np.float32)
>>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
>>> o.shape, state.shape
((1, 100, 2, 16), (1, 2, 16, 16))

Arrays in host memory, of NumPy, torch or a library with DLPack. torch tensors have gradients, and torch.compile sees
one operator. `chunk_gated_delta_rule_backward` is for arrays without autograd.
"""

from __future__ import annotations

import warnings
from typing import Any

from . import _variants
from ._arrays import integers, rows
from ._describe import _integer, _number, _word
from ._messages import refuse

Array = Any

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_backward",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
]

# Descriptions by their options.
_texts: dict[tuple, str] = {}


def chunk_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    cu_seqlens_cpu: Array | None = None,
    chunk_indices: Array | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    engine: str | None = None,
    threads: int | None = None,
) -> tuple[Any, Any]:
    """S = e^g S; S = S + beta k (v - S^T k)^T; o = scale S^T q, token by token, computed in chunks.

    q, k          `[batch, tokens, heads, key_dim]`
    v             `[batch, tokens, value_heads, value_dim]`; value_heads must be a multiple of heads
    g, beta       `[batch, tokens, value_heads]`: the log of the decay, finite and at most 0, and the step size
    scale         default 1 / sqrt(key_dim)
    initial_state, output_final_state
                  `[sequences, value_heads, key_dim, value_dim]`; the final state is float32
    use_qk_l2norm_in_kernel
                  divides each row of q and k by its length
    use_gate_in_kernel
                  the decay is -exp(A_log) softplus(g + dt_bias); A_log and dt_bias are `[value_heads]`
    use_beta_sigmoid_in_kernel, allow_neg_eigval
                  the step is sigmoid(beta), or with both 2 sigmoid(beta)
    state_v_first states are `[sequences, value_heads, value_dim, key_dim]`; `transpose_state_layout` is its old name
    cu_seqlens    cumulative offsets of packed sequences, sequences + 1; the batch axis is then 1
    cu_seqlens_cpu, chunk_indices, chunk_size
                  accepted, no effect: they tune kernels
    cp_context, head_first
                  refused
    engine, threads
                  one of `fulgurite.engines()` that runs on the CPU, and the number of threads

    Returns (o, final_state); final_state is None unless `output_final_state`.
    """
    if cp_context is not None or head_first is not False or chunk_size != 64:
        refuse(cp_context=(cp_context, None), head_first=(head_first, False), chunk_size=(chunk_size, 64, 32, 16))
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    text, tensors = _call(
        "chunked", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        engine, threads,
    )  # fmt: skip
    o, *state = _variants.forward(text, tensors)
    return o, state[0] if state else None


def fused_recurrent_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    gk: Array | None = None,
    gv: Array | None = None,
    beta: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    *,
    transpose_state_layout: bool | None = None,
    head_first: bool = False,
    engine: str | None = None,
    threads: int | None = None,
) -> tuple[Any, Any]:
    """`chunk_gated_delta_rule` token by token, for decoding.

    A missing g is no decay, and a missing beta is a step of 1. Decays by channel (`gk`, `gv`) are refused. Unlike fla's
    function, this one has gradients.
    """
    if gk is not None or gv is not None or head_first is not False:
        refuse(gk=(gk, None), gv=(gv, None), head_first=(head_first, False))
    if transpose_state_layout is not None:
        state_v_first = _renamed(state_v_first, transpose_state_layout)
    text, tensors = _call(
        "recurrent", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        engine, threads,
    )  # fmt: skip
    o, *state = _variants.forward(text, tensors)
    return o, state[0] if state else None


def chunk_gated_delta_rule_backward(
    d_o: Array | None,
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Array | None = None,
    engine: str | None = None,
    threads: int | None = None,
) -> tuple[Any, ...]:
    """The gradients of `chunk_gated_delta_rule`, for arrays without autograd; torch tensors have `backward()`.

    Returns those of q, k, v, g and beta, followed by those of initial_state, A_log and dt_bias, if present. Those of
    tensors other than q, k and v are float32.
    """
    text, tensors = _call(
        "chunked", q, k, v, g, beta, scale, initial_state, d_final_state is not None, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        engine, threads,
    )  # fmt: skip
    return tuple(_variants.backward(text, tensors, [], [d_o, d_final_state]))


def _renamed(state_v_first, transpose_state_layout):
    """The value of `state_v_first` under its old name."""
    if state_v_first:
        raise ValueError("`transpose_state_layout` was given, allowed: only without `state_v_first`, its new name")
    warnings.warn("`transpose_state_layout` is now `state_v_first`", DeprecationWarning, stacklevel=3)
    return bool(transpose_state_layout)


def _call(
    form, q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, raw, A_log, dt_bias, sigmoid, twice,
    v_first, cu_seqlens, engine, threads,
):  # fmt: skip
    """The description and the tensors of a call."""
    # Rows with gaps are copied, as in fla.
    tensors = [rows(q), rows(k), rows(v)]
    if g is not None:
        tensors.append(g)
    if beta is not None:
        tensors.append(beta)
    if initial_state is not None:
        tensors.append(rows(initial_state))
    if cu_seqlens is not None:
        tensors.append(integers("cu_seqlens", cu_seqlens))
    if raw:
        if A_log is None or g is None:
            missing = "A_log" if A_log is None else "g"
            raise ValueError(f"`{missing}` was not given, `use_gate_in_kernel` needs it")
        tensors.append(A_log)
        if dt_bias is not None:
            tensors.append(dt_bias)
    elif A_log is not None or dt_bias is not None:
        name = "A_log" if A_log is not None else "dt_bias"
        raise ValueError(f"`{name}` was given, allowed: only with `use_gate_in_kernel`; leave it out")
    key = (
        form, scale, bool(output_final_state), bool(l2norm), bool(raw), bool(sigmoid), bool(twice), bool(v_first),
        engine, threads, type(threads), g is None, beta is None, initial_state is None, cu_seqlens is None,
        dt_bias is None,
    )  # fmt: skip
    try:
        text = _texts.get(key)
    except TypeError:  # an array, which is no number
        text = None
    if text is None:
        text = _text(*key)
        if len(_texts) < 4096:
            _texts[key] = text
    return text, tensors


def _text(
    form, scale, state, l2norm, raw, sigmoid, twice, v_first, engine, threads, _, no_g, no_beta, no_state, dense,
    no_bias,
):  # fmt: skip
    if twice and not sigmoid:
        raise ValueError("`allow_neg_eigval` is True, allowed: only with `use_beta_sigmoid_in_kernel`; set both")
    text = f"gated_delta {form};"
    if scale is not None:
        text += f"scale {_number('scale', scale)};"
    text += "l2norm;" * l2norm + "state;" * state + "v_first;" * v_first
    if sigmoid:
        text += "beta twice-sigmoid;" if twice else "beta sigmoid;"
    if engine is not None:
        text += f"engine {_word('engine', engine)};"
    if threads is not None:
        text += f"threads {_integer('threads', threads)};"
    given = ("g", not no_g), ("beta", not no_beta), ("initial_state", not no_state), ("cu_seqlens", not dense)
    for name, there in (*given, ("A_log", raw), ("dt_bias", raw and not no_bias)):
        if there:
            text += f"with {name};"
    return text


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
