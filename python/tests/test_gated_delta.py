"""The gated delta rule under fla's names: every library, gradients, gates, states, packed sequences, refusals."""

import importlib.util

import numpy as np
import pytest
import variant_judge
from judge import close

from fulgurite.fla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_backward,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")


@pytest.fixture(autouse=True)
def judged():
    with variant_judge.judged():
        yield


L2_EPS = 1e-6  # fla's, added to the sum of squares


def reference(q, k, v, g, beta, scale=None, initial_state=None, l2norm=False):
    """o and the final state in float64, token by token."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS) for x in (q, k))
    q, k = (np.repeat(x, value_heads // heads, axis=2) for x in (q, k))
    state = np.zeros((batch, value_heads, key_dim, value_dim))
    if initial_state is not None:
        state = np.array(initial_state, np.float64)
    o = np.zeros(v.shape)
    for t in range(tokens):
        state = state * np.exp(g[:, t])[..., None, None]
        delta = beta[:, t][..., None] * (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], delta)
        o[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t]) * (key_dim**-0.5 if scale is None else scale)
    return o, state


def raw_gates(g, beta, a_log, dt_bias):
    """The gates that `use_gate_in_kernel` and both options of beta compute."""
    moved = np.asarray(g, np.float64) + dt_bias
    return -np.exp(np.asarray(a_log, np.float64)) * np.logaddexp(0.0, moved), 2.0 / (1.0 + np.exp(-np.float64(beta)))


def arrays(rng, batch, tokens, heads, value_heads, key_dim, value_dim):
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    q, k = (normal(batch, tokens, heads, key_dim) for _ in range(2))
    k /= np.sqrt((k * k).sum(-1, keepdims=True))
    v = normal(batch, tokens, value_heads, value_dim)
    g = -np.logaddexp(0, normal(batch, tokens, value_heads)).astype(np.float32) / np.float32(rng.choice([1, 16]))
    beta = rng.random((batch, tokens, value_heads), dtype=np.float32)
    return [q, k, v, g, beta]


def drawn(rng):
    """A random small call: tensors, options, and what the rule reads."""
    heads, group = rng.integers(1, 3), rng.integers(1, 3)
    sizes = [int(rng.integers(1, 4)), int(rng.integers(1, 90)), int(heads), int(heads * group)]
    dims = [int(rng.integers(1, 20)), int(rng.integers(1, 20))]
    q, k, v, g, beta = arrays(rng, *sizes, *dims)
    options, gates = {}, (g, beta)
    if rng.random() < 0.3:
        options["scale"] = float(rng.uniform(0.1, 2))
    if rng.random() < 0.5:
        options["use_qk_l2norm_in_kernel"] = True
    if rng.random() < 0.3:
        g, beta = rng.standard_normal(g.shape, dtype=np.float32), rng.standard_normal(g.shape, dtype=np.float32)
        a_log = rng.uniform(-2, 1, sizes[3]).astype(np.float32)
        dt_bias = rng.standard_normal(sizes[3], dtype=np.float32)
        options.update(use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias)
        options.update(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
        gates = raw_gates(g, beta, a_log, dt_bias)
    state = None
    if rng.random() < 0.5:
        state = rng.standard_normal((sizes[0], sizes[3], *dims), dtype=np.float32)
        options["initial_state"] = state
    if rng.random() < 0.3:
        options["state_v_first"] = True
        if state is not None:
            options["initial_state"] = np.ascontiguousarray(state.swapaxes(2, 3))
    return (q, k, v, g, beta), options, gates, state


def test_random_calls():
    rng = np.random.default_rng(11)
    for _ in range(200):
        tensors, options, gates, state = drawn(rng)
        rule = rng.choice([chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
        if rule is chunk_gated_delta_rule:
            o, final = rule(*tensors, output_final_state=True, **options)
        else:
            q, k, v, g, beta = tensors
            o, final = rule(q, k, v, g, beta=beta, output_final_state=True, **options)
        scale, l2norm = options.get("scale"), "use_qk_l2norm_in_kernel" in options
        want, want_state = reference(*tensors[:3], *gates, scale, state, l2norm)
        close(o, want)
        close(final.swapaxes(2, 3) if "state_v_first" in options else final, want_state, "final_state")
    assert variant_judge.COUNTS["judged"] == 200


def test_gradients_are_differences():
    rng = np.random.default_rng(5)
    for number in range(20):
        tensors, options, _, _ = drawn(rng)
        tensors = [np.ascontiguousarray(x[:1, :7]) for x in tensors]
        if "initial_state" in options:
            options["initial_state"] = options["initial_state"][:1].copy()
        run = lambda: chunk_gated_delta_rule(*tensors, output_final_state=True, **options)
        o, state = run()
        d_o, d_state = (rng.standard_normal(x.shape, dtype=np.float32) for x in (o, state))
        found = chunk_gated_delta_rule_backward(d_o, *tensors, d_final_state=d_state, **options)
        leaves = [*tensors, *(options[name] for name in ("initial_state", "A_log", "dt_bias") if name in options)]
        assert len(found) == len(leaves)
        for gradient, leaf in zip(found, leaves):
            assert gradient.shape == leaf.shape
            at = tuple(int(rng.integers(0, n)) for n in leaf.shape)
            # The log decay must stay at most 0.
            step = np.float32(2**-7 * max(1.0, abs(leaf[at])))
            if leaf is tensors[3] and "A_log" not in options:
                step = np.float32(min(step, -leaf[at] / 2))
            ends, value = [], leaf[at]
            for sign in (1, -1):
                leaf[at] = value + sign * step
                o, state = run()
                ends.append((np.float64(o) * d_o).sum() + (np.float64(state) * d_state).sum())
            leaf[at] = value
            difference = (ends[0] - ends[1]) / (2 * np.float64(step))
            scale = max(1.0, float(np.abs(gradient).max()), abs(difference))
            assert abs(difference - gradient[at]) <= 1e-2 * scale, (number, at, difference, gradient[at])


def test_packed_sequences_have_the_bits_of_each_alone():
    rng = np.random.default_rng(2)
    tensors = arrays(rng, 1, 130, 1, 2, 8, 6)
    offsets = np.array([0, 7, 7, 80, 130])  # int64, as in torch
    states = rng.standard_normal((4, 2, 8, 6), dtype=np.float32)
    options = {"initial_state": states, "output_final_state": True, "cu_seqlens": offsets}
    o, final = chunk_gated_delta_rule(*tensors, **options)
    assert o.shape == (1, 130, 2, 6) and final.shape == states.shape
    for at, (start, end) in enumerate(zip(offsets, offsets[1:])):
        if start == end:
            assert (final[at] == states[at]).all()
            continue
        part = [np.ascontiguousarray(x[:, start:end]) for x in tensors]
        alone, last = chunk_gated_delta_rule(*part, initial_state=states[at : at + 1], output_final_state=True)
        assert (o[:, start:end] == alone).all() and (final[at : at + 1] == last).all()
    found = chunk_gated_delta_rule_backward(np.ones_like(o), *tensors, initial_state=states, cu_seqlens=offsets)
    assert [x.shape for x in found] == [x.shape for x in (*tensors, states)]


def test_forms_agree_and_defaults():
    rng = np.random.default_rng(3)
    q, k, v, g, beta = arrays(rng, 2, 70, 2, 4, 16, 8)
    chunked, state = chunk_gated_delta_rule(q, k, v, g, beta)
    assert state is None
    close(fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0], chunked)
    close(fused_recurrent_gated_delta_rule(q, k, v)[0], reference(q, k, v, g * 0, beta * 0 + 1)[0])
    assert chunk_gdn is chunk_gated_delta_rule and fused_recurrent_gdn is fused_recurrent_gated_delta_rule
    # Tuning arguments have no effect; strided arrays are read in place.
    again = chunk_gated_delta_rule(q, k, v, g, beta, chunk_size=32, cu_seqlens_cpu=None, threads=1)[0]
    assert (again == chunked).all()
    wide = np.concatenate([q, q], -1)
    assert (chunk_gated_delta_rule(wide[..., :16], k, v, g, beta)[0] == chunked).all()


def test_a_prompt_then_tokens():
    rng = np.random.default_rng(4)
    tensors = arrays(rng, 1, 40, 1, 1, 8, 8)
    whole = chunk_gated_delta_rule(*tensors)[0]
    part = [x[:, :30] for x in tensors]
    o, state = chunk_gated_delta_rule(*part, output_final_state=True)
    rows = [o]
    for t in range(30, 40):
        q, k, v, g, beta = (x[:, t : t + 1] for x in tensors)
        o, state = fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=state, output_final_state=True
        )
        rows.append(o)
    close(np.concatenate(rows, 1), whole)


def test_half_types():
    rng = np.random.default_rng(6)
    tensors = [x.astype(np.float16) for x in arrays(rng, 1, 33, 1, 2, 8, 8)]
    o, state = chunk_gated_delta_rule(*tensors, output_final_state=True)
    assert o.dtype == np.float16 and state.dtype == np.float32
    found = chunk_gated_delta_rule_backward(o, *tensors)
    assert [x.dtype for x in found] == [np.float16] * 3 + [np.float32] * 2


class OnlyDLPack:
    """An array that other libraries can read only through DLPack."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        class Namespace:
            asarray = staticmethod(OnlyDLPack)

        return Namespace


