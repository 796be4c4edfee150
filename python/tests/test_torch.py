"""CPU torch tensors in and out, against torch's own attention."""

import pytest

torch = pytest.importorskip("torch")

from judge import close  # noqa: E402  (after the skip)

import fulgurite  # noqa: E402

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("judged")


def tensors(*shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def sdpa(q, k, v, **options):
    """torch's attention in float64, on our layout."""
    q, k, v = (x.to(torch.float64).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_forward(heads, dtype, causal):
    q, k, v = tensors((2, 77, heads[0], 64), (2, 77, heads[1], 64), (2, 77, heads[1], 64), dtype=dtype)
    o = fulgurite.attention(q, k, v, causal=causal)
    assert isinstance(o, torch.Tensor) and o.dtype == dtype and o.shape == q.shape
    close(o, sdpa(q, k, v, is_causal=causal, enable_gqa=True))


def test_causal_top_left_is_is_causal():
    q, k, v = tensors((1, 20, 2, 16), (1, 50, 2, 16), (1, 50, 2, 16), dtype=torch.float32)
    o = fulgurite.attention(q, k, v, causal="top-left")
    close(o, sdpa(q, k, v, is_causal=True))


def test_transposed_tensors_are_read_in_place():
    q, k, v = (x.transpose(1, 2) for x in tensors((2, 3, 40, 16), (2, 3, 40, 16), (2, 3, 40, 16), dtype=torch.float32))
    close(fulgurite.attention(q, k, v), sdpa(q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(dtype, causal):
    shapes = (2, 45, 4, 32), (2, 45, 2, 32), (2, 45, 2, 32), (2, 45, 4, 32)
    *qkv, d_o = tensors(*shapes, dtype=dtype)
    o, lse = fulgurite.attention(*qkv, causal=causal, return_lse=True)
    got = fulgurite.attention_backward(d_o, *qkv, o, lse, causal=causal)
    exact = [x.double().requires_grad_() for x in qkv]
    want = torch.autograd.grad(sdpa(*exact, is_causal=causal, enable_gqa=True), exact, d_o.double())
    for name, gradient, expected in zip(("d_q", "d_k", "d_v"), got, want):
        assert gradient.dtype == dtype
        close(gradient, expected, name)


def test_broadcast_gradient():
    q, k, v = tensors((1, 9, 2, 16), (1, 9, 2, 16), (1, 9, 2, 16), dtype=torch.float32)
    o, lse = fulgurite.attention(q, k, v, return_lse=True)
    ones = torch.ones(()).expand(o.shape)
    for a, b in zip(
        fulgurite.attention_backward(ones, q, k, v, o, lse),
        fulgurite.attention_backward(ones.contiguous(), q, k, v, o, lse),
    ):
        torch.testing.assert_close(a, b)


def test_other_devices_are_refused():
    q = torch.empty((1, 4, 2, 8), device="meta")
    with pytest.raises(ValueError, match="`q` is on meta, allowed: cpu"):
        fulgurite.attention(q, q, q)


def test_causal_bias():
    """torch's `CausalBias` is a tensor without elements."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 9, 9))
    rows, cols = torch.arange(5)[:, None], torch.arange(9)[None]
    for make, mask in ((causal_upper_left, cols <= rows), (causal_lower_right, cols <= rows + 4)):
        got = fulgurite.scaled_dot_product_attention(q, k, v, attn_mask=make(5, 9))
        torch.testing.assert_close(got, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    with pytest.raises(ValueError, match="`attn_mask` is for 5 queries and 8 keys, allowed: 5 and 9"):
        fulgurite.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(5, 8))


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_rounded_division(mode):
    """Quotients of either sign, whole and not, of integers and of floats."""
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))

    def divided(i, j):
        return torch.div(i - j, 3, rounding_mode=mode) + torch.div(j - i, -4, rounding_mode=mode) + torch.div(
            0.3 * (i - 2 * j), 0.7, rounding_mode=mode
        )

    i, j = torch.arange(12)[:, None], torch.arange(12)[None]
    got = fulgurite.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + divided(i, j))
    want = fulgurite.attention(q, k, v, bias=divided(i, j).float()[None, None])
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="`rounding_mode` is 'up', allowed: None, 'floor', 'trunc'"):
        fulgurite.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + torch.div(i, 2, rounding_mode="up"))
