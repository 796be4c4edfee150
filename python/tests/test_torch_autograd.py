"""torch's autograd, torch.compile, autocast and checkpoints, against torch's own attention in float64."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from judge import close, judged  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fulgurite  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def plain(q, k, v, modify=None, keep=None, sinks=None, scale=None):
    """Attention in float64 over [batch, heads, sequence, dim], differentiable; modifiers see whole index tensors."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    at = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if modify is not None:
        scores = modify(scores, *at)
    if keep is not None:
        scores = scores.masked_fill(~keep(*at), -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1] @ v
    return torch.softmax(scores, -1) @ v


def compare(ours, theirs, inputs):
    """Runs both on the same inputs, in their type and in float64, and compares results and gradients."""
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    with judged():
        got, want = ours(*inputs), theirs(*exact)
        close(got, want)
        d_o = torch.randn(want.shape, generator=torch.Generator().manual_seed(9)).to(got.dtype)
        asked = [x for x in inputs if x.requires_grad]
        gradients = torch.autograd.grad(got, asked, d_o)
        wanted = torch.autograd.grad(want, [x for x in exact if x.requires_grad], d_o.double())
        for gradient, expected, x in zip(gradients, wanted, asked):
            assert gradient.dtype == x.dtype and gradient.shape == x.shape
            close(gradient, expected, "d_")


SHAPES = (2, 4, 19, 16), (2, 2, 23, 16), (2, 2, 23, 16)
swap = lambda x: x.transpose(1, 2)
bottom_right = lambda b, h, i, j: j <= i + 4  # 23 - 19


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_flash_attn_func(dtype):
    inputs = tensors(*SHAPES, dtype=dtype)
    ours = lambda q, k, v: swap(fulgurite.flash_attn_func(*map(swap, (q, k, v)), causal=True, softmax_scale=0.3))
    compare(ours, lambda q, k, v: plain(q, k, v, keep=bottom_right, scale=0.3), inputs)


def test_softcap_window_sinks():
    inputs = [*tensors(*SHAPES), *tensors((4,), seed=3)]

    def ours(q, k, v, sinks):
        q, k, v = map(swap, (q, k, v))
        return swap(fulgurite.flash_attn_func(q, k, v, softcap=2.0, window_size=(6, 2), learnable_sink=sinks))

    keep = lambda b, h, i, j: (j <= i + 4 + 2) & (j >= i + 4 - 6)
    cap = lambda s, *at: 2.0 * torch.tanh(s / 2.0)
    compare(ours, lambda q, k, v, sinks: plain(q, k, v, cap, keep, sinks), inputs)


def test_packed_functions():
    (qkv,) = tensors((2, 9, 3, 4, 8))
    ours = lambda qkv: swap(fulgurite.flash_attn_qkvpacked_func(qkv, causal=True))
    compare(ours, lambda qkv: sdpa(*map(swap, qkv.unbind(2)), is_causal=True), [qkv])
    q, kv = tensors((2, 9, 4, 8), (2, 9, 2, 2, 8))
    ours = lambda q, kv: swap(fulgurite.flash_attn_kvpacked_func(q, kv))
    compare(ours, lambda q, kv: plain(swap(q), *map(swap, kv.unbind(2))), [q, kv])


def test_varlen():
    q, k, v = tensors((20, 4, 8), (26, 2, 8), (26, 2, 8))
    cu_q, cu_k = torch.tensor([0, 5, 20], dtype=torch.int32), torch.tensor([0, 9, 26], dtype=torch.int32)

    def theirs(q, k, v):
        parts = []
        for b in range(2):
            (i, i_end), (j, j_end) = cu_q[b : b + 2].tolist(), cu_k[b : b + 2].tolist()
            part = [swap(x[None]) for x in (q[i:i_end], k[j:j_end], v[j:j_end])]
            keep = lambda b, h, at, to, shift=(j_end - j) - (i_end - i): to <= at + shift
            parts.append(swap(plain(*part, keep=keep))[0])
        return torch.cat(parts)

    compare(
        lambda q, k, v: fulgurite.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 15, 17, causal=True), theirs, [q, k, v]
    )


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("gqa", [False, True])
def test_sdpa(mask, gqa):
    inputs = tensors((2, 4, 19, 16), *[(2, 2 if gqa else 4, 23, 16)] * 2)
    options = {"enable_gqa": gqa, "is_causal": mask == "causal"}
    if mask == "bool":
        options["attn_mask"] = torch.rand((19, 23), generator=torch.Generator().manual_seed(0)) > 0.3
    if mask == "float":
        (bias,) = tensors((2, 1, 19, 23), seed=5)
        ours = lambda q, k, v, bias: fulgurite.scaled_dot_product_attention(q, k, v, bias, enable_gqa=gqa)
        compare(ours, lambda q, k, v, bias: sdpa(q, k, v, bias, enable_gqa=gqa), [*inputs, bias])
        return
    ours = lambda q, k, v: fulgurite.scaled_dot_product_attention(q, k, v, **options)
    compare(ours, lambda q, k, v: sdpa(q, k, v, **options), inputs)