def test_arrays_that_support_dlpack():
    rng = np.random.default_rng(7)
    tensors = arrays(rng, 1, 20, 1, 1, 4, 4)
    wanted = chunk_gated_delta_rule(*tensors, output_final_state=True)
    found = chunk_gated_delta_rule(*map(OnlyDLPack, tensors), output_final_state=True)
    for got, want in zip(found, wanted):
        assert isinstance(got, OnlyDLPack) and (got.array == want).all()


def test_jax():
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(8)
    tensors = arrays(rng, 1, 20, 1, 1, 4, 4)
    found = chunk_gated_delta_rule(*map(jax.numpy.asarray, tensors), output_final_state=True)
    assert all(isinstance(x, jax.Array) for x in found)
    close(found[0], reference(*tensors)[0])
    gradients = chunk_gated_delta_rule_backward(found[0], *map(jax.numpy.asarray, tensors))
    assert all(isinstance(x, jax.Array) for x in gradients)


WRONG = [
    (dict(q=np.zeros((4, 2, 8), np.float32)), "`q` has shape [4, 2, 8], allowed: [batch, tokens, heads, dim]"),
    (dict(k=np.zeros((1, 5, 2, 8), np.float32)), "`k` has shape [1, 5, 2, 8], allowed: [1, 4, 2, 8]"),
    (dict(v=np.zeros((1, 4, 3, 8), np.float32)), "3 value heads over 2 key heads"),
    (dict(v=np.zeros((1, 4, 2, 300), np.float32)), "`value_dim` is 300, allowed: 1 to 256"),
    (dict(g=np.full((1, 4, 2), 0.5, np.float32)), "`g` holds 0.5 at element 0, allowed: finite and at most 0"),
    (dict(g=np.zeros((1, 4), np.float32)), "`g` has shape [1, 4], allowed: [1, 4, 2]"),
    (dict(g=np.zeros((1, 4, 2))), "`g` is float64, allowed: f32, f16, bf16"),
    (dict(g="now"), "`g` is a str, allowed: a NumPy array"),
    (dict(beta=np.full((1, 4, 2), np.nan, np.float32)), "`beta` holds NaN at element 0"),
    (dict(beta=np.zeros((1, 4, 2), np.int32)), "`beta` is i32, allowed: f32, f16 or bf16"),
    (dict(q=np.zeros((1, 4, 2, 8), np.int32)), "allowed: f32, f16, bf16"),
    (dict(q=np.zeros((1, 4, 2, 8), np.float16)), "`k` is f32, allowed: f16"),
    (dict(scale=0.0), "`scale` is 0, allowed: finite and above 0"),
    (dict(scale="big"), "`scale` is 'big', allowed: a number"),
    (dict(initial_state=np.zeros((1, 2, 8, 7), np.float32)), "`initial_state` has shape [1, 2, 8, 7]"),
    (dict(initial_state=np.zeros((2, 8), np.float32), state_v_first=True), "`initial_state` has shape [2, 8]"),
    (dict(cu_seqlens=np.array([0, 4.0])), "`cu_seqlens` is float64, allowed: integers"),
    (dict(cu_seqlens=np.array([0, 3, 2])), "`cu_seqlens`[2] is 2 after 3"),
    (dict(cu_seqlens=np.array([0, 3])), "`q` has shape [4, 2, 8], allowed: [3, 2, 8]"),
    (dict(cu_seqlens=np.array([0, 4]), q=np.zeros((2, 4, 2, 8), np.float32)), "allowed with `cu_seqlens`: [1, tokens"),
    (dict(use_gate_in_kernel=True), "`A_log` was not given"),
    (dict(A_log=np.zeros(2, np.float32)), "`A_log` was given, allowed: only with `use_gate_in_kernel`"),
    (dict(use_gate_in_kernel=True, A_log=np.zeros(3, np.float32)), "`A_log` has shape [3], allowed: [2]"),
    (dict(allow_neg_eigval=True), "`allow_neg_eigval` is True, allowed: only with `use_beta_sigmoid_in_kernel`"),
    (dict(engine="cuda"), "cuda"),
    (dict(engine="gpu"), '`engine` is "gpu", allowed'),
    (dict(threads=0), "`threads` is 0, allowed: 1 to"),
    (dict(threads=1.5), "`threads` is 1.5, allowed: an integer"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_refusals(change, words):
    rows, gates = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 4, 2), np.float32)
    call = {"q": rows, "k": rows, "v": rows, "g": gates, "beta": gates, **change}
    with pytest.raises(ValueError) as refused:
        chunk_gated_delta_rule(**call)
    assert words in str(refused.value)


