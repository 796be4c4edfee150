"""Other rings with our functions inside: PyTorch's, ring-flash-attention, long-context-attention (yunchang)."""

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="fulgurite.distributed is for torch tensors")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from test_distributed import inputs, judge, layout_of  # noqa: E402  (after the skip)

import fulgurite  # noqa: E402
from fulgurite import distributed as fd  # noqa: E402


def template(group, rank, count, case, rotate):
    """PyTorch's ring with our operators: the rows of o, lse and the gradients."""
    (q, k, v, d_o), extras = inputs(case)
    return their_ring(group, rank, count, case, rotate, (q, k, v, d_o))


def template_of_documents(group, rank, count, case, rotate):
    """PyTorch's ring for each document by itself, as its balance per document divides them."""
    rows, extras = inputs(case)
    offsets = extras["cu_seqlens"].tolist()
    found = []
    for start, stop in zip(offsets, offsets[1:]):
        one = {name: case[name] for name in case if name != "documents"} | {"length": stop - start}
        found.append(their_ring(group, rank, count, one, rotate, [x[None, start:stop] for x in rows]))
    return found


def their_ring(group, rank, count, case, rotate, rows):
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    layout = layout_of(case, count, {})
    q, k, v, d_o = (fd.shard_sequence(x, layout, rank).transpose(1, 2) for x in rows)
    options = theirs._cp_options
    before = options.enable_load_balance, options.rotate_method
    theirs.set_rotate_method(rotate)
    options.enable_load_balance = case.get("balance", "zigzag") == "zigzag"
    try:
        o, lse = theirs._templated_ring_attention(group, 2, fd.ring_op, q, k, v, is_causal=case["causal"])
        o = o.to(q.dtype)
        found = theirs._templated_ring_attention_backward(
            group, 2, fd.ring_op_backward, d_o, "grad_out", q, k, v, o, lse, is_causal=case["causal"]
        )
    finally:
        options.enable_load_balance, options.rotate_method = before
    results = [o.transpose(1, 2).float(), lse, *(x.transpose(1, 2).float() for x in found)]
    # Their ring does not know of padding, whose rows come last and are dropped.
    padding = torch.from_numpy(layout.positions(rank)) >= layout.length
    for at, x in enumerate(results):
        x.movedim(2 if at == 1 else 1, 0)[padding] = 0.0
    return results


TEMPLATES = [
    (count, rotate, {**case, "sizes": sizes, "dtype": dtype})
    for count, rotate in ((2, "alltoall"), (2, "allgather"), (4, "allgather"))
    for sizes, dtype in (((4, 4, 16, 16), torch.float32), ((4, 2, 16, 16), torch.bfloat16))
    for case in (
        dict(length=48, causal=True),
        dict(length=45, causal=True),
        dict(length=44, causal=False, balance="contiguous"),
    )
]


@pytest.mark.parametrize("count,rotate,case", TEMPLATES)
def test_the_ring_of_torch(pool, count, rotate, case):
    pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._attention", reason="this torch has no such ring"
    )
    judge(case, pool.run(template, count, case, rotate), layout_of(case, count, {}))


@pytest.mark.parametrize("count,rotate", [(2, "alltoall"), (4, "allgather")])
def test_the_ring_of_torch_over_documents(pool, count, rotate):
    pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._attention", reason="this torch has no such ring"
    )
    case = dict(length=63, documents=(17, 1, 45), causal=True, sizes=(4, 2, 16, 16), dtype=torch.bfloat16)
    found = pool.run(template_of_documents, count, case, rotate)
    whole_case, at = inputs(case), 0
    for document, length in enumerate(case["documents"]):
        one = {**case, "length": length, "rows": [x[None, at : at + length] for x in whole_case[0]]}
        del one["documents"]
        judge(one, [rank[document] for rank in found], layout_of(one, count, {}), f"document of {length}")
        at += length