def test_score_mod_with_learned_tables():
    inputs = [*tensors(*SHAPES), *tensors((4, 23), (), (45,), seed=4)]
    documents = torch.arange(23) // 7

    class Modifier:
        def __init__(self, table, gain, distances):
            self.table, self.gain, self.distances = table, gain, distances

        def __call__(self, score, b, h, q_idx, kv_idx):
            near = torch.where(documents[q_idx] == documents[kv_idx], score, 0.5 * score.tanh())
            near = near + self.table[h, kv_idx] * self.gain
            return near - torch.exp(self.distances[(q_idx - kv_idx).clamp(-22, 22) + 22]) * torch.sigmoid(score)

    def ours(q, k, v, *learned):
        return fulgurite.flex_attention(q, k, v, score_mod=Modifier(*learned), enable_gqa=True)

    compare(ours, lambda q, k, v, *learned: plain(q, k, v, modify=Modifier(*learned)), inputs)


def test_block_masks_of_both_libraries():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (x.detach() for x in tensors((2, 4, 60, 16), (2, 4, 70, 16), (2, 4, 70, 16)))
    documents = torch.arange(70) // 9
    causal = lambda b, h, q_idx, kv_idx: kv_idx <= q_idx + 10
    same = lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx]
    for combine in (flex.and_masks, flex.or_masks, fulgurite.and_masks, fulgurite.or_masks):
        mask_mod = combine(causal, same)
        want = plain(*(x.double() for x in (q, k, v)), keep=mask_mod)
        theirs = flex.create_block_mask(mask_mod, None, None, 60, 70, device="cpu", BLOCK_SIZE=16)
        ours = fulgurite.create_block_mask(mask_mod, None, None, 60, 70, BLOCK_SIZE=16)
        for block_mask in (theirs, ours):
            with judged():
                close(fulgurite.flex_attention(q, k, v, block_mask=block_mask), want)


def test_gradient_of_the_lse():
    q, k, v = tensors(*SHAPES)
    exact = [x.detach().double().requires_grad_() for x in (q, k)]
    scores = exact[0] @ exact[1].repeat_interleave(2, 1).mT / 4
    wanted = torch.autograd.grad(scores.logsumexp(-1).sum(), exact)
    with judged():
        _, lse = fulgurite.attention(*map(swap, (q, k, v)), return_lse=True)
        for got, want, name in zip(torch.autograd.grad(lse.sum(), (q, k)), wanted, ("d_q", "d_k")):
            close(got, want, name)


def test_subsets_of_gradients():
    q, k, v = tensors(*SHAPES)
    for chosen in ((q,), (k,), (v,), (q, v)):
        arguments = [x if any(x is y for y in chosen) else x.detach() for x in (q, k, v)]
        o = fulgurite.scaled_dot_product_attention(*arguments, enable_gqa=True)
        assert all(g.shape == x.shape for g, x in zip(torch.autograd.grad(o.sum(), chosen), chosen))
    with torch.no_grad():
        assert not fulgurite.scaled_dot_product_attention(q, k, v, enable_gqa=True).requires_grad
    with torch.inference_mode():
        assert fulgurite.scaled_dot_product_attention(q, k, v, enable_gqa=True).is_inference()