def test_unsupported_keywords_are_refused_by_name():
    rows, gates = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 4, 2), np.float32)
    for name, value in (("cp_context", object()), ("head_first", True), ("chunk_size", 48)):
        with pytest.raises(NotImplementedError, match=f"`{name}` is .* allowed: "):
            chunk_gated_delta_rule(rows, rows, rows, gates, gates, **{name: value})
    for name in ("gk", "gv"):
        with pytest.raises(NotImplementedError, match=f"`{name}` is a tensor, allowed: None"):
            fused_recurrent_gated_delta_rule(rows, rows, rows, gates, **{name: rows})
    with pytest.raises(TypeError, match="lower_bound"):
        chunk_gated_delta_rule(rows, rows, rows, gates, gates, lower_bound=-5.0)
    with pytest.warns(DeprecationWarning, match="is now `state_v_first`"):
        chunk_gated_delta_rule(rows, rows, rows, gates, gates, transpose_state_layout=True)
    with pytest.raises(ValueError, match="only without `state_v_first`"):
        chunk_gated_delta_rule(rows, rows, rows, gates, gates, transpose_state_layout=True, state_v_first=True)


@needs_torch
def test_torch_gradients():
    import torch

    rng = np.random.default_rng(9)
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays(rng, 2, 65, 2, 4, 8, 6)]
    state = torch.randn(2, 4, 8, 6, requires_grad=True)
    a_log, dt_bias = (torch.randn(4, requires_grad=True) for _ in range(2))
    options = {"initial_state": state, "use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias}
    options["use_beta_sigmoid_in_kernel"] = True
    o, final = chunk_gated_delta_rule(*tensors, output_final_state=True, **options)
    (o.sin().sum() + (final * final).sum()).backward()
    leaves = [*tensors, state, a_log, dt_bias]
    plain = [x.detach().numpy() for x in leaves]
    named = {**options, "initial_state": plain[5], "A_log": plain[6], "dt_bias": plain[7]}
    d_o, d_state = torch.cos(o).detach().numpy(), (2 * final).detach().numpy()
    want = chunk_gated_delta_rule_backward(d_o, *plain[:5], d_final_state=d_state, **named)
    for leaf, gradient in zip(leaves, want):
        assert torch.equal(leaf.grad, torch.from_numpy(gradient))
    # Only one of the outputs is used, and only one of the inputs needs a gradient.
    final = chunk_gated_delta_rule(*(x.detach() for x in tensors[:4]), tensors[4], output_final_state=True)[1]
    (alone,) = torch.autograd.grad(final.sum(), tensors[4])
    assert alone.shape == tensors[4].shape
    o = chunk_gated_delta_rule(*tensors)[0]
    (d_q,) = torch.autograd.grad(o.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(d_q.sum(), tensors[1])


@needs_torch
def test_torch_types_and_devices():
    import torch

    rng = np.random.default_rng(10)
    q, k, v, g, beta = (torch.from_numpy(x) for x in arrays(rng, 1, 20, 1, 2, 8, 8))
    half = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    state = torch.randn(1, 2, 8, 8).bfloat16().requires_grad_()
    o, final = chunk_gated_delta_rule(*half, g, beta.bfloat16(), initial_state=state, output_final_state=True)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    o.float().sum().backward()
    assert half[0].grad.dtype == torch.bfloat16 and state.grad.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert chunk_gated_delta_rule(q, k, v, g, beta)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="`g` is on meta, `q` on cpu"):
        chunk_gated_delta_rule(q.clone().requires_grad_(), k, v, g.to("meta"), beta)
    with pytest.raises(ValueError, match="`k` is a ndarray beside torch tensors"):
        chunk_gated_delta_rule(q.clone().requires_grad_(), k.numpy(), v, g, beta)


@needs_torch
def test_torch_operators_are_registered_correctly():
    import torch

    from fulgurite import _torch_variants  # noqa: F401  (registers them)

    rng = np.random.default_rng(12)
    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays(rng, 1, 9, 1, 2, 4, 4)]
    text = "gated_delta chunked;l2norm;state;with g;with beta;"
    torch.library.opcheck(torch.ops.fulgurite.variant_forward.default, (tensors, text))
    packed = text + "with cu_seqlens;"
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.library.opcheck(torch.ops.fulgurite.variant_forward.default, ([*tensors, offsets], packed))