def in_their_context(group, rank, count):
    """Our call inside `context_parallel`, which divides the buffers head-tail."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    (q, k, v, _), _ = inputs(dict(length=48, causal=True))
    want = fulgurite.attention(q, k, v, causal=True)
    layout = fd.sequence_layout(48, count)
    mesh = DeviceMesh("cpu", torch.arange(count))
    with torch.no_grad(), context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[1, 1, 1]):
        assert q.shape[1] == 48 // count
        o = fd.context_parallel_attention(q, k, v, mesh=mesh, causal=True)
    return float((fd.unshard_sequence(o, layout, group) - want).abs().max())


def test_in_the_context_of_torch(pool):
    pytest.importorskip("torch.distributed.tensor.experimental", reason="this torch has no context_parallel")
    for count in (4,):
        assert max(pool.run(in_their_context, count)) < 2e-6


def their_package():
    """ring-flash-attention on our names, without its adapter for transformers, which is for older versions of them."""
    fulgurite.register_as_flash_attn()
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules.setdefault("ring_flash_attn.adapters", adapters)
    import ring_flash_attn

    return ring_flash_attn


def ring_flash(group, rank, count, case, kind):
    """A function of ring-flash-attention on our names."""
    theirs = their_package()
    (q, k, v, d_o), extras = inputs(case)
    layout, dim = layout_of(case, count, extras), q.ndim - 3
    q, k, v, d_o = (fd.shard_sequence(x, layout, rank, dim) for x in (q, k, v, d_o))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    more = dict(causal=case.get("causal", False), return_attn_probs=True, group=group)
    o, lse, _ = getattr(theirs, f"{kind}_flash_attn_func")(*leaves, **more)
    return [x.detach().float() for x in (o, lse, *torch.autograd.grad(o, leaves, d_o))]


RING_FLASH = {
    "ring": dict(length=48, causal=True, balance="contiguous"),
    "zigzag_ring": dict(length=48, causal=True),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", RING_FLASH)
def test_ring_flash_attention(pool, kind, count):
    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("ring-flash-attn is not installed")
    case = {**RING_FLASH[kind], "dtype": torch.bfloat16, "sizes": (4, 2, 16, 16)}
    judge(case, pool.run(ring_flash, count, case, kind), layout_of(case, count, {}))


def ring_flash_documents(group, rank, count, lengths):
    """Their zigzag over documents: each document is divided head-tail by itself. The largest differences."""
    zigzag_ring_flash_attn_varlen_func = their_package().zigzag_ring_flash_attn_varlen_func
    case = dict(length=sum(lengths), documents=lengths, causal=True, dtype=torch.bfloat16)
    (q, k, v, d_o), extras = inputs(case)
    offsets = extras["cu_seqlens"]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = fulgurite.attention(q, k, v, cu_seqlens=(offsets, offsets), causal=True)
    want = [o.detach(), *torch.autograd.grad(o, leaves, d_o)]
    parts = [fd.sequence_layout(length, count) for length in lengths]
    at = torch.cat([torch.from_numpy(part.positions(rank)) + int(start) for part, start in zip(parts, offsets)])
    own = [x.detach()[at].requires_grad_() for x in (q, k, v)]
    o = zigzag_ring_flash_attn_varlen_func(*own, offsets // count, max(lengths) // count, causal=True, group=group)
    got = [o.detach(), *torch.autograd.grad(o, own, d_o[at])]
    return [float((a.float() - b[at].float()).abs().max() / b.float().abs().max()) for a, b in zip(got, want)]


def test_ring_flash_attention_over_documents(pool):
    if importlib.util.find_spec("ring_flash_attn") is None:
        pytest.skip("ring-flash-attn is not installed")
    for found in pool.run(ring_flash_documents, 2, (16, 8, 24)):
        assert max(found) < 2**-6, found  # a few roundings to bf16, relative to the largest element


def hybrid(group, rank, count):
    """`LongContextAttention` of yunchang on our names, on 2 x 2 ranks. The largest differences."""
    fulgurite.register_as_flash_attn()
    from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    set_seq_parallel_pg(2, 2, rank, count)
    case = dict(length=64, causal=True, dtype=torch.bfloat16)
    (q, k, v, d_o), _ = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = fulgurite.attention(q, k, v, causal=True)
    want = [o.detach(), *torch.autograd.grad(o, leaves, d_o)]
    extract_zigzag = EXTRACT_FUNC_DICT["zigzag"]
    extract = lambda x: extract_zigzag(x.detach(), rank, world_size=count, rd=2, ud=2).clone()  # noqa: E731
    own = [extract(x).requires_grad_() for x in (q, k, v)]
    o = LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)(*own, causal=True)
    got = [o.detach(), *torch.autograd.grad(o, own, extract(d_o))]
    return [float((a.float() - extract(b).float()).abs().max() / b.float().abs().max()) for a, b in zip(got, want)]


def test_long_context_attention(pool):
    if importlib.util.find_spec("yunchang") is None:
        pytest.skip("yunchang is not installed")
    for found in pool.run(hybrid, 4):
        assert max(found) < 2**-6, found


def test_private_names_of_flash_attn():
    from fulgurite import flash_attn_interface as names

    (q, k, v, d_o), _ = inputs(dict(length=20, sizes=(4, 2, 16, 16)))
    want, want_lse = fulgurite.attention(q, k, v, causal=True, window=(7, None), return_lse=True)
    out, lse, probabilities, _ = names._flash_attn_forward(q, k, v, 0.0, None, True, 7, -1)
    assert torch.equal(out, want) and torch.equal(lse, want_lse) and probabilities is None
    d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
    delta = names._flash_attn_backward(d_o, q, k, v, out, lse, d_q, d_k, d_v, 0.0, None, True, 7, -1)
    found = fulgurite.attention_backward(d_o, q, k, v, out, lse, causal=True, window=(7, None))
    assert all(map(torch.equal, found, (d_q, d_k, d_v)))
    assert torch.allclose(delta, (d_o * out).sum(-1).transpose(1, 2))
    cu = torch.tensor([0, 20])
    for call, error, message in (
        (lambda: names._flash_attn_forward(q, k, v, 0.1, None, True), ValueError, "`dropout_p` is 0.1, allowed: 0.0"),
        (lambda: names._flash_attn_forward(q, k, v, 0.0, -1.0, True), ValueError, "`softmax_scale` is -1"),
        (lambda: names._flash_attn_forward(q, k, v, 0.0, None, 2), ValueError, "`causal` is 2, allowed: True, False"),
        (
            lambda: names._flash_attn_varlen_forward(q[0], k[0], v[0], cu, cu, 20, 20, 0.0, None, True, block_table=cu),
            NotImplementedError,
            "`block_table` is a tensor, allowed: None",
        ),
    ):  # fmt: skip
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value).startswith(message)


def test_registering_as_flash_attn():
    code = (
        "import fulgurite, importlib.util; fulgurite.register_as_flash_attn(); fulgurite.register_as_flash_attn()\n"
        "from flash_attn import flash_attn_func, __version__\n"
        "from flash_attn.flash_attn_interface import _flash_attn_forward\n"
        "assert flash_attn_func is fulgurite.flash_attn_func and importlib.util.find_spec('flash_attn')\n"
        "import sys; del sys.modules['flash_attn'], sys.modules['flash_attn.flash_attn_interface']\n"
        "import types; sys.modules['flash_attn'] = types.ModuleType('flash_attn')\n"
        "try: fulgurite.register_as_flash_attn()\n"
        "except ValueError as error: assert str(error).startswith('`flash_attn` is installed, allowed: only where')\n"
        "else: raise SystemExit(3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(fulgurite.__file__).parents[1])