def test_operators_are_well_behaved():
    q, k, v = tensors((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    sinks, table = tensors((4,), (9,), seed=2)
    text = "causal bottom-right;with sinks;with aux table grad;score add score load table 1 k;"
    torch.library.opcheck(torch.ops.fulgurite.forward.default, (q, k, v, [sinks, table], text))
    x, cu = tensors((9, 2, 8))[0], torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = "with cu_seqlens_q;with cu_seqlens_k;"
    torch.library.opcheck(torch.ops.fulgurite.forward.default, (x, x, x, [cu, cu], packed))


def count_graph_breaks(function, *args):
    torch._dynamo.reset()
    return torch._dynamo.explain(function)(*args).graph_break_count


def functions():
    keep = torch.rand((2, 1, 19, 19), generator=torch.Generator().manual_seed(0)) > 0.2
    cu = torch.tensor([0, 8, 19], dtype=torch.int32)
    sinks = torch.zeros(4)
    return {
        "attention": lambda q, k, v: fulgurite.attention(q, k, v, causal=True, softcap=3.0),
        "flash": lambda q, k, v: fulgurite.flash_attn_func(q, k, v, causal=True, window_size=(5, 0), s_aux=sinks),
        "varlen": lambda q, k, v: fulgurite.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 11, 11, causal=True),
        "packed": lambda q, k, v: fulgurite.flash_attn_kvpacked_func(q, torch.stack([k, v], 2)),
        "sdpa": lambda q, k, v: swap(fulgurite.scaled_dot_product_attention(*map(swap, (q, k, v)), is_causal=True)),
        "masked": lambda q, k, v: swap(fulgurite.scaled_dot_product_attention(*map(swap, (q, k, v)), keep)),
    }


@pytest.mark.parametrize("name", functions())
def test_compile_has_no_graph_break(name):
    function = functions()[name]
    q, k, v = tensors(*[(2, 19, 4, 16)] * 3)
    around = lambda q, k, v: function(q * 2, k.sin(), v).cos()
    assert count_graph_breaks(around, q, k, v) == 0
    compiled = torch.compile(around, fullgraph=True, backend="aot_eager")
    got, want = compiled(q, k, v), around(q, k, v)
    torch.testing.assert_close(got, want, atol=0, rtol=0)
    gradients = [torch.autograd.grad(o.sum(), (q, k, v)) for o in (got, want)]
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_compile_with_lengths_that_change():
    torch._dynamo.reset()
    function = lambda q: fulgurite.flash_attn_func(q, q, q, causal=True) + 1
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (20, 16, 12, 7, 33):
        (q,) = tensors((2, length, 4, 16))
        torch.testing.assert_close(compiled(q), function(q), atol=0, rtol=0)


def test_compile_around_traced_callables():
    """A callable is traced between two graphs: a break, and the same result."""
    torch._dynamo.reset()
    (table,) = tensors((19,))
    function = lambda q: fulgurite.attention(q, q, q, score_mod=lambda s, b, h, i, j: s + table[j]).cos()
    (q,) = tensors((2, 19, 4, 16))
    got = torch.compile(function, backend="aot_eager")(q)
    torch.testing.assert_close(got, function(q), atol=0, rtol=0)
    assert torch.autograd.grad(got.sum(), table)[0].shape == (19,)


def test_autocast():
    q, k, v = tensors(*SHAPES)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = sdpa(q, k, v, enable_gqa=True)
        with judged():
            got = fulgurite.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        with torch.no_grad():
            assert fulgurite.scaled_dot_product_attention(q, k, v, enable_gqa=True).dtype == torch.bfloat16
    assert got.dtype == want.dtype == torch.bfloat16
    close(got, plain(*(x.detach().bfloat16().double() for x in (q, k, v))))
    got.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    inputs = tensors(*SHAPES)
    function = lambda q, k, v: fulgurite.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    want = torch.autograd.grad(function(*inputs).square().sum(), inputs)
    got = checkpoint(function, *inputs, use_reentrant=reentrant).square().sum()
    got.backward()
    for x, gradient in zip(inputs, want):
        torch.testing.assert_close(x.grad, gradient, atol=0, rtol=0)


def test_kvcache_takes_no_part_in_autograd():
    q, k, v = tensors((2, 1, 4, 8), (2, 1, 2, 8), (2, 1, 2, 8))
    k_cache, v_cache = torch.zeros(2, 8, 2, 8), torch.zeros(2, 8, 2, 8)
    lengths = torch.tensor([2, 5], dtype=torch.int32)
    o = fulgurite.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
    assert not o.requires_grad and (k_cache[0, 2] == k[0, 0]).all() and (v_cache[1, 5] == v[1, 0]).all()
    want = sdpa(swap(q[:1]), swap(k_cache[:1, :3]), swap(v_cache[:1, :3]), enable_gqa=True)
    torch.testing.assert_close(o[:1], swap(want).detach())


def test_what_is_refused():
    q, k, v = (swap(x) for x in tensors(*SHAPES))
    with pytest.raises(ValueError, match="`out` was given, allowed: only without gradients"):
        fulgurite.attention(q, k, v, out=torch.empty_like(q))
    with pytest.raises(ValueError, match="`k` is on meta, `q` on cpu, allowed: one device"):
        fulgurite.attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match="`k` is a ndarray beside torch tensors"):
        fulgurite.attention(q, k.detach().numpy(), v)


def test_any_strides():
    """The functions of others copy what has no contiguous last axis; gradients may come with any strides."""
    q, k, v = (x.detach().mT.contiguous().mT.requires_grad_() for x in tensors(*SHAPES))
    assert q.stride(-1) != 1
    compare(lambda *x: fulgurite.scaled_dot_product_attention(*x, enable_gqa=True), plain, [q, k, v])
    compare(lambda *x: swap(fulgurite.flash_attn_func(*map(swap, x))), plain, [q, k, v])
    with pytest.raises(ValueError, match="`q` has stride 19 on its last axis, allowed: 1"):
        fulgurite.attention(*(swap(x.detach()) for x in (q, k, v)))
    inputs = tensors(*SHAPES)
    ours = lambda *x: fulgurite.scaled_dot_product_attention(*x, enable_gqa=True)
    d_o = torch.randn(2, 4, 16, 19).mT
    want = torch.autograd.grad(ours(*inputs), inputs, d_o.contiguous())
    for a, b in zip(torch.autograd.grad(ours(*inputs), inputs, d_o), want):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_second_derivatives_are_refused():
    (q,) = tensors((1, 4, 2, 8))
    (gradient,) = torch.autograd.grad(fulgurite.attention(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated again"):
        gradient.sum().backward()


def test_torch_may_be_imported_later():
    code = """
import fulgurite, sys
assert "torch" not in sys.modules
import torch
x = torch.randn(1, 8, 2, 8, requires_grad=True)
function = lambda x: fulgurite.flash_attn_func(x, x, x, causal=True) * 2
torch.compile(function, fullgraph=True, backend="aot_eager")(x).sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(fulgurite.__file__).parents[1])