@needs_torch
def test_torch_compile_has_no_graph_break():
    import torch

    rng = np.random.default_rng(13)

    def layer(q, k, v, g, beta, state):
        o, state = chunk_gated_delta_rule(
            q * 1.5, k, v, -g.exp(), beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        o2, state = fused_recurrent_gated_delta_rule(q, k, v, -g.exp(), beta=beta, initial_state=state)
        return o + o2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (12, 17, 70):  # the second compiles again, for every length
        tensors = [torch.from_numpy(x).requires_grad_() for x in arrays(rng, 1, tokens, 1, 2, 4, 4)]
        state = torch.randn(1, 2, 4, 4, requires_grad=True)
        want = torch.autograd.grad(layer(*tensors, state).square().sum(), [*tensors, state])
        found = torch.autograd.grad(compiled(*tensors, state).square().sum(), [*tensors, state])
        assert all(torch.equal(a, b) for a, b in zip(found, want))


@needs_torch
def test_fla_shapes_and_gates():
    """The cases of fla's own tests: its reference, its shapes and its gate normaliser."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(42)
    for B, T, H, HV, D, scale, normaliser, l2norm in (
        (1, 63, 1, 1, 64, 1.0, 1.0, False),
        (2, 100, 2, 2, 60, 1.0, 1.0, False),
        (2, 100, 2, 4, 128, 0.1, 1.0, True),
        (2, 128, 4, 4, 64, 1.0, 0.1, False),
        (1, 130, 2, 8, 100, 1.0, 10.0, True),
    ):
        q, k = (torch.rand(B, T, H, D) for _ in range(2))
        if not l2norm:
            q, k = (F.normalize(x, p=2, dim=-1) for x in (q, k))
        v, beta = torch.rand(B, T, HV, D), torch.rand(B, T, HV).sigmoid()
        g = F.logsigmoid(torch.rand(B, T, HV)) / normaliser
        h0 = torch.zeros(B, HV, D, D)
        options = {"scale": scale, "initial_state": h0, "output_final_state": True, "use_qk_l2norm_in_kernel": l2norm}
        o, state = chunk_gated_delta_rule(q, k, v, g, beta, **options)
        wanted = reference(q, k, v, g, beta, scale, h0.numpy(), l2norm)
        close(o, wanted[0])
        close(state, wanted[1], "final_state")


@needs_torch
def test_a_qwen3_next_layer_runs_on_it(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next as model
        from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    except ImportError:
        pytest.skip("transformers has no Qwen3-Next")
    names = {
        "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
        "torch_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    }
    if not all(hasattr(model, name) for name in names):
        pytest.skip("this transformers version calls the rule by other names")
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=32, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=16,
    )  # fmt: skip
    layer = model.Qwen3NextGatedDeltaNet(config, 0).float()
    x = torch.randn(2, 70, 32)

    def run():
        leaf = x.clone().requires_grad_()
        o = layer(leaf)
        gradients = torch.autograd.grad(o.square().sum(), [leaf, *layer.parameters()])
        return [o.detach(), *gradients]

    wanted = run()
    for name, function in names.items():
        monkeypatch.setattr(model, name, function)
    before = variant_judge.COUNTS["judged"]
    found = run()
    assert variant_judge.COUNTS["judged"] == before + 2, "the layer did not call the function"
    for got, want in zip(found, wanted):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)
