"""Tensors of a Hopper GPU: what is refused, with which words, and which kernel a packed batch of decoding takes."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

import fulgurite  # noqa: E402
from fulgurite.flash import flash_attn_varlen_func  # noqa: E402


def tensors(*shapes, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(7)
    return [torch.randn(*shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


def refused(*args, **options):
    with pytest.raises(ValueError) as error:
        fulgurite.attention(*args, **options)
    return str(error.value)


ROWS = (2, 40, 4, 64)


def test_shapes_types_and_strides_are_refused_as_on_the_cpu():
    q, k, v = tensors(ROWS, ROWS, ROWS)
    assert refused(q, k.float(), v).startswith("`k` is f32, allowed: bf16")
    assert refused(q, k[:1], v).startswith("`k` has shape [1, 40, 4, 64], allowed: [2, 40, 4, 64]")
    wide = torch.zeros(2, 40, 4, 128, dtype=torch.bfloat16, device="cuda")
    assert refused(wide[..., ::2], k, v).startswith("`q` has stride 2 on its last axis, allowed: 1")
    assert "allowed: one device" in refused(q, k.cpu(), v)
    out = torch.zeros(2, 40, 4, 32, dtype=torch.bfloat16, device="cuda")
    assert refused(q, k, v, out=out).startswith("`out` has shape [2, 40, 4, 32], allowed: [2, 40, 4, 64]")
    assert refused(q, k, v, out=torch._neg_view(torch.zeros_like(q))).startswith("`out` is read-only")
    for call in (lambda *a: fulgurite.attention(*a), lambda *a: fulgurite.attention(*(x.cpu() for x in a))):
        with pytest.raises(ValueError) as error:
            call(q, k, v[:, :39])
        assert str(error.value).startswith("`v` has shape [2, 39, 4, 64], allowed: [2, 40, 4, 64]")


def test_small_tensors_are_refused():
    q, k, v = tensors((80, 4, 64), (80, 4, 64), (80, 4, 64))
    offsets = torch.tensor([0, 9, 30, 9, 80, 9], dtype=torch.int32, device="cuda")
    good = torch.tensor([0, 30, 80], dtype=torch.int32, device="cuda")
    # Offsets with gaps are copied, not refused: they are small.
    apart = fulgurite.attention(q, k, v, cu_seqlens=(offsets[::2], offsets[::2]))
    assert torch.equal(apart, fulgurite.attention(q, k, v, cu_seqlens=(good, good)))
    assert refused(q, k, v, cu_seqlens=(good[:2], good)).startswith("`cu_seqlens_k` has shape [3], allowed: [2]")
    sinks = torch.zeros(3, dtype=torch.bfloat16, device="cuda")
    q, k, v = tensors(ROWS, ROWS, ROWS)
    assert refused(q, k, v, sinks=sinks).startswith("`sinks` has shape [3], allowed: [4]")


def test_memory_elsewhere_is_refused():
    q, k, v = tensors(ROWS, ROWS, ROWS)
    meta = torch.empty(ROWS, dtype=torch.bfloat16, device="meta")
    assert refused(q, meta, v).startswith("`k` is on meta")
    assert refused(q, k, v.cpu().pin_memory()).startswith("`v` is on cpu, `q` on cuda:0, allowed: one device")
    assert refused(q, k, v, out=q.cpu()).startswith("`out` is on cpu")
    assert refused(q.cpu(), k, v).startswith("`k` is on cuda:0")
    assert refused(q, k, v.to(torch.int8)).startswith("`v` is int8, allowed: ")
    used = torch.tensor([40, 40], dtype=torch.int32)
    assert "allowed: one device" in refused(q, k, v, used_lengths=(None, used))


def test_any_address_of_an_element_is_taken():
    """TMA needs multiples of 16 bytes; other tensors are packed first."""
    q, k, v = tensors(ROWS, ROWS, ROWS)
    for shift in (1, 3, 7):
        moved = torch.zeros(q.numel() + shift, dtype=q.dtype, device="cuda")[shift:].view(ROWS).copy_(q)
        assert moved.data_ptr() % 16 == 2 * shift
        assert torch.equal(fulgurite.attention(moved, k, v), fulgurite.attention(q, k, v))
    out = torch.zeros(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(ROWS)
    assert fulgurite.attention(q, k, v, out=out) is out and torch.equal(out, fulgurite.attention(q, k, v))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_each_gpu_has_its_own_streams():
    q, k, v = tensors(ROWS, ROWS, ROWS)
    other = [x.to("cuda:1") for x in (q, k, v)]
    assert "allowed: one device" in refused(q, other[1], v)
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):
        there = fulgurite.attention(*other)
        here = fulgurite.attention(q, k, v)
    torch.cuda.synchronize("cuda:1")
    assert there.device == other[0].device and torch.equal(there.to("cuda:0"), here)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_a_packed_batch_of_decoding_takes_the_decode_kernel(kv_heads):
    """Each sequence has the bits of a dense call of its own, which takes the decode kernel."""
    lengths = [700, 1, 4096, 33]
    q, k, v = tensors((4, 8, 128), (sum(lengths), kv_heads, 128), (sum(lengths), kv_heads, 128))
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    starts = torch.arange(5, dtype=torch.int32, device="cuda")
    got = flash_attn_varlen_func(q, k, v, starts, ends, 1, max(lengths), causal=True)
    for i, (first, n) in enumerate(zip(ends.tolist(), lengths)):
        part = slice(first, first + n)
        alone = fulgurite.attention(q[None, i : i + 1], k[None, part], v[None, part], causal=True)
        assert torch.equal(got[i], alone[0, 0]), i
    # A bound that is too small leaves rows undefined, and nothing else: no launch fails.
    flash_attn_varlen_func(k[:, :1].expand(-1, 8, -1), k, v, ends, ends, 1, max(lengths), causal=True)
    torch.cuda.synchronize()
